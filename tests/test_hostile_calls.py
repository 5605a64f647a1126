"""Custom calls that no Python of ours would make: random attributes, extents, types, workspaces. Each gives its results
or an error, soon; under sanitizers (`make sanitize`) also without overflows and without touching what is not theirs.

On a CPU only: a GPU's kernels are watched by compute-sanitizer (tests/sanitize.py).
"""

from __future__ import annotations

import faulthandler
import itertools
import math
import os
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

import direct_calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PLATFORM

from jaxconv._core import native

pytestmark = pytest.mark.skipif(PLATFORM != "cpu", reason="hostile calls are for the CPU; GPUs have tests/sanitize.py")

SEED = int(os.environ.get("JAXCONV_SEED", "0"))
ROUNDS = int(os.environ.get("JAXCONV_ROUNDS", "1"))  # of random calls
EXTREMES = (-(2**63), -(2**62), -(2**31), -2, -1, 0, 1, 2, 3, 5, 2**31 - 1, 2**31, 2**32, 2**61, 2**62, 2**63 - 1)
DTYPES = ("float32", "float64", "bfloat16", "float16", "int32", "uint8", "bool", "complex64")
KINDS = ("text", "", True, np.int64(1), np.int32(1), np.float32(1), np.float64(1), np.ones(2, np.int64), np.ones(3))
KINDS += (np.ones(0, np.int64), np.ones(2, np.int32), {}, {"stride": np.int64(1)})
ALGORITHMS = (
    "integer/output",
    "direct",
    "im2col",
    "depthwise",
    "gemm",
    "two_read",
    "gather",
    "one_pass",
    "",
    "implicit_gemm",
    "\u00e9",
)


@pytest.fixture(autouse=True)
def ends() -> Iterator[None]:
    """A call that hangs ends the run with its Python stack."""
    faulthandler.dump_traceback_later(120, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()


def answers(call: direct_calls.Call) -> bool:
    """Whether the call gave results rather than an error. Nothing takes longer than a second, compiling aside."""
    start = time.monotonic()
    try:
        with jax.enable_x64(True):
            call.run()
    except (jax.errors.JaxRuntimeError, ValueError, OverflowError, MemoryError):
        return False  # XLA's own refusals of shapes are ValueErrors
    finally:
        assert time.monotonic() - start < 20, call
    return True


# ----------------------------------------------------------------------------------------------------------------------
# Cases that crashed or looped


def conv_call(
    op: str,
    x: tuple[int, ...],
    w: tuple[int, ...],
    y: tuple[int, ...],
    algorithm: str = "im2col",
    last: bool = True,
    groups: int = 1,
    dtype: str = "float32",
    **window: Any,
) -> direct_calls.Call:
    """A call of conv_<op> with these shapes; `window` overrides a plain one."""
    nd = len(x) - 2
    ones, zeros = np.ones(nd, np.int64), np.zeros(nd, np.int64)
    attributes = {"stride": ones, "pad_low": zeros, "pad_high": zeros, "dilation": ones}
    attributes |= {name: np.asarray(values, np.int64) for name, values in window.items()}
    order = dict(dims_channels_last=np.int64(last), memory_channels_last=np.int64(last), full_float32=np.int64(0))
    attrs: dict[str, Any] = {"window": {**attributes, "groups": np.int64(groups), **order}}
    attrs["plan"] = dict(kernel=algorithm, tile="", splits=np.int64(1), chunk=np.int64(0))
    if op == "fprop":
        attrs["epilogue"] = dict(
            bias=np.int64(0), activation="none", slope=np.float64(0), save_preactivation=np.int64(0)
        )
    arrays = {"x": (x, dtype), "w": (w, dtype), "y": (y, dtype)}
    result = {"fprop": "y", "dgrad": "x", "wgrad": "w"}[op]
    operands = {name: arrays[name] for name in {"fprop": "xw", "dgrad": "yw", "wgrad": "xy"}[op]}
    return direct_calls.Call(f"jaxconv_conv_{op}_v2", attrs, operands, {result: arrays[result]})


# XLA's compiler walks over the extents in front of the first 0 of an empty array: the large ones stand behind it.
@pytest.mark.parametrize("algorithm", ["direct", "im2col", "depthwise"])
@pytest.mark.parametrize("memory_last", [True, False])
def test_an_empty_filter_of_many_taps_is_refused_at_once(algorithm, memory_last):
    """Nothing in memory bounds the taps of a filter without elements."""
    taps, pads = 2**30, dict(pad_low=[2**30 - 1] * 2, pad_high=[1, 1])
    call = conv_call("dgrad", (1, 1, 4, 4), (0, 1, taps, taps), (1, 0, 5, 5), algorithm, last=False, **pads)
    call.attrs["window"]["memory_channels_last"] = np.int64(memory_last)
    with pytest.raises(jax.errors.JaxRuntimeError, match="w is empty"):
        call.run()


IMPOSSIBLE = {
    "stride": dict(stride=[2**63 - 1, 1]),
    "stride_within_a_sum": dict(stride=[2**62, 1]),
    "dilation": dict(dilation=[2**63 - 1, 2**63 - 1]),
    "dilation_that_wraps": dict(dilation=[2**63, 1]),  # (3 - 1) * 2^63 is 0 in 64 bits
    "pads_that_cancel": dict(pad_low=[2**62, 0], pad_high=[-(2**62), 0]),
    "pads_that_wrap": dict(pad_low=[2**63 - 1, 0], pad_high=[2**63 - 1, 0]),
    "pads_at_the_lowest": dict(pad_low=[-(2**63), 0], pad_high=[-(2**63), 0]),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
@pytest.mark.parametrize("op", ["fprop", "dgrad", "wgrad"])
def test_a_window_beyond_64_bits_is_refused(op, name):
    window = {k: [int(np.uint64(v % 2**64).astype(np.int64)) for v in values] for k, values in IMPOSSIBLE[name].items()}
    first = 1 if name in ("stride", "stride_within_a_sum") else 3
    call = conv_call(op, (1, 5, 5, 2), (3, 3, 2, 4), (1, first, 3, 4), **window)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"extents disagree: .* axis 0"):
        call.run()


def test_a_span_that_wraps_to_a_small_number_is_refused():
    """What a window steps over, times the depth, is 2^64 and a little: small in 64 bits, and the height is 1."""
    step = 2**31 - 1
    span = 1 + 3 + 3 * step + 1  # in + out + pads + stride + window, of the width
    depth = 2**64 // span + 1
    assert 0 < span * depth - 2**64 < 2**33
    width = dict(stride=[1, 1, step], pad_low=[0, 0, step], pad_high=[0, 0, step])
    for d, taken in ((2**28, True), (depth, False)):
        call = conv_call("wgrad", (0, d, 1, 1, 1), (1, 1, 1, 1, 1), (0, d, 1, 3, 1), **width)
        if taken:
            np.testing.assert_array_equal(call.run()[0], np.zeros((1, 1, 1, 1, 1)))
        else:
            with pytest.raises(jax.errors.JaxRuntimeError, match=r"extents disagree: .* axis 2"):
                call.run()


@pytest.mark.parametrize("stride", [2**31 - 1, 2**31])
def test_the_largest_stride_works_and_the_next_is_refused(stride):
    call = conv_call("fprop", (1, 5, 5, 2), (3, 3, 2, 4), (1, 1, 1, 4), stride=[stride] * 2)
    if stride < 2**31:
        np.testing.assert_array_equal(call.run()[0], np.full((1, 1, 1, 4), 18.0))
    else:
        with pytest.raises(jax.errors.JaxRuntimeError, match="extents disagree"):
            call.run()


@pytest.mark.parametrize("algorithm", ["direct", "im2col", "depthwise"])
@pytest.mark.parametrize("last", [True, False])
def test_a_batch_of_none_may_have_any_extents(algorithm, last):
    """dw of no images is zero, however large they would be; beyond 2^62 products the shape is refused."""
    for size, taken in ((2**20, True), (2**29, True), (2**30, False)):
        x = (0, size, size, 1) if last else (0, 1, size, size)
        call = conv_call("wgrad", x, (3, 3, 1, 1) if last else (1, 1, 3, 3), x, algorithm, last)
        call.attrs["window"] |= dict(pad_low=np.array([1, 1]), pad_high=np.array([1, 1]))
        if taken:
            np.testing.assert_array_equal(np.asarray(call.run()[0]).ravel(), np.zeros(9))
        else:
            with pytest.raises(jax.errors.JaxRuntimeError):
                call.run()


def test_extents_are_bounded_also_where_there_are_no_elements():
    for size, taken in ((2**29, True), (2**29 + 1, False)):
        call = direct_calls.example("batchnorm_train")
        for arrays in (call.operands, call.results):
            for name in {"x", "residual", "y"} & set(arrays):
                arrays[name] = ((0, size, 2**29, 4), "float32")
        if taken:
            assert np.isnan(call.run()[3]).all()  # the mean of nothing
        else:
            with pytest.raises(jax.errors.JaxRuntimeError, match=r"must be at most 2\^60"):
                call.run()


def test_a_plan_out_of_bounds_is_refused():
    for name in ("splits", "chunk"):
        for value in (-1, 2**31, 2**63 - 1):
            call = direct_calls.example("conv_wgrad")
            call.attrs["plan"][name] = np.int64(value)
            with pytest.raises(jax.errors.JaxRuntimeError, match=rf"{name}={value}.* must be in"):
                call.run()


# ----------------------------------------------------------------------------------------------------------------------
# Random calls


def extent(rng: random.Random) -> int:
    return rng.choice((0, 1, 2, 3, 4, 5, 7, 2**31 - 1, 2**31, 2**40, 2**60, 2**62))


def sound(shape: tuple[int, ...]) -> bool:
    """Whether an array of this shape can be made here: few elements; of an empty one, small extents in front of the
    first 0 (XLA's compiler walks over them) and no product that numpy refuses."""
    before = math.prod(itertools.takewhile(bool, shape))
    return before < 2**12 and (0 not in shape or math.prod(max(e, 1) for e in shape) < 2**59)


def spoil(rng: random.Random, call: direct_calls.Call) -> None:
    """One change at random."""
    where = rng.choice(("attribute", "attribute", "shape", "shape", "type", "workspace", "fewer", "plan", "kind"))
    if where == "kind":  # an attribute of another kind, one too many, or one that is missing
        outer = rng.choice(list(call.attrs))
        inside = call.attrs[outer] if isinstance(call.attrs[outer], dict) and rng.random() < 0.8 else call.attrs
        name = rng.choice([*inside, "more"])
        inside[name] = rng.choice(KINDS)
        if rng.random() < 0.3:
            del inside[name]
    elif where == "attribute":
        outer = rng.choice(list(call.attrs))
        if not isinstance(call.attrs[outer], dict):
            call.attrs[outer] = np.int64(rng.choice(EXTREMES))
            return
        inner = rng.choice(list(call.attrs[outer]))
        old = call.attrs[outer][inner]
        if isinstance(old, str):
            call.attrs[outer][inner] = rng.choice((*ALGORITHMS, "none", "gelu", "row", "column", "scalar", "128x128"))
        elif isinstance(old, np.ndarray):
            some = [rng.choice((*EXTREMES, *old.tolist())) for _ in range(rng.choice((len(old), len(old), 0, 1, 3, 9)))]
            call.attrs[outer][inner] = np.array(some, np.int64)
        elif isinstance(old, np.floating):
            call.attrs[outer][inner] = np.float64(rng.choice((math.nan, math.inf, -math.inf, 0, -1, 1e308)))
        else:
            call.attrs[outer][inner] = np.int64(rng.choice(EXTREMES))
    elif where == "plan":
        call.attrs["plan"]["kernel"] = rng.choice(ALGORITHMS)
    elif where == "workspace":
        call.workspace = rng.choice((0, 1, 7, 4096))
    else:
        arrays = rng.choice((call.operands, call.results))
        if not arrays:
            return
        name = rng.choice(list(arrays))
        shape, dtype = arrays[name]
        if where == "fewer":
            if rng.random() < 0.5:
                del arrays[name]
            else:
                arrays["more"] = arrays[name]
        elif where == "type":
            arrays[name] = (shape, rng.choice(DTYPES))
        else:
            changed = list(shape)
            for _ in range(rng.choice((1, 1, 2))):
                if changed:
                    changed[rng.randrange(len(changed))] = extent(rng)
            if rng.random() < 0.2:
                changed.insert(rng.randrange(len(changed) + 1), extent(rng))
            if sound(tuple(changed)):
                arrays[name] = (tuple(changed), dtype)


def test_every_target_is_called():
    """By the examples, or by the next test."""
    called = {direct_calls.example(name).target for name in direct_calls.NAMES}
    assert {name for name in native.cpu.registrations() if not name.endswith("_v1")} == called


@pytest.mark.parametrize("name", [n for n in direct_calls.NAMES if not n.startswith(direct_calls.YOUNGER)])
def test_the_first_wire_version_is_refused_whatever_it_holds(name):
    rng = random.Random(f"{SEED} first {name}")
    for _ in range(4 * ROUNDS):
        call = direct_calls.example(name)
        call.target = call.target.removesuffix("_v2") + "_v1"
        spoil(rng, call)
        assert not (call.results and answers(call))  # what nobody reads is not called


@pytest.mark.parametrize("name", direct_calls.NAMES)
def test_random_changes_give_results_or_errors(name):
    rng = random.Random(f"{SEED} {name}")
    taken = 0
    for _ in range(20 * ROUNDS):
        call = direct_calls.example(name)
        for _ in range(rng.choice((1, 1, 2, 3))):
            spoil(rng, call)
        taken += answers(call)
    assert taken < 20 * ROUNDS  # a change that nothing notices is rare


def random_conv(rng: random.Random) -> direct_calls.Call:
    """A convolution whose extents agree, with any window that makes a small output."""
    nd, last, op = rng.choice((1, 2, 2, 3)), rng.random() < 0.5, rng.choice(("fprop", "dgrad", "wgrad"))
    groups, group_c, group_k = rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2, 5)), rng.choice((1, 2, 3))
    algorithm = rng.choice(("direct", "im2col", "depthwise") if group_c == 1 else ("direct", "im2col"))
    n, c, k = rng.choice((0, 1, 2)), groups * group_c, groups * group_k
    axes = []
    while len(axes) < nd:
        size, taps = rng.choice((0, 1, 2, 5, 9)), rng.choice((1, 1, 2, 3, 5))
        large = (2**31 - 1, 2**20, 1000)
        stride, dilation = rng.choice((1, 1, 2, 3, 7, *large)), rng.choice((1, 1, 2, 3, *large))
        low = rng.choice((0, 1, 2, -1, -3, dilation, *large, -1000, -(2**31) + 1))
        window = (taps - 1) * dilation + 1
        # The high pad makes one of a few outputs; half of the time what is left over is not a whole stride.
        rest = rng.choice((0, stride - 1, rng.randrange(stride)))
        out = rng.choice((1, 2, 4))
        high = (out - 1) * stride + rest + window - size - low
        if abs(high) < 2**31:
            axes.append((size, taps, out, stride, low, high, dilation))
    sizes, filter, outs, stride, low, high, dilation = map(tuple, zip(*axes, strict=True))
    x = (n, *sizes, c) if last else (n, c, *sizes)
    y = (n, *outs, k) if last else (n, k, *outs)
    w = (*filter, group_c, k) if last else (k, group_c, *filter)
    window_attrs = dict(stride=stride, pad_low=low, pad_high=high, dilation=dilation)
    dtype = rng.choice(("float32", "float64"))
    return conv_call(op, x, w, y, algorithm, last, groups, dtype, **window_attrs)


def brute(call: direct_calls.Call) -> np.ndarray:
    """The result for arrays of ones: how many products each element sums up."""
    window = {k: np.asarray(v) for k, v in call.attrs["window"].items()}
    arrays = {**call.operands, **call.results}
    last, groups = bool(window["dims_channels_last"]), int(window["groups"])
    (x, _), (w, _), (y, _) = arrays["x"], arrays["w"], arrays["y"]
    nd = len(x) - 2
    spatial = slice(1, -1) if last else slice(2, None)
    filter = w[:nd] if last else w[2:]
    hits = []  # of each axis: (output, tap, input) -> whether that product is there
    for size, taps, outs, s, low, d in zip(
        x[spatial], filter, y[spatial], window["stride"], window["pad_low"], window["dilation"], strict=True
    ):
        at = np.arange(outs)[:, None] * s - low + np.arange(taps) * d
        hits.append(at[:, :, None] == np.arange(size))
    (result,) = call.results
    keep = {"y": 0, "w": 1, "x": 2}[result]
    counts = np.ones(())
    for hit in hits:
        counts = np.multiply.outer(counts, hit.sum(tuple({0, 1, 2} - {keep})))
    c, k = (x[-1], y[-1]) if last else (x[1], y[1])
    counts = counts * {"y": c // groups, "x": k // groups, "w": x[0]}[result]
    shape, dtype = call.results[result]
    if result == "w":
        lead = counts[..., None, None] if last else counts[None, None]
    else:
        lead = counts[None, ..., None] if last else counts[None, None]
    return np.broadcast_to(lead, shape).astype(dtype)


@pytest.mark.parametrize("part", range(4))
def test_random_windows_are_right_or_refused(part):
    rng = random.Random(f"{SEED} windows {part}")
    right = 0
    for _ in range(40 * ROUNDS):
        call = random_conv(rng)
        try:
            with jax.enable_x64(True):
                (got,) = call.run()
        except jax.errors.JaxRuntimeError as error:
            assert "extents disagree" in str(error), call
            continue
        np.testing.assert_array_equal(np.asarray(got), brute(call), err_msg=str(call))
        right += jnp.size(got) > 0
    assert right > 10 * ROUNDS

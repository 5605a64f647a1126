"""Tensors of more than 2^31 elements, each extent in turn the long one, by every algorithm that takes them; and of more
than there is memory for.

On a GPU with 60 GiB and --all; elsewhere of 2^14 elements, so that this file is itself tested. Arrays hold integers, so
that sums are exact and results equal those of a window of the array, whose own indices are small.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import DEVICE, PLATFORM, calls
from jax import Array, lax

import jaxconv
from jaxconv import _plan, _problem

GIB = 2**30
FULL = PLATFORM == "cuda" and (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0) > 50 * GIB
LIMIT = 2**31 if FULL else 2**14
DTYPE = jnp.bfloat16
LAYOUTS = {1: "NWC", 2: "NHWC", 3: "NDHWC"}
WINDOW = 3  # pixels or images of a window
pytestmark = [pytest.mark.slow] if FULL else []


@dataclasses.dataclass(frozen=True)
class Case:
    """x's extents, channels last; the one that is None is as long as it takes."""

    shape: tuple[int | None, ...]
    filters: int = 16

    @property
    def axis(self) -> int:
        return self.shape.index(None)

    @property
    def x_shape(self) -> tuple[int, ...]:
        rest = int(np.prod([extent for extent in self.shape if extent is not None]))
        long = -(-(LIMIT // rest + 8) // 8) * 8
        return tuple(long if extent is None else extent for extent in self.shape)

    @property
    def nd(self) -> int:
        return len(self.shape) - 2

    @property
    def spatial(self) -> bool:
        """Whether the long extent is one of pixels."""
        return 0 < self.axis < len(self.shape) - 1

    @property
    def taps(self) -> int:
        return 1 if self.axis == len(self.shape) - 1 else 3

    @property
    def reach(self) -> int:
        """Of the filter along the long extent."""
        return self.taps // 2 if self.spatial else 0

    @property
    def w_shape(self) -> tuple[int, ...]:
        return (*(self.taps,) * self.nd, self.x_shape[-1], self.filters)


CASES = {
    "images": Case((None, 32, 32, 16)),
    "rows": Case((2, None, 128, 16)),
    "columns": Case((2, 4, None, 16)),
    "channels": Case((32, 8, 8, None), filters=8),
    "width of 1-D": Case((1, None, 16)),
    "depth of 3-D": Case((1, None, 32, 32, 16)),
}


@functools.partial(jax.jit, static_argnums=(0, 1))
def integers(shape: tuple[int, ...], seed: int) -> Array:
    """Integers in [-2, 2]."""
    mixed = jnp.full(shape, seed, jnp.uint32)
    for axis in range(len(shape)):
        mixed = (mixed ^ lax.broadcasted_iota(jnp.uint32, shape, axis)) * jnp.uint32(0x9E3779B1)
        mixed = mixed ^ (mixed >> 15)
    return ((mixed >> 8) % 5).astype(DTYPE) - 2


def windows(case: Case) -> list[int]:
    """Where windows begin: at both ends, and about 2^31 elements from the start."""
    long = case.x_shape[case.axis]
    inner = int(np.prod(case.x_shape[case.axis + 1 :]))
    return sorted({0, min(LIMIT // inner, long - WINDOW), long // 2, long - WINDOW})


def around(a: Array, case: Case, at: int, reach: int) -> Array:
    """The window of `a`, and `reach` more on either side along the long axis; zeros outside."""
    low, high = at - reach, at + WINDOW + reach
    axis, long = case.axis, a.shape[case.axis]
    part = lax.slice_in_dim(a, max(low, 0), min(high, long), axis=axis)
    pads = [(0, 0)] * a.ndim
    pads[axis] = (max(-low, 0), max(high - long, 0))
    return jnp.pad(part, pads)


def conv(case: Case, **options: Any) -> Callable[..., Array]:
    return functools.partial(getattr(jaxconv, f"conv{case.nd}d"), padding="SAME", **options)


def plain(case: Case, x: Array, w: Array) -> Array:
    """XLA's convolution of a window, which has its neighbours along the long axis already."""
    same = [(case.taps // 2, case.taps // 2)] * case.nd
    if case.spatial:
        same[case.axis - 1] = (0, 0)
    spatial = "DHW"[3 - case.nd :]
    return lax.conv_general_dilated(
        x, w, (1,) * case.nd, same, dimension_numbers=(f"N{spatial}C", f"{spatial}IO", f"N{spatial}C")
    )


def turned(w: Array) -> Array:
    return jnp.flip(w, range(w.ndim - 2)).swapaxes(-1, -2)


def algorithms(op: str, case: Case) -> Iterator[str]:
    arrays = (jax.ShapeDtypeStruct(shape, DTYPE) for shape in (case.x_shape, case.w_shape))
    settled = dict(
        stride=1, padding="SAME", dilation=1, groups=1, layout=LAYOUTS[case.nd], precision=None, activation=None
    )
    settled |= dict(return_preactivation=False, algorithm=None, implementation=None)
    p = _problem.ConvProblem.infer(f"conv{case.nd}d", case.nd, *arrays, None, **settled)
    for algorithm in _problem.CONV_ALGORITHMS:
        plan = _plan.made(op, algorithm, p, DEVICE)
        # im2col's columns of one image may be more than there is memory for.
        if isinstance(plan, _plan.Plan) and plan.workspace_bytes < 20 * GIB:
            yield algorithm


def assert_windows(case: Case, found: Array, expected: Callable[[int], Array]) -> None:
    for at in windows(case):
        part = lax.slice_in_dim(found, at, at + WINDOW, axis=case.axis)
        np.testing.assert_array_equal(np.asarray(part, np.float32), np.asarray(expected(at), np.float32), f"at {at}")


@pytest.mark.parametrize("name", CASES)
def test_fprop(name):
    case = CASES[name]
    x, w = integers(case.x_shape, 1), integers(case.w_shape, 2)
    if case.axis == x.ndim - 1:  # summed over; 2^20 products of at most 4 are exact
        some = 2**13 if FULL else 2**5
        want = sum(plain(case, x[..., i : i + some].astype(jnp.float32), w[..., i : i + some, :].astype(jnp.float32))
                   for i in range(0, x.shape[-1], some))  # fmt: skip
    tried = list(algorithms("conv_fprop", case))
    for algorithm in tried:
        y = jax.jit(conv(case, algorithm=algorithm))(x, w)
        if case.axis == x.ndim - 1:
            np.testing.assert_array_equal(np.asarray(y, np.float32), np.asarray(want.astype(DTYPE), np.float32))
        else:
            assert_windows(case, y, lambda at: plain(case, around(x, case, at, case.reach), w))
        del y
    assert tried


@pytest.mark.parametrize("name", [name for name in CASES if name != "channels"])
def test_dgrad(name):
    case = CASES[name]
    dy, w = integers((*case.x_shape[:-1], case.filters), 3), integers(case.w_shape, 2)
    x = jax.ShapeDtypeStruct(case.x_shape, DTYPE)
    tried = list(algorithms("conv_dgrad", case))
    for algorithm in tried:
        f = conv(case, algorithm=algorithm)
        dx = jax.jit(lambda dy, w, f=f: jax.linear_transpose(lambda x: f(x, w), x)(dy)[0])(dy, w)
        assert_windows(case, dx, lambda at: plain(case, around(dy, case, at, case.reach), turned(w)))
        del dx
    assert tried


@pytest.mark.parametrize("name", [name for name in CASES if name != "channels"])
def test_wgrad(name):
    """dy is zero but in the windows."""
    case = CASES[name]
    x = integers(case.x_shape, 1)

    @jax.jit
    def masked() -> Array:
        dy = integers((*case.x_shape[:-1], case.filters), 3)
        where = lax.broadcasted_iota(jnp.int32, dy.shape, case.axis)
        inside = functools.reduce(jnp.logical_or, [(where >= at) & (where < at + WINDOW) for at in windows(case)])
        return jnp.where(inside, dy, 0)

    dy = masked()
    w = jax.ShapeDtypeStruct(case.w_shape, jnp.float32)
    want, seen = 0, -1
    for at in windows(case):
        part = around(dy, case, at, 0).astype(jnp.float32)
        fresh = np.arange(at, at + WINDOW) > seen  # windows may overlap
        part = part * fresh.reshape([-1 if axis == case.axis else 1 for axis in range(part.ndim)])
        seen = at + WINDOW - 1
        some = around(x, case, at, case.reach).astype(jnp.float32)
        want += jax.linear_transpose(lambda w, some=some: plain(case, some, w), w)(part)[0]
    want, of = np.asarray(want.astype(DTYPE), np.float32), jax.ShapeDtypeStruct(case.w_shape, DTYPE)
    tried = list(algorithms("conv_wgrad", case))
    for algorithm in tried:
        f = conv(case, algorithm=algorithm)
        dw = jax.jit(lambda x, dy, f=f: jax.linear_transpose(lambda w: f(x, w), of)(dy)[0])(x, dy)
        np.testing.assert_array_equal(np.asarray(dw, np.float32), want, algorithm)
    assert tried


NORMED = {name: CASES[name] for name in ("images", "rows")}


@pytest.mark.parametrize("name", NORMED)
@pytest.mark.parametrize("algorithm", _problem.BATCHNORM_ALGORITHMS)
def test_batchnorm(name, algorithm):
    case = NORMED[name]
    x, ones, zeros = integers(case.x_shape, 1), jnp.ones(case.filters), jnp.zeros(case.filters)

    def f(x: Array) -> Any:
        how = dict(training=True, momentum=0.0, activation="relu", algorithm=algorithm)
        return jaxconv.batchnorm(x, ones, zeros, zeros, ones, **how)

    if (why := _refused(f, x)) is not None:
        pytest.skip(why)
    y, mean, var = jax.jit(f)(x)
    # Evenly spread integers of -2 .. 2: mean 0, variance 2; six deviations of the former
    allowed = 6 * np.sqrt(2 / (x.size / case.filters))
    assert np.abs(np.asarray(mean)).max() < allowed and np.abs(np.asarray(var) - 2).max() < 2 * allowed

    def one(at: int) -> Array:
        part = around(x, case, at, 0).astype(jnp.float32)
        return jnp.maximum((part - mean) / jnp.sqrt(var + 1e-5), 0)

    for at in windows(case):
        found = np.asarray(lax.slice_in_dim(y, at, at + WINDOW, axis=case.axis), np.float32)
        np.testing.assert_allclose(found, np.asarray(one(at)), rtol=2**-7, atol=2**-6)


def _refused(f: Callable[..., Any], *args: Any) -> str | None:
    try:
        jax.eval_shape(f, *args)
        jax.jit(f).lower(*args)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", NORMED)
def test_max_pool_and_its_gradient(name):
    case = NORMED[name]
    x = integers(case.x_shape, 1)
    f = functools.partial(jaxconv.max_pool, window=2, stride=2, implementation="native")

    @jax.jit
    def both(x: Array) -> tuple[Array, Array]:
        y, back = jax.vjp(f, x)
        return y, back(jnp.ones_like(y))[0]

    assert calls(both, x)
    y, dx = both(x)
    axis, step = case.axis, 2 if case.spatial else 1
    for at in windows(case):
        at -= at % step
        part = lax.slice_in_dim(x, at, at + 2, axis=axis)
        want, back = jax.vjp(functools.partial(jaxconv.max_pool, window=2, stride=2, implementation="xla"), part)
        found = lax.slice_in_dim(y, at // step, at // step + want.shape[axis], axis=axis)
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(want, np.float32))
        found = lax.slice_in_dim(dx, at, at + 2, axis=axis)
        np.testing.assert_array_equal(
            np.asarray(found, np.float32), np.asarray(back(jnp.ones_like(want))[0], np.float32)
        )


def test_dense():
    m, k = LIMIT // 16 + 8, 16
    x, w, bias = integers((m, k), 1), integers((k, 16), 2), jnp.arange(16, dtype=DTYPE)
    for algorithm in _problem.DENSE_ALGORITHMS:
        f = functools.partial(jaxconv.dense, activation="relu", algorithm=algorithm)
        if _refused(f, x, w, bias):
            continue
        y = jax.jit(f)(x, w, bias)
        for at in (0, m // 2, m - WINDOW):
            want = jnp.maximum(x[at : at + WINDOW].astype(jnp.float32) @ w.astype(jnp.float32) + bias, 0).astype(DTYPE)
            np.testing.assert_array_equal(np.asarray(y[at : at + WINDOW], np.float32), np.asarray(want, np.float32))


def test_groupnorm():
    case = CASES["images"]
    x, ones, zeros = integers(case.x_shape, 1), jnp.ones(case.filters), jnp.zeros(case.filters)
    for algorithm in _problem.GROUPNORM_ALGORITHMS:
        f = functools.partial(jaxconv.groupnorm, groups=4, activation="relu", algorithm=algorithm)
        if _refused(f, x, ones, zeros):
            continue
        y = jax.jit(f)(x, ones, zeros)
        for at in windows(case):
            want = jaxconv.groupnorm(
                around(x, case, at, 0), ones, zeros, groups=4, activation="relu", implementation="xla"
            )
            found = lax.slice_in_dim(y, at, at + WINDOW, axis=0)
            np.testing.assert_allclose(
                np.asarray(found, np.float32), np.asarray(want, np.float32), rtol=2**-7, atol=2**-7
            )


def test_squeeze_excite():
    case = CASES["images"]
    c = case.filters
    x, w = integers(case.x_shape, 1), jnp.ones((c, 4)) / c
    f = functools.partial(jaxconv.squeeze_excite, activation="silu")
    rest = w, jnp.ones(4), w.T, jnp.zeros(c)
    y = jax.jit(functools.partial(f, algorithm="one_pass"))(x, *rest)
    for at in windows(case):
        want = f(around(x, case, at, 0), *rest, implementation="xla")
        found = lax.slice_in_dim(y, at, at + WINDOW, axis=0)
        np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(want, np.float32), rtol=2**-7, atol=2**-7)


def test_layernorm():
    case = CASES["images"]
    x, ones, zeros = integers(case.x_shape, 1), jnp.ones(case.filters), jnp.zeros(case.filters)
    f = functools.partial(jaxconv.layernorm, algorithm="rows")
    if _refused(f, x, ones, zeros):
        pytest.skip("there is no such kernel here")
    y = jax.jit(f)(x, ones, zeros)
    for at in windows(case):
        want = jaxconv.layernorm(around(x, case, at, 0), ones, zeros, implementation="xla")
        found = lax.slice_in_dim(y, at, at + WINDOW, axis=0)
        np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(want, np.float32), rtol=2**-7, atol=2**-7)


def too_large() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Functions and operands that fit, of results that do not: beyond all memory, or beside an x of .6 of it."""
    limit = jax.devices()[0].memory_stats()["bytes_limit"]
    wide = -(-limit // 2**22 // 8) * 8
    images = int(0.6 * limit) // (2 * 64 * 64 * 64)
    x, c = jax.ShapeDtypeStruct((images, 64, 64, 64), DTYPE), jnp.ones(64)
    pixels, w = jnp.ones((1, 2048, 2048, 8), DTYPE), jnp.ones((1, 1, 8, wide), DTYPE)

    def of(algorithm: str) -> Callable[..., Any]:
        return functools.partial(jaxconv.conv2d, algorithm=algorithm)

    found: dict[str, Any] = {a: (of(a), (pixels, w)) for a in ("sm90", "implicit_gemm", "im2col", "direct")}
    found["dense"] = functools.partial(jaxconv.dense, algorithm="gemm"), (pixels.reshape(-1, 8), w[0, 0])
    norm = functools.partial(jaxconv.groupnorm, groups=8, implementation="native")
    found["groupnorm"] = norm, (x, c, c)
    train = functools.partial(jaxconv.batchnorm, training=True, implementation="native")
    found["batchnorm"] = train, (x, c, c, c, c)
    return found  # a pooling that large has more than 2^31 threads: tests/out_of_memory.py has one


@pytest.mark.skipif(not FULL, reason="it takes a GPU whose memory nobody else wants")
def test_out_of_memory_is_an_error_and_the_process_goes_on():
    x, w = integers((2, 9, 9, 16), 1), integers((3, 3, 16, 16), 2)
    want = np.asarray(jaxconv.conv2d(x, w, padding="SAME", implementation="native"), np.float32)
    tried = too_large()
    for name, (f, operands) in tried.items():
        given = [jnp.zeros(a.shape, a.dtype) if isinstance(a, jax.ShapeDtypeStruct) else a for a in operands]
        with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
            jax.block_until_ready(jax.jit(f)(*given))
        del given
        again = jaxconv.conv2d(x, w, padding="SAME", implementation="native")
        np.testing.assert_array_equal(np.asarray(again, np.float32), want, f"after {name}")

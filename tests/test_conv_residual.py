"""conv2d(..., residual=r): activation(conv(x, w) + b + r) by every kernel that adds on its way, and behind the rest."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference as ref
import pytest
from helpers import (
    DEVICE,
    DTYPES,
    H200,
    HOPPER,
    NAMED_ACTIVATIONS,
    NATIVE_IN_FLOAT64,
    calls,
    equations,
    integers,
    label,
    normal,
    opcodes,
    same_bits,
    types_of,
)
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from tolerance import assert_close, assert_exact, integers_for

import jaxconv
from jaxconv import _plan
from jaxconv._plan import Device, domain, measured, model
from jaxconv._problem import CHANNELS_FIRST, CHANNELS_LAST, ConvProblem

CONVS = {1: jaxconv.conv1d, 2: jaxconv.conv2d, 3: jaxconv.conv3d}
# x channels last, w, options: a tile's edge, strides, pads, groups, other ranks
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "3x3": ((2, 7, 9, 8), (3, 3, 8, 16), {}),
    "1x1": ((3, 5, 7, 16), (1, 1, 16, 24), {}),
    "strided": ((2, 9, 11, 8), (3, 2, 8, 8), dict(stride=(2, 1), padding=((0, 1), (2, 0)))),
    "groups": ((2, 6, 5, 8), (3, 3, 4, 16), dict(groups=2)),
    "depthwise": ((2, 6, 5, 8), (3, 3, 1, 16), dict(groups=8)),
    "odd": ((1, 5, 6, 3), (2, 2, 3, 5), dict(dilation=2)),
    "tiny": ((1, 3, 4, 2), (2, 2, 2, 3), {}),
    "1-D": ((2, 19, 8), (4, 8, 16), dict(padding="VALID")),
    "3-D": ((2, 4, 5, 3, 8), (2, 3, 1, 8, 8), dict(stride=(1, 2, 1))),
}
if DEVICE.platform == "cuda":  # more tiles than multiprocessors
    CASES |= {"1x1 tiles": ((2, 96, 96, 8), (1, 1, 8, 136), {}), "3x3 tiles": ((2, 96, 96, 16), (3, 3, 16, 72), {})}


@pytest.fixture(autouse=True)
def full_precision():
    """Products in float32 on a GPU too: TF32 would hide what is compared."""
    with jax.default_matmul_precision("highest"):
        yield


def y_shape(name: str) -> tuple[int, ...]:
    x, w, options = CASES[name]
    arrays = [jax.ShapeDtypeStruct(shape, "float32") for shape in (x, w)]
    plain = functools.partial(CONVS[len(x) - 2], implementation="xla", **options)
    return jax.eval_shape(plain, *arrays).shape


@functools.cache
def data(name: str, values: int | str) -> list[np.ndarray]:
    """x, w, b, residual, channels last: whole numbers up to `values`, or normal ones of that dtype."""
    x, w, _ = CASES[name]
    make = integers if isinstance(values, int) else normal
    return [make(seed, shape, values) for seed, shape in enumerate((x, w, (w[-1],), y_shape(name)))]


@functools.cache
def sums(name: str, values: int | str) -> np.ndarray:
    """conv(x, w), in float64."""
    x, w, _, _ = data(name, values)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        return np.asarray(CONVS[x.ndim - 2](x, w, implementation="xla", **CASES[name][2]))


def first(a: Any, filter: bool = False) -> Any:
    """A channels-last array channels first."""
    return np.moveaxis(a, (-1, -2), (0, 1)) if filter else np.moveaxis(a, -1, 1)


def placed(arrays: list[np.ndarray], last: bool, dtype: str) -> list[jax.Array]:
    x, w, b, r = arrays
    there = arrays if last else [first(x), first(w, True), b, first(r)]
    return [jnp.asarray(np.ascontiguousarray(a), dtype) for a in there]


def run(name: str, last: bool, *arrays: Any, **options: Any) -> Any:
    """conv of (x, w, b, residual)."""
    nd = len(CASES[name][0]) - 2
    layout = (CHANNELS_LAST if last else CHANNELS_FIRST)[nd]
    x, w, b, r = arrays
    return CONVS[nd](x, w, b, residual=r, layout=layout, precision="highest", **CASES[name][2], **options)


def problem(name: str, dtype: str = "float32", bias: bool = True, **options: Any) -> ConvProblem:
    x, w, given = CASES[name]
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in (x, w, (w[-1],))]
    settled: dict[str, Any] = dict(stride=1, padding="SAME", dilation=1, groups=1, layout=CHANNELS_LAST[len(x) - 2])
    settled |= dict.fromkeys(("activation", "precision", "algorithm", "implementation"))
    settled |= dict(return_preactivation=False, **given) | options
    return ConvProblem.infer("conv", len(x) - 2, *arrays[:2], arrays[2] if bias else None, **settled)


# ----------------------------------------------------------------------------------------------------------------------
# Numbers


EVERY = [(name, last, "float32") for name in CASES for last in (True, False)]
EVERY += [("3x3", True, dtype) for dtype in DTYPES if dtype != "float32"]


@pytest.mark.parametrize(("name", "last", "dtype"), EVERY)
def test_every_kernel_that_adds(name, last, dtype):
    """With whole numbers: the sum, rounded once; z saved and not; with a bias and without."""
    arrays, found = data(name, integers_for(dtype)), 0
    with types_of(dtype):
        specs = [plan.spec for plan in _plan.tiles("conv_add", problem(name, dtype, precision="highest"), DEVICE)]
        for spec, bias in itertools.product(specs, (True, False) if name == "3x3" else (True,)):
            x, w, b, r = placed(arrays, last, dtype)
            f = functools.partial(run, name, last, activation="relu", return_preactivation=True, algorithm=spec)
            compiled = jax.jit(f).lower(x, w, b if bias else None, r).compile()
            assert compiled.as_text().count('custom_call_target="jaxconv_conv_add_v2"') == 1
            y, z = compiled(x, w, b if bias else None, r)
            total = sums(name, integers_for(dtype)) + arrays[3] + (arrays[2] if bias else 0)
            total = total if last else first(total)
            assert_exact(z, total, f"{spec} z")
            assert_exact(y, np.maximum(total, 0), f"{spec} y")
            found += 1
    assert found >= 2


@pytest.mark.skipif(DEVICE.platform != "cuda", reason="a CPU has no shared memory that TMA fills again")
@pytest.mark.parametrize(("shape", "k"), [((64, 64, 64, 256), 128), ((256, 14, 14, 256), 1024)], ids=str)
def test_residuals_of_large_arrays(shape, k):
    """Stores of so much hold up reads of shared memory: where a stage was handed back before, other rows were added."""
    x, r = (jnp.asarray(normal(i, s), "bfloat16") for i, s in enumerate((shape, (*shape[:3], k))))
    w = jnp.zeros((1, 1, shape[3], k), "bfloat16")
    p = problem_of(shape, 1, k, activation=None)
    specs = [plan.spec for plan in _plan.tiles("conv_add", p, DEVICE) if plan.kernel.startswith("sm90")]
    for spec in specs:
        f = jax.jit(lambda x, w, r, spec=spec: (jaxconv.conv2d(x, w, residual=r, algorithm=spec) != r).sum())
        assert [int(f(x, w, r)) for _ in range(4)] == [0] * 4, spec
    assert DEVICE.compute_capability != (9, 0) or any(spec.startswith("sm90/resident") for spec in specs)


@pytest.mark.parametrize("activation", NAMED_ACTIVATIONS, ids=label)
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_every_activation(dtype, activation):
    arrays = data("3x3", dtype)
    total = sums("3x3", dtype) + arrays[2] + arrays[3]
    f = functools.partial(run, "3x3", True, *placed(arrays, True, dtype), activation=activation)
    by_lax = f(implementation="xla")
    expected, scale = ref.activate(activation, total), float(np.abs(total).max())
    assert_close(f(implementation="native"), by_lax, expected, 72, scale=scale)


@pytest.mark.parametrize("algorithm", ("sm90/product", "narrow/rows", "implicit_gemm", "im2col", "direct"))
def test_sixteen_bits_are_rounded_once(algorithm):
    """Where the kernel adds: a convolution that is rounded before the add would lose the small residual."""
    filter = 3 if algorithm == "narrow/rows" else 1
    x, w = jnp.full((1, 4, 4, 8), 16, "bfloat16"), jnp.zeros((filter, filter, 8, 8), "bfloat16")
    w = w.at[filter // 2, filter // 2].set(2)
    r = jnp.full((1, 4, 4, 8), 0.75, "bfloat16")
    b = jnp.full(8, 0.5, "bfloat16")  # 256 + 0.5 + 0.75 is 258 in steps of 2, and 256 + 0.5 is 256
    refusal = _plan.supports("conv_add", algorithm, problem_of((1, 4, 4, 8), filter, 8), DEVICE)
    if refusal:
        pytest.skip(refusal)
    y = jaxconv.conv2d(x, w, b, residual=r, algorithm=algorithm)
    assert (y == 258).all()


# narrow/rows: an octet of channels and several, slabs, no whole one, images that share a strip, strips of an image
NARROW: dict[str, tuple[tuple[int, ...], int, dict[str, Any]]] = {  # x, channels of y, options
    "one_pixel": ((1, 1, 1, 8), 8, {}),
    "8_to_8": ((2, 5, 6, 8), 8, {}),
    "16_to_16": ((3, 7, 5, 16), 16, {}),
    "32_to_32": ((5, 13, 11, 32), 32, {}),
    "16_to_56": ((3, 9, 8, 16), 56, {}),
    "8_to_128": ((3, 9, 8, 8), 128, {}),
    "valid": ((3, 9, 8, 16), 24, dict(padding="VALID")),
    "uneven": ((2, 9, 40, 24), 8, dict(padding=((0, 2), (2, 1)))),
    "strips": ((2, 5, 700, 16), 16, {}),
    "many": ((300, 21, 21, 16), 32, {}),
    "first": ((2, 16, 5, 6), 24, dict(layout="NCHW")),
}


@pytest.mark.skipif(not HOPPER, reason="narrow/rows needs compute capability 9.0")
@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize("case", [*NARROW, "4_to_16", "20_to_12"])
def test_narrow_adds_exactly(case, bias, dtype):
    """y alone, and with z."""
    four = {"4_to_16": ((2, 6, 84, 4), 16, {}), "20_to_12": ((2, 9, 10, 20), 12, {})}
    if case in four and dtype != "float32":
        pytest.skip("4 channels of 16 bits are no whole 16 bytes")
    shape, k, options = (NARROW | four)[case]
    last = "layout" not in options
    c = shape[-1 if last else 1]
    x, w = integers(0, shape, 1), integers(1, (3, 3, c, k) if last else (k, c, 3, 3), 1)
    exact = functools.partial(jaxconv.conv2d, implementation="xla", **options)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        total = np.asarray(exact(x.astype("float64"), w.astype("float64")))
    r, b = integers(2, total.shape, 8), integers(3, (k,), 8)
    total = total + r + ((b if last else b[:, None, None]) if bias else 0)
    x, w, r, b = (jnp.asarray(a, dtype) for a in (x, w, r, b))
    named: dict[str, Any] = dict(precision="default", algorithm="narrow/rows", activation="relu", **options)
    for saved in (False, True):

        def f(x: Any, w: Any, r: Any, *b: Any, saved: bool = saved) -> Any:
            return jaxconv.conv2d(x, w, *b, residual=r, return_preactivation=saved, **named)

        args = (x, w, r, *([b] if bias else []))
        assert calls(jax.jit(f), *args) == {"conv_add": 1}
        outs = jax.jit(f)(*args)
        y, z = outs if saved else (outs, total)
        assert_exact(y, np.maximum(total, 0), "y")
        assert_exact(z, total, "z")


@pytest.mark.skipif(not HOPPER, reason="narrow/rows needs compute capability 9.0")
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize(("n", "h", "c", "k"), [(1024, 42, 16, 16), (1024, 21, 32, 32), (16, 256, 8, 32)])
def test_narrow_adds_in_large_arrays(n, h, c, k, dtype):
    """Many rows a block: what is added is that pixel's, each time."""
    x, w, r = (
        jax.random.normal(jax.random.key(i), s, dtype) for i, s in enumerate(((n, h, h, c), (3, 3, c, k), (n, h, h, k)))
    )
    named: dict[str, Any] = dict(precision="default", algorithm="narrow/rows")
    f = jax.jit(lambda x, w, r: (jaxconv.conv2d(x, w, residual=r, **named) != r).sum())
    assert [int(f(x, jnp.zeros_like(w), r)) for _ in range(4)] == [0] * 4
    if dtype == "float32":  # the same products in the same order as without
        added = jax.jit(lambda *args: jaxconv.conv2d(*args[:2], residual=args[2], **named))(x, w, r)
        assert same_bits(added, jax.jit(lambda *args: jaxconv.conv2d(*args, **named))(x, w) + r)


# ----------------------------------------------------------------------------------------------------------------------
# Derivatives

CHECKED = [
    (i, a) for i, a in (("native", "gelu"), ("native", None), ("xla", "tanh")) if i in (*NATIVE_IN_FLOAT64, "xla")
]


@pytest.mark.parametrize(("implementation", "activation"), CHECKED)
def test_derivatives_of_both_modes_to_second_order(implementation, activation):
    bias = activation is not None
    with types_of("float64"):
        x, w, b, r = (jnp.asarray(a) for a in data("tiny", "float64"))

        def f(x: Any, w: Any, r: Any, *b: Any) -> Any:
            return run("tiny", True, x, w, b[0] if b else None, r, activation=activation, implementation=implementation)

        check_grads(f, (x, w, r, *([b] if bias else [])), 2)


@pytest.mark.parametrize("implementation", ("native", "xla"))
def test_a_gradient_is_one_dz_for_all(implementation):
    """dresidual is the array that dgrad and wgrad take, and nothing is computed that nobody asked for."""
    arrays = placed(data("3x3", "float32"), True, "float32")
    f = functools.partial(run, "3x3", True, activation="relu", implementation=implementation)

    def jaxpr(*argnums: int) -> Any:
        return equations(jax.grad(lambda *a: f(*a).sum(), argnums), *arrays)

    every = jaxpr(0, 1, 2, 3)
    assert (every["jaxconv_conv_add"], every["jaxconv_conv_dgrad"], every["jaxconv_conv_wgrad"]) == (1, 1, 1)
    assert every["select_n"] == 1  # dy where z > 0
    only = jaxpr(3)
    assert (only["jaxconv_conv_dgrad"], only["jaxconv_conv_wgrad"]) == (0, 0)
    _, pullback = jax.vjp(f, *arrays)
    dy = jnp.asarray(normal(9, y_shape("3x3")), "float32")
    np.testing.assert_array_equal(pullback(dy)[3], jnp.where(f(*arrays) > 0, dy, 0))


def test_what_is_no_activation_saves_nothing_but_the_operands():
    arrays = placed(data("3x3", "float32"), True, "float32")
    _, pullback = jax.vjp(functools.partial(run, "3x3", True, implementation="native"), *arrays)
    kept = sorted(a.shape for a in jax.tree.leaves(pullback) if a.ndim == 4)
    assert kept == sorted([arrays[0].shape, arrays[1].shape])


# ----------------------------------------------------------------------------------------------------------------------
# Transforms


@pytest.mark.parametrize(
    "last", (True, pytest.param(False, marks=pytest.mark.slow)), ids=("channels_last", "channels_first")
)
@pytest.mark.parametrize(
    "mapped", [m for m in itertools.product((0, None), repeat=4) if any(a == 0 for a in m)], ids=str
)
def test_vmap_over_any_operands(mapped, last):
    name = "groups"
    ones = [
        placed([integers(10 * i + j, a.shape) for j, a in enumerate(data(name, 2))], last, "float32") for i in range(2)
    ]
    given = [jnp.stack(pair) if axis == 0 else pair[0] for axis, *pair in zip(mapped, *ones, strict=True)]
    f = functools.partial(run, name, last, activation="relu", implementation="native")
    ours = jax.jit(jax.vmap(f, in_axes=mapped))(*given)
    for i in range(2):
        one = [a[i] if axis == 0 else a for axis, a in zip(mapped, given, strict=True)]
        np.testing.assert_array_equal(ours[i], f(*one))


DEVICES = jax.device_count()
over_meshes = pytest.mark.skipif(DEVICES < 2 or DEVICES % 2 == 1, reason="a mesh takes an even number of devices")
SPECS = {
    "n": (P("m"), P(), P(), P("m")),
    "h": (P(None, "m"), P(), P(), P(None, "m")),
    "c": (P(None, None, None, "m"), P(None, None, "m"), P(), P()),
    "k": (P(), P(None, None, None, "m"), P("m"), P(None, None, None, "m")),
    "residual alone": (P(), P(), P(), P("m")),
}


@over_meshes
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(
    ("kind", "implementation"),
    ((AxisType.Auto, "native"), (AxisType.Auto, None), (AxisType.Explicit, "native")),
    ids=str,
)
def test_split_over_a_mesh(kind, implementation, spec):
    """With whole numbers: where a sum is split the residual is added once."""
    arrays = [integers(0, (2, 8, 6, 8)), integers(1, (3, 3, 8, 8)), integers(2, (8,)), integers(3, (2, 8, 6, 8))]
    arrays = [jnp.asarray(a, "float32") for a in arrays]
    mesh = jax.make_mesh((2,), ("m",), axis_types=(kind,), devices=jax.devices()[:2])
    there = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, SPECS[spec], strict=True)]

    def f(x: Any, w: Any, b: Any, r: Any) -> Any:
        return jaxconv.conv2d(x, w, b, residual=r, activation="relu", implementation=implementation)

    expected = f(*arrays)
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(jax.jit(f)(*there), expected)
        ours = jax.jit(jax.grad(lambda *a: (f(*a) ** 2).sum(), (0, 1, 2, 3)))(*there)
    theirs = jax.grad(lambda *a: (f(*a) ** 2).sum(), (0, 1, 2, 3))(*arrays)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a, b)


@over_meshes
def test_what_is_split_by_images_is_not_gathered():
    mesh = jax.make_mesh((2,), ("m",), devices=jax.devices()[:2])
    args = [jnp.ones((4, 6, 6, 8)), jnp.ones((3, 3, 8, 8)), jnp.ones(8), jnp.ones((4, 6, 6, 8))]
    there = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(args, SPECS["n"], strict=True)]
    f = jax.jit(lambda x, w, b, r: jaxconv.conv2d(x, w, b, residual=r, implementation="native"))
    text = f.lower(*there).compile().as_text()
    assert not {"all-gather", "all-reduce", "all-to-all"} & {*opcodes(text)}
    assert f(*there).sharding.spec[0] == "m"


# ----------------------------------------------------------------------------------------------------------------------
# What is refused, nothing at all, cost, plans


def test_what_does_not_fit_is_named():
    x, w = jnp.ones((2, 5, 6, 4)), jnp.ones((3, 3, 4, 8))
    sentence = (
        r"conv2d: residual has shape \(2, 5, 6, 4\), expected \(2, 3, 3, 8\), that of the result\. x=\(2, 5, 6, 4\)"
    )
    with pytest.raises(ValueError, match=sentence):
        jaxconv.conv2d(x, w, stride=2, residual=x)
    with pytest.raises(
        TypeError, match=r"conv2d: all arrays must have one dtype, got x: float32, .*residual: bfloat16"
    ):
        jaxconv.conv2d(x, w, residual=jnp.ones((2, 5, 6, 8), "bfloat16"))
    with pytest.raises(TypeError, match="conv1d: residual must be an array, got float"):
        jaxconv.conv1d(x[0], w[0], residual=1.0)


def test_arrays_without_elements():
    f = functools.partial(jaxconv.conv2d, activation="relu", implementation="native")
    for n, c in ((0, 4), (2, 0)):
        r = jnp.full((n, 5, 6, 8), -1.0).at[..., 0].set(2)
        np.testing.assert_array_equal(f(jnp.ones((n, 5, 6, c)), jnp.ones((3, 3, c, 8)), residual=r), jnp.maximum(r, 0))


def test_the_add_is_counted():
    arrays = placed(data("3x3", "float32"), True, "float32")
    with_residual, without = (
        jaxconv.cost(functools.partial(run, "3x3", True))(*arrays[:3], r) for r in (arrays[3], None)
    )
    assert with_residual["flops"] - without["flops"] == arrays[3].size
    assert with_residual["bytes accessed"] - without["bytes accessed"] == arrays[3].nbytes


def problem_of(shape: tuple[int, ...], filter: int, k: int, groups: int = 1, **options: Any) -> ConvProblem:
    x = jax.ShapeDtypeStruct(shape, "bfloat16")
    w = jax.ShapeDtypeStruct((filter, filter, shape[3] // groups, k), "bfloat16")
    given = dict(stride=1, padding="SAME", dilation=1, groups=groups, activation="relu", layout="NHWC", precision=None)
    given |= dict(return_preactivation=False, algorithm=None, implementation=None) | options
    return ConvProblem.infer("conv2d", 2, x, w, jax.ShapeDtypeStruct((k,), "bfloat16"), **given)


def planned(*args: Any, **options: Any) -> _plan.Plan:
    return _plan.plan("conv_add", problem_of(*args, **options), H200)


def test_the_convolutions_own_kernel_adds(code_for_gpus):
    plan = planned((256, 14, 14, 256), 1, 1024)
    alone = dataclasses.replace(plan, reason="")
    assert (plan.implementation, plan.algorithm) == ("native", "sm90")
    assert plan.reason.endswith("; the residual is added in the same pass")
    forced = planned((256, 14, 14, 256), 1, 1024, algorithm=alone.spec)
    assert (forced.kernel, forced.tile) == (alone.kernel, alone.tile)


def test_what_adds_nothing_is_followed_by_an_add(code_for_gpus):
    plan = planned((256, 56, 56, 64), 3, 64, groups=64, algorithm="depthwise")
    assert str(plan) == "calls[two]"
    said = "a convolution, then an add: the convolution runs on depthwise"
    assert plan.reason.startswith(said) and "cannot add a residual" in plan.reason


def test_a_kernel_that_alone_is_no_faster_than_xla_adds_where_xla_would_pass_once_more(code_for_gpus, monkeypatch):
    monkeypatch.setattr(measured, "_recorded", lambda kind: ())
    monkeypatch.setattr(model, "predict", lambda *_: {})
    one = 256 * 14 * 14 * 1024 * 2 / 4.3e9  # ms, over y: 0.024
    for filter_, alone, native in ((1, 1.0, True), (1, 1.0 + 3 * one, False), (3, 0.9, True), (3, 1.0, False)):
        p = (256, 14, 14, 256), filter_, 1024
        op, kind, coordinates = measured.features("conv_fprop", problem_of(*p))
        entry = dict(op=op, kind=kind, coordinates=coordinates, case="x", xla_ms=1.0)
        monkeypatch.setattr(measured, "_learned", {})
        measured.learn(H200.kind, [entry | dict(native_ms={"sm90/product": alone})])
        plan = planned(*p)
        assert (plan.implementation == "native") == native, (filter_, alone, plan.reason)
        if filter_ == 1 and native:
            said = "sm90/product with the add is 1.05 times as fast as XLA's convolution and add"
            assert plan.reason.startswith(said)
        # Neither what was forced nor what the user tuned is asked again.
        assert str(planned(*p, implementation="xla")) == "calls[two]"
        monkeypatch.setenv("JAXCONV_DISABLE", "conv")
        assert str(planned(*p)) == "calls[two]"
        monkeypatch.delenv("JAXCONV_DISABLE")


def test_another_kernel_of_a_forced_family_adds(code_for_gpus):
    """sm90/halo_stream is 128 channels' own, and adds nothing."""
    p = (256, 28, 28, 128), 3, 128
    assert str(planned(*p, algorithm="sm90/halo_stream")) == "calls[two]"
    family = planned(*p, algorithm="sm90")
    assert family.implementation == "native" and family.kernel.startswith("sm90/product")


def test_another_kernel_adds_where_it_is_faster_than_a_pass_behind(code_for_gpus, monkeypatch):
    p = (256, 28, 28, 128), 3, 128
    op, kind, coordinates = measured.features("conv_fprop", problem_of(*p))
    for product, kernel in ((0.100, "sm90/product"), (0.500, "")):
        times = {"sm90/halo_stream": 0.090, "sm90/product": product}
        entry = dict(op=op, kind=kind, coordinates=coordinates, case="x", xla_ms=0.2, native_ms=times)
        monkeypatch.setattr(measured, "_learned", {})
        measured.learn(H200.kind, [entry])
        plan = planned(*p)
        assert (plan.kernel if plan.implementation == "native" else "") == kernel, plan.reason


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize(("size", "channels"), [(42, 16), (21, 32)])
def test_narrow_adds_where_the_convolution_is_its(size, channels, dtype, code_for_gpus):
    """A residual block's second convolution, also where the sum is saved."""
    for options in ({}, dict(activation=None), dict(return_preactivation=True)):
        p = problem_of((1024, size, size, channels), 3, channels, **{"precision": "default", **options})
        p = dataclasses.replace(p, dtype=dtype)
        plan = _plan.plan("conv_add", p, H200)
        assert (plan.implementation, plan.kernel, plan.workspace_bytes) == ("native", "narrow/rows", 0), plan.reason
        assert plan.reason.endswith("; the residual is added in the same pass")


def test_disabled_by_name(code_for_gpus, monkeypatch):
    monkeypatch.setenv("JAXCONV_DISABLE", "conv_add")
    plan = planned((256, 14, 14, 256), 1, 1024)
    assert str(plan) == "calls[two]" and plan.reason.endswith("JAXCONV_DISABLE=conv_add")


KERNELS = {
    "sm90/product": True,
    "sm90/product_swapped": True,
    "sm90/resident": True,
    "sm90/halo": True,
    "sm90/halo_stream": False,
    "implicit_gemm": True,
    "im2col": True,
    "direct": True,
    "narrow/rows": True,
    "stem": False,
    "depthwise/rows": False,
    "grouped/mma": False,
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_domain_says_which_kernels_add(kernel):
    p = dataclasses.replace(problem("1x1", "bfloat16"), in_channels=64, out_channels=64)
    refusal = domain.conv_refusal("conv_add", _plan.Plan("native", "", kernel, "", 1, 1), p, H200)
    assert (refusal == "it cannot add a residual") is not KERNELS[kernel]


def test_in_float32_halo_adds_nothing():
    p = dataclasses.replace(problem("3x3", "float32", precision="default"), in_channels=64, out_channels=64)
    plan = _plan.Plan("native", "", "sm90/halo")
    assert domain.conv_refusal("conv_add", plan, p, H200) == "it cannot add a residual"
    assert domain.conv_refusal("conv_fprop", plan, p, H200) is None


# ----------------------------------------------------------------------------------------------------------------------
# accelerate


def plain(x: Any, w: Any, stride: int = 1) -> Any:
    return lax.conv_general_dilated(x, w, (stride,) * 2, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


X = jnp.asarray(normal(0, (2, 6, 6, 8)), "float32")
W = jnp.asarray(normal(1, (3, 3, 8, 8)) / 8, "float32")
V = jnp.asarray(normal(2, (1, 1, 8, 8)) / 3, "float32")
B = jnp.asarray(normal(3, (8,)), "float32")
FORMS: dict[str, tuple[Any, list[str]]] = {
    "bias": (lambda x, h: jax.nn.relu(plain(h, W) + B + x), ["conv + bias + residual + relu"]),
    "the other order": (lambda x, h: jax.nn.silu(x + (plain(h, W) + B)), ["conv + bias + residual + silu"]),
    "no bias": (lambda x, h: jnp.tanh(plain(h, W) + x), ["conv + residual + tanh"]),
    "no activation": (lambda x, h: plain(h, W) + x, ["conv + residual"]),
    "z has other users": (lambda x, h: (lambda z: jax.nn.relu(z) + z)(plain(h, W) + x), ["conv + residual + relu"]),
    "two, the later": (
        lambda x, h: jax.nn.relu((plain(h, W) + B) + plain(x, V)),
        ["conv + bias", "conv + residual + relu"],
    ),
    "its sum has other users": (lambda x, h: (lambda c: jax.nn.relu(c + x) * c)(plain(h, W)), ["conv"]),
    "a number": (lambda x, h: jax.nn.relu(plain(h, W) + 1.0), ["conv"]),
    "its own input": (lambda x, h: jax.nn.relu(plain(h, W) + h), ["conv"]),
}


@pytest.mark.parametrize("form", FORMS)
def test_accelerate_takes_what_is_added(form):
    f, expected = FORMS[form]
    accelerated = jaxconv.accelerate(f)
    h = X[::-1]
    assert [finding.fused for finding in accelerated.report(X, h).replaced] == expected
    np.testing.assert_allclose(jax.jit(accelerated)(X, h), jax.jit(f)(X, h), rtol=2e-4, atol=2e-5)
    assert equations(accelerated, X, h)["jaxconv_conv_add"] == sum("residual" in text for text in expected)
    ours, theirs = (jax.grad(lambda *a, g=g: (g(*a) ** 2).sum(), (0, 1))(X, h) for g in (accelerated, f))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-4 * float(jnp.abs(b).max()))


def test_the_gradients_of_a_blocks_input_meet_in_a_dgrad():
    """x goes to the block's first convolution and to its residual: its gradient is added in the first one's."""

    def block(x: Any) -> Any:
        h = jax.nn.relu(plain(x, V) + B)
        return jax.nn.relu(plain(h, W) + B + x)

    accelerated = jaxconv.accelerate(block)
    found = equations(jax.grad(lambda x: accelerated(x).sum()), X)
    assert (found["jaxconv_conv_add"], found["jaxconv_conv_dgrad_add"], found["add_any"]) == (1, 1, 0)
    ours, theirs = (jax.grad(lambda x, f=f: (f(x) ** 2).sum())(X) for f in (accelerated, block))
    np.testing.assert_allclose(ours, theirs, rtol=2e-3, atol=1e-4 * float(jnp.abs(theirs).max()))


def test_tune_times_the_convolution_that_the_plan_is_made_with():
    """By itself, also where it is no call of its own: what it finds is what `conv_add`'s plan asks for."""
    module = importlib.import_module("jaxconv.tune")
    x, w, b = jnp.ones((2, 6, 6, 8)), jnp.ones((3, 3, 1, 8)), jnp.ones(8)

    def f(x: Any, w: Any, b: Any, **how: Any) -> Any:
        return jaxconv.conv2d(x, w, b, residual=x, groups=8, activation="relu", **how)

    assert [call.op for call in jaxconv.explain(f, platform="cpu")(x, w, b)] == ["conv_add"]
    (job,) = module._jobs(f, (x, w, b), {}, Device.current("cpu"))
    assert (job.op, len(job.operands), str(job.problem)) == ("conv", 3, "2x6x6 8->8 3x3 g8 float32 NHWC + bias")

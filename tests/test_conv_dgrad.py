"""dgrads with more in their kernel: an addend; an activation's derivative and a sum; a relu's and a batch-norm's sums,
and the signs that these read."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    DEVICE,
    H100,
    H200,
    HOPPER,
    NATIVE_IN_FLOAT64,
    PLATFORM,
    calls,
    equations,
    integers,
    normal,
    with_hoppers_code,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from tolerance import assert_close, assert_exact

import jaxconv
from jaxconv import _plan
from jaxconv._core import activations, native, sharding
from jaxconv._core.activations import Activation
from jaxconv._ops import conv, reference
from jaxconv._ops.batchnorm import infer, signs
from jaxconv._plan import domain, sm90, tuned
from jaxconv._problem import BatchNormProblem, ConvProblem

on_hopper = pytest.mark.skipif(not HOPPER, reason="these kernels need compute capability 9.0")
two_devices = pytest.mark.skipif(jax.device_count() < 2, reason="a mesh takes two devices")
KINDS = pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit), ids=str)


@pytest.fixture(autouse=True)
def exact_products():
    """Products in float32 on a GPU too: TF32 would hide what is compared."""
    with jax.default_matmul_precision("highest"):
        yield


CASES: dict[str, dict[str, Any]] = {
    "1x1": dict(shape=(2, 5, 6), c=8, k=16, filter=(1, 1)),
    "1x1_s2": dict(shape=(2, 5, 6), c=8, k=16, filter=(1, 1), stride=2),
    "3x3": dict(shape=(2, 5, 6), c=16, k=8, filter=(3, 3)),
    "3x3_s2": dict(shape=(2, 7, 6), c=8, k=8, filter=(3, 3), stride=2, padding=1),
    "2x2_s2": dict(shape=(2, 4, 6), c=8, k=8, filter=(2, 2), stride=2, padding=0),
    "first": dict(shape=(2, 5, 6), c=8, k=16, filter=(1, 1), layout="NCHW"),
    "first_s2": dict(shape=(2, 5, 6), c=8, k=16, filter=(1, 1), layout="NCHW", stride=2),
    "groups": dict(shape=(2, 5, 6), c=16, k=8, filter=(3, 3), groups=2),
    "1d": dict(shape=(2, 11), c=8, k=8, filter=(3,), layout="NWC"),
    "3d": dict(shape=(1, 3, 4, 5), c=8, k=8, filter=(3, 1, 1), layout="NDHWC"),
    "wide": dict(shape=(9, 33, 32), c=328, k=72, filter=(1, 1)),
}


def problem(shape, c, k, filter, *, layout="NHWC", groups=1, dtype="float32", **options) -> ConvProblem:
    n, *spatial = shape
    last = layout[-1] == "C"
    x = (n, *spatial, c) if last else (n, c, *spatial)
    w = (*filter, c // groups, k) if last else (k, c // groups, *filter)
    given = dict.fromkeys(("activation", "precision", "algorithm", "implementation"))
    given |= dict(stride=1, padding="SAME", dilation=1, return_preactivation=False, layout=layout, groups=groups)
    x, w = (jax.ShapeDtypeStruct(a, dtype) for a in (x, w))
    return ConvProblem.infer(f"conv{len(spatial)}d", len(spatial), x, w, None, **{**given, **options})


def arrays(p: ConvProblem, largest: int) -> list[jax.Array]:
    """dy, w, c."""
    shapes = (p.y_shape, p.w_shape, p.x_shape)
    return [jnp.asarray(integers(i, s, largest if i < 2 else 8), p.dtype) for i, s in enumerate(shapes)]


# ----------------------------------------------------------------------------------------------------------------------
# dgrad_add


def sums(p: ConvProblem, dy: Any, w: Any, c: Any) -> np.ndarray:
    with helpers.types_of("float64"):
        wide = dataclasses.replace(p, dtype="float64")
        dy, w, c = (jnp.asarray(np.asarray(a, np.float64)) for a in (dy, w, c))
        return np.asarray(reference.conv_dgrad(wide, dy, w)[0] + c)


@pytest.mark.parametrize("implementation", ("xla", "native", None), ids=helpers.label)
@pytest.mark.parametrize("case", CASES)
def test_dgrad_add_is_exact(case, implementation):
    p = problem(**CASES[case], implementation=implementation)
    args = arrays(p, 1)
    assert_exact(jax.jit(functools.partial(conv.dgrad_add, p))(*args), sums(p, *args))


@on_hopper
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("kernel", [f"sm90/{kernel} {tile}" for kernel, tile in sm90.PRODUCTS])
@pytest.mark.parametrize("case", [case for case in CASES if case != "groups"])
def test_every_tile_adds_exactly(case, kernel, dtype):
    p = problem(**CASES[case], dtype=dtype, algorithm=kernel)
    refusal = _plan.supports("conv_dgrad_add", kernel, p, DEVICE)
    if refusal:
        pytest.skip(f"{kernel} does not have it: {refusal}")
    args = arrays(p, 1)
    f = jax.jit(functools.partial(conv.dgrad_add, p))
    assert calls(f, *args) == {"conv_dgrad_add": 1}
    assert_exact(f(*args), sums(p, *args))
    assert_exact(args[2], np.asarray(arrays(p, 1)[2], np.float64))  # in place is not for what others need


# sm90/halo: gaps behind rows, images and planes, a second block of channels that is no whole one, more tiles than CTAs
HALO: dict[str, dict[str, Any]] = {
    "one_pixel": dict(shape=(1, 1, 1), c=8, k=8, filter=(3, 3)),
    "3x3": dict(shape=(2, 5, 6), c=16, k=24, filter=(3, 3)),
    "odd": dict(shape=(3, 7, 5), c=72, k=40, filter=(3, 3)),
    "wide": dict(shape=(5, 13, 11), c=200, k=64, filter=(3, 3)),
    "valid": dict(shape=(3, 9, 8), c=24, k=16, filter=(3, 3), padding="VALID"),
    "uneven": dict(shape=(3, 9, 8), c=24, k=8, filter=(2, 4), padding=((0, 1), (2, 1))),
    "dilated": dict(shape=(2, 17, 12), c=16, k=8, filter=(3, 3), dilation=2),
    "groups": dict(shape=(2, 9, 10), c=128, k=128, filter=(3, 3), groups=2),
    "1d": dict(shape=(3, 301), c=40, k=64, filter=(3,), layout="NWC"),
    "3d": dict(shape=(2, 3, 4, 5), c=8, k=16, filter=(2, 2, 2), layout="NDHWC"),
    "many": dict(shape=(80, 33, 31), c=64, k=16, filter=(3, 3)),
    "first": dict(shape=(2, 5, 6), c=16, k=24, filter=(3, 3), layout="NCHW"),
}

DEPTHWISE: dict[str, dict[str, Any]] = {
    "5x5": dict(shape=(2, 5, 6), c=8, filter=(5, 5)),
    "7x7": dict(shape=(3, 23, 31), c=24, filter=(7, 7)),
    "strips": dict(shape=(2, 9, 130), c=40, filter=(7, 7), padding=((2, 3), (0, 4))),
    "images": dict(shape=(70, 14, 14), c=64, filter=(7, 7)),
    "small_images": dict(shape=(300, 7, 7), c=136, filter=(7, 7)),
    "a_row": dict(shape=(37, 1, 9), c=8, filter=(5, 5)),
    "first": dict(shape=(2, 9, 12), c=16, filter=(5, 5), layout="NCHW"),
}


def depthwise_problem(case: str, **options: Any) -> ConvProblem:
    given = DEPTHWISE[case]
    return problem(**given, k=given["c"], groups=given["c"], **options)


@on_hopper
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("case", DEPTHWISE)
def test_a_depthwise_dgrad_adds(case, dtype):
    p = depthwise_problem(case, dtype=dtype, algorithm="depthwise/rows_mma")
    f = jax.jit(functools.partial(conv.dgrad_add, p))
    args = arrays(p, 1)
    assert calls(f, *args) == {"conv_dgrad_add": 1}
    assert_exact(f(*args), sums(p, *args))
    args = [jnp.asarray(normal(i, s), dtype) for i, s in enumerate((p.y_shape, p.w_shape, p.x_shape))]
    assert helpers.same_bits(f(*args), jax.jit(functools.partial(conv.dgrad, p))(*args[:2]) + args[2])


@pytest.mark.skipif(PLATFORM != "cpu", reason="a GPU's kernels with an addend are for 16 bits")
def test_forced_native_it_is_one_call():
    p = problem(**CASES["3x3_s2"], implementation="native")
    f = jax.jit(functools.partial(conv.dgrad_add, p))
    assert calls(f, *arrays(p, 2)) == {"conv_dgrad_add": 1}
    p = dataclasses.replace(p, implementation=None)
    assert calls(jax.jit(functools.partial(conv.dgrad_add, p)), *arrays(p, 2)) == {}


@pytest.mark.parametrize("implementation", ("xla", *NATIVE_IN_FLOAT64))
@pytest.mark.parametrize("case", ("1x1_s2", "first"))
def test_dgrad_add_has_derivatives_of_any_order(case, implementation, x64):
    p = problem(**CASES[case], dtype="float64", implementation=implementation)
    dy, w, c = (jnp.asarray(normal(i, s)) for i, s in enumerate((p.y_shape, p.w_shape, p.x_shape)))
    f = functools.partial(conv.dgrad_add, p)
    check_grads(f, (dy, w, c), order=2, modes=("fwd", "rev"), atol=1e-4, rtol=1e-4)
    # linear in dy and c
    ct = jnp.asarray(normal(4, p.x_shape))
    back = jax.linear_transpose(lambda dy, c: f(dy, w, c), dy, c)(ct)
    np.testing.assert_allclose(back[0], conv.fprop(p, ct, w), rtol=1e-12)
    np.testing.assert_array_equal(back[1], ct)


@pytest.mark.parametrize("mapped", ["100", "010", "001", "110", "101", "011", "111"])
@pytest.mark.parametrize("case", ("3x3_s2", "first", "groups"))
def test_dgrad_add_maps(case, mapped):
    p = problem(**CASES[case])
    axes = tuple(2 if m == "1" else None for m in mapped)
    args = [
        jnp.asarray(integers(i, (*s[:2], 3, *s[2:]) if axis == 2 else s), "float32")
        for i, (s, axis) in enumerate(zip((p.y_shape, p.w_shape, p.x_shape), axes, strict=True))
    ]
    f = jax.vmap(functools.partial(conv.dgrad_add, p), in_axes=axes)
    bare = jax.vmap(lambda dy, w, c: conv.dgrad(p, dy, w) + c, in_axes=axes)
    np.testing.assert_array_equal(f(*args), bare(*args))
    assert equations(f, *args)["jaxconv_conv_dgrad_add"] == 1


@on_hopper
@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
@pytest.mark.parametrize("case", HALO)
def test_halo_adds_exactly(case, dtype):
    p = problem(**HALO[case], dtype=dtype, algorithm="sm90/halo", precision="default")
    args = arrays(p, 1)
    f = jax.jit(functools.partial(conv.dgrad_add, p))
    assert calls(f, *args) == {"conv_dgrad_add": 1}
    assert_exact(f(*args), sums(p, *args))


# narrow/rows: one octet of channels and several, no whole slab, images that share a strip, strips of an image
NARROW: dict[str, dict[str, Any]] = {
    "one_pixel": dict(shape=(1, 1, 1), c=8, k=8, filter=(3, 3)),
    "8_of_8": dict(shape=(2, 5, 6), c=8, k=8, filter=(3, 3)),
    "16_of_32": dict(shape=(3, 7, 5), c=16, k=32, filter=(3, 3)),
    "32_of_32": dict(shape=(5, 13, 11), c=32, k=32, filter=(3, 3)),
    "56_of_16": dict(shape=(3, 9, 8), c=56, k=16, filter=(3, 3)),
    "128_of_8": dict(shape=(3, 9, 8), c=128, k=8, filter=(3, 3)),
    "valid": dict(shape=(3, 9, 8), c=24, k=16, filter=(3, 3), padding="VALID"),
    "uneven": dict(shape=(2, 9, 40), c=8, k=24, filter=(3, 3), padding=((0, 2), (2, 1))),
    "strips": dict(shape=(2, 5, 700), c=16, k=16, filter=(3, 3)),
    "many": dict(shape=(300, 21, 21), c=32, k=16, filter=(3, 3)),
    "first": dict(shape=(2, 5, 6), c=16, k=24, filter=(3, 3), layout="NCHW"),
}
# Pixels of 16 bytes, and channels that are no whole octet
NARROW_32 = {
    "16_of_4": dict(shape=(2, 6, 84), c=16, k=4, filter=(3, 3)),
    "12_of_20": dict(shape=(2, 9, 10), c=12, k=20, filter=(3, 3)),
}


@on_hopper
@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
@pytest.mark.parametrize("case", [*NARROW, *NARROW_32])
def test_narrow_adds_exactly(case, dtype):
    if case in NARROW_32 and dtype != "float32":
        pytest.skip("4 channels of 16 bits are no whole 16 bytes")
    p = problem(**(NARROW | NARROW_32)[case], dtype=dtype, algorithm="narrow/rows", precision="default")
    args = arrays(p, 1)
    f = jax.jit(functools.partial(conv.dgrad_add, p))
    assert calls(f, *args) == {"conv_dgrad_add": 1}
    assert_exact(f(*args), sums(p, *args))


@on_hopper
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("n, h, c, k", [(1024, 42, 16, 16), (1024, 21, 32, 32), (16, 256, 32, 8)])
def test_narrow_adds_in_large_arrays(n, h, c, k, dtype):
    """Many rows a block: what is added is that pixel's, each time."""
    p = problem((n, h, h), c, k, (3, 3), dtype=dtype, algorithm="narrow/rows", precision="default")
    keys = jax.random.split(jax.random.key(1), 3)
    dy, w, addend = (
        jax.random.normal(k, s, dtype) for k, s in zip(keys, (p.y_shape, p.w_shape, p.x_shape), strict=True)
    )
    f = jax.jit(functools.partial(conv.dgrad_add, p))
    for _ in range(4):
        assert helpers.same_bits(f(dy, jnp.zeros_like(w), addend), addend)
    if dtype == "float32":  # the same products in the same order as without
        assert helpers.same_bits(f(dy, w, addend), jax.jit(functools.partial(conv.dgrad, p))(dy, w) + addend)


# ----------------------------------------------------------------------------------------------------------------------
# The plan


@pytest.mark.parametrize(
    ("c", "k", "size", "filter", "stride", "kernel"),
    [
        (256, 64, 56, 1, 1, "sm90/resident 64x256"),
        (2048, 512, 7, 1, 1, "sm90/product 128x128"),
        (256, 512, 56, 1, 2, "sm90/product 128x128"),
        (64, 64, 56, 3, 1, "sm90/halo"),
        (128, 128, 56, 3, 1, None),  # sm90/halo_stream, which is the dgrad's, adds nothing
    ],
)
def test_what_the_plan_is_on_hopper(c, k, size, filter, stride, kernel, code_for_gpus):
    options = dict(shape=(256, size, size), c=c, k=k, filter=(filter, filter), stride=stride)
    p = problem(**options, dtype="bfloat16")
    made = _plan.plan("conv_dgrad_add", p, H200)
    if kernel is None:
        assert made.implementation == "calls" and "takes no addend" in made.reason
    else:
        # Where XLA's bare dgrad is faster too: it adds in a pass of its own.
        assert (made.implementation, made.spec) == ("native", kernel)
        assert made.in_place == (stride > 1) and "nearest case measured" in made.reason
        single = _plan.plan("conv_dgrad_add", problem(**options, dtype="float32"), H200)
        assert (single.implementation, single.kernel) == ("native", "sm90/product") or filter == 3
    unknown = _plan.plan("conv_dgrad_add", p, dataclasses.replace(H200, kind="none"))
    assert unknown.implementation == "calls" or "predicted to be" in unknown.reason
    forced = _plan.plan("conv_dgrad_add", dataclasses.replace(p, algorithm="implicit_gemm"), H200)
    assert forced.implementation == "calls" and "implicit_gemm" in forced.reason


def test_a_depthwise_dgrad_adds_on_hopper_where_its_kernel_is_the_dgrads(code_for_gpus):
    large = dict(c=96, k=96, groups=96, filter=(7, 7), dtype="bfloat16")
    made = _plan.plan("conv_dgrad_add", problem((256, 56, 56), **large), H200)
    assert (made.implementation, made.kernel, made.in_place) == ("native", "depthwise/rows_mma", False)
    for options in (dict(filter=(3, 3)), dict(dtype="float32"), dict(stride=2)):
        made = _plan.plan("conv_dgrad_add", problem((256, 56, 56), **{**large, **options}), H200)
        assert (
            made.implementation == "calls"
            and "only sm90, narrow and depthwise/rows_mma can add to a dgrad" in made.reason
        )


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize(("size", "channels"), [(42, 16), (21, 32)])
def test_a_narrow_dgrad_adds_on_hopper_where_its_kernel_is_the_dgrads(size, channels, dtype, code_for_gpus):
    p = problem((1024, size, size), channels, channels, (3, 3), dtype=dtype, precision="default")
    made = _plan.plan("conv_dgrad_add", p, H200)
    assert (made.implementation, made.kernel, made.workspace_bytes) == ("native", "narrow/rows", 0), made.reason
    assert made.reason.endswith("; c is added in the same pass") and not made.in_place


def test_calls_have_the_dgrads_own_plan_which_explain_shows():
    p = problem(**CASES["groups"])
    explained = jaxconv.explain(functools.partial(conv.dgrad_add, p))(*arrays(p, 1))
    found = {call.op: call.plan.implementation for call in explained}
    assert found == {"conv_dgrad_add": "calls", "conv_dgrad": "native" if PLATFORM == "cpu" else found["conv_dgrad"]}


@two_devices
@pytest.mark.parametrize("spec", ("n", "c", "k"))
@KINDS
def test_dgrad_add_split_over_a_mesh(kind, spec):
    """c is added once where the output channels are split, and the sum over their parts comes before."""
    p = problem(**CASES["3x3"], implementation="native")
    mesh = jax.make_mesh((2,), ("m",), axis_types=(kind,), devices=jax.devices()[:2])
    specs = {
        "n": (P("m"), P(), P("m")),
        "c": (P(), P(None, None, "m"), P(None, None, None, "m")),
        "k": (P(None, None, None, "m"), P(None, None, None, "m"), P()),
    }[spec]
    args = arrays(p, 1)
    placed = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(args, specs, strict=True)]
    assert_exact(jax.jit(functools.partial(conv.dgrad_add, p))(*placed), sums(p, *args))


# ----------------------------------------------------------------------------------------------------------------------
# gradient

BY_PIECES = ("none", "relu", "relu6", ("leaky_relu", 0.5), ("leaky_relu", -0.5), "elu", "tanh", "sigmoid")
OTHERS = ("silu", "gelu", "gelu_exact", "hard_swish")


def gradient_problem(case: dict[str, Any], activation: Any, **options: Any) -> ConvProblem:
    p = problem(**case, **options)
    f = activations.parse("", None if activation == "none" else activation)
    return dataclasses.replace(p, activation=f)


def gradient_args(p: ConvProblem, seed: int = 0) -> list[jax.Array]:
    """dy, w, kept, of which the derivative is exact: none is at a kink."""
    curved = p.activation.name in ("elu", "tanh", "sigmoid")
    kept = integers(seed + 2, p.x_shape, 1) / 2 if curved else integers(seed + 2, p.x_shape, 7) + 0.5
    return [jnp.asarray(a, p.dtype) for a in (integers(seed, p.y_shape, 1), integers(seed + 1, p.w_shape, 1), kept)]


def gradient_wanted(p: ConvProblem, dy: Any, w: Any, kept: Any, c: Any = 0) -> list[np.ndarray]:
    """dz and its sum, each rounded once."""
    with helpers.types_of("float64"):
        wide = dataclasses.replace(p.bare(), dtype="float64", implementation=None, algorithm=None)
        dy, w, kept, c = (jnp.asarray(np.asarray(a, np.float64)) for a in (dy, w, kept, c))
        dz = np.asarray(activations.activate_grad(p.activation, kept, reference.conv_dgrad(wide, dy, w)[0]) + c)
    dz = np.asarray(jnp.asarray(dz, p.dtype), np.float64)
    dbias = dz.sum(tuple(axis for axis in range(dz.ndim) if axis != p.channel_axis))
    return [dz, np.asarray(jnp.asarray(dbias, p.dtype), np.float64)]


def assert_goes_back(p: ConvProblem, outs: Sequence[jax.Array], args: Sequence[jax.Array]) -> None:
    """Each rounded once, of 16 bits: a sum may be infinite there."""
    for out, wanted in zip(outs, gradient_wanted(p, *args), strict=True):
        assert out.dtype == p.dtype
        np.testing.assert_array_equal(np.asarray(out, np.float64), wanted)


@pytest.mark.parametrize("implementation", ("xla", None), ids=helpers.label)
@pytest.mark.parametrize("activation", BY_PIECES, ids=helpers.label)
@pytest.mark.parametrize("case", ("3x3", "3x3_s2", "first", "groups", "3d"))
def test_the_gradient_is_exact(case, activation, implementation):
    p = gradient_problem(CASES[case], activation, implementation=implementation)
    args = gradient_args(p)
    outs = jax.jit(functools.partial(conv.gradient, p))(*args)
    assert [out.dtype.name for out in outs] == [p.dtype] * 2
    for got, want in zip(outs, gradient_wanted(p, *args), strict=True):
        assert_exact(got, want)


# sm90/product: no whole tile, several, columns of pixels that end inside a tile, a 1x1, which is a plain product
PRODUCT: dict[str, dict[str, Any]] = {
    "one_pixel": dict(shape=(1, 1, 1), c=8, k=8, filter=(3, 3)),
    "1x1": dict(shape=(3, 9, 7), c=72, k=40, filter=(1, 1)),
    "1x1_wide": dict(shape=(9, 33, 32), c=328, k=72, filter=(1, 1)),
    "3x3": dict(shape=(3, 7, 5), c=72, k=40, filter=(3, 3)),
    "3x3_wide": dict(shape=(5, 13, 11), c=264, k=136, filter=(3, 3)),
    "valid": dict(shape=(3, 9, 8), c=24, k=72, filter=(3, 3), padding="VALID"),
    "uneven": dict(shape=(3, 9, 8), c=24, k=8, filter=(2, 4), padding=((0, 1), (2, 1))),
    "dilated": dict(shape=(2, 17, 12), c=16, k=136, filter=(3, 3), dilation=2),
    "1d": dict(shape=(3, 301), c=40, k=64, filter=(3,), layout="NWC"),
    "3d": dict(shape=(2, 3, 4, 5), c=8, k=16, filter=(2, 2, 2), layout="NDHWC"),
    "many": dict(shape=(80, 33, 31), c=64, k=72, filter=(3, 3)),
    "first": dict(shape=(2, 5, 6), c=16, k=24, filter=(3, 3), layout="NCHW"),
}
PRODUCT_TILES = {
    "float32": ("128x256", "256x128", "128x128", "256x64", "128x320"),
    "16": ("128x128", "128x256", "256x128", "256x64"),
}


BACK = {"sm90/halo": HALO, "sm90/product": PRODUCT, "narrow/rows": NARROW}


@on_hopper
@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
@pytest.mark.parametrize("activation", BY_PIECES, ids=helpers.label)
@pytest.mark.parametrize("kernel, case", [(kernel, case) for kernel, cases in BACK.items() for case in cases])
def test_a_kernel_goes_back_exactly(kernel, case, activation, dtype):
    """A product by each tile."""
    tiles = PRODUCT_TILES["float32" if dtype == "float32" else "16"] if kernel == "sm90/product" else [""]
    for tile in tiles:
        named = dict(dtype=dtype, algorithm=f"{kernel} {tile}".rstrip(), precision="default")
        p = gradient_problem(BACK[kernel][case], activation, **named)
        f = jax.jit(functools.partial(conv.gradient, p))
        for seed in (0, 10):
            args = gradient_args(p, seed)
            assert calls(f, *args) == {"conv_gradient": 1}
            assert_goes_back(p, f(*args), args)


@on_hopper
@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
@pytest.mark.parametrize(
    "kernel, activation",
    [
        *itertools.product(("sm90/halo", "narrow/rows", "sm90/product"), BY_PIECES),
        *itertools.product(("sm90/product",), OTHERS),  # the others have no derivative of these
    ],
    ids=helpers.label,
)
def test_the_gradient_of_any_activation_is_as_exact_as_three_calls(kernel, activation, dtype):
    case = dict(shape=(5, 17, 15), c=32, k=32, filter=(3, 3))
    p = gradient_problem(case, activation, dtype=dtype, algorithm=kernel, precision="default")
    dy, w, z = (jnp.asarray(normal(i, s), "bfloat16") for i, s in enumerate((p.y_shape, p.w_shape, p.x_shape)))
    kept = activations.activate(p.activation, z) if p.activation.residual == "y" else z
    args = [a.astype(dtype) for a in (dy, w, kept)]
    outs = jax.jit(functools.partial(conv.gradient, p))(*args)
    dz, _ = gradient_wanted(p, *args)
    exact, images = (dz, dz.sum((0, 1, 2))), 5 * 17 * 15
    scales = np.abs(dz).max(), np.abs(dz).max() * np.sqrt(images)
    if dtype == "float32":  # the tensor cores' sums are not as exact as XLA's at "highest"
        for out, want, scale in zip(outs, exact, scales, strict=True):
            np.testing.assert_allclose(out, want, rtol=0, atol=2.0**-12 * scale)
        return
    xla = jax.jit(functools.partial(conv.gradient, dataclasses.replace(p, algorithm=None, implementation="xla")))
    for out, other, want, terms, scale in zip(outs, xla(*args), exact, (288, 288 + images), scales, strict=True):
        assert_close(out, other, want, terms, scale=scale)


@on_hopper
@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
@pytest.mark.parametrize(
    "kernel, n, h, c, k",
    [
        ("sm90/halo", 64, 56, 64, 64),
        ("sm90/halo", 32, 80, 128, 64),
        ("sm90/halo", 16, 80, 64, 8),
        ("sm90/product", 32, 112, 64, 128),
        ("sm90/product", 32, 56, 256, 256),
        ("narrow/rows", 1024, 42, 16, 16),
        ("narrow/rows", 1024, 21, 32, 32),
        ("narrow/rows", 16, 256, 32, 8),
    ],
)
def test_back_in_large_arrays(kernel, n, h, c, k, dtype):
    """Many tiles or rows a CTA, and sums that are the same each time."""
    p = gradient_problem(dict(shape=(n, h, h), c=c, k=k, filter=(3, 3)), "relu", dtype=dtype, precision="default")
    p = dataclasses.replace(p, algorithm=kernel)
    keys = jax.random.split(jax.random.key(1), 3)
    args = [jax.random.normal(key, s, dtype) for key, s in zip(keys, (p.y_shape, p.w_shape, p.x_shape), strict=True)]
    f = jax.jit(functools.partial(conv.gradient, p))
    dz, dbias = f(*args)
    # The same products in the same order as the dgrad's
    np.testing.assert_array_equal(dz, jnp.where(args[2] > 0, conv.dgrad(p.bare(), *args[:2]), 0))
    exact = np.asarray(dz, np.float64).sum((0, 1, 2))
    # Of a sum of n terms in float32, its parts' errors are those of independent roundings.
    size = np.sqrt(n * h * h) * float(jnp.abs(dz).max())
    np.testing.assert_allclose(np.asarray(dbias, np.float64), exact, rtol=float(jnp.finfo(dtype).eps), atol=1e-6 * size)
    for _ in range(3):
        for again, got in zip(f(*args), (dz, dbias), strict=True):
            np.testing.assert_array_equal(again, got)


@on_hopper
def test_halo_drops_what_a_relu_dropped():
    """As a choice, not a product: an infinity in dy comes through only where kept is positive."""
    p = gradient_problem(HALO["3x3"], "relu", dtype="bfloat16", algorithm="sm90/halo")
    dy, w, kept = gradient_args(p)
    dy = dy.at[0, 2, 2].set(jnp.inf)
    kept = jnp.where(jnp.arange(16) % 2 == 0, -1, jnp.abs(kept))
    dz, dbias = conv.gradient(p, dy, w, kept)
    assert not np.any(dz[..., ::2]) and not np.any(dbias[::2])
    assert not np.all(np.isfinite(np.asarray(dbias[1::2], np.float32)))


@pytest.mark.parametrize("activation", ("relu", "tanh", "silu"))
def test_the_gradient_has_derivatives_and_a_transpose(activation, x64):
    p = gradient_problem(CASES["3x3_s2"], activation, dtype="float64")
    dy, w, kept = (jnp.asarray(normal(i, s)) for i, s in enumerate((p.y_shape, p.w_shape, p.x_shape)))
    f = functools.partial(conv.gradient, p)
    check_grads(f, (dy, w, kept), order=2, modes=("fwd", "rev"), atol=1e-4, rtol=1e-4)
    cts = [jnp.asarray(normal(7, p.x_shape)), jnp.asarray(normal(8, (p.in_channels,)))]
    by_dy = jax.linear_transpose(lambda v: f(v, w, kept), dy)(cts)[0]
    np.testing.assert_allclose(by_dy, jax.vjp(f, dy, w, kept)[1](cts)[0], rtol=1e-12)


@pytest.mark.parametrize("mapped", ["100", "010", "001", "111"])
def test_the_gradient_maps(mapped):
    p = gradient_problem(CASES["3x3"], "relu")
    one, other = gradient_args(p), gradient_args(p, 10)
    axes = tuple(0 if m == "1" else None for m in mapped)
    args = [jnp.stack([a, b]) if axis == 0 else a for a, b, axis in zip(one, other, axes, strict=True)]
    outs = jax.vmap(functools.partial(conv.gradient, p), in_axes=axes)(*args)
    for i in range(2):
        wanted = gradient_wanted(p, *(a[i] if axis == 0 else a for a, axis in zip(args, axes, strict=True)))
        for got, want in zip(outs, wanted, strict=True):
            assert_exact(got[i], want)


@two_devices
@KINDS
@pytest.mark.parametrize("spec", ("n", "c", "k", "h"))
def test_the_gradient_split_over_a_mesh(spec, kind):
    p = gradient_problem(CASES["3x3"] | dict(shape=(4, 6, 5)), ("leaky_relu", 0.5))
    mesh = jax.make_mesh((2,), ("m",), axis_types=(kind,), devices=jax.devices()[:2])
    last = P(None, None, None, "m")
    specs = {
        "n": (P("m"), P(), P("m")),
        "c": (P(), P(None, None, "m"), last),
        "k": (last, last, P()),
        "h": (P(None, "m"), P(), P(None, "m")),
    }[spec]
    args = gradient_args(p)
    placed = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(args, specs, strict=True)]
    with jax.set_mesh(mesh):
        outs = list(jax.jit(functools.partial(conv.gradient, p))(*placed))
        if kind == AxisType.Auto:  # as where a kernel is planned: the rule, not XLA, says what a shard runs
            outs += jax.jit(sharding.auto(conv.gradient, p, mesh))(*placed)
    for got, want in zip(outs, gradient_wanted(p, *args) * (len(outs) // 2), strict=True):
        assert_exact(got, want)


def test_plans_of_the_gradient(code_for_gpus, monkeypatch):
    case = dict(shape=(256, 56, 56), c=64, k=64, filter=(3, 3))
    p = gradient_problem(case, "relu", dtype="bfloat16")
    made = _plan.plan("conv_gradient", p, H200)
    assert (made.implementation, made.kernel) == ("native", "sm90/halo"), made.reason
    # A part of 64 channels for each warpgroup of at most 256 CTAs
    assert made.workspace_bytes == 2 * 256 * 64 * 4 and "in the same pass" in made.reason
    small = dataclasses.replace(p, batch=1)
    assert domain.conv_workspace("conv_gradient", made, small) == 2 * (57 * 57 // 256 + 1) * 64 * 4
    first = gradient_problem({**case, "layout": "NCHW"}, "relu", dtype="bfloat16")
    assert _plan.plan("conv_gradient", first, H200).asks_channels_last
    single = gradient_problem(case, "relu", precision="default", implementation="native", algorithm="sm90/halo")
    assert _plan.plan("conv_gradient", single, H200).kernel == "sm90/halo"
    for other, why in (
        (dataclasses.replace(single, precision=(jax.lax.Precision.HIGHEST,) * 2, algorithm=None), ""),
        (gradient_problem({**case, "groups": 64}, "relu", dtype="bfloat16"), "only sm90 and narrow go back"),
        (dataclasses.replace(p, activation=Activation("silu"), algorithm="sm90/halo"), "no derivative of silu"),
        (dataclasses.replace(p, algorithm="sm90/halo_stream"), "cannot go back through relu here"),
    ):
        left = _plan.plan("conv_gradient", other, H200)
        assert str(left) == "calls[three]" and why in left.reason, left.reason
    for f in (*BY_PIECES, *OTHERS):
        q = gradient_problem(case, f, dtype="bfloat16")
        assert (_plan.supports("conv_gradient", "sm90/halo", q, H200) is None) == (f in BY_PIECES)
        assert _plan.supports("conv_gradient", "sm90/product", q, H200) is None
    for forced in (dict(algorithm="sm90"), dict(implementation="native"), dict(algorithm="sm90/product 256x64")):
        wide = dataclasses.replace(p, in_channels=256, out_channels=256, **forced)
        assert _plan.plan("conv_gradient", wide, H200).kernel == "sm90/product"
    # XLA's dgrad is faster, but not with the passes behind it; a kernel that cannot leaves it to another.
    large = dataclasses.replace(p, in_channels=128, out_channels=128)
    assert _plan.plan("conv_dgrad", large.bare(), H200).implementation == "xla"
    made = _plan.plan("conv_gradient", large, H200)
    assert (made.implementation, made.kernel) == ("native", "sm90/product") and "with the derivative" in made.reason
    with monkeypatch.context() as patched:  # no model, and no table
        patched.setattr("jaxconv._plan.model.model", lambda: None)
        assert str(_plan.plan("conv_gradient", p, dataclasses.replace(H200, kind="none"))) == "calls[three]"
    few = gradient_problem(dict(shape=(1024, 21, 21), c=32, k=32, filter=(3, 3)), "relu", precision="default")
    made = _plan.plan("conv_gradient", few, H200)
    assert (made.implementation, made.kernel, made.workspace_bytes) == ("native", "narrow/rows", 256 * 32 * 4)
    # Without an activation narrow reads nothing for it, as others do.
    assert _plan.plan("conv_gradient", few.bare(), H200).kernel == "narrow/rows"
    left = _plan.plan("conv_gradient", p.bare(), H200)
    assert str(left) == "calls[three]" and "sm90/halo reads as much as a pass that sums up" in left.reason
    assert "no derivative of gelu" in _plan.supports(
        "conv_gradient", "narrow", dataclasses.replace(few, activation=Activation("gelu")), H200
    )
    cpu = _plan.plan("conv_gradient", p, _plan.Device("cpu"))
    assert str(cpu) == "calls[three]" and "CUDA only" in cpu.reason


@with_hoppers_code
@pytest.mark.parametrize("dtype, short", [("float32", "f32"), ("bfloat16", "bf16")])
@pytest.mark.parametrize("activation, name", [(jax.nn.relu, "relu"), (jnp.tanh, "tanh")])
def test_the_gradient_between_convolutions_is_one_call_on_a_gpu(activation, name, dtype, short, code_for_gpus):
    """As lowered, of y, with the bias' sum; the second convolution's own gradient has no convolution behind it."""
    shapes = (1024, 21, 21, 32), (3, 3, 32, 32), (32,), (3, 3, 32, 32), (32,)
    args = [jax.ShapeDtypeStruct(s, dtype) for s in shapes]

    @jaxconv.accelerate
    def f(x, w1, b1, w2, b2):
        for w, b in ((w1, b1), (w2, b2)):
            x = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")) + b
            x = activation(x)
        return x.sum()

    with _plan.Device.assumed(H200), jax.default_matmul_precision("default"):
        traced = jax.jit(jax.value_and_grad(f, tuple(range(5)))).trace(*args)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    (call,) = (line for line in text.splitlines() if "@jaxconv_conv_gradient_v2" in line)
    image, workspace = f"tensor<1024x21x21x32x{short}>", f"tensor<{256 * 32 * 4}xui8>"
    types = call.rpartition(" : ")[2]
    assert types == f"({image}, tensor<3x3x32x32x{short}>, {image}) -> ({image}, tensor<32x{short}>, {workspace})"
    for attribute in (f'activation = "{name}"', "bias = 0", "save_preactivation = 0", 'kernel = "narrow/rows"'):
        assert attribute in call, attribute


def test_a_chosen_dgrad_is_not_overruled(code_for_gpus, monkeypatch):
    """By tuning or JAXCONV_DISABLE, XLA's is left with what follows; so is any without native code."""
    p = gradient_problem(dict(shape=(256, 56, 56), c=64, k=64, filter=(3, 3)), "relu", precision="default")
    both = {"conv_gradient": p, "conv_dgrad_add": p.bare()}
    for op, problem in both.items():
        assert _plan.plan(op, problem, H200).implementation == "native"
    e = tuned.Entry(
        "conv_dgrad", tuned.key_of(p.bare()), "", H200.kind, *tuned.versions(), 0.1, {"sm90/halo": 1.0}, "xla"
    )
    with jaxconv.tune.applied(tuned.Results([e])):
        for op, problem in both.items():
            made = _plan.plan(op, problem, H200)
            assert made.implementation == "calls" and "tuned on this device" in made.reason
    symbolic = dataclasses.replace(p, batch=jax.export.symbolic_shape("b")[0])
    assert "symbolic" in _plan.plan("conv_gradient", symbolic, H200).reason
    monkeypatch.setenv("JAXCONV_DISABLE", "conv_dgrad")
    for op, problem in both.items():
        made = _plan.plan(op, problem, H200)
        assert made.implementation == "calls" and "JAXCONV_DISABLE" in made.reason


def test_the_gradient_without_native_code(monkeypatch):
    monkeypatch.setattr(native, "cuda_missing", "built without CUDA")
    p = gradient_problem(dict(shape=(256, 56, 56), c=64, k=64, filter=(3, 3)), "relu", dtype="bfloat16")
    made = _plan.plan("conv_gradient", p, H200)
    assert str(made) == "calls[three]" and "built without CUDA" in made.reason


def test_the_gradient_turned_off(code_for_gpus, monkeypatch):
    p = gradient_problem(dict(shape=(256, 56, 56), c=64, k=64, filter=(3, 3)), "relu", dtype="bfloat16")
    monkeypatch.setenv("JAXCONV_DISABLE", "conv_gradient")
    left = _plan.plan("conv_gradient", p, H200)
    assert str(left) == "calls[three]" and "JAXCONV_DISABLE" in left.reason
    assert _plan.plan("conv_dgrad", p.bare(), H200).implementation == "native"


# ----------------------------------------------------------------------------------------------------------------------
# gradient_add


def added_args(p: ConvProblem, seed: int = 0) -> list[jax.Array]:
    """gradient's and c."""
    return [*gradient_args(p, seed), jnp.asarray(integers(seed + 3, p.x_shape, 8), p.dtype)]


@pytest.mark.parametrize("implementation", ("xla", None), ids=helpers.label)
@pytest.mark.parametrize("activation", BY_PIECES, ids=helpers.label)
@pytest.mark.parametrize("case", ("3x3", "3x3_s2", "first", "groups", "3d"))
def test_the_gradient_with_an_addend_is_exact(case, activation, implementation):
    p = gradient_problem(CASES[case], activation, implementation=implementation)
    args = added_args(p)
    outs = jax.jit(functools.partial(conv.gradient_add, p))(*args)
    assert [out.dtype.name for out in outs] == [p.dtype] * 2
    for got, want in zip(outs, gradient_wanted(p, *args), strict=True):
        assert_exact(got, want)


@on_hopper
@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
@pytest.mark.parametrize("activation", BY_PIECES, ids=helpers.label)
@pytest.mark.parametrize("case", [*NARROW, *NARROW_32])
def test_narrow_goes_back_and_adds_exactly(case, activation, dtype):
    if case in NARROW_32 and dtype != "float32":
        pytest.skip("4 channels of 16 bits are no whole 16 bytes")
    named = dict(dtype=dtype, algorithm="narrow/rows", precision="default")
    p = gradient_problem((NARROW | NARROW_32)[case], activation, **named)
    f = jax.jit(functools.partial(conv.gradient_add, p))
    for seed in (0, 10):
        args = added_args(p, seed)
        assert calls(f, *args) == {"conv_gradient_add": 1}
        assert_goes_back(p, f(*args), args)


@on_hopper
@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
@pytest.mark.parametrize("n, h, c, k", [(1024, 42, 16, 16), (1024, 21, 32, 32), (16, 256, 32, 8)])
def test_narrow_goes_back_and_adds_in_large_arrays(n, h, c, k, dtype):
    """Many rows a block: what is added is that pixel's; sums are the same each time."""
    p = gradient_problem(dict(shape=(n, h, h), c=c, k=k, filter=(3, 3)), "relu", dtype=dtype, precision="default")
    p = dataclasses.replace(p, algorithm="narrow/rows")
    keys, shapes = jax.random.split(jax.random.key(1), 4), (p.y_shape, p.w_shape, p.x_shape, p.x_shape)
    args = [jax.random.normal(key, s, dtype) for key, s in zip(keys, shapes, strict=True)]
    f = jax.jit(functools.partial(conv.gradient_add, p))
    assert helpers.same_bits(f(args[0], jnp.zeros_like(args[1]), *args[2:])[0], args[3])
    dz, dbias = f(*args)
    if dtype == "float32":  # the same products in the same order as without
        bare = jax.jit(functools.partial(conv.dgrad, p.bare()))(*args[:2])
        assert helpers.same_bits(dz, jnp.where(args[2] > 0, bare, 0) + args[3])
    exact = np.asarray(dz, np.float64).sum((0, 1, 2))
    # Of a sum of n terms in float32, its parts' errors are those of independent roundings.
    size = np.sqrt(n * h * h) * float(jnp.abs(dz).max())
    np.testing.assert_allclose(np.asarray(dbias, np.float64), exact, rtol=float(jnp.finfo(dtype).eps), atol=1e-6 * size)
    for _ in range(3):
        assert helpers.same_bits(f(*args), [dz, dbias])


@pytest.mark.parametrize("activation", ("relu", "tanh", "silu"))
def test_the_gradient_with_an_addend_has_derivatives(activation, x64):
    p = gradient_problem(CASES["3x3_s2"], activation, dtype="float64")
    shapes = p.y_shape, p.w_shape, p.x_shape, p.x_shape
    args = [jnp.asarray(normal(i, s)) for i, s in enumerate(shapes)]
    check_grads(functools.partial(conv.gradient_add, p), args, order=2, modes=("fwd", "rev"), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mapped", ["1000", "0001", "1111"])
def test_the_gradient_with_an_addend_maps(mapped):
    p = gradient_problem(CASES["3x3"], "relu")
    one, other = added_args(p), added_args(p, 10)
    axes = tuple(0 if m == "1" else None for m in mapped)
    args = [jnp.stack([a, b]) if axis == 0 else a for a, b, axis in zip(one, other, axes, strict=True)]
    outs = jax.vmap(functools.partial(conv.gradient_add, p), in_axes=axes)(*args)
    for i in range(2):
        wanted = gradient_wanted(p, *(a[i] if axis == 0 else a for a, axis in zip(args, axes, strict=True)))
        for got, want in zip(outs, wanted, strict=True):
            assert_exact(got[i], want)


@two_devices
@KINDS
@pytest.mark.parametrize("spec", ("n", "c", "k", "h"))
def test_the_gradient_with_an_addend_split_over_a_mesh(spec, kind):
    """c is added once."""
    p = gradient_problem(CASES["3x3"] | dict(shape=(4, 6, 5)), ("leaky_relu", 0.5))
    mesh = jax.make_mesh((2,), ("m",), axis_types=(kind,), devices=jax.devices()[:2])
    last = P(None, None, None, "m")
    specs = {
        "n": (P("m"), P(), P("m"), P("m")),
        "c": (P(), P(None, None, "m"), last, last),
        "k": (last, last, P(), P()),
        "h": (P(None, "m"), P(), P(None, "m"), P(None, "m")),
    }[spec]
    args = added_args(p)
    placed = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(args, specs, strict=True)]
    with jax.set_mesh(mesh):
        outs = list(jax.jit(functools.partial(conv.gradient_add, p))(*placed))
        if kind == AxisType.Auto:  # as where a kernel is planned: the rule, not XLA, says what a shard runs
            outs += jax.jit(sharding.auto(conv.gradient_add, p, mesh))(*placed)
    for got, want in zip(outs, gradient_wanted(p, *args) * (len(outs) // 2), strict=True):
        assert_exact(got, want)


def test_plans_of_the_gradient_with_an_addend(code_for_gpus, monkeypatch):
    few = gradient_problem(dict(shape=(1024, 21, 21), c=32, k=32, filter=(3, 3)), "relu", precision="default")
    made = _plan.plan("conv_gradient_add", few, H200)
    assert (made.implementation, made.kernel, made.workspace_bytes) == ("native", "narrow/rows", 256 * 32 * 4)
    assert made.reason.endswith("; c is added in the same pass")
    wide = gradient_problem(dict(shape=(256, 56, 56), c=64, k=64, filter=(3, 3)), "relu", dtype="bfloat16")
    assert _plan.plan("conv_gradient", wide, H200).kernel == "sm90/halo"
    forced = dict(algorithm="narrow/rows")
    for p, device, why in (
        (wide, H200, "sm90/halo cannot add here: only narrow adds"),
        (dataclasses.replace(few, activation=Activation("gelu"), **forced), H200, "no derivative of gelu"),
        (dataclasses.replace(few, implementation="xla"), H200, "asked for"),
        (few, _plan.Device("cpu"), "CUDA only"),
    ):
        left = _plan.plan("conv_gradient_add", p, device)
        assert str(left) == "calls[two]" and why in left.reason, left.reason
    assert _plan.plan("conv_gradient_add", dataclasses.replace(few, **forced), H200).kernel == "narrow/rows"
    monkeypatch.setenv("JAXCONV_DISABLE", "conv_gradient_add")
    left = _plan.plan("conv_gradient_add", few, H200)
    assert str(left) == "calls[two]" and "JAXCONV_DISABLE" in left.reason
    assert _plan.plan("conv_gradient", few, H200).implementation == "native"


@with_hoppers_code
@pytest.mark.parametrize("dtype, short", [("float32", "f32"), ("bfloat16", "bf16")])
def test_a_blocks_gradient_is_one_call_a_convolution_on_a_gpu(dtype, short, code_for_gpus):
    """Of x + conv(relu(conv(relu(x)))), as lowered: no dgrad is left alone but that of the first convolution."""
    images, filters = (1024, 21, 21, 32), (3, 3, 32, 32)
    args = [jax.ShapeDtypeStruct(s, dtype) for s in (images, *[filters, (32,)] * 3)]

    @jaxconv.accelerate
    def f(x, *weights):
        def layer(x, w, b):
            return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")) + b

        x = layer(x, *weights[:2])
        return (x + layer(jax.nn.relu(layer(jax.nn.relu(x), *weights[2:4])), *weights[4:])).sum()

    with _plan.Device.assumed(H200), jax.default_matmul_precision("default"):
        text = jax.jit(jax.grad(f, tuple(range(7)))).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = (line for line in text.splitlines() if "@jaxconv_conv_gradient_add_v2" in line)
    image, workspace = f"tensor<1024x21x21x32x{short}>", f"tensor<{256 * 32 * 4}xui8>"
    types = call.rpartition(" : ")[2]
    filter = f"tensor<3x3x32x32x{short}>"
    assert types == f"({image}, {filter}, {image}, {image}) -> ({image}, tensor<32x{short}>, {workspace})"
    found = {name: text.count(f"@jaxconv_conv_{name}_v2") for name in ("gradient", "gradient_add", "dgrad")}
    assert found == {"gradient": 1, "gradient_add": 1, "dgrad": 1}


# ----------------------------------------------------------------------------------------------------------------------
# dgrad_sums, signs

# ragged rows, a second column of tiles that is half one, a block of k that is no whole one, one row
SUMS: dict[str, dict[str, Any]] = {
    "one_row": dict(shape=(1, 1, 1), c=128, k=8, filter=(1, 1)),
    "ragged": dict(shape=(3, 7, 5), c=128, k=72, filter=(1, 1)),
    "half_column": dict(shape=(2, 9, 16), c=384, k=64, filter=(1, 1)),
    "wide": dict(shape=(9, 33, 32), c=256, k=64, filter=(1, 1)),
    "deep": dict(shape=(4, 14, 14), c=1024, k=256, filter=(1, 1)),
    "deeper": dict(shape=(4, 14, 14), c=256, k=512, filter=(1, 1)),
    "3x3": dict(shape=(2, 5, 6), c=16, k=8, filter=(3, 3)),
    "1x1_s2": dict(shape=(2, 5, 6), c=8, k=16, filter=(1, 1), stride=2),
    "3d": dict(shape=(1, 3, 4, 5), c=8, k=8, filter=(1, 1, 1), layout="NDHWC"),
    "patches": dict(shape=(4, 64), c=64, k=64, filter=(2,), layout="NWC", stride=2),
}


def sums_args(p: Any, seed: int = 0) -> list[jax.Array]:
    """dy, w, c, signs, x, mean, rstd: of whole numbers, but for rstd, which are powers of two."""
    bits = jnp.asarray(np.random.default_rng(seed).integers(0, 256, (*p.x_shape[:-1], p.in_channels // 8)), jnp.uint8)
    arrays = [integers(seed + i, s, n) for i, (s, n) in enumerate(((p.y_shape, 1), (p.w_shape, 1), (p.x_shape, 8)))]
    arrays = [jnp.asarray(a, p.dtype) for a in (*arrays, integers(seed + 3, p.x_shape, 4))]
    mean = jnp.asarray(integers(seed + 4, (p.in_channels,), 3), jnp.float32)
    rstd = jnp.exp2(jnp.asarray(integers(seed + 5, (p.in_channels,), 1), jnp.float32))
    return [*arrays[:3], bits, arrays[3], mean, rstd]


def sums_wanted(p: Any, dy: Any, w: Any, c: Any, bits: Any, x: Any, mean: Any, rstd: Any) -> list[np.ndarray]:
    above = np.unpackbits(np.asarray(bits), axis=-1, bitorder="little") > 0
    with helpers.types_of("float64"):
        wide = dataclasses.replace(p, dtype="float64", implementation=None, algorithm=None)
        da = reference.conv_dgrad(wide, *(jnp.asarray(np.asarray(a, np.float64)) for a in (dy, w)))[0]
    dz = np.where(above, np.asarray(da) + np.asarray(c, np.float64), 0)
    axes = tuple(range(dz.ndim - 1))
    xhat = (np.asarray(x, np.float64) - np.asarray(mean, np.float64)) * np.asarray(rstd, np.float64)
    return [dz, (dz * xhat).sum(axes), dz.sum(axes)]


@pytest.mark.parametrize("case", SUMS)
def test_sums_are_exact(case):
    p = problem(**SUMS[case])
    args = sums_args(p)
    for got, want in zip(jax.jit(functools.partial(conv.dgrad_sums, p))(*args), sums_wanted(p, *args), strict=True):
        assert_exact(got, want)


@on_hopper
@pytest.mark.parametrize(
    "dtype, tile",
    [(d, t) for d in ("bfloat16", "float16") for t in ("64x256", "64x128")]
    + [("float32", t) for t in ("128x128", "256x64")],
)
@pytest.mark.parametrize("case", [case for case in SUMS if case not in ("3x3", "1x1_s2", "3d", "patches")])
def test_the_kernel_is_exact(case, tile, dtype):
    p = problem(**SUMS[case], dtype=dtype, algorithm=f"sm90/sums {tile}", precision="default")
    refusal = _plan.supports("conv_dgrad_sums", f"sm90/sums {tile}", p, DEVICE)
    if refusal:
        pytest.skip(refusal)
    f = jax.jit(functools.partial(conv.dgrad_sums, p))
    for seed in range(3):
        args = sums_args(p, 10 * seed)
        assert calls(f, *args) == {"conv_dgrad_sums": 1}
        for got, want in zip(f(*args), sums_wanted(p, *args), strict=True):
            assert_exact(got, want)


@on_hopper
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
@pytest.mark.parametrize("n, h, c, k", [(256, 56, 256, 64), (256, 28, 512, 256), (256, 14, 1024, 256)])
def test_sums_of_large_arrays(n, h, c, k, dtype):
    """Rings that are full and empty many times: what small cases are too short for."""
    p = problem((n, h, h), c, k, (1, 1), dtype=dtype, algorithm="sm90/sums", precision="default")
    keys = jax.random.split(jax.random.key(1), 6)
    shapes = (p.y_shape, p.w_shape, p.x_shape, p.x_shape)
    dy, w, added, x = (jax.random.normal(key, s, dtype) for key, s in zip(keys, shapes, strict=False))
    bits = jax.random.bits(keys[4], (*p.x_shape[:-1], c // 8), jnp.uint8)
    mean, rstd = jax.random.normal(keys[5], (c,)), jnp.full(c, 0.7)
    args = dy, w, added, bits, x, mean, rstd
    f = jax.jit(functools.partial(conv.dgrad_sums, p))
    first = f(*args)
    loop = "sm90/resident" if dtype == "bfloat16" else "sm90/product"
    dx = conv.dgrad_add(dataclasses.replace(p, algorithm=loop), dy, w, added)
    dz, dscale, dbias = reference.through_relu(3, dx, bits, x, mean, rstd)
    np.testing.assert_array_equal(first[0], dz)  # the same products in the same order
    for got, want in zip(first[1:], (dscale, dbias), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * float(jnp.abs(want).max()))
    for _ in range(3):
        for again, got in zip(f(*args), first, strict=True):
            np.testing.assert_array_equal(again, got)


def norm_problem(shape: tuple[int, ...], dtype: str = "float32", **fields: Any) -> BatchNormProblem:
    options = {"residual": True, **fields}
    return BatchNormProblem("batchnorm", dtype, shape, len(shape) - 1, True, 0.0, 1e-5, Activation("relu"), **options)


def test_signs_and_back():
    y = jnp.asarray(integers(1, (3, 5, 24), 2), jnp.float32)
    with jax.numpy_rank_promotion("raise"):
        bits = reference.signs(y)
        reference.above(bits)
    assert bits.shape == (3, 5, 3) and bits.dtype == jnp.uint8
    np.testing.assert_array_equal(np.unpackbits(np.asarray(bits), axis=-1, bitorder="little"), y > 0)
    np.testing.assert_array_equal(reference.above(bits), y > 0)


@on_hopper
@pytest.mark.parametrize("residual", (False, True))
@pytest.mark.parametrize("dtype", ("bfloat16", "float16", "float32"))
@pytest.mark.parametrize("shape", [(33, 50, 31, 64), (9, 64, 64, 128), (5, 29, 37, 512)])
def test_the_kernel_keeps_signs(shape, dtype, residual):
    p = norm_problem(shape, dtype, residual=residual, implementation="native")
    x, r = (jnp.asarray(normal(i, shape), dtype) for i in range(2))
    scale, bias, mean = (jnp.asarray(normal(i, shape[-1:]), jnp.float32) for i in (2, 3, 4))
    args = [x, scale, bias, mean, jnp.abs(bias) + 0.5, *[r] * residual]
    assert calls(functools.partial(signs, p), *args) == {"batchnorm_signs": 1}
    y, bits = jax.jit(functools.partial(signs, p))(*args)
    np.testing.assert_array_equal(y, jax.jit(functools.partial(infer, p))(*args))
    np.testing.assert_array_equal(reference.above(bits), y > 0)


@two_devices
@KINDS
@pytest.mark.parametrize("spec", ("n", "k"))
def test_sums_split_over_a_mesh(spec, kind):
    p = problem(**SUMS["wide"] | dict(shape=(8, 3, 4)))
    mesh = jax.make_mesh((2,), ("m",), axis_types=(kind,), devices=jax.devices()[:2])
    images, one = P("m"), P()
    specs = (
        [images, one, images, images, images, one, one] if spec == "n" else [P(None, None, None, "m")] * 2 + [one] * 5
    )
    args = sums_args(p)
    placed = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(args, specs, strict=True)]
    with jax.set_mesh(mesh):
        outs = jax.jit(functools.partial(conv.dgrad_sums, p))(*placed)
    for got, want in zip(outs, sums_wanted(p, *args), strict=True):
        assert_exact(got, want)


def test_plans_of_sums(code_for_gpus):
    p = problem((256, 56, 56), 256, 64, (1, 1), dtype="bfloat16")
    made = _plan.plan("conv_dgrad_sums", p, H200)
    assert (made.kernel, made.tile) == ("sm90/sums", "64x256") and made.workspace_bytes == 512 * 2 * 256 * 4
    deep = _plan.plan("conv_dgrad_sums", problem((256, 14, 14), 1024, 512, (1, 1), dtype="bfloat16"), H200)
    assert deep.tile == "64x128"  # of 256 columns its filter has no room
    single = _plan.plan("conv_dgrad_sums", problem((256, 56, 56), 256, 64, (1, 1), precision="default"), H200)
    assert (single.kernel, single.tile, single.workspace_bytes) == ("sm90/sums", "256x64", 4 * 512 * 2 * 256 * 4)
    small = dataclasses.replace(p, batch=32)
    assert "read again from the caches" in _plan.plan("conv_dgrad_sums", small, H200).reason
    assert (
        _plan.plan("conv_dgrad_sums", dataclasses.replace(small, implementation="native"), H200).kernel == "sm90/sums"
    )
    for other, why in (
        (problem((256, 56, 56), 256, 64, (1, 1), precision="highest"), "in TF32 only"),
        (problem((256, 56, 56), 256, 64, (3, 3), dtype="bfloat16"), "1x1"),
        (problem((256, 56, 56), 256, 64, (1, 1), dtype="bfloat16", layout="NCHW"), "channels-last"),
        (problem((256, 56, 56), 192, 64, (1, 1), dtype="bfloat16"), "multiples of 128"),
        (problem((256, 56, 56), 256, 768, (1, 1), dtype="bfloat16"), "shared memory"),
    ):
        left = _plan.plan("conv_dgrad_sums", other, H200)
        assert left.implementation == "calls" and why in left.reason, left.reason
    assert _plan.plan("conv_dgrad_sums", p, dataclasses.replace(H200, kind="none")).implementation == "calls"


@pytest.mark.parametrize(
    ("shape", "c", "k", "filter", "layout"),
    [((256, 4096), 64, 128, (2,), "NWC"), ((64, 1024), 512, 256, (2,), "NWC"), ((9, 56, 56), 64, 128, (1, 2), "NHWC")],
)
def test_patches_are_left(shape, c, k, filter, layout, code_for_gpus):
    """Their dgrad is a product of more channels: there would be more sums than x has channels."""
    p = problem(shape, c, k, filter, dtype="bfloat16", layout=layout, stride=filter)
    assert "1x1" in _plan.supports("conv_dgrad_sums", "sm90/sums 64x128", p, H200)
    assert _plan.supports("conv_dgrad_add", "sm90/product 128x128", p, H200) is None
    assert _plan.plan("conv_dgrad_sums", dataclasses.replace(p, implementation="native"), H200).kernel != "sm90/sums"


def test_sums_turned_off(code_for_gpus, monkeypatch):
    p = problem((256, 56, 56), 256, 64, (1, 1), dtype="bfloat16")
    monkeypatch.setenv("JAXCONV_DISABLE", "conv_dgrad_sums")
    assert _plan.plan("conv_dgrad_sums", p, H200).implementation == "calls"
    assert _plan.plan("conv_dgrad_add", p, H200).implementation == "native"


def test_plan_of_signs(code_for_gpus):
    p = norm_problem((256, 56, 56, 256), "bfloat16")
    assert _plan.plan("batchnorm_signs", p, H200).kernel == "two_read"
    single = dataclasses.replace(p, dtype="float32", implementation="native")
    assert _plan.plan("batchnorm_signs", single, H200).kernel == "two_read"
    uneven = norm_problem((256, 56, 56, 36), "float32", implementation="native")
    assert "whole bytes of signs" in _plan.plan("batchnorm_signs", uneven, H200).reason


# ----------------------------------------------------------------------------------------------------------------------
# norm_gradient

# The 1x1s have ragged rows, half a column of tiles, a block of k that is no whole one, one row
NORMED: dict[str, dict[str, dict[str, Any]]] = {
    "sm90/halo": HALO,
    "sm90/product": PRODUCT,
    "sm90/sums": {name: case for name, case in SUMS.items() if name not in ("3x3", "1x1_s2", "patches")}
    | {
        "narrow": dict(shape=(5, 13, 11), c=24, k=72, filter=(1, 1)),
        "two_columns": dict(shape=(5, 13, 11), c=328, k=72, filter=(1, 1)),
        "many_rows": dict(shape=(40, 33, 32), c=136, k=64, filter=(1, 1)),
        "first": dict(shape=(2, 5, 6), c=64, k=24, filter=(1, 1), layout="NCHW"),
    },
}
NORM_TILES = {"sm90/halo": [""], "sm90/product": ["128x128", "256x64"], "sm90/sums": ["64x256", "64x128"]}
NORM_DTYPES = {"sm90/halo": ("float32",), "sm90/product": ("float32", "bfloat16", "float16")}
NORM_DTYPES["sm90/sums"] = "bfloat16", "float16"
LINEAR = ("none", "relu", "relu6", ("leaky_relu", 0.5), ("leaky_relu", -0.5))


def norm_args(p: ConvProblem, seed: int = 0) -> list[jax.Array]:
    """dy, w, x, scale, bias, mean, rstd: whole numbers, but for rstd and scale: powers of two, a scale negative or zero
    too. No z is at a kink."""
    arrays = [integers(seed + i, s, n) for i, (s, n) in enumerate(((p.y_shape, 1), (p.w_shape, 1), (p.x_shape, 4)))]
    c = (p.in_channels,)
    rstd, mean = np.exp2(integers(seed + 3, c, 1)), integers(seed + 4, c, 3)
    scale = np.exp2(integers(seed + 5, c, 1)) * integers(seed + 6, c, 1)
    norm = scale, integers(seed + 7, c, 3) + 0.125, mean, rstd
    return [*(jnp.asarray(a, p.dtype) for a in arrays), *(jnp.asarray(a, jnp.float32) for a in norm)]


def norm_wanted(p: ConvProblem, dy: Any, w: Any, x: Any, *norm: Any) -> list[np.ndarray]:
    """dz, rounded once, dscale, dbias."""
    with helpers.types_of("float64"):
        wide = dataclasses.replace(p.bare(), dtype="float64", implementation=None, algorithm=None)
        dy, w, x, *norm = (jnp.asarray(np.asarray(a, np.float64)) for a in (dy, w, x, *norm))
        ends = [slice(None) if axis == p.channel_axis else None for axis in range(x.ndim)]
        scale, bias, mean, rstd = (v[tuple(ends)] for v in norm)
        xhat = np.asarray((x - mean) * rstd)
        z = jnp.asarray(xhat) * scale + bias
        dz = activations.activate_grad(p.activation, z, reference.conv_dgrad(wide, dy, w)[0])
    dz = np.asarray(jnp.asarray(dz, p.dtype), np.float64)
    axes = tuple(axis for axis in range(dz.ndim) if axis != p.channel_axis)
    return [dz, (dz * xhat).sum(axes), dz.sum(axes)]


@pytest.mark.parametrize("implementation", ("xla", None), ids=helpers.label)
@pytest.mark.parametrize("activation", LINEAR, ids=helpers.label)
@pytest.mark.parametrize("case", ("3x3", "3x3_s2", "first", "groups", "3d"))
def test_the_gradient_through_a_norm_is_exact(case, activation, implementation):
    p = gradient_problem(CASES[case], activation, implementation=implementation)
    args = norm_args(p)
    outs = jax.jit(functools.partial(conv.norm_gradient, p))(*args)
    assert [out.dtype.name for out in outs] == [p.dtype, "float32", "float32"]
    for got, want in zip(outs, norm_wanted(p, *args), strict=True):
        assert_exact(got, want)


@on_hopper
@pytest.mark.parametrize("activation", LINEAR, ids=helpers.label)
@pytest.mark.parametrize(
    "kernel, case, dtype",
    [(kernel, case, dtype) for kernel, cases in NORMED.items() for case in cases for dtype in NORM_DTYPES[kernel]],
)
def test_a_kernel_goes_back_through_a_norm_exactly(kernel, case, activation, dtype):
    """By each tile that has room for the filter."""
    named = [f"{kernel} {tile}".rstrip() for tile in NORM_TILES[kernel]]
    given = dict(dtype=dtype, precision="default")
    problems = [gradient_problem(NORMED[kernel][case], activation, algorithm=name, **given) for name in named]
    problems = [p for p in problems if _plan.supports("conv_norm_gradient", p.algorithm, p, DEVICE) is None]
    assert problems
    for p in problems:
        f = jax.jit(functools.partial(conv.norm_gradient, p))
        for seed in (0, 10):
            args = norm_args(p, seed)
            assert calls(f, *args) == {"conv_norm_gradient": 1}
            for got, want in zip(f(*args), norm_wanted(p, *args), strict=True):
                np.testing.assert_array_equal(np.asarray(got, np.float64), want)


@on_hopper
@pytest.mark.parametrize(
    "kernel, n, h, c, k, filter, dtype",
    [
        (*of, dtype)
        for of in (
            ("sm90/sums", 256, 56, 128, 256, (1, 1)),
            ("sm90/sums", 256, 28, 256, 512, (1, 1)),
            ("sm90/product", 256, 56, 128, 256, (1, 1)),
            ("sm90/product", 256, 28, 192, 192, (3, 3)),
            ("sm90/product", 256, 56, 64, 128, (3, 3)),
            ("sm90/halo", 256, 56, 64, 64, (3, 3)),
        )
        for dtype in NORM_DTYPES[of[0]]
        if dtype != "float16"
    ],
)
def test_norms_of_large_arrays(kernel, n, h, c, k, filter, dtype):
    """Rings that are full and empty many times, and a mean far from zero: the sums are of x less its mean."""
    p = gradient_problem(dict(shape=(n, h, h), c=c, k=k, filter=filter), "relu", dtype=dtype, precision="default")
    p = dataclasses.replace(p, algorithm=kernel)
    keys = jax.random.split(jax.random.key(1), 6)
    dy, w, x = (
        jax.random.normal(key, s, dtype) for key, s in zip(keys, (p.y_shape, p.w_shape, p.x_shape), strict=False)
    )
    x = (x + 8).astype(dtype)
    scale, bias, mean = (jax.random.normal(key, (c,)) for key in keys[3:])
    norm = scale, bias, mean + 8, jnp.full(c, 0.7)
    f = jax.jit(functools.partial(conv.norm_gradient, p))
    first = f(dy, w, x, *norm)
    bare = dataclasses.replace(p.bare(), algorithm="sm90/product" if kernel == "sm90/sums" else kernel)
    dx = conv.dgrad(bare, dy, w)
    dz, dscale, dbias = jax.jit(functools.partial(reference.through_norm, p))(dx, x, *norm)
    apart = np.asarray(first[0] != dz)  # where z is so near 0 that it rounds to either side
    assert apart.mean() < 1e-6
    for got, want in zip(first[1:], (dscale, dbias), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * float(jnp.abs(want).max()))
    for _ in range(3):
        for again, got in zip(f(dy, w, x, *norm), first, strict=True):
            np.testing.assert_array_equal(again, got)


@two_devices
@KINDS
@pytest.mark.parametrize("spec", ("n", "c", "k", "h"))
def test_the_gradient_through_a_norm_split_over_a_mesh(spec, kind):
    p = gradient_problem(dict(shape=(4, 6, 5), c=8, k=16, filter=(3, 3)), "relu")
    mesh = jax.make_mesh((2,), ("m",), axis_types=(kind,), devices=jax.devices()[:2])
    last = P(None, None, None, "m")
    specs = {
        "n": (P("m"), P(), P("m"), *[P()] * 4),
        "c": (P(), P(None, None, "m"), last, *[P("m")] * 4),
        "k": (last, last, *[P()] * 5),
        "h": (P(None, "m"), P(), P(None, "m"), *[P()] * 4),
    }[spec]
    args = norm_args(p)
    placed = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(args, specs, strict=True)]
    with jax.set_mesh(mesh):
        outs = list(jax.jit(functools.partial(conv.norm_gradient, p))(*placed))
        if kind == AxisType.Auto:  # as where a kernel is planned: the rule, not XLA, says what a shard runs
            outs += jax.jit(sharding.auto(conv.norm_gradient, p, mesh))(*placed)
    for got, want in zip(outs, norm_wanted(p, *args) * (len(outs) // 3), strict=True):
        assert_exact(got, want)


def test_plans_of_the_gradient_through_a_norm(code_for_gpus, monkeypatch):
    def of(c: int, k: int, filter: tuple[int, ...], size: int = 56, f: Any = "relu", **options: Any) -> ConvProblem:
        case = dict(shape=(256, size, size), c=c, k=k, filter=filter)
        return gradient_problem(case, f, **{"dtype": "bfloat16", **options})

    for p, kernel, tile in (
        (of(128, 256, (1, 1)), "sm90/sums", "64x128"),
        (of(256, 512, (1, 1), 28), "sm90/sums", "64x128"),  # of 256 columns its filter has no room
        (of(256, 64, (1, 1)), "sm90/sums", "64x256"),
        (of(64, 64, (3, 3)), "sm90/product", "256x64"),
        (of(64, 64, (3, 3), dtype="float32", precision="default"), "sm90/halo", ""),
        (of(64, 128, (3, 3)), "sm90/product", "256x64"),
        (of(128, 128, (3, 3)), "sm90/product", "128x128"),
        (of(128, 256, (1, 1), dtype="float32", precision="default"), "sm90/product", "128x128"),
    ):
        native_p = dataclasses.replace(p, implementation="native")
        made = _plan.plan("conv_norm_gradient", native_p, H200)
        assert (made.kernel, made.tile) == (kernel, tile), made.reason
        # Two sums of each part: of warpgroups, in TF32 of warps
        parts = 2 * 256 if kernel == "sm90/halo" else 512 * (4 if p.dtype == "float32" else 1)
        assert made.workspace_bytes == parts * 2 * p.in_channels * 4
    p = of(128, 256, (1, 1))
    for free, kernel in (
        (p, "sm90/sums"),
        (of(128, 512, (1, 1), 28), "sm90/sums"),  # 49 MiB
        (of(64, 64, (3, 3), dtype="float32", precision="default"), "sm90/halo"),
        (of(128, 128, (1, 1), dtype="float32", precision="default"), "sm90/product"),
    ):
        made = _plan.plan("conv_norm_gradient", free, H100)
        assert made.kernel == kernel and "one read of x" in made.reason, made.reason
    for other, why in (
        (dataclasses.replace(of(64, 64, (3, 3)), algorithm="sm90/halo"), "takes float32 only"),
        (of(32, 16, (1, 1), 112), "75% of its tiles' columns would be empty"),
        (of(144, 24, (1, 1), dtype="float32", precision="default"), "44% of its tiles' columns would be empty"),
        (of(128, 256, (1, 1), dtype="float32", precision="default"), "sums of 256 products"),
        (of(96, 8, (3, 3), dtype="float32", precision="default"), "sums of 288 products"),  # 32 of each tap
        (of(128, 512, (1, 1), 14), "read again from the caches"),
        (of(128, 256, (1, 1), dtype="float32", precision="highest"), "in TF32 only"),
        (of(128, 256, (3, 3), stride=2), "strides of 1"),
        (of(128, 256, (1, 1), f="silu"), "no derivative of silu"),
        (of(128, 256, (1, 1), size=14), "read again from the caches"),
        (dataclasses.replace(p, implementation="xla"), ""),
        (dataclasses.replace(p, algorithm="direct"), "only sm90 goes back through a batch-norm"),
    ):
        left = _plan.plan("conv_norm_gradient", other, H200)
        assert str(left) == "calls[two]" and why in left.reason, left.reason
    assert str(_plan.plan("conv_norm_gradient", p, _plan.Device("cpu"))) == "calls[two]"
    for kind in ("none", "NVIDIA A100"):
        assert str(_plan.plan("conv_norm_gradient", p, dataclasses.replace(H200, kind=kind))) == "calls[two]"
    for op in ("conv_norm_gradient", "batchnorm"):
        monkeypatch.setenv("JAXCONV_DISABLE", op)
        left = _plan.plan("conv_norm_gradient", p, H200)
        assert str(left) == "calls[two]" and "JAXCONV_DISABLE" in left.reason

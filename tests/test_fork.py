"""What a convolution's input has besides the convolution: its gradient is added in the convolution's own."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import DEVICE, H200, NATIVE_IN_FLOAT64, PLATFORM, calls, equations, integers, normal
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from tolerance import assert_exact

import jaxconv
from jaxconv import _plan, conv, reference
from jaxconv._activation import Activation
from jaxconv._plan import sm90
from jaxconv._problem import ConvProblem
from jaxconv.conv_batchnorm import forked as forked_pair


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


HOPPER = PLATFORM == "cuda" and DEVICE.compute_capability == (9, 0)


@pytest.mark.skipif(not HOPPER, reason="sm90 needs compute capability 9.0")
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


@pytest.mark.skipif(not HOPPER, reason="depthwise/rows_mma needs compute capability 9.0")
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


# ----------------------------------------------------------------------------------------------------------------------
# The plan


@pytest.mark.parametrize(
    ("c", "k", "size", "filter", "stride", "kernel"),
    [
        (256, 64, 56, 1, 1, "sm90/resident 64x256"),
        (2048, 512, 7, 1, 1, "sm90/product 128x128"),
        (256, 512, 56, 1, 2, "sm90/product 128x128"),
        (64, 64, 56, 3, 1, None),  # sm90/halo, which is the dgrad's, adds nothing
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
        assert (made.implementation, f"{made.kernel} {made.tile}") == ("native", kernel)
        assert made.in_place == (stride > 1) and "nearest case measured" in made.reason
        single = _plan.plan("conv_dgrad_add", problem(**options, dtype="float32"), H200)
        assert (single.implementation, single.kernel) == ("native", "sm90/product")
    assert _plan.plan("conv_dgrad_add", p, dataclasses.replace(H200, kind="none")).implementation == "calls"
    forced = _plan.plan("conv_dgrad_add", dataclasses.replace(p, algorithm="implicit_gemm"), H200)
    assert forced.implementation == "calls" and "implicit_gemm" in forced.reason


def test_a_depthwise_dgrad_adds_on_hopper_where_its_kernel_is_the_dgrads(code_for_gpus):
    large = dict(c=96, k=96, groups=96, filter=(7, 7), dtype="bfloat16")
    made = _plan.plan("conv_dgrad_add", problem((256, 56, 56), **large), H200)
    assert (made.implementation, made.kernel, made.in_place) == ("native", "depthwise/rows_mma", False)
    for options in (dict(filter=(3, 3)), dict(dtype="float32"), dict(stride=2)):
        made = _plan.plan("conv_dgrad_add", problem((256, 56, 56), **{**large, **options}), H200)
        assert made.implementation == "calls" and "only sm90 and depthwise/rows_mma add" in made.reason


@pytest.mark.parametrize("normalised", (False, True))
def test_a_block_that_reads_its_input_by_a_depthwise_convolution_adds_in_the_dgrad(normalised):
    numbers = ("NHWC", "HWIO", "NHWC")

    def block(x, w, scale):
        y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=8)
        if normalised:
            y = (y - y.mean((0, 1, 2))) * lax.rsqrt(y.var((0, 1, 2)) + 1e-5) * scale
        return jnp.sum(jnp.sin(x + jax.nn.relu(y)))

    args = [jnp.asarray(normal(i, s), "float32") for i, s in enumerate(((2, 6, 5, 8), (5, 5, 1, 8), (8,)))]
    f = jax.grad(jaxconv.accelerate(block), (0, 1, 2))
    counted = equations(f, *args)
    assert counted["jaxconv_conv_dgrad_add"] == 1 and counted["add_any"] == 0
    for a, b in zip(f(*args), jax.grad(block, (0, 1, 2))(*args), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_calls_have_the_dgrads_own_plan_which_explain_shows():
    p = problem(**CASES["groups"])
    explained = jaxconv.explain(functools.partial(conv.dgrad_add, p))(*arrays(p, 1))
    found = {call.op: call.plan.implementation for call in explained}
    assert found == {"conv_dgrad_add": "calls", "conv_dgrad": "native" if PLATFORM == "cpu" else found["conv_dgrad"]}


# ----------------------------------------------------------------------------------------------------------------------
# Forks


def normalised(p: ConvProblem, x: Any, w: Any, scale: Any, bias: Any) -> tuple[Any, Any]:
    zeros = jnp.zeros_like(scale)
    window = dict(stride=p.stride, padding=p.padding, dilation=1, groups=1, precision=None)
    options = dict(training=True, momentum=0.9, epsilon=1e-3, activation="silu", residual=None)
    choice = dict(layout=None, algorithm=None, implementation=p.implementation)
    x, (y, _, _) = forked_pair(x, w, scale, bias, zeros, zeros, **window, **options, **choice)
    return x, y


def bare(p: ConvProblem, x: Any, w: Any, *_: Any) -> tuple[Any, Any]:
    x, (y,) = conv.fork(p, x, w)
    return x, y


def activated(p: ConvProblem, x: Any, w: Any, _: Any, bias: Any) -> tuple[Any, Any]:
    x, (y,) = conv.fork(dataclasses.replace(p, bias=True, activation=Activation("gelu")), x, w, bias)
    return x, y


FORKS = {"conv": bare, "conv_gelu": activated, "conv_batchnorm": normalised}


def args_of(p: ConvProblem, dtype: str = "float64") -> list[jax.Array]:
    k = (p.out_channels,)
    return [jnp.asarray(normal(i, s), dtype) for i, s in enumerate((p.x_shape, p.w_shape, k, k))]


@pytest.mark.parametrize("implementation", ("xla", *NATIVE_IN_FLOAT64))
@pytest.mark.parametrize("name", FORKS)
def test_the_gradients_are_those_of_two_uses(name, implementation, x64):
    p = problem(**CASES["3x3_s2"], dtype="float64", implementation=implementation)
    fork = functools.partial(FORKS[name], p)

    def f(x, *rest, forks=True):
        passed, y = fork(x, *rest)
        return (y * jnp.arange(y.size).reshape(y.shape)).sum() / y.size + jnp.sin(passed if forks else x).sum()

    args = args_of(p)
    plain = functools.partial(f, forks=False)
    every = tuple(range(4))
    for a, b in zip(jax.grad(f, every)(*args), jax.grad(plain, every)(*args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
    counted = equations(jax.grad(f), *args)
    assert counted["jaxconv_conv_dgrad_add"] == 1 and counted["jaxconv_conv_dgrad"] == counted["add_any"] == 0
    check_grads(f, args, order=2, modes=("fwd", "rev"), atol=1e-3, rtol=1e-3)
    # mapped
    xs = jnp.stack([args[0], 2 * args[0]])
    mapped = jax.vmap(jax.grad(f), in_axes=(0, None, None, None))(xs, *args[1:])
    for a, x in zip(mapped, xs, strict=True):
        np.testing.assert_allclose(a, jax.grad(f)(x, *args[1:]), rtol=1e-10, atol=1e-12)


def test_only_what_is_asked_for_is_computed():
    p = problem(**CASES["1x1"])
    x, w, *_ = args_of(p, "float32")

    def only_x(x, w):  # the convolution's result leads nowhere
        x, _ = conv.fork(p, x, w)
        return (x * x).sum()

    counted = equations(jax.grad(only_x), x, w)
    assert not any("dgrad" in name or "wgrad" in name for name in counted)
    np.testing.assert_array_equal(jax.grad(only_x)(x, w), 2 * x)

    def only_y(x, w):
        return conv.fork(p, x, w)[1][0].sum()

    assert equations(jax.grad(only_y), x, w)["jaxconv_conv_dgrad"] == 1
    # Nobody asks for x's gradient: neither zeros in its place nor what they would lead to.
    both = lambda x, w: conv.fork(p, x, w)[1][0].sum() + jnp.sin(conv.fork(p, x, w)[0]).sum()  # noqa: E731
    counted = equations(jax.grad(both, 1), x, w)
    assert counted["jaxconv_conv_wgrad"] == 1 and counted["cos"] == 0
    assert not any("dgrad" in name for name in counted)


# ----------------------------------------------------------------------------------------------------------------------
# accelerate


NHWC = ("NHWC", "HWIO", "NHWC")


def plain_conv(x, w, stride=1):
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=NHWC)


def norm(x, scale, bias):
    mean = x.mean((0, 1, 2))
    return (x - mean) * lax.rsqrt(((x - mean) ** 2).mean((0, 1, 2)) + 1e-5) * scale + bias


def bottleneck(x, ws, stride=1):
    y = jax.nn.relu(norm(plain_conv(x, ws[0]), 1.5, ws[3]))
    y = jax.nn.relu(norm(plain_conv(y, ws[1], stride), 1.5, ws[3]))
    y = norm(plain_conv(y, ws[2]), 1.5, ws[4])
    if len(ws) > 5:
        x = norm(plain_conv(x, ws[5], stride), 1.5, ws[4])
    return jax.nn.relu(x + y)


def weights(seed: int, c: int, middle: int, out: int, shortcut: bool = False) -> list[jax.Array]:
    shapes = [(1, 1, c, middle), (3, 3, middle, middle), (1, 1, middle, out), (middle,), (out,)]
    shapes += [(1, 1, c, out)] * shortcut
    return [jnp.asarray(normal(seed + i, s), "float32") / 4 for i, s in enumerate(shapes)]


def net(ws, x):
    for one, stride in zip(ws, (1, 2, 1), strict=True):
        x = bottleneck(x, one, stride)
    return (x * jnp.arange(x.size).reshape(x.shape)).sum() / x.size


NET = [weights(0, 16, 8, 16), weights(10, 16, 16, 32, True), weights(20, 32, 16, 32)]
IMAGES = jnp.asarray(normal(9, (4, 8, 8, 16)), "float32")


def added(f: Any, *args: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(shape of the input, strides) of each dgrad that adds; no sum of arrays of four axes is left."""
    jaxpr = jax.make_jaxpr(f)(*args).jaxpr
    sums = [e for e in jaxpr.eqns if e.primitive.name == "add_any" and e.outvars[0].aval.ndim == 4]
    assert not [e for e in sums if math.prod(e.outvars[0].aval.shape[:3]) > 9]  # filters have at most 9 taps
    found = [e.params["problem"] for e in jaxpr.eqns if e.primitive.name == "jaxconv_conv_dgrad_add"]
    return [(p.x_shape, p.stride) for p in found]


def test_accelerate_adds_the_gradients_of_a_blocks_input_in_a_dgrad():
    f = jaxconv.accelerate(net)
    # Of the two convolutions at the second block's input the one that steps over pixels adds, though it comes later.
    expected = [((4, 4, 4, 32), (1, 1)), ((4, 8, 8, 16), (2, 2)), ((4, 8, 8, 16), (1, 1))]
    assert added(jax.grad(f, (0, 1)), NET, IMAGES) == expected
    assert added(jax.grad(f), NET, IMAGES) == expected[:2]  # the images' gradient is nobody's
    ours, plain = (jax.jit(jax.value_and_grad(g, (0, 1)))(NET, IMAGES) for g in (f, net))
    for a, b in zip(*map(jax.tree.leaves, (ours, plain)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5 * float(jnp.abs(b).max()))


def test_inside_remat_scan_and_jit_too():
    def deep(w, x):
        return jax.checkpoint(bottleneck)(x, w).sum()

    def scanned(ws, x):
        return lax.scan(lambda x, w: (jax.jit(bottleneck)(x, w), None), x, ws)[0].sum()

    stacked = jax.tree.map(lambda *a: jnp.stack(a), *[weights(i, 16, 8, 16) for i in (0, 30, 60)])
    for f, ws in ((deep, NET[0]), (scanned, stacked)):
        accelerated = jaxconv.accelerate(f)
        assert equations(jax.grad(accelerated, (0, 1)), ws, IMAGES)["jaxconv_conv_dgrad_add"] >= 1
        ours, plain = (jax.jit(jax.grad(g))(ws, IMAGES) for g in (accelerated, f))
        for a, b in zip(ours, plain, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-4 * float(jnp.abs(b).max()))


def test_without_a_gradient_nothing_is_added_to_the_program(monkeypatch):
    module = importlib.import_module("jaxconv.accelerate.linear")

    def text():
        return jax.jit(lambda ws, x: jaxconv.accelerate(net)(ws, x)).lower(NET, IMAGES).as_text()

    forked = text()
    monkeypatch.setattr(module, "fork_of", lambda *_: None)
    assert sorted(forked.splitlines()) == sorted(text().splitlines()) or len(forked) == len(text())


def test_what_others_need_first_is_no_fork():
    w = jnp.asarray(normal(0, (1, 1, 16, 16)), "float32")

    def f(x, w):  # of the two convolutions the first has to be computed first: the second's residual needs it
        return jax.nn.relu(norm(plain_conv(x, w), 1.5, 0.5 * w[0, 0, 0]) + jnp.tanh(plain_conv(x, w * 2, 1))).sum()

    def only_behind(x, w):  # x is used on the way to what the convolution needs
        return plain_conv(x, w * jnp.tanh(x).sum()).sum()

    for g, count in ((f, 1), (only_behind, 0)):
        accelerated = jaxconv.accelerate(g)
        assert equations(jax.grad(accelerated), IMAGES, w)["jaxconv_conv_dgrad_add"] == count
        a, b = (jax.jit(jax.grad(h))(IMAGES, w) for h in (accelerated, g))
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-4 * float(jnp.abs(b).max()))


def test_an_input_that_is_a_result_stays_itself():
    w = NET[0][0]
    f = jaxconv.accelerate(lambda x, w: (plain_conv(x, w), x))
    jaxpr = jax.make_jaxpr(f)(IMAGES, w).jaxpr
    assert jaxpr.outvars[1] is jaxpr.invars[0]


# ----------------------------------------------------------------------------------------------------------------------
# Meshes


@pytest.mark.skipif(jax.device_count() < 2 or jax.device_count() % 2, reason="a mesh takes an even number of devices")
@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit), ids=str)
def test_images_split_over_a_mesh(kind):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,), devices=jax.devices()[:2])
    f = jax.jit(jax.grad(jaxconv.accelerate(net), (0, 1)))
    whole = f(NET, IMAGES)
    with jax.set_mesh(mesh) if kind == AxisType.Explicit else mesh:
        split = f(jax.device_put(NET, NamedSharding(mesh, P())), jax.device_put(IMAGES, NamedSharding(mesh, P("data"))))
    for a, b in zip(jax.tree.leaves(split), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-4 * float(jnp.abs(b).max()))


@pytest.mark.skipif(jax.device_count() < 2 or jax.device_count() % 2, reason="a mesh takes an even number of devices")
@pytest.mark.parametrize("spec", ("n", "c", "k"))
@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit), ids=str)
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


@pytest.mark.skipif(jax.device_count() < 2, reason="shard_map takes a mesh")
def test_inside_shard_map():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def step(ws, x):
        grads = jax.grad(jaxconv.accelerate(lambda ws, x: bottleneck(x, ws).sum()), (0, 1))(ws, x)
        return grads

    f = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P("data")))
    grads, dx = jax.jit(f)(NET[0], IMAGES)
    halves = [step(NET[0], half) for half in (IMAGES[:2], IMAGES[2:])]
    np.testing.assert_allclose(dx, jnp.concatenate([half[1] for half in halves]), rtol=2e-3, atol=1e-5)
    for g, a, b in zip(grads, halves[0][0], halves[1][0], strict=True):
        np.testing.assert_allclose(g, a + b, rtol=2e-3, atol=1e-4 * float(jnp.abs(g).max()))
    adding = [sum(c.count for c in jaxconv.explain(g)(NET[0], IMAGES) if c.op == "conv_dgrad_add") for g in (f, step)]
    assert adding[0] == adding[1] > 0  # filters do not vary over the mesh, images do

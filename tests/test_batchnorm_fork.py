"""A batch-norm with relu the sums of whose gradient are made in the dgrad of the convolution behind it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import DEVICE, H200, PLATFORM, calls, equations, integers, normal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from test_fork import problem
from tolerance import assert_exact

import jaxconv
from jaxconv import _plan, batchnorm_fork, conv, reference
from jaxconv._activation import Activation
from jaxconv._problem import BatchNormProblem
from jaxconv.accelerate import accelerate, norms
from jaxconv.batchnorm import infer, signs
from jaxconv.conv_batchnorm import forked, with_statistics

RELU = Activation("relu")
HOPPER = PLATFORM == "cuda" and DEVICE.compute_capability == (9, 0)
on_hopper = pytest.mark.skipif(not HOPPER, reason="sm90 needs compute capability 9.0")


@pytest.fixture(autouse=True)
def exact_products():
    """Products in float32 on a GPU too: TF32 would hide what is compared."""
    with jax.default_matmul_precision("highest"):
        yield


# ----------------------------------------------------------------------------------------------------------------------
# The kernels

# ragged rows, a second column of tiles that is half one, a block of k that is no whole one, one row
CASES: dict[str, dict[str, Any]] = {
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


@pytest.mark.parametrize("case", CASES)
def test_sums_are_exact(case):
    p = problem(**CASES[case])
    args = sums_args(p)
    for got, want in zip(jax.jit(functools.partial(conv.dgrad_sums, p))(*args), sums_wanted(p, *args), strict=True):
        assert_exact(got, want)


@on_hopper
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("tile", ("64x256", "64x128"))
@pytest.mark.parametrize("case", [case for case in CASES if case not in ("3x3", "1x1_s2", "3d", "patches")])
def test_the_kernel_is_exact(case, tile, dtype):
    p = problem(**CASES[case], dtype=dtype, algorithm=f"sm90/sums {tile}")
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
@pytest.mark.parametrize("n, h, c, k", [(256, 56, 256, 64), (256, 28, 512, 256), (256, 14, 1024, 256)])
def test_sums_of_large_arrays(n, h, c, k):
    """Rings that are full and empty many times: what small cases are too short for."""
    p = problem((n, h, h), c, k, (1, 1), dtype="bfloat16", algorithm="sm90/sums")
    keys = jax.random.split(jax.random.key(1), 6)
    shapes = (p.y_shape, p.w_shape, p.x_shape, p.x_shape)
    dy, w, added, x = (jax.random.normal(key, s, jnp.bfloat16) for key, s in zip(keys, shapes, strict=False))
    bits = jax.random.bits(keys[4], (*p.x_shape[:-1], c // 8), jnp.uint8)
    mean, rstd = jax.random.normal(keys[5], (c,)), jnp.full(c, 0.7)
    args = dy, w, added, bits, x, mean, rstd
    f = jax.jit(functools.partial(conv.dgrad_sums, p))
    first = f(*args)
    dx = conv.dgrad_add(dataclasses.replace(p, algorithm="sm90/resident"), dy, w, added)
    dz, dscale, dbias = reference.through_relu(3, dx, bits, x, mean, rstd)
    np.testing.assert_array_equal(first[0], dz)  # the same products in the same order
    for got, want in zip(first[1:], (dscale, dbias), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * float(jnp.abs(want).max()))
    for _ in range(3):
        for again, got in zip(f(*args), first, strict=True):
            np.testing.assert_array_equal(again, got)


def norm_problem(shape: tuple[int, ...], dtype: str = "float32", **fields: Any) -> BatchNormProblem:
    return dataclasses.replace(batchnorm_fork.problem(dtype, shape, len(shape) - 1, 1e-5, RELU), **fields)


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
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
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


# ----------------------------------------------------------------------------------------------------------------------
# The derivative in two halves

SHAPE, DEEP = (2, 3, 4, 8), 16
OPTIONS = dict(training=True, momentum=0.0, epsilon=1e-3)


def block_args(dtype: Any = np.float64) -> tuple[jax.Array, ...]:
    """x, w0, scale, bias, residual, w1, scale1, bias1."""
    shapes = (SHAPE, (1, 1, 8, 8), (8,), (8,), SHAPE, (1, 1, 8, DEEP), (DEEP,), (DEEP,))
    arrays = [jnp.asarray(normal(i, s), dtype) for i, s in enumerate(shapes)]
    arrays[2] = arrays[2] + 1.5
    return tuple(arrays)


def zeros(n: int, like: Any) -> list[jax.Array]:
    return [jnp.zeros(n, like.dtype)] * 2


def plain(x: Any, w0: Any, scale: Any, bias: Any, residual: Any, w1: Any, scale1: Any, bias1: Any) -> Any:
    """(what others have of y, the convolution's batch-norm of y)"""
    z = jaxconv.conv2d(x, w0)
    y, *_ = jaxconv.batchnorm(z, scale, bias, *zeros(8, scale), activation="relu", residual=residual, **OPTIONS)
    v, mean, _ = jaxconv.conv_batchnorm(y, w1, scale1, bias1, *zeros(DEEP, scale), **OPTIONS)
    return y, v, mean


def in_halves(x: Any, w0: Any, scale: Any, bias: Any, residual: Any, w1: Any, scale1: Any, bias1: Any) -> Any:
    bare = dict.fromkeys(("layout", "precision", "activation", "algorithm", "implementation"))
    window = dict(stride=1, padding="SAME", dilation=1, groups=1, **bare, **OPTIONS)
    z, mean, var = with_statistics(x, w0, None, None, *zeros(8, scale), residual=None, **window)
    p = dataclasses.replace(norm_problem(SHAPE, scale.dtype.name), epsilon=1e-3)
    y, rest = batchnorm_fork.open_up(p, z, scale, bias, mean, var, residual)
    passed, (v, mean1, _) = forked(y, w1, scale1, bias1, *zeros(DEEP, scale), residual=None, opened=rest, **window)
    return passed, v, mean1


def loss(f: Any, *args: Any) -> jax.Array:
    y, v, mean = f(*args)
    return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(v)) + jnp.sum(mean**2)


@pytest.mark.parametrize("which", (0, 1, 2, 3, 4, 5, 6, 7, (0, 2, 4), tuple(range(8))), ids=str)
def test_gradients_are_those_of_the_whole(which, x64):
    args = block_args()
    for got, want in zip(in_halves(*args), plain(*args), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
    got, want = (jax.jit(jax.grad(functools.partial(loss, f), which))(*args) for f in (in_halves, plain))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-10), got, want)


@pytest.mark.parametrize("used", ("y", "v", "mean"))
def test_gradients_of_one_result(used, x64):
    """Where nobody else needs y, or nobody the convolution's result."""
    args = block_args()
    at = ("y", "v", "mean").index(used)
    got, want = (
        jax.jit(jax.grad(lambda *a, f=f: jnp.sum(jnp.sin(f(*a)[at])), range(8)))(*args) for f in (in_halves, plain)
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-10), got, want)


def test_derivatives_of_any_order(x64):
    """y is nowhere near 0, where the relu has no derivative."""
    args = block_args()
    assert float(jnp.abs(plain(*args)[0][plain(*args)[0] > 0]).min()) > 1e-3
    check_grads(functools.partial(loss, in_halves), args, order=1, modes=("fwd", "rev"), atol=1e-3, rtol=1e-3, eps=1e-6)
    second = (jax.jit(jax.jacfwd(jax.grad(functools.partial(loss, f), (0, 2)), (1, 4, 5))) for f in (in_halves, plain))
    got, want = (f(*args) for f in second)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-8, atol=1e-8), got, want)
    got, want = (jax.jvp(functools.partial(loss, f), args, args) for f in (in_halves, plain))
    np.testing.assert_allclose(got, want, rtol=1e-10)


@pytest.mark.parametrize("order", (1, 2))
@pytest.mark.parametrize("outside", ("vmap", "grad"))
def test_maps(outside, order, x64):
    many = tuple(jnp.stack([a, a + 0.25, 1 - a]) for a in block_args())

    def gradients(f: Any) -> Any:
        def of_one(*args: Any) -> Any:
            if order == 1:
                return loss(f, *args)
            return jnp.sum(jnp.sin(jax.grad(functools.partial(loss, f))(*args)))

        if outside == "vmap":
            return jax.jit(jax.vmap(jax.grad(of_one, range(8))))(*many)
        return jax.jit(jax.grad(lambda *args: jnp.sum(jax.vmap(of_one)(*args)), range(8)))(*many)

    got, want = gradients(in_halves), gradients(plain)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-8, atol=1e-8), got, want)


def test_where_the_sums_are_made():
    """The convolution's dgrad makes them; what is left of the batch-norm's backward pass is dx."""
    found = equations(jax.grad(functools.partial(loss, in_halves), range(8)), *block_args(np.float32))
    assert found["jaxconv_conv_dgrad_sums"] == found["jaxconv_batchnorm_dx"] == 1
    # the convolution's own batch-norm
    assert found["jaxconv_batchnorm_backward"] == 1 and found["jaxconv_conv_dgrad_add"] == found["add_any"] == 0


# ----------------------------------------------------------------------------------------------------------------------
# accelerate


class Net(nn.Module):
    """Three residual blocks of one convolution each, and a projection between the second and the third."""

    @nn.compact
    def __call__(self, x):
        norm = functools.partial(nn.BatchNorm, use_running_average=False, epsilon=1e-3)
        x = nn.relu(norm()(nn.Conv(8, (1, 1), use_bias=False)(x)))
        for block in range(3):
            y = nn.relu(norm()(nn.Conv(16, (1, 1), use_bias=False)(x)))
            y = norm()(nn.Conv(8, (1, 1), use_bias=False)(y))
            x = nn.relu(y + x)
            if block == 1:
                y = norm()(nn.Conv(8, (1, 1), use_bias=False, name="side")(x))
                x = nn.relu(y + norm(name="side_norm")(nn.Conv(8, (1, 1), use_bias=False, name="shortcut")(x)))
        return jnp.sum(jnp.sin(x))


@pytest.fixture
def everywhere(monkeypatch):
    """Programs as for a device whose kernels make these sums."""
    monkeypatch.setattr(norms, "takes_sums", lambda before, p, after: p.activation == RELU)


def net() -> tuple[Any, Any, Any]:
    images = jnp.asarray(normal(0, (2, 5, 6, 8)), jnp.float32)
    variables = Net().init(jax.random.key(1), images)
    variables = jax.tree.map(lambda a: a + 0.1 * jnp.arange(a.size, dtype=a.dtype).reshape(a.shape) % 0.7, variables)

    def run(params: Any, images: Any) -> Any:
        return Net().apply({**variables, "params": params}, images, mutable=["batch_stats"])

    return run, variables["params"], images


def test_accelerate_finds_them(everywhere):
    run, params, images = net()
    fast = jax.value_and_grad(accelerate(run), (0, 1), has_aux=True)
    want = jax.value_and_grad(run, (0, 1), has_aux=True)(params, images)
    got = jax.jit(fast)(params, images)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-4), got, want)
    found = equations(fast, params, images)
    # A block's result goes to the next one's convolution and its add; the second's to two convolutions.
    assert found["jaxconv_conv_dgrad_sums"] == 3 and found["add_any"] == 0


@pytest.mark.parametrize("blocks", ("one", "two", "one, two", "two, one"))
def test_blocks_of_one_convolution(blocks, everywhere, x64):
    """Whose batch-norm adds what the convolution reads: a second reading, which does not go through the fork."""

    def layer(x: Any, w: Any, scale: Any, bias: Any) -> Any:
        z = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        mean = z.mean((0, 1, 2))
        return (z - mean) * jax.lax.rsqrt(z.var((0, 1, 2)) + 1e-3) * scale + bias

    def run(layers: Any, x: Any, r: Any) -> Any:
        first, *others = layers
        x = jax.nn.relu(layer(x, *first) + r)
        found = [x]
        for length, (a, b) in zip(blocks.split(", "), zip(others[::2], others[1::2], strict=True), strict=False):
            y = layer(x, *a)
            x = jax.nn.relu((layer(jax.nn.relu(y), *b) if length == "two" else y) + x)
            found.append(x)
        return sum(jnp.sum(jnp.sin(y + i)) for i, y in enumerate(found))

    layers = [
        (
            jnp.asarray(normal(i, (1, 1, 8, 8))),
            1 + jnp.asarray(normal(i + 9, (8,))) / 3,
            jnp.asarray(normal(i + 18, (8,))),
        )
        for i in range(5)
    ]
    x, r = jnp.asarray(normal(30, (2, 3, 4, 8))), jnp.asarray(normal(31, (2, 3, 4, 8)))
    fast = accelerate(run)
    want, got = (jax.jit(jax.value_and_grad(f, (0, 1, 2)))(layers, x, r) for f in (run, fast))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9), got, want)
    tangents = jax.tree.map(jnp.cos, (layers, x, r))
    want, got = (jax.jit(lambda *a, f=f: jax.jvp(f, *a)[1])((layers, x, r), tangents) for f in (run, fast))
    np.testing.assert_allclose(got, want, rtol=1e-9)
    # A block of two convolutions adds what its first reads behind the second: there the sums are in the dgrad, but of a
    # batch-norm that is itself in a fork's call.
    opened = equations(fast, layers, x, r)["jaxconv_batchnorm_opened"]
    assert opened == (1 if blocks.startswith("two") else 0)


def test_accelerate_leaves_what_nobody_forks(everywhere):
    """The last block's result is read by no convolution: its batch-norm keeps its own backward pass."""
    run, params, images = net()
    found = equations(jax.grad(lambda p, x: accelerate(run)(p, x)[0]), params, images)
    without = equations(jax.grad(lambda p, x: run(p, x)[0]), params, images)
    assert found["jaxconv_batchnorm_dx"] == 3 and without["jaxconv_batchnorm_dx"] == 0


@pytest.mark.parametrize("wrap", ("jit", "checkpoint", "vmap", "scan"))
def test_accelerate_under_transformations(wrap, everywhere):
    run, params, images = net()

    def total(f: Any, p: Any, x: Any) -> Any:
        def g(x: Any) -> Any:
            return f(p, x)[0]

        if wrap == "vmap":
            return jnp.sum(jax.vmap(g)(jnp.stack([x, x + 1])))
        if wrap == "scan":
            return jax.lax.scan(lambda c, x: (c + g(x), None), 0.0, jnp.stack([x, x - 1]))[0]
        return (jax.checkpoint(g) if wrap == "checkpoint" else jax.jit(g))(x)

    got, want = (jax.grad(functools.partial(total, f), (0, 1))(params, images) for f in (accelerate(run), run))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=5e-4, atol=5e-4), got, want)


MESHES = pytest.mark.skipif(jax.device_count() < 2, reason="a mesh takes devices")


@MESHES
@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit), ids=str)
def test_accelerate_on_a_mesh(kind, everywhere):
    run, params, images = net()
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,), devices=jax.devices()[:2])
    want = jax.grad(lambda p, x: run(p, x)[0], (0, 1))(params, images)
    with jax.set_mesh(mesh) if kind == AxisType.Explicit else mesh:
        placed = (
            jax.device_put(params, NamedSharding(mesh, P())),
            jax.device_put(images, NamedSharding(mesh, P("data"))),
        )
        got = jax.jit(jax.grad(lambda p, x: accelerate(run)(p, x)[0], (0, 1)))(*placed)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=5e-4, atol=5e-4), got, want)


@MESHES
def test_accelerate_inside_shard_map(everywhere):
    """Each shard by its own statistics: the sum of its own gradients."""
    run, params, images = net()
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    images = jnp.concatenate([images, images + 0.5])

    def step(f: Any, p: Any, x: Any) -> Any:
        return jax.grad(lambda p, x: f(p, x)[0], (0, 1))(p, x)

    f = jax.shard_map(
        functools.partial(step, accelerate(run)), mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P("data"))
    )
    got, dx = jax.jit(f)(params, images)
    halves = [step(run, params, half) for half in (images[:2], images[2:])]
    close = functools.partial(np.testing.assert_allclose, rtol=5e-4, atol=5e-4)
    jax.tree.map(lambda g, a, b: close(g, a + b), got, halves[0][0], halves[1][0])
    close(dx, jnp.concatenate([half[1] for half in halves]))


@MESHES
@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit), ids=str)
@pytest.mark.parametrize("spec", ("n", "k"))
def test_sums_split_over_a_mesh(spec, kind):
    p = problem(**CASES["wide"] | dict(shape=(8, 3, 4)))
    mesh = jax.make_mesh((2,), ("m",), axis_types=(kind,), devices=jax.devices()[:2])
    images, one = P("m"), P()
    specs = (
        [images, one, images, images, images, one, one] if spec == "n" else [P(None, None, None, "m")] * 2 + [one] * 5
    )
    args = sums_args(p)
    placed = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(args, specs, strict=True)]
    with jax.set_mesh(mesh) if kind == AxisType.Explicit else mesh:
        outs = jax.jit(functools.partial(conv.dgrad_sums, p))(*placed)
    for got, want in zip(outs, sums_wanted(p, *args), strict=True):
        assert_exact(got, want)


# ----------------------------------------------------------------------------------------------------------------------
# The choice


def test_plans(code_for_gpus):
    p = problem((256, 56, 56), 256, 64, (1, 1), dtype="bfloat16")
    made = _plan.plan("conv_dgrad_sums", p, H200)
    assert (made.kernel, made.tile) == ("sm90/sums", "64x256") and made.workspace_bytes == 512 * 2 * 256 * 4
    deep = _plan.plan("conv_dgrad_sums", problem((256, 14, 14), 1024, 512, (1, 1), dtype="bfloat16"), H200)
    assert deep.tile == "64x128"  # of 256 columns its filter has no room
    small = dataclasses.replace(p, batch=32)
    assert "read again from caches" in _plan.plan("conv_dgrad_sums", small, H200).reason
    assert (
        _plan.plan("conv_dgrad_sums", dataclasses.replace(small, implementation="native"), H200).kernel == "sm90/sums"
    )
    for other, why in (
        (dataclasses.replace(p, dtype="float32"), "16-bit"),
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


def test_plan_turned_off(code_for_gpus, monkeypatch):
    p = problem((256, 56, 56), 256, 64, (1, 1), dtype="bfloat16")
    monkeypatch.setenv("JAXCONV_DISABLE", "conv_dgrad_sums")
    assert _plan.plan("conv_dgrad_sums", p, H200).implementation == "calls"
    assert _plan.plan("conv_dgrad_add", p, H200).implementation == "native"


def test_plan_of_signs(code_for_gpus):
    p = norm_problem((256, 56, 56, 256), "bfloat16")
    assert _plan.plan("batchnorm_signs", p, H200).kernel == "two_read"
    narrow = dataclasses.replace(p, dtype="float32", implementation="native")
    assert "16-bit" in _plan.plan("batchnorm_signs", narrow, H200).reason


@pytest.mark.skipif(PLATFORM != "cpu", reason="a GPU may have the kernels")
def test_not_on_a_cpu():
    run, params, images = net()
    explained = jaxconv.explain(jax.grad(lambda p, x: accelerate(run)(p, x)[0]))(params, images)
    assert not [call for call in explained if call.op in ("conv_dgrad_sums", "batchnorm_opened")]

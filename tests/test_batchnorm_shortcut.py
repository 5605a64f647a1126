"""The gradient of two batch-norms that an addition joins: its kernel and its plan."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import DEVICE, H200, poison
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxconv import _plan
from jaxconv._core.activations import Activation
from jaxconv._ops import reference
from jaxconv._ops.batchnorm import shortcut_backward, shortcut_problem

EPSILON = 1e-3
NAMES = ("dscale", "dbias", "dscale_r", "dx", "dr")


def operands(shape, dtype, seed=0):
    """x, scale, bias, mean, rstd, by x's statistics, and as many of r."""
    rng = np.random.default_rng(seed)
    wide = "float64" if dtype == "float64" else "float32"
    found = []
    for centre, deviation in ((3.0, 0.5), (-1.0, 2.0)):
        x = jnp.asarray(rng.normal(centre, deviation, shape), dtype)
        values = np.asarray(x, np.float64).reshape(-1, shape[-1])
        statistics = values.mean(0), 1 / np.sqrt(values.var(0) + EPSILON)
        parameters = rng.normal(1, 0.2, shape[-1]), rng.normal(0, 0.5, shape[-1])
        found += [x, *(jnp.asarray(v, wide) for v in (*parameters, *statistics))]
    return found


def in_float64(activation, args, dy):
    """y and the gradients, by the formula."""
    x, scale, bias, mean, rstd, r, scale_r, bias_r, mean_r, rstd_r = (np.asarray(a, np.float64) for a in args)
    xhat, rhat = (x - mean) * rstd, (r - mean_r) * rstd_r
    z = xhat * scale + bias + rhat * scale_r + bias_r
    s = 1 / (1 + np.exp(-z))
    y, slope = {
        "relu": (np.maximum(z, 0), (z > 0).astype(float)),
        "silu": (z * s, s * (1 + z * (1 - s))),
    }[activation]
    dz, axes = np.asarray(dy, np.float64) * slope, tuple(range(x.ndim - 1))
    n = x.size // x.shape[-1]
    dbias, dscale, dscale_r = dz.sum(axes), (dz * xhat).sum(axes), (dz * rhat).sum(axes)
    dx = scale * rstd * (dz - dbias / n - xhat * dscale / n)
    dr = scale_r * rstd_r * (dz - dbias / n - rhat * dscale_r / n)
    return y, (dscale, dbias, dscale_r, dx, dr), z


def gradient_of_y(activation, args, dtype):
    """Random numbers; 0 where rounding of z would decide whether relu lets them pass."""
    dy = np.random.default_rng(1).standard_normal(args[0].shape)
    *_, z = in_float64(activation, args, dy)
    return jnp.asarray(np.where(np.abs(z) > 1e-4, dy, 0), dtype)


def check(found, wanted, dtype):
    unit = {"float32": 2e-5, "bfloat16": 2.0**-7, "float16": 2.0**-10}[dtype]
    for name, got, want in zip(NAMES, found, wanted, strict=True):
        got = np.asarray(got, np.float64)
        assert np.isfinite(got).all(), name
        off = np.abs(got - want).max() / np.abs(want).max()
        assert off < (unit if got.ndim > 1 else 2e-5), (name, off)


@pytest.mark.parametrize("activation", ["relu", "silu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_values_and_gradients_are_the_formulas(dtype, activation):
    shape = (3, 5, 7, 24)
    p, args = shortcut_problem(dtype, shape, 3, Activation(activation)), operands(shape, dtype)
    dy = gradient_of_y(activation, args, dtype)
    (y, *_), grads = jax.jit(
        lambda a, dy: (reference.batchnorm_shortcut(p, *a), shortcut_backward(p, a[0], dy, *a[1:]))
    )(args, dy)
    value, wanted, _ = in_float64(activation, args, dy)
    np.testing.assert_allclose(np.asarray(y, np.float64), value, rtol=1e-2, atol=2e-2)
    check(grads, wanted, dtype)


SIZES = {  # of at least 4 MB in 16 bits: rows of 1, 8, 17, 32 and 512 vectors, a last stage that is not whole
    "one_vector": (16, 96, 201, 8),
    "narrow": (8, 65, 67, 64),
    "wide": (2, 33, 16, 4096),
    "resnet": (8, 56, 56, 256),
    "threads_that_are_left": (8, 57, 41, 136),
}


@pytest.mark.skipif(DEVICE.compute_capability != (9, 0), reason="the kernel is made for Hopper")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("activation", ["relu", "silu", "gelu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_kernel_gives_what_the_formula_gives(dtype, activation, size):
    shape = SIZES[size]
    if dtype == "float32":  # rows of as many vectors
        shape = (*shape[:-1], shape[-1] // 2)
    p = dataclasses.replace(shortcut_problem(dtype, shape, 3, Activation(activation)), implementation="native")
    args = operands(shape, dtype)
    dy = gradient_of_y("relu", args, dtype)
    run = jax.jit(lambda p, a, dy: shortcut_backward(p, a[0], dy, *a[1:]), static_argnums=0)
    poison()
    found = run(p, args, dy)
    wanted = run(dataclasses.replace(p, implementation="xla"), args, dy)
    check(found, [np.asarray(a, np.float64) for a in wanted], dtype)
    for _ in range(3):
        poison()
        again = run(p, args, dy)
        assert all(np.array_equal(a, b) for a, b in zip(found, again, strict=True))


def test_instances_have_sums_of_their_own():
    shape = (2, 3, 4, 8)
    p = shortcut_problem("float32", shape, 3, Activation("relu"))
    each = [[*operands(shape, "float32", seed), jnp.full(shape, seed + 1.0)] for seed in range(3)]
    stacked = [jnp.stack(a) for a in zip(*each, strict=True)]

    def f(x, *rest):
        return shortcut_backward(p, x, rest[-1], *rest[:-1])

    for got, *want in zip(jax.vmap(f)(*stacked), *(f(*a) for a in each), strict=True):
        np.testing.assert_allclose(got, jnp.stack(want), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(jax.device_count() < 4, reason="a mesh takes four devices")
@pytest.mark.parametrize("spec", [P("a"), P(None, "a"), P("a", "b"), P(None, None, None, "a")], ids=str)
def test_sums_cross_the_mesh(spec):
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4])
    shape = (4, 6, 5, 8)
    p, args = shortcut_problem("float32", shape, 3, Activation("relu")), operands(shape, "float32")
    dy = jnp.asarray(np.random.default_rng(1).standard_normal(shape), "float32")
    f = jax.jit(lambda x, dy, *rest: shortcut_backward(p, x, dy, *rest))
    placed = [jax.device_put(a, NamedSharding(mesh, spec)) if a.ndim == 4 else a for a in (args[0], dy, *args[1:])]
    for got, want in zip(f(*placed), f(args[0], dy, *args[1:]), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


# ----------------------------------------------------------------------------------------------------------------------
# The plan


PLANS = {
    "measured": (dict(), H200, "joined", "faster than"),
    "small": (dict(shape=(2, 7, 7, 64)), H200, "two", "at least 4 MB"),
    "elu": (dict(activation=Activation("elu")), H200, "two", "relu, silu and gelu"),
    "channels_first": (dict(channel_axis=1, shape=(256, 256, 56, 56)), H200, "joined", "one pass forward"),
    "odd": (dict(shape=(256, 56, 56, 250)), H200, "two", "16-byte vectors"),
    "ampere": (dict(), dataclasses.replace(H200, kind="", compute_capability=(8, 0)), "two", "capability 9.0"),
    "cpu": (dict(), _plan.Device("cpu", "cpu"), "two", "CUDA only"),
    "xla": (dict(implementation="xla"), H200, "two", "was asked for"),
}


@pytest.mark.parametrize("case", PLANS)
def test_the_plan(case, code_for_gpus):
    changed, device, choice, reason = PLANS[case]
    p = dataclasses.replace(shortcut_problem("bfloat16", (256, 56, 56, 256), 3, Activation("relu")), **changed)
    made = _plan.plan("batchnorm_shortcut", p, device)
    assert (made.implementation, made.kernel) == ("calls", choice) and reason in made.reason

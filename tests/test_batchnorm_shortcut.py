"""Two batch-norms that an addition joins: values, derivatives, the plan, what accelerate makes of residual blocks."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import DEVICE, H200, poison
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jaxconv
from jaxconv import _op, _plan
from jaxconv._activation import Activation
from jaxconv.accelerate import norms
from jaxconv.batchnorm_shortcut import gradients, join, joined, problem

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
    p, args = problem(dtype, shape, 3, Activation(activation)), operands(shape, dtype)
    dy = gradient_of_y(activation, args, dtype)
    (y, *_), grads = jax.jit(lambda a, dy: (joined(p, *a), gradients(p, a[0], dy, *a[1:])))(args, dy)
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
    p = dataclasses.replace(problem(dtype, shape, 3, Activation(activation)), implementation="native")
    args = operands(shape, dtype)
    dy = gradient_of_y("relu", args, dtype)
    run = jax.jit(lambda p, a, dy: gradients(p, a[0], dy, *a[1:]), static_argnums=0)
    poison()
    found = run(p, args, dy)
    wanted = run(dataclasses.replace(p, implementation="xla"), args, dy)
    check(found, [np.asarray(a, np.float64) for a in wanted], dtype)
    for _ in range(3):
        poison()
        again = run(p, args, dy)
        assert all(np.array_equal(a, b) for a, b in zip(found, again, strict=True))


def test_both_modes_and_any_order(x64):
    shape = (2, 3, 2, 4)
    p, args = problem("float64", shape, 3, Activation("silu")), operands(shape, "float64")
    x, scale, bias, _, _, r, scale_r, bias_r, _, _ = args

    def f(x, scale, bias, r, scale_r, bias_r):  # statistics as functions of x and r: the gradients are complete
        def statistics(x):
            return jnp.mean(x, (0, 1, 2)), jax.lax.rsqrt(jnp.var(x, (0, 1, 2)) + EPSILON)

        return join(p, x, scale, bias, *statistics(x), r, scale_r, bias_r, *statistics(r))

    check_grads(f, (x, scale, bias, r, scale_r, bias_r), order=2, modes=["fwd", "rev"], atol=1e-5, rtol=1e-5)


def test_instances_of_vmap_have_sums_of_their_own():
    shape = (2, 3, 4, 8)
    p = problem("float32", shape, 3, Activation("relu"))
    each = [operands(shape, "float32", seed) for seed in range(3)]
    stacked = [jnp.stack(a) for a in zip(*each, strict=True)]
    f = jax.grad(lambda *a: jnp.sum(jnp.sin(join(p, *a))), (0, 1, 5))
    for got, *want in zip(jax.vmap(f)(*stacked), *(f(*a) for a in each), strict=True):
        np.testing.assert_allclose(got, jnp.stack(want), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("policy", "runs"), [("save_all", 1), ("save_all_but_batchnorms", 2)])
def test_rematerialised_it_runs_again_where_the_policy_says_so(policy, runs):
    shape = (2, 3, 4, 8)
    p, args = problem("float32", shape, 3, Activation("silu")), operands(shape, "float32")

    def f(*args):
        return jnp.sum(jnp.sin(join(p, *args)))

    again = jax.checkpoint(f, policy=getattr(jaxconv.checkpoint_policies, policy))
    names = [e.primitive.name for e in _op.equations(jax.make_jaxpr(jax.grad(again, (0, 5)))(*args).jaxpr)]
    assert names.count("jaxconv_batchnorm_shortcut") == runs
    for got, want in zip(jax.grad(again, (0, 5))(*args), jax.grad(f, (0, 5))(*args), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(jax.device_count() < 4, reason="a mesh takes four devices")
@pytest.mark.parametrize("spec", [P("a"), P(None, "a"), P("a", "b"), P(None, None, None, "a")], ids=str)
def test_sums_cross_the_mesh(spec):
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4])
    shape = (4, 6, 5, 8)
    p, args = problem("float32", shape, 3, Activation("relu")), operands(shape, "float32")
    dy = jnp.asarray(np.random.default_rng(1).standard_normal(shape), "float32")
    f = jax.jit(lambda x, dy, *rest: gradients(p, x, dy, *rest))
    placed = [jax.device_put(a, NamedSharding(mesh, spec)) if a.ndim == 4 else a for a in (args[0], dy, *args[1:])]
    for got, want in zip(f(*placed), f(args[0], dy, *args[1:]), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


# ----------------------------------------------------------------------------------------------------------------------
# The plan


PLANS = {
    "measured": (dict(), H200, "joined", "faster than"),
    "small": (dict(shape=(2, 7, 7, 64)), H200, "two", "at least 4 MB"),
    "elu": (dict(activation=Activation("elu")), H200, "two", "relu, silu and gelu"),
    "channels_first": (dict(channel_axis=1, shape=(256, 256, 56, 56)), H200, "two", "channels last"),
    "odd": (dict(shape=(256, 56, 56, 250)), H200, "two", "16-byte vectors"),
    "ampere": (dict(), dataclasses.replace(H200, kind="", compute_capability=(8, 0)), "two", "capability 9.0"),
    "cpu": (dict(), _plan.Device("cpu", "cpu"), "two", "CUDA only"),
    "xla": (dict(implementation="xla"), H200, "two", "was asked for"),
}


@pytest.mark.parametrize("case", PLANS)
def test_the_plan(case, code_for_gpus):
    changed, device, choice, reason = PLANS[case]
    p = dataclasses.replace(problem("bfloat16", (256, 56, 56, 256), 3, Activation("relu")), **changed)
    made = _plan.plan("batchnorm_shortcut", p, device)
    assert (made.implementation, made.kernel) == ("calls", choice) and reason in made.reason


# ----------------------------------------------------------------------------------------------------------------------
# accelerate


class Block(nn.Module):
    """A residual block with a projection, which comes first or last."""

    first: bool = False
    act: str = "relu"
    dtype: object = jnp.float32
    shown: bool = False

    @nn.compact
    def __call__(self, x):
        act, dtype = getattr(nn, self.act), self.dtype

        def norm(name):
            return nn.BatchNorm(use_running_average=False, momentum=0.9, epsilon=EPSILON, dtype=dtype, name=name)

        def shortcut(x):
            return norm("norm_r")(nn.Conv(32, (1, 1), 2, use_bias=False, dtype=dtype, name="conv_r")(x))

        r = shortcut(x) if self.first else None
        y = act(norm("norm_1")(nn.Conv(8, (3, 3), 2, use_bias=False, dtype=dtype, name="conv_1")(x)))
        y = norm("norm_2")(nn.Conv(32, (1, 1), use_bias=False, dtype=dtype, name="conv_2")(y))
        r = shortcut(x) if r is None else r
        return (act(y + r), r) if self.shown else act(y + r)


def steps(block, x):
    """The loss with its gradients, as it is and accelerated."""
    v = block.init(jax.random.key(0), x)

    def loss(params, x):
        found, updates = block.apply({"params": params, "batch_stats": v["batch_stats"]}, x, mutable=["batch_stats"])
        outs = found if isinstance(found, tuple) else (found,)
        weights = jnp.cos(jnp.arange(outs[0].size, dtype=jnp.float32)).reshape(outs[0].shape)
        return sum(jnp.sum(out.astype(jnp.float32) * weights) for out in outs), updates

    accelerated = jaxconv.accelerate(loss)
    return [
        functools.partial(jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True)), v["params"], x)
        for f in (loss, accelerated)
    ], jaxconv.explain(accelerated)(v["params"], x).accelerated


@pytest.fixture
def taken(monkeypatch):
    """As where the plan is to take both in one."""
    monkeypatch.setattr(norms, "takes_both", lambda p: True)


@pytest.mark.parametrize("act", ["relu", "silu"])
@pytest.mark.parametrize("first", [False, True])
def test_a_block_with_a_projection_is_one_call_and_the_same(first, act, taken):
    x = jax.random.normal(jax.random.key(1), (4, 8, 8, 16))
    (plain, accelerated), report = steps(Block(first, act), x)
    assert [f.fused for f in report if "shortcut" in f.fused] == [
        f"conv + batchnorm (training) + the shortcut's + {act}"
    ]
    assert not [f for f in report if not f.fused]
    for got, want in zip(jax.tree.leaves(accelerated()), jax.tree.leaves(plain()), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4 * float(jnp.abs(want).max()))
    jaxpr = jax.make_jaxpr(accelerated)()
    names = [e.primitive.name for e in _op.equations(jaxpr.jaxpr)]
    # The gradient of x's two users is added in a convolution's.
    assert names.count("jaxconv_batchnorm_shortcut_backward") == names.count("jaxconv_conv_dgrad_add") == 1


def test_sixteen_bits_lose_no_more_than_the_two_calls(taken):
    x = jax.random.normal(jax.random.key(1), (4, 8, 8, 16), jnp.bfloat16)
    (plain, accelerated), _ = steps(Block(dtype=jnp.bfloat16), x)
    exact = steps(Block(), x.astype(jnp.float32))[0][0]()[1]
    for grads in (accelerated()[1],):
        for got, rough, want in zip(*map(jax.tree.leaves, (grads, plain()[1], exact)), strict=True):
            largest = float(jnp.abs(want).max())
            off, was = (float(jnp.abs(a.astype(jnp.float32) - want).max()) / largest for a in (got, rough))
            assert off < max(0.03, 2 * was)


@pytest.mark.parametrize(
    "block", [Block(shown=True), Block(act="elu")], ids=["somebody_else_reads_it", "another_activation"]
)
def test_what_stays_two_calls(block, taken, monkeypatch):
    if block.act == "elu":
        monkeypatch.setattr(norms, "takes_both", lambda p: p.activation.name == "relu")
    x = jax.random.normal(jax.random.key(1), (4, 8, 8, 16))
    (plain, accelerated), report = steps(block, x)
    assert not any("shortcut" in f.fused for f in report)
    assert sum("residual" in f.fused for f in report) == 1
    for got, want in zip(jax.tree.leaves(accelerated()), jax.tree.leaves(plain()), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4 * float(jnp.abs(want).max()))


def test_where_the_plan_says_nothing_of_it_nothing_changes():
    x = jax.random.normal(jax.random.key(1), (4, 8, 8, 16))
    _, report = steps(Block(), x)
    assert not any("shortcut" in f.fused for f in report)


def test_gradients_of_many(x64):
    """The gradient of a map, where JAX maps the joined pair before it differentiates."""

    def normalised(a):
        return jnp.mean(a, (0, 1)), jax.lax.rsqrt(jnp.var(a, (0, 1)) + EPSILON)

    def pair(x, r):
        one, zero = jnp.ones(8), jnp.zeros(8)
        p = problem("float64", x.shape, 2, Activation("relu"))
        return jnp.sum(jnp.sin(join(p, x, one, zero, *normalised(x), r, one, zero, *normalised(r))))

    def plain(x, r):
        (mean, rstd), (mean_r, rstd_r) = normalised(x), normalised(r)
        return jnp.sum(jnp.sin(jax.nn.relu((x - mean) * rstd + (r - mean_r) * rstd_r)))

    x, r = np.random.default_rng(3).normal(1, 2, (2, 3, 5, 4, 8))
    got, want = (jax.grad(lambda x, f=f: jnp.sum(jax.vmap(f)(x, r)))(jnp.asarray(x)) for f in (pair, plain))
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)

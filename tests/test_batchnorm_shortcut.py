"""Two batch-norms that an addition joins: values, derivatives, the plan, what accelerate makes of residual blocks."""

import collections
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
    """A residual block with a projection, which comes first or last, or whose convolution alone comes first."""

    order: str = "last"
    act: str = "relu"
    dtype: object = jnp.float32
    stride: int = 2
    width: int = 8
    out: int = 32
    last: tuple = (1, 1)  # the last convolution's filter and its groups
    shortcut: str = "conv"  # or dense, or conv_with_bias
    shown: str = ""  # what is a result too
    gated: str = ""  # what makes a factor of norm_2's scale

    @nn.compact
    def __call__(self, x):
        act, dtype = getattr(nn, self.act), self.dtype

        def norm(name, **how):
            return nn.BatchNorm(False, momentum=0.9, epsilon=EPSILON, dtype=dtype, name=name, **how)

        def projection(x):
            if self.shortcut == "dense":
                return nn.Dense(self.out, use_bias=False, dtype=dtype, name="dense_r")(
                    x[:, :: self.stride, :: self.stride]
                )
            bias = self.shortcut == "conv_with_bias"
            return nn.Conv(self.out, (1, 1), self.stride, use_bias=bias, dtype=dtype, name="conv_r")(x)

        z_r = projection(x) if self.order != "last" else None
        r = norm("norm_r")(z_r) if self.order == "first" else None
        size, groups = self.last
        y = nn.Conv(
            self.out if groups > 1 else self.width, (3, 3), self.stride, use_bias=False, dtype=dtype, name="conv_1"
        )(x)
        y = act(norm("norm_1")(y))
        z = nn.Conv(self.out, (size,) * 2, use_bias=False, feature_group_count=groups, dtype=dtype, name="conv_2")(y)
        z_r = projection(x) if z_r is None else z_r
        if self.gated:
            gate = jnp.max({"z": z, "z_r": z_r, "x": jnp.tile(x, 2)}[self.gated], (0, 1, 2))
            y = norm("norm_2", use_bias=False)(z) * jax.nn.sigmoid(gate)
        else:
            y = norm("norm_2")(z)
        r = norm("norm_r")(z_r) if r is None else r
        return act(y + r), *({"z": z, "z_r": z_r, "r": r}[name] for name in self.shown.split())


def steps(block, x):
    """The loss with its gradients, as it is and accelerated."""
    v = block.init(jax.random.key(0), x)

    def loss(params, x):
        outs, updates = block.apply({"params": params, "batch_stats": v["batch_stats"]}, x, mutable=["batch_stats"])
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


def calls(f):
    """(name, problem) of jaxconv's calls, without those that a composite is made of."""

    def of(jaxpr):
        for e in jaxpr.eqns:
            if e.primitive.name.startswith("jaxconv_"):
                yield e.primitive.name.removeprefix("jaxconv_").removesuffix("_fork"), e.params["problem"]
            else:
                for inner in _op.inner_jaxprs(e, None):
                    yield from of(inner)

    return list(of(jax.make_jaxpr(f)().jaxpr))


def check_same(accelerated, plain):
    """Of a bias in front of a batch-norm the gradient is 0, but for rounding."""
    for got, want in zip(jax.tree.leaves(accelerated()), jax.tree.leaves(plain()), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4 * max(0.05, float(jnp.abs(want).max())))


def told(report):
    """What the report says of the one joined call."""
    (text,) = (f.fused for f in report if "shortcut" in f.fused)
    return text


BOTH = "conv + batchnorm (training) + the shortcut's conv and batchnorm"
ORDERS = ("last", "first", "conv_first")


@pytest.mark.parametrize("act", ["relu", "silu"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("order", ORDERS)
def test_a_block_with_a_projection_is_one_call_of_two_pairs_and_the_same(order, stride, act, taken):
    x = jax.random.normal(jax.random.key(1), (4, 8, 8, 16))
    (plain, accelerated), report = steps(Block(order, act, stride=stride), x)
    assert told(report) == f"{BOTH} + {act}"
    assert not [f for f in report if not f.fused]
    check_same(accelerated, plain)
    made = calls(accelerated)
    names = [name for name, _ in made]
    # Every convolution is a pair, and no other call reads a result for its statistics.
    pairs = sorted(p.conv.w_shape for name, p in made if name == "conv_batchnorm")
    assert pairs == [(1, 1, 8, 32), (1, 1, 16, 32), (3, 3, 16, 8)]
    assert not {"conv", "conv_fprop", "batchnorm_train"}.intersection(names)
    assert names.count("batchnorm_shortcut") == names.count("batchnorm_shortcut_backward") == 1
    # The gradients of x's two users are added in the shortcut's convolution, the cheapest, whatever comes first.
    assert [p.w_shape for name, p in made if name == "conv_dgrad_add"] == [(1, 1, 16, 32)]
    added = [
        e.outvars[0].aval.shape
        for e in _op.equations(jax.make_jaxpr(accelerated)().jaxpr)
        if e.primitive.name == "add_any"
    ]
    assert x.shape not in added


UNPAIRED = {  # a block, and the layer that is no pair with its batch-norm
    "somebody_else_reads_the_shortcuts": (dict(shown="z_r"), "conv_r"),
    "somebody_else_reads_the_last": (dict(shown="z"), "conv_2"),
    "a_factor_is_made_of_the_shortcuts": (dict(gated="z_r"), "conv_r"),
    "a_factor_is_made_of_the_last": (dict(gated="z"), "conv_2"),
    "dense": (dict(shortcut="dense"), "dense_r"),
    "a_bias_in_between": (dict(shortcut="conv_with_bias"), "conv_r"),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("case", UNPAIRED)
def test_a_result_that_is_needed_elsewhere_is_no_pair(case, order, taken):
    changed, left = UNPAIRED[case]
    x = jax.random.normal(jax.random.key(1), (4, 8, 8, 16))
    (plain, accelerated), report = steps(Block(order, **changed), x)
    # What is told first is the batch-norm that comes first.
    alone = (left == "conv_2") == (order != "first")
    first = "" if alone else "conv + "
    second = "the shortcut's conv and batchnorm" if alone else "the shortcut's"
    assert told(report) == f"{first}batchnorm (training) + {second} + relu"
    check_same(accelerated, plain)
    made = calls(accelerated)
    names = [name for name, _ in made]
    assert names.count("conv_batchnorm") == 2 and names.count("batchnorm_train") == 1
    assert names.count("batchnorm_shortcut") == names.count("batchnorm_shortcut_backward") == 1
    # Nothing is computed twice.
    assert sum(name in ("conv", "conv_fprop") for name in names) == (left != "dense_r")


def test_a_factor_of_something_else_is_no_reason(taken):
    x = jax.random.normal(jax.random.key(1), (4, 8, 8, 16))
    (plain, accelerated), report = steps(Block(gated="x"), x)
    assert told(report) == f"{BOTH} + relu"
    check_same(accelerated, plain)


@pytest.mark.parametrize(("order", "chains"), [("last", 1), ("conv_first", 1), ("first", 0)])
def test_a_convolution_is_in_one_call(order, chains, taken, monkeypatch):
    """conv_2 alone reads a batch-norm's result, which it may normalise where it reads it: so it is chained to it, or a
    pair with the one behind it, which is found before it where the shortcut's batch-norm comes first."""
    chosen = _plan.Plan("calls", "a test's", "normalised")
    monkeypatch.setattr(
        norms, "chosen", lambda p: chosen if p.conv.groups > 1 else dataclasses.replace(chosen, kernel="two")
    )
    x = jax.random.normal(jax.random.key(1), (4, 8, 8, 16))
    (plain, accelerated), report = steps(Block(order, last=(3, 32)), x)
    assert sum(f.fused.endswith("relu + conv") for f in report) == chains
    assert told(report) == f"{BOTH.removeprefix('conv + ') if chains else BOTH} + relu"
    check_same(accelerated, plain)
    names = [name for name, _ in calls(accelerated)]
    assert (names.count("conv_batchnorm"), names.count("batchnorm_conv")) == ((1, 1) if chains else (3, 0))
    assert not {"conv", "conv_fprop"}.intersection(names)


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
    "block", [Block(shown="r"), Block(act="elu")], ids=["somebody_else_reads_it", "another_activation"]
)
def test_what_stays_two_calls(block, taken, monkeypatch):
    if block.act == "elu":
        monkeypatch.setattr(norms, "takes_both", lambda p: p.activation.name == "relu")
    x = jax.random.normal(jax.random.key(1), (4, 8, 8, 16))
    (plain, accelerated), report = steps(block, x)
    assert not any("shortcut" in f.fused for f in report)
    assert sum("residual" in f.fused for f in report) == 1
    check_same(accelerated, plain)


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


@pytest.mark.as_planned
@pytest.mark.parametrize("order", ORDERS)
def test_on_a_hopper_both_results_leave_their_kernels_with_statistics(order, code_for_gpus):
    block = Block(order, dtype=jnp.bfloat16, stride=1, width=64, out=256)
    shapes = jax.ShapeDtypeStruct((256, 56, 56, 64), "bfloat16")
    v = jax.eval_shape(block.init, jax.random.key(0), shapes)
    f = jaxconv.accelerate(lambda v, x: block.apply(v, x, mutable=["batch_stats"]))
    ran = collections.Counter({})
    with _plan.Device.assumed(H200):
        found = jaxconv.explain(f)(v, shapes)
    for call in found:
        ran[call.op, call.plan.kernel] += call.count
    assert ran["batchnorm_shortcut", "joined"] == 1
    assert ran["conv_batchnorm", "statistics"] == ran["conv_statistics", "sm90/statistics"] == 3
    assert not any(op in ("conv_fprop", "batchnorm_train") for op, _ in ran)

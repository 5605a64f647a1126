"""batchnorm_conv: against the two calls, which have tests of their own, and against float64; its plans; its masks."""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import H200, PLATFORM, calls, normal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jaxconv
from jaxconv import _plan
from jaxconv._activation import Activation
from jaxconv._plan import measured
from jaxconv._problem import BatchNormConvProblem, BatchNormProblem, ConvProblem, NormalisedConvProblem

ACTIVATIONS = (None, "relu", "relu6", ("leaky_relu", 0.2), "elu", "tanh", "sigmoid", "silu", "gelu", "gelu_exact")
C = 8
# Padding and stride under a 3x3 filter of rows of 9 x 8 pixels
WINDOWS: dict[str, dict[str, Any]] = {
    "same": dict(padding=1),
    "low": dict(padding=((2, 0), (2, 0))),
    "high": dict(padding=((0, 2), (0, 2))),
    "valid": dict(padding="VALID"),
    "stride": dict(padding=((0, 1), (0, 1)), stride=2),
    "stride both": dict(padding=1, stride=2),
}
NATIVE: dict[str, Any] = dict(implementation="native")


def data(dtype: str = "float64", layout: str = "NHWC", groups: int = C) -> list[jax.Array]:
    """x, scale, bias, running_mean, running_var, w: x is far from zero, and so is the batch-norm of zero."""
    x, w = 3 * normal(0, (2, 9, 8, C)) + 5, normal(1, (3, 3, C // groups, C))
    v = [1 + normal(2, (C,)) / 4, 1 + normal(3, (C,)) / 2, normal(4, (C,)), 1 + np.abs(normal(5, (C,)))]
    if layout == "NCHW":
        x, w = x.transpose(0, 3, 1, 2), w.transpose(3, 2, 0, 1)
    wide = "float64" if dtype == "float64" else "float32"
    return [jnp.asarray(x, dtype), *(jnp.asarray(a, wide) for a in v), jnp.asarray(w, dtype)]


def two(x: Any, scale: Any, bias: Any, mean: Any, var: Any, w: Any, *, training: bool, **how: Any) -> Any:
    """The two calls, by XLA."""
    layout, implementation = how.pop("layout", "NHWC"), how.pop("implementation", "xla")
    norm = {name: how.pop(name) for name in ("activation", "momentum") if name in how}
    axis = 1 if layout == "NCHW" else -1
    a, *new = jaxconv.batchnorm(
        x, scale, bias, mean, var, training=training, channel_axis=axis, implementation=implementation, **norm
    )
    return jaxconv.conv2d(a, w, layout=layout, implementation=implementation, **how), *new


def alike(f: Any, g: Any, args: list[jax.Array], tolerance: float) -> None:
    """Values and every gradient, of cotangents of every result."""
    got, back = jax.vjp(f, *args)
    want, back_of_two = jax.vjp(g, *args)
    cts = tuple(jnp.asarray(normal(7 + i, y.shape), y.dtype) for i, y in enumerate(got))
    for a, b in zip([*got, *back(cts)], [*want, *back_of_two(cts)], strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1.0, float(jnp.abs(b).max())))


@pytest.fixture
def wide():
    with jax.enable_x64(True):
        yield


on_cpus = pytest.mark.skipif(PLATFORM != "cpu", reason="a GPU has these kernels in 16 bits")


@on_cpus
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_it_is_the_two_calls(activation, training, wide):
    how = dict(training=training, groups=C, activation=activation, padding=1)
    alike(functools.partial(jaxconv.batchnorm_conv, **how, **NATIVE), functools.partial(two, **how), data(), 1e-10)


@on_cpus
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_what_is_padded_is_its_result(window, layout, wide):
    how = dict(training=True, groups=C, activation="silu", layout=layout, momentum=0.9, **WINDOWS[window])
    args = data(layout=layout)
    alike(functools.partial(jaxconv.batchnorm_conv, **how, **NATIVE), functools.partial(two, **how), args, 1e-10)


@on_cpus
@pytest.mark.parametrize("groups", [1, 4])
def test_any_convolution_is_taken(groups, wide):
    how = dict(training=True, groups=groups, activation="relu6", padding=1)
    f = functools.partial(jaxconv.batchnorm_conv, **how, **NATIVE)
    alike(f, functools.partial(two, **how), data(groups=groups), 1e-10)


@on_cpus
def test_every_pass_normalises_what_it_reads():
    args = data("float32")
    f = functools.partial(jaxconv.batchnorm_conv, training=True, groups=C, activation="relu6", **NATIVE)
    assert calls(f, *args) == {"batchnorm_moments": 1, "conv_normalised": 1}

    def gradient(*wanted: int) -> Any:
        return jax.grad(lambda *a: (f(*a)[0] ** 2).sum(), wanted)

    forward = {"batchnorm_moments": 1, "conv_normalised": 1}
    assert calls(gradient(0, 1, 2, 5), *args) == forward | {"conv_normalised_gradient": 1, "conv_normalised_dx": 1}
    # Of fewer gradients each is made by itself
    assert calls(gradient(5), *args) == forward | {"conv_normalised_wgrad": 1}
    assert calls(gradient(0), *args) == forward | {"conv_dgrad": 1, "batchnorm_backward": 1}
    infer = functools.partial(jaxconv.batchnorm_conv, training=False, groups=C, activation="relu6", **NATIVE)
    assert calls(infer, *args) == {"conv_normalised": 1}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_without_times_it_is_the_two_calls(dtype):
    args = data(dtype)
    how = dict(training=True, groups=C, activation="silu", padding=1)
    f, g = functools.partial(jaxconv.batchnorm_conv, **how), functools.partial(two, **how, implementation=None)
    assert calls(f, *args) == calls(g, *args)
    for a, b in zip(jax.jit(f)(*args), jax.jit(g)(*args), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("activation", ["relu", "relu6", "silu"])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_are_those_of_float64(activation, window, dtype):
    """On a GPU of compute capability 9.0 by the kernels; elsewhere the two calls are held to the same."""
    args = data(dtype)
    how = dict(training=True, groups=C, activation=activation, **WINDOWS[window])
    run = functools.partial(jaxconv.batchnorm_conv, **how, **NATIVE)

    def outs(f: Any, args: Any) -> Any:
        y, back = jax.vjp(lambda *a: f(*a)[0], *args)
        ct = jnp.asarray(normal(9, y.shape), dtype)
        return [y, *(g for i, g in enumerate(back(ct.astype(y.dtype))) if i in (0, 1, 2, 5))]

    got = outs(run, args)
    with jax.enable_x64(True):
        exact = outs(functools.partial(two, **how), [jnp.asarray(np.asarray(a, np.float64)) for a in args])
    ulp = float(jnp.finfo(dtype).eps)
    for a, b in zip(got, exact, strict=True):
        size = float(np.abs(b).max())
        np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=0, atol=3 * ulp * size)


@on_cpus
@pytest.mark.parametrize("training", [True, False])
def test_derivatives_of_both_modes(training, wide):
    f = functools.partial(jaxconv.batchnorm_conv, training=training, groups=C, activation="silu", **NATIVE)
    check_grads(f, data(), order=2, modes=("fwd", "rev"), rtol=1e-4, atol=1e-4)


@on_cpus
def test_a_mapped_call_is_each_ones(wide):
    f = functools.partial(jaxconv.batchnorm_conv, training=True, groups=C, activation="relu6", **NATIVE)

    def outs(*args: jax.Array) -> Any:
        return f(*args), jax.grad(lambda *a: (f(*a)[0] ** 2).sum(), (0, 1, 5))(*args)

    one, other = data(), [a * 1.25 + 0.5 for a in data()]
    for shared in ((), (5,), (0,)):
        axes = [None if i in shared else 0 for i in range(6)]
        stacked = [a if i in shared else jnp.stack([a, b]) for i, (a, b) in enumerate(zip(one, other, strict=True))]
        both = jax.vmap(outs, in_axes=axes)(*stacked)
        for i, args in enumerate(
            (one, [a if k in shared else b for k, (a, b) in enumerate(zip(one, other, strict=True))])
        ):
            for a, b in zip(jax.tree.leaves(outs(*args)), jax.tree.leaves(both), strict=True):
                np.testing.assert_allclose(a, b[i], rtol=1e-9, atol=1e-9)


@on_cpus
def test_recomputed_it_is_the_same(wide):
    f = functools.partial(jaxconv.batchnorm_conv, training=True, groups=C, activation="silu", **NATIVE)

    def loss(*a: jax.Array) -> jax.Array:
        return (f(*a)[0] ** 2).sum()

    want = jax.grad(loss, (0, 1, 2, 5))(*data())
    for policy in (None, jaxconv.checkpoint_policies.save_convs, jaxconv.checkpoint_policies.save_nothing_of_jaxconv):
        got = jax.grad(jax.checkpoint(loss, policy=policy), (0, 1, 2, 5))(*data())
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10)


@on_cpus
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    "spec",
    [P(("a", "b")), P("a", "b"), P(None, "a", "b"), P("a", None, None, "b")],
    ids=["images", "rows", "pixels", "channels"],
)
@pytest.mark.parametrize("implementation", [None, "native"])
def test_on_a_mesh_it_is_the_unsharded_one(kind, spec, implementation):
    if len(jax.devices()) < 4:
        pytest.skip("needs 4 devices")
    x, *rest = data("float32")
    args = [jnp.concatenate([x, x[::-1] + 1])[:, :8], *rest]

    def run(*args: jax.Array) -> Any:
        def loss(*a: jax.Array) -> jax.Array:
            y, mean, var = jaxconv.batchnorm_conv(
                *a, training=True, groups=C, activation="silu", padding=1, implementation=implementation
            )
            return (y**2).sum() + mean.sum() + var.sum()

        return jax.value_and_grad(loss, (0, 1, 2, 5))(*args)

    expected = jax.jit(run)(*args)
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind,) * 2, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        placed = [jax.device_put(args[0], NamedSharding(mesh, spec))]
        of_c = spec[3] if len(spec) > 3 else None
        placed += [jax.device_put(a, NamedSharding(mesh, P(of_c))) for a in args[1:5]]
        placed += [jax.device_put(args[5], NamedSharding(mesh, P(None, None, None, of_c)))]
        actual = jax.jit(run)(*placed)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5 * max(1.0, float(jnp.abs(e).max())))


def test_what_is_refused_names_the_argument():
    x, *v, w = data("float32")
    with pytest.raises(ValueError, match="batchnorm_conv: scale has shape"):
        jaxconv.batchnorm_conv(x, v[0][:3], *v[1:], w, training=True, groups=C)
    with pytest.raises(ValueError, match="batchnorm_conv: w has 2 dimensions"):
        jaxconv.batchnorm_conv(x, *v, w[0, 0], training=True)
    with pytest.raises(TypeError, match="batchnorm_conv: training"):
        jaxconv.batchnorm_conv(x, *v, w, training=jnp.bool_(True), groups=C)


# ----------------------------------------------------------------------------------------------------------------------
# Plans


def problem(
    size: int = 56, c: int = 144, dtype: str = "bfloat16", filter: int = 3, **how: Any
) -> NormalisedConvProblem:
    activation, implementation = how.pop("activation", "relu6"), how.pop("implementation", None)
    settled = dict(stride=1, padding="SAME", dilation=1, groups=c, layout="NHWC", precision=None, algorithm=None) | how
    x, w = jax.ShapeDtypeStruct((256, size, size, c), dtype), jax.ShapeDtypeStruct((filter, filter, 1, c), dtype)
    conv = ConvProblem.infer(
        "batchnorm_conv", 2, x, w, None, activation=None, return_preactivation=False, implementation=implementation,
        **settled,
    )  # fmt: skip
    norm = BatchNormProblem(
        "batchnorm_conv", dtype, x.shape, 3, True, 0.9, 1e-5, Activation(activation), implementation=implementation
    )
    return NormalisedConvProblem.of(norm, conv)


OPS = ("conv_normalised", "conv_normalised_wgrad", "conv_normalised_gradient", "conv_normalised_dx")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("how", "kernel"),
    [
        ({}, "depthwise/rows"),
        ({"activation": "silu", "dtype": "float16"}, "depthwise/rows"),
        ({"stride": 2, "activation": "relu"}, "depthwise/rows_strided"),
        ({"activation": "gelu"}, None),
        ({"activation": "none"}, None),
        ({"dtype": "float32"}, None),
        ({"filter": 5}, None),
        ({"filter": 5, "stride": 2}, None),
        ({"dilation": 2}, None),
        ({"padding": 3}, None),
    ],
)
def test_a_gpus_kernels(op, how, kernel, code_for_gpus):
    plan = _plan.plan(op, problem(**how, implementation="native"), H200)
    assert (plan.implementation, plan.kernel) == (("native", kernel) if kernel else ("calls", "two"))
    if kernel and op in OPS[1:3]:
        assert plan.splits > 1 and plan.workspace_bytes == plan.splits * 4 * 144 * (9 if op == OPS[1] else 11)
    elif kernel:
        assert plan.splits == 1 and plan.workspace_bytes == 0
    older = _plan.plan(
        op, problem(**how, implementation="native"), dataclasses.replace(H200, compute_capability=(8, 0))
    )
    assert older.kernel == "two"


@pytest.mark.parametrize("saves", [True, False])
def test_a_gpu_gets_two_calls_until_times_are_known(saves, code_for_gpus, monkeypatch):
    monkeypatch.setattr(measured, "_learned", {})
    p, device = problem(), _plan.Device("cuda", "a GPU", (9, 0), 132)
    whole = BatchNormConvProblem(dataclasses.replace(p.norm, training=True), p.conv)
    assert _plan.plan("batchnorm_conv", whole, device).kernel == "two"
    op_measured, kind, coordinates = measured.features("conv_normalised", p)
    entry = {"case": "a", "problem": "", "xla_ms": 0.3, "native_ms": {"depthwise/rows": 0.25 if saves else 0.295}}
    measured.learn(device.kind, [{**entry, "op": op_measured, "kind": kind, "coordinates": coordinates}])
    assert _plan.plan("batchnorm_conv", whole, device).kernel == ("normalised" if saves else "two")
    for op in ("conv_normalised", "conv_normalised_wgrad"):
        assert (_plan.plan(op, p, device).implementation == "native") is saves
    # Without a convolution that sums up what it writes, x is read once more: a resident batch-norm reads it once.
    if saves:
        resident = _plan.Plan("native", "", "resident_team")
        real = _plan.choose.plan
        with monkeypatch.context() as patched:
            patched.setattr(_plan.choose, "plan", lambda op, *a: resident if op == "batchnorm_train" else real(op, *a))
            for times, kernel in (((0.3, 0.25), "two"), ((0.5, 0.25), "normalised")):
                entry |= {"xla_ms": times[0], "native_ms": {"depthwise/rows": times[1]}}
                measured.learn(device.kind, [{**entry, "op": op_measured, "kind": kind, "coordinates": coordinates}])
                assert _plan.plan("batchnorm_conv", whole, device).kernel == kernel
    # The backward pass has times of its own
    assert _plan.plan("batchnorm_conv_backward", whole, device).kernel == "two"
    back, *_ = measured.features("conv_normalised_gradient", p)
    assert back == measured.features("conv_normalised_dx", p)[0] != op_measured
    entry |= {"xla_ms": 0.3, "native_ms": {"depthwise/rows": 0.25 if saves else 0.295}}
    measured.learn(device.kind, [{**entry, "op": back, "kind": kind, "coordinates": coordinates}])
    assert _plan.plan("batchnorm_conv_backward", whole, device).kernel == ("normalised" if saves else "two")
    for op in ("conv_normalised_gradient", "conv_normalised_dx"):
        assert (_plan.plan(op, p, device).implementation == "native") is saves
    # silu takes other times
    silu = dataclasses.replace(p, x_activation=Activation("silu"))
    assert _plan.plan("conv_normalised", silu, device).kernel == "two"


def test_disabled_it_is_two_calls(code_for_gpus, monkeypatch):
    for name in ("conv_normalised", "conv", "batchnorm", "all"):
        monkeypatch.setenv("JAXCONV_DISABLE", name)
        assert _plan.plan("conv_normalised", problem(implementation="native"), H200).kernel == "two"
    whole = BatchNormConvProblem(dataclasses.replace(problem().norm, training=True), problem().conv)
    for name in ("conv_normalised_gradient", "conv", "batchnorm_backward", "batchnorm", "all"):
        monkeypatch.setenv("JAXCONV_DISABLE", name)
        assert _plan.plan("batchnorm_conv_backward", whole, H200).kernel == "two"
    monkeypatch.delenv("JAXCONV_DISABLE")
    assert _plan.plan("batchnorm_conv_backward", whole, H200).kernel == "normalised"


def test_what_it_costs():
    args = data("float32")
    f = functools.partial(jaxconv.batchnorm_conv, training=False, groups=C, activation="relu")
    with_it = jaxconv.cost(functools.partial(f, **NATIVE))(*args)["flops"]
    assert abs(with_it - jaxconv.cost(f)(*args)["flops"]) <= 0.02 * with_it


# ----------------------------------------------------------------------------------------------------------------------
# accelerate


@pytest.fixture
def wins(monkeypatch):
    """As where times say that a depthwise convolution normalises what it reads."""

    def chosen(p: BatchNormConvProblem) -> _plan.Plan:
        return _plan.Plan("calls", "a test's", "normalised" if p.conv.groups > 1 else "two")

    monkeypatch.setattr(importlib.import_module("jaxconv.accelerate.norms"), "chosen", chosen)


def counted(f: Any, *args: Any) -> collections.Counter[str]:
    """How often f's program has each op."""
    found: collections.Counter[str] = collections.Counter()
    for call in jaxconv.explain(f)(*args):
        found[call.op] += call.count
    return found


def mobilenet(library: str, activation: Any, dtype: Any) -> tuple[Any, Any]:
    """(f(variables, x) -> results and running statistics, variables) of two inverted residual blocks."""
    flax = pytest.importorskip("flax")
    x = jnp.asarray(normal(0, (4, 8, 8, 8)), dtype)
    if library == "linen":
        nn = flax.linen

        class Block(nn.Module):
            stride: int

            @nn.compact
            def __call__(self, x):
                norm = functools.partial(nn.BatchNorm, use_running_average=False, dtype=dtype)
                conv = functools.partial(nn.Conv, use_bias=False, dtype=dtype)
                y = activation(norm()(conv(16, (1, 1))(x)))
                y = activation(norm()(conv(16, (3, 3), strides=self.stride, feature_group_count=16)(y)))
                y = norm()(conv(8, (1, 1))(y))
                return x + y if x.shape == y.shape else y

        model = nn.Sequential([Block(1), Block(2)])
        variables = model.init(jax.random.key(0), x)

        def f(variables: Any, x: Any) -> Any:
            y, changed = model.apply(variables, x, mutable=["batch_stats"])
            return y, changed["batch_stats"]

        return f, (variables, x)
    from flax import nnx

    class Unit(nnx.Module):
        def __init__(self, stride: int, rngs: Any):
            conv = functools.partial(nnx.Conv, use_bias=False, dtype=dtype, rngs=rngs)
            norm = functools.partial(nnx.BatchNorm, dtype=dtype, rngs=rngs)
            self.expand, self.project = conv(8, 16, (1, 1)), conv(16, 8, (1, 1))
            self.depthwise = conv(16, 16, (3, 3), strides=stride, feature_group_count=16)
            self.norms = nnx.List([norm(16), norm(16), norm(8)])

        def __call__(self, x: Any) -> Any:
            y = activation(self.norms[0](self.expand(x)))
            y = activation(self.norms[1](self.depthwise(y)))
            y = self.norms[2](self.project(y))
            return x + y if x.shape == y.shape else y

    graph, state = nnx.split(nnx.List([Unit(1, nnx.Rngs(0)), Unit(2, nnx.Rngs(1))]))

    def g(state: Any, x: Any) -> Any:
        units = nnx.merge(graph, state)
        for unit in units:
            x = unit(x)
        return x, nnx.state(units, nnx.BatchStat)

    return g, (state, x)


@pytest.mark.parametrize("library", ["linen", "nnx"])
@pytest.mark.parametrize("activation", ["relu6", "silu"])
def test_a_mobilenets_blocks_are_chains(library, activation, wins):
    f, (variables, x) = mobilenet(library, getattr(jax.nn, activation), jnp.float32)
    accelerated = jaxconv.accelerate(f)
    report = accelerated.report(variables, x)
    assert not report.left, str(report)
    chains = [found.fused for found in report if found.what == "conv" and found.fused.startswith("conv + batchnorm")]
    assert chains == [f"conv + batchnorm (training) + {activation} + conv"] * 2
    ran = counted(accelerated, variables, x)
    assert ran["batchnorm_conv"] == ran["conv_normalised"] == 2 and ran["conv_batchnorm"] == 2

    def loss(of: Any) -> Any:
        def total(variables: Any, x: Any) -> Any:
            y, stats = of(variables, x)
            return (y.astype(jnp.float32) ** 2).mean(), stats

        return jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True, allow_int=True))

    got, want = loss(accelerated)(variables, x), loss(f)(variables, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if jnp.issubdtype(b.dtype, jnp.floating):
            size = max(1.0, float(jnp.abs(b).max()))
            np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * size)


def test_without_times_a_models_calls_are_what_they_were():
    f, args = mobilenet("linen", jax.nn.relu6, jnp.float32)
    ran = counted(jaxconv.accelerate(f), *args)
    assert "batchnorm_conv" not in ran and ran["conv_batchnorm"] == 6


@pytest.mark.parametrize(
    "case",
    ["another reads it", "a bias follows", "its input has other users", "not its first operand", "its own statistics"],
)
def test_what_is_no_chain_of_these_stays(case, wins):
    """Values and gradients are the function's, and the batch-norm's result stays where somebody else needs it."""
    x, w1 = jnp.asarray(normal(0, (2, 6, 6, 4)), "float32"), jnp.asarray(normal(1, (1, 1, 4, 8)), "float32")
    w2, v = jnp.asarray(normal(2, (3, 3, 1, 8)), "float32"), jnp.asarray(1 + normal(3, (8,)) / 4, "float32")

    def conv(x: jax.Array, w: jax.Array, groups: int = 1) -> jax.Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups)

    def f(x: jax.Array, w1: jax.Array, w2: jax.Array, v: jax.Array) -> Any:
        z = conv(x, w1)
        mean, var = z.mean((0, 1, 2)), z.var((0, 1, 2))
        a = jax.nn.relu6((z - mean) / jnp.sqrt(var + 1e-5) * v + v)
        if case == "not its first operand":
            return conv(z, a[:1, :3, :3, :].transpose(1, 2, 0, 3), 8), mean, var
        y = conv(a, w2, 8)
        if case == "another reads it":
            return y, a.sum(), mean, var
        if case == "a bias follows":
            return jax.nn.relu(y + v), mean, var
        if case == "its input has other users":
            return y, z.sum(), mean, var
        return y, mean, var

    args = (x, w1, w2, v)
    accelerated = jaxconv.accelerate(f)
    ran = counted(accelerated, *args)
    expected = {"its input has other users": 1, "its own statistics": 1}.get(case, 0)
    assert ran["batchnorm_conv"] == expected, ran
    cts = jax.tree.map(lambda y: jnp.asarray(normal(5, y.shape), y.dtype), f(*args))
    for g, h in ((accelerated(*args), f(*args)), (jax.vjp(accelerated, *args)[1](cts), jax.vjp(f, *args)[1](cts))):
        for a, b in zip(jax.tree.leaves(g), jax.tree.leaves(h), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * max(1.0, float(jnp.abs(b).max())))

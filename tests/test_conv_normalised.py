"""Convolutions that normalise what they read: maps and meshes of their kernels, through batchnorm_conv, and plans."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import H200, HOPPER, PLATFORM, integers, normal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_fused_functions import C, of_chain
from tolerance import assert_within, eps

import jaxconv
from jaxconv import _plan
from jaxconv._core.activations import Activation
from jaxconv._ops.conv_normalised import normalised, normalised_statistics, normalised_wgrad
from jaxconv._plan import measured, sm90
from jaxconv._problem import BatchNormConvProblem, BatchNormProblem, ConvProblem, NormalisedConvProblem

OPS = ("conv_normalised", "conv_normalised_wgrad", "conv_normalised_gradient", "conv_normalised_dx")

on_hopper = pytest.mark.skipif(not HOPPER, reason="the kernel needs compute capability 9.0, and a module with its code")
on_cpus = pytest.mark.skipif(PLATFORM != "cpu", reason="a GPU has these kernels in 16 bits")


@on_cpus
def test_a_mapped_call_is_each_ones(x64):
    f = functools.partial(jaxconv.batchnorm_conv, training=True, groups=C, activation="relu6", implementation="native")

    def outs(*args: jax.Array) -> Any:
        return f(*args), jax.grad(lambda *a: (f(*a)[0] ** 2).sum(), (0, 1, 5))(*args)

    one, other = of_chain(), [a * 1.25 + 0.5 for a in of_chain()]
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
    x, *rest = of_chain("float32")
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


# ----------------------------------------------------------------------------------------------------------------------
# sm90/normalised: 1x1 convolutions of stride 1 on Hopper

TILES = {
    "y": [tile for _, tile in sm90.NORMALISED],
    "statistics": [tile for _, tile in sm90.NORMALISED],
    "dw": [tile for _, tile in sm90.NORMALISED_WGRADS],
}
# (pixels of y, C, K): both sides of a tile's rows, of 64 channels and of a tile's columns; ragged ends
POINTS = [
    *[((1, 1, 1), 8, 8), ((2, 5, 7), 72, 72), ((1, 16, 8), 64, 64), ((1, 3, 43), 136, 264), ((1, 15, 17), 64, 256)],
    *[((3, 31, 33), 192, 136), ((1, 2, 65), 2048, 8), ((2, 8, 8), 1000, 520), ((2, 150, 151), 24, 24)],
    *[((4, 100, 101), 128, 264), ((1, 257, 1), 320, 128)],
]


def pointwise(shape: Any, c: int, k: int, dtype: str, activation: str, algorithm: str | None) -> NormalisedConvProblem:
    x, w = jax.ShapeDtypeStruct((*shape, c), dtype), jax.ShapeDtypeStruct((1, 1, c, k), dtype)
    settled = dict(stride=1, padding=0, dilation=1, groups=1, layout="NHWC", precision=None, implementation=None)
    conv = ConvProblem.infer(
        "conv2d", 2, x, w, None, activation=None, return_preactivation=False, algorithm=algorithm, **settled
    )
    return NormalisedConvProblem(**vars(conv), epsilon=0.0, x_activation=Activation(activation))


def of_integers(p: NormalisedConvProblem) -> tuple[list[Any], Any]:
    """(x, w, dy, scale, bias, mean, var), of which a is a multiple of 1/2 in few bits; and a in float64."""
    c = p.in_channels
    x, w = integers(0, p.x_shape, 3), integers(1, p.w_shape, 1) * (integers(2, p.w_shape, 3) > 1)
    scale = np.exp2(integers(3, (c,), 1)) * np.where(integers(4, (c,), 1) > 0, -1, 1)
    bias, mean, var = integers(5, (c,), 4), integers(6, (c,), 2), np.exp2(2 * integers(7, (c,), 1))
    scale = np.where(var < 1, np.sign(scale), scale)  # scale / sqrt(var) is at least 1/2 and at most 2
    scale = np.where(var > 1, np.sign(scale) * 2, scale)
    z = (x - mean) * scale / np.sqrt(var) + bias
    a = {"none": z, "relu": np.maximum(z, 0), "relu6": np.clip(z, 0, 6)}[p.x_activation.name]
    dy = integers(8, p.y_shape, 1) * (integers(9, p.y_shape, 3) > 1)
    return [x, w, dy, scale, bias, mean, var], a


@on_hopper
@pytest.mark.parametrize("activation", ["relu", "relu6", "none"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("shape", "c", "k"), POINTS)
def test_a_1x1_of_what_it_normalises_is_exact(shape, c, k, dtype, activation):
    """Every tile. What is written is the exact sum, rounded once; its statistics err by a few ulp."""
    p = pointwise(shape, c, k, dtype, activation, None)
    (x, w, dy, *v), a = of_integers(p)
    v = [jnp.asarray(one, "float32") for one in v]
    given = [jnp.asarray(one, dtype) for one in (x, w, dy)]
    y = np.asarray(jnp.asarray(a.reshape(-1, c) @ w[0, 0], dtype), np.float64).reshape(p.y_shape)
    dw = np.asarray(jnp.asarray(a.reshape(-1, c).T @ dy.reshape(-1, k), dtype), np.float64).reshape(p.w_shape)
    for tile in TILES["y"]:
        forced = dataclasses.replace(p, algorithm=f"sm90/normalised {tile}")
        np.testing.assert_array_equal(jax.jit(functools.partial(normalised, forced))(given[0], given[1], *v), y, tile)
        found, mean, var = jax.jit(functools.partial(normalised_statistics, forced))(given[0], given[1], *v)
        np.testing.assert_array_equal(found, y, f"with statistics, {tile}")
        few = 8 * eps("float32")
        assert_within(mean, y.mean((0, 1, 2)), few * max(np.abs(y).max(), 1), f"mean, {tile}")
        assert_within(var, y.var((0, 1, 2)), few * max((y**2).max(), 1), f"variance, {tile}")
    for tile in TILES["dw"]:
        forced = dataclasses.replace(p, algorithm=f"sm90/normalised {tile}")
        found = jax.jit(functools.partial(normalised_wgrad, forced))(given[0], given[2], *v)
        np.testing.assert_array_equal(found, dw, tile)


@on_hopper
@pytest.mark.parametrize("activation", ["relu", "relu6", "silu", "none"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_1x1_of_what_it_normalises_is_two_calls(activation, dtype):
    """Of numbers of any kind: a may be rounded to its neighbour, where x * s + t and (x - mean) * s + bias differ."""
    p = pointwise((3, 29, 31), 328, 200, dtype, activation, None)
    x, w, dy = (jnp.asarray(normal(i, s, dtype), dtype) for i, s in enumerate((p.x_shape, p.w_shape, p.y_shape)))
    scale, bias, mean = (jnp.asarray(normal(i, (328,), "float32"), "float32") for i in (3, 4, 5))
    v = scale, bias, mean, 1 + jnp.abs(mean)
    p = dataclasses.replace(p, epsilon=1e-5)
    two = dataclasses.replace(p, implementation="xla")
    for op, given in ((normalised, (x, w)), (normalised_statistics, (x, w)), (normalised_wgrad, (x, dy))):
        forced = dataclasses.replace(p, algorithm="sm90/normalised")
        assert _plan.plan(op.name, forced, _plan.Device.current(PLATFORM)).kernel == "sm90/normalised"
        got = jax.tree.leaves(jax.jit(functools.partial(op, forced))(*given, *v))
        want = jax.tree.leaves(jax.jit(functools.partial(op, two))(*given, *v))
        for one, other in zip(got, want, strict=True):
            other = np.asarray(other, np.float64)
            assert_within(one, other, 8 * eps(dtype) * np.abs(other).max(), op.name)


@on_hopper
@pytest.mark.parametrize("activation", ["relu6", "silu"])
def test_nan_stays_in_its_pixel_and_its_channel(activation):
    p = pointwise((1, 10, 20), 72, 40, "bfloat16", activation, "sm90/normalised")
    x, w, dy = (normal(i, s, "float32") for i, s in enumerate((p.x_shape, p.w_shape, p.y_shape)))
    x[0, 3, 4, 71] = np.nan
    x, w, dy = (jnp.asarray(a, "bfloat16") for a in (x, w, dy))
    v = jnp.ones(72), jnp.full(72, 3.0), jnp.zeros(72), jnp.ones(72)
    bad = np.isnan(np.asarray(jax.jit(functools.partial(normalised, p))(x, w, *v), np.float32))
    assert bad[0, 3, 4].all() and bad.sum() == 40
    bad = np.isnan(np.asarray(jax.jit(functools.partial(normalised_wgrad, p))(x, dy, *v), np.float32))
    assert bad[0, 0, 71].all() and bad.sum() == 40


@pytest.mark.parametrize("activation", ["relu", "relu6", "silu", "none"])
def test_plans_of_a_1x1(activation, code_for_gpus):
    p = dataclasses.replace(pointwise((256, 28, 28), 128, 512, "bfloat16", activation, None), implementation="native")
    plans = {op: _plan.plan(op, p, H200) for op in (*OPS, "conv_normalised_statistics")}
    forward = plans["conv_normalised"]
    assert (forward.kernel, forward.tile, forward.workspace_bytes) == ("sm90/normalised", "128x256", 0)
    taken = plans["conv_normalised_statistics"]
    assert (taken.kernel, taken.tile, taken.workspace_bytes) == ("sm90/normalised", "128x256", 512 * (512 * 8 + 4))
    back = plans["conv_normalised_wgrad"]
    assert (back.kernel, back.tile) == ("sm90/normalised", "128x256") and back.splits == 132
    assert back.workspace_bytes == 2 * 132 * 128 * 256 * 4
    pair = _plan.plan("conv_normalised_wgrad", dataclasses.replace(p, algorithm="sm90/normalised 128x128"), H200)
    assert (pair.splits, pair.workspace_bytes) == (66, 2 * 66 * 128 * 256 * 4)  # pairs
    for op in ("conv_normalised_gradient", "conv_normalised_dx"):
        assert plans[op].kernel == "two" and "no dgrads of what it normalises" in plans[op].reason
    for k, tile in ((64, "256x64"), (72, "128x128"), (128, "128x128"), (136, "128x256")):
        q = dataclasses.replace(p, out_channels=k)
        assert _plan.plan("conv_normalised", q, H200).tile == tile
        assert _plan.plan("conv_normalised_wgrad", q, H200).tile == ("256x64" if k == 64 else "128x256")
    free = dataclasses.replace(p, implementation=None)
    nowhere = _plan.Device("cuda", "a GPU", (9, 0), 132)
    for op in ("conv_normalised", "conv_normalised_statistics", "conv_normalised_wgrad"):
        assert _plan.plan(op, free, nowhere).kernel == "two"  # until it is measured
    for changed in (dict(dtype="float32"), dict(in_channels=2056), dict(x_activation=Activation("gelu"))):
        assert _plan.plan("conv_normalised", dataclasses.replace(p, **changed), H200).kernel == "two"


@pytest.mark.parametrize("saved", [0.04, 0.2])
def test_a_1x1_pays_for_a_read_of_its_input(saved, code_for_gpus, monkeypatch):
    """Not of its result, which has four times as many channels: 51 MB take 0.02 to 0.03 ms."""
    monkeypatch.setattr(measured, "_learned", {})
    p, device = pointwise((256, 28, 28), 128, 512, "bfloat16", "relu", None), _plan.Device("cuda", "a GPU", (9, 0), 132)
    op, kind, coordinates = measured.features("conv_normalised", p)
    entry = {"case": "a", "problem": "", "xla_ms": 0.2 + saved, "native_ms": {"sm90/normalised": 0.2}}
    measured.learn(device.kind, [{**entry, "op": op, "kind": kind, "coordinates": coordinates}])
    resident, real = _plan.Plan("native", "", "resident_team"), _plan.choose.plan
    monkeypatch.setattr(_plan.choose, "plan", lambda op, *a: resident if op == "batchnorm_train" else real(op, *a))
    whole = BatchNormConvProblem(dataclasses.replace(p.norm, training=True), p.conv)
    assert _plan.plan("batchnorm_conv", whole, device).kernel == "normalised"
    for name in ("conv_normalised", "batchnorm_infer"):
        monkeypatch.setenv("JAXCONV_DISABLE", name)
        assert _plan.plan("conv_normalised_statistics", p, device).kernel == "two"


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

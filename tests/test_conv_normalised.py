"""Convolutions that normalise what they read: maps and meshes of their kernels, through batchnorm_conv, and plans."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import H200, PLATFORM
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_fused_functions import C, of_chain

import jaxconv
from jaxconv import _plan
from jaxconv._core.activations import Activation
from jaxconv._plan import measured
from jaxconv._problem import BatchNormConvProblem, BatchNormProblem, ConvProblem, NormalisedConvProblem

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

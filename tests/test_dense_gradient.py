"""dense_gradient, the product that goes back through an activation and sums up: against NumPy, and its plan."""

from __future__ import annotations

import dataclasses
import functools
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
    PLATFORM,
    calls,
    integers,
    label,
    normal,
    opcodes,
    types_of,
    with_hoppers_code,
)
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from tolerance import assert_close, assert_exact

import jaxconv
from jaxconv import _plan
from jaxconv._core import activations, sharding
from jaxconv._ops.dense import dense_gradient
from jaxconv._plan import domain, measured, tuned
from jaxconv._problem import DenseProblem

M, K, H = 33, 24, 40


@pytest.fixture(autouse=True)
def exact_products():
    """Products in float32 on a GPU too: TF32 would hide what is compared."""
    with jax.default_matmul_precision("highest"):
        yield


def problem(m: int = M, k: int = K, n: int = H, activation: Any = "gelu", **fields: Any) -> DenseProblem:
    options: dict[str, Any] = dict(dtype="float32", precision=(lax.Precision.HIGHEST,) * 2, trans_w=True)
    f = activations.parse("", activation)
    return DenseProblem("mlp", m=m, k=k, n=n, activation=f, **{**options, **fields})


def of_numpy(p: DenseProblem, dy: np.ndarray, w: np.ndarray, z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    name = p.activation.name if p.activation.name != "leaky_relu" else ("leaky_relu", p.activation.slope)
    dz = p.alpha * dy @ (w.T if p.trans_w else w) * ref.slope(name, z)
    return dz, dz.sum(0)


@pytest.mark.parametrize("trans_w", (False, True), ids=("w", "w_transposed"))
@pytest.mark.parametrize("activation", ("relu", "relu6", ("leaky_relu", 0.5)), ids=label)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_of_integers_is_exact(dtype, activation, trans_w):
    """Of z, and of the y of activations whose derivative it decides."""
    p = problem(dtype=dtype, activation=activation, trans_w=trans_w, alpha=0.5)
    dy, w, z = integers(0, p.x_shape, 1), integers(1, p.w_shape, 1), integers(2, p.y_shape, 7) + 0.5
    expected = of_numpy(p, dy, w, z)
    with types_of(dtype):
        f = jax.jit(functools.partial(dense_gradient, p))
        for kept in (z, ref.activate(activation, z)):
            outs = f(*(jnp.asarray(a, dtype) for a in (dy, w, kept)))
            assert [out.dtype.name for out in outs] == [dtype] * 2
            assert_exact(outs[0], expected[0], "dz")
            assert_exact(outs[1], np.asarray(jnp.asarray(expected[1], dtype), np.float64), "db")


TILES = ("128x256", "256x128", "128x128")
SHAPES = {
    (64, 64, 128): "less than a tile",
    (300, 96, 384): "rows of no tile, K past a stage",
    (1000, 200, 136): "odd multiples of 8",
    (256, 1536, 72): "a long reduction",
    (40000, 64, 256): "more tiles than multiprocessors",
}


@pytest.mark.skipif(not HOPPER, reason="sm90 needs compute capability 9.0")
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("activation", [a for a in NAMED_ACTIVATIONS if a is not None], ids=label)
def test_every_tile_is_as_exact_as_three_calls(activation, shape, dtype, tile):
    m, k, n = shape
    p = problem(m, k, n, activation, dtype=dtype, algorithm=f"{_plan.GRADIENT} {tile}")
    refusal = _plan.supports("dense_gradient", p.algorithm, p, DEVICE)
    if refusal:
        pytest.skip(refusal)
    dy, w, z = (normal(i, s, dtype) for i, s in enumerate((p.x_shape, p.w_shape, p.y_shape)))
    z = np.copysign(np.maximum(np.abs(z), 2.0**-6), z)  # not so near a kink that y is 0
    kept = ref.activate(activation, z) if p.activation.residual == "y" else z
    args = [jnp.asarray(a, dtype) for a in (dy, w, kept)]
    f = jax.jit(functools.partial(dense_gradient, p))
    assert calls(f, *args) == {"dense_gradient": 1}
    ours = f(*args)
    xla = jax.jit(functools.partial(dense_gradient, dataclasses.replace(p, algorithm=None, implementation="xla")))
    dz, db = of_numpy(p, dy, w, z)
    assert_close(ours[0], xla(*args)[0], dz, k, "dz", scale=np.abs(dz).max())
    assert_close(ours[1], xla(*args)[1], db, k + m, "db", scale=np.abs(dz).max() * np.sqrt(m))
    # db is the sum of what was written.
    exact = np.asarray(ours[0], np.float64).sum(0)
    np.testing.assert_allclose(ours[1].astype("float32"), exact, rtol=2.0**-8, atol=1e-3 * np.abs(exact).max())
    again = f(*args)
    assert all(np.array_equal(a, b) for a, b in zip(ours, again, strict=True))


@pytest.mark.parametrize("activation", ("gelu", "tanh", "relu"))
def test_the_gradient_has_derivatives_and_a_transpose(activation, x64):
    p = problem(5, 4, 6, activation, dtype="float64")
    dy, w, z = (jnp.asarray(normal(i, s)) for i, s in enumerate((p.x_shape, p.w_shape, p.y_shape)))
    f = functools.partial(dense_gradient, p)
    check_grads(f, (dy, w, z), order=2, modes=("fwd", "rev"), atol=1e-4, rtol=1e-4)
    cts = [jnp.asarray(normal(7, (5, 6))), jnp.asarray(normal(8, (6,)))]
    # It is linear in dy and in w.
    expected = jax.vjp(f, dy, w, z)[1](cts)
    by_dy, by_w = jax.linear_transpose(lambda v: f(v, w, z), dy), jax.linear_transpose(lambda v: f(dy, v, z), w)
    for back, e in ((by_dy, expected[0]), (by_w, expected[1])):
        np.testing.assert_allclose(back(cts)[0], e, rtol=1e-12)


@pytest.mark.parametrize("kind", ("Auto", "Explicit"))
@pytest.mark.parametrize("spec", ("a--", "-a-", "--a", "ab-", "a-b"))
def test_the_gradient_split_over_a_mesh(kind, spec):
    """Rows, the reduction, columns: db is summed over the rows' shards."""
    if len(jax.devices()) < 4:
        pytest.skip("needs four devices")
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4], axis_types=(getattr(AxisType, kind),) * 2)
    p = problem(32, 16, 24, "relu")
    m, k, n = (None if axis == "-" else axis for axis in spec)
    args = [integers(i, s, 2) for i, s in enumerate((p.x_shape, p.w_shape, p.y_shape))]
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(jnp.asarray(a, "float32"), NamedSharding(mesh, P(*s)))
            for a, s in zip(args, ((m, k), (n, k), (m, n)), strict=True)
        ]
        outs = jax.jit(functools.partial(dense_gradient, p))(*placed)
        if kind == "Auto":  # as where a kernel is planned: the rule, not XLA, says what a shard runs
            ruled = jax.jit(sharding.auto(dense_gradient, p, mesh))
            found = opcodes(ruled.lower(*placed).compile().as_text())
            assert "all-gather" not in found and ("all-reduce" in found) == (spec != "--a")
            outs = [*outs, *ruled(*placed)]
    for out, expected in zip(outs, of_numpy(p, *args) * (len(outs) // 2), strict=True):
        assert_exact(out, expected)


# ----------------------------------------------------------------------------------------------------------------------
# The plan of dense_gradient


@pytest.fixture
def with_the_kernel(code_for_gpus, monkeypatch):
    """As where the CUDA module is: its kernel takes multiples of 8 in 16 bits."""

    def refusal(plan: Any, p: DenseProblem, device: Any) -> str | None:
        if plan.kernel == _plan.GRADIENT:
            return None if p.dtype != "float32" and p.n % 8 == 0 and p.k % 8 == 0 else "16 bits, and multiples of 8"
        return real(plan, p, device)

    real = domain.dense_refusal
    monkeypatch.setattr(domain, "dense_refusal", refusal)
    monkeypatch.setattr(domain, "dense_workspace", lambda plan, p: 4096)
    monkeypatch.setattr(measured, "_learned", {})


def planned(p: DenseProblem, device: Any = H200) -> Any:
    return _plan.plan("dense_gradient", p, device)


def test_forced_it_is_the_kernel_where_that_runs(with_the_kernel):
    p = problem(802816, 96, 384, dtype="bfloat16")
    for forced in (dict(algorithm="sm90"), dict(algorithm=_plan.GRADIENT), dict(implementation="native")):
        made = planned(dataclasses.replace(p, **forced))
        assert (made.implementation, made.kernel, made.workspace_bytes) == ("native", _plan.GRADIENT, 4096)
    for tile in TILES:
        assert planned(dataclasses.replace(p, algorithm=f"{_plan.GRADIENT} {tile}")).tile == tile
    # What asks for the products' algorithm has it for the product at least.
    for forced in ("gemm", "sm90/product", "sm90/product 128x128"):
        assert str(planned(dataclasses.replace(p, algorithm=forced))) == "calls[three]"
    assert str(planned(dataclasses.replace(p, algorithm="sm90", dtype="float32"))) == "calls[three]"
    assert str(planned(dataclasses.replace(p, implementation="native", k=97))) == "calls[three]"
    with pytest.raises(ValueError, match=r"mlp: algorithm='sm90/gradient' cannot run dense_gradient of .*16 bits"):
        planned(dataclasses.replace(p, algorithm=_plan.GRADIENT, dtype="float32"))
    with pytest.raises(ValueError, match="there is no such kernel"):
        planned(dataclasses.replace(p, algorithm=f"{_plan.GRADIENT} 64x64"))


def test_unforced_it_is_the_kernel_where_that_was_measured_to_be_faster(with_the_kernel, monkeypatch):
    device = dataclasses.replace(H200, kind="a device")
    p = problem(802816, 96, 384, dtype="bfloat16")
    assert "was measured near this problem on a device" in planned(p, device).reason
    op, kind, coordinates = measured.features("dense_gradient", p)
    assert op == "dense_gradient" and "gelu" in kind
    entry = dict(op=op, kind=kind, coordinates=coordinates, case="it", xla_ms=2.0)
    # A dense layer's own times say nothing of it.
    measured.learn("a device", [{**entry, "op": "dense", "native_ms": {_plan.GRADIENT: 1.0}}])
    assert str(planned(p, device)) == "calls[three]"
    measured.learn("a device", [{**entry, "native_ms": {_plan.GRADIENT: 1.0}}])
    made = planned(p, device)
    assert made.kernel == _plan.GRADIENT and "2.00 times faster than XLA at it" in made.reason
    assert planned(dataclasses.replace(p, m=2 * p.m), device).kernel == _plan.GRADIENT
    for other in (dict(activation=activations.Activation("silu")), dict(k=8 * p.k), dict(trans_w=False)):
        assert str(planned(dataclasses.replace(p, **other), device)) == "calls[three]"
    assert str(planned(p, dataclasses.replace(device, partitioned=True))) == "calls[three]"
    monkeypatch.setenv("JAXCONV_DISABLE", "dense")
    assert str(planned(p, device)) == "calls[three]"
    monkeypatch.delenv("JAXCONV_DISABLE")
    measured.learn("a device", [{**entry, "native_ms": {_plan.GRADIENT: 1.95}}])
    made = planned(p, device)
    assert str(made) == "calls[three]" and [c.name for c in made.candidates] == [_plan.GRADIENT, "xla"]


@with_hoppers_code
@pytest.mark.parametrize("activation", ("gelu", "relu", ("leaky_relu", -0.5)), ids=label)
def test_the_gradient_of_a_layer_is_one_call_on_a_gpu(with_the_kernel, activation):
    """As lowered: of z, or of y where it decides the derivative."""
    x, w1, w2 = (jax.ShapeDtypeStruct(s, "bfloat16") for s in ((64, 72), (72, 128), (128, 72)))
    b1, b2 = (jax.ShapeDtypeStruct(s, "bfloat16") for s in ((128,), (72,)))

    def loss(*args):
        return jaxconv.mlp(*args, activation=activation, algorithm="sm90").sum()

    with _plan.Device.assumed(H200):
        traced = jax.jit(jax.value_and_grad(loss, tuple(range(5)))).trace(x, w1, b1, w2, b2)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    (call,) = (line for line in text.splitlines() if "@jaxconv_dense_gradient_v2" in line)
    types = call.rpartition(" : ")[2]
    rows, wide = "tensor<64x72xbf16>", "tensor<64x128xbf16>"
    assert types == f"({rows}, tensor<128x72xbf16>, {wide}) -> ({wide}, tensor<128xbf16>, tensor<4096xui8>)"
    name = label(activation) if isinstance(activation, str) else activation[0]
    for attribute in (f'activation = "{name}"', "trans_w = 1 : i64", 'bias = "none"', f'kernel = "{_plan.GRADIENT}"'):
        assert attribute in call, attribute
    assert text.count("@jaxconv_dense_v2") == 2 and text.count("@jaxconv_matmul_v2") == 3


def test_every_tile_may_be_tuned(with_the_kernel):
    p = problem(12544, 768, 3072, dtype="bfloat16")
    assert {plan.spec for plan in _plan.tiles("dense_gradient", p, H200)} == {f"{_plan.GRADIENT} {t}" for t in TILES}
    assert [plan.kernel for plan in _plan.every("dense_gradient", p, H200)] == [_plan.GRADIENT]


def test_what_was_tuned_is_taken(with_the_kernel):
    p = problem(12544, 768, 3072, dtype="bfloat16")
    jaxlib, version = tuned.versions()
    times = {f"{_plan.GRADIENT} 256x128": 0.5, f"{_plan.GRADIENT} 128x128": 0.6}
    fields = dict(op="dense_gradient", key=tuned.key_of(p), problem=str(p), device=tuned.device_name(H200))
    entry = tuned.Entry(**fields, jaxlib=jaxlib, jaxconv=version, xla_ms=1.0, native_ms=times, choice=None)
    for choice, expected in (("xla", "calls[three]"), (f"{_plan.GRADIENT} 256x128", "native[sm90/gradient 256x128]")):
        with jaxconv.tune.applied(tuned.Results([dataclasses.replace(entry, choice=choice)])):
            made = planned(p)
        assert str(made) == expected and "tuned on this device" in made.reason and len(made.candidates) == 3


@pytest.mark.parametrize("options", [dict(implementation="native"), dict(algorithm="gemm"), {}], ids=str)
def test_on_a_cpu_it_is_three_calls(options):
    if PLATFORM != "cpu":
        pytest.skip("of CPUs")
    p = problem(**options)
    made = planned(p, DEVICE)
    assert str(made) == "calls[three]"
    args = [jnp.ones(s) for s in (p.x_shape, p.w_shape, p.y_shape)]
    assert calls(functools.partial(dense_gradient, p), *args) == ({"matmul": 1} if options else {})
    with pytest.raises(ValueError, match="CUDA only"):
        planned(dataclasses.replace(p, algorithm=_plan.GRADIENT), DEVICE)

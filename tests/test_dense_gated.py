"""dense_gated, a dense layer whose halves are multiplied: against NumPy, its plan, and what accelerate finds."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference as ref
import pytest
from flax import linen as nn
from helpers import (
    DEVICE,
    DTYPES,
    H200,
    HOPPER,
    NAMED_ACTIVATIONS,
    PLATFORM,
    calls,
    equations,
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
from jaxconv._ops.gated import dense_gated, dense_gated_gradient, gate_of
from jaxconv._plan import measured
from jaxconv._problem import DenseProblem, GatedGradientProblem, GatedProblem

M, K, N = 33, 24, 40  # columns of y
TILES, BACK_TILES = ("128x128", "128x256", "256x128"), ("128x256", "256x128")


@pytest.fixture(autouse=True)
def exact_products():
    """Products in float32 on a GPU too: TF32 would hide what is compared."""
    with jax.default_matmul_precision("highest"):
        yield


def problem(m: int = M, k: int = K, n: int = N, activation: Any = "gelu", **fields: Any) -> GatedProblem:
    """`n`: columns of y."""
    own = {name: fields.pop(name) for name in ("first", "save", "pixels") if name in fields}
    options: dict[str, Any] = dict(dtype="float32", precision=(lax.Precision.HIGHEST,) * 2, bias="column")
    p = DenseProblem("dense", m=m, k=k, n=2 * n, **{**options, **fields})
    return GatedProblem.of(p, activations.parse("", activation), **{"first": False, "save": True, **own})


def operands(p: GatedProblem, draw: Any) -> list[np.ndarray]:
    return [draw(i, s) for i, s in enumerate((p.x_shape, p.w_shape, p.b_shape)[: 2 + bool(p.bias)])]


def of_numpy(p: GatedProblem, x: np.ndarray, w: np.ndarray, *b: np.ndarray) -> list[np.ndarray]:
    z = x @ w + sum(b)
    halves = np.split(z, 2, -1)
    a, g = halves[::-1] if p.first else halves
    name = p.activation.name if p.activation.name != "leaky_relu" else ("leaky_relu", p.activation.slope)
    y = a * (g if name == "none" else ref.activate(name, g))
    return [y, z] if p.save_preactivation else [y]


@pytest.mark.parametrize("save", (False, True), ids=("y", "y and z"))
@pytest.mark.parametrize("pixels", (None, (3, 11)), ids=("rows", "pixels"))
@pytest.mark.parametrize("first", (False, True), ids=("second", "first"))
@pytest.mark.parametrize("activation", (None, "relu", "relu6", ("leaky_relu", 0.5)), ids=label)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_integers_are_exact(dtype, activation, first, pixels, save):
    p = problem(dtype=dtype, activation=activation, first=first, pixels=pixels, save=save)
    args = operands(p, lambda i, s: integers(i, s, 1) * (np.arange(np.prod(s)).reshape(s) % 5 < 2))
    with types_of(dtype):
        outs = jax.jit(functools.partial(dense_gated, p))(*(jnp.asarray(a, dtype) for a in args))
        assert [out.dtype.name for out in outs] == [dtype] * (1 + save)
        for out, expected, name in zip(outs, of_numpy(p, *args), "yz", strict=False):
            assert_exact(out, np.asarray(jnp.asarray(expected, dtype), np.float64), name)


SHAPES = {
    (64, 64, 128): "less than a tile",
    (300, 96, 384): "rows of no tile, K past a stage",
    (1000, 200, 136): "odd multiples of 8",
    (256, 1536, 72): "a long reduction, columns of a box and a part of one",
    (1, 8, 8): "the least",
    (40000, 64, 256): "more tiles than multiprocessors",
}
on_hopper = pytest.mark.skipif(not HOPPER, reason="sm90 needs compute capability 9.0")


def of_kernel(p: GatedProblem, tile: str) -> GatedProblem:
    return dataclasses.replace(p, algorithm=f"{_plan.GATED} {tile}")


@on_hopper
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("first, bias, save", [(False, "column", True), (True, None, False), (True, "column", True)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_tile_is_exact(shape, first, bias, save, dtype, tile):
    """Integers whose sums are small: every element is where it belongs, of either half."""
    p = of_kernel(problem(*shape, "relu", first=first, bias=bias, save=save, dtype=dtype), tile)

    def sparse(i: int, s: tuple[int, ...]) -> np.ndarray:
        """Products of which few are not 0: both halves' product is an integer that bfloat16 holds."""
        return integers(i, s, 1) * (np.random.default_rng(i).random(s) < (12 / shape[1] if i == 0 else 1))

    args = operands(p, sparse)
    f = jax.jit(functools.partial(dense_gated, p))
    typed = [jnp.asarray(a, dtype) for a in args]
    assert calls(f, *typed) == {"dense_gated": 1}
    for out, expected, name in zip(f(*typed), of_numpy(p, *args), "yz", strict=False):
        assert_exact(out, np.asarray(jnp.asarray(expected, dtype), np.float64), name)


# Each activation, and all shapes of two.
EACH = [
    *((activation, (300, 96, 384)) for activation in NAMED_ACTIVATIONS),
    *((activation, shape) for activation in ("relu", "gelu") for shape in SHAPES if shape != (300, 96, 384)),
]


@on_hopper
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("activation, shape", EACH, ids=str)
def test_every_activation_is_as_exact_as_two_calls(activation, shape, dtype, tile):
    p = of_kernel(problem(*shape, activation, first=tile == "128x128", dtype=dtype), tile)
    args = [normal(i, s, dtype) / (np.sqrt(shape[1]) if i == 1 else 1) for i, s in enumerate((p.x_shape, p.w_shape))]
    typed = [*(jnp.asarray(a, dtype) for a in args), jnp.asarray(normal(2, p.b_shape), dtype)]
    args = [np.asarray(a, np.float64) for a in typed]
    f = jax.jit(functools.partial(dense_gated, p))
    xla = jax.jit(functools.partial(dense_gated, dataclasses.replace(p, algorithm=None, implementation="xla")))
    ours, theirs = f(*typed), xla(*typed)
    for a, b, expected, name in zip(ours, theirs, of_numpy(p, *args), "yz", strict=True):
        assert_close(a, b, expected, shape[1], name, scale=np.abs(expected).max())
    assert all(np.array_equal(a, b) for a, b in zip(ours, f(*typed), strict=True))
    (alone,) = jax.jit(functools.partial(dense_gated, dataclasses.replace(p, save_preactivation=False)))(*typed)
    assert np.array_equal(alone, ours[0])  # whether z is written changes nothing


@pytest.mark.parametrize("first", (False, True), ids=("second", "first"))
@pytest.mark.parametrize("activation", (None, "gelu", "tanh", "silu"), ids=label)
def test_the_gate_and_its_kernel_have_derivatives(activation, first, x64):
    p = problem(5, 4, 6, activation, dtype="float64", first=first)
    args = [jnp.asarray(a) for a in operands(p, normal)]
    check_grads(functools.partial(dense_gated, p), args, order=2, modes=("fwd", "rev"), atol=1e-4, rtol=1e-4)
    f = functools.partial(gate_of, activation=p.activation, first=first)
    z = jnp.asarray(normal(9, (2, 3, 8)))
    check_grads(f, (z,), order=2, modes=("fwd", "rev"), atol=1e-4, rtol=1e-4)
    each = jnp.stack([f(one) for one in jnp.moveaxis(z, 1, 0)], 1)
    assert np.array_equal(jax.vmap(f, 1, 1)(z), each)
    assert equations(jax.vmap(f, 1, 1), z)["jaxconv_gate"] == 1


@pytest.mark.parametrize("kind", ("Auto", "Explicit"))
@pytest.mark.parametrize("spec", ("a--", "-a-", "ab-", "--a", "a-b", "-ab", "--ab"))
def test_gated_over_a_mesh(kind, spec):
    """Rows, the reduction, columns: the gate is behind the whole sum, of halves that lie with other shards."""
    if len(jax.devices()) < 4:
        pytest.skip("needs four devices")
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4], axis_types=(getattr(AxisType, kind),) * 2)
    p = problem(32, 16, 24, "relu")
    m, k, *n = (None if axis == "-" else axis for axis in spec)
    n = tuple(filter(None, n))
    args = operands(p, lambda i, s: integers(i, s, 2))
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(jnp.asarray(a, "float32"), NamedSharding(mesh, P(*s)))
            for a, s in zip(args, ((m, k), (k, n), (n,)), strict=True)
        ]
        outs = jax.jit(functools.partial(dense_gated, p))(*placed)
        if kind == "Auto":  # as where a kernel is planned: the rule, not XLA, says what a shard runs
            ruled = jax.jit(sharding.auto(dense_gated, p, mesh))
            found = opcodes(ruled.lower(*placed).compile().as_text())
            assert "all-gather" not in found and ("all-reduce" in found) == (k is not None)
            outs = [*outs, *ruled(*placed)]
    for out, expected in zip(outs, of_numpy(p, *args) * (len(outs) // 2), strict=True):
        assert_exact(out, expected)


# ----------------------------------------------------------------------------------------------------------------------
# The way back, from the layer behind the gate


def back(m: int = M, k: int = K, n: int = N, activation: Any = "gelu", first: bool = False, **fields: Any) -> Any:
    options: dict[str, Any] = dict(dtype="float32", precision=(lax.Precision.HIGHEST,) * 2, trans_w=True)
    p = DenseProblem("dense", m=m, k=k, n=n, **{**options, **fields})
    return GatedGradientProblem.of(p, activations.parse("", activation), first)


def of_back(p: GatedGradientProblem, draw: Any) -> list[np.ndarray]:
    return [draw(i, s) for i, s in enumerate((p.x_shape, p.w_shape, p.z_shape))]


def back_of_numpy(p: GatedGradientProblem, dy: np.ndarray, w: np.ndarray, z: np.ndarray) -> list[np.ndarray]:
    dy = p.alpha * dy @ (w.T if p.trans_w else w)
    halves = np.split(z, 2, -1)
    a, g = halves[::-1] if p.first else halves
    name = p.activation.name if p.activation.name != "leaky_relu" else ("leaky_relu", p.activation.slope)
    value, slope = (g, np.ones_like(g)) if name == "none" else (ref.activate(name, g), ref.slope(name, g))
    both = [dy * value, dy * a * slope]
    dz = np.concatenate(both[::-1] if p.first else both, -1)
    return [dz, dz.sum(0)]


@pytest.mark.parametrize("trans_w", (False, True), ids=("w", "w_transposed"))
@pytest.mark.parametrize("first", (False, True), ids=("second", "first"))
@pytest.mark.parametrize("activation", (None, "relu", ("leaky_relu", 0.5)), ids=label)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_of_integers_is_exact(dtype, activation, first, trans_w):
    p = back(activation=activation, first=first, dtype=dtype, trans_w=trans_w)
    args = of_back(p, lambda i, s: integers(i, s, 1 if i < 2 else 2) + (0.5 if i == 2 else 0))
    args[0] *= np.arange(K) % 4 == 0  # sums of a few
    expected = back_of_numpy(p, *args)
    with types_of(dtype):
        outs = jax.jit(functools.partial(dense_gated_gradient, p))(*(jnp.asarray(a, dtype) for a in args))
        assert [out.dtype.name for out in outs] == [dtype] * 2
        assert_exact(outs[0], expected[0], "dz")
        assert_exact(outs[1], np.asarray(jnp.asarray(expected[1], dtype), np.float64), "db")


@on_hopper
@pytest.mark.parametrize("tile", BACK_TILES)
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("activation, shape", EACH, ids=str)
def test_every_tile_of_the_gradient_is_as_exact_as_three_calls(activation, shape, dtype, tile):
    first = (tile == "128x256") == (dtype == "float16")
    p = back(*shape, activation, first, dtype=dtype, algorithm=f"{_plan.GATED_GRADIENT} {tile}")
    m, k, _ = shape
    dy, w, z = of_back(p, functools.partial(normal, dtype=dtype))
    z = np.copysign(np.maximum(np.abs(z), 2.0**-6), z)  # not so near a kink
    typed = [jnp.asarray(a, dtype) for a in (dy, w / np.sqrt(k), z)]
    f = jax.jit(functools.partial(dense_gated_gradient, p))
    assert calls(f, *typed) == {"dense_gated_gradient": 1}
    ours = f(*typed)
    xla = functools.partial(dense_gated_gradient, dataclasses.replace(p, algorithm=None, implementation="xla"))
    theirs = jax.jit(xla)(*typed)
    dz, db = back_of_numpy(p, *(np.asarray(a, np.float64) for a in typed))
    assert_close(ours[0], theirs[0], dz, k, "dz", scale=np.abs(dz).max())
    assert_close(ours[1], theirs[1], db, k + m, "db", scale=np.abs(dz).max() * np.sqrt(m))
    # db is the sum of what was written.
    exact = np.asarray(ours[0], np.float64).sum(0)
    np.testing.assert_allclose(ours[1].astype("float32"), exact, rtol=2.0**-8, atol=1e-3 * np.abs(exact).max())
    assert all(np.array_equal(a, b) for a, b in zip(ours, f(*typed), strict=True))


@on_hopper
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("activation", ("silu", "gelu"))
def test_large_numbers_go_back_through_a_gate(activation, dtype):
    """f is g itself there, and f' is 1; or both are 0."""
    p = back(64, 64, 64, activation, dtype=dtype, algorithm=_plan.GATED_GRADIENT)
    dy, w = np.eye(64), np.eye(64)
    z = np.concatenate([np.full((64, 64), 3.0), np.where(np.arange(64) % 2 == 0, 200.0, -200.0) * np.ones((64, 1))], -1)
    dz, _ = dense_gated_gradient(p, *(jnp.asarray(a, dtype) for a in (dy, w, z)))
    np.testing.assert_allclose(dz.astype("float32"), back_of_numpy(p, dy, w, z)[0], rtol=2.0**-8, atol=1e-30)


@on_hopper
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("activation", ("relu", "relu6", "leaky_relu", "gelu"))
def test_an_infinity_goes_back_as_in_three_calls(activation, dtype):
    """Where f' is 0 it is dropped."""
    p = back(64, 64, 64, activation, dtype=dtype, algorithm=_plan.GATED_GRADIENT)
    dy, w, z = np.zeros((64, 64)), np.ones((64, 64)), np.full((64, 128), 3.0)
    dy[3, 5], z[:, 64:] = np.inf, 7.0
    args = [jnp.asarray(a, dtype) for a in (dy, w, z)]
    xla = functools.partial(dense_gated_gradient, dataclasses.replace(p, algorithm=None, implementation="xla"))
    for ours, theirs in zip(dense_gated_gradient(p, *args), jax.jit(xla)(*args), strict=True):
        np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(theirs))
        np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))


@pytest.mark.parametrize("activation", (None, "gelu", "tanh", "relu"), ids=label)
def test_the_gradient_has_derivatives(activation, x64):
    p = back(5, 4, 6, activation, dtype="float64")
    args = [jnp.asarray(a) for a in of_back(p, normal)]
    check_grads(functools.partial(dense_gated_gradient, p), args, order=2, modes=("fwd", "rev"), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ("Auto", "Explicit"))
@pytest.mark.parametrize("spec", ("a--", "-a-", "ab-", "--a", "a-b", "-ab", "--ab"))
def test_the_gradient_over_a_mesh(kind, spec):
    """Rows, the reduction, columns: db is summed over the rows' shards."""
    if len(jax.devices()) < 4:
        pytest.skip("needs four devices")
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4], axis_types=(getattr(AxisType, kind),) * 2)
    p = back(32, 16, 24, "relu")
    m, k, *n = (None if axis == "-" else axis for axis in spec)
    n = tuple(filter(None, n))
    args = of_back(p, lambda i, s: integers(i, s, 2))
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(jnp.asarray(a, "float32"), NamedSharding(mesh, P(*s)))
            for a, s in zip(args, ((m, k), (n, k), (m, n)), strict=True)
        ]
        outs = jax.jit(functools.partial(dense_gated_gradient, p))(*placed)
        if kind == "Auto":
            ruled = jax.jit(sharding.auto(dense_gated_gradient, p, mesh))
            assert "all-gather" not in opcodes(ruled.lower(*placed).compile().as_text())
            outs = [*outs, *ruled(*placed)]
    for out, expected in zip(outs, back_of_numpy(p, *args) * (len(outs) // 2), strict=True):
        assert_exact(out, expected)


def test_columns_over_an_odd_number_of_shards():
    """A shard has columns of both halves."""
    if len(jax.devices()) < 3:
        pytest.skip("needs three devices")
    mesh = jax.make_mesh((3,), ("a",), devices=jax.devices()[:3], axis_types=(AxisType.Explicit,))
    for p, op, of_numpy_, specs in (
        (problem(8, 16, 24, "relu", first=True), dense_gated, of_numpy, (P(), P(None, "a"), P("a"))),
        (back(8, 16, 24, "relu"), dense_gated_gradient, back_of_numpy, (P(), P("a"), P(None, "a"))),
    ):
        draw = functools.partial(integers, largest=2)
        args = operands(p, draw) if op is dense_gated else of_back(p, draw)
        with jax.set_mesh(mesh):
            placed = [
                jax.device_put(jnp.asarray(a, "float32"), NamedSharding(mesh, s))
                for a, s in zip(args, specs, strict=True)
            ]
            outs = jax.jit(functools.partial(op, p))(*placed)
        for out, expected in zip(outs, of_numpy_(p, *args), strict=True):
            assert_exact(out, expected)


# ----------------------------------------------------------------------------------------------------------------------
# The plan


@pytest.fixture
def with_the_kernel(code_for_gpus, monkeypatch):
    """As where the CUDA module is."""
    monkeypatch.setattr(measured, "_learned", {})


def planned(p: GatedProblem, device: Any = H200) -> Any:
    return _plan.plan("dense_gated", p, device)


def test_forced_it_is_the_kernel_where_that_runs(with_the_kernel):
    p = problem(16384, 640, 2560, dtype="bfloat16")
    for forced in (dict(algorithm="sm90"), dict(algorithm=_plan.GATED), dict(implementation="native")):
        made = planned(dataclasses.replace(p, **forced))
        assert (made.implementation, made.kernel, made.workspace_bytes) == ("native", _plan.GATED, 0)
    for tile in TILES:
        assert planned(of_kernel(p, tile)).tile == tile
    assert {plan.spec for plan in _plan.tiles("dense_gated", p, H200)} == {f"{_plan.GATED} {t}" for t in TILES}
    # What asks for the layer's algorithm has it for the layer at least.
    for forced in ("gemm", "sm90/product", "sm90/product 128x128"):
        assert str(planned(dataclasses.replace(p, algorithm=forced))) == "calls[two]"
    for other in (dict(dtype="float32"), dict(n=2 * 2564), dict(bias="row"), dict(k=97)):
        assert str(planned(dataclasses.replace(p, implementation="native", **other))) == "calls[two]"
    with pytest.raises(ValueError, match=r"dense: algorithm='sm90/gated' cannot run dense_gated of .*16-bit arrays"):
        planned(dataclasses.replace(p, algorithm=_plan.GATED, dtype="float32"))


def test_unforced_it_is_the_kernel_where_that_was_measured_to_be_faster(with_the_kernel, monkeypatch):
    device = dataclasses.replace(H200, kind="a device")
    p = problem(16384, 640, 2560, dtype="bfloat16")
    assert "was measured near this problem on a device" in planned(p, device).reason
    op, kind, coordinates = measured.features("dense_gated", p)
    assert op == "dense_gated" and "gelu" in kind
    entry = dict(op=op, kind=kind, coordinates=coordinates, case="it", xla_ms=2.0)
    # A dense layer's own times say nothing of it.
    measured.learn("a device", [{**entry, "op": "dense", "native_ms": {_plan.GATED: 1.0}}])
    assert str(planned(p, device)) == "calls[two]"
    measured.learn("a device", [{**entry, "native_ms": {_plan.GATED: 1.0}}])
    made = planned(p, device)
    assert made.kernel == _plan.GATED and "2.00 times faster than XLA at it" in made.reason
    for same in (dict(m=2 * p.m), dict(bias=None), dict(first=True), dict(dtype="float16")):
        assert planned(dataclasses.replace(p, **same), device).kernel == _plan.GATED
    silu = activations.Activation("silu")
    for other in (dict(activation=silu), dict(k=8 * p.k), dict(save_preactivation=False)):
        assert str(planned(dataclasses.replace(p, **other), device)) == "calls[two]"
    monkeypatch.setenv("JAXCONV_DISABLE", "dense_gated")
    assert str(planned(p, device)) == "calls[two]"


def test_the_gradient_is_the_kernel_where_that_runs_or_was_measured(with_the_kernel):
    p = back(16384, 640, 2560, dtype="bfloat16")

    def planned(p: Any, device: Any = H200) -> Any:
        return _plan.plan("dense_gated_gradient", p, device)

    for tile in BACK_TILES:
        made = planned(dataclasses.replace(p, algorithm=f"{_plan.GATED_GRADIENT} {tile}"))
        assert (made.kernel, made.tile, made.workspace_bytes) == (_plan.GATED_GRADIENT, tile, 256 * 2 * 2560 * 4)
    assert planned(dataclasses.replace(p, implementation="native")).kernel == _plan.GATED_GRADIENT
    for other in (dict(dtype="float32"), dict(trans_w=False), dict(k=97), dict(alpha=0.5)):
        assert str(planned(dataclasses.replace(p, implementation="native", **other))) == "calls[three]"
    with pytest.raises(ValueError, match=r"cannot run dense_gated_gradient of .*16-bit arrays"):
        planned(dataclasses.replace(p, algorithm=_plan.GATED_GRADIENT, dtype="float32"))
    device = dataclasses.replace(H200, kind="a device")
    assert str(planned(p, device)) == "calls[three]"
    op, kind, coordinates = measured.features("dense_gated_gradient", p)
    entry = dict(op=op, kind=kind, coordinates=coordinates, case="it", xla_ms=2.0)
    measured.learn("a device", [{**entry, "native_ms": {_plan.GATED_GRADIENT: 1.0}}])
    assert planned(p, device).kernel == _plan.GATED_GRADIENT


def test_on_a_cpu_it_is_two_calls():
    if PLATFORM != "cpu":
        pytest.skip("of CPUs")
    for options, made in (({}, {}), (dict(implementation="native"), {"dense": 1}), (dict(bias=None), {})):
        p = problem(**options)
        assert str(planned(p, DEVICE)) == "calls[two]"
        args = [jnp.asarray(a, "float32") for a in operands(p, normal)]
        assert calls(functools.partial(dense_gated, p), *args) == made
    with pytest.raises(ValueError, match="CUDA only"):
        planned(dataclasses.replace(problem(), algorithm=_plan.GATED), DEVICE)


@with_hoppers_code
@pytest.mark.parametrize("trained", (False, True), ids=("served", "trained"))
def test_a_gated_layer_is_one_call_on_a_gpu(with_the_kernel, trained):
    """As lowered; z is written where its gradient is taken. A GPU lowers for itself."""
    device = DEVICE if HOPPER else dataclasses.replace(H200, kind="a device")
    p = problem(96, 72, 64, "silu", dtype="bfloat16", save=trained)
    op, kind, coordinates = measured.features("dense_gated", p)
    entry = dict(op=op, kind=kind, coordinates=coordinates, case="it", xla_ms=2.0, native_ms={_plan.GATED: 1.0})
    measured.learn(device.kind, [entry])

    def layer(x, w, b):
        z = x @ w + b
        return jax.nn.silu(z[..., :64]) * z[..., 64:]

    f = jaxconv.accelerate(layer)
    f = jax.value_and_grad(lambda *a: jaxconv.accelerate(layer)(*a).sum(), (0, 1, 2)) if trained else f
    args = (jax.ShapeDtypeStruct(s, "bfloat16") for s in ((3, 32, 72), (72, 128), (128,)))
    with _plan.Device.assumed(device):
        text = jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = (line for line in text.splitlines() if "@jaxconv_dense_gated_v2" in line)
    types = call.rpartition(" : ")[2]
    y, z = "tensor<96x64xbf16>", "tensor<96x128xbf16>, " * trained
    assert types == f"(tensor<96x72xbf16>, tensor<72x128xbf16>, tensor<128xbf16>) -> ({y}, {z}tensor<0xui8>)"
    for attribute in ('activation = "silu"', "first = 1 : i64", 'bias = "column"', f'kernel = "{_plan.GATED}"'):
        assert attribute in call, attribute


# ----------------------------------------------------------------------------------------------------------------------
# What accelerate finds


def halves(z: Any) -> Any:
    return jnp.split(z, 2, -1)


GATES: dict[str, tuple[Any, str, bool]] = {  # of z; what it is told as; whether z is read otherwise
    "glu": (jax.nn.glu, "gate(sigmoid)", False),
    "geglu": (lambda z: halves(z)[0] * nn.gelu(halves(z)[1]), "gate(gelu)", False),
    "exact": (lambda z: jax.nn.gelu(halves(z)[1], approximate=False) * halves(z)[0], "gate(gelu_exact)", False),
    "slices": (lambda z: z[..., :8] * jax.nn.silu(z[..., 8:]), "gate(silu)", False),
    "first": (lambda z: jax.nn.silu(z[..., :8]) * z[..., 8:], "gate(silu)", False),
    "relu": (lambda z: halves(z)[0] * jnp.maximum(halves(z)[1], 0), "gate(relu)", False),
    "tanh": (lambda z: jnp.tanh(halves(z)[0]) * halves(z)[1], "gate(tanh)", False),
    "none": (lambda z: z[..., :8] * z[..., 8:], "gate(none)", False),
    "read": (lambda z: jax.nn.glu(z) + jnp.sin(z[..., :8]), "gate(sigmoid)", True),
}


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("biased", (False, True), ids=("bare", "biased"))
def test_gates_are_found(name, biased):
    gate, told, _ = GATES[name]
    x, w, b = (jnp.asarray(normal(i, s), "float32") for i, s in enumerate(((3, 5, 12), (12, 16), (16,))))

    def layer(x, w, b):
        return gate(x @ w + b if biased else x @ w)

    f = jaxconv.accelerate(lambda *a: layer(*a))
    found = equations(jax.jit(f), x, w, b)
    assert found["jaxconv_gate"] + found["jaxconv_dense_gated"] == 1
    assert found["split"] + found["slice"] == GATES[name][2]
    assert " + ".join(["dense", *["bias"] * biased, told]) in str(f.report(x, w, b))
    np.testing.assert_allclose(jax.jit(f)(x, w, b), layer(x, w, b), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "gate",
    [
        lambda z: z[..., :6] * jax.nn.silu(z[..., 6:12]),
        # |g|, whose derivative at 0 is 0; a relu's is written out in it, and at 0 that is 1/2.
        lambda z: z[..., :8] * jnp.maximum(z[..., 8:], 0) - z[..., :8] * jnp.minimum(z[..., 8:], 0),
        lambda z: z[..., ::2] * jax.nn.silu(z[..., 1::2]),
        lambda z: jnp.tanh(z[..., :8]) * jax.nn.sigmoid(z[..., 8:]),  # of both halves
        lambda z: z[..., :8] + jax.nn.silu(z[..., 8:]),
        lambda z: z[..., :8] * jax.nn.silu(z[..., :8]),  # of one half
        lambda z: z[:1] * jax.nn.silu(z[1:]),
    ],
    ids=("other halves", "part of an absolute value", "every other", "both", "sum", "one half", "rows"),
)
def test_what_is_no_gate_is_left(gate):
    x, w, b = (jnp.asarray(normal(i, s), "float32") for i, s in enumerate(((2, 12), (12, 16), (16,))))
    f = jaxconv.accelerate(lambda *a: gate(a[0] @ a[1] + a[2]))
    found = equations(jax.jit(f), x, w, b)
    assert not found["jaxconv_gate"] and not found["jaxconv_dense_gated"] and found["jaxconv_dense"] == 1
    np.testing.assert_allclose(jax.jit(f)(x, w, b), gate(x @ w + b), rtol=1e-5, atol=1e-5)


def test_the_gate_of_flax_layers():
    """A feed-forward block as diffusion models have it, and a pointwise convolution with a gated linear unit."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            a, g = jnp.split(nn.Dense(32)(x), 2, -1)
            x = nn.Dense(8)(a * nn.gelu(g))
            return nn.glu(nn.Conv(16, (1,))(x))

    x = jnp.asarray(normal(0, (2, 6, 8)), "float32")
    block = Block()
    params = block.init(jax.random.key(0), x)

    def loss(apply: Any) -> Any:
        return lambda params: jnp.sum(jnp.sin(apply(params, x)))

    f = jaxconv.accelerate(lambda params, x: block.apply(params, x))
    assert equations(f, params, x)["jaxconv_gate"] + equations(f, params, x)["jaxconv_dense_gated"] == 2
    got, want = (jax.jit(jax.grad(loss(apply)))(params) for apply in (f, block.apply))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5), got, want)

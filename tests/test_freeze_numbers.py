"""Python numbers among a frozen function's inputs: arrays of the program, as under jax.jit, and one program for all."""

from __future__ import annotations

import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax_cases import array, assert_same
from jax import export, lax

import jaxconv

W, X = array(0, (3, 3, 16, 16)) / 12, array(1, (2, 6, 6, 16))
TERMS = 200


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


def denoiser(w: Any, x: Any, t: Any) -> Any:
    """One step of a diffusion model, at a time that a sampler's loop counts."""
    h = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jax.nn.silu(h * jnp.sin(t / 1000) + 0.01 * t)


def programs(frozen: Any) -> int:
    return len(frozen._function.programs)


def test_one_program_for_all_values():
    traced = []

    def f(w: Any, x: Any, t: Any) -> Any:
        traced.append(1)
        return denoiser(w, x, t)

    frozen, plain = jaxconv.freeze(f, W), jax.jit(denoiser)
    for t in (0, 1, -3, 999):
        assert_same(frozen(X, t), plain(W, X, t), terms=TERMS)
    assert len(traced) == programs(frozen) == 1
    for t in (0.5, 2.0, -0.0):
        assert_same(frozen(X, t), plain(W, X, t), terms=TERMS)
    assert len(traced) == programs(frozen) == 2


class Mode(enum.IntEnum):
    PLAIN = 1
    DOUBLE = 2


class Count(int):
    pass


NUMBERS = {
    "int": 3,
    "negative": -7,
    "largest": 2**31 - 1,
    "float": 0.1,
    "infinity": float("inf"),
    "negative zero": -0.0,
    "complex": 1.5 - 2j,
    "an int of a class": Count(5),
    "NumPy's int64": np.int64(3),
    "NumPy's float32": np.float32(0.1),
    "NumPy's float64": np.float64(0.1),
    "NumPy's bool": np.bool_(True),
}
USES = {
    "alone": lambda p, x, t: (t, t + 1, -t, t * 0.5),
    "with an array": lambda p, x, t: (x * t, p + t, (x + t).astype(x.dtype)),
    "with integers": lambda p, x, t: x.astype(jnp.int8) * t,
    "with half": lambda p, x, t: x.astype(jnp.bfloat16) * t,
    "as an array": lambda p, x, t: (jnp.asarray(t), jnp.full((2,), t), jnp.stack([t, t])),
    "in a loop": lambda p, x, t: lax.scan(lambda c, x: (c, x * t), 0, x),
}


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("disabled", [False, True])
@pytest.mark.parametrize("name", NUMBERS)
def test_types_are_those_of_jit(name, x64, disabled, monkeypatch):
    """Weak ones too: what a program around makes of a result depends on it."""
    if disabled:
        monkeypatch.setenv("JAXCONV_DISABLE", "all")
    t, p = NUMBERS[name], np.arange(4, dtype=np.float32)
    with jax.enable_x64(x64):
        x = jnp.linspace(-2, 2, 8, dtype=jnp.float32).reshape(2, 4)
        for f in USES.values():
            if isinstance(t, np.bool_) and f is USES["alone"]:
                continue  # it has no negative
            expected, actual = jax.jit(f)(p, x, t), jaxconv.freeze(f, p)(x, t)
            assert jax.tree.structure(actual) == jax.tree.structure(expected)
            for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
                assert jax.typeof(a) == jax.typeof(e)
                np.testing.assert_allclose(np.asarray(a, complex), np.asarray(e, complex), rtol=1e-6)


def test_widths_are_programs_of_their_own():
    frozen = jaxconv.freeze(lambda p, t: p * t, np.ones(2))
    for x64, dtype in ((False, np.float32), (True, np.float64), (False, np.float32)):
        with jax.enable_x64(x64):
            y = frozen(0.1)
            assert y.dtype == dtype and float(y[0]) == float(dtype(0.1))
    assert programs(frozen) == 2


@pytest.mark.parametrize("t", [2**31, -(2**31) - 1, 2**70])
def test_an_integer_that_does_not_fit_is_refused_as_by_jit(t):
    def f(p: Any, t: Any) -> Any:
        return p * t, t

    p = jnp.ones(2)
    frozen, plain = jaxconv.freeze(f, p), jax.jit(f)
    for g in (lambda t: plain(p, t), frozen, frozen.report):
        with pytest.raises(OverflowError):
            g(t)
    frozen(1)
    with pytest.raises(OverflowError):  # with a program that is there already
        frozen(t)
    if abs(t) < 2**63:
        with jax.enable_x64(True):
            assert [jax.typeof(y) for y in frozen(t)] == [jax.typeof(y) for y in plain(p, t)]
            assert int(frozen(t)[1]) == t


def test_what_is_static_is_another_program():
    """A bool, a string, None and a member of an enum choose a program; bound numbers are the function's own."""
    seen = []

    def f(p: Any, n: int, x: Any, doubled: Any, mode: Any, name: Any) -> Any:
        seen.append((n, doubled, mode, name))
        y = x * p if doubled is not True else 2 * x * p
        return y.reshape(n, -1) if mode is Mode.DOUBLE or name == "flat" else y

    frozen = jaxconv.freeze(f, jnp.ones(4), 8)
    x = jnp.ones((4, 4))
    for doubled in (True, False, None):
        for mode in Mode:
            for name in ("flat", "other"):
                y = frozen(x, doubled, mode=mode, name=name)
                assert float(y.max()) == (2 if doubled else 1)
                assert y.shape == ((8, 2) if mode is Mode.DOUBLE or name == "flat" else (4, 4))
    assert programs(frozen) == 12 and {n for n, *_ in seen} == {8}
    with pytest.raises(jax.errors.TracerBoolConversionError):
        jaxconv.freeze(lambda p, x, t: x if t > 1 else p, jnp.ones(4))(x, 3)
    assert jaxconv.freeze(lambda p, x, t: x if t > 1 else p, jnp.ones(4), t=3)(x).shape == x.shape


def test_numbers_anywhere_in_the_inputs():
    def f(p: Any, batch: Any, *, times: Any = (1, 2), shift: Any = 0) -> Any:
        return batch["x"] * p * batch["t"] + times[0] - times[1] + shift

    frozen, p = jaxconv.freeze(f, array(2, (4,))), array(2, (4,))
    for i, t in enumerate((1, 2, 3)):
        batch = {"t": t, "x": array(i, (2, 4))}
        kwargs = dict(shift=10 * t, times=[t, 2 * t])
        assert_same(frozen(batch, **kwargs), jax.jit(f)(p, batch, **kwargs), terms=4)
    assert programs(frozen) == 1


def test_transformations():
    frozen, plain = jaxconv.freeze(denoiser, W), lambda x, t: denoiser(W, x, t)
    xs, ts = array(3, (3, *X.shape)), jnp.arange(3.0)
    gradients = [jax.grad(lambda t, f=f: f(X, t).sum()) for f in (frozen, plain)]
    for t in (3.0, 500.0):
        assert_same(*[g(t) for g in gradients], terms=TERMS * X.size)
        assert jax.typeof(gradients[0](t)) == jax.typeof(gradients[1](t))
    both = [jax.grad(lambda x, t, f=f: f(x, t).sum(), (0, 1))(X, 7.0) for f in (frozen, plain)]
    assert_same(*both, terms=TERMS * X.size)
    assert_same(*[jax.jvp(lambda t, f=f: f(X, t), (3.0,), (1.0,)) for f in (frozen, plain)], terms=TERMS)
    for t in (3, 4):
        assert_same(jax.vmap(frozen, (0, None))(xs, t), jax.vmap(plain, (0, None))(xs, t), terms=TERMS)
        assert_same(jax.jit(frozen)(X, t), plain(X, t), terms=TERMS)
        assert_same(jax.jit(lambda x, t=t: frozen(x, t))(X), plain(X, t), terms=TERMS)
    assert_same(jax.vmap(frozen)(xs, ts), jax.vmap(plain)(xs, ts), terms=TERMS)
    assert_same(jax.vmap(frozen, (None, 0))(X, ts), jax.vmap(plain, (None, 0))(X, ts), terms=TERMS)

    def sampled(f: Any) -> Any:
        return lax.fori_loop(0, 3, lambda t, x: f(x, t) / 8, X)

    assert_same(sampled(frozen), sampled(plain), terms=TERMS**2)


def test_export():
    frozen = jaxconv.freeze(denoiser, W)
    exported = export.export(jax.jit(frozen), disabled_checks=jaxconv.export_checks())(X, 3)
    loaded = export.deserialize(exported.serialize())
    assert_same(loaded.call(X, 500), denoiser(W, X, 500), terms=TERMS)


def test_apply_replace_and_reports():
    frozen = jaxconv.freeze(denoiser, W)
    report = frozen.report(jax.ShapeDtypeStruct(X.shape, X.dtype), 3)
    assert str(report) == str(frozen.report(X, 999)) and programs(frozen) == 1
    assert [finding.what for finding in report.replaced] == ["conv"]
    other = frozen.replace(2 * W)
    for t in (1, 2):
        assert_same(frozen.apply(frozen.weights, X, t), denoiser(W, X, t), terms=TERMS)
        assert_same(jax.jit(frozen.apply)(other.weights, X, t), denoiser(2 * W, X, t), terms=TERMS)
        assert_same(other(X, t), denoiser(2 * W, X, t), terms=TERMS)
    assert programs(frozen) == 1
    assert len(jaxconv.explain(frozen)(X, 3).accelerated) == len(report)


@pytest.mark.skipif(jax.device_count() < 2, reason="it takes two devices")
@pytest.mark.parametrize("kind", ("Auto", "Explicit"))
@pytest.mark.parametrize("placed", [False, True])
def test_beside_images_on_a_mesh(kind, placed):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(getattr(jax.sharding.AxisType, kind),), devices=jax.devices()[:2])
    w = jax.device_put(W, jax.NamedSharding(mesh, jax.P())) if placed else np.asarray(W)
    frozen, x = jaxconv.freeze(denoiser, w), jax.device_put(X, jax.NamedSharding(mesh, jax.P("data")))
    for t in (3, 500):
        y = frozen(x, t)
        assert y.sharding.spec[0] == "data"
        assert_same(jax.device_get(y), jax.device_get(denoiser(W, X, t)), terms=TERMS)
        with jax.set_mesh(mesh):
            assert_same(jax.device_get(frozen(x, t)), jax.device_get(denoiser(W, X, t)), terms=TERMS)

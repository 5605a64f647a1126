"""dense against numpy: every bias, c, alpha, beta, activation and dtype, through the custom call and through XLA."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference as ref
import pytest
from helpers import DTYPES, NAMED_ACTIVATIONS, PLATFORM, calls, equations, integers, label, normal, same_bits, types_of
from tolerance import assert_close, assert_exact, assert_within, eps, integers_for

import jaxconv

IMPLEMENTATIONS = ["native", None]

# (M, K, N)
SIZES = {
    (1, 1, 1): "every extent is 1",
    (3, 5, 7): "prime, below every tile",
    (65, 33, 129): "one past tiles of 64, 32 and 128; rows of odd length",
    (1, 64, 10): "one row: a classifier's head on one image",
    (257, 8, 1): "one column",
    (48, 301, 24): "a long reduction of odd length",
    (128, 64, 128): "whole tiles: the vectorised path",
    (0, 4, 3): "no rows",
}


def bias_shapes(m: int, n: int) -> dict[str, tuple[int, ...]]:
    kinds: dict[str, tuple[int, ...]] = {
        "scalar": (),
        "scalar_2d": (1, 1),
        "column": (n,),
        "column_2d": (1, n),
        "row_2d": (m, 1),
    }
    if n != 1:
        kinds["scalar_1d"] = (1,)
    if m not in (1, n):  # a 1-D bias of length 1 is a scalar, and where M == N it is per column
        kinds["row"] = (m,)
    return kinds


def spread(kind: str, b: np.ndarray) -> np.ndarray:
    """The bias as it is added to an (M, N) result; written from the kind's name, not from shapes."""
    if kind.startswith("scalar"):
        return b.reshape(1, 1)
    return b.reshape(-1, 1) if kind.startswith("row") else b.reshape(1, -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=label)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_integers_give_exactly_what_numpy_gives(size, implementation, dtype):
    m, k, n = size
    largest = integers_for(dtype)
    x, w, dy = integers(0, (m, k), largest), integers(1, (k, n), largest), integers(2, (m, n), largest)

    def run(x, w, dy):
        y, back = jax.vjp(functools.partial(jaxconv.dense, implementation=implementation), x, w)
        return y, *back(dy)

    with types_of(dtype):
        actual = jax.jit(run)(*(jnp.asarray(a, dtype) for a in (x, w, dy)))
    for what, a, expected in zip(("y", "dx", "dw"), actual, (x @ w, dy @ w.T, x.T @ dy), strict=True):
        assert a.dtype.name == dtype
        assert_exact(a, expected, f"{what} of {size} ({SIZES[size]})")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=label)
@pytest.mark.parametrize(("m", "n"), [(5, 7), (6, 6), (1, 4), (4, 1), (1, 1)], ids=str)
def test_every_bias_is_added_where_its_shape_says(m, n, implementation):
    """M == N is where a 1-D bias is ambiguous (it is per column); extents of 1 are where kinds coincide."""
    x, w, dy = integers(0, (m, 9)), integers(1, (9, n)), integers(2, (m, n))
    for kind, shape in bias_shapes(m, n).items():
        b = integers(3, shape)

        def run(x, w, b, dy):
            y, back = jax.vjp(
                functools.partial(jaxconv.dense, activation="relu", implementation=implementation), x, w, b
            )
            return y, *back(dy)

        y, dx, dw, db = jax.jit(run)(*(jnp.asarray(a, "float32") for a in (x, w, b, dy)))
        z = x @ w + spread(kind, b)
        dz = dy * (z > 0)
        axes = {"s": (0, 1), "r": (1,), "c": (0,)}[kind[0]]
        assert_exact(y, np.maximum(z, 0), kind)
        assert_exact(dx, dz @ w.T, kind)
        assert_exact(dw, x.T @ dz, kind)
        assert_exact(db, dz.sum(axes).reshape(shape), kind)


def test_a_one_dimensional_bias_of_a_square_result_is_per_column():
    b = jnp.arange(3.0)
    y = jaxconv.dense(jnp.zeros((3, 2)), jnp.zeros((2, 3)), b)
    np.testing.assert_array_equal(y, np.broadcast_to(b[None, :], (3, 3)))
    np.testing.assert_array_equal(
        jaxconv.dense(jnp.zeros((3, 2)), jnp.zeros((2, 3)), b[:, None]), np.broadcast_to(b[:, None], (3, 3))
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=label)
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (2, -1), (-0.5, 2.0), (0.0, 1.0), (1.0, 0.0)], ids=str)
@pytest.mark.parametrize("bias", [None, "column", "row_2d", "scalar"], ids=label)
def test_alpha_beta_and_c_are_exact_forward_and_backward(alpha, beta, bias, implementation):
    """Halves and small integers, so that every product stays exact."""
    m, k, n = 5, 9, 7
    x, w, c, dy = integers(0, (m, k)), integers(1, (k, n)), integers(2, (m, n)), integers(3, (m, n))
    b = None if bias is None else integers(4, bias_shapes(m, n)[bias])

    def run(x, w, c, b, dy):
        def f(x, w, c, b):
            return jaxconv.dense(
                x, w, b, c=c, alpha=alpha, beta=beta, return_preactivation=True, implementation=implementation
            )

        (y, z), back = jax.vjp(f, x, w, c, b)
        return y, z, *back((dy, jnp.zeros_like(dy)))[:3]

    arrays = [None if a is None else jnp.asarray(a, "float32") for a in (x, w, c, b, dy)]
    actual = jax.jit(run)(*arrays)
    z = alpha * (x @ w) + beta * c + (0 if b is None else spread(bias, b))
    expected = (z, z, alpha * (dy @ w.T), alpha * (x.T @ dy), beta * dy)
    for what, a, e in zip(("y", "z", "dx", "dw", "dc"), actual, expected, strict=True):
        assert_exact(a, e, what)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=label)
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 4)], ids=str)
def test_leading_dimensions_are_rows(lead, implementation):
    x, w, c = integers(0, (*lead, 6)), integers(1, (6, 4)), integers(2, (*lead, 4))
    rows = integers(3, lead)
    f = functools.partial(jaxconv.dense, implementation=implementation)
    x32, w32, c32 = (jnp.asarray(a, "float32") for a in (x, w, c))
    assert_exact(f(x32, w32, c=c32), x @ w + c)
    if lead not in ((), (4,)):
        assert_exact(f(x32, w32, jnp.asarray(rows, "float32")), x @ w + rows[..., None])
        assert_exact(f(x32, w32, jnp.asarray(rows[..., None], "float32")), x @ w + rows[..., None])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", NAMED_ACTIVATIONS, ids=label)
def test_every_activation_errs_no_more_than_twice_xla(activation, dtype):
    """y, z, dx, dw, db against float64, with cotangents for both results."""
    m, k, n = 65, 33, 24
    given = [normal(i, s, dtype) for i, s in enumerate(((m, k), (k, n), (n,), (m, n), (m, n)))]
    x, w, b, dy, dz = given

    def run(options, x, w, b, dy, dz):
        f = functools.partial(
            jaxconv.dense, activation=activation, return_preactivation=True, precision="highest", **options
        )
        (y, z), back = jax.vjp(f, x, w, b)
        return y, z, *back((dy, dz))

    with types_of(dtype):
        arrays = [jnp.asarray(a, dtype) for a in given]
        actual = jax.jit(functools.partial(run, {"implementation": "native"}))(*arrays)
        xla = jax.jit(functools.partial(run, {"implementation": "xla"}))(*arrays)
    z64 = x @ w + b
    total = dy * ref.slope(activation, z64) + dz
    references = (ref.activate(activation, z64), z64, total @ w.T, x.T @ total, total.sum(0))
    for what, a, t, r, terms in zip("yzxwb", actual, xla, references, (k, k, n, m, m), strict=True):
        # dz is rounded to the dtype before the sums: their magnitude, not the result's, sets the floor.
        scale = np.abs(z64).max() if what in "yz" else np.abs(total).max() * np.sqrt(terms)
        assert_close(a, t, r, terms, what, scale=scale)


@pytest.mark.parametrize("precision", [None, "high", "highest"], ids=label)
def test_float32_products_are_as_exact_as_precision_says(precision):
    """TF32 rounds each factor to 10 bits after the leading one: 2^-10 of each product (2^-9 where it truncates), and n
    float32 additions 2^-24 n of the sum of magnitudes. "highest" has only the latter."""
    m, k, n = 64, 200, 48
    x, w = normal(0, (m, k), "float32"), normal(1, (k, n), "float32")
    y = jaxconv.dense(
        jnp.asarray(x, "float32"), jnp.asarray(w, "float32"), precision=precision, implementation="native"
    )
    product = 2.0**-9 if PLATFORM == "cuda" and precision != "highest" else 0.0
    assert_within(y, x @ w, (product + k * 2.0**-24) * (np.abs(x) @ np.abs(w)))


def test_gradients_agree_with_numerical_derivatives():
    """dX, dW, dB and dC against central differences of the formula, entry by entry."""
    m, k, n = 3, 4, 5
    names = ("x", "w", "b", "c")
    given = {
        a: normal(i, s, "float32") * 0.5
        for i, (a, s) in enumerate(zip(names, ((m, k), (k, n), (n,), (m, n)), strict=True))
    }
    dy = normal(9, (m, n), "float32")

    def numpy_loss(**changed):
        now = {**given, **changed}
        return float((dy * np.tanh(0.5 * now["x"] @ now["w"] + 2 * now["c"] + now["b"])).sum())

    def loss(x, w, b, c):
        y = jaxconv.dense(
            x, w, b, c=c, alpha=0.5, beta=2, activation="tanh", precision="highest", implementation="native"
        )
        return (jnp.asarray(dy, "float32") * y).sum()

    grads = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*(jnp.asarray(given[a], "float32") for a in names))
    for name, actual in zip(names, grads, strict=True):
        numerical = ref.numerical_gradient(lambda v, name=name: numpy_loss(**{name: v}), given[name])
        # Sums of at most 5 float32 terms of size 1, after tanh': a few ulp of the largest.
        assert_within(actual, numerical, 16 * eps("float32") * max(1, np.abs(numerical).max()))


# ----------------------------------------------------------------------------------------------------------------------
# What runs


def test_native_runs_its_custom_calls_and_nothing_of_xla():
    x, w, b, c = jnp.ones((5, 4)), jnp.ones((4, 6)), jnp.ones(6), jnp.ones((5, 6))
    assert calls(lambda x, w: jaxconv.dense(x, w, implementation="native"), x, w) == {"matmul": 1}

    def fused(x, w, b, c):
        return jaxconv.dense(x, w, b, c=c, alpha=2.0, beta=3.0, activation="gelu", implementation="native")

    assert calls(fused, x, w, b, c) == {"dense": 1}
    text = jax.jit(fused).lower(x, w, b, c).compile().as_text()
    assert not any(f" {op}(" in text for op in ("dot", "add", "multiply", "tanh", "fusion"))
    gradient = jax.grad(lambda *args: fused(*args).sum(), (0, 1, 2, 3))
    assert calls(gradient, x, w, b, c) == {"dense": 1, "matmul": 2}


def test_gradients_are_taken_without_a_transpose():
    """dx = dz w^T and dw = x^T dz read w and x as they lie: the transposition is an attribute of the product."""
    x, w = jnp.ones((5, 4)), jnp.ones((4, 6))
    f = jax.grad(lambda x, w: jaxconv.dense(x, w, implementation="native").sum(), (0, 1))
    assert equations(f, x, w)["transpose"] == 0
    assert " transpose(" not in jax.jit(f).lower(x, w).compile().as_text()


def test_xla_runs_no_custom_call_of_ours():
    x, w, b = jnp.ones((5, 4)), jnp.ones((4, 6)), jnp.ones(6)
    f = functools.partial(jaxconv.dense, activation="gelu", implementation="xla")
    assert calls(jax.grad(lambda *args: f(*args).sum(), (0, 1, 2)), x, w, b) == {}


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_call_gives_the_same_bits_every_time(dtype):
    with types_of(dtype):
        x, w = (jnp.asarray(normal(i, s, dtype), dtype) for i, s in enumerate(((65, 301), (301, 129))))

        @jax.jit
        def run(x, w):
            y, back = jax.vjp(functools.partial(jaxconv.dense, implementation="native", activation="silu"), x, w)
            return y, back(y)

        first = run(x, w)
        assert all(same_bits(first, run(x, w)) for _ in range(3))


def test_saving_the_preactivation_does_not_change_y():
    x, w = (jnp.asarray(normal(i, s), "float32") for i, s in enumerate(((33, 17), (17, 65))))
    f: Any = functools.partial(jaxconv.dense, activation="gelu", implementation="native")
    assert same_bits(jax.jit(f)(x, w), jax.jit(functools.partial(f, return_preactivation=True))(x, w)[0])


@pytest.mark.parametrize("implementation", ["native", "xla"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_alpha_and_beta_are_not_rounded_to_16_bits(dtype, implementation):
    """And a product that is too large for float16 is multiplied before it is rounded."""
    x, w, c = (jnp.full(shape, 200, dtype) for shape in ((2, 3), (3, 4), (2, 4)))
    how = dict(implementation=implementation)

    def f(x: Any, w: Any, c: Any, alpha: float = 1e-3, beta: float = 1 / 3) -> Any:
        return jaxconv.dense(x, w, c=c, alpha=alpha, beta=beta, **how).astype(jnp.float32)

    one = 2.0 ** (-8 if dtype == "bfloat16" else -11)
    close = functools.partial(np.testing.assert_allclose, rtol=2.1 * one)  # z is rounded, and y
    close(f(x, w, c), np.full((2, 4), 120 + 200 / 3, np.float32))
    close(jaxconv.dense(x, w, alpha=1e-3, **how).astype(jnp.float32), np.full((2, 4), 120, np.float32))
    close(f(x, w, c * 0 + 2e-4, beta=1e5), np.full((2, 4), 140, np.float32), rtol=4 * one)
    _, tangent = jax.jvp(functools.partial(f, x, w), (c,), (jnp.ones_like(c),))
    close(tangent, np.full((2, 4), 1 / 3, np.float32))
    dx, dw, dc = jax.grad(lambda *a: f(*a).sum(), (0, 1, 2))(x, w, c)
    for got, expected in ((dx, 0.8), (dw, 0.4), (dc, 1 / 3)):
        close(got.astype(jnp.float32), np.full(got.shape, expected, np.float32))

"""float32 on Hopper's tensor cores: sums of bfloat16 terms at "highest", TF32 at the default."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference as ref
import pytest
from cases import SM90_CASES, ConvCase, edge
from helpers import DEVICE, integers, normal
from tolerance import assert_exact

import jaxconv
from jaxconv import _plan
from jaxconv._ops import conv
from jaxconv._plan import sm90

if DEVICE.compute_capability != (9, 0):  # not collected: there are some thousand
    pytest.skip("sm90 is Hopper's", allow_module_level=True)

CASES = {
    case.name: case
    for case in (
        edge("columns", 2, (9, 7), 64, 128, (3, 3), "126 pixels: columns of 32 and 128 end in the middle", padding=1),
        edge("ragged", 3, (7, 5), 24, 40, (3, 3), "24 and 40 channels: a stage is partly zeros", padding=1),
        edge("strided", 2, (9, 11), 64, 72, (3, 3), "phases in dgrad", padding=1, stride=2),
        edge("dilated", 1, (12, 12), 64, 64, (3, 3), "dilation 2", padding=2, dilation=2),
        edge("pointwise", 3, (10, 9), 72, 136, (1, 1), "a matrix product"),
        edge("widening", 3, (10, 9), 40, 328, (1, 1), "to many channels: wgrad's rows are those of dy"),
        edge("groups", 2, (8, 8), 128, 128, (3, 3), "two groups of 64", padding=1, groups=2),
        edge("volume", 1, (5, 6, 7), 32, 32, (3, 3, 3), "3-D", padding=1),
    )
}
LONG = edge("long", 4, (7, 7), 512, 512, (3, 3), "K = 4,608 in fprop and dgrad", padding=1)
OPERANDS = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("x", "dy")}


def trio(case: ConvCase, x: Any, w: Any, dy: Any, **options: Any) -> dict[str, Any]:
    @jax.jit
    def run(x: Any, w: Any, dy: Any) -> dict[str, Any]:
        y, back = jax.vjp(functools.partial(case.function, **case.options, **options), x, w)
        dx, dw = back(dy)
        return {"fprop": y, "dgrad": dx, "wgrad": dw}

    return run(*(jnp.asarray(a, "float32") for a in (x, w, dy)))


def shapes(case: ConvCase) -> dict[str, tuple[int, ...]]:
    return {"x": case.x_shape(), "w": case.w_shape(), "dy": (case.batch, *ref.out_extents(case), case.out_channels)}


@pytest.mark.parametrize("precision", ["default", "highest"])
@pytest.mark.parametrize("name", CASES)
def test_integers_of_several_terms_are_exact(name, precision):
    """1000 needs two bfloat16 terms and fits TF32's 11 bits; every partial sum stays below 2^24."""
    case = CASES[name]
    given = {n: integers(i, s, 3 if n == "w" else 1000) for i, (n, s) in enumerate(shapes(case).items())}
    for pair in (("x", "w", "dy"), ("x", "w", "small")):
        dy = given["dy"] if pair[2] == "dy" else np.sign(given["dy"])
        actual = trio(case, given["x"], given["w"], dy, algorithm="sm90", precision=precision)
        values = {**given, "dy": dy}
        for op in ("fprop", "dgrad") if pair[2] == "dy" else ("wgrad",):
            assert_exact(actual[op], getattr(ref, op)(case, *(values[n] for n in OPERANDS[op])), f"{op} of {name}")


FORCED = [
    f"sm90/{kernel} {tile}".strip() for kernel, tile in (*sm90.PRODUCTS, *sm90.FEW_ROWS, *sm90.HALOS, *sm90.WGRADS)
]
OPS = {"fprop": conv.fprop, "dgrad": conv.dgrad, "wgrad": conv.wgrad}


@pytest.mark.parametrize("precision", ["default", "highest"])
@pytest.mark.parametrize("kernel", FORCED)
@pytest.mark.parametrize("case", SM90_CASES, ids=lambda case: case.name)
def test_every_tile_is_exact(case, kernel, precision):
    """Of fprop, dgrad and wgrad those that have it: a tile runs what it claims to."""
    p = case.problem("float32", algorithm=kernel, precision=precision)
    given = {n: integers(i, s, 1000 if i == 0 else 1) for i, (n, s) in enumerate(shapes(case).items())}
    has = [op for op in OPS if _plan.supports(f"conv_{op}", kernel, p, DEVICE) is None]
    if not has:
        pytest.skip("outside its domain")
    for op in has:
        args = [given[name] for name in OPERANDS[op]]
        result = jax.jit(functools.partial(OPS[op], p))(*(jnp.asarray(a, "float32") for a in args))
        assert_exact(result, getattr(ref, op)(case, *args), f"{op} of {case.name}, {kernel}")


@pytest.mark.parametrize("name", ["columns", "strided", "dilated", "pointwise"])
def test_a_tf32_weight_gradient_rounds_its_operands_to_nearest(name):
    """Half an ulp of 11 bits, uniform, of numbers whose significands are spread like a normal's: 2.1e-4 of an operand
    and 2.9e-4 of a sum of products, root mean square. Cutting the bits off errs twice as much, and all one way."""
    case = CASES[name]
    x, w, dy = (normal(i, s, "float32") for i, s in enumerate(shapes(case).values()))
    exact = ref.wgrad(case, x, dy)
    error = np.asarray(trio(case, x, w, dy, algorithm="sm90")["wgrad"], np.float64) - exact
    assert np.sqrt(np.mean(error**2)) <= 4e-4 * np.sqrt(np.mean(exact**2))


@pytest.mark.parametrize("sign", ["both", "positive"])
def test_highest_errs_no_more_than_float32_fmas(sign):
    """The tensor cores cut sums towards zero; where all products are positive the cuts would add up."""
    given = {n: normal(i, s, "float32") for i, (n, s) in enumerate(shapes(LONG).items())}
    if sign == "positive":
        given = {n: np.abs(a) for n, a in given.items()}
    terms, fmas = (trio(LONG, *given.values(), precision="highest", algorithm=a) for a in ("sm90", "implicit_gemm"))
    for op, names in OPERANDS.items():
        exact = getattr(ref, op)(LONG, *(given[n] for n in names))
        ours, theirs = (float(np.sqrt(np.mean((np.asarray(r[op], np.float64) - exact) ** 2))) for r in (terms, fmas))
        assert ours <= theirs, f"{op}: rms error {ours:.3g}, FMAs {theirs:.3g}"


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 3.4028235e38])
@pytest.mark.parametrize("name", ["columns", "strided", "pointwise", "widening"])
def test_numbers_beyond_the_terms_range_give_what_xla_gives(name, value):
    """An infinity has no finite rest; the largest float32 rounds to an infinite bfloat16. Only results that it belongs
    to see it. In x and dy no tap takes the two to the same sum, or to padding, whose zeros "direct" leaves out."""
    case = CASES[name]
    given = {n: normal(i, s, "float32") * 1e-3 for i, (n, s) in enumerate(shapes(case).items())}
    given["x"][1, 4, 3, 5] = given["dy"][0, 2, 3, 7] = value
    ours, xla = (
        trio(case, *given.values(), precision="highest", **choice)
        for choice in ({"algorithm": "sm90"}, {"algorithm": "direct"})
    )
    for op in OPERANDS:
        for test in (np.isnan, np.isposinf, np.isneginf):
            np.testing.assert_array_equal(test(ours[op]), test(xla[op]), op)
        finite = np.isfinite(xla[op])
        ours_finite, xla_finite = (np.asarray(r[op])[finite] for r in (ours, xla))
        np.testing.assert_allclose(ours_finite, xla_finite, rtol=1e-5, atol=1e-6, err_msg=op)
        assert np.isfinite(value) or not finite.all()


@pytest.mark.parametrize("precision", ["default", "highest"])
@pytest.mark.parametrize("trans_x", [False, True])
def test_dense_of_several_terms_is_exact(precision, trans_x):
    """x^T dz, dz w^T and x w: every memory order, through the gradient."""
    m, k, n = 104, 72, 136
    x, w, dy = integers(0, (m, k), 1000), integers(1, (k, n), 3), integers(2, (m, n), 3)
    b = integers(3, (n,), 50)

    @jax.jit
    def run(x: Any, w: Any, b: Any, dy: Any) -> Any:
        f = functools.partial(jaxconv.dense, algorithm="sm90", precision=precision, activation="relu6")
        (y, z), back = jax.vjp(functools.partial(f, return_preactivation=True), x, w, b)
        return y, z, back((jnp.zeros_like(y), dy))

    y, z, (dx, dw, db) = run(*(jnp.asarray(a, "float32") for a in (x, w, b, dy)))
    assert_exact(z, x @ w + b)
    assert_exact(y, np.clip(x @ w + b, 0, 6))
    assert_exact(dx, dy @ w.T)
    assert_exact(dw, x.T @ dy)
    assert_exact(db, dy.sum(0))

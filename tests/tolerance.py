"""The two ways in which numbers are compared.

Exact: inputs are small integers, every partial sum is an integer that the accumulator holds, and the result is one that
the dtype holds, so equality is demanded in whatever order the sums were taken. This finds indexing bugs.

Close: against float64, no worse than twice XLA's own error in the same dtype plus a floor. This finds numerics bugs.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np


def eps(dtype: str) -> float:
    """The distance from 1 to the next number: rounding to nearest errs by half of it, relatively."""
    return float(jnp.finfo(dtype).eps)


def accumulator(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


def largest_integer(dtype: str) -> int:
    """All integers up to this one are numbers of `dtype`: 256 for bfloat16, 2048 for float16, 2^24 for float32."""
    return round(2 / eps(dtype))


def integers_for(dtype: str) -> int:
    """The largest input of exact tests: 16-bit sums must stay within 256, so their terms are -1, 0 and 1."""
    return 1 if dtype in ("bfloat16", "float16") else 2


def assert_exact(actual: Any, expected: np.ndarray, what: str = "") -> None:
    """Equality with a float64 reference whose values the dtype must hold."""
    dtype = actual.dtype.name
    assert np.abs(expected).max(initial=0) <= largest_integer(dtype), "the case's sums leave the dtype's exact integers"
    assert actual.shape == expected.shape, what
    np.testing.assert_array_equal(np.asarray(actual, np.float64), expected, err_msg=what)


def error(actual: Any, reference: np.ndarray) -> float:
    """The largest absolute error. NaN where either has one."""
    difference = np.abs(np.asarray(actual, np.float64) - reference)
    return float(difference.max(initial=0.0))


def floor(dtype: str, terms: int, scale: float) -> float:
    """How much an honest implementation may err where XLA happens not to, for sums of `terms` terms.

    scale is the largest |value| on the way to the result. Two ulp of the result: z and y are each rounded to the dtype
    (half an ulp each), and an activation and its derivative, computed from the rounded z or y, pass that on at a slope
    of at most 1.13 and add an ulp or so of their own. And the sum: each of `terms` additions rounds a partial sum of at
    most `scale` by a uniform error of standard deviation 0.29 eps * scale; together that is 0.29 eps * sqrt(terms) *
    scale, and 7 standard deviations cover the largest of all elements.
    """
    return scale * (2 * eps(dtype) + 2 * eps(accumulator(dtype)) * np.sqrt(max(terms, 1)))


def assert_close(actual: Any, xla: Any, reference: np.ndarray, terms: int, what: str = "", scale: float = 0.0) -> None:
    """err(ours) <= 2 err(XLA, same dtype, precision highest) + floor, both against a float64 reference.

    Twice, because XLA's order of summation is one draw and ours another. XLA's path shares formulas with ours (the
    derivatives of activations), so its error must be one of rounding: otherwise a wrong formula would excuse itself.
    8 floors, because XLA may round to the dtype after each of the handful of steps that a kernel fuses.
    """
    assert actual.shape == reference.shape, what
    scale = max(scale, float(np.abs(reference).max(initial=0.0)))
    ours, theirs = error(actual, reference), error(xla, reference)
    least = floor(actual.dtype.name, terms, scale)
    assert theirs <= 8 * least, f"{what}: XLA errs by {theirs:.3g}, rounding explains no more than {8 * least:.3g}"
    bound = 2 * theirs + least
    assert ours <= bound, f"{what}: error {ours:.3g}, XLA's {theirs:.3g}, allowed {bound:.3g} (max|ref| {scale:.3g})"


def assert_within(actual: Any, reference: np.ndarray, bound: Any, what: str = "") -> None:
    """|actual - reference| <= bound, element by element; the caller derives the bound."""
    assert actual.shape == reference.shape, what
    excess = np.abs(np.asarray(actual, np.float64) - reference) - bound
    assert np.all(excess <= 0), f"{what}: exceeds its bound by {np.nanmax(excess):.3g}"

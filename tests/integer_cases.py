"""Convolutions of integers for tests: drawn, as lax's, by numpy, and by the kernel."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from helpers import PLATFORM, calls
from jax import lax

from jaxconv._enable import forms
from jaxconv._problem import INTEGERS

KERNELS = ("integer/output", "integer/tile") if PLATFORM == "cuda" else ("integer/output",)
NUMBERS = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}
# (lhs, rhs, parameters): channels last unless dimension_numbers says otherwise
Form = tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]

# (operand, result) as lax takes them; None is the operand's own
TYPES = [
    *((t, None) for t in INTEGERS),
    *(("int8", t) for t in ("int16", "int32", "int64")),
    *(("uint8", t) for t in ("int8", "int16", "uint16", "int32", "uint32", "int64", "uint64")),
    *(("int16", t) for t in ("int32", "int64")),
    *(("uint16", t) for t in ("int16", "int32", "uint32", "int64", "uint64")),
    ("int32", "int64"),
    *(("uint32", t) for t in ("int32", "int64", "uint64")),
    ("uint64", "int64"),
]


def values(seed: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Of the whole range of the type, its ends among them."""
    if dtype == "bool":
        return np.random.default_rng(seed).integers(0, 2, shape).astype(bool)
    info = jnp.iinfo(dtype)
    low, high = int(info.min), int(info.max)
    drawn = np.random.default_rng(seed).integers(low, high, shape, "uint64" if low == 0 else "int64", endpoint=True)
    drawn.flat[:: max(1, drawn.size // 7)] = low
    drawn.flat[1 :: max(2, drawn.size // 5)] = high
    return drawn.astype(jnp.dtype(dtype))


def operands(form: Form, left: str, right: str | None = None) -> tuple[np.ndarray, np.ndarray]:
    return values(1, form[0], left), values(2, form[1], right or left)


def window_of(form: Form) -> tuple[tuple[Any, Any], dict[str, Any]]:
    """lax's strides and padding, and its other arguments."""
    nd = len(form[0]) - 2
    given = dict(dimension_numbers=NUMBERS.get(nd)) | form[2]
    return (given.pop("window_strides", (1,) * nd), given.pop("padding", ((0, 0),) * nd)), given


def by_lax(form: Form, lhs: Any, rhs: Any, dtype: str | None = None) -> jax.Array:
    window, given = window_of(form)
    return lax.conv_general_dilated(lhs, rhs, *window, preferred_element_type=dtype, **given)


def by_numpy(form: Form, lhs: np.ndarray, rhs: np.ndarray, dtype: Any) -> np.ndarray:
    """The sum as common/problem.h writes it, modulo 2^64 and then cut off: by another reading than XLA's."""
    nd = lhs.ndim - 2
    (s, pads), given = window_of(form)
    numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, given["dimension_numbers"])
    ones = (1,) * nd
    u, d = (given.get(name, ones) for name in ("lhs_dilation", "rhs_dilation"))
    x = np.transpose(lhs.astype("uint64"), numbers.lhs_spec)  # (N, C, ...)
    w = np.transpose(rhs.astype("uint64"), numbers.rhs_spec)  # (K, C, ...)
    z = np.zeros((*x.shape[:2], *((e - 1) * step + 1 for e, step in zip(x.shape[2:], u, strict=True))), "uint64")
    z[(slice(None), slice(None), *(slice(None, None, step) for step in u))] = x
    spans = [(f - 1) * step + 1 for f, step in zip(w.shape[2:], d, strict=True)]
    outs = [
        (e + low + high - span) // step + 1
        for e, (low, high), span, step in zip(z.shape[2:], pads, spans, s, strict=True)
    ]
    g, b = given.get("feature_group_count", 1), given.get("batch_group_count", 1)
    n, k = x.shape[0] // b, w.shape[0]
    y = np.zeros((n, k, *outs), "uint64")
    for group in range(g * b):
        image = z[group * n : (group + 1) * n] if b > 1 else z[:, group * w.shape[1] : (group + 1) * w.shape[1]]
        mine = slice(group * k // (g * b), (group + 1) * k // (g * b))
        for o in itertools.product(*map(range, outs)):
            for t in itertools.product(*map(range, w.shape[2:])):
                at = [i * step - low + j * gap for i, step, (low, _), j, gap in zip(o, s, pads, t, d, strict=True)]
                if all(0 <= a < e for a, e in zip(at, z.shape[2:], strict=True)):
                    y[(slice(None), mine, *o)] += image[(slice(None), slice(None), *at)] @ w[(mine, slice(None), *t)].T
    return np.transpose(y, np.argsort(numbers.out_spec)).astype(dtype)


def natively(form: Form, lhs: Any, rhs: Any, dtype: str | None, kernel: str) -> np.ndarray:
    """lax's convolution by the kernel, as enable reads it."""
    (equation,) = jax.make_jaxpr(lambda x, w: by_lax(form, x, w, dtype))(lhs, rhs).eqns
    avals = *(v.aval for v in equation.invars), equation.outvars[0].aval
    read = forms.read(*avals, equation.params)
    assert not isinstance(read, str), read
    read = dataclasses.replace(read, problem=dataclasses.replace(read.problem, algorithm=kernel))
    assert calls(read.run, lhs, rhs) == {"conv_integer": 1}
    return np.asarray(jax.jit(read.run)(lhs, rhs))


def equal(got: Any, want: Any) -> None:
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


def random_form(rng: random.Random) -> Form:
    """Any order of axes, any window."""
    nd = rng.choice((1, 2, 2, 3))
    groups, batch_groups = rng.choice(((1, 1), (1, 1), (2, 1), (3, 1), (1, 2)))
    n, c, k = rng.choice((1, 2, 3)), rng.choice((1, 2, 3, 4, 8)), rng.choice((1, 2, 5, 9, 33))
    sizes, filters, strides, lefts, rights, pads = [], [], [], [], [], []
    for _ in range(nd):
        size, taps = rng.choice((1, 2, 5, 8)), rng.choice((1, 1, 2, 3))
        left, right, stride = (rng.choice((1, 1, 2, 3)) for _ in range(3))
        low = rng.choice((0, 0, 1, 4, -1))
        span, whole = (taps - 1) * right + 1, (size - 1) * left + 1
        high = max(rng.choice((0, 0, 1, 3, -2)), span - whole - low)
        for into, one in zip(
            (sizes, filters, strides, lefts, rights, pads), (size, taps, stride, left, right, (low, high)), strict=True
        ):
            into.append(one)
    specs = [tuple(rng.sample(range(nd + 2), nd + 2)) for _ in range(3)]

    def laid(spec: tuple[int, ...], extents: list[int]) -> tuple[int, ...]:
        return tuple(extent for _, extent in sorted(zip(spec, extents, strict=True)))

    given = dict(window_strides=strides, padding=pads, lhs_dilation=lefts, rhs_dilation=rights)
    given |= dict(feature_group_count=groups, batch_group_count=batch_groups)
    given |= dict(dimension_numbers=lax.ConvDimensionNumbers(*specs))
    return (
        laid(specs[0], [n * batch_groups, c * groups, *sizes]),
        laid(specs[1], [k * groups * batch_groups, c, *filters]),
        given,
    )

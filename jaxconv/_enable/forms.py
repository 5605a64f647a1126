"""lax's convolution, in whatever form a library wrote it or a transform of JAX made it, as fprop, dgrad or wgrad.

JAX writes a layer's forward, the gradient of its images and the gradient of its filter as one primitive, whose arrays
lie on one equation in each spatial axis:

    lhs * lhs_dilation = out * window_strides - low + rhs * rhs_dilation         (of indices)

and so do the arrays of a `ConvProblem`:

    x = y * stride - low + w * dilation

A reading says which of lax's arrays are x, y and w. There are six, and the order of the arrays' axes, which JAX's rules
keep, leaves one of them: images lie in memory with N first and channels last or second. Where x is not lhs, a sign is
wrong, and one array is read backwards. Since JAX wrote it backwards for the same reason, XLA removes both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxconv._core import primitives, sharding
from jaxconv._ops import conv, conv_float8, conv_integer
from jaxconv._problem import DTYPES, ConvProblem, IntegerConvProblem, Precision, ScaledConvProblem

Array = jax.Array

# The parameters of lax's convolution that are understood; another one, unless it is None, may mean anything.
PARAMETERS = frozenset(
    (
        *("window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers"),
        *("feature_group_count", "batch_group_count", "precision", "preferred_element_type", "out_sharding"),
    )
)

# What the first two entries of lax's dimension numbers stand for: each letter is an extent that two arrays share.
AXES = {"lhs": "pq", "rhs": "rq", "out": "pr"}
# The letter whose axis has the groups as its major part, in lax's arrays and in ours
FEATURE_GROUPS = {"lhs": "q", "rhs": "r", "out": "r"}
BATCH_GROUPS = {"lhs": "p", "rhs": "r", "out": "r"}


@dataclasses.dataclass(frozen=True)
class Reading:
    form: str
    kernel: primitives.Kernel
    x: str  # "lhs", "rhs" or "out"
    y: str
    w: str

    @property
    def backwards(self) -> str | None:
        """The array that is read backwards."""
        return {"lhs": None, "out": "rhs", "rhs": "out"}[self.x]

    def letter(self, a: str, b: str) -> str:
        """The extent that two of x, y, w share: N of x and y, C of x and w, K of y and w."""
        (shared,) = set(AXES[getattr(self, a)]) & set(AXES[getattr(self, b)])
        return shared


# Of two that fit, the first, unless `_transposed_filter` says otherwise.
READINGS = (
    Reading("fprop", conv.fprop, x="lhs", y="out", w="rhs"),
    Reading("dgrad", conv.dgrad, x="out", y="lhs", w="rhs"),  # and a transposed convolution
    Reading("wgrad", conv.wgrad, x="lhs", y="rhs", w="out"),
    Reading("wgrad", conv.wgrad, x="rhs", y="lhs", w="out"),  # of a transposed convolution
    Reading("dgrad", conv.dgrad, x="out", y="rhs", w="lhs"),  # the gradient of a weight gradient
    Reading("fprop", conv.fprop, x="rhs", y="out", w="lhs"),
)


@dataclasses.dataclass(frozen=True)
class Form:
    """lax's convolution as a kernel's problem, and how lax's operands become the kernel's and its result lax's."""

    form: str  # "fprop", "dgrad", "wgrad"; "integers", "float8"
    kernel: primitives.Kernel
    problem: ConvProblem | IntegerConvProblem | ScaledConvProblem
    operands: Mapping[str, Callable[[Array], Array]]  # "lhs", "rhs" -> to the kernel's, in the kernel's order
    result: Callable[[Array], Array]

    def run(self, lhs: Array, rhs: Array) -> Array:
        given = {"lhs": lhs, "rhs": rhs}
        return self.result(self.kernel(self.problem, *(into(given[name]) for name, into in self.operands.items())))


def read(lhs: Any, rhs: Any, out: Any, params: Mapping[str, Any]) -> Form | str:
    """The form of lax's convolution of arrays of these types, or a sentence that says why it has none."""
    unknown = sorted(name for name, value in params.items() if name not in PARAMETERS and value is not None)
    if unknown:
        return f"lax's convolution has parameters that jaxconv does not know: {', '.join(unknown)}"
    if conv_integer.is_integer(lhs.dtype):
        return _integers(lhs, rhs, out, params)
    if conv_float8.is_float8(lhs, rhs):
        return _float8(lhs, rhs, out, params)
    avals = {"lhs": lhs, "rhs": rhs, "out": out}
    dtypes = [a.dtype.name for a in avals.values()]
    if len(set(dtypes)) > 1 or dtypes[0] not in DTYPES:
        return f"its types are {dtypes[0]} and {dtypes[1]} to {dtypes[2]}, expected one type: {', '.join(DTYPES)}"
    if not all(isinstance(extent, int) for a in avals.values() for extent in a.shape):
        return "an extent is symbolic"
    nd = lhs.ndim - 2
    if nd not in (1, 2, 3):
        return f"it has {nd} spatial dimensions: jaxconv has 1, 2 and 3"
    if any(0 in a.shape for a in avals.values()):
        return "an array is empty"
    if why := conv_integer.missing_numbers(nd, params):
        return why
    precision = _precision(params["precision"])
    if precision is None:
        return f"jaxconv has no precision={params['precision']!r}"
    numbers = params["dimension_numbers"]
    specs = dict(zip(("lhs", "rhs", "out"), map(tuple, numbers), strict=True))
    strides = {"lhs": params["lhs_dilation"], "rhs": params["rhs_dilation"], "out": params["window_strides"]}

    fitting = []
    for reading in READINGS:
        channels_last = _channels_last(reading, specs)
        if channels_last is not None:
            fitting.append((reading, channels_last))
    if not fitting:
        orders = ", ".join(_order(name, spec) for name, spec in specs.items())
        return f"its arrays are neither channels last nor channels first ({orders})"
    possible = [(r, last) for r, last in fitting if all(s == 1 for s in strides[r.x])]
    if not possible:
        return "it has both window strides and a dilation of its left side"
    swap = len(possible) > 1 and possible[0][0].w == "rhs" and _transposed_filter(specs["rhs"])
    reading, channels_last = possible[1 if swap else 0]
    return _form(reading, channels_last, avals, specs, strides, params, precision)


def _integers(lhs: Any, rhs: Any, out: Any, params: Mapping[str, Any]) -> Form | str:
    """Of integers there is one form, in lax's own parameters."""
    problem = conv_integer.read(lhs, rhs, out, params)
    if isinstance(problem, str):
        return problem

    def result(y: Array) -> Array:
        """As lax's type says it is split."""
        y = conv_integer.back(y, out.dtype)
        return y if sharding.explicit_mesh([out]) is None else jax.sharding.reshard(y, out.sharding)

    return Form(
        "integers",
        conv_integer.kernel,
        problem,
        {
            "lhs": lambda a: conv_integer.into(a, problem.lhs_dtype),
            "rhs": lambda a: conv_integer.into(a, problem.rhs_dtype),
        },
        result,
    )


def _float8(lhs: Any, rhs: Any, out: Any, params: Mapping[str, Any]) -> Form | str:
    """Of float8 there is one form, forward: what lax makes of a cotangent is a convolution of the cotangent's type."""
    sums = conv_float8.read(lhs, rhs, out, params)
    if isinstance(sums, str):
        return sums
    return Form("float8", conv_float8.kernel, sums.problem, sums.operands(), sums.result)


def _precision(value: Any) -> Precision | None:
    """None in a traced convolution is the default: jax_default_matmul_precision was looked up when it was traced."""
    if value is None:
        return lax.Precision.DEFAULT, lax.Precision.DEFAULT
    pair = value if isinstance(value, (tuple, list)) else (value, value)
    return tuple(pair) if len(pair) == 2 and all(isinstance(p, lax.Precision) for p in pair) else None


def _order(name: str, spec: Sequence[int]) -> str:
    """Dimension numbers as people write them: NHWC, HWIO."""
    letters = dict(zip(spec[2:], "DHW"[5 - len(spec) :], strict=True))
    letters |= dict(zip(spec[:2], "OI" if name == "rhs" else "NC", strict=True))
    return "".join(letters[axis] for axis in range(len(spec)))


def _spatial(reading: Reading, specs: Mapping[str, Sequence[int]]) -> list[int]:
    """lax's spatial dimensions in the order in which x has them."""
    axes = specs[reading.x][2:]
    return sorted(range(len(axes)), key=axes.__getitem__)


def _axis(array: str, letter: str, specs: Mapping[str, Sequence[int]]) -> int:
    return specs[array][AXES[array].index(letter)]


def _channels_last(reading: Reading, specs: Mapping[str, Sequence[int]]) -> bool | None:
    """Whether x and y both lie channels last (True) or both channels first (False) in the reading; None: neither."""
    found = set()
    for array, channels in ((reading.x, reading.letter("x", "w")), (reading.y, reading.letter("y", "w"))):
        n, c = _axis(array, reading.letter("x", "y"), specs), _axis(array, channels, specs)
        order = (n, c, *(specs[array][2 + i] for i in _spatial(reading, specs)))
        last = (0, len(order) - 1, *range(1, len(order) - 1))
        found.add(True if order == last else False if order == tuple(range(len(order))) else None)
    return found.pop() if len(found) == 1 else None


def _transposed_filter(spec: Sequence[int]) -> bool:
    """Whether a filter's channels are in the order that lax's gradients of images make of HWIO, OIHW and OHWI.

    Without strides such a gradient could as well be a forward convolution: the numbers are the same, but its filter,
    which lax has reversed, would have to be reversed in memory.
    """
    out, into, *spatial = spec
    return into > out if min(spatial) < min(out, into) else into < out


def _form(
    reading: Reading,
    channels_last: bool,
    avals: Mapping[str, Any],
    specs: Mapping[str, Sequence[int]],
    strides: Mapping[str, Sequence[int]],
    params: Mapping[str, Any],
    precision: Precision,
) -> Form:
    spatial = _spatial(reading, specs)
    n, c, k = (reading.letter(*pair) for pair in ("xy", "xw", "yw"))
    batch_groups = params["batch_group_count"]
    groups = params["feature_group_count"] * batch_groups  # one of them is 1
    of_lax = BATCH_GROUPS if batch_groups > 1 else FEATURE_GROUPS
    of_ours = {reading.x: c, reading.y: k, reading.w: k}

    def extents(array: str) -> tuple[int, ...]:
        return tuple(avals[array].shape[specs[array][2 + i]] for i in spatial)

    def along(values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(values[i] for i in spatial)

    def total(array: str, letter: str) -> int:
        """The extent of `letter` in our array."""
        extent = avals[array].shape[_axis(array, letter, specs)]
        return extent // (groups if of_lax[array] == letter else 1) * (groups if of_ours[array] == letter else 1)

    x, y, w = extents(reading.x), extents(reading.y), extents(reading.w)
    stride, dilation, given = along(strides[reading.y]), along(strides[reading.w]), along(params["padding"])
    back = reading.backwards
    if back is None:
        lows = [int(low) for low, _ in given]
    else:
        lows = [
            (e - 1) * s - int(low) for e, s, (low, _) in zip(extents(back), along(strides[back]), given, strict=True)
        ]
    padding = []
    for size, out, f, s, d, low, (_, high) in zip(x, y, w, stride, dilation, lows, given, strict=True):
        if reading.form != "fprop" or back is not None:
            # `least` to `least` + s - 1 mean the same. Of them what the layer probably had: as many as below.
            least = (out - 1) * s + (f - 1) * d + 1 - size - low
            high = min(max(low, least), least + s - 1)
        padding.append((low, int(high)))
    problem = ConvProblem(
        name="conv_general_dilated",
        dtype=avals["lhs"].dtype.name,
        batch=total(reading.x, n),
        in_channels=total(reading.x, c),
        out_channels=total(reading.y, k),
        groups=groups,
        in_spatial=x,
        filter=w,
        out_spatial=y,
        stride=stride,
        padding=tuple(padding),
        dilation=dilation,
        channels_last=channels_last,
        precision=precision,
    )

    def conversion(array: str) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
        """(lax's array -> ours, ours -> lax's)."""
        spec = specs[array]
        reverse = tuple(sorted(spec[2:])) if array == back and any(e > 1 for e in extents(array)) else ()
        source, target = (_axis(array, of[array], specs) for of in (of_lax, of_ours))
        first, second = (c, k) if array == reading.w else (n, of_ours[array])  # as (taps, C, K), (N, taps, C) have them
        first, second = _axis(array, first, specs), _axis(array, second, specs)
        axes = [spec[2 + i] for i in spatial]
        if array == reading.w:
            order = (*axes, first, second) if channels_last else (second, first, *axes)
        else:
            order = (first, *axes, second) if channels_last else (first, second, *axes)

        def ours(a: Array) -> Array:
            a = lax.rev(a, reverse) if reverse else a
            return jnp.transpose(_move_groups(a, groups, source, target), order)

        def laxes(a: Array) -> Array:
            a = jnp.transpose(a, [order.index(axis) for axis in range(len(order))])
            a = _move_groups(a, groups, target, source)
            return lax.rev(a, reverse) if reverse else a

        return ours, laxes

    given_arrays = {"fprop": (reading.x, reading.w), "dgrad": (reading.y, reading.w), "wgrad": (reading.x, reading.y)}
    return Form(
        reading.form,
        reading.kernel,
        problem,
        {array: conversion(array)[0] for array in given_arrays[reading.form]},
        conversion("out")[1],
    )


def _move_groups(a: Array, groups: int, source: int, target: int) -> Array:
    """Axis `source` is (groups, rest); makes it (rest) and axis `target` (groups, what it was)."""
    if groups == 1 or source == target:
        return a
    shape = list(a.shape)
    shape[source : source + 1] = [groups, shape[source] // groups]
    target += target > source
    order = [axis for axis in range(len(shape)) if axis != source]
    at = order.index(target)
    order.insert(at, source)
    a = jnp.transpose(a.reshape(shape), order)
    return a.reshape(*a.shape[:at], -1, *a.shape[at + 2 :])

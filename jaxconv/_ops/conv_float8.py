"""Convolutions of float8, as lax writes them: the sums of conv_scaled's kernel, and lax's convolution everywhere else.

XLA computes most of them in float32 on an NVIDIA GPU. `enable` and `conv_general_dilated` bind this kernel. Its
derivative is lax's.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad

# Held, because a program may put ours in its place.
from jax.lax import conv_general_dilated

from jaxconv._core import primitives, sharding
from jaxconv._ops import conv_integer, conv_scaled
from jaxconv._problem import FLOAT8, IntegerConvProblem, ScaledConvProblem, is_number, sums_of_integers

Array = jax.Array

# A result of float8 is saturated by the kernel, and is NaN, or an infinity of e5m2, where lax rounds beyond the range.
RESULTS = ("float32", "bfloat16", "float16")


def _by_lax(p: ScaledConvProblem, x: Array, w: Array) -> list[Array]:
    return [
        conv_general_dilated(
            x,
            w,
            window_strides=p.stride,
            padding=p.padding,
            rhs_dilation=p.dilation,
            dimension_numbers=p.dimension_numbers,
            feature_group_count=p.groups,
            precision=p.precision,
            preferred_element_type=p.out_dtype,
        )
    ]


# conv_scaled's call, where its plan names a kernel. What conv_scaled means is a convolution of operands that were
# converted to float32; this is lax's own.
kernel = primitives.kernel(
    conv_scaled.kernel.name,
    f"{conv_scaled.kernel.operand_roles} -> {conv_scaled.kernel.result_roles}",
    conv_scaled.kernel.family,
    reference=_by_lax,
    flops=conv_scaled.kernel.flops,
    version=conv_scaled.kernel.version,
)


def _jvp(primals: Sequence[Array], tangents: Sequence[Any], *, problem: ScaledConvProblem) -> Any:
    """Tangents are lax's convolutions: so derivatives of every order and mode are those that lax gives."""
    (x, w), (tx, tw) = primals, tangents
    parts = [] if type(tx) is ad.Zero else _by_lax(problem, tx, w)
    parts += [] if type(tw) is ad.Zero else _by_lax(problem, x, tw)
    return kernel(problem, x, w), sum(parts[1:], parts[0])


primitives.by_reference(kernel)  # its transpose is lax's
ad.primitive_jvps[kernel.primitive] = _jvp


# ----------------------------------------------------------------------------------------------------------------------
# lax's parameters


@dataclasses.dataclass(frozen=True)
class Sums:
    """lax's convolution as the kernel's problem, and the axes of arrays in the order that the other side has."""

    problem: ScaledConvProblem
    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    out: tuple[int, ...]

    def operands(self) -> dict[str, Callable[[Array], Array]]:
        """lax's operands as the kernel's."""
        return {name: functools.partial(jnp.transpose, axes=getattr(self, name)) for name in ("lhs", "rhs")}

    def result(self, y: Array) -> Array:
        """The kernel's result as lax's."""
        return jnp.transpose(y, self.out)


def is_float8(lhs: Any, rhs: Any) -> bool:
    return lhs.dtype.name in FLOAT8 and rhs.dtype.name in FLOAT8


def read(lhs: Any, rhs: Any, out: Any, params: Mapping[str, Any]) -> Sums | str:
    """lax's convolution of float8 arrays of these types, or a sentence that says why the kernel has none like it."""
    if out.dtype.name not in RESULTS:
        return f"its result is {out.dtype.name}, expected one of {', '.join(RESULTS)} of float8 operands"
    if not all(is_number(extent) for a in (lhs, rhs, out) for extent in a.shape):
        return "an extent is symbolic"
    nd = lhs.ndim - 2
    if nd not in (1, 2, 3):
        return f"it has {nd} spatial dimensions: jaxconv has 1, 2 and 3"
    if any(0 in a.shape for a in (lhs, rhs, out)):
        return "an array is empty"
    if why := conv_integer.missing_numbers(nd, params):
        return why
    if not is_default(params["precision"]):
        return f"precision={params['precision']!r}: the tensor cores' sums of float8 have fewer bits than float32"
    # The window, and what has none, are those of 8-bit integers.
    sums = sums_of_integers(IntegerConvProblem.of_lax(("int8", "int8", "int32"), lhs.shape, rhs.shape, params))
    if isinstance(sums, str):
        return sums
    given = dataclasses.replace(sums, dtype=lhs.dtype.name, w_dtype=rhs.dtype.name, out_dtype=out.dtype.name)
    (n, c, *image), (k, into, *taps), of_out = (tuple(spec) for spec in params["dimension_numbers"])
    if (n, c, *image) == of_out == tuple(range(nd + 2)):  # the kernel's call asks XLA for channels last in memory
        return Sums(dataclasses.replace(given, channels_last=False), of_out, (k, into, *taps), of_out)
    order = dict(zip(of_out, (0, nd + 1, *range(1, nd + 1)), strict=True))
    return Sums(given, (n, *image, c), (*taps, into, k), tuple(order[axis] for axis in range(nd + 2)))


def is_default(precision: Any) -> bool:
    """None in a traced convolution is the default: jax_default_matmul_precision was looked up when it was traced."""
    pair = precision if isinstance(precision, (tuple, list)) else (precision,)
    return all(one in (None, lax.Precision.DEFAULT) for one in pair)


def of_call(call: Callable[[Array, Array], Array], lhs: Array, rhs: Array) -> Array:
    """lax's convolution `call` of float8, by the kernel where it has one like it."""
    found = [e for e in jax.make_jaxpr(call)(lhs, rhs).eqns if e.primitive is lax.conv_general_dilated_p]
    # Where types say how arrays are split, our call may gather what lax's leaves where it is. `enable` looks.
    if len(found) != 1 or sharding.explicit_mesh([v.aval for v in found[0].invars]) is not None:
        return call(lhs, rhs)
    sums = read(*(v.aval for v in (*found[0].invars, *found[0].outvars)), found[0].params)
    if isinstance(sums, str):
        return call(lhs, rhs)
    x, w = (into(a) for into, a in zip(sums.operands().values(), (lhs, rhs), strict=True))
    return sums.result(kernel(sums.problem, x, w))

"""Layer-norms: (x - mean) / sqrt(var + epsilon) with the statistics of each row, over the last axis, and the scale and
bias that follow.

Activations behind it stay where they are: XLA computes them with what comes next.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp

from jaxconv._core.graph import Value, averages, bare, channels_of, number_of, operands_of, unconverted
from jaxconv.accelerate.groupnorm import GroupNormalised, affine, numbers_along
from jaxconv.accelerate.norms import squared


def find_layer_normalised(v: Value) -> GroupNormalised | None:
    if not jnp.issubdtype(v.dtype, jnp.floating) or len(v.shape) < 2 or 0 in v.shape or v.shape[-1] == 1:
        return None
    result, path = v, [v]
    v, bias, scales = affine(v, path, lambda numbers: _deviation(numbers, result.shape, False) is not None)
    deviation = None
    for name in ("mul", "div"):
        for rest, other in operands_of(v, name):
            deviation = _deviation(other, v.shape, name == "div") if rest.shape == v.shape else None
            if deviation is not None:
                v = rest
                path.append(rest)
                break
        if deviation is not None:
            break
    if deviation is None or v.made_by != "sub":
        return None
    var, epsilon, more = deviation
    x, other = v.node.inputs
    mean = numbers_along(other, v.shape, _rows(v.shape)) if x.shape == v.shape else None
    x0 = unconverted(x)
    if mean is None or not _is_mean(mean, lambda u: unconverted(u) is x0) or not _is_variance(var, x0):
        return None
    return GroupNormalised(result, x, None, epsilon, scales + more, bias, [bare(mean), bare(var)], path)


def _rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The axes that statistics have."""
    return tuple(range(len(shape) - 1))


def _deviation(v: Value, shape: tuple[int, ...], divides: bool) -> tuple[Value, float, list[Value]] | None:
    """(var, epsilon, scales) where v, beside an array of `shape`, is scales / sqrt(var + epsilon), var of each row.

    With `divides` where it is sqrt(var + epsilon).
    """
    for left, right in operands_of(v, "mul") if not divides else ():
        row = channels_of(right, shape)
        found = _deviation(left, shape, False) if row is not None and row[1] == len(shape) - 1 else None
        if found is not None:
            return found[0], found[1], [*found[2], row[0]]
    numbers = numbers_along(v, shape, _rows(shape))
    v = v if numbers is None else bare(numbers)
    if numbers is None or v.made_by != ("sqrt" if divides else "rsqrt"):
        return None
    for var, epsilon in operands_of(v.node.inputs[0], "add"):
        number = number_of(epsilon)
        if number is not None and 0 <= number < float("inf"):
            return var, number, []
    return None


def _is_mean(v: Value, accept: Callable[[Value], bool]) -> bool:
    """Whether v is the mean of each row of something that `accept` accepts."""
    v = bare(v)
    for total, count in operands_of(v, v.made_by) if v.made_by in ("div", "mul") else ():
        number, total = number_of(count), bare(total)
        if not number or total.made_by != "reduce_sum":
            continue
        u = total.node.inputs[0]
        last = tuple(total.node.params["axes"]) == (len(u.shape) - 1,)
        if last and averages(v, number, u.shape[-1:]):
            return accept(u)
    return False


def _is_variance(v: Value, x: Value) -> bool:
    """Whether v is the biased variance of each row of x, in any of the usual ways."""

    def is_x(u: Value | None) -> bool:
        return u is not None and unconverted(u) is x

    def is_mean(u: Value | None) -> bool:
        return u is not None and _is_mean(u, is_x)

    def is_centred_square(u: Value) -> bool:
        centred = squared(u)
        if centred is None or centred.made_by != "sub" or not is_x(centred.node.inputs[0]):
            return False
        return is_mean(numbers_along(centred.node.inputs[1], centred.shape, _rows(centred.shape)))

    v = bare(v)
    for low, rest in operands_of(v, "max"):
        if number_of(low) == 0:
            v = bare(rest)
            break
    for second_moment, square in operands_of(v, "sub"):
        return _is_mean(second_moment, lambda u: is_x(squared(u))) and is_mean(squared(bare(square)))
    return _is_mean(v, is_centred_square)

"""Group-norms: (x - mean) / sqrt(var + epsilon) of each image's groups of channels, with the scale, bias and activation
that follow. Channels are last, or first: then the call's arrays are transposed, which is free beside convolutions.

Three ways to write it are recognised: statistics repeated to numbers per image and channel (Flax, channels last); all
of it in the shape (N, ..., G, C/G), or (N, G, ...), from which the result is reshaped; and statistics of each image's
pixels, an instance-norm, of which each channel is a group.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence

import jax.numpy as jnp
import numpy as np

from jaxconv import _plan, _problem
from jaxconv._core.activations import Activation
from jaxconv._core.graph import (
    Array,
    Value,
    averages,
    bare,
    channels_of,
    number_of,
    operands_of,
    unconverted,
)
from jaxconv._ops.groupnorm import groupnorm
from jaxconv._ops.layernorm import layernorm
from jaxconv.accelerate.activations import Activated, Activations
from jaxconv.accelerate.linear import Fused, Refusal
from jaxconv.accelerate.norms import leads_only_to, squared
from jaxconv.accelerate.report import GRADIENT


@dataclasses.dataclass(frozen=True)
class GroupNormalised:
    """result = (x - mean) / sqrt(var + epsilon) * scales [+ bias]; statistics per image and group of channels, or, of a
    layer-norm, per row."""

    result: Value
    x: Value
    groups: int | None  # None: a layer-norm
    epsilon: float
    scales: list[Value]  # per channel
    bias: Value | None
    statistics: list[Value]  # mean and variance
    path: list[Value]  # from the result down, x left out
    axis: int = -1  # of the channels: the last, or 1

    @property
    def channels(self) -> int:
        return self.result.shape[self.axis]

    @property
    def what(self) -> str:
        return "layernorm" if self.groups is None else "groupnorm"


class Last:
    """Where images, groups and channels are with channels last."""

    axis = -1

    def grouped(self, shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
        """Whether `shape` is (N, ..., G, C/G), of whole's (N, ..., C)."""
        return len(shape) >= 3 and shape[0] == whole[0] and shape[-2] * shape[-1] == whole[-1]

    def kept(self, rank: int, alone: bool) -> tuple[int, int]:
        """The axes of images and groups of an array in groups; those of images and channels where these are alone."""
        return 0, rank - (1 if alone else 2)


class First:
    """The same with channels first."""

    axis = 1

    def grouped(self, shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
        """Whether `shape` is (N, G, ...), of whole's (N, C, ...): what is behind G is a group's channels and pixels."""
        numbers = len(shape) >= 3 and _problem.is_number(shape[1]) and _problem.is_number(whole[1])
        return numbers and shape[0] == whole[0] and shape[1] > 0 and whole[1] % shape[1] == 0

    def kept(self, rank: int, alone: bool) -> tuple[int, int]:
        return 0, 1


Order = Last | First


def find_group_normalised(v: Value, order: Order) -> GroupNormalised | None:
    if not jnp.issubdtype(v.dtype, jnp.floating) or len(v.shape) < 2 or 0 in v.shape:
        return None
    result, path, channels = v, [v], v.shape[order.axis]
    # Of one image the deviation is numbers per channel too.
    v, bias, scales = affine(
        v, path, lambda numbers: _deviation(numbers, False, channels, order) is not None, order.axis
    )
    grouped = _reshaped(v) and order.grouped(v.node.inputs[0].shape, result.shape)
    if grouped:
        v = _inside(v, path)
    kept = order.kept(len(v.shape), not grouped)
    deviation = None
    for name in ("mul", "div"):
        for rest, other in operands_of(v, name):
            numbers = numbers_along(other, v.shape, kept) if rest.shape == v.shape else None
            found = None if numbers is None else _deviation(numbers, name == "div", channels, order)
            if found is not None:
                deviation, v = found, rest
                path.append(rest)
                break
        if deviation is not None:
            break
    if deviation is None or v.made_by != "sub":
        return None
    x, other = v.node.inputs
    mean = numbers_along(other, v.shape, kept) if x.shape == v.shape else None
    if mean is None:
        return None
    if grouped:
        inner = unconverted(x)
        if not _reshaped(inner) or inner.node.inputs[0].shape != result.shape:
            return None
        path.append(x)
        x = inner.node.inputs[0]
    var, epsilon, more = deviation
    mean = _unrepeated(mean, grouped)
    groups = _mean_of(mean, lambda u, alone: _groups_of(u, unconverted(x), alone, order), order)
    if groups is None or _variance_of(_unrepeated(var, grouped), unconverted(x), mean, order) != groups:
        return None
    return GroupNormalised(result, x, groups, epsilon, scales + more, bias, [mean, bare(var)], path, order.axis)


def affine(
    v: Value, path: list[Value], deviates: Callable[[Value], bool], axis: int = -1
) -> tuple[Value, Value | None, list[Value]]:
    """(z, bias, scales): the result as z * scales + bias, per channel of the axis. `deviates`: is no scale."""
    bias, scales, axis = None, [], axis % len(v.shape)
    for rest, other in operands_of(v, "add"):
        found = channels_of(other, v.shape)
        if found is not None and found[1] == axis and rest.shape == v.shape:
            v, bias = rest, found[0]
            path.append(v)
            break
    while True:
        for rest, other in operands_of(v, "mul"):
            found = channels_of(other, v.shape)
            of_channels = found is not None and found[1] == axis and rest.shape == v.shape
            if of_channels and not deviates(found[0]):
                v = rest
                scales.append(found[0])
                path.append(v)
                break
        else:
            return v, bias, scales


def _reshaped(v: Value) -> bool:
    """Whether it is another array in a row, in the same order."""
    return v.made_by == "reshape" and v.node.params["dimensions"] is None


def _inside(v: Value, path: list[Value]) -> Value:
    """What the result was reshaped, and perhaps narrowed, from."""
    v = v.node.inputs[0]
    path.append(v)
    return v


def numbers_along(v: Value, shape: tuple[int, ...], kept: tuple[int, ...]) -> Value | None:
    """What v, beside an array of `shape`, varies by, where that is along all of `kept` and nothing else."""
    if v.shape == shape and v.made_by == "broadcast_in_dim":
        source = v.node.inputs[0]
        axes = [a for i, a in enumerate(v.node.params["broadcast_dimensions"]) if source.shape[i] != 1]
        return source if axes == [a for a in kept if shape[a] != 1] else None
    if len(v.shape) == len(shape) and all(extent == (shape[a] if a in kept else 1) for a, extent in enumerate(v.shape)):
        return v
    return None


def _deviation(v: Value, divides: bool, channels: int, order: Order) -> tuple[Value, float, list[Value]] | None:
    """(var, epsilon, scales) where v is scales / sqrt(var + epsilon); with `divides` sqrt(var + epsilon)."""
    v = bare(v)
    for left, right in operands_of(v, "mul") if not divides else ():
        found = _deviation(left, False, channels, order)
        row = channels_of(right, v.shape)
        if found is not None and row is not None and row[1] == order.axis % len(v.shape):
            return (found[0], found[1], [*found[2], row[0]]) if v.shape[row[1]] == channels else None
    if v.made_by != ("sqrt" if divides else "rsqrt"):
        return None
    for var, epsilon in operands_of(v.node.inputs[0], "add"):
        number = number_of(epsilon)
        if number is not None and 0 <= number < math.inf:
            return var, number, []
    return None


def _unrepeated(v: Value, grouped: bool) -> Value:
    """The numbers per image and group that v, numbers per image and channel, is a repetition of."""
    v = bare(v)
    if grouped or v.made_by != "broadcast_in_dim" or len(v.shape) != 3:
        return v
    source, axes = v.node.inputs[0], tuple(v.node.params["broadcast_dimensions"])
    same = source.shape[:2] == v.shape[:2] and axes in ((0, 1), (0, 1, 2)) and math.prod(source.shape[2:]) == 1
    return bare(source) if same else v


def _mean_of(v: Value, accept: Callable[[Value, bool], int | None], order: Order) -> int | None:
    """The groups of u where v is the mean of u over all but images and groups; `accept` gives them, of u and of whether
    channels are alone in their groups, so that u has no axis of groups."""
    v = bare(v)
    if v.made_by not in ("div", "mul"):
        return None
    for total, count in operands_of(v, v.made_by):
        number, total = number_of(count), bare(total)
        if not number or total.made_by != "reduce_sum":
            continue
        u = total.node.inputs[0]
        rank = len(u.shape)
        axes = tuple(sorted(total.node.params["axes"]))
        if rank < 3 or not averages(v, number, [u.shape[axis] for axis in axes]):
            continue
        for alone in (True, False):
            summed = set(range(rank)) - set(order.kept(rank, alone))
            if axes == tuple(sorted(summed)) and (groups := accept(u, alone)) is not None:
                return groups
    return None


def _groups_of(u: Value | None, x: Value, alone: bool, order: Order) -> int | None:
    """The groups where u is x in groups; its channels where they are alone, and u is x."""
    u = None if u is None else unconverted(u)
    if alone:
        return x.shape[order.axis] if u is x else None
    if u is None or not _reshaped(u) or unconverted(u.node.inputs[0]) is not x:
        return None
    return u.shape[order.kept(len(u.shape), False)[1]] if order.grouped(u.shape, x.shape) else None


def _variance_of(v: Value, x: Value, mean: Value, order: Order) -> int | None:
    """The groups where v is the biased variance of x in groups, whose mean is `mean`, in any of the usual ways."""

    def is_mean(u: Value | None) -> bool:
        return u is not None and bare(u) is mean

    def centred_square(u: Value, alone: bool) -> int | None:
        centred = squared(u)
        if centred is None or centred.made_by != "sub":
            return None
        numbers = numbers_along(centred.node.inputs[1], centred.shape, order.kept(len(centred.shape), alone))
        return _groups_of(centred.node.inputs[0], x, alone, order) if is_mean(numbers) else None

    v = bare(v)
    for low, rest in operands_of(v, "max"):
        if number_of(low) == 0:
            v = bare(rest)
            break
    for second_moment, square in operands_of(v, "sub"):
        groups = _mean_of(second_moment, lambda u, alone: _groups_of(squared(u), x, alone, order), order)
        return groups if is_mean(squared(bare(square))) else None
    return _mean_of(v, centred_square, order)


def _left_to_xla(n: GroupNormalised, dtype: np.dtype) -> str | None:
    """Why a norm stays as it was written: on a GPU a layer-norm, or an instance-norm of float32 or with channels first,
    whose plan is XLA. By jaxconv's formula a CycleGAN's step took 1.09 times as long (H100): beside its padding XLA
    keeps x - mean. That the formula is as fast for rows as any that somebody else wrote was not measured; statistics
    over the last axes alone may be a layer-norm's over several, which no transposed array helps."""
    device = _plan.Device.default()
    if device.platform != "cuda":
        return None
    shape = (*n.result.shape[:1], *n.result.shape[2:], n.channels) if n.axis == 1 else n.result.shape
    rows = n.groups is None
    problem = _problem.GroupNormProblem(n.what, dtype.name, shape, n.groups or 1, n.epsilon, rows=rows)
    plan = _plan.plan("groupnorm", problem, device)
    return None if plan.implementation == "native" else f"the GPU's plan is XLA: {plan.reason}"


def find_groupnorm(n: GroupNormalised, activations: Activations) -> Iterator[Fused]:
    """The replacements, those that take in most first; a layer-norm takes in no activation."""
    if not all(leads_only_to(v, [n.result]) for v in n.statistics):
        raise Refusal(f"something else needs its mean or variance, perhaps a gradient {GRADIENT}")
    x0, y, channels = unconverted(n.x), n.result, n.channels
    if len(y.users) == 1 and y.users[0] is not None and y.users[0].name == "convert_element_type":
        narrowed = y.users[0].outputs[0]
        y = narrowed if jnp.issubdtype(narrowed.dtype, jnp.floating) else y
    # Computed in x's dtype where the result has it; else in that in which the function does.
    dtype = x0.dtype if y.dtype == x0.dtype else n.result.dtype
    if {dtype.name, y.dtype.name} - set(_problem.DTYPES):
        raise Refusal(f"its types are {x0.dtype} -> {y.dtype}")
    alone = n.groups == channels and (dtype == jnp.float32 or n.axis == 1)
    kept = n.groups is None or alone
    if kept and (why := _left_to_xla(n, dtype)):
        raise Refusal(why)
    params = jnp.float64 if dtype == jnp.float64 else jnp.float32
    x = x0 if _problem.promoted(x0.dtype, dtype) == dtype else n.x

    def made(out: Value, activated: Activated | None) -> Fused:
        activation = activated.activation if activated else Activation()

        def call(x: Array, *rest: Array) -> Sequence[Array]:
            rows = [a.reshape(channels).astype(params) for a in rest]
            bias = rows.pop() if n.bias is not None else None
            scale = functools.reduce(jnp.multiply, rows) if rows else None
            norm = layernorm if n.groups is None else functools.partial(groupnorm, groups=n.groups)
            x = jnp.moveaxis(x.astype(dtype), n.axis, -1)
            y = norm(x, scale, bias, epsilon=n.epsilon, activation=activation)
            return [jnp.moveaxis(y, -1, n.axis).astype(out.dtype)]

        inputs = [x, *n.scales, *([n.bias] if n.bias is not None else [])]
        nodes = [n.result.node, *(activated.nodes if activated else [])]
        parts = [n.what, *([str(activation)] if activated else [])]
        return Fused(nodes, inputs, [out], call, parts)

    activated = None if n.groups is None else activations.after(y)
    if activated is not None and activated.hides(y):
        yield made(activated.y, activated)
    yield made(y, None)

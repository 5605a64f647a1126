"""Max-pooling: lax's reduce_window of maxima, and its gradient where the function takes one itself."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jax import lax

from jaxconv import _problem
from jaxconv._core.graph import Array, Node
from jaxconv._flax.fused import pads_are_numbers
from jaxconv._ops import pool
from jaxconv.accelerate.linear import Fused, Refusal

NAMES = ("reduce_window_max", "select_and_scatter_add")


def find_pool(node: Node) -> Fused:
    gradient = node.name == "select_and_scatter_add"
    y, x = (node.inputs[0], node.inputs[1]) if gradient else (node.outputs[0], node.inputs[0])
    axes = _axes(node, x.shape)
    p = node.params

    def at(values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(values[axis] for axis in axes)

    if gradient and p["select_prim"] is not lax.ge_p:
        raise Refusal("it is not a maximum's gradient")
    if any(step != 1 for step in p.get("base_dilation", ())):
        raise Refusal("its elements are spread by base_dilation")
    if x.dtype.name not in _problem.DTYPES:
        raise Refusal(f"its type is {x.dtype}")
    lead = axes[0] - (not _last(axes, x.shape))  # axes in front, all of them images
    shape = (math.prod(x.shape[:lead]), *x.shape[lead:])
    problem = _problem.PoolProblem(
        name="max_pool",
        dtype=x.dtype.name,
        batch=shape[0],
        channels=x.shape[-1 if _last(axes, x.shape) else axes[0] - 1],
        in_spatial=at(x.shape),
        window=at(p["window_dimensions"]),
        out_spatial=at(y.shape),
        stride=at(p["window_strides"]),
        padding=at(p["padding"]),
        dilation=at(p.get("window_dilation", (1,) * len(x.shape))),
        channels_last=_last(axes, x.shape),
    )
    if not pads_are_numbers(problem.padding):
        raise Refusal("its pads are symbolic")
    if any(pad < 0 for pad in sum(problem.padding, ())):
        raise Refusal("its padding is negative")
    reason = problem.lax_only()
    if reason:
        raise Refusal(reason)
    saving = dataclasses.replace(problem, save=True)
    # Where the function takes the gradient itself, both calls are of the same kernel, which then runs once.
    shared = not gradient and any(_is_gradient_of(user, node) for user in x.users)

    def forward(x: Array) -> Sequence[Array]:
        y, *_ = pool.kernel(saving if shared else problem, x.reshape(problem.x_shape))
        return [y.reshape(node.outputs[0].shape)]

    def backward(dy: Array, x: Array) -> Sequence[Array]:
        x = x.reshape(problem.x_shape)
        _, position = pool.kernel(saving, x)
        dx = pool.backward(saving, x, position, dy.reshape(problem.y_shape))
        return [dx.reshape(node.outputs[0].shape)]

    part = "max_pool's gradient" if gradient else "max_pool"
    return Fused([node], node.inputs, node.outputs, backward if gradient else forward, [part])


def _axes(node: Node, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The spatial axes: neighbours, behind the images and in front of the channels or behind them."""
    p, rank = node.params, len(shape)
    values = zip(p["window_dimensions"], p["window_strides"], p["padding"], strict=True)
    moved = [axis for axis, (size, step, pad) in enumerate(values) if (size, step, tuple(pad)) != (1, 1, (0, 0))]
    if not moved:
        raise Refusal("its window has one element")
    first, last = moved[0], moved[-1]
    if last == rank - 1:  # the channels are in front
        if first < 2:
            raise Refusal("its window spans the channels too")
        axes = tuple(range(2 if rank <= 5 else first, rank))
    else:
        # All but the images and the channels, at most three.
        axes = tuple(range(max(min(first, 1), rank - 4), rank - 1))
    if len(axes) > 3 or axes[0] > first or axes[0] == 0:
        raise Refusal("jaxconv has windows of 1 to 3 dimensions")
    return axes


def _last(axes: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return axes[-1] == len(shape) - 2


def _is_gradient_of(user: Node | None, node: Node) -> bool:
    if user is None or user.name != "select_and_scatter_add" or user.inputs[1] is not node.inputs[0]:
        return False
    return all(user.params[name] == node.params[name] for name in ("window_dimensions", "window_strides", "padding"))

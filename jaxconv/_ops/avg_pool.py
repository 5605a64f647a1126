"""Average-pooling: the public function, its kernels and its differentiation rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jaxconv import _problem
from jaxconv._core import halo, primitives, sharding
from jaxconv._core.types import Array, Implementation, Layout, Operand, Padding, PerDimension, PoolAlgorithm
from jaxconv._ops import pool, reference
from jaxconv._problem import AvgPoolProblem


def _partition(p: AvgPoolProblem, operands: Sequence[str], results: Sequence[str], run: Any) -> sharding.Partition:
    """As a max-pooling's. A shard of pixels has no padding of its own: where it is not counted, they stay together."""
    made = pool.FAMILY.partition(p, operands, results, run)
    if p.count_include_pad:
        return made
    return dataclasses.replace(made, split=["n", "c"], run=None, uneven=(), neighbours=(), always=False)


def _shard(p: AvgPoolProblem, split: sharding.Split, x: Array) -> list[Array]:
    return [kernel(*halo.exchange_windows(p, halo.pixels(p, split), x, 0.0))]


def _backward_shard(p: AvgPoolProblem, split: sharding.Split, dy: Array) -> list[Array]:
    pixels = halo.pixels(p, split)
    dx = backward(halo.of_shard(p, pixels), halo.own_windows(p, pixels, dy))
    like, _ = primitives.match_varying(jnp.zeros(halo.own_x(p, pixels), dy.dtype), dy)
    return [halo.own_dx_of_windows(p, pixels, like, dx)]


FAMILY = dataclasses.replace(pool.FAMILY, partition=_partition)

kernel = primitives.kernel(
    "avg_pool",
    "x -> y",
    FAMILY,
    reference=reference.avg_pool,
    flops=pool.flops,
    also="count_include_pad",
    run=_shard,
)
backward = primitives.kernel(
    "avg_pool_backward",
    "dy -> dx",
    FAMILY,
    reference=reference.avg_pool_backward,
    flops=pool.flops,
    also="count_include_pad",
    run=_backward_shard,
)
primitives.linear(kernel, lambda p, ct: backward(p, ct))
primitives.linear(backward, lambda p, ct: kernel(p, ct))


def avg_pool(
    x: Operand,  # (N, H, W, C), or as `layout` says
    window: PerDimension,
    *,
    stride: PerDimension | None = None,
    padding: Padding = "VALID",
    count_include_pad: bool = True,
    layout: Layout | None = None,
    algorithm: PoolAlgorithm | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """The average of each window, in one to three spatial dimensions.

    Equivalent JAX code for the layout NHWC, `pool` being a sum over windows in float32 (float64 for float64)::

        pool = functools.partial(lax.reduce_window, init_value=0.0, computation=lax.add,
                                 window_dimensions=(1, *window, 1), window_strides=(1, *stride, 1), padding=padding)
        y = pool(x) / (math.prod(window) if count_include_pad else pool(jnp.ones_like(x)))

    Example::

        y = jaxconv.avg_pool(jnp.ones((8, 32, 32, 16)), 2, stride=2)  # (8, 16, 16, 16)

    The gradient of a window goes to its elements in equal parts. What several windows send to one element is added up
    in float32 (float64 for float64), in their order.

    Args:
      x: 3 to 5 dimensions; float32, bfloat16, float16 or float64.
      window: extents of the window, an int or one per spatial dimension.
      stride: steps of the window; None is 1, as in Flax.
      padding: "SAME", "SAME_LOWER", "VALID", or pads of at least 0: an int, an int per dimension, or pairs (low, high).
      count_include_pad: False: elements of the padding are not counted. A window of nothing else gives NaN, as in Flax.
      layout: "NHWC" or "NCHW" (NWC, NCW, NDHWC, NCDHW); None is channels last.
      algorithm: forces a native algorithm: "gather".
      implementation: see `conv2d`. By default XLA's reduce_window runs where no kernel was measured to be faster.

    Returns:
      (N, P, Q, C) in x's dtype and layout. (Flax's is float32 where padding is not counted.)

    Raises:
      TypeError, ValueError: when the arguments do not fit together (at trace time), naming the argument, what it got
        and what was expected; ValueError when a forced implementation or algorithm cannot run, with the reason.

    Differentiable to any order, in both modes.
    """
    x = _problem.as_array("avg_pool", "x", x)
    p = AvgPoolProblem.of(
        "avg_pool",
        x,
        window,
        stride=1 if stride is None else stride,
        padding=padding,
        count_include_pad=count_include_pad,
        layout=layout,
        algorithm=algorithm,
        implementation=implementation,
    )
    if p.lax_only():
        return reference.avg_pool(p, x)[0]
    return kernel(p, x)

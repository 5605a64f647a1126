"""Max-pooling: the public function, its kernels and its differentiation rules."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

from jaxconv import _plan, _problem
from jaxconv._core import halo, primitives, sharding
from jaxconv._core.types import Array, Implementation, Layout, Operand, Padding, PerDimension, PoolAlgorithm
from jaxconv._ops import reference
from jaxconv._problem import PoolProblem

replace = dataclasses.replace


def _array(p: PoolProblem, kind: str) -> primitives.Typed:
    return p.x_shape if kind == "x" else p.y_shape, "uint8" if kind == "position" else p.dtype


def _attrs(p: PoolProblem, plan: _plan.Plan) -> dict[str, Any]:
    return {
        "pool": {
            "window": np.array(p.window, np.int64),
            "stride": np.array(p.stride, np.int64),
            "pad_low": np.array([low for low, _ in p.padding], np.int64),
            "pad_high": np.array([high for _, high in p.padding], np.int64),
            "dilation": np.array(p.dilation, np.int64),
            "dims_channels_last": np.int64(p.channels_last),
            "save": np.int64(p.save),
        }
    }


def _layout(p: PoolProblem, plan: _plan.Plan, kind: str) -> primitives.Layout | None:
    return (0, *range(2, p.nd + 2), 1) if plan.asks_channels_last else None


def _batch(op: primitives.Kernel, p: PoolProblem, args: list[Array], dims: list[int | None]) -> primitives.Batched:
    """Mapped arrays fold into N."""
    size = primitives.batch_size(args, dims)
    folded = [primitives.fold(primitives.to_front(a, d, size), 0, 0) for a, d in zip(args, dims, strict=True)]
    outs = primitives.listed(op(replace(p, batch=size * p.batch), *folded))
    return [primitives.unfold(out, size, 0) for out in outs], [0] * len(outs)


def _partition(p: PoolProblem, operands: Sequence[str], results: Sequence[str], run: Any) -> sharding.Partition:
    """Images, pixels and channels may be split."""
    pixels = [halo.name(i) for i in range(p.nd)]
    axes = " ".join(["n", *pixels, "c"] if p.channels_last else ["n", "c", *pixels])
    return sharding.Partition(
        [axes] * len(operands),
        [axes] * len(results),
        ["n", *pixels, "c"],
        # But for the pixels: how many a shard reads, `run` finds out.
        lambda parts: replace(p, batch=p.batch // parts["n"], channels=p.channels // parts["c"]),
        sizes=halo.sizes(p),
        run=run,
        uneven=pixels,
        neighbours=pixels,
        # Where pixels are split XLA's own gradient of overlapping windows was wrong (lax alone, jaxlib 0.10).
        always=True,
    )


def _shard(p: PoolProblem, split: sharding.Split, x: Array) -> list[Array]:
    return kernel(*halo.exchange_windows(p, halo.pixels(p, split), x, -math.inf))


def _backward_shard(p: PoolProblem, split: sharding.Split, x: Array, position: Array, dy: Array) -> list[Array]:
    pixels = halo.pixels(p, split)
    q, read = halo.exchange_windows(p, pixels, x, -math.inf)
    dx = backward(q, read, position, halo.own_windows(p, pixels, dy))
    return [halo.own_dx_of_windows(p, pixels, x, dx)]


def flops(p: PoolProblem) -> int:
    """One a tap, in either direction."""
    return math.prod(p.y_shape) * p.taps


FAMILY = primitives.Family({"x": "x dx", "y": "y dy"}, _array, _attrs, _partition, _layout, _batch)

# A position is a maximum's in its window.
kernel = primitives.kernel(
    "max_pool",
    "x -> y position?",
    FAMILY,
    reference=reference.max_pool,
    flops=flops,
    run=_shard,
)
# Of a problem that saves positions. The kernel reads these, XLA's scatter x: whichever is not read is dropped when a
# whole step is compiled.
backward = primitives.kernel(
    "max_pool_backward",
    "x position dy -> dx",
    FAMILY,
    reference=reference.max_pool_backward,
    flops=flops,
    unread="x",
    run=_backward_shard,
)


def _forward(p: PoolProblem, x: Array) -> tuple[list[Array], Any]:
    y, position = kernel(replace(p, save=True), x)
    return [y], (x, position)


def _backward(
    p: PoolProblem, residuals: Any, cotangents: Sequence[Array | None], want: Sequence[bool]
) -> list[Array | None]:
    return [backward(replace(p, save=True), *residuals, cotangents[0])]


def _tangent(p: PoolProblem, residuals: Any, tangents: Sequence[Array | None]) -> list[Array]:
    """Linear in the tangent of x: the maxima's own."""
    x, position = residuals
    (tx,) = tangents
    if not p.plain:
        return [reference.max_pool_taken(p, tx, position)]
    return [jax.jvp(lambda x: reference.max_pool(p, x)[0], (x,), (tx,))[1]]


primitives.fuse(kernel, primitives.Rules(lambda p: p, _forward, _backward, _tangent))
primitives.by_reference(backward)
_jvp_of_y = ad.primitive_jvps[kernel.primitive]


def _jvp(primals: Sequence[Array], tangents: Sequence[Any], *, problem: PoolProblem) -> Any:
    """Positions are whole numbers: they have no derivative."""
    if not problem.save:
        return _jvp_of_y(primals, tangents, problem=problem)
    y, position = kernel(problem, *primals)
    _, (ty,) = _jvp_of_y(primals, tangents, problem=replace(problem, save=False))
    return [y, position], [ty, ad.Zero(jax.typeof(position).to_tangent_aval())]


ad.primitive_jvps[kernel.primitive] = _jvp


def max_pool(
    x: Operand,  # (N, H, W, C), or as `layout` says
    window: PerDimension,
    *,
    stride: PerDimension = 1,
    padding: Padding = "VALID",
    dilation: PerDimension = 1,
    layout: Layout | None = None,
    algorithm: PoolAlgorithm | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """The maximum of each window, in one to three spatial dimensions.

    Equivalent JAX code for the layout NHWC::

        y = lax.reduce_window(x, -jnp.inf, lax.max, (1, *window, 1), (1, *stride, 1), padding,
                              window_dilation=(1, *dilation, 1))

    Example::

        y = jaxconv.max_pool(jnp.ones((8, 32, 32, 16)), 3, stride=2, padding="SAME")  # (8, 16, 16, 16)

    The gradient of a window goes to one of its elements, the same as lax's: to the maximum, and among equal elements to
    the first, row by row (-0.0 and 0.0 are equal). Padding is -inf. If it comes first in a window that has nothing
    larger, the gradient is lost. A window with a NaN gives NaN. Its gradient goes to the maximum of the elements behind
    its last NaN, or to that NaN if it is the last element. The gradients that several windows send to one element are
    added up in float32 (float64 for float64).

    Args:
      x: 3 to 5 dimensions; float32, bfloat16, float16 or float64.
      window: extents of the window, an int or one per spatial dimension.
      stride: steps of the window.
      padding: "SAME", "SAME_LOWER", "VALID", or pads of at least 0: an int, an int per dimension, or pairs (low, high).
      dilation: steps between a window's taps.
      layout: "NHWC" or "NCHW" (NWC, NCW, NDHWC, NCDHW); None is channels last.
      algorithm: forces a native algorithm: "gather".
      implementation: see `conv2d`. By default kernels run where a gradient is taken, and remember the place of each
        maximum in a byte: on an H200, an H100 and their sisters if channels are whole vectors of 16 bytes, and on a CPU
        for 16 channels and more and windows of at least 4 elements along two axes or more. Elsewhere XLA's
        reduce_window runs.

    Returns:
      (N, P, Q, C) in x's dtype and layout.

    Raises:
      TypeError, ValueError: when the arguments do not fit together (at trace time), naming the argument, what it got
        and what was expected; ValueError when a forced implementation or algorithm cannot run, with the reason. Windows
        of more than 255 taps run on XLA.

    Differentiable to any order, in both modes, also with dilated windows, whose gradient lax does not have.
    """
    x = _problem.as_array("max_pool", "x", x)
    p = PoolProblem.infer(
        "max_pool",
        x,
        window,
        stride=stride,
        padding=padding,
        dilation=dilation,
        layout=layout,
        algorithm=algorithm,
        implementation=implementation,
    )
    if p.lax_only():
        return reference.max_pool(p, x)[0] if p.plain else _dilated_of_lax(p, x)
    return kernel(p, x)[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _dilated_of_lax(p: PoolProblem, x: Array) -> Array:
    return reference.max_pool(p, x)[0]


@_dilated_of_lax.defjvp
def _jvp_of_dilated(p: PoolProblem, primals: Sequence[Array], tangents: Sequence[Array]) -> tuple[Array, Array]:
    (x,), (dx,) = primals, tangents
    y = _dilated_of_lax(p, x)
    if 0 in filter(_problem.is_number, y.shape):
        return y, jnp.zeros_like(y)
    return y, reference.max_pool_taken(p, dx, reference.max_pool_positions(p, x))

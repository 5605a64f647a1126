"""A convolution and the max-pooling of its result in one kernel, with the conversions in front and behind; without a
derivative of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxconv import _plan
from jaxconv._core import primitives, sharding
from jaxconv._core.types import Array
from jaxconv._ops import conv, pool, reference
from jaxconv._problem import PooledConvProblem


def _array(p: PooledConvProblem, kind: str) -> primitives.Typed:
    if kind == "x" and p.x_dtype:
        return p.x_shape, p.x_dtype
    return (p.pool.y_shape, p.y_dtype or p.dtype) if kind == "y" else conv.FUSED.array(p, kind)


def _attrs(p: PooledConvProblem, plan: _plan.Plan) -> dict[str, Any]:
    narrow = {"narrow": {"scale": np.float64(p.y_scale)}}
    return conv.FUSED.attrs(p, plan) | pool.FAMILY.attrs(p.pool, plan) | narrow


def _then_pooled(p: PooledConvProblem, x: Array, w: Array, *b: Array) -> list[Array]:
    """pooled as two, each by a plan of its own, and conversions around them."""
    y = pool.kernel(p.pool, conv.convolution(p.conv, x.astype(p.dtype), w, *b)[0])[0]
    return [reference.stored(y, p.y_scale, p.y_dtype) if p.y_dtype else y]


def _partition(p: PooledConvProblem, operands: Sequence[str], results: Sequence[str]) -> sharding.Partition:
    """Images may be split."""
    axes = conv.partition(p, operands, results, channels="", run=None, always=False)
    return dataclasses.replace(axes, split=["n"], sizes={}, uneven=(), neighbours=())


def _flops(p: PooledConvProblem) -> int:
    return conv.conv_kernel.flops(p.conv) + pool.flops(p.pool)


# y = the max-pooling of f(fprop + b), in 8 bits too, where a kernel makes both; elsewhere a convolution and a pooling
kernel = primitives.kernel(
    "conv_pooled",
    "x w b? -> y",
    dataclasses.replace(conv.FUSED, array=_array, attrs=_attrs, partition=_partition),
    reference=_then_pooled,
    flops=_flops,
)
primitives.by_reference(kernel)

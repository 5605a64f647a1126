"""A convolution and the max-pooling of its result in one kernel; without a derivative of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxconv import _plan
from jaxconv._core import primitives, sharding
from jaxconv._core.types import Array
from jaxconv._ops import conv, pool
from jaxconv._problem import PooledConvProblem


def _array(p: PooledConvProblem, kind: str) -> primitives.Typed:
    return (p.pool.y_shape, p.dtype) if kind == "y" else conv.FUSED.array(p, kind)


def _attrs(p: PooledConvProblem, plan: _plan.Plan) -> dict[str, Any]:
    return conv.FUSED.attrs(p, plan) | pool.FAMILY.attrs(p.pool, plan)


def _then_pooled(p: PooledConvProblem, x: Array, w: Array, *b: Array) -> list[Array]:
    """pooled as two, each by a plan of its own."""
    return [pool.kernel(p.pool, conv.convolution(p.conv, x, w, *b)[0])[0]]


def _partition(p: PooledConvProblem, operands: Sequence[str], results: Sequence[str]) -> sharding.Partition:
    """Images may be split."""
    axes = conv.partition(p, operands, results, channels="", run=None, always=False)
    return dataclasses.replace(axes, split=["n"], sizes={}, uneven=(), neighbours=())


def _flops(p: PooledConvProblem) -> int:
    return conv.conv_kernel.flops(p.conv) + pool.flops(p.pool)


# y = the max-pooling of f(fprop + b), where a kernel makes both; elsewhere a convolution and a pooling
kernel = primitives.kernel(
    "conv_pooled",
    "x w b? -> y",
    dataclasses.replace(conv.FUSED, array=_array, attrs=_attrs, partition=_partition),
    reference=_then_pooled,
    flops=_flops,
)
primitives.by_reference(kernel)

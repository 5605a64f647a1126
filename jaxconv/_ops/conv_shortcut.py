"""A convolution and a shortcut whose sums are added, in one kernel; without a derivative of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxconv import _plan
from jaxconv._core import primitives, sharding
from jaxconv._core.types import Array
from jaxconv._ops import conv
from jaxconv._problem import ShortcutConvProblem


def _array(p: ShortcutConvProblem, kind: str) -> primitives.Typed:
    if kind in ("x2", "w2"):
        return conv.FUSED.array(p.shortcut, kind[0])
    return conv.FUSED.array(p, kind)


def _layout(p: ShortcutConvProblem, plan: _plan.Plan, kind: str) -> primitives.Layout | None:
    return conv.FUSED.layout(p, plan, kind[0] if kind in ("x2", "w2") else kind)


def _attrs(p: ShortcutConvProblem, plan: _plan.Plan) -> dict[str, Any]:
    shortcut = {"shortcut": {"stride": np.array(p.shortcut_stride, np.int64)}}
    return conv.FUSED.attrs(p, plan) | shortcut


def _two(p: ShortcutConvProblem, x: Array, w: Array, *rest: Array) -> list[Array]:
    """Two convolutions, each by a plan of its own. The second one adds the first one's result."""
    *b, x2, w2 = rest
    residual = conv.convolution(p.shortcut, x2, w2)[0]
    return conv.with_residual(p.conv, x, w, *b, residual)[:1]


def _shard(p: ShortcutConvProblem, split: sharding.Split, x: Array, w: Array, *rest: Array) -> list[Array]:
    """Of pixels that are split the neighbours' rows are fetched for each convolution by itself."""
    if set(split) <= {"n", "k"}:
        return primitives.listed(kernel(p, x, w, *rest))
    *b, x2, w2 = rest
    (residual,) = conv.fprop_shard(p.shortcut, split, x2, w2)
    return conv.add_shard(p.conv, split, x, w, *b, residual)[:1]


def _partition(p: ShortcutConvProblem, operands: Sequence[str], results: Sequence[str]) -> sharding.Partition:
    """Images, pixels and output channels may be split."""
    own = [kind for kind in operands if kind not in ("x2", "w2")]
    axes = conv.partition(p, own, results, channels="k", run=_shard)
    others = {"c": "d"} | {f"t{i}": f"u{i}" for i in range(p.nd)}  # input channels and taps are the shortcut's own
    of_shortcut = [" ".join(others.get(name, name) for name in text.split()) for text in axes.operands[:2]]
    return dataclasses.replace(axes, operands=[*axes.operands, *of_shortcut])


def _flops(p: ShortcutConvProblem) -> int:
    return conv.conv_kernel.flops(p.conv) + p.shortcut.flops


# y = f(fprop(x, w) + fprop(x2, w2) + b) where a kernel makes it; elsewhere two convolutions
kernel = primitives.kernel(
    "conv_shortcut",
    "x w b? x2 w2 -> y",
    dataclasses.replace(
        conv.FUSED,
        array=_array,
        attrs=_attrs,
        partition=_partition,
        layout=_layout,
        batch=primitives.by_images("x", "x2"),
    ),
    reference=_two,
    flops=_flops,
)
primitives.by_reference(kernel)

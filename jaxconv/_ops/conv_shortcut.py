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


def _partition(p: ShortcutConvProblem, operands: Sequence[str], results: Sequence[str]) -> sharding.Partition:
    """Images may be split."""
    pixels, out, taps, far, tap = ([f"{letter}{i}" for i in range(p.nd)] for letter in "pqtsu")

    def activations(channels: str, spatial: Sequence[str]) -> str:
        return " ".join(["n", *spatial, channels] if p.channels_last else ["n", channels, *spatial])

    def filters(channels: str, taps: Sequence[str]) -> str:
        return " ".join([*taps, channels, "k"] if p.channels_last else ["k", channels, *taps])

    names = {"x": activations("c", pixels), "w": filters("c", taps), "b": "k", "y": activations("k", out)}
    names |= {"x2": activations("d", far), "w2": filters("d", tap)}
    return sharding.Partition(
        operands=[names[kind] for kind in operands],
        results=[names[kind] for kind in results],
        split=["n"],
        local=lambda parts: dataclasses.replace(p, batch=p.batch // parts["n"]),
        sizes={},
    )


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

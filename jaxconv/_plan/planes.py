"""The first layer of a network over volumes, whose planes become channels: cuda/conv/common/planes.h."""

from __future__ import annotations

import dataclasses
import math

from jaxconv._plan.plan import Device
from jaxconv._problem import ConvProblem

FEW = 8  # of stem's channels


def folded(p: ConvProblem) -> ConvProblem:
    """The planes under a filter as channels, of which there are 4, 8, 16 or 32."""
    if p.nd != 3:
        return p
    channels = next((c for c in (4, FEW, 16) if p.filter[0] * p.in_channels <= c), 32)
    return dataclasses.replace(
        p, in_channels=channels, in_spatial=(p.out_spatial[0], *p.in_spatial[1:]), filter=(1, *p.filter[1:])
    )


def kernel(p: ConvProblem) -> str:
    """The one that folds p's planes."""
    return "stem/planes" if p.filter[0] * p.in_channels <= FEW else "narrow/planes"


def first_of_a_volume(op: str, p: ConvProblem, device: Device) -> str | None:
    """Why `kernel` is taken where nothing was measured near, on Hopper: what was, of the same kind."""
    wgrad, wide = op == "conv_wgrad", p.dtype == "float32"
    if device.compute_capability != (9, 0) or p.full_float32 or p.out_channels < 16:
        return None
    if p.filter != (3, 3, 3) or p.stride != (1, 1, 1) or p.dilation != (1, 1, 1):
        return None
    if p.batch * math.prod(p.out_spatial) < 2**18 or (p.in_channels % 8 == 0 and not wide):  # sm90/halo_3d's
        return None
    if folded(p).in_channels > p.out_channels:  # an array larger than y may be more than there is memory for
        return None
    faster = {(True, True): "1.6 to 16", (True, False): "3.8 to 37", (False, True): "1.9 to 2.9"}
    speed = faster.get((wgrad, wide), "2.9 to 10")
    return f"planes as channels were {speed} times as fast as XLA at 7 problems and more on an H100 and an H200"

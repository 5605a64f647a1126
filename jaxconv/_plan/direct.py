"""Direct convolution, the sum as it is written: cuda/conv/direct."""

from __future__ import annotations

import math
from collections.abc import Iterator

from jaxconv._plan.plan import Device, Plan, splits_of
from jaxconv._problem import ConvProblem


def wants(op: str, p: ConvProblem, device: Device) -> Iterator[Plan]:
    splits = 1
    if op == "conv_wgrad":  # a block owns 4096 elements of dw
        group_c, group_k, taps = p.in_channels // p.groups, p.out_channels // p.groups, math.prod(p.filter)
        columns = min(64, max(8, 1 << (group_k - 1).bit_length()))
        blocks = -(-group_c * taps // (4096 // columns)) * -(-group_k // columns) * p.groups
        pixels = p.batch * math.prod(p.out_spatial)
        splits = splits_of(pixels, blocks, device, 4, 64, p.out_channels * group_c * taps * 4)
    yield Plan("native", "", "direct", splits=splits)

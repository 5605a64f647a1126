"""Direct convolution, the sum as it is written: cuda/conv/direct."""

from __future__ import annotations

import math
from collections.abc import Iterator

from jaxconv._plan.plan import Device, Plan, splits_of
from jaxconv._problem import ConvProblem


def wants(op: str, p: ConvProblem, device: Device) -> Iterator[Plan]:
    splits = 1
    if op == "conv_wgrad":  # enough threads, one an element of dw, and parts of at least 64 pixels
        dw = p.out_channels * (p.in_channels // p.groups) * math.prod(p.filter)
        splits = splits_of(p.batch * math.prod(p.out_spatial), -(-dw // 4096), device, 4, 64, dw * 4)
    yield Plan("native", "", "direct", splits=splits)

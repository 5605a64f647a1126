"""im2col, pack and matrix product: cuda/conv/im2col."""

from __future__ import annotations

import math
from collections.abc import Iterator

from jaxconv._plan.plan import Device, Plan, itemsize, splits_of
from jaxconv._problem import ConvProblem

COLUMNS_BYTES = 256 * 2**20  # of columns held at a time


def wants(op: str, p: ConvProblem, device: Device) -> Iterator[Plan]:
    taps = math.prod(p.filter)
    column = p.in_channels * taps * math.prod(p.out_spatial)  # elements for one image
    chunk = max(1, min(p.batch, COLUMNS_BYTES // max(column * itemsize(p), 1)))
    splits = 1
    if op == "conv_wgrad":
        dw = p.out_channels * (p.in_channels // p.groups) * taps
        splits = min(chunk, splits_of(chunk, -(-dw // 128**2), device, 2, 1, dw * 4))
    yield Plan("native", "", "im2col", splits=splits, chunk=chunk)

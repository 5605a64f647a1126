"""Convolutions of few channels on both sides: cuda/conv/narrow. The kernel wanted, and a weight gradient's parts."""

from __future__ import annotations

import math
from collections.abc import Iterator

from jaxconv._plan.plan import Device, Plan
from jaxconv._problem import ConvProblem

LEAST_ROWS = 4  # of images, several of which share a strip, in a part of a weight gradient


def wants(op: str, p: ConvProblem, device: Device) -> Iterator[Plan]:
    splits = 1
    if op == "conv_wgrad":  # one block fits a multiprocessor
        splits = max(1, min(device.sm_count, p.batch * math.prod(p.out_spatial[:-1]) // LEAST_ROWS))
    yield Plan("native", "", "narrow/rows", splits=splits)

"""Convolutions of few channels on both sides: cuda/conv/narrow. The kernel wanted, and a weight gradient's parts."""

from __future__ import annotations

import math
from collections.abc import Iterator

from jaxconv._plan import planes
from jaxconv._plan.plan import Device, Plan
from jaxconv._problem import ConvProblem

LEAST_ROWS = 4  # of images, several of which share a strip, in a part of a weight gradient


def wants(op: str, p: ConvProblem, device: Device) -> Iterator[Plan]:
    wgrad = op == "conv_wgrad"
    yield Plan("native", "", "narrow/planes", splits=_wgrad_splits(planes.folded(p), device) if wgrad else 1)
    yield Plan("native", "", "narrow/rows", splits=_wgrad_splits(p, device) if wgrad else 1)


def _wgrad_splits(p: ConvProblem, device: Device) -> int:
    """One block fits a multiprocessor."""
    return max(1, min(device.sm_count, p.batch * math.prod(p.out_spatial[:-1]) // LEAST_ROWS))

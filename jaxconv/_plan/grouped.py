"""Grouped convolutions of few channels a group: cuda/conv/grouped. The kernel wanted, and a weight gradient's parts."""

from __future__ import annotations

import math
from collections.abc import Iterator

from jaxconv._plan.plan import Device, Plan, splits_of
from jaxconv._problem import ConvProblem

# The most wanted first. Those of another dtype come before, so that the reason given is never theirs.
KERNELS = ("rows_float32", "rows", "mma")


def spreads(kernel: str, p: ConvProblem) -> bool:
    return kernel != "grouped/rows_float32" and p.in_channels // p.groups % 8 != 0  # tensor cores take eight channels


def wants(op: str, p: ConvProblem, device: Device) -> Iterator[Plan]:
    if op in ("conv_statistics", "conv_add_statistics"):
        yield Plan("native", "", "grouped/statistics")
        return
    for kernel in reversed(KERNELS) if p.dtype == "float32" else KERNELS:
        splits = _wgrad_splits(kernel, p, device) if op == "conv_wgrad" else 1
        yield Plan("native", "", f"grouped/{kernel}", splits=splits)


def _wgrad_splits(kernel: str, p: ConvProblem, device: Device) -> int:
    group_c, group_k = p.in_channels // p.groups, p.out_channels // p.groups
    if kernel != "mma":
        # One block fits a multiprocessor, two of 4 or 8 channels a group in 16 bit; of stride 2 one of them is faster
        # than two with half as many rows each.
        half = kernel == "rows"
        blocks = -(-p.out_channels // (64 if half else 32))
        two = half and group_c < 16 and p.stride[-1] == 1
        parts = p.batch * math.prod(p.out_spatial[-2:-1]) // 4
        return max(1, min((2 if two else 1) * device.sm_count // blocks, parts))
    # Two blocks fit a multiprocessor; a tile is about 256 pixels.
    blocks = -(-p.groups // max(1, 32 // max(group_c, group_k)))
    tiles = -(-p.batch * math.prod(p.out_spatial) // 256)
    return splits_of(tiles, blocks, device, 2, 1, p.out_channels * group_c * math.prod(p.filter) * 4)

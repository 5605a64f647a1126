"""Grouped convolutions of few channels a group: cuda/conv/grouped."""

from __future__ import annotations

import math
from collections.abc import Iterator

from jaxconv._plan import domain
from jaxconv._plan.plan import Device, Plan, splits_of
from jaxconv._problem import ConvProblem


def wants(op: str, p: ConvProblem, device: Device) -> Iterator[Plan]:
    for kernel in ("rows_float32",) if p.dtype == "float32" else ("rows", "mma"):
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


def _square(p: ConvProblem, extents: tuple[int, ...], stride: int = 1, dilated: bool = False) -> bool:
    """Whether the filter is a square of one of `extents`, of `stride`, padded by less than its reach, over two axes (a
    first axis of three may be left alone), and of dilation 1 unless it may be `dilated`."""
    alone = p.nd == 2 or (p.nd == 3 and (p.filter[0], p.stride[0], p.padding[0]) == (1, 1, (0, 0)))
    plane = zip(p.filter[-2:], p.dilation[-2:], p.padding[-2:], strict=True)
    return (
        alone
        and p.filter[-1] == p.filter[-2]
        and p.filter[-1] in extents
        and all(s == stride for s in p.stride[-2:])
        and (dilated or all(d == 1 for d in p.dilation))
        and all(0 <= v <= (f - 1) * d for f, d, pair in plane for v in pair)
    )


def refusal(op: str, plan: Plan, p: ConvProblem, device: Device) -> str | None:
    if domain.shared_memory(device) < 163 * 1024:
        return "its largest tiles need the shared memory of compute capability 8.0 or 9.0"
    group_c, group_k = p.in_channels // p.groups, p.out_channels // p.groups
    rows = group_c == group_k and group_c in (4, 8, 16) and (_square(p, (3,)) or _square(p, (3,), 2))
    if plan.kernel == "grouped/rows_float32":
        needs = "compute capability 9.0, a 3x3 filter of stride 1 or 2, and 4, 8 or 16 channels a group on both sides"
        return None if rows and device.compute_capability == (9, 0) else f"in float32 it needs {needs}"
    if p.dtype not in ("bfloat16", "float16"):
        return f"it needs float32, bfloat16 or float16, got {p.dtype}"
    few = all(c % 4 == 0 and 4 <= c <= 32 for c in (group_c, group_k))
    if not few or p.in_channels % 8 or p.out_channels % 8:
        return f"it needs 4, 8, ... 32 channels a group and a multiple of 8 in all, got {group_c} and {group_k} a group"
    if p.nd == 3 and (p.filter[0], p.stride[0], p.padding[0]) != (1, 1, (0, 0)):
        return "it needs a first axis (of three) that the filter leaves alone"
    plane = range(p.nd)[-2:]
    if any(p.stride[i] > 2 or p.filter[i] > 7 or (p.filter[i] - 1) * p.dilation[i] > 16 for i in plane):
        return "it needs strides up to 2, filters up to 7 and dilated filters up to 17"
    if plan.kernel == "grouped/rows" and not (rows and device.compute_capability == (9, 0)):
        return "it needs compute capability 9.0, a 3x3 filter of stride 1 or 2, and 4, 8 or 16 channels a group"
    return None


def workspace(op: str, plan: Plan, p: ConvProblem) -> int:
    """Bytes."""
    filters = p.out_channels * (p.in_channels // p.groups) * math.prod(p.filter)
    return plan.splits * filters * 4 if op == "conv_wgrad" and plan.splits > 1 else 0

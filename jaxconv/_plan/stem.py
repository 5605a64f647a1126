"""Few input or few output channels: cuda/conv/stem."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from jaxconv._plan import dense, domain
from jaxconv._plan.plan import Device, Plan, align, itemsize, splits_of
from jaxconv._problem import ConvProblem

PATCH_KERNELS = {"64x128": "sm90/rows", "128x64": "sm90/resident", "64x256": "sm90/resident"}  # else sm90/product


def wants(op: str, p: ConvProblem, device: Device) -> Iterator[Plan]:
    if patches(op, p):
        product = dense.made("sm90", p.patch_product(), device)
        yield Plan("native", "", "stem/patches", product.tile if isinstance(product, Plan) else "")
        return
    yield Plan("native", "", "stem/mma", splits=_wgrad_splits(p, device) if op == "conv_wgrad" else 1)


def _wgrad_splits(p: ConvProblem, device: Device) -> int:
    # Persistent blocks, two of which fit a multiprocessor; one owns 64 units (8 bytes of channels at a tap; 128 in
    # float32) x 64 channels, or half as many x 128.
    item, taps = itemsize(p), math.prod(p.filter)
    few, many = sorted((p.in_channels, p.out_channels))
    units = taps * -(-few // (8 // item))
    blocks = -(-units // (32 * item)) * -(-many // (64 if units > 16 * item else 128))
    return splits_of(
        p.batch * math.prod(p.out_spatial), blocks, device, 2, 256, p.out_channels * p.in_channels * taps * 4
    )


def workspace(op: str, plan: Plan, p: ConvProblem) -> int:
    """Bytes."""
    if plan.kernel == "stem/patches":
        product = p.patch_product()
        kernel = PATCH_KERNELS.get(plan.tile, "sm90/product")
        size = domain.dense_workspace(dataclasses.replace(plan, kernel=kernel), product)
        return align(product.m * product.n * itemsize(p)) + size
    return plan.splits * p.out_channels * p.in_channels * math.prod(p.filter) * 4 if op == "conv_wgrad" else 0


def refusal(op: str, plan: Plan, p: ConvProblem, device: Device) -> str | None:
    """cuda/conv/stem/stem.h: few input or few output channels, on tensor cores."""
    if domain.shared_memory(device) < 163 * 1024:
        return "its largest tiles need the shared memory of compute capability 8.0 or 9.0"
    if p.groups > 1 or min(p.in_channels, p.out_channels) > 8:
        return f"it needs at most 8 input or output channels in one group, got {p.in_channels} and {p.out_channels}"
    few_in = p.in_channels <= 8  # else few outputs
    expands = op in ("conv", "conv_fprop") if few_in else op == "conv_dgrad"
    if p.full_float32 and p.dtype == "float32":
        return "float32 it takes as TF32 only"
    if p.nd == 3 and (p.filter[0], p.stride[0], p.padding[0]) != (1, 1, (0, 0)):
        return "it needs a first axis (of three) that the filter leaves alone"
    plane = range(p.nd)[-2:]
    if not few_in and any(p.stride[i] > 1 for i in plane):
        return "few output channels it takes with stride 1 only"
    if any(p.stride[i] > 16 or (p.filter[i] - 1) * p.dilation[i] > 32 for i in plane):
        return "it needs strides up to 16 and dilated filters up to 33"
    many = p.out_channels if few_in else p.in_channels
    few = p.in_channels if few_in else p.out_channels
    if expands:
        taps = math.prod(p.filter)
        units = taps * -(-few // (8 // itemsize(p)))
        return None if units <= 160 else f"it needs at most 160 taps in fours of channels, got {units}"
    if many % 8:
        return f"it needs a multiple of 8 channels on the other side, got {many}"
    if op == "conv_wgrad":
        return None
    columns = math.prod(p.stride[i] for i in plane) * few
    if columns > 64 and patches(op, p):
        kernel = PATCH_KERNELS.get(plan.tile, "sm90/product")
        return domain.dense_refusal(dataclasses.replace(plan, kernel=kernel), p.patch_product(), device)
    if columns > 64:
        return f"it needs strides times channels of at most 64, got {columns}"
    places = 1
    for i in plane:
        f, s, d, low = p.filter[i], p.stride[i], p.dilation[i], p.padding[i][0]
        shifts = {phase - t * d + low for phase in range(s) for t in range(f)}
        count = len({shift // s for shift in shifts if shift % s == 0})
        if count > 16:
            return "it needs filters of at most 16 taps an axis"
        places *= count
    operand = -(-many * itemsize(p) // 128) * places * (16 if columns <= 16 else 64) * 128
    return None if operand <= 80 * 1024 else f"its filter would need {operand} bytes of shared memory, it has 81920"


def patches(op: str, p: ConvProblem) -> bool:
    """Whether stem runs dgrad as a matrix product whose elements are those of dx: in 16 bit, a filter of few input
    channels that steps by its own extents, and has too many columns for the kernel that sums over taps."""
    steps = all(p.steps_by_filter(axis) for axis in range(p.nd)[-2:])
    many = p.in_channels <= 8 and math.prod(p.filter) * p.in_channels > 64
    return op == "conv_dgrad" and steps and many and itemsize(p) == 2

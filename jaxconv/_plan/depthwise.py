"""Depthwise convolutions: cuda/conv/depthwise. Which kernel is wanted, and a weight gradient's parts."""

from __future__ import annotations

import math
from collections.abc import Iterator

from jaxconv._plan.plan import Device, Plan, itemsize, splits_of
from jaxconv._problem import ConvProblem

# The most wanted first. 25 or 49 FMAs an output are more than a tensor core's products with bands: 64x56x56x96 7x7 in
# bf16 takes 0.036 ms in rows_mma and 0.074 in rows, 1x56x56x96 0.011 and 0.015 (H200); rows has these in float32 only.
# "few" is for few images, and taken where it was measured or by its name.
KERNELS = ("conv1d", "rows_strided", "rows", "rows_mma", "mma", "fma", "few")


# What adds up over the images
_SUMS = ("conv_wgrad", "conv_normalised_wgrad", "conv_normalised_gradient")


def in_memory(p: ConvProblem) -> bool:
    """Whether the arrays are to lie channels last: the kernels read either order, and that faster where vectors fit."""
    vector = 16 // itemsize(p)
    return p.channels_last or p.in_channels % vector == p.out_channels % vector == 0


def spreads(kernel: str, p: ConvProblem) -> bool:
    return kernel in ("depthwise/mma", "depthwise/rows_mma")  # banded matrices


def wants(op: str, p: ConvProblem, device: Device) -> Iterator[Plan]:
    for kernel in KERNELS:
        splits = _wgrad_splits(kernel, p, device) if op in _SUMS else 1
        yield Plan("native", "", f"depthwise/{kernel}", splits=splits)


def _wgrad_splits(kernel: str, p: ConvProblem, device: Device) -> int:
    item, pixels = itemsize(p), math.prod(p.out_spatial)
    dw_bytes = p.out_channels * math.prod(p.filter) * 4
    if kernel == "conv1d":
        # A block owns 32 vectors of channels; two fit a multiprocessor.
        return _whole(2, -(-p.out_channels * item // 512), p.batch * pixels // 256, device)
    if kernel in ("rows", "rows_strided"):
        # One block fits a multiprocessor, and owns a slab of channels.
        if max(p.dilation[-2:]) > 1:
            slab = 128 if p.filter[-1] == 3 and p.dilation[-1] <= 4 else 64
        else:
            slab = 256 if p.filter[-1] <= (5 if kernel == "rows_strided" else 3) else 128
        return _whole(1, -(-p.out_channels // slab), p.batch * math.prod(p.out_spatial[-2:-1]) // 4, device)
    if kernel == "rows_mma":
        # A block owns 32 channels; one fits a multiprocessor.
        return _whole(1, -(-p.out_channels // 32), _strip_rows(p) // 4, device)
    if kernel == "mma":
        r = p.filter[-2] if p.nd > 1 else 1
        long = (p.filter[-1] - 1) * p.dilation[-1] > 8
        blocks = -(-r // 7) * -(-p.out_channels // (8 if long else 16))
        # A tile is about 500 pixels. Measured on an H200: 3 parts a multiprocessor for filters of up to 3 rows, 2 for
        # more; one too many costs up to a quarter.
        waves = 1 if long else 3 if r <= 3 else 2
        return splits_of(-(-p.batch * pixels // 500), blocks, device, waves, 1, dw_bytes)
    wide = p.channels_last and p.groups == p.out_channels and p.in_channels % (16 // item) == 0
    vector = 16 // item if wide else 1
    tile = {4: 32, 1: 64}.get(vector, 16) if p.channels_last else 1
    blocks = -(-(p.out_channels // vector) // tile) * -(-math.prod(p.filter[:-1]) // 4)
    return splits_of(
        p.batch * math.prod(p.out_spatial[:-1]) * -(-p.out_spatial[-1] // 4), blocks, device, 4, 64, dw_bytes
    )


def _whole(a_multiprocessor: int, blocks: int, parts: int, device: Device) -> int:
    """At most so many parts, and no block more than fit: a second wave would double the time."""
    return max(1, min(a_multiprocessor * device.sm_count // blocks, parts))


def _strip_rows(p: ConvProblem) -> int:
    """Rows of x in all strips of rows_mma: a strip is 16 runs of 8 columns, of one image or of several side by side."""
    runs = -(-p.out_spatial[-1] // 8)
    strips = -(-runs // 16)
    images = 16 // -(-runs // strips)
    return -(-p.batch * math.prod(p.in_spatial[:-2]) // images) * strips * math.prod(p.in_spatial[-2:-1])

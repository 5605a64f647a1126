"""Few input or few output channels: cuda/conv/stem. Which kernel is wanted, and a weight gradient's parts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from jaxconv._plan import domain, planes
from jaxconv._plan.plan import Device, Plan, itemsize, splits_of
from jaxconv._plan.planner import PLANNERS
from jaxconv._problem import ConvProblem

# The most wanted first.
KERNELS = ("sm90_narrow_in", "sm90_narrow_out", "mma")
PATCH_TILES = ("128x128", "128x256", "256x128", "256x64", "128x320", "64x128", "128x64", "64x256")


def wants(op: str, p: ConvProblem, device: Device) -> Iterator[Plan]:
    if patches(op, p, device):
        product = PLANNERS["matmul"].made("sm90", p.patch_product(), device)
        first = product.tile if isinstance(product, Plan) else PATCH_TILES[0]
        for tile in dict.fromkeys((first, *PATCH_TILES)):
            yield Plan("native", "", "stem/patches", tile)
    yield Plan("native", "", "stem/planes", splits=_wgrad_splits(planes.folded(p), device) if op == "conv_wgrad" else 1)
    splits = _wgrad_splits(p, device) if op == "conv_wgrad" else 1
    for kernel in KERNELS:
        yield Plan("native", "", f"stem/{kernel}", splits=splits)


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


def patches(op: str, p: ConvProblem, device: Device) -> bool:
    """Whether dgrad can be a matrix product whose elements are those of dx: a filter that steps by its own extents."""
    stored = dataclasses.replace(p, channels_last=True)
    return domain.conv_refusal(op, Plan("native", "", "stem/patches", PATCH_TILES[0]), stored, device) is None

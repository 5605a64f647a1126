"""Few input or few output channels: cuda/conv/stem. Which kernel is wanted, and a weight gradient's parts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from jaxconv._plan import domain, narrow
from jaxconv._plan.plan import Device, Plan, itemsize, splits_of
from jaxconv._plan.planner import PLANNERS
from jaxconv._problem import ConvProblem

FEW = 8  # channels of a narrow image

# The most wanted first.
KERNELS = ("sm90_narrow_in", "sm90_narrow_out", "mma")
PATCH_TILES = ("128x128", "128x256", "256x128", "256x64", "128x320", "64x128", "128x64", "64x256")


def wants(op: str, p: ConvProblem, device: Device) -> Iterator[Plan]:
    if patches(op, p, device):
        product = PLANNERS["matmul"].made("sm90", p.patch_product(), device)
        first = product.tile if isinstance(product, Plan) else PATCH_TILES[0]
        for tile in dict.fromkeys((first, *PATCH_TILES)):
            yield Plan("native", "", "stem/patches", tile)
    yield Plan("native", "", "stem/planes", splits=_planes_splits(_folded(p), device) if op == "conv_wgrad" else 1)
    splits = _wgrad_splits(p, device) if op == "conv_wgrad" else 1
    for kernel in KERNELS:
        yield Plan("native", "", f"stem/{kernel}", splits=splits)


def first_of_a_volume(op: str, p: ConvProblem, device: Device) -> str | None:
    """Why stem/planes is taken where nothing was measured near, on Hopper: what was, of the same kind."""
    wgrad, wide = op == "conv_wgrad", p.dtype == "float32"
    if device.compute_capability != (9, 0) or p.full_float32 or p.out_channels < 16:
        return None
    if p.filter != (3, 3, 3) or p.stride != (1, 1, 1) or p.dilation != (1, 1, 1):
        return None
    if p.batch * math.prod(p.out_spatial) < 2**18 or (p.in_channels % 8 == 0 and not wide):  # sm90/halo_3d's
        return None
    faster = {(True, True): "1.7 to 16", (True, False): "2.5 to 37", (False, True): "1.1 to 2.8"}
    speed = faster.get((wgrad, wide), "2.8 to 8.5")
    return f"stem/planes was {speed} times as fast as XLA at 8 problems of 1 to 8 channels on an H100 and an H200"


def _folded(p: ConvProblem) -> ConvProblem:
    """stem/planes' problem: the planes under a filter as channels, of which there are 4, 8, 16 or 32."""
    if p.nd != 3:
        return p
    channels = next((c for c in (4, 8, 16) if p.filter[0] * p.in_channels <= c), 32)
    return dataclasses.replace(
        p, in_channels=channels, in_spatial=(p.out_spatial[0], *p.in_spatial[1:]), filter=(1, *p.filter[1:])
    )


def _planes_splits(folded: ConvProblem, device: Device) -> int:
    return narrow.wgrad_splits(folded, device) if folded.in_channels > FEW else _wgrad_splits(folded, device)


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

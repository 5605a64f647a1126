"""Convolutions of 8-bit numbers: cuda/conv/sm90/eight."""

from __future__ import annotations

import dataclasses
import math

from jaxconv._plan import domain
from jaxconv._plan.plan import Device, Plan, extent_of
from jaxconv._problem import FLOAT8, ScaledConvProblem, family_of

EIGHT = "sm90/eight"
_TILES = ("256x128", "128x128", "256x64")


def tiles(p: ScaledConvProblem, device: Device) -> list[str]:
    """Those that the problem can have, those first that it wants most.

    As they were measured at ResNet-50's convolutions (H100): where a sum is short, what follows it takes most of the
    time, and four warpgroups on 256 rows hide it best; else two that take turns at 128 rows.
    """
    if p.w_dtype != "int8" or p.dtype in FLOAT8:
        return ["128x128"]
    group_c, group_k = p.in_channels // p.groups, p.out_channels // p.groups
    halves = (group_c - 1) % 128 < 64  # fewer zeros in the stages of tiles of 256 rows
    short = group_c * math.prod(p.filter) <= 256 or halves
    first = "256x64" if group_k <= 64 else "256x128" if short else "128x128"
    m, n = extent_of(first)
    fills = -(-p.batch * math.prod(p.out_spatial) // m) * -(-group_k // n) * p.groups >= device.sm_count
    return sorted(_TILES, key=lambda tile: tile != (first if fills else "128x128"))


def made(p: ScaledConvProblem, device: Device) -> Plan | str:
    """The plan by the kernel, in the tile that the problem names, or the sentence that says why there is none."""
    if device.platform != "cuda":
        return "the kernel exists on CUDA only"
    if p.beyond:
        return p.beyond
    kernel, _, tile = (p.algorithm or EIGHT).partition(" ")
    if kernel == family_of(EIGHT):
        kernel = EIGHT
    plan = Plan("native", "", kernel, tile, asks_channels_last=not p.channels_last)
    refusal = domain.conv_scaled_refusal(plan, p, device)
    if refusal is not None:
        return refusal
    wanted = plan if tile else dataclasses.replace(plan, tile=tiles(p, device)[0])
    return domain.conv_scaled_refusal(wanted, p, device) or wanted

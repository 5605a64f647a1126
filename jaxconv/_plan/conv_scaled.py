"""Convolutions of 8-bit numbers: cuda/conv/sm90/eight."""

from __future__ import annotations

import dataclasses
import math

from jaxconv._plan import domain
from jaxconv._plan.plan import Device, Plan, extent_of
from jaxconv._problem import ScaledConvProblem, family_of

EIGHT = "sm90/eight"
_TILES = ("256x128", "128x128", "256x64")


def tiles(p: ScaledConvProblem, device: Device) -> list[str]:
    """Those that the problem can have, those first that it wants most: the fewest tensor-core operations that idle, by
    whole waves of tiles; of equal ones those that read the least."""
    rows, columns = p.batch * math.prod(p.out_spatial), p.out_channels // p.groups

    def cost(tile: str) -> tuple[float, float]:
        m, n = extent_of(tile)
        count = -(-rows // m) * -(-columns // n) * p.groups
        waves = -(-count // device.sm_count)
        return waves * m * n, (1 / m + 1 / n)

    return sorted(_TILES if p.w_dtype == "int8" else ("128x128",), key=cost)


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

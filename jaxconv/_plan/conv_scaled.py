"""Convolutions of 8-bit numbers: the kernels of cuda/conv/sm90/eight."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from jaxconv._plan import choose, domain
from jaxconv._plan.plan import Device, Plan, extent_of
from jaxconv._plan.planner import NOTHING, XLA_ASKED, Planner, asked, calls, disabled, disabled_text, plans_of
from jaxconv._problem import FLOAT8, ScaledConvProblem, family_of

EIGHT, HALO = "sm90/eight", "sm90/eight_halo"
_TILES = ("256x128", "128x128", "256x64")


def tiles(p: ScaledConvProblem, device: Device) -> list[str]:
    """Those that the problem can have, those first that it wants most.

    As they were measured at ResNet-50's convolutions (H100): where a sum is short, what follows it takes most of the
    time, and four warpgroups on 256 rows hide it best; else two that take turns at 128 rows. Of float8 256x64 is for
    few output channels, of which 128 columns would be idle for the most part.
    """
    if p.w_dtype == "uint8":
        return ["128x128"]
    has = [tile for tile in _TILES if p.of_integers or tile != "256x128"]
    group_c, group_k = p.in_channels // p.groups, p.out_channels // p.groups
    halves = (group_c - 1) % 128 < 64  # fewer zeros in the stages of tiles of 256 rows
    short = group_c * math.prod(p.filter) + p.shortcut_channels <= 256 or halves
    wanted = "256x64" if group_k <= 64 else "256x128" if short and p.of_integers else "128x128"
    m, n = extent_of(wanted)
    fills = -(-p.batch * math.prod(p.out_spatial) // m) * -(-group_k // n) * p.groups >= device.sm_count
    return sorted(has, key=lambda tile: tile != (wanted if fills else "128x128"))


def first(p: ScaledConvProblem, device: Device) -> str:
    """The kernel that the problem wants, which may refuse it.

    EIGHT fetches a pixel nine times for 3x3 filters, and 64 channels are too few products to hide that: on an H100 its
    int8 took 1.3 times as long as bfloat16 in sm90/halo, its float8 4.2 times. HALO fetches it once: 1.9 (float8 1.7)
    times bfloat16's speed, where its tiles fill the device. Of other numbers of channels it was not timed.
    """
    places = 128 if p.dtype in FLOAT8 else 256
    count = -(-p.batch * math.prod(p.out_spatial) // places) * -(-p.out_channels // 64)
    few = p.groups == 1 and 32 < p.in_channels <= 64 and not p.has_shortcut
    return HALO if few and p.filter[-2:] == (3, 3) and count >= device.sm_count else EIGHT


def by_kernel(algorithm: str, p: ScaledConvProblem, device: Device) -> Plan | str:
    """The plan by the kernel and tile that `algorithm` names, or the sentence that says why there is none."""
    if device.platform != "cuda":
        return "the kernel exists on CUDA only"
    if p.beyond:
        return p.beyond
    kernel, _, tile = algorithm.partition(" ")
    if kernel == family_of(EIGHT):  # whichever
        halo = by_kernel(HALO, p, device) if not tile and first(p, device) == HALO else ""
        return by_kernel(f"{EIGHT} {tile}".strip(), p, device) if isinstance(halo, str) else halo
    plan = Plan("native", "", kernel, tile, asks_channels_last=not p.channels_last)
    refusal = domain.conv_scaled_refusal(plan, p, device)
    if refusal is not None:
        return refusal
    wanted = plan if tile or kernel != EIGHT else dataclasses.replace(plan, tile=tiles(p, device)[0])
    return domain.conv_scaled_refusal(wanted, p, device) or wanted


def xla_has(p: ScaledConvProblem, device: Device) -> str | None:
    """Why XLA's product is taken for a dense layer that the kernel could run; None where the kernel is taken.

    XLA gives int8 by int8 and float8 to cuBLASLt, which does not take uint8. Where its tiles fill the device the kernel
    was 2.2 to 5.7 times as fast on an H100. With fewer tiles it took 0.3 to 1.6 times as long as
    XLA, most often longer, because it does not cut a sum into parts (docs/kernels/eight.md).
    """
    if p.of_integers and (p.dtype, p.w_dtype) != ("int8", "int8"):
        return None
    if not p.scaled and p.of_integers:
        return "XLA has a product for sums of int8 without scales"
    tiles = -(-p.batch // 128) * -(-p.out_channels // 128)
    if tiles < device.sm_count:
        return f"{tiles} tiles of 128x128 for {device.sm_count} multiprocessors: at most sizes XLA was as fast"
    return None


class ConvScaled(Planner):
    """One pass on 8-bit tensor cores; else the sums, by a plan of their own, and a pass behind them.

    Of a dense layer XLA has the sums, and often all of it.
    """

    group = "conv"
    algorithms = (EIGHT, HALO)
    tunable = False

    def made(self, algorithm: str, p: ScaledConvProblem, device: Device) -> Plan | str:
        return by_kernel(algorithm, p, device)

    def tiles(self, p: ScaledConvProblem, device: Device) -> Iterable[Plan]:
        every = [*(f"{EIGHT} {tile}" for tile in tiles(p, device)), HALO]
        return plans_of(self.made(algorithm, p, device) for algorithm in every)

    def first(self, p: ScaledConvProblem, device: Device) -> str:
        return first(p, device)

    def disabled(self, p: ScaledConvProblem) -> bool:
        return disabled("dense") if p.product else super().disabled(p)

    def composed(self, p: ScaledConvProblem, device: Device) -> Plan:
        forced = p.implementation == "native" or p.algorithm is not None
        if p.implementation == "xla":
            return self.instead(XLA_ASKED)
        if self.empty(p):
            return self.instead(NOTHING)
        kernel = p.algorithm or family_of(EIGHT)
        whole = p.of_integers and not p.scaled and not p.product  # sums alone are conv_integer's, which its plan has
        if self.disabled(p) and not whole:
            own: Plan | str = disabled_text()
        else:
            own = choose.missing(device) or self.no_kernels(p, device.platform) or self.made(kernel, p, device)
        if isinstance(own, Plan) and p.product and not forced and (why := xla_has(p, device)) is not None:
            return self.instead(why)
        if isinstance(own, Plan):
            why = "one pass on 8-bit tensor cores, which XLA does not have"
            reason = f"{asked(p)} was asked for" if forced else why
            return dataclasses.replace(own, reason=reason)
        if forced:
            return self.cannot(p, own, kernel)
        follows = p.scaled or p.bias or p.residual or p.out_scaled or p.activation.name != "none"
        if device.platform != "cuda" or p.product or not (follows or p.of_integers):
            return self.instead(f"XLA computes it: {own}")
        return calls("two", "a convolution, then its scales")(own)

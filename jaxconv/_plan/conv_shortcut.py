"""A convolution and its shortcut in one pass, or two calls."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from jaxconv._plan import choose, domain, tuned
from jaxconv._plan.plan import Device, Plan, extent_of
from jaxconv._plan.planner import CUDA_ONLY, NO_SUCH_KERNEL, PARTITIONED, Planner, calls, disabled_text, plans_of
from jaxconv._problem import ShortcutConvProblem

PRODUCT = "sm90/product"
TILES = ("128x128", "128x256", "256x128", "256x64")
# A tile's sum is not cut into parts. With 64 tiles one call took 0.0127 ms instead of 0.0177 for two (512 and 1024
# channels to 2048 at 7x7, 8 images, H200). Fewer were not timed.
LEAST_TILES = 64
# Summed channels. One call saves a write and a read of y, 1e-12 s an element on an H200. Libraries' products are up to
# a tenth faster than this one, at 7e14 operations a second 2.9e-16 s for each channel of an element. 3500 channels make
# both equal; 1536 were timed.
MOST_CHANNELS = 3072


def tiles(p: ShortcutConvProblem) -> list[str]:
    """The kernel's tiles, the best one for the problem first. Of a ResNet-50's shortcuts at batches of 8, 32 and 256
    128x128 was the fastest, but for one that lost 4 % (H200)."""
    wanted = "256x64" if p.out_channels <= 64 else "128x128"
    return sorted(TILES, key=lambda tile: tile != wanted)


def count(p: ShortcutConvProblem) -> int:
    """Tiles."""
    m, n = extent_of(tiles(p)[0])
    return -(-p.batch * math.prod(p.out_spatial) // m) * -(-p.out_channels // n)


class ConvShortcut(Planner):
    """In one pass the shortcut's result is neither written nor read."""

    group = "conv"
    algorithms = ("sm90",)

    def made(self, algorithm: str, p: ShortcutConvProblem, device: Device) -> Plan | str:
        if device.platform != "cuda":
            return CUDA_ONLY
        kernel, _, tile = algorithm.partition(" ")
        tile = tile or tiles(p)[0]
        if kernel not in ("sm90", PRODUCT) or tile not in TILES:
            return NO_SUCH_KERNEL
        plan = Plan("native", "", PRODUCT, tile, asks_channels_last=not p.channels_last)
        return domain.conv_shortcut_refusal(plan, p, device) or plan

    def tiles(self, p: ShortcutConvProblem, device: Device) -> Iterable[Plan]:
        return plans_of(self.made(f"{PRODUCT} {tile}", p, device) for tile in tiles(p))

    def composed(self, p: ShortcutConvProblem, device: Device) -> Plan:
        two = calls("two", "two convolutions, of which one adds the other's result")
        if self.disabled(p):
            return two(disabled_text())
        if p.implementation == "xla" or self.empty(p):
            return two(choose.plan("conv_add", p.conv, device).reason)
        own = choose.refusal(self.op, p, device) or self.made(p.algorithm or "sm90", p, device)
        if isinstance(own, str):
            return two(own)
        if p.implementation == "native" or p.algorithm is not None:
            return dataclasses.replace(own, reason="it was asked for")
        if device.partitioned:
            return two(PARTITIONED)
        for op, part in (("conv" if p.bias else "conv_fprop", p.conv.affine()), ("conv_fprop", p.shortcut)):
            timed = tuned.entry(op, part, device)
            if timed is not None and timed.choice == "xla":
                return two(f"{op} was timed here, and XLA was faster")
        if count(p) < LEAST_TILES:
            return two(f"it has {count(p)} tiles, and fewer than {LEAST_TILES} were not timed")
        if p.in_channels + p.shortcut_channels > MOST_CHANNELS:
            return two(f"of more than {MOST_CHANNELS} summed channels the products take most of the time")
        if math.prod(p.filter) > 1:
            alone = choose.plan("conv_add", p.conv, device)
            if alone.implementation != "native":
                return two(alone.reason)
            own = self.made(alone.spec, p, device)  # in the tile that was timed without a shortcut
            if isinstance(own, str):
                return two(f"{alone.spec}, the kernel of its own plan, takes no shortcut: {alone.reason}")
        return dataclasses.replace(own, reason="the shortcut's sums are added in the same pass")

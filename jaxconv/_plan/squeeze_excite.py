"""Squeeze-and-excitation: cuda/squeeze_excite. How an image is shared by the CTAs of a cluster."""

from __future__ import annotations

import dataclasses

from jaxconv._plan import domain
from jaxconv._plan.plan import Device, Plan
from jaxconv._plan.planner import NO_SUCH_KERNEL, Features, Planner, log2, vector
from jaxconv._problem import SQUEEZE_EXCITE_ALGORITHMS, SqueezeExciteProblem

# Shared memory for a CTA's slab, bytes: three run on a multiprocessor; two; one.
THREE, TWO, ONE = 60 * 1024, 100 * 1024, 200 * 1024
# What a CTA waits for between its two walks, in bytes that it could have moved meanwhile: for weights, and for each
# exchange with others. Where nobody else uses the memory, of few images, it could have moved much more.
WEIGHTS, EXCHANGE, EXCHANGE_ALONE = 4 * 1024, 2 * 1024, 40 * 1024


def _tile(p: SqueezeExciteProblem, device: Device) -> tuple[int, int]:
    """(bytes of a tile's channels, CTAs of a cluster), by what each is thought to cost."""
    vector = domain.squeeze_excite_vector(p)
    row = p.channels // vector  # vectors
    if vector == 1:
        return 16, 1

    def cost(tiles: int, ctas: int) -> tuple[float, int, int]:
        lanes, shares = -(-row // tiles), ctas // tiles
        width, slab = lanes * 16, -(-p.pixels // shares) * lanes * 16
        two = lanes <= 256 and slab <= 1.5 * TWO
        threads = 256 if two else 512
        # Threads without a channel; pieces of channels that are no whole lines of 128 bytes, or share a sector of 32.
        moves = threads / (threads // lanes * lanes)
        if tiles > 1:
            moves *= 1 + (0.5 if width % 32 else 0.1 if width % 128 else 0) * 64 / max(width, 64)
        moves *= 1 + 0.5 * max(0.0, 1 - (TWO if two else ONE) / slab)  # what is read again, from the L2 cache
        # Weights: of a tile's share of the channels both, from the L2 cache.
        weights = 4 * p.channels * p.hidden / ctas * (1 if shares == 1 else 1.5)
        exchanges = 0 if ctas == 1 else 1 if shares == 1 else 2 if lanes * vector * p.hidden <= 4096 else 3
        if p.images * 8 <= device.sm_count:  # all CTAs at once, each alone: a CTA's time
            return 2 * slab * moves + weights + EXCHANGE_ALONE * exchanges, width, ctas
        result = tiles * lanes / row * moves  # lanes without a channel
        result *= 1 if slab <= THREE else 1.1 if two else 1.25  # nobody else reads while it computes
        result *= 1 + (WEIGHTS + EXCHANGE * exchanges + weights) / (2 * slab)
        result *= max(1.0, 2 * device.sm_count / (max(p.images, 1) * ctas)) ** 0.5  # idle multiprocessors
        return result, width, ctas

    clusters = (1, 2, 4, 8) if domain.capability(device) == (9, 0) else (1,)
    found = [
        cost(tiles, ctas)
        for ctas in clusters
        for tiles in (1, 2, 4, 8)
        if tiles <= ctas and -(-row // tiles) <= 512 and -(-row // -(-row // tiles)) == tiles
    ]
    if not found:  # the domain says why
        return min(row * 16, 8192), 1
    _, width, ctas = min(found)
    return width, ctas


class SqueezeExcite(Planner):
    group = "squeeze_excite"
    algorithms = SQUEEZE_EXCITE_ALGORITHMS
    independent = (True, True, False, False)

    def made(self, algorithm: str, p: SqueezeExciteProblem, device: Device) -> Plan | str:
        plan = Plan("native", "", algorithm)
        if device.platform == "cpu":
            return plan if algorithm in self.algorithms else NO_SUCH_KERNEL
        width, ctas = _tile(p, device)
        plan = dataclasses.replace(plan, splits=ctas, chunk=width)
        return domain.squeeze_excite_refusal(plan, p, device) or plan

    def features(self, p: SqueezeExciteProblem) -> Features:
        """Coordinates: images, pixels, channels, hidden numbers.

        Where a gradient is taken measured and chosen forward and backward."""
        kind = p.dtype, p.channels % vector(p.dtype) == 0
        extents = log2(p.images, p.pixels, p.channels, p.hidden)
        return "squeeze_excite_fused" if p.save else "squeeze_excite", kind, extents

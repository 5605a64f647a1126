"""Group-norm and layer-norm: cuda/groupnorm. Which kernel is wanted, with which items."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from jaxconv._plan import domain
from jaxconv._plan.plan import Device, Plan, itemsize
from jaxconv._plan.planner import CUDA_ONLY, Features, Planner, disabled, log2, plans_of, vector
from jaxconv._problem import GROUPNORM_ALGORITHMS, GroupNormProblem

# Bytes that are read, from which on they do not stay in the L2 cache from one launch to the next.
CACHED = 16 * 2**20


def _splits(op: str, p: GroupNormProblem, device: Device) -> int:
    """Items of an image: three a multiprocessor, but of 16 KB of a tensor to 64 KB of all that is read, in whole steps
    of a block. Of few large images they are larger: whoever writes an item reads the sums of all of its image's, which
    should be an eighth of the item at most while there are items for all multiprocessors."""
    pixel = p.channels * itemsize(p) * _read(op)
    images = p.images * (p.batch or 1)
    wanted = pixel * p.pixels * images // (3 * device.sm_count)
    most = max(math.isqrt(pixel * p.pixels // (64 * p.groups)), -(-3 * device.sm_count // max(images, 1)))
    pixels = max(max(16 * 1024 * _read(op), min(wanted, 64 * 1024)) // pixel, -(-p.pixels // most))
    rows = domain.groupnorm_rows(p)
    return min(-(-p.pixels // (max(1, pixels // rows) * rows)), 65535)


def _read(op: str) -> int:
    """Tensors that are read."""
    return 2 if op == "groupnorm_backward" else 1


# Shared memory of a CTA of "resident", bytes: three run on a multiprocessor; two; what is left for its vectors where it
# is alone, but for SCRATCH.
THREE, TWO, SCRATCH = 64 * 1024, 100 * 1024, 8 * 1024


def _tile(op: str, p: GroupNormProblem, device: Device) -> tuple[int, int]:
    """Of "resident": (bytes of a tile's channels, CTAs of its cluster), by what each is thought to cost."""
    unit, read = domain.groupnorm_unit(p), _read(op)
    row, images = p.channels * itemsize(p), p.images * (p.batch or 1)
    room = domain.shared_memory(device) - SCRATCH

    def cost(width: int, ctas: int) -> tuple[float, int, int]:
        tiles = -(-row // width)
        slab = -(-p.pixels // ctas) * width * read  # bytes
        result = tiles * width / row  # lanes that have no channel
        result *= 1 + read / (read + 1) * max(0.0, 1 - room / slab)  # what is read again, from the L2 cache
        # Pieces of channels that are no whole lines of 128 bytes, or share a sector of 32 with another CTA's.
        result *= 1 + (0.5 if width % 32 else 0.25 if width % 64 else 0.1 if width % 128 else 0) * 16 / max(width, 16)
        result *= 1 if slab <= THREE else 1.1 if slab <= TWO else 1.3  # nobody else reads while it sums up
        result *= 1 + 1024 / slab  # what a CTA does once
        result *= max(1.0, 2 * device.sm_count / (max(images, 1) * tiles * ctas)) ** 0.5  # idle multiprocessors
        return result * (1 + 0.015 * (ctas - 1)), width, ctas

    widths = [unit * factor for factor in (1, 2, 3, 4, 6, 8, 16, 32) if unit * factor <= 512] or [0]
    clusters = (1, 2, 4, 8) if domain.capability(device) == (9, 0) else (1,)
    made = [(width, ctas) for width in widths if width < row + unit for ctas in clusters] or [(unit, 1)]
    return min(made, key=lambda one: cost(*one)) if unit else (0, 1)


class GroupNorm(Planner):
    group = "groupnorm"
    forced_by_times = False
    # Of larger images less stays on the chip: 2 x 64x64x64 pixels of 64 channels, by a kernel that was 2 times faster
    # than XLA at 64x64 pixels, took 3.9 times as long as XLA (H200).
    independent = (True, False, False)

    def made(self, algorithm: str, p: GroupNormProblem, device: Device) -> Plan | str:
        plan = Plan("native", "", algorithm)
        if device.platform == "cpu":
            return plan if algorithm == "two_read" else CUDA_ONLY
        if algorithm == "resident":
            width, ctas = _tile(self.op, p, device)
            plan = dataclasses.replace(plan, splits=ctas, chunk=width)
        elif algorithm != "rows":
            plan = dataclasses.replace(plan, splits=_splits(self.op, p, device))
        if algorithm == "interleaved":
            # Three blocks run on a multiprocessor, half of which sum up: an image's sums are there when asked for.
            plan = dataclasses.replace(plan, chunk=2 * device.sm_count + plan.splits)
        refusal = domain.groupnorm_refusal(self.op, plan, p, device)
        if refusal:
            return refusal
        return dataclasses.replace(plan, workspace_bytes=domain.groupnorm_workspace(self.op, plan, p))

    def every(self, p: GroupNormProblem, device: Device) -> Iterator[Plan]:
        rows = p.rows and device.platform == "cuda"  # images of one pixel are nothing that the others were made for
        algorithms = [a for a in GROUPNORM_ALGORITHMS if (a == "rows") == rows]
        return plans_of(self.made(algorithm, p, device) for algorithm in algorithms)

    def first(self, p: GroupNormProblem, device: Device) -> str:
        if device.platform == "cpu":
            return "two_read"
        if p.rows:  # as images of a pixel they are many small items, which "two_read" at least runs
            return "rows" if isinstance(self.made("rows", p, device), Plan) else "two_read"
        if isinstance(plan := self.made("resident", p, device), Plan):
            # Shared memory holds two fifths of all.
            slab = -(-p.pixels // plan.splits) * plan.chunk * _read(self.op)
            if 2 * slab <= 5 * domain.shared_memory(device):
                return "resident"
        large = p.size * itemsize(p) * _read(self.op) > CACHED
        return "interleaved" if large and domain.groupnorm_vector(p) > 1 else "two_read"

    def disabled(self, p: GroupNormProblem) -> bool:
        return disabled(self.op, p.rows)

    def on_cpu(self, p: GroupNormProblem) -> tuple[str | None, str]:
        return (
            None,
            "native code reads x more often: forward and backward, XLA was 1.5 to 9 times faster on an AMD EPYC",
        )

    def features(self, p: GroupNormProblem) -> Features:
        """Coordinates: images, pixels, channels; of a layer-norm rows, 1, channels.

        Measured and chosen forward and backward: what the backward pass reads is the forward pass's choice."""
        kind = p.dtype, p.activation.name != "none", p.channels % vector(p.dtype) == 0
        extents = log2((p.batch or 1) * p.images, p.pixels, p.channels)
        return "layernorm" if p.rows else "groupnorm_fused", kind, extents

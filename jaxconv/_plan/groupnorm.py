"""Group-norm and layer-norm: cuda/groupnorm. Which kernel is wanted, with which items."""

from __future__ import annotations

import dataclasses
import math

from jaxconv._plan import domain
from jaxconv._plan.plan import Device, Plan, itemsize
from jaxconv._problem import GroupNormProblem

# Bytes that are read, from which on they do not stay in the L2 cache from one launch to the next.
CACHED = 16 * 2**20


def made(op: str, algorithm: str, p: GroupNormProblem, device: Device) -> Plan | str:
    """The plan by the kernel that `algorithm` names, or the sentence that says why there is none."""
    plan = Plan("native", "", algorithm)
    if device.platform == "cpu":
        return plan if algorithm == "two_read" else "it exists on CUDA only"
    if algorithm == "resident":
        width, ctas = _tile(op, p, device)
        plan = dataclasses.replace(plan, splits=ctas, chunk=width)
    elif algorithm != "rows":
        plan = dataclasses.replace(plan, splits=_splits(op, p, device))
    if algorithm == "interleaved":
        # Three blocks run on a multiprocessor, half of which sum up: an image's sums are there when they are asked for.
        plan = dataclasses.replace(plan, chunk=2 * device.sm_count + plan.splits)
    refusal = domain.groupnorm_refusal(op, plan, p, device)
    if refusal:
        return refusal
    return dataclasses.replace(plan, workspace_bytes=domain.groupnorm_workspace(op, plan, p))


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


def wanted(op: str, p: GroupNormProblem, device: Device) -> str:
    """The kernel for a problem that nobody has measured."""
    if p.rows:  # as images of a pixel they are many small items, which "two_read" at least runs
        return "rows" if isinstance(made(op, "rows", p, device), Plan) else "two_read"
    if isinstance(plan := made(op, "resident", p, device), Plan):
        # Shared memory holds two fifths of all.
        slab = -(-p.pixels // plan.splits) * plan.chunk * _read(op)
        if 2 * slab <= 5 * domain.shared_memory(device):
            return "resident"
    large = p.size * itemsize(p) * _read(op) > CACHED
    return "interleaved" if large and domain.groupnorm_vector(p) > 1 else "two_read"

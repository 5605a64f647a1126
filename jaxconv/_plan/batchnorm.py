"""Batch-norm: cuda/batchnorm. Which parts and teams are wanted."""

from __future__ import annotations

import dataclasses

from jaxconv._plan import domain
from jaxconv._plan.plan import Device, Plan, itemsize
from jaxconv._problem import BatchNormProblem


def made(op: str, algorithm: str, p: BatchNormProblem, device: Device) -> Plan | str:
    """The plan by the kernel that `algorithm` names, or the sentence that says why there is none."""
    plan = Plan("native", "", algorithm)
    if device.platform == "cpu":
        gpus = ("batchnorm_shortcut_backward", "batchnorm_signs", "batchnorm_backward_add")
        alone = algorithm == "two_read" and op not in gpus
        return plan if alone else "it exists on CUDA only"
    refusal = domain.batchnorm_refusal(op, plan, p, device)
    if refusal:
        return refusal
    if algorithm == "resident_team":
        width, ctas = _team(op, p, device)
        plan = dataclasses.replace(plan, tile=f"{width}B", splits=ctas)
    elif op == "batchnorm_shortcut_backward":
        plan = dataclasses.replace(plan, splits=device.sm_count)  # a part a multiprocessor
    elif algorithm == "two_read" and op not in ("batchnorm_infer", "batchnorm_signs", "batchnorm_dx"):
        plan = dataclasses.replace(plan, splits=_parts(op, p, device))
    return dataclasses.replace(plan, workspace_bytes=domain.batchnorm_workspace(op, plan, p, device))


def one_walk_of(op: str, p: BatchNormProblem) -> str | None:
    """The op of which `op` is one of two_read's walks: statistics alone, backward's sums alone, or its dx alone.

    Nothing is read again, so there is nothing that a block or a team could keep.
    """
    if op == "batchnorm_moments":
        return "batchnorm_train"
    alone = op == "batchnorm_dx" or (op == "batchnorm_backward" and not p.want_dx)
    return "batchnorm_backward" if alone else None


def _parts(op: str, p: BatchNormProblem, device: Device) -> int:
    """Of two_read's sums: eight blocks a multiprocessor, of at least 16 KB each.

    Backward's may pass through a ring, which takes a part a multiprocessor (cuda/batchnorm/stream.cuh).
    """
    item, batch = itemsize(p), p.batch or 1
    # bytes of channels that a tile spans, channels last
    width = 256 if domain.batchnorm_vector(p) > 1 else 32 * item
    tiles = p.channels if p.inner > 1 else -(-p.channels * item // width)
    tile_bytes = p.reduced * item * p.channels // tiles
    parts = max(1, min(-(-8 * device.sm_count // (batch * tiles)), max(1, tile_bytes // 16384)))
    streamed = op in ("batchnorm_backward", "batchnorm_backward_add") and domain.batchnorm_streamed(p)
    return max(parts, device.sm_count) if streamed else parts


def _team(op: str, p: BatchNormProblem, device: Device) -> tuple[int, int]:
    """(bytes of a group's channels, CTAs of a team): within 5% of the best of all in nearly every benchmark (H200)."""

    def all_at_once(width: int, ctas: int | None = None) -> int:
        """CTAs of a team where all groups run side by side on `ctas` of them."""
        together, groups = domain.batchnorm_teams(op, p, width, device)
        return max(1, (ctas or together) // groups)

    if p.inner == 1:
        # All groups side by side, so that DRAM reads whole rows. Where there is little to read, fewer CTAs meet sooner.
        small = p.size * itemsize(p) < 8 * 2**20
        return (64, all_at_once(64, device.sm_count)) if small else (128, all_at_once(128))
    # A channel stays in the shared memory of its team but for a third, which the L2 cache has.
    together, _ = domain.batchnorm_teams(op, p, 128, device)
    held = 2 if op == "batchnorm_backward" else 1
    room = domain.shared_memory(device) * device.sm_count // together - 8 * 1024
    enough = -(-p.reduced * itemsize(p) * held * 10 // (14 * room))
    ctas = next((c for c in sorted(together // t for t in range(2, together + 1)) if c >= enough), together // 2)
    return 128, max(all_at_once(128), ctas, 1)

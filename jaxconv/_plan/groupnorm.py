"""Group-norm: cuda/groupnorm. Which kernel is wanted, with which items."""

from __future__ import annotations

import dataclasses

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
    plan = dataclasses.replace(plan, splits=_splits(op, p, device))
    if algorithm == "interleaved":
        # Three blocks run on a multiprocessor, half of which sum up: an image's sums are there when they are asked for.
        plan = dataclasses.replace(plan, chunk=2 * device.sm_count + plan.splits)
    refusal = domain.groupnorm_refusal(plan, p)
    if refusal:
        return refusal
    return dataclasses.replace(plan, workspace_bytes=domain.groupnorm_workspace(op, plan, p))


def _splits(op: str, p: GroupNormProblem, device: Device) -> int:
    """Items of an image: three a multiprocessor, but of 16 KB of a tensor to 64 KB of all that is read, in whole steps
    of a block."""
    pixel = p.channels * itemsize(p) * _read(op)
    wanted = pixel * p.pixels * p.images * (p.batch or 1) // (3 * device.sm_count)
    pixels = max(16 * 1024 * _read(op), min(wanted, 64 * 1024)) // pixel
    rows = domain.groupnorm_rows(p)
    return min(-(-p.pixels // (max(1, pixels // rows) * rows)), 65535)


def _read(op: str) -> int:
    """Tensors that are read."""
    return 2 if op == "groupnorm_backward" else 1


def wanted(op: str, p: GroupNormProblem) -> str:
    """The kernel for a problem that nobody has measured."""
    large = p.size * itemsize(p) * _read(op) > CACHED
    return "interleaved" if large and domain.groupnorm_vector(p) > 1 else "two_read"

"""What the CUDA kernels can run: cuda/domain.h, asked in the terms of problems and plans.

The compiled CPU module holds these answers, so every machine has them. A launcher asks the same before it launches.
"""

from __future__ import annotations

import functools
from typing import Any

from jaxconv import _native
from jaxconv._plan.plan import Device, Plan
from jaxconv._problem import ConvProblem, DenseProblem


def capability(device: Device) -> tuple[int, int]:
    """The compute capability; what is not known is taken for 8.6, which runs the least."""
    return device.compute_capability or (8, 6)


def shared_memory(device: Device) -> int:
    """Bytes a block can have."""
    return _native.cpu.shared_memory(*capability(device))


@functools.lru_cache(maxsize=4096)
def _conv(p: ConvProblem) -> Any:
    def three(values: Any, fill: int) -> list[int]:
        return [fill] * (3 - p.nd) + [int(v) for v in values]

    return _native.cpu.ConvProblem(
        p.batch,
        p.in_channels,
        p.out_channels,
        p.groups,
        three(p.in_spatial, 1),
        three(p.filter, 1),
        three(p.out_spatial, 1),
        three(p.stride, 1),
        three([low for low, _ in p.padding], 0),
        three(p.dilation, 1),
        p.channels_last,
        p.dtype,
        p.dtype == "float32" and p.full_float32,
    )


def conv_refusal(op: str, plan: Plan, p: ConvProblem, device: Device) -> str | None:
    """None where the plan's kernel can run `op` of p, as it lies in memory, with the plan's tile, splits and chunk.

    Else a sentence.
    """
    limits = (*capability(device), device.sm_count)
    return _native.cpu.conv_refusal(op, _conv(p), plan.kernel, plan.tile, plan.splits, plan.chunk, *limits) or None


def conv_workspace(op: str, plan: Plan, p: ConvProblem) -> int:
    """Bytes."""
    return _native.cpu.conv_workspace(op, _conv(p), plan.kernel, plan.tile, plan.splits, plan.chunk)


@functools.lru_cache(maxsize=4096)
def _dense(p: DenseProblem) -> Any:
    return _native.cpu.DenseProblem(
        p.batch or 1,
        p.m,
        p.k,
        p.n,
        p.trans_x,
        p.trans_w,
        p.batch is not None and "x" in p.batched,
        p.batch is not None and "w" in p.batched,
        p.bias or "",
        p.addend,
        p.dtype,
        p.dtype == "float32" and p.full_float32,
    )


def dense_refusal(plan: Plan, p: DenseProblem, device: Device) -> str | None:
    """conv_refusal of a dense product."""
    limits = (*capability(device), device.sm_count)
    return _native.cpu.dense_refusal(_dense(p), plan.kernel, plan.tile, plan.splits, plan.chunk, *limits) or None


def dense_workspace(plan: Plan, p: DenseProblem) -> int:
    """Bytes."""
    return _native.cpu.dense_workspace(_dense(p), plan.kernel, plan.tile, plan.splits, plan.chunk)

"""What the CUDA kernels can run: cuda/domain.h, asked in the terms of problems and plans.

The compiled CPU module holds these answers, so every machine has them. A launcher asks the same before it launches.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from jaxconv._core import native
from jaxconv._plan.plan import Device, Plan
from jaxconv._problem import (
    BatchNormProblem,
    ConvProblem,
    DenseProblem,
    GroupNormProblem,
    IntegerConvProblem,
    NormalisedConvProblem,
    PooledConvProblem,
    PoolProblem,
    ScaledConvProblem,
    ShortcutConvProblem,
    SqueezeExciteProblem,
)


def capability(device: Device) -> tuple[int, int]:
    """The compute capability; what is not known is taken for 8.6, which runs the least."""
    return device.compute_capability or (8, 6)


def shared_memory(device: Device) -> int:
    """Bytes a block can have."""
    return native.cpu.shared_memory(*capability(device))


@functools.lru_cache(maxsize=4096)
def _conv(p: ConvProblem) -> Any:
    def three(values: Any, fill: int) -> list[int]:
        return [fill] * (3 - p.nd) + [int(v) for v in values]

    return native.cpu.ConvProblem(
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
    made = plan.kernel, plan.tile, plan.splits, plan.chunk, *capability(device), device.sm_count
    if isinstance(p, NormalisedConvProblem):
        return native.cpu.conv_normalised_refusal(op, _conv(p), p.x_activation.name, *made) or None
    if op in ("conv_gradient", "conv_gradient_add", "conv_norm_gradient"):
        return native.cpu.conv_gradient_refusal(op, _conv(p), p.activation.name, *made) or None
    return native.cpu.conv_refusal(op, _conv(p), *made) or None


def folded(p: ConvProblem, dgrad: bool) -> ConvProblem:
    """The convolution as the matrix loops run it, channels last: where the filter steps by its own width, S pixels are
    one of S*C channels; likewise for its height, each output row is an image of its own (not for dgrad)."""
    last = dataclasses.replace(p, channels_last=True)
    batch, channels, *axes = native.cpu.conv_folded(_conv(last), dgrad)
    now = in_spatial, filter, out_spatial, stride = [tuple(extents[3 - p.nd :]) for extents in axes]
    before = p.in_spatial, p.filter, p.out_spatial, p.stride
    if now == [*before]:
        return p
    # What a folded axis was padded by, no window reaches.
    kept = [a == b for a, b in zip(zip(*before, strict=True), zip(*now, strict=True), strict=True)]
    return dataclasses.replace(
        p,
        batch=batch,
        in_channels=channels,
        in_spatial=in_spatial,
        out_spatial=out_spatial,
        filter=filter,
        stride=stride,
        padding=tuple(pads if keep else (0, 0) for pads, keep in zip(p.padding, kept, strict=True)),
    )


def conv_workspace(op: str, plan: Plan, p: ConvProblem) -> int:
    """Bytes."""
    return native.cpu.conv_workspace(op, _conv(p), plan.kernel, plan.tile, plan.splits, plan.chunk)


def conv_scaled_refusal(plan: Plan, p: ScaledConvProblem, device: Device) -> str | None:
    """conv_refusal of a convolution of 8-bit numbers, channels last as its kernel reads them."""

    def of(p: ScaledConvProblem) -> Any:
        return _conv(dataclasses.replace(p.conv.bare(), name="", dtype="float32", channels_last=True))

    types = p.dtype, p.w_dtype, p.out_dtype
    made = plan.kernel, plan.tile, plan.splits, plan.chunk, *capability(device), device.sm_count
    shortcut = p.has_shortcut, of(p.shortcut if p.has_shortcut else p)
    return native.cpu.conv_scaled_refusal(of(p), *shortcut, *types, *made) or None


def conv_integer_refusal(plan: Plan, p: IntegerConvProblem) -> str | None:
    """conv_refusal of an integer convolution."""

    def three(values: Any, fill: int) -> list[int]:
        return [fill] * (3 - p.nd) + [int(v) for v in values]

    extents = [three(values, 1) for values in (p.in_spatial, p.filter, p.out_spatial, p.stride)]
    pads = three([low for low, _ in p.padding], 0)
    dilations = three(p.lhs_dilation, 1), three(p.rhs_dilation, 1)
    sizes = p.batch, p.group_c, p.out_channels, p.groups, p.batch_groups
    problem = native.cpu.IntegerConvProblem(*sizes, *extents, pads, *dilations)
    return native.cpu.conv_integer_refusal(problem, plan.kernel) or None


@functools.lru_cache(maxsize=4096)
def _dense(p: DenseProblem) -> Any:
    return native.cpu.DenseProblem(
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
    return native.cpu.dense_refusal(_dense(p), plan.kernel, plan.tile, plan.splits, plan.chunk, *limits) or None


def dense_workspace(plan: Plan, p: DenseProblem) -> int:
    """Bytes."""
    return native.cpu.dense_workspace(_dense(p), plan.kernel, plan.tile, plan.splits, plan.chunk)


@functools.lru_cache(maxsize=4096)
def _batchnorm(p: BatchNormProblem) -> Any:
    shape = p.batch or 1, p.outer, p.channels, p.inner
    return native.cpu.BatchNormProblem(*shape, p.activation.name, p.residual, p.dtype)


def batchnorm_refusal(op: str, plan: Plan, p: BatchNormProblem, device: Device) -> str | None:
    """conv_refusal of a batch-norm."""
    made = plan.kernel, plan.tile, plan.splits, plan.chunk, *capability(device), device.sm_count
    return native.cpu.batchnorm_refusal(op, _batchnorm(p), *made) or None


def batchnorm_workspace(op: str, plan: Plan, p: BatchNormProblem, device: Device) -> int:
    """Bytes."""
    made = plan.kernel, plan.tile, plan.splits, plan.chunk, *capability(device), device.sm_count
    return native.cpu.batchnorm_workspace(op, _batchnorm(p), *made)


def batchnorm_vector(p: BatchNormProblem) -> int:
    """Elements in an access of its kernels."""
    return native.cpu.batchnorm_vector(_batchnorm(p))


def batchnorm_streamed(p: BatchNormProblem) -> bool:
    """Whether two_read's backward may walk through a ring (cuda/batchnorm/stream.cuh), by its layout and size."""
    return native.cpu.batchnorm_streamed(_batchnorm(p))


def batchnorm_teams(op: str, p: BatchNormProblem, width: int, device: Device) -> tuple[int, int]:
    """resident_team with tiles of `width` bytes: (CTAs that the device runs at once, groups of channels for them)."""
    return native.cpu.batchnorm_teams(op, _batchnorm(p), width, *capability(device), device.sm_count)


@functools.lru_cache(maxsize=4096)
def _pool(p: PoolProblem) -> Any:
    def three(values: Any, fill: int) -> list[int]:
        return [fill] * (3 - p.nd) + [int(v) for v in values]

    extents = [three(values, 1) for values in (p.in_spatial, p.window, p.out_spatial, p.stride)]
    pads = three([low for low, _ in p.padding], 0)
    return native.cpu.PoolProblem(p.batch, p.channels, *extents, pads, three(p.dilation, 1), p.dtype)


def pool_refusal(plan: Plan, p: PoolProblem) -> str | None:
    """conv_refusal of a max-pooling and its gradient."""
    return native.cpu.pool_refusal(_pool(p), plan.kernel) or None


def avg_pool_refusal(plan: Plan, p: PoolProblem) -> str | None:
    """conv_refusal of an average-pooling and its gradient."""
    return native.cpu.avg_pool_refusal(_pool(p), plan.kernel) or None


def conv_shortcut_refusal(plan: Plan, p: ShortcutConvProblem, device: Device) -> str | None:
    """conv_refusal of a convolution with a shortcut, channels last as its kernel reads them."""
    conv, shortcut = (_conv(dataclasses.replace(q, name="", channels_last=True)) for q in (p.conv.bare(), p.shortcut))
    made = plan.kernel, plan.tile, plan.splits, plan.chunk, *capability(device), device.sm_count
    return native.cpu.conv_shortcut_refusal(conv, shortcut, *made) or None


def conv_pooled_refusal(plan: Plan, p: PooledConvProblem, device: Device) -> str | None:
    """conv_refusal of a convolution with the max-pooling of its result behind it."""
    made = plan.kernel, plan.tile, plan.splits, plan.chunk, *capability(device), device.sm_count
    types = p.x_dtype or p.dtype, p.y_dtype or p.dtype
    return native.cpu.conv_pooled_refusal(_conv(p.conv), p.activation.name, _pool(p.pool), *types, *made) or None


def pool_vector(p: PoolProblem) -> int:
    """Elements in an access of its kernels."""
    return native.cpu.pool_vector(_pool(p))


@functools.lru_cache(maxsize=4096)
def _groupnorm(p: GroupNormProblem) -> Any:
    shape = p.batch or 1, p.images, p.pixels, p.channels, p.groups
    return native.cpu.GroupNormProblem(*shape, p.activation.name, p.dtype)


def groupnorm_refusal(op: str, plan: Plan, p: GroupNormProblem, device: Device) -> str | None:
    """conv_refusal of a group-norm."""
    made = plan.kernel, plan.tile, plan.splits, plan.chunk, *capability(device), device.sm_count
    return native.cpu.groupnorm_refusal(op, _groupnorm(p), *made) or None


def groupnorm_workspace(op: str, plan: Plan, p: GroupNormProblem) -> int:
    """Bytes."""
    return native.cpu.groupnorm_workspace(op, _groupnorm(p), plan.kernel, plan.tile, plan.splits, plan.chunk)


def groupnorm_unit(p: GroupNormProblem) -> int:
    """Bytes of the narrowest tile of "resident", 0 where there is none."""
    return native.cpu.groupnorm_unit(_groupnorm(p))


def groupnorm_vector(p: GroupNormProblem) -> int:
    """Elements in an access of its kernels."""
    return native.cpu.groupnorm_vector(_groupnorm(p))


def groupnorm_rows(p: GroupNormProblem) -> int:
    """Pixels that a block takes in a step."""
    return native.cpu.groupnorm_rows(_groupnorm(p))


@functools.lru_cache(maxsize=4096)
def _squeeze_excite(p: SqueezeExciteProblem) -> Any:
    return native.cpu.SqueezeExciteProblem(p.images, p.pixels, p.channels, p.hidden, p.dtype)


def squeeze_excite_refusal(plan: Plan, p: SqueezeExciteProblem, device: Device) -> str | None:
    """conv_refusal of a squeeze-and-excitation and its gradient."""
    made = plan.kernel, plan.tile, plan.splits, plan.chunk, *capability(device), device.sm_count
    return native.cpu.squeeze_excite_refusal(_squeeze_excite(p), *made) or None


def squeeze_excite_vector(p: SqueezeExciteProblem) -> int:
    """Elements in an access of its kernel."""
    return native.cpu.squeeze_excite_vector(_squeeze_excite(p))


def squeeze_excite_cta(plan: Plan, p: SqueezeExciteProblem, device: Device) -> tuple[int, int, int, int]:
    """(images of a cluster, steps of a CTA, those of them that stay in shared memory, bytes of it)."""
    made = plan.kernel, plan.tile, plan.splits, plan.chunk, *capability(device), device.sm_count
    return native.cpu.squeeze_excite_cta(_squeeze_excite(p), *made)

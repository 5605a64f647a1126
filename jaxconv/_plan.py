"""Every choice: problem x device -> Plan, with the reason. Nothing else in the project chooses.

A plan is data. It is made when a call is lowered, printed by `explain`, and carried out by native code, which confirms
but does not choose. With `implementation=None` a problem goes to XLA unless native code was measured to be faster.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from typing import Any

import jax
import numpy as np

from jaxconv import _native, _tuning
from jaxconv._problem import BatchNormProblem, ConvBatchNormProblem, ConvProblem, DenseProblem

Problem = ConvProblem | DenseProblem | BatchNormProblem

# op -> the group that JAXCONV_DISABLE names
OPS = {
    "conv": "conv",
    "conv_statistics": "conv",
    "conv_fprop": "conv",
    "conv_dgrad": "conv",
    "conv_dgrad_add": "conv",
    "conv_wgrad": "conv",
    "dense": "dense",
    "matmul": "dense",
    "batchnorm_train": "batchnorm",
    "batchnorm_infer": "batchnorm",
    "batchnorm_backward": "batchnorm",
}


@dataclasses.dataclass(frozen=True)
class Device:
    platform: str  # "cpu", "cuda", ...
    kind: str = ""  # "NVIDIA H200"; empty when lowering for a device that is not here
    compute_capability: tuple[int, int] | None = None
    sm_count: int = 132  # multiprocessors
    partitioned: bool = False  # XLA partitions the program over devices and cannot be told how to split our calls

    @classmethod
    @functools.cache
    def current(cls, platform: str) -> Device:
        """The first device of `platform` in this process, or an unknown one of that platform."""
        if platform == "cpu":
            return cls("cpu", "cpu")
        try:
            device = jax.devices(platform)[0]
        except RuntimeError:
            return cls(platform)
        capability = getattr(device, "compute_capability", None)
        return cls(
            platform,
            device.device_kind,
            tuple(map(int, capability.split("."))) if capability else None,
            getattr(device, "core_count", None) or 132,
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    implementation: str  # "native", "xla", or "calls": of kernels that have plans of their own
    reason: str
    algorithm: str = ""
    tile: str = ""
    splits: int = 1
    chunk: int = 0
    workspace_bytes: int = 0
    # The arrays are channels first and the kernel reads channels last: XLA is asked for that physical layout
    asks_channels_last: bool = False
    # The result takes the addend's place in memory
    in_place: bool = False

    def attrs(self) -> dict[str, Any]:
        """As native code reads it (common/plan.h)."""
        return {
            "algorithm": self.algorithm,
            "tile": self.tile,
            "splits": np.int64(self.splits),
            "chunk": np.int64(self.chunk),
        }

    def __str__(self) -> str:
        if self.implementation != "native":
            return self.implementation + (f"[{self.algorithm}]" if self.algorithm else "")
        parts = [self.algorithm, self.tile, f"splits={self.splits}" if self.splits > 1 else ""]
        parts += ["channels-last" if self.asks_channels_last else "", "in place" if self.in_place else ""]
        return "native[" + " ".join(p for p in parts if p) + "]"


def disabled(op: str) -> bool:
    """Whether JAXCONV_DISABLE (a comma-separated list of conv, dense, batchnorm, or all) names the op."""
    names = {name.strip() for name in os.environ.get("JAXCONV_DISABLE", "").split(",")}
    return bool(names & {OPS[op], op, "all"})


def plan(op: str, problem: Any, device: Device) -> Plan:
    """The plan for `op` on `device`; ValueError where a forced choice cannot run, with the reason."""
    if op == "conv_batchnorm":
        return _plan_conv_batchnorm(problem, device)
    if op == "batchnorm_given":
        return Plan("calls", "the statistics are given: what is left is inference, and the running statistics' update")
    if op == "conv_dgrad_add":
        return _plan_dgrad_add(problem, device)
    forced = problem.algorithm is not None or problem.implementation == "native"
    if problem.implementation == "xla":
        return Plan("xla", "implementation='xla' was asked for")
    if disabled(op):
        return Plan("xla", f"JAXCONV_DISABLE={os.environ['JAXCONV_DISABLE']}")
    if _empty(problem):
        return Plan("xla", "there is nothing to compute")
    missing = _native.missing(device.platform) or _device_refusal(problem, device)
    if missing:
        if forced:
            raise ValueError(f"{problem.name}: {_asked(problem)} cannot run: {missing}")
        return Plan("xla", missing)
    if problem.algorithm is not None:
        refusal = supports(op, problem.algorithm, problem, device)
        if refusal:
            raise ValueError(f"{problem.name}: {_asked(problem)} cannot run {op} of {problem}: {refusal}")
        return _fill(op, problem.algorithm, problem, device, f"algorithm='{problem.algorithm}' was asked for")
    if device.partitioned and not forced:
        return Plan("xla", "XLA partitions its own operations over devices; it would gather for a custom call")
    algorithm, reason = _fastest(op, problem, device)
    if algorithm is not None:
        return _fill(op, algorithm, problem, device, reason)
    if forced:
        algorithm = _ladder(op, problem, device)
        refusal = supports(op, algorithm, problem, device)
        if refusal:
            raise ValueError(f"{problem.name}: {_asked(problem)} cannot run {op} of {problem}: {refusal}")
        return _fill(op, algorithm, problem, device, "implementation='native' was asked for")
    return Plan("xla", reason)


def _plan_conv_batchnorm(problem: ConvBatchNormProblem, device: Device) -> Plan:
    """One read of the convolution's result, where its statistics leave the convolution with it, or two calls."""

    def two(why: str) -> Plan:
        return Plan("calls", f"a convolution, then a batch-norm: {why}", "two")

    p = problem.conv
    if p.implementation == "xla":
        return two("implementation='xla' was asked for")
    if disabled("conv_statistics") or disabled("batchnorm_train"):
        return two(f"JAXCONV_DISABLE={os.environ['JAXCONV_DISABLE']}")
    if _empty(p):
        return two("there is nothing to compute")
    missing = _native.missing(device.platform) or _device_refusal(p, device)
    if missing or device.partitioned:
        return two(missing or "on a mesh each is split by a rule of its own")
    if p.algorithm is not None:
        algorithm, reason = p.algorithm, f"algorithm='{p.algorithm}' was asked for"
    elif p.implementation == "native":
        algorithm, reason = _ladder("conv_statistics", p, device), "implementation='native' was asked for"
    else:
        algorithm, reason = _fastest("conv_statistics", p, device)
        if algorithm is None:
            return two(reason)
    refusal = supports("conv_statistics", algorithm, p, device)
    return two(f"no statistics from {algorithm}: {refusal}") if refusal else Plan("calls", reason, "statistics")


def _plan_dgrad_add(p: ConvProblem, device: Device) -> Plan:
    """A dgrad that adds on its way, or two calls: the dgrad has a plan of its own then."""

    def two(why: str) -> Plan:
        return Plan("calls", f"a dgrad, then an add: {why}", "two")

    bare = plan("conv_dgrad", p, device)
    if p.implementation == "xla" or disabled("conv_dgrad_add") or _empty(p):
        return two(bare.reason)
    if device.platform == "cpu":
        forced = p.algorithm is not None or p.implementation == "native"
        return bare if forced else two("XLA's add is as fast as any")
    if bare.implementation == "native" and bare.algorithm != "wgmma":
        return two(f"only wgmma adds on its way, and {bare.algorithm} is the dgrad's: {bare.reason}")
    missing = _native.missing(device.platform) or _device_refusal(p, device)
    refusal = missing or supports("conv_dgrad_add", "wgmma", p, device)
    if refusal:
        return two(f"wgmma cannot add here: {refusal}")
    reason = bare.reason
    if bare.implementation != "native":
        if device.partitioned:
            return two(reason)
        faster, reason = _adds_faster(p, device)
        if not faster:
            return two(reason)
    return _fill("conv_dgrad_add", "wgmma", p, device, f"{reason}; c is added on its way")


def _adds_faster(p: ConvProblem, device: Device) -> tuple[bool, str]:
    """Whether wgmma with an addend beats XLA's dgrad and its add, from the bare dgrads' measured times."""
    measured = _tuning.nearest("conv_dgrad", p, device.kind)
    if measured is None or "wgmma" not in measured.native_ms:
        return False, f"no dgrad by wgmma near it was measured on {device.kind or 'the device'}"
    # A pass over dx of the problem that was measured, at the rate at which memory copies.
    pixels, group_c, _, groups = measured.coordinates
    strides = math.prod(p.stride)
    one = 2.0 ** (pixels + group_c + groups) * strides * _itemsize(p) / COPY_BYTES_PER_MS
    # In place it writes only what a tap reaches, and that it also reads.
    own = 2 * p.reached - 1 if strides > 1 else 1
    ratio = (measured.xla_ms + 3 * one) / (measured.native_ms["wgmma"] + own * one)
    text = f"{ratio:.2f} times as fast as XLA's dgrad and add would be at {measured.case}, the nearest case measured"
    return ratio > _tuning.MARGIN, f"wgmma with its addend {text}"


def _asked(problem: Problem) -> str:
    return f"algorithm='{problem.algorithm}'" if problem.algorithm else "implementation='native'"


def _known(extent: Any) -> bool:
    """Whether an extent is a number (and not a symbolic dimension of jax.export)."""
    return isinstance(extent, (int, np.integer))


def _empty(problem: Problem) -> bool:
    if isinstance(problem, ConvProblem):
        extents: tuple[Any, ...] = (problem.batch,)
    elif isinstance(problem, DenseProblem):
        extents = (problem.m, problem.n, problem.k, problem.batch)
    else:
        extents = problem.x_shape
    return any(_known(extent) and extent == 0 for extent in extents)


def _device_refusal(problem: Problem, device: Device) -> str | None:
    if isinstance(problem, BatchNormProblem) and problem.masked:
        return "masked statistics are XLA's, and it fuses what follows them"
    if device.platform == "cuda":
        if problem.dtype == "float64":
            return "float64 has no native CUDA kernels"
        if device.compute_capability is not None and device.compute_capability < (8, 0):
            return f"the CUDA kernels need compute capability 8.0, {device.kind} has {device.compute_capability}"
    if isinstance(problem, DenseProblem):
        extents: tuple[Any, ...] = (problem.m, problem.k, problem.n, problem.batch or 1)
    else:
        extents = problem.x_shape
    if not all(map(_known, extents)):
        return "the batch extent is symbolic: native plans need a number"
    return None


# ----------------------------------------------------------------------------------------------------------------------
# What each algorithm can run: None, or the reason why not. native code states the same limits in its headers.


MATRIX_LOOPS = ("wgmma", "implicit_gemm")  # convolutions that run patches folded (ConvProblem.folded)


def supports(op: str, algorithm: str, problem: Problem, device: Device) -> str | None:
    """None if `algorithm` can run `op` of `problem` on `device`, else a sentence."""
    if isinstance(problem, ConvProblem):
        return _conv_supports(op, algorithm, problem, device)
    if isinstance(problem, BatchNormProblem):
        return _batchnorm_supports(op, algorithm, problem, device)
    return _wgmma_dense_refusal(problem, device) if algorithm == "wgmma" else None


def _conv_supports(op: str, algorithm: str, p: ConvProblem, device: Device) -> str | None:
    if op == "conv_statistics":
        if device.platform == "cuda" and algorithm != "wgmma":
            return "only wgmma's epilogue sums up what it writes"
        if device.platform == "cpu" and p.dtype not in ("float32", "float64"):
            return "the CPU rounds to 16 bits only behind the call, and statistics are those of what was rounded"
    if op == "conv_dgrad_add":
        refusal = _conv_supports("conv_dgrad", algorithm, p, device)
        return refusal or (_addend_refusal(algorithm, p, device) if device.platform == "cuda" else None)
    if algorithm == "depthwise" and not p.depthwise:
        return f"it needs one input channel per group, got groups={p.groups} for {p.in_channels} channels"
    if device.platform != "cuda":
        return "it exists on CUDA only" if algorithm in CHANNELS_LAST_ONLY else None
    p = _in_memory(algorithm, p)
    if algorithm == "stem":
        return _stem_refusal(op, p, device)
    if algorithm in MATRIX_LOOPS:
        p = p.folded(op == "conv_dgrad")
    if algorithm == "wgmma":
        return _wgmma_conv_refusal(op, p, device)
    if algorithm == "grouped":
        if _shared_memory(device) < 163 * 1024:
            return "its largest tiles need the shared memory of compute capability 8.0 or 9.0"
        return _grouped_refusal(p, device)
    reach = (*p.in_spatial, *p.out_spatial, *p.stride, *(abs(v) for pair in p.padding for v in pair))
    if max(*reach, *((f - 1) * d for f, d in zip(p.filter, p.dilation, strict=True))) >= 2**30:
        return "its coordinates must stay below 2^30"
    if algorithm == "implicit_gemm":
        rows = p.batch * max(math.prod(p.in_spatial), math.prod(p.out_spatial))
        depth = math.prod(p.filter) * max(p.in_channels, p.out_channels)
        if max(rows, depth) >= 2**31 - 4096:
            return f"it needs fewer than 2^31 pixels and filter elements per channel, got {rows} and {depth}"
    return None


CHANNELS_LAST_ONLY = ("wgmma", "implicit_gemm", "grouped", "stem")


def _in_memory(algorithm: str, p: ConvProblem) -> ConvProblem:
    """The problem as the CUDA kernel finds it in memory: channels last where that is what it asks XLA for.

    XLA computes every convolution channels last on a GPU, whatever the arrays' order: a kernel's neighbours have it so.
    The depthwise kernels read either order, and channels last faster if vectors of channels fit.
    """
    vector = 16 // _itemsize(p)
    fits = p.in_channels % vector == p.out_channels % vector == 0
    if algorithm in CHANNELS_LAST_ONLY or (algorithm == "depthwise" and fits):
        return dataclasses.replace(p, channels_last=True)
    return p


def _grouped_refusal(p: ConvProblem, device: Device) -> str | None:
    """cuda/conv/grouped/grouped.h: few channels a group, on tensor cores or (float32) by FMAs."""
    group_c, group_k = p.in_channels // p.groups, p.out_channels // p.groups
    if p.dtype == "float32":
        rows = _grouped_tile(p, device) == "rows"
        needs = "compute capability 9.0, a 3x3 filter of stride 1 or 2, and 4, 8 or 16 channels a group on both sides"
        return None if rows else f"in float32 it needs {needs}"
    if p.dtype not in ("bfloat16", "float16"):
        return f"it needs float32, bfloat16 or float16, got {p.dtype}"
    few = all(c % 4 == 0 and 4 <= c <= 32 for c in (group_c, group_k))
    if not few or p.in_channels % 8 or p.out_channels % 8:
        return f"it needs 4, 8, ... 32 channels a group and a multiple of 8 in all, got {group_c} and {group_k} a group"
    if p.nd == 3 and (p.filter[0], p.stride[0], p.padding[0]) != (1, 1, (0, 0)):
        return "it needs a first axis (of three) that the filter leaves alone"
    plane = range(p.nd)[-2:]
    if any(p.stride[i] > 2 or p.filter[i] > 7 or (p.filter[i] - 1) * p.dilation[i] > 16 for i in plane):
        return "it needs strides up to 2, filters up to 7 and dilated filters up to 17"
    return None


def _stem_refusal(op: str, p: ConvProblem, device: Device) -> str | None:
    """cuda/conv/stem/stem.h: few input or few output channels, on tensor cores."""
    if _shared_memory(device) < 163 * 1024:
        return "its largest tiles need the shared memory of compute capability 8.0 or 9.0"
    if p.groups > 1 or min(p.in_channels, p.out_channels) > 8:
        return f"it needs at most 8 input or output channels in one group, got {p.in_channels} and {p.out_channels}"
    few_in = p.in_channels <= 8  # else few outputs
    expands = op in ("conv", "conv_fprop") if few_in else op == "conv_dgrad"
    if p.full_float32 and p.dtype == "float32":
        return "float32 it takes as TF32 only"
    if p.nd == 3 and (p.filter[0], p.stride[0], p.padding[0]) != (1, 1, (0, 0)):
        return "it needs a first axis (of three) that the filter leaves alone"
    plane = range(p.nd)[-2:]
    if not few_in and any(p.stride[i] > 1 for i in plane):
        return "few output channels it takes with stride 1 only"
    if any(p.stride[i] > 16 or (p.filter[i] - 1) * p.dilation[i] > 32 for i in plane):
        return "it needs strides up to 16 and dilated filters up to 33"
    many = p.out_channels if few_in else p.in_channels
    few = p.in_channels if few_in else p.out_channels
    if expands:
        taps = math.prod(p.filter)
        units = taps * -(-few // (8 // _itemsize(p)))
        return None if units <= 160 else f"it needs at most 160 taps in fours of channels, got {units}"
    if many % 8:
        return f"it needs a multiple of 8 channels on the other side, got {many}"
    if op == "conv_wgrad":
        return None
    columns = math.prod(p.stride[i] for i in plane) * few
    if columns > 64 and _patches(op, p):
        return _wgmma_dense_refusal(p.patch_product(), device)
    if columns > 64:
        return f"it needs strides times channels of at most 64, got {columns}"
    places = 1
    for i in plane:
        f, s, d, low = p.filter[i], p.stride[i], p.dilation[i], p.padding[i][0]
        shifts = {phase - t * d + low for phase in range(s) for t in range(f)}
        count = len({shift // s for shift in shifts if shift % s == 0})
        if count > 16:
            return "it needs filters of at most 16 taps an axis"
        places *= count
    operand = -(-many * _itemsize(p) // 128) * places * (16 if columns <= 16 else 64) * 128
    return None if operand <= 80 * 1024 else f"its filter would need {operand} bytes of shared memory, it has 81920"


def _patches(op: str, p: ConvProblem) -> bool:
    """Whether stem runs dgrad as a matrix product whose elements are those of dx: in 16 bit, a filter of few input
    channels that steps by its own extents, and has too many columns for the kernel that sums over taps."""
    steps = all(p.steps_by_filter(axis) for axis in range(p.nd)[-2:])
    many = p.in_channels <= 8 and math.prod(p.filter) * p.in_channels > 64
    return op == "conv_dgrad" and steps and many and _itemsize(p) == 2


def _wgmma_refusal(p: ConvProblem | DenseProblem, device: Device) -> str | None:
    if device.platform != "cuda" or device.compute_capability != (9, 0):
        return "it needs a GPU of compute capability 9.0"
    if p.dtype == "float64":
        return "it needs float32, bfloat16 or float16, got float64"
    return None


def _wgmma_conv_refusal(op: str, p: ConvProblem, device: Device) -> str | None:
    """cuda/conv/sm90/conv_sm90.h: what the copy engine can walk."""
    refusal = _wgmma_refusal(p, device)
    if refusal:
        return refusal
    group_c, group_k = p.in_channels // p.groups, p.out_channels // p.groups
    if group_c % 8 or group_k % 8:
        return f"it needs multiples of 8 channels a group, got {group_c} and {group_k}"
    dgrad, strided = op == "conv_dgrad", math.prod(p.stride) > 1
    gathered = [group_k] + [group_c] * strided if dgrad else [group_c]
    if p.groups > 1 and any(c % 64 for c in gathered):
        return f"with groups it needs multiples of 64 channels a group, got {group_c} and {group_k}"
    taps = math.prod(p.filter)
    rows = p.batch * max(math.prod(p.in_spatial), math.prod(p.out_spatial))
    terms = 3 if p.dtype == "float32" else 1  # a coordinate counts those of all terms
    if terms * max(rows, taps * max(p.in_channels, p.out_channels)) >= 2**31 - 4096:
        return f"it needs fewer than 2^31 / {terms} pixels and filter elements per channel"
    if op == "conv_statistics" and p.dtype == "float32":
        return "its epilogue sums up bfloat16 and float16 results only"
    if op == "conv_statistics" and -(-group_k // 64) * p.groups > device.sm_count:
        return f"with statistics a multiprocessor must have a column of tiles of its own, got {p.out_channels} channels"
    if p.pointwise and (p.dtype != "float32" or op not in ("conv_dgrad", "conv_wgrad")):
        return None
    corner, reach = {1: (32768, 65535), 2: (128, 255), 3: (16, 31)}[p.nd]
    for size, f, out, s, d, (low, high) in zip(
        p.in_spatial, p.filter, p.out_spatial, p.stride, p.dilation, p.padding, strict=True
    ):
        window = (f - 1) * d
        if dgrad:
            walked = max(abs(low), abs(high), abs(window - low), abs(window - high)) < corner - 2
        else:
            walked = s <= 8 and all(-corner <= c < corner for c in (-low, (out - 1) * s - low + 1 - size))
        if window >= reach or not walked:
            return "its padding, stride or dilated filter is beyond the copy engine's range"
    return "it needs strides of at most 8 together" if dgrad and math.prod(p.stride) > 8 else None


def _addend_refusal(algorithm: str, p: ConvProblem, device: Device) -> str | None:
    """cuda/conv/sm90/conv_sm90.h: what takes an addend."""
    if algorithm != "wgmma":
        return "only wgmma adds on its way"
    if p.dtype == "float32":
        return "in float32 it takes no addend"
    tile = wgmma_conv_tile("conv_dgrad", _in_memory(algorithm, p).folded(True), device)
    return None if tile in ADDEND_TILES else f"its tile here, {tile}, takes no addend"


def _wgmma_dense_refusal(p: DenseProblem, device: Device) -> str | None:
    """cuda/dense/sm90.h."""
    refusal = _wgmma_refusal(p, device)
    if refusal:
        return refusal
    if p.addend and p.dtype == "float32":
        return "in float32 it takes no addend"
    if p.trans_x and p.trans_w:
        return "it does not take both operands transposed"
    if p.n % 8 or (p.m if p.trans_x else p.k) % 8 or (p.k if p.trans_w else p.n) % 8:
        return "it needs rows of x, w and y of a multiple of 8 elements"
    if p.dtype == "float32" and not p.full_float32 and p.k % 8:
        return f"in TF32 it needs K to be a multiple of 8, got {p.k}"
    return None


def _banded(p: ConvProblem) -> bool:
    """Whether the depthwise kernels run on tensor cores (cuda/conv/depthwise/depthwise.h)."""
    r, dilation_r = (p.filter[-2], p.dilation[-2]) if p.nd > 1 else (1, 1)
    flat = p.nd < 3 or (p.filter[0], p.padding[0]) == (1, (0, 0))
    return (
        p.dtype in ("bfloat16", "float16")
        and p.channels_last
        and p.in_channels == p.out_channels
        and p.in_channels % 8 == 0
        and all(s == 1 for s in p.stride)
        and flat
        and (dilation_r == 1 or r == 1)
        and r <= 41
        and (p.filter[-1] - 1) * p.dilation[-1] <= 40
    )


def _square(p: ConvProblem, extents: tuple[int, ...], stride: int = 1, dilated: bool = False) -> bool:
    """Whether the filter is a square of one of `extents`, of `stride`, padded by less than its reach, over two axes (a
    first axis of three may be left alone), and of dilation 1 unless it may be `dilated`."""
    alone = p.nd == 2 or (p.nd == 3 and (p.filter[0], p.stride[0], p.padding[0]) == (1, 1, (0, 0)))
    plane = zip(p.filter[-2:], p.dilation[-2:], p.padding[-2:], strict=True)
    return (
        alone
        and p.filter[-1] == p.filter[-2]
        and p.filter[-1] in extents
        and all(s == stride for s in p.stride[-2:])
        and (dilated or all(d == 1 for d in p.dilation))
        and all(0 <= v <= (f - 1) * d for f, d, pair in plane for v in pair)
    )


def _along_a_line(p: ConvProblem) -> bool:
    """Whether the filter is 2 to 4 taps along one axis, of stride 1, and leaves the other axes alone."""
    taps = [f for f in p.filter if f > 1]
    alone = all(pair == (0, 0) for f, pair in zip(p.filter, p.padding, strict=True) if f == 1)
    near = max(p.dilation) < 2**26
    return len(taps) == 1 and taps[0] <= 4 and alone and near and all(s == 1 for s in p.stride)


def _band_rows(op: str, p: ConvProblem) -> tuple[int, int]:
    """Rows of all strips of cuda/conv/depthwise/rows_mma.cuh, and pixels of a strip's images.

    A strip is 16 runs of 8 columns, of one image or of several side by side.
    """
    height = (p.out_spatial if op == "conv_fprop" else p.in_spatial)[-2]
    width = (p.in_spatial if op == "conv_dgrad" else p.out_spatial)[-1]
    runs = -(-width // 8)
    strips = -(-runs // 16)
    images = 16 // -(-runs // strips)
    return -(-p.batch * math.prod(p.in_spatial[:-2]) // images) * strips * height, images * height * width


MOST_ROW_DILATION = {3: 18, 5: 6, 7: 6}  # along W, by filter: cuda/conv/depthwise/rows.cuh


def _depthwise_tile(op: str, p: ConvProblem, device: Device) -> str:
    """What cuda/conv/depthwise/depthwise.h calls "rows", "bands", "lines", "planes", or "": its other kernels."""
    whole = p.channels_last and p.in_channels * _itemsize(p) % 16 == 0
    if p.in_channels != p.out_channels:
        few = p.out_channels // p.in_channels in (2, 4, 8) and _square(p, (3,))
        return "rows" if few and whole and device.compute_capability == (9, 0) else ""
    if whole and _along_a_line(p):
        return "lines"
    if p.channels_last and _square(p, (3, 5, 7), dilated=True) and max(p.dilation[-2:]) > 1:
        few = p.dilation[-1] <= MOST_ROW_DILATION[p.filter[-1]]
        return "rows" if few and whole and device.compute_capability == (9, 0) else ""
    if not (_square(p, (3, 5, 7)) or (_square(p, (3,), 2) and p.channels_last)):
        return ""
    if not p.channels_last:
        small = max(p.in_spatial[-1], p.out_spatial[-1]) <= 224
        return "planes" if small and (op != "conv_wgrad" or p.nd == 2) else ""
    if device.compute_capability != (9, 0) or not whole:
        return ""
    if p.filter[-1] == 3 or p.dtype == "float32":
        return "rows"
    # 25 or 49 FMAs an output are more than a tensor core's products with bands: 64x56x56x96 7x7 in bf16 takes .036 ms
    # in bands and .074 in rows, 1x56x56x96 .011 and .015 (H200).
    return "bands" if max(_band_rows(op, p)) < 2**30 else ""


def _grouped_tile(p: ConvProblem, device: Device) -> str:
    """ "rows" or "" (cuda/conv/grouped/grouped.h)."""
    few = p.in_channels == p.out_channels and p.in_channels // p.groups in (4, 8, 16)
    square = _square(p, (3,)) or _square(p, (3,), 2)
    return "rows" if few and square and device.compute_capability == (9, 0) else ""


def _batchnorm_supports(op: str, algorithm: str, p: BatchNormProblem, device: Device) -> str | None:
    if device.platform != "cuda":
        return None if algorithm == "two_read" else "it exists on CUDA only"
    if p.reduced >= 2**31:
        return f"it needs fewer than 2^31 elements per channel, got {p.reduced}"
    if op == "batchnorm_infer" and algorithm != "two_read":
        return "inference is a single pass"
    if algorithm == "resident_team" and p.inner > 1 and p.inner < 16 // _itemsize(p):
        return f"it reads 16 bytes at a time: images have {p.inner} elements, fewer than {16 // _itemsize(p)}"
    if algorithm == "resident_team" and p.inner == 1 and _batchnorm_vector(p) == 1:
        return f"it reads 16 bytes at a time: {p.channels} channels are no multiple of {16 // _itemsize(p)}"
    if algorithm == "resident_block":
        itemsize, vector = _itemsize(p), _batchnorm_vector(p)
        held = 2 if op == "batchnorm_backward" else 1
        positions = p.reduced // (vector if p.inner > 1 else 1)
        lanes = 1 if p.inner > 1 else min(2, p.channels // vector)
        needed = held * (positions * lanes + 512) * vector * itemsize + 12288
        if needed > _shared_memory(device):
            return f"a block would need {needed} bytes of shared memory, the device has {_shared_memory(device)}"
    return None


def _itemsize(p: Problem) -> int:
    return {"float64": 8, "float32": 4}.get(p.dtype, 2)


def _batchnorm_vector(p: BatchNormProblem) -> int:
    """Elements in an access: 16 bytes where the fastest axis divides into them."""
    vector = 16 // _itemsize(p)
    return 1 if (p.inner if p.inner > 1 else p.channels) % vector else vector


def _shared_memory(device: Device) -> int:
    """Bytes a block can have (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability")."""
    major, minor = device.compute_capability or (8, 6)
    kib = 227 if major in (9, 10) else 163 if (major, minor) in ((8, 0), (8, 7)) else 99
    return kib * 1024


def _ladder(op: str, problem: Problem, device: Device) -> str:
    """The native algorithm for a problem nobody has measured."""
    if isinstance(problem, DenseProblem):
        return "gemm"
    if isinstance(problem, BatchNormProblem):
        # Blocks read images that 16 bytes do not divide an element at a time.
        whole = problem.inner == 1 or _batchnorm_vector(problem) > 1
        resident = ("resident_block", "resident_team") if whole else ("resident_team", "resident_block")
        return next((a for a in resident if supports(op, a, problem, device) is None), "two_read")
    if op == "conv_statistics" and device.platform == "cuda":
        return "wgmma"
    if problem.depthwise and problem.groups > 1:
        return "depthwise"
    if device.platform == "cpu":
        return "im2col"
    if problem.groups > 1 and supports(op, "grouped", problem, device) is None:
        return "grouped"
    # Filters that large are patches, which are long matrix products.
    small = math.prod(problem.filter) <= 64 or _patches(op, problem)
    if small and supports(op, "stem", problem, device) is None:
        return "stem"
    # The direct kernels take what the tensor-core loop refuses.
    return "implicit_gemm" if supports(op, "implicit_gemm", problem, device) is None else "direct"


# ----------------------------------------------------------------------------------------------------------------------
# implementation=None: what was measured to be faster than XLA


def _fastest(op: str, problem: Problem, device: Device) -> tuple[str | None, str]:
    """(the native algorithm that beats XLA, why), or (None, why XLA)."""
    if device.platform == "cpu":
        return _fastest_on_cpu(op, problem, device)
    if isinstance(problem, BatchNormProblem) and problem.activation.name == "none" and not problem.residual:
        # Alone the native kernel may win; in a model XLA joins its normalisation with the add or activation behind it
        # and its sums with the mask before it, and a custom call would cost these a pass of their own.
        return None, "XLA fuses a bare normalisation with its neighbours; native code needs activation= or residual="
    if isinstance(problem, BatchNormProblem) and problem.inner > 1:
        # Alone it may win; between convolutions it was 1.2 times slower than XLA's, bf16 and float32, by the copies.
        return (
            None,
            "convolutions leave channels last in memory; native code takes arrays as they lie and would copy",
        )
    measured = _tuning.nearest(op, problem, device.kind)
    if measured is None:
        return None, f"nothing near it was measured on {device.kind or 'the device'}"
    algorithm, ratio = measured.best
    if not measured.wins:
        return None, f"native code reached {ratio:.2f} of XLA's speed at {measured.case}, the nearest case measured"
    refusal = supports(op, algorithm, problem, device)
    if isinstance(problem, ConvProblem) and not _in_memory(algorithm, problem).channels_last:
        refusal = "the arrays are channels first in memory"
    if refusal:
        return None, f"{algorithm} is {ratio:.2f} times faster at {measured.case}, but here {refusal}"
    return algorithm, f"{ratio:.2f} times faster than XLA at {measured.case}, the nearest case measured"


def _fastest_on_cpu(op: str, problem: Problem, device: Device) -> tuple[str | None, str]:
    if op == "conv_statistics":
        return None, "on the CPU its statistics cost a pass over its result, inside the call or behind it"
    if problem.dtype in ("float32", "float64") and isinstance(problem, ConvProblem):
        if problem.depthwise and problem.groups > 1:
            return "depthwise", "XLA's CPU depthwise convolutions are 10 times slower"
        if problem.groups > 1:
            times = "a hundred times slower" if op == "conv_wgrad" else "4 to 8 times slower"
            return "im2col", f"XLA's CPU grouped convolutions are {times}"
        if op == "conv_wgrad":
            return "im2col", "XLA's CPU weight gradients are 2.6 to 4.4 times slower than the matrix product they are"
    return None, "XLA is at the processor's limit"


# ----------------------------------------------------------------------------------------------------------------------
# Filling in tiles, splits and workspace. The formulas for the workspace are those of the headers in cuda/.

COPY_BYTES_PER_MS = 4.3e9  # of an H200's memory
COLUMNS_BYTES = 256 * 2**20  # of im2col columns held at a time
PARTIALS_BYTES = 256 * 2**20  # of float32 partial sums


def _fill(op: str, algorithm: str, problem: Problem, device: Device, reason: str) -> Plan:
    plan = Plan("native", reason, algorithm)
    if op == "conv_dgrad_add":
        op = "conv_dgrad"
        plan = dataclasses.replace(plan, in_place=math.prod(problem.stride) > 1)
    if device.platform == "cpu":
        return plan  # the CPU code owns its scratch
    if isinstance(problem, DenseProblem):
        return _fill_dense(plan, problem, device)
    if isinstance(problem, BatchNormProblem):
        return _fill_batchnorm(op, plan, problem, device)
    return _fill_conv(op, plan, problem, device)


def _tile(m: int, n: int, instances: int, vector: bool) -> str:
    """The largest tile that still gives most multiprocessors of a large GPU something to do, no wider than n.

    What cannot be read 16 bytes at a time (not `vector`) has one tile.
    """
    enough = 96
    if not vector:
        return "64x64"

    def ctas(rows: int, columns: int) -> int:
        return -(-m // rows) * -(-n // columns) * instances

    if n > 64 and m > 64 and ctas(128, 128) >= enough:
        return "128x128"
    return "128x64" if m > 64 and ctas(128, 64) >= enough else "64x64"


def _extent(tile: str) -> tuple[int, int]:
    rows, columns = tile.rstrip("srp").split("x")
    return int(rows), int(columns)


def _splits(work: int, blocks: int, device: Device, waves: int, least: int, bytes_each: int) -> int:
    """Parts of a reduction over `work` elements: `waves` blocks a multiprocessor, each part at least `least` long."""
    wanted = -(-waves * device.sm_count // max(blocks, 1))
    return max(1, min(wanted, work // least, PARTIALS_BYTES // max(bytes_each, 1), 65535))


def _fill_conv(op: str, plan: Plan, p: ConvProblem, device: Device) -> Plan:
    stored = _in_memory(plan.algorithm, p)
    plan, p = dataclasses.replace(plan, asks_channels_last=stored.channels_last and not p.channels_last), stored
    if plan.algorithm in MATRIX_LOOPS:
        p = p.folded(op == "conv_dgrad")
    item, taps, pixels = _itemsize(p), math.prod(p.filter), math.prod(p.out_spatial)
    group_c, group_k = p.in_channels // p.groups, p.out_channels // p.groups
    filter_elements = p.out_channels * group_c * taps
    wgrad = op == "conv_wgrad"
    if plan.algorithm == "im2col":
        column = p.in_channels * taps * pixels  # elements for one image
        chunk = max(1, min(p.batch, COLUMNS_BYTES // (column * item)))
        size = _align(chunk * column * (4 if op == "conv_dgrad" else item))
        splits = 1
        if wgrad:
            splits = min(chunk, _splits(chunk, -(-filter_elements // 128**2), device, 2, 1, filter_elements * 4))
            size += splits * filter_elements * 4
        elif p.channels_last:
            size += _align(filter_elements * item)
        return dataclasses.replace(plan, chunk=chunk, splits=splits, workspace_bytes=size)
    if plan.algorithm == "wgmma":
        return _fill_wgmma_conv(op, plan, p, device)
    if plan.algorithm == "implicit_gemm":
        vector = group_k * item % 16 == 0
        if not wgrad:
            spatial = p.in_spatial if op == "conv_dgrad" else p.out_spatial
            phases = math.prod(p.stride) if op == "conv_dgrad" else 1
            rows = p.batch * math.prod(spatial) // phases
            return dataclasses.replace(
                plan, tile=_tile(rows, group_c if op == "conv_dgrad" else group_k, p.groups * phases, vector)
            )
        m, n = taps * group_c, group_k
        tile = "64x64" if m <= 64 or not vector else "128x128" if n > 64 else "128x64"
        rows, columns = _extent(tile)
        blocks = -(-m // rows) * -(-n // columns) * p.groups
        splits = _splits(p.batch * pixels, blocks, device, 2, 256, filter_elements * 4)
        size = splits * filter_elements * 4 if splits > 1 else 0
        return dataclasses.replace(plan, tile=tile, splits=splits, workspace_bytes=size)
    if plan.algorithm == "stem" and _patches(op, p):
        product = p.patch_product()
        tile, _ = wgmma_dense_tile(product, device)
        size = _align(product.m * product.n * item) + wgmma_workspace("dense", product, tile, 1)
        return dataclasses.replace(plan, tile=tile, workspace_bytes=size)
    if plan.algorithm == "depthwise":
        plan = dataclasses.replace(plan, tile=_depthwise_tile(op, p, device))
    elif plan.algorithm == "grouped":
        plan = dataclasses.replace(plan, tile=_grouped_tile(p, device))
    if not wgrad:
        return plan
    if plan.algorithm == "stem":
        # Persistent blocks, two of which fit a multiprocessor; one owns 64 units (8 bytes of channels at a
        # tap; 128 in float32) x 64 channels, or half as many x 128.
        few, many = sorted((group_c, group_k))
        units = taps * -(-few // (8 // item))
        blocks = -(-units // (32 * item)) * -(-many // (64 if units > 16 * item else 128))
        splits = _splits(p.batch * pixels, blocks, device, 2, 256, filter_elements * 4)
        return dataclasses.replace(plan, splits=splits, workspace_bytes=splits * filter_elements * 4)
    if plan.tile == "planes":
        # A warp owns as many planes as give its lanes 7 columns each; twelve warps fit a multiprocessor.
        planes = 32 // -(-p.out_spatial[-1] // 7)
        blocks, work, least, waves = -(-p.out_channels // planes), p.batch, 1, 12
    elif plan.tile == "bands":
        # A block owns 32 channels; one fits a multiprocessor.
        blocks, work, least, waves = -(-p.out_channels // 32), _band_rows(op, p)[0], 4, 1
    elif plan.tile == "lines":
        # A block owns 32 vectors of channels; two fit a multiprocessor.
        blocks, work, least, waves = -(-p.out_channels * item // 512), p.batch * pixels, 256, 2
    elif plan.tile == "rows":
        # One block fits a multiprocessor, two of 4 or 8 channels a group in 16 bit; of stride 2 one of them is faster
        # than two with half as many rows each.
        grouped, half = plan.algorithm == "grouped", p.dtype != "float32"
        if max(p.dilation[-2:]) > 1:
            slab = 128 if p.filter[-1] == 3 and p.dilation[-1] <= 4 else 64
        else:
            slab = (64 if half else 32) if grouped else 256 if p.filter[-1] == 3 else 128
        blocks = -(-p.out_channels // slab)
        two = grouped and half and group_c < 16 and p.stride[-1] == 1
        work, least, waves = p.batch * p.out_spatial[-2], 4, 2 if two else 1
    elif plan.algorithm == "grouped":
        # Two blocks fit a multiprocessor; a tile is about 256 pixels.
        blocks = -(-p.groups // max(1, 32 // max(group_c, group_k)))
        work, least, waves = -(-p.batch * pixels // 256), 1, 2
    elif plan.algorithm == "depthwise" and _banded(p):
        r = p.filter[-2] if p.nd > 1 else 1
        long = (p.filter[-1] - 1) * p.dilation[-1] > 8
        blocks = -(-r // 7) * -(-p.out_channels // (8 if long else 16))
        # A tile is about 500 pixels. Measured on an H200: 3 parts a multiprocessor for filters of up to 3 rows, 2 for
        # more; one too many costs up to a quarter.
        work, least, waves = -(-p.batch * pixels // 500), 1, 1 if long else 3 if r <= 3 else 2
    elif plan.algorithm == "depthwise":
        waves = 4
        wide = p.channels_last and p.groups == p.out_channels and p.in_channels % (16 // item) == 0
        vector = 16 // item if wide else 1
        tile = {4: 32, 1: 64}.get(vector, 16) if p.channels_last else 1
        blocks = -(-(p.out_channels // vector) // tile)
        blocks *= -(-math.prod(p.filter[:-1]) // 4)
        work, least = p.batch * math.prod(p.out_spatial[:-1]) * -(-p.out_spatial[-1] // 4), 64
    else:  # direct: a block owns 4096 elements of dw
        waves = 4
        columns = min(64, max(8, 1 << (group_k - 1).bit_length()))
        blocks = -(-group_c * taps // (4096 // columns)) * -(-group_k // columns) * p.groups
        work, least = p.batch * pixels, 64
    # No block (or warp) more than fit: a second wave doubles the time.
    if plan.tile in ("rows", "bands", "lines", "planes"):
        splits = max(1, min(waves * device.sm_count // blocks, work // least))
    else:
        splits = _splits(work, blocks, device, waves, least, filter_elements * 4)
    return dataclasses.replace(plan, splits=splits, workspace_bytes=splits * filter_elements * 4 if splits > 1 else 0)


# In 16 bit. Names in cuda/gemm/sm90_product.h: rows x columns of a CTA's outputs. "256x128s" has the filter on the
# tensor cores' rows. "halo" (cuda/conv/sm90/halo/halo.h) fetches a pixel once for all taps, "planes" (wgmma_planes.h) a
# plane of a volume once for all its neighbours; "128x128h" (wgmma_stream.h) keeps pixels while the filter passes.
# "64x256" is for few rows, "r": all of B's columns stay in shared memory (cuda/gemm/sm90_resident.cuh). "p": a pair of
# CTAs makes it, which fetch what they share once for both (cuda/conv/sm90/wgrad/wgrad.cuh); splits count pairs.
WGMMA_TILES = (
    *("128x256", "256x128", "128x128", "256x64", "256x128s", "128x320", "64x256", "halo", "planes", "128x128h"),
    *("128x64r", "64x256r"),
    *("256x256p", "256x128p", "128x256p", "256x64p", "64x256p"),
)
WGRAD_TILES = ("64x256", *(tile for tile in WGMMA_TILES if tile.endswith("p")))
SHARED_X = ("128x256p", "64x256p")  # pairs that share x, which the copy engine gives to both of a plain product only
RESIDENT_TILES = {"128x64r": (4, 128, 64), "64x256r": (2, 64, 256)}  # warpgroups; rows and columns of each
# Of a dgrad that adds on its way
ADDEND_TILES = ("128x256", "256x128", "128x128", "256x64", "128x320", "128x64r", "64x256r")
# Of dense; "64x128" has parts of K (cuda/gemm/sm90_rows.cuh).
WGMMA_DENSE_TILES = (
    *("128x256", "256x128", "128x128", "256x64", "256x128s", "128x320"),
    *("64x128", "128x64r", "64x256r"),
)
# In TF32; a weight gradient's are cuda/conv/sm90/wgrad/wgrad_tf32.h's.
TF32_TILES = ("128x256", "128x128", "256x64", "halo")
TF32_WGRAD_TILES = ("halo", "256x128", "128x256", "256x64")
# Of float32 as terms. Weight gradients split their operands in memory before, or with 256 rows on their way; the rows
# of "s" are channels of dy.
TERMS_TILES = ("128x128", "128x64")
TERMS_WGRAD_TILES = (*TERMS_TILES, "256x128", "256x64", "256x64s")
TF32_HALO = (9 * 64, 64)


def wgmma_tile_refusal(op: str, tile: str, p: ConvProblem) -> str | None:
    """What only some tiles need: None, or why `tile` cannot run `op` of a problem that wgmma supports."""
    if p.dtype == "float32":
        if _terms(p) > 1:
            if tile not in (TERMS_WGRAD_TILES if op == "conv_wgrad" else TERMS_TILES):
                return "float32 does not have it"
            return "it needs a 1x1 convolution of stride 1" if tile == "256x64s" and not _plain(p) else None
        if tile not in (TF32_WGRAD_TILES if op == "conv_wgrad" else TF32_TILES):
            return "float32 does not have it"
        if op == "conv_wgrad":
            return _tf32_halo_refusal(p) if tile == "halo" else None
    if tile == "planes":
        return _planes_refusal(op, p)
    if tile == "128x128h":
        return _stream_refusal(op, p)
    if tile in WGRAD_TILES:
        if op != "conv_wgrad":
            return "only weight gradients have it"
        return "it needs a 1x1 convolution of stride 1" if tile in SHARED_X and not _plain(p) else None
    if op == "conv_wgrad" and tile in ("256x128", "128x128"):
        return "weight gradients do not have it"
    if tile in RESIDENT_TILES:
        if op == "conv_wgrad" or not _plain(p):
            return "it needs a 1x1 convolution of stride 1, and not its weight gradient"
        c, k = p.in_channels // p.groups, p.out_channels // p.groups
        return resident_refusal(tile, *((c, k) if op == "conv_dgrad" else (k, c)), p.groups)
    if tile != "halo":
        return None
    group_c, group_k = p.in_channels // p.groups, p.out_channels // p.groups
    summed, made = (group_k, group_c) if op == "conv_dgrad" else (group_c, group_k)
    if math.prod(p.stride) != 1 or summed > 64 or (p.groups > 1 and (summed != 64 or made % 64)):
        return "it needs stride 1 and at most 64 summed channels, with groups 64"
    taps, reach, pitch = math.prod(p.filter), 0, 1
    for size, out, f, d, (low, high) in reversed(
        list(zip(p.in_spatial, p.out_spatial, p.filter, p.dilation, p.padding, strict=True))
    ):
        if op == "conv_dgrad":
            size, out, low, high = out, size, (f - 1) * d - low, (f - 1) * d - high
        if low < 0:
            return "it takes no negative padding"
        reach += (f - 1) * d * pitch
        pitch *= max(size + max(low, high), out)
    if pitch * p.batch >= 2**31 - 4096:
        return "it needs fewer than 2^31 pixels and gaps"

    def buffer(places: int) -> int:
        return (places + reach + 7) // 8 * 8 * 128

    if op == "conv_wgrad":
        if p.filter[-2:] != (3, 3) or taps != 9:
            return "it needs a 3x3 filter"
        needed = 2 * (buffer(128) + 128 * 128) + 128
    else:
        if taps > 16:
            return "it takes at most 16 taps"
        if p.dtype == "float32":
            needed = taps * (2 if summed > 32 else 1) * 8192 + 2 * buffer(128) + 64
        else:
            needed = taps * 8192 + 2 * buffer(256) + 8192 + 128
    return "its pixels do not fit shared memory" if needed > 227 * 1024 else None


def _tf32_halo_places(p: ConvProblem) -> int:
    """Pixels and gaps of the line of a halo tile in TF32, MakeTf32Halo in cuda/conv/sm90/conv_sm90.cc."""
    places = p.batch
    for size, out, f, d, (low, _) in zip(p.in_spatial, p.out_spatial, p.filter, p.dilation, p.padding, strict=True):
        places *= max(size + low, out + (f - 1) * d - low, out)
    return places


def _tf32_halo_refusal(p: ConvProblem) -> str | None:
    """MakeTf32Halo in cuda/conv/sm90/conv_sm90.cc, and what fits shared memory beside dy."""
    if p.filter[-2:] != (3, 3) or math.prod(p.filter[:-2]) > 3 or math.prod(p.stride) != 1 or p.dilation[-1] != 1:
        return "it takes up to 3 planes of 3x3 taps, stride 1, no dilation along rows"
    if any(low < 0 for low, _ in p.padding):
        return "it takes no negative padding"
    if 3 * _tf32_halo_places(p) >= 2**31 - 4096:  # with the planes that the last ones read
        return "it needs fewer than 2^31 pixels and gaps"
    size, out, (low, _) = p.in_spatial[-1], p.out_spatial[-1], p.padding[-1]
    reach = 2 * (p.dilation[-2] * max(size + low, out + 2 - low) + 1)
    slots = (227 * 1024 - (192 * 256 + 4 * 8192) - 768) // 256 // 32
    return "its pixels do not fit shared memory" if slots < -(-(64 + reach) // 32) else None


def _planes_refusal(op: str, p: ConvProblem) -> str | None:
    """cuda/conv/sm90/halo_3d/halo_3d.h."""
    if p.nd != 3 or math.prod(p.stride) != 1 or p.groups != 1 or p.filter[0] != 3 or p.dilation[0] != 1:
        return "it needs three axes, stride 1, one group and three planes of taps, not dilated"
    extents = list(zip(p.in_spatial, p.out_spatial, p.filter, p.dilation, p.padding, strict=True))
    if op == "conv_dgrad":
        extents = [(o, i, f, d, ((f - 1) * d - low, (f - 1) * d - high)) for i, o, f, d, (low, high) in extents]
    (_, planes, _, _, (ahead, _)), (height, rows, r, dil_r, pad_r), (width, columns, s, dil_s, pad_s) = extents
    if ahead > 2 or pad_r[0] < 0 or pad_s[0] < 0:
        return "it takes no negative padding, and padding of planes below 3"
    pitch = max(width + max(pad_s), columns)
    row, column = dil_r * pitch, dil_s
    if p.batch * planes * max(height + max(pad_r), rows + 400) * pitch >= 2**30:
        return "it needs fewer than 2^30 pixels and gaps"
    if op == "conv_wgrad":
        if p.filter != (3, 3, 3):
            return "it needs a 3x3x3 filter"
        tiles = -(-(rows * pitch + 2 * column) // 384)
        last = -(-tiles * 384 // pitch)
        if last + 2 * dil_r + 2 - pad_r[0] - height >= 16 or last + 1 - rows >= 16 or 2 * column > pitch:
            return "its rows are too short, or too few for their padding"
        x, dy = (-(-(384 + reach) // 16) * 16 for reach in (2 * (row + column), 2 * column))
        fits = x <= 1024 and (3 * x + 3 * dy) * 64 + 2176 <= 227 * 1024
        return None if fits else "its planes do not fit shared memory"
    summed = p.out_channels if op == "conv_dgrad" else p.in_channels
    if summed > 64 or r * s > 16:
        return "it takes at most 64 summed channels and 16 taps in a plane"
    if max(*pad_r, *pad_s) >= 16:
        return "it takes less than 16 of padding"
    place = 32 if summed <= 16 else 64 if summed <= 32 else 128  # bytes
    x = -(-(256 + (r - 1) * row + (s - 1) * column) * place // 1024) * 1024
    fits = x <= 1024 * place and r * s * 96 * place + 2 * x + 256 <= 227 * 1024
    return None if fits else "its planes do not fit shared memory"


def _stream_refusal(op: str, p: ConvProblem) -> str | None:
    """cuda/conv/sm90/halo_stream/halo_stream.h."""
    strided = math.prod(p.stride) > 1
    if p.nd > 2 or p.groups != 1 or op not in ("conv", "conv_fprop", "conv_dgrad") or (strided and op != "conv_dgrad"):
        return "it needs at most two axes, one group and stride 1, or a dgrad"
    if math.prod(p.filter) > 32:
        return "it takes at most 32 taps"
    summed = p.out_channels if op == "conv_dgrad" else p.in_channels
    reach, places, pitch = 0, p.batch, 1
    for size, out, f, d, s, (low, high) in reversed(
        list(zip(p.in_spatial, p.out_spatial, p.filter, p.dilation, p.stride, p.padding, strict=True))
    ):
        if op == "conv_dgrad":  # at most; a phase of a strided dgrad reads less
            size, out, low, high = out, -(-size // s), (f - 1) * d - low, (f - 1) * d - high
            window = -(-((f - 1) * d + max(-low, 0)) // s)
            low = -(-max(low, 0) // s)
            extent = max(size + low + max(-(-high // s), 0), out)
        elif low < 0:
            return "it takes no negative padding"
        else:
            window, extent = (f - 1) * d, max(size + max(low, high), out)
        reach += window * pitch
        pitch *= extent
        places *= extent
    if places >= 2**31 - 4096:
        return "it needs fewer than 2^31 pixels and gaps"
    rows, blocks = -(-(128 + reach) // 8) * 8, -(-summed // 64)
    fits = rows <= 1024 and blocks <= 12 and blocks * rows * 128 + 3 * 2 * 8192 + 1024 <= 227 * 1024
    return None if fits else "its pixels do not fit shared memory"


def _plain(p: ConvProblem) -> bool:
    """A convolution that is a matrix product as it lies."""
    return p.pointwise and set(p.stride) == {1}


def resident_refusal(tile: str, n: int, k: int, instances: int) -> str | None:
    """Shared memory: all of k for a tile's columns, 16 KiB on their way out and two stages a warpgroup."""
    groups, rows, columns = RESIDENT_TILES[tile]
    needed = -(-k // 64) * columns * 128 + groups * 16384 + 2 * groups * rows * 128
    if needed > 226 * 1024:
        return f"its columns need {needed} bytes of shared memory"
    return "it has at most 64 columns of tiles" if -(-n // columns) * instances > 64 else None


def _resident_tile(rows: int, n: int, k: int, instances: int, device: Device) -> str | None:
    """The tile of a product that moves bytes, as measured on an H200."""
    tile = "128x64r" if n <= 64 else "64x256r"
    _, height, width = RESIDENT_TILES[tile]
    tiles = -(-rows // height) * -(-n // width) * instances
    # Columns that the last tile computes for nothing matter less than the epilogues of other tiles where k is short:
    # 24 to 144 channels 56x56 at batch 256 take .087 ms (128x128: .177), 96 to 576 at 14x14 .0227 (.0248).
    waste = -(-n // width) * width / n
    fits = resident_refusal(tile, n, k, instances) is None and (n <= 64 or waste <= (1.8 if k <= 96 else 1.25))
    return tile if fits and tiles >= 8 * device.sm_count else None


def _wgmma_time(
    tile: str, rows: int, columns: int, steps: int, instances: int, saves_z: bool, device: Device, shows: float
) -> float:
    """How long a product takes, in any unit, from what an H200 did (docs/performance.md): waves of tiles, and what of
    the epilogue shows. The groups of 128x128 take turns, which hides it behind 9 steps; the others show `shows`."""
    m, n = _extent(tile)
    waves = -(-(-(-rows // m) * -(-columns // n) * instances) // device.sm_count)
    if tile == "128x128":
        return waves * m * n * max(1.03 * steps, 12 if saves_z else 9)
    return waves * m * n * (0.98 * steps + shows)


def wgmma_conv_tile(op: str, p: ConvProblem, device: Device) -> str:
    """As measured on an H200 (docs/performance.md)."""
    taps, group_c, group_k = math.prod(p.filter), p.in_channels // p.groups, p.out_channels // p.groups
    dgrad = op == "conv_dgrad"
    n, summed = (group_c, group_k) if dgrad else (group_k, group_c)
    if _terms(p) > 1:
        return _terms_wgrad_tile(p) if op == "conv_wgrad" else "128x64" if n <= 64 else "128x128"
    if op == "conv_wgrad" and p.dtype == "float32":
        return _tf32_wgrad_tile(p)
    few = max(n, summed) <= 64 and (op == "conv_wgrad" or min(n, summed) <= 32)
    if p.nd == 3 and taps > 9 and few and wgmma_tile_refusal(op, "planes", p) is None:
        return "planes"
    halo = summed > 16 if p.dtype != "float32" else summed > 32 and n <= 64
    if halo and taps > 1 and wgmma_tile_refusal(op, "halo", p) is None:
        return "halo"
    rows = p.batch * math.prod(p.in_spatial if dgrad else p.out_spatial)
    plain = _plain(p) and p.dtype != "float32"
    if plain and op != "conv_wgrad":
        tile = _resident_tile(rows, n, summed, p.groups, device)
        if tile:
            return tile
    pair = _pair_tile(p, device) if op == "conv_wgrad" and taps == 1 else None
    if pair:
        return pair
    if n <= 64:
        return "256x64"
    # The phases of a strided dgrad share their pixels, and 128 channels are too few to hide a tile's loads: worth some
    # gaps between rows and images.
    gaps = math.prod(1 + max(pads) / size for size, pads in zip(p.in_spatial, p.padding, strict=True))
    loads = max(n, summed) <= 128 and taps > 4 and gaps < 1.04
    shares = taps > 1 if dgrad and math.prod(p.stride) > 1 else loads
    if shares and summed > 64 and wgmma_tile_refusal(op, "128x128h", p) is None:
        return "128x128h"
    if op == "conv_wgrad":
        if taps * -(-group_c // 64) == 1:
            return "64x256"
        wide = -(-n // 320) * 320 < -(-n // 256) * 256
        if taps == 1 and n >= 256 and not wide:  # 256 of the side that has fewer channels
            return "128x256" if plain and (group_c <= 128 or group_c > n) else "256x128s"
        return "128x320" if wide else "256x128s" if n < 256 else "128x256"
    steps = taps * -(-summed * _itemsize(p) // 128)
    if steps <= 9 or (dgrad and math.prod(p.stride) > 1):
        return "128x128"
    wide = (["128x256", "256x128s"] if plain else ["256x128s", "128x256"]) if n > 128 else ["256x128s"]
    if p.dtype == "float32":
        wide = ["128x256"] * (n > 128)
    elif n > 256:
        wide.append("128x320")
    saves_z = op == "conv" and p.save_preactivation

    def time(tile: str) -> float:
        return _wgmma_time(tile, rows, n, steps, p.groups, saves_z, device, 2 if saves_z else 0.5)

    return min([*wide, "128x128"], key=time)


def _pair_tile(p: ConvProblem, device: Device) -> str | None:
    """The pair of CTAs for a 1x1's weight gradient in 16 bit, as measured on an H200: one whose second tile is not
    empty, and that cuts the reduction into so many parts that small sums pay."""
    c, k, least = p.in_channels, p.out_channels, 4
    if not _plain(p):
        tile, least = "256x256p", 16
    elif k <= 64:
        tile = "256x64p"
    elif c <= 64:
        tile = "64x256p"
    else:
        tile = "256x128p" if k <= 128 else "128x256p"
    rows, columns = -(-c // _extent(tile)[0]), -(-k // _extent(tile)[1])
    used = c * k >= 0.8 * rows * columns * math.prod(_extent(tile))
    return tile if p.groups == 1 and used and device.sm_count // 2 >= least * rows * columns else None


def _tf32_wgrad_tile(p: ConvProblem) -> str:
    """As measured on an H200: a halo tile takes 1550 cycles for 32 places, 256x128 takes 1620 for 32 pixels. The other
    two are for few rows or columns."""
    group_k, pixels = p.out_channels // p.groups, p.batch * math.prod(p.out_spatial)
    blocks = math.prod(p.filter) * -(-p.in_channels // p.groups // 64)
    other = "256x64" if group_k <= 64 else "128x256" if blocks <= 2 and group_k > 128 else "256x128"
    halo = 1550 * _tf32_halo_places(p) * _wgrad_tiles("halo", p)
    worth = halo < (1000 if group_k <= 64 else 1620) * pixels * _wgrad_tiles(other, p)
    return "halo" if worth and wgmma_tile_refusal("conv_wgrad", "halo", p) is None else other


def _terms_wgrad_tile(p: ConvProblem) -> str:
    """As measured on an H200. The tiles with 256 rows split x and dy on their way, slower than products of terms in
    memory, which cost 10 bytes an element: that pays where there are few operations an element."""
    group_c, group_k = p.in_channels // p.groups, p.out_channels // p.groups
    narrow = group_k <= 64
    if p.flops >= (470 if narrow else 675) * (math.prod(p.x_shape) + math.prod(p.y_shape)):
        return "128x64" if narrow else "128x128"
    if _plain(p) and group_c <= 64 < group_k:
        return "256x64s"
    return "256x64" if narrow else "256x128"


def _wgrad_tiles(tile: str, p: ConvProblem) -> int:
    taps, blocks, group_k = math.prod(p.filter), -(-p.in_channels // p.groups // 64), p.out_channels // p.groups
    if tile == "halo":
        return math.prod(p.filter[:-2]) * blocks * -(-group_k // TF32_HALO[1]) * p.groups
    rows, columns = _extent(tile)
    if tile == "256x64s":
        return -(-group_k // rows) * -(-p.in_channels // p.groups // columns) * p.groups
    return -(-taps * blocks * 64 // rows) * -(-group_k // columns) * p.groups


def _fill_wgmma_conv(op: str, plan: Plan, p: ConvProblem, device: Device) -> Plan:
    if op == "conv_statistics":
        # (mean, M2) in float32 of each channel in at most so many parts, and the parts' sizes
        parts = min(2 * -(-p.batch * math.prod(p.out_spatial) // 128), 512)
        steps = math.prod(p.filter) * -(-p.in_channels // p.groups // 64)
        tile = _statistics_tile(p, steps, device)
        return dataclasses.replace(plan, tile=tile, workspace_bytes=parts * (8 * p.out_channels + 4))
    tile = wgmma_conv_tile(op, p, device)
    if op != "conv_wgrad":
        return dataclasses.replace(plan, tile=tile, workspace_bytes=wgmma_workspace(op, p, tile, 1))
    x, y = math.prod(p.x_shape), math.prod(p.y_shape)
    group_k = p.out_channels // p.groups
    sms = device.sm_count // (2 if tile.endswith("p") else 1)  # or pairs of them
    if tile == "halo" and p.dtype != "float32":
        blocks = -(-group_k // 64) * p.groups
        splits = max(sms // blocks, 1)  # CTAs a block
        return dataclasses.replace(plan, tile=tile, splits=splits, workspace_bytes=blocks * splits * 9 * 64 * 64 * 4)
    if tile == "planes":
        blocks = -(-p.in_channels // 32) * -(-p.out_channels // 32)
        splits = max(sms // blocks, 1)
        return dataclasses.replace(plan, tile=tile, splits=splits, workspace_bytes=blocks * splits * 3 * 20 * 128 * 16)
    tiles = _wgrad_tiles(tile, p)
    aligned = tiles * (sms // tiles) if tiles <= sms else 0
    traffic = _itemsize(p) * (x + y)
    # CTAs that share all tiles' work evenly. A number that the tiles divide keeps a part within a tile; it wins unless
    # it leaves too many multiprocessors idle (less so where x and dy do not stay in the L2 cache). In TF32 6 % are.
    whole = aligned >= (0.95 if p.dtype == "float32" and not p.full_float32 else 0.85) * sms or (
        traffic > 72 * 2**20 and aligned >= sms // 2 and p.dtype != "float32"
    )
    splits = aligned if whole else sms
    size = wgmma_workspace(op, p, tile, splits)
    return dataclasses.replace(plan, tile=tile, splits=splits, workspace_bytes=size)


def _statistics_tile(p: ConvProblem, steps: int, device: Device) -> str:
    """As measured on an H200. Every multiprocessor has one column of tiles, which it shares with others."""
    group_k, rows = p.out_channels // p.groups, -(-p.batch * math.prod(p.out_spatial) // 128)
    if group_k <= 64:
        return "256x64"

    def tiles(columns: int) -> int:  # of the busiest multiprocessor
        return -(-rows // (device.sm_count // (-(-group_k // columns) * p.groups)))

    wide = group_k > 128 and steps > 1 and -(-group_k // 128) * p.groups <= device.sm_count
    return "128x256" if wide and 2 * tiles(256) <= tiles(128) else "128x128"


def _terms(p: ConvProblem | DenseProblem) -> int:
    """bfloat16 terms that stand for an operand (cuda/gemm/sm90_operands.h); 1: it is read as it is, or as TF32."""
    if p.dtype != "float32":
        return 1
    return 3 if p.full_float32 else 1


def wgmma_workspace(op: str, p: ConvProblem | DenseProblem, tile: str, splits: int) -> int:
    """Bytes: partial sums, and what stands for float32 operands (cuda/conv/sm90/conv_sm90.h, cuda/dense/sm90.h)."""
    if isinstance(p, DenseProblem) and tile == "64x128":
        return splits * (p.batch or 1) * p.m * p.n * 4
    size = 0
    if splits > 1:
        size = 2 * splits * math.prod(TF32_HALO if tile == "halo" else _extent(tile)) * 4
    if p.dtype != "float32":
        return size
    x, w = math.prod(p.x_shape), math.prod(p.w_shape)
    terms = _terms(p)
    if isinstance(p, DenseProblem):
        copied = [w] if terms > 1 else [x] * p.trans_x + [w] * (not p.trans_w)
    elif op == "conv_wgrad":
        copied = [x, math.prod(p.y_shape)] if terms > 1 and tile in TERMS_TILES else []
    elif terms > 1:
        copied = [w]
    else:
        copied = [] if op == "conv_dgrad" else [w]
    return size + sum(_align((2 * terms if terms > 1 else 4) * count) for count in copied)


def _align(size: int) -> int:
    return -(-size // 256) * 256


def wgmma_dense_tile(p: DenseProblem, device: Device) -> tuple[str, int]:
    """(tile, parts of K), as measured on an H200 (docs/performance.md)."""
    if _terms(p) > 1:
        return "128x64" if p.n <= 64 else "128x128", 1
    steps, instances = -(-p.k * _itemsize(p) // 128), p.batch or 1
    if p.dtype != "float32" and not p.trans_x:
        # Few rows: parts of K, so that every multiprocessor fetches a share of w.
        parts = min(device.sm_count // max(-(-p.m // 64) * -(-p.n // 128) * instances, 1), steps // 4)
        if parts > 1:
            return "64x128", parts
        resident = _resident_tile(p.m, p.n, p.k, instances, device)
        if resident:
            return resident, 1
    if p.n <= 64:
        return "256x64", 1
    shows = 0.5 if p.dtype == "float32" else 1.7 if p.activation.name in ("none", "relu") else 4

    def time(tile: str) -> float:
        z = p.save_preactivation
        return _wgmma_time(tile, p.m, p.n, steps, instances, z, device, shows + (1.5 if z else 0))

    return min(("128x128", "128x256"), key=time), 1


def _fill_dense(plan: Plan, p: DenseProblem, device: Device) -> Plan:
    batch = p.batch or 1
    if plan.algorithm == "wgmma":
        tile, splits = wgmma_dense_tile(p, device)
        size = wgmma_workspace("dense", p, tile, splits)
        return dataclasses.replace(plan, tile=tile, splits=splits, workspace_bytes=size)
    runs = p.m if p.trans_x else p.k, p.k if p.trans_w else p.n  # elements, contiguous
    tile = _tile(p.m, p.n, batch, all(run * _itemsize(p) % 16 == 0 for run in runs))
    rows, columns = _extent(tile)
    blocks = -(-p.m // rows) * -(-p.n // columns) * batch
    outputs = batch * p.m * p.n
    # Splitting pays where the tiles leave most multiprocessors idle and the reduction is long.
    splits = 1 if 2 * blocks > device.sm_count else _splits(p.k, blocks, device, 1, 256, outputs * 4)
    return dataclasses.replace(
        plan, tile=tile, splits=splits, workspace_bytes=splits * outputs * 4 if splits > 1 else 0
    )


def _fill_batchnorm(op: str, plan: Plan, p: BatchNormProblem, device: Device) -> Plan:
    if plan.algorithm == "resident_team":
        return _fill_team(op, plan, p, device)
    if plan.algorithm != "two_read" or op == "batchnorm_infer":
        return plan
    item, vector, batch = _itemsize(p), _batchnorm_vector(p), p.batch or 1
    width = 256 if vector > 1 else 32 * item  # bytes of channels that a tile spans, channels last
    tiles = p.channels if p.inner > 1 else -(-p.channels * item // width)
    tile_bytes = p.reduced * item * p.channels // tiles
    splits = max(1, min(-(-8 * device.sm_count // (batch * tiles)), max(1, tile_bytes // 16384)))
    return dataclasses.replace(plan, splits=splits, workspace_bytes=(splits + 1) * 2 * batch * p.channels * 4)


@dataclasses.dataclass(frozen=True)
class _TeamLayout:
    """resident_team with `ctas` CTAs on a channel group of `width` bytes (cuda/batchnorm/team_launch.h)."""

    op: str
    problem: BatchNormProblem
    device: Device
    width: int
    ctas: int

    @staticmethod
    def together(op: str, p: BatchNormProblem, device: Device) -> int:
        """CTAs that run at once: two a multiprocessor, but for the kernels that take its registers alone."""
        alone = op == "batchnorm_backward" and p.inner == 1 and _itemsize(p) == 2 and p.activation.name != "relu"
        return device.sm_count * (1 if alone else 2)

    @property
    def row(self) -> int:
        """16-byte vectors of channels, channels last."""
        return self.problem.channels * _itemsize(self.problem) // 16

    @property
    def lanes(self) -> int:
        """Threads side by side across channels."""
        lanes = self.width // 16 if self.problem.inner == 1 else 1
        while lanes > 1 and lanes // 2 >= self.row:
            lanes //= 2
        return lanes

    @property
    def groups(self) -> int:
        p = self.problem
        return (p.batch or 1) * (-(-self.row // self.lanes) if p.inner == 1 else p.channels)

    @property
    def teams(self) -> int:
        return min(self.together(self.op, self.problem, self.device) // self.ctas, self.groups)

    @property
    def workspace_bytes(self) -> int:
        """Two rounds of a sum and a sum of squares, 8 bytes each, for each CTA and channel, and of their totals."""
        channels = self.lanes * _batchnorm_vector(self.problem) if self.problem.inner == 1 else 1
        return self.teams * (self.ctas + 1) * channels * 2 * 2 * 8


def _team_layout(op: str, p: BatchNormProblem, device: Device) -> _TeamLayout:
    """What came within 5% of the best of all layouts in nearly every benchmark case (H200)."""
    together = _TeamLayout.together(op, p, device)
    held = 2 if op == "batchnorm_backward" else 1

    def all_at_once(width: int, ctas: int = together) -> _TeamLayout:
        return _TeamLayout(op, p, device, width, max(1, ctas // _TeamLayout(op, p, device, width, 1).groups))

    if p.inner == 1:
        # All groups side by side, so that DRAM reads whole rows. Where there is little to read, fewer CTAs meet sooner.
        small = p.size * _itemsize(p) < 8 * 2**20
        return all_at_once(64, device.sm_count) if small else all_at_once(128)
    # A channel stays in the shared memory of its team but for a third, which the L2 cache has.
    room = _shared_memory(device) * device.sm_count // together - 8 * 1024
    enough = -(-p.reduced * _itemsize(p) * held * 10 // (14 * room))
    ctas = next((c for c in sorted(together // t for t in range(2, together + 1)) if c >= enough), together // 2)
    return max(all_at_once(128), _TeamLayout(op, p, device, 128, max(1, ctas)), key=lambda layout: layout.ctas)


def _fill_team(op: str, plan: Plan, p: BatchNormProblem, device: Device) -> Plan:
    layout = _team_layout(op, p, device)
    return dataclasses.replace(
        plan, tile=f"{layout.width}B", splits=layout.ctas, workspace_bytes=layout.workspace_bytes
    )

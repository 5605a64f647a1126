"""Convolutions: which of a family's kernels is taken, in the memory that it wants; which family on a CPU."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from types import ModuleType

from jaxconv._core.activations import CHEAP
from jaxconv._plan import (
    depthwise,
    direct,
    domain,
    grouped,
    im2col,
    implicit_gemm,
    in_place,
    measured,
    model,
    narrow,
    planes,
    sm90,
    stem,
    together,
    tuned,
)
from jaxconv._plan.plan import Device, Nearest, Plan, itemsize, known
from jaxconv._plan.planner import CUDA_ONLY, NO_SUCH_KERNEL, Features, Planner, calls, log2, plans_of
from jaxconv._problem import ConvProblem, family_of

FAMILIES: dict[str, ModuleType] = {
    "sm90": sm90,
    "implicit_gemm": implicit_gemm,
    "direct": direct,
    "depthwise": depthwise,
    "grouped": grouped,
    "stem": stem,
    "narrow": narrow,
    "im2col": im2col,
}
CHANNELS_LAST_ONLY = ("sm90", "implicit_gemm", "grouped", "stem", "narrow")


def in_memory(algorithm: str, p: ConvProblem) -> ConvProblem:
    """The problem as the CUDA kernel finds it in memory: channels last where that is what it asks XLA for.

    XLA computes every convolution channels last on a GPU, whatever the arrays' order: a kernel's neighbours have it so.
    """
    family = family_of(algorithm)
    last = family in CHANNELS_LAST_ONLY or (family == "depthwise" and depthwise.in_memory(p))
    return dataclasses.replace(p, channels_last=True) if last and not p.channels_last else p


class Conv(Planner):
    """fprop, alone or with what follows; dgrad; wgrad."""

    group = "conv"
    independent = (True, False, False, True)
    channels = slice(1, 3)
    families: Sequence[str] = tuple(FAMILIES)  # that have a kernel for the op
    of_others = NO_SUCH_KERNEL  # of the rest
    rounded_before = ""  # what of the op needs that y is rounded before the call ends, if anything does

    def made(self, algorithm: str, p: ConvProblem, device: Device) -> Plan | str:
        if device.platform != "cuda":
            return self._on_cpu(algorithm, p)
        name = family_of(algorithm)
        if name not in self.families:
            return self.of_others
        stored, family = in_memory(name, p), FAMILIES[name]
        why = NO_SUCH_KERNEL
        for wanted in family.wants(self.op, stored, device):
            if wanted.answers(algorithm):
                plan = self._planned(family, wanted, stored, p, device)
                if isinstance(plan, Plan):
                    return plan
                why = plan
        return why

    def _planned(
        self, family: ModuleType, wanted: Plan, stored: ConvProblem, p: ConvProblem, device: Device
    ) -> Plan | str:
        """What the family wants for p, which lies in memory as `stored`: the whole plan, or why the kernel refuses."""
        refused = getattr(family, "refusal", domain.conv_refusal)(self.op, wanted, stored, device)
        if refused is not None:
            return refused
        workspace = getattr(family, "workspace", domain.conv_workspace)(self.op, wanted, stored)
        asks = stored.channels_last and not p.channels_last
        if (workspace, asks) == (wanted.workspace_bytes, wanted.asks_channels_last):
            return wanted
        return dataclasses.replace(wanted, workspace_bytes=workspace, asks_channels_last=asks)

    def _on_cpu(self, algorithm: str, p: ConvProblem) -> Plan | str:
        """The CPU code owns its scratch."""
        if self.rounded_before and p.dtype not in ("float32", "float64"):
            return f"on a CPU a call rounds to 16 bits only at its end, and {self.rounded_before}"
        if family_of(algorithm) in CHANNELS_LAST_ONLY or "/" in algorithm:
            return CUDA_ONLY
        if algorithm not in FAMILIES:
            return NO_SUCH_KERNEL
        if algorithm == "depthwise" and not p.depthwise:
            return f"it needs one input channel per group, got groups={p.groups} for {p.in_channels} channels"
        return Plan("native", "", algorithm)

    def every(self, p: ConvProblem, device: Device) -> Iterator[Plan]:
        """With the tile that each kernel wants most."""
        if device.platform != "cuda":
            yield from plans_of(self._on_cpu(family, p) for family in FAMILIES)
            return
        for name in self.families:
            stored, family = in_memory(name, p), FAMILIES[name]
            seen: set[str] = set()
            for wanted in family.wants(self.op, stored, device):
                plan = wanted.kernel if wanted.kernel in seen else self._planned(family, wanted, stored, p, device)
                if isinstance(plan, Plan):
                    seen.add(plan.kernel)
                    yield plan

    def tiles(self, p: ConvProblem, device: Device) -> Iterator[Plan]:
        if device.platform != "cuda":
            return self.every(p, device)
        specs: dict[str, None] = {}
        for name, family in FAMILIES.items():
            specs |= dict.fromkeys(wanted.spec for wanted in family.wants(self.op, in_memory(name, p), device))
        return plans_of(self.made(spec, p, device) for spec in specs)

    def first(self, p: ConvProblem, device: Device) -> str:
        def runs(family: str) -> bool:
            return isinstance(self.made(family, p, device), Plan)

        if p.depthwise and p.groups > 1:
            return "depthwise"
        if device.platform == "cpu":
            return "im2col"
        if p.groups > 1 and runs("grouped"):
            return "grouped"
        # Filters that large are patches, which are long matrix products.
        if (math.prod(p.filter) <= 64 or stem.patches(self.op, p, device)) and runs("stem"):
            return "stem"
        # The direct kernels take what the tensor-core loop refuses.
        return "implicit_gemm" if runs("implicit_gemm") else "direct"

    def empty(self, p: ConvProblem) -> bool:
        return known(p.batch) and p.batch == 0

    def within(self, p: ConvProblem) -> tuple[str, ConvProblem] | None:
        return (self.op, p) if self.op in ("conv", "conv_fprop", "conv_dgrad", "conv_wgrad") else None

    def nevertheless(self, p: ConvProblem, nearest: Nearest) -> str | None:
        return together.nevertheless(self.op, p, nearest) if self.within(p) is not None else None

    def spreads(self, kernel: str, p: ConvProblem) -> bool:
        """Whether fprop multiplies x by zeros that stand for other channels or columns: an infinity makes NaN in
        outputs whose windows do not hold it."""
        rule = getattr(FAMILIES[family_of(kernel)], "spreads", None)
        return self.op in ("conv", "conv_fprop", "conv_statistics") and rule is not None and rule(kernel, p)

    def speaks(self, kernel: str, p: ConvProblem) -> bool:
        return in_memory(kernel, p).channels_last

    def on_cpu(self, p: ConvProblem) -> tuple[str | None, str]:
        wgrad = self.op == "conv_wgrad"
        if p.depthwise and p.groups > 1 and math.prod(p.filter) == 1:
            return None, ELEMENTWISE
        if p.depthwise and p.groups > 1:
            return "depthwise", "XLA's depthwise convolutions are 10 times slower on a CPU"
        if p.groups > 1:
            if p.groups == 2 and not wgrad and p.dtype in ("bfloat16", "float16"):
                return None, "with 2 groups in 16 bits XLA is as fast: native code converts to float32 and back"
            times = "a hundred times slower" if wgrad else "2 to 8 times slower"
            return "im2col", f"XLA's grouped convolutions are {times} on a CPU"
        if not wgrad:
            return None, "XLA's convolutions without groups are as fast as the CPU allows"
        product = "native code computes a weight gradient as one matrix product"
        if (times := _faster_product(p)) is not None:
            return "im2col", f"{product}, at {times} XLA's speed on a Xeon"
        return None, f"{product}, at 0.1 to 8 times XLA's speed on a Xeon, so it may lose"

    def exception(self, p: ConvProblem, device: Device, forced: bool) -> Plan | None:
        """On a GPU products of elements by XLA. On a CPU a convolution by native code, and its activation by XLA where
        that costs more than a comparison or a clip."""
        if device.platform == "cuda" and not forced and self.op != "conv_wgrad" and elementwise(p):
            return self.instead(ELEMENTWISE)
        if self.op != "conv" or forced or device.platform != "cpu" or p.activation.name in CHEAP:
            return None
        algorithm, reason = self.on_cpu(p)
        two = calls("two", "a convolution, then its activation")
        return two(f"{reason}; {slow_activation(p)}") if algorithm else None

    def overruled(self, p: ConvProblem, device: Device, best: Plan | None) -> Plan | None:
        """A volume's first layer has its planes as channels where that was not measured near (docs/kernels/stem.md)."""
        why = planes.first_of_a_volume(self.op, p, device) if self.op in ("conv", "conv_fprop", "conv_wgrad") else None
        kernel = planes.kernel(p) if why else ""
        near = measured.nearest(self.op, p, device, kernel)
        if why is None or (near is not None and near.apart <= measured.FAR):
            return None
        plan = self.made(kernel, p, device)
        return dataclasses.replace(plan, reason=why) if isinstance(plan, Plan) else None

    def features(self, p: ConvProblem) -> Features:
        """Coordinates: pixels of y, C / groups, K / groups, groups."""
        group_c, group_k = p.in_channels // p.groups, p.out_channels // p.groups
        grouping = "none" if p.groups == 1 else "depthwise" if p.depthwise else "grouped"
        kind = (
            p.dtype,
            p.dtype == "float32" and p.full_float32,
            True,  # channels last in memory, whatever the arrays' order: XLA's convolutions and the kernels that win
            grouping,
            p.filter,
            p.stride,
            p.dilation,
            (p.in_channels if grouping == "depthwise" else group_c) % 8 == 0,
            (p.out_channels if grouping == "depthwise" else group_k) % 8 == 0,
        )
        pixels = p.batch * math.prod(p.out_spatial)
        return "conv_fprop" if self.op == "conv" else self.op, kind, log2(pixels, group_c, group_k, p.groups)


ELEMENTWISE = "with one tap it is an elementwise product, which XLA fuses with its neighbours"


def elementwise(p: ConvProblem) -> bool:
    """Whether an element of y is one of x times a number, a channel's own, at the same pixel."""
    one = (1,) * p.nd
    return p.depthwise and p.groups > 1 and p.out_channels == p.in_channels and p.filter == p.stride == one


def slow_activation(p: ConvProblem) -> str:
    """Why native code leaves an activation to XLA on a CPU, as a part of a sentence."""
    return f"XLA's {p.activation.name} is 3 to 20 times faster than native code's"


# Of a weight gradient on a CPU without groups, the products that beat XLA's. Of a filter of one tap from so many
# multiply-adds and pixels of all results; of at most so many taps from so many pixels of an image and of all results.
ONE_TAP, ONE_TAP_PIXELS = 1 << 23, 1024
FEW_TAPS, LARGE_IMAGE, LARGE_BATCH = 9, 2048, 6000


def _faster_product(p: ConvProblem) -> str | None:
    """How much faster than XLA's a native weight gradient without groups is on a CPU; None where it may be slower."""
    taps, pixels = math.prod(p.filter), p.batch * math.prod(p.out_spatial)
    if p.nd == 3:
        return "1.04 to 44 times"  # XLA's code for three axes is a plain loop
    if taps == 1:
        large = pixels >= ONE_TAP_PIXELS and pixels * p.in_channels * p.out_channels >= ONE_TAP
        return "1.2 to 4 times" if large else None
    large = taps <= FEW_TAPS and math.prod(p.in_spatial) >= LARGE_IMAGE and pixels >= LARGE_BATCH
    if p.dtype in ("bfloat16", "float16") and max(p.in_channels, p.out_channels) >= 32:
        large = False  # on an EPYC 0.7 to 1 times, conversions included
    return "1.1 to 4 times" if large else None


# ----------------------------------------------------------------------------------------------------------------------
# What stands behind a convolution


def pass_over_y(m: measured.Measurement, p: ConvProblem, device: Device) -> float:
    """Milliseconds to read or write y of the convolution that was measured, at the rate at which memory copies."""
    pixels, _, group_k, groups = m.coordinates
    rates = model.numbers(device) or model.NUMBERS["H200"]
    return 2.0 ** (pixels + group_k + groups) * itemsize(p) / rates.bandwidth


def fused_behind(p: ConvProblem, plan: Plan, device: Device) -> str | None:
    """Why a convolution whose neighbours nobody sees stays XLA's; None where `plan`, a kernel's, is taken all the same.

    XLA takes what stands behind its own convolution into it (a bias, a residual, an activation, a conversion), unless
    it is a 1x1, which is a matrix product to XLA. Behind a kernel of ours that is a pass of its own, or joins another
    one. So the kernel must win by a pass over y at the rate at which memory copies: that is what it costs on average
    where every second convolution has a residual behind it. Where nothing near was measured the plan stands.
    """
    free = device.platform == "cuda" and p.implementation is None and math.prod(p.filter) > 1
    own = tuned.entry("conv_fprop", p, device) if free else None
    if own is not None:
        return in_place.fused_behind(own)
    m = measured.nearest("conv_fprop", p, device, plan.kernel) if free else None
    if m is None:
        return None
    if m.xla_ms > m.native_ms[plan.kernel] + pass_over_y(m, p, device):
        return None
    speed = f"{m.ratio(plan.kernel):.2f} times as fast {m.where}"
    return f"{plan.kernel} was {speed}, too little to pay for a pass that XLA would fuse into its convolution"

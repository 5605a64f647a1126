"""A dgrad that adds on its way, or goes back through an activation, or sums up for the batch-norm in front; or more
calls."""

from __future__ import annotations

import dataclasses
import math

from jaxconv._plan import choose, conv, measured, model, tuned
from jaxconv._plan.plan import Device, Plan, itemsize
from jaxconv._plan.planner import CUDA_ONLY, asked, calls, disabled, disabled_text
from jaxconv._problem import ConvProblem

# The kernels that go back through no activation without reading `kept`
SUMS_ALONE = ("narrow/rows",)
# Bytes of an array from which on a batch-norm's backward pass reads memory: below, what dgrad's epilogue would save are
# reads of caches. An H200's L2 cache has 50 MiB.
LEAST_OF_SUMS = 64 << 20
# Where only the convolution reads the norm: 49 MiB were faster by a tenth on an H100.
LEAST_OF_NORMS = 48 << 20
# How many times as fast as two calls the kernels through a norm were on an H100: sums in 16 bits, the others in TF32
GAINS = {"sm90/sums": "1.06 to 1.13", "sm90/halo": "1.08 to 1.11", "sm90/product": "1.06 to 1.1"}
# The kernel whose bare dgrad's time is that of one with a batch-norm's sums, where it has another name
DGRAD_OF = {"sm90/sums": "sm90/resident"}


class DgradAdd(conv.Conv):
    """A dgrad that adds on its way, or two calls: the dgrad has a plan of its own then."""

    families = ("sm90", "narrow", "depthwise")
    of_others = "only sm90, narrow and depthwise/rows_mma can add to a dgrad"

    def within(self, p: ConvProblem) -> tuple[str, ConvProblem] | None:
        return "conv_dgrad", p.bare()

    def made(self, algorithm: str, p: ConvProblem, device: Device) -> Plan | str:
        plan = super().made(algorithm, p, device)
        if isinstance(plan, str) or device.platform == "cpu":
            return plan
        return dataclasses.replace(plan, in_place=math.prod(p.stride) > 1)

    def composed(self, p: ConvProblem, device: Device) -> Plan:
        two = calls("two", "a dgrad, then an add")
        bare = choose.plan("conv_dgrad", p, device)
        if p.implementation == "xla" or self.disabled(p) or self.empty(p):
            return two(bare.reason)
        if device.platform == "cpu":
            forced = p.algorithm is not None or p.implementation == "native"
            return bare if forced else two("on a CPU XLA's add is as fast as any")
        named, adds = _by_the_dgrads(self, bare, p, device)
        if isinstance(adds, str):
            return two(f"{named} cannot add here: {adds}")
        reason = bare.reason
        if bare.implementation != "native":
            if device.partitioned or _decided("conv_dgrad", p, device):
                return two(reason)
            faster, reason = adds_faster(adds.kernel, p, device)
            if not faster:
                return two(reason)
        return dataclasses.replace(adds, reason=f"{reason}; c is added in the same pass")


def _decided(op: str, p: ConvProblem, device: Device) -> bool:
    """Whether somebody chose for exactly this dgrad: by tuning it, or by JAXCONV_DISABLE."""
    return disabled(op) or tuned.entry(op, p.bare(), device) is not None


def adds_faster(kernel: str, p: ConvProblem, device: Device) -> tuple[bool, str]:
    """Whether the kernel with an addend beats XLA's dgrad and its add; why."""
    # In place it writes only what a tap reaches, and that it also reads.
    own = 2 * p.reached - 1 if math.prod(p.stride) > 1 else 1
    return _faster(kernel, p, device, own, "with its addend", "add")


def _by_the_dgrads(planner: conv.Conv, bare: Plan, p: ConvProblem, device: Device) -> tuple[str, Plan | str]:
    """(the kernel of the dgrad, which is the one whose time is known; the planner's plan by it, or why there is none).

    `bare` is the dgrad's plan. Where that is XLA's, it is Hopper's kernel.
    """
    alone: Plan | str = bare
    if bare.implementation != "native":
        alone = choose.refusal("conv_dgrad", p.bare(), device) or choose.made("conv_dgrad", "sm90", p.bare(), device)
    if isinstance(alone, str):
        return "sm90", alone
    return alone.spec, planner.made(alone.spec, p, device)


def _faster(
    kernel: str, p: ConvProblem, device: Device, own: float, what: str, then: str, other: str = "", passes: int = 3
) -> tuple[bool, str]:
    """Whether the kernel beats XLA's dgrad and `passes` over dx, from the bare dgrads' measured times; why.

    `own`: passes over dx that the kernel makes beside the dgrad; `other`: the kernel whose dgrad it is, if not XLA's.
    """
    m = measured.nearest("conv_dgrad", p.bare(), device, kernel)
    if m is None:
        return False, f"no dgrad by {kernel} was measured near this problem on {device.kind or 'the device'}"
    # A pass over dx of the problem that was measured, at the rate at which memory copies.
    pixels, group_c, _, groups = m.coordinates
    strides = math.prod(p.stride)
    rates = model.numbers(device) or model.NUMBERS["H200"]
    one = 2.0 ** (pixels + group_c + groups) * strides * itemsize(p) / rates.bandwidth
    # XLA's slice of dx is no pass of its own in front of an add.
    sliced = m.copy_ms if model.copied("conv_dgrad", p.bare()) == "dx" else 0.0
    if other and other not in m.native_ms:
        return False, f"nobody timed {other}'s dgrad beside {kernel}'s near this problem"
    before = m.native_ms[other] if other else m.xla_ms - sliced
    ratio = (before + passes * one) / (m.native_ms[kernel] + own * one)
    where = f"{m.of_kernels}, where XLA slices dx in the pass behind it" if sliced and not other else m.where
    text = f"{ratio:.2f} times as fast as {other or 'XLA'}'s dgrad and {then} would be {where}"
    return ratio > m.margin, f"{kernel} {what} {text}"


class ConvGradient(conv.Conv):
    """A dgrad that goes back through an activation and sums up on its way, or three calls: the dgrad has a plan of its
    own then."""

    families = ("sm90", "narrow")
    of_others = "only sm90 and narrow go back through an activation in their dgrads"

    def composed(self, p: ConvProblem, device: Device) -> Plan:
        three = calls("three", "a dgrad, then the activation's derivative and a sum")
        bare = choose.plan("conv_dgrad", p.bare(), device)
        if p.implementation == "xla" or self.empty(p):
            return three(bare.reason)
        if self.disabled(p):
            return three(disabled_text())
        if device.platform == "cpu":
            return three(CUDA_ONLY)
        if (why := choose.refusal(self.op, p, device)) is not None:
            return three(why)
        named, own = _by_the_dgrads(self, bare, p, device)
        if isinstance(own, str):
            why = f"{named} cannot go back through {p.activation} here: {own}"
            # Another kernel of Hopper's may, in less time than its dgrad and the passes behind it.
            own = self.made(p.algorithm or "sm90", p, device)
            if isinstance(own, str):
                return three(why)
        reason = bare.reason
        if own.kernel != bare.kernel and p.implementation != "native" and p.algorithm is None:
            if device.partitioned or _decided("conv_dgrad", p, device):
                return three(reason)
            faster, reason = _faster(own.kernel, p, device, 1, "with the derivative", "derivative", bare.kernel)
            if not faster:
                return three(reason)
        free = p.algorithm is None and p.implementation is None
        if free and p.activation.name == "none" and own.kernel not in SUMS_ALONE:
            return three(f"without an activation {own.kernel} reads as much as a pass that sums up")
        return dataclasses.replace(own, reason=f"{reason}; the derivative and the sum are in the same pass")


class GradientAdd(conv.Conv):
    """A dgrad that goes back through an activation and adds on its way, or two calls: the first has a plan of its own
    then."""

    families = ("narrow",)
    of_others = "only narrow adds to a dgrad behind an activation's derivative"

    def composed(self, p: ConvProblem, device: Device) -> Plan:
        two = calls("two", "a dgrad through an activation, then an add")
        alone = choose.plan("conv_gradient", p, device)
        if self.disabled(p):
            return two(disabled_text())
        if alone.implementation != "native":
            return two(alone.reason)
        own = self.made(alone.spec, p, device)
        if isinstance(own, str):
            return two(f"{alone.kernel} cannot add here: {own}")
        return dataclasses.replace(own, reason=f"{alone.reason}; c is added in the same pass")


class NormGradient(conv.Conv):
    """A dgrad that goes back through the batch-norm in front, or two calls: the dgrad has a plan of its own then."""

    families = ("sm90",)
    of_others = "only sm90 goes back through a batch-norm in its dgrads"

    def composed(self, p: ConvProblem, device: Device) -> Plan:
        two = calls("two", "a dgrad, then the batch-norm's backward pass")
        bare = choose.plan("conv_dgrad", dataclasses.replace(p.bare(), algorithm=None), device)
        if self.disabled(p) or disabled("batchnorm_backward"):
            return two(disabled_text())
        if p.implementation == "xla" or self.empty(p):
            return two(bare.reason)
        refusal = choose.refusal(self.op, p, device) or (CUDA_ONLY if device.platform == "cpu" else None)
        own = refusal or self.made(p.algorithm or "sm90", p, device)
        if isinstance(own, str):
            return two(own)
        if p.algorithm is not None or p.implementation == "native":
            return dataclasses.replace(own, reason=f"{asked(p)} was asked for")
        size = math.prod(p.x_shape) * itemsize(p)
        if size < LEAST_OF_NORMS:
            return two(f"an array of {size >> 20} MiB is read again from the caches, so one pass less saves nothing")
        if (slow := _slow_through_norm(own, p)) is not None:
            return two(slow)
        alone = DGRAD_OF.get(own.kernel, own.kernel)
        other = bare.kernel if bare.implementation == "native" else ""
        if alone != bare.kernel and (device.partitioned or _decided("conv_dgrad", p, device)):
            return two(bare.reason)
        if not (measured.table(device.kind) or measured.sisters(device)):
            return two(f"nothing was measured on {device.kind or 'the device'}")
        single = p.dtype == "float32"
        gain = GAINS.get(own.kernel) if single or own.kernel == "sm90/sums" else None
        reason = f"{own.kernel} was {gain} times as fast as two calls on an H100"
        if gain is None or (alone != bare.kernel and single and (other or own.kernel == "sm90/halo")):
            faster, reason = _faster(alone, p, device, 1, "back through a norm", "the sums", other, 2)
            if not faster:
                return two(reason)
        return dataclasses.replace(own, reason=f"{reason}; the sums need one read of x, instead of reads of dy and x")


def _slow_through_norm(own: Plan, p: ConvProblem) -> str | None:
    """Why the kernel gains less than four percent over two calls, as measured on an H100; None where it gains more.

    1x1s in 16 bits whose filter stays in shared memory are the time of their bytes. The product in TF32 makes its sums
    behind its products, because both warpgroups make a tile. So it gains for 128 products a sum, is 1.01 to 1.03 for
    256, 0.96 for 512, and 0.88 where nearly half of its tiles' columns is empty. It takes 32 products at a time.
    """
    if own.kernel == "sm90/halo":
        return None
    single, columns = p.dtype == "float32", int(own.tile.partition("x")[2])
    empty = 1 - p.in_channels / (-(-p.in_channels // columns) * columns)
    if empty > 0.5 or (single and empty >= 0.25 and p.in_channels > columns):
        return f"{empty:.0%} of its tiles' columns would be empty"
    depth = math.prod(p.filter) * -(-p.out_channels // 32) * 32
    if single and depth > 128:
        return f"sums of {depth} products in TF32 take about as long as the read that they save"
    return None


class DgradSums(conv.Conv):
    """A dgrad that sums up for the batch-norm in front, or more calls: a dgrad that adds has a plan of its own then."""

    families = ("sm90",)
    of_others = "only sm90 computes sums in its dgrad"

    def composed(self, p: ConvProblem, device: Device) -> Plan:
        parts = calls("parts", "a dgrad that adds, then the relu's derivative and sums")
        free = p if p.algorithm in (None, "sm90") else dataclasses.replace(p, algorithm=None)
        adds = choose.plan("conv_dgrad_add", free, device)
        if self.disabled(p):
            return parts(disabled_text())
        if p.implementation == "xla" or self.empty(p):
            return parts(adds.reason)
        refusal = choose.refusal(self.op, p, device) or (CUDA_ONLY if device.platform == "cpu" else None)
        refusal = refusal or (None if p.channels_last else "it needs channels-last arrays")
        own = refusal or self.made(p.algorithm or "sm90", p, device)
        if isinstance(own, str):
            return parts(own)
        if p.algorithm is not None or p.implementation == "native":
            return dataclasses.replace(own, reason=f"{asked(p)} was asked for")
        if adds.implementation != "native":
            return parts(adds.reason)
        size = math.prod(p.x_shape) * itemsize(p)
        if size < LEAST_OF_SUMS:
            return parts(f"an array of {size >> 20} MiB is read again from the caches, so one pass less saves nothing")
        return dataclasses.replace(
            own, reason=f"{adds.reason}; the sums need one more read of x, instead of reads of dz and x"
        )

"""Convolutions that normalise what they read, and the batch-norm in front of them."""

from __future__ import annotations

import math

from jaxconv._plan import choose, conv, measured
from jaxconv._plan.plan import Candidate, Device, Plan
from jaxconv._plan.planner import CUDA_ONLY, Features, Planner, calls, disabled, disabled_text
from jaxconv._problem import BatchNormConvProblem, NormalisedConvProblem

_two = calls("two", "a batch-norm, then a convolution")


class ConvNormalised(conv.Conv):
    """A convolution (its gradients) that normalises x where it reads it, or two calls: the batch-norm and the
    convolution, each with a plan of its own."""

    families = ("depthwise", "sm90")
    of_others = "only depthwise kernels and sm90/normalised normalise their input"
    rounded_before = "the convolution's input is rounded before that"
    tunable = False
    forced_by_times = False

    def first(self, p: NormalisedConvProblem, device: Device) -> str:
        return "sm90" if device.platform == "cuda" and p.groups == 1 else super().first(p, device)

    def disabled(self, p: NormalisedConvProblem) -> bool:
        return super().disabled(p) or disabled("batchnorm_infer")

    def instead(self, why: str, candidates: tuple[Candidate, ...] = ()) -> Plan:
        return _two(why, candidates)

    def cannot(self, p: NormalisedConvProblem, why: str, algorithm: str = "") -> Plan:
        return _two(f"{algorithm} cannot normalise its input: {why}" if algorithm else why)

    def on_cpu(self, p: NormalisedConvProblem) -> tuple[str | None, str]:
        return None, "on a CPU the batch-norm takes a pass over memory either way, inside the call or before it"

    def features(self, p: NormalisedConvProblem) -> Features:
        """y and dw are measured and chosen as one: who does not write a has none for its weight gradient. So are all
        gradients."""
        _, kind, coordinates = super().features(p)
        kind = (*kind, "clipped" if p.x_activation.name != "silu" else "silu")
        back = self.op in ("conv_normalised_gradient", "conv_normalised_dx")
        return "conv_normalised_gradient" if back else "conv_normalised", kind, coordinates


class NormalisedStatistics(ConvNormalised):
    """The same with the statistics of the result, or two calls: the batch-norm, and a convolution with them."""

    families = ("sm90",)
    of_others = "only sm90/normalised also takes statistics of its result"

    def disabled(self, p: NormalisedConvProblem) -> bool:
        return super().disabled(p) or disabled("conv_normalised")

    def made(self, algorithm: str, p: NormalisedConvProblem, device: Device) -> Plan | str:
        return super().made(algorithm, p, device) if device.platform == "cuda" else CUDA_ONLY


class BatchNormConv(Planner):
    """ "normalised", or "two" calls; "statistics" in front where these leave the convolution before with its result."""

    def composed(self, p: BatchNormConvProblem, device: Device) -> Plan:
        own = choose.plan("conv_normalised", p.normalised, device)
        if own.implementation != "native":
            return own
        if disabled("batchnorm_train"):
            return Plan("calls", disabled_text(), "two")
        before = p.pair is not None and choose.plan("conv_batchnorm", p.pair, device).kernel == "statistics"
        if not before and p.conv.implementation is None and p.conv.algorithm is None:
            train = choose.plan("batchnorm_train", p.norm, device)
            if train.kernel.startswith("resident") and _saves_no_read(p, own.kernel, device):
                why = f"{train.kernel} reads x once for its statistics and its normalisation, which saves as much"
                return _two(why, own.candidates)
        reason = f"the convolution normalises its input: {own.reason}"
        return Plan("calls", reason, "statistics, normalised" if before else "normalised", candidates=own.candidates)


def _saves_no_read(p: BatchNormConvProblem, kernel: str, device: Device) -> bool:
    """Whether the kernel was measured to save less than a read of x, which is read once more for its statistics. A
    batch-norm that keeps x on the device reads it once in all."""
    m = measured.nearest("conv_normalised", p.normalised, device, kernel)
    if m is None:
        return False
    saved = m.xla_ms - m.native_ms[kernel]
    back = measured.nearest("conv_normalised_gradient", p.normalised, device, kernel)
    if back is not None and back.wins(kernel):
        saved += back.xla_ms - back.native_ms[kernel]
    of_x = math.prod(p.conv.stride) * p.conv.in_channels / p.conv.out_channels  # a pass over x is of one over y
    return saved <= of_x * conv.pass_over_y(m, p.conv, device)


class BatchNormConvBackward(Planner):
    """ "normalised": two kernels that read x and dy and no gradient between them; or "two" calls' backward passes."""

    def composed(self, p: BatchNormConvProblem, device: Device) -> Plan:
        own = choose.plan("conv_normalised_gradient", p.normalised, device)
        if own.implementation != "native":
            return own
        if disabled("batchnorm_backward"):
            return Plan("calls", disabled_text(), "two")
        reason = f"the gradient between the two is computed where it is read: {own.reason}"
        return Plan("calls", reason, "normalised", candidates=own.candidates)

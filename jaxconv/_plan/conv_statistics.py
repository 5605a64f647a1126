"""A convolution that takes the statistics of its result on its way: one read less for the batch-norm behind it."""

from __future__ import annotations

import dataclasses

from jaxconv._plan import choose, conv, measured
from jaxconv._plan.plan import Device, Plan
from jaxconv._plan.planner import NOTHING, PLANNERS, XLA_ASKED, Planner, calls, disabled, disabled_text
from jaxconv._problem import ConvBatchNormProblem, ConvProblem

KERNEL = "sm90/statistics"


def or_a_read(p: ConvProblem, device: Device) -> Plan:
    """fprop with the statistics of its result, or fprop and a read of that.

    What was measured beside it are two calls of which the batch-norm may read its input once, where it stays on the
    device's multiprocessors; statistics alone take a pass more than what such a batch-norm takes without them.
    """
    fastest = choose.fastest("conv_statistics", p, device)
    near = measured.nearest("conv_statistics", p, device, KERNEL)
    if fastest.implementation == "native" or near is None or near.apart > measured.FAR:
        return fastest
    own = choose.made("conv_statistics", KERNEL, p, device)
    ratio = (near.xla_ms + conv.pass_over_y(near, p, device)) / near.native_ms[KERNEL]
    if isinstance(own, str) or ratio <= near.margin:
        return fastest
    reason = f"{ratio:.2f} times faster than a convolution and a read of its result {near.where}"
    return dataclasses.replace(own, reason=reason, candidates=fastest.candidates)


class ConvStatistics(conv.Conv):
    families = ("sm90",)
    of_others = "only sm90's epilogue computes statistics of its result"
    rounded_before = "statistics are taken of the rounded result"

    def first(self, p: ConvProblem, device: Device) -> str:
        return "sm90" if device.platform == "cuda" else super().first(p, device)

    def on_cpu(self, p: ConvProblem) -> tuple[str | None, str]:
        return None, "on a CPU the statistics take a pass over the result either way, inside the call or behind it"

    def exception(self, p: ConvProblem, device: Device, forced: bool) -> Plan | None:
        if not forced:
            return or_a_read(p, device)
        own = self.made(self.first(p, device), p, device)
        # Nobody asks for this op by its name: it stands for two, and a map over filters may have changed its problem.
        return self.instead(f"a convolution, then a read of its result: {own}") if isinstance(own, str) else None


class ConvBatchNorm(Planner):
    """One read of the convolution's result, where its statistics leave the convolution with it, or two calls."""

    def composed(self, problem: ConvBatchNormProblem, device: Device) -> Plan:
        two = calls("two", "a convolution, then a batch-norm")
        p, op = problem.conv, "conv_statistics"
        own = PLANNERS[op]
        if p.implementation == "xla":
            return two(XLA_ASKED)
        if disabled(op) or disabled("batchnorm_train"):
            return two(disabled_text())
        if own.empty(p):
            return two(NOTHING)
        refusal = choose.refusal(op, p, device)
        if refusal or device.partitioned:
            return two(refusal or "XLA partitions the program over devices, and cannot be told how the two are split")
        if p.algorithm is None and p.implementation != "native":
            # Without what follows a normalisation it is XLA's, and the statistics a read of their own.
            alone = problem.norm.activation.name == "none" and not problem.norm.residual
            plan = or_a_read(p, device) if alone else choose.fastest(op, p, device)
            return Plan("calls", plan.reason, "statistics") if plan.implementation == "native" else two(plan.reason)
        algorithm = p.algorithm or own.first(p, device)
        unsupported = choose.supports(op, algorithm, p, device)
        if unsupported:
            return two(f"no statistics from {algorithm}: {unsupported}")
        forced = f"algorithm='{algorithm}'" if p.algorithm else "implementation='native'"
        return Plan("calls", f"{forced} was asked for", "statistics")

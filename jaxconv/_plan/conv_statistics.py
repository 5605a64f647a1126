"""A convolution that takes the statistics of its result on its way: one read less for the batch-norm behind it."""

from __future__ import annotations

import dataclasses

from jaxconv._plan import choose, conv, measured
from jaxconv._plan.plan import Device, Plan
from jaxconv._plan.planner import NOTHING, PLANNERS, XLA_ASKED, Features, Planner, calls, disabled, disabled_text
from jaxconv._problem import AddedConvProblem, ConvBatchNormProblem, ConvProblem


def op_of(p: ConvProblem) -> str:
    """The op of a convolution, and of what is added to it, that takes statistics."""
    return "conv_add_statistics" if isinstance(p, AddedConvProblem) else "conv_statistics"


def or_more(p: ConvProblem, device: Device, read: bool) -> Plan:
    """fprop with the statistics of its result, or a convolution and more passes: an add, and where `read` says that the
    statistics are wanted alone, a read of the result.

    What was measured beside it are two calls, of which the batch-norm may read its input once, where it stays on the
    device's multiprocessors; statistics alone take a pass more. An array that is added costs the kernel a read, and a
    convolution that adds on its way, too. To others the add is a pass of its own: two reads and a write.
    """
    op = op_of(p)
    fastest = choose.fastest(op, p, device)
    # No problem has two: groups are of few channels, which are grouped's, or of 64 and more.
    own = next((plan for plan in choose.every(op, p, device) if choose.is_safe(PLANNERS[op], plan.kernel, p)), None)
    if own is None:
        return fastest
    near = measured.nearest(op, p, device, own.kernel)
    wins, adds = fastest.implementation == "native", isinstance(p, AddedConvProblem) and p.residual
    read = read and not wins  # what was measured to be faster needs no more reasons
    if near is None or near.apart > measured.FAR or not (read or adds):
        return fastest
    one, ours, others = conv.pass_over_y(near, p, device), near.native_ms[own.kernel], near.xla_ms
    calls = "a convolution, an add" if adds else "a convolution"
    calls += " and a read of its result" if read else " and a batch-norm"
    if adds:
        alone = choose.plan("conv_add", p.conv, device).implementation == "calls"
        ours, others = ours + one, others + (3 * one if alone else one)
    ratio = (others + one * read) / ours
    if ratio > near.margin:
        reason = f"{ratio:.2f} times faster than {calls} {near.where}"
        return dataclasses.replace(own, reason=reason, candidates=fastest.candidates)
    reached = f"{own.kernel} would have {ratio:.2f} of the speed of {calls} {near.where}"
    return PLANNERS[op].instead(reached, fastest.candidates) if wins else fastest


class ConvStatistics(conv.Conv):
    families = ("sm90", "grouped")
    of_others = "only sm90 and grouped take statistics of their results"
    rounded_before = "statistics are taken of the rounded result"

    def first(self, p: ConvProblem, device: Device) -> str:
        if device.platform != "cuda":
            return super().first(p, device)
        return "grouped" if p.groups > 1 and isinstance(self.made("grouped", p, device), Plan) else "sm90"

    def on_cpu(self, p: ConvProblem) -> tuple[str | None, str]:
        return None, "on a CPU the statistics take a pass over the result either way, inside the call or behind it"

    def features(self, p: ConvProblem) -> Features:
        """Those of the bare convolution, which was measured."""
        _, *rest = super().features(p)
        return "conv_statistics", *rest

    def exception(self, p: ConvProblem, device: Device, forced: bool) -> Plan | None:
        if not forced:
            return or_more(p, device, True)
        own = self.made(self.first(p, device), p, device)
        # Nobody asks for this op by its name: it stands for two, and a map over filters may have changed its problem.
        return self.instead(f"a convolution, then a read of its result: {own}") if isinstance(own, str) else None


class ConvBatchNorm(Planner):
    """One read of the convolution's result, where its statistics leave the convolution with it, or two calls."""

    def composed(self, problem: ConvBatchNormProblem, device: Device) -> Plan:
        two = calls("two", "a convolution, then a batch-norm")
        p, op = problem.conv, op_of(problem.conv)
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
            plan = or_more(p, device, alone)
            return Plan("calls", plan.reason, "statistics") if plan.implementation == "native" else two(plan.reason)
        algorithm = p.algorithm or own.first(p, device)
        unsupported = choose.supports(op, algorithm, p, device)
        if unsupported:
            return two(f"no statistics from {algorithm}: {unsupported}")
        forced = f"algorithm='{algorithm}'" if p.algorithm else "implementation='native'"
        return Plan("calls", f"{forced} was asked for", "statistics")

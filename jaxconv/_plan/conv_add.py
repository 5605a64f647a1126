"""A convolution that adds its residual on its way, or two calls."""

from __future__ import annotations

import dataclasses
import math

from jaxconv._core.activations import CHEAP
from jaxconv._plan import choose, conv, measured, tuned
from jaxconv._plan.plan import Device, Plan
from jaxconv._plan.planner import PLANNERS, calls, disabled, disabled_text
from jaxconv._problem import ConvProblem


def _alone(p: ConvProblem) -> str:
    """The op of the convolution without the add."""
    return "conv" if p.bias else "conv_fprop"


class ConvAdd(conv.Conv):
    """By the plan of the convolution alone, whose time is known."""

    with_the_add = True

    def within(self, p: ConvProblem) -> tuple[str, ConvProblem] | None:
        return _alone(p), p.affine()

    def composed(self, p: ConvProblem, device: Device) -> Plan:
        two = calls("two", "a convolution, then an add")
        op = _alone(p)
        alone = choose.plan(op, p.affine(), device)
        if alone.implementation == "native" and self.disabled(p):
            return two(disabled_text())
        if alone.implementation != "native":
            # Whoever chose XLA: only where times did, may they say that its convolution and its add take longer.
            free = p.algorithm is None and p.implementation is None and not (self.disabled(p) or disabled(op))
            free = free and device.platform == "cuda" and not device.partitioned and not self.empty(p)
            free = free and choose.refusal(op, p.affine(), device) is None
            free = free and tuned.entry(op, p.affine(), device) is None
            return (_adds_instead_of_xla(p, device) if free else None) or two(alone.reason)
        adds, reason = self.made(alone.spec, p, device), alone.reason
        free = p.implementation is None and p.algorithm is None
        if free and device.platform == "cpu" and p.activation.name not in CHEAP:
            return two(f"{reason}; {conv.slow_activation(p)}")
        if isinstance(adds, str) and p.algorithm is not None:
            adds = self.made(p.algorithm, p, device)
        elif isinstance(adds, str):
            adds, reason = _other_that_adds(alone, adds, p, device)
        if isinstance(adds, str):
            if (why := _xla_adds_faster(alone, p, device)) is not None:
                return Plan("xla", why, candidates=alone.candidates)
            return two(f"the convolution runs on {alone.kernel}, and {adds}: {reason}")
        return dataclasses.replace(
            adds, reason=f"{reason}; the residual is added in the same pass", candidates=alone.candidates
        )


def _adds_instead_of_xla(p: ConvProblem, device: Device) -> Plan | None:
    """The kernel that adds on its way and is faster than XLA's convolution and its add, by times of both without it."""
    best, least, reason = None, 0.0, ""
    for adds in choose.every("conv_add", p, device):
        m = measured.nearest("conv_fprop", p, device, adds.kernel)
        if m is None or m.apart > measured.FAR or not choose.is_safe(PLANNERS["conv"], adds.kernel, p):
            continue
        one = conv.pass_over_y(m, p, device)
        # A 1x1 filter's convolution is a product to XLA, and the add a pass of its own. Others read c on their way.
        # A pass of one image is not worth its 1.4 to 1.9 us: with 11 launches fewer,
        # a frozen ResNet-50 went from 0.339 to 0.354 ms.
        behind = 3 * one if math.prod(p.filter) == 1 else one
        ours, xla = m.native_ms[adds.kernel] + one, m.xla_ms + behind
        if xla > m.margin * ours and xla - ours > measured.LEAST_CONV_MS and xla / ours > least:
            best, least = adds, xla / ours
            ratio = f"{least:.2f} times as fast as XLA's convolution and add"
            reason = f"{adds.kernel} with the add is {ratio} {m.where}"
    return best and dataclasses.replace(best, reason=f"{reason}; the residual is added in the same pass")


def _other_that_adds(alone: Plan, refusal: str, p: ConvProblem, device: Device) -> tuple[Plan | str, str]:
    """(plan, reason) of a kernel that adds on its way and is faster than `alone` with a pass behind it, by the times of
    both where they were measured; else (why there is none, the reason of `alone`)."""
    m = measured.nearest("conv_fprop", p, device, alone.kernel)
    if m is None:
        return refusal, alone.reason
    one = conv.pass_over_y(m, p, device)
    best, least = None, m.native_ms[alone.kernel] + 3 * one
    for other in choose.every("conv_add", p, device):
        if m.native_ms.get(other.kernel, math.inf) + one < least:
            best, least = other, m.native_ms[other.kernel] + one
    if best is None:
        return refusal, alone.reason
    ratio = (m.native_ms[alone.kernel] + 3 * one) / least
    speed = f"{ratio:.2f} times as fast {m.where}"
    return best, f"{alone.reason}; {best.kernel} adds the residual too, and would be {speed}"


def _xla_adds_faster(alone: Plan, p: ConvProblem, device: Device) -> str | None:
    """Why XLA's convolution, which adds on its way where its filter is more than 1x1, beats `alone` and a pass behind
    it; None where it does not, or where nothing near was measured."""
    m = measured.nearest("conv_fprop", p, device, alone.kernel)
    free = p.algorithm is None and p.implementation is None and math.prod(p.filter) > 1
    if m is None or not free or tuned.entry(_alone(p), p.affine(), device) is not None:
        return None
    one = conv.pass_over_y(m, p, device)
    ratio = (m.native_ms[alone.kernel] + 3 * one) / (m.xla_ms + one)
    if ratio < 1:
        return None
    speed = f"{ratio:.2f} times as fast as {alone.kernel} and an add {m.where}"
    return f"XLA's convolution adds the residual in the same pass, and is {speed}"

"""Integer convolutions: the sums of cuda/conv/sm90/eight where these can run, else cuda/conv/integer.

XLA cannot compile them for a GPU; on a CPU its own are exact.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxconv._plan import choose, conv_scaled, domain
from jaxconv._plan.plan import Device, Plan
from jaxconv._plan.planner import CUDA_ONLY, NOTHING, XLA_ASKED, Planner, asked, disabled_text
from jaxconv._problem import IntegerConvProblem, family_of, sums_of_integers

TILE, OUTPUT = "integer/tile", "integer/output"
# Output channels of a group from which on a tile of 64 of them, most of it idle, takes no more operations than a thread
# an output does: counted, not measured.
LEAST_COLUMNS = 8


class ConvInteger(Planner):
    """On a GPU ours: XLA has none there. Elsewhere XLA's, which is exact."""

    group = "conv"
    algorithms = (TILE, OUTPUT)

    def made(self, algorithm: str, p: IntegerConvProblem, device: Device) -> Plan | str:
        plan = Plan("native", "", algorithm)
        if p.beyond:
            return p.beyond
        if family_of(algorithm) == "sm90":
            sums = sums_of_integers(p)
            found = sums if isinstance(sums, str) else conv_scaled.by_kernel(algorithm, sums, device)
            return found if isinstance(found, str) else Plan("calls", "", found.kernel, found.tile)
        if device.platform == "cpu":
            return plan if algorithm == OUTPUT else CUDA_ONLY
        return domain.conv_integer_refusal(plan, p) or plan

    def first(self, p: IntegerConvProblem, device: Device) -> str:
        eight = family_of(conv_scaled.EIGHT)
        if device.platform == "cuda" and isinstance(self.made(eight, p, device), Plan):
            return eight
        return TILE if device.platform == "cuda" and p.group_k >= LEAST_COLUMNS else OUTPUT

    def extents(self, p: IntegerConvProblem) -> Sequence[Any]:
        return p.lhs_shape

    def composed(self, p: IntegerConvProblem, device: Device) -> Plan:
        forced = p.implementation == "native" or p.algorithm is not None
        if p.implementation == "xla":
            return self.instead(XLA_ASKED)
        if self.disabled(p):
            return self.instead(disabled_text())
        if p.empty:
            return self.instead(NOTHING)
        if device.platform != "cuda" and not forced:
            return self.instead("XLA's own convolutions of integers are exact, and faster")
        kernel = p.algorithm or self.first(p, device)
        own = choose.missing(device) or self.made(kernel, p, device)
        if isinstance(own, Plan):
            reason = f"{asked(p)} was asked for" if forced else "XLA compiles no convolutions of integers for a GPU"
            reason += "; on 8-bit tensor cores" if own.implementation == "calls" else ""
            return dataclasses.replace(own, reason=reason)
        return self.cannot(p, own, kernel) if forced else self.instead(own)

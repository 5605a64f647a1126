"""Integer convolutions: cuda/conv/integer. XLA cannot compile them for a GPU; on a CPU its own are exact."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxconv._plan import choose, domain
from jaxconv._plan.plan import Device, Plan
from jaxconv._plan.planner import CUDA_ONLY, NOTHING, XLA_ASKED, Planner, asked, disabled_text
from jaxconv._problem import IntegerConvProblem

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
        if device.platform == "cpu":
            return plan if algorithm == OUTPUT else CUDA_ONLY
        return domain.conv_integer_refusal(plan, p) or plan

    def first(self, p: IntegerConvProblem, device: Device) -> str:
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
            reason = f"{asked(p)} was asked for" if forced else "XLA compiles none of integers for a GPU"
            return dataclasses.replace(own, reason=reason)
        return self.cannot(p, own, kernel) if forced else self.instead(own)

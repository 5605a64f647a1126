"""Convolutions of 8-bit numbers: their sums, by a plan of their own, then a pass for what follows them."""

from __future__ import annotations

from jaxconv._plan.plan import Device, Plan
from jaxconv._plan.planner import XLA_ASKED, Planner, calls
from jaxconv._problem import ScaledConvProblem

NO_KERNEL = "there is no kernel of 8-bit numbers"
_two = calls("two", "a convolution, then its scales")


class ConvScaled(Planner):
    """On a GPU two calls; elsewhere XLA's, which are exact."""

    group = "conv"

    def composed(self, p: ScaledConvProblem, device: Device) -> Plan:
        if p.implementation == "xla":
            return self.instead(XLA_ASKED)
        if p.implementation == "native" or p.algorithm is not None:
            return self.cannot(p, NO_KERNEL, p.algorithm or "native")
        if device.platform != "cuda":
            return self.instead("XLA's own convolutions of 8-bit numbers are exact here")
        return _two(NO_KERNEL)

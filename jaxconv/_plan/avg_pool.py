"""Average-pooling: cuda/pool."""

from __future__ import annotations

import math

from jaxconv._plan import domain
from jaxconv._plan.plan import Device, Plan
from jaxconv._plan.planner import Features, Planner, log2, vector
from jaxconv._problem import POOL_ALGORITHMS, AvgPoolProblem


class AvgPool(Planner):
    group = "pool"
    algorithms = POOL_ALGORITHMS
    independent = (True, True)

    def made(self, algorithm: str, p: AvgPoolProblem, device: Device) -> Plan | str:
        plan = Plan("native", "", algorithm, asks_channels_last=not p.channels_last)
        if device.platform == "cpu":
            return plan
        return domain.avg_pool_refusal(plan, p) or plan

    def features(self, p: AvgPoolProblem) -> Features:
        """Coordinates: pixels of y, channels. Either direction is a choice of its own: nothing is kept between them."""
        kind = p.dtype, p.window, p.stride, p.count_include_pad, p.channels % vector(p.dtype) == 0
        return self.op, kind, log2(p.batch * math.prod(p.out_spatial), p.channels)

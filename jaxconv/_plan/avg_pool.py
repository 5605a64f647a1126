"""Average-pooling: cuda/pool."""

from __future__ import annotations

import dataclasses
import math

from jaxconv._plan import domain
from jaxconv._plan.plan import Device, Plan
from jaxconv._plan.planner import NO_SUCH_KERNEL, Features, Planner, log2, vector
from jaxconv._problem import POOL_ALGORITHMS, AvgPoolProblem

# Of x: below it a pass is about a launch, and nothing was measured.
LEAST = 2**22


class AvgPool(Planner):
    group = "pool"
    algorithms = POOL_ALGORITHMS
    independent = (True, True)

    def made(self, algorithm: str, p: AvgPoolProblem, device: Device) -> Plan | str:
        plan = Plan("native", "", algorithm, asks_channels_last=not p.channels_last)
        if device.platform == "cpu":
            return plan if algorithm in self.algorithms else NO_SUCH_KERNEL
        return domain.avg_pool_refusal(plan, p) or plan

    def overruled(self, p: AvgPoolProblem, device: Device, best: Plan | None) -> Plan | None:
        """On Hopper in 16 bits the gather, as five problems were measured (docs/kernels/avg_pool.md).

        Windows that do not overlap are left to XLA forward: its pass is as fast, and may be fused with its neighbours.
        """
        if best is not None or domain.capability(device) != (9, 0):
            return None
        overlaps = any(f > s for f, s in zip(p.window, p.stride, strict=True))
        known = p.dtype in ("bfloat16", "float16") and p.channels_last and p.channels % vector(p.dtype) == 0
        known = known and len(p.window) == 2 and p.batch * math.prod(p.in_spatial) * p.channels >= LEAST
        gather = self.made("gather", p, device)
        if not known or p.taps > 9 or isinstance(gather, str) or not (overlaps or self.op == "avg_pool_backward"):
            return None
        speed = "1.8 to 2.2 times as fast as XLA at five" if self.op == "avg_pool_backward" else "1.8 times at two"
        return dataclasses.replace(gather, reason=f"the kernel was {speed} problems of bfloat16 on an H100")

    def features(self, p: AvgPoolProblem) -> Features:
        """Coordinates: pixels of y, channels. Either direction is a choice of its own: nothing is kept between them."""
        kind = p.dtype, p.window, p.stride, p.count_include_pad, p.channels % vector(p.dtype) == 0
        return self.op, kind, log2(p.batch * math.prod(p.out_spatial), p.channels)

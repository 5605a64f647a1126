"""Max-pooling: cuda/pool."""

from __future__ import annotations

import dataclasses
import math

from jaxconv._plan import domain, measured
from jaxconv._plan.plan import Device, Plan
from jaxconv._plan.planner import NO_SUCH_KERNEL, Features, Planner, log2, vector
from jaxconv._problem import POOL_ALGORITHMS, PoolProblem


def windows(p: PoolProblem, device: Device) -> list[float]:
    """XLA's time over the kernel's, forward and backward, at the windows that were measured in the problem's dtype
    (float16's may be bfloat16's), on the device or else on a sister; none where 16 bytes do not divide the channels."""
    for kind in (device.kind, *measured.sisters(device)):
        for dtype in (p.dtype, "bfloat16") if p.dtype == "float16" else (p.dtype,):
            if p.channels % vector(dtype) == 0:
                rows = [m for m in measured.table(kind) if m.op == "max_pool_fused" and "gather" in m.native_ms]
                ratios = [m.ratio("gather") for m in rows if (m.kind[0], m.kind[-1]) == (dtype, True)]
                if ratios:
                    return ratios
    return []


class MaxPool(Planner):
    group = "pool"
    algorithms = POOL_ALGORITHMS
    independent = (True, True)

    def made(self, algorithm: str, p: PoolProblem, device: Device) -> Plan | str:
        plan = Plan("native", "", algorithm, asks_channels_last=not p.channels_last)
        if device.platform == "cpu":
            return plan if algorithm in self.algorithms else NO_SUCH_KERNEL
        return domain.pool_refusal(plan, p) or plan

    def on_cpu(self, p: PoolProblem) -> tuple[str | None, str]:
        if not p.save:
            return None, "no gradient is taken: XLA's own pooling is faster"
        if p.channels < 16:
            return None, "with fewer than 16 channels XLA is as fast"
        if math.prod(p.window) < 4:
            return None, "a window of two or three elements is as fast in XLA"
        if sum(taps > 1 for taps in p.window) < 2:
            return None, "along one axis XLA is 1.1 to 1.7 times faster, but in arrays of megabytes"
        times = "3 to 3.8 times slower with 64 channels, 1.3 to 1.6 times with 16 and 32 (EPYC)"
        return "gather", f"forward and backward, XLA was {times}"

    def overruled(self, p: PoolProblem, device: Device, best: Plan | None) -> Plan | None:
        if not p.save:
            # Whatever was measured alone: in a model XLA may compute what is in front of it on the way.
            return self.instead(
                "no gradient is taken: XLA's own pooling is one pass too, and may be fused with its neighbours"
            )
        if best is not None:
            return None
        # XLA's scatter is slow at every window; a kernel that was nowhere below 1.5 times its speed need not be
        # measured at each. An H100's least is 1.8, of 5x5 in float32.
        ratios, gather = windows(p, device), self.made("gather", p, device)
        if isinstance(gather, str) or not ratios or min(ratios) <= 1.5:
            return None
        where = f"at the {len(ratios)} windows that were measured"
        why = f"{min(ratios):.1f} to {max(ratios):.1f} times faster than XLA, forward and backward, {where}"
        return dataclasses.replace(gather, reason=why)

    def features(self, p: PoolProblem) -> Features:
        """Coordinates: pixels of y, channels.

        Measured and chosen forward and backward together: a gradient needs the positions."""
        back = p.save or self.op == "max_pool_backward"
        kind = p.dtype, p.window, p.stride, p.dilation, p.channels % vector(p.dtype) == 0
        pixels = p.batch * math.prod(p.out_spatial)
        return "max_pool_fused" if back else "max_pool", kind, log2(pixels, p.channels)

"""A stem and the max-pooling behind it in one pass, or two calls."""

from __future__ import annotations

import dataclasses

from jaxconv._plan import choose, conv, domain, measured
from jaxconv._plan.plan import Device, Plan
from jaxconv._plan.planner import CUDA_ONLY, NO_SUCH_KERNEL, PLANNERS, Planner, calls, disabled, disabled_text
from jaxconv._problem import PooledConvProblem, family_of

# The kernel with the same products, whose times are known. It also writes what is pooled.
ALONE = "stem/sm90_narrow_in"
# In 16 bits two blocks of that kernel fit a multiprocessor for such rows, and one of the pooled kernel. 512 images of
# 28x28 pixels to 32 channels took 0.070 ms instead of 0.065 (H200, bfloat16).
SHORT_ROW = 64


class ConvPooled(Planner):
    """By the plan of the convolution alone."""

    group = "conv"
    algorithms = ("stem",)

    def made(self, algorithm: str, p: PooledConvProblem, device: Device) -> Plan | str:
        if device.platform != "cuda":
            return CUDA_ONLY
        if family_of(algorithm) != "stem":
            return NO_SUCH_KERNEL
        plan = Plan("native", "", "stem/sm90_pooled", asks_channels_last=not p.channels_last)
        return domain.conv_pooled_refusal(plan, dataclasses.replace(p, channels_last=True), device) or plan

    def composed(self, p: PooledConvProblem, device: Device) -> Plan:
        two = calls("two", "a convolution, then a max-pooling")
        alone = choose.plan("conv" if p.fused else "conv_fprop", p.conv, device)
        if self.disabled(p) or disabled("max_pool"):
            return two(disabled_text())
        if p.implementation == "xla" or self.empty(p):
            return two(alone.reason)
        own = choose.refusal(self.op, p, device) or self.made("stem", p, device)
        if isinstance(own, str):
            return two(own)
        if p.implementation is None and p.dtype != "float32" and p.out_spatial[-1] <= SHORT_ROW:
            return two(f"rows of at most {SHORT_ROW} pixels are as fast in two calls")
        if alone.kernel == ALONE:
            return dataclasses.replace(own, reason=f"{alone.reason}; the pooling takes its maxima in the same pass")
        if p.implementation == "native":
            return dataclasses.replace(own, reason="implementation='native' was asked for")
        if p.algorithm is not None:
            return two(alone.reason)
        return self._instead_of(alone, own, p, device) or two(alone.reason)

    def _instead_of(self, alone: Plan, own: Plan, p: PooledConvProblem, device: Device) -> Plan | None:
        """`own`, where the convolution by the kernel of the same products takes less time than by `alone` and a read of
        its result, which a pooling needs."""
        m = measured.nearest("conv_fprop", p.conv, device, ALONE)
        if m is None or m.apart > measured.FAR or not choose.is_safe(PLANNERS["conv"], ALONE, p.conv):
            return None
        other = m.native_ms.get(alone.kernel, m.xla_ms) if alone.implementation == "native" else m.xla_ms
        ratio = (other + conv.pass_over_y(m, p, device)) / m.native_ms[ALONE]
        if ratio <= m.margin:
            return None
        faster = f"{ratio:.2f} times as fast as a convolution and a max-pooling"
        return dataclasses.replace(own, reason=f"{faster} {m.where}")

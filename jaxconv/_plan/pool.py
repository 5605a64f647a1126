"""Max-pooling: cuda/pool."""

from __future__ import annotations

from jaxconv._plan import domain
from jaxconv._plan.plan import Device, Plan
from jaxconv._problem import PoolProblem


def made(algorithm: str, p: PoolProblem, device: Device) -> Plan | str:
    """The plan by the kernel that `algorithm` names, or the sentence that says why there is none."""
    plan = Plan("native", "", algorithm, asks_channels_last=not p.channels_last)
    if device.platform == "cpu":
        return plan
    return domain.pool_refusal(plan, p) or plan


def on_cpu(p: PoolProblem) -> tuple[str | None, str]:
    """(algorithm, why) on a CPU."""
    if not p.save:
        return None, "no gradient is taken: XLA's own pooling is faster"
    if p.channels < 16:
        return None, "with fewer than 16 channels XLA is as fast"
    why = "forward and backward, XLA was 3 to 3.8 times slower with 64 channels, 1.3 to 1.6 times with 16 and 32 (EPYC)"
    return "gather", why

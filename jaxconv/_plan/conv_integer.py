"""Integer convolutions: cuda/conv/integer. XLA cannot compile them for a GPU; on a CPU its own are exact."""

from __future__ import annotations

from jaxconv._plan import domain
from jaxconv._plan.plan import Device, Plan
from jaxconv._problem import IntegerConvProblem

TILE, OUTPUT = "integer/tile", "integer/output"
# Output channels of a group from which on a tile of 64 of them, most of it idle, takes no more operations than a thread
# an output does: counted, not measured.
LEAST_COLUMNS = 8


def wanted(p: IntegerConvProblem, device: Device) -> str:
    return TILE if device.platform == "cuda" and p.group_k >= LEAST_COLUMNS else OUTPUT


def made(kernel: str, p: IntegerConvProblem, device: Device) -> Plan | str:
    """The plan by `kernel`, or the sentence that says why there is none."""
    plan = Plan("native", "", kernel)
    if p.beyond:
        return p.beyond
    if device.platform == "cpu":
        return plan if kernel == OUTPUT else "it exists on CUDA only"
    return domain.conv_integer_refusal(plan, p) or plan

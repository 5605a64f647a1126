"""Integer convolutions: the sums of cuda/conv/sm90/eight where these can run, else cuda/conv/integer.

XLA cannot compile them for a GPU; on a CPU its own are exact.
"""

from __future__ import annotations

from jaxconv._plan import conv_scaled, domain
from jaxconv._plan.plan import Device, Plan
from jaxconv._problem import IntegerConvProblem, family_of, sums_of_integers

TILE, OUTPUT = "integer/tile", "integer/output"
# Output channels of a group from which on a tile of 64 of them, most of it idle, takes no more operations than a thread
# an output does: counted, not measured.
LEAST_COLUMNS = 8


def wanted(p: IntegerConvProblem, device: Device) -> str:
    if device.platform == "cuda" and isinstance(_on_tensor_cores(p, device), Plan):
        return conv_scaled.EIGHT
    return TILE if device.platform == "cuda" and p.group_k >= LEAST_COLUMNS else OUTPUT


def _on_tensor_cores(p: IntegerConvProblem, device: Device) -> Plan | str:
    """The plan of the sums alone, of a convolution of 8-bit numbers."""
    sums = sums_of_integers(p)
    return sums if isinstance(sums, str) else conv_scaled.made(sums, device)


def made(kernel: str, p: IntegerConvProblem, device: Device) -> Plan | str:
    """The plan by `kernel`, or the sentence that says why there is none."""
    plan = Plan("native", "", kernel)
    if p.beyond:
        return p.beyond
    if family_of(kernel) == "sm90":
        found = _on_tensor_cores(p, device)
        return found if isinstance(found, str) else Plan("calls", "", found.kernel, found.tile)
    if device.platform == "cpu":
        return plan if kernel == OUTPUT else "it exists on CUDA only"
    return domain.conv_integer_refusal(plan, p) or plan

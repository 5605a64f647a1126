"""Every choice: problem x device -> Plan, with the reason. Nothing else in the project chooses.

plan.py: what a plan and a device are. choose.py: the tiers. tuned.py: what a user tuned. measured.py: the tables.
model.py: times of what was not measured. domain.py: what native code can run. conv.py, dense.py, batchnorm.py,
groupnorm.py: an op's kernels. One file a family of convolutions: which of its kernels is wanted, with which tile and
how many parts.
"""

from jaxconv._plan.choose import OPS, disabled, every, fused_behind, made, missing, natively, plan, supports, tiles
from jaxconv._plan.dense import GRADIENT
from jaxconv._plan.plan import Device, Plan, Problem

__all__ = [
    "GRADIENT",
    "OPS",
    "Device",
    "Plan",
    "Problem",
    "disabled",
    "every",
    "fused_behind",
    "made",
    "missing",
    "natively",
    "plan",
    "supports",
    "tiles",
]

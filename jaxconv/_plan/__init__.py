"""Every choice: problem x device -> Plan, with the reason. Nothing else in the project chooses.

plan.py: what a plan and a device are. choose.py: the tiers. planner.py: what they ask of an op; ops.py: the table of
ops. tuned.py: what a user tuned. measured.py: the tables. model.py: times of what was not measured. domain.py: what
native code can run. conv.py, conv_add.py, dense.py, batchnorm.py, ...: planners. One file a family of convolutions:
which of its kernels is wanted, with which tile and how many parts.
"""

from jaxconv._plan.choose import (
    every,
    made,
    missing,
    natively,
    plan,
    remembered,
    supports,
    tiles,
    timed_as,
)
from jaxconv._plan.conv import fused_behind
from jaxconv._plan.dense import GATED, GATED_GRADIENT, GRADIENT
from jaxconv._plan.ops import OPS
from jaxconv._plan.plan import Device, Plan, Problem
from jaxconv._plan.planner import disabled
from jaxconv._plan.together import plan_together

__all__ = [
    "GATED",
    "GATED_GRADIENT",
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
    "plan_together",
    "remembered",
    "supports",
    "tiles",
    "timed_as",
]

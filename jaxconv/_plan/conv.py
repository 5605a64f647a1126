"""Convolutions: which of a family's kernels is taken, in the memory that it wants."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import ModuleType

from jaxconv._plan import depthwise, direct, domain, grouped, im2col, implicit_gemm, sm90, stem
from jaxconv._plan.plan import Device, Plan
from jaxconv._problem import ConvProblem, family_of

FAMILIES: dict[str, ModuleType] = {
    "sm90": sm90,
    "implicit_gemm": implicit_gemm,
    "direct": direct,
    "depthwise": depthwise,
    "grouped": grouped,
    "stem": stem,
    "im2col": im2col,
}
NORMALISED = ("conv_normalised", "conv_normalised_wgrad", "conv_normalised_gradient", "conv_normalised_dx")
CHANNELS_LAST_ONLY = ("sm90", "implicit_gemm", "grouped", "stem")


def in_memory(algorithm: str, p: ConvProblem) -> ConvProblem:
    """The problem as the CUDA kernel finds it in memory: channels last where that is what it asks XLA for.

    XLA computes every convolution channels last on a GPU, whatever the arrays' order: a kernel's neighbours have it so.
    """
    family = family_of(algorithm)
    last = family in CHANNELS_LAST_ONLY or (family == "depthwise" and depthwise.in_memory(p))
    return dataclasses.replace(p, channels_last=True) if last and not p.channels_last else p


def made(op: str, algorithm: str, p: ConvProblem, device: Device) -> Plan | str:
    """The plan by the family or kernel that `algorithm` names, or the sentence that says why there is none."""
    if device.platform != "cuda":
        return _on_cpu(op, algorithm, p)
    stored = in_memory(algorithm, p)
    family = FAMILIES[family_of(algorithm)]
    refused = _refused(op, family)
    if refused is not None:
        return refused
    why = "there is no such kernel"
    for wanted in family.wants(op, stored, device):
        if wanted.answers(algorithm):
            plan = _planned(op, family, wanted, stored, p, device)
            if isinstance(plan, Plan):
                return plan
            why = plan
    return why


def _refused(op: str, family: ModuleType) -> str | None:
    """Why none of the family's kernels runs `op`, whatever the problem; None where it is the problem that decides."""
    if family is not sm90 and op == "conv_statistics":
        return "only sm90's epilogue sums up what it writes"
    if family not in (sm90, depthwise) and op == "conv_dgrad_add":
        return "only sm90 and depthwise/rows_mma add on their way"
    if family is not sm90 and op == "conv_dgrad_sums":
        return "only sm90 sums up its dgrad"
    if family is not depthwise and op in NORMALISED:
        return "only depthwise kernels normalise what they read"
    return None


def _planned(
    op: str, family: ModuleType, wanted: Plan, stored: ConvProblem, p: ConvProblem, device: Device
) -> Plan | str:
    """What the family wants for p, which lies in memory as `stored`: the whole plan, or why the kernel refuses it."""
    refused = getattr(family, "refusal", domain.conv_refusal)(op, wanted, stored, device)
    if refused is not None:
        return refused
    return dataclasses.replace(
        wanted,
        workspace_bytes=getattr(family, "workspace", domain.conv_workspace)(op, wanted, stored),
        asks_channels_last=stored.channels_last and not p.channels_last,
    )


def spreads(op: str, kernel: str, p: ConvProblem) -> bool:
    """Whether the kernel's fprop multiplies x by zeros that stand for other channels or columns: an infinity makes NaN
    in outputs whose windows do not hold it."""
    rule = getattr(FAMILIES[family_of(kernel)], "spreads", None)
    return op in ("conv", "conv_fprop") and rule is not None and rule(kernel, p)


def every(op: str, p: ConvProblem, device: Device) -> Iterator[Plan]:
    """A plan for each kernel that can run `op` of p, with the tile that it wants most."""
    if device.platform != "cuda":
        yield from (plan for plan in (_on_cpu(op, family, p) for family in FAMILIES) if isinstance(plan, Plan))
        return
    for name, family in FAMILIES.items():
        if _refused(op, family) is not None:
            continue
        stored = in_memory(name, p)
        seen: set[str] = set()
        for wanted in family.wants(op, stored, device):
            plan = wanted.kernel if wanted.kernel in seen else _planned(op, family, wanted, stored, p, device)
            if isinstance(plan, Plan):
                seen.add(plan.kernel)
                yield plan


def _on_cpu(op: str, algorithm: str, p: ConvProblem) -> Plan | str:
    """The CPU code owns its scratch."""
    if op in NORMALISED and p.dtype not in ("float32", "float64"):
        return "the CPU rounds to 16 bits only behind the call, and what is convolved is rounded before"
    if op == "conv_statistics" and p.dtype not in ("float32", "float64"):
        return "the CPU rounds to 16 bits only behind the call, and statistics are those of what was rounded"
    if family_of(algorithm) in CHANNELS_LAST_ONLY or "/" in algorithm:
        return "it exists on CUDA only"
    if algorithm == "depthwise" and not p.depthwise:
        return f"it needs one input channel per group, got groups={p.groups} for {p.in_channels} channels"
    return Plan("native", "", algorithm)

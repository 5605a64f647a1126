"""Recorded runs: what tables and figures share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks import record

Run = dict[str, Any]

NOTHING = "Nothing is recorded yet.\n"
# What README's rows and figures are of
DEVICE = "nvidia-h200"
STEPS = ("resnet50-bf16-batch256", "convnext_t-bf16-batch256", "mobilenet_v2-bf16-batch256", "unet3d-bf16-batch8")
# What a way of `python -m benchmarks train` is, in a table.
WAYS = {
    "flax": "Flax's layers, XLA",
    "import": "`jaxconv.linen` by import",
    "fused": "`jaxconv.linen`, fused arguments",
    "enable": "`jaxconv.enable()`",
    "accelerate": "`jaxconv.accelerate`",
    "torch": "PyTorch, torch.compile",
}


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """A table whose first `left` columns are text."""
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *rows)) + "\n"


def provenance(run: Run) -> str:
    """A sentence for each run: where, with what, when, from which command."""
    runs = run.get("runs", [run])
    if len(runs) > 1:
        counts = [len({record.key(row)[:2] for row in part["rows"]}) for part in runs]
        return "".join(f"* {n} rows: {provenance(part)}" for n, part in zip(counts, runs, strict=True))
    (run,) = runs
    versions = run["versions"]
    parts = [run["device"] + (f" ({run['cores']} cores)" if "cores" in run else "")]
    parts.append(f"jax {versions['jax']}")
    parts += [f"driver {run['driver'].splitlines()[0]}"] if run.get("driver") else []
    commit = (run["commit"] or "unknown")[:10] + (" with changes" if run["dirty"] else "")
    parts += [f"commit {commit}", run["date"][:10], f"`{run['command']}`"]
    parts += [run["note"]] if "note" in run else []
    return ", ".join(parts) + ".\n"


def problems(run: Run) -> dict[tuple[str, str], dict[str, Run]]:
    """{(case, pass): {contender: row}}"""
    by_problem: dict[tuple[str, str], dict[str, Run]] = {}
    for row in run["rows"]:
        by_problem.setdefault((row["case"], row["pass"]), {})[row["contender"]] = row
    return by_problem


def is_step_alone(run: Run) -> bool:
    """Whether a record is of whole steps of one device, as XLA compiles them by default: these are compared."""
    return run["op"] == "train" and not run["small"] and run["most_devices"] == 1 and not run.get("options")


def training_step(run: Run) -> str:
    power = "³" if run.get("task") == "segment" else "²"
    return f"{run['model']}, {run['dtype']}, {run['batch']} x {run['image']}{power}"

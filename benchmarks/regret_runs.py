"""Recorded runs of `python -m benchmarks regret`, which `fit` learns from and `regret` judges by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax import lax

from benchmarks.ops.conv import ConvCase
from jaxconv import _plan
from jaxconv._core import native
from jaxconv._problem import ConvProblem


def seed_of(run: dict[str, Any]) -> int:
    return int(run["part"].removeprefix("seed"))


def problem_of(row: dict[str, Any]) -> ConvProblem:
    """The problem that a recorded row measured, as `ConvCase.kernel` finds it by tracing."""
    case = case_of(row)
    dtype = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}[row["dtype"]]
    precision = lax.Precision.HIGHEST if row["precision"] == "highest" else lax.Precision.DEFAULT
    shape = (case.batch, case.in_channels, case.out_channels, case.groups, case.spatial, case.filter)
    window = (case.out_spatial, case.stride, case.padding, case.dilation)
    return ConvProblem(f"conv{case.nd}d", dtype, *shape, *window, True, (precision, precision))


def case_of(row: dict[str, Any]) -> ConvCase:
    """The case that a recorded row measured: JSON has lists where it has tuples."""

    def tuples(v: Any) -> Any:
        return tuple(map(tuples, v)) if isinstance(v, list) else v

    return ConvCase(**{name: tuples(value) for name, value in row["shape"].items()})


def problems(run: dict[str, Any]) -> Iterator[tuple[dict[str, Any], ConvProblem]]:
    """The rows of a recorded run in which XLA ran, each with its problem; times by `Plan.spec`."""
    device = _plan.Device("cuda", run["device"], (9, 0), 132)
    for row in run["rows"]:
        if "xla" not in row["ms"]:
            continue
        problem = problem_of(row)
        # Runs until ad93beae56 know the kernels between few channels and many by one name: what their launcher took was
        # the Hopper kernel where that can run.
        if "stem/mma" in row["ms"] and not any(name.startswith("stem/sm90") for name in row["ms"]):
            for kernel in ("stem/sm90_narrow_in", "stem/sm90_narrow_out"):
                if _plan.supports(row["op"], kernel, problem, device) is None:
                    ms = {kernel if name == "stem/mma" else name: t for name, t in row["ms"].items()}
                    row = row | {"ms": ms}
                    break
        yield row, problem


def plan_without_a_gpu() -> None:
    """Plans are data: those for a GPU are made here where there is neither a GPU nor CUDA code."""
    native.cuda_missing = ""

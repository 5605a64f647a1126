"""`explain`: which implementation each call in a function gets, and why. `info`: what was found on this machine."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform as host
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jaxlib

from jaxconv import _enable, _plan, _problem
from jaxconv._core import native, primitives, sharding
from jaxconv._core.types import OfArguments, P
from jaxconv._plan import in_place, measured, tuned
from jaxconv._tools.traced import traced
from jaxconv.accelerate import Report, listening
from jaxconv.joints import told

# What users call a platform -> what plans call it
_PLATFORMS = {"cpu": "cpu", "cuda": "cuda", "gpu": "cuda", "rocm": "rocm", "tpu": "tpu"}


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a jaxconv kernel in a traced function."""

    op: str  # "conv_fprop", "batchnorm_train", ...
    problem: Any
    plan: _plan.Plan
    count: int  # equal calls


class Explanation(list[Call]):
    """A list of `Call`s that prints as a table.

    The list holds the calls after all rules. `regions` lists the programs that rules rewrite: their ops before and
    after, which calls were replaced by which kernels, and the milliseconds that plans know. `fused` lists the
    replacements of all regions. `accelerated` lists the layers that `jaxconv.accelerate` replaced or left, and why.
    `convolutions` lists lax's own convolutions, and what `jaxconv.enable` does with them, or would do if it were on.
    `gathered` lists the arrays that are split over an Explicit mesh and are gathered for a call, and why.
    """

    def __init__(
        self,
        calls: Iterable[Call],
        accelerated: Report,
        convolutions: _enable.Convolutions,
        enabled: bool,
        gathered: Iterable[str] = (),
        regions: Iterable[told.Region] = (),
    ):
        super().__init__(calls)
        self.accelerated = accelerated
        self.convolutions = convolutions
        self.enabled = enabled  # whether enable is on
        self.gathered = list(gathered)
        self.regions = list(regions)

    @property
    def fused(self) -> list[told.Replaced]:
        return [one for region in self.regions for one in region.replaced]

    def __str__(self) -> str:
        anything = self.accelerated or self.accelerated.notes
        parts = [f"accelerate:\n{self.accelerated}"] if anything else []
        if self.convolutions:
            title = "enable" if self.enabled else "enable, which is off, would do"
            parts.append(f"{title}:\n{self.convolutions}")
        parts += told.texts(self.regions)
        if self or not parts:
            parts.append("\n".join([self._calls(), *self.gathered]))
        return "\n\n".join(parts)

    def _calls(self) -> str:
        if not self:
            return "no jaxconv calls"
        rows = [("calls", "op", "problem", "plan", "workspace", "why")]
        for call in self:
            size = call.plan.workspace_bytes
            workspace = f"{size / 2**20:.1f} MiB" if size else "-"
            known = "; ".join(map(str, call.plan.candidates))
            why = f"{call.plan.reason} [{known}]" if known else call.plan.reason
            rows.append((str(call.count), call.op, str(call.problem), str(call.plan), workspace, why))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        table = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*table, *self._legend()])

    def _legend(self) -> list[str]:
        """What the table's short words mean, those that are in it."""
        several = sorted({str(call.plan) for call in self if call.plan.implementation == "calls"})
        products = any(isinstance(call.problem, _problem.DenseProblem) for call in self)
        legend = []
        if several:
            legend.append(f"{', '.join(several)}: no kernel does all of it here, so several calls take its place")
        if products:
            legend.append("MxKxN NN: x is (M, K), w is (K, N); T instead of N: that operand is transposed in memory")
        return legend


def explain(f: Callable[P, Any], *, platform: str | None = None) -> OfArguments[P, Explanation]:
    """A function that takes f's arguments and tells which implementation every jaxconv call in f gets, and why.

    For functions inside f that `jaxconv.accelerate` made, it also lists which layers were replaced, and why the others
    were left. For each of lax's own convolutions it tells whether it is an fprop, a dgrad or a wgrad, and what
    `jaxconv.enable` does with it, or would do if it were on. A pooling that only lax can run (windows of more than 255
    elements, empty arrays) is lax's operation, and is not listed.

    f is traced, and nothing is run or compiled. (`launches` compiles f, and counts what it launches.) Gradients are
    explained too::

        print(jaxconv.explain(jax.grad(loss))(params, batch))

    Args:
      f: any JAX function, jitted or not. On an Explicit mesh, whose types say how arrays are split, the calls are those
        of one shard. On an Auto mesh, where XLA decides later, they are those of the whole arrays.
      platform: "cpu", "cuda" (or "gpu"), "rocm" or "tpu"; None is the default backend. A GPU need not be present. But
        then its kind is unknown, so no measured times are used.

    Returns:
      A function of f's arguments that returns a list of calls (op, problem, plan, count), which prints as a table. Its
      attribute `accelerated` lists what accelerate did (what, shapes, fused, why, where). `convolutions` lists lax's
      convolutions (form, problem, became, why, where, count), as `jaxconv.report` does. f does not show whether XLA
      will partition the program, and in a partitioned program enable leaves convolutions to lax. `regions` lists the
      programs that were rewritten as a whole: before, after, replaced, differentiated. A time there is "measured" (for
      this problem on this device), "predicted", "by the nearest measurement" (scaled by the amount of work), or
      "unknown", and unknown times are in no sum.

    Raises:
      TypeError: if f is no function, or compiled already.
      ValueError: for an unknown platform, and if a forced choice cannot run, as the call itself would raise.
    """
    _problem.check_function("explain", f)
    if platform is not None and platform not in _PLATFORMS:
        raise ValueError(f"explain: platform={platform!r} is unknown, expected None or one of {', '.join(_PLATFORMS)}")

    def explained(*args: Any, **kwargs: Any) -> Explanation:
        device = _plan.Device.current(_PLATFORMS[platform]) if platform else _plan.Device.default()
        with in_place.nothing_timed():
            return _explained(f, args, kwargs, device)

    return explained


def _explained(f: Callable[..., Any], args: Any, kwargs: Any, device: _plan.Device) -> Explanation:
    with listening() as accelerated, told.hearing() as heard:
        jaxpr = traced(f, args, kwargs).jaxpr
        equations = list(primitives.equations(jaxpr.jaxpr, device))
    counts: dict[tuple[str, Any], int] = {}
    for equation in equations:
        made = primitives.KERNELS.get(equation.primitive)
        if made is None:
            continue
        # A kernel of arrays that types split is followed by the kernels of a shard.
        if not primitives.split_by_type(equation):
            key = made.name, equation.params["problem"]
            counts[key] = counts.get(key, 0) + 1
    calls = [Call(op, problem, _plan.plan(op, problem, device), n) for (op, problem), n in counts.items()]
    gathered = dict.fromkeys(_gathered(jaxpr.jaxpr, device))
    would, on = _enable.would(equations, device), _enable.is_on()
    return Explanation(calls, accelerated, would, on, gathered, told.told(heard, device))


def _gathered(jaxpr: Any, device: _plan.Device) -> Iterator[str]:
    """A sentence for each operand of a kernel that a reshard before it gathers."""
    source = {variable: equation for equation in jaxpr.eqns for variable in equation.outvars}
    for equation in jaxpr.eqns:
        made = primitives.KERNELS.get(equation.primitive)
        for i, variable in enumerate(equation.invars if made else []):
            before = source.get(variable) if not hasattr(variable, "val") else None
            if before is not None and before.primitive.name == "reshard":
                rule = made.partition(equation.params["problem"])
                sentence = sharding.gathered(rule, i, before.invars[0].aval, variable.aval)
                if sentence:
                    yield f"{made.name} {equation.params['problem']}: {sentence}"
        for inner in primitives.inner_jaxprs(equation, device):
            yield from _gathered(inner, device)


def info() -> str:
    """What jaxconv found on this machine, what is missing and why, as text for people and for bug reports.

    Example::

        print(jaxconv.info())  # the same as `python -m jaxconv` in a shell
    """
    built = native.cpu.ffi_api()
    running = native.running_ffi_api()
    lines = [
        f"jaxconv {importlib.metadata.version('jaxconv')}",
        f"python {host.python_version()}, jax {jax.__version__}, jaxlib {jaxlib.__version__}",
        f"XLA FFI: built against {built[0]}.{built[1]}, running "
        + (f"{running[0]}.{running[1]}" if running else "unknown (jaxlib ships no headers)"),
        f"CPU code: loaded, BLAS {'from SciPy' if native.cpu.has_blas() else 'missing: plain loops instead'}",
    ]
    if native.cuda is None:
        lines.append(f"CUDA code: none. {native.cuda_missing}")
    else:
        lines.append(f"CUDA code: loaded, for {', '.join(native.cuda.architectures())}")
    try:
        devices = jax.devices("cuda")
        lines.append(f"GPUs: {len(devices)} x {devices[0].device_kind}")
    except RuntimeError as error:
        lines.append(f"GPUs: none. {str(error).splitlines()[0]}")
    lines.append(f"default backend: {jax.default_backend()}")
    lines.append(f"enable: {'on' if _enable.is_on() else 'off'}")
    device = _plan.Device.default()
    here = len(tuned.active().on(tuned.device_name(device))) if device.kind else 0
    lines.append(f"tuned problems of this device: {here}, {tuned.path()}")
    if in_place.asked() is not None:
        lines.append("unmeasured problems are timed while programs compile (JAXCONV_TUNE, enable(tune=True))")
    if device.platform == "cuda":
        lines.append(_tables(device))
    if os.environ.get("JAXCONV_DISABLE"):
        unknown = _unknown_disabled()
        lines.append(
            f"JAXCONV_DISABLE={os.environ['JAXCONV_DISABLE']}" + (f" ({unknown})" if unknown else ": these go to XLA")
        )
    return "\n".join(lines)


def _tables(device: _plan.Device) -> str:
    """What the recorded times of the device were measured with, and whether the running jaxlib is newer."""
    if not measured.table(device.kind):
        return f"recorded times: none of {device.kind or 'this device'}; jaxconv.tune measures your own function"
    versions = measured.measured_with(device.kind)
    told = ", ".join(f"{name} {version}" for name, version in versions.items()) or "unknown versions"
    line = f"recorded times: of {device.kind}, with {told}"
    # The third number is of fixes.
    if measured.numbers(jaxlib.__version__)[:2] > measured.numbers(versions.get("jaxlib", jaxlib.__version__))[:2]:
        line += f"; jaxlib {jaxlib.__version__} is newer, and XLA may have changed: jaxconv.tune measures it here"
    return line


def _unknown_disabled() -> str | None:
    """What is wrong with JAXCONV_DISABLE, or None."""
    names = {name.strip() for name in os.environ.get("JAXCONV_DISABLE", "").split(",")}
    unknown = sorted(names - {"", "all", "layernorm", *_plan.OPS, *_plan.OPS.values()})
    if not unknown:
        return None
    groups = ", ".join(dict.fromkeys([*_plan.OPS.values(), "layernorm"]))
    return f"unknown: {', '.join(map(repr, unknown))}; expected some of {groups} (comma-separated), or all"


def warn_of_environment() -> None:
    """Warns where JAXCONV_DISABLE names what is no op: nothing would be disabled, and nobody would know."""
    unknown = _unknown_disabled()
    if unknown:
        warnings.warn(f"JAXCONV_DISABLE={os.environ['JAXCONV_DISABLE']}: {unknown}", stacklevel=3)

"""What rules made of regions, told with milliseconds: the ops of a region's program before and after, and what was put
in whose place.

A time is what a plan's choice was made from: of this very problem on this device, predicted for it, or by the nearest
measurement, scaled by how much more work there is. What nobody knows is said to be unknown and is in no sum.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from jaxconv import _plan
from jaxconv._core.graph import REGION, equations_of
from jaxconv._plan import measured
from jaxconv.joints import rules
from jaxconv.joints.rules import Op

SOURCES = ("measured", "predicted", "by the nearest measurement", "unknown")


@dataclasses.dataclass(frozen=True)
class Timed:
    """An op of a program, the kernel that its plan takes ("xla" is XLA's), and its time."""

    op: str
    problem: Any
    kernel: str
    ms: float | None  # None: nobody knows
    source: str  # of SOURCES

    def __str__(self) -> str:
        time = "its time is unknown" if self.ms is None else f"{self.ms:.3f} ms, {self.source}"
        return f"{self.op} {self.problem}: {self.kernel}, {time}"


@dataclasses.dataclass(frozen=True)
class Replaced:
    """What a rule put in whose place, at how many places where the same stood."""

    rule: str
    before: tuple[Timed, ...]
    after: tuple[Timed, ...]
    count: int


@dataclasses.dataclass(frozen=True)
class Region:
    """A region's program before and after the rules. What is equal in both is in both."""

    differentiated: bool  # whether it is the program of results and gradients
    before: tuple[Timed, ...]
    after: tuple[Timed, ...]
    replaced: tuple[Replaced, ...]

    def __str__(self) -> str:
        if self.before == self.after:
            return "\n".join([f"no rule changes it: {_sum(self.before)}", *_table(self.before)])
        sums = [f"before: {_sum(self.before)}", f"after:  {_sum(self.after)}"]
        return "\n".join([*sums, *_table(self.before, self.after), *_by_rule(self.replaced)])


def told(heard: Iterable[rules.Rewritten], device: _plan.Device) -> list[Region]:
    """Of programs that were rewritten, those that have ops of ours in them."""
    known: dict[Op, Timed] = {}

    def timed(ops: Iterable[Op]) -> tuple[Timed, ...]:
        return tuple(known[one] if one in known else known.setdefault(one, time_of(*one, device)) for one in ops)

    found = []
    for one in heard:
        counts = collections.Counter(one.fusions)
        replaced = (Replaced(f.rule, timed(f.before), timed(f.after), n) for f, n in counts.items())
        if one.before:
            found.append(Region(one.differentiated, timed(one.before), timed(one.after), tuple(replaced)))
    return found


def told_of(f: Callable[..., Any], avals: Sequence[Any], device: _plan.Device) -> list[Region]:
    """Of the regions in a function of these types, as a call of it runs them on the device."""
    with hearing() as heard:
        for outer in jax.make_jaxpr(f)(*avals).jaxpr.eqns:
            for equation in equations_of(outer):
                if equation.primitive.name == REGION:
                    equation.params["program"].rewritten(device)
    return told(heard, device)


@contextlib.contextmanager
def hearing() -> Iterator[list[rules.Rewritten]]:
    """What is rewritten inside."""
    heard: list[rules.Rewritten] = []
    token = rules.HEARD.set(heard)
    try:
        yield heard
    finally:
        rules.HEARD.reset(token)


# ----------------------------------------------------------------------------------------------------------------------
# Times


def time_of(op: str, problem: Any, device: _plan.Device) -> Timed:
    """What is known of the kernel that the plan takes."""
    if op not in _plan.OPS:  # an op without a kernel: XLA fuses what it means
        return Timed(op, problem, "xla", None, "unknown")
    plan = _plan.plan(op, problem, device)
    if plan.implementation == "calls":
        return Timed(op, problem, f"calls[{plan.kernel}]", None, "unknown")
    name = plan.kernel if plan.implementation == "native" else "xla"
    of_name = [c for c in plan.candidates if c.name == name]
    tuned = next((c.ms for c in of_name if c.how.startswith("tuned")), None)
    predicted = next((c.ms for c in of_name if c.how.startswith("predicted")), None)
    exact = near = None
    if any(c.how.startswith("measured") for c in of_name):
        kernels = {c.name for c in plan.candidates if c.how.startswith("measured")} - {"xla"}
        exact, near = _measured(op, problem, device, name, sorted(kernels))
        near = of_name[0].ms if exact is near is None else near  # of another op that does the same work
    for ms, source in zip((exact if tuned is None else tuned, predicted, near), SOURCES, strict=False):
        if ms is not None:
            return Timed(op, problem, name, ms, source)
    return Timed(op, problem, name, None, "unknown")


def _measured(
    op: str, problem: Any, device: _plan.Device, name: str, kernels: Sequence[str]
) -> tuple[float | None, float | None]:
    """(the time of this very problem, that of its nearest neighbour, as if all of it grew with the work)."""
    _, _, coordinates = measured.features(op, problem)
    exact = near = None
    for kernel in (name,) if name != "xla" else kernels:
        m = measured.nearest(op, problem, device, kernel)
        if m is None or (name == "xla" and m.against_two):
            continue
        ms = m.xla_ms if name == "xla" else m.native_ms[name]
        if m.coordinates == coordinates and not m.sister:
            exact = ms if exact is None else min(exact, ms)
        elif near is None:
            near = ms * measured.work(m, op, problem)
    return exact, near


# ----------------------------------------------------------------------------------------------------------------------
# Text


def texts(regions: Sequence[Region]) -> list[str]:
    """A paragraph for each region, equal ones together."""
    counts = collections.Counter((one.differentiated, str(one)) for one in regions)
    return [f"{_title(differentiated, n)}\n{text}" for (differentiated, text), n in counts.items()]


def _title(differentiated: bool, count: int) -> str:
    of = "results and gradients" if differentiated else "results"
    return (
        f"a region of {of}, times by the plans"
        if count == 1
        else f"{count} equal regions of {of}, times of each by the plans"
    )


def _sum(ops: Sequence[Timed]) -> str:
    """ "480 calls, 40.123 ms (300 measured, 150 predicted, 30 unknown)"."""
    counts = collections.Counter(one.source for one in ops)
    sources = ", ".join(f"{counts[source]} {source}" for source in SOURCES if counts[source])
    return f"{len(ops)} call{'s' * (len(ops) != 1)}, {_ms(ops)}" + (f" ({sources})" if ops else "")


def _ms(ops: Sequence[Timed]) -> str:
    """The sum of what is known."""
    known = [one.ms for one in ops if one.ms is not None]
    if not known:
        return "unknown" if ops else "0 ms"
    unknown = len(ops) - len(known)
    return f"{sum(known):.3f} ms" + (f" and {unknown} unknown" if unknown else "")


def _table(*programs: Sequence[Timed]) -> list[str]:
    """A line for each op: how many calls of it there are, and their time; in the program before, and that after."""
    rows = [["op", "before", "", "after", ""]] if len(programs) > 1 else [["op", "calls", ""]]
    for op in dict.fromkeys(one.op for ops in programs for one in ops):
        of_op = [[one for one in ops if one.op == op] for ops in programs]
        rows.append([op, *(text for ops in of_op for text in (str(len(ops)), _ms(ops) if ops else ""))])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _by_rule(replaced: Sequence[Replaced]) -> Iterator[str]:
    """Of each rule, where it was applied: ops of one name together, whatever their problems."""
    for rule in dict.fromkeys(one.rule for one in replaced):
        of_rule = [one for one in replaced if one.rule == rule]
        yield f"{sum(one.count for one in of_rule)} x {rule}"
        for sign in "-+":
            ops = [op for one in of_rule for op in (one.before if sign == "-" else one.after) * one.count]
            for name in dict.fromkeys(op.op for op in ops):
                named = [op for op in ops if op.op == name]
                problems = {str(op.problem) for op in named}
                example = next(iter(problems)) if len(problems) == 1 else f"of {len(problems)} problems"
                kernels = collections.Counter(op.kernel for op in named)
                by = ", ".join(f"{n} {kernel}" for kernel, n in kernels.most_common())
                yield f"  {sign} {len(named)} {name} {example}: {_ms(named)}, by {by}"

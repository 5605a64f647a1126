"""Which convolutions native code runs although no kernel is surely faster: short ones, and several of a program.

A convolution stays XLA's unless a kernel is surely faster: it may be the only one of its program. Predictions are off
by a quarter (kernels) and by a half (XLA), and errors of different convolutions partly cancel in their sum. So the
sum of many may pass the test that each alone fails: an expected gain that is worth the probability of a loss.

And what is short waits for its host, not for the device. XLA replays launches as CUDA graphs. cuDNN's convolutions
stay outside of graphs by default: each is a launch of its own, and cuts a graph in two. A kernel of ours is in the
graph. So it is taken where it is expected to be no slower, and in a program of short calls if it is a little slower.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from jaxconv._plan import choose, measured, model, tuned
from jaxconv._plan.plan import Device, Nearest
from jaxconv._plan.planner import PLANNERS
from jaxconv._problem import Together

# In ms: XLA's convolutions that take less wait for the host. One of cuDNN's between two graphs takes the host 14 to 23
# us more than one inside (H200: 31 of a ResNet-50's answer, 34 of a MobileNetV2's).
SHORT_MS = 0.02
# A program waits for its host if its convolutions, products and norms take less than this on average: in steps and
# answers of ten networks with default options (H100, H200) the host took 21 to 32 us for each. Fewer calls may be a
# part of a larger program, of which they say little.
WAITS_MS = 0.03
LEAST_CALLS = 8
# By so much a kernel of ours may be slower then: about the gap between two launches in a graph.
LAUNCH_MS = 0.002
# And by no more than this may its time be off, which is about what the host takes to launch it otherwise.
OFF_MS = 0.01
# Correlation of the errors of two predictions in a program: of drawn problems with one type, number of dimensions and
# grouping, which a model that had not seen them predicted (830 that were unsure).
ALIKE = 0.1
SHORT = "XLA's is shorter than its launch, and a CUDA graph holds this kernel, unlike cuDNN's"
WORTH = "many convolutions of this program are chosen together, and their sum is worth it"
WAITS = "the program waits for its host, and a CUDA graph holds this kernel, unlike cuDNN's"


@dataclasses.dataclass(frozen=True, eq=False)
class Unsure:
    """Equal convolutions of a program that are XLA's alone, and the kernel that comes nearest."""

    nearest: Nearest
    count: int

    @property
    def xla_ms(self) -> float:
        return self.count * self.nearest.xla_ms

    @property
    def ms(self) -> float:
        return self.count * self.nearest.ms


def waits(calls_ms: Sequence[float]) -> bool:
    """Whether a program of calls that take so long waits for its host."""
    return len(calls_ms) >= LEAST_CALLS and sum(calls_ms) < WAITS_MS * len(calls_ms)


def taken(unsure: Sequence[Unsure], waiting: bool) -> list[tuple[Unsure, bool]]:
    """Those that native code runs, and whether that is because the program waits: all that pass the test together,
    without those that are expected to be the least worth it as long as they do not; where the program waits, also those
    that are at most a little slower, and not off by much."""
    able = sorted((one for one in unsure if one.nearest.ratio > 1), key=lambda one: one.nearest.ratio)
    while able and not _sure(able):
        able = able[1:]
    return [(one, one not in able) for one in unsure if one in able or (waiting and _may_wait(one.nearest))]


def _may_wait(one: Nearest) -> bool:
    return one.xla_ms * one.deviation <= OFF_MS and one.ms - one.xla_ms <= LAUNCH_MS


def _sure(these: Sequence[Unsure]) -> bool:
    """`model.sure` of their sum. Each error counts with the share of its time; two of them are alike by ALIKE."""
    ms = sum(one.ms for one in these)
    parts = [one.ms / ms * one.nearest.deviation for one in these]
    squares = sum(part * part for part in parts)
    deviation = math.sqrt((1 - ALIKE) * squares + ALIKE * sum(parts) ** 2)
    return model.sure(sum(one.xla_ms for one in these) / ms, deviation)


def plan_together(ops: Iterable[tuple[str, Any]], device: Device, captured: bool = False) -> dict[tuple[str, Any], Any]:
    """Of a program's ops, the convolutions that are XLA's alone, and native code's together with the others: by op and
    problem, the problem that says so. `captured`: whether CUDA graphs hold cuDNN's convolutions too, so that it is no
    reason that the program waits for its host."""
    if device.platform != "cuda" or device.partitioned or choose.missing(device) is not None:
        return {}
    known: list[float] = []
    equal: dict[Any, list[tuple[tuple[str, Any], tuple[str, Any], Nearest, int]]] = {}
    found = {}
    for (op, problem), count in collections.Counter(ops).items():
        if op not in PLANNERS:
            continue
        asked, within = problem, PLANNERS[op].within(problem)
        if captured and within is not None:
            asked = found[op, problem] = _marked(problem, within, "captured")
            within = PLANNERS[op].within(asked)
        plan = choose.plan(op, asked, device)
        if within is not None and plan.implementation == "calls":
            plan = choose.plan(*within, device)
        if plan.ms is not None:
            known += [plan.ms] * count
        if within is not None and plan.nearest is not None:
            # Whatever stands behind it, its times are the same prediction.
            prediction = measured.features(*within), plan.nearest.plan.kernel
            equal.setdefault(prediction, []).append(((op, problem), within, plan.nearest, count))
    unsure = {Unsure(these[0][2], sum(count for *_, count in these)): these for these in equal.values()}
    for one, waits_for_host in taken([*unsure], waits(known) and not captured):
        for (op, problem), within, *_ in unsure[one]:
            marked = _marked(problem, within, "waits" if waits_for_host else "worth")
            if not PLANNERS[op].with_the_add or choose.plan(op, marked, device).implementation == "native":
                found[op, problem] = marked
    return found


def _marked(problem: Any, within: tuple[str, Any], says: Literal["worth", "waits", "captured"]) -> Any:
    op, of_problem = within
    return dataclasses.replace(problem, together=Together(op, tuned.key_of(of_problem), says))


def nevertheless(op: str, problem: Any, nearest: Nearest) -> str | None:
    """Why the nearest kernel runs a convolution though it is not surely faster; None where XLA does.

    A mark counts if it is of this very op and problem, and not where the kernel is too slow: a problem may be planned
    for another device than its program. Without one, a kernel is taken that is expected to be no slower than a
    convolution that takes less than its launch."""
    mark: Together | None = problem.together
    if mark is not None and (mark.op, mark.problem) == (op, tuned.key_of(problem)):
        slow = nearest.ratio < 1 and nearest.ms - nearest.xla_ms > LAUNCH_MS
        return None if slow else {"worth": WORTH, "waits": WAITS, "captured": None}[mark.says]
    return SHORT if nearest.xla_ms <= SHORT_MS and nearest.ratio >= 1 else None

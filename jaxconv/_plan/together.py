"""Which of a program's convolutions native code runs although none of them would be chosen alone.

Alone a convolution stays XLA's unless a kernel is surely faster: it may be the only one of its program. Predictions are
off by a quarter (kernels) and by a half (XLA), and errors of different convolutions partly cancel in their sum. So the
sum of many may pass the test that each alone fails: an expected gain that is worth the probability of a loss.

And a program of short calls waits for its host, not for the device. XLA replays launches as CUDA graphs. cuDNN's
convolutions stay outside of graphs by default: each is a launch of its own, and cuts a graph in two. A kernel of ours
is in the graph, and may even take a little longer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jaxconv._plan import model
from jaxconv._plan.plan import Nearest

# A program waits for its host if its convolutions, products and norms take less than this on average: in steps and
# answers of ten networks with default options (H100, H200) the host took 21 to 32 us for each. Fewer calls may be a
# part of a larger program, of which they say little.
WAITS_MS = 0.03
LEAST_CALLS = 8
# By so much a kernel of ours may be slower then: about the gap between two launches in a graph. Outside of one cuDNN's
# convolution takes the host 13 us.
LAUNCH_MS = 0.002
# And by no more than this may its time be off, which is about what the host takes to launch it otherwise.
OFF_MS = 0.01
# Correlation of the errors of two predictions in a program: of drawn problems with one type, number of dimensions and
# grouping, which a model that had not seen them predicted (830 that were unsure).
ALIKE = 0.1
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
        return self.xla_ms / self.nearest.ratio


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
    return one.xla_ms * one.deviation <= OFF_MS and one.xla_ms * (1 / one.ratio - 1) <= LAUNCH_MS


def _sure(these: Sequence[Unsure]) -> bool:
    """`model.sure` of their sum. Each error counts with the share of its time; two of them are alike by ALIKE."""
    ms = sum(one.ms for one in these)
    parts = [one.ms / ms * one.nearest.deviation for one in these]
    squares = sum(part * part for part in parts)
    deviation = math.sqrt((1 - ALIKE) * squares + ALIKE * sum(parts) ** 2)
    return model.sure(sum(one.xla_ms for one in these) / ms, deviation)

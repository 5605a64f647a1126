"""Which cases of the suite a command runs.

    make test                     the first tier
    make test-rest                the other cases; PART=2/4 takes the second quarter of them
    make test-all                 all cases, slow ones too
    ... ARGS=tests/test_conv.py   all cases of the file but slow ones
    ... ARGS="-k dgrad"           all cases that -k, -m or a name with :: picks, slow ones too

The suite's cases are products: algorithms x data types x layouts. The first tier has the cases that show most in BUDGET
processor seconds. What a case can show is

* its test function, which counts as FUNCTION values, as PROMISE values if it is marked `promise`,
* each value of a parameter that takes no more than FEW values in this test (data types, layouts, switches),
* each value of a longer parameter (problems, algorithms, layers), once for all tests of a file.

The next case is the one that shows most per second of what no earlier case has shown; of equals, the first one.
So the tier depends on the suite and on costs.json alone: processor seconds of a case of each test, as `make test
ARGS=--record-costs` and `make test-rest ARGS=--record-costs` measured them. A test without a record counts as quick, so
that a new test is in the tier. Greedy choices under a budget: S. Khuller, A. Moss, J. Naor, "The budgeted maximum
coverage problem", 1999.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import heapq
import json
import pathlib
from collections.abc import Hashable, Iterable, Mapping, Sequence

BUDGET = 200.0  # processor seconds. Finding the tests, in two workers, and passing results on takes some 75 more.
FEW = 3
FUNCTION = 4
PROMISE = 1000  # before all others, whatever it costs: what the front page promises
QUICK = 0.05  # seconds, of a test without a record
COSTS = pathlib.Path(__file__).with_name("costs.json")


@dataclasses.dataclass(frozen=True)
class Case:
    file: str
    test: str  # unique in the file
    values: Mapping[str, str]  # parameter -> its value, as text
    marks: frozenset[str] = frozenset()
    again: bool = False  # float16 where a case of bfloat16 runs the same code

    @property
    def key(self) -> str:
        return f"{self.file}::{self.test}"


@dataclasses.dataclass(frozen=True)
class Asked:
    """What somebody asked pytest for."""

    everything: bool = False
    rest: str = ""  # "K/N": part K of N of what the first tier leaves out
    cases: bool = False  # some are named, by -k, -m or ::
    files: bool = False  # some are named


def chosen(cases: Sequence[Case], asked: Asked) -> list[int]:
    """The positions of the cases to run, in order."""
    if asked.rest:
        which, of = parsed(asked.rest)
        first = set(first_tier(cases))
        rest = [i for i, case in enumerate(cases) if usual(case) and i not in first]
        return rest[which - 1 :: of]
    if asked.everything or asked.cases:
        return list(range(len(cases)))
    if asked.files:
        return [i for i, case in enumerate(cases) if usual(case)]
    return first_tier(cases)


def usual(case: Case) -> bool:
    return "slow" not in case.marks and not case.again


def parsed(part: str) -> tuple[int, int]:
    which, _, of = part.partition("/")
    if not (which.isdecimal() and of.isdecimal() and 1 <= int(which) <= int(of)):
        raise ValueError(f"--rest got {part!r}, expected K/N with 1 <= K <= N, for example 2/4")
    return int(which), int(of)


def first_tier(cases: Sequence[Case], costs: Mapping[str, float] | None = None, budget: float = BUDGET) -> list[int]:
    """The positions of the cases that show most in the budget, in order."""
    costs = recorded() if costs is None else costs
    usable = {i: case for i, case in enumerate(cases) if "slow" not in case.marks}
    taken = collections.defaultdict(set)
    for case in usable.values():
        for name, value in case.values.items():
            taken[case.key, name].add(value)
    shown: dict[int, set[Hashable]] = {}
    for i, case in usable.items():
        shown[i] = {(case.key, n) for n in range(PROMISE if "promise" in case.marks else FUNCTION)}
        for name, value in case.values.items():
            few = len(taken[case.key, name]) <= FEW
            shown[i].add((case.key if few else case.file, name, value))
    return sorted(greedy_choice(shown, {i: costs.get(case.key, QUICK) for i, case in usable.items()}, budget))


def greedy_choice(sets: Mapping[int, set[Hashable]], costs: Mapping[int, float], budget: float) -> list[int]:
    """Names of sets that cost no more than the budget and have many elements.

    The next set has the most new elements for its cost; of equals, it has the least name. A set without new elements is
    not taken, nor is one that is beyond the budget. A set's number of new elements never grows: the heap holds numbers
    that were right once, and its top is next if its number still is.
    """
    missing = set[Hashable]().union(*sets.values())
    heap = [(-len(elements) / costs[name], name) for name, elements in sets.items()]
    heapq.heapify(heap)
    choice = []
    while heap:
        old, name = heapq.heappop(heap)
        new = sets[name] & missing
        if not new or costs[name] > budget:
            continue
        if -len(new) / costs[name] > old:
            heapq.heappush(heap, (-len(new) / costs[name], name))
            continue
        choice.append(name)
        missing -= new
        budget -= costs[name]
    return choice


@functools.cache
def recorded() -> dict[str, float]:
    return json.loads(COSTS.read_text()) if COSTS.exists() else {}


def record(seconds: Iterable[tuple[str, float]]) -> None:
    """Writes the mean of each test's cases, in processor seconds, over what was recorded of these tests."""
    of = collections.defaultdict(list)
    for key, one in seconds:
        of[key].append(one)
    means = {key: max(float(f"{sum(all_) / len(all_):.2g}"), 0.001) for key, all_ in of.items()}
    recorded.cache_clear()
    COSTS.write_text(json.dumps(recorded() | means, indent=0, sort_keys=True) + "\n")

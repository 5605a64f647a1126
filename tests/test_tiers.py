"""What `make test`, `make test-rest` and `make test-all` run, of made-up suites and of the one that was collected."""

from __future__ import annotations

import itertools
import random
import types

import conftest
import helpers
import pytest
import tiers
from tiers import Asked, Case

DTYPES = ("float32", "bfloat16")
LAYOUTS = ("NHWC", "NCHW", "CHWN")
SHAPES = tuple(f"shape{i}" for i in range(7))


def product(test: str, file: str = "a.py", **parameters: tuple[str, ...]) -> list[Case]:
    rows = itertools.product(*parameters.values())
    return [Case(file, test, dict(zip(parameters, row, strict=True))) for row in rows]


def values(cases: list[Case], name: str, test: str) -> set[str]:
    return {case.values[name] for case in cases if case.test == test}


def test_a_tier_has_each_test_each_short_value_in_its_test_and_each_long_one_in_its_file():
    cases = product("one", dtype=DTYPES, layout=LAYOUTS, shape=SHAPES)
    cases += product("other", dtype=DTYPES, shape=SHAPES)
    cases += product("plain")
    cases += product("one", file="b.py", shape=SHAPES)
    tier = [cases[i] for i in tiers.first_tier(cases, {})]
    here = [case for case in tier if case.file == "a.py"]
    assert values(here, "dtype", "one") == values(here, "dtype", "other") == set(DTYPES)
    assert values(here, "layout", "one") == set(LAYOUTS)
    assert values(here, "shape", "one") | values(here, "shape", "other") == set(SHAPES)
    assert [case.test for case in here].count("plain") == 1
    assert len([case for case in tier if case.file == "b.py"]) == len(SHAPES)
    assert len(here) <= len(SHAPES) + len(DTYPES) + 1  # of 57


def test_what_costs_much_for_what_it_shows_is_left_out():
    cases = product("quick", shape=SHAPES) + product("long", dtype=DTYPES) + product("longest")
    costs = {"a.py::quick": 0.1, "a.py::long": 1.0, "a.py::longest": 9.0}

    def tier(budget: float) -> list[str]:
        return [cases[i].test for i in tiers.first_tier(cases, costs, budget)]

    assert tier(12) == [*["quick"] * len(SHAPES), *["long"] * 2, "longest"]
    assert tier(3) == [*["quick"] * len(SHAPES), *["long"] * 2]
    assert tier(1.8) == [*["quick"] * len(SHAPES), "long"]
    assert tier(0.35) == ["quick"] * 3
    assert tier(0) == []


def test_what_the_front_page_promises_comes_first():
    long = Case("a.py", "long", {}, frozenset({"promise"}))
    cases = [*product("quick", shape=SHAPES), long]
    chosen = tiers.first_tier(cases, {"a.py::long": 9.0, "a.py::quick": 0.5}, 10)
    assert [cases[i].test for i in chosen] == ["quick", "quick", "long"]


def plain_choice(sets: dict[int, set[int]], costs: dict[int, float], budget: float) -> list[int]:
    missing, choice = set().union(*sets.values()), []
    while True:
        names = [name for name in sorted(sets) if sets[name] & missing and costs[name] <= budget]
        if not names:
            return choice
        best = max(names, key=lambda name: len(sets[name] & missing) / costs[name])  # the first of equals
        choice.append(best)
        missing -= sets[best]
        budget -= costs[best]


@pytest.mark.parametrize("seed", range(20))
def test_the_next_case_is_the_one_that_shows_most_for_its_cost(seed):
    of = random.Random(seed)
    names = range(of.randrange(1, 25))
    sets = {name: {of.randrange(30) for _ in range(of.randrange(1, 8))} for name in names}
    costs = {name: of.choice([0.5, 1.0, 3.0]) for name in names}
    budget = of.choice([3.0, 10.0, 100.0])
    choice = tiers.greedy_choice(sets, costs, budget)
    assert choice == plain_choice(sets, costs, budget)
    assert sum(costs[name] for name in choice) <= budget
    if budget == 100:
        assert set().union(*(sets[name] for name in choice)) == set().union(*sets.values())


def test_costs_are_means_over_those_of_before(tmp_path, monkeypatch):
    monkeypatch.setattr(tiers, "COSTS", tmp_path / "costs.json")
    tiers.COSTS.write_text('{"a": 3.0, "b": 2.0}')
    tiers.recorded.cache_clear()
    tiers.record([("b", 0.1), ("c", 0.0), ("b", 0.1234)])
    tiers.recorded.cache_clear()
    assert tiers.recorded() == {"a": 3.0, "b": 0.11, "c": 0.001}
    tiers.recorded.cache_clear()


def test_a_command_gets_its_cases():
    few, other, slow, *_ = product("one", dtype=("bfloat16",), shape=SHAPES)
    slow = Case(slow.file, slow.test, slow.values, frozenset({"slow"}))
    again = Case(few.file, few.test, few.values | {"dtype": "float16"}, again=True)
    more = Case(other.file, other.test, other.values)
    cases = [few, slow, other, again, more]

    def run(**asked: object) -> list[Case]:
        return [cases[i] for i in tiers.chosen(cases, Asked(**asked))]

    assert run() == [few, other, again]  # each data type and each shape
    assert run(rest="1/1") == [more]
    assert run(files=True) == [few, other, more]
    assert run(everything=True) == run(cases=True) == cases


@pytest.mark.parametrize("part", ["", "0/4", "5/4", "1", "1/", "a/b", "-1/2", "1/2/3"])
def test_a_part_that_is_none_is_refused(part):
    with pytest.raises(ValueError, match="expected K/N"):
        tiers.parsed(part)


class Item:
    def __init__(self, nodeid: str, mark: str = "", **params: str):
        self.nodeid, self.marks = nodeid, [types.SimpleNamespace(name=mark)] if mark else []
        if params:
            self.callspec = types.SimpleNamespace(params=params)

    def iter_markers(self) -> list[types.SimpleNamespace]:
        return self.marks


def collected(
    items: list[Item],
    args: tuple[str, ...] = ("tests",),
    rest: str = "",
    keyword: str = "",
    markexpr: str = "",
    everything: bool = False,
) -> list[str]:
    """What is left of items that pytest found."""
    gone, left = [], list(items)
    hook = types.SimpleNamespace(pytest_deselected=lambda items: gone.extend(items))
    option = types.SimpleNamespace(all=everything, rest=rest, keyword=keyword, markexpr=markexpr)
    config = types.SimpleNamespace(args=list(args), option=option, hook=hook, stash=pytest.Stash())
    conftest.pytest_collection_modifyitems(config, left)
    assert sorted(i.nodeid for i in (*left, *gone)) == sorted(i.nodeid for i in items)
    return [item.nodeid for item in left]


ITEMS = [
    Item("a.py::plain"),
    Item("a.py::dear", "slow"),
    Item("a.py::typed[float16-relu]", dtype="float16", f="relu"),
    Item("a.py::typed[bfloat16-relu]", dtype="bfloat16", f="relu"),
    Item("a.py::typed[float16-gelu]", dtype="float16", f="gelu"),  # no bfloat16 beside it
    Item("b.py::typed[float16-relu]", dtype="float16", f="relu"),  # another test
]
ALL = [item.nodeid for item in ITEMS]


def test_what_pytest_is_asked_for_reaches_the_choice():
    again = {"a.py::typed[float16-relu]"} if helpers.PLATFORM == "cpu" else set()
    usual = [nodeid for nodeid in ALL if nodeid not in {"a.py::dear"} | again]
    # The first case of `typed` shows float16 and relu; then bfloat16 and gelu are missing.
    first = [nodeid for nodeid in ALL if nodeid != "a.py::dear"]
    assert collected(ITEMS) == first
    assert collected(ITEMS, args=("tests/a.py",)) == usual
    more = [*ITEMS, Item("a.py::typed[bfloat16-gelu]", dtype="bfloat16", f="gelu")]
    assert collected(more) == ["a.py::plain", "a.py::typed[float16-relu]", "b.py::typed[float16-relu]", more[-1].nodeid]
    other = [] if helpers.PLATFORM == "cpu" else ["a.py::typed[float16-gelu]"]  # bfloat16 is beside it now
    assert collected(more, rest="1/1") == ["a.py::typed[bfloat16-relu]", *other]
    assert collected(ITEMS, everything=True) == ALL
    with pytest.raises(pytest.UsageError, match="expected K/N"):
        collected(ITEMS, rest="3/2")


@pytest.mark.parametrize("named", [dict(args=("a.py::dear",)), dict(keyword="dear"), dict(markexpr="slow")])
def test_who_names_tests_gets_them(named):
    assert collected(ITEMS, **named) == ALL


def test_no_case_of_this_suite_is_lost(request):
    """Of what was collected now: the tiers are disjoint, and together they are all there is."""
    cases = request.config.stash[conftest.CASES]
    first = tiers.chosen(cases, Asked())
    parts = [tiers.chosen(cases, Asked(rest=f"{k}/4")) for k in (1, 2, 3, 4)]
    left = [i for i, case in enumerate(cases) if "slow" in case.marks or (case.again and i not in first)]
    assert sorted([*first, *itertools.chain(*parts), *left]) == list(range(len(cases)))
    assert tiers.chosen(cases, Asked(everything=True)) == list(range(len(cases)))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1

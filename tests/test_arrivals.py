"""tests/arrivals.py finds an arrival that passes a load, and no other."""

from __future__ import annotations

import pytest
from arrivals import kernels, passed

WAIT = "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R3+URZ], R2"
LOAD = "LDS R4, [R5]"
ARRIVE = "@!P3 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R10+URZ+0x8], RZ"


def sass(*code: tuple[str, int, int]) -> list[str]:
    """(instruction, its scoreboard, the scoreboards that it waits for)"""
    lines = ["\t\tFunction : kernel"]
    for i, (text, scoreboard, waits) in enumerate(code):
        lines.append(f"        /*{i * 16:04x}*/                   {text} ;   /* 0x{i:016x} */")
        lines.append(f"                                            /* 0x{waits << 52 | scoreboard << 46:016x} */")
    return lines


@pytest.mark.parametrize(
    ("between", "found"),
    [
        ([], 1),
        ([("FADD R4, R4, R6", 7, 0b000010)], 1),
        ([("FADD R4, R4, R6", 7, 0b000100)], 0),
        ([("MEMBAR.ALL.CTA", 7, 0), ("FENCE.VIEW.ASYNC.S", 5, 0b100000)], 0),
        ([("FADD R4, R4, R6", 7, 0b000100), (LOAD, 2, 0)], 1),  # another load by the same scoreboard
        ([("BAR.SYNC.DEFER_BLOCKING R8, 0x80", 7, 0)], 1),
        ([("BAR.SYNC.DEFER_BLOCKING R8, 0x80", 7, 0b000100)], 0),
        ([(WAIT, 7, 0)], 0),
    ],
    ids=[
        "nothing",
        "another waited for",
        "waited for",
        "a fence",
        "waited for and loaded again",
        "a block's barrier",
        "one that waits",
        "another stage",
    ],
)
def test_a_load_is_under_way_until_it_is_waited_for(between, found):
    code = [(WAIT, 7, 0), (LOAD, 2, 0), *between, (ARRIVE, 7, 0)]
    ((name, instructions),) = kernels(sass(*code))
    assert name == "kernel" and len(instructions) == len(code)
    arrivals = list(passed(instructions))
    assert len(arrivals) == found
    for arrival, loads in arrivals:
        assert arrival.address == (len(code) - 1) * 16 and [load.text for load in loads] == [LOAD]


def test_the_arrival_itself_may_wait():
    code = [(LOAD, 2, 0), (ARRIVE, 7, 0b000100)]
    ((_, instructions),) = kernels(sass(*code))
    assert not list(passed(instructions))

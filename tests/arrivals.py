"""Reads the machine code of the CUDA module: does an arrival at a barrier pass loads that are still under way?

    python tests/arrivals.py path/to/_cuda.abi3.so      # needs cuobjdump; a minute and a half for one architecture

A warp that has read a stage of shared memory hands it back by arriving at an mbarrier. The arrival does not wait for
loads whose results nobody has asked for yet, and these may wait behind the warp's stores: then somebody else fills the
stage before it is read. `ReadsFirst()` (cuda/core/tma.cuh) is to stand between. In machine code a load names a
scoreboard (3 bits of its control word) that a later instruction waits for (a bit of 6); a load is under way at an
arrival if nothing between the two waits for it and no fence stands there; a BAR.SYNC waits for warps, not for loads.
Code is read backwards from the arrival, up to a wait at an mbarrier: branches are not followed, so what is reported is
to be looked at. Not collected by pytest;
tests/test_arrivals.py tries it on a few lines.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator

# Kernels whose arrivals pass loads of other memory than they hand back.
KNOWN = {"Tf32WgradKernel": "the next step's pixels are loaded while this one's are handed back"}
FAR = 700  # instructions back
NO_SCOREBOARD = 7


@dataclasses.dataclass(frozen=True)
class Instruction:
    address: int
    text: str  # without its predicate
    scoreboard: int  # that its result comes by
    waits: int  # a bit for each scoreboard that it waits for


def kernels(lines: Iterable[str]) -> Iterator[tuple[str, list[Instruction]]]:
    """(name, instructions) of each kernel of what `cuobjdump -sass` prints."""
    name, found = "", []
    first = None
    for line in lines:
        if function := re.search(r"Function : (\S+)", line):
            if name:
                yield name, found
            name, found = function[1], []
        elif code := re.match(r"\s+/\*([0-9a-f]{4,6})\*/\s+(.*?);\s+/\* 0x[0-9a-f]{16} \*/", line):
            first = int(code[1], 16), re.sub(r"^@!?U?P\w+ ", "", code[2]).strip()
        elif first and (control := re.match(r"\s+/\* 0x([0-9a-f]{16}) \*/", line)):
            word = int(control[1], 16)
            found.append(Instruction(*first, word >> 46 & 7, word >> 52 & 63))
            first = None
    if name:
        yield name, found


def passed(code: list[Instruction]) -> Iterator[tuple[Instruction, list[Instruction]]]:
    """Arrivals, and the loads from shared memory that are under way there."""
    for i, arrival in enumerate(code):
        if not (arrival.text.startswith("SYNCS.ARRIVE") and "A1T0" in arrival.text):  # others announce bytes
            continue
        waited, loads = arrival.waits, []
        for before in reversed(code[max(0, i - FAR) : i]):
            if before.text.startswith(("SYNCS.PHASECHK", "EXIT", "MEMBAR", "FENCE")):
                break
            if before.text.startswith("LDS") and before.scoreboard != NO_SCOREBOARD:
                loads += [before] * (not waited >> before.scoreboard & 1)
            waited |= before.waits
        if loads:
            yield arrival, loads


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="modules or object files")
    bad = arrivals = 0
    for file in parser.parse_args(argv).files:
        sass = subprocess.run(["cuobjdump", "-sass", file], stdout=subprocess.PIPE, text=True, check=True).stdout
        for name, code in kernels(sass.splitlines()):
            arrivals += sum("A1T0" in instruction.text for instruction in code)
            if any(known in name for known in KNOWN):
                continue
            for arrival, loads in passed(code):
                bad += 1
                print(
                    f"{name}: the arrival at {arrival.address:#x} passes {len(loads)} loads, the first {loads[-1].text}"
                )
    print(f"{arrivals} arrivals, {bad} pass loads")
    return bad > 0 or not arrivals


if __name__ == "__main__":
    sys.exit(main())

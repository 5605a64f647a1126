"""Reads a build log for what ptxas says of each kernel; fails on spills and on serialised wgmmas.

    python .ci/ptxas.py build.log

A kernel that spills, or whose wgmmas ptxas serialises (C7508, C7510), still computes the right numbers, slowly: nothing
else would notice. Exceptions are listed with their reasons in allowed-spills.txt beside this file.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

COMPILING = re.compile(r"ptxas info\s*: Compiling entry function '(\w+)' for '(\w+)'")
# Device functions that are called rather than inlined have properties of their own; they belong to no entry.
PROPERTIES = re.compile(r"ptxas info\s*: Function properties for (\w+)")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"ptxas info\s*: Used (\d+) registers")
SERIALISED = re.compile(r"C7508|C7510|wgmma\.mma_async instructions are serialized")
IN_FUNCTION = re.compile(r"in (?:the )?function '?(\w+)'?")


def demangle(names: set[str]) -> dict[str, str]:
    ordered = sorted(names)
    try:
        run = subprocess.run(["c++filt"], input="\n".join(ordered), capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return {name: name for name in ordered}
    return dict(zip(ordered, run.stdout.splitlines(), strict=True))


def read(log: str) -> tuple[int, int, list[tuple[str, str]]]:
    """(kernels, most registers, offences); an offence is (mangled name, what is wrong)."""
    kernels, most, offences = 0, 0, []
    architecture, function = "", ""
    for line in log.splitlines():
        if match := COMPILING.search(line):
            kernels += 1
            architecture = match[2]
        if match := PROPERTIES.search(line):
            function = match[1]
        elif match := SPILLS.search(line):
            if match[2] != "0" or match[3] != "0":
                offences.append((function, f"{architecture}: {match[2]} bytes spill stores, {match[3]} loads"))
        elif match := REGISTERS.search(line):
            most = max(most, int(match[1]))
        if SERIALISED.search(line):
            where = IN_FUNCTION.search(line)
            offences.append((where[1] if where else "", f"wgmma serialised: {line.strip()}"))
    return kernels, most, offences


def main(path: str) -> int:
    kernels, most, offences = read(pathlib.Path(path).read_text(errors="replace"))
    if not kernels:
        print(f"{path} holds no ptxas output: was CUDA compiled in this build?", file=sys.stderr)
        return 1
    names = demangle({name for name, _ in offences})
    allowed = {}
    for line in (pathlib.Path(__file__).parent / "allowed-spills.txt").read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            pattern, separator, reason = (part.strip() for part in line.partition("|"))
            if not pattern or not separator or not reason:
                print(f"allowed-spills.txt: '{line}' must be 'part of a kernel's name | reason'", file=sys.stderr)
                return 1
            allowed[pattern] = reason
    used, failed = set(), 0
    for name, what in offences:
        matching = [pattern for pattern in allowed if pattern in names[name]]
        used.update(matching)
        failed += not matching
        print(f"{'allowed' if matching else 'FAILED'}: {names[name]}\n  {what}", file=sys.stderr)
        for pattern in matching:
            print(f"  because: {allowed[pattern]}", file=sys.stderr)
    stale = set(allowed) - used
    for pattern in stale:
        print(f"allowed-spills.txt: no offending kernel matches '{pattern}' any more: remove it", file=sys.stderr)
    print(f"ptxas: {kernels} kernels, at most {most} registers, {len(offences)} offences, {failed} not allowed")
    return 1 if failed or stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

"""Other projects' tests with `jaxconv.enable` on: what passes without it has to pass with it.

    python tests/foreign.py PATH [PATH ...] [-k EXPRESSION] [--ways plain,enabled,native] [-- PYTEST'S OPTIONS]
    make foreign SUITES="PATH ..." ARGS="-k conv"

Each PATH is a file or folder of tests that pytest runs, in a checkout of somebody else's project (JAX's
tests/lax_test.py, Flax's tests/linen, Haiku's haiku/_src/conv_test.py): take the tag of the version that is installed.
It runs once a way, in processes of its own:

    plain    as it is
    enabled  JAXCONV_ENABLE=1: the plan's choice
    native   jaxconv's own code wherever it has any, as by jaxconv.enable(implementation="native")

Printed are the outcomes, how many convolutions of the programs that the tests compiled became jaxconv's calls, in how
many of the tests, why others did not, and every test that passes plain and not otherwise; then the exit status is 1. Of
native some do not by their nature: those that look for lax's convolution in the compiled text.

JAX's own tests fail where a persistent compilation cache is set (JAX_COMPILATION_CACHE_DIR).

This file is the pytest plugin that writes the outcomes, too.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any

WAYS = ("plain", "enabled", "native")
PLUGIN = "jaxconv_foreign"  # this file, as pytest imports it: without the other modules of its folder
WAY, OUT = "JAXCONV_FOREIGN_WAY", "JAXCONV_FOREIGN_OUT"  # what the plugin is told


# ----------------------------------------------------------------------------------------------------------------------
# The plugin. A line of JSON an event, written at once: a test may end its process.


def write(**event: Any) -> None:
    with open(f"{os.environ[OUT]}.{os.getpid()}", "a", encoding="utf-8") as file:
        file.write(json.dumps(event) + "\n")


def pytest_configure(config: Any) -> None:
    if os.environ[WAY] == "native":
        import jaxconv

        jaxconv.enable(implementation="native")


def pytest_runtest_logstart(nodeid: str, location: Any) -> None:
    write(test=nodeid, outcome="crashed")


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or report.outcome != "passed":
        why = "" if report.outcome == "passed" else _last_line(report.longrepr)
        outcome = "failed" if report.outcome == "failed" else report.outcome
        write(test=report.nodeid, outcome="xfailed" if hasattr(report, "wasxfail") else outcome, why=why)


def pytest_runtest_teardown(item: Any) -> None:
    if os.environ[WAY] != "plain":
        import jaxconv

        found = jaxconv.report(clear=True)
        if found:
            write(
                test=item.nodeid,
                taken=sum(one.count for one in found.taken),
                forms=collections.Counter({one.form: one.count for one in found.taken}),
                left=[(one.why, one.count) for one in found.left],
            )


def pytest_collectreport(report: Any) -> None:
    if report.outcome == "failed":
        write(test=report.nodeid, outcome="not collected", why=_last_line(report.longrepr))


def _last_line(text: Any) -> str:
    crash = getattr(getattr(text, "reprcrash", None), "message", None)
    lines = [line for line in str(crash or text).splitlines() if line.strip()]
    return "" if not lines else (lines[0] if crash else lines[-1])[:300]


# ----------------------------------------------------------------------------------------------------------------------
# The command


@dataclasses.dataclass
class Run:
    """One way of one suite."""

    outcomes: dict[str, str]
    why: dict[str, str]
    taken: collections.Counter[str]  # by test
    left: collections.Counter[str]  # by reason
    seconds: float = 0.0
    status: int = 0

    @classmethod
    def read(cls, out: pathlib.Path) -> Run:
        run = cls({}, {}, collections.Counter(), collections.Counter())
        for path in sorted(out.parent.glob(f"{out.name}.*")):
            for line in path.read_text(encoding="utf-8").splitlines():
                event = json.loads(line)
                test = event["test"]
                if "taken" in event:
                    run.taken[test] += event["taken"]
                    for why, count in event["left"]:
                        run.left[why] += count
                # Several processes write of one test where pytest-xdist runs them; a teardown may fail after its test.
                elif event["outcome"] != "crashed" and run.outcomes.get(test) not in ("failed", "not collected"):
                    run.outcomes[test], run.why[test] = event["outcome"], event.get("why", "")
                else:
                    run.outcomes.setdefault(test, event["outcome"])
        return run

    def count(self, *outcomes: str) -> int:
        return sum(outcome in outcomes for outcome in self.outcomes.values())


def run(suite: pathlib.Path, way: str, options: list[str], folder: pathlib.Path) -> Run:
    out = folder / f"{way}.jsonl"
    plugins = folder / "plugins"
    plugins.mkdir(exist_ok=True)
    shutil.copy(__file__, plugins / f"{PLUGIN}.py")
    path = [str(plugins), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        WAY: way,
        OUT: str(out),
        "PYTHONPATH": os.pathsep.join(path),
        "JAXCONV_ENABLE": "1" if way == "enabled" else "0",
    }
    # -P: pytest's folder stays off the path, where a suite's typing.py would take Python's place.
    command = [sys.executable, "-P", "-m", "pytest", "-q", "--tb=short", "--color=no", "-p", "no:cacheprovider"]
    begin = time.monotonic()
    # In the suite's own folder, whose settings pytest finds there: not ours.
    where = suite if suite.is_dir() else suite.parent
    with open(folder / f"{way}.log", "w", encoding="utf-8") as log:
        done = subprocess.run(
            [*command, "-p", PLUGIN, *options, str(suite)],
            cwd=where,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    found = Run.read(out)
    found.seconds, found.status = time.monotonic() - begin, done.returncode
    return found


def worse(plain: Run, other: Run) -> dict[str, str]:
    """The tests that pass plain and not in another way: {test: outcome there}."""
    return {
        test: other.outcomes.get(test, "not run")
        for test, outcome in plain.outcomes.items()
        if outcome == "passed" and other.outcomes.get(test) != "passed"
    }


def table(rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])


HEAD = ["suite", "way", "passed", "failed", "skipped", "convolutions taken", "left", "tests with some taken", "seconds"]


def row(suite: str, way: str, run: Run) -> list[str]:
    counts = [run.count("passed"), run.count("failed", "crashed", "not collected"), run.count("skipped", "xfailed")]
    if way != "plain":
        counts += [run.taken.total(), run.left.total(), sum(n > 0 for n in run.taken.values())]
    else:
        counts += ["", "", ""]
    return [suite, way, *map(str, counts), f"{run.seconds:.0f}"]


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 1 where a test passes plain only, 2 where nothing ran."""
    argv = sys.argv[1:] if argv is None else argv
    at = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="+", type=pathlib.Path, metavar="PATH")
    parser.add_argument("-k", metavar="EXPRESSION", help="pytest's: tests whose names match")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"of {', '.join(WAYS)}; plain has to be the first")
    parser.add_argument("--logs", type=pathlib.Path, metavar="FOLDER", help="keep pytest's output there")
    args = parser.parse_args(argv[:at])
    ways = args.ways.split(",")
    if ways[0] != "plain" or not set(ways) <= set(WAYS):
        parser.error(f"--ways {args.ways}: expected plain, and then some of {', '.join(WAYS[1:])}")
    missing = [str(suite) for suite in args.suites if not suite.exists()]
    if missing:
        parser.error(f"there is no {', no '.join(missing)}")
    options = (["-k", args.k] if args.k else []) + argv[at + 1 :]

    rows, found, status = [HEAD], [], 0
    for i, suite in enumerate(args.suites):
        with tempfile.TemporaryDirectory() as temporary:
            folder = pathlib.Path(temporary)
            if args.logs:
                folder = args.logs / f"{i}-{suite.stem}"
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
            runs = {}
            for way in ways:
                runs[way] = run(suite.resolve(), way, options, folder.resolve())
                rows.append(row(suite.name, way, runs[way]))
                print(f"{suite.name}, {way}: {runs[way].count('passed')} passed, {runs[way].seconds:.0f} s", flush=True)
            if not runs["plain"].count("passed"):
                log = (folder / "plain.log").read_text(encoding="utf-8").splitlines()
                found.append(f"{suite}: nothing passes plain\n  " + "\n  ".join(log[-15:]))
                status = 2
        for way in ways[1:]:
            for test, outcome in worse(runs["plain"], runs[way]).items():
                found.append(f"{way}: {outcome}: {test}: {runs[way].why.get(test, '')}")
                status = status or 1
            for why, count in runs[way].left.most_common(8):
                print(f"  {way}, left to lax: {count} x {why}")
    print("\n" + table(rows))
    print("\n".join(["", *found]) if found else "\nwhat passes plain passes in every way")
    return status


if __name__ == "__main__":
    sys.exit(main())

"""Random cases of every property, for as long as one likes; each failure is shrunk to a line that makes it again.

    python tests/fuzz.py --minutes 15 --seed 7          # all properties, in turn (make fuzz MINUTES=15 SEED=7)
    python tests/fuzz.py --minutes 5 Conv Layers        # some
    python tests/fuzz.py "Conv(window=Window(...), ...)"  # one case, as a failure printed it

It runs on JAX's default backend. Cases run in a process of their own: one that crashes or hangs is named too, and the
rest goes on. `--record FILE` writes what was run, and found, for docs/reliability.md.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import faulthandler
import itertools
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from typing import Any

FOLDER = pathlib.Path(__file__).parent
sys.path.insert(0, str(FOLDER))
sys.path.append(str(FOLDER.parent))

A_ROUND = 20  # cases of a property before the next has its turn
LONGEST = 300.0  # seconds a case may take, compiling included


def child(options: argparse.Namespace) -> None:
    """Runs rounds until the time is up; says what happens as lines of JSON."""
    import hypothesis
    import jax
    import properties

    warnings.simplefilter("ignore")
    last = pathlib.Path(options.last)

    def say(**what: Any) -> None:
        print(json.dumps(what), flush=True)

    started = time.monotonic()
    seen: collections.Counter[str] = collections.Counter()
    for round in itertools.count(options.first_round):
        for name in options.names or properties.PROPERTIES:
            if time.monotonic() - started > 60 * options.minutes:
                return
            kind = properties.PROPERTIES[name]
            cases, failing = 0, ("", "")

            @hypothesis.seed(f"{options.seed} {round} {name}")
            @hypothesis.settings(
                max_examples=A_ROUND,
                deadline=None,
                database=None,
                report_multiple_bugs=False,
                suppress_health_check=list(hypothesis.HealthCheck),
                phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
            )
            @hypothesis.given(kind.strategy())
            def hold(case: Any) -> None:
                nonlocal cases, failing
                if cases and not failing[0] and time.monotonic() - started > 60 * options.minutes:
                    hypothesis.reject()  # the time is up in the middle of a round; what fails is shrunk to its end
                cases += 1
                last.write_text(repr(case))
                faulthandler.dump_traceback_later(LONGEST, exit=True)
                try:
                    case.check()
                except Exception as error:
                    failing = repr(case), f"{type(error).__name__}: {error}"
                    raise
                finally:
                    faulthandler.cancel_dump_traceback_later()

            try:
                hold()
            except Exception as error:
                # What differs between two failures of one kind are numbers.
                where = traceback.extract_tb(error.__traceback__)[-1]
                kind_of = re.sub(r"[\d.e+-]+", "#", f"{where.filename}:{where.lineno} {failing[1][:60]}")
                seen[kind_of] += 1
                if seen[kind_of] == 1:
                    say(failed=name, case=failing[0], error=failing[1])
            say(name=name, cases=cases, round=round)
        jax.clear_caches()


def versions() -> dict[str, str]:
    import flax
    import hypothesis
    import jax
    import jaxlib
    from helpers import DEVICE, PLATFORM

    device = DEVICE.kind if PLATFORM == "cuda" else f"CPU ({platform.machine()}, {os.cpu_count()} cores)"
    packages = {p.__name__: p.__version__ for p in (jax, jaxlib, flax, hypothesis)}
    return {"device": device, "python": platform.python_version(), **packages}


def fuzz(options: argparse.Namespace) -> int:
    started = time.monotonic()
    cases: collections.Counter[str] = collections.Counter()
    failures: list[dict[str, str]] = []
    round = 0
    with tempfile.TemporaryDirectory() as folder:
        last = pathlib.Path(folder) / "case"
        while True:
            minutes = options.minutes - (time.monotonic() - started) / 60
            if minutes <= 0:
                break
            command = [sys.executable, "-P", __file__, "--child", "--last", last, *options.names]
            command += ["--minutes", minutes, "--seed", options.seed, "--first-round", round]
            process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True)
            assert process.stdout is not None
            for line in process.stdout:
                if not line.startswith("{"):
                    print(line, end="", flush=True)
                    continue
                what = json.loads(line)
                if "failed" in what:
                    failures.append(what)
                    report(what)
                else:
                    cases[what["name"]] += what["cases"]
                    round = what["round"]
                    print(
                        f"{time.monotonic() - started:7.0f} s  {sum(cases.values()):7} cases  {what['name']}",
                        flush=True,
                    )
            if process.wait() != 0:
                what = {"failed": "the process", "case": last.read_text() if last.exists() else ""}
                what["error"] = f"it ended with {process.returncode} (a crash, or {LONGEST:.0f} s without an end)"
                failures.append(what)
                report(what)
            round += 1
    minutes = (time.monotonic() - started) / 60
    print(f"\n{sum(cases.values())} cases in {minutes:.1f} minutes, seed {options.seed}: {len(failures)} failures")
    for failure in failures:
        report(failure)
    if options.record:
        record = {"date": datetime.date.today().isoformat(), **versions(), "seed": options.seed}
        record |= {"minutes": float(f"{minutes:.1f}"), "cases": dict(cases), "failures": len(failures)}
        pathlib.Path(options.record).write_text(json.dumps(record, indent=1) + "\n")
    return 1 if failures else 0


def report(failure: dict[str, str]) -> None:
    error = failure["error"].strip().splitlines() or [""]
    print(f"\nFAILED {failure['failed']}: {' '.join(error)[:500]}")
    print(f'    python {pathlib.Path(__file__).relative_to(FOLDER.parent)} "{failure["case"]}"\n', flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help='properties; or one case, "Conv(...)"')
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--record", help="a file for what was run, as JSON")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--last", help=argparse.SUPPRESS)
    parser.add_argument("--first-round", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ["JAXCONV_TUNING"] = str(FOLDER / "no_tuning.json")  # what somebody tuned here is none of their business
    if options.child:
        child(options)
        return 0
    if len(options.names) == 1 and "(" in options.names[0]:
        import properties

        case = eval(options.names[0], vars(properties))
        case.check()
        print("it holds")
        return 0
    return fuzz(options)


if __name__ == "__main__":
    sys.exit(main())

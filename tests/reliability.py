"""What was run to find mistakes, and what it found: docs/reliability.md from the records of runs.

    make fuzz ...; make tsan; make sanitize; make test-matrix    # each leaves what came of it in build/
    python tests/sanitize.py --tool memcheck --record build/memcheck.json    # on a GPU; racecheck likewise
    python tests/bits.py --record build/bits.json                # on a CPU, on a GPU
    python tests/reliability.py                                  # tests/records/ takes it up; the page is written anew

A record is a run's own output; the page's tables hold nothing else.
"""

from __future__ import annotations

import json
import pathlib
import platform
import sys
import xml.etree.ElementTree as xml
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
RECORDS = ROOT / "tests" / "records"
PAGE = ROOT / "docs" / "reliability.md"
BUILD = ROOT / "build"
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")  # compute-sanitizer's


def take_up() -> None:
    """build/'s newest results become records."""
    import jax

    RECORDS.mkdir(exist_ok=True)
    fuzzed = BUILD / "fuzz.json"
    if fuzzed.exists():
        record = json.loads(fuzzed.read_text())
        device = "cpu" if record["device"].startswith("CPU") else record["device"].lower().replace(" ", "-")
        write(f"fuzz-{device}", record)
    if (BUILD / "matrix" / "record.json").exists():
        write("matrix", json.loads((BUILD / "matrix" / "record.json").read_text()))
    for tool in TOOLS:
        if (BUILD / f"{tool}.json").exists():
            record = json.loads((BUILD / f"{tool}.json").read_text())
            write(f"{tool}-{record['device'].lower().replace(' ', '-')}", record)
    if (BUILD / "bits.json").exists():
        record = json.loads((BUILD / "bits.json").read_text())
        write(f"bits-{record['device'].lower().replace(' ', '-')}", record)
    for name in ("sanitize", "tsan"):
        report = BUILD / f"{name}.xml"
        if report.exists():
            suite = next(xml.parse(report).iter("testsuite"))
            record: dict[str, Any] = {"date": suite.attrib["timestamp"][:10], "python": platform.python_version()}
            record |= {"jax": jax.__version__, "seconds": round(float(suite.attrib["time"]))}
            record |= {key: int(suite.attrib[key]) for key in ("tests", "failures", "errors", "skipped")}
            files = sorted({case.attrib["classname"].split(".")[-1] for case in suite.iter("testcase")})
            write(name, {**record, "files": files})


def write(name: str, record: dict[str, Any]) -> None:
    (RECORDS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


def read(name: str) -> dict[str, Any] | None:
    path = RECORDS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def table(head: list[str], rows: list[list[Any]], numbers: int) -> str:
    """Markdown; the last `numbers` columns are numbers."""
    rule = ["---"] * (len(head) - numbers) + ["---:"] * numbers
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in [head, rule, *rows])


def fuzz_block() -> str:
    """A row for each property, a column for each run: there are more properties than a page is wide."""
    records = [json.loads(path.read_text()) for path in sorted(RECORDS.glob("fuzz-*.json"))]
    names = list(dict.fromkeys(name for record in records for name in record["cases"]))
    rows = [[name, *(record["cases"].get(name, 0) for record in records)] for name in names]
    rows.append(["all cases", *(sum(record["cases"].values()) for record in records)])
    rows += [[what, *(record[what] for record in records)] for what in ("minutes", "failures")]
    head = [f"{r['device']}, jax {r['jax']}, {r['date']}, seed {r['seed']}" for r in records]
    return table(["property", *head], rows, len(records))


def watched_block() -> str:
    rows = []
    for name, what in (("sanitize", "ASan and UBSan"), ("tsan", "ThreadSanitizer")):
        record = read(name)
        if record:
            files = ", ".join(f"`{file}`" for file in record["files"])
            row = [f"`make {name}`", what, files, record["date"], f"Python {record['python']}, jax {record['jax']}"]
            rows.append([*row, record["tests"] - record["skipped"], record["failures"] + record["errors"]])
    return table(["command", "watched by", "tests", "date", "versions", "run", "failed"], rows, 2)


def gpu_block() -> str:
    rows = []
    for tool in TOOLS:
        for path in sorted(RECORDS.glob(f"{tool}-*.json")):
            record = json.loads(path.read_text())
            by_commit: dict[str, list[int]] = {}
            for part in record["parts"].values():
                by_commit.setdefault(part["commit"], []).append(part["cases"])
            for commit, cases in by_commit.items():
                found = {name: p for name, p in record["parts"].items() if p["commit"] == commit}
                names = sorted({name.rsplit("/", 1)[0] for name in found})
                # Records of several runs that were joined name each part's day.
                date = max(p.get("date", record["date"]) for p in found.values())
                shown = ", ".join(f"`{name}`" for name in names)
                rows.append([tool, record["device"], date, commit, shown, len(cases), sum(cases)])
    return table(["tool", "GPU", "date", "commit", "kernels", "parts", "cases"], rows, 2)


def bits_block() -> str:
    rows = []
    for path in sorted(RECORDS.glob("bits-*.json")):
        record = json.loads(path.read_text())
        kernels = sorted({part.rsplit("/", 1)[0] for part in record["parts"]})
        device = "CPU" if record["device"] == "cpu" else record["device"]
        graphs = "" if record["device"] == "cpu" else f", {record['runs']} as CUDA graphs"
        row = [f"{device}, jax {record['jax']}", record["date"], f"{record['runs']}{graphs}, in 2 processes"]
        rows.append([*row, ", ".join(f"`{k}`" for k in kernels), len(record["parts"]), sum(record["parts"].values())])
    return table(["device", "date", "runs", "kernels", "parts", "calls"], rows, 2)


def matrix_block() -> str:
    record = read("matrix")
    if record is None:
        return ""
    rows = []
    for e in record["environments"]:
        refused = ", ".join(f"`{name.removesuffix('.bin')}`" for name in e["refused"]) or "none"
        tests = [e.get(word, "") for word in ("passed", "failed", "skipped")]
        which = e["tests"] if isinstance(e["tests"], str) else f"{len(e['tests'])} files"
        rows.append([e["python"], e["jax"], e["date"], which, *tests, e["loaded"], refused])
    head = ["Python", "JAX", "date", "tests", "passed", "failed", "skipped", "programs loaded", "not loaded"]
    return table(head, rows, 0)


BLOCKS = {"fuzz": fuzz_block, "watched": watched_block, "gpu": gpu_block, "bits": bits_block, "matrix": matrix_block}


def page(text: str) -> str:
    """The page with its blocks written anew."""
    for name, block in BLOCKS.items():
        start, end = f"<!-- reliability:{name} -->\n", f"\n<!-- /reliability:{name} -->"
        before, rest = text.split(start)
        text = before + start + block() + end + rest.split(end)[1]
    return text


if __name__ == "__main__":
    if sys.argv[1:]:
        raise SystemExit(__doc__)
    take_up()
    PAGE.write_text(page(PAGE.read_text()))

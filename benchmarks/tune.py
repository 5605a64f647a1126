"""`python -m benchmarks tune [--forget ...] RESULTS.json ...`: recorded runs -> jaxconv/tuning/<device>.json.

A recorded run of `--algorithm all --tune` holds XLA's time and each native algorithm's for a problem; this turns them
into the table that `jaxconv._plan` consults, problem by problem. Older entries for the same problem are replaced,
others stay, unless they are to be forgotten.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
from collections.abc import Sequence
from typing import Any

from benchmarks import cases, record
from benchmarks.ops.base import Case, Setting
from jaxconv._plan import measured as tables
from jaxconv._plan import model
from jaxconv._problem import ConvProblem


def measurements(run: dict[str, Any], measured: Sequence[Case] = ()) -> list[dict[str, Any]]:
    """The table's entries for a run's rows; `measured` are cases as they ran, where that is not as they are listed."""
    setting = Setting(
        run["dtype"], run["layout"] in (None, "NHWC"), None if run["precision"] == "default" else run["precision"]
    )
    by_name = {case.name: case for case in (*cases.BY_OP[run["op"]], *measured)}
    rows: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in run["rows"]:
        if row["status"] == "ok" and "ms" in row:
            rows.setdefault((row["case"], row["pass"]), {})[row["contender"]] = row
    entries = []
    for (name, pass_), by_contender in rows.items():
        forced = {c.partition(":")[2]: row for c, row in by_contender.items() if c.startswith("ours:")}
        # Of a kernel with several tiles that which its plan wants, where that ran: by its name alone.
        order = sorted(forced.items(), key=lambda item: (" " in item[0], item[1]["ms"]), reverse=True)
        native = {_kernel(algorithm, row): row["ms"] for algorithm, row in order}
        plans = {_kernel(algorithm, row): row["plan"] for algorithm, row in order}
        # The default choice, where it is one kernel, that no forced row measured.
        default = by_contender.get("ours")
        if native and default is not None and re.fullmatch(r"native\[[^]]+\]", default["plan"]):
            kernel = _kernel("", default)
            native.setdefault(kernel, default["ms"])
            plans.setdefault(kernel, default["plan"])
        # A pair's alternative is the faster of XLA's and of jaxconv's two calls by their own plans.
        two = native.pop("two", None)
        if two is not None and "xla" in by_contender:
            by_contender["xla"]["ms"] = min(two, by_contender["xla"]["ms"])
        kernel = by_name[name].kernel(pass_, setting) if native and "xla" in by_contender else None
        if kernel is None:
            continue
        op, kind, coordinates = tables.features(*kernel)
        entries.append(
            {
                "case": name,
                "problem": str(kernel[1]),
                "op": op,
                "kind": kind,
                "coordinates": [round(c, 4) for c in coordinates],
                **_copied(*kernel),
                "xla_ms": by_contender["xla"]["ms"],
                "native_ms": native,
                "plans": {kernel: plans[kernel] for kernel in native},
                "commit": run["commit"],
            }
        )
    if run["op"] == "batchnorm" and run["dtype"] == "f32":
        _by_bare_passes(entries)
    return entries


def _by_bare_passes(entries: list[dict[str, Any]]) -> None:
    """Of a batch-norm with an activation XLA's time is at most that of both passes without.

    In a program XLA goes back through jaxconv's meaning, which reads no more than a bare batch-norm does; the recorded
    time is that of a function that JAX differentiates. In Keras' Xception, in float32, kernels that were 1.08 to 1.13
    times as fast as that took as long as the bare passes, and the step 2 % longer (H100). In 16 bits no step has told.
    """
    bare = {(one["case"], one["op"]): one["xla_ms"] for one in entries}
    for one in entries:
        passes = [bare.get((one["case"], op)) for op in ("batchnorm_train", "batchnorm_backward")]
        if one["op"] == "batchnorm_fused" and None not in passes:
            one["xla_ms"] = min(one["xla_ms"], round(sum(passes), 6))


def _copied(op: str, problem: Any) -> dict[str, str]:
    """What the table says of an array that XLA copied because of its padding: nothing where there is none."""
    array = model.copied(op, problem) if isinstance(problem, ConvProblem) else ""
    return {"copied": array} if array else {}


def key(m: dict[str, Any]) -> tuple[Any, ...]:
    """What a newer measurement of the same problem has in common with the older."""
    return m["op"], m["kind"], m["coordinates"], m.get("copied", "")


def _kernel(algorithm: str, row: dict[str, Any]) -> str:
    """The kernel that a row measured, as its plan names it: "depthwise/rows" of "native[depthwise/rows splits=4]"."""
    if algorithm == "two":  # which others it is of says nothing
        return algorithm
    kernel = re.match(r"native\[(\S+?)[ \]]", row["plan"])
    return kernel[1] if kernel else algorithm


def write(target: pathlib.Path, device: str, versions: dict[str, str], measured: list[dict[str, Any]]) -> None:
    """One line a measurement, so that a difference between two tables can be read."""
    lines = ",\n".join("  " + json.dumps(m) for m in measured)
    target.parent.mkdir(exist_ok=True)
    head = f' "device": {json.dumps(device)},\n "versions": {json.dumps(versions)},\n'
    target.write_text(f'{{\n{head} "measurements": [\n{lines}\n ]\n}}\n')


def _versions(run: dict[str, Any]) -> dict[str, str]:
    """What a run's times depend on beside jaxconv."""
    versions = {"jaxlib": run["versions"]["jaxlib"]}
    return versions | ({"driver": run["driver"].splitlines()[0]} if run.get("driver") else {})


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks tune", description=__doc__)
    parser.add_argument("results", nargs="*", type=pathlib.Path, help="files that --algorithm all --json recorded")
    parser.add_argument(
        "--forget",
        nargs=3,
        metavar=("DEVICE", "CASE", "DTYPE"),
        help="drop a case, whose kernels have changed since it was run, from a device's table ('NVIDIA H200')",
    )
    args = parser.parse_args(argv)
    if not args.results and not args.forget:
        parser.error("neither results nor --forget were given")
    if args.forget:
        device, case, dtype = args.forget
        target = tables.FOLDER / f"{tables.slug(device)}.json"
        table = json.loads(target.read_text())
        known = table["measurements"]
        kept = [m for m in known if (m["case"], m["kind"][0]) != (case, dtype)]
        write(target, device, table.get("versions", {}), kept)
        print(f"{len(known) - len(kept)} measurements of {case} in {dtype} are gone from {target}")
    recorded = [(path, run) for path in args.results for run in reversed(record.read(path))]
    for path, run in recorded:
        if run["op"] in record.WHOLE:
            print(f"{path}: skipped, tables are of layers, not of models")
            continue
        first = run["op"] == "conv" and run["layout"] == "NCHW"  # the channels-last measurements answer for these
        if run["small"] or run["batch"] or run["platform"] == "cpu" or first:
            print(f"{path}: skipped, tables are of full problems on GPUs, convolutions channels last")
            continue
        target = tables.FOLDER / f"{tables.slug(run['device'])}.json"
        table = json.loads(target.read_text()) if target.exists() else {"measurements": []}
        kept = table["measurements"]
        new = json.loads(json.dumps(measurements(run)))  # tuples become lists, as they are read back
        keys = [*map(key, new)]
        kept = [m for m in kept if key(m) not in keys]
        # Of the newest jaxlib: that it is older than a user's is what `info` says.
        versions = max(table.get("versions", {}), _versions(run), key=lambda v: tables.numbers(v.get("jaxlib", "")))
        write(target, run["device"], versions, kept + new)
        print(f"{path}: {len(new)} measurements into {target}")
    return 0

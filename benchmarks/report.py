"""Markdown tables of the recorded runs, printed or put between the markers of README.md and docs/performance.md.

A marked block is `<!-- benchmarks:NAME -->` ... `<!-- /benchmarks -->`. NAME is an op (all its tables of problems in
full size on accelerators), `cpu` (what was recorded on processors: a line for each kernel, then the tables), `summary`
(every recorded table of problems, a line for each pass), `summary/<device>`, `train` (whole training steps: every
table), `train/summary` (a line for each way), or `<device>/<table>`, as `python -m benchmarks report --list` prints
them.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import re
from collections.abc import Sequence
from typing import Any

from benchmarks import record
from benchmarks.cases import BY_OP

DOCUMENTS = ("README.md", "docs/performance.md")
BLOCK = re.compile(r"(<!-- benchmarks:(\S+) -->\n)(.*?)(<!-- /benchmarks -->)", re.DOTALL)

SHORT = ("summary", "cpu", "train", "train/summary")

Run = dict[str, Any]


def load(folder: pathlib.Path) -> dict[str, Run]:
    """{"<device>/<table>": run}: the newest, and the rows that only older ones have; "runs": those with rows."""
    found: dict[str, list[Run]] = {}
    for path in sorted(folder.glob("*/*.json")):
        run = json.loads(path.read_text())
        if run.get("format") != record.FORMAT:
            raise SystemExit(
                f"{path} has format {run.get('format')}, this program reads {record.FORMAT}: record it again"
            )
        found.setdefault(f"{record.slug(run['device'])}/{record.config_name(run)}", []).append(run)
    return {name: _joined(sorted(runs, key=lambda r: r["date"], reverse=True)) for name, runs in sorted(found.items())}


def _joined(runs: list[Run]) -> Run:
    """The first of `runs`, and of each other the problems and passes (ways, of a training step) that it lacks."""
    train = runs[0]["op"] == "train"
    rows: list[Run] = []
    used = []
    for run in runs:
        known = {_key(row) for row in rows}
        more = [row for row in run["rows"] if _key(row) not in known]
        if train:  # a way's speed is relative to Flax's layers in its own run
            flax = {row["devices"]: row["ms"] for row in run["rows"] if row["way"] == "flax"}
            more = [{**row, "flax_ms": flax.get(row["devices"])} for row in more]
        if more:
            rows += more
            used.append({**run, "rows": more})
    if train:
        rows.sort(key=lambda row: (row["devices"], list(WAYS).index(row["way"])))
        return {**runs[0], "rows": rows, "runs": used}
    place = {(case.name, p): (i, j) for i, case in enumerate(BY_OP[runs[0]["op"]]) for j, p in enumerate(case.passes)}
    rows.sort(key=lambda row: place.get(_key(row), (len(place), 0)))
    return {**runs[0], "rows": rows, "runs": used}


def _key(row: Run) -> tuple[Any, ...]:
    return (row["way"], row["devices"]) if "way" in row else (row["case"], row["pass"])


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """A table whose first `left` columns are text."""
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *rows)) + "\n"


def provenance(run: Run) -> str:
    """A sentence for each run: where, with what, when, from which command."""
    runs = run.get("runs", [run])
    if len(runs) > 1:
        counts = [len({_key(row) for row in part["rows"]}) for part in runs]
        return "\n".join(f"{n} rows: {provenance(part)}" for n, part in zip(counts, runs, strict=True))
    (run,) = runs
    versions = run["versions"]
    parts = [run["device"] + (f" ({run['cores']} cores)" if "cores" in run else "")]
    parts.append(f"jax {versions['jax']}")
    parts += [f"driver {run['driver'].splitlines()[0]}"] if run.get("driver") else []
    commit = (run["commit"] or "unknown")[:10] + (" with changes" if run["dirty"] else "")
    parts += [f"commit {commit}", run["date"][:10], f"`{run['command']}`"]
    parts += [run["note"]] if "note" in run else []
    return ", ".join(parts) + ".\n"


def _ms(row: Run | None) -> str:
    if row is None:
        return ""
    return f"{row['ms']:.4f} ±{row['spread'] * 100:.0f}%" if "ms" in row else row["status"]


def table(run: Run) -> str:
    """A row for each problem and pass, and one more for each forced algorithm."""
    if run["op"] == "train":
        return train_table(run)
    with_torch = any(row["contender"] == "torch" for row in run["rows"])
    with_limit = run["ceilings"] is not None
    groups: dict[tuple[str, str], dict[str, Run]] = {}
    for row in run["rows"]:
        groups.setdefault((row["case"], row["pass"]), {})[row["contender"]] = row
    rows = []
    for (case, pass_), contenders in groups.items():
        for name, row in contenders.items():
            same = contenders.get("ours", {}).get("same_as") == name
            if not name.startswith("ours") or same or row["status"] == "skipped":
                continue
            plan = row["plan"] or name.partition(":")[2]
            cells = [case, row["problem"], pass_, f"{plan} (forced)" if ":" in name else plan]
            cells += [f"{row['limit_ms']:.4f}"] if with_limit else []
            cells += [_ms(row), f"{row['rate']:.3g} {row['unit']}" if "ms" in row else ""]
            cells += [f"{row['of_limit']:.2f}" if "ms" in row else ""] if with_limit else []
            cells += [_ms(contenders.get("xla")), f"{row['xla_over_this']:.2f}" if row.get("xla_over_this") else ""]
            other = contenders.get("torch")
            if with_torch:
                ratio = f"{other['ms'] / row['ms']:.2f}" if other and "ms" in other and "ms" in row else ""
                cells += [_ms(other), ratio]
            rows.append(cells)
    head = ["case", "problem", "pass", "plan"]
    head += ["limit, ms"] if with_limit else []
    head += ["jaxconv, ms", "rate"]
    head += ["of limit"] if with_limit else []
    head += ["XLA, ms", "XLA / jaxconv"]
    head += ["PyTorch, ms", "PyTorch / jaxconv"] if with_torch else []
    return _markdown(head, rows, 4) + "\n" + provenance(run)


# What a way of `python -m benchmarks train` is, in a table.
WAYS = {
    "flax": "Flax's layers, XLA",
    "import": "`jaxconv.linen` by import",
    "fused": "`jaxconv.linen`, fused arguments",
    "accelerate": "`jaxconv.accelerate`",
}


def train_table(run: Run) -> str:
    """A row for each way and number of devices."""
    several = any(row["devices"] > 1 for row in run["rows"])
    compared = min(len(row["losses"]) for row in run["rows"])
    rows = []
    for row in run["rows"]:
        cells = [WAYS[row["way"]]] + ([str(row["devices"])] if several else [])
        half = (max(row["samples_ms"]) - min(row["samples_ms"])) / 2 / row["ms"]
        cells += [f"{row['ms']:.2f} ±{half:.1%}", f"{row['images_per_s']:.0f}"]
        cells += [f"{row['flax_ms'] / row['ms']:.2f}" if row["flax_ms"] else ""]
        cells += [f"{row['speedup']:.2f}" if row.get("speedup") else ""] if several else []
        cells += [str(row["calls"]["native"]) if "calls" in row else ""]
        cells += [f"{row['losses'][0]:.4f}", f"{row['losses'][compared - 1]:.4f}", "yes" if row["agrees"] else "**no**"]
        rows.append(cells)
    head = ["way"] + (["devices"] if several else []) + ["ms a step", "images/s", "speed, flax = 1"]
    head += ["speed, one device = 1"] if several else []
    head += ["native calls", "first loss", f"loss {compared}", "losses agree"]
    text = _markdown(head, rows, 1) + "\n"
    for row in run["rows"]:
        if "replaced" in row:
            left = sum(row["left"].values())
            replaced = ", ".join(f"{count} {what}" for what, count in row["replaced"].items())
            text += f"`accelerate` replaced {replaced}; it left {left or 'nothing'}"
            text += "".join(f", {count} {what}" for what, count in row["left"].items()) + ".\n"
            break
    return text + provenance(run)


def train_summary(runs: dict[str, Run]) -> str:
    """A line for each model and way, on one device."""
    rows = []
    for run in runs.values():
        for row in run["rows"]:
            ratio = f"{row['flax_ms'] / row['ms']:.2f}" if row["flax_ms"] else ""
            what = f"{run['model']}, {run['dtype']}, {run['batch']} x {run['image']}²"
            rows.append([what, WAYS[row["way"]], f"{row['ms']:.1f}", f"{row['images_per_s']:.0f}", ratio])
    return _markdown(["model", "way", "ms a step", "images/s", "speed, flax = 1"], rows, 2)


def summary(runs: dict[str, Run]) -> str:
    """Geometric means by pass and the number of losses, a line for each table."""
    from benchmarks.run import LOSS, geometric_means

    rows = [
        [name, suite, pass_, str(count), f"{mean:.2f}", str(losses)]
        for name, run in runs.items()
        if run["op"] != "train"
        for suite, pass_, count, mean, losses in geometric_means(run["rows"])
    ]
    head = ["table", "cases", "pass", "problems", "XLA / jaxconv, geometric mean", f"below {LOSS}"]
    return _markdown(head, rows, 3)


def kernels(runs: dict[str, Run]) -> str:
    """How each native algorithm that was forced did against XLA, a line for each pass."""
    ratios: dict[tuple[str, str, str], list[tuple[float, str]]] = {}
    for run in runs.values():
        for row in run["rows"]:
            algorithm = row["contender"].partition(":")[2]
            if algorithm and row.get("xla_over_this"):
                kernel = f"{run['op']} `{algorithm}` {run['dtype']}"
                ratios.setdefault((kernel, row["pass"], run["device"]), []).append((row["xla_over_this"], row["case"]))
    rows = []
    for (kernel, pass_, _), found in ratios.items():
        (worst, at_worst), (best, at_best) = min(found), max(found)
        mean = math.exp(sum(math.log(ratio) for ratio, _ in found) / len(found))
        cells = [f"{worst:.2f} ({at_worst})", f"{best:.2f} ({at_best})"]
        rows.append([kernel, pass_, str(len(found)), f"{mean:.2f}", *cells])
    head = ["kernel", "pass", "problems", "XLA / kernel, geometric mean", "least", "most"]
    return _markdown(head, rows, 2)


def block(name: str, runs: dict[str, Run]) -> str:
    if name == "summary":
        return summary(runs)
    if name == "cpu":
        some = {k: r for k, r in runs.items() if r["platform"] == "cpu" and r["op"] in BY_OP and not r["small"]}
        tables = "".join(f"\n**{k}**\n\n{table(run)}" for k, run in some.items())
        return kernels(some) + tables if some else "Nothing is recorded yet.\n"
    if name.startswith("summary/"):
        device = name.removeprefix("summary/") + "/"
        some = {k.removeprefix(device): r for k, r in runs.items() if k.startswith(device) and r["op"] != "train"}
        if some:
            return summary(some) + "".join("\n" + line for line in dict.fromkeys(map(provenance, some.values())))
    trained = {k: run for k, run in runs.items() if run["op"] == "train" and not run["small"]}
    if name == "train/summary":
        alone = {k: run for k, run in trained.items() if run["most_devices"] == 1}
        return train_summary(alone) if alone else "Nothing is recorded yet.\n"
    if name == "train":
        return "\n".join(f"**{k}**\n\n{table(run)}" for k, run in trained.items()) or "Nothing is recorded yet.\n"
    if name in BY_OP:
        some = {
            k: run for k, run in runs.items() if run["op"] == name and run["platform"] != "cpu" and not run["small"]
        }
        return "\n".join(f"**{k}**\n\n{table(run)}" for k, run in some.items()) or "Nothing is recorded yet.\n"
    if name in runs:
        return table(runs[name])
    raise SystemExit(f"nothing recorded is named {name}; there is {', '.join([*BY_OP, *SHORT, *runs])}")


def fill(text: str, runs: dict[str, Run]) -> str:
    """`text` with each marked block made anew."""
    return BLOCK.sub(lambda found: f"{found[1]}{block(found[2], runs)}{found[4]}", text)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks report", description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=pathlib.Path, default=record.RESULTS, help="the folder of recorded runs")
    parser.add_argument("--list", action="store_true", help="name the tables and stop")
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 where a document is stale")
    parser.add_argument("--print", action="store_true", help="print every table and change nothing")
    args = parser.parse_args(argv)
    runs = load(args.results)
    if args.list:
        print("\n".join([*SHORT, *dict.fromkeys(f"summary/{name.split('/')[0]}" for name in runs), *runs]))
        return 0
    if args.print:
        print("\n".join(f"## {name}\n\n{table(run)}" for name, run in runs.items()) + "\n" + summary(runs))
        return 0
    stale = 0
    for document in DOCUMENTS:
        path = record.ROOT / document
        if not path.exists():
            continue
        old = path.read_text()
        new = fill(old, runs)
        if new == old:
            print(f"{document}: up to date, {len(BLOCK.findall(old))} tables")
        elif args.check:
            print(f"{document}: stale, run python -m benchmarks report")
            stale = 1
        else:
            path.write_text(new)
            print(f"{document}: {len(BLOCK.findall(old))} tables written")
    return stale

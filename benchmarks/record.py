"""A run's results as JSON: what was run, where, with which versions, and every sample.

benchmarks/results/<device>/ holds one file for each table, under its name (`config_name`): the newest run, and under
"earlier" what only older ones have, each with its own commit, versions and command. `python -m benchmarks report`
folds newly recorded files into it (`fold`); what they replace is in the repository's history.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
from typing import Any

import jax

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FORMAT = 1
PACKAGES = ("jaxconv", "jax", "jaxlib", "jax-cuda13-plugin", "nvidia-cudnn-cu13", "nvidia-cublas", "scipy", "torch")
PACKAGES += ("onnxruntime", "onnxruntime-gpu")
WHOLE = ("train", "infer", "fleet")  # ops of which a row is a whole model, or a way to run it


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _output(*command: str) -> str | None:
    """A command's standard output, or None where it is missing or fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _processor() -> str:
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    model = re.search(r"model name\s*:\s*(.+)", text)
    return model[1] if model else platform.processor() or platform.machine()


def environment() -> dict[str, Any]:
    device = jax.devices()[0]
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    status = _output("git", "status", "--porcelain", "--untracked-files=no")
    facts: dict[str, Any] = {
        "format": FORMAT,
        "device": _processor() if device.platform == "cpu" else device.device_kind,
        "platform": device.platform,
        "versions": versions,
        # BENCHMARKS_COMMIT names the commit where the checkout is a copy without its history.
        "commit": os.environ.get("BENCHMARKS_COMMIT") or _output("git", "rev-parse", "HEAD"),
        "dirty": None if status is None else bool(status),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        # Where the file was written to is nobody else's business.
        "command": re.sub(r"--(json|cache)[ =][^- ]\S*", r"--\1", "python -m benchmarks " + " ".join(sys.argv[1:])),
    }
    if device.platform == "cpu":
        facts["cores"] = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    else:
        facts["runtime"] = getattr(device.client, "platform_version", None)
        facts["driver"] = _output("nvidia-smi", "-i", "0", "--query-gpu=driver_version", "--format=csv,noheader")
        facts["clocks"] = _output(
            "nvidia-smi", "--query-gpu=clocks.sm,clocks.max.sm,clocks.mem", "--format=csv,noheader"
        )
    return facts


def write(where: str, run: dict[str, Any]) -> pathlib.Path:
    """Writes to `where`: a .json file, a folder, or "auto" for benchmarks/results/<device>/."""
    path = pathlib.Path(where)
    if path.suffix != ".json":
        stamp = (run["commit"] or run["date"][:10])[:10] + ("-dirty" if run["dirty"] else "")
        folder = RESULTS / slug(run["device"]) if where == "auto" else path
        path = folder / f"{'-'.join(filter(None, (config_name(run), run.get('part'), stamp)))}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_text(run))
    return path


def config_name(run: dict[str, Any]) -> str:
    """What tells one table from another on one device: "conv-f32-highest-nchw", "train-resnet50-bf16-batch256"."""
    parts = [run["op"], run.get("model"), run["dtype"], run["precision"], run["layout"], run.get("suite")]
    parts.append("small" if run["small"] else None)
    parts.append(f"batch{run['batch']}" if run["batch"] else None)
    parts.append(f"{run['most_devices']}devices" if run.get("most_devices", 1) > 1 else None)
    parts.append(f"split_{run['split']}" if run.get("split") else None)
    parts.append("own_statistics" if run.get("statistics") == "own" else None)
    parts += [slug(f"{name} {value}") for name, value in run.get("options", {}).items()]  # XLA's
    return "-".join(part.lower() for part in parts if part)


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """The runs of a file, the newest first."""
    run = json.loads(path.read_text())
    if run.get("format") != FORMAT:
        raise SystemExit(f"{path} has format {run.get('format')}, this program reads {FORMAT}: record it again")
    return [run, *run.pop("earlier", [])]


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """What a row is about: a case, a pass and who ran it; of a whole model the way, and the devices or the batch.

    Of the fleet a row is a model with all its ways, which were timed in turns.
    """
    if "ways" in row:
        return (row["model"],)
    if "way" in row:
        return row["way"], row["devices"] if "devices" in row else row["batch"]
    return row["case"], row["pass"], row["contender"]


def joined(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs of one table, the newest first, each with the rows that no newer one has; those without are left out."""
    known: set[tuple[Any, ...]] = set()
    parts = []
    for run in sorted(runs, key=lambda r: r["date"], reverse=True):
        # What an older run refused to run says nothing.
        skipped = "skipped" if parts else None
        rows = [row for row in run["rows"] if key(row) not in known and row.get("status", "ok") != skipped]
        if run["op"] == "train":  # a way's speed is relative to Flax's layers and to the roofline in its own run
            flax = {row["devices"]: row["ms"] for row in run["rows"] if row["way"] == "flax"}
            rows = [{**row, "flax_ms": row.get("flax_ms") or flax.get(row["devices"])} for row in rows]
            rows = [{"limit_ms": run.get("limit_ms"), "limit_kinds": run.get("limit_kinds"), **row} for row in rows]
        if rows:
            known.update(map(key, rows))
            parts.append({**run, "rows": rows})
    return parts


def fold(folder: pathlib.Path) -> list[pathlib.Path]:
    """Leaves one file for each table of each device in `folder`; the files that were written or removed."""
    tables: dict[pathlib.Path, list[pathlib.Path]] = {}
    for path in sorted(folder.glob("*/*.json")):
        (newest, *_) = read(path)
        tables.setdefault(path.parent / f"{config_name(newest)}.json", []).append(path)
    changed = []
    for target, paths in tables.items():
        (newest, *earlier) = joined([run for path in paths for run in read(path)])
        text = _text({**newest, "earlier": earlier} if earlier else newest)
        if not target.exists() or target.read_text() != text:
            target.write_text(text)
            changed.append(target)
        for path in set(paths) - {target}:
            path.unlink()
            changed.append(path)
    return changed


def _text(run: dict[str, Any], margin: str = "") -> str:
    """JSON with one line per row, so that a difference between two runs can be read."""
    head = json.dumps({k: v for k, v in run.items() if k not in ("rows", "earlier")}, indent=1)
    lists = {"rows": [json.dumps(row) for row in run["rows"]]}
    if "earlier" in run:
        lists["earlier"] = [_text(one, margin + "  ").strip() for one in run["earlier"]]
    text = head[:-2].replace("\n", f"\n{margin}")
    for name, items in lists.items():
        inside = ",\n".join(f"{margin}  {item}" for item in items)
        text += f',\n{margin} "{name}": [\n{inside}\n{margin} ]'
    return text + f"\n{margin}}}\n"

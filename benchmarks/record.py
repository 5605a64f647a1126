"""A run's results as JSON: what was run, where, with which versions, and every sample."""

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
    found = re.search(r"model name\s*:\s*(.+)", text)
    return found[1] if found else platform.processor() or platform.machine()


def environment() -> dict[str, Any]:
    device = jax.devices()[0]
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    status = _output("git", "status", "--porcelain", "--untracked-files=no")
    found: dict[str, Any] = {
        "format": FORMAT,
        "device": _processor() if device.platform == "cpu" else device.device_kind,
        "platform": device.platform,
        "versions": versions,
        # BENCHMARKS_COMMIT names the commit where the checkout is a copy without its history.
        "commit": os.environ.get("BENCHMARKS_COMMIT") or _output("git", "rev-parse", "HEAD"),
        "dirty": None if status is None else bool(status),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        # Where the file was written to is nobody else's business.
        "command": re.sub(r"--json[ =][^- ]\S*", "--json", "python -m benchmarks " + " ".join(sys.argv[1:])),
    }
    if device.platform == "cpu":
        found["cores"] = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    else:
        found["runtime"] = getattr(device.client, "platform_version", None)
        found["driver"] = _output("nvidia-smi", "-i", "0", "--query-gpu=driver_version", "--format=csv,noheader")
        found["clocks"] = _output(
            "nvidia-smi", "--query-gpu=clocks.sm,clocks.max.sm,clocks.mem", "--format=csv,noheader"
        )
    return found


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
    return "-".join(part.lower() for part in parts if part)


def _text(run: dict[str, Any]) -> str:
    """JSON with one line per row, so that a difference between two runs can be read."""
    rows = ",\n".join("  " + json.dumps(row) for row in run["rows"])
    head = json.dumps({k: v for k, v in run.items() if k != "rows"}, indent=1)
    return f'{head[:-2]},\n "rows": [\n{rows}\n ]\n}}\n'

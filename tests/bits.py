"""The bits of every kernel's results: the same in each run, in each process, as CUDA graphs.

    python tests/bits.py                    # every part of tests/sanitize.py that this device can run
    python tests/bits.py sm90 groupnorm     # the parts whose names contain a word
    python tests/bits.py --seconds 40 --skip 20 --record build/bits.json    # from the 20th on, as far as it goes

A part is an op, a kernel and an element type. Its calls are run three times, with memory of other contents and at other
addresses in between, and on a GPU three times more as CUDA graphs; another process does the same beside it, and their
digests are compared. Exits with an error where any differ.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import sanitize
from helpers import DEVICE, PLATFORM, poison

# What XLA may capture, by the names that it has in jax 0.10 to 0.12
CAPTURED = {"xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL", "xla_gpu_graph_min_graph_size": 1}
RUNS = 3
A_PROGRAM = 200  # calls


def digest(results: Any) -> str:
    found = hashlib.sha256()
    for array in jax.tree.leaves(results):
        host = np.asarray(array)
        found.update(f"{host.dtype}{host.shape}".encode() + host.tobytes())
    return found.hexdigest()[:16]


def calls_of(part: str) -> list[tuple[str, sanitize.Call, list[np.ndarray]]]:
    """(name, call, operands) of all of a part's cases, each call on every tile that can run it."""
    op, *name, dtype = part.split("/")
    rng, found = np.random.default_rng(0), []

    def operand(shape: tuple[int, ...], t: str) -> np.ndarray:
        if t == "uint8":  # positions of a pooling's maxima
            return rng.integers(0, 4, shape).astype(t)
        return rng.standard_normal(shape).astype(jnp.dtype(t))

    for case, calls in sanitize.cases(op, "/".join(name), dtype):
        for call in calls:
            if sanitize.supported(call, DEVICE):
                for one in sanitize.forced(call, DEVICE) if PLATFORM == "cuda" else [call]:
                    if sanitize.runs(one, DEVICE):
                        made, p = one
                        title = f"{made.name} {case} {p.algorithm}"
                        found.append((title, one, [operand(shape, t) for shape, t in made.operands(p).values()]))
    return found


def of_part(part: str) -> dict[str, str]:
    """The digest of each call's results. Where runs differ the digests of all are there."""
    found: dict[str, str] = {}
    calls = calls_of(part)
    for some in (calls[i : i + A_PROGRAM] for i in range(0, len(calls), A_PROGRAM)):

        def program(args: Any, some: Any = some) -> Any:
            return [made(p, *given) for (_, (made, p), _), given in zip(some, args, strict=True)]

        seen, held = [], []
        for options in ({}, CAPTURED) if PLATFORM == "cuda" else ({},):
            run = jax.jit(program, compiler_options=options or None)
            for _ in range(RUNS):
                poison()
                given = jax.tree.map(jnp.array, [operands for *_, operands in some])
                held.append(given)  # no run has the addresses of another one's operands
                seen.append([digest(result) for result in run(given)])
        for (title, *_), digests in zip(some, zip(*seen, strict=True), strict=True):
            number = sum(known.startswith(f"{title} #") for known in found)
            found[f"{title} #{number}"] = digests[0] if len(set(digests)) == 1 else " ".join(digests)
    return found


def child(options: argparse.Namespace) -> None:
    started = time.monotonic()
    for i, part in enumerate(parts_of(options)):
        if options.seconds and time.monotonic() - started > options.seconds:
            print(json.dumps({"next": options.skip + i}), flush=True)
            return
        print(json.dumps({"part": part, "calls": of_part(part)}), flush=True)


def parts_of(options: argparse.Namespace) -> list[str]:
    return [p for p in sanitize.PARTS if not options.words or any(word in p for word in options.words)][options.skip :]


def differences(a: dict[str, str], b: dict[str, str]) -> list[str]:
    """What differs between two processes' calls of a part, and within each."""
    found = [f"{call}: runs differ: {digests}" for one in (a, b) for call, digests in one.items() if " " in digests]
    found += [f"{call}: processes differ" for call in a if a[call] != b.get(call) and " " not in a[call]]
    return [*found, *(f"{call}: in one process only" for call in b.keys() - a.keys())]


def compared(options: argparse.Namespace) -> int:
    command = [sys.executable, __file__, "--child", "--skip", str(options.skip), *options.words]
    # Both at once: each has the device in a state that the other leaves.
    if options.seconds:
        command += ["--seconds", str(options.seconds)]
    nobody = str(pathlib.Path(__file__).parent / "no_tuning.json")  # what somebody tuned here is not asked
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAXCONV_TUNING": nobody}
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    outputs = [process.communicate()[0] for process in both]
    if any(process.returncode for process in both):
        print(f"a process ended with {[process.returncode for process in both]}")
        return 1
    found: list[dict[str, Any]] = [{}, {}]
    for lines, into in zip(outputs, found, strict=True):
        for line in map(json.loads, lines.splitlines()):
            into[line.get("part")] = line
    wrong = calls = 0
    for part in found[0].keys() & found[1].keys() - {None}:
        a, b = found[0][part]["calls"], found[1][part]["calls"]
        calls += len(a)
        for line in differences(a, b):
            print(part, line)
            wrong += 1
    where = DEVICE.kind if PLATFORM == "cuda" else PLATFORM
    done = sum(1 for part in found[0] if part is not None and found[0][part]["calls"])
    graphs = f", {RUNS} runs as CUDA graphs" if PLATFORM == "cuda" else ""
    print(f"{done} parts, {calls} calls on {where}, {RUNS} runs{graphs}, 2 processes: {wrong} calls differ")
    for into in found:
        if None in into:
            print(f"time was up: --skip {into[None]['next']} goes on")
    if options.record and not wrong:
        write_record(
            options.record, where, {p: len(found[0][p]["calls"]) for p in found[0].keys() & found[1].keys() if p}
        )
    return 1 if wrong or not calls else 0


def write_record(path: pathlib.Path, device: str, parts: dict[str, int]) -> None:
    """What was run, by part; others in the file stay. tests/reliability.py reads it."""
    held = json.loads(path.read_text())["parts"] if path.exists() else {}
    record = {"device": device, "date": datetime.date.today().isoformat(), "jax": jax.__version__, "runs": RUNS}
    path.parent.mkdir(parents=True, exist_ok=True)
    record["parts"] = dict(sorted({**held, **{part: calls for part, calls in parts.items() if calls}}.items()))
    path.write_text(json.dumps(record, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="parts whose names contain one of these")
    parser.add_argument("--seconds", type=float, help="begin no part after so long")
    parser.add_argument("--skip", type=int, default=0, help="so many parts")
    parser.add_argument("--record", type=pathlib.Path, help="a file for what was run, as JSON")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return 0
    return compared(options)


if __name__ == "__main__":
    sys.exit(main())

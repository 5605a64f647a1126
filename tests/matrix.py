"""Each supported Python with each supported JAX: the first tier of the suite, and programs exported across them.

    python tests/matrix.py [--pythons 3.11 3.12 3.13] [--jax 0.10.0 0.10 ...] [--tests test_export.py ...]

1. A wheel for Python 3.11 and one for the stable ABI of 3.12 and newer, as users get them: built in isolation, against
   the oldest supported jaxlib's headers.
2. An environment for each pair that exists (JAX 0.11 and newer need Python 3.12), with that JAX's newest patch, and one
   with its oldest patch, for the oldest Python that has it.
3. In each: tests/exported.py writes programs, then loads everybody's; then the first tier (tests/tiers.py), or --tests.

Environments stay in build/matrix and are used again; the wheels are built anew. `--record FILE` writes what came of it,
for docs/reliability.md; rows of environments that did not run stay. On the CPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
FOLDER = ROOT / "build" / "matrix"
# A minor version is its newest patch. pyproject.toml allows each from its first patch on, and test_package compares.
JAX = ("0.10.0", "0.10", "0.11.0", "0.11", "0.12.0", "0.12")
PYTHONS = ("3.11", "3.12", "3.13")


def exists(python: str, jax: str) -> bool:
    return not (python == "3.11" and not f"{jax}.".startswith("0.10."))


def is_patch(jax: str) -> bool:
    """Whether one release is meant, rather than the newest of a minor version."""
    return jax.count(".") > 1


def pairs(pythons: Iterable[str], versions: Iterable[str]) -> list[tuple[str, str]]:
    """(Python, JAX) of each environment."""
    found = {jax: [python for python in pythons if exists(python, jax)] for jax in versions}
    return [(python, jax) for jax, fit in found.items() for python in (fit[:1] if is_patch(jax) else fit)]


def find(version: str) -> str | None:
    """An interpreter of `version`: on the PATH, or pyenv's."""
    folders = sorted(pathlib.Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for name in (shutil.which(f"python{version}"), *map(str, folders), sys.executable):
        command = [name, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        if name and subprocess.run(command, capture_output=True, text=True).stdout.strip() == version:
            return name
    return None


def run(*command: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), text=True, capture_output=True, **options)


def must(done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode:
        raise SystemExit(f"{' '.join(done.args)} failed:\n{(done.stdout + done.stderr)[-4000:]}")


def wheel(python: str, interpreter: str) -> pathlib.Path:
    folder = FOLDER / "wheels" / ("cp311" if python == "3.11" else "abi3")
    if MADE and list(folder.glob("*.whl")):
        (BUILT[folder],) = folder.glob("*.whl")
    if folder in BUILT:
        return BUILT[folder]
    shutil.rmtree(folder, ignore_errors=True)
    print(f"building a wheel with Python {python}", flush=True)
    env = {**os.environ, "JAXCONV_CUDA": "OFF"}
    must(run(interpreter, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT, env=env))
    (BUILT[folder],) = folder.glob("*.whl")
    return BUILT[folder]


BUILT: dict[pathlib.Path, pathlib.Path] = {}
MADE = "--made" in sys.argv


def environment(python: str, jax: str, interpreter: str) -> pathlib.Path:
    """The Python of an environment with this wheel."""
    made = wheel(python, interpreter)
    folder = FOLDER / f"py{python}-jax{jax}"
    inside = folder / "bin" / "python"
    pip = [inside, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    if not (folder / "stamp").exists():
        print(f"making {folder.relative_to(ROOT)}", flush=True)
        must(run(interpreter, "-m", "venv", "--clear", folder))
        version = f"=={jax}" if is_patch(jax) else f"=={jax}.*"
        must(run(*pip, f"jax{version}", f"jaxlib{version}", f"jaxconv[test,flax,examples,bench] @ {made.as_uri()}"))
        (folder / "stamp").touch()
    must(run(*pip, "--no-deps", "--force-reinstall", made))
    return inside


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pythons", nargs="+", default=PYTHONS)
    parser.add_argument("--jax", nargs="+", default=JAX)
    parser.add_argument("--tests", nargs="+", default=(), help="files in tests/, in place of the first tier")
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("-n", "--workers", default="auto", help="pytest's (default: auto)")
    parser.add_argument("--made", action="store_true", help="take the wheels that lie there")
    parser.add_argument("--record", help="a file for what came of it, as JSON")
    parser.add_argument("--again", action="store_true", help="of a record, the tests that failed")
    options = parser.parse_args()
    if options.again:
        return again(options)
    found = {python: find(python) for python in options.pythons}
    for python in [p for p, interpreter in found.items() if interpreter is None]:
        print(f"no Python {python} was found: it is left out", file=sys.stderr)
    wanted = pairs([p for p in options.pythons if found[p]], options.jax)
    insides = {(p, j): environment(p, j, found[p]) for p, j in wanted}  # type: ignore[arg-type]
    # No checkout on the path but for the tests: what is installed is tested.
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    env.pop("PYTHONPATH", None)

    exports = FOLDER / "exports"
    shutil.rmtree(exports, ignore_errors=True)
    exports.mkdir(parents=True)
    rows: list[dict[str, Any]] = []
    for (python, asked), inside in insides.items():
        must(run(inside, "-P", ROOT / "tests" / "exported.py", "export", exports, env=env))
        patch = run(inside, "-c", "import jax; print(jax.__version__)", env=env).stdout.strip()
        today = datetime.date.today().isoformat()
        rows.append({"python": python, "jax": patch, "date": today, "environment": f"py{python}-jax{asked}"})
    good = True
    for row, inside in zip(rows, insides.values(), strict=True):
        done = run(inside, "-P", ROOT / "tests" / "exported.py", "load", exports, env=env)
        must(done)
        loaded = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        refused = sorted(one["file"] for one in loaded if one["error"])
        # StableHLO's promise is for older programs; a newer one must be portable, or XLA's alone.
        allowed = {one["file"] for one in loaded if newer(one["file"], row["jax"]) and ".plain." in one["file"]}
        row |= {"loaded": len(loaded) - len(refused), "refused": refused}
        wrong = [one for one in loaded if one["error"] and one["file"] not in allowed]
        good &= not wrong
        print(f"Python {row['python']}, jax {row['jax']}: loads {row['loaded']} of {len(loaded)} programs", flush=True)
        for one in loaded:
            if one["error"]:
                what = "FAILED" if one in wrong else "not loaded, as documented"
                print(f"    {one['file']}: {what}: {one['error']}", flush=True)
    for row, inside in zip(rows, insides.values(), strict=True):
        good &= options.no_tests or suite(row, inside, options, env)
        if options.record:
            write(pathlib.Path(options.record), [row])
    if options.record:
        write(pathlib.Path(options.record), rows)
    return 0 if good and all(found.values()) else 1


def suite(row: dict[str, Any], inside: pathlib.Path, options: argparse.Namespace, env: dict[str, str]) -> bool:
    """Runs the tests in an environment; what came of them goes into its row."""
    started = time.monotonic()
    command = [inside, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", options.workers, "--tb=short"]
    files = [ROOT / "tests" / name for name in options.tests] or [ROOT / "tests"]
    env = env if options.tests else {**env, "JAXCONV_TESTS": "quick"}  # as `make test` runs it
    row["tests"] = list(options.tests) or "first tier"
    done = run(*command, "--dist", "worksteal", *files, cwd=FOLDER, env=env)
    (FOLDER / f"{row['environment']}.log").write_text(done.stdout + done.stderr)
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-500:]
    for word in ("passed", "failed", "skipped", "error"):
        row.pop(word, None)
    row |= {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    row["minutes"] = float(f"{(time.monotonic() - started) / 60:.1f}")
    print(f"Python {row['python']}, jax {row['jax']}: {last}", flush=True)
    print("\n".join([line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))][:20]))
    return done.returncode == 0


def again(options: argparse.Namespace) -> int:
    """The record's environments whose tests failed, once more; each with the tests that its row names."""
    file = pathlib.Path(options.record)
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    good = True
    for row in json.loads(file.read_text())["environments"]:
        if row.get("failed") or row.get("error"):
            options.tests = () if row["tests"] == "first tier" else row["tests"]
            good &= suite(row, FOLDER / row["environment"] / "bin" / "python", options, env)
            write(file, [row])
    return 0 if good else 1


def write(file: pathlib.Path, rows: list[dict[str, Any]]) -> None:
    """Into the record, in the place of rows of the same Python and JAX."""
    known = json.loads(file.read_text())["environments"] if file.exists() else []
    both = {(row["python"], row["jax"]): row for row in (*known, *rows)}
    ordered = sorted(both.values(), key=lambda row: (row["python"], [int(n) for n in row["jax"].split(".")]))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"environments": ordered}, indent=1) + "\n")


def newer(file: str, jax: str) -> bool:
    """Whether the program was exported by a newer minor version."""
    return [int(n) for n in file.split(".")[:2]] > [int(n) for n in jax.split(".")[:2]]


if __name__ == "__main__":
    sys.exit(main())

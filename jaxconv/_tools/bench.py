"""`python -m jaxconv bench module:function`: a user's own function as it is, with `enable`, and with `accelerate`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxconv import _enable, _plan
from jaxconv._plan import tuned
from jaxconv._tools import timing as _timing
from jaxconv._tools.explain import explain
from jaxconv.tune import WAYS, Refused, filled, target_of
from jaxconv.tune import ways as ways_of

_ROUNDS = 5


@dataclasses.dataclass(frozen=True)
class Row:
    """One way to run the function."""

    way: str  # "plain", "enable", "accelerate"
    timing: _timing.Timing | None  # None: interrupted before
    compile_s: float
    difference: float  # of the results from plain's, largest, relative to the largest element of each array


class Bench(list[Row]):
    """The ways that were run, which print as a table, and what the plan chose in each (`choices`)."""

    def __init__(self, rows: Sequence[Row], choices: Sequence[tuple[str, str]], interrupted: bool):
        super().__init__(rows)
        self.choices, self.interrupted = list(choices), interrupted

    def __str__(self) -> str:
        parts = [text for _, text in self.choices]
        timed = [(row, row.timing) for row in self if row.timing is not None]
        if timed:
            plain = next((timing.median_ms for row, timing in timed if row.way == "plain"), None)
            cells = [("", "median ms", "spread", "plain / it", "samples", "compiled in", "differs by")]
            for row, timing in timed:
                ratio = "-" if plain is None else f"{plain / timing.median_ms:.2f}"
                spread, samples = f"{100 * timing.spread:.1f} %", str(len(timing.samples_ms))
                different = "-" if row.way == "plain" else f"{row.difference:.1e}"
                ms = f"{timing.median_ms:.3f}"
                cells.append((row.way, ms, spread, ratio, samples, f"{row.compile_s:.1f} s", different))
            widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
            lines = ["  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in cells]
            device = tuned.device_name(_plan.Device.default())
            clock = {"cupti": "the kernels' own time (CUPTI)", "wall": "wall clock"}[timed[0][1].timer]
            lines.append(f"a call on {device}, {clock}; spread: half the distance between the quartiles")
            lines += [f"{row.way}: {timing.remark}" for row, timing in timed if timing.remark]
            parts.append("\n".join(lines))
        if self.interrupted:
            parts.append("interrupted: what was timed is above" if timed else "interrupted: nothing was timed yet")
        return "\n\n".join(parts)


def bench(
    f: Callable[..., Any],
    *args: Any,
    gradient: bool = False,
    ways: Sequence[str] = WAYS,
    repeat: int = 15,
    seconds: float = 60.0,
    progress: bool = True,
) -> Bench:
    """Times f(*args), or its value and gradient in its first argument; KeyboardInterrupt keeps what was timed."""
    args = jax.tree.map(filled, args)
    possible = ways_of(f, args, gradient)
    programs: dict[str, _timing.Program] = {}
    choices: list[tuple[str, str]] = []
    compiled_in: dict[str, float] = {}
    differences: dict[str, float] = {}
    timings: dict[str, _timing.Timing] = {}
    interrupted, expected = False, None
    with _bar(len(ways) * (1 + _ROUNDS), progress) as step:
        try:
            for way in ways:
                step(f"compiling {way}", 0)
                function, on = possible[way]
                with _enable.enabled() if on else _enable.disabled():
                    if way != "plain":
                        choices.append((way, str(explain(function)(*args))))
                    begin = time.perf_counter()
                    # Not f's own jit: what it donates would be gone at the second call.
                    compiled = jax.jit(functools.partial(_call, function)).lower(*args).compile()
                    compiled_in[way] = time.perf_counter() - begin
                result = jax.block_until_ready(compiled(*args))
                expected = result if expected is None else expected
                differences[way] = _difference(result, expected)
                del result
                programs[way] = _timing.Program(compiled, [args])
                step(f"compiled {way}", 1)
            timings = _timing.measure(
                programs,
                repeat=repeat,
                seconds=seconds / len(ways),
                rounds=_ROUNDS,
                step=lambda name: step(f"timing {name}", 1),
                timings=timings,
            )
        except KeyboardInterrupt:
            interrupted = True
    rows = [Row(way, timings.get(way), compiled_in[way], differences[way]) for way in programs]
    return Bench(rows, choices, interrupted)


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _difference(result: Any, expected: Any) -> float:
    """The largest difference of two trees of arrays, relative to the largest finite element of each array.

    Infinity where one of two elements is NaN, or where an infinity is not met by the same one.
    """
    largest = 0.0
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        if hasattr(b, "dtype") and jax.dtypes.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = np.asarray(a), np.asarray(b)
        if not jax.dtypes.issubdtype(b.dtype, np.number) or b.size == 0:
            if b.dtype == bool:
                largest = max(largest, float(np.any(a != b)))
            continue
        wide = np.complex128 if np.iscomplexobj(b) else np.float64
        a, b = a.astype(wide), b.astype(wide)
        finite = np.isfinite(a) & np.isfinite(b)
        if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
            return math.inf
        if finite.any():
            off, scale = np.abs(a[finite] - b[finite]).max(), np.abs(b[finite]).max()
            largest = max(largest, float(off) / (float(scale) or 1.0))
    return largest


@contextlib.contextmanager
def _bar(total: int, progress: bool) -> Iterator[Callable[[str, int], None]]:
    """A function (what goes on, steps done), which shows a bar where tqdm is installed, else a line each."""
    if not progress:
        yield lambda what, steps: None
        return
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda what, steps: print(f"bench: {what}", file=sys.stderr, flush=True)
        return
    with tqdm(total=total, desc="bench", unit="step", file=sys.stderr) as bar:

        def step(what: str, steps: int) -> None:
            bar.set_postfix_str(what)
            bar.update(steps)

        yield step


# ----------------------------------------------------------------------------------------------------------------------
# The command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        metavar="module:function",
        help="a function without arguments that returns a tuple: the function f to time, and its arguments",
    )
    parser.add_argument(
        "--grad",
        action="store_true",
        help="f is a loss: time its value and gradient in its first argument, with accelerate inside the gradient; "
        "if f returns a tuple, all but the first element is auxiliary",
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--repeat", type=int, default=15, help="samples of each way (%(default)d)")
    parser.add_argument("--seconds", type=float, default=60.0, help="roughly the most that timing takes (%(default)g)")


def main(args: argparse.Namespace) -> int:
    """`python -m jaxconv bench`: 0, 130 where it was interrupted, or 2 where the command line cannot be followed."""
    try:
        if args.repeat < 1 or not 0 < args.seconds < math.inf:
            raise Refused(f"--repeat={args.repeat} and --seconds={args.seconds:g} must be positive and finite")
        f, *arguments = target_of(args.target)
        found = bench(
            f,
            *arguments,
            gradient=args.grad,
            ways=list(dict.fromkeys(args.ways)),
            repeat=args.repeat,
            seconds=args.seconds,
        )
    except Refused as error:
        print(f"python -m jaxconv bench: {error}", file=sys.stderr)
        return 2
    print(found)
    return 130 if found.interrupted else 0

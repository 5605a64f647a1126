"""The command line: measures cases and prints a row for each problem, pass and choice."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import math
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jaxconv
from benchmarks import cases, check, limits, record, torch_contender, tune
from benchmarks.cases import OPS
from benchmarks.ops.base import DTYPES, Arrays, Case, Job, Setting
from jaxconv._plan import measured as tables
from jaxconv._tools import timing

LOSS = 0.98  # a ratio below this is one
SLOW = ("direct", "im2col")  # may need minutes for a large problem


class Skip(Exception):
    """Why a contender is not measured here."""


@dataclasses.dataclass
class Entry:
    """One contender in one problem and pass."""

    name: str  # "ours", "ours:direct", "xla", "torch"
    job: Job | None = None
    program: timing.Program | None = None
    status: str = "ok"  # "ok", "WRONG", "skipped", "failed"
    reason: str = ""
    plan: str = ""
    verdict: check.Verdict | None = None
    timing: timing.Timing | None = None
    same_as: str = ""  # the contender whose program this one's is: it was not run twice


def parse(argv: list[str] | None) -> argparse.Namespace:
    gpu = jax.default_backend() == "gpu"
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures jaxconv against XLA (and PyTorch), each result checked first. "
        "`python -m benchmarks report` makes tables of recorded runs.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    several = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--op", default="all", choices=(*OPS, "all"))
    parser.add_argument("--cases", default="*", metavar="GLOB", help="names to run; several with commas")
    parser.add_argument("--suite", default="core" if gpu else "cpu", choices=(*cases.SUITES, "all"))
    parser.add_argument("--dtype", default=["bf16" if gpu else "f32"], type=several, help="of bf16, f16, f32")
    parser.add_argument("--precision", default=["default"], type=several, help="of default, highest (for f32)")
    parser.add_argument("--layout", default=["NHWC"], type=several, help="of NHWC, NCHW")
    parser.add_argument("--pass", dest="passes", type=several, help="of fprop, dgrad, wgrad, fwd, ..., residual")
    parser.add_argument("--implementation", choices=("native", "xla"), help="force one instead of the default choice")
    parser.add_argument(
        "--algorithm",
        type=several,
        default=[],
        help="also force these native algorithms, or kernels (sm90/cluster); all: each algorithm",
    )
    parser.add_argument(
        "--tune",
        action="store_true",
        help="with --algorithm: choose by what this run measures, as the table that `tune` makes of it will",
    )
    parser.add_argument("--torch", action="store_true", help="PyTorch too, where it is installed")
    small = "shrunk problems; on a CPU the default for core and special"
    parser.add_argument("--small", action=argparse.BooleanOptionalAction, help=small)
    parser.add_argument("--batch", type=int, metavar="N", help="replace the batch extent (conv, batchnorm, pool)")
    parser.add_argument("--repeat", type=int, default=15, help="samples per row")
    parser.add_argument("--seconds", type=float, default=5.0, help="a row that needs longer for a call is skipped")
    parser.add_argument("--json", nargs="?", const="auto", metavar="PATH", help="record; alone: in benchmarks/results/")
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    args = parser.parse_args(argv)
    if args.tune and not args.algorithm:
        parser.error("--tune chooses among the algorithms that are measured: name them with --algorithm")
    args.ops = list(cases.BY_OP) if args.op == "all" else [args.op]
    args.suites = ("core", "special") if args.suite == "all" else (args.suite,)  # "cpu" holds smaller ones of these
    if args.small is None:
        args.small = not gpu and args.suite != "cpu"
    known_passes = {p for op in args.ops for case in cases.BY_OP[op] for p in case.passes}
    for option, values, known in (
        ("--dtype", args.dtype, DTYPES),
        ("--precision", args.precision, ("default", "highest")),
        ("--layout", args.layout, ("NHWC", "NCHW")),
        ("--pass", args.passes or [], sorted(known_passes)),
        ("--algorithm", args.algorithm, ("all", *(a for op in args.ops for a in OPS[op].algorithms))),
    ):
        for value in values:
            family, _, kernel = value.partition("/")
            if value not in known and not (option == "--algorithm" and kernel and family in known):
                parser.error(f"{option} {value}: expected one or several of {','.join(known)}")
    if args.json and args.json.endswith(".json") and len(list(configs(args))) > 1:
        parser.error("--json FILE holds one op, dtype, precision and layout: name a folder, or no path")
    if not any(cases.select(op, args.cases, args.suites) for op in args.ops):
        parser.error(f"no case matches --cases {args.cases} --suite {args.suite}; see --list")
    return args


def configs(args: argparse.Namespace) -> Iterator[tuple[str, Setting]]:
    """Each makes one table."""
    for op in args.ops:
        for dtype in args.dtype:
            for precision in args.precision if dtype == "f32" and OPS[op].products else ["default"]:
                for layout in args.layout if len(OPS[op].layouts) > 1 else ["NHWC"]:
                    yield op, Setting(dtype, layout == "NHWC", None if precision == "default" else precision)


def chosen_cases(args: argparse.Namespace, op: str) -> list[Case]:
    chosen = cases.select(op, args.cases, args.suites)
    if args.small:
        chosen = [case.small() for case in chosen]
    if args.batch and OPS[op].layouts:
        chosen = [dataclasses.replace(case, batch=args.batch) for case in chosen]
    return chosen


# ----------------------------------------------------------------------------------------------------------------------
# One problem


def maker(case: Case, setting: Setting) -> Any:
    """A jitted function: the case's random arrays, of a key."""
    return jax.jit(lambda key: case.arrays(setting, key))


def make_sets(case: Case, setting: Setting, make: Callable[[Any], Arrays] | None = None) -> list[Arrays]:
    """As many random input sets as keep every call's inputs out of cache. `make`: a compiled `maker`."""
    make = make or maker(case, setting)
    count = timing.set_count(case.set_elements * limits.ITEM_BYTES[setting.dtype], jax.devices()[0])
    return [make(key) for key in jax.random.split(jax.random.key(0), count)]


def plan_text(job: Job, arguments: tuple[Any, ...]) -> str:
    """What `jaxconv.explain` says of the kernels that count."""
    try:
        calls = jaxconv.explain(job.explained)(*arguments)
    except ValueError as error:  # a forced choice that cannot run
        raise Skip(str(error)) from None
    return " + ".join(dict.fromkeys(str(call.plan) for call in calls if call.op in job.kernels))


def start(entry: Entry, case: Case, pass_: str, setting: Setting, sets: list[Arrays], seconds: float) -> None:
    """Compiles, runs once, checks the result: fills in the entry's program, or why there is none."""
    try:
        job = entry.job
        assert job is not None
        if job.explained is not None:
            entry.plan = plan_text(job, job.arguments(sets[0]))
        program = timing.Program(job.f, [job.arguments(arrays) for arrays in sets], job.block)
        outs = job.outputs(job.f(*program.sets[0]))
        entry.verdict = check.check(case, pass_, setting.dtype, setting.precision, setting.channels_last, sets[0], outs)
        if not entry.verdict.right:
            entry.status = "WRONG"
            entry.reason = f"{entry.verdict.result} is wrong: error {entry.verdict}"
            return
        once = program.once()
        if once > seconds:
            raise Skip(f"a call takes {once:.1f} s, --seconds {seconds:g}")
        native = "native[" in entry.plan and "xla" not in entry.plan
        if native and (differ := _runs_that_differ(job, program.sets[0], outs)):
            entry.status = "WRONG"
            entry.reason = f"{differ} of {RUNS} runs do not have the bits of the first"
            return
        entry.program = program
    except Skip as reason:
        entry.status, entry.reason = "skipped", str(reason)
    except ValueError as error:  # jaxconv refuses what is forced, or PyTorch has no such thing
        forced = entry.name != "ours"
        entry.status, entry.reason = "skipped" if forced else "failed", _line(error)
    except Exception as error:  # out of memory, no algorithm found: the other rows still count
        entry.status, entry.reason = "failed", f"{type(error).__name__}: {_line(error)}"


# What goes wrong in a few elements of one run in two, and in large arrays only, no tolerance sees.
RUNS = 8


def _runs_that_differ(job: Job, arguments: tuple[Any, ...], outs: Sequence[Any]) -> int:
    """How many of as many more runs do not give `outs`, to the last bit."""
    return sum(not bool(_same(list(outs), list(job.outputs(job.f(*arguments))))) for _ in range(RUNS))


@jax.jit
def _same(results: list[jax.Array], others: list[jax.Array]) -> jax.Array:
    pairs = zip(jax.tree.leaves(results), jax.tree.leaves(others), strict=True)
    return jnp.stack([jnp.all((a == b) | ((a != a) & (b != b))) for a, b in pairs]).all()


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]


def too_slow(case: Case, pass_: str, setting: Setting, choice: dict[str, Any], seconds: float) -> str | None:
    """A forced algorithm may take minutes for a call that nothing can stop: it first runs a 32nd of the batch."""
    if not case.layouts or case.batch < 64:
        return None
    part = dataclasses.replace(case, batch=case.batch // 32)
    job = part.ours(pass_, setting, **choice)
    program = timing.Program(job.f, [job.arguments(part.arrays(setting, jax.random.key(0)))], job.block)
    program.once()
    estimate = program.once() * 32
    return f"a call would take about {estimate:.1f} s, --seconds {seconds:g}" if estimate > seconds else None


def algorithms(case: Case, names: list[str]) -> list[str]:
    kernels = (name for name in names if "/" in name and name.partition("/")[0] in case.algorithms)
    return [*(a for a in case.algorithms if a in names or "all" in names), *kernels]


def measure_problem(
    case: Case, pass_: str, setting: Setting, sets: list[Arrays], args: argparse.Namespace
) -> list[Entry]:
    choice = {"implementation": args.implementation} if args.implementation else {}
    ours = Entry("ours", case.ours(pass_, setting, **choice))
    entries = [Entry("xla", case.xla(pass_, setting))]
    if not args.tune:
        entries.append(ours)
    for algorithm in algorithms(case, args.algorithm):
        entry = Entry(f"ours:{algorithm}", case.ours(pass_, setting, algorithm=algorithm))
        try:
            slow = _refused(entry, sets[0]) or (
                too_slow(case, pass_, setting, {"algorithm": algorithm}, args.seconds) if algorithm in SLOW else None
            )
        except Exception as error:
            slow = _line(error)
        if slow:
            entry.job, entry.status, entry.reason = None, "skipped", slow
        entries.append(entry)
    if args.torch and torch_contender.available() is None:
        try:
            entries.append(Entry("torch", torch_contender.torch(case, pass_, setting)))
        except Exception as error:
            entries.append(Entry("torch", status="skipped", reason=_line(error)))
    _measure(entries, case, pass_, setting, sets, args)
    if args.tune:
        rows = [as_row(entry, case, pass_, setting, None) for entry in entries]
        learn(case, setting, rows)
        ours.plan = plan_text(ours.job, ours.job.arguments(sets[0]))
        twin = next((e for e in entries if e.timing and e.plan == ours.plan), None)
        if twin is None:
            _measure([ours], case, pass_, setting, sets, args)
        else:
            ours.timing, ours.verdict, ours.same_as = twin.timing, twin.verdict, twin.name
        entries.insert(1, ours)
    for entry in entries:
        entry.program = entry.job = None  # arguments and results are freed
    return entries


def _refused(entry: Entry, arrays: Arrays) -> str | None:
    assert entry.job is not None
    try:
        plan_text(entry.job, entry.job.arguments(arrays))
    except Skip as reason:
        return str(reason)
    return None


def learn(case: Case, setting: Setting, rows: list[dict[str, Any]]) -> None:
    """Plans of this process know these rows from here on."""
    run = {
        "op": case.op,
        "dtype": setting.dtype,
        "precision": setting.precision,
        "layout": "NHWC" if setting.channels_last else "NCHW",
        "commit": None,
        "rows": rows,
    }
    tables.learn(jax.devices()[0].device_kind, tune.measurements(run, [case]))


def _measure(
    entries: list[Entry],
    case: Case,
    pass_: str,
    setting: Setting,
    sets: list[Arrays],
    args: argparse.Namespace,
) -> None:
    """Checks and times those that have a job, taking turns."""
    for entry in entries:
        if entry.job is not None:
            start(entry, case, pass_, setting, sets, args.seconds)
    running = {e.name: e.program for e in entries if e.program is not None}
    try:
        timings = timing.measure(running, repeat=args.repeat, seconds=args.seconds) if running else {}
    finally:
        for program in running.values():
            program.release()
    for entry in entries:
        entry.timing = timings.get(entry.name)
        if entry.name == "xla":
            entry.plan = "xla"


def as_row(entry: Entry, case: Case, pass_: str, setting: Setting, xla_ms: float | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "case": case.name,
        "problem": str(case),
        "suite": case.suite,
        "pass": pass_,
        "contender": entry.name,
        "status": entry.status,
        "reason": entry.reason,
        "plan": entry.plan,
        "limit_ms": limits.limit_ms(case, pass_, setting.dtype, setting.precision),
    }
    if entry.same_as:
        row["same_as"] = entry.same_as
    if entry.verdict is not None:
        row |= {"error": entry.verdict.error, "tolerance": entry.verdict.tolerance}
    if entry.timing is not None:
        ms = entry.timing.median_ms
        rate, unit = limits.achieved(case, pass_, setting.dtype, setting.precision, ms)
        row |= {
            "ms": ms,
            "spread": entry.timing.spread,
            "rate": rate,
            "unit": unit,
            "of_limit": row["limit_ms"] / ms if row["limit_ms"] else None,
            "xla_over_this": xla_ms / ms if xla_ms else None,
            "timer": entry.timing.timer,
            "wall_ms": entry.timing.wall_ms,
            "remark": entry.timing.remark,
            "samples_ms": [float(f"{s:.5g}") for s in entry.timing.samples_ms],
        }
    return row


# ----------------------------------------------------------------------------------------------------------------------
# Text

HEAD = f"{'case':<20} {'pass':<8} {'limit ms':>9} {'ours ms':>9} {'±%':>5} {'of limit':>8} {'rate':>14} "
HEAD += f"{'XLA ms':>9} {'±%':>5} {'XLA/ours':>8}"


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def row_lines(rows: list[dict[str, Any]], with_torch: bool) -> Iterator[str]:
    """The text of one problem and pass: a line for ours and for each forced algorithm, and remarks."""
    by_name = {row["contender"]: row for row in rows}
    reference = by_name["xla"]
    for row in rows:
        if not row["contender"].startswith("ours") or (":" in row["contender"] and "ms" not in row):
            continue  # why a forced algorithm is not there is said below
        line = f"{row['case']:<20} {row['pass']:<8} {number(row['limit_ms'], 4):>9} "
        if "ms" in row:
            line += f"{row['ms']:>9.4f} {row['spread'] * 100:>5.1f} {number(row['of_limit'], 2):>8} "
            line += f"{row['rate']:>6.4g} {row['unit']:<7} "
        else:
            line += f"{row['status']:>9} {'':>5} {'':>8} {'':>14} "
        if "ms" in reference:
            line += f"{reference['ms']:>9.4f} {reference['spread'] * 100:>5.1f} "
            line += f"{row['xla_over_this']:>8.2f}" if "ms" in row else f"{'':>8}"
        else:
            line += f"{reference['status']:>9} {'':>5} {'':>8}"
        if with_torch:
            other = by_name.get("torch", {})
            ratio = f"{other['ms'] / row['ms']:>10.2f}" if "ms" in other and "ms" in row else " " * 10
            line += (f" {other['ms']:>9.4f}" if "ms" in other else f" {other.get('status', ''):>9}") + ratio
        forced = row["contender"].partition(":")[2]
        plan = row["plan"] or forced
        line += f"  {'(forced) ' if forced else ''}{plan}"
        if "error" in row:
            line += f"  error {row['error']:.0e} of {row['tolerance']:.0e}"
        yield line
    for row in rows:
        if row["status"] == "WRONG":
            yield f"  WRONG {row['contender']}: {row['reason']}"
        elif row["reason"]:
            yield f"  {row['contender']} {row['status']}: {row['reason']}"
        if row.get("remark"):
            yield f"  {row['contender']}: {row['remark']}"


def geometric_means(rows: list[dict[str, Any]]) -> list[tuple[str, str, int, float, int]]:
    """(suite, pass, problems, geometric mean of XLA's time / ours, problems lost) of the default choice."""
    ratios: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    for row in rows:
        if row["contender"] == "ours" and row.get("xla_over_this"):
            ratios[row["suite"], row["pass"]].append(row["xla_over_this"])
    return [
        (suite, pass_, len(r), math.exp(sum(map(math.log, r)) / len(r)), sum(x < LOSS for x in r))
        for (suite, pass_), r in ratios.items()
    ]


def summary_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    for suite, pass_, count, mean, losses in geometric_means(rows):
        yield f"{suite} {pass_}: XLA/ours {mean:.2f} (geometric mean of {count}), {losses} below {LOSS}"


class Progress:
    """tqdm on a terminal, where it is installed; nothing elsewhere."""

    def __init__(self, total: int):
        self._bar = None
        if sys.stderr.isatty():
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self._bar = tqdm(total=total, unit="problem", leave=False)

    def say(self, text: str) -> None:
        if self._bar is None:
            print(text, flush=True)
        else:
            self._bar.write(text)

    def at(self, problem: str) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(problem)

    def step(self) -> None:
        if self._bar is not None:
            self._bar.update()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 1 where a result is wrong or jaxconv failed."""
    args = parse(argv)
    if args.list:
        for op in args.ops:
            for case in chosen_cases(args, op):
                print(f"{op:<10} {case.suite:<8} {case.name:<20} {case}")
        return 0
    environment = record.environment()
    top = limits.ceilings()
    started = time.perf_counter()
    plan_of_work = [(op, setting, chosen_cases(args, op)) for op, setting in configs(args)]

    def passes(case: Case) -> list[str]:
        return [p for p in case.passes if not args.passes or p in args.passes]

    bar = Progress(sum(len(passes(case)) for _, _, chosen in plan_of_work for case in chosen))
    say = bar.say
    say(f"{environment['device']}, jax {jax.__version__}, timer: {timing.timer()}")
    if top is not None:
        say(
            f"ceilings, TFLOP/s: 16-bit {top.half / 1e12:.4g}, float32 {top.tf32 / 1e12:.4g}, "
            f"highest {top.f32 / 1e12:.4g}; {top.bandwidth / 1e9:.4g} GB/s ({top.source})"
        )
    if args.torch and (why := torch_contender.available()):
        say(f"no PyTorch column: {why}")
    with_torch = args.torch and torch_contender.available() is None
    bad, interrupted = 0, False
    for op, setting, chosen in plan_of_work:
        if not any(map(passes, chosen)) or interrupted:
            continue
        layout = None if not OPS[op].layouts else "NHWC" if setting.channels_last else "NCHW"
        title = " ".join(filter(None, (op, setting.dtype, setting.precision, layout, "small" if args.small else "")))
        say(f"\n{title}\n{HEAD}{'  torch ms torch/ours' if with_torch else ''}  plan")
        config = {
            "op": op,
            "dtype": setting.dtype,
            "precision": setting.precision,
            "layout": layout,
            "small": args.small,
            "batch": args.batch,
            # Tables of their own: the models' problems, and another device's.
            "suite": args.suite if args.suite in ("models", "threads", "serve") else None,
            "part": args.suite if args.suite in ("core", "special") else None,  # of a table
            "implementation": args.implementation,
            "ceilings": None if top is None else dataclasses.asdict(top),
        }
        rows: list[dict[str, Any]] = []
        written: pathlib.Path | None = None
        try:
            for case in filter(passes, chosen):
                sets = make_sets(case, setting)
                for pass_ in passes(case):
                    bar.at(f"{case.name} {pass_}")
                    entries = measure_problem(case, pass_, setting, sets, args)
                    xla_ms = next((e.timing.median_ms for e in entries if e.name == "xla" and e.timing), None)
                    done = [as_row(e, case, pass_, setting, xla_ms) for e in entries]
                    rows += done
                    for line in row_lines(done, with_torch):
                        say(line)
                    bad += sum(
                        e.status == "WRONG" or (e.status == "failed" and e.name.startswith("ours")) for e in entries
                    )
                    bar.step()
                    if args.json:  # after each row: whatever ends the run, what was measured is kept
                        written = record.write(args.json, {**environment, **config, "rows": rows})
                del sets
        except KeyboardInterrupt:
            say("interrupted: the table has what was done")
            interrupted = True
        for line in summary_lines(rows):
            say(line)
        if written is not None:
            say(f"written: {written}")
    bar.close()
    print(f"\n{time.perf_counter() - started:.0f} s" + (f", {bad} wrong or failed" if bad else ""))
    return 1 if bad or interrupted else 0

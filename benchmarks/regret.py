"""`python -m benchmarks regret --n N --seed S`: what the default choice loses to the best, over random problems.

Convolutions of 1 to 3 dimensions, all groupings, strides, dilations, odd channel counts, batches of 1 to 256 and all
dtypes are drawn; XLA and every native kernel that can run a problem are timed; the time of the plan's choice over the
least time is its regret. The drawn problems depend on the seed alone. What was measured can be recorded (--json), and
is what `python -m benchmarks fit` makes the plan's model from: judge the model on seeds that it was not fitted to.

`--recorded` needs no GPU: today's choices, looked up among the times that were recorded. Each seed is judged by a model
that was fitted as the package's was, to all tables and all other seeds.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import math
import pathlib
import random
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from benchmarks import fit, limits, record, regret_runs
from benchmarks.ops.base import Job, Setting
from benchmarks.ops.conv import ConvCase
from benchmarks.run import make_sets, maker
from jaxconv import _plan
from jaxconv._plan import model, together
from jaxconv._problem import ConvProblem
from jaxconv._tools import timing

BYTES = 3e9  # of x, w and y together
FLOPS = 4e12
SLOW = ("direct", "im2col")  # for what nothing else runs
WORSE = (1.05, 1.20)  # of XLA's time: reported
BATCH = 4  # problems a thread compiles before they are timed
ROUNDS = 2  # of timing: each is a session of the profiler for each kernel


def draw(seed: int, n: int) -> list[tuple[ConvCase, str, Setting]]:
    """n problems: (case, pass, setting)."""
    r = random.Random(seed)
    problems: list[tuple[ConvCase, str, Setting]] = []
    while len(problems) < n:
        case = _case(r, f"s{seed}.{len(problems)}")
        dtype, precision = r.choice((("bf16", None), ("bf16", None), ("f16", None), ("f32", None), ("f32", "highest")))
        pass_ = r.choice(("fprop", "dgrad", "wgrad"))
        if case is None or case.flops > FLOPS * (1 if dtype != "f32" else 0.25):
            continue
        if case.elements * limits.ITEM_BYTES[dtype] <= BYTES:
            problems.append((case, pass_, Setting(dtype, True, precision)))
    return problems


def _case(r: random.Random, name: str) -> ConvCase | None:
    nd = r.choice((1, 2, 2, 2, 2, 3))
    batch = r.choice((1, 1, 2, 4, 8, 16, 32, 64, 128, 256))
    kind = r.choice(("dense", "dense", "dense", "grouped", "depthwise", "depthwise", "narrow"))
    wide = (16, 24, 32, 48, 64, 64, 96, 128, 128, 192, 256, 256, 320, 512, 768, 1024)
    odd = (37, 67, 100, 131, 257)
    groups = 1
    if kind == "dense":
        c, k = (r.choice(wide if r.random() < 0.9 else odd) for _ in range(2))
        k = c if r.random() < 0.5 else k
    elif kind == "narrow":
        c, k = r.choice((1, 3, 3, 4, 8)), r.choice((16, 32, 64, 64, 96, 128))
        c, k = (c, k) if r.random() < 0.7 else (k, c)
    elif kind == "grouped":
        groups = r.choice((2, 4, 8, 16, 32, 32))
        each = r.choice((4, 8, 8, 16, 16, 24, 32, 64, 10))
        c = groups * each
        k = c if r.random() < 0.8 else 2 * c
    else:
        c = groups = r.choice((32, 64, 96, 128, 144, 192, 240, 384, 768, 1536, 40, 67))
        k = c if r.random() < 0.9 else c * r.choice((2, 3))
    few = r.choice((1, 1, 3, 3, 3, 3, 5, 7, 2, 4)) if nd < 3 else r.choice((1, 3, 3, 3, 2, 5))
    f = r.choice((2, 3, 4, 7, 15, 31)) if nd == 1 and kind != "narrow" else few
    window = tuple(f if r.random() < 0.95 else r.choice((1, 3, 5)) for _ in range(nd))
    stride = r.choice((1, 1, 1, 1, 2, 2)) if r.random() < 0.95 else r.choice((4, f))
    dilation = r.choice((2, 4, 6, 12, 18, 64)) if stride == 1 and f > 1 and r.random() < 0.2 else 1
    if dilation * (f - 1) > 256:
        dilation = 2
    extent = r.choice(
        {1: (128, 512, 2048, 8192, 16384), 2: (7, 14, 28, 37, 56, 64, 112, 128), 3: (8, 16, 24, 32, 48)}[nd]
    )
    spatial = (extent,) * nd
    causal = nd == 1 and r.random() < 0.4
    same = r.random() < 0.85
    padding = []
    for size, taps in zip(spatial, window, strict=True):
        reach = (taps - 1) * dilation
        if causal:
            padding.append((reach, 0))
        elif same:  # as lax's SAME
            total = max((-(-size // stride) - 1) * stride + reach + 1 - size, 0)
            padding.append((total // 2, total - total // 2))
        else:
            padding.append((0, 0))
    case = ConvCase(
        name, batch, spatial, c, k, window, (stride,) * nd, tuple(padding), (dilation,) * nd, groups, suite="random"
    )
    return case if min(case.out_spatial) > 0 else None


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A drawn problem with what is to be timed, compiled."""

    case: ConvCase
    pass_: str
    setting: Setting
    op: str
    problem: ConvProblem
    choice: _plan.Plan
    jobs: dict[str, Job]  # "xla", and kernels by `Plan.spec`
    make: Any  # its arrays of a key, compiled
    compiled: dict[str, Any]  # what ran through
    failed: dict[str, str]  # cuDNN without an algorithm, a kernel that refuses: the others still count


def prepare(case: ConvCase, pass_: str, setting: Setting) -> Prepared | None:
    """Traces and compiles, XLA's search for its algorithm included; None where nothing of ours is in the pass. No array
    is made: what other threads have XLA search runs alone on the GPU, since XLA locks it."""
    kernel = case.kernel(pass_, setting)
    if kernel is None:
        return None
    op, problem = kernel
    device = _plan.Device.current("cuda" if jax.default_backend() == "gpu" else "cpu")
    plans = _plan.every(op, problem, device)
    slow = (*SLOW, "implicit_gemm") if problem.depthwise and problem.groups > 1 else SLOW
    plans = [p for p in plans if p.algorithm not in slow] or plans[:1]
    choice = _plan.plan(op, problem, device)
    jobs = {"xla": case.xla(pass_, setting)}
    for plan in plans:
        jobs[plan.spec] = case.ours(pass_, setting, algorithm=plan.spec)
    if choice.implementation == "native" and choice.spec not in jobs:
        jobs[choice.spec] = case.ours(pass_, setting, algorithm=choice.spec)
    make = maker(case, setting)
    arrays = jax.eval_shape(make, jax.random.key(0))
    compiled: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for name, job in jobs.items():
        try:
            compiled[name] = jax.jit(job.f).lower(*job.arguments(arrays)).compile()
        except Exception as error:
            failed[name] = _first_line(error)
    made = make.lower(jax.random.key(0)).compile()
    return Prepared(case, pass_, setting, op, problem, choice, jobs, made, compiled, failed)


def prepared(
    draws: Sequence[tuple[ConvCase, str, Setting]], jobs: int
) -> Iterator[tuple[ConvCase, Prepared | Exception | None]]:
    """Each drawn problem, in order, or what was wrong with it. `jobs` threads compile a batch of problems, then nothing
    is compiled until the caller has taken, and timed, them all."""

    def attempt(draw: tuple[ConvCase, str, Setting]) -> Prepared | Exception | None:
        try:
            return prepare(*draw)
        except Exception as error:
            return error

    size = 1 if jobs == 1 else BATCH * jobs
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for first in range(0, len(draws), size):
            batch = draws[first : first + size]
            for (case, _, _), problem in zip(batch, list(pool.map(attempt, batch)), strict=True):
                yield case, problem


def measure(by: Prepared, args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds by kernel and of XLA, and the plan's choice."""
    case, setting, failed = by.case, by.setting, dict(by.failed)
    sets = make_sets(case, setting, by.make)
    programs = {}
    for name, compiled in by.compiled.items():
        job = by.jobs[name]
        try:
            program = timing.Program(compiled, [job.arguments(arrays) for arrays in sets], job.block)
            program.once()
            if program.once() > args.seconds:
                failed[name] = "too slow"
                continue
            programs[name] = program
        except Exception as error:  # out of memory, a launcher that refuses
            failed[name] = _first_line(error)
    timings = timing.measure(programs, repeat=args.repeat, seconds=0.05, rounds=ROUNDS) if programs else {}
    chosen = by.choice.spec if by.choice.implementation == "native" else "xla"
    return {
        "case": case.name,
        "problem": str(by.problem),
        "shape": dataclasses.asdict(case),
        "op": by.op,
        "pass": by.pass_,
        "dtype": setting.dtype,
        "precision": setting.precision,
        "limit_ms": limits.limit_ms(case, by.pass_, setting.dtype, setting.precision),
        "ms": {name: t.median_ms for name, t in timings.items()},
        "failed": failed,
        "choice": chosen,
        "reason": by.choice.reason,
    }


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:160]


@dataclasses.dataclass(frozen=True)
class Summary:
    problems: int
    regret: float  # geometric mean of the choice's time over the least
    speed: float  # geometric mean of XLA's time over the choice's
    possible: float  # over the least time
    worse: tuple[int, ...]  # problems in which the choice takes more than each of WORSE times XLA's time
    worst: float

    def __str__(self) -> str:
        worse = ", ".join(
            f"{count} ({count / max(self.problems, 1):.1%}) more than {limit:.2f} times XLA's time"
            for limit, count in zip(WORSE, self.worse, strict=True)
        )
        return (
            f"{self.problems} problems: regret {self.regret:.3f}, {self.speed:.2f} times XLA's speed of a possible "
            f"{self.possible:.2f}; {worse}, at worst {self.worst:.2f}"
        )


def summary(rows: list[dict[str, Any]]) -> Summary:
    """Over the rows in which both XLA and the choice ran."""
    logs: list[tuple[float, float, float]] = []
    for row in rows:
        ms = row["ms"]
        if "xla" in ms and row["choice"] in ms:
            mine, least = ms[row["choice"]], min(ms.values())
            logs.append((math.log(mine / least), math.log(ms["xla"] / mine), math.log(ms["xla"] / least)))
    n = max(len(logs), 1)
    means = [math.exp(sum(column) / n) for column in zip(*logs, strict=True)] or [1.0] * 3
    slower = [math.exp(-log) for _, log, _ in logs]
    return Summary(
        len(logs),
        *means,
        tuple(sum(s > limit for s in slower) for limit in WORSE),
        max(slower, default=1.0),
    )


def _line(row: dict[str, Any]) -> Iterator[str]:
    ms = row["ms"]
    times = "  ".join(f"{name} {value:.4f}" for name, value in sorted(ms.items(), key=lambda kv: kv[1]))
    mark = " " if ms.get(row["choice"], 0) <= 1.05 * min(ms.values(), default=0) else "!"
    yield f"{mark} {row['op']:<11} {row['problem']:<52} -> {row['choice']:<28} {times}"
    for name, why in row["failed"].items():
        yield f"    {name}: {why}"


# ----------------------------------------------------------------------------------------------------------------------
# What was recorded


def chosen(op: str, problem: ConvProblem, ms: dict[str, float], device: _plan.Device) -> tuple[str, str]:
    """(today's choice as a name in `ms`, its tier); a tile that was not timed is the one of its kernel that was."""
    plan = _plan.plan(op, problem, device)
    tier = "measured" if "measured" in plan.reason else "predicted"
    if plan.implementation != "native":
        return "xla", "XLA, " + tier
    tier += " and measured far" if tier == "measured" and plan.reason.startswith("predicted") else ""
    tier = "short" if plan.reason.endswith(together.SHORT) else tier
    if plan.spec in ms:
        return plan.spec, tier
    return next((name for name in ms if name.partition(" ")[0] == plan.kernel), plan.spec), tier


def recorded_rows(seeds: Sequence[int], shipped: bool) -> list[dict[str, Any]]:
    """The recorded rows with today's choices, by models that have not seen them (or, `shipped`, by the package's)."""
    by = None if shipped else fit.Fit(fit.Rows.make(fit.samples()))
    rows = []
    for path in sorted(record.RESULTS.glob("*/regret/*.json")):
        run = json.loads(path.read_text())
        seed, device = regret_runs.seed_of(run), _plan.Device("cuda", run["device"], (9, 0), 132)
        if seeds and seed not in seeds:
            continue
        judge = None if by is None else model.Model(by.model(seed)[0])
        for row, problem in regret_runs.problems(run):
            with _model(judge, _kernels(row)):
                choice, tier = chosen(row["op"], problem, row["ms"], device)
            rows.append(row | {"choice": choice, "tier": tier, "seed": str(seed)})
    return rows


def _kernels(row: dict[str, Any]) -> set[str]:
    """What a row can judge: a kernel that is newer than its run cannot be, and predictions leave it out. Those that
    `prepare` leaves out on purpose stay: to choose one would be a mistake."""
    return {*SLOW, "implicit_gemm", *(name.partition(" ")[0] for name in (*row["ms"], *row["failed"]))}


@contextlib.contextmanager
def _model(by: model.Model | None, kernels: set[str]) -> Iterator[None]:
    """Plans are made by another model than the package's, and of these kernels."""
    shipped, predict = model.model, model.predict

    def predict_known(op: str, p: ConvProblem, device: _plan.Device, plans: list[_plan.Plan]) -> Any:
        return predict(op, p, device, [plan for plan in plans if plan.kernel in kernels])

    model.predict = predict_known
    if by is not None:
        model.model = lambda: by
    try:
        yield
    finally:
        model.model, model.predict = shipped, predict


def _classes(row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    shape = row["shape"]
    depthwise = shape["groups"] > 1 and shape["groups"] == shape["in_channels"]
    yield "seed", row["seed"]
    yield "tier", row["tier"]
    yield "op", row["op"]
    yield "dtype", row["dtype"] + (" highest" if row["precision"] else "")
    yield "dimensions", str(len(shape["spatial"]))
    yield "grouping", "depthwise" if depthwise else "grouped" if shape["groups"] > 1 else "none"
    yield "dilated", str(max(shape["dilation"]) > 1)


def report(rows: list[dict[str, Any]], worst: int) -> Iterator[str]:
    """What is lost, where, and at which problems most."""
    able = [row for row in rows if row["choice"] in row["ms"]]
    yield str(summary(able))
    if len(able) < len(rows):
        names = sorted({row["choice"] for row in rows if row not in able})
        yield f"{len(rows) - len(able)} left out: their choice was not timed ({', '.join(names)})"
    by: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in able:
        for name in _classes(row):
            by.setdefault(name, []).append(row)
    yield ""
    yield f"{'':26} problems  regret  share  speed  possible  >1.05  >1.20  worst"
    total = max(sum(lost(row) for row in able), 1e-9)
    for (kind, value), chosen in sorted(by.items(), key=lambda kv: kv[0]):
        s, share = summary(chosen), sum(map(lost, chosen)) / total
        yield (
            f"{kind + ' ' + value:30.30} {s.problems:>4}  {s.regret:6.3f}  {share:5.0%}  {s.speed:5.2f}"
            f"  {s.possible:8.2f}  {s.worse[0] / s.problems:5.1%}  {s.worse[1] / s.problems:5.1%}  {s.worst:5.2f}"
        )
    for title, key in (("slower than XLA", slower), ("lost most", lost)):
        yield ""
        yield f"{title}:"
        for row in sorted(able, key=key, reverse=True)[:worst]:
            if key(row) > 0:
                yield f"{math.exp(key(row)):7.2f} ({row['tier']})"
                yield from _line(row)


def lost(row: dict[str, Any]) -> float:
    """Log of the choice's time over the least."""
    return math.log(row["ms"][row["choice"]] / min(row["ms"].values()))


def slower(row: dict[str, Any]) -> float:
    """Log of the choice's time over XLA's."""
    return math.log(row["ms"][row["choice"]] / row["ms"]["xla"])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks regret", description=__doc__)
    parser.add_argument("--n", type=int, default=100, help="problems")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device-time", type=float, default=math.inf, metavar="S", help="stop after so many seconds")
    parser.add_argument("--seconds", type=float, default=0.5, help="a kernel that needs longer for a call is left out")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="threads that compile; nothing is timed then")
    parser.add_argument("--repeat", type=int, default=6, help="samples a kernel")
    parser.add_argument("--json", nargs="?", const="auto", metavar="PATH", help="record; alone: in benchmarks/results/")
    parser.add_argument("--recorded", nargs="*", type=int, metavar="SEED", help="judge by recorded runs; needs no GPU")
    parser.add_argument("--shipped", action="store_true", help="with the package's model, which has seen some of them")
    parser.add_argument("--worst", type=int, default=20, help="problems to list (%(default)s)")
    args = parser.parse_args(argv)
    if args.recorded is not None:
        regret_runs.plan_without_a_gpu()
        for line in report(recorded_rows(args.recorded, args.shipped), args.worst):
            print(line)
        return 0
    if jax.default_backend() != "gpu":
        parser.error("there is no GPU")
    environment, started = record.environment(), time.perf_counter()
    rows: list[dict[str, Any]] = []
    table = dict(op="regret", dtype="all", precision=None, layout="NHWC", small=False, batch=None)
    run = {**environment, **table, "part": f"seed{args.seed}"}
    where = record.RESULTS / record.slug(environment["device"]) / "regret" if args.json == "auto" else args.json
    where = pathlib.Path(where or ".")
    where = where if where.suffix == ".json" else where / f"seed{args.seed}.json"
    print(f"{environment['device']}, seed {args.seed}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        for case, problem in prepared(draw(args.seed, args.n), args.jobs):
            if time.perf_counter() - started > args.device_time:
                break
            if problem is None:
                continue
            try:
                if isinstance(problem, Exception):
                    raise problem
                row = measure(problem, args)
            except Exception as error:
                print(f"{case}: {type(error).__name__}: {error}", file=sys.stderr)
                continue
            rows.append(row)
            for line in _line(row):
                print(line, flush=True)
            if args.json:  # after each row: whatever ends the run, what was measured is kept
                record.write(str(where), {**run, "rows": rows})
    print(f"\n{summary(rows)}; {time.perf_counter() - started:.0f} s")
    return 0

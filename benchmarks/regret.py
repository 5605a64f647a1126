"""`python -m benchmarks regret --n N --seed S`: what the default choice loses to the best, over random problems.

Convolutions of 1 to 3 dimensions, all groupings, strides, dilations, odd channel counts, batches of 1 to 256 and all
dtypes are drawn; XLA and every native kernel that can run a problem are timed; the time of the plan's choice over the
least time is its regret. The drawn problems depend on the seed alone. What was measured can be recorded (--json), and
is what `python -m benchmarks fit` makes the plan's model from: judge the model on seeds that it was not fitted to.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import pathlib
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax

from benchmarks import contenders, limits, record, tune
from benchmarks.cases import ConvCase
from benchmarks.contenders import Setting
from jaxconv import _plan
from jaxconv import _timing as timing
from jaxconv._plan import conv as conv_plan

BYTES = 3e9  # of x, w and y together
FLOPS = 4e12
SLOW = ("direct", "im2col")  # for what nothing else runs
WORSE = (1.05, 1.20)  # of XLA's time: reported


def draw(seed: int, n: int) -> list[tuple[ConvCase, str, Setting]]:
    """n problems: (case, pass, setting)."""
    r = random.Random(seed)
    found: list[tuple[ConvCase, str, Setting]] = []
    while len(found) < n:
        case = _case(r, f"s{seed}.{len(found)}")
        dtype, precision = r.choice((("bf16", None), ("bf16", None), ("f16", None), ("f32", None), ("f32", "highest")))
        pass_ = r.choice(("fprop", "dgrad", "wgrad"))
        if case is None or case.flops > FLOPS * (1 if dtype != "f32" else 0.25):
            continue
        if case.elements * limits.ITEM_BYTES[dtype] <= BYTES:
            found.append((case, pass_, Setting(dtype, True, precision)))
    return found


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


def measure(case: ConvCase, pass_: str, setting: Setting, args: argparse.Namespace) -> dict[str, Any] | None:
    """Milliseconds by kernel and of XLA, and the plan's choice; None where nothing of ours is in the pass."""
    found = tune.kernel_of(case, pass_, setting)
    if found is None:
        return None
    op, problem = found
    device = _plan.Device.current("cuda" if jax.default_backend() == "gpu" else "cpu")
    plans = list(conv_plan.every(op, problem, device))
    slow = (*SLOW, "implicit_gemm") if problem.depthwise and problem.groups > 1 else SLOW
    plans = [p for p in plans if p.algorithm not in slow] or plans[:1]
    choice = _plan.plan(op, problem, device)
    jobs = {"xla": contenders.xla(case, pass_, setting)}
    for plan in plans:
        jobs[plan.spec] = contenders.ours(case, pass_, setting, algorithm=plan.spec)
    if choice.implementation == "native" and choice.spec not in jobs:
        jobs[choice.spec] = contenders.ours(case, pass_, setting, algorithm=choice.spec)
    size = case.elements * limits.ITEM_BYTES[setting.dtype]
    make = jax.jit(lambda key: contenders.make_arrays(case, setting, key))
    sets = [make(k) for k in jax.random.split(jax.random.key(0), timing.set_count(size, jax.devices()[0]))]
    programs, failed = {}, {}
    for name, job in jobs.items():
        try:
            program = timing.Program(job.f, [job.arguments(arrays) for arrays in sets], job.block)
            program.once()
            if program.once() > args.seconds:
                failed[name] = "too slow"
                continue
            programs[name] = program
        except Exception as error:  # cuDNN without an algorithm, out of memory: the others still count
            failed[name] = (str(error).strip().splitlines() or [""])[0][:160]
    timings = timing.measure(programs, repeat=args.repeat, seconds=0.05) if programs else {}
    chosen = choice.spec if choice.implementation == "native" else "xla"
    return {
        "case": case.name,
        "problem": str(problem),
        "shape": dataclasses.asdict(case),
        "op": op,
        "pass": pass_,
        "dtype": setting.dtype,
        "precision": setting.precision,
        "limit_ms": limits.limit_ms(case, pass_, setting.dtype, setting.precision),
        "ms": {name: t.median_ms for name, t in timings.items()},
        "failed": failed,
        "choice": chosen,
        "reason": choice.reason,
    }


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


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks regret", description=__doc__)
    parser.add_argument("--n", type=int, default=100, help="problems")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device-time", type=float, default=math.inf, metavar="S", help="stop after so many seconds")
    parser.add_argument("--seconds", type=float, default=0.5, help="a kernel that needs longer for a call is left out")
    parser.add_argument("--repeat", type=int, default=6, help="samples a kernel")
    parser.add_argument("--json", nargs="?", const="auto", metavar="PATH", help="record; alone: in benchmarks/results/")
    args = parser.parse_args(argv)
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
    for case, pass_, setting in draw(args.seed, args.n):
        if time.perf_counter() - started > args.device_time:
            break
        try:
            row = measure(case, pass_, setting, args)
        except KeyboardInterrupt:
            break
        except Exception as error:
            print(f"{case}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        if row is None:
            continue
        rows.append(row)
        for line in _line(row):
            print(line, flush=True)
        if args.json:  # after each row: whatever ends the run, what was measured is kept
            record.write(str(where), {**run, "rows": rows})
    print(f"\n{summary(rows)}; {time.perf_counter() - started:.0f} s")
    return 0

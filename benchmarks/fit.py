"""`python -m benchmarks fit`: what was recorded -> jaxconv/tuning/model.json, the plan's model.

Samples are the rows of the tables of jaxconv/tuning and of the recorded regret runs, but for seeds named by --hold-out.
Two forests (jaxconv/_plan/model.py) are fitted to XLA's times and to the kernels'; a third to how far these two are off
on problems that they were not fitted to. How many of these errors a choice must be sure of is taken from the same: each
recorded seed is judged by forests that were fitted without it, and by an error forest that was fitted to the errors of
other seeds. Needs scikit-learn.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks import record, regret
from jaxconv import _plan
from jaxconv._plan import measured, model

ABOUT = dict(learning_rate=0.05, subsample=0.6, max_features=0.25, random_state=0)
XLA = dict(n_estimators=300, max_depth=5, min_samples_leaf=3, **ABOUT)
NATIVE = dict(n_estimators=400, max_depth=5, min_samples_leaf=3, **ABOUT)
ERROR = dict(n_estimators=150, max_depth=4, min_samples_leaf=3, **ABOUT)
FLOOR = 0.03  # an error that is smaller is none
LOST = ((1.05, 0.02), (1.20, 0.01))  # at most this share of the choices may be slower than XLA by more than this


@dataclasses.dataclass(frozen=True)
class Sample:
    """One problem's times on one device."""

    device: str
    shape: model.Shape
    ms: dict[str, float]  # of "xla" and of kernels
    plans: dict[str, tuple[str, int]]  # (tile, splits) of kernels
    seed: int | None = None  # of the regret run that drew it; None: a row of a table

    @property
    def numbers(self) -> model.Numbers:
        found = model.named(self.device)
        assert found is not None, f"{self.device} is no Hopper"
        return found

    @property
    def kernels(self) -> list[str]:
        return [name for name in self.ms if name != "xla"]

    @property
    def ways(self) -> list[tuple[str, str, int]]:
        return [(kernel, *self.plans.get(kernel, ("", 1))) for kernel in self.kernels]


def samples(hold_out: Sequence[int] = ()) -> list[Sample]:
    found: list[Sample] = []
    for path in sorted(measured.FOLDER.glob("*.json")):
        table = json.loads(path.read_text())
        for m in table.get("measurements", ()):
            if m["op"] in model.OPS:
                ms = {"xla": m["xla_ms"], **m["native_ms"]}
                plans = {kernel: _plan_of(text) for kernel, text in m["plans"].items()}
                found.append(Sample(table["device"], _shape_of(m), ms, plans))
    for path in sorted(record.RESULTS.glob("*/regret/*.json")):
        run = json.loads(path.read_text())
        if regret.seed_of(run) not in hold_out:
            found += from_regret(run)
    return found


def from_regret(run: dict[str, Any]) -> list[Sample]:
    found = []
    device = _plan.Device("cuda", run["device"], (9, 0), 132)
    for row, problem in regret.problems(run):
        ms: dict[str, float] = {}
        plans: dict[str, tuple[str, int]] = {}
        for spec, value in row["ms"].items():
            kernel, _, tile = spec.partition(" ")
            if kernel in ms:  # another tile: the one that is wanted comes first
                continue
            plan = _plan.made(row["op"], spec, problem, device) if kernel != "xla" else None
            ms[kernel] = value
            if kernel != "xla":
                plans[kernel] = tile, plan.splits if isinstance(plan, _plan.Plan) else 1
        found.append(Sample(run["device"], model.Shape.of(row["op"], problem), ms, plans, regret.seed_of(run)))
    return found


def _plan_of(text: str) -> tuple[str, int]:
    """(tile, splits) of "native[sm90/wgrad 128x256 splits=132]"."""
    tile, splits = re.search(r" (\d+x\d+)", text), re.search(r"splits=(\d+)", text)
    return (tile[1] if tile else ""), (int(splits[1]) if splits else 1)


def _shape_of(m: dict[str, Any]) -> model.Shape:
    """Of a table's row: "128x28x28 256->256 3x3 g64 float32 NHWC", its kind and its pixels."""
    found = re.match(r"(\d+)x([\dx]+) (\d+)->(\d+) ", m["problem"])
    assert found, m["problem"]
    groups = re.search(r" g(\d+) ", m["problem"])
    dtype, full, _, _, window, stride, dilation, *_ = measured.tuples(m["kind"])
    return model.Shape(
        m["op"],
        dtype,
        full,
        int(found[1]),
        tuple(map(int, found[2].split("x"))),
        int(found[3]),
        int(found[4]),
        int(groups[1]) if groups else 1,
        window,
        stride,
        dilation,
        round(2 ** m["coordinates"][0]),
    )


# ----------------------------------------------------------------------------------------------------------------------
# The forests


@dataclasses.dataclass(frozen=True)
class Rows:
    """All samples as arrays: one row a problem, and one a kernel that ran it."""

    x: np.ndarray
    r: np.ndarray  # log(XLA's ms / (limit + overhead))
    xla_ms: np.ndarray
    seed: np.ndarray  # -1: of a table
    ways: np.ndarray
    way_r: np.ndarray
    way_ms: np.ndarray
    of: np.ndarray  # which problem
    kernels: list[str]

    @classmethod
    def make(cls, known: Sequence[Sample]) -> Rows:
        kernels = sorted({kernel for s in known for kernel in s.kernels})
        sees = [model.seen(s.shape, s.numbers, s.ways, kernels) for s in known]
        xla = np.array([s.ms["xla"] for s in known])
        ms = np.array([s.ms[kernel] for s in known for kernel in s.kernels])
        bases = np.concatenate([see.bases_ms for see in sees])
        limits = np.array([see.limit_ms for see in sees])
        return cls(
            np.array([see.x for see in sees]),
            np.log(xla / (limits + model.OVERHEAD_MS)),
            xla,
            np.array([-1 if s.seed is None else s.seed for s in known]),
            np.concatenate([see.ways for see in sees]),
            np.log(ms / (bases + model.OVERHEAD_MS)),
            ms,
            np.repeat(np.arange(len(known)), [len(s.kernels) for s in known]),
            kernels,
        )

    def gains(self, r: np.ndarray, way_r: np.ndarray) -> np.ndarray:
        """log(XLA's ms over a kernel's) of every way, from r of both."""
        true = np.log(self.xla_ms[self.of] / self.way_ms)
        return true + (r - self.r)[self.of] - (way_r - self.way_r)


def forest(about: Mapping[str, Any], x: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    """Fitted, as model.Forest reads it."""
    try:
        from sklearn.ensemble import GradientBoostingRegressor
    except ImportError:
        raise SystemExit("python -m benchmarks fit needs scikit-learn: pip install 'jaxconv[bench]'") from None
    found = GradientBoostingRegressor(**about).fit(x, y)
    data: dict[str, Any] = {"initial": float(found.init_.constant_.item()), "depth": about["max_depth"]}
    roots, features, values, rights = [], [], [], []
    for (each,) in found.estimators_:
        tree = each.tree_
        roots.append(len(features))
        for node in range(tree.node_count):  # depth first, left before right
            leaf = tree.children_left[node] < 0
            assert leaf or tree.children_left[node] == node + 1
            features.append(-1 if leaf else int(tree.feature[node]))
            rights.append(0 if leaf else int(tree.children_right[node] - node))
            value = about["learning_rate"] * tree.value[node, 0, 0] if leaf else tree.threshold[node]
            values.append(float(f"{value:.4g}" if leaf else f"{value:.9g}"))
    return data | {"roots": roots, "feature": features, "value": values, "right": rights}


@dataclasses.dataclass(frozen=True)
class Crossed:
    """What forests say of the seeds that they were not fitted to."""

    forests: dict[int, tuple[dict[str, Any], dict[str, Any]]]  # (XLA's, the kernels') by the seed that is left out
    r: np.ndarray  # predicted; nan of a table's rows
    way_r: np.ndarray


def crossed(rows: Rows) -> Crossed:
    r, way_r = np.full_like(rows.r, np.nan), np.full_like(rows.way_r, np.nan)
    way_seed, forests = rows.seed[rows.of], {}
    for seed in sorted(set(rows.seed[rows.seed >= 0].tolist())):
        out, way_out = rows.seed == seed, way_seed == seed
        xla = forest(XLA, rows.x[~out], rows.r[~out])
        native = forest(NATIVE, rows.ways[~way_out], rows.way_r[~way_out])
        r[out], way_r[way_out] = model.Forest(xla)(rows.x[out]), model.Forest(native)(rows.ways[way_out])
        forests[seed] = xla, native
    return Crossed(forests, r, way_r)


def errors(rows: Rows, by: Crossed, without: int | None = None) -> dict[str, Any]:
    """The forest of errors, of all drawn problems or of those of other seeds than `without`."""
    gains = rows.gains(by.r, by.way_r)
    off = np.abs(gains - np.log(rows.xla_ms[rows.of] / rows.way_ms))
    some = ~np.isnan(gains) & (rows.seed[rows.of] != without)
    x = model.with_gain(rows.ways, gains, by.r[rows.of], by.way_r)
    return forest(ERROR, x[some], np.log(off[some] + FLOOR))


def assembled(rows: Rows, known: Sequence[Sample], forests: Sequence[dict[str, Any]], confidence: float) -> Any:
    """The file's contents."""
    count: dict[str, int] = {}
    for s in known:
        for kernel in s.kernels:
            name = f"{kernel} {s.shape.arithmetic}"
            count[name] = count.get(name, 0) + 1
    names = dict(zip(("xla", "native", "error"), forests, strict=True))
    return {"confidence": confidence, "kernels": rows.kernels, "known": dict(sorted(count.items())), **names}


def left_out(
    known: Sequence[Sample], rows: Rows, by: Crossed, confidence: float, only: Sequence[int] = ()
) -> dict[int, model.Model]:
    """For each drawn seed (of `only`, if given) a model that has not seen it."""
    return {
        seed: model.Model(assembled(rows, known, (*forests, errors(rows, by, seed)), confidence))
        for seed, forests in by.forests.items()
        if not only or seed in only
    }


# ----------------------------------------------------------------------------------------------------------------------
# How sure a choice must be


@dataclasses.dataclass(frozen=True)
class Choice:
    """What a model would do with a problem that it does not know."""

    # Of each kernel, those first that are predicted to be the fastest: how many errors XLA's predicted time over its
    # own is away from MARGIN, and the log of XLA's true time over its true time
    options: tuple[tuple[float, float], ...]
    best: float  # log of XLA's time over the fastest's

    def gain(self, confidence: float) -> float:
        """Log of XLA's time over the choice's."""
        return next((true for sure, true in self.options if sure > confidence), 0.0)


def chosen(s: Sample, by: model.Model) -> Choice:
    logs = {n: math.log(s.ms["xla"] / s.ms[n]) for n in s.kernels}
    xla, native = by.predict(s.shape, s.numbers, s.ways)
    able = sorted((p.ms, p.deviation, n) for n, p in zip(s.kernels, native, strict=True) if p is not None)
    options = [((math.log(xla.ms / ms) - math.log(model.MARGIN)) / error, logs[n]) for ms, error, n in able]
    return Choice(tuple(options), max(0.0, *logs.values()) if logs else 0.0)


def judged(choices: Sequence[Choice], confidence: float) -> tuple[float, float, tuple[float, ...]]:
    """(geometric mean of the speed against XLA, regret, shares of the choices that are slower than XLA, as LOST)."""
    got = [c.gain(confidence) for c in choices]
    lost = tuple(sum(g < -math.log(than) for g in got) / len(got) for than, _ in LOST)
    behind = [c.best - g for c, g in zip(choices, got, strict=True)]
    return math.exp(sum(got) / len(got)), math.exp(sum(behind) / len(got)), lost


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks fit", description=__doc__.splitlines()[0])
    parser.add_argument("--hold-out", type=int, nargs="*", default=[], metavar="SEED", help="regret runs to leave out")
    parser.add_argument("--out", type=pathlib.Path, default=model.FILE)
    args = parser.parse_args(argv)
    regret.plan_without_a_gpu()
    known = samples(args.hold_out)
    rows = Rows.make(known)
    seeds = sorted({s.seed for s in known if s.seed is not None})
    print(f"{len(known)} problems, {len(rows.of)} times of kernels; drawn with the seeds {seeds}", flush=True)
    by = crossed(rows)
    models = left_out(known, rows, by, 0.0)
    choices = [chosen(s, models[s.seed]) for s in known if s.seed is not None]
    possible = math.exp(sum(c.best for c in choices) / len(choices))
    print(f"each seed by a model that has not seen it; possible {possible:.2f} times XLA's speed")
    for confidence in np.arange(0.0, 5.01, 0.1).round(1).tolist():
        speed, behind, lost = judged(choices, confidence)
        shares = ", ".join(f"{v:.1%} lose more than {than - 1:.0%}" for v, (than, _) in zip(lost, LOST, strict=True))
        print(f"  sure of {confidence:.2f} errors: {speed:.2f}, regret {behind:.3f}, {shares}")
        if all(v <= most for v, (_, most) in zip(lost, LOST, strict=True)):
            break
    forests = forest(XLA, rows.x, rows.r), forest(NATIVE, rows.ways, rows.way_r), errors(rows, by)
    found = {"speed": speed, "possible": possible, "regret": behind, "lost": lost}
    about = {"seeds": seeds, "left_out": json.loads(json.dumps(found), parse_float=lambda v: round(float(v), 4))}
    data = about | assembled(rows, known, forests, confidence)
    args.out.write_text(_text(data))
    print(f"written: {args.out}, {args.out.stat().st_size / 1e3:.0f} KB")
    return 0


def _text(data: dict[str, Any]) -> str:
    """One line an entry, so that a difference can be read where it can be."""
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}" for key, value in data.items())
    return f"{{\n{lines}\n}}\n"

"""`python -m benchmarks fit`: what was recorded -> jaxconv/tuning/model.json, the plan's model.

Samples are the rows of the tables of jaxconv/tuning and of the recorded regret runs, but for seeds named by --hold-out.
A Gaussian process and a forest (jaxconv/_plan/model.py) are fitted to XLA's times, a process to the kernels'; another
forest to how far these are off on drawn problems that they were not fitted to, a seed at a time. What a choice must be
worth is found on the same problems, each with the errors of other seeds.

All of this is `fitted`, which can leave a seed out: no time of that seed is in any part of the model then, which so can
be judged by it (`python -m benchmarks regret --recorded`). Needs scikit-learn.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import scipy.linalg

from benchmarks import record, regret_runs
from benchmarks.ops import conv_cases
from jaxconv import _plan
from jaxconv._plan import measured, model

ABOUT = dict(learning_rate=0.05, max_depth=5, subsample=0.6, max_features=0.25, min_samples_leaf=3, random_state=0)
# Of few problems XLA takes 10 to 60 times as long as expected: they shall not bend the trees.
XLA = ABOUT | dict(n_estimators=300, loss="huber", alpha=0.95)
ERROR = ABOUT | dict(n_estimators=120, max_depth=4, min_samples_leaf=15)
# Variance that no feature explains, of r: what is left out is predicted best with more than the likelihood asks for.
XLA_NOISE, NATIVE_NOISE = 0.2, 0.01
# The processes' scales: steps of gradient descent on the likelihood of so many samples, in blocks
STEPS, BLOCKS, BLOCK = 40, 3, 500
XLA_SPARSE, NATIVE_SPARSE = 60.0, 5.0  # how much a feature that is not needed is held off
FLOOR = 0.03  # an error that is smaller is none
LOST = ((1.05, 0.018), (1.20, 0.008))  # at most this share of the choices may be slower than XLA by more than this


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
        numbers = model.named(self.device)
        assert numbers is not None, f"{self.device} is no Hopper"
        return numbers

    @property
    def kernels(self) -> list[str]:
        return [name for name in self.ms if name != "xla"]

    @property
    def ways(self) -> list[tuple[str, str, int]]:
        return [(kernel, *self.plans.get(kernel, ("", 1))) for kernel in self.kernels]


def samples(hold_out: Sequence[int] = ()) -> list[Sample]:
    every: list[Sample] = []
    for path in sorted(measured.FOLDER.glob("*.json")):
        table = json.loads(path.read_text())
        for m in table.get("measurements", ()):
            if m["op"] in model.OPS:
                ms = {"xla": m["xla_ms"], **m["native_ms"]}
                plans = {kernel: _plan_of(text) for kernel, text in m["plans"].items()}
                every.append(Sample(table["device"], shape_of(m), ms, plans))
    for path in sorted(record.RESULTS.glob("*/regret/*.json")):
        run = json.loads(path.read_text())
        if regret_runs.seed_of(run) not in hold_out:
            every += from_regret(run)
    return every


def from_regret(run: dict[str, Any]) -> list[Sample]:
    every = []
    device = _plan.Device("cuda", run["device"], (9, 0), 132)
    for row, problem in regret_runs.problems(run):
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
        every.append(Sample(run["device"], model.Shape.of(row["op"], problem), ms, plans, regret_runs.seed_of(run)))
    return every


def _plan_of(text: str) -> tuple[str, int]:
    """(tile, splits) of "native[sm90/wgrad 128x256 splits=132]"."""
    tile, splits = re.search(r" (\d+x\d+)", text), re.search(r"splits=(\d+)", text)
    return (tile[1] if tile else ""), (int(splits[1]) if splits else 1)


def shape_of(m: dict[str, Any]) -> model.Shape:
    """Of a table's row: "128x28x28 256->256 3x3 g64 float32 NHWC", its kind and its pixels."""
    problem = re.match(r"(\d+)x([\dx]+) (\d+)->(\d+) ", m["problem"])
    assert problem, m["problem"]
    groups = re.search(r" g(\d+) ", m["problem"])
    dtype, full, _, _, window, stride, dilation, *_ = measured.tuples(m["kind"])
    channels = int(problem[3]), int(problem[4]), int(groups[1]) if groups else 1
    extents = int(problem[1]), tuple(map(int, problem[2].split("x"))), *channels
    pixels, padding = round(2 ** m["coordinates"][0]), _padding_of(m["case"], window, stride, dilation)
    return model.Shape(m["op"], dtype, full, *extents, window, stride, dilation, pixels, padding)


_CASES = {case.name: case for case in conv_cases.CASES}


def _padding_of(
    case: str, window: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """A row of a table has its case's; a case that is no more, half of its filter on both sides."""
    known = _CASES.get(case)
    if known is None:
        return tuple(((f - 1) * d // 2,) * 2 for f, d in zip(window, dilation, strict=True))
    if not known.transposed:
        return known.padding
    pads = []  # lax.conv_transpose's "SAME", as the convolution's whose gradient it is
    for f, step in zip(window, stride, strict=True):
        low = f - 1 - (f - 1 if step > f - 1 else -(-(f + step - 2) // 2))
        pads.append((low, f - step - low))
    return tuple(pads)


# ----------------------------------------------------------------------------------------------------------------------
# What is learned from


@dataclasses.dataclass(frozen=True)
class Rows:
    """All samples as arrays: one row a problem, and one a kernel that ran it."""

    samples: list[Sample]
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
            list(known),
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

    @property
    def seeds(self) -> list[int]:
        return sorted(set(self.seed[self.seed >= 0].tolist()))

    @property
    def true(self) -> np.ndarray:
        """log(XLA's ms over a kernel's) of every way."""
        return np.log(self.xla_ms[self.of] / self.way_ms)

    def gains(self, r: np.ndarray, way_r: np.ndarray) -> np.ndarray:
        """The same, from r of both."""
        return self.true + (r - self.r)[self.of] - (way_r - self.way_r)

    def known(self, chosen: np.ndarray) -> dict[str, int]:
        """How often a kernel was measured in each class (model.Shape.classes), in the chosen problems."""
        count: dict[str, int] = {}
        for s in (s for s, one in zip(self.samples, chosen, strict=True) if one):
            for name in (f"{kernel} {of}" for kernel in s.kernels for of in s.shape.classes):
                count[name] = count.get(name, 0) + 1
        return dict(sorted(count.items()))


# ----------------------------------------------------------------------------------------------------------------------
# Forests


def forest(about: Mapping[str, Any], x: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    """Fitted, as model.Forest reads it."""
    try:
        from sklearn.ensemble import GradientBoostingRegressor
    except ImportError:
        raise SystemExit("python -m benchmarks fit needs scikit-learn: pip install 'jaxconv[bench]'") from None
    fitted = GradientBoostingRegressor(**about).fit(x, y)
    data: dict[str, Any] = {"initial": float(np.ravel(fitted.init_.constant_)[0]), "depth": about["max_depth"]}
    roots, features, values, rights = [], [], [], []
    for (each,) in fitted.estimators_:
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


# ----------------------------------------------------------------------------------------------------------------------
# Processes


@dataclasses.dataclass(frozen=True)
class Scales:
    scale: np.ndarray  # of each feature
    noise: float  # over the process' own variance


def scales(x: np.ndarray, y: np.ndarray, noise: float, sparse: float) -> Scales:
    """Those under which y is likely: descent on the likelihood's gradient (Adam), over blocks of all samples."""
    spread = np.maximum(x.std(0, dtype=np.float64), 1e-3)
    at = np.random.default_rng(0).permutation(len(y))
    blocks = [at[i * BLOCK : (i + 1) * BLOCK] for i in range(min(BLOCKS, -(-len(y) // BLOCK)))]
    count = sum(map(len, blocks))
    x, y = (x - x.mean(0, dtype=np.float64)) / spread, y - y.mean()
    logs = np.append(np.full(x.shape[1], -2.0), 0.0)  # of the scales, of the process' variance
    first, second = np.zeros_like(logs), np.zeros_like(logs)
    for step in range(1, STEPS + 1):
        scale, variance = np.exp(logs[:-1]), math.exp(logs[-1])
        slope = np.zeros_like(logs)
        for block in blocks:
            a, target = x[block] * scale, y[block]
            squares = model.squares(a, a)
            alike, d = model.matern(squares), np.sqrt(5 * squares)
            inverse = _inverse(variance * alike + noise * np.eye(len(block)))
            solved = inverse @ target
            by_covariance = (inverse - np.outer(solved, solved)) / 2
            by_square = by_covariance * (-5 / 6 * variance * (1 + d) * np.exp(-d))
            slope[:-1] += 4 * (by_square.sum(1) @ (a * a) - np.einsum("ij,ij->j", a, by_square @ a))
            slope[-1] += (by_covariance * alike).sum() * variance
        slope[:-1] += sparse * scale
        slope /= count
        first, second = 0.9 * first + 0.1 * slope, 0.98 * second + 0.02 * slope**2
        logs -= 0.15 * (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.98**step)) + 1e-8)
    rounded = np.array([float(f"{v:.4g}") for v in np.exp(logs[:-1]) / spread])
    return Scales(rounded, noise / math.exp(logs[-1]))


def _inverse(a: np.ndarray) -> np.ndarray:
    """Of a symmetric positive definite matrix."""
    factor = scipy.linalg.cholesky(a, lower=True, check_finite=False, overwrite_a=True)
    lower = np.tril(scipy.linalg.lapack.dpotri(factor, lower=1)[0])
    return lower + np.tril(lower, -1).T


@dataclasses.dataclass(frozen=True)
class Kriged:
    """A process on its points, and what it says of each seed from the points of others."""

    data: dict[str, Any]  # as model.Process reads it
    crossed: np.ndarray  # nan of a table's points
    alike: np.ndarray


def process(x: np.ndarray, y: np.ndarray, seed: np.ndarray, by: Scales) -> Kriged:
    mean, low, high = float(y.mean()), float(y.min()), float(y.max())
    a = (x - x.mean(0, dtype=np.float64)) * by.scale
    alike = model.matern(model.squares(a, a))
    inverse = _inverse(alike + by.noise * np.eye(len(y)))
    weights = inverse @ (y - mean)
    crossed, near = np.full(len(y), np.nan), np.full(len(y), np.nan)
    for each in set(seed[seed >= 0].tolist()):
        out = np.flatnonzero(seed == each)
        # What the points of a block are predicted as from all others (Rasmussen and Williams, 5.12, of a block)
        crossed[out] = y[out] - np.linalg.solve(inverse[np.ix_(out, out)], weights[out])
        near[out] = alike[out][:, seed != each].max(1, initial=0.0)
    data = {
        "mean": round(mean, 6),
        "low": round(low, 3),
        "high": round(high, 3),
        "scale": by.scale.tolist(),
        "weights": [float(f"{v:.6g}") for v in weights],
    }
    return Kriged(data, np.clip(crossed, low, high), near)


# ----------------------------------------------------------------------------------------------------------------------
# The model


class Fit:
    """All that is fitted to rows. What several models have in common is fitted once."""

    def __init__(self, rows: Rows):
        self.rows = rows
        self._forests: dict[frozenset[int | None], dict[str, Any]] = {}
        self._scales: dict[int | None, tuple[Scales, Scales]] = {}

    def _forest(self, *out: int | None) -> dict[str, Any]:
        """XLA's, without these seeds."""
        key = frozenset(out) - {None}
        if key not in self._forests:
            kept = ~np.isin(self.rows.seed, list(key))
            self._forests[key] = forest(XLA, self.rows.x[kept], self.rows.r[kept])
        return self._forests[key]

    def _scales_of(self, out: int | None) -> tuple[Scales, Scales]:
        """XLA's and the kernels', without the seed."""
        if out not in self._scales:
            rows = self.rows
            kept = rows.seed != out if out is not None else np.ones(len(rows.r), bool)
            ways = kept[rows.of]
            self._scales[out] = (
                scales(rows.x[kept], rows.r[kept], XLA_NOISE, XLA_SPARSE),
                scales(rows.ways[ways], rows.way_r[ways], NATIVE_NOISE, NATIVE_SPARSE),
            )
        return self._scales[out]

    def model(self, out: int | None = None) -> tuple[dict[str, Any], list[Choice]]:
        """The file's contents, and the choices that what they must be worth was found on. No time of the seed `out` is
        in either."""
        rows, left = self.rows, [seed for seed in self.rows.seeds if seed != out]
        kept = rows.seed != out if out is not None else np.ones(len(rows.r), bool)
        ways = kept[rows.of]
        of = np.cumsum(kept)[rows.of[ways]] - 1
        seed, x, known = rows.seed[kept], rows.x[kept], rows.known(kept)
        by_x, by_way = self._scales_of(out)
        xla, native = process(x, rows.r[kept], seed, by_x), process(rows.ways[ways], rows.way_r[ways], seed[of], by_way)
        trees = np.full(len(seed), np.nan)
        for each in left:
            trees[seed == each] = model.Forest(self._forest(out, each))(x[seed == each])
        r = (trees + xla.crossed) / 2
        true = rows.true[ways]
        gains = true + (r - rows.r[kept])[of] - (native.crossed - rows.way_r[ways])
        seen = model.with_gain(
            rows.ways[ways], gains, r[of], native.crossed, (trees - xla.crossed)[of], xla.alike[of], native.alike
        )
        off = np.log(np.abs(gains - true) + FLOOR)
        drawn = seed[of] >= 0
        deviation = np.full(len(off), np.nan)
        for each in left:
            these, others = seed[of] == each, drawn & (seed[of] != each)
            if these.any() and others.any():
                deviation[these] = np.exp(model.Forest(forest(ERROR, seen[others], off[others]))(seen[these]))
        able = [
            model.measured_enough(known, kernel, s.shape)
            for s, one in zip(rows.samples, kept, strict=True)
            if one
            for kernel in s.kernels
        ]
        choices = weighed(of, able, gains, deviation, true, np.flatnonzero(seed >= 0))
        problems = [
            [s.device, model.stored(s.shape), [[rows.kernels.index(k), tile, splits] for k, tile, splits in s.ways]]
            for s, one in zip(rows.samples, kept, strict=True)
            if one
        ]
        data = {
            "worth": least_worth(choices),
            "kernels": rows.kernels,
            "known": known,
            "xla": self._forest(out),
            "error": forest(ERROR, seen[drawn], off[drawn]),
            "xla_process": xla.data,
            "native_process": native.data,
            "problems": problems,
        }
        return data, choices


# ----------------------------------------------------------------------------------------------------------------------
# What a choice must be worth


@dataclasses.dataclass(frozen=True)
class Choice:
    """What a model would do with a problem that it does not know."""

    # Of each kernel, those first that are predicted to be the fastest: what it is worth, and the log of XLA's true time
    # over its true time
    options: tuple[tuple[float, float], ...]
    best: float  # log of XLA's time over the fastest's

    def gain(self, worth: float) -> float:
        """Log of XLA's time over the choice's."""
        return next((true for its, true in self.options if its > worth), 0.0)


def weighed(
    of: np.ndarray,
    able: Sequence[bool],
    gains: np.ndarray,
    deviation: np.ndarray,
    true: np.ndarray,
    problems: np.ndarray,
) -> list[Choice]:
    """Of each of `problems`; the arrays are of ways."""
    options: dict[int, list[tuple[float, float, float]]] = {p: [] for p in problems.tolist()}
    best = dict.fromkeys(options, 0.0)
    worth = model.worth(gains, deviation)
    for way in np.flatnonzero(np.isin(of, problems)).tolist():
        problem = int(of[way])
        best[problem] = max(best[problem], float(true[way]))
        if able[way] and gains[way] > math.log(model.MARGIN):
            options[problem].append((-float(gains[way]), float(worth[way]), float(true[way])))
    return [Choice(tuple(option[1:] for option in sorted(options[p])), best[p]) for p in options]


def judged(choices: Sequence[Choice], worth: float) -> tuple[float, float, tuple[float, ...]]:
    """(geometric mean of the speed against XLA, regret, shares of the choices that are slower than XLA, as LOST)."""
    got = [c.gain(worth) for c in choices]
    lost = tuple(sum(g < -math.log(than) for g in got) / len(got) for than, _ in LOST)
    behind = [c.best - g for c, g in zip(choices, got, strict=True)]
    return math.exp(sum(got) / len(got)), math.exp(sum(behind) / len(got)), lost


def least_worth(choices: Sequence[Choice], say: Callable[[str], None] = lambda line: None) -> float:
    """The first that keeps to LOST."""
    worth = 0.1
    while worth < 1e4:
        speed, behind, lost = judged(choices, worth)
        shares = ", ".join(f"{v:.1%} lose more than {than - 1:.0%}" for v, (than, _) in zip(lost, LOST, strict=True))
        say(f"  worth {worth:.2f}: {speed:.2f}, regret {behind:.3f}, {shares}")
        if all(v <= most for v, (_, most) in zip(lost, LOST, strict=True)):
            break
        worth *= 1.1
    return float(f"{worth:.3g}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks fit", description=__doc__.splitlines()[0])
    parser.add_argument("--hold-out", type=int, nargs="*", default=[], metavar="SEED", help="regret runs to leave out")
    parser.add_argument("--out", type=pathlib.Path, default=model.FILE)
    args = parser.parse_args(argv)
    regret_runs.plan_without_a_gpu()
    rows = Rows.make(samples(args.hold_out))
    print(f"{len(rows.r)} problems, {len(rows.of)} times of kernels; drawn with the seeds {rows.seeds}", flush=True)
    data, choices = Fit(rows).model()
    possible = math.exp(sum(c.best for c in choices) / len(choices))
    print(f"each seed by what was fitted without it; possible {possible:.2f} times XLA's speed")
    least_worth(choices, print)
    speed, behind, lost = judged(choices, data["worth"])
    quality = {"speed": speed, "possible": possible, "regret": behind, "lost": lost}
    about = {"seeds": rows.seeds, "left_out": json.loads(json.dumps(quality), parse_float=lambda v: round(float(v), 4))}
    args.out.write_text(_text(about | data))
    print(f"written: {args.out}, {args.out.stat().st_size / 1e3:.0f} KB")
    return 0


def _text(data: dict[str, Any]) -> str:
    """One line an entry, of problems one each, so that a difference can be read where it can be."""

    def line(key: str, value: Any) -> str:
        dump = functools.partial(json.dumps, separators=(",", ":"))
        text = dump(value) if key != "problems" else "[\n  " + ",\n  ".join(map(dump, value)) + "\n ]"
        return f" {json.dumps(key)}: {text}"

    return "{\n" + ",\n".join(line(key, value) for key, value in data.items()) + "\n}\n"

"""`python -m benchmarks fit`: what was recorded -> jaxconv/tuning/model.json, the plan's model.

Samples are the rows of the tables of jaxconv/tuning and of the recorded regret runs, but for seeds named by --hold-out.
Length scales, amplitude and noise of each process (jaxconv/_plan/model.py) maximise its likelihood, over at most FITTED
of its samples. How many standard deviations a choice must be sure of is taken from predictions of problems that were
left out, a tenth of the regret runs' problems at a time.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import math
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from scipy.linalg import cho_solve, cholesky
from scipy.optimize import minimize

from benchmarks import record, tune
from benchmarks.cases import ConvCase
from benchmarks.contenders import Setting
from jaxconv import _plan
from jaxconv._plan import measured, model

FOLDS = 10
FITTED = 300  # samples that parameters are fitted to
LEAST = 6  # samples of a process


@dataclasses.dataclass(frozen=True)
class Sample:
    """One problem's times on one device."""

    device: str
    op: str
    kind: model.Kind
    coordinates: model.Coordinates
    ms: dict[str, float]  # of "xla" and of kernels
    plans: dict[str, tuple[str, int]]  # (tile, splits) of kernels
    drawn: bool = False  # at random, by a regret run

    @property
    def numbers(self) -> model.Numbers:
        found = model.numbers(_plan.Device("cuda", self.device, (9, 0), 132))
        assert found is not None, f"{self.device} is no Hopper"
        return found

    def bases(self, name: str) -> tuple[float, float, float]:
        tile, splits = self.plans.get(name, ("", 1))
        return model.bases(name, self.op, self.kind, self.coordinates, self.numbers, tile, splits)

    def features(self, name: str) -> np.ndarray:
        limit, _, shape = self.bases(name)
        return model.features(self.op, self.kind, self.coordinates, limit, shape)

    def predicted(self, by: model.Model, name: str) -> model.Prediction | None:
        tile, splits = self.plans.get(name, ("", 1))
        return by.predict(name, self.op, self.kind, self.coordinates, self.numbers, tile, splits)


def samples(hold_out: Sequence[int] = ()) -> list[Sample]:
    found: list[Sample] = []
    for path in sorted(measured.FOLDER.glob("*.json")):
        table = json.loads(path.read_text())
        for m in table.get("measurements", ()):
            if m["op"] in model.OPS:
                kind = measured.tuples(m["kind"])
                ms = {"xla": m["xla_ms"], **m["native_ms"]}
                plans = {kernel: _plan_of(text) for kernel, text in m["plans"].items()}
                found.append(Sample(table["device"], m["op"], kind, tuple(m["coordinates"]), ms, plans))
    for path in sorted(record.RESULTS.glob("*/regret/*.json")):
        run = json.loads(path.read_text())
        if int(run["part"].removeprefix("seed")) not in hold_out:
            found += from_regret(run)
    return found


def from_regret(run: dict[str, Any]) -> list[Sample]:
    found = []
    for row in run["rows"]:
        shape = {k: tuple(map(_tuple, v)) if isinstance(v, list) else v for k, v in row["shape"].items()}
        setting = Setting(row["dtype"], True, row["precision"])
        made = tune.kernel_of(ConvCase(**shape), row["pass"], setting)
        if made is None:
            continue
        op, kind, coordinates = measured.features(*made)
        ms: dict[str, float] = {}
        plans: dict[str, tuple[str, int]] = {}
        device = _plan.Device("cuda", run["device"], (9, 0), 132)
        for spec, value in row["ms"].items():
            kernel, _, tile = spec.partition(" ")
            if kernel in ms:  # another tile: the one that is wanted comes first
                continue
            plan = _plan.made(*made[:1], spec, made[1], device) if kernel != "xla" else None
            ms[kernel] = value
            plans[kernel] = tile, plan.splits if isinstance(plan, _plan.Plan) else 1
        kind = measured.tuples(json.loads(json.dumps(kind)))
        found.append(Sample(run["device"], op, kind, coordinates, ms, plans, drawn=True))
    return found


def _plan_of(text: str) -> tuple[str, int]:
    """(tile, splits) of "native[sm90/wgrad 128x256 splits=132]"."""
    tile, splits = re.search(r" (\d+x\d+)", text), re.search(r"splits=(\d+)", text)
    return (tile[1] if tile else ""), (int(splits[1]) if splits else 1)


def _tuple(v: Any) -> Any:
    return tuple(v) if isinstance(v, list) else v


def grouped(of: Iterable[Sample]) -> dict[str, list[tuple[Sample, float]]]:
    """{process: [(sample, r)]}."""
    found: dict[str, list[tuple[Sample, float]]] = collections.defaultdict(list)
    for s in of:
        for name, ms in s.ms.items():
            r = math.log(ms / (s.bases(name)[1] + model.OVERHEAD_MS))
            found[f"{name} {model.arithmetic(s.kind)}"].append((s, r))
    return {name: rows for name, rows in found.items() if len(rows) >= LEAST}


def matrix(name: str, rows: Sequence[tuple[Sample, float]]) -> tuple[np.ndarray, np.ndarray]:
    """`name`: of a kernel or "xla"."""
    return np.array([s.features(name) for s, _ in rows]), np.array([r for _, r in rows])


# Where the search begins: in units of each of model.features.
START = np.array([2.0, 1.0, 2.0, 1.5, 5.0, 3.0, 3.0, 5.0, 0.7, 0.7, 5.0, 1.5, *[1.5] * 3, *[1.0] * 3, 3.0, 1.5, 2.0])


def fitted(x: np.ndarray, r: np.ndarray) -> tuple[np.ndarray, float, float]:
    """(length scales, amplitude, noise) of the largest likelihood, held near START by a log-normal prior."""
    centred = r - r.mean()
    start = np.concatenate([np.log(START), [math.log(0.7), math.log(0.1)]])
    square = (x[:, None, :] - x[None, :, :]) ** 2

    def loss(theta: np.ndarray) -> tuple[float, np.ndarray]:
        scales, amplitude, noise = np.exp(theta[:-2]), math.exp(theta[-2]), math.exp(theta[-1])
        k = amplitude**2 * np.exp(-0.5 * (square / scales**2).sum(-1))
        try:
            factor = cholesky(k + noise**2 * np.eye(len(r)), lower=True)
        except np.linalg.LinAlgError:
            return 1e9, np.zeros_like(theta)
        inverse = cho_solve((factor, True), np.eye(len(r)))
        weights = inverse @ centred
        value = 0.5 * centred @ weights + np.log(np.diag(factor)).sum()
        inner = 0.5 * (inverse - np.outer(weights, weights))
        weighted = inner * k
        gradient = np.empty_like(theta)
        for d in range(len(scales)):
            gradient[d] = (weighted * square[:, :, d]).sum() / scales[d] ** 2
        gradient[-2] = 2 * weighted.sum()
        gradient[-1] = 2 * noise**2 * np.trace(inner)
        prior = (theta - start) / 0.7
        return value + 0.5 * prior @ prior, gradient + prior / 0.7

    found = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=[(v - 2.5, v + 2.5) for v in start])
    theta = found.x
    return np.exp(theta[:-2]), math.exp(theta[-2]), max(math.exp(theta[-1]), 0.02)


def make(of: Sequence[Sample], parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    """The file's contents; `parameters`: length scales and so on that are known already."""
    processes = {}
    for name, rows in grouped(of).items():
        x, r = matrix(name.partition(" ")[0], rows)
        known = parameters.get(name) if parameters else None
        if known is None:
            some = np.random.default_rng(0).permutation(len(r))[:FITTED]
            known = fitted(x[some], r[some])
        scales, amplitude, noise = known
        processes[name] = {
            "scales": [round(float(s), 4) for s in scales],
            "amplitude": round(float(amplitude), 4),
            "noise": round(float(noise), 4),
            "samples": [
                [s.op, s.kind, [round(c, 4) for c in s.coordinates], *_short(s, name.partition(" ")[0]), round(v, 4)]
                for s, v in rows
            ],
        }
    return {"confidence": 0.0, "processes": processes}


def _short(s: Sample, name: str) -> tuple[float, float]:
    """(limit, limit by tiles)."""
    limit, _, shape = s.bases(name)
    return float(f"{limit:.6g}"), float(f"{shape:.6g}")


def parameters_of(data: dict[str, Any]) -> dict[str, Any]:
    return {name: (np.array(p["scales"]), p["amplitude"], p["noise"]) for name, p in data["processes"].items()}


@dataclasses.dataclass(frozen=True)
class Choice:
    """What the model would do with a problem that it does not know."""

    gain: float  # log of XLA's predicted time over the best kernel's
    deviation: float
    true: float  # log of XLA's time over that kernel's
    best: float  # log of XLA's time over the best kernel's


def left_out(of: Sequence[Sample], data: dict[str, Any]) -> list[Choice]:
    """Every drawn problem judged by a model that has not seen it, as a user's problem is not seen."""
    drawn = [s for s in of if s.drawn]
    fold = np.random.default_rng(0).permutation(len(drawn)) % FOLDS
    parameters, found = parameters_of(data), []
    for i in range(FOLDS):
        out = [s for s, at in zip(drawn, fold, strict=True) if at == i]
        unseen = set(map(id, out))
        known = model.Model(make([s for s in of if id(s) not in unseen], parameters))
        found += [choice for s in out if (choice := chosen(s, known)) is not None]
    return found


def chosen(s: Sample, by: model.Model) -> Choice | None:
    """What the model takes for a problem; None where there is nothing to compare."""
    if len(s.ms) < 2 or "xla" not in s.ms:
        return None
    predicted = {n: s.predicted(by, n) for n in s.ms}
    xla = predicted.pop("xla")
    able = {n: p for n, p in predicted.items() if p is not None}
    logs = {n: math.log(s.ms["xla"] / v) for n, v in s.ms.items() if n != "xla"}
    best = max(0.0, *logs.values())
    if xla is None or not able:
        return Choice(-math.inf, 1.0, 0.0, best)
    name = min(able, key=lambda n: able[n].ms)
    return Choice(math.log(xla.ms / able[name].ms), math.hypot(xla.deviation, able[name].deviation), logs[name], best)


def judged(choices: Sequence[Choice], confidence: float) -> tuple[float, float, float]:
    """(geometric mean of the speed against XLA, regret, share of the choices that lose more than 5 % to XLA)."""
    got = [c.true if c.gain > max(math.log(model.MARGIN), confidence * c.deviation) else 0.0 for c in choices]
    regret = [c.best - g for c, g in zip(choices, got, strict=True)]
    lost = sum(g < -math.log(1.05) for g in got) / len(got)
    return math.exp(sum(got) / len(got)), math.exp(sum(regret) / len(regret)), lost


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks fit", description=__doc__.splitlines()[0])
    parser.add_argument("--hold-out", type=int, nargs="*", default=[], metavar="SEED", help="regret runs to leave out")
    parser.add_argument("--out", type=pathlib.Path, default=model.FILE)
    args = parser.parse_args(argv)
    known = samples(args.hold_out)
    data = make(known)
    choices = left_out(known, data)
    possible = math.exp(sum(c.best for c in choices) / len(choices))
    print(f"{len(known)} problems, {len(data['processes'])} processes; possible {possible:.2f} times XLA's speed")
    for confidence in np.arange(0.0, 2.01, 0.25):
        speed, regret, lost = judged(choices, confidence)
        print(f"  sure of {confidence:.2f} deviations: {speed:.2f}, regret {regret:.3f}, {lost:.1%} lose more than 5 %")
        if lost <= 0.02:
            break
    data["confidence"] = float(confidence)
    data["left_out"] = {
        "speed": round(speed, 3),
        "possible": round(possible, 3),
        "regret": round(regret, 3),
        "lost": lost,
    }
    text = json.dumps({k: v for k, v in data.items() if k != "processes"})[:-1]
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(p)}" for name, p in sorted(data["processes"].items()))
    args.out.write_text(f'{text}, "processes": {{\n{lines}\n}}}}\n')
    print(f"written: {args.out}, {args.out.stat().st_size / 1e3:.0f} KB")
    return 0

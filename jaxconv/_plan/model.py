"""The time of a kernel, or of XLA, on a problem that was not measured: predicted from those that were, with an error.

A time is split into the least that the device allows and a factor,

    ms = (base(kernel, problem, device) + OVERHEAD_MS) * exp(r),    base = max(tiles, bytes / bandwidth),

where tiles is flops / rate, of a kernel with tiles rounded up to whole tiles and whole waves of them. r is a Gaussian
process over what a problem looks like (taps, strides, dilation, channels, pixels, groups, pass), one for each kernel
and one for XLA in each class of arithmetic (C. E. Rasmussen, C. K. I. Williams, Gaussian Processes for Machine
Learning, 2006, section 2.2, algorithm 2.1). Its standard deviation grows away from what was measured. The base carries
the device's numbers, so what was measured on one Hopper speaks for another.

`python -m benchmarks fit` makes the data, jaxconv/tuning/model.json: samples, length scales, and how much the standard
deviation must be widened for problems of kinds that were left out.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
from typing import Any

import numpy as np
from scipy.linalg import cho_solve, cholesky, solve_triangular

from jaxconv._plan import measured
from jaxconv._plan.plan import Device, Plan
from jaxconv._problem import ConvProblem

FILE = pathlib.Path(__file__).parent.parent / "tuning" / "model.json"
OVERHEAD_MS = 0.002  # of a launch, and of filling and draining the device
# A kernel is taken where XLA's predicted time over its own is more than MARGIN and more than CONFIDENCE standard
# deviations of that prediction, as `fit` found them on kinds that were left out: at most 2 % of the choices lose 5 %.
MARGIN = 1.05
OPS = ("conv_fprop", "conv_dgrad", "conv_wgrad")
GROUPINGS = ("none", "grouped", "depthwise")
SMS = 132  # multiprocessors that the rates are of; fewer of them are slower alike
XLA_TILE = "128x128"  # what its libraries' kernels are made of, more or less


@dataclasses.dataclass(frozen=True)
class Numbers:
    """What a device can do. Rates in operations per millisecond, bandwidth in bytes per millisecond."""

    half: float  # 16-bit matrix products
    tf32: float
    highest: float  # float32 as products of three bfloat16 terms
    bandwidth: float  # read plus written


# H200 and H100: measured, matrix products of random data through cuBLAS and a large copy. The others are these by the
# vendor's ratio of multiprocessors times clock, and of memory bandwidth.
NUMBERS = {
    "H200": Numbers(788e9, 420e9, 165e9, 4.3e9),
    "GH200 144G": Numbers(788e9, 420e9, 165e9, 4.3e9),
    "GH200": Numbers(788e9, 420e9, 165e9, 3.6e9),
    "H100 PCIe": Numbers(560e9, 300e9, 117e9, 1.75e9),
    "H100 NVL": Numbers(640e9, 340e9, 134e9, 3.4e9),
    "H800 PCIe": Numbers(560e9, 300e9, 117e9, 1.75e9),
    "H100": Numbers(780e9, 415e9, 163e9, 3.0e9),
    "H800": Numbers(780e9, 415e9, 163e9, 3.0e9),
    "H20": Numbers(140e9, 72e9, 29e9, 3.6e9),
}


def numbers(device: Device) -> Numbers | None:
    """Of a device of compute capability 9.0, by its name; an unknown one by its multiprocessors. None elsewhere."""
    if device.compute_capability != (9, 0):
        return None
    for name, known in NUMBERS.items():
        if name in device.kind:
            return known
    share, known = device.sm_count / 132, NUMBERS["H100"]
    return Numbers(known.half * share, known.tf32 * share, known.highest * share, known.bandwidth)


Kind = tuple[Any, ...]
Coordinates = tuple[float, ...]


def arithmetic(kind: Kind) -> str:
    """ "half", "tf32" or "highest"."""
    return "half" if kind[0] != "float32" else "highest" if kind[1] else "tf32"


def limit_ms(kind: Kind, coordinates: Coordinates, of: Numbers) -> float:
    """max(flops / rate, bytes / bandwidth) of a convolution; each of fprop, dgrad and wgrad moves the same arrays."""
    pixels, c, k, groups = (2.0**v for v in coordinates)
    taps, steps = math.prod(kind[4]), math.prod(kind[5])
    item = 4 if kind[0] == "float32" else 2
    flops = 2 * pixels * c * k * groups * taps
    moved = item * groups * (pixels * c * min(taps, steps) + pixels * k + taps * c * k)
    return max(flops / getattr(of, arithmetic(kind)), moved / of.bandwidth)


def base_ms(op: str, kind: Kind, coordinates: Coordinates, of: Numbers, tile: str = "", splits: int = 1) -> float:
    """The limit, where a product has tiles with these rounded up: to whole tiles, and to whole waves of them."""
    limit = limit_ms(kind, coordinates, of)
    if not tile:
        return limit
    rows, columns = map(int, tile.split("x"))
    pixels, c, k, groups = (2.0**v for v in coordinates)
    taps, steps = math.prod(kind[4]), math.prod(kind[5])
    if op == "conv_wgrad":
        m, n, summed = taps * c, k, pixels / splits
    elif op == "conv_dgrad":
        m, n, summed = pixels * steps, c, max(taps / steps, 1.0) * k
    else:
        m, n, summed = pixels, k, taps * c
    tiles = (
        math.ceil(m / rows - 1e-6)
        * math.ceil(n / columns - 1e-6)
        * round(groups)
        * (splits if op == "conv_wgrad" else 1)
    )
    waves = math.ceil(tiles / SMS)
    deep = math.ceil(summed / 64) * 64
    return max(limit, waves * SMS * 2.0 * rows * columns * deep / getattr(of, arithmetic(kind)))


def features(op: str, kind: Kind, coordinates: Coordinates, limit: float, base: float) -> np.ndarray:
    """What the process measures distances in; each is divided by a length scale."""
    dtype, _, _, grouping, window, stride, dilation, whole_c, whole_k = kind
    pixels, c, k, groups = coordinates
    far = max(dilation)
    return np.array(
        [
            math.log2(math.prod(window)),
            len(window) - 2.0,
            math.log2(math.prod(stride)),
            float(far > 1) + 0.25 * math.log2(far),
            pixels,
            c,
            k,
            groups,
            float(not whole_c),
            float(not whole_k),
            math.log2(limit + OVERHEAD_MS),
            math.log2((base + OVERHEAD_MS) / (limit + OVERHEAD_MS)),
            *(float(op == name) for name in OPS),
            *(float(grouping == name) for name in GROUPINGS),
            float(dtype == "float16"),
            float(window[-1] == 1),
            float(math.prod(window) > 1 and max(window) != min(window)),
        ]
    )


@dataclasses.dataclass(frozen=True)
class Prediction:
    ms: float
    deviation: float  # of log(ms)


class Process:
    """A Gaussian process with a constant mean and a squared-exponential kernel."""

    def __init__(self, x: np.ndarray, r: np.ndarray, scales: np.ndarray, amplitude: float, noise: float):
        self.scales, self.amplitude, self.noise = scales, amplitude, noise
        self.x = x / scales
        self.mean = float(np.mean(r))
        k = self._kernel(self.x, self.x)
        k[np.diag_indices_from(k)] += noise**2
        self.factor = cholesky(k, lower=True)
        self.weights = cho_solve((self.factor, True), r - self.mean)

    def _kernel(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        square = (a**2).sum(1)[:, None] + (b**2).sum(1)[None] - 2 * a @ b.T
        return self.amplitude**2 * np.exp(-0.5 * np.maximum(square, 0.0))

    def predict(self, x: np.ndarray) -> tuple[float, float]:
        """(mean, standard deviation) of r."""
        k = self._kernel(self.x, (x / self.scales)[None])[:, 0]
        v = solve_triangular(self.factor, k, lower=True)
        return self.mean + float(k @ self.weights), math.sqrt(
            max(self.amplitude**2 - float(v @ v), 0.0) + self.noise**2
        )


class Model:
    def __init__(self, data: dict[str, Any]):
        self.confidence = float(data["confidence"])
        self._data = data
        self._processes: dict[str, Process] = {}

    def _process(self, name: str) -> Process | None:
        """Of a kernel or XLA in a class of arithmetic: "sm90/product half"."""
        if name not in self._processes:
            found = self._data["processes"].get(name)
            if found is None:
                return None
            x = np.array([features(*sample_features(s)) for s in found["samples"]])
            r = np.array([s[-1] for s in found["samples"]])
            scales = np.array(found["scales"])
            self._processes[name] = Process(x, r, scales, found["amplitude"], found["noise"])
        return self._processes[name]

    def predict(
        self, name: str, op: str, kind: Kind, coordinates: Coordinates, of: Numbers, tile: str = "", splits: int = 1
    ) -> Prediction | None:
        """The time of `name`, a kernel or "xla"; None where it was never measured in the problem's arithmetic."""
        process = self._process(f"{name} {arithmetic(kind)}")
        if process is None:
            return None
        limit, base, shape = bases(name, op, kind, coordinates, of, tile, splits)
        mean, deviation = process.predict(features(op, kind, coordinates, limit, shape))
        return Prediction((base + OVERHEAD_MS) * math.exp(mean), deviation)


def bases(
    name: str, op: str, kind: Kind, coordinates: Coordinates, of: Numbers, tile: str, splits: int
) -> tuple[float, float, float]:
    """(limit, what r is relative to, limit by tiles) in milliseconds. XLA's time is relative to the limit."""
    limit = limit_ms(kind, coordinates, of)
    if name == "xla":
        return limit, limit, base_ms(op, kind, coordinates, of, XLA_TILE)
    base = base_ms(op, kind, coordinates, of, tile, splits)
    return limit, base, base


def sample_features(sample: list[Any]) -> tuple[str, Kind, Coordinates, float, float]:
    """The arguments of `features` from a stored sample [op, kind, coordinates, limit_ms, base_ms, r]."""
    op, kind, coordinates, limit, base, _ = sample
    return op, measured.tuples(kind), tuple(coordinates), limit, base


@functools.cache
def model() -> Model | None:
    """What the package ships; None where it ships none."""
    return Model(json.loads(FILE.read_text())) if FILE.exists() else None


def sure(gain: float, deviation: float) -> bool:
    """Whether a kernel is to be taken of which XLA's predicted time over its own has this logarithm and error."""
    found = model()
    return found is not None and gain > max(math.log(MARGIN), found.confidence * deviation)


def predict(op: str, p: ConvProblem, device: Device, plans: list[Plan]) -> dict[str, Prediction]:
    """The times of XLA ("xla") and of plans' kernels, as far as they are known; empty for a device without numbers."""
    found, of = model(), numbers(device)
    if found is None or of is None:
        return {}
    measured_op, kind, coordinates = measured.features(op, p)
    if measured_op not in OPS:
        return {}
    predictions = {"xla": found.predict("xla", measured_op, kind, coordinates, of)}
    for plan in plans:
        predictions[plan.kernel] = found.predict(
            plan.kernel, measured_op, kind, coordinates, of, plan.tile, plan.splits
        )
    return {name: prediction for name, prediction in predictions.items() if prediction is not None}

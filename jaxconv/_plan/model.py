"""The time of a kernel, or of XLA, on a convolution that was not measured: predicted from those that were.

A time is split into the least that the device allows and a factor,

    ms = (base(kernel, problem, device) + OVERHEAD_MS) * exp(r),    base = max(tiles, bytes / bandwidth),

where tiles is flops / rate, of a kernel with tiles rounded up to whole tiles and whole waves of them. r is a sum of
regression trees over what a problem looks like (J. H. Friedman, Greedy Function Approximation: A Gradient Boosting
Machine, 2001): trees, because XLA's time is that of the library kernel that takes the problem, and what each takes
ends at limits like "3x3, stride 2, as many outputs as inputs". One forest is XLA's, one all native kernels'; a third
predicts how far the other two are off in XLA's time over a kernel's. The base carries the device's numbers, so what was
measured on one Hopper speaks for another.

`python -m benchmarks fit` makes the data, jaxconv/tuning/model.json: the trees, and how many errors a choice must be
sure of.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxconv._plan.plan import Device, Plan, extent_of
from jaxconv._problem import ConvProblem

FILE = pathlib.Path(__file__).parent.parent / "tuning" / "model.json"
OVERHEAD_MS = 0.002  # of a launch, and of filling and draining the device
# A kernel is taken where XLA's predicted time over its own is more than MARGIN and as many predicted errors as `fit`
# found to be needed on problems that were left out: at most 2 % of the choices lose 5 %, at most 1 % lose 20 %.
MARGIN = 1.05
OPS = ("conv_fprop", "conv_dgrad", "conv_wgrad")
LEAST = 6  # measurements of a kernel in an arithmetic, for a prediction
SMS = 132  # multiprocessors that the rates are of; fewer of them are slower alike
XLA_TILE = "128x128"  # what its libraries' kernels are made of, more or less


@dataclasses.dataclass(frozen=True)
class Numbers:
    """What a device can do. Rates in operations per millisecond, bandwidth in bytes per millisecond."""

    half: float  # 16-bit matrix products
    tf32: float
    highest: float  # float32 as products of three bfloat16 terms
    bandwidth: float  # read plus written

    @property
    def rates(self) -> tuple[float, float]:
        """Of matrix products, and of memory."""
        return self.half, self.bandwidth


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


def named(kind: str) -> Numbers | None:
    """Of a device by its name ("NVIDIA H100 80GB HBM3"), the longest that is in it: H20 is no H200."""
    return max(((len(name), n) for name, n in NUMBERS.items() if name in kind), default=(0, None), key=_length)[1]


def _length(entry: tuple[int, Any]) -> int:
    return entry[0]


def numbers(device: Device) -> Numbers | None:
    """Of a device of compute capability 9.0, by its name; an unknown one by its multiprocessors. None elsewhere."""
    if device.compute_capability != (9, 0):
        return None
    known = named(device.kind)
    if known is not None:
        return known
    share, known = device.sm_count / 132, NUMBERS["H100"]
    return Numbers(known.half * share, known.tf32 * share, known.highest * share, known.bandwidth)


# ----------------------------------------------------------------------------------------------------------------------
# What a problem looks like


@dataclasses.dataclass(frozen=True)
class Shape:
    """What the model sees of a convolution."""

    op: str  # of OPS
    dtype: str
    full_float32: bool
    batch: int
    in_spatial: tuple[int, ...]
    in_channels: int
    out_channels: int
    groups: int
    filter: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    pixels: int  # of y, all images

    @classmethod
    def of(cls, op: str, p: ConvProblem) -> Shape:
        return cls(
            "conv_fprop" if op == "conv" else op,
            p.dtype,
            p.dtype == "float32" and p.full_float32,
            p.batch,
            p.in_spatial,
            p.in_channels,
            p.out_channels,
            p.groups,
            p.filter,
            p.stride,
            p.dilation,
            p.batch * math.prod(p.out_spatial),
        )

    @property
    def arithmetic(self) -> str:
        """ "half", "tf32" or "highest"."""
        return "half" if self.dtype != "float32" else "highest" if self.full_float32 else "tf32"

    @property
    def taps(self) -> int:
        return math.prod(self.filter)

    @property
    def steps(self) -> int:
        return math.prod(self.stride)

    @property
    def group_c(self) -> int:
        return self.in_channels // self.groups

    @property
    def group_k(self) -> int:
        return self.out_channels // self.groups

    def product(self, splits: int = 1) -> tuple[float, float, float]:
        """(rows, columns, summed) of the operation as a matrix product of each group."""
        if self.op == "conv_wgrad":
            return self.taps * self.group_c, self.group_k, self.pixels / splits
        if self.op == "conv_dgrad":
            return self.pixels * self.steps, self.group_c, max(self.taps / self.steps, 1.0) * self.group_k
        return self.pixels, self.group_k, self.taps * self.group_c

    def limits_ms(self, of: Numbers) -> tuple[float, float]:
        """(flops / rate, bytes / bandwidth); each of fprop, dgrad and wgrad moves the same arrays."""
        item = 4 if self.dtype == "float32" else 2
        x = self.pixels * self.in_channels * min(self.taps, self.steps)
        moved = item * (x + self.pixels * self.out_channels + self.taps * self.group_c * self.out_channels)
        flops = 2 * self.pixels * self.taps * self.group_c * self.out_channels
        return flops / getattr(of, self.arithmetic), moved / of.bandwidth


def _log(value: float) -> float:
    return math.log2(max(value, 1e-9))


def features(s: Shape, of: Numbers) -> dict[str, float]:
    """By name; a tree asks whether one of them is above a threshold. Extents and times are logarithms to base 2."""
    rank, taps, steps, c, k = len(s.filter), s.taps, s.steps, s.group_c, s.group_k
    channels, filters = s.in_channels, s.out_channels
    compute, memory = s.limits_ms(of)
    item = 4 if s.dtype == "float32" else 2
    dilated = max(s.dilation)
    reach = (max(s.filter) - 1) * dilated
    depthwise = s.groups > 1 and c == 1
    square = len(set(s.filter)) == 1
    odd = all(f % 2 for f in s.filter)
    in_pixels = s.batch * math.prod(s.in_spatial)
    rows, columns, _ = s.product()
    if s.op == "conv_dgrad":  # as XLA has it: an output a pixel of x
        rows = in_pixels
    tiles = math.ceil(rows / 128) * math.ceil(columns / 128) * s.groups
    outputs = {"conv_fprop": s.pixels * filters, "conv_dgrad": in_pixels * channels, "conv_wgrad": taps * c * filters}
    summed = {"conv_fprop": taps * c, "conv_dgrad": k * taps / steps, "conv_wgrad": s.pixels}
    return {
        **{op: float(s.op == op) for op in OPS},
        "ungrouped": float(s.groups == 1),
        "grouped": float(s.groups > 1 and c > 1),
        "depthwise": float(depthwise),
        "float16": float(s.dtype == "float16"),
        "tf32": float(s.arithmetic == "tf32"),
        "highest": float(s.arithmetic == "highest"),
        "rank": float(rank),
        "taps": _log(taps),
        "taps of the last axis": _log(s.filter[-1]),
        "taps of the first axis": _log(s.filter[0]),
        "most taps of an axis": _log(max(s.filter)),
        "square": float(square),
        "odd": float(odd),
        "a flat axis": float(min(s.filter) == 1 and taps > 1),
        "strides": _log(steps),
        "equal strides": float(len(set(s.stride)) == 1),
        "dilated": float(dilated > 1),
        "dilation": _log(dilated),
        "dilated reach": float(dilated > 1) * _log(reach + 1),
        "reaches past the image": float(reach >= min(s.in_spatial)),
        "taps a stride": _log(taps / steps),
        "steps by its filter": float(s.filter == s.stride),
        "channels": _log(channels),
        "filters": _log(filters),
        "channels of a group": _log(c),
        "filters of a group": _log(k),
        "fewer": _log(min(c, k)),
        "more": _log(max(c, k)),
        "as many filters": float(k == c),
        "a power of two of both": float(c == k and c in (4, 8, 16, 32, 64)),
        "groups": _log(s.groups),
        "batch": _log(s.batch),
        "pixels": _log(s.pixels),
        "pixels of an image": _log(s.pixels / s.batch),
        "pixels of x": _log(math.prod(s.in_spatial)),
        "row of x": _log(s.in_spatial[-1]),
        **{f"channels by {n}": float(channels % n == 0) for n in (8,)},
        **{f"filters by {n}": float(filters % n == 0) for n in (8,)},
        **{f"channels of a group by {n}": float(c % n == 0) for n in (4, 8)},
        **{f"filters of a group by {n}": float(k % n == 0) for n in (4, 8)},
        "compute": _log(compute + OVERHEAD_MS),
        "memory": _log(memory + OVERHEAD_MS),
        "limit": _log(max(compute, memory) + OVERHEAD_MS),
        "compute over memory": _log((compute + 1e-5) / (memory + 1e-5)),
        "compute without groups": _log(compute * s.groups + OVERHEAD_MS),
        "outputs": _log(outputs[s.op]),
        "summed": _log(summed[s.op]),
        "y": _log(s.pixels * filters * item * 1e-6 + 1e-3),
        "products": _log(s.pixels * filters * taps),
        "tiles": _log(tiles),
        "waves": _log(math.ceil(tiles / SMS)),
        # What libraries have kernels of their own for, or no kernel at all
        "a plain product": float(s.groups == 1 and taps == 1 and steps == 1),
        "one tap": float(taps == 1 and steps == 1),
        "an elementwise product": float(depthwise and taps == 1 and steps == 1 and k == 1 and s.op != "conv_wgrad"),
        "a common depthwise": float(
            depthwise and rank == 2 and k == 1 and square and odd and s.filter[0] <= 7 and dilated == 1
            and steps in (1, 4)
        ),
    }  # fmt: skip


def _tiled(s: Shape, of: Numbers, tile: str, splits: int) -> tuple[float, dict[str, float]]:
    """(base, features) of a kernel: a product with tiles has these rounded up, to whole tiles and whole waves."""
    limit = max(s.limits_ms(of))
    if not tile:
        return limit, {"kernel's tiles": 0.0, "kernel's waves": 0.0, "kernel's sum": 0.0, "kernel's waste": 0.0}
    rows, columns = extent_of(tile)
    m, n, summed = s.product(splits)
    across = math.ceil(n / columns - 1e-6)
    tiles = math.ceil(m / rows - 1e-6) * across * s.groups * (splits if s.op == "conv_wgrad" else 1)
    waves, deep = math.ceil(tiles / SMS), math.ceil(summed / 64) * 64
    base = max(limit, waves * SMS * 2.0 * rows * columns * deep / getattr(of, s.arithmetic))
    return base, {
        "kernel's tiles": _log(tiles),
        "kernel's waves": _log(waves),
        "kernel's sum": _log(deep),
        "kernel's waste": _log(across * columns / n),
    }


@dataclasses.dataclass(frozen=True)
class Seen:
    """A problem on a device, and ways to compute it, as the forests see them."""

    x: np.ndarray  # the problem: (features)
    limit_ms: float  # XLA's r is relative to it
    ways: np.ndarray  # (plans, features): the problem's, a plan's, which kernel
    bases_ms: np.ndarray  # (plans,)


def seen(s: Shape, of: Numbers, plans: Sequence[tuple[str, str, int]], kernels: Sequence[str]) -> Seen:
    """`plans`: (kernel, tile, splits) each; `kernels`: all that there are."""
    x = np.array([*features(s, of).values()], np.float32)
    ways = np.zeros((len(plans), len(x) + 7 + len(kernels)), np.float32)
    ways[:, : len(x)] = x
    bases = np.zeros(len(plans))
    for row, (kernel, tile, splits) in enumerate(plans):
        bases[row], tiled = _tiled(s, of, tile, splits)
        own = [_log(bases[row] + OVERHEAD_MS), *tiled.values(), _log(splits), float(tile.startswith("256"))]
        ways[row, len(x) : len(x) + 7] = own
        ways[row, len(x) + 7 + kernels.index(kernel)] = 1.0
    return Seen(x, max(s.limits_ms(of)), ways, bases)


# ----------------------------------------------------------------------------------------------------------------------
# The forests


class Forest:
    """A sum of regression trees. Nodes lie depth first: a node's left child is behind it, a leaf is its own child."""

    def __init__(self, data: dict[str, Any]):
        self.initial, self.depth = float(data["initial"]), int(data["depth"])
        self.roots = np.array(data["roots"])
        self.feature = np.array(data["feature"])  # -1: a leaf
        self.value = np.array(data["value"], np.float32)  # a threshold, at most which goes left; of a leaf its summand
        at = np.arange(len(self.feature))
        leaf = self.feature < 0
        self.left = np.where(leaf, at, at + 1)
        self.right = np.where(leaf, at, at + np.array(data["right"]))  # stored as a distance
        self.feature[leaf] = 0

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """(rows,) of (rows, features) float32."""
        node = np.broadcast_to(self.roots, (len(x), len(self.roots)))
        rows = np.arange(len(x))[:, None]
        for _ in range(self.depth):
            node = np.where(x[rows, self.feature[node]] <= self.value[node], self.left[node], self.right[node])
        return self.initial + self.value[node].sum(1, dtype=np.float64)


@dataclasses.dataclass(frozen=True)
class Prediction:
    ms: float
    deviation: float  # of log(XLA's ms over this): how far it is off, typically; of XLA itself 0


class Model:
    def __init__(self, data: dict[str, Any]):
        self.confidence = float(data["confidence"])
        self.kernels: list[str] = data["kernels"]
        self.known: dict[str, int] = data["known"]  # measurements, by "kernel arithmetic"
        self.xla, self.native, self.error = (Forest(data[name]) for name in ("xla", "native", "error"))

    def predict(
        self, s: Shape, of: Numbers, plans: Sequence[tuple[str, str, int]]
    ) -> tuple[Prediction, list[Prediction | None]]:
        """Of XLA, and of each of `plans` (kernel, tile, splits); None of a kernel that was hardly measured in the
        problem's arithmetic."""
        able = [p for p in plans if self.known.get(f"{p[0]} {s.arithmetic}", 0) >= LEAST]
        see = seen(s, of, able, self.kernels)
        xla = self.xla(see.x[None])[0]
        xla_ms = (see.limit_ms + OVERHEAD_MS) * math.exp(xla)
        if not able:
            return Prediction(xla_ms, 0.0), [None] * len(plans)
        native = self.native(see.ways)
        ms = (see.bases_ms + OVERHEAD_MS) * np.exp(native)
        error = np.exp(self.error(with_gain(see.ways, np.log(xla_ms / ms), xla, native)))
        predictions = {p: Prediction(float(t), float(e)) for p, t, e in zip(able, ms, error, strict=True)}
        return Prediction(xla_ms, 0.0), [predictions.get(p) for p in plans]


def with_gain(ways: np.ndarray, gain: np.ndarray, xla: Any, native: np.ndarray) -> np.ndarray:
    """What the error is predicted from: log(XLA's ms over the kernel's), both r, and all else."""
    return np.column_stack([ways, gain, np.broadcast_to(xla, gain.shape), native]).astype(np.float32)


@functools.cache
def model() -> Model | None:
    """What the package ships; None where it ships none."""
    return Model(json.loads(FILE.read_text())) if FILE.exists() else None


def sure(ratio: float, deviation: float) -> bool:
    """Whether a kernel is to be taken that is predicted to be `ratio` times faster than XLA, with this error."""
    found = model()
    return found is not None and math.log(ratio) > math.log(MARGIN) + found.confidence * deviation


def predict(op: str, p: ConvProblem, device: Device, plans: list[Plan]) -> dict[str, Prediction]:
    """The times of XLA ("xla") and of plans (by `Plan.spec`), as far as known; empty for a device without numbers."""
    found, of = model(), numbers(device)
    shape = Shape.of(op, p)
    if found is None or of is None or shape.op not in OPS:
        return {}
    keys = [(plan.kernel, plan.tile, plan.splits) for plan in plans]
    xla, native = found.predict(shape, of, keys)
    named = {"xla": xla, **dict(zip((plan.spec for plan in plans), native, strict=True))}
    return {name: prediction for name, prediction in named.items() if prediction is not None}

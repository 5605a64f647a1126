"""The time of a kernel, or of XLA, on a convolution that was not measured: predicted from those that were.

A time is split into the least that the device allows and a factor,

    ms = (base(kernel, problem, device) + OVERHEAD_MS) * exp(r),    base = max(tiles, bytes / bandwidth),

where tiles is flops / rate, of a kernel with tiles rounded up to whole tiles and whole waves of them. r is learned from
what a problem looks like, in two ways. A Gaussian process (C. E. Rasmussen and C. K. I. Williams, Gaussian Processes
for Machine Learning, 2006) goes by the problems that are most alike, each feature with a scale of its own: native
kernels' times are smooth, and this is all that predicts them. XLA's time is that of the library kernel that takes the
problem, and what each takes ends at limits like "3x3, stride 2, as many outputs as inputs": so its r is the mean of a
process and of a sum of regression trees (J. H. Friedman, Greedy Function Approximation: A Gradient Boosting Machine,
2001). Another forest predicts how far XLA's predicted time over a kernel's is off. The base carries the device's
numbers, so what was measured on one Hopper speaks for another.

`python -m benchmarks fit` makes the data, jaxconv/tuning/model.json: the problems and how alike each must be, the
trees, and what a choice must be worth.
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
# A kernel is taken where XLA's predicted time over its own is more than MARGIN, and is worth the risk (`worth`): as
# much as `fit` found to be needed on problems that were left out.
MARGIN = 1.05
OPS = ("conv_fprop", "conv_dgrad", "conv_wgrad")
LEAST = 6  # measurements of a kernel in an arithmetic, of fprop and dgrad or of wgrad, and of a grouping
SMS = 132  # multiprocessors that the rates are of; fewer of them are slower alike


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


@functools.lru_cache(maxsize=256)
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
    padding: tuple[tuple[int, int], ...]

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
            p.padding,
        )

    @functools.cached_property
    def arithmetic(self) -> str:
        """ "half", "tf32" or "highest"."""
        return "half" if self.dtype != "float32" else "highest" if self.full_float32 else "tf32"

    @functools.cached_property
    def grouping(self) -> str:
        """ "none", "grouped" or "depthwise"."""
        return "none" if self.groups == 1 else "depthwise" if self.group_c == 1 else "grouped"

    @functools.cached_property
    def classes(self) -> tuple[str, str, str]:
        return self.arithmetic, self.op, self.grouping

    @functools.cached_property
    def taps(self) -> int:
        return math.prod(self.filter)

    @functools.cached_property
    def steps(self) -> int:
        return math.prod(self.stride)

    @functools.cached_property
    def out_spatial(self) -> tuple[int, ...]:
        return tuple(
            max((size + low + high - (f - 1) * d - 1) // step + 1, 1)
            for size, (low, high), f, d, step in zip(
                self.in_spatial, self.padding, self.filter, self.dilation, self.stride, strict=True
            )
        )

    @functools.cached_property
    def itemsize(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @functools.cached_property
    def group_c(self) -> int:
        return self.in_channels // self.groups

    @functools.cached_property
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
        item = self.itemsize
        x = self.pixels * self.in_channels * min(self.taps, self.steps)
        moved = item * (x + self.pixels * self.out_channels + self.taps * self.group_c * self.out_channels)
        flops = 2 * self.pixels * self.taps * self.group_c * self.out_channels
        return flops / getattr(of, self.arithmetic), moved / of.bandwidth


@functools.lru_cache(maxsize=4096)
def copied(op: str, p: Any) -> str:
    """Which array of a convolution XLA copies on an NVIDIA GPU because of its padding: "x", "dx", "dy" or "".

    cuDNN pads both ends alike. Where they differ XLA pads x in front of it, in a pass of its own, and slices dx behind
    it. A gradient's padding at the upper end may be up to stride - 1 more or less without another result, and XLA takes
    that which is even, if there is one; fprop's is as it was asked for. A dgrad of groups, or one with dilation, is to
    XLA a forward convolution of dy: it pads dy where the padding is uneven, and with a stride in any case
    (xla/service/gpu/transforms: conv_rewriter.cc, conv_padding_legalization.cc).
    """
    if op not in ("conv", *OPS):
        return ""  # the alternative is mostly two calls, and no convolution of XLA's
    uneven = any(low != high for low, high in p.padding)
    if op in ("conv", "conv_fprop"):
        return "x" if uneven else ""
    if op == "conv_dgrad" and (p.groups > 1 or max(p.dilation) > 1):
        return "dy" if uneven and max(p.stride) == 1 else ""
    for size, out, f, step, d, (low, _) in zip(
        p.in_spatial, p.out_spatial, p.filter, p.stride, p.dilation, p.padding, strict=True
    ):
        least = (out - 1) * step + (f - 1) * d + 1 - size - low  # at the upper end, so that the last output is there
        if not least <= low < least + step:
            return "dx" if op == "conv_dgrad" else "x"
    return ""


def _log(value: float) -> float:
    return math.log2(value if value > 1e-9 else 1e-9)


def features(s: Shape, of: Numbers) -> dict[str, float]:
    """By name; a tree asks whether one of them is above a threshold. Extents and times are logarithms to base 2."""
    rank, taps, steps, c, k = len(s.filter), s.taps, s.steps, s.group_c, s.group_k
    channels, filters = s.in_channels, s.out_channels
    compute, memory = s.limits_ms(of)
    item = s.itemsize
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
        **_of_libraries(s, of, memory),
    }  # fmt: skip


def _of_libraries(s: Shape, of: Numbers, memory_ms: float) -> dict[str, float]:
    """What XLA does around a library's kernel: it copies an x whose two sides are padded unlike, and transposes for
    float32 and three dimensions, which cuDNN gets channels first. And what cuDNN's kernels round up to."""
    item, c, k, steps = s.itemsize, s.group_c, s.group_k, s.steps
    rate = getattr(of, s.arithmetic)
    out, in_pixels = s.out_spatial, s.batch * math.prod(s.in_spatial)
    x, y = in_pixels * s.in_channels * item, s.pixels * s.out_channels * item
    padded_pixels = s.batch * math.prod(i + low + high for i, (low, high) in zip(s.in_spatial, s.padding, strict=True))
    uneven = any(low != high for low, high in s.padding)
    first = s.dtype == "float32" or len(s.filter) == 3
    transposes = 2 * (x + y) / of.bandwidth if first else 0.0
    copies = (x + padded_pixels * s.in_channels * item) / of.bandwidth if uneven else 0.0
    whole = math.ceil(c / 32) * 32 * math.ceil(k / 32) * 32  # channels of a group, in whole tensor-core operations
    products = 2.0 * s.pixels * s.taps
    # Rows and columns of x that no output reads
    left = any(
        (o - 1) * step + (f - 1) * d + 1 < i + low + high
        for o, i, (low, high), f, d, step in zip(
            out, s.in_spatial, s.padding, s.filter, s.dilation, s.stride, strict=True
        )
    )
    reaches = [(f - 1) * d for f, d in zip(s.filter, s.dilation, strict=True)]
    return {
        "uneven padding": float(uneven),
        "padding": _log(max(sum(low + high for low, high in s.padding), 0) + 0.5),
        "no padding": float(all(low == high == 0 for low, high in s.padding)),
        "causal": float(any(high == 0 and low > 1 for low, high in s.padding)),
        "half padding": float(all(a == b == r // 2 for (a, b), r in zip(s.padding, reaches, strict=True))),
        "left over": float(left),
        "channels first": float(first),
        "bytes of x": _log(x * 1e-6 + 1e-3),
        "bytes of w": _log(s.taps * c * s.out_channels * item * 1e-6 + 1e-4),
        "padded over x": padded_pixels / in_pixels,
        "transposes": _log(transposes + OVERHEAD_MS),
        "copies": _log(copies + OVERHEAD_MS),
        "memory of all": _log(memory_ms + transposes + copies + OVERHEAD_MS),
        "compute of whole tiles": _log(products * whole * s.groups / rate + OVERHEAD_MS),
        "waste of whole tiles": _log(whole / (c * k)),
        "compute without tensor cores": float(s.arithmetic != "highest")
        * _log(products * c * s.out_channels / of.highest + OVERHEAD_MS),
        "row of y": _log(out[-1]),
        "row of y by 8": float(out[-1] % 8 == 0),
        "an odd row of x": float(s.in_spatial[-1] % 2),
        "compute as if not grouped": _log(products * s.in_channels * s.out_channels / rate + OVERHEAD_MS),
        "pixels of a wgrad": float(s.op == "conv_wgrad") * _log(s.pixels),
        "a dilated wgrad": float(s.op == "conv_wgrad" and max(s.dilation) > 1),
        "strides of a dgrad": float(s.op == "conv_dgrad") * _log(steps),
        "filters a channel": _log(k / c),
        "products of a pixel": _log(c * k),
        "channels of several groups": float(s.groups > 1) * _log(c),
        "y of an image": _log(s.pixels / s.batch * s.out_channels),
        "x of an image": _log(x / s.batch),
        "one image": float(s.batch == 1),
        "reach over the image": max(r / i for r, i in zip(reaches, s.in_spatial, strict=True)),
        "more elements than an int32 counts": float(max(x, y) / item > 2**31),
        **{f"channels of a group by {n}": float(c % n == 0) for n in (16, 32, 64)},
        **{f"filters of a group by {n}": float(k % n == 0) for n in (32, 64)},
        "at most 4 channels of a group": float(c <= 4),
        "at most 4 filters of a group": float(k <= 4),
    }


def _tiled(s: Shape, of: Numbers, limit: float, tile: str, splits: int) -> tuple[float, dict[str, float]]:
    """(base, features) of a kernel: a product with tiles has these rounded up, to whole tiles and whole waves; `limit`
    is the problem's."""
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
    bases, limit = np.zeros(len(plans)), max(s.limits_ms(of))
    for row, (kernel, tile, splits) in enumerate(plans):
        bases[row], tiled = _tiled(s, of, limit, tile, splits)
        own = [_log(bases[row] + OVERHEAD_MS), *tiled.values(), _log(splits), float(tile.startswith("256"))]
        ways[row, len(x) : len(x) + 7] = own
        ways[row, len(x) + 7 + kernels.index(kernel)] = 1.0
    return Seen(x, limit, ways, bases)


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


# ----------------------------------------------------------------------------------------------------------------------
# The process


def matern(squares: np.ndarray) -> np.ndarray:
    """How alike two points are, from the square of their scaled distance: Matern's covariance of 5/2."""
    d = np.sqrt(5 * squares)
    return (1 + d + d * d / 3) * np.exp(-d)


def squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The squares of the distances between rows."""
    return np.maximum((a * a).sum(1)[:, None] + (b * b).sum(1)[None] - 2 * a @ b.T, 0.0)


class _Points:
    """Known points, to which the distances of a few others are asked."""

    def __init__(self, x: np.ndarray):
        self._columns, self._squares = np.ascontiguousarray(x.T), (x * x).sum(1)

    def squares(self, x: np.ndarray) -> np.ndarray:
        """`squares` of x and the points. Not by BLAS: its threads cost more than they do of a few rows."""
        products = np.einsum("jk,ij->ik", self._columns, x)
        return np.maximum((x * x).sum(1)[:, None] + self._squares[None] - 2 * products, 0.0)


class Process:
    """The mean of a Gaussian process: known points' weights, by how alike a point is to each."""

    def __init__(self, data: dict[str, Any], x: np.ndarray, shared: int = 0):
        """`shared`: so many columns in front are the same in rows that are ways to compute one problem, in `x`, where
        such rows follow each other, and in all rows of what is asked: their part of the distances is computed once."""
        self.mean, self.low, self.high = (float(data[name]) for name in ("mean", "low", "high"))
        self.scale = np.array(data["scale"])
        self.weights = np.array(data["weights"])
        self.center = np.mean(x, 0, dtype=np.float64)  # for the rounding of `squares` alone
        self.shared = shared
        x = (x - self.center) * self.scale
        begins = np.ones(len(x), bool)
        begins[1:] = (x[1:, :shared] != x[:-1, :shared]).any(1)
        self.problem = np.cumsum(begins) - 1  # of each row, its place among the problems
        self.problems, self.ways = _Points(x[begins, :shared]), _Points(x[:, shared:])

    def __call__(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(the mean, no further than what is known goes; how alike the most alike known point is, 0 to 1)."""
        x, n = (x - self.center) * self.scale, self.shared
        apart = self.ways.squares(x[:, n:])
        if n:
            apart += self.problems.squares(x[:1, :n])[:, self.problem]
        alike = matern(apart)
        return np.clip(self.mean + alike @ self.weights, self.low, self.high), alike.max(1, initial=0.0)


# ----------------------------------------------------------------------------------------------------------------------
# The model


@dataclasses.dataclass(frozen=True)
class Prediction:
    ms: float
    deviation: float  # of log(XLA's ms over this): how far it is off, typically; of XLA itself 0


def stored(s: Shape) -> list[Any]:
    """A shape as model.json has it."""
    return [*dataclasses.astuple(s)]


def _shape(data: list[Any]) -> Shape:
    values = [tuple(v) if isinstance(v, list) else v for v in data[:-1]]
    return Shape(*values, tuple(map(tuple, data[-1])))


class Model:
    def __init__(self, data: dict[str, Any]):
        self.worth = float(data["worth"])
        self.kernels: list[str] = data["kernels"]
        self.known: dict[str, int] = data["known"]  # measurements, by "kernel class", a class one of Shape.classes
        x, ways = [], []
        for device, shape, kernels in data["problems"]:
            of = named(device)
            assert of is not None, device
            plans = [(self.kernels[k], tile, splits) for k, tile, splits in kernels]
            see = seen(_shape(shape), of, plans, self.kernels)
            x.append(see.x)
            ways.append(see.ways)
        self.xla_process = Process(data["xla_process"], np.array(x))
        self.native_process = Process(data["native_process"], np.concatenate(ways), len(x[0]))
        self.xla, self.error = Forest(data["xla"]), Forest(data["error"])

    def predict(
        self, s: Shape, of: Numbers, plans: Sequence[tuple[str, str, int]]
    ) -> tuple[Prediction, list[Prediction | None]]:
        """Of XLA, and of each of `plans` (kernel, tile, splits); None of a kernel that was hardly measured in one of
        the problem's classes."""
        able = [p for p in plans if measured_enough(self.known, p[0], s)]
        see = seen(s, of, able, self.kernels)
        forest = self.xla(see.x[None])
        process, alike = self.xla_process(see.x[None])
        xla = (forest + process) / 2
        xla_ms = (see.limit_ms + OVERHEAD_MS) * math.exp(xla[0])
        if not able:
            return Prediction(xla_ms, 0.0), [None] * len(plans)
        native, way_alike = self.native_process(see.ways)
        ms = (see.bases_ms + OVERHEAD_MS) * np.exp(native)
        x = with_gain(see.ways, np.log(xla_ms / ms), xla, native, forest - process, alike, way_alike)
        error = np.exp(self.error(x))
        predictions = {p: Prediction(float(t), float(e)) for p, t, e in zip(able, ms, error, strict=True)}
        return Prediction(xla_ms, 0.0), [predictions.get(p) for p in plans]


def measured_enough(known: dict[str, int], kernel: str, s: Shape) -> bool:
    """Whether a prediction of the kernel has enough to go by. fprop and dgrad count as one: a dgrad is a convolution of
    dy, with flipped filters."""
    arithmetic, op, grouping = s.classes
    alike = ("conv_wgrad",) if op == "conv_wgrad" else ("conv_fprop", "conv_dgrad")
    counts = [sum(known.get(f"{kernel} {name}", 0) for name in names) for names in ((arithmetic,), alike, (grouping,))]
    return min(counts) >= LEAST


def with_gain(ways: np.ndarray, gain: np.ndarray, *others: np.ndarray) -> np.ndarray:
    """What the error is predicted from: log(XLA's ms over the kernel's), both r, how far apart XLA's two are, how alike
    the most alike problem and way are, and all else."""
    return np.column_stack([ways, gain, *(np.broadcast_to(v, gain.shape) for v in others)]).astype(np.float32)


def worth(gain: Any, deviation: Any) -> Any:
    """The expected gain for each unit of probability of a loss: what to take first where losses have a budget.

    gain: log of XLA's predicted time over the kernel's. The odds of a loss are a logistic distribution's, about MARGIN.
    """
    beyond = gain - math.log(MARGIN)
    return beyond * (1 + np.exp(np.minimum(beyond / deviation, 50.0)))


@functools.cache
def model() -> Model | None:
    """What the package ships; None where it ships none."""
    return Model(json.loads(FILE.read_text())) if FILE.exists() else None


def sure(ratio: float, deviation: float) -> bool:
    """Whether a kernel is to be taken that is predicted to be `ratio` times faster than XLA, with this error."""
    found = model()
    return found is not None and ratio > MARGIN and worth(math.log(ratio), deviation) > found.worth


def predict(op: str, p: Any, device: Device, plans: list[Plan]) -> dict[str, Prediction]:
    """The times of XLA ("xla") and of plans (by `Plan.spec`), as far as known; of other ops than the model's, and
    for a device without numbers, none."""
    if op not in ("conv", *OPS):
        return {}
    found, of, shape = model(), numbers(device), Shape.of(op, p)
    if found is None or of is None:
        return {}
    keys = [(plan.kernel, plan.tile, plan.splits) for plan in plans]
    xla, native = found.predict(shape, of, keys)
    named = {"xla": xla, **dict(zip((plan.spec for plan in plans), native, strict=True))}
    return {name: prediction for name, prediction in named.items() if prediction is not None}

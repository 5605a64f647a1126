"""Measured times: jaxconv/tuning/<device>.json, written by `python -m benchmarks tune`, never by hand.

A table holds, for problems that were run, the time of XLA and of each native kernel. A problem that was not run is
answered by its nearest neighbour of the same kind, if one is near enough. Nothing is timed in a user's program.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import pathlib
import re
import warnings
from typing import Any

from jaxconv._problem import BatchNormProblem, ConvProblem, DenseProblem

FOLDER = pathlib.Path(__file__).parent.parent / "tuning"

# How far a neighbour may be: a factor of 2^REACH in each coordinate below; independent pieces of work (images, rows,
# channels that do not mix) count together, since a device that is full does not care which there are more of.
REACH = 1.6
# More of the same work on a full device changes little: 2^(REACH * MORE) times as much may be. Not less, a device that
# is not full is another matter. Before, ConvNeXt at batch 256 learned nothing from its layer measured at batch 64.
MORE = 4.0
# A native kernel is taken where it was faster than XLA by more than this. The spread between two runs is 2 %.
MARGIN = 1.04
# A dense layer's product also by this much, milliseconds: XLA fuses what lies beside a product of its own. 64 rows
# gained .001 in each gradient's product and lost .002 there and back.
LEAST_MS = 0.002


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One problem's times on one device."""

    op: str
    kind: tuple[Any, ...]  # must be equal for one problem to speak for another
    coordinates: tuple[float, ...]  # log2 of extents, as `features` says
    case: str  # its name in benchmarks/cases.py
    xla_ms: float  # of conv_statistics: a pair of convolution and batch-norm without it, the fastest known
    native_ms: dict[str, float]  # by kernel

    def ratio(self, kernel: str) -> float:
        """XLA's time over the kernel's."""
        return self.xla_ms / self.native_ms[kernel]

    def wins(self, kernel: str) -> bool:
        """Whether the kernel is worth taking instead of XLA."""
        least = LEAST_MS if self.op == "dense" else 0.0
        return self.ratio(kernel) > MARGIN and self.xla_ms - self.native_ms[kernel] >= least


def slug(device_kind: str) -> str:
    """The table's file name: "NVIDIA H200" -> "nvidia_h200"."""
    return re.sub(r"[^a-z0-9]+", "_", device_kind.lower()).strip("_")


def features(op: str, problem: Any) -> tuple[str, tuple[Any, ...], tuple[float, ...]]:
    """(op as measured, kind, coordinates) of a problem: what decides whether two problems run alike.

    Coordinates: conv (pixels of y, C / groups, K / groups, groups); dense (instances, M, K, N); batch-norm (elements of
    a channel, channels).
    """
    if isinstance(problem, ConvProblem):
        return _conv_features(op, problem)
    if isinstance(problem, DenseProblem):
        aligned = problem.k % 8 == 0 and problem.n % 8 == 0
        fused = problem.bias is not None or problem.addend or problem.activation.name != "none"
        name = problem.activation.name  # gelu may win where relu, or a tanh that costs more, does not
        epilogue = "bare" if not fused else "cheap" if name in ("none", "relu", "relu6", "leaky_relu") else name
        kind = (
            problem.dtype,
            problem.dtype == "float32" and problem.full_float32,
            problem.trans_x,
            problem.trans_w,
            epilogue,
            aligned,
        )
        return "dense", kind, _log2(problem.batch or 1, problem.m, problem.k, problem.n)
    p: BatchNormProblem = problem
    vector = 8 if p.dtype != "float32" else 4
    fast_axis = p.channels if p.inner == 1 else p.inner
    if op != "batchnorm_infer" and (p.activation.name != "none" or p.residual):
        # Measured there and back, chosen there and back: a native forward that won by 4 % alone lost 15 % beside an XLA
        # backward, which then read what XLA would have fused.
        op = "batchnorm_residual" if p.residual else "batchnorm_fused"
    return op, (p.dtype, p.inner == 1, fast_axis % vector == 0), _log2(p.reduced, (p.batch or 1) * p.channels)


def _conv_features(op: str, p: ConvProblem) -> tuple[str, tuple[Any, ...], tuple[float, ...]]:
    group_c, group_k = p.in_channels // p.groups, p.out_channels // p.groups
    grouping = "none" if p.groups == 1 else "depthwise" if p.depthwise else "grouped"
    kind = (
        p.dtype,
        p.dtype == "float32" and p.full_float32,
        True,  # channels last in memory, whatever the arrays' order: XLA's convolutions and the kernels that win
        grouping,
        p.filter,
        p.stride,
        p.dilation,
        (p.in_channels if grouping == "depthwise" else group_c) % 8 == 0,
        (p.out_channels if grouping == "depthwise" else group_k) % 8 == 0,
    )
    pixels = p.batch * math.prod(p.out_spatial)
    return "conv_fprop" if op == "conv" else op, kind, _log2(pixels, group_c, group_k, p.groups)


def _log2(*extents: int) -> tuple[float, ...]:
    return tuple(math.log2(max(extent, 1)) for extent in extents)


_learned: dict[str, tuple[Measurement, ...]] = {}


def table(device_kind: str) -> tuple[Measurement, ...]:
    """The measurements for a device; none where nobody has run it."""
    return _learned.get(device_kind) or _recorded(device_kind)


def learn(device_kind: str, entries: list[dict[str, Any]]) -> None:
    """In this process, `entries` (as the file holds them) take the place of older ones for the same problems."""
    new = tuple(map(_measurement, entries))
    same = {(m.op, m.kind, m.coordinates) for m in new}
    kept = tuple(m for m in table(device_kind) if (m.op, m.kind, m.coordinates) not in same)
    _learned[device_kind] = kept + new


@functools.cache
def _recorded(device_kind: str) -> tuple[Measurement, ...]:
    path = FOLDER / f"{slug(device_kind)}.json"
    if not device_kind or not path.exists():
        return ()
    try:
        return tuple(map(_measurement, json.loads(path.read_text())["measurements"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"{type(error).__name__}: {error}"
        warnings.warn(f"jaxconv: {path} is broken and is ignored, reinstall jaxconv: {what}", stacklevel=2)
        return ()


def numbers(version: str) -> tuple[int, ...]:
    """A version's numbers, which can be compared: "0.11.2" -> (0, 11, 2)."""
    return tuple(map(int, re.findall(r"\d+", version)))


@functools.cache
def measured_with(device_kind: str) -> dict[str, str]:
    """The versions ("jaxlib", "driver") that a device's table was measured with; empty where there is none."""
    path = FOLDER / f"{slug(device_kind)}.json"
    if not table(device_kind) or not path.exists():  # a broken one is said by `table`
        return {}
    return json.loads(path.read_text()).get("versions", {})


def _measurement(entry: dict[str, Any]) -> Measurement:
    return Measurement(
        entry["op"],
        tuples(entry["kind"]),
        tuple(entry["coordinates"]),
        entry["case"],
        entry["xla_ms"],
        entry["native_ms"],
    )


def tuples(value: Any) -> Any:
    return tuple(map(tuples, value)) if isinstance(value, list) else value


def nearest(op: str, problem: Any, device_kind: str, kernel: str) -> Measurement | None:
    """The measurement that speaks for the kernel running `problem`: one of that kernel, or None."""
    measured_op, kind, coordinates = features(op, problem)
    ops = [measured_op, "batchnorm_fused"] if measured_op == "batchnorm_residual" else [measured_op]
    # Of 151 problems that were run in both (H200), bfloat16's choice lost to XLA in float16 for none.
    kinds = [kind, ("bfloat16", *kind[1:])] if kind[0] == "float16" else [kind]
    for of_op, of_kind in itertools.product(ops, kinds):
        found = _nearest(of_op, of_kind, coordinates, _INDEPENDENT[type(problem)], device_kind, kernel)
        if found is not None:
            return found
    return None


def _nearest(
    op: str,
    kind: tuple[Any, ...],
    coordinates: tuple[float, ...],
    independent: tuple[bool, ...],
    device_kind: str,
    kernel: str,
) -> Measurement | None:
    best, least = None, math.inf
    for m in table(device_kind):
        if m.op != op or m.kind != kind or len(m.coordinates) != len(coordinates) or kernel not in m.native_ms:
            continue
        more = [b - a for a, b in zip(m.coordinates, coordinates, strict=True)]
        work = sum(d for d, free in zip(more, independent, strict=True) if free)
        gaps = [abs(d) for d, free in zip(more, independent, strict=True) if not free]
        distance = sum(map(abs, more))
        if max([work / MORE if work > 0 else -work, *gaps]) <= REACH and distance < least:
            best, least = m, distance
    return best


# Which coordinates count independent pieces of work
_INDEPENDENT = {
    ConvProblem: (True, False, False, True),
    DenseProblem: (True, True, False, False),
    BatchNormProblem: (True, True),
}

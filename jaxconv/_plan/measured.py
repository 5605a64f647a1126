"""Measured times: jaxconv/tuning/<device>.json, written by `python -m benchmarks tune`, never by hand.

A table holds, for problems that were run, the time of XLA and of each native kernel. A problem that was not run is
answered by its nearest neighbour of the same kind, if one is near enough; where a device's own table has none, or one
that is farther away, by the tables of its sisters, devices of the same architecture with about the same numbers, whose
times are scaled. Where XLA copies an array because its padding is uneven and did not at the neighbour, or the other way
round, XLA's time there is corrected by that pass. Nothing is timed in a user's program unasked.
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

from jaxconv._plan import model
from jaxconv._plan.plan import Device
from jaxconv._plan.planner import PLANNERS, Features

FOLDER = pathlib.Path(__file__).parent.parent / "tuning"

# How far a neighbour may be: a factor of 2^REACH in each coordinate below; independent pieces of work (images, rows,
# channels that do not mix) count together, since a device that is full does not care which there are more of.
REACH = 1.6
# More of the same work on a full device changes little: 2^(REACH * MORE) times as much may be. Not less, a device that
# is not full is another matter. Before, ConvNeXt at batch 256 learned nothing from its layer measured at batch 64.
MORE = 4.0
# ... where the device was full. A problem that XLA or the kernel took less time for, milliseconds, is bound by launches
# and latencies: sm90/cluster, made for few pixels, is 1.17 times as fast as XLA for one image of 14x14 (0.011 ms), and
# for one of 7x7 with 512 channels twice as fast (0.011; XLA 0.022). For 256 images of 8x8 it takes 3.2 times as long as
# XLA (H100, float32).
FULL_MS = 0.02
# A neighbour that differs by more than this in channels speaks together with the model, where that knows the kernel. Of
# drawn problems that neighbours alone chose a kernel for, 9 of 34 with such ones were slower than XLA, by 6 to 103 %
# (H200), of 32 with nearer ones none was by more than 3 %.
FAR = 0.5
# A native kernel is taken where it was faster than XLA by more than this. The spread between two runs is 2 %.
MARGIN = 1.04
# ... where both were scaled from a sister's times.
SISTER_MARGIN = 1.10
# A sister's rates of matrix products and of memory are apart by no more than this: between an H200 and an H100 memory
# is, 1.43 times.
SISTER = 1.5
# A sister's measurement counts as this much farther away than the device's own: scaled times are off by some 10 %.
FARTHER = 0.5
# A dense layer's product also by this much, milliseconds: XLA fuses what lies beside a product of its own. 64 rows
# gained 0.001 in each gradient's product and lost 0.002 forward and backward.
LEAST_MS = 0.002
# A convolution by this much: of one image, two measurements of XLA's own kernel, of 4 to 7 us, were up to 0.001 apart.
LEAST_CONV_MS = 0.001
# XLA's copy of an array whose padding is uneven takes 1.0 to 1.3 times as long as a large copy of as many bytes (H200;
# 256x56x56 of 128 channels in bfloat16: 418 MB, 0.128 ms). The least is added to XLA's time, or the most is taken off,
# so that an error favours XLA.
PASS_TAKEN_OFF = 1.3
# A measurement in which XLA did not copy alike counts as this much farther away: both may be of the same extents.
UNLIKE = 0.1


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One problem's times on one device."""

    op: str
    kind: tuple[Any, ...]  # must be equal for one problem to speak for another
    coordinates: tuple[float, ...]  # log2 of extents, as `features` says
    case: str  # its name in benchmarks/ops/
    # Of conv_statistics: a convolution and a batch-norm, two calls. Of conv_normalised: a batch-norm and a convolution,
    # two calls. Of the rest: XLA. The fastest that is known
    xla_ms: float
    native_ms: dict[str, float]  # by kernel
    copied: str = ""  # the array that XLA copied in its time: `model.copied`
    sister: str = ""  # the device that was measured, where times are scaled from it: "NVIDIA H200"
    # As it speaks for a problem: how much of `xla_ms` is XLA's copy, and how that was corrected, if it was
    copy_ms: float = 0.0
    corrected: str = ""
    # ... and how far a convolution's channels are from those that were measured, in powers of two; 0 of other ops
    apart: float = 0.0

    def ratio(self, kernel: str) -> float:
        """XLA's time over the kernel's."""
        return self.xla_ms / self.native_ms[kernel]

    def wins(self, kernel: str) -> bool:
        """Whether the kernel is worth taking instead of XLA."""
        least = LEAST_MS if self.op.startswith("dense") else LEAST_CONV_MS if self.op.startswith("conv_") else 0.0
        return self.ratio(kernel) > self.margin and self.xla_ms - self.native_ms[kernel] >= least

    @property
    def margin(self) -> float:
        """How much faster than XLA a kernel must be."""
        return SISTER_MARGIN if self.sister else MARGIN

    @property
    def against_two(self) -> bool:
        """Whether `xla_ms` is that of two calls, each by its plan, where these are faster than XLA."""
        return self.op in ("conv_statistics", "conv_normalised", "batchnorm_shortcut")

    @property
    def where(self) -> str:
        """As an end of a sentence: "at r50.s1.3x3, the nearest case measured"; what was done to XLA's time included."""
        return self.of_kernels + (f", {self.corrected}" if self.corrected else "")

    @property
    def of_kernels(self) -> str:
        """The same of native times, which no padding changes."""
        if self.sister:
            return f"at {self.case}, the nearest case measured on its sister {self.sister}, scaled"
        return f"at {self.case}, the nearest case measured"


def slug(device_kind: str) -> str:
    """The table's file name: "NVIDIA H200" -> "nvidia_h200"."""
    return re.sub(r"[^a-z0-9]+", "_", device_kind.lower()).strip("_")


@functools.lru_cache(maxsize=4096)
def features(op: str, problem: Any) -> Features:
    """(op as measured, kind, coordinates) of a problem: what decides whether two problems run alike."""
    return PLANNERS[op].features(problem)


def _copy_ms(m: Measurement, array: str, of: model.Numbers) -> float:
    """Of XLA's copy of "x", "dx" or "dy" of the problem that was measured: it reads and writes all of it."""
    pixels, group_c, group_k, groups = m.coordinates
    extents = pixels + groups + (group_k if array == "dy" else group_c)
    steps = 1 if array == "dy" else math.prod(m.kind[5])
    return 2 * (4 if m.kind[0] == "float32" else 2) * 2.0**extents * steps / of.bandwidth


def _as_padded(m: Measurement, op: str, problem: Any, device: Device) -> Measurement:
    """The measurement as if it had been padded like the problem: a native kernel's time hardly depends on it."""
    wanted, rates = model.copied(op, problem), model.numbers(device)
    if rates is None or not (wanted or m.copied):
        return m
    copy = _copy_ms(m, wanted or m.copied, rates)
    if wanted == m.copied:
        return dataclasses.replace(m, copy_ms=min(copy, m.xla_ms))
    if wanted:
        corrected = f"with XLA's padding of {wanted} added" if wanted != "dx" else "with XLA's slicing of dx added"
        return dataclasses.replace(m, xla_ms=m.xla_ms + copy, copy_ms=copy, corrected=corrected)
    what = f"padding of {m.copied}" if m.copied != "dx" else "slicing of dx"
    corrected = f"with XLA's {what} taken off"
    least = min(_least_ms(m, rates), m.xla_ms)
    return dataclasses.replace(m, xla_ms=max(m.xla_ms - PASS_TAKEN_OFF * copy, least), corrected=corrected)


_learned: dict[str, tuple[Measurement, ...]] = {}


def table(device_kind: str) -> tuple[Measurement, ...]:
    """The measurements for a device; none where nobody has run it."""
    return _learned.get(device_kind) or _recorded(device_kind)


def learn(device_kind: str, entries: list[dict[str, Any]]) -> None:
    """In this process, `entries` (as the file holds them) take the place of older ones for the same problems."""
    new = tuple(map(_measurement, entries))
    same = {(m.op, m.kind, m.coordinates, m.copied) for m in new}
    kept = tuple(m for m in table(device_kind) if (m.op, m.kind, m.coordinates, m.copied) not in same)
    _learned[device_kind] = kept + new


# By device: a table, and its rows by (op, kernel, kind). Without it, each kernel's neighbour was looked for in the
# whole table.
_by_kind: dict[str, tuple[tuple[Measurement, ...], dict[tuple[Any, ...], list[Measurement]]]] = {}


def _rows(device_kind: str, op: str, kernel: str, kind: tuple[Any, ...]) -> list[Measurement]:
    """The table's rows of that op and kind in which the kernel was run, in its order."""
    rows = table(device_kind)
    known, by_kind = _by_kind.get(device_kind, (None, {}))
    if known is not rows:  # `learn` made another table
        by_kind = {}
        for m in rows:
            for own in m.native_ms:
                by_kind.setdefault((m.op, own, m.kind), []).append(m)
        _by_kind[device_kind] = rows, by_kind
    return by_kind.get((op, kernel, kind), [])


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
        entry.get("copied", ""),
    )


def tuples(value: Any) -> Any:
    return tuple(map(tuples, value)) if isinstance(value, list) else value


def nearest(op: str, problem: Any, device: Device, kernel: str) -> Measurement | None:
    """The measurement that speaks for the kernel running `problem`: one of that kernel, on the device or, scaled, on
    that of its sisters where one much nearer was made, XLA's time as with the problem's padding; or None."""
    found, distance = _nearest_of_kinds(op, problem, device.kind, kernel)
    for sister in sisters(device) if distance > FARTHER else ():  # else none is nearer
        other, there = _nearest_of_kinds(op, problem, sister, kernel)
        if other is None or there + FARTHER >= distance:
            continue
        # Scaled, and corrected for a copy: that made 1.26 of 0.97 (H200, an even 3x3 of stride 2, 512 channels in 32
        # groups). One of the device's own that needs no correction is nearer.
        if found is not None and found.copied == model.copied(op, problem) != other.copied:
            continue
        found, distance = _scaled(other, sister, device), there + FARTHER
    if found is None:
        return None
    apart = _apart(found, op, problem)
    padded = _as_padded(found, op, problem, device)
    return padded if apart == padded.apart else dataclasses.replace(padded, apart=apart)


def work(m: Measurement, op: str, problem: Any) -> float:
    """How many times m's work the problem has."""
    _, _, coordinates = features(op, problem)
    return 2.0 ** sum(b - a for a, b in zip(m.coordinates, coordinates, strict=True))


def _apart(m: Measurement, op: str, problem: Any) -> float:
    channels = PLANNERS[op].channels
    _, _, coordinates = features(op, problem)
    pairs = zip(m.coordinates[channels], coordinates[channels], strict=True)
    return max((abs(a - b) for a, b in pairs), default=0.0)


def _nearest_of_kinds(op: str, problem: Any, device_kind: str, kernel: str) -> tuple[Measurement | None, float]:
    """(the nearest on a device, its distance)"""
    measured_op, kind, coordinates = features(op, problem)
    ops = [measured_op, "batchnorm_fused"] if measured_op == "batchnorm_residual" else [measured_op]
    # Of 151 problems that were run in both (H200), bfloat16's choice lost to XLA in float16 for none.
    kinds = [kind, ("bfloat16", *kind[1:])] if kind[0] == "float16" else [kind]
    array = model.copied(op, problem)
    for of_op, of_kind in itertools.product(ops, kinds):
        found = _nearest(of_op, of_kind, coordinates, array, PLANNERS[op].independent, device_kind, kernel)
        if found[0] is not None:
            return found
    return None, math.inf


def _nearest(
    op: str,
    kind: tuple[Any, ...],
    coordinates: tuple[float, ...],
    array: str,
    independent: tuple[bool, ...],
    device_kind: str,
    kernel: str,
) -> tuple[Measurement | None, float]:
    best, least = None, math.inf
    for m in _rows(device_kind, op, kernel, kind):
        if len(m.coordinates) != len(coordinates):
            continue
        work = gap = distance = 0.0
        for a, b, free in zip(m.coordinates, coordinates, independent, strict=True):
            more = b - a
            distance += abs(more)
            if free:
                work += more
            elif abs(more) > gap:
                gap = abs(more)
        distance += UNLIKE * (m.copied != array)
        more_of_it = MORE if min(m.xla_ms, m.native_ms[kernel]) >= FULL_MS else 1.0
        if max(work / more_of_it if work > 0 else -work, gap) <= REACH and distance < least:
            best, least = m, distance
    return best, least


# ----------------------------------------------------------------------------------------------------------------------
# Sisters


@functools.cache
def tables() -> tuple[str, ...]:
    """The devices that have a table."""
    found = []
    for path in sorted(FOLDER.glob("*.json")):
        try:
            device = json.loads(path.read_text()).get("device")
        except (OSError, ValueError, AttributeError):
            continue  # `_recorded` says so of the running device's; another's is not needed
        if isinstance(device, str) and slug(device) == path.stem:
            found.append(device)
    return tuple(found)


def sisters(device: Device) -> list[str]:
    """Devices with a table whose times can be scaled to this one: of its architecture, and about as fast; those that
    are nearest first. Only what is known by name has any."""
    return _sisters(device.kind, tables()) if device.compute_capability == (9, 0) else []


@functools.lru_cache(maxsize=256)
def _sisters(device_kind: str, measured: tuple[str, ...]) -> list[str]:
    """Of those that were measured."""
    own = model.named(device_kind)
    if own is None:
        return []
    found = []
    for kind in measured:
        other = model.named(kind)  # all of these are of compute capability 9.0
        if other is None or kind == device_kind:
            continue
        apart = max(max(a / b, b / a) for a, b in zip(other.rates, own.rates, strict=True))
        if apart <= SISTER:
            found.append((apart, kind))
    return [kind for _, kind in sorted(found)]


def _scaled(m: Measurement, sister: str, device: Device) -> Measurement:
    """What was measured on a sister, as the device would take.

    The part of a time that the limit explains (operations over their rate or bytes over the bandwidth, whichever is
    more) is scaled as the limit is; the rest, instructions and waiting, as the rate of matrix products. So a time far
    from the limit grows less than one at it, although it may be so long because it moves more bytes: an error in favour
    of XLA, whose time is the longer one where native code is taken.
    """
    there, here = model.named(sister), model.named(device.kind)
    assert there is not None and here is not None
    rest = there.half / here.half

    def scaled(ms: float) -> float:
        # Nothing but memory, over which XLA passes more often.
        if m.op.startswith(("batchnorm", "groupnorm", "layernorm", "max_pool", "avg_pool", "squeeze")):
            return ms * there.bandwidth / here.bandwidth
        before, after = (_least_ms(m, of) for of in (there, here))
        share = min(1.0, before / ms)
        return ms * (share * after / before + (1 - share) * rest)

    native = {kernel: scaled(ms) for kernel, ms in m.native_ms.items()}
    return dataclasses.replace(m, xla_ms=scaled(m.xla_ms), native_ms=native, sister=sister)


def _least_ms(m: Measurement, of: model.Numbers) -> float:
    """max(flops / rate, bytes / bandwidth) of a convolution or product that was measured."""
    dtype, full = m.kind[0], m.kind[1] is True
    item = 4 if dtype == "float32" else 2
    rate = of.half if dtype != "float32" else of.highest if full else of.tf32
    extents = [2.0**v for v in m.coordinates]
    if m.op.startswith("dense"):
        instances, rows, summed, columns = extents
        flops = 2 * instances * rows * summed * columns
        # Arrays of rows * columns elements: with z; a half, and z where it is written; z and dz of two halves each.
        arrays = {"dense_gradient": 2, "dense_gated": 0.5 + bool(m.kind[-1]), "dense_gated_gradient": 4}.get(m.op, 1)
        moved = item * instances * (rows * summed + summed * columns + rows * columns * arrays)
    else:
        pixels, c, k, groups = extents
        taps, steps = math.prod(m.kind[4]), math.prod(m.kind[5])
        flops = 2 * pixels * c * k * groups * taps
        moved = item * groups * (pixels * c * min(taps, steps) + pixels * k + taps * c * k)
    return max(flops / rate, moved / of.bandwidth)

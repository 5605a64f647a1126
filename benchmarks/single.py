"""One answer at a time: what a call that is waited for takes, by the way in which it is called.

    ms a call = its kernels + an empty program (JAX's dispatch, one launch, the wait) + the rest

Each way (CALLS) calls the same frozen model. They take turns, so that a drifting clock meets all alike. In each turn
they run twice: as Python runs them, and quiet, that is without garbage collection and with the calling thread on one
core. Where the p99 of quiet calls is shorter, the difference is the host's jitter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxconv

# What each way is, in a table. x is on the device, where nothing else is said.
CALLS = {
    "call": "`predict(x)`",
    "jit": "`jax.jit(predict)(x)`",
    "jit_graphs": "`jax.jit(predict)(x)`, `graph_options`",
    "compiled": "compiled, without `graph_options`",
    "compiled_graphs": "compiled",
    "kept": "compiled, the last answer kept until the next is there",
    "donated": "compiled, x donated",
    "replaced": "compiled, the last answer donated",
    "polled": "compiled, `is_ready()` asked again and again",
    "host": "compiled, from NumPy to NumPy",
    "pinned": "compiled, from NumPy to NumPy, pinned",
    "pinned_ready": "compiled, from pinned memory to NumPy",
    "empty": "an empty program: one addition",
}
SPLIT = "compiled_graphs"  # whose median is split
COMPILED = "Compiled: ahead of time, with `graph_options`."
PINNED = "Pinned: the program copies x from pinned memory, and leaves its answer there."
QUIET = "Quiet: without Python's garbage collection, the calling thread on one core."
TURNS = 10
MOST_SECONDS = 4.0  # of calls of a way, about: a slow model gets fewer
LEAST_CALLS = 9

Table = tuple[list[str], list[list[str]]]  # a head and rows


@dataclasses.dataclass(frozen=True)
class Call:
    """A way to call. What is timed is `wait(start(x))`, of an x that `x()` has ready."""

    x: Callable[[], Any]
    start: Callable[[Any], Any]
    wait: Callable[[Any], Any] = jax.block_until_ready


# ----------------------------------------------------------------------------------------------------------------------
# The ways


def ways(
    predict: Callable[[Any], jax.Array],
    image: np.ndarray,  # (1, H, W, C)
    options: Mapping[str, Any],  # XLA's
) -> tuple[dict[str, Call], dict[str, str]]:
    """The ways that this backend has, and a remark on others, and on a donation that is not taken."""
    graphs = {**jaxconv.graph_options(), **options}
    x = jax.device_put(image)
    remarks: dict[str, str] = {}

    def compiled(compiler_options: Mapping[str, Any], **more: Any) -> Any:
        return jax.jit(predict, compiler_options=dict(compiler_options), **more).lower(x).compile()

    def here() -> Any:
        return x

    captured = compiled(graphs)
    found = {
        "call": Call(here, predict),
        "jit": Call(here, jax.jit(predict, compiler_options=dict(options))),
        "jit_graphs": Call(here, jax.jit(predict, compiler_options=graphs)),
        "compiled": Call(here, compiled(options)),
        SPLIT: Call(here, captured),
        "kept": _kept(captured, x),
    }
    if options:
        del found["call"]
        remarks["call"] = "its compiler options are its own"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        donated = compiled(graphs, donate_argnums=0)
    found["donated"] = Call(lambda: jax.block_until_ready(jax.device_put(image)), donated)
    given = found["donated"].x()
    jax.block_until_ready(donated(given))
    if not given.is_deleted():
        remarks["donated"] = "no result has x's shape and type, so JAX does not use the donation"
    last = captured(x)
    found["replaced"] = _replaced(predict, x, last, graphs)
    jax.block_until_ready(found["replaced"].start(x))
    if not last.is_deleted():
        remarks["replaced"] = "JAX does not use the donation"
    found["polled"] = Call(here, captured, _polled)
    found["host"] = Call(lambda: image, captured, np.asarray)
    try:
        found |= _pinned(predict, image, graphs)
    except Exception as error:  # a compiler that cannot place an argument raises whatever it likes
        said = str(error) if isinstance(error, _NoSuchMemory) else f"{type(error).__name__}: {error}"
        remarks["pinned"] = said.splitlines()[0]
    one = jnp.zeros(())
    found["empty"] = Call(lambda: one, jax.jit(lambda v: v + 1).lower(one).compile())
    return found, remarks


def _kept(program: Callable[[jax.Array], jax.Array], x: jax.Array) -> Call:
    """Each answer lies elsewhere than the one before it, which is alive until then: XLA updates the CUDA graph."""
    last = [program(x)]

    def start(x: jax.Array) -> jax.Array:
        last[0] = program(x)
        return last[0]

    return Call(lambda: x, start)


def _replaced(predict: Callable[[Any], jax.Array], x: jax.Array, y: jax.Array, options: Mapping[str, Any]) -> Call:
    """Each answer takes the place of the one before it, as where that one is deleted before the call. XLA updates a
    CUDA graph when an address in it is another one."""
    into = jax.jit(lambda x, last: predict(x), donate_argnums=1, keep_unused=True, compiler_options=dict(options))
    program, last = into.lower(x, y).compile(), [y]

    def start(x: jax.Array) -> jax.Array:
        last[0] = program(x, last[0])
        return last[0]

    return Call(lambda: x, start)


def _polled(y: jax.Array) -> None:
    while not y.is_ready():
        pass


class _NoSuchMemory(Exception):
    pass


def _pinned(predict: Callable[[Any], jax.Array], image: np.ndarray, options: Mapping[str, Any]) -> dict[str, Call]:
    """The program itself copies x to the device, and the answer back."""
    (device,) = jax.device_put(image).devices()
    kinds = [memory.kind for memory in device.addressable_memories()]
    if "pinned_host" not in kinds:
        raise _NoSuchMemory(f"the device has no memory of the kind pinned_host, only {', '.join(kinds)}")
    pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")

    def program(x: jax.Array) -> jax.Array:
        return jax.device_put(predict(jax.device_put(x, jax.memory.Space.Device)), jax.memory.Space.Host)

    jitted = jax.jit(program, in_shardings=pinned, out_shardings=pinned, compiler_options=dict(options))
    ready = jax.device_put(image, pinned)
    compiled = jitted.lower(ready).compile()
    jax.block_until_ready(compiled(ready))
    return {
        # A program that is compiled ahead of time takes an array in its own memory only.
        "pinned": Call(lambda: image, lambda x: compiled(jax.device_put(x, pinned)), np.asarray),
        "pinned_ready": Call(lambda: ready, compiled, np.asarray),
    }


# ----------------------------------------------------------------------------------------------------------------------
# Measurements


@contextlib.contextmanager
def quiet() -> Iterator[int | None]:
    """No garbage collection, and this thread on one core, which is given; None where the system does not allow it."""
    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_setaffinity") else set()
    core = max(cores, default=None)
    try:
        if core is not None:
            try:
                os.sched_setaffinity(0, {core})
            except OSError:
                core = None
        yield core
    finally:
        if core is not None:
            os.sched_setaffinity(0, cores)
        if collects:
            gc.enable()


@dataclasses.dataclass
class Samples:
    """Milliseconds of each call, and those until it returned, before it was waited for."""

    ms: list[float] = dataclasses.field(default_factory=list)
    returns_ms: list[float] = dataclasses.field(default_factory=list)

    def add(self, call: Call, calls: int) -> None:
        x, start, wait, clock = call.x, call.start, call.wait, time.perf_counter
        for _ in range(calls):
            given = x()
            begin = clock()
            y = start(given)
            returned = clock()
            wait(y)
            end = clock()
            del y, given
            self.ms.append((end - begin) * 1e3)
            self.returns_ms.append((returned - begin) * 1e3)

    def summary(self) -> dict[str, Any]:
        p90, p99 = (float(q) for q in np.quantile(self.ms, (0.9, 0.99)))
        median, returns = statistics.median(self.ms), statistics.median(self.returns_ms)
        return {"ms": median, "p90_ms": p90, "p99_ms": p99, "max_ms": max(self.ms), "returns_ms": returns}


def measured(
    predict: Callable[[Any], jax.Array], image: np.ndarray, options: Mapping[str, Any], calls: int
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What a record holds of the ways, `calls` or fewer of each, and the answer of each."""
    found, remarks = ways(predict, image, options)
    answers = {name: np.asarray(call.start(call.x()), np.float64) for name, call in found.items() if name != "empty"}
    first = Samples()
    first.add(found[SPLIT], 3)
    calls = min(calls, max(LEAST_CALLS, int(MOST_SECONDS * 1e3 / min(first.ms))))
    turns = min(TURNS, calls)
    loud, still = {name: Samples() for name in found}, {name: Samples() for name in found}
    for i in range(turns):
        share = calls * (i + 1) // turns - calls * i // turns
        _turn(found, loud, share)
        with quiet() as core:
            _turn(found, still, share)
    called = [
        {"call": name, "calls": len(loud[name].ms), **loud[name].summary(), "quiet": still[name].summary()}
        for name in found
    ]
    return {"called": called, "core": core, "remarks": remarks}, answers


def _turn(found: Mapping[str, Call], samples: Mapping[str, Samples], calls: int) -> None:
    for name, call in found.items():
        Samples().add(call, 3)
        samples[name].add(call, calls)


# ----------------------------------------------------------------------------------------------------------------------
# Tables


def is_single(row: Mapping[str, Any]) -> bool:
    """Whether a row of `benchmarks infer` is such a measurement: most are of a way."""
    return "called" in row


def row_name(way: str) -> str:
    """The `way` of a row: a way's own row is another, and a newer one of it replaces no measurement of this kind."""
    return f"{way}: one at a time"


def way_of(row: Mapping[str, Any]) -> str:
    return row["way"].partition(":")[0]


def table(row: Mapping[str, Any]) -> Table:
    """A row for each way to call, in milliseconds."""
    times = ("ms", "p90_ms", "p99_ms", "max_ms")
    rows = [
        [CALLS[one["call"]]]
        + [f"{one[name]:.3f}" for name in (*times, "returns_ms")]
        + [f"{one['quiet'][name]:.3f}" for name in times]
        for one in row["called"]
    ]
    head = ["how it is called", "ms a call", "p90", "p99", "longest", "ms until it returns"]
    return [*head, "quiet: ms a call", "p90", "p99", "longest"], rows


def split(row: Mapping[str, Any]) -> Table:
    """Where the median goes, as it is and quiet."""
    of = {one["call"]: one for one in row["called"]}
    rows = []
    for name, whole, empty in (
        (CALLS[SPLIT], of[SPLIT], of["empty"]),
        (f"{CALLS[SPLIT]}, quiet", of[SPLIT]["quiet"], of["empty"]["quiet"]),
    ):
        kernels = row["kernels_ms"]
        rest = None if kernels is None else whole["ms"] - kernels - empty["ms"]
        times = (whole["ms"], whole["returns_ms"], kernels, empty["ms"], rest)
        rows.append([name, *("" if ms is None else f"{ms:.3f}" for ms in times)])
    return ["where it goes", "ms a call", "until it returns", "its kernels", "an empty program", "the rest"], rows


def sentences(row: Mapping[str, Any]) -> list[str]:
    of = {one["call"] for one in row["called"]}
    said = [COMPILED, *([PINNED] if "pinned" in of else []), QUIET]
    for name, why in row["remarks"].items():
        said.append(f"{CALLS[name][0].upper()}{CALLS[name][1:]}{'' if name in of else ' is left out'}: {why}.")
    return said


def text(table: Table) -> str:
    """A table in columns, for a terminal."""
    head, rows = table
    lines = [[cell.replace("`", "") for cell in cells] for cells in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([cells[0].ljust(widths[0]), *map(str.rjust, cells[1:], widths[1:])]).rstrip() for cells in lines
    )

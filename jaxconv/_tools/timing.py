"""Time per call on the device.

On an NVIDIA GPU it is the sum of a call's kernel durations as CUPTI reports them (through the profiler that ships with
JAX), so launch gaps and the host do not count. Elsewhere, or where CUPTI is missing, it is wall clock.

What CUPTI's kernel records leave out: copies and memsets that run as such. The wall clock of the same queued calls is
therefore taken too, and a measurement that it contradicts carries a remark.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

L2_BYTES = {"NVIDIA H200": 60e6, "NVIDIA H100": 50e6, "NVIDIA A100": 40e6}
DEFAULT_L2_BYTES = 128e6  # no smaller than any GPU's so far
CPU_CACHE_BYTES = 32e6
CACHES = 4  # inputs and outputs of all sets together are this many times the cache
MOST_SETS = 64


@dataclasses.dataclass(frozen=True)
class Timing:
    samples_ms: tuple[float, ...]
    timer: str  # "cupti" or "wall"
    wall_ms: float  # per call, calls queued back to back
    remark: str = ""

    @property
    def median_ms(self) -> float:
        return statistics.median(self.samples_ms)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, relative to the median."""
        if len(self.samples_ms) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples_ms, n=4, method="inclusive")
        return (high - low) / 2 / self.median_ms if self.median_ms else 0.0


def cache_bytes(device: jax.Device) -> float:
    if device.platform == "cpu":
        return CPU_CACHE_BYTES
    return next((size for kind, size in L2_BYTES.items() if kind in device.device_kind), DEFAULT_L2_BYTES)


def set_count(bytes_per_set: float, device: jax.Device) -> int:
    """Input sets to rotate among, so that every call finds its inputs out of cache."""
    return max(1, min(MOST_SETS, math.ceil(CACHES * cache_bytes(device) / bytes_per_set)))


class Program:
    """A compiled function and the argument sets it rotates among; keeps as many results, so these rotate too."""

    def __init__(
        self,
        f: Callable[..., Any],
        sets: Sequence[tuple[Any, ...]],
        block: Callable[[Any], Any] = jax.block_until_ready,
    ):
        self.f, self.sets, self._block = f, sets, block
        self._next = 0
        self._results: collections.deque[Any] = collections.deque(maxlen=len(sets))

    def start(self) -> None:
        args = self.sets[self._next % len(self.sets)]
        self._next += 1
        self._results.append(self.f(*args))

    def wait(self) -> None:
        self._block(list(self._results))

    def release(self) -> None:
        self._results.clear()

    def once(self) -> float:
        """Seconds of wall clock for one call."""
        begin = time.perf_counter()
        self.start()
        self.wait()
        return time.perf_counter() - begin

    def queued(self, calls: int) -> float:
        """Seconds of wall clock per call, of `calls` queued back to back."""
        begin = time.perf_counter()
        for _ in range(calls):
            self.start()
        self.wait()
        return (time.perf_counter() - begin) / calls


@functools.cache
def cupti() -> Callable[[Callable[[], None]], list[tuple[str, float]]] | None:
    """A function that runs a callable and returns (name, milliseconds) of each kernel it launched, or None.

    It uses the bindings under `profiler.measure`, which cannot rotate inputs. CUPTI stays attached between sessions:
    detaching and attaching again has broken CUDA graphs, which XLA launches. Where a second session then sees
    nothing it is detached each time, as `profiler.measure` does.
    """
    if jax.default_backend() != "gpu":
        return None
    try:
        from jax.experimental.mosaic.gpu import profiler

        bindings = profiler.mosaic_gpu_lib._mosaic_gpu_ext
        begin, end = bindings._cupti_init, bindings._cupti_get_timings
    except Exception:  # no plugin, or a JAX that moved this
        return None

    def session(detach: bool, run: Callable[[], None]) -> list[tuple[str, float]]:
        begin()
        try:
            run()
        finally:
            records = end(detach)
        return records

    kernel = jax.jit(lambda v: v + 1)
    v = jax.block_until_ready(kernel(jax.numpy.zeros(1024)))
    for detach in (False, True):
        try:
            if all(session(detach, lambda: jax.block_until_ready(kernel(v))) for _ in range(3)):
                return functools.partial(session, detach)
        except RuntimeError:  # no CUPTI library, or another profiler is attached
            continue
    return None


def timer() -> str:
    """What times here: "cupti" or "wall"."""
    return "wall" if cupti() is None else "cupti"


def _kernel_samples(program: Program, calls: int) -> list[float] | None:
    """Milliseconds of kernels per call; None where CUPTI saw none."""
    session = cupti()
    assert session is not None
    program.wait()

    def run() -> None:
        for _ in range(calls):
            program.start()
        program.wait()  # for the results kept: a stream runs in order, so the others are done too

    records = session(run)
    if not records:
        return None
    each, rest = divmod(len(records), calls)
    names = [name for name, _ in records]
    if rest or names != names[:each] * calls:
        # Not the same kernels in every call (a library that chooses at run time): only their mean is known.
        return [sum(ms for _, ms in records) / calls]
    return [sum(ms for _, ms in records[i * each : (i + 1) * each]) for i in range(calls)]


def measure(
    programs: dict[str, Program],
    *,
    repeat: int = 15,
    seconds: float = 5.0,
    rounds: int = 3,
    step: Callable[[str], None] = lambda name: None,
    timings: dict[str, Timing] | None = None,
) -> dict[str, Timing]:
    """Times each program `repeat` times, in `rounds` that take turns so that a drifting clock meets all alike.

    Args:
      programs: by name; each has been called before, so that nothing compiles here.
      repeat: samples per program; fewer where they would take longer than `seconds`.
      seconds: roughly the most that one program may take.
      step: called with a program's name after its share of a round.
      timings: a dictionary to put the timings so far into, round by round, for who catches a KeyboardInterrupt. It is
        what is returned.
    """
    timings = {} if timings is None else timings
    per_round, samples, walls, timers = {}, {}, {}, {}
    for name, program in programs.items():
        once = program.once()
        # Warm up: some tens of milliseconds of work bring an idle GPU's clock up.
        if once < 0.03:
            program.queued(min(50, int(0.03 / once)))
            once = min(once, program.once())
        per_round[name] = max(1, min(-(-repeat // rounds), int(seconds / rounds / 2 / once)))
        samples[name], walls[name], timers[name] = [], [], "wall"
    for _ in range(rounds):
        for name, program in programs.items():
            calls = per_round[name]
            program.start()  # the program before left its data in the cache and its code in the instruction cache
            program.wait()
            kernels = _kernel_samples(program, calls) if cupti() is not None else None
            if kernels is not None:
                timers[name] = "cupti"
                samples[name] += kernels
                walls[name].append(program.queued(calls) * 1e3)
            elif jax.default_backend() == "gpu":
                # A sample is several queued calls, so that it is long against the time to launch one.
                each = [program.queued(8) * 1e3 for _ in range(calls)]
                samples[name] += each
                walls[name] += each
            else:
                # Short calls are timed several at a time: the clock and the dispatch jitter by microseconds.
                inner = max(1, min(20, int(2e-3 / max(program.once(), 1e-6))))
                each = [program.queued(inner) * 1e3 for _ in range(calls)]
                samples[name] += each
                walls[name] += each
            remark = _remark(timers[name], samples[name], walls[name])
            timings[name] = Timing(tuple(samples[name]), timers[name], min(walls[name]), remark)
            step(name)
    return timings


def _remark(timer: str, samples: list[float], walls: list[float]) -> str:
    if timer != "cupti":
        return ""
    device, wall = statistics.median(samples), min(walls)
    # Queued launches hide the host but for its own time per call, up to about 0.2 ms.
    if wall > 1.5 * device + 0.2:
        return f"wall clock is {wall:.3f} ms: more than kernels ran, or the host is slow"
    return ""

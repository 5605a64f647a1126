"""A problem's candidates: which kernels and tiles are worth timing beside XLA, on arrays like its own, and their times.

`jaxconv.tune` times a function's problems so, and `in_place` one problem while a program compiles.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from jaxconv import _plan
from jaxconv._core import primitives
from jaxconv._problem import ConvProblem
from jaxconv._tools import timing

# For what nothing else runs
_SLOW = {"cuda": ("direct", "im2col"), "cpu": ("direct",)}
_SECONDS_EACH = 0.3  # of a candidate's samples
# Other tiles are timed of kernels that, with the tile that they want most, take at most this much more than the fastest
_TILES_WITHIN = 1.25


@dataclasses.dataclass(frozen=True)
class Job:
    """A problem in f: what is timed."""

    kernel: primitives.Kernel
    problem: Any  # with nothing forced
    operands: tuple[tuple[tuple[int, ...], str], ...]  # shapes and dtypes
    count: int

    @property
    def op(self) -> str:
        return self.kernel.name

    @property
    def bytes(self) -> int:
        arrays = [*self.operands, *self.kernel.results(self.problem)]
        return sum(math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in arrays)


def worth_timing(op: str, problem: Any, device: _plan.Device) -> list[_plan.Plan]:
    """A plan for each native kernel that is worth timing, with the tile that it wants most, then one for each of their
    other tiles; those first that are known or predicted to be the fastest."""
    slow = _SLOW[device.platform]
    if device.platform == "cuda" and isinstance(problem, ConvProblem) and problem.depthwise and problem.groups > 1:
        slow = (*slow, "implicit_gemm")
    plans = _plan.tiles(op, problem, device)
    plans = [plan for plan in plans if plan.algorithm not in slow] or plans[:1]
    times: dict[str, float] = {}
    for c in _plan.plan(op, problem, device).candidates:
        times[c.name] = min(c.ms, times.get(c.name, math.inf))

    def key(plan: _plan.Plan) -> tuple[bool, float]:
        return plan not in firsts, times.get(plan.spec, times.get(plan.kernel, math.inf))

    firsts = list({plan.kernel: plan for plan in reversed(plans)}.values())
    return sorted(plans, key=key)


def in_memory(job: Job, device: _plan.Device) -> Job:
    """The problem as its neighbours leave it: on a GPU convolutions are channels last, whatever the arrays' order."""
    p = job.problem
    if device.platform != "cuda" or not isinstance(p, ConvProblem) or p.channels_last:
        return job
    last = dataclasses.replace(p, channels_last=True)
    roles = {"conv_dgrad": (last.y_shape, last.w_shape), "conv_wgrad": (last.x_shape, last.y_shape)}
    shapes = roles.get(job.op, (last.x_shape, last.w_shape))
    first = tuple((shape, dtype) for shape, (_, dtype) in zip(shapes, job.operands, strict=False))
    return dataclasses.replace(job, problem=last, operands=(*first, *job.operands[2:]))


Clock = Callable[
    [Mapping[str, Callable[..., Any]], Sequence[tuple[Any, ...]], float], tuple[dict[str, float], dict[str, str]]
]


def random_arrays(operands: Sequence[tuple[tuple[int, ...], str]], key: jax.Array) -> list[jax.Array]:
    """Between 0.5 and 1.5: good for variances too."""

    def one(k: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
        if not jnp.issubdtype(dtype, jnp.floating):
            return jnp.ones(shape, dtype)
        return jax.random.uniform(k, shape, jnp.float32, 0.5, 1.5).astype(dtype)

    keys = jax.random.split(key, len(operands))
    return [one(k, shape, dtype) for k, (shape, dtype) in zip(keys, operands, strict=True)]


def times_of(
    functions: Mapping[str, Callable[..., Any]], sets: Sequence[tuple[Any, ...]], seconds: float
) -> tuple[dict[str, float], dict[str, str]]:
    """(milliseconds of each function, what could not be timed and why). Every function is compiled here."""
    timings, failed = timings_of(functions, sets, seconds)
    return {name: one.median_ms for name, one in timings.items()}, failed


def timings_of(
    functions: Mapping[str, Callable[..., Any]],
    sets: Sequence[tuple[Any, ...]],
    seconds: float,
    step: Callable[[str], None] = lambda name: None,
) -> tuple[dict[str, timing.Timing], dict[str, str]]:
    """(times of each function, what could not be timed and why). `step` is called with a function's name before it is
    compiled, and after each of its rounds."""
    programs: dict[str, timing.Program] = {}
    failed: dict[str, str] = {}
    deadline = time.monotonic() + seconds
    fastest = math.inf
    for name, function in functions.items():
        if programs and time.monotonic() > deadline:
            failed[name] = "the time was up"
            continue
        step(name)
        try:
            program = timing.Program(function, sets)
            program.once()
            once = program.once()
        except Exception as error:  # cuDNN without an algorithm, out of memory: the others still count
            failed[name] = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
            continue
        if once > 20 * fastest + 0.01:
            failed[name] = f"took {once * 1e3:.1f} ms"
            continue
        fastest = min(fastest, once)
        programs[name] = program
    left = max(deadline - time.monotonic(), 0.1)
    each = min(_SECONDS_EACH, left / max(len(programs), 1))
    timings = timing.measure(programs, seconds=each, step=step) if programs else {}
    for program in programs.values():
        program.release()
    return timings, failed


def measure(
    job: Job,
    device: _plan.Device,
    seconds: float,
    kernels: Sequence[str] | None = None,
    clock: Clock | None = None,
    of_xla: Mapping[str, Any] = types.MappingProxyType({}),
) -> tuple[dict[str, float], dict[str, str]]:
    """Milliseconds by "xla" and native kernel (with its tile) at one problem, and what failed.

    Args:
      kernels: of the candidates those that are timed; None is all.
      clock: what times them, `times_of` or like it.
      of_xla: fields of the problem that XLA is given in place of its own.
    """
    clock = clock or times_of
    job = in_memory(job, device)

    def function(**forced: Any) -> Callable[..., Any]:
        problem = dataclasses.replace(job.problem, **forced)
        return jax.jit(lambda *arrays: job.kernel.primitive.bind(*arrays, problem=problem))

    deadline = time.monotonic() + seconds
    candidates = worth_timing(job.op, job.problem, device)
    candidates = [plan for plan in candidates if kernels is None or plan.kernel in kernels]
    functions = {plan.spec: function(algorithm=plan.spec) for plan in candidates}
    firsts = {plan.kernel: plan.spec for plan in reversed(candidates)}  # the tile that it wants most
    make = jax.jit(functools.partial(random_arrays, job.operands))
    count = timing.set_count(job.bytes, jax.devices()[0])
    with _on_one_device():
        sets = [tuple(make(key)) for key in jax.random.split(jax.random.key(0), count)]
        some = {spec: functions[spec] for spec in functions if spec in firsts.values()}
        ms, failed = clock({"xla": function(implementation="xla", **of_xla), **some}, sets, seconds)
        most = _TILES_WITHIN * min(ms.values(), default=0.0)
        near = [kernel for kernel, spec in firsts.items() if ms.get(spec, math.inf) <= most]
        others = [p.spec for p in candidates if p.kernel in near and p.spec not in some]
        left = deadline - time.monotonic()
        if not others or left <= 0:
            return ms, failed
        # The fastest again: times of two rounds differ by the clocks that the device had.
        again = min((firsts[k] for k in near), key=ms.__getitem__)
        more, failed_too = clock({spec: functions[spec] for spec in (again, *others)}, sets, left)
        drift = ms[again] / more.pop(again) if again in more else 1.0
        return ms | {spec: value * drift for spec, value in more.items()}, failed | failed_too


def _on_one_device() -> contextlib.AbstractContextManager[Any]:
    """Where a mesh is set, every array would lie on all of its devices."""
    if jax.sharding.get_mesh().empty:
        return contextlib.nullcontext()
    one = jax.make_mesh((1,), ("tune",), devices=jax.devices()[:1], axis_types=(AxisType.Auto,))
    return jax.set_mesh(one)

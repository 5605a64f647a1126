"""How a problem is timed while a program compiles: by `jaxconv.tune`'s measurement, of results that are XLA's.

`jaxconv._plan.in_place` says when, and what becomes of the times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxconv import _plan
from jaxconv._core import primitives
from jaxconv._plan import in_place
from jaxconv._tools import candidates
from jaxconv._tools import timing as _timing

# How far a kernel's results may be from XLA's, as a root of mean squares relative to that of XLA's. Rounding to 16 bits
# makes 0.004, and some sums of such lose a digit more; a kernel that does not work makes 1 or NaN.
MOST_APART = 0.05
# The kernel reads positions, XLA x: of arrays that are not each other's
_NOT_COMPARED = ("max_pool_backward",)


_KERNELS = {kernel.name: kernel for kernel in primitives.KERNELS.values()}


def times(
    op: str,
    problem: Any,
    device: _plan.Device,
    kernels: Sequence[str] | None,
    seconds: float,
    stop: Callable[[], None],
) -> in_place.Times:
    """XLA's time and that of each of the kernels (None: all) at the problem, on the first device of that kind."""
    kernel = _KERNELS[op]
    job = candidates.Job(kernel, problem, tuple(kernel.operands(problem).values()), 1)
    noise: dict[str, float] = {}
    expected: list[jax.Array] = []  # XLA's results

    def clock(functions: Any, sets: Any, seconds: float) -> tuple[dict[str, float], dict[str, str]]:
        timings, failed = candidates.timings_of(functions, sets, seconds, step=lambda name: stop())
        noise.update({name: timing.spread for name, timing in timings.items()})
        ms = {name: timing.median_ms for name, timing in timings.items()}
        if op in _NOT_COMPARED:
            return ms, failed
        if "xla" in ms:
            expected[:] = jax.tree.leaves(functions["xla"](*sets[0]))
        while expected and (native := [name for name in ms if name != "xla"]):
            stop()
            fastest = min(native, key=ms.__getitem__)
            apart = _apart(jax.tree.leaves(functions[fastest](*sets[0]))[: len(expected)], expected)
            if apart <= MOST_APART:
                break
            del ms[fastest]
            failed[fastest] = f"its results differ from XLA's by {apart:.2g}"
        return ms, failed

    # XLA's pooling, of which nobody reads the positions, does not make them.
    of_xla = {"save": False} if op == "max_pool" else {}
    # Settings that hold in all threads: nothing here is the program's.
    with (
        jax.default_device(in_place.here(device)),
        jax.transfer_guard("allow"),
        jax.disable_jit(False),
        jax.debug_nans(False),
        jax.debug_infs(False),
    ):
        ms, failed = candidates.measure(job, device, seconds, kernels, clock, of_xla)
        written = _write(job.problem.y_shape, problem.dtype, device) if op == "conv_fprop" and ms else 0.0
    return in_place.Times(ms, noise, failed, _timing.timer(), written)


def _apart(found: Sequence[jax.Array], expected: Sequence[jax.Array]) -> float:
    """The most that one of the arrays is away from what is expected; infinity where that is not a number."""

    @jax.jit
    def each(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        scale = jnp.maximum(jnp.max(jnp.abs(b)), 1e-30)  # squares of large sums overflow
        return jnp.sqrt(jnp.sum(((a - b) / scale) ** 2) / jnp.maximum(jnp.sum((b / scale) ** 2), 1e-30))

    apart = [float(each(a, b)) for a, b in zip(found, expected, strict=True) if b.size]
    return max((value if value == value else math.inf for value in apart), default=0.0)


def _write(shape: tuple[int, ...], dtype: str, device: _plan.Device) -> float:
    """Milliseconds to write such an array once."""
    fill = jax.jit(lambda value: jnp.broadcast_to(value, shape))
    size = jnp.dtype(dtype).itemsize * float(jnp.prod(jnp.array(shape, jnp.float32)))
    sets = [(jnp.full((), i, dtype),) for i in range(_timing.set_count(size, in_place.here(device)))]
    timings, _ = candidates.timings_of({"write": fill}, sets, 1.0)
    return timings["write"].median_ms if timings else 0.0


in_place.times_with(times)

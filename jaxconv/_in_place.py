"""How a problem is timed while a program compiles: the arrays that an op reads, and `jaxconv.tune`'s measurement.

`jaxconv._plan.in_place` says when, and what becomes of the times.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxconv import _op, _plan, _timing
from jaxconv._plan import in_place
from jaxconv._problem import (
    BatchNormProblem,
    ConvProblem,
    DenseProblem,
    GroupNormProblem,
    PoolProblem,
    SqueezeExciteProblem,
)

if TYPE_CHECKING:
    from jaxconv import tune as _tune
else:
    _tune = importlib.import_module("jaxconv.tune")  # whose name the function has

Operands = list[tuple[tuple[int, ...], str]]  # shapes and dtypes

# How far a kernel's results may be from XLA's, as a root of mean squares relative to that of XLA's. Rounding to 16 bits
# makes 0.004, and some sums of such lose a digit more; a kernel that does not work makes 1 or NaN.
MOST_APART = 0.05
# The kernel reads positions, XLA x: of arrays that are not each other's
_NOT_COMPARED = ("max_pool_backward",)


def _conv(p: ConvProblem, *shapes: tuple[int, ...]) -> Operands:
    return [(shape, p.dtype) for shape in shapes]


def _dense(p: DenseProblem) -> Operands:
    shapes = [p.x_shape, p.w_shape, *([p.b_shape] if p.bias else []), *([p.c_shape] if p.addend else [])]
    return [(shape, p.dtype) for shape in shapes]


def _norm(p: BatchNormProblem, arrays: int) -> Operands:
    """`arrays` like x, four of parameters, and the residual."""
    x = p.x_shape, p.dtype
    return [x] * arrays + [(p.param_shape, p.param_dtype)] * 4 + [x] * p.residual


def _groupnorm(p: GroupNormProblem, backward: bool) -> Operands:
    x, parameter, group = ((p.x_shape, p.dtype), (p.param_shape, p.param_dtype), (p.group_shape, p.param_dtype))
    return [x, *[x] * backward, parameter, parameter, *[group, group] * backward]


def _pool(p: PoolProblem, backward: bool) -> Operands:
    return [(p.x_shape, p.dtype), *[(p.y_shape, "uint8"), (p.y_shape, p.dtype)] * backward]


def _excite(p: SqueezeExciteProblem, backward: bool) -> Operands:
    x, of = (p.x_shape, p.dtype), p.param_dtype
    w1, w2 = (p.w1_shape, of), (p.w2_shape, of)
    if backward:
        return [x, x, w1, w2, (p.hidden_shape, of), (p.mean_shape, of)]
    return [x, w1, ((p.hidden,), of), w2, ((p.channels,), of)]


# What each op reads, in the order in which it is bound
OPERANDS: Mapping[str, Callable[[Any], Operands]] = {
    "conv": lambda p: _conv(p, p.x_shape, p.w_shape, *[(p.out_channels,)] * p.bias),
    "conv_fprop": lambda p: _conv(p, p.x_shape, p.w_shape),
    "conv_dgrad": lambda p: _conv(p, p.y_shape, p.w_shape),
    "conv_wgrad": lambda p: _conv(p, p.x_shape, p.y_shape),
    "dense": _dense,
    "matmul": _dense,
    "dense_gradient": lambda p: [(s, p.dtype) for s in (p.x_shape, p.w_shape, (p.m, p.n))],
    "batchnorm_train": lambda p: _norm(p, 1),
    "batchnorm_infer": lambda p: _norm(p, 1),
    "batchnorm_backward": lambda p: _norm(p, 2),
    "groupnorm": lambda p: _groupnorm(p, False),
    "groupnorm_backward": lambda p: _groupnorm(p, True),
    "max_pool": lambda p: _pool(p, False),
    "max_pool_backward": lambda p: _pool(p, True),
    "squeeze_excite": lambda p: _excite(p, False),
    "squeeze_excite_backward": lambda p: _excite(p, True),
}

_KERNELS = {kernel.name: kernel for kernel in _op.KERNELS.values()}


def times(
    op: str,
    problem: Any,
    device: _plan.Device,
    kernels: Sequence[str] | None,
    seconds: float,
    stop: Callable[[], None],
) -> in_place.Times:
    """XLA's time and that of each of the kernels (None: all) at the problem, on the first device of that kind."""
    job = _tune._Job(_KERNELS[op], problem, tuple(OPERANDS[op](problem)), 1)
    noise: dict[str, float] = {}
    expected: list[jax.Array] = []  # XLA's results

    def clock(functions: Any, sets: Any, seconds: float) -> tuple[dict[str, float], dict[str, str]]:
        timings, failed = _tune.timings_of(functions, sets, seconds, step=lambda name: stop())
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
            failed[fastest] = f"its results are not XLA's (apart by {apart:.2g})"
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
        ms, failed = _tune._measure(job, device, seconds, kernels, clock, of_xla)
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
    timings, _ = _tune.timings_of({"write": fill}, sets, 1.0)
    return timings["write"].median_ms if timings else 0.0


in_place.times_with(times)

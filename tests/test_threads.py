"""Several Python threads run native code at once: the same bits as alone. Under ThreadSanitizer: `make tsan`.

Each program is one custom call: XLA's own code is not instrumented, and what it writes between calls would look like a
race.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import calls, normal, same_bits

import jaxconv
from jaxconv._ops import conv as kernels
from jaxconv._problem import ConvProblem

THREADS = 6
ROUNDS = int(os.environ.get("JAXCONV_ROUNDS", "2"))


def conv_programs(name: str, x: tuple[int, ...], w: tuple[int, ...], algorithm: str, **options: Any) -> dict[str, Any]:
    """fprop, dgrad, wgrad and conv with bias, activation and z."""
    defaults: dict[str, Any] = dict(stride=1, padding="SAME", dilation=1, groups=1, layout="NHWC", precision="highest")
    defaults |= dict(activation=None, return_preactivation=False, implementation="native", algorithm=algorithm)
    arrays = (jax.ShapeDtypeStruct(shape, "float32") for shape in (x, w))
    p = ConvProblem.infer("conv", 2, *arrays, None, **{**defaults, **options})
    fused = dict(activation="gelu", return_preactivation=True, implementation="native", algorithm=algorithm, **options)
    return {
        f"{name}.fprop": (functools.partial(kernels.fprop, p), (p.x_shape, p.w_shape)),
        f"{name}.dgrad": (functools.partial(kernels.dgrad, p), (p.y_shape, p.w_shape)),
        f"{name}.wgrad": (functools.partial(kernels.wgrad, p), (p.x_shape, p.y_shape)),
        f"{name}.fused": (functools.partial(jaxconv.conv2d, **fused), (p.x_shape, p.w_shape, (p.out_channels,))),
    }


def norm(training: bool, x: Any, v: Any, m: Any) -> Any:
    options = dict(training=training, activation="relu", implementation="native")
    return jaxconv.batchnorm(x, v, m, m, v * v, **options)


def programs() -> dict[str, tuple[Any, tuple[tuple[int, ...], ...]]]:
    """name -> (f, shapes of its arguments), large enough for several workers each."""
    made = conv_programs("im2col", (4, 14, 14, 16), (3, 3, 16, 24), "im2col")
    made |= conv_programs("pointwise", (4, 14, 14, 32), (1, 1, 32, 48), "im2col")
    made |= conv_programs("grouped", (4, 14, 14, 16), (3, 3, 4, 24), "im2col", groups=4, stride=2)
    made |= conv_programs("depthwise", (4, 14, 14, 16), (3, 3, 1, 16), "depthwise", groups=16)
    made |= conv_programs("direct", (4, 9, 9, 8), (3, 3, 8, 8), "direct")
    dense = functools.partial(jaxconv.dense, activation="tanh", implementation="native")
    made["dense"] = (dense, ((200, 96), (96, 64), (64,)))
    made["batchnorm.train"] = (functools.partial(norm, True), ((32, 8, 8, 32), (32,), (32,)))
    made["batchnorm.infer"] = (functools.partial(norm, False), ((32, 8, 8, 32), (32,), (32,)))
    return made


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    """name -> (compiled f, its arguments): XLA compiles in one thread, which is not what is tested."""
    made = {}
    for seed, (name, (f, shapes)) in enumerate(programs().items()):
        args = [jnp.asarray(normal(seed + i, shape), jnp.float32) for i, shape in enumerate(shapes)]
        assert sum(calls(f, *args).values()) == 1, name
        made[name] = (jax.jit(f).lower(*args).compile(), args)
    return made


def run_from_threads(jobs: list[Any]) -> None:
    """Every thread runs every job, each beginning elsewhere, all at once."""
    alone = [np.asarray(leaf) for f, args in jobs for leaf in jax.tree.leaves(f(*args))]
    start = threading.Barrier(THREADS)

    def work(thread: int) -> None:
        start.wait()
        for step in range(ROUNDS):
            shift = (thread * 7 + step) % len(jobs)
            order = [*jobs[shift:], *jobs[:shift]]
            found = [[np.asarray(leaf) for leaf in jax.tree.leaves(f(*args))] for f, args in order]
            found = found[len(jobs) - shift :] + found[: len(jobs) - shift]
            assert same_bits([leaf for leaves in found for leaf in leaves], alone)

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(work, thread) for thread in range(THREADS)]:
            done.result()


def test_every_kernel_at_once_gives_the_bits_that_it_gives_alone(compiled):
    run_from_threads(list(compiled.values()))


@pytest.mark.parametrize("name", programs())
def test_one_kernel_from_several_threads(name, compiled):
    run_from_threads([compiled[name]])


def test_backward_from_several_threads():
    """Its call stands between XLA's operations."""
    x, v = jnp.asarray(normal(0, (32, 8, 8, 32)), jnp.float32), jnp.asarray(normal(1, (32,)), jnp.float32)
    gradient = jax.jit(jax.grad(lambda x, v: norm(True, x, v, v)[0].sum(), (0, 1)))
    run_from_threads([(gradient.lower(x, v).compile(), (x, v))])

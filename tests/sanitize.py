"""Runs a small case of every CUDA kernel, for compute-sanitizer to watch; not collected by pytest.

    compute-sanitizer --tool memcheck --kernel-name kns=jaxconv python tests/sanitize.py dense
    compute-sanitizer --tool racecheck --kernel-name kns=jaxconv python tests/sanitize.py batchnorm

Every algorithm, element type, memory layout, operator and access width (extents that 16-byte accesses divide, and ones
that nothing divides). Results are not compared here, the test suite does that. An argument keeps the cases whose name
contains it.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import jaxconv
from jaxconv import _plan, _problem

DTYPES = ("float32", "bfloat16", "float16")
Case = tuple[str, Callable[[], Any]]


def there_and_back(f: Callable[..., Any], *args: jax.Array) -> Any:
    """f and its gradients in every argument, as one program."""

    def run(*args: jax.Array) -> Any:
        outs, transpose = jax.vjp(f, *args)
        return outs, transpose(outs)

    return jax.jit(run)(*args)


def conv(dtype: str, last: bool, c: int, k: int, groups: int, filter: tuple[int, int], **options: Any) -> Any:
    x = jnp.ones((3, 11, 9, c) if last else (3, c, 11, 9), dtype)
    w = jnp.ones((*filter, c // groups, k) if last else (k, c // groups, *filter), dtype)
    options |= {"groups": groups, "layout": "NHWC" if last else "NCHW"}
    fused = functools.partial(jaxconv.conv2d, activation="gelu", return_preactivation=True, **options)
    return there_and_back(fused, x, w, jnp.ones(k, dtype))


def conv_cases() -> Iterator[Case]:
    shapes = {
        # C, K, groups, filter, stride, dilation
        "aligned": (32, 72, 1, (3, 3), 1, 1),
        "odd": (5, 7, 1, (3, 2), 2, 1),
        "grouped": (16, 32, 4, (3, 3), 2, 1),
        "depthwise": (16, 16, 16, (3, 3), 1, 1),
        "depthwise5s2": (16, 16, 16, (5, 5), 2, 1),
        "depthwise7": (16, 16, 16, (7, 7), 1, 1),
        "multiplier": (6, 12, 6, (2, 3), 1, 2),
    }
    for algorithm, dtype, last, name in itertools.product(_problem.CONV_ALGORITHMS, DTYPES, (True, False), shapes):
        *shape, stride, dilation = shapes[name]
        for precision in ("default", "highest") if dtype == "float32" and name == "odd" else ("default",):
            options = {"stride": stride, "dilation": dilation, "algorithm": algorithm, "precision": precision}
            label = f"conv {algorithm} {dtype} {'NHWC' if last else 'NCHW'} {name} {precision}"
            yield label, functools.partial(conv, dtype, last, *shape, **options)


def dense(dtype: str, m: int, k: int, n: int, precision: str) -> Any:
    def f(x: jax.Array, w: jax.Array, b: jax.Array, c: jax.Array) -> Any:
        return jaxconv.dense(x, w, b, c=c, beta=0.5, activation="silu", precision=precision, implementation="native")

    args = [jnp.ones(shape, dtype) for shape in ((m, k), (k, n), (n,), (m, n))]
    instances = [jnp.stack([a, a]) for a in args[:2]]
    return there_and_back(f, *args), there_and_back(jax.vmap(f, (0, 0, None, None)), *instances, *args[2:])


def dense_cases() -> Iterator[Case]:
    for dtype, shape in itertools.product(DTYPES, ((72, 64, 136), (5, 7, 3), (16, 2048, 24))):
        for precision in ("default", "highest") if dtype == "float32" else ("default",):
            yield f"dense {dtype} {shape} {precision}", functools.partial(dense, dtype, *shape, precision)


def batchnorm(algorithm: str, dtype: str, shape: tuple[int, ...], axis: int, fused: bool) -> Any:
    def f(training: bool, x: jax.Array, scale: jax.Array, bias: jax.Array, residual: jax.Array) -> Any:
        options: dict[str, Any] = {"residual": residual, "activation": "silu"} if fused else {}
        forced = algorithm if training else "two_read"
        return jaxconv.batchnorm(
            x, scale, bias, c, c, training=training, channel_axis=axis, algorithm=forced, **options
        )[0]

    c, x = jnp.ones(shape[axis]), jnp.ones(shape, dtype)
    args = (x, c, c, x)
    return there_and_back(functools.partial(f, True), *args), f(False, *args)


def batchnorm_cases() -> Iterator[Case]:
    shapes = (((6, 5, 5, 16), -1), ((6, 16, 8, 8), 1), ((6, 7, 7, 5), -1), ((6, 5, 7, 7), 1), ((130, 9, 9, 24), -1))
    for algorithm, dtype, shape, fused in itertools.product(
        _problem.BATCHNORM_ALGORITHMS, DTYPES, shapes, (False, True)
    ):
        label = f"batchnorm {algorithm} {dtype} {shape} {'fused' if fused else 'bare'}"
        yield label, functools.partial(batchnorm, algorithm, dtype, *shape, fused)


def main(keep: str = "") -> None:
    if jax.default_backend() != "gpu":
        raise SystemExit("no GPU: there is nothing to watch")
    done = refused = 0
    for name, run in itertools.chain(conv_cases(), dense_cases(), batchnorm_cases()):
        if keep not in name:
            continue
        try:
            jax.block_until_ready(run())
            done += 1
        except ValueError as error:
            if "cannot run" not in str(error):
                raise
            refused += 1  # outside the algorithm's domain: not a case of its kernels
    print(f"{done} cases ran on {_plan.Device.current('cuda').kind}, {refused} are outside their algorithm's domain")


if __name__ == "__main__":
    main(*sys.argv[1:])

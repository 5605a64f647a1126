"""What a device can do, and the least time a problem takes on it: max(flops / rate, minimal bytes / bandwidth)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.ops.base import Case
from jaxconv._tools import timing

ITEM_BYTES = {"bf16": 2, "f16": 2, "f32": 4}


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Rates in operations per second, bandwidth in bytes per second (read plus written)."""

    half: float  # bf16 and f16 matrix products
    tf32: float  # float32 at default precision
    f32: float  # float32 at "highest"
    lanes: float  # multiply-adds outside the matrix units: what depthwise convolutions have
    bandwidth: float
    source: str

    def rate(self, dtype: str, precision: str | None) -> float:
        if dtype != "f32":
            return self.half
        return self.f32 if precision == "highest" else self.tf32


KNOWN = {
    # Matrix products of random data through cuBLAS and a large copy, on the card. Lanes: 132 multiprocessors of 128,
    # two operations each, at the 1.75 GHz that such kernels run at.
    "NVIDIA H200": Ceilings(788e12, 420e12, 52e12, 59e12, 4.3e12, "measured: cuBLAS products and a copy"),
}


@functools.cache
def ceilings() -> Ceilings | None:
    """Of the default device: from the table, or measured in a few seconds on another GPU.

    None on a CPU: other work shares it, caches hold most problems, and no two are alike.
    """
    device = jax.devices()[0]
    if device.platform == "cpu":
        return None
    return KNOWN.get(device.device_kind) or _measured()


def _measured() -> Ceilings:
    def best_seconds(f: Callable[..., jax.Array], *args: jax.Array) -> float:
        f(*args)
        measured = timing.measure({"": timing.Program(f, [args])}, repeat=6, seconds=1.0)[""]
        return min(measured.samples_ms) * 1e-3

    def rate(dtype: Any, precision: str | None) -> float:
        size = 8192
        a = jax.random.normal(jax.random.key(0), (size, size), dtype)
        return 2 * size**3 / best_seconds(jax.jit(lambda a, b: jnp.dot(a, b, precision=precision)), a, a)

    v = jax.random.normal(jax.random.key(0), (2**28,))
    bandwidth = 2 * v.nbytes / best_seconds(jax.jit(lambda v: v * 1.5), v)
    full = rate(jnp.float32, "highest")
    half, tf32 = rate(jnp.bfloat16, None), rate(jnp.float32, None)
    return Ceilings(half, tf32, full, full, bandwidth, "measured in this run: 8192^3 products and a scaling of 1 GiB")


def _rate(top: Ceilings, case: Case, dtype: str, precision: str | None) -> float:
    return top.lanes if case.depthwise else top.rate(dtype, precision)


def limit_ms(case: Case, pass_: str, dtype: str, precision: str | None) -> float | None:
    top = ceilings()
    if top is None:
        return None
    flops, size = case.work(pass_, ITEM_BYTES[dtype])
    return max(flops / _rate(top, case, dtype, precision), size / top.bandwidth) * 1e3


def achieved(case: Case, pass_: str, dtype: str, precision: str | None, ms: float) -> tuple[float, str]:
    """The rate in the unit that limits the problem, "TFLOP/s" or "GB/s"; on a CPU "GFLOP/s" of products."""
    top = ceilings()
    flops, size = case.work(pass_, ITEM_BYTES[dtype])
    if top is None and flops:
        return flops / ms / 1e6, "GFLOP/s"
    if top is None or flops / _rate(top, case, dtype, precision) < size / top.bandwidth:
        return size / ms / 1e6, "GB/s"
    return flops / ms / 1e9, "TFLOP/s"

"""The gradient between a gated dense layer and the next one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.ops import base
from benchmarks.ops.dense import MatricesCase
from jaxconv._core.activations import Activation
from jaxconv._ops.gated import dense_gated_gradient
from jaxconv._problem import DenseProblem, GatedGradientProblem, parse_precision


@dataclasses.dataclass(frozen=True)
class DenseGatedGradientCase(MatricesCase):
    """dz = (dy * f(g), dy * a * f'(g)), dy = x @ w.T of (M, K) and (K, N), and its sum over the rows."""

    suite: str = "models"

    op = "dense_gated_gradient"
    without_torch = "part of a gradient, which PyTorch takes as a whole"
    results: ClassVar = {"dgrad": ("dz", "db")}
    algorithms = ("sm90",)
    measured: ClassVar = {"dgrad": ("dense_gated_gradient",)}
    call_problem = GatedGradientProblem

    @property
    def elements(self) -> int:
        """Of x, w, z, dz and db together."""
        return self.m * self.k + self.k * self.n + 4 * self.m * self.n + 2 * self.n

    def work(self, pass_: str, item: int) -> tuple[float, float]:
        return self.flops, item * self.elements

    def arrays(self, setting: base.Setting, key: Array) -> base.Arrays:
        normal = base.Normal(setting, key)
        return {
            "x": normal((self.m, self.k)),
            "w": normal((self.n, self.k), self.k**-0.5),  # the later layer's, (N, K) as that has them
            "z": normal((self.m, 2 * self.n)),
        }

    def ours(self, pass_: str, setting: base.Setting, **choice: Any) -> base.Job:
        dtype, precision = jnp.dtype(base.DTYPES[setting.dtype]).name, parse_precision("dense", setting.precision)
        product = DenseProblem("dense", dtype, self.m, self.k, self.n, precision, trans_w=True, **choice)
        p = GatedGradientProblem.of(product, Activation(self.activation), first=False)
        return _job(lambda x, w, z: tuple(dense_gated_gradient(p, x, w, z)))

    def xla(self, pass_: str, setting: base.Setting) -> base.Job:
        def gate(z: Array) -> Array:
            a, g = jnp.split(z, 2, -1)
            return a * base.ACTIVATIONS[self.activation](g)

        def gradient(x: Array, w: Array, z: Array) -> tuple[Array, Array]:
            (dz,) = jax.vjp(gate, z)[1](jnp.dot(x, w.T, precision=setting.precision))
            return dz, jnp.sum(dz, 0)

        return _job(gradient).plain

    @base.exact
    def reference(self, pass_: str, channels_last: bool, a: base.Arrays, y: Array) -> base.Reference:
        dy = base.product(base.wide(a["x"]), base.wide(a["w"]).T)
        left, right = jnp.split(base.wide(a["z"]), 2, -1)
        value, slope = base.activated(self.activation, right)
        dz = jnp.concatenate([dy * value, dy * left * slope], -1)
        return {"dz": (dz, None), "db": (jnp.sum(dz, 0), None)}

    def tolerance(self, pass_: str, result: str, rounding: base.Rounding) -> float:
        sums = rounding.product(self.m) if result == "db" else 0.0
        return 2 * (rounding.u * math.sqrt(base.CHAIN[self.activation] + 2) + rounding.product(self.k) + sums)

    @classmethod
    def call_bytes(cls, op: str, problem: Any, item: int) -> float:
        return item * sum(map(math.prod, (problem.x_shape, problem.w_shape, problem.z_shape, problem.z_shape)))


def _job(f: Callable[[Array, Array, Array], tuple[Array, ...]]) -> base.Job:
    return base.Job.of(f, ("x", "w", "z"), ("dense_gated_gradient", "matmul"))


# Rows, channels, columns of a half.
BLOCKS = (
    ("unet.l1.geglu", 16384, 320, 1280, "gelu"),
    ("unet.l2.geglu", 16384, 640, 2560, "gelu"),
    ("unet.l3.geglu", 4096, 1280, 5120, "gelu"),
    ("ffn.geglu", 8192, 1024, 4096, "gelu"),
    ("ffn.swiglu", 8192, 1024, 4096, "silu"),
    ("llm.swiglu", 4096, 4096, 11008, "silu"),
    ("ffn.glu", 8192, 1024, 4096, "sigmoid"),
    ("ffn.bilinear", 8192, 1024, 4096, "none"),
)
CASES = tuple(DenseGatedGradientCase(*block) for block in BLOCKS)

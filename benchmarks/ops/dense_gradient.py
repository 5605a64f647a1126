"""The gradient between two dense layers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.ops import base
from benchmarks.ops.dense import BLOCKS, MatricesCase
from jaxconv._core.activations import Activation
from jaxconv._ops.dense import dense_gradient
from jaxconv._problem import DenseProblem, parse_precision


@dataclasses.dataclass(frozen=True)
class DenseGradientCase(MatricesCase):
    """dz = (dy @ w.T) * activation'(z), (M, K) @ (K, N), and its sum over the rows: between two dense layers."""

    suite: str = "models"

    op = "dense_gradient"
    without_torch = "part of a gradient, which PyTorch takes as a whole"
    results: ClassVar = {"dgrad": ("dz", "db")}
    algorithms = ("sm90",)
    measured: ClassVar = {"dgrad": ("dense_gradient",)}

    @property
    def elements(self) -> int:
        """Of dy, w, z, dz and db together."""
        return self.m * self.k + self.k * self.n + 2 * self.m * self.n + self.n

    def work(self, pass_: str, item: int) -> tuple[float, float]:
        return self.flops, item * self.elements

    def arrays(self, setting: base.Setting, key: Array) -> base.Arrays:
        normal = base.Normal(setting, key)
        return {
            "dy": normal((self.m, self.k)),
            "w": normal((self.n, self.k), self.k**-0.5),  # the later layer's, (K, N) as that has them
            "z": normal((self.m, self.n)),
        }

    def ours(self, pass_: str, setting: base.Setting, **choice: Any) -> base.Job:
        p = DenseProblem(
            "dense_gradient",
            jnp.dtype(base.DTYPES[setting.dtype]).name,
            *(self.m, self.k, self.n),
            parse_precision("dense_gradient", setting.precision),
            trans_w=True,
            activation=Activation(self.activation),
            **choice,
        )
        return _job(lambda dy, w, z: tuple(dense_gradient(p, dy, w, z)))

    def xla(self, pass_: str, setting: base.Setting) -> base.Job:
        def gradient(dy: Array, w: Array, z: Array) -> tuple[Array, Array]:
            (dz,) = jax.vjp(base.ACTIVATIONS[self.activation], z)[1](jnp.dot(dy, w.T, precision=setting.precision))
            return dz, jnp.sum(dz, 0)

        return _job(gradient).plain

    @base.exact
    def reference(self, pass_: str, channels_last: bool, a: base.Arrays, y: Array) -> base.Reference:
        dz = (
            base.product(base.wide(a["dy"]), base.wide(a["w"]).T)
            * base.activated(self.activation, base.wide(a["z"]))[1]
        )
        return {"dz": (dz, None), "db": (jnp.sum(dz, 0), None)}

    def tolerance(self, pass_: str, result: str, rounding: base.Rounding) -> float:
        sums = rounding.product(self.m) if result == "db" else 0.0
        return 2 * (rounding.u * math.sqrt(base.CHAIN[self.activation]) + rounding.product(self.k) + sums)


def _job(f: Callable[[Array, Array, Array], tuple[Array, ...]]) -> base.Job:
    return base.Job.of(f, ("dy", "w", "z"), ("dense_gradient", "matmul"))


CASES = (
    *(DenseGradientCase(f"{name}.gelu", m, c, h, "gelu") for name, m, c, h in BLOCKS),
    *(DenseGradientCase(f"convnext.s3.{activation}", *BLOCKS[2][1:], activation) for activation in ("relu", "silu")),
)

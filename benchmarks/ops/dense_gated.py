"""Dense layers whose result's halves are multiplied, one of them through an activation."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from benchmarks.ops import base
from benchmarks.ops.dense import MatricesCase
from jaxconv._core.activations import Activation
from jaxconv._ops.gated import dense_gated
from jaxconv._problem import DenseProblem, GatedProblem, parse_precision


@dataclasses.dataclass(frozen=True)
class DenseGatedCase(MatricesCase):
    """y = a * activation(g), of the halves of z = x @ w + b, (M, K) @ (K, N), b per column.

    saved: y and z, as where the gradient is taken.
    """

    suite: str = "models"

    op = "dense_gated"
    results: ClassVar = {"fwd": ("y",), "saved": ("y", "z")}
    algorithms = ("sm90",)
    measured: ClassVar = {"fwd": ("dense_gated",), "saved": ("dense_gated",)}
    call_problem = GatedProblem

    @property
    def passes(self) -> tuple[str, ...]:
        return ("fwd", "saved")

    @property
    def elements(self) -> int:
        """Of x, w, b and y together."""
        return self.m * self.k + self.k * self.n + self.n + self.m * self.n // 2

    def work(self, pass_: str, item: int) -> tuple[float, float]:
        return self.flops, item * (self.elements + self.m * self.n * (pass_ == "saved"))

    def arrays(self, setting: base.Setting, key: Array) -> base.Arrays:
        normal = base.Normal(setting, key)
        return {
            "x": normal((self.m, self.k)),
            "w": normal((self.k, self.n), self.k**-0.5),
            "b": normal((self.n,), 0.1),
        }

    def ours(self, pass_: str, setting: base.Setting, **choice: Any) -> base.Job:
        dtype, precision = jnp.dtype(base.DTYPES[setting.dtype]).name, parse_precision("dense", setting.precision)
        layer = DenseProblem("dense", dtype, self.m, self.k, self.n, precision, bias="column", **choice)
        p = GatedProblem.of(layer, Activation(self.activation), first=False, save=pass_ == "saved")
        return _job(lambda x, w, b: tuple(dense_gated(p, x, w, b)))

    def xla(self, pass_: str, setting: base.Setting) -> base.Job:
        dot = functools.partial(jnp.dot, precision=setting.precision)

        def layer(x: Array, w: Array, b: Array) -> tuple[Array, ...]:
            z = dot(x, w) + b
            a, g = jnp.split(z, 2, -1)
            y = a * base.ACTIVATIONS[self.activation](g)
            return (y, z) if pass_ == "saved" else (y,)

        return _job(layer).plain

    def torch(self, pass_: str, setting: base.Setting) -> base.Job:
        import torch

        from benchmarks import torch_contender

        if pass_ == "saved":
            raise ValueError("part of a gradient, which PyTorch takes as a whole")
        functional = torch.nn.functional
        gelu = functools.partial(functional.gelu, approximate="tanh")
        activation = {"gelu": gelu, "silu": functional.silu, "sigmoid": torch.sigmoid, "none": lambda z: z}

        def layer(x: Any, w: Any, b: Any) -> Any:
            a, g = torch.addmm(b, x, w).chunk(2, -1)
            return a * activation[self.activation](g)

        return torch_contender.layer_job(pass_, layer, ("x", "w", "b"))

    @base.exact
    def reference(self, pass_: str, channels_last: bool, a: base.Arrays, y: Array) -> base.Reference:
        z = base.product(base.wide(a["x"]), base.wide(a["w"])) + base.wide(a["b"])
        left, right = jnp.split(z, 2, -1)
        return {"y": (left * base.activated(self.activation, right)[0], None), "z": (z, None)}

    def tolerance(self, pass_: str, result: str, rounding: base.Rounding) -> float:
        """Of y both factors have the errors of a sum."""
        if result == "z":
            return 2 * (rounding.u * math.sqrt(base.CHAIN["none"]) + rounding.product(self.k))
        return 2 * (rounding.u * math.sqrt(base.CHAIN[self.activation] + 3) + 2 * rounding.product(self.k))

    @classmethod
    def call_bytes(cls, op: str, problem: Any, item: int) -> float:
        arrays = [problem.x_shape, problem.w_shape, problem.y_shape, *[problem.z_shape] * problem.save_preactivation]
        return item * sum(map(math.prod, arrays))


def _job(f: Callable[[Array, Array, Array], tuple[Array, ...]]) -> base.Job:
    return base.Job.of(f, ("x", "w", "b"), ("dense_gated", "dense", "matmul"))


# Rows, channels, columns of both halves: feed-forward blocks of a diffusion model at its levels, of language models, a
# conformer's pointwise convolution.
LAYERS = (
    ("unet.l1.geglu", 16384, 320, 2560, "gelu"),
    ("unet.l2.geglu", 16384, 640, 5120, "gelu"),
    ("unet.l3.geglu", 4096, 1280, 10240, "gelu"),
    ("ffn.geglu", 8192, 1024, 8192, "gelu"),
    ("ffn.swiglu", 8192, 1024, 8192, "silu"),
    ("llm.swiglu", 4096, 4096, 22016, "silu"),
    ("conformer.glu", 16384, 512, 1024, "sigmoid"),
    ("conformer.wide.glu", 65536, 256, 512, "sigmoid"),
    ("ffn.bilinear", 8192, 1024, 8192, "none"),
)
CASES = tuple(DenseGatedCase(*layer) for layer in LAYERS)

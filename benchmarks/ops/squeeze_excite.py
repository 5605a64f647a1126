"""Squeeze-and-excitations with silu."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array, lax

import jaxconv
from benchmarks import torch_contender
from benchmarks.ops import base
from jaxconv import _problem
from jaxconv._problem import SqueezeExciteProblem

_NAMES = ("x", "w1", "b1", "w2", "b2")


@dataclasses.dataclass(frozen=True)
class SqueezeExciteCase(base.ImagesCase):
    """A squeeze-and-excitation with silu, channels last; float32 parameters."""

    hidden: int
    suite: str = "core"

    op = "squeeze_excite"
    results: ClassVar = {"fwd": ("y",), "fwd+bwd": ("y", "dx", "dw1", "db1", "dw2", "db2")}
    algorithms = _problem.SQUEEZE_EXCITE_ALGORITHMS
    layouts = ("NHWC",)
    measured: ClassVar = {"fwd": ("squeeze_excite",), "fwd+bwd": ("squeeze_excite",)}
    call_problem = SqueezeExciteProblem

    @property
    def passes(self) -> tuple[str, ...]:
        return ("fwd",) if self.suite == "serve" else ("fwd", "fwd+bwd")

    def work(self, pass_: str, item: int) -> tuple[float, float]:
        return 0.0, item * {"fwd": 2, "fwd+bwd": 5}[pass_] * self.elements

    def small(self) -> Self:
        return self.shrunk(min(self.channels, 96), min(self.batch, 4), hidden=min(self.hidden, 12))

    def __str__(self) -> str:
        return f"{super().__str__()} R={self.hidden}"

    def arrays(self, setting: base.Setting, key: Array) -> base.Arrays:
        normal, c, r = base.Normal(setting, key), self.channels, self.hidden
        parameters = {"w1": (c, r), "b1": (r,), "w2": (r, c), "b2": (c,)}
        return self.images(setting, normal) | {
            name: normal(shape, shape[0] ** -0.5, 0.0, jnp.float32) for name, shape in parameters.items()
        }

    def ours(self, pass_: str, setting: base.Setting, **choice: Any) -> base.Job:
        return _job(pass_, lambda *a: (jaxconv.squeeze_excite(*a, activation="silu", **choice),))

    def xla(self, pass_: str, setting: base.Setting) -> base.Job:
        def excite(x: Array, w1: Array, b1: Array, w2: Array, b2: Array) -> tuple[Array]:
            # As EfficientNets in Flax: 1x1 convolutions, whose parameters become x's type
            def conv(x: Array, w: Array, b: Array) -> Array:
                w, b = w[None, None].astype(x.dtype), b.astype(x.dtype)
                numbers = ("NHWC", "HWIO", "NHWC")
                return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers) + b.reshape(
                    1, 1, 1, -1
                )

            s = jax.nn.silu(conv(x.mean((1, 2), keepdims=True), w1, b1))
            return (x * jax.nn.sigmoid(conv(s, w2, b2)),)

        return _job(pass_, excite).plain

    def torch(self, pass_: str, setting: base.Setting) -> base.Job:
        import torch

        functional = torch.nn.functional

        def excite(x: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> Any:
            w1, b1, w2, b2 = (v.to(x.dtype) for v in (w1, b1, w2, b2))
            s = functional.silu(functional.linear(x.mean((1, 2)), w1.T, b1))
            return x * torch.sigmoid(functional.linear(s, w2.T, b2))[:, None, None]

        return torch_contender.layer_job(pass_, excite, _NAMES)

    @base.exact
    def reference(self, pass_: str, channels_last: bool, a: base.Arrays, y: Array) -> base.Reference:
        x, w1, b1, w2, b2 = (base.wide(a[n]) for n in _NAMES)
        pixels = tuple(range(1, x.ndim - 1))
        mean = jnp.mean(x, pixels)
        hidden, slope = base.activated("silu", base.product(mean, w1) + b1)
        gate = 1 / (1 + jnp.exp(-(base.product(hidden, w2) + b2)))
        results: base.Reference = {"y": (x * jnp.expand_dims(gate, pixels), None)}
        if pass_ == "fwd+bwd":
            dy = base.wide(a["dy"])
            dz2 = jnp.sum(dy * x, pixels) * gate * (1 - gate)
            dz1 = base.product(dz2, w2.T) * slope
            constant = base.product(dz1, w1.T) / (x.size / mean.size)
            results["dx"] = dy * jnp.expand_dims(gate, pixels) + jnp.expand_dims(constant, pixels), None
            results |= {"dw1": (base.product(mean.T, dz1), None), "db1": (jnp.sum(dz1, 0), None)}
            results |= {"dw2": (base.product(hidden.T, dz2), None), "db2": (jnp.sum(dz2, 0), None)}
        return results

    def tolerance(self, pass_: str, result: str, rounding: base.Rounding) -> float:
        # Of 16 bits XLA's mean, hidden numbers, gates and their gradients are rounded: some four roundings to a gate,
        # twice as many to a parameter's gradient.
        sums = rounding.product(max(self.channels, self.hidden, self.batch)) + rounding.sums(math.prod(self.spatial))
        return 2 * ((4 if result in ("y", "dx") else 8) * rounding.u + sums)


def _job(pass_: str, excite: Callable[..., tuple[Array]]) -> base.Job:
    return base.layer_job(pass_, excite, _NAMES, ("squeeze_excite", "squeeze_excite_backward"))


# EfficientNet-B0's: (size, channels, hidden).
_EFFICIENT_LAYERS = (
    *((112, 32, 8), (56, 96, 4), (56, 144, 6), (28, 144, 6), (28, 240, 10), (14, 240, 10), (14, 480, 20)),
    *((14, 672, 28), (7, 672, 28), (7, 1152, 48)),
)
# A ResNet-50's, RegNetY-8GF's and -32GF's, MobileNetV3's.
_EXCITED_LAYERS = (
    *(("r50", 56, 256, 16), ("r50", 28, 512, 32), ("r50", 14, 1024, 64), ("r50", 7, 2048, 128)),
    *(("regnet", 28, 448, 56), ("regnet", 14, 896, 112), ("regnet", 7, 2016, 224), ("regnet", 7, 3712, 348)),
    *(("mobilenet", 28, 120, 32), ("mobilenet", 14, 672, 168), ("mobilenet", 7, 960, 240)),
)
CASES = (
    *(SqueezeExciteCase(f"{m}.{size}.{c}", 256, c, (size, size), r) for m, size, c, r in _EXCITED_LAYERS),
    *(
        SqueezeExciteCase(f"efficientnet.{size}.{c}", 256, c, (size, size), r, suite="models")
        for size, c, r in _EFFICIENT_LAYERS
    ),
    *(
        SqueezeExciteCase(f"serve.b{batch}.{m}.{size}.{c}", batch, c, (size, size), r, suite="serve")
        for batch in (1, 8)
        for m, size, c, r in (*(("efficientnet", *layer) for layer in _EFFICIENT_LAYERS), *_EXCITED_LAYERS)
    ),
    SqueezeExciteCase("cpu.se", 8, 240, (28, 28), 10, suite="cpu"),
)

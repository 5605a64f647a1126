"""Layer-norms over the channels of each pixel, which are group-norms of rows; nothing behind them."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax.numpy as jnp
from jax import Array, lax

import jaxconv
from benchmarks import torch_contender
from benchmarks.ops import base
from benchmarks.ops.groupnorm import GroupNormCase


@dataclasses.dataclass(frozen=True)
class LayerNormCase(GroupNormCase):
    groups: int = 1

    op = "layernorm"
    algorithms = ("rows",)
    call_problem = None  # its calls are group-norms'

    activation = "none"

    @property
    def reduced(self) -> int:
        """Elements of a row."""
        return self.channels

    def small(self) -> Self:
        return self.shrunk(min(self.channels, 96))

    def __str__(self) -> str:
        return f"{base.times((self.batch, *self.spatial))} C={self.channels}"

    def ours(self, pass_: str, setting: base.Setting, **choice: Any) -> base.Job:
        return self.job(pass_, lambda *a: jaxconv.layernorm(*a, epsilon=base.EPSILON, **choice))

    def xla(self, pass_: str, setting: base.Setting) -> base.Job:
        def norm(x: Array, scale: Array, bias: Array) -> Array:
            # Flax's LayerNorm with its default use_fast_variance
            x_f32 = x.astype(jnp.float32)
            mean, square = (jnp.mean(a, -1, keepdims=True) for a in (x_f32, lax.square(x_f32)))
            var = jnp.maximum(0.0, square - lax.square(mean))
            return ((x - mean) * (lax.rsqrt(var + base.EPSILON) * scale) + bias).astype(x.dtype)

        return self.job(pass_, norm).plain

    def torch(self, pass_: str, setting: base.Setting) -> base.Job:
        import torch

        def norm(x: Any, scale: Any, bias: Any) -> Any:
            parameters = scale.to(x.dtype), bias.to(x.dtype)
            return torch.nn.functional.layer_norm(x, (self.channels,), *parameters, base.EPSILON)

        return torch_contender.layer_job(pass_, norm, ("x", "scale", "bias"))

    def mean(self, v: Array) -> Array:
        return jnp.mean(v, -1, keepdims=True)


# Of ConvNeXt-T's stages, a vision transformer of patches of 16, a language model's.
CASES = (
    LayerNormCase("convnext.56", 256, 96, (56, 56)),
    LayerNormCase("convnext.28", 256, 192, (28, 28)),
    LayerNormCase("convnext.14", 256, 384, (14, 14)),
    LayerNormCase("convnext.7", 256, 768, (7, 7)),
    LayerNormCase("vit", 64, 768, (197,)),
    LayerNormCase("lm", 8192, 1024, ()),
    LayerNormCase("cpu.ln", 32, 192, (28, 28), suite="cpu"),
)

"""Better images: super-resolution and denoising."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
from flax import nnx

from benchmarks.fleet_models.model import FIT, REGRESS, Array, Model, Size, of_linen, of_nnx


def pixel_shuffle(x: Array, scale: int) -> Array:
    """(N, H, W, C scale²) -> (N, H scale, W scale, C)."""
    n, h, w, c = x.shape
    x = x.reshape(n, h, w, scale, scale, c // scale**2)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(n, h * scale, w * scale, c // scale**2)


class EDSR(nn.Module):
    """Lim et al. 2017: no norms, scaled residuals, a pixel shuffle for each doubling."""

    features: int
    blocks: int
    doublings: int
    dtype: Any

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        def conv(x: Array, features: int) -> Array:
            return nn.Conv(features, (3, 3), dtype=self.dtype)(x)

        x = first = conv(x, self.features)
        for _ in range(self.blocks):
            x = x + 0.1 * conv(nn.relu(conv(x, self.features)), self.features)
        x = first + conv(x, self.features)
        for _ in range(self.doublings):
            x = pixel_shuffle(conv(x, 4 * self.features), 2)
        return conv(x, 3)


class DnCNN(nnx.Module):
    """Zhang et al. 2017: the noise, by 17 convolutions with batch-norms."""

    def __init__(self, features: int, depth: int, *, dtype: Any, rngs: nnx.Rngs):
        kinds = dict(dtype=dtype, rngs=rngs)
        self.first = nnx.Conv(1, features, (3, 3), **kinds)
        middle = range(depth - 2)
        self.convs = nnx.List([nnx.Conv(features, features, (3, 3), use_bias=False, **kinds) for _ in middle])
        self.norms = nnx.List([nnx.BatchNorm(features, **kinds) for _ in middle])
        self.last = nnx.Conv(features, 1, (3, 3), **kinds)

    def __call__(self, x: Array) -> Array:
        y = nnx.relu(self.first(x))
        for conv, norm in zip(self.convs, self.norms, strict=True):
            y = nnx.relu(norm(conv(y)))
        return x - self.last(y)


SUPER = Model(
    *("edsr", "super-resolution", "linen", of_linen(EDSR), "f32"),
    Size(16, (48, 48, 3), dict(features=64, blocks=16, doublings=2)),
    Size(2, (8, 8, 3), dict(features=8, blocks=2, doublings=1)),
    FIT,
)
MODELS = (
    SUPER,
    Model(
        *("dncnn", "denoising", "nnx", of_nnx(DnCNN), "bf16"),
        Size(128, (40, 40, 1), dict(features=64, depth=17)),
        Size(4, (8, 8, 1), dict(features=8, depth=4)),
        REGRESS,
    ),
    SUPER.serving("edsr_serve", 1, (180, 320, 3)),
)

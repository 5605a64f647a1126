"""Sound and speech: one axis, or a spectrogram's two."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from flax import nnx

from benchmarks.fleet_models.model import CLASSIFY, FIT, Array, Model, Size, of_linen, of_nnx


class Vocoder(nn.Module):
    """HiFi-GAN's generator (Kong et al. 2020): spectra become samples by transposed and dilated convolutions."""

    features: int
    rates: tuple[int, ...]
    filters: tuple[int, ...]
    dilations: tuple[int, ...]
    dtype: Any

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        x = nn.Conv(self.features, (7,), dtype=self.dtype)(x)
        for level, rate in enumerate(self.rates):
            features = self.features // 2 ** (level + 1)
            x = nn.leaky_relu(x, 0.1)
            x = nn.ConvTranspose(features, (2 * rate,), strides=(rate,), dtype=self.dtype)(x)
            parts = []
            for size in self.filters:
                y = x
                for dilation in self.dilations:
                    z = nn.Conv(features, (size,), kernel_dilation=dilation, dtype=self.dtype)(nn.leaky_relu(y, 0.1))
                    y = y + nn.Conv(features, (size,), dtype=self.dtype)(nn.leaky_relu(z, 0.1))
                parts.append(y)
            x = sum(parts) / len(parts)
        return jnp.tanh(nn.Conv(1, (7,), dtype=self.dtype)(nn.leaky_relu(x)))


class WaveNet(nn.Module):
    """van den Oord et al. 2016: causal dilated convolutions with gates, and what they skip is summed."""

    features: int
    skip: int
    dilations: tuple[int, ...]
    classes: int
    dtype: Any

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        conv = functools.partial(nn.Conv, padding="CAUSAL", dtype=self.dtype)
        x = conv(self.features, (2,))(x)
        skipped = 0.0
        for dilation in self.dilations:
            a = conv(self.features, (2,), kernel_dilation=dilation)(x)
            b = conv(self.features, (2,), kernel_dilation=dilation)(x)
            y = jnp.tanh(a) * nn.sigmoid(b)
            skipped = skipped + conv(self.skip, (1,))(y)
            x = x + conv(self.features, (1,))(y)
        return conv(self.classes, (1,))(nn.relu(conv(self.skip, (1,))(nn.relu(skipped))))


class ConformerBlock(nn.Module):
    """Gulati et al. 2020, without its attention: half feed-forward, convolutions with a gate, half feed-forward."""

    features: int
    filter: int
    dtype: Any

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        dense = functools.partial(nn.Dense, dtype=self.dtype)

        def forward(x: Array) -> Array:
            y = nn.LayerNorm(dtype=self.dtype)(x)
            return dense(self.features)(nn.silu(dense(4 * self.features)(y)))

        x = x + 0.5 * forward(x)
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.glu(nn.Conv(2 * self.features, (1,), dtype=self.dtype)(y))
        y = nn.Conv(self.features, (self.filter,), feature_group_count=self.features, dtype=self.dtype)(y)
        y = nn.silu(nn.BatchNorm(use_running_average=not train, dtype=self.dtype)(y))
        x = x + nn.Conv(self.features, (1,), dtype=self.dtype)(y)
        return nn.LayerNorm(dtype=self.dtype)(x + 0.5 * forward(x))


class Conformer(nn.Module):
    features: int
    blocks: int
    filter: int
    classes: int
    dtype: Any

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        x = x[..., None]  # a spectrogram is an image, until a quarter of its frames is left
        for _ in range(2):
            x = nn.relu(nn.Conv(self.features, (3, 3), strides=2, dtype=self.dtype)(x))
        x = nn.Dense(self.features, dtype=self.dtype)(x.reshape(*x.shape[:2], -1))
        for _ in range(self.blocks):
            x = ConformerBlock(self.features, self.filter, self.dtype)(x, train)
        return nn.Dense(self.classes, dtype=self.dtype)(x)


class SeparableBlock(nnx.Module):
    def __init__(self, features: int, filter: int, *, dtype: Any, rngs: nnx.Rngs):
        conv = functools.partial(nnx.Conv, features, features, use_bias=False, dtype=dtype, rngs=rngs)
        self.depthwise = conv((filter,), feature_group_count=features)
        self.pointwise = conv((1,))
        self.norm = nnx.BatchNorm(features, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return self.norm(self.pointwise(self.depthwise(x)))


class QuartzNet(nnx.Module):
    """Kriman et al. 2020: depthwise and pointwise 1-D convolutions."""

    def __init__(self, features: int, filters: tuple[int, ...], classes: int, *, dtype: Any, rngs: nnx.Rngs):
        kinds = dict(dtype=dtype, rngs=rngs)
        self.first = nnx.Conv(64, features, (33,), strides=2, use_bias=False, **kinds)
        self.first_norm = nnx.BatchNorm(features, **kinds)
        self.blocks = nnx.List([nnx.List([SeparableBlock(features, f, **kinds) for _ in range(2)]) for f in filters])
        self.last = nnx.Conv(features, classes, (1,), **kinds)

    def __call__(self, x: Array) -> Array:
        x = nnx.relu(self.first_norm(self.first(x)))
        for first, second in self.blocks:
            x = nnx.relu(x + second(nnx.relu(first(x))))
        return self.last(x)


class Spectrogram(nnx.Module):
    """Sound events: PANNs' plain network (Kong et al. 2019) with average pools."""

    def __init__(self, features: tuple[int, ...], classes: int, *, dtype: Any, rngs: nnx.Rngs):
        kinds = dict(dtype=dtype, rngs=rngs)
        pairs = [pair for a, b in zip((1, *features), features, strict=False) for pair in ((a, b), (b, b))]
        self.convs = nnx.List([nnx.Conv(a, b, (3, 3), use_bias=False, **kinds) for a, b in pairs])
        self.norms = nnx.List([nnx.BatchNorm(b, **kinds) for _, b in pairs])
        self.head = nnx.Linear(features[-1], classes, **kinds)

    def __call__(self, x: Array) -> Array:
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = nnx.relu(norm(conv(x)))
            x = nnx.avg_pool(x, (2, 2), (2, 2)) if i % 2 else x
        return self.head(x.mean((1, 2)))


VOCODER = Model(
    *("vocoder", "vocoder", "linen", of_linen(Vocoder), "f32"),
    Size(16, (32, 80), dict(features=256, rates=(8, 8, 2, 2), filters=(3, 7), dilations=(1, 3, 5))),
    Size(2, (8, 10), dict(features=16, rates=(4, 2), filters=(3,), dilations=(1, 3))),
    FIT,
)
MODELS = (
    VOCODER,
    Model(
        *("wavenet", "wavenet", "linen", of_linen(WaveNet), "f32"),
        Size(4, (8192, 1), dict(features=64, skip=128, dilations=tuple(2**i for i in range(9)) * 2, classes=256)),
        Size(2, (64, 1), dict(features=8, skip=8, dilations=(1, 2, 4), classes=8)),
        CLASSIFY,
    ),
    Model(
        *("conformer", "speech", "linen", of_linen(Conformer), "bf16"),
        Size(16, (1024, 80), dict(features=256, blocks=6, filter=31, classes=128)),
        Size(2, (32, 16), dict(features=8, blocks=1, filter=7, classes=5)),
        CLASSIFY,
    ),
    Model(
        *("quartznet", "speech-separable", "nnx", of_nnx(QuartzNet), "f32"),
        Size(16, (1000, 64), dict(features=256, filters=(33, 39, 51, 63), classes=29)),
        Size(2, (64, 64), dict(features=8, filters=(5, 7), classes=5)),
        CLASSIFY,
    ),
    Model(
        *("sound_events", "sound-events", "nnx", of_nnx(Spectrogram), "bf16"),
        Size(32, (256, 64, 1), dict(features=(64, 128, 256, 512), classes=527)),
        Size(2, (16, 8, 1), dict(features=(4, 8), classes=5)),
        CLASSIFY,
    ),
    VOCODER.serving("vocoder_serve", 1, (128, 80)),
)

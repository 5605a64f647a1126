"""Detection: where things are, and of which class."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.fleet_models.model import DETECT, FIT, Array, Model, Size, heads, of_linen, of_nnx


class Stage(nnx.Module):
    """Halves the pixels: two 3x3 convolutions with batch-norms, and a shortcut."""

    def __init__(self, features: int, out: int, *, dtype: Any, rngs: nnx.Rngs):
        conv = functools.partial(nnx.Conv, use_bias=False, dtype=dtype, rngs=rngs)
        norm = functools.partial(nnx.BatchNorm, out, dtype=dtype, rngs=rngs)
        self.first, self.first_norm = conv(features, out, (3, 3), strides=2), norm()
        self.second, self.second_norm = conv(out, out, (3, 3)), norm()
        self.shortcut = conv(features, out, (1, 1), strides=2)

    def __call__(self, x: Array) -> Array:
        y = nnx.relu(self.first_norm(self.first(x)))
        return nnx.relu(self.second_norm(self.second(y)) + self.shortcut(x))


class Head(nnx.Module):
    """Convolutions with group-norms, the same for all levels."""

    def __init__(self, features: int, depth: int, out: int, *, dtype: Any, rngs: nnx.Rngs):
        groups = min(32, features // 4)
        kinds = dict(dtype=dtype, rngs=rngs)
        self.convs = nnx.List([nnx.Conv(features, features, (3, 3), **kinds) for _ in range(depth)])
        self.norms = nnx.List([nnx.GroupNorm(features, groups, **kinds) for _ in range(depth)])
        self.last = nnx.Conv(features, out, (3, 3), **kinds)

    def __call__(self, x: Array) -> Array:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = nnx.relu(norm(conv(x)))
        return self.last(x)


class FeaturePyramid(nnx.Module):
    """Lin et al. 2017, "Focal Loss for Dense Object Detection" and FCOS's heads: three levels."""

    def __init__(self, width: int, features: int, depth: int, classes: int, *, dtype: Any, rngs: nnx.Rngs):
        kinds = dict(dtype=dtype, rngs=rngs)
        widths = [width * 2**i for i in range(5)]
        self.stem = nnx.Conv(3, width, (3, 3), strides=2, **kinds)
        self.stages = nnx.List([Stage(a, b, **kinds) for a, b in itertools.pairwise(widths)])
        self.lateral = nnx.List([nnx.Conv(w, features, (1, 1), **kinds) for w in widths[2:]])
        self.smooth = nnx.List([nnx.Conv(features, features, (3, 3), **kinds) for _ in range(3)])
        self.classes = Head(features, depth, classes, **kinds)
        self.boxes = Head(features, depth, 4, **kinds)

    def __call__(self, x: Array) -> tuple[list[Array], list[Array]]:
        x, levels = nnx.relu(self.stem(x)), []
        for stage in self.stages:
            x = stage(x)
            levels.append(x)
        levels = [conv(level) for conv, level in zip(self.lateral, levels[1:], strict=True)]
        for i in (1, 0):
            levels[i] = levels[i] + jax.image.resize(levels[i + 1], levels[i].shape, "nearest")
        levels = [conv(level) for conv, level in zip(self.smooth, levels, strict=True)]
        return [self.classes(level) for level in levels], [self.boxes(level) for level in levels]


class ConvNormSilu(nn.Module):
    features: int
    filter: int
    stride: int
    dtype: Any

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        conv = nn.Conv(self.features, (self.filter,) * 2, self.stride, use_bias=False, dtype=self.dtype)
        return nn.silu(
            nn.BatchNorm(use_running_average=not train, momentum=0.97, epsilon=1e-3, dtype=self.dtype)(conv(x))
        )


class Yolo(nn.Module):
    """One stage with silu: cross-stage partial blocks, a head of 1x1 convolutions a level, as in YOLOv5."""

    features: int
    blocks: tuple[int, ...]
    classes: int
    dtype: Any

    @nn.compact
    def __call__(self, x: Array, train: bool) -> tuple[list[Array], list[Array]]:
        def conv(x: Array, features: int, filter: int = 1, stride: int = 1) -> Array:
            return ConvNormSilu(features, filter, stride, self.dtype)(x, train)

        def partial(x: Array, features: int, blocks: int) -> Array:
            y, kept = conv(x, features // 2), conv(x, features // 2)
            for _ in range(blocks):
                y = y + conv(conv(y, features // 2), features // 2, 3)
            return conv(jnp.concatenate([y, kept], -1), features)

        x, levels = conv(x, self.features, 6, 2), []
        for stage, blocks in enumerate(self.blocks):
            features = self.features * 2 ** (stage + 1)
            x = partial(conv(x, features, 3, 2), features, blocks)
            levels.append(x)
        levels = levels[-3:]
        for i in (-2, -3):
            up = jnp.repeat(jnp.repeat(conv(levels[i + 1], levels[i].shape[-1]), 2, 1), 2, 2)
            levels[i] = partial(jnp.concatenate([up, levels[i]], -1), levels[i].shape[-1], 1)
        last = functools.partial(nn.Conv, kernel_size=(1, 1), dtype=self.dtype)
        return [last(3 * self.classes)(level) for level in levels], [last(3 * 4)(level) for level in levels]


GOAL = heads(DETECT, FIT)
MODELS = (
    Model(
        *("feature_pyramid", "detection", "nnx", of_nnx(FeaturePyramid), "f32"),
        Size(8, (256, 256, 3), dict(width=32, features=256, depth=4, classes=80)),
        Size(2, (32, 32, 3), dict(width=4, features=8, depth=1, classes=5)),
        GOAL,
    ),
    Model(
        *("yolo", "one-stage-detection", "linen", of_linen(Yolo), "bf16"),
        Size(32, (320, 320, 3), dict(features=32, blocks=(1, 2, 3, 1), classes=80)),
        Size(2, (32, 32, 3), dict(features=4, blocks=(1, 1, 1), classes=5)),
        GOAL,
    ),
)

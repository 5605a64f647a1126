"""Images and their classes."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks import models
from benchmarks.fleet_models.model import CLASSIFY, Array, Model, Size, of_layers, of_linen, of_nnx


class DenseNet(nn.Module):
    """Huang et al. 2016, "Densely Connected Convolutional Networks"."""

    growth: int
    blocks: tuple[int, ...]
    classes: int
    dtype: Any

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)

        def normalised(x: Array) -> Array:
            return nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9, dtype=self.dtype)(x))

        x = normalised(conv(2 * self.growth, (7, 7), strides=2)(x))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for block, layers in enumerate(self.blocks):
            if block:
                x = nn.avg_pool(conv(x.shape[-1] // 2, (1, 1))(normalised(x)), (2, 2), (2, 2))
            for _ in range(layers):
                y = conv(4 * self.growth, (1, 1))(normalised(x))
                x = jnp.concatenate([x, conv(self.growth, (3, 3))(normalised(y))], -1)
        return nn.Dense(self.classes, dtype=self.dtype)(normalised(x).mean((1, 2)))


class VGG(nn.Module):
    """Simonyan and Zisserman 2014: plain convolutions with biases, no norm."""

    stages: tuple[tuple[int, int], ...]  # features, convolutions
    hidden: int
    classes: int
    dtype: Any

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        for features, count in self.stages:
            for _ in range(count):
                x = nn.relu(nn.Conv(features, (3, 3), dtype=self.dtype)(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Dense(self.hidden, dtype=self.dtype)(x.mean((1, 2))))
        return nn.Dense(self.classes, dtype=self.dtype)(x)


class MobileBlock(nnx.Module):
    """MobileNetV3's: an inverted residual with squeeze-and-excitation and hard-swish."""

    def __init__(self, features: int, expanded: int, out: int, filter: int, stride: int, *, dtype: Any, rngs: nnx.Rngs):
        conv = functools.partial(nnx.Conv, use_bias=False, dtype=dtype, rngs=rngs)
        norm = functools.partial(nnx.BatchNorm, momentum=0.99, epsilon=1e-3, dtype=dtype, rngs=rngs)
        self.expand, self.expand_norm = conv(features, expanded, (1, 1)), norm(expanded)
        self.depthwise = conv(expanded, expanded, (filter,) * 2, stride, feature_group_count=expanded)
        self.depthwise_norm = norm(expanded)
        self.squeeze = nnx.Conv(expanded, expanded // 4, (1, 1), dtype=dtype, rngs=rngs)
        self.excite = nnx.Conv(expanded // 4, expanded, (1, 1), dtype=dtype, rngs=rngs)
        self.project, self.project_norm = conv(expanded, out, (1, 1)), norm(out)

    def __call__(self, x: Array) -> Array:
        y = jax.nn.hard_swish(self.expand_norm(self.expand(x)))
        y = jax.nn.hard_swish(self.depthwise_norm(self.depthwise(y)))
        scale = jax.nn.relu(self.squeeze(y.mean((1, 2), keepdims=True)))
        y = self.project_norm(self.project(y * jax.nn.hard_sigmoid(self.excite(scale))))
        return x + y if x.shape == y.shape else y


class MobileNet(nnx.Module):
    def __init__(self, stages: tuple[tuple[int, ...], ...], head: int, classes: int, *, dtype: Any, rngs: nnx.Rngs):
        self.stem = nnx.Conv(3, 16, (3, 3), 2, use_bias=False, dtype=dtype, rngs=rngs)
        self.stem_norm = nnx.BatchNorm(16, momentum=0.99, dtype=dtype, rngs=rngs)
        widths = (16, *(out for _, out, _, _ in stages))
        blocks = zip(widths, stages, strict=False)
        self.blocks = nnx.List(
            [MobileBlock(width, *stage, dtype=dtype, rngs=rngs) for width, stage in blocks]  # expanded, out, ...
        )
        self.last = nnx.Conv(widths[-1], head, (1, 1), use_bias=False, dtype=dtype, rngs=rngs)
        self.last_norm = nnx.BatchNorm(head, momentum=0.99, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(head, classes, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        x = jax.nn.hard_swish(self.stem_norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        return self.head(jax.nn.hard_swish(self.last_norm(self.last(x))).mean((1, 2)))


class ConvNeXtBlock(nnx.Module):
    def __init__(self, features: int, *, dtype: Any, rngs: nnx.Rngs):
        self.depthwise = nnx.Conv(features, features, (7, 7), feature_group_count=features, dtype=dtype, rngs=rngs)
        self.norm = nnx.LayerNorm(features, epsilon=1e-6, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(features, 4 * features, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * features, features, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return x + self.down(jax.nn.gelu(self.up(self.norm(self.depthwise(x)))))


class ConvNeXt(nnx.Module):
    """Without the layer scale; the first convolution and each reduction are patches."""

    def __init__(self, features: int, blocks: tuple[int, ...], classes: int, *, dtype: Any, rngs: nnx.Rngs):
        make = functools.partial(nnx.Conv, padding="VALID", dtype=dtype, rngs=rngs)
        widths = [3, *(features * 2**stage for stage in range(len(blocks)))]
        sizes = [4, *[2] * (len(blocks) - 1)]
        pairs = list(zip(widths, widths[1:], sizes, strict=False))
        self.reductions = nnx.List([make(a, b, (size,) * 2, strides=size) for a, b, size in pairs])
        self.norms = nnx.List([nnx.LayerNorm(b, epsilon=1e-6, dtype=dtype, rngs=rngs) for _, b, _ in pairs])
        self.stages = nnx.List(
            [
                nnx.List([ConvNeXtBlock(b, dtype=dtype, rngs=rngs) for _ in range(count)])
                for (_, b, _), count in zip(pairs, blocks, strict=True)
            ]
        )
        self.head = nnx.Linear(widths[-1], classes, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        for reduce, norm, blocks in zip(self.reductions, self.norms, self.stages, strict=True):
            x = norm(reduce(x))
            for block in blocks:
                x = block(x)
        return self.head(x.mean((1, 2)))


SMALL = dict(small=True)
# expanded, out, filter, stride
MOBILE = ((64, 24, 3, 2), (72, 24, 3, 1), (72, 40, 5, 2), (120, 40, 5, 1), (240, 80, 3, 2), (200, 80, 3, 1))
MOBILE += ((480, 112, 3, 1), (672, 112, 3, 1), (672, 160, 5, 2), (960, 160, 5, 1))

RESNET18 = Model(
    *("resnet18_32", "classification-32", "linen", of_layers(models.resnet18_32), "f32"),
    *(Size(256, (32, 32, 3)), Size(4, (8, 8, 3), SMALL), CLASSIFY),
)
RESNET18_224 = Model(
    *("resnet18_224", "classification-224", "linen", of_layers(models.ResNet18), "bf16"),
    Size(64, (224, 224, 3), dict(features=64, blocks=(2, 2, 2, 2), stem=7, classes=1000, fused=False)),
    Size(2, (32, 32, 3), dict(features=8, blocks=(1, 1), stem=7, classes=10, fused=False)),
    CLASSIFY,
)
RESNET50 = Model(
    *("resnet50_224", "classification-224", "linen", of_layers(models.resnet50), "f32"),
    *(Size(32, (224, 224, 3)), Size(2, (32, 32, 3), SMALL), CLASSIFY),
)
MOBILENET_V2 = Model(
    *("mobilenet_v2", "mobile", "linen", of_layers(models.mobilenet_v2), "bf16"),
    *(Size(64, (224, 224, 3)), Size(2, (32, 32, 3), SMALL), CLASSIFY),
)
MODELS = (
    RESNET18,
    Model(
        *("resnet18_32_small_batch", "classification-32-small-batch", "linen", of_layers(models.resnet18_32), "f32"),
        *(Size(16, (32, 32, 3)), RESNET18.small, CLASSIFY),
    ),
    RESNET18_224,
    RESNET50,
    Model(
        *("densenet121", "densely-connected", "linen", of_linen(DenseNet), "bf16"),
        Size(256, (224, 224, 3), dict(growth=32, blocks=(6, 12, 24, 16), classes=1000)),
        Size(2, (32, 32, 3), dict(growth=8, blocks=(2, 2), classes=10)),
        CLASSIFY,
    ),
    Model(
        *("vgg16", "plain-convolutions", "linen", of_linen(VGG), "f32"),
        Size(
            32, (224, 224, 3), dict(stages=((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)), hidden=512, classes=1000)
        ),
        Size(2, (16, 16, 3), dict(stages=((8, 1), (16, 2)), hidden=16, classes=10)),
        CLASSIFY,
    ),
    Model(
        *("mobilenet_v3", "mobile", "nnx", of_nnx(MobileNet), "f32"),
        Size(64, (224, 224, 3), dict(stages=MOBILE, head=960, classes=1000)),
        Size(2, (32, 32, 3), dict(stages=((32, 24, 3, 2), (48, 24, 5, 1)), head=32, classes=10)),
        CLASSIFY,
    ),
    Model(
        *("convnext", "convnext", "nnx", of_nnx(ConvNeXt), "bf16"),
        Size(64, (224, 224, 3), dict(features=96, blocks=(3, 3, 9, 3), classes=1000)),
        Size(2, (16, 16, 3), dict(features=8, blocks=(1, 1), classes=10)),
        CLASSIFY,
    ),
    RESNET18.serving("resnet18_32_serve", 1, (32, 32, 3)),
    RESNET50.serving("resnet50_serve", 64, (224, 224, 3), "bf16"),
    MOBILENET_V2.serving("mobilenet_v2_serve", 8, (224, 224, 3), "f32"),
)

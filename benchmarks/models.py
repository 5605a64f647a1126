"""Models in Flax, as its users write them, with the module that the layers come from as a parameter.

`layers` is `flax.linen` or `jaxconv.linen`, and the parameters are the same either way. With `fused` the activations
and residual adds are arguments of jaxconv's layers; without it the models hold nothing but Flax's own arguments.

They classify images, unless they say otherwise. float32 parameters, computed in `dtype`; images are (N, H, W, 3),
unless they say otherwise.
`small` keeps each kind of layer and little else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

Array = jax.Array


def _normalised(module: Any, norm: Any, x: Array, activation: str, residual: Array | None = None) -> Array:
    """activation(norm(x) + residual), in one call or in three."""
    if module.fused:
        return norm(activation=activation)(x, residual=residual)
    y = norm()(x)
    return getattr(nn, activation)(y if residual is None else residual + y)


# ----------------------------------------------------------------------------------------------------------------------
# ResNet-50 (He et al. 2015, "Deep Residual Learning for Image Recognition"), the stride in the 3x3 convolution


class Bottleneck(nn.Module):
    layers: Any
    features: int
    stride: int
    dtype: Any
    fused: bool
    groups: int = 1  # ResNeXt's: of 4 channels in the first stage

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        conv = functools.partial(self.layers.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(
            self.layers.BatchNorm, use_running_average=not train, momentum=0.9, epsilon=1e-5, dtype=self.dtype
        )
        width = self.features if self.groups == 1 else 2 * self.features
        y = conv(width, (1, 1))(x)
        y = _normalised(self, norm, y, "relu")
        y = conv(width, (3, 3), strides=self.stride, feature_group_count=self.groups)(y)
        y = _normalised(self, norm, y, "relu")
        y = conv(4 * self.features, (1, 1))(y)
        if x.shape != y.shape:
            x = conv(4 * self.features, (1, 1), strides=self.stride, name="shortcut")(x)
            x = norm(name="shortcut_norm")(x)
        return _normalised(self, functools.partial(norm, scale_init=nn.initializers.zeros), y, "relu", x)


class ResNet(nn.Module):
    layers: Any
    blocks: tuple[int, ...]  # in each stage
    features: int
    classes: int
    dtype: Any
    fused: bool
    groups: int = 1

    @nn.compact
    def __call__(self, x: Array, train: bool = True) -> Array:
        layers = self.layers
        norm = functools.partial(
            layers.BatchNorm, use_running_average=not train, momentum=0.9, epsilon=1e-5, dtype=self.dtype
        )
        x = layers.Conv(self.features, (7, 7), strides=2, padding=3, use_bias=False, dtype=self.dtype)(x)
        x = _normalised(self, norm, x, "relu")
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for stage, blocks in enumerate(self.blocks):
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                x = Bottleneck(layers, self.features * 2**stage, stride, self.dtype, self.fused, self.groups)(x, train)
        return layers.Dense(self.classes, dtype=self.dtype)(x.mean((1, 2)))


# ----------------------------------------------------------------------------------------------------------------------
# ResNet-18, of small images: a 3x3 convolution in front, no pooling. `stem` 7: of large ones.


class BasicBlock(nn.Module):
    layers: Any
    features: int
    stride: int
    dtype: Any
    fused: bool

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        conv = functools.partial(self.layers.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(self.layers.BatchNorm, use_running_average=not train, momentum=0.9, dtype=self.dtype)
        y = conv(self.features, (3, 3), strides=self.stride)(x)
        y = _normalised(self, norm, y, "relu")
        y = conv(self.features, (3, 3))(y)
        last = norm(activation="relu") if self.fused else norm()  # here, because Flax numbers what is made
        y = y if self.fused else last(y)
        if x.shape != y.shape:
            x = norm()(conv(self.features, (1, 1), strides=self.stride)(x))
        return last(y, residual=x) if self.fused else nn.relu(x + y)


class ResNet18(nn.Module):
    layers: Any
    blocks: tuple[int, ...]  # in each stage
    features: int
    classes: int
    dtype: Any
    fused: bool
    stem: int = 3

    @nn.compact
    def __call__(self, x: Array, train: bool = True) -> Array:
        layers, large = self.layers, self.stem == 7
        norm = functools.partial(layers.BatchNorm, use_running_average=not train, momentum=0.9, dtype=self.dtype)
        stride = 2 if large else 1
        x = layers.Conv(self.features, (self.stem,) * 2, stride, use_bias=False, dtype=self.dtype)(x)
        x = _normalised(self, norm, x, "relu")
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME") if large else x
        for stage, blocks in enumerate(self.blocks):
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                x = BasicBlock(layers, self.features * 2**stage, stride, self.dtype, self.fused)(x, train)
        return layers.Dense(self.classes, dtype=self.dtype)(x.mean((1, 2)))


# ----------------------------------------------------------------------------------------------------------------------
# ConvNeXt-T (Liu et al. 2022, "A ConvNet for the 2020s"), without stochastic depth


class ConvNeXtBlock(nn.Module):
    layers: Any
    dtype: Any
    fused: bool

    @nn.compact
    def __call__(self, x: Array) -> Array:
        features = x.shape[-1]
        dense = functools.partial(self.layers.Dense, dtype=self.dtype)
        y = self.layers.Conv(features, (7, 7), feature_group_count=features, dtype=self.dtype)(x)
        y = self.layers.LayerNorm(epsilon=1e-6, dtype=self.dtype)(y)
        y = dense(4 * features, activation="gelu")(y) if self.fused else nn.gelu(dense(4 * features)(y))
        y = dense(features)(y)
        gamma = self.param("gamma", nn.initializers.constant(1e-6), (features,))
        return x + gamma.astype(y.dtype) * y


class ConvNeXt(nn.Module):
    layers: Any
    blocks: tuple[int, ...]
    features: int
    classes: int
    dtype: Any
    fused: bool

    @nn.compact
    def __call__(self, x: Array, train: bool = True) -> Array:
        layers = self.layers
        norm = functools.partial(layers.LayerNorm, epsilon=1e-6, dtype=self.dtype)
        for stage, blocks in enumerate(self.blocks):
            if stage:
                x = norm()(x)
            size = 2 if stage else 4
            x = layers.Conv(self.features * 2**stage, (size, size), strides=size, padding="VALID", dtype=self.dtype)(x)
            if not stage:
                x = norm()(x)
            for _ in range(blocks):
                x = ConvNeXtBlock(layers, self.dtype, self.fused)(x)
        return layers.Dense(self.classes, dtype=self.dtype)(norm()(x.mean((1, 2))))


# ----------------------------------------------------------------------------------------------------------------------
# A 3-D U-Net (Cicek et al. 2016, "3D U-Net: Learning Dense Volumetric Segmentation"): 32 to 256 channels. It takes
# volumes (N, D, H, W, 1), and gives scores for each voxel.


class UNet3D(nn.Module):
    layers: Any
    features: tuple[int, ...]  # of each level
    classes: int
    dtype: Any
    fused: bool

    @nn.compact
    def __call__(self, x: Array, train: bool = True) -> Array:
        layers = self.layers
        norm = functools.partial(layers.BatchNorm, use_running_average=not train, momentum=0.9, dtype=self.dtype)

        def twice(x: Array, features: int) -> Array:
            for _ in range(2):
                x = layers.Conv(features, (3, 3, 3), use_bias=False, dtype=self.dtype)(x)
                x = _normalised(self, norm, x, "relu")
            return x

        skipped = []
        for features in self.features[:-1]:
            x = twice(x, features)
            skipped.append(x)
            x = nn.max_pool(x, (2, 2, 2), strides=(2, 2, 2))
        x = twice(x, self.features[-1])
        for features, skip in zip(self.features[-2::-1], skipped[::-1], strict=True):
            x = layers.ConvTranspose(features, (2, 2, 2), strides=(2, 2, 2), dtype=self.dtype)(x)
            x = twice(jnp.concatenate([skip, x], -1), features)
        return layers.Conv(self.classes, (1, 1, 1), dtype=self.dtype)(x)


# ----------------------------------------------------------------------------------------------------------------------
# A DDPM's U-Net (Ho et al. 2020, "Denoising Diffusion Probabilistic Models"), without attention: 128 to 256 channels,
# GroupNorm and silu. It takes (images, times), and gives the noise in the images.


def _group_normalised(layers: Any, x: Array, dtype: Any, fused: bool) -> Array:
    norm = functools.partial(layers.GroupNorm, min(32, x.shape[-1] // 4), dtype=dtype)
    return norm(activation="silu")(x) if fused else nn.silu(norm()(x))


class TimedBlock(nn.Module):
    layers: Any
    features: int
    dtype: Any
    fused: bool

    @nn.compact
    def __call__(self, x: Array, time: Array) -> Array:
        conv = functools.partial(self.layers.Conv, self.features, dtype=self.dtype)

        def normalised(x: Array) -> Array:
            return _group_normalised(self.layers, x, self.dtype, self.fused)

        y = conv((3, 3))(normalised(x))
        y = y + self.layers.Dense(self.features, dtype=self.dtype)(nn.silu(time))[:, None, None]
        y = conv((3, 3))(normalised(y))
        return y + (x if x.shape == y.shape else conv((1, 1), name="shortcut")(x))


class DDPM(nn.Module):
    layers: Any
    features: tuple[int, ...]  # of each level
    blocks: int  # a level
    dtype: Any
    fused: bool

    @nn.compact
    def __call__(self, x: tuple[Array, Array], train: bool = True) -> Array:
        layers, (images, times) = self.layers, x
        dense = functools.partial(layers.Dense, 4 * self.features[0], dtype=self.dtype)
        half = self.features[0] // 2
        angles = times[:, None] * jnp.exp(-jnp.arange(half) * (jnp.log(10000.0) / half))
        embedded = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        time = dense(activation="silu")(embedded) if self.fused else nn.silu(dense()(embedded))
        time = dense()(time)
        y = layers.Conv(self.features[0], (3, 3), dtype=self.dtype)(images)
        skipped = [y]
        for level, features in enumerate(self.features):
            if level:
                y = layers.Conv(y.shape[-1], (3, 3), strides=2, dtype=self.dtype)(y)
                skipped.append(y)
            for _ in range(self.blocks):
                y = TimedBlock(layers, features, self.dtype, self.fused)(y, time)
                skipped.append(y)
        for _ in range(2):
            y = TimedBlock(layers, self.features[-1], self.dtype, self.fused)(y, time)
        for level, features in enumerate(self.features[::-1]):
            if level:
                y = jax.image.resize(y, (len(y), 2 * y.shape[1], 2 * y.shape[2], y.shape[3]), "nearest")
                y = layers.Conv(y.shape[-1], (3, 3), dtype=self.dtype)(y)
            for _ in range(self.blocks + 1):
                y = TimedBlock(layers, features, self.dtype, self.fused)(jnp.concatenate([y, skipped.pop()], -1), time)
        y = _group_normalised(layers, y, self.dtype, self.fused)
        return layers.Conv(3, (3, 3), dtype=self.dtype)(y)


# ----------------------------------------------------------------------------------------------------------------------
# MobileNetV2 (Sandler et al. 2018, "Inverted Residuals and Linear Bottlenecks"), without dropout


class InvertedResidual(nn.Module):
    layers: Any
    expansion: int
    features: int
    stride: int
    dtype: Any
    fused: bool

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        conv = functools.partial(self.layers.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(self.layers.BatchNorm, use_running_average=not train, momentum=0.9, dtype=self.dtype)
        y, hidden = x, self.expansion * x.shape[-1]
        if self.expansion > 1:
            y = _normalised(self, norm, conv(hidden, (1, 1))(y), "relu6")
        y = conv(hidden, (3, 3), strides=self.stride, feature_group_count=hidden)(y)
        y = _normalised(self, norm, y, "relu6")
        y = conv(self.features, (1, 1))(y)
        if self.fused and x.shape == y.shape:
            return norm()(y, residual=x)
        y = norm()(y)
        return x + y if x.shape == y.shape else y


class MobileNetV2(nn.Module):
    layers: Any
    stages: tuple[tuple[int, int, int, int], ...]  # expansion, features, blocks, stride of the first
    head: int
    classes: int
    dtype: Any
    fused: bool

    @nn.compact
    def __call__(self, x: Array, train: bool = True) -> Array:
        conv = functools.partial(self.layers.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(self.layers.BatchNorm, use_running_average=not train, momentum=0.9, dtype=self.dtype)
        x = _normalised(self, norm, conv(32, (3, 3), strides=2)(x), "relu6")
        for expansion, features, blocks, stride in self.stages:
            for block in range(blocks):
                s = 1 if block else stride
                x = InvertedResidual(self.layers, expansion, features, s, self.dtype, self.fused)(x, train)
        x = _normalised(self, norm, conv(self.head, (1, 1))(x), "relu6")
        return self.layers.Dense(self.classes, dtype=self.dtype)(x.mean((1, 2)))


# ----------------------------------------------------------------------------------------------------------------------
# EfficientNet-B0 (Tan and Le 2019, "EfficientNet: Rethinking Model Scaling"), without dropout and stochastic depth


class SqueezedResidual(nn.Module):
    """An inverted residual whose hidden channels are scaled by what their means say (squeeze and excite)."""

    layers: Any
    expansion: int
    features: int
    size: int  # of the depthwise filter
    stride: int
    dtype: Any
    fused: bool

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        conv = functools.partial(self.layers.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(self.layers.BatchNorm, use_running_average=not train, momentum=0.99, dtype=self.dtype)
        y, hidden = x, self.expansion * x.shape[-1]
        if self.expansion > 1:
            y = _normalised(self, norm, conv(hidden, (1, 1))(y), "silu")
        y = conv(hidden, (self.size, self.size), strides=self.stride, feature_group_count=hidden)(y)
        y = _normalised(self, norm, y, "silu")
        scale = nn.silu(
            self.layers.Conv(max(1, x.shape[-1] // 4), (1, 1), dtype=self.dtype)(y.mean((1, 2), keepdims=True))
        )
        y = y * nn.sigmoid(self.layers.Conv(hidden, (1, 1), dtype=self.dtype)(scale))
        y = norm()(conv(self.features, (1, 1))(y))
        return x + y if x.shape == y.shape else y


class EfficientNet(nn.Module):
    layers: Any
    stages: tuple[tuple[int, int, int, int, int], ...]  # expansion, features, blocks, stride of the first, filter
    head: int
    classes: int
    dtype: Any
    fused: bool

    @nn.compact
    def __call__(self, x: Array, train: bool = True) -> Array:
        conv = functools.partial(self.layers.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(self.layers.BatchNorm, use_running_average=not train, momentum=0.99, dtype=self.dtype)
        x = _normalised(self, norm, conv(32, (3, 3), strides=2)(x), "silu")
        for expansion, features, blocks, stride, size in self.stages:
            for block in range(blocks):
                s = 1 if block else stride
                x = SqueezedResidual(self.layers, expansion, features, size, s, self.dtype, self.fused)(x, train)
        x = _normalised(self, norm, conv(self.head, (1, 1))(x), "silu")
        return self.layers.Dense(self.classes, dtype=self.dtype)(x.mean((1, 2)))


# ----------------------------------------------------------------------------------------------------------------------
# IMPALA's deep network (Espeholt et al. 2018, "IMPALA: Scalable Distributed Deep-RL"). It takes the last four pictures
# of a game, (N, H, W, 4), and gives scores for each action, and a value.


class Impala(nn.Module):
    layers: Any
    features: tuple[int, ...]  # of each level
    actions: int
    dtype: Any
    fused: bool

    @nn.compact
    def __call__(self, x: Array, train: bool = True) -> tuple[Array, Array]:
        conv = functools.partial(self.layers.Conv, dtype=self.dtype)
        dense = functools.partial(self.layers.Dense, dtype=self.dtype)

        def activated(layer: Any, x: Array) -> Array:
            return layer(activation="relu")(x) if self.fused else nn.relu(layer()(x))

        for features in self.features:
            x = nn.max_pool(conv(features, (3, 3))(x), (3, 3), (2, 2), "SAME")
            for _ in range(2):
                y = activated(functools.partial(conv, features, (3, 3)), nn.relu(x))
                x = x + conv(features, (3, 3))(y)
        x = nn.relu(x).reshape(len(x), -1)
        x = activated(functools.partial(dense, 256), x)
        return dense(self.actions)(x), dense(1)(x)


# ----------------------------------------------------------------------------------------------------------------------


def resnet50(layers: Any, dtype: Any = jnp.bfloat16, *, fused: bool = False, small: bool = False) -> nn.Module:
    blocks, features, classes = ((1, 2), 8, 10) if small else ((3, 4, 6, 3), 64, 1000)
    return ResNet(layers, blocks, features, classes, dtype, fused)


def resnet18_32(layers: Any, dtype: Any = jnp.float32, *, fused: bool = False, small: bool = False) -> nn.Module:
    blocks, features = ((1, 1), 8) if small else ((2, 2, 2, 2), 64)
    return ResNet18(layers, blocks, features, 10, dtype, fused)


def convnext_t(layers: Any, dtype: Any = jnp.bfloat16, *, fused: bool = False, small: bool = False) -> nn.Module:
    blocks, features, classes = ((1, 1), 8, 10) if small else ((3, 3, 9, 3), 96, 1000)
    return ConvNeXt(layers, blocks, features, classes, dtype, fused)


def resnext50(layers: Any, dtype: Any = jnp.bfloat16, *, fused: bool = False, small: bool = False) -> nn.Module:
    blocks, features, classes, groups = ((1, 2), 8, 10, 4) if small else ((3, 4, 6, 3), 64, 1000, 32)
    return ResNet(layers, blocks, features, classes, dtype, fused, groups)


def unet3d(layers: Any, dtype: Any = jnp.bfloat16, *, fused: bool = False, small: bool = False) -> nn.Module:
    return UNet3D(layers, (4, 8) if small else (32, 64, 128, 256), 3, dtype, fused)


def ddpm(layers: Any, dtype: Any = jnp.bfloat16, *, fused: bool = False, small: bool = False) -> nn.Module:
    features, blocks = ((8, 16), 1) if small else ((128, 256, 256), 2)
    return DDPM(layers, features, blocks, dtype, fused)


def mobilenet_v2(layers: Any, dtype: Any = jnp.bfloat16, *, fused: bool = False, small: bool = False) -> nn.Module:
    stages: tuple[tuple[int, int, int, int], ...] = ((1, 8, 1, 1), (6, 16, 2, 2))
    if not small:
        stages = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2))
        stages += ((6, 320, 1, 1),)
    return MobileNetV2(layers, stages, *((64, 10) if small else (1280, 1000)), dtype, fused)


def efficientnet_b0(layers: Any, dtype: Any = jnp.bfloat16, *, fused: bool = False, small: bool = False) -> nn.Module:
    stages: tuple[tuple[int, int, int, int, int], ...] = ((1, 8, 1, 1, 3), (6, 16, 2, 2, 5))
    if not small:
        stages = ((1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3), (6, 112, 3, 1, 5))
        stages += ((6, 192, 4, 2, 5), (6, 320, 1, 1, 3))
    return EfficientNet(layers, stages, *((64, 10) if small else (1280, 1000)), dtype, fused)


def impala(layers: Any, dtype: Any = jnp.float32, *, fused: bool = False, small: bool = False) -> nn.Module:
    features, actions = ((4, 8), 5) if small else ((16, 32, 32), 15)
    return Impala(layers, features, actions, dtype, fused)


MODELS: dict[str, Callable[..., nn.Module]] = {
    "resnet50": resnet50,
    "convnext_t": convnext_t,
    "mobilenet_v2": mobilenet_v2,
}
# Those that `infer` takes.
SERVED: dict[str, Callable[..., nn.Module]] = {**MODELS, "efficientnet_b0": efficientnet_b0}

"""Volumes and videos: three axes."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn

from benchmarks.fleet_models.model import CLASSIFY, Array, Model, Size, of_linen
from benchmarks.fleet_models.segmentation import UNet, instance_norm


class SplitConv(nn.Module):
    """A 3-D convolution in two, of the pixels and of time: R(2+1)D, Tran et al. 2018."""

    features: int
    stride: int
    dtype: Any

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, dtype=self.dtype)
        between = (27 * x.shape[-1] * self.features) // (9 * x.shape[-1] + 3 * self.features)
        x = nn.relu(norm()(conv(between, (1, 3, 3), strides=(1, self.stride, self.stride))(x)))
        return norm()(conv(self.features, (3, 1, 1), strides=(self.stride, 1, 1))(x))


class SplitResNet(nn.Module):
    features: int
    blocks: tuple[int, ...]
    classes: int
    dtype: Any

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, dtype=self.dtype)
        split = functools.partial(SplitConv, dtype=self.dtype)
        x = nn.relu(norm()(conv(self.features, (1, 7, 7), strides=(1, 2, 2))(x)))
        x = nn.relu(norm()(conv(self.features, (3, 1, 1))(x)))
        for stage, blocks in enumerate(self.blocks):
            for block in range(blocks):
                stride, features = 2 if stage and not block else 1, self.features * 2**stage
                y = split(features, 1)(nn.relu(split(features, stride)(x, train)), train)
                if x.shape != y.shape:
                    x = norm()(conv(features, (1, 1, 1), strides=stride)(x))
                x = nn.relu(x + y)
        return nn.Dense(self.classes, dtype=self.dtype)(x.mean((1, 2, 3)))


MODELS = (
    Model(
        *("unet3d_instance_norm", "volumes", "linen", of_linen(UNet), "f32"),
        Size(2, (64, 64, 64, 1), dict(features=(32, 64, 128, 256), classes=3, normalised=instance_norm, strided=True)),
        Size(2, (8, 8, 8, 1), dict(features=(4, 8), classes=3, normalised=instance_norm, strided=True)),
        CLASSIFY,
    ),
    Model(
        *("r2plus1d", "video", "linen", of_linen(SplitResNet), "bf16"),
        Size(8, (8, 112, 112, 3), dict(features=64, blocks=(2, 2, 2, 2), classes=400)),
        Size(2, (4, 16, 16, 3), dict(features=8, blocks=(1, 1), classes=10)),
        CLASSIFY,
    ),
)

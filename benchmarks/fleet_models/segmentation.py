"""Segmentation: a class for each pixel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.fleet_models.model import CLASSIFY, Array, Model, Size, of_linen


def _group_norm(module: UNet, train: bool) -> Callable[[Array], Array]:
    def apply(x: Array) -> Array:
        return nn.relu(nn.GroupNorm(min(8, x.shape[-1] // 2), dtype=module.dtype)(x))

    return apply


def instance_norm(module: UNet, train: bool) -> Callable[[Array], Array]:
    return lambda x: nn.leaky_relu(nn.InstanceNorm(dtype=module.dtype)(x), 0.01)


def _batch_norm(module: UNet, train: bool) -> Callable[[Array], Array]:
    return lambda x: nn.relu(nn.BatchNorm(use_running_average=not train, dtype=module.dtype)(x))


class UNet(nn.Module):
    """Ronneberger et al. 2015, of images or volumes, with the norm of one's choice; transposed convolutions go up."""

    features: tuple[int, ...]  # of each level
    classes: int
    normalised: Callable[[UNet, bool], Callable[[Array], Array]]
    dtype: Any
    strided: bool = False  # goes down by strides, as nnU-Net does, not by pooling

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        dims = x.ndim - 2
        conv = functools.partial(nn.Conv, kernel_size=(3,) * dims, dtype=self.dtype)
        normalised = self.normalised(self, train)

        def twice(x: Array, features: int, stride: int = 1) -> Array:
            x = normalised(conv(features, strides=stride)(x))
            return normalised(conv(features)(x))

        skipped: list[Array] = []
        for level, features in enumerate(self.features):
            if level:
                skipped.append(x)
                x = x if self.strided else nn.max_pool(x, (2,) * dims, (2,) * dims)
            x = twice(x, features, 2 if level and self.strided else 1)
        for features in self.features[-2::-1]:
            x = nn.ConvTranspose(features, (2,) * dims, strides=(2,) * dims, dtype=self.dtype)(x)
            x = twice(jnp.concatenate([skipped.pop(), x], -1), features)
        return nn.Conv(self.classes, (1,) * dims, dtype=self.dtype)(x)


class DeepLab(nn.Module):
    """Chen et al. 2017, "Rethinking Atrous Convolution": dilated stages, then a pyramid of dilations."""

    features: int
    blocks: int
    rates: tuple[int, ...]
    classes: int
    dtype: Any

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        def conv(x: Array, features: int, filter: int = 3, stride: int = 1, dilation: int = 1) -> Array:
            kinds = dict(use_bias=False, dtype=self.dtype)
            y = nn.Conv(features, (filter,) * 2, stride, kernel_dilation=dilation, **kinds)(x)
            return nn.relu(nn.BatchNorm(use_running_average=not train, dtype=self.dtype)(y))

        image = x
        x = conv(conv(x, self.features, 7, 2), self.features, 3, 2)
        for stage, (stride, dilation) in enumerate(((2, 1), (1, 2), (1, 4))):
            features = self.features * 2 ** (stage + 1)
            x = conv(x, features, 3, stride)
            for _ in range(self.blocks):
                x = x + conv(conv(x, features, 3, 1, dilation), features, 3, 1, dilation)
        whole = conv(x.mean((1, 2), keepdims=True), 2 * self.features, 1)
        pyramid = [conv(x, 2 * self.features, 1), jnp.broadcast_to(whole, (*x.shape[:3], whole.shape[-1]))]
        pyramid += [conv(x, 2 * self.features, 3, 1, rate) for rate in self.rates]
        x = nn.Conv(self.classes, (1, 1), dtype=self.dtype)(conv(jnp.concatenate(pyramid, -1), 2 * self.features, 1))
        return jax.image.resize(x, (*image.shape[:3], self.classes), "bilinear")


UNET = Model(
    *("unet_group_norm", "segmentation", "linen", of_linen(UNet), "f32"),
    Size(8, (256, 256, 3), dict(features=(32, 64, 128, 256), classes=21, normalised=_group_norm)),
    Size(2, (16, 16, 3), dict(features=(4, 8), classes=3, normalised=_group_norm)),
    CLASSIFY,
)
MODELS = (
    UNET,
    Model(
        *("unet_instance_norm", "segmentation-instance-norm", "linen", of_linen(UNet), "bf16"),
        Size(
            12,
            (256, 256, 1),
            dict(features=(32, 64, 128, 256, 512), classes=4, normalised=instance_norm, strided=True),
        ),
        Size(2, (16, 16, 1), dict(features=(4, 8), classes=3, normalised=instance_norm, strided=True)),
        CLASSIFY,
    ),
    Model(
        *("unet_batch_norm", "segmentation-batch-norm", "linen", of_linen(UNet), "f32"),
        Size(2, (512, 512, 1), dict(features=(32, 64, 128, 256), classes=2, normalised=_batch_norm)),
        Size(2, (16, 16, 1), dict(features=(4, 8), classes=2, normalised=_batch_norm)),
        CLASSIFY,
    ),
    Model(
        *("deeplab", "segmentation-dilated", "linen", of_linen(DeepLab), "bf16"),
        Size(16, (256, 256, 3), dict(features=64, blocks=3, rates=(6, 12, 18), classes=21)),
        Size(2, (32, 32, 3), dict(features=4, blocks=1, rates=(2, 3), classes=3)),
        CLASSIFY,
    ),
    UNET.serving("unet_serve", 1, (512, 512, 3)),
)

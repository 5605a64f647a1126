"""Images out of noise: diffusion, latents, adversaries."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import infer
from benchmarks.fleet_models.model import (
    FIT,
    REGRESS,
    Array,
    Goal,
    Model,
    Net,
    Size,
    Tree,
    binary,
    noise,
    of_linen,
    of_nnx,
)


class NormSilu(nnx.Module):
    def __init__(self, features: int, *, dtype: Any, rngs: nnx.Rngs):
        self.norm = nnx.GroupNorm(features, min(32, features // 4), epsilon=1e-6, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return nnx.silu(self.norm(x))


class TimedBlock(nnx.Module):
    def __init__(self, features: int, out: int, time: int, *, dtype: Any, rngs: nnx.Rngs):
        kinds = dict(dtype=dtype, rngs=rngs)
        self.norms = nnx.List([NormSilu(features, **kinds), NormSilu(out, **kinds)])
        self.convs = nnx.List([nnx.Conv(features, out, (3, 3), **kinds), nnx.Conv(out, out, (3, 3), **kinds)])
        self.time = nnx.Linear(time, out, **kinds) if time else None
        self.shortcut = nnx.Conv(features, out, (1, 1), **kinds) if features != out else None

    def __call__(self, x: Array, time: Array | None = None) -> Array:
        y = self.convs[0](self.norms[0](x))
        if self.time is not None:
            y = y + self.time(nnx.silu(time))[:, None, None]
        y = self.convs[1](self.norms[1](y))
        return y + (x if self.shortcut is None else self.shortcut(x))


class Attention(nnx.Module):
    """Of all pixels, one head, 1x1 convolutions."""

    def __init__(self, features: int, *, dtype: Any, rngs: nnx.Rngs):
        kinds = dict(dtype=dtype, rngs=rngs)
        self.norm = nnx.GroupNorm(features, min(32, features // 4), **kinds)
        self.qkv = nnx.Conv(features, 3 * features, (1, 1), **kinds)
        self.out = nnx.Conv(features, features, (1, 1), **kinds)

    def __call__(self, x: Array) -> Array:
        n, h, w, c = x.shape
        q, k, v = jnp.split(self.qkv(self.norm(x)).reshape(n, h * w, 1, 3 * c), 3, -1)
        return x + self.out(jax.nn.dot_product_attention(q, k, v).reshape(x.shape))


class Denoiser(nnx.Module):
    """Ho et al. 2020: a U-Net that finds the noise in (images, times), with attention at the lowest level."""

    def __init__(self, features: tuple[int, ...], blocks: int, *, dtype: Any, rngs: nnx.Rngs):
        kinds = dict(dtype=dtype, rngs=rngs)
        time = 4 * features[0]
        self.width = features[0]
        self.time = nnx.List([nnx.Linear(features[0], time, **kinds), nnx.Linear(time, time, **kinds)])
        self.stem = nnx.Conv(3, features[0], (3, 3), **kinds)
        width, widths = features[0], [features[0]]
        down, up = [], []
        for level, out in enumerate(features):
            if level:
                down.append(nnx.Conv(width, width, (3, 3), strides=2, **kinds))
                widths.append(width)
            for _ in range(blocks):
                down.append(TimedBlock(width, out, time, **kinds))
                width = out
                widths.append(width)
        self.middle = nnx.List([TimedBlock(width, width, time, **kinds) for _ in range(2)])
        self.attention = Attention(width, **kinds)
        for level, out in enumerate(features[::-1]):
            if level:
                up.append(nnx.Conv(width, width, (3, 3), **kinds))
            for _ in range(blocks + 1):
                up.append(TimedBlock(width + widths.pop(), out, time, **kinds))
                width = out
        self.down, self.up = nnx.List(down), nnx.List(up)
        self.last_norm, self.last = NormSilu(width, **kinds), nnx.Conv(width, 3, (3, 3), **kinds)

    def __call__(self, x: tuple[Array, Array]) -> Array:
        images, times = x
        half = self.width // 2
        angles = times[:, None] * jnp.exp(-jnp.arange(half) * (jnp.log(10000.0) / half))
        time = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        time = self.time[1](nnx.silu(self.time[0](time)))
        y = self.stem(images)
        skipped = [y]
        for layer in self.down:
            y = layer(y, time) if isinstance(layer, TimedBlock) else layer(y)
            skipped.append(y)
        y = self.middle[1](self.attention(self.middle[0](y, time)), time)
        for layer in self.up:
            if isinstance(layer, TimedBlock):
                y = layer(jnp.concatenate([y, skipped.pop()], -1), time)
            else:
                n, h, w, c = y.shape
                y = layer(jax.image.resize(y, (n, 2 * h, 2 * w, c), "nearest"))
        return self.last(self.last_norm(y))


class Autoencoder(nnx.Module):
    """Of latent diffusion: (images, noise) -> (images again, mean and log-variance of the latents)."""

    def __init__(self, features: tuple[int, ...], latents: int, *, dtype: Any, rngs: nnx.Rngs):
        kinds = dict(dtype=dtype, rngs=rngs)
        encode = [nnx.Conv(3, features[0], (3, 3), **kinds)]
        for a, b in zip(features, (*features[1:], features[-1]), strict=True):
            encode += [TimedBlock(a, a, 0, **kinds), nnx.Conv(a, b, (3, 3), strides=2, **kinds)]
        encode += [NormSilu(features[-1], **kinds), nnx.Conv(features[-1], 2 * latents, (3, 3), **kinds)]
        self.encode = nnx.List(encode)
        self.start = nnx.Conv(latents, features[-1], (3, 3), **kinds)
        pairs = list(zip((features[-1], *features[:0:-1]), features[::-1], strict=True))
        self.blocks = nnx.List([TimedBlock(a, b, 0, **kinds) for a, b in pairs])
        self.rise = nnx.List([nnx.Conv(b, b, (3, 3), **kinds) for _, b in pairs])
        self.last_norm, self.last = NormSilu(features[0], **kinds), nnx.Conv(features[0], 3, (3, 3), **kinds)

    def __call__(self, x: tuple[Array, Array]) -> tuple[Array, Array]:
        y, draw = x
        for layer in self.encode:
            y = layer(y)
        mean, variance = jnp.split(y, 2, -1)
        y = self.start(mean + jnp.exp(0.5 * variance) * draw.astype(y.dtype))
        for block, rise in zip(self.blocks, self.rise, strict=True):
            y = block(y)
            n, h, w, c = y.shape
            y = rise(jax.image.resize(y, (n, 2 * h, 2 * w, c), "nearest"))
        return self.last(self.last_norm(y)), jnp.concatenate([mean, variance], -1)


def _evidence(found: tuple[Array, Array], images: Array) -> Array:
    """Reconstruction, and the distance of the latents from a normal distribution."""
    again, latents = (f.astype(jnp.float32) for f in found)
    mean, variance = jnp.split(latents, 2, -1)
    return jnp.mean((again - images) ** 2) + 1e-3 * jnp.mean(mean**2 + jnp.exp(variance) - 1 - variance)


class Generator(nn.Module):
    """Radford et al. 2015, "DCGAN"."""

    features: int
    levels: int
    dtype: Any

    @nn.compact
    def __call__(self, z: Array, train: bool) -> Array:
        up = functools.partial(nn.ConvTranspose, kernel_size=(4, 4), use_bias=False, dtype=self.dtype)
        x = up(self.features * 2 ** (self.levels - 1), padding="VALID")(z[:, None, None])
        for level in reversed(range(self.levels)):
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9, dtype=self.dtype)(x))
            x = up(self.features * 2 ** (level - 1) if level else 3, strides=(2, 2))(x)
        return jnp.tanh(x)


class Discriminator(nn.Module):
    features: int
    levels: int
    dtype: Any

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        for level in range(self.levels):
            x = nn.Conv(self.features * 2**level, (4, 4), strides=2, use_bias=False, dtype=self.dtype)(x)
            if level:
                x = nn.BatchNorm(use_running_average=not train, momentum=0.9, dtype=self.dtype)(x)
            x = nn.leaky_relu(x, 0.2)
        return nn.Conv(1, (4, 4), padding="VALID", use_bias=False, dtype=self.dtype)(x)[:, 0, 0, 0]


def _dcgan(dtype: Any, options: Mapping[str, Any], x: Tree) -> Net:
    """Both networks, each with its own loss, in one step: what the one's must not change is behind stop_gradient."""
    nets = {"generator": Generator(**options, dtype=dtype), "discriminator": Discriminator(**options, dtype=dtype)}
    images, z = jax.tree.map(lambda a: a[:1], x)
    shapes = {
        name: jax.eval_shape(functools.partial(net.init, train=False), jax.random.key(0), one)
        for (name, net), one in zip(nets.items(), (z, images), strict=True)
    }
    drawn = infer.drawn(shapes)

    def of(name: str, params: Tree, stats: Tree, x: Array) -> tuple[Array, Tree]:
        return nets[name].apply({"params": params, **stats}, x, train=True, mutable=["batch_stats"])

    def apply(params: Tree, stats: Tree, x: Tree, train: bool) -> tuple[Tree, Tree]:
        images, z = x
        made, made_stats = of("generator", params["generator"], stats["generator"], z)
        judge, seen = params["discriminator"], stats["discriminator"]
        real, seen = of("discriminator", judge, seen, images)
        caught, seen = of("discriminator", judge, seen, jax.lax.stop_gradient(made))
        fooled, _ = of("discriminator", jax.lax.stop_gradient(judge), seen, made)
        return (real, caught, fooled), {"generator": made_stats, "discriminator": seen}

    params = {name: variables.pop("params") for name, variables in drawn.items()}
    return Net(params, drawn, apply)


def _adversarial(found: tuple[Array, Array, Array], wanted: Tree) -> Array:
    real, caught, fooled = found
    return binary(real, 1.0) + binary(caught, 0.0) + binary(fooled, 1.0)


class Translator(nn.Module):
    """CycleGAN's generator (Zhu et al. 2017): instance-norms, reflected edges, nine residual blocks."""

    features: int
    blocks: int
    dtype: Any

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        conv = functools.partial(nn.Conv, dtype=self.dtype)

        def reflected(x: Array, n: int) -> Array:
            return jnp.pad(x, ((0, 0), (n, n), (n, n), (0, 0)), "reflect")

        def normalised(x: Array) -> Array:
            return nn.InstanceNorm(dtype=self.dtype)(x)

        x = nn.relu(normalised(conv(self.features, (7, 7), padding="VALID")(reflected(x, 3))))
        for level in (1, 2):
            x = nn.relu(normalised(conv(self.features * 2**level, (3, 3), strides=2)(x)))
        for _ in range(self.blocks):
            y = nn.relu(normalised(conv(x.shape[-1], (3, 3), padding="VALID")(reflected(x, 1))))
            x = x + normalised(conv(x.shape[-1], (3, 3), padding="VALID")(reflected(y, 1)))
        for level in (1, 0):
            up = nn.ConvTranspose(self.features * 2**level, (3, 3), strides=(2, 2), dtype=self.dtype)
            x = nn.relu(normalised(up(x)))
        return jnp.tanh(conv(3, (7, 7), padding="VALID")(reflected(x, 3)))


def _with_times(rng: np.random.Generator, shape: tuple[int, ...]) -> Tree:
    return noise(rng, shape), rng.integers(0, 1000, shape[0]).astype(np.float32)


def _with_latents(reduction: int, latents: int) -> Any:
    def inputs(rng: np.random.Generator, shape: tuple[int, ...]) -> Tree:
        n, h, w, _ = shape
        return noise(rng, shape), noise(rng, (n, h // reduction, w // reduction, latents))

    return inputs


def _with_vectors(rng: np.random.Generator, shape: tuple[int, ...]) -> Tree:
    return np.tanh(noise(rng, shape)), noise(rng, (shape[0], 64))


MODELS = (
    Model(
        *("ddpm", "diffusion", "nnx", of_nnx(Denoiser), "f32"),
        Size(64, (32, 32, 3), dict(features=(128, 256, 256), blocks=2)),
        Size(2, (8, 8, 3), dict(features=(8, 16), blocks=1)),
        REGRESS,
        inputs=_with_times,
    ),
    Model(
        *("ddpm_64", "diffusion-64", "nnx", of_nnx(Denoiser), "bf16"),
        Size(16, (64, 64, 3), dict(features=(192, 384, 384), blocks=2)),
        Size(2, (8, 8, 3), dict(features=(8, 16), blocks=1)),
        REGRESS,
        inputs=_with_times,
    ),
    Model(
        *("vae", "latents", "nnx", of_nnx(Autoencoder), "bf16"),
        Size(16, (128, 128, 3), dict(features=(128, 256, 512), latents=4)),
        Size(2, (16, 16, 3), dict(features=(8, 8, 16), latents=4)),
        Goal(_evidence, lambda rng, found: noise(rng, found[0].shape)),
        inputs=_with_latents(8, 4),
    ),
    Model(
        *("dcgan", "adversaries", "linen", _dcgan, "f32"),
        Size(128, (64, 64, 3), dict(features=64, levels=4)),
        Size(4, (16, 16, 3), dict(features=4, levels=2)),
        Goal(_adversarial, lambda rng, found: ()),
        inputs=_with_vectors,
    ),
    Model(
        *("cyclegan", "translation", "linen", of_linen(Translator), "f32"),
        Size(2, (256, 256, 3), dict(features=64, blocks=9)),
        Size(2, (16, 16, 3), dict(features=4, blocks=1)),
        FIT,
    ),
)

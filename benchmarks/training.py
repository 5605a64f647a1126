"""What the ways of `python -m benchmarks train` share, PyTorch's too: models, data and how they learn."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

Tree = Any

DTYPES = {"bf16": jnp.bfloat16, "f32": jnp.float32}
LEARNING_RATE, MOMENTUM = 0.02, 0.9
PROFILED = 3  # steps
# What a model is trained to do, where that is not to classify images
TASKS = {"unet3d": "segment", "ddpm": "denoise"}


def models() -> dict[str, Callable[..., Any]]:
    from benchmarks.models import MODELS, ddpm, efficientnet_b0, resnext50, unet3d

    more = {"resnext50": resnext50, "efficientnet_b0": efficientnet_b0, "unet3d": unet3d, "ddpm": ddpm}
    return {**MODELS, **more}


def batch(args: argparse.Namespace, n: int) -> tuple[Tree, np.ndarray]:
    """n images and what the model should find: noise around a mean per class, so that there is something to learn."""
    rng, size = np.random.default_rng(0), args.image
    task = TASKS.get(args.model)
    if task == "segment":  # halves of a volume, each of a class
        where = rng.integers(size // 4, 3 * size // 4, (n, 1, 1, 1))
        labels = np.broadcast_to(np.arange(size) < where, (n, size, size, size)).astype(np.int64)
        images = rng.standard_normal((n, size, size, size, 1), np.float32)
        return images + 2 * labels[..., None].astype(np.float32), labels
    if task == "denoise":
        times = rng.integers(0, 1000, n).astype(np.float32)
        kept = np.cos(0.5 * np.pi * times / 1000)[:, None, None, None]
        noise = rng.standard_normal((n, size, size, 3), np.float32)
        clean = rng.standard_normal((n, 1, 1, 3), np.float32)
        return ((kept * clean + np.sqrt(1 - kept**2) * noise).astype(np.float32), times), noise
    labels = rng.integers(0, 10, n)
    means = rng.standard_normal((10, 1, 1, 3), np.float32)
    return rng.standard_normal((n, size, size, 3), np.float32) + means[labels], labels


@dataclasses.dataclass
class Placed:
    """Data on n devices: the state on each, the images, or the depth of each, split among them."""

    devices: int
    everywhere: Any
    images: Tree
    labels: jax.Array

    @classmethod
    def make(cls, devices: int, images: Tree, labels: np.ndarray, split: str | None = None) -> Placed:
        mesh = jax.make_mesh(
            (devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices]
        )
        among = NamedSharding(mesh, PartitionSpec(None, "data") if split == "depth" else PartitionSpec("data"))
        everywhere = NamedSharding(mesh, PartitionSpec())
        return cls(devices, everywhere, jax.device_put(images, among), jax.device_put(labels, among))

    @property
    def count(self) -> int:
        """Images a step."""
        return len(self.labels)

    def state(self, params: Tree, stats: Tree) -> Tree:
        """A fresh one, which a step may use up."""
        state = params, jax.tree.map(np.zeros_like, params), stats
        return jax.device_put(jax.tree.map(np.asarray, state), self.everywhere)

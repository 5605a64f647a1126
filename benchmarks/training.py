"""What the ways of `python -m benchmarks train` share, PyTorch's too: models, data and how they learn."""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.fleet_models.model import CLASSIFY, REGRESS, Goal, Model, noise

Tree = Any

DTYPES = {"bf16": jnp.bfloat16, "f32": jnp.float32}
LEARNING_RATE, MOMENTUM = 0.02, 0.9
PROFILED = 3  # steps
STEADY, ROUNDS = 0.1, 3  # how far samples may differ, of their median; how often they are taken where they differ more
# What a model is trained to do, where that is not to classify images
TASKS = {"unet3d": "segment", "ddpm": "denoise", "impala": "play"}


def models() -> dict[str, Callable[..., Any]]:
    from benchmarks.models import MODELS, ddpm, efficientnet_b0, impala, resnet18_32, resnext50, unet3d

    more = (resnext50, efficientnet_b0, unet3d, ddpm, resnet18_32, impala)
    return {**MODELS, **{model.__name__: model for model in more}}


def of_fleet(name: str) -> Model | None:
    """The fleet's model of this name, whose sizes, type, loss and rate are the defaults here too; None of another."""
    from benchmarks.fleet_models import classification, reinforcement

    return {model.name: model for model in (classification.RESNET18, reinforcement.IMPALA)}.get(name)


def goal(name: str) -> Goal:
    """What a model is trained for."""
    model = of_fleet(name)
    return (model and model.goal) or (REGRESS if TASKS.get(name) == "denoise" else CLASSIFY)


def rate(name: str) -> float:
    """At which a model learns."""
    model = of_fleet(name)
    return model.rate if model else LEARNING_RATE


def steady(sample: Callable[[], float], repeat: int) -> list[float]:
    """`repeat` samples. Where they differ by more than STEADY (the host had other work) they are taken again; of at
    most ROUNDS rounds that counts whose samples differ the least."""
    rounds: list[list[float]] = []
    while len(rounds) < ROUNDS:
        rounds.append([sample() for _ in range(repeat)])
        if differ(rounds[-1]) <= STEADY:
            break
    return min(rounds, key=differ)


def differ(samples: Sequence[float]) -> float:
    return (max(samples) - min(samples)) / statistics.median(samples)


def batch(args: argparse.Namespace, n: int) -> tuple[Tree, Tree]:
    """n images and what the model should find: noise around a mean per class, so that there is something to learn."""
    rng, size = np.random.default_rng(0), args.image
    task = TASKS.get(args.model)
    if task == "play":  # actions, as many as the small model has, and what they earn
        actions, means, earned = rng.integers(0, 5, n), noise(rng, (5, 1, 1, 4)), noise(rng, (5, 1))
        return noise(rng, (n, size, size, 4)) + means[actions], (actions, earned[actions])
    if task == "segment":  # halves of a volume, each of a class
        where = rng.integers(size // 4, 3 * size // 4, (n, 1, 1, 1))
        labels = np.broadcast_to(np.arange(size) < where, (n, size, size, size)).astype(np.int64)
        images = rng.standard_normal((n, size, size, size, 1), np.float32)
        return images + 2 * labels[..., None].astype(np.float32), labels
    if task == "denoise":
        times = rng.integers(0, 1000, n).astype(np.float32)
        kept = np.cos(0.5 * np.pi * times / 1000)[:, None, None, None]
        added, clean = noise(rng, (n, size, size, 3)), noise(rng, (n, 1, 1, 3))
        return ((kept * clean + np.sqrt(1 - kept**2) * added).astype(np.float32), times), added
    labels = rng.integers(0, 10, n)
    means = rng.standard_normal((10, 1, 1, 3), np.float32)
    return rng.standard_normal((n, size, size, 3), np.float32) + means[labels], labels


@dataclasses.dataclass
class Placed:
    """Data on n devices: the state on each, the images, or the depth of each, split among them."""

    devices: int
    everywhere: Any
    images: Tree
    labels: Tree

    @classmethod
    def make(cls, devices: int, images: Tree, labels: Tree, split: str | None = None) -> Placed:
        mesh = jax.make_mesh(
            (devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices]
        )
        among = NamedSharding(mesh, PartitionSpec(None, "data") if split == "depth" else PartitionSpec("data"))
        everywhere = NamedSharding(mesh, PartitionSpec())
        return cls(devices, everywhere, jax.device_put(images, among), jax.device_put(labels, among))

    @property
    def count(self) -> int:
        """Images a step."""
        return len(jax.tree.leaves(self.labels)[0])

    def state(self, params: Tree, stats: Tree) -> Tree:
        """A fresh one, which a step may use up."""
        state = params, jax.tree.map(np.zeros_like, params), stats
        return jax.device_put(jax.tree.map(np.asarray, state), self.everywhere)

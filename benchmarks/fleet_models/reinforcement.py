"""Reinforcement learning: pixels of games."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import models
from benchmarks.fleet_models.model import CLASSIFY, REGRESS, Array, Goal, Model, Size, heads, noise, of_layers, of_nnx


class NatureDQN(nnx.Module):
    """Mnih et al. 2015, "Human-level control through deep reinforcement learning"."""

    def __init__(self, features: int, flat: int, hidden: int, actions: int, *, dtype: Any, rngs: nnx.Rngs):
        kinds = dict(padding="VALID", dtype=dtype, rngs=rngs)
        self.first = nnx.Conv(4, features, (8, 8), strides=4, **kinds)
        self.second = nnx.Conv(features, 2 * features, (4, 4), strides=2, **kinds)
        self.third = nnx.Conv(2 * features, 2 * features, (3, 3), **kinds)
        self.hidden = nnx.Linear(flat, hidden, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(hidden, actions, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        x = nnx.relu(self.third(nnx.relu(self.second(nnx.relu(self.first(x))))))
        return self.head(nnx.relu(self.hidden(x.reshape(len(x), -1))))


def _q_loss(found: Array, wanted: tuple[Array, Array]) -> Array:
    """Huber's, of the actions that were taken."""
    actions, returns = wanted
    off = jnp.take_along_axis(found.astype(jnp.float32), actions[:, None], 1)[:, 0] - returns
    return jnp.mean(jnp.where(jnp.abs(off) < 1, off**2 / 2, jnp.abs(off) - 0.5))


def _q_wanted(rng: np.random.Generator, found: jax.ShapeDtypeStruct) -> tuple[np.ndarray, np.ndarray]:
    n, actions = found.shape
    return rng.integers(0, actions, n).astype(np.int32), noise(rng, (n,))


Q = Goal(_q_loss, _q_wanted)
IMPALA = Model(
    *("impala", "impala", "linen", of_layers(models.impala), "f32"),
    *(Size(1024, (84, 84, 4)), Size(4, (12, 12, 4), dict(small=True)), heads(CLASSIFY, REGRESS)),
    rate=2e-6,
)
MODELS = (
    IMPALA,
    Model(
        *("nature_dqn", "deep-q", "nnx", of_nnx(NatureDQN), "f32"),
        Size(512, (84, 84, 4), dict(features=32, flat=7 * 7 * 64, hidden=512, actions=18)),
        Size(4, (36, 36, 4), dict(features=8, flat=16, hidden=16, actions=5)),
        Q,
        rate=1e-4,
    ),
    IMPALA.serving("impala_act", 32, (84, 84, 4)),
)

"""Boards: towers of pre-activation blocks with a policy and a value, Flax's default biases in the convolutions."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from benchmarks.fleet_models.model import CLASSIFY, REGRESS, Array, Model, Size, heads, of_linen


class Board(nn.Module):
    features: int
    blocks: int
    dtype: Any

    @nn.compact
    def __call__(self, x: Array, train: bool) -> tuple[Array, Array]:
        conv = functools.partial(nn.Conv, dtype=self.dtype)

        def normalised(x: Array) -> Array:
            return nn.relu(nn.BatchNorm(use_running_average=not train, dtype=self.dtype)(x))

        x = conv(self.features, (3, 3))(x)
        for _ in range(self.blocks):
            y = conv(self.features, (3, 3))(normalised(x))
            x = x + conv(self.features, (3, 3))(normalised(y))
        x = normalised(x)
        policy = normalised(conv(2, (1, 1))(x)).reshape(len(x), -1)
        value = normalised(conv(1, (1, 1))(x)).reshape(len(x), -1)
        value = nn.relu(nn.Dense(self.features, dtype=self.dtype)(value))
        moves = x.shape[1] * x.shape[2] + 1
        return nn.Dense(moves, dtype=self.dtype)(policy), jnp.tanh(nn.Dense(1, dtype=self.dtype)(value))


GOAL = heads(CLASSIFY, REGRESS)
SMALL = Size(4, (5, 5, 3), dict(features=8, blocks=2))
BOARD_19 = Model(
    *("board_19", "board-19", "linen", of_linen(Board), "bf16"),
    *(Size(2048, (19, 19, 17), dict(features=128, blocks=10)), SMALL, GOAL),
)
MODELS = (
    BOARD_19,
    Model(
        *("board_9", "board-9", "linen", of_linen(Board), "f32"),
        *(Size(512, (9, 9, 8), dict(features=64, blocks=6)), SMALL, GOAL),
    ),
    BOARD_19.serving("board_19_search", 16, (19, 19, 17)),
)

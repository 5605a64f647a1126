"""Fields that move: periodic edges, and steps in time."""

from __future__ import annotations

from typing import Any

import flax.linen as nn

from benchmarks.fleet_models.model import REGRESS, Array, Model, Size, of_linen


class Fluid(nn.Module):
    """The next state of a periodic field: dilated residual blocks, whose edges wrap around."""

    features: int
    blocks: int
    dilations: tuple[int, ...]
    dtype: Any

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        def conv(x: Array, features: int, dilation: int = 1) -> Array:
            return nn.Conv(features, (3, 3), padding="CIRCULAR", kernel_dilation=dilation, dtype=self.dtype)(x)

        y = conv(x, self.features)
        for _ in range(self.blocks):
            z = y
            for dilation in self.dilations:
                z = nn.gelu(conv(z, self.features, dilation))
            y = y + z
        return x + conv(y, x.shape[-1])


class Forecast(nn.Module):
    """Frames after frames: a ConvLSTM (Shi et al. 2015) scanned over time."""

    features: int
    dtype: Any

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        y = nn.RNN(nn.ConvLSTMCell(self.features, (3, 3), dtype=self.dtype))(x)
        return nn.Conv(x.shape[-1], (3, 3), dtype=self.dtype)(y)


MODELS = (
    Model(
        *("fluid", "periodic-fields", "linen", of_linen(Fluid), "f32"),
        Size(16, (128, 128, 2), dict(features=48, blocks=4, dilations=(1, 2, 4, 2, 1))),
        Size(2, (8, 8, 2), dict(features=4, blocks=1, dilations=(1, 2))),
        REGRESS,
        rate=1e-4,
    ),
    Model(
        *("forecast", "forecast", "linen", of_linen(Forecast), "f32"),
        Size(8, (10, 64, 64, 1), dict(features=64)),
        Size(2, (3, 8, 8, 1), dict(features=4)),
        REGRESS,
    ),
)

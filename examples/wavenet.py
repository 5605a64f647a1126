"""A WaveNet's training step, and `jaxconv.tune` of it: 1-D convolutions that no table knows.

    python examples/wavenet.py                    # some small steps, on a CPU too
    cd examples
    python -m jaxconv tune wavenet:case           # on a GPU: times them, and keeps what makes the step faster
    python -m jaxconv bench wavenet:case          # the step as it is, and with jaxconv

The model is that of van den Oord et al., "WaveNet: A Generative Model for Raw Audio" (2016): causal convolutions of 3
taps whose dilation doubles from layer to layer, gates, residuals and skips. The sound is generated.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import jaxconv

Params = dict[str, Any]
LEVELS = 256  # of a sample


def initial(key: jax.Array, layers: int, channels: int) -> Params:
    """Filters of a stack, (3, C, 2 C) for filter and gate, and of what comes before and after it."""

    def normal(*shape: int) -> jax.Array:
        nonlocal key
        key, used = jax.random.split(key)
        return jax.random.normal(used, shape) / (shape[0] * shape[1]) ** 0.5

    stack = [
        {"gates": normal(3, channels, 2 * channels), "mix": normal(1, channels, 2 * channels)} for _ in range(layers)
    ]
    return {"first": normal(2, 1, channels), "stack": stack, "last": normal(1, channels, LEVELS)}


def forward(params: Params, sound: jax.Array, dtype: Any) -> jax.Array:
    """(N, T) in [-1, 1] -> (N, T, 256), the logarithms of the next sample's probabilities."""

    def conv(x: jax.Array, w: jax.Array, dilation: int = 1, **options: Any) -> jax.Array:
        reach = (w.shape[0] - 1) * dilation
        return jaxconv.conv1d(x, w.astype(dtype), padding=[(reach, 0)], dilation=dilation, **options)

    x = conv(sound[..., None].astype(dtype), params["first"])
    skips = jnp.zeros_like(x)
    for i, layer in enumerate(params["stack"]):
        value, gate = jnp.split(conv(x, layer["gates"], 2 ** (i % 10)), 2, axis=-1)
        change, skip = jnp.split(conv(jnp.tanh(value) * jax.nn.sigmoid(gate), layer["mix"]), 2, axis=-1)
        x, skips = x + change, skips + skip
    return jax.nn.log_softmax(conv(jax.nn.relu(skips), params["last"]).astype(jnp.float32))


def loss(params: Params, sound: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """Mean negative log-likelihood of each sample, given those before it."""
    levels = jnp.clip((sound[:, 1:] + 1) * (LEVELS / 2), 0, LEVELS - 1).astype(jnp.int32)
    found = forward(params, sound[:, :-1], dtype)
    return -jnp.take_along_axis(found, levels[..., None], -1).mean()


def tones(batch: int, samples: int) -> jax.Array:
    time = jnp.arange(samples) / 16000
    pitch = 110 * 2 ** (jnp.arange(batch) / 12)
    return 0.8 * jnp.sin(2 * jnp.pi * pitch[:, None] * time)


def make(batch: int, samples: int, layers: int, channels: int, dtype: Any) -> tuple[Any, Params, jax.Array]:
    params = initial(jax.random.key(0), layers, channels)

    def step(params: Params, sound: jax.Array) -> tuple[jax.Array, Params]:
        value, gradients = jax.value_and_grad(loss)(params, sound, dtype)
        return value, jax.tree.map(lambda p, g: p - 2.0 * g, params, gradients)

    return step, params, tones(batch, samples)


def case() -> tuple[Any, Params, jax.Array]:
    """(step, its arguments): 20 layers of 64 channels, a second of 16 sounds, bfloat16."""
    return make(16, 16385, 20, 64, jnp.bfloat16)


def small() -> tuple[Any, Params, jax.Array]:
    """The same, for a CPU."""
    return make(2, 257, 4, 8, jnp.float32)


if __name__ == "__main__":
    step, params, sound = small()
    step = jax.jit(step)
    for i in range(20):
        value, params = step(params, sound)
        print(f"step {i}: loss {value:.3f}")

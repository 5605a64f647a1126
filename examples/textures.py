"""Trains a residual network with Flax's layers on images of CIFAR's size, through `jaxconv.accelerate`.

    python examples/textures.py            # a minute or two on a CPU; the exit status is 0 from 90 % held-out accuracy
    python examples/textures.py --plain    # the same without jaxconv, to compare

The data is generated: 32x32 colour images of ten textures (gratings of five directions and two widths) with random
phase, contrast, colour and noise. The model is a small ResNeXt: its 3x3 convolutions are grouped.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxconv

CLASSES, SIZE, BATCH, GOAL = 10, 32, 32, 0.90


def textures(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(images (N, 32, 32, 3) float32, labels (N,))."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, count)
    angle = np.pi * (labels % 5) / 5 + rng.normal(0, 0.08, count)
    waves = np.where(labels < 5, 4.0, 7.0) * np.exp(rng.normal(0, 0.08, count))  # across the image
    rows, columns = np.mgrid[:SIZE, :SIZE] / SIZE
    along = np.cos(angle)[:, None, None] * columns + np.sin(angle)[:, None, None] * rows
    pattern = np.sin(2 * np.pi * (waves[:, None, None] * along + rng.random((count, 1, 1))))
    colour = rng.normal(0, 1, (count, 1, 1, 3))
    colour /= np.linalg.norm(colour, axis=-1, keepdims=True)
    images = pattern[..., None] * colour + rng.normal(0, 0.5, (count, SIZE, SIZE, 3))
    return images.astype(np.float32), labels


class Block(nn.Module):
    features: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        conv = functools.partial(nn.Conv, self.features, use_bias=False)
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        y = nn.relu(norm()(conv((1, 1))(x)))
        y = nn.relu(norm()(conv((3, 3), strides=self.stride, feature_group_count=self.features // 8)(y)))
        y = norm(scale_init=nn.initializers.zeros)(conv((1, 1))(y))
        return nn.relu(y + norm()(conv((1, 1), strides=self.stride)(x)))


class ResNeXt(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:  # (N, 32, 32, 3) -> (N, 10)
        x = nn.Conv(16, (3, 3), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        for features in (32, 64, 128):
            x = Block(features, 2)(x, train)
        return nn.Dense(CLASSES)(x.mean((1, 2)))


def train(epochs: int, examples: int, plain: bool, net: nn.Module | None = None) -> tuple[float, Any]:
    """(the held-out accuracy, the variables) of a network, by default a ResNeXt."""
    accelerate = (lambda f: f) if plain else jaxconv.accelerate
    net = net or ResNeXt()
    images, labels = textures(examples, seed=0)
    test_images, test_labels = textures(max(examples // 4, BATCH), seed=1)
    variables = net.init(jax.random.key(0), images[:1], train=False)
    params, stats = variables["params"], variables["batch_stats"]
    steps = examples // BATCH
    optimizer = optax.adamw(optax.cosine_decay_schedule(3e-3, epochs * steps), weight_decay=1e-3)
    state = optimizer.init(params)

    def loss(params: Any, stats: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Any]:
        logits, updates = net.apply({"params": params, "batch_stats": stats}, x, True, mutable=["batch_stats"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), updates["batch_stats"]

    @jax.jit
    def step(params: Any, stats: Any, state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any, Any, jax.Array]:
        (value, stats), grads = jax.value_and_grad(accelerate(loss), has_aux=True)(params, stats, x, y)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), stats, state, value

    @jax.jit
    def predict(params: Any, stats: Any, x: jax.Array) -> jax.Array:
        logits = accelerate(functools.partial(net.apply, train=False))({"params": params, "batch_stats": stats}, x)
        return jnp.argmax(logits, -1)

    rng = np.random.default_rng(0)
    accuracy = 0.0
    for epoch in range(1, epochs + 1):
        begin = time.perf_counter()
        losses = []
        for batch in rng.permutation(examples)[: steps * BATCH].reshape(steps, BATCH):
            params, stats, state, value = step(params, stats, state, images[batch], labels[batch])
            losses.append(value)
        accuracy = float(np.mean(np.asarray(predict(params, stats, test_images)) == test_labels))
        seconds = time.perf_counter() - begin
        mean = float(jnp.mean(jnp.stack(losses)))
        print(f"epoch {epoch}: loss {mean:.3f}, held-out accuracy {accuracy:.1%}, {seconds:.1f} s", flush=True)
    return accuracy, {"params": params, "batch_stats": stats}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--examples", type=int, default=2048, help="training images (%(default)d)")
    parser.add_argument("--plain", action="store_true", help="without jaxconv")
    args = parser.parse_args(argv)
    if args.epochs < 1 or args.examples < BATCH:
        parser.error(f"--epochs must be at least 1 and --examples at least {BATCH}")
    accuracy, _ = train(args.epochs, args.examples, args.plain)
    return 0 if accuracy >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())

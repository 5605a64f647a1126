"""Trains one CNN on scikit-learn's digits five ways: Flax's layers, jaxconv's, and `jaxconv.accelerate`.

    python examples/flax_digits.py                     # all five: the losses agree, and so does the accuracy
    python examples/flax_digits.py --ways linen        # one of linen, nnx: Flax alone
    python examples/flax_digits.py --ways jaxconv.linen jaxconv.nnx accelerate

The models are written once for flax.linen and once for flax.nnx, with the layers as an argument: `flax.linen` or
`jaxconv.linen`, `flax.nnx` or `jaxconv.nnx`. In a model of your own the import is what changes. `accelerate` takes the
model with Flax's layers as it is. The exit status is 0 if every way reads 97 % or more of the held-out digits.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits import BATCH, GOAL, MOMENTUM, SEED, batches, load

import jaxconv.linen
import jaxconv.nnx
from jaxconv.accelerate import accelerate

Tree = Any
# (parameters, statistics, images, training) -> (logits, statistics)
Apply = Callable[[Tree, Tree, jax.Array, bool], tuple[jax.Array, Tree]]
Model = tuple[Tree, Tree, Apply]


# ----------------------------------------------------------------------------------------------------------------------
# The model, in linen and in nnx


def linen_model(layers: ModuleType) -> Model:
    nn = flax.linen

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, training: bool) -> jax.Array:  # (N, 8, 8, 1) -> (N, 10)
            for features, stride in ((32, 1), (64, 2)):
                x = layers.Conv(features, (3, 3), strides=stride, use_bias=False)(x)
                x = nn.relu(layers.BatchNorm(use_running_average=not training, momentum=MOMENTUM)(x))
            x = nn.relu(layers.Dense(128)(x.reshape(x.shape[0], -1)))
            return layers.Dense(10)(x)

    net = Net()
    variables = net.init(jax.random.key(SEED), jnp.zeros((1, 8, 8, 1)), training=False)

    def apply(params: Tree, stats: Tree, images: jax.Array, training: bool) -> tuple[jax.Array, Tree]:
        variables = {"params": params, "batch_stats": stats}
        logits, updates = net.apply(variables, images, training, mutable=["batch_stats"])
        return logits, updates["batch_stats"]

    return variables["params"], variables["batch_stats"], apply


def nnx_model(layers: ModuleType) -> Model:
    nnx = flax.nnx

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            norm = functools.partial(layers.BatchNorm, momentum=MOMENTUM, rngs=rngs)
            self.conv1 = layers.Conv(1, 32, (3, 3), use_bias=False, rngs=rngs)
            self.norm1 = norm(32)
            self.conv2 = layers.Conv(32, 64, (3, 3), strides=2, use_bias=False, rngs=rngs)
            self.norm2 = norm(64)
            self.hidden = layers.Linear(4 * 4 * 64, 128, rngs=rngs)
            self.out = layers.Linear(128, 10, rngs=rngs)

        def __call__(self, x: jax.Array, training: bool) -> jax.Array:  # (N, 8, 8, 1) -> (N, 10)
            x = nnx.relu(self.norm1(self.conv1(x), use_running_average=not training))
            x = nnx.relu(self.norm2(self.conv2(x), use_running_average=not training))
            x = nnx.relu(self.hidden(x.reshape(x.shape[0], -1)))
            return self.out(x)

    graph, params, stats = nnx.split(Net(nnx.Rngs(SEED)), nnx.Param, nnx.BatchStat)

    def apply(params: Tree, stats: Tree, images: jax.Array, training: bool) -> tuple[jax.Array, Tree]:
        net = nnx.merge(graph, params, stats, copy=True)
        logits = net(images, training)
        return logits, nnx.state(net, nnx.BatchStat)

    return params, stats, apply


def accelerated_model() -> Model:
    """The model with Flax's own layers, untouched."""
    params, stats, apply = linen_model(flax.linen)
    print(accelerate(apply).report(params, stats, jnp.zeros((BATCH, 8, 8, 1)), True), flush=True)
    return params, stats, accelerate(apply)


WAYS: dict[str, Callable[[], Model]] = {
    "linen": lambda: linen_model(flax.linen),
    "jaxconv.linen": lambda: linen_model(jaxconv.linen),
    "accelerate": accelerated_model,
    "nnx": lambda: nnx_model(flax.nnx),
    "jaxconv.nnx": lambda: nnx_model(jaxconv.nnx),
}


# ----------------------------------------------------------------------------------------------------------------------
# Training


def train(model: Model, data: tuple[np.ndarray, ...], epochs: int) -> tuple[np.ndarray, float]:
    """(the loss of each step, the held-out accuracy)."""
    images, test_images, labels, test_labels = data
    params, stats, apply = model
    steps = epochs * (len(images) // BATCH)
    optimizer = optax.adamw(optax.cosine_decay_schedule(3e-3, steps), weight_decay=1e-3)
    state = optimizer.init(params)

    def loss_fn(params: Tree, stats: Tree, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Tree]:
        logits, stats = apply(params, stats, x, True)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, y)), stats

    @jax.jit
    def step(params: Tree, stats: Tree, state: Tree, x: jax.Array, y: jax.Array) -> tuple[Tree, Tree, Tree, jax.Array]:
        (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, stats, x, y)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), stats, state, loss

    @jax.jit
    def predict(params: Tree, stats: Tree, x: jax.Array) -> jax.Array:
        return jnp.argmax(apply(params, stats, x, False)[0], -1)

    rng = np.random.default_rng(SEED)
    losses = []
    for _ in range(epochs):
        for x, y in batches(images, labels, rng):
            params, stats, state, loss = step(params, stats, state, x, y)
            losses.append(loss)
    accuracy = float(np.mean(np.asarray(predict(params, stats, test_images)) == test_labels))
    return np.asarray(jax.device_get(losses)), accuracy


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    args = parser.parse_args(argv)
    if args.epochs < 1:
        parser.error(f"--epochs={args.epochs} must be at least 1")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    data = load()
    accuracies = []
    first: dict[str, np.ndarray] = {}  # the losses of the first way in linen, and in nnx
    for way in args.ways:
        started = time.perf_counter()
        losses, accuracy = train(WAYS[way](), data, args.epochs)
        accuracies.append(accuracy)
        reference = first.setdefault("nnx" if "nnx" in way else "linen", losses)
        difference = np.abs(losses - reference)[: len(losses) // args.epochs].max()
        print(
            f"{way:14s} held-out accuracy {accuracy:.2%}, last loss {losses[-1]:.4f}, "
            f"largest loss difference in the first epoch {difference:.1e}, {time.perf_counter() - started:.0f} s",
            flush=True,
        )
    return 0 if min(accuracies) >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())

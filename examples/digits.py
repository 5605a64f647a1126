"""Trains a small CNN on the handwritten digits that ship with scikit-learn, and says how well it reads unseen ones.

    python examples/digits.py                            # train, plot, print the held-out accuracy
    python examples/digits.py --compare                  # also the same network in lax and jnp, both curves in one plot
    python examples/digits.py --implementation native    # jaxconv's own custom calls for everything

The network is conv - batchnorm - relu, twice, then two dense layers. `network` states it in jaxconv, `lax_network` in
plain JAX; everything else is shared. The exit status is 0 if the accuracy is 97 % or more.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from jax import lax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import jaxconv

matplotlib.use("Agg")  # draws into files: no display is needed
import matplotlib.pyplot as plt

GOAL = 0.97  # held-out accuracy
SEED = 0
BATCH = 64
MOMENTUM = 0.9  # of the running statistics: a few hundred steps are too few for 0.99
EPSILON = 1e-5

Tree = Any
Network = Callable[..., tuple[jax.Array, Tree]]


# ----------------------------------------------------------------------------------------------------------------------
# The network, in jaxconv


def network(
    params: Tree, stats: Tree, images: jax.Array, *, training: bool, implementation: str | None = None
) -> tuple[jax.Array, Tree]:
    """images (N, 8, 8, 1) -> logits (N, 10), and the running statistics after this batch."""
    new_stats = {}
    x = images
    for name, stride in (("block1", 1), ("block2", 2)):
        p = params[name]
        x = jaxconv.conv2d(x, p["w"], stride=stride, padding="SAME", implementation=implementation)
        # The ReLU belongs to the batch-norm: it costs no pass over the array of its own.
        x, mean, var = jaxconv.batchnorm(
            x,
            p["scale"],
            p["bias"],
            stats[name]["mean"],
            stats[name]["var"],
            training=training,
            momentum=MOMENTUM,
            epsilon=EPSILON,
            activation="relu",
            implementation=implementation,
        )
        new_stats[name] = {"mean": mean, "var": var}
    x = x.reshape(x.shape[0], -1)
    p = params["hidden"]
    x = jaxconv.dense(x, p["w"], p["b"], activation="relu", implementation=implementation)
    p = params["out"]
    return jaxconv.dense(x, p["w"], p["b"], implementation=implementation), new_stats


# ----------------------------------------------------------------------------------------------------------------------
# The same network in plain JAX, for --compare


def lax_network(params: Tree, stats: Tree, images: jax.Array, *, training: bool) -> tuple[jax.Array, Tree]:
    new_stats = {}
    x = images
    for name, stride in (("block1", 1), ("block2", 2)):
        p, old = params[name], stats[name]
        x = lax.conv_general_dilated(x, p["w"], (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        if training:
            mean, var = jnp.mean(x, (0, 1, 2)), jnp.var(x, (0, 1, 2))
            new_stats[name] = {
                "mean": MOMENTUM * old["mean"] + (1 - MOMENTUM) * mean,
                "var": MOMENTUM * old["var"] + (1 - MOMENTUM) * var,
            }
        else:
            mean, var = old["mean"], old["var"]
            new_stats[name] = old
        x = jax.nn.relu((x - mean) / jnp.sqrt(var + EPSILON) * p["scale"] + p["bias"])
    x = x.reshape(x.shape[0], -1)
    p = params["hidden"]
    x = jax.nn.relu(x @ p["w"] + p["b"])
    p = params["out"]
    return x @ p["w"] + p["b"], new_stats


# ----------------------------------------------------------------------------------------------------------------------
# Parameters and data


def init(key: jax.Array) -> tuple[Tree, Tree]:
    """(parameters, running statistics). Filters are (R, S, C, K), matrices (K, N); He initialisation."""
    he = jax.nn.initializers.he_normal()
    keys = jax.random.split(key, 4)

    def block(key: jax.Array, c: int, k: int) -> Tree:
        return {"w": he(key, (3, 3, c, k)), "scale": jnp.ones(k), "bias": jnp.zeros(k)}

    def layer(key: jax.Array, k: int, n: int) -> Tree:
        return {"w": he(key, (k, n)), "b": jnp.zeros(n)}

    params = {
        "block1": block(keys[0], 1, 32),
        "block2": block(keys[1], 32, 64),
        "hidden": layer(keys[2], 4 * 4 * 64, 128),
        "out": layer(keys[3], 128, 10),
    }
    stats = {
        "block1": {"mean": jnp.zeros(32), "var": jnp.ones(32)},
        "block2": {"mean": jnp.zeros(64), "var": jnp.ones(64)},
    }
    return params, stats


def load() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(training images, held-out images, training labels, held-out labels); images are (N, 8, 8, 1), in [0, 1]."""
    digits = load_digits()
    images = (digits.images / 16.0).astype(np.float32)[..., None]
    return train_test_split(images, digits.target, test_size=0.25, stratify=digits.target, random_state=SEED)


def batches(
    images: np.ndarray, labels: np.ndarray, rng: np.random.Generator
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """One epoch in a random order, in batches of one size (so that everything compiles once)."""
    order = rng.permutation(len(images))
    for first in range(0, len(images) - BATCH + 1, BATCH):
        chosen = order[first : first + BATCH]
        yield images[chosen], labels[chosen]


# ----------------------------------------------------------------------------------------------------------------------
# Training


def loss_fn(params: Tree, stats: Tree, images: jax.Array, labels: jax.Array, net: Network) -> tuple[jax.Array, Tree]:
    logits, new_stats = net(params, stats, images, training=True)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels)), new_stats


def train(net: Network, data: tuple[np.ndarray, ...], epochs: int, label: str) -> dict[str, Any]:
    """Trains `net` from SEED. Returns losses of steps, held-out accuracies of epochs, and the last variables."""
    images, test_images, labels, test_labels = data
    steps = epochs * (len(images) // BATCH)
    optimizer = optax.adamw(optax.cosine_decay_schedule(3e-3, steps), weight_decay=1e-3)
    params, stats = init(jax.random.key(SEED))
    state = optimizer.init(params)

    @jax.jit
    def step(params: Tree, stats: Tree, state: Tree, x: jax.Array, y: jax.Array) -> tuple[Tree, Tree, Tree, jax.Array]:
        (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, stats, x, y, net)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), stats, state, loss

    @jax.jit
    def predict(params: Tree, stats: Tree, x: jax.Array) -> jax.Array:
        # Evaluation normalises with the running statistics: a prediction does not depend on its neighbours.
        logits, _ = net(params, stats, x, training=False)
        return jax.nn.softmax(logits)

    rng = np.random.default_rng(SEED)
    losses, accuracies = [], []
    interval = 0.1 if sys.stderr.isatty() else 5.0  # seconds between redraws: few lines where it goes to a log
    with tqdm(total=steps, desc=label, unit="step", mininterval=interval) as bar:
        for _ in range(epochs):
            for x, y in batches(images, labels, rng):
                params, stats, state, loss = step(params, stats, state, x, y)
                losses.append(loss)  # still on the device: reading it here would make Python wait for every step
                bar.update()
            probabilities = np.asarray(predict(params, stats, test_images))
            accuracies.append(np.mean(probabilities.argmax(-1) == test_labels))
            bar.set_postfix(loss=f"{float(loss):.4f}", accuracy=f"{accuracies[-1]:.2%}", refresh=False)
    return {
        "losses": np.asarray(jax.device_get(losses)),
        "accuracies": np.asarray(accuracies),
        "probabilities": probabilities,
        "variables": (params, stats),
    }


# ----------------------------------------------------------------------------------------------------------------------
# The plot


def plot(runs: dict[str, dict[str, Any]], data: tuple[np.ndarray, ...], path: pathlib.Path) -> None:
    """Learning curves on the left; on the right, held-out images with the first run's predictions."""
    _, test_images, _, test_labels = data
    figure = plt.figure(figsize=(13, 5.5), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=[1, 1.1])
    above, below = left.subplots(2, 1, sharex=True)
    for (label, run), style in zip(runs.items(), ("-", "--"), strict=False):
        steps_per_epoch = len(run["losses"]) / len(run["accuracies"])
        epochs = np.arange(1, len(run["losses"]) + 1) / steps_per_epoch
        above.semilogy(epochs, run["losses"], style, linewidth=0.8, label=label)
        below.plot(np.arange(1, len(run["accuracies"]) + 1), 100 * run["accuracies"], style, label=label)
    above.set(ylabel="training loss")
    above.legend()
    below.axhline(100 * GOAL, color="gray", linewidth=0.8, linestyle=":")
    below.set(xlabel="epoch", ylabel="held-out accuracy (%)", ylim=(85, 100.5))

    probabilities = next(iter(runs.values()))["probabilities"]
    unsure = np.argsort(probabilities.max(-1))[:15]
    right.suptitle(
        "predictions: the first 15 held-out digits, then the 15 it is least sure of\n(red: wrong, with truth)"
    )
    for axis, i in zip(right.subplots(5, 6).flat, [*range(15), *unsure], strict=True):
        guess, truth = probabilities[i].argmax(), test_labels[i]
        title = f"{guess} ({probabilities[i].max():.0%})" + ("" if guess == truth else f", is {truth}")
        axis.imshow(test_images[i, ..., 0], cmap="gray_r")
        axis.set_title(title, color="black" if guess == truth else "red", fontsize=8)
        axis.axis("off")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


# ----------------------------------------------------------------------------------------------------------------------


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument(
        "--implementation",
        choices=("native", "xla"),
        help="force jaxconv's own custom calls, or XLA; by default the fastest known for each call",
    )
    parser.add_argument("--compare", action="store_true", help="train the same network in lax and jnp too")
    parser.add_argument(
        "--output", type=pathlib.Path, default=pathlib.Path(__file__).parent / "output" / "digits.png", help="the plot"
    )
    args = parser.parse_args(argv)
    if args.epochs < 1:
        parser.error(f"--epochs={args.epochs} must be at least 1")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    started = time.perf_counter()
    data = load()
    net = functools.partial(network, implementation=args.implementation)

    # What will run: one line for each jaxconv call in the training step, forward and backward.
    params, stats = init(jax.random.key(SEED))
    explained = jaxconv.explain(jax.grad(functools.partial(loss_fn, net=net), has_aux=True))
    print(explained(params, stats, data[0][:BATCH], data[2][:BATCH]), flush=True)

    runs = {"jaxconv": train(net, data, args.epochs, "jaxconv")}
    if args.compare:
        runs["lax"] = train(lax_network, data, args.epochs, "lax    ")
    plot(runs, data, args.output)
    print(f"plot: {args.output}")
    if args.compare:
        difference = np.abs(runs["jaxconv"]["losses"] - runs["lax"]["losses"])
        print(f"largest loss difference, jaxconv - lax: {difference.max():.2e} (step {difference.argmax() + 1})")
        print(f"held-out accuracy of lax: {runs['lax']['accuracies'][-1]:.2%}")
    accuracy = runs["jaxconv"]["accuracies"][-1]
    if accuracy < GOAL:
        print(f"below the goal of {GOAL:.0%}", file=sys.stderr)
    print(f"{time.perf_counter() - started:.0f} s")
    print(f"held-out accuracy: {accuracy:.2%}")
    return 0 if accuracy >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())

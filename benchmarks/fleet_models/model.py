"""What the fleet's programs are made of: a network of any library as functions of arrays, its data, and its loss.

A `Model` is a line of the fleet: a name, a kind, who makes the network, its type and its two sizes. `of_linen`,
`of_layers` and `of_nnx` make networks of Flax's modules; the modules of the other libraries hold their own makers.

Weights are drawn by NumPy from the shapes alone (`infer.drawn`), where a library says them without computing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import infer

Tree = Any
Array = jax.Array
DTYPES = infer.DTYPES


@dataclasses.dataclass(frozen=True)
class Net:
    """A network as a function of arrays. `stats` is what changes without a gradient: batch-norms' statistics."""

    params: Tree
    stats: Tree
    apply: Callable[..., tuple[Tree, Tree]]  # (params, stats, x, train) -> (found, stats)


@dataclasses.dataclass(frozen=True)
class Goal:
    """What is trained for. `found` is the network's result, `wanted` is drawn for a tree of its shape."""

    loss: Callable[[Tree, Tree], Array]
    wanted: Callable[[np.random.Generator, Tree], Tree]  # found's shapes -> what it should be


@dataclasses.dataclass(frozen=True)
class Size:
    batch: int
    shape: tuple[int, ...]  # of an example: pixels, channels
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of the network


Maker = Callable[[Any, Mapping[str, Any], Tree], Net]  # (dtype, options, x): x is an example batch


@dataclasses.dataclass(frozen=True)
class Model:
    name: str
    kind: str
    library: str  # "linen", "nnx", "haiku", "equinox", "keras"
    make: Maker
    dtype: str  # of the computation; parameters and images are float32
    full: Size
    small: Size  # each kind of layer and little else: for a CPU
    goal: Goal | None = None  # what is trained for; None: the program answers
    rate: float = 2e-3  # of the SGD: no network without norms may diverge, all ways would agree that it does
    inputs: Callable[[np.random.Generator, tuple[int, ...]], Tree] = lambda rng, shape: noise(rng, shape)

    @property
    def use(self) -> str:
        return "infer" if self.goal is None else "train"

    def size(self, small: bool) -> Size:
        return self.small if small else self.full

    def serving(self, name: str, batch: int, shape: tuple[int, ...], dtype: str | None = None) -> Model:
        """The same network as a program that answers."""
        full = dataclasses.replace(self.full, batch=batch, shape=shape)
        small = dataclasses.replace(self.small, batch=min(batch, self.small.batch))
        return dataclasses.replace(self, name=name, full=full, small=small, dtype=dtype or self.dtype, goal=None)


# ----------------------------------------------------------------------------------------------------------------------
# Goals


def noise(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


def cross_entropy(scores: Array, classes: Array) -> Array:
    scores = jax.nn.log_softmax(scores.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(scores, classes[..., None], -1))


def squared(found: Array, wanted: Array) -> Array:
    return jnp.mean((found.astype(jnp.float32) - wanted) ** 2)


def absolute(found: Array, wanted: Array) -> Array:
    return jnp.mean(jnp.abs(found.astype(jnp.float32) - wanted))


def binary(scores: Array, truth: Array | float) -> Array:
    """Cross-entropy of independent classes: `scores` are log-odds."""
    scores = scores.astype(jnp.float32)
    return jnp.mean(jnp.logaddexp(0.0, scores) - truth * scores)


def _classes(rng: np.random.Generator, found: Any) -> np.ndarray:
    return rng.integers(0, found.shape[-1], found.shape[:-1]).astype(np.int32)


def _numbers(rng: np.random.Generator, found: Any) -> np.ndarray:
    return noise(rng, found.shape)


CLASSIFY = Goal(cross_entropy, _classes)  # of images, pixels, samples: by the last axis
REGRESS = Goal(squared, _numbers)
FIT = Goal(absolute, _numbers)
DETECT = Goal(binary, lambda rng, found: (rng.random(found.shape) < 0.02).astype(np.float32))


def heads(*goals: Goal) -> Goal:
    """The sum of the losses of a network that gives a tuple; each may be a list of several levels."""

    def loss(found: Tree, wanted: Tree) -> Array:
        pairs = zip(goals, found, wanted, strict=True)
        return sum(sum(jax.tree.leaves(jax.tree.map(goal.loss, f, w))) for goal, f, w in pairs)

    def drawn(rng: np.random.Generator, found: Tree) -> Tree:
        return tuple(jax.tree.map(functools.partial(goal.wanted, rng), f) for goal, f in zip(goals, found, strict=True))

    return Goal(loss, drawn)


# ----------------------------------------------------------------------------------------------------------------------
# Flax


def of_linen(module: Callable[..., Any]) -> Maker:
    """Of a linen module with a field `dtype`, called with (x, train)."""

    def make(dtype: Any, options: Mapping[str, Any], x: Tree) -> Net:
        model = module(**options, dtype=dtype)
        one = jax.tree.map(lambda a: a[:1], x)
        variables = infer.drawn(jax.eval_shape(functools.partial(model.init, train=False), jax.random.key(0), one))

        def apply(params: Tree, stats: Tree, x: Tree, train: bool) -> tuple[Tree, Tree]:
            variables = {"params": params, **stats}
            if not train:
                return model.apply(variables, x, train=False), stats
            found, updates = model.apply(variables, x, train=True, mutable=["batch_stats"])
            return found, {**stats, **updates}

        return Net(variables.pop("params"), variables, apply)

    return make


def of_layers(module: Callable[..., Any]) -> Maker:
    """Of a model of benchmarks/models.py, with Flax's layers."""
    import flax.linen

    return of_linen(functools.partial(module, flax.linen))


def of_nnx(module: Callable[..., Any]) -> Maker:
    """Of an nnx module, made with `dtype` and `rngs`, called with x."""

    def make(dtype: Any, options: Mapping[str, Any], x: Tree) -> Net:
        from flax import nnx

        model = nnx.eval_shape(lambda: module(**options, dtype=dtype, rngs=nnx.Rngs(0)))
        graph, params, stats = nnx.split(model, nnx.Param, ...)

        def apply(params: Tree, stats: Tree, x: Tree, train: bool) -> tuple[Tree, Tree]:
            model = nnx.merge(graph, params, stats, copy=True)  # what changes in it is its own
            model.set_attributes(use_running_average=not train, raise_if_not_found=False)
            return model(x), nnx.split(model, nnx.Param, ...)[2]

        return Net(*infer.drawn((params, stats)), apply)

    return make

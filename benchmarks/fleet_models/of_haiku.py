"""Programs in Haiku."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from benchmarks import infer
from benchmarks.fleet_models.model import CLASSIFY, REGRESS, Array, Model, Net, Size, Tree, heads


def of_haiku(net: Callable[..., Tree]) -> Callable[[Any, Mapping[str, Any], Tree], Net]:
    """Of a function (x, train, **options). Haiku computes in its parameters' type: those and x are cast to dtype."""

    def make(dtype: Any, options: Mapping[str, Any], x: Tree) -> Net:
        model = hk.transform_with_state(lambda x, train: net(x, train, **options))
        shapes, state = jax.eval_shape(lambda key, x: model.init(key, x, True), jax.random.key(0), x[:1])

        def apply(params: Tree, state: Tree, x: Array, train: bool) -> tuple[Tree, Tree]:
            params, x = jax.tree.map(lambda a: a.astype(dtype), (params, x))
            return model.apply(params, state, None, x, train)

        # Averages of 1 are a mean and a variance; counters and sums begin at 0.
        def begun(path: Any, leaf: Any) -> Any:
            return jax.numpy.full(leaf.shape, float(path[-1].key == "average"), leaf.dtype)

        return Net(infer.drawn(shapes), jax.device_get(jax.tree_util.tree_map_with_path(begun, state)), apply)

    return make


def resnet(x: Array, train: bool, features: int, blocks: tuple[int, ...]) -> Array:
    """Wide and of small images: pre-activation blocks."""

    def normalised(x: Array) -> Array:
        return jax.nn.relu(hk.BatchNorm(True, True, 0.9)(x, train))

    x = hk.Conv2D(features, 3, with_bias=False)(x)
    for stage, count in enumerate(blocks):
        for block in range(count):
            stride, width = 2 if stage and not block else 1, features * 2**stage
            y = normalised(x)
            if x.shape[-1] != width:
                x = hk.Conv2D(width, 1, stride=stride, with_bias=False)(y)
            y = normalised(hk.Conv2D(width, 3, stride=stride, with_bias=False)(y))
            x = x + hk.Conv2D(width, 3, with_bias=False)(y)
    return hk.Linear(10)(normalised(x).mean((1, 2)))


def actor(x: Array, train: bool, features: int, hidden: int, actions: int) -> tuple[Array, Array]:
    """Nature's torso with a policy and a value, as actors and critics have it."""
    for width, size, stride in ((features, 8, 4), (2 * features, 4, 2), (2 * features, 3, 1)):
        x = jax.nn.relu(hk.Conv2D(width, size, stride=stride, padding="VALID")(x))
    x = jax.nn.relu(hk.Linear(hidden)(hk.Flatten()(x)))
    return hk.Linear(actions)(x), hk.Linear(1)(x)


def characters(x: Array, train: bool, features: int, depth: int, classes: int) -> Array:
    """Text as characters: 1-D convolutions with layer-norms."""
    x = hk.Conv1D(features, 1)(x)
    for _ in range(depth):
        y = hk.LayerNorm(-1, True, True)(x)
        x = x + hk.Conv1D(features, 1)(jax.nn.gelu(hk.Conv1D(2 * features, 5)(y)))
    return hk.Linear(classes)(jnp.max(x, 1))


MODELS = (
    Model(
        *("haiku_wide_resnet", "classification-32-wide", "haiku", of_haiku(resnet), "f32"),
        Size(128, (32, 32, 3), dict(features=64, blocks=(2, 2, 2))),
        Size(4, (8, 8, 3), dict(features=8, blocks=(1, 1))),
        CLASSIFY,
    ),
    Model(
        *("haiku_actor", "actor-critic", "haiku", of_haiku(actor), "f32"),
        Size(256, (84, 84, 4), dict(features=32, hidden=512, actions=6)),
        Size(4, (36, 36, 4), dict(features=4, hidden=8, actions=6)),
        heads(CLASSIFY, REGRESS),
        rate=1e-4,
    ),
    Model(
        *("haiku_characters", "text", "haiku", of_haiku(characters), "bf16"),
        Size(128, (256, 70), dict(features=256, depth=6, classes=14)),
        Size(2, (16, 10), dict(features=8, depth=2, classes=4)),
        CLASSIFY,
    ),
)

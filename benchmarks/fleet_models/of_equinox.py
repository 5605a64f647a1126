"""Programs in Equinox: channels first, a function of one example, mapped over the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from benchmarks.fleet_models.model import CLASSIFY, Array, Model, Net, Size, Tree


def of_equinox(module: Callable[..., Any]) -> Callable[[Any, Mapping[str, Any], Tree], Net]:
    """Of a module called with (x, state). Equinox computes in its parameters' type: those and x are cast to dtype."""

    def make(dtype: Any, options: Mapping[str, Any], x: Tree) -> Net:
        with jax.default_device(jax.devices("cpu")[0]):  # its initial values are computed one by one
            net, state = eqx.nn.make_with_state(module)(key=jax.random.key(0), **options)
        params, fixed = eqx.partition(net, eqx.is_inexact_array)

        def apply(params: Tree, state: Tree, x: Array, train: bool) -> tuple[Tree, Tree]:
            params, x = jax.tree.map(lambda a: a.astype(dtype), (params, jnp.moveaxis(x, -1, 1)))
            net = eqx.nn.inference_mode(eqx.combine(params, fixed), not train)
            return jax.vmap(net, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)

        return Net(*jax.device_get((params, state)), apply)

    return make


class Digits(eqx.Module):
    """Equinox's first example: a convolution, a pooling, linear layers."""

    conv: eqx.nn.Conv2d
    pool: eqx.nn.MaxPool2d
    layers: list[eqx.nn.Linear]

    def __init__(self, size: int, features: int, hidden: int, *, key: Array):
        keys = jax.random.split(key, 3)
        self.conv = eqx.nn.Conv2d(1, features, 4, key=keys[0])
        self.pool = eqx.nn.MaxPool2d(2, 2)
        flat = features * ((size - 3) // 2) ** 2
        self.layers = [eqx.nn.Linear(flat, hidden, key=keys[1]), eqx.nn.Linear(hidden, 10, key=keys[2])]

    def __call__(self, x: Array, state: Any) -> tuple[Array, Any]:
        x = jnp.ravel(jax.nn.relu(self.pool(self.conv(x))))
        return self.layers[1](jax.nn.relu(self.layers[0](x))), state


class Tower(eqx.Module):
    """Convolutions with group-norms and silu; every second one halves the pixels."""

    convs: list[eqx.nn.Conv2d]
    norms: list[eqx.nn.GroupNorm]
    head: eqx.nn.Linear

    def __init__(self, features: tuple[int, ...], *, key: Array):
        pairs = list(zip((3, *features), features, strict=False))
        keys = jax.random.split(key, len(pairs) + 1)
        self.convs = [
            eqx.nn.Conv2d(a, b, 3, stride=1 + i % 2, padding=1, key=keys[i]) for i, (a, b) in enumerate(pairs)
        ]
        self.norms = [eqx.nn.GroupNorm(min(8, b // 2), b) for _, b in pairs]
        self.head = eqx.nn.Linear(features[-1], 10, key=keys[-1])

    def __call__(self, x: Array, state: Any) -> tuple[Array, Any]:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = jax.nn.silu(norm(conv(x)))
        return self.head(x.mean((1, 2))), state


class Residual(eqx.Module):
    """Batch-norms, whose state goes in and out."""

    convs: list[eqx.nn.Conv2d]
    norms: list[eqx.nn.BatchNorm]
    head: eqx.nn.Linear

    def __init__(self, features: int, blocks: int, *, key: Array):
        keys = jax.random.split(key, 2 * blocks + 2)
        widths = [3, *[features] * (2 * blocks)]
        self.convs = [
            eqx.nn.Conv2d(a, features, 3, padding=1, use_bias=False, key=k) for a, k in zip(widths, keys, strict=False)
        ]
        self.norms = [eqx.nn.BatchNorm(features, "batch", mode="batch") for _ in self.convs]
        self.head = eqx.nn.Linear(features, 10, key=keys[-1])

    def __call__(self, x: Array, state: Any) -> tuple[Array, Any]:
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y, state = norm(conv(x), state)
            x = jax.nn.relu(x + y if i % 2 == 0 and i else y)
        return self.head(x.mean((1, 2))), state


MODELS = (
    Model(
        *("equinox_digits", "digits", "equinox", of_equinox(Digits), "f32"),
        Size(64, (28, 28, 1), dict(size=28, features=3, hidden=512)),
        Size(4, (12, 12, 1), dict(size=12, features=3, hidden=8)),
        CLASSIFY,
    ),
    Model(
        *("equinox_tower", "channels-first-group-norm", "equinox", of_equinox(Tower), "bf16"),
        Size(64, (128, 128, 3), dict(features=(32, 64, 64, 128, 128, 256, 256))),
        Size(2, (8, 8, 3), dict(features=(4, 8, 8))),
        CLASSIFY,
    ),
    Model(
        *("equinox_residual", "channels-first-batch-norm", "equinox", of_equinox(Residual), "f32"),
        Size(64, (64, 64, 3), dict(features=64, blocks=4)),
        Size(4, (8, 8, 3), dict(features=4, blocks=1)),
        CLASSIFY,
    ),
)

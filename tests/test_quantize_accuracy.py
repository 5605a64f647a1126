"""Networks that were trained lose next to nothing in 8 bits: the examples, and a ResNet with its running statistics."""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest

import jaxconv

EXAMPLES = pathlib.Path(__file__).resolve().parent.parent / "examples"
LOSS = 0.003  # of the images, at most
TYPES = ("int8", "float8_e4m3fn")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not EXAMPLES.exists(), reason="the checkout is not beside these tests"),
]


def example(name: str) -> Any:
    pytest.importorskip("optax")
    if name == "digits":
        pytest.importorskip("sklearn")
        pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def accuracy(f: Callable[[Any], Any], images: np.ndarray, labels: np.ndarray, batch: int = 256) -> float:
    right = [
        np.asarray(f(images[i : i + batch])).argmax(-1) == labels[i : i + batch] for i in range(0, len(images), batch)
    ]
    return float(np.mean(np.concatenate(right)))


def check(wide: Any, quantised: dict[str, Any], images: np.ndarray, labels: np.ndarray, least: float) -> None:
    expected = accuracy(wide, images, labels)
    assert expected >= least
    for dtype, q in quantised.items():
        assert accuracy(q, images, labels) >= expected - LOSS, dtype


def test_digits():
    digits = example("digits")
    data = images, test_images, _, test_labels = digits.load()
    variables = digits.train(digits.network, data, 8, "digits")["variables"]

    def network(params: Any, stats: Any, x: Any) -> Any:
        return digits.network(params, stats, x, training=False)[0]

    quantised = {
        t: jaxconv.freeze(network, *variables, quantize=t, calibrate=[images[:256], images[256:512]]) for t in TYPES
    }
    assert [layer.narrow for layer in quantised["int8"].quantization] == [False, True, True, False]
    check(jaxconv.freeze(network, *variables), quantised, test_images, test_labels, 0.95)


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0], -1)
        for _ in range(3):
            x = nn.relu(nn.Dense(128)(x))
        return nn.Dense(10)(x)


class ConvNeXt(nn.Module):
    """Its blocks: a depthwise convolution, a norm, two dense layers, a scale a channel, the residual."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.LayerNorm()(nn.Conv(64, (2, 2), strides=2)(x))
        for i in range(2):
            y = nn.LayerNorm()(nn.Conv(64, (3, 3), feature_group_count=64)(x))
            y = nn.Dense(64)(nn.gelu(nn.Dense(256)(y)))
            x = x + y * self.param(f"scale{i}", nn.initializers.constant(0.5), (64,))
        return nn.Dense(10)(nn.LayerNorm()(x.mean((1, 2))))


class Mixer(nn.Module):
    """Its blocks: dense layers over the pixels, and over the channels, here without biases."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(64, (2, 2), strides=2)(x)
        x = x.reshape(x.shape[0], 16, 64)
        for _ in range(2):
            y = nn.LayerNorm()(x).swapaxes(1, 2)
            x = x + nn.Dense(16)(nn.gelu(nn.Dense(64)(y))).swapaxes(1, 2)
            y = nn.Dense(128, use_bias=False)(nn.LayerNorm()(x))
            x = x + nn.Dense(64, use_bias=False)(nn.gelu(y))
        return nn.Dense(10)(nn.LayerNorm()(x).mean(1))


@pytest.mark.parametrize(
    ("model", "narrow"), ((Mlp(), 2), (ConvNeXt(), 4), (Mixer(), 8)), ids=("mlp", "convnext", "mixer")
)
def test_dense_layers_on_digits(model, narrow):
    digits = example("digits")
    images, test_images, labels, test_labels = digits.load()
    optax = pytest.importorskip("optax")
    optimizer = optax.adamw(optax.cosine_decay_schedule(3e-3, 400), weight_decay=1e-3)
    params = jax.jit(model.init)(jax.random.key(0), images[:1])

    def loss(params: Any, x: Any, y: Any) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, x), y).mean()

    @jax.jit
    def step(params: Any, state: Any, x: Any, y: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(jax.grad(loss)(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    state, rng = optimizer.init(params), np.random.default_rng(0)
    for _ in range(20):
        for x, y in digits.batches(images, labels, rng):
            params, state = step(params, state, x, y)
    quantised = {
        t: jaxconv.freeze(model.apply, params, quantize=t, calibrate=[images[:256], images[256:512]]) for t in TYPES
    }
    assert len(quantised["int8"].quantization.narrow) == narrow
    check(jaxconv.freeze(model.apply, params), quantised, test_images, test_labels, 0.95)


class Block(nn.Module):
    features: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        conv = functools.partial(nn.Conv, self.features, use_bias=False)
        y = nn.relu(norm()(conv((3, 3), strides=self.stride)(x)))
        y = norm(scale_init=nn.initializers.zeros)(conv((3, 3))(y))
        if x.shape != y.shape:
            x = norm()(conv((1, 1), strides=self.stride)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Conv(16, (3, 3), strides=2, use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        for features, stride in ((16, 1), (32, 2), (64, 2)):
            x = Block(features, stride)(x, train)
        return nn.Dense(10)(x.mean((1, 2)))


@pytest.mark.parametrize("model", ("ResNeXt", "ResNet"))
def test_textures(model):
    """The example's grouped network, and a plain residual one: each 3x3 convolution but the first has 8 bits there."""
    textures = example("textures")
    net = textures.ResNeXt() if model == "ResNeXt" else ResNet()
    _, variables = textures.train(3, 2048, False, net)
    images, _ = textures.textures(256, seed=2)
    test_images, test_labels = textures.textures(2048, seed=1)

    def freeze(**options: Any) -> Any:
        return jaxconv.freeze(net.apply, variables, train=False, **options)

    quantised = {t: freeze(quantize=t, calibrate=[images[:128], images[128:]]) for t in TYPES}
    narrow = [layer.narrow for layer in quantised["int8"].quantization]
    assert sum(narrow) == (len(narrow) - 2 if model == "ResNet" else len(narrow) - 5)
    check(freeze(), quantised, test_images, test_labels, textures.GOAL)

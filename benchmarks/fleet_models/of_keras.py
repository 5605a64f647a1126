"""Programs in Keras, through its stateless calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import keras

from benchmarks.fleet_models.model import CLASSIFY, FIT, Array, Model, Net, Size, Tree

layers = keras.layers


def of_keras(build: Callable[..., Any]) -> Callable[[Any, Mapping[str, Any], Tree], Net]:
    """Of a function (shape of an example, **options) that makes a Keras model."""

    def make(dtype: Any, options: Mapping[str, Any], x: Tree) -> Net:
        held = keras.config.dtype_policy()
        keras.utils.set_random_seed(0)
        keras.config.set_dtype_policy("float32" if dtype == jnp.float32 else f"mixed_{jnp.dtype(dtype).name}")
        try:
            with jax.default_device(jax.devices("cpu")[0]):  # its initial values are computed one by one
                model = build(x.shape[1:], **options)
        finally:
            keras.config.set_dtype_policy(held)

        def apply(params: Tree, stats: Tree, x: Array, train: bool) -> tuple[Tree, Tree]:
            return model.stateless_call(params, stats, x, training=train)

        variables = ([v.value for v in vs] for vs in (model.trainable_variables, model.non_trainable_variables))
        return Net(*jax.device_get(tuple(variables)), apply)

    return make


def convnet(shape: tuple[int, ...], features: int) -> Any:
    """Keras's first example, without dropout."""
    return keras.Sequential(
        [
            keras.Input(shape),
            layers.Conv2D(features, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Conv2D(2 * features, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


def xception(shape: tuple[int, ...], sizes: tuple[int, ...]) -> Any:
    """Keras's image classification from scratch: separable convolutions, batch-norms, a shortcut."""
    given = keras.Input(shape)
    x = layers.Conv2D(sizes[0] // 2, 3, strides=2, padding="same")(given)
    before = x = layers.Activation("relu")(layers.BatchNormalization()(x))
    for size in sizes:
        for _ in range(2):
            x = layers.SeparableConv2D(size, 3, padding="same")(layers.Activation("relu")(x))
            x = layers.BatchNormalization()(x)
        x = layers.MaxPooling2D(3, strides=2, padding="same")(x)
        before = x = layers.add([x, layers.Conv2D(size, 1, strides=2, padding="same")(before)])
    return keras.Model(given, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def autoencoder(shape: tuple[int, ...], features: int) -> Any:
    """Keras's convolutional autoencoder: poolings down, transposed convolutions up."""
    given = x = keras.Input(shape)
    for _ in range(2):
        x = layers.MaxPooling2D(2, padding="same")(layers.Conv2D(features, 3, activation="relu", padding="same")(x))
    for _ in range(2):
        x = layers.Conv2DTranspose(features, 3, strides=2, activation="relu", padding="same")(x)
    return keras.Model(given, layers.Conv2D(shape[-1], 3, padding="same")(x))


SEPARABLE = Model(
    *("keras_xception", "separable", "keras", of_keras(xception), "f32"),
    Size(64, (180, 180, 3), dict(sizes=(256, 512, 728))),
    Size(2, (16, 16, 3), dict(sizes=(8, 12))),
    CLASSIFY,
)
MODELS = (
    Model(
        *("keras_convnet", "digits", "keras", of_keras(convnet), "f32"),
        *(Size(128, (28, 28, 1), dict(features=32)), Size(4, (12, 12, 1), dict(features=4)), CLASSIFY),
    ),
    SEPARABLE,
    Model(
        *("keras_autoencoder", "autoencoder", "keras", of_keras(autoencoder), "bf16"),
        *(Size(128, (28, 28, 1), dict(features=32)), Size(4, (8, 8, 1), dict(features=4)), FIT),
    ),
    SEPARABLE.serving("keras_xception_serve", 32, (180, 180, 3)),
)

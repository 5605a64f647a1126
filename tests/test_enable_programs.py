"""`jaxconv.enable` on programs as users of JAX's libraries write them: the same losses, and every convolution taken.

A program is a function that returns the losses of a few steps. It runs as it is, and with enable on and native code
forced; the report counts the convolutions of what was compiled meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxconv

Forms = dict[str, int]
# Of this kind, because XLA compiles the default kind's bits for seconds on a CPU, for each shape anew.
KEY = jax.random.key(0, impl="unsafe_rbg")


@pytest.fixture(autouse=True)
def full_float32():
    """float32's accuracy on a GPU too."""
    with jax.default_matmul_precision("highest"):
        yield


def images(n: int, size: int, channels: int = 3, seed: int = 0) -> jax.Array:
    return jnp.asarray(helpers.normal(seed, (n, size, size, channels)), jnp.float32)


def with_and_without(program: Callable[[], list[float]], rtol: float = 1e-5) -> Forms:
    """The convolutions taken of each form, of a program that has the same losses either way and leaves none to lax."""
    with jaxconv.disabled():
        plain = program()
    jaxconv.report(clear=True)
    with jaxconv.enabled(implementation="native"):
        ours = program()
    found = jaxconv.report(clear=True)
    assert not found.left, found
    np.testing.assert_allclose(ours, plain, rtol=rtol)
    assert np.ptp(plain) > 1e-3 * np.abs(plain[0]), "the program does not train"
    return {form: sum(one.count for one in found if one.form == form) for form in ("fprop", "dgrad", "wgrad")}


def descend(params: Any, grads: Any, rate: float = 0.05) -> Any:
    return jax.tree.map(lambda p, g: p - rate * g, params, grads)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(labels)), labels])


def test_two_losses_of_a_dcgan():
    """Transposed layers' forward is a dgrad; the generator's loss needs the discriminator's gradient of images."""

    class Generator(nn.Module):
        @nn.compact
        def __call__(self, z):
            x = nn.relu(nn.Dense(4 * 4 * 16)(z).reshape(-1, 4, 4, 16))
            x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.ConvTranspose(8, (4, 4), (2, 2))(x)))
            return jnp.tanh(nn.ConvTranspose(3, (4, 4), (2, 2))(x))

    class Discriminator(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.leaky_relu(nn.Conv(8, (4, 4), 2)(x), 0.2)
            x = nn.leaky_relu(nn.Conv(16, (4, 4), 2)(x), 0.2)
            return nn.Dense(1)(x.reshape(len(x), -1))

    generator, discriminator = Generator(), Discriminator()
    real, noise = images(4, 16), jnp.asarray(helpers.normal(1, (2, 4, 8)), jnp.float32)
    g0, d0 = jax.jit(generator.init)(KEY, noise[0]), jax.jit(discriminator.init)(KEY, real)

    def program():
        g, d = g0, d0

        def fake(params, z):
            return generator.apply(params, z, mutable=["batch_stats"])[0]

        @jax.jit
        def step_of_discriminator(g, d, z):
            def loss(d):
                of_fake = discriminator.apply(d, fake(g, z))
                return jnp.mean(nn.softplus(-discriminator.apply(d, real)) + nn.softplus(of_fake))

            value, grads = jax.value_and_grad(loss)(d)
            return descend(d, grads), value

        @jax.jit
        def step_of_generator(g, d, z):
            value, grads = jax.value_and_grad(lambda g: jnp.mean(nn.softplus(-discriminator.apply(d, fake(g, z)))))(g)
            return descend(g, grads), value

        losses = []
        for z in noise:
            d, first = step_of_discriminator(g, d, z)
            g, second = step_of_generator(g, d, z)
            losses += [float(first), float(second)]
        return losses

    # Of the discriminator's step: two transposed layers; two layers of two batches, their filters' gradients, and of
    # each batch the second layer's images'. Of the generator's: both models forward; the gradients of the images of all
    # four layers, which a transposed layer's is an fprop for; those of the transposed layers' filters.
    first, second = {"fprop": 4, "dgrad": 2 + 2, "wgrad": 4}, {"fprop": 2 + 2, "dgrad": 2 + 2, "wgrad": 2}
    assert with_and_without(program) == {form: first[form] + second[form] for form in first}


def test_second_derivatives_of_a_pinn():
    """u'' + u = f on a grid, u a network over windows of coordinates; its parameters' gradient is of third order."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            for features in (8, 8):
                x = jnp.tanh(nn.Conv(features, (5,))(x))
            return nn.Conv(1, (1,))(x)[..., 0]

    net, x = Net(), jnp.linspace(-1, 1, 24)[None, :, None]
    initial = jax.jit(net.init)(KEY, x)

    def program():
        params = initial

        @jax.jit
        def step(params):
            def loss(params):
                def total(x):
                    return jnp.sum(net.apply(params, x))

                u = net.apply(params, x)
                second = jax.jvp(jax.grad(total), (x,), (jnp.ones_like(x),))[1][..., 0]
                return jnp.mean((second + u - jnp.sin(3 * x[..., 0])) ** 2) + u[0, 0] ** 2 + u[0, -1] ** 2

            value, grads = jax.value_and_grad(loss)(params)
            return descend(params, grads), value

        losses = []
        for _ in range(3):
            params, value = step(params)
            losses.append(float(value))
        return losses

    forms = with_and_without(program)
    # Three layers: u; total's forward, gradient of x, their tangents; and of each what the parameters' gradient needs.
    assert forms["fprop"] >= 9 and forms["dgrad"] >= 6 and forms["wgrad"] >= 9


def test_per_example_gradients_clipped():
    """As differentially private training takes them: vmap(grad), each clipped, then their mean."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.GroupNorm(4)(nn.Conv(8, (3, 3), 2)(x)))
            x = nn.relu(nn.Conv(8, (3, 3), feature_group_count=4)(x))
            return nn.Dense(5)(x.mean((1, 2)))

    net, x, labels = Net(), images(6, 10), jnp.arange(6) % 5
    initial = jax.jit(net.init)(KEY, x)

    def program():
        params = initial

        def loss(params, x, label):
            return cross_entropy(net.apply(params, x[None]), label[None])

        @jax.jit
        def step(params):
            values, grads = jax.vmap(jax.value_and_grad(loss), (None, 0, 0))(params, x, labels)
            norms = jnp.sqrt(sum(jnp.sum(g**2, range(1, g.ndim)) for g in jax.tree.leaves(grads)))
            scale = jnp.minimum(1, 1 / norms)
            return descend(params, jax.tree.map(lambda g: jnp.tensordot(scale, g, 1) / 6, grads), 0.5), values.mean()

        losses = []
        for _ in range(3):
            params, value = step(params)
            losses.append(float(value))
        return losses

    # Two layers; the images themselves need no gradient.
    assert with_and_without(program) == {"fprop": 2, "dgrad": 1, "wgrad": 2}


def test_a_haiku_loop():
    hk = pytest.importorskip("haiku", reason="the layers are Haiku's: pip install dm-haiku")
    optax = pytest.importorskip("optax", reason="the optimizer is Optax's")
    x, labels = images(4, 12), jnp.arange(4)

    def net(x):
        x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(hk.Conv2D(8, 3)(x), True))
        x = jax.nn.relu(hk.DepthwiseConv2D(1, 3, stride=2)(x))
        x = jax.nn.relu(hk.Conv2DTranspose(8, 3, stride=2)(x))
        lines = hk.Conv1D(8, 5, data_format="NCW")(jnp.moveaxis(x.reshape(len(x), -1, 8), 1, 2)).mean(2)
        return hk.Linear(5)(jnp.concatenate([x.mean((1, 2)), lines], -1))

    model, optimizer = hk.transform_with_state(net), optax.adam(1e-2)
    initial = jax.jit(model.init)(KEY, x)

    def program():
        params, state = initial
        moments = optimizer.init(params)

        def loss(params, state):
            logits, state = model.apply(params, state, None, x)
            return cross_entropy(logits, labels), state

        @jax.jit
        def step(params, state, moments):
            (value, state), grads = jax.value_and_grad(loss, has_aux=True)(params, state)
            updates, moments = optimizer.update(grads, moments)
            return optax.apply_updates(params, updates), state, moments, value

        losses = []
        for _ in range(3):
            params, state, moments, value = step(params, state, moments)
            losses.append(float(value))
        return losses

    # Four layers, one of them transposed.
    assert with_and_without(program, rtol=1e-4) == {"fprop": 3 + 1, "dgrad": 1 + 2, "wgrad": 4}


def test_an_equinox_loop():
    eqx = pytest.importorskip("equinox", reason="the layers are Equinox's: pip install equinox")
    optax = pytest.importorskip("optax", reason="the optimizer is Optax's")
    x, labels = jnp.moveaxis(images(4, 12), -1, 1), jnp.arange(4)

    class Net(eqx.Module):
        layers: list[Any]
        head: Any

        def __init__(self, key):
            keys = jax.random.split(key, 4)
            self.layers = [
                eqx.nn.Conv2d(3, 8, 3, padding="SAME", key=keys[0]),
                eqx.nn.Conv2d(8, 8, 3, stride=2, groups=4, key=keys[1]),
                eqx.nn.ConvTranspose2d(8, 6, 3, stride=2, key=keys[2]),
            ]
            self.head = eqx.nn.Linear(6, 5, key=keys[3])

        def __call__(self, x):
            for layer in self.layers:
                x = jax.nn.relu(layer(x))
            return self.head(x.mean((1, 2)))

    initial, optimizer = eqx.filter_jit(Net)(KEY), optax.adam(1e-2)

    def program():
        net = initial
        moments = optimizer.init(eqx.filter(net, eqx.is_array))

        @eqx.filter_value_and_grad
        def loss(net):
            return cross_entropy(jax.vmap(net)(x), labels)

        @eqx.filter_jit
        def step(net, moments):
            value, grads = loss(net)
            updates, moments = optimizer.update(grads, moments)
            return eqx.apply_updates(net, updates), moments, value

        losses = []
        for _ in range(3):
            net, moments, value = step(net, moments)
            losses.append(float(value))
        return losses

    assert with_and_without(program, rtol=1e-4) == {"fprop": 2 + 1, "dgrad": 1 + 1, "wgrad": 3}


def test_keras_fit_of_an_application():
    os.environ.setdefault("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras", reason="the model is Keras's: pip install keras")
    if keras.backend.backend() != "jax":
        pytest.skip("Keras runs on another backend than JAX")
    x, labels = np.asarray(images(8, 64)), np.arange(8) % 5

    def program():
        keras.utils.set_random_seed(0)
        model = keras.applications.MobileNet((64, 64, 3), alpha=0.25, dropout=0.0, weights=None, classes=5)
        model.compile(keras.optimizers.SGD(1e-3), keras.losses.SparseCategoricalCrossentropy())
        return model.fit(x, labels, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]

    # Of 27 batch-norms the last see 32 numbers a channel: images off by a rounding move the second loss by 2e-5 of it,
    # and the third would move by percents. 14 convolutions and the head's, 13 depthwise ones; images need no gradient.
    assert with_and_without(program, rtol=1e-3) == {"fprop": 28, "dgrad": 27, "wgrad": 28}

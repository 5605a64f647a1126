"""accelerate on the layers of Haiku, Equinox and Keras, as their users write training steps; on those of AQT."""

from __future__ import annotations

import os
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax_cases import array, assert_same

import jaxconv
from jaxconv.accelerate import accelerate
from jaxconv.freeze import freeze

IMAGES = array(0, (4, 8, 8, 3))


@pytest.fixture(autouse=True)
def full_precision():
    """Products in float32 on a GPU too: TF32 would hide what is compared."""
    with jax.default_matmul_precision("highest"):
        yield


def close(ours: Any, plain: Any) -> None:
    """Equal trees: each leaf's type, and its numbers up to the rounding that three steps pass on."""
    assert jax.tree.structure(ours) == jax.tree.structure(plain)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        assert type(a) is type(b)
        if isinstance(b, jax.Array):
            assert (a.dtype, a.weak_type, a.shape) == (b.dtype, b.weak_type, b.shape)
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


def fused(report: Any) -> list[str]:
    return [finding.fused for finding in report if finding.what != "conv"]


# ----------------------------------------------------------------------------------------------------------------------
# Haiku


@pytest.mark.parametrize("train", (True, False), ids=("training", "inference"))
def test_haiku(train):
    hk = pytest.importorskip("haiku", reason="the layers are Haiku's: pip install dm-haiku")

    def net(x):
        for bias in (True, False):
            x = hk.Conv2D(8, 3, with_bias=bias)(x)
            x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(x, train))
        return hk.Linear(5)(x.mean((1, 2)))

    model = hk.transform_with_state(net)
    # Initialised as in training, where both need the same parameters.
    params, state = hk.transform_with_state(net).init(jax.random.key(0), IMAGES) if train else _haiku_variables(hk)
    kind = "training" if train else "inference"
    report = accelerate(model.apply).report(params, state, None, IMAGES)
    expected = [f"conv + bias + batchnorm ({kind}) + relu", f"conv + batchnorm ({kind}) + relu", "dense + bias"]
    assert fused(report) == expected

    def trained(apply):
        def loss(params, state):
            y, state = apply(params, state, None, IMAGES)
            return (y**2).mean(), state

        @jax.jit
        def step(params, state):
            (value, state), grads = jax.value_and_grad(loss, has_aux=True)(params, state)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), state, value

        p, s = params, state
        for _ in range(3):
            p, s, value = step(p, s)
        return p, s, value

    close(trained(accelerate(model.apply)), trained(model.apply))
    with pytest.raises(TypeError, match=r"accelerate\(f.apply\)"):
        accelerate(model)


def test_haiku_exported_for_any_batch():
    hk = pytest.importorskip("haiku", reason="the layers are Haiku's: pip install dm-haiku")

    def net(x):
        x = jax.nn.silu(hk.GroupNorm(2)(hk.Conv2D(8, 3)(x)))
        return hk.Linear(5)(x.mean((1, 2)))

    model = hk.without_apply_rng(hk.transform(net))
    params = model.init(jax.random.key(0), IMAGES)
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b,8,8,3"), "float32")
    for f in (accelerate(lambda x: model.apply(params, x)), freeze(model.apply, params)):
        assert "groupnorm + silu" in fused(f.report(shape))
        exported = jax.export.export(jax.jit(f), disabled_checks=jaxconv.export_checks())(shape)
        np.testing.assert_allclose(exported.call(IMAGES), model.apply(params, IMAGES), rtol=1e-4, atol=1e-5)


def _haiku_variables(hk: Any) -> Any:
    def net(x):
        for bias in (True, False):
            x = hk.Conv2D(8, 3, with_bias=bias)(x)
            x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(x, True))
        return hk.Linear(5)(x.mean((1, 2)))

    model = hk.transform_with_state(net)
    params, state = model.init(jax.random.key(0), IMAGES)
    return params, model.apply(params, state, None, IMAGES)[1]


# ----------------------------------------------------------------------------------------------------------------------
# Equinox


@pytest.mark.parametrize("mode", ("batch", "ema"))
@pytest.mark.parametrize("inference", (False, True), ids=("training", "inference"))
def test_equinox(mode, inference):
    eqx = pytest.importorskip("equinox", reason="the layers are Equinox's: pip install equinox")

    class Net(eqx.Module):
        conv: Any
        norm: Any
        head: Any

        def __init__(self, key):
            self.conv = eqx.nn.Conv2d(3, 8, 3, key=key)
            self.norm = eqx.nn.BatchNorm(8, "batch", mode=mode)
            self.head = eqx.nn.Linear(8, 5, key=key)

        def __call__(self, x, state):
            y, state = self.norm(self.conv(x), state)
            return self.head(jax.nn.relu(y).mean((1, 2))), state

    net, state = eqx.nn.make_with_state(Net)(jax.random.key(0))
    images = jnp.moveaxis(IMAGES, -1, 1)

    def loss(net, state, x):
        y, state = jax.vmap(net, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
        return (y**2).mean(), state

    _, state = loss(net, state, images)  # statistics
    net = eqx.nn.inference_mode(net, inference)

    def trained(loss):
        @eqx.filter_jit
        def step(net, state, x):
            (value, state), grads = eqx.filter_value_and_grad(loss, has_aux=True)(net, state, x)
            return eqx.apply_updates(net, jax.tree.map(lambda g: -0.1 * g, grads)), state, value

        n, s = net, state
        for _ in range(3):
            n, s, value = step(n, s, images)
        return eqx.filter(n, eqx.is_array), eqx.filter(s, eqx.is_array), value

    expected = {
        ("batch", False): "conv + bias + batchnorm (training) + relu",
        ("ema", False): "batchnorm (given statistics) + relu",
    }
    found = fused(accelerate(loss).report(net, state, images))
    assert found == [expected.get((mode, inference), "conv + bias + batchnorm (inference) + relu"), "dense + bias"]
    close(trained(accelerate(loss)), trained(loss))
    close(accelerate(loss)(net, state, images), loss(net, state, images))  # structure and types, without a jit around


# ----------------------------------------------------------------------------------------------------------------------
# Keras


@pytest.fixture
def keras():
    os.environ.setdefault("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras", reason="the layers are Keras's: pip install keras")
    if keras.backend.backend() != "jax":
        pytest.skip("Keras runs on another backend than JAX")
    return keras


def keras_model(keras: Any) -> Any:
    keras.utils.set_random_seed(0)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(8, 3, padding="same"),
            layers.BatchNormalization(momentum=0.5),
            layers.ReLU(),
            layers.Conv2D(8, 3, use_bias=False),
            layers.BatchNormalization(momentum=0.5),
            layers.ReLU(6.0),
            layers.Dropout(0.5),
            layers.Flatten(),
            layers.Dense(5, activation="gelu"),
        ]
    )


def values(model: Any) -> list[jax.Array]:
    return [variable.value for variable in model.variables]


@pytest.mark.parametrize("train", (True, False), ids=("training", "inference"))
def test_keras_layers_are_recognised(train, keras):
    model, kind = keras_model(keras), "training" if train else "inference"
    assert fused(accelerate(model).report(IMAGES, training=train)) == [
        f"conv + bias + batchnorm ({kind}) + relu",
        f"conv + batchnorm ({kind}) + relu6",
        "dense + bias + gelu_exact",
    ]


def test_keras_variables_are_written_back(keras):
    ours, plain = keras_model(keras), keras_model(keras)
    for _ in range(2):
        close(accelerate(ours)(IMAGES, training=True), plain(IMAGES, training=True))
    close(values(ours), values(plain))
    # seeds and statistics have changed
    assert not all(np.array_equal(a, b) for a, b in zip(values(ours), values(keras_model(keras)), strict=True))
    with pytest.raises(TypeError, match=r"moving_mean gets a value inside jax.jit.*stateless_call"):
        jax.jit(lambda x: accelerate(ours)(x, training=True))(IMAGES)
    close(values(ours), values(plain))
    close(jax.jit(accelerate(ours))(IMAGES), jax.jit(plain)(IMAGES))


def test_keras_stateless_calls_and_scopes(keras):
    model = keras_model(keras)
    trainable = [v.value for v in model.trainable_variables]
    rest = [v.value for v in model.non_trainable_variables]

    def step(call):
        def loss(trainable, rest, x):
            y, rest = call(trainable, rest, x, training=True)
            return (y**2).mean(), rest

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(trainable, rest, IMAGES)

    close(step(accelerate(model.stateless_call)), step(model.stateless_call))

    def in_scope(call):
        @jax.jit
        def f(given, x):
            with keras.StatelessScope(list(zip(model.variables, given, strict=True))) as scope:
                y = call(x, training=True)
            return y, [scope.get_current_value(v) for v in model.variables]

        return f([2 * v for v in values(model)], IMAGES)

    close(in_scope(accelerate(model)), in_scope(model))


def test_keras_fit_trains_to_the_same_losses(keras):
    def losses(fast):
        model = keras_model(keras)
        if fast:
            model.call = accelerate(model.call)
        model.compile("sgd", "mse")
        return model.fit(IMAGES, np.ones((4, 5)), epochs=3, batch_size=4, verbose=0).history["loss"], values(model)

    (ours, ours_after), (plain, plain_after) = losses(True), losses(False)
    np.testing.assert_allclose(ours, plain, rtol=1e-4)
    close(ours_after, plain_after)


class Variable:
    """Keras's variable and its scope, as far as accelerate knows them."""

    path = "layer/mean"
    scope: Any = None

    def __init__(self, value: jax.Array):
        self._value = value

    @property
    def value(self) -> jax.Array:
        given = Variable.scope.state_mapping.get(id(self)) if Variable.scope else None
        return self._value if given is None else given

    def assign(self, value: jax.Array) -> None:
        if Variable.scope:
            Variable.scope.add_update((self, value))
        else:
            self._value = value


class Scope:
    def __init__(self, state_mapping: Any = (), collect_losses: bool = False):
        self.state_mapping = {id(variable): value for variable, value in state_mapping}
        self.collect_losses, self.losses = collect_losses, []

    def add_update(self, update: Any) -> None:
        self.state_mapping[id(update[0])] = update[1]

    def __enter__(self) -> Scope:
        self.original_scope, Variable.scope = Variable.scope, self
        return self

    def __exit__(self, *_: Any) -> None:
        Variable.scope = self.original_scope


def test_assigned_variables_keep_no_tracer(monkeypatch):
    monkeypatch.setitem(sys.modules, "keras", types.SimpleNamespace(StatelessScope=Scope))
    mean = Variable(jnp.zeros(3))

    def f(x):
        mean.assign(0.5 * mean.value + x.mean((0, 1, 2)))
        return x - mean.value

    accelerate(f)(IMAGES)
    np.testing.assert_allclose(mean.value, IMAGES.mean((0, 1, 2)), rtol=1e-5, atol=1e-6)
    assert accelerate(f).report(IMAGES) == []  # and changes nothing
    np.testing.assert_allclose(mean.value, IMAGES.mean((0, 1, 2)), rtol=1e-5, atol=1e-6)
    before = mean.value
    with pytest.raises(TypeError, match=r"layer/mean gets a value inside jax.jit"):
        jax.jit(accelerate(f))(IMAGES)
    assert mean.value is before

    @jax.jit
    def inside(start, x):
        with Scope([(mean, start)]) as scope:
            y = accelerate(f)(x)
        return y, scope.state_mapping[id(mean)]

    y, after = inside(jnp.ones(3), IMAGES)
    assert_same(after, 0.5 + IMAGES.mean((0, 1, 2)), terms=256)
    assert_same(y, IMAGES - after, terms=256)
    assert mean.value is before and Variable.scope is None


# ----------------------------------------------------------------------------------------------------------------------
# AQT


@pytest.mark.parametrize("images", (1, 2))
def test_aqt(images):
    """It convolves floats that hold int8. Its activations have a scale an image: of one image that is a number."""
    aqt = pytest.importorskip("aqt.jax.v2.aqt_conv_general", reason="the convolution is AQT's: pip install aqtp")
    nn = pytest.importorskip("flax.linen")
    quantised = aqt.make_conv_general_dilated(aqt.conv_general_dilated_make(2, 8, 8))
    model = nn.Sequential([nn.Conv(32, (3, 3), conv_general_dilated=quantised), nn.relu])
    x = array(1, (images, 8, 8, 16))
    variables = model.init(jax.random.key(0), x)
    expected = jax.jit(model.apply)(variables, x)
    became = ["conv of 8 bits" + (" + scale + bias + relu" if images == 1 else "")]
    accelerated = accelerate(model.apply)
    assert [finding.fused for finding in accelerated.report(variables, x)] == became
    close(jax.jit(accelerated)(variables, x), expected)
    frozen = freeze(model.apply, variables)
    assert [finding.fused for finding in frozen.report(x)] == became
    np.testing.assert_allclose(frozen(x), expected, rtol=1e-3, atol=1e-4)
    assert {a.dtype.name for name, a in frozen.weights.items() if a.ndim == 4 and a.shape[0] == 3} == {"int8"}

"""jaxconv.freeze: the plain model's numbers, what is computed once, what a frozen function can do, what it refuses."""

from __future__ import annotations

import concurrent.futures
import copy
import dataclasses
import functools
import os
import pickle
import subprocess
import sys
import textwrap
from typing import Any

import flax.linen as nn
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_cases import KEY, array, assert_same, randomised
from jax import export, lax

import jaxconv
from jaxconv.freeze import split


@pytest.fixture(autouse=True)
def full_precision():
    """Products in float32 on a GPU too: TF32 would hide what is compared."""
    with jax.default_matmul_precision("highest"):
        yield


X = array(0, (2, 6, 6, 4))


class Layers(nn.Module):
    """A list of layers by name, each with its arguments, as Flax's users write them."""

    names: tuple[str, ...]
    activation: Any = nn.relu
    dtype: Any = None
    options: Any = ()

    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        conv = functools.partial(
            nn.Conv, 8, dtype=self.dtype, **{"kernel_size": (3,) * (x.ndim - 2), **dict(self.options)}
        )
        shortcut = None
        for name in self.names:
            match name:
                case "conv":
                    x = conv(use_bias=False)(x)
                case "conv_bias":
                    x = conv()(x)
                case "transposed":
                    x = nn.ConvTranspose(8, (3,) * (x.ndim - 2), strides=(2,) * (x.ndim - 2), dtype=self.dtype)(x)
                case "dense":
                    x = nn.Dense(8, dtype=self.dtype)(x)
                case "bn":
                    x = nn.BatchNorm(use_running_average=not train, dtype=self.dtype)(x)
                case "act":
                    x = self.activation(x)
                case "split":
                    shortcut = x
                case "add":
                    x = x + shortcut
                case "pool":
                    x = x.mean(tuple(range(1, x.ndim - 1)))
        return x


def frozen_and_plain(model: nn.Module, x: jax.Array = X) -> tuple[jaxconv.Frozen, Any, Any]:
    variables = randomised(jax.eval_shape(model.init, KEY, x))
    plain = jax.jit(functools.partial(model.apply, train=False))
    return jaxconv.freeze(model.apply, variables, train=False), plain, variables


def check(model: nn.Module, x: jax.Array = X, *, convs: int, norms: int = 0, dtype: Any = None) -> jaxconv.Frozen:
    """The plain model's numbers, from so many convolutions and batch-norms and nothing that only weights ask for."""
    frozen, plain, variables = frozen_and_plain(model, x)
    expected = plain(variables, x)
    largest = max(a.size for a in jax.tree.leaves(variables))
    assert_same(frozen(x), expected, terms=largest, rounded_to=dtype)
    found = helpers.equations(frozen, x)
    assert sum(found[f"jaxconv_{name}"] for name in ("conv", "conv_add", "conv_fprop", "conv_dgrad")) == convs
    assert found["jaxconv_batchnorm_infer"] == norms
    # No arithmetic on the weights is left: what remains goes through pixels.
    assert not {"rsqrt", "sqrt", "transpose", "rev"} & set(found)
    return frozen


# ----------------------------------------------------------------------------------------------------------------------
# Numbers

ACTIVATIONS = {
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "leaky_relu": jax.nn.leaky_relu,
    "leaky_relu_0.25": functools.partial(jax.nn.leaky_relu, negative_slope=0.25),
    "elu": jax.nn.elu,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "hard_swish": jax.nn.hard_swish,
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_behind_a_folded_batchnorm(activation):
    frozen = check(Layers(("conv_bias", "bn", "act"), ACTIVATIONS[activation]), convs=1)
    name = activation.replace("leaky_relu_0.25", "leaky_relu(0.25)")
    assert frozen.report(X).replaced[-1].fused.startswith(f"conv + bias + batchnorm (inference) + {name}")
    assert {name: a.shape for name, a in frozen.weights.items()} == {
        "params/Conv_0/kernel": (3, 3, 4, 8),
        "params/BatchNorm_0/bias": (8,),
    }


def _cubes(*shape: int) -> jax.Array:
    return array(3, shape)


# id: (layers, x, options of the convolutions, convolutions and batch-norms that are left)
ORDERS = {
    "conv_act": (("conv_bias", "act"), X, {}, 1, 0),
    "conv_bn": (("conv", "bn"), X, {}, 1, 0),
    "conv_bn_act": (("conv", "bn", "act"), X, {}, 1, 0),
    "conv_bias_bn_act_twice": (("conv_bias", "bn", "act") * 2, X, {}, 2, 0),
    "bn_act_conv": (("bn", "act", "conv"), X, {}, 1, 1),
    "bn_conv_bn": (("bn", "conv_bias", "bn"), X, {}, 1, 1),
    "conv_act_bn": (("conv_bias", "act", "bn"), X, {}, 1, 1),
    "conv_bn_add_act": (("conv", "split", "conv", "bn", "add", "act"), X, {}, 2, 0),
    "conv_add_bn": (("conv", "split", "conv", "add", "bn"), X, {}, 2, 1),
    "depthwise": (("conv", "bn", "act"), _cubes(2, 6, 6, 8), dict(feature_group_count=8), 1, 0),
    "grouped": (("conv_bias", "bn", "act"), X, dict(feature_group_count=2, strides=2), 1, 0),
    "dilated": (("conv", "bn"), X, dict(kernel_dilation=(1, 2), padding="VALID"), 1, 0),
    "1d": (("conv_bias", "bn", "act"), _cubes(2, 9, 4), {}, 1, 0),
    "3d": (("conv", "bn", "act"), _cubes(2, 4, 5, 3, 4), {}, 1, 0),
    "transposed": (("transposed", "bn", "act"), X, {}, 1, 0),
    "transposed_add": (("transposed", "split", "transposed", "bn", "pool", "dense"), X, {}, 2, 0),
    "dense": (("dense", "act"), X[:, 0, 0], {}, 0, 0),
    "dense_bn": (("dense", "bn", "act"), X[:, 0, 0], {}, 0, 0),
    "dense_bn_of_pixels": (("dense", "bn", "split", "dense", "bn", "add"), X, {}, 0, 0),
    "head": (("conv", "bn", "act", "pool", "dense"), X, {}, 1, 0),
}


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_of_layers(order):
    names, x, options, convs, norms = ORDERS[order]
    check(Layers(names, options=tuple(options.items())), x, convs=convs, norms=norms)


@pytest.mark.parametrize("dtype", ("bfloat16", "float16", "float32"))
@pytest.mark.parametrize("inputs", ("float32", "same"))
def test_every_type(dtype, inputs):
    x = X.astype(dtype if inputs == "same" else inputs)
    names = ("conv_bias", "bn", "act", "split", "conv", "bn", "add", "act", "pool", "dense")
    frozen = check(Layers(names, dtype=jnp.dtype(dtype)), x, convs=2, dtype=jnp.dtype(dtype))
    # As kernels read them: rounded once, outside.
    assert {a.dtype.name for a in frozen.weights.values()} == {dtype}


class Bottlenecks(nn.Module):
    """A block whose shortcut is a convolution, and one whose shortcut is its input."""

    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        norm = functools.partial(nn.BatchNorm, use_running_average=not train)
        for stride in (2, 1):
            y = nn.relu(norm()(nn.Conv(4, (1, 1), use_bias=False)(x)))
            y = nn.relu(norm()(nn.Conv(4, (3, 3), strides=stride, use_bias=False)(y)))
            y = norm()(nn.Conv(16, (1, 1), use_bias=False)(y))
            if x.shape != y.shape:
                x = norm(name="shortcut_norm")(nn.Conv(16, (1, 1), strides=stride, use_bias=False, name="shortcut")(x))
            x = nn.relu(x + y)
        return x


def test_nothing_is_left_between_the_convolutions_of_a_residual_network():
    frozen = check(Bottlenecks(), convs=7)
    found = helpers.equations(frozen, X)
    assert found["jaxconv_conv_add"] == 2  # one a block
    assert sum(found.values()) - found["jit"] == 7
    adding = [f for f in frozen.report(X).replaced if "residual" in f.fused]
    assert {f.fused for f in adding} == {"conv + batchnorm (inference) + residual + relu"}
    # Of two whose results are added, the later one takes the other's.
    assert [f.where.rpartition("/")[2] for f in adding] == ["shortcut_norm", "BatchNorm_5"]


def test_a_folding_that_is_wrong_is_seen(monkeypatch):
    """The comparison above is worth something: another epsilon is found."""
    from jaxconv._flax import fused as _fused

    right = _fused.folded
    monkeypatch.setattr(_fused, "folded", lambda *args: right(*args[:-2], 10 * args[-2], args[-1]))
    with pytest.raises(AssertionError, match="exceeds its bound"):
        check(Layers(("conv", "bn", "act")), convs=1)


def test_a_product_that_a_batchnorm_takes_in_is_not_reported_as_left():
    class Bare(nn.Module):
        @nn.compact
        def __call__(self, x: Any, train: bool = False) -> Any:
            return nn.BatchNorm(use_running_average=not train)(nn.Dense(8, use_bias=False)(x))

    frozen = check(Bare(), X[:, 0, 0], convs=0)
    assert [(f.what, f.fused) for f in frozen.report(X[:, 0, 0])] == [("batchnorm", "dense + batchnorm (inference)")]


def test_filters_are_rounded_once_after_the_folding():
    """The float32 filters, folded, in bfloat16: not those of filters that were rounded before."""
    frozen, _, variables = frozen_and_plain(Layers(("conv", "bn"), dtype=jnp.bfloat16))
    frozen(X)
    norm = {**variables["params"]["BatchNorm_0"], **variables["batch_stats"]["BatchNorm_0"]}
    scale = np.asarray(norm["scale"], np.float64) / np.sqrt(np.asarray(norm["var"], np.float64) + 1e-5)
    exact = np.asarray(variables["params"]["Conv_0"]["kernel"], np.float64) * scale
    error = np.abs(np.asarray(frozen.weights["params/Conv_0/kernel"], np.float64) - exact)
    assert np.all(error <= (2.0**-8 + 2.0**-20) * np.abs(exact))


class Remat(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        return nn.remat(Layers)(("conv", "bn", "act"))(x)


def test_layers_inside_remat_are_folded_too():
    frozen = check(Remat(), convs=1)
    assert len(frozen.weights) == 2 and "remat2" not in helpers.equations(frozen, X)


def test_jaxconvs_own_layers_are_folded():
    def f(p, x):
        y, *_ = jaxconv.conv_batchnorm(x, p["w"], p["scale"], p["bias"], p["mean"], p["var"], training=False)
        return y

    shapes = {"w": (3, 3, 4, 8), **dict.fromkeys(("scale", "bias", "mean", "var"), (8,))}
    p = randomised({name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()})
    frozen = jaxconv.freeze(f, p)
    assert_same(frozen(X), f(p, X), terms=36)
    assert sorted(frozen.weights) == ["bias", "w"]


class Gates(nn.Module):
    """Of means; with `excites` what they are for."""

    excites: bool = False

    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        s = nn.silu(nn.Conv(4, (1, 1))(x.mean((1, 2), keepdims=True)))
        gates = nn.sigmoid(nn.Conv(4, (1, 1))(s))
        return nn.Dense(5)(((x if self.excites else 1) * gates).mean((1, 2)))


@pytest.mark.parametrize("images", (1, 2))
def test_vectors_beside_one_pixel_of_one_image_are_biases(images):
    """A bias in the result's own shape, (1, 1, 1, C)."""
    x = X[:images]
    frozen = check(Gates(), x, convs=2)
    fused = [finding.fused for finding in frozen.report(x)]
    assert fused == ["conv + bias + silu", "conv + bias + sigmoid", "dense + bias"]
    assert not helpers.equations(frozen, x)["add"]


@pytest.mark.parametrize("images", (1, 2))
def test_a_squeeze_and_excitation_is_one_call_of_its_float32_weights(images):
    x = X[:images].astype("bfloat16")
    frozen = check(Gates(excites=True), X[:images], convs=0)
    assert [finding.fused for finding in frozen.report(X[:images])] == [
        "squeeze_excite + silu + sigmoid",
        "dense + bias",
    ]
    model = Gates(excites=True)
    params = model.init(jax.random.key(0), x)
    frozen = jaxconv.freeze(lambda p, x: model.apply(p, x), params)
    (call,) = [call for call in jaxconv.explain(frozen)(x) if call.op == "squeeze_excite"]
    assert (call.problem.hidden, call.problem.activation.name, call.problem.gate) == (4, "silu", "sigmoid")


class Own(nn.Module):
    """jaxconv.linen's layers, with activations and a residual of their own; what must not be folded at the end."""

    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        conv = functools.partial(jaxconv.linen.Conv, 8, (3, 3))
        norm = functools.partial(jaxconv.linen.BatchNorm, use_running_average=not train)
        y = norm(activation="silu")(conv()(x))
        z = norm(activation="relu")(conv(use_bias=False, feature_group_count=2)(y), residual=y)
        after_activation = norm()(conv(activation="tanh")(z))
        needed_twice = conv()(after_activation)
        return norm()(needed_twice) + needed_twice


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_norms_behind_jaxconvs_own_layers_are_folded(dtype):
    frozen = check(Own(), X.astype(dtype), convs=4, norms=2, dtype=jnp.dtype(dtype))
    assert [finding.fused for finding in frozen.report(X.astype(dtype)).replaced] == [
        "conv + bias + batchnorm (inference) + silu",
        "conv + batchnorm (inference) + residual + relu",
    ]


# ----------------------------------------------------------------------------------------------------------------------
# What is computed once


def test_two_dense_layers_in_a_row_are_two_calls_of_cast_weights():
    def f(p, x):
        w1, b1, w2, b2 = (a.astype("bfloat16") for a in p)
        return jax.nn.gelu(x.astype("bfloat16") @ w1 + b1) @ w2 + b2

    weights = [array(i, s) for i, s in enumerate(((4, 16), (16,), (16, 8), (8,)))]
    frozen, x = jaxconv.freeze(f, weights), X[:, 0, 0]
    np.testing.assert_array_equal(frozen(x), jax.jit(jaxconv.accelerate(f))(weights, x))
    assert {w.dtype.name for w in frozen.weights.values()} == {"bfloat16"}
    assert [finding.fused for finding in frozen.report(x)][-2:] == ["dense + bias + gelu", "dense + bias"]
    assert [(call.op, call.count) for call in jaxconv.explain(frozen)(x)] == [("dense", 1), ("dense", 1)]


MODEL = Layers(("conv_bias", "bn", "act", "pool", "dense"))
FROZEN, PLAIN, VARIABLES = frozen_and_plain(MODEL)
TERMS = 16 * 288


def test_nothing_of_the_weights_alone_is_left_in_a_call():
    frozen = jaxconv.freeze(MODEL.apply, VARIABLES, train=False)
    frozen(X)
    jaxpr = jax.make_jaxpr(frozen.apply)(frozen.weights, X).jaxpr
    (call,) = jaxpr.eqns
    inner = call.params["jaxpr"].jaxpr
    weights = set(inner.invars[:-1])
    for equation in inner.eqns:
        operands = {v for v in equation.invars if not hasattr(v, "val")}
        assert not operands or operands - weights, f"{equation} needs no input"
        weights.update(equation.outvars if operands <= weights else ())


def test_rules_put_calls_of_a_frozen_function_into_one_kernel(monkeypatch):
    monkeypatch.setattr("jaxconv.joints.rules.wants", lambda op, problem, device: op == "dense_gated")
    w, x = np.random.default_rng(0).standard_normal((16, 32)), np.random.default_rng(1).standard_normal((8, 16))
    w, x = w.astype("float32"), x.astype("float32")
    gated = jaxconv.freeze(lambda w, x: jax.nn.glu(x @ w), w)
    assert "dense_gated" in [call.op for call in jaxconv.explain(gated)(x)]
    assert_same(gated(x), jax.nn.glu(x @ w), terms=TERMS)


def test_what_only_repeats_a_weight_is_repeated_in_the_call():
    def f(p, x):
        spread = jnp.broadcast_to(jnp.tanh(p["b"]), x.shape) * 2 + jnp.zeros(x.shape)
        return jnp.cumsum(x + spread, axis=1) + p["table"].reshape(-1)[:4] + jnp.ones((4,))

    p = {"b": array(1, (4,)), "table": array(2, (8, 8))}
    frozen = jaxconv.freeze(f, p)
    assert_same(frozen(X), f(p, X), terms=16)
    assert sum(a.size for a in frozen.weights.values()) <= 8


def test_other_batches_share_the_weights():
    frozen = jaxconv.freeze(MODEL.apply, VARIABLES, train=False)
    assert frozen.weights == {} and "not called yet" in repr(frozen)
    before = dict(frozen.weights) or frozen(X) is None or dict(frozen.weights)
    for batch in (1, 3):
        x = array(batch, (batch, 6, 6, 4))
        assert_same(frozen(x), PLAIN(VARIABLES, x), terms=TERMS)
    assert len(before) == 4 and all(frozen.weights[name] is before[name] for name in before)
    assert len(frozen.weights) == 4


def test_a_function_is_traced_once_whoever_calls():
    """Threads that come at the same time, transformations, and contexts that were left."""
    traced = []

    def f(p, x):
        traced.append(1)
        return jnp.tanh(x * jnp.exp(p))

    frozen, p = jaxconv.freeze(f, array(0, (4,))), array(0, (4,))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: frozen(X), range(8)))
    assert all(helpers.same_bits(result, results[0]) for result in results) and len(traced) == 1
    jax.jit(frozen)(X), jax.vmap(frozen)(X[None]), lax.map(frozen, X[None])
    jax.grad(lambda x: frozen(x).sum())(X)
    with jax.default_matmul_precision("default"):
        pass
    frozen(X)
    assert_same(results[0], jnp.tanh(X * jnp.exp(p)), terms=4)
    assert len(traced) == 2  # the threads have another precision than this test


def test_filters_in_another_order_are_turned_once():
    numbers = ("NHWC", "OIHW", "NHWC")

    def f(w, x):
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)

    w = array(1, (8, 4, 3, 3))
    frozen = jaxconv.freeze(f, w)
    assert_same(frozen(X), jax.jit(f)(w, X), terms=36)
    assert "transpose" not in helpers.equations(frozen, X)
    assert [a.shape for a in frozen.weights.values()] == [(3, 3, 4, 8)]


def test_replaced_weights_trace_and_compile_nothing():
    traced = []

    def f(variables, x):
        traced.append(1)
        return PLAIN(variables, x)

    frozen = jaxconv.freeze(f, VARIABLES)
    frozen(X), frozen(X[:1])
    others = jax.tree.map(lambda a: 1.5 * a, VARIABLES)
    expected, old = PLAIN(others, X), frozen(X)
    assert len(traced) == 2
    events = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: events.append(name))
    try:
        new = frozen.replace(others)
        outs = new(X), new(X[:1])
    finally:
        jax.monitoring.clear_event_listeners()
    assert len(traced) == 2 and not [name for name in events if "compile" in name or "trace" in name]
    assert_same(outs, (expected, expected[:1]), terms=TERMS)
    assert helpers.same_bits(frozen(X), old) and sorted(new.weights) == sorted(frozen.weights)
    # And by the folded arrays themselves, as arguments.
    assert helpers.same_bits(jax.jit(frozen.apply)(new.weights, X), outs[0])


def test_replace_takes_the_same_types_only():
    frozen = jaxconv.freeze(MODEL.apply, VARIABLES, train=False)
    with pytest.raises(ValueError, match=r"\['BatchNorm_0'\]\['mean'\] is bfloat16\[8\], expected float32\[8\]"):
        frozen.replace(jax.tree.map(lambda a: a.astype(jnp.bfloat16), VARIABLES))
    with pytest.raises(ValueError, match=r"batch_stats.* is missing"):
        frozen.replace({"params": VARIABLES["params"]})
    with pytest.raises(ValueError, match="one that is not an array differs"):
        frozen.replace(VARIABLES, train=True)
    with pytest.raises(ValueError, match=r"apply got no weight 'params/Conv_0/kernel' \(4 of 4 are missing\)"):
        frozen.apply({}, X)


def test_host_arrays_stay_on_the_host():
    frozen = jaxconv.freeze(MODEL.apply, jax.device_get(VARIABLES), train=False)
    assert_same(frozen(X), PLAIN(VARIABLES, X), terms=TERMS)
    assert all(isinstance(a, jax.Array) for a in frozen.weights.values())


def test_the_report_is_accelerates_and_says_what_is_computed_once():
    frozen = jaxconv.freeze(MODEL.apply, VARIABLES, train=False)
    report = frozen.report(jax.ShapeDtypeStruct(X.shape, X.dtype))
    plain = jaxconv.accelerate(functools.partial(PLAIN, VARIABLES)).report(X)
    assert [f.fused for f in report] == [f.fused for f in plain] and len(report) == 3
    assert report.notes == ["computed once: 4 weights (0.0 MiB) from 8 bound arrays (0.0 MiB)"]
    assert [f.fused for f in jaxconv.explain(frozen)(X).accelerated] == [f.fused for f in report]
    programs = len(frozen._function.programs)
    jaxconv.explain(frozen)(X)
    assert len(frozen._function.programs) == programs


def _blocks(p: Any, x: Any) -> Any:
    """Layers of one kind as a loop over their stacked weights, beside a filter that all of them share."""

    def block(x: Any, layer: Any) -> Any:
        y = lax.conv_general_dilated(x, layer["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        y = (y - layer["mean"]) / jnp.sqrt(layer["var"] + 1e-5) * layer["scale"] + layer["bias"]
        z = lax.conv_general_dilated(x, 0.5 * p["shared"], (1, 1), "SAME", dimension_numbers=("NHWC", "OIHW", "NHWC"))
        return jax.nn.relu(y) + z * jnp.max(layer["scale"]), jnp.mean(y) * jnp.sum(layer["scale"])

    return lax.scan(block, x, p["layers"], reverse=True)


@pytest.mark.parametrize("transform", ("none", "grad", "vmap"))
def test_weights_inside_a_loop_are_made_once(transform):
    shapes = {"w": (3, 3, 3, 4, 4), **dict.fromkeys(("scale", "bias", "mean", "var"), (3, 4))}
    tree = {"layers": shapes, "shared": (4, 4, 3, 3)}
    p = randomised(
        jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), tree, is_leaf=lambda s: isinstance(s, tuple)
        )
    )
    frozen, plain = jaxconv.freeze(_blocks, p), functools.partial(_blocks, p)
    f, g = {
        "none": (frozen, plain),
        "grad": tuple(jax.grad(lambda x, f=f: f(x)[0].sum() + f(x)[1].sum()) for f in (frozen, plain)),
        "vmap": (lambda x: jax.vmap(frozen)(x[None]), lambda x: jax.vmap(plain)(x[None])),
    }[transform]
    assert_same(jax.jit(f)(X), jax.jit(g)(X), terms=4 * 36 * 16)
    assert {name: a.shape for name, a in frozen.weights.items()} == {
        "layers/w": (3, 3, 3, 4, 4),
        "layers/bias": (3, 4),
        "layers/scale": (3,),
        "layers/scale~2": (3,),
        "shared": (3, 3, 4, 4),
    }
    found = helpers.equations(frozen, X)
    assert found["jaxconv_conv"] + found["jaxconv_conv_fprop"] == 2 and not {"transpose", "rsqrt", "sqrt"} & set(found)


# ----------------------------------------------------------------------------------------------------------------------
# What a frozen function can do


def test_it_is_jitted_mapped_and_differentiated_in_its_inputs():
    frozen, plain = jaxconv.freeze(MODEL.apply, VARIABLES, train=False), functools.partial(PLAIN, VARIABLES)
    assert_same(jax.jit(frozen)(X), plain(X), terms=TERMS)
    xs = array(1, (3, *X.shape))
    assert_same(jax.jit(jax.vmap(frozen))(xs), jax.jit(jax.vmap(plain))(xs), terms=TERMS)
    gradients = [jax.jit(jax.grad(lambda x, f=f: jnp.sum(f(x) ** 2)))(X) for f in (frozen, plain)]
    assert_same(*gradients, terms=TERMS)
    tangents = [jax.jit(lambda x, t, f=f: jax.jvp(f, (x,), (t,)))(X, xs[0]) for f in (frozen, plain)]
    assert_same(*tangents, terms=TERMS)
    assert_same(lax.map(frozen, xs), lax.map(plain, xs), terms=TERMS)


def test_the_derivative_of_an_activation_stays_its_own():
    """relu's at 0, jax.nn's, not that of a maximum: rules go through the split."""
    frozen = jaxconv.freeze(lambda w, x: jax.nn.relu(x * w), jnp.zeros(()))
    assert float(jax.grad(frozen)(1.0 * jnp.ones(()))) == 0.0
    frozen = jaxconv.freeze(lambda w, x: jax.nn.relu(x) * w, jnp.ones(()))
    assert float(jax.grad(frozen)(jnp.zeros(()))) == 0.0


@pytest.mark.parametrize("first", ("jit", "vmap", "grad", "scan"))
def test_weights_that_are_first_needed_inside_a_transformation_are_kept(first):
    frozen = jaxconv.freeze(MODEL.apply, VARIABLES, train=False)
    {
        "jit": lambda: jax.jit(frozen)(X),
        "vmap": lambda: jax.vmap(frozen)(X[None]),
        "grad": lambda: jax.grad(lambda x: frozen(x).sum())(X),
        "scan": lambda: lax.scan(lambda c, x: (c, frozen(x)), 0, X[None]),
    }[first]()
    assert all(not isinstance(a, jax.core.Tracer) for a in frozen.weights.values()) and len(frozen.weights) == 4
    assert_same(frozen(X), PLAIN(VARIABLES, X), terms=TERMS)


def test_variables_that_are_traced_are_folded_in_the_program():
    def f(variables, x):
        return jaxconv.freeze(MODEL.apply, variables, train=False)(x)

    assert_same(jax.jit(f)(VARIABLES, X), PLAIN(VARIABLES, X), terms=TERMS)
    frozen = jaxconv.freeze(MODEL.apply, VARIABLES, train=False)
    frozen(X)
    others = jax.tree.map(lambda a: 1.5 * a, VARIABLES)
    swapped = jax.jit(lambda v, x: frozen.replace(v)(x))(others, X)
    assert_same(swapped, PLAIN(others, X), terms=TERMS)
    gradients = [jax.jit(jax.grad(lambda v, f=f: f(v, X).sum()))(VARIABLES) for f in (f, PLAIN)]
    assert_same(*gradients, terms=TERMS)


@pytest.mark.skipif(jax.device_count() < 2, reason="it takes two devices")
@pytest.mark.parametrize("kind", ("Auto", "Explicit"))
def test_images_are_split_over_a_mesh(kind):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(getattr(jax.sharding.AxisType, kind),), devices=jax.devices()[:2])
    variables = jax.device_put(VARIABLES, jax.NamedSharding(mesh, jax.P()))
    x = jax.device_put(X, jax.NamedSharding(mesh, jax.P("data")))
    frozen = jaxconv.freeze(MODEL.apply, variables, train=False)
    y = frozen(x)
    assert y.sharding.spec[0] == "data"
    assert_same(jax.device_get(y), jax.device_get(PLAIN(VARIABLES, X)), terms=TERMS)
    assert "all-gather" not in helpers.opcodes(jax.jit(frozen.apply).lower(frozen.weights, x).compile().as_text())


@pytest.mark.skipif(jax.device_count() < 2, reason="it takes two devices")
def test_inside_shard_map():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    frozen = jaxconv.freeze(MODEL.apply, VARIABLES, train=False)
    mapped = jax.shard_map(frozen, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data"))
    assert_same(jax.device_get(jax.jit(mapped)(X)), jax.device_get(PLAIN(VARIABLES, X)), terms=TERMS)


def test_other_contexts_are_other_programs():
    """A program that was traced under one precision does not answer under another."""
    frozen = jaxconv.freeze(lambda w, x: x @ w, array(0, (4, 4)))
    with jax.default_matmul_precision("highest"):
        assert "HIGHEST" in str(jax.make_jaxpr(frozen)(X))
    with jax.default_matmul_precision("default"):
        assert "HIGHEST" not in str(jax.make_jaxpr(frozen)(X))


def test_disabled_it_is_the_function_with_its_weights_prepared(monkeypatch):
    monkeypatch.setenv("JAXCONV_DISABLE", "all")
    frozen = jaxconv.freeze(MODEL.apply, VARIABLES, train=False)
    assert_same(frozen(X), PLAIN(VARIABLES, X), terms=TERMS)
    assert not any(name.startswith("jaxconv") for name in helpers.equations(frozen, X))
    assert "JAXCONV_DISABLE=all" in frozen.report(X).notes[0]


def test_results_that_are_no_arrays_and_trees_of_inputs():
    def f(p, batch, *, scale=1.0, names=()):
        return {"y": batch["x"] * p * scale, "names": names, "p": p}

    frozen = jaxconv.freeze(f, array(0, (4,)), names=("a", "b"))
    out = frozen({"x": X}, scale=2.0)
    assert out["names"] == ("a", "b") and helpers.same_bits(out["y"], X * array(0, (4,)) * 2.0)
    assert helpers.same_bits(out["p"], array(0, (4,)))
    assert helpers.same_bits(frozen({"x": X})["y"], X * array(0, (4,)))


# ----------------------------------------------------------------------------------------------------------------------
# Libraries


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(4, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(8, 5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = nnx.relu(self.norm(self.conv(x)))
        return self.head(self.dropout(x.mean((1, 2))))


def net() -> Net:
    model = nnx.eval_shape(lambda: Net(nnx.Rngs(KEY)))
    graph, state, rest = nnx.split(model, (nnx.Param, nnx.BatchStat), ...)
    model = nnx.merge(
        graph,
        randomised(state),
        jax.tree.map(lambda a: KEY if a.ndim == 0 and a.dtype == KEY.dtype else jnp.zeros(a.shape, a.dtype), rest),
    )
    model.eval()
    return model


@nnx.jit
def answer(model: Net, x: Any) -> Any:
    return model(x)


def test_an_nnx_module_is_a_function_that_holds_its_arrays():
    model = net()
    expected = answer(model, X)
    frozen = jaxconv.freeze(model)
    assert_same(frozen(X), expected, terms=TERMS)
    assert (
        len(frozen.weights) == 4 and frozen.report(X).replaced[-2].fused == "conv + bias + batchnorm (inference) + relu"
    )
    # What becomes of the module later is none of the frozen function's business.
    model.head.kernel[...] = model.head.kernel[...] * 2
    assert_same(frozen(X[:1]), expected[:1], terms=TERMS)
    assert_same(frozen.replace(model)(X), answer(model, X), terms=TERMS)
    by_function = jaxconv.freeze(lambda m, x: m(x), model)
    assert_same(by_function(X), answer(model, X), terms=TERMS)


def test_an_nnx_module_in_training_is_refused():
    model = net()
    model.train()
    with pytest.raises(ValueError, match=r"changes a bound object \(.*\).*model.eval\(\)"):
        jaxconv.freeze(model)(X)
    assert all(not isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(nnx.state(model)))


def test_a_function_that_closes_over_its_weights():
    frozen = jaxconv.freeze(functools.partial(PLAIN, VARIABLES))
    assert_same(frozen(X), PLAIN(VARIABLES, X), terms=TERMS)
    assert len(frozen.weights) == 4


def test_haiku():
    hk = pytest.importorskip("haiku", reason="the layers are Haiku's: pip install dm-haiku")

    def layers(x):
        x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(hk.Conv2D(8, 3)(x), False))
        return hk.Linear(5)(x.mean((1, 2)))

    model = hk.transform_with_state(layers)
    init = hk.transform_with_state(
        lambda x: hk.Linear(5)(hk.BatchNorm(True, True, 0.9)(hk.Conv2D(8, 3)(x), True).mean((1, 2)))
    ).init
    params, state = randomised(jax.eval_shape(init, KEY, X))
    frozen = jaxconv.freeze(lambda params, state, x: model.apply(params, state, None, x)[0], params, state)
    assert_same(frozen(X), model.apply(params, state, None, X)[0], terms=TERMS)
    assert len(frozen.weights) == 4


def test_equinox():
    eqx = pytest.importorskip("equinox", reason="the layers are Equinox's: pip install equinox")
    model = eqx.nn.Sequential(
        [eqx.nn.Conv2d(4, 8, 3, key=KEY), eqx.nn.Lambda(jax.nn.relu), eqx.nn.Conv2d(8, 8, 3, key=KEY)]
    )
    frozen = jaxconv.freeze(jax.vmap(model))
    x = X.transpose(0, 3, 1, 2)
    assert_same(frozen(x), jax.vmap(model)(x), terms=TERMS)
    assert_same(jaxconv.freeze(model)(x[0]), model(x[0]), terms=TERMS)


# ----------------------------------------------------------------------------------------------------------------------
# Export

LOADED = """
    import sys
    import numpy as np
    from jax import export
    if sys.argv[3] == "jaxconv":
        import jaxconv
    loaded = export.deserialize(open(sys.argv[1], "rb").read())
    arrays = np.load(sys.argv[2])
    weights = {name: a for name, a in arrays.items() if name != "x"}
    assert "flax" not in sys.modules and (sys.argv[3] == "jaxconv") == ("jaxconv" in sys.modules)
    y = loaded.call(weights, arrays["x"]) if weights else loaded.call(arrays["x"])
    np.save(sys.argv[1] + ".npy", y)
"""


@pytest.mark.parametrize(("calls", "weights"), (("native", "apart"), ("lax", "inside")))
def test_it_is_exported_and_answers_in_a_process_that_never_saw_the_model(weights, calls, tmp_path):
    """With jaxconv's custom calls (a depthwise convolution is one on every platform), and by lax alone."""
    model = Layers(("conv", "bn", "act", "pool", "dense"), options=(("feature_group_count", 8),))
    x = _cubes(2, 6, 6, 8)
    frozen, plain, variables = frozen_and_plain(model, x)
    expected = frozen(x)
    f, arguments = (frozen, (x,)) if weights == "inside" else (frozen.apply, (frozen.weights, x))
    if calls == "lax":
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("JAXCONV_DISABLE", "conv,dense")
            exported = export.export(jax.jit(f), platforms=("cpu", "cuda", "tpu"))(*arguments)
    else:
        exported = export.export(jax.jit(f), disabled_checks=jaxconv.export_checks())(*arguments)
        if helpers.PLATFORM == "cpu":
            assert helpers.targets(exported.mlir_module())["conv"] == 1
    program, arrays = tmp_path / "model.jax", tmp_path / "arrays.npz"
    program.write_bytes(exported.serialize())
    np.savez(arrays, x=x, **(frozen.weights if weights == "apart" else {}))
    script = tmp_path / "serve.py"
    script.write_text(textwrap.dedent(LOADED))
    done = subprocess.run(
        [sys.executable, str(script), str(program), str(arrays), "jaxconv" if calls == "native" else "none"],
        env={**os.environ, "JAXCONV_DISABLE": "", "JAXCONV_ENABLE": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same(np.load(f"{program}.npy"), np.asarray(expected), terms=TERMS)
    assert_same(expected, plain(variables, x), terms=TERMS)


def test_small_calls_have_options_of_their_own_and_large_ones_xlas(monkeypatch):
    """A program of its own, where it is no part of another one."""
    frozen, expected = jaxconv.freeze(MODEL.apply, VARIABLES, train=False), MODEL.apply(VARIABLES, X, train=False)
    assert_same(frozen(X), expected, terms=TERMS)
    (program,) = frozen._function.programs.values()
    assert (program.alone is program.late) == (helpers.PLATFORM == "cpu")
    for small, own in ((1e20, True), (1.0, False)):
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(sys.modules["jaxconv.freeze"], "SMALL_FLOPS", small)
        fresh = dataclasses.replace(program)
        assert (fresh.alone is not fresh.late) == own
        monkeypatch.undo()
        weights = frozen._weights_of(program)
        assert_same(fresh.alone(weights, [X])[0], expected, terms=TERMS)
        assert_same(jax.jit(lambda x: frozen(x) + 1)(X) - 1, expected, terms=TERMS)


def test_it_is_exported_with_a_symbolic_batch():
    (n,) = export.symbolic_shape("n")
    shape = jax.ShapeDtypeStruct((n, *X.shape[1:]), X.dtype)
    frozen = jaxconv.freeze(MODEL.apply, VARIABLES, train=False)
    exported = export.export(jax.jit(frozen), disabled_checks=jaxconv.export_checks())(shape)
    loaded = export.deserialize(exported.serialize())
    for batch in (1, 5):
        x = array(batch, (batch, *X.shape[1:]))
        assert_same(loaded.call(x), PLAIN(VARIABLES, x), terms=TERMS)


# ----------------------------------------------------------------------------------------------------------------------
# What is refused


def _dropout(p: Any, key: Any, x: Any) -> Any:
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x * p, 0)


def test_training_is_refused():
    for mutable in (["batch_stats"],):
        with pytest.raises(
            ValueError, match=r"freeze: batch-norm .*BatchNorm_0 is in training mode: .* Pass train=False"
        ):
            jaxconv.freeze(MODEL.apply, VARIABLES, train=True, mutable=mutable)(X)
        with pytest.raises(ValueError, match="is in training mode: it normalises by the statistics of its batch"):
            jaxconv.freeze(MODEL.apply, VARIABLES, train=True, mutable=mutable)(X[:1])

    def own(p, x):
        return jaxconv.batchnorm(x, p, p, p, p, training=True)[0]

    with pytest.raises(ValueError, match="is in training mode: it normalises by the statistics of its batch"):
        jaxconv.freeze(own, jnp.ones(4))(X)


@pytest.mark.skipif(jax.device_count() < 2, reason="it takes two devices")
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in jit"])
def test_weights_on_no_mesh_and_images_on_an_explicit_one(inside):
    """Without `jax.set_mesh`: the inputs say which mesh it is, also to what is folded into a filter."""
    x = array(2, (4, 6, 6, 4))
    weights = [array(0, (3, 3, 4, 4)), 1.5 + jnp.abs(array(1, (4,))), array(3, (3, 3, 4, 4))]
    weights = [np.asarray(w) / 6 for w in weights]

    def conv(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def f(weights, x):
        w, v, u = weights
        return conv((conv(x, w) - v) / jnp.sqrt(v + 1e-3) * v + v, u)

    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2])
    frozen = jaxconv.freeze(f, weights)
    frozen = jax.jit(frozen) if inside else frozen
    split = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
    if inside:
        jax.block_until_ready(frozen(x))  # weights are folded on one device first
    y = frozen(split)
    assert y.sharding.spec[0] == "data"
    assert_same(jax.device_get(y), f(weights, x), terms=64)


@pytest.mark.parametrize("first", [False, True])
def test_with_and_without_64_bits(first):
    """The bound array is another one then, and so is what is kept of it."""
    p, x = np.array([np.pi, 2.0]), np.array([1.0, 3.0])
    frozen = jaxconv.freeze(lambda p, x: jnp.sin(p) * x, p)
    for wide in (first, not first):
        with jax.enable_x64(wide):
            y = frozen(x)
            assert y.dtype == (np.float64 if wide else np.float32)
            np.testing.assert_allclose(y, np.sin(p) * x, rtol=1e-12 if wide else 1e-5, atol=1e-12 if wide else 1e-6)


@pytest.mark.parametrize("in_loop", [False, True])
def test_a_filter_may_be_standardised(in_loop):
    """By statistics of its own, which are weights: no batch-norm in training. In a loop too, whose carry is data."""
    w, b = array(0, (3, 3, 4, 4)), array(1, (4,))

    def once(x, w):
        w = (w - w.mean((0, 1, 2))) * lax.rsqrt(w.var((0, 1, 2)) + 1e-2)
        x = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jax.nn.relu(x + b) / 16

    def f(w, x):
        return lax.scan(lambda x, w: (once(x, w), None), x, w)[0] if in_loop else once(x, w)

    @jax.named_scope("batch_norm")
    def trained(w, x):
        return lax.scan(lambda x, w: (once(w, x), None), x, w)[0]  # what is standardised is carried

    x, w = array(2, (2, 6, 6, 4)), jnp.stack([w, w[::-1]]) if in_loop else w
    assert_same(jaxconv.freeze(f, w)(x), f(w, x), terms=64)
    if in_loop:
        with pytest.raises(ValueError, match="is in training mode"):
            jaxconv.freeze(trained, w)(array(3, (3, 3, 4, 4)))


def test_a_plain_object_that_changes_is_refused_and_stays_as_it_was():
    class Model:
        largest = None

        def __call__(self, w, x):
            y = x @ w
            self.largest = y.max()
            return y

    model = Model()
    with pytest.raises(ValueError, match=r"changes a bound object \(Model.largest\)"):
        jaxconv.freeze(model, jnp.ones((3, 3)))(jnp.ones((2, 3)))
    assert model.largest is None


def test_norms_of_each_image_are_no_training():
    def instance_norm(p, x):
        mean, var = x.mean((1, 2), keepdims=True), x.var((1, 2), keepdims=True)
        return (x - mean) / jnp.sqrt(var + 1e-5) * p

    def layer_norm(_, x):
        x = x.reshape(x.shape[0], -1)
        return (x - x.mean(1, keepdims=True)) / jnp.sqrt(x.var(1, keepdims=True) + 1e-5)

    for f in (instance_norm, layer_norm):
        for x in (X, X[:1]):
            assert_same(jaxconv.freeze(f, jnp.ones(4))(x), jax.jit(f)(jnp.ones(4), x), terms=256)


def test_random_numbers_of_a_bound_key_are_refused_and_of_an_input_are_not():
    p, key = jnp.ones(4), KEY
    for f, args in (
        (_dropout, (p, key)),
        (_dropout, (p, jax.random.PRNGKey(0))),
        (lambda p, x: _dropout(p, jax.random.key(1, impl="unsafe_rbg"), x), (p,)),
        (lambda p, key, x: lax.scan(lambda c, y: (c, _dropout(p, key, y)), 0, x)[1], (p, key)),
    ):
        with pytest.raises(ValueError, match=r"freeze: the function draws random numbers .* deterministic=True"):
            jaxconv.freeze(f, *args)(X)
    frozen = jaxconv.freeze(_dropout, p)
    assert_same(frozen(key, X), jax.jit(_dropout)(p, key, X), terms=1)
    looped = jaxconv.freeze(lambda p, key, x: lax.scan(lambda c, y: (c, _dropout(p, key, y)), 0, x)[1], p)
    assert looped(key, X).shape == X.shape

    def split_loop(p, key, x):  # whose body has weights too
        return lax.scan(lambda c, y: (c, _dropout(jnp.exp(p[::-1]), key, y)), 0, x)[1]

    with pytest.raises(ValueError, match="draws random numbers"):
        jaxconv.freeze(split_loop, p, key)(X)
    with pytest.raises(ValueError, match="draws random numbers"):
        jaxconv.freeze(lambda p, x: split_loop(p, jax.random.key(1, impl="unsafe_rbg"), x), p)(X)
    looped = jaxconv.freeze(split_loop, p)
    assert_same(looped(key, X), jax.jit(split_loop)(p, key, X), terms=1)


def test_effects_are_refused_but_for_debugging(capfd):
    def told(p, x):
        jax.debug.print("mean {}", x.mean())
        return x * p

    frozen = jaxconv.freeze(told, 2.0 * jnp.ones(4))
    for _ in range(2):
        jax.block_until_ready(frozen(jnp.ones((2, 4))))
        jax.effects_barrier()
    assert capfd.readouterr().out.count("mean 1.0") == 2

    def called(p, x):
        jax.experimental.io_callback(lambda: None, None, ordered=True)
        return x * p

    with pytest.raises(ValueError, match="freeze: the function has an effect"):
        jaxconv.freeze(called, jnp.ones(4))(X)


def scaled(p: Any, x: Any) -> Any:
    return jax.nn.relu(x * p["scale"] + p["bias"])


@pytest.mark.parametrize("copied", (copy.copy, copy.deepcopy, lambda f: pickle.loads(pickle.dumps(f))))
def test_copies(copied):
    """They fold for themselves, and go on where the other one is replaced."""
    p, x = {"scale": 2 * jnp.ones(4), "bias": jnp.ones(4)}, jnp.ones((2, 4))
    frozen = jaxconv.freeze(scaled, p)
    before, after = frozen, copied(frozen)
    np.testing.assert_array_equal(before(x), after(x))
    assert after.weights.keys() == before.weights.keys()
    again = copied(frozen)  # after a call
    np.testing.assert_array_equal(again.replace({"scale": jnp.zeros(4), "bias": jnp.ones(4)})(x), jnp.ones((2, 4)))
    np.testing.assert_array_equal(again(x), before(x))


def test_copies_of_a_module():
    x = jnp.ones((2, 8, 8, 4))
    for model in (net(), jax.tree_util.Partial(scaled, {"scale": jnp.ones(4), "bias": jnp.ones(4)})):
        frozen = jaxconv.freeze(model)
        for copied in (copy.deepcopy(frozen), pickle.loads(pickle.dumps(frozen))):
            np.testing.assert_array_equal(copied(x), frozen(x))


def test_what_is_no_function_and_what_is_no_array():
    with pytest.raises(TypeError, match=r"freeze: Layers is a flax.linen module.*freeze\(model.apply, variables\)"):
        jaxconv.freeze(MODEL, VARIABLES)
    with pytest.raises(TypeError, match="freeze: f must be a function, got int"):
        jaxconv.freeze(3)
    with pytest.raises(TypeError, match=r"freeze: .*is a jax.ShapeDtypeStruct, expected an array"):
        jaxconv.freeze(MODEL.apply, jax.eval_shape(lambda: VARIABLES))
    with pytest.raises(TypeError, match="freeze: an input is neither an array nor hashable"):
        jaxconv.freeze(lambda p, x, s: x, jnp.ones(4))(X, bytearray(b"a"))
    with pytest.raises(TypeError, match=r"freeze: an input is an object of flax.nnx"):
        jaxconv.freeze(lambda p, m, x: m(x), jnp.ones(4))(net(), X)
    with pytest.raises(TypeError, match=r"freeze: train is bound already: replace\(train=...\)"):
        jaxconv.freeze(MODEL.apply, VARIABLES, train=False)(X, train=True)

    def closes_over(x):
        jaxconv.freeze(lambda p, y: y * p + x, jnp.ones(4))(X)
        return x

    with pytest.raises(TypeError, match="freeze: the function closes over an array that is being traced"):
        jax.jit(closes_over)(X)


def test_elementwise_operations_that_a_split_repeats_exist():
    """A name that JAX no longer has would silently keep larger weights."""
    names = {name.removesuffix("_p") for name in dir(lax) if name.endswith("_p")}
    assert not split.ELEMENTWISE - names - {"copy", "stop_gradient"}

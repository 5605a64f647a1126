"""jaxconv.accelerate: what it replaces, what it leaves, and that the function stays the same function."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import importlib
import inspect
import pickle
import re
import types
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax_cases import KEY, array, assert_same, randomised
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxconv
from jaxconv._core import primitives
from jaxconv.accelerate import accelerate, rewrite
from jaxconv.joints import rules

NHWC = ("NHWC", "HWIO", "NHWC")


@pytest.fixture(autouse=True)
def full_precision():
    """Products in float32 on a GPU too: TF32 would hide what is compared."""
    with jax.default_matmul_precision("highest"):
        yield


def conv(x: jax.Array, w: jax.Array, **kwargs: Any) -> jax.Array:
    return lax.conv_general_dilated(
        x, w, **{"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": NHWC, **kwargs}
    )


def normalise(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return (x - mean) / jnp.sqrt(var + 1e-5) * scale + bias


X, W, B = array(0, (2, 6, 6, 4)), array(1, (3, 3, 4, 8)), array(2, (8,))
W2 = array(4, (3, 3, 8, 8))
SCALE, BIAS = 1 + 0.1 * array(5, (8,)), array(6, (8,))


def kernels(f: Any, *args: Any) -> dict[str, int]:
    """How many of jaxconv's kernels are in f, without the prefix."""
    counted = helpers.equations(f, *args)
    return {name.removeprefix("jaxconv_"): n for name, n in counted.items() if name.startswith("jaxconv_")}


def check(f: Any, *args: Any, terms: int = 0, **expected: int) -> None:
    """accelerate(f) has the expected kernels, f's results, types and structure, and its gradients."""
    accelerated = accelerate(f)
    assert kernels(accelerated, *args) == expected
    assert jax.eval_shape(accelerated, *args) == jax.eval_shape(f, *args)

    def both_ways(f: Any) -> Any:
        def with_gradient(*args):
            outs, pullback = jax.vjp(f, *args)
            cotangents = jax.tree.map(lambda y: jnp.asarray(array(7, y.shape), y.dtype), outs)
            return outs, pullback(cotangents)

        return jax.jit(with_gradient)(*args)

    largest = max(a.size for a in jax.tree.leaves(args))
    narrow = max((a.dtype for a in jax.tree.leaves((args, jax.eval_shape(f, *args)))), key=lambda d: jnp.finfo(d).eps)
    # Rounded on the way, in either of the two functions, up to four times: by the operations that one of them fuses.
    assert_same(both_ways(accelerated), both_ways(f), terms=terms or 16 * largest, rounded_to=narrow)


# ----------------------------------------------------------------------------------------------------------------------
# What is replaced


ACTIVATIONS = {
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "leaky_relu": jax.nn.leaky_relu,
    "leaky_relu_0.25": functools.partial(jax.nn.leaky_relu, negative_slope=0.25),
    "elu": jax.nn.elu,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "silu_by_hand": lambda z: jax.nn.sigmoid(z) * z,
    "gelu": jax.nn.gelu,
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "hard_swish": jax.nn.hard_swish,
}


def own(x: Any, w: Any, b: Any, v: Any) -> Any:
    return jaxconv.dense(jaxconv.dense(x, w, b, activation="gelu"), v)


def cast(x: Any, w: Any, b: Any, v: Any) -> Any:
    x, w, b, v = (a.astype("bfloat16") for a in (x, w, b, v))
    return jax.nn.gelu(x @ w + b) @ v + v[0]


def four(x: Any, w: Any, b: Any, v: Any) -> Any:
    for m in (w, v, v, v):
        x = jax.nn.gelu(x @ m)
    return x


# Layers, what they become, and how many of their gradients go through a layer and an activation at once
LAYERS = {
    "plain": (lambda x, w, b, v: jax.nn.gelu(x @ w + b) @ v, dict(dense=1, matmul=1), 1),
    "bias": (lambda x, w, b, v: jax.nn.gelu(x @ w + b) @ v + v[0], dict(dense=2), 1),
    "no_bias": (lambda x, w, b, v: jax.nn.silu(x @ w) @ v, dict(dense=1, matmul=1), 1),
    "both": (lambda x, w, b, v: jnp.tanh(jax.nn.relu(x @ w + b) @ v), dict(dense=2), 1),
    "rows": (lambda x, w, b, v: jax.nn.gelu(x @ w + b).reshape(-1, 8) @ v, dict(dense=1, matmul=1), 1),
    "z": (lambda x, w, b, v: [z := jax.nn.gelu(x @ w) @ v + v[0], jax.nn.silu(z)], dict(dense=2), 1),
    "mapped": (
        lambda x, w, b, v: jax.vmap(lambda row: v.T @ jax.nn.gelu(w.T @ row + b))(x.reshape(-1, 4)),
        dict(dense=1, matmul=1),
        1,
    ),
    "own": (own, dict(dense=1, matmul=1), 1),
    "cast": (cast, dict(dense=2), 1),
    "four": (four, dict(dense=4), 3),
    "used": (lambda x, w, b, v: [h := jax.nn.gelu(x @ w + b), h @ v + v[0]], dict(dense=2), 0),
    "z_used": (lambda x, w, b, v: [z := x @ w + b, jax.nn.gelu(z) @ v + v[0]], dict(dense=2), 1),
    "twice": (
        lambda x, w, b, v: [h := jax.nn.gelu(x @ w + b), h @ v + v[0], jnp.tanh(h @ v)][1:],
        dict(dense=3),
        0,
    ),
    "linear": (lambda x, w, b, v: jax.nn.silu((x @ w + b) @ v), dict(dense=2), 0),
    "between": (lambda x, w, b, v: (2.0 * jax.nn.gelu(x @ w + b)) @ v + v[0], dict(dense=2), 0),
    "its_weight": (lambda x, w, b, v: jax.nn.relu(v @ jax.nn.gelu(w @ w.T @ w).T[:, :4]), dict(dense=2), 0),
}


@pytest.mark.parametrize("name", LAYERS)
def test_dense_layers_in_a_row(name, monkeypatch):
    monkeypatch.setattr(rules, "wants", lambda op, problem, device: op == "dense_gradient")
    f, expected, gradients = LAYERS[name]
    args = X, W[0, 0], B, W2[0, 0]
    check(f, *args, **expected)

    def loss(*args: Any) -> jax.Array:
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(accelerate(f)(*args)))

    assert helpers.equations(jax.grad(loss, (0, 1, 2, 3)), *args)["jaxconv_dense_gradient"] == gradients


def by_rows(x: jax.Array, w: jax.Array) -> jax.Array:
    """x @ w as vmap writes it: the rows are the product's columns."""
    return jax.vmap(lambda row: w.T @ row)(x.reshape(-1, x.shape[-1]))


NCHW = ("NCHW", "OIHW", "NCHW")
SCALES = {
    "layer_scale": (lambda x, w, b, g: x[..., :1] + g * (x @ w[0, 0] + b), "dense + bias + scale"),
    "no_bias": (lambda x, w, b, g: (x @ w[0, 0]) * g, "dense + scale"),
    "behind": (lambda x, w, b, g: jax.nn.relu((x @ w[0, 0]) * g + b), "dense + bias + scale + relu"),
    "both_sides": (lambda x, w, b, g: jax.nn.relu((x @ w[0, 0] + g) * g + b), "dense + bias + scale"),
    "z": (lambda x, w, b, g: [z := g * (x @ w[0, 0] + b), jax.nn.silu(z)], "dense + bias + scale + silu"),
    "mapped": (lambda x, w, b, g: (by_rows(x, w[0, 0]) + b) * g, "dense + bias + scale"),
    "conv": (lambda x, w, b, g: jax.nn.relu((conv(x, w) + b) * g), "conv + bias + scale + relu"),
    "frozen_norm": (lambda x, w, b, g: jax.nn.relu(conv(x, w) * g + b), "conv + bias + scale + relu"),
    "residual": (lambda x, w, b, g: jnp.tanh(conv(x, w) * g + b) + conv(x, w[:1, :1]) * g, "conv + scale + residual"),
    "channels_first": (
        lambda x, w, b, g: (
            conv(x.transpose(0, 3, 1, 2), w.transpose(3, 2, 0, 1), dimension_numbers=NCHW) * g[:, None, None]
        ),
        "conv + scale",
    ),
    "depthwise": (
        lambda x, w, b, g: (conv(x, w[..., :1, :4], feature_group_count=4) + b[:4]) * g[:4],
        "conv + bias + scale",
    ),
}


@pytest.mark.parametrize("name", SCALES)
def test_numbers_per_channel_are_multiplied_into_the_filter(name):
    f, fused = SCALES[name]
    args = array(0, (2, 12, 12, 4)), W, B, SCALE
    found = accelerate(f).report(*args)
    assert fused in [finding.fused for finding in found.replaced]
    check(f, *args, **kernels(accelerate(f), *args))
    program = primitives.equations(jax.make_jaxpr(accelerate(f))(*args).jaxpr)
    largest = max(eqn.outvars[0].aval.size for eqn in program if str(eqn.primitive) == "mul")
    assert largest <= W.size, "nothing of the result's size is multiplied"


NOT_SCALED = {
    "few_rows": lambda x, w, b, g: (x[:1, :1, :1] @ w[0, 0] + b) * g,
    "float16": lambda x, w, b, g: (x.astype("float16") @ w[0, 0].astype("float16")) * g.astype("float16"),
    "of_another_axis": lambda x, w, b, g: (x[:, :, :8] @ w[0, 0]) * g[:, None],
    "used_twice": lambda x, w, b, g: [z := x @ w[0, 0] + b, z * g],
    "squared": lambda x, w, b, g: (z := x @ w[0, 0] + b) * z,
    "number": lambda x, w, b, g: (x @ w[0, 0] + b) * 0.5,
}


@pytest.mark.parametrize("name", NOT_SCALED)
def test_what_is_no_scale_of_a_filter_is_left(name):
    args = array(0, (2, 12, 12, 4)), W, B, SCALE
    replaced = accelerate(NOT_SCALED[name]).report(*args).replaced
    assert not any("scale" in finding.fused for finding in replaced)


@accelerate
def decorated(x: Any, w: Any) -> Any:
    return jax.nn.relu(conv(x, w))


def undecorated(x: Any, w: Any) -> Any:
    return jax.nn.relu(conv(x, w))


class WithMethod:
    @accelerate
    def layer(self, x: Any, w: Any) -> Any:
        return jax.nn.relu(conv(x, w))


@pytest.mark.parametrize("f", (decorated, accelerate(undecorated), accelerate(accelerate(undecorated))))
def test_copies(f):
    for copied in (copy.copy(f), copy.deepcopy(f), pickle.loads(pickle.dumps(f)), jax.tree.map(lambda v: v, f)):
        assert kernels(copied, X, W) == {"conv": 1}
        assert copied.report(X, W) == f.report(X, W)
        assert (copied.__name__, inspect.signature(copied)) == (f.__name__, inspect.signature(undecorated))
    assert pickle.loads(pickle.dumps(decorated)) is decorated


def test_methods():
    one = WithMethod()
    assert kernels(one.layer, X, W) == {"conv": 1}
    np.testing.assert_allclose(one.layer(X, W), undecorated(X, W), rtol=1e-5, atol=1e-6)
    assert WithMethod.layer.report(one, X, W).replaced


def by_given(z: Any, scale: Any, bias: Any, axis: int = -1) -> Any:
    """A batch-norm in inference, and an activation."""
    shape = [-1 if a == axis % z.ndim else 1 for a in range(z.ndim)]
    mean, var, scale, bias = (v.reshape(shape) for v in (0.1 * BIAS, 1 + BIAS**2, scale, bias))
    return jax.nn.relu((z - mean) * lax.rsqrt(var + 1e-5) * scale + bias)


def own_pair(x: Any, w: Any, scale: Any, bias: Any) -> Any:
    z = jaxconv.conv2d(x, w)
    return jaxconv.batchnorm(z, scale, bias, 0.1 * BIAS, 1 + BIAS**2, training=False, activation="relu")[0]


def own_call(x: Any, w: Any, scale: Any, bias: Any) -> Any:
    return jaxconv.conv_batchnorm(x, w, scale, bias, 0.1 * BIAS, 1 + BIAS**2, training=False, activation="relu")[0]


def transposed(x: Any, w: Any, scale: Any, bias: Any) -> Any:
    return by_given(conv(x, w, lhs_dilation=(2, 2), padding=[(1, 1), (1, 1)]), scale, bias)


def looped(x: Any, w: Any, scale: Any, bias: Any) -> Any:
    step = lambda y, _: (by_given(conv(jnp.tile(y, 2)[..., :4], w), scale, bias)[..., :4], None)  # noqa: E731
    return lax.scan(step, x, None, length=2)[0]


# (function, pixels from which it is folded in each call, what it becomes where it is folded): a filter of 3x3x4x8 has
# 288 numbers, of 4x8 32, and a result has 8 a pixel.
FOLDED = {
    "batchnorm": (lambda x, w, g, b: by_given(conv(x, w), g, b), 72, "conv + batchnorm (inference) + relu"),
    "batchnorm_of_a_dense_layer": (
        lambda x, w, g, b: by_given(x @ w[0, 0], g, b),
        8,
        "dense + batchnorm (inference) + relu",
    ),
    "batchnorm_of_a_transposed_convolution": (transposed, 81, "conv + batchnorm (inference) + relu"),
    "batchnorm_in_a_loop": (looped, 72, "conv + batchnorm (inference) + relu"),
    "own_batchnorm": (own_pair, 72, "conv + batchnorm (inference) + relu"),
    "own_call": (own_call, 72, "conv + batchnorm (inference) + relu"),
    "scale": (lambda x, w, g, b: (conv(x, w) + b) * g, 72, "conv + bias + scale"),
    "scale_of_a_dense_layer": (lambda x, w, g, b: (x @ w[0, 0] + b) * g, 8, "dense + bias + scale"),
}


@pytest.mark.parametrize("name", FOLDED)
def test_a_call_folds_into_filters_that_are_small_beside_its_result(name):
    """A batch-norm of a few pixels is cheaper than its filter's folding, which `freeze` does once."""
    f, pixels, fused = FOLDED[name]

    def multiplied(f: Any, x: Any) -> int:
        """Elements of the largest filter that a call multiplies."""
        found = jax.make_jaxpr(f)(x, W, SCALE, BIAS)
        return max(
            (eqn.outvars[0].aval.size for eqn in primitives.equations(found.jaxpr) if str(eqn.primitive) == "mul"
             and eqn.outvars[0].aval.shape in ((3, 3, 4, 8), (4, 8))),
            default=0,
        )  # fmt: skip

    few, many = array(0, (1, pixels - 1, 1, 4)), array(0, (1, pixels, 1, 4))
    if "transposed" in name:  # H -> 2 H - 1
        few, many = array(0, (1, 4, 4, 4)), array(0, (1, 5, 5, 4))
    for x, folds in ((few, False), (many, True)):
        report, args = accelerate(f).report(x, W, SCALE, BIAS), (x, W, SCALE, BIAS)
        if name != "own_call" or not folds:  # else there is a single call, which folds by itself
            assert (fused in [finding.fused for finding in report]) == folds, report
        assert ("jaxconv.freeze folds once" in str(report)) != folds, report
        assert bool(multiplied(accelerate(f), x)) == folds
        check(f, *args, **kernels(accelerate(f), *args))
    frozen = jaxconv.freeze(lambda w, g, b, x: f(x, w, g, b), W, SCALE, BIAS)
    assert fused in [finding.fused for finding in frozen.report(few)]
    np.testing.assert_allclose(frozen(few), f(few, W, SCALE, BIAS), rtol=1e-4, atol=1e-5)


def test_any_batch_is_folded_for_only_where_one_image_is_enough():
    """A symbolic extent may be 1."""
    f, _, fused = FOLDED["batchnorm"]
    for extents, folds in (("b, 8, 9, 4", True), ("b, 8, 8, 4", False), ("b, h, w, 4", False)):
        x = jax.ShapeDtypeStruct(jax.export.symbolic_shape(extents), "float32")
        found = [finding.fused for finding in accelerate(f).report(x, W, SCALE, BIAS)]
        assert (fused in found) == folds, extents
        frozen = jaxconv.freeze(lambda w, g, b, x: f(x, w, g, b), W, SCALE, BIAS)
        assert fused in [finding.fused for finding in frozen.report(x)]


@pytest.mark.parametrize("form", ("scaled", "folded"))
def test_a_scale_that_belongs_to_a_batch_norm_stays_its(form):
    def f(x, w, scale, bias, mean, var):
        rstd = lax.rsqrt(var + 1e-5)
        if form == "folded":
            return jax.nn.relu(conv(x, w) * (rstd * scale) + (bias - mean * rstd * scale))
        return jax.nn.relu((conv(x, w) - mean) * (rstd * scale) + bias)

    args = array(0, (2, 12, 12, 4)), W, SCALE, BIAS, BIAS, jnp.abs(BIAS)
    fused = [finding.fused for finding in accelerate(f).report(*args).replaced]
    assert fused == ["conv", "conv + batchnorm (inference) + relu"]
    check(f, *args, **kernels(accelerate(f), *args))


@pytest.mark.skipif(jax.device_count() < 2, reason="a mesh takes two devices")
@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit), ids=str)
@pytest.mark.parametrize("split", ("images", "channels", "shard_map"))
def test_a_layer_scale_on_a_mesh(split, kind):
    def loss(x, w, b, g):
        return jnp.mean(jnp.sin(x + (x @ w + b) * g))

    mesh = jax.make_mesh((2,), ("a",), axis_types=(kind,), devices=jax.devices()[:2])
    images, channels = (None, "a") if split == "channels" else ("a", None)
    specs = PartitionSpec(images), PartitionSpec(None, channels), PartitionSpec(channels), PartitionSpec(channels)
    args = array(0, (8, 6, 6, 8)), array(1, (8, 8)), array(2, (8,)), array(3, (8,))

    def gradient(f):
        if split != "shard_map":
            return jax.grad(f, (0, 1, 2, 3))
        shards = jax.shard_map(lambda *a: lax.pmean(f(*a), "a"), mesh=mesh, in_specs=specs, out_specs=PartitionSpec())
        return jax.grad(shards, (0, 1, 2, 3))

    with jax.set_mesh(mesh):
        placed = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(args, specs, strict=True)]
        ours = jax.jit(gradient(accelerate(loss)))(*placed)
    for a, b in zip(ours, jax.grad(loss, (0, 1, 2, 3))(*args), strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=2e-5, atol=1e-7)


def test_the_gradient_of_a_layer_scale_in_bfloat16_is_as_near_as_before():
    def loss(x, w, b, g, t, dtype):
        x, w, b, g = (a.astype(dtype) for a in (x, w, b, g))
        return jnp.vdot((x + (x @ w + b) * g).astype(jnp.float32), t)

    x, w, b, t = (array(i, s) for i, s in enumerate(((4096, 64), (64, 64), (64,), (4096, 64))))
    x, g = jax.nn.gelu(x), 1e-6 * (1 + 0.5 * array(9, (64,)))
    x, w, b, g, t = (a.astype(jnp.bfloat16).astype(jnp.float32) for a in (x, w / 8, b, g, t))
    exact = jax.grad(loss, (1, 2, 3))(x, w, b, g, t, jnp.float32)
    narrow = functools.partial(loss, dtype=jnp.bfloat16)
    before, now = (
        [float(jnp.linalg.norm(a - e) / jnp.linalg.norm(e)) for a, e in zip(found, exact, strict=True)]
        for found in (jax.grad(f, (1, 2, 3))(x, w, b, g, t) for f in (narrow, accelerate(narrow)))
    )
    assert all(a <= b + 2.0**-9 for a, b in zip(now, before, strict=True)), (now, before)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_conv_bias_and_activation_become_one_call(activation):
    f = ACTIVATIONS[activation]

    def layer(x, w, b):
        return f(conv(x, w) + b)

    check(layer, X, W, B, conv=1)
    name = activation.removesuffix("_by_hand").replace("leaky_relu_0.25", "leaky_relu(0.25)")
    (found,) = accelerate(layer).report(X, W, B)
    assert found.fused.startswith(f"conv + bias + {name}")


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_values_on_a_mesh_are_recognised(activation, kind):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(getattr(jax.sharding.AxisType, kind),), devices=jax.devices()[:1])
    x = jax.device_put(X[:, 0, 0], jax.NamedSharding(mesh, jax.P("data")))
    w = jax.device_put(W[0, 0], jax.NamedSharding(mesh, jax.P()))
    (found,) = accelerate(lambda x, w: ACTIVATIONS[activation](x @ w)).report(x, w)
    assert found.fused.startswith("dense + " + activation.removesuffix("_by_hand").removesuffix("_0.25"))


@pytest.mark.parametrize(
    ("options", "expected"),
    (
        (dict(window_strides=(2, 1), padding=((0, 1), (2, 0)), rhs_dilation=(1, 2)), dict(conv=1)),
        (dict(lhs_dilation=(2, 2), padding=((1, 1), (1, 1))), dict(conv_dgrad=1)),
        (dict(feature_group_count=2), dict(conv=1)),
    ),
    ids=("window", "transposed", "groups"),
)
def test_convolutions_of_any_window_are_replaced(options, expected):
    w = W[:, :, : 4 // options.get("feature_group_count", 1)]
    check(lambda x, w, b: jax.nn.relu(conv(x, w, **options) + b), X, w, B, **expected)


def test_channels_first_and_other_filter_orders_are_replaced():
    def layer(x, w, b):
        y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NCHW", "HWIO", "NCHW"))
        return jax.nn.relu(y + b[:, None, None])

    check(layer, X.transpose(0, 3, 1, 2), W, B, conv=1)


def test_one_and_three_dimensional_convolutions_are_replaced():
    def f(x, w, v, u):
        return conv(x, w, window_strides=(1,), dimension_numbers=("NWC", "WIO", "NWC")), conv(
            v, u, window_strides=(1, 1, 1), dimension_numbers=("NDHWC", "DHWIO", "NDHWC")
        )

    check(f, X[0], W[0], X[None], W[None], conv_fprop=2)


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_dtypes_stay(dtype):
    args = [a.astype(dtype) for a in (X, W, B, SCALE, BIAS)]

    def f(x, w, b, scale, bias):
        return jax.nn.relu(conv(x, w) + b), jax.nn.gelu(x @ w[0, 0] + b)

    check(f, *args[:3], args[3], args[4], conv=1, dense=1)


def test_dense_bias_and_activation_become_one_call():
    check(lambda x, w, b: jax.nn.gelu(x @ w + b), X, W[0, 0], B, dense=1)
    check(lambda x, w: jax.nn.relu(x @ w), X, W[0, 0], dense=1)


@pytest.mark.parametrize("residual", (False, True), ids=("", "residual"))
@pytest.mark.parametrize("activation", ("none", "relu", "silu"))
def test_batchnorm_residual_and_activation_become_one_call(activation, residual):
    f = ACTIVATIONS.get(activation, lambda y: y)

    def layer(x, scale, bias, r):
        y = normalise(x, scale, bias)
        return f(y + r if residual else y)

    x, r = array(0, (4, 3, 3, 8)), array(1, (4, 3, 3, 8))
    check(layer, x, SCALE, BIAS, r, batchnorm_train=1)


@pytest.mark.parametrize("residual", (False, True), ids=("", "residual"))
def test_a_convolution_and_its_batchnorm_become_a_pair(residual):
    def layer(x, w, scale, bias, *r):
        z = normalise(conv(x, w, window_strides=(2, 1)), scale, bias)
        return jax.nn.relu(z + r[0] if r else z)

    args = (X, W, SCALE, BIAS, *([array(8, (2, 3, 6, 8))] if residual else []))
    check(layer, *args, conv_fprop=1, batchnorm_train=1)
    assert accelerate(layer).report(*args)[1].fused.startswith("conv + batchnorm (training)")


def test_in_inference_a_batchnorm_is_folded_into_its_convolution():
    mean, var = 0.1 * BIAS, 1 + BIAS**2

    def layer(x, w, scale, bias):
        return jax.nn.silu((conv(x, w) - mean) * lax.rsqrt(var + 1e-5) * scale + bias)

    check(layer, X, W, SCALE, BIAS, conv=1)

    def first(x, w, scale, bias):  # channels first, filters as PyTorch has them
        z = conv(x, w, dimension_numbers=("NCHW", "OIHW", "NCHW"))
        mean, var, scale, bias = (v[:, None, None] for v in (0.1 * BIAS, 1 + BIAS**2, scale, bias))
        return (z - mean) * lax.rsqrt(var + 1e-5) * scale + bias

    check(first, jnp.moveaxis(X, -1, 1), jnp.transpose(W, (3, 2, 0, 1)), SCALE, BIAS, conv=1)


@pytest.mark.parametrize("train", (True, False), ids=("training", "inference"))
def test_a_convolution_whose_result_somebody_else_needs_is_no_pair(train):
    def layer(x, w, scale, bias):
        z = conv(x, w)
        mean, var = (z.mean((0, 1, 2)), z.var((0, 1, 2))) if train else (0.1 * BIAS, 1 + BIAS**2)
        return (z - mean) / jnp.sqrt(var + 1e-5) * scale + bias, z**2

    check(layer, X, W, SCALE, BIAS, conv_fprop=1, **{"batchnorm_train" if train else "batchnorm_infer": 1})


@pytest.mark.parametrize("train", (True, False), ids=("training", "inference"))
def test_a_convolution_with_a_precision_of_lax_alone_is_left_and_its_batchnorm_is_not(train):
    def layer(x, w, scale, bias):
        z = conv(x, w, precision=lax.DotAlgorithmPreset.F32_F32_F32)
        mean, var = (z.mean((0, 1, 2)), z.var((0, 1, 2))) if train else (0.1 * BIAS, 1 + BIAS**2)
        return (z - mean) / jnp.sqrt(var + 1e-5) * scale + bias

    args = (X, W, SCALE, BIAS)  # traced only: not every backend compiles such a convolution
    assert kernels(accelerate(layer), *args) == {"batchnorm_train" if train else "batchnorm_infer": 1}
    assert jax.eval_shape(accelerate(layer), *args) == jax.eval_shape(layer, *args)


def haiku(x, scale, offset):
    """As Haiku writes it."""
    mean = jnp.mean(x, (0, 1, 2), keepdims=True)
    var = jnp.mean(jnp.square(x), (0, 1, 2), keepdims=True) - jnp.square(mean)
    inv = scale.reshape(1, 1, 1, -1) * lax.rsqrt(var + 1e-5)
    return (x - mean) * inv + offset.reshape(1, 1, 1, -1), mean, var


def two_passes(x, scale, bias):
    mean = jnp.mean(x, (0, 1, 2))
    var = jnp.mean((x - mean) ** 2, (0, 1, 2))
    return (x - mean) * (lax.rsqrt(var + 1e-5) * scale) + bias, mean, var


def no_scale(x, scale, bias):
    mean, var = jnp.mean(x, (0, 1, 2)), jnp.var(x, (0, 1, 2))
    return (x - mean) * lax.rsqrt(var + 1e-5), mean, var


@pytest.mark.parametrize("written", (haiku, two_passes, no_scale), ids=lambda f: f.__name__)
def test_batchnorm_is_recognised_however_it_is_written_and_its_statistics_are_results(written):
    check(written, array(0, (4, 3, 3, 8)), SCALE, BIAS, batchnorm_train=1)


def keras(x, scale, bias, *running):
    """As Keras writes it: the mean is part of the offset."""
    mean, var = running or (jnp.mean(x, (0, 1, 2), keepdims=True), jnp.var(x, (0, 1, 2), keepdims=True))
    mean, var = jnp.squeeze(mean), jnp.squeeze(var)
    m, v, gamma, beta = (a.reshape(1, 1, 1, -1) for a in (mean, var, scale, bias))
    inv = lax.rsqrt(v + 1e-3)
    inv = inv * gamma
    return x * inv + (-m * inv + beta), mean, var


def keras_no_scale(x, scale, bias):
    mean, var = jnp.mean(x, (0, 1, 2)), jnp.var(x, (0, 1, 2))
    inv = lax.rsqrt(var + 1e-3)
    return x * inv + (bias - mean * inv), mean, var


def keras_no_bias(x, scale, bias):
    mean, var = jnp.mean(x, (0, 1, 2)), jnp.var(x, (0, 1, 2))
    inv = scale / jnp.sqrt(var + 1e-3)
    return x * inv + -(mean * inv), mean, var


@pytest.mark.parametrize("written", (keras, keras_no_scale, keras_no_bias), ids=lambda f: f.__name__)
def test_batchnorm_with_the_mean_in_its_offset_is_recognised(written):
    check(written, array(0, (4, 3, 3, 8)), SCALE, BIAS, batchnorm_train=1)
    check(lambda x, w, b, *rest: written(conv(x, w) + b, *rest), X, W, B, SCALE, BIAS, conv_fprop=1, batchnorm_train=1)


def test_batchnorm_with_the_mean_in_its_offset_is_recognised_in_inference():
    check(
        lambda x, w, b, scale, bias, mean, var: jax.nn.relu(keras(conv(x, w) + b, scale, bias, mean, var)[0]),
        *(X, W, B, SCALE, BIAS, 0.1 * B, 1 + B**2),
        conv=1,
    )


OTHER_OFFSETS = {
    "the_mean_is_added": lambda m, inv, b: m * inv + b,
    "the_bias_is_subtracted": lambda m, inv, b: -m * inv - b,
    "subtracted_from_the_mean": lambda m, inv, b: m * inv - b,
    "twice_negative": lambda m, inv, b: -m * -inv + b,
    "not_scaled": lambda m, inv, b: b - m,
    "scaled_twice": lambda m, inv, b: b - m * inv * inv,
}


@pytest.mark.parametrize("name", OTHER_OFFSETS)
def test_other_offsets_are_no_means(name):
    def f(x, scale, bias, mean, var):
        inv = lax.rsqrt(var + 1e-3) * scale
        return x * inv + OTHER_OFFSETS[name](mean, inv, bias)

    check(f, array(0, (4, 3, 3, 8)), SCALE, BIAS, B, SCALE)


@pytest.mark.parametrize("train", (True, False), ids=("training", "inference"))
def test_the_mean_minus_x_is_no_batchnorm(train):
    def f(x, scale, bias, mean, var):
        mean, var = (x.mean((0, 1, 2)), x.var((0, 1, 2))) if train else (mean, var)
        return (mean - x) * lax.rsqrt(var + 1e-5) * scale + bias

    check(f, array(0, (4, 3, 3, 8)), SCALE, BIAS, B, SCALE)


@pytest.mark.parametrize("residual", (False, True), ids=("", "residual"))
def test_a_convolution_with_a_bias_and_its_batchnorm_become_a_pair(residual):
    """The bias shifts the mean that is returned and cancels in everything else: its gradient is that of the mean."""

    def layer(x, w, b, scale, bias, *r):
        z = conv(x, w) + b
        mean, var = z.mean((0, 1, 2)), z.var((0, 1, 2))
        y = (z - mean) * lax.rsqrt(var + 1e-5) * scale + bias
        return jax.nn.relu(y + r[0] if r else y), 0.9 * BIAS + 0.1 * mean, var

    args = (X, W, 10 * B, SCALE, BIAS, *([array(8, (2, 6, 6, 8))] if residual else []))
    check(layer, *args, conv_fprop=1, batchnorm_train=1)
    assert accelerate(layer).report(*args)[1].fused.startswith("conv + bias + batchnorm (training)")
    _, mean, _ = accelerate(layer)(*args)
    np.testing.assert_allclose(mean, 0.9 * BIAS + 0.1 * (conv(X, W) + 10 * B).mean((0, 1, 2)), rtol=1e-5, atol=1e-5)
    gradient = jax.grad(lambda b: accelerate(layer)(X, W, b, *args[3:])[0].sum())(B)
    np.testing.assert_array_equal(gradient, np.zeros_like(B))


def test_in_inference_a_bias_and_a_batchnorm_are_folded_into_their_convolution():
    def layer(x, w, b, scale, bias, mean, var):
        return jax.nn.silu((conv(x, w) + b - mean) * lax.rsqrt(var + 1e-5) * scale + bias)

    args = (X, W, 10 * B, SCALE, BIAS, 10 * B + BIAS, 1 + BIAS**2)
    check(layer, *args, conv=1)
    assert accelerate(layer).report(*args)[1].fused == "conv + bias + batchnorm (inference) + silu"


@pytest.mark.parametrize("train", (True, False), ids=("training", "inference"))
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_a_pair_with_a_bias_in_16_bits(dtype, train):
    def layer(x, w, b, scale, bias):
        z = (conv(x, w) + b).astype("float32")
        mean, var = (z.mean((0, 1, 2)), z.var((0, 1, 2))) if train else (0.1 * B, 1 + B**2)
        y = (z - mean) * lax.rsqrt(var + 1e-5) * scale + bias
        # No relu: where z is rounded on its way, an element near 0 would change sides.
        return jax.nn.silu(y.astype(dtype)), mean

    check(
        layer,
        *(a.astype(dtype) for a in (X, W, B)),
        SCALE,
        BIAS,
        **(dict(conv_fprop=1, batchnorm_train=1) if train else dict(conv=1)),
    )


GROUPED = {
    "plain": dict(num_groups=4),
    "two_pass": dict(num_groups=2, use_fast_variance=False),
    "group_size": dict(num_groups=None, group_size=4),
    "one_group": dict(num_groups=1),
    "a_group_a_channel": dict(num_groups=8),
    "no_scale": dict(num_groups=4, use_scale=False),
    "no_bias": dict(num_groups=4, use_bias=False),
    "neither": dict(num_groups=4, use_scale=False, use_bias=False),
}


@pytest.mark.parametrize("images", (2, 1))
@pytest.mark.parametrize("case", GROUPED)
def test_flax_groupnorm_and_its_activation_become_one_call(case, images):
    """Of one image too, whose statistics are numbers per channel."""
    linen = pytest.importorskip("flax.linen")
    module = linen.GroupNorm(**GROUPED[case])
    x = array(0, (images, 4, 5, 8))
    variables = randomised(module.init(KEY, x))
    check(lambda v, x: jax.nn.silu(module.apply(v, x)), variables, x, groupnorm=1)
    (found,) = accelerate(lambda v, x: jax.nn.silu(module.apply(v, x))).report(variables, x)
    assert (found.what, found.fused) == ("groupnorm", "groupnorm + silu")


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_a_groupnorm_in_16_bits_is_computed_in_them(dtype):
    nnx = pytest.importorskip("flax.nnx")
    module = nnx.GroupNorm(8, 4, dtype=dtype, rngs=nnx.Rngs(KEY))
    x = array(0, (2, 4, 5, 8), dtype)
    check(lambda x: jax.nn.silu(module(x)), x, groupnorm=1)
    (call,) = jaxconv.explain(accelerate(lambda x: jax.nn.silu(module(x))))(x)
    assert call.problem.dtype == dtype and str(call.problem.activation) == "silu"


def grouped_statistics(x, groups, spatial):
    n, *extents, c = x.shape
    g = x.reshape(n, *(extents if spatial else [-1]), groups, c // groups)
    axes = tuple(a for a in range(1, g.ndim) if a != g.ndim - 2)
    return g, g.mean(axes, keepdims=True), g.var(axes, keepdims=True)


def grouped_by_hand(x, scale, bias, groups=2, spatial=False):
    g, mean, var = grouped_statistics(x, groups, spatial)
    return ((g - mean) / jnp.sqrt(var + 1e-5)).reshape(x.shape) * scale + bias


@pytest.mark.parametrize("spatial", (False, True), ids=("pixels_in_one", "pixels_as_they_are"))
def test_a_groupnorm_in_the_shape_of_its_groups_is_recognised(spatial):
    args = (array(0, (2, 4, 5, 8)), SCALE, BIAS)
    check(lambda *a: jax.nn.gelu(grouped_by_hand(*a, spatial=spatial)), *args, groupnorm=1)

    def bare(x):
        g, mean, var = grouped_statistics(x, 2, spatial)
        return ((g - mean) * lax.rsqrt(var + 1e-5)).reshape(x.shape)

    check(bare, args[0], groupnorm=1)


def instances_by_hand(x, scale=1, bias=0, squares=False):
    axes = tuple(range(1, x.ndim - 1))
    mean = x.mean(axes, keepdims=True)
    var = (x * x).mean(axes, keepdims=True) - mean**2 if squares else x.var(axes, keepdims=True)
    return (x - mean) * lax.rsqrt(var + 1e-5) * scale + bias


@pytest.mark.parametrize("squares", (False, True), ids=("centred", "squares"))
@pytest.mark.parametrize("shape", ((2, 4, 5, 8), (1, 4, 5, 8), (2, 3, 4, 5, 8), (3, 7, 8)), ids=str)
def test_an_instance_norm_and_its_activation_become_one_call(shape, squares):
    """Each channel is a group of its own; of one image too, where these are the batch's statistics as well."""
    x = array(0, shape)
    check(lambda *a: jax.nn.leaky_relu(instances_by_hand(*a, squares=squares), 0.1), x, SCALE, BIAS, groupnorm=1)
    (call,) = jaxconv.explain(accelerate(instances_by_hand))(x, SCALE, BIAS)
    assert call.problem.groups == call.problem.channels == 8


@pytest.mark.parametrize("images", (2, 1))
def test_flax_instance_norm_behind_a_convolution(images):
    linen = pytest.importorskip("flax.linen")
    module = linen.Sequential([linen.Conv(8, (3, 3)), linen.InstanceNorm(), linen.leaky_relu])
    x = array(0, (images, 4, 5, 8))
    variables = randomised(module.init(KEY, x))
    check(module.apply, variables, x, conv=1, groupnorm=1)
    gradient = jax.grad(lambda v: accelerate(module.apply)(v, x).sum())
    assert (
        helpers.equations(gradient, variables)["reduce_sum"] == 1
    )  # the loss; the bias' gradient is zero, and no pass
    np.testing.assert_array_equal(gradient(variables)["params"]["layers_0"]["bias"], jnp.zeros(8))


def of_channels_first(shape, squares=False, lead=1):
    """(x, scale, bias) -> y with statistics over all axes behind that of groups, of each image in the shape."""

    def normalised(x, scale=1, bias=0):
        g = x.reshape(*x.shape[:lead], *shape)
        axes = tuple(range(lead + 1, g.ndim))
        mean = g.mean(axes, keepdims=True)
        var = (g * g).mean(axes, keepdims=True) - mean**2 if squares else g.var(axes, keepdims=True)
        y = ((g - mean) * lax.rsqrt(var + 1e-5)).reshape(x.shape)
        of_channels = (slice(None), *(None,) * (x.ndim - lead - 1))
        return y * jnp.asarray(scale).reshape(-1)[of_channels] + jnp.asarray(bias).reshape(-1)[of_channels]

    return normalised


CHANNELS_FIRST = {  # a shape that x, (2, 8, 4, 5), is seen in: its groups
    "groups": ((2, 4, 4, 5), 2),
    "pixels_in_one": ((4, 2, 20), 4),
    "all_in_one": ((2, 80), 2),
    "one_group": ((1, 8, 4, 5), 1),
    "instances": ((8, 4, 5), 8),
}


@pytest.mark.parametrize("squares", (False, True), ids=("centred", "squares"))
@pytest.mark.parametrize("case", CHANNELS_FIRST)
def test_a_groupnorm_with_channels_first_is_recognised(case, squares):
    shape, groups = CHANNELS_FIRST[case]
    x, f = array(0, (2, 8, 4, 5)), of_channels_first(shape, squares)
    check(lambda *a: jax.nn.silu(f(*a)), x, SCALE, BIAS, groupnorm=1)
    (call,) = jaxconv.explain(accelerate(f))(x, SCALE, BIAS)
    assert (call.problem.shape, call.problem.groups) == ((2, 4, 5, 8), groups)
    of_one = of_channels_first(shape, squares, lead=0)  # as Equinox's
    check(lambda x, *a: jax.vmap(lambda x: of_one(x, *a))(x), x, SCALE, BIAS, groupnorm=1)


def strided_groups(x):
    """A group is every fourth channel."""
    g = x.reshape(2, 2, 4, 4, 5)
    mean, var = g.mean((1, 3, 4), keepdims=True), g.var((1, 3, 4), keepdims=True)
    return ((g - mean) * lax.rsqrt(var + 1e-5)).reshape(x.shape)


def permuted_groups(x):
    """The array is in another order where it is in groups."""
    h = lax.reshape(x, (2, 2, 80), dimensions=(0, 2, 1, 3))
    mean, var = x.reshape(2, 2, 80).mean(2, keepdims=True), x.reshape(2, 2, 80).var(2, keepdims=True)
    return ((h - mean) * lax.rsqrt(var + 1e-5)).reshape(x.shape)


@pytest.mark.parametrize("f", (strided_groups, permuted_groups))
def test_what_is_no_groupnorm_with_channels_first_is_left(f):
    check(f, array(0, (2, 8, 4, 5)))


def test_a_scale_in_a_deviation_with_channels_first_is_taken_in():
    def f(x, scale):
        mean, var = x.mean((2, 3), keepdims=True), x.var((2, 3), keepdims=True)
        return (x - mean) * (lax.rsqrt(var + 1e-5) * scale[None, :, None, None])

    check(f, array(0, (2, 8, 4, 5)), SCALE, groupnorm=1)


def test_a_reshape_of_an_extent_that_may_be_zero_is_exported():
    """It is no group-norm, whatever the extent is."""

    def f(x, w):
        y = lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return y.reshape(y.shape[0], -1, 8) * 2.0

    x = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, h, w, 8"), "float32")
    exported = jax.export.export(jax.jit(accelerate(f)), disabled_checks=jaxconv.export_checks())(
        x, jax.ShapeDtypeStruct((3, 3, 8, 8), "float32")
    )
    given, w = array(0, (2, 5, 6, 8)), array(1, (3, 3, 8, 8))
    np.testing.assert_allclose(exported.call(given, w), f(given, w), rtol=1e-4, atol=1e-4)


def test_rows_with_two_axes_of_images_are_a_layer_norm():
    """Without a scale they are an instance-norm with channels first, too."""
    (found,) = accelerate(of_channels_first((4, 8))).report(array(0, (3, 4, 8)), 1, 0)
    assert found.what == "layernorm"


def other_variance(x):
    g, mean, var = grouped_statistics(x, 2, True)
    return ((g - mean) * lax.rsqrt(2 * var + 1e-5)).reshape(x.shape)


def unbiased(x):
    g, mean, _ = grouped_statistics(x, 2, True)
    return ((g - mean) * lax.rsqrt(g.var((1, 2, 4), keepdims=True, ddof=1) + 1e-5)).reshape(x.shape)


def of_rows(x):
    g = x.reshape(2, 4, 5, 2, 4)
    mean, var = g.mean((2, 4), keepdims=True), g.var((2, 4), keepdims=True)
    return ((g - mean) * lax.rsqrt(var + 1e-5)).reshape(x.shape)


def of_another(x):
    g, _, var = grouped_statistics(x, 2, True)
    return ((g - grouped_statistics(2 * x, 2, True)[1]) * lax.rsqrt(var + 1e-5)).reshape(x.shape)


def interleaved_groups(x):
    g = x.reshape(2, 4, 5, 4, 2)  # a group is every second channel
    mean, var = g.mean((1, 2, 3), keepdims=True), g.var((1, 2, 3), keepdims=True)
    return ((g - mean) * lax.rsqrt(var + 1e-5)).reshape(x.shape)


def with_its_statistics(x):
    g, mean, var = grouped_statistics(x, 2, True)
    return ((g - mean) * lax.rsqrt(var + 1e-5)).reshape(x.shape), mean, var


def of_columns(x):
    mean, var = x.mean(1, keepdims=True), x.var(1, keepdims=True)
    return (x - mean) * lax.rsqrt(var + 1e-5)


@pytest.mark.parametrize("f", (of_columns, other_variance, unbiased, of_rows, of_another, with_its_statistics))
def test_what_is_no_groupnorm_is_left(f):
    check(f, array(0, (2, 4, 5, 8)))


def test_groups_that_are_interleaved_are_an_instance_norm():
    """Of the array with another axis of pixels."""
    check(interleaved_groups, array(0, (2, 4, 5, 8)), groupnorm=1)


def test_a_groupnorm_whose_gradient_is_taken_inside_is_left_and_the_report_says_so():
    def step(x, scale, bias):
        return jax.grad(lambda *a: (jax.nn.silu(grouped_by_hand(*a)) ** 2).sum(), (0, 1, 2))(x, scale, bias)

    args = (array(0, (2, 4, 5, 8)), SCALE, BIAS)
    assert kernels(accelerate(step), *args) == {}
    (found,) = accelerate(step).report(*args)
    assert found.what == "groupnorm" and "accelerate the loss, before its gradient is taken" in found.why


LAYERED = {
    "plain": {},
    "two_pass": dict(use_fast_variance=False),
    "no_scale": dict(use_scale=False),
    "no_bias": dict(use_bias=False),
    "neither": dict(use_scale=False, use_bias=False),
}


@pytest.mark.parametrize("dtype", (None, "bfloat16", "float16"))
@pytest.mark.parametrize("case", LAYERED)
def test_flax_layernorm_becomes_one_call(case, dtype):
    """In the narrow type that it has; what is behind it stays there."""
    linen = pytest.importorskip("flax.linen")
    module = linen.LayerNorm(dtype=dtype, **LAYERED[case])
    x = array(0, (2, 4, 5, 8), dtype or "float32")
    variables = randomised(module.init(KEY, x))

    def layer(v, x):
        return jax.nn.silu(module.apply(v, x))

    check(layer, variables, x, groupnorm=1)
    (found,) = accelerate(layer).report(variables, x)
    assert (found.what, found.fused, found.why) == ("layernorm", "layernorm", "")
    (call,) = jaxconv.explain(accelerate(layer))(variables, x)
    assert call.problem.rows and call.problem.dtype == x.dtype.name and call.problem.shape == x.shape


def rows_divided(x, scale, bias):
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(var + 1e-5) * scale + bias


def rows_of_haiku(x, scale, bias):
    mean, var = jnp.mean(x, -1, keepdims=True), jnp.var(x, -1, keepdims=True)
    scale, bias = jnp.broadcast_to(scale, x.shape), jnp.broadcast_to(bias, x.shape)
    return scale * lax.rsqrt(var + 1e-5) * (x - mean) + bias


def rows_of_equinox(x, scale, bias):
    def one(x):
        mean, var = jnp.mean(x, keepdims=True), jnp.maximum(0.0, jnp.var(x, keepdims=True))
        return (x - mean) * lax.rsqrt(var + 1e-5) * scale + bias

    return jax.vmap(one)(x.reshape(-1, x.shape[-1])).reshape(x.shape)


def rows_bare(x, scale, bias):
    mean, square = jnp.mean(x, -1), jnp.mean(x**2, -1)
    return (x - mean[..., None]) * lax.rsqrt(square - mean**2 + 1e-5)[..., None]


@pytest.mark.parametrize("shape", ((2, 4, 8), (1, 8), (8, 8), (3, 1, 8)), ids=str)
@pytest.mark.parametrize("f", (rows_divided, rows_of_haiku, rows_of_equinox, rows_bare))
def test_a_layernorm_by_hand_is_recognised(f, shape):
    x = array(0, shape)
    check(f, x, SCALE, BIAS, groupnorm=1)
    (found,) = accelerate(f).report(x, SCALE, BIAS)
    assert found.fused == "layernorm"


def rows_with_their_statistics(x):
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(var + 1e-5), mean


NO_LAYERNORM = {
    "statistics": rows_with_their_statistics,
    "unbiased": lambda x: (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True, ddof=1) + 1e-5),
    "root_mean_square": lambda x: x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5),
    "of_another": lambda x: (x - (2 * x).mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5),
    "variance_of_another": lambda x: (x - x.mean(-1, keepdims=True)) * lax.rsqrt(jnp.tanh(x).var(-1, keepdims=True)),
    "mean_of_all": lambda x: (x - x.mean((1, 2, 3), keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5),
    "scale_a_row": lambda x: (
        (x - x.mean(-1, keepdims=True)) * (lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) + x[..., :1])
    ),
}


@pytest.mark.parametrize("case", NO_LAYERNORM)
def test_what_is_no_layernorm_is_left(case):
    check(NO_LAYERNORM[case], array(0, (2, 4, 5, 8)))


def test_an_unbiased_variance_of_long_rows_is_no_layernorm(monkeypatch):
    """One less than 524,288 elements is the count within the rounding of a reciprocal, not of the count."""
    monkeypatch.setattr(rewrite, "as_written_on_cpu", lambda: False)  # as on a GPU

    def f(x, ddof):
        return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True, ddof=ddof) + 1e-5)

    for ddof, calls in ((1, 0), (0, 1)):
        report = accelerate(functools.partial(f, ddof=ddof)).report(array(0, (2, 2**19)))
        assert [found.what for found in report if found.fused].count("layernorm") == calls


def test_a_layernorm_whose_gradient_is_taken_inside_is_left_and_the_report_says_so():
    def step(x, scale, bias):
        return jax.grad(lambda *a: (jax.nn.silu(rows_divided(*a)) ** 2).sum(), (0, 1, 2))(x, scale, bias)

    args = (array(0, (2, 4, 8)), SCALE, BIAS)
    assert kernels(accelerate(step), *args) == {}
    (found,) = accelerate(step).report(*args)
    assert found.what == "layernorm" and "accelerate the loss, before its gradient is taken" in found.why


def group_norm(z):
    """Of one image: its mean and variance a group, as numbers a channel."""
    grouped = z.reshape(*z.shape[:3], 2, 4)
    mean, var = (jnp.repeat(s(grouped, (0, 1, 2, 4)), 4) for s in (jnp.mean, jnp.var))
    return mean, var


def weighted(z):
    weights = jnp.linspace(0, 1, z.shape[1])[:, None, None]
    mean = (z * weights).mean((0, 1, 2))
    return mean, (weights * (z - mean) ** 2).mean((0, 1, 2))


OWN_STATISTICS = {
    "group_norm": group_norm,
    "ema": lambda z: (0.9 * BIAS + 0.1 * z.mean((0, 1, 2)), 0.9 * SCALE + 0.1 * z.var((0, 1, 2))),
    "ddof": lambda z: (z.mean((0, 1, 2)), z.var((0, 1, 2), ddof=1)),
    "stop_gradient": lambda z: lax.stop_gradient((z.mean((0, 1, 2)), z.var((0, 1, 2)))),
    "stop_gradient_of_the_mean": lambda z: (lax.stop_gradient(z.mean((0, 1, 2))), z.var((0, 1, 2))),
    "weighted": weighted,
}


@pytest.mark.parametrize("bias", (False, True), ids=("", "bias"))
@pytest.mark.parametrize("name", OWN_STATISTICS)
def test_a_convolution_is_computed_once_whatever_its_norms_statistics_are(name, bias):
    def layer(x, w, b, scale, offset):
        z = conv(x, w) + b if bias else conv(x, w)
        mean, var = OWN_STATISTICS[name](z)
        return jax.nn.relu((z - mean) * lax.rsqrt(var + 1e-5) * scale + offset)

    args = (X[:1], W, B, SCALE, BIAS)
    check(layer, *args, **{"conv" if bias else "conv_fprop": 1, "batchnorm_infer": 1})
    assert accelerate(layer).report(*args)[1].fused == "batchnorm (given statistics) + relu"


@pytest.mark.parametrize("train", (True, False), ids=("training", "inference"))
def test_a_convolution_is_computed_once_where_the_residual_or_the_scale_needs_it(train):
    def layer(x, w, scale, bias):
        z = conv(x, w)
        mean, var = (z.mean((0, 1, 2)), z.var((0, 1, 2))) if train else (0.1 * BIAS, 1 + BIAS**2)
        return (z - mean) * lax.rsqrt(var + 1e-5) * scale + bias + jnp.tanh(z)

    norm = "batchnorm_train" if train else "batchnorm_infer"
    found = kernels(accelerate(layer), X, W, SCALE, BIAS)
    assert found.pop(norm) == 1 and sum(found.values()) == 1
    assert_same(accelerate(layer)(X, W, SCALE, BIAS), layer(X, W, SCALE, BIAS), terms=36 * 72)

    def gated(x, w, scale, bias):
        z = conv(x, w)
        return (z - 0.1 * BIAS) * lax.rsqrt(1 + BIAS**2 + 1e-5) * (scale * z.max((0, 1, 2))) + bias

    check(gated, X, W, SCALE, BIAS, conv_fprop=1, batchnorm_infer=1)


def per_example(statistics: Any) -> Any:
    """A model of one (C, H, W) example under vmap, as Equinox writes it; the statistics cross the examples."""

    def layers(x, w, b, scale, bias, matrix, running):
        y = lax.conv_general_dilated(x[None], w, (1, 1), "SAME")[0] + b[:, None, None]
        mean = lax.pmean(jnp.mean(y, (1, 2)), "batch")
        var = lax.pmean(jnp.mean((y - mean[:, None, None]) * (y - mean[:, None, None]), (1, 2)), "batch")
        var = jnp.maximum(0.0, var)
        center, spread = statistics(mean, var, running)
        y = (y - center[:, None, None]) / jnp.sqrt(spread + 1e-5)[:, None, None]
        y = jax.nn.relu(y * scale[:, None, None] + bias[:, None, None])
        return matrix @ y.mean((1, 2)) + bias[: matrix.shape[0]], 0.9 * running + 0.1 * mean

    return jax.vmap(layers, (0,) + (None,) * 6, (0, None), axis_name="batch")


PER_EXAMPLE = (array(0, (3, 4, 6, 6)), W.transpose(3, 2, 0, 1), B, SCALE, BIAS, W2[0, 0, :, :5].T, B)


@pytest.mark.parametrize(
    ("statistics", "expected"),
    (
        (lambda mean, var, running: (mean, var), dict(conv_fprop=1, batchnorm_train=1)),
        (lambda mean, var, running: (running, jnp.abs(running)), dict(conv=1, batchnorm_infer=1)),
    ),
    ids=("of_the_batch", "running"),
)
def test_a_model_of_one_example_under_vmap_is_recognised(statistics, expected):
    f = per_example(statistics)
    check(f, *PER_EXAMPLE, terms=16 * 3 * 36 * 36, **expected, dense=1)
    fused = [finding.fused.split(") ")[-1] for finding in accelerate(f).report(*PER_EXAMPLE)]
    assert fused == ["conv + bias", "+ relu", "dense + bias"]


def test_flax_batchnorm_that_shares_its_statistics_under_vmap_stays_right():
    """Flax sends mean and mean square through one pmean, stacked: the statistics stay Flax's own computation."""
    nn = pytest.importorskip("flax.linen", reason="the module is Flax's")
    norm = nn.BatchNorm(use_running_average=False, axis_name="batch")
    x = array(0, (3, 2, 4, 4, 8))
    variables = jax.eval_shape(norm.init, KEY, x[0])

    def f(params, stats, x):
        def one(x):
            return norm.apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])

        y, updates = jax.vmap(one, axis_name="batch")(x)
        return y, jax.tree.map(lambda a: a[0], updates)

    variables = randomised(variables)
    check(f, variables["params"], variables["batch_stats"], x, batchnorm_infer=1)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_under_vmap_are_recognised(activation):
    f = ACTIVATIONS[activation]
    check(jax.vmap(lambda x, w, b: f(conv(x[None], w)[0] + b), (0, None, None)), X, W, B, conv=1)


@pytest.mark.parametrize("kind", (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit), ids=("auto", "explicit"))
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_mesh_hides_nothing(activation, kind):
    """Types speak of the mesh where arguments are placed on one."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(kind,))
    placed = jax.device_put((X, W, B, SCALE, BIAS), jax.NamedSharding(mesh, jax.P()))

    def layers(x, w, b, scale, bias):
        f = ACTIVATIONS[activation]
        return f(normalise(f(conv(x, w) + b), scale, bias))

    found = [finding.fused for finding in accelerate(layers).report(*placed)]
    assert found == [finding.fused for finding in accelerate(layers).report(X, W, B, SCALE, BIAS)]
    assert found[0].startswith("conv + bias + ") and found[1].startswith("batchnorm (training) + ")


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_shard_map_hides_nothing(activation):
    """Inside one, types say which values vary over the mesh, and equations say so in front of others."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    specs = (PartitionSpec("data"), *[PartitionSpec()] * 4)

    def layers(x, w, b, scale, bias):
        f = ACTIVATIONS[activation]
        return f(normalise(f(conv(x, w) + b), scale, bias))

    found = []

    def of_shard(*args):
        found.extend(finding.fused for finding in accelerate(layers).report(*args))
        return layers(*args)

    mapped = jax.shard_map(of_shard, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("data"))
    jax.eval_shape(mapped, X, W, B, SCALE, BIAS)
    assert found == [finding.fused for finding in accelerate(layers).report(X, W, B, SCALE, BIAS)]
    assert found[0].startswith("conv + bias + ") and found[1].startswith("batchnorm (training) + ")


@pytest.mark.skipif(jax.device_count() < 2, reason="it takes two devices")
def test_data_parallel_losses_inside_a_shard_map():
    """Each device's own statistics; what does not vary stays so, and gradients are sums over the mesh."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    whole, shard = PartitionSpec(), PartitionSpec("data")

    def loss(params, x):
        w, b, scale, bias, v = params
        y = jax.nn.relu(normalise(conv(x, w), scale, bias))
        y = lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        y = jax.nn.silu(conv(y, W2) + b) + lax.fori_loop(0, 2, lambda _, z: jnp.tanh(z @ v), y)
        return (y**2).mean(), (w, y.mean((0, 1, 2)), 2.0)

    def summed(loss):
        def of_shard(params, x):
            value, (w, mean, two) = loss(params, x)
            return lax.pmean(value, "data"), (w, lax.pmean(mean, "data"), two)

        f = jax.shard_map(of_shard, mesh=mesh, in_specs=(whole, shard), out_specs=whole)
        return jax.jit(jax.value_and_grad(f, has_aux=True))

    params = (W, B, SCALE, BIAS, array(5, (8, 8)))
    expected, found = summed(loss)(params, X), summed(accelerate(loss))(params, X)
    assert_same(found, expected, terms=16 * X.size)
    assert kernels(lambda *args: summed(accelerate(loss))(*args), params, X)["batchnorm_backward"] == 1


def test_batchnorm_of_channels_first_is_replaced():
    def f(x, scale, bias):
        mean, var = x.mean((0, 2, 3), keepdims=True), x.var((0, 2, 3), keepdims=True)
        return (x - mean) * lax.rsqrt(var + 1e-5) * scale[:, None, None] + bias[:, None, None]

    check(f, array(0, (4, 8, 3, 3)), SCALE, BIAS, batchnorm_train=1)


@pytest.mark.parametrize("how", ("z + mean", "z * var", "z + var", "z * mean + 1", "z + mean + x"))
def test_a_batchnorm_whose_scale_or_bias_is_its_own_mean_or_variance_is_left(how):
    def f(x: jax.Array) -> jax.Array:
        mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
        z = (x - mean) * lax.rsqrt(var + 1e-3)
        return eval(how, {"z": z, "mean": mean, "var": var, "x": x})

    assert not kernels(accelerate(f), X)
    # Compiled as a whole, with products in sums that were not rounded.
    np.testing.assert_allclose(accelerate(f)(X), f(X), rtol=1e-6, atol=1e-6)
    assert "depend on one another" in str(accelerate(f).report(X))


def test_inference_and_other_statistics_become_an_inference_call():
    def f(x, scale, bias, mean, var):
        return jax.nn.relu((x - mean) * lax.rsqrt(var + 1e-5) * scale + bias)

    x = array(0, (4, 3, 3, 8))
    check(f, x, SCALE, BIAS, BIAS, SCALE, batchnorm_infer=1)

    def unbiased(x, scale, bias):
        return f(x, scale, bias, x.mean((0, 1, 2)), x.var((0, 1, 2), ddof=1))

    check(unbiased, x, SCALE, BIAS, batchnorm_infer=1)


# ----------------------------------------------------------------------------------------------------------------------
# Inside other transformations


def block(x, w, b):
    return jax.nn.relu(conv(x, w) + b)


@jax.custom_vjp
def with_vjp(x, w, b):
    return block(x, w, b)


with_vjp.defvjp(lambda *args: (block(*args), args), lambda args, ct: jax.vjp(block, *args)[1](ct))


@jax.custom_jvp
def with_jvp(x, w, b):
    return block(x, w, b)


with_jvp.defjvp(lambda primals, tangents: jax.jvp(block, primals, tangents))


def looped(x, w, b):
    def body(state):
        i, x = state
        return i + 1, block(x, w, b)

    return lax.while_loop(lambda state: state[0] < 2, body, (0, x))


def scanned(x, w, b):
    def body(x, w):
        y = block(x, w, b)
        return y, y.sum()

    return lax.scan(body, x, jnp.stack([w, 2 * w]))


INSIDE = {
    "jit": jax.jit(block),
    "nested_jit": lambda x, w, b: jax.jit(lambda x: 2 * jax.jit(block)(x, w, b))(x),
    "remat": jax.checkpoint(block),
    "scan": scanned,
    "while": looped,
    "cond": lambda x, w, b: lax.cond(x.sum() > 0, block, lambda x, w, b: -block(x, w, b), x, w, b),
    "custom_vjp": with_vjp,
    "custom_jvp": with_jvp,
}


@pytest.mark.parametrize("name", INSIDE)
def test_functions_inside_functions_are_rewritten(name):
    f, args = INSIDE[name], (array(0, (2, 4, 4, 8)), 0.1 * W2, B)
    assert kernels(accelerate(f), *args) == {"conv": 2 if name == "cond" else 1}
    assert_same(jax.jit(accelerate(f))(*args), jax.jit(f)(*args), terms=3 * 3 * 8 * 2)
    if name != "while":

        def loss(f):
            return jax.grad(lambda *args: sum(map(jnp.sum, jax.tree.leaves(f(*args)))), (0, 1, 2))

        assert_same(jax.jit(loss(accelerate(f)))(*args), jax.jit(loss(f))(*args), terms=2 * 16 * 9 * 8)


def test_it_is_vmapped_and_jitted_and_differentiated_as_the_function_is():
    f = accelerate(lambda x, w, b: jnp.sum(block(x, w, b) ** 2))
    g = lambda x, w, b: jnp.sum(block(x, w, b) ** 2)  # noqa: E731
    x = array(0, (3, 2, 4, 4, 4))
    transformed = [jax.jit(jax.vmap(jax.value_and_grad(h, (0, 1)), (0, None, None))) for h in (f, g)]
    assert_same(transformed[0](x, W, B), transformed[1](x, W, B), terms=32 * 8)
    tangents = [jax.jvp(h, (x[0], W, B), (x[1], W, B)) for h in (f, g)]
    assert_same(*tangents, terms=32 * 8 * 36)


# ----------------------------------------------------------------------------------------------------------------------
# What is shared, and what is left


def test_a_preactivation_that_somebody_else_uses_is_a_result_of_the_call():
    def f(x, w, b):
        z = conv(x, w) + b
        return jax.nn.relu(z), z * z

    check(f, X, W, B, conv=1)


def test_a_value_between_the_preactivation_and_the_result_may_be_used():
    def f(x, w, b):
        z = conv(x, w) + b
        gate = jax.nn.sigmoid(z)
        return z * gate, gate + 1

    check(f, X, W, B, conv=1)


def test_a_product_that_somebody_else_uses_keeps_its_bias_outside():
    def f(x, w, b):
        c = conv(x, w)
        return jax.nn.relu(c + b), c.sum()

    check(f, X, W, B, conv_fprop=1)


def test_a_batchnorm_that_somebody_else_uses_keeps_its_activation_outside():
    def f(x, scale, bias, r):
        y = normalise(x, scale, bias)
        total = y + r
        return jax.nn.relu(total), y.sum(), total.max()

    check(f, array(0, (4, 3, 3, 8)), SCALE, BIAS, array(1, (4, 3, 3, 8)), batchnorm_train=1)


def test_a_residual_that_needs_the_statistics_stays_outside():
    def f(x, scale, bias):
        mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
        return jax.nn.relu((x - mean) * lax.rsqrt(var + 1e-5) * scale + bias + x * mean)

    check(f, array(0, (4, 3, 3, 8)), SCALE, BIAS, batchnorm_train=1)


def test_an_unbiased_variance_of_many_elements_is_no_batchnorm(monkeypatch):
    """One less than 524,288 elements is the count within the rounding of a reciprocal, not of the count."""
    monkeypatch.setattr(rewrite, "as_written_on_cpu", lambda: False)  # as on a GPU
    x = array(0, (2, 64, 64, 64, 2))

    def f(x, ddof):
        mean, var = x.mean((0, 1, 2, 3)), x.var((0, 1, 2, 3), ddof=ddof)
        return (x - mean) * lax.rsqrt(var + 1e-5)

    for ddof, statistics in ((1, "given statistics"), (0, "training")):
        (found,) = accelerate(functools.partial(f, ddof=ddof)).report(x)
        assert found.fused == f"batchnorm ({statistics})"


def test_two_batchnorms_added_are_two_calls():
    def f(x, r, scale, bias):
        return jax.nn.relu(normalise(x, scale, bias) + normalise(r, bias, scale))

    args = array(0, (4, 3, 3, 8)), array(1, (4, 3, 3, 8)), SCALE, BIAS
    check(f, *args, batchnorm_train=2)
    fused = [finding.fused for finding in accelerate(f).report(*args)]
    assert fused == ["batchnorm (training) + residual + relu", "batchnorm (training)"]


WRITTEN_OUT = {
    "maximum": (lambda z: jnp.maximum(z, 0), "relu"),
    "maximum_first": (lambda z: jnp.maximum(0.0, z), "relu"),
    "clip": (lambda z: jnp.clip(z, 0, 6), "relu6"),
    "clip_floats": (lambda z: jnp.clip(z, 0.0, 6.0), "relu6"),
    "clamp": (lambda z: lax.clamp(z.dtype.type(0), z, z.dtype.type(6)), "relu6"),
    "minimum": (lambda z: jnp.maximum(jnp.minimum(z, 6.0), 0.0), "relu6"),
    "leaky": (lambda z: jnp.where(z > 0, z, 0.25 * z), "leaky_relu(0.25)"),
    "leaky_or_equal": (lambda z: jnp.where(z >= 0, z, z * 0.25), "leaky_relu(0.25)"),
    "leaky_below": (lambda z: jnp.where(z < 0, 0.25 * z, z), "leaky_relu(0.25)"),
    "leaky_maximum": (lambda z: jnp.maximum(z, 0.25 * z), "leaky_relu(0.25)"),
    "hard_swish_of_a_gate": (lambda z: z * jax.nn.hard_sigmoid(z), "hard_swish"),
    "hard_swish_divided": (lambda z: z * jax.nn.relu6(z + 3) / 6, "hard_swish"),
    "hard_swish_clip": (lambda z: z * jnp.clip(z + 3, 0, 6) / 6, "hard_swish"),
    "hard_swish_maximum": (lambda z: z * (jnp.minimum(jnp.maximum(z + 3, 0), 6) / 6), "hard_swish"),
    "hard_swish_sixth": (lambda z: jax.nn.relu6(z + 3.0) * (1.0 / 6.0) * z, "hard_swish"),
    "hard_swish_half": (lambda z: z * jnp.clip(z / 6 + 0.5, 0, 1), "hard_swish"),
}


def test_a_choice_that_makes_0_of_nan_is_no_relu():
    x = X.at[0, 0, 0, 0].set(jnp.nan)

    def f(x, w, b):
        z = conv(x, w) + b
        return jnp.where(z > 0, z, 0)

    (found,) = accelerate(f).report(x, W, B)
    assert "relu" not in found.fused
    assert not jnp.isnan(jax.jit(accelerate(f))(x, W, B)).any()


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_activations_written_without_jax_nn_are_recognised(name, dtype):
    f, activation = WRITTEN_OUT[name]
    args = [3 * X.astype(dtype), W.astype(dtype), B.astype(dtype)]
    (found,) = accelerate(lambda x, w, b: f(conv(x, w) + b)).report(*args)
    assert found.fused == f"conv + bias + {activation}"
    if dtype == "float32":  # 3x: some values are past 6
        check(lambda x, w, b: f(conv(x, w) + b), *args, conv=1)


@pytest.mark.parametrize("slope", [-0.5, 1.5])
def test_a_maximum_with_a_slope_below_0_or_above_1_is_no_leaky_relu(slope):
    """maximum(z, -0.5 z) is positive on both sides; maximum(z, 1.5 z) has its slope above zero."""

    def f(x, w, b):
        z = conv(x, w) + b
        return jnp.maximum(z, slope * z)

    check(f, X, W, B, conv=1)
    (found,) = [found for found in accelerate(f).report(X, W, B) if found.what == "conv"]
    assert found.fused == "conv + bias"


OTHER_ACTIVATIONS = {
    "mish": jax.nn.mish,
    "selu": jax.nn.selu,
    "celu": jax.nn.celu,
    "softplus": jax.nn.softplus,
    "log_sigmoid": jax.nn.log_sigmoid,
    "hard_sigmoid": jax.nn.hard_sigmoid,
    "hard_tanh": jax.nn.hard_tanh,
    "soft_sign": jax.nn.soft_sign,
    "squareplus": jax.nn.squareplus,
    "elu with an alpha other than 1": functools.partial(jax.nn.elu, alpha=0.5),
    "swish with a beta": lambda z: z * jax.nn.sigmoid(1.5 * z),
}


@pytest.mark.parametrize("name", OTHER_ACTIVATIONS)
def test_activations_that_are_left_behind_a_call_are_named(name):
    def layer(x, w, b):
        return OTHER_ACTIVATIONS[name](conv(x, w) + b)

    check(layer, X, W, B, conv=1)
    made, left = accelerate(layer).report(X, W, B)
    assert made.fused == "conv + bias"
    assert (left.what, left.fused) == ("activation", "") and f"has no {name}" in left.why

    def normalised(x, w, b):
        return OTHER_ACTIVATIONS[name](normalise(conv(x, w), b, b))

    assert f"has no {name}, so it is computed after the batchnorm" in accelerate(normalised).report(X, W, B)[-1].why


@jax.custom_jvp
def straight_through(z):
    """relu whose derivative is 1 everywhere: not jax.nn.relu."""
    return jax.jit(lambda x: jnp.maximum(x, 0.0))(z)


straight_through.defjvp(lambda primals, tangents: (straight_through(*primals), tangents[0]))

LEFT = {
    "derivative_of_its_own_under_vmap": (
        lambda x, w, b: jax.vmap(lambda x: straight_through(conv(x[None], w)[0] + b))(x),
        dict(conv=1),
    ),
    "statistics_of_each_example": (
        lambda x, w, b: jax.vmap(lambda x: (x - x.mean((0, 1))) * lax.rsqrt(x.var((0, 1)) + 1e-5))(x),
        {},
    ),
    "not_zero": (lambda x, w, b: jnp.maximum(conv(x, w) + b, 0.1), dict(conv=1)),
    "not_six": (lambda x, w, b: jnp.clip(conv(x, w) + b, 0, 5), dict(conv=1)),
    "larger_instead_of_smaller": (lambda x, w, b: jnp.minimum(conv(x, w) + b, 0.0), dict(conv=1)),
    # The larger of z and 2z is 2z above zero.
    "steeper": (lambda x, w, b: (lambda z: jnp.maximum(z, 2 * z))(conv(x, w) + b), dict(conv=1)),
    "derivative_of_its_own": (lambda x, w, b: straight_through(conv(x, w) + b), dict(conv=1)),
    "another_slope": (lambda x, w, b: jax.nn.elu(conv(x, w) + b, 0.5), dict(conv=1)),
    "bias_of_another_axis": (lambda x, w, b: conv(x, w[..., :6]) + b[:6, None], dict(conv_fprop=1)),
    "no_epilogue": (lambda x, w, b: x @ w[0, 0], {}),
    "contraction": (lambda x, w, b: jnp.einsum("nhwc,rsck->nhwrsk", x, w[:1]).sum((3, 4)) + b, {}),
    "norm_of_columns": (
        lambda x, w, b: (x - x.mean(1, keepdims=True)) * lax.rsqrt(x.var(1, keepdims=True) + 1e-5) * b[:4],
        {},
    ),
    "batch_groups": (lambda x, w, b: conv(x, w, batch_group_count=2), {}),
    "mixed_types": (
        lambda x, w, b: conv(x.astype("bfloat16"), w.astype("bfloat16"), preferred_element_type=jnp.float32),
        {},
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_not_recognised_is_left(name):
    f, expected = LEFT[name]
    assert kernels(accelerate(f), X, W, B) == expected
    if expected:
        check(f, X, W, B, **expected)
    else:  # the very same function
        assert str(jax.make_jaxpr(accelerate(f))(X, W, B)) == str(jax.make_jaxpr(f)(X, W, B))


def test_a_mean_in_two_stages_that_is_none_is_left():
    def f(x, scale, bias):
        mean = x.mean((1, 2)).sum(0) / 3  # of four examples
        var = ((x - mean) ** 2).mean((0, 1, 2))
        return (x - mean) * lax.rsqrt(var + 1e-5) * scale + bias

    check(f, array(0, (4, 3, 3, 8)), SCALE, BIAS, batchnorm_infer=1)


def test_the_report_says_what_became_of_each_layer_and_why():
    def f(x, w, b):
        y = jax.nn.relu(conv(x, w) + b)
        return conv(y, W2, batch_group_count=2), y @ y[0, 0].T

    report = accelerate(f).report(X, W, B)
    assert [finding.fused for finding in report.replaced] == ["conv + bias + relu"]
    assert [(finding.what, finding.why) for finding in report.left] == [
        ("conv", "it has batch groups"),
        ("dense", "neither a bias, a scale nor an activation follows"),
    ]
    assert "left as it was: it has batch groups" in str(report)
    assert accelerate(f).report(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (X, W, B))) == report


def test_explain_shows_what_was_replaced_wherever_the_function_is_and_however_often_it_was_traced():
    def f(x, w, b):
        y = jax.nn.relu(conv(x, w) + b)
        return jnp.sum(conv(y, W2, batch_group_count=2))

    step = jax.jit(jax.value_and_grad(accelerate(f)))
    before = step(X, W, B)  # traced and cached: explain must not depend on it
    for _ in range(2):
        explained = jaxconv.explain(step)(X, W, B)
        assert [(finding.fused, finding.why) for finding in explained.accelerated] == [
            ("conv + bias + relu", ""),
            ("", "it has batch groups"),
        ]
        assert {call.op for call in explained} == {"conv", "conv_dgrad"}
        text = str(explained)
        assert text.startswith("accelerate:\n") and "conv + bias + relu" in text and "it has batch groups" in text
    assert not jaxconv.explain(f)(X, W, B).accelerated
    assert helpers.same_bits(step(X, W, B), before)
    assert step._cache_size() == 1  # explaining compiled nothing


def test_arguments_and_results_keep_their_structure_and_python_values_stay_python_values():
    Layer = collections.namedtuple("Layer", "w b")

    def f(layer, x, *, train: bool, power: int = 1, note: str | None = None):
        assert isinstance(train, bool) and note == "note"
        return {"y": block(x, layer.w, layer.b) ** power, "x": x if train else None, "n": power}

    out = accelerate(f)(Layer(W, B), np.asarray(X), train=False, power=2, note="note")
    want = f(Layer(W, B), X, train=False, power=2, note="note")
    assert jax.tree.structure(out) == jax.tree.structure(want)
    assert_same(out["y"], want["y"], terms=36)
    assert accelerate(f).__name__ == "f"


def test_effects_stay_in_order():
    seen = []

    def f(x, scale, bias):
        mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
        jax.debug.callback(lambda m: seen.append(("mean", m.shape)), mean, ordered=True)
        y = (x - mean) * lax.rsqrt(var + 1e-5) * scale + bias
        jax.debug.callback(lambda y: seen.append(("y", y.shape)), y, ordered=True)
        return y

    x = array(0, (4, 3, 3, 8))
    jax.block_until_ready(jax.jit(accelerate(f))(x, SCALE, BIAS))
    jax.effects_barrier()
    assert seen == [("mean", (8,)), ("y", (4, 3, 3, 8))]


# ----------------------------------------------------------------------------------------------------------------------
# Whole models, written against Flax alone


def resnet(blocks: int = 2) -> Any:
    import flax.linen as nn

    class Block(nn.Module):
        features: int
        stride: int = 1

        @nn.compact
        def __call__(self, x, train):
            norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
            y = nn.relu(norm()(nn.Conv(self.features, (1, 1), use_bias=False)(x)))
            y = nn.relu(norm()(nn.Conv(self.features, (3, 3), strides=self.stride, use_bias=False)(y)))
            y = norm(scale_init=nn.initializers.zeros)(nn.Conv(4 * self.features, (1, 1), use_bias=False)(y))
            if x.shape != y.shape:
                x = norm()(nn.Conv(4 * self.features, (1, 1), strides=self.stride, use_bias=False)(x))
            return nn.relu(x + y)

    class ResNet(nn.Module):
        @nn.compact
        def __call__(self, x, train=True):
            x = nn.Conv(8, (7, 7), strides=2, padding=3, use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
            x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
            for features, stride in ((4, 1), (8, 2)):
                x = Block(features, stride)(x, train)
                for _ in range(blocks - 1):
                    x = Block(features)(x, train)
            return nn.Dense(10)(x.mean((1, 2)))

    return ResNet()


def convnext() -> Any:
    import flax.linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.LayerNorm()(nn.Conv(8, (7, 7), feature_group_count=8)(x))
            y = nn.Dense(8)(nn.gelu(nn.Dense(32)(y)))
            return x + y * self.param("gamma", nn.initializers.ones, (8,))

    class ConvNeXt(nn.Module):
        @nn.compact
        def __call__(self, x, train=True):
            x = nn.LayerNorm()(nn.Conv(8, (4, 4), strides=4)(x))
            return nn.Dense(10)(Block()(Block()(x)).mean((1, 2)))

    return ConvNeXt()


def test_the_benchmarks_convnext_has_two_layers_in_each_block():
    nn = pytest.importorskip("flax.linen", reason="the model is Flax's")
    from benchmarks import models

    for small, blocks in ((True, 2), (False, 18)):
        model = models.convnext_t(nn, small=small)
        x = jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.bfloat16)
        variables = jax.eval_shape(model.init, KEY, x)
        fused = [finding.fused for finding in accelerate(model.apply).report(variables, x)]
        # Of the small one's second stage there are two pixels: too few for its filter to be scaled in their place.
        scaled = 1 if small else 0
        counted = [fused.count(f"dense + bias{more}") for more in (" + gelu", " + scale", "")]
        assert counted == [blocks, scaled, blocks - scaled + 1]  # and the head


def mobilenet() -> Any:
    import flax.linen as nn

    class Block(nn.Module):
        features: int
        stride: int

        @nn.compact
        def __call__(self, x, train):
            norm = functools.partial(nn.BatchNorm, use_running_average=not train, dtype=jnp.bfloat16)
            conv = functools.partial(nn.Conv, use_bias=False, dtype=jnp.bfloat16)
            y = nn.relu6(norm()(conv(24, (1, 1))(x)))
            y = nn.relu6(norm()(conv(24, (3, 3), strides=self.stride, feature_group_count=24)(y)))
            y = norm()(conv(self.features, (1, 1))(y))
            return x + y if x.shape == y.shape else y

    class MobileNet(nn.Module):
        @nn.compact
        def __call__(self, x, train=True):
            x = nn.Conv(4, (3, 3), strides=2, use_bias=False, dtype=jnp.bfloat16)(x)
            x = Block(8, 2)(x, train)
            return nn.Dense(10)(Block(8, 1)(x, train).mean((1, 2)))

    return MobileNet()


MODELS = {
    # model, (convolutions, dense layers, batch-norms, layer-norms)
    "resnet": (resnet, (15, 1, 15, 0)),
    "convnext": (convnext, (3, 5, 0, 3)),
    "mobilenet": (mobilenet, (7, 1, 6, 0)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("train", (True, False), ids=("training", "inference"))
def test_every_layer_of_a_model_is_replaced(name, train):
    pytest.importorskip("flax", reason="the models are Flax's")
    model, expected = MODELS[name][0](), MODELS[name][1]
    x = jax.ShapeDtypeStruct((4, 16, 16, 3), jnp.float32)
    variables = jax.eval_shape(model.init, KEY, x)
    report = accelerate(functools.partial(model.apply, mutable=["batch_stats"])).report(variables, x, train)
    assert not report.left, str(report)
    counted = collections.Counter(finding.what for finding in report.replaced)
    assert tuple(counted[what] for what in ("conv", "dense", "batchnorm", "layernorm")) == expected
    if name == "resnet":
        fused = collections.Counter(finding.fused.split(") ")[-1] for finding in report if finding.what == "batchnorm")
        assert (fused["+ relu"], fused["+ residual + relu"]) == (9, 4)


@pytest.mark.promise
def test_a_model_trains_to_the_same_losses():
    pytest.importorskip("flax", reason="the models are Flax's")
    model = resnet(blocks=1)
    x = array(0, (4, 16, 16, 3))
    variables = randomised(jax.eval_shape(model.init, KEY, x))

    def loss(params, stats, x):
        y, updates = model.apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])
        return jnp.mean((y - 1) ** 2), updates["batch_stats"]

    def trained(loss):
        @jax.jit
        def step(params, stats):
            (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(params, stats, x)
            return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), stats, value

        params, stats, losses = variables["params"], variables["batch_stats"], []
        for _ in range(3):
            params, stats, value = step(params, stats)
            losses.append(value)
        return losses, stats

    ours, flax = trained(accelerate(loss)), trained(loss)
    # 9 layers pass each other's rounding on, each step starts from the last one's.
    assert_same(ours, flax, terms=(9 * 3) ** 2 * x.size)


# ---- state among the arguments


def nnx_net(width: int = 8) -> Any:
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.conv = nnx.Conv(4, width, (3, 3), use_bias=False, rngs=rngs)
            self.again = self.conv  # shared
            self.norm = nnx.BatchNorm(width, momentum=0.5, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.head = nnx.Linear(width, 3, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.head(self.dropout(nnx.relu(self.norm(self.conv(x)))).mean((1, 2)))

    return Net(nnx.Rngs(0))


def nnx_training(way: str, steps: int = 3) -> tuple[list[float], Any]:
    """Losses, and the module's state after as many steps; `way`: where accelerate goes."""
    import optax
    from flax import nnx

    def loss(model: Any, x: jax.Array) -> jax.Array:
        return ((model(x) - 1) ** 2).mean()

    inner = accelerate(loss) if way == "loss" else loss

    def step(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
        value, grads = nnx.value_and_grad(inner)(model, x)
        optimizer.update(model, grads)
        return value

    model = nnx_net()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    step = {"step": accelerate(step), "jitted step": nnx.jit(accelerate(step))}.get(way, nnx.jit(step))
    losses = [float(step(model, optimizer, X)) for _ in range(steps)]
    assert model.conv is model.again
    return losses, nnx.state(model, nnx.Not(nnx.RngKey))


@pytest.mark.parametrize("way", ("loss", "step", "jitted step"))
def test_state_of_nnx_objects_is_written_back(way):
    losses, state = nnx_training("plain")
    assert losses[-1] < losses[0]
    accelerated_losses, accelerated_state = nnx_training(way)
    np.testing.assert_allclose(accelerated_losses, losses, rtol=1e-4)
    assert jax.tree.structure(accelerated_state) == jax.tree.structure(state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), accelerated_state, state)
    assert int(state["dropout"]["rngs"]["count"][...]) == 3


@pytest.mark.parametrize("way", ("module", "method", "partial arguments", "jit"))
def test_state_of_the_nnx_object_that_the_function_is_or_belongs_to_is_written_back(way):
    from flax import nnx

    ours, plain = nnx_net(), nnx_net()
    for _ in range(2):
        want = plain(X)
        if way == "jit":
            got = nnx.jit(lambda net, x: accelerate(net)(x))(ours, X)
        else:
            f = accelerate(ours if way == "module" else ours.__call__)
            got = f(x=X) if way == "partial arguments" else f(X)
        assert_same(got, want, terms=72 * 36)
    assert jnp.abs(ours.norm.mean[...]).max() > 0 and int(ours.dropout.rngs.count[...]) == 2
    for a, b in zip(*(jax.tree.leaves(nnx.state(net, nnx.Not(nnx.RngKey))) for net in (ours, plain)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert [f.fused for f in accelerate(ours).report(X)][-1] == "dense + bias"


def test_a_gradient_inside_the_function_keeps_all_of_its_terms():
    """The derivative of Flax's max(0, E[x^2] - E[x]^2) compares the two: both must be rounded alike."""

    def normalised(x: jax.Array) -> jax.Array:
        mean = x.mean((0, 1, 2))
        var = jnp.maximum(0.0, jnp.square(x).mean((0, 1, 2)) - jnp.square(mean))
        return ((x - mean) * lax.rsqrt(var + 1e-5) * SCALE + BIAS) ** 3

    gradient = jax.grad(lambda x: normalised(conv(x, W)).mean())
    assert_same(accelerate(gradient)(X), gradient(X), terms=72 * 36)
    (finding,) = [f for f in accelerate(gradient).report(X) if f.what == "batchnorm"]
    assert "accelerate the loss" in finding.why


def test_a_split_nnx_model_that_is_merged_inside_has_its_gradient():
    """Its statistics are nnx's variables of another trace level than the gradient's: nothing is written into them."""
    from flax import nnx

    graph, params, stats = nnx.split(nnx_net(), nnx.Param, ...)

    def loss(params, stats, x):
        net = nnx.merge(graph, params, stats, copy=True)
        return (net(x) ** 2).mean(), nnx.split(net, nnx.Param, ...)[2]

    found, expected = (jax.jit(jax.value_and_grad(f, has_aux=True))(params, stats, X) for f in (accelerate(loss), loss))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if not jax.dtypes.issubdtype(b.dtype, jax.dtypes.prng_key):
            assert_same(a, b, terms=256)


def test_static_attributes_of_nnx_objects_are_written_back():
    model = nnx_net()

    def evaluate(model: Any, x: jax.Array) -> jax.Array:
        model.eval()
        return model(x)

    accelerate(evaluate)(model, X)
    assert model.norm.use_running_average and model.dropout.deterministic


def test_a_report_changes_no_state():
    from flax import nnx

    model = nnx_net()
    before = nnx.state(model)
    report = accelerate(lambda m, x: m(x)).report(model, X)
    assert any("batchnorm" in finding.fused for finding in report)
    assert int(model.dropout.rngs.count[...]) == 0
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model, nnx.Param), nnx.filter_state(before, nnx.Param))


def test_changes_of_other_arguments_are_refused():
    def puts(d: dict[str, jax.Array]) -> jax.Array:
        d["x"] = d["x"] + 1
        return d["x"].sum()

    with pytest.raises(TypeError, match=r"changes one of its arguments.*nnx.split.*jaxconv.nnx"):
        accelerate(puts)({"x": X})
    # Taking something out of a dict that is a copy loses nothing.
    np.testing.assert_allclose(accelerate(lambda d: d.pop("x").sum())({"x": X}), X.sum(), rtol=1e-5)


class Plain:
    """Somebody's object, as libraries without a functional core have them."""

    def __init__(self) -> None:
        self.mean, self.log, self.last = jnp.zeros(8), [], {}

    def __call__(self, x: jax.Array) -> jax.Array:
        y = conv(x, W)
        self.mean = 0.5 * self.mean + y.mean((0, 1, 2))
        self.log.append(y.sum())
        self.last["pair"] = (x, 2 * y)
        self.child = Slotted()
        self.child.value = y.max()
        return jax.nn.relu(y)


class Slotted:
    __slots__ = ("count", "value")


SEEN: Any = None


def attributes(model: Plain) -> Any:
    return model.mean, model.log, model.last, model.child.value


REACHED = {
    "f itself": lambda model: (model, ()),
    "a method": lambda model: (model.__call__, ()),
    "closed over": lambda model: (lambda x: model(x), ()),
    "in a dict, closed over": lambda model, d=None: ((lambda held: lambda x: held["model"](x))({"model": model}), ()),
    "by a function that is closed over": lambda model: ((lambda inner: lambda x: inner(x))(lambda x: model(x)), ()),
    "bound": lambda model: (functools.partial(lambda model, x: model(x), model), ()),
    "an argument": lambda model: (lambda x, model: model(x), (model,)),
}


@pytest.mark.parametrize("way", REACHED)
def test_what_is_assigned_to_plain_objects_is_written_back(way):
    """As if f had been called as it is: no tracer stays."""
    ours, plain = Plain(), Plain()
    (f, more), (g, others) = REACHED[way](ours), REACHED[way](plain)
    for _ in range(2):
        assert_same(accelerate(f)(X, *more), g(X, *others), terms=36)
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(attributes(ours)))
    assert len(ours.log) == 2 and type(ours.last["pair"]) is tuple
    for a, b in zip(jax.tree.leaves(attributes(ours)), jax.tree.leaves(attributes(plain)), strict=True):
        assert_same(a, b, terms=400)


def test_a_report_changes_no_plain_object():
    model = Plain()
    before = model.mean
    accelerate(model).report(X)
    assert model.mean is before and model.log == [] and model.last == {}
    assert getattr(getattr(model, "child", None), "value", None) is None


class Counted:
    calls = jnp.zeros(())


class CountedMore(Counted):
    total: Any = 0.0

    def __call__(self, x: Any) -> Any:
        y = conv(x, W)
        Counted.calls, type(self).total = Counted.calls + 1, self.total + y.sum()
        return y


def test_classes_queues_and_a_functions_own_attributes_keep_no_tracer():
    last, names = collections.deque(maxlen=2), types.SimpleNamespace(y=0)

    def f(x: Any) -> Any:
        y = conv(x, W)
        f.sum = getattr(f, "sum", 0) + y
        last.append(y)
        names.y = y
        return y

    ours, counted = accelerate(f), accelerate(CountedMore())
    for _ in range(3):
        y = ours(X)
        counted(X)
    assert_same(f.sum, 3 * y, terms=36)
    assert len(last) == 2 and not any(isinstance(a, jax.core.Tracer) for a in (*last, names.y, f.sum))
    assert float(Counted.calls) == 3
    assert_same(CountedMore.total, 3 * y.sum(), terms=400)


class Answer:
    """No pytree."""

    def __init__(self, logits: Any):
        self.logits = logits


def test_results_that_hide_arrays_are_refused():
    """They would hold tracers."""

    def f(x: Any, way: str = "object") -> Any:
        y = conv(x, W)
        return {"object": Answer(y), "list in it": Answer([{"a": y}]), "closure": lambda: y}[way]

    for way in ("object", "list in it", "closure"):
        with pytest.raises(
            TypeError, match=r"accelerate: the function returned a .* that holds arrays and is no pytree"
        ):
            accelerate(functools.partial(f, way=way))(X)
    with pytest.raises(TypeError, match="freeze: the function returned a Answer"):
        jaxconv.freeze(lambda w, x: Answer(conv(x, w)), W)(X)
    kept = Answer(1)
    assert accelerate(lambda x: (conv(x, W), kept))(X)[1] is kept

    def pieces(x: Any) -> Any:
        yield conv(x, W)

    async def later(x: Any) -> Any:
        return conv(x, W)

    for g in (pieces, later, functools.partial(pieces)):
        with pytest.raises(TypeError, match="accelerate: f is a generator or a coroutine, expected a function"):
            accelerate(g)


@pytest.mark.parametrize("way", ["call", "report"])
def test_an_exception_leaves_what_was_there(way):
    """A step that raised left tracers behind, and each later one raised too."""
    state: dict[str, Any] = {"n": jnp.zeros(()), "seen": []}

    def f(x: Any) -> Any:
        state["n"] = state["n"] + 1
        state["seen"].append(x.sum())
        f.last = conv(x, W)
        if x.shape[0] == 1:
            raise ValueError("one image")
        return f.last

    ours = accelerate(f)
    ours(X)
    with pytest.raises(ValueError, match="one image"):
        (ours if way == "call" else ours.report)(X[:1])
    assert float(state["n"]) == 1 and len(state["seen"]) == 1 and f.last.shape[0] == len(X)
    ours(X)
    assert float(state["n"]) == 2 and len(state["seen"]) == 2


def test_variables_of_closures_and_globals_keep_no_tracer():
    global SEEN
    count, total = 0, jnp.zeros(())

    def f(x):
        global SEEN
        nonlocal count, total
        y = conv(x, W)
        count, total, SEEN = count + 1, total + y.sum(), y.max()
        return y

    accelerate(f).report(X)
    assert count == 1 and float(total) == 0 and SEEN is None  # what is no array is f's, whenever it is traced
    try:
        y = accelerate(f)(X)
        assert_same(total, y.sum(), terms=400)
        assert_same(SEEN, y.max(), terms=36)
    finally:
        SEEN = None


def test_inside_other_transformations_plain_objects_hold_those_tracers():
    """So that what is around reads what f assigned, as it does of f itself."""

    def step(fast):
        model = Plain()
        f = accelerate(model) if fast else model

        @jax.jit
        def gradient(x):
            def loss(x):
                return f(x).sum() + (model.mean**2).sum()

            return jax.grad(loss)(x)

        return gradient(X)

    assert_same(step(True), step(False), terms=400)


def test_what_others_leave_stays():
    """The tracer of an inner jit is f's own mistake, and is no business of accelerate's."""
    seen = []

    def f(x):
        return jax.jit(lambda x: seen.append(x) or conv(x, W))(x)

    accelerate(f)(X)
    assert isinstance(seen[0], jax.core.Tracer)


# ---- what is said, and to whom


RESULTS = {
    "literal": lambda x: (jnp.float32(1.5), jnp.asarray(True), x),
    "weak": lambda x: (jnp.asarray(2.0), jnp.asarray(3), x),
    "zeros": lambda x: (jnp.zeros(3, jnp.int8), jnp.zeros((), jnp.bfloat16), jnp.zeros(()), x),
    "weak_sum": lambda x: (jnp.asarray(2.0) + jnp.asarray(1), x),
    "flag_of_a_jitted_function": lambda x: (jax.jit(lambda x: (x, True, 1.0))(x), x),
    "of_a_branch": lambda x: lax.cond(x[0, 0, 0, 0] > 0, lambda: (x, 1, True), lambda: (2 * x, 0, False)),
    "of_a_scan": lambda x: lax.scan(lambda c, _: (c, (1.0, jnp.int32(2))), x, None, 3),
    "argument": lambda x: (x, x),
    "closed_over": lambda x: (B, x),
    "convolution": lambda x: (conv(x, W), jnp.float32(1.5), True, jnp.asarray(2.0)),
    "convolution_in_a_branch": lambda x: lax.cond(
        x[0, 0, 0, 0] > 0, lambda x: (conv(x, W), 1.0), lambda x: (2 * conv(x, W), 0.0), x
    ),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_that_are_arrays_stay_arrays_of_their_type(name):
    f = RESULTS[name]
    ours, plain = accelerate(f)(X), f(X)
    assert jax.tree.structure(ours) == jax.tree.structure(plain)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        assert type(a) is type(b)
        if isinstance(b, jax.Array):
            assert (a.dtype, a.weak_type, a.shape) == (b.dtype, b.weak_type, b.shape)
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=1e-4, atol=1e-4)
    traced = [jax.make_jaxpr(g)(X).out_avals for g in (accelerate(f), f)]
    assert [(a.dtype, a.weak_type) for a in traced[0]] == [(a.dtype, a.weak_type) for a in traced[1]]
    if name == "convolution_in_a_branch":
        assert kernels(accelerate(f), X) == {"conv_fprop": 2}


def test_results_that_are_no_arrays_are_returned_as_they_are():
    marker = object()
    y, name, f, n, what = accelerate(lambda x, w: (conv(x, w), "name", jnp.tanh, 3, marker))(X, W)
    assert isinstance(y, jax.Array) and (name, f, n, what) == ("name", jnp.tanh, 3, marker)


def loss_of(params: dict[str, jax.Array], batch: jax.Array, scale: float = 1.0) -> jax.Array:
    return jnp.sum(jax.nn.relu(conv(batch, params["w"]) + params["b"]) ** 2) * scale


def test_a_gradient_taken_inside_is_called_one():
    def step(params, batch):
        value, grads = jax.value_and_grad(loss_of)(params, batch)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    report = accelerate(step).report(dict(w=W, b=B), X)
    assert [finding.why.split(",")[0] for finding in report if finding.fused == "wgrad"] == ["a weight gradient"]
    assert not report.left
    assert "wgrad: a weight gradient, taken inside the function: accelerate the loss" in str(report)
    assert "batch groups" not in str(report)
    assert_same(accelerate(step)(dict(w=W, b=B), X), step(dict(w=W, b=B), X), terms=72 * 72)

    def depthwise(x, w):
        return conv(x, w, feature_group_count=4).sum()

    report = accelerate(jax.grad(depthwise, (0, 1))).report(X, W[:, :, :1])
    assert "batch groups" not in str(report)
    assert sorted(finding.why.split(",")[0] for finding in report) == ["a weight gradient", "an input gradient"]
    # Around the loss there is nothing to be said of gradients, wherever the gradient is taken.
    assert not accelerate(loss_of).report(dict(w=W, b=B), X).left
    explained = jaxconv.explain(jax.jit(jax.grad(accelerate(loss_of))))(dict(w=W, b=B), X)
    assert not explained.accelerated.left


@pytest.mark.parametrize("numbers", (NHWC, ("NCHW", "OIHW", "NCHW")), ids=("channels_last", "channels_first"))
@pytest.mark.parametrize("kind", ("strided", "grouped", "transposed", "remat"))
def test_convolutions_of_a_gradient_taken_inside_are_fprop_dgrad_and_wgrad(kind, numbers):
    options = {
        "strided": dict(window_strides=(2, 2)),
        "grouped": dict(feature_group_count=4),
        "transposed": dict(lhs_dilation=(2, 2), padding=((2, 1), (2, 1))),
        "remat": {},
    }[kind]
    axes = ["NHWC".index(a) for a in numbers[0]], ["HWIO".index(a) for a in numbers[1]]
    x, w = X.transpose(axes[0]), (W[:, :, :1] if kind == "grouped" else W).transpose(axes[1])

    def loss(x, w):
        options_ = {"window_strides": (1, 1), "padding": "SAME", **options}
        return jnp.sin(lax.conv_general_dilated(x, w, dimension_numbers=numbers, **options_)).sum()

    def step(x, w):
        inner = jax.checkpoint(loss) if kind == "remat" else loss
        return jax.vmap(jax.value_and_grad(inner, (0, 1)), (0, None))(jnp.stack([x, -x]), w)

    report = accelerate(step).report(x, w)
    assert not report.left
    # Of a transposed convolution the gradient of the images is a convolution like any other.
    expected = {"transposed": ["conv", "conv", "wgrad"], "remat": ["conv", "conv", "dgrad", "wgrad"]}
    assert sorted(finding.fused for finding in report) == expected.get(kind, ["conv", "dgrad", "wgrad"])
    assert all("accelerate the loss" in finding.why for finding in report if finding.fused != "conv")
    counted = helpers.equations(accelerate(step), x, w)
    assert counted["conv_general_dilated"] == 0 and counted["jaxconv_conv_wgrad"] == 1
    assert_same(accelerate(step)(x, w), step(x, w), terms=72 * 36)
    # And once more, around it.
    third = jax.grad(lambda w: sum(jnp.sum(g**2) for g in jax.tree.leaves(accelerate(step)(x, w)[1])))
    plain = jax.grad(lambda w: sum(jnp.sum(g**2) for g in jax.tree.leaves(step(x, w)[1])))
    assert_same(third(w), plain(w), terms=72 * 72)


@pytest.mark.skipif(jax.device_count() < 2, reason="it takes two devices")
@pytest.mark.parametrize("spec", (("d",), (None, "d"), (None, None, None, "d")), ids=("images", "rows", "channels"))
@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit), ids=str)
def test_a_gradient_taken_inside_keeps_its_split(kind, spec):
    """The types and the collectives are lax's: what our call would gather stays lax's."""
    if kind == AxisType.Explicit and len(spec) == 4:
        pytest.skip("lax refuses it")
    mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,), devices=jax.devices()[:2])

    def step(x, w):
        return jax.grad(lambda x, w: jnp.sum(conv(x, w) ** 2), (0, 1))(x, w)

    with jax.set_mesh(mesh) if kind == AxisType.Explicit else contextlib.nullcontext():
        x = jax.device_put(X, NamedSharding(mesh, PartitionSpec(*spec)))
        w = jax.device_put(W, NamedSharding(mesh, PartitionSpec()))
        ours, plain = (jax.jit(f).lower(x, w).compile() for f in (accelerate(step), step))
        assert {f.fused for f in accelerate(step).report(x, w)} >= ({"wgrad"} if spec == ("d",) else set())
        got, want = ours(x, w), plain(x, w)
    assert_same(got, want, terms=72 * 72)
    if kind == AxisType.Explicit:
        for a, b in zip(got, want, strict=True):
            assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    assert ours.as_text().count(" all-gather(") <= plain.as_text().count(" all-gather(")


def test_the_report_says_so_where_there_is_nothing_to_replace():
    nothing = accelerate(lambda x: jnp.tanh(x).sum()).report(X)
    assert not nothing and "nothing was found" in str(nothing)
    ours = accelerate(lambda x, w, b: jaxconv.conv2d(x, w, b).sum()).report(X, W, B)
    assert not ours and str(ours) == "nothing is left to replace: the function calls jaxconv already (calls: 1)"
    twice = accelerate(accelerate(block)).report(X, W, B)
    assert not twice and "already" in str(twice)
    assert "nothing was found" in str(jaxconv.explain(jax.jit(accelerate(jnp.tanh)))(X))
    table, region, *_ = str(accelerate(block).report(X, W, B)).split("\n\n")
    assert table.count("\n") == 1 and region.startswith("a region of results")  # a heading and a line


def test_what_is_no_function_is_refused():
    Transformed = collections.namedtuple("Transformed", "init apply")
    with pytest.raises(TypeError, match=r"accelerate: got Transformed\(init, apply\), .*accelerate\(f.apply\)"):
        accelerate(Transformed(block, block))
    with pytest.raises(TypeError, match=r"got a tuple of 2 functions"):
        accelerate((block, block))
    with pytest.raises(TypeError, match=r"f must be a function, got int"):
        accelerate(5)


def test_an_unbound_flax_module_is_refused():
    nn = pytest.importorskip("flax.linen", reason="the module is Flax's")
    with pytest.raises(TypeError, match=r"Dense is a flax.linen module without parameters.*accelerate\(model.apply\)"):
        accelerate(nn.Dense(3))
    bound = nn.Dense(3).bind({"params": {"kernel": W[0, 0, :, :3], "bias": B[:3]}})
    check(accelerate(bound), X, dense=1)


def concretes(params: dict[str, jax.Array], batch: jax.Array, flag: bool) -> jax.Array:
    return batch if conv(batch, params["w"]).sum() > 0 else 2 * batch


def test_variables_of_bound_flax_modules_keep_no_tracer():
    nn = pytest.importorskip("flax.linen", reason="the modules are Flax's")

    class Inside(nn.Module):
        way: str

        @nn.compact
        def __call__(self, x):
            conv, norm = nn.Conv(4, (3, 3)), nn.BatchNorm(use_running_average=False)
            if self.way == "makes":
                return accelerate(conv)(x)
            if self.way == "makes in a closure":
                return accelerate(lambda x: conv(x))(x)
            x = conv(x)
            return norm(x) if self.is_initializing() else accelerate(functools.partial(norm.__call__))(x)

    for way in ("makes", "makes in a closure"):
        with pytest.raises(TypeError, match=r"makes or changes variables \(\['params'\]\['Conv_0'\].*model.apply"):
            Inside(way).init(KEY, X)
    model = Inside("changes")
    variables = model.init(KEY, X)
    with pytest.raises(TypeError, match=r"makes or changes variables \(\['batch_stats'\]"):
        model.apply(variables, X, mutable=["batch_stats"])
    # Where nothing changes, nothing is lost.
    assert_same(Inside("makes").apply(variables, X), nn.Conv(4, (3, 3)).apply(conv_only(variables), X), terms=36)


def conv_only(variables: Any) -> Any:
    return {"params": variables["params"]["Conv_0"]}


class Callable:
    def __call__(self, params: dict[str, jax.Array], batch: jax.Array, flag: bool) -> jax.Array:
        return concretes(params, batch, flag)


@pytest.mark.parametrize(
    ("f", "name"),
    (
        (concretes, "concretes"),
        (functools.partial(concretes, flag=True), "concretes"),
        (Callable(), "__call__"),
        (jax.tree_util.Partial(concretes), "concretes"),
    ),
    ids=("function", "partial", "object", "Partial"),
)
def test_errors_name_the_function_and_its_arguments(f, name):
    kwargs = {} if isinstance(f, functools.partial) and f.keywords else dict(flag=True)
    with pytest.raises(jax.errors.TracerBoolConversionError) as error:
        accelerate(f)({"w": W}, X, **kwargs)
    assert f"the function {name} at {__file__}" in str(error.value)
    assert "the arguments params['w'] and batch." in str(error.value)


@pytest.mark.usefixtures("full_locations")
def test_profiler_scopes_keep_the_layers_names():
    def model(x, w, b, v):
        with jax.named_scope("C"):
            with jax.named_scope("c1"):
                y = conv(x, w) + b
            y = jax.nn.relu(y)
            with jax.named_scope("c2"):
                y = conv(y, v)
            with jax.named_scope("norm"):
                y = normalise(y, b, b)
            with jax.named_scope("head"):
                return jnp.tanh(y @ v[0, 0] + b)

    def scopes(f):  # of what the region holds
        jaxpr = jax.make_jaxpr(f)(X, W, B, W2)
        found = [(e.primitive.name, str(e.source_info.name_stack)) for e in primitives.equations(jaxpr.jaxpr)]
        return [(name.removeprefix("jaxconv_"), stack) for name, stack in found if "jaxconv" in name][1:]

    expected = [("conv", "C/c1"), ("conv_fprop", "C/c2"), ("batchnorm_train", "C/norm"), ("dense", "C/head")]
    assert scopes(accelerate(model)) == expected
    text = jax.jit(accelerate(jax.jit(jax.checkpoint(model)))).lower(X, W, B, W2).as_text(debug_info=True)
    # A location's name is the path of its scopes; a file's begins with a slash.
    named = re.findall(r'loc\("[^"/][^"]*/C/(c1|head)/', text)
    assert {*named} == {"c1", "head"}


def test_the_environment_switches_it_off(monkeypatch):
    monkeypatch.setenv("JAXCONV_DISABLE", "conv, all")
    assert kernels(accelerate(block), X, W, B) == {}
    report = accelerate(block).report(X, W, B)
    assert not report and str(report) == "nothing is replaced: JAXCONV_DISABLE=conv, all"
    assert "JAXCONV_DISABLE" in str(jaxconv.explain(accelerate(block))(X, W, B))
    monkeypatch.setenv("JAXCONV_DISABLE", "dense")
    assert kernels(accelerate(block), X, W, B) == {"conv": 1}


def test_jet_of_the_accelerated_function():
    jet = pytest.importorskip("jax.experimental.jet")

    def f(x):
        return jnp.tanh(conv(x, W)).sum()

    series = ((X, jnp.zeros_like(X)),)
    assert_same(jet.jet(accelerate(f), (X,), series), jet.jet(f, (X,), series), terms=72 * 36)


@pytest.mark.parametrize("jitted", (False, True), ids=("eager", "jit"))
@pytest.mark.parametrize("activation", ("tanh", "silu", "relu"))
def test_taylor_series(activation, jitted, x64):
    jet = pytest.importorskip("jax.experimental.jet")
    activate = {"tanh": jnp.tanh, "silu": jax.nn.silu, "relu": lambda z: jnp.maximum(z, 0)}[activation]
    x, w, w2, b = (jnp.asarray(a, jnp.float64) for a in (X, W, W2, B))

    def f(x, w):
        y = activate(conv(x, w) + b)
        y = activate(conv(y, w2, window_strides=(2, 2)))
        return activate(y.mean((1, 2)) @ w2[0, 0] + b)

    accelerated = accelerate(f)
    assert kernels(accelerated, x, w) == {"conv": 2, "dense": 1}
    series = (x / 2, jnp.zeros_like(x), x / 3), (0.1 * w, w / 5, jnp.zeros_like(w))
    same_series(jet.jet(jax.jit(accelerated) if jitted else accelerated, (x, w), series), jet.jet(f, (x, w), series))


def test_taylor_series_of_a_batchnorm_and_of_a_derivative(x64):
    jet = pytest.importorskip("jax.experimental.jet")
    x, w, scale, bias = (jnp.asarray(a, jnp.float64) for a in (X, W, SCALE, BIAS))

    def norm(x):
        return normalise(conv(x, w, padding="VALID"), scale, bias)

    def derivative(f):
        return lambda x: jax.jvp(f, (x,), (x,))[1]

    def layer(x):
        return jnp.tanh(conv(x, w) + bias)

    series = ((x**2, jnp.sin(x)),)
    pairs = ((accelerate(norm), norm), (derivative(accelerate(layer)), derivative(layer)))
    for ours, plain in pairs:
        assert kernels(ours, x)
        same_series(jet.jet(ours, (x,), series), jet.jet(plain, (x,), series))


def same_series(ours: Any, plain: Any) -> None:
    """Equal in float64 but for the order of their sums."""
    assert jax.tree.structure(ours) == jax.tree.structure(plain)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        assert a.dtype == b.dtype == jnp.float64
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-11 * float(jnp.abs(b).max()))


def test_it_keeps_no_tracer():
    def f(x, w, b):
        return block(x, w, b), jnp.zeros(3), 2

    with jax.checking_leaks():
        accelerate(f)(X, W, B)
        accelerate(f).report(X, W, B)
        jax.jit(jax.grad(accelerate(lambda *args: block(*args).sum())))(X, W, B)


@pytest.mark.parametrize("way", ("forward", "gradient", "jit", "scan"))
def test_checkify_sees_a_nan_where_it_is_made(way):
    checkify = pytest.importorskip("jax.experimental.checkify")

    def f(x, w, b):  # nothing behind the call turns a NaN into something that JAX checks
        y = normalise(conv(x, w) + b, SCALE, BIAS)
        return jnp.where(jnp.isnan(y), 0, y)

    def transformed(f):
        if way == "gradient":
            return jax.grad(lambda *args: f(*args).sum(), (0, 1))
        return {"jit": jax.jit(f), "scan": lambda *args: lax.map(lambda _: f(*args), jnp.arange(2))}.get(way, f)

    def error(f, x):
        return checkify.checkify(transformed(f), errors=checkify.float_checks)(x, W, B)[0].get()

    assert error(accelerate(f), X) is None
    assert "nan generated by primitive: jaxconv_conv" in error(accelerate(f), X.at[0, 0, 0, 0].set(jnp.nan))
    assert (
        "nan generated by primitive: jaxconv_matmul"
        in checkify.checkify(jaxconv.dense, errors=checkify.float_checks)(X * jnp.inf, 0 * W[0, 0])[0].get()
    )


def test_ours_may_take_laxs_and_flaxs_place_everywhere(monkeypatch):
    """What falls back to the original must not find itself there."""
    nn = pytest.importorskip("flax.linen", reason="the modules are Flax's")
    linen = importlib.import_module("jaxconv.linen")
    original, numbers = lax.conv_general_dilated, dict(dimension_numbers=("HWNC", "HWIO", "NHWC"))
    want = (
        original(X, W[:, :, :, :4], (1, 1), "SAME", **numbers),
        original(X, W, (1, 1), "VALID", dimension_numbers=NHWC),
    )
    monkeypatch.setattr(lax, "conv_general_dilated", jaxconv.conv_general_dilated)
    monkeypatch.setattr(lax, "dot_general", lambda *args, **kwargs: pytest.fail("looked up when called"))
    jax.clear_caches()
    got = lax.conv_general_dilated(X, W[:, :, :, :4], (1, 1), "SAME", **numbers)  # lax alone has it
    assert helpers.same_bits(got, want[0])
    assert_same(lax.conv_general_dilated(X, W, (1, 1), "VALID", dimension_numbers=NHWC), want[1], terms=36)
    assert_same(jaxconv.conv2d(X, W, padding="VALID", implementation="xla"), want[1], terms=36)
    jaxconv.dense(X, W[0, 0], implementation="xla")
    monkeypatch.undo()
    for name in ("Conv", "ConvTranspose", "Dense", "BatchNorm"):
        monkeypatch.setattr(nn, name, getattr(linen, name))
    for module in (
        nn.Conv(4, (3, 3), conv_general_dilated=original),
        nn.ConvTranspose(4, (3, 3), padding="CIRCULAR"),
        nn.Dense(4, dot_general=lax.dot_general),
        nn.BatchNorm(use_running_average=False, axis=(1, 3)),
    ):
        y, _ = module.init_with_output(KEY, X)
        assert y.shape == (2, 6, 6, 4)


WIDER = [("float16", "float32"), ("bfloat16", "float32"), ("bfloat16", "float64"), ("float32", "float64")]


@pytest.mark.parametrize(("dtype", "wider"), WIDER)
@pytest.mark.parametrize("as_type", [jnp.dtype, lambda name: jnp.dtype(name).type], ids=["dtype", "type"])
def test_a_sum_in_a_wider_type_is_laxs(x64, dtype, wider, as_type):
    """preferred_element_type. A float32 convolution with sums in float64 had sums in float32, and raised where
    something was behind it: NumPy's dtype float64 equals None."""
    x, w, v = (array(i, shape, dtype) for i, shape in enumerate([(2, 5, 5, 3), (3, 3, 3, 4), (3, 6)]))
    how = dict(preferred_element_type=as_type(wider))

    def conv(by, x, w):
        return by(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), **how)

    for f, operands in (
        (functools.partial(conv, lax.conv_general_dilated), (x, w)),
        (lambda x, v: lax.dot_general(x, v, (((3,), (0,)), ((), ())), **how), (x, v)),
    ):
        for g in (f, lambda x, w, f=f: jax.nn.relu(f(x, w) + 1)):
            wanted, *others = (helpers.of_cpu(h, *operands) for h in (g, accelerate(g), jaxconv.freeze(g)))
            for ours in others:
                assert ours.dtype == wanted.dtype == wider
                np.testing.assert_array_equal(ours, wanted)
    of = (functools.partial(conv, by) for by in (jaxconv.conv_general_dilated, lax.conv_general_dilated))
    ours, wanted = (helpers.of_cpu(f, x, w) for f in of)
    assert ours.dtype == wanted.dtype
    np.testing.assert_array_equal(ours, wanted)


NARROW_FLOATS = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn")


@pytest.mark.parametrize("wide", ["float32", "bfloat16"])
@pytest.mark.parametrize("narrow", NARROW_FLOATS)
def test_weights_of_narrow_floats(narrow, wide):
    """Widened, then scaled: a model that keeps its weights in 8 bits or 4."""
    stored = jnp.linspace(0.5, 2.0, 3 * 3 * 4 * 8).reshape(3, 3, 4, 8).astype(narrow)
    norm = jnp.linspace(0.5, 1.0, 8).astype(narrow)

    def f(x):
        w = stored.astype(wide) * jnp.asarray(0.25, wide)
        y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        y = jax.nn.relu(y * norm.astype(wide) + norm.astype(wide))
        mean, var = y.mean((0, 1, 2)), y.var((0, 1, 2))
        y = (y - mean) * lax.rsqrt(var + 1e-5) * norm.astype(wide)
        return y.mean((1, 2)) @ (norm.astype(wide)[:, None] + jnp.zeros((8, 4), wide))

    x = jax.random.normal(jax.random.key(0), (2, 6, 6, 4), wide)
    for one in (f, jax.grad(lambda x: f(x).sum())):
        tolerance = 1e-5 if wide == "float32" else 4e-2
        whole = jaxconv.accelerate(f) if one is f else jax.grad(lambda x: jaxconv.accelerate(f)(x).sum())
        np.testing.assert_allclose(whole(x).astype("float32"), one(x).astype("float32"), tolerance, tolerance)
    x = jnp.exp2(jnp.arange(-1.0, 2.0)).astype(wide)  # float8_e8m0fnu has powers of two alone
    np.testing.assert_array_equal(jaxconv.accelerate(lambda x: x.astype(narrow).astype(wide) * 2)(x), x * 2)

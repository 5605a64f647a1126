"""jax.export with extents that have names instead of numbers: batch and space, forward and gradient."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

import jaxconv
import jaxconv.linen as jn

W = jnp.asarray(helpers.normal(1, (3, 3, 4, 4)), "float32")
B = jnp.asarray(helpers.normal(2, (4,)), "float32")
NUMBERS = ("NHWC", "HWIO", "NHWC")
highest = dict(precision="highest")

FUNCTIONS = {
    "same": lambda x: jaxconv.conv2d(x, W, B, activation="relu", **highest),
    "same_lower_strided": lambda x: jaxconv.conv2d(x, W, stride=2, padding="SAME_LOWER", **highest),
    "same_strided": lambda x: jaxconv.conv2d(x, W, B, stride=(2, 3), activation="silu", **highest),
    "residual": lambda x: jaxconv.conv2d(x, W, B, residual=x, activation="gelu", **highest),
    "valid_dilated": lambda x: jaxconv.conv2d(x, W, padding="VALID", dilation=2, **highest),
    "pads": lambda x: jaxconv.conv2d(x, W, stride=2, padding=((1, 2), (0, -1)), **highest),
    "channels_first": lambda x: jaxconv.conv2d(
        jnp.moveaxis(x, 3, 1), jnp.transpose(W, (3, 2, 0, 1)), layout="NCHW", stride=2, **highest
    ),
    "grouped": lambda x: jaxconv.conv2d(x, W[:, :, :1], groups=4, stride=2, **highest),
    "transposed": lambda x: jaxconv.conv_transpose2d(x, W, B, stride=2, activation="tanh", **highest),
    "transposed_kernel": lambda x: jaxconv.conv_transpose2d(x, W, stride=2, transpose_kernel=True, **highest),
    "general": lambda x: jaxconv.conv_general_dilated(x, W, (2, 2), "SAME", dimension_numbers=NUMBERS, **highest),
    "general_transposed": lambda x: jaxconv.conv_general_dilated(
        x, W, (1, 1), [(2, 1), (1, 2)], lhs_dilation=(2, 2), dimension_numbers=NUMBERS, **highest
    ),
    "conv_batchnorm": lambda x: jaxconv.conv_batchnorm(
        x, W, B, B, 0 * B, 1 + 0 * B, training=True, stride=2, activation="relu", **highest
    )[0],
    "folded_norm": lambda x: jaxconv.conv_batchnorm(
        x, W, B, B, 0 * B, 1 + 0 * B, training=False, stride=2, activation="relu", **highest
    )[0],
    "dense": lambda x: jaxconv.dense(x, W[0, 0], B, activation="relu", **highest),
}


# lax itself exports no gradient where a filter steps or is dilated: its pads would be symbolic.
DIFFERENTIABLE = ("same", "residual", "transposed", "transposed_kernel", "general_transposed", "dense")


def exported(f: Any, *names: str, gradient: bool = False) -> Any:
    shape = jax.ShapeDtypeStruct((*export.symbolic_shape(",".join(names)), 4), "float32")
    made = export.export(jax.jit(f), disabled_checks=jaxconv.export_checks())(shape)
    return export.deserialize(made.serialize(vjp_order=int(gradient)))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_symbolic_space_is_exported(name):
    f = FUNCTIONS[name]
    loaded = exported(f, "b", "h", "t", gradient=name in DIFFERENTIABLE)
    for shape in ((2, 7, 10, 4), (1, 8, 9, 4)):
        x = jnp.asarray(helpers.normal(0, shape), "float32")
        expected, pullback = jax.vjp(f, x)
        np.testing.assert_allclose(loaded.call(x), expected, rtol=1e-5, atol=1e-5)
        if name in DIFFERENTIABLE:
            dy = jnp.asarray(helpers.normal(3, expected.shape), "float32")
            (actual,) = jax.vjp(loaded.call, x)[1](dy)
            np.testing.assert_allclose(actual, pullback(dy)[0], rtol=1e-5, atol=1e-4)


def test_one_dimension_with_a_stride():
    f = functools.partial(jaxconv.conv1d, w=W[0], stride=2, padding="CAUSAL")
    x = jnp.asarray(helpers.normal(0, (2, 11, 4)), "float32")
    np.testing.assert_allclose(exported(f, "b", "t").call(x), f(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("module", ["Conv", "ConvTranspose"])
def test_symbolic_space_in_flax_modules(module):
    x = jnp.asarray(helpers.normal(0, (2, 7, 10, 4)), "float32")
    ours, flax = (getattr(library, module)(4, (3, 3), strides=(2, 2)) for library in (jn, nn))
    variables = flax.init(jax.random.key(0), x)
    with jax.default_matmul_precision("highest"):  # lax would round to TF32 on a GPU
        expected = flax.apply(variables, x)
        loaded = exported(lambda x: ours.apply(variables, x), "b", "h", "t")
    np.testing.assert_allclose(loaded.call(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stride", [1, 2])
def test_symbolic_space_through_accelerate(stride):
    """lax takes symbolic pads (of "SAME" with a stride) by name only, so such a convolution is left."""
    x = jnp.asarray(helpers.normal(0, (2, 7, 10, 4)), "float32")
    model = nn.Sequential([nn.Conv(4, (3, 3), strides=stride), nn.BatchNorm(use_running_average=True), nn.relu])
    variables = model.init(jax.random.key(0), x)
    with jax.default_matmul_precision("highest"):  # XLA rounds the two to TF32 at different places
        loaded = exported(jaxconv.accelerate(functools.partial(model.apply, variables)), "b", "h", "t")
        expected = model.apply(variables, x)
    np.testing.assert_allclose(loaded.call(x), expected, rtol=1e-4, atol=1e-5)


def test_symbolic_extents_are_those_of_lax():
    """Spelled as lax spells them: a program may compare the two."""
    (h,) = export.symbolic_shape("h")
    x = jax.ShapeDtypeStruct((2, h, 9, 4), "float32")
    for padding in ("SAME", "VALID", "SAME_LOWER", ((1, 2), (3, 4))):
        for stride in (1, 2, 3):
            expected = jax.eval_shape(
                lambda x, p=padding, s=stride: lax.conv_general_dilated(x, W, (s, s), p, dimension_numbers=NUMBERS), x
            )
            actual = jax.eval_shape(lambda x, p=padding, s=stride: jaxconv.conv2d(x, W, stride=s, padding=p), x)
            assert actual.shape == expected.shape, (padding, stride)


@pytest.mark.parametrize("f", [jaxconv.conv2d, jaxconv.conv_transpose2d])
def test_native_code_needs_numbers(f):
    with pytest.raises(ValueError, match=r"implementation='native' cannot run: .* symbolic"):
        exported(lambda x: f(x, W, implementation="native"), "b", "h", "t")

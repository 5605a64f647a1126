"""Arguments and comparisons that the tests of jaxconv.linen and jaxconv.nnx share."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tolerance

# Any key will do. Of this kind, because XLA compiles the default kind's bits for seconds, for each shape on a CPU.
KEY = jax.random.key(1, impl="unsafe_rbg")


def mask(*shape: int) -> np.ndarray:
    """Zeros and ones for a kernel of `shape`."""
    return (np.arange(np.prod(shape)) % 3 != 0).astype(np.float32).reshape(shape)


# id: (shape of x, arguments but the numbers of features). Each differs from the first by what it names.
CONV = {
    "plain": ((2, 8, 8, 4), dict(kernel_size=(3, 3))),
    "1d": ((2, 9, 4), dict(kernel_size=3)),
    "1d_strided_list": ((2, 9, 4), dict(kernel_size=[3], strides=[2])),
    "3d": ((2, 4, 5, 6, 4), dict(kernel_size=(3, 1, 2), strides=(1, 2, 1))),
    "4d_has_no_native_path": ((1, 3, 3, 3, 3, 4), dict(kernel_size=(2, 2, 2, 2))),
    "no_bias": ((2, 8, 8, 4), dict(kernel_size=(3, 3), use_bias=False)),
    "strides": ((2, 9, 8, 4), dict(kernel_size=(3, 2), strides=(2, 3))),
    "strides_none": ((2, 8, 8, 4), dict(kernel_size=(3, 3), strides=None, input_dilation=None, kernel_dilation=None)),
    "valid": ((2, 8, 8, 4), dict(kernel_size=(3, 3), padding="VALID")),
    "same_lower": ((2, 8, 8, 4), dict(kernel_size=(2, 2), padding="SAME_LOWER", strides=2)),
    "padding_int": ((2, 8, 8, 4), dict(kernel_size=(3, 3), padding=2)),
    "padding_mixed": ((2, 8, 8, 4), dict(kernel_size=(3, 3), padding=(1, (0, 2)))),
    "circular": ((2, 8, 8, 4), dict(kernel_size=(3, 4), padding="CIRCULAR", strides=2)),
    "reflect": ((2, 8, 8, 4), dict(kernel_size=(3, 4), padding="REFLECT", kernel_dilation=(2, 1))),
    "causal": ((2, 9, 4), dict(kernel_size=(3,), padding="CAUSAL", kernel_dilation=2)),
    "kernel_dilation": ((2, 8, 8, 4), dict(kernel_size=(3, 3), kernel_dilation=(1, 2))),
    "input_dilation": ((2, 5, 5, 4), dict(kernel_size=(3, 3), input_dilation=(2, 3), padding=((1, 1), (2, 0)))),
    "input_dilation_strided": ((2, 5, 5, 4), dict(kernel_size=(3, 3), input_dilation=2, strides=3, padding=0)),
    "groups": ((2, 8, 8, 4), dict(kernel_size=(3, 3), feature_group_count=2)),
    "depthwise": ((2, 8, 8, 4), dict(kernel_size=(3, 3), feature_group_count=4)),
    "mask": ((2, 8, 8, 4), dict(kernel_size=(3, 3), mask=mask(3, 3, 4, 8))),
    "several_batch_dimensions": ((2, 3, 8, 8, 4), dict(kernel_size=(3, 3))),
    "no_batch_dimension": ((8, 8, 4), dict(kernel_size=(3, 3))),
    "bfloat16": ((2, 8, 8, 4), dict(kernel_size=(3, 3), dtype=jnp.bfloat16)),
    "bfloat16_parameters": ((2, 8, 8, 4), dict(kernel_size=(3, 3), param_dtype=jnp.bfloat16)),
    "precision": ((2, 8, 8, 4), dict(kernel_size=(3, 3), precision="highest")),
    "precision_pair": ((2, 8, 8, 4), dict(kernel_size=(3, 3), precision=("highest", "highest"))),
    "initialisers": (
        (2, 8, 8, 4),
        dict(
            kernel_size=(3, 3),
            kernel_init=jax.nn.initializers.orthogonal(),
            bias_init=jax.nn.initializers.normal(1.0),
        ),
    ),
    "empty_batch": ((0, 8, 8, 4), dict(kernel_size=(3, 3))),
    "empty_output": ((2, 2, 8, 4), dict(kernel_size=(3, 3), padding="VALID")),
}

CONV_TRANSPOSE = {
    "plain": ((2, 5, 5, 4), dict(kernel_size=(3, 3))),
    "1d": ((2, 9, 4), dict(kernel_size=3, strides=(2,))),
    "3d": ((2, 3, 4, 3, 4), dict(kernel_size=(3, 1, 2), strides=(1, 2, 2))),
    "strides": ((2, 5, 5, 4), dict(kernel_size=(3, 4), strides=(2, 3))),
    "valid": ((2, 5, 5, 4), dict(kernel_size=(3, 3), strides=(2, 2), padding="VALID")),
    "padding": ((2, 5, 5, 4), dict(kernel_size=(3, 3), strides=(2, 2), padding=(1, (2, 0)))),
    "circular": ((2, 5, 5, 4), dict(kernel_size=(3, 4), strides=(2, 2), padding="CIRCULAR")),
    "circular_transposed": (
        (2, 5, 5, 4),
        dict(kernel_size=(4, 4), strides=(2, 2), padding="CIRCULAR", transpose_kernel=True),
    ),
    "dilation": ((2, 5, 5, 4), dict(kernel_size=(3, 3), kernel_dilation=(2, 1))),
    "transpose_kernel": ((2, 5, 5, 4), dict(kernel_size=(3, 3), strides=(2, 2), transpose_kernel=True)),
    "mask": ((2, 5, 5, 4), dict(kernel_size=(3, 3), mask=mask(3, 3, 4, 8))),
    "no_bias": ((2, 5, 5, 4), dict(kernel_size=(3, 3), use_bias=False)),
    "batch_dimensions": ((2, 3, 5, 5, 4), dict(kernel_size=(3, 3))),
    "no_batch_dimension": ((5, 5, 4), dict(kernel_size=(3, 3))),
    "bfloat16": ((2, 5, 5, 4), dict(kernel_size=(3, 3), dtype=jnp.bfloat16)),
    "preferred_element_type": ((2, 5, 5, 4), dict(kernel_size=(3, 3), preferred_element_type=jnp.float32)),
}

DENSE = {
    "plain": ((6, 4), {}),
    "no_bias": ((6, 4), dict(use_bias=False)),
    "vector": ((4,), {}),
    "batch_dimensions": ((2, 3, 5, 4), {}),
    "bfloat16": ((6, 4), dict(dtype=jnp.bfloat16)),
    "bfloat16_parameters": ((6, 4), dict(param_dtype=jnp.bfloat16)),
    "precision": ((6, 4), dict(precision="highest")),
    "dot_general": ((6, 4), dict(dot_general=lambda *args, **kw: 2 * jax.lax.dot_general(*args, **kw))),
    "initialisers": ((6, 4), dict(bias_init=jax.nn.initializers.normal(1.0))),
    "empty": ((0, 4), {}),
}

# id: (shape of x, dtype of x, arguments of the constructor)
BATCHNORM = {
    "plain": ((4, 5, 5, 4), "float32", {}),
    "matrix": ((16, 4), "float32", {}),
    "axis": ((4, 4, 5, 5), "float32", dict(axis=1)),
    "no_scale": ((4, 5, 5, 4), "float32", dict(use_scale=False)),
    "no_bias": ((4, 5, 5, 4), "float32", dict(use_bias=False)),
    "neither": ((4, 5, 5, 4), "float32", dict(use_scale=False, use_bias=False)),
    "momentum_epsilon": ((4, 5, 5, 4), "float32", dict(momentum=0.9, epsilon=1e-3)),
    "two_pass_variance": ((4, 5, 5, 4), "float32", dict(use_fast_variance=False)),
    "initialisers": (
        (4, 5, 5, 4),
        "float32",
        dict(scale_init=jax.nn.initializers.uniform(2.0), bias_init=jax.nn.initializers.normal(1.0)),
    ),
    "bfloat16": ((4, 5, 5, 4), "bfloat16", dict(dtype=jnp.bfloat16)),
    "bfloat16_x": ((4, 5, 5, 4), "bfloat16", {}),
    "bfloat16_result": ((4, 5, 5, 4), "float32", dict(dtype=jnp.bfloat16)),
    "bfloat16_all": ((4, 5, 5, 4), "bfloat16", dict(param_dtype=jnp.bfloat16)),
    "float16_parameters": ((4, 5, 5, 4), "bfloat16", dict(param_dtype=jnp.float16)),
    "integers": ((4, 5, 5, 4), "int32", {}),
}

# The same; 12 channels.
GROUPNORM = {
    "plain": ((2, 5, 4, 12), "float32", dict(num_groups=4)),
    "matrix": ((6, 12), "float32", dict(num_groups=3)),
    "3d": ((2, 3, 2, 4, 12), "float32", dict(num_groups=2)),
    "group_size": ((2, 5, 4, 12), "float32", dict(num_groups=None, group_size=6)),
    "one_group": ((2, 5, 4, 12), "float32", dict(num_groups=1)),
    "a_group_a_channel": ((2, 5, 4, 12), "float32", dict(num_groups=12)),
    "no_scale": ((2, 5, 4, 12), "float32", dict(num_groups=4, use_scale=False)),
    "no_bias": ((2, 5, 4, 12), "float32", dict(num_groups=4, use_bias=False)),
    "neither": ((2, 5, 4, 12), "float32", dict(num_groups=4, use_scale=False, use_bias=False)),
    "epsilon_two_pass": ((2, 5, 4, 12), "float32", dict(num_groups=4, epsilon=1e-2, use_fast_variance=False)),
    "initialisers": (
        (2, 5, 4, 12),
        "float32",
        dict(num_groups=4, scale_init=jax.nn.initializers.uniform(2.0), bias_init=jax.nn.initializers.normal(1.0)),
    ),
    "bfloat16": ((2, 5, 4, 12), "bfloat16", dict(num_groups=4, dtype=jnp.bfloat16)),
    "bfloat16_x": ((2, 5, 4, 12), "bfloat16", dict(num_groups=4)),
    "bfloat16_result": ((2, 5, 4, 12), "float32", dict(num_groups=4, dtype=jnp.bfloat16)),
    "bfloat16_all": ((2, 5, 4, 12), "bfloat16", dict(num_groups=4, param_dtype=jnp.bfloat16)),
    "axes_of_flax": ((2, 5, 4, 12), "float32", dict(num_groups=4, reduction_axes=(2, 3))),
}

# The same; 12 channels.
LAYERNORM = {
    "plain": ((2, 5, 4, 12), "float32", {}),
    "vector": ((12,), "float32", {}),
    "matrix": ((6, 12), "float32", dict(epsilon=1e-2)),
    "axes": ((2, 5, 12), "float32", dict(reduction_axes=(-1,), feature_axes=2)),
    "no_scale": ((2, 5, 12), "float32", dict(use_scale=False)),
    "no_bias": ((2, 5, 12), "float32", dict(use_bias=False)),
    "neither": ((2, 5, 12), "float32", dict(use_scale=False, use_bias=False)),
    "two_pass": ((2, 5, 12), "float32", dict(use_fast_variance=False)),
    "initialisers": (
        (2, 5, 12),
        "float32",
        dict(scale_init=jax.nn.initializers.uniform(2.0), bias_init=jax.nn.initializers.normal(1.0)),
    ),
    "bfloat16": ((2, 5, 12), "bfloat16", dict(dtype=jnp.bfloat16)),
    "bfloat16_x": ((2, 5, 12), "bfloat16", {}),
    "bfloat16_result": ((2, 5, 12), "float32", dict(dtype=jnp.bfloat16)),
    "bfloat16_all": ((2, 5, 12), "bfloat16", dict(param_dtype=jnp.bfloat16)),
    "integers": ((2, 5, 12), "int32", {}),
    "axes_of_flax": ((2, 5, 4, 12), "float32", dict(reduction_axes=(1, 2, 3))),
}


def array(seed: int, shape: tuple[int, ...], dtype: str = "float32") -> jax.Array:
    values = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray((3 * values if dtype == "int32" else values).astype(jnp.dtype(dtype)))


def randomised(tree: Any) -> Any:
    """Random values in place of each array or its description: initial zeros would hide mistakes."""

    def fresh(path: Any, leaf: Any) -> jax.Array:
        name = jax.tree_util.keystr(path)
        values = np.random.default_rng(len(name) + math.prod(leaf.shape)).standard_normal(leaf.shape)
        values = 0.5 + abs(values) if "var" in name or "scale" in name else 0.3 * values
        return jnp.asarray(values.astype(leaf.dtype))

    return jax.tree_util.tree_map_with_path(fresh, tree)


def assert_same_description(ours: Any, flax: Any) -> None:
    """Equal tree structures, shapes and dtypes."""
    assert jax.tree.structure(ours) == jax.tree.structure(flax)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(flax), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


def assert_same(ours: Any, flax: Any, terms: int, rounded_to: Any = None) -> None:
    """Equal trees of equal numbers, up to the rounding of sums of at most `terms` terms.

    `tolerance.floor` is what an honest implementation may err, and both are one; `rounded_to` is a narrower dtype that
    values on the way are rounded to.
    """
    assert_same_description(ours, flax)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(flax), strict=True):
        if not jnp.issubdtype(a.dtype, jnp.floating):
            assert a.dtype == b.dtype  # float0: the tangent of an integer
            continue
        a64, b64 = np.asarray(a, np.float64), np.asarray(b, np.float64)
        scale = max(1.0, float(np.abs(b64).max(initial=0.0)))
        dtype = jnp.dtype(rounded_to or a.dtype).name
        dtype = a.dtype.name if jnp.finfo(a.dtype).eps > jnp.finfo(dtype).eps else dtype
        tolerance.assert_within(a64, b64, 2 * tolerance.floor(dtype, terms, scale))

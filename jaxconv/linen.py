"""`flax.linen`'s Conv, ConvTranspose, Dense, BatchNorm, GroupNorm, LayerNorm and poolings on jaxconv's kernels.

A model changes by its import alone, and a checkpoint moves both ways: arguments, parameters, collections, initialisers,
dtypes and defaults are Flax's, because the classes are subclasses of Flax's. What they add:

* `activation=`, applied to the result in the same call: a name, ("leaky_relu", slope) or JAX's function, see
  `jaxconv.conv2d`;
* `BatchNorm.__call__(..., residual=)`, an array added before the activation.

Flax's own code runs where jaxconv has no kernel: with a dot_general or conv_general_dilated of the user's, cross-device
batch statistics, several feature axes, CIRCULAR transposed convolutions, and the like.
"""

from __future__ import annotations

import inspect
from typing import Any

import jax.numpy as jnp

try:
    import flax.linen as nn
except ImportError as error:
    raise ImportError("jaxconv.linen needs Flax: pip install 'jaxconv[flax]'") from error
from flax.linen.dtypes import canonicalize_dtype
from flax.linen.module import merge_param

from jaxconv._core.activations import activate
from jaxconv._core.types import Array, ToActivation
from jaxconv._flax import layers

__all__ = ["BatchNorm", "Conv", "ConvTranspose", "Dense", "GroupNorm", "LayerNorm", "avg_pool", "max_pool"]

avg_pool = layers.avg_pool
max_pool = layers.max_pool


# Held, because a program may put ours in their place (nn.Conv = jaxconv.linen.Conv). One a line, for type checkers.
_Conv = nn.Conv
_ConvTranspose = nn.ConvTranspose
_Dense = nn.Dense
_BatchNorm = nn.BatchNorm
_GroupNorm = nn.GroupNorm
_LayerNorm = nn.LayerNorm


def _flax_call(base: type[nn.Module], module: nn.Module, *args: Any, **kwargs: Any) -> Array:
    """`base.__call__`, as part of module's own call: captured, tabulated and intercepted once."""
    return inspect.unwrap(base.__call__)(module, *args, **kwargs)


def _promote(module: Any) -> layers.Promote:
    return lambda x, kernel, bias: module.promote_dtype(x, kernel, bias, dtype=module.dtype)


class Conv(_Conv):
    """`flax.linen.Conv` with an `activation`: y = f(conv(x, kernel) + bias).

    Example::

        x = jnp.ones((8, 32, 32, 16))
        layer = jaxconv.linen.Conv(32, (3, 3), activation="relu")
        y, variables = layer.init_with_output(jax.random.key(0), x)

    Attributes:
      features: number of filters.
      kernel_size: shape of the window, an integer per spatial dimension; a single integer means one spatial dimension.
      strides: steps of the window, an integer or one per spatial dimension (default: 1).
      padding: "SAME", "VALID", "CIRCULAR" (periodic), "REFLECT", "CAUSAL" (one spatial dimension), an integer, or per
        dimension an integer or a (low, high) pair.
      input_dilation: by how much the inputs are spread, an integer or one per spatial dimension (default: 1).
      kernel_dilation: by how much the kernel's taps are spread, an integer or one per spatial dimension (default: 1).
      feature_group_count: the number of groups of channels, which are convolved separately (default: 1).
      use_bias: whether a bias is added (default: True).
      mask: multiplied with the kernel, an array of its shape.
      dtype: of the computation (default: what inputs and parameters promote to).
      param_dtype: of the parameters (default: float32).
      precision: see `jax.lax.Precision`.
      kernel_init, bias_init: initialisers of the parameters.
      promote_dtype: a function that promotes (inputs, kernel, bias) to the computation's dtype.
      conv_general_dilated, conv_general_dilated_cls: a convolution of the user's instead of jaxconv's.
      activation: applied to the result, in the same call: None, a name or ("leaky_relu", slope) as for
        `jaxconv.conv2d`, or JAX's function of that name (jax.nn.relu, ...).
    """

    activation: ToActivation = None

    @nn.compact
    def __call__(self, inputs: Array) -> Array:  # (*batch, *spatial, C) -> (*batch, *spatial, features)
        """Convolves the inputs and applies the activation."""
        if self.conv_general_dilated is not None or self.conv_general_dilated_cls is not None:
            return activate(layers.activation_of(self), _flax_call(_Conv, self, inputs))
        in_features = jnp.shape(inputs)[-1]
        assert in_features % self.feature_group_count == 0  # as in Flax
        kernel_shape = (*layers.sizes(self.kernel_size), in_features // self.feature_group_count, self.features)
        layers.check_mask(self, kernel_shape)
        kernel = self.param("kernel", self.kernel_init, kernel_shape, self.param_dtype)
        bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype) if self.use_bias else None
        return layers.conv(self, inputs, kernel, bias, _promote(self))


class ConvTranspose(_ConvTranspose):
    """`flax.linen.ConvTranspose` with an `activation`: y = f(conv_transpose(x, kernel) + bias).

    Example::

        x = jnp.ones((8, 32, 32, 16))
        layer = jaxconv.linen.ConvTranspose(8, (2, 2), strides=(2, 2), activation="relu")
        y, variables = layer.init_with_output(jax.random.key(0), x)

    Attributes:
      features: number of filters.
      kernel_size: shape of the window, an integer per spatial dimension; a single integer means one spatial dimension.
      strides: by how much the inputs are spread, one integer per spatial dimension (default: 1).
      padding: "SAME", "VALID", "CIRCULAR" (periodic), an integer, or per dimension an integer or a (low, high) pair,
        which pad the spread inputs.
      kernel_dilation: spreads the kernel's taps, one integer per spatial dimension (default: 1).
      use_bias: whether a bias is added (default: True).
      mask: multiplied with the kernel, an array of its shape.
      dtype: of the computation (default: what inputs and parameters promote to).
      param_dtype: of the parameters (default: float32).
      precision: see `jax.lax.Precision`.
      kernel_init, bias_init: initialisers of the parameters.
      transpose_kernel: the kernel is that of the convolution that this one transposes: (window..., features, C), not
        reversed.
      promote_dtype: a function that promotes (inputs, kernel, bias) to the computation's dtype.
      preferred_element_type: of the sums and the result; with anything but None Flax's own code runs.
      activation: applied to the result, in the same call: None, a name or ("leaky_relu", slope) as for
        `jaxconv.conv2d`, or JAX's function of that name (jax.nn.relu, ...).
    """

    activation: ToActivation = None

    @nn.compact
    def __call__(self, inputs: Array) -> Array:  # (*batch, *spatial, C) -> (*batch, *spatial, features)
        """Applies the transposed convolution and the activation."""
        if not layers.native_conv_transpose(self):
            return activate(layers.activation_of(self), _flax_call(_ConvTranspose, self, inputs))
        in_features = jnp.shape(inputs)[-1]
        channels = (self.features, in_features) if self.transpose_kernel else (in_features, self.features)
        kernel_shape = (*layers.sizes(self.kernel_size), *channels)
        layers.check_mask(self, kernel_shape)
        kernel = self.param("kernel", self.kernel_init, kernel_shape, self.param_dtype)
        bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype) if self.use_bias else None
        return layers.conv_transpose(self, inputs, kernel, bias, _promote(self))


class Dense(_Dense):
    """`flax.linen.Dense` with an `activation`: y = f(x @ kernel + bias).

    Example::

        x = jnp.ones((8, 32, 32, 16))
        layer = jaxconv.linen.Dense(10, activation="gelu")
        y, variables = layer.init_with_output(jax.random.key(0), x)

    Attributes:
      features: number of outputs.
      use_bias: whether a bias is added (default: True).
      dtype: of the computation (default: what inputs and parameters promote to).
      param_dtype: of the parameters (default: float32).
      precision: see `jax.lax.Precision`.
      kernel_init, bias_init: initialisers of the parameters.
      promote_dtype: a function that promotes (inputs, kernel, bias) to the computation's dtype.
      dot_general, dot_general_cls: a product of the user's instead of jaxconv's.
      activation: applied to the result, in the same call: None, a name or ("leaky_relu", slope) as for
        `jaxconv.conv2d`, or JAX's function of that name (jax.nn.relu, ...).
    """

    activation: ToActivation = None

    @nn.compact
    def __call__(self, inputs: Array) -> Array:  # (..., K) -> (..., features)
        """Multiplies by the kernel, adds the bias and applies the activation."""
        if self.dot_general is not None or self.dot_general_cls is not None:
            return activate(layers.activation_of(self), _flax_call(_Dense, self, inputs))
        kernel_shape = (jnp.shape(inputs)[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, kernel_shape, self.param_dtype)
        bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype) if self.use_bias else None
        return layers.dense(self, inputs, kernel, bias, _promote(self))


class BatchNorm(_BatchNorm):
    """`flax.linen.BatchNorm` with an `activation`, and a `residual` in the call.

    y = f(normalised x * scale + bias + residual)

    Example::

        x = jnp.ones((8, 32, 32, 16))
        layer = jaxconv.linen.BatchNorm(use_running_average=False, activation="relu")
        y, variables = layer.init_with_output(jax.random.key(0), x, residual=x)

    Attributes:
      use_running_average: normalise with the running statistics instead of the batch's; here or in the call.
      axis: the feature axis (default: -1). With several, Flax's own code runs.
      momentum: the weight of the old running statistics (default: 0.99).
      epsilon: added to the variance (default: 1e-5).
      dtype: of the result (default: what inputs and parameters promote to).
      param_dtype: of the parameters (default: float32).
      use_bias, use_scale: whether a bias is added, and the normalised inputs multiplied by a scale (default: True).
      bias_init, scale_init: their initialisers.
      axis_name, axis_index_groups: the axis of pmap or shard_map over whose devices statistics are combined, and the
        groups within it. With these Flax's own code runs in training.
      use_fast_variance: has no effect on jaxconv's kernels, whose variance never suffers from cancellation.
      force_float32_reductions: statistics in float32 for 16-bit inputs (default: True); with False Flax's own code
        runs.
      activation: applied to the result, in the same call: None, a name or ("leaky_relu", slope) as for
        `jaxconv.conv2d`, or JAX's function of that name (jax.nn.relu, ...).
    """

    activation: ToActivation = None

    @nn.compact
    def __call__(
        self,
        x: Array,
        use_running_average: bool | None = None,
        *,
        mask: Array | None = None,
        residual: Array | None = None,  # like x
    ) -> Array:
        """activation(normalised x + residual). Other arguments and the update of the statistics are Flax's."""
        use_average = merge_param("use_running_average", self.use_running_average, use_running_average)
        training = not use_average
        layers.check_residual(self, x, residual)
        axis_name = None if self.is_initializing() else self.axis_name
        x = jnp.asarray(x)
        if not (self.force_float32_reductions and layers.native_batchnorm(self, x, training, axis_name, mask)):
            y = _flax_call(_BatchNorm, self, x, use_running_average, mask=mask)
            return layers.after_batchnorm(self, y, residual)
        shape = [x.shape[self.axis]]
        mean = self.variable("batch_stats", "mean", lambda s: jnp.zeros(s, jnp.float32), shape)
        var = self.variable("batch_stats", "var", lambda s: jnp.ones(s, jnp.float32), shape)
        scale = self.param("scale", self.scale_init, shape, self.param_dtype) if self.use_scale else None
        bias = self.param("bias", self.bias_init, shape, self.param_dtype) if self.use_bias else None
        given = [a for a in (x, scale, bias) if a is not None]
        dtype = canonicalize_dtype(*given, dtype=self.dtype)
        y, new_mean, new_var = layers.batchnorm(
            self, x, scale, bias, mean.value, var.value, residual, training=training, dtype=dtype, mask=mask
        )
        if training and not self.is_initializing():
            mean.value, var.value = new_mean, new_var
        return y


class GroupNorm(_GroupNorm):
    """`flax.linen.GroupNorm` with an `activation`: y = f(normalised x * scale + bias).

    Example::

        x = jnp.ones((8, 32, 32, 16))
        layer = jaxconv.linen.GroupNorm(num_groups=4, activation="silu")
        y, variables = layer.init_with_output(jax.random.key(0), x)

    Attributes:
      num_groups: into how many groups the channels are cut (default: 32).
      group_size: channels of a group; num_groups must then be None.
      epsilon: added to the variance (default: 1e-6).
      dtype: of the result (default: what inputs and parameters promote to).
      param_dtype: of the parameters (default: float32).
      use_bias, use_scale: whether a bias is added, and the normalised inputs multiplied by a scale (default: True).
      bias_init, scale_init: their initialisers.
      reduction_axes: the axes over which statistics are taken (default: all but the first). With anything but None
        Flax's own code runs.
      axis_name, axis_index_groups: the axis of pmap or shard_map over whose devices statistics are combined, and the
        groups within it. With these Flax's own code runs.
      use_fast_variance: has no effect on jaxconv's kernels, whose variance never suffers from cancellation.
      force_float32_reductions: statistics in float32 for 16-bit inputs (default: True); with False Flax's own code
        runs.
      activation: applied to the result, in the same call: None, a name or ("leaky_relu", slope) as for
        `jaxconv.conv2d`, or JAX's function of that name (jax.nn.relu, ...).
    """

    activation: ToActivation = None

    @nn.compact
    def __call__(self, x: Array, *, mask: Array | None = None) -> Array:  # (N, ..., C) -> (N, ..., C)
        """activation(normalised x). With a mask Flax's own code runs."""
        x = jnp.asarray(x)
        groups = layers.groups_of(self, x.shape[-1]) if x.ndim else None
        if groups is None or not (self.force_float32_reductions and layers.native_groupnorm(self, x, mask)):
            return activate(layers.activation_of(self), _flax_call(_GroupNorm, self, x, mask=mask))
        shape = [x.shape[-1]]
        scale = self.param("scale", self.scale_init, shape, self.param_dtype) if self.use_scale else None
        bias = self.param("bias", self.bias_init, shape, self.param_dtype) if self.use_bias else None
        dtype = canonicalize_dtype(*(a for a in (x, scale, bias) if a is not None), dtype=self.dtype)
        return layers.groupnorm(self, x, scale, bias, groups=groups, dtype=dtype)


class LayerNorm(_LayerNorm):
    """`flax.linen.LayerNorm` with an `activation`: y = f(normalised x * scale + bias).

    Example::

        x = jnp.ones((8, 32, 32, 16))
        layer = jaxconv.linen.LayerNorm()
        y, variables = layer.init_with_output(jax.random.key(0), x)

    Attributes:
      epsilon: added to the variance (default: 1e-6).
      dtype: of the result (default: what inputs and parameters promote to).
      param_dtype: of the parameters (default: float32).
      use_bias, use_scale: whether a bias is added, and the normalised inputs multiplied by a scale (default: True).
      bias_init, scale_init: their initialisers.
      reduction_axes, feature_axes: the axes over which statistics are taken, and those of the parameters (default: -1,
        the last). With any others Flax's own code runs.
      axis_name, axis_index_groups: the axis of pmap or shard_map over whose devices statistics are combined, and the
        groups within it. With these Flax's own code runs.
      use_fast_variance: has no effect on jaxconv's kernels, whose variance never suffers from cancellation.
      force_float32_reductions: statistics in float32 for 16-bit inputs (default: True); with False Flax's own code
        runs.
      activation: applied to the result: None, a name or ("leaky_relu", slope) as for `jaxconv.conv2d`, or JAX's
        function of that name (jax.nn.relu, ...).
    """

    activation: ToActivation = None

    @nn.compact
    def __call__(self, x: Array, *, mask: Array | None = None) -> Array:  # (..., C) -> (..., C)
        """activation(normalised x). With a mask Flax's own code runs."""
        if not (self.force_float32_reductions and layers.native_layernorm(self, jnp.asarray(x), mask)):
            return activate(layers.activation_of(self), _flax_call(_LayerNorm, self, x, mask=mask))
        x = jnp.asarray(x)
        shape = [x.shape[-1]]
        scale = self.param("scale", self.scale_init, shape, self.param_dtype) if self.use_scale else None
        bias = self.param("bias", self.bias_init, shape, self.param_dtype) if self.use_bias else None
        dtype = canonicalize_dtype(*(a for a in (x, scale, bias) if a is not None), dtype=self.dtype)
        return layers.layernorm(self, x, scale, bias, dtype=dtype)

"""`flax.nnx`'s Conv, ConvTranspose, Linear, BatchNorm, GroupNorm, LayerNorm and poolings on jaxconv's kernels.

A model changes by its import alone, and a checkpoint moves both ways: arguments, variables, initialisers, dtypes,
defaults and the handling of state are Flax's, because the classes are subclasses of Flax's. What they add:

* `activation=`, applied to the result in the same call: a name, ("leaky_relu", slope) or JAX's function, see
  `jaxconv.conv2d`;
* `BatchNorm.__call__(..., residual=)`, an array added before the activation.

Flax's own code runs where jaxconv has no kernel: with a dot_general or conv_general_dilated of the user's, cross-device
batch statistics, several feature axes, CIRCULAR transposed convolutions, and the like.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Required, TypedDict, Unpack

import jax.numpy as jnp
from jax import lax

# Held, because a program may put ours in their place.
from jax.lax import conv_general_dilated, dot_general

try:
    from flax import nnx
except ImportError as error:
    raise ImportError("jaxconv.nnx needs Flax: pip install 'jaxconv[flax]'") from error
from flax.nnx.nn.dtypes import canonicalize_dtype

from jaxconv._core import activations
from jaxconv._core.activations import activate
from jaxconv._core.types import Array, ToActivation
from jaxconv._flax import layers

__all__ = ["BatchNorm", "Conv", "ConvTranspose", "GroupNorm", "LayerNorm", "Linear", "avg_pool", "max_pool"]

avg_pool = layers.avg_pool
max_pool = layers.max_pool


# ----------------------------------------------------------------------------------------------------------------------
# The constructors' keyword arguments: Flax's. Only what is given goes on to Flax, whose own defaults hold.

_Dtype = Any  # what jnp.dtype takes
_Sizes = int | Sequence[int]
_Padding = str | int | Sequence[int | tuple[int, int]]
_Initializer = Callable[..., Any]


class _Options(TypedDict, total=False):
    rngs: Required[nnx.Rngs]
    use_bias: bool
    dtype: _Dtype | None
    param_dtype: _Dtype
    bias_init: _Initializer
    promote_dtype: Callable[..., Any]
    bias_metadata: Mapping[str, Any]


class _LinearOptions(_Options, total=False):
    precision: Any  # jax.lax.PrecisionLike
    kernel_init: _Initializer
    preferred_element_type: _Dtype | None
    kernel_metadata: Mapping[str, Any]


class _DotOptions(_LinearOptions, total=False):
    dot_general: Callable[..., Any]


class _ConvTransposeOptions(_LinearOptions, total=False):
    padding: _Padding
    kernel_dilation: _Sizes | None
    mask: Array | None
    transpose_kernel: bool


class _ConvOptions(_LinearOptions, total=False):
    padding: _Padding
    input_dilation: _Sizes | None
    kernel_dilation: _Sizes | None
    feature_group_count: int
    mask: Array | None
    conv_general_dilated: Callable[..., Any]


class _BatchNormOptions(_Options, total=False):
    use_running_average: bool | None
    axis: int
    momentum: float
    epsilon: float
    use_scale: bool
    scale_init: _Initializer
    axis_name: str | None
    axis_index_groups: Any
    use_fast_variance: bool
    scale_metadata: Mapping[str, Any]


class _GroupNormOptions(_Options, total=False):
    epsilon: float
    use_scale: bool
    scale_init: _Initializer
    reduction_axes: _Sizes | None
    axis_name: str | None
    axis_index_groups: Any
    use_fast_variance: bool
    scale_metadata: Mapping[str, Any]


class _LayerNormOptions(_Options, total=False):
    epsilon: float
    use_scale: bool
    scale_init: _Initializer
    reduction_axes: _Sizes
    feature_axes: _Sizes
    axis_name: str | None
    axis_index_groups: Any
    use_fast_variance: bool
    scale_metadata: Mapping[str, Any]


def _signature_of_flax(module: type[nnx.Module]) -> None:
    """Makes help() and editors that run code show the constructor's arguments by name, with Flax's defaults."""
    flax = inspect.signature(module.__base__.__init__)  # type: ignore[union-attr, misc]
    ours = inspect.signature(module.__init__).parameters["activation"]
    named = [p for p in flax.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    module.__init__.__signature__ = flax.replace(parameters=[*named, ours])  # type: ignore[attr-defined]


# ----------------------------------------------------------------------------------------------------------------------


def _promote(module: Any) -> layers.Promote:
    return lambda x, kernel, bias: module.promote_dtype((x, kernel, bias), dtype=module.dtype)


def _value(variable: nnx.Variable | None) -> Array | None:
    return None if variable is None else variable[...]


class Conv(nnx.Conv):
    """`flax.nnx.Conv` with an `activation`: y = f(conv(x, kernel) + bias).

    Example::

        x = jnp.ones((8, 32, 32, 16))
        layer = jaxconv.nnx.Conv(16, 32, (3, 3), activation="relu", rngs=nnx.Rngs(0))
        y = layer(x)

    Args:
      in_features: number of input channels.
      out_features: number of filters.
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
      conv_general_dilated: a convolution of the user's instead of jaxconv's.
      preferred_element_type: of the sums and the result; with anything but None Flax's own code runs.
      rngs: random number generators.
      kernel_metadata, bias_metadata: of the variables.
      activation: applied to the result, in the same call: None, a name or ("leaky_relu", slope) as for
        `jaxconv.conv2d`, or JAX's function of that name (jax.nn.relu, ...).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: _Sizes,
        strides: _Sizes | None = 1,
        *,
        activation: ToActivation = None,
        **options: Unpack[_ConvOptions],
    ):
        super().__init__(in_features, out_features, kernel_size, strides, **options)
        self.activation = activations.parse("Conv", activation)

    def __call__(self, inputs: Array, out_sharding: Any = None) -> Array:
        """Convolves the inputs (*batch, *spatial, in_features) and applies the activation."""
        injected = self.conv_general_dilated is not conv_general_dilated
        if injected or self.preferred_element_type is not None or out_sharding is not None:
            return activate(self.activation, super().__call__(inputs, out_sharding))
        assert self.in_features % self.feature_group_count == 0  # as in Flax
        layers.check_mask(self, self.kernel_shape)
        return layers.conv(self, inputs, self.kernel[...], _value(self.bias), _promote(self))


class ConvTranspose(nnx.ConvTranspose):
    """`flax.nnx.ConvTranspose` with an `activation`: y = f(conv_transpose(x, kernel) + bias).

    Example::

        x = jnp.ones((8, 32, 32, 16))
        layer = jaxconv.nnx.ConvTranspose(16, 8, (2, 2), strides=2, activation="relu", rngs=nnx.Rngs(0))
        y = layer(x)

    Args:
      in_features: number of input channels.
      out_features: number of filters.
      kernel_size: shape of the window, an integer per spatial dimension; a single integer means one spatial dimension.
      strides: by how much the inputs are spread, an integer or one per spatial dimension (default: 1).
      padding: "SAME", "VALID", "CIRCULAR" (periodic), an integer, or per dimension an integer or a (low, high) pair,
        which pad the spread inputs.
      kernel_dilation: spreads the kernel's taps, an integer or one per spatial dimension (default: 1).
      use_bias: whether a bias is added (default: True).
      mask: multiplied with the kernel, an array of its shape.
      dtype: of the computation (default: what inputs and parameters promote to).
      param_dtype: of the parameters (default: float32).
      precision: see `jax.lax.Precision`.
      kernel_init, bias_init: initialisers of the parameters.
      transpose_kernel: the kernel is that of the convolution that this one transposes: (window..., out_features,
        in_features), not reversed.
      promote_dtype: a function that promotes (inputs, kernel, bias) to the computation's dtype.
      preferred_element_type: of the sums and the result; with anything but None Flax's own code runs.
      rngs: random number generators.
      kernel_metadata, bias_metadata: of the variables.
      activation: applied to the result, in the same call: None, a name or ("leaky_relu", slope) as for
        `jaxconv.conv2d`, or JAX's function of that name (jax.nn.relu, ...).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: _Sizes,
        strides: _Sizes | None = None,
        *,
        activation: ToActivation = None,
        **options: Unpack[_ConvTransposeOptions],
    ):
        super().__init__(in_features, out_features, kernel_size, strides, **options)
        self.activation = activations.parse("ConvTranspose", activation)

    def __call__(self, inputs: Array) -> Array:
        """Applies the transposed convolution to the inputs (*batch, *spatial, in_features), and the activation."""
        if not layers.native_conv_transpose(self):
            return activate(self.activation, super().__call__(inputs))
        layers.check_mask(self, self.kernel_shape)
        return layers.conv_transpose(self, inputs, self.kernel[...], _value(self.bias), _promote(self))


class Linear(nnx.Linear):
    """`flax.nnx.Linear` with an `activation`: y = f(x @ kernel + bias).

    Example::

        x = jnp.ones((8, 32, 32, 16))
        layer = jaxconv.nnx.Linear(16, 10, activation="gelu", rngs=nnx.Rngs(0))
        y = layer(x)

    Args:
      in_features: number of inputs.
      out_features: number of outputs.
      use_bias: whether a bias is added (default: True).
      dtype: of the computation (default: what inputs and parameters promote to).
      param_dtype: of the parameters (default: float32).
      precision: see `jax.lax.Precision`.
      kernel_init, bias_init: initialisers of the parameters.
      promote_dtype: a function that promotes (inputs, kernel, bias) to the computation's dtype.
      dot_general: a product of the user's instead of jaxconv's.
      preferred_element_type: of the sums and the result; with anything but None Flax's own code runs.
      rngs: random number generators.
      kernel_metadata, bias_metadata: of the variables.
      activation: applied to the result, in the same call: None, a name or ("leaky_relu", slope) as for
        `jaxconv.conv2d`, or JAX's function of that name (jax.nn.relu, ...).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        activation: ToActivation = None,
        **options: Unpack[_DotOptions],
    ):
        super().__init__(in_features, out_features, **options)
        self.activation = activations.parse("Linear", activation)

    def __call__(self, inputs: Array, out_sharding: Any = None) -> Array:
        """Multiplies the inputs (..., in_features) by the kernel, adds the bias and applies the activation."""
        injected = self.dot_general is not dot_general
        if injected or self.preferred_element_type is not None or out_sharding is not None:
            return activate(self.activation, super().__call__(inputs, out_sharding))
        return layers.dense(self, inputs, self.kernel[...], _value(self.bias), _promote(self))


class BatchNorm(nnx.BatchNorm):
    """`flax.nnx.BatchNorm` with an `activation`, and a `residual` in the call.

    y = f(normalised x * scale + bias + residual)

    Example::

        x = jnp.ones((8, 32, 32, 16))
        layer = jaxconv.nnx.BatchNorm(16, activation="relu", rngs=nnx.Rngs(0))
        y = layer(x, residual=x)

    Args:
      num_features: number of channels.
      use_running_average: normalise with the running statistics instead of the batch's (default: False); here or in
        the call.
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
      promote_dtype: a function that promotes (inputs, mean, var, scale, bias) to the computation's dtype.
      rngs: random number generators.
      bias_metadata, scale_metadata: of the variables.
      activation: applied to the result, in the same call: None, a name or ("leaky_relu", slope) as for
        `jaxconv.conv2d`, or JAX's function of that name (jax.nn.relu, ...).
    """

    def __init__(
        self,
        num_features: int,
        *,
        activation: ToActivation = None,
        **options: Unpack[_BatchNormOptions],
    ):
        super().__init__(num_features, **options)
        self.activation = activations.parse("BatchNorm", activation)

    def __call__(
        self,
        x: Array,
        use_running_average: bool | None = None,
        *,
        mask: Array | None = None,
        residual: Array | None = None,  # like x
    ) -> Array:
        """activation(normalised x + residual). Other arguments and the update of the statistics are Flax's."""
        use_average = self.use_running_average if use_running_average is None else use_running_average
        training = not use_average
        layers.check_residual(self, x, residual)
        native = layers.native_batchnorm(self, jnp.asarray(x), training, self.axis_name, mask)
        # What is wrong is Flax's to say.
        if use_average is None or not native or jnp.shape(x)[self.axis] != self.num_features:
            return layers.after_batchnorm(self, super().__call__(x, use_running_average, mask=mask), residual)
        x, mean, var, scale, bias = self.promote_dtype(
            (x, self.mean[...], self.var[...], _value(self.scale), _value(self.bias)), dtype=self.dtype
        )
        dtype = canonicalize_dtype(*(a for a in (x, scale, bias) if a is not None), dtype=self.dtype)
        if not training:
            y, _, _ = layers.batchnorm(self, x, scale, bias, mean, var, residual, training=False, dtype=dtype)
            return y
        y, mean, var = layers.batchnorm(
            self, x, scale, bias, self.mean[...], self.var[...], residual, training=True, dtype=dtype, mask=mask
        )
        if self.mean._can_update or self.var._can_update:  # variables that are references, as in Flax
            mean, var = lax.stop_gradient((mean, var))
        self.mean[...], self.var[...] = mean, var
        return y


class GroupNorm(nnx.GroupNorm):
    """`flax.nnx.GroupNorm` with an `activation`: y = f(normalised x * scale + bias).

    Example::

        x = jnp.ones((8, 32, 32, 16))
        layer = jaxconv.nnx.GroupNorm(16, num_groups=4, activation="silu", rngs=nnx.Rngs(0))
        y = layer(x)

    Args:
      num_features: number of channels.
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
      promote_dtype: a function that promotes (inputs, scale, bias) to the computation's dtype.
      rngs: random number generators.
      bias_metadata, scale_metadata: of the variables.
      activation: applied to the result, in the same call: None, a name or ("leaky_relu", slope) as for
        `jaxconv.conv2d`, or JAX's function of that name (jax.nn.relu, ...).
    """

    def __init__(
        self,
        num_features: int,
        num_groups: int | None = 32,
        group_size: int | None = None,
        *,
        activation: ToActivation = None,
        **options: Unpack[_GroupNormOptions],
    ):
        super().__init__(num_features, num_groups, group_size, **options)
        self.activation = activations.parse("GroupNorm", activation)

    def __call__(self, x: Array, *, mask: Array | None = None) -> Array:  # (N, ..., num_features), likewise
        """activation(normalised x). With a mask Flax's own code runs."""
        channels = self.num_groups * self.group_size
        # What is wrong is Flax's to say.
        if not layers.native_groupnorm(self, jnp.asarray(x), mask) or jnp.shape(x)[-1] != channels:
            return activate(self.activation, super().__call__(x, mask=mask))
        x, scale, bias = self.promote_dtype((x, _value(self.scale), _value(self.bias)), dtype=self.dtype)
        dtype = canonicalize_dtype(*(a for a in (x, scale, bias) if a is not None), dtype=self.dtype)
        return layers.groupnorm(self, x, scale, bias, groups=self.num_groups, dtype=dtype)


class LayerNorm(nnx.LayerNorm):
    """`flax.nnx.LayerNorm` with an `activation`: y = f(normalised x * scale + bias).

    Example::

        x = jnp.ones((8, 32, 32, 16))
        layer = jaxconv.nnx.LayerNorm(16, rngs=nnx.Rngs(0))
        y = layer(x)

    Args:
      num_features: number of channels.
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
      promote_dtype: a function that promotes (inputs, scale, bias) to the computation's dtype.
      rngs: random number generators.
      bias_metadata, scale_metadata: of the variables.
      activation: applied to the result: None, a name or ("leaky_relu", slope) as for `jaxconv.conv2d`, or JAX's
        function of that name (jax.nn.relu, ...).
    """

    def __init__(self, num_features: int, *, activation: ToActivation = None, **options: Unpack[_LayerNormOptions]):
        super().__init__(num_features, **options)
        self.activation = activations.parse("LayerNorm", activation)

    def __call__(self, x: Array, *, mask: Array | None = None) -> Array:  # (..., num_features), likewise
        """activation(normalised x). With a mask Flax's own code runs."""
        # What is wrong is Flax's to say.
        if not layers.native_layernorm(self, jnp.asarray(x), mask) or jnp.shape(x)[-1] != self.num_features:
            return activate(self.activation, super().__call__(x, mask=mask))
        x, scale, bias = self.promote_dtype((x, _value(self.scale), _value(self.bias)), dtype=self.dtype)
        dtype = canonicalize_dtype(*(a for a in (x, scale, bias) if a is not None), dtype=self.dtype)
        return layers.layernorm(self, x, scale, bias, dtype=dtype)


for _module in (Conv, ConvTranspose, Linear, BatchNorm, GroupNorm, LayerNorm):
    _signature_of_flax(_module)

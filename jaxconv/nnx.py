"""`flax.nnx`'s Conv, ConvTranspose, Linear and BatchNorm on jaxconv's kernels.

A model changes by its import alone, and a checkpoint moves both ways: arguments, variables, initialisers, dtypes,
defaults and the handling of state are Flax's, because the classes are subclasses of Flax's. What they add:

* `activation=`, applied to the result in the same call: a name or ("leaky_relu", slope), see `jaxconv.conv2d`;
* `BatchNorm.__call__(..., residual=)`, an array added before the activation.

What jaxconv has no kernel for (a dot_general or conv_general_dilated of the user's, cross-device batch statistics,
several feature axes, CIRCULAR transposed convolutions, ...) is Flax's own computation.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Held, because a program may put ours in their place.
from jax.lax import conv_general_dilated, dot_general

try:
    from flax import nnx
except ImportError as error:
    raise ImportError("jaxconv.nnx needs Flax: pip install 'jaxconv[flax]'") from error
from flax.nnx.nn.dtypes import canonicalize_dtype

from jaxconv import _activation, _flax
from jaxconv._activation import activate

Array = jax.Array

__all__ = ["BatchNorm", "Conv", "ConvTranspose", "Linear"]


def _promote(module: Any) -> _flax.Promote:
    return lambda x, kernel, bias: module.promote_dtype((x, kernel, bias), dtype=module.dtype)


def _value(variable: nnx.Variable | None) -> Array | None:
    return None if variable is None else variable[...]


class Conv(nnx.Conv):
    """`flax.nnx.Conv` with an `activation`. See `jaxconv.conv2d` for the activations' names."""

    def __init__(self, *args: Any, activation: Any = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.activation = _activation.parse("Conv", activation)

    def __call__(self, inputs: Array, out_sharding: Any = None) -> Array:
        """Convolves the inputs (*batch, *spatial, in_features) and applies the activation."""
        injected = self.conv_general_dilated is not conv_general_dilated
        if injected or self.preferred_element_type is not None or out_sharding is not None:
            return activate(self.activation, super().__call__(inputs, out_sharding))
        assert self.in_features % self.feature_group_count == 0  # as in Flax
        _flax.check_mask(self, self.kernel_shape)
        return _flax.conv(self, inputs, self.kernel[...], _value(self.bias), _promote(self))


class ConvTranspose(nnx.ConvTranspose):
    """`flax.nnx.ConvTranspose` with an `activation`. See `jaxconv.conv2d` for the activations' names."""

    def __init__(self, *args: Any, activation: Any = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.activation = _activation.parse("ConvTranspose", activation)

    def __call__(self, inputs: Array) -> Array:
        """Applies the transposed convolution to the inputs (*batch, *spatial, in_features), and the activation."""
        if not _flax.native_conv_transpose(self):
            return activate(self.activation, super().__call__(inputs))
        _flax.check_mask(self, self.kernel_shape)
        return _flax.conv_transpose(self, inputs, self.kernel[...], _value(self.bias), _promote(self))


class Linear(nnx.Linear):
    """`flax.nnx.Linear` with an `activation`. See `jaxconv.conv2d` for the activations' names."""

    def __init__(self, *args: Any, activation: Any = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.activation = _activation.parse("Linear", activation)

    def __call__(self, inputs: Array, out_sharding: Any = None) -> Array:
        """Multiplies the inputs (..., in_features) by the kernel, adds the bias and applies the activation."""
        injected = self.dot_general is not dot_general
        if injected or self.preferred_element_type is not None or out_sharding is not None:
            return activate(self.activation, super().__call__(inputs, out_sharding))
        return _flax.dense(self, inputs, self.kernel[...], _value(self.bias), _promote(self))


class BatchNorm(nnx.BatchNorm):
    """`flax.nnx.BatchNorm` with an `activation`, and a `residual` in the call.

    The variance is computed without cancellation whatever `use_fast_variance` says.
    """

    def __init__(self, *args: Any, activation: Any = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.activation = _activation.parse("BatchNorm", activation)

    def __call__(
        self,
        x: Array,
        use_running_average: bool | None = None,
        *,
        mask: Array | None = None,
        residual: Array | None = None,  # like x
    ) -> Array:
        """activation(normalised x + residual). Other arguments, and what happens to the statistics, are Flax's."""
        use_average = self.use_running_average if use_running_average is None else use_running_average
        training = not use_average
        _flax.check_residual(self, x, residual)
        native = _flax.native_batchnorm(self, jnp.asarray(x), training, self.axis_name, mask)
        # What is wrong is Flax's to say.
        if use_average is None or not native or jnp.shape(x)[self.axis] != self.num_features:
            return _flax.after_batchnorm(self, super().__call__(x, use_running_average, mask=mask), residual)
        x, mean, var, scale, bias = self.promote_dtype(
            (x, self.mean[...], self.var[...], _value(self.scale), _value(self.bias)), dtype=self.dtype
        )
        dtype = canonicalize_dtype(*(a for a in (x, scale, bias) if a is not None), dtype=self.dtype)
        if not training:
            y, _, _ = _flax.batchnorm(self, x, scale, bias, mean, var, residual, training=False, dtype=dtype)
            return y
        y, mean, var = _flax.batchnorm(
            self, x, scale, bias, self.mean[...], self.var[...], residual, training=True, dtype=dtype, mask=mask
        )
        if self.mean._can_update or self.var._can_update:  # variables that are references, as in Flax
            mean, var = lax.stop_gradient((mean, var))
        self.mean[...], self.var[...] = mean, var
        return y

"""What jaxconv.linen and jaxconv.nnx share: the computations of Flax's modules with jaxconv's fused calls.

A module `m` is Flax's own: its attributes have the same names in linen and nnx. `promote` is its `promote_dtype`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.linear import canonicalize_padding

# Held, because a program may put ours in its place.
from flax.linen.pooling import avg_pool as flax_avg_pool
from flax.linen.pooling import max_pool as flax_max_pool
from jax import lax

from jaxconv import _problem
from jaxconv._core import activations
from jaxconv._core.activations import Activation, activate
from jaxconv._flax import fused
from jaxconv._ops.avg_pool import avg_pool as native_avg_pool
from jaxconv._ops.batchnorm import batchnorm as fused_batchnorm
from jaxconv._ops.conv_transpose import conv_transpose1d, conv_transpose2d, conv_transpose3d
from jaxconv._ops.groupnorm import groupnorm as fused_groupnorm
from jaxconv._ops.layernorm import layernorm as fused_layernorm
from jaxconv._ops.pool import max_pool as native_max_pool
from jaxconv._problem import BatchNormProblem

Array = jax.Array
Promote = Callable[[Any, Any, Any], tuple[Any, Any, Any]]

CONV_TRANSPOSE = {1: conv_transpose1d, 2: conv_transpose2d, 3: conv_transpose3d}


def activation_of(m: Any) -> Activation:
    return activations.parse(type(m).__name__, m.activation)


def sizes(value: int | Sequence[int]) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)


def per_dimension(value: int | Sequence[int] | None, nd: int) -> tuple[int, ...]:
    value = 1 if value is None else value
    return (value,) * nd if isinstance(value, int) else tuple(value)


def masked(m: Any, kernel: Array) -> Array:
    return kernel if m.mask is None else kernel * m.mask


def check_mask(m: Any, kernel_shape: tuple[int, ...]) -> None:
    if m.mask is not None and m.mask.shape != kernel_shape:
        raise ValueError(f"Mask needs to have the same shape as weights. Shapes are: {m.mask.shape}, {kernel_shape}")


def _one_batch(inputs: Array, nd: int) -> tuple[Array, Callable[[Array], Array]]:
    """(inputs with all batch dimensions in one, what restores them)."""
    count = inputs.ndim - (nd + 1)
    if count == 1:
        return inputs, lambda y: y
    lead = inputs.shape[:count]
    return jnp.reshape(inputs, (-1, *inputs.shape[count:])), lambda y: jnp.reshape(y, lead + y.shape[1:])


def conv(m: Any, inputs: Array, kernel: Array, bias: Array | None, promote: Promote) -> Array:
    """`Conv`'s computation, for parameters of the right shape and no function of the user's in place of lax's."""
    kernel_size = sizes(m.kernel_size)
    nd = len(kernel_size)
    x, restored = _one_batch(inputs, nd)
    dilation = per_dimension(m.kernel_dilation, nd)
    padding = canonicalize_padding(m.padding, nd)
    if padding in ("CIRCULAR", "REFLECT"):
        windows = [(k - 1) * d + 1 for k, d in zip(kernel_size, dilation, strict=False)]
        pads = [(0, 0), *(((window - 1) // 2, window // 2) for window in windows), (0, 0)]
        x, padding = jnp.pad(x, pads, mode={"CIRCULAR": "wrap", "REFLECT": "reflect"}[padding]), "VALID"
    elif padding == "CAUSAL":
        if nd != 1:
            raise ValueError("Causal padding is only implemented for 1D convolutions.")
        x, padding = jnp.pad(x, [(0, 0), (dilation[0] * (kernel_size[0] - 1), 0), (0, 0)]), "VALID"
    x, kernel, bias = promote(x, masked(m, kernel), bias)
    last = x.ndim - 1
    activation_spec = (0, last, *range(1, last))
    y = fused.conv(
        x,
        kernel,
        bias,
        activation_of(m),
        window_strides=per_dimension(m.strides, nd),
        padding=padding,
        lhs_dilation=per_dimension(m.input_dilation, nd),
        rhs_dilation=dilation,
        dimension_numbers=lax.ConvDimensionNumbers(
            activation_spec, (last, last - 1, *range(last - 1)), activation_spec
        ),
        feature_group_count=m.feature_group_count,
        precision=m.precision,
    )
    return restored(y)


def native_conv_transpose(m: Any) -> bool:
    """Whether `conv_transpose` computes what Flax's ConvTranspose does."""
    return len(sizes(m.kernel_size)) in CONV_TRANSPOSE and m.padding != "CIRCULAR" and m.preferred_element_type is None


def conv_transpose(m: Any, inputs: Array, kernel: Array, bias: Array | None, promote: Promote) -> Array:
    """`ConvTranspose`'s computation, where `native_conv_transpose`."""
    nd = len(sizes(m.kernel_size))
    x, restored = _one_batch(inputs, nd)
    stride, dilation = per_dimension(m.strides, nd), per_dimension(m.kernel_dilation, nd)
    padding = canonicalize_padding(m.padding, nd)
    activation = activation_of(m)
    x, kernel, bias = promote(x, masked(m, kernel), bias)
    known = x.dtype.name in _problem.DTYPES and x.dtype == kernel.dtype
    sized = 0 not in (*x.shape[1:], *kernel.shape)
    if known and sized and (not isinstance(padding, str) or padding in ("SAME", "VALID")):
        z = CONV_TRANSPOSE[nd](
            x,
            kernel,
            stride=stride,
            padding=padding,
            dilation=dilation,
            precision=m.precision,
            transpose_kernel=m.transpose_kernel,
        )
    else:
        z = lax.conv_transpose(
            x,
            kernel,
            stride,
            padding,
            rhs_dilation=dilation,
            transpose_kernel=m.transpose_kernel,
            precision=m.precision,
        )
    return restored(activate(activation, z if bias is None else z + lax.expand_dims(bias, range(nd + 1))))


def dense(m: Any, inputs: Array, kernel: Array, bias: Array | None, promote: Promote) -> Array:
    """`Dense`'s and `Linear`'s computation, for no function of the user's in place of lax's."""
    x, kernel, bias = promote(inputs, kernel, bias)
    return fused.dense(x, kernel, bias, activation_of(m), precision=m.precision)


# ----------------------------------------------------------------------------------------------------------------------
# Batch-norm


def check_residual(m: Any, x: Array, residual: Array | None) -> None:
    if residual is not None and jnp.shape(residual) != jnp.shape(x):
        raise ValueError(
            f"{type(m).__name__}: residual has shape {jnp.shape(residual)}, expected {jnp.shape(x)}, that of x"
        )


def native_batchnorm(m: Any, x: Array, training: bool, axis_name: Any, mask: Array | None) -> bool:
    """Whether `batchnorm` computes what Flax's BatchNorm does."""
    numbers = (bool, int, float, np.integer, np.floating)
    whole = mask is None or (
        getattr(mask, "dtype", None) == np.bool_ and _problem.broadcasts(jnp.shape(mask), jnp.shape(x))
    )
    return (
        (not training or (whole and axis_name is None))
        and isinstance(m.axis, int)
        and -x.ndim <= m.axis < x.ndim
        and x.ndim >= 2
        and 0 not in x.shape
        and not jnp.issubdtype(x.dtype, jnp.complexfloating)
        and jnp.dtype(m.param_dtype).name in _problem.DTYPES
        and (m.dtype is None or jnp.dtype(m.dtype).name in _problem.DTYPES)
        and isinstance(m.momentum, numbers)
        and 0 <= m.momentum <= 1
        and isinstance(m.epsilon, numbers)
        and m.epsilon >= 0
    )


def batchnorm(
    m: Any,
    x: Array,
    scale: Array | None,  # (C,)
    bias: Array | None,  # (C,)
    mean: Array,  # (C,)
    var: Array,  # (C,)
    residual: Array | None,  # like x
    *,
    training: bool,
    dtype: Any,  # of the result
    mask: Array | None = None,
) -> tuple[Array, Array, Array]:
    """(y, running mean, running variance) as Flax's BatchNorm has them, where `native_batchnorm`.

    jaxconv's batch-norm returns x's dtype, Flax's one that the parameters and `dtype` decide: the call is made in the
    wider of the two. Flax computes in float32 whatever the dtypes, so that nothing is rounded differently.
    """
    given = [a for a in (scale, bias, mean, var) if a is not None]
    wide = _problem.promoted(_problem.promoted(x.dtype, dtype), _exceeding_float32(given))
    wide = jnp.dtype(wide if wide.name in _problem.DTYPES else jnp.float32)
    problem = BatchNormProblem("BatchNorm", wide.name, (), 0, training, 0.0, 0.0)
    scale, bias, old_mean, old_var = (
        a if a is None else a.astype(problem.param_dtype) for a in (scale, bias, mean, var)
    )
    y, new_mean, new_var = fused_batchnorm(
        x.astype(wide),
        scale,
        bias,
        old_mean,
        old_var,
        training=training,
        momentum=float(m.momentum),
        epsilon=float(m.epsilon),
        activation=activation_of(m),
        residual=None if residual is None else residual.astype(wide),
        channel_axis=m.axis,
        mask=mask if training else None,
    )
    if not training:
        return y.astype(dtype), mean, var
    statistics = _problem.promoted(x.dtype if m.dtype is None else m.dtype, jnp.float32)
    return (
        y.astype(dtype),
        new_mean.astype(_problem.promoted(mean.dtype, statistics)),
        new_var.astype(_problem.promoted(var.dtype, statistics)),
    )


def _exceeding_float32(arrays: Sequence[Array]) -> Any:
    """float64 where one of the arrays has it; a dtype that widens nothing (see `promoted`) otherwise."""
    return jnp.float64 if any(a.dtype == jnp.float64 for a in arrays) else jnp.bool_


def after_batchnorm(m: Any, y: Array, residual: Array | None) -> Array:
    """The residual add and the activation, of what Flax's own batch-norm computed."""
    return activate(activation_of(m), y if residual is None else (y + residual).astype(y.dtype))


def _pools(inputs: Any, nd: int, padding: Any) -> bool:
    """Whether jaxconv pools such inputs over their last `nd` axes but one. It does not crop."""
    ours = hasattr(inputs, "dtype") and inputs.dtype.name in _problem.DTYPES and 0 not in inputs.shape
    pairs = [pair for pair in padding if isinstance(pair, Sequence)] if isinstance(padding, (list, tuple)) else []
    return ours and 1 <= nd <= 3 and inputs.ndim > nd and not any(pad < 0 for pair in pairs for pad in pair)


def max_pool(
    inputs: Array,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: str | Sequence[tuple[int, int]] = "VALID",
) -> Array:
    """`flax.linen.max_pool` by `jaxconv.max_pool`: (batch axes, spatial axes, features), a window per spatial axis.

    Example::

        y = jaxconv.linen.max_pool(jnp.ones((8, 32, 32, 16)), (2, 2), strides=(2, 2))

    Args:
      inputs: (batch axes, spatial axes, features), with no, one or several batch axes.
      window_shape: the window, an integer per spatial axis.
      strides: its steps (default: 1).
      padding: "SAME", "VALID", or a (low, high) pair per spatial axis.

    Flax's own code runs for integers, for more than three spatial axes, and for negative padding, which crops.
    """
    nd = len(window_shape)
    if not _pools(inputs, nd, padding):
        return flax_max_pool(inputs, window_shape, strides, padding)
    x, restore = _one_batch(inputs, nd)
    return restore(native_max_pool(x, tuple(window_shape), stride=per_dimension(strides, nd), padding=padding))


def avg_pool(
    inputs: Array,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: str | Sequence[tuple[int, int]] = "VALID",
    count_include_pad: bool = True,
) -> Array:
    """`flax.linen.avg_pool` by `jaxconv.avg_pool`: (batch axes, spatial axes, features), a window per spatial axis.

    Example::

        y = jaxconv.linen.avg_pool(jnp.ones((8, 32, 32, 16)), (2, 2), strides=(2, 2))

    Args:
      inputs: (batch axes, spatial axes, features), with no, one or several batch axes.
      window_shape: the window, an integer per spatial axis.
      strides: its steps (default: 1).
      padding: "SAME", "VALID", or a (low, high) pair per spatial axis.
      count_include_pad: whether a window's mean counts its padding, as zeros.

    Flax's own code runs for integers, for more than three spatial axes, for negative padding, which crops, and for 16
    bits where padding is not counted: its result is float32 there.
    """
    nd = len(window_shape)
    if not _pools(inputs, nd, padding) or (not count_include_pad and inputs.dtype.itemsize <= 2):
        return flax_avg_pool(inputs, window_shape, strides, padding, count_include_pad)
    x, restore = _one_batch(inputs, nd)
    options = dict(stride=per_dimension(strides, nd), padding=padding, count_include_pad=bool(count_include_pad))
    return restore(native_avg_pool(x, tuple(window_shape), **options))


# ----------------------------------------------------------------------------------------------------------------------
# Group-norm


def groups_of(m: Any, channels: int) -> int | None:
    """The groups into which Flax's GroupNorm cuts the channels; None where it has an error to raise."""
    if (m.num_groups is None) == (m.group_size is None):
        return None
    if m.num_groups is not None:
        groups = m.num_groups
    else:
        groups = channels // m.group_size if isinstance(m.group_size, int) and m.group_size > 0 else 0
        if groups * (m.group_size or 0) != channels:
            return None
    valid = isinstance(groups, int) and not isinstance(groups, bool) and groups > 0 and channels % groups == 0
    return groups if valid else None


def native_groupnorm(m: Any, x: Array, mask: Array | None) -> bool:
    """Whether `groupnorm` computes what Flax's GroupNorm does, for groups that are right."""
    return m.reduction_axes is None and x.ndim >= 2 and _native_norm(m, x, mask)


def _native_norm(m: Any, x: Array, mask: Array | None) -> bool:
    return (
        mask is None
        and m.axis_name is None
        and 0 not in x.shape
        and not jnp.issubdtype(x.dtype, jnp.complexfloating)
        and jnp.dtype(m.param_dtype).name in _problem.DTYPES
        and (m.dtype is None or jnp.dtype(m.dtype).name in _problem.DTYPES)
        and isinstance(m.epsilon, (bool, int, float, np.integer, np.floating))
        and m.epsilon >= 0
    )


def groupnorm(
    m: Any,
    x: Array,
    scale: Array | None,  # (C,)
    bias: Array | None,  # (C,)
    *,
    groups: int,
    dtype: Any,  # of the result
) -> Array:
    """activation(y), y as Flax's GroupNorm has it, where `native_groupnorm`."""
    return _normalised(m, functools.partial(fused_groupnorm, groups=groups), x, scale, bias, dtype)


def _normalised(
    m: Any, norm: Callable[..., Array], x: Array, scale: Array | None, bias: Array | None, dtype: Any
) -> Array:
    """activation(y) in `dtype`, y by `norm`. Dtypes are treated as in `batchnorm`."""
    given = [a for a in (scale, bias) if a is not None]
    wide = _problem.promoted(_problem.promoted(x.dtype, dtype), _exceeding_float32(given))
    wide = jnp.dtype(wide if wide.name in _problem.DTYPES else jnp.float32)
    params = jnp.float64 if wide == jnp.float64 else jnp.float32
    scale, bias = (a if a is None else a.astype(params) for a in (scale, bias))
    y = norm(x.astype(wide), scale, bias, epsilon=float(m.epsilon), activation=activation_of(m))
    return y.astype(dtype)


# ----------------------------------------------------------------------------------------------------------------------
# Layer-norm


def native_layernorm(m: Any, x: Array, mask: Array | None) -> bool:
    """Whether `layernorm` computes what Flax's LayerNorm does."""

    def last(axes: Any) -> bool:
        axes = axes if isinstance(axes, (tuple, list)) else (axes,)
        return len(axes) == 1 and isinstance(axes[0], int) and axes[0] in (-1, x.ndim - 1)

    return x.ndim >= 1 and last(m.reduction_axes) and last(m.feature_axes) and _native_norm(m, x, mask)


def layernorm(m: Any, x: Array, scale: Array | None, bias: Array | None, *, dtype: Any) -> Array:
    """activation(y), y as Flax's LayerNorm has it, where `native_layernorm`."""
    return _normalised(m, fused_layernorm, x, scale, bias, dtype)

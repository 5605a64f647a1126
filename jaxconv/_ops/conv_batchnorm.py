"""A convolution and its batch-norm: the public function, and the one convolution that they are in inference."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxconv import _problem
from jaxconv._core.types import (
    Array,
    Conv1dPadding,
    ConvAlgorithm,
    Implementation,
    Layout,
    Operand,
    PerDimension,
    Precision,
    ToActivation,
)
from jaxconv._ops.batchnorm import infer, parameters, train
from jaxconv._ops.conv import convolution, with_residual
from jaxconv._problem import ConvBatchNormProblem
from jaxconv.joints import region

replace = dataclasses.replace


# ----------------------------------------------------------------------------------------------------------------------
# Inference


# Numbers of a result for each of its filter, from which what multiplies the result is multiplied into the filter.
LEAST_SPARED = 2


def folding_pays(result: Sequence[Any], filter: Sequence[Any]) -> bool:
    """Whether a call that folds numbers per channel into its filter is sure to be faster than one that multiplies its
    result by them; both are shapes.

    Folding reads and writes the filter in every call, and spares that the result is written and read once more. So it
    pays where the result is the larger one. At half of that, one image and 7x7 pixels of 512 channels, it takes 1.2 to
    1.5 times as long on a CPU, and at LEAST_SPARED as long (measured; XLA turns a filter that it has not been given as
    it is into its own order too). A symbolic extent may be 1. `freeze` folds once, so that it need not ask.
    """
    least = math.prod(extent for extent in result if _problem.is_number(extent))
    numbers = all(map(_problem.is_number, filter))
    return numbers and least >= LEAST_SPARED * math.prod(filter)


def folded(
    w: Array, axis: int, scale: Array, bias: Array, mean: Array, var: Array, epsilon: float, dtype: Any
) -> tuple[Array, Array]:
    """(w * s, bias - mean * s), s = scale / sqrt(var + epsilon), along w's axis of outputs; rounded to dtype once."""
    s = scale * jax.lax.rsqrt(var + epsilon)
    each = s.reshape([-1 if a == axis else 1 for a in range(w.ndim)])
    return (w.astype(s.dtype) * each).astype(dtype), (bias - mean * s).astype(dtype)


def inference(
    p: ConvBatchNormProblem, x: Array, w: Array, scale: Array, bias: Array, mean: Array, var: Array, *residual: Array
) -> Array:
    """conv(x, w * s) + (bias - mean * s), in the convolution's own epilogue: see `folded`."""
    axis = w.ndim - 1 if p.conv.channels_last else 0
    filters, offset = folded(w, axis, scale, bias, mean, var, p.norm.epsilon, x.dtype)
    run = replace(p.conv, bias=True, activation=p.norm.activation)
    return (with_residual if residual else convolution)(run, x, filters, offset, *residual)[0]


# ----------------------------------------------------------------------------------------------------------------------
# The public function


def conv_batchnorm(
    x: Operand,  # (N, H, W, C) or (N, C, H, W); one spatial dimension to three
    w: Operand,  # (R, S, C/G, K) or (K, C/G, R, S)
    scale: Operand | None,  # (K,)
    bias: Operand | None,  # (K,)
    running_mean: Operand,  # (K,)
    running_var: Operand,  # (K,)
    *,
    training: bool,
    stride: PerDimension = 1,
    padding: Conv1dPadding = "SAME",
    dilation: PerDimension = 1,
    groups: int = 1,
    layout: Layout | None = None,
    precision: Precision = None,
    momentum: float = 0.99,
    epsilon: float = 1e-5,
    activation: ToActivation = None,
    residual: Operand | None = None,  # like the result
    algorithm: ConvAlgorithm | None = None,
    implementation: Implementation | None = None,
) -> tuple[Array, Array, Array]:
    """A convolution and the batch normalisation of its result, with residual add and activation.

    Equivalent JAX code::

        z = jaxconv.conv2d(x, w, stride=stride, padding=padding, ...)     # conv1d, conv3d for other ranks of w
        y, running_mean, running_var = jaxconv.batchnorm(z, scale, bias, running_mean, running_var, training=training,
                                                         activation=activation, residual=residual, ...)

    Example::

        x, w = jnp.ones((8, 32, 32, 16)), jnp.ones((3, 3, 16, 32))
        scale, bias, mean, var = (jnp.full(32, v) for v in (1.0, 0.0, 0.0, 1.0))
        y, mean, var = jaxconv.conv_batchnorm(x, w, scale, bias, mean, var, training=True, activation="relu")

    In training the convolution's kernel also computes the statistics of z, if it can (algorithms "sm90" and "grouped"
    on Hopper; on a CPU only if native code is asked for). z, rounded to x's dtype, is then written once and read once.
    Elsewhere the function is the two calls above. `explain` says which, and why. The gradient is that of the two calls,
    and z is kept for it.

    In inference the normalisation is folded into the filters and the convolution's bias, and z is never written. For
    16-bit x the folded filters and bias are rounded to 16 bits. The error is like that of rounding z, which the two
    calls do. But float16 has few digits below 6e-5, and nothing above 65504: if scale / sqrt(running_var + epsilon) is
    below 0.01 or so, or running_mean times this is not below 65504, the two calls are better.

    Each call folds anew, so if z has fewer than twice the filter's numbers, the function is the two calls above, unless
    an implementation or algorithm is asked for. `freeze` folds once, whatever the sizes.

    Args:
      x, w, stride, padding, dilation, groups, precision: see `conv2d`.
      scale, bias, running_mean, running_var, momentum, epsilon, activation, residual: see `batchnorm`; (K,) each,
        and residual of the result's shape.
      training: a Python bool, see `batchnorm`.
      layout: that of `conv1d`, `conv2d` or `conv3d`, by the rank of w; None is channels last.
      algorithm: forces one native algorithm of the convolution, forward and backward.
      implementation: see `conv2d`, for both.

    Returns:
      (y, running mean, running variance); the statistics are unchanged when not training.

    Raises:
      TypeError, ValueError: as `conv2d` and `batchnorm` do.

    Differentiable in every array, to any order, in both modes. Source: the merging of the tiles' (mean, M2) is that of
    Chan, Golub and LeVeque 1983.
    """
    name = "conv_batchnorm"
    x, w = _problem.as_array(name, "x", x), _problem.as_array(name, "w", w)
    arrays = parameters(name, x, scale, bias, running_mean, running_var)
    residual = None if residual is None else _problem.as_array(name, "residual", residual)
    p = ConvBatchNormProblem.infer(
        name,
        x,
        w,
        residual=residual,
        **arrays,
        training=training,
        momentum=momentum,
        epsilon=epsilon,
        activation=activation,
        layout=layout,
        algorithm=algorithm,
        implementation=implementation,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        precision=precision,
    )
    if arrays["scale"] is None:
        arrays["scale"] = jnp.ones(p.norm.param_shape, p.norm.param_dtype)
    if arrays["bias"] is None:
        arrays["bias"] = jnp.zeros(p.norm.param_shape, p.norm.param_dtype)
    args = [x, w, *arrays.values(), *([] if residual is None else [residual])]
    if not p.norm.training:
        asked = p.conv.implementation or p.conv.algorithm or p.norm.implementation
        folds = asked or folding_pays(p.conv.y_shape, p.conv.w_shape)
        y = inference(p, *args) if folds else infer(p.norm, *convolution(p.conv, x, w), *args[2:])
        return y, arrays["running_mean"], arrays["running_var"]

    def layers(x: Array, w: Array, *rest: Array) -> list[Array]:
        return train(p.norm, *convolution(p.conv, x, w), *rest)[:3]

    y, new_mean, new_var = region.call(layers, *args)
    return y, new_mean, new_var

"""Batch-norm, its activation and a convolution: the public function."""

from __future__ import annotations

import jax.numpy as jnp

from jaxconv import _plan, _problem
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
from jaxconv._ops.conv import convolution
from jaxconv._ops.conv_normalised import normalised
from jaxconv._problem import BatchNormProblem, ConvProblem, NormalisedConvProblem
from jaxconv._problem.parse import shapes
from jaxconv.joints import region


def batchnorm_conv(
    x: Operand,  # (N, H, W, C) or (N, C, H, W); one spatial dimension to three
    scale: Operand | None,  # (C,)
    bias: Operand | None,  # (C,)
    running_mean: Operand,  # (C,)
    running_var: Operand,  # (C,)
    w: Operand,  # (R, S, C/G, K) or (K, C/G, R, S)
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
    algorithm: ConvAlgorithm | None = None,
    implementation: Implementation | None = None,
) -> tuple[Array, Array, Array]:
    """Batch normalisation, its activation, and a convolution that alone reads the result.

    Equivalent JAX code::

        a, running_mean, running_var = jaxconv.batchnorm(x, scale, bias, running_mean, running_var, training=training,
                                                         activation=activation, ...)
        y = jaxconv.conv2d(a, w, stride=stride, padding=padding, ...)     # conv1d, conv3d for other ranks of w

    a has x's dtype, and is padded with zeros. Some kernels normalise x while they read it. Then a and its gradient are
    never written, y and the gradients are computed from x, and only x is kept. Such kernels exist for depthwise 3x3
    convolutions in 16 bits on Hopper, with relu, relu6 or silu, and are used where they were measured to be faster. Of
    1x1 convolutions of stride 1 a is not written either, but its gradient is.
    Elsewhere the function is the two calls above. `explain` says which, and why.

    Example::

        x, w = jnp.ones((8, 32, 32, 16)), jnp.ones((3, 3, 1, 16))
        scale, bias, mean, var = (jnp.full(16, v) for v in (1.0, 0.0, 0.0, 1.0))
        how = dict(training=True, groups=16, activation="relu6")
        y, mean, var = jaxconv.batchnorm_conv(x, scale, bias, mean, var, w, **how)

    Args:
      x, scale, bias, running_mean, running_var, training, momentum, epsilon, activation: see `batchnorm`; its channels
        are the convolution's.
      w, stride, padding, dilation, groups, layout, precision: see `conv2d` and `conv_batchnorm`.
      algorithm: forces one native algorithm of the convolution.
      implementation: see `conv2d`, for both; "native" also makes the convolution normalise its input where it can.

    Returns:
      (y, running mean, running variance); the statistics are unchanged when not training.

    Raises:
      TypeError, ValueError: as `conv2d` and `batchnorm` do.

    Differentiable in every array, to any order, in both modes.
    """
    name = "batchnorm_conv"
    x, w = _problem.as_array(name, "x", x), _problem.as_array(name, "w", w)
    arrays = parameters(name, x, scale, bias, running_mean, running_var)
    nd = w.ndim - 2
    if nd not in _problem.CHANNELS_LAST:
        raise ValueError(f"{name}: w has {w.ndim} dimensions, expected 3, 4 or 5. {shapes(x=x, w=w)}")
    window = dict(stride=stride, padding=padding, dilation=dilation, groups=groups, precision=precision)
    c = ConvProblem.infer(
        name,
        nd,
        x,
        w,
        None,
        **window,
        activation=None,
        layout=_problem.CHANNELS_LAST[nd] if layout is None else layout,
        return_preactivation=False,
        algorithm=algorithm,
        implementation=implementation,
    )
    norm = BatchNormProblem.infer(
        name,
        x,
        residual=None,
        **arrays,
        training=training,
        momentum=momentum,
        epsilon=epsilon,
        activation=activation,
        channel_axis=c.channel_axis,
        algorithm=None,
        implementation=implementation,
    )
    ones = jnp.ones(norm.param_shape, norm.param_dtype) if arrays["scale"] is None else arrays["scale"]
    zeros = jnp.zeros(norm.param_shape, norm.param_dtype) if arrays["bias"] is None else arrays["bias"]
    statistics = [ones, zeros, arrays["running_mean"], arrays["running_var"]]
    if norm.training:

        def layers(x: Array, w: Array, *statistics: Array) -> list[Array]:
            a, new_mean, new_var, _, _ = train(norm, x, *statistics)
            return [*convolution(c, a, w), new_mean, new_var]

        y, new_mean, new_var = region.call(layers, x, w, *statistics)
        return y, new_mean, new_var
    p = NormalisedConvProblem.of(norm, c)
    if not c.empty and _plan.plan(normalised.name, p, _plan.Device.default()).implementation == "native":
        return normalised(p, x, w, *statistics), *statistics[2:]
    (y,) = convolution(c, infer(norm, x, *statistics), w)
    return y, *statistics[2:]

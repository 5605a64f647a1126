"""Layer-norm over the channels of each pixel: the public function. It is a group-norm's problem, of rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxconv import _problem
from jaxconv._core.types import GroupNormAlgorithm, Implementation, Operand, ToActivation
from jaxconv._ops.groupnorm import norm
from jaxconv._problem import GroupNormProblem


def layernorm(
    x: Operand,  # (..., C)
    scale: Operand | None = None,  # (C,)
    bias: Operand | None = None,  # (C,)
    *,
    epsilon: float = 1e-6,
    activation: ToActivation = None,
    algorithm: GroupNormAlgorithm | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Layer normalisation over the last axis, with activation.

    Equivalent JAX code, in float32 (float64 for float64 x)::

        mean, var = jnp.mean(x, -1, keepdims=True), jnp.var(x, -1, keepdims=True)  # biased
        y = activation((x - mean) / jnp.sqrt(var + epsilon) * scale + bias)

    Example::

        y = jaxconv.layernorm(jnp.ones((8, 100, 64)), jnp.ones(64), jnp.zeros(64))

    Args:
      x: (..., C), at least one dimension; float32, bfloat16, float16 or float64.
      scale, bias: (C,), float32 for 16-bit x, else of x's dtype. A narrower dtype is cast. None stands for ones or
        zeros.
      epsilon: added to the variance.
      activation: see `conv2d`.
      algorithm: forces one native algorithm: "rows", in which a warp reads a row once (CUDA only, at most 1024 channels
        in whole vectors of 16 bytes, no activation), or one of `groupnorm`'s, for which a row is an image of one pixel.
      implementation: see `conv2d`.

    Returns:
      y of x's shape and dtype, rounded once.

    Raises:
      TypeError, ValueError: when the arguments do not fit together (at trace time), naming the argument, what it got
        and what was expected; ValueError when a forced implementation or algorithm cannot run, with the reason.

    The variance is computed about a sample of the row or about its mean, never as E[x^2] - E[x]^2: it has float32
    accuracy even if the mean is 10,000 times the deviation. Differentiable in every array, to any order, in both
    modes; the backward pass keeps x, mean and rstd, and recomputes the rest. Sums over rows are in a fixed order. On
    meshes all axes but the last may be split. Source: Ba et al. 2016 (arXiv:1607.06450).
    """
    name = "layernorm"
    x = _problem.as_array(name, "x", x)
    scale, bias = (
        None if value is None else _problem.as_parameter(name, argument, value, x)
        for argument, value in (("scale", scale), ("bias", bias))
    )
    p = GroupNormProblem.infer(
        name,
        x if x.ndim != 1 else x[None],
        scale,
        bias,
        groups=1,
        epsilon=epsilon,
        activation=activation,
        algorithm=algorithm,
        implementation=implementation,
        rows=True,
    )
    scale = jnp.ones(p.param_shape, p.param_dtype) if scale is None else scale
    bias = jnp.zeros(p.param_shape, p.param_dtype) if bias is None else bias
    y, _, _ = norm(p, x.reshape(p.x_shape) if x.ndim == 1 else x, scale, bias)
    return y[0] if x.ndim == 1 else y

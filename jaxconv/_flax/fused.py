"""lax's convolution and product with the bias and activation that follow them: one fused call where jaxconv has one.

For callers that hold lax's arguments (the Flax modules, `accelerate`) and want lax's meaning whatever they hold: what
jaxconv does not know is computed by lax itself, and what lax refuses is refused by lax.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Held, because a program may put another in its place.
from jax.lax import dot_general

from jaxconv import _problem
from jaxconv._core.activations import Activation, activate
from jaxconv._ops import reference
from jaxconv._ops.conv import run_public
from jaxconv._ops.conv_batchnorm import folded
from jaxconv._ops.conv_transpose import conv_general_dilated
from jaxconv._ops.dense import dense as fused_dense
from jaxconv._problem import ConvProblem, DenseProblem

Array = jax.Array


def conv_layout(numbers: lax.ConvDimensionNumbers, nd: int) -> str | None:
    """`conv2d`'s layout for lax's dimension numbers, with the filter in any order; None where there is none."""
    if nd not in (1, 2, 3) or numbers.lhs_spec != numbers.out_spec:
        return None
    if numbers.lhs_spec == (0, nd + 1, *range(1, nd + 1)):
        return _problem.CHANNELS_LAST[nd]
    return _problem.CHANNELS_FIRST[nd] if numbers.lhs_spec == tuple(range(nd + 2)) else None


def pads_are_numbers(padding: Sequence[Sequence[Any]]) -> bool:
    """Whether no pad is symbolic, as those of "SAME" are where a filter steps over a symbolic extent.

    lax itself takes such pads as a name only.
    """
    return all(_problem.is_number(pad) for pair in padding for pad in pair)


def _in_layout(w: Array, numbers: lax.ConvDimensionNumbers, layout: str) -> Array:
    """lax's filter in the order of its axes that `conv2d` has in this layout."""
    out_feature, in_feature, *spatial = numbers.rhs_spec
    last = layout == _problem.CHANNELS_LAST[len(spatial)]
    return jnp.transpose(w, (*spatial, in_feature, out_feature) if last else (out_feature, in_feature, *spatial))


def conv(
    x: Array,
    w: Array,
    b: Array | None,  # (K,)
    activation: Activation,
    *,
    window_strides: Sequence[int],
    padding: Any,
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    dimension_numbers: lax.ConvDimensionNumbers,
    feature_group_count: int,
    precision: Any,
    residual: Array | None = None,  # like y, of x's dtype
    return_preactivation: bool = False,
) -> Any:
    """y = activation(z), z = lax.conv_general_dilated(x, w, ...) + b + residual; y, or (y, z)."""
    numbers = dimension_numbers
    nd = x.ndim - 2
    layout = conv_layout(numbers, nd)
    if layout is not None and all(d == 1 for d in lhs_dilation):
        name = f"conv{nd}d"
        filter = _in_layout(w, numbers, layout)
        try:
            p = ConvProblem.infer(
                name,
                nd,
                _problem.as_array(name, "x", x),
                _problem.as_array(name, "w", filter),
                b if b is None else _problem.as_array(name, "b", b),
                stride=window_strides,
                padding=padding,
                dilation=rhs_dilation,
                groups=feature_group_count,
                activation=activation,
                layout=layout,
                precision=precision,
                return_preactivation=return_preactivation,
                algorithm=None,
                implementation=None,
                residual=residual if residual is None else _problem.as_array(name, "residual", residual),
            )
        except (TypeError, ValueError):
            pass  # lax decides what is an error
        else:
            return run_public(p, x, filter, b, residual)
    z = conv_general_dilated(
        x,
        w,
        window_strides,
        padding,
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
        dimension_numbers=numbers,
        feature_group_count=feature_group_count,
        precision=precision,
    )
    if b is not None:
        z = z + lax.expand_dims(b, [axis for axis in range(z.ndim) if axis != numbers.out_spec[1]])
    if residual is not None:
        z = z + residual
    y = activate(activation, z)
    return (y, z) if return_preactivation else y


def linear_batchnorm_inference(
    run: Callable[..., Array],  # (x, w, b, activation): conv, dense
    axis: int,  # of w, its outputs'
    x: Array,
    w: Array,  # of any float dtype: it becomes x's after the batch-norm is folded into it
    scale: Array | None,  # (K,)
    bias: Array | None,  # (K,)
    mean: Array,  # (K,)
    var: Array,  # (K,)
    *,
    epsilon: float,
    activation: Activation,
    residual: Array | None,
) -> Array:
    """activation(batchnorm(z) + residual), z = run(x, w, None, none), by the running statistics: z is never written.

    `run` of a convolution takes the residual too.
    """
    scale = jnp.ones_like(var) if scale is None else scale
    filters, offset = folded(w, axis, scale, 0 if bias is None else bias, mean, var, epsilon, x.dtype)
    if residual is None:
        return run(x, filters, offset, activation)
    if w.ndim > 2:
        return run(x, filters, offset, activation, residual=residual)
    return reference.activated_sum(activation, run(x, filters, offset, Activation()), residual)[0]


def dense(
    x: Array,  # (..., K)
    w: Array,  # (K, N)
    b: Array | None,  # (N,)
    activation: Activation,
    *,
    precision: Any,
    return_preactivation: bool = False,
) -> Any:
    """y = activation(z), z = x @ w + b by lax.dot_general; y, or (y, z)."""
    options: dict[str, Any] = dict(
        activation=activation,
        precision=precision,
        return_preactivation=return_preactivation,
        algorithm=None,
        implementation=None,
    )
    try:
        arrays = [a if a is None else _problem.as_array("dense", n, a) for n, a in (("x", x), ("w", w), ("b", b))]
        DenseProblem.infer("dense", *arrays, None, alpha=1.0, beta=1.0, **options)
    except (TypeError, ValueError):
        z = dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())), precision=precision)
        z = z if b is None else z + jnp.reshape(b, (1,) * (z.ndim - 1) + (-1,))
        y = activate(activation, z)
        return (y, z) if return_preactivation else y
    return fused_dense(*arrays, **options)

"""lax's convolution and product with the bias and activation that follow them: one fused call where jaxconv has one.

For callers that hold lax's arguments (the Flax modules, `accelerate`) and want lax's meaning whatever they hold: what
jaxconv does not know is computed by lax itself, and what lax refuses is refused by lax.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Held, because a program may put another in its place.
from jax.lax import dot_general

from jaxconv import _problem
from jaxconv._activation import Activation, activate
from jaxconv._problem import BatchNormConvProblem, BatchNormProblem, ConvProblem, DenseProblem
from jaxconv.batchnorm_conv import chain
from jaxconv.batchnorm_conv import fork as forked_chain
from jaxconv.conv import _run
from jaxconv.conv_batchnorm import added, folded, with_statistics
from jaxconv.conv_batchnorm import conv_batchnorm as pair
from jaxconv.conv_batchnorm import forked as forked_pair
from jaxconv.conv_transpose import conv_general_dilated
from jaxconv.dense import dense as fused_dense
from jaxconv.mlp import run as run_mlp

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
    forks: bool = False,
) -> Any:
    """y = activation(z), z = lax.conv_general_dilated(x, w, ...) + b + residual; y, or (y, z).

    With `forks` (x, that): x for its other users, whose gradient then comes to this convolution's.
    """
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
            return _run(p, x, filter, b, residual, forks)
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
    result = (y, z) if return_preactivation else y
    return (x, result) if forks else result


def conv_batchnorm_layout(
    numbers: lax.ConvDimensionNumbers, nd: int, lhs_dilation: Sequence[int], channel_axis: int
) -> str | None:
    """`conv_batchnorm`'s layout for lax's convolution and the axis that is normalised; None where it has none."""
    layout = conv_layout(numbers, nd)
    plain = layout is not None and all(d == 1 for d in lhs_dilation) and numbers.out_spec[1] == channel_axis
    return layout if plain else None


def conv_batchnorm(
    x: Array,
    w: Array,
    scale: Array | None,  # (K,)
    bias: Array | None,  # (K,)
    running_mean: Array,  # (K,)
    running_var: Array,  # (K,)
    *,
    window_strides: Sequence[int],
    padding: Any,
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    dimension_numbers: lax.ConvDimensionNumbers,
    feature_group_count: int,
    precision: Any,
    channel_axis: int,
    forks: bool = False,
    statistics: bool = False,
    **norm: Any,  # training, momentum, epsilon, activation, residual; of a fork `opened`
) -> Any:
    """batchnorm(lax.conv_general_dilated(x, w, ...), ...), where `conv_batchnorm_layout` has a name.

    With `forks` (x, that), as in `conv`; with `statistics` the convolution's result instead of the batch-norm's.
    """
    layout = conv_batchnorm_layout(dimension_numbers, x.ndim - 2, lhs_dilation, channel_axis)
    assert layout is not None
    run = functools.partial(with_statistics, forks=forks) if statistics else forked_pair if forks else pair
    return run(
        x,
        _in_layout(w, dimension_numbers, layout),
        scale,
        bias,
        running_mean,
        running_var,
        stride=window_strides,
        padding=padding,
        dilation=rhs_dilation,
        groups=feature_group_count,
        precision=precision,
        layout=layout,
        algorithm=None,
        implementation=None,
        **norm,
    )


def conv_problem(window: dict[str, Any], channel_axis: int, x: Any, w: Any) -> ConvProblem | None:
    """The problem of lax's convolution of arrays like these, without what follows; None where jaxconv has none."""
    found = batchnorm_conv_problem(None, window, channel_axis, 0.0, Activation(), x, w)
    return None if found is None else found.conv


def batchnorm_conv_problem(
    before: dict[str, Any] | None,  # window, of conv_general_dilated
    after: dict[str, Any],
    channel_axis: int,
    epsilon: float,
    activation: Activation,
    x: Any,
    *filters: Any,  # before's, where there is one, and after's
) -> BatchNormConvProblem | None:
    """The problem of `batchnorm_conv` for arrays like these; None where it has none."""
    windows = [window for window in (before, after) if window is not None]
    bare: list[ConvProblem] = []
    for window, w in zip(windows, filters, strict=True):
        numbers = window["dimension_numbers"]
        layout = conv_batchnorm_layout(numbers, x.ndim - 2, window["lhs_dilation"], channel_axis)
        if layout is None or not pads_are_numbers(window["padding"]):
            return None
        p = ConvProblem.infer(
            "batchnorm_conv",
            x.ndim - 2,
            x,
            jax.eval_shape(lambda w, numbers=numbers, layout=layout: _in_layout(w, numbers, layout), w),
            None,
            stride=window["window_strides"],
            padding=window["padding"],
            dilation=window["rhs_dilation"],
            groups=window["feature_group_count"],
            precision=window["precision"],
            layout=layout,
            activation=None,
            return_preactivation=False,
            algorithm=None,
            implementation=None,
        )
        if p.empty:
            return None
        bare.append(p)
        x = jax.ShapeDtypeStruct(p.y_shape, p.dtype)
    last = bare[-1]
    norm = BatchNormProblem("batchnorm_conv", last.dtype, last.x_shape, channel_axis, True, 0.0, epsilon, activation)
    return BatchNormConvProblem(norm, last, None if before is None else bare[0])


def batchnorm_conv(
    p: BatchNormConvProblem,
    before: dict[str, Any] | None,
    after: dict[str, Any],
    operands: Sequence[Array],  # x, and before's w
    scale: Array | None,  # (C,)
    bias: Array | None,  # (C,)
    w: Array,
    forks: bool = False,
) -> Any:
    """(y, mean, variance) of a problem of `batchnorm_conv_problem`. With `forks` (x, that), as in `conv`."""
    names = _problem.CHANNELS_LAST if p.conv.channels_last else _problem.CHANNELS_FIRST
    layout = names[p.conv.nd]
    x, *first = operands
    first = [_in_layout(a, before["dimension_numbers"], layout) for a in first] if before is not None else []
    shape, dtype = p.norm.param_shape, p.norm.param_dtype
    # With no momentum the running statistics become those of the batch.
    zeros = jnp.zeros(shape, dtype)
    scale, bias = (jnp.ones(shape, dtype) if scale is None else scale), (zeros if bias is None else bias)
    args = [x, *first, scale, bias, zeros, zeros, _in_layout(w, after["dimension_numbers"], layout)]
    return forked_chain(p, *args) if forks else chain(p, *args)


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
    return added(activation, run(x, filters, offset, Activation()), residual)


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


def mlp(
    x: Array,  # (..., K)
    w1: Array,  # (K, H)
    b1: Array | None,  # (H,)
    w2: Array,  # (H, N)
    b2: Array | None,  # (N,)
    *,
    activation: Activation,
    out_activation: Activation,
    precision: tuple[Any, Any],
    return_preactivation: bool,
) -> Sequence[Array]:
    """y = out_activation(z), z = h @ w2 + b2, h = activation(x @ w1 + b1) by lax.dot_general; [y], or [y, z]."""
    try:
        return run_mlp(
            *(x, w1, b1, w2, b2),
            activation=activation,
            out_activation=out_activation,
            precision=precision,
            return_preactivation=return_preactivation,
            algorithm=None,
            implementation=None,
        )
    except (TypeError, ValueError):
        h = dense(x, w1, b1, activation, precision=precision[0])
        outs = dense(h, w2, b2, out_activation, precision=precision[1], return_preactivation=return_preactivation)
        return outs if return_preactivation else [outs]

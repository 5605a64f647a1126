"""Batch-norm, its activation and a convolution as one: four kernels, two composites, their rules, the public function.

Where the convolution's kernel normalises what it reads, the batch-norm's result is in no memory, forward or backward,
and neither is its gradient.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxconv import _halo, _op, _plan, _problem, _sharding, batchnorm, conv, conv_batchnorm
from jaxconv._problem import BatchNormConvProblem, BatchNormProblem, ConvProblem, NormalisedConvProblem
from jaxconv._problem.parse import shapes
from jaxconv._types import (
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

replace = dataclasses.replace


# ----------------------------------------------------------------------------------------------------------------------
# The kernels: y, and dw, of a = activation(batch-norm of x by known statistics); and the backward pass of both, without
# a's gradient


def _wire(p: NormalisedConvProblem, plan: _plan.Plan, operands: str, results: str, sums: str = "") -> _op.Wire:
    """Letters as conv's wire has them; (C,) of the batch-norm follow."""
    wire = conv._wire(p, plan, operands + "bbbb" + sums, results)
    attrs = {**wire.attrs, "norm": batchnorm._wire(p.norm, 5, 1).attrs["norm"]}
    return replace(wire, attrs=attrs | {"count": np.int64(p.count)} if sums else attrs)


def _by_instances(made: Any, operands: str, results: str) -> Any:
    """The batching rule: images of different instances have statistics of their own, so into channels, always."""

    def batch(p: NormalisedConvProblem, args: list[Array], dims: list[int | None]) -> tuple[list[Array], list[int]]:
        size = _op.batch_size(args, dims)
        channel, _, out_channel = conv._axes(p)
        axis = {"x": channel, "y": channel, "w": out_channel, "p": 0}
        fronted = [_op.to_front(a, d, size) for a, d in zip(args, dims, strict=True)]
        folded = [_op.fold(a, 0, axis[o]) for a, o in zip(fronted, operands, strict=True)]
        outs = conv._listed(made()(conv._grouped(p, size), *folded))
        return [_op.unfold(out, size, axis[r]) for out, r in zip(outs, results, strict=True)], [0] * len(outs)

    return batch


def _normalise(p: NormalisedConvProblem, x: Array, *v: Array) -> Array:
    """a, of all of x or of a shard."""
    return batchnorm.infer(replace(p.norm, shape=tuple(x.shape)), x, *v)


def _then_convolved(p: NormalisedConvProblem, x: Array, w: Array, *v: Array) -> list[Array]:
    """normalised as two, each by a plan of its own."""
    return [conv.fprop(p.conv, _normalise(p, x, *v), w)]


def _then_wgrad(p: NormalisedConvProblem, x: Array, dy: Array, *v: Array) -> list[Array]:
    return [conv.wgrad(p.conv, _normalise(p, x, *v), dy)]


def _norm(p: NormalisedConvProblem, x: Array, **fields: Any) -> BatchNormProblem:
    """The batch-norm in training of x, which is all of it or a shard."""
    return replace(p.norm, shape=tuple(x.shape), training=True, want_dresidual=False, **fields)


def _rstd(norm: BatchNormProblem, var: Array) -> Array:
    return jax.lax.rsqrt(var + norm.epsilon)


def _then_gradient(p: NormalisedConvProblem, x: Array, dy: Array, w: Array, *v: Array) -> list[Array]:
    scale, bias, mean, var = v
    da = conv.dgrad(p.conv, dy, w)
    sums = batchnorm.backward(_norm(p, x, want_dx=False), x, da, scale, bias, mean, _rstd(p.norm, var))
    return [normalised_wgrad(p, x, dy, *v), *sums]


def _then_dx(p: NormalisedConvProblem, x: Array, dy: Array, w: Array, *v: Array) -> list[Array]:
    return [_dx_of(p, x, conv.dgrad(p.conv, dy, w), *v)]


def _dx_of(p: NormalisedConvProblem, x: Array, da: Array, *v: Array) -> Array:
    scale, bias, mean, var, *sums = v
    return batchnorm.dx_of_sums(_norm(p, x, count=p.count), x, da, scale, bias, mean, _rstd(p.norm, var), *sums)


def _whole(split: _sharding.Split) -> bool:
    """Whether images and groups alone are split: rows that neighbours send are padded with zeros, which x is not."""
    return set(split) <= {"n", "g"}


def _shard(p: NormalisedConvProblem, split: _sharding.Split, x: Array, w: Array, *v: Array) -> list[Array]:
    if _whole(split):
        return [normalised(p, x, w, *v)]
    return conv._fprop_shard(p.conv, split, _normalise(p, x, *v), w)


def _wgrad_shard(p: NormalisedConvProblem, split: _sharding.Split, x: Array, dy: Array, *v: Array) -> list[Array]:
    if _whole(split):
        return [conv._summed(normalised_wgrad(p, x, dy, *v), split, "n")]
    return conv._wgrad_shard(p.conv, split, _normalise(p, x, *v), dy)


def _gradient_shard(
    p: NormalisedConvProblem, split: _sharding.Split, x: Array, dy: Array, w: Array, *v: Array
) -> list[Array]:
    if _whole(split):
        return [conv._summed(out, split, "n") for out in normalised_gradient(p, x, dy, w, *v)]
    scale, bias, mean, var = v
    (dw,) = _wgrad_shard(p, split, x, dy, *v)
    (da,) = conv._dgrad_shard(p.conv, split, dy, w)
    norm = _norm(p, x, want_dx=False)
    # Sums cross the mesh where images and pixels are split, by the batch-norm's names for these axes
    pixels = ["n", *map(_halo.name, range(p.nd))]
    of_norm = dict(zip(pixels, (name for name in batchnorm._axes(norm) if name != "c"), strict=True))
    of_norm = {of_norm[name]: axes for name, axes in split.items() if name in of_norm}
    images = x.shape[0] * jax.lax.psum(1, split.get("n", ()))  # p has a shard's, but all of the pixels
    whole = replace(norm, shape=(images, *p.x_shape[1:]))
    return [dw, *batchnorm._backward_shard(whole, norm, of_norm, x, da, scale, bias, mean, _rstd(p.norm, var))]


def _dx_shard(
    p: NormalisedConvProblem, split: _sharding.Split, x: Array, dy: Array, w: Array, *v: Array
) -> list[Array]:
    if _whole(split):
        return [normalised_dx(p, x, dy, w, *v)]
    (da,) = conv._dgrad_shard(p.conv, split, dy, w)
    return [_dx_of(p, x, da, *v)]


# (x, w, scale, bias, mean, var) -> y
normalised = _op.kernel(
    "conv_normalised",
    reference=_then_convolved,
    results=lambda p: [(p.y_shape, p.dtype)],
    wire=lambda p, plan: _wire(p, plan, "xw", "y"),
    batch=_by_instances(lambda: normalised, "xwpppp", "y"),
    partition=lambda p: conv._partition(p, "xwpppp", "y", "kc", _shard),
)
# (x, dy, scale, bias, mean, var) -> dw
normalised_wgrad = _op.kernel(
    "conv_normalised_wgrad",
    reference=_then_wgrad,
    results=lambda p: [(p.w_shape, p.dtype)],
    wire=lambda p, plan: _wire(p, plan, "xy", "w"),
    batch=_by_instances(lambda: normalised_wgrad, "xypppp", "w"),
    partition=lambda p: conv._partition(p, "xypppp", "w", "kc", _wgrad_shard),
)
# (x, dy, w, scale, bias, mean, var) -> dw, dscale, dbias
normalised_gradient = _op.kernel(
    "conv_normalised_gradient",
    reference=_then_gradient,
    results=lambda p: [(p.w_shape, p.dtype)] + [(p.norm.param_shape, p.norm.param_dtype)] * 2,
    wire=lambda p, plan: _wire(p, plan, "xyw", "wbb"),
    batch=_by_instances(lambda: normalised_gradient, "xywpppp", "wpp"),
    partition=lambda p: conv._partition(p, "xywpppp", "wpp", "kc", _gradient_shard),
    multiple_results=True,
)
# (x, dy, w, scale, bias, mean, var, dscale, dbias) -> dx, by sums over p.count elements a channel
normalised_dx = _op.kernel(
    "conv_normalised_dx",
    reference=_then_dx,
    results=lambda p: [(p.x_shape, p.dtype)],
    wire=lambda p, plan: _wire(p, plan, "xyw", "x", "bb"),
    batch=_by_instances(lambda: normalised_dx, "xywpppppp", "x"),
    partition=lambda p: conv._partition(p, "xywpppppp", "x", "kc", _dx_shard),
)
for _kernel in (normalised, normalised_wgrad, normalised_gradient, normalised_dx):
    _op.by_reference(_kernel)


# ----------------------------------------------------------------------------------------------------------------------
# Training. A function of (x, before's w?, scale, bias, running_mean, running_var, w), z what is normalised: x, or its
# convolution. -> y, new_mean, new_var, and where they are saved z (where it is not x), mean, var


def _split(p: BatchNormConvProblem, args: Sequence[Any]) -> tuple[list[Any], list[Any], Any]:
    """(x and before's w, scale to running_var, w)"""
    first = 1 if p.before is None else 2
    return list(args[:first]), list(args[first:-1]), args[-1]


def _run(p: BatchNormConvProblem, fused: bool, *args: Array) -> list[Array]:
    operands, (scale, bias, running_mean, running_var), w = _split(p, args)
    if p.before is not None and fused:
        z, mean, var = conv.statistics(p.before, *operands)
    else:
        z = operands[0] if p.before is None else conv.fprop(p.before, *operands)
        k, shift, var = batchnorm.moments(batchnorm._inner(p.norm), z)
        mean = k + shift
    y = normalised(p.normalised, z, w, scale, bias, mean, var)
    m = p.norm.momentum
    outs = [y, m * running_mean + (1 - m) * mean, m * running_var + (1 - m) * var]
    return outs + [*[z] * (p.before is not None), mean, var] * p.save


def _parts(p: BatchNormConvProblem, plan: _plan.Plan | None) -> Any:
    return functools.partial(_run, p, plan is not None and plan.kernel.startswith("statistics"))


def _results(p: BatchNormConvProblem) -> list[tuple[tuple[int, ...], str]]:
    parameter = (p.norm.param_shape, p.norm.param_dtype)
    z = [(p.norm.x_shape, p.norm.dtype)] * (p.before is not None)
    return [(p.conv.y_shape, p.conv.dtype), parameter, parameter] + [*z, parameter, parameter] * p.save


chain = _op.composite("batchnorm_conv", results=_results, parts=_parts)


def gradients_by_kernels(p: BatchNormConvProblem, x: Array, dy: Array, w: Array, *v: Array) -> list[Array]:
    """`gradients` by the two kernels that make a's gradient where they read dy."""
    q = p.normalised
    dw, *sums = normalised_gradient(q, x, dy, w, *v)
    return [dw, *sums, normalised_dx(replace(q, count=p.norm.reduced), x, dy, w, *v, *sums)]


def gradients_by_parts(p: BatchNormConvProblem, x: Array, dy: Array, w: Array, *v: Array) -> list[Array]:
    """`gradients` by a dgrad, a batch-norm's backward and a wgrad."""
    q = p.normalised
    scale, bias, mean, var = v
    da = conv.dgrad(p.conv, dy, w)
    kept = x, da, scale, bias, mean, _rstd(p.norm, var)
    dscale, dbias, dx = batchnorm.backward(replace(p.norm, want_dx=True, want_dresidual=False), *kept)
    return [normalised_wgrad(q, x, dy, *v), dscale, dbias, dx]


def _gradients_of(p: BatchNormConvProblem, plan: _plan.Plan | None) -> Any:
    fused = plan is not None and plan.kernel == "normalised"
    return functools.partial(gradients_by_kernels if fused else gradients_by_parts, p)


# (x, dy, w, scale, bias, mean, var) -> dw, dscale, dbias, dx: the backward pass of the batch-norm of x, which has these
# statistics, and of the convolution of its result
gradients = _op.composite(
    "batchnorm_conv_backward",
    results=lambda p: [
        (p.conv.w_shape, p.conv.dtype),
        *[(p.norm.param_shape, p.norm.param_dtype)] * 2,
        (p.norm.x_shape, p.norm.dtype),
    ],
    parts=_gradients_of,
)
_op.by_reference(gradients)


def _forward(p: BatchNormConvProblem, *args: Array) -> tuple[list[Array], Any]:
    """Residuals: what `before` reads, what is normalised, the parameters, w."""
    operands, (scale, bias, _, _), w = _split(p, args)
    outs = chain(p, *args)
    *z, mean, var = outs[3:]
    return outs, (operands if z else None, z[0] if z else operands[0], (scale, bias, mean, var), w)


def _backward(
    p: BatchNormConvProblem,
    residuals: Any,
    cotangents: Sequence[Array | None],
    want: Sequence[bool],
    addend: Array | None = None,  # to x's
) -> list[Array | None]:
    operands, z, (scale, bias, mean, var), w = residuals
    dy, d_new_mean, d_new_var, *dz_direct, d_mean, d_var = cotangents
    want_operands, want_norm, want_w = _split(p, want)
    rstd = _rstd(p.norm, var)
    d_rstd = None if d_var is None else d_var * (-2 / (rstd * rstd * rstd))
    da = dw = of_dy = None
    v = scale, bias, mean, var
    if dy is not None and any(want_operands) and want_norm[0] and want_norm[1] and want_w:
        dw, *of_dy = gradients(replace(p, before=None, save=False), z, dy, w, *v)
    else:
        if dy is not None and (any(want_operands) or want_norm[0] or want_norm[1]):
            da = conv.dgrad(p.conv, dy, w)
        if want_w:
            dw = jnp.zeros_like(w) if dy is None else normalised_wgrad(p.normalised, z, dy, *v)
    kept = z, scale, bias, mean, rstd, None
    cotangents = [da, d_new_mean, d_new_var, d_mean, d_rstd]
    dz, *rest = batchnorm.train_backward(p.norm, kept, cotangents, [any(want_operands), *want_norm], of_dy)
    if p.before is None:
        return [dz if addend is None else dz + addend, *rest, dw]
    if dz is not None and dz_direct[0] is not None:
        dz = dz + dz_direct[0]
    dx = conv.input_gradient(p.before, dz, operands[1], addend) if want_operands[0] else None
    dw_before = conv.wgrad(p.before, operands[0], dz) if want_operands[1] else None
    return [dx, dw_before, *rest, dw]


def _tangent(p: BatchNormConvProblem, residuals: Any, tangents: Sequence[Array | None]) -> list[Array]:
    operands, z, (scale, bias, mean, var), w = residuals
    t_operands, t_norm, tw = _split(p, tangents)
    if p.before is None:
        tz = t_operands[0]
    else:
        parts = [] if t_operands[0] is None else [conv.fprop(p.before, t_operands[0], operands[1])]
        parts += [] if t_operands[1] is None else [conv.fprop(p.before, operands[0], t_operands[1])]
        tz = sum(parts[1:], parts[0]) if parts else None
    rstd = _rstd(p.norm, var)
    kept = z, scale, bias, mean, rstd, None
    ta, t_new_mean, t_new_var, t_mean, t_rstd = batchnorm.norm_tangent(p.norm, kept, [tz, *t_norm])
    ty = conv.fprop(p.conv, ta, w)
    if tw is not None:
        ty = ty + normalised(p.normalised, z, tw, scale, bias, mean, var)
    saved = [] if p.before is None else [jnp.zeros_like(z) if tz is None else tz]
    return [ty, t_new_mean, t_new_var, *saved, t_mean, t_rstd * (-2 / (rstd * rstd * rstd))]


_RULES = _op.Rules(lambda p: replace(p, save=True), _forward, _backward, _tangent)
_op.fuse(chain, _RULES)
# (problem, x, w, ...) -> x, for its other users, and chain's results; of problems with a convolution before
fork = _op.fork(chain, chain, lambda p: (p.before.x_shape, p.before.dtype), _RULES)


def chosen(p: BatchNormConvProblem) -> _plan.Plan:
    """The plan of this process's device. The two calls have rules of their own, which keep the batch-norm's result for
    the weight gradient: so this choice is made when a program is traced."""
    return _plan.plan("batchnorm_conv", p, _plan.Device.default())


def trained(p: BatchNormConvProblem, *args: Array) -> list[Array]:
    """y, new_mean, new_var: of the composite where its plan is not two calls, else of these."""
    if chosen(p).kernel != "two":
        return chain(p, *args)
    operands, statistics, w = _split(p, args)
    if p.pair is None:
        a, new_mean, new_var, _, _ = batchnorm.train(p.norm, *operands, *statistics)
    else:
        a, new_mean, new_var = conv_batchnorm.pair(p.pair, *operands, *statistics)
    return [*conv._any(p.conv, a, w), new_mean, new_var]


# ----------------------------------------------------------------------------------------------------------------------
# The public function


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
    """Batch normalisation, its activation, and a convolution of the result, which no one else needs.

    Equivalent JAX code::

        a, running_mean, running_var = jaxconv.batchnorm(x, scale, bias, running_mean, running_var, training=training,
                                                         activation=activation, ...)
        y = jaxconv.conv2d(a, w, stride=stride, padding=padding, ...)     # conv1d, conv3d for other ranks of w

    with a, in x's dtype, padded by zeros. Where the convolution's kernel normalises what it reads (on Hopper depthwise
    3x3 of 16 bits before relu, relu6 and silu, where that was measured to be faster), a is never written: y and w's
    gradient are made of x, and x is all that is kept; nor is a's gradient, of which all other gradients are made where
    dy is read. Elsewhere these are the two calls above. `explain` says which, and why.

    Args:
      x, scale, bias, running_mean, running_var, training, momentum, epsilon, activation: see `batchnorm`; its channels
        are the convolution's.
      w, stride, padding, dilation, groups, layout, precision: see `conv2d` and `conv_batchnorm`.
      algorithm: forces one native algorithm of the convolution.
      implementation: see `conv2d`, for both; "native" also makes the convolution normalise what it reads where it can.

    Returns:
      (y, running mean, running variance); the statistics are unchanged when not training.

    Raises:
      TypeError, ValueError: as `conv2d` and `batchnorm` do.

    Differentiable in every array, to any order, in both modes.
    """
    name = "batchnorm_conv"
    x, w = _problem.as_array(name, "x", x), _problem.as_array(name, "w", w)
    arrays = batchnorm.parameters(name, x, scale, bias, running_mean, running_var)
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
        y, new_mean, new_var = trained(BatchNormConvProblem(norm, c), x, *statistics, w)
        return y, new_mean, new_var
    p = NormalisedConvProblem.of(norm, c)
    if not c.empty and _plan.plan(normalised.name, p, _plan.Device.default()).implementation == "native":
        return normalised(p, x, w, *statistics), *statistics[2:]
    (y,) = conv._any(c, batchnorm.infer(norm, x, *statistics), w)
    return y, *statistics[2:]

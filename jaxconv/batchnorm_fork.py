"""A batch-norm with relu the sums of whose gradient are made by the convolution behind it. `accelerate` finds the two;
there is no public function.

    y = relu(z),  z = (x - mean) * rstd * scale + bias + residual,  v = conv(y, w), and others read y

y goes to the others through the convolution (`_op.fork`), so its whole gradient is made in the convolution's dgrad,
whose epilogue can go back through the relu and sum up for the batch-norm. For that the batch-norm's derivative is cut
in two. By `opened` y has the tangent that x and the residual give it with the statistics held, before the relu,

    rstd * scale * tx + t_residual

and what the rest gives, ta + tb * xhat, it has as the tangents of two arrays of zeros, a and b (C,):

    ta = t_bias - scale * rstd * t_mean        tb = t_scale + scale * t_rstd / rstd

`fork` puts them together behind the relu: [y > 0] (ty + ta + tb * xhat). So what comes back to y is dz, and to a and b
come its sums, alone and with xhat, which are dbias and dscale. Both halves are functions of x: derivatives of any order
are those of the whole. Whether y > 0 is kept as a bit an element, which whoever writes y writes too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad

from jaxconv import _op, _plan, _sharding, batchnorm, reference
from jaxconv._activation import Activation
from jaxconv._problem import BatchNormProblem, ConvBatchNormProblem, ConvProblem
from jaxconv._types import Array

OPENED = 6  # signs, x, mean, rstd, a, b: what a fork takes besides y


# ----------------------------------------------------------------------------------------------------------------------
# The batch-norm: (x, scale, bias, mean, var, residual) -> y, its signs, a, b, and the statistics as x's own: mean, rstd


def _open(p: BatchNormProblem, x: Array, scale: Array, bias: Array, mean: Array, var: Array, *residual: Array) -> Any:
    zero, _ = _op.match_varying(jnp.zeros(*batchnorm._param(p)), mean)  # its tangent varies over a mesh as x does
    y, signs = batchnorm.signs(p, x, scale, bias, mean, var, *residual)
    return [y, signs, zero, zero, mean, jax.lax.rsqrt(var + p.epsilon)]


opened = _op.composite(
    "batchnorm_opened",
    results=lambda p: [*batchnorm.signs.results(p)] + [batchnorm._param(p)] * 4,
    parts=lambda p, plan: functools.partial(_open, p),
    batch=_op.batch_by_instances(lambda: opened),
)


def _bare(p: BatchNormProblem) -> BatchNormProblem:
    return dataclasses.replace(p, activation=Activation(), residual=False)


def _forward(p: BatchNormProblem, *args: Array) -> tuple[list[Array], Any]:
    x, scale, *_ = args
    outs = opened(p, *args)
    return outs, (x, scale, *outs[4:])


def _backward(
    p: BatchNormProblem, residuals: Any, cotangents: Sequence[Array | None], want: Sequence[bool]
) -> list[Array | None]:
    x, scale, mean, rstd = residuals
    zero = jnp.zeros(*batchnorm._param(p))
    dz, dbias, dscale, d_mean, d_rstd = cotangents
    dz = jnp.zeros_like(x) if dz is None else dz
    dbias, dscale = (zero if ct is None else ct for ct in (dbias, dscale))
    dx = None
    if want[0]:
        sums = dataclasses.replace(p, count=p.reduced, want_dresidual=False, dz=True)
        dx = batchnorm.dx_of_sums(sums, x, dz, scale, zero, mean, rstd, dscale, dbias)
        if d_mean is not None or d_rstd is not None:
            kept, given = (x, scale, zero, mean, rstd, None), [None, None, None, d_mean, d_rstd]
            extra, *_ = batchnorm.train_backward(_bare(p), kept, given, [True, *[False] * 4])
            dx = dx + extra
    grads = [dx, dscale, dbias, zero, zero, dz]
    return [grad if wanted else None for grad, wanted in zip(grads, want, strict=True)]


def _tangent(p: BatchNormProblem, residuals: Any, tangents: Sequence[Array | None]) -> list[Array]:
    x, scale, mean, rstd = residuals
    tx, tscale, tbias, _, _, tresidual = tangents
    wide, s = p.param_dtype, reference.channel_shape(p)
    zero = jnp.zeros(*batchnorm._param(p))
    kept = x, scale, zero, mean, rstd, None
    tmean, trstd = batchnorm.norm_tangent(_bare(p), kept, [tx, None, None, None, None])[3:]
    ty = jnp.zeros(p.x_shape, wide)
    if tx is not None:
        ty = ty + tx.astype(wide) * (rstd * scale).reshape(s)
    if tresidual is not None:
        ty = ty + tresidual.astype(wide)
    ta = -scale * rstd * tmean
    tb = scale * trstd / rstd
    return [
        ty.astype(x.dtype),
        ta if tbias is None else ta + tbias,
        tb if tscale is None else tb + tscale,
        tmean,
        trstd,
    ]


_op.fuse(opened, _op.Rules(lambda p: p, _forward, _backward, _tangent))


# ----------------------------------------------------------------------------------------------------------------------
# The convolution


def _put_together(
    axis: int, signs: Array, x: Array, mean: Array, rstd: Array, ty: Array | None, ta: Array | None, tb: Array | None
) -> Array:
    """y's whole tangent, of its own, a's and b's."""
    each = reference.along(axis, x, mean)
    total = jnp.zeros(x.shape, mean.dtype) if ty is None else ty.astype(mean.dtype)
    if ta is not None:
        total = total + each(ta)
    if tb is not None:
        total = total + (x.astype(mean.dtype) - each(mean)) * each(rstd) * each(tb)
    return jnp.where(reference.above(signs), total, 0).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class _Whole:
    """The problem of `whole`: y, and its channel axis, counted without those of instances."""

    shape: tuple[int, ...]
    dtype: str
    axis: int

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))} channel_axis={self.axis} {self.dtype}"


def _whole_backward(p: _Whole, residuals: Any, cotangents: Sequence[Array | None], want: Sequence[bool]) -> Any:
    dz, dscale, dbias = reference.through_relu(p.axis, cotangents[0], *residuals)
    grads = [dz, None, None, None, None, dbias, dscale]
    return [grad if wanted else None for grad, wanted in zip(grads, want, strict=True)]


def _whole_forward(p: _Whole, *args: Array) -> tuple[list[Array], Any]:
    return whole(p, *args), args[1:5]


def _whole_of_instances(p: _Whole, args: list[Array], dims: list[int | None]) -> tuple[list[Array], list[int]]:
    size = _op.batch_size(args, dims)
    fronted = [_op.to_front(a, d, size) for a, d in zip(args, dims, strict=True)]
    return whole(dataclasses.replace(p, shape=(size, *p.shape)), *fronted), [0]


# (y, signs, x, mean, rstd, a, b) -> y, with the tangent of all
whole = _op.composite(
    "batchnorm_whole",
    results=lambda p: [(p.shape, p.dtype)],
    parts=lambda p, plan: lambda y, *opened: [y],
    batch=_whole_of_instances,
)
_op.fuse(
    whole,
    _op.Rules(
        lambda p: p,
        _whole_forward,
        _whole_backward,
        lambda p, residuals, tangents: [_put_together(p.axis, *residuals, tangents[0], *tangents[5:])],
    ),
)


def fork(
    made: _op.Composite,
    run: Callable[..., list[Array]],
    argument: Callable[[Any], tuple[tuple[int, ...], str, int]],  # problem -> (shape, dtype, channel axis) of y
    rules: _op.Rules,  # made's; the backward also takes `addend`, and `norm` as `conv.input_gradient` does
) -> Callable[..., tuple[Array, list[Array]]]:
    """`_op.fork` of (problem, *args, *opened): the first of args is a y, and the rest of opened what came with it."""

    def through(problem: Any, y: Array, *given: Array) -> Array:
        return whole(_Whole(*argument(problem)), y, *given)[0]

    def meaning(*args: Array, problem: Any) -> list[Array]:
        y = through(problem, args[0], *args[-OPENED:])
        return [y, *run(problem, y, *args[1:-OPENED])]

    def forward(problem: Any, *args: Array) -> tuple[list[Array], Any]:
        # What is kept is the y that has the whole tangent: for derivatives of the derivative.
        y = through(problem, args[0], *args[-OPENED:])
        outs, residuals = rules.forward(problem, y, *args[1:-OPENED])
        return [y, *outs], (residuals, args[-OPENED:-2])

    def backward(problem: Any, residuals: Any, given: Sequence[Array | None], want: Sequence[bool]) -> Any:
        passed, *rest = given
        own, norm = residuals
        if all(ct is None for ct in rest):
            found = reference.through_relu(argument(problem)[2], passed, *norm)
            grads: list[Any] = [None] * (len(want) - OPENED - 1)
        else:
            found, *grads = rules.backward(problem, own, rest, want[:-OPENED], addend=passed, norm=norm)
        dz, dscale, dbias = found if found is not None else (None, None, None)
        return [dz, *grads, None, None, None, None, dbias, dscale]

    def tangent(problem: Any, residuals: Any, tangents: Sequence[Array | None]) -> list[Array]:
        own, norm = residuals
        ty = _put_together(argument(problem)[2], *norm, tangents[0], *tangents[-2:])
        return [ty, *rules.tangent(problem, own, [ty, *tangents[1:-OPENED]])]

    primitive = Primitive(f"{made.primitive.name}_fork_opened")
    forked = _op.Fork(made, lambda p: [argument(p)[:2], *made.results(p)], primitive)
    _op._define(primitive, forked.results, meaning)
    _op.fuse(forked, _op.Rules(rules.saving, forward, backward, tangent))
    jvp = ad.primitive_jvps[primitive]

    def jvp_of_fork(primals: Sequence[Array], tangents: Sequence[Any], *, problem: Any) -> Any:
        if type(tangents[0]) is ad.Zero:  # nobody asks for the argument's gradient
            return _op._jvp_of_varied(functools.partial(meaning, problem=problem), primals, tangents)
        # a and b are zero: x and its statistics change nothing but what multiplies their tangents.
        held = [ad.Zero(jax.typeof(v)) for v in primals[-OPENED:-2]]
        return jvp(primals, [*tangents[:-OPENED], *held, *tangents[-2:]], problem=problem)

    ad.primitive_jvps[primitive] = jvp_of_fork

    def call(problem: Any, *args: Array) -> tuple[Array, list[Array]]:
        # As `_op.fork`: where conversions of JAX's are in between, the two halves meet before the convolution.
        varying = _op.match_varying(*args)
        same = varying[0] is args[0] and _sharding.explicit_mesh([jax.typeof(a) for a in args]) is None
        y, *outs = primitive.bind(*varying, problem=problem) if same else meaning(*args, problem=problem)
        return y, outs

    return call


# ----------------------------------------------------------------------------------------------------------------------
# For accelerate


def problem(
    dtype: str, shape: tuple[int, ...], channel_axis: int, epsilon: float, activation: Activation
) -> BatchNormProblem:
    """Of x and the residual of that shape."""
    name = "batchnorm_opened"
    return BatchNormProblem(name, dtype, shape, channel_axis, True, 0.0, epsilon, activation, residual=True)


def open_up(
    p: BatchNormProblem,
    x: Array,
    scale: Array,
    bias: Array,
    mean: Array,  # x's own
    var: Array,
    residual: Array,
) -> tuple[Array, list[Array]]:
    """y, and what a fork of it takes besides. x's gradient is complete: nothing more comes through the statistics."""
    stop = jax.lax.stop_gradient
    y, signs, a, b, mean, rstd = opened(p, x, scale, bias, stop(mean), stop(var), residual)
    return y, [signs, x, mean, rstd, a, b]


def takes_sums(before: ConvProblem, p: BatchNormProblem, after: ConvProblem) -> bool:
    """Whether this process's device makes the statistics of `before`'s result in its epilogue, and the sums of the
    gradient of its batch-norm `p` in `after`'s dgrad. Elsewhere the batch-norm has a rule of its own: so this choice is
    made when a program is traced."""
    device = _plan.Device.default()
    if p.activation.name != "relu" or _plan.plan("conv_dgrad_sums", after, device).implementation != "native":
        return False
    return _plan.plan("conv_batchnorm", ConvBatchNormProblem(before, _bare(p)), device).kernel == "statistics"

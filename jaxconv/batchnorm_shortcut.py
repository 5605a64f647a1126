"""Two batch-norms that an addition joins, as a residual block's last one and its shortcut's: a composite with its
rules, and the kernel of its backward pass. `accelerate` finds them; there is no public function.

    y = f(z),  z = (x - mean) * rstd * scale + bias + (r - mean_r) * rstd_r * scale_r + bias_r

by the statistics of x and r, which are given. Forward that is one pass, XLA's. Backward it is two walks over x, dy and
r, where the two batch-norms' own backward passes write and read the gradient of the shortcut's result between them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxconv import _op, _plan, _sharding, batchnorm, reference
from jaxconv._activation import Activation, activate_tangent
from jaxconv._problem import BatchNormProblem
from jaxconv._types import Array


def _shard(whole: BatchNormProblem, p: BatchNormProblem, split: _sharding.Split, *args: Array) -> list[Array]:
    mesh_axes = batchnorm._reduced_mesh_axes(split)
    if not mesh_axes:
        return gradients(p, *args)
    inside = batchnorm._inside(whole, p, split)
    if inside is not None:  # x and r too: a NaN times a dy of zero is NaN
        args = tuple(jnp.where(inside, a, 0) if i in (0, 1, 6) else a for i, a in enumerate(args))
    total = functools.partial(jax.lax.psum, axis_name=mesh_axes)
    return reference.batchnorm_shortcut_backward(p, *args, total=total, count=whole.reduced)


def _batch(p: BatchNormProblem, args: list[Array], dims: list[int | None]) -> tuple[list[Array], list[int]]:
    """Instances have sums of their own, which the kernel has not."""
    outs = jax.vmap(functools.partial(reference.batchnorm_shortcut_backward, p), in_axes=tuple(dims))(*args)
    return outs, [0] * len(outs)


# (x, dy, scale, bias, mean, rstd, r, scale_r, bias_r, mean_r, rstd_r) -> dscale, dbias, which is dbias_r too, dscale_r,
# dx, dr, of x and r with these statistics
gradients = _op.kernel(
    "batchnorm_shortcut_backward",
    reference=reference.batchnorm_shortcut_backward,
    results=lambda p: [batchnorm._param(p)] * 3 + [batchnorm._x(p)] * 2,
    wire=lambda p, plan: batchnorm._wire(p, 11, 5),
    batch=_batch,
    partition=lambda p: batchnorm._partition(p, "xxppppxpppp", "pppxx", _shard),
    multiple_results=True,
)
_op.by_reference(gradients)

# (x, scale, bias, mean, rstd, r, scale_r, bias_r, mean_r, rstd_r) -> y, and the statistics once more: mean, rstd,
# mean_r, rstd_r. They are x's and r's own, so that what depends on them depends on x and r, and nothing on the arrays
# they came in.
joined = _op.composite(
    "batchnorm_shortcut",
    results=lambda p: [batchnorm._x(p)] + [batchnorm._param(p)] * 4,
    parts=lambda p, plan: functools.partial(reference.batchnorm_shortcut, p),
    batch=_op.batch_by_instances(lambda: joined),
)


def _forward(p: BatchNormProblem, *args: Array) -> tuple[list[Array], Any]:
    x, scale, bias, _, _, r, scale_r, bias_r, _, _ = args
    outs = joined(p, *args)
    _, mean, rstd, mean_r, rstd_r = outs
    return outs, (x, scale, bias, mean, rstd, r, scale_r, bias_r, mean_r, rstd_r)


def _bare(p: BatchNormProblem, **fields: Any) -> BatchNormProblem:
    return dataclasses.replace(p, activation=Activation(), **fields)


def _backward(
    p: BatchNormProblem, residuals: Any, cotangents: Sequence[Array | None], want: Sequence[bool]
) -> list[Array | None]:
    dy, *of_statistics = cotangents
    x, *rest = residuals
    zero, grads = jnp.zeros(*batchnorm._param(p)), [jnp.zeros_like(a) for a in residuals]
    if dy is not None:
        dscale, dbias, dscale_r, dx, dr = gradients(p, x, dy, *rest)
        grads = [dx, dscale, dbias, zero, zero, dr, dscale_r, dbias, zero, zero]
    for i, given in ((0, of_statistics[:2]), (5, of_statistics[2:])):
        if want[i] and any(ct is not None for ct in given):
            norm = (*residuals[i : i + 5], None)
            extra, *_ = batchnorm.train_backward(_bare(p), norm, [None, None, None, *given], [True, *[False] * 4])
            grads[i] = grads[i] + extra
    return [grad if wanted else None for grad, wanted in zip(grads, want, strict=True)]


def _tangent(p: BatchNormProblem, residuals: Any, tangents: Sequence[Array | None]) -> list[Array]:
    x, scale, bias, mean, rstd, r, scale_r, bias_r, mean_r, rstd_r = residuals
    tx, tscale, tbias, _, _, tr, tscale_r, tbias_r, _, _ = tangents
    # In the parameters' dtype, so that the sum is rounded once.
    wide = _bare(p, dtype=p.param_dtype)
    x, r = x.astype(wide.dtype), r.astype(wide.dtype)
    norm, norm_r = (x, scale, bias, mean, rstd), (r, scale_r, bias_r, mean_r, rstd_r)
    tz, _, _, *t = batchnorm.norm_tangent(wide, (*norm, None), [tx, tscale, tbias, None, None])
    tz_r, _, _, *t_r = batchnorm.norm_tangent(wide, (*norm_r, None), [tr, tscale_r, tbias_r, None, None])
    z, *_ = reference.batchnorm_shortcut(wide, *norm, *norm_r)
    return [activate_tangent(p.activation, z, tz + tz_r).astype(p.dtype), *t, *t_r]


_op.fuse(joined, _op.Rules(lambda p: p, _forward, _backward, _tangent))


# ----------------------------------------------------------------------------------------------------------------------
# For accelerate


def problem(dtype: str, shape: tuple[int, ...], channel_axis: int, activation: Activation) -> BatchNormProblem:
    """Of x and r of that shape. The rules take rstd, which holds the epsilons."""
    return BatchNormProblem("batchnorm_shortcut", dtype, shape, channel_axis, True, 0.0, 0.0, activation)


def takes_both(p: BatchNormProblem) -> bool:
    """Whether this process's device takes the two as one. Apart they have rules of their own: so this choice is made
    when a program is traced."""
    return _plan.plan("batchnorm_shortcut", p, _plan.Device.default()).kernel == "joined"


def join(
    p: BatchNormProblem,
    *norms: Array,  # (x, scale, bias, mean, rstd), by x's own mean and variance, and as many of r
) -> Array:
    """y. The gradients of x and r are complete: nothing more comes to them through the statistics."""
    stop = jax.lax.stop_gradient
    return joined(p, *(stop(a) if i % 5 > 2 else a for i, a in enumerate(norms)))[0]

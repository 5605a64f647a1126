"""Convolutions that normalise what they read: five kernels, and the backward pass that two of them are.

The batch-norm's result is in no memory then, forward or backward, and neither is its gradient.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxconv import _plan
from jaxconv._core import halo, primitives, sharding
from jaxconv._core.types import (
    Array,
)
from jaxconv._ops import batchnorm, conv, sharded_moments
from jaxconv._problem import BatchNormConvProblem, BatchNormProblem, NormalisedConvProblem

replace = dataclasses.replace


# ----------------------------------------------------------------------------------------------------------------------
# The kernels: y, alone or with its statistics, and dw, of a = activation(batch-norm of x by known statistics); and the
# backward pass of both, without a's gradient


def _attrs(p: NormalisedConvProblem, plan: _plan.Plan) -> dict[str, Any]:
    return conv.window(p, plan) | batchnorm.attrs(p.norm, plan)


def _flops(p: NormalisedConvProblem) -> int:
    return p.flops + batchnorm.infer.flops(p.norm)


def _normalise(p: NormalisedConvProblem, x: Array, *v: Array) -> Array:
    """a, of all of x or of a shard."""
    return batchnorm.infer(replace(p.norm, shape=tuple(x.shape)), x, *v)


def _then_convolved(p: NormalisedConvProblem, x: Array, w: Array, *v: Array) -> list[Array]:
    """normalised as two, each by a plan of its own."""
    return [conv.fprop(p.conv, _normalise(p, x, *v), w)]


def _then_statistics(p: NormalisedConvProblem, x: Array, w: Array, *v: Array) -> list[Array]:
    return list(conv.statistics(p.conv, _normalise(p, x, *v), w))


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


def _whole(split: sharding.Split) -> bool:
    """Whether images and groups alone are split: rows that neighbours send are padded with zeros, which x is not."""
    return set(split) <= {"n", "g"}


def _shard(p: NormalisedConvProblem, split: sharding.Split, x: Array, w: Array, *v: Array) -> list[Array]:
    if _whole(split):
        return [normalised(p, x, w, *v)]
    return conv.fprop_shard(p.conv, split, _normalise(p, x, *v), w)


def _statistics_shard(p: NormalisedConvProblem, split: sharding.Split, x: Array, w: Array, *v: Array) -> list[Array]:
    """Each shard's moments, merged, where images alone are split."""
    if not set(split) <= {"n"}:
        return conv.statistics_shard(p.conv, split, _normalise(p, x, *v), w)
    y, mean, var = normalised_statistics(p, x, w, *v)
    mesh_axes = split.get("n", ())
    if not mesh_axes:
        return [y, mean, var]
    moments = [mean, jnp.zeros_like(mean), var]
    return [y, *sharded_moments.merged(moments, mesh_axes, p.batch * math.prod(p.out_spatial))]


def _wgrad_shard(p: NormalisedConvProblem, split: sharding.Split, x: Array, dy: Array, *v: Array) -> list[Array]:
    if _whole(split):
        return [conv.summed(normalised_wgrad(p, x, dy, *v), split, "n")]
    return conv.wgrad_shard(p.conv, split, _normalise(p, x, *v), dy)


def _gradient_shard(
    p: NormalisedConvProblem, split: sharding.Split, x: Array, dy: Array, w: Array, *v: Array
) -> list[Array]:
    if _whole(split):
        return [conv.summed(out, split, "n") for out in normalised_gradient(p, x, dy, w, *v)]
    scale, bias, mean, var = v
    (dw,) = _wgrad_shard(p, split, x, dy, *v)
    (da,) = conv.dgrad_shard(p.conv, split, dy, w)
    norm = _norm(p, x, want_dx=False)
    # Sums cross the mesh where images and pixels are split, by the batch-norm's names for these axes
    pixels = ["n", *map(halo.name, range(p.nd))]
    of_norm = dict(zip(pixels, (name for name in batchnorm.axis_names(norm) if name != "c"), strict=True))
    of_norm = {of_norm[name]: axes for name, axes in split.items() if name in of_norm}
    images = x.shape[0] * jax.lax.psum(1, split.get("n", ()))  # p has a shard's, but all of the pixels
    whole = replace(norm, shape=(images, *p.x_shape[1:]))
    return [dw, *batchnorm.backward_shard(whole, norm, of_norm, x, da, scale, bias, mean, _rstd(p.norm, var))]


def _dx_shard(p: NormalisedConvProblem, split: sharding.Split, x: Array, dy: Array, w: Array, *v: Array) -> list[Array]:
    if _whole(split):
        return [normalised_dx(p, x, dy, w, *v)]
    (da,) = conv.dgrad_shard(p.conv, split, dy, w)
    return [_dx_of(p, x, da, *v)]


FAMILY = replace(conv.CONV, attrs=_attrs)

normalised = primitives.kernel(
    "conv_normalised",
    "x w scale bias mean var -> y",
    FAMILY,
    reference=_then_convolved,
    flops=_flops,
    channels="kc",
    run=_shard,
)
# new_mean, new_var: the mean and biased variance of y's channels
normalised_statistics = primitives.kernel(
    "conv_normalised_statistics",
    "x w scale bias mean var -> y new_mean new_var",
    replace(FAMILY, kinds=conv.KINDS | {"s": "new_mean new_var"}),
    reference=_then_statistics,
    flops=lambda p: _flops(p) + 4 * math.prod(p.y_shape),
    channels="kc",
    run=_statistics_shard,
)
normalised_wgrad = primitives.kernel(
    "conv_normalised_wgrad",
    "x dy scale bias mean var -> dw",
    FAMILY,
    reference=_then_wgrad,
    flops=_flops,
    channels="kc",
    run=_wgrad_shard,
)
normalised_gradient = primitives.kernel(
    "conv_normalised_gradient",
    "x dy w scale bias mean var -> dw dscale dbias",
    FAMILY,
    reference=_then_gradient,
    flops=_flops,
    channels="kc",
    run=_gradient_shard,
)
# By sums over p.count elements a channel
normalised_dx = primitives.kernel(
    "conv_normalised_dx",
    "x dy w scale bias mean var dscale dbias -> dx",
    FAMILY,
    reference=_then_dx,
    flops=_flops,
    also="count",
    channels="kc",
    run=_dx_shard,
)
for _kernel in (normalised, normalised_statistics, normalised_wgrad, normalised_gradient, normalised_dx):
    primitives.by_reference(_kernel)


def gradients_by_kernels(p: BatchNormConvProblem, x: Array, dy: Array, w: Array, *v: Array) -> list[Array]:
    """(x, dy, w, scale, bias, mean, var) -> dw, dscale, dbias, dx: the backward pass of the batch-norm of x, which has
    these statistics, and of the convolution of its result, by the two kernels that make a's gradient where they read
    dy."""
    q = p.normalised
    dw, *sums = normalised_gradient(q, x, dy, w, *v)
    return [dw, *sums, normalised_dx(replace(q, count=p.norm.reduced), x, dy, w, *v, *sums)]


def gradients_by_parts(p: BatchNormConvProblem, x: Array, dy: Array, w: Array, *v: Array) -> list[Array]:
    """The same by a dgrad, a batch-norm's backward and a weight gradient."""
    q = p.normalised
    scale, bias, mean, var = v
    da = conv.dgrad(p.conv, dy, w)
    kept = x, da, scale, bias, mean, _rstd(p.norm, var)
    dscale, dbias, dx = batchnorm.backward(replace(p.norm, want_dx=True, want_dresidual=False), *kept)
    return [normalised_wgrad(q, x, dy, *v), dscale, dbias, dx]

"""Group-norm: the public function; the kernels and differentiation rules of group-norm and layer-norm."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxconv import _plan, _problem
from jaxconv._core import compat, primitives, sharding
from jaxconv._core.activations import activate_tangent
from jaxconv._core.types import Array, GroupNormAlgorithm, Implementation, Operand, ToActivation
from jaxconv._ops import reference
from jaxconv._problem import GroupNormProblem

replace = dataclasses.replace


def _array(p: GroupNormProblem, kind: str) -> primitives.Typed:
    """x is an array like x, p one of parameters, g numbers for each group."""
    if kind == "x":
        return p.x_shape, p.dtype
    return p.param_shape if kind == "p" else p.group_shape, p.param_dtype


def _attrs(p: GroupNormProblem, plan: _plan.Plan) -> dict[str, Any]:
    return {
        "norm": {
            "groups": np.int64(0 if p.rows else p.groups),
            "batched": np.int64(p.batch is not None),
            "epsilon": np.float64(p.epsilon),
            "activation": p.activation.name,
            "slope": np.float64(p.activation.slope),
        }
    }


def _partition(p: GroupNormProblem, operands: Sequence[str], results: Sequence[str]) -> sharding.Partition:
    """Images and instances may be split; with `rows` all but the channels."""
    lead = "v " if p.batch is not None else ""
    axes = ["n", *(f"d{axis}" for axis in range(1, len(p.shape) - 1))]
    pixels = " ".join(axes)
    names = {"x": f"{lead}{pixels} c", "p": f"{lead}c", "g": f"{lead}{pixels}" if p.rows else f"{lead}n g"}
    split = axes if p.rows else axes[:1]

    def local(parts: Any) -> GroupNormProblem:
        batch = None if p.batch is None else p.batch // parts["v"]
        divided = (extent // parts[axis] for axis, extent in zip(split, p.shape, strict=False))
        return replace(p, shape=(*divided, *p.shape[len(split) :]), batch=batch)

    return sharding.Partition(
        [names[o] for o in operands], [names[r] for r in results], [*(["v"] if lead else []), *split], local
    )


def _batch(op: primitives.Kernel, p: GroupNormProblem, args: list[Array], dims: list[int | None]) -> primitives.Batched:
    """Instances; of layer-norms that share scale and bias rows more."""
    if not p.rows or any(dim is not None for dim in dims[1:]) or op is backward:
        return primitives.by_instances(op, p, args, dims)
    # Behind the instances that there are, which have a scale each
    at = len(p.lead)
    x = jnp.moveaxis(args[0], dims[0], at)
    return op(replace(p, shape=x.shape[at:]), x, *args[1:]), [at] * 3


def _flops(each: int) -> Any:
    """`each` an element of x, and those of what follows."""
    return lambda p: p.size * (each + (p.activation.name != "none"))


# ----------------------------------------------------------------------------------------------------------------------
# The kernels


FAMILY = primitives.Family(
    {"x": "x y dx dy", "p": "scale bias dscale dbias", "g": "mean rstd"}, _array, _attrs, _partition, batch=_batch
)

norm = primitives.kernel(
    "groupnorm",
    "x scale bias -> y mean rstd",
    FAMILY,
    reference=reference.groupnorm,
    flops=_flops(8),
)
# Each sum also of the group, each element by its channel's scale
backward = primitives.kernel(
    "groupnorm_backward",
    "x dy scale bias mean rstd -> dscale dbias dx?",
    FAMILY,
    reference=reference.groupnorm_backward,
    flops=_flops(11),
    also="want_dx",
)
primitives.by_reference(backward)
# jet has no rule for a formula that waits for the platform.
compat.seen_by_jet(norm.primitive, lambda problem: functools.partial(reference.groupnorm, problem, anywhere=True))


def _forward(p: GroupNormProblem, x: Array, scale: Array, bias: Array) -> tuple[list[Array], Any]:
    outs = norm(p, x, scale, bias)
    _, mean, rstd = outs
    return outs, (x, scale, bias, mean, rstd)


def _backward(
    p: GroupNormProblem, residuals: Any, cotangents: Sequence[Array | None], want: Sequence[bool]
) -> list[Array | None]:
    """The kernel for the cotangent of y; those of the statistics, where there are any, are added to dx."""
    x, scale, bias, mean, rstd = residuals
    dy, d_mean, d_rstd = cotangents
    want_x, want_scale, want_bias = want
    dx = dscale = dbias = None
    if dy is not None:
        dscale, dbias, *big = backward(replace(p, want_dx=want_x), x, dy, scale, bias, mean, rstd)
        dx = big[0] if want_x else None
    if want_x and (d_mean is not None or d_rstd is not None):
        extra = jnp.zeros_like(x, p.param_dtype)  # split over a mesh as x is
        if d_mean is not None:
            extra = extra + reference.of_groups(p, d_mean / p.reduced)
        if d_rstd is not None:  # d rstd / d x = -rstd^3 (x - mean) / n
            slope = reference.of_groups(p, -rstd * rstd * rstd * d_rstd / p.reduced)
            extra = extra + reference.centred(p, x, mean) * slope
        dx = extra.astype(x.dtype) if dx is None else (dx.astype(p.param_dtype) + extra).astype(x.dtype)
    return [dx if want_x else None, dscale if want_scale else None, dbias if want_bias else None]


def _tangent(p: GroupNormProblem, residuals: Any, tangents: Sequence[Array | None]) -> list[Array]:
    x, scale, bias, mean, rstd = residuals
    tx, tscale, tbias = tangents
    groups, channels = (lambda a: reference.of_groups(p, a)), (lambda a: reference.of_channels(p, a))
    centred = reference.centred(p, x, mean)
    tmean = tvar = jnp.zeros(p.group_shape, p.param_dtype)
    tz = jnp.zeros(p.x_shape, p.param_dtype)
    if tx is not None:
        tx = tx.astype(p.param_dtype)
        tmean = reference.group_means(p, reference.of_images(p, tx))
        tvar = 2 * reference.group_means(p, reference.of_images(p, centred * tx))
        tz = tz + (tx - groups(tmean)) * (groups(rstd) * channels(scale))
    trstd = -0.5 * rstd * rstd * rstd * tvar
    tz = tz + centred * (groups(trstd) * channels(scale))
    if tscale is not None:
        tz = tz + centred * (groups(rstd) * channels(tscale))
    if tbias is not None:
        tz = tz + channels(tbias)
    if p.activation.residual:
        z = centred * (groups(rstd) * channels(scale)) + channels(bias)
        tz = activate_tangent(p.activation, z, tz)
    return [tz.astype(x.dtype), tmean, trstd]


primitives.fuse(norm, primitives.Rules(lambda p: p, _forward, _backward, _tangent))


# ----------------------------------------------------------------------------------------------------------------------
# The public function


def groupnorm(
    x: Operand,  # (N, ..., C)
    scale: Operand | None = None,  # (C,)
    bias: Operand | None = None,  # (C,)
    *,
    groups: int,
    epsilon: float = 1e-6,
    activation: ToActivation = None,
    algorithm: GroupNormAlgorithm | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Group normalisation with activation, channels last.

    Equivalent JAX code, in float32 (float64 for float64 x)::

        n, *spatial, c = x.shape
        xg = x.reshape(n, -1, groups, c // groups)
        mean, var = jnp.mean(xg, (1, 3), keepdims=True), jnp.var(xg, (1, 3), keepdims=True)  # biased
        z = ((xg - mean) / jnp.sqrt(var + epsilon)).reshape(x.shape) * scale + bias
        y = activation(z)

    Example::

        x = jnp.ones((8, 16, 16, 64))
        y = jaxconv.groupnorm(x, jnp.ones(64), jnp.zeros(64), groups=32, activation="silu")

    Args:
      x: (N, ..., C), at least two dimensions; float32, bfloat16, float16 or float64.
      scale, bias: (C,), float32 for 16-bit x, else of x's dtype. A narrower dtype is cast. None stands for ones or
        zeros.
      groups: divides C. With one group this is layer-norm over pixels and channels, with C groups instance-norm.
      epsilon: added to the variance.
      activation: see `conv2d`.
      algorithm: forces one native algorithm. "two_read": one launch sums x up, another normalises it. "interleaved":
        one launch does both, so that x comes from the L2 cache the second time. "resident": one launch reads x once,
        and keeps whole groups of an image in the shared memory of a block, or on Hopper of a cluster. The last two are
        for CUDA and channels in whole vectors of 16 bytes; "resident" also needs 512 bytes of channels to hold whole
        groups.
      implementation: see `conv2d`.

    Returns:
      y of x's shape and dtype, rounded once.

    Raises:
      TypeError, ValueError: when the arguments do not fit together (at trace time), naming the argument, what it got
        and what was expected; ValueError when a forced implementation or algorithm cannot run, with the reason.

    The variance is computed about a sample of the group, never as E[x^2] - E[x]^2: it has float32 accuracy even if the
    mean is 10,000 times the deviation. Differentiable in every array, to any order, in both modes; the backward pass
    keeps x, mean and rstd, and recomputes the rest. Sums over images are in a fixed order. Source: Wu and He 2018
    (arXiv:1803.08494).
    """
    name = "groupnorm"
    x = _problem.as_array(name, "x", x)
    scale, bias = (
        None if value is None else _problem.as_parameter(name, argument, value, x)
        for argument, value in (("scale", scale), ("bias", bias))
    )
    p = GroupNormProblem.infer(
        name,
        x,
        scale,
        bias,
        groups=groups,
        epsilon=epsilon,
        activation=activation,
        algorithm=algorithm,
        implementation=implementation,
    )
    scale = jnp.ones(p.param_shape, p.param_dtype) if scale is None else scale
    bias = jnp.zeros(p.param_shape, p.param_dtype) if bias is None else bias
    y, _, _ = norm(p, x, scale, bias)
    return y

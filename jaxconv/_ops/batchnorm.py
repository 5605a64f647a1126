"""Batch-norm: the public function, its kernels and its differentiation rules."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxconv import _plan, _problem
from jaxconv._core import primitives, sharding
from jaxconv._core.activations import Activation, activate_tangent
from jaxconv._core.types import Array, BatchNormAlgorithm, Implementation, Operand, ToActivation
from jaxconv._ops import reference, sharded_moments
from jaxconv._problem import BatchNormProblem

replace = dataclasses.replace


def _array(p: BatchNormProblem, kind: str) -> primitives.Typed:
    """x is an array like x, e a bit for each element of a channels-last x, all else like parameters."""
    if kind == "e":
        return (*p.x_shape[:-1], p.channels // 8), "uint8"
    return (p.x_shape, p.dtype) if kind == "x" else (p.param_shape, p.param_dtype)


def attrs(p: BatchNormProblem, plan: _plan.Plan) -> dict[str, Any]:
    return {
        "norm": {
            "channel_axis": np.int64(len(p.lead) + p.channel_axis),
            "batched": np.int64(p.batch is not None),
            "momentum": np.float64(p.momentum),
            "epsilon": np.float64(p.epsilon),
            "activation": p.activation.name,
            "slope": np.float64(p.activation.slope),
            "residual": np.int64(p.residual),
        }
    }


def _flops(each: int) -> Any:
    """`each` an element of x, and those of what follows."""
    return lambda p: p.size * (each + p.residual + (p.activation.name != "none"))


# ----------------------------------------------------------------------------------------------------------------------
# Partitioning: every axis may be split. Where a reduced one is, the statistics and sums cross the mesh, once.


def _partition(
    p: BatchNormProblem, operands: Sequence[str], results: Sequence[str], run: Any = None
) -> sharding.Partition:
    lead = "v " if p.batch is not None else ""
    pixels = axis_names(p)
    names = {"x": lead + " ".join(pixels), "e": lead + " ".join([*pixels[:-1], "e"])}

    def local(parts: Any) -> BatchNormProblem:
        shape = tuple(-(-extent // parts.get(name, 1)) for name, extent in zip(pixels, p.shape, strict=True))
        return replace(p, shape=shape, batch=None if p.batch is None else p.batch // parts["v"])

    return sharding.Partition(
        [names.get(o, lead + "c") for o in operands],
        [names.get(r, lead + "c") for r in results],
        [*(["v"] if lead else []), *(pixels[:-1] if "e" in results else pixels)],  # of eights of channels whole ones
        local,
        run=functools.partial(run, p) if run else None,
        uneven=[name for name in pixels[1:] if name != "c"],  # not of images, nor where axis 0 is channels
        always=bool(run),
    )


def axis_names(p: BatchNormProblem) -> list[str]:
    """The name of each axis of x."""
    names = [f"d{axis}" for axis in range(len(p.shape))]
    names[p.channel_axis] = "c"
    return names


def _inside(whole: BatchNormProblem, p: BatchNormProblem, split: sharding.Split) -> Array | None:
    """Which elements of a shard of x (of `p`) are x's own; None where all are."""
    parts = [
        sharding.inside(p.x_shape, len(p.lead) + axis, whole.shape[axis], split[name])
        for axis, name in enumerate(axis_names(p))
        if name in split
    ]
    parts = [part for part in parts if part is not None]
    return functools.reduce(jnp.logical_and, parts) if parts else None


def _reduced_mesh_axes(split: sharding.Split) -> tuple[str, ...]:
    return tuple(a for name, axes in split.items() if name not in ("v", "c") for a in axes)


def inner(p: BatchNormProblem) -> BatchNormProblem:
    """The problem for a kernel that is a part of what the user asked for: an algorithm is that of the whole."""
    return p if p.algorithm is None else replace(p, algorithm=None, implementation="native")


def _train_shard(
    whole: BatchNormProblem, p: BatchNormProblem, split: sharding.Split, x: Array, *rest: Array
) -> list[Array]:
    """Local statistics, merged by Chan's formula, then the normalisation alone."""
    mesh_axes = _reduced_mesh_axes(split)
    if not mesh_axes:
        return train(p, x, *rest)
    scale, bias, running_mean, running_var, *residual = rest
    mean, var = _merged_moments(whole, p, split, x, mesh_axes)
    return train_with(p, x, scale, bias, running_mean, running_var, mean, var, *residual)


def train_with(p: BatchNormProblem, x, scale, bias, running_mean, running_var, mean, var, *residual) -> list[Array]:
    """train's results for known statistics."""
    m = p.momentum
    return [
        infer(inner(p), x, scale, bias, mean, var, *residual),
        m * running_mean + (1 - m) * mean,
        m * running_var + (1 - m) * var,
        mean,
        jax.lax.rsqrt(var + p.epsilon),
    ]


def _moments_shard(whole: BatchNormProblem, p: BatchNormProblem, split: sharding.Split, x: Array) -> list[Array]:
    """Those of the whole."""
    mesh_axes = _reduced_mesh_axes(split)
    if not mesh_axes:
        return moments(p, x)
    mean, var = _merged_moments(whole, p, split, x, mesh_axes)
    return [mean, jnp.zeros_like(mean), var]


def _merged_moments(
    whole: BatchNormProblem, p: BatchNormProblem, split: sharding.Split, x: Array, mesh_axes: tuple[str, ...]
) -> tuple[Array, Array]:
    inside = _inside(whole, p, split)
    own = moments(inner(p), x) if inside is None else sharded_moments.of_shard(p, x, inside)
    return sharded_moments.merged(own, mesh_axes, whole.reduced)


def backward_shard(
    whole: BatchNormProblem, p: BatchNormProblem, split: sharding.Split, x: Array, dy: Array, *rest: Array
) -> list[Array]:
    """Local sums, added over the mesh, then dx from them: each a walk over the shard.

    Where the first writes dresidual and loses nothing by it, the second reads that in the place of dy and the residual.
    """
    mesh_axes = _reduced_mesh_axes(split)
    if not mesh_axes:
        return backward(p, x, dy, *rest)
    inside = _inside(whole, p, split)
    if inside is not None:  # x and the residual too: a NaN times a dy of zero is NaN
        x, dy = jnp.where(inside, x, 0), jnp.where(inside, dy, 0)
        rest = (*rest[:4], *(jnp.where(inside, residual, 0) for residual in rest[4:]))
    dscale, dbias, *dresidual = backward(replace(inner(p), want_dx=False), x, dy, *rest)
    dscale, dbias = jax.lax.psum(jnp.stack([dscale, dbias]), mesh_axes)
    if not p.want_dx:
        return [dscale, dbias, *dresidual]
    passed = bool(dresidual) and _passes_dz(p)
    q = replace(inner(p), want_dresidual=False, count=whole.reduced, dz=passed)
    dy, residual = (dresidual[0], ()) if passed else (dy, rest[4:])
    return [dscale, dbias, dx_of_sums(q, x, dy, *rest[:4], dscale, dbias, *residual), *dresidual]


def _passes_dz(p: BatchNormProblem) -> bool:
    """Whether dz in x's type, dresidual, is all of dz: ReLU's is dy or zero. Others' would be rounded."""
    return p.residual and (p.activation.name == "relu" or p.dtype == p.param_dtype)


# ----------------------------------------------------------------------------------------------------------------------
# The kernels


def _channels_last(op: primitives.Kernel, p: BatchNormProblem, *args: Array) -> list[Array]:
    """The op with the channels of images moved to the end, and back. In memory they lie so already between
    convolutions, where XLA moves nothing."""
    kinds, axis = (op.operand_kinds(p), op.result_kinds(p)), len(p.lead) + p.channel_axis
    args = [jnp.moveaxis(a, axis, -1) if kind == "x" else a for a, kind in zip(args, kinds[0], strict=True)]
    outs = primitives.listed(op(p.channels_last, *args))
    return [jnp.moveaxis(a, -1, axis) if kind == "x" else a for a, kind in zip(outs, kinds[1], strict=True)]


FAMILY = primitives.Family(
    {"x": "x y dy dx r dr c residual dresidual", "e": "signs"}, _array, attrs, _partition, moved=_channels_last
)
INSTANCES = replace(FAMILY, batch=primitives.by_instances)

# Two sums about a sample, and the normalisation
train = primitives.kernel(
    "batchnorm_train",
    "x scale bias running_mean running_var residual? -> y new_mean new_var mean rstd",
    INSTANCES,
    reference=reference.batchnorm_train,
    flops=_flops(8),
    run=_train_shard,
)
# See `sharded_moments`
moments = primitives.kernel(
    "batchnorm_moments",
    "x -> k shift var",
    replace(INSTANCES, seen=lambda p: replace(p, activation=Activation(), residual=False)),
    reference=lambda p, x: list(reference.batchnorm_moments(p, x)),
    flops=_flops(4),
    run=_moments_shard,
)
infer = primitives.kernel(
    "batchnorm_infer",
    "x scale bias mean var residual? -> y",
    INSTANCES,
    reference=reference.batchnorm_infer,
    flops=_flops(4),
)


def _with_signs(p: BatchNormProblem, *args: Array) -> list[Array]:
    """y by a plan of its own."""
    y = infer(p, *args)
    return [y, reference.signs(y)]


# Of y, which relu gives, also the signs
signs = primitives.kernel(
    "batchnorm_signs",
    "x scale bias mean var residual? -> y signs",
    FAMILY,
    reference=_with_signs,
    flops=_flops(5),
)
# xhat again, two sums, and dx from them
backward = primitives.kernel(
    "batchnorm_backward",
    "x dy scale bias mean rstd residual? -> dscale dbias dx? dresidual?",
    INSTANCES,
    reference=reference.batchnorm_backward,
    flops=_flops(10),
    also="want_dx want_dresidual",
    run=backward_shard,
)


def _then_added(p: BatchNormProblem, x: Array, dy: Array, *rest: Array) -> list[Array]:
    """backward_add as two: the backward pass by a plan of its own, then an add."""
    *norm, c = rest
    dscale, dbias, dx = backward(p, x, dy, *norm)
    return [dscale, dbias, dx + c]


def _backward_add_shard(
    whole: BatchNormProblem, p: BatchNormProblem, split: sharding.Split, x: Array, dy: Array, *rest: Array
) -> list[Array]:
    if not _reduced_mesh_axes(split):
        return backward_add(p, x, dy, *rest)
    *norm, c = rest
    dscale, dbias, dx = backward_shard(whole, p, split, x, dy, *norm)
    return [dscale, dbias, dx + c]


# dx + c, without a residual
backward_add = primitives.kernel(
    "batchnorm_backward_add",
    "x dy scale bias mean rstd c -> dscale dbias dx",
    FAMILY,
    reference=_then_added,
    flops=_flops(11),
    run=_backward_add_shard,
)
# By sums over p.count elements a channel
dx_of_sums = primitives.kernel(
    "batchnorm_dx",
    "x dy scale bias mean rstd dscale dbias residual? -> dx",
    replace(INSTANCES, seen=lambda p: p.of_dz),
    reference=reference.batchnorm_dx_of_sums,
    flops=_flops(7),
    also="count",
)


def shortcut_problem(dtype: str, shape: tuple[int, ...], channel_axis: int, activation: Activation) -> BatchNormProblem:
    """Two batch-norms that an addition joins, of x and r of that shape, a residual block's last one and its shortcut's:
    y = f(z),  z = (x - mean) * rstd * scale + bias + (r - mean_r) * rstd_r * scale_r + bias_r. Epsilons are in rstd."""
    return BatchNormProblem("batchnorm_shortcut", dtype, shape, channel_axis, True, 0.0, 0.0, activation)


def _shortcut_shard(whole: BatchNormProblem, p: BatchNormProblem, split: sharding.Split, *args: Array) -> list[Array]:
    mesh_axes = _reduced_mesh_axes(split)
    if not mesh_axes:
        return shortcut_backward(p, *args)
    inside = _inside(whole, p, split)
    if inside is not None:  # x and r too: a NaN times a dy of zero is NaN
        args = tuple(jnp.where(inside, a, 0) if i in (0, 1, 6) else a for i, a in enumerate(args))
    total = functools.partial(jax.lax.psum, axis_name=mesh_axes)
    return reference.batchnorm_shortcut_backward(p, *args, total=total, count=whole.reduced)


# Of x and r with these statistics; dbias is dbias_r too
shortcut_backward = primitives.kernel(
    "batchnorm_shortcut_backward",
    "x dy scale bias mean rstd r scale_r bias_r mean_r rstd_r -> dscale dbias dscale_r dx dr",
    FAMILY,
    reference=reference.batchnorm_shortcut_backward,
    flops=_flops(20),
    run=_shortcut_shard,
)
for _kernel in (infer, signs, backward, backward_add, shortcut_backward, dx_of_sums, moments):
    primitives.by_reference(_kernel)


def train_forward(p: BatchNormProblem, *args: Array) -> tuple[list[Array], Any]:
    """Residuals: x, scale, bias, mean, rstd, and the residual addend where the activation's mask depends on it."""
    x, scale, bias, _, _, *residual = args
    outs = train(p, *args)
    *_, mean, rstd = outs
    kept = residual[0] if residual and p.activation.residual else None
    return outs, (x, scale, bias, mean, rstd, kept)


def train_backward(
    p: BatchNormProblem,
    residuals: Any,
    cotangents: Sequence[Array | None],
    want: Sequence[bool],
) -> list[Array | None]:
    """The kernel for the cotangent of y; those of the statistics, where there are any, are added to dx."""
    x, scale, bias, mean, rstd, kept = residuals
    dy, d_new_mean, d_new_var, d_mean, d_rstd = cotangents
    want_x, want_scale, want_bias, want_running_mean, want_running_var, *rest = want
    want_residual = bool(rest and rest[0])
    dx = dscale = dbias = dresidual = None
    if dy is not None and (want_x or want_scale or want_bias or want_residual):
        q = replace(p, residual=kept is not None, want_dx=want_x, want_dresidual=want_residual)
        dscale, dbias, *big = backward(q, x, dy, scale, bias, mean, rstd, *([] if kept is None else [kept]))
        dx = big[0] if want_x else None
        dresidual = big[-1] if want_residual else None
    ct_mean = _total((1.0, d_mean), (1 - p.momentum, d_new_mean))
    ct_var = _total((1 - p.momentum, d_new_var), (-0.5 * rstd * rstd * rstd, d_rstd))
    if want_x and (ct_mean is not None or ct_var is not None):
        s, n = reference.channel_shape(p), p.reduced
        extra = jnp.zeros_like(x, p.param_dtype)  # split over a mesh as x is
        if ct_mean is not None:
            extra = extra + (ct_mean / n).reshape(s)
        if ct_var is not None:
            extra = extra + (x.astype(p.param_dtype) - mean.reshape(s)) * (2 / n * ct_var).reshape(s)
        dx = extra.astype(x.dtype) if dx is None else (dx.astype(p.param_dtype) + extra).astype(x.dtype)
    return [
        dx if want_x else None,
        dscale if want_scale else None,
        dbias if want_bias else None,
        _total((p.momentum, d_new_mean)) if want_running_mean else None,
        _total((p.momentum, d_new_var)) if want_running_var else None,
        *([dresidual] if rest else []),
    ]


def _total(*terms: tuple[Any, Array | None]) -> Array | None:
    present = [factor * ct for factor, ct in terms if ct is not None]
    return sum(present[1:], present[0]) if present else None


def norm_tangent(p: BatchNormProblem, residuals: Any, tangents: Sequence[Array | None]) -> list[Array]:
    x, scale, bias, mean, rstd, kept = residuals
    tx, tscale, tbias, trunning_mean, trunning_var, *rest = tangents
    s, axes, n = reference.channel_shape(p), reference.reduced_axes(p), p.reduced
    wide = p.param_dtype
    zero = jnp.zeros(p.param_shape, wide)
    centred = x.astype(wide) - mean.reshape(s)
    tmean, tvar = zero, zero
    tz = jnp.zeros(p.x_shape, wide)
    if tx is not None:
        tx = tx.astype(wide)
        tmean = jnp.sum(tx, axes) / n
        tvar = 2 * jnp.sum(centred * tx, axes) / n
        tz = tz + (tx - tmean.reshape(s)) * (rstd * scale).reshape(s)
    trstd = -0.5 * rstd * rstd * rstd * tvar
    tz = tz + centred * (trstd * scale).reshape(s)
    if tscale is not None:
        tz = tz + centred * (rstd * tscale).reshape(s)
    if tbias is not None:
        tz = tz + tbias.reshape(s)
    if rest and rest[0] is not None:
        tz = tz + rest[0].astype(wide)
    if p.activation.residual:
        z = centred * (rstd * scale).reshape(s) + bias.reshape(s)
        z = z if kept is None else z + kept.astype(wide)
        tz = activate_tangent(p.activation, z, tz)
    m = p.momentum
    return [
        tz.astype(x.dtype),
        (1 - m) * tmean + (zero if trunning_mean is None else m * trunning_mean),
        (1 - m) * tvar + (zero if trunning_var is None else m * trunning_var),
        tmean,
        trstd,
    ]


RULES = primitives.Rules(lambda p: p, train_forward, train_backward, norm_tangent)
primitives.fuse(train, RULES)

# (x, scale, bias, running_mean, running_var, mean, var, residual?) -> as train, whose derivative it has: mean and var
# are x's own, so that what depends on them depends on x, and nothing on the arrays they came in.
given = primitives.plain(
    "batchnorm_given",
    train_with,
    results=train.results,
    batch=primitives.by_instances,
)


def _without_statistics(values: Sequence[Any]) -> list[Any]:
    return [*values[:5], *values[7:]]


def _given_forward(p: BatchNormProblem, *args: Array) -> tuple[list[Array], Any]:
    x, scale, bias, _, _, _, _, *residual = args
    outs = given(p, *args)
    kept = residual[0] if residual and p.activation.residual else None
    return outs, (x, scale, bias, outs[3], outs[4], kept)


def _given_backward(
    p: BatchNormProblem, residuals: Any, cotangents: Sequence[Array | None], want: Sequence[bool]
) -> list[Array | None]:
    grads = train_backward(p, residuals, cotangents, _without_statistics(want))
    return [*grads[:5], None, None, *grads[5:]]


primitives.fuse(
    given,
    primitives.Rules(
        lambda p: p,
        _given_forward,
        _given_backward,
        lambda p, residuals, tangents: norm_tangent(p, residuals, _without_statistics(tangents)),
    ),
)


# ----------------------------------------------------------------------------------------------------------------------
# The public function


def parameters(
    name: str, x: Array, scale: Any, bias: Any, running_mean: Any, running_var: Any
) -> dict[str, Array | None]:
    """The arrays by name; scale and bias of a narrower type in the parameters' own, which changes no value."""
    arrays = {
        "scale": None if scale is None else _problem.as_parameter(name, "scale", scale, x),
        "bias": None if bias is None else _problem.as_parameter(name, "bias", bias, x),
    }
    for argument, value in (("running_mean", running_mean), ("running_var", running_var)):
        if value is None:
            raise TypeError(f"{name}: {argument} must be an array, got None")
        arrays[argument] = _problem.as_array(name, argument, value)
    return arrays


def batchnorm(
    x: Operand,  # (N, ..., C) or any shape with channels on channel_axis
    scale: Operand | None,  # (C,)
    bias: Operand | None,  # (C,)
    running_mean: Operand,  # (C,)
    running_var: Operand,  # (C,)
    *,
    training: bool,
    momentum: float = 0.99,
    epsilon: float = 1e-5,
    activation: ToActivation = None,
    residual: Operand | None = None,  # like x
    channel_axis: int = -1,
    mask: Operand | None = None,  # bool, broadcasts to x
    statistics: tuple[Operand, Operand] | None = None,  # mean (C,), variance (C,)
    algorithm: BatchNormAlgorithm | None = None,
    implementation: Implementation | None = None,
) -> tuple[Array, Array, Array]:
    """Batch normalisation with residual add and activation, in training or inference.

    Equivalent JAX code for channel_axis=-1, in float32 (float64 for float64 x)::

        axes = tuple(range(x.ndim - 1))
        if training:
            mean, var = jnp.mean(x, axes), jnp.var(x, axes)          # biased
            new_mean = momentum * running_mean + (1 - momentum) * mean
            new_var = momentum * running_var + (1 - momentum) * var
        else:
            mean, var = new_mean, new_var = running_mean, running_var
        z = (x - mean) / jnp.sqrt(var + epsilon) * scale + bias + residual
        y = activation(z)

    Example::

        x, scale, bias, mean, var = jnp.ones((8, 32, 32, 16)), *(jnp.full(16, v) for v in (1.0, 0.0, 0.0, 1.0))
        y, mean, var = jaxconv.batchnorm(x, scale, bias, mean, var, training=True, activation="relu")

    Args:
      x: at least two dimensions; float32, bfloat16, float16 or float64.
      scale, bias: (C,), float32 for 16-bit x, else of x's dtype. A narrower dtype is cast. None stands for ones or
        zeros.
      running_mean, running_var: (C,), float32 for 16-bit x, else of x's dtype. The running variance is the biased one,
        as in Flax.
      training: a Python bool. True normalises with the batch's statistics and updates the running ones; False uses the
        running ones.
      momentum: in [0, 1], the weight of the old running statistics, as in Flax (PyTorch's is 1 minus this).
      epsilon: added to the variance.
      activation: see `conv2d`.
      residual: an array of x's shape and dtype added before the activation, or None.
      channel_axis: the axis of x that holds the channels.
      mask: True where an element of x counts in the statistics, as in Flax. Mean and variance are taken over these
        elements only (NaN for a channel without any), and all of x is normalised with them. The mask is read in
        training only. Batch-norms with a mask run on XLA.
      statistics: (mean, biased variance) of x per channel, if you know them already, with the shape of running_mean. x
        is then read once, to be normalised. They are read in training only. The gradient is that of a call without
        them: they count as functions of x, so the gradient of x is complete, and that of the two arrays is zero. It is
        wrong if they are not the statistics of x.
      algorithm: forces one native algorithm. "two_read" takes any size. "resident_block" is one launch on CUDA, for
        channels whose elements fit in a block's shared memory. "resident_team" is one launch on CUDA in which blocks
        share a channel's elements and keep as many as fit; it needs channels last in whole vectors of 16 bytes.
      implementation: see `conv2d`.

    Returns:
      (y of x's shape and dtype, running mean, running variance); the statistics are unchanged when not training.

    Raises:
      TypeError, ValueError: when the arguments do not fit together (at trace time), naming the argument, what it got
        and what was expected; ValueError when a forced implementation or algorithm cannot run, with the reason.

    The variance is computed about the mean (or about a sample of the channel), never as E[x^2] - E[x]^2: it has float32
    accuracy even if the mean is 10,000 times the deviation. Differentiable in every array, to any order, in both modes;
    the backward pass recomputes the activation's mask from x. Source: Ioffe and Szegedy 2015 (arXiv:1502.03167); Chan,
    Golub and LeVeque 1983 for the merging of variances.
    """
    name = "batchnorm"
    x = _problem.as_array(name, "x", x)
    arrays = parameters(name, x, scale, bias, running_mean, running_var)
    residual = None if residual is None else _problem.as_array(name, "residual", residual)
    mask = None if mask is None else _problem.as_mask(name, "mask", mask)
    if statistics is not None and not isinstance(statistics, (tuple, list)):
        raise TypeError(f"{name}: statistics must be a pair (mean, variance), got {type(statistics).__name__}")
    if statistics is not None and len(statistics) != 2:
        raise ValueError(f"{name}: statistics has {len(statistics)} entries, expected a pair (mean, variance)")
    mean, var = (None, None) if statistics is None else (_problem.as_array(name, "statistics", a) for a in statistics)
    p = BatchNormProblem.infer(
        name,
        x,
        residual=residual,
        **arrays,
        training=training,
        momentum=momentum,
        epsilon=epsilon,
        activation=activation,
        channel_axis=channel_axis,
        mask=mask,
        mean=mean,
        var=var,
        algorithm=algorithm,
        implementation=implementation,
    )
    ones = jnp.ones(p.param_shape, p.param_dtype) if arrays["scale"] is None else arrays["scale"]
    zeros = jnp.zeros(p.param_shape, p.param_dtype) if arrays["bias"] is None else arrays["bias"]
    args = [x, ones, zeros, arrays["running_mean"], arrays["running_var"], *([] if residual is None else [residual])]
    if p.training:
        if p.masked:
            mean, var = reference.batchnorm_masked_moments(p, x, mask)
            y, new_mean, new_var, _, _ = train_with(p, *args[:5], mean, var, *args[5:])
        elif mean is not None:
            y, new_mean, new_var, _, _ = given(p, *args[:5], mean, var, *args[5:])
        else:
            y, new_mean, new_var, _, _ = train(p, *args)
        return y, new_mean, new_var
    return infer(p, *args), arrays["running_mean"], arrays["running_var"]

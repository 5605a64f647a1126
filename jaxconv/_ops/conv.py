"""Convolutions: the public functions, their kernels and their differentiation rules."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxconv import _plan, _problem
from jaxconv._core import halo, primitives, sharding
from jaxconv._core.activations import activate, activate_grad
from jaxconv._core.types import (
    Array,
    Conv1dPadding,
    ConvAlgorithm,
    ConvScaledOptions,
    Implementation,
    Layout1d,
    Layout2d,
    Layout3d,
    Operand,
    Padding,
    PerDimension,
    Precision,
    ToActivation,
)
from jaxconv._ops import conv_scaled, layer, reference, sharded_moments
from jaxconv._problem import AddedConvProblem, ConvProblem

replace = dataclasses.replace


# ----------------------------------------------------------------------------------------------------------------------
# The arrays, by kind: x and y are activations, w the filter, b the bias; s numbers for y's channels, p for x's, d for
# x's in x's type; e a bit for each element of a channels-last x

KINDS = {
    "x": "x dx c dz",
    "y": "y z dy residual",
    "w": "w dw",
    "p": "scale bias mean var rstd dscale dbias",
    "e": "signs",
}


def _array(p: ConvProblem, kind: str) -> primitives.Typed:
    if kind in "xyw":
        return {"x": p.x_shape, "y": p.y_shape, "w": p.w_shape}[kind], p.dtype
    if kind in "bd":
        return (p.out_channels if kind == "b" else p.in_channels,), p.dtype
    if kind == "e":
        return (*p.x_shape[:-1], p.in_channels // 8), "uint8"
    return (p.in_channels if kind == "p" else p.out_channels,), reference.norm_of(p).param_dtype


def _layout(p: ConvProblem, plan: _plan.Plan, kind: str) -> primitives.Layout | None:
    if not plan.asks_channels_last or kind not in "xyw":
        return None
    spatial = tuple(range(2, p.nd + 2))
    return (*spatial, 1, 0) if kind == "w" else (0, *spatial, 1)


def window(p: ConvProblem, plan: _plan.Plan) -> dict[str, Any]:
    return {
        "window": {
            "stride": np.array(p.stride, np.int64),
            "pad_low": np.array([low for low, _ in p.padding], np.int64),
            "pad_high": np.array([high for _, high in p.padding], np.int64),
            "dilation": np.array(p.dilation, np.int64),
            "groups": np.int64(p.groups),
            "dims_channels_last": np.int64(p.channels_last),
            "memory_channels_last": np.int64(p.channels_last or plan.asks_channels_last),
            "full_float32": np.int64(p.full_float32),
        }
    }


def _with_epilogue(p: ConvProblem, plan: _plan.Plan) -> dict[str, Any]:
    return window(p, plan) | {"epilogue": layer.epilogue(p)}


def _flops(of_x: int = 0, of_y: int = 0) -> Any:
    """Those of the products, of the epilogue, and more of each element of x or y."""

    def flops(p: ConvProblem) -> int:
        epilogue = p.bias + (p.activation.name != "none")
        return p.flops + (epilogue + of_y) * math.prod(p.y_shape) + of_x * math.prod(p.x_shape)

    return flops


# ----------------------------------------------------------------------------------------------------------------------
# Batching: by kind, which of images, input and output channels an array has

_HAS = {"x": "nc", "y": "nk", "w": "ck"}


def batch(op: primitives.Kernel, p: ConvProblem, args: list[Array], dims: list[int | None]) -> primitives.Batched:
    """A mapped axis folds into the images or channels that the result and all mapped operands of the product have. It
    folds into groups where there are none, or where instances must not share statistics. What is added is repeated."""
    size, kinds, results = primitives.batch_size(args, dims), op.operand_kinds(p), op.result_kinds(p)
    moved = {kind for kind, dim in zip(kinds, dims, strict=True) if dim is not None}
    moved |= {"w"} if "b" in moved else set()
    moved = moved & set(kinds[:2]) or {kinds[0]}
    channel, in_channel, out_channel = (p.channel_axis, p.nd, p.nd + 1) if p.channels_last else (1, 1, 0)
    common = set(_HAS[results[0]]).intersection(*(_HAS[kind] for kind in moved))
    into = "g" if {"s", "p"} & {*kinds, *results} else next(iter(common), "g")
    axes = {
        "n": {"x": 0, "y": 0},
        "c": {"x": channel, "w": in_channel},
        "k": {"y": channel, "w": out_channel, "b": 0},
        "g": {"x": channel, "y": channel, "w": out_channel, "b": 0, "s": 0, "p": 0},
    }[into]
    groups = {kind: p.groups if into == "k" or (into, kind) == ("c", "x") else 1 for kind in axes}
    folded = [
        primitives.fold(primitives.to_front(a, dim, size), 0, axes[kind], groups[kind]) if kind in axes else a
        for a, dim, kind in zip(args, dims, kinds, strict=True)
    ]
    longer = {"n": ("batch",), "c": ("in_channels",), "k": ("out_channels",)}
    fields = longer.get(into, ("groups", "in_channels", "out_channels"))
    q = replace(p, **{name: size * getattr(p, name) for name in fields})
    outs = zip(primitives.listed(op(q, *folded)), results, strict=True)
    outs = [primitives.unfold(out, size, axes[kind], groups[kind]) for out, kind in outs]
    return outs, [0] * len(outs)


# ----------------------------------------------------------------------------------------------------------------------
# Partitioning: images, pixels, output and input channels; with groups, whole groups. Filter taps are not split.


def partition(
    p: ConvProblem, operands: Sequence[str], results: Sequence[str], *, channels: str, run: Any, always: bool = True
) -> sharding.Partition:
    """`channels`: those of "kc" that may be split without groups, the most important first."""
    g = p.groups > 1
    c, k = "c", "k"
    if g:
        c = "g" if p.in_channels == p.groups else "(g c)"
        k = "g" if p.out_channels == p.groups else "(g k)"
    pixels, taps = [halo.name(i) for i in range(p.nd)], [f"t{i}" for i in range(p.nd)]

    def activations(channels: str) -> str:
        return " ".join(["n", *pixels, channels] if p.channels_last else ["n", channels, *pixels])

    names = {
        "x": activations(c),
        "y": activations(k),
        "w": " ".join([*taps, "c", k] if p.channels_last else [k, "c", *taps]),
        "b": k,
        "s": k,
        "p": c,
        "d": c,
        "e": " ".join(["n", *pixels, "e"]),
    }

    def local(parts: Any) -> ConvProblem:
        """But for the pixels: how many a shard reads, `run` finds out."""
        groups = parts.get("g", 1)
        return replace(
            p,
            batch=p.batch // parts["n"],
            groups=p.groups // groups,
            in_channels=p.in_channels // (groups * parts.get("c", 1)),
            out_channels=p.out_channels // (groups * parts.get("k", 1)),
        )

    return sharding.Partition(
        operands=[names[o] for o in operands],
        results=[names[r] for r in results],
        split=["n", *pixels, *("g" if g else channels)],
        local=local,
        sizes={"g": p.groups, "k": p.out_channels // p.groups} | halo.sizes(p),
        run=run,
        # XLA gathers the images of grouped convolutions and what filters wider than a shard reach. Where pixels and
        # channels are both split its results were wrong, and of odd strides and paddings it ended the process (lax
        # alone, jaxlib 0.10).
        always=always,
        uneven=pixels,
        neighbours=pixels,
    )


def summed(out: Array, split: sharding.Split, *names: str) -> Array:
    axes = tuple(a for name in names for a in split.get(name, ()))
    return jax.lax.psum(out, axes) if axes else out


def _of_rows(
    call: Any, p: ConvProblem, pixels: halo.Split, x: Array, w: Array, *b: Array, residual: Sequence[Array] = ()
) -> list[Array]:
    """What `call`, a convolution of x, makes of a shard's rows and its neighbours'."""
    ends = halo.ends_of_y(p, pixels, x)
    if ends is None:
        p, x = halo.exchange_x(p, pixels, x)
        return primitives.listed(call(p, x, w, *b, *residual))
    own = primitives.listed(call(ends.own, x, w, *b, *residual))
    again = primitives.listed(call(_plan.natively(call.name, ends.slab), ends.fetch(x), w, *b, *map(ends.of, residual)))
    return [ends.put(y, slab) for y, slab in zip(own, again, strict=True)]


def fprop_shard(p: ConvProblem, split: sharding.Split, x: Array, w: Array) -> list[Array]:
    (y,) = _of_rows(fprop, p, halo.pixels(p, split), x, w)
    return [summed(y, split, "c")]


def _conv_shard(p: ConvProblem, split: sharding.Split, x: Array, w: Array, *b: Array) -> list[Array]:
    """The epilogue needs the sum over all input channels: where they are split it comes after the sum."""
    if "c" in split:
        return reference.conv_epilogue(p, *fprop_shard(p.bare(), split, x, w), *b)
    return _of_rows(conv_kernel, p, halo.pixels(p, split), x, w, *b)


def add_shard(p: ConvProblem, split: sharding.Split, x: Array, w: Array, *rest: Array) -> list[Array]:
    """The residual is added once: where the input channels are split, to the sum over their parts."""
    *b, residual = rest
    if "c" in split:
        (z,) = reference.conv_epilogue(p.affine(), *fprop_shard(p.bare(), split, x, w), *b)
        return reference.conv_added(p, z, residual)
    return _of_rows(conv_add, p, halo.pixels(p, split), x, w, *b, residual=[residual])


def statistics_shard(p: ConvProblem, split: sharding.Split, x: Array, w: Array, *rest: Array) -> list[Array]:
    """Each shard's moments, merged. They leave the convolution with y but where y is a sum over shards, or not all of
    it is the array's own, or its ends are computed again.

    The rows that were wrong are in the epilogue's moments then, and do not come out again exactly: where the mean is
    large they alone may be most of the variance. So y is read once more. That is less than the copy of x which lets one
    kernel write the right rows: a read and a write.
    """
    pixels = halo.pixels(p, split)
    q = replace(p, out_spatial=halo.rows_of_y(p, pixels))
    first = 1 if p.channels_last else 2
    parts = [sharding.inside(q.y_shape, first + i, p.out_spatial[i], axes) for i, axes in pixels.items()]
    own = [part for part in parts if part is not None]
    if "c" in split or own or halo.ends_of_y(p, pixels, x) is not None:
        (y,) = _added_shard(p, split, x, w, *rest)
        inside = functools.reduce(jnp.logical_and, own) if own else None
        moments = sharded_moments.of_shard(reference.norm_of(q), y, inside)
    else:
        y, mean, var = with_statistics(*halo.exchange_x(p, pixels, x), w, *rest)
        moments = [mean, jnp.zeros_like(mean), var]
    mesh_axes = tuple(a for name in ("n", *map(halo.name, pixels)) for a in split.get(name, ()))
    if not mesh_axes:
        return [y, moments[0] + moments[1], moments[2]]
    return [y, *sharded_moments.merged(moments, mesh_axes, p.batch * math.prod(p.out_spatial))]


def _added_shard(p: ConvProblem, split: sharding.Split, x: Array, w: Array, *rest: Array) -> list[Array]:
    """The convolution with what is added to it, by its kernels of no statistics."""
    if not rest:
        return fprop_shard(p, split, x, w)
    assert isinstance(p, AddedConvProblem)
    return (add_shard if p.residual else _conv_shard)(p.conv, split, x, w, *rest)


def _dx_of_rows(p: ConvProblem, pixels: halo.Split, dy: Array, w: Array, *c: Array) -> list[Array]:
    """dgrad, or with c dgrad_add, of a shard's rows of dy and its neighbours'."""
    call = dgrad_add if c else dgrad
    ends = halo.ends_of_dx(p, pixels, dy)
    if ends is not None:
        # A kernel may add in c's place: XLA would copy c, did it not see that its ends are read before.
        c, c_at_ends = jax.lax.optimization_barrier((c, [ends.of(a) for a in c]))
        again = call(_plan.natively(call.name, ends.slab), ends.fetch(dy), w, *c_at_ends)
        return [ends.put(call(ends.own, dy, w, *c), again)]
    q, wide = halo.exchange_dy(p, pixels, dy)
    if c and halo.makes_own_dx(p, pixels):
        return [dgrad_add(q, wide, w, *c)]
    return [sum(c, halo.own_dx(p, pixels, dgrad(q, wide, w)))]


def dgrad_shard(p: ConvProblem, split: sharding.Split, dy: Array, w: Array) -> list[Array]:
    (dx,) = _dx_of_rows(p, halo.pixels(p, split), dy, w)
    return [summed(dx, split, "k")]


def _dgrad_add_shard(p: ConvProblem, split: sharding.Split, dy: Array, w: Array, c: Array) -> list[Array]:
    """c is added once: where the output channels are split, to the sum over their parts."""
    if "k" in split:
        return [dx + c for dx in dgrad_shard(p, split, dy, w)]
    return _dx_of_rows(p, halo.pixels(p, split), dy, w, c)


def _dgrad_sums_shard(
    p: ConvProblem, split: sharding.Split, dy: Array, w: Array, c: Array, *norm: Array
) -> list[Array]:
    """Each shard's sums, added over the mesh; of its own pixels."""
    if set(split) <= {"n"}:
        dz, *sums = dgrad_sums(p, dy, w, c, *norm)
        return [dz, *(summed(s, split, "n") for s in sums)]
    (dx,) = _dgrad_add_shard(p, split, dy, w, c)
    signs, x, *statistics = norm
    dx, x = _own_pixels(p, split, dx, x)  # x too: a NaN times a zero is NaN
    dz, *sums = reference.through_relu(p.channel_axis, dx, signs, x, *statistics)
    return [dz, *(summed(s, split, "n", *map(halo.name, halo.pixels(p, split))) for s in sums)]


def _own_pixels(p: ConvProblem, split: sharding.Split, *like_x: Array) -> list[Array]:
    """The arrays, with zeros where a shard has no pixels of its own."""
    first = 1 if p.channels_last else 2
    axes = halo.pixels(p, split).items()
    parts = [sharding.inside(like_x[0].shape, first + i, p.in_spatial[i], axis) for i, axis in axes]
    own = [part for part in parts if part is not None]
    if not own:
        return list(like_x)
    inside = functools.reduce(jnp.logical_and, own)
    return [jnp.where(inside, a, 0) for a in like_x]


def _norm_gradient_shard(
    p: ConvProblem, split: sharding.Split, dy: Array, w: Array, x: Array, *norm: Array
) -> list[Array]:
    """Each shard's sums, added over the mesh; of its own pixels. The derivative needs the sum over the output channels:
    where these are split it comes after adding the parts."""
    pixels = halo.pixels(p, split)
    if "k" in split or pixels:
        (dx,) = dgrad_shard(p.bare(), split, dy, w)
        dz, *sums = reference.through_norm(p, *_own_pixels(p, split, dx, x), *norm)
    else:
        dz, *sums = norm_gradient(p, dy, w, x, *norm)
    return [dz, *(summed(s, split, "n", *map(halo.name, pixels)) for s in sums)]


def _gradient_shard(p: ConvProblem, split: sharding.Split, dy: Array, w: Array, kept: Array, *c: Array) -> list[Array]:
    """gradient, or with c gradient_add. Each shard's sums, added over the mesh; of its own pixels. The derivative needs
    the sum over the output channels: where these are split it comes after adding the parts."""
    pixels = halo.pixels(p, split)
    if "k" in split or pixels:
        (dx,) = dgrad_shard(p.bare(), split, dy, w)
        dz = sum(c, activate_grad(p.activation, kept, dx))
        dbias = _sum_of_channels(p, *_own_pixels(p, split, dz))
    else:
        dz, dbias = (gradient_add if c else gradient)(p, dy, w, kept, *c)
    wide = dbias.astype(_problem.promoted(dbias.dtype, jnp.float32))
    return [dz, summed(wide, split, "n", *map(halo.name, pixels)).astype(dbias.dtype)]


def wgrad_shard(p: ConvProblem, split: sharding.Split, x: Array, dy: Array) -> list[Array]:
    """A shard has its own pixels of x, so each product of an x and a dy is in one of the sums."""
    pixels = halo.pixels(p, split)
    ends = halo.ends_of_dx(p, pixels, dy)
    if ends is None:
        q, wide = halo.exchange_dy(p, pixels, dy)
        dw = wgrad(q, halo.place_x(p, pixels, x), wide)
    else:
        # In 16 bits each part is rounded before they are added up, as those of the shards are for their sum over the
        # mesh: the products with neighbours' rows are one part more for each shard, and a small one.
        at_ends = wgrad(_plan.natively(wgrad.name, ends.slab), ends.of(x), ends.fetch(dy, own=False))
        dw = wgrad(ends.own, x, dy) + at_ends
    return [summed(dw, split, "n", *map(halo.name, pixels))]


# ----------------------------------------------------------------------------------------------------------------------
# The kernels. fprop, dgrad and wgrad are bilinear and each other's transposes.

CONV = primitives.Family(KINDS, _array, window, partition, _layout, batch=batch)
FUSED = replace(CONV, attrs=_with_epilogue)

fprop = primitives.kernel(
    "conv_fprop",
    "x w -> y",
    FUSED,
    reference=reference.conv_fprop,
    flops=_flops(),
    channels="kc",
    run=fprop_shard,
)
dgrad = primitives.kernel(
    "conv_dgrad",
    "dy w -> dx",
    CONV,
    reference=reference.conv_dgrad,
    flops=_flops(),
    channels="ck",
    run=dgrad_shard,
)
wgrad = primitives.kernel(
    "conv_wgrad",
    "x dy -> dw",
    CONV,
    reference=reference.conv_wgrad,
    flops=_flops(),
    channels="kc",
    run=wgrad_shard,
)
_DGRAD_RULE = (lambda p, ct, w: fprop(p, ct, w), lambda p, ct, dy: wgrad(p, ct, dy))
primitives.bilinear(fprop, lambda p, ct, w: dgrad(p, ct, w), lambda p, ct, x: wgrad(p, x, ct))
primitives.bilinear(dgrad, *_DGRAD_RULE)
primitives.bilinear(wgrad, lambda p, ct, dy: dgrad(p, dy, ct), lambda p, ct, x: fprop(p, x, ct))

# dgrad_add: dgrad(dy, w) + c, where a kernel can add on its way; elsewhere the dgrad, by a plan of its own, and an add
dgrad_add = primitives.kernel(
    "conv_dgrad_add",
    "dy w c -> dx",
    CONV,
    reference=lambda p, dy, w, c: [dgrad(p, dy, w) + c],
    flops=_flops(of_x=1),
    channels="ck",
    run=_dgrad_add_shard,
    always=False,
)
primitives.with_addend(dgrad_add, dgrad, *_DGRAD_RULE)


def _dgrad_then_sums(p: ConvProblem, dy: Array, w: Array, c: Array, *norm: Array) -> list[Array]:
    """dgrad_sums as a dgrad_add by a plan of its own, and what follows in passes of XLA's."""
    return reference.through_relu(p.channel_axis, dgrad_add(p, dy, w, c), *norm)


# Of channels-last arrays, where x's batch-norm by these statistics gives y, by a relu, which the convolution and others
# read: dz = [y > 0] (dgrad(dy, w) + c), an add and a choice, its sums with xhat and alone
dgrad_sums = primitives.kernel(
    "conv_dgrad_sums",
    "dy w c signs x mean rstd -> dz dscale dbias",
    replace(CONV, batch=None),
    reference=_dgrad_then_sums,
    flops=_flops(of_x=6),
    channels="k",
    run=_dgrad_sums_shard,
    always=False,
)
primitives.by_reference(dgrad_sums)


def _sum_of_channels(p: ConvProblem, dz: Array) -> Array:
    """Over all axes but the channels, in at least float32."""
    return jnp.sum(dz, tuple(axis for axis in range(dz.ndim) if axis != p.channel_axis))


def _dgrad_then_back(p: ConvProblem, dy: Array, w: Array, kept: Array) -> list[Array]:
    """gradient as a dgrad by a plan of its own, and what follows in passes of XLA's."""
    dz = activate_grad(p.activation, kept, dgrad(p.bare(), dy, w))
    return [dz, _sum_of_channels(p, dz)]


# gradient: dz = dgrad(dy, w) * f'(kept), and its sum over images and pixels, where a kernel makes both; elsewhere the
# dgrad, by a plan of its own, and what XLA makes of the rest. `kept`, like x: the z that f was given, or the y that it
# gave, f's `residual`. The problem is the dgrad's, with f for its activation.
gradient = primitives.kernel(
    "conv_gradient",
    "dy w kept -> dz dbias",
    replace(FUSED, kinds=KINDS | {"x": f"{KINDS['x']} kept", "p": "", "d": "dbias"}, batch=None),
    reference=_dgrad_then_back,
    flops=lambda p: p.flops + 2 * math.prod(p.x_shape),
    channels="ck",
    run=_gradient_shard,
    always=False,
)
primitives.by_reference(gradient)


def _back_then_add(p: ConvProblem, dy: Array, w: Array, kept: Array, c: Array) -> list[Array]:
    """gradient_add as a gradient by a plan of its own, and what follows in passes of XLA's."""
    dz = gradient(p, dy, w, kept)[0] + c
    return [dz, _sum_of_channels(p, dz)]


# gradient_add: the same with an addend, dz = dgrad(dy, w) * f'(kept) + c, and the sum of that
gradient_add = primitives.kernel(
    "conv_gradient_add",
    "dy w kept c -> dz dbias",
    gradient.family,
    reference=_back_then_add,
    flops=lambda p: p.flops + 3 * math.prod(p.x_shape),
    channels="ck",
    run=_gradient_shard,
    always=False,
)
primitives.by_reference(gradient_add)


# norm_gradient: where the convolution alone reads y = f(z), z = xhat * scale + bias with xhat = (x - mean) * rstd,
# dz = dgrad(dy, w) * f'(z), and its sums with xhat and alone, where a kernel makes them; elsewhere the dgrad, by a plan
# of its own, and what XLA makes of the rest. The problem is the dgrad's, with f for its activation.
norm_gradient = primitives.kernel(
    "conv_norm_gradient",
    "dy w x scale bias mean rstd -> dz dscale dbias",
    replace(FUSED, batch=None),
    reference=lambda p, dy, w, *norm: reference.through_norm(p, dgrad(p.bare(), dy, w), *norm),
    flops=lambda p: p.flops + 7 * math.prod(p.x_shape),
    channels="ck",
    run=_norm_gradient_shard,
    always=False,
)
primitives.by_reference(norm_gradient)


# statistics: fprop, and from its epilogue the mean and biased variance of y's channels
statistics = primitives.kernel(
    "conv_statistics",
    "x w -> y mean var",
    replace(CONV, kinds=KINDS | {"s": "mean var", "p": ""}),
    reference=reference.conv_statistics,
    flops=_flops(of_y=4),
    channels="kc",
    run=statistics_shard,
)
primitives.by_reference(statistics)

# add_statistics: the same of a convolution to which a bias, an array like y, or both are added
add_statistics = primitives.kernel(
    "conv_add_statistics",
    "x w b? residual? -> y mean var",
    replace(FUSED, kinds=KINDS | {"s": "mean var", "p": ""}),
    reference=reference.conv_statistics,
    flops=_flops(of_y=5),
    also="residual",
    channels="kc",
    run=statistics_shard,
)
primitives.by_reference(add_statistics)


def with_statistics(p: ConvProblem, x: Array, w: Array, *rest: Array) -> list[Array]:
    """add_statistics; statistics where nothing is added."""
    return (add_statistics if isinstance(p, AddedConvProblem) else statistics)(p, x, w, *rest)


BY_CUDNN = ("none", "relu")  # the activations that XLA has cuDNN's convolutions apply


def _hidden(p: ConvProblem, y: Array) -> Array:
    """y of a convolution that XLA computes, of which XLA on a GPU does not see that it is a relu's.

    cuDNN's convolutions apply a relu if z is not read otherwise. XLA would make z > 0 of the derivative's y > 0, and
    so read z: the relu was a pass of its own over each layer of a VGG's training step. The barrier costs no fusion,
    because what cuDNN makes is in memory. Of depthwise convolutions cuDNN applies nothing.
    """
    depthwise = p.groups == p.in_channels and p.groups > 1
    applied = p.implementation == "xla" and p.activation.name == "relu" and not p.save_preactivation and not depthwise
    return jax.lax.optimization_barrier(y) if applied and primitives.lowers_for() == "cuda" else y


def _conv_then_epilogue(p: ConvProblem, x: Array, w: Array, *b: Array) -> list[Array]:
    """conv as two: a convolution by a plan of its own, then bias and activation; in 16 bits both in float32, as the
    CPU's code computes them. All of it by XLA is what the user's own program would be."""
    if p.implementation is not None:
        y, *z = reference.conv(p, x, w, *b)
        return [_hidden(p, y), *z]
    wide = _problem.promoted(p.dtype, jnp.float32)
    z = fprop(replace(p.bare(), dtype=wide.name), x.astype(wide), w.astype(wide))
    return [a.astype(p.dtype) for a in reference.conv_epilogue(p, z, *(a.astype(wide) for a in b))]


# conv: fprop with its epilogue. Results y, and z where it is saved.
conv_kernel = primitives.kernel(
    "conv",
    "x w b? -> y z?",
    FUSED,
    reference=_conv_then_epilogue,
    flops=_flops(),
    channels="kc",
    run=_conv_shard,
)


def _conv_then_add(p: ConvProblem, x: Array, w: Array, *rest: Array) -> list[Array]:
    """conv_add as two: a convolution by a plan of its own, then the add and the activation.

    All of it by XLA is what the user's own program would be: z is rounded before the add, which XLA then takes into its
    convolution. A sum in float32 would be a pass of its own.
    """
    *b, residual = rest
    z = convolution(p.affine(), x, w, *b)[0]
    if p.implementation != "xla":
        return reference.conv_added(p, z, residual)
    total = z + residual
    y = activate(p.activation, total)
    return [y, total] if p.save_preactivation else [_hidden(p, y)]


# conv_add: conv with an array like y added before the activation; one kernel where the plan has one that adds
conv_add = primitives.kernel(
    "conv_add",
    "x w b? residual -> y z?",
    FUSED,
    reference=_conv_then_add,
    flops=_flops(of_y=1),
    channels="kc",
    run=add_shard,
)


def _cotangents(p: ConvProblem, x: Array, w: Array, dz: Array, want: Sequence[bool]) -> list[Array | None]:
    """dx = dgrad(dz, w); dw = wgrad(x, dz); db = sum of dz; dresidual = dz."""
    bare = p.bare()
    grads: list[Array | None] = [
        dgrad(bare, dz, w) if want[0] else None,
        wgrad(bare, x, dz) if want[1] else None,
    ]
    if p.bias:
        grads.append(_sum_of_channels(p, dz) if want[2] else None)
    return grads + [dz if wanted else None for wanted in want[len(grads) :]]


def _tangents(p: ConvProblem, x: Array, w: Array, given: Sequence[Array | None]) -> list[Array]:
    dx, dw, *rest = given
    bare = p.bare()
    parts = [] if dx is None else [fprop(bare, dx, w)]
    parts += [] if dw is None else [fprop(bare, x, dw)]
    parts += [jnp.broadcast_to(reference.per_channel(p, t), p.y_shape) for t in rest[: p.bias] if t is not None]
    return parts + [t for t in rest[p.bias :] if t is not None]


def convolution(p: ConvProblem, x: Array, w: Array, *b: Array) -> list[Array]:
    """conv; fprop where nothing follows the sum; lax's own operations where there is nothing to compute."""
    if p.empty:
        return reference.conv(p, x, w, *b)
    return conv_kernel(p, x, w, *b) if p.fused else [fprop(p, x, w)]


def with_residual(p: ConvProblem, x: Array, w: Array, *rest: Array) -> list[Array]:
    """conv_add; lax's own operations where there is nothing to compute."""
    return _conv_then_add(p, x, w, *rest) if p.empty else conv_add(p, x, w, *rest)


primitives.fuse(conv_kernel, layer.rules(conv_kernel, _tangents, _cotangents))
primitives.fuse(conv_add, layer.rules(conv_add, _tangents, _cotangents))


# ----------------------------------------------------------------------------------------------------------------------
# The public functions. `locals()` in the first statement is the arguments by name.


def _conv(name: str, nd: int, x: Any, w: Any, b: Any, residual: Any, **options: Any) -> Any:
    scales = {argument: options.pop(argument) for argument in ("scale", "residual_scale", "out_scale", "out_dtype")}
    if conv_scaled.asked(x, tuple(scales.values())):
        return conv_scaled.run(name, nd, x, w, b, residual, **scales, **options)
    if all(hasattr(a, "dtype") and jnp.issubdtype(a.dtype, jnp.integer) for a in (x, w)):
        raise TypeError(
            f"{name}: x and w have dtypes {x.dtype} and {w.dtype}, expected one of "
            f"{', '.join((*_problem.DTYPES, *_problem.EIGHT_BITS))}. "
            f"jaxconv.conv_general_dilated(..., preferred_element_type=jnp.int32) takes integers, as lax's does"
        )
    x, w = _problem.as_array(name, "x", x), _problem.as_array(name, "w", w)
    b = None if b is None else _problem.as_array(name, "b", b)
    residual = None if residual is None else _problem.as_array(name, "residual", residual)
    return run_public(ConvProblem.infer(name, nd, x, w, b, residual=residual, **options), x, w, b, residual)


def run_public(p: ConvProblem, x: Array, w: Array, b: Array | None, residual: Array | None = None) -> Any:
    """What the public functions return."""
    if p.activation.name == "none" and (not p.bias or residual is not None):  # z is y there
        run = replace(p, save_preactivation=False)
    else:
        run = p
    args = [x, w, *(a for a in (b, residual) if a is not None)]
    outs = (convolution if residual is None else with_residual)(run, *args)
    return (outs[0], outs[-1]) if p.save_preactivation else outs[0]


@overload
def conv1d(
    x: Operand,
    w: Operand,
    b: Operand | None = None,
    *,
    padding: Conv1dPadding = "SAME",
    layout: Layout1d = "NWC",
    return_preactivation: Literal[False] = False,
    **options: Unpack[ConvScaledOptions],
) -> Array: ...
@overload
def conv1d(
    x: Operand,
    w: Operand,
    b: Operand | None = None,
    *,
    padding: Conv1dPadding = "SAME",
    layout: Layout1d = "NWC",
    return_preactivation: Literal[True],
    **options: Unpack[ConvScaledOptions],
) -> tuple[Array, Array]: ...
@overload
def conv1d(
    x: Operand,
    w: Operand,
    b: Operand | None = None,
    *,
    padding: Conv1dPadding = "SAME",
    layout: Layout1d = "NWC",
    return_preactivation: bool,
    **options: Unpack[ConvScaledOptions],
) -> Array | tuple[Array, Array]: ...
def conv1d(
    x: Operand,  # (N, W, C) or (N, C, W)
    w: Operand,  # (S, C/G, K) or (K, C/G, S)
    b: Operand | None = None,  # (K,)
    *,
    residual: Operand | None = None,  # like y
    stride: PerDimension = 1,
    padding: Conv1dPadding = "SAME",
    dilation: PerDimension = 1,
    groups: int = 1,
    activation: ToActivation = None,
    layout: Layout1d = "NWC",
    precision: Precision = None,
    return_preactivation: bool = False,
    scale: Operand | float | None = None,  # (K,), or a number
    residual_scale: Operand | float | None = None,  # a number
    out_scale: Operand | float | None = None,  # a number
    out_dtype: DTypeLike | None = None,
    algorithm: ConvAlgorithm | None = None,
    implementation: Implementation | None = None,
) -> Array | tuple[Array, Array]:
    """1-D convolution, bias, residual and activation. See `conv2d`; `layout` is "NWC" (filters WIO) or "NCW" (OIW).

    Example::

        x, w = jnp.ones((8, 100, 16)), jnp.ones((5, 16, 32))  # (N, W, C) and (S, C, K)
        y = jaxconv.conv1d(x, w, padding="CAUSAL", dilation=2, activation="relu")  # (8, 100, 32)
    """
    return _conv("conv1d", 1, **locals())


@overload
def conv2d(
    x: Operand,
    w: Operand,
    b: Operand | None = None,
    *,
    padding: Padding = "SAME",
    layout: Layout2d = "NHWC",
    return_preactivation: Literal[False] = False,
    **options: Unpack[ConvScaledOptions],
) -> Array: ...
@overload
def conv2d(
    x: Operand,
    w: Operand,
    b: Operand | None = None,
    *,
    padding: Padding = "SAME",
    layout: Layout2d = "NHWC",
    return_preactivation: Literal[True],
    **options: Unpack[ConvScaledOptions],
) -> tuple[Array, Array]: ...
@overload
def conv2d(
    x: Operand,
    w: Operand,
    b: Operand | None = None,
    *,
    padding: Padding = "SAME",
    layout: Layout2d = "NHWC",
    return_preactivation: bool,
    **options: Unpack[ConvScaledOptions],
) -> Array | tuple[Array, Array]: ...
def conv2d(
    x: Operand,  # (N, H, W, C) or (N, C, H, W)
    w: Operand,  # (R, S, C/G, K) or (K, C/G, R, S)
    b: Operand | None = None,  # (K,)
    *,
    residual: Operand | None = None,  # like y
    stride: PerDimension = 1,
    padding: Padding = "SAME",
    dilation: PerDimension = 1,
    groups: int = 1,
    activation: ToActivation = None,
    layout: Layout2d = "NHWC",
    precision: Precision = None,
    return_preactivation: bool = False,
    scale: Operand | float | None = None,  # (K,), or a number
    residual_scale: Operand | float | None = None,  # a number
    out_scale: Operand | float | None = None,  # a number
    out_dtype: DTypeLike | None = None,
    algorithm: ConvAlgorithm | None = None,
    implementation: Implementation | None = None,
) -> Array | tuple[Array, Array]:
    """2-D convolution (cross-correlation, as in lax) with bias, residual add and activation.

    Equivalent JAX code for layout="NHWC"::

        z = lax.conv_general_dilated(x, w, (stride, stride), padding, rhs_dilation=(dilation, dilation),
                                     dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups,
                                     precision=precision) + b + residual
        y = activation(z)

    Example::

        x, w, b = jnp.ones((8, 32, 32, 16)), jnp.ones((3, 3, 16, 32)), jnp.zeros(32)
        y = jaxconv.conv2d(x, w, b, stride=2, activation="relu")  # (8, 16, 16, 32)

    Args:
      x: images, (N, H, W, C) for layout "NHWC", (N, C, H, W) for "NCHW". float32, bfloat16, float16 or float64;
        sums are accumulated in at least float32.
      w: filters of x's dtype, (R, S, C/groups, K) ("HWIO") for "NHWC", (K, C/groups, R, S) ("OIHW") for "NCHW".
      b: bias of x's dtype, (K,), or None.
      residual: an array of x's dtype and y's shape, added before the activation, or None. A kernel that
        can do so adds it in the same pass, so that sums are rounded once. Otherwise it is added after the call.
        `explain` says which.
      stride, dilation: in pixels, an int or one per spatial dimension, at least 1.
      padding: "SAME", "SAME_LOWER", "VALID", an int, one int per dimension, or (low, high) pairs; may be asymmetric
        and, as in lax, negative. `conv1d` also takes "CAUSAL": y[i] depends on x[:i + 1] alone.
      groups: channels are split into this many groups convolved separately; groups == C is a depthwise convolution.
      activation: None, "relu", "relu6", "leaky_relu" (slope 0.01; or ("leaky_relu", slope)), "elu", "tanh", "sigmoid",
        "silu" (or "swish"), "gelu" (tanh form), "gelu_exact" or "hard_swish" (z * relu6(z + 3) / 6); or JAX's function
        of that name: jax.nn.relu, jnp.tanh, functools.partial(jax.nn.gelu, approximate=False), ...
      precision: as for `lax.conv_general_dilated`. float32 at "default" and "high" may use TF32 tensor cores on a GPU;
        "highest" has float32 accuracy. A lax.DotAlgorithmPreset names an algorithm of XLA's, which XLA then runs.
      return_preactivation: also return z.
      scale, residual_scale, out_scale, out_dtype: for 8-bit x and w only, see below.
      implementation: None takes the fastest known for this problem and device; "native" is jaxconv's own custom call;
        "xla" is lax.
      algorithm: forces one native algorithm, in forward and backward: "sm90", "implicit_gemm", "direct", "depthwise",
        "grouped", "stem", "narrow", "im2col"; or one kernel of it and its tile, as `explain` names them
        ("sm90/product 128x256").

    Where x and w have 8 bits (each int8 or uint8, or each float8_e4m3fn or float8_e5m2), sums are int32 or float32::

        v = float32(sum) * scale[k] + b[k] + float32(residual) * residual_scale
        y = (activation(v) * out_scale).astype(out_dtype)  # 8 bits: rounded to nearest even, saturated

    This is computed in float32, from left to right, and each operation is rounded by itself. So for integers y has the
    same bits on every device, if the activation is None, relu, relu6 or leaky_relu. `scale` is (K,) or a number,
    `residual_scale` and `out_scale` are numbers; all are float32, positive and finite. A factor or array that is None
    is left out of the formula. b is float32, or, for integers, int32: then it is added to the sum, v = float32(sum +
    b[k]) * scale[k] + ..., which is faster. The residual has 8 or 16 bits, or is float32. `out_dtype` is one of int8,
    uint8, float8_e4m3fn, float8_e5m2, bfloat16, float16 and float32; None means x's dtype if `out_scale` is given, else
    float32. Integers without `scale` return their int32 sums, and take no b, residual or `out_scale`. A call with
    8-bit arrays has no derivative::

        q = jaxconv.conv2d(x, w, b, scale=x_scale * w_scale, activation="relu", out_scale=1 / y_scale)  # int8 of int8

    Returns:
      y of x's dtype, (N, P, Q, K) or (N, K, P, Q); or (y, z) with return_preactivation. As in lax, an empty array where
      the padded input is smaller than the dilated filter.

    Raises:
      TypeError, ValueError: when the arguments do not fit together (at trace time), naming the argument, what it got
        and what was expected; ValueError when a forced implementation or algorithm cannot run, with the reason.

    An infinity in x reaches the outputs whose window holds it, as in lax. Some tensor-core kernels also multiply x by
    zeros, and infinity times zero is NaN. The kernels for 16-bit depthwise convolutions do so up to 15 columns away, or
    47 for filters that reach more than 9 columns. The kernels for groups whose channels are no multiple of 8 do so in
    the neighbouring groups within the same 8 channels. In float16, where overflow is common, a forward pass runs on
    these two only with implementation="native", by name, or after tuning. Gradients and bfloat16 run on them by
    default. The kernels for few input or output channels ("stem") do so up to 3 columns away, in every type.
    implementation="xla" does what lax does: on a CPU depthwise convolutions of float64 spread it to all channels.

    Differentiable in x, w, b and residual to any order, in forward and reverse mode. Letters are named as in CUTLASS
    (github.com/NVIDIA/cutlass, "implicit GEMM convolution"): images N H W C, filters K R S, outputs N P Q K.
    """
    return _conv("conv2d", 2, **locals())


@overload
def conv3d(
    x: Operand,
    w: Operand,
    b: Operand | None = None,
    *,
    padding: Padding = "SAME",
    layout: Layout3d = "NDHWC",
    return_preactivation: Literal[False] = False,
    **options: Unpack[ConvScaledOptions],
) -> Array: ...
@overload
def conv3d(
    x: Operand,
    w: Operand,
    b: Operand | None = None,
    *,
    padding: Padding = "SAME",
    layout: Layout3d = "NDHWC",
    return_preactivation: Literal[True],
    **options: Unpack[ConvScaledOptions],
) -> tuple[Array, Array]: ...
@overload
def conv3d(
    x: Operand,
    w: Operand,
    b: Operand | None = None,
    *,
    padding: Padding = "SAME",
    layout: Layout3d = "NDHWC",
    return_preactivation: bool,
    **options: Unpack[ConvScaledOptions],
) -> Array | tuple[Array, Array]: ...
def conv3d(
    x: Operand,  # (N, D, H, W, C) or (N, C, D, H, W)
    w: Operand,  # (T, R, S, C/G, K) or (K, C/G, T, R, S)
    b: Operand | None = None,  # (K,)
    *,
    residual: Operand | None = None,  # like y
    stride: PerDimension = 1,
    padding: Padding = "SAME",
    dilation: PerDimension = 1,
    groups: int = 1,
    activation: ToActivation = None,
    layout: Layout3d = "NDHWC",
    precision: Precision = None,
    return_preactivation: bool = False,
    scale: Operand | float | None = None,  # (K,), or a number
    residual_scale: Operand | float | None = None,  # a number
    out_scale: Operand | float | None = None,  # a number
    out_dtype: DTypeLike | None = None,
    algorithm: ConvAlgorithm | None = None,
    implementation: Implementation | None = None,
) -> Array | tuple[Array, Array]:
    """3-D convolution, bias, residual and activation. See `conv2d`; `layout` is "NDHWC" (DHWIO) or "NCDHW" (OIDHW).

    Example::

        x, w = jnp.ones((2, 8, 16, 16, 4)), jnp.ones((3, 3, 3, 4, 8))  # (N, D, H, W, C) and (T, R, S, C, K)
        y = jaxconv.conv3d(x, w, stride=(1, 2, 2))  # (2, 8, 8, 8, 8)
    """
    return _conv("conv3d", 3, **locals())

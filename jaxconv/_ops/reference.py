"""Every op in jnp and lax: what it means, what implementation="xla" runs, and what the tests compare with.

Each function takes a problem and arrays of exactly the problem's shapes, and returns a list of arrays.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Held, because a program may put ours in their place.
from jax.lax import conv_general_dilated, dot_general, reduce_window

from jaxconv._core import primitives
from jaxconv._core.activations import CHEAP, Activation, activate, activate_tangent
from jaxconv._core.in_memory import in_memory
from jaxconv._problem import (
    AvgPoolProblem,
    BatchNormProblem,
    ConvProblem,
    DenseProblem,
    GroupNormProblem,
    IntegerConvProblem,
    PoolProblem,
    ScaledConvProblem,
    SqueezeExciteProblem,
    is_number,
    promoted,
)


def _like(shape: tuple[int, ...], operand: jax.Array, batch: bool) -> Any:
    """A stand-in for an array of `shape` on `operand`'s mesh; with `batch` its first axis is sharded as operand's."""
    aval = jax.typeof(operand)
    if aval.sharding.mesh.empty:
        return jax.ShapeDtypeStruct(shape, operand.dtype)
    spec = [aval.sharding.spec[0] if batch else None] + [None] * (len(shape) - 1)
    return jax.ShapeDtypeStruct(
        shape,
        operand.dtype,
        sharding=jax.sharding.NamedSharding(aval.sharding.mesh, jax.sharding.PartitionSpec(*spec)),
        manual_axis_type=aval.manual_axis_type,
    )


# ----------------------------------------------------------------------------------------------------------------------
# Convolution


def conv_fprop(p: ConvProblem, x: jax.Array, w: jax.Array) -> list[jax.Array]:
    """y = conv(x, w)."""
    x, padding = _within_reach(p, x)
    y = conv_general_dilated(
        x,
        w,
        window_strides=p.stride,
        padding=padding,
        rhs_dilation=p.dilation,
        dimension_numbers=p.dimension_numbers,
        feature_group_count=p.groups,
        precision=p.precision,
    )
    return [y]


def conv_integer(p: IntegerConvProblem, lhs: jax.Array, rhs: jax.Array) -> list[jax.Array]:
    """lax's convolution, whose sums wrap around. lax takes one type: where there are two, both become the result's."""
    params = dict(
        window_strides=p.stride,
        padding=p.padding,
        lhs_dilation=p.lhs_dilation,
        rhs_dilation=p.rhs_dilation,
        dimension_numbers=lax.ConvDimensionNumbers(p.lhs_spec, p.rhs_spec, p.out_spec),
        feature_group_count=p.groups,
        batch_group_count=p.batch_groups,
        preferred_element_type=p.dtype,
    )

    def by_lax(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        if p.lhs_dtype != p.rhs_dtype:
            lhs, rhs = lhs.astype(p.dtype), rhs.astype(p.dtype)
        return conv_general_dilated(lhs, rhs, **params)

    return [_of_integers(functools.partial(conv_by_products, **params), by_lax, lhs, rhs)]


def conv_by_products(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    dimension_numbers: lax.ConvDimensionNumbers,
    feature_group_count: int,
    batch_group_count: int,
    preferred_element_type: Any,
    **_: Any,
) -> jax.Array:
    """lax's convolution of integers as one matrix product for each group, over taps and channels. Sums wrap around.

    XLA compiles products of integers for a GPU, but no convolutions. So a GPU runs this where no kernel can: with
    symbolic extents, in programs that are exported or partitioned, with JAXCONV_DISABLE. The windows are written to
    memory: taps times the size of x.
    """
    numbers, nd, b = dimension_numbers, lhs.ndim - 2, batch_group_count
    g = max(feature_group_count, b)
    dtype = jnp.dtype(preferred_element_type)
    # Of 8 bits a sum in int32 holds all the bits of a narrower one, and XLA has products for it on tensor cores.
    narrow = g == 1 and dtype.itemsize <= 4 and {lhs.dtype.name, rhs.dtype.name} <= {"int8", "uint8"}
    if not narrow:
        lhs, rhs = lhs.astype(dtype), rhs.astype(dtype)
    n_axis, c_axis, *pixels = numbers.lhs_spec
    x = lhs.transpose((n_axis, *pixels, c_axis))
    k_axis, c_axis, *taps = numbers.rhs_spec
    w = rhs.transpose((*taps, c_axis, k_axis))
    if isinstance(padding, str):
        reach = [(f - 1) * d + 1 for f, d in zip(w.shape[:nd], rhs_dilation, strict=True)]
        padding = lax.padtype_to_pads(x.shape[1:-1], reach, window_strides, padding)
    config = [(low, high, d - 1) for (low, high), d in zip(padding, lhs_dilation, strict=True)]
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *config, (0, 0, 0)])
    n, *extents, c = x.shape
    *filter, group_c, k = w.shape
    sizes = zip(extents, filter, window_strides, rhs_dilation, strict=True)
    out = [(size - (f - 1) * d - 1) // s + 1 for size, f, s, d in sizes]
    out = [max(o, 0) if is_number(o) else o for o in out]
    nothing = any(is_number(o) and o == 0 for o in out)  # a filter that reaches further than x
    windows = []
    for tap in itertools.product(*map(range, filter)) if not nothing else ():
        first = [t * d for t, d in zip(tap, rhs_dilation, strict=True)]
        last = [t + (o - 1) * s + 1 for t, o, s in zip(first, out, window_strides, strict=True)]
        windows.append(lax.slice(x, (0, *first, 0), (n, *last, c), (1, *window_strides, 1)))
    if nothing:
        y = jnp.zeros((n // b, *out, k), dtype)
    elif narrow:
        rows = jnp.concatenate(windows, -1).reshape(-1, len(windows) * c)
        y = _product_of_integers(rows, w.reshape(-1, k)).reshape(n, *out, k).astype(dtype)
    else:
        # (images, pixels, taps, groups, channels of a group) or, with batch groups, those as the first axis of images
        split = (b, n // b, *out, len(windows), c) if b > 1 else (n, *out, len(windows), g, group_c)
        x = jnp.stack(windows, -2).reshape(split)
        w = w.reshape(len(windows), group_c, g, k // g)
        group, terms = (0, (nd + 2, nd + 3)) if b > 1 else (nd + 2, (nd + 1, nd + 3))
        y = dot_general(x, w, ((terms, (0, 1)), ((group,), (2,))), preferred_element_type=dtype)
        y = jnp.moveaxis(y, 0, -2).reshape(n // b, *out, k)  # groups came first
    order = dict(zip(numbers.out_spec, (0, nd + 1, *range(1, nd + 1)), strict=True))
    return y.transpose([order[axis] for axis in range(nd + 2)])


def conv_scaled(p: ScaledConvProblem, x: jax.Array, w: jax.Array, *rest: jax.Array) -> list[jax.Array]:
    """A convolution of 8-bit numbers and what follows it; `rest` is (scale?, b?, residual?, residual_scale?,
    out_scale?, x2?, w2?), as the problem has them::

        acc = conv(x, w) + shortcut(x2, w2)             # int32; float32 of float8
        v = float32(acc) * scale[k] + b[k]              # b of int32: float32(acc + b[k]) * scale[k]
        v = v + float32(residual) * residual_scale
        v = activation(v) * out_scale
        y = v.astype(out_dtype)                         # 8 bits: rounded to nearest even, saturated

    Every operation is one of float32, rounded by itself: see `_product`. So with sums of integers, and without an
    activation or with relu, relu6 and leaky_relu, y is the same bits wherever it is computed. NaN becomes 0 in
    integers, and stays NaN in float8.
    """
    sums = conv_scaled_sums(p, x, w)
    if p.has_shortcut:
        *rest, x2, w2 = rest
        sums = sums + conv_scaled_sums(p.shortcut, x2, w2)
    return conv_scaled_epilogue(p, sums, *rest)


def conv_scaled_sums(p: ScaledConvProblem, x: jax.Array, w: jax.Array) -> jax.Array:
    """acc: sums of integers wrap around in int32; of float8 products are exact, and sums float32."""
    if p.product:
        y = _product_of_integers(x[:, 0], w[0]) if p.of_integers else _product_of_float8(x[:, 0], w[0])
        return y[:, None]
    if p.of_integers:
        return _of_integers(functools.partial(_sums_by_products, p), functools.partial(_sums_by_lax, p), x, w)
    return _sums_by_lax(p, x, w)


def _sums_by_products(p: ScaledConvProblem, x: jax.Array, w: jax.Array) -> jax.Array:
    return conv_by_products(
        x,
        w,
        window_strides=p.stride,
        padding=p.padding,
        lhs_dilation=(1,) * p.nd,
        rhs_dilation=p.dilation,
        dimension_numbers=lax.conv_dimension_numbers(x.shape, w.shape, p.dimension_numbers),
        feature_group_count=p.groups,
        batch_group_count=1,
        preferred_element_type=p.sums_dtype,
    )


def _sums_by_lax(p: ScaledConvProblem, x: jax.Array, w: jax.Array) -> jax.Array:
    if not p.of_integers or p.w_dtype != p.dtype:
        x, w = x.astype(p.sums_dtype), w.astype(p.sums_dtype)
    # XLA's CPU code of int8 reads beside a pad in front of its convolution (jaxlib 0.10). It has these pads itself.
    x, padding = (x, p.padding) if p.of_integers else _within_reach(p, x)
    return conv_general_dilated(
        x,
        w,
        window_strides=p.stride,
        padding=padding,
        rhs_dilation=p.dilation,
        dimension_numbers=p.dimension_numbers,
        feature_group_count=p.groups,
        precision=lax.Precision.DEFAULT,  # TF32 and bfloat16 hold a number of float8 exactly
        preferred_element_type=p.sums_dtype,
    )


def _of_integers(on_gpus: Callable[..., jax.Array], elsewhere: Callable[..., jax.Array], *args: jax.Array) -> jax.Array:
    """A convolution of integers, which XLA does not have on NVIDIA's GPUs: also where no platform is known yet, in a
    program that is mapped or differentiated."""
    where = primitives.lowers_for()
    empty = any(is_number(extent) and extent == 0 for a in args for extent in a.shape)
    if where is None and not empty:
        return lax.platform_dependent(*args, cuda=on_gpus, default=elsewhere)
    return (on_gpus if where == "cuda" else elsewhere)(*args)


# Where an int8 product of XLA's reads fewer than 16 rows transposed, from memory or from what its own kernel computes,
# all of it is wrong (jaxlib 0.11.2, H100; docs/kernels/eight.md). So x of these products is in memory, row after row.


def _product_of_float8(x: jax.Array, w: jax.Array) -> jax.Array:
    """x @ w in float32. At a lower precision XLA lets a GPU's tensor cores add up all products with 14 bits."""
    how = dict(precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    return lax.dot_general(in_memory(x), w, (((1,), (0,)), ((), ())), **how)


def _product_of_integers(x: jax.Array, w: jax.Array) -> jax.Array:
    """x @ w in int32, each int8 or uint8, of which XLA has fast products of int8 alone.

    A uint8 is an int8 and 128, and what the 128s give follows from the other operand's sums. On a GPU zeros fill a sum
    up to a multiple of 16 products: XLA makes twice the sum of 5 or 15 products of int8 (jaxlib 0.11.2, H100).
    """
    rest = -x.shape[-1] % 16 if is_number(x.shape[-1]) and primitives.lowers_for() != "cpu" else 0
    if rest:
        x, w = jnp.pad(x, ((0, 0), (0, rest))), jnp.pad(w, ((0, rest), (0, 0)))
    moved = [a.dtype == jnp.uint8 for a in (x, w)]
    a, b = (lax.bitcast_convert_type(v ^ 128, jnp.int8) if by else v for v, by in zip((x, w), moved, strict=True))
    y = lax.dot_general(in_memory(a), b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32)
    if moved[0]:
        y = y + 128 * jnp.sum(w, 0, keepdims=True, dtype=jnp.int32)
    if moved[1]:
        y = y + 128 * jnp.sum(a, 1, keepdims=True, dtype=jnp.int32)
    return y


def conv_scaled_epilogue(p: ScaledConvProblem, acc: jax.Array, *rest: jax.Array) -> list[jax.Array]:
    """conv_scaled from its sums on."""
    operands = list(rest)
    scale = per_channel(p, operands.pop(0)) if p.scaled else None
    b = per_channel(p, operands.pop(0)) if p.bias else None
    if b is not None and p.bias_dtype == "int32":
        acc, b = acc + b, None
    v = acc if acc.dtype.name == p.out_dtype and not rest else acc.astype(jnp.float32)
    if scale is not None:
        v = _product(v, scale)
    if b is not None:
        v = v + b
    if p.residual_dtype is not None:
        residual = operands.pop(0).astype(jnp.float32)
        v = v + (_product(residual, operands.pop(0)) if p.residual_scaled else residual)
    v = activate(p.activation, v)
    if p.out_scaled:
        v = v * operands.pop(0)
    return [narrowed(v, p.out_dtype)]


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """a * b, rounded to float32.

    XLA's CPU and GPU code lets a sum take its products in without rounding them (a fused multiply-add), or does not, as
    the machine has it. It does not look through a clamp, which changes no finite number; infinities are put back.
    """
    largest, product = float(np.finfo(np.float32).max), a * b
    return jnp.where(jnp.isinf(product), product, jnp.clip(product, -largest, largest))


def stored(x: jax.Array, factor: Any, dtype: str) -> jax.Array:
    """x as numbers of 8 bits, of which `factor` are a unit."""
    return narrowed(x.astype(jnp.float32) * np.float32(factor), dtype)


def narrowed(v: jax.Array, dtype: str) -> jax.Array:
    """float32 in `dtype`: of 8 bits saturated, integers rounded to nearest even, NaN 0 in integers."""
    if dtype == v.dtype.name:
        return v
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        kept = jnp.where(jnp.isnan(v), 0.0, jnp.clip(v, info.min, info.max))
        return lax.round(kept, lax.RoundingMethod.TO_NEAREST_EVEN).astype(dtype)
    if np.dtype(dtype).itemsize == 1:
        largest = float(jnp.finfo(dtype).max)
        v = jnp.clip(v, -largest, largest)
    return v.astype(dtype)


def _within_reach(p: ConvProblem, x: jax.Array) -> tuple[jax.Array, Any]:
    """x and the padding with pads of 0 to a filter's reach: what is cropped, or beyond it, x loses or gets before.

    Of negative pads, which those beyond the reach are in dgrad, XLA's CPU convolutions up to jaxlib 0.11 read next to
    the array (lax alone; padding (-1, 1) of one tap).
    """
    if isinstance(p.padding, str):
        return x, p.padding
    reach = [(taps - 1) * d for taps, d in zip(p.filter, p.dilation, strict=True)]
    kept = tuple((min(max(low, 0), r), min(max(high, 0), r)) for (low, high), r in zip(p.padding, reach, strict=True))
    rest = [(low - a, high - b, 0) for (low, high), (a, b) in zip(p.padding, kept, strict=True)]
    if not any(low or high for low, high, _ in rest):
        return x, p.padding
    if any(size + low + high < 0 for size, (low, high, _) in zip(p.in_spatial, rest, strict=True)):
        return x, p.padding
    whole = [(0, 0, 0)]
    config = [*whole, *rest, *whole] if p.channels_last else [*whole, *whole, *rest]
    return lax.pad(x, jnp.zeros((), x.dtype), config), kept


def conv_dgrad(p: ConvProblem, dy: jax.Array, w: jax.Array) -> list[jax.Array]:
    """dx: the transpose of conv_fprop in x, as lax derives it."""
    return list(jax.linear_transpose(lambda x: conv_fprop(p, x, w)[0], _like(p.x_shape, dy, batch=True))(dy))


def conv_wgrad(p: ConvProblem, x: jax.Array, dy: jax.Array) -> list[jax.Array]:
    """dw: the transpose of conv_fprop in w, as lax derives it."""
    return list(jax.linear_transpose(lambda w: conv_fprop(p, x, w)[0], _like(p.w_shape, x, batch=False))(dy))


def conv_statistics(p: ConvProblem, x: jax.Array, w: jax.Array, *rest: jax.Array) -> list[jax.Array]:
    """y = conv(x, w) + b + residual, where they are given, and the mean and biased variance of each of its channels."""
    (y,) = conv(p, x, w, *rest[: p.bias])
    for residual in rest[p.bias :]:
        (y,) = conv_added(p, y, residual)
    k, shift, var = batchnorm_moments(norm_of(p), y)
    return [y, k + shift, var]


def norm_of(p: ConvProblem) -> BatchNormProblem:
    """A batch-norm of y."""
    return BatchNormProblem(p.name, p.dtype, p.y_shape, p.channel_axis, True, 0.0, 0.0)


def per_channel(p: ConvProblem, b: jax.Array) -> jax.Array:
    """b (K,) shaped to broadcast against y."""
    return lax.expand_dims(b, [axis for axis in range(p.nd + 2) if axis != p.channel_axis])


def conv(p: ConvProblem, x: jax.Array, w: jax.Array, *b: jax.Array) -> list[jax.Array]:
    """z = conv(x, w) + b; y = f(z); [y] or [y, z]."""
    return conv_epilogue(p, *conv_fprop(p, x, w), *b)


def conv_epilogue(p: ConvProblem, z: jax.Array, *b: jax.Array) -> list[jax.Array]:
    """conv from conv(x, w) on."""
    if p.bias:
        z = z + per_channel(p, b[0])
    y = activate(p.activation, z)
    return [y, z] if p.save_preactivation else [y]


def conv_added(p: ConvProblem, z: jax.Array, residual: jax.Array) -> list[jax.Array]:
    """z + residual, then conv's activation; [y] or [y, z]. Of 16 bits the sum is rounded once, to y."""
    y, total = activated_sum(p.activation, z, residual)
    return [y, total] if p.save_preactivation else [y]


def activated_sum(activation: Activation, z: jax.Array, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(f(z + residual), z + residual), each rounded to z's dtype once."""
    # What only clips has the same bits in 16 bits. A sum in float32 XLA might keep in memory, for whoever reads y in
    # float32: the passes of a network with layer-norms in its residual blocks read and wrote 1.34 times as much.
    clips = activation.name in ("none", "relu", "relu6")
    wide = z.dtype if clips else promoted(z.dtype, jnp.float32)
    total = z.astype(wide) + residual.astype(wide)
    return activate(activation, total).astype(z.dtype), total.astype(z.dtype)


# ----------------------------------------------------------------------------------------------------------------------
# Dense


def matmul(p: DenseProblem, x: jax.Array, w: jax.Array) -> list[jax.Array]:
    """alpha * op(x) @ op(w) for each instance; an operand without an instance axis is shared."""
    x_batched, w_batched = "x" in p.batched, "w" in p.batched
    contract = ((int(x_batched) + (0 if p.trans_x else 1),), (int(w_batched) + (1 if p.trans_w else 0),))
    batch = ((0,), (0,)) if x_batched and w_batched else ((), ())
    # What is multiplied by a number is rounded once, afterwards.
    wide = None if p.alpha == 1.0 else promoted(x.dtype, jnp.float32)
    z = dot_general(x, w, (contract, batch), precision=p.precision, preferred_element_type=wide)
    if p.batch is not None and not x_batched:
        # (m, batch, n) where only w has instances; (m, n) where neither has
        z = jnp.moveaxis(z, 1, 0) if w_batched else jnp.broadcast_to(z, p.y_shape)
    return [z if p.alpha == 1.0 else (p.alpha * z).astype(x.dtype)]


def scaled(number: float, a: jax.Array) -> jax.Array:
    """number * a, of which the number is not rounded to 16 bits."""
    return a if number == 1.0 else (number * a.astype(promoted(a.dtype, jnp.float32))).astype(a.dtype)


def dense(p: DenseProblem, x: jax.Array, w: jax.Array, *rest: jax.Array) -> list[jax.Array]:
    """z = alpha * op(x) @ op(w) + beta * c + b; y = f(z); [y] or [y, z]. `rest` is (b?, c?)."""
    return dense_epilogue(p, *matmul(p, x, w), *rest)


def dense_epilogue(p: DenseProblem, z: jax.Array, *rest: jax.Array) -> list[jax.Array]:
    """dense from alpha * op(x) @ op(w) on."""
    operands = list(rest)
    if p.bias is not None:
        z = z + spread_bias(p, operands.pop(0))
    if p.addend:
        c = operands.pop(0)
        wide = z.dtype if p.beta == 1.0 else promoted(z.dtype, jnp.float32)
        added = c if p.beta == 1.0 else p.beta * c.astype(wide)
        z = (z.astype(wide) + added).astype(z.dtype)
    y = activate(p.activation, z)
    return [y, z] if p.save_preactivation else [y]


def spread_bias(p: DenseProblem, b: jax.Array) -> jax.Array:
    """b, shaped to broadcast against y."""
    b = b[..., :, None] if p.bias == "row" else b[..., None, :]
    return b if p.batch is None or "b" in p.batched else b[None]


# ----------------------------------------------------------------------------------------------------------------------
# Batch-norm. Statistics and arithmetic in float32 for 16-bit x.


def channel_shape(p: BatchNormProblem) -> tuple[int, ...]:
    """The shape in which a per-channel array broadcasts against x."""
    return (*p.lead, *(extent if axis == p.channel_axis else 1 for axis, extent in enumerate(p.shape)))


def reduced_axes(p: BatchNormProblem) -> tuple[int, ...]:
    first = len(p.lead)
    return tuple(first + axis for axis in range(len(p.shape)) if axis != p.channel_axis)


def _affine(p: BatchNormProblem, x, scale, bias, mean, rstd, residual) -> jax.Array:
    """z, in the parameters' dtype."""
    s = channel_shape(p)
    z = (x.astype(p.param_dtype) - mean.reshape(s)) * (rstd * scale).reshape(s) + bias.reshape(s)
    return z if residual is None else z + residual.astype(p.param_dtype)


def square_scale(n: Any) -> float:
    """What n deviations are multiplied by before they are squared and summed up: a power of two, at most 1 / n.

    Of deviations from one of n numbers (or from their mean) the squares' sum is at most n^2 times the variance, so that
    it is finite in this scale where the variance is. Powers of two round nothing. What is lost are deviations below
    2^-63 n, whose squares are 0 in float32. As x * t - k * t the scale costs a CPU nothing: the difference is an FMA.
    """
    return 2.0 ** -((n - 1).bit_length() if is_number(n) else 24)


def batchnorm_moments(p: BatchNormProblem, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(k, mean - k, biased variance) per channel, in one pass over x, with k a sample of the channel.

    With k near the mean, E[(x-k)^2] - E[x-k]^2 has none of the cancellation of E[x^2] - E[x]^2.
    """
    axes = reduced_axes(p)
    first = tuple(slice(None) if axis not in axes else slice(0, 1) for axis in range(x.ndim))
    k = lax.stop_gradient(x[first]).astype(p.param_dtype)
    n, t = p.reduced, square_scale(p.reduced)
    d = x.astype(p.param_dtype) * t - k * t
    shift = jnp.sum(d, axes) / n
    square = jnp.sum(d * d, axes) / n
    return k.reshape(p.param_shape), shift * (1 / t), jnp.maximum(square - shift * shift, 0) * (1 / t**2)


def batchnorm_masked_moments(p: BatchNormProblem, x: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(mean, biased variance) per channel of the elements that `mask` (broadcast to x's shape) keeps; NaN of none."""
    axes, s, t = reduced_axes(p), channel_shape(p), square_scale(p.reduced)
    mask = jnp.broadcast_to(mask, x.shape)
    n = jnp.sum(mask, axes, dtype=p.param_dtype)
    scaled = x.astype(p.param_dtype) * t
    # Two passes: the first need not be exact, since the second corrects it.
    k = lax.stop_gradient(jnp.sum(scaled, axes, where=mask) / n)
    d = jnp.where(mask, scaled - k.reshape(s), 0)
    shift = jnp.sum(d, axes) / n
    return (k + shift) * (1 / t), jnp.maximum(jnp.sum(d * d, axes) / n - shift * shift, 0) * (1 / t**2)


def batchnorm_train(
    p: BatchNormProblem, x, scale, bias, running_mean, running_var, *residual: jax.Array
) -> list[jax.Array]:
    """[y, new_running_mean, new_running_var, mean, rstd]."""
    k, shift, var = batchnorm_moments(p, x)
    mean = k + shift
    rstd = lax.rsqrt(var + p.epsilon)
    z = _affine(p, x, scale, bias, mean, rstd, residual[0] if p.residual else None)
    m = p.momentum
    return [
        activate(p.activation, z).astype(x.dtype),
        m * running_mean + (1 - m) * mean,
        m * running_var + (1 - m) * var,
        mean,
        rstd,
    ]


def batchnorm_infer(p: BatchNormProblem, x, scale, bias, mean, var, *residual: jax.Array) -> list[jax.Array]:
    """[y]."""
    z = _affine(p, x, scale, bias, mean, lax.rsqrt(var + p.epsilon), residual[0] if p.residual else None)
    return [activate(p.activation, z).astype(x.dtype)]


def batchnorm_backward(p: BatchNormProblem, x, dy, scale, bias, mean, rstd, *residual: jax.Array) -> list[jax.Array]:
    """[dscale, dbias, dx?, dresidual?]: the derivative of batchnorm_train's y, with z recomputed from x."""
    axes = reduced_axes(p)
    xhat, dz = batchnorm_dz(p, x, dy, scale, bias, mean, rstd, *residual)
    dbias = jnp.sum(dz, axes)
    dscale = jnp.sum(dz * xhat, axes)
    outs = [dscale, dbias]
    if p.want_dx:
        outs.append(batchnorm_dx(p, xhat, dz, scale, rstd, dscale, dbias, p.reduced).astype(x.dtype))
    if p.want_dresidual:
        outs.append(dz.astype(x.dtype))
    return outs


def batchnorm_dx_of_sums(
    p: BatchNormProblem, x, dy, scale, bias, mean, rstd, dscale, dbias, *residual: jax.Array
) -> list[jax.Array]:
    """[dx] from the sums dscale and dbias over `p.count` elements a channel; dy is dz where p.dz."""
    xhat, dz = batchnorm_dz(p.of_dz, x, dy, scale, bias, mean, rstd, *residual)
    return [batchnorm_dx(p, xhat, dz, scale, rstd, dscale, dbias, p.count).astype(x.dtype)]


def batchnorm_dz(p: BatchNormProblem, x, dy, scale, bias, mean, rstd, *residual: jax.Array) -> tuple[Any, Any]:
    """(xhat, dz), in the parameters' dtype."""
    s = channel_shape(p)
    xhat = (x.astype(p.param_dtype) - mean.reshape(s)) * rstd.reshape(s)
    dz = dy.astype(p.param_dtype)
    if p.activation.residual:
        z = _affine(p, x, scale, bias, mean, rstd, residual[0] if p.residual else None)
        dz = activate_tangent(p.activation, z, dz)
    return xhat, dz


def batchnorm_dx(p: BatchNormProblem, xhat, dz, scale, rstd, dscale, dbias, n: int) -> jax.Array:
    """dx from the sums dscale and dbias over `n` elements a channel."""
    s = channel_shape(p)
    return (scale * rstd).reshape(s) * (dz - (dbias / n).reshape(s) - xhat * (dscale / n).reshape(s))


def signs(y: jax.Array) -> jax.Array:
    """Whether elements of y are above 0, uint8 (..., C / 8): bit j of [..., i] is that of y[..., 8i + j]."""
    bits = (y > 0).reshape(*y.shape[:-1], -1, 8).astype(jnp.uint8)
    return jnp.sum(bits << _places(bits.ndim), -1, dtype=jnp.uint8)


def above(bits: jax.Array) -> jax.Array:
    """What `signs` was given: whether elements are above 0."""
    each = (bits[..., None] >> _places(bits.ndim + 1)) & 1
    return each.reshape(*bits.shape[:-1], -1) > 0


def _places(ndim: int) -> jax.Array:
    """0 to 7 along the last of so many axes."""
    return lax.expand_dims(jnp.arange(8, dtype=jnp.uint8), range(ndim - 1))


def along(axis: int, x, mean) -> Callable[[jax.Array], jax.Array]:
    """Shapes numbers of channels like `mean`, (C,) or instances of it, to broadcast against x or its instances."""
    lead = mean.ndim - 1
    others = [a for a in range(lead, x.ndim) if a != axis + lead]
    return lambda numbers: lax.expand_dims(numbers, others)


def through_relu(axis: int, dy, bits, x, mean, rstd) -> list[jax.Array]:
    """[dz, dscale, dbias] of y = relu(z), z = xhat * scale + bias + residual, xhat = (x - mean) * rstd along `axis`.

    `bits` are y's `signs`. Arrays may be of several instances, as `along` has them.
    """
    each, lead = along(axis, x, mean), mean.ndim - 1
    dz = jnp.where(above(bits), dy, 0).astype(dy.dtype)
    wide, pixels = dz.astype(mean.dtype), [a for a in range(lead, x.ndim) if a != axis + lead]
    xhat = (x.astype(mean.dtype) - each(mean)) * each(rstd)
    return [dz, jnp.sum(wide * xhat, pixels), jnp.sum(wide, pixels)]


def through_norm(p: ConvProblem, dy, x, scale, bias, mean, rstd) -> list[jax.Array]:
    """[dz, dscale, dbias] of y = f(z), z = xhat * scale + bias, xhat = (x - mean) * rstd; f is p's activation."""
    norm = BatchNormProblem(p.name, p.dtype, x.shape, p.channel_axis, True, 0.0, 0.0, p.activation)
    xhat, dz = batchnorm_dz(norm, x, dy, scale, bias, mean, rstd)
    dz = dz.astype(x.dtype)
    wide = dz.astype(mean.dtype)
    return [dz, jnp.sum(wide * xhat, reduced_axes(norm)), jnp.sum(wide, reduced_axes(norm))]


def batchnorm_shortcut(p: BatchNormProblem, x, scale, bias, mean, rstd, r, *norm_r: jax.Array) -> list[jax.Array]:
    """[y, mean, rstd, mean_r, rstd_r]: the sum of x and r, each normalised; `norm_r` is r's scale, bias, mean, rstd."""
    z = _affine(p, x, scale, bias, mean, rstd, _affine(p, r, *norm_r, None))
    return [activate(p.activation, z).astype(x.dtype), mean, rstd, *norm_r[2:]]


def batchnorm_shortcut_backward(
    p: BatchNormProblem, x, dy, scale, bias, mean, rstd, r, *norm_r: jax.Array, total: Any = None, count: Any = None
) -> list[jax.Array]:
    """[dscale, dbias, dscale_r, dx, dr]. `total` makes of the sums of a part those of all, over `count` elements."""
    scale_r, _, mean_r, rstd_r = norm_r
    s, axes, n = channel_shape(p), reduced_axes(p), p.reduced if count is None else count
    added = _affine(p, r, *norm_r, None)
    xhat, dz = batchnorm_dz(dataclasses.replace(p, residual=True), x, dy, scale, bias, mean, rstd, added)
    rhat = (r.astype(p.param_dtype) - mean_r.reshape(s)) * rstd_r.reshape(s)
    sums = jnp.stack([jnp.sum(dz * xhat, axes), jnp.sum(dz, axes), jnp.sum(dz * rhat, axes)])
    dscale, dbias, dscale_r = sums if total is None else total(sums)
    dx = batchnorm_dx(p, xhat, dz, scale, rstd, dscale, dbias, n)
    dr = batchnorm_dx(p, rhat, dz, scale_r, rstd_r, dscale_r, dbias, n)
    return [dscale, dbias, dscale_r, dx.astype(x.dtype), dr.astype(x.dtype)]


# ----------------------------------------------------------------------------------------------------------------------
# Max-pooling


def max_pool(p: PoolProblem, x: jax.Array) -> list[jax.Array]:
    """[y] or [y, positions]."""
    y = reduce_window(
        x,
        -jnp.inf,
        lax.max,
        window_dimensions=p.per_axis(p.window, 1),
        window_strides=p.per_axis(p.stride, 1),
        padding=p.per_axis(p.padding, (0, 0)),
        window_dilation=p.per_axis(p.dilation, 1),
    )
    return [y, max_pool_positions(p, x)] if p.save else [y]


def max_pool_positions(p: PoolProblem, x: jax.Array) -> jax.Array:
    """The tap that each maximum is taken from, counted row by row: that which lax's gradient selects. A byte, but for
    more than 255 taps.

    A tap takes the place of those before it unless (ge) one of them is at least as large; padding is -inf.
    """
    x, dtype = lax.stop_gradient(x), np.int32 if p.too_many_taps() else np.uint8
    best, position = None, None
    padded = lax.pad(x, jnp.array(-jnp.inf, x.dtype), p.per_axis(tuple((*pad, 0) for pad in p.padding), (0, 0, 0)))
    for tap, at in enumerate(np.ndindex(p.window)):
        v = _tap(p, padded, at)
        if best is None:
            best, position = v, jnp.zeros_like(v, dtype)
        else:
            stays = best >= v
            best, position = jnp.where(stays, best, v), jnp.where(stays, position, dtype(tap))
    return position


def _tap(p: PoolProblem, padded: jax.Array, at: tuple[int, ...]) -> jax.Array:
    """Of the padded x that tap of every window: like y."""
    start = tuple(i * d for i, d in zip(at, p.dilation, strict=True))
    stop = tuple(low + (out - 1) * s + 1 for low, out, s in zip(start, p.out_spatial, p.stride, strict=True))
    outer = (p.batch, p.channels) if not p.channels_last else (p.batch,)
    last = (p.channels,) if p.channels_last else ()
    return lax.slice(padded, p.per_axis(start, 0), (*outer, *stop, *last), p.per_axis(p.stride, 1))


def max_pool_backward(p: PoolProblem, x: jax.Array, position: jax.Array, dy: jax.Array) -> list[jax.Array]:
    """[dx]: each dy at the maximum of its window. Without dilation lax derives it from x, else it is the positions'."""
    if p.plain:
        _, transpose = jax.vjp(lambda x: max_pool(dataclasses.replace(p, save=False), x)[0], x)
        return list(transpose(dy))

    def taken(x: jax.Array) -> jax.Array:
        return max_pool_taken(p, x, position)

    return list(jax.linear_transpose(taken, _like(p.x_shape, dy, batch=True))(dy))


def max_pool_taken(p: PoolProblem, x: jax.Array, position: jax.Array) -> jax.Array:
    """The elements of x at these positions in each window: of their own x the maxima. Linear in x."""
    pads = p.per_axis(tuple((*pad, 0) for pad in p.padding), (0, 0, 0))
    padded = lax.pad(x, jnp.zeros((), x.dtype), pads)
    y = jnp.zeros_like(position, x.dtype)
    for tap, at in enumerate(np.ndindex(p.window)):
        y = y + jnp.where(position == tap, _tap(p, padded, at), jnp.zeros((), x.dtype))
    return y


# ----------------------------------------------------------------------------------------------------------------------
# Average-pooling. Sums are of float32 for 16-bit x.


def avg_pool(p: AvgPoolProblem, x: jax.Array) -> list[jax.Array]:
    """[y]."""
    wide = _summed_in(x)
    return [(_window_sums(p, wide) / _window_counts(p, wide.dtype)).astype(x.dtype)]


def _summed_in(x: jax.Array) -> jax.Array:
    return x.astype("float32") if x.dtype.itemsize == 2 else x


def _window_sums(p: AvgPoolProblem, x: jax.Array) -> jax.Array:
    return reduce_window(
        x,
        0.0,
        lax.add,
        window_dimensions=p.per_axis(p.window, 1),
        window_strides=p.per_axis(p.stride, 1),
        padding=p.per_axis(p.padding, (0, 0)),
    )


def _window_counts(p: AvgPoolProblem, dtype: Any) -> Any:
    """What sums are divided by: a number, or like y with extents of 1 for images and channels."""
    if p.count_include_pad:
        return p.taps
    count = jnp.ones((1,) * (p.nd + 2), dtype)
    for axis, (size, window, out, stride, (low, _)) in enumerate(
        zip(p.in_spatial, p.window, p.out_spatial, p.stride, p.padding, strict=True)
    ):
        xp = np if is_number(size) and is_number(out) else jnp
        first = xp.arange(out) * stride - low
        taps = xp.maximum(xp.minimum(first + window, size) - xp.maximum(first, 0), 0)
        place = axis + (1 if p.channels_last else 2)
        count = count * jnp.expand_dims(taps.astype(dtype), [i for i in range(p.nd + 2) if i != place])
    return count


def avg_pool_backward(p: AvgPoolProblem, dy: jax.Array) -> list[jax.Array]:
    """[dx]."""
    wide = _summed_in(dy)
    share = wide / _window_counts(p, wide.dtype)
    sums = functools.partial(_window_sums, p)
    return [dx.astype(dy.dtype) for dx in jax.linear_transpose(sums, _like(p.x_shape, share, batch=True))(share)]


# ----------------------------------------------------------------------------------------------------------------------
# Group-norm and layer-norm (`rows`). Statistics and arithmetic in float32 for 16-bit x. Sums are taken of each channel
# first, so that arrays keep their shape: a group's few channels as an axis of their own are slow on a CPU. Images of a
# layer-norm are pixels: such sums are the arrays themselves, and mean and rstd have x's shape without the channels.


def of_groups(p: GroupNormProblem, a: jax.Array) -> jax.Array:
    """a, (N, G), for each channel, shaped to broadcast against x."""
    if p.rows:
        return a[..., None]
    repeated = jnp.broadcast_to(a[..., None], (*p.group_shape, p.group_channels))
    first = len(p.lead) + 1
    return jnp.expand_dims(
        repeated.reshape(*p.lead, p.images, p.channels), tuple(range(first, first + len(p.shape) - 2))
    )


def of_channels(p: GroupNormProblem, a: jax.Array) -> jax.Array:
    """a, (C,), shaped to broadcast against x."""
    return a.reshape(*p.lead, *(1,) * (len(p.shape) - 1), p.channels)


def centred(p: GroupNormProblem, x: jax.Array, mean: jax.Array) -> jax.Array:
    """x - mean, in the parameters' dtype."""
    return x.astype(p.param_dtype) - of_groups(p, mean)


def of_images(p: GroupNormProblem, a: jax.Array) -> jax.Array:
    """Sums of a, of x's shape, over an image's pixels: (N, C)."""
    if p.rows:
        return a
    first = len(p.lead) + 1
    return jnp.sum(a, tuple(range(first, first + len(p.shape) - 2)))


def group_means(p: GroupNormProblem, sums: jax.Array) -> jax.Array:
    """The means of each image's groups, (N, G), from `of_images`."""
    return jnp.sum(sums.reshape(*p.group_shape, p.group_channels), -1) / p.reduced


def groupnorm(
    p: GroupNormProblem, x: jax.Array, scale: jax.Array, bias: jax.Array, *, anywhere: bool = False
) -> list[jax.Array]:
    """[y, mean, rstd]. `anywhere`: by the same formula on every platform."""
    t = square_scale(p.reduced)

    def of_rows_sample(x: jax.Array) -> tuple[jax.Array, ...]:
        """(x - mean, mean, var), in one pass over x: moments about a sample of the row, as `batchnorm_moments`."""
        k = lax.stop_gradient(x[..., 0]).astype(p.param_dtype)
        d = centred(p, x, k)
        shift = group_means(p, d)
        var = jnp.maximum(group_means(p, row_squares(x, k)) - (shift * t) * (shift * t), 0) * (1 / t**2)
        # k + shift is rounded; x - k is not, where the mean is large.
        return d - of_groups(p, shift), k + shift, var

    def of_rows_mean(x: jax.Array) -> tuple[jax.Array, ...]:
        mean = group_means(p, x.astype(p.param_dtype))
        return centred(p, x, mean), mean, group_means(p, row_squares(x, mean)) * (1 / t**2)

    def row_squares(x: jax.Array, k: jax.Array) -> jax.Array:
        """(x - k)^2, in the scale of t^2."""
        d = x.astype(p.param_dtype) * t - of_groups(p, k * t)
        return d * d

    def of_samples(x: jax.Array) -> tuple[jax.Array, ...]:
        """The same of images: moments of each channel about its first pixel, then of a group from its channels'.

        A CPU broadcasts numbers of channels faster than those of groups.
        """

        def of_group(a: jax.Array) -> jax.Array:
            return a.reshape(*p.group_shape, p.group_channels)

        k = lax.stop_gradient(x[(slice(None),) * (len(p.lead) + 1) + (0,) * (len(p.shape) - 2)]).astype(p.param_dtype)
        d = x.astype(p.param_dtype) * t - jnp.expand_dims(k * t, pixels)
        shift = of_images(p, d) / p.pixels
        within = of_group(jnp.maximum(of_images(p, d * d) / p.pixels - shift * shift, 0))
        k = of_group(k)
        first = k[..., :1]
        shift = of_group(shift) + (k * t - first * t)  # a channel's mean, from the group's first sample
        middle = jnp.sum(shift, -1, keepdims=True) / p.group_channels
        between = (shift - middle) * (shift - middle)
        var = jnp.sum(within + between, -1) / p.group_channels * (1 / t**2)
        first, middle = first[..., 0], middle[..., 0] * (1 / t)
        return centred(p, x, first) - of_groups(p, middle), first + middle, var

    def of_one_group(x: jax.Array) -> tuple[jax.Array, ...]:
        """The same of images with one group: about the image's first number, of what then lies in one row."""
        row = x.reshape(*x.shape[: len(p.lead) + 1], -1)
        k = lax.stop_gradient(row[..., :1]).astype(p.param_dtype)
        d = row.astype(p.param_dtype) * t - k * t
        shift = jnp.sum(d, -1, keepdims=True) / p.reduced
        var = jnp.maximum(jnp.sum(d * d, -1, keepdims=True) / p.reduced - shift * shift, 0) * (1 / t**2)
        shift = shift * (1 / t)
        return centred(p, x, k) - of_groups(p, shift), k + shift, var

    pixels = tuple(range(len(p.lead) + 1, len(p.lead) + len(p.shape) - 1))
    # On a CPU XLA makes one pass over a row that it holds; a sample would be a pass of its own.
    if not p.rows:
        d, mean, var = (of_one_group if p.group_channels == p.channels else of_samples)(x)
    elif anywhere:
        d, mean, var = of_rows_mean(x)
    else:
        d, mean, var = lax.platform_dependent(x, cuda=of_rows_sample, default=of_rows_mean)
    rstd = lax.rsqrt(var + p.epsilon)
    z = d * (of_groups(p, rstd) * of_channels(p, scale)) + of_channels(p, bias)
    return [activate(p.activation, z).astype(x.dtype), mean, rstd]


def groupnorm_backward(p: GroupNormProblem, x, dy, scale, bias, mean, rstd) -> list[jax.Array]:
    """[dscale, dbias, dx?]: the derivative of groupnorm's y, with z recomputed from x."""
    d = centred(p, x, mean)
    xhat = d * of_groups(p, rstd)
    dz = dy.astype(p.param_dtype)
    if p.activation.residual:
        z = xhat * of_channels(p, scale) + of_channels(p, bias)
        dz = activate_tangent(p.activation, z, dz)
    lead = len(p.lead)
    if p.rows:
        # In this form XLA makes few passes: a row's rstd is a factor of its sums, not of what is summed.
        rows = tuple(range(lead, x.ndim - 1))
        outs = [jnp.sum(dz * d * of_groups(p, rstd), rows), jnp.sum(dz, rows)]
        g = dz * of_channels(p, scale)
        mean_g, mean_gx = group_means(p, g), group_means(p, g * d) * rstd * rstd
        dx = of_groups(p, rstd) * (g - of_groups(p, mean_g) - d * of_groups(p, mean_gx))
        return [*outs, *[dx.astype(x.dtype)] * p.want_dx]
    sums, products = of_images(p, dz), of_images(p, dz * xhat)  # (N, C)
    if p.want_dx and p.activation.residual and x.dtype.itemsize == 2 and p.activation.name not in CHEAP:
        # XLA keeps dz where an exponential is in it: in 16 bits, if it is told so. The sums are of float32.
        dz = lax.optimization_barrier(dz.astype(x.dtype)).astype(p.param_dtype)
    if p.want_dx:  # or XLA makes sums over all images from x and dy, in a pass of their own
        sums, products = lax.optimization_barrier((sums, products))
    outs = [jnp.sum(products, lead), jnp.sum(sums, lead)]
    if p.want_dx:
        factor = jnp.expand_dims(scale, lead)
        mean_g, mean_gx = (of_groups(p, group_means(p, factor * a)) for a in (sums, products))
        dx = of_groups(p, rstd) * (of_channels(p, scale) * dz - mean_g - xhat * mean_gx)
        outs.append(dx.astype(x.dtype))
    return outs


# ----------------------------------------------------------------------------------------------------------------------
# Squeeze-and-excitation. Everything between x and y is float32 for 16-bit x, the small products in full.


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def gated(gate: str, z: jax.Array) -> jax.Array:
    return jax.nn.sigmoid(z) if gate == "sigmoid" else jnp.minimum(jnp.maximum(z + 3, 0), 6) / 6


@gated.defjvp
def _(gate, primals, tangents):
    g = gated(gate, primals[0])
    return g, gated_grad(gate, g, tangents[0])


def gated_grad(gate: str, g: jax.Array, t: jax.Array) -> jax.Array:
    """t * gate'(z), by the gate g itself; 0 at hard_sigmoid's kinks, as jax.nn's."""
    return t * (g * (1 - g)) if gate == "sigmoid" else jnp.where((g > 0) & (g < 1), t / 6, jnp.zeros_like(t))


def small_product(a: jax.Array, b: jax.Array) -> jax.Array:
    """a @ b. Where types say how arrays are split, what is summed up may be."""
    mesh = jax.typeof(a).sharding.mesh
    sharding = None
    if jax.sharding.AxisType.Explicit in mesh.axis_types:
        spec = jax.sharding.PartitionSpec(jax.typeof(a).sharding.spec[0], jax.typeof(b).sharding.spec[1])
        sharding = jax.sharding.NamedSharding(mesh, spec)
    return jnp.dot(a, b, precision=lax.Precision.HIGHEST, out_sharding=sharding)


def of_pixels(p: SqueezeExciteProblem, a: jax.Array) -> jax.Array:
    """a, (N, C), shaped to broadcast against x."""
    return a.reshape(a.shape[0], *(1,) * (len(p.shape) - 2), a.shape[1])


def over_pixels(p: SqueezeExciteProblem, a: jax.Array) -> jax.Array:
    """Sums of a, of x's shape, over an image's pixels: (N, C)."""
    return jnp.sum(a, tuple(range(1, len(p.shape) - 1)))


def squeeze_excite(p: SqueezeExciteProblem, x, w1, b1, w2, b2) -> list[jax.Array]:
    """[y, mean, z1, gate]."""
    wide = x.astype(p.param_dtype)
    mean = over_pixels(p, wide) / p.pixels
    z1 = small_product(mean, w1) + b1[None]
    gate = gated(p.gate, small_product(activate(p.activation, z1), w2) + b2[None])
    return [(wide * of_pixels(p, gate)).astype(x.dtype), mean, z1, gate]


def squeeze_excite_backward(p: SqueezeExciteProblem, x, dy, w1, w2, z1, gate) -> list[jax.Array]:
    """[dz2, dz1, dx?]: the gradients of the gates' and the hidden numbers' arguments, and of x."""
    wide = dy.astype(p.param_dtype)
    dz2 = gated_grad(p.gate, gate, over_pixels(p, wide * x.astype(p.param_dtype)))
    dz1 = activate_tangent(p.activation, z1, small_product(dz2, w2.T))
    if not p.want_dx:
        return [dz2, dz1]
    constant = small_product(dz1, w1.T) / p.pixels
    return [dz2, dz1, (wide * of_pixels(p, gate) + of_pixels(p, constant)).astype(x.dtype)]

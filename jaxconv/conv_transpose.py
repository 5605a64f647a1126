"""Transposed convolutions, and lax's own signature: both are readings of the trio in conv.py.

A transposed convolution is the dgrad of a convolution whose input is the transposed one's output:
filter taps reversed, input and output channels of the filter swapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Held, because a program may put ours in its place.
from jax.lax import conv_general_dilated as lax_conv_general_dilated

from jaxconv import _activation, _problem, conv
from jaxconv._problem import ConvProblem, Pair

Array = jax.Array


def _swap_filter(p: ConvProblem, w: Array) -> Array:
    """A transposed convolution's filter (C_in/G, C_out) as that of the convolution it transposes, (C_out/G, C_in)."""
    w = lax.rev(w, tuple(range(p.nd)) if p.channels_last else tuple(range(2, p.nd + 2)))
    g, taps = p.groups, p.filter
    if p.channels_last:  # (taps, C_in/G, G * C_out/G)
        w = w.reshape(*taps, w.shape[-2], g, w.shape[-1] // g)
        return jnp.swapaxes(w, -1, -3).reshape(*taps, p.in_channels // g, p.out_channels)
    w = w.reshape(g, w.shape[0] // g, w.shape[1], *taps)  # (G * C_out/G, C_in/G, taps)
    return jnp.swapaxes(w, 1, 2).reshape(p.out_channels, p.in_channels // g, *taps)


# As in conv.py, `locals()` in a function's first statement is its arguments by name.
def _conv_transpose(name: str, nd: int, x: Any, w: Any, b: Any, transpose_kernel: bool, **options: Any) -> Any:
    x, w = _problem.as_array(name, "x", x), _problem.as_array(name, "w", w)
    b = None if b is None else _problem.as_array(name, "b", b)
    p = ConvProblem.infer_transposed(name, nd, x, w, b, transpose_kernel=transpose_kernel, **options)
    z = conv.dgrad(p.bare(), x, w if transpose_kernel else _swap_filter(p, w))
    if b is not None:
        z = z + lax.expand_dims(b, [axis for axis in range(nd + 2) if axis != p.channel_axis])
    y = _activation.activate(p.activation, z)
    return (y, z) if p.save_preactivation else y


def conv_transpose1d(
    x: Array,  # (N, W, C) or (N, C, W)
    w: Array,  # (S, C/G, K) or (K, C/G, S)
    b: Array | None = None,  # (K,)
    *,
    stride: int | Sequence[int] = 1,
    padding: Any = "SAME",
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    activation: Any = None,
    layout: str = "NWC",
    precision: Any = None,
    return_preactivation: bool = False,
    transpose_kernel: bool = False,
    algorithm: str | None = None,
    implementation: str | None = None,
) -> Any:
    """1-D transposed convolution. See `conv_transpose2d`."""
    return _conv_transpose("conv_transpose1d", 1, **locals())


def conv_transpose2d(
    x: Array,  # (N, H, W, C) or (N, C, H, W)
    w: Array,  # (R, S, C/G, K) or (K, C/G, R, S)
    b: Array | None = None,  # (K,)
    *,
    stride: int | Sequence[int] = 1,
    padding: Any = "SAME",
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    activation: Any = None,
    layout: str = "NHWC",
    precision: Any = None,
    return_preactivation: bool = False,
    transpose_kernel: bool = False,
    algorithm: str | None = None,
    implementation: str | None = None,
) -> Any:
    """2-D transposed ("fractionally strided") convolution with bias and activation.

    Equivalent JAX code for layout="NHWC" and groups=1 (shapes, padding and `transpose_kernel` are lax's)::

        z = lax.conv_transpose(x, w, (stride, stride), padding, rhs_dilation=(dilation, dilation),
                               dimension_numbers=("NHWC", "HWIO", "NHWC"), transpose_kernel=transpose_kernel) + b
        y = activation(z)

    Args:
      x: (N, H, W, C) or (N, C, H, W).
      w: (R, S, C/groups, K) or (K, C/groups, R, S); with transpose_kernel the filter of the convolution that this one
        transposes, (R, S, K/groups, C) or (C, K/groups, R, S), not reversed.
      padding: "SAME" (output extents H * stride), "VALID", or as in lax the padding of the stride-dilated input: an
        int, one int per dimension, or (low, high) pairs.
      b, stride, dilation, groups, activation, precision, return_preactivation, algorithm, implementation: see `conv2d`.

    Returns:
      y, (N, P, Q, K) or (N, K, P, Q); or (y, z) with return_preactivation.

    Raises:
      TypeError, ValueError: as `conv2d`.
    """
    return _conv_transpose("conv_transpose2d", 2, **locals())


def conv_transpose3d(
    x: Array,  # (N, D, H, W, C) or (N, C, D, H, W)
    w: Array,  # (T, R, S, C/G, K) or (K, C/G, T, R, S)
    b: Array | None = None,  # (K,)
    *,
    stride: int | Sequence[int] = 1,
    padding: Any = "SAME",
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    activation: Any = None,
    layout: str = "NDHWC",
    precision: Any = None,
    return_preactivation: bool = False,
    transpose_kernel: bool = False,
    algorithm: str | None = None,
    implementation: str | None = None,
) -> Any:
    """3-D transposed convolution. See `conv_transpose2d`."""
    return _conv_transpose("conv_transpose3d", 3, **locals())


# ----------------------------------------------------------------------------------------------------------------------
# lax's signature


def conv_general_dilated(
    lhs: Array,
    rhs: Array,
    window_strides: Sequence[int],
    padding: str | Sequence[Pair],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: Any = None,
    **lax_only: Any,
) -> Array:
    """`jax.lax.conv_general_dilated`: its signature, its meaning, jaxconv's kernels where they are faster.

    For code that takes a convolution as an argument, as in
    `flax.linen.Conv(conv_general_dilated=jaxconv.conv_general_dilated)`.

    One, two or three spatial dimensions, channels last or first on both sides and any filter layout run as `conv2d`
    does, with lhs_dilation (and unit window_strides) as `conv_transpose2d` does. Everything else that lax takes
    (batch_group_count, both strides and lhs_dilation, integers, complex numbers, mixed or preferred element types,
    empty arrays, an output sharding, other dimension orders) is lax's own call.

    Raises:
      What lax raises.
    """

    def by_lax() -> Array:
        return lax_conv_general_dilated(
            lhs,
            rhs,
            window_strides,
            padding,
            lhs_dilation,
            rhs_dilation,
            dimension_numbers,
            feature_group_count,
            batch_group_count,
            precision,
            preferred_element_type,
            **lax_only,
        )

    if not all(hasattr(a, "shape") and hasattr(a, "dtype") for a in (lhs, rhs)):
        return by_lax()
    x, w = jnp.asarray(lhs), jnp.asarray(rhs)
    nd = x.ndim - 2
    if (
        nd not in (1, 2, 3)
        or w.ndim != x.ndim
        or x.dtype != w.dtype
        or x.dtype.name not in _problem.DTYPES
        or batch_group_count != 1
        or preferred_element_type not in (None, x.dtype, x.dtype.type)
        or any(value is not None for value in lax_only.values())
        or 0 in x.shape[1:]
        or 0 in w.shape
    ):
        return by_lax()
    numbers = lax.conv_dimension_numbers(x.shape, w.shape, dimension_numbers)
    last, first = (0, nd + 1, *range(1, nd + 1)), tuple(range(nd + 2))
    if numbers.lhs_spec != numbers.out_spec or numbers.lhs_spec not in (last, first):
        return by_lax()
    channels_last = numbers.lhs_spec == last
    out_feature, in_feature, *spatial = numbers.rhs_spec
    order = (*spatial, in_feature, out_feature) if channels_last else (out_feature, in_feature, *spatial)
    filter = tuple(w.shape[axis] for axis in spatial)
    stride, base, dilation = (
        tuple(map(int, v)) if v is not None else (1,) * nd for v in (window_strides, lhs_dilation, rhs_dilation)
    )
    transposed = any(d != 1 for d in base)
    if not (len(stride) == len(base) == len(dilation) == nd) or min(*stride, *base, *dilation) < 1:
        return by_lax()
    if transposed and (isinstance(padding, str) or any(s != 1 for s in stride)):
        return by_lax()
    in_spatial = x.shape[1:-1] if channels_last else x.shape[2:]
    c, k = x.shape[numbers.lhs_spec[1]], w.shape[out_feature]
    try:
        pads = _problem.parse_padding("conv_general_dilated", padding, in_spatial, filter, stride, dilation)
    except (TypeError, ValueError):
        return by_lax()
    extents = [
        _problem.out_extent((size - 1) * d0 + 1, f, s, pair, d)
        for size, d0, f, s, pair, d in zip(in_spatial, base, filter, stride, pads, dilation, strict=True)
    ]
    g = feature_group_count
    if min(extents) < 1 or g < 1 or c % g or k % g or w.shape[in_feature] * g != c:
        return by_lax()
    w = w if order == first else jnp.transpose(w, order)
    name = "conv_general_dilated"
    options: dict[str, Any] = dict(
        padding=pads,
        dilation=dilation,
        groups=g,
        activation=None,
        layout=(_problem.CHANNELS_LAST if channels_last else _problem.CHANNELS_FIRST)[nd],
        precision=precision,
        return_preactivation=False,
        algorithm=None,
        implementation=None,
    )
    if transposed:
        return _conv_transpose(name, nd, x, w, None, transpose_kernel=False, stride=base, **options)
    return conv.fprop(ConvProblem.infer(name, nd, x, w, None, stride=stride, **options), x, w)

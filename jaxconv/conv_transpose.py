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

from jaxconv import _activation, _problem, conv
from jaxconv._problem import ConvProblem, Pair

Array = jax.Array


def _pads(
    where: str, padding: Any, filter: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> list[Pair]:
    """lax.conv_transpose's padding of the stride-dilated input."""
    if not isinstance(padding, str):
        ones = (1,) * len(filter)
        return list(_problem.parse_padding(where, padding, ones, ones, ones, ones))
    mode = padding.upper()
    pairs = []
    for k, s, d in zip(filter, stride, dilation, strict=True):
        k = (k - 1) * d + 1
        if mode == "SAME":
            total = k + s - 2
            low = k - 1 if s > k - 1 else -(-total // 2)
        elif mode == "VALID":
            total = k + s - 2 + max(k - s, 0)
            low = k - 1
        else:
            raise ValueError(f"{where}: padding={padding!r} is unknown, expected 'SAME', 'VALID', or low and high pads")
        pairs.append((low, total - low))
    return pairs


def _swap_filter(p: ConvProblem, w: Array, flip: bool) -> Array:
    """A transposed convolution's filter (C_in/G, C_out) as that of the convolution it transposes, (C_out/G, C_in)."""
    spatial = tuple(range(p.nd)) if p.channels_last else tuple(range(2, p.nd + 2))
    if flip:
        w = lax.rev(w, spatial)
    g, taps = p.groups, p.filter
    if p.channels_last:  # (taps, C_in/G, G * C_out/G)
        w = w.reshape(*taps, w.shape[-2], g, w.shape[-1] // g)
        return jnp.swapaxes(w, -1, -3).reshape(*taps, p.in_channels // g, p.out_channels)
    w = w.reshape(g, w.shape[0] // g, w.shape[1], *taps)  # (G * C_out/G, C_in/G, taps)
    return jnp.swapaxes(w, 1, 2).reshape(p.out_channels, p.in_channels // g, *taps)


def _transposed(
    name: str,
    nd: int,
    x: Array,
    w: Array,
    b: Array | None,
    *,
    stride: tuple[int, ...],
    pads: Sequence[Pair],  # of the stride-dilated x, as lax
    dilation: tuple[int, ...],
    groups: int,
    activation: Any,
    channels_last: bool,
    precision: Any,
    return_preactivation: bool,
    algorithm: Any,
    implementation: Any,
    transpose_kernel: bool,
) -> Any:
    """activation(lax.conv_general_dilated(x, w, 1, pads, lhs_dilation=stride, ...) + b) as a dgrad."""
    seen = ", ".join(f"{k}={tuple(v.shape)}" for k, v in (("x", x), ("w", w), ("b", b)) if v is not None)
    filter = tuple(w.shape[:nd] if channels_last else w.shape[2:])
    c = x.shape[-1 if channels_last else 1]
    in_axis, out_axis = (nd, nd + 1) if channels_last else (1, 0)
    # With transpose_kernel the filter is the forward convolution's: its input channels are this one's output.
    if transpose_kernel:
        k, expected = w.shape[in_axis] * groups, w.shape[out_axis]
    else:
        k, expected = w.shape[out_axis], w.shape[in_axis] * groups
    for argument, extents in (("x", x.shape[1:]), ("w", w.shape)):
        if 0 in extents:
            raise ValueError(f"{name}: {argument} is empty: only the batch extent may be 0. {seen}")
    if expected != c:
        raise ValueError(f"{name}: w expects {expected} input channels, x has {c} (groups={groups}). {seen}")
    if c % groups or k % groups:
        raise ValueError(f"{name}: groups={groups} does not divide the channels {c} -> {k}. {seen}")
    if b is not None and b.shape != (k,):
        raise ValueError(f"{name}: b has shape {b.shape}, expected ({k},), one per output channel. {seen}")
    in_spatial = tuple(x.shape[1:-1] if channels_last else x.shape[2:])
    windows = [(f - 1) * d for f, d in zip(filter, dilation, strict=True)]
    out = tuple(
        (size - 1) * s + 1 + low + high - window
        for size, s, (low, high), window in zip(in_spatial, stride, pads, windows, strict=True)
    )
    if min(out) < 1:
        raise ValueError(f"{name}: the output would have spatial extents {out}, expected at least 1. {seen}")
    _problem.check_choice(name, implementation, algorithm, _problem.CONV_ALGORITHMS)
    # The convolution that this one transposes maps `out` to `in_spatial`.
    p = ConvProblem(
        name=name,
        dtype=_problem.same_dtype(name, x=x, w=w, b=b),
        batch=x.shape[0],
        in_channels=k,
        out_channels=c,
        groups=groups,
        in_spatial=out,
        filter=filter,
        out_spatial=in_spatial,
        stride=stride,
        padding=tuple((window - low, window - high) for window, (low, high) in zip(windows, pads, strict=True)),
        dilation=dilation,
        channels_last=channels_last,
        precision=_problem.parse_precision(name, precision),
        implementation=implementation,
        algorithm=algorithm,
    )
    z = conv.dgrad(p, x, w if transpose_kernel else _swap_filter(p, w, flip=True))
    if b is not None:
        z = z + lax.expand_dims(b, [axis for axis in range(nd + 2) if axis != p.channel_axis])
    y = _activation.activate(_activation.parse(name, activation), z)
    return (y, z) if return_preactivation else y


def _conv_transpose(
    name: str,
    nd: int,
    x: Any,
    w: Any,
    b: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: Any,
    layout: Any,
    **kw: Any,
) -> Any:
    x, w = _problem.as_array(name, "x", x), _problem.as_array(name, "w", w)
    b = None if b is None else _problem.as_array(name, "b", b)
    channels_last = _problem.parse_layout(name, layout, nd)
    for argument, array in (("x", x), ("w", w)):
        if array.ndim != nd + 2:
            raise ValueError(f"{name}: {argument} has {array.ndim} dimensions, expected {nd + 2}, got {array.shape}")
    strides = _problem.integers(name, "stride", stride, nd, 1)
    dilations = _problem.integers(name, "dilation", dilation, nd, 1)
    filter = w.shape[:nd] if channels_last else w.shape[2:]
    return _transposed(
        name,
        nd,
        x,
        w,
        b,
        stride=strides,
        pads=_pads(name, padding, filter, strides, dilations),
        dilation=dilations,
        groups=_problem.integers(name, "groups", groups, 1, 1)[0],
        channels_last=channels_last,
        **kw,
    )


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
    return _conv_transpose(
        "conv_transpose1d",
        1,
        x,
        w,
        b,
        stride,
        padding,
        dilation,
        groups,
        layout,
        activation=activation,
        precision=precision,
        return_preactivation=return_preactivation,
        transpose_kernel=transpose_kernel,
        algorithm=algorithm,
        implementation=implementation,
    )


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
    return _conv_transpose(
        "conv_transpose2d",
        2,
        x,
        w,
        b,
        stride,
        padding,
        dilation,
        groups,
        layout,
        activation=activation,
        precision=precision,
        return_preactivation=return_preactivation,
        transpose_kernel=transpose_kernel,
        algorithm=algorithm,
        implementation=implementation,
    )


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
    return _conv_transpose(
        "conv_transpose3d",
        3,
        x,
        w,
        b,
        stride,
        padding,
        dilation,
        groups,
        layout,
        activation=activation,
        precision=precision,
        return_preactivation=return_preactivation,
        transpose_kernel=transpose_kernel,
        algorithm=algorithm,
        implementation=implementation,
    )


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
        return lax.conv_general_dilated(
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
    options: dict[str, Any] = dict(
        dilation=dilation, groups=g, activation=None, precision=precision, algorithm=None, implementation=None
    )
    if transposed:
        return _transposed(
            "conv_general_dilated",
            nd,
            x,
            w,
            None,
            stride=base,
            pads=pads,
            channels_last=channels_last,
            return_preactivation=False,
            transpose_kernel=False,
            **options,
        )
    layout = (_problem.CHANNELS_LAST if channels_last else _problem.CHANNELS_FIRST)[nd]
    p = ConvProblem.infer(
        "conv_general_dilated",
        nd,
        x,
        w,
        None,
        stride=stride,
        padding=pads,
        layout=layout,
        return_preactivation=False,
        **options,
    )
    return conv.fprop(p, x, w)

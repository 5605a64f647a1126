"""Transposed convolutions, and lax's own signature: both are readings of the trio in conv.py.

A transposed convolution is the dgrad of a convolution whose input is the transposed one's output:
filter taps reversed, input and output channels of the filter swapped.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jax import lax

# Held, because a program may put ours in its place.
from jax.lax import conv_general_dilated as lax_conv_general_dilated

from jaxconv import _problem
from jaxconv._core import activations
from jaxconv._core.types import (
    Array,
    ConvAlgorithm,
    ConvOptions,
    Implementation,
    Layout1d,
    Layout2d,
    Layout3d,
    Operand,
    PerDimension,
    Precision,
    ToActivation,
    TransposedPadding,
)
from jaxconv._ops import conv, conv_float8, conv_integer
from jaxconv._problem import ConvProblem, Pair


def _swap_filter(p: ConvProblem, w: Array) -> Array:
    """A transposed convolution's filter (C_in/G, C_out) as that of the convolution it transposes, (C_out/G, C_in)."""
    w = lax.rev(w, tuple(range(p.nd)) if p.channels_last else tuple(range(2, p.nd + 2)))
    g, taps = p.groups, p.filter
    if p.channels_last:  # (taps, C_in/G, G * C_out/G)
        w = w.reshape(*taps, w.shape[-2], g, w.shape[-1] // g)
        return jnp.swapaxes(w, -1, -3).reshape(*taps, p.in_channels // g, p.out_channels)
    w = w.reshape(g, w.shape[0] // g, w.shape[1], *taps)  # (G * C_out/G, C_in/G, taps)
    return jnp.swapaxes(w, 1, 2).reshape(p.out_channels, p.in_channels // g, *taps)


def _by_lax(p: ConvProblem, x: Array, w: Array, transpose_kernel: bool) -> Array:
    """The same by lax alone: for nothing to compute, and for extents that jax.export knows by name only."""
    if p.implementation == "native" and not p.empty:
        raise ValueError(
            f"{p.name}: implementation='native' cannot run: extents of x {x.shape} are symbolic, "
            f"native plans need numbers"
        )
    if transpose_kernel:  # the same swap leads back
        w = _swap_filter(dataclasses.replace(p, in_channels=p.out_channels, out_channels=p.in_channels), w)
    windows = [(f - 1) * d for f, d in zip(p.filter, p.dilation, strict=True)]
    return lax.conv_general_dilated(
        x,
        w,
        (1,) * p.nd,
        [(window - low, window - high) for window, (low, high) in zip(windows, p.padding, strict=True)],
        lhs_dilation=p.stride,
        rhs_dilation=p.dilation,
        dimension_numbers=p.dimension_numbers,
        feature_group_count=p.groups,
        precision=p.precision,
    )


# As in conv.py, `locals()` in a function's first statement is its arguments by name.
def _conv_transpose(name: str, nd: int, x: Any, w: Any, b: Any, transpose_kernel: bool, **options: Any) -> Any:
    x, w = _problem.as_array(name, "x", x), _problem.as_array(name, "w", w)
    b = None if b is None else _problem.as_array(name, "b", b)
    p = ConvProblem.infer_transposed(name, nd, x, w, b, transpose_kernel=transpose_kernel, **options)
    if p.empty or not all(map(_problem.is_number, (*p.in_spatial, *p.out_spatial))):
        z = _by_lax(p, x, w, transpose_kernel)
    else:
        z = conv.dgrad(p.bare(), x, w if transpose_kernel else _swap_filter(p, w))
    if b is not None:
        z = z + lax.expand_dims(b, [axis for axis in range(nd + 2) if axis != p.channel_axis])
    y = activations.activate(p.activation, z)
    return (y, z) if p.save_preactivation else y


@overload
def conv_transpose1d(
    x: Operand,
    w: Operand,
    b: Operand | None = None,
    *,
    padding: TransposedPadding = "SAME",
    layout: Layout1d = "NWC",
    return_preactivation: Literal[False] = False,
    transpose_kernel: bool = False,
    **options: Unpack[ConvOptions],
) -> Array: ...
@overload
def conv_transpose1d(
    x: Operand,
    w: Operand,
    b: Operand | None = None,
    *,
    padding: TransposedPadding = "SAME",
    layout: Layout1d = "NWC",
    return_preactivation: Literal[True],
    transpose_kernel: bool = False,
    **options: Unpack[ConvOptions],
) -> tuple[Array, Array]: ...
@overload
def conv_transpose1d(
    x: Operand,
    w: Operand,
    b: Operand | None = None,
    *,
    padding: TransposedPadding = "SAME",
    layout: Layout1d = "NWC",
    return_preactivation: bool,
    transpose_kernel: bool = False,
    **options: Unpack[ConvOptions],
) -> Array | tuple[Array, Array]: ...
def conv_transpose1d(
    x: Operand,  # (N, W, C) or (N, C, W)
    w: Operand,  # (S, C/G, K) or (K, C/G, S)
    b: Operand | None = None,  # (K,)
    *,
    stride: PerDimension = 1,
    padding: TransposedPadding = "SAME",
    dilation: PerDimension = 1,
    groups: int = 1,
    activation: ToActivation = None,
    layout: Layout1d = "NWC",
    precision: Precision = None,
    return_preactivation: bool = False,
    transpose_kernel: bool = False,
    algorithm: ConvAlgorithm | None = None,
    implementation: Implementation | None = None,
) -> Array | tuple[Array, Array]:
    """1-D transposed convolution. See `conv_transpose2d`.

    Example::

        x, w = jnp.ones((8, 50, 16)), jnp.ones((4, 16, 8))  # (N, W, C) and (S, C, K)
        y = jaxconv.conv_transpose1d(x, w, stride=2)  # (8, 100, 8)
    """
    return _conv_transpose("conv_transpose1d", 1, **locals())


@overload
def conv_transpose2d(
    x: Operand,
    w: Operand,
    b: Operand | None = None,
    *,
    padding: TransposedPadding = "SAME",
    layout: Layout2d = "NHWC",
    return_preactivation: Literal[False] = False,
    transpose_kernel: bool = False,
    **options: Unpack[ConvOptions],
) -> Array: ...
@overload
def conv_transpose2d(
    x: Operand,
    w: Operand,
    b: Operand | None = None,
    *,
    padding: TransposedPadding = "SAME",
    layout: Layout2d = "NHWC",
    return_preactivation: Literal[True],
    transpose_kernel: bool = False,
    **options: Unpack[ConvOptions],
) -> tuple[Array, Array]: ...
@overload
def conv_transpose2d(
    x: Operand,
    w: Operand,
    b: Operand | None = None,
    *,
    padding: TransposedPadding = "SAME",
    layout: Layout2d = "NHWC",
    return_preactivation: bool,
    transpose_kernel: bool = False,
    **options: Unpack[ConvOptions],
) -> Array | tuple[Array, Array]: ...
def conv_transpose2d(
    x: Operand,  # (N, H, W, C) or (N, C, H, W)
    w: Operand,  # (R, S, C/G, K) or (K, C/G, R, S)
    b: Operand | None = None,  # (K,)
    *,
    stride: PerDimension = 1,
    padding: TransposedPadding = "SAME",
    dilation: PerDimension = 1,
    groups: int = 1,
    activation: ToActivation = None,
    layout: Layout2d = "NHWC",
    precision: Precision = None,
    return_preactivation: bool = False,
    transpose_kernel: bool = False,
    algorithm: ConvAlgorithm | None = None,
    implementation: Implementation | None = None,
) -> Array | tuple[Array, Array]:
    """2-D transposed ("fractionally strided") convolution with bias and activation.

    Equivalent JAX code for layout="NHWC" and groups=1 (shapes, padding and `transpose_kernel` are lax's)::

        z = lax.conv_transpose(x, w, (stride, stride), padding, rhs_dilation=(dilation, dilation),
                               dimension_numbers=("NHWC", "HWIO", "NHWC"), transpose_kernel=transpose_kernel) + b
        y = activation(z)

    Example::

        x, w = jnp.ones((8, 16, 16, 32)), jnp.ones((2, 2, 32, 16))
        y = jaxconv.conv_transpose2d(x, w, stride=2, activation="relu")  # (8, 32, 32, 16)

    Args:
      x: (N, H, W, C) or (N, C, H, W).
      w: (R, S, C/groups, K) or (K, C/groups, R, S); with transpose_kernel=True the filter of the convolution that this
        one transposes, (R, S, K/groups, C) or (C, K/groups, R, S), not reversed.
      padding: "SAME" (output extents H * stride), "VALID", or as in lax the padding of the stride-dilated input: an
        int, one int per dimension, or (low, high) pairs.
      b, stride, dilation, groups, activation, precision, return_preactivation, algorithm, implementation: see `conv2d`.

    Returns:
      y, (N, P, Q, K) or (N, K, P, Q); or (y, z) with return_preactivation.

    Raises:
      TypeError, ValueError: as `conv2d`.
    """
    return _conv_transpose("conv_transpose2d", 2, **locals())


@overload
def conv_transpose3d(
    x: Operand,
    w: Operand,
    b: Operand | None = None,
    *,
    padding: TransposedPadding = "SAME",
    layout: Layout3d = "NDHWC",
    return_preactivation: Literal[False] = False,
    transpose_kernel: bool = False,
    **options: Unpack[ConvOptions],
) -> Array: ...
@overload
def conv_transpose3d(
    x: Operand,
    w: Operand,
    b: Operand | None = None,
    *,
    padding: TransposedPadding = "SAME",
    layout: Layout3d = "NDHWC",
    return_preactivation: Literal[True],
    transpose_kernel: bool = False,
    **options: Unpack[ConvOptions],
) -> tuple[Array, Array]: ...
@overload
def conv_transpose3d(
    x: Operand,
    w: Operand,
    b: Operand | None = None,
    *,
    padding: TransposedPadding = "SAME",
    layout: Layout3d = "NDHWC",
    return_preactivation: bool,
    transpose_kernel: bool = False,
    **options: Unpack[ConvOptions],
) -> Array | tuple[Array, Array]: ...
def conv_transpose3d(
    x: Operand,  # (N, D, H, W, C) or (N, C, D, H, W)
    w: Operand,  # (T, R, S, C/G, K) or (K, C/G, T, R, S)
    b: Operand | None = None,  # (K,)
    *,
    stride: PerDimension = 1,
    padding: TransposedPadding = "SAME",
    dilation: PerDimension = 1,
    groups: int = 1,
    activation: ToActivation = None,
    layout: Layout3d = "NDHWC",
    precision: Precision = None,
    return_preactivation: bool = False,
    transpose_kernel: bool = False,
    algorithm: ConvAlgorithm | None = None,
    implementation: Implementation | None = None,
) -> Array | tuple[Array, Array]:
    """3-D transposed convolution. See `conv_transpose2d`.

    Example::

        x, w = jnp.ones((2, 4, 8, 8, 8)), jnp.ones((2, 2, 2, 8, 4))  # (N, D, H, W, C) and (T, R, S, C, K)
        y = jaxconv.conv_transpose3d(x, w, stride=2)  # (2, 8, 16, 16, 4)
    """
    return _conv_transpose("conv_transpose3d", 3, **locals())


# ----------------------------------------------------------------------------------------------------------------------
# lax's signature


LAX_ARGUMENTS = frozenset(inspect.signature(lax_conv_general_dilated).parameters)


def _as_lax_takes(padding: Any, precision: Any) -> bool:
    """Whether these are of a form that lax takes: `conv2d` takes more."""
    if isinstance(padding, str):
        known = padding.upper() in ("SAME", "SAME_LOWER", "VALID")
    else:
        known = isinstance(padding, Sequence) and all(isinstance(pair, Sequence) for pair in padding)
    if isinstance(precision, Sequence) and not isinstance(precision, str):
        known = known and {type(value) for value in precision} in ({str}, {lax.Precision})
    return known


def conv_general_dilated(
    lhs: Operand,
    rhs: Operand,
    window_strides: Sequence[int],
    padding: str | Sequence[Pair],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Precision = None,
    preferred_element_type: Any = None,
    **lax_only: Any,
) -> Array:
    """`jax.lax.conv_general_dilated` with the same signature and meaning, on jaxconv's kernels where these are faster.

    For code that takes a convolution as an argument::

        layer = flax.linen.Conv(16, (3, 3), conv_general_dilated=jaxconv.conv_general_dilated)

    Example::

        x, w = jnp.ones((8, 32, 32, 16)), jnp.ones((3, 3, 16, 32))
        numbers = ("NHWC", "HWIO", "NHWC")
        y = jaxconv.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)

    It runs as `conv2d` does for one to three spatial dimensions, channels last or first in x and the result, and any
    filter layout. With lhs_dilation, and window_strides of 1, it runs as `conv_transpose2d` does. For other
    floating-point convolutions it calls lax: with batch_group_count, both strides and lhs_dilation, complex numbers, a
    preferred element type, empty arrays, an output sharding, or other dimension orders.

    Operands of float8_e4m3fn, or of float8_e5m2, run on Hopper's 8-bit tensor cores, in any dimension order, if
    preferred_element_type is float32, bfloat16 or float16, and if the kernel has their window and channels. Sums are
    within 2^-9 of the sum of the products' absolute values, so a precision above the default is lax's. Derivatives are
    lax's, too, and so are meshes with Explicit axes, of which `enable` takes those that need no gather.

    Integers (bool, and 2 to 64 bits) run on GPUs too, where XLA has no convolution for them: in every form that lax
    has, in up to three spatial dimensions. They are exact; sums wrap around in the result's type. lax refuses operands
    of two types, such as uint8 images and int8 filters. Here they are taken if preferred_element_type is an integer
    type. The result is that of ::

        y = lax.conv_general_dilated(lhs.astype(preferred), rhs.astype(preferred), ...)

    but no converted array is stored. With a floating-point preferred_element_type it is the convolution of the
    converted operands. Convolutions of integers have no derivative.

    Raises:
      What lax raises.
    """

    for name in lax_only.keys() - LAX_ARGUMENTS:
        raise TypeError(f"conv_general_dilated() got an unexpected keyword argument {name!r}")

    def by_lax(lhs: Any = lhs, rhs: Any = rhs) -> Array:
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
    if all(map(conv_integer.is_integer, (x.dtype, w.dtype))) and all(value is None for value in lax_only.values()):
        if preferred_element_type is None or conv_integer.is_integer(preferred_element_type) or x.dtype != w.dtype:
            return conv_integer.of_call(by_lax, x, w, preferred_element_type)
        jax.eval_shape(by_lax)  # which refuses a type that is narrower than the integers', and complex ones
        return conv_general_dilated(
            x.astype(preferred_element_type),
            w.astype(preferred_element_type),
            window_strides,
            padding,
            lhs_dilation,
            rhs_dilation,
            dimension_numbers,
            feature_group_count,
            batch_group_count,
            conv_integer.precision_of((x.dtype, w.dtype), precision),
            preferred_element_type,
        )
    if conv_float8.is_float8(x, w) and all(value is None for value in lax_only.values()):
        return conv_float8.of_call(by_lax, x, w)
    if (
        nd not in (1, 2, 3)
        or w.ndim != x.ndim
        or x.dtype != w.dtype
        or x.dtype.name not in _problem.DTYPES
        or batch_group_count != 1
        or (preferred_element_type is not None and jnp.dtype(preferred_element_type) != x.dtype)
        or any(value is not None for value in lax_only.values())
        or not all(map(_problem.is_number, (*x.shape[1:], *w.shape)))
        or 0 in (*x.shape[1:], *w.shape)
        or not _as_lax_takes(padding, precision)
    ):
        return by_lax()
    name = "conv_general_dilated"
    numbers = lax.conv_dimension_numbers(x.shape, w.shape, dimension_numbers)
    last, first = (0, nd + 1, *range(1, nd + 1)), tuple(range(nd + 2))
    if numbers.lhs_spec != numbers.out_spec or numbers.lhs_spec not in (last, first):
        return by_lax()
    channels_last = numbers.lhs_spec == last
    out_feature, in_feature, *spatial = numbers.rhs_spec
    order = (*spatial, in_feature, out_feature) if channels_last else (out_feature, in_feature, *spatial)
    filter = tuple(w.shape[axis] for axis in spatial)
    in_spatial = x.shape[1:-1] if channels_last else x.shape[2:]
    c, k = x.shape[numbers.lhs_spec[1]], w.shape[out_feature]
    try:
        stride, base, dilation = (
            (1,) * nd if v is None else tuple(_problem.integer(name, "", extent) for extent in v)
            for v in (tuple(window_strides), lhs_dilation, rhs_dilation)
        )
        g = _problem.integer(name, "", feature_group_count)
        pads = _problem.parse_padding(name, padding, in_spatial, filter, stride, dilation)
        pair = _problem.parse_precision(name, precision)
    except (TypeError, ValueError, AttributeError, ArithmeticError):
        return by_lax()  # to say what is wrong, or to take it
    if not isinstance(pair, tuple):
        return by_lax()
    transposed = any(d != 1 for d in base)
    if not (len(stride) == len(base) == len(dilation) == nd) or min(*stride, *base, *dilation) < 1:
        return by_lax()
    if transposed and (isinstance(padding, str) or any(s != 1 for s in stride)):
        return by_lax()
    extents = [
        _problem.out_extent((size - 1) * d0 + 1, f, s, pair, d)
        for size, d0, f, s, pair, d in zip(in_spatial, base, filter, stride, pads, dilation, strict=True)
    ]
    if min(extents) < 1 or g < 1 or c % g or k % g or w.shape[in_feature] * g != c:
        return by_lax()
    w = w if order == first else jnp.transpose(w, order)
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

"""Arguments that the ops share: arrays, numbers, padding, layouts, precision, and the errors about them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxconv._activation import Activation

DTYPES = ("float32", "bfloat16", "float16", "float64")


IMPLEMENTATIONS = ("native", "xla")


NO_ACTIVATION = Activation()


Pair = tuple[int, int]


Precision = tuple[lax.Precision, lax.Precision]


def as_array(where: str, argument: str, value: Any) -> jax.Array:
    """`value` as a jax array of a dtype that jaxconv knows, or a TypeError."""
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise TypeError(f"{where}: {argument} must be an array, got {type(value).__name__}")
    array = jnp.asarray(value)
    if array.dtype.name not in DTYPES:
        raise TypeError(f"{where}: {argument} has dtype {array.dtype.name}, expected one of {', '.join(DTYPES)}")
    return array


def as_mask(where: str, argument: str, value: Any) -> jax.Array:
    """`value` as a jax array, of whatever dtype."""
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise TypeError(f"{where}: {argument} must be an array, got {type(value).__name__}")
    return jnp.asarray(value)


def broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Whether an array of `shape` broadcasts to exactly the shape `to`."""
    return len(shape) <= len(to) and all(s in (1, t) for s, t in zip(shape[::-1], to[::-1], strict=False))


def same_dtype(where: str, **arrays: jax.Array | None) -> str:
    given = {k: v.dtype.name for k, v in arrays.items() if v is not None}
    if len(set(given.values())) > 1:
        raise TypeError(
            f"{where}: all arrays must have one dtype, got " + ", ".join(f"{k}: {v}" for k, v in given.items())
        )
    return next(iter(given.values()))


def shapes(**arrays: Any) -> str:
    return ", ".join(f"{k}={tuple(v.shape)}" for k, v in arrays.items() if v is not None)


def parse_precision(where: str, precision: Any) -> Precision:
    """What lax takes (None, a name, a Precision, a pair of these) -> a pair. None is jax.default_matmul_precision."""

    def one(value: Any) -> lax.Precision:
        if value is None:
            value = jax.config.jax_default_matmul_precision
            try:
                return lax.Precision.DEFAULT if value is None else lax.Precision(value)
            except ValueError:
                return lax.Precision.DEFAULT  # a dot algorithm: it does not apply to convolutions in lax either
        try:
            return lax.Precision(value)
        except ValueError:
            raise ValueError(
                f"{where}: precision={precision!r} is unknown, expected None, 'default', 'high', 'highest', "
                f"a jax.lax.Precision, or a pair of these"
            ) from None

    if isinstance(precision, (tuple, list)):
        if len(precision) != 2:
            raise ValueError(f"{where}: precision={precision!r} has {len(precision)} entries, expected a pair (x, w)")
        return one(precision[0]), one(precision[1])
    return one(precision), one(precision)


def check_choice(where: str, implementation: Any, algorithm: Any, algorithms: tuple[str, ...]) -> None:
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{where}: implementation={implementation!r} is unknown, expected None, 'native' or 'xla'")
    # A family, or one kernel of it with or without its tile: "sm90", "sm90/halo", "sm90/product 128x256".
    known = isinstance(algorithm, str) and algorithm.partition(" ")[0].partition("/")[0] in algorithms
    if algorithm is not None and not known:
        raise ValueError(
            f"{where}: algorithm={algorithm!r} is unknown, expected None or one of {', '.join(algorithms)}"
        )
    if algorithm is not None and implementation == "xla":
        raise ValueError(
            f"{where}: algorithm={algorithm!r} is a native algorithm, but implementation='xla' was asked for"
        )


def integer(where: str, argument: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{where}: {argument} must be an integer, got {value!r}") from None


def integers(where: str, argument: str, value: Any, nd: int, minimum: int) -> tuple[int, ...]:
    """An int, or `nd` of them -> a tuple of `nd` ints of at least `minimum`."""
    if (isinstance(value, Sequence) and not isinstance(value, str)) or isinstance(value, np.ndarray):
        values = tuple(integer(where, argument, v) for v in value)
    else:
        values = (integer(where, argument, value),) * nd
    if len(values) != nd:
        raise ValueError(f"{where}: {argument}={value!r} has {len(values)} entries, expected an int or {nd} of them")
    if min(values) < minimum:
        raise ValueError(f"{where}: {argument}={value!r} must be at least {minimum}")
    return values


def number(where: str, argument: str, value: Any) -> float:
    if isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool):
        return float(value)
    raise TypeError(
        f"{where}: {argument} must be a Python number (it is fixed when the function is traced), got {value!r}"
    )


def out_extent(extent: int, filter: int, stride: int, pads: Pair, dilation: int) -> int:
    """The one statement of a convolution's output extent (below one where no window fits)."""
    window = (filter - 1) * dilation + 1
    return (extent + pads[0] + pads[1] - window) // stride + 1


def parse_padding(
    where: str,
    padding: Any,
    in_spatial: tuple[int, ...],
    filter: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
) -> tuple[Pair, ...]:
    nd = len(in_spatial)
    expected = f"expected 'SAME', 'SAME_LOWER', 'VALID', an int, {nd} ints, or {nd} pairs (low, high)"
    if isinstance(padding, str):
        mode = padding.upper()
        if mode == "VALID":
            return ((0, 0),) * nd
        if mode not in ("SAME", "SAME_LOWER"):
            raise ValueError(f"{where}: padding={padding!r} is unknown, {expected}")
        pairs = []
        for size, k, s, d in zip(in_spatial, filter, stride, dilation, strict=True):
            total = max((-(-size // s) - 1) * s + (k - 1) * d + 1 - size, 0)
            half = total // 2
            pairs.append((half, total - half) if mode == "SAME" else (total - half, half))
        return tuple(pairs)
    if isinstance(padding, (Sequence, np.ndarray)):
        if len(padding) != nd:
            raise ValueError(f"{where}: padding={padding!r} has {len(padding)} entries, {expected}")
        pairs = []
        for entry in padding:
            if isinstance(entry, (Sequence, np.ndarray)) and not isinstance(entry, str):
                if len(entry) != 2:
                    raise ValueError(f"{where}: padding={padding!r} has an entry {entry!r}, {expected}")
                pairs.append((integer(where, "padding", entry[0]), integer(where, "padding", entry[1])))
            else:
                value = integer(where, "padding", entry)
                pairs.append((value, value))
        return tuple(pairs)
    value = integer(where, "padding", padding)
    return ((value, value),) * nd


def parse_transposed_padding(
    where: str, padding: Any, filter: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> tuple[Pair, ...]:
    """lax.conv_transpose's padding of the stride-dilated input."""
    if not isinstance(padding, str):
        ones = (1,) * len(filter)
        return parse_padding(where, padding, ones, ones, ones, ones)
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
    return tuple(pairs)


CHANNELS_LAST = {1: "NWC", 2: "NHWC", 3: "NDHWC"}


CHANNELS_FIRST = {1: "NCW", 2: "NCHW", 3: "NCDHW"}


def parse_layout(where: str, layout: Any, nd: int) -> bool:
    """The layout's name -> whether channels are last."""
    if layout == CHANNELS_LAST[nd]:
        return True
    if layout == CHANNELS_FIRST[nd]:
        return False
    raise ValueError(f"{where}: layout={layout!r} is unknown, expected '{CHANNELS_LAST[nd]}' or '{CHANNELS_FIRST[nd]}'")

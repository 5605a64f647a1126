"""Arguments that the ops share: arrays, numbers, padding, layouts, precision, and the errors about them."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax

from jaxconv._core.activations import Activation

DTYPES = ("float32", "bfloat16", "float16", "float64")


Implementation = Literal["native", "xla"]
IMPLEMENTATIONS = get_args(Implementation)


NO_ACTIVATION = Activation()


Pair = tuple[int, int]


# A pair, or lax's name of an algorithm, which only XLA has
Precision = tuple[lax.Precision, lax.Precision] | lax.DotAlgorithm | lax.DotAlgorithmPreset


# Strides, dilations and pads go to XLA and to native code as int64.
LARGEST = 2**63 - 1


def promoted(a: Any, b: Any) -> np.dtype[Any]:
    """The dtype of operations between dtypes a and b, as jnp.promote_types has it; also where
    jax_numpy_dtype_promotion="strict" refuses to mix them: that is about a user's operands, not about ours."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(a, b)


def as_array(where: str, argument: str, value: Any) -> jax.Array:
    """`value` as a jax array of a dtype that jaxconv knows, or a TypeError."""
    array = as_mask(where, argument, value)
    if array.dtype.name not in DTYPES:
        raise TypeError(f"{where}: {argument} has dtype {array.dtype.name}, expected one of {', '.join(DTYPES)}")
    return array


def as_mask(where: str, argument: str, value: Any) -> jax.Array:
    """`value` as a jax array, of whatever dtype."""
    if isinstance(value, jax.ShapeDtypeStruct):
        raise TypeError(
            f"{where}: {argument} must be an array, got a jax.ShapeDtypeStruct, which has no values: "
            f"jax.eval_shape(f, ...) and jaxconv.explain(f)(...) take those"
        )
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise TypeError(f"{where}: {argument} must be an array, got {type(value).__name__}")
    if getattr(value, "requires_grad", False) is True:  # PyTorch's, which then refuses to be read
        raise TypeError(
            f"{where}: {argument} is a {type(value).__module__}.{type(value).__name__} that requires a gradient, which "
            f"JAX cannot give to it: pass {argument}.detach()"
        )
    return jnp.asarray(value)


def check_function(where: str, f: Any) -> None:
    """TypeError where f is none that can be traced."""
    if isinstance(f, jax.stages.Compiled):
        raise TypeError(
            f"{where}: f is compiled already (a jax.stages.Compiled), expected the function that was compiled"
        )
    if not callable(f):
        raise TypeError(f"{where}: f must be a function, got {type(f).__name__}")
    if inspect.isgeneratorfunction(f) or inspect.iscoroutinefunction(f) or inspect.isasyncgenfunction(f):
        raise TypeError(f"{where}: f is a generator or a coroutine, expected a function that has run when it returns")


def as_parameter(where: str, argument: str, value: Any, x: jax.Array) -> jax.Array:
    """`value`, a parameter of a batch-norm of x, as `as_array`; one of a narrower type in that of x's parameters."""
    array = as_array(where, argument, value)
    wide = jnp.dtype("float64" if x.dtype.name == "float64" else "float32")
    return array.astype(wide) if array.dtype.itemsize < wide.itemsize else array


def is_number(extent: Any) -> bool:
    """Whether an extent is a number (and not a symbolic dimension of jax.export)."""
    return isinstance(extent, (int, np.integer))


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
    """What lax takes -> a pair of lax.Precision, or an algorithm. None is jax.default_matmul_precision.

    lax takes None, a name, a lax.Precision, a pair of either, and the algorithms of `lax.dot_general` (their names,
    lax.DotAlgorithmPreset, lax.DotAlgorithm). A pair may hold a None here.
    """

    def unknown() -> ValueError:
        return ValueError(
            f"{where}: precision={precision!r} is unknown, expected None, 'default', 'high', 'highest', "
            f"a jax.lax.Precision, a pair of these, or a jax.lax.DotAlgorithmPreset (or its name)"
        )

    def one(value: Any, alone: bool) -> Any:
        if value is None:
            value = jax.config.jax_default_matmul_precision
            if value is None or (not alone and value in lax.DotAlgorithmPreset.__members__):
                return lax.Precision.DEFAULT
        if alone and isinstance(value, (lax.DotAlgorithm, lax.DotAlgorithmPreset)):
            return value
        if isinstance(value, (str, lax.Precision)):
            if alone and isinstance(value, str) and value in lax.DotAlgorithmPreset.__members__:
                return lax.DotAlgorithmPreset[value]
            try:
                return lax.Precision(value)
            except ValueError:
                pass
        raise unknown()

    if isinstance(precision, (tuple, list)):
        if len(precision) != 2:
            raise ValueError(f"{where}: precision={precision!r} has {len(precision)} entries, expected a pair (x, w)")
        return one(precision[0], False), one(precision[1], False)
    found = one(precision, True)
    if found is lax.DotAlgorithmPreset.DEFAULT:
        return lax.Precision.DEFAULT, lax.Precision.DEFAULT
    return (found, found) if isinstance(found, lax.Precision) else found


def implementation_for(where: str, precision: Precision, implementation: Any, algorithm: Any) -> Any:
    """`implementation`, or "xla" where the precision is an algorithm, which native code does not have."""
    if isinstance(precision, tuple):
        return implementation
    if algorithm is not None or implementation == "native":
        asked = "implementation='native'" if algorithm is None else f"algorithm={algorithm!r}"
        raise ValueError(f"{where}: {asked} cannot run: the precision {precision} is an algorithm of XLA's")
    return "xla"


def family_of(algorithm: str) -> str:
    """ "sm90" of "sm90", "sm90/halo" and "sm90/product 128x256"."""
    return algorithm.partition(" ")[0].partition("/")[0]


def check_choice(where: str, implementation: Any, algorithm: Any, algorithms: tuple[str, ...]) -> None:
    known = isinstance(implementation, str) and implementation in IMPLEMENTATIONS
    if implementation is not None and not known:
        raise ValueError(f"{where}: implementation={implementation!r} is unknown, expected None, 'native' or 'xla'")
    # A family, or one kernel of it with or without its tile: "sm90", "sm90/halo", "sm90/product 128x256".
    known = isinstance(algorithm, str) and algorithm == algorithm.strip() and family_of(algorithm) in algorithms
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
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{where}: {argument} must be an integer, got {value!r}") from None
    if abs(number) > LARGEST:
        raise ValueError(f"{where}: {argument}={number} is too large, expected at most 2**63 - 1")
    return number


def integers(where: str, argument: str, value: Any, nd: int, minimum: int) -> tuple[int, ...]:
    """An int, or `nd` of them -> a tuple of `nd` ints of at least `minimum`."""
    if (isinstance(value, Sequence) and not isinstance(value, str)) or (isinstance(value, np.ndarray) and value.ndim):
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


def flag(where: str, argument: str, value: Any) -> bool:
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise TypeError(f"{where}: {argument} must be True or False, got {value!r}")


def epilogue(p: Any) -> list[str]:
    """What a problem adds to its sum and applies to it, in words: ["bias", "relu"]."""
    return [*(["bias"] if p.bias else []), *([] if p.activation.name == "none" else [str(p.activation)])]


def check_span(where: str, filter: tuple[int, ...], dilation: tuple[int, ...]) -> None:
    for taps, step in zip(filter, dilation, strict=True):
        if is_number(taps) and (taps - 1) * step >= LARGEST:
            raise ValueError(f"{where}: dilation={step} is too large: {taps} taps would span {(taps - 1) * step + 1}")


def _at_least_zero(extent: int) -> int:
    """max(extent, 0); of a symbolic extent as lax writes it."""
    return max(extent, 0) if is_number(extent) else core.max_dim(extent, 0)


def out_extent(extent: int, filter: int, stride: int, pads: Pair, dilation: int) -> int:
    """The one statement of a convolution's output extent: 0 where no window fits."""
    window = (filter - 1) * dilation + 1
    return _at_least_zero((extent + pads[0] + pads[1] - window) // stride + 1)


def transposed_extent(extent: int, filter: int, stride: int, pads: Pair, dilation: int) -> int:
    """That of a transposed convolution: `out_extent` of the input with stride - 1 zeros between its elements."""
    spread = _at_least_zero((extent - 1) * stride + 1)
    return out_extent(spread, filter, 1, pads, dilation)


def parse_padding(
    where: str,
    padding: Any,
    in_spatial: tuple[int, ...],
    filter: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    names: str = "",  # that are expected, where they are others
) -> tuple[Pair, ...]:
    nd = len(in_spatial)
    names = names or "'SAME', 'SAME_LOWER', 'VALID', " + "'CAUSAL', " * (nd == 1)
    expected = f"expected {names}an int, {nd} ints, or {nd} pairs (low, high)"
    if padding is None:
        raise TypeError(f"{where}: padding=None, {expected}")
    if isinstance(padding, str):
        mode = padding.upper()
        if mode == "VALID":
            return ((0, 0),) * nd
        if mode == "CAUSAL" and nd == 1:
            return (((filter[0] - 1) * dilation[0], 0),)
        if mode not in ("SAME", "SAME_LOWER"):
            raise ValueError(f"{where}: padding={padding!r} is unknown, {expected}")
        if not all(map(is_number, (*in_spatial, *filter))):
            windows = [(k - 1) * d + 1 for k, d in zip(filter, dilation, strict=True)]
            pads = lax.padtype_to_pads(in_spatial, windows, stride, mode)
            return tuple((low, high) for low, high in pads)
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


def check_pads(where: str, padding: Any, spatial: Sequence[int], pads: Sequence[Pair]) -> None:
    """ValueError where pads take away more than there is: lax has no such convolution."""
    for extent, (low, high) in zip(spatial, pads, strict=True):
        if all(map(is_number, (extent, low, high))) and extent + low + high < 0:
            raise ValueError(
                f"{where}: padding={padding!r} takes {-low - high} elements from an axis of {extent}, "
                f"expected at most {extent}"
            )


def parse_transposed_padding(
    where: str, padding: Any, filter: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> tuple[Pair, ...]:
    """lax.conv_transpose's padding of the stride-dilated input."""
    if not isinstance(padding, str):
        ones = (1,) * len(filter)
        return parse_padding(where, padding, ones, ones, ones, ones, "'SAME', 'VALID', ")
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

"""How numbers become 8-bit ones: the types, a tensor's scale from a histogram, a filter's scales from its elements.

A number x of scale s is stored as narrowed(x / s). The scale is the one of the least mean squared error among some
that clip the largest numbers: of few numbers that are large, the many that are small pay with a coarser step.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from jaxconv._core import sharding
from jaxconv._core.graph import Array
from jaxconv._ops import reference
from jaxconv._problem import is_number

# The largest number of each type; those of int8 are -127 to 127 in filters.
LARGEST = {"int8": 127.0, "uint8": 255.0, "float8_e4m3fn": 448.0}

# A histogram has a bin for each magnitude in bfloat16: 128 bins an octave, of which the last are infinity and NaN.
BINS = 1 << 15
FINITE = 0x7F80
# The scales that are compared, as parts of the one that clips nothing: 16 an octave, of 8 octaves.
CLIPPING = 2.0 ** -(np.arange(129) / 16)
# Scales are above half of this: they, their inverses and their products with others are float32's, and no subnormals.
LEAST = 2.0**-120
# The same of a filter's channel, whose numbers are few and alike: 20/20, 19/20 to 11/20.
CLIPPED = 20


@dataclasses.dataclass(frozen=True)
class Scale:
    """An 8-bit type and the number that its unit stands for.

    Raises:
      ValueError: where the number, or the one that divides by it, is none that float32 has, or is not positive.
    """

    dtype: str
    step: float

    def __post_init__(self) -> None:
        with np.errstate(all="ignore"):
            steps = np.float32(self.step), self.inverse
        if not all(np.isfinite(s) and s > 0 for s in steps):
            raise ValueError(f"freeze: a scale is {self.step}, expected a positive finite number of float32")

    @property
    def inverse(self) -> np.float32:
        with np.errstate(all="ignore"):
            return np.float32(1.0) / np.float32(self.step)

    def narrow(self, x: Array) -> Array:
        return _narrow(x, self)

    def widen(self, q: Array, dtype: Any) -> Array:
        return (q.astype(jnp.float32) * np.float32(self.step)).astype(dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _narrow(x: Array, scale: Scale) -> Array:
    return reference.stored(x, scale.inverse, scale.dtype)


@_narrow.defjvp
def _no_derivative(scale: Scale, primals: Any, tangents: Any) -> Any:
    """JAX's own of a conversion to integers is zero, and says nothing."""
    raise TypeError(
        f"freeze: a function that is quantised to {scale.dtype} has no derivative: differentiate the function "
        "itself, or freeze it without quantize="
    )


# ----------------------------------------------------------------------------------------------------------------------
# Tensors


def statistics(x: Array) -> tuple[Array, Array, Array]:
    """(how many elements have each magnitude, their least, their largest) of an array, all in float32."""
    x = x.astype(jnp.float32)
    if sharding.explicit_mesh([jax.typeof(x)]) is not None:  # counts are of all devices' numbers
        x = jax.sharding.reshard(x, jax.P())
    magnitudes = (lax.bitcast_convert_type(x, jnp.uint32) >> 16) & (BINS - 1)
    counts = jnp.zeros(BINS, jnp.uint32).at[magnitudes.reshape(-1)].add(1)
    return counts, jnp.min(x), jnp.max(x)


@dataclasses.dataclass
class Histogram:
    """What is known of a tensor's numbers, over batches."""

    counts: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(BINS))
    least: float = math.inf
    largest: float = -math.inf

    def add(self, counts: np.ndarray, least: np.ndarray, largest: np.ndarray) -> None:
        self.counts += counts
        self.least = min(self.least, float(least))
        self.largest = max(self.largest, float(largest))

    @property
    def finite(self) -> bool:
        return not self.counts[FINITE:].any()

    def scale(self, dtype: str) -> Scale:
        """The one of the least mean squared error."""
        magnitude = max(abs(self.least), abs(self.largest))
        steps = magnitude / LARGEST[dtype] * CLIPPING
        steps = steps[(steps > LEAST) & (steps < 1 / LEAST)]  # both it and its inverse are numbers of float32
        if not len(steps):
            return Scale(dtype, 1.0)
        errors = squared_errors(self.counts, steps, dtype)
        return Scale(dtype, float(np.float32(steps[np.argmin(errors)])))


def squared_errors(counts: np.ndarray, steps: np.ndarray, dtype: str) -> np.ndarray:
    """The sum of squared errors of a tensor's elements for each step. Inside a bin they lie everywhere alike."""
    (bins,) = np.nonzero(counts[:FINITE])
    low, high = ((b.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for b in (bins, bins + 1))
    high = np.where(bins == FINITE - 1, low * (1 + 2.0**-8), high)  # the next bin's edge is infinity
    if dtype.startswith("float8"):
        middle = ((low + high) / 2)[None] / steps[:, None]
        kept = np.minimum(middle, LARGEST[dtype]).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
        each = (kept - middle) ** 2
    else:
        a, b = low[None] / steps[:, None], high[None] / steps[:, None]
        each = (_integral(b, LARGEST[dtype]) - _integral(a, LARGEST[dtype])) / (b - a)
    return (each * counts[bins]).sum(1) * steps**2


def _integral(u: np.ndarray, largest: float) -> np.ndarray:
    """Of the squared error of rounding and clipping, from 0 to u: 1/12 for each whole step, and a cube's part."""
    k = np.minimum(np.rint(u), largest)
    return k / 12 + (u - k) ** 3 / 3


def summed(q: Array, axes: Sequence[int]) -> Array:
    """The sums of int8 or uint8 over `axes`, int32.

    XLA's sums over pixels take a time for each element, whatever its size. So four channels are one number of 32 bits,
    of which two sums hold two channels each, 16 bits a channel: 256 x 7 x 7 x 2048 elements take 18 us instead of 40
    (H200).
    """
    count = math.prod(q.shape[i] for i in axes)
    split = sharding.explicit_mesh([jax.typeof(q)]) is not None  # channels may be
    symbolic = not all(map(is_number, q.shape))  # JAX cannot refine the shape of another type's
    if symbolic or split or count > 65535 // 255 or q.ndim - 1 in axes or q.shape[-1] % 4:
        return jnp.sum(q, axes, jnp.int32)
    shift = 128 if q.dtype == jnp.int8 else 0
    bytes_ = lax.bitcast_convert_type(q, jnp.uint8) ^ jnp.uint8(shift)  # none is negative
    fours = lax.bitcast_convert_type(bytes_.reshape(*q.shape[:-1], q.shape[-1] // 4, 4), jnp.uint32)
    even, odd = (jnp.sum((fours >> i) & jnp.uint32(0x00FF00FF), axes, jnp.uint32) for i in (0, 8))
    of_each = [(half >> i) & jnp.uint32(0xFFFF) for i in (0, 16) for half in (even, odd)]
    sums = jnp.stack(of_each, -1)
    return sums.reshape(*sums.shape[:-2], -1).astype(jnp.int32) - shift * count


# ----------------------------------------------------------------------------------------------------------------------
# Filters


def filter_scales(w: Array, axis: int, dtype: str, least: Array | np.float32) -> tuple[Array, Array]:
    """(w in 8 bits, a scale for each channel along `axis`, float32): each channel's of the least squared error.

    `least`, one or one a channel: scales are above half of it. A channel of zeros has this scale, so that it decides
    neither the scale of another filter whose sums are added, nor how finely a bias is rounded.
    """
    w = w.astype(jnp.float32)
    others = tuple(i for i in range(w.ndim) if i != axis)
    magnitude = jnp.max(jnp.abs(w), others, keepdims=True)
    full = jnp.maximum(magnitude / LARGEST[dtype], jnp.expand_dims(least, others) if least.ndim else least)
    full = jnp.maximum(full, np.float32(LEAST))

    def step(carry: tuple[Array, Array, Array], _: None) -> tuple[tuple[Array, Array, Array], None]:
        steps, best, least = carry
        error = jnp.sum((_narrow_filter(w, steps, dtype).astype(jnp.float32) * steps - w) ** 2, others, keepdims=True)
        better = error < least
        return (steps - full / CLIPPED, jnp.where(better, steps, best), jnp.where(better, error, least)), None

    (_, steps, _), _ = lax.scan(step, (full, full, full * 0 + jnp.inf), None, length=CLIPPED // 2)
    # Some maxima on CPUs pass over a NaN, and 8 bits do not show one.
    steps = jnp.where(jnp.isfinite(w).all(others, keepdims=True), steps, jnp.nan)
    return _narrow_filter(w, steps, dtype), steps.reshape(-1)


def filter_of(w: Array, axis: int, dtype: str, steps: Array) -> Array:
    """w in 8 bits, of a scale for each channel along `axis`."""
    w = w.astype(jnp.float32)
    return _narrow_filter(w, jnp.expand_dims(steps, tuple(i for i in range(w.ndim) if i != axis)), dtype)


def _narrow_filter(w: Array, steps: Array, dtype: str) -> Array:
    scaled = jnp.clip(w / steps, -LARGEST[dtype], LARGEST[dtype])
    return (lax.round(scaled, lax.RoundingMethod.TO_NEAREST_EVEN) if dtype == "int8" else scaled).astype(dtype)

"""PoolProblem: what a max-pooling asks for, in canonical numbers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, Self, get_args

import jax

from jaxconv._problem.parse import (
    CHANNELS_FIRST,
    CHANNELS_LAST,
    Pair,
    check_choice,
    check_span,
    integers,
    is_number,
    out_extent,
    parse_layout,
    parse_padding,
    shapes,
)

# Of a window: a position in it is a byte. kMaxPoolTaps in common/problem.h.
MAX_TAPS = 255
# The largest stride, dilation or pad that native code takes: kMaxStep in common/problem.h.
_MAX_STEP = 2**31 - 1

PoolAlgorithm = Literal["gather"]
POOL_ALGORITHMS = get_args(PoolAlgorithm)


@dataclasses.dataclass(frozen=True)
class PoolProblem:
    """y[n, o, c] = max over taps t of x[n, o*stride - low + t*dilation, c], -inf where that is padding."""

    name: str
    dtype: str
    batch: int  # N; may be symbolic under jax.export, as may the channels
    channels: int
    in_spatial: tuple[int, ...]
    window: tuple[int, ...]
    out_spatial: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[Pair, ...]  # (low, high), not negative
    dilation: tuple[int, ...]
    channels_last: bool
    save: bool = False  # also return each maximum's position in its window, uint8, row by row
    implementation: str | None = None
    algorithm: str | None = None

    @property
    def nd(self) -> int:
        return len(self.window)

    def _shape(self, spatial: tuple[int, ...]) -> tuple[int, ...]:
        return (self.batch, *spatial, self.channels) if self.channels_last else (self.batch, self.channels, *spatial)

    @property
    def x_shape(self) -> tuple[int, ...]:
        return self._shape(self.in_spatial)

    @property
    def y_shape(self) -> tuple[int, ...]:
        return self._shape(self.out_spatial)

    @property
    def taps(self) -> int:
        return math.prod(self.window)

    @property
    def plain(self) -> bool:
        """Without dilation: those that lax has gradients of."""
        return set(self.dilation) == {1}

    def per_axis(self, values: tuple[Any, ...], other: Any) -> tuple[Any, ...]:
        """`values` at the spatial axes of x, `other` at the rest."""
        return (other, *values, other) if self.channels_last else (other, other, *values)

    def __str__(self) -> str:
        text = f"{self.batch}x{'x'.join(map(str, self.in_spatial))} C={self.channels} {'x'.join(map(str, self.window))}"
        if set(self.stride) != {1}:
            text += " s" + ",".join(map(str, dict.fromkeys(self.stride)))
        if not self.plain:
            text += " d" + ",".join(map(str, dict.fromkeys(self.dilation)))
        layout = (CHANNELS_LAST if self.channels_last else CHANNELS_FIRST)[self.nd]
        return f"{text} {self.dtype} {layout}" + (" + positions" if self.save else "")

    @classmethod
    def infer(
        cls,
        name: str,
        x: jax.Array,
        window: Any,
        *,
        stride: Any,
        padding: Any,
        dilation: Any,
        layout: Any,
        algorithm: Any,
        implementation: Any,
    ) -> Self:
        nd = x.ndim - 2
        if nd not in CHANNELS_LAST:
            raise ValueError(f"{name}: x has {x.ndim} dimensions, expected 3, 4 or 5. {shapes(x=x)}")
        channels_last = parse_layout(name, CHANNELS_LAST[nd] if layout is None else layout, nd)
        window = integers(name, "window", window, nd, 1)
        stride = integers(name, "stride", stride, nd, 1)
        dilation = integers(name, "dilation", dilation, nd, 1)
        check_span(name, window, dilation)
        in_spatial = tuple(x.shape[1:-1] if channels_last else x.shape[2:])
        pads = parse_padding(name, padding, in_spatial, window, stride, dilation)
        if any(is_number(pad) and pad < 0 for pad in sum(pads, ())):
            raise ValueError(f"{name}: padding={padding!r} must not be negative")
        check_choice(name, implementation, algorithm, POOL_ALGORITHMS)
        problem = cls(
            name=name,
            dtype=x.dtype.name,
            batch=x.shape[0],
            channels=x.shape[-1 if channels_last else 1],
            in_spatial=in_spatial,
            window=window,
            out_spatial=tuple(map(out_extent, in_spatial, window, stride, pads, dilation)),
            stride=stride,
            padding=pads,
            dilation=dilation,
            channels_last=channels_last,
            implementation=implementation,
            algorithm=algorithm,
        )
        reason = problem.lax_only()
        if reason and (implementation == "native" or algorithm is not None):
            asked = f"algorithm={algorithm!r}" if algorithm else "implementation='native'"
            raise ValueError(f"{name}: {asked} cannot run: {reason}")
        return problem

    def lax_only(self) -> str | None:
        """Why the problem is lax's own, without a plan; None where it is a primitive's."""
        if not all(map(is_number, (*self.in_spatial, *self.out_spatial))):
            return "a spatial extent is symbolic: native plans need a number"
        if 0 in (self.channels, *self.in_spatial, *self.out_spatial):
            return "there is nothing to compute"
        if many := self.too_many_taps():
            return many
        steps = (*self.stride, *self.dilation, *sum(self.padding, ()))
        if max(steps) > _MAX_STEP:
            return f"stride, padding and dilation are at most {_MAX_STEP}, got {max(steps)}"
        return None

    def too_many_taps(self) -> str | None:
        if self.taps <= MAX_TAPS:
            return None
        return f"positions are bytes: windows have at most {MAX_TAPS} taps, got {self.taps}"

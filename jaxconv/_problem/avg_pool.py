"""AvgPoolProblem: what an average-pooling asks for, in canonical numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxconv._problem.parse import flag, is_number
from jaxconv._problem.pool import PoolProblem

# Of a window: float32 counts them exactly. kMaxAvgPoolTaps in common/problem.h.
_MAX_TAPS = 2**24


@dataclasses.dataclass(frozen=True)
class AvgPoolProblem(PoolProblem):
    """y[n, o, c] = (sum over taps t of x[n, o*stride - low + t, c]) / count[o], 0 where that is padding."""

    # The count is that of all taps, or of those that are no padding. True where there is none.
    count_include_pad: bool = True

    def __str__(self) -> str:
        return super().__str__() + ("" if self.count_include_pad else ", padding not counted")

    @classmethod
    def of(cls, name: str, x: jax.Array, window: Any, *, count_include_pad: Any, **options: Any) -> AvgPoolProblem:
        count_include_pad = flag(name, "count_include_pad", count_include_pad)
        made = cls.infer(name, x, window, dilation=1, **options)
        padded = not all(is_number(pad) and pad == 0 for pad in sum(made.padding, ()))
        return dataclasses.replace(made, count_include_pad=count_include_pad or not padded)

    def too_many_taps(self) -> str | None:
        if self.taps <= _MAX_TAPS:
            return None
        return f"counts are float32: windows have at most {_MAX_TAPS} taps, got {self.taps}"

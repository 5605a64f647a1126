"""IntegerConvProblem: a convolution of integers, in lax's parameters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxconv._problem.conv import MAX_STEP
from jaxconv._problem.parse import Pair

# What native code computes with: Integer in common/dtype.h.
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


@dataclasses.dataclass(frozen=True)
class IntegerConvProblem:
    """lax.conv_general_dilated of integers; sums wrap around in `dtype`.

    Its arrays have the shapes and the order of axes that lax's have.
    """

    name: str  # the public function, for messages
    lhs_dtype: str  # of INTEGERS; that of rhs is the same, or both are of 8 bits
    rhs_dtype: str
    dtype: str  # of the result
    lhs_shape: tuple[int, ...]
    rhs_shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[Pair, ...]
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    lhs_spec: tuple[int, ...]  # lax's dimension numbers: the axes of N, C and the spatial dimensions
    rhs_spec: tuple[int, ...]  # of K, C / groups and the spatial dimensions
    out_spec: tuple[int, ...]  # of N, K and the spatial dimensions
    groups: int  # of channels; 1 where there are batch groups
    batch_groups: int
    implementation: str | None = None
    algorithm: str | None = None

    @classmethod
    def of_lax(
        cls, dtypes: tuple[str, str, str], lhs: Sequence[int], rhs: Sequence[int], params: Mapping[str, Any]
    ) -> IntegerConvProblem:
        """Of the parameters of lax's primitive; `dtypes` are those of lhs, rhs and the result."""

        def ints(values: Any) -> tuple[int, ...]:
            return tuple(int(v) for v in values)

        return cls(
            "conv_general_dilated",
            *dtypes,
            ints(lhs),
            ints(rhs),
            ints(params["window_strides"]),
            tuple((int(low), int(high)) for low, high in params["padding"]),
            ints(params["lhs_dilation"]),
            ints(params["rhs_dilation"]),
            *(ints(spec) for spec in params["dimension_numbers"]),
            int(params["feature_group_count"]),
            int(params["batch_group_count"]),
        )

    @property
    def nd(self) -> int:
        return len(self.stride)

    @property
    def batch(self) -> int:
        """N of the result."""
        return self.lhs_shape[self.lhs_spec[0]] // self.batch_groups

    @property
    def group_c(self) -> int:
        """Input channels of a group."""
        return self.rhs_shape[self.rhs_spec[1]]

    @property
    def out_channels(self) -> int:
        """K, of all groups."""
        return self.rhs_shape[self.rhs_spec[0]]

    @property
    def group_k(self) -> int:
        return self.out_channels // (self.groups * self.batch_groups)

    def _spatial(self, shape: Sequence[int], spec: Sequence[int]) -> tuple[int, ...]:
        return tuple(shape[axis] for axis in spec[2:])

    @property
    def in_spatial(self) -> tuple[int, ...]:
        return self._spatial(self.lhs_shape, self.lhs_spec)

    @property
    def filter(self) -> tuple[int, ...]:
        return self._spatial(self.rhs_shape, self.rhs_spec)

    @property
    def out_spatial(self) -> tuple[int, ...]:
        """Where neither x nor w is empty."""
        given = zip(
            self.in_spatial, self.filter, self.stride, self.padding, self.lhs_dilation, self.rhs_dilation, strict=True
        )
        return tuple(
            max(0, ((size - 1) * left + 1 + low + high - (f - 1) * right - 1) // s + 1) if size and f else 0
            for size, f, s, (low, high), left, right in given
        )

    @property
    def out_shape(self) -> tuple[int, ...]:
        shape = [0] * (self.nd + 2)
        for axis, extent in zip(self.out_spec, (self.batch, self.out_channels, *self.out_spatial), strict=True):
            shape[axis] = extent
        return tuple(shape)

    @property
    def empty(self) -> bool:
        return 0 in (*self.lhs_shape, *self.rhs_shape, *self.out_shape)

    @property
    def beyond(self) -> str | None:
        """Which number native code cannot represent, or None."""
        for argument in ("stride", "padding", "lhs_dilation", "rhs_dilation"):
            values = getattr(self, argument)
            if any(abs(v) > MAX_STEP for v in np.ravel(np.array(values, object))):
                return f"{argument}={values} exceeds {MAX_STEP}, the most that native code takes"
        return None

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * math.prod(self.out_shape) * self.group_c * math.prod(self.filter)

    def __str__(self) -> str:
        def by(values: Sequence[int]) -> str:
            return "x".join(map(str, values)) or "1"

        channels = self.lhs_shape[self.lhs_spec[1]]
        text = f"{self.batch}x{by(self.in_spatial)} {channels}->{self.out_channels} {by(self.filter)}"
        steps = (("s", self.stride), ("u", self.lhs_dilation), ("d", self.rhs_dilation))
        for letter, values in steps:
            if set(values) - {1}:
                text += f" {letter}" + ",".join(map(str, dict.fromkeys(values)))
        text += f" g{self.groups}" if self.groups > 1 else ""
        text += f" b{self.batch_groups}" if self.batch_groups > 1 else ""
        types = self.lhs_dtype if self.lhs_dtype == self.rhs_dtype else f"{self.lhs_dtype}*{self.rhs_dtype}"
        return f"{text} {types}" + (f"->{self.dtype}" if self.dtype != types else "")

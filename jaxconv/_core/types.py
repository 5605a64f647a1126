"""The types of the public functions' arguments: for type checkers, and for who reads a signature."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec, Protocol, TypedDict, TypeVar, overload

import jax
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jaxconv._core import activations
from jaxconv._problem import (
    BatchNormAlgorithm,
    ConvAlgorithm,
    DenseAlgorithm,
    Gate,
    GroupNormAlgorithm,
    Implementation,
    PoolAlgorithm,
    SqueezeExciteAlgorithm,
)

__all__ = [
    "Array",
    "BatchNormAlgorithm",
    "Conv1dPadding",
    "ConvAddOptions",
    "ConvAlgorithm",
    "ConvOptions",
    "ConvScaledOptions",
    "DenseAlgorithm",
    "DenseOptions",
    "Gate",
    "GroupNormAlgorithm",
    "Implementation",
    "Layout",
    "Layout1d",
    "Layout2d",
    "Layout3d",
    "OfArguments",
    "Operand",
    "P",
    "Padding",
    "PerDimension",
    "PoolAlgorithm",
    "Precision",
    "R",
    "SqueezeExciteAlgorithm",
    "ToActivation",
    "ToGate",
    "TransposedPadding",
]

P = ParamSpec("P")  # the parameters of a user's function
R = TypeVar("R")  # what it returns
_Told = TypeVar("_Told", covariant=True)


class OfArguments(Protocol[P, _Told]):
    """A function of another one's arguments, which tells something of it.

    Anything that has a shape and a dtype may stand for an array there, as `jax.ShapeDtypeStruct`s do.
    """

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> _Told: ...
    @overload
    def __call__(self, *args: Any, **kwargs: Any) -> _Told: ...


Array = jax.Array
Operand = jax.Array | np.ndarray[Any, Any]

# A name, leaky_relu with its slope, or the function of jax.nn that has the name
ToActivation = (
    activations.Name | tuple[Literal["leaky_relu"], float] | Callable[..., Any] | activations.Activation | None
)

ToGate = Gate | Callable[..., Any]

Layout1d = Literal["NWC", "NCW"]
Layout2d = Literal["NHWC", "NCHW"]
Layout3d = Literal["NDHWC", "NCDHW"]
Layout = Layout1d | Layout2d | Layout3d

PerDimension = int | Sequence[int]
_Pads = int | Sequence[int] | Sequence[tuple[int, int]]  # the same everywhere, on both sides of an axis, (low, high)
Padding = Literal["SAME", "SAME_LOWER", "VALID"] | _Pads
Conv1dPadding = Literal["CAUSAL"] | Padding
TransposedPadding = Literal["SAME", "VALID"] | _Pads

Precision = lax.PrecisionLike


class _Options(TypedDict, total=False):
    activation: ToActivation
    precision: Precision
    implementation: Implementation | None


class ConvOptions(_Options, total=False):
    """What the convolutions' overloads have in common."""

    stride: PerDimension
    dilation: PerDimension
    groups: int
    algorithm: ConvAlgorithm | None


class ConvAddOptions(ConvOptions, total=False):
    """The same of those that take an array to add."""

    residual: Operand | None


class ConvScaledOptions(ConvAddOptions, total=False):
    """The same of those that also take 8-bit arrays."""

    scale: Operand | float | None
    residual_scale: Operand | float | None
    out_scale: Operand | float | None
    out_dtype: DTypeLike | None


class DenseOptions(_Options, total=False):
    c: Operand | None
    alpha: float
    beta: float
    algorithm: DenseAlgorithm | None
    scale: Operand | float | None
    residual: Operand | None
    residual_scale: Operand | float | None
    out_scale: Operand | float | None
    out_dtype: DTypeLike | None

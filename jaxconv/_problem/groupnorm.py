"""GroupNormProblem: what a group-norm or a layer-norm asks for, in canonical numbers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, get_args

import jax

from jaxconv._core import activations
from jaxconv._core.activations import Activation
from jaxconv._problem.parse import NO_ACTIVATION, check_choice, integer, is_number, number, same_dtype, shapes

GroupNormAlgorithm = Literal["two_read", "interleaved", "resident", "rows"]
GROUPNORM_ALGORITHMS = get_args(GroupNormAlgorithm)


@dataclasses.dataclass(frozen=True)
class GroupNormProblem:
    """Normalisation of each image's groups of channels; y = f((x - mean) * rstd * scale + bias).

    With `rows` of each pixel alone, over all of its channels: layer-norm. Then every pixel is an image.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]  # of x (N, ..., C), without the instance axis
    groups: int  # divides C; 1 with `rows`
    epsilon: float
    activation: Activation = NO_ACTIVATION
    batch: int | None = None  # instances made by vmap, the leading axis of every array
    want_dx: bool = True  # the backward pass: whether dx is wanted besides dscale and dbias
    rows: bool = False  # layer-norm
    implementation: str | None = None
    algorithm: str | None = None

    @property
    def lead(self) -> tuple[int, ...]:
        return () if self.batch is None else (self.batch,)

    @property
    def x_shape(self) -> tuple[int, ...]:
        return (*self.lead, *self.shape)

    @property
    def images(self) -> int:
        """Of an instance."""
        result = 1
        for extent in self.shape[:-1] if self.rows else self.shape[:1]:
            result = result * extent
        return result

    @property
    def pixels(self) -> int:
        result = 1
        for extent in () if self.rows else self.shape[1:-1]:
            result = result * extent
        return result

    @property
    def channels(self) -> int:
        return self.shape[-1]

    @property
    def group_channels(self) -> int:
        return self.channels // self.groups

    @property
    def param_shape(self) -> tuple[int, ...]:
        """Of scale and bias."""
        return (*self.lead, self.channels)

    @property
    def group_shape(self) -> tuple[int, ...]:
        """Of mean and rstd."""
        return (*self.lead, *(self.shape[:-1] if self.rows else (self.images, self.groups)))

    @property
    def param_dtype(self) -> str:
        """Parameters and statistics are float32 for 16-bit x."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def reduced(self) -> int:
        """Elements of an image's group."""
        return self.pixels * self.group_channels

    @property
    def size(self) -> int:
        return (self.batch or 1) * self.images * self.pixels * self.channels

    def __str__(self) -> str:
        statistics = "rows" if self.rows else f"groups={self.groups}"
        text = f"{'x'.join(map(str, self.x_shape))} {statistics} {self.dtype}"
        return text if self.activation.name == "none" else f"{text} + {self.activation}"

    @classmethod
    def infer(
        cls,
        name: str,
        x: jax.Array,
        scale: jax.Array | None,
        bias: jax.Array | None,
        *,
        groups: Any,
        epsilon: Any,
        activation: Any,
        algorithm: Any,
        implementation: Any,
        rows: bool = False,
    ) -> GroupNormProblem:
        """With `rows` x is (..., C), and groups 1."""
        seen = shapes(x=x, scale=scale, bias=bias)
        if rows and x.ndim < 1:
            raise ValueError(f"{name}: x has no dimensions, expected at least 1 (..., C). {seen}")
        if not rows and x.ndim < 2:
            raise ValueError(f"{name}: x has {x.ndim} dimensions, expected at least 2 (N, ..., C). {seen}")
        c = x.shape[-1]
        groups = integer(name, "groups", groups)
        if groups < 1 or (not rows and is_number(c) and (c == 0 or c % groups)):
            raise ValueError(f"{name}: groups={groups} must be positive and divide the {c} channels. {seen}")
        problem = cls(
            name=name,
            dtype=same_dtype(name, x=x),
            shape=tuple(x.shape),
            groups=groups,
            epsilon=number(name, "epsilon", epsilon),
            activation=activations.parse(name, activation),
            rows=rows,
            implementation=implementation,
            algorithm=algorithm,
        )
        for argument, value in {"scale": scale, "bias": bias}.items():
            if value is None:
                continue
            if value.shape != (c,):
                raise ValueError(
                    f"{name}: {argument} has shape {value.shape}, expected ({c},), one per channel. {seen}"
                )
            if value.dtype.name != problem.param_dtype:
                raise TypeError(
                    f"{name}: {argument} has dtype {value.dtype.name}, expected {problem.param_dtype} "
                    f"for x of {problem.dtype}"
                )
        if problem.reduced == 0:
            what = "row" if rows else "group"
            raise ValueError(f"{name}: x is empty: statistics need at least one element a {what}. {seen}")
        if not 0 <= problem.epsilon < math.inf:
            raise ValueError(f"{name}: epsilon={epsilon!r} must not be negative, infinite or NaN")
        check_choice(name, implementation, algorithm, GROUPNORM_ALGORITHMS)
        return problem

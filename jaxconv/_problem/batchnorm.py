"""BatchNormProblem: what a batch-norm asks for, in canonical numbers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, get_args

import jax
import numpy as np

from jaxconv._core import activations
from jaxconv._core.activations import Activation
from jaxconv._problem.parse import NO_ACTIVATION, broadcasts, check_choice, integer, number, same_dtype, shapes

BatchNormAlgorithm = Literal["two_read", "resident_block", "resident_team"]
BATCHNORM_ALGORITHMS = get_args(BatchNormAlgorithm)


@dataclasses.dataclass(frozen=True)
class BatchNormProblem:
    """Normalisation over every axis of x but `channel_axis`; y = f((x - mean) * rstd * scale + bias + residual)."""

    name: str
    dtype: str
    shape: tuple[int, ...]  # of x, without the instance axis
    channel_axis: int  # in [0, len(shape))
    training: bool
    momentum: float
    epsilon: float
    activation: Activation = NO_ACTIVATION
    residual: bool = False
    masked: bool = False  # the statistics are those of a part of x
    apart: bool = False  # its neighbours are calls, so that XLA can fuse it with nothing
    batch: int | None = None  # instances made by vmap, the leading axis of every array
    # The backward pass: what is wanted besides the sums
    want_dx: bool = True
    want_dresidual: bool = False
    # dx of given sums, a part of a backward pass over a mesh: the elements that the sums are over; and whether dy has
    # gone back through the activation already, so that the residual is not read
    count: int | None = None
    dz: bool = False
    implementation: str | None = None
    algorithm: str | None = None

    @property
    def lead(self) -> tuple[int, ...]:
        return () if self.batch is None else (self.batch,)

    @property
    def x_shape(self) -> tuple[int, ...]:
        return (*self.lead, *self.shape)

    @property
    def channels(self) -> int:
        return self.shape[self.channel_axis]

    @property
    def param_shape(self) -> tuple[int, ...]:
        return (*self.lead, self.channels)

    @property
    def param_dtype(self) -> str:
        """Parameters and statistics are float32 for 16-bit x."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def outer(self) -> int:
        result = 1
        for extent in self.shape[: self.channel_axis]:
            result = result * extent
        return result

    @property
    def inner(self) -> int:
        result = 1
        for extent in self.shape[self.channel_axis + 1 :]:
            result = result * extent
        return result

    @property
    def reduced(self) -> int:
        """Elements per channel."""
        return self.outer * self.inner

    @property
    def size(self) -> int:
        return (self.batch or 1) * self.reduced * self.channels

    @property
    def channels_last(self) -> BatchNormProblem:
        """The same of x with the channels moved behind the other axes."""
        others = [extent for axis, extent in enumerate(self.shape) if axis != self.channel_axis]
        return dataclasses.replace(self, shape=(*others, self.channels), channel_axis=len(others))

    @property
    def of_dz(self) -> BatchNormProblem:
        """dx of given sums, as native code sees it: of dz it is that of a bare normalisation."""
        return dataclasses.replace(self, activation=NO_ACTIVATION, residual=False) if self.dz else self

    def __str__(self) -> str:
        text = f"{'x'.join(map(str, self.x_shape))} channel_axis={self.channel_axis} {self.dtype}"
        residual = ["residual"] if self.residual else []
        activation = [] if self.activation.name == "none" else [str(self.activation)]
        return " + ".join([text, *residual, *activation])

    @classmethod
    def infer(
        cls,
        name: str,
        x: jax.Array,
        scale: jax.Array | None,
        bias: jax.Array | None,
        running_mean: jax.Array,
        running_var: jax.Array,
        residual: jax.Array | None,
        *,
        training: Any,
        momentum: Any,
        epsilon: Any,
        activation: Any,
        channel_axis: Any,
        algorithm: Any,
        implementation: Any,
        mask: jax.Array | None = None,
        mean: jax.Array | None = None,
        var: jax.Array | None = None,
        of: str = "x",  # what x is called in messages
    ) -> BatchNormProblem:
        seen = shapes(
            **{of: x}, scale=scale, bias=bias, running_mean=running_mean, running_var=running_var, residual=residual
        )
        dtype = same_dtype(name, **{of: x}, residual=residual)
        if x.ndim < 2:
            raise ValueError(f"{name}: x has {x.ndim} dimensions, expected at least 2 (N, ..., C). {seen}")
        if not isinstance(training, (bool, np.bool_)):
            raise TypeError(
                f"{name}: training must be True or False (it is fixed when the function is traced), got {training!r}"
            )
        axis = integer(name, "channel_axis", channel_axis)
        if not -x.ndim <= axis < x.ndim:
            raise ValueError(f"{name}: channel_axis={axis} is out of range for {x.ndim} dimensions. {seen}")
        axis %= x.ndim
        c = x.shape[axis]
        problem = cls(
            name=name,
            dtype=dtype,
            shape=tuple(x.shape),
            channel_axis=axis,
            training=bool(training),
            momentum=number(name, "momentum", momentum),
            epsilon=number(name, "epsilon", epsilon),
            activation=activations.parse(name, activation),
            residual=residual is not None,
            masked=mask is not None and bool(training),
            implementation=implementation,
            algorithm=algorithm,
        )
        parameters = {"scale": scale, "bias": bias, "running_mean": running_mean, "running_var": running_var}
        parameters |= {"the mean of statistics": mean, "the variance of statistics": var}
        for argument, value in parameters.items():
            if value is None:
                continue
            if value.shape != (c,):
                fits = [a for a in range(1, x.ndim) if value.shape == (x.shape[a],)] if name == "batchnorm" else []
                hint = f". x has {x.shape[fits[0]]} along axis {fits[0]}: channel_axis={fits[0]}" if fits else ""
                raise ValueError(
                    f"{name}: {argument} has shape {value.shape}, expected ({c},), one per channel. {seen}{hint}"
                )
            if value.dtype.name != problem.param_dtype:
                raise TypeError(
                    f"{name}: {argument} has dtype {value.dtype.name}, expected {problem.param_dtype} "
                    f"for {of} of {dtype}"
                )
        if residual is not None and residual.shape != x.shape:
            raise ValueError(f"{name}: residual has shape {residual.shape}, expected {x.shape}, that of {of}. {seen}")
        if mask is not None:
            if mean is not None:
                raise ValueError(f"{name}: mask and statistics were both given, expected at most one of them")
            if mask.dtype != np.bool_:
                raise TypeError(f"{name}: mask has dtype {mask.dtype.name}, expected bool")
            if not broadcasts(mask.shape, x.shape):
                raise ValueError(f"{name}: mask has shape {mask.shape}, which does not broadcast to x's. {seen}")
        if c == 0:
            raise ValueError(f"{name}: x has no channels. {seen}")
        if training and problem.reduced == 0:
            raise ValueError(f"{name}: x is empty: training statistics need at least one element a channel. {seen}")
        if not 0 <= problem.epsilon < math.inf:
            raise ValueError(f"{name}: epsilon={epsilon!r} must not be negative, infinite or NaN")
        if not 0 <= problem.momentum <= 1:
            raise ValueError(f"{name}: momentum={momentum!r} must be between 0 and 1")
        check_choice(name, implementation, algorithm, BATCHNORM_ALGORITHMS)
        return problem

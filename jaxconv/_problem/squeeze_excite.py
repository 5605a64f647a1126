"""SqueezeExciteProblem: what a squeeze-and-excitation asks for, in canonical numbers."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Literal, get_args

import jax

from jaxconv._core import activations
from jaxconv._core.activations import Activation
from jaxconv._problem.parse import check_choice, is_number, same_dtype, shapes

SqueezeExciteAlgorithm = Literal["one_pass"]
SQUEEZE_EXCITE_ALGORITHMS = get_args(SqueezeExciteAlgorithm)

Gate = Literal["sigmoid", "hard_sigmoid"]
GATES = get_args(Gate)

# jax.nn's own functions; flax.linen's and flax.nnx's are the same objects.
_GATE_FUNCTIONS = {jax.nn.sigmoid: "sigmoid", jax.lax.logistic: "sigmoid", jax.nn.hard_sigmoid: "hard_sigmoid"}


@dataclasses.dataclass(frozen=True)
class SqueezeExciteProblem:
    """y = x * g(f(mean of x over the pixels @ w1 + b1) @ w2 + b2), a gate for each image and channel."""

    name: str
    dtype: str
    shape: tuple[int, ...]  # of x (N, ..., C)
    hidden: int
    activation: Activation  # f
    gate: str  # g
    save: bool = False  # a gradient is taken: chosen by times of forward and backward together
    want_dx: bool = True  # the backward pass: whether dx is wanted besides what the parameters' gradients are made of
    implementation: str | None = None
    algorithm: str | None = None

    batch = None  # instances made by vmap are more images, or the reference's

    @property
    def x_shape(self) -> tuple[int, ...]:
        return self.shape

    @property
    def images(self) -> int:
        return self.shape[0]

    @property
    def pixels(self) -> int:
        result = 1
        for extent in self.shape[1:-1]:
            result = result * extent
        return result

    @property
    def channels(self) -> int:
        return self.shape[-1]

    @property
    def w1_shape(self) -> tuple[int, int]:
        return self.channels, self.hidden

    @property
    def w2_shape(self) -> tuple[int, int]:
        return self.hidden, self.channels

    @property
    def mean_shape(self) -> tuple[int, int]:
        """Of mean and gate."""
        return self.images, self.channels

    @property
    def hidden_shape(self) -> tuple[int, int]:
        return self.images, self.hidden

    @property
    def param_dtype(self) -> str:
        """Parameters and all that is between x and y are float32 for 16-bit x."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def size(self) -> int:
        return self.images * self.pixels * self.channels

    def __str__(self) -> str:
        names = " ".join([*([] if self.activation.name == "none" else [str(self.activation)]), self.gate])
        return f"{'x'.join(map(str, self.shape))} hidden={self.hidden} {self.dtype} {names}"

    @classmethod
    def infer(
        cls,
        name: str,
        x: jax.Array,
        w1: jax.Array,
        b1: jax.Array | None,
        w2: jax.Array,
        b2: jax.Array | None,
        *,
        activation: Any,
        gate: Any,
        algorithm: Any,
        implementation: Any,
    ) -> SqueezeExciteProblem:
        seen = shapes(x=x, w1=w1, b1=b1, w2=w2, b2=b2)
        if x.ndim < 2:
            raise ValueError(f"{name}: x has {x.ndim} dimensions, expected at least 2 (N, ..., C). {seen}")
        if w1.ndim != 2:
            raise ValueError(f"{name}: w1 has {w1.ndim} dimensions, expected 2 (C, R). {seen}")
        problem = cls(
            name=name,
            dtype=same_dtype(name, x=x),
            shape=tuple(x.shape),
            hidden=w1.shape[1],
            activation=activations.parse(name, activation),
            gate=_parse_gate(name, gate),
            implementation=implementation,
            algorithm=algorithm,
        )
        c, r = problem.w1_shape
        for argument, value, shape, what in (
            ("w1", w1, (c, r), "(C, R)"),
            ("b1", b1, (r,), "(R,)"),
            ("w2", w2, (r, c), "(R, C)"),
            ("b2", b2, (c,), "(C,)"),
        ):
            if value is None:
                continue
            if value.shape != shape:
                raise ValueError(f"{name}: {argument} has shape {value.shape}, expected {shape}, {what}. {seen}")
            if value.dtype.name != problem.param_dtype:
                raise TypeError(
                    f"{name}: {argument} has dtype {value.dtype.name}, expected {problem.param_dtype} "
                    f"for x of {problem.dtype}"
                )
        if any(is_number(extent) and extent == 0 for extent in (problem.pixels, c, r)):
            raise ValueError(f"{name}: there must be pixels, channels and hidden numbers. {seen}")
        check_choice(name, implementation, algorithm, SQUEEZE_EXCITE_ALGORITHMS)
        return problem


def _parse_gate(name: str, gate: Any) -> str:
    """A name, or the function of jax.nn that has it -> the name."""
    if callable(gate):
        with contextlib.suppress(TypeError):  # not hashable
            gate = _GATE_FUNCTIONS.get(gate, gate)
    if isinstance(gate, str) and gate in GATES:
        return gate
    raise (ValueError if isinstance(gate, str) else TypeError)(
        f"{name}: gate={gate!r} is unknown, expected one of {', '.join(GATES)}, or jax.nn's function of that name"
    )

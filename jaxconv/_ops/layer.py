"""What convolutions and dense layers share: y = f(z), where z is linear in every operand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxconv._core import primitives
from jaxconv._core.activations import Activation, activate_grad

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class ActivationProblem:
    """The derivative of an activation, of an array."""

    shape: tuple[int, ...]
    dtype: str
    activation: Activation


# (kept, t) -> t * f'(z), `kept` the y or z that f's derivative is computed from: an op of its own, so that rules see it
_gradient = primitives.plain(
    "activation_gradient",
    lambda p, kept, t: [activate_grad(p.activation, kept, t)],
    results=lambda p: [(p.shape, p.dtype)],
)
primitives.by_reference(_gradient)


def activation_gradient(activation: Activation, kept: Array | None, t: Array) -> Array:
    """t * f'(z); t itself where there is no activation."""
    if activation.name == "none":
        return t
    return _gradient(ActivationProblem(tuple(t.shape), t.dtype.name, activation), kept, t)[0]


def rules(
    call: Callable[..., list[Array]],  # (p, x, w, ...) -> y, and z where p saves it
    tangents: Callable[..., list[Array]],  # (p, x, w, a tangent or None for each operand) -> summands of z's tangent
    # (p, x, w, dz, want) -> a cotangent (or None) for each operand
    cotangents: Callable[..., list[Array | None]],
) -> primitives.Rules:
    """The rule pair of `call`, whose results are y, and z where the problem saves it.

    Residuals: x, w, and y or z, whichever the activation's derivative is computed from.
    """

    def saving(p: Any) -> Any:
        return dataclasses.replace(p, save_preactivation=p.save_preactivation or p.activation.residual == "z")

    def forward(p: Any, x: Array, w: Array, *rest: Array) -> tuple[list[Array], Any]:
        outs = call(p, x, w, *rest)
        kept = {None: None, "y": outs[0], "z": outs[-1]}[p.activation.residual]
        return outs, (x, w, kept)

    def backward(p: Any, residuals: Any, given: Sequence[Array | None], want: Sequence[bool]) -> Sequence[Array | None]:
        """dz = dy * f'(z) + the cotangent of z itself."""
        x, w, kept = residuals
        dy, *direct = given
        parts = [] if dy is None else [activation_gradient(p.activation, kept, dy)]
        parts += [ct for ct in direct if ct is not None]
        return cotangents(p, x, w, parts[0] if len(parts) == 1 else parts[0] + parts[1], want)

    def tangent(p: Any, residuals: Any, given: Sequence[Array | None]) -> list[Array]:
        x, w, kept = residuals
        parts = tangents(p, x, w, given)
        dz = sum(parts[1:], parts[0])
        dy = activate_grad(p.activation, kept, dz)
        return [dy, dz] if p.save_preactivation else [dy]

    return primitives.Rules(saving, forward, backward, tangent)


def epilogue(p: Any) -> dict[str, Any]:
    """What follows the sum, for the wire."""
    return {
        "bias": np.int64(bool(p.bias)),
        "activation": p.activation.name,
        "slope": np.float64(p.activation.slope),
        "save_preactivation": np.int64(p.save_preactivation),
    }

"""Activations: their names, formulas and derivatives. `common/activation.h` has the formulas for native code."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# What the backward pass keeps of the forward pass: nothing, the output y, or the pre-activation z.
RESIDUALS = {
    "none": None,
    "relu": "y",
    "relu6": "y",
    "leaky_relu": "y",
    "elu": "y",
    "tanh": "y",
    "sigmoid": "y",
    "silu": "z",
    "gelu": "z",
    "gelu_exact": "z",
    "hard_swish": "z",
}
NAMES = tuple(RESIDUALS)
# What costs nothing where y is written, on a CPU too.
CHEAP = ("none", "relu", "relu6", "leaky_relu", "hard_swish")

Name = Literal[
    "none",
    "relu",
    "relu6",
    "leaky_relu",
    "elu",
    "tanh",
    "sigmoid",
    "silu",
    "swish",
    "gelu",
    "gelu_exact",
    "hard_swish",
    "hard_silu",
]


@dataclasses.dataclass(frozen=True)
class Activation:
    """An activation y = f(z). `slope` belongs to leaky_relu: f(z) = slope * z below zero."""

    name: str = "none"
    slope: float = 0.0

    @property
    def residual(self) -> str | None:
        """`"y"`, `"z"` or None: what f' is computed from."""
        # A slope of zero or less loses the sign of z in y.
        if self.name == "leaky_relu" and not self.slope > 0:
            return "z"
        return RESIDUALS[self.name]

    def __str__(self) -> str:
        return f"leaky_relu({self.slope:g})" if self.name == "leaky_relu" else self.name


# JAX's own functions (flax.linen's and flax.nnx's are the same objects), with the defaults of their arguments.
_FUNCTIONS: dict[Any, Activation] = {
    jax.nn.identity: Activation(),
    jax.nn.relu: Activation("relu"),
    jax.nn.relu6: Activation("relu6"),
    jax.nn.leaky_relu: Activation("leaky_relu", 0.01),
    jax.nn.elu: Activation("elu"),
    jnp.tanh: Activation("tanh"),
    jax.lax.tanh: Activation("tanh"),
    jax.nn.tanh: Activation("tanh"),
    jax.nn.sigmoid: Activation("sigmoid"),
    jax.lax.logistic: Activation("sigmoid"),
    jax.nn.silu: Activation("silu"),
    jax.nn.swish: Activation("silu"),
    jax.nn.gelu: Activation("gelu"),
    jax.nn.hard_swish: Activation("hard_swish"),
    jax.nn.hard_silu: Activation("hard_swish"),
}


def _of_function(function: Callable[..., Any]) -> Activation | None:
    """The activation that a function of JAX's is; also `functools.partial` of gelu's and leaky_relu's argument."""
    if not isinstance(function, functools.partial):
        try:
            return _FUNCTIONS.get(function)
        except TypeError:  # not hashable
            return None
    if function.args or len(function.keywords) != 1:
        return None
    ((argument, value),) = function.keywords.items()
    if function.func is jax.nn.gelu and argument == "approximate" and isinstance(value, bool):
        return Activation("gelu" if value else "gelu_exact")
    if function.func is jax.nn.leaky_relu and argument == "negative_slope" and _finite(value):
        return Activation("leaky_relu", float(value))
    return None


def _finite(value: Any) -> bool:
    number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    return number and math.isfinite(value)


def parse(where: str, activation: Any) -> Activation:
    """`None`, a name, `("leaky_relu", slope)`, a function of JAX's or an Activation -> Activation."""
    if activation is None:
        return Activation()
    if isinstance(activation, Activation):
        return activation
    if callable(activation):
        known = _of_function(activation)
        if known is None:
            raise TypeError(
                f"{where}: activation={activation!r} is a function that no kernel applies, expected jax.nn's relu, "
                f"relu6, leaky_relu, elu, sigmoid, silu, gelu or hard_swish, jnp.tanh, one of the names "
                f"{', '.join(NAMES)}, or ('leaky_relu', slope). Any other function can be applied to the result"
            )
        return known
    if (
        isinstance(activation, tuple)
        and len(activation) == 2
        and activation[0] == "leaky_relu"
        and _finite(activation[1])
    ):
        return Activation("leaky_relu", float(activation[1]))
    if isinstance(activation, str):
        # JAX and Flax have both names
        activation = {"swish": "silu", "hard_silu": "hard_swish"}.get(activation, activation)
        if activation not in RESIDUALS:
            raise ValueError(
                f"{where}: activation={activation!r} is unknown, expected None or one of {', '.join(NAMES)}"
            )
        return Activation(activation, 0.01 if activation == "leaky_relu" else 0.0)
    raise TypeError(
        f"{where}: activation={activation!r} must be None, one of {', '.join(NAMES)}, or ('leaky_relu', slope) "
        f"with a finite number"
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def activate(activation: Activation, z: jax.Array) -> jax.Array:
    """y = f(z), in z's dtype. Its derivative is `activate_grad`, at any order.

    As jax.nn, but right to a relative error in the tails too (gelu(-5) is -2.3e-7), and 0 at minus infinity where f
    tends to it; sigmoid and what follows it in `NAMES` are computed in float32 of 16 bits.
    """
    name = activation.name
    if name == "none":
        return z
    if name == "relu":
        return jnp.maximum(z, 0)
    if name == "relu6":
        return jnp.minimum(jnp.maximum(z, 0), jnp.full_like(z, 6))  # jax.experimental.jet takes no clip, nor 6
    if name == "leaky_relu":
        return jnp.where(z >= 0, z, activation.slope * z)
    if name == "elu":
        return jnp.where(z > 0, z, jnp.expm1(jnp.where(z > 0, 0, z)))
    if name == "tanh":
        return jnp.tanh(z)
    if name == "sigmoid":
        return jax.nn.sigmoid(_wide(z)).astype(z.dtype)
    # f is z times a factor that is 0 long before the lowest number: minus infinity gives 0, not NaN.
    x = _wide(z)
    x = jnp.maximum(x, jnp.finfo(x.dtype).min)
    if name == "silu":
        y = x * jax.nn.sigmoid(x)
    elif name == "gelu":
        y = x * jax.nn.sigmoid(_gelu_argument(x))
    elif name == "hard_swish":
        y = x * (1 / 6) * jnp.minimum(jnp.maximum(x + 3, 0), jnp.full_like(x, 6))
    else:
        assert name == "gelu_exact", name
        y = 0.5 * x * lax.erfc(-x * math.sqrt(0.5))
    return y.astype(z.dtype)


def _wide(z: jax.Array) -> jax.Array:
    return z.astype(jnp.float32) if z.dtype.itemsize == 2 else z


def _gelu_argument(x: jax.Array) -> jax.Array:
    """2u, with gelu(x) = 0.5 x (1 + tanh(u)) = x sigmoid(2u)."""
    return math.sqrt(8 / math.pi) * (x + 0.044715 * (x * x * x))


@activate.defjvp
def _(activation, primals, tangents):
    (z,), (t,) = primals, tangents
    y = activate(activation, z)
    return y, activate_grad(activation, {None: None, "y": y, "z": z}[activation.residual], t)


def activate_tangent(activation: Activation, z: jax.Array, t: jax.Array) -> jax.Array:
    """t * f'(z), where z is there: `activate_grad` of whichever of y and z it reads."""
    return activate_grad(activation, activate(activation, z) if activation.residual == "y" else z, t)


def activate_grad(activation: Activation, residual: jax.Array | None, t: jax.Array) -> jax.Array:
    """t * f'(z), with `residual` the y or z that `activation.residual` names (None for no activation).

    At a kink the derivative is jax.nn's: relu'(0) = 0, leaky_relu'(0) = 1; relu6 is 0 at both of its kinks;
    hard_swish is 0 at -3 and 1 at 3.
    """
    name = activation.name
    if name == "none":
        return t
    assert residual is not None
    r = residual
    if name == "relu":
        return jnp.where(r > 0, t, jnp.zeros_like(t))
    if name == "relu6":
        return jnp.where((r > 0) & (r < 6), t, jnp.zeros_like(t))
    if name == "leaky_relu":
        return jnp.where(r >= 0, t, activation.slope * t)
    if name == "elu":
        return t * jnp.where(r > 0, 1, r + 1)
    if name == "tanh":
        return t * (1 - r * r)
    if name == "sigmoid":
        return t * (r * (1 - r))
    if name == "hard_swish":
        x = _wide(r)
        slope = jnp.where(x >= 3, jnp.ones_like(x), (2 * x + 3) * (1 / 6))
        return t * jnp.where(x <= -3, jnp.zeros_like(x), slope).astype(r.dtype)
    # Beyond the limit the derivative is 0 or 1, in float64 too; at infinity it would be a product of 0 and infinity.
    x = _wide(r)
    limit = {"silu": float(jnp.finfo(x.dtype).max), "gelu": 30.0, "gelu_exact": 40.0}[name]
    x = jnp.clip(x, -limit, limit)
    if name == "silu":
        slope = jax.nn.sigmoid(x) * (1 + x * jax.nn.sigmoid(-x))
    elif name == "gelu":
        u = _gelu_argument(x)
        s = jax.nn.sigmoid(u)
        slope = s + x * s * jax.nn.sigmoid(-u) * math.sqrt(8 / math.pi) * (1 + 3 * 0.044715 * (x * x))
    else:
        slope = 0.5 * lax.erfc(-x * math.sqrt(0.5)) + x * math.sqrt(0.5 / math.pi) * jnp.exp(-0.5 * x * x)
    return t * slope.astype(r.dtype)

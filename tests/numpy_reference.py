"""What the ops mean, in plain numpy and float64, written from the formulas and without lax.

Convolutions here are channels last: x (N, *in, C), w (*window, C/G, K), y (N, *out, K).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import scipy.special

from jaxconv._core import activations


def activate(activation: Any, z: np.ndarray) -> np.ndarray:
    """f(z), also for complex z; comparisons look at the real part."""
    positive = z.real > 0
    a = activations.parse("test", activation)
    return {
        "none": lambda: z,
        "relu": lambda: np.where(positive, z, 0),
        "relu6": lambda: np.where(z.real < 6, np.where(positive, z, 0), 6),
        "leaky_relu": lambda: np.where(positive, z, a.slope * z),
        "elu": lambda: np.where(positive, z, np.exp(np.where(positive, 0, z)) - 1),
        "tanh": lambda: np.tanh(z),
        "sigmoid": lambda: 1 / (1 + np.exp(-z)),
        "silu": lambda: z / (1 + np.exp(-z)),
        "gelu": lambda: 0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
        "gelu_exact": lambda: 0.5 * z * (1 + scipy.special.erf(z / math.sqrt(2))),
        "hard_swish": lambda: z * activate("relu6", z + 3) / 6,
    }[a.name]()


def slope(activation: Any, z: np.ndarray) -> np.ndarray:
    """f'(z) without its formula: the imaginary part of f at a step of i 1e-30, which is exact to rounding."""
    step = 1e-30
    return activate(activation, z + 1j * step).imag / step


def out_extents(case: Any) -> tuple[int, ...]:
    return tuple(
        (size + low + high - ((k - 1) * d + 1)) // s + 1
        for size, k, s, (low, high), d in zip(
            case.spatial, case.filter, case.stride, case.padding, case.dilation, strict=True
        )
    )


def taps(case: Any) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """(output position, tap, input position) for every tap that falls inside the input."""
    for o in itertools.product(*map(range, out_extents(case))):
        for t in itertools.product(*map(range, case.filter)):
            i = tuple(
                o_ * s - low + t_ * d
                for o_, t_, s, (low, _), d in zip(o, t, case.stride, case.padding, case.dilation, strict=True)
            )
            if all(0 <= i_ < size for i_, size in zip(i, case.spatial, strict=True)):
                yield o, t, i


def _grouped(case: Any, x: np.ndarray, w: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Views with the groups as an axis of their own: (N, *in, G, C/G), (*window, C/G, G, K/G), (N, *out, G, K/G)."""
    g = case.groups
    return (
        x.reshape(*x.shape[:-1], g, x.shape[-1] // g),
        w.reshape(*w.shape[:-1], g, w.shape[-1] // g),
        y.reshape(*y.shape[:-1], g, y.shape[-1] // g),
    )


def fprop(case: Any, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    y = np.zeros((x.shape[0], *out_extents(case), w.shape[-1]))
    xg, wg, yg = _grouped(case, x, w, y)
    for o, t, i in taps(case):
        yg[:, *o] += np.einsum("ngc,cgk->ngk", xg[:, *i], wg[t])
    return y


def dgrad(case: Any, dy: np.ndarray, w: np.ndarray) -> np.ndarray:
    dx = np.zeros((dy.shape[0], *case.spatial, case.in_channels))
    xg, wg, yg = _grouped(case, dx, w, dy)
    for o, t, i in taps(case):
        xg[:, *i] += np.einsum("ngk,cgk->ngc", yg[:, *o], wg[t])
    return dx


def wgrad(case: Any, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    dw = np.zeros((*case.filter, case.in_channels // case.groups, case.out_channels))
    xg, wg, yg = _grouped(case, x, dw, dy)
    for o, t, i in taps(case):
        wg[t] += np.einsum("ngc,ngk->cgk", xg[:, *i], yg[:, *o])
    return dw


def batchnorm(
    x: np.ndarray,
    scale: np.ndarray,
    bias: np.ndarray,
    running_mean: np.ndarray,
    running_var: np.ndarray,
    *,
    training: bool,
    momentum: float,
    epsilon: float,
    activation: Any = None,
    residual: np.ndarray | None = None,
    channel_axis: int = -1,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(y, running mean, running variance), with the biased variance in both places."""
    axis = channel_axis % x.ndim
    axes = tuple(a for a in range(x.ndim) if a != axis)
    shape = [-1 if a == axis else 1 for a in range(x.ndim)]
    if training:
        mean = x.mean(axes)
        var = ((x - mean.reshape(shape)) ** 2).mean(axes)
        running_mean = momentum * running_mean + (1 - momentum) * mean
        running_var = momentum * running_var + (1 - momentum) * var
    else:
        mean, var = running_mean, running_var
    z = (x - mean.reshape(shape)) / np.sqrt(var + epsilon).reshape(shape) * scale.reshape(shape) + bias.reshape(shape)
    if residual is not None:
        z = z + residual
    return activate(activation, z), running_mean, running_var


def groupnorm(
    x: np.ndarray, scale: np.ndarray, bias: np.ndarray, *, groups: int, epsilon: float, activation: Any = None
) -> np.ndarray:
    _, z = _group_normalised(x, scale, bias, groups, epsilon)[:2]
    return activate(activation, z)


def groupnorm_gradients(
    x: np.ndarray, scale: np.ndarray, bias: np.ndarray, dy: np.ndarray, *, groups: int, epsilon: float, activation: Any
) -> dict[str, np.ndarray]:
    """Those of x, scale and bias."""
    xhat, z, rstd = _group_normalised(x, scale, bias, groups, epsilon)
    dz = dy * slope(activation, z)
    images = tuple(range(x.ndim - 1))

    def mean(a: np.ndarray) -> np.ndarray:  # of each image's groups
        grouped = a.reshape(x.shape[0], -1, groups, x.shape[-1] // groups)
        return np.broadcast_to(grouped.mean((1, 3), keepdims=True), grouped.shape).reshape(x.shape)

    g = scale * dz
    return {"x": rstd * (g - mean(g) - xhat * mean(g * xhat)), "scale": (dz * xhat).sum(images), "bias": dz.sum(images)}


def _group_normalised(x: Any, scale: Any, bias: Any, groups: int, epsilon: float) -> tuple[Any, Any, Any]:
    """(xhat, z, rstd), each of x's shape."""
    grouped = x.reshape(x.shape[0], -1, groups, x.shape[-1] // groups)
    centred = grouped - grouped.mean((1, 3), keepdims=True)
    rstd = 1 / np.sqrt((centred**2).mean((1, 3), keepdims=True) + epsilon)
    xhat = (centred * rstd).reshape(x.shape)
    return xhat, xhat * scale + bias, np.broadcast_to(rstd, grouped.shape).reshape(x.shape)


def numerical_gradient(f: Any, value: np.ndarray, step: float = 1e-4) -> np.ndarray:
    """d f(value) / d value, entry by entry, by central differences of a scalar function in float64.

    At 1e-4 both errors are near their smallest sum: truncation is step^2/6 f''' = 2e-9 f''', rounding
    2^-53 |f| / step = 1e-12 |f|.
    """
    gradient = np.zeros_like(value)
    for index in np.ndindex(value.shape):
        plus, minus = value.copy(), value.copy()
        plus[index] += step
        minus[index] -= step
        gradient[index] = (f(plus) - f(minus)) / (2 * step)
    return gradient

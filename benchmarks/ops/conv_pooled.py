"""The first layer of a network and the max-pooling behind it: a convolution, its bias, a relu and the maxima."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks.ops import base
from benchmarks.ops.conv import ConvCase, problem_of
from benchmarks.ops.conv_cases import conv
from jaxconv import _plan
from jaxconv._ops import conv_pooled
from jaxconv._problem import PooledConvProblem, PoolProblem


@dataclasses.dataclass(frozen=True)
class ConvPooledCase(ConvCase):
    """y = max_pool(relu(conv(x, w) + b)), windows of 2x2 or 3x3 that step by 2, those of 3x3 padded by 1."""

    window: int = 3

    op = "conv_pooled"
    without_torch = "no kernel of PyTorch's joins a convolution and a pooling"
    results: ClassVar = {"fprop": ("y",)}
    algorithms = ("stem", "two")

    def pooled(self, y: Array, channels_last: bool = True) -> Array:
        def of(values: tuple[int, ...], other: Any) -> tuple[Any, ...]:
            return (other, *values, other) if channels_last else (other, other, *values)

        pads = of(((1, 1),) * 2 if self.window == 3 else ((0, 0),) * 2, (0, 0))
        return lax.reduce_window(y, -jnp.inf, lax.max, of((self.window,) * 2, 1), of((2,) * 2, 1), pads)

    def work(self, pass_: str, item: int) -> tuple[float, float]:
        flops, bytes_ = super().work(pass_, item)
        y = jax.eval_shape(self.pooled, jax.ShapeDtypeStruct(self.y_shape(), "float32"))
        return flops, bytes_ - item * (math.prod(self.y_shape()) - y.size)

    def arrays(self, setting: base.Setting, key: Array) -> base.Arrays:
        normal = base.Normal(setting, key)
        return self.operands(setting, normal) | {"b": normal((self.out_channels,))}

    def ours(self, pass_: str, setting: base.Setting, **choice: Any) -> base.Job:
        """The algorithm "two" is a convolution and a pooling, each by a plan of its own."""
        two = choice.get("algorithm") == "two"
        bias = dict(activation="relu", implementation="native" if choice.get("algorithm") == "stem" else None)
        p = dataclasses.replace(problem_of(self, setting, **bias), bias=True)
        q = PoolProblem.infer(
            "max_pool",
            jax.ShapeDtypeStruct(p.y_shape, p.dtype),
            self.window,
            stride=2,
            padding=self.window - 2,
            dilation=1,
            layout=self.layout(setting.channels_last),
            algorithm=None,
            implementation=None,
        )
        both = PooledConvProblem.of(p, q)

        def f(x: Array, w: Array, b: Array) -> Array:
            if two:
                return conv_pooled.kernel.reference(both, x, w, b)[0]
            plan = _plan.plan("conv_pooled", both, _plan.Device.default())
            if any(choice.values()) and plan.implementation != "native":
                raise ValueError(plan.reason)
            return conv_pooled.kernel(both, x, w, b)

        return _job(f, ("conv", "max_pool") if two else ("conv_pooled",))

    def xla(self, pass_: str, setting: base.Setting) -> base.Job:
        conv, last = self.lax_conv(setting), setting.channels_last

        def f(x: Array, w: Array, b: Array) -> Array:
            return self.pooled(jax.nn.relu(conv(x, w) + (b if last else b[:, None, None])), last)

        return _job(f).plain

    def reference(self, pass_: str, channels_last: bool, a: base.Arrays, y: Array) -> base.Reference:
        b = a["b"].astype("float64")
        exact = jax.nn.relu(self.exact(pass_, channels_last, a) + (b if channels_last else b[:, None, None]))
        return {"y": (self.pooled(exact, channels_last), None)}

    def tolerance(self, pass_: str, result: str, rounding: base.Rounding) -> float:
        return super().tolerance(pass_, result, rounding) + 2 * rounding.u

    def kernel(self, pass_: str, setting: base.Setting) -> tuple[str, Any] | None:
        return None  # plans weigh it by the convolution's times


def _job(f: Callable[..., Array], kernels: tuple[str, ...] = ()) -> base.Job:
    job = base.Job.of(f, ("x", "w", "b"), kernels)
    return dataclasses.replace(job, outputs=lambda y: (y,))


# ResNets and DenseNets at several batches and sizes, ShuffleNet, Inception's stem as one layer, a network of digits.
CASES = tuple(
    ConvPooledCase.of(conv(name, *extents, stride=stride, padding=pad, suite="models"), window=window)
    for name, extents, stride, pad, window in (
        ("r50.256", (256, 224, 3, 64, 7), 2, 3, 3),
        ("r50.64", (64, 224, 3, 64, 7), 2, 3, 3),
        ("r50.8", (8, 224, 3, 64, 7), 2, 3, 3),
        ("r50.1", (1, 224, 3, 64, 7), 2, 3, 3),
        ("r50.512", (16, 512, 3, 64, 7), 2, 3, 3),
        ("shuffle.128", (128, 224, 3, 24, 3), 2, 1, 3),
        ("stem3x3.149", (64, 149, 3, 64, 3), 1, 1, 3),
        ("digits.512", (512, 28, 1, 32, 5), 1, 2, 2),
    )
)

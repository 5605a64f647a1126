"""The gradient between two convolutions without norms: dgrad, a relu's derivative, and the sum for the bias."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.ops import base
from benchmarks.ops.conv import ConvCase, problem_of
from benchmarks.ops.conv_cases import conv
from jaxconv import _plan
from jaxconv._core.activations import Activation
from jaxconv._ops.conv import dgrad, gradient


class ConvGradientCase(ConvCase):
    """dz = [y > 0] * dgrad of dy, y like x, and dbias = sum dz over all axes but the channels."""

    op = "conv_gradient"
    without_torch = "part of a gradient, which PyTorch takes as a whole"
    results: ClassVar = {"dgrad": ("dz", "dbias")}
    algorithms = ("sm90", "narrow", "three")

    def work(self, pass_: str, item: int) -> tuple[float, float]:
        return self.flops, item * (self.elements + math.prod(self.x_shape()))  # dy, w and y, to dz

    def arrays(self, setting: base.Setting, key: Array) -> base.Arrays:
        normal, last = base.Normal(setting, key), setting.channels_last
        arrays = self.operands(setting, normal)
        return arrays | {"kept": jax.nn.relu(normal(self.x_shape(last))), "dy": normal(self.y_shape(last))}

    def ours(self, pass_: str, setting: base.Setting, **choice: Any) -> base.Job:
        """The algorithm "three" is a dgrad by a plan of its own, and what follows as XLA fuses it."""
        three = choice.get("algorithm") == "three"
        p = problem_of(self, setting, **({} if three else choice))
        p = dataclasses.replace(p, activation=Activation("relu"))

        def f(dy: Array, w: Array, kept: Array) -> tuple[Array, ...]:
            if three:
                return _back(dgrad(p.bare(), dy, w), kept, setting.channels_last)
            plan = _plan.plan("conv_gradient", p, _plan.Device.default())
            if any(choice.values()) and plan.implementation != "native":
                raise ValueError(plan.reason)
            return tuple(gradient(p, dy, w, kept))

        return _job(f, ("conv_dgrad",) if three else ("conv_gradient",))

    def xla(self, pass_: str, setting: base.Setting) -> base.Job:
        conv = jax.jit(self.lax_conv(setting))

        def back(dy: Array, w: Array, kept: Array) -> tuple[Array, ...]:
            return _back(jax.linear_transpose(lambda x: conv(x, w), kept)(dy)[0], kept, setting.channels_last)

        return _job(back).plain

    def reference(self, pass_: str, channels_last: bool, a: base.Arrays, y: Array) -> base.Reference:
        dz, dbias = _back(self.exact("dgrad", channels_last, a), a["kept"], channels_last)
        return {"dz": (dz, None), "dbias": (dbias, None)}

    def tolerance(self, pass_: str, result: str, rounding: base.Rounding) -> float:
        sums = 0.0 if result == "dz" else rounding.sums(self.reduced)
        return 2 * (2 * rounding.u + rounding.product(self.terms(pass_)) + sums)

    def kernel(self, pass_: str, setting: base.Setting) -> tuple[str, Any] | None:
        return None  # plans weigh it by the dgrad's times and its bytes


def _back(dx: Array, kept: Array, channels_last: bool) -> tuple[Array, Array]:
    dz = jnp.where(kept > 0, dx, jnp.zeros_like(dx))
    return dz, jnp.sum(dz, tuple(range(dx.ndim - 1)) if channels_last else (0, *range(2, dx.ndim)))


def _job(f: Callable[..., tuple[Array, ...]], kernels: tuple[str, ...] = ()) -> base.Job:
    return base.Job.of(f, ("dy", "w", "kept"), kernels)


# Convolutions behind another one and its relu: VGG-16's at batch 64, EDSR's, IMPALA's, U-Nets' of few channels.
CASES = tuple(
    ConvGradientCase.of(conv(name, batch, size, c, k, 3, suite="models"))
    for name, batch, size, c, k in (
        ("vgg.1", 64, 224, 64, 64),
        ("vgg.2", 64, 112, 128, 128),
        ("vgg.3", 64, 56, 256, 256),
        ("vgg.4", 64, 28, 512, 512),
        ("vgg.5", 64, 14, 512, 512),
        ("edsr", 16, 48, 64, 64),
        ("impala.42", 1024, 42, 16, 16),
        ("impala.21", 1024, 21, 32, 32),
        ("unet.256", 16, 256, 32, 32),
        ("unet.128", 16, 128, 64, 64),
    )
)

"""The gradient through a batch-norm that only a convolution reads: dgrad, the activation, the sums, and dx."""

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
from jaxconv._ops import batchnorm
from jaxconv._ops.conv import dgrad, norm_gradient
from jaxconv._problem import BatchNormProblem


class NormGradientCase(ConvCase):
    """dx, dscale and dbias of y = relu(z), z = xhat * scale + bias, of a batch-norm in training, from the dy of its
    convolution's result. Channels last."""

    op = "conv_norm_gradient"
    without_torch = "part of a gradient, which PyTorch takes as a whole"
    results: ClassVar = {"dgrad": ("dx", "dscale", "dbias")}
    algorithms = ("sm90", "two")
    layouts = ("NHWC",)

    def work(self, pass_: str, item: int) -> tuple[float, float]:
        # dy, w and x, to dz; then x and dz, to dx
        return self.flops, item * (self.elements + 4 * math.prod(self.x_shape()))

    def arrays(self, setting: base.Setting, key: Array) -> base.Arrays:
        normal, shape, channels = base.Normal(setting, key), self.x_shape(), (self.in_channels,)
        arrays = self.operands(setting, normal) | {"x": normal(shape)}
        arrays |= {name: normal(channels, 0.2, at, jnp.float32) for name, at in (("scale", 1.0), ("bias", 0.0))}
        return arrays | {"mean": jnp.zeros(channels), "rstd": jnp.ones(channels), "dy": normal(self.y_shape())}

    def ours(self, pass_: str, setting: base.Setting, **choice: Any) -> base.Job:
        """The algorithm "two" is a dgrad and the batch-norm's backward pass, each by a plan of its own."""
        two = choice.get("algorithm") == "two"
        p = problem_of(self, setting, **({} if two else choice))
        p = dataclasses.replace(p, activation=Activation("relu"))
        plan = _plan.plan("conv_norm_gradient", p, _plan.Device.default())
        if not two and any(choice.values()) and plan.implementation != "native":
            raise ValueError(plan.reason)
        two = two or plan.implementation != "native"  # as a program has it
        q = BatchNormProblem(p.name, p.dtype, p.x_shape, p.channel_axis, True, 0.9, 1e-5, p.activation)
        sums = dataclasses.replace(q, count=q.reduced, dz=True)

        def f(dy: Array, w: Array, x: Array, *norm: Array) -> tuple[Array, ...]:
            if two:
                dscale, dbias, dx = batchnorm.backward(q, x, dgrad(p.bare(), dy, w), *norm)
                return dx, dscale, dbias
            dz, dscale, dbias = norm_gradient(p, dy, w, x, *norm)
            return batchnorm.dx_of_sums(sums, x, dz, *norm, dscale, dbias), dscale, dbias

        return _job(f, ("conv_dgrad", "batchnorm_backward") if two else ("conv_norm_gradient", "batchnorm_dx"))

    def xla(self, pass_: str, setting: base.Setting) -> base.Job:
        conv = jax.jit(self.lax_conv(setting))

        def back(dy: Array, w: Array, x: Array, *norm: Array) -> tuple[Array, ...]:
            return _back(jax.linear_transpose(lambda x: conv(x, w), x)(dy)[0], x, *norm)

        return _job(back).plain

    def reference(self, pass_: str, channels_last: bool, a: base.Arrays, y: Array) -> base.Reference:
        norm = (base.wide(a[name]) for name in ("x", "scale", "bias", "mean", "rstd"))
        outs = _back(self.exact("dgrad", channels_last, a), *norm)
        return {name: (out, None) for name, out in zip(self.results["dgrad"], outs, strict=True)}

    def tolerance(self, pass_: str, result: str, rounding: base.Rounding) -> float:
        sums = 0.0 if result == "dx" else rounding.sums(self.reduced)
        return 2 * (3 * rounding.u + rounding.product(self.terms(pass_)) + sums)

    def kernel(self, pass_: str, setting: base.Setting) -> tuple[str, Any] | None:
        return None  # plans weigh it by the dgrad's times and its bytes


@jax.jit
def _back(dy: Array, x: Array, scale: Array, bias: Array, mean: Array, rstd: Array) -> tuple[Array, ...]:
    pixels, n = tuple(range(x.ndim - 1)), x.size // x.shape[-1]
    xhat = (x.astype(scale.dtype) - mean) * rstd
    dz = jnp.where(xhat * scale + bias > 0, dy, 0).astype(scale.dtype)
    dscale, dbias = jnp.sum(dz * xhat, pixels), jnp.sum(dz, pixels)
    return (scale * rstd * (dz - dbias / n - xhat * dscale / n)).astype(x.dtype), dscale, dbias


def _job(f: Callable[..., tuple[Array, ...]], kernels: tuple[str, ...] = ()) -> base.Job:
    return base.Job.of(f, ("dy", "w", "x", "scale", "bias", "mean", "rstd"), kernels)


# The norms inside the blocks of ResNet-50, ResNeXt-50, MobileNetV2 (in front of its last 1x1s), DenseNet-121, and of a
# network that plays on 19x19 boards
CASES = tuple(
    NormGradientCase.of(conv(name, batch, size, c, k, filter, suite="models"))
    for name, batch, size, c, k, filter in (
        ("r50.s1.1x1b", 256, 56, 64, 256, 1),
        ("r50.s1.3x3", 256, 56, 64, 64, 3),
        ("r50.s2.1x1b", 256, 28, 128, 512, 1),
        ("x50.s1.1x1b", 256, 56, 128, 256, 1),
        ("x50.s2.1x1b", 256, 28, 256, 512, 1),
        ("mobile.112", 256, 112, 32, 16, 1),
        ("mobile.56", 256, 56, 144, 24, 1),
        ("mobile.28", 256, 28, 192, 32, 1),
        ("mobile.14a", 256, 14, 384, 64, 1),
        ("mobile.14b", 256, 14, 576, 96, 1),
        ("dense.56.1x1", 256, 56, 128, 128, 1),
        ("dense.56.3x3", 256, 56, 128, 32, 3),
        ("dense.28.1x1", 256, 28, 256, 128, 1),
        ("board19.3x3", 2048, 19, 128, 128, 3),
        ("r18.32.3x3", 256, 32, 64, 64, 3),
    )
)

"""A batch-norm of x by known statistics, its activation, and a convolution of the result, which nobody else needs."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

import jaxconv
from benchmarks.ops import base
from benchmarks.ops.conv import ConvCase, problem_of
from benchmarks.ops.conv_cases import conv
from jaxconv import _plan
from jaxconv._core.activations import Activation
from jaxconv._ops.conv import fprop, wgrad
from jaxconv._ops.conv_normalised import gradients_by_kernels, gradients_by_parts, normalised, normalised_wgrad
from jaxconv._problem import BatchNormConvProblem, BatchNormProblem, NormalisedConvProblem

_NAMES = ("x", "w", "dy", "scale", "bias", "mean", "var")
_BACKWARD_NAMES = ("x", "dy", "w", "scale", "bias", "mean", "var")


@dataclasses.dataclass(frozen=True)
class BatchNormConvCase(ConvCase):
    """A batch-norm of x by known statistics, its activation, and a convolution of the result, which nobody else needs.

    pair: y and dw, in training's order. bwd: every gradient, of a batch-norm in training whose statistics are known.
    """

    activation: str = "relu6"

    op = "batchnorm_conv"
    without_torch = "PyTorch writes what is normalised"
    results: ClassVar = {"fprop": ("y",), "wgrad": ("dw",), "pair": ("y", "dw"), "bwd": ("dw", "dscale", "dbias", "dx")}
    algorithms = ("depthwise", "sm90", "two")
    layouts = ("NHWC",)

    def work(self, pass_: str, item: int) -> tuple[float, float]:
        if pass_ == "pair":
            return 2 * self.flops, 2 * item * self.elements
        if pass_ == "bwd":
            # Sums over all of them stand between two readings of x and dy.
            return 3 * self.flops, item * (3 * math.prod(self.x_shape()) + 2 * math.prod(self.y_shape()))
        return super().work(pass_, item)

    def __str__(self) -> str:
        return f"{self.activation}, {super().__str__()}"

    def arrays(self, setting: base.Setting, key: Array) -> base.Arrays:
        normal = base.Normal(setting, key)
        arrays = self.operands(setting, normal) | normal.parameters(self.in_channels)
        return arrays | {"dy": normal(self.y_shape(setting.channels_last))}

    def ours(self, pass_: str, setting: base.Setting, **choice: Any) -> base.Job:
        """The algorithm "two" is what a user writes without `batchnorm_conv`: what that is by a plan of two."""
        forced, two = any(choice.values()), choice.get("algorithm") == "two"
        p = self._problem(setting, **({} if two else choice))
        if pass_ == "bwd":
            return _backward_job(p, forced, two)
        kernels: tuple[str, ...] = ("conv_normalised", "conv_normalised_wgrad")
        plans = [_plan.plan(op, p, _plan.Device.default()) for op in kernels]
        refused = next((plan.reason for plan in plans if plan.implementation != "native"), None)
        if two or (refused is not None and not forced):
            norm = dict(training=False, epsilon=base.EPSILON, activation=self.activation)
            axis = -1 if setting.channels_last else 1
            return _job(
                pass_,
                ("batchnorm_infer", "conv_fprop", "conv_wgrad"),
                lambda x, *v: jaxconv.batchnorm(x, *v, **norm, channel_axis=axis)[0],
                lambda a, w, *v: fprop(p.conv, a, w),
                lambda a, dy, *v: wgrad(p.conv, a, dy),
            )

        def read(x: Array, *v: Array) -> Array:
            if refused is not None:  # what is forced is measured or refused, and not replaced by two calls
                raise ValueError(refused)
            return x

        return _job(pass_, kernels, read, functools.partial(normalised, p), functools.partial(normalised_wgrad, p))

    def _problem(self, setting: base.Setting, **choice: Any) -> NormalisedConvProblem:
        conv = problem_of(self, setting, **choice)
        activation = Activation(self.activation)
        norm = BatchNormProblem(
            conv.name, conv.dtype, conv.x_shape, conv.channel_axis, False, 0.0, base.EPSILON, activation
        )
        return NormalisedConvProblem.of(norm, conv)

    def xla(self, pass_: str, setting: base.Setting) -> base.Job:
        conv, axes = jax.jit(self.lax_conv(setting)), base.pixel_axes(self.nd, setting.channels_last)
        activation = base.ACTIVATIONS[self.activation]

        def normalise(x: Array, *v: Array) -> Array:
            scale, bias, mean, var = (lax.expand_dims(a, axes) for a in v)
            z = (x.astype(jnp.float32) - mean) * (lax.rsqrt(var + base.EPSILON) * scale) + bias
            return activation(z).astype(x.dtype)

        def weights(a: Array, dy: Array, *v: Array) -> Array:
            w = jax.ShapeDtypeStruct(self.w_shape(setting.channels_last), a.dtype)
            return jax.linear_transpose(lambda w: conv(a, w), w)(dy)[0]

        def backward(x: Array, dy: Array, w: Array, *v: Array) -> tuple[Array, ...]:
            scale, bias, mean, var = (lax.expand_dims(a, axes) for a in v)
            rstd = lax.rsqrt(var + base.EPSILON)
            xhat = (x.astype(jnp.float32) - mean) * rstd
            a, back = jax.vjp(activation, xhat * scale + bias)
            a = a.astype(x.dtype)
            (da,) = jax.linear_transpose(lambda a: conv(a, w), a)(dy)
            (dz,) = back(da.astype(jnp.float32))
            dscale, dbias = jnp.sum(dz * xhat, axes, keepdims=True), jnp.sum(dz, axes, keepdims=True)
            n = x.size // dbias.size
            dx = scale * rstd * (dz - dbias / n - xhat * dscale / n)
            return weights(a, dy), dscale.ravel(), dbias.ravel(), dx.astype(x.dtype)

        if pass_ == "bwd":
            return base.Job.of(backward, _BACKWARD_NAMES).plain
        return _job(pass_, (), normalise, lambda a, w, *v: conv(a, w), weights).plain

    def reference(self, pass_: str, channels_last: bool, a: base.Arrays, y: Array) -> base.Reference:
        normalised = {**a, "x": _normalised(self, channels_last, a)}
        passes = {"y": "fprop", "dw": "wgrad"}
        names = (name for name in self.results[pass_] if name in passes)
        convs: base.Reference = {name: (self.exact(passes[name], channels_last, normalised), None) for name in names}
        if pass_ != "bwd":
            return convs
        return _backward(self, "bwd", channels_last, a, self.exact("dgrad", channels_last, a)) | convs

    def tolerance(self, pass_: str, result: str, rounding: base.Rounding) -> float:
        # What is convolved is rounded too.
        return 2 * (2 * rounding.u + rounding.product(self.terms("fprop" if result == "y" else "wgrad")))

    def kernel(self, pass_: str, setting: base.Setting) -> tuple[str, Any] | None:
        op = {"pair": "conv_normalised", "bwd": "conv_normalised_gradient"}.get(pass_)
        return (op, self._problem(setting)) if op else None


def _job(
    pass_: str,
    kernels: tuple[str, ...],
    normalise: Callable[..., Array],  # of x and parameters; what is given in x's place where that is not written
    conv: Callable[..., Array],  # of that, w and parameters
    wgrad: Callable[..., Array],  # of that, dy and parameters
) -> base.Job:
    def f(x: Array, w: Array, dy: Array, *v: Array) -> tuple[Array, ...]:
        a = normalise(x, *v)
        if pass_ == "wgrad":
            return (wgrad(a, dy, *v),)
        y = conv(a, w, *v)
        if pass_ == "fprop":
            return (y,)
        # In training dy is computed from y.
        y, dy = lax.optimization_barrier((y, dy))
        return y, wgrad(a, dy, *v)

    return base.Job.of(f, _NAMES, kernels)


def _backward_job(p: NormalisedConvProblem, forced: bool, two: bool) -> base.Job:
    whole = BatchNormConvProblem(dataclasses.replace(p.norm, training=True), p.conv)
    plan = _plan.plan("conv_normalised_gradient", p, _plan.Device.default())
    by_kernels = _plan.plan("batchnorm_conv_backward", whole, _plan.Device.default()).kernel == "normalised"

    def f(*args: Array) -> tuple[Array, ...]:
        if two:
            return tuple(gradients_by_parts(whole, *args))
        if forced and plan.implementation != "native":
            raise ValueError(plan.reason)
        return tuple((gradients_by_kernels if by_kernels else gradients_by_parts)(whole, *args))

    kernels = ("conv_normalised_gradient", "conv_normalised_dx")
    parts = ("conv_dgrad", "batchnorm_backward", "conv_normalised_wgrad")
    return base.Job.of(f, _BACKWARD_NAMES, kernels if not two and plan.implementation == "native" else parts)


def _normalised(case: BatchNormConvCase, channels_last: bool, arrays: base.Arrays) -> Array:
    axes = base.pixel_axes(case.nd, channels_last)
    scale, bias, mean, var = (lax.expand_dims(base.wide(arrays[n]), axes) for n in ("scale", "bias", "mean", "var"))
    z = (base.wide(arrays["x"]) - mean) / jnp.sqrt(var + base.EPSILON) * scale + bias
    return base.ACTIVATIONS[case.activation](z)


@base.exact
def _backward(
    case: BatchNormConvCase, pass_: str, channels_last: bool, arrays: base.Arrays, da: Array
) -> base.Reference:
    """dscale, dbias and dx of a batch-norm in training that has these statistics, da being its result's gradient."""
    axes = base.pixel_axes(case.nd, channels_last)
    scale, mean, var = (lax.expand_dims(base.wide(arrays[n]), axes) for n in ("scale", "mean", "var"))
    rstd = 1 / jnp.sqrt(var + base.EPSILON)
    xhat = (base.wide(arrays["x"]) - mean) * rstd
    z = xhat * scale + lax.expand_dims(base.wide(arrays["bias"]), axes)
    dz = jax.vjp(base.ACTIVATIONS[case.activation], z)[1](da)[0]
    dscale, dbias = jnp.sum(dz * xhat, axes, keepdims=True), jnp.sum(dz, axes, keepdims=True)
    n = dz.size // dbias.size
    dx = scale * rstd * (dz - dbias / n - xhat * dscale / n)
    # A thread that rounds z otherwise takes another side of a kink.
    kinks = {"relu": (0.0,), "relu6": (0.0, 6.0)}.get(case.activation, ())
    near = functools.reduce(jnp.logical_or, [jnp.abs(z - kink) < 1e-4 for kink in kinks], jnp.zeros(z.shape, bool))
    return {"dscale": (dscale.ravel(), None), "dbias": (dbias.ravel(), None), "dx": (dx, near)}


# The depthwise layers of MobileNetV2 and EfficientNet-B0 that a kernel may give a batch-norm to read.
_MODELS = {
    ("mobilenet", "relu6"): (
        *((112, 32, 1), (112, 96, 2), (56, 144, 1), (56, 144, 2), (28, 192, 1), (28, 192, 2)),
        *((14, 384, 1), (14, 576, 2), (7, 960, 1)),
    ),
    ("efficientnet", "silu"): (*((112, 32, 1), (112, 96, 2), (56, 144, 1), (28, 240, 2), (14, 480, 1), (7, 1152, 1)),),
}


# The 1x1s behind a batch-norm and its activation: the last of a block of ResNet-50 and ResNeXt-50, and MobileNetV2's
# projections.
_PRODUCTS = {
    ("r50", "relu"): ((56, 64, 256), (28, 128, 512), (14, 256, 1024), (7, 512, 2048)),
    ("x50", "relu"): ((56, 128, 256), (28, 256, 512), (14, 512, 1024), (7, 1024, 2048)),
    ("mobilenet", "relu6"): (
        *((112, 32, 16), (56, 96, 24), (56, 144, 24), (28, 144, 32), (28, 192, 32), (14, 192, 64), (14, 384, 64)),
        *((14, 384, 96), (14, 576, 96), (7, 576, 160), (7, 960, 160), (7, 960, 320)),
    ),
}


def _layer(model: str, size: int, c: int, stride: int) -> ConvCase:
    window: dict[str, Any] = dict(stride=stride, padding=(0, 1) if stride == 2 else 1, groups=c)
    return conv(f"{model}.{size}.dw3{'s2' if stride == 2 else ''}", 256, size, c, c, 3, **window, suite="models")


def _product(model: str, size: int, c: int, k: int) -> ConvCase:
    return conv(f"{model}.{size}.{c}to{k}.1x1", 256, size, c, k, 1, suite="models")


CASES = (
    *(
        BatchNormConvCase.of(_layer(model, *layer), activation=activation)
        for (model, activation), layers in _MODELS.items()
        for layer in layers
    ),
    *(
        BatchNormConvCase.of(_product(model, *layer), activation=activation)
        for (model, activation), layers in _PRODUCTS.items()
        for layer in layers
    ),
)

"""The gradient behind a residual block: dgrad, an addition, the ReLU before them, and a batch-norm's two sums."""

from __future__ import annotations

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
from jaxconv._ops import reference as formulas
from jaxconv._ops.conv import dgrad_add, dgrad_sums


class DgradSumsCase(ConvCase):
    """dz = [y > 0] * (dgrad of dy + c), y and c like x, dbias = sum dz and dscale = sum dz * xhat.

    The sums are those of the batch-norm that made y of x and a residual. Whether y > 0 is given as bits. Channels last.
    """

    op = "conv_dgrad_sums"
    without_torch = "PyTorch makes the sums in the batch-norm"
    results: ClassVar = {"dgrad": ("dz", "dscale", "dbias")}
    algorithms = ("sm90", "two")
    layouts = ("NHWC",)

    def work(self, pass_: str, item: int) -> tuple[float, float]:
        x = math.prod(self.x_shape())  # dy, w, c, x and a bit an element of x, to dz
        return self.flops, item * (self.elements + 2 * x) + x / 8

    def arrays(self, setting: base.Setting, key: Array) -> base.Arrays:
        normal, shape, channels = base.Normal(setting, key), self.x_shape(), (self.in_channels,)
        arrays = self.operands(setting, normal)
        arrays |= {"c": normal(shape), "signs": formulas.signs(normal(shape))}
        arrays |= {"mean": normal(channels, 0.2, 0.0, jnp.float32), "rstd": jnp.full(channels, 0.7)}
        return arrays | {"dy": normal(self.y_shape())}

    def ours(self, pass_: str, setting: base.Setting, **choice: Any) -> base.Job:
        """The algorithm "two" is a dgrad with its addition, by a plan of its own, and what follows as XLA fuses it."""
        two = choice.get("algorithm") == "two"
        p = problem_of(self, setting, **({} if two else choice))

        def f(dy: Array, w: Array, c: Array, *norm: Array) -> tuple[Array, ...]:
            if two:
                return tuple(formulas.through_relu(p.channel_axis, dgrad_add(p, dy, w, c), *norm))
            plan = _plan.plan("conv_dgrad_sums", p, _plan.Device.default())
            if any(choice.values()) and plan.implementation != "native":
                raise ValueError(plan.reason)
            return tuple(dgrad_sums(p, dy, w, c, *norm))

        return _job(f, ("conv_dgrad_add",) if two else ("conv_dgrad_sums",))

    def xla(self, pass_: str, setting: base.Setting) -> base.Job:
        conv, pixels = jax.jit(self.lax_conv(setting)), tuple(range(self.nd + 1))

        def back(dy: Array, w: Array, c: Array, signs: Array, x: Array, mean: Array, rstd: Array) -> tuple[Array, ...]:
            (dx,) = jax.linear_transpose(lambda x: conv(x, w), x)(dy)
            dz = jnp.where(formulas.above(signs), dx + c, 0)
            dz_f32 = dz.astype(jnp.float32)
            xhat = (x.astype(jnp.float32) - mean) * rstd
            return dz, jnp.sum(dz_f32 * xhat, pixels), jnp.sum(dz_f32, pixels)

        return _job(back).plain

    def reference(self, pass_: str, channels_last: bool, a: base.Arrays, y: Array) -> base.Reference:
        return _sums(a, self.exact("dgrad", channels_last, a))

    def tolerance(self, pass_: str, result: str, rounding: base.Rounding) -> float:
        # What is summed is a dgrad, rounded before c is added or only behind it.
        sums = 0.0 if result == "dz" else rounding.sums(self.reduced)
        return 2 * (2 * rounding.u + rounding.product(self.terms(pass_)) + sums)

    def kernel(self, pass_: str, setting: base.Setting) -> tuple[str, Any] | None:
        return None  # plans weigh it by its bytes


def _job(f: Callable[..., tuple[Array, ...]], kernels: tuple[str, ...] = ()) -> base.Job:
    return base.Job.of(f, ("dy", "w", "c", "signs", "x", "mean", "rstd"), kernels)


@jax.jit
def _sums(arrays: base.Arrays, dx: Array) -> base.Reference:
    """Of channels-last arrays; the signs' bit of channel c is bit c % 8 of byte c / 8."""
    signs = arrays["signs"]
    above = jnp.stack([(signs & (1 << bit)) != 0 for bit in range(8)], -1).reshape(dx.shape)
    dz = jnp.where(above, dx + base.wide(arrays["c"]), 0)
    xhat = (base.wide(arrays["x"]) - base.wide(arrays["mean"])) * base.wide(arrays["rstd"])
    pixels = tuple(range(dx.ndim - 1))
    return {"dz": (dz, None), "dscale": (jnp.sum(dz * xhat, pixels), None), "dbias": (jnp.sum(dz, pixels), None)}


# The convolutions behind ResNet-50's and ResNeXt-50's residual blocks whose result has at least 64 MiB.
CASES = tuple(
    DgradSumsCase.of(conv(f"r50.{name}", 256, size, c, k, 1, suite="models"))
    for name, size, c, k in (
        ("s1.1x1c", 56, 256, 64),
        ("s2.1x1a", 56, 256, 128),
        ("s2.1x1c", 28, 512, 128),
        ("s3.1x1a", 28, 512, 256),
        ("s3.1x1c", 14, 1024, 256),
    )
)

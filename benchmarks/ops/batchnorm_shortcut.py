"""relu(batch-norm of x + batch-norm of r), forward and backward: the two batch-norms that end a projection block."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

import jaxconv
from benchmarks.ops import base
from benchmarks.ops.batchnorm import BatchNormCase
from jaxconv import _plan
from jaxconv._core.activations import Activation
from jaxconv._ops import reference as formulas
from jaxconv._ops.batchnorm import shortcut_backward, shortcut_problem
from jaxconv._problem import BatchNormProblem


class ShortcutCase(BatchNormCase):
    """r is like x, and the statistics of both are known."""

    op = "batchnorm_shortcut"
    without_torch = "PyTorch takes no statistics of training"
    results: ClassVar = {"fwd+bwd": ("y", "dscale", "dbias", "dscale_r", "dx", "dr")}
    algorithms = ("two_read", "two")
    layouts = ("NHWC",)
    call_problem = None  # its calls are batch-norms' too

    def work(self, pass_: str, item: int) -> tuple[float, float]:
        return 0.0, item * 8 * self.elements  # x, r to y; x, r, dy to dx, dr

    def ours(self, pass_: str, setting: base.Setting, **choice: Any) -> base.Job:
        """The algorithm "two" is two calls, each by a plan of its own."""
        two = choice.get("algorithm") == "two"
        p = self._problem(setting, **({} if two else choice))
        takes_both = _plan.plan("batchnorm_shortcut", p, _plan.Device.default()).kernel == "joined"
        if two or not (any(choice.values()) or takes_both):
            return _job(_two_norms, ("batchnorm_infer", "batchnorm_backward"))

        def joined(x: Array, r: Array, scale: Array, bias: Array, dy: Array, *statistics: Array) -> tuple[Array, ...]:
            mean, var, mean_r, var_r = statistics
            norm = scale, bias, mean, lax.rsqrt(var + base.EPSILON)
            norm_r = scale, bias, mean_r, lax.rsqrt(var_r + base.EPSILON)
            y, *_ = formulas.batchnorm_shortcut(p, x, *norm, r, *norm_r)
            return y, *shortcut_backward(p, x, dy, *norm, r, *norm_r)

        return _job(joined, ("batchnorm_shortcut_backward",))

    def _problem(self, setting: base.Setting, **choice: Any) -> BatchNormProblem:
        dtype, shape = jnp.dtype(base.DTYPES[setting.dtype]).name, self.x_shape()
        p = shortcut_problem(dtype, shape, len(shape) - 1, Activation("relu"))
        return dataclasses.replace(p, **choice)

    def xla(self, pass_: str, setting: base.Setting) -> base.Job:
        return self.ours(pass_, setting, implementation="xla").plain

    @base.exact
    def reference(self, pass_: str, channels_last: bool, a: base.Arrays, y: Array) -> base.Reference:
        axes, scale, bias, rstd, xhat = (
            tuple(range(a["x"].ndim - 1)),
            base.wide(a["scale"]),
            base.wide(a["bias"]),
            {},
            {},
        )
        for name in ("x", "residual"):
            x = base.wide(a[name])
            rstd[name] = 1 / jnp.sqrt(jnp.var(x, axes) + base.EPSILON)
            xhat[name] = (x - jnp.mean(x, axes)) * rstd[name]
        z = (xhat["x"] + xhat["residual"]) * scale + 2 * bias
        # y's own mask, as of a residual; r's norm may be rounded to y's type before it is added.
        near = 2.0**-18 if y.dtype == jnp.float32 else 2.0**-5
        dz, undetermined = jnp.where(y > 0, base.wide(a["dy"]), 0), jnp.abs(z) < near
        dbias, n = jnp.sum(dz, axes), z.size // scale.size
        results: base.Reference = {"y": (jnp.maximum(z, 0), None), "dbias": (dbias, None)}
        for name, dscale_name, dx_name in (("x", "dscale", "dx"), ("residual", "dscale_r", "dr")):
            dscale = jnp.sum(dz * xhat[name], axes)
            dx = scale * rstd[name] * (dz - dbias / n - xhat[name] * (dscale / n))
            results |= {dscale_name: (dscale, None), dx_name: (dx, undetermined)}
        return results

    def kernel(self, pass_: str, setting: base.Setting) -> tuple[str, Any] | None:
        return "batchnorm_shortcut_backward", self._problem(setting)


def _two_norms(x: Array, r: Array, scale: Array, bias: Array, dy: Array, *statistics: Array) -> tuple[Array, ...]:
    norm = dict(training=True, momentum=0.0, epsilon=base.EPSILON)
    mean, var, mean_r, var_r = statistics

    def both(x: Array, r: Array, scale: Array, bias_x: Array, scale_r: Array) -> Array:
        r, *_ = jaxconv.batchnorm(r, scale_r, bias, mean_r, var_r, statistics=(mean_r, var_r), **norm)
        joins = dict(statistics=(mean, var), activation="relu", residual=r)
        return jaxconv.batchnorm(x, scale, bias_x, mean, var, **joins, **norm)[0]

    y, back = jax.vjp(both, x, r, scale, bias, scale)
    dx, dr, dscale, dbias, dscale_r = back(dy)
    return y, dscale, dbias, dscale_r, dx, dr


def _job(f: Callable[..., tuple[Array, ...]], kernels: tuple[str, ...]) -> base.Job:
    @jax.jit
    def statistics(x: Array) -> tuple[Array, Array]:
        axes = tuple(range(x.ndim - 1))
        return jnp.mean(x, axes, jnp.float32), jnp.var(x.astype(jnp.float32), axes)

    def arguments(a: base.Arrays) -> tuple[Array, ...]:
        arrays = (a[name] for name in ("x", "residual", "scale", "bias", "dy"))
        return *arrays, *statistics(a["x"]), *statistics(a["residual"])

    return base.Job(jax.jit(f), arguments, f, kernels)


CASES = tuple(
    ShortcutCase(f"r50.{stage}", 256, channels, (size, size))
    for stage, channels, size in (("s1", 256, 56), ("s2", 512, 28), ("s3", 1024, 14), ("s4", 2048, 7))
)

"""Batch-norms, in training and with running statistics."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array, lax

import jaxconv
from benchmarks import torch_contender
from benchmarks.ops import base
from jaxconv import _problem
from jaxconv._problem import BatchNormProblem

_NAMES = ("x", "scale", "bias", "mean", "var")
# With a residual, those that are differentiated first
_RESIDUAL = ("x", "scale", "bias", "residual", "mean", "var", "dy")
_STATISTICS = ("new_mean", "new_var")


@dataclasses.dataclass(frozen=True)
class BatchNormCase(base.ImagesCase):
    suite: str = "core"

    op = "batchnorm"
    # fwd: training. infer: running statistics. bwd: the gradient of fwd alone. fwd+bwd: with a ReLU, as in training.
    # residual: fwd+bwd with a residual added before the ReLU.
    results: ClassVar = {
        "fwd": ("y", *_STATISTICS),
        "infer": ("y",),
        "bwd": ("dx", "dscale", "dbias"),
        "fwd+bwd": ("y", *_STATISTICS, "dx", "dscale", "dbias"),
        "residual": ("y", *_STATISTICS, "dx", "dscale", "dbias", "dresidual"),
    }
    algorithms = _problem.BATCHNORM_ALGORITHMS
    measured: ClassVar = {
        **dict.fromkeys(("fwd", "fwd+bwd", "residual"), ("batchnorm_train",)),
        **{"infer": ("batchnorm_infer",), "bwd": ("batchnorm_backward",)},
    }
    call_problem = BatchNormProblem

    @property
    def reduced(self) -> int:
        """Elements per channel."""
        return self.batch * math.prod(self.spatial)

    def work(self, pass_: str, item: int) -> tuple[float, float]:
        passes = {"fwd": 2, "infer": 2, "bwd": 3, "fwd+bwd": 5, "residual": 8}[pass_]
        return 0.0, item * passes * self.elements

    def small(self) -> Self:
        return self.shrunk(min(self.channels, 24))

    def arrays(self, setting: base.Setting, key: Array) -> base.Arrays:
        normal = base.Normal(setting, key)
        arrays = self.images(setting, normal) | {"residual": normal(self.x_shape(setting.channels_last))}
        return arrays | normal.parameters(self.channels)

    def ours(self, pass_: str, setting: base.Setting, **choice: Any) -> base.Job:
        options = dict(momentum=base.MOMENTUM, epsilon=base.EPSILON, **choice)
        norm = functools.partial(jaxconv.batchnorm, **options, channel_axis=-1 if setting.channels_last else 1)
        kernels = ("batchnorm_train", "batchnorm_infer", "batchnorm_backward")
        if pass_ != "bwd":
            return _job(pass_, norm, kernels)
        train = functools.partial(norm, training=True)
        # The residuals of a forward pass are its arguments: a vjp function is a pytree.
        before = jax.jit(lambda x, s, b, m, v: jax.vjp(lambda x, s, b: train(x, s, b, m, v)[0], x, s, b)[1])

        def after(vjp: Callable[[Array], tuple[Array, ...]], dy: Array) -> tuple[Array, ...]:
            return vjp(dy)

        return base.Job(jax.jit(after), lambda a: (before(*(a[n] for n in _NAMES)), a["dy"]), after, kernels)

    def xla(self, pass_: str, setting: base.Setting) -> base.Job:
        axes = base.pixel_axes(len(self.spatial), setting.channels_last)

        def spread(v: Array) -> Array:
            return jnp.expand_dims(v, axes)

        def statistics(x: Array) -> tuple[Array, Array]:
            # Flax's _compute_stats with use_fast_variance, its default
            x_f32 = x.astype(jnp.float32)
            mean = jnp.mean(x_f32, axes)
            return mean, jnp.maximum(0.0, jnp.mean(lax.square(x_f32), axes) - lax.square(mean))

        def norm(x: Array, scale: Array, bias: Array, *running: Array, training: bool, **joins: Any) -> tuple[Any, ...]:
            mean, var = new = statistics(x) if training else running
            if training:
                new = tuple(base.MOMENTUM * old + (1 - base.MOMENTUM) * v for old, v in zip(running, new, strict=True))
            # Flax's _normalize
            y = (x - spread(mean)) * (lax.rsqrt(spread(var) + base.EPSILON) * spread(scale)) + spread(bias)
            y = y.astype(x.dtype) + joins["residual"] if "residual" in joins else y.astype(x.dtype)
            return jax.nn.relu(y) if "activation" in joins else y, *new

        # Autodiff alone would save float32 copies of x for a backward pass that is a program of its own; in a training
        # step XLA recomputes them. So here it is the formula.
        def backward(x: Array, dy: Array, scale: Array, mean: Array, rstd: Array) -> tuple[Array, ...]:
            xhat = (x.astype(jnp.float32) - spread(mean)) * spread(rstd)
            dz = dy.astype(jnp.float32)
            dbias, dscale = jnp.sum(dz, axes), jnp.sum(dz * xhat, axes)
            n = self.reduced
            dx = spread(scale * rstd) * (dz - spread(dbias / n) - xhat * spread(dscale / n))
            return dx.astype(x.dtype), dscale, dbias

        def arguments(a: base.Arrays) -> tuple[Array, ...]:
            mean, var = jax.jit(statistics)(a["x"])
            return a["x"], a["dy"], a["scale"], mean, lax.rsqrt(var + base.EPSILON)

        return base.Job(jax.jit(backward), arguments) if pass_ == "bwd" else _job(pass_, norm).plain

    def torch(self, pass_: str, setting: base.Setting) -> base.Job:
        import torch

        functional = torch.nn.functional
        to_first, to_last = torch_contender.image_orders(len(self.spatial), setting.channels_last)
        rank = len(self.spatial) + 2

        def norm(x: Any, scale: Any, bias: Any, mean: Any, var: Any, training: bool) -> Any:
            return functional.batch_norm(x, mean, var, scale, bias, training, 1 - base.MOMENTUM, base.EPSILON)

        def forward(*args: Any) -> Any:
            with torch.no_grad():
                return (norm(*args, pass_ == "fwd"),)

        def both(x: Any, scale: Any, bias: Any, *rest: Any) -> Any:
            *residual, mean, var, dy = rest
            y = functional.relu(sum(residual, norm(x, scale, bias, mean, var, True)))
            return y, *torch.autograd.grad(y, (x, scale, bias, *residual), dy)

        def backward(y: Any, x: Any, scale: Any, bias: Any, dy: Any) -> Any:
            return torch.autograd.grad(y, (x, scale, bias), dy, retain_graph=True)

        def arguments(a: base.Arrays) -> tuple[Any, ...]:
            t = {n: torch_contender.give(a[n]).detach() for n in _RESIDUAL}
            # Statistics are updated in place.
            t = {n: v.permute(to_first) if v.ndim == rank else v.clone() for n, v in t.items()}
            for n in ("x", "scale", "bias", "residual") if pass_ in ("bwd", "fwd+bwd", "residual") else ():
                t[n].requires_grad_(True)
            if pass_ == "bwd":
                return norm(*(t[n] for n in _NAMES), True), t["x"], t["scale"], t["bias"], t["dy"]
            return tuple(t[n] for n in _argument_names(pass_))

        def outputs(out: Any) -> tuple[Any, ...]:
            results = list(torch_contender.take(out, lambda t: t.permute(to_last) if t.ndim == rank else t))
            if pass_ in ("fwd", "fwd+bwd", "residual"):
                # PyTorch's running variance is the unbiased one, and it is updated in place: not the same results.
                results[1:1] = [None, None]
            return tuple(results)

        f = {"bwd": backward, "fwd+bwd": both, "residual": both}.get(pass_, forward)
        return torch_contender.job(f, arguments, outputs=outputs)

    @base.exact
    def reference(self, pass_: str, channels_last: bool, a: base.Arrays, y: Array) -> base.Reference:
        x = base.wide(a["x"])
        axes = base.pixel_axes(x.ndim - 2, channels_last)

        def spread(v: Array) -> Array:
            return jnp.expand_dims(base.wide(v), axes)

        if pass_ == "infer":
            mean, var = base.wide(a["mean"]), base.wide(a["var"])
        else:
            mean = jnp.mean(x, axes)
            var = jnp.mean((x - spread(mean)) ** 2, axes)
        rstd = 1 / jnp.sqrt(var + base.EPSILON)
        xhat = (x - spread(mean)) * spread(rstd)
        z = xhat * spread(a["scale"]) + spread(a["bias"])
        if pass_ == "residual":
            z = z + base.wide(a["residual"])
        stats = {
            f"new_{name}": (base.MOMENTUM * base.wide(a[name]) + (1 - base.MOMENTUM) * batch, None)
            for name, batch in (("mean", mean), ("var", var))
        }
        if pass_ == "infer":
            return {"y": (z, None)}
        if pass_ == "fwd":
            return {"y": (z, None), **stats}
        dz, undetermined = base.wide(a["dy"]), None
        if pass_ == "residual":
            # y's own mask: a sum of two rounded terms near 0 has the sign that rounding gives it. Where float32
            # rounding of such a sum decides, a mask that is recomputed may differ from y's.
            dz, undetermined = jnp.where(y > 0, dz, 0), jnp.abs(z) < 2.0**-18
        elif pass_ == "fwd+bwd":
            # Where float32 rounding decides the sign of z, it decides whether dz is 0.
            undetermined = jnp.abs(z) < 2.0**-12
            dz = jnp.where(z > 0, dz, 0)
        dbias, dscale = jnp.sum(dz, axes), jnp.sum(dz * xhat, axes)
        n = x.size // dbias.size
        dx = spread(a["scale"]) * spread(rstd) * (dz - spread(dbias / n) - xhat * spread(dscale / n))
        grads: base.Reference = {
            "dx": (dx, undetermined),
            "dscale": (dscale, None),
            "dbias": (dbias, None),
            "dresidual": (dz, undetermined),
        }
        return grads if pass_ == "bwd" else {"y": (jnp.maximum(z, 0), None), **stats, **grads}

    def tolerance(self, pass_: str, result: str, rounding: base.Rounding) -> float:
        # Statistics: float32 sums of `reduced` terms; y and dx a dozen operations on them.
        sums = rounding.sums(self.reduced)
        if result in ("y", "dx", "dr", "dresidual"):
            return 2 * (2 * rounding.u + sums)
        if pass_ in ("fwd+bwd", "residual") and result in ("dscale", "dbias", "dscale_r"):
            # The sign of a z within float32 rounding of 0 is open: of n terms, n 2^-20 may be in the sum or not.
            return 2 * (2.0**-10 + sums)
        return 2 * sums

    def traced(self, pass_: str, setting: base.Setting, arrays: base.Arrays) -> tuple[Any, ...]:
        if pass_ != "bwd":
            return super().traced(pass_, setting, arrays)
        # Its arguments are a vjp function, made by running the forward pass: both are traced.
        forward = self.ours("fwd", setting).f

        def both(dy: Array, *args: Array) -> Any:
            return jax.vjp(lambda *a: forward(*a)[0], *args)[1](dy)

        return both, (arrays["dy"], *(arrays[n] for n in _NAMES))

    @classmethod
    def call_bytes(cls, op: str, problem: Any, item: int) -> float:
        # x read, y written; backward x and dy read, dx written, and c read where it is added; a residual read, its
        # gradient written. With a shortcut's x and r read, y written, which is no call of its own; backward x, r and dy
        # read, dx and dr written
        passes = {"batchnorm_backward": 3, "batchnorm_backward_add": 4, "batchnorm_shortcut_backward": 8}.get(op, 2)
        return item * (passes + bool(problem.residual)) * problem.size


def _argument_names(pass_: str) -> tuple[str, ...]:
    return {"fwd+bwd": (*_NAMES, "dy"), "residual": _RESIDUAL}.get(pass_, _NAMES)


def _job(pass_: str, norm: Callable[..., tuple[Array, ...]], kernels: tuple[str, ...] = ()) -> base.Job:
    """Of all passes but "bwd", which is no function of the same arrays."""

    def forward(x: Array, scale: Array, bias: Array, *rest: Array) -> tuple[Array, ...]:
        *residual, mean, var = rest
        options: dict[str, Any] = {"activation": "relu"} if pass_ in ("fwd+bwd", "residual") else {}
        if residual:
            options["residual"] = residual[0]
        outs = norm(x, scale, bias, mean, var, training=pass_ != "infer", **options)
        return outs[:1] if pass_ == "infer" else outs

    count = {"fwd+bwd": 3, "residual": 4}.get(pass_, 0)
    return base.Job.of(base.there_and_back(forward, count) if count else forward, _argument_names(pass_), kernels)


_MODELS = tuple(
    BatchNormCase(name, 256, channels, (size, size), suite="models")
    for name, channels, size in (
        *(("r50.s1.64", 64, 56), ("r50.s2.128", 128, 28), ("r50.s3.256", 256, 14), ("r50.s4.512", 512, 7)),
        *(("mobilenet.112.32", 32, 112), ("mobilenet.112.96", 96, 112), ("mobilenet.56.144", 144, 56)),
        *(("mobilenet.28.192", 192, 28), ("mobilenet.14.384", 384, 14), ("mobilenet.7.960", 960, 7)),
    )
)
CASES = (
    BatchNormCase("seed", 64, 128, (56, 56)),
    BatchNormCase("r50.stem", 256, 64, (112, 112)),
    BatchNormCase("r50.s1", 256, 256, (56, 56)),
    BatchNormCase("r50.s2", 256, 512, (28, 28)),
    BatchNormCase("r50.s3", 256, 1024, (14, 14)),
    BatchNormCase("r50.s4", 256, 2048, (7, 7)),
    BatchNormCase("small", 32, 64, (28, 28)),
    BatchNormCase("few.16", 8, 256, (16, 16)),
    BatchNormCase("few.8", 8, 512, (8, 8)),
    BatchNormCase("wide.64", 64, 64, (64, 64)),
    BatchNormCase("wide.90", 64, 256, (90, 90)),
    BatchNormCase("wide.45", 64, 512, (45, 45)),
    *_MODELS,
    BatchNormCase("cpu.bn", 8, 64, (56, 56), suite="cpu"),
)

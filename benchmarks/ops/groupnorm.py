"""Group-norms with silu behind them."""

from __future__ import annotations

import dataclasses
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
from jaxconv._problem import GroupNormProblem

_NAMES = ("x", "scale", "bias")


@dataclasses.dataclass(frozen=True)
class GroupNormCase(base.ImagesCase):
    """A group-norm with silu behind it, channels last."""

    groups: int = 32
    suite: str = "core"

    op = "groupnorm"
    results: ClassVar = {"fwd": ("y",), "fwd+bwd": ("y", "dx", "dscale", "dbias")}
    algorithms = tuple(a for a in _problem.GROUPNORM_ALGORITHMS if a != "rows")
    layouts = ("NHWC",)
    measured: ClassVar = {"fwd+bwd": ("groupnorm",)}
    call_problem = GroupNormProblem

    activation = "silu"

    @property
    def reduced(self) -> int:
        """Elements of an image's group."""
        return math.prod(self.spatial) * self.channels // self.groups

    def work(self, pass_: str, item: int) -> tuple[float, float]:
        return 0.0, item * {"fwd": 2, "fwd+bwd": 5}[pass_] * self.elements

    def small(self) -> Self:
        return self.shrunk(2 * self.groups)

    def __str__(self) -> str:
        return f"{super().__str__()} G={self.groups}"

    def arrays(self, setting: base.Setting, key: Array) -> base.Arrays:
        normal = base.Normal(setting, key)
        return self.images(setting, normal) | normal.parameters(self.channels)

    def job(self, pass_: str, norm: Callable[..., Array]) -> base.Job:
        return base.layer_job(pass_, lambda *a: (norm(*a),), _NAMES, ("groupnorm", "groupnorm_backward"))

    def ours(self, pass_: str, setting: base.Setting, **choice: Any) -> base.Job:
        options = dict(groups=self.groups, epsilon=base.EPSILON, activation=self.activation, **choice)
        return self.job(pass_, lambda *a: jaxconv.groupnorm(*a, **options))

    def xla(self, pass_: str, setting: base.Setting) -> base.Job:
        def norm(x: Array, scale: Array, bias: Array) -> Array:
            # Flax's GroupNorm with its default use_fast_variance, and silu of its result
            width, inner = self.channels // self.groups, tuple(range(1, x.ndim - 1))
            x_f32 = x.reshape(*x.shape[:-1], self.groups, width).astype(jnp.float32)
            mean, square = (jnp.mean(a, (*inner, x.ndim)) for a in (x_f32, lax.square(x_f32)))
            var = jnp.maximum(0.0, square - lax.square(mean))
            mean, var = (jnp.expand_dims(jnp.repeat(a, width, -1), inner) for a in (mean, var))
            y = (x - mean) * (lax.rsqrt(var + base.EPSILON) * scale) + bias
            return jax.nn.silu(y.astype(x.dtype))

        return self.job(pass_, norm).plain

    def torch(self, pass_: str, setting: base.Setting) -> base.Job:
        import torch

        functional = torch.nn.functional
        to_first, to_last = torch_contender.image_orders(len(self.spatial), channels_last=True)

        def norm(x: Any, scale: Any, bias: Any) -> Any:
            return functional.silu(
                functional.group_norm(x, self.groups, scale.to(x.dtype), bias.to(x.dtype), base.EPSILON)
            )

        def permuted(order: tuple[int, ...]) -> Callable[[Any], Any]:
            return lambda t: t.permute(order) if t.ndim > 1 else t

        return torch_contender.layer_job(pass_, norm, _NAMES, (permuted(to_first), permuted(to_last)))

    @base.exact
    def reference(self, pass_: str, channels_last: bool, a: base.Arrays, y: Array) -> base.Reference:
        x, scale = base.wide(a["x"]), base.wide(a["scale"])
        centred = x - self.mean(x)
        rstd = 1 / jnp.sqrt(self.mean(centred**2) + base.EPSILON)
        xhat = centred * rstd
        value, slope = base.activated(self.activation, xhat * scale + base.wide(a["bias"]))
        results: base.Reference = {"y": (value, None)}
        if pass_ == "fwd+bwd":
            dz = base.wide(a["dy"]) * slope
            g, images = scale * dz, tuple(range(x.ndim - 1))
            results["dx"] = rstd * (g - self.mean(g) - xhat * self.mean(g * xhat)), None
            results |= {"dscale": (jnp.sum(dz * xhat, images), None), "dbias": (jnp.sum(dz, images), None)}
        return results

    def mean(self, v: Array) -> Array:
        """Of each image's groups, for each element."""
        grouped = v.reshape(self.batch, -1, self.groups, self.channels // self.groups)
        return jnp.broadcast_to(jnp.mean(grouped, (1, 3), keepdims=True), grouped.shape).reshape(v.shape)

    def tolerance(self, pass_: str, result: str, rounding: base.Rounding) -> float:
        # Float32 sums over a group or row, of its gradient over all images; y is rounded before silu and behind it.
        image = result in ("y", "dx")
        sums = rounding.sums(self.reduced if image else self.elements // self.channels)
        return 2 * (3 * rounding.u + sums if image else sums + (rounding.u if pass_ == "fwd+bwd" else 0))


# Of diffusion models: DDPM's U-Net of 128 channels, Stable Diffusion's and its autoencoder's.
CASES = (
    GroupNormCase("ddpm.64", 64, 128, (64, 64)),
    GroupNormCase("ddpm.32", 64, 256, (32, 32)),
    GroupNormCase("ddpm.16", 64, 256, (16, 16)),
    GroupNormCase("ddpm.8", 64, 512, (8, 8)),
    GroupNormCase("sd.64", 8, 320, (64, 64)),
    GroupNormCase("sd.32", 8, 640, (32, 32)),
    GroupNormCase("vae.256", 2, 256, (256, 256)),
    GroupNormCase("vae.128", 16, 128, (128, 128)),
    GroupNormCase("vae.16", 16, 512, (16, 16)),
    GroupNormCase("unet.256", 8, 32, (256, 256), groups=8),
    GroupNormCase("unet.128", 8, 64, (128, 128), groups=8),
    GroupNormCase("tower.128", 64, 32, (128, 128), groups=8),
    GroupNormCase("instance.256", 12, 32, (256, 256), groups=32),
    GroupNormCase("instance.16", 12, 512, (16, 16), groups=512),
    GroupNormCase("cpu.gn", 4, 128, (32, 32), suite="cpu"),
)

"""Average-poolings."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

import jaxconv
from benchmarks import torch_contender
from benchmarks.ops import base, pool
from jaxconv._problem import AvgPoolProblem


@dataclasses.dataclass(frozen=True)
class AvgPoolCase(pool.PoolCase):
    """Average-pooling."""

    count_include_pad: bool = True

    op = "avg_pool"
    # Linear: a gradient runs the backward kernel alone.
    results: ClassVar = {"fwd": ("y",), "bwd": ("dx",)}
    measured: ClassVar = {"fwd": ("avg_pool",), "bwd": ("avg_pool_backward",)}
    call_problem = AvgPoolProblem

    def work(self, pass_: str, item: int) -> tuple[float, float]:
        return 0.0, item * self.elements

    def ours(self, pass_: str, setting: base.Setting, **choice: Any) -> base.Job:
        nd = len(self.spatial)
        options = dict(stride=self.stride, padding=(self.padding,) * nd, count_include_pad=self.count_include_pad)
        options["layout"] = base.layout_name(nd, setting.channels_last)
        return self._job(pass_, setting, functools.partial(jaxconv.avg_pool, window=self.window, **options, **choice))

    def xla(self, pass_: str, setting: base.Setting) -> base.Job:
        nd = len(self.spatial)
        window, stride = (self.window,) * nd, (self.stride,) * nd

        def of_flax(x: Array) -> Array:
            x = x if setting.channels_last else jnp.moveaxis(x, 1, -1)
            # Of 16 bits Flax makes float32 where padding is not counted.
            y = nn.avg_pool(x, window, stride, [self.padding] * nd, self.count_include_pad).astype(x.dtype)
            return y if setting.channels_last else jnp.moveaxis(y, -1, 1)

        return self._job(pass_, setting, of_flax).plain

    def _job(self, pass_: str, setting: base.Setting, f: Callable[[Array], Array]) -> base.Job:
        if pass_ == "fwd":
            return base.Job.of(lambda x: (f(x),), ("x",), ("avg_pool",))
        x = self.x_shape(setting.channels_last)

        def back(dy: Array) -> Any:
            return jax.linear_transpose(f, jax.ShapeDtypeStruct(x, dy.dtype))(dy)

        return base.Job.of(back, ("dy",), ("avg_pool_backward",))

    def torch(self, pass_: str, setting: base.Setting) -> base.Job:
        import torch

        nd, (low, high) = len(self.spatial), self.padding
        if low != high or pass_ != "fwd":
            raise ValueError("PyTorch pads both sides alike, and runs no backward pass without its forward pass")
        average = getattr(torch.nn.functional, f"avg_pool{nd}d")
        options = {} if nd == 1 else {"count_include_pad": self.count_include_pad}
        to_first, to_last = torch_contender.image_orders(nd, setting.channels_last)
        views = (lambda t: t.permute(to_first)), (lambda t: t.permute(to_last))
        layer = functools.partial(average, kernel_size=self.window, stride=self.stride, padding=low, **options)
        return torch_contender.layer_job(pass_, layer, ("x",), views)

    @base.exact
    def reference(self, pass_: str, channels_last: bool, a: base.Arrays, y: Array) -> base.Reference:
        """Taps are strided slices of the padded x, or of dx."""
        nd, (low, high) = len(self.spatial), self.padding
        pads = [(0, 0), *[self.padding] * nd, (0, 0)]

        def last(name: str) -> Array:
            return base.wide(a[name] if channels_last else jnp.moveaxis(a[name], 1, -1))

        def taps() -> Any:
            for tap in itertools.product(range(self.window), repeat=nd):
                steps = zip(tap, self.out_spatial, strict=True)
                yield (slice(None), *(slice(t, t + (o - 1) * self.stride + 1, self.stride) for t, o in steps))

        ones = jnp.pad(jnp.ones((1, *self.spatial, 1)), pads, constant_values=float(self.count_include_pad))
        count = sum(ones[at] for at in taps())
        if pass_ == "fwd":
            padded = jnp.pad(last("x"), pads)
            found = sum(padded[at] for at in taps()) / count
        else:
            dx = jnp.zeros((self.batch, *(size + low + high for size in self.spatial), self.channels))
            for at in taps():
                dx = dx.at[at].add(last("dy") / count)
            found = dx[:, *(slice(low, low + size) for size in self.spatial)]
        return {self.results[pass_][0]: (found if channels_last else jnp.moveaxis(found, -1, 1), None)}

    def tolerance(self, pass_: str, result: str, rounding: base.Rounding) -> float:
        # XLA may add up a window's taps, or a pixel's windows, in its type, one by one.
        windows = self.window if pass_ == "fwd" else -(-self.window // self.stride)
        return 2 * rounding.u * (1 + windows ** len(self.spatial))

    @classmethod
    def call_bytes(cls, op: str, problem: Any, item: int) -> float:
        # x and y, there or back
        return item * (math.prod(problem.x_shape) + math.prod(problem.y_shape))


CASES = (
    AvgPoolCase("densenet.56", 256, 128, (56, 56), 2, 2, (0, 0)),
    AvgPoolCase("densenet.28", 256, 256, (28, 28), 2, 2, (0, 0)),
    AvgPoolCase("densenet.14", 256, 512, (14, 14), 2, 2, (0, 0)),
    AvgPoolCase("inception.3x3", 64, 288, (35, 35), 3, 1, (1, 1), count_include_pad=False),
    AvgPoolCase("unet3d.2x2x2", 8, 32, (64, 64, 64), 2, 2, (0, 0)),
    AvgPoolCase("cpu.avg_pool", 8, 64, (112, 112), 2, 2, (0, 0), suite="cpu"),
)

"""Max-poolings."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax.numpy as jnp
from jax import Array, lax

import jaxconv
from benchmarks import torch_contender
from benchmarks.ops import base
from jaxconv import _problem
from jaxconv._problem import PoolProblem


@dataclasses.dataclass(frozen=True)
class PoolCase(base.ImagesCase):
    """Max-pooling."""

    window: int  # along each axis
    stride: int
    padding: tuple[int, int]  # (low, high)
    suite: str = "core"

    op = "pool"
    results: ClassVar = {"fwd": ("y",), "fwd+bwd": ("y", "dx")}
    algorithms = _problem.POOL_ALGORITHMS
    measured: ClassVar = {"fwd": ("max_pool",), "fwd+bwd": ("max_pool",)}
    call_problem = PoolProblem

    @property
    def out_spatial(self) -> tuple[int, ...]:
        return tuple((size + sum(self.padding) - self.window) // self.stride + 1 for size in self.spatial)

    def y_shape(self, channels_last: bool = True) -> tuple[int, ...]:
        return base.images(self.batch, self.out_spatial, self.channels, channels_last)

    @property
    def elements(self) -> int:
        """Of x and y together."""
        return math.prod(self.x_shape()) + math.prod(self.y_shape())

    @property
    def set_elements(self) -> int:
        return self.elements

    def work(self, pass_: str, item: int) -> tuple[float, float]:
        # Between the two passes a byte for each element of y.
        back = item * self.elements + 2 * math.prod(self.y_shape()) if pass_ == "fwd+bwd" else 0
        return 0.0, item * self.elements + back

    def small(self) -> Self:
        spatial = tuple(min(size, 12 + size % 2) for size in self.spatial)
        return dataclasses.replace(self, batch=2, channels=min(self.channels, 24), spatial=spatial)

    def __str__(self) -> str:
        text = f"{super().__str__()} {base.times((self.window,) * len(self.spatial))}"
        return text + (f" s{self.stride}" if self.stride > 1 else "")

    def arrays(self, setting: base.Setting, key: Array) -> base.Arrays:
        normal, last = base.Normal(setting, key), setting.channels_last
        return {"x": normal(self.x_shape(last)), "dy": normal(self.y_shape(last))}

    def ours(self, pass_: str, setting: base.Setting, **choice: Any) -> base.Job:
        nd = len(self.spatial)
        options = dict(stride=self.stride, padding=(self.padding,) * nd, **choice)
        options["layout"] = base.layout_name(nd, setting.channels_last)
        return _job(pass_, lambda x: jaxconv.max_pool(x, self.window, **options))

    def xla(self, pass_: str, setting: base.Setting) -> base.Job:
        nd = len(self.spatial)

        def each(value: Any, other: Any) -> tuple[Any, ...]:
            return (other, *(value,) * nd, other) if setting.channels_last else (other, other, *(value,) * nd)

        sizes = each(self.window, 1), each(self.stride, 1), each(self.padding, (0, 0))
        return _job(pass_, lambda x: lax.reduce_window(x, -jnp.inf, lax.max, *sizes)).plain

    def torch(self, pass_: str, setting: base.Setting) -> base.Job:
        import torch

        nd, (low, high) = len(self.spatial), self.padding
        if low != high:
            raise ValueError("PyTorch pads both sides alike")
        pool = getattr(torch.nn.functional, f"max_pool{nd}d")
        to_first, to_last = torch_contender.image_orders(nd, setting.channels_last)
        views = (lambda t: t.permute(to_first)), (lambda t: t.permute(to_last))
        return torch_contender.layer_job(pass_, lambda x: pool(x, self.window, self.stride, low), ("x",), views)

    @base.exact
    def reference(self, pass_: str, channels_last: bool, a: base.Arrays, y: Array) -> base.Reference:
        """Taps are strided slices of the padded x, taken in order; dx gathers them back, each dy once."""
        nd = len(self.spatial)

        def last(v: Array) -> Array:
            return v if channels_last else jnp.moveaxis(v, 1, -1)

        def back(v: Array) -> Array:
            return v if channels_last else jnp.moveaxis(v, -1, 1)

        pads = [(0, 0), *[self.padding] * nd, (0, 0)]
        padded = jnp.pad(base.wide(last(a["x"])), pads, constant_values=-jnp.inf)
        dy = base.wide(last(a["dy"]))

        def at(tap: tuple[int, ...]) -> tuple[slice, ...]:
            steps = [
                slice(t, t + (o - 1) * self.stride + 1, self.stride) for t, o in zip(tap, self.out_spatial, strict=True)
            ]
            return (slice(None), *steps)

        taps = list(itertools.product(range(self.window), repeat=nd))
        largest = functools.reduce(jnp.maximum, (padded[at(tap)] for tap in taps))
        left, dx = jnp.ones(largest.shape, bool), jnp.zeros(padded.shape)
        for tap in taps:
            here = left & (padded[at(tap)] == largest)
            left &= ~here
            dx = dx.at[at(tap)].add(jnp.where(here, dy, 0))
        inside = tuple(slice(low, low + size) for (low, _), size in zip(pads[1:-1], self.spatial, strict=True))
        return {"y": (back(largest), None), "dx": (back(dx[:, *inside]), None)}

    def tolerance(self, pass_: str, result: str, rounding: base.Rounding) -> float:
        # y is exact (any tolerance above 0 says so); of dx XLA may add up a pixel's windows in its type, one by one.
        windows = math.prod((-(-self.window // self.stride),) * len(self.spatial))
        return rounding.u32 if result == "y" else 2 * rounding.u * windows

    @classmethod
    def call_bytes(cls, op: str, problem: Any, item: int) -> float:
        # x and y, there or back, and of a step that goes back a byte for each maximum's position
        x, y = math.prod(problem.x_shape), math.prod(problem.y_shape)
        return item * (x + y) + problem.save * y


def _job(pass_: str, pool: Callable[[Array], Array]) -> base.Job:
    return base.layer_job(pass_, lambda x: (pool(x),), ("x",), ("max_pool", "max_pool_backward"))


CASES = (
    PoolCase("r50.stem", 256, 64, (112, 112), 3, 2, (0, 1)),
    PoolCase("inception.3x3", 64, 192, (56, 56), 3, 1, (1, 1)),
    PoolCase("vgg.2x2s2", 32, 128, (112, 112), 2, 2, (0, 0)),
    PoolCase("unet3d.2x2x2", 8, 32, (64, 64, 64), 2, 2, (0, 0)),
    PoolCase("spp.5x5", 64, 256, (20, 20), 5, 1, (2, 2)),
    PoolCase("cpu.pool", 8, 64, (112, 112), 3, 2, (0, 1), suite="cpu"),
)

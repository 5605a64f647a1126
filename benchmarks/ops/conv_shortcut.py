"""The last convolution of a residual block and a 1x1 shortcut: both, a bias and a relu of their sum."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax
from jax import Array

from benchmarks.ops import base
from benchmarks.ops.conv import ConvCase, problem_of
from benchmarks.ops.conv_cases import conv
from jaxconv import _plan
from jaxconv._ops import conv_shortcut
from jaxconv._problem import ShortcutConvProblem


@dataclasses.dataclass(frozen=True)
class ConvShortcutCase(ConvCase):
    """y = relu(conv(x, w) + b + conv(x2, w2)), x2 of `far` channels, w2 of one tap, whose stride is `step`."""

    far: int = 0
    step: int = 1

    op = "conv_shortcut"
    without_torch = "no kernel of PyTorch's joins two convolutions"
    results: ClassVar = {"fprop": ("y",)}
    algorithms = ("sm90", "two")

    @functools.cached_property
    def shortcut(self) -> ConvCase:
        spatial = tuple(self.step * extent for extent in self.out_spatial)
        return conv(self.name, self.batch, spatial, self.far, self.out_channels, 1, stride=self.step)

    def small(self) -> Self:
        return dataclasses.replace(super().small(), far=min(self.far, 24))

    def work(self, pass_: str, item: int) -> tuple[float, float]:
        """y is written once."""
        (flops, bytes_), (more, read) = super().work(pass_, item), self.shortcut.work(pass_, item)
        return flops + more, bytes_ + read - item * math.prod(self.y_shape())

    def terms(self, pass_: str) -> int:
        return super().terms(pass_) + self.far

    def arrays(self, setting: base.Setting, key: Array) -> base.Arrays:
        normal, last = base.Normal(setting, key), setting.channels_last
        own = self.operands(setting, normal) | {"b": normal((self.out_channels,))}
        x2, w2 = self.shortcut.x_shape(last), self.shortcut.w_shape(last)
        return own | {"x2": normal(x2), "w2": normal(w2, self.terms("fprop") ** -0.5)}

    def ours(self, pass_: str, setting: base.Setting, **choice: Any) -> base.Job:
        """The algorithm "two" is two convolutions, each by a plan of its own."""
        two = choice.get("algorithm") == "two"
        p = dataclasses.replace(problem_of(self, setting, activation="relu"), bias=True)
        both = ShortcutConvProblem.of(p, problem_of(self.shortcut, setting))
        both = both if two else dataclasses.replace(both, **choice)

        def f(x: Array, w: Array, b: Array, x2: Array, w2: Array) -> Array:
            if two:
                return conv_shortcut.kernel.reference(both, x, w, b, x2, w2)[0]
            plan = _plan.plan("conv_shortcut", both, _plan.Device.default())
            if any(choice.values()) and plan.implementation != "native":
                raise ValueError(plan.reason)
            return conv_shortcut.kernel(both, x, w, b, x2, w2)

        return _job(f, ("conv_fprop", "conv_add") if two else ("conv_shortcut",))

    def xla(self, pass_: str, setting: base.Setting) -> base.Job:
        own, far, last = self.lax_conv(setting), self.shortcut.lax_conv(setting), setting.channels_last

        def f(x: Array, w: Array, b: Array, x2: Array, w2: Array) -> Array:
            return jax.nn.relu(own(x, w) + (b if last else b[:, None, None]) + far(x2, w2))

        return _job(f).plain

    def reference(self, pass_: str, channels_last: bool, a: base.Arrays, y: Array) -> base.Reference:
        b = a["b"].astype("float64")
        exact = self.exact(pass_, channels_last, a) + (b if channels_last else b[:, None, None])
        far = self.shortcut.exact(pass_, channels_last, {"x": a["x2"], "w": a["w2"]})
        return {"y": (jax.nn.relu(exact + far), None)}

    def tolerance(self, pass_: str, result: str, rounding: base.Rounding) -> float:
        """Two calls round the shortcut's result too."""
        return super().tolerance(pass_, result, rounding) + 4 * rounding.u

    def kernel(self, pass_: str, setting: base.Setting) -> tuple[str, Any] | None:
        return None  # its plan asks for no times of its own


def _job(f: Callable[..., Array], kernels: tuple[str, ...] = ()) -> base.Job:
    job = base.Job.of(f, ("x", "w", "b", "x2", "w2"), kernels)
    return dataclasses.replace(job, outputs=lambda y: (y,))


# A ResNet-50's four at several batches, and those of a ResNet-18, whose own filter is 3x3.
CASES = tuple(
    ConvShortcutCase.of(conv(f"{name}.{batch}", batch, *extents, padding=pad, suite="models"), far=far, step=step)
    for batch in (256, 32, 8, 1)
    for name, extents, pad, far, step in (
        ("r50.s1", (56, 64, 256, 1), 0, 64, 1),
        ("r50.s2", (28, 128, 512, 1), 0, 256, 2),
        ("r50.s3", (14, 256, 1024, 1), 0, 512, 2),
        ("r50.s4", (7, 512, 2048, 1), 0, 1024, 2),
        ("r18.s2", (28, 128, 128, 3), 1, 64, 2),
        ("r18.s4", (7, 512, 512, 3), 1, 256, 2),
    )
)

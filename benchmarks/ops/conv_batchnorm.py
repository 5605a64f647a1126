"""A convolution, and a batch-norm with ReLU of its result."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

import jaxconv
from benchmarks.ops import base, batchnorm
from benchmarks.ops.conv import ConvCase
from benchmarks.ops.conv_cases import MODELS, conv


class ConvBatchNormCase(ConvCase):
    op = "conv_batchnorm"
    without_torch = "PyTorch has no such pair"
    results: ClassVar = {"fwd": ("y", "new_mean", "new_var"), "infer": ("y",)}
    algorithms = ("sm90", "grouped", "two")

    @property
    def reduced(self) -> int:
        """Elements per channel of the result."""
        return self.batch * math.prod(self.out_spatial)

    def work(self, pass_: str, item: int) -> tuple[float, float]:
        # In training the result is written before its statistics are known, and read once; in inference it never is.
        again = 2 * math.prod(self.y_shape()) if pass_ == "fwd" else 0
        return self.flops, item * (self.elements + again)

    def arrays(self, setting: base.Setting, key: Array) -> base.Arrays:
        normal = base.Normal(setting, key)
        return self.operands(setting, normal) | normal.parameters(self.out_channels)

    def ours(self, pass_: str, setting: base.Setting, **choice: Any) -> base.Job:
        """The algorithm "two" is what a user writes without `conv_batchnorm`."""
        last = setting.channels_last
        window = self.options | dict(layout=self.layout(last), precision=setting.precision)
        norm = dict(training=pass_ == "fwd", momentum=base.MOMENTUM, epsilon=base.EPSILON, activation="relu")

        def pair(x: Array, w: Array, *v: Array) -> tuple[Array, ...]:
            outs = jaxconv.conv_batchnorm(x, w, *v, **window, **norm, **choice)
            return outs if pass_ == "fwd" else outs[:1]

        def two(x: Array, w: Array, *v: Array) -> tuple[Array, ...]:
            z = self.function(x, w, **window)
            outs = jaxconv.batchnorm(z, *v, channel_axis=-1 if last else 1, **norm)
            return outs if pass_ == "fwd" else outs[:1]

        kernels = ("conv", "conv_fprop", "conv_statistics", "batchnorm_train", "batchnorm_infer")
        return base.Job.of(two if choice.get("algorithm") == "two" else pair, _NAMES, kernels)

    def xla(self, pass_: str, setting: base.Setting) -> base.Job:
        conv = jax.jit(self.lax_conv(setting))
        norm = self.norm.xla(pass_, setting).f

        def pair(x: Array, w: Array, *v: Array) -> tuple[Array, ...]:
            y, *statistics = norm(conv(x, w), *v)
            return jax.nn.relu(y), *statistics

        return base.Job.of(pair, _NAMES).plain

    @property
    def norm(self) -> batchnorm.BatchNormCase:
        return batchnorm.BatchNormCase("", self.batch, self.out_channels, self.out_spatial)

    def reference(self, pass_: str, channels_last: bool, a: base.Arrays, y: Array) -> base.Reference:
        z = self.exact("fprop", channels_last, a)
        results = self.norm.reference(pass_, channels_last, {**a, "x": z}, y)
        return {**results, "y": (jnp.maximum(results["y"][0], 0), None)}

    def tolerance(self, pass_: str, result: str, rounding: base.Rounding) -> float:
        # z is rounded once, or filters and offset are; y is rounded; then as a batch-norm. Statistics are of rounded z.
        return 2 * (3 * rounding.u + rounding.product(self.terms("fprop")) + rounding.sums(self.reduced))

    def kernel(self, pass_: str, setting: base.Setting) -> tuple[str, Any] | None:
        plain = self.conv.kernel("fprop", setting) if pass_ == "fwd" else None
        return plain and ("conv_statistics", plain[1])


_NAMES = ("x", "w", "scale", "bias", "mean", "var")

# ResNet-50's pairs, and ResNeXt-50's that are no like of those. No kernel takes statistics of 32 channels a group.
CASES = tuple(
    ConvBatchNormCase.of(case)
    for case in (
        conv("r50.s1.1x1c", 256, 56, 256, 64, 1),
        conv("r50.s1.3x3", 256, 56, 64, 64, 3, padding=1),
        conv("r50.s1.1x1b", 256, 56, 64, 256, 1),
        conv("r50.s2.3x3s2", 256, 56, 128, 128, 3, stride=2, padding=1),
        conv("r50.s2.3x3", 256, 28, 128, 128, 3, padding=1),
        conv("r50.s2.1x1b", 256, 28, 128, 512, 1),
        conv("r50.s3.3x3", 256, 14, 256, 256, 3, padding=1),
        conv("r50.s3.1x1b", 256, 14, 256, 1024, 1),
        conv("r50.s4.3x3", 256, 7, 512, 512, 3, padding=1),
        conv("r50.s4.1x1b", 256, 7, 512, 2048, 1),
        # None of those above is near enough for a plan.
        conv("r50.s1.1x1a", 256, 56, 64, 64, 1, suite="models"),
        conv("r50.s2.1x1c", 256, 28, 512, 128, 1, suite="models"),
        conv("r50.s2.down1x1s2", 256, 56, 256, 512, 1, stride=2, suite="models"),
        conv("r50.s3.1x1a", 256, 28, 512, 256, 1, suite="models"),
        conv("r50.s3.3x3s2", 256, 28, 256, 256, 3, stride=2, padding=(0, 1), suite="models"),
        conv("r50.s3.1x1c", 256, 14, 1024, 256, 1, suite="models"),
        conv("r50.s3.down1x1s2", 256, 28, 512, 1024, 1, stride=2, suite="models"),
        conv("r50.s4.1x1a", 256, 14, 1024, 512, 1, suite="models"),
        conv("r50.s4.3x3s2", 256, 14, 512, 512, 3, stride=2, padding=(0, 1), suite="models"),
        conv("r50.s4.1x1c", 256, 7, 2048, 512, 1, suite="models"),
        conv("r50.s4.down1x1s2", 256, 14, 1024, 2048, 1, stride=2, suite="models"),
        # Batch-norms that stay in no cache, and images of 32x32.
        conv("board19.3x3", 2048, 19, 128, 128, 3, padding=1, suite="models"),
        conv("vgg.3x3", 32, 112, 128, 128, 3, padding=1, suite="models"),
        conv("r18.32.3x3", 256, 32, 64, 64, 3, padding=1, suite="models"),
        conv("r18.16.3x3", 256, 16, 128, 128, 3, padding=1, suite="models"),
        *(case for case in MODELS if case.name.startswith("x50.") and case.in_channels != 32 * case.groups),
    )
)

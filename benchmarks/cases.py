"""The problems that are measured and tested, by name. Only the standard library: tests import this too.

Extents are written channels last; a row's layout is chosen when it is run. `small()` is the same problem shrunk for
CPUs and tests: it keeps stride, padding, dilation, the filter, the number of channels per group and whether extents
are odd.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from typing import Any, TypeVar

Pair = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class ConvCase:
    """A convolution, or with `transposed` a transposed one with lax.conv_transpose's SAME padding."""

    name: str
    batch: int  # N
    spatial: tuple[int, ...]  # of x
    in_channels: int  # C, all groups
    out_channels: int  # K, all groups
    filter: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[Pair, ...]  # (low, high); unused where transposed
    dilation: tuple[int, ...]
    groups: int = 1
    transposed: bool = False
    suite: str = "core"
    thread: str = ""  # where somebody asked for it: "owner/name#number"

    op = "conv"
    passes = ("fprop", "dgrad", "wgrad")

    @property
    def nd(self) -> int:
        return len(self.spatial)

    @property
    def out_spatial(self) -> tuple[int, ...]:
        if self.transposed:
            return tuple(size * s for size, s in zip(self.spatial, self.stride, strict=True))
        return tuple(
            (size + low + high - (f - 1) * d - 1) // s + 1
            for size, (low, high), f, d, s in zip(
                self.spatial, self.padding, self.filter, self.dilation, self.stride, strict=True
            )
        )

    @property
    def depthwise(self) -> bool:
        return self.groups == self.in_channels > 1

    def x_shape(self, channels_last: bool = True) -> tuple[int, ...]:
        return self._activation(self.in_channels, self.spatial, channels_last)

    def y_shape(self, channels_last: bool = True) -> tuple[int, ...]:
        return self._activation(self.out_channels, self.out_spatial, channels_last)

    def _activation(self, channels: int, spatial: tuple[int, ...], channels_last: bool) -> tuple[int, ...]:
        return (self.batch, *spatial, channels) if channels_last else (self.batch, channels, *spatial)

    def w_shape(self, channels_last: bool = True) -> tuple[int, ...]:
        c, k = self.in_channels // self.groups, self.out_channels
        return (*self.filter, c, k) if channels_last else (k, c, *self.filter)

    def layout(self, channels_last: bool = True) -> str:
        """The name of the layout: "NHWC", "NCW", ..."""
        s = "DHW"[3 - self.nd :]
        return f"N{s}C" if channels_last else f"NC{s}"

    def filter_layout(self, channels_last: bool = True) -> str:
        s = "DHW"[3 - self.nd :]
        return f"{s}IO" if channels_last else f"OI{s}"

    @property
    def flops(self) -> int:
        """Floating-point operations of each pass, those on padding included."""
        positions = self.spatial if self.transposed else self.out_spatial
        products = self.batch * self.out_channels * (self.in_channels // self.groups)
        return 2 * products * math.prod(self.filter) * math.prod(positions)

    @property
    def elements(self) -> int:
        """Of x, w and y together: each pass reads two of them and writes the third."""
        return math.prod(self.x_shape()) + math.prod(self.w_shape()) + math.prod(self.y_shape())

    @property
    def read_elements(self) -> int:
        """Of x, by fprop and wgrad."""
        if self.transposed:
            return math.prod(self.x_shape())
        read = 1
        for size, out, f, s, d, (low, _) in zip(
            self.spatial, self.out_spatial, self.filter, self.stride, self.dilation, self.padding, strict=True
        ):
            read *= len({p * s - low + t * d for p in range(out) for t in range(f)} & set(range(size)))
        return self.batch * self.in_channels * read

    def terms(self, pass_: str) -> int:
        """Products summed into one element of the result."""
        taps, g = math.prod(self.filter), self.groups
        if pass_ == "wgrad":
            return self.batch * math.prod(self.spatial if self.transposed else self.out_spatial)
        return taps * (self.in_channels if pass_ == "fprop" else self.out_channels) // g

    def work(self, pass_: str, item: int) -> tuple[float, float]:
        """(operations, bytes, of `item` an element): each input is read once, each result written once."""
        # Strides longer than the filter pass over pixels of x, which dgrad still has to write.
        unread = 0 if pass_ == "dgrad" else math.prod(self.x_shape()) - self.read_elements
        return self.flops, item * (self.elements - unread)

    def small(self) -> ConvCase:
        spatial = tuple(
            _small_extent(size, f, s, d, self.nd, last=axis == self.nd - 1)
            for axis, (size, f, s, d) in enumerate(
                zip(self.spatial, self.filter, self.stride, self.dilation, strict=True)
            )
        )
        g, c, k = self.groups, self.in_channels // self.groups, self.out_channels // self.groups
        if g == 1:  # C < K, C == K and C > K stay so
            c, k = min(c, 24), min(k, 16 if k < c else 24 if k == c else 40)
        g = min(g, 8 if self.depthwise else 4)
        return dataclasses.replace(
            self, batch=min(self.batch, 2), spatial=spatial, in_channels=g * c, out_channels=g * k, groups=g
        )

    def __str__(self) -> str:
        text = f"{self.batch}x{_times(self.spatial)} {self.in_channels}->{self.out_channels} {_times(self.filter)}"
        text += f" s{self.stride[0]}" if max(self.stride) > 1 else ""
        text += f" d{self.dilation[0]}" if max(self.dilation) > 1 else ""
        text += f" g{self.groups}" if self.groups > 1 else ""
        return text + (" transposed" if self.transposed else "")


@dataclasses.dataclass(frozen=True)
class BatchNormCase:
    name: str
    batch: int
    channels: int
    spatial: tuple[int, ...]
    suite: str = "core"

    op = "batchnorm"
    # fwd: training. infer: running statistics. bwd: the gradient of fwd alone. fwd+bwd: with a ReLU, as in training.
    # residual: fwd+bwd with a residual added before the ReLU.
    passes = ("fwd", "infer", "bwd", "fwd+bwd", "residual")

    def x_shape(self, channels_last: bool = True) -> tuple[int, ...]:
        return (
            (self.batch, *self.spatial, self.channels) if channels_last else (self.batch, self.channels, *self.spatial)
        )

    def layout(self, channels_last: bool = True) -> str:
        return "NHWC" if channels_last else "NCHW"

    @property
    def elements(self) -> int:
        """Of x: one pass over the tensor."""
        return self.batch * self.channels * math.prod(self.spatial)

    @property
    def reduced(self) -> int:
        """Elements per channel."""
        return self.batch * math.prod(self.spatial)

    def work(self, pass_: str, item: int) -> tuple[float, float]:
        passes = {"fwd": 2, "infer": 2, "bwd": 3, "fwd+bwd": 5, "residual": 8}[pass_]
        return 0.0, item * passes * self.elements

    def small(self) -> BatchNormCase:
        spatial = tuple(min(size, 7) for size in self.spatial)
        return dataclasses.replace(self, batch=2, channels=min(self.channels, 24), spatial=spatial)

    def __str__(self) -> str:
        return f"{self.batch}x{_times(self.spatial)} C={self.channels}"


class ShortcutCase(BatchNormCase):
    """relu(batch-norm of x + batch-norm of r), r like x, there and back, by the statistics of both, which are known."""

    op = "batchnorm_shortcut"
    passes = ("fwd+bwd",)

    def work(self, pass_: str, item: int) -> tuple[float, float]:
        return 0.0, item * 8 * self.elements  # x, r to y; x, r, dy to dx, dr


@dataclasses.dataclass(frozen=True)
class GroupNormCase:
    """A group-norm with silu behind it, channels last."""

    name: str
    batch: int
    channels: int
    spatial: tuple[int, ...]
    groups: int = 32
    suite: str = "core"

    op = "groupnorm"
    passes = ("fwd", "fwd+bwd")

    def x_shape(self, channels_last: bool = True) -> tuple[int, ...]:
        return (self.batch, *self.spatial, self.channels)

    def layout(self, channels_last: bool = True) -> str:
        return "-"

    @property
    def elements(self) -> int:
        """Of x: one pass over the tensor."""
        return self.batch * self.channels * math.prod(self.spatial)

    @property
    def reduced(self) -> int:
        """Elements of an image's group."""
        return math.prod(self.spatial) * self.channels // self.groups

    def work(self, pass_: str, item: int) -> tuple[float, float]:
        return 0.0, item * {"fwd": 2, "fwd+bwd": 5}[pass_] * self.elements

    def small(self) -> GroupNormCase:
        spatial = tuple(min(size, 7) for size in self.spatial)
        return dataclasses.replace(self, batch=2, channels=2 * self.groups, spatial=spatial)

    def __str__(self) -> str:
        return f"{self.batch}x{_times(self.spatial)} C={self.channels} G={self.groups}"


@dataclasses.dataclass(frozen=True)
class LayerNormCase(GroupNormCase):
    """A layer-norm over the channels of each pixel, nothing behind it."""

    groups: int = 1

    op = "layernorm"

    @property
    def reduced(self) -> int:
        """Elements of a row."""
        return self.channels

    def small(self) -> LayerNormCase:
        spatial = tuple(min(size, 7) for size in self.spatial)
        return dataclasses.replace(self, batch=2, channels=min(self.channels, 96), spatial=spatial)

    def __str__(self) -> str:
        return f"{_times((self.batch, *self.spatial))} C={self.channels}"


@dataclasses.dataclass(frozen=True)
class SqueezeExciteCase:
    """A squeeze-and-excitation with silu, channels last; float32 parameters."""

    name: str
    batch: int
    channels: int
    spatial: tuple[int, ...]
    hidden: int
    suite: str = "core"

    op = "squeeze_excite"

    @property
    def passes(self) -> tuple[str, ...]:
        return ("fwd",) if self.suite == "serve" else ("fwd", "fwd+bwd")

    def x_shape(self, channels_last: bool = True) -> tuple[int, ...]:
        return (self.batch, *self.spatial, self.channels)

    def layout(self, channels_last: bool = True) -> str:
        return "-"

    @property
    def elements(self) -> int:
        """Of x: one pass over the tensor."""
        return self.batch * self.channels * math.prod(self.spatial)

    def work(self, pass_: str, item: int) -> tuple[float, float]:
        return 0.0, item * {"fwd": 2, "fwd+bwd": 5}[pass_] * self.elements

    def small(self) -> SqueezeExciteCase:
        spatial = tuple(min(size, 7) for size in self.spatial)
        channels, hidden = min(self.channels, 96), min(self.hidden, 12)
        return dataclasses.replace(self, batch=min(self.batch, 4), channels=channels, spatial=spatial, hidden=hidden)

    def __str__(self) -> str:
        return f"{self.batch}x{_times(self.spatial)} C={self.channels} R={self.hidden}"


@dataclasses.dataclass(frozen=True)
class ConvBatchNormCase(ConvCase):
    """A convolution, and a batch-norm with ReLU of its result."""

    op = "conv_batchnorm"
    passes = ("fwd", "infer")

    @property
    def reduced(self) -> int:
        """Elements per channel of the result."""
        return self.batch * math.prod(self.out_spatial)

    def work(self, pass_: str, item: int) -> tuple[float, float]:
        # In training the result is written before its statistics are known, and read once; in inference it never is.
        again = 2 * math.prod(self.y_shape()) if pass_ == "fwd" else 0
        return self.flops, item * (self.elements + again)


@dataclasses.dataclass(frozen=True)
class BatchNormConvCase(ConvCase):
    """A batch-norm of x by known statistics, its activation, and a convolution of the result, which nobody else needs.

    pair: y and dw, in training's order. bwd: every gradient, of a batch-norm in training whose statistics are known.
    """

    activation: str = "relu6"

    op = "batchnorm_conv"
    passes = ("fprop", "wgrad", "pair", "bwd")

    @property
    def conv(self) -> ConvCase:
        return ConvCase(**{field.name: getattr(self, field.name) for field in dataclasses.fields(ConvCase)})

    def work(self, pass_: str, item: int) -> tuple[float, float]:
        if pass_ == "pair":
            return 2 * self.flops, 2 * item * self.elements
        if pass_ == "bwd":
            # Sums over all of them stand between two readings of x and dy.
            return 3 * self.flops, item * (3 * math.prod(self.x_shape()) + 2 * math.prod(self.y_shape()))
        return super().work(pass_, item)

    def __str__(self) -> str:
        return f"{self.activation}, {super().__str__()}"


class DgradSumsCase(ConvCase):
    """dz = [y > 0] * (dgrad of dy + c), y and c like x, dbias = sum dz and dscale = sum dz * xhat.

    The sums are those of the batch-norm that made y of x and a residual. Whether y > 0 is given as bits. Channels last.
    """

    op = "conv_dgrad_sums"
    passes = ("dgrad",)

    @property
    def conv(self) -> ConvCase:
        return ConvCase(**dataclasses.asdict(self))

    @property
    def reduced(self) -> int:
        """Elements per channel of x."""
        return self.batch * math.prod(self.spatial)

    def work(self, pass_: str, item: int) -> tuple[float, float]:
        x = math.prod(self.x_shape())  # dy, w, c, x and a bit an element of x, to dz
        return self.flops, item * (self.elements + 2 * x) + x / 8


@dataclasses.dataclass(frozen=True)
class DenseCase:
    """y = activation(x @ w + b), (M, K) @ (K, N), b per column.

    dgrad: dx = dy @ w.T. wgrad: dw = x.T @ dy. These are products alone: one activation's case stands for all.
    saved: y, and what the activation was given, as where the gradient is taken.
    """

    name: str
    m: int
    k: int
    n: int
    activation: str  # "none", "relu", "gelu", "tanh"
    suite: str = "core"

    op = "dense"

    @property
    def passes(self) -> tuple[str, ...]:
        if self.suite == "models":  # its layers are trained, and their parts are all there is
            return ("fwd" if self.activation == "none" else "saved", "dgrad", "wgrad")
        return ("fwd", "dgrad", "wgrad", "fwd+bwd") if self.activation == "relu" else ("fwd", "fwd+bwd")

    def layout(self, channels_last: bool = True) -> str:
        return "-"

    @property
    def flops(self) -> int:
        """Of a product; forward is one, backward two more."""
        return 2 * self.m * self.k * self.n

    @property
    def elements(self) -> int:
        """Of x, w, b and y together."""
        return self.m * self.k + self.k * self.n + self.n + self.m * self.n

    def work(self, pass_: str, item: int) -> tuple[float, float]:
        if pass_ in ("fwd", "saved"):
            return self.flops, item * (self.elements + self.m * self.n * (pass_ == "saved"))
        if pass_ in ("dgrad", "wgrad"):
            return self.flops, item * (self.elements - self.n)
        return 3 * self.flops, item * 2 * self.elements  # x, w, b, dy read; y, dx, dw, db written

    def small(self) -> DenseCase:
        def shrink(extent: int) -> int:  # 64, or 40 where the extent is no multiple of 64
            return min(extent, 64 if extent % 64 == 0 else 40)

        m, k, n = shrink(self.m), shrink(self.k), shrink(self.n)
        return dataclasses.replace(self, m=max(m // (2 if self.m < self.k else 1), 1), k=k, n=n)

    def __str__(self) -> str:
        return f"{self.m}x{self.k}x{self.n} {self.activation}"


@dataclasses.dataclass(frozen=True)
class DenseGradientCase:
    """dz = (dy @ w.T) * activation'(z), (M, K) @ (K, N), and its sum over the rows: between two dense layers."""

    name: str
    m: int
    k: int
    n: int
    activation: str
    suite: str = "models"

    op = "dense_gradient"
    passes = ("dgrad",)

    def layout(self, channels_last: bool = True) -> str:
        return "-"

    @property
    def flops(self) -> int:
        return 2 * self.m * self.k * self.n

    @property
    def elements(self) -> int:
        """Of dy, w, z, dz and db together."""
        return self.m * self.k + self.k * self.n + 2 * self.m * self.n + self.n

    def work(self, pass_: str, item: int) -> tuple[float, float]:
        return self.flops, item * self.elements

    def small(self) -> DenseGradientCase:
        product = DenseCase("", self.m, self.k, self.n, self.activation).small()
        return dataclasses.replace(self, m=product.m, k=product.k, n=product.n)

    def __str__(self) -> str:
        return f"{self.m}x{self.k}x{self.n} {self.activation}"


@dataclasses.dataclass(frozen=True)
class PoolCase:
    """Max-pooling."""

    name: str
    batch: int
    channels: int
    spatial: tuple[int, ...]  # of x
    window: int  # along each axis
    stride: int
    padding: Pair  # (low, high)
    suite: str = "core"

    op = "pool"
    passes = ("fwd", "fwd+bwd")

    @property
    def out_spatial(self) -> tuple[int, ...]:
        return tuple((size + sum(self.padding) - self.window) // self.stride + 1 for size in self.spatial)

    def x_shape(self, channels_last: bool = True) -> tuple[int, ...]:
        return self._shape(self.spatial, channels_last)

    def y_shape(self, channels_last: bool = True) -> tuple[int, ...]:
        return self._shape(self.out_spatial, channels_last)

    def _shape(self, spatial: tuple[int, ...], channels_last: bool) -> tuple[int, ...]:
        return (self.batch, *spatial, self.channels) if channels_last else (self.batch, self.channels, *spatial)

    def layout(self, channels_last: bool = True) -> str:
        s = "DHW"[3 - len(self.spatial) :]
        return f"N{s}C" if channels_last else f"NC{s}"

    @property
    def elements(self) -> int:
        """Of x and y together."""
        return math.prod(self.x_shape()) + math.prod(self.y_shape())

    def work(self, pass_: str, item: int) -> tuple[float, float]:
        # Between the two passes a byte for each element of y.
        back = item * self.elements + 2 * math.prod(self.y_shape()) if pass_ == "fwd+bwd" else 0
        return 0.0, item * self.elements + back

    def small(self) -> PoolCase:
        spatial = tuple(min(size, 12 + size % 2) for size in self.spatial)
        return dataclasses.replace(self, batch=2, channels=min(self.channels, 24), spatial=spatial)

    def __str__(self) -> str:
        text = f"{self.batch}x{_times(self.spatial)} C={self.channels} {_times((self.window,) * len(self.spatial))}"
        return text + (f" s{self.stride}" if self.stride > 1 else "")


Case = ConvCase | BatchNormCase | GroupNormCase | DenseCase | DenseGradientCase | PoolCase | SqueezeExciteCase
T = TypeVar("T", ConvCase, BatchNormCase, GroupNormCase, DenseCase, DenseGradientCase, PoolCase, SqueezeExciteCase)


def _times(extents: tuple[int, ...]) -> str:
    return "x".join(map(str, extents))


def _small_extent(size: int, filter: int, stride: int, dilation: int, nd: int, last: bool) -> int:
    """A few windows' worth, odd where `size` is, a multiple of the stride where `size` is; the last axis is longer."""
    least = {1: 24, 2: 8, 3: 5}[nd]
    extent = max(least, (filter - 1) * dilation // 2 + 1)
    if filter == stride > 1:  # patches: two of them
        extent = 2 * stride
    if size % stride == 0:
        extent = -(-extent // stride) * stride
    if (extent - size) % 2:
        extent += stride if stride % 2 else 1
    if last and nd > 1:
        extent += 2 * stride
    return min(size, extent)


def _conv(
    name: str,
    batch: int,
    spatial: int | tuple[int, ...],
    in_channels: int,
    out_channels: int,
    filter: int,
    *,
    stride: int = 1,
    padding: int | Pair = 0,
    dilation: int = 1,
    groups: int = 1,
    nd: int = 2,
    transposed: bool = False,
    suite: str = "core",
    thread: str = "",
) -> ConvCase:
    return ConvCase(
        name=name,
        batch=batch,
        spatial=spatial if isinstance(spatial, tuple) else (spatial,) * nd,
        in_channels=in_channels,
        out_channels=out_channels,
        filter=(filter,) * nd,
        stride=(stride,) * nd,
        padding=(padding if isinstance(padding, tuple) else (padding, padding),) * nd,
        dilation=(dilation,) * nd,
        groups=groups,
        transposed=transposed,
        suite=suite,
        thread=thread,
    )


# "core": what common networks are made of. The geometric means are over this list.
_CORE = (
    _conv("r50.stem7x7s2", 256, 224, 3, 64, 7, stride=2, padding=3),
    _conv("r50.s1.1x1a", 256, 56, 64, 64, 1),
    _conv("r50.s1.3x3", 256, 56, 64, 64, 3, padding=1),
    _conv("r50.s1.1x1b", 256, 56, 64, 256, 1),
    _conv("r50.s2.3x3s2", 256, 56, 128, 128, 3, stride=2, padding=1),
    _conv("r50.s2.3x3", 256, 28, 128, 128, 3, padding=1),
    _conv("r50.s2.down1x1s2", 256, 56, 256, 512, 1, stride=2),
    _conv("r50.s3.3x3", 256, 14, 256, 256, 3, padding=1),
    _conv("r50.s3.1x1b", 256, 14, 256, 1024, 1),
    _conv("r50.s4.3x3", 256, 7, 512, 512, 3, padding=1),
    _conv("ck.bwd_data", 128, 71, 128, 256, 3, stride=2, padding=1),
    _conv("unet.3x3", 16, 64, 320, 320, 3, padding=1),
    _conv("vgg.3x3", 32, 112, 128, 128, 3, padding=1),
    _conv("deeplab.d2", 16, 65, 256, 256, 3, padding=2, dilation=2),
    _conv("convnext.dw7", 64, 56, 96, 96, 7, padding=3, groups=96),
    _conv("mobilenet.dw3", 128, 56, 144, 144, 3, padding=1, groups=144),
    _conv("resnext.g32", 128, 56, 128, 128, 3, padding=1, groups=32),
)

# "special": depthwise, grouped, small-channel, dilated, transposed, 1-D and 3-D convolutions.
_SPECIAL = (
    _conv("mobilenet.dw3s2", 128, 112, 96, 96, 3, stride=2, padding=(0, 1), groups=96, suite="special"),
    _conv("efficientnet.dw5", 128, 28, 240, 240, 5, padding=2, groups=240, suite="special"),
    _conv("efficientnet.dw5s2", 128, 56, 144, 144, 5, stride=2, padding=(1, 2), groups=144, suite="special"),
    _conv("replknet.dw31", 32, 56, 128, 128, 31, padding=15, groups=128, suite="special"),
    _conv("dw3.mult2", 64, 56, 64, 128, 3, padding=1, groups=64, suite="special"),
    _conv("dw3.dilated2", 64, 56, 128, 128, 3, padding=2, dilation=2, groups=128, suite="special"),
    _conv("dw3d.3x3x3", 8, 24, 128, 128, 3, padding=1, groups=128, nd=3, suite="special"),
    _conv("mamba.causal4", 4, (16384,), 1536, 1536, 4, padding=(3, 0), groups=1536, nd=1, suite="special"),
    _conv("causal4.dw.d64", 4, (16384,), 128, 128, 4, padding=(192, 0), dilation=64, groups=128, nd=1, suite="special"),
    _conv("wavenet.causal2d64", 4, (16384,), 128, 128, 2, padding=(64, 0), dilation=64, nd=1, suite="special"),
    _conv("unet3d.3x3x3", 2, 96, 32, 32, 3, padding=1, nd=3, suite="special"),
    _conv("volume.1to32", 1, 256, 1, 32, 3, padding=1, nd=3, suite="special"),
    _conv("volume.32to32", 1, 256, 32, 32, 3, padding=1, nd=3, suite="special"),
    _conv("volume.64to32", 1, 256, 64, 32, 3, padding=1, nd=3, suite="special"),
    _conv("volume.64to64", 1, 128, 64, 64, 3, padding=1, nd=3, suite="special"),
    _conv("resnext.c4", 128, 28, 256, 256, 3, padding=1, groups=64, suite="special"),
    _conv("resnext.c8", 128, 28, 256, 256, 3, padding=1, groups=32, suite="special"),
    _conv("resnext.c16", 128, 14, 512, 512, 3, padding=1, groups=32, suite="special"),
    _conv("resnext.c8s2", 128, 56, 256, 256, 3, stride=2, padding=1, groups=32, suite="special"),
    _conv("resnext.c16s2", 128, 28, 512, 512, 3, stride=2, padding=1, groups=32, suite="special"),
    _conv("mobilenet.stem3x3s2", 128, 224, 3, 32, 3, stride=2, padding=(0, 1), suite="special"),
    _conv("convnext.stem4x4s4", 128, 224, 3, 96, 4, stride=4, suite="special"),
    _conv("vit.patch16", 128, 224, 3, 768, 16, stride=16, suite="special"),
    _conv("decoder.rgb", 16, 128, 64, 3, 3, padding=1, suite="special"),
    _conv("unet.up2x2s2", 16, 64, 256, 128, 2, stride=2, transposed=True, suite="special"),
    _conv("dcgan.up4x4s2", 64, 32, 256, 128, 4, stride=2, transposed=True, suite="special"),
)

CONV = _CORE + _SPECIAL

# "cpu": eight images, what a processor does in milliseconds. Dense shapes, where XLA is at the limit, and those where
# it is not: depthwise, grouped, the weight gradient of a 1x1.
CPU_CONV = (
    _conv("cpu.3x3", 8, 56, 64, 64, 3, padding=1, suite="cpu"),
    _conv("cpu.3x3s2", 8, 56, 64, 128, 3, stride=2, padding=1, suite="cpu"),
    _conv("cpu.1x1", 8, 56, 64, 256, 1, suite="cpu"),
    _conv("cpu.stem7x7s2", 8, 112, 3, 64, 7, stride=2, padding=3, suite="cpu"),
    _conv("cpu.d2", 8, 56, 64, 64, 3, padding=2, dilation=2, suite="cpu"),
    _conv("cpu.dw3", 8, 56, 128, 128, 3, padding=1, groups=128, suite="cpu"),
    _conv("cpu.dw3s2", 8, 56, 96, 96, 3, stride=2, padding=(0, 1), groups=96, suite="cpu"),
    _conv("cpu.dw7", 8, 28, 96, 96, 7, padding=3, groups=96, suite="cpu"),
    _conv("cpu.causal4", 8, (1024,), 256, 256, 4, padding=(3, 0), groups=256, nd=1, suite="cpu"),
    _conv("cpu.g8", 8, 56, 64, 64, 3, padding=1, groups=8, suite="cpu"),
    _conv("cpu.g32", 8, 28, 128, 128, 3, padding=1, groups=32, suite="cpu"),
)

# "models": what ResNet-50, ResNeXt-50, ConvNeXt-T and MobileNetV2 (benchmarks/models.py) at batch 256 hold besides the
# above, for the plan's table: without a neighbour a problem goes to XLA.
MODELS_CONV = (
    _conv("board19.3x3", 2048, 19, 128, 128, 3, padding=1, suite="models"),
    _conv("r18.32.3x3", 256, 32, 64, 64, 3, padding=1, suite="models"),
    _conv("r18.16.3x3", 256, 16, 128, 128, 3, padding=1, suite="models"),
    _conv("r18.16.3x3s2", 256, 32, 64, 128, 3, stride=2, padding=(0, 1), suite="models"),
    _conv("r18.8.3x3", 256, 8, 256, 256, 3, padding=1, suite="models"),
    _conv("r18.4.3x3", 256, 4, 512, 512, 3, padding=1, suite="models"),
    _conv("impala.84.3x3", 1024, 84, 4, 16, 3, padding=1, suite="models"),
    _conv("impala.42.3x3", 1024, 42, 16, 16, 3, padding=1, suite="models"),
    _conv("impala.21.3x3", 1024, 21, 32, 32, 3, padding=1, suite="models"),
    _conv("r50.s1.1x1c", 256, 56, 256, 64, 1, suite="models"),
    _conv("r50.s2.1x1a", 256, 56, 256, 128, 1, suite="models"),
    # As Flax's SAME pads it: XLA copies x, and dx, of this and not of r50.s2.3x3s2.
    _conv("r50.s2.3x3s2same", 256, 56, 128, 128, 3, stride=2, padding=(0, 1), suite="models"),
    _conv("r50.s2.1x1b", 256, 28, 128, 512, 1, suite="models"),
    _conv("r50.s2.1x1c", 256, 28, 512, 128, 1, suite="models"),
    _conv("r50.s3.3x3s2", 256, 28, 256, 256, 3, stride=2, padding=(0, 1), suite="models"),
    _conv("r50.s3.1x1a", 256, 28, 512, 256, 1, suite="models"),
    _conv("r50.s3.1x1c", 256, 14, 1024, 256, 1, suite="models"),
    _conv("r50.s4.1x1a", 256, 14, 1024, 512, 1, suite="models"),
    _conv("r50.s3.down1x1s2", 256, 28, 512, 1024, 1, stride=2, suite="models"),
    _conv("r50.s4.down1x1s2", 256, 14, 1024, 2048, 1, stride=2, suite="models"),
    _conv("r50.s4.3x3s2", 256, 14, 512, 512, 3, stride=2, padding=(0, 1), suite="models"),
    _conv("r50.s4.1x1b", 256, 7, 512, 2048, 1, suite="models"),
    _conv("r50.s4.1x1c", 256, 7, 2048, 512, 1, suite="models"),
    _conv("x50.s1.3x3", 256, 56, 128, 128, 3, padding=1, groups=32, suite="models"),
    _conv("x50.s2.1x1a", 256, 56, 256, 256, 1, suite="models"),
    _conv("x50.s2.3x3s2", 256, 56, 256, 256, 3, stride=2, padding=(0, 1), groups=32, suite="models"),
    _conv("x50.s2.3x3", 256, 28, 256, 256, 3, padding=1, groups=32, suite="models"),
    _conv("x50.s2.1x1b", 256, 28, 256, 512, 1, suite="models"),
    _conv("x50.s3.1x1a", 256, 28, 512, 512, 1, suite="models"),
    _conv("x50.s3.3x3s2", 256, 28, 512, 512, 3, stride=2, padding=(0, 1), groups=32, suite="models"),
    _conv("x50.s3.3x3", 256, 14, 512, 512, 3, padding=1, groups=32, suite="models"),
    _conv("x50.s3.1x1b", 256, 14, 512, 1024, 1, suite="models"),
    _conv("x50.s4.1x1a", 256, 14, 1024, 1024, 1, suite="models"),
    _conv("x50.s4.3x3s2", 256, 14, 1024, 1024, 3, stride=2, padding=(0, 1), groups=32, suite="models"),
    _conv("x50.s4.3x3", 256, 7, 1024, 1024, 3, padding=1, groups=32, suite="models"),
    _conv("x50.s4.1x1b", 256, 7, 1024, 2048, 1, suite="models"),
    _conv("x50.s4.1x1c", 256, 7, 2048, 1024, 1, suite="models"),
    _conv("convnext.s1.dw7", 256, 56, 96, 96, 7, padding=3, groups=96, suite="models"),
    _conv("convnext.s2.dw7", 256, 28, 192, 192, 7, padding=3, groups=192, suite="models"),
    _conv("convnext.s3.dw7", 256, 14, 384, 384, 7, padding=3, groups=384, suite="models"),
    _conv("convnext.s4.dw7", 256, 7, 768, 768, 7, padding=3, groups=768, suite="models"),
    _conv("convnext.s2.down2x2s2", 256, 56, 96, 192, 2, stride=2, suite="models"),
    _conv("convnext.s3.down2x2s2", 256, 28, 192, 384, 2, stride=2, suite="models"),
    _conv("convnext.s4.down2x2s2", 256, 14, 384, 768, 2, stride=2, suite="models"),
    _conv("mobilenet.112.dw3", 256, 112, 32, 32, 3, padding=1, groups=32, suite="models"),
    _conv("mobilenet.56.dw3", 256, 56, 144, 144, 3, padding=1, groups=144, suite="models"),
    _conv("mobilenet.56.dw3s2", 256, 56, 144, 144, 3, stride=2, padding=(0, 1), groups=144, suite="models"),
    _conv("mobilenet.28.dw3", 256, 28, 192, 192, 3, padding=1, groups=192, suite="models"),
    _conv("mobilenet.28.dw3s2", 256, 28, 192, 192, 3, stride=2, padding=(0, 1), groups=192, suite="models"),
    _conv("mobilenet.14.dw3", 256, 14, 384, 384, 3, padding=1, groups=384, suite="models"),
    _conv("mobilenet.14.dw3s2", 256, 14, 576, 576, 3, stride=2, padding=(0, 1), groups=576, suite="models"),
    _conv("mobilenet.7.dw3", 256, 7, 960, 960, 3, padding=1, groups=960, suite="models"),
    _conv("efficientnet.56.dw5s2", 256, 56, 144, 144, 5, stride=2, padding=(1, 2), groups=144, suite="models"),
    _conv("efficientnet.28.dw3s2", 256, 28, 240, 240, 3, stride=2, padding=(0, 1), groups=240, suite="models"),
    _conv("efficientnet.14.dw5s2", 256, 14, 672, 672, 5, stride=2, padding=(1, 2), groups=672, suite="models"),
    _conv("mobilenet.112.1x1a", 256, 112, 32, 16, 1, suite="models"),
    _conv("mobilenet.112.1x1b", 256, 112, 16, 96, 1, suite="models"),
    _conv("mobilenet.56.1x1a", 256, 56, 96, 24, 1, suite="models"),
    _conv("mobilenet.56.1x1b", 256, 56, 24, 144, 1, suite="models"),
    _conv("mobilenet.28.1x1a", 256, 28, 144, 32, 1, suite="models"),
    _conv("mobilenet.28.1x1b", 256, 28, 32, 192, 1, suite="models"),
    _conv("mobilenet.14.1x1a", 256, 14, 384, 64, 1, suite="models"),
    _conv("mobilenet.14.1x1b", 256, 14, 96, 576, 1, suite="models"),
    _conv("mobilenet.7.1x1a", 256, 7, 960, 160, 1, suite="models"),
    _conv("mobilenet.7.1x1b", 256, 7, 320, 1280, 1, suite="models"),
)


def _thread(name: str, thread: str, *args: Any, **options: Any) -> ConvCase:
    return _conv(f"thread.{name}", *args, suite="threads", thread=thread, **options)


# "threads": the shapes in which users found XLA's convolutions slow, or without an algorithm; sizes are theirs where
# the thread has them.
THREADS_CONV = (
    _thread("up3d.4x4x4s2", "jax-ml/jax#31662", 2, 32, 128, 64, 4, stride=2, nd=3, transposed=True),
    _thread("up3d.2x2x2s2", "openxla/xla#34273", 2, 32, 64, 32, 2, stride=2, nd=3, transposed=True),
    _thread("up1d.16s8", "jax-ml/jax#23783", 16, (1024,), 256, 128, 16, stride=8, nd=1, transposed=True),
    _thread("up1d.4s2", "jax-ml/jax#23783", 16, (8192,), 64, 32, 4, stride=2, nd=1, transposed=True),
    _thread("down3d.3x3x3s2", "openxla/xla#34273", 4, 64, 32, 64, 3, stride=2, padding=(0, 1), nd=3),
    _thread("conv3d.3x3x3", "openxla/xla#34273", 4, 32, 64, 64, 3, padding=1, nd=3),
    _thread("conv1d.3", "jax-ml/jax#37922", 32, (4096,), 128, 128, 3, padding=1, nd=1),
    _thread("conv1d.7", "jax-ml/jax#37922", 32, (4096,), 64, 64, 7, padding=3, nd=1),
    _thread("conv1d.15", "jax-ml/jax#37922", 16, (4096,), 64, 64, 15, padding=7, nd=1),
    _thread("conv1d.31", "jax-ml/jax#37922", 16, (4096,), 32, 32, 31, padding=15, nd=1),
    _thread("dw1d.31", "google/flax#4207", 16, (4096,), 256, 256, 31, padding=15, groups=256, nd=1),
    _thread("dw1d.7", "jax-ml/jax#23713", 16, (4096,), 256, 256, 7, padding=3, groups=256, nd=1),
    _thread("dw5x5s2", "jax-ml/jax#23713", 128, 28, 336, 336, 5, stride=2, padding=(1, 2), groups=336),
    _thread("dw3.dilated4", "jax-ml/jax#26266", 32, 56, 128, 128, 3, padding=4, dilation=4, groups=128),
    _thread("5x5s2", "danijar/dreamerv3#139", 64, 64, 64, 128, 5, stride=2, padding=(1, 2)),
    _thread("8x8s4", "danijar/dreamerv3#126", 256, 84, 4, 32, 8, stride=4),
    _thread("16x16s16", "jax-ml/jax#23085", 64, 224, 3, 768, 16, stride=16),
    _thread("groups2", "keras-team/keras#20471", 64, 28, 256, 256, 3, padding=1, groups=2),
    _thread("wavenet.k3d64", "jax-ml/jax#26266", 4, (16384,), 128, 128, 3, padding=(128, 0), dilation=64, nd=1),
    _thread("aspp.d6", "jax-ml/jax#26266", 16, 65, 256, 256, 3, padding=6, dilation=6),
    _thread("aspp.d12", "jax-ml/jax#26266", 16, 65, 256, 256, 3, padding=12, dilation=12),
    _thread("aspp.d18", "jax-ml/jax#26266", 16, 65, 256, 256, 3, padding=18, dilation=18),
    _thread("batch1.3x3", "jax-ml/jax#1606", 1, 56, 64, 64, 3, padding=1),
    _thread("batch1.1x1", "prs-eth/thera#10", 1, 256, 64, 64, 1),
)


def _served(
    model: str, batch: int, size: int, c: int, k: int, filter: int = 1, stride: int = 1, **options: Any
) -> ConvCase:
    """A layer of a network that answers few images, padded as lax's SAME."""
    total = max((-(-size // stride) - 1) * stride + filter - size, 0)
    pad = (total // 2, total - total // 2)
    kind = f"{filter}x{filter}" + (f"s{stride}" if stride > 1 else "")
    name = f"serve.b{batch}.{model}.{size}.{c}to{k}.{kind}"
    return _conv(name, batch, size, c, k, filter, stride=stride, padding=pad, suite="serve", **options)


# "serve": what networks are made of that answer one image, or eight; forward only.
_R50_LAYERS = (
    *((224, 3, 64, 7, 2), (56, 64, 64), (56, 64, 64, 3), (56, 64, 256), (56, 256, 64), (56, 256, 128)),
    *((56, 128, 128, 3, 2), (28, 128, 512), (56, 256, 512, 1, 2), (28, 512, 128), (28, 128, 128, 3), (28, 512, 256)),
    *((28, 256, 256, 3, 2), (14, 256, 1024), (28, 512, 1024, 1, 2), (14, 1024, 256), (14, 256, 256, 3)),
    *((14, 1024, 512), (14, 512, 512, 3, 2), (7, 512, 2048), (14, 1024, 2048, 1, 2), (7, 2048, 512)),
    (7, 512, 512, 3),
)
_MOBILENET_LAYERS = (
    *((224, 3, 32, 3, 2), (112, 32, 16), (112, 16, 96), (56, 96, 24), (56, 24, 144), (28, 144, 32), (28, 32, 192)),
    *((14, 192, 64), (14, 64, 384), (14, 384, 96), (14, 576, 96), (7, 576, 160), (7, 160, 960), (7, 960, 320)),
    (7, 320, 1280),
)
# (size, channels, filter, stride): MobileNetV2's and EfficientNet-B0's, then ConvNeXt-T's
_DEPTHWISE_LAYERS = (
    *((112, 32, 3, 1), (112, 96, 3, 2), (56, 144, 3, 1), (56, 144, 3, 2), (56, 144, 5, 2), (28, 192, 3, 1)),
    *((28, 192, 3, 2), (28, 240, 5, 1), (28, 240, 3, 2), (14, 384, 3, 1), (14, 480, 3, 1), (14, 480, 5, 1)),
    *((14, 576, 3, 1), (14, 576, 3, 2), (14, 672, 5, 1), (14, 672, 5, 2), (7, 960, 3, 1), (7, 1152, 5, 1)),
    *((7, 1152, 3, 1), (56, 96, 7, 1), (28, 192, 7, 1), (14, 384, 7, 1), (7, 768, 7, 1)),
)
# MobileNetV3's squeeze-and-excitations, whose images are one pixel.
_SQUEEZE_LAYERS = ((1, 480, 120), (1, 120, 480), (1, 960, 240), (1, 240, 960))
SERVE_CONV = (
    *(_served("r50", batch, *layer) for batch in (1, 8) for layer in _R50_LAYERS),
    *(_served("mobilenet", 1, *layer) for layer in _MOBILENET_LAYERS),
    *(_served("squeeze", batch, *layer) for batch in (1, 8) for layer in _SQUEEZE_LAYERS),
    *(
        _served("depthwise", batch, size, c, c, f, s, groups=c)
        for batch in (1, 8)
        for size, c, f, s in _DEPTHWISE_LAYERS
    ),
)

MODELS_BATCHNORM = (
    BatchNormCase("r50.s1.64", 256, 64, (56, 56), suite="models"),
    BatchNormCase("r50.s2.128", 256, 128, (28, 28), suite="models"),
    BatchNormCase("r50.s3.256", 256, 256, (14, 14), suite="models"),
    BatchNormCase("r50.s4.512", 256, 512, (7, 7), suite="models"),
    BatchNormCase("mobilenet.112.32", 256, 32, (112, 112), suite="models"),
    BatchNormCase("mobilenet.112.96", 256, 96, (112, 112), suite="models"),
    BatchNormCase("mobilenet.56.144", 256, 144, (56, 56), suite="models"),
    BatchNormCase("mobilenet.28.192", 256, 192, (28, 28), suite="models"),
    BatchNormCase("mobilenet.14.384", 256, 384, (14, 14), suite="models"),
    BatchNormCase("mobilenet.7.960", 256, 960, (7, 7), suite="models"),
)

BATCHNORM = (
    BatchNormCase("seed", 64, 128, (56, 56)),
    BatchNormCase("r50.stem", 256, 64, (112, 112)),
    BatchNormCase("r50.s1", 256, 256, (56, 56)),
    BatchNormCase("r50.s2", 256, 512, (28, 28)),
    BatchNormCase("r50.s3", 256, 1024, (14, 14)),
    BatchNormCase("r50.s4", 256, 2048, (7, 7)),
    BatchNormCase("small", 32, 64, (28, 28)),
)

# A projection block's last batch-norm and its shortcut's.
SHORTCUT = tuple(
    ShortcutCase(f"r50.{stage}", 256, channels, (size, size))
    for stage, channels, size in (("s1", 256, 56), ("s2", 512, 28), ("s3", 1024, 14), ("s4", 2048, 7))
)

# Of diffusion models: DDPM's U-Net of 128 channels, Stable Diffusion's and its autoencoder's.
GROUPNORM = (
    GroupNormCase("ddpm.64", 64, 128, (64, 64)),
    GroupNormCase("ddpm.32", 64, 256, (32, 32)),
    GroupNormCase("ddpm.16", 64, 256, (16, 16)),
    GroupNormCase("ddpm.8", 64, 512, (8, 8)),
    GroupNormCase("sd.64", 8, 320, (64, 64)),
    GroupNormCase("sd.32", 8, 640, (32, 32)),
    GroupNormCase("vae.256", 2, 256, (256, 256)),
)

# Of ConvNeXt-T's stages, a vision transformer of patches of 16, a language model's.
LAYERNORM = (
    LayerNormCase("convnext.56", 256, 96, (56, 56)),
    LayerNormCase("convnext.28", 256, 192, (28, 28)),
    LayerNormCase("convnext.14", 256, 384, (14, 14)),
    LayerNormCase("convnext.7", 256, 768, (7, 7)),
    LayerNormCase("vit", 64, 768, (197,)),
    LayerNormCase("lm", 8192, 1024, ()),
)

# ResNet-50's pairs, and ResNeXt-50's that are no like of those.
CONV_BATCHNORM = tuple(
    ConvBatchNormCase(**dataclasses.asdict(case))
    for case in (
        _conv("r50.s1.1x1c", 256, 56, 256, 64, 1),
        _conv("r50.s1.3x3", 256, 56, 64, 64, 3, padding=1),
        _conv("r50.s1.1x1b", 256, 56, 64, 256, 1),
        _conv("r50.s2.3x3s2", 256, 56, 128, 128, 3, stride=2, padding=1),
        _conv("r50.s2.3x3", 256, 28, 128, 128, 3, padding=1),
        _conv("r50.s2.1x1b", 256, 28, 128, 512, 1),
        _conv("r50.s3.3x3", 256, 14, 256, 256, 3, padding=1),
        _conv("r50.s3.1x1b", 256, 14, 256, 1024, 1),
        _conv("r50.s4.3x3", 256, 7, 512, 512, 3, padding=1),
        _conv("r50.s4.1x1b", 256, 7, 512, 2048, 1),
        # None of those above is near enough for a plan.
        _conv("r50.s1.1x1a", 256, 56, 64, 64, 1, suite="models"),
        _conv("r50.s2.1x1c", 256, 28, 512, 128, 1, suite="models"),
        _conv("r50.s2.down1x1s2", 256, 56, 256, 512, 1, stride=2, suite="models"),
        _conv("r50.s3.1x1a", 256, 28, 512, 256, 1, suite="models"),
        _conv("r50.s3.3x3s2", 256, 28, 256, 256, 3, stride=2, padding=(0, 1), suite="models"),
        _conv("r50.s3.1x1c", 256, 14, 1024, 256, 1, suite="models"),
        _conv("r50.s3.down1x1s2", 256, 28, 512, 1024, 1, stride=2, suite="models"),
        _conv("r50.s4.1x1a", 256, 14, 1024, 512, 1, suite="models"),
        _conv("r50.s4.3x3s2", 256, 14, 512, 512, 3, stride=2, padding=(0, 1), suite="models"),
        _conv("r50.s4.1x1c", 256, 7, 2048, 512, 1, suite="models"),
        _conv("r50.s4.down1x1s2", 256, 14, 1024, 2048, 1, stride=2, suite="models"),
        # Batch-norms that stay in no cache, and images of 32x32.
        _conv("board19.3x3", 2048, 19, 128, 128, 3, padding=1, suite="models"),
        _conv("vgg.3x3", 32, 112, 128, 128, 3, padding=1, suite="models"),
        _conv("r18.32.3x3", 256, 32, 64, 64, 3, padding=1, suite="models"),
        _conv("r18.16.3x3", 256, 16, 128, 128, 3, padding=1, suite="models"),
        *(case for case in MODELS_CONV if case.name.startswith("x50.") and case.groups == 1),
    )
)

# The convolutions behind ResNet-50's and ResNeXt-50's residual blocks whose result has at least 64 MiB.
DGRAD_SUMS = tuple(
    DgradSumsCase(**dataclasses.asdict(_conv(f"r50.{name}", 256, size, c, k, 1, suite="models")))
    for name, size, c, k in (
        ("s1.1x1c", 56, 256, 64),
        ("s2.1x1a", 56, 256, 128),
        ("s2.1x1c", 28, 512, 128),
        ("s3.1x1a", 28, 512, 256),
        ("s3.1x1c", 14, 1024, 256),
    )
)

# The depthwise layers of MobileNetV2 and EfficientNet-B0 that a kernel may give a batch-norm to read.
BATCHNORM_CONV = tuple(
    BatchNormConvCase(
        **dataclasses.asdict(
            _conv(
                f"{model}.{size}.dw3{'s2' if stride == 2 else ''}",
                256,
                size,
                c,
                c,
                3,
                stride=stride,
                padding=(0, 1) if stride == 2 else 1,
                groups=c,
                suite="models",
            )
        ),
        activation=activation,
    )
    for model, activation, layers in (
        (
            "mobilenet",
            "relu6",
            (
                *((112, 32, 1), (112, 96, 2), (56, 144, 1), (56, 144, 2), (28, 192, 1), (28, 192, 2)),
                *((14, 384, 1), (14, 576, 2), (7, 960, 1)),
            ),
        ),
        ("efficientnet", "silu", ((112, 32, 1), (112, 96, 2), (56, 144, 1), (28, 240, 2), (14, 480, 1), (7, 1152, 1))),
    )
    for size, c, stride in layers
)

DENSE = tuple(
    DenseCase(f"{name}.{activation}", m, k, n, activation)
    for name, m, k, n in (
        ("mlp4k", 4096, 4096, 4096),
        ("ffn.up", 8192, 1024, 4096),
        ("ffn.down", 8192, 4096, 1024),
        ("head", 256, 2048, 1000),
        ("skinny", 64, 4096, 4096),
    )
    for activation in ("relu", "gelu", "tanh")
)

# Of few rows: classifiers' heads, a layer of a multi-layer perceptron, a transformer's.
SERVE_DENSE = tuple(
    DenseCase(f"serve.b{m}.{name}.{activation}", m, k, n, activation, suite="serve")
    for m, name, k, n, activation in (
        *((m, "head", 2048, 1000, "relu") for m in (1, 8)),
        *((m, "mlp4k", 4096, 4096, "relu") for m in (1, 8, 32)),
        (64, "ffn.up", 768, 3072, "gelu"),
        (64, "ffn.down", 3072, 768, "relu"),
    )
)

# ConvNeXt-T's blocks at batch 256, and a transformer's: rows, channels of the narrow side, of the wide one.
_BLOCKS = (
    ("convnext.s1", 802816, 96, 384),
    ("convnext.s2", 200704, 192, 768),
    ("convnext.s3", 50176, 384, 1536),
    ("convnext.s4", 12544, 768, 3072),
    ("ffn", 8192, 1024, 4096),
)
MODELS_DENSE = (
    *(DenseCase(f"{name}.up", m, c, h, "gelu", suite="models") for name, m, c, h in _BLOCKS),
    *(DenseCase(f"{name}.down", m, h, c, "none", suite="models") for name, m, c, h in _BLOCKS),
)
DENSE_GRADIENT = (
    *(DenseGradientCase(f"{name}.gelu", m, c, h, "gelu") for name, m, c, h in _BLOCKS),
    *(DenseGradientCase(f"convnext.s3.{activation}", *_BLOCKS[2][1:], activation) for activation in ("relu", "silu")),
)

POOL = (
    PoolCase("r50.stem", 256, 64, (112, 112), 3, 2, (0, 1)),
    PoolCase("inception.3x3", 64, 192, (56, 56), 3, 1, (1, 1)),
    PoolCase("vgg.2x2s2", 32, 128, (112, 112), 2, 2, (0, 0)),
    PoolCase("unet3d.2x2x2", 8, 32, (64, 64, 64), 2, 2, (0, 0)),
    PoolCase("spp.5x5", 64, 256, (20, 20), 5, 1, (2, 2)),
)

# EfficientNet-B0's: (size, channels, hidden).
_EFFICIENT_LAYERS = (
    *((112, 32, 8), (56, 96, 4), (56, 144, 6), (28, 144, 6), (28, 240, 10), (14, 240, 10), (14, 480, 20)),
    *((14, 672, 28), (7, 672, 28), (7, 1152, 48)),
)
# A ResNet-50's, RegNetY-8GF's and -32GF's, MobileNetV3's.
_EXCITED_LAYERS = (
    *(("r50", 56, 256, 16), ("r50", 28, 512, 32), ("r50", 14, 1024, 64), ("r50", 7, 2048, 128)),
    *(("regnet", 28, 448, 56), ("regnet", 14, 896, 112), ("regnet", 7, 2016, 224), ("regnet", 7, 3712, 348)),
    *(("mobilenet", 28, 120, 32), ("mobilenet", 14, 672, 168), ("mobilenet", 7, 960, 240)),
)
SQUEEZE_EXCITE = (
    *(SqueezeExciteCase(f"{m}.{size}.{c}", 256, c, (size, size), r) for m, size, c, r in _EXCITED_LAYERS),
    *(
        SqueezeExciteCase(f"efficientnet.{size}.{c}", 256, c, (size, size), r, suite="models")
        for size, c, r in _EFFICIENT_LAYERS
    ),
    *(
        SqueezeExciteCase(f"serve.b{batch}.{m}.{size}.{c}", batch, c, (size, size), r, suite="serve")
        for batch in (1, 8)
        for m, size, c, r in (*(("efficientnet", *layer) for layer in _EFFICIENT_LAYERS), *_EXCITED_LAYERS)
    ),
)
CPU_SQUEEZE_EXCITE = (SqueezeExciteCase("cpu.se", 8, 240, (28, 28), 10, suite="cpu"),)

CPU_POOL = (PoolCase("cpu.pool", 8, 64, (112, 112), 3, 2, (0, 1), suite="cpu"),)
CPU_BATCHNORM = (BatchNormCase("cpu.bn", 8, 64, (56, 56), suite="cpu"),)
CPU_GROUPNORM = (GroupNormCase("cpu.gn", 4, 128, (32, 32), suite="cpu"),)
CPU_LAYERNORM = (LayerNormCase("cpu.ln", 32, 192, (28, 28), suite="cpu"),)
CPU_DENSE = (DenseCase("cpu.mlp", 512, 1024, 1024, "relu", suite="cpu"),)

BY_OP: dict[str, tuple[Case, ...]] = {
    "conv": CONV + MODELS_CONV + CPU_CONV + THREADS_CONV + SERVE_CONV,
    "dense": DENSE + MODELS_DENSE + CPU_DENSE + SERVE_DENSE,
    "dense_gradient": DENSE_GRADIENT,
    "batchnorm": BATCHNORM + MODELS_BATCHNORM + CPU_BATCHNORM,
    "batchnorm_shortcut": SHORTCUT,
    "conv_batchnorm": CONV_BATCHNORM,
    "batchnorm_conv": BATCHNORM_CONV,
    "conv_dgrad_sums": DGRAD_SUMS,
    "pool": POOL + CPU_POOL,
    "groupnorm": GROUPNORM + CPU_GROUPNORM,
    "layernorm": LAYERNORM + CPU_LAYERNORM,
    "squeeze_excite": SQUEEZE_EXCITE + CPU_SQUEEZE_EXCITE,
}
SUITES = ("core", "special", "models", "cpu", "threads", "serve")


def select(op: str, pattern: str = "*", suites: tuple[str, ...] = SUITES[:2]) -> list[Case]:
    """The cases of `op` whose name matches one of `pattern`'s comma-separated globs."""
    globs = pattern.split(",")
    return [c for c in BY_OP[op] if c.suite in suites and any(fnmatch.fnmatchcase(c.name, g) for g in globs)]


def by_name(cases: tuple[T, ...], name: str) -> T:
    for case in cases:
        if case.name == name:
            return case
    raise KeyError(f"no case is named {name!r}, there are {', '.join(c.name for c in cases)}")

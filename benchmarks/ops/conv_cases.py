"""The convolutions that are measured and tested, by suite."""

from __future__ import annotations

from typing import Any

from benchmarks.ops.conv import ConvCase, Pair


def conv(
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
    nd: int = 2,
    **more: Any,
) -> ConvCase:
    """A case whose axes are alike."""
    pads = padding if isinstance(padding, tuple) else (padding, padding)
    spatial = spatial if isinstance(spatial, tuple) else (spatial,) * nd
    window = ((n,) * nd for n in (filter, stride, pads, dilation))
    return ConvCase(name, batch, spatial, in_channels, out_channels, *window, **more)


# "core": what common networks are made of. The geometric means are over this list.
CORE = (
    conv("r50.stem7x7s2", 256, 224, 3, 64, 7, stride=2, padding=3),
    conv("r50.s1.1x1a", 256, 56, 64, 64, 1),
    conv("r50.s1.3x3", 256, 56, 64, 64, 3, padding=1),
    conv("r50.s1.1x1b", 256, 56, 64, 256, 1),
    conv("r50.s2.3x3s2", 256, 56, 128, 128, 3, stride=2, padding=1),
    conv("r50.s2.3x3", 256, 28, 128, 128, 3, padding=1),
    conv("r50.s2.down1x1s2", 256, 56, 256, 512, 1, stride=2),
    conv("r50.s3.3x3", 256, 14, 256, 256, 3, padding=1),
    conv("r50.s3.1x1b", 256, 14, 256, 1024, 1),
    conv("r50.s4.3x3", 256, 7, 512, 512, 3, padding=1),
    conv("ck.bwd_data", 128, 71, 128, 256, 3, stride=2, padding=1),
    conv("unet.3x3", 16, 64, 320, 320, 3, padding=1),
    conv("vgg.3x3", 32, 112, 128, 128, 3, padding=1),
    conv("deeplab.d2", 16, 65, 256, 256, 3, padding=2, dilation=2),
    conv("convnext.dw7", 64, 56, 96, 96, 7, padding=3, groups=96),
    conv("mobilenet.dw3", 128, 56, 144, 144, 3, padding=1, groups=144),
    conv("resnext.g32", 128, 56, 128, 128, 3, padding=1, groups=32),
)

# "special": depthwise, grouped, small-channel, dilated, transposed, 1-D and 3-D convolutions.
SPECIAL = (
    conv("mobilenet.dw3s2", 128, 112, 96, 96, 3, stride=2, padding=(0, 1), groups=96, suite="special"),
    conv("efficientnet.dw5", 128, 28, 240, 240, 5, padding=2, groups=240, suite="special"),
    conv("efficientnet.dw5s2", 128, 56, 144, 144, 5, stride=2, padding=(1, 2), groups=144, suite="special"),
    conv("replknet.dw31", 32, 56, 128, 128, 31, padding=15, groups=128, suite="special"),
    conv("dw3.mult2", 64, 56, 64, 128, 3, padding=1, groups=64, suite="special"),
    conv("dw3.dilated2", 64, 56, 128, 128, 3, padding=2, dilation=2, groups=128, suite="special"),
    conv("dw3d.3x3x3", 8, 24, 128, 128, 3, padding=1, groups=128, nd=3, suite="special"),
    conv("mamba.causal4", 4, (16384,), 1536, 1536, 4, padding=(3, 0), groups=1536, nd=1, suite="special"),
    conv("causal4.dw.d64", 4, (16384,), 128, 128, 4, padding=(192, 0), dilation=64, groups=128, nd=1, suite="special"),
    conv("wavenet.causal2d64", 4, (16384,), 128, 128, 2, padding=(64, 0), dilation=64, nd=1, suite="special"),
    conv("unet3d.3x3x3", 2, 96, 32, 32, 3, padding=1, nd=3, suite="special"),
    conv("volume.1to32", 1, 256, 1, 32, 3, padding=1, nd=3, suite="special"),
    conv("volume.64.1to32", 1, 64, 1, 32, 3, padding=1, nd=3, suite="special"),
    conv("unet3d.1to32", 8, 64, 1, 32, 3, padding=1, nd=3, suite="special"),
    conv("unet3d.2to32", 2, 96, 2, 32, 3, padding=1, nd=3, suite="special"),
    conv("unet3d.4to32", 2, 96, 4, 32, 3, padding=1, nd=3, suite="special"),
    conv("unet3d.8to32", 2, 96, 8, 32, 3, padding=1, nd=3, suite="special"),
    conv("volume.4to16", 1, 128, 4, 16, 3, padding=1, nd=3, suite="special"),
    conv("video.3to64", 8, (16, 112, 112), 3, 64, 3, padding=1, nd=3, suite="special"),
    conv("unet3d.64to32", 8, 64, 64, 32, 3, padding=1, nd=3, suite="special"),
    conv("unet3d.s2.32to64", 8, 32, 32, 64, 3, padding=1, nd=3, suite="special"),
    conv("unet3d.s2.64to64", 8, 32, 64, 64, 3, padding=1, nd=3, suite="special"),
    conv("unet3d.s2.128to64", 8, 32, 128, 64, 3, padding=1, nd=3, suite="special"),
    conv("unet3d.s3.128to128", 8, 16, 128, 128, 3, padding=1, nd=3, suite="special"),
    conv("unet3d.s3.256to128", 8, 16, 256, 128, 3, padding=1, nd=3, suite="special"),
    conv("volume.32to32", 1, 256, 32, 32, 3, padding=1, nd=3, suite="special"),
    conv("volume.64to32", 1, 256, 64, 32, 3, padding=1, nd=3, suite="special"),
    conv("volume.64to64", 1, 128, 64, 64, 3, padding=1, nd=3, suite="special"),
    conv("resnext.c4", 128, 28, 256, 256, 3, padding=1, groups=64, suite="special"),
    conv("resnext.c8", 128, 28, 256, 256, 3, padding=1, groups=32, suite="special"),
    conv("resnext.c16", 128, 14, 512, 512, 3, padding=1, groups=32, suite="special"),
    conv("resnext.c8s2", 128, 56, 256, 256, 3, stride=2, padding=1, groups=32, suite="special"),
    conv("resnext.c16s2", 128, 28, 512, 512, 3, stride=2, padding=1, groups=32, suite="special"),
    conv("mobilenet.stem3x3s2", 128, 224, 3, 32, 3, stride=2, padding=(0, 1), suite="special"),
    conv("convnext.stem4x4s4", 128, 224, 3, 96, 4, stride=4, suite="special"),
    conv("vit.patch16", 128, 224, 3, 768, 16, stride=16, suite="special"),
    conv("decoder.rgb", 16, 128, 64, 3, 3, padding=1, suite="special"),
    conv("unet.up2x2s2", 16, 64, 256, 128, 2, stride=2, transposed=True, suite="special"),
    conv("dcgan.up4x4s2", 64, 32, 256, 128, 4, stride=2, transposed=True, suite="special"),
)

# "cpu": eight images, what a processor does in milliseconds. Dense shapes, where XLA is at the limit, and those where
# it is not: depthwise, grouped, the weight gradient of a 1x1.
_CPU = (
    conv("cpu.3x3", 8, 56, 64, 64, 3, padding=1, suite="cpu"),
    conv("cpu.3x3s2", 8, 56, 64, 128, 3, stride=2, padding=1, suite="cpu"),
    conv("cpu.1x1", 8, 56, 64, 256, 1, suite="cpu"),
    conv("cpu.stem7x7s2", 8, 112, 3, 64, 7, stride=2, padding=3, suite="cpu"),
    conv("cpu.d2", 8, 56, 64, 64, 3, padding=2, dilation=2, suite="cpu"),
    conv("cpu.dw3", 8, 56, 128, 128, 3, padding=1, groups=128, suite="cpu"),
    conv("cpu.dw3s2", 8, 56, 96, 96, 3, stride=2, padding=(0, 1), groups=96, suite="cpu"),
    conv("cpu.dw7", 8, 28, 96, 96, 7, padding=3, groups=96, suite="cpu"),
    conv("cpu.causal4", 8, (1024,), 256, 256, 4, padding=(3, 0), groups=256, nd=1, suite="cpu"),
    conv("cpu.g8", 8, 56, 64, 64, 3, padding=1, groups=8, suite="cpu"),
    conv("cpu.g32", 8, 28, 128, 128, 3, padding=1, groups=32, suite="cpu"),
)

# "models": what ResNet-50, ResNeXt-50, ConvNeXt-T and MobileNetV2 (benchmarks/models.py) at batch 256 hold besides the
# above, for the plan's table: without a neighbour a problem goes to XLA.
MODELS = (
    conv("board19.3x3", 2048, 19, 128, 128, 3, padding=1, suite="models"),
    conv("r18.32.3x3", 256, 32, 64, 64, 3, padding=1, suite="models"),
    conv("r18.16.3x3", 256, 16, 128, 128, 3, padding=1, suite="models"),
    conv("r18.16.3x3s2", 256, 32, 64, 128, 3, stride=2, padding=(0, 1), suite="models"),
    conv("r18.8.3x3", 256, 8, 256, 256, 3, padding=1, suite="models"),
    conv("r18.4.3x3", 256, 4, 512, 512, 3, padding=1, suite="models"),
    conv("impala.84.3x3", 1024, 84, 4, 16, 3, padding=1, suite="models"),
    conv("impala.42.3x3", 1024, 42, 16, 16, 3, padding=1, suite="models"),
    conv("impala.21.3x3", 1024, 21, 32, 32, 3, padding=1, suite="models"),
    conv("impala.42.3x3b", 1024, 42, 16, 32, 3, padding=1, suite="models"),
    conv("impala.11.3x3", 1024, 11, 32, 32, 3, padding=1, suite="models"),
    conv("r20.32.3x3", 128, 32, 16, 16, 3, padding=1, suite="models"),
    conv("r20.16.3x3", 128, 16, 32, 32, 3, padding=1, suite="models"),
    conv("digits.28.3x3", 128, 28, 16, 32, 3, padding=1, suite="models"),
    conv("digits.26.3x3", 128, 26, 32, 64, 3, suite="models"),
    conv("unet16.256.3x3", 8, 256, 16, 16, 3, padding=1, suite="models"),
    conv("unet16.256.3x3b", 8, 256, 32, 16, 3, padding=1, suite="models"),
    conv("unet16.128.3x3", 8, 128, 32, 32, 3, padding=1, suite="models"),
    conv("restore.128.3x3", 16, 128, 32, 8, 3, padding=1, suite="models"),
    conv("restore.128.3x3b", 16, 128, 8, 32, 3, padding=1, suite="models"),
    conv("actor.84.3x3", 256, 84, 8, 16, 3, padding=1, suite="models"),
    conv("r50.s1.1x1c", 256, 56, 256, 64, 1, suite="models"),
    conv("r50.s2.1x1a", 256, 56, 256, 128, 1, suite="models"),
    # As Flax's SAME pads it: XLA copies x, and dx, of this and not of r50.s2.3x3s2.
    conv("r50.s2.3x3s2same", 256, 56, 128, 128, 3, stride=2, padding=(0, 1), suite="models"),
    conv("r50.s2.1x1b", 256, 28, 128, 512, 1, suite="models"),
    conv("r50.s2.1x1c", 256, 28, 512, 128, 1, suite="models"),
    conv("r50.s3.3x3s2", 256, 28, 256, 256, 3, stride=2, padding=(0, 1), suite="models"),
    conv("r50.s3.1x1a", 256, 28, 512, 256, 1, suite="models"),
    conv("r50.s3.1x1c", 256, 14, 1024, 256, 1, suite="models"),
    conv("r50.s4.1x1a", 256, 14, 1024, 512, 1, suite="models"),
    conv("r50.s3.down1x1s2", 256, 28, 512, 1024, 1, stride=2, suite="models"),
    conv("r50.s4.down1x1s2", 256, 14, 1024, 2048, 1, stride=2, suite="models"),
    conv("r50.s4.3x3s2", 256, 14, 512, 512, 3, stride=2, padding=(0, 1), suite="models"),
    conv("r50.s4.1x1b", 256, 7, 512, 2048, 1, suite="models"),
    conv("r50.s4.1x1c", 256, 7, 2048, 512, 1, suite="models"),
    conv("x50.s1.3x3", 256, 56, 128, 128, 3, padding=1, groups=32, suite="models"),
    conv("x50.s2.1x1a", 256, 56, 256, 256, 1, suite="models"),
    conv("x50.s2.3x3s2", 256, 56, 256, 256, 3, stride=2, padding=(0, 1), groups=32, suite="models"),
    conv("x50.s2.3x3", 256, 28, 256, 256, 3, padding=1, groups=32, suite="models"),
    conv("x50.s2.1x1b", 256, 28, 256, 512, 1, suite="models"),
    conv("x50.s3.1x1a", 256, 28, 512, 512, 1, suite="models"),
    conv("x50.s3.3x3s2", 256, 28, 512, 512, 3, stride=2, padding=(0, 1), groups=32, suite="models"),
    conv("x50.s3.3x3", 256, 14, 512, 512, 3, padding=1, groups=32, suite="models"),
    conv("x50.s3.1x1b", 256, 14, 512, 1024, 1, suite="models"),
    conv("x50.s4.1x1a", 256, 14, 1024, 1024, 1, suite="models"),
    conv("x50.s4.3x3s2", 256, 14, 1024, 1024, 3, stride=2, padding=(0, 1), groups=32, suite="models"),
    conv("x50.s4.3x3", 256, 7, 1024, 1024, 3, padding=1, groups=32, suite="models"),
    conv("x50.s4.1x1b", 256, 7, 1024, 2048, 1, suite="models"),
    conv("x50.s4.1x1c", 256, 7, 2048, 1024, 1, suite="models"),
    conv("convnext.s1.dw7", 256, 56, 96, 96, 7, padding=3, groups=96, suite="models"),
    conv("convnext.s2.dw7", 256, 28, 192, 192, 7, padding=3, groups=192, suite="models"),
    conv("convnext.s3.dw7", 256, 14, 384, 384, 7, padding=3, groups=384, suite="models"),
    conv("convnext.s4.dw7", 256, 7, 768, 768, 7, padding=3, groups=768, suite="models"),
    conv("convnext.s2.down2x2s2", 256, 56, 96, 192, 2, stride=2, suite="models"),
    conv("convnext.s3.down2x2s2", 256, 28, 192, 384, 2, stride=2, suite="models"),
    conv("convnext.s4.down2x2s2", 256, 14, 384, 768, 2, stride=2, suite="models"),
    conv("mobilenet.112.dw3", 256, 112, 32, 32, 3, padding=1, groups=32, suite="models"),
    conv("mobilenet.56.dw3", 256, 56, 144, 144, 3, padding=1, groups=144, suite="models"),
    conv("mobilenet.56.dw3s2", 256, 56, 144, 144, 3, stride=2, padding=(0, 1), groups=144, suite="models"),
    conv("mobilenet.28.dw3", 256, 28, 192, 192, 3, padding=1, groups=192, suite="models"),
    conv("mobilenet.28.dw3s2", 256, 28, 192, 192, 3, stride=2, padding=(0, 1), groups=192, suite="models"),
    conv("mobilenet.14.dw3", 256, 14, 384, 384, 3, padding=1, groups=384, suite="models"),
    conv("mobilenet.14.dw3s2", 256, 14, 576, 576, 3, stride=2, padding=(0, 1), groups=576, suite="models"),
    conv("mobilenet.7.dw3", 256, 7, 960, 960, 3, padding=1, groups=960, suite="models"),
    conv("efficientnet.56.dw5s2", 256, 56, 144, 144, 5, stride=2, padding=(1, 2), groups=144, suite="models"),
    conv("efficientnet.28.dw3s2", 256, 28, 240, 240, 3, stride=2, padding=(0, 1), groups=240, suite="models"),
    conv("efficientnet.14.dw5s2", 256, 14, 672, 672, 5, stride=2, padding=(1, 2), groups=672, suite="models"),
    conv("mobilenet.112.1x1a", 256, 112, 32, 16, 1, suite="models"),
    conv("mobilenet.112.1x1b", 256, 112, 16, 96, 1, suite="models"),
    conv("mobilenet.56.1x1a", 256, 56, 96, 24, 1, suite="models"),
    conv("mobilenet.56.1x1b", 256, 56, 24, 144, 1, suite="models"),
    conv("mobilenet.28.1x1a", 256, 28, 144, 32, 1, suite="models"),
    conv("mobilenet.28.1x1b", 256, 28, 32, 192, 1, suite="models"),
    conv("mobilenet.14.1x1a", 256, 14, 384, 64, 1, suite="models"),
    conv("mobilenet.14.1x1b", 256, 14, 96, 576, 1, suite="models"),
    conv("mobilenet.7.1x1a", 256, 7, 960, 160, 1, suite="models"),
    conv("mobilenet.7.1x1b", 256, 7, 320, 1280, 1, suite="models"),
)


def _thread(name: str, thread: str, *args: Any, **options: Any) -> ConvCase:
    return conv(f"thread.{name}", *args, suite="threads", thread=thread, **options)


# "threads": the shapes in which users found XLA's convolutions slow, or without an algorithm; sizes are theirs where
# the thread has them.
_THREADS = (
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
    return conv(name, batch, size, c, k, filter, stride=stride, padding=pad, suite="serve", **options)


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
_SERVE = (
    *(_served("r50", batch, *layer) for batch in (1, 8) for layer in _R50_LAYERS),
    *(_served("mobilenet", 1, *layer) for layer in _MOBILENET_LAYERS),
    *(_served("squeeze", batch, *layer) for batch in (1, 8) for layer in _SQUEEZE_LAYERS),
    *(
        _served("depthwise", batch, size, c, c, f, s, groups=c)
        for batch in (1, 8)
        for size, c, f, s in _DEPTHWISE_LAYERS
    ),
)

CASES = CORE + SPECIAL + MODELS + _CPU + _THREADS + _SERVE

"""The limits of depthwise convolutions, dense products, group-norms, poolings, and of what all convolutions share: the
last value that runs, and its neighbours on both sides; and that every sentence with which native code refuses is tried.

Plans are data: none of this needs a GPU.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest
from helpers import A100
from test_domain_sm90 import DEFAULT, H200, conv, dense

from jaxconv._core.activations import Activation
from jaxconv._plan import Device, Plan, domain
from jaxconv._problem import (
    BatchNormProblem,
    ConvProblem,
    GroupNormProblem,
    NormalisedConvProblem,
    PoolProblem,
    SqueezeExciteProblem,
)

SOURCES = pathlib.Path(__file__).parent.parent / "cuda"
A10 = Device("cuda", "NVIDIA A10", (8, 6), 72)

Refusal = str | None


def of_conv(kernel: str, p: ConvProblem, op="conv_fprop", tile="", splits=1, chunk=0, device: Device = H200) -> Refusal:
    return domain.conv_refusal(op, Plan("native", "", kernel, tile, splits, chunk), p, device)


def of_dense(kernel: str, tile="", splits=1, device: Device = H200, **problem: Any) -> Refusal:
    return domain.dense_refusal(Plan("native", "", kernel, tile, splits), dense(**problem), device)


def depthwise(size: Any = (16, 16), c: int = 64, k: int | None = None, **options: Any) -> ConvProblem:
    return conv(size, c=c, k=c if k is None else k, groups=c, **options)


def normalised(activation: str = "relu6", **options: Any) -> ConvProblem:
    return NormalisedConvProblem(**vars(depthwise(**options)), x_activation=Activation(activation))


def pointwise(activation: str = "relu", **options: Any) -> ConvProblem:
    return NormalisedConvProblem(**vars(conv(filter=1, **options)), x_activation=Activation(activation))


def behind(activation: str) -> ConvProblem:
    return dataclasses.replace(conv(filter=3), activation=Activation(activation))


def in_float32(highest: bool = False, **options: Any) -> ConvProblem:
    precision = (jax.lax.Precision.HIGHEST,) * 2 if highest else DEFAULT
    return dataclasses.replace(conv(dtype="float32", **options), precision=precision, activation=Activation("relu"))


def of_norm(op: str, shape: Any = (64, 32, 32, 64), axis: int = 3, activation: str = "relu", residual=False) -> Refusal:
    p = BatchNormProblem(
        "batchnorm", "bfloat16", shape, axis, True, 0.9, 1e-5, Activation(activation, 0.0), residual, batch=None
    )
    return domain.batchnorm_refusal(op, Plan("native", "", "two_read"), p, H200)


def grouped(size: Any = (16, 16), **options: Any) -> ConvProblem:
    return conv(size, c=32, k=32, groups=4, **options)


def planes(v: int) -> dict[str, Any]:
    """Of 2^15 images of v planes of 4x4 that the filter leaves alone."""
    return dict(size=(v, 4, 4), filter=(1, 3, 3), batch=2**15)


def few(c: int = 3, k: int = 64, size: Any = (32, 32), filter: Any = 3, **options: Any) -> ConvProblem:
    return conv(size, c=c, k=k, filter=filter, **options)


def of_groupnorm(
    kernel: str, shape: Any, groups=4, splits=1, chunk=0, op="groupnorm", dtype="bfloat16", device=H200, **problem: Any
) -> Refusal:
    p = GroupNormProblem("groupnorm", dtype, shape, groups, 1e-5, **problem)
    return domain.groupnorm_refusal(op, Plan("native", "", kernel, "", splits, chunk), p, device)


def of_squeeze(
    shape: Any, hidden=8, splits=1, chunk=16, kernel="one_pass", dtype="bfloat16", device: Device = H200
) -> Refusal:
    p = SqueezeExciteProblem("squeeze_excite", dtype, shape, hidden, Activation("silu"), "sigmoid")
    return domain.squeeze_excite_refusal(Plan("native", "", kernel, "", splits, chunk), p, device)


def of_pool(shape: Any, window: Any = 1, dtype="bfloat16", **options: Any) -> Refusal:
    given = dict(stride=1, padding="VALID", dilation=1, layout=None, algorithm=None, implementation=None) | options
    p = PoolProblem.infer("max_pool", jax.ShapeDtypeStruct(shape, dtype), window, **given)
    return domain.pool_refusal(Plan("native", "", "gather"), p)


@dataclasses.dataclass(frozen=True)
class Edge:
    """`why` of values up to `last` is nothing, and of last + step this sentence."""

    why: Callable[[int], Refusal]
    last: int
    says: str
    step: int = 1


HUGE = 2**30 - 1
VALID = ((0, 0), (0, 0))
COORDINATE = "every coordinate must stay below 2^30"
EDGES = {
    # ---- what all convolutions share
    "images": Edge(lambda v: of_conv("direct", conv((1, 1), 1, 1, 1, batch=v)), HUGE, COORDINATE),
    "channels": Edge(lambda v: of_conv("direct", conv((1, 1), v, 1, 1)), HUGE, COORDINATE),
    "filters": Edge(lambda v: of_conv("direct", conv((1, 1), 1, v, 1)), HUGE, COORDINATE),
    "pixels": Edge(lambda v: of_conv("direct", conv((2**15, v), 1, 1, 1)), 2**15 - 1, COORDINATE),
    "taps": Edge(lambda v: of_conv("direct", conv((v, 2**12), 1, 1, (v, 2**12), padding=VALID)), 2**18 - 1, COORDINATE),
    "taps of channels": Edge(lambda v: of_conv("direct", conv((4, 4), v, 1, 4, VALID)), 2**26 - 1, COORDINATE),
    "taps of filters": Edge(lambda v: of_conv("direct", conv((4, 4), 1, v, 4, VALID)), 2**26 - 1, COORDINATE),
    "strides": Edge(lambda v: of_conv("direct", conv((1, 1), 1, 1, 1, stride=v)), HUGE, COORDINATE),
    "dilations": Edge(lambda v: of_conv("direct", conv((1, 1), 1, 1, 1, dilation=v)), HUGE, COORDINATE),
    "what outputs span": Edge(
        lambda v: of_conv("direct", conv((v + 1, 1), 1, 1, 1, stride=(v, 1), padding=VALID)),
        2**29 - 1,
        COORDINATE,
    ),
    "low padding": Edge(
        lambda v: of_conv("direct", dataclasses.replace(conv((4, 4), 1, 1, 1), padding=((v, 0), (0, 0)))),
        HUGE - 4,
        COORDINATE,
    ),
    "cropping": Edge(
        lambda v: of_conv("direct", dataclasses.replace(conv((4, 4), 1, 1, 1), padding=((-v, 0), (0, 0)))),
        HUGE - 4,
        COORDINATE,
    ),
    "implicit_gemm's rows": Edge(
        lambda v: of_conv("implicit_gemm", conv((2**10, 1), 1, 8, 1, batch=v), tile="64x64"),
        (2**31 - 1 - 4096) // 2**10,
        "fewer than 2^31 pixels",
    ),
    "implicit_gemm's depth": Edge(
        lambda v: of_conv("implicit_gemm", conv((8, 8), v, 8, 8, padding=VALID), tile="64x64"),
        (2**31 - 1 - 4096) // 64,
        "filter elements per channel",
    ),
    "implicit_gemm's phases": Edge(
        lambda v: of_conv(
            "implicit_gemm", conv((2**16, v), 1, 8, 1, stride=(2**16, v), batch=0), "conv_dgrad", "64x64"
        ),
        (2**31 - 1 - 4096) // 2**16,
        "too many phases",
    ),
    "implicit_gemm's tiles": Edge(
        lambda v: of_conv(
            "implicit_gemm",
            conv((8, 8), v, v, 8, VALID, stride=8, groups=v, batch=1),
            "conv_dgrad",
            "64x64",
        ),
        2**25 - 1 - 64,
        "fewer than 2^31 tiles of 64 x 64",
        64,
    ),
    # ---- depthwise
    "depthwise/rows run": Edge(
        lambda v: of_conv("depthwise/rows", depthwise((1, 127), c=v, dilation=18, batch=1)),
        (2**31 - 1) // (8 * 18) // 8 * 8,
        "a run of 8 columns",
        8,
    ),
    "depthwise/mma rows": Edge(
        lambda v: of_conv("depthwise/mma", depthwise((64, 64), filter=(v, 3))), 41, "at most 41 filter rows"
    ),
    "depthwise/mma columns": Edge(
        lambda v: of_conv("depthwise/mma", depthwise((64, 64), filter=(3, v))), 41, "reach at most 41 pixels"
    ),
    "depthwise/mma dilated columns": Edge(
        lambda v: of_conv("depthwise/mma", depthwise((64, 64), filter=(1, 5), dilation=(1, v))),
        10,
        "reach at most 41 pixels",
    ),
    "depthwise/mma rows without Hopper's memory": Edge(
        lambda v: of_conv("depthwise/mma", depthwise((64, 64), filter=(v, 9)), device=A10),
        22,
        "does not fit shared memory",
    ),
    "depthwise/mma channels": Edge(lambda v: of_conv("depthwise/mma", depthwise(c=v)), 64, "a multiple of 8", 1),
    "depthwise/mma planes": Edge(
        lambda v: of_conv("depthwise/mma", depthwise(c=8, **planes(v))), 2**15 - 1, "41 filter rows"
    ),
    "depthwise/conv1d taps": Edge(lambda v: of_conv("depthwise/conv1d", depthwise((64,), filter=v)), 4, "2 to 4 taps"),
    # A thread for every place that the dilation steps over
    "depthwise/conv1d lines": Edge(
        lambda v: of_conv("depthwise/conv1d", depthwise((1, 2), c=2**14, filter=(1, 3), dilation=2**20 - 18, batch=v)),
        2**8 - 1,
        "2^39 vectors",
    ),
    "depthwise/conv1d dilation": Edge(
        lambda v: of_conv("depthwise/conv1d", depthwise((2**27,), filter=2, dilation=v)),
        2**26 - 1,
        "dilation below 2^26",
    ),
    "depthwise/rows dilation of 3x3": Edge(
        lambda v: of_conv("depthwise/rows", depthwise((64, 64), dilation=v)), 18, "along rows up to 18"
    ),
    "depthwise/rows dilation of 5x5": Edge(
        lambda v: of_conv("depthwise/rows", depthwise((64, 64), filter=5, dilation=v)), 6, "5x5 and 7x7 6"
    ),
    "depthwise/rows dilation of 7x7": Edge(
        lambda v: of_conv("depthwise/rows", depthwise((64, 64), filter=7, dilation=v)), 6, "5x5 and 7x7 6"
    ),
    "depthwise/rows low padding": Edge(
        lambda v: of_conv("depthwise/rows", depthwise(padding=((v, 1), (1, 1)))), 2, "padding below the filter's reach"
    ),
    "depthwise/rows planes": Edge(
        lambda v: of_conv("depthwise/rows", depthwise(c=8, **planes(v))), 2**15 - 1, "it needs channels-last"
    ),
    "depthwise/rows_strided low padding": Edge(
        lambda v: of_conv("depthwise/rows_strided", depthwise(stride=2, padding=((v, 1), (1, 1)))),
        2,
        "padding below the filter's reach",
    ),
    "depthwise/rows_mma low padding": Edge(
        lambda v: of_conv("depthwise/rows_mma", depthwise(filter=5, padding=((v, 1), (1, 1)))),
        4,
        "padding below the filter's extent",
    ),
    "depthwise/rows_mma rows": Edge(
        lambda v: of_conv("depthwise/rows_mma", depthwise((2**14, 8), c=8, filter=5, batch=v)),
        16 * (2**16 - 1),
        "fewer than 2^30 rows in all strips",
    ),
    "depthwise/rows_mma pixels": Edge(
        lambda v: of_conv("depthwise/rows_mma", depthwise((v, 8), c=8, filter=5, batch=1)),
        2**23 - 1,
        "pixels in a strip's images",
    ),
    "depthwise/few channels": Edge(lambda v: of_conv("depthwise/few", depthwise(c=v)), 64, "a multiple of 4"),
    "depthwise/few results": Edge(
        lambda v: of_conv("depthwise/few", depthwise((64, 64), batch=v)), 16, "at most 2^22 elements of its result"
    ),
    "depthwise/few results of dgrad": Edge(
        lambda v: of_conv("depthwise/few", depthwise((64, 64), batch=v), "conv_dgrad", device=A10),
        16,
        "at most 2^22 elements of its result",
    ),
    "depthwise/few operands": Edge(
        lambda v: of_conv("depthwise/few", depthwise((64, 64), stride=2, padding=VALID, batch=v)), 64, "at most 2^24"
    ),
    # ---- grouped, stem, sm90
    "grouped planes": Edge(lambda v: of_conv("grouped/mma", grouped(**planes(v))), 2**15 - 1, "fewer than 2^30 planes"),
    "narrow planes": Edge(
        lambda v: of_conv("narrow/rows", few(16, 16, **planes(v))), 2**15 - 1, "fewer than 2^30 planes"
    ),
    "grouped/rows_float32 run": Edge(
        lambda v: of_conv(
            "grouped/rows_float32",
            dataclasses.replace(conv((3, 70), c=v, k=v, groups=v // 8, batch=1), dtype="float32"),
        ),
        2**27 - 8,
        "a run of 16 columns",
        8,
    ),
    "stem row strides": Edge(
        lambda v: of_conv(
            "stem/mma", few(4, 8, (16, v), (16, 1), stride=(16, 1), padding=VALID, batch=1), "conv_dgrad"
        ),
        (2**31 - 1 - 4) // 64,
        "in a stride of rows",
    ),
    "stem planes": Edge(lambda v: of_conv("stem/mma", few(**planes(v))), 2**15 - 1, "fewer than 2^30 planes"),
    "stem pixels of an image": Edge(
        lambda v: of_conv("stem/sm90_narrow_in", few(3, 8, (v, 2**14), (1, 1), batch=1)),
        2**16 - 1,
        COORDINATE,
    ),
    "stem rows of all images": Edge(
        lambda v: of_conv("stem/sm90_narrow_in", few(3, 8, (2**10, 2), (1, 1), batch=v)),
        2**20 - 1,
        "rows of all images",
    ),
    "sm90/wgrad tiles": Edge(
        lambda v: of_conv("sm90/wgrad", conv((1, 1), 2**24, v, 1), "conv_wgrad", "128x256"),
        2**13 * 256,
        "at most 2^30 tiles",
        8,
    ),
    "sm90/product tiles": Edge(
        lambda v: of_conv("sm90/product", conv((1, 1), 64, v, 1, batch=2**27 - 128), tile="128x256"),
        2**10 * 256,
        "at most 2^30 tiles times blocks",
        8,
    ),
    "sm90/normalised channels": Edge(
        lambda v: of_conv("sm90/normalised", pointwise(c=v), "conv_normalised", "128x256"),
        2048,
        "at most 2048 channels",
        8,
    ),
    "sm90/normalised channels of statistics": Edge(
        lambda v: of_conv("sm90/normalised", pointwise(k=v), "conv_normalised_statistics", "128x256"),
        64 * 132,
        "a column of tiles of its own",
        8,
    ),
    "sm90/normalised tiles": Edge(
        lambda v: of_conv(
            "sm90/normalised", pointwise(size=(1, 1), c=64, k=v, batch=2**27 - 128), "conv_normalised", "128x256"
        ),
        2**10 * 256,
        "at most 2^30 tiles times blocks",
        8,
    ),
    "sm90/normalised parts": Edge(
        lambda v: of_conv("sm90/normalised", pointwise(), "conv_normalised_wgrad", "256x64", splits=v),
        4096,
        "at most 4096 parts",
    ),
    "sm90/halo_3d pixels and gaps": Edge(
        lambda v: of_conv("sm90/halo_3d", conv((8, 8, 8), 16, 16, 3, batch=v)), 2**30 // (8 * 9 * 9), "2^30 pixels"
    ),
    "sm90/halo_3d pixels and gaps of wgrad": Edge(
        lambda v: of_conv("sm90/halo_3d", conv((4, 8, 40), 16, 16, 3, batch=v), "conv_wgrad"),
        2**30 // (4 * 384),
        "2^30 pixels",
    ),
    # ---- dense
    "gemm M": Edge(lambda v: of_dense("gemm", "64x64", m=v, k=1, n=1), 2**31 - 1 - 4096, "at most 2147479551"),
    "gemm N": Edge(lambda v: of_dense("gemm", "64x64", m=1, k=1, n=v), 2**31 - 1 - 4096, "at most 2147479551"),
    "gemm K": Edge(lambda v: of_dense("gemm", "64x64", m=1, k=v, n=1), 2**31 - 1 - 4096, "at most 2147479551"),
    "gemm instances": Edge(
        lambda v: of_dense("gemm", "64x64", m=1, k=1, n=1, batch=v, batched=("x", "w")),
        2**31 - 1 - 4096,
        "at most 2147479551",
    ),
    "gemm parts": Edge(lambda v: of_dense("gemm", "64x64", v), 65535, "at most 65535 parts"),
    "sm90/rows parts": Edge(lambda v: of_dense("sm90/rows", "64x128", v, k=648), 11, "at most ceil(K / 64) parts"),
    "sm90/rows outputs": Edge(
        lambda v: of_dense("sm90/rows", "64x128", m=2**21, k=8, n=v, batch=8, batched=("x", "w")),
        2**17,
        "at most 2^41 outputs",
        8,
    ),
    "sm90/product K in TF32": Edge(
        lambda v: of_dense("sm90/product", "128x128", k=v, dtype="float32", trans_x=True),
        256,
        "in TF32 it needs K to be a multiple of 8, got 257",
    ),
    # ---- group-norms
    "groupnorm elements": Edge(
        lambda v: of_groupnorm("two_read", (1, v, 8)), 2**27 - 1, "images of fewer than 2^30 elements"
    ),
    "groupnorm images": Edge(lambda v: of_groupnorm("two_read", (v, 1, 8)), 2**30 - 1, "2^30 images times splits"),
    "groupnorm images times splits": Edge(
        lambda v: of_groupnorm("two_read", (v, 8, 8), splits=4), 2**28 - 1, "2^30 images times splits"
    ),
    "groupnorm instances": Edge(
        lambda v: of_groupnorm("two_read", (2**10, 8, 8), batch=v), 2**20 - 1, "2^30 images times splits"
    ),
    "groupnorm splits": Edge(lambda v: of_groupnorm("two_read", (2, 8, 8), splits=v), 65535, "splits of 1 to 65535"),
    "groupnorm channels and groups": Edge(
        lambda v: of_groupnorm("two_read", (2, 8, v), groups=v), 8 * (8192 // 24), "bytes of shared memory of 49152", 8
    ),
    "interleaved distance": Edge(
        lambda v: of_groupnorm("interleaved", (2, 64, 64), splits=v, chunk=7), 7, "no fewer items than an image has, 8"
    ),
    "resident CTAs": Edge(
        lambda v: of_groupnorm("resident", (v, 4, 16), splits=2, chunk=16), 2**28 - 1, "fewer than 2^30 CTAs"
    ),
    "resident memory": Edge(
        lambda v: of_groupnorm("resident", (2, 4096, 256), 32, chunk=v, op="groupnorm_backward", device=A10),
        480,
        "does not fit in the device",
        16,
    ),
    "resident width": Edge(
        lambda v: of_groupnorm("resident", (2, 64, 1024), 128, chunk=v), 512, "in multiples of 16 bytes up to 512", 16
    ),
    # ---- squeeze-and-excitations
    "squeeze elements": Edge(lambda v: of_squeeze((1, v, 8)), 2**27 - 1, "images of fewer than 2^30 elements"),
    "squeeze hidden": Edge(lambda v: of_squeeze((2, 9, 8), v), 2048, "at most 2048 hidden numbers, got 2049"),
    "squeeze width": Edge(
        lambda v: of_squeeze((2, 9, 8192), chunk=v, splits=2), 8192, "in multiples of 16 bytes up to 8192", 16
    ),
    "squeeze CTAs": Edge(lambda v: of_squeeze((v, 9, 8), splits=2), 2**29 - 1, "fewer than 2^30 CTAs"),
    # ---- poolings
    "pool taps": Edge(lambda v: of_pool((1, 2, 300, 8), (1, v)), 255, "at most 255 taps, got 256"),
    "pool extents": Edge(lambda v: of_pool((1, 1, v, 8)), 2**29 - 1, "below 2^29, got 536870912"),
    "pool strides": Edge(lambda v: of_pool((1, 1, 2, 8), stride=(1, v)), 2**29 - 1, "below 2^29"),
    "pool windows": Edge(
        lambda v: of_pool((1, 1, v + 1, 8), (1, 2), dilation=(1, v)), 2**28 - 1, "below 2^29, got 536870912"
    ),
    "pool threads": Edge(lambda v: of_pool((v, 2, 2**10, 8)), 2**20 - 1, "fewer than 2^31 threads"),
    "pool threads of single elements": Edge(lambda v: of_pool((v, 2, 2**10, 1)), 2**20 - 1, "fewer than 2^31 threads"),
}


@pytest.mark.parametrize("name", EDGES)
def test_a_limit_is_where_it_says(name):
    edge = EDGES[name]
    found = [edge.why(edge.last + i * edge.step) for i in (-1, 0, 1)]
    print(found)
    assert found[1] is None
    assert found[2] is not None and edge.says in found[2]


# What is refused whatever the extents, and the nearest that is not.
YES_AND_NO: dict[str, tuple[Callable[[], Refusal], Callable[[], Refusal], str]] = {
    "a product goes back in TF32": (
        lambda: of_conv("sm90/product", in_float32(highest=True), "conv_gradient", "128x128"),
        lambda: of_conv("sm90/product", in_float32(), "conv_gradient", "128x128"),
        "through an activation it takes float32 in TF32 only",
    ),
    "a product goes back without groups": (
        lambda: of_conv("sm90/product", in_float32(c=128, k=128, groups=2), "conv_gradient", "128x128"),
        lambda: of_conv("sm90/product", in_float32(c=128, k=128), "conv_gradient", "128x128"),
        "through an activation it takes one group",
    ),
    "a product goes back without strides": (
        lambda: of_conv("sm90/product", in_float32(stride=2), "conv_gradient", "128x128"),
        lambda: of_conv("sm90/product", in_float32(), "conv_gradient", "128x128"),
        "through an activation it takes strides of 1",
    ),
    "sums in TF32": (
        lambda: of_conv("sm90/sums", in_float32(True, c=128, filter=1), "conv_dgrad_sums", "256x64"),
        lambda: of_conv("sm90/sums", in_float32(c=128, filter=1), "conv_dgrad_sums", "256x64"),
        "with sums it takes float32 in TF32 only",
    ),
    "sums of whole columns": (
        lambda: of_conv("sm90/sums", conv(c=192, filter=1), "conv_dgrad_sums", "64x128"),
        lambda: of_conv("sm90/sums", conv(c=128, filter=1), "conv_dgrad_sums", "64x128"),
        "it needs multiples of 128 channels of x, got 192",
    ),
    "a product sums up for no batch-norm": (
        lambda: of_conv("sm90/product", conv(c=128, filter=1), "conv_dgrad_sums", "128x128"),
        lambda: of_conv("sm90/sums", conv(c=128, filter=1), "conv_dgrad_sums", "64x128"),
        "it makes no sums",
    ),
    "sums alone": (
        lambda: of_conv("sm90/sums", conv(c=128, filter=1), "conv_dgrad", "64x128"),
        lambda: of_conv("sm90/sums", conv(c=128, filter=1), "conv_dgrad_sums", "64x128"),
        "it makes dgrads with a batch-norm's sums only",
    ),
    "a product adds nothing in float32": (
        lambda: of_dense("sm90/product", "128x128", dtype="float32", addend=True),
        lambda: of_dense("sm90/product", "128x128", dtype="bfloat16", addend=True),
        "in float32 it takes no addend",
    ),
    "signs of a relu": (
        lambda: of_norm("batchnorm_signs", activation="silu"),
        lambda: of_norm("batchnorm_signs"),
        "it needs relu as activation",
    ),
    "signs of channels last": (
        lambda: of_norm("batchnorm_signs", axis=1),
        lambda: of_norm("batchnorm_signs"),
        "it needs channels last, and one instance",
    ),
    "signs of rows in whole bytes": (
        lambda: of_norm("batchnorm_signs", (64, 32, 32, 68)),
        lambda: of_norm("batchnorm_signs", (64, 32, 32, 72)),
        "it cannot cut rows of 68 channels into 16-byte vectors and whole bytes of signs",
    ),
    "signs of what is read through a ring": (
        lambda: of_norm("batchnorm_signs", (2, 32, 32, 64)),
        lambda: of_norm("batchnorm_signs"),
        "it needs arrays of at least 4 MB, got 262144 bytes",
    ),
    "a residual or an addend": (
        lambda: of_norm("batchnorm_backward_add", residual=True),
        lambda: of_norm("batchnorm_backward_add"),
        "it cannot read a residual and add too",
    ),
    "two norms of an activation that both have": (
        lambda: of_norm("batchnorm_shortcut_backward", activation="elu"),
        lambda: of_norm("batchnorm_shortcut_backward"),
        "it takes relu, silu and gelu only",
    ),
    "direct adds to no dgrad": (
        lambda: of_conv("direct", conv(), "conv_dgrad_add"),
        lambda: of_conv("sm90/product", conv(), "conv_dgrad_add", "128x128"),
        "only sm90, narrow and depthwise/rows_mma can add to a dgrad",
    ),
    "depthwise/rows adds to no dgrad": (
        lambda: of_conv("depthwise/rows", depthwise(filter=3), "conv_dgrad_add"),
        lambda: of_conv("depthwise/rows_mma", depthwise(filter=5), "conv_dgrad_add"),
        "only sm90, narrow and depthwise/rows_mma can add to a dgrad",
    ),
    "implicit_gemm adds to no dgrad": (
        lambda: of_conv("implicit_gemm", few(8, 16), "conv_dgrad_add"),
        lambda: of_conv("narrow/rows", few(8, 16), "conv_dgrad_add"),
        "only sm90, narrow and depthwise/rows_mma can add to a dgrad",
    ),
    "halo_3d adds to no dgrad": (
        lambda: of_conv("sm90/halo_3d", conv(filter=3), "conv_dgrad_add"),
        lambda: of_conv("sm90/halo", conv(filter=3), "conv_dgrad_add"),
        "sm90/halo_3d takes no addend",
    ),
    "halo sums up for no batch-norm": (
        lambda: of_conv("sm90/halo", conv(filter=3), "conv_dgrad_sums"),
        lambda: of_conv("sm90/halo", conv(filter=3), "conv_gradient"),
        "no sums for a batch-norm",
    ),
    "direct goes back through nothing": (
        lambda: of_conv("direct", conv(filter=3), "conv_gradient"),
        lambda: of_conv("sm90/halo", conv(filter=3), "conv_gradient"),
        "only sm90 and narrow go back through an activation in their dgrads",
    ),
    "halo adds nothing behind a derivative": (
        lambda: of_conv("sm90/halo", behind("relu"), "conv_gradient_add"),
        lambda: of_conv(
            "narrow/rows", dataclasses.replace(few(8, 16), activation=Activation("relu")), "conv_gradient_add"
        ),
        "only narrow adds to a dgrad behind an activation's derivative",
    ),
    "narrow has some derivatives": (
        lambda: of_conv(
            "narrow/rows", dataclasses.replace(few(8, 16), activation=Activation("gelu")), "conv_gradient_add"
        ),
        lambda: of_conv(
            "narrow/rows", dataclasses.replace(few(8, 16), activation=Activation("tanh")), "conv_gradient_add"
        ),
        "narrow/rows has no derivative of gelu",
    ),
    "direct goes back through no norm": (
        lambda: of_conv("direct", conv(filter=3), "conv_norm_gradient"),
        lambda: of_conv("sm90/product", conv(filter=3), "conv_norm_gradient"),
        "only sm90 goes back through a batch-norm in its dgrads",
    ),
    "behind a norm are some derivatives": (
        lambda: of_conv("sm90/product", behind("tanh"), "conv_norm_gradient"),
        lambda: of_conv("sm90/product", behind("relu6"), "conv_norm_gradient"),
        "behind a batch-norm it has no derivative of tanh",
    ),
    "a norm's tiles": (
        lambda: of_conv("sm90/product", conv(c=128, filter=3), "conv_norm_gradient", "256x128"),
        lambda: of_conv("sm90/product", conv(c=128, filter=3), "conv_norm_gradient", "128x128"),
        "no tile",
    ),
    "a norm's sums of 3x3": (
        lambda: of_conv("sm90/sums", conv(c=128, filter=3), "conv_norm_gradient", "64x128"),
        lambda: of_conv("sm90/sums", conv(c=128, filter=1), "conv_norm_gradient", "64x128"),
        "1x1",
    ),
    "halo goes back through norms in float32": (
        lambda: of_conv("sm90/halo", conv(filter=3), "conv_norm_gradient"),
        lambda: of_conv("sm90/halo", in_float32(), "conv_norm_gradient"),
        "takes float32 only",
    ),
    "a norm's sums of float32": (
        lambda: of_conv("sm90/sums", in_float32(c=128, filter=1), "conv_norm_gradient", "64x128"),
        lambda: of_conv("sm90/product", in_float32(c=128, filter=1), "conv_norm_gradient", "128x128"),
        "16-bit arrays only",
    ),
    "halo has some derivatives": (
        lambda: of_conv("sm90/halo", behind("silu"), "conv_gradient"),
        lambda: of_conv("sm90/halo", behind("sigmoid"), "conv_gradient"),
        "sm90/halo has no derivative of silu",
    ),
    "grouped adds no residual": (
        lambda: of_conv("grouped/mma", grouped(), "conv_add"),
        lambda: of_conv("direct", grouped(), "conv_add"),
        "cannot add a residual",
    ),
    "stem adds no residual": (
        lambda: of_conv("stem/sm90_narrow_in", few(8), "conv_add"),
        lambda: of_conv("narrow/rows", few(8), "conv_add"),
        "cannot add a residual",
    ),
    "direct sums nothing up": (
        lambda: of_conv("direct", conv(), "conv_statistics"),
        lambda: of_conv("sm90/statistics", conv(), "conv_statistics", "128x128"),
        "only sm90 and grouped take statistics",
    ),
    "direct sums nothing up that it adds to": (
        lambda: of_conv("direct", conv(), "conv_add_statistics"),
        lambda: of_conv("sm90/statistics", conv(), "conv_add_statistics", "128x128"),
        "only sm90 takes statistics of a sum",
    ),
    "grouped takes no statistics of a sum": (
        lambda: of_conv("grouped/statistics", grouped(), "conv_add_statistics"),
        lambda: of_conv("grouped/statistics", grouped(), "conv_statistics"),
        "only sm90 takes statistics of a sum",
    ),
    "normalised by sm90": (
        lambda: of_conv("sm90/product", normalised(), "conv_normalised", "128x128"),
        lambda: of_conv("depthwise/rows", normalised(), "conv_normalised"),
        "only normalised normalises",
    ),
    "normalised by implicit_gemm": (
        lambda: of_conv("implicit_gemm", pointwise(), "conv_normalised"),
        lambda: of_conv("sm90/normalised", pointwise(), "conv_normalised", "128x256"),
        "only depthwise kernels and sm90/normalised normalise",
    ),
    "sm90/normalised of what is not normalised": (
        lambda: of_conv("sm90/normalised", conv(), "conv_fprop", "128x256"),
        lambda: of_conv("sm90/normalised", pointwise(), "conv_normalised", "128x256"),
        "of what it normalises only",
    ),
    "sm90/normalised of stride 2": (
        lambda: of_conv("sm90/normalised", pointwise(stride=2), "conv_normalised_wgrad", "128x256"),
        lambda: of_conv("sm90/normalised", pointwise(), "conv_normalised_wgrad", "128x256"),
        "1x1 convolution of stride 1",
    ),
    "sm90/normalised before gelu": (
        lambda: of_conv("sm90/normalised", pointwise("gelu"), "conv_normalised_statistics", "128x128"),
        lambda: of_conv("sm90/normalised", pointwise("none"), "conv_normalised_statistics", "128x128"),
        "relu, relu6, silu or no activation",
    ),
    "sm90/normalised in float32": (
        lambda: of_conv("sm90/normalised", pointwise(dtype="float32"), "conv_normalised", "256x64"),
        lambda: of_conv("sm90/normalised", pointwise(dtype="float16"), "conv_normalised", "256x64"),
        "16-bit arrays only",
    ),
    "sm90/normalised of a dgrad": (
        lambda: of_conv("sm90/normalised", pointwise(), "conv_normalised_dx", "128x256"),
        lambda: of_conv("sm90/normalised", pointwise(), "conv_normalised_wgrad", "128x256"),
        "no dgrads of what it normalises",
    ),
    "sm90/normalised in another tile": (
        lambda: of_conv("sm90/normalised", pointwise(), "conv_normalised", "256x128"),
        lambda: of_conv("sm90/normalised", pointwise(), "conv_normalised", "128x128"),
        'no tile "256x128"',
    ),
    "sm90/normalised in parts": (
        lambda: of_conv("sm90/normalised", pointwise(), "conv_normalised", "128x256", splits=2),
        lambda: of_conv("sm90/normalised", pointwise(), "conv_normalised_wgrad", "128x256", splits=4096),
        "at most 4096 parts",
    ),
    "sm90/normalised in no parts": (
        lambda: of_conv("sm90/normalised", pointwise(), "conv_normalised_wgrad", "128x256", splits=0),
        lambda: of_conv("sm90/normalised", pointwise(), "conv_normalised_wgrad", "128x256", splits=1),
        "splits of at least 1",
    ),
    "sm90/normalised on an A10": (
        lambda: of_conv("sm90/normalised", pointwise(), "conv_normalised", "128x256", device=A10),
        lambda: of_conv("sm90/normalised", pointwise(), "conv_normalised", "128x256"),
        "compute capability 9.0",
    ),
    "normalised under 5x5": (
        lambda: of_conv("depthwise/rows_strided", normalised(stride=2, filter=5), "conv_normalised_wgrad"),
        lambda: of_conv("depthwise/rows_strided", normalised(stride=2), "conv_normalised_wgrad"),
        "3x3 filter",
    ),
    "normalised before gelu": (
        lambda: of_conv("depthwise/rows", normalised("gelu"), "conv_normalised"),
        lambda: of_conv("depthwise/rows", normalised("silu"), "conv_normalised"),
        "and relu, relu6 or silu",
    ),
    "normalised in float32": (
        lambda: of_conv("depthwise/rows", normalised(dtype="float32"), "conv_normalised"),
        lambda: of_conv("depthwise/rows", normalised(dtype="float16"), "conv_normalised"),
        "16-bit arrays",
    ),
    "depthwise of two channels a group": (
        lambda: of_conv("depthwise/fma", conv(c=64, k=64, groups=32)),
        lambda: of_conv("depthwise/fma", conv(c=64, k=128, groups=64)),
        "one input channel per group",
    ),
    "depthwise/rows of three filters a channel": (
        lambda: of_conv("depthwise/rows", depthwise(k=3 * 64)),
        lambda: of_conv("depthwise/rows", depthwise(k=4 * 64)),
        "2, 4 or 8 times C",
    ),
    "depthwise/rows_strided of stride 3": (
        lambda: of_conv("depthwise/rows_strided", depthwise(stride=3)),
        lambda: of_conv("depthwise/rows_strided", depthwise(stride=2)),
        "of stride 2",
    ),
    "depthwise/rows_mma of 3x3": (
        lambda: of_conv("depthwise/rows_mma", depthwise(filter=3)),
        lambda: of_conv("depthwise/rows_mma", depthwise(filter=7)),
        "5x5 or 7x7",
    ),
    "depthwise/few of stride 3": (
        lambda: of_conv("depthwise/few", depthwise(stride=3)),
        lambda: of_conv("depthwise/few", depthwise(stride=2)),
        "3x3 and 5x5 also of stride 2",
    ),
    "depthwise/few of 7x7 and stride 2": (
        lambda: of_conv("depthwise/few", depthwise(filter=7, stride=2)),
        lambda: of_conv("depthwise/few", depthwise(filter=5, stride=2)),
        "3x3 and 5x5 also of stride 2",
    ),
    "depthwise/few's dgrad of stride 2": (
        lambda: of_conv("depthwise/few", depthwise(stride=2), "conv_dgrad"),
        lambda: of_conv("depthwise/few", depthwise(), "conv_dgrad"),
        "not dilated, of stride 1",
    ),
    "depthwise/few's weight gradient": (
        lambda: of_conv("depthwise/few", depthwise(), "conv_wgrad"),
        lambda: of_conv("depthwise/few", depthwise(), device=A10),
        "no weight gradient",
    ),
    "grouped, of volumes": (
        lambda: of_conv("grouped/mma", grouped((4, 8, 8))),
        lambda: of_conv("grouped/mma", grouped((4, 8, 8), filter=(1, 3, 3))),
        "one tap, stride 1 and no padding on the first axis",
    ),
    "stem, of volumes": (
        lambda: of_conv("stem/mma", few(size=(4, 8, 8))),
        lambda: of_conv("stem/mma", few(size=(4, 8, 8), filter=(1, 3, 3))),
        "one tap, stride 1 and no padding on the first axis",
    ),
    "stem/mma's tile": (
        lambda: of_conv("stem/mma", few(), tile="64x64"),
        lambda: of_conv("stem/mma", few()),
        "it has one tile",
    ),
    "stem/sm90_narrow_in's taps far apart": (
        lambda: of_conv("stem/sm90_narrow_in", few(8, filter=(2, 5), stride=(1, 8), size=(64, 1024), dilation=(32, 4))),
        lambda: of_conv("stem/sm90_narrow_in", few(8, filter=(2, 5), stride=(1, 8), size=(64, 1024), dilation=(8, 4))),
        "too far apart",
    ),
    "stem/sm90_narrow_in's filter rows far apart": (
        lambda: of_conv(
            "stem/sm90_narrow_in", few(8, filter=(2, 4), stride=(1, 8), dilation=(32, 1), size=(64, 1024)), "conv_wgrad"
        ),
        lambda: of_conv("stem/sm90_narrow_in", few(8, filter=(2, 4), size=(64, 1024)), "conv_wgrad"),
        "filter rows are too far apart",
    ),
    "sm90/wgrad's tiles, steps and parts": (
        lambda: of_conv("sm90/wgrad", conv((1, 1), 2**24, 2**21, 1, batch=2**31 - 4097), "conv_wgrad", "128x256", 112),
        lambda: of_conv("sm90/wgrad", conv((1, 1), 2**24, 2**21, 1, batch=2**31 - 4097), "conv_wgrad", "128x256", 111),
        "overflow 64 bits",
    ),
    "sm90/halo_3d's filter in wgrad": (
        lambda: of_conv("sm90/halo_3d", conv((4, 8, 40), 16, 16, (3, 1, 3)), "conv_wgrad"),
        lambda: of_conv("sm90/halo_3d", conv((4, 8, 40), 16, 16, 3), "conv_wgrad"),
        "a 3x3x3 filter",
    ),
    "sm90/halo_3d's rows in wgrad": (
        lambda: of_conv("sm90/halo_3d", conv((4, 8, 8), 16, 16, 3), "conv_wgrad"),
        lambda: of_conv("sm90/halo_3d", conv((4, 40, 8), 16, 16, 3), "conv_wgrad"),
        "rows are too short",
    ),
    "a dense product of two transposes": (
        lambda: of_dense("sm90/product", "128x128", trans_x=True, trans_w=True),
        lambda: of_dense("sm90/product", "128x128", trans_x=True),
        "both operands transposed",
    ),
    "a dense product of nothing": (
        lambda: of_dense("sm90/product", "128x128", k=0),
        lambda: of_dense("sm90/product", "128x128", k=8),
        "K of at least 1",
    ),
    "a swapped product with an addend": (
        lambda: of_dense("sm90/product_swapped", "256x128", addend=True),
        lambda: of_dense("sm90/product_swapped", "256x128"),
        "neither an addend",
    ),
    "a swapped product with a bias by row": (
        lambda: of_dense("sm90/product_swapped", "256x128", bias="row"),
        lambda: of_dense("sm90/product_swapped", "256x128", bias="column"),
        "nor a bias by row",
    ),
    "sm90/rows of a transpose": (
        lambda: of_dense("sm90/rows", "64x128", trans_x=True),
        lambda: of_dense("sm90/rows", "64x128", trans_w=True),
        "x transposed",
    ),
    "a product back through an activation, of w stored (K, N)": (
        lambda: of_dense("sm90/gradient", "128x256"),
        lambda: of_dense("sm90/gradient", "128x256", trans_w=True),
        "w stored (N, K)",
    ),
    "such a product of instances": (
        lambda: of_dense("sm90/gradient", "128x256", trans_w=True, batch=2, batched=("x",)),
        lambda: of_dense("sm90/gradient", "128x256", trans_w=True),
        "one instance",
    ),
    "such a product with a bias": (
        lambda: of_dense("sm90/gradient", "128x256", trans_w=True, bias="column"),
        lambda: of_dense("sm90/gradient", "128x256", trans_w=True),
        "neither a bias nor an addend",
    ),
    "such a product of many columns": (
        lambda: of_dense("sm90/gradient", "128x256", trans_w=True, n=132 * 256 + 8),
        lambda: of_dense("sm90/gradient", "128x256", trans_w=True, n=132 * 256),
        "132 columns of tiles",
    ),
    "a product back through a gate, of w stored (K, N)": (
        lambda: of_dense("sm90/gated_gradient", "128x256"),
        lambda: of_dense("sm90/gated_gradient", "128x256", trans_w=True),
        "w stored (N, K)",
    ),
    "its columns of tiles": (
        lambda: of_dense("sm90/gated_gradient", "256x128", trans_w=True, n=132 * 128 + 8),
        lambda: of_dense("sm90/gated_gradient", "256x128", trans_w=True, n=132 * 128),
        "132 columns of tiles",
    ),
    "its tile": (
        lambda: of_dense("sm90/gated_gradient", "128x128", trans_w=True),
        lambda: of_dense("sm90/gated_gradient", "256x128", trans_w=True),
        'no tile "128x128"',
    ),
    "a gated product of w stored (N, K)": (
        lambda: of_dense("sm90/gated", "128x256", trans_w=True),
        lambda: of_dense("sm90/gated", "128x256"),
        "x stored (M, K) and w stored (K, N)",
    ),
    "a gated product of instances": (
        lambda: of_dense("sm90/gated", "128x256", batch=2, batched=("x",)),
        lambda: of_dense("sm90/gated", "128x256"),
        "one instance",
    ),
    "a gated product with a bias by row": (
        lambda: of_dense("sm90/gated", "128x256", bias="row"),
        lambda: of_dense("sm90/gated", "128x256", bias="column"),
        "a bias by column or none, and no addend",
    ),
    "a gated product with an addend": (
        lambda: of_dense("sm90/gated", "128x256", addend=True),
        lambda: of_dense("sm90/gated", "128x256"),
        "a bias by column or none, and no addend",
    ),
    "a gated product of odd halves": (
        lambda: of_dense("sm90/gated", "128x256", n=264),
        lambda: of_dense("sm90/gated", "128x256", n=272),
        "halves of N of a multiple of 8 columns, got N = 264",
    ),
    "a gated product in float32": (
        lambda: of_dense("sm90/gated", "128x256", dtype="float32"),
        lambda: of_dense("sm90/gated", "128x256", dtype="float16"),
        "it takes 16-bit arrays only",
    ),
    "a gated product's tile": (
        lambda: of_dense("sm90/gated", "256x64"),
        lambda: of_dense("sm90/gated", "256x128"),
        'no tile "256x64"',
    ),
    "layer-norms of more pixels": (
        lambda: of_groupnorm("rows", (2, 2, 64), 1),
        lambda: of_groupnorm("rows", (2, 1, 64), 1),
        "images of one pixel",
    ),
    "layer-norms with an activation": (
        lambda: of_groupnorm("rows", (2, 1, 64), 1, activation=Activation("silu")),
        lambda: of_groupnorm("rows", (2, 1, 64), 1),
        "no activation",
    ),
    "layer-norms of many instances": (
        lambda: of_groupnorm("rows", (2, 1, 64), 1, batch=65536),
        lambda: of_groupnorm("rows", (2, 1, 64), 1, batch=65535),
        "at most 65535 instances",
    ),
    "layer-norms of odd channels": (
        lambda: of_groupnorm("rows", (2, 1, 12), 1),
        lambda: of_groupnorm("rows", (2, 1, 12), 1, dtype="float32"),
        "12 channels are no multiple of 8",
    ),
    "clusters of three": (
        lambda: of_groupnorm("resident", (2, 64, 16), splits=3, chunk=16),
        lambda: of_groupnorm("resident", (2, 64, 16), splits=4, chunk=16),
        "1, 2, 4 or 8 CTAs, got 3",
    ),
    "clusters of sixteen": (
        lambda: of_groupnorm("resident", (2, 64, 16), splits=16, chunk=16),
        lambda: of_groupnorm("resident", (2, 64, 16), splits=8, chunk=16),
        "1, 2, 4 or 8 CTAs, got 16",
    ),
    "excitations by three CTAs": (
        lambda: of_squeeze((2, 9, 64), splits=3, chunk=128),
        lambda: of_squeeze((2, 9, 64), splits=4, chunk=128),
        "1, 2, 4 or 8 CTAs, got 3",
    ),
    "excitations by clusters of an older GPU": (
        lambda: of_squeeze((2, 9, 64), splits=2, chunk=128, device=A100),
        lambda: of_squeeze((2, 9, 64), splits=1, chunk=128, device=A100),
        "clusters need a GPU of compute capability 9.0",
    ),
    "excitations in tiles that a cluster does not hold": (
        lambda: of_squeeze((2, 9, 48), splits=4, chunk=32),
        lambda: of_squeeze((2, 9, 64), splits=4, chunk=32),
        "its 3 tiles of channels do not divide a cluster of 4",
    ),
    "excitations of odd channels": (
        lambda: of_squeeze((2, 9, 12)),
        lambda: of_squeeze((2, 9, 12), dtype="float32", chunk=48),
        "12 channels are no multiple of 8",
    ),
    "excitations in float64": (
        lambda: of_squeeze((2, 9, 8), dtype="float64"),
        lambda: of_squeeze((2, 9, 8), dtype="float32", chunk=32),
        "got float64",
    ),
    "excitations by another kernel": (
        lambda: of_squeeze((2, 9, 8), kernel="two_pass"),
        lambda: of_squeeze((2, 9, 8)),
        "no such kernel",
    ),
    "clusters of an older GPU": (
        lambda: of_groupnorm("resident", (2, 64, 16), splits=2, chunk=16, device=A100),
        lambda: of_groupnorm("resident", (2, 64, 16), splits=1, chunk=16, device=A100),
        "clusters need a GPU of compute capability 9.0",
    ),
}


@pytest.mark.parametrize("name", YES_AND_NO)
def test_what_is_refused_and_what_is_not(name):
    no, yes, says = YES_AND_NO[name]
    assert yes() is None
    why = no()
    assert why is not None and says in why


@pytest.mark.parametrize("kernel", ["depthwise/rows", "depthwise/rows_strided", "depthwise/rows_mma"])
def test_hoppers_depthwise_kernels_run_on_nothing_else(kernel):
    p = depthwise(filter=5, stride=2 if kernel.endswith("strided") else 1, dtype="float32" if kernel == "depthwise/rows"
                  else "bfloat16")  # fmt: skip
    assert of_conv(kernel, p) is None
    for capability in (None, (8, 0), (8, 9), (10, 0), (12, 0)):
        assert "9.0" in (of_conv(kernel, p, device=dataclasses.replace(H200, compute_capability=capability)) or "")


def test_partial_sums_of_more_bytes_than_a_number_has_are_the_largest_number():
    """2^64 bytes, of a plan that somebody made by hand: no workspace is as large."""
    p = conv((1, 1), 2**16, 2**16, 1)
    for kernel, of in (("direct", p), ("depthwise/fma", depthwise((1, 1), c=2**16, k=2**32 - 2**16, filter=1))):
        plan = Plan("native", "", kernel, splits=2**50)
        assert domain.conv_workspace("conv_wgrad", plan, of) == 2**63 - 1
    assert domain.conv_workspace("conv_wgrad", Plan("native", "", "direct", splits=4), p) == 4 * 2**32 * 4


def test_what_a_depthwise_filter_needs_of_channels_and_padding():
    for c in (56, 63, 64, 65, 72):
        for kernel, p in (("rows", depthwise(c=c)), ("rows_strided", depthwise(c=c, stride=2))):
            assert (of_conv(f"depthwise/{kernel}", p) is None) == (c % 8 == 0)
        assert (of_conv("depthwise/conv1d", depthwise((64,), c=c)) is None) == (c % 8 == 0)
        assert (of_conv("depthwise/conv1d", depthwise((64,), c=c, dtype="float32")) is None) == (c % 4 == 0)
        assert of_conv("depthwise/fma", depthwise(c=c)) is None
    for low, high in (
        (0, 0),
        (2, 2),
        (3, 0),
        (0, 3),
        (-1, 1),
        (1, -1),
    ):  # a window without a pixel, a pixel without a window
        why = of_conv("depthwise/rows", depthwise(padding=((low, high), (1, 1))))
        assert (why is None) == (max(low, high) < 3 and min(low, high) >= 0), why


# ----------------------------------------------------------------------------------------------------------------------
# Whether that is all

# What no problem that Python makes can be. The first is said to hand-made calls (test_hostile_calls.py).
UNREACHABLE = {"it needs groups of at least 1", "its pooling is not one of the convolution's result"}


def sentences() -> Iterator[str]:
    """The texts, up to a number in them, with which cuda/**/domain.* refuse."""
    for path in sorted([*SOURCES.rglob("*domain.*"), SOURCES / "gemm" / "sm90_tiles.h"]):
        text = re.sub(r"//[^\n]*", "", path.read_text())
        for match in re.finditer(r'(?:return|\?|:|=)\s*(?:std::string\()?((?:"(?:[^"\\\n]|\\.)*"\s*)+)', text):
            sentence = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', match[1])).replace('\\"', '"')
            if len(sentence) > 12 and " " in sentence:
                yield sentence


RECORDER = """
import atexit, json, os
from jaxconv._core import native

said = set()
for name in [name.removesuffix("_refusal") for name in dir(native.cpu) if name.endswith("_refusal")]:
    def ask(*args, _of=getattr(native.cpu, name + "_refusal")):
        why = _of(*args)
        said.add(why)
        return why
    setattr(native.cpu, name + "_refusal", ask)
atexit.register(lambda: open(os.environ["SAID"], "w").write(json.dumps(sorted(said))))
"""


@pytest.mark.slow
@pytest.mark.skipif(not SOURCES.exists(), reason="it reads the sources")
def test_every_sentence_is_tried(tmp_path):
    """By the tests that look at limits: a new one without a test is found here."""
    (tmp_path / "what_is_said.py").write_text(RECORDER)
    here = pathlib.Path(__file__).parent
    files = [
        *sorted(here.glob("test_domain_*.py")),
        *(here / f"test_conv_{n}.py" for n in ("integer", "pooled", "scaled", "shortcut")),
        *(here / f"test_{n}.py" for n in ("groupnorm", "pool")),
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "what_is_said", "-p", "no:cacheprovider", "-k"]
    command += [
        "not every_sentence and (domain or refus or resident or planned or plan or many_channels or is_said)",
        *files,
    ]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "SAID": str(tmp_path / "said.json")}
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    said = json.loads((tmp_path / "said.json").read_text())
    wanted = set(sentences())
    assert len(wanted) > 120
    missing = {sentence for sentence in wanted if not any(sentence in why for why in said)}
    assert missing == UNREACHABLE

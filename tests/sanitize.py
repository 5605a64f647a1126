"""Watches small cases of every CUDA kernel with compute-sanitizer; not collected by pytest.

    python tests/sanitize.py --tool memcheck            # every part
    python tests/sanitize.py --tool racecheck sm90      # the parts whose name contains "sm90"
    python tests/sanitize.py conv/sm90/halo/float32     # that part alone, unwatched

A part is an op, a kernel and an element type: its memory layouts, tiles, operators and access widths (extents that
16-byte accesses divide, and ones that nothing divides), and of a reduction in parts also that in one. Each runs in a
process of its own, which ends in an error if the tool reports one. Results are not compared here, the test suite does
that. XLA's own kernels are not watched, and every program is a list of custom calls, so that XLA has next to nothing to
compile.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import direct_calls
import jax
import numpy as np

from jaxconv import _plan, _problem
from jaxconv._core import activations, primitives
from jaxconv._ops import conv_integer, conv_pooled, conv_scaled, conv_shortcut
from jaxconv._ops.avg_pool import backward as average_backward
from jaxconv._ops.avg_pool import kernel as average_kernel
from jaxconv._ops.batchnorm import backward, backward_add, dx_of_sums, infer, moments, shortcut_backward, signs, train
from jaxconv._ops.conv import (
    add_statistics,
    conv_add,
    conv_kernel,
    dgrad,
    dgrad_add,
    dgrad_sums,
    fprop,
    gradient,
    gradient_add,
    norm_gradient,
    statistics,
    wgrad,
)
from jaxconv._ops.conv_normalised import (
    normalised,
    normalised_dx,
    normalised_gradient,
    normalised_statistics,
    normalised_wgrad,
)
from jaxconv._ops.dense import dense_gradient, dense_kernel, matmul
from jaxconv._ops.gated import dense_gated, dense_gated_gradient
from jaxconv._ops.groupnorm import backward as group_backward
from jaxconv._ops.groupnorm import norm as group_norm
from jaxconv._ops.pool import backward as pool_backward
from jaxconv._ops.pool import kernel as pool_kernel
from jaxconv._ops.squeeze_excite import backward as squeeze_backward
from jaxconv._ops.squeeze_excite import excite
from jaxconv._plan import conv, dense, depthwise, domain, sm90
from jaxconv._plan import conv_scaled as eight
from jaxconv._problem import (
    AddedConvProblem,
    AvgPoolProblem,
    BatchNormProblem,
    ConvProblem,
    DenseProblem,
    GatedGradientProblem,
    GatedProblem,
    GroupNormProblem,
    NormalisedConvProblem,
    PooledConvProblem,
    PoolProblem,
    ScaledConvProblem,
    ShortcutConvProblem,
    SqueezeExciteProblem,
)

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
DTYPES = ("float32", "bfloat16", "float16")
EPILOGUE = {"activation": "gelu", "return_preactivation": True}

Call = tuple[primitives.Kernel, Any]  # kernel, problem


def array(shape: tuple[int, ...], dtype: str) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


# ----------------------------------------------------------------------------------------------------------------------
# Cases: the calls of one program, by name

# pixels, C, K, groups, filter, options. XLA rounds an allocation up to 256 bytes: "exact" arrays fill theirs.
CONVS = {
    "exact": ((8, 8), 32, 64, 1, (3, 3), {}),
    "aligned": ((11, 9), 32, 72, 1, (3, 3), {}),
    "odd": ((11, 9), 5, 7, 1, (3, 2), {"stride": 2}),
    "pixels": ((23, 31), 24, 40, 1, (3, 3), {"stride": (2, 1), "padding": 2}),
    "1x1": ((11, 9), 64, 72, 1, (1, 1), {}),
    "1x1-s2": ((11, 9), 64, 72, 1, (1, 1), {"stride": 2}),
    "dilated": ((13, 12), 16, 24, 1, (3, 3), {"dilation": 2}),
    "stem": ((21, 19), 3, 64, 1, (7, 7), {"stride": 2}),
    "1-D": ((65,), 16, 24, 1, (4,), {"padding": ((3, 0),)}),
    "3-D": ((5, 6, 7), 8, 16, 1, (3, 3, 3), {"stride": (1, 2, 1)}),
    "groups": ((11, 9), 16, 32, 4, (3, 3), {"stride": 2}),
    "depthwise": ((11, 9), 5, 10, 5, (3, 3), {}),
}
DEPTHWISE_CONVS = {
    "exact": ((8, 8), 128, 128, 128, (3, 3), {}),
    "3x3": ((23, 31), 16, 16, 16, (3, 3), {}),
    "3x3-s2": ((23, 31), 16, 16, 16, (3, 3), {"stride": 2}),
    "5x5": ((11, 9), 16, 16, 16, (5, 5), {}),
    "5x5-s2": ((11, 9), 16, 16, 16, (5, 5), {"stride": 2}),
    "7x7": ((11, 9), 24, 24, 24, (7, 7), {}),
    "7x7-s2": ((12, 9), 24, 24, 24, (7, 7), {"stride": 2, "padding": ((2, 3), (3, 3))}),
    "31x31": ((33, 35), 8, 8, 8, (31, 31), {}),
    "odd": ((11, 9), 5, 5, 5, (3, 3), {}),
    "causal": ((130,), 16, 16, 16, (4,), {"padding": ((3, 0),)}),
    "causal-d3": ((130,), 8, 8, 8, (3,), {"padding": ((6, 0),), "dilation": 3}),
    "column": ((9, 5, 6), 8, 8, 8, (2, 1, 1), {}),
    "multiplier": ((11, 9), 6, 12, 6, (2, 3), {"dilation": 2}),
    "3x3-d2": ((13, 12), 12, 12, 12, (3, 3), {"dilation": 2}),
    "3x3-d3": ((13, 31), 24, 24, 24, (3, 3), {"dilation": 3}),
    "7x7-d3": ((13, 12), 16, 16, 16, (7, 7), {"dilation": 3}),
    "multiplier-2": ((11, 59), 24, 48, 24, (3, 3), {}),
    "multiplier-8": ((11, 9), 8, 64, 8, (3, 3), {}),
    "3-D": ((5, 6, 7), 8, 8, 8, (3, 3, 3), {}),
}
GROUPED_CONVS = {
    "exact": ((8, 8), 64, 64, 8, (3, 3), {}),
    "4": ((11, 9), 16, 16, 4, (3, 3), {}),
    "4-odd": ((3, 190), 36, 36, 9, (3, 3), {}),  # float32: two slabs, two strips
    "16": ((11, 9), 80, 80, 5, (3, 3), {}),
    "8-wide": ((3, 70), 64, 64, 8, (3, 3), {}),  # 16 bit: two strips, and tiles without a pixel
    "8-s2": ((11, 35), 72, 72, 9, (3, 3), {"stride": 2}),
    "16-s2": ((12, 9), 80, 80, 5, (3, 3), {"stride": 2}),
    "4to8-s2": ((11, 9), 16, 32, 4, (3, 3), {"stride": 2}),
    "8-d2": ((13, 12), 64, 64, 8, (3, 3), {"dilation": 2}),
    "16-5x5": ((23, 31), 64, 64, 4, (5, 5), {"stride": (1, 2)}),
    "32to16": ((11, 9), 128, 64, 4, (3, 3), {}),
    "1-D": ((65,), 32, 32, 8, (7,), {}),
}
SM90_CONVS = {
    "exact": ((8, 8), 64, 128, 1, (3, 3), {}),
    "3x3": ((11, 9), 64, 72, 1, (3, 3), {}),
    "3x3-s2": ((12, 13), 72, 64, 1, (3, 3), {"stride": 2}),
    "1x1": ((11, 9), 64, 136, 1, (1, 1), {}),
    "1x1-pair": ((24, 25), 64, 256, 1, (1, 1), {}),  # the plan's own wgrad in 16 bit: a pair's parts, and their sums
    "1x1-s2": ((11, 9), 136, 264, 1, (1, 1), {"stride": 2}),
    "5x5-d2": ((13, 12), 24, 8, 1, (5, 5), {"dilation": 2}),
    "groups": ((11, 9), 128, 192, 2, (3, 3), {}),
    "groups64": ((12, 13), 128, 128, 2, (3, 3), {"stride": 2}),
    "1-D": ((65,), 64, 72, 1, (4,), {"padding": ((3, 0),)}),
    "3-D": ((5, 6, 7), 64, 72, 1, (3, 3, 3), {"stride": (1, 2, 1)}),
    "planes": ((4, 6, 50), 40, 24, 1, (3, 3, 3), {}),
    "planes-strips": ((2, 4, 257), 40, 24, 1, (3, 3, 3), {}),
    "many-tiles": ((81, 83), 64, 64, 1, (3, 3), {}),  # more tiles than multiprocessors
    "patches": ((24, 32), 3, 72, 1, (8, 8), {"stride": 8}),
    # sums: half a column of tiles, a ring that turns, all of a filter's room
    "1x1-sums": ((11, 9), 384, 72, 1, (1, 1), {}),
    "1x1-many-sums": ((81, 83), 128, 64, 1, (1, 1), {}),
    "1x1-deep-sums": ((11, 9), 256, 512, 1, (1, 1), {}),
}
STEM_CONVS = {
    "7x7-s2": ((37, 44), 3, 64, 1, (7, 7), {"stride": 2, "padding": 3}),
    "7x7-s2-odd": ((21, 19), 3, 72, 1, (7, 7), {"stride": 2}),
    "4x4-s4": ((24, 32), 3, 96, 1, (4, 4), {"stride": 4}),
    "3x3-s1": ((13, 300), 4, 24, 1, (3, 3), {}),  # several tiles a row
    "8to7": ((13, 12), 8, 7, 1, (5, 3), {"stride": (3, 2), "dilation": (2, 1)}),
    "1-D": ((67,), 1, 16, 1, (9,), {"stride": 4}),
    "strips": ((12, 226), 3, 72, 1, (7, 7), {"stride": 2, "padding": 3}),  # two a row
    "patches": ((24, 32), 3, 72, 1, (8, 8), {"stride": 8}),  # dgrad is a matrix product
    "rgb": ((18, 20), 72, 3, 1, (3, 3), {}),
    "head": ((9, 140), 136, 8, 1, (1, 3), {"dilation": 2}),
    "planes": ((4, 6, 40), 1, 24, 1, (3, 3, 3), {}),
    "many-tiles": ((222, 224), 3, 40, 1, (3, 3), {"stride": 2}),  # more tiles than blocks
}
NARROW_CONVS = {
    "exact": ((8, 8), 16, 16, 1, (3, 3), {}),
    "4": ((11, 9), 4, 16, 1, (3, 3), {}),
    "8": ((5, 300), 8, 8, 1, (3, 3), {}),
    "32": ((37, 21), 32, 32, 1, (3, 3), {}),
    "24": ((11, 9), 24, 40, 1, (3, 3), {"padding": ((2, 0), (0, 2))}),
    "pixel": ((1, 1), 16, 8, 1, (3, 3), {}),
    "long": ((867, 3), 24, 32, 1, (3, 3), {}),  # three images: more rows than stages
    "planes-16": ((4, 6, 40), 4, 24, 1, (3, 3, 3), {}),
    "planes-32": ((4, 6, 40), 9, 24, 1, (3, 3, 3), {"stride": (2, 1, 1)}),
}
# Enough threads for runs of 2 and 4 pixels, in rows that these do not divide; in those above they are of one.
FEW_CONVS = {
    **DEPTHWISE_CONVS,
    "3x3-runs": ((57, 59), 96, 96, 96, (3, 3), {}),
    "3x3-s2-runs": ((57, 59), 96, 96, 96, (3, 3), {"stride": 2}),
    "5x5-runs": ((29, 27), 96, 96, 96, (5, 5), {}),
    "5x5-s2-runs": ((57, 59), 96, 96, 96, (5, 5), {"stride": 2, "padding": ((0, 3), (3, 1))}),
    "7x7-runs": ((29, 27), 96, 96, 96, (7, 7), {}),
}
# Each tile, ragged rows and channels, more tiles than blocks
NORMALISED_CONVS = {
    "narrow": ((9, 10), 72, 40, 1, (1, 1), {}),
    "128 columns": ((9, 10), 64, 104, 1, (1, 1), {}),
    "256 columns": ((17, 19), 200, 264, 1, (1, 1), {}),
    "many tiles": ((100, 101), 24, 104, 1, (1, 1), {}),
}
CONVS_BY_FAMILY = {
    "depthwise/few": FEW_CONVS,
    "sm90/normalised": NORMALISED_CONVS,
    "sm90": SM90_CONVS,
    "depthwise": DEPTHWISE_CONVS,
    "grouped": GROUPED_CONVS,
    "stem": STEM_CONVS,
    "narrow": NARROW_CONVS,
}


def conv_calls(dtype: str, last: bool, algorithm: str, precision: str, shape: tuple[Any, ...]) -> list[Call]:
    pixels, c, k, groups, filter, options = shape
    nd = len(pixels)
    layout = (_problem.CHANNELS_LAST if last else _problem.CHANNELS_FIRST)[nd]
    x = (3, *pixels, c) if last else (3, c, *pixels)
    w = (*filter, c // groups, k) if last else (k, c // groups, *filter)
    settled = {"stride": 1, "padding": "SAME", "dilation": 1, **options}
    p = ConvProblem.infer(
        f"conv{nd}d",
        nd,
        array(x, dtype),
        array(w, dtype),
        array((k,), dtype),
        **settled,
        **EPILOGUE,
        groups=groups,
        layout=layout,
        precision=precision,
        algorithm=algorithm,
        implementation=None,
    )
    bare = p.bare()
    calls = [(conv_kernel, p), (conv_add, p), (fprop, bare), (statistics, bare)]
    sums = (p.affine(), False), (bare, True), (p.affine(), True)
    calls += [(add_statistics, AddedConvProblem.of(*added)) for added in sums]
    if algorithm.startswith("depthwise"):
        # Of variances above -8, which random ones are.
        of_norm = dict(vars(bare), epsilon=8.0)
        for activation in ("relu6", "silu"):
            q = NormalisedConvProblem(**of_norm, x_activation=activations.parse("", activation))
            calls += [(normalised, q), (normalised_wgrad, q), (normalised_gradient, q)]
            calls += [(normalised_dx, dataclasses.replace(q, count=q.norm.reduced))]
    if algorithm == "sm90/normalised":
        of_norm = dict(vars(bare), epsilon=8.0)
        for activation in ("none", "relu6", "silu"):
            q = NormalisedConvProblem(**of_norm, x_activation=activations.parse("", activation))
            calls += [(normalised, q), (normalised_statistics, q), (normalised_wgrad, q)]
            calls += [(normalised_wgrad, dataclasses.replace(q, algorithm=f"{algorithm} 128x128"))]  # pairs
    calls += [(dgrad, bare), (dgrad_add, bare)]
    calls += [(gradient, bare)]
    for f in ("relu6", "tanh"):
        behind = dataclasses.replace(bare, activation=activations.parse("", f))
        calls += [(gradient, behind), (gradient_add, behind)]
    for f in ("none", "relu6", ("leaky_relu", 0.5)):
        behind = dataclasses.replace(bare, activation=activations.parse("", None if f == "none" else f))
        calls += [(norm_gradient, behind)]
    if last and c % 8 == 0:
        calls += [(dgrad_sums, bare)]
    return [*calls, (wgrad, bare)]


# pixels, C, K, filter, stride, the pooling's window: SAME. One tile and several of a row, K in several blocks.
POOLED = (
    ((37, 43), 3, 64, 7, 2, 3),
    ((17, 259), 3, 40, 3, 1, 3),
    ((28, 28), 1, 136, 5, 1, 2),
    ((33, 30), 4, 24, 3, 2, 3),
)


def pooled_calls(
    dtype: str, pixels: tuple[int, ...], c: int, k: int, filter: int, stride: int, window: int, images: int = 3
) -> list[Call]:
    """By the kernel, which has no name that a user forces."""
    calls = []
    for b, activation in ((None, None), (array((k,), dtype), "relu6")):
        options: dict[str, Any] = dict(stride=stride, padding="SAME", dilation=1, layout="NHWC", precision=None)
        x, w = array((images, *pixels, c), dtype), array((filter, filter, c, k), dtype)
        how = dict(implementation="native", algorithm=None, activation=activation, return_preactivation=False)
        p = ConvProblem.infer("conv2d", 2, x, w, b, groups=1, **options, **how)
        steps = dict(stride=2, padding="SAME" if window == 3 else "VALID", dilation=1, layout="NHWC")
        q = PoolProblem.infer("max_pool", array(p.y_shape, dtype), window, **steps, algorithm=None, implementation=None)
        both = PooledConvProblem.of(p, q)
        calls.append((conv_pooled.kernel, both))
        if c == 3 and k % 16 == 0 and pixels[1] % 4 == 0:
            wide = "float32" if dtype != "float32" else ""
            calls.append((conv_pooled.kernel, dataclasses.replace(both, x_dtype=wide, y_dtype="uint8", y_scale=0.3)))
    return calls


# x, w, x2 and the stride: channels that fill stages of 64 or do not, rows and columns that no tile divides, several
# tiles a CTA.
SHORTCUTS: tuple[tuple[direct_calls.Shape, direct_calls.Shape, direct_calls.Shape, int], ...] = (
    ((2, 9, 11, 64), (1, 1, 64, 136), (2, 9, 11, 72), 1),
    ((3, 13, 12, 40), (3, 3, 40, 80), (3, 25, 24, 128), 2),
    ((12, 40, 40, 16), (1, 1, 16, 144), (12, 79, 80, 24), 2),
)


def shortcut_calls(
    dtype: str, left: direct_calls.Shape, right: direct_calls.Shape, far: direct_calls.Shape, stride: int
) -> list[Call]:
    options: dict[str, Any] = dict(dilation=1, groups=1, layout="NHWC", precision=None, return_preactivation=False)
    options |= dict(implementation=None, algorithm="sm90/product")
    x, w, x2, w2 = (array(s, dtype) for s in (left, right, far, (1, 1, far[-1], right[-1])))
    q = ConvProblem.infer("conv2d", 2, x2, w2, None, stride=stride, padding="VALID", activation=None, **options)
    calls = []
    for b, activation in ((None, None), (array(right[-1:], dtype), "relu")):
        p = ConvProblem.infer("conv2d", 2, x, w, b, stride=1, padding="SAME", activation=activation, **options)
        calls.append((conv_shortcut.kernel, ShortcutConvProblem.of(p, q)))
    return calls


def dense_calls(dtype: str, algorithm: str, precision: str, m: int, k: int, n: int) -> list[Call]:
    options = {"alpha": 0.5, "beta": 0.5, "precision": precision, "algorithm": algorithm, "implementation": None}
    x, w, b, c = (array(shape, dtype) for shape in ((m, k), (k, n), (n,), (m, n)))
    calls = []
    adds = algorithm in ("gemm", "sm90/cluster") or dtype != "float32"
    for addend in (None, c) if adds else (None,):
        p = DenseProblem.infer("dense", x, w, b, addend, **EPILOGUE, **options)
        calls.append((dense_kernel, p))
    bare = p.bare()
    for trans_x, trans_w, batch in ((False, False, None), (False, True, None), (True, False, None), (False, False, 2)):
        q = dataclasses.replace(bare, trans_x=trans_x, trans_w=trans_w, batch=batch, batched=("x",) * bool(batch))
        calls.append((matmul, q))
    return calls


def gradient_calls(dtype: str, algorithm: str, m: int, k: int, n: int) -> list[Call]:
    calls = []
    for activation in ("relu", "gelu", "elu"):
        precision, f = (jax.lax.Precision.DEFAULT,) * 2, activations.parse("", activation)
        p = DenseProblem("mlp", dtype, m, k, n, precision, trans_w=True, activation=f, algorithm=algorithm)
        calls.append((dense_gradient, p))
    return calls


def gated_calls(dtype: str, algorithm: str, m: int, k: int, n: int) -> list[Call]:
    """With z and without, f of either half."""
    calls = []
    for activation, bias in (("none", None), ("sigmoid", "column"), ("gelu_exact", "column")):
        precision, f = (jax.lax.Precision.DEFAULT,) * 2, activations.parse("", activation)
        p = DenseProblem("dense", dtype, m, k, 2 * n, precision, bias=bias, algorithm=algorithm)
        first = activation == "sigmoid"
        calls += [(dense_gated, GatedProblem.of(p, f, first, save)) for save in (False, True)]
    return calls


def gated_gradient_calls(dtype: str, algorithm: str, m: int, k: int, n: int) -> list[Call]:
    calls = []
    for activation in ("none", "gelu", "elu"):
        precision, f = (jax.lax.Precision.DEFAULT,) * 2, activations.parse("", activation)
        p = DenseProblem("dense", dtype, m, k, n, precision, trans_w=True, algorithm=algorithm)
        calls.append((dense_gated_gradient, GatedGradientProblem.of(p, f, activation == "gelu")))
    return calls


def batchnorm_calls(dtype: str, algorithm: str, shape: tuple[int, ...], axis: int, fused: bool) -> list[Call]:
    x, param = array(shape, dtype), array((shape[axis],), "float32")
    options = {"training": True, "momentum": 0.9, "epsilon": 1e-5, "channel_axis": axis, "implementation": None}
    p = BatchNormProblem.infer(
        "batchnorm",
        x,
        *[param] * 4,
        x if fused else None,
        **options,
        activation="silu" if fused else None,
        algorithm=algorithm,
    )
    q = dataclasses.replace(p, want_dresidual=fused)
    half = dataclasses.replace(p, count=2 * p.reduced)
    return [
        (train, p),
        (infer, dataclasses.replace(p, training=False)),
        (signs, dataclasses.replace(p, activation=activations.parse("", "relu"))),
        (backward, q),
        (backward_add, dataclasses.replace(p, residual=False)),
        (backward, dataclasses.replace(q, want_dx=False)),
        (shortcut_backward, dataclasses.replace(p, residual=False)),
        (moments, p),
        (dx_of_sums, half),
        (dx_of_sums, dataclasses.replace(half, dz=True)),
    ]


def pool_calls(dtype: str, algorithm: str, shape: tuple[int, ...], window: Any, options: dict[str, Any]) -> list[Call]:
    settled = {"stride": 1, "padding": "SAME", "dilation": 1, "layout": None, **options}
    p = PoolProblem.infer("max_pool", array(shape, dtype), window, **settled, algorithm=algorithm, implementation=None)
    saving = dataclasses.replace(p, save=True)
    return [(pool_kernel, p), (pool_kernel, saving), (pool_backward, saving)]


# Positions are random here, also those that no window has: a gather reads nothing by them.
POOLS = (
    ((3, 16, 16, 64), 3, {"stride": 2}),
    ((3, 11, 9, 24), 3, {"stride": 2, "padding": 1}),
    ((3, 11, 9, 5), (3, 2), {}),
    ((3, 12, 13, 16), 2, {"stride": 2, "padding": "VALID"}),
    ((2, 65, 8), 5, {"stride": 3}),
    ((2, 5, 6, 7, 8), (2, 3, 4), {"stride": (1, 2, 3), "dilation": (2, 1, 2)}),
)


def average_calls(
    dtype: str, algorithm: str, shape: tuple[int, ...], window: Any, options: dict[str, Any]
) -> list[Call]:
    settled = {"stride": 1, "padding": "SAME", "layout": None, **options}
    settled |= {"algorithm": algorithm, "implementation": None}
    problems = (
        AvgPoolProblem.of("avg_pool", array(shape, dtype), window, **settled, count_include_pad=count)
        for count in (True, False)
    )
    return [(kernel, p) for p in problems for kernel in (average_kernel, average_backward)]


AVERAGES = (
    ((3, 16, 16, 64), 2, {"stride": 2}),
    ((3, 11, 9, 24), 3, {}),
    ((3, 11, 9, 24), 3, {"stride": 2, "padding": 1}),
    ((3, 11, 9, 5), (3, 2), {}),
    ((2, 65, 8), 5, {"stride": 3}),
    ((2, 5, 6, 7, 8), (2, 3, 4), {"stride": (1, 2, 3)}),
)


def groupnorm_calls(dtype: str, algorithm: str, shape: tuple[int, ...], groups: int, activation: str) -> list[Call]:
    p = GroupNormProblem(
        "groupnorm", dtype, shape, groups, 1e-5, activations.parse("", activation), algorithm=algorithm
    )
    return [(group_norm, p), (group_backward, p), (group_backward, dataclasses.replace(p, want_dx=False))]


def layernorm_calls(dtype: str, algorithm: str, shape: tuple[int, ...]) -> list[Call]:
    p = GroupNormProblem("layernorm", dtype, shape, 1, 1e-5, rows=True, algorithm=algorithm)
    return [(group_norm, p), (group_backward, p), (group_backward, dataclasses.replace(p, want_dx=False))]


def squeeze_calls(dtype: str, algorithm: str, shape: tuple[int, ...], hidden: int, activation: str) -> list[Call]:
    p = SqueezeExciteProblem(
        "squeeze_excite", dtype, shape, hidden, activations.parse("", activation), "sigmoid", algorithm=algorithm
    )
    hard = dataclasses.replace(p, gate="hard_sigmoid")
    back = [(squeeze_backward, q) for q in (p, hard, dataclasses.replace(p, want_dx=False))]
    return [(excite, p), (excite, hard), *back]


# shape, hidden: one channel tile by itself, tiles and shares of pixels, fewer pixels than CTAs, what does not fit in
# shared memory, gates that are passed on, many images for a pair each, weights that are not brought beside x, odd
# numbers everywhere.
SQUEEZES = (
    ((2, 28, 28, 96), 4),
    ((3, 7, 7, 1152), 48),
    ((1, 14, 14, 240), 10),
    ((2, 1, 1, 64), 5),
    ((1, 96, 96, 256), 6),
    ((2, 12, 13, 128), 67),
    ((2500, 3, 3, 8), 3),
    ((40, 4, 4, 512), 64),
    ((5, 23, 40), 7),
    ((2, 5, 5, 7), 3),
    ((1, 4, 8), 2048),
)
# Rows of less than a vector a lane, of one, of several; rows that no block divides, more blocks than a wave has.
LAYERNORMS = ((5, 8), (3, 7, 96), (2, 5, 9, 264), (37, 768), (3, 1024), (5000, 40), (1, 16))
# shape, groups: those that straddle vectors; whose channels no vector divides; several tiles of a pixel; several items;
# "resident" with several tiles and clusters.
GROUPNORMS = (
    ((6, 5, 5, 32), 8),
    ((6, 7, 7, 5), 5),
    ((2, 3, 2, 2320), 4),
    ((40, 33, 17, 64), 32),
    ((3, 29, 23, 200), 10),
)
# lhs, rhs, parameters: words of four channels and single bytes, both walks, every edge of a tile; a filter that
# reaches out of the image on all sides; groups, few and one an output; dilations of both.
INTEGERS: tuple[tuple[direct_calls.Shape, direct_calls.Shape, dict[str, Any]], ...] = (
    ((2, 9, 8, 16), (3, 3, 16, 65), {}),
    ((1, 5, 13, 17), (3, 2, 17, 30), {}),
    ((2, 12, 7, 7), (21, 4, 3, 3), dict(feature_group_count=3, dimension_numbers=("NCHW", "OIHW", "NCHW"))),
    ((2, 9, 9, 16), (3, 3, 1, 16), dict(feature_group_count=16)),
    ((4, 5, 6, 4), (3, 2, 4, 20), dict(batch_group_count=2, lhs_dilation=(2, 3), rhs_dilation=(1, 2))),
    ((2, 6, 5, 8), (70, 3, 3, 8), dict(dimension_numbers=("NHWC", "OHWI", "NCHW"))),
)
BATCHNORMS = (
    ((6, 5, 5, 16), -1),
    ((6, 16, 8, 8), 1),
    ((6, 7, 7, 5), -1),
    ((6, 5, 7, 7), 1),
    ((130, 9, 9, 24), -1),
    ((65500, 40), -1),  # two_read: through a ring
    ((33000, 64), -1),  # and with signs
)
DENSES = ((128, 64, 256), (72, 64, 136), (5, 7, 3), (16, 2048, 24), (200, 72, 264), (64, 1024, 136), (1, 520, 72))


def integer_calls(
    dtype: str, algorithm: str, left: direct_calls.Shape, right: direct_calls.Shape, given: dict[str, Any]
) -> list[Call]:
    """Sums of 32 and of 64 bits."""
    given = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), **given}
    like = array(left, dtype), array(right, dtype)
    results = [name for name in ("int32", "int64") if int(name[3:]) >= jax.numpy.iinfo(dtype).bits]
    return [
        (
            conv_integer.kernel,
            dataclasses.replace(
                direct_calls.integer_problem(*like, (2, 1), ((3, 3), (2, 4)), preferred_element_type=result, **given),
                algorithm=algorithm,
            ),
        )
        for result in results
    ]


# x, w, options and a shortcut's x2 and stride, types of the residual and the result: rows, columns and depths that no
# tile divides, blocks of 64 channels, groups, every way out.
SCALED: tuple[tuple[direct_calls.Shape, direct_calls.Shape, dict[str, Any], str | None, str], ...] = (
    ((2, 9, 11, 64), (1, 1, 64, 48), {}, "int8", "int8"),
    ((3, 13, 12, 48), (3, 3, 48, 80), {}, "float16", "int8"),
    ((1, 5, 7, 528), (1, 1, 528, 272), {}, None, "bfloat16"),
    ((2, 15, 13, 32), (3, 3, 32, 32), dict(stride=2), "uint8", "float32"),
    ((2, 6, 7, 256), (3, 3, 128, 32), dict(groups=2), "float8_e5m2", "float8_e4m3fn"),
    ((12, 40, 40, 16), (1, 1, 16, 144), {}, "int8", "uint8"),
    ((2, 9, 11, 64), (1, 1, 64, 80), dict(shortcut=((2, 17, 21, 128), 2)), None, "uint8"),
    ((2, 9, 11, 144), (1, 1, 144, 144), dict(shortcut=((2, 9, 11, 48), 1)), "int8", "bfloat16"),
    ((2, 8, 9, 144), (3, 3, 144, 144), {}, None, "int32"),
    ((2, 13, 12, 64), (3, 3, 64, 48), {}, "int8", "int8"),
    ((2, 9, 20, 112), (3, 3, 112, 144), {}, "float8_e4m3fn", "bfloat16"),
    ((80, 40, 40, 16), (3, 3, 16, 16), {}, "uint8", "uint8"),  # several tiles a CTA
    ((2, 8, 9, 64), (3, 3, 64, 80), {}, None, "int32"),
)


def scaled_calls(
    dtype: str,
    algorithm: str,
    left: direct_calls.Shape,
    right: direct_calls.Shape,
    given: dict[str, Any],
    residual: str | None,
    result: str,
) -> list[Call]:
    raw = result == "int32"
    if raw and dtype not in _problem.EIGHT_BIT_INTEGERS:
        return []
    options: dict[str, Any] = dict(stride=1, padding="SAME", dilation=1, groups=1, layout="NHWC", precision=None)
    options |= dict(activation=None if raw else "relu", return_preactivation=False, implementation=None)
    x, w = (jax.ShapeDtypeStruct(shape, dtype) for shape in (left, right))
    scale, number = jax.ShapeDtypeStruct(right[-1:], "float32"), jax.ShapeDtypeStruct((), "float32")
    out = *left[:1], *(-(-extent // given.get("stride", 1)) for extent in left[1:-1]), right[-1]
    added = None if residual is None else jax.ShapeDtypeStruct(out, residual)
    scales = dict.fromkeys(("scale", "residual", "residual_scale", "out_scale"))
    if not raw:
        scales |= dict(scale=scale, residual=added, residual_scale=None if added is None else number, out_scale=number)
    biases = [None] if raw else [scale]
    if not raw and dtype in _problem.EIGHT_BIT_INTEGERS:
        biases.append(jax.ShapeDtypeStruct(right[-1:], "int32"))
    given = dict(given)
    x2, stride = given.pop("shortcut", ((), 0))
    shortcut: dict[str, Any] = {}
    if x2:
        shortcut = dict(shortcut_channels=x2[-1], shortcut_spatial=x2[1:-1], shortcut_stride=(stride, stride))
    how = dict(out_dtype=result, algorithm=algorithm, **{**options, **given}, **scales)
    problems = [dataclasses.replace(ScaledConvProblem.of("conv2d", 2, x, w, b, **how), **shortcut) for b in biases]
    return [(conv_scaled.kernel, p) for p in problems]


def cases(op: str, algorithm: str, dtype: str) -> Iterator[tuple[str, list[Call]]]:
    family = _problem.family_of(algorithm)
    products = dtype == "float32" and family in ("implicit_gemm", "im2col", "gemm", "sm90")  # perhaps in TF32
    precisions = ("default", "highest") if products else ("default",)
    if op == "conv":
        shapes = CONVS_BY_FAMILY.get(algorithm) or CONVS_BY_FAMILY.get(family, CONVS)
        for name, last, precision in itertools.product(shapes, (True, False), precisions):
            calls = conv_calls(dtype, last, algorithm, precision, shapes[name])
            yield f"{name} {'last' if last else 'first'} {precision}", calls
    elif op == "pooled":
        for case in POOLED:
            yield f"{case}", pooled_calls(dtype, *case)
    elif op == "shortcut":
        for case in SHORTCUTS:
            yield f"{case}", shortcut_calls(dtype, *case)
    elif op == "dense":
        for shape, precision in itertools.product(DENSES, precisions):
            yield f"{shape} {precision}", dense_calls(dtype, algorithm, precision, *shape)
    elif op == "dense_gradient":
        for shape in (*DENSES, (40000, 64, 264)):  # more tiles than blocks
            yield f"{shape}", gradient_calls(dtype, algorithm, *shape)
    elif op == "dense_gated_gradient":
        for shape in (*DENSES, (40000, 64, 264)):
            yield f"{shape}", gated_gradient_calls(dtype, algorithm, *shape)
    elif op == "dense_gated":
        for shape in (*DENSES, (40000, 64, 264)):
            yield f"{shape}", gated_calls(dtype, algorithm, *shape)
    elif op == "scaled":
        for case in SCALED:
            yield f"{case[0]} {case[1]} {case[3]} {case[4]}", scaled_calls(dtype, algorithm, *case)
    elif op == "integers":
        for left, right, given in INTEGERS:
            yield f"{left} {right}", integer_calls(dtype, algorithm, left, right, given)
    elif op == "pool":
        for shape, window, options in POOLS:
            yield f"{shape} {window}", pool_calls(dtype, algorithm, shape, window, options)
    elif op == "avg_pool":
        for shape, window, options in AVERAGES:
            yield f"{shape} {window} {options}", average_calls(dtype, algorithm, shape, window, options)
    elif op == "squeeze_excite":
        for (shape, hidden), activation in itertools.product(SQUEEZES, ("silu", "relu")):
            yield f"{shape} {hidden} {activation}", squeeze_calls(dtype, algorithm, shape, hidden, activation)
    elif op == "groupnorm" and family == "rows":
        for shape in LAYERNORMS:
            yield f"{shape} rows", layernorm_calls(dtype, algorithm, shape)
    elif op == "groupnorm":
        for (shape, groups), activation in itertools.product(GROUPNORMS, ("silu", "gelu")):
            yield f"{shape} {groups} {activation}", groupnorm_calls(dtype, algorithm, shape, groups, activation)
    else:
        for shape, fused in itertools.product(BATCHNORMS, (False, True)):
            yield f"{shape} {'fused' if fused else 'bare'}", batchnorm_calls(dtype, algorithm, *shape, fused)


def members(family: str, kernels: Iterable[str]) -> list[str]:
    return [f"{family}/{kernel}" for kernel in dict.fromkeys(kernels)]


# What the parts of an op are named by: kernels, and families that have one or are taken whole.
KERNELS = {
    "conv": [
        *members(
            "sm90",
            (
                kernel
                for kernel, _ in (
                    *sm90.PRODUCTS,
                    *sm90.FEW_ROWS,
                    *sm90.HALOS,
                    *sm90.STATISTICS,
                    *sm90.SUMS,
                    *sm90.NORMALISED,
                    *sm90.WGRADS,
                )
            ),
        ),
        *members("depthwise", depthwise.KERNELS),
        *(family for family in _problem.CONV_ALGORITHMS if family not in ("sm90", "depthwise")),
    ],
    "dense": [*members("sm90", (*(kernel for kernel, _ in (*sm90.PRODUCTS, *sm90.FEW_ROWS)), "rows")), "gemm"],
    "dense_gradient": [_plan.GRADIENT],
    "dense_gated": [_plan.GATED],
    "dense_gated_gradient": [_plan.GATED_GRADIENT],
    "batchnorm": list(_problem.BATCHNORM_ALGORITHMS),
    "pool": list(_problem.POOL_ALGORITHMS),
    "avg_pool": list(_problem.POOL_ALGORITHMS),
    "groupnorm": list(_problem.GROUPNORM_ALGORITHMS),
    "squeeze_excite": list(_problem.SQUEEZE_EXCITE_ALGORITHMS),
}
PARTS = [
    *(f"{op}/{kernel}/{dtype}" for op, kernels in KERNELS.items() for kernel in kernels for dtype in DTYPES),
    *(
        f"integers/{kernel}/{dtype}"
        for kernel in ("integer/output", "integer/tile")
        for dtype in ("int8", "uint8", "uint16", "int32", "int64")
    ),
    *(f"pooled/stem/sm90_pooled/{dtype}" for dtype in DTYPES),
    *(f"shortcut/sm90/product/{dtype}" for dtype in DTYPES if dtype not in ("float32", "float64")),
    *(f"scaled/{kernel}/{dtype}" for kernel in (eight.EIGHT, eight.HALO) for dtype in _problem.EIGHT_BITS),
]


# ----------------------------------------------------------------------------------------------------------------------
# One part, in this process


def forced(call: Call, device: _plan.Device) -> Iterator[Call]:
    """The call on every kernel and tile that answers its algorithm and can run it."""
    made, p = call
    if isinstance(p, ShortcutConvProblem):  # of 16 bits or 8
        wanted: Iterable[_plan.Plan] = _plan.tiles(made.name, dataclasses.replace(p, algorithm=None), device)
    elif isinstance(p, ConvProblem) and not isinstance(p, PooledConvProblem):
        stored = conv.in_memory(p.algorithm, p)
        wanted = conv.FAMILIES[_problem.family_of(p.algorithm)].wants(made.name, stored, device)
    elif isinstance(p, DenseProblem):
        wanted = dense.wants(made.name, _problem.family_of(p.algorithm), p, device)
    else:
        yield call
        return
    for plan in wanted:
        name = f"{plan.kernel} {plan.tile}".strip()
        if plan.answers(p.algorithm) and _plan.supports(made.name, name, p, device) is None:
            yield made, dataclasses.replace(p, algorithm=name)


def in_one_part(op: str, problem: Any, device: _plan.Device) -> _plan.Plan:
    """The plan with its reduction whole, as it is where there are more tiles than multiprocessors."""
    plan = dataclasses.replace(chosen(op, problem, device), splits=1)
    if isinstance(problem, ConvProblem) and plan.implementation == "native":
        stored = conv.in_memory(plan.kernel, problem)
        workspace = getattr(conv.FAMILIES[plan.algorithm], "workspace", domain.conv_workspace)
        return dataclasses.replace(plan, workspace_bytes=workspace(op, plan, stored))
    return plan


chosen = _plan.plan


def supported(call: Call, device: _plan.Device) -> bool:
    made, p = call
    algorithm = p.algorithm or "stem" if isinstance(p, PooledConvProblem) else p.algorithm
    return _plan.supports(made.name, algorithm, p, device) is None


def runs(call: Call, device: _plan.Device) -> bool:
    """Whether the call, whose kernel is forced, is one launch that reads its operands as they lie."""
    made, p = call
    plan = chosen(made.name, p, device)
    as_they_lie = all(at is None for at in made.wire(p, plan).operand_layouts)
    # Of 8 bits nothing reads filters as they lie: XLA's copy of them is watched, too.
    return plan.implementation == "native" and (as_they_lie or isinstance(p, ScaledConvProblem))


def run_part(part: str) -> int:
    """Runs the part's cases; their number."""
    op, *name, dtype = part.split("/")
    jax.config.update("jax_enable_x64", op == "integers")
    device, rng, done = _plan.Device.current("cuda"), np.random.default_rng(0), 0
    for case, calls in cases(op, "/".join(name), dtype):
        calls = [one for call in calls if supported(call, device) for one in forced(call, device) if runs(one, device)]
        cut = [call for call in calls if call[0] is wgrad and chosen(call[0].name, call[1], device).splits > 1]
        for whole, some in ((False, calls), (True, cut)):
            if not some:
                continue
            args = [
                [rng.standard_normal(shape).astype(jax.numpy.dtype(t)) for shape, t in made.operands(p).values()]
                for made, p in some
            ]

            def program(args: Any, some: list[Call] = some) -> Any:
                return [made(p, *given) for (made, p), given in zip(some, args, strict=True)]

            print(f"{part} {case}{' in one part' if whole else ''}: {len(some)} calls", flush=True)
            _plan.plan = in_one_part if whole else chosen
            jax.block_until_ready(jax.jit(program)(args))
            _plan.plan = chosen
            done += len(some)
    return done


# ----------------------------------------------------------------------------------------------------------------------
# All parts, each in a process of its own under the tool

SUMMARY = re.compile(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+) (?:error|hazard)")


def watch(part: str, tool: str, sanitizer: str, limit: float, logs: pathlib.Path | None) -> tuple[bool, str]:
    """(whether the part is clean, its row of the table, with the end of its output where it is not)."""
    # sys.executable itself: a wrapper script would be what the tool watches. A buffer an allocation, and space between
    # them, since an access beyond one that lands in the next goes unnoticed; no CUDA graphs, so that an access is seen
    # in its kernel's own launch.
    # depthwise/rows_mma has up to 56 barriers in a block.
    options = {"memcheck": ["--padding", "32768"], "racecheck": ["--num-cuda-barriers", "64"]}
    watched = [sys.executable, __file__, part]
    command = [sanitizer, "--tool", tool, *options.get(tool, []), "--kernel-name", "kns=jaxconv", *watched]
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="
    environment = {**os.environ, "XLA_PYTHON_CLIENT_ALLOCATOR": "platform", "XLA_FLAGS": flags}
    start = time.monotonic()
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit, env=environment
        )
        output, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as late:
        output, code = (late.stdout or b"").decode(errors="replace"), None
    seconds = time.monotonic() - start
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
        (logs / f"{tool}-{part.replace('/', '-')}.txt").write_text(output)
    counts = [int(n) for n in SUMMARY.findall(output)]
    ran = re.search(r"^(\d+) cases ran", output, re.MULTILINE)
    if code is None:
        verdict = f"not done after {limit:.0f} s"
    elif counts and sum(counts):
        verdict = f"{sum(counts)} {'hazards' if tool == 'racecheck' else 'errors'}"
    elif code or not ran:
        verdict = f"ended with {code}"
    elif ran[1] == "0":
        return True, f"{part:<32} {0:>5} {seconds:>6.1f}  outside what this GPU's kernels can run"
    elif not counts:
        verdict = "the tool printed no summary"
    else:
        verdict = "clean"
    row = f"{part:<32} {ran[1] if ran else '?':>5} {seconds:>6.1f}  {verdict}"
    if verdict == "clean":
        return True, row
    return False, "\n".join([row, *("    " + line for line in output.splitlines()[-40:])])


def write_record(path: pathlib.Path, tool: str, rows: Iterable[str]) -> None:
    """What was clean, by part: cases, seconds, and the commit that they were of. tests/reliability.py reads it."""
    parts = json.loads(path.read_text())["parts"] if path.exists() else {}
    root = pathlib.Path(__file__).parent.parent
    asked = ["git", "-C", str(root), "rev-parse", "--short=10", "HEAD"]
    commit = os.environ.get("BENCHMARKS_COMMIT") or subprocess.check_output(asked, text=True).strip()
    for part, cases, seconds, verdict in (row.splitlines()[0].split(maxsplit=3) for row in rows):
        if verdict == "clean":
            parts[part] = {"cases": int(cases), "seconds": float(seconds), "commit": commit}
        elif cases != "0":
            parts.pop(part, None)  # what is not clean is not recorded
    found = {"tool": tool, "device": jax.devices()[0].device_kind, "date": time.strftime("%Y-%m-%d"), "parts": parts}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")


def find_sanitizer() -> str:
    places = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
    found = shutil.which("compute-sanitizer", path=places)
    if found is None:
        raise SystemExit("compute-sanitizer is neither on the PATH nor in /usr/local/cuda/bin: it is part of CUDA")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="part names, or words that they contain; none: all")
    parser.add_argument("--tool", choices=TOOLS, help="watch each part in a process of its own; without: run it here")
    parser.add_argument("-j", "--jobs", type=int, default=6, help="parts watched at once (default: 6)")
    parser.add_argument("--limit", type=float, default=300, help="seconds a part may take (default: 300)")
    parser.add_argument("--logs", type=pathlib.Path, help="a folder for each part's whole output")
    parser.add_argument("--record", type=pathlib.Path, help="a file for the clean parts; others in it stay")
    parser.add_argument("--list", action="store_true", help="print the parts' names")
    options = parser.parse_args()
    chosen: set[str] = set()
    for asked in options.parts:
        found = {asked} if asked in PARTS else {p for p in PARTS if asked in p}
        if not found:
            raise SystemExit(f"no part's name contains {asked}; --list prints them")
        chosen |= found
    parts = [p for p in PARTS if p in chosen or not options.parts]
    if options.list:
        print("\n".join(parts))
        return
    if options.tool is None:
        if jax.default_backend() != "gpu":
            raise SystemExit("no GPU: there is nothing to watch")
        done = sum(map(run_part, parts))
        print(f"{done} cases ran on {_plan.Device.current('cuda').kind}", flush=True)
        return
    sanitizer, clean = find_sanitizer(), []
    print(f"{'part':<32} {'cases':>5} {'s':>6}  {options.tool}")
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        started = [pool.submit(watch, p, options.tool, sanitizer, options.limit, options.logs) for p in parts]
        for result in concurrent.futures.as_completed(started):
            ok, row = result.result()
            clean.append(ok)
            print(row, flush=True)
            if options.record:  # after each part: a run that is cut short is worth having
                write_record(options.record, options.tool, [row])
    if not all(clean):
        raise SystemExit(f"{clean.count(False)} of {len(parts)} parts are not clean")
    print(f"all {len(parts)} parts are clean")


if __name__ == "__main__":
    main()

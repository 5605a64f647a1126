"""The CPU's native code on both sides of the sizes at which it cuts up its work, and its bits at any thread count."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PLATFORM, calls, integers, normal
from tolerance import assert_exact

import jaxconv
from jaxconv._core import native

pytestmark = pytest.mark.skipif(PLATFORM != "cpu", reason="these are the CPU's thresholds")

T = native.cpu.thresholds()
NATIVE = dict(implementation="native")


def around(size: int) -> tuple[int, int, int]:
    return size - 1, size, size + 1


# ----------------------------------------------------------------------------------------------------------------------
# Convolutions


@pytest.mark.parametrize("algorithm", ["direct", "im2col", "depthwise"])
@pytest.mark.parametrize("layout", ["NDHWC", "NCDHW"])
@pytest.mark.parametrize("axis", range(3))
def test_each_axis_has_its_own_dilation_stride_and_padding(axis, layout, algorithm):
    groups = 2 if algorithm == "depthwise" else 1
    x, w = integers(0, (2, 7, 8, 9, 2)), integers(1, (3, 2, 3, 2 // groups, 4))
    dilation, stride, pads = [1] * 3, [1] * 3, [(0, 0)] * 3
    dilation[axis], stride[axis - 1], pads[axis - 2] = 2, 2, (2, 1)
    if layout == "NCDHW":
        x, w = np.moveaxis(x, -1, 1), w.transpose(4, 3, 0, 1, 2)

    def f(implementation, algorithm):
        options = dict(stride=stride, dilation=dilation, padding=pads, groups=groups, layout=layout)
        return lambda x, w: jaxconv.conv3d(x, w, implementation=implementation, algorithm=algorithm, **options)

    arrays = jnp.asarray(x, "float32"), jnp.asarray(w, "float32")
    y, vjp = jax.vjp(f("native", algorithm), *arrays)
    expected, expected_vjp = jax.vjp(f("xla", None), *arrays)
    dy = jnp.asarray(integers(2, y.shape), "float32")
    for a, b in zip((y, *vjp(dy)), (expected, *expected_vjp(dy)), strict=True):
        assert_exact(a, np.asarray(b, np.float64))


BLOCKS = {"direct": T["conv_direct_block"], "depthwise": T["conv_depthwise_pixels"]}


def assert_conv_exact(x: np.ndarray, w: np.ndarray, dy: np.ndarray, **options) -> None:
    """fprop, dgrad and wgrad of integers, natively: what XLA has, to the last bit."""
    x, w, dy = (jnp.asarray(a, "float32") for a in (x, w, dy))
    choice = {key: options.pop(key) for key in ("algorithm",)}

    def all_three(implementation, **choice):
        def f(x, w, dy):
            conv = functools.partial(jaxconv.conv2d, implementation=implementation, **options, **choice)
            y, vjp = jax.vjp(conv, x, w)
            return y, *vjp(dy)

        return jax.jit(f)

    assert sum(calls(all_three("native", **choice), x, w, dy).values()) == 3
    for a, b in zip(all_three("native", **choice)(x, w, dy), all_three("xla")(x, w, dy), strict=True):
        assert_exact(a, np.asarray(b, np.float64))


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("algorithm", BLOCKS)
def test_rows_end_on_both_sides_of_a_block(algorithm, layout):
    """Outputs of a row, strided, two for each channel of x."""
    for width in (BLOCKS[algorithm], BLOCKS[algorithm] + 1):
        groups = 2 if algorithm == "depthwise" else 1
        x, w = integers(0, (1, 2, 2 * width + 1, 2)), integers(1, (1, 3, 2 // groups, 4))
        dy = integers(2, (1, 2, width, 4))
        if layout == "NCHW":
            x, w, dy = np.moveaxis(x, -1, 1), w.transpose(3, 2, 0, 1), np.moveaxis(dy, -1, 1)
        assert_conv_exact(x, w, dy, stride=(1, 2), padding="VALID", groups=groups, layout=layout, algorithm=algorithm)


def test_channels_end_on_both_sides_of_a_block():
    size = T["conv_direct_block"]
    for c, k in ((size, size + 1), (size + 1, size)):
        x, w, dy = integers(0, (1, 3, 3, c)), integers(1, (2, 2, c, k)), integers(2, (1, 2, 2, k))
        assert_conv_exact(x, w, dy, padding="VALID", algorithm="direct")


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("shift", [(1, 0), (0, -2)])
def test_a_1x1_filter_that_is_shifted_is_no_plain_product(shift, layout):
    """Padded on one side by what is cropped on the other: y has x's extents, and every output reads another pixel.

    The expected dw is numpy's: XLA's for a CPU is wrong where two rows are cropped in front.
    """
    x, w, dy = integers(0, (2, 4, 5, 3)), integers(1, (1, 1, 3, 4)), integers(2, (2, 4, 5, 4))
    down, right = shift

    def shifted(a, down, right):
        wide = np.pad(a, ((0, 0), (2, 2), (2, 2), (0, 0)))
        return wide[:, 2 - down : 2 - down + a.shape[1], 2 - right : 2 - right + a.shape[2]]

    expected = [shifted(x, down, right) @ w[0, 0], shifted(dy @ w[0, 0].T, -down, -right)]
    expected.append(np.einsum("nhwc,nhwk->ck", shifted(x, down, right), dy)[None, None])
    arrays = [x, w, dy]
    if layout == "NCHW":
        arrays = [np.moveaxis(x, -1, 1), w.transpose(3, 2, 0, 1), np.moveaxis(dy, -1, 1)]
        expected = [*(np.moveaxis(a, -1, 1) for a in expected[:2]), expected[2].transpose(3, 2, 0, 1)]
    x, w, dy = (jnp.asarray(a, "float32") for a in arrays)
    options = dict(padding=[(down, -down), (right, -right)], layout=layout, algorithm="im2col")
    y, vjp = jax.vjp(lambda x, w: jaxconv.conv2d(x, w, **options), x, w)
    for a, b in zip((y, *vjp(dy)), expected, strict=True):
        assert_exact(a, b)


# ----------------------------------------------------------------------------------------------------------------------
# Matrix products


def product(m: int, n: int, k: int, trans: bool = False) -> None:
    """x @ w of -1, 0, 1, exactly, by the code that BLAS is not asked for."""
    assert m * n * k < T["gemm_blas_work"]
    x, w = integers(0, (m, k), 1), integers(1, (k, n), 1)
    wt = jnp.asarray(w.T if trans else w, "float32")

    def f(x, w):
        return jaxconv.dense(x, w.T if trans else w, **NATIVE)

    assert calls(f, jnp.asarray(x, "float32"), wt) == {"matmul": 1}
    assert_exact(f(jnp.asarray(x, "float32"), wt), x @ w, f"{m} {n} {k}")


@pytest.mark.parametrize("parts", [2, 3, T["gemm_items"]])
def test_a_long_sum_is_cut_into_parts(parts):
    """Parts of k begin at multiples of its share, which is no multiple of a tile's depth."""
    for k in (*around(parts * T["gemm_min_split"]), parts * T["gemm_min_split"] + 301):
        product(3, 5, k)


def test_few_tiles_are_cut_and_many_are_not():
    """splits = items / tiles: a row of tiles more on both sides of one half and of all of the items."""
    m, n, k = T["gemm_tile_m"], T["gemm_tile_n"], 2 * T["gemm_min_split"] + 7
    for tiles in (1, T["gemm_items"] // 2, T["gemm_items"] // 2 + 1):
        rows = min(tiles * m, (T["gemm_blas_work"] - 1) // (n * k))
        product(rows, 3, k)
        product(rows - 1, 3, k, trans=True)


@pytest.mark.parametrize("trans", [False, True])
def test_tiles_end_on_both_sides_of_their_extents(trans):
    sizes = [(T[f"gemm_tile_{axis}"], around(T[f"gemm_tile_{axis}"])) for axis in "mnk"]
    for axis, beside in itertools.product(range(3), (0, 1, 2)):
        product(*(around_it[beside] if i == axis else size for i, (size, around_it) in enumerate(sizes)), trans)


# ----------------------------------------------------------------------------------------------------------------------
# Batch-norm


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("size", [*around(T["batchnorm_buffer"]), *around(T["batchnorm_channel_step"]), 2500])
@pytest.mark.parametrize("layout", ["channels", "images"])
@pytest.mark.usefixtures("x64")
def test_batchnorm_on_both_sides_of_its_buffers(layout, size, activation):
    """Channels last: `size` channels. Channels first: images of `size` pixels. More rows than a block holds."""
    rows = T["batchnorm_block_elements"] // min(size, T["batchnorm_channel_step"]) + 3
    shape, axis, channels = ((rows, size), 1, size) if layout == "channels" else ((rows // 8, 3, size), 1, 3)
    x, dy, residual = (jnp.asarray(normal(i, shape)) for i in range(3))
    scale, bias = jnp.asarray(1 + 0.1 * normal(3, (channels,))), jnp.asarray(normal(4, (channels,)))

    def f(implementation):
        def run(x, scale, bias, residual):
            options = dict(residual=residual, training=True, channel_axis=axis, activation=activation)
            one = jnp.ones(channels)
            return jaxconv.batchnorm(x, scale, bias, one, one, implementation=implementation, **options)[0]

        return run

    y, vjp = jax.vjp(f("native"), x, scale, bias, residual)
    expected, expected_vjp = jax.vjp(f("xla"), x, scale, bias, residual)
    # Sums of up to 10^5 terms of size 1 in float64, in another order.
    for a, b in zip((y, *vjp(dy)), (expected, *expected_vjp(dy)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10 * float(jnp.abs(b).max()))


@pytest.mark.parametrize("axis", [1, 2])
def test_a_mean_that_float32_cannot_hold_is_subtracted_whole(axis):
    """At a mean of 10,000 deviations half an ulp of it is 5e-4 of a deviation; y is right to its own ulps."""
    x = (10_000 + normal(0, (64, 9, 8))).astype(np.float32)
    c, axes = x.shape[axis], tuple({0, 1, 2} - {axis})
    v = jnp.ones(c)

    def f(x):
        return jaxconv.batchnorm(x, v, 0 * v, v, v, training=True, epsilon=0.0, channel_axis=axis, **NATIVE)[0]

    assert calls(f, x) == {"batchnorm_train": 1}
    wide = x.astype(np.float64)
    expected = (wide - wide.mean(axes, keepdims=True)) / wide.std(axes, keepdims=True)
    np.testing.assert_allclose(f(x), expected, rtol=0, atol=3e-6)


# ----------------------------------------------------------------------------------------------------------------------
# Bits at any number of threads

# Each op several times as large as what one thread takes at a time; products below BLAS's threshold.
BITS = """
import hashlib, os, sys
import jax, jax.numpy as jnp, numpy as np
import jaxconv
rng = np.random.default_rng(0)
a = lambda *shape: jnp.asarray(rng.standard_normal(shape), "float32")
native = dict(implementation="native")
def conv(algorithm, groups, layout, **options):
    return lambda x, w: jaxconv.conv2d(x, w, groups=groups, layout=layout, algorithm=algorithm, **native, **options)
def digest(name, f, *args):
    y, vjp = jax.vjp(jax.jit(f), *args)
    h = hashlib.sha256()
    for leaf in jax.tree.leaves((y, vjp(y))):
        h.update(np.asarray(leaf).tobytes())
    print(name, h.hexdigest())
for algorithm in ("direct", "im2col", "depthwise"):
    groups = 6 if algorithm == "depthwise" else 2
    x, w = a(5, 19, 21, 6), a(3, 3, 6 // groups, 12)
    digest(algorithm + " last", conv(algorithm, groups, "NHWC"), x, w)
    digest(algorithm + " first", conv(algorithm, groups, "NCHW"), x.transpose(0, 3, 1, 2), w.transpose(3, 2, 0, 1))
digest("1x1", conv("im2col", 1, "NHWC"), a(3, 20, 20, 8), a(1, 1, 8, 12))
digest("dense", lambda x, w: jaxconv.dense(x, w, activation="gelu", **native), a(70, 5000), a(5000, 9))
def norm(x, s, b):
    return jaxconv.batchnorm(x, s, b, b, s, training=True, activation="silu", **native)[0]
digest("batchnorm", norm, a(3000, 37), a(37), a(37))
"""


def bits(threads: int) -> dict[str, str]:
    # NPROC is the size of XLA's thread pool, whatever the machine has.
    env = {**os.environ, "NPROC": str(threads), "JAX_PLATFORMS": "cpu"}
    made = subprocess.run([sys.executable, "-c", BITS], env=env, capture_output=True, text=True, check=True)
    return dict(line.rsplit(" ", 1) for line in made.stdout.splitlines())


@pytest.mark.promise
def test_bits_do_not_depend_on_the_number_of_threads():
    one, five = bits(1), bits(5)
    assert len(one) == 9
    assert one == five


# ----------------------------------------------------------------------------------------------------------------------
# What stays XLA's, and what its programs write


NORMS = {
    "groupnorm": functools.partial(jaxconv.groupnorm, groups=8, activation="silu"),
    "layernorm": jaxconv.layernorm,
    "batchnorm": lambda x, *p: jaxconv.batchnorm(x, *p, *p, training=True, activation="relu")[0],
}


@pytest.mark.parametrize("shape", [(1, 16, 16, 320), (16, 56, 56, 16), (64, 32, 32, 64)], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_norms_are_xlas_from_few_images_to_many(name, shape):
    """There and back, from few images to many: native code was slower in all of them."""
    f = NORMS[name]
    args = [jnp.ones(shape), jnp.ones(shape[-1]), jnp.ones(shape[-1])]
    gradient = jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args))), range(3))
    assert not calls(f, *args) and not calls(gradient, *args)
    explained = str(jaxconv.explain(gradient)(*args))
    assert "XLA was 1.5 to 9 times faster on an AMD EPYC" in explained and "as the CPU allows" not in explained


def test_group_norms_sums_read_differences_from_numbers_of_channels():
    """Numbers of groups, spread over their channels and taken from x, cost a CPU a fifth of a group-norm's time."""
    x = jnp.ones((1, 16, 16, 320))
    f = functools.partial(jaxconv.groupnorm, groups=32, implementation="xla")
    before_sums = jax.jit(f).lower(x).as_text().split("stablehlo.reduce")[0]
    # The first pixel's channels, as they are: nothing of 32 groups has been spread before x is summed up.
    assert "x320xf32>" in before_sums and "x32x10xf32>" not in before_sums

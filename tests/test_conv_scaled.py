"""Convolutions of 8-bit numbers with scales: their meaning bit for bit by numpy, and by every tile of the kernel."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import A100, DEVICE, H100, H200, PLATFORM, calls, poison, with_hoppers_code
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxconv
from jaxconv import _plan
from jaxconv._plan import conv_scaled as tiles_of
from jaxconv._plan import domain
from jaxconv._problem import EIGHT_BIT_INTEGERS, FLOAT8, ScaledConvProblem

ON_GPU = PLATFORM == "cuda" and DEVICE.compute_capability == (9, 0)
Numbers = np.ndarray[Any, Any]


def kernels(w_dtype: str = "int8", halo: bool = False) -> list[str | None]:
    """What a call is forced to: every tile on a GPU that has them; None is what the plan says. halo: it is a 3x3."""
    if not ON_GPU:
        return [None]
    tiles = {"int8": ("256x128", "128x128", "256x64"), "uint8": ("128x128",)}.get(w_dtype, ("128x128", "256x64"))
    return [*(f"sm90/eight {tile}" for tile in tiles), *["sm90/eight_halo"] * halo]


def values(seed: int, shape: Sequence[int], dtype: str) -> Numbers:
    """Of the whole range of an integer, its ends among them; of float8 normal numbers."""
    rng = np.random.default_rng(seed)
    if dtype not in EIGHT_BIT_INTEGERS:
        return rng.standard_normal(tuple(shape)).astype(jnp.dtype(dtype))
    info = np.iinfo(dtype)
    drawn = rng.integers(info.min, info.max, tuple(shape), endpoint=True).astype(dtype)
    drawn.flat[:: max(1, drawn.size // 7)] = info.min
    drawn.flat[1 :: max(2, drawn.size // 5)] = info.max
    return drawn


@dataclasses.dataclass(frozen=True)
class Case:
    x: tuple[int, ...]
    w: tuple[int, ...]  # taps, C / groups, K
    stride: int = 1
    padding: Any = "SAME"
    dilation: int = 1
    groups: int = 1

    @property
    def options(self) -> dict[str, Any]:
        return dict(stride=self.stride, padding=self.padding, dilation=self.dilation, groups=self.groups)


# Rows, columns and depths that no tile divides; filters that reach out of images; several images in a tile; every rank.
CASES = {
    "one_by_one": Case((2, 9, 11, 64), (1, 1, 64, 48)),
    "one_by_one_deep": Case((1, 5, 7, 528), (1, 1, 528, 272)),
    "three_by_three": Case((3, 13, 12, 48), (3, 3, 48, 80)),
    "more_rows_than_a_tile": Case((2, 17, 23, 32), (3, 3, 32, 304)),
    "many_small_images": Case((150, 2, 2, 16), (3, 3, 16, 16)),
    "stride": Case((2, 15, 13, 32), (3, 3, 32, 32), stride=2),
    "stride_of_a_one_by_one": Case((2, 15, 14, 32), (1, 1, 32, 32), stride=2),
    "dilated": Case((1, 19, 18, 16), (3, 3, 16, 32), dilation=3),
    "uneven_pads": Case((2, 8, 9, 16), (3, 2, 16, 32), padding=((2, 0), (0, 3))),
    "cropped": Case((2, 12, 11, 16), (3, 3, 16, 16), padding=((-2, 1), (0, -1))),
    "groups": Case((2, 6, 7, 256), (3, 3, 128, 32), groups=2),
    "wide_groups": Case((1, 8, 9, 384), (3, 3, 128, 432), groups=3),
    "groups_of_a_one_by_one": Case((2, 6, 7, 256), (1, 1, 128, 544), groups=2),
    "one_dimension": Case((3, 41, 48), (5, 48, 96), padding="CAUSAL"),
    "three_dimensions": Case((2, 5, 6, 7, 16), (3, 2, 3, 16, 48)),
    "several_waves": Case((24, 40, 40, 16), (1, 1, 16, 144)),
}
FUNCTIONS = {1: jaxconv.conv1d, 2: jaxconv.conv2d, 3: jaxconv.conv3d}


def sums(case: Case, x: Numbers, w: Numbers) -> Numbers:
    """The convolution by one product a tap, exact: float64 holds every partial sum."""
    nd = x.ndim - 2
    pads = case.padding
    if isinstance(pads, str):
        spans = [(f - 1) * case.dilation + 1 for f in w.shape[:nd]]
        if pads == "CAUSAL":
            pads = [(spans[0] - 1, 0)]
        else:
            pads = lax.padtype_to_pads(x.shape[1:-1], spans, (case.stride,) * nd, pads)
    wide = np.pad(x.astype(np.float64), [(0, 0), *((max(lo, 0), max(hi, 0)) for lo, hi in pads), (0, 0)])
    crop = tuple(slice(max(-lo, 0), hi if hi < 0 else None) for lo, hi in pads)
    wide = wide[(slice(None), *crop)]
    out = [
        (extent - (f - 1) * case.dilation - 1) // case.stride + 1
        for extent, f in zip(wide.shape[1:-1], w.shape[:nd], strict=True)
    ]
    c, k, g = w.shape[-2], w.shape[-1], case.groups
    y = np.zeros((x.shape[0], *out, k))
    for tap in np.ndindex(*w.shape[:nd]):
        window = tuple(
            slice(t * case.dilation, t * case.dilation + (o - 1) * case.stride + 1, case.stride)
            for t, o in zip(tap, out, strict=True)
        )
        seen = wide[(slice(None), *window)]
        for i in range(g):
            mine = slice(i * k // g, (i + 1) * k // g)
            y[..., mine] += seen[..., i * c : (i + 1) * c] @ w[tap].astype(np.float64)[:, mine]
    return y


def rounded(activation: Any, v: Numbers) -> Numbers:
    if activation == "relu":
        return np.maximum(v, np.float32(0))
    if activation == "relu6":
        return np.minimum(np.maximum(v, np.float32(0)), np.float32(6))
    if isinstance(activation, tuple):
        return np.where(v >= 0, v, np.float32(activation[1]) * v)
    assert activation is None
    return v


def expected(
    acc: Numbers,
    out_dtype: str,
    *,
    scale: Numbers | None = None,
    b: Numbers | None = None,
    residual: Numbers | None = None,
    residual_scale: float | None = None,
    activation: Any = None,
    out_scale: float | None = None,
) -> Numbers:
    """numpy rounds every operation by itself."""
    if b is not None and b.dtype == np.int32:  # wraps around
        acc, b = (acc.astype(np.int64) + b).astype(np.int32), None
    v = acc.astype(np.float32)
    if scale is not None:
        v = v * scale
    if b is not None:
        v = v + b
    if residual is not None:
        r = residual.astype(np.float32)
        v = v + (r if residual_scale is None else r * np.float32(residual_scale))
    v = rounded(activation, v)
    if out_scale is not None:
        v = v * np.float32(out_scale)
    assert v.dtype == np.float32
    if out_dtype in EIGHT_BIT_INTEGERS:
        info = np.iinfo(out_dtype)
        return np.clip(np.rint(v), info.min, info.max).astype(out_dtype)
    if out_dtype in FLOAT8:
        largest = np.float32(jnp.finfo(out_dtype).max)
        v = np.clip(v, -largest, largest)
    return v.astype(jnp.dtype(out_dtype))


def run(case: Case, kernel: str | None, x: Any, w: Any, b: Any = None, **options: Any) -> Numbers:
    conv = FUNCTIONS[x.ndim - 2]
    given = {name: value for name, value in options.items() if value is not None}
    arrays = {n: v for n, v in given.items() if n in ("residual", "scale", "residual_scale", "out_scale")}
    rest = {n: v for n, v in given.items() if n not in arrays} | case.options | dict(algorithm=kernel)

    def f(x: Any, w: Any, b: Any, arrays: dict[str, Any]) -> Any:
        return conv(x, w, b, **arrays, **rest)

    if kernel is not None:
        assert calls(f, x, w, b, arrays) == {"conv_scaled": 1}
    poison()
    return np.asarray(jax.jit(f)(x, w, b, arrays))


def equal(got: Numbers, want: Numbers) -> None:
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64))


def scales(case: Case, seed: int = 3) -> tuple[Numbers, Numbers]:
    """Scales that take most sums into the range of 8 bits, some out of it; and biases."""
    rng, k = np.random.default_rng(seed), case.w[-1]
    depth = math.prod(case.w[:-1])
    typical = 5000 * math.sqrt(depth)
    scale = (60 / typical * rng.uniform(0.3, 2, k)).astype(np.float32)
    return scale, rng.normal(0, 30, k).astype(np.float32)


def of_sums(scale: Numbers, b: Numbers) -> Numbers:
    """The bias of integers that is nearest to one of scaled sums."""
    return np.rint(b / scale).astype(np.int32)


@pytest.mark.parametrize("bias", ["float32", "int32"])
@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("name", CASES)
def test_every_window_is_exact(name, kernel, bias):
    case = CASES[name]
    x, w = values(1, case.x, "int8"), values(2, case.w, "int8")
    acc = sums(case, x, w)
    scale, b = scales(case)
    if bias == "int32":
        b = of_sums(scale, b)
    residual = values(4, acc.shape, "int8")
    how: dict[str, Any] = dict(scale=scale, b=b, residual=residual, residual_scale=0.37, activation="relu")
    how["out_scale"] = 0.9
    got = run(case, kernel, x, w, out_dtype="int8", **how)
    equal(got, expected(acc, "int8", **how))
    assert 0 < np.mean(got == 127) < 0.5 and len(np.unique(got)) > 60


@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize(
    "name",
    ["one_by_one_deep", "groups", "three_dimensions", *(["more_rows_than_a_tile"] if ON_GPU else [])],  # XLA's are slow
)
@pytest.mark.parametrize("out_dtype", ["int32", "float32", "bfloat16", "uint8"])
def test_every_result_of_every_window(name, kernel, out_dtype):
    case = CASES[name]
    x, w = values(1, case.x, "uint8"), values(2, case.w, "int8")
    acc = sums(case, x, w)
    if out_dtype == "int32":
        raw = run(case, kernel, x, w)
        equal(raw, acc.astype(np.int32))
        return
    scale, b = scales(case)
    how: dict[str, Any] = dict(scale=scale / 2, b=b)
    equal(run(case, kernel, x, w, out_dtype=out_dtype, **how), expected(acc, out_dtype, **how))


PAIRS = [(a, b) for a in EIGHT_BIT_INTEGERS for b in EIGHT_BIT_INTEGERS]


@pytest.mark.parametrize(("left", "right"), PAIRS)
def test_every_pair_of_integers(left, right):
    case = CASES["three_by_three"]
    x, w = values(1, case.x, left), values(2, case.w, right)
    acc = sums(case, x, w)
    scale, b = scales(case)
    for kernel in kernels(right, halo=True):
        for bias in (b, of_sums(scale, b), None):
            want = expected(acc, left, scale=scale, b=bias)
            equal(run(case, kernel, x, w, scale=scale, b=bias, out_dtype=left), want)
        equal(run(case, kernel, x, w), acc.astype(np.int32))


@pytest.mark.parametrize("residual_dtype", [None, "int8", "uint8", *FLOAT8, "bfloat16", "float16", "float32"])
@pytest.mark.parametrize("out_dtype", ["int8", "float32"])
@pytest.mark.parametrize("scaled", [True, False])
def test_every_residual(residual_dtype, out_dtype, scaled):
    if residual_dtype is None and scaled:
        pytest.skip("there is nothing to scale")
    case = CASES["three_by_three"]
    x, w = values(1, case.x, "int8"), values(2, case.w, "int8")
    acc = sums(case, x, w)
    scale, _ = scales(case)
    residual = None
    if residual_dtype is not None:
        eight = residual_dtype in EIGHT_BIT_INTEGERS
        residual = values(4, acc.shape, residual_dtype) if eight else (40 * values(4, acc.shape, "float32"))
        residual = residual.astype(jnp.dtype(residual_dtype))
    how = dict(scale=scale, residual=residual, residual_scale=0.71 if scaled else None)
    for kernel in kernels(halo=True):
        equal(run(case, kernel, x, w, out_dtype=out_dtype, **how), expected(acc, out_dtype, **how))


@pytest.mark.parametrize("activation", [None, "relu", "relu6", ("leaky_relu", 0.125), ("leaky_relu", -0.3)])
@pytest.mark.parametrize("out_dtype", ["int8", "uint8", "float16", "float32", *FLOAT8])
def test_every_activation_that_is_exact(activation, out_dtype):
    case = CASES["one_by_one"]
    x, w = values(1, case.x, "int8"), values(2, case.w, "int8")
    acc = sums(case, x, w)
    scale, b = scales(case)
    how: dict[str, Any] = dict(scale=scale / 10, b=b / 10, activation=activation, out_scale=7.3)
    for kernel in kernels():
        equal(run(case, kernel, x, w, out_dtype=out_dtype, **how), expected(acc, out_dtype, **how))


@pytest.mark.parametrize("activation", ["elu", "tanh", "sigmoid", "silu", "gelu", "gelu_exact", "hard_swish"])
def test_the_other_activations_are_within_a_step(activation):
    case = CASES["one_by_one"]
    x, w = values(1, case.x, "int8"), values(2, case.w, "int8")
    scale, b = scales(case)
    v = expected(sums(case, x, w), "float32", scale=scale / 20, b=b / 20)
    from jaxconv._core.activations import activate, parse

    want = np.asarray(activate(parse("", activation), jnp.asarray(v)))
    for kernel in kernels():
        how: dict[str, Any] = dict(scale=scale / 20, b=b / 20, activation=activation)
        got = run(case, kernel, x, w, **how, out_dtype="float32")
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)
        narrow = run(case, kernel, x, w, **how, out_scale=20.0, out_dtype="int8")
        assert np.abs(narrow.astype(int) - np.clip(np.rint(want * np.float32(20)), -128, 127)).max() <= 1


@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("out_dtype", EIGHT_BIT_INTEGERS)
def test_ties_go_to_even_and_what_is_beyond_to_the_ends(out_dtype, kernel):
    """Sums from -1023 to 1024, halved: every tie, and both ends by far."""
    case = Case((1, 8, 16, 16), (1, 1, 16, 16))
    sum_of = np.arange(-1023, 1025).reshape(1, 8, 16, 16)
    x = np.zeros(case.x, np.int8)
    w = np.zeros(case.w, np.int8)
    x[..., 0], x[..., 1] = np.arange(-64, 64).reshape(1, 8, 16), 1
    w[0, 0, 0], w[0, 0, 1] = 16, np.arange(1, 17)
    acc = sums(case, x, w)
    equal(acc, sum_of.astype(np.float64))
    scale = np.full(16, 0.5, np.float32)
    got = run(case, kernel, x, w, scale=scale, out_dtype=out_dtype)
    equal(got, expected(acc, out_dtype, scale=scale))
    assert {*got[0].flatten()[1021:1026].tolist()} == ({-1, 0, 1} if out_dtype == "int8" else {0, 1})
    large = np.full(16, 3e38, np.float32)
    info = np.iinfo(out_dtype)
    ends = np.where(acc > 0, info.max, np.where(acc < 0, info.min, 0)).astype(out_dtype)
    equal(run(case, kernel, x, w, scale=large, out_dtype=out_dtype), ends)


@pytest.mark.parametrize("kernel", kernels())
def test_sums_beyond_the_range_of_float32s_integers_are_rounded_once(kernel):
    """4608 products of ends reach 7.5e7, which float32 does not hold: int32 does, and the conversion rounds to even."""
    case = Case((1, 5, 5, 512), (3, 3, 512, 32))
    x = np.full(case.x, -128, np.int8)
    w = values(2, case.w, "int8")
    w[..., 0], w[..., 1] = -128, 127
    x[0, 2, 2, :9] = np.arange(9)
    acc = sums(case, x, w)
    assert np.abs(acc).max() > 2**26 and (acc.astype(np.float32) != acc).any()
    equal(run(case, kernel, x, w), acc.astype(np.int32))
    equal(run(case, kernel, x, w, scale=np.ones(32, np.float32)), acc.astype(np.float32))


def steps(x: Numbers, w: Numbers) -> tuple[Numbers, Numbers]:
    """(x @ w exactly, a bound of what a chain of 128 products loses), x (M, K), w (K, N).

    The tensor cores align 32 products and the sum before to the largest of them, and keep 13 bits behind its first:
    each of the 33 loses less than 2^-13 of it. float32 sums of chains lose 2^-24 each.
    """
    products = x.astype(np.float64)[:, :, None] * w.astype(np.float64)[None]
    lost, total = np.zeros(products[:, 0].shape), np.zeros(products[:, 0].shape)
    for chain in range(0, products.shape[1], 128):
        partial = np.zeros_like(total)
        for step in range(chain, min(chain + 128, products.shape[1]), 32):
            some = products[:, step : step + 32]
            largest = np.maximum(np.abs(some).max(1), np.abs(partial) + lost)
            lost += 33 * 2.0**-13 * largest
            partial += some.sum(1)
        total += partial
        lost += 2.0**-23 * np.abs(total)
    return total, lost


@with_hoppers_code  # XLA's own float8 convolutions on a GPU promise less
@pytest.mark.parametrize(("left", "right"), [(a, b) for a in FLOAT8 for b in FLOAT8])
def test_float8_sums_lose_what_a_chain_of_128_does(left, right):
    x, w = values(1, (1, 7, 10, 640), left), values(2, (1, 1, 640, 48), right)
    total, lost = steps(x.reshape(70, 640), w[0, 0])
    for kernel in kernels(right):
        got = run(Case(x.shape, w.shape), kernel, x, w, out_dtype="float32").reshape(total.shape)
        off = np.abs(got - total)
        assert (off <= lost).all()
        assert (
            off <= 2.0**-9 * np.abs(x.astype(np.float64).reshape(70, 640)) @ np.abs(w[0, 0].astype(np.float64))
        ).all()


@pytest.mark.parametrize("kernel", kernels("float8_e4m3fn"))
def test_long_float8_sums_do_not_stand_still(kernel):
    """A chain of the tensor cores' would not grow beyond 2^14 ones."""
    x, w = np.ones((1, 1, 16, 32768), jnp.float8_e4m3fn), np.ones((1, 1, 32768, 16), jnp.float8_e4m3fn)
    got = run(Case(x.shape, w.shape), kernel, x, w, out_dtype="float32")
    np.testing.assert_array_equal(got, np.full((1, 1, 16, 16), 32768.0, np.float32))


@pytest.mark.parametrize("name", ["three_by_three", "groups", "more_rows_than_a_tile", "stride"])
@pytest.mark.parametrize("out_dtype", [*FLOAT8, "bfloat16", "float32"])
def test_float8_with_everything(name, out_dtype):
    case = CASES[name]
    x, w = values(1, case.x, "float8_e4m3fn"), values(2, case.w, "float8_e4m3fn")
    acc = sums(case, x, w)
    rng = np.random.default_rng(5)
    scale, b = rng.uniform(0.5, 2, case.w[-1]).astype(np.float32), rng.normal(0, 9, case.w[-1]).astype(np.float32)
    residual = values(4, acc.shape, "float8_e4m3fn")
    how: dict[str, Any] = dict(scale=scale, b=b, residual=residual, residual_scale=3.0, activation="relu")
    want = expected(acc, "float32", **how).astype(np.float64)
    of_sums = 2.0**-9 * sums(case, np.abs(x.astype(np.float32)), np.abs(w.astype(np.float32))) * scale
    step = float(jnp.finfo(out_dtype).eps) / 2  # of y's own rounding
    for kernel in kernels("float8_e4m3fn", halo=name == "three_by_three"):
        got = run(case, kernel, x, w, out_dtype=out_dtype, **how).astype(np.float64)
        smallest = float(jnp.finfo(out_dtype).smallest_subnormal)
        assert (np.abs(got - want) <= of_sums * (1 + step) + step * np.abs(want) + smallest).all()


def test_float8_saturates_and_keeps_nan():
    case = CASES["one_by_one"]
    x, w = values(1, case.x, "float8_e4m3fn"), values(2, case.w, "float8_e4m3fn")
    x[0, 0, 0, 0] = np.nan
    for kernel in kernels("float8_e4m3fn"):
        for out_dtype in FLOAT8:
            got = run(case, kernel, x, w, scale=np.full(48, 1e9, np.float32), out_dtype=out_dtype).astype(np.float32)
            assert np.isnan(got[0, 0, 0]).all() and not np.isnan(got[0, 0, 1:]).any() and not np.isnan(got[1]).any()
            assert np.nanmax(np.abs(got)) == float(jnp.finfo(out_dtype).max)
        whole = run(case, kernel, x, w, scale=np.full(48, 1e9, np.float32), out_dtype="int8")
        assert (whole[0, 0, 0] == 0).all() and set(np.unique(whole[1])) <= {-128, 0, 127}


# sm90/eight_halo: images, rows and channels that end inside a tile, a block of 64 filters, or a row of 64 or 128
# channels; every padding; several tiles for each CTA, so that buffers come again.
HALO_CASES = {
    "one_pixel": Case((5, 1, 1, 64), (3, 3, 64, 32)),
    "one_image": Case((1, 14, 17, 64), (3, 3, 64, 64)),
    "sixteen_filters": Case((2, 9, 11, 64), (3, 3, 64, 16)),
    "most_of_a_block": Case((3, 13, 12, 48), (3, 3, 48, 48)),
    "two_blocks": Case((2, 10, 21, 64), (3, 3, 64, 128)),
    "part_of_a_second_block": Case((3, 13, 12, 32), (3, 3, 32, 80)),
    "wide_rows": Case((2, 15, 13, 128), (3, 3, 128, 64)),
    "wide_rows_in_part": Case((2, 7, 31, 112), (3, 3, 112, 144)),
    "no_padding": Case((2, 12, 13, 64), (3, 3, 64, 64), padding="VALID"),
    "wide_pads": Case((2, 8, 9, 64), (3, 3, 64, 64), padding=((2, 2), (2, 2))),
    "uneven_pads": Case((2, 8, 9, 64), (3, 3, 64, 64), padding=((2, 0), (0, 1))),
    "dilated": Case((1, 19, 18, 16), (3, 3, 16, 32), dilation=3),
    "long_rows": Case((1, 3, 375, 64), (3, 3, 64, 16)),
    "planes": Case((2, 3, 6, 7, 32), (1, 3, 3, 32, 48)),
    "several_tiles_each": Case((100, 40, 56, 16), (3, 3, 16, 16)),
    "several_tiles_each_in_wide_rows": Case((100, 28, 28, 128), (3, 3, 128, 80)),
}
HALO = "sm90/eight_halo"
on_hopper = pytest.mark.skipif(not ON_GPU, reason="sm90/eight_halo needs a GPU of compute capability 9.0")


@on_hopper
@pytest.mark.parametrize("name", HALO_CASES)
def test_pixels_that_come_once(name):
    case = HALO_CASES[name]
    x, w = values(1, case.x, "int8"), values(2, case.w, "int8")
    acc = sums(case, x, w)
    scale, b = scales(case)
    how: dict[str, Any] = dict(scale=scale, b=b, residual_scale=0.37, activation="relu", out_scale=0.9)
    for residual_dtype, out_dtype in (("int8", "int8"), ("uint8", "bfloat16"), ("float16", "uint8"), (None, "float32")):
        residual = None
        if residual_dtype is not None:
            residual = (30 * values(4, acc.shape, "float32")).clip(0, 127).astype(residual_dtype)
        given = how | (dict(residual=residual) if residual_dtype is not None else dict(residual_scale=None))
        equal(run(case, HALO, x, w, out_dtype=out_dtype, **given), expected(acc, out_dtype, **given))
    equal(run(case, HALO, x, w), acc.astype(np.int32))


@on_hopper
@pytest.mark.parametrize("activation", ["relu6", ("leaky_relu", -0.3), "elu", "gelu", "silu", "gelu_exact", "tanh"])
def test_activations_of_pixels_that_come_once(activation):
    from jaxconv._core.activations import activate, parse

    case = HALO_CASES["one_image"]
    scale, b = scales(case)
    for dtype in ("int8", "float8_e5m2"):
        x, w = values(1, case.x, dtype), values(2, case.w, dtype)
        by = scale if dtype == "int8" else np.full(64, 1 / 16, np.float32)
        how: dict[str, Any] = dict(scale=by / 20, b=b / 20, out_dtype="float32")
        v = run(case, HALO, x, w, **how)
        want = np.asarray(activate(parse("", activation), jnp.asarray(v)))
        got = run(case, HALO, x, w, activation=activation, **how)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


@on_hopper
@pytest.mark.parametrize(("left", "right"), [(a, b) for a in FLOAT8 for b in FLOAT8])
@pytest.mark.parametrize("c", [64, 128])
def test_float8_chains_of_pixels_that_come_once(left, right, c):
    """A chain is two taps of 64 channels, or one of 128: 128 products in the order of the filter's elements."""
    x, w = values(1, (2, 7, 10, c), left), values(2, (3, 3, c, 80), right)
    wide = np.pad(x, [(0, 0), (1, 1), (1, 1), (0, 0)])
    taps = [wide[:, r : r + 7, s : s + 10] for r in range(3) for s in range(3)]
    rows, columns = np.concatenate(taps, -1).reshape(140, 9 * c), w.reshape(9 * c, 80)
    total, lost = steps(rows, columns)
    got = run(Case(x.shape, w.shape), HALO, x, w, out_dtype="float32").reshape(total.shape)
    off = np.abs(got - total)
    assert (off <= lost).all()
    assert (off <= 2.0**-9 * np.abs(rows.astype(np.float64)) @ np.abs(columns.astype(np.float64))).all()


@on_hopper
@pytest.mark.parametrize("name", HALO_CASES)
def test_float8_of_pixels_that_come_once(name):
    """Small integers: every chain is exact."""
    case, rng = HALO_CASES[name], np.random.default_rng(6)
    x, w = (rng.integers(-2, 3, shape).astype(jnp.float8_e4m3fn) for shape in (case.x, case.w))
    acc = sums(case, x, w)
    scale = rng.choice([0.25, 0.5, 1], case.w[-1]).astype(np.float32)
    residual = values(4, acc.shape, "float8_e5m2")
    how: dict[str, Any] = dict(scale=scale, residual=residual, residual_scale=2.0, activation="relu")
    for out_dtype in ("float8_e4m3fn", "float8_e5m2", "float16"):
        equal(run(case, HALO, x, w, out_dtype=out_dtype, **how), expected(acc, out_dtype, **how))
    equal(run(case, HALO, x, w, out_dtype="float32"), acc.astype(np.float32))


@pytest.mark.parametrize("kernel", kernels(halo=True))
def test_channels_first(kernel):
    case = CASES["three_by_three"]
    x, w = values(1, case.x, "int8"), values(2, case.w, "int8")
    scale, b = scales(case)
    first = run(case, kernel, x, w, scale=scale, b=b, out_dtype="int8")
    options: dict[str, Any] = dict(scale=scale, out_dtype="int8", layout="NCHW", algorithm=kernel, **case.options)
    last = jax.jit(lambda x, w: jaxconv.conv2d(x, w, b, **options))(x.transpose(0, 3, 1, 2), w.transpose(3, 2, 0, 1))
    equal(np.asarray(last).transpose(0, 2, 3, 1), first)


def test_constants_are_rounded_as_operands_are():
    """XLA may join products with constants, and take a product into a sum: not these."""
    case = CASES["one_by_one"]
    x, w = values(1, case.x, "int8"), values(2, case.w, "int8")
    scale, b = scales(case)
    residual = values(4, (*case.x[:-1], case.w[-1]), "int8")
    how: dict[str, Any] = dict(scale=scale, b=b, residual=residual, residual_scale=0.071, out_scale=1.3)
    want = expected(sums(case, x, w), "float32", **how)
    equal(np.asarray(jax.jit(lambda: jaxconv.conv2d(x, w, out_dtype="float32", **how))()), want)
    eager = jaxconv.conv2d(x, w, out_dtype="float32", **how)
    equal(np.asarray(eager), want)
    bare: dict[str, Any] = dict(scale=scale, out_scale=1.3)
    want = expected(sums(case, x, w), "float32", **bare)
    equal(np.asarray(jax.jit(lambda: jaxconv.conv2d(x, w, out_dtype="float32", **bare))()), want)


@pytest.mark.parametrize("bias", ["float32", "int32"])
def test_mapped(bias):
    case = CASES["one_by_one"]
    x, w = values(1, (3, *case.x), "int8"), values(2, (3, *case.w), "int8")
    scale, b = scales(case)
    b = of_sums(scale, b) if bias == "int32" else b
    options: dict[str, Any] = dict(out_dtype="int8", activation="relu")

    def f(x: Any, w: Any, scale: Any) -> Any:
        return jaxconv.conv2d(x, w, b, scale=scale, **options)

    for axes in ((0, None, None), (None, 0, None), (0, 0, None), (0, None, 0), (None, 0, 0)):
        each = np.stack([scale, scale * 2, scale * 3]) if axes[2] == 0 else scale
        args = x if axes[0] == 0 else x[0], w if axes[1] == 0 else w[0], each
        got = jax.jit(jax.vmap(f, axes))(*args)
        for i in range(3):
            one = [a[i] if axis == 0 else a for a, axis in zip(args, axes, strict=True)]
            want = expected(sums(case, one[0], one[1]), "int8", scale=one[2], b=b, activation="relu")
            equal(np.asarray(got[i]), want)
    bs = np.stack([b, -b])
    got = jax.vmap(lambda b: jaxconv.conv2d(x[0], w[0], b, scale=scale, **options))(bs)
    for i in range(2):
        want = expected(sums(case, x[0], w[0]), "int8", scale=scale, b=bs[i], activation="relu")
        equal(np.asarray(got[i]), want)


@pytest.mark.skipif(jax.device_count() < 2, reason="one device")
@pytest.mark.parametrize("bias", ["float32", "int32"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("split", ["images", "filters"])
def test_on_a_mesh(split, groups, kind, bias):
    """Images are split, or output channels with their scales; with groups those are whole groups."""
    case = Case((2, 6, 7, 256), (3, 3, 256 // groups, 32), groups=groups)
    x, w = values(1, case.x, "int8"), values(2, case.w, "int8")
    scale, b = scales(case)
    b = of_sums(scale, b) if bias == "int32" else b
    residual = values(4, (*case.x[:-1], 32), "int8")
    mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,))
    images = P("d") if split == "images" else P(None, None, None, "d")
    filters = P() if split == "images" else P(None, None, None, "d")
    channels = P() if split == "images" else P("d")
    of_x = images if split == "images" or groups > 1 else P()
    specs = of_x, filters, channels, channels, images
    given = [
        jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip((x, w, scale, b, residual), specs, strict=True)
    ]

    def f(x: Any, w: Any, scale: Any, b: Any, residual: Any) -> Any:
        how: dict[str, Any] = dict(residual=residual, residual_scale=0.5, out_scale=0.9, out_dtype="int8")
        return jaxconv.conv2d(x, w, b, scale=scale, activation="relu", groups=groups, **how)

    with jax.set_mesh(mesh):
        got = jax.jit(f)(*given)
    how: dict[str, Any] = dict(
        scale=scale, b=b, residual=residual, residual_scale=0.5, activation="relu", out_scale=0.9
    )
    equal(np.asarray(got), expected(sums(case, x, w), "int8", **how))


def test_an_empty_batch_and_no_channels():
    scale = np.ones(16, np.float32)
    y = jaxconv.conv2d(np.zeros((0, 5, 5, 16), np.int8), np.zeros((3, 3, 16, 16), np.int8), scale=scale, out_scale=2.0)
    assert (y.shape, y.dtype) == ((0, 5, 5, 16), np.int8)
    b = np.arange(16, dtype=np.float32)
    y = jaxconv.conv2d(np.zeros((1, 5, 5, 0), np.int8), np.zeros((3, 3, 0, 16), np.int8), b, scale=scale)
    equal(np.asarray(y), np.broadcast_to(b, (1, 5, 5, 16)))
    y = jaxconv.conv2d(np.zeros((1, 5, 5, 0), np.int8), np.zeros((3, 3, 0, 16), np.int8), np.int32(b), scale=0.5)
    equal(np.asarray(y), np.broadcast_to(b / 2, (1, 5, 5, 16)))


@pytest.mark.parametrize("scaled", (dict(scale=0.1), dict(scale=0.1, out_scale=2.0), {}), ids=str)
@pytest.mark.parametrize("dtype", ("int8", "uint8", "float8_e4m3fn"))
def test_a_filter_that_reaches_further_than_x(dtype, scaled):
    """Nothing is computed, whether the platform is known or not."""
    for window in (dict(stride=2), dict(dilation=3)):
        x, w = jnp.ones((2, 2, 16), dtype), jnp.ones((3, 16, 16), dtype)

        def f(x, w, window=window):
            return jaxconv.conv1d(x, w, padding=[(0, 0)], **window, **scaled)

        for y in (f(x, w), jax.jit(f)(x, w), jax.eval_shape(f, x, w), jax.vmap(f)(x[None], w[None])[0]):
            assert y.shape == (2, 0, 16)


def test_types_of_results():
    x, w, scale = np.zeros((1, 4, 4, 16), np.int8), np.zeros((1, 1, 16, 16), np.int8), np.ones(16, np.float32)
    assert jaxconv.conv2d(x, w).dtype == np.int32
    assert jaxconv.conv2d(x, w, scale=scale).dtype == np.float32
    assert jaxconv.conv2d(x, w, scale=0.5, out_scale=2.0).dtype == np.int8
    assert jaxconv.conv2d(x.astype(jnp.float8_e5m2), w.astype(jnp.float8_e4m3fn)).dtype == np.float32


MISTAKES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "scale_of_another_length": (dict(scale=np.ones(3, np.float32)), ValueError, r"scale has shape \(3,\), expected"),
    "scale_zero": (dict(scale=np.zeros(16, np.float32)), ValueError, "scale has an element 0.0, expected positive"),
    "scale_negative": (dict(scale=-1.0), ValueError, "scale has an element -1.0"),
    "scale_too_small": (dict(scale=1e-50), ValueError, "element 1e-50, 0.0 in float32, expected positive"),
    "out_scale_too_large": (dict(scale=1.0, out_scale=1e300), ValueError, r"element 1e\+300, inf in float32"),
    "scale_infinite": (dict(scale=np.full(16, np.inf, np.float32)), ValueError, "element inf"),
    "out_scale_nan": (dict(scale=1.0, out_scale=np.nan), ValueError, "out_scale has an element nan"),
    "out_scale_per_channel": (dict(scale=1.0, out_scale=np.ones(16, np.float32)), ValueError, "out_scale has shape"),
    "scale_of_integers": (dict(scale=np.ones(16, np.int32)), TypeError, "scale has dtype int32, expected float32"),
    "unknown_type": (dict(scale=1.0, out_dtype="int4"), ValueError, "out_dtype=int4 is unknown"),
    "no_type": (dict(scale=1.0, out_dtype="nonsense"), ValueError, "out_dtype='nonsense' is unknown"),
    "scaled_int32": (dict(scale=1.0, out_dtype="int32"), ValueError, "out_dtype=int32 is unknown"),
    "int8_without_a_scale": (dict(out_dtype="int8"), ValueError, "out_dtype=int8 was given without scale="),
    "bias_without_a_scale": (dict(b=np.ones(16, np.float32)), ValueError, "b was given without scale="),
    "bias_of_int16": (dict(scale=1.0, b=np.ones(16, np.int16)), TypeError, "b has dtype int16, expected float32"),
    "bias_of_integers_with_float8": (
        dict(x=np.zeros((1, 4, 4, 16), jnp.float8_e5m2), w=np.zeros((1, 1, 16, 16), jnp.float8_e5m2))
        | dict(scale=1.0, b=np.ones(16, np.int32)),
        TypeError,
        "b has dtype int32, expected float32: sums of float8",
    ),
    "residual_scale_alone": (dict(scale=1.0, residual_scale=1.0), ValueError, "expected a residual with it"),
    "residual_of_another_shape": (
        dict(scale=1.0, residual=np.zeros((1, 4, 4, 8), np.int8)),
        ValueError,
        "residual has shape",
    ),
    "residual_of_another_type": (
        dict(scale=1.0, residual=np.zeros((1, 4, 4, 16), np.int16)),
        TypeError,
        "residual has dtype int16, expected one of",
    ),
    "float8_filters": (dict(scale=1.0, w=np.zeros((1, 1, 16, 16), jnp.float8_e5m2)), TypeError, "expected two of"),
    "no_filters": (dict(scale=1.0, w=None), TypeError, "w must be an array, got NoneType"),
    "wide_filters": (dict(scale=1.0, w=np.zeros((1, 1, 16, 16), np.float32)), TypeError, "w has dtype float32"),
    "wide_images": (dict(scale=1.0, x=np.zeros((1, 4, 4, 16), np.float32)), TypeError, "x has dtype float32"),
    "preactivation": (dict(scale=1.0, return_preactivation=True), ValueError, "return_preactivation=True"),
}


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name, jitted):
    options, error, text = MISTAKES[name]
    given = {"x": np.zeros((1, 4, 4, 16), np.int8), "w": np.zeros((1, 1, 16, 16), np.int8), **options}
    called = functools.partial(jaxconv.conv2d, **given)
    with pytest.raises(error, match=text):
        (jax.jit(called) if jitted else called)()


def test_there_is_no_derivative():
    x, w = np.ones((1, 4, 4, 16), np.int8), np.ones((1, 1, 16, 16), np.int8)
    with pytest.raises(TypeError, match="has no derivative: differentiate one of 16 or 32 bits"):
        jax.grad(lambda scale: jaxconv.conv2d(x, w, scale=scale).sum())(np.float32(1))
    stopped = jax.grad(lambda s: jaxconv.conv2d(x, w, scale=jax.lax.stop_gradient(s)).sum() * s)(np.float32(1))
    assert stopped == 16 * 16 * 16


def _sums(x: Any, w: Any) -> jax.Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers, preferred_element_type=jnp.int32)


def _in_jnp(x: Any, w: Any, scale: Any) -> jax.Array:
    return _sums(x, w).astype(jnp.float32) * scale


def _call(x: Any, w: Any, scale: Any) -> jax.Array:
    return jaxconv.conv2d(x, w, padding="SAME", scale=scale)


ANY_BATCH: dict[str, Any] = {
    "scaled": _call,
    "mapped scales": lambda x, w, s: jax.vmap(_call, (None, None, 0))(x, w, jnp.stack([s, s])),
    "mapped filters": lambda x, w, s: jax.vmap(_call, (None, 0, None))(x, jnp.stack([w, w]), s),
    "jnp": jaxconv.accelerate(_in_jnp),
    "mapped jnp": lambda x, w, s: jax.vmap(jaxconv.accelerate(_in_jnp), (None, None, 0))(x, w, jnp.stack([s, s])),
    "gradient": lambda x, w, s: jax.grad(lambda s: jaxconv.accelerate(_in_jnp)(x, w, s).sum())(s),
}


@pytest.mark.parametrize("device", [H100, A100], ids=["H100", "A100"])
@pytest.mark.parametrize("name", ANY_BATCH)
def test_xla_is_left_no_convolution_of_integers_of_any_batch(name, device):
    """It has none on NVIDIA's GPUs, and a symbolic extent has no kernel."""
    x = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("n"), 6, 6, 16), jnp.int8)
    w, scale = np.ones((3, 3, 16, 16), np.int8), np.full(16, 0.5, np.float32)
    f = jax.jit(lambda *args: ANY_BATCH[name](*args))  # of no cache
    export = functools.partial(jax.export.export, f, disabled_checks=jaxconv.export_checks())
    with _plan.Device.assumed(device):
        assert "stablehlo.convolution" not in export(platforms=("cuda",))(x, w, scale).mlir_module()
    given = np.ones((2, 6, 6, 16), np.int8), w, scale
    np.testing.assert_array_equal(export(platforms=("cuda", "cpu"))(x, w, scale).call(*given), f(*given))


# ----------------------------------------------------------------------------------------------------------------------
# Plans


def problem(x: tuple[int, ...], w: tuple[int, ...], **given: Any) -> ScaledConvProblem:
    """Of int8, with a scale, to int8."""
    options: dict[str, Any] = dict(stride=1, padding="SAME", dilation=1, groups=1, activation=None, layout="NHWC")
    options |= dict(precision=None, return_preactivation=False, algorithm=None, implementation=None)
    arrays: dict[str, Any] = dict(residual=None, residual_scale=None, out_scale=None, out_dtype="int8")
    like = [jax.ShapeDtypeStruct(shape, "int8") for shape in (x, w)]
    scale = jax.ShapeDtypeStruct((w[-1],), "float32")
    return ScaledConvProblem.of("conv2d", 2, *like, None, scale=scale, **arrays, **{**options, **given})


def test_plans_for_hopper(code_for_gpus):
    plan = _plan.plan("conv_scaled", problem((256, 14, 14, 256), (3, 3, 256, 256)), H200)
    assert (plan.implementation, plan.kernel) == ("native", "sm90/eight") and plan.tile
    odd = _plan.plan("conv_scaled", problem((2, 7, 7, 8), (3, 3, 8, 16)), H200)
    assert odd.implementation == "calls" and "multiples of 16 channels a group, got 8 and 16" in odd.reason
    whole = problem((256, 14, 14, 256), (3, 3, 256, 256)).integer
    assert str(_plan.plan("conv_integer", whole, H200)) == "calls[sm90/eight]"
    assert _plan.plan("conv_integer", odd_integer(), H200).kernel == "integer/tile"
    older = _plan.plan(
        "conv_scaled", problem((2, 7, 7, 16), (3, 3, 16, 16)), dataclasses.replace(H200, compute_capability=(8, 0))
    )
    assert older.implementation == "calls" and "compute capability 9.0" in older.reason


def test_which_3x3_fetches_pixels_once(code_for_gpus):
    """Few channels, and tiles for all multiprocessors."""

    def kernel(n: int, c: int, k: int = 64, **given: Any) -> str:
        plan = _plan.plan("conv_scaled", problem((n, 56, 56, c), (3, 3, c, k), **given), H200)
        assert bool(plan.tile) == (plan.kernel == "sm90/eight") and plan.implementation == "native"
        return plan.kernel

    assert kernel(256, 64) == kernel(11, 48, 16) == HALO
    assert kernel(256, 64, algorithm="sm90") == kernel(1, 128, algorithm=HALO) == HALO
    for others in (kernel(10, 64), kernel(256, 32), kernel(256, 128), kernel(256, 64, algorithm="sm90/eight")):
        assert others == "sm90/eight"
    assert kernel(256, 64, stride=2) == kernel(256, 64, padding=((-1, 1), (1, 1))) == "sm90/eight"
    assert kernel(6, 64, k=128) == HALO
    whole = problem((256, 56, 56, 64), (3, 3, 64, 64)).integer
    assert str(_plan.plan("conv_integer", whole, H200)) == f"calls[{HALO}]"


def odd_integer() -> Any:
    return problem((2, 7, 7, 8), (3, 3, 8, 16)).integer


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        (dict(algorithm="sm90/eight 64x64"), 'it has no tile "64x64" of these types'),
        (dict(algorithm="implicit_gemm"), "there is no such kernel"),
        (dict(stride=9, algorithm="sm90"), "its strides must be at most 8, got 9"),
        (dict(groups=2, algorithm="sm90"), "multiples of 128 input channels a group, got 16 and 16"),
        (dict(algorithm="sm90/eight_halo 256x64"), 'it has no tile "256x64" of these types'),
        (dict(stride=2, algorithm="sm90/eight_halo"), "it needs stride 1"),
        (dict(groups=2, algorithm="sm90/eight_halo"), "one group of at most 128 input channels, got 2 of 16"),
        (dict(padding=((-1, 1), (1, 1)), algorithm="sm90/eight_halo"), "it takes no negative padding"),
        (dict(padding=129, algorithm="sm90/eight_halo"), "its padding may reach 128 pixels past"),
    ],
)
def test_what_the_kernel_refuses(code_for_gpus, given, refusal):
    w = (3, 3, 16 if given.get("groups") else 32, 32)
    with pytest.raises(ValueError, match=refusal):
        _plan.plan("conv_scaled", problem((2, 30, 30, 32), w, **given), H200)


@pytest.mark.parametrize(
    ("x", "w", "refusal"),
    [
        ((2, 30, 30, 64), (1, 1, 64, 64), "it needs a 3x3 filter"),
        ((2, 30, 30, 144), (3, 3, 144, 64), "one group of at most 128 input channels, got 1 of 144"),
        ((2, 30, 382, 64), (3, 3, 64, 64), None),  # two rows of 383, two columns and 256 places: 1,024 pixels
        ((2, 30, 383, 64), (3, 3, 64, 64), "its pixels do not fit shared memory"),
        ((2, 30, 106, 128), (3, 3, 128, 64), None),
        ((2, 30, 107, 128), (3, 3, 128, 64), "its pixels do not fit shared memory"),
        ((2047, 1023, 1023, 16), (3, 3, 16, 16), "its pixels do not fit shared memory"),
        ((300, 1000000, 7, 16), (3, 3, 16, 16), "it needs fewer than 2^31 pixels and gaps"),
    ],
)
def test_what_does_not_come_once_is_refused(code_for_gpus, x, w, refusal):
    plan = _plan.Plan("native", "", HALO)
    why = domain.conv_scaled_refusal(plan, problem(x, w), H200)
    assert why is None if refusal is None else refusal in why


def test_the_domain_refuses_parts(code_for_gpus):
    p = problem((2, 30, 30, 32), (3, 3, 32, 32))
    for splits, why in ((1, None), (2, "it has no splits, got 2")):
        plan = _plan.Plan("native", "", "sm90/eight", "128x128", splits)
        assert domain.conv_scaled_refusal(plan, p, H200) == why


@pytest.mark.parametrize(
    ("x", "w", "tile"),
    [
        ((256, 56, 56, 256), (1, 1, 256, 64), "256x64"),
        ((256, 56, 56, 64), (1, 1, 64, 256), "256x128"),
        ((256, 28, 28, 128), (3, 3, 128, 128), "128x128"),
        ((256, 28, 28, 64), (3, 3, 64, 128), "256x128"),
        ((1, 14, 14, 256), (1, 1, 256, 1024), "128x128"),
    ],
)
def test_tiles_of_a_problem(x, w, tile):
    assert tiles_of.tiles(problem(x, w), H200)[0] == tile
    assert sorted(tiles_of.tiles(problem(x, w), H200)) == ["128x128", "256x128", "256x64"]
    of_float8 = dataclasses.replace(problem(x, w), dtype="float8_e5m2", w_dtype="float8_e5m2")
    assert tiles_of.tiles(of_float8, H200)[0] == ("256x64" if tile == "256x64" else "128x128")
    assert sorted(tiles_of.tiles(of_float8, H200)) == ["128x128", "256x64"]


@with_hoppers_code
@pytest.mark.parametrize("scaled", [True, False])
def test_layouts_that_xla_is_asked_for(code_for_gpus, scaled):
    """Filters K-major, their channels together; channels-first arrays channels last; sums of integers the same way."""

    def f(x: Any, w: Any) -> Any:
        return jaxconv.conv2d(x, w, layout="NCHW", scale=0.5 if scaled else None)

    like = jax.ShapeDtypeStruct((2, 32, 9, 9), "int8"), jax.ShapeDtypeStruct((48, 32, 3, 3), "int8")
    with _plan.Device.assumed(H200):
        text = jax.jit(f).trace(*like).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = [line for line in text.splitlines() if "custom_call @jaxconv_conv_scaled_v3" in line]
    images, filters = ("[1, 3, 2, 0]", "[1, 3, 2, 0]") if scaled else ("[3, 2, 1, 0]", "[2, 1, 0, 3]")
    assert f"operand_layouts = [dense<{images}> : tensor<4xindex>, dense<{filters}> : tensor<4xindex>" in call
    assert f"result_layouts = [dense<{images}> : tensor<4xindex>" in call
    assert text.count("stablehlo.transpose") == (0 if scaled else 3)

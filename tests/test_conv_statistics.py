"""conv_statistics: a convolution that sums up what it writes, against float64, split over meshes, and its plan."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import A100, DEVICE, DTYPES, H100, H200, PLATFORM, integers, normal, types_of
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from tolerance import assert_exact, assert_within, eps

import jaxconv
from jaxconv import _plan, _problem
from jaxconv._core import halo
from jaxconv._core.activations import Activation
from jaxconv._ops import reference
from jaxconv._ops.conv import fprop, statistics, with_statistics
from jaxconv._plan import measured
from jaxconv._problem import CONV_ALGORITHMS, AddedConvProblem, ConvProblem


def problem(dtype: str = "float32", **changed: Any) -> ConvProblem:
    """2x9x8 16->24: 144 pixels, no multiple of 64, in whole vectors of 16-bit channels. "tf32": float32 by default."""
    of, precision = ("float32", "default") if dtype == "tf32" else (dtype, "highest")
    shape = ("conv2d", of, 2, 16, 24, 1, (9, 8), (3, 3), (9, 8), (1, 1), ((1, 1), (1, 1)), (1, 1), True)
    made = ConvProblem(*shape, _problem.parse_precision("conv2d", precision))
    return dataclasses.replace(made, **changed)


def kernels(p: ConvProblem) -> list[ConvProblem]:
    """p with every algorithm that gives statistics on this device."""
    forced = [dataclasses.replace(p, algorithm=a) for a in CONV_ALGORITHMS]
    op = "conv_add_statistics" if isinstance(p, AddedConvProblem) else "conv_statistics"
    return [f for f in forced if _plan.supports(op, f.algorithm, f, DEVICE) is None]


# What is added, as AddedConvProblem has it: (bias, residual)
ADDED = {"bias": (True, False), "residual": (False, True), "both": (True, True)}


WIDTHS = {
    "64 channels": dict(batch=3, out_channels=64),
    "256 channels": dict(batch=3, out_channels=256),
    "patches": dict(filter=(3, 2), stride=(3, 2), padding=((0, 0),) * 2, out_spatial=(3, 4)),  # rows are images
}


def adding(p: ConvProblem, added: str) -> AddedConvProblem:
    bias, residual = ADDED[added]
    return AddedConvProblem.of(dataclasses.replace(p, bias=bias), residual)


# A GPU has statistics from sm90, which takes 16 bits and TF32, and channels last; of few channels a group from grouped,
# in 16 bits.
KERNEL_DTYPES = [d for d in (*DTYPES, *["tf32"] * (PLATFORM == "cuda")) if any(kernels(problem(d)))]
CASES = {
    "plain": {},
    "pointwise": dict(filter=(1, 1), padding=((0, 0),) * 2),
    "strided": dict(stride=(2, 2), out_spatial=(5, 4)),
    "many_images": dict(batch=37),  # 2664 pixels: tiles of any size, and a ragged last one
    "one_pixel": dict(batch=1, in_spatial=(1, 1), out_spatial=(1, 1)),
    "many_channels": dict(out_channels=520),  # 8 past two tiles of 256
    "groups": dict(groups=2, in_channels=128, out_channels=144),
}


def few_a_group(channels: int, groups: int, **changed: Any) -> dict[str, Any]:
    return dict(groups=groups, in_channels=channels * groups, out_channels=channels * groups) | changed


_PLANES = dict(in_spatial=(3, 9, 8), out_spatial=(3, 9, 8), filter=(1, 3, 3), stride=(1, 1, 1), dilation=(1, 1, 1))
GROUPED = {
    "4 a group": few_a_group(4, 4),
    "8 a group": few_a_group(8, 9, batch=37),  # two slabs of 64 channels, the last with eight; many images
    "16 a group": few_a_group(16, 5, batch=37),
    "few a group, strided": few_a_group(8, 3, stride=(2, 2), out_spatial=(5, 4)),
    "16 a group, strided": few_a_group(16, 2, batch=9, stride=(2, 2), padding=((0, 1), (0, 1)), out_spatial=(4, 4)),
    # Strips, and tiles without a pixel
    "few a group, wide": few_a_group(4, 2, in_spatial=(5, 70), out_spatial=(5, 70)),
    "few a group, wide, strided": few_a_group(16, 1, in_spatial=(5, 70), stride=(2, 2), out_spatial=(3, 35)),
    "16 a group, blocks of several strips": few_a_group(16, 64, batch=40, in_spatial=(3, 9), out_spatial=(3, 9)),
    "few a group, padded": few_a_group(8, 1, padding=((2, 0), (0, 2))),
    "few a group, one_pixel": few_a_group(8, 1, batch=1, in_spatial=(1, 1), out_spatial=(1, 1)),
    "few a group, planes": few_a_group(8, 2, padding=((0, 0), (1, 1), (1, 1)), **_PLANES),
}


def volume(*size: int, **changed: Any) -> dict[str, Any]:
    of = dict(in_spatial=size, out_spatial=size, filter=(3, 3, 3), stride=(1,) * 3, dilation=(1,) * 3)
    return of | dict(padding=((1, 1),) * 3) | changed


# Few channels over several planes
VOLUMES = {
    "volume": volume(4, 6, 50, in_channels=40),
    "volume, planes of padding": volume(1, 9, 61, batch=3, out_channels=72),  # 8 past a block of 64
    "volume, wide": volume(2, 2, 257, batch=1),
    "volume, few rows": volume(2, 1, 3, batch=1, in_channels=8, out_channels=8),  # less than a tile
}


@pytest.mark.parametrize(
    ("case", "dtype"),
    # Of few channels a group the kernel takes 16 bits.
    [(case, d) for case in (*CASES, *GROUPED, *VOLUMES) for d in KERNEL_DTYPES if case not in GROUPED or d != "tf32"],
)
def test_statistics_of_integers(case, dtype):
    """y is exact; its statistics err by their own rounding and by that of combining parts, a few ulp."""
    p = problem(dtype, **(CASES | GROUPED | VOLUMES)[case])
    filters, rows = p.w_shape, tuple(range(p.nd + 1))
    with types_of(dtype):
        # Every fourth filter element: sums stay integers that 16 bits hold.
        sparse = integers(1, filters, 1) * (integers(2, filters, 3) > 1)
        x, w = jnp.asarray(integers(0, p.x_shape, 1), p.dtype), jnp.asarray(sparse, p.dtype)
        expected = np.asarray(fprop(dataclasses.replace(p, implementation="xla"), x, w), np.float64)
        forced_kernels = kernels(p)
        assert forced_kernels
        for forced in forced_kernels:
            y, mean, var = jax.jit(functools.partial(statistics, forced))(x, w)
            assert_exact(y, expected, forced.algorithm)
            few = 8 * eps(mean.dtype.name)
            assert_within(mean, expected.mean(rows), few * np.abs(expected).max(), f"mean, {forced.algorithm}")
            assert_within(var, expected.var(rows), few * (expected**2).max(), f"variance, {forced.algorithm}")


# A kernel of each family
FAMILIES = {"one group": {}, "two groups": few_a_group(8, 2), "volume": volume(2, 5, 8)}


@pytest.mark.parametrize("groups", FAMILIES)
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_statistics_are_those_of_what_was_rounded(dtype, groups):
    """Results near 300 have an ulp of 2 in bfloat16: the variance is then mostly that of rounding."""
    p = problem(dtype, batch=9, **FAMILIES[groups])
    x, w = normal(0, p.x_shape, p.dtype), 0.05 * normal(1, p.w_shape, p.dtype)
    x[..., :: p.in_channels // p.groups], w[...] = 1, w.astype(jnp.dtype(p.dtype))
    w[(*[1] * p.nd, 0)] += 300
    w = w.astype(jnp.dtype(p.dtype)).astype(np.float64)
    with types_of(dtype):
        for forced in kernels(p):
            y, mean, var = jax.jit(functools.partial(statistics, forced))(*(jnp.asarray(a, p.dtype) for a in (x, w)))
            written = np.asarray(y, np.float64)
            rows = tuple(range(p.nd + 1))
            assert_within(mean, written.mean(rows), 600 * eps(mean.dtype.name), forced.algorithm)
            expected = written.var(rows)
            assert_within(var, expected, 64 * eps(mean.dtype.name) * (1 + expected), forced.algorithm)


@pytest.mark.parametrize("added", ADDED)
@pytest.mark.parametrize("dtype", [d for d in KERNEL_DTYPES if d != "float64"])
@pytest.mark.parametrize("case", [*CASES, *WIDTHS])
def test_statistics_of_sums_of_integers(case, dtype, added):
    """With a bias, a residual, or both: y is exact, and the statistics are those of the sum."""
    p = adding(problem(dtype, **(CASES | WIDTHS)[case]), added)
    with types_of(dtype):
        sparse = integers(1, p.w_shape, 1) * (integers(2, p.w_shape, 3) > 1)
        x, w = jnp.asarray(integers(0, p.x_shape, 1), p.dtype), jnp.asarray(sparse, p.dtype)
        b, residual = integers(3, (p.out_channels,), 9), integers(4, p.y_shape, 5)
        more = [a for a, given in zip((b, residual), ADDED[added], strict=True) if given]
        expected = np.asarray(fprop(dataclasses.replace(p.conv.bare(), implementation="xla"), x, w), np.float64)
        expected = expected + sum(more)
        forced_kernels = kernels(p)
        assert forced_kernels
        for forced in forced_kernels:
            y, mean, var = jax.jit(functools.partial(with_statistics, forced))(
                x, w, *(jnp.asarray(a, p.dtype) for a in more)
            )
            assert_exact(y, expected, forced.algorithm)
            few = 8 * eps(mean.dtype.name)
            assert_within(mean, expected.mean((0, 1, 2)), few * np.abs(expected).max(), f"mean, {forced.algorithm}")
            assert_within(var, expected.var((0, 1, 2)), few * (expected**2).max(), f"variance, {forced.algorithm}")


@pytest.mark.parametrize("added", ADDED)
@pytest.mark.parametrize("dtype", [d for d in KERNEL_DTYPES if d != "float64"])
def test_what_is_added_is_rounded_once(dtype, added):
    """y is within half an ulp of the sum, but for the products' own rounding; the statistics are those of y."""
    p = adding(problem(dtype, batch=9), added)
    multiplied = "bfloat16" if dtype == "tf32" else dtype  # whose numbers TF32 has too
    x, w = normal(0, p.x_shape, multiplied), normal(1, p.w_shape, multiplied) / 8
    summands = normal(2, (24,), p.dtype), normal(3, p.y_shape, p.dtype)
    more = [a for a, given in zip(summands, ADDED[added], strict=True) if given]
    args = [jnp.asarray(a, p.dtype) for a in (x, w, *more)]
    wide = [np.asarray(a, np.float64) for a in args]
    with jax.enable_x64(True):
        q = dataclasses.replace(p.conv.bare(), dtype="float64", implementation="xla")
        exact = np.asarray(fprop(q, *map(jnp.asarray, wide[:2]))) + sum(wide[2:])
    with types_of(dtype):
        for forced in kernels(p):
            y, mean, var = jax.jit(functools.partial(with_statistics, forced))(*args)
            written = np.asarray(y, np.float64)
            # Half an ulp, and of the products, which are summed in float32 where y has 16 bits
            products = 64 * eps("float32")
            assert_within(y, exact, 0.5 * eps(p.dtype) * np.abs(exact) + products, forced.algorithm)
            assert_within(mean, written.mean((0, 1, 2)), 64 * eps(mean.dtype.name), forced.algorithm)
            expected = written.var((0, 1, 2))
            assert_within(var, expected, 64 * eps(mean.dtype.name) * (1 + expected), forced.algorithm)


@pytest.mark.parametrize("groups", FAMILIES)
@pytest.mark.parametrize("dtype", [d for d in KERNEL_DTYPES if d in ("float32", "tf32", "float16")])
def test_variance_is_right_where_the_mean_is_far_from_zero(dtype, groups):
    """1e4 deviations in float32; in float16, whose integers end at 2048, 1000 ones of 1."""
    large = 1000.0 if dtype == "float16" else 1e4  # which TF32 has too
    one = dict(filter=(1, 1), padding=((0, 0),) * 2) if groups == "one group" else {}
    p = problem(dtype, batch=9, **one, **FAMILIES[groups])
    each, k = p.in_channels // p.groups, np.arange(p.out_channels)
    x = integers(0, p.x_shape, 1)
    x[..., ::each] = 1
    w = np.zeros(p.w_shape)
    centre, rows = w[tuple(f // 2 for f in p.filter)], tuple(range(p.nd + 1))
    centre[0], centre[1 + k % (each - 1), k] = large, 1
    for forced in kernels(p):
        y, mean, var = jax.jit(functools.partial(statistics, forced))(*(jnp.asarray(a, p.dtype) for a in (x, w)))
        expected = np.asarray(y, np.float64)
        ulp = eps("float32") * large
        assert_within(mean, expected.mean(rows), 2 * ulp, forced.algorithm)
        assert_within(var, expected.var(rows), 4 * ulp**2 + 64 * eps("float32"), forced.algorithm)


def test_statistics_have_derivatives_and_batch(x64):
    if PLATFORM != "cpu":
        pytest.skip("float64 has no native CUDA kernels")
    p = problem(
        "float64", in_spatial=(3, 2), out_spatial=(3, 2), in_channels=2, out_channels=3, implementation="native"
    )
    f = functools.partial(statistics, p)
    x, w = jnp.asarray(normal(0, p.x_shape)), jnp.asarray(normal(1, p.w_shape))
    check_grads(f, (x, w), order=2)
    for axes in ((0, None), (None, 0), (0, 0)):
        args = [jnp.stack([a, 2 * a]) if axis == 0 else a for a, axis in zip((x, w), axes, strict=True)]
        together = jax.vmap(f, axes)(*args)
        alone = [f(*(a[i] if axis == 0 else a for a, axis in zip(args, axes, strict=True))) for i in range(2)]
        for t, a in zip(together, map(jnp.stack, zip(*alone, strict=True)), strict=True):
            np.testing.assert_allclose(t, a, rtol=0, atol=1e-12)


def test_statistics_of_a_sum_have_derivatives_and_batch(x64):
    if PLATFORM != "cpu":
        pytest.skip("float64 has no native CUDA kernels")
    small = dict(in_spatial=(3, 2), out_spatial=(3, 2), in_channels=2, out_channels=3, implementation="native")
    p = adding(problem("float64", **small), "both")
    f = functools.partial(with_statistics, p)
    args = [jnp.asarray(normal(i, s)) for i, s in enumerate((p.x_shape, p.w_shape, (3,), p.y_shape))]
    check_grads(f, args, order=1)
    for axes in ((0, None, None, None), (None, 0, 0, None), (None, None, None, 0), (None, None, 0, None)):
        mapped = [jnp.stack([a, 2 * a]) if axis == 0 else a for a, axis in zip(args, axes, strict=True)]
        together = jax.vmap(f, axes)(*mapped)
        for i in range(2):
            alone = reference.conv_statistics(
                p, *(a[i] if axis == 0 else a for a, axis in zip(mapped, axes, strict=True))
            )
            for t, a in zip(together, alone, strict=True):
                np.testing.assert_allclose(t[i], a, rtol=0, atol=1e-12)


def test_a_block_and_its_norm_take_the_statistics_of_the_sum():
    """As layers write it, forced as for a measurement: one convolution, and a batch-norm that reads it once. Others
    read the sum too, and gradients are those of the two calls."""
    dtype = "bfloat16" if PLATFORM == "cuda" else "float32"
    forced: dict[str, Any] = dict(algorithm="sm90") if PLATFORM == "cuda" else dict(implementation="native")
    p = problem(dtype)
    shapes = p.x_shape, p.w_shape, (24,), p.y_shape
    if not kernels(adding(p, "both")):
        pytest.skip("no kernel of this device takes statistics in these types")
    args = [jnp.asarray(normal(i, s, dtype), dtype) for i, s in enumerate(shapes)]
    args[1] = 0.1 * args[1]
    v = jnp.ones(24)

    def block(x, w, b, residual, *, how):
        z = jaxconv.conv2d(x, w, b, residual=residual, **how)
        return z, jaxconv.batchnorm(z, v, v, v, v, training=True, activation="relu")[0]

    def run(how):
        f = jaxconv.accelerate(functools.partial(block, how=how))
        return lambda *a: (f(*a), jax.grad(lambda *a: sum(jnp.sin(y).sum() for y in f(*a)), (0, 1, 2, 3))(*a))

    ops = {call.op: call.count for call in jaxconv.explain(run(forced))(*args)}
    assert ops["conv_add_statistics"] == 2 and not ops.keys() & {"conv_add", "conv", "conv_fprop", "batchnorm_train"}
    got, want = jax.jit(run(forced))(*args), jax.jit(run(dict(implementation="xla")))(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(one, np.float64) for one in (a, b))
        assert_within(a, b, 32 * eps(dtype) * max(1.0, np.abs(b).max()), "block")


# ----------------------------------------------------------------------------------------------------------------------
# Meshes

# case: (x, w, how x and w are split, the exchanges beside the moments' sum)
SPLITS = {
    "images": ((8, 6, 5, 4), (3, 3, 4, 6), P(("a", "b")), P(), {}),
    "images, filters": ((8, 6, 5, 4), (3, 3, 4, 6), P("a"), P(None, None, None, "b"), {}),
    "rows": ((2, 8, 5, 4), (3, 3, 4, 6), P(None, "a"), P(), {"collective-permute"}),
    "images, rows": ((4, 8, 5, 4), (3, 3, 4, 6), P("b", "a"), P(), {"collective-permute"}),
    "uneven rows": ((2, 8, 5, 4), (2, 3, 4, 6), P(None, "a"), P(), {"collective-permute"}),
    "rows, their ends again": ((2, 16, 5, 4), (3, 3, 4, 6), P(None, "a"), P(), {"collective-permute"}),
    "inputs": ((2, 6, 5, 4), (3, 3, 4, 6), P(None, None, None, "a"), P(None, None, "a"), {"all-reduce"}),
    "groups": ((2, 6, 5, 4), (3, 3, 2, 6), P(None, None, None, "a"), P(None, None, None, "a"), {}),
}


SPLITS_OF_SUMS = ("images, filters", "images, rows", "rows, their ends again", "inputs", "groups")


@pytest.mark.skipif(jax.device_count() < 4, reason="it takes four devices")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    "case, added", [*((case, "") for case in SPLITS), *((case, "both") for case in SPLITS_OF_SUMS)]
)
def test_statistics_of_shards_are_merged(case, added, kind, monkeypatch):
    """Far from zero, and not alike in every shard; nothing is gathered."""
    if "again" in case:
        monkeypatch.setattr(halo, "LEAST_COPY", 0)
    x_shape, w_shape, x_spec, w_spec, exchanges = SPLITS[case]
    if kind == AxisType.Explicit and "uneven" in case:
        pytest.skip("types have no words for shards of unequal sizes")
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind,) * 2, devices=jax.devices()[:4])
    x = (
        normal(0, x_shape)
        + 30
        + 10 * np.arange(x_shape[1]).reshape(-1, 1, 1)
        + np.arange(x_shape[0]).reshape(-1, 1, 1, 1)
    )
    w = np.abs(normal(1, w_shape))
    groups = x_shape[-1] // w_shape[2]
    padding = [(0, 0), (1, 1)] if "uneven" in case else "SAME"  # 7 rows of y
    p = ConvProblem.infer(
        "conv2d", 2, *(jax.ShapeDtypeStruct(s, "float32") for s in (x_shape, w_shape)), None, stride=1, padding=padding,
        dilation=1, groups=groups, layout="NHWC", precision="highest", activation=None, return_preactivation=False,
        algorithm=None, implementation="native",
    )  # fmt: skip
    y = lax.conv_general_dilated(
        jnp.asarray(x, "float32"), jnp.asarray(w, "float32"), (1, 1), padding, feature_group_count=groups,
        dimension_numbers=("NHWC", "HWIO", "NHWC"), precision="highest",
    )  # fmt: skip
    more = []  # b as w's last axis is split; the residual as y is, all but its channels
    if added:
        p, more = adding(p, added), [(normal(2, y.shape[3:]), P(w_spec[-1] if len(w_spec) == 4 else None))]
        split = [*x_spec, *[None] * (4 - len(x_spec))][:3]
        more.append((normal(3, y.shape), P(*split, more[0][1][0])))
        y = y + sum(jnp.asarray(a, "float32") for a, _ in more)
    wide = np.asarray(y, np.float64)

    def run(*args):
        got, *moments = with_statistics(p, *args)
        # A program does not give away shards of unequal sizes.
        return [got.max() if "uneven" in case else got, *moments]

    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(jnp.asarray(a, "float32"), NamedSharding(mesh, s))
            for a, s in ((x, x_spec), (w, w_spec), *more)
        ]
        compiled = jax.jit(run).lower(*placed).compile()
        got, mean, var = compiled(*placed)
    text = compiled.as_text()
    found = {
        k
        for k in ("all-gather", "all-to-all", "collective-permute", "all-reduce")
        if re.search(rf" {k}(-start)?\(", text)
    }
    merged = set() if case in ("inputs", "groups") else {"all-reduce"}
    assert found == set(exchanges) | merged
    target = "jaxconv_conv_add_statistics" if added else "jaxconv_conv_statistics"
    assert (f'custom_call_target="{target}' in text) == (
        case not in ("inputs", "uneven rows", "rows, their ends again")
    )
    np.testing.assert_allclose(got, y.max() if "uneven" in case else y, rtol=1e-6)
    np.testing.assert_allclose(mean, wide.mean((0, 1, 2)), rtol=2e-6)
    np.testing.assert_allclose(var, wide.var((0, 1, 2)), rtol=2e-5)


# ----------------------------------------------------------------------------------------------------------------------
# The plan

PLANS = {
    "cpu": (_plan.Device("cpu", "cpu"), dict(implementation="native"), "statistics", "implementation='native'"),
    "sm90": (H200, dict(dtype="bfloat16", algorithm="sm90"), "statistics", "algorithm='sm90' was asked for"),
    "native": (H200, dict(dtype="bfloat16", implementation="native"), "statistics", "implementation='native'"),
    "float32": (H200, dict(dtype="float32", implementation="native"), "two", "takes float32 in TF32 only"),
    "tf32": (H200, dict(dtype="tf32", implementation="native"), "statistics", "implementation='native'"),
    "wide": (H200, dict(dtype="bfloat16", algorithm="sm90", out_channels=8512), "two", "a column of tiles of its own"),
    "other": (H200, dict(dtype="bfloat16", algorithm="implicit_gemm"), "two", "only sm90 and grouped take statistics"),
    "grouped": (
        H200,
        few_a_group(8, 2, dtype="bfloat16", algorithm="grouped"),
        "statistics",
        "algorithm='grouped' was asked for",
    ),
    "grouped native": (
        H100,
        few_a_group(16, 40, dtype="float16", implementation="native"),
        "statistics",
        "implementation='native'",
    ),
    "grouped float32": (H200, few_a_group(8, 2, algorithm="grouped"), "two", "bfloat16 or float16, got float32"),
    "grouped wide": (H200, few_a_group(32, 2, dtype="bfloat16", algorithm="grouped"), "two", "4, 8 or 16 channels"),
    "grouped mma": (H200, few_a_group(8, 2, dtype="bfloat16", algorithm="grouped/mma"), "two", "no such kernel"),
    "old": (A100, dict(dtype="bfloat16", implementation="native"), "two", "compute capability 9.0"),
    "mesh": (
        dataclasses.replace(H200, partitioned=True),
        dict(dtype="bfloat16", implementation="native"),
        "two",
        "cannot be told how the two are split",
    ),
    "cpu16": (_plan.Device("cpu", "cpu"), dict(dtype="bfloat16", implementation="native"), "two", "only at its end"),
    "xla": (H200, dict(dtype="bfloat16", implementation="xla"), "two", "implementation='xla'"),
    "empty": (H200, dict(dtype="bfloat16", implementation="native", batch=0), "two", "nothing to compute"),
}


@pytest.mark.parametrize("case", PLANS)
def test_the_plan_takes_statistics_from_the_convolution_where_that_is_asked_and_possible(case, code_for_gpus):
    device, changed, choice, reason = PLANS[case]
    conv = problem(**changed)
    made = _plan.plan("conv_batchnorm", _problem.ConvBatchNormProblem(conv, None), device)
    assert (made.implementation, made.algorithm) == ("calls", choice)
    assert reason in made.reason
    if choice == "statistics":
        part = _plan.plan("conv_statistics", conv, device)
        assert part.implementation == "native"
        if device.platform == "cuda" and conv.groups > 1:
            assert part.kernel == "grouped/statistics"
            blocks = min(288 // -(-conv.out_channels // 64), conv.batch * 9)
            assert part.workspace_bytes == 2 * blocks * (conv.out_channels * 8 + 4)
        elif device.platform == "cuda":
            assert part.algorithm == "sm90"
            parts = 2 * -(-conv.batch * 72 // 128)
            single = conv.dtype == "float32"  # each warp makes a part, and the filter is transposed
            filter = -(-4 * math.prod(conv.w_shape) // 256) * 256 if single else 0
            assert part.workspace_bytes == filter + parts * (4 if single else 1) * (conv.out_channels * 8 + 4)


def test_what_a_map_over_filters_leaves_without_a_kernel_is_two_calls(code_for_gpus):
    """16 filters of 8 channels a group have no such kernel. Who asked for native code did not ask for this op."""
    p = problem(dtype="bfloat16", implementation="native", groups=2, in_channels=16, out_channels=32)
    plan = _plan.plan("conv_statistics", p, H100)
    assert plan.implementation == "xla" and "needs multiples of 64 channels a group" in plan.reason
    with pytest.raises(ValueError, match="cannot run conv_statistics"):
        _plan.plan("conv_statistics", dataclasses.replace(p, algorithm="sm90"), H100)


@pytest.mark.parametrize("channels", [4, 8])
@pytest.mark.parametrize(("ms", "choice"), [(0.5, "statistics"), (1.5, "two")])
def test_the_plan_of_few_channels_a_group_follows_its_measurement(ms, choice, channels, code_for_gpus, monkeypatch):
    """Nothing without one. In float16 a kernel that spreads infinities is not taken: that of 4 channels a group."""
    device = dataclasses.replace(H200, kind="NVIDIA H900")
    p = problem(batch=256, **few_a_group(channels, 32, dtype="bfloat16"))
    op, kind, coordinates = measured.features("conv_statistics", p)
    monkeypatch.setattr(measured, "_learned", {})
    assert _plan.plan("conv_statistics", p, device).reason.startswith("no native kernel was measured near")
    entry = dict(op=op, kind=kind, coordinates=coordinates, case="it", xla_ms=1.0)
    measured.learn(device.kind, [{**entry, "native_ms": {"grouped/statistics": ms}}])
    for dtype in ("bfloat16", "float16"):
        half = dataclasses.replace(p, dtype=dtype)
        norm = _problem.BatchNormProblem("batchnorm", dtype, p.y_shape, 3, True, 0.9, 1e-5, Activation("relu"))
        made = _plan.plan("conv_batchnorm", _problem.ConvBatchNormProblem(half, norm), device)
        alone = _plan.plan("conv_statistics", half, device)
        if dtype == "float16" and channels == 4:
            assert made.kernel == "two" and alone.implementation == "xla"
        else:
            assert made.kernel == choice and "at it, the nearest case measured" in made.reason
            assert (alone.kernel == "grouped/statistics") == (choice == "statistics")


def of_boards(**changed: Any) -> ConvProblem:
    """A tower's convolution: 2048 boards of 19x19, 128 channels."""
    boards = dict(batch=2048, in_channels=128, out_channels=128, in_spatial=(19, 19), out_spatial=(19, 19))
    precision = _problem.parse_precision("conv2d", None)
    return problem("bfloat16", **boards, precision=precision, **changed)


@pytest.mark.parametrize("added", ADDED)
def test_the_plan_of_a_block_of_boards(added, code_for_gpus):
    """739,328 rows fit on no chip: what is saved is a read of them, and an add of its own where no kernel adds."""
    p = adding(of_boards(), added)
    norm = _problem.BatchNormProblem("batchnorm", p.dtype, p.y_shape, 3, True, 0.9, 1e-5)
    pair = _problem.ConvBatchNormProblem(p, norm)
    bare = _problem.ConvBatchNormProblem(of_boards(), norm)
    plans = [_plan.plan(*asked, H100) for asked in (("conv_batchnorm", pair), ("conv_batchnorm", bare))]
    plans.append(_plan.plan("conv_add_statistics", p, H100))
    assert [plan.kernel for plan in plans] == ["statistics", "statistics", "sm90/statistics"]
    gains = [float(re.match(r"([0-9.]+) times faster", plan.reason)[1]) for plan in plans]
    _, residual = ADDED[added]
    assert ("an add" in plans[0].reason) == residual
    assert gains[0] > gains[1] if residual else gains[0] == gains[1]


def test_statistics_of_a_sum_can_be_forced_and_refused(code_for_gpus):
    p = adding(problem("bfloat16"), "both")
    pair = _problem.ConvBatchNormProblem(dataclasses.replace(p, algorithm="sm90"), None)
    assert _plan.plan("conv_batchnorm", pair, A100).kernel == "two"
    assert _plan.plan("conv_batchnorm", pair, H100).kernel == "statistics"
    plan = _plan.plan("conv_add_statistics", pair.conv, H100)
    assert (plan.kernel, plan.reason) == ("sm90/statistics", "algorithm='sm90' was asked for")
    xla = dataclasses.replace(p, implementation="xla")
    assert _plan.plan("conv_add_statistics", xla, H100).implementation == "xla"
    assert (
        "jaxconv"
        not in jax.jit(functools.partial(with_statistics, xla))
        .lower(*(jnp.ones(s, "bfloat16") for s in (p.x_shape, p.w_shape, (24,), p.y_shape)))
        .as_text()
    )

"""What the sm90 kernels say they can run (cuda/conv/sm90/domain.h, cuda/dense/domain.h), at the edge of each limit.

The answers are host code: no GPU is needed.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
from cases import BY_NAME, SM90_CASES
from helpers import H200
from jax import lax

from jaxconv import _plan
from jaxconv._plan import Device, Plan, domain, sm90
from jaxconv._problem import ConvProblem, DenseProblem

DEFAULT, HIGHEST = (lax.Precision.DEFAULT,) * 2, (lax.Precision.HIGHEST,) * 2
OPS = ("conv_fprop", "conv_dgrad", "conv_wgrad", "conv_statistics", "conv_dgrad_add")
FAMILY = (*sm90.PRODUCTS, *sm90.FEW_ROWS, *sm90.HALOS, *sm90.STATISTICS, *sm90.WGRADS)
ANY = {"conv_wgrad": ("wgrad", "128x256"), "conv_statistics": ("statistics", "128x128")}  # else product 128x128


pytestmark = pytest.mark.usefixtures("code_for_gpus")


def conv(
    size: tuple[int, ...] = (16, 16),
    c: int = 64,
    k: int = 64,
    filter: Any = 3,
    padding: Any = None,
    stride: Any = 1,
    dilation: Any = 1,
    **options: Any,
) -> ConvProblem:
    def each(value: Any) -> tuple[Any, ...]:
        return value if isinstance(value, tuple) else (value,) * len(size)

    filter, stride, dilation = each(filter), each(stride), each(dilation)
    reach = [(f - 1) * d for f, d in zip(filter, dilation, strict=True)]
    pads = each(padding) if padding is not None else tuple((r // 2, r - r // 2) for r in reach)
    out = tuple((n + sum(p) - r - 1) // s + 1 for n, p, r, s in zip(size, pads, reach, stride, strict=True))
    given: dict[str, Any] = dict(name="conv", dtype="bfloat16", batch=2, groups=1, channels_last=True)
    given |= dict(precision=DEFAULT, in_channels=c, out_channels=k, in_spatial=size, filter=filter, out_spatial=out)
    return ConvProblem(**{**given, "stride": stride, "padding": pads, "dilation": dilation, **options})


def refused(op: str, kernel: str, tile: str, p: Any, splits: int = 1, device: Device = H200) -> str | None:
    plan = Plan("native", "", f"sm90/{kernel}", tile, splits)
    if isinstance(p, DenseProblem):
        return domain.dense_refusal(plan, p, device)
    return domain.conv_refusal(op, plan, p, device)


def low(v: int) -> tuple[Any, ...]:
    return ((v, 2), (1, 1))


def high(v: int) -> tuple[Any, ...]:
    return ((2, v), (1, 1))


ROW = (1, 3)  # a filter, for images of one row

# op, kernel, tile, what makes the problem, the last value that runs, a step to the first that does not
EDGES: dict[str, tuple[str, str, str, Any, int, int]] = {
    "low padding": ("conv_fprop", "product", "128x128", lambda v: conv(padding=low(v)), 128, 1),
    "high padding": ("conv_fprop", "product", "128x128", lambda v: conv(padding=high(v)), 129, 1),
    "wgrad's padding": ("conv_wgrad", "wgrad", "128x256", lambda v: conv(padding=low(v)), 128, 1),
    "1-D padding": ("conv_fprop", "product", "128x128", lambda v: conv((16,), padding=((v, 2),)), 32768, 1),
    "3-D padding": (
        "conv_fprop",
        "product",
        "128x128",
        lambda v: conv((8, 8, 8), padding=((v, 2), (1, 1), (1, 1))),
        16,
        1,
    ),
    "cropping": ("conv_fprop", "product", "128x128", lambda v: conv((300, 16), padding=((2, -v), (1, 1))), 126, 1),
    "dgrad's padding": ("conv_dgrad", "product", "128x128", lambda v: conv((16, 16), padding=low(v)), 129, 1),
    "reach": ("conv_fprop", "product", "128x128", lambda v: conv((400, 16), filter=(2, 1), dilation=(v, 1)), 254, 1),
    "1-D reach": ("conv_fprop", "product", "128x128", lambda v: conv((70000,), filter=2, dilation=v), 65534, 1),
    "3-D reach": (
        "conv_fprop",
        "product",
        "128x128",
        lambda v: conv((64, 4, 4), filter=(2, 1, 1), dilation=(v, 1, 1)),
        30,
        1,
    ),
    "stride": ("conv_fprop", "product", "128x128", lambda v: conv((64, 64), filter=(1, 3), stride=(v, 1)), 8, 1),
    "dgrad's strides": ("conv_dgrad", "product", "128x128", lambda v: conv((64, 64), stride=(1, v)), 8, 1),
    "pixels": ("conv_fprop", "product", "256x64", lambda v: conv((1, 1), filter=1, batch=v), 2**31 - 4097, 1),
    "pixels as terms": (
        "conv_fprop",
        "product",
        "128x64",
        lambda v: conv((1, 1), filter=1, batch=v, dtype="float32", precision=HIGHEST),
        (2**31 - 4097) // 3,
        1,
    ),
    "columns of statistics": ("conv_statistics", "statistics", "128x128", lambda v: conv(k=v), 64 * 132, 8),
    "resident 64x256 depth": ("conv_fprop", "resident", "64x256", lambda v: conv(c=v, filter=1), 320, 8),
    "resident 128x64 depth": ("conv_dgrad", "resident", "128x64", lambda v: conv(k=v, filter=1), 256, 8),
    "resident columns": ("conv_fprop", "resident", "64x256", lambda v: conv(k=v, filter=1), 64 * 256, 8),
    "halo channels": ("conv_fprop", "halo", "", lambda v: conv(c=v), 64, 8),
    "halo channels of dgrad": ("conv_dgrad", "halo", "", lambda v: conv(k=v), 64, 8),
    "halo taps": ("conv_fprop", "halo", "", lambda v: conv(filter=(1, v)), 16, 1),
    "halo width": ("conv_fprop", "halo", "", lambda v: conv((16, v)), 162, 1),
    "halo width of dgrad": ("conv_dgrad", "halo", "", lambda v: conv((16, v)), 162, 1),
    "halo width of wgrad": ("conv_wgrad", "halo", "", lambda v: conv((16, v)), 322, 1),
    "halo width in TF32": ("conv_fprop", "halo", "", lambda v: conv((16, v), dtype="float32"), 98, 1),
    "halo width of wgrad in TF32": ("conv_wgrad", "halo", "", lambda v: conv((16, v), dtype="float32"), 254, 1),
    "halo places": (
        "conv_fprop",
        "halo",
        "",
        lambda v: conv((1, 1), filter=ROW, padding=((0, 0), (1, 1)), batch=v),
        (2**31 - 4097) // 2,
        1,
    ),
    "halo blocks of wgrad": ("conv_wgrad", "halo", "", lambda v: conv((3, 3), c=16, k=v), 64 * 65535, 8),
    "halo_stream width": ("conv_fprop", "halo_stream", "", lambda v: conv((16, v), c=128), 290, 1),
    "halo_stream channels": ("conv_fprop", "halo_stream", "", lambda v: conv((4, 4), c=v), 576, 8),
    "halo_stream taps": ("conv_fprop", "halo_stream", "", lambda v: conv(filter=(1, v)), 32, 1),
    "halo_stream strides": ("conv_dgrad", "halo_stream", "", lambda v: conv((64, 64), stride=(1, v)), 8, 1),
    "halo_3d channels": ("conv_fprop", "halo_3d", "", lambda v: conv((4, 8, 8), c=v), 64, 8),
    "halo_3d taps": ("conv_fprop", "halo_3d", "", lambda v: conv((4, 8, 40), filter=(3, 1, v), c=16), 16, 1),
    "halo_3d planes": (
        "conv_fprop",
        "halo_3d",
        "",
        lambda v: conv((4, 8, 8), padding=((v, 1), (1, 1), (1, 1))),
        2,
        1,
    ),
    "halo_3d width": ("conv_fprop", "halo_3d", "", lambda v: conv((4, 8, v), c=16), 8 * 381, 1),
    "halo_3d width of 64 channels": ("conv_fprop", "halo_3d", "", lambda v: conv((4, 8, v), k=32), 8 * 105, 1),
    "halo_3d width of dgrad": ("conv_dgrad", "halo_3d", "", lambda v: conv((4, 8, v), c=32), 8 * 105, 1),
    "halo_3d blocks of wgrad": (
        "conv_wgrad",
        "halo_3d",
        "",
        lambda v: conv((8, 16, 16), c=32 * 255, k=v),
        32 * 257,
        8,
    ),
    "halo_3d width of wgrad": ("conv_wgrad", "halo_3d", "", lambda v: conv((4, 8, v), c=16), 8 * 197, 1),
}


@pytest.mark.parametrize("edge", EDGES)
def test_a_limit_is_where_it_says(edge):
    op, kernel, tile, make, last, step = EDGES[edge]
    assert refused(op, kernel, tile, make(last - step)) is None
    assert refused(op, kernel, tile, make(last)) is None
    assert refused(op, kernel, tile, make(last + step)) is not None


@pytest.mark.parametrize("width", [96, 106, 107, 198, 199, 256, 512, 840])
def test_volumes_of_few_channels_have_their_kernel_at_any_width(width):
    for c, k in ((32, 32), (64, 32), (32, 64), (64, 64)):
        p = conv((16, 64, width), c=c, k=k)
        made = _plan.made("conv_wgrad", "sm90", p, H200)
        assert (made.kernel, made.splits) == ("sm90/halo_3d", 132 // (c // 32 * (k // 32)))
        for op in ("conv_fprop", "conv_dgrad"):
            assert refused(op, "halo_3d", "", p) is None
            assert (_plan.made(op, "sm90", p, H200).kernel == "sm90/halo_3d") == (min(c, k) == 32)


def dense(m: int = 256, k: int = 256, n: int = 256, **options: Any) -> DenseProblem:
    return DenseProblem(
        **{**dict(name="dense", dtype="bfloat16", precision=DEFAULT), "m": m, "k": k, "n": n, **options}
    )


DENSE_EDGES: dict[str, tuple[str, str, Any, int, int]] = {
    "rows": ("product", "256x128", lambda v: dense(m=v, k=8, n=8), 2**31 - 4097, 1),
    "rows of terms": (
        "product",
        "128x128",
        lambda v: dense(m=v, k=8, n=8, dtype="float32", precision=HIGHEST),
        (2**31 - 4097) // 3,
        1,
    ),
    "resident 64x256 depth": ("resident", "64x256", lambda v: dense(k=v), 320, 8),
    "resident 128x64 depth": ("resident", "128x64", lambda v: dense(k=v), 256, 8),
    "resident columns": ("resident", "64x256", lambda v: dense(n=v), 64 * 256, 8),
    "tiles of clusters": ("cluster", "64x64", lambda v: dense(m=v, k=8, n=8), 64 * 65535, 1),
    "tiles of clusters in TF32": ("cluster", "64x128", lambda v: dense(n=v, k=8, dtype="float32"), 16383 * 128, 8),
    "resident instances": ("resident", "64x256", lambda v: dense(batch=v, batched=("x", "w")), 64, 1),
}


@pytest.mark.parametrize("edge", DENSE_EDGES)
def test_a_limit_of_dense_is_where_it_says(edge):
    kernel, tile, make, last, step = DENSE_EDGES[edge]
    assert refused("dense", kernel, tile, make(last - step)) is None
    assert refused("dense", kernel, tile, make(last)) is None
    assert refused("dense", kernel, tile, make(last + step)) is not None


@pytest.mark.parametrize("value", [56, 63, 64, 65, 72])
def test_channels_are_whole_vectors(value):
    for op in OPS:
        kernel, tile = ANY.get(op, ("product", "128x128"))
        for options in (dict(c=value), dict(k=value)):
            assert (refused(op, kernel, tile, conv(**options)) is None) == (value % 8 == 0)
    for extent in ("k", "n"):
        assert (refused("dense", "product", "128x128", dense(**{extent: value})) is None) == (value % 8 == 0)


@pytest.mark.parametrize("value", [56, 64, 72])
def test_summed_channels_of_groups_are_whole_blocks(value):
    summed, made = conv(c=2 * value, k=128, groups=2), conv(c=128, k=2 * value, groups=2)
    assert (refused("conv_fprop", "product", "128x128", summed) is None) == (value == 64)
    assert (refused("conv_wgrad", "wgrad", "128x256", summed) is None) == (value == 64)
    assert (refused("conv_dgrad", "product", "128x128", made) is None) == (value == 64)
    assert refused("conv_fprop", "product", "128x128", made) is None
    assert refused("conv_dgrad", "product", "128x128", summed) is None
    strided = conv(c=2 * value, k=128, groups=2, stride=2)
    assert (refused("conv_dgrad", "product", "128x128", strided) is None) == (value == 64)


def test_splits():
    p, rows = conv(), dense(k=640)
    for splits in (0, 1, 2, 4095, 4096, 4097):
        assert (refused("conv_wgrad", "wgrad", "128x256", p, splits) is None) == (1 <= splits <= 4096)
        assert (refused("conv_fprop", "product", "128x128", p, splits) is None) == (splits == 1)
    for splits in (0, 1, 9, 10, 11):
        assert (refused("dense", "rows", "64x128", rows, splits) is None) == (1 <= splits <= 10)
        assert (refused("dense", "product", "128x128", rows, splits) is None) == (splits == 1)
    for splits in (0, 1, 7, 8, 9):
        assert (refused("dense", "cluster", "64x64", rows, splits) is None) == (1 <= splits <= 8)
        assert (refused("conv_fprop", "cluster", "64x64", p, splits) is None) == (1 <= splits <= 8)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_few_rows_reach_clusters(dtype):
    """Heads, layers of perceptrons, squeeze-and-excitations; float32 as TF32 alone, and without a copy of w."""
    for m, k, n in ((1, 2048, 1000), (8, 2048, 1000), (1, 4096, 4096), (64, 768, 3072)):
        p = dense(m, k, n, dtype=dtype, bias="column")
        made = {plan.kernel: plan for plan in _plan.every("dense", p, H200)}
        cluster = made["sm90/cluster"]
        assert cluster.workspace_bytes == 0 and cluster.splits > 1
        assert (_plan.made("dense", "sm90", p, H200) == cluster) == (m <= 16)
        assert {plan.spec for plan in _plan.tiles("dense", p, H200)} >= {
            f"sm90/cluster {tile}" for tile in sm90.CLUSTERS
        }
        assert refused("dense", "cluster", "64x64", dataclasses.replace(p, trans_x=True, k=8)) is not None
    for images, c, k in ((1, 480, 120), (8, 240, 960)):
        p = conv((1, 1), c=c, k=k, filter=1, batch=images, dtype=dtype)
        made = {plan.kernel: plan for plan in _plan.every("conv_fprop", p, H200)}
        assert made["sm90/cluster"].workspace_bytes == 0
    highest = dict(dtype="float32", precision=HIGHEST)
    assert "TF32" in (refused("dense", "cluster", "64x64", dense(**highest)) or "")
    assert "TF32" in (refused("conv_fprop", "cluster", "64x64", conv(**highest)) or "")


def test_few_multiprocessors_have_few_columns():
    small = dataclasses.replace(H200, sm_count=16)
    for columns in (15, 16, 17):
        p, q = conv(k=256 * columns, filter=1), dense(n=256 * columns)
        assert (refused("conv_fprop", "resident", "64x256", p, device=small) is None) == (columns <= 16)
        assert (refused("dense", "resident", "64x256", q, device=small) is None) == (columns <= 16)
        statistics = conv(k=64 * columns)
        assert (refused("conv_statistics", "statistics", "128x128", statistics, device=small) is None) == (
            columns <= 16
        )


def test_other_devices_have_none_of_it():
    for capability in (None, (8, 0), (8, 9), (10, 0), (12, 0)):
        device = dataclasses.replace(H200, compute_capability=capability)
        assert "9.0" in (refused("conv_fprop", "product", "128x128", conv(), device=device) or "")
        assert "9.0" in (refused("dense", "product", "128x128", dense(), device=device) or "")


def test_native_code_has_the_tiles_that_python_lists():
    """Of every size and kernel, in every dtype: what is listed runs somewhere, and nothing else does anywhere."""
    problems = [
        conv(size=(16, 16), filter=f, dtype=dtype, precision=precision)
        for f in (1, 3)
        for dtype, precision in (("bfloat16", DEFAULT), ("float32", DEFAULT), ("float32", HIGHEST))
    ] + [conv((4, 6, 50), c=32, k=32)]
    kernels = {kernel for kernel, _ in FAMILY}
    sizes = ["", *(f"{m}x{n}" for m, n in itertools.product((32, 64, 128, 192, 256), (32, 64, 128, 256, 320, 512)))]
    found = {
        (kernel, tile)
        for kernel, tile in itertools.product(kernels, sizes)
        if tile or kernel.startswith("halo")
        if any(refused(op, kernel, tile, p) is None for op in OPS for p in problems)
    }
    assert found == set(FAMILY)
    for tile in ("128", "x", "128x", "x128", "128x256x1", "128x256 ", "0128x256", "-128x256", "999999999999x1"):
        assert refused("conv_fprop", "product", tile, conv()) is not None
    dense_tiles = {*sm90.PRODUCTS, *sm90.FEW_ROWS, ("rows", "64x128")}
    dense_kernels = {kernel for kernel, _ in dense_tiles}
    found = {
        (kernel, tile)
        for kernel, tile in itertools.product({*kernels, "rows", "nothing"}, sizes[1:])
        for dtype, precision in (("bfloat16", DEFAULT), ("float32", DEFAULT), ("float32", HIGHEST))
        if refused("dense", kernel, tile, dense(dtype=dtype, precision=precision)) is None
    }
    assert found == dense_tiles and {kernel for kernel, _ in found} == dense_kernels


def test_some_case_runs_each_kernel():
    """So that the tests that force kernels on a GPU do run them."""
    left = {f"sm90/{kernel} {tile}".strip() for kernel, tile in FAMILY if kernel != "statistics"}
    kinds = (("bfloat16", "default"), ("float32", "default"), ("float32", "highest"))
    for case, (dtype, precision) in itertools.product(SM90_CASES, kinds):
        p = case.problem(dtype, precision=precision)
        left = {name for name in left if all(_plan.supports(op, name, p, H200) for op in OPS[:3])}
    assert not left


def some_problems(count: int) -> Iterator[ConvProblem]:
    yield conv((56, 56), c=64, k=256, filter=1, batch=256)
    yield conv((56, 56), c=64, k=256, filter=1, dtype="float32", precision=HIGHEST)
    yield conv((16, 16, 16), c=32, k=32)
    draw = random.Random(0)
    for _ in range(count):
        nd = draw.choice((1, 2, 2, 2, 3))
        size = tuple(draw.choice((3, 7, 14, 28, 56)) for _ in range(nd))
        filter = tuple(draw.choice((1, 1, 2, 3, 3, 5)) for _ in range(nd))
        dilation = tuple(draw.choice((1, 1, 1, 2, 9)) for _ in range(nd))
        reach = [(f - 1) * d for f, d in zip(filter, dilation, strict=True)]
        padding = tuple((draw.randint(-1, r + 1), draw.randint(0, r + 1)) for r in reach)
        if any(n + a + b <= r for n, (a, b), r in zip(size, padding, reach, strict=True)):
            continue
        groups = draw.choice((1, 1, 1, 2))
        options: dict[str, Any] = dict(stride=draw.choice((1, 1, 2, 3)), groups=groups, batch=draw.choice((1, 3, 64)))
        options |= dict(c=groups * draw.choice((8, 24, 64, 128, 320)), k=groups * draw.choice((8, 64, 72, 256, 512)))
        options |= draw.choice((dict(), dict(dtype="float32"), dict(dtype="float32", precision=HIGHEST)))
        yield conv(size, filter=filter, dilation=dilation, padding=padding, **options)


def test_what_a_plan_says_native_code_confirms():
    """Of thousands of problems: kernel, tile, parts and workspace, and a workspace only where there is a reason."""
    seen = set()
    for p, op in itertools.product(some_problems(4000), OPS):
        made = _plan.made(op, "sm90", p, H200)
        if isinstance(made, str):
            continue
        seen.add((op, made.kernel))
        assert domain.conv_refusal(op, made, p, H200) is None
        assert made.workspace_bytes == domain.conv_workspace(op, made, p)
        parts = op == "conv_statistics" or made.splits > 1 or made.kernel in ("sm90/halo", "sm90/halo_3d")
        assert made.workspace_bytes >= 0 and (made.workspace_bytes == 0 or parts or p.dtype == "float32")
        assert _plan.made(op, f"{made.kernel} {made.tile}".strip(), p, H200) == made
    assert {kernel for _, kernel in seen} == {f"sm90/{kernel}" for kernel, _ in FAMILY}
    assert {op for op, _ in seen} == set(OPS)


def test_dgrad_adds_by_its_own_kernel():
    p = BY_NAME["pixels_257"].problem("bfloat16")
    p = dataclasses.replace(p, in_channels=64, out_channels=64, algorithm="sm90/product 256x128")
    assert _plan.plan("conv_dgrad_add", p, H200).tile == "256x128"
    p = dataclasses.replace(p, algorithm="sm90/product_swapped")
    assert "takes no addend" in _plan.plan("conv_dgrad_add", p, H200).reason

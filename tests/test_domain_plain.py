"""What direct, im2col and implicit_gemm run, limit by limit (their domain.h), and that plans keep to it.

Plans are data: none of this needs a GPU.
"""

from __future__ import annotations

import dataclasses
import random

import pytest
from helpers import H200
from jax import lax

from jaxconv._plan import Plan, domain, made
from jaxconv._plan.domain import conv_refusal, conv_workspace
from jaxconv._problem import ConvProblem

OPS = ("conv_fprop", "conv_dgrad", "conv_wgrad")
ALGORITHMS = ("direct", "im2col", "implicit_gemm")


pytestmark = pytest.mark.usefixtures("code_for_gpus")


def problem(
    c=16, k=16, groups=1, extent=16, filter=3, stride=1, dilation=1, pad=0, batch=2, dtype="float32", last=True
):
    out = (extent + 2 * pad - (filter - 1) * dilation - 1) // stride + 1
    return ConvProblem(
        "conv", dtype, batch, c, k, groups, (extent,), (filter,), (out,), (stride,), ((pad, pad),), (dilation,), last,
        (lax.Precision.DEFAULT,) * 2,
    )  # fmt: skip


def refusal(kernel: str, p: ConvProblem, tile="", splits=1, chunk=0, op="conv_fprop") -> str | None:
    return conv_refusal(op, Plan("native", "", kernel, tile, splits, chunk), p, H200)


def test_what_a_plan_says_native_code_runs_and_gives_as_much_memory_as_it_asks_for():
    r = random.Random(0)
    for _ in range(1000):
        groups = r.choice((1, 1, 3))
        p = problem(
            groups * r.randint(1, 70), groups * r.randint(1, 70), groups, r.randint(20, 300), r.randint(1, 9),
            r.randint(1, 4), r.randint(1, 2), r.randint(-1, 4), r.choice((1, 2, 200)),
            r.choice(("float32", "bfloat16", "float16")), r.random() < 0.5,
        )  # fmt: skip
        for op in OPS:
            for algorithm in ALGORITHMS:
                plan = made(op, algorithm, p, H200)
                assert isinstance(plan, Plan), plan
                stored = dataclasses.replace(p, channels_last=True) if plan.asks_channels_last else p
                assert conv_refusal(op, plan, stored, H200) is None
                assert plan.workspace_bytes == conv_workspace(op, plan, stored)
            for tile in ("128x128", "128x64", "64x64"):
                plan = made(op, f"implicit_gemm {tile}", p, H200)
                whole = p.out_channels // groups * (4 if p.dtype == "float32" else 2) % 16 == 0
                assert whole or tile == "64x64" or "only tile 64x64" in plan
                assert isinstance(plan, str) or plan.tile == tile


@pytest.mark.parametrize("op", ["conv_fprop", "conv_dgrad"])
@pytest.mark.parametrize("kernel", ["implicit_gemm", "sm90"])
def test_a_pad_that_no_window_reaches_changes_no_plan(kernel, op):
    """SAME pads an even extent under a filter of 2 that steps by 2 nowhere; (0, 1) pads it, and nothing reads that."""
    p = dataclasses.replace(problem(64, 64, extent=28, filter=2, stride=2, batch=512), out_spatial=(14,))
    q = dataclasses.replace(p, padding=((0, 1),))
    assert isinstance(made(op, kernel, p, H200), Plan)
    assert made(op, kernel, p, H200) == made(op, kernel, q, H200)
    assert domain.folded(q, op == "conv_dgrad") == domain.folded(p, op == "conv_dgrad") != p


@pytest.mark.parametrize("kernel", ALGORITHMS)
def test_coordinates_stay_below_two_to_the_30(kernel):
    def why(extent: int) -> str | None:
        return refusal(kernel, problem(1, 4, extent=extent, filter=1, batch=1), tile="64x64", chunk=1)

    # implicit_gemm's go a filter and a stride past the output.
    limit = 2**30 - (1 if kernel == "implicit_gemm" else 0)
    assert [why(limit + i) is None for i in (-1, 0, 1)] == [True, False, False]


def test_im2col_holds_the_columns_of_at_least_one_image_and_of_fewer_than_two_to_the_31_pixels():
    assert "at least 1 image" in refusal("im2col", problem(), chunk=0)
    assert refusal("im2col", problem(), chunk=1) is None
    most, pixels = 2**31 - 1 - 4096, 2**16
    p = problem(1, 1, extent=pixels, filter=1, batch=most // pixels + 1)
    assert refusal("im2col", p, chunk=most // pixels) is None
    assert "2^31" in refusal("im2col", p, chunk=most // pixels + 1)


def test_the_memory_of_im2col_is_less_than_two_to_the_60_bytes():
    """64-bit numbers held the elements, not their bytes."""
    sides = dict(in_spatial=(1, 1), filter=(2**14, 2**15), out_spatial=(2**15 - 1, 2**15), stride=(1, 1))
    more = dict(dilation=(1, 1), padding=((2**14, 0), (2**15, 0)), groups=4)
    p = dataclasses.replace(problem(4, 4, batch=2), **sides, **more)
    for op in ("conv_fprop", "conv_dgrad", "conv_wgrad"):
        assert "less than 2^60 bytes" in refusal("im2col", p, chunk=2, op=op)


def test_the_memory_of_im2col_is_columns_and_partial_sums():
    p = problem(3, 5, batch=10)  # 14 output pixels, 9 inputs each
    columns = 4 * 3 * 3 * 14 * 4
    for op, splits, more in (("conv_fprop", 1, 0), ("conv_dgrad", 1, 0), ("conv_wgrad", 3, 2 * 5 * 3 * 3 * 4)):
        plan = Plan("native", "", "im2col", splits=splits, chunk=4)  # 3 parts of 4 images: 2 images each
        assert conv_workspace(op, plan, p) == -(-columns // 256) * 256 + more


def test_implicit_gemm_refuses_tiles_and_parts_that_it_does_not_have():
    assert refusal("implicit_gemm", problem(), "128x128") is None
    for tile in ("", "256x128", "128"):
        assert "tiles 128x128" in refusal("implicit_gemm", problem(), tile)
    assert refusal("implicit_gemm", problem(k=3), "64x64") is None
    assert "only tile 64x64" in refusal("implicit_gemm", problem(k=3), "128x64")
    assert "channels-last" in refusal("implicit_gemm", problem(last=False), "64x64")
    for splits, runs in ((65534, True), (65535, True), (65536, False)):
        assert (refusal("implicit_gemm", problem(), "64x64", splits, op="conv_wgrad") is None) is runs
    assert "weight gradients only" in refusal("implicit_gemm", problem(), "64x64", 2)


def test_a_problem_with_nothing_in_it_has_an_answer():
    for op in OPS:
        for algorithm in ALGORITHMS:
            for changes in ({"batch": 0}, {"c": 0}, {"k": 0}, {"pad": -8, "filter": 1}):
                plan = made(op, algorithm, problem(**changes), H200)
                assert isinstance(plan, str) or plan.workspace_bytes >= 0

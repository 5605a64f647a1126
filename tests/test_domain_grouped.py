"""What the grouped kernels run, limit by limit (cuda/conv/grouped/domain.h), and that plans keep to it.

Plans are data: none of this needs a GPU.
"""

from __future__ import annotations

import dataclasses
import random

import pytest
from helpers import A100, H200
from jax import lax

from jaxconv._plan import Device, Plan, made
from jaxconv._plan.domain import conv_refusal, conv_workspace
from jaxconv._problem import ConvProblem

RTX4090 = Device("cuda", "NVIDIA GeForce RTX 4090", (8, 9), 128)
OPS = ("conv_fprop", "conv_dgrad", "conv_wgrad", "conv_statistics")
KERNELS = ("rows", "rows_float32", "mma", "statistics")


pytestmark = pytest.mark.usefixtures("code_for_gpus")


def problem(c=32, k=32, groups=4, filter=3, dtype="bfloat16", stride=1, dilation=1, pad=1, extent=24, last=True):
    out = (extent + 2 * pad - (filter - 1) * dilation - 1) // stride + 1
    return ConvProblem(
        "conv", dtype, 2, c, k, groups, (extent,) * 2, (filter,) * 2, (out,) * 2, (stride,) * 2,
        ((pad, pad),) * 2, (dilation,) * 2, last, (lax.Precision.DEFAULT,) * 2,
    )  # fmt: skip


def refusal(kernel: str, p: ConvProblem, device: Device = H200, op: str = "") -> str | None:
    op = op or ("conv_statistics" if kernel == "statistics" else "conv_fprop")
    return conv_refusal(op, Plan("native", "", f"grouped/{kernel}"), p, device)


def test_what_a_plan_says_native_code_runs_and_gives_as_much_memory_as_it_asks_for():
    r, planned = random.Random(0), dict.fromkeys(KERNELS, 0)
    for _ in range(4000):
        groups, each = r.choice((2, 3, 4, 8)), r.choice((2, 4, 8, 12, 16, 20, 32, 36))
        p = problem(
            groups * each, groups * (each if r.random() < 0.7 else r.choice((4, 8, 16, 32))), groups,
            r.choice((1, 2, 3, 3, 3, 5, 7, 8)), r.choice(("bfloat16", "float16", "float32")), r.choice((1, 1, 2, 3)),
            r.choice((1, 1, 2, 6)), r.choice((0, 1, 2, 3)), r.choice((40, 57)), r.random() < 0.8,
        )  # fmt: skip
        stored = dataclasses.replace(p, channels_last=True)
        for op in OPS:
            for device in (H200, A100, RTX4090):
                plan = made(op, "grouped", p, device)
                if isinstance(plan, str):
                    assert all(refusal(kernel, stored, device, op) for kernel in KERNELS)
                    continue
                assert conv_refusal(op, plan, stored, device) is None
                assert plan.workspace_bytes == conv_workspace(op, plan, stored)
                kernel = plan.kernel.removeprefix("grouped/")
                assert device is H200 or (device is A100 and kernel == "mma")
                planned[kernel] += 1
    assert min(planned.values()) > 50, planned


@pytest.mark.parametrize(
    ("kernel", "refused", "runs", "word"),
    [
        ("mma", {"c": 12, "k": 12}, {"c": 16, "k": 16}, "4, 8, ... 32"),
        ("mma", {"c": 144, "k": 144}, {"c": 128, "k": 128}, "4, 8, ... 32"),
        ("mma", {"c": 12, "k": 12, "groups": 3}, {"c": 16, "k": 16, "groups": 4}, "multiple of 8 in all"),
        ("mma", {"stride": 3}, {"stride": 2}, "strides up to 2"),
        ("mma", {"filter": 8}, {"filter": 7}, "filters up to 7"),
        ("mma", {"filter": 3, "dilation": 9}, {"filter": 3, "dilation": 8}, "up to 17"),
        ("mma", {"dtype": "float32"}, {"dtype": "float16"}, "bfloat16 or float16"),
        ("mma", {"last": False}, {}, "channels-last"),
        ("rows", {"c": 128, "k": 128}, {"c": 64, "k": 64}, "4, 8 or 16"),
        ("rows", {"k": 64}, {"k": 32}, "both sides"),
        ("rows", {"stride": 3}, {"stride": 2}, "stride 1 or 2"),
        ("rows", {"dilation": 2}, {}, "not dilated"),
        ("rows", {"filter": 5}, {}, "3x3"),
        ("rows", {"pad": 3}, {"pad": 2}, "padding of 0 to 2"),
        ("rows", {"dtype": "float32"}, {}, "bfloat16 or float16"),
        ("statistics", {"c": 128, "k": 128}, {"c": 64, "k": 64}, "4, 8 or 16"),
        ("statistics", {"stride": 3}, {"stride": 2}, "stride 1 or 2"),
        ("statistics", {"dtype": "float32"}, {"dtype": "float16"}, "bfloat16 or float16"),
        ("rows_float32", {}, {"dtype": "float32"}, "float32"),
        ("rows_float32", {"dtype": "float32", "pad": 3}, {"dtype": "float32", "pad": 0}, "in float32 it needs"),
        ("rows_float32", {"dtype": "float32", "c": 128, "k": 128}, {"dtype": "float32", "c": 12, "k": 12, "groups": 3},
         "in float32 it needs"),
    ],
)  # fmt: skip
def test_each_limit(kernel, refused, runs, word):
    assert refusal(kernel, problem(**runs)) is None
    why = refusal(kernel, problem(**refused))
    assert why is not None and word in why


@pytest.mark.parametrize("pads", [(2, 0), (0, 2), (2, 2), (3, 0), (0, 3), (-1, 1), (1, -1)])
def test_rows_are_padded_by_less_than_the_filter_reaches_on_either_side(pads):
    """A window that meets no pixel, or pixels that meet no window but by the stride."""
    p = dataclasses.replace(problem(), padding=(pads, (1, 1)), out_spatial=(24 + sum(pads) - 2, 24))
    why = refusal("rows", p)
    assert (why is None) == (max(pads) < 3 and min(pads) >= 0), why


def test_the_kernels_of_hopper_run_on_nothing_else():
    assert refusal("rows", problem(), A100) and refusal("rows_float32", problem(dtype="float32"), A100)
    assert refusal("statistics", problem(), A100) and refusal("mma", problem(), A100) is None
    assert "shared memory" in refusal("mma", problem(), RTX4090)


def test_one_kernel_makes_statistics_and_nothing_else():
    for op in ("conv_fprop", "conv_dgrad", "conv_wgrad"):
        assert refusal("statistics", problem(), op=op) == "it makes statistics only"
    for kernel in ("rows", "mma"):
        assert refusal(kernel, problem(), op="conv_statistics") == "it makes no statistics"


@pytest.mark.parametrize(
    ("p", "parts"),
    [
        (problem(c=64, k=64, groups=8), 2 * 2 * 24),  # as many as rows of two images
        (dataclasses.replace(problem(c=64, k=64, groups=8), batch=256), 2 * 288),
        (dataclasses.replace(problem(c=72, k=72, groups=9), batch=256), 2 * 144),
        (dataclasses.replace(problem(c=64 * 200, k=64 * 200, groups=800), batch=256), 2 * 1),
        (problem(c=64, k=64, groups=8, extent=33), 2 * 2 * 33 * 2),
    ],
)
def test_parts_of_statistics(p, parts):
    plan = made("conv_statistics", "grouped", p, H200)
    assert plan.workspace_bytes == parts * (8 * p.out_channels + 4)


def test_a_kernel_can_be_forced():
    assert made("conv_fprop", "grouped", problem(), H200).kernel == "grouped/rows"
    assert made("conv_fprop", "grouped/mma", problem(), H200).kernel == "grouped/mma"
    assert made("conv_fprop", "grouped/rows_float32", problem(), H200) == "it needs float32, got bfloat16"
    assert made("conv_fprop", "grouped/planes", problem(), H200) == "there is no such kernel"

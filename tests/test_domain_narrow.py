"""What the narrow kernel runs, limit by limit (cuda/conv/narrow/domain.h), and that plans keep to it.

Plans are data: none of this needs a GPU.
"""

from __future__ import annotations

import dataclasses
import random

import pytest
from helpers import A100, H200
from jax import lax

from jaxconv._plan import Plan, made
from jaxconv._plan.domain import conv_refusal, conv_workspace
from jaxconv._problem import ConvProblem

OPS = ("conv_fprop", "conv_add", "conv_dgrad", "conv_dgrad_add", "conv_gradient", "conv_gradient_add", "conv_wgrad")


pytestmark = pytest.mark.usefixtures("code_for_gpus")


def problem(
    c=16, k=16, dtype="float32", filter=3, stride=1, dilation=1, pad=(1, 1), rows=24, batch=2, groups=1, last=True,
    precision=lax.Precision.DEFAULT,
):  # fmt: skip
    extent = (rows, 24)
    out = tuple((e + sum(pad) - (filter - 1) * dilation - 1) // stride + 1 for e in extent)
    return ConvProblem(
        "conv", dtype, batch, c, k, groups, extent, (filter,) * 2, out, (stride,) * 2,
        (pad,) * 2, (dilation,) * 2, last, (precision,) * 2,
    )  # fmt: skip


def refusal(op: str, p: ConvProblem) -> str | None:
    return conv_refusal(op, Plan("native", "", "narrow/rows"), p, H200)


def test_what_a_plan_says_native_code_runs_and_gives_as_much_memory_as_it_asks_for():
    r, planned = random.Random(0), dict.fromkeys(OPS, 0)
    for _ in range(3000):
        p = problem(
            r.choice((4, 8, 12, 16, 24, 32, 36)), r.choice((4, 8, 16, 20, 32, 64, 132)),
            r.choice(("bfloat16", "float16", "float32")), r.choice((3, 3, 3, 1, 5)), r.choice((1, 1, 1, 2)),
            r.choice((1, 1, 1, 2)), r.choice(((1, 1), (0, 0), (2, 1), (3, 3), (-1, 1))), r.choice((7, 40)),
            r.choice((1, 64)), last=r.random() < 0.8,
        )  # fmt: skip
        stored = dataclasses.replace(p, channels_last=True)
        for op in OPS:
            assert isinstance(made(op, "narrow", p, A100), str)
            plan = made(op, "narrow", p, H200)
            if isinstance(plan, str):
                assert refusal(op, stored)
                continue
            assert conv_refusal(op, plan, stored, H200) is None
            assert plan.workspace_bytes == conv_workspace(op, plan, stored)
            assert plan.asks_channels_last == (not p.channels_last)
            planned[op] += 1
    assert min(planned.values()) > 50, planned


# What is refused, the last that is not, and a word of the sentence.
@pytest.mark.parametrize(
    ("op", "least", "most", "word"),
    [
        ("conv_fprop", {"c": 36}, {"c": 32}, "32 summed"),
        ("conv_fprop", {"c": 4, "k": 132}, {"c": 4, "k": 128}, "128 others"),
        ("conv_fprop", {"k": 68}, {"k": 64}, "1024 products"),
        ("conv_add", {"c": 36}, {"c": 32}, "32 summed"),
        ("conv_add", {"c": 4, "k": 132}, {"c": 4, "k": 128}, "128 others"),
        ("conv_dgrad", {"k": 36}, {"k": 32}, "32 summed"),
        ("conv_dgrad", {"c": 132, "k": 4}, {"c": 128, "k": 4}, "128 others"),
        ("conv_dgrad_add", {"k": 36}, {"k": 32}, "32 summed"),
        ("conv_dgrad_add", {"c": 132, "k": 4}, {"c": 128, "k": 4}, "128 others"),
        ("conv_gradient", {"k": 36}, {"k": 32}, "32 summed"),
        ("conv_gradient", {"c": 132, "k": 4}, {"c": 128, "k": 4}, "128 others"),
        ("conv_gradient_add", {"k": 36}, {"k": 32}, "32 summed"),
        ("conv_gradient_add", {"c": 132, "k": 4}, {"c": 128, "k": 4}, "128 others"),
        ("conv_dgrad", {"c": 36, "k": 32}, {"c": 32, "k": 32}, "1024 products"),
        ("conv_wgrad", {"c": 36}, {"c": 32}, "up to 32, got 36"),
        ("conv_wgrad", {"k": 36}, {"k": 32}, "up to 32, got 16 and 36"),
        ("conv_fprop", {"c": 6}, {"c": 4}, "16 bytes"),
        ("conv_fprop", {"k": 6}, {"k": 4}, "16 bytes"),
        ("conv_fprop", {"c": 4, "dtype": "bfloat16"}, {"c": 8, "dtype": "bfloat16"}, "16 bytes"),
        ("conv_wgrad", {"groups": 2}, {}, "one group"),
        ("conv_fprop", {"filter": 5, "pad": (2, 2)}, {}, "3x3"),
        ("conv_fprop", {"stride": 2}, {}, "stride 1"),
        ("conv_fprop", {"dilation": 2}, {}, "not dilated"),
        ("conv_fprop", {"pad": (3, 0)}, {"pad": (2, 0)}, "padding of 0 to 2"),
        ("conv_fprop", {"pad": (-1, 1)}, {"pad": (0, 1)}, "padding of 0 to 2"),
        ("conv_fprop", {"precision": lax.Precision.HIGHEST}, {}, "TF32"),
        ("conv_fprop", {"last": False}, {}, "channels-last"),
    ],
)
def test_limits(op, least, most, word):
    assert word in (refusal(op, problem(**least)) or "")
    assert refusal(op, problem(**most)) is None


def test_it_makes_no_statistics():
    for op in ("conv_dgrad_sums", "conv_statistics"):
        assert "sm90" in (refusal(op, problem()) or "")

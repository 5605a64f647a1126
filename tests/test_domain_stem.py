"""What the kernels of few input or output channels run, limit by limit (cuda/conv/stem/domain.h).

Plans are data: none of this needs a GPU.
"""

from __future__ import annotations

import dataclasses
import random

import pytest
from helpers import A100, H100, H200
from jax import lax

from jaxconv import _plan
from jaxconv._plan import Device, Plan, made
from jaxconv._plan.domain import conv_refusal, conv_workspace
from jaxconv._problem import ConvProblem

RTX4090 = Device("cuda", "NVIDIA GeForce RTX 4090", (8, 9), 128)
OPS = ("conv_fprop", "conv_dgrad", "conv_wgrad")
KERNELS = ("sm90_narrow_in", "sm90_narrow_out", "mma", "patches")


pytestmark = pytest.mark.usefixtures("code_for_gpus")


def problem(c=3, k=64, extent=(24, 24), filter=(3, 3), dtype="bfloat16", batch=2, **changes) -> ConvProblem:
    nd = len(filter)
    window = {"stride": 1, "dilation": 1, "padding": 0} | changes
    stride, dilation = ((v,) * nd if isinstance(v, int) else v for v in (window["stride"], window["dilation"]))
    pads = window["padding"]
    padding = tuple((p, p) for p in (pads if isinstance(pads, tuple) else (pads,) * nd))
    spans = [(f - 1) * d + 1 for f, d in zip(filter, dilation, strict=True)]
    out = tuple(
        (e + low + high - span) // s + 1 for e, (low, high), span, s in zip(extent, padding, spans, stride, strict=True)
    )
    precision = (window.get("precision", lax.Precision.DEFAULT),) * 2
    return ConvProblem(
        "conv", dtype, batch, c, k, window.get("groups", 1), extent, filter, out, stride, padding, dilation,
        window.get("channels_last", True), precision,
    )  # fmt: skip


def refusal(kernel: str, op: str, p: ConvProblem, device: Device = H200, tile: str = "") -> str | None:
    return conv_refusal(op, Plan("native", "", f"stem/{kernel}", tile), p, device)


def random_problems(count: int) -> list[ConvProblem]:
    r, found = random.Random(0), []
    while len(found) < count:
        few, many = r.randint(1, 9), r.choice((1, 3, 8, 20, 64, 72, 96, 264, 512, 2048))
        c, k = (few, many) if r.random() < 0.6 else (many, few)
        step = r.random() < 0.2
        filter = tuple(r.choice((1, 2, 3, 4, 5, 7, 8, 16)) for _ in range(2))
        stride = filter if step else tuple(r.choice((1, 1, 2, 2, 4, 16, 17)) for _ in range(2))
        dilation = (1, 1) if step else tuple(r.choice((1, 1, 1, 2, 6, 12)) for _ in range(2))
        extent = tuple(f * 6 if step else r.choice((7, 32, 37, 224, 226, 1023)) for f in filter)
        padding = (0, 0) if step else tuple(r.choice((0, 0, 1, 3, 9, -1)) for _ in range(2))
        p = problem(
            c, k, extent, filter, r.choice(("bfloat16", "float16", "float32")), r.choice((1, 3, 128)),
            stride=stride, dilation=dilation, padding=padding, channels_last=r.random() < 0.8,
        )  # fmt: skip
        if min(p.out_spatial) > 0:
            found.append(p)
    return found


def test_what_a_plan_says_native_code_runs_and_gives_as_much_memory_as_it_asks_for():
    planned = dict.fromkeys(KERNELS, 0)
    for p in random_problems(4000):
        for op in OPS:
            for device in (H200, A100, RTX4090):
                plan = made(op, "stem", p, device)
                stored = dataclasses.replace(p, channels_last=True)
                if isinstance(plan, str):
                    assert all(refusal(kernel, op, stored, device) for kernel in KERNELS)
                    continue
                assert conv_refusal(op, plan, stored, device) is None
                assert plan.workspace_bytes == conv_workspace(op, plan, stored)
                kernel = plan.kernel.removeprefix("stem/")
                planned[kernel] += 1
                assert device is not RTX4090
                assert kernel == "mma" or device is H200
    assert min(planned.values()) > 20, planned


def test_a_kernel_can_be_forced_where_it_runs_and_is_refused_with_its_reason_elsewhere():
    p = problem(3, 64, (224, 224), (7, 7), stride=2, padding=3)
    wanted = dict(zip(OPS, ("stem/sm90_narrow_in", "stem/sm90_narrow_out", "stem/sm90_narrow_in"), strict=True))
    for op in OPS:
        assert made(op, "stem", p, H200).kernel == wanted[op]
        assert made(op, "stem/mma", p, H200).kernel == "stem/mma"
        assert made(op, "stem", p, A100).kernel == "stem/mma"
        assert "9.0" in made(op, wanted[op], p, A100)
    assert "few channels" in made("conv_dgrad", "stem/sm90_narrow_in", p, H200)
    assert "few channels" in made("conv_wgrad", "stem/sm90_narrow_out", p, H200)
    vit = problem(3, 768, (224, 224), (16, 16), stride=16)
    assert made("conv_dgrad", "stem/patches 256x64", vit, H200).tile == "256x64"
    assert "its columns need" in made("conv_dgrad", "stem/patches 64x256", vit, H200)


# What is refused, the last that is not, and a word of the sentence.
@pytest.mark.parametrize(
    ("op", "kernel", "least", "most", "word"),
    [
        ("conv_fprop", "mma", {"c": 9, "k": 64}, {"c": 8, "k": 64}, "at most 8"),
        ("conv_fprop", "mma", {"c": 64, "k": 9}, {"c": 64, "k": 8}, "at most 8"),
        ("conv_fprop", "mma", {"groups": 3, "k": 63}, {"k": 63}, "one group"),
        ("conv_fprop", "mma", {"stride": 17}, {"stride": 16}, "strides up to 16"),
        ("conv_fprop", "mma", {"c": 64, "k": 3, "stride": 2}, {"c": 64, "k": 3}, "it needs stride 1"),
        (
            "conv_fprop",
            "mma",
            {"filter": (1, 2), "dilation": 33, "extent": (1, 80)},
            {"filter": (1, 2), "dilation": 32, "extent": (1, 80)},
            "up to 33",
        ),
        ("conv_fprop", "mma", {"filter": (7, 23), "padding": 11}, {"filter": (10, 16), "padding": 8}, "at most 160"),
        (
            "conv_fprop",
            "mma",
            {"filter": (9, 9), "dtype": "float32"},
            {"filter": (8, 10), "dtype": "float32"},
            "at most 160",
        ),
        ("conv_wgrad", "mma", {"k": 68}, {"k": 72}, "multiple of 8"),
        ("conv_dgrad", "mma", {"k": 68}, {"k": 72}, "multiple of 8"),
        (
            "conv_dgrad",
            "mma",
            {"c": 1, "filter": (1, 1), "stride": (5, 13)},
            {"c": 1, "filter": (1, 1), "stride": (4, 16)},
            "at most 64",
        ),
        ("conv_dgrad", "mma", {"filter": (1, 17)}, {"filter": (1, 16)}, "at most 16 taps"),
        ("conv_dgrad", "mma", {"k": 41 * 64, "filter": (1, 1)}, {"k": 512, "filter": (1, 5)}, "81920"),
        (
            "conv_fprop",
            "mma",
            {"precision": lax.Precision.HIGHEST, "dtype": "float32"},
            {"dtype": "float32"},
            "only as TF32",
        ),
        ("conv_fprop", "mma", {"channels_last": False}, {}, "channels-last"),
        ("conv_fprop", "sm90_narrow_in", {"k": 60}, {"k": 56}, "whole 16 bytes"),
        ("conv_fprop", "sm90_narrow_in", {"dtype": "float32", "c": 5}, {"dtype": "float32", "c": 4}, "at most 16"),
        ("conv_fprop", "sm90_narrow_in", {"filter": (5, 13)}, {"filter": (4, 16)}, "at most 64"),
        ("conv_wgrad", "sm90_narrow_in", {"filter": (8, 3)}, {"filter": (7, 3)}, "at most 7"),
        ("conv_wgrad", "sm90_narrow_in", {"filter": (3, 5)}, {"filter": (3, 4)}, "at most 4"),
        ("conv_wgrad", "sm90_narrow_in", {"dtype": "float32"}, {"dtype": "float16"}, "16 bit only"),
        ("conv_dgrad", "sm90_narrow_out", {"filter": (9, 1)}, {"filter": (8, 1)}, "8 rows"),
        ("conv_dgrad", "sm90_narrow_out", {"filter": (5, 1), "c": 8, "stride": (1, 2)}, {"filter": (4, 1), "c": 8,
         "stride": (1, 2)}, "4 rows"),
    ],
)  # fmt: skip
def test_each_limit(op, kernel, least, most, word):
    assert refusal(kernel, op, problem(**most)) is None
    why = refusal(kernel, op, problem(**least))
    assert why is not None and word in why


def test_windows_that_do_not_fit_shared_memory_are_refused_when_planned():
    """33 pixels between taps, and 8 channels of float32: the filter is small enough, the windows are not."""
    far = {"c": 8, "dtype": "float32", "dilation": (8, 4), "filter": (5, 8), "extent": (80, 160), "stride": 16}
    assert "too large" in refusal("mma", "conv_fprop", problem(**far))
    assert refusal("mma", "conv_fprop", problem(**far | {"stride": 2})) is None
    halo = {"c": 8, "k": 128, "filter": (4, 4), "extent": (112, 112), "batch": 3}
    assert "too large" in refusal("mma", "conv_dgrad", problem(**halo, dilation=6))
    assert refusal("mma", "conv_dgrad", problem(**halo, dilation=2)) is None


def test_a_plan_for_a_problem_with_nothing_in_it_is_no_division_by_zero():
    for op in OPS:
        for kernel in KERNELS:
            refusal(kernel, op, problem(batch=0))
            refusal(kernel, op, dataclasses.replace(problem(), in_spatial=(0, 24), out_spatial=(0, 22)))


def test_patches_are_the_steps_of_a_16_bit_filter_over_all_of_x():
    fits = {"c": 3, "k": 64, "filter": (8, 8), "stride": 8, "extent": (64, 64)}
    assert refusal("patches", "conv_dgrad", problem(**fits), tile="128x128") is None
    assert "no tile" in refusal("patches", "conv_dgrad", problem(**fits), tile="128x100")
    assert "rows of x, w and y" in refusal("patches", "conv_dgrad", problem(**fits | {"k": 60}), tile="128x128")
    for other in ({"extent": (65, 64)}, {"dtype": "float32"}, {"filter": (4, 4), "stride": 4}, {"stride": 7}):
        assert refusal("patches", "conv_dgrad", problem(**fits | other), tile="128x128")
    assert refusal("patches", "conv_fprop", problem(**fits), tile="128x128")
    assert refusal("patches", "conv_dgrad", problem(**fits), A100, tile="128x128")


def test_planes_are_channels_where_the_filter_has_few_of_them():
    """A volume's first layer: T planes of C channels, T * C at most 8, by the kernels of two axes."""
    volume = dict(c=1, k=32, extent=(64, 64, 64), filter=(3, 3, 3), padding=1)
    p = problem(**volume)
    for device in (H200, A100):
        plan = made("conv_wgrad", "stem", p, device)
        assert plan.kernel == "stem/planes" and plan.splits > 100
        assert conv_refusal("conv_wgrad", plan, p, device) is None
        folded, parts = 2 * 64**3 * 4 * 2, plan.splits * 9 * 4 * 32 * 4
        assert plan.workspace_bytes == conv_workspace("conv_wgrad", plan, p) == folded + 9 * 4 * 32 * 2 + parts
        plan = made("conv_fprop", "stem", p, device)
        assert plan.kernel == "stem/planes" and conv_refusal("conv_fprop", plan, p, device) is None
        assert plan.workspace_bytes == conv_workspace("conv_fprop", plan, p) == folded + 9 * 4 * 32 * 2
    assert "shared memory" in made("conv_wgrad", "stem/planes", p, RTX4090)
    for fits, others, why in (
        (dict(c=2), dict(c=3), "at most 8"),
        (dict(filter=(8, 3, 3)), dict(filter=(9, 3, 3)), "at most 8"),
        (dict(filter=(2, 3, 3), padding=(0, 1, 1)), dict(filter=(1, 3, 3), padding=(0, 1, 1)), "several planes"),
        (dict(stride=(17, 1, 1)), dict(stride=(1, 17, 1)), "strides up to 16"),
        (dict(k=40), dict(k=36), "a multiple of 8"),
        (dict(padding=(40, 1, 1)), dict(channels_last=False), "channels-last"),
    ):
        for op in ("conv_fprop", "conv_wgrad"):
            assert refusal("planes", op, problem(**volume | fits)) is None
            if (op, others) == ("conv_fprop", dict(k=36)):  # stem/mma writes any number of channels
                assert refusal("planes", op, problem(**volume | others)) is None
            else:
                assert why in refusal("planes", op, problem(**volume | others))
    assert "it needs fprop or wgrad" in refusal("planes", "conv_dgrad", p)
    assert "one tile" in refusal("planes", "conv_wgrad", p, tile="64x64")
    assert "several planes" in refusal("planes", "conv_wgrad", problem())


def test_planes_of_more_than_8_channels_are_those_of_few_on_both_sides():
    """Filled up to 16 or 32 of them, which narrow/rows takes on Hopper."""
    volume = dict(k=32, extent=(16, 64, 64), filter=(3, 3, 3), padding=1)

    def refused(op: str, device: _plan.Device = H200, **changes) -> str | None:
        return conv_refusal(op, _plan.Plan("native", "", "narrow/planes"), problem(**volume | changes), device)

    for c, channels in ((3, 16), (5, 16), (6, 32), (10, 32)):
        p = problem(c=c, **volume)
        plan = made("conv_wgrad", "narrow", p, H200)
        assert plan.kernel == "narrow/planes" and plan.splits == H200.sm_count
        assert conv_refusal("conv_wgrad", plan, p, H200) is None
        folded, filters = 2 * 16 * 64**2 * channels * 2, 9 * channels * 32
        assert plan.workspace_bytes == folded + filters * 2 + plan.splits * filters * 4
        assert refused("conv_fprop", c=c) is None
    assert "compute capability 9.0" in refused("conv_fprop", A100, c=3)
    assert refused("conv_fprop", c=3, k=64) is None
    assert "up to 32, got 16 and 64" in refused("conv_wgrad", c=3, k=64)
    assert "16 x 72" in refused("conv_fprop", c=3, k=72)
    for changes in (dict(c=2), dict(c=11), dict(c=9, filter=(1, 3, 3))):
        assert "are 9 to 32" in refused("conv_fprop", **changes)
    assert "16 channels: it needs a 3x3 filter" in refused("conv_wgrad", c=3, filter=(3, 3, 4))
    for op in ("conv_dgrad", "conv_add", "conv_dgrad_add", "conv_gradient", "conv_gradient_add", "conv_statistics"):
        assert refused(op, c=3), op


@pytest.mark.parametrize("op", ["conv_fprop", "conv_wgrad"])
def test_a_volumes_first_layer_is_planes_by_default_on_hopper(op, monkeypatch):
    """Where no table has it; of a kind that was measured."""
    volume = dict(batch=8, c=1, k=32, extent=(64, 64, 64), filter=(3, 3, 3), padding=1, dtype="bfloat16")
    wide, more = dict(dtype="float32"), (dict(c=2), dict(c=7), dict(k=64), dict(dtype="float16"))
    for changes in ({}, dict(batch=1), *more, wide, wide | dict(k=64)):
        for device in (H100, H200):
            plan = _plan.plan(op, problem(**volume | changes), device)
            few = changes.get("c", 1) <= 2
            assert plan.kernel == ("stem/planes" if few else "narrow/planes"), (changes, plan.reason)
    others = [dict(c=11), dict(c=8, k=64), dict(extent=(16, 64, 64)), dict(stride=2), dict(filter=(5, 3, 3)), dict(k=8)]
    others += [dict(c=7, k=16)]  # 32 channels of the folded image would be more than y's
    monkeypatch.setattr("jaxconv._plan.model.model", lambda: None)  # which may expect planes to be the fastest
    for changes in others:
        plan = _plan.plan(op, problem(**volume | dict(batch=1) | changes), H100)
        assert not plan.kernel.endswith("planes"), (changes, plan.reason)
    assert _plan.plan(op, problem(**volume), A100).implementation == "xla"

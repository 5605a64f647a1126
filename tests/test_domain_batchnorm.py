"""What the batch-norm kernels run, limit by limit (cuda/batchnorm/domain.h), and that plans keep to it.

Plans are data: none of this needs a GPU.
"""

from __future__ import annotations

import random

import pytest
from helpers import A100, H200

from jaxconv._core.activations import Activation
from jaxconv._plan import Device, Plan, made
from jaxconv._plan.domain import batchnorm_refusal, batchnorm_teams, batchnorm_workspace
from jaxconv._problem import BATCHNORM_ALGORITHMS, BatchNormProblem

A10 = Device("cuda", "NVIDIA A10", (8, 6), 72)
OPS = ("batchnorm_train", "batchnorm_infer", "batchnorm_backward", "batchnorm_dx", "batchnorm_moments")


pytestmark = pytest.mark.usefixtures("code_for_gpus")


def problem(*shape: int, axis=-1, dtype="float32", activation="relu", residual=False, batch=None) -> BatchNormProblem:
    return BatchNormProblem(
        "batchnorm",
        dtype,
        shape,
        axis % len(shape),
        True,
        0.9,
        1e-5,
        Activation(activation, 0.0),
        residual,
        batch=batch,
    )


def refusal(kernel: str, p: BatchNormProblem, op="batchnorm_train", tile="", splits=1, device=H200) -> str | None:
    return batchnorm_refusal(op, Plan("native", "", kernel, tile, splits), p, device)


def test_what_a_plan_says_native_code_runs_and_gives_as_much_memory_as_it_asks_for():
    r = random.Random(0)
    planned = 0
    for _ in range(3000):
        shape = [r.choice((1, 3, 7, 8, 28, 64, 100, 333, 2048)) for _ in range(r.choice((2, 3, 4)))]
        p = problem(
            *shape, axis=r.randrange(4), dtype=r.choice(("float32", "bfloat16", "float16")),
            activation=r.choice(("none", "relu", "silu")), residual=r.random() < 0.5, batch=r.choice((None, 3)),
        )  # fmt: skip
        for device in (H200, A100, A10):
            for op in OPS:
                for kernel in BATCHNORM_ALGORITHMS:
                    plan = made(op, kernel, p, device)
                    if isinstance(plan, Plan):
                        planned += 1
                        assert batchnorm_refusal(op, plan, p, device) is None
                        assert plan.workspace_bytes == batchnorm_workspace(op, plan, p, device)
                        assert (plan.tile != "") == (kernel == "resident_team")
                assert isinstance(made(op, "two_read", p, device), Plan)
    assert planned > 40_000


@pytest.mark.parametrize("kernel", BATCHNORM_ALGORITHMS)
def test_a_channel_has_fewer_than_two_to_the_31_elements(kernel):
    most = 2**31 - 1
    of = [refusal(kernel, problem(n, 8)) for n in (most, most + 1)]
    if kernel != "resident_block":  # whose shared memory is full long before
        assert of[0] is None
    assert "fewer than 2^31 elements per channel, got 2147483648" in of[1]


def test_all_instances_have_fewer_than_two_to_the_31_channels():
    assert refusal("two_read", problem(1, 2**31 - 1)) is None
    assert "2^31 channels" in refusal("two_read", problem(1, 2**31))
    assert refusal("two_read", problem(1, 2**20, batch=2**11 - 1)) is None
    assert "2^31 channels" in refusal("two_read", problem(1, 2**20, batch=2**11))


def test_dtypes_kernels_parts_and_tiles_that_there_are_none_of():
    assert "float64" in refusal("two_read", problem(4, 8, dtype="float64"))
    assert "no such kernel" in refusal("one_read", problem(4, 8))
    for splits, runs in ((0, False), (1, True), (65535, True), (65536, False)):
        assert (refusal("two_read", problem(4, 8), splits=splits) is None) is runs
    for tile, runs in (("32B", True), ("64B", True), ("128B", True), ("256B", False), ("64", False)):
        assert (refusal("resident_team", problem(4, 8), tile=tile) is None) is runs
    for kernel in ("resident_block", "resident_team"):
        assert refusal(kernel, problem(4, 8), "batchnorm_infer") == "inference is a single pass"
        assert refusal(kernel, problem(4, 8), "batchnorm_dx") == "dx of given sums is a single pass"
        assert refusal(kernel, problem(4, 8), "batchnorm_moments") == "statistics alone are a single pass"
    for op in ("batchnorm_infer", "batchnorm_dx", "batchnorm_moments"):
        assert refusal("two_read", problem(4, 8), op) is None


@pytest.mark.parametrize(("dtype", "vector"), [("float32", 4), ("bfloat16", 8), ("float16", 8)])
def test_a_team_reads_16_bytes_at_a_time(dtype, vector):
    assert refusal("resident_team", problem(9, vector, dtype=dtype)) is None
    assert f"{vector + 1} channels are no multiple of {vector}" in refusal(
        "resident_team", problem(9, vector + 1, dtype=dtype)
    )
    first = [refusal("resident_team", problem(9, 5, n, axis=1, dtype=dtype)) for n in (vector - 1, vector, vector + 1)]
    assert f"{vector - 1} elements, fewer than {vector}" in first[0]
    assert first[1:] == [None, None]  # a vector may be of two images


def test_a_team_takes_images_of_fewer_than_two_to_the_30_elements():
    assert refusal("resident_team", problem(1, 2, 2**30 - 1, axis=1)) is None
    assert "2^30" in refusal("resident_team", problem(1, 2, 2**30, axis=1))


@pytest.mark.parametrize("device", [H200, A100, A10], ids=lambda d: d.kind)
def test_a_block_holds_its_channels_in_shared_memory(device):
    there = {H200: 227, A100: 163, A10: 99}[device] * 1024
    for op, held in (("batchnorm_train", 1), ("batchnorm_backward", 2)):
        # Two lanes of 16 bytes, rounded up by at most 512 vectors, and 12 KB of the kernel's own.
        most = ((there - 12 * 1024) // (16 * held) - 512) // 2
        assert refusal("resident_block", problem(most, 64), op, device=device) is None
        assert f"the device has {there}" in refusal("resident_block", problem(most + 1, 64), op, device=device)


@pytest.mark.parametrize(
    ("op", "dtype", "activation", "residual", "devices"),
    [
        ("batchnorm_train", "float32", "relu", False, (H200, A100, A10)),
        ("batchnorm_train", "float32", "relu", True, (H200, A100)),
        ("batchnorm_train", "bfloat16", "relu", True, (H200, A100, A10)),
        ("batchnorm_backward", "float32", "relu", False, (H200, A100, A10)),
        ("batchnorm_backward", "float32", "relu", True, (H200, A100)),
        ("batchnorm_backward", "bfloat16", "relu", True, (H200, A100)),
        ("batchnorm_backward", "bfloat16", "silu", True, (H200, A100)),
        ("batchnorm_backward", "float32", "none", True, (H200, A100, A10)),  # the residual is not read
    ],
)
def test_four_steps_of_a_team_fit_in_shared_memory(op, dtype, activation, residual, devices):
    p = problem(999, 64, dtype=dtype, activation=activation, residual=residual)
    ran = tuple(d for d in (H200, A100, A10) if refusal("resident_team", p, op, device=d) is None)
    assert ran == devices


def test_the_memory_of_sums():
    plan = Plan("native", "", "two_read", splits=5)
    p = problem(100, 24, batch=2)
    for op in ("batchnorm_train", "batchnorm_backward", "batchnorm_moments"):
        assert batchnorm_workspace(op, plan, p, H200) == (5 + 1) * 2 * 2 * 24 * 4
    assert batchnorm_workspace("batchnorm_infer", plan, p, H200) == 0
    assert batchnorm_workspace("batchnorm_dx", plan, p, H200) == 0
    assert batchnorm_workspace("batchnorm_train", Plan("native", "", "resident_block"), p, H200) == 0


def test_the_memory_of_teams_is_for_as_many_as_run_at_once_or_there_are_groups_for():
    p = problem(100, 256, dtype="bfloat16", batch=3)  # 512 bytes of channels: four groups of 128 an instance
    assert batchnorm_teams("batchnorm_train", p, 128, H200) == (264, 12)
    of_a_team = (6 + 1) * 64 * 2 * 2 * 8
    plan = Plan("native", "", "resident_team", "128B", 6)
    assert batchnorm_workspace("batchnorm_train", plan, p, H200) == 12 * of_a_team
    wide = problem(100, 8192, dtype="bfloat16")
    assert batchnorm_workspace("batchnorm_train", plan, wide, H200) == 264 // 6 * of_a_team
    silu = problem(100, 8192, dtype="bfloat16", activation="silu")  # two CTAs a multiprocessor, as with any
    assert batchnorm_workspace("batchnorm_backward", plan, silu, H200) == 264 // 6 * of_a_team
    # More CTAs than the device runs at once: that many.
    alone = Plan("native", "", "resident_team", "128B", 9999)
    assert batchnorm_workspace("batchnorm_train", alone, p, H200) == (264 + 1) * 64 * 2 * 2 * 8

"""What was not measured on a device: the model's predictions, a sister's times, and what recorded runs say of both."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math

import numpy as np
import pytest
from helpers import H100, H200
from jax import lax

from benchmarks import fit, record, regret, regret_runs, tune
from benchmarks.cases import select
from benchmarks.ops.base import Setting
from benchmarks.ops.conv import ConvCase
from jaxconv import _plan
from jaxconv._plan import Device, Plan, conv, measured, model
from jaxconv._plan.planner import PLANNERS
from jaxconv._problem import ConvProblem, DenseProblem

PAIR = (lax.Precision.DEFAULT,) * 2


@pytest.fixture(autouse=True)
def plans_for_a_gpu_that_is_not_here(code_for_gpus, monkeypatch):
    monkeypatch.setattr(measured, "_learned", {})


def problem(c=256, k=256, size=14, batch=256, f=3, dtype="bfloat16", groups=1, **changes) -> ConvProblem:
    same, one, extent = ((f // 2, f // 2),) * 2, (1, 1), (size, size)
    made = ConvProblem("conv2d", dtype, batch, c, k, groups, extent, (f, f), extent, one, same, one, True, PAIR)
    return dataclasses.replace(made, **changes)


# ----------------------------------------------------------------------------------------------------------------------
# The model


def test_a_forest_is_the_sum_of_its_trees_leaves():
    """x0 <= 1 ? (x1 <= 5 ? .1 : .2) : .4, and a tree that is one leaf."""
    data = {
        "initial": 1.0, "depth": 2, "roots": [0, 5], "feature": [0, 1, -1, -1, -1, -1],
        "value": [1.0, 5.0, 0.1, 0.2, 0.4, 0.03], "right": [4, 2, 0, 0, 0, 0],
    }  # fmt: skip
    x = np.array([[1, 5], [1, 6], [2, 0]], np.float32)
    np.testing.assert_allclose(model.Forest(data)(x), [1.13, 1.23, 1.43], rtol=1e-6)


def test_a_process_goes_by_the_points_that_are_alike_and_no_further_than_they_go():
    data = {"mean": 1.0, "low": 0.0, "high": 1.5, "scale": [1.0, 0.0], "weights": [0.4, 9.0]}
    process = model.Process(data, np.array([[0, 3], [100, 5]], np.float32))
    found, alike = process(np.array([[0, 77], [1, 3], [50, 3], [100, 3]], np.float32))
    one = 1 + math.sqrt(5) + 5 / 3
    np.testing.assert_allclose(found, [1.4, 1 + 0.4 * one * math.exp(-math.sqrt(5)), 1.0, 1.5], rtol=1e-6)
    np.testing.assert_allclose(alike, [1.0, one * math.exp(-math.sqrt(5)), 0.0, 1.0], rtol=1e-6, atol=1e-12)


def test_a_shape_is_read_as_it_was_stored():
    shape = model.Shape.of("conv_wgrad", problem(padding=((0, 1), (2, 1))))
    assert model._shape(json.loads(json.dumps(model.stored(shape)))) == shape


@pytest.mark.parametrize(("gain", "deviation"), [(1.2, 0.1), (1.5, 0.5), (4.0, 2.0)])
def test_a_choice_is_worth_more_the_more_it_gains_and_the_surer_it_is(gain, deviation):
    def worth(gain, deviation):
        return model.worth(math.log(gain), deviation)

    assert worth(gain * 1.1, deviation) > worth(gain, deviation) > worth(gain, deviation * 1.1) > 0
    assert worth(model.MARGIN, deviation) == pytest.approx(0.0, abs=1e-12)
    assert math.isfinite(worth(1e9, 1e-9)) and worth(1.0, deviation) < 0


def test_the_packages_model_is_of_the_features_and_kernels_that_there_are():
    shipped, data = model.model(), json.loads(model.FILE.read_text())
    assert shipped is not None
    count = len(model.features(model.Shape.of("conv_fprop", problem()), model.NUMBERS["H200"]))
    ways = count + 7 + len(shipped.kernels)
    for name, most in (("xla", count), ("error", ways + 6)):
        forest = data[name]
        assert max(forest["feature"]) < most and max(forest["feature"]) > most - 20, name
        assert len(forest["feature"]) == len(forest["value"]) == len(forest["right"])
    points = sum(len(plans) for _, _, plans in data["problems"])
    for name, features, of in (("xla_process", count, len(data["problems"])), ("native_process", ways, points)):
        assert len(data[name]["scale"]) == features and len(data[name]["weights"]) == of > 1000, name
    every = {w.kernel for f in conv.FAMILIES.values() for op in model.OPS for w in f.wants(op, problem(), H200)}
    assert set(shipped.kernels) <= every | {"stem/patches"}
    assert all(name.partition(" ")[0] in shipped.kernels for name in shipped.known)


def test_predictions_are_positive_the_same_each_time_and_absent_where_nothing_is_known():
    for op in ("conv", "conv_dgrad", "conv_wgrad"):
        plans = _plan.every(op, problem(size=17), H200)
        first = model.predict(op, problem(size=17), H200, plans)
        assert first == model.predict(op, problem(size=17), H200, plans)
        assert {"xla", *(p.spec for p in plans if p.kernel.startswith("sm90/product"))} <= set(first)
        assert all(p.ms > 0 for p in first.values())
        assert all(p.deviation > 0 for name, p in first.items() if name != "xla")
    unknown = Plan("native", "", "sm90/unheard_of")
    assert set(model.predict("conv_fprop", problem(), H200, [unknown])) == {"xla"}
    assert model.predict("conv_statistics", problem(), H200, []) == {}
    assert model.predict("conv_fprop", problem(), Device("cuda", "NVIDIA A100", (8, 0), 108), []) == {}


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": 2**31 - 1},
        {"in_channels": 1, "out_channels": 1, "batch": 1, "in_spatial": (1, 1), "out_spatial": (1, 1)},
        {"stride": (2**40, 1), "dilation": (2**40, 1), "out_spatial": (1, 14)},
    ],
    ids=str,
)
def test_the_smallest_and_the_largest_are_predicted_like_all_else(changes):
    plans = [Plan("native", "", "sm90/product", "128x128"), Plan("native", "", "implicit_gemm", "64x64", 4)]
    for op in ("conv", "conv_dgrad", "conv_wgrad"):
        found = model.predict(op, problem(**changes), H200, plans)
        assert all(math.isfinite(p.ms) and p.ms > 0 for p in found.values()) and "xla" in found
        assert _plan.plan(op, problem(**changes), H200).reason


def test_more_work_takes_longer_and_slower_memory_too():
    def ms(p: ConvProblem, device: Device) -> float:
        return model.predict("conv_fprop", p, device, [])["xla"].ms

    assert ms(problem(batch=256), H200) > 3 * ms(problem(batch=32), H200)
    thin = problem(c=16, k=16, size=112)
    assert ms(thin, H100) > 1.2 * ms(thin, H200)


@pytest.mark.parametrize(
    ("kind", "bandwidth"),
    [
        ("NVIDIA H200", 4.3e9),
        ("NVIDIA GH200 480GB", 3.6e9),
        ("NVIDIA GH200 144G HBM3e", 4.3e9),
        ("NVIDIA H100 80GB HBM3", 3.0e9),
        ("NVIDIA H100 PCIe", 1.75e9),
        ("NVIDIA H20", 3.6e9),
    ],
)
def test_a_devices_numbers_are_those_of_the_longest_name_that_is_in_its(kind, bandwidth):
    found = model.numbers(Device("cuda", kind, (9, 0), 132))
    assert found is not None and found.bandwidth == bandwidth


# ----------------------------------------------------------------------------------------------------------------------
# What is near, and what is rather far


def predictions(monkeypatch, xla: float, kernel: float, deviation: float) -> None:
    def predict(op, p, device, plans):
        made = {plan.spec: model.Prediction(kernel, deviation) for plan in plans if plan.kernel == "sm90/product"}
        return {"xla": model.Prediction(xla, 0.0), **made}

    monkeypatch.setattr(model, "predict", predict)


def learn(
    device: Device, p: ConvProblem, xla: float, op: str = "conv_fprop", copied: str = "", **native: float
) -> None:
    name, kind, coordinates = measured.features(op, p)
    entry = {"op": name, "kind": kind, "coordinates": coordinates, "copied": copied, "case": "it", "xla_ms": xla}
    measured.learn(device.kind, [{**entry, "native_ms": {k.replace("__", "/"): ms for k, ms in native.items()}}])


@pytest.mark.parametrize(
    ("f", "c", "k", "groups", "kernel"),
    [(5, 384, 384, 384, "depthwise/rows_mma"), (31, 64, 64, 64, "depthwise/mma"), (3, 128, 128, 32, "grouped/rows")],
)
def test_kernels_that_spread_infinities_are_no_default_of_a_float16_forward_pass(f, c, k, groups, kernel):
    base = dict(c=c, k=k, f=f, groups=groups, size=28)
    for dtype in ("bfloat16", "float16"):
        p = problem(dtype=dtype, **base)
        for op in ("conv_fprop", "conv_dgrad", "conv_wgrad"):
            learn(H200, p, 10.0, op, **{kernel.replace("/", "__"): 1.0})
        chosen = {op: _plan.plan(op, p, H200).kernel for op in ("conv", "conv_fprop", "conv_dgrad", "conv_wgrad")}
        assert (chosen["conv"] == chosen["conv_fprop"] == kernel) == (dtype == "bfloat16")
        assert chosen["conv_dgrad"] == chosen["conv_wgrad"] == kernel
    left = _plan.plan("conv", problem(dtype="float16", **base), H200)
    assert not PLANNERS["conv"].spreads(left.kernel or "direct", problem(dtype="float16", **base))
    assert left.implementation == "native" or "an infinity in x" in left.reason  # 31x31: FMAs are faster than XLA
    for asked in ({"implementation": "native"}, {"algorithm": kernel}):
        assert _plan.plan("conv", problem(dtype="float16", **base, **asked), H200).kernel == kernel


@pytest.mark.parametrize(("groups", "native"), [(16, True), (32, False)])  # 8 and 4 channels
def test_octets_of_one_group_spread_nothing(groups, native):
    p = problem(dtype="float16", c=128, k=128, groups=groups, size=28)
    learn(H200, p, 10.0, grouped__rows=1.0)
    assert (_plan.plan("conv_fprop", p, H200).kernel == "grouped/rows") == native


@pytest.mark.parametrize(
    ("c", "predicted", "deviation", "native"),
    [
        (256, 0.5, 0.1, True),  # measured: the model is not asked
        (192, 0.5, 0.1, True),  # near enough
        (128, 2.0, 0.1, True),  # other channels: both say so
        (128, 0.5, 0.1, False),  # the model says the opposite
        (128, 2.0, 9.0, False),  # it is not sure
    ],
)
def test_a_neighbour_of_other_channels_speaks_together_with_the_model(monkeypatch, c, predicted, deviation, native):
    device = Device("cuda", "a device", (9, 0), 132)
    learn(device, problem(f=5), 1.3, sm90__product=1.0)
    predictions(monkeypatch, predicted, 1.0, deviation)
    made = _plan.plan("conv_fprop", problem(c=c, f=5), device)
    assert (made.implementation == "native") == native, made.reason
    if c == 128:
        assert "predicted" in made.reason and "1.30 times as fast at it, the nearest case measured" in made.reason
    else:
        assert made.reason == "1.30 times faster than XLA at it, the nearest case measured"
    both = {(x.name, x.ms) for x in made.candidates}
    assert ("sm90/product", 1.0) in both and ("xla", 1.3) in both
    assert (("xla", predicted) in both) == (c == 128)


def test_what_was_measured_at_these_channels_speaks_before_another_kernel_elsewhere(monkeypatch):
    """ResNet-50's 256 channels were given the kernel of a U-Net's 320, where their own had been as fast as XLA."""
    device = Device("cuda", "a device", (9, 0), 132)
    learn(device, problem(c=320, k=320), 1.17, sm90__product=1.0)
    assert (
        _plan.plan("conv_fprop", problem(), device).reason
        == "1.17 times faster than XLA at it, the nearest case measured"
    )
    learn(device, problem(), 1.02, sm90__product_swapped=1.0)
    predictions(monkeypatch, 1.0, 1.0, 0.1)
    made = _plan.plan("conv_fprop", problem(), device)
    assert made.implementation == "xla" and "was 1.17 times as fast at it" in made.reason
    learn(device, problem(), 1.05, sm90__product_swapped=1.0)
    assert _plan.plan("conv_fprop", problem(), device).kernel == "sm90/product_swapped"


def test_a_neighbour_of_other_channels_speaks_alone_where_there_is_no_model(monkeypatch):
    device = Device("cuda", "an Ampere", (8, 0), 108)
    learn(device, problem(), 1.3, implicit_gemm=1.0)
    made = _plan.plan("conv_fprop", problem(c=128), device)
    assert made.reason == "1.30 times faster than XLA at it, the nearest case measured"


def test_a_far_neighbour_does_not_speak_alone_where_the_model_hardly_knows_its_kernel(monkeypatch):
    """A weight gradient of 32 groups was given the kernel of one of none."""
    device = Device("cuda", "a device", (9, 0), 132)
    learn(device, problem(), 1.3, implicit_gemm=1.0)
    predictions(monkeypatch, 1.0, 1.0, 0.1)
    made = _plan.plan("conv_fprop", problem(c=128), device)
    assert (
        made.implementation == "xla"
        and "1.30 times as fast as XLA at it, the nearest case measured, too different" in made.reason
    )


def test_a_dgrad_and_a_fprop_speak_for_each_other_and_not_for_a_wgrad():
    """A volume's 3x3x3 had five measured fprops and six dgrads, and was left to XLA: 64 to 32 channels."""
    known = {"a half": 9, "a none": 9, "a conv_fprop": model.LEAST - 2, "a conv_dgrad": 2}
    enough = {op: model.measured_enough(known, "a", model.Shape.of(op, problem())) for op in model.OPS}
    assert enough == {"conv_fprop": True, "conv_dgrad": True, "conv_wgrad": False}
    few = known | {"a conv_dgrad": 1}
    assert not any(model.measured_enough(few, "a", model.Shape.of(op, problem())) for op in model.OPS)


# ----------------------------------------------------------------------------------------------------------------------
# Uneven padding, which costs XLA a pass


def strided(low: int, high: int, c=128, size=56, dtype="bfloat16", **changes) -> ConvProblem:
    """3x3 of stride 2, on even extents."""
    half = (size // 2,) * 2
    return problem(c, c, size, dtype=dtype, stride=(2, 2), padding=((low, high),) * 2, out_spatial=half, **changes)


@pytest.mark.parametrize(
    ("p", "fprop", "dgrad", "wgrad"),
    [
        (problem(), "", "", ""),
        (strided(1, 1), "", "", ""),
        (strided(0, 1), "x", "dx", "x"),
        (strided(1, 0), "x", "", ""),  # no output reads the row that (1, 1) has more
        (strided(0, 1, groups=32), "x", "", "x"),  # its dgrad's dy is padded between the pixels in any case
        (problem(f=4, groups=256, padding=((1, 2),) * 2), "x", "dy", "x"),
        (problem(padding=((0, 4),) * 2, dilation=(2, 2)), "x", "dy", "x"),
        (problem(f=4, padding=((1, 1), (1, 2)), out_spatial=(13, 14)), "x", "dx", "x"),  # one axis is enough
    ],
    ids=str,
)
def test_which_array_xla_copies(p, fprop, dgrad, wgrad):
    assert [model.copied(op, p) for op in ("conv", *model.OPS)] == [fprop, fprop, dgrad, wgrad]
    assert model.copied("conv_normalised", p) == ""
    for op in model.OPS:
        assert model.copied(op, model.Shape.of(op, p)) == model.copied(op, p)


@pytest.mark.parametrize(
    ("dtype", "op", "options", "kernels"),
    [
        ("bfloat16", "conv_wgrad", {}, ("", "sm90/wgrad_swapped")),
        ("float16", "conv_wgrad", {}, ("", "sm90/wgrad_swapped")),
        ("float32", "conv_fprop", {}, ("", "sm90/product")),
        ("bfloat16", "conv_fprop", dict(c=512, size=28, groups=32), ("", "grouped/rows")),
        # Measured with (0, 1)
        ("float32", "conv_fprop", dict(c=256, size=28), ("", "sm90/product")),
        ("bfloat16", "conv_wgrad", dict(c=256, size=28), ("sm90/wgrad", "sm90/wgrad")),
    ],
)
def test_the_same_extents_are_given_to_xla_or_not_by_their_padding(dtype, op, options, kernels):
    """ResNet-50's and ResNeXt-50's layers of stride 2, padded evenly as PyTorch has them, and as Flax's SAME."""
    made = [_plan.plan(op, strided(low, 1, dtype=dtype, **options), H200) for low in (1, 0)]
    assert tuple(plan.kernel for plan in made) == kernels, [plan.reason for plan in made]
    said = ["with" in plan.reason and "XLA's padding of x" in plan.reason for plan in made]
    measured_alike = ["3x3s2same," in plan.reason or "x50.s3.3x3s2," in plan.reason for plan in made]
    assert any(said) or any(measured_alike), [plan.reason for plan in made]


def test_xlas_time_is_corrected_by_the_copy_that_it_makes_of_one_problem_and_not_of_the_other():
    rates = model.NUMBERS["H200"]
    even, same = strided(1, 1), strided(0, 1)
    bytes_of_x = 2 * 256 * 56 * 56 * 128
    copy = 2 * bytes_of_x / rates.bandwidth
    learn(H200, even, 0.2, op="conv_wgrad", sm90__wgrad=0.1)
    for p, xla, end in ((even, 0.2, ""), (same, 0.2 + copy, ", with XLA's padding of x added")):
        found = measured.nearest("conv_wgrad", p, H200, "sm90/wgrad")
        assert (found.xla_ms, found.native_ms) == (pytest.approx(xla), {"sm90/wgrad": 0.1})
        assert found.where == f"at it, the nearest case measured{end}"
    made = _plan.plan("conv_wgrad", same, H200)
    assert made.reason == f"{(0.2 + copy) / 0.1:.2f} times faster than XLA {found.where}"
    assert {c.name: c.how for c in made.candidates if c.ms in (0.1, 0.2 + copy)} == {
        "sm90/wgrad": "measured at it, the nearest case measured", "xla": f"measured {found.where}"
    }  # fmt: skip
    # Four times as large a batch is judged by what the copy would have been of what was measured.
    other = measured.nearest("conv_wgrad", dataclasses.replace(same, batch=1024), H200, "sm90/wgrad")
    assert other.xla_ms == pytest.approx(0.2 + copy)
    # Both at the same extents: each speaks for its own.
    learn(H200, same, 0.33, op="conv_wgrad", copied="x", sm90__wgrad=0.11)
    assert measured.nearest("conv_wgrad", even, H200, "sm90/wgrad").xla_ms == 0.2
    assert measured.nearest("conv_wgrad", same, H200, "sm90/wgrad").xla_ms == 0.33


def test_a_copy_is_taken_off_xlas_time_but_never_what_the_device_needs():
    same = strided(0, 1)
    copy = 2 * 2 * 256 * 56 * 56 * 128 / model.NUMBERS["H200"].bandwidth
    for xla, expected in ((0.4, 0.4 - measured.PASS_TAKEN_OFF * copy), (0.13, None), (0.01, 0.01)):
        learn(H200, same, xla, op="conv_dgrad", copied="dx", sm90__product=0.1)
        assert measured.nearest("conv_dgrad", same, H200, "sm90/product").xla_ms == xla
        found = measured.nearest("conv_dgrad", strided(1, 1), H200, "sm90/product")
        least = model.Shape.of("conv_dgrad", same).limits_ms(model.NUMBERS["H200"])
        assert found.xla_ms == pytest.approx(max(least) if expected is None else expected, rel=1e-3)
        assert found.where == "at it, the nearest case measured, with XLA's slicing of dx taken off"


def test_xla_slices_dx_and_adds_in_one_pass():
    """So the choice of a dgrad that adds does not count the slice."""
    learn(H200, strided(1, 1), 0.14, op="conv_dgrad", sm90__product=0.14)
    even, same = (_plan.conv_dgrad_add.adds_faster("sm90/product", strided(low, 1), H200) for low in (1, 0))
    assert even[0] == same[0] and same[1] == f"{even[1]}, where XLA slices dx in the pass behind it"


def test_a_sisters_time_is_scaled_and_then_corrected(monkeypatch):
    monkeypatch.setattr(measured, "tables", lambda: (H200.kind,))
    monkeypatch.setattr(measured, "_recorded", lambda kind: ())
    learn(H200, strided(1, 1), 0.2, op="conv_wgrad", sm90__wgrad=0.1)
    scaled, same = (measured.nearest("conv_wgrad", strided(low, 1), H100, "sm90/wgrad") for low in (1, 0))
    assert scaled.sister == same.sister == H200.kind and scaled.native_ms == same.native_ms
    assert same.xla_ms - scaled.xla_ms == pytest.approx(2 * 2 * 256 * 56 * 56 * 128 / model.NUMBERS["H100"].bandwidth)


@pytest.mark.parametrize("device", [H200, H100], ids=lambda d: d.kind)
def test_every_row_of_a_table_says_what_xla_copied(device):
    """By the padding of its case in benchmarks/ops/, as `python -m benchmarks tune` writes it."""
    rows = json.loads((measured.FOLDER / f"{measured.slug(device.kind)}.json").read_text())["measurements"]
    for row in rows:
        expected = model.copied(row["op"], fit.shape_of(row)) if row["op"] in model.OPS else ""
        assert row.get("copied", "") == expected, row["case"]
    assert {row["copied"] for row in rows if "copied" in row} >= {"x", "dx"}


@pytest.mark.parametrize(("pass_", "array"), [("fprop", "x"), ("dgrad", "dx"), ("wgrad", "x")])
def test_a_table_is_given_both_paddings_of_the_same_extents(pass_, array):
    names = ("r50.s2.3x3s2", "r50.s2.3x3s2same")
    keys = {"contender", "case", "pass", "status", "ms", "plan"}
    rows = [
        dict(zip(sorted(keys), (name, contender, ms, pass_, plan, "ok"), strict=True))
        for name in names
        for contender, ms, plan in (("xla", 2.0, "xla"), ("ours:sm90", 1.0, "native[sm90/product 128x128]"))
    ]
    run = dict(op="conv", dtype="bf16", layout="NHWC", precision="default", commit="0", rows=rows)
    even, same = tune.measurements(run)
    assert (even["case"], same["case"]) == names and even["coordinates"] == same["coordinates"]
    assert "copied" not in even and same["copied"] == array and tune.key(even) != tune.key(same)


# ----------------------------------------------------------------------------------------------------------------------
# Sisters


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (H100, ["NVIDIA H200"]),
        (Device("cuda", "NVIDIA GH200 480GB", (9, 0), 132), ["NVIDIA H200", "NVIDIA H100 80GB HBM3"]),
        (H200, ["NVIDIA H100 80GB HBM3"]),
        (Device("cuda", "NVIDIA H100 PCIe", (9, 0), 114), []),  # 1.7 and 2.5 times less memory bandwidth
        (Device("cuda", "NVIDIA H20", (9, 0), 78), []),  # 5.6 times fewer operations
        (Device("cuda", "NVIDIA X1", (9, 0), 132), []),  # whose numbers nobody knows
        (Device("cuda", "NVIDIA A100-SXM4-80GB", (8, 0), 108), []),
        (Device("cpu", "cpu"), []),
    ],
    ids=lambda v: v.kind if isinstance(v, Device) else None,
)
def test_whose_times_are_scaled(device, expected):
    assert measured.sisters(device) == expected


def test_every_time_of_a_table_can_be_scaled():
    """Whatever was measured: convolutions, products, norms and pools."""
    rows = measured.table("NVIDIA H200")
    assert {"conv_fprop", "dense", "dense_gradient", "batchnorm_fused", "layernorm", "groupnorm_fused"} <= {
        m.op for m in rows
    }
    for m in rows:
        found = measured._scaled(m, "NVIDIA H200", H100)
        for now, before in ((found.xla_ms, m.xla_ms), *((found.native_ms[k], m.native_ms[k]) for k in m.native_ms)):
            assert 1 <= now / before < 2, m


def test_times_at_the_limit_scale_as_the_limit_and_others_as_the_multiprocessors():
    fast, slow = model.NUMBERS["H200"], model.NUMBERS["H100"]
    memory, compute = fast.bandwidth / slow.bandwidth, fast.half / slow.half

    def scaled(p, xla: float, native: float, op: str = "conv_fprop") -> tuple[float, float]:
        name, kind, coordinates = measured.features(op, p)
        m = measured.Measurement(name, kind, coordinates, "it", xla, {"k": native})
        found = measured._scaled(m, "NVIDIA H200", H100)
        assert found.sister == "NVIDIA H200"
        return found.xla_ms / xla, found.native_ms["k"] / native

    wide = problem(c=512, k=512, size=28)  # bound by products
    limit = 2 * 256 * 28 * 28 * 9 * 512 * 512 / fast.half
    assert scaled(wide, 3 * limit, limit) == pytest.approx((compute, compute))
    thin = problem(c=32, k=32, size=112, f=1)  # bound by memory
    limit = 2 * (2 * 256 * 112 * 112 * 32 + 32 * 32) / fast.bandwidth
    xla, native = scaled(thin, 4 * limit, limit)
    assert native == pytest.approx(memory) and xla == pytest.approx(0.25 * memory + 0.75 * compute)
    assert scaled(thin, limit / 2, limit)[0] == pytest.approx(memory)  # shorter than the limit: from the cache
    rows = DenseProblem("dense", "bfloat16", 65536, 64, 64, PAIR)
    limit = 2 * (2 * 65536 * 64 + 64 * 64) / fast.bandwidth
    assert scaled(rows, limit, limit, "dense") == pytest.approx((memory, memory))


def test_a_sisters_measurement_is_taken_beyond_a_larger_margin_and_says_whose_it_is(monkeypatch):
    monkeypatch.setattr(measured, "tables", lambda: (H200.kind,))
    monkeypatch.setattr(measured, "_recorded", lambda kind: ())
    monkeypatch.setattr(model, "predict", lambda *_: {})
    p = problem(c=512, k=512, size=28)
    for xla, native in ((1.07, False), (1.15, True)):
        learn(H200, p, 10 * xla, sm90__product=10.0)
        assert _plan.plan("conv_fprop", p, H200).implementation == "native"
        made = _plan.plan("conv_fprop", p, H100)
        assert (made.implementation == "native") == native, made.reason
        assert made.reason.endswith("at it, the nearest case measured on its sister NVIDIA H200, scaled")
        assert all("on its sister NVIDIA H200, scaled" in c.how for c in made.candidates) and made.candidates
    # What was measured on the device itself comes first, also at a slightly different problem, not at another one.
    for other, own in (
        (p, True),
        (dataclasses.replace(p, batch=300), True),
        (dataclasses.replace(p, batch=64), False),
    ):
        monkeypatch.setattr(measured, "_learned", {})
        learn(H200, p, 11.5, sm90__product=10.0)
        learn(H100, other, 10.0, sm90__product=12.0)
        made = _plan.plan("conv_fprop", p, H100)
        assert made.reason.endswith("the nearest case measured") == own, made.reason
        assert made.reason.startswith("sm90/product reached 0.83 of XLA's speed at it") == own
        assert (made.implementation == "native") != own


def test_an_h100_has_most_of_what_was_measured_on_an_h200():
    """By the table of the package: a case is native on both, or was hardly faster."""
    both = one = 0
    for case in select("conv"):
        if case.transposed or case.suite == "random":
            continue
        p = regret_runs.problem_of({"shape": dataclasses.asdict(case), "dtype": "bf16", "precision": None})
        for op in model.OPS:
            here, there = _plan.plan(op, p, H200), _plan.plan(op, p, H100)
            if here.implementation == "native":
                one += 1
                both += there.implementation == "native"
    assert one > 60 and both > 0.9 * one


# ----------------------------------------------------------------------------------------------------------------------
# What was recorded


def runs() -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(record.RESULTS.glob("*/regret/*.json"))]


def test_a_recorded_rows_problem_is_the_one_that_was_traced():
    for run in runs():
        row = run["rows"][-1]
        traced = regret_runs.case_of(row).kernel(row["pass"], Setting(row["dtype"], True, row["precision"]))
        assert traced == (row["op"], regret_runs.problem_of(row))


def test_times_of_hoppers_stem_kernels_have_their_names_whenever_they_were_recorded():
    """Before the plan knew them by name, what ran was what can run."""
    for run in runs():
        for row, p in regret_runs.problems(run):
            narrow = [k for k in ("stem/sm90_narrow_in", "stem/sm90_narrow_out") if k in row["ms"]]
            able = [
                k for k in ("stem/sm90_narrow_in", "stem/sm90_narrow_out") if not _plan.supports(row["op"], k, p, H200)
            ]
            if "stem/mma" in row["ms"] or narrow:
                assert narrow == able


def test_todays_choices_are_looked_up_among_recorded_times(capsys):
    assert regret.main(["--recorded", "30", "--shipped", "--worst", "2"]) == 0
    text = capsys.readouterr().out
    assert "problems: regret 1." in text and "tier predicted" in text and "op conv_wgrad" in text


@pytest.mark.parametrize("jobs", [1, 3])
def test_drawn_problems_are_compiled_by_threads_and_come_in_order(jobs, monkeypatch):
    """Nothing is compiled while the caller times what it was given."""
    monkeypatch.setattr(regret, "BATCH", 1)
    busy: list[str] = []
    prepare = regret.prepare

    def counted(case, *rest):
        busy.append(case.name)
        return prepare(case, *rest)

    monkeypatch.setattr(regret, "prepare", counted)
    case = ConvCase("0", 1, (8,), 8, 8, (3,), (1,), ((1, 1),), (1,))
    cases = [dataclasses.replace(case, name=str(i), groups=groups) for i, groups in enumerate((1, 8, 3, 2))]
    found = regret.prepared([(case, "fprop", Setting("f32", True, None)) for case in cases], jobs)
    names, refused = [], []
    for i, (case, by) in enumerate(found):
        names.append(case.name)
        assert len(busy) == min((i // jobs + 1) * jobs, 4)
        if isinstance(by, Exception):
            refused.append(case.name)  # three groups do not divide eight channels
        else:
            row = regret.measure(by, argparse.Namespace(seconds=0.5, repeat=1))
            assert row["case"] == case.name and row["ms"]["xla"] > 0 and set(row["ms"]) >= {"xla"}
    assert names == ["0", "1", "2", "3"] and refused == ["2"]


def test_a_seed_is_judged_by_a_model_that_has_not_seen_it(monkeypatch):
    """Nor anything that was fitted on the way to it: trees, scales, processes, errors, and what a choice is worth."""
    pytest.importorskip("sklearn")
    for name in ("XLA", "ERROR"):
        monkeypatch.setattr(fit, name, getattr(fit, name) | {"n_estimators": 4})
    for name, value in (("STEPS", 2), ("BLOCK", 100)):
        monkeypatch.setattr(fit, name, value)
    known = [s for s in fit.samples() if s.seed in (1, 12, 30)]
    changed = [
        dataclasses.replace(s, ms={name: ms * (7 if name == "xla" else 3) for name, ms in s.ms.items()})
        if s.seed == 30
        else s
        for s in known
    ]
    fits = [fit.Fit(fit.Rows.make(some)) for some in (known, changed)]
    (data, choices), (same, same_choices) = (each.model(30) for each in fits)
    assert data == same and choices == same_choices
    assert len(data["problems"]) == sum(s.seed != 30 for s in known) == len(choices)
    (data, _), (other, _) = (each.model(1) for each in fits)
    for name in ("xla", "error", "xla_process", "native_process"):
        assert data[name] != other[name], name
    speed, behind, lost = fit.judged(choices, 1.0)
    possible = math.exp(sum(c.best for c in choices) / len(choices))
    assert speed * behind == pytest.approx(possible) and len(lost) == 2
    assert fit.judged(choices, math.inf)[0] == 1.0


def test_what_is_left_out_of_a_process_is_predicted_as_by_one_without_it():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3)).astype(np.float32)
    y, seed = np.sin(x[:, 0]) + 0.1 * x[:, 1], np.repeat([-1, 4, 5], 20)
    by = fit.Scales(np.array([1.0, 0.5, 0.0]), 0.01)
    y -= y.mean()
    found = fit.process(x, y, seed, by)
    data = fit.process(x, y, seed, by).data
    for each in (4, 5):
        out = seed == each
        a = x.astype(np.float64) * by.scale
        alike = model.matern(model.squares(a[~out], a[~out])) + by.noise * np.eye(40)
        expected = model.matern(model.squares(a[out], a[~out])) @ np.linalg.solve(alike, y[~out])
        np.testing.assert_allclose(found.crossed[out], np.clip(expected, data["low"], data["high"]), atol=1e-6)
    assert np.isnan(found.crossed[seed < 0]).all()
    np.testing.assert_allclose(model.Process(data, x)(x)[0], y, atol=0.1)


def test_scales_find_the_feature_that_matters():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 4)).astype(np.float32)
    found = fit.scales(x, np.sin(2 * x[:, 2]), 0.01, 5.0)
    assert found.scale[2] > 5 * max(found.scale[0], found.scale[1], found.scale[3]) and found.noise > 0


def test_a_choice_must_be_worth_as_much_as_keeps_to_what_may_be_lost():
    sure = fit.Choice(((50.0, 1.0),), 1.0)
    risky = fit.Choice(((2.0, -1.0),), 0.0)
    few, many = [sure] * 999 + [risky], [sure] * 9 + [risky]
    assert fit.least_worth(few) < 2.0 <= fit.least_worth(many) < 50.0

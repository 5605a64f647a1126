"""What `explain` and `report` tell of regions: the ops before and after the rules, and their times."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxconv
from jaxconv import _plan
from jaxconv._plan import measured, model
from jaxconv.joints import rules, told

X = _plan.Device("cuda", "NVIDIA X", (9, 0))


def conv(x, w):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def block(x, w):
    return jax.nn.relu(conv(x, w)) + x


def blocks(x, *ws):
    for w in ws:
        x = block(x, w)
    return x.sum()


@pytest.fixture
def problem():
    """A convolution of 64 images that an H100's kernels take."""
    x, w = jax.ShapeDtypeStruct((64, 28, 28, 64), "bfloat16"), jax.ShapeDtypeStruct((1, 1, 64, 64), "bfloat16")
    (call,) = jaxconv.explain(jaxconv.conv2d)(x, w)
    assert call.op == "conv_fprop"
    return call.problem


@pytest.fixture
def learned(problem, monkeypatch, code_for_gpus):
    """A device whose table holds that convolution alone."""
    op, kind, coordinates = measured.features("conv_fprop", problem)
    entry = dict(case="base", op=op, kind=kind, coordinates=coordinates, xla_ms=2.0, native_ms={"sm90/product": 1.0})
    monkeypatch.setattr(measured, "_learned", {X.kind: (measured._measurement(entry),)})
    monkeypatch.setattr(measured, "tables", lambda: (X.kind,))
    monkeypatch.setattr(model, "predict", lambda *_: {})


def test_a_time_is_measured_or_of_a_neighbour_or_unknown(problem, learned):
    def time(**other):
        return told.time_of("conv_fprop", dataclasses.replace(problem, **other), X)

    exact = time()
    assert (exact.kernel, exact.ms, exact.source) == ("sm90/product", 1.0, "measured")
    assert str(exact).endswith("sm90/product, 1.000 ms, measured")
    near = time(batch=128)
    assert (near.kernel, near.ms, near.source) == ("sm90/product", 2.0, "by the nearest measurement")
    other = time(batch=64, filter=(3, 3), padding=((1, 1), (1, 1)))
    assert (other.kernel, other.ms, other.source) == ("xla", None, "unknown")
    assert str(other).endswith("xla, its time is unknown")


def test_a_time_of_xla(problem, learned, monkeypatch):
    slow = dataclasses.replace(measured._learned[X.kind][0], native_ms={"sm90/product": 3.0})
    monkeypatch.setattr(measured, "_learned", {X.kind: (slow,)})
    one = told.time_of("conv_fprop", problem, X)
    assert (one.kernel, one.ms, one.source) == ("xla", 2.0, "measured")


def test_a_predicted_time(problem, learned, monkeypatch):
    monkeypatch.setattr(measured, "_learned", {})

    def predict(op, problem, device, plans):
        return {"xla": model.Prediction(0.25, 0.0), **{plan.spec: model.Prediction(0.5, 0.1) for plan in plans}}

    monkeypatch.setattr(model, "predict", predict)
    one = told.time_of("conv_fprop", problem, X)
    assert (one.kernel, one.ms, one.source) == ("xla", 0.25, "predicted")


def test_an_op_without_a_kernel_has_no_time():
    one = told.time_of("activation_gradient", None, X)
    assert (one.kernel, one.ms) == ("xla", None) and "activation_gradient" not in _plan.OPS


def test_a_gradients_region_before_and_after(problem, learned, monkeypatch):
    monkeypatch.setattr(rules, "wants", lambda op, problem, device: True)
    x, w = jnp.ones((2, 6, 6, 8)), jnp.ones((1, 1, 8, 8))
    found = jaxconv.explain(jax.grad(jaxconv.accelerate(blocks), argnums=(0, 1, 2)))(x, w, w)
    (region,) = found.regions
    assert region.differentiated

    def count(ops, op):
        return sum(one.op == op for one in ops)

    assert (count(region.before, "conv_dgrad"), count(region.after, "conv_dgrad")) == (2, 0)
    assert (count(region.before, "conv_dgrad_add"), count(region.after, "conv_dgrad_add")) == (0, 2)
    (one,) = region.replaced
    assert (one.rule, one.count, [op.op for op in one.before]) == (
        "a dgrad that adds another gradient",
        2,
        ["conv_dgrad"],
    )
    text = str(found)
    assert "a region of results and gradients, times by the plans\nbefore: " in text
    assert (
        "2 x a dgrad that adds another gradient\n"
        "  - 2 conv_dgrad 2x6x6 8->8 1x1 float32 NHWC: unknown, by 2 xla\n  + 2 conv_dgrad_add" in text
    )


def test_a_report_tells_what_a_call_runs(monkeypatch):
    x, w = jnp.ones((2, 6, 6, 8)), jnp.ones((1, 1, 8, 8))
    report = jaxconv.accelerate(blocks).report(x, w)
    (region,) = report.regions
    assert not region.differentiated and not region.replaced and region.before == region.after
    text = str(report)
    assert "a region of results, times by the plans\nno rule changes it: 1 call, " in text
    assert ("1 call, unknown (1 unknown)" in text) == (report.regions[0].before[0].ms is None)
    assert "jaxconv.explain(jax.grad(f))" in str(report)
    assert not jaxconv.accelerate(jnp.sin).report(x).regions


def test_a_choice_that_cannot_run_is_a_note(code_for_gpus):
    def f(x, w, v):
        return jaxconv.conv2d(conv(x, v), w, algorithm="depthwise").sum()

    x, w = jnp.ones((2, 6, 6, 8)), jnp.ones((1, 1, 8, 8))
    report = jaxconv.accelerate(f).report(x, w, w)
    assert not report.regions and "the new program cannot be planned: conv2d: algorithm='depthwise'" in str(report)


def timed(op, ms, kernel="xla"):
    return told.Timed(op, f"of {op}", kernel, ms, "unknown" if ms is None else "measured")


def test_a_hundred_layers_are_a_few_lines():
    """Equal applications have a count, ops of one name a line, whatever their problems."""
    layers = [dataclasses.replace(timed("conv_dgrad", 0.5), problem=f"layer {i}") for i in range(100)]
    sums = [dataclasses.replace(timed("conv_dgrad_add", 0.25, "sm90"), problem=f"layer {i}") for i in range(100)]
    replaced = tuple(told.Replaced("dgrad + c", (a,), (b,), 1) for a, b in zip(layers, sums, strict=True))
    rest = timed("batchnorm_signs", None)
    region = told.Region(True, (*layers, rest), (*sums, rest), replaced)
    text = str(region)
    lines = text.splitlines()
    assert len(lines) == 9
    assert lines[0] == "before: 101 calls, 50.000 ms and 1 unknown (100 measured, 1 unknown)"
    assert lines[1] == "after:  101 calls, 25.000 ms and 1 unknown (100 measured, 1 unknown)"
    assert lines[-3:] == [
        "100 x dgrad + c",
        "  - 100 conv_dgrad of 100 problems: 50.000 ms, by 100 xla",
        "  + 100 conv_dgrad_add of 100 problems: 25.000 ms, by 100 sm90",
    ]
    both = told.texts([region, region, told.Region(False, (rest,), (rest,), ())])
    assert [one.partition(", times")[0] for one in both] == [
        "2 equal regions of results and gradients",
        "a region of results",
    ]

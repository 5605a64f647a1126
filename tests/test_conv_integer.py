"""Convolutions of integers: every form that lax writes, every type, bit for bit what XLA's CPU gives.

On a CPU native code is one loop, whose reading of a call the CUDA kernels share; on a GPU each kernel is forced.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
import re
from collections.abc import Iterator
from typing import Any

import direct_calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import A100, H200, PLATFORM, calls, of_cpu, opcodes, targets
from integer_cases import (
    KERNELS,
    NUMBERS,
    TYPES,
    Form,
    by_lax,
    by_numpy,
    equal,
    natively,
    operands,
    random_form,
    values,
    window_of,
)
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxconv
from jaxconv import _plan
from jaxconv._ops import conv_integer
from jaxconv._problem import IntegerConvProblem

FORMS: dict[str, Form] = {
    "1d": ((2, 20, 3), (5, 3, 4), {}),
    "2d": ((2, 9, 8, 5), (3, 2, 5, 7), {}),
    "3d": ((2, 5, 4, 6, 3), (2, 3, 1, 3, 9), {}),
    "channels_first": ((2, 6, 9, 8), (10, 6, 3, 3), dict(dimension_numbers=("NCHW", "OIHW", "NCHW"))),
    "filters_ohwi": ((2, 9, 8, 8), (70, 3, 3, 8), dict(dimension_numbers=("NHWC", "OHWI", "NHWC"))),
    "axes_in_disorder": ((4, 7, 2, 6), (3, 5, 2, 4), dict(dimension_numbers=("CHNW", "WOHI", "HCWN"))),
    "volumes_in_disorder": ((4, 3, 5, 2, 6), (2, 5, 2, 7, 3), dict(dimension_numbers=("WDCNH", "HIDOW", "NHCWD"))),
    "one_by_one": ((3, 5, 7, 64), (1, 1, 64, 64), {}),
    "a_tile_and_one": ((1, 5, 13, 17), (3, 3, 17, 65), {}),
    "below_a_tile": ((1, 7, 9, 16), (1, 1, 16, 63), {}),
    "two_tiles_and_long_sums": ((2, 8, 8, 68), (3, 3, 68, 130), {}),
    "few_channels": ((2, 12, 12, 3), (7, 7, 3, 24), dict(window_strides=(2, 2), padding=((3, 3), (3, 3)))),
    "stride": ((2, 11, 9, 4), (3, 3, 4, 8), dict(window_strides=(2, 3))),
    "padded": ((2, 5, 6, 4), (3, 3, 4, 8), dict(padding=((1, 4), (7, 0)))),
    "cropped": ((2, 9, 9, 4), (3, 3, 4, 8), dict(padding=((-2, 1), (0, -3)))),
    "dilated": ((2, 13, 12, 4), (3, 3, 4, 8), dict(rhs_dilation=(2, 3), padding=((2, 2), (3, 3)))),
    "left_dilated": ((2, 5, 6, 4), (3, 2, 4, 8), dict(lhs_dilation=(2, 3), padding=((2, 1), (-1, 2)))),
    "all_dilated": (
        *((2, 5, 6, 4), (3, 2, 4, 8)),
        dict(window_strides=(3, 2), lhs_dilation=(2, 3), rhs_dilation=(1, 2), padding=((2, 1), (0, 2))),
    ),
    "groups": ((2, 7, 7, 12), (3, 3, 4, 30), dict(feature_group_count=3)),
    "groups_first": (
        *((2, 12, 7, 7), (21, 4, 3, 3)),
        dict(feature_group_count=3, dimension_numbers=("NCHW", "OIHW", "NCHW")),
    ),
    "depthwise": ((2, 9, 9, 16), (3, 3, 1, 16), dict(feature_group_count=16)),
    "depthwise_twice": ((2, 9, 9, 6), (3, 3, 1, 12), dict(feature_group_count=6, window_strides=(2, 2))),
    "batch_groups": ((6, 7, 7, 5), (3, 3, 5, 9), dict(batch_group_count=3)),
    "batch_groups_wide": ((4, 5, 5, 4), (2, 2, 4, 40), dict(batch_group_count=2, padding=((1, 0), (0, 1)))),
    "as_a_weight_gradient": ((2, 9, 9, 4), (2, 7, 7, 8), dict(dimension_numbers=("CHWN", "IHWO", "HWNC"))),
    "no_space": ((3, 5), (5, 4), dict(dimension_numbers=lax.ConvDimensionNumbers((0, 1), (1, 0), (0, 1)))),
    "no_outputs_in_x": ((1, 2, 2, 3), (1, 1, 3, 4), dict(window_strides=(9, 9), padding=((9, 9), (9, 9)))),
}


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


# ----------------------------------------------------------------------------------------------------------------------
# Values


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", FORMS)
def test_every_form_has_the_bits_of_xla_and_of_the_formula(name, kernel):
    """In 8 bits with wide sums, in 16 bits that wrap around, and in 64."""
    form = FORMS[name]
    for left, result in (("int8", "int32"), ("uint16", None), ("int64", None)):
        lhs, rhs = operands(form, left)
        want = of_cpu(lambda x, w: by_lax(form, x, w, result), lhs, rhs)  # noqa: B023
        equal(want, by_numpy(form, lhs, rhs, want.dtype))
        equal(natively(form, lhs, rhs, result, kernel), want)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("left", "result"), TYPES, ids=str)
def test_every_type_has_the_bits_of_xla(left, result, kernel):
    for name in ("2d", "a_tile_and_one", "groups_first", "filters_ohwi"):
        lhs, rhs = operands(FORMS[name], left)
        want = of_cpu(lambda x, w: by_lax(FORMS[name], x, w, result), lhs, rhs)  # noqa: B023
        equal(natively(FORMS[name], lhs, rhs, result, kernel), want)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("left", "result"),
    [("bool", None), ("bool", "int8"), ("bool", "uint32"), ("int4", None), ("uint4", None), ("uint4", "int4")],
    ids=str,
)
def test_less_than_a_byte_has_the_bits_of_xla(left, result, kernel):
    lhs, rhs = operands(FORMS["2d"], left)
    want = of_cpu(lambda x, w: by_lax(FORMS["2d"], x, w, result), lhs, rhs)
    equal(natively(FORMS["2d"], lhs, rhs, result, kernel), want)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("result", ["int8", "uint8", "int32", "int64", "uint64"])
@pytest.mark.parametrize(("left", "right"), [("uint8", "int8"), ("int8", "uint8"), ("int16", "uint8")])
def test_two_types_are_both_the_results(left, right, result, kernel):
    form = FORMS["a_tile_and_one"]
    lhs, rhs = operands(form, left, right)
    want = by_numpy(form, lhs, rhs, result)
    given = dict(dimension_numbers=NUMBERS[2], preferred_element_type=result)
    got = jax.jit(lambda x, w: jaxconv.conv_general_dilated(x, w, (1, 1), "VALID", **given))(lhs, rhs)
    equal(got, want)
    types = (left, right) if left != "int16" else (result, result)
    problem = dataclasses.replace(
        problem_of(form, result, result), lhs_dtype=types[0], rhs_dtype=types[1], algorithm=kernel
    )
    operand = [a.astype(t) for a, t in zip((lhs, rhs), (problem.lhs_dtype, problem.rhs_dtype), strict=True)]
    equal(conv_integer.kernel(problem, *operand), want)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("part", range(4))
def test_random_forms_have_the_bits_of_the_formula(part, kernel):
    rng = random.Random(f"integers {part}")
    for _ in range(6):
        form, (left, result) = random_form(rng), rng.choice(TYPES)
        lhs, rhs = operands(form, left)
        equal(natively(form, lhs, rhs, result, kernel), by_numpy(form, lhs, rhs, result or left))


def by_products(form: Form, lhs: Any, rhs: Any, result: str | None) -> jax.Array:
    def f(x: Any, w: Any) -> jax.Array:
        return by_lax(form, x, w, result)

    (equation,) = (e for e in jax.make_jaxpr(f)(lhs, rhs).eqns if e.primitive is lax.conv_general_dilated_p)
    (out,) = equation.outvars
    program = jax.jit(functools.partial(conv_integer.by_products, out.aval, equation.params))
    assert not opcodes(program.lower(lhs, rhs).as_text("hlo"))["convolution"]
    return program(lhs, rhs)


def test_as_matrix_products_every_form_and_type_has_the_bits_of_the_formula():
    """What a GPU runs where no kernel can; it needs none here."""
    types = itertools.cycle((("int8", "int32"), ("uint8", "uint8"), ("uint16", None), ("uint8", "int64")))
    small = (name for name, form in FORMS.items() if math.prod(form[1]) < 4000)
    for name, (left, result) in zip(small, types, strict=False):
        lhs, rhs = operands(FORMS[name], left)
        equal(by_products(FORMS[name], lhs, rhs, result), by_numpy(FORMS[name], lhs, rhs, result or left))
    for left, result in (("bool", "int8"), ("int4", None), ("uint4", "int4"), ("bool", None), ("int32", "int64")):
        lhs, rhs = operands(FORMS["1d"], left)
        want = of_cpu(lambda x, w: by_lax(FORMS["1d"], x, w, result), lhs, rhs)  # noqa: B023
        equal(by_products(FORMS["1d"], lhs, rhs, result), want)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_as_matrix_products_random_forms_have_the_bits_of_the_formula(part):
    rng = random.Random(f"integers as products {part}")
    for _ in range(12):
        form, (left, result) = random_form(rng), rng.choice(TYPES)
        lhs, rhs = operands(form, left)
        equal(by_products(form, lhs, rhs, result), by_numpy(form, lhs, rhs, result or left))


def test_where_no_kernel_can_run_a_gpu_has_products(monkeypatch):
    """With symbolic extents, exported, and where native code is disabled: a CPU's program keeps its convolution."""
    lhs, rhs = operands(FORMS["2d"], "int8")
    given = dict(dimension_numbers=NUMBERS[2], preferred_element_type=jnp.int32)

    def ours(x: Any, w: Any) -> jax.Array:
        return jaxconv.conv_general_dilated(x, w, (1, 1), "SAME", **given)

    def laxes(x: Any, w: Any) -> jax.Array:
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", **given)

    def scaled(x: Any, w: Any) -> jax.Array:
        return jaxconv.conv2d(x, w, padding="SAME", scale=0.01)

    want = of_cpu(laxes, lhs, rhs)
    n = jax.export.symbolic_shape("n")[0]
    with jaxconv.enabled():
        for f, shape in ((ours, (n, *lhs.shape[1:])), (scaled, (n, *lhs.shape[1:])), (laxes, lhs.shape)):
            exported = jax.export.export(
                jax.jit(f), platforms=("cuda", "cpu"), disabled_checks=jaxconv.export_checks()
            )(jax.ShapeDtypeStruct(shape, "int8"), jax.ShapeDtypeStruct(rhs.shape, "int8"))
            text = exported.mlir_module()
            assert "dot_general" in text and "stablehlo.convolution" in text
            got = exported.call(lhs, rhs)
            np.testing.assert_allclose(got, want * (0.01 if f is scaled else 1), rtol=1e-6)
    monkeypatch.setenv("JAXCONV_DISABLE", "all")
    for f, scale in ((ours, 1), (scaled, 0.01)):
        for platform, op in (("cuda", "dot"), ("cpu", "convolution")):
            lowered = jax.jit(f).trace(lhs, rhs).lower(lowering_platforms=(platform,))
            assert opcodes(lowered.as_text("hlo"))[op] == 1, (f, platform)
        np.testing.assert_allclose(jax.jit(f)(lhs, rhs), want * scale, rtol=1e-6)


FULL = PLATFORM == "cuda" and (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0) > 50 * 2**30
LONG = 2**31 if FULL else 2**14  # elements


# (N, H, W, C): of images and pixels, x and y are past 2^31 elements; of channels, x is, and each output sums all up.
PAST = {
    "images": (LONG // 60 + 8, 3, 5, 4),
    "pixels": (1, LONG // 160 + 8, 40, 4),
    "channels": (1, 6, 4, LONG // 96 * 4 + 8),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("axis", PAST)
def test_past_int32_the_last_outputs_are_right(axis, kernel):
    """On a GPU with 60 GiB; elsewhere of 2^14 elements."""
    shape = PAST[axis]
    w = values(2, (1, 2, shape[3], 1 if axis == "channels" else 8), "int8")
    problem = problem_of((shape, w.shape, {}), "int8", "int8")
    problem = dataclasses.replace(problem, algorithm=kernel)

    @jax.jit
    def wrong(w: jax.Array) -> jax.Array:
        at = [lax.broadcasted_iota("uint32", shape, i) for i in range(4)]
        x = (at[0] * 7 + at[1] * 11 + at[2] * 13 + at[3] * 17).astype("int8")
        y = conv_integer.kernel(problem, x, w)
        last = x[-1:, -1, -2:, :, None].astype("int32") * w[0].astype("int32")
        return (last.sum((1, 2)).astype("int8") != y[-1:, -1, -1]).sum()

    assert wrong(w) == 0


# ----------------------------------------------------------------------------------------------------------------------
# Programs


def taken(f: Any, *args: Any) -> int:
    """Native calls in f, which enable compiles and whose values are those of XLA's CPU."""
    want = of_cpu(f, *args)
    with jaxconv.enabled(implementation="native"):
        equal(jax.jit(lambda *args: f(*args))(*args), want)
        return calls(lambda *args: f(*args), *args)["conv_integer"]


PROGRAMS = {
    "convolve": (lambda x, y: jnp.convolve(x, y, preferred_element_type=x.dtype), ((40,), (7,))),
    "convolve_same": (lambda x, y: jnp.convolve(x, y, "same", preferred_element_type="int64"), ((7,), (40,))),
    "correlate": (lambda x, y: jnp.correlate(x, y, "full", preferred_element_type="int32"), ((40,), (7,))),
    "transposed": (
        lambda x, w: lax.conv_transpose(x, w, (2, 2), "SAME", dimension_numbers=NUMBERS[2]),
        ((2, 5, 6, 3), (3, 3, 3, 4)),
    ),
    "mapped_images": (
        lambda x, w: jax.vmap(lambda x: lax.conv(x, w, (1, 1), "SAME"))(x),
        ((3, 2, 4, 6, 5), (7, 4, 3, 3)),
    ),
    "mapped_filters": (
        lambda x, w: jax.vmap(lambda w: lax.conv(x, w, (1, 1), "SAME"))(w),
        ((2, 4, 6, 5), (3, 7, 4, 3, 3)),
    ),
    "mapped": (
        lambda x, w: jax.vmap(lambda x, w: lax.conv(x, w, (2, 1), "VALID"))(x, w),
        ((3, 2, 4, 6, 5), (3, 7, 4, 3, 3)),
    ),
    "in_a_scan": (
        lambda x, w: lax.scan(lambda c, _: (lax.conv(c, w, (1, 1), "SAME"), None), x, None, length=3)[0],
        ((2, 4, 6, 5), (4, 4, 3, 3)),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_as_it_is_once_enable_is_on(name):
    f, shapes = PROGRAMS[name]
    for dtype in ("int8", "uint16", "int32"):
        assert taken(f, *(values(i, shape, dtype) for i, shape in enumerate(shapes))) == 1


WINDOWS = {
    "jnp.convolve": (jnp.convolve, (40,), (7,)),
    "convolve": (lambda x, y: jax.scipy.signal.convolve(x, y, method="direct"), (9, 8), (3, 2)),
    "convolve2d": (lambda x, y: jax.scipy.signal.convolve2d(x, y, mode="same"), (9, 8), (3, 2)),
    "correlate2d": (lambda x, y: jax.scipy.signal.correlate2d(x, y, mode="full"), (9, 8), (3, 2)),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_what_numpy_and_scipy_promote_runs(name):
    """Without a preferred type these are convolutions of floating-point numbers."""
    f, *shapes = WINDOWS[name]
    x, y = (values(i, shape, "int8") for i, shape in enumerate(shapes))
    with jaxconv.enabled(implementation="native"):
        got = np.asarray(jax.jit(lambda x, y: f(x, y))(x, y))
    np.testing.assert_allclose(got, of_cpu(f, x, y), rtol=1e-6)


@pytest.mark.parametrize("result", ["float32", "float64", "bfloat16", "float16", "complex64"])
@pytest.mark.parametrize("name", ["2d", "all_dilated", "batch_groups"])
def test_floating_point_sums_of_integers_are_those_of_converted_operands(name, result):
    """Of small numbers, whose sums every type holds."""
    form = FORMS[name]
    lhs, rhs = (np.random.default_rng(i).integers(-2, 3, shape).astype("int8") for i, shape in enumerate(form[:2]))
    lhs, rhs = (lhs != 0, rhs != 0) if result == "complex64" else (lhs, rhs)
    want = of_cpu(lambda x, w: by_lax(form, x, w, result), lhs, rhs)

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return by_lax(form, x, w, result)

    with jaxconv.enabled(implementation="native"):
        text = jax.jit(lambda x, w: f(x, w)).lower(lhs, rhs).as_text()
        equal(jax.jit(lambda x, w: f(x, w))(lhs, rhs), want)
        (one,) = jaxconv.explain(f)(lhs, rhs).convolutions[:1]
        assert one.form != "integers"
    assert not re.search(r"stablehlo.convolution.*tensor<[0-9x]*(i8|i1)>", text)
    window, given = window_of(form)
    equal(jaxconv.conv_general_dilated(lhs, rhs, *window, preferred_element_type=result, **given), want)


def test_accelerate_and_freeze_take_a_quantised_layer_as_one_call():
    """Between layers of floating-point numbers."""
    x, w = np.ones((2, 8, 8, 4), "float32"), values(2, (3, 3, 4, 8), "int8")

    def f(w: jax.Array, x: jax.Array) -> jax.Array:
        y = by_lax(FORMS["2d"], jnp.round(x).astype("int8"), w, "int32")
        return jax.nn.relu(y.astype("float32") * 0.5)

    want = of_cpu(f, w, x)
    (layer,) = jaxconv.accelerate(f).report(w, x).replaced
    assert layer.fused == "conv of 8 bits + scale + relu"
    for given in ({}, {"implementation": "native"}):
        with jaxconv.enabled(**given):
            equal(jax.jit(jaxconv.accelerate(f))(w, x), want)
            equal(jaxconv.freeze(f, w)(x), want)


@pytest.mark.skipif(len(jax.devices()) < 2, reason="it needs two devices")
@pytest.mark.parametrize("spec", [P("d"), P(None, "d"), P(None, None, "d")], ids=str)
def test_split_images_stay_and_split_pixels_are_gathered_where_types_say_so(spec):
    """Of floating-point numbers what would be gathered is left to lax, which has none of integers on a GPU."""
    form: Form = ((2, 8, 8, 4), (1, 1, 4, 6), {})
    lhs, rhs = operands(form, "int8")
    f = functools.partial(by_lax, form, dtype="int32")
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        split = jax.device_put(lhs, NamedSharding(mesh, spec))
        of_lax = jax.typeof(f(split, rhs))
        with jaxconv.enabled(implementation="native"):
            text = jax.jit(lambda x, w: f(x, w)).lower(split, rhs).compile().as_text()
            got = jax.jit(lambda x, w: f(x, w))(split, rhs)
    assert targets(text)["conv_integer"] == 1
    assert ("all-gather" in text) == (spec != P("d"))
    assert jax.typeof(got) == of_lax
    equal(got, of_cpu(f, lhs, rhs))


def test_a_differentiated_program_keeps_its_integer_convolutions():
    x, w = values(1, (2, 4, 6, 5), "int8"), values(2, (7, 4, 3, 3), "int8")

    def loss(scale: jax.Array) -> jax.Array:
        y = lax.conv_general_dilated(x, w, (1, 1), "SAME", preferred_element_type="int32")
        return (scale * y.astype("float32")).sum()

    with jaxconv.enabled(implementation="native"):
        value, slope = jax.jit(jax.value_and_grad(loss))(jnp.float32(2))
    np.testing.assert_allclose(value, 2 * slope)

    def by_ours(scale: jax.Array, x: jax.Array) -> jax.Array:
        y = jaxconv.conv_general_dilated(x, w, (1, 1), "SAME", preferred_element_type="int32")
        return (scale * y.astype("float32")).sum()

    np.testing.assert_allclose(jax.grad(by_ours)(jnp.float32(2), x), slope)


MAPPED = {
    "images": (0, None),
    "images_inside": (2, None),
    "filters": (None, 1),
    "both": (0, 3),
}


@pytest.mark.parametrize("dims", MAPPED)
@pytest.mark.parametrize("name", ["2d", "groups", "depthwise", "batch_groups", "axes_in_disorder", "1d"])
def test_a_mapped_kernel_is_one_call(name, dims):
    """jaxconv's own signature, mapped by jax.vmap: one kernel, and what lax gives mapped."""
    form, axes = FORMS[name], MAPPED[dims]
    lhs, rhs = operands(form, "int8")
    args = [
        a if axis is None else np.stack([a, a[::-1], a + 1], axis)
        for a, axis in zip((lhs, rhs), (min(axes[0], lhs.ndim) if axes[0] is not None else None, axes[1]), strict=True)
    ]
    window, given = window_of(form)
    given["preferred_element_type"] = "int32"

    def ours(x: jax.Array, w: jax.Array) -> jax.Array:
        return jaxconv.conv_general_dilated(x, w, *window, **given)

    def laxes(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(x, w, *window, **given)

    mapped = jax.vmap(ours, in_axes=axes)
    equations = jax.make_jaxpr(mapped)(*args).eqns
    assert [e.primitive.name for e in equations].count("jaxconv_conv_integer") == 1
    equal(jax.jit(mapped)(*args), of_cpu(jax.vmap(laxes, in_axes=axes), *args))


SPLITS = {
    "images": ("2d", P("d"), P()),
    "output_channels": ("2d", P(), P(None, None, None, "d")),
    "input_channels": ("wide", P(None, None, None, "d"), P(None, None, "d")),
    "groups": ("grouped", P(None, None, None, "d"), P(None, None, None, "d")),
    "depthwise": ("depthwise", P(None, None, None, "d"), P(None, None, None, "d")),
    "batch_groups": ("batch_groups", P("d"), P(None, None, None, "d")),
    "pixels": ("2d", P(None, "d"), P()),
}
FORMS_OF_SPLITS: dict[str, Form] = {
    "2d": ((2, 8, 8, 5), (3, 3, 5, 6), {}),
    "wide": ((2, 8, 8, 4), (3, 3, 4, 6), {}),
    "grouped": ((2, 8, 8, 8), (3, 3, 2, 12), dict(feature_group_count=4)),
    "depthwise": ((2, 8, 8, 8), (3, 3, 1, 8), dict(feature_group_count=8)),
    "batch_groups": ((4, 8, 8, 3), (3, 3, 3, 6), dict(batch_group_count=2)),
}


@pytest.mark.skipif(len(jax.devices()) < 2, reason="it needs two devices")
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("name", SPLITS)
def test_on_a_mesh_sums_are_those_of_one_device(name, kind):
    form, *specs = SPLITS[name]
    form = FORMS_OF_SPLITS[form]
    lhs, rhs = operands(form, "int8")
    want = of_cpu(lambda x, w: by_lax(form, x, w, "int32"), lhs, rhs)
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto if kind == "auto" else AxisType.Explicit,))
    problem = dataclasses.replace(problem_of(form), implementation="native")
    with jax.set_mesh(mesh):
        placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip((lhs, rhs), specs, strict=True)]
        run = jax.jit(lambda x, w: conv_integer.kernel(problem, x, w))
        text = run.lower(*placed).compile().as_text()
        equal(run(*placed), want)
    assert targets(text)["conv_integer"] == 1
    assert ("all-gather" in text) == (name == "pixels")
    assert ("all-reduce" in text) == (name == "input_channels")


# ----------------------------------------------------------------------------------------------------------------------
# The plan, and what is said


def problem_of(form: Form, dtype: str = "int8", result: str | None = "int32") -> IntegerConvProblem:
    left, right = (jax.ShapeDtypeStruct(shape, dtype) for shape in form[:2])
    window, given = window_of(form)
    return direct_calls.integer_problem(left, right, *window, preferred_element_type=result, **given)


@pytest.mark.usefixtures("code_for_gpus")
@pytest.mark.parametrize("device", [H200, A100], ids=["H200", "A100"])
def test_a_gpu_takes_every_form_and_a_cpu_none(device):
    for name, form in FORMS.items():
        p = problem_of(form)
        plan = _plan.plan("conv_integer", p, device)
        reason = "XLA compiles no convolutions of integers for a GPU"
        if device == H200 and p.group_c % 16 == p.group_k % 16 == 0 and p.groups == p.batch_groups == 1:
            reason += "; on 8-bit tensor cores"
            assert (plan.implementation, plan.kernel) == ("calls", "sm90/eight"), name
        else:
            assert plan.kernel == ("integer/tile" if p.group_k >= 8 else "integer/output"), name
        assert plan.reason == reason
        assert _plan.plan("conv_integer", p, _plan.Device("cpu", "cpu")).implementation == "xla"


@pytest.mark.usefixtures("code_for_gpus")
def test_what_no_kernel_runs_is_said():
    p = problem_of(((1, 8, 1), (1, 1, 1), {}), "int8")
    cases = [
        (dict(padding=((2**30, 0),)), "it needs extents, dilated, and pads below 2^30, got 1073741832"),
        (dict(padding=((2**31, 0),)), "padding=((2147483648, 0),) exceeds 2147483647"),
        (dict(lhs_shape=(1, 2**30, 1)), "extents, dilated, and pads below 2^30"),
        (dict(lhs_dilation=(2**28,)), "extents, dilated, and pads below 2^30, got 1879048193"),
        (dict(lhs_shape=(1, 8, 2**31), rhs_shape=(1, 2**31, 1)), "sums of fewer than 2^30 products, got 2147483648"),
        (dict(lhs_shape=(2**40, 8, 1)), "fewer than 2^31 blocks, got 34359738368"),
        (dict(algorithm="integer/winograd"), "there is no such kernel"),
    ]
    for changed, sentence in cases:
        q = dataclasses.replace(p, **{"implementation": "native", **changed})
        with pytest.raises(ValueError, match=re.escape(sentence)):
            _plan.plan("conv_integer", q, H200)
        if "algorithm" not in changed:  # unasked, XLA says what it cannot
            plan = _plan.plan("conv_integer", dataclasses.replace(q, implementation=None), H200)
            assert plan.implementation == "xla"
            assert sentence in plan.reason
    past = dataclasses.replace(p, lhs_shape=(2**34, 8, 1))  # past 2^31 elements: offsets are of 64 bits
    assert _plan.plan("conv_integer", past, H200).implementation == "native"


def test_a_plan_can_be_kept_from_native_code(monkeypatch):
    p = problem_of(FORMS["2d"])
    monkeypatch.setenv("JAXCONV_DISABLE", "conv_integer")
    assert _plan.plan("conv_integer", p, H200).reason == "JAXCONV_DISABLE=conv_integer"
    monkeypatch.delenv("JAXCONV_DISABLE")
    asked = dataclasses.replace(p, implementation="xla")
    assert _plan.plan("conv_integer", asked, H200).reason == "implementation='xla' was asked for"


@pytest.mark.usefixtures("code_for_gpus")
def test_explain_says_the_line_that_helps():
    x, w = jnp.ones((2, 8, 8, 4), "int8"), jnp.ones((3, 3, 4, 8), "int8")

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return by_lax(FORMS["2d"], x, w, "int32")

    text = str(jaxconv.explain(f, platform="cuda")(x, w))
    assert "Can't lower one or more integer convolutions to idioms supported by CuDNN" in text
    assert "jaxconv.enable()" in text
    assert "native[integer/tile]" in text
    assert "integers  2x8x8 4->8 3x3 int8->int32" in text
    with jaxconv.enabled():
        assert "CuDNN" not in str(jaxconv.explain(f, platform="cuda")(x, w))
    assert "CuDNN" not in str(jaxconv.explain(f, platform="cpu")(x, w))
    of_kernel = jaxconv.cost(functools.partial(conv_integer.kernel, problem_of(FORMS["2d"])))
    flops = of_kernel(*operands(FORMS["2d"], "int8"))["flops"]
    assert 0 <= flops - 2 * math.prod((2, 7, 7, 7)) * 3 * 2 * 5 <= 1  # XLA counts one of its own for a GPU


def test_conv2d_says_who_takes_integers():
    x, w = jnp.ones((2, 8, 8, 4), "int16"), jnp.ones((3, 3, 4, 8), "int16")
    with pytest.raises(TypeError, match=r"conv2d: x and w have dtypes int16 and int16, .*conv_general_dilated"):
        jaxconv.conv2d(x, w)


def test_what_lax_refuses_is_lax_own_error():
    x, w = jnp.ones((2, 4, 8, 8), "uint8"), jnp.ones((3, 4, 3, 3), "int8")
    for more in ({}, dict(preferred_element_type="float32")):
        with pytest.raises(TypeError, match="same dtypes"):
            jaxconv.conv_general_dilated(x, w, (1, 1), "SAME", **more)
    with pytest.raises(TypeError):
        jaxconv.conv_general_dilated(w, w, (1, 1), "SAME", preferred_element_type="uint32")
    with pytest.raises(ValueError):
        jaxconv.conv_general_dilated(w, w, (1, 1, 1), "SAME")


def test_what_no_kernel_reads_is_lax_own():
    empty = jnp.ones((0, 4, 8, 8), "int8"), jnp.ones((3, 4, 3, 3), "int8")
    equal(jaxconv.conv_general_dilated(*empty, (1, 1), "SAME"), np.zeros((0, 3, 8, 8), "int8"))
    floats = jaxconv.conv_general_dilated(
        *map(jnp.asarray, operands(FORMS["channels_first"], "int8")), (1, 1), "SAME", preferred_element_type="float32"
    )
    assert floats.dtype == np.float32


def test_four_dimensions_are_xlas():
    four = values(1, (1, 2, 3, 3, 3, 3), "int8"), values(2, (2, 2, 2, 2, 2, 2), "int8")
    equal(
        jaxconv.conv_general_dilated(*four, (1,) * 4, "VALID"),
        of_cpu(lambda x, w: lax.conv(x, w, (1,) * 4, "VALID"), *four),
    )


# ----------------------------------------------------------------------------------------------------------------------
# Calls without Python's checks


def hostile(**window: Any) -> direct_calls.Call:
    call = direct_calls.example("conv_integer")
    for name, value in window.items():
        call.attrs["window"][name] = np.int64(value) if isinstance(value, int) else np.array(value, np.int64)
    return call


BAD = {
    "stride": dict(stride=[2**63 - 1, 1]),
    "dilation_that_wraps": dict(rhs_dilation=[2**31, 1]),
    "left_dilation_that_wraps": dict(lhs_dilation=[1, 2**62]),
    "pads_that_cancel": dict(pad_low=[2**62, 0], pad_high=[-(2**62), -1]),
    "pads_at_the_lowest": dict(pad_low=[-(2**63), 0], pad_high=[-(2**63), 0]),
    "no_stride": dict(stride=[0, 1]),
    "axes_of_another_rank": dict(lhs_spec=[0, 1, 2]),
    "an_axis_below": dict(rhs_spec=[-1, 0, 1, 2]),
    "more_dimensions": dict(stride=[1, 1, 1, 1]),
    "no_groups": dict(groups=0),
    "groups_below_none": dict(batch_groups=-1),
}


@pytest.mark.parametrize("name", BAD)
def test_a_call_beyond_its_bounds_is_refused(name):
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"conv_integer: (extents|ranks) disagree"):
        hostile(**BAD[name]).run()


def test_arrays_of_other_types_and_empty_ones_are_refused():
    for name, dtype in (("x", "float32"), ("w", "int32"), ("x", "bool")):
        call = direct_calls.example("conv_integer")
        call.operands[name] = call.operands[name][0], dtype
        with pytest.raises(jax.errors.JaxRuntimeError, match="integers of 8 to 64 bits, x and w of one type"):
            call.run()
    call = direct_calls.example("conv_integer")
    shape, dtype = call.operands["x"]
    call.operands["x"] = (0, *shape[1:]), dtype
    with pytest.raises(jax.errors.JaxRuntimeError, match="an array is empty"):
        call.run()


def test_the_longest_steps_that_a_call_may_have():
    """All that a window steps over is past 32 bits: a CPU computes it, a GPU refuses it with a sentence."""
    most = 2**31 - 1
    call = direct_calls.example("conv_integer")
    ones = np.ones(1, np.int64)
    call.attrs["window"] = dict(
        stride=most * ones,
        pad_low=0 * ones,
        pad_high=0 * ones,
        lhs_dilation=most * ones,
        rhs_dilation=most * ones,
        lhs_spec=np.arange(3),
        rhs_spec=np.arange(3),
        out_spec=np.arange(3),
        groups=np.int64(1),
        batch_groups=np.int64(1),
    )
    call.operands = {"x": ((1, 1, 9), "int32"), "w": ((1, 1, 3), "int32")}
    call.results = {"y": ((1, 1, 7), "int32")}
    call.attrs["plan"]["kernel"] = "integer/output"
    if PLATFORM == "cuda":
        with pytest.raises(jax.errors.JaxRuntimeError, match="below 2\\^30"):
            call.run()
        return
    x, w = np.arange(9, dtype="int32").reshape(1, 1, 9), np.array([[[1, 10, 100]]], "int32")
    (y,) = call.run(x, w)
    equal(y, np.array([[[210 + 111 * i for i in range(7)]]], "int32"))


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "uint8", "bool"])
def test_types_of_results_are_laxs_and_so_are_its_errors(dtype):
    x, w = jnp.ones((1, 3, 3, 1), dtype), jnp.ones((1, 1, 1, 1), dtype)
    given = dict(window_strides=(1, 1), padding="SAME", dimension_numbers=NUMBERS[2])
    results = ("bfloat16", "float16", "float32", "float8_e4m3fn", "complex64", "int8", "uint8", "int32", "bool")
    for result in results:
        outcomes = []
        for f in (lax.conv_general_dilated, jaxconv.conv_general_dilated):
            try:
                of = functools.partial(f, **given, preferred_element_type=result)
                outcomes.append(jax.eval_shape(of, x, w).dtype)
            except (TypeError, ValueError) as error:
                outcomes.append((type(error), str(error)))
        assert outcomes[0] == outcomes[1], result

"""lax's convolutions of float8 operands: on Hopper the sums of conv_scaled's kernel, elsewhere lax's own, and always
lax's derivatives. Through `jaxconv.enable` and through `jaxconv.conv_general_dilated`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import A100, H100, HOPPER, poison, same_bits, targets, with_hoppers_code
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxconv
from jaxconv import _plan
from jaxconv._core import primitives
from jaxconv._enable import forms
from jaxconv._ops import conv_float8

TYPES = ("float8_e4m3fn", "float8_e5m2")
RESULTS = ("float32", "bfloat16", "float16")
ONE = {"conv_scaled": 1}


@dataclasses.dataclass(frozen=True)
class Case:
    numbers: tuple[str, str, str]
    c: int = 32
    k: int = 48
    n: int = 3
    taps: tuple[int, ...] = (2, 3, 2)
    stride: int = 1
    padding: Any = "SAME"
    base: int = 1
    dilation: int = 1
    groups: int = 1
    batch_groups: int = 1

    def operands(self, dtype: str, seed: int = 0) -> tuple[jax.Array, jax.Array]:
        """Small integers, whose sums every type that may be a result rounds once."""
        nd, rng = len(self.numbers[0]) - 2, np.random.default_rng(seed)
        image, taps = dict(zip("HWD", (9, 7, 6), strict=True)), dict(zip("HWD", self.taps, strict=True))
        assert nd <= 3
        x = {"N": self.n, "C": self.c, **image}
        w = {"O": self.k, "I": self.c // self.groups, **taps}
        shapes = [x[letter] for letter in self.numbers[0]], [w[letter] for letter in self.numbers[1]]
        lhs, rhs = (jnp.asarray(rng.integers(-2, 3, shape), dtype) for shape in shapes)
        return lhs, rhs

    def by(self, conv: Callable[..., Any], result: Any = "float32", **given: Any) -> Callable[[Any, Any], Any]:
        """A function that no cache knows."""
        nd = len(self.numbers[0]) - 2
        options: dict[str, Any] = dict(lhs_dilation=(self.base,) * nd, rhs_dilation=(self.dilation,) * nd)
        options |= dict(feature_group_count=self.groups, batch_group_count=self.batch_groups)
        options |= dict(dimension_numbers=self.numbers, preferred_element_type=result)
        padding = [self.padding] * nd if isinstance(self.padding, tuple) else self.padding

        def f(x: Any, w: Any) -> Any:
            return conv(x, w, (self.stride,) * nd, padding, **{**options, **given})

        return f


LAST, FIRST = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")
TAKEN = {
    "plain": Case(LAST),
    "first": Case(FIRST, stride=2, padding=(2, 1)),
    "first_filter_last": Case(("NCHW", "HWIO", "NCHW"), padding="VALID"),
    "filter_first": Case(("NHWC", "OHWI", "NHWC"), dilation=2, padding=(0, 3)),
    "other_order": Case(("CWNH", "WOIH", "HNCW"), stride=2, padding=(-1, 2)),
    "last_to_first": Case(("NHWC", "HWIO", "NCHW")),
    "grouped": Case(LAST, c=256, k=32, groups=2),
    "one_by_one": Case(LAST, taps=(1, 1, 1)),
    "one_dimension": Case(("NWC", "WIO", "NWC"), padding=(2, 0)),
    "three_dimensions": Case(("NDHWC", "DHWIO", "NDHWC"), c=16, k=16, stride=2),
}
OURS = {"enable": lax.conv_general_dilated, "conv_general_dilated": jaxconv.conv_general_dilated}


def lowered(f: Callable[..., Any], *args: Any, device: Any = H100, enable: bool = True) -> str:
    """f's program for a GPU that need not be here."""
    block = jaxconv.enabled() if enable else jaxconv.disabled()
    with _plan.Device.assumed(device), block:
        return jax.jit(lambda *args: f(*args)).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def plain(f: Callable[..., Any], *args: Any) -> Any:
    """lax's own. On an H200 cuDNN runs some of XLA's convolutions of float8 with none of its engines (status 2002)."""
    with jaxconv.disabled():
        try:
            return jax.jit(lambda *args: f(*args))(*args)
        except jax.errors.JaxRuntimeError as error:
            if "cudnn status" not in str(error):
                raise
            return pytest.skip("XLA has no convolution here to compare with: every engine of cuDNN's fails")


# ----------------------------------------------------------------------------------------------------------------------
# Numbers


@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", TAKEN)
def test_numbers_are_laxs(name, dtype, result):
    case = TAKEN[name]
    x, w = case.operands(dtype)
    want = np.asarray(plain(case.by(lax.conv_general_dilated, result), x, w))
    for way, conv in OURS.items():
        poison()
        with jaxconv.enabled() if way == "enable" else jaxconv.disabled():
            f = jax.jit(case.by(conv, result))
            got = f(x, w)
            made = targets(f.lower(x, w).compile().as_text())
        assert made == (ONE if HOPPER else {})
        assert got.dtype == want.dtype and np.array_equal(got, want)


@pytest.mark.parametrize("name", TAKEN)
def test_the_kernels_axes_are_laxs(name):
    """Where there is no kernel, its call of arrays in its own order is lax's convolution of them."""
    case = TAKEN[name]
    x, w = case.operands("float8_e5m2")
    f = case.by(lax.conv_general_dilated, "bfloat16")
    (equation,) = jax.make_jaxpr(f)(x, w).eqns
    form = forms.read(*(v.aval for v in (*equation.invars, *equation.outvars)), equation.params)
    assert isinstance(form, forms.Form) and form.form == "float8"
    got = jax.jit(form.run)(x, w)
    assert same_bits(got, plain(f, x, w))


@with_hoppers_code  # XLA's own float8 convolutions on a GPU promise less
@pytest.mark.parametrize("way", OURS)
@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("dtype", TYPES)
def test_sums_are_as_close_as_the_guide_says(dtype, result, way):
    """Within 2^-9 of the sum of the products' absolute values, and the rounding of the result."""
    case = Case(LAST, c=64, k=32, padding="VALID")
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(a.shape), dtype) for a in case.operands(dtype))
    wide = [np.asarray(a, np.float64) for a in (x, w)]
    taps = case.taps[:2]
    windows = np.lib.stride_tricks.sliding_window_view(wide[0], taps, (1, 2))  # (N, P, Q, C, R, S)
    want, terms = (
        np.einsum("npqcrs,rsck->npqk", a, b) for a, b in ((windows, wide[1]), (np.abs(windows), np.abs(wide[1])))
    )
    with jaxconv.enabled():
        got = np.asarray(jax.jit(case.by(OURS[way], result))(x, w), np.float64)
    step = float(jnp.finfo(result).eps) / 2
    assert (np.abs(got - want) <= 2.0**-9 * terms * (1 + step) + step * np.abs(want)).all()


# ----------------------------------------------------------------------------------------------------------------------
# Programs


@with_hoppers_code
@pytest.mark.parametrize("way", OURS)
@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", TAKEN)
def test_hopper_gets_the_kernel_and_an_older_gpu_laxs_program(code_for_gpus, name, dtype, result, way):
    case = TAKEN[name]
    x, w = case.operands(dtype)
    f = case.by(OURS[way], result)
    text = lowered(f, x, w, enable=way == "enable")
    assert targets(text) == ONE and "stablehlo.convolution" not in text
    older = lowered(f, x, w, device=A100, enable=way == "enable")
    of_lax = lowered(case.by(lax.conv_general_dilated, result), x, w, device=A100, enable=False)
    assert not targets(older) and older.count("stablehlo.convolution") == 1
    if way == "enable":
        assert older == of_lax


@with_hoppers_code
def test_without_enable_lax_stays(code_for_gpus):
    case = TAKEN["plain"]
    x, w = case.operands("float8_e4m3fn")
    text = lowered(case.by(lax.conv_general_dilated), x, w, enable=False)
    assert not targets(text) and "f8E4M3FN>) -> tensor<3x9x7x48xf32>" in text


# Why they stay lax's, where the result is float32
LEFT: dict[str, tuple[Case, dict[str, Any], str]] = {
    "three channels": (Case(LAST, c=3), {}, "multiples of 16 channels a group, got 3 and 48"),
    "few channels a group": (
        Case(LAST, c=64, k=32, groups=2),
        {},
        "multiples of 128 input channels a group, got 32 and 16",
    ),
    "transposed": (Case(LAST, base=2, padding=(2, 1)), {}, "neither batch groups nor a dilation of x"),
    "batch groups": (Case(LAST, n=4, batch_groups=2), {}, "neither batch groups nor a dilation of x"),
    "long strides": (Case(LAST, stride=9), {}, "strides must be at most 8"),
    "no space": (Case(("NC", "IO", "NC")), {}, "it has 0 spatial dimensions"),
    "no images": (Case(LAST, n=0), {}, "an array is empty"),
    "float8": (Case(LAST), {"preferred_element_type": None}, "its result is float8_e4m3fn, expected one of float32"),
    "another float8": (Case(LAST), {"preferred_element_type": "float8_e5m2"}, "its result is float8_e5m2"),
    "highest": (Case(LAST), {"precision": "highest"}, "have fewer bits than float32"),
    "one highest": (Case(LAST), {"precision": ("default", "highest")}, "have fewer bits than float32"),
    "an algorithm": (Case(LAST), {"precision": lax.DotAlgorithmPreset.F32_F32_F32}, "have fewer bits than float32"),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_the_kernel_has_not_is_laxs_to_the_letter_and_named(code_for_gpus, case):
    of, given, why = LEFT[case]
    x, w = of.operands("float8_e4m3fn")
    f = of.by(lax.conv_general_dilated, **given)
    if case == "an algorithm":  # which JAX lowers no convolution with
        with _plan.Device.assumed(H100):
            (one,) = jaxconv.explain(f)(x, w).convolutions
        assert not one.taken and why in one.why
        return
    want = lowered(f, x, w, enable=False)
    jaxconv.report(clear=True)
    assert lowered(f, x, w) == want
    (one,) = jaxconv.report(clear=True)
    assert not one.taken and one.became == "lax" and why in one.why
    ours = lowered(of.by(jaxconv.conv_general_dilated, **given), x, w, enable=False)
    assert not targets(ours) and ours.count("stablehlo.convolution") == 1


def test_what_lax_refuses_is_refused():
    case = TAKEN["plain"]
    x, w = case.operands("float8_e4m3fn")
    for given, mine in (({}, w.astype("float8_e5m2")), ({"preferred_element_type": "int32"}, w)):
        errors = []
        for conv in OURS.values():
            with pytest.raises(TypeError) as error:
                case.by(conv, **given)(x, mine)
            errors.append(str(error.value))
        assert errors[0] == errors[1]


@with_hoppers_code
@pytest.mark.parametrize("scale", [None, 1.0])
def test_jaxconv_disable_holds_here_too(code_for_gpus, monkeypatch, scale):
    """Also of sums of float8 without a scale, which had no plan of their own that reads it."""
    case = TAKEN["plain"]
    x, w = case.operands("float8_e4m3fn")
    every = [case.by(conv) for conv in OURS.values()] + [lambda x, w: jaxconv.conv2d(x, w, scale=scale)]
    assert all(targets(lowered(f, x, w)) == ONE for f in every)
    monkeypatch.setenv("JAXCONV_DISABLE", "conv")
    jaxconv.report(clear=True)
    assert not any(targets(lowered(f, x, w)) for f in every)
    assert {one.why for one in jaxconv.report(clear=True).left} >= {"XLA computes it: JAXCONV_DISABLE=conv"}


@with_hoppers_code
def test_reports_say_what_becomes_of_it(code_for_gpus):
    case = TAKEN["plain"]
    x, w = case.operands("float8_e4m3fn")
    f = case.by(lax.conv_general_dilated, "bfloat16")
    with _plan.Device.assumed(H100):
        explained = jaxconv.explain(f)(x, w)
        (call,) = jaxconv.explain(case.by(jaxconv.conv_general_dilated, "bfloat16"))(x, w)
    assert str(explained).startswith("enable, which is off, would do:\ncount  form    problem")
    assert (call.op, call.plan.kernel) == ("conv_scaled", "sm90/eight")
    jaxconv.report(clear=True)
    lowered(f, x, w)
    (reported,) = jaxconv.report(clear=True)
    for one in (*explained.convolutions, reported):
        assert one.form == "float8" and one.taken and one.became == str(call.plan)
        assert one.problem == "3x9x7 32->48 2x3 float8_e4m3fn NHWC -> bfloat16" == str(call.problem)
        assert "8-bit tensor cores" in one.why
    lowered(f, x, w, device=A100)
    (reported,) = jaxconv.report(clear=True)
    assert reported.form == "float8" and reported.became == "lax"
    assert reported.why == "XLA computes it: it needs a GPU of compute capability 9.0"


@with_hoppers_code
@pytest.mark.parametrize("implementation", ["native", "xla"])
def test_a_forced_implementation(code_for_gpus, implementation):
    for case, native in ((TAKEN["plain"], implementation == "native"), (Case(LAST, c=3), False)):
        x, w = case.operands("float8_e4m3fn")
        f = case.by(lax.conv_general_dilated)
        with _plan.Device.assumed(H100), jaxconv.enabled(implementation=implementation):
            text = jax.jit(f).trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
        assert targets(text) == (ONE if native else {})


def test_exported_programs_are_laxs(code_for_gpus):
    case = TAKEN["plain"]
    x, w = case.operands("float8_e4m3fn")
    n = jax.export.symbolic_shape("n")[0]
    like = jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype)
    for conv, first in (
        (lax.conv_general_dilated, x),
        (lax.conv_general_dilated, like),
        (jaxconv.conv_general_dilated, like),
    ):
        with _plan.Device.assumed(H100), jaxconv.enabled():
            exported = jax.export.export(jax.jit(case.by(conv)), platforms=("cuda", "cpu"))(first, w)
        text = exported.mlir_module()
        assert not targets(text) and "stablehlo.convolution" in text
    checks = jaxconv.export_checks()
    assert len({str(check) for check in checks}) == len(checks)


@with_hoppers_code
@pytest.mark.skipif(len(jax.devices()) < 2, reason="it needs two devices")
@pytest.mark.parametrize(("spec", "why"), [(P("d"), ""), (P(None, "d"), "jaxconv's call would gather")], ids=str)
def test_a_mesh_whose_types_say_how_arrays_are_split(code_for_gpus, spec, why):
    """As of other floating-point numbers: enable takes what needs no gather."""
    case = Case(LAST, n=4)
    x, w = case.operands("float8_e4m3fn")
    x = jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0)))
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        split, w = jax.device_put(x, NamedSharding(mesh, spec)), jax.device_put(w, NamedSharding(mesh, P()))
        for conv in OURS.values():
            jaxconv.report(clear=True)
            f = case.by(conv)
            text = lowered(f, split, w)
            (one,) = jaxconv.report(clear=True)
            assert targets(text) == ({} if why else ONE)
            assert one.taken == (not why) and why in one.why
        with jaxconv.enabled():
            got = [jax.jit(case.by(conv))(split, w) for conv in OURS.values()]
    want = plain(case.by(lax.conv_general_dilated), x, w)
    assert all(np.array_equal(a, want) for a in got)


# ----------------------------------------------------------------------------------------------------------------------
# Transforms


def in_float32(f: Callable[..., Any], *args: Any) -> jax.Array:
    return jnp.sum(f(*args).astype("float32") ** 2)


def _with_a_jvp(f: Callable[..., Any]) -> Callable[..., Any]:
    """f with a derivative in x alone, which calls it on the tangent."""
    g = jax.custom_jvp(f)
    g.defjvp(lambda primals, tangents: (f(*primals), f(tangents[0], primals[1])))
    return g


TRANSFORMS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "grad": lambda f: jax.grad(lambda x, w: in_float32(f, x, w), (0, 1)),
    "grad of images": lambda f: jax.grad(lambda x, w: in_float32(f, x, w)),
    "grad of filters": lambda f: jax.grad(lambda x, w: in_float32(f, x, w), 1),
    "value and grad": lambda f: jax.value_and_grad(lambda x, w: in_float32(f, x, w), (0, 1)),
    "jvp": lambda f: lambda x, w: jax.jvp(f, (x, w), (w.sum(dtype="float32").astype(x.dtype) * x, w)),
    "jvp of filters": lambda f: lambda x, w: jax.jvp(lambda w: f(x, w), (w,), (w,)),
    "linearize": lambda f: lambda x, w: jax.linearize(f, x, w)[1](x, w),
    "grad of a grad": lambda f: jax.grad(lambda x, w: in_float32(jax.grad(lambda x: in_float32(f, x, w)), x)),
    "jvp of a grad": lambda f: lambda x, w: jax.jvp(jax.grad(lambda x: in_float32(f, x, w)), (x,), (x,)),
    "linear transpose": lambda f: lambda x, w: jax.linear_transpose(lambda x: f(x, w), x)(f(x, w)),
    "linear transpose of filters": lambda f: lambda x, w: jax.linear_transpose(lambda w: f(x, w), w)(f(x, w)),
    "custom jvp": lambda f: jax.grad(lambda x, w: in_float32(_with_a_jvp(f), x, w)),
    "remat": lambda f: jax.grad(jax.checkpoint(lambda x, w: in_float32(f, x, w)), (0, 1)),
    "vmap": lambda f: lambda x, w: jax.vmap(f, (0, None))(jnp.stack([x, -x]), w),
    "vmap of filters": lambda f: lambda x, w: jax.vmap(f, (None, 0), 1)(x, jnp.stack([w, -w])),
    "vmap of both": lambda f: lambda x, w: jax.vmap(f)(jnp.stack([x, -x]), jnp.stack([w, w])),
    "vmap of nothing": lambda f: lambda x, w: jax.vmap(f, (0, None))(jnp.zeros((0, *x.shape), x.dtype), w),
    "per example": lambda f: lambda x, w: jax.vmap(jax.grad(lambda w, x: in_float32(f, x[None], w)), (None, 0))(w, x),
    "scan": lambda f: lambda x, w: lax.scan(lambda c, _: (c, f(c, w)), x, None, length=2)[1],
    "cond": lambda f: lambda x, w: lax.cond(x.shape[0] > 2, f, lambda x, w: 2 * f(x, w), x, w),
}


@pytest.mark.parametrize("result", ["float32", "bfloat16"])
@pytest.mark.parametrize("way", OURS)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_laxs(name, way, result):
    """Numbers, types, and with enable the program."""
    case, transform = TAKEN["plain"], TRANSFORMS[name]
    x, w = case.operands("float8_e4m3fn")
    # Sums are exact, and none of a gradient is near 448, the largest float8_e4m3fn: XLA's conversions differ there.
    x, w = jnp.sign(x) * jnp.asarray(0.25, x.dtype), jnp.sign(w)
    want = plain(transform(case.by(lax.conv_general_dilated, result)), x, w)
    f = transform(case.by(OURS[way], result))
    with jaxconv.enabled() if way == "enable" else jaxconv.disabled():
        got = jax.jit(lambda x, w: f(x, w))(x, w)
        jaxconv.report(clear=True)
        text = jax.jit(lambda x, w: f(x, w)).lower(x, w).as_text()
        taken = {one.form for one in jaxconv.report(clear=True).taken}
    assert HOPPER or "float8" not in taken
    if way == "enable" and not taken:  # a gradient of filters may be, which is a convolution of the cotangent's type
        assert jax.jit(lambda x, w: f(x, w)).lower(x, w).as_text() == text
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_array_equal(np.asarray(a, np.float64), np.asarray(b, np.float64))


# Kernels that a Hopper's program calls, and lax's convolutions in it: with enable, and by conv_general_dilated without
COUNTS = {
    "grad of images": ((1, 1), (1, 1)),
    "value and grad": ((1, 2), (1, 2)),
    "jvp": ((3, 0), (1, 2)),
    "vmap": ((1, 0), (1, 0)),
    "vmap of filters": ((1, 0), (0, 1)),
    "scan": ((1, 0), (1, 0)),
}


@with_hoppers_code
@pytest.mark.parametrize("way", OURS)
@pytest.mark.parametrize("name", COUNTS)
def test_under_transforms_the_forward_pass_is_the_kernels(code_for_gpus, name, way):
    """Gradients are convolutions of the cotangent's type, of which no time is known here."""
    case = TAKEN["plain"]
    x, w = case.operands("float8_e4m3fn")
    text = lowered(TRANSFORMS[name](case.by(OURS[way])), x, w, enable=way == "enable")
    counted = targets(text)
    assert counted["conv_scaled"] == COUNTS[name][way != "enable"][0]
    others = sum(counted.values()) - counted["conv_scaled"] + text.count("stablehlo.convolution(")
    assert others == COUNTS[name][way != "enable"][1]


@pytest.mark.parametrize("name", ["plain", "first", "grouped"])
def test_a_cpus_program_is_laxs(name):
    case = TAKEN[name]
    x, w = case.operands("float8_e5m2")
    texts = set()
    for way in (*OURS, "plain"):
        with jaxconv.enabled() if way == "enable" else jaxconv.disabled():
            f = jax.jit(case.by(OURS.get(way, lax.conv_general_dilated)))
            texts.add(f.trace(x, w).lower(lowering_platforms=("cpu",)).as_text())
    assert len(texts) == 1 and "f8E5M2" in texts.pop()


def test_numpys_arrays_and_what_is_not_yet_an_array():
    case = TAKEN["plain"]
    x, w = case.operands("float8_e5m2")
    got = case.by(jaxconv.conv_general_dilated)(*map(np.asarray, (x, w)))
    assert np.array_equal(got, plain(case.by(lax.conv_general_dilated), x, w))


def test_remat_keeps_what_a_policy_keeps_of_convolutions():
    case = TAKEN["plain"]
    x, w = case.operands("float8_e4m3fn")

    def forward(x: jax.Array) -> jax.Array:
        return jnp.sin(case.by(jaxconv.conv_general_dilated)(x, w)).sum()

    def count(policy: Any) -> int:
        jaxpr = jax.make_jaxpr(jax.grad(jax.checkpoint(forward, policy=policy)))(x)
        return sum(one.primitive is conv_float8.kernel.primitive for one in primitives.equations(jaxpr.jaxpr))

    policies = jaxconv.checkpoint_policies
    assert [count(one) for one in (policies.save_convs, policies.save_products, policies.save_all)] == [1, 1, 1]
    assert count(jax.checkpoint_policies.nothing_saveable) == 2


@with_hoppers_code
@pytest.mark.parametrize("precision", ["highest", lax.Precision.HIGH, ("default", "highest")])
def test_accelerate_leaves_a_precision_above_the_default(code_for_gpus, precision):
    case = TAKEN["plain"]
    x, w = case.operands("float8_e4m3fn")
    for one, expected in ((precision, {}), ("default", ONE)):
        numbers = case.by(lax.conv_general_dilated, precision=one)
        f = jaxconv.accelerate(lambda x, w, numbers=numbers: numbers(x, w) * 0.5)
        assert targets(lowered(f, x, w, enable=False)) == expected

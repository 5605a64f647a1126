"""Shortcuts: sums of a second convolution of one tap, in 8 bits and in 16, by every tile of the kernels."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import A100, H100, H200, HOPPER, calls, normal, poison, with_hoppers_code
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_conv_scaled import Case, Numbers, equal, expected, kernels, of_sums, scales, sums, values

import jaxconv
from jaxconv import _plan
from jaxconv._core import sharding
from jaxconv._ops import conv, conv_scaled, conv_shortcut
from jaxconv._plan import conv_scaled as tiles_of
from jaxconv._plan import conv_shortcut as of_tiles
from jaxconv._plan import domain
from jaxconv._problem import EIGHT_BIT_INTEGERS, FLOAT8, ConvProblem, ScaledConvProblem, ShortcutConvProblem


@dataclasses.dataclass(frozen=True)
class Two:
    """A convolution, and its shortcut from x2."""

    case: Case
    x2: tuple[int, ...]
    stride: int = 1

    @property
    def shortcut(self) -> Case:
        nd = len(self.x2) - 2
        return Case(self.x2, (*(1,) * nd, self.x2[-1], self.case.w[-1]), stride=self.stride, padding="VALID")


# Channels that fill stages of 64 and of 128 or do not, of either; strides that leave a rest of x2 or none; every rank.
CASES = {
    "halves_of_a_stage": Two(Case((2, 9, 11, 64), (1, 1, 64, 48)), (2, 9, 11, 64)),
    "an_odd_number_of_halves": Two(Case((2, 9, 11, 64), (1, 1, 64, 80)), (2, 9, 11, 128)),
    "few_channels": Two(Case((2, 8, 7, 16), (1, 1, 16, 32)), (2, 15, 14, 80), 2),
    "stages": Two(Case((2, 7, 9, 128), (1, 1, 128, 272)), (2, 13, 18, 256), 2),
    "stages_in_part": Two(Case((1, 5, 7, 528), (1, 1, 528, 144)), (1, 5, 7, 272)),
    "three_by_three": Two(Case((3, 13, 12, 80), (3, 3, 80, 80)), (3, 25, 24, 48), 2),
    "three_by_three_of_halves": Two(Case((3, 13, 12, 48), (3, 3, 48, 80)), (3, 13, 12, 96)),
    "a_strided_filter": Two(Case((2, 15, 13, 32), (3, 3, 32, 32), stride=2), (2, 15, 13, 32), 2),
    "other_strides": Two(Case((2, 6, 5, 32), (1, 1, 32, 32)), (2, 17, 13, 32), 3),
    "many_small_images": Two(Case((150, 2, 2, 16), (1, 1, 16, 16)), (150, 4, 3, 32), 2),
    "one_dimension": Two(Case((3, 41, 48), (5, 48, 96), padding="CAUSAL"), (3, 82, 64), 2),
    "three_dimensions": Two(Case((2, 5, 6, 7, 16), (1, 1, 1, 16, 48)), (2, 9, 11, 13, 32), 2),
    "several_waves": Two(Case((24, 40, 40, 16), (1, 1, 16, 144)), (24, 40, 40, 48)),
}
OPTIONS: dict[str, Any] = dict(precision=None, return_preactivation=False, implementation=None)


def run(two: Two, kernel: str | None, operands: Sequence[Any], *, layout: Any = None, **how: Any) -> Numbers:
    """`operands`: x, w, x2, w2; `how` as expected's."""
    nd = len(two.case.x) - 2
    arrays = {name: how.pop(name, None) for name in ("scale", "b", "residual", "residual_scale", "out_scale")}
    layout = layout or ("NWC", "NHWC", "NDHWC")[nd - 1]
    rest = OPTIONS | two.case.options | dict(layout=layout, algorithm=kernel, activation=None) | how

    def f(operands: Any, arrays: Any) -> Any:
        x, w, x2, w2 = operands
        given = arrays | rest
        b, residual = given.pop("b"), given.pop("residual")
        return conv_scaled.run(f"conv{nd}d", nd, x, w, b, residual, shortcut=(x2, w2, (two.stride,) * nd), **given)

    if kernel is not None:
        assert calls(f, operands, arrays) == {"conv_scaled": 1}
    poison()
    return np.asarray(jax.jit(f)(operands, arrays))


def drawn(two: Two, dtype: str = "int8", w_dtype: str = "int8") -> list[Numbers]:
    shapes = two.case.x, two.case.w, two.x2, two.shortcut.w
    return [values(i, shape, w_dtype if i % 2 else dtype) for i, shape in enumerate(shapes)]


def total(two: Two, operands: Sequence[Numbers]) -> Numbers:
    return sums(two.case, *operands[:2]) + sums(two.shortcut, *operands[2:])


@pytest.mark.parametrize("bias", ["float32", "int32"])
@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("name", CASES)
def test_every_shortcut_is_exact(name, kernel, bias):
    two = CASES[name]
    operands = drawn(two)
    acc = total(two, operands)
    scale, b = scales(two.case)
    if bias == "int32":
        b = of_sums(scale, b)
    residual = values(4, acc.shape, "int8")
    how: dict[str, Any] = dict(scale=scale, b=b, residual=residual, residual_scale=0.37, activation="relu")
    how["out_scale"] = 0.9
    equal(run(two, kernel, operands, out_dtype="int8", **how), expected(acc, "int8", **how))
    bare: dict[str, Any] = dict(scale=scale, b=b)
    equal(run(two, kernel, operands, out_dtype="float32", **bare), expected(acc, "float32", **bare))


@pytest.mark.parametrize(("left", "right"), [(a, b) for a in EIGHT_BIT_INTEGERS for b in EIGHT_BIT_INTEGERS])
def test_every_pair_of_integers(left, right):
    two = CASES["few_channels"]
    operands = drawn(two, left, right)
    scale, b = scales(two.case)
    for kernel in kernels(right):
        for out_dtype in ("uint8", "bfloat16"):
            want = expected(total(two, operands), out_dtype, scale=scale, b=b)
            equal(run(two, kernel, operands, out_dtype=out_dtype, scale=scale, b=b), want)
        raw = run(two, kernel, operands, out_dtype=None)
        equal(raw, total(two, operands).astype(np.int32))


@pytest.mark.parametrize("name", ["halves_of_a_stage", "an_odd_number_of_halves", "stages", "three_by_three"])
@pytest.mark.parametrize("dtype", FLOAT8)
def test_float8(name, dtype):
    """Small integers: every chain is exact."""
    two, rng = CASES[name], np.random.default_rng(6)
    operands = [rng.integers(-2, 3, a.shape).astype(jnp.dtype(dtype)) for a in drawn(two)]
    acc = total(two, operands)
    scale = rng.choice([0.25, 0.5, 1], two.case.w[-1]).astype(np.float32)
    for kernel in kernels(dtype):
        for out_dtype in (dtype, "float16", "float32"):
            how: dict[str, Any] = dict(scale=scale, activation="relu")
            equal(run(two, kernel, operands, out_dtype=out_dtype, **how), expected(acc, out_dtype, **how))


@pytest.mark.parametrize("kernel", kernels())
def test_channels_first(kernel):
    two = CASES["three_by_three"]
    x, w, x2, w2 = operands = drawn(two)
    scale, b = scales(two.case)
    how: dict[str, Any] = dict(scale=scale, b=b, out_dtype="int8")
    first = [x.transpose(0, 3, 1, 2), w.transpose(3, 2, 0, 1), x2.transpose(0, 3, 1, 2), w2.transpose(3, 2, 0, 1)]
    got = run(two, kernel, first, layout="NCHW", **how)
    equal(got.transpose(0, 2, 3, 1), expected(total(two, operands), "int8", scale=scale, b=b))


def call(two: Two, scale: Any, x: Any, w: Any, x2: Any, w2: Any) -> Any:
    rest = OPTIONS | two.case.options | dict(layout="NHWC", algorithm=None, activation="relu", out_dtype="int8")
    rest |= dict(residual_scale=None, out_scale=None)
    return conv_scaled.run("conv2d", 2, x, w, None, None, scale=scale, shortcut=(x2, w2, (two.stride,) * 2), **rest)


@pytest.mark.parametrize("axes", [(0, None, 0, None), (0, None, None, None), (None, 0, 0, 0), (None, None, None, 0)])
def test_mapped(axes):
    two = CASES["few_channels"]
    each = [np.stack([a, a[::-1], a]) if axis == 0 else a for a, axis in zip(drawn(two), axes, strict=True)]
    scale, _ = scales(two.case)
    got = jax.jit(jax.vmap(functools.partial(call, two, scale), axes))(*each)
    for i in range(3):
        one = [a[i] if axis == 0 else a for a, axis in zip(each, axes, strict=True)]
        equal(np.asarray(got[i]), expected(total(two, one), "int8", scale=scale, activation="relu"))


@pytest.mark.skipif(jax.device_count() < 2, reason="one device")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("split", ["images", "filters"])
def test_on_a_mesh(split, kind):
    two = CASES["few_channels"]
    operands = drawn(two)
    scale, _ = scales(two.case)
    mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,))
    images, filters = (P("d"), P()) if split == "images" else (P(), P(None, None, None, "d"))
    specs = P() if split == "images" else P("d"), images, filters, images, filters
    given = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip((scale, *operands), specs, strict=True)]
    with jax.set_mesh(mesh):
        got = jax.jit(functools.partial(call, two))(*given)
    equal(np.asarray(got), expected(total(two, operands), "int8", scale=scale, activation="relu"))


def problem(two: Two, dtype: str = "int8") -> ScaledConvProblem:
    x, w = (jax.ShapeDtypeStruct(shape, dtype) for shape in (two.case.x, two.case.w))
    how: dict[str, Any] = dict(residual=None, residual_scale=None, out_scale=None, out_dtype=None, activation=None)
    how |= OPTIONS | two.case.options | dict(layout="NHWC", algorithm=None)
    p = ScaledConvProblem.of("conv2d", 2, x, w, None, scale=jax.ShapeDtypeStruct((), np.float32), **how)
    return dataclasses.replace(
        p, shortcut_channels=two.x2[-1], shortcut_spatial=two.x2[1:-1], shortcut_stride=(two.stride,) * 2
    )


@pytest.mark.parametrize(
    ("c", "c2", "stride", "why"),
    [
        (64, 64, 1, None),
        (64, 24, 1, "in its shortcut in 8 bits it needs multiples of 16 channels a group, got 24 and 64"),
        (64, 64, 9, "in its shortcut "),
    ],
)
def test_what_the_kernel_takes(c, c2, stride, why):
    two = Two(Case((2, 5, 5, c), (1, 1, c, 64)), (2, 4 * stride + 1, 4 * stride + 1, c2), stride)
    plan = tiles_of.by_kernel("sm90/eight", problem(two), H200)
    if why is None:
        assert isinstance(plan, _plan.Plan)
    else:
        assert isinstance(plan, str) and why in plan


def test_the_kernel_for_few_channels_takes_none():
    """sm90/eight_halo is wanted for 3x3 filters of 64 channels: not with a shortcut."""
    two = Two(Case((64, 56, 56, 64), (3, 3, 64, 64)), (64, 56, 56, 64))
    p = problem(two)
    alone = dataclasses.replace(p, shortcut_channels=0, shortcut_spatial=(), shortcut_stride=())
    assert tiles_of.by_kernel("sm90", alone, H200).kernel == "sm90/eight_halo"
    assert tiles_of.by_kernel("sm90", p, H200).kernel == "sm90/eight"
    assert tiles_of.by_kernel("sm90/eight_halo", p, H200) == "it takes no shortcut"


def test_it_is_counted_and_named():
    two = CASES["few_channels"]
    p = problem(two)
    alone = dataclasses.replace(p, shortcut_channels=0, shortcut_spatial=(), shortcut_stride=())
    pixels = 2 * 8 * 7 * 32
    assert conv_scaled.kernel.flops(p) - conv_scaled.kernel.flops(alone) == 2 * pixels * 80
    assert str(p) == str(alone).replace(" + scale", " + shortcut 15x14 80->32 + scale")
    assert p != alone and p.shortcut.x_shape == two.x2 and p.shortcut.y_shape == p.y_shape


# ----------------------------------------------------------------------------------------------------------------------
# 16 bits: conv_shortcut, which has no public function either


ON_HOPPER = pytest.mark.skipif(not HOPPER, reason="the kernel runs on compute capability 9.0")


def of_16_bits(two: Two, dtype: str = "bfloat16", bias: bool = True, layout: Any = None, **how: Any) -> Any:
    nd = len(two.case.x) - 2
    options = OPTIONS | dict(activation="relu", algorithm=None, layout=layout or ("NWC", "NHWC", "NDHWC")[nd - 1]) | how
    x, w, x2, w2 = (jax.ShapeDtypeStruct(shape, dtype) for shape in (two.case.x, two.case.w, two.x2, two.shortcut.w))
    b = jax.ShapeDtypeStruct(two.case.w[-1:], dtype) if bias else None
    p = ConvProblem.infer("conv", nd, x, w, b, **options, **two.case.options)
    q = ConvProblem.infer("conv", nd, x2, w2, None, **options, **two.shortcut.options)
    return ShortcutConvProblem.of(p, q)


def normal_operands(two: Two, dtype: str, bias: bool = True) -> list[Numbers]:
    shapes = two.case.x, two.case.w, *[two.case.w[-1:]] * bias, two.x2, two.shortcut.w
    return [normal(i, shape).astype(jnp.dtype(dtype)) for i, shape in enumerate(shapes)]


def meant(two: Two, operands: Sequence[Numbers], activation: Any = "relu") -> tuple[Numbers, Numbers]:
    """(y in float64, the sum of the absolute terms of each of its sums)."""
    x, w, *b, x2, w2 = (a.astype(np.float64) for a in operands)
    z = total(two, [x, w, x2, w2]) + (b[0] if b else 0.0)
    size = total(two, [np.abs(a) for a in (x, w, x2, w2)]) + (np.abs(b[0]) if b else 0.0)
    return np.maximum(z, 0) if activation else z, size


def near(got: Any, want: Numbers, size: Numbers, dtype: str) -> None:
    eps = float(jnp.finfo(dtype).eps)
    off = np.abs(np.asarray(got, np.float64) - want)
    assert (off <= eps * np.abs(want) + 2.0**-20 * size).all(), off.max()


@ON_HOPPER
@pytest.mark.parametrize("tile", of_tiles.TILES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_every_shortcut_of_16_bits(name, dtype, tile):
    two = CASES[name]
    for bias, activation in ((True, "relu"), (False, None)):
        p = of_16_bits(two, dtype, bias, activation=activation, algorithm=f"sm90/product {tile}")
        plan = _plan.plan("conv_shortcut", p, _plan.Device.current("cuda"))
        assert (plan.kernel, plan.tile) == ("sm90/product", tile)
        operands = normal_operands(two, dtype, bias)
        poison()
        got = jax.jit(lambda *args, p=p: conv_shortcut.kernel(p, *args))(*operands)
        near(got, *meant(two, operands, activation), dtype)


@ON_HOPPER
def test_channels_first_of_16_bits():
    two = CASES["three_by_three"]
    x, w, b, x2, w2 = operands = normal_operands(two, "bfloat16")
    images, filters = (0, 3, 1, 2), (3, 2, 0, 1)
    first = x.transpose(images), w.transpose(filters), b, x2.transpose(images), w2.transpose(filters)
    p = dataclasses.replace(of_16_bits(two, implementation="native"), channels_last=False)
    assert _plan.plan("conv_shortcut", p, _plan.Device.current("cuda")).kernel == "sm90/product"
    got = jax.jit(lambda *args: conv_shortcut.kernel(p, *args))(*first)
    near(np.asarray(got).transpose(0, 2, 3, 1), *meant(two, operands), "bfloat16")


@pytest.mark.parametrize("name", ["stages", "three_by_three", "three_dimensions"])
def test_meaning_in_float32(name):
    """Of the call where no kernel runs: the two convolutions', its derivative, and over a mapped axis."""
    two = CASES[name]
    p = of_16_bits(two, "float32", precision="highest")
    operands = normal_operands(two, "float32")
    ours = functools.partial(conv_shortcut.kernel, p)

    def plain(x: Any, w: Any, b: Any, x2: Any, w2: Any) -> Any:
        a, z = conv.convolution(p.conv.bare(), x, w)[0], conv.convolution(p.shortcut, x2, w2)[0]
        return jax.nn.relu(a + z + b)

    near(jax.jit(ours)(*operands), *meant(two, operands), "float32")
    gradients = [jax.grad(lambda *a, f=f: jnp.sin(f(*a)).sum(), range(5))(*operands) for f in (ours, plain)]
    for got, want in zip(*gradients, strict=True):
        np.testing.assert_allclose(got, want, 2e-4, 2e-4 * float(jnp.abs(want).max()))
    for axes in ((0, None, None, 0, None), (None, 0, 0, None, None), (0, None, None, None, None)):
        each = [np.stack([a, 2 * a]) if axis == 0 else a for a, axis in zip(operands, axes, strict=True)]
        got = jax.jit(jax.vmap(ours, axes))(*each)
        for i in range(2):
            one = [a[i] if axis == 0 else a for a, axis in zip(each, axes, strict=True)]
            np.testing.assert_allclose(got[i], ours(*one), 1e-4, 1e-4)


MESHES = {
    "images": (P("d"), P(), ()),
    "filters": (P(), P(None, None, None, "d"), ()),
    "rows": (P(None, "d"), P(), ("collective-permute",)),
}


@pytest.mark.skipif(jax.device_count() < 2, reason="one device")
@pytest.mark.parametrize("taps", [1, 3])
@pytest.mark.parametrize("split", MESHES)
def test_16_bits_on_a_mesh(split, taps):
    """Nothing is gathered. Of rows that are split a larger filter fetches its neighbours'."""
    two = Two(Case((2, 8, 6, 16), (taps, taps, 16, 32)), (2, 16, 12, 80), 2)
    p, operands = of_16_bits(two, "float32", precision="highest"), normal_operands(two, "float32")
    images, filters, moved = MESHES[split]
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    specs = images, filters, P("d") if split == "filters" else P(), images, filters
    given = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(operands, specs, strict=True)]
    program = jax.jit(sharding.auto(conv_shortcut.kernel, p, mesh)).lower(*given).compile()
    (got,) = jax.tree.leaves(program(*given))
    near(got, *meant(two, operands), "float32")
    out = P(*(images if split != "filters" else filters))
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, out), 4)
    text = program.as_text()
    assert "all-gather" not in text and ("collective-permute" in text) == (taps > 1 and bool(moved))


RESNETS = {
    "s1": (Two(Case((256, 56, 56, 64), (1, 1, 64, 256)), (256, 56, 56, 64)), True),
    "s2": (Two(Case((256, 28, 28, 128), (1, 1, 128, 512)), (256, 56, 56, 256), 2), True),
    "s4, 8 images": (Two(Case((8, 7, 7, 512), (1, 1, 512, 2048)), (8, 14, 14, 1024), 2), True),
    "one image": (Two(Case((1, 28, 28, 128), (1, 1, 128, 512)), (1, 56, 56, 256), 2), False),
}


@pytest.mark.parametrize("name", RESNETS)
def test_plans_of_16_bits(name, code_for_gpus, monkeypatch):
    two, whole = RESNETS[name]
    for device in (H100, H200):
        plan = _plan.plan("conv_shortcut", of_16_bits(two), device)
        assert (plan.implementation, plan.kernel) == (("native", "sm90/product") if whole else ("calls", "two"))
    assert "it has 28 tiles" in _plan.plan("conv_shortcut", of_16_bits(RESNETS["one image"][0]), H200).reason
    for p, device, why in (
        (of_16_bits(two), A100, "compute capability 9.0"),
        (of_16_bits(two, "float32"), H200, "16-bit arrays only"),
        (of_16_bits(two), dataclasses.replace(H200, partitioned=True), "would gather"),
        (of_16_bits(two, implementation="xla"), H200, "'xla' was asked for"),
        (dataclasses.replace(of_16_bits(two), batch=0), H200, "nothing to compute"),
        (dataclasses.replace(of_16_bits(two), shortcut_channels=20), H200, "in its shortcut it needs multiples of 8"),
        (dataclasses.replace(of_16_bits(two), algorithm="direct"), H200, "there is no such kernel"),
        (dataclasses.replace(of_16_bits(RESNETS["s1"][0]), shortcut_channels=3072), H200, "more than 3072 summed"),
    ):
        plan = _plan.plan("conv_shortcut", p, device)
        assert (plan.implementation, plan.kernel) == ("calls", "two") and why in plan.reason, plan.reason
    monkeypatch.setenv("JAXCONV_DISABLE", "conv")
    assert _plan.plan("conv_shortcut", of_16_bits(two), H200).kernel == "two"


def test_a_filter_of_several_taps_has_its_own_plans_tile(code_for_gpus, monkeypatch):
    """Or two calls, where that plan is another kernel."""
    p = of_16_bits(Two(Case((256, 28, 28, 128), (3, 3, 128, 128)), (256, 28, 28, 64)))
    real = _plan.choose.plan

    def chosen(alone: _plan.Plan) -> _plan.Plan:
        monkeypatch.setattr(
            _plan.choose, "plan", lambda op, q, device: alone if op == "conv_add" else real(op, q, device)
        )
        return real("conv_shortcut", dataclasses.replace(p, name=alone.spec), H200)

    for tile in of_tiles.TILES:
        plan = chosen(_plan.Plan("native", "fast", "sm90/product", tile))
        assert (plan.implementation, plan.kernel, plan.tile) == ("native", "sm90/product", tile)
    for kernel, tile in (("sm90/halo", ""), ("sm90/product_swapped", "256x128"), ("sm90/product", "128x320")):
        plan = chosen(_plan.Plan("native", "fast", kernel, tile))
        assert plan.kernel == "two" and f"{kernel} {tile}".strip() + ", the kernel of its own plan" in plan.reason
    plan = chosen(_plan.Plan("xla", "XLA is faster"))
    assert plan.kernel == "two" and "XLA is faster" in plan.reason


@with_hoppers_code
def test_of_a_frozen_block_by_default(code_for_gpus):
    """As lowered for an H200: one call, which reads both and adds no array like its result."""
    x, x2 = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((256, 28, 28, 128), (256, 56, 56, 256)))
    weights = jnp.ones((1, 1, 128, 512), "bfloat16"), jnp.ones((1, 1, 256, 512), "bfloat16")
    numbers = ("NHWC", "HWIO", "NHWC")

    def block(weights: Any, x: Any, x2: Any) -> Any:
        y = jax.lax.conv_general_dilated(x, weights[0], (1, 1), "SAME", dimension_numbers=numbers)
        return jax.nn.relu(y + jax.lax.conv_general_dilated(x2, weights[1], (2, 2), "SAME", dimension_numbers=numbers))

    with _plan.Device.assumed(H200):
        frozen = jaxconv.freeze(block, weights)
        text = jax.jit(frozen).trace(x, x2).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@jaxconv_") == text.count("@jaxconv_conv_shortcut_v2") == 1


def test_refusals():
    """What the domain says of each, on a Hopper GPU."""
    product = _plan.Plan("native", "", "sm90/product", "128x128")
    p = of_16_bits(RESNETS["s2"][0])
    for plan, change, why in (
        (product, {}, None),
        (dataclasses.replace(product, kernel="sm90/halo", tile=""), {}, "only sm90/product takes a shortcut"),
        (dataclasses.replace(product, splits=2), {}, "it has no splits, got 2"),
        (dataclasses.replace(product, tile="64x64"), {}, 'it has no tile "64x64"'),
        (product, dict(dtype="float32"), "with a shortcut it takes 16-bit arrays only"),
        (product, dict(groups=2), "with a shortcut it takes one group"),
        (product, dict(in_channels=132), "it needs multiples of 8 channels a group, got 132"),
        (product, dict(shortcut_channels=20), "in its shortcut it needs multiples of 8 channels a group, got 20"),
        (product, dict(shortcut_stride=(9, 9), shortcut_spatial=(252, 252)), "in its shortcut "),
        (product, dict(batch=2**22), "2^31 pixels"),
    ):
        said = domain.conv_shortcut_refusal(plan, dataclasses.replace(p, **change), H200)
        assert said is None if why is None else why in (said or ""), said
    assert "compute capability 9.0" in (domain.conv_shortcut_refusal(product, p, A100) or "")
    eight = problem(Two(Case((2, 5, 5, 256), (3, 3, 256, 64)), (2, 5, 5, 64)))
    for kernel, change, why in (
        ("sm90/eight", {}, None),
        ("sm90/eight", dict(groups=2), "a shortcut has one group"),
        ("sm90/eight_halo", dict(in_channels=64), "it takes no shortcut"),
    ):
        said = domain.conv_scaled_refusal(_plan.Plan("native", "", kernel), dataclasses.replace(eight, **change), H200)
        assert said is None if why is None else why in (said or ""), said

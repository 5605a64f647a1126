"""Convolutions and dense layers of 8-bit numbers as people write them in lax and jnp: one call each through accelerate
and freeze."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import jaxconv
from jaxconv._plan import Device

X = helpers.integers(0, (2, 8, 6, 16), 127).astype(np.int8)
W = helpers.integers(1, (3, 3, 16, 32), 127).astype(np.int8)
R = helpers.integers(2, (2, 8, 6, 32), 127).astype(np.int8)
S = np.random.default_rng(3).uniform(1e-4, 1e-3, 32).astype(np.float32) * np.where(np.arange(32) % 5, 1, -1)
S = S.astype(np.float32)
B = np.random.default_rng(4).standard_normal(32).astype(np.float32)


def conv(x: Any, w: Any, **options: Any) -> jax.Array:
    options = dict(dimension_numbers=("NHWC", "HWIO", "NHWC"), preferred_element_type=jnp.int32) | options
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", **options)


def f32(a: Any) -> jax.Array:
    return a.astype(jnp.float32)


def as_floats(x: Any, w: Any, dtype: Any = jnp.float32) -> jax.Array:
    return conv(x.astype(dtype), w.astype(dtype), preferred_element_type=None, precision="highest")


def first(x: Any, w: Any, **options: Any) -> jax.Array:
    """Channels first."""
    x, w = jnp.transpose(x, (0, 3, 1, 2)), jnp.transpose(w, (3, 2, 0, 1))
    return conv(x, w, dimension_numbers=("NCHW", "OIHW", "NCHW"), **options)


# id: (function of x, w, s, b, r; what became of it)
WHOLE = "conv of 8 bits + scale + bias + residual + relu + rounding to int8"
CASES: dict[str, tuple[Callable[..., Any], str]] = {
    "all": (
        lambda x, w, s, b, r: jnp.clip(
            jnp.round(jax.nn.relu(f32(conv(x, w)) * s + b + f32(r) * 0.125) * 16), -128, 127
        ).astype(jnp.int8),
        WHOLE,
    ),
    "clipped before it is rounded, divided": (
        lambda x, w, s, b, r: lax.round(
            jnp.clip(jax.nn.relu(f32(conv(x, w)) * s + b + f32(r) * 0.125) / 0.0625, -127, 127),
            lax.RoundingMethod.TO_NEAREST_EVEN,
        ).astype(jnp.int8),
        WHOLE,
    ),
    "bounds of its own": (
        lambda x, w, s, b, r: jnp.clip(jnp.round(f32(conv(x, w)) * s * 8), -100, 90).astype(jnp.int8),
        "conv of 8 bits + scale + rounding to int8",
    ),
    "lax.clamp, uint8": (
        lambda x, w, s, b, r: lax.clamp(0.0, jnp.round((f32(conv(x, w)) * s + b) * 8), 255.0).astype(jnp.uint8),
        "conv of 8 bits + scale + bias + rounding to uint8",
    ),
    "two scales": (
        lambda x, w, s, b, r: jax.nn.relu6(f32(conv(x, w)) * 0.5 * s[None, None, None] / 2 + b),
        "conv of 8 bits + scale + bias + relu6",
    ),
    "a number's bias": (lambda x, w, s, b, r: f32(conv(x, w)) * s + 1.5, "conv of 8 bits + scale + bias"),
    "a residual of floats": (
        lambda x, w, s, b, r: jnp.tanh(f32(conv(x, w)) * s + jnp.sin(f32(r))),
        "conv of 8 bits + scale + residual + tanh",
    ),
    "channels first": (
        lambda x, w, s, b, r: jax.nn.relu(f32(first(x, w)) * s[:, None, None] + b[:, None, None]),
        "conv of 8 bits + scale + bias + relu",
    ),
    "floats that hold int8": (
        lambda x, w, s, b, r: jax.nn.relu(as_floats(x, w) * s + b),
        "conv of 8 bits + scale + bias + relu",
    ),
    "groups": (
        lambda x, w, s, b, r: f32(conv(x, w[:, :, :8], feature_group_count=2)) * s,
        "conv of 8 bits + scale",
    ),
    "sums alone": (lambda x, w, s, b, r: conv(x, w), "conv of integers"),
    "sums that somebody else reads": (
        lambda x, w, s, b, r: (f32(z := conv(x, w)) * s, z),
        "conv of integers",
    ),
}


def traced(f: Callable[..., Any]) -> str:
    (finding,) = jaxconv.accelerate(f).report(X, W, S, B, R)
    return finding.fused


@pytest.mark.parametrize("case", CASES)
def test_what_follows_an_8_bit_convolution_is_part_of_its_call(case):
    """With the numbers of the program as it stands, rounded at other places: 8-bit results differ by none or one."""
    f, expected = CASES[case]
    of_floats = case == "floats that hold int8" and helpers.PLATFORM == "cuda" and not helpers.HOPPER
    assert traced(f) == ("" if of_floats else expected)  # a GPU without a kernel for it does not gain
    plain = jax.tree.leaves(helpers.of_cpu(f, X, W, S, B, R))
    ours = jax.tree.leaves(jax.jit(jaxconv.accelerate(f))(X, W, S, B, R))
    for a, b in zip(plain, ours, strict=True):
        assert a.dtype == b.dtype
        off = np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64))
        if jnp.issubdtype(a.dtype, jnp.integer):
            assert off.max() <= 1 and np.mean(off > 0) <= 1e-3
            assert len(np.unique(a)) > 50
        else:
            assert off.max() <= 2e-6 * np.abs(a).max()


# id: (function, why not all of it is taken)
LEFT = {
    "rounded away from zero": lambda x, w, s, b, r: jnp.clip(
        lax.round(f32(conv(x, w)) * s, lax.RoundingMethod.AWAY_FROM_ZERO), -127, 127
    ).astype(jnp.int8),
    "not rounded": lambda x, w, s, b, r: jnp.clip(f32(conv(x, w)) * s, -127, 127).astype(jnp.int8),
    "not clipped": lambda x, w, s, b, r: jnp.round(f32(conv(x, w)) * s).astype(jnp.int8),
    "clipped to half a number": lambda x, w, s, b, r: jnp.clip(jnp.round(f32(conv(x, w)) * s), -3.5, 3.5).astype(
        jnp.int8
    ),
    "clipped beyond the type": lambda x, w, s, b, r: jnp.clip(jnp.round(f32(conv(x, w)) * s), -200, 200).astype(
        jnp.int8
    ),
    "clamps without a common number": lambda x, w, s, b, r: lax.clamp(
        10.0, lax.clamp(-100.0, jnp.round(f32(conv(x, w)) * s), 0.0), 120.0
    ).astype(jnp.int8),
    "bounds above zero": lambda x, w, s, b, r: jnp.clip(jnp.round(f32(conv(x, w)) * s), 5, 120).astype(jnp.int8),
    "an empty interval": lambda x, w, s, b, r: jnp.minimum(jnp.maximum(jnp.round(f32(conv(x, w)) * s), 5), 2).astype(
        jnp.int8
    ),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_is_no_saturation_stays_the_programs(case):
    f = LEFT[case]
    assert traced(f) == "conv of 8 bits + scale"
    plain, ours = (np.asarray(jax.jit(g)(X, W, S, B, R), int) for g in (f, jaxconv.accelerate(f)))
    assert np.mean(plain != ours) <= 1e-3


def test_nan_and_infinite_scales():
    """NaN is 0 in integers, infinity the largest number; in float32 both stay what they are."""
    s = S.copy()
    s[:4] = np.nan, np.inf, -np.inf, 1e38
    for low, high, dtype in ((-128, 127, jnp.int8), (5, 200, jnp.uint8), (-90, -3, jnp.int8)):

        def f(x: Any, w: Any, s: Any, low: int = low, high: int = high, dtype: Any = dtype) -> Any:
            z = f32(conv(x, w)) * s
            return jnp.clip(jnp.round(jnp.where(jnp.isnan(z), 0.0, z)), low, high).astype(dtype), z

        def g(x: Any, w: Any, s: Any, low: int = low, high: int = high, dtype: Any = dtype) -> Any:
            return jnp.clip(jnp.round(f32(conv(x, w)) * s), low, high).astype(dtype)

        (plain, sums), ours = helpers.of_cpu(f, X, W, s), jax.jit(jaxconv.accelerate(g))(X, W, s)
        known = ~np.isnan(np.asarray(sums))  # XLA does not say which integer a NaN becomes
        np.testing.assert_array_equal(np.asarray(ours)[known], np.asarray(plain)[known])
    alone = jax.jit(jaxconv.accelerate(lambda x, w, s: f32(conv(x, w)) * s))(X, W, s)
    np.testing.assert_array_equal(np.isinf(alone), np.isinf(sums))
    np.testing.assert_array_equal(np.isnan(alone), np.isnan(sums))


# ----------------------------------------------------------------------------------------------------------------------
# Programs whose bits the call has: of ties, of numbers beyond every integer, of infinities and NaN

XE = {
    "conv": helpers.integers(5, X.shape, 3).astype(np.int8),
    "dense": helpers.integers(5, (3, 7, 48), 3).astype(np.int8),
}
WE = {
    "conv": helpers.integers(6, W.shape, 3).astype(np.int8),
    "dense": helpers.integers(6, (48, 32), 3).astype(np.int8),
}
RE = {"conv": R, "dense": helpers.integers(2, (3, 7, 32), 127).astype(np.int8)}
SE = np.tile(np.float32([0.5, -0.5, 0.25, 0.125, 2.5, 0.037, -1.7, 0]), 4)
SE[16:24] = np.nan, np.inf, -np.inf, 1e38, -1e38, 3e7, -3e7, 1e-30
BE = np.random.default_rng(7).integers(-9, 10, 32).astype(np.float32) / 2
BE[24:28] = np.nan, np.inf, -np.inf, -0.0


def q8(v: Any) -> jax.Array:
    return jnp.clip(jnp.round(v), -128, 127).astype(jnp.int8)


def q32(v: Any, low: int, high: int, dtype: Any = jnp.int8) -> jax.Array:
    return jnp.clip(jnp.round(v).astype(jnp.int32), low, high).astype(dtype)


# id: (function of the sums in float32, s, b and r; what of it is part of the call; the operations that stay behind it)
SAME: dict[str, tuple[Callable[..., Any], str, dict[str, int]]] = {
    "clipped as int32": (lambda z, s, b, r: q32(z * s + b, -128, 127), "scale + bias + rounding to int8", {}),
    "clipped as int32, uint8": (
        lambda z, s, b, r: q32(z * s + b, 0, 255, jnp.uint8),
        "scale + bias + rounding to uint8",
        {},
    ),
    "clipped as int16": (
        lambda z, s, b, r: jnp.clip(jnp.round(z * s + b).astype(jnp.int16), -128, 127).astype(jnp.int8),
        "scale + bias + rounding to int8",
        {},
    ),
    "lax.clamp of int32, longer and shorter": (
        lambda z, s, b, r: (
            lax.clamp(jnp.int32(-128), jnp.round(z * s).astype(jnp.int32), jnp.int32(127)).astype(jnp.int16)
        ).astype(jnp.int8),
        "scale + rounding to int8",
        {},
    ),
    "int32 between the clip and int8": (
        lambda z, s, b, r: jnp.clip(jnp.round(z * s + b), -128, 127).astype(jnp.int32).astype(jnp.int8),
        "scale + bias + rounding to int8",
        {},
    ),
    "a bound of floats, another of int32": (
        lambda z, s, b, r: jnp.minimum(jnp.maximum(jnp.round(z * s), -128).astype(jnp.int32), 127).astype(jnp.int8),
        "scale + rounding to int8",
        {},
    ),
    "everything, clipped as int32": (
        lambda z, s, b, r: q32(jax.nn.relu(z * s + b + f32(r) * 0.125) * 0.5, -127, 127),
        "scale + bias + residual + relu + rounding to int8",
        {},
    ),
    "bounds of its own, of int32": (
        lambda z, s, b, r: q32((z * s + b) * 0.5, -100, 90),
        "scale + bias + rounding to int8",
        {"max": 1, "min": 1},
    ),
    "bounds above zero, of int32": (
        lambda z, s, b, r: q32(jax.nn.relu(z * s + b), 5, 127),
        "scale + bias + relu + rounding to int8",
        {"max": 1},
    ),
    "bounds below zero, of int32": (
        lambda z, s, b, r: q32(z * s + b, -128, -3),
        "scale + bias + rounding to int8",
        {"min": 1},
    ),
    "relu of int8": (
        lambda z, s, b, r: jnp.maximum(q8(z * s + b), 0),
        "scale + bias + relu + rounding to int8",
        {},
    ),
    "jax.nn.relu of int8": (
        lambda z, s, b, r: jax.nn.relu(q8((z * s + b + f32(r) * 0.125) * 0.7)),
        "scale + bias + residual + relu + rounding to int8",
        {},
    ),
    "relu of int8, infinite factor": (
        lambda z, s, b, r: jax.nn.relu(q8((z * s + b) * jnp.inf)),
        "scale + bias + relu + rounding to int8",
        {},
    ),
    "relu of int32": (
        lambda z, s, b, r: jnp.minimum(jax.nn.relu(jnp.round(z * s).astype(jnp.int32)), 127).astype(jnp.int8),
        "scale + relu + rounding to int8",
        {},
    ),
    "a lower bound of 0": (
        lambda z, s, b, r: jnp.clip(jnp.round((z * s + b) * 0.7), 0, 127).astype(jnp.int8),
        "scale + bias + relu + rounding to int8",
        {},
    ),
    "a clip of int8": (
        lambda z, s, b, r: jnp.clip(q8(z * s), 0, 100),
        "scale + relu + rounding to int8",
        {"min": 1},
    ),
    "relu behind relu": (
        lambda z, s, b, r: jnp.maximum(q8(jax.nn.relu(z * s + b) * 2.5), 0),
        "scale + bias + relu + rounding to int8",
        {},
    ),
    "relu of uint8": (
        lambda z, s, b, r: jax.nn.relu(jnp.clip(jnp.round(z * s + b), 0, 255).astype(jnp.uint8)),
        "scale + bias + rounding to uint8",
        {},
    ),
    "relu behind a negative factor": (
        lambda z, s, b, r: jnp.maximum(q8((z * s + b) * -0.5), 0),
        "scale + bias + rounding to int8",
        {"max": 1},
    ),
    "relu behind a factor of 0": (
        lambda z, s, b, r: jnp.maximum(q8((z * s + b) * 0.0), 0),
        "scale + bias + rounding to int8",
        {"max": 1},
    ),
    "relu behind a factor that is not known": (
        lambda z, s, b, r: jnp.maximum(q8((z * s + b) * s[1]), 0),
        "scale + bias + rounding to int8",
        {"max": 1},
    ),
    "relu behind leaky_relu": (
        lambda z, s, b, r: jnp.maximum(q8(jax.nn.leaky_relu(z * s + b)), 0),
        "scale + bias + leaky_relu(0.01) + rounding to int8",
        {"max": 1},
    ),
    "int8, and uint8 of it": (
        lambda z, s, b, r: jnp.maximum(q8(z * s + b), 0).astype(jnp.uint8),
        "scale + bias + rounding to uint8",
        {"min": 1},
    ),
    "int8 that somebody else reads": (
        lambda z, s, b, r: (q := q8(z * s + b), jnp.maximum(q, 0)),
        "scale + bias + rounding to int8",
        {"max": 1},
    ),
    "a zero point of 0": (
        lambda z, s, b, r: jnp.clip(jnp.round(z * s + b) + 0, -128, 127).astype(jnp.int8),
        "scale + bias + rounding to int8",
        {},
    ),
    "a zero point of 0, of int32": (
        lambda z, s, b, r: jnp.clip(jnp.round(z * s + b).astype(jnp.int32) + 0, 0, 255).astype(jnp.uint8),
        "scale + bias + rounding to uint8",
        {},
    ),
}

# id: the same of what must not be part of the call, which here makes float32
MISSED: dict[str, Callable[..., Any]] = {
    "int32 that wraps around": lambda v: jnp.round(v).astype(jnp.int32).astype(jnp.int8),
    "int16 that wraps around": lambda v: jnp.clip(jnp.round(v).astype(jnp.int32).astype(jnp.int16), -128, 127).astype(
        jnp.int8
    ),
    "int32 clipped beyond the type": lambda v: q32(v, -200, 200),
    "int8 that is clipped too late": lambda v: jnp.clip(jnp.round(v).astype(jnp.int32).astype(jnp.int8), -100, 100),
    "int32 clipped for the other type": lambda v: q32(v, 0, 255),
    "negative numbers in uint8": lambda v: q32(v, -128, 127, jnp.uint8),
    "int32 clipped as floats": lambda v: jnp.clip(f32(jnp.round(v).astype(jnp.int32)), -128, 127).astype(jnp.int8),
    "unsigned": lambda v: jnp.minimum(jnp.maximum(jnp.round(v), -100).astype(jnp.uint32), 127).astype(jnp.int8),
    "int32 that is not rounded": lambda v: jnp.clip(v.astype(jnp.int32), -128, 127).astype(jnp.int8),
    "floats between halves, int32": lambda v: jnp.clip(jnp.round(v), -3.5, 3.5).astype(jnp.int32).astype(jnp.int8),
    "floats above zero, int32": lambda v: jnp.clip(jnp.round(v), 5, 120).astype(jnp.int32).astype(jnp.int8),
    "a bound that int32 cuts": lambda v: jax.jit(
        lambda v, low: jnp.clip(jnp.round(v).astype(jnp.int32), low.astype(jnp.int32), 127).astype(jnp.int8)
    )(v, jnp.float32(-3.5)),
    "bounds without a common number": lambda v: jnp.minimum(jnp.maximum(jnp.round(v).astype(jnp.int32), 5), 2).astype(
        jnp.int8
    ),
    "rounded away from zero, int32": lambda v: jnp.clip(
        lax.round(v, lax.RoundingMethod.AWAY_FROM_ZERO).astype(jnp.int32), -128, 127
    ).astype(jnp.int8),
    "half a number up": lambda v: jnp.clip(jnp.floor(v + 0.5), -128, 127).astype(jnp.int8),
    "a zero point": lambda v: jnp.clip(jnp.round(v) + 3, -128, 127).astype(jnp.int8),
    "a zero point of int32": lambda v: jnp.clip(jnp.round(v).astype(jnp.int32) - 128, -128, 127).astype(jnp.int8),
    "a zero point that is not known": lambda v: jnp.clip(
        jnp.round(v) + jnp.round(lax.stop_gradient(v)[..., :1] * 0), -128, 127
    ).astype(jnp.int8),
}

PASSES = ("add", "sub", "mul", "div", "max", "min", "clamp", "round", "floor", "convert_element_type", "select_n")


def of_sums(what: str, f: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[np.ndarray, ...]]:
    """(f of the sums of a convolution or a dense layer, its arguments)."""
    sums = conv if what == "conv" else dot
    return lambda x, w, s, b, r: f(f32(sums(x, w)), s, b, r), (XE[what], WE[what], SE, BE, RE[what])


def operation_by_operation(f: Callable[..., Any], *args: Any) -> Any:
    """f's results on the CPU, each operation compiled alone: none is combined with another, as XLA's CPU does."""
    with jaxconv.disabled(), jax.default_device(jax.devices("cpu")[0]):
        return jax.tree.map(np.asarray, f(*args))


@pytest.mark.parametrize("what", ["conv", "dense"])
@pytest.mark.parametrize("case", SAME)
def test_a_call_with_the_bits_of_the_program(case, what):
    behind, parts, left = SAME[case]
    f, args = of_sums(what, behind)
    accelerated = jaxconv.accelerate(f)
    (finding,) = accelerated.report(*args)
    assert finding.fused == f"{what} of 8 bits + {parts}"
    found = helpers.equations(accelerated, *args)
    assert found["jaxconv_conv_scaled"] == 1
    assert {name: found[name] for name in PASSES if found[name]} == left
    plain, ours = operation_by_operation(f, *args), jax.jit(accelerated)(*args)
    assert helpers.same_bits(plain, ours)
    if isinstance(plain, np.ndarray):
        assert len(np.unique(plain)) > 20 or case in ("relu of int8, infinite factor", "relu behind a factor of 0")


@pytest.mark.parametrize("what", ["conv", "dense"])
@pytest.mark.parametrize("case", MISSED)
def test_what_would_change_bits_is_not_part_of_the_call(case, what):
    f, args = of_sums(what, lambda z, s, b, r: MISSED[case](z * s + b))
    (finding,) = jaxconv.accelerate(f).report(*args)
    assert finding.fused == f"{what} of 8 bits + scale + bias"
    assert helpers.same_bits(operation_by_operation(f, *args), jax.jit(jaxconv.accelerate(f))(*args))


@pytest.mark.parametrize("what", ["conv", "dense"])
@pytest.mark.parametrize("shape", [(32,), ()], ids=str)
def test_an_int32_bias_is_added_to_the_sums(what, shape):
    """float32(sum + b) * s has one rounding in front of the product, float32(sum) * s + b * s one behind it."""
    sums = conv if what == "conv" else dot

    def f(x: Any, w: Any, s: Any, b: Any) -> Any:
        return q8(jax.nn.relu(f32(sums(x, w) + b) * s))

    b = np.random.default_rng(8).integers(-(2**31), 2**31, shape).astype(np.int32)
    args = XE[what], WE[what], SE, b
    (finding,) = jaxconv.accelerate(f).report(*args)
    assert finding.fused == f"{what} of 8 bits + scale + bias + relu + rounding to int8"
    assert helpers.same_bits(operation_by_operation(f, *args), jax.jit(jaxconv.accelerate(f))(*args))


@pytest.mark.parametrize("what", ["conv", "dense"])
def test_sums_and_an_int32_bias_stay_integers(what):
    sums = conv if what == "conv" else dot
    b = np.random.default_rng(8).integers(-(2**31), 2**31, 32).astype(np.int32)
    args = XE[what], WE[what], b

    def f(x: Any, w: Any, b: Any) -> Any:
        return sums(x, w) + b

    assert helpers.same_bits(helpers.of_cpu(f, *args), jax.jit(jaxconv.accelerate(f))(*args))


def test_frozen_an_integers_relu_is_the_calls():
    f, (x, w, s, b, r) = of_sums("conv", SAME["jax.nn.relu of int8"][0])
    frozen = jaxconv.freeze(lambda weights, x, r: f(x, *weights, r), (w, s, b))
    assert [finding.fused for finding in frozen.report(x, r)] == [f"conv of 8 bits + {SAME['jax.nn.relu of int8'][1]}"]
    assert helpers.same_bits(operation_by_operation(f, x, w, s, b, r), frozen(x, r))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sums_that_are_rounded_to_16_bits_stay_rounded(dtype):
    """float16's infinities, too."""

    def f(x: Any, w: Any, s: Any) -> Any:
        return f32(conv(x, w).astype(dtype)) * s

    (finding,) = jaxconv.accelerate(f).report(X, W, S)
    assert finding.fused == "conv of 8 bits"
    plain, ours = helpers.of_cpu(f, X, W, S), jax.jit(jaxconv.accelerate(f))(X, W, S)
    np.testing.assert_array_equal(ours, plain)


@pytest.mark.parametrize(
    ("x", "w"),
    [
        ((2, 6, 6, 0), (3, 3, 0, 16)),
        ((2, 6, 6, 8), (3, 3, 8, 0)),
        ((2, 0, 6, 8), (3, 3, 8, 16)),
        ((0, 6, 6, 8), (3, 3, 8, 16)),
    ],
)
def test_empty_extents(x, w):
    def f(x: Any, w: Any) -> Any:
        return f32(conv(x, w)) * 0.5

    x, w = np.ones(x, np.int8), np.ones(w, np.int8)
    np.testing.assert_array_equal(jax.jit(jaxconv.accelerate(f))(x, w), helpers.of_cpu(f, x, w))
    with Device.assumed(helpers.H100):
        jax.jit(jaxconv.accelerate(f)).trace(x, w).lower(lowering_platforms=("cuda",))


def test_float8():
    x, w = (a.astype(ml_dtypes.float8_e4m3fn) for a in (X * 0.1, W * 0.01))

    def f(x: Any, w: Any, s: Any, b: Any, r: Any) -> Any:
        z = conv(x, w, preferred_element_type=jnp.float32) * s + b
        return jnp.clip(jax.nn.relu(z) * 8, -448, 448).astype(jnp.float8_e4m3fn)

    (finding,) = jaxconv.accelerate(f).report(x, w, S, B, R)
    assert finding.fused == "conv of 8 bits + scale + bias + relu + rounding to float8_e4m3fn"
    plain, ours = (np.asarray(jax.jit(g)(x, w, S, B, R), np.float32) for g in (f, jaxconv.accelerate(f)))
    assert np.mean(plain != ours) <= 1e-2 and np.abs(plain - ours).max() <= 2**-3 * np.abs(plain).max()


LOSING = [
    ("int8", "bool"),
    ("int8", "uint8 uint16"),
    ("int8", "uint32"),
    ("int8", "int4"),
    ("uint8", "int4 int32"),
    ("float8_e4m3fn", "bool"),
    ("float8_e4m3fn", "int32"),
    ("float8_e5m2", "int32 float16"),
]


@pytest.mark.parametrize(("dtype", "through"), LOSING)
def test_a_conversion_that_loses_numbers_is_not_looked_through(dtype, through):
    """A mask, say, is no array of 8 bits: of operands, and of what is added."""

    def converted(a: Any) -> Any:
        for name in through.split():
            a = a.astype(name)
        return f32(a)

    x, w = (jnp.clip(a, -100, 100).astype(dtype) for a in (X.astype(jnp.float32), W.astype(jnp.float32) * 0.1))
    floats = dict(preferred_element_type=None, precision="highest")

    def f(x: Any, w: Any, s: Any) -> Any:
        y = conv(converted(x), f32(w), **floats) * s
        r = jnp.broadcast_to(converted(x)[..., :1], y.shape)
        return conv(f32(x), f32(w), **floats) * s + 3.0 * r + y

    plain, ours = helpers.of_cpu(f, x, w, S), jax.jit(jaxconv.accelerate(f))(x, w, S)
    np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-4 * np.abs(plain).max())


@pytest.mark.parametrize("dtype", ["int16", "int32", "float16", "bfloat16 float32"])
def test_a_conversion_without_a_loss_is_looked_through(dtype):
    def f(x: Any, w: Any, s: Any) -> Any:
        for name in dtype.split():
            x = x.astype(name)
        return as_floats(x, w) * s

    with Device.assumed(Device("cpu", "cpu")):
        (finding,) = jaxconv.accelerate(f).report(X, W, S)
    assert finding.fused == "conv of 8 bits + scale"


@pytest.mark.parametrize("bounds", [(-240, 240), (-448, 100), (-17.3, 250)])
def test_float8_between_other_bounds_than_its_own(bounds):
    x, w = (a.astype(ml_dtypes.float8_e4m3fn) for a in (X * 0.1, W * 0.1))

    def f(x: Any, w: Any, s: Any) -> Any:
        return jnp.clip(conv(x, w, preferred_element_type=jnp.float32) * s * 64, *bounds).astype(jnp.float8_e4m3fn)

    (finding,) = jaxconv.accelerate(f).report(x, w, S)
    assert finding.fused == "conv of 8 bits + scale + rounding to float8_e4m3fn"
    plain, ours = (np.asarray(jax.jit(g)(x, w, S), np.float32) for g in (f, jaxconv.accelerate(f)))
    assert plain.min() == ours.min() and plain.max() == ours.max()
    assert np.mean(plain != ours) <= 1e-2 and np.abs(plain - ours).max() <= 2**-3 * np.abs(plain).max()


@pytest.mark.parametrize("known", [True, False])
def test_behind_a_relu_a_negative_factor_reaches_the_lower_bound(known):
    def f(x: Any, w: Any, s: Any, b: Any, factor: Any) -> Any:
        y = jax.nn.relu(f32(conv(x, w)) * s + b)
        return jnp.clip(jnp.round(y * (-80.0 if known else factor)), -127, 127).astype(jnp.int8)

    plain, ours = (np.asarray(jax.jit(g)(X, W, S, B, -80.0), int) for g in (f, jaxconv.accelerate(f)))
    assert plain.min() == ours.min() == -127 and np.abs(plain - ours).max() <= 1


def test_a_gradient_goes_through_scale_bias_and_residual():
    f, _ = CASES["a residual of floats"]

    def loss(f: Callable[..., Any], s: Any, b: Any) -> jax.Array:
        return jnp.sum(f(X, W, s, b, R) * (1 + b))

    plain = helpers.of_cpu(jax.grad(functools.partial(loss, f), (0, 1)), S, B)
    ours = jax.grad(functools.partial(loss, jaxconv.accelerate(f)), (0, 1))(S, B)
    for a, b in zip(plain, ours, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-4 * np.abs(a).max())
    mapped = jax.vmap(jaxconv.accelerate(f), (0, None, 0, None, None))(X[None], W, S[None], B, R)
    np.testing.assert_allclose(mapped[0], helpers.of_cpu(f, X, W, S, B, R), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ("int8", "float8_e4m3fn"))
def test_a_gradient_goes_past_what_becomes_8_bits(dtype):
    """Of integers there is none, of float8 JAX's; what else reads the numbers has one."""

    def loss(x: Any, s: Any) -> jax.Array:
        if dtype == "int8":
            q, w = jnp.clip(jnp.round(x * 20), -127, 127).astype(jnp.int8), W
        else:
            q, w = x.astype(dtype), f32(W).astype(dtype)
        sums = conv(q, w, preferred_element_type=jnp.int32 if dtype == "int8" else jnp.float32)
        return jnp.mean((f32(sums) * s + jnp.mean(x)) ** 2)

    x = np.random.default_rng(5).standard_normal(X.shape).astype(np.float32)
    plain, ours = (jax.jit(jax.grad(g, (0, 1)))(x, S) for g in (loss, jaxconv.accelerate(loss)))
    for a, b in zip(plain, ours, strict=True):
        assert np.abs(a).max() > 0
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-4 * np.abs(a).max())


# ----------------------------------------------------------------------------------------------------------------------
# Dense layers

XD = helpers.integers(0, (3, 7, 48), 127).astype(np.int8)
WD = helpers.integers(1, (48, 32), 127).astype(np.int8)
RD = helpers.integers(2, (3, 7, 32), 127).astype(np.int8)
NORMAL = (((2,), (0,)), ((), ()))


def dot(x: Any, w: Any, **options: Any) -> jax.Array:
    return lax.dot_general(x, w, NORMAL, **(dict(preferred_element_type=jnp.int32) | options))


# id: (function of x, w, s, b, r; what became of it)
DENSE: dict[str, tuple[Callable[..., Any], str]] = {
    "all": (
        lambda x, w, s, b, r: jnp.clip(
            jnp.round(jax.nn.relu(f32(dot(x, w)) * s + b + f32(r) * 0.125) * 16), -128, 127
        ).astype(jnp.int8),
        "dense of 8 bits + scale + bias + residual + relu + rounding to int8",
    ),
    "uint8": (
        lambda x, w, s, b, r: jnp.clip(
            jnp.round(jax.nn.relu(f32(dot(lax.bitcast_convert_type(x, jnp.uint8), w)) * s) * 8), 0, 255
        ).astype(jnp.uint8),
        "dense of 8 bits + scale + relu + rounding to uint8",
    ),
    "two scales, gelu": (
        lambda x, w, s, b, r: jax.nn.gelu(f32(dot(x, w)) * 0.5 * s[None, None] / 2 + b),
        "dense of 8 bits + scale + bias + gelu",
    ),
    "jnp.matmul, a bias alone": (
        lambda x, w, s, b, r: f32(jnp.matmul(x, w, preferred_element_type=jnp.int32)) + b,
        "dense of 8 bits + bias",
    ),
    "floats that hold int8": (
        lambda x, w, s, b, r: jax.nn.relu(
            dot(f32(x), f32(w), preferred_element_type=None, precision="highest") * s + b
        ),
        "dense of 8 bits + scale + bias + relu",
    ),
    "a matrix": (
        lambda x, w, s, b, r: f32(lax.dot(x[0], w, preferred_element_type=jnp.int32)) / s,
        "dense of 8 bits + scale",
    ),
    "sums of uint8 alone": (
        lambda x, w, s, b, r: dot(lax.bitcast_convert_type(x, jnp.uint8), w),
        "dense of integers",
    ),
    "sums of int32 that hold int8": (
        lambda x, w, s, b, r: x.astype(jnp.int32) @ w.astype(jnp.int32),
        "dense of integers",
    ),
}


@pytest.mark.parametrize("case", DENSE)
def test_what_follows_an_8_bit_product_is_part_of_its_call(case):
    f, expected = DENSE[case]
    (finding,) = jaxconv.accelerate(f).report(XD, WD, S, B, RD)
    # Of so few rows the plan leaves a product to XLA on a GPU, and then floats stay floats.
    assert finding.fused == ("" if helpers.PLATFORM == "cuda" and case == "floats that hold int8" else expected)
    plain, ours = (np.asarray(jax.jit(g)(XD, WD, S, B, RD)) for g in (f, jaxconv.accelerate(f)))
    assert plain.dtype == ours.dtype and plain.shape == ours.shape
    off = np.abs(plain.astype(np.float64) - ours)
    if plain.dtype == np.int32:
        np.testing.assert_array_equal(plain, ours)
    elif jnp.issubdtype(plain.dtype, jnp.integer):
        assert off.max() <= 1 and np.mean(off > 0) <= 1e-2 and len(np.unique(plain)) > 50
    else:
        assert off.max() <= 2e-6 * np.abs(plain).max()


# id: (function, why it stays what it is)
XLAS: dict[str, tuple[Callable[..., Any], str]] = {
    "sums alone": (lambda x, w, s, b, r: dot(x, w), "XLA has a product for sums of int8 without scales"),
    "sums that somebody else reads": (
        lambda x, w, s, b, r: (f32(z := dot(x, w)) * s, z),
        "XLA has a product for sums of int8 without scales",
    ),
    "a scale a row": (
        lambda x, w, s, b, r: f32(dot(x, w)) * f32(r[..., :1]) * s,
        "no factor or bias along its columns follows",
    ),
    "w from the other side": (
        lambda x, w, s, b, r: (
            f32(lax.dot_general(x, w.T, (((2,), (1,)), ((), ())), preferred_element_type=jnp.int32)) * s
        ),
        r"jaxconv's products are (..., K) @ (K, N)",
    ),
}


@pytest.mark.parametrize("case", XLAS)
def test_products_that_stay_xlas(case):
    f, why = XLAS[case]
    (finding,) = jaxconv.accelerate(f).report(XD, WD, S, B, RD)
    assert not finding.fused and why in finding.why
    plain, ours = (jax.tree.leaves(jax.jit(g)(XD, WD, S, B, RD)) for g in (f, jaxconv.accelerate(f)))
    for a, b in zip(plain, ours, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_product_of_floats_that_hold_int8_is_one_of_floats_where_a_gpu_has_no_kernel():
    """With what is fused of any dense layer."""

    def f(x: Any, w: Any, b: Any) -> jax.Array:
        return jax.nn.relu(dot(f32(x), f32(w), preferred_element_type=None) + b)

    with Device.assumed(Device("cpu", "cpu")):
        (finding,) = jaxconv.accelerate(f).report(XD, WD, B)
    assert finding.fused == "dense of 8 bits + bias + relu"
    with Device.assumed(Device("cuda", "a GPU of 2016", (6, 0))):
        (finding,) = jaxconv.accelerate(f).report(XD, WD, B)
    assert finding.fused == "dense + bias + relu"


def test_frozen_a_dense_layers_filter_stays_8_bits():
    def model(weights: Any, x: Any, r: Any) -> Any:
        w, s, b = weights
        return DENSE["all"][0](x, w, s, b, r)

    frozen = jaxconv.freeze(model, (WD, S, B))
    assert [finding.fused for finding in frozen.report(XD, RD)] == [DENSE["all"][1]]
    assert np.mean(np.asarray(frozen(XD, RD)) != np.asarray(DENSE["all"][0](XD, WD, S, B, RD))) <= 1e-2
    assert sorted(a.dtype.name for a in frozen.weights.values()) == ["float32", "float32", "int8"]


def test_a_gradient_goes_through_a_dense_layers_scale_and_bias():
    def loss(f: Callable[..., Any], s: Any, b: Any) -> jax.Array:
        return jnp.sum(f(XD, WD, s, b, RD) * (1 + b))

    f, _ = DENSE["two scales, gelu"]
    plain, ours = (jax.grad(functools.partial(loss, g), (0, 1))(S, B) for g in (f, jaxconv.accelerate(f)))
    for a, b in zip(plain, ours, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-4 * np.abs(a).max())
    mapped = jax.vmap(jaxconv.accelerate(f), (0, None, 0, None, None))(XD[None], WD, S[None], B, RD)
    np.testing.assert_allclose(mapped[0], f(XD, WD, S, B, RD), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shared", (None, "per_tensor"))
def test_aqt_flax_dense(shared):
    """By default AQT's activations have a scale a row, which XLA multiplies behind its own product; with one of the
    tensor it is part of the call. Bias and activation stand outside the function whose derivative is AQT's own."""
    aqt = pytest.importorskip("aqt.jax.v2.flax.aqt_flax", reason="the product is AQT's: pip install aqtp")
    nn = pytest.importorskip("flax.linen")
    from aqt.jax.v2 import config

    chosen = config.fully_quantized(fwd_bits=8, bwd_bits=None)
    chosen.fwd.dg_quantizer.lhs.calib_shared_axes = shared
    modes = dict(rhs_freeze_mode=aqt.FreezerMode.CALIBRATION_AND_VALUE)

    def model(mode: Any) -> Any:
        product = functools.partial(aqt.AqtDotGeneral, chosen, rhs_quant_mode=mode, **modes)
        return nn.Sequential([nn.Dense(64, dot_general_cls=product), nn.relu, nn.Dense(32, dot_general_cls=product)])

    x = np.random.default_rng(0).standard_normal((4, 10, 48)).astype(np.float32)
    rngs = {"params": jax.random.key(0)}
    variables = model(aqt.QuantMode.TRAIN).init(jax.random.key(1), x)
    _, stored = model(aqt.QuantMode.CONVERT).apply(variables, x, rngs=rngs, mutable=True)
    serve = functools.partial(model(aqt.QuantMode.SERVE).apply, rngs=rngs)
    expected = jax.jit(serve)(stored, x)
    became = ["" if shared is None else "dense of 8 bits + scale"] * 2
    for f, given in ((jaxconv.accelerate(serve), (stored, x)), (jaxconv.freeze(serve, stored), (x,))):
        assert [finding.fused for finding in f.report(*given)] == became
        np.testing.assert_allclose(f(*given), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_frozen_the_filters_stay_8_bits():
    f, expected = CASES["all"]

    def model(weights: Any, x: Any, r: Any) -> Any:
        w, s, b = weights
        return f(x, w, s, b, r)

    frozen = jaxconv.freeze(model, (W, S, B))
    assert [finding.fused for finding in frozen.report(X, R)] == [expected]
    assert np.mean(np.asarray(frozen(X, R)) != helpers.of_cpu(f, X, W, S, B, R)) <= 1e-3
    assert sorted(a.dtype.name for a in frozen.weights.values()) == ["float32", "float32", "int8"]


def test_floats_that_hold_int8_stay_xlas_where_a_gpu_has_no_kernel():
    f, _ = CASES["floats that hold int8"]
    with Device.assumed(Device("cuda", "a GPU of 2016", (6, 0))):
        (finding,) = jaxconv.accelerate(f).report(X, W, S, B, R)
    assert "its operands are converted from 8 bits: " in finding.why and not finding.fused

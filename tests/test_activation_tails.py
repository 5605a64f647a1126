"""Every activation, its first and its second derivative from one end of the numbers to the other, against float64.

Values are right to a relative error also where they are tiny, infinities give limits, NaN gives NaN.
"""

from __future__ import annotations

import math
from typing import Any

import direct_calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special as sp
from helpers import DTYPES, NAMED_ACTIVATIONS, PLATFORM, label, types_of

import jaxconv
from jaxconv._core import activations
from jaxconv._plan.plan import Plan

# The dtypes that native code computes in: on a CPU Python calls it in float32 for 16 bits.
NATIVE = [dtype for dtype in DTYPES if PLATFORM != "cpu" or dtype in ("float32", "float64")]
A, B = math.sqrt(8 / math.pi), math.sqrt(8 / math.pi) * 0.044715  # gelu(z) = z sigmoid(A z + B z^3)


def exact(activation: Any, z: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """(value, size of its terms) of f, f' and f'', by formulas without cancellation of large terms.

    JAX makes f'' of f' by sigmoid's own derivative s (1 - s), which is right absolutely where s is near 1: hence the
    terms s and s v' in the sizes of f''.
    """
    a = activations.parse("test", activation)
    s, rest = sp.expit(z), sp.expit(-z)
    positive, one, zero = z > 0, np.ones_like(z), np.zeros_like(z)
    end = np.clip(z, -1e3, 1e3)  # beyond, what decays is 0
    if a.name == "gelu":
        v, v1, v2 = A * end + B * end**3, A + 3 * B * end**2, 6 * B * end
        s, rest = sp.expit(v), sp.expit(-v)
        second = s * rest * (2 * v1 + end * ((rest - s) * v1**2 + v2))
        sizes = s * rest * (2 * v1 + np.abs(end) * (v1**2 + np.abs(v2))) + s * np.minimum(v1, 16)  # 16: rest is 0
        return [(z * s, z * s), (s + end * s * rest * v1, s + np.abs(end) * s * rest * v1), (second, sizes)]
    if a.name == "gelu_exact":
        p, d = sp.ndtr(z), np.exp(-0.5 * end**2) / math.sqrt(2 * math.pi)
        return [(z * p, z * p), (p + end * d, p + np.abs(end) * d), (d * (2 - end**2), d * (2 + end**2))]
    if a.name == "silu":
        second = s * rest * (2 + end * (rest - s))
        return [
            (z * s, z * s),
            (s * (1 + end * rest), s + np.abs(end) * s * rest),
            (second, s * rest * (2 + np.abs(end)) + s),
        ]
    if a.name == "sigmoid":
        # f' and f'' come from y, whose rounding they pass on.
        return [(s, s), (s * rest, one), (s * rest * (rest - s), one)]
    if a.name == "tanh":
        y, slope = np.tanh(z), 4 * sp.expit(2 * z) * sp.expit(-2 * z)
        return [(y, y), (slope, one), (-2 * y * slope, 2 * one)]
    if a.name == "elu":
        e = np.exp(np.where(positive, 0, z))
        return [
            (np.where(positive, z, np.expm1(np.where(positive, 0, z))),) * 2,
            (e, one),
            (np.where(positive, 0, e), one),
        ]
    if a.name == "hard_swish":
        inside = (z > -3) & (z < 3)
        y, slope = z * (np.clip(z + 3, 0, 6) / 6), np.where(inside, (2 * z + 3) / 6, z >= 3)
        return [(y, y), (slope, np.where(inside, np.abs(z) / 3 + 0.5, 1)), (np.where(inside, 1 / 3, 0), one)]
    f = {
        "none": (z, one),
        "relu": (np.where(positive, z, 0), positive),
        "relu6": (np.clip(z, 0, 6), positive & (z < 6)),
        "leaky_relu": (np.where(positive, z, a.slope * z), np.where(positive, 1, a.slope)),
    }[a.name]
    return [(f[0], f[0]), (f[1] * one, f[1] * one), (zero, zero)]


def steepness(activation: Any, z: np.ndarray) -> np.ndarray:
    """|z g'(z) / g(z)| of the factor g that decays: by how much rounding inside g's argument is amplified."""
    name, z = activations.parse("test", activation).name, np.clip(z, -1e3, 1e3)
    return {"gelu": np.abs(A * z + 3 * B * z**3), "gelu_exact": z**2, "silu": np.abs(z), "sigmoid": np.abs(z)}.get(
        name, np.zeros_like(z)
    )


def points(dtype: str) -> np.ndarray:
    """Numbers of `dtype` over its whole range, more of them near 0, without the kinks."""
    largest = float(jnp.finfo(dtype).max)
    # From 1e-3 in float16: leaky_relu's slope is read off the sign of y, which may not underflow.
    tails = 10 ** np.linspace(-3 if dtype == "float16" else -6, math.log10(largest) - 1e-9, 400)
    z = np.concatenate([np.linspace(-45, 45, 901) + 1e-3, tails, -tails])
    return np.clip(z, -largest, largest).astype(jnp.dtype(dtype)).astype(np.float64)


def assert_right(
    at: np.ndarray, got: Any, expected: np.ndarray, size: np.ndarray, dtype: str, steep: np.ndarray, ulps: float
) -> None:
    """|got - expected| <= (ulps eps of dtype + steep eps of the arithmetic) * size + what is below normal numbers."""
    wide = "float64" if dtype == "float64" else "float32"
    relative = ulps * float(jnp.finfo(dtype).eps) + steep * float(jnp.finfo(wide).eps)
    info = jnp.finfo(dtype)
    least = float(info.smallest_subnormal if dtype == "float16" else info.tiny) + 1e3 * float(jnp.finfo(wide).tiny)
    excess = np.abs(np.asarray(got, np.float64) - expected) - np.minimum(relative, 1) * np.abs(size)
    worst = np.nanargmax(excess)
    assert not np.isnan(excess).any()
    assert excess[worst] <= least, f"at {at[worst]}: {np.asarray(got)[worst]}, expected {expected[worst]}"


def orders(activation: Any, z: jax.Array) -> list[jax.Array]:
    """f, f' and f'' of each element, by jax.grad of the one formula that Python has."""
    a = activations.parse("test", activation)

    def f(v: jax.Array) -> jax.Array:
        return activations.activate(a, v)

    def elementwise(g: Any) -> Any:
        return lambda v: jax.vjp(g, v)[1](jnp.ones_like(v))[0]

    return [jax.jit(g)(z) for g in (f, elementwise(f), elementwise(elementwise(f)))]


@pytest.mark.parametrize("activation", NAMED_ACTIVATIONS, ids=label)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_xlas_path_and_its_derivatives(dtype, activation):
    with types_of(dtype):
        z = points(dtype)
        expected, steep = exact(activation, z), steepness(activation, z)
        got = orders(activation, jnp.asarray(z, dtype))
        for order, (value, size) in enumerate(expected):
            # 2 ulps of a value; a derivative is made of a few products, and of y, which is rounded to dtype.
            assert_right(z, got[order], value, size, dtype, (4 + steep), (3, 4, 12)[order])


# Batch-norm's kernels that recompute z, and of how many channels: one goes element by element, 24 in vectors of 16
# bytes, three threads across in 16 bits.
BACKWARDS = {"two_read": (1, 24), "resident_block": (1, 24), "resident_team": (24,)} if PLATFORM == "cuda" else {}
CHANNELS = (1, 24) if PLATFORM == "cuda" else (1,)


def rows(z: np.ndarray, channels: int) -> np.ndarray:
    """z dealt to rows of channels; zeros fill the last."""
    return np.pad(z, (0, -z.size % channels)).reshape(-1, channels)


def norm_call(name: str, shape: tuple[int, int], dtype: str, activation: Any) -> direct_calls.Call:
    """A batch-norm that changes nothing (mean 0, deviation 1): its z is x."""
    call, a = direct_calls.example(name), activations.parse("test", activation)
    call.attrs["norm"] |= dict(channel_axis=np.int64(1), epsilon=np.float64(0), residual=np.int64(0))
    call.attrs["norm"] |= dict(activation=a.name, slope=np.float64(a.slope))
    del call.operands["residual"]
    wide = "float64" if dtype == "float64" else "float32"
    for arrays in (call.operands, call.results):
        for array in arrays:
            large = array in ("x", "y", "dy", "dx", "dresidual")
            arrays[array] = (shape, dtype) if large else (shape[1:], wide)
    return call


def native_value(z: np.ndarray, dtype: str, activation: Any, channels: int = 1) -> jax.Array:
    x = jnp.asarray(rows(z, channels), dtype)
    one = jnp.ones(channels, "float64" if dtype == "float64" else "float32")
    options = dict(training=False, epsilon=0.0, activation=activation, implementation="native")
    return jaxconv.batchnorm(x, one, 0 * one, 0 * one, one, **options)[0].reshape(-1)[: z.size]


def native_slope(z: np.ndarray, dtype: str, activation: Any, kernel: str = "", channels: int = 1) -> jax.Array:
    """f'(z) as batch-norm's backward computes it: the residual's gradient for dy = 1."""
    one = np.ones(channels, "float64" if dtype == "float64" else "float32")
    x = np.asarray(jnp.asarray(rows(z, channels), dtype))
    call = norm_call("batchnorm_backward", x.shape, dtype, activation)
    if kernel:
        team = dict(tile="128B", splits=2) if kernel == "resident_team" else {}
        call.attrs["plan"] = Plan("native", "", kernel, **team).attrs()
        call.workspace = 2**20
    operands = dict(x=x, dy=np.ones_like(x), scale=one, bias=0 * one, mean=0 * one, rstd=one)
    results = call.run(*[operands[name] for name in call.operands])
    return results[list(call.results).index("dresidual")].reshape(-1)[: z.size]


@pytest.mark.parametrize("activation", NAMED_ACTIVATIONS, ids=label)
@pytest.mark.parametrize("dtype", NATIVE)
def test_native_code(dtype, activation):
    with types_of(dtype):
        z = points(dtype)
        (value, size), (slope, slope_size) = exact(activation, z)[:2]
        steep = 4 + steepness(activation, z)
        for channels in CHANNELS:
            assert_right(z, native_value(z, dtype, activation, channels), value, size, dtype, steep, 3)
        assert_right(z, native_slope(z, dtype, activation), slope, slope_size, dtype, steep, 4)


@pytest.mark.skipif(PLATFORM != "cuda", reason="these kernels exist on CUDA only")
@pytest.mark.parametrize("activation", NAMED_ACTIVATIONS, ids=label)
@pytest.mark.parametrize("dtype", NATIVE)
def test_every_kernel_of_a_gpu(dtype, activation):
    """An activation has code of its own in some, and other approximations where results are rounded to 16 bits."""
    with types_of(dtype):
        z = points(dtype)
        slope, size = exact(activation, z)[1]
        for kernel, several in BACKWARDS.items():
            for channels in several:
                got = native_slope(z, dtype, activation, kernel, channels)
                assert_right(z, got, slope, size, dtype, 4 + steepness(activation, z), 4)


LIMITS = {  # at minus infinity, infinity
    "none": (-np.inf, np.inf),
    "relu": (0, np.inf),
    "relu6": (0, 6),
    "leaky_relu": (-np.inf, np.inf),
    "elu": (-1, np.inf),
    "tanh": (-1, 1),
    "sigmoid": (0, 1),
    "silu": (0, np.inf),
    "gelu": (0, np.inf),
    "gelu_exact": (0, np.inf),
    "hard_swish": (0, np.inf),
}


def end_slopes(name: str) -> tuple[float, float]:
    low = {"none": 1.0, "leaky_relu": 0.01}.get(name, 0.0)
    return low, 0.0 if name in ("relu6", "tanh", "sigmoid") else 1.0


def test_limits_name_every_activation():
    assert tuple(LIMITS) == activations.NAMES


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_infinities_and_nan(dtype, name):
    with types_of(dtype):
        z = np.array([-np.inf, np.inf, np.nan])
        y, slope, second = orders(name, jnp.asarray(z, dtype))
        np.testing.assert_array_equal(np.asarray(y, np.float64), [*LIMITS[name], np.nan])
        ends = np.asarray(jnp.asarray(end_slopes(name), dtype), np.float64)
        np.testing.assert_array_equal(np.asarray(slope, np.float64)[:2], ends)
        np.testing.assert_array_equal(np.asarray(second, np.float64)[:2], 0)
        if dtype not in NATIVE:
            return
        for channels in CHANNELS:
            value = np.asarray(native_value(z, dtype, name, channels), np.float64)
            np.testing.assert_array_equal(value, [*LIMITS[name], np.nan])
        np.testing.assert_array_equal(np.asarray(native_slope(z, dtype, name), np.float64)[:2], ends)
        for kernel, several in BACKWARDS.items():
            for channels in several:
                slope = np.asarray(native_slope(z, dtype, name, kernel, channels), np.float64)
                np.testing.assert_array_equal(slope[:2], ends)


KINKS = {  # (z, f'(z)) as jax.nn has them; relu6 is 0 at both, hard_swish's gate has no slope there
    "relu": [(0, 0)],
    "relu6": [(0, 0), (6, 0)],
    "leaky_relu": [(0, 1)],
    "elu": [(0, 1)],
    "hard_swish": [(-3, 0), (3, 1)],
}


@pytest.mark.parametrize("name", KINKS)
def test_slopes_at_kinks(name):
    z, slopes = np.array(KINKS[name], np.float64).T
    np.testing.assert_array_equal(orders(name, jnp.asarray(z, "float32"))[1], slopes)
    np.testing.assert_array_equal(native_slope(z, "float32", name), slopes)


@pytest.mark.parametrize("implementation", ["native", "xla"])
def test_gelu_exact_is_jax_nns_in_the_negative_tail(implementation):
    """0.5 z (1 + erf) was 6 % off at -5, and -8.9e-4 at -1e4."""
    z = jnp.array([[-1e4], [-8.0], [-5.0], [-3.0], [-1.0], [0.5]])
    y = jaxconv.dense(z, jnp.ones((1, 1)), activation="gelu_exact", implementation=implementation)
    np.testing.assert_allclose(y, jax.nn.gelu(z, approximate=False), rtol=2e-5, atol=1e-37)

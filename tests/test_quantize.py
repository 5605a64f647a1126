"""freeze(quantize=): the arithmetic, scales, which layers have 8 bits, what a quantised function can do, bad input."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pickle
import re
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax_cases import KEY, randomised
from helpers import H100, of_cpu, targets, with_hoppers_code
from jax import export, lax

import jaxconv
from jaxconv import _plan
from jaxconv._core import primitives
from jaxconv.accelerate import activations
from jaxconv.quantize import calibrate, scales

PIXELS = 8


def images(seed: int, n: int = 4) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, PIXELS, PIXELS, 3)).astype(np.float32)


BATCHES = [images(1), images(2)]
X = images(3)


class Net(nn.Module):
    """A stem, a max-pooling, three residual blocks (two with a filter in the shortcut), a hidden layer, a head."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, dtype=self.dtype)
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        x = stem = nn.relu(norm(name="norm_init")(conv(16, (3, 3), name="conv_init")(x)))
        x = nn.max_pool(x, (2, 2), (2, 2))
        for i, stride in enumerate((1, 2, 1)):
            y = nn.relu(norm()(conv(16, (3, 3), strides=stride, name=f"block{i}_conv1")(x)))
            y = norm()(conv(32, (1, 1), name=f"block{i}_conv2")(y))
            if x.shape != y.shape:
                x = norm()(conv(32, (1, 1), strides=stride, name=f"block{i}_shortcut")(x))
            x = nn.relu(x + y)
        last = x
        x = nn.relu(nn.Dense(32, dtype=self.dtype, name="hidden")(x.mean((1, 2))))
        return {"logits": nn.Dense(10, dtype=self.dtype, name="head")(x), "stem": stem, "last": last}


@functools.cache
def net(dtype: str | None = None) -> tuple[nn.Module, Any]:
    model = Net(None if dtype is None else jnp.dtype(dtype))
    return model, randomised(jax.eval_shape(model.init, KEY, X))


@functools.cache
def frozen(quantize: str | None = "int8", dtype: str | None = None, wide: tuple[str, ...] = ()) -> jaxconv.Frozen:
    model, variables = net(dtype)
    options: dict[str, Any] = {} if quantize is None else dict(quantize=quantize, calibrate=BATCHES, wide=wide)
    return jaxconv.freeze(model.apply, variables, **options)


# ----------------------------------------------------------------------------------------------------------------------
# Arithmetic


def narrowed(v: Any, scale: scales.Scale) -> jax.Array:
    if scale.dtype.startswith("float8"):
        return jnp.clip(v, -448, 448).astype(scale.dtype)
    info = jnp.iinfo(scale.dtype)
    return jnp.clip(jnp.round(v), info.min, info.max).astype(scale.dtype)


def expected_last(q: jaxconv.Frozen, stem: jax.Array) -> jax.Array:
    """Net's `last` from its stem on, in lax and jnp, with the function's weights and scales."""
    w, points = q.weights, iter(q.quantization.scales)
    exact = q.quantization.dtype == "int8"

    def sums(name: str, x: Any, stride: int) -> np.ndarray:
        wide = jnp.int32 if exact else jnp.float32
        total = of_cpu(
            lambda x, w: lax.conv_general_dilated(
                x.astype(wide),
                w.astype(wide),
                (stride, stride),
                "SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
                precision="highest",
            ),
            *(np.asarray(a) for a in (x, w[f"params/{name}/kernel"])),
        )
        return np.asarray(total)

    def conv(name: str, norm: int, total: np.ndarray, out: scales.Scale, residual: Any = None) -> jax.Array:
        """The weights' scales are those of the result's numbers."""
        scale, bias = (np.asarray(w[n]) for n in (f"params/{name}/kernel_scale", f"params/BatchNorm_{norm}/bias"))
        assert bias.dtype == (np.int32 if exact else np.float32)
        z = np.float32(total + bias) * scale if exact else np.float32(total) * scale + bias
        if residual is not None:
            array, step = residual
            z = z + np.asarray(array, np.float32) * (np.float32(step.step) * out.inverse)
        return narrowed(jnp.asarray(np.maximum(z, 0)), out)

    # Those of the first two conv2 are not used: their sums are added to the shortcuts'.
    in0, mid0, _, last0, mid1, _, last1, mid2, last2 = itertools.islice(points, 9)
    pooled = lax.reduce_window(stem, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = narrowed(jnp.asarray(pooled) * in0.inverse, in0)
    a = conv("block0_conv1", 0, sums("block0_conv1", x, 1), mid0)
    x = conv("block0_conv2", 1, sums("block0_conv2", a, 1) + sums("block0_shortcut", x, 1), last0)
    a = conv("block1_conv1", 3, sums("block1_conv1", x, 2), mid1)
    x = conv("block1_shortcut", 4, sums("block1_conv2", a, 1) + sums("block1_shortcut", x, 2), last1)
    a = conv("block2_conv1", 6, sums("block2_conv1", x, 1), mid2)
    x = conv("block2_conv2", 7, sums("block2_conv2", a, 1), last2, (x, last1))
    return np.asarray(x, np.float32) * last2.step


def test_int8_is_the_arithmetic_that_jnp_has_bit_for_bit():
    """Sums of integers, scales, biases, residuals and rounding, one NumPy or jnp operation after another."""
    q = frozen()
    y = q(X)
    np.testing.assert_array_equal(y["last"], expected_last(q, y["stem"]))
    assert np.asarray(y["last"]).max() > 0
    # Its filter and scale are those of the folded filter, read by numbers of the first point's scale.
    frozen(None)(X)
    name, (x, y, *_) = "params/block0_conv1/kernel", q.quantization.scales
    filter = np.asarray(q.weights[name], float) * np.asarray(q.weights[f"{name}_scale"]) * y.step / x.step
    assert signal_to_noise(frozen(None).weights[name], filter) > 35


@with_hoppers_code  # XLA's own float8 convolutions on a GPU promise less
def test_float8_is_the_arithmetic_that_jnp_has():
    """Sums of float32 in another order round differently, and that may move a number by a unit of float8."""
    q = frozen("float8_e4m3fn")
    y = q(X)
    expected = expected_last(q, y["stem"])
    off = np.abs(np.asarray(y["last"]) - expected)
    assert np.quantile(off, 0.95) <= 1e-5 * expected.max() and off.max() <= 2**-3 * expected.max()


def signal_to_noise(wide: Any, q: Any) -> float:
    wide, q = np.asarray(wide, np.float64), np.asarray(q, np.float64)
    return 10 * np.log10(np.sum(wide**2) / np.sum((wide - q) ** 2))


# In dB. A tensor of normal numbers has about 40 in int8 and 31 in float8, and some 16 filters and activations add their
# noises: 12 less, of which another 3 are for what few images and random weights make of it.
LEAST = {"int8": 25.0, "float8_e4m3fn": 16.0}


@pytest.mark.parametrize("dtype", (None, pytest.param("bfloat16", marks=pytest.mark.slow)))
@pytest.mark.parametrize("quantize", LEAST)
def test_answers_are_near_the_wide_ones(quantize, dtype):
    wide, q = (f(X)["logits"] for f in (frozen(None, dtype), frozen(quantize, dtype)))
    assert LEAST[quantize] < signal_to_noise(wide, q) < 60
    assert frozen(quantize, dtype)(X)["logits"].dtype == jnp.dtype(dtype or "float32")


def test_nothing_between_two_8_bit_convolutions_is_wider():
    """In memory: what convolutions read and write. The max-pooling's result is stored in 8 bits too, and what the mean
    in front of the hidden layer reads."""
    jaxpr = jax.make_jaxpr(frozen())(X)
    called = [e for e in primitives.equations(jaxpr.jaxpr) if e.primitive.name == "jaxconv_conv_scaled"]
    assert len(called) == 7  # of nine layers: two are added to their shortcuts
    for eqn in called:
        x, w, *_ = (v.aval for v in eqn.invars)
        assert x.dtype.itemsize == w.dtype.itemsize == 1
        if eqn.params["problem"].residual_dtype:
            assert np.dtype(eqn.params["problem"].residual_dtype).itemsize == 1
    wide = [e.params["problem"] for e in called if np.dtype(e.params["problem"].out_dtype).itemsize > 1]
    assert [p.out_dtype for p in wide] == ["float32"]  # in front of the head
    assert {a.dtype.name for name, a in frozen().weights.items() if "block" in name and name.endswith("kernel")} == {
        "int8"
    }


# ----------------------------------------------------------------------------------------------------------------------
# Scales


@pytest.mark.parametrize("dtype", ("int8", "uint8", "float8_e4m3fn"))
@pytest.mark.parametrize("tails", ("normal", "outliers", "uniform"))
def test_a_scale_is_the_one_of_the_least_squared_error(dtype, tails):
    """Against the error of the elements themselves, at all steps that are compared."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, 20000) if tails == "uniform" else rng.standard_normal(20000)
    x[:3] *= 40 if tails == "outliers" else 1
    x = np.abs(x) if dtype == "uint8" else x
    histogram = scales.Histogram()
    for part in np.split(x.astype(np.float32), 4):
        histogram.add(*jax.device_get(scales.statistics(jnp.asarray(part))))
    chosen = histogram.scale(dtype)

    def error(step: float) -> float:
        u = x / step
        if dtype.startswith("float8"):
            kept = np.clip(u, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(float)
        else:
            kept = np.clip(np.rint(u), np.iinfo(dtype).min, np.iinfo(dtype).max)
        return float(np.mean((kept - u) ** 2) * step**2)

    steps = np.abs(x).max() / scales.LARGEST[dtype] * scales.CLIPPING
    least = min(map(error, steps))
    assert chosen.dtype == dtype and error(chosen.step) <= 1.03 * least
    if dtype != "float8_e4m3fn" and tails != "normal":
        clips = chosen.step * scales.LARGEST[dtype] < 0.99 * np.abs(x).max()
        assert clips == (tails == "outliers")


def test_scales_of_filters_are_a_channels_own():
    rng = np.random.default_rng(0)
    w = rng.standard_normal((3, 3, 16, 5)).astype(np.float32) * 10.0 ** np.arange(-2, 3)
    w[..., 2] = 0
    w[0, 0, 0, 4] *= 30
    least = np.float32(2e-6)
    q, steps = scales.filter_scales(jnp.asarray(w), 3, "int8", least)
    assert q.dtype == jnp.int8 and np.abs(np.asarray(q, int)).max() == 127
    assert steps[2] == least and not np.asarray(q)[..., 2].any()
    full = np.abs(w).max((0, 1, 2)) / 127
    for k in (0, 1, 3, 4):
        errors = {
            part: np.sum((np.clip(np.rint(w[..., k] / s), -127, 127) * s - w[..., k]) ** 2)
            for part in np.arange(20, 10, -1) / 20
            for s in [np.float32(full[k] * part)]
        }
        off = np.sum((np.asarray(q, float)[..., k] * float(steps[k]) - w[..., k]) ** 2)
        assert off <= 1.001 * min(errors.values())
    first = scales.filter_scales(jnp.asarray(np.moveaxis(w, 3, 0)), 0, "int8", least)
    np.testing.assert_array_equal(first[1], steps)


def test_what_is_never_negative_is_unsigned():
    layers = {layer.name.rpartition("/")[2]: layer for layer in frozen().quantization}
    assert layers["block0_conv1"].dtype == "uint8" and layers["block0_conv1"].out_dtype == "uint8"
    assert layers["hidden"].dtype == "uint8"  # the mean of a relu's result
    assert all(layer.dtype != "uint8" for layer in frozen("float8_e4m3fn").quantization)


def test_what_a_relu_is_returned_with_is_signed():
    """Of a function with its own derivative each result has its own sign."""

    @jax.custom_jvp
    def both(x):
        return jax.nn.relu(x), x - 0.0

    both.defjvp(lambda primals, tangents: (both(*primals), both(*tangents)))
    rng = np.random.default_rng(0)
    filters = [rng.standard_normal((3, 3, 16, 16), np.float32) / 12 for _ in range(3)]
    filters[0] = np.abs(filters[0])

    def f(filters, x):
        def conv(x, w):
            return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

        for w in filters[:-1]:
            x = both(conv(x, w))[1]
        return conv(x, filters[-1])

    x = np.abs(rng.standard_normal((2, 8, 8, 16), np.float32))
    predict = jaxconv.freeze(f, filters, quantize="int8", calibrate=[x])
    assert [layer.dtype for layer in predict.quantization if layer.dtype == "uint8"] == []
    wide = f(filters, -x)
    assert np.abs(predict(-x) - wide).max() < 0.1 * np.abs(wide).max()


def test_what_is_positive_by_chance_is_signed():
    """On the batches alone: other images may have negative numbers there."""
    weights = [np.abs(w) for w in _chain_weights()]

    def f(weights: Any, x: Any) -> Any:
        for w in weights:
            x = _chain([w], x)  # no relu
        return x

    q = jaxconv.freeze(f, weights, quantize="int8", calibrate=[np.abs(X)])
    assert [layer.dtype for layer in q.quantization] == ["float32", "int8", "float32"]
    assert np.asarray(q(-np.abs(X))).min() < 0


@pytest.mark.parametrize("size", (0.0, 1e-30, 1e-12, 1e-7, 1e-3))
def test_a_bias_beside_a_filter_that_is_almost_nothing(size):
    """Where a batch-norm has switched a channel off: the bias stays, and int32 holds it."""
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal((3, 3, c, 16), np.float32) / np.sqrt(9 * c) for c in (3, 16, 16)]
    weights[1][..., ::2] *= size
    biases = [np.zeros(16, np.float32), np.linspace(-2, 5, 16, dtype=np.float32), np.zeros(16, np.float32)]

    def f(arguments: Any, x: Any) -> Any:
        for i, (w, b) in enumerate(zip(*arguments, strict=True)):
            x = _chain([jnp.asarray(w)], x) + b
            x = jax.nn.relu(x) if i < 2 else x
        return x

    arguments = weights, biases
    q = jaxconv.freeze(f, arguments, quantize="int8", calibrate=[X])
    y = np.asarray(q(X))
    assert [layer.narrow for layer in q.quantization] == [False, True, False]
    (bias,) = (a for a in q.weights.values() if a.dtype == jnp.int32)
    assert np.abs(np.asarray(bias, np.int64)).max() <= 2**30
    assert signal_to_noise(f(arguments, X), y) > 35


def _block(p: Any, x: Any) -> Any:
    """A residual block whose shortcut is a filter."""
    x = jax.nn.relu(_chain([p["stem"]], x))
    y = jax.nn.relu(_chain([p["first"]], x) + p["bias"])
    x = jax.nn.relu(_chain([p["second"]], y) + _chain([p["shortcut"]], x))
    return jax.nn.relu(_chain([p["last"]], x)).mean((1, 2)) @ p["head"]


def _block_weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = dict(stem=(3, 3, 3, 32), first=(1, 1, 32, 32), second=(1, 1, 32, 32), shortcut=(1, 1, 32, 32))
    shapes |= dict(last=(3, 3, 32, 32), head=(32, 5))
    weights = {k: rng.standard_normal(s, np.float32) / np.sqrt(np.prod(s[:-1])) for k, s in shapes.items()}
    return {k: w.astype(np.float32) for k, w in weights.items()} | {"bias": np.full(32, 0.4, np.float32)}


@pytest.mark.parametrize("dtype", ("int8", "float8_e4m3fn"))
@pytest.mark.parametrize("zeros", (1, 30))
@pytest.mark.parametrize("name", ("first", "second", "shortcut", "last"))
def test_filters_of_zeros_cost_nothing(name, zeros, dtype):
    """As where a batch-norm's last scale is 0 at first, or channels were pruned: what is added to them, and their
    biases, are as fine as before."""
    weights = _block_weights()
    weights[name][..., :zeros] = 0
    for factor in (1, 100):  # of activations
        given = {**weights, "stem": weights["stem"] * np.float32(factor)}
        q = jaxconv.freeze(_block, given, quantize=dtype, calibrate=BATCHES)
        assert signal_to_noise(_block(given, X), q(X)) > (33 if dtype == "int8" else 24)


@pytest.mark.parametrize("dtype", ("int8", "float8_e4m3fn"))
@pytest.mark.parametrize("size", (1e-30, 1e-36, 1e-38, 1e-42))
def test_a_channel_of_tiny_weights_is_a_number(size, dtype):
    weights = _block_weights()
    weights["first"][..., 0] *= np.float32(size)
    weights["first"][0, 0, 0, 0] = 0
    q = jaxconv.freeze(_block, weights, quantize=dtype, calibrate=BATCHES)
    assert signal_to_noise(_block(weights, X), q(X)) > (33 if dtype == "int8" else 24)


@pytest.mark.parametrize("factor", (1e-25, 1.0, 1e16))
def test_noise_of_activations_of_any_size(factor):
    weights = _block_weights()
    weights["stem"] *= np.float32(factor)
    weights["bias"] *= np.float32(factor)
    q = jaxconv.freeze(_block, weights, quantize="int8", calibrate=[X])
    assert 33 < q.quantization[-1].signal_to_noise < 50
    assert q.quantization[-1].signal_to_noise == pytest.approx(signal_to_noise(_block(weights, X), q(X)), abs=0.5)
    nan = jaxconv.freeze(_block, weights, quantize="int8", calibrate=[X]).quantization
    nan[1] = dataclasses.replace(nan[1], signal_to_noise=np.nan)
    assert "nan dB" in str(nan)


def test_layers_in_loops_and_branches_have_their_own_types():
    rng = np.random.default_rng(0)
    p = {k: rng.standard_normal((32, n), np.float32) / 6 for k, n in (("a", 32), ("b", 32), ("c", 32), ("d", 5))}

    def f(p: Any, x: Any) -> Any:
        x = jax.nn.relu(jax.nn.relu(x @ p["a"]) @ p["b"])
        x = lax.fori_loop(0, 2, lambda i, y: jax.nn.relu(y @ p["c"]), x)
        x = lax.cond(x.sum() > 0, lambda x: x @ p["c"], lambda x: x, x)
        return x @ p["d"]

    q = jaxconv.freeze(f, p, quantize="int8", calibrate=[rng.standard_normal((8, 32), np.float32)])
    inside = [layer for layer in q.quantization if layer.why.startswith("it is inside")]
    assert len(inside) == 2
    assert all((layer.dtype, layer.out_dtype) == ("float32", "float32") for layer in inside)
    assert all(30 < layer.signal_to_noise < 60 for layer in inside)


@pytest.mark.parametrize("step", (0.0, -1.0, np.inf, np.nan, 1e-50, 1e39))
def test_a_scale_is_a_positive_finite_number(step):
    with pytest.raises(ValueError, match=r"freeze: a scale is .*, expected a positive finite number of float32"):
        scales.Scale("int8", step)


# ----------------------------------------------------------------------------------------------------------------------
# Which layers


def test_the_table_says_of_each_layer_what_it_is_and_why():
    table = frozen().quantization
    layers = {layer.name: layer for layer in table}
    assert table[0].name == "Net/conv_init" and table[0].why == "the first layer: it reads the inputs"
    assert layers["Net/head"].why == "the last layer: it makes the results"
    assert layers["Net/head"].weight == "params/head/kernel"
    assert [layer.narrow for layer in table] == [False, *[True] * 9, False]
    assert layers["Net/conv_init"].signal_to_noise == np.inf
    assert all(25 < layer.signal_to_noise < 60 for layer in table[1:])
    assert len(str(table).splitlines()) == len(table) + 2
    assert "int8: 9 of 11 layers have 8 bits" in str(table)
    assert "quantised to int8: 9 of 11 layers have 8 bits" in str(frozen().report(X))
    assert frozen(None).quantization is None


@pytest.mark.parametrize(
    "name, wide",
    (("block0_conv1", 1), pytest.param("params/block1_shortcut/kernel", 1, marks=pytest.mark.slow), ("Net", 11)),
)
def test_layers_that_are_named_stay_wide(name, wide):
    table = frozen(wide=(name,)).quantization
    assert sum(layer.why == "wide= names it" for layer in table) == wide


class Others(nn.Module):
    """Layers that stay wide, one a name."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.relu(nn.Conv(32, (3, 3), name="first")(x))
        x = nn.relu(nn.Conv(32, (3, 3), feature_group_count=32, name="depthwise")(x))
        x = nn.relu(nn.Conv(32, (1, 1), feature_group_count=4, name="few")(x))
        x = nn.relu(nn.Conv(32, (1, 1), feature_group_count=2, name="groups")(x))
        gates = nn.sigmoid(nn.Conv(32, (1, 1), name="gate")(x.mean((1, 2), keepdims=True)))
        x = nn.relu(nn.ConvTranspose(32, (2, 2), strides=(2, 2), name="up")(x * gates))
        x = jnp.concatenate([x, nn.silu(nn.Conv(16, (3, 3), name="branch")(x))], -1)
        return nn.Conv(8, (3, 3), name="last")(nn.relu(nn.Conv(16, (1, 1), name="joined")(x)))


def test_which_layers_stay_wide():
    model = Others()
    variables = randomised(jax.eval_shape(model.init, KEY, X))
    q = jaxconv.freeze(model.apply, variables, quantize="int8", calibrate=[X])
    why = {layer.name.removeprefix("Others/"): layer.why for layer in q.quantization if not layer.narrow}
    assert why == {
        "first": "the first layer: it reads the inputs",
        "depthwise": "it is depthwise: it has no matrix products, which tensor cores need",
        "few": "8-bit products need multiples of 16 channels a group, and it has 8 and 8",
        "groups": "8-bit products need groups of a multiple of 128 channels, and its groups have 16",
        "gate": "its images have one pixel",
        "up": "it is transposed",
        "last": "the last layer: it makes the results",
    }
    assert LEAST["int8"] < signal_to_noise(jaxconv.freeze(model.apply, variables)(X), q(X)) < 60


class PreActivation(nn.Module):
    """Norms that stand in front of convolutions, and read what is added up: they cannot be folded."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Conv(16, (3, 3), name="first")(x)
        for i in range(2):
            y = nn.relu(nn.BatchNorm(use_running_average=True)(x))
            x = x + nn.Conv(16, (3, 3), name=f"conv{i}")(y)
        return nn.Conv(4, (1, 1), name="last")(x)


def test_norms_between_8_bit_convolutions_are_plain_arithmetic():
    """For XLA to fuse with the conversions around: no call that reads or writes wide arrays."""
    model = PreActivation()
    variables = randomised(jax.eval_shape(model.init, KEY, X))
    q = jaxconv.freeze(model.apply, variables, quantize="int8", calibrate=[X])
    assert [layer.out_dtype for layer in q.quantization] == ["float32", "int8", "float32", "float32"]
    jaxpr = jax.make_jaxpr(q)(X)
    assert not [e for e in primitives.equations(jaxpr.jaxpr) if "batchnorm" in e.primitive.name]
    assert LEAST["int8"] < signal_to_noise(jaxconv.freeze(model.apply, variables)(X), q(X)) < 60


def test_layers_in_a_loop_stay_wide():
    rng = np.random.default_rng(0)
    weights = [0.2 * rng.standard_normal((3, 3, 3, 16)), 0.1 * rng.standard_normal((2, 3, 3, 16, 16))]

    def f(weights: Any, x: Any) -> Any:
        first, others = (jnp.asarray(w, jnp.float32) for w in weights)
        x = jax.nn.relu(_chain([first], x))
        return lax.scan(lambda x, w: (jax.nn.relu(_chain([w], x @ w[1, 1])), None), x, others)[0]

    q = jaxconv.freeze(f, weights, quantize="int8", calibrate=[X])
    assert [(layer.what, layer.filter, layer.why) for layer in q.quantization] == [
        ("conv", (3, 3, 3, 16), "the first layer: it reads the inputs"),
        ("dense", (16, 16), "it is inside scan"),
        ("conv", (3, 3, 16, 16), "it is inside scan"),
    ]
    np.testing.assert_allclose(q(X), jaxconv.freeze(f, weights)(X), rtol=1e-5, atol=1e-5)


# ----------------------------------------------------------------------------------------------------------------------
# Dense layers


def _mlp(weights: Any, x: Any) -> Any:
    """Between a first and a last layer: two with a bias and a relu, and a product alone. And what the first makes."""
    (w0, b0), (w1, b1), (w2, b2), w3, (w4, b4) = weights
    first = jax.nn.relu(x.reshape(x.shape[0], -1) @ w0 + b0)
    x = jax.nn.relu(first @ w1 + b1)
    product = jax.nn.relu(x @ w2 + b2) @ w3
    return {"first": first, "product": product, "logits": jnp.sin(product) @ w4 + b4}


def _mlp_weights() -> Any:
    rng = np.random.default_rng(0)
    sizes = (PIXELS * PIXELS * 3, 64, 48, 96, 32, 10)
    layers: list[Any] = [
        (rng.standard_normal((k, n)) / np.sqrt(k), 0.1 * rng.standard_normal(n)) for k, n in itertools.pairwise(sizes)
    ]
    layers[3] = layers[3][0]
    return jax.tree.map(np.float32, layers)


def expected_product(q: jaxconv.Frozen, first: Any) -> np.ndarray:
    """_mlp's `product` from its `first` on, with the function's weights and scales."""
    narrow = [layer for layer in q.quantization if layer.narrow]
    assert [layer.what for layer in narrow] == ["dense"] * 3
    points = q.quantization.scales
    assert [scale.dtype for scale in points] == ["uint8"] * 3
    x = narrowed(jnp.asarray(first) * points[0].inverse, points[0])
    for layer, out, bias in zip(narrow, (*points[1:], None), ("1/1", "2/1", None), strict=True):
        w, steps = (np.asarray(q.weights[layer.weight + end]) for end in ("", "_scale"))
        total = np.asarray(x, np.int64) @ w.astype(np.int64)
        assert w.dtype == np.int8
        y = (total + (np.asarray(q.weights[bias]) if bias else 0)).astype(np.float32) * steps
        x = y if out is None else narrowed(jnp.maximum(y, 0), out)
    return x


def test_dense_layers_are_the_arithmetic_that_jnp_has_bit_for_bit():
    """And after replace, exported, and mapped."""
    weights = _mlp_weights()
    q = jaxconv.freeze(_mlp, weights, quantize="int8", calibrate=BATCHES)
    assert [layer.narrow for layer in q.quantization] == [False, True, True, True, False]
    y = q(X)
    np.testing.assert_array_equal(y["product"], expected_product(q, y["first"]))
    assert LEAST["int8"] < signal_to_noise(jaxconv.freeze(_mlp, weights)(X)["logits"], y["logits"]) < 60

    newer = q.replace(jax.tree.map(lambda a: 1.25 * a, weights))
    again = newer(X)
    np.testing.assert_array_equal(again["product"], expected_product(newer, again["first"]))

    n = export.symbolic_shape("n")[0]
    shape = jax.ShapeDtypeStruct((n, PIXELS, PIXELS, 3), jnp.float32)
    exported = export.export(jax.jit(lambda x: q(x)["product"]), disabled_checks=jaxconv.export_checks())(shape)
    np.testing.assert_array_equal(export.deserialize(exported.serialize()).call(X), y["product"])
    mapped = jax.vmap(lambda x: q(x)["product"])(X[:, None])
    np.testing.assert_array_equal(mapped[:, 0], y["product"])


def test_a_dense_layer_whose_preactivation_is_read_stays_wide():
    def f(weights: Any, x: Any) -> Any:
        (w0, b0), (w1, b1), (w2, b2), *_ = weights
        z = jax.nn.relu(x.reshape(x.shape[0], -1) @ w0 + b0) @ w1 + b1
        return (jax.nn.gelu(z) @ w2 + b2).sum() + z.sum()

    weights = _mlp_weights()
    q = jaxconv.freeze(f, weights, quantize="int8", calibrate=BATCHES)
    assert [layer.why for layer in q.quantization][
        1
    ] == "another operation also reads its result in front of the activation"
    np.testing.assert_allclose(q(X), f(weights, X), rtol=1e-5)


class Blocks(nn.Module):
    """A ConvNeXt's block, a mixer's, and an attention."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Conv(32, (2, 2), strides=2, name="stem")(x)
        y = nn.LayerNorm()(nn.Conv(32, (3, 3), feature_group_count=32, name="depthwise")(x))
        y = nn.Dense(32, name="down")(nn.gelu(nn.Dense(128, name="up")(y)))
        x = (x + y * self.param("layer_scale", nn.initializers.constant(0.5), (32,))).reshape(x.shape[0], 16, 32)
        y = nn.gelu(nn.Dense(48, name="pixels1")(nn.LayerNorm()(x).swapaxes(1, 2)))
        x = x + nn.Dense(16, name="pixels2", use_bias=False)(y).swapaxes(1, 2)
        x = x + nn.MultiHeadDotProductAttention(2, name="attention")(nn.LayerNorm()(x))
        return nn.Dense(10, name="head", use_bias=False)(nn.LayerNorm()(x).mean(1))


@pytest.mark.parametrize("dtype", ("int8", "float8_e4m3fn"))
def test_dense_layers_of_blocks(dtype):
    """They read 8 bits and, where an 8-bit layer follows, make them. What is added up along the blocks stays wide."""
    model = Blocks()
    variables = randomised(jax.eval_shape(model.init, KEY, X))
    q = jaxconv.freeze(model.apply, variables, quantize=dtype, calibrate=[X])
    layers = {layer.name.removeprefix("Blocks/"): layer for layer in q.quantization}
    types = {name: (layer.dtype, layer.out_dtype) for name, layer in layers.items() if layer.narrow}
    assert types == {
        **{"up": (dtype, dtype), "down": (dtype, "float32"), "pixels1": (dtype, dtype), "pixels2": (dtype, "float32")},
        **{f"attention/{name}": (dtype, "float32") for name in ("query", "key", "value", "out")},
    }
    why = {name.removeprefix("attention/"): layer.why for name, layer in layers.items() if not layer.narrow}
    assert why == {
        "stem": "the first layer: it reads the inputs",
        "depthwise": "it is depthwise: it has no matrix products, which tensor cores need",
        "...qhd,...khd->...hqk": "its filter follows from the inputs",
        "...hqk,...khd->...qhd": "its filter follows from the inputs",
        "head": "the last layer: it makes the results",
    }
    assert LEAST[dtype] < signal_to_noise(jaxconv.freeze(model.apply, variables)(X), q(X)) < 60
    wide = jaxconv.freeze(model.apply, variables, quantize=dtype, calibrate=[X], wide=("up", "attention"))
    named = [layer.name for layer in wide.quantization if layer.why == "wide= names it"]
    assert len(named) == 7 and len(wide.quantization.narrow) == 3


class Averages(nn.Module):
    """Averages of windows, and of all pixels, between layers."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.relu(nn.Conv(16, (3, 3), name="first")(x))
        x = nn.relu(nn.Conv(32, (1, 1), name="before")(x))
        x = nn.relu(nn.Conv(32, (3, 3), name="between")(nn.avg_pool(x, (2, 2), (2, 2))))
        x = nn.relu(nn.Dense(32, name="hidden")(x.mean((1, 2))))
        return nn.Dense(10, name="last")(x)


def test_averages_read_and_make_8_bits():
    model = Averages()
    variables = randomised(jax.eval_shape(model.init, KEY, X))
    q = jaxconv.freeze(model.apply, variables, quantize="int8", calibrate=[X])
    types = [(layer.dtype, layer.out_dtype) for layer in q.quantization if layer.narrow]
    assert types == [("uint8", "uint8"), ("uint8", "uint8"), ("uint8", "float32")]
    assert LEAST["int8"] < signal_to_noise(jaxconv.freeze(model.apply, variables)(X), q(X)) < 60


class Branches(nn.Module):
    """Two convolutions whose results are added: one of `taps`, and one of a tap."""

    taps: int = 1
    channels: int = 16
    groups: int = 1
    padding: Any = "SAME"
    middle: Callable[[Any], Any] = lambda y: y  # behind the first one
    signed: bool = False  # what the second one reads
    shown: bool = False
    swapped: bool = False

    @nn.compact
    def __call__(self, x: Any) -> Any:
        first = nn.Conv(self.channels, (3, 3), name="first")(x)
        x = nn.relu(first)
        pad = ((self.taps // 2,) * 2,) * 2
        y = nn.Conv(32, (self.taps,) * 2, padding=pad, feature_group_count=self.groups, name="conv")(x)
        y = self.middle(y)
        z = nn.Conv(32, (1, 1), padding=self.padding, name="shortcut")(first if self.signed else x)
        out = nn.relu(z + y if self.swapped else y + z)
        out = nn.Dense(10, name="last")(out.mean((1, 2)))
        return (out, y) if self.shown else out


@pytest.mark.parametrize(
    ("block", "added"),
    (
        (Branches(), "conv"),
        (Branches(swapped=True), "conv"),
        (Branches(taps=3, channels=80), "conv"),  # the 1x1 is the shortcut, and adds
        (Branches(taps=3), None),  # 3x3 of few channels has a kernel of its own
        (Branches(middle=nn.relu), None),
        (Branches(channels=256, groups=2), None),
        (Branches(shown=True), None),
        (Branches(signed=True), None),  # int8 beside uint8
    ),
    ids=str,
)
def test_which_convolutions_are_shortcuts(block, added):
    variables = randomised(jax.eval_shape(block.init, KEY, X))
    q = jaxconv.freeze(block.apply, variables, quantize="int8", calibrate=[X])
    layers = {layer.name.rpartition("/")[2]: layer for layer in q.quantization}
    assert [name for name, layer in layers.items() if "its sums are added" in layer.why] == [added] * bool(added)
    jaxpr = jax.make_jaxpr(q)(X)
    called = [e for e in primitives.equations(jaxpr.jaxpr) if e.primitive.name == "jaxconv_conv_scaled"]
    assert [e.params["problem"].has_shortcut for e in called] == ([True] if added else [False, False])
    if added:
        assert layers["conv"].out_dtype == "int32" and layers["shortcut"].out_dtype == "uint8"
        assert called[0].params["problem"].filter == (block.taps, block.taps)
    wide, ours = (jax.tree.leaves(f(X))[0] for f in (jaxconv.freeze(block.apply, variables), q))
    assert LEAST["int8"] < signal_to_noise(wide, ours) < 60


@pytest.mark.parametrize("dtype", ("int8", "uint8"))
@pytest.mark.parametrize(
    ("shape", "axes"),
    (
        ((3, 7, 7, 16), (1, 2)),
        ((2, 257, 8), (1,)),
        ((2, 258, 8), (1,)),  # four sums of bytes do not fit 64 bits
        ((2, 5, 6), (1,)),  # channels that are no fours
        ((2, 8, 9), (0, 2)),
        ((4, 4, 4), (0,)),
    ),
)
def test_sums_of_8_bit_integers_are_exact(dtype, shape, axes):
    info = np.iinfo(dtype)
    drawn = np.random.default_rng(1).integers(info.min, info.max, shape, endpoint=True).astype(dtype)
    for q in (drawn, np.full(shape, info.max, dtype), np.full(shape, info.min, dtype)):
        sums = jax.jit(lambda q: scales.summed(q, axes))(q)
        assert sums.dtype == jnp.int32
        np.testing.assert_array_equal(sums, q.astype(np.int64).sum(axes))


class Summed(nn.Module):
    """A layer whose result is read by `read`, and by no other layer."""

    read: Callable[[Any], Any]

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.relu(nn.Conv(16, (3, 3), name="first")(x))
        x = nn.relu(nn.Conv(32, (1, 1), name="middle")(x))
        return nn.Dense(10, name="last")(self.read(x))


@pytest.mark.parametrize(
    "read, narrow",
    (
        (lambda x: x.mean((1, 2)), True),
        (lambda x: x.astype(jnp.float32).sum((1, 2)), True),
        (lambda x: nn.max_pool(x, (2, 2), (2, 2)).mean((1, 2)), True),
        (lambda x: x[:, :3, :3].mean((1, 2)), True),
        (lambda x: x.reshape(x.shape[0], -1, x.shape[-1]).mean(1), True),
        (lambda x: x.sum(1).reshape(x.shape[0], -1), False),  # a sum over rows alone
        (lambda x: x.mean((1, 2)) + x[:, 0, 0], False),  # read as it is too
        (lambda x: (x * x).mean((1, 2)), False),  # not the sum of it
        (lambda x: x.sum((1, 2)) + x.max((1, 2)), False),
        (lambda x: x.reshape(x.shape[0], -1), False),  # no sum
    ),
)
def test_what_sums_over_pixels_alone_read_has_8_bits(read, narrow):
    model = Summed(read)
    variables = randomised(jax.eval_shape(model.init, KEY, X))
    q = jaxconv.freeze(model.apply, variables, quantize="int8", calibrate=[X])
    types = {layer.name: layer.out_dtype for layer in q.quantization if layer.narrow}
    assert types == {"Summed/middle": "uint8" if narrow else "float32"}
    assert LEAST["int8"] < signal_to_noise(jaxconv.freeze(model.apply, variables)(X), q(X)) < 60


def test_a_last_mean_of_other_images_and_of_a_symbolic_batch():
    """Whether it reads 8 bits does not depend on extents: the scales stay those of the calibration."""
    model = Summed(lambda x: x.mean((1, 2)))
    variables = randomised(jax.eval_shape(model.init, KEY, X))
    q = jaxconv.freeze(model.apply, variables, quantize="int8", calibrate=[X])
    wide = jaxconv.freeze(model.apply, variables)
    for pixels in (3, 1, 20):
        x = np.random.default_rng(pixels).standard_normal((2, pixels, pixels, 3)).astype(np.float32)
        assert LEAST["int8"] < signal_to_noise(wide(x), q(x))
    (b,) = export.symbolic_shape("b")
    shape = jax.ShapeDtypeStruct((b, *X.shape[1:]), np.float32)
    exported = export.export(jax.jit(q), disabled_checks=jaxconv.export_checks())(shape)
    np.testing.assert_allclose(exported.call(X), q(X), rtol=1e-5, atol=1e-6)


class Inverted(nn.Module):
    """A MobileNetV2's blocks."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        norm = functools.partial(nn.BatchNorm, use_running_average=True)
        x = nn.relu6(norm()(nn.Conv(16, (3, 3), name="first")(x)))
        for i in range(2):
            y = nn.relu6(norm()(nn.Conv(48, (1, 1), use_bias=False, name=f"expand{i}")(x)))
            y = nn.relu6(norm()(nn.Conv(48, (3, 3), use_bias=False, feature_group_count=48, name=f"depth{i}")(y)))
            x = x + norm()(nn.Conv(16, (1, 1), use_bias=False, name=f"project{i}")(y))
        return nn.Dense(10, name="last")(x.mean((1, 2)))


def test_what_leaves_8_bits_in_a_mobilenet(monkeypatch):
    """Depthwise convolutions, and what they read and make; shortcuts do not. Here nobody asks what a layer gains."""
    monkeypatch.setattr(calibrate, "leave_wide_what_loses", lambda reading: None)
    model = Inverted()
    variables = randomised(jax.eval_shape(model.init, KEY, X))
    q = jaxconv.freeze(model.apply, variables, quantize="int8", calibrate=[X])
    types = {layer.name.removeprefix("Inverted/"): (layer.dtype, layer.out_dtype) for layer in q.quantization}
    assert types == {
        "first": ("float32", "float32"),
        **{"expand0": ("uint8", "float32"), "depth0": ("float32", "float32"), "project0": ("uint8", "int8")},
        **{"expand1": ("int8", "float32"), "depth1": ("float32", "float32"), "project1": ("uint8", "int8")},
        "last": ("float32", "float32"),
    }
    jaxpr = jax.make_jaxpr(q)(X)
    called = [e for e in primitives.equations(jaxpr.jaxpr) if e.primitive.name == "jaxconv_conv_scaled"]
    assert [e.params["problem"].residual_dtype for e in called] == [None, "uint8", None, "int8"]
    assert LEAST["int8"] < signal_to_noise(jaxconv.freeze(model.apply, variables)(X), q(X)) < 60


BEHIND = "8 bits would cost a pass over its input, behind a depthwise convolution, and gain less"


class Separable(nn.Module):
    """A depthwise convolution, and layers behind it."""

    layers: tuple[int, ...]  # their channels
    averaged: bool  # whether the last one's result is read for its mean alone, so that it has 8 bits

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.relu(nn.Conv(32, (3, 3), name="first")(x))
        x = nn.relu(nn.Conv(32, (3, 3), feature_group_count=32, name="depthwise")(x))
        for i, channels in enumerate(self.layers):
            x = nn.relu(nn.Conv(channels, (1, 1), name=f"conv{i}")(x))
        return nn.Dense(10, name="last")(x.mean((1, 2))) if self.averaged else nn.Conv(10, (3, 3), name="last")(x)


# In bytes an element of float32 that a layer reads: the pass 5, the layer 4 and 4 for each element that it writes, or
# in 8 bits 1 and 1.
@pytest.mark.parametrize(
    "layers, averaged, narrow",
    (
        ((16,), True, ()),  # 5 + 1.5 against 6
        ((64,), True, (0,)),  # 5 + 3 against 12
        ((64,), False, ()),  # 5 + 9 against 12: what it makes is read wide
        ((16, 16), False, ()),  # the second one reads what a wide one makes: 5 + 5 against 8
        ((16, 64), True, (1,)),  # 5 + 5 against 20
        ((64, 16), True, (0, 1)),  # the second one reads 8 bits without a pass
    ),
)
def test_a_layer_behind_a_depthwise_convolution_has_8_bits_where_it_gains(layers, averaged, narrow):
    model = Separable(layers, averaged)
    variables = randomised(jax.eval_shape(model.init, KEY, X))
    q = jaxconv.freeze(model.apply, variables, quantize="int8", calibrate=[X])
    found = {layer.name.removeprefix("Separable/"): layer for layer in q.quantization}
    assert {i for i in range(len(layers)) if found[f"conv{i}"].narrow} == set(narrow)
    assert all(found[f"conv{i}"].why == BEHIND for i in range(len(layers)) if i not in narrow)
    wide = jaxconv.freeze(model.apply, variables)(X)
    if narrow:
        assert LEAST["int8"] < signal_to_noise(wide, q(X)) < 60
    else:
        np.testing.assert_array_equal(wide, q(X))
    assert q(np.concatenate([X, X], 1)).shape[0] == len(X)  # the choice is that of the calibration


@pytest.mark.parametrize("taps, narrow", ((1, 0), (3, 1)))
def test_products_are_worth_a_pass(taps, narrow):
    """16 bits, 128 channels: 128 products an element take less time than the bytes, 1,152 more."""

    def f(variables, x):
        for name, groups in (("first", 1), ("depthwise", 128), ("layer", 1), ("last", 1)):
            x = jaxconv.conv2d(x, variables[name], padding="SAME", groups=groups, activation="relu")
        return x

    rng = np.random.default_rng(4)
    shapes = {"first": (3, 3, 3, 128), "depthwise": (3, 3, 1, 128)}
    shapes |= {"layer": (taps, taps, 128, 128), "last": (1, 1, 128, 8)}
    variables = {name: jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for name, shape in shapes.items()}
    for count in (1, 3):  # whatever the batch
        batch = jnp.asarray(rng.standard_normal((count, 6, 6, 3)), jnp.bfloat16)
        table = jaxconv.freeze(f, variables, quantize="int8", calibrate=[batch]).quantization
        assert sum(layer.narrow for layer in table) == narrow


def test_layers_that_share_a_pass_gain_together():
    """Several layers read what a depthwise convolution makes: the pass is each one's in part."""

    def f(variables, x):
        x = jaxconv.conv2d(x, variables["first"], padding="SAME")
        x = jaxconv.conv2d(x, variables["depthwise"], padding="SAME", groups=32, activation="relu")
        made = [jaxconv.conv2d(x, w).mean((1, 2)) for w in variables["layers"]]
        return jnp.concatenate(made, -1) @ variables["last"]

    rng = np.random.default_rng(3)

    def narrow(count):
        shapes = [(3, 3, 3, 32), (3, 3, 1, 32), (1, 1, 32, 16), (count * 16, 10)]
        first, depthwise, w, last = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
        variables = {"first": first, "depthwise": depthwise, "layers": [w] * count, "last": last}
        table = jaxconv.freeze(f, variables, quantize="int8", calibrate=[X]).quantization
        return sum(layer.narrow for layer in table)

    assert [narrow(count) for count in (1, 2, 4)] == [0, 2, 4]


# ----------------------------------------------------------------------------------------------------------------------
# A frozen function like any other


def test_other_shapes_have_the_same_scales():
    q, other = frozen(), images(5, 2)
    few, more = (q(images)["logits"] for images in (other, np.concatenate([other, X])))
    # With other scales numbers of 8 bits would be others. A GPU may add up the last layer's float32 products in another
    # order for more rows: an ulp of a sum, where a step of 8 bits is 2^-8 of its terms.
    np.testing.assert_allclose(few, more[:2], rtol=0, atol=2.0**-20 * np.abs(few).max())
    assert len(q.weights) == 27  # the same ones
    larger = np.concatenate([other, other], 1)
    assert q(larger)["stem"].shape == (2, 16, 8, 16)


def test_replace_quantises_filters_anew():
    _, variables = net()
    newer = jax.tree.map(lambda a: 1.25 * a, variables)
    q = frozen().replace(newer)
    assert q.quantization is frozen().quantization
    y = q(X)
    np.testing.assert_array_equal(y["last"], expected_last(q, y["stem"]))
    name = "params/block0_conv1/kernel_scale"
    frozen()(X)  # its scales are made in the first call
    assert not np.array_equal(q.weights[name], frozen().weights[name])
    broken = jax.tree.map(lambda a: a * np.nan, variables)
    with pytest.raises(ValueError, match=r"freeze: weight params/\S+ has NaN or infinity, expected finite numbers"):
        frozen().replace(broken)(X)


def test_pickled_and_copied_with_its_scales():
    q = jaxconv.freeze(_chain, _chain_weights(), quantize="int8", calibrate=[X])
    again = pickle.loads(pickle.dumps(q))
    np.testing.assert_array_equal(again(X), q(X))
    assert again.quantization.scales == q.quantization.scales and list(again.quantization) == list(q.quantization)


def _chain(weights: Any, x: Any) -> Any:
    for i, w in enumerate(weights):
        x = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.nn.relu(x) if i < len(weights) - 1 else x
    return x


def _chain_weights() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    sizes = (3, 16, 16, 4)
    return [0.2 * rng.standard_normal((3, 3, c, k)).astype(np.float32) for c, k in itertools.pairwise(sizes)]


def test_transforms_and_apply():
    q = frozen()
    y = q(X)["logits"]
    # The head is a product of float32, for which XLA may choose another kernel of a GPU.
    np.testing.assert_allclose(jax.jit(lambda x: q(x)["logits"])(X), y, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(jax.jit(lambda x: q(x)["last"])(X), q(X)["last"])
    np.testing.assert_allclose(q.apply(q.weights, X)["logits"], y, rtol=1e-5, atol=1e-5)
    stacked = np.stack([X, images(6)])
    mapped = jax.vmap(lambda x: q(x)["logits"])(stacked)
    np.testing.assert_allclose(mapped[0], y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("symbolic", (False, True), ids=("numbers", "symbolic"))
def test_exported_and_loaded(symbolic):
    q = frozen()
    n = export.symbolic_shape("n")[0] if symbolic else 4
    shape = jax.ShapeDtypeStruct((n, PIXELS, PIXELS, 3), jnp.float32)
    exported = export.export(jax.jit(lambda x: q(x)["logits"]), disabled_checks=jaxconv.export_checks())(shape)
    loaded = export.deserialize(exported.serialize())
    np.testing.assert_allclose(loaded.call(X), q(X)["logits"], rtol=1e-5, atol=1e-5)
    assert "i8>" in exported.mlir_module()  # filters are stored in 8 bits


@pytest.mark.skipif(jax.device_count() < 2, reason="it takes two devices")
@pytest.mark.parametrize("kind", ("Auto", pytest.param("Explicit", marks=pytest.mark.slow)))
def test_images_split_over_a_mesh(kind):
    """Calibrated on split images too."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(getattr(jax.sharding.AxisType, kind),), devices=jax.devices()[:2])
    weights = jax.device_put(_chain_weights(), jax.NamedSharding(mesh, jax.P()))
    x = jax.device_put(X, jax.NamedSharding(mesh, jax.P("data")))
    q = jaxconv.freeze(_chain, weights, quantize="int8", calibrate=[x])
    y = q(x)
    assert y.sharding.spec[0] == "data"
    expected = jaxconv.freeze(_chain, _chain_weights(), quantize="int8", calibrate=[X])
    assert [s.dtype for s in q.quantization.scales] == ["uint8"]
    np.testing.assert_allclose(jax.device_get(y), expected(X), rtol=1e-5, atol=1e-5)


def test_disabled_it_is_xlas(monkeypatch):
    monkeypatch.setenv("JAXCONV_DISABLE", "all")
    q = jaxconv.freeze(_chain, _chain_weights(), quantize="int8", calibrate=[X])
    assert len(q.quantization.narrow) == 1
    text = jax.jit(q).lower(X).as_text()
    assert not targets(text) and "xi32>" in text


def test_no_gradient_goes_through_8_bits():
    with pytest.raises(
        TypeError, match="freeze: a function that is quantised to uint8 has no derivative: differentiate"
    ):
        jax.grad(lambda x: frozen()(x)["logits"].sum())(jnp.asarray(X))


def _through(p: Any, x: Any, other: Any) -> Any:
    """Nothing of 16 or 32 bits lies beside what has 8."""
    for name in ("stem", "first", "second"):
        x = jax.nn.relu(_chain([p[name]], x))
    return (x.mean((1, 2)) + other) @ p["head"]


@pytest.mark.parametrize("dtype", ("int8", "float8_e4m3fn"))
def test_no_gradient_is_lost_in_8_bits(dtype):
    weights, other = _block_weights(), np.ones((4, 1), np.float32)
    q = jaxconv.freeze(_through, weights, quantize=dtype, calibrate=[(X, other)])
    both = lambda x: q(x, x.mean((1, 2)).mean(-1, keepdims=True)).sum()  # also beside them  # noqa: E731
    refused = pytest.raises(TypeError, match=r"freeze: a function that is quantised to .* has no derivative")
    for f in (lambda x: q(x, other).sum(), both):
        with refused:
            jax.grad(f)(X)
        with refused:
            jax.jit(jax.grad(f))(X)
        with refused:
            jax.jvp(f, (X,), (X,))
        with refused:
            jax.vmap(jax.grad(f))(np.stack([X, X]))
    with refused:
        jax.grad(lambda w: q.apply(w, X, other).sum(), allow_int=True)(q.weights)
    # Of what goes around them there is one.
    got, expected = (jax.grad(lambda y, f=f: f(X, y).sum())(other) for f in (q, functools.partial(_through, weights)))
    np.testing.assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.parametrize("dtype", ("int8", "float8_e4m3fn"))
@pytest.mark.parametrize("bad", (np.nan, np.inf))
def test_replaced_filters_are_finite(bad, dtype):
    weights = _block_weights()
    q = jaxconv.freeze(_block, weights, quantize=dtype, calibrate=[X])
    for name in ("first", "second", "shortcut", "last", "head"):
        for place in (0, 500, -1):
            broken = {**weights, name: weights[name].copy()}
            broken[name].reshape(-1)[min(place, broken[name].size - 1)] = bad
            with pytest.raises(ValueError, match=r"freeze: weight .* has NaN or infinity, expected finite"):
                q.replace(broken)(X)


# ----------------------------------------------------------------------------------------------------------------------
# Bad input: one sentence each, before anything is computed

NAN = np.where(np.arange(X.size).reshape(X.shape) == 5, np.nan, X)
INFINITE = np.where(np.arange(X.size).reshape(X.shape) == 5, np.inf, X)
BAD = {
    "unknown type": (dict(quantize="int4", calibrate=[X]), "quantize='int4' is unknown, expected one of int8, float8"),
    "a type": (dict(quantize=jnp.int8, calibrate=[X]), "is unknown, expected one of int8, float8_e4m3fn"),
    "nothing to calibrate": (dict(quantize="int8"), "was given without calibrate, expected batches of inputs"),
    "nothing to quantise": (dict(calibrate=[X]), "calibrate was given without quantize, expected quantize= with it"),
    "an array to quantise": (dict(calibrate=X), "calibrate was given without quantize, expected quantize= with it"),
    "wide is None": (
        dict(quantize="int8", calibrate=[X], wide=None),
        "wide=None, expected a sequence of layers' names",
    ),
    "wide alone": (dict(wide=("a",)), "wide was given without quantize, expected quantize= with it"),
    "wide as text": (dict(quantize="int8", calibrate=[X], wide="a"), "wide='a', expected a sequence of layers' names"),
    "no batches": (dict(quantize="int8", calibrate=[]), "calibrate has no batches, expected at least one"),
    "an array": (dict(quantize="int8", calibrate=X), r"calibrate is an array \[4, 8, 8, 3\], expected an iterable of"),
    "a dict": (dict(quantize="int8", calibrate={"x": X}), "calibrate is a dict, expected an iterable of batches"),
    "a number": (dict(quantize="int8", calibrate=3), "calibrate is a int, expected an iterable of batches"),
    "NaN": (dict(quantize="int8", calibrate=[X, NAN]), "calibration batch 1 has NaN or infinity, expected finite"),
    "infinity": (dict(quantize="int8", calibrate=[INFINITE]), "calibration batch 0 has NaN or infinity, expected"),
    "too large": (dict(quantize="int8", calibrate=[X * np.float64(1e300)]), "batch 0 has NaN or infinity, expected"),
    "a number that is none": (
        dict(quantize="int8", calibrate=[(X, float("nan"))]),
        r"calibration batch 0 \[1\] has NaN or infinity, expected",
    ),
    "lists": (
        dict(quantize="int8", calibrate=[X.tolist()]),
        r"does not take the calibration batches \((-?\d[^,]*, ){7}-?\d\S* and 760 others\): ",
    ),
    "no images": (
        dict(quantize="int8", calibrate=[X[:0]]),
        r"batch 0 has the shape \(0, 8, 8, 3\), expected no extent",
    ),
    "other pixels": (
        dict(quantize="int8", calibrate=[X, X[:, :4]]),
        r"batch 1 differs from the first one: it is float32\[N, 4, 8, 3\], expected float32\[N, 8, 8, 3\]",
    ),
    "another type": (
        dict(quantize="int8", calibrate=[X, X.astype(np.float16)]),
        r"batch 1 differs from the first one: it is float16\[N, 8, 8, 3\], expected float32\[N, 8, 8, 3\]",
    ),
    "another structure": (
        dict(quantize="int8", calibrate=[X, (X, X)]),
        r"batch 1 differs from the first one: \[0\] is float32\[N, 8, 8, 3\], expected nothing there",
    ),
    "another kind of number": (
        dict(quantize="int8", calibrate=[(X, 1), (X, 1.0)]),
        r"batch 1 differs from the first one: \[1\] is a Python float, expected a Python int",
    ),
    "another static value": (
        dict(quantize="int8", calibrate=[(X, True), (X, False)]),
        r"batch 1 differs from the first one: \[1\] is False, expected True",
    ),
    "a number that is NaN": (
        dict(quantize="int8", calibrate=[(X, 1.0), (X, float("nan"))]),
        r"calibration batch 1 \[1\] has NaN or infinity, expected finite numbers",
    ),
    "a number that does not fit": (
        dict(quantize="int8", calibrate=[(X, 2**40)]),
        r"freeze: the function does not take the calibration batches \(.*, 1099511627776\): .*too large",
    ),
    "no numbers": (
        dict(quantize="int8", calibrate=[jax.ShapeDtypeStruct(X.shape, X.dtype)]),
        "calibration batch 0 is a ShapeDtypeStruct, expected an array with numbers",
    ),
    "what the function does not take": (
        dict(quantize="int8", calibrate=[X[..., :2]]),
        r"freeze: the function does not take the calibration batches \(.*float32\[N, 8, 8, 2\].*\): ",
    ),
    "a name": (
        dict(quantize="int8", calibrate=[X], wide=("conv9",)),
        "wide got 'conv9', but no layer has that name, expected some of ",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_a_sentence_before_anything_is_computed(case, monkeypatch):
    options, message = BAD[case]
    monkeypatch.setattr(calibrate, "observed", lambda *given: pytest.fail("something was computed"))
    with pytest.raises((TypeError, ValueError), match=rf"^freeze: .*{message.removeprefix('freeze: ')}"):
        jaxconv.freeze(_chain, _chain_weights(), **options)


def test_what_is_no_inference_is_refused_as_freeze_does():
    model, variables = net()
    apply = functools.partial(model.apply, mutable=["batch_stats"])
    with pytest.raises(ValueError, match="is in training mode"):
        jaxconv.freeze(apply, variables, train=True, quantize="int8", calibrate=[X])


@pytest.mark.parametrize("value", (np.nan, np.inf))
def test_weights_that_are_no_numbers(value):
    weights = _chain_weights()
    weights[1][0, 0, 0, 0] = value
    with pytest.raises(ValueError, match=r"freeze: the weights of layer .* are not finite, expected"):
        jaxconv.freeze(_chain, weights, quantize="int8", calibrate=[X])


def test_activations_that_overflow_are_named():
    weights = [w * s for w, s in zip(_chain_weights(), (1e38, 1, 1), strict=True)]
    with pytest.raises(ValueError, match=r"freeze: layer .* reads or makes NaN or infinity on the calibration batches"):
        jaxconv.freeze(_chain, weights, quantize="int8", calibrate=[X * 10])


def test_inputs_with_other_layers_than_those_that_were_calibrated():
    def f(weights: Any, x: Any) -> Any:
        return _chain(weights[: len(weights) - (x.shape[1] == 4)], x)

    weights = _chain_weights()
    q = jaxconv.freeze(f, weights, quantize="int8", calibrate=[X])
    with pytest.raises(ValueError, match=r"has other layers \(2\) than for the calibration batches \(3\), expected"):
        q(X[:, :4])


class Attention(nn.Module):
    """Two of its products are of activations alone: their extents are the batch's."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Dense(16)(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x))
        return nn.Dense(10)(nn.relu(nn.Dense(32)(x)).mean(1))


def test_attention_of_other_batches_and_lengths():
    model = Attention()
    x = {n: np.random.default_rng(n).standard_normal((n, 6, 8)).astype(np.float32) for n in (1, 3, 4)}
    variables = model.init(KEY, x[1])
    frozen = jaxconv.freeze(model.apply, variables, quantize="int8", calibrate=[x[4], x[3]])
    assert frozen.quantization.narrow
    products = [layer for layer in frozen.quantization if not layer.weight]
    assert [len(layer.filter) for layer in products] == [4, 4]
    for a in (x[4], x[1], x[4][:, :5]):
        wanted = model.apply(variables, a)
        assert np.abs(frozen(a) - wanted).max() <= 0.05 * np.abs(wanted).max()
    n = export.symbolic_shape("n")[0]
    checks = jaxconv.export_checks()
    exported = export.export(jax.jit(frozen), disabled_checks=checks)(jax.ShapeDtypeStruct((n, 6, 8), jnp.float32))
    np.testing.assert_allclose(exported.call(x[3]), frozen(x[3]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("quantize", "type_"), [("int8", "i8"), ("float8_e4m3fn", "f8E4M3FN")])
def test_what_xlas_8_bit_products_read_lies_in_memory(quantize, type_):
    """Row after row. On a GPU an operand that the product's kernel read transposed made wrong int8 answers."""
    model, x = Attention(), np.ones((1, 6, 8), np.float32)
    variables = model.init(KEY, x)
    frozen = jaxconv.freeze(
        model.apply,
        variables,
        quantize=quantize,
        calibrate=[np.random.default_rng(1).standard_normal((4, 6, 8)).astype(np.float32)],
    )
    with _plan.Device.assumed(H100):
        text = jax.jit(frozen).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    read = re.findall(rf"stablehlo.dot_general (%\w+), .*\(tensor<6x\w+x{type_}>, ", text)
    made = {name: operation for name, *operation in re.findall(r"(%\w+) = stablehlo\.(\w+) ?@?(\w*).*?(%\w+)", text)}
    assert len(read) == 5 and {made[name][0] for name in read} == {"optimization_barrier"}
    constraints = [made[made[name][2]][:2] for name in read]
    assert constraints == [["custom_call", "LayoutConstraint"]] * 5
    checks = jaxconv.export_checks()
    any_batch = jax.ShapeDtypeStruct((*export.symbolic_shape("n"), 6, 8), jnp.float32)
    with _plan.Device.assumed(H100):
        exported = export.export(jax.jit(frozen), platforms=("cuda",), disabled_checks=checks)(any_batch)
    assert exported.mlir_module().count("@LayoutConstraint") == 5


def test_an_empty_batch():
    model, variables = net()
    frozen = jaxconv.freeze(model.apply, variables, quantize="int8", calibrate=BATCHES)
    wanted = jax.eval_shape(model.apply, variables, X[:0])
    assert jax.tree.map(lambda a: (a.shape, a.dtype), frozen(X[:0])) == jax.tree.map(
        lambda a: (a.shape, a.dtype), wanted
    )


@pytest.mark.skipif(jax.device_count() < 2, reason="it takes two devices")
def test_inside_an_explicit_mesh():
    """Arrays are resharded there in front of each operation. The table and the numbers are those of one device."""
    model, variables = net()
    frozen = jaxconv.freeze(model.apply, variables, quantize="int8", calibrate=BATCHES)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2])
    whole, split = (jax.sharding.NamedSharding(mesh, jax.P(*axes)) for axes in ((), ("data",)))
    with jax.set_mesh(mesh):
        there = jaxconv.freeze(model.apply, jax.device_put(variables, whole), quantize="int8", calibrate=BATCHES)
        ours = there(jax.device_put(X, split))
        theirs = frozen(jax.device_put(X, split))
    assert [(a.dtype, a.out_dtype, a.why) for a in there.quantization] == [
        (a.dtype, a.out_dtype, a.why) for a in frozen.quantization
    ]
    for name, wanted in frozen(X).items():
        for found in (ours, theirs):
            np.testing.assert_allclose(found[name], wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())


class Split(nn.Module):
    """A layer in the middle whose images are split over a mesh, if `spec` says so."""

    spec: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        placed = (lambda x, spec: x) if self.spec is None else jax.sharding.reshard
        x = placed(nn.relu(nn.Conv(16, (3, 3), name="first")(x)), self.spec)
        x = nn.relu(nn.Conv(32, (1, 1), name="middle")(x)).mean((1, 2))
        return nn.Dense(10, name="last")(placed(x, jax.P()))


@pytest.mark.skipif(jax.device_count() < 2, reason="it takes two devices")
def test_a_point_that_the_program_splits_over_an_explicit_mesh():
    """Its numbers are counted as those of one device."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2])
    plain, split = Split(None), Split(jax.P("data"))
    variables = randomised(jax.eval_shape(plain.init, KEY, X))
    expected = jaxconv.freeze(plain.apply, variables, quantize="int8", calibrate=[X])
    with jax.set_mesh(mesh):
        placed = jax.device_put(variables, jax.sharding.NamedSharding(mesh, jax.P()))
        q = jaxconv.freeze(split.apply, placed, quantize="int8", calibrate=[X])
        got = q(jax.device_put(X, jax.sharding.NamedSharding(mesh, jax.P())))
    assert q.quantization.scales == expected.quantization.scales
    np.testing.assert_allclose(got, expected(X), rtol=1e-5, atol=1e-6)


def test_a_layer_without_a_name_is_named_as_the_table_does():
    """Of a function that closes over its weights. An empty name is none."""
    weights = _chain_weights()
    closed = lambda x: _chain(weights, x)  # noqa: E731
    frozen = jaxconv.freeze(closed, quantize="int8", calibrate=[X])
    assert {layer.name for layer in frozen.quantization} == {"conv"} and frozen.quantization.narrow
    named = jaxconv.freeze(closed, quantize="int8", calibrate=[X], wide=("conv",))
    assert not named.quantization.narrow and named.quantization[1].why == "wide= names it"
    with pytest.raises(ValueError, match="wide got '', but no layer has that name"):
        jaxconv.freeze(closed, quantize="int8", calibrate=[X], wide=("",))


def test_inside_jit_weights_and_batches_have_numbers():
    weights = _chain_weights()

    @jax.jit
    def f(x: Any) -> Any:
        return jaxconv.freeze(_chain, weights, quantize="int8", calibrate=[X])(x)

    np.testing.assert_array_equal(f(X), jaxconv.freeze(_chain, weights, quantize="int8", calibrate=[X])(X))


def test_bound_tracers_have_no_numbers():
    """That is said, whether or not activations have been looked for in the process."""
    activations._patterns.cache_clear()
    with pytest.raises(TypeError, match="quantize got bound arrays that are being traced, expected arrays with"):
        jax.jit(lambda w: jaxconv.freeze(_chain, w, quantize="int8", calibrate=[X])(X))(_chain_weights())


def test_pixels_of_zeros_and_channels_of_zeros():
    """Nothing to see in the batches, and filters that give nothing: scales stay numbers."""
    weights = _chain_weights()
    weights[0][...] = 0
    weights[1][..., :3] = 0
    q = jaxconv.freeze(_chain, weights, quantize="int8", calibrate=[0 * X])
    assert not np.asarray(q(X)).any()


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_batches_differ_in_python_numbers(dtype):
    """A time among the inputs, as a denoiser has one: the scales hold for those of all batches, in one program."""

    def f(weights: Any, x: Any, t: Any, *, strength: Any = 1.0, chained: bool = True) -> Any:
        return strength * _chain(weights, x * jnp.cos(t / 1000)) if chained else x

    weights, traced = _chain_weights(), []

    def counted(*args: Any, **kwargs: Any) -> Any:
        traced.append(1)
        return f(*args, **kwargs)

    q = jaxconv.freeze(counted, weights, quantize=dtype, calibrate=[(X, 1), (images(4), 500), (images(5), 999)])
    assert len(traced) == 1 and len(q.quantization.narrow) == 1
    arrays = [(x * jnp.cos(t / 1000),) for x, t in ((X, 1), (images(4), 500), (images(5), 999))]
    expected = jaxconv.freeze(_chain, weights, quantize=dtype, calibrate=arrays)
    np.testing.assert_allclose(
        [s.step for s in q.quantization.scales], [s.step for s in expected.quantization.scales], rtol=1e-5
    )
    for t in (0, 250, 750):
        np.testing.assert_allclose(q(X, t), expected(X * jnp.cos(t / 1000)), rtol=0.05, atol=0.05)
    assert len(q._function.programs) == 1
    np.testing.assert_array_equal(q.replace(weights)(X, 3), q(X, 3))
    np.testing.assert_allclose(q(X, 3, strength=2.0), 2 * q(X, 3), rtol=1e-5)
    assert q(X, 3, strength=0.5).shape == q(X, 3, strength=4.0).shape and len(q._function.programs) == 2

"""conv_batchnorm, batchnorm_conv and mlp against the calls that they stand for, which have tests of their own.

That what they do in training is rewritten, under every transform, is tests/test_joints.py's.
"""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    HOPPER,
    NAMED_ACTIVATIONS,
    NATIVE_IN_FLOAT64,
    PLATFORM,
    calls,
    equations,
    integers,
    label,
    normal,
    same_bits,
    types_of,
)
from tolerance import assert_exact

import jaxconv
from jaxconv.joints import rules

NATIVE: dict[str, Any] = dict(implementation="native")
CONVS = {3: jaxconv.conv1d, 4: jaxconv.conv2d, 5: jaxconv.conv3d}
# layout: shapes of x and w, window. Channels are not 1, not equal, and no multiple of a vector.
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "NWC": ((3, 11, 4), (3, 4, 5), dict(stride=2)),
    "NCW": ((3, 4, 11), (5, 4, 3), dict(dilation=2)),
    "NHWC": ((2, 7, 6, 4), (3, 2, 2, 6), dict(groups=2, padding=((1, 0), (0, 2)))),
    "NCHW": ((2, 4, 7, 6), (6, 4, 3, 2), dict(stride=(2, 1), padding="VALID")),
    "NDHWC": ((2, 3, 5, 4, 2), (2, 3, 2, 2, 3), {}),
    "NCDHW": ((2, 2, 3, 5, 4), (3, 2, 2, 3, 2), {}),
}
C = 8
# Padding and stride under a 3x3 filter of rows of 9 x 8 pixels
WINDOWS: dict[str, dict[str, Any]] = {
    "same": dict(padding=1),
    "low": dict(padding=((2, 0), (2, 0))),
    "high": dict(padding=((0, 2), (0, 2))),
    "valid": dict(padding="VALID"),
    "stride": dict(padding=((0, 1), (0, 1)), stride=2),
    "stride both": dict(padding=1, stride=2),
}
M, K, H, N = 33, 24, 40, 16

on_cpus = pytest.mark.skipif(PLATFORM != "cpu", reason="a GPU has these kernels in 16 bits")


@pytest.fixture(autouse=True)
def exact_products():
    """Products in float32 on a GPU too: TF32 would hide what is compared."""
    with jax.default_matmul_precision("highest"):
        yield


# ----------------------------------------------------------------------------------------------------------------------
# The functions, and the calls that they stand for


def pair(x, w, scale, bias, mean, var, residual=None, *, layout="NHWC", **options):
    how = dict(layout=layout, **LAYOUTS[layout][2], **options)
    return jaxconv.conv_batchnorm(x, w, scale, bias, mean, var, residual=residual, **how)


def pair_of_two(x, w, *rest, layout="NHWC", implementation=None, **options):
    z = CONVS[w.ndim](x, w, layout=layout, implementation=implementation, **LAYOUTS[layout][2])
    axis = -1 if layout.endswith("C") else 1
    how = dict(channel_axis=axis, implementation=implementation, **options)
    return jaxconv.batchnorm(z, *rest[:4], residual=rest[4] if len(rest) > 4 else None, **how)


def chain_of_two(x, scale, bias, mean, var, w, *, layout="NHWC", implementation=None, **how):
    norm = {name: how.pop(name) for name in ("activation", "momentum", "training") if name in how}
    axis = 1 if layout == "NCHW" else -1
    a, *new = jaxconv.batchnorm(x, scale, bias, mean, var, channel_axis=axis, implementation=implementation, **norm)
    return jaxconv.conv2d(a, w, layout=layout, implementation=implementation, **how), *new


def mlp_of_two(x, w1, b1, w2, b2, *, activation="gelu", out_activation=None, **options):
    h = jaxconv.dense(x, w1, b1, activation=activation, **options)
    return jaxconv.dense(h, w2, b2, activation=out_activation, **options)


def of_pair(layout: str, dtype: str = "float64", residual: bool = True) -> list[jax.Array]:
    """Filters so small that results are of size one; running variances away from zero."""
    x, w, window = LAYOUTS[layout]
    k = w[-1] if layout.endswith("C") else w[0]
    y = jax.eval_shape(functools.partial(CONVS[len(w)], layout=layout, **window), jnp.zeros(x), jnp.zeros(w)).shape
    wide = "float64" if dtype == "float64" else "float32"
    parameters = [jnp.asarray(normal(i, (k,)), wide) for i in range(2, 6)]
    big = [normal(0, x), normal(1, w) / np.sqrt(np.prod(w) / k), *[normal(8, y)] * residual]
    big = [jnp.asarray(a, dtype) for a in big]
    return [*big[:2], *parameters[:3], 0.5 + jnp.abs(parameters[3]), *big[2:]]


def of_chain(dtype: str = "float64", layout: str = "NHWC", groups: int = C) -> list[jax.Array]:
    """x, scale, bias, running_mean, running_var, w: x is far from zero, and so is the batch-norm of zero."""
    x, w = 3 * normal(0, (2, 9, 8, C)) + 5, normal(1, (3, 3, C // groups, C))
    v = [1 + normal(2, (C,)) / 4, 1 + normal(3, (C,)) / 2, normal(4, (C,)), 1 + np.abs(normal(5, (C,)))]
    if layout == "NCHW":
        x, w = x.transpose(0, 3, 1, 2), w.transpose(3, 2, 0, 1)
    wide = "float64" if dtype == "float64" else "float32"
    return [jnp.asarray(x, dtype), *(jnp.asarray(a, wide) for a in v), jnp.asarray(w, dtype)]


def of_mlp(dtype: str = "float64", lead: tuple[int, ...] = (M,)) -> list[jax.Array]:
    shapes = ((*lead, K), (K, H), (H,), (H, N), (N,))
    return [jnp.asarray(normal(i, s) / np.sqrt(s[0] if i in (1, 3) else 1), dtype) for i, s in enumerate(shapes)]


def everything(f: Any, *args: Any) -> list[Any]:
    """The results, and the gradient of each argument that is there, of cotangents of every result."""
    there = [i for i, a in enumerate(args) if a is not None]

    def of_some(*some: Any) -> Any:
        given = dict(zip(there, some, strict=True))
        outs = f(*(given.get(i) for i in range(len(args))))
        return list(outs) if isinstance(outs, tuple) else [outs]

    outs, back = jax.vjp(of_some, *(args[i] for i in there))
    return [*outs, *back([jnp.asarray(normal(7 + i, y.shape), y.dtype) for i, y in enumerate(outs)])]


def alike(f: Any, g: Any, args: list[Any]) -> None:
    """In float64, or in float32 where the kernels have no other."""
    dtype = args[0].dtype.name
    tolerance = 1e-10 if dtype == "float64" else 2e-4
    for a, b in zip(*(jax.jit(functools.partial(everything, h))(*args) for h in (f, g)), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1.0, float(jnp.abs(b).max())))


def within(f: Any, g: Any, make: Any, dtype: str, ulps: float) -> None:
    """Of the first result and its gradients, against g in float64: errors are a handful of roundings to `dtype`."""

    def first(h: Any) -> Any:
        return lambda *args: jax.tree.leaves(h(*args))[0]

    args = make(dtype)
    got = everything(first(f), *args)
    with jax.enable_x64(True):
        exact = everything(first(g), *(jnp.asarray(np.asarray(a, np.float64)) for a in args))
    for a, b in zip(got, exact, strict=True):
        bound = ulps * float(jnp.finfo(dtype).eps) * float(np.abs(b).max())
        np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=0, atol=bound)


# float64 where native code has it
EXACT = "float64" if NATIVE_IN_FLOAT64 else "float32"
trained = pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])


# ----------------------------------------------------------------------------------------------------------------------
# conv_batchnorm


@trained
@pytest.mark.parametrize("implementation", ["native", None, "xla"], ids=label)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pair_is_its_two_calls(layout, implementation, training):
    how = dict(layout=layout, training=training, momentum=0.75, activation="relu")
    with types_of(EXACT):
        f = functools.partial(pair, implementation=implementation, **how)
        alike(f, functools.partial(pair_of_two, implementation="xla", **how), of_pair(layout, EXACT))


@trained
@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
# One whose derivative keeps nothing, one that keeps y, two that keep z. (The rest is batchnorm's and conv2d's to test.)
@pytest.mark.parametrize("activation", [None, "relu", "gelu", ("leaky_relu", -0.5)], ids=label)
def test_a_pair_of_every_activation(activation, residual, training):
    how = dict(training=training, activation=activation)
    with types_of(EXACT):
        f = functools.partial(pair, **how, **NATIVE)
        alike(f, functools.partial(pair_of_two, implementation="xla", **how), of_pair("NHWC", EXACT, residual))


@trained
@pytest.mark.parametrize("implementation", ["native", "xla"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_pair_in_sixteen_bits(dtype, implementation, training):
    """Filters that are folded, or z, are rounded; of few channels a gradient's terms nearly cancel."""
    how = dict(training=training, activation="silu")
    f = functools.partial(pair, implementation=implementation, **how)
    within(f, functools.partial(pair_of_two, **how), functools.partial(of_pair, "NHWC"), dtype, 8)


@pytest.mark.parametrize("function", ["pair", "chain"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_where_it_is_two_calls_it_is_so_to_the_last_bit(function, dtype):
    how = dict(training=True, activation="silu")
    if function == "pair":
        f, g, args = functools.partial(pair, **how), functools.partial(pair_of_two, **how), of_pair("NHWC", dtype)
    else:
        how |= dict(groups=C, padding=1)
        f, g = functools.partial(jaxconv.batchnorm_conv, **how), functools.partial(chain_of_two, **how)
        args = of_chain(dtype)

    def run(f: Any) -> Any:  # who trains asks for no gradient of statistics
        return lambda *args: (f(*args), everything(lambda *a: f(*a)[0], *args))

    assert calls(run(f), *args) == calls(run(g), *args)
    assert same_bits(jax.jit(run(f))(*args), jax.jit(run(g))(*args))


def test_no_scale_and_no_bias_stand_for_ones_and_zeros_and_no_layout_for_channels_last():
    x, w, scale, bias, *rest = of_pair("NHWC", "float32")
    for training in (True, False):
        run = functools.partial(pair, training=training, implementation="xla")
        assert same_bits(run(x, w, None, None, *rest), run(x, w, jnp.ones_like(scale), jnp.zeros_like(bias), *rest))
    args = of_pair("NWC", "float32", False)
    run = functools.partial(jaxconv.conv_batchnorm, stride=2, training=True)
    assert same_bits(run(*args), run(*args, layout="NWC"))


@on_cpus  # on a GPU bfloat16 and channels that are multiples of 8 get it
def test_what_a_pair_runs():
    *args, residual = of_pair("NHWC", "float32")
    f = functools.partial(pair, training=True, activation="relu", **NATIVE)
    forward = {"conv_statistics": 1, "batchnorm_infer": 1}
    assert calls(f, *args, residual) == forward
    gradient = jax.grad(lambda *a: (f(*a)[0] ** 2).sum(), (0, 1))
    backward = {"batchnorm_backward": 1, "conv_dgrad": 1, "conv_wgrad": 1}
    assert calls(gradient, *args, residual) == forward | backward
    folded = functools.partial(pair, training=False, activation="relu", **NATIVE)
    assert calls(folded, *args, residual) == {"conv_add": 1} and calls(folded, *args) == {"conv": 1}


def test_jaxconv_disable_reaches_a_pair(monkeypatch):
    monkeypatch.setenv("JAXCONV_DISABLE", "batchnorm")
    assert calls(functools.partial(pair, training=True, **NATIVE), *of_pair("NHWC", "float32")) == {"conv_fprop": 1}


# ----------------------------------------------------------------------------------------------------------------------
# batchnorm_conv


@on_cpus
@trained
@pytest.mark.parametrize("activation", NAMED_ACTIVATIONS, ids=label)
def test_a_chain_is_its_two_calls(activation, training, x64):
    how = dict(training=training, groups=C, activation=activation, padding=1)
    f, g = functools.partial(jaxconv.batchnorm_conv, **how, **NATIVE), functools.partial(chain_of_two, **how)
    alike(f, g, of_chain())


@on_cpus
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("layout", "groups"), [("NHWC", C), ("NCHW", C), ("NHWC", 1), ("NHWC", 4)])
def test_what_is_padded_is_a_chains_result(window, layout, groups, x64):
    how = dict(training=True, groups=groups, activation="silu", layout=layout, momentum=0.9, **WINDOWS[window])
    f, g = functools.partial(jaxconv.batchnorm_conv, **how, **NATIVE), functools.partial(chain_of_two, **how)
    alike(f, g, of_chain(layout=layout, groups=groups))


@pytest.mark.parametrize("activation", ["relu", "relu6", "silu"])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_chain_in_sixteen_bits(activation, window, dtype):
    """On a GPU of compute capability 9.0 by the kernels; elsewhere the two calls are held to the same."""
    how = dict(training=True, groups=C, activation=activation, **WINDOWS[window])
    f = functools.partial(jaxconv.batchnorm_conv, **how, **NATIVE)
    within(f, functools.partial(chain_of_two, implementation="xla", **how), of_chain, dtype, 3)


def of_point(dtype: str = "float64") -> list[jax.Array]:
    *rest, w = of_chain(dtype, groups=1)
    return [*rest, jnp.concatenate([w[1, 1], -w[0, 2], w[2, 1]], 1)[None, None]]


@pytest.mark.parametrize("activation", ["relu", "relu6", "silu", None], ids=label)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_chain_of_one_tap_in_sixteen_bits(activation, dtype):
    """As test_a_chain_in_sixteen_bits, of a 1x1; the gradient of what is normalised is made by the convolution."""
    how = dict(training=True, activation=activation)
    f = functools.partial(jaxconv.batchnorm_conv, **how, **NATIVE)
    within(f, functools.partial(chain_of_two, implementation="xla", **how), of_point, dtype, 3)
    if HOPPER or PLATFORM == "cpu":
        step = jax.value_and_grad(lambda *a: (f(*a)[0].astype("float32") ** 2).sum(), (0, 1, 2, 5))
        made = {"batchnorm_moments": 1, "conv_normalised": 1, "conv_normalised_wgrad": 1}
        back = {"conv_dgrad": 1, "batchnorm_backward": 1}
        assert calls(step, *of_point(dtype if HOPPER else "float32")) == made | back


@on_cpus
def test_every_pass_of_a_chain_normalises_what_it_reads():
    args = of_chain("float32")
    f = functools.partial(jaxconv.batchnorm_conv, training=True, groups=C, activation="relu6", **NATIVE)

    def gradient(*wanted: int) -> Any:
        return jax.grad(lambda *a: (f(*a)[0] ** 2).sum(), wanted)

    forward = {"batchnorm_moments": 1, "conv_normalised": 1}
    assert calls(f, *args) == forward
    assert calls(gradient(0, 1, 2, 5), *args) == forward | {"conv_normalised_gradient": 1, "conv_normalised_dx": 1}
    # Of fewer gradients each is made by itself
    assert calls(gradient(5), *args) == forward | {"conv_normalised_wgrad": 1}
    assert calls(gradient(0), *args) == forward | {"conv_dgrad": 1, "batchnorm_backward": 1}
    infer = functools.partial(jaxconv.batchnorm_conv, training=False, groups=C, activation="relu6", **NATIVE)
    assert calls(infer, *args) == {"conv_normalised": 1}
    costs = [jaxconv.cost(functools.partial(infer, implementation=i))(*args)["flops"] for i in ("native", None)]
    assert abs(costs[0] - costs[1]) <= 0.02 * costs[0]


# ----------------------------------------------------------------------------------------------------------------------
# mlp


@pytest.mark.parametrize("implementation", ["native", "xla", None], ids=label)
@pytest.mark.parametrize("dtype", ["float32", *(("float64",) if NATIVE_IN_FLOAT64 else ())])
def test_layers_of_integers_are_exact(implementation, dtype):
    x, w1, b1, w2, b2 = given = [integers(i, a.shape, 1) for i, a in enumerate(of_mlp("float32"))]
    dy = integers(7, (M, N), 1)
    with types_of(dtype):
        y, back = jax.vjp(
            functools.partial(jaxconv.mlp, activation="relu", implementation=implementation),
            *(jnp.asarray(a, dtype) for a in given),
        )
        outs = y, *back(jnp.asarray(dy, dtype))
    z1 = x @ w1 + b1
    h, dz1 = np.maximum(z1, 0), (dy @ w2.T) * (z1 > 0)
    for out, e in zip(outs, (h @ w2 + b2, dz1 @ w1.T, x.T @ dz1, dz1.sum(0), h.T @ dy, dy.sum(0)), strict=True):
        assert_exact(out, e)


@pytest.mark.parametrize("activation", NAMED_ACTIVATIONS, ids=label)
@pytest.mark.parametrize("dtype", [EXACT, "bfloat16", "float16"])
def test_layers_are_two_calls(activation, dtype):
    """In 16 bits h, z1 and dz1 are rounded on the way, and what derivatives make of z1 near a kink."""
    how = dict(activation=activation, out_activation="tanh" if activation == "silu" else None)
    f, g = functools.partial(jaxconv.mlp, **how, **NATIVE), functools.partial(mlp_of_two, **how)
    if dtype == EXACT:
        with types_of(EXACT):
            alike(f, functools.partial(g, implementation="xla"), of_mlp(EXACT))
    else:
        within(f, functools.partial(g, implementation="xla"), of_mlp, dtype, 8)


@pytest.mark.parametrize("biases", ["both", "first", "second", "none"])
@pytest.mark.parametrize("lead", [(), (3,), (2, 1, 3), (0,)], ids=str)
def test_leading_dimensions_are_rows_and_biases_may_be_missing(lead, biases, x64):
    x, w1, b1, w2, b2 = of_mlp("float64", lead)
    b1, b2 = b1 if biases in ("both", "first") else None, b2 if biases in ("both", "second") else None
    alike(jaxconv.mlp, mlp_of_two, [x, w1, b1, w2, b2]) if lead != (0,) else None
    assert jaxconv.mlp(x, w1, b1, w2, b2).shape == (*lead, N)


@pytest.mark.parametrize("wanted", [c for n in (1, 2, 5) for c in itertools.combinations(range(5), n)], ids=str)
def test_only_what_is_wanted_is_computed(wanted, monkeypatch, x64):
    monkeypatch.setattr(rules, "wants", lambda op, problem, device: True)
    args = of_mlp()

    def gradient(f: Any) -> Any:
        return jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a))), wanted)

    for a, b in zip(gradient(jaxconv.mlp)(*args), gradient(mlp_of_two)(*args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10)
    found = equations(gradient(jaxconv.mlp), *args)
    assert found["jaxconv_dense_gradient"] == bool({0, 1, 2}.intersection(wanted))
    assert found["jaxconv_matmul"] == len({0, 1, 3}.intersection(wanted))


def test_symbolic_rows():
    _, *weights = of_mlp("float32")

    @jax.jit
    def f(x):
        y, back = jax.vjp(lambda *args: jaxconv.mlp(*args), x, *weights)
        return y, *back(y)

    rows = jax.export.symbolic_shape("n")[0]
    exported = jax.export.export(f, disabled_checks=jaxconv.export_checks())(jax.ShapeDtypeStruct((rows, K), "float32"))
    x = jnp.asarray(normal(0, (7, K)), "float32")
    for a, b in zip(exported.call(x), f(x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)


def test_operations_of_layers_are_counted():
    args, product = of_mlp("float32"), 2 * M * K * H + 2 * M * H * N
    assert product < jaxconv.cost(jaxconv.mlp)(*args)["flops"] < 1.2 * product
    both = jax.value_and_grad(lambda *a: jaxconv.mlp(*a).sum(), tuple(range(5)))
    assert 3 * product < jaxconv.cost(both)(*args)["flops"] < 3.5 * product


# ----------------------------------------------------------------------------------------------------------------------
# What is refused

X, W, V = jnp.ones((2, 5, 5, 4)), jnp.ones((3, 3, 4, 6)), jnp.ones(6)
GOOD = {
    "conv_batchnorm": dict(x=X, w=W, scale=V, bias=V, running_mean=V, running_var=V, training=True),
    "batchnorm_conv": dict(x=X, w=W, **dict.fromkeys(("scale", "bias", "running_mean", "running_var"), V[:4])),
    "mlp": dict(x=X[0, 0], w1=W[0, 0], b1=V, w2=jnp.ones((6, 5)), b2=jnp.ones(5)),
}
GOOD["batchnorm_conv"] |= dict(training=True)
BAD = [
    ("conv_batchnorm", dict(w=W[0, 0]), ValueError, "w has 2 dimensions, expected 3, 4 or 5"),
    ("conv_batchnorm", dict(w=jnp.ones((3, 3, 5, 6))), ValueError, "w expects 5 input channels, x has 4"),
    ("conv_batchnorm", dict(scale=V[:4]), ValueError, "scale has shape (4,), expected (6,)"),
    ("conv_batchnorm", dict(residual=X), ValueError, "expected (2, 5, 5, 6), that of the convolution's result"),
    ("conv_batchnorm", dict(running_mean=None), TypeError, "running_mean must be an array, got None"),
    ("conv_batchnorm", dict(layout="NWC"), ValueError, "layout='NWC' is unknown"),
    ("conv_batchnorm", dict(momentum=2), ValueError, "momentum=2 must be between 0 and 1"),
    ("conv_batchnorm", dict(training=1), TypeError, "training must be True or False"),
    ("conv_batchnorm", dict(algorithm="two_read"), ValueError, "algorithm='two_read' is unknown"),
    ("conv_batchnorm", dict(x=X[:0]), ValueError, "training statistics need at least one element"),
    ("batchnorm_conv", dict(scale=V[:3]), ValueError, "scale has shape"),
    ("batchnorm_conv", dict(w=W[0, 0]), ValueError, "w has 2 dimensions"),
    ("batchnorm_conv", dict(training=jnp.bool_(True)), TypeError, "training"),
    ("mlp", dict(x=jnp.float32(1)), ValueError, "x has 0 dimensions, expected (..., K)"),
    ("mlp", dict(w1=V[:4]), ValueError, "w1 has 1 dimensions, expected 2 (K, H)"),
    ("mlp", dict(w2=jnp.ones((6, 5, 1))), ValueError, "w2 has 3 dimensions, expected 2 (H, N)"),
    ("mlp", dict(w1=jnp.ones((3, 6))), ValueError, "w1 expects 3 input features, x has 4"),
    ("mlp", dict(w2=jnp.ones((7, 5))), ValueError, "w2 expects 7 input features, w1 makes 6"),
    ("mlp", dict(b1=jnp.ones(5)), ValueError, "b1 has shape (5,), expected (6,)"),
    ("mlp", dict(b2=jnp.ones((1, 5))), ValueError, "b2 has shape (1, 5), expected (5,)"),
    ("mlp", dict(w2=jnp.ones((6, 5), "bfloat16")), TypeError, ""),
    ("mlp", dict(w1=None), TypeError, "w1 must be an array, got None"),
    ("mlp", dict(activation="mish"), ValueError, "activation='mish' is unknown"),
    ("mlp", dict(algorithm="im2col"), ValueError, "algorithm='im2col' is unknown"),
]


@pytest.mark.parametrize(("function", "changed", "kind", "message"), BAD)
def test_errors_name_the_argument(function, changed, kind, message):
    f, good = getattr(jaxconv, function), GOOD[function]
    f(**good)
    with pytest.raises(kind, match=re.escape(f"{function}: ") + ".*" + re.escape(message)):
        f(**{**good, **changed})

"""conv_batchnorm against the two calls that it stands for, and its kernel, which sums up what it writes."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    DEVICE,
    DTYPES,
    H200,
    NATIVE_IN_FLOAT64,
    PLATFORM,
    calls,
    integers,
    label,
    normal,
    same_bits,
    types_of,
)
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from tolerance import assert_close, assert_exact, assert_within, eps, error

import jaxconv
from jaxconv import _halo, _plan, _problem
from jaxconv._problem import CONV_ALGORITHMS, ConvProblem

conv_module = importlib.import_module("jaxconv.conv")

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
NAMES = ("x", "w", "scale", "bias", "running_mean", "running_var", "residual")


def channels_of(layout: str) -> int:
    w = LAYOUTS[layout][1]
    return w[-1] if layout.endswith("C") else w[0]


def result_shape(layout: str) -> tuple[int, ...]:
    x, w, window = LAYOUTS[layout]
    conv = functools.partial(CONVS[len(w)], layout=layout, **window)
    return jax.eval_shape(conv, jnp.zeros(x), jnp.zeros(w)).shape


def data(layout: str, dtype: str) -> dict[str, np.ndarray]:
    """Filters small enough that results are of size one; running variances away from zero."""
    x, w, _ = LAYOUTS[layout]
    wide = "float64" if dtype == "float64" else "float32"
    k = channels_of(layout)
    small = (normal(1, w) / np.sqrt(np.prod(w) / k)).astype(jnp.dtype(dtype)).astype(np.float64)
    parameters = {name: normal(i, (k,), wide) for i, name in enumerate(NAMES[2:6], 2)}
    parameters["running_var"] = (0.5 + np.abs(parameters["running_var"])).astype(wide).astype(np.float64)
    return {"x": normal(0, x, dtype), "w": small, **parameters, "residual": normal(8, result_shape(layout), dtype)}


def arrays(given: dict[str, np.ndarray], dtype: str) -> dict[str, jax.Array]:
    wide = "float64" if dtype == "float64" else "float32"
    return {k: jnp.asarray(v, wide if k in NAMES[2:6] else dtype) for k, v in given.items()}


def one(layout: str, implementation: str | None, args: dict[str, Any], **options: Any) -> Any:
    window = LAYOUTS[layout][2]
    return jaxconv.conv_batchnorm(
        **args, layout=layout, precision="highest", implementation=implementation, **window, **options
    )


def two(layout: str, implementation: str | None, args: dict[str, Any], **options: Any) -> Any:
    x, w, *rest = (args.get(name) for name in NAMES)
    conv = CONVS[w.ndim]
    z = conv(x, w, layout=layout, precision="highest", implementation=implementation, **LAYOUTS[layout][2])
    axis = -1 if layout.endswith("C") else 1
    return jaxconv.batchnorm(
        z, *rest[:4], residual=rest[4], channel_axis=axis, implementation=implementation, **options
    )


def with_gradients(function: Any, layout: str, implementation: str | None, args: dict[str, Any], **options: Any) -> Any:
    """The results, and the gradients in every array of a sum that weighs every element differently."""

    def loss(args: dict[str, Any]) -> Any:
        outs = function(layout, implementation, args, **options)
        wide = [out.astype(jnp.promote_types(out.dtype, "float32")) for out in outs]
        return sum((out * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum() for out in wide), outs

    gradients, outs = jax.grad(loss, has_aux=True)(args)
    return outs, gradients


@functools.cache
def expected(layout: str, dtype: str, residual: bool, options: tuple[tuple[str, Any], ...]) -> Any:
    """(results and gradients of XLA's two calls in `dtype`, the same in float64)."""
    given = {k: v for k, v in data(layout, dtype).items() if residual or k != "residual"}
    run = jax.jit(functools.partial(with_gradients, two, layout, "xla", **dict(options)))
    with types_of(dtype):
        xla = run(arrays(given, dtype))
    with jax.enable_x64(True):
        reference = run({k: jnp.asarray(v, "float64") for k, v in given.items()})
    return xla, jax.tree.map(np.asarray, reference)


def compare(layout: str, dtype: str, implementation: str | None, residual: bool, **options: Any) -> None:
    """conv_batchnorm errs no more than twice what XLA's two calls do, results and gradients."""
    given = {k: v for k, v in data(layout, dtype).items() if residual or k != "residual"}
    xla, reference = expected(layout, dtype, residual, tuple(options.items()))
    with types_of(dtype):
        actual = jax.jit(functools.partial(with_gradients, one, layout, implementation, **options))(
            arrays(given, dtype)
        )
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(actual)]
    for path, a, t, r in zip(paths, *map(jax.tree.leaves, (actual, xla, reference)), strict=True):
        what, scale = f"{path} {implementation}", 4 * float(np.abs(r).max())
        if dtype in ("bfloat16", "float16"):
            # What is rounded to 16 bits on the way (z or the folded filters, dz) errs by half an ulp an element, and
            # reaches float32 results, the parameters' gradients, in sums whose terms nearly cancel.
            least = 2 * eps(dtype) * scale
            assert error(t, r) <= 8 * least, what
            assert error(a, r) <= 2 * error(t, r) + least, what
        else:
            # Sums of at most 100 products, of which a gradient is a sum over at most 100 more; sizes up to 4 each.
            assert_close(a, t, r, terms=100 * 100, what=what, scale=scale)


# The default makes XLA's two calls or the native one, and a test below says which, and that the bits are theirs.
IMPLEMENTATIONS = ("native", pytest.param(None, marks=pytest.mark.slow), "xla")


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=label)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_equals_the_two_calls(layout, implementation, training):
    compare(layout, "float32", implementation, True, training=training, momentum=0.75, activation="relu")


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
# One whose derivative keeps nothing, one that keeps y, two that keep z. (The rest is batchnorm's and conv2d's to test.)
@pytest.mark.parametrize("activation", [None, "relu", "gelu", ("leaky_relu", -0.5)], ids=label)
def test_every_activation_equals_the_two_calls(activation, residual, training):
    compare("NHWC", "float32", "native", residual, training=training, activation=activation)


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != "float32"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=label)
def test_every_dtype_equals_the_two_calls(implementation, dtype, training):
    if implementation == "native" and dtype == "float64" and not NATIVE_IN_FLOAT64:
        pytest.skip("float64 has no native CUDA kernels")
    compare("NHWC", dtype, implementation, True, training=training, activation="silu")


@pytest.mark.parametrize("implementation", [None, "xla"], ids=label)
def test_where_it_is_two_calls_it_is_so_to_the_last_bit(implementation):
    args = arrays(data("NCHW", "float32"), "float32")
    run = functools.partial(with_gradients, layout="NCHW", implementation=implementation, args=args)
    options = dict(training=True, activation="gelu")
    assert same_bits(jax.jit(lambda: run(one, **options))(), jax.jit(lambda: run(two, **options))())


def test_no_scale_and_no_bias_stand_for_ones_and_zeros():
    args = arrays(data("NHWC", "float32"), "float32")
    ones, zeros = jnp.ones_like(args["scale"]), jnp.zeros_like(args["bias"])
    for training in (True, False):
        run = functools.partial(one, "NHWC", "xla", training=training)
        assert same_bits(
            run({**args, "scale": None, "bias": None}),
            run({**args, "scale": ones, "bias": zeros}),
        )


def test_the_default_layout_is_channels_last():
    args = arrays(data("NWC", "float32"), "float32")
    del args["residual"]
    assert same_bits(
        jaxconv.conv_batchnorm(**args, stride=2, training=True, layout="NWC"),
        jaxconv.conv_batchnorm(**args, stride=2, training=True),
    )


# ----------------------------------------------------------------------------------------------------------------------
# Derivatives and transforms


FIRST = (*NATIVE_IN_FLOAT64, None)[0]


@pytest.mark.parametrize("activation", [None, "relu", "gelu"], ids=label)
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_numerical_derivatives_of_both_modes_to_second_order(training, activation, x64):
    """In everything, and of the running statistics too."""

    def f(x, w, scale, bias, mean, var, residual):
        options = dict(training=training, momentum=0.5, activation=activation, implementation=FIRST)
        return jaxconv.conv_batchnorm(x, w, scale, bias, mean, var, residual=residual, **options)

    shapes = ((2, 3, 2, 2), (2, 2, 2, 3), (3,), (3,), (3,), (3,), (2, 3, 2, 3))
    args = [jnp.asarray(normal(5 + i, shape)) for i, shape in enumerate(shapes)]
    args[5] = 1 + jnp.abs(args[5])
    check_grads(jax.jit(f), args, order=2)


@pytest.mark.parametrize("implementation", ["native", "xla"])
def test_jvp_linearize_and_hessian_agree_with_those_of_two_calls(implementation):
    given = arrays(data("NWC", "float32"), "float32")
    tangents = {k: jnp.cos(v) for k, v in given.items()}
    options = dict(training=True, activation="tanh")
    found = []
    for function in (one, two):
        f = functools.partial(function, "NWC", implementation, **options)
        pushed = jax.jit(lambda a, t, f=f: jax.jvp(f, (a,), (t,)))(given, tangents)
        linear = jax.linearize(f, given)[1](tangents)
        hessian = jax.jit(jax.hessian(lambda w, f=f: (f({**given, "w": w})[0] ** 3).sum()))(given["w"])
        found.append((pushed, linear, hessian))
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        size = max(1.0, float(jnp.abs(b).max()))
        np.testing.assert_allclose(a, b, rtol=0, atol=2000 * eps("float32") * size)


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("which", ["x", "w", "scale", "all"])
def test_vmap_equals_a_loop(which, training):
    """Instances have statistics of their own."""
    layout = "NCHW"
    args = arrays(data(layout, "float32"), "float32")
    mapped = NAMES if which == "all" else (which,)
    args = {k: jnp.stack([v, 2 * v, 3 * v]) if k in mapped else v for k, v in args.items()}
    f = functools.partial(with_gradients, one, layout, "native", training=training, activation="relu")
    together = jax.jit(jax.vmap(f, ({k: 0 if k in mapped else None for k in args},)))(args)
    alone = [jax.jit(f)({k: v[i] if k in mapped else v for k, v in args.items()}) for i in range(3)]
    stacked = jax.tree.map(lambda *r: jnp.stack(r), *alone)
    for t, a in zip(jax.tree.leaves(together), jax.tree.leaves(stacked), strict=True):
        size = max(1.0, float(jnp.abs(a).max()))
        np.testing.assert_allclose(t, a, rtol=0, atol=400 * eps("float32") * size)


def test_remat_keeps_the_pair_as_a_convolution():
    args = arrays(data("NHWC", "float32"), "float32")
    f = functools.partial(one, "NHWC", "native", training=True, activation="relu")

    def loss(w: Any, policy: Any) -> Any:
        step = f if policy is None else jax.checkpoint(f, policy=policy)
        return (step({**args, "w": w})[0] ** 2).sum()

    for policy in (jaxconv.checkpoint_policies.save_convs, jaxconv.checkpoint_policies.save_all):
        gradient = jax.grad(functools.partial(loss, policy=policy))
        assert calls(gradient, args["w"]) == calls(jax.grad(functools.partial(loss, policy=None)), args["w"])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_on_a_mesh_it_is_the_unsharded_one(training, kind):
    if len(jax.devices()) < 4:
        pytest.skip("needs 4 devices")
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
    k = 6
    x, w = jnp.asarray(normal(0, (4, 5, 5, 4)), "float32"), jnp.asarray(normal(1, (3, 3, 4, k)), "float32")
    v = [jnp.asarray(1 + np.abs(normal(i, (k,))), "float32") for i in range(4)]

    def run(x, w, *v):
        def loss(x, w, *v):
            y, mean, var = jaxconv.conv_batchnorm(x, w, *v, training=training, activation="relu")
            return (y**2).sum() + mean.sum() + var.sum()

        return jax.value_and_grad(loss, (0, 1, 2))(x, w, *v)

    expected = jax.jit(run)(x, w, *v)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, P("data")))]
        placed += [jax.device_put(w, NamedSharding(mesh, P(None, None, None, "model")))]
        placed += [jax.device_put(a, NamedSharding(mesh, P("model"))) for a in v]
        actual = jax.jit(run)(*placed)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        size = max(1.0, float(jnp.abs(e).max()))
        np.testing.assert_allclose(a, e, rtol=0, atol=400 * eps("float32") * size)


# case: (x, w, how x and w are split, the exchanges beside the moments' sum)
SPLITS = {
    "images": ((8, 6, 5, 4), (3, 3, 4, 6), P(("a", "b")), P(), {}),
    "images, filters": ((8, 6, 5, 4), (3, 3, 4, 6), P("a"), P(None, None, None, "b"), {}),
    "rows": ((2, 8, 5, 4), (3, 3, 4, 6), P(None, "a"), P(), {"collective-permute"}),
    "images, rows": ((4, 8, 5, 4), (3, 3, 4, 6), P("b", "a"), P(), {"collective-permute"}),
    "uneven rows": ((2, 8, 5, 4), (2, 3, 4, 6), P(None, "a"), P(), {"collective-permute"}),
    "rows, their ends again": ((2, 16, 5, 4), (3, 3, 4, 6), P(None, "a"), P(), {"collective-permute"}),
    "inputs": ((2, 6, 5, 4), (3, 3, 4, 6), P(None, None, None, "a"), P(None, None, "a"), {"all-reduce"}),
    "groups": ((2, 6, 5, 4), (3, 3, 2, 6), P(None, None, None, "a"), P(None, None, None, "a"), {}),
}


@pytest.mark.skipif(jax.device_count() < 4, reason="it takes four devices")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("case", SPLITS)
def test_statistics_of_shards_are_merged(case, kind, monkeypatch):
    """Far from zero, and not alike in every shard; nothing is gathered."""
    if "again" in case:
        monkeypatch.setattr(_halo, "LEAST_COPY", 0)
    x_shape, w_shape, x_spec, w_spec, exchanges = SPLITS[case]
    if kind == AxisType.Explicit and "uneven" in case:
        pytest.skip("types have no words for shards of unequal sizes")
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind,) * 2, devices=jax.devices()[:4])
    x = (
        normal(0, x_shape)
        + 30
        + 10 * np.arange(x_shape[1]).reshape(-1, 1, 1)
        + np.arange(x_shape[0]).reshape(-1, 1, 1, 1)
    )
    w = np.abs(normal(1, w_shape))
    groups = x_shape[-1] // w_shape[2]
    padding = [(0, 0), (1, 1)] if "uneven" in case else "SAME"  # 7 rows of y
    p = ConvProblem.infer(
        "conv2d", 2, *(jax.ShapeDtypeStruct(s, "float32") for s in (x_shape, w_shape)), None, stride=1, padding=padding,
        dilation=1, groups=groups, layout="NHWC", precision="highest", activation=None, return_preactivation=False,
        algorithm=None, implementation="native",
    )  # fmt: skip
    y = lax.conv_general_dilated(
        jnp.asarray(x, "float32"), jnp.asarray(w, "float32"), (1, 1), padding, feature_group_count=groups,
        dimension_numbers=("NHWC", "HWIO", "NHWC"), precision="highest",
    )  # fmt: skip
    wide = np.asarray(y, np.float64)

    def run(x, w):
        got, *moments = conv_module.statistics(p, x, w)
        # A program does not give away shards of unequal sizes.
        return [got.max() if "uneven" in case else got, *moments]

    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(jnp.asarray(a, "float32"), NamedSharding(mesh, s)) for a, s in ((x, x_spec), (w, w_spec))
        ]
        compiled = jax.jit(run).lower(*placed).compile()
        got, mean, var = compiled(*placed)
    text = compiled.as_text()
    found = {
        k
        for k in ("all-gather", "all-to-all", "collective-permute", "all-reduce")
        if re.search(rf" {k}(-start)?\(", text)
    }
    merged = set() if case in ("inputs", "groups") else {"all-reduce"}
    assert found == set(exchanges) | merged
    assert ('custom_call_target="jaxconv_conv_statistics' in text) == (
        case not in ("inputs", "uneven rows", "rows, their ends again")
    )
    np.testing.assert_allclose(got, y.max() if "uneven" in case else y, rtol=1e-6)
    np.testing.assert_allclose(mean, wide.mean((0, 1, 2)), rtol=2e-6)
    np.testing.assert_allclose(var, wide.var((0, 1, 2)), rtol=2e-5)


def test_inside_shard_map_statistics_are_those_of_a_shard():
    if len(jax.devices()) < 2:
        pytest.skip("needs 2 devices")
    args = arrays(data("NHWC", "float32"), "float32")
    del args["residual"]
    x, rest = args.pop("x"), args
    f = functools.partial(one, "NHWC", "native", training=True)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def shard(x, rest):
        y, mean, _ = f({"x": x, **rest})
        return y, jax.lax.pmean(mean, "data")

    y, mean = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=(P("data"), P()), out_specs=(P("data"), P())))(x, rest)
    parts = [f({"x": x[i : i + 1], **rest}) for i in range(2)]
    np.testing.assert_allclose(y, jnp.concatenate([p[0] for p in parts]), rtol=0, atol=1e-5)
    np.testing.assert_allclose(mean, (parts[0][1] + parts[1][1]) / 2, rtol=0, atol=1e-5)


# ----------------------------------------------------------------------------------------------------------------------
# The kernel


def problem(dtype: str = "float32", **changed: Any) -> ConvProblem:
    """2x9x8 16->24: 144 pixels, no multiple of 64, in whole vectors of 16-bit channels."""
    shape = ("conv2d", dtype, 2, 16, 24, 1, (9, 8), (3, 3), (9, 8), (1, 1), ((1, 1), (1, 1)), (1, 1), True)
    made = ConvProblem(*shape, _problem.parse_precision("conv2d", "highest"))
    return dataclasses.replace(made, **changed)


def kernels(p: ConvProblem) -> list[ConvProblem]:
    """p with every algorithm that gives statistics on this device."""
    forced = [dataclasses.replace(p, algorithm=a) for a in CONV_ALGORITHMS]
    return [f for f in forced if _plan.supports("conv_statistics", f.algorithm, f, DEVICE) is None]


# A GPU has statistics from sm90 alone, which takes 16 bits and channels last.
KERNEL_DTYPES = [d for d in DTYPES if any(kernels(problem(d)))]
CASES = {
    "plain": {},
    "pointwise": dict(filter=(1, 1), padding=((0, 0),) * 2),
    "strided": dict(stride=(2, 2), out_spatial=(5, 4)),
    "many_images": dict(batch=37),  # 2664 pixels: tiles of any size, and a ragged last one
    "one_pixel": dict(batch=1, in_spatial=(1, 1), out_spatial=(1, 1)),
    "many_channels": dict(out_channels=520),  # 8 past two tiles of 256
    "groups": dict(groups=2, in_channels=128, out_channels=144),
}


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_statistics_of_integers(case, dtype):
    """y is exact; its statistics err by their own rounding and by that of combining parts, a few ulp."""
    p = problem(dtype, **CASES[case])
    filters = p.w_shape
    with types_of(dtype):
        # Every fourth filter element: sums stay integers that 16 bits hold.
        sparse = integers(1, filters, 1) * (integers(2, filters, 3) > 1)
        x, w = jnp.asarray(integers(0, p.x_shape, 1), dtype), jnp.asarray(sparse, dtype)
        expected = np.asarray(conv_module.fprop(dataclasses.replace(p, implementation="xla"), x, w), np.float64)
        for forced in kernels(p):
            y, mean, var = jax.jit(functools.partial(conv_module.statistics, forced))(x, w)
            assert_exact(y, expected, forced.algorithm)
            few = 8 * eps(mean.dtype.name)
            assert_within(mean, expected.mean((0, 1, 2)), few * np.abs(expected).max(), f"mean, {forced.algorithm}")
            assert_within(var, expected.var((0, 1, 2)), few * (expected**2).max(), f"variance, {forced.algorithm}")


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_statistics_are_those_of_what_was_rounded(dtype):
    """Results near 300 have an ulp of 2 in bfloat16: the variance is then mostly that of rounding."""
    p = problem(dtype, batch=9)
    x, w = normal(0, p.x_shape, dtype), 0.05 * normal(1, p.w_shape, dtype)
    x[..., 0], w[...] = 1, w.astype(jnp.dtype(dtype))
    w[1, 1, 0] += 300
    w = w.astype(jnp.dtype(dtype)).astype(np.float64)
    with types_of(dtype):
        for forced in kernels(p):
            y, mean, var = jax.jit(functools.partial(conv_module.statistics, forced))(
                jnp.asarray(x, dtype), jnp.asarray(w, dtype)
            )
            written = np.asarray(y, np.float64)
            assert_within(mean, written.mean((0, 1, 2)), 600 * eps(mean.dtype.name), forced.algorithm)
            expected = written.var((0, 1, 2))
            assert_within(var, expected, 64 * eps(mean.dtype.name) * (1 + expected), forced.algorithm)


@pytest.mark.parametrize("dtype", [d for d in KERNEL_DTYPES if d in ("float32", "float16")])
def test_variance_is_right_where_the_mean_is_far_from_zero(dtype):
    """1e4 deviations in float32; in float16, whose integers end at 2048, 1000 ones of 1."""
    large = {"float32": 1e4, "float16": 1000.0}[dtype]
    p = problem(dtype, batch=9, filter=(1, 1), padding=((0, 0),) * 2)
    x = integers(0, p.x_shape, 1)
    x[..., 0] = 1
    w = np.zeros(p.w_shape)
    w[0, 0, 0], w[0, 0, 1 + np.arange(24) % 15, np.arange(24)] = large, 1
    for forced in kernels(p):
        y, mean, var = jax.jit(functools.partial(conv_module.statistics, forced))(
            jnp.asarray(x, dtype), jnp.asarray(w, dtype)
        )
        expected = np.asarray(y, np.float64)
        ulp = eps("float32") * large
        assert_within(mean, expected.mean((0, 1, 2)), 2 * ulp, forced.algorithm)
        assert_within(var, expected.var((0, 1, 2)), 4 * ulp**2 + 64 * eps("float32"), forced.algorithm)


def test_statistics_have_derivatives_and_batch(x64):
    if PLATFORM != "cpu":
        pytest.skip("float64 has no native CUDA kernels")
    p = problem(
        "float64", in_spatial=(3, 2), out_spatial=(3, 2), in_channels=2, out_channels=3, implementation="native"
    )
    f = functools.partial(conv_module.statistics, p)
    x, w = jnp.asarray(normal(0, p.x_shape)), jnp.asarray(normal(1, p.w_shape))
    check_grads(f, (x, w), order=2)
    for axes in ((0, None), (None, 0), (0, 0)):
        args = [jnp.stack([a, 2 * a]) if axis == 0 else a for a, axis in zip((x, w), axes, strict=True)]
        together = jax.vmap(f, axes)(*args)
        alone = [f(*(a[i] if axis == 0 else a for a, axis in zip(args, axes, strict=True))) for i in range(2)]
        for t, a in zip(together, map(jnp.stack, zip(*alone, strict=True)), strict=True):
            np.testing.assert_allclose(t, a, rtol=0, atol=1e-12)


# ----------------------------------------------------------------------------------------------------------------------
# What runs


def test_native_runs_the_fused_kernel_and_no_statistics_pass():
    if PLATFORM != "cpu":
        pytest.skip("on a GPU bfloat16 and channels that are multiples of 8 get it")
    args = arrays(data("NHWC", "float32"), "float32")
    f = functools.partial(one, "NHWC", "native", training=True, activation="relu")
    assert calls(f, args) == {"conv_statistics": 1, "batchnorm_infer": 1}
    gradient = jax.grad(lambda args: (f(args)[0] ** 2).sum())
    assert calls(gradient, args) == {
        "conv_statistics": 1,
        "batchnorm_infer": 1,
        "batchnorm_backward": 1,
        "conv_dgrad": 1,
        "conv_wgrad": 1,
    }


def test_inference_is_one_convolution():
    args = arrays(data("NHWC", "float32"), "float32")
    f = functools.partial(one, "NHWC", "native", training=False, activation="relu")
    assert calls(f, args) == {"conv_add": 1}
    assert calls(f, {**args, "residual": None}) == {"conv": 1}


def test_explain_names_the_pair_its_parts_and_the_reason():
    args = arrays(data("NHWC", "float32"), "float32")
    found = jaxconv.explain(functools.partial(one, "NHWC", None, training=True), platform="cpu")(args)
    assert [(c.op, str(c.plan)) for c in found] == [
        ("conv_batchnorm", "calls[two]"),
        ("conv_fprop", "native[im2col]"),
        ("batchnorm_train", "xla"),
    ]
    assert found[0].plan.reason.startswith("a convolution, then a batch-norm: on the CPU")
    found = jaxconv.explain(functools.partial(one, "NHWC", "native", training=True), platform="cpu")(args)
    assert [c.op for c in found] == ["conv_batchnorm", "conv_statistics", "batchnorm_given", "batchnorm_infer"]


A100 = _plan.Device("cuda", "NVIDIA A100", (8, 0), 108)
PLANS = {
    "cpu": (_plan.Device("cpu", "cpu"), dict(implementation="native"), "statistics", "implementation='native'"),
    "sm90": (H200, dict(dtype="bfloat16", algorithm="sm90"), "statistics", "algorithm='sm90' was asked for"),
    "native": (H200, dict(dtype="bfloat16", implementation="native"), "statistics", "implementation='native'"),
    "float32": (H200, dict(dtype="float32", implementation="native"), "two", "bfloat16 and float16 results only"),
    "wide": (H200, dict(dtype="bfloat16", algorithm="sm90", out_channels=8512), "two", "a column of tiles of its own"),
    "other": (H200, dict(dtype="bfloat16", algorithm="implicit_gemm"), "two", "only sm90's epilogue"),
    "old": (A100, dict(dtype="bfloat16", implementation="native"), "two", "compute capability 9.0"),
    "mesh": (
        dataclasses.replace(H200, partitioned=True),
        dict(dtype="bfloat16", implementation="native"),
        "two",
        "cannot be told how a pair is split",
    ),
    "cpu16": (_plan.Device("cpu", "cpu"), dict(dtype="bfloat16", implementation="native"), "two", "behind the call"),
    "xla": (H200, dict(dtype="bfloat16", implementation="xla"), "two", "implementation='xla'"),
    "empty": (H200, dict(dtype="bfloat16", implementation="native", batch=0), "two", "nothing to compute"),
}


@pytest.mark.parametrize("case", PLANS)
def test_the_plan_takes_statistics_from_the_convolution_where_that_is_asked_and_possible(case, code_for_gpus):
    device, changed, choice, reason = PLANS[case]
    conv = problem(**changed)
    made = _plan.plan("conv_batchnorm", _problem.ConvBatchNormProblem(conv, None), device)
    assert (made.implementation, made.algorithm) == ("calls", choice)
    assert reason in made.reason
    if choice == "statistics":
        part = _plan.plan("conv_statistics", conv, device)
        assert part.implementation == "native"
        if device.platform == "cuda":
            assert part.algorithm == "sm90"
            assert part.workspace_bytes == 2 * -(-conv.batch * 72 // 128) * (conv.out_channels * 8 + 4)


def test_jaxconv_disable_reaches_the_pair(monkeypatch):
    monkeypatch.setenv("JAXCONV_DISABLE", "batchnorm")
    args = arrays(data("NHWC", "float32"), "float32")
    assert calls(functools.partial(one, "NHWC", "native", training=True), args) == {"conv_fprop": 1}


# ----------------------------------------------------------------------------------------------------------------------
# Errors


X, W, V = jnp.ones((2, 5, 5, 4)), jnp.ones((3, 3, 4, 6)), jnp.ones(6)
BAD = {
    "rank": (dict(w=jnp.ones((4, 6))), ValueError, "conv_batchnorm: w has 2 dimensions, expected 3, 4 or 5"),
    "channels": (dict(w=jnp.ones((3, 3, 5, 6))), ValueError, "conv_batchnorm: w expects 5 input channels, x has 4"),
    "scale": (dict(scale=jnp.ones(4)), ValueError, r"conv_batchnorm: scale has shape \(4,\), expected \(6,\)"),
    "residual": (dict(residual=X), ValueError, "expected .2, 5, 5, 6., that of the convolution's result"),
    "mean": (dict(running_mean=None), TypeError, "conv_batchnorm: running_mean must be an array, got None"),
    "layout": (dict(layout="NWC"), ValueError, "conv_batchnorm: layout='NWC' is unknown"),
    "momentum": (dict(momentum=2), ValueError, "conv_batchnorm: momentum=2 must be between 0 and 1"),
    "training": (dict(training=1), TypeError, "conv_batchnorm: training must be True or False"),
    "algorithm": (dict(algorithm="two_read"), ValueError, "conv_batchnorm: algorithm='two_read' is unknown"),
    "empty": (dict(x=X[:0]), ValueError, "training statistics need at least one element"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named(case):
    changed, kind, message = BAD[case]
    good = dict(x=X, w=W, scale=V, bias=V, running_mean=V, running_var=V, training=True)
    with pytest.raises(kind, match=message):
        jaxconv.conv_batchnorm(**{**good, **changed})

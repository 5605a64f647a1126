"""layernorm against numpy in float64: forward, backward, what runs, how it is split, and what a call refuses."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference as ref
import pytest
from helpers import (
    DEVICE,
    DTYPES,
    H200,
    NATIVE_IN_FLOAT64,
    PLATFORM,
    calls,
    label,
    normal,
    opcodes,
    poison,
    same_bits,
    types_of,
)
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from tolerance import assert_close, assert_within, eps

import jaxconv
from jaxconv import _plan
from jaxconv._core.activations import Activation
from jaxconv._plan import measured
from jaxconv._problem import GROUPNORM_ALGORITHMS, GroupNormProblem

OPS = ("groupnorm", "groupnorm_backward")

SHAPES = {
    (24,): "a vector",
    (5, 6): "channels that no vector divides",
    (7, 1): "one channel: everything is the bias",
    (3, 7, 16): "rows that no block divides",
    (2, 5, 7, 96): "a row in less than a warp's vectors of 16 bits",
    (2, 3, 3, 2, 40): "5-D",
    (3, 11, 192): "of float32 more than a vector a lane",
    (2, 197, 768): "a vision transformer's",
    (33, 1024): "the most channels of a warp",
    (4, 1032): "more",
}


def problem(shape: tuple[int, ...], dtype: str = "float32", **more: Any) -> GroupNormProblem:
    return GroupNormProblem("layernorm", dtype, shape, 1, 1e-5, rows=True, **more)


def algorithms(shape: tuple[int, ...], dtype: str, activation: str = "none") -> list[str]:
    """What can run it on this device."""
    p = problem(shape if len(shape) > 1 else (1, *shape), dtype, activation=Activation(activation))
    return [a for a in GROUPNORM_ALGORITHMS if all(_plan.supports(op, a, p, DEVICE) is None for op in OPS)]


@functools.cache
def data(shape: tuple[int, ...], dtype: str) -> dict[str, np.ndarray]:
    c = shape[-1]
    wide = "float64" if dtype == "float64" else "float32"
    # Rows and channels of different location and size: a mixed-up one cannot pass.
    rows = np.arange(np.prod(shape[:-1], dtype=int)).reshape(*shape[:-1], 1)
    x = normal(0, shape) * (1 + np.arange(c) % 3) * (1 + rows % 2) + (np.arange(c) % 5 - 2) + rows % 7
    x = x.astype(jnp.dtype(dtype)).astype(np.float64)
    return {"x": x, "scale": normal(1, (c,), wide), "bias": normal(2, (c,), wide), "dy": normal(3, shape, dtype)}


def arrays(given: dict[str, np.ndarray], dtype: str) -> list[jax.Array]:
    wide = "float64" if dtype == "float64" else "float32"
    return [jnp.asarray(v, wide if k in ("scale", "bias") else dtype) for k, v in given.items()]


def both(options: dict[str, Any], x: Any, scale: Any, bias: Any, dy: Any) -> tuple[Any, ...]:
    """(y, dx, dscale, dbias)."""
    y, back = jax.vjp(functools.partial(jaxconv.layernorm, **options), x, scale, bias)
    return y, *back(dy)


def expected(given: dict[str, np.ndarray], **options: Any) -> list[np.ndarray]:
    """[y, dx, dscale, dbias]: a group-norm of images of one pixel and one group."""
    shape, c = given["x"].shape, given["x"].shape[-1]
    rows = {k: a.reshape(-1, c) if a.ndim == len(shape) and k in ("x", "dy") else a for k, a in given.items()}
    known = {k: rows[k] for k in ("x", "scale", "bias")}
    gradients = ref.groupnorm_gradients(**rows, groups=1, **options)
    y = ref.groupnorm(**known, groups=1, **options)
    return [y.reshape(shape), gradients["x"].reshape(shape), gradients["scale"], gradients["bias"]]


def compare(shape: tuple[int, ...], dtype: str, activation: Any = None) -> None:
    given = data(shape, dtype)
    options = dict(epsilon=1e-3, activation=activation)
    known = expected(given, **options)
    pixels = given["x"].size // shape[-1]
    x_size, scale_size, dy_size = (np.abs(given[name]).max() for name in ("x", "scale", "dy"))
    sums = dy_size * x_size * np.sqrt(pixels)
    scales = (x_size * scale_size, dy_size * x_size * scale_size, sums, sums)
    with types_of(dtype):
        args = arrays(given, dtype)
        xla = jax.jit(functools.partial(both, {**options, "implementation": "xla"}))(*args)
        for what, a, e, scale in zip(("y", "dx", "dscale", "dbias"), xla, known, scales, strict=True):
            assert a.shape == e.shape, what
            assert_within(a, e, 64 * eps(dtype) * max(1.0, scale) * np.sqrt(shape[-1]), what)
        for algorithm in algorithms(shape, dtype, activation or "none"):
            f = jax.jit(functools.partial(both, {**options, "algorithm": algorithm}))
            poison()  # what a kernel leaves out is NaN
            for what, a, theirs, e, scale in zip(
                ("y", "dx", "dscale", "dbias"), f(*args), xla, known, scales, strict=True
            ):
                assert_close(a, theirs, e, pixels * shape[-1], f"{what}, {algorithm}", scale=scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_errs_no_more_than_twice_xla(shape, dtype):
    compare(shape, dtype)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_an_activation_errs_no_more_than_twice_xla(activation):
    compare((3, 7, 16), "float32", activation)


@pytest.mark.parametrize("choice", [dict(implementation="native"), dict(implementation="xla")], ids=str)
@pytest.mark.parametrize("mean", [1e3, 1e4])
def test_a_mean_far_above_the_deviation_does_not_cancel(mean, choice):
    """E[x^2] - E[x]^2 in float32 would be off by mean^2 eps, 6 or 600 % of the variance."""
    x = (mean + normal(0, (40, 192))).astype(np.float32).astype(np.float64)
    one, zero = np.ones(192), np.zeros(192)
    f = functools.partial(jaxconv.layernorm, epsilon=1e-5, **choice)
    args = [jnp.asarray(a, "float32") for a in (x, one, zero)]
    # The mean may be off by a few of its ulps, by the order of the sum; xhat is off by as much.
    bound = 4 * mean * eps("float32") + 1e-5
    assert_within(jax.jit(f)(*args), ref.groupnorm(x, one, zero, groups=1, epsilon=1e-5), bound)


@pytest.mark.parametrize("choice", [dict(implementation="native"), dict(implementation="xla")], ids=str)
def test_constant_rows_are_their_bias_and_have_no_gradient(choice):
    x = jnp.broadcast_to(jnp.arange(1.0, 5.0)[:, None], (4, 8))
    bias = jnp.arange(8.0)
    f = jax.jit(functools.partial(jaxconv.layernorm, **choice))
    np.testing.assert_array_equal(f(x, jnp.ones(8), bias), jnp.broadcast_to(bias, x.shape))
    dx = jax.jit(jax.grad(lambda x: (f(x, jnp.ones(8), bias) * 3).sum()))(x)
    np.testing.assert_array_equal(dx, np.zeros(x.shape))


@pytest.mark.parametrize("choice", [dict(implementation="native"), dict(implementation="xla")], ids=str)
def test_nan_and_infinity_stay_in_their_row(choice):
    x = jnp.asarray(normal(0, (4, 5, 8)), "float32").at[0, 1, 2].set(jnp.nan).at[3, 0, 6].set(jnp.inf)
    y = np.asarray(jaxconv.layernorm(x, **choice))
    bad = np.zeros((4, 5), bool)
    bad[0, 1] = bad[3, 0] = True
    np.testing.assert_array_equal(np.isnan(y).any(-1), bad)


def test_it_is_a_groupnorm_of_images_of_one_pixel():
    x, v = jnp.asarray(normal(0, (6, 5, 12)), "float32"), jnp.asarray(normal(1, (12,)), "float32")
    rows = jaxconv.layernorm(x, v, implementation="native")
    groups = jaxconv.groupnorm(x.reshape(30, 12), v, groups=1, implementation="native")
    np.testing.assert_allclose(rows, groups.reshape(x.shape), rtol=0, atol=32 * eps("float32"))


# ----------------------------------------------------------------------------------------------------------------------
# Derivatives and transforms


@pytest.mark.parametrize("implementation", [*NATIVE_IN_FLOAT64, "xla"])
@pytest.mark.parametrize("activation", [None, "silu"], ids=label)
def test_derivatives_in_both_modes_to_second_order(activation, implementation, x64):
    f = functools.partial(jaxconv.layernorm, activation=activation, implementation=implementation)
    args = [jnp.asarray(normal(i, shape)) for i, shape in enumerate(((2, 3, 4), (4,), (4,)), 5)]
    check_grads(jax.jit(f), args, order=2)


def test_the_backward_pass_keeps_x_and_two_numbers_a_row():
    x, v = jnp.ones((2, 5, 6, 8)), jnp.ones(8)
    _, back = jax.vjp(functools.partial(jaxconv.layernorm, implementation="native"), x, v, v)
    assert sorted({a.shape for a in jax.tree.leaves(back)}) == [(2, 5, 6), (2, 5, 6, 8), (8,)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_call_gives_the_same_bits_every_time(dtype):
    with types_of(dtype):
        args = arrays(data((8, 157, 96), dtype), dtype)
        for algorithm in algorithms((8, 157, 96), dtype):
            f = jax.jit(functools.partial(both, dict(algorithm=algorithm)))
            first = f(*args)
            assert all(same_bits(first, f(*args)) for _ in range(3))


@pytest.mark.parametrize("axis", [0, 1])
def test_vmap_over_rows_is_one_call_of_more_rows(axis):
    """Vectors under vmap, as libraries of single examples write layers: rows, not instances with a scale each."""
    x, v = jnp.asarray(normal(0, (6, 8)), "float32"), jnp.asarray(normal(1, (8,)), "float32")
    f = functools.partial(jaxconv.layernorm, implementation="native")
    mapped = jax.vmap(f, (axis, None, None), axis)
    turned = x if axis == 0 else x.T
    y = mapped(turned, v, v)
    np.testing.assert_array_equal(y if axis == 0 else y.T, f(x, v, v))
    (call,) = jaxconv.explain(mapped)(turned, v, v)
    assert call.problem.batch is None and call.problem.images == 6
    assert calls(jax.grad(lambda s: mapped(turned, s, v).sum()), v) == {"groupnorm": 1, "groupnorm_backward": 1}


def test_a_gradient_an_example_has_a_scale_an_instance():
    x, v = jnp.asarray(normal(0, (3, 5, 8)), "float32"), jnp.asarray(normal(1, (8,)), "float32")
    f = jax.grad(lambda s, x: (jaxconv.layernorm(x, s, implementation="native") ** 2).sum())
    each = jax.vmap(f, (None, 0))(v, x)
    np.testing.assert_allclose(each, jnp.stack([f(v, one) for one in x]), rtol=0, atol=256 * eps("float32"))


def test_symbolic_batches_go_to_xla():
    f = jax.jit(jaxconv.layernorm)
    exported = jax.export.export(f)(jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, t, 8"), jnp.float32))
    for n in (1, 3):
        x = jnp.asarray(normal(n, (n, 5, 8)), "float32")
        np.testing.assert_allclose(exported.call(x), f(x), rtol=0, atol=32 * eps("float32"))


# ----------------------------------------------------------------------------------------------------------------------
# What runs


def test_native_runs_its_custom_calls_and_nothing_of_xla():
    x, v = jnp.ones((4, 6, 5, 8)), jnp.ones(8)
    f = functools.partial(jaxconv.layernorm, implementation="native")
    assert calls(f, x, v, v) == {"groupnorm": 1}
    text = jax.jit(f).lower(x, v, v).compile().as_text()
    assert not any(f" {op}(" in text for op in ("reduce", "multiply", "fusion"))
    gradient = jax.grad(lambda x, s, b: (f(x, s, b)).sum(), (0, 1, 2))
    assert calls(gradient, x, v, v) == {"groupnorm": 1, "groupnorm_backward": 1}


@pytest.mark.skipif(PLATFORM != "cpu", reason="counts what XLA makes of it on a CPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_xla_fuses_it_as_it_does_flax(dtype):
    """One pass over a row that is held: no more fusions than of Flax's formula."""
    x, v = jnp.ones((32, 14, 14, 96), dtype), jnp.ones(96)

    def flax(x: Any, scale: Any, bias: Any) -> Any:
        wide = x.astype("float32")
        mean, square = wide.mean(-1, keepdims=True), (wide * wide).mean(-1, keepdims=True)
        var = jnp.maximum(square - mean * mean, 0)
        return ((wide - mean) * (jax.lax.rsqrt(var + 1e-6) * scale) + bias).astype(x.dtype)

    def fusions(f: Any) -> int:
        text = jax.jit(f).lower(x, v, v).compile().as_text()
        return text[text.index("ENTRY") :].count(" fusion(")

    assert fusions(jaxconv.layernorm) <= fusions(flax)


def test_a_problem_of_rows_says_so():
    p = problem((2, 3, 4, 8), "bfloat16")
    assert (p.images, p.pixels, p.groups, p.reduced, p.group_shape) == (24, 1, 1, 8, (2, 3, 4))
    assert str(p) == "2x3x4x8 rows bfloat16"
    assert measured.features("groupnorm", p)[0] == measured.features("groupnorm_backward", p)[0] == "layernorm"


@pytest.mark.parametrize("op", OPS)
def test_a_gpu_takes_rows_where_they_were_measured(op, code_for_gpus, monkeypatch):
    p = problem((64, 28, 28, 192), "bfloat16")
    plan = _plan.plan(op, problem((64, 28, 28, 192), "bfloat16", implementation="native"), H200)
    rows = _plan.supports(op, "rows", p, H200)
    assert plan.kernel == ("rows" if rows is None else "two_read")
    unmeasured = _plan.Device("cuda", "NVIDIA H900", (9, 0), 132)
    assert "near this problem on NVIDIA H900" in _plan.plan(op, p, unmeasured).reason
    # Nothing but its own kernel is compared with XLA, and nobody else is given it.
    assert {plan.kernel for plan in _plan.every(op, p, H200)} <= {"rows"}
    matrix = GroupNormProblem("groupnorm", "bfloat16", (64, 192), 1, 1e-5)
    assert "rows" not in {plan.kernel for plan in _plan.every(op, matrix, H200)}
    if rows is None:
        entry = dict(op="layernorm", kind=["bfloat16", False, True], coordinates=[15.6, 0.0, 7.58], case="convnext.28")
        monkeypatch.setattr(measured, "_learned", {})
        measured.learn("NVIDIA H900", [{**entry, "xla_ms": 0.2, "native_ms": {"rows": 0.1}}])
        plan = _plan.plan(op, p, unmeasured)
        assert (
            plan.kernel == "rows"
            and plan.reason == "2.00 times faster than XLA at convnext.28, the nearest case measured"
        )


def test_what_rows_cannot_run_is_refused():
    silu = Activation("silu")
    for p in (
        problem((4, 192), "bfloat16", activation=silu),
        problem((4, 20), "bfloat16"),
        problem((4, 2048), "bfloat16"),
        GroupNormProblem("groupnorm", "bfloat16", (4, 3, 192), 1, 1e-5),
        GroupNormProblem("groupnorm", "bfloat16", (4, 192), 2, 1e-5),
    ):
        for op in OPS:
            assert _plan.supports(op, "rows", p, H200) is not None, str(p)


@pytest.mark.skipif(PLATFORM != "cuda", reason="rows are a CUDA kernel's")
def test_rows_run_every_width():
    for dtype, item in (("float32", 4), ("bfloat16", 2), ("float16", 2)):
        for channels in range(16 // item, 1025, 16 // item):
            assert "rows" in algorithms((3, channels), dtype)
    for channels in (8, 16, 24, 256, 264, 512, 520, 1000, 1016):
        for dtype in DTYPES:
            compare((37, channels), dtype)


@pytest.mark.skipif(PLATFORM != "cpu", reason="a GPU has them")
def test_a_kernel_of_gpus_is_refused_on_cpus():
    with pytest.raises(ValueError, match=r"layernorm: algorithm='rows' cannot run .* it exists on CUDA only"):
        jaxconv.layernorm(X, algorithm="rows")


@pytest.mark.parametrize("names", ["layernorm", "groupnorm", "all"])
def test_it_can_be_disabled(names, monkeypatch):
    p = problem((4, 8), implementation="native")
    monkeypatch.setenv("JAXCONV_DISABLE", names)
    assert _plan.plan("groupnorm", p, DEVICE).reason == f"JAXCONV_DISABLE={names}"
    other = GroupNormProblem("groupnorm", "float32", (4, 8), 1, 1e-5, implementation="native")
    assert (_plan.plan("groupnorm", other, DEVICE).implementation == "native") == (names == "layernorm")


@pytest.mark.skipif(jax.device_count() < 4, reason="splits arrays over four devices")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda k: k.name)
@pytest.mark.parametrize("implementation", ["native", None])
@pytest.mark.parametrize(
    "spec",
    [P("data"), P(None, "data"), P("data", "model"), P(None, ("data", "model")), P(None, None, None, "data")],
    ids=str,
)
def test_rows_over_a_mesh_are_normalised_where_they_lie(spec, implementation, kind):
    """Only dscale and dbias cross the mesh. Channels that are split are gathered, or XLA's."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
    args = arrays(data((8, 4, 4, 8), "float32"), "float32")
    f = functools.partial(both, dict(implementation=implementation))
    whole = f(*args)
    with jax.set_mesh(mesh):
        big, small = jax.NamedSharding(mesh, spec), jax.NamedSharding(mesh, P())
        placed = [jax.device_put(a, big if a.ndim > 1 else small) for a in args]
        if kind == AxisType.Explicit and len(spec) == 4:
            placed[3] = jax.device_put(args[3], small)  # y's type: channels are whole
        compiled = jax.jit(f).lower(*placed).compile()
        parts = compiled(*placed)
    if len(spec) < 4:
        found = {*opcodes(compiled.as_text())}
        assert not {"all-gather", "all-to-all"} & found and "all-reduce" in found
        assert parts[0].sharding.is_equivalent_to(big, 4)
    for a, b in zip(parts, whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=64 * eps("float32") * max(1.0, float(jnp.abs(b).max())))


# ----------------------------------------------------------------------------------------------------------------------
# Errors

X, V = jnp.ones((2, 5, 6)), jnp.ones(6)
BAD = {
    "rank": (dict(x=jnp.ones(())), ValueError, "x has no dimensions, expected at least 1"),
    "x_type": (dict(x=[1.0]), TypeError, "x must be an array, got list"),
    "x_dtype": (dict(x=jnp.ones((2, 6), int)), TypeError, "x has dtype int32"),
    "scale": (dict(scale=jnp.ones(5)), ValueError, r"scale has shape \(5,\), expected \(6,\), one per channel"),
    "bias": (dict(bias=jnp.ones((1, 6))), ValueError, r"bias has shape \(1, 6\)"),
    "epsilon": (dict(epsilon=-1e-6), ValueError, "epsilon=-1e-06 must not be negative"),
    "activation": (dict(activation="swoosh"), ValueError, "activation='swoosh' is unknown"),
    "empty": (
        dict(x=jnp.ones((2, 5, 0)), scale=None, bias=None),
        ValueError,
        "x is empty: statistics need at least one element a row",
    ),
    "algorithm": (dict(algorithm="one_read"), ValueError, "algorithm='one_read' is unknown, expected None or one of"),
    "implementation": (dict(implementation="cudnn"), ValueError, "implementation='cudnn' is unknown"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_named(case):
    changed, kind, message = BAD[case]
    with pytest.raises(kind, match=f"layernorm: .*{message}"):
        jaxconv.layernorm(**{"x": X, "scale": V, "bias": V, **changed})


@pytest.mark.parametrize("x", [X[:0], X[:, :0]], ids=lambda x: str(x.shape))
def test_no_rows_are_no_mistake(x):
    assert jaxconv.layernorm(x, V, V).shape == x.shape
    dx, dscale = jax.grad(lambda x, s: jaxconv.layernorm(x, s).sum(), (0, 1))(x, V)
    assert dx.shape == x.shape and not dscale.any()


@pytest.mark.as_planned
def test_on_a_gpu_accelerate_takes_those_whose_plan_is_native(code_for_gpus):
    """The others stay as somebody wrote them: that jaxconv's formula is as fast in XLA was not measured there."""

    def f(x):
        wide = x.astype(jnp.float32)
        mean = wide.mean(-1, keepdims=True)
        var = ((wide - mean) ** 2).mean(-1, keepdims=True)
        return ((wide - mean) * jax.lax.rsqrt(var + 1e-6)).astype(x.dtype)

    for shape, dtype, native in (
        ((256, 14, 14, 384), "bfloat16", True),  # measured
        ((8192, 4096), "bfloat16", False),  # more channels than the kernel takes
        ((8192, 384), "float32", False),  # not measured
    ):
        with _plan.Device.assumed(H200):
            (found,) = jaxconv.accelerate(f).report(jax.ShapeDtypeStruct(shape, dtype))
        assert found.what == "layernorm" and bool(found.fused) == native, found
        assert native or "the GPU's plan is XLA" in found.why


@pytest.mark.as_planned
@pytest.mark.parametrize("first", (False, True), ids=("channels_last", "channels_first"))
def test_on_a_gpu_instance_norms_of_float32_or_channels_first_stay_where_their_plan_is_xla(code_for_gpus, first):
    def normalised(x, groups):
        pixels = (2, 3) if first else (1, 2)
        g, axes = x.astype(jnp.float32), pixels
        if groups < 256:
            shape = (groups, 256 // groups)
            g = g.reshape((2, *shape, 64, 64) if first else (2, 64, 64, *shape))
            axes = (2, 3, 4) if first else (1, 2, 4)
        mean, var = g.mean(axes, keepdims=True), g.var(axes, keepdims=True)
        return ((g - mean) * jax.lax.rsqrt(var + 1e-5)).reshape(x.shape).astype(x.dtype)

    for dtype, groups, taken in (("float32", 256, False), ("bfloat16", 256, not first), ("float32", 32, True)):
        x = jax.ShapeDtypeStruct((2, 256, 64, 64) if first else (2, 64, 64, 256), dtype)
        with _plan.Device.assumed(H200):
            (found,) = jaxconv.accelerate(functools.partial(normalised, groups=groups)).report(x)
        assert found.what == "groupnorm" and bool(found.fused) == taken, (dtype, groups, found)

"""groupnorm against numpy in float64: forward, backward, what runs, and what a call refuses."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference as ref
import pytest
from helpers import (
    A100,
    DEVICE,
    DTYPES,
    H200,
    NAMED_ACTIVATIONS,
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
from jaxconv._plan import groupnorm as planned
from jaxconv._problem import GROUPNORM_ALGORITHMS, GroupNormProblem

# (shape, groups)
SHAPES = {
    ((5, 6), 3): "2-D: a group is two numbers",
    ((3, 7, 12), 4): "3-D; a channel short of two vectors of 16 bits",
    ((2, 5, 7, 30), 5): "odd extents, no multiple of a vector",
    ((2, 4, 4, 64), 32): "four groups in a vector of 16 bits",
    ((3, 9, 11, 40), 4): "groups that begin and end inside a vector",
    ((2, 6, 5, 24), 24): "a group a channel",
    ((2, 3, 4, 5, 32), 1): "5-D; one group",
    ((1, 19, 17, 128), 32): "one image in several items, the last one short",
    ((2, 1, 1, 16), 8): "one pixel",
    ((3, 2, 2, 2320), 4): "more vectors in a pixel than threads in a block",
    ((70, 3, 3, 8), 2): "many images of few elements",
}
CHOICES: list[dict[str, Any]] = [dict(implementation="native"), dict(implementation="xla")]
if PLATFORM == "cuda":  # native is "resident"
    CHOICES.append(dict(algorithm="two_read"))


def problem(shape: tuple[int, ...], groups: int, dtype: str = "float32", **more: Any) -> GroupNormProblem:
    return GroupNormProblem("groupnorm", dtype, shape, groups, 1e-5, **more)


def algorithms(shape: tuple[int, ...], groups: int, dtype: str) -> list[str]:
    """What can run it on this device."""
    p = problem(shape, groups, dtype)
    ops = ("groupnorm", "groupnorm_backward")
    return [a for a in GROUPNORM_ALGORITHMS if all(_plan.supports(op, a, p, DEVICE) is None for op in ops)]


@functools.cache
def data(shape: tuple[int, ...], dtype: str) -> dict[str, np.ndarray]:
    c = shape[-1]
    wide = "float64" if dtype == "float64" else "float32"
    # Channels and images of different location and size: a mixed-up one cannot pass.
    x = normal(0, shape) * (1 + np.arange(c) % 3) + (np.arange(c) % 5 - 2)
    x = x * (1 + np.arange(shape[0]) % 2).reshape(-1, *[1] * (len(shape) - 1))
    x = x.astype(jnp.dtype(dtype)).astype(np.float64)
    return {"x": x, "scale": normal(1, (c,), wide), "bias": normal(2, (c,), wide), "dy": normal(3, shape, dtype)}


def arrays(given: dict[str, np.ndarray], dtype: str) -> list[jax.Array]:
    wide = "float64" if dtype == "float64" else "float32"
    return [jnp.asarray(v, wide if k in ("scale", "bias") else dtype) for k, v in given.items()]


def both(options: dict[str, Any], x: Any, scale: Any, bias: Any, dy: Any) -> tuple[Any, ...]:
    """(y, dx, dscale, dbias)."""
    y, back = jax.vjp(functools.partial(jaxconv.groupnorm, **options), x, scale, bias)
    return y, *back(dy)


def compare(shape: tuple[int, ...], groups: int, dtype: str, activation: Any) -> None:
    given = data(shape, dtype)
    options = dict(groups=groups, epsilon=1e-3, activation=activation)
    known = {k: given[k] for k in ("x", "scale", "bias")}
    gradients = ref.groupnorm_gradients(**given, **options)
    expected = [ref.groupnorm(**known, **options), *(gradients[name] for name in known)]
    pixels = given["x"].size // shape[-1]
    # What rounding acts on: |x| in x - mean, products dy * xhat in the sums of the backward pass (dx has these divided
    # by their number and times scale * rstd).
    x_size, scale_size, dy_size = (np.abs(given[name]).max() for name in ("x", "scale", "dy"))
    sums = dy_size * x_size * np.sqrt(pixels)
    scales = (x_size * scale_size, dy_size * x_size * scale_size, sums, sums)
    with types_of(dtype):
        args = arrays(given, dtype)
        xla = jax.jit(functools.partial(both, {**options, "implementation": "xla"}))(*args)
        for algorithm in algorithms(shape, groups, dtype):
            f = jax.jit(functools.partial(both, {**options, "algorithm": algorithm}))
            poison()  # what a kernel leaves out is NaN
            actual = f(*args)
            for what, a, theirs, e, scale in zip(
                ("y", "dx", "dscale", "dbias"), actual, xla, expected, scales, strict=True
            ):
                assert_close(a, theirs, e, pixels * shape[-1] // groups, f"{what}, {algorithm}", scale=scale)


# Each dtype has kernels of its own on a GPU; on the CPU 16-bit arrays are widened first.
TYPED = [
    (shape, groups, dtype)
    for dtype in DTYPES
    for shape, groups in SHAPES
    if dtype == "float32" or PLATFORM == "cuda" or shape in ((5, 6), (3, 9, 11, 40), (2, 5, 7, 30), (2, 6, 5, 24))
]


@pytest.mark.parametrize(("shape", "groups", "dtype"), TYPED, ids=str)
def test_every_shape_errs_no_more_than_twice_xla(shape, groups, dtype):
    compare(shape, groups, dtype, "silu")


@pytest.mark.parametrize("activation", NAMED_ACTIVATIONS, ids=label)
@pytest.mark.parametrize(
    ("shape", "groups"),
    [((3, 9, 11, 40), 4), pytest.param((2, 5, 7, 30), 5, marks=() if PLATFORM == "cuda" else pytest.mark.slow)],
    ids=str,
)
def test_every_activation_errs_no_more_than_twice_xla(shape, groups, activation):
    compare(shape, groups, "float32", activation)


@pytest.mark.skipif(PLATFORM != "cuda", reason="items are the CUDA kernels'")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 2, 7, 64])
def test_items_of_any_size_err_no_more_than_twice_xla(splits, dtype, monkeypatch):
    """Also where there are more items than pixels, and where all sums are taken before anything is written."""
    monkeypatch.setattr(planned, "_splits", lambda *_: splits)
    jax.clear_caches()
    for shape, groups in (((9, 7, 5, 64), 32), ((150, 3, 16), 2), ((3, 33, 40, 256), 32)):
        for activation in ("silu", "gelu_exact"):
            compare(shape, groups, dtype, activation)


# Bytes of a tile's channels, CTAs of its cluster: tiles that end within a pixel, an image that fits in no CTA, clusters
# some of whose CTAs have no pixel.
@pytest.mark.skipif(PLATFORM != "cuda", reason="tiles are the CUDA kernels'")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ctas", [1, 2, 4, 8])
def test_tiles_and_clusters_of_any_size_err_no_more_than_twice_xla(ctas, dtype, monkeypatch):
    if ctas > 1 and DEVICE.compute_capability != (9, 0):
        pytest.skip("clusters are of compute capability 9.0")
    item = jnp.dtype(dtype).itemsize
    cases = (
        ((2, 31, 23, 256), 32, (8 * item, 48 * item, 512)),  # the last: 365 KB or more
        ((3, 5, 200), 10, (40 * item, 80 * item)),
        ((2, 3, 9, 64), 32, (8 * item,)),
        ((5, 1, 24), 3, (8 * item,)),
        ((2, 70, 71, 32), 1, (32 * item,)),
    )
    for shape, groups, widths in cases:
        for width in widths:
            monkeypatch.setattr(planned, "_tile", lambda *_, width=width: (width, ctas))
            jax.clear_caches()
            assert "resident" in algorithms(shape, groups, dtype), (shape, width)
            for activation in ("silu", "gelu_exact"):
                compare(shape, groups, dtype, activation)


@pytest.mark.parametrize("choice", CHOICES, ids=lambda c: str(*c.values()))
@pytest.mark.parametrize("mean", [1e3, 1e4])
def test_a_mean_far_above_the_deviation_does_not_cancel(mean, choice):
    """E[x^2] - E[x]^2 in float32 would be off by mean^2 eps, 6 or 600 % of the variance."""
    x = (mean + normal(0, (2, 16, 15, 24))).astype(np.float32).astype(np.float64)
    one, zero = np.ones(24), np.zeros(24)
    expected = ref.groupnorm(x, one, zero, groups=4, epsilon=1e-5)
    f = functools.partial(jaxconv.groupnorm, groups=4, epsilon=1e-5, **choice)
    args = [jnp.asarray(a, "float32") for a in (x, one, zero)]
    # About a sample within 5 deviations of the mean: the variance and the mean's offset are sums of 1440 terms.
    bound = 5 * 26 * eps("float32") * np.sqrt(1440)
    assert_within(jax.jit(f)(*args), expected, bound)
    # The backward pass has the mean as float32 has it: half an ulp of it, and the gradients are at most 6 times xhat.
    dy = normal(1, x.shape)
    gradients = jax.jit(jax.grad(lambda *a: (f(*a) * jnp.asarray(dy, "float32")).sum(), (0, 1, 2)))(*args)
    how = dict(groups=4, epsilon=1e-5, activation=None)
    for (name, e), a in zip(ref.groupnorm_gradients(x, one, zero, dy, **how).items(), gradients, strict=True):
        ulps = 8 * (bound + mean * eps("float32"))
        assert_within(a, e, ulps * max(1.0, np.abs(e).max()), name)


@pytest.mark.skipif(
    PLATFORM != "cuda", reason="XLA takes its sample where it likes; the kernels take a median of three"
)
def test_one_outlier_is_not_what_moments_are_taken_about():
    x = 1e3 + normal(0, (2, 64, 64, 32))
    x[:, 0, 0] = 0
    x = x.astype(np.float32).astype(np.float64)
    one, zero = np.ones(32), np.zeros(32)
    f = functools.partial(jaxconv.groupnorm, groups=8, epsilon=1e-5, implementation="native")
    actual = f(*(jnp.asarray(a, "float32") for a in (x, one, zero)))
    assert_within(actual, ref.groupnorm(x, one, zero, groups=8, epsilon=1e-5), 1e-5)


@pytest.mark.parametrize("choice", CHOICES, ids=lambda c: str(*c.values()))
def test_constant_groups_are_their_bias_and_have_no_gradient(choice):
    x = jnp.broadcast_to(jnp.arange(1.0, 5.0), (2, 4, 4, 4))
    bias = jnp.asarray([1.0, -2.0, 3.0, 0.5])
    f = jax.jit(functools.partial(jaxconv.groupnorm, groups=4, **choice))
    np.testing.assert_array_equal(f(x, jnp.ones(4), bias), jnp.broadcast_to(bias, x.shape))
    dx = jax.jit(jax.grad(lambda x: (f(x, jnp.ones(4), bias) * 3).sum()))(x)
    np.testing.assert_array_equal(dx, np.zeros(x.shape))


@pytest.mark.parametrize("choice", CHOICES, ids=lambda c: str(*c.values()))
def test_nan_and_infinity_stay_in_their_group(choice):
    x = jnp.asarray(normal(0, (2, 3, 5, 8)), "float32").at[0, 1, 2, 1].set(jnp.nan).at[1, 0, 0, 6].set(jnp.inf)
    y = np.asarray(jaxconv.groupnorm(x, groups=4, activation="silu", **choice)).reshape(2, 15, 4, 2)
    bad = np.zeros((2, 4), bool)
    bad[0, 0] = bad[1, 3] = True
    np.testing.assert_array_equal(np.isnan(y).any((1, 3)), bad)


def test_no_scale_and_no_bias_stand_for_ones_and_zeros():
    x = jnp.asarray(normal(0, (2, 5, 4)), "float32")
    bare = jaxconv.groupnorm(x, groups=2)
    assert same_bits(bare, jaxconv.groupnorm(x, jnp.ones(4), jnp.zeros(4), groups=2))


# ----------------------------------------------------------------------------------------------------------------------
# Derivatives


@pytest.mark.parametrize("implementation", [*NATIVE_IN_FLOAT64, "xla"])
@pytest.mark.parametrize(
    "activation",
    [None, "silu", *(pytest.param(a, marks=pytest.mark.slow) for a in ("relu6", ("leaky_relu", -0.5)))],
    ids=label,
)
def test_derivatives_in_both_modes_to_second_order(activation, implementation, x64):
    f = functools.partial(jaxconv.groupnorm, groups=2, activation=activation, implementation=implementation)
    args = [jnp.asarray(normal(i, shape)) for i, shape in enumerate(((2, 3, 4), (4,), (4,)), 5)]
    check_grads(jax.jit(f), args, order=2)


def test_a_gradient_is_the_same_whichever_others_are_asked_for():
    given = dict(zip(("x", "scale", "bias", "dy"), arrays(data((3, 9, 11, 40), "float32"), "float32"), strict=True))
    dy = given.pop("dy")

    def gradients(args: Any, some: tuple[str, ...]) -> Any:
        f = functools.partial(jaxconv.groupnorm, groups=4, activation="silu", implementation="native")
        return jax.vjp(lambda of: f(**{**args, **of}), {name: args[name] for name in some})[1](dy)[0]

    run = jax.jit(gradients, static_argnames="some")
    together = run(given, some=("x", "scale", "bias"))
    for some in (("x",), ("scale",), ("scale", "bias")):
        for name, value in run(given, some=some).items():
            assert same_bits(value, together[name]), f"d{name} of {some}"


def test_the_backward_pass_keeps_x_and_two_numbers_a_group():
    x, v = jnp.ones((2, 5, 6, 8)), jnp.ones(8)
    f = functools.partial(jaxconv.groupnorm, groups=4, activation="gelu", implementation="native")
    _, back = jax.vjp(f, x, v, v)
    assert sorted({a.shape for a in jax.tree.leaves(back)}) == [(2, 4), (2, 5, 6, 8), (8,)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_call_gives_the_same_bits_every_time(dtype):
    with types_of(dtype):
        args = arrays(data((8, 17, 9, 24), dtype), dtype)
        for algorithm in algorithms((8, 17, 9, 24), 6, dtype):
            f = jax.jit(functools.partial(both, dict(groups=6, activation="silu", algorithm=algorithm)))
            first = f(*args)
            assert all(same_bits(first, f(*args)) for _ in range(3))


@pytest.mark.skipif(PLATFORM != "cuda", reason="there is one kernel on the CPU")
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_read_and_interleaved_give_the_same_bits(dtype):
    for shape, groups in (((64, 32, 32, 128), 32), ((3, 9, 11, 40), 4), ((600, 8, 8, 64), 8)):
        args = arrays(data(shape, dtype), dtype)
        run = [
            jax.jit(functools.partial(both, dict(groups=groups, activation="silu", algorithm=algorithm)))(*args)
            for algorithm in ("two_read", "interleaved")
        ]
        assert same_bits(*run), shape


# ----------------------------------------------------------------------------------------------------------------------
# What runs


def test_native_runs_its_custom_calls_and_nothing_of_xla():
    x, v = jnp.ones((4, 6, 5, 8)), jnp.ones(8)
    f = functools.partial(jaxconv.groupnorm, groups=4, activation="gelu", implementation="native")
    assert calls(f, x, v, v) == {"groupnorm": 1}
    text = jax.jit(f).lower(x, v, v).compile().as_text()
    assert not any(f" {op}(" in text for op in ("reduce", "multiply", "tanh", "fusion"))
    gradient = jax.grad(lambda x, s, b: (f(x, s, b)).sum(), (0, 1, 2))
    assert calls(gradient, x, v, v) == {"groupnorm": 1, "groupnorm_backward": 1}


def test_xla_runs_no_custom_call_of_ours():
    x, v = jnp.ones((4, 8)), jnp.ones(8)
    f = functools.partial(jaxconv.groupnorm, groups=4, implementation="xla")
    assert calls(jax.grad(lambda x, s, b: f(x, s, b).sum(), (0, 1, 2)), x, v, v) == {}


@pytest.mark.parametrize("op", ["groupnorm", "groupnorm_backward"])
def test_a_plan_is_made_of_whole_steps_and_is_native_where_that_is_asked_for(op, code_for_gpus):
    silu = Activation("silu")
    large = problem((64, 64, 64, 128), 32, "bfloat16", activation=silu)
    found = _plan.plan(op, large, H200)
    assert found.implementation == "native" and "faster than XLA at ddpm.64" in found.reason
    found = _plan.plan(op, dataclasses.replace(large, activation=Activation("none")), H200)
    assert found.implementation == "xla" and "was measured near this problem on NVIDIA H200" in found.reason
    found = _plan.plan(op, large, dataclasses.replace(H200, kind="NVIDIA H900"))
    assert found.implementation == "xla" and "was measured near this problem on NVIDIA H900" in found.reason
    plan = _plan.plan(op, dataclasses.replace(large, implementation="native"), H200)
    assert (plan.implementation, plan.kernel) == ("native", "resident")
    plan = _plan.plan(op, dataclasses.replace(large, algorithm="interleaved"), H200)
    assert (plan.implementation, plan.kernel) == ("native", "interleaved")
    assert plan.chunk >= plan.splits > 1 and -(-64 * 64 // plan.splits) % 16 == 0  # 16 pixels a step
    huge = problem((2, 512, 512, 256), 32, "bfloat16", activation=silu, implementation="native")
    assert _plan.plan(op, huge, H200).kernel == "interleaved"
    odd = problem((2, 512, 512, 255), 51, "bfloat16", activation=silu, implementation="native")
    assert _plan.plan(op, odd, H200).kernel == "two_read"


@pytest.mark.parametrize("op", ["groupnorm", "groupnorm_backward"])
@pytest.mark.parametrize("device", [H200, A100], ids=lambda d: d.kind)
def test_a_tile_is_whole_groups_that_fit_in_a_cluster(op, device):
    read = 2 if op == "groupnorm_backward" else 1
    for shape, groups in (((64, 64, 64, 128), 32), ((8, 64, 64, 320), 32), ((64, 8, 8, 512), 32), ((2, 1, 1, 16), 8)):
        for dtype, item in (("bfloat16", 2), ("float32", 4)):
            plan = _plan.made(op, "resident", problem(shape, groups, dtype), device)
            assert isinstance(plan, _plan.Plan)
            assert plan.chunk % (shape[-1] // groups * item) == 0 and plan.chunk % 16 == 0
            assert plan.splits == 1 or device == H200
            if device == H200:
                assert -(-shape[1] * shape[-2] // plan.splits) * plan.chunk * read <= 227 * 1024


def test_what_resident_cannot_run_is_said():
    for shape, groups, why in (
        ((2, 4, 4, 20), 2, "20 channels are no multiple of 8"),
        ((2, 4, 4, 512), 1, "whole groups in 512 bytes of channels, which are here 1024"),
    ):
        assert why in _plan.supports("groupnorm", "resident", problem(shape, groups, "bfloat16"), H200)


def test_a_plan_of_many_channels_is_refused_with_its_shared_memory():
    for channels, taken in ((4096, False), (2560, True)):
        p = problem((2, 4, 4, channels), 32, "bfloat16")
        why = _plan.supports("groupnorm", "two_read", p, H200)
        assert (why is None) == taken and (taken or "bytes of shared memory of 49152" in why)
    p = problem((2, 4, 4, 20), 2, "bfloat16")
    assert "20 channels are no multiple of 8" in _plan.supports("groupnorm", "interleaved", p, H200)


def test_symbolic_batches_go_to_xla():
    f = jax.jit(functools.partial(jaxconv.groupnorm, groups=2, activation="silu"))
    shape = jax.export.symbolic_shape("b, 5, 4, 8")
    exported = jax.export.export(f)(jax.ShapeDtypeStruct(shape, jnp.float32))
    for n in (1, 3):
        x = jnp.asarray(normal(n, (n, 5, 4, 8)), "float32")
        np.testing.assert_allclose(exported.call(x), f(x), rtol=0, atol=32 * eps("float32"))


@pytest.mark.skipif(jax.device_count() < 4, reason="splits arrays over four devices")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda k: k.name)
@pytest.mark.parametrize("implementation", ["native", None])
@pytest.mark.parametrize("spec", [P("data"), P(None, "data"), P(None, None, None, "data")], ids=str)
def test_a_batch_over_a_mesh_is_normalised_where_it_lies(spec, implementation, kind):
    """Only dscale and dbias cross the mesh. What is split otherwise is gathered, or XLA's."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    args = arrays(data((8, 4, 4, 8), "float32"), "float32")
    f = functools.partial(both, dict(groups=4, activation="silu", implementation=implementation))
    whole = f(*args)
    with jax.set_mesh(mesh):
        big, small = jax.NamedSharding(mesh, spec), jax.NamedSharding(mesh, P())
        placed = [jax.device_put(a, big if a.ndim > 1 else small) for a in args]
        if kind == AxisType.Explicit and spec != P("data"):
            placed[3] = jax.device_put(args[3], small)  # y's type: only images stay split
        compiled = jax.jit(f).lower(*placed).compile()
        parts = compiled(*placed)
    if spec == P("data"):
        assert not {"all-gather", "all-to-all"} & {*opcodes(compiled.as_text())}
        assert parts[0].sharding.spec[0] == "data"
    for a, b in zip(parts, whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=64 * eps("float32") * max(1.0, float(jnp.abs(b).max())))


# ----------------------------------------------------------------------------------------------------------------------
# Errors

X, V = jnp.ones((2, 5, 6)), jnp.ones(6)
BAD = {
    "rank": (dict(x=jnp.ones(6)), ValueError, "x has 1 dimensions, expected at least 2"),
    "x_type": (dict(x=[1.0]), TypeError, "x must be an array, got list"),
    "x_dtype": (dict(x=jnp.ones((2, 6), int)), TypeError, "x has dtype int32"),
    "groups": (dict(groups=4), ValueError, "groups=4 must be positive and divide the 6 channels"),
    "no_groups": (dict(groups=0), ValueError, "groups=0 must be positive"),
    "groups_type": (dict(groups=2.0), TypeError, "groups must be an integer"),
    "scale": (dict(scale=jnp.ones(5)), ValueError, r"scale has shape \(5,\), expected \(6,\), one per channel"),
    "bias": (dict(bias=jnp.ones((1, 6))), ValueError, r"bias has shape \(1, 6\)"),
    "epsilon": (dict(epsilon=-1e-6), ValueError, "epsilon=-1e-06 must not be negative"),
    "epsilon_nan": (dict(epsilon=float("nan")), ValueError, "epsilon=nan must not be"),
    "activation": (dict(activation="swoosh"), ValueError, "activation='swoosh' is unknown"),
    "empty": (dict(x=jnp.ones((2, 0, 6))), ValueError, "x is empty: statistics need at least one element a group"),
    "algorithm": (dict(algorithm="one_read"), ValueError, "algorithm='one_read' is unknown, expected None or one of"),
    "implementation": (dict(implementation="cudnn"), ValueError, "implementation='cudnn' is unknown"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_named(case):
    changed, kind, message = BAD[case]
    with pytest.raises(kind, match=f"groupnorm: .*{message}"):
        jaxconv.groupnorm(**{"x": X, "scale": V, "bias": V, "groups": 3, **changed})


def test_an_empty_batch_is_no_mistake():
    assert jaxconv.groupnorm(X[:0], V, V, groups=2, activation="silu").shape == (0, 5, 6)
    dx, dscale = jax.grad(lambda x, s: jaxconv.groupnorm(x, s, groups=2).sum(), (0, 1))(X[:0], V)
    assert dx.shape == (0, 5, 6) and not dscale.any()


def test_parameters_may_be_narrower_than_float32_but_not_wider(x64):
    x, v = jnp.asarray(normal(0, (2, 5, 6)), "bfloat16"), jnp.asarray(normal(1, (6,)), "bfloat16")
    narrow = jaxconv.groupnorm(x, v, groups=2)
    assert same_bits(narrow, jaxconv.groupnorm(x, v.astype("float32"), groups=2))
    with pytest.raises(TypeError, match="scale has dtype float64, expected float32 for x of bfloat16"):
        jaxconv.groupnorm(x, v.astype("float64"), groups=2)


@pytest.mark.parametrize(
    ("dtype", "activation", "barriers"), [("float32", "silu", 1), ("bfloat16", "silu", 2), ("bfloat16", "relu", 1)]
)
def test_xla_sums_up_what_it_has_summed_up(dtype, activation, barriers):
    """Without a barrier it reads x and dy once more for dscale and dbias; dz of 16 bits with an exponential is kept."""
    x = jnp.ones((2, 4, 4, 8), dtype)

    def loss(x, scale, bias):
        y = jaxconv.groupnorm(x, scale, bias, groups=2, activation=activation, implementation="xla")
        return (y.astype(jnp.float32) ** 2).sum()

    text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, jnp.ones(8), jnp.ones(8)).as_text()
    assert text.count("stablehlo.optimization_barrier") == barriers

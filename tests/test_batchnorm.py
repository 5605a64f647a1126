"""batchnorm against numpy in float64: training, inference and the backward pass."""

from __future__ import annotations

import concurrent.futures
import dataclasses
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
    NAMED_ACTIVATIONS,
    NATIVE_IN_FLOAT64,
    PLATFORM,
    calls,
    label,
    normal,
    same_bits,
    types_of,
)
from jax.test_util import check_grads
from tolerance import assert_close, assert_within, eps

import jaxconv
from jaxconv import _plan
from jaxconv._core.activations import parse
from jaxconv._ops.batchnorm import backward, dx_of_sums, moments
from jaxconv._plan import batchnorm as team
from jaxconv._problem import BATCHNORM_ALGORITHMS, BatchNormProblem

# (shape, channel_axis)
SHAPES = {
    ((5, 3), -1): "2-D, odd extents below any vector",
    ((64, 32), -1): "2-D, whole vectors",
    ((2, 7, 9), -1): "3-D, channels last, C=9",
    ((3, 5, 17), 1): "3-D, channels in the middle; inner extent one past 16",
    ((2, 6, 5, 19), -1): "4-D NHWC, C no multiple of a vector",
    ((4, 8, 8, 64), -1): "4-D NHWC, whole vectors and 256 elements a channel",
    ((3, 7, 6, 5), 1): "4-D NCHW, inner extent 30",
    ((4, 33, 16, 16), 1): "4-D NCHW, whole vectors inside; one channel past 32",
    ((2, 3, 4, 5, 6), -1): "5-D, channels last",
    ((2, 3, 4, 5, 6), 1): "5-D, channels first",
    ((6, 40), 0): "channels on the first axis: no outer extent",
    ((1, 257, 1), 2): "one channel of 257 elements",
    ((2, 515, 4), -1): "1030 elements a channel over few channels: several blocks share one",
    ((17, 12, 7, 7), 1): "4-D NCHW, images of 49 elements: most vectors' images begin and end inside a vector",
    ((9, 7, 7, 96), -1): "4-D NHWC, 96 channels: half of a 128-byte group's second lanes are idle in 16 bits",
    ((9, 7, 7, 100), -1): "4-D NHWC, 100 channels: whole vectors in float32 only, 25 threads across",
    ((5, 7, 7, 336), -1): "4-D NHWC, 336 channels: two tiles of 21 vectors in 16 bits",
}
PARAMS = ("scale", "bias", "running_mean", "running_var")


def problem(shape: tuple[int, ...], axis: int, dtype: str, training: bool) -> BatchNormProblem:
    wide = "float64" if dtype == "float64" else "float32"
    x, v = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct((shape[axis],), wide)
    return BatchNormProblem.infer(
        "batchnorm",
        x,
        v,
        v,
        v,
        v,
        None,
        training=training,
        momentum=0.9,
        epsilon=1e-5,
        activation=None,
        channel_axis=axis,
        algorithm=None,
        implementation=None,
    )


def algorithms(shape: tuple[int, ...], axis: int, dtype: str, training: bool) -> list[str]:
    """What can run it on this device."""
    p = problem(shape, axis, dtype, training)
    ops = ("batchnorm_train", "batchnorm_backward") if training else ("batchnorm_infer",)
    return [a for a in BATCHNORM_ALGORITHMS if all(_plan.supports(op, a, p, DEVICE) is None for op in ops)]


@functools.cache
def data(shape: tuple[int, ...], axis: int, dtype: str) -> dict[str, np.ndarray]:
    c = shape[axis]
    wide = "float64" if dtype == "float64" else "float32"
    along = [-1 if a == axis % len(shape) else 1 for a in range(len(shape))]
    # Channels of different location and size: a mixed-up channel cannot pass.
    x = normal(0, shape) * (1 + np.arange(c).reshape(along) % 3) + (np.arange(c) % 5 - 2).reshape(along)
    x = x.astype(jnp.dtype(dtype)).astype(np.float64)
    rounded = {name: normal(i, (c,), wide) for i, name in enumerate(PARAMS, 1)}
    rounded["running_var"] = (0.5 + np.abs(rounded["running_var"])).astype(wide).astype(np.float64)
    return {"x": x, **rounded, "residual": normal(8, shape, dtype), "dy": normal(9, shape, dtype)}


def arrays(given: dict[str, np.ndarray], dtype: str) -> dict[str, jax.Array]:
    wide = "float64" if dtype == "float64" else "float32"
    return {k: jnp.asarray(v, wide if k in PARAMS else dtype) for k, v in given.items()}


def numpy_gradients(
    given: dict[str, np.ndarray], axis: int, training: bool, epsilon: float, activation: Any, residual: bool
) -> dict[str, np.ndarray]:
    x, scale, dy = given["x"], given["scale"], given["dy"]
    axis %= x.ndim
    axes = tuple(a for a in range(x.ndim) if a != axis)
    s = [-1 if a == axis else 1 for a in range(x.ndim)]
    mean, var = (x.mean(axes), x.var(axes)) if training else (given["running_mean"], given["running_var"])
    rstd = 1 / np.sqrt(var + epsilon)
    xhat = (x - mean.reshape(s)) * rstd.reshape(s)
    z = xhat * scale.reshape(s) + given["bias"].reshape(s) + (given["residual"] if residual else 0)
    dz = dy * ref.slope(activation, z)
    dscale, dbias = (dz * xhat).sum(axes), dz.sum(axes)
    n = x.size // x.shape[axis]
    centred = dz - dbias.reshape(s) / n - xhat * dscale.reshape(s) / n if training else dz
    gradients = {"x": (scale * rstd).reshape(s) * centred, "scale": dscale, "bias": dbias}
    return {**gradients, "residual": dz} if residual else gradients


def run(options: dict[str, Any], names: tuple[str, ...], given: dict[str, jax.Array]) -> Any:
    """(y, running mean, running variance) and the gradients of `names` for the cotangent dy of y."""

    def f(varied: dict[str, jax.Array]) -> Any:
        now = {**given, **varied}
        now = {k: v for k, v in now.items() if k != "dy" and (k != "residual" or "residual" in names)}
        return jaxconv.batchnorm(**now, **options)

    (y, mean, var), back = jax.vjp(f, {name: given[name] for name in names})
    (gradients,) = back((given["dy"], jnp.zeros_like(mean), jnp.zeros_like(var)))
    return {"y": y, "mean": mean, "var": var}, gradients


def compare(
    shape: Any,
    axis: int,
    dtype: str,
    training: bool,
    activation: Any,
    residual: bool,
    only: tuple[str, ...] = BATCHNORM_ALGORITHMS,
) -> None:
    given = data(shape, axis, dtype)
    names = ("x", "scale", "bias", *(("residual",) if residual else ()))
    options = dict(training=training, momentum=0.9, epsilon=1e-3, activation=activation, channel_axis=axis)
    known = {k: v for k, v in given.items() if k != "dy" and (residual or k != "residual")}
    expected = dict(zip(("y", "mean", "var"), ref.batchnorm(**known, **options), strict=True))
    expected_gradients = numpy_gradients(given, axis, training, 1e-3, activation, residual)
    n = given["x"].size // shape[axis]
    x_size, scale_size, dy_size = (np.abs(given[name]).max() for name in ("x", "scale", "dy"))
    # What rounding acts on: |x| in x - mean, its square in the variance, products dy * xhat in the sums of the backward
    # pass (dx has these divided by n and times scale * rstd).
    scales = {"y": x_size * scale_size, "mean": x_size, "var": x_size**2}
    sums = dy_size * x_size * np.sqrt(n)
    gradient_scales = {"x": dy_size * x_size * scale_size, "scale": sums, "bias": sums, "residual": dy_size}
    with types_of(dtype):
        args = arrays(given, dtype)
        xla, xla_gradients = jax.jit(functools.partial(run, {**options, "implementation": "xla"}, names))(args)
        for algorithm in algorithms(shape, axis, dtype, training):
            if algorithm not in only:
                continue
            forced = {**options, "algorithm": algorithm}
            actual, gradients = jax.jit(functools.partial(run, forced, names))(args)
            for what, value in expected.items():
                assert_close(actual[what], xla[what], value, n, f"{what}, {algorithm}", scale=scales[what])
            for name, value in expected_gradients.items():
                what = f"d{name}, {algorithm}"
                assert_close(gradients[name], xla_gradients[name], value, n, what, scale=gradient_scales[name])


# Each dtype has kernels of its own on a GPU. On the CPU 16-bit arrays are widened first and float64 is float32's
# template, so one shape in each memory order shows them.
TYPED = [
    (shape, axis, dtype)
    for dtype in DTYPES
    for shape, axis in SHAPES
    if dtype == "float32" or PLATFORM == "cuda" or shape in ((2, 6, 5, 19), (3, 7, 6, 5))
]


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize(("shape", "axis", "dtype"), TYPED, ids=str)
def test_every_shape_and_channel_axis_errs_no_more_than_twice_xla(shape, axis, dtype, training):
    """Forward, running statistics and backward, with ReLU and residual: the form that networks train."""
    compare(shape, axis, dtype, training, "relu", True)


@pytest.mark.parametrize("activation", ["relu", "silu"])
@pytest.mark.parametrize(
    ("shape", "axis"), [((64, 7, 7, 64), -1), ((2, 6, 5, 19), -1), ((16, 20, 16, 16), 1), ((3, 7, 6, 5), 1)], ids=str
)
def test_a_gradient_is_the_same_whichever_others_are_asked_for(shape, axis, activation):
    """With ReLU and a residual, kernels may pass dresidual from one walk over the tensor to the next."""
    given = data(shape, axis, "float32")
    options = dict(training=True, momentum=0.9, epsilon=1e-3, activation=activation, channel_axis=axis)

    def gradients(args: Any, some: tuple[str, ...], algorithm: str) -> Any:
        def y(of: dict[str, Any]) -> Any:
            v = {**args, **of}
            norm = (v[name] for name in ("x", "scale", "bias", "running_mean", "running_var"))
            return jaxconv.batchnorm(*norm, residual=v["residual"], algorithm=algorithm, **options)[0]

        return jax.vjp(y, {name: args[name] for name in some})[1](args["dy"])[0]

    with types_of("float32"):
        args = arrays(given, "float32")
        for algorithm in algorithms(shape, axis, "float32", True):
            f = jax.jit(functools.partial(gradients, algorithm=algorithm), static_argnames="some")
            together = f(args, some=("x", "scale", "bias", "residual"))
            for some in (("x", "scale", "bias"), ("residual",), ("x", "residual"), ("scale",)):
                for name, value in f(args, some=some).items():
                    assert same_bits(value, together[name]), f"d{name} of {some}, {algorithm}"


def by_halves(
    p: BatchNormProblem, given: dict[str, jax.Array], pass_dz: bool
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """dscale, dbias, dx, dresidual as two devices have them, each with half of the first axis."""
    epsilon, axes = p.epsilon, tuple(a for a in range(len(p.shape)) if a != p.channel_axis)
    wide = given["x"].astype(p.param_dtype)
    statistics = jnp.mean(wide, axes), jax.lax.rsqrt(jnp.var(wide, axes) + epsilon)
    half = dataclasses.replace(p, shape=(p.shape[0] // 2, *p.shape[1:]), want_dresidual=True)
    big = [jnp.split(given[name], 2) for name in ("x", "dy", "residual")]
    small = given["scale"], given["bias"], *statistics
    walked = [
        backward(dataclasses.replace(half, want_dx=False), x, dy, *small, *[r] * p.residual)
        for x, dy, r in zip(*big, strict=True)
    ]
    sums = [walked[0][i] + walked[1][i] for i in range(2)]
    q = dataclasses.replace(half, count=p.reduced, dz=pass_dz)
    dx = [
        dx_of_sums(q, x, dz if pass_dz else dy, *small, *sums, *[r] * (p.residual and not pass_dz))
        for x, dy, r, (_, _, dz) in zip(*big, walked, strict=True)
    ]
    return *sums, jnp.concatenate(dx), jnp.concatenate([dz for _, _, dz in walked])


def compare_halves(shape: Any, axis: int, dtype: str, activation: Any, residual: bool) -> None:
    given = data(shape, axis, dtype)
    p = dataclasses.replace(
        problem(shape, axis, dtype, True), epsilon=1e-3, residual=residual, activation=parse("", activation)
    )
    expected = numpy_gradients(given, axis, True, 1e-3, activation, residual)
    n = p.reduced
    x_size, scale_size, dy_size = (np.abs(given[name]).max() for name in ("x", "scale", "dy"))
    sums = dy_size * x_size * np.sqrt(n)
    with types_of(dtype):
        args = arrays(given, dtype)
        for pass_dz in (False, True):
            found = [
                jax.jit(functools.partial(by_halves, dataclasses.replace(p, implementation=i), pass_dz=pass_dz))(
                    given=args
                )
                for i in ("native", "xla")
            ]
            for i, (name, scale) in enumerate((("scale", sums), ("bias", sums), ("x", dy_size * x_size * scale_size))):
                what = f"d{name}{' of dz' * pass_dz}"
                assert_close(found[0][i], found[1][i], expected[name], n, what, scale=scale)
            if residual:
                assert_close(found[0][3], found[1][3], expected["residual"], n, "dresidual", scale=dy_size)


@pytest.mark.parametrize(
    ("shape", "axis", "dtype"), [case for case in TYPED if case[0][0] % 2 == 0 and case[1] != 0], ids=str
)
def test_dx_by_the_sums_of_several_devices_errs_no_more_than_twice_xla(shape, axis, dtype):
    """The walks of a mesh's backward pass, over halves of x: ReLU and a residual, with dy and with dz."""
    compare_halves(shape, axis, dtype, "relu", True)


@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("activation", NAMED_ACTIVATIONS, ids=label)
def test_dx_by_the_sums_of_several_devices_of_every_activation(activation, residual):
    shapes = (((4, 8, 8, 64), -1), ((4, 7, 7, 5), 1)), (((2, 6, 5, 19), -1), ((2, 5, 6, 4), 1))
    # A GPU has kernels of its own for vectors; of the CPU's each memory order meets every activation once.
    for shape, axis in (*shapes[0], *shapes[1]) if PLATFORM == "cuda" else shapes[residual]:
        compare_halves(shape, axis, "float32", activation, residual)


@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("activation", NAMED_ACTIVATIONS, ids=label)
def test_every_activation_errs_no_more_than_twice_xla(activation, training, residual):
    shape, axis = ((2, 6, 5, 19), -1) if residual else ((3, 7, 6, 5), 1)  # both memory orders
    compare(shape, axis, "float32", training, activation, residual)


@pytest.mark.skipif(PLATFORM != "cuda", reason="vectors of 16 bytes have kernels of their own on CUDA only")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", NAMED_ACTIVATIONS, ids=label)
def test_every_activation_in_vectors_errs_no_more_than_twice_xla(activation, dtype):
    compare((9, 7, 7, 48), -1, dtype, True, activation, False)


# Rows that two_read passes through a ring in shared memory on Hopper: tensors and halves of at least 4 MB.
STREAMS = {
    (128, 33, 31, 40): "512 threads are no multiple of a row's 5 vectors (10 in float32); the last stage is cut off",
    (4, 41, 31, 1000): "rows of 125 vectors (250)",
    (1042, 4096): "a stage is one row of 512 vectors; in float32 a row is longer, and threads read for themselves",
}


@pytest.mark.skipif(PLATFORM != "cuda", reason="the CPU has one walk for all sizes")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", STREAMS, ids=str)
def test_large_tensors_err_no_more_than_twice_xla(shape, dtype):
    for activation, residual in (("relu", True), ("silu", False), ("relu6", False), ("tanh", True), ("gelu", False)):
        compare(shape, -1, dtype, True, activation, residual, ("two_read",))
    compare(shape, -1, dtype, False, "silu", True, ("two_read",))
    compare_halves(shape, -1, dtype, "relu", True)


FIRST = (*NATIVE_IN_FLOAT64, None)[0]

# What resident_team lays out differently: a team of one CTA and of many; groups that it takes in turn; shares that do
# and do not stay in shared memory (a CTA of 256 threads holds about 26 vectors a thread, or 13 of x and dy).
TEAMS = {
    ((64, 7, 7, 64), -1, 128, 1): "one CTA; 98 steps",
    ((64, 7, 7, 64), -1, 32, 7): "an odd team; 13 steps of 32-byte groups",
    ((130, 9, 9, 72), -1, 64, 11): "the last group is half empty; positions no multiple of a step",
    ((9, 8, 8, 2048), -1, 128, 66): "32 groups on 4 teams: eight rounds",
    ((16, 300, 16, 16), 1, 128, 1): "channels first; 264 teams and 300 channels",
    ((64, 5, 32, 32), 1, 128, 3): "channels first; a channel is more than a CTA holds",
    ((300, 70, 7, 7), 1, 128, 1): "channels first; vectors of two images; the array ends inside one",
    ((301, 37, 9, 9), 1, 128, 3): "the same, shared by an odd team",
    ((130, 9, 9, 64), -1, 128, 104): "so many CTAs that, in 16 bits, they add up each other's columns",
}


@pytest.mark.skipif(PLATFORM != "cuda", reason="the algorithm exists on CUDA only")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "axis", "width", "ctas"), TEAMS, ids=str)
def test_teams_of_every_layout_err_no_more_than_twice_xla(shape, axis, width, ctas, dtype, monkeypatch):
    def forced(op: str, p: BatchNormProblem, device: _plan.Device) -> tuple[int, int]:
        return width, ctas

    assert _plan.supports("batchnorm_backward", "resident_team", problem(shape, axis, dtype, True), DEVICE) is None
    monkeypatch.setattr(team, "_team", forced)
    jax.clear_caches()
    for activation, residual in (("relu", False), ("relu", True), ("silu", True), (None, False)):
        compare(shape, axis, dtype, True, activation, residual, ("resident_team",))


@pytest.mark.skipif(PLATFORM != "cuda", reason="the algorithm exists on CUDA only")
def test_teams_dispatched_from_two_threads_beside_other_work_end_and_agree():
    """A team's CTAs wait for each other: none may wait for one that another kernel keeps from starting."""
    x = jnp.asarray(normal(0, (64, 28, 28, 64)), "bfloat16")
    one, zero, wide = jnp.ones(64), jnp.zeros(64), jnp.ones((1024, 1024))

    @jax.jit
    def teams(x):
        norm = functools.partial(jaxconv.batchnorm, training=True, activation="relu", algorithm="resident_team")
        # Independent calls: a captured graph may run them at once.
        return [norm(x * factor, one, zero, zero, one)[0] for factor in (1, 2, 3)]

    @jax.jit
    def other(w):
        return jax.lax.fori_loop(0, 20, lambda _, w: jnp.tanh(w @ w), w)

    def work(_):
        ends = [(teams(x), other(wide)) for _ in range(20)]
        return jax.block_until_ready(ends[-1][0])

    expected = teams(x)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for result in pool.map(work, range(2), timeout=120):
            assert same_bits(result, expected)


@pytest.mark.parametrize(("shape", "axis", "dtype"), TYPED, ids=str)
def test_statistics_alone_err_no_more_than_twice_xla(shape, axis, dtype):
    given, p = data(shape, axis, dtype), problem(shape, axis, dtype, True)
    axes, largest = tuple(a for a in range(len(shape)) if a != p.channel_axis), np.abs(given["x"]).max()

    def of(implementation: str, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        k, shift, var = moments(dataclasses.replace(p, implementation=implementation), x)
        return k + shift, var

    with types_of(dtype):
        x = jnp.asarray(given["x"], dtype)
        actual, xla = (jax.jit(functools.partial(of, i))(x) for i in ("native", "xla"))
        for i, expected in enumerate((given["x"].mean(axes), given["x"].var(axes))):
            assert_close(actual[i], xla[i], expected, p.reduced, "variance" * i or "mean", scale=largest ** (i + 1))


def test_the_walks_of_a_mesh_have_derivatives_in_both_modes_to_second_order(x64):
    p = dataclasses.replace(problem((4, 3, 2), -1, "float64", True), activation=parse("", "silu"), residual=True)
    p = dataclasses.replace(p, implementation=FIRST)
    shapes = ((4, 3, 2), (4, 3, 2), *[(2,)] * 6, (4, 3, 2))

    def statistics(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        k, shift, var = moments(p, x)
        return k + shift, var

    args = [jnp.asarray(normal(i, shape)) for i, shape in enumerate(shapes)]
    check_grads(jax.jit(functools.partial(dx_of_sums, dataclasses.replace(p, count=30))), args, order=2)
    check_grads(jax.jit(functools.partial(dx_of_sums, dataclasses.replace(p, count=30, dz=True))), args[:-1], order=2)
    check_grads(jax.jit(statistics), args[:1], order=2)


# ----------------------------------------------------------------------------------------------------------------------
# Numbers that are easy to get wrong

NORMS = [{"implementation": "native"}, {"implementation": "xla"}]


@pytest.mark.parametrize("choice", NORMS, ids=lambda c: c["implementation"])
@pytest.mark.parametrize(("shape", "axis"), [((16, 8, 8, 24), -1), ((16, 24, 8, 8), 1), ((4096, 3), -1)], ids=str)
def test_variance_is_right_where_the_mean_is_10000_deviations(shape, axis, choice):
    """E[x^2] - E[x]^2 would lose all of it: 1e8 has an ulp of 8 in float32."""
    c = shape[axis]
    x = (1e4 + normal(0, shape)).astype(np.float32)
    one, zero = jnp.ones(c), jnp.zeros(c)
    # momentum 0 returns the batch's own statistics
    options = dict(training=True, momentum=0.0, epsilon=0.0, channel_axis=axis)
    y, mean, var = jax.jit(functools.partial(jaxconv.batchnorm, **options, **choice))(
        jnp.asarray(x), one, zero, zero, one
    )
    x64, v64 = x.astype(np.float64), np.ones(c)
    y64, mean64, var64 = ref.batchnorm(x64, v64, 0 * v64, 0 * v64, v64, **options)
    n = x.size // c
    ulp = 2.0**-10  # of float32 at 10000
    # The mean is right to an ulp or two (its own rounding, and that of the sum about a shift). A mean that is off by d
    # adds d^2 to the variance; n squares are summed with n rounding errors of random sign, and rounded themselves.
    assert_within(mean, mean64, 2 * ulp, "mean")
    assert_within(var, var64, var64 * (4 * ulp**2 + 4 * eps("float32") * np.sqrt(n)), "variance")
    # y = (x - mean) * rstd: the mean's error, in deviations, and the variance's, halved.
    assert_within(y, y64, 2.1 * ulp + np.abs(y64) * (4 * ulp**2 + 4 * eps("float32") * np.sqrt(n)), "y")


@pytest.mark.skipif(PLATFORM != "cuda", reason="the algorithm exists on CUDA only")
@pytest.mark.parametrize(("shape", "axis"), [((16, 8, 8, 24), -1), ((16, 24, 8, 8), 1)], ids=str)
def test_variance_of_a_team_is_right_where_the_mean_is_10000_deviations(shape, axis):
    test_variance_is_right_where_the_mean_is_10000_deviations(shape, axis, {"algorithm": "resident_team"})


@pytest.mark.parametrize("choice", NORMS, ids=lambda c: c["implementation"])
@pytest.mark.parametrize("axis", [-1, 1])
def test_constant_channels_give_the_bias_and_a_zero_gradient(axis, choice):
    """A channel of equal values has variance 0, not a negative one or NaN. 32 elements, so that the mean is exact."""
    constants = np.array([0.0, 1.0, -2.0, 1000.0, 0.5])
    x = np.broadcast_to(constants, (2, 4, 4, 5))
    x = jnp.asarray(x if axis == -1 else np.moveaxis(x, -1, 1), "float32")
    bias, one, zero = jnp.arange(5.0), jnp.ones(5), jnp.zeros(5)
    f = functools.partial(jaxconv.batchnorm, training=True, momentum=0.0, channel_axis=axis, **choice)
    y, mean, var = jax.jit(f)(x, one, bias, zero, one)
    shape = (-1,) if axis == -1 else (-1, 1, 1)
    np.testing.assert_array_equal(y, np.broadcast_to(np.arange(5.0).reshape(shape), x.shape))
    np.testing.assert_array_equal(mean, constants)
    np.testing.assert_array_equal(var, np.zeros(5))
    dx = jax.jit(jax.grad(lambda x: (f(x, one, bias, zero, one)[0] * 3).sum()))(x)
    np.testing.assert_array_equal(dx, np.zeros(x.shape))


@pytest.mark.parametrize("choice", NORMS, ids=lambda c: c["implementation"])
def test_inexact_constants_keep_a_tiny_variance(choice):
    """0.1 has no exact sum: the mean may be off by an ulp, the variance by its square, and nothing may be NaN."""
    x = jnp.full((7, 9, 3), 0.1)
    one, zero = jnp.ones(3), jnp.zeros(3)
    f = functools.partial(jaxconv.batchnorm, training=True, momentum=0.0, **choice)
    y, _, var = jax.jit(f)(x, one, zero, zero, one)
    ulp = 2.0**-27  # of float32 at 0.1
    assert_within(var, np.zeros(3), (2 * ulp) ** 2)
    assert_within(y, np.zeros(x.shape), 2 * ulp / np.sqrt(1e-5))
    assert np.isfinite(jax.jit(jax.grad(lambda x: (f(x, one, zero, zero, one)[0] ** 2).sum()))(x)).all()


@pytest.mark.parametrize("choice", NORMS, ids=lambda c: c["implementation"])
def test_one_element_per_channel_is_its_own_mean(choice):
    x, one, bias = jnp.asarray(normal(0, (1, 6)), "float32"), jnp.ones(6), jnp.arange(6.0)
    f = functools.partial(jaxconv.batchnorm, training=True, momentum=0.0, **choice)
    y, mean, var = jax.jit(f)(x, one, bias, 0 * one, one)
    np.testing.assert_array_equal(y[0], bias)
    np.testing.assert_array_equal(mean, x[0])
    np.testing.assert_array_equal(var, np.zeros(6))


@pytest.mark.parametrize("choice", NORMS, ids=lambda c: c["implementation"])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 1.0])
def test_running_statistics_move_by_one_minus_momentum_with_the_biased_variance(momentum, choice):
    """Integers: mean 3, biased variance 4 (the unbiased one would be 8), so every number is exact."""
    x = jnp.asarray([[1.0, 5.0], [5.0, 1.0]])
    one = jnp.ones(2)
    _, mean, var = jaxconv.batchnorm(x, one, one, 7 * one, 2 * one, training=True, momentum=momentum, **choice)
    np.testing.assert_array_equal(mean, np.full(2, momentum * 7 + (1 - momentum) * 3))
    np.testing.assert_array_equal(var, np.full(2, momentum * 2 + (1 - momentum) * 4))


@pytest.mark.skipif(PLATFORM != "cpu", reason="of the CPU's kernel")
@pytest.mark.parametrize("exponent", [-25, 40, 60, 62])
@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_native_gradients_on_a_cpu_are_to_the_bit_those_of_moderate_numbers_at_any_scale(activation, axis, exponent):
    """Powers of two round nothing, unless a number on the way is no normal one, as the square of rstd was."""
    x, factor = np.random.default_rng(3).standard_normal((40, 8)).astype(np.float32), np.float32(2.0) ** exponent
    zero, one = jnp.zeros(x.shape[axis]), jnp.ones(x.shape[axis])
    options = dict(training=True, epsilon=1e-35, activation=activation, channel_axis=axis, implementation="native")

    def f(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(3 * jaxconv.batchnorm(x, one, zero, zero, one, **options)[0]))

    gradient = jax.jit(jax.grad(f))
    np.testing.assert_array_equal(gradient(jnp.asarray(x * factor)) * factor, gradient(jnp.asarray(x)))


def test_inference_returns_the_running_statistics_untouched():
    x, v = jnp.asarray(normal(0, (4, 3)), "float32"), jnp.asarray([1.0, 2.0, 3.0])
    _, mean, var = jaxconv.batchnorm(x, v, v, v + 1, v + 2, training=False)
    assert same_bits((mean, var), (v + 1, v + 2))


def test_no_scale_and_no_bias_stand_for_ones_and_zeros():
    x, v = jnp.asarray(normal(0, (4, 3)), "float32"), jnp.ones(3)
    bare = jaxconv.batchnorm(x, None, None, 0 * v, v, training=True)
    assert same_bits(bare, jaxconv.batchnorm(x, v, 0 * v, 0 * v, v, training=True))


@pytest.mark.parametrize("choice", NORMS, ids=lambda c: c["implementation"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_it_is_flax_batch_norm(training, choice):
    linen = pytest.importorskip("flax.linen", reason="flax is an optional extra: pip install jaxconv[flax]")
    x = jnp.asarray(normal(0, (4, 6, 5, 8)) + 2, "float32")
    # use_fast_variance is E[x^2] - E[x]^2, which is what jaxconv does not do.
    module = linen.BatchNorm(use_running_average=not training, momentum=0.9, epsilon=1e-3, use_fast_variance=False)
    scale, bias, mean, var = (jnp.asarray(normal(i, (8,)), "float32") for i in range(1, 5))
    var = jnp.abs(var) + 0.5
    variables = {"params": {"scale": scale, "bias": bias}, "batch_stats": {"mean": mean, "var": var}}
    y, updated = module.apply(variables, x, mutable=["batch_stats"])
    options = dict(training=training, momentum=0.9, epsilon=1e-3)
    ours = jaxconv.batchnorm(x, scale, bias, mean, var, **options, **choice)
    reference = ref.batchnorm(*(np.asarray(a, np.float64) for a in (x, scale, bias, mean, var)), **options)
    stats = updated["batch_stats"]
    for a, flax_, r in zip(ours, (y, stats["mean"], stats["var"]), reference, strict=True):
        assert_close(a, flax_, r, terms=120, scale=float(jnp.abs(x).max()) ** 2)


@pytest.mark.parametrize("choice", NORMS, ids=lambda c: c["implementation"])
@pytest.mark.parametrize("axis", [-1, 1])
def test_gradients_agree_with_numerical_derivatives(axis, choice):
    """d x, scale, bias, residual and running statistics, of y and of the new running statistics together."""
    shape = (3, 4, 5)
    given = data(shape, axis, "float32")
    dy = given["dy"]
    names = ("x", "scale", "bias", "running_mean", "running_var", "residual")
    options = dict(training=True, momentum=0.75, epsilon=1e-3, activation="tanh", channel_axis=axis)

    def numpy_loss(**changed):
        now = {**{name: given[name] for name in names}, **changed}
        y, mean, var = ref.batchnorm(**now, **options)
        return float((dy * y).sum() + (mean**2).sum() + (2 * var).sum())

    def loss(values):
        y, mean, var = jaxconv.batchnorm(**values, **options, **choice)
        return (jnp.asarray(dy, "float32") * y).sum() + (mean**2).sum() + (2 * var).sum()

    gradients = jax.jit(jax.grad(loss))({name: jnp.asarray(given[name], "float32") for name in names})
    for name in names:
        numerical = ref.numerical_gradient(lambda v, name=name: numpy_loss(**{name: v}), given[name])
        # Sums over 12 or 15 elements of size at most 10, in float32 and through a division by the deviation.
        assert_within(gradients[name], numerical, 128 * eps("float32") * max(1, np.abs(numerical).max()), name)


# ----------------------------------------------------------------------------------------------------------------------
# Masks and given statistics

# (shape, channel_axis, shape of the mask)
MASKS = [
    ((4, 5, 6), -1, (4, 5, 1)),
    ((4, 5, 6), 1, (4, 1, 6)),
    ((4, 5, 6), -1, (5, 6)),
    ((4, 5, 6), -1, ()),
    ((3, 7, 6, 5), 1, (3, 7, 6, 5)),
]


def keep(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(3).random(shape) < 0.7 if shape else np.bool_(True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "axis", "mask_shape"), MASKS, ids=str)
def test_masked_statistics_are_those_of_what_is_kept(shape, axis, mask_shape, dtype):
    given, mask = data(shape, axis, dtype), keep(mask_shape)
    kept = np.broadcast_to(mask, shape)
    axes = tuple(a for a in range(len(shape)) if a != axis % len(shape))
    along = [-1 if a == axis % len(shape) else 1 for a in range(len(shape))]
    mean, var = (moment(given["x"], axes, where=kept) for moment in (np.mean, np.var))
    z = (given["x"] - mean.reshape(along)) / np.sqrt(var.reshape(along) + 1e-3) * given["scale"].reshape(along)
    y = np.maximum(z + given["bias"].reshape(along) + given["residual"], 0)
    with types_of(dtype):
        args = {k: v for k, v in arrays(given, dtype).items() if k != "dy"}
        options = dict(training=True, momentum=0.0, epsilon=1e-3, activation="relu", channel_axis=axis)
        f = jax.jit(functools.partial(jaxconv.batchnorm, **options))
        actual = f(**args, mask=jnp.asarray(mask))
        # What is not kept is not looked at.
        hidden = jnp.where(jnp.asarray(kept), args["x"], jnp.nan)
        assert same_bits(actual[1:], f(**{**args, "x": hidden}, mask=jnp.asarray(mask))[1:])
    sizes = [np.abs(given["x"]).max() ** i for i in (1, 1, 2)]
    for a, r, size in zip(actual, (y, mean, var), sizes, strict=True):
        scale = 8 * max(size, np.abs(r).max())
        assert_within(a, r, scale * (eps(a.dtype.name) + 8 * eps("float64" if dtype == "float64" else "float32")))


def test_a_masked_channel_without_elements_is_nan_as_in_flax():
    x, v = jnp.asarray(normal(0, (4, 3)), "float32"), jnp.ones(3)
    mask = jnp.asarray([[True, False, True]])
    y, mean, var = jaxconv.batchnorm(x, v, v, v, v, training=True, mask=mask)
    for a in (y.T, mean, var):
        np.testing.assert_array_equal(np.isnan(a).reshape(3, -1).all(1), [False, True, False])


def test_masks_and_statistics_are_read_in_training_only():
    x, v = jnp.asarray(normal(0, (4, 3)), "float32"), jnp.asarray([1.0, 2.0, 3.0])
    plain = jaxconv.batchnorm(x, v, v, v, v, training=False)
    assert same_bits(plain, jaxconv.batchnorm(x, v, v, v, v, training=False, mask=x > 0))
    assert same_bits(plain, jaxconv.batchnorm(x, v, v, v, v, training=False, statistics=(0 * v, 0 * v)))


@pytest.mark.parametrize("axis", [-1, 1])
def test_derivatives_through_masked_statistics(axis, x64):
    shape = (3, 2, 2)
    mask = jnp.asarray([[[True, True], [False, True]], [[True, False], [True, True]], [[True, True], [True, False]]])
    f = functools.partial(jaxconv.batchnorm, training=True, momentum=0.5, activation="tanh", channel_axis=axis)
    args = [jnp.asarray(normal(i, s)) for i, s in enumerate((shape, (2,), (2,), (2,), (2,)))]
    check_grads(jax.jit(functools.partial(f, mask=mask)), args, order=2)
    both = [jnp.stack([a, 2 * a]) for a in args]
    masks = jnp.stack([mask, ~mask])
    mapped = jax.vmap(lambda m, *a: f(*a, mask=m))(masks, *both)
    for i in range(2):
        for m, a in zip(mapped, f(*(a[i] for a in both), mask=masks[i]), strict=True):
            np.testing.assert_allclose(m[i], a, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("choice", NORMS, ids=lambda c: c["implementation"])
@pytest.mark.parametrize(("shape", "axis"), [((2, 6, 5, 19), -1), ((3, 7, 6, 5), 1)], ids=str)
def test_given_statistics_change_neither_results_nor_gradients(shape, axis, choice):
    """And gradients are complete though the statistics themselves have none."""
    given = arrays(data(shape, axis, "float32"), "float32")
    dy = given.pop("dy")
    options = dict(training=True, momentum=0.5, activation="silu", channel_axis=axis, **choice)
    axes = tuple(a for a in range(len(shape)) if a != axis % len(shape))

    def loss(given, statistics):
        outs = jaxconv.batchnorm(**given, statistics=statistics, **options)
        return (outs[0] * dy).sum() + (outs[1] ** 2).sum() + (outs[2] ** 2).sum(), outs

    statistics = jnp.mean(given["x"], axes), jnp.var(given["x"], axes)
    run = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
    (gradients, of_statistics), outs = run(given, statistics)
    expected, expected_outs = jax.jit(jax.grad(loss, has_aux=True))(given, None)
    for a, e in zip(*map(jax.tree.leaves, ((gradients, outs), (expected, expected_outs))), strict=True):
        np.testing.assert_allclose(a, e, rtol=0, atol=100 * eps("float32") * max(1.0, float(jnp.abs(e).max())))
    assert all(not a.any() for a in of_statistics)


@pytest.mark.parametrize("activation", [None, "relu", "gelu"], ids=label)
def test_given_statistics_have_derivatives_in_both_modes_to_second_order(activation, x64):
    """Numerically: of a function that computes x's statistics and passes them."""

    def f(x, scale, bias, mean, var, residual):
        statistics = jnp.mean(x, (0, 1)), jnp.var(x, (0, 1))
        options = dict(training=True, momentum=0.5, activation=activation, implementation=FIRST)
        return jaxconv.batchnorm(x, scale, bias, mean, var, residual=residual, statistics=statistics, **options)

    shapes = ((3, 2, 2), (2,), (2,), (2,), (2,), (3, 2, 2))
    args = [jnp.asarray(normal(3 + i, shape)) for i, shape in enumerate(shapes)]
    check_grads(jax.jit(f), args, order=2)


def test_given_statistics_leave_a_single_pass():
    x, v = jnp.ones((4, 6, 5, 8)), jnp.ones(8)

    def f(x, *params):
        options = dict(training=True, activation="relu", statistics=(v, v), implementation="native")
        return jaxconv.batchnorm(x, *params, **options)

    assert calls(f, x, v, v, v, v) == {"batchnorm_infer": 1}
    gradient = jax.grad(lambda x, s, b: (f(x, s, b, v, v)[0] ** 2).sum(), (0, 1, 2))
    assert calls(gradient, x, v, v) == {"batchnorm_infer": 1, "batchnorm_backward": 1}


MASK, STATISTICS = jnp.ones((4, 1), bool), (jnp.ones(3), jnp.ones(3))
BAD = {
    "mask_dtype": (dict(mask=jnp.ones((4, 1))), TypeError, "mask has dtype float32, expected bool"),
    "mask_shape": (dict(mask=jnp.ones((2, 1), bool)), ValueError, r"mask has shape \(2, 1\), which does not broadcast"),
    "mask_rank": (dict(mask=jnp.ones((1, 4, 3), bool)), ValueError, r"mask has shape \(1, 4, 3\)"),
    "mask_type": (dict(mask=[True]), TypeError, "mask must be an array, got list"),
    "both": (dict(mask=MASK, statistics=STATISTICS), ValueError, "mask and statistics were both given"),
    "no_pair": (dict(statistics=jnp.ones(3)), TypeError, r"statistics must be a pair \(mean, variance\)"),
    "one_statistic": (dict(statistics=(jnp.ones(3), None)), TypeError, "statistics must be an array, got NoneType"),
    "statistics_shape": (dict(statistics=(jnp.ones(3), jnp.ones(4))), ValueError, "the variance of statistics has"),
    "statistics_dtype": (
        dict(statistics=(jnp.ones(3, "bfloat16"), jnp.ones(3))),
        TypeError,
        "the mean of statistics has dtype bfloat16, expected float32",
    ),
    "native": (
        dict(mask=MASK, implementation="native"),
        ValueError,
        "cannot run: XLA computes the statistics of a batch-norm with a mask",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_masks_and_statistics_are_named(case):
    changed, kind, message = BAD[case]
    v = jnp.ones(3)
    with pytest.raises(kind, match=message):
        jaxconv.batchnorm(jnp.ones((4, 3)), v, v, v, v, training=True, **changed)


# ----------------------------------------------------------------------------------------------------------------------
# What runs


def test_native_runs_its_custom_calls_and_nothing_of_xla():
    x, v = jnp.ones((4, 6, 5, 8)), jnp.ones(8)

    def f(training, x, residual, *params):
        options = dict(training=training, activation="gelu", residual=residual, implementation="native")
        return jaxconv.batchnorm(x, *params, **options)

    for training, name in ((True, "batchnorm_train"), (False, "batchnorm_infer")):
        one = functools.partial(f, training)
        assert calls(one, x, x, v, v, v, v) == {name: 1}
        text = jax.jit(one).lower(x, x, v, v, v, v).compile().as_text()
        assert not any(f" {op}(" in text for op in ("reduce", "multiply", "tanh", "fusion"))
    gradient = jax.grad(lambda x, r, s, b: f(True, x, r, s, b, v, v)[0].sum(), (0, 1, 2, 3))
    assert calls(gradient, x, x, v, v) == {"batchnorm_train": 1, "batchnorm_backward": 1}


def test_xla_runs_no_custom_call_of_ours():
    x, v = jnp.ones((4, 8)), jnp.ones(8)
    f = functools.partial(jaxconv.batchnorm, training=True, implementation="xla")
    assert calls(jax.grad(lambda x, s, b: f(x, s, b, v, v)[0].sum(), (0, 1, 2)), x, v, v) == {}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [-1, 1])
def test_the_same_call_gives_the_same_bits_every_time(axis, dtype):
    shape = (8, 17, 9, 17)
    with types_of(dtype):
        given = arrays(data(shape, axis, dtype), dtype)
        options = dict(training=True, activation="relu", channel_axis=axis, implementation="native")
        f = jax.jit(functools.partial(run, options, ("x", "scale", "bias", "residual")))
        first = f(given)
        assert all(same_bits(first, f(given)) for _ in range(3))

"""Max-pooling against lax: values, gradients of both orders, transforms, plans, and accelerate."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from typing import Any

import flax.linen as nn
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import A100, DTYPES, H200, PLATFORM, types_of
from jax import export, lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jaxconv
import jaxconv.linen as jn
import jaxconv.nnx as jx
from jaxconv import _plan, _problem
from jaxconv._ops import pool, reference
from jaxconv._plan import Device, measured
from jaxconv._plan.domain import pool_refusal, pool_vector

IMPLEMENTATIONS = ("native", "xla")

# x's spatial extents, channels, window, stride, padding, and why it is here
CASES = {
    "resnet": ((12, 12), 8, 3, 2, "SAME"),  # pads (0, 1)
    "resnet_torch": ((11, 13), 8, 3, 2, 1),  # pads (1, 1): blocks of dx start in front of the image
    "inception": ((7, 7), 16, 3, 1, "SAME"),
    "halves": ((8, 6), 8, 2, 2, "VALID"),
    "halves_odd": ((9, 7), 8, 2, 2, "VALID"),  # pixels that no window has
    "gaps": ((11, 10), 8, 2, 3, "VALID"),  # between windows too
    "same_lower": ((9, 8), 4, (3, 2), (2, 1), "SAME_LOWER"),
    "odd_channels": ((7, 6), 5, 3, 2, 1),  # one element an access
    "one_channel": ((7, 6), 1, (2, 3), 1, 1),
    "wide": ((9, 9), 12, 5, 4, 2),
    "padding_beyond_the_window": ((3, 3), 8, 2, 1, ((3, 4), (2, 2))),  # windows of nothing but padding
    "row": ((17,), 8, 3, 2, "SAME"),
    "row_strided": ((16,), 6, 4, 3, ((1, 2),)),
    "volume": ((5, 6, 7), 8, 3, 2, 1),
    "volume_oblong": ((4, 5, 6), 3, (1, 2, 3), (1, 2, 1), "SAME"),
    "one_pixel": ((1, 1), 8, 3, 2, 1),
    "largest": ((16, 18), 4, (15, 17), 1, "SAME"),  # 255 taps
}


def lax_pool(x: jax.Array, window: Any, stride: Any, padding: Any, dilation: Any = 1) -> jax.Array:
    nd = x.ndim - 2

    def each(value: Any) -> tuple[int, ...]:
        return (value,) * nd if isinstance(value, int) else tuple(value)

    pads = padding
    if not isinstance(padding, str):
        pads = [(p, p) if isinstance(p, int) else p for p in each(padding)]
        pads = ((0, 0), *pads, (0, 0))
    dims = [(1, *each(v), 1) for v in (window, stride, dilation)]
    return lax.reduce_window(x, -jnp.inf, lax.max, dims[0], dims[1], pads, window_dilation=dims[2])


def pair(name: str, implementation: str | None = "native", layout: str | None = None) -> tuple[Any, Any, Any]:
    """(ours, lax's, the shape of x channels last) of a case."""
    spatial, channels, window, stride, padding = CASES[name]
    options = dict(stride=stride, padding=padding, implementation=implementation, layout=layout)
    ours = functools.partial(jaxconv.max_pool, window=window, **options)
    return ours, lambda x: lax_pool(x, window, stride, padding), (2, *spatial, channels)


def ints(shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> jax.Array:
    """Few different numbers: most windows have several maxima."""
    return jnp.asarray(helpers.integers(seed, shape, 3), dtype)


def assert_equal(ours: Any, theirs: Any, x: jax.Array, dy: jax.Array) -> None:
    """Values and gradients, in one program: XLA compiles it once."""

    @jax.jit
    def both(x: jax.Array, dy: jax.Array) -> Any:
        found = [jax.vjp(f, x) for f in (ours, theirs)]
        return [y for y, _ in found], [backward(dy)[0] for _, backward in found]

    for actual, expected in both(x, dy):
        assert actual.dtype == expected.dtype
        # NumPy knows no NaN of a 16-bit type.
        np.testing.assert_array_equal(*(np.asarray(a, "float64") for a in (actual, expected)))


# All types by the kernels; XLA's way is the same in each.
TYPED = [(name, "native", dtype) for name, dtype in itertools.product(CASES, DTYPES)]
TYPED += [(name, "xla", "float32") for name in CASES] + [("resnet_torch", "xla", dtype) for dtype in DTYPES[1:]]


# On a CPU a kernel is one code for all types, and XLA compiles a program for each.
FEW = {"resnet", "odd_channels", "volume"}


@pytest.mark.parametrize(
    ("name", "implementation", "dtype"),
    [
        pytest.param(*case, marks=pytest.mark.slow)
        if PLATFORM == "cpu" and case[2] != "float32" and case[0] not in FEW
        else case
        for case in TYPED
    ],
)
def test_values_and_gradients_are_laxs(name, implementation, dtype):
    """Whole numbers: sums are exact in any type and order, and of equal maxima it is known which is taken."""
    with types_of(dtype):
        ours, theirs, shape = pair(name, implementation)
        x = ints(shape, dtype)
        dy = ints(jax.eval_shape(theirs, x).shape, dtype, seed=1)
        assert_equal(ours, theirs, x, dy)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_gradient_values_are_the_same(dtype):
    """By a kernel that saves no positions."""
    with types_of(dtype):
        for name in ("resnet_torch", "odd_channels", "wide"):
            ours, theirs, shape = pair(name)
            np.testing.assert_array_equal(ours(ints(shape, dtype)), theirs(ints(shape, dtype)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["resnet_torch", "row_strided", "volume_oblong"])
def test_channels_first(name, implementation):
    ours, theirs, shape = pair(name, implementation, {3: "NCW", 4: "NCHW", 5: "NCDHW"}[len(CASES[name][0]) + 2])
    x = ints(shape)
    dy = ints(jax.eval_shape(theirs, x).shape, seed=1)
    assert_equal(lambda x: jnp.moveaxis(ours(jnp.moveaxis(x, -1, 1)), 1, -1), theirs, x, dy)


SPECIAL = (-np.inf, np.nan, -0.0, 0.0, 1.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nans_infinities_and_signed_zeros_are_as_in_lax(implementation, padding, dtype):
    """Every window of three of these, at every place of a vector; with padding in front of them and behind."""
    rows = np.array(list(itertools.product(SPECIAL, repeat=3)), np.float32)  # (windows, taps)
    x = jnp.asarray(np.repeat(rows[:, :, None], 8, 2), dtype)
    ours = functools.partial(jaxconv.max_pool, window=3, padding=padding, implementation=implementation)
    dy = jnp.asarray(2.0 ** np.arange(1 + 2 * padding)[:, None] * np.ones((len(rows), 1, 8)), dtype)
    assert_equal(ours, lambda x: lax_pool(x, 3, 1, padding), x, dy)


def test_the_first_of_equal_maxima_takes_the_gradient():
    x = jnp.ones((1, 4, 4, 8))
    dx = jax.grad(lambda x: jaxconv.max_pool(x, 2, stride=2, implementation="native").sum())(x)
    expected = np.zeros((1, 4, 4, 8))
    expected[:, ::2, ::2] = 1
    np.testing.assert_array_equal(dx, expected)


def brute(x: np.ndarray, dy: np.ndarray, window: Any, stride: Any, low: Any, dilation: Any) -> tuple[Any, Any]:
    """(y, dx) of channels-last arrays, a pixel of y at a time."""
    y, dx = np.full(dy.shape, -np.inf), np.zeros(x.shape)
    n, c = np.meshgrid(np.arange(x.shape[0]), np.arange(x.shape[-1]), indexing="ij")
    for o in np.ndindex(*dy.shape[1:-1]):
        best, at = np.full(n.shape, -np.inf), np.full((*n.shape, len(o)), -1)
        for t in np.ndindex(*window):
            i = tuple(a * s - p + b * d for a, s, p, b, d in zip(o, stride, low, t, dilation, strict=True))
            inside = all(0 <= a < size for a, size in zip(i, x.shape[1:-1], strict=True))
            v = x[:, *i, :] if inside else np.full(n.shape, -np.inf)
            taken = ~(best >= v) | (not any(t))
            best, at = np.where(taken, v, best), np.where(taken[..., None], i if inside else -1, at)
            y[:, *o, :] = np.maximum(y[:, *o, :], v)  # NaN where either is
        real = at[..., 0] >= 0
        np.add.at(dx, (n[real], *at[real].T, c[real]), dy[:, *o, :][real])
    return y, dx


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("stride", [1, 2])
def test_dilated_windows_have_gradients_which_lax_lacks(stride, implementation):
    window, dilation, pads = (3, 2), (2, 3), ((2, 1), (0, 3))
    ours = functools.partial(
        jaxconv.max_pool, window=window, stride=stride, dilation=dilation, padding=pads, implementation=implementation
    )
    x = ints((2, 11, 9, 8))
    y, backward = jax.vjp(ours, x)
    np.testing.assert_array_equal(y, lax_pool(x, window, stride, pads, dilation))
    dy = ints(y.shape, seed=1)
    (dx,) = backward(dy)
    _, expected = brute(*map(np.asarray, (x, dy)), window, (stride, stride), [p for p, _ in pads], dilation)
    np.testing.assert_array_equal(dx, expected)
    # Forward mode is the transpose of it.
    tx = ints(x.shape, seed=2)
    assert jnp.vdot(jax.jvp(ours, (x,), (tx,))[1], dy) == jnp.vdot(tx, dx)


@pytest.mark.parametrize("seed", range(8))
def test_random_windows(seed):
    """Of one to three dimensions, with everything: also windows of nothing but padding, and pixels that none has."""
    rng = np.random.default_rng(seed)
    axes: list[tuple[int, ...]] = []
    while len(axes) < 1 + seed % 3:
        size, taps, stride, dilation, low, high = map(int, rng.integers([1, 1, 1, 1, 0, 0], [9, 5, 5, 3, 5, 5]))
        if size + low + high > (taps - 1) * dilation:
            axes.append((size, taps, stride, dilation, low, high))
    sizes, window, strides, dilations, lows, highs = zip(*axes, strict=True)
    x = rng.choice(np.array(SPECIAL), (2, *sizes, int(rng.choice((1, 5, 8))))).astype(np.float32)
    pads = tuple(zip(lows, highs, strict=True))
    options = dict(stride=strides, padding=pads, dilation=dilations, implementation="native")
    f = functools.partial(jaxconv.max_pool, window=window, **options)
    dy = helpers.integers(seed, jax.eval_shape(f, x).shape, 3).astype(np.float32)
    y, dx = jax.jit(lambda x, dy: (lambda y, back: (y, back(dy)[0]))(*jax.vjp(f, x)))(x, dy)
    expected_y, expected_dx = brute(x, dy, window, strides, lows, dilations)
    np.testing.assert_array_equal(y, expected_y)
    np.testing.assert_array_equal(dx, expected_dx)


# ----------------------------------------------------------------------------------------------------------------------
# Transforms


@pytest.mark.parametrize(("name", "implementation"), [("resnet_torch", "native"), ("row_strided", "xla")])
def test_derivatives_of_any_order_and_mode_are_laxs(name, implementation):
    ours, theirs, shape = pair(name, implementation)
    x, t = ints(shape), ints(shape, seed=1)

    def gradient(f: Any) -> Any:
        return jax.grad(lambda x: (f(x) ** 3).sum())

    for derivative in (
        lambda f: jax.jvp(f, (x,), (t,))[1],
        lambda f: jax.jvp(gradient(f), (x,), (t,))[1],
        lambda f: jax.grad(lambda x: (gradient(f)(x) ** 2).sum())(x),
        lambda f: jax.grad(lambda x: (jax.jvp(f, (x,), (t,))[1] ** 2 * f(x)).sum())(x),
        lambda f: jax.linearize(gradient(f), x)[1](t),
        lambda f: jax.jvp(lambda x: jax.jvp(gradient(f), (x,), (t,))[1], (x,), (t,))[1],
        lambda f: jax.jit(jax.grad(jax.checkpoint(lambda x: (f(x) ** 3).sum())))(x),
    ):
        np.testing.assert_array_equal(*jax.jit(lambda d=derivative: (d(ours), d(theirs)))())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_finite_differences_of_dilated_windows(implementation):
    """Elements are further apart than the steps, so that maxima stay where they are. Others are compared with lax."""
    x = np.random.default_rng(0).permutation(9 * 7 * 2).reshape(1, 9, 7, 2) / 50
    options = dict(stride=2, padding=1, dilation=2, implementation=implementation)
    with jax.enable_x64(True):
        dtype = "float64" if PLATFORM == "cpu" or implementation == "xla" else "float32"
        f = jax.jit(functools.partial(jaxconv.max_pool, window=(3, 2), **options))
        order = 2 if implementation == "native" else 1
        check_grads(f, (jnp.asarray(x, dtype),), order=order, eps=1e-3, rtol=1e-2, atol=1e-2)


def test_a_gradient_runs_each_kernel_once_and_reads_no_x():
    f = functools.partial(jaxconv.max_pool, window=3, stride=2, padding=1, implementation="native")
    x = ints((2, 9, 9, 8))
    assert helpers.calls(f, x) == {"max_pool": 1}
    compiled = jax.jit(jax.grad(lambda x: (f(x) ** 2).sum())).lower(x).compile().as_text()
    assert helpers.calls(jax.grad(lambda x: (f(x) ** 2).sum()), x) == {"max_pool": 1, "max_pool_backward": 1}
    (line,) = [line for line in compiled.splitlines() if 'custom_call_target="jaxconv_max_pool_backward_v2"' in line]
    operands = re.search(r"custom-call\(([^)]*)\)", line)[1].split("%")[1:]
    assert "u8[2,5,5,8]" in compiled and len(operands) == 2


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_vmap_folds_into_the_batch(implementation):
    ours, theirs, shape = pair("resnet_torch", implementation)
    x = ints((3, *shape))
    dy = ints((3, *jax.eval_shape(theirs, x[0]).shape), seed=1)
    moved = jax.vmap(ours, in_axes=2, out_axes=1)
    assert_equal(lambda x: moved(jnp.moveaxis(x, 0, 2)).swapaxes(0, 1), jax.vmap(theirs), x, dy)
    assert_equal(lambda x: jax.vmap(jax.vmap(ours))(x[:, None])[:, 0], jax.vmap(theirs), x, dy)
    # dy mapped, x not; and a gradient mapped
    for of in (
        lambda f: jax.vmap(lambda dy: jax.vjp(f, x[0])[1](dy)[0])(dy),
        lambda f: jax.vmap(jax.grad(lambda x: (f(x) ** 2).sum()))(x),
    ):
        np.testing.assert_array_equal(*jax.jit(lambda of=of: (of(ours), of(theirs)))())
    if implementation == "native":
        assert helpers.calls(jax.vmap(jax.grad(lambda x: ours(x).sum())), x) == {"max_pool": 1, "max_pool_backward": 1}


def exported(f: Any, spec: str) -> Any:
    shape = jax.ShapeDtypeStruct(export.symbolic_shape(spec), "float32")
    made = export.export(jax.jit(f), disabled_checks=jaxconv.export_checks())(shape)
    return export.deserialize(made.serialize(vjp_order=1))


@pytest.mark.parametrize(("spec", "padding"), [("b, 9, 8, 4", ((1, 2), (0, 1))), ("b, h, w, 4", "VALID")])
def test_symbolic_extents_are_exported(padding, spec):
    f = functools.partial(jaxconv.max_pool, window=3, stride=2, padding=padding)
    loaded = exported(f, spec)
    x = ints((3, 9, 8, 4))
    y = jax.eval_shape(f, x)
    assert_equal(loaded.call, lambda x: lax_pool(x, 3, 2, padding), x, ints(y.shape, seed=1))


def test_symbolic_space_with_same_padding_is_laxs():
    x = ints((2, 9, 8, 4))
    f = functools.partial(jaxconv.max_pool, window=3, padding="SAME")
    shape = jax.ShapeDtypeStruct(export.symbolic_shape("b, h, w, 4"), "float32")
    loaded = export.export(jax.jit(f), disabled_checks=jaxconv.export_checks())(shape)
    np.testing.assert_array_equal(loaded.call(x), f(x))
    with pytest.raises(ValueError, match=r"implementation='native' cannot run: .*symbolic"):
        jax.eval_shape(functools.partial(f, implementation="native"), shape)


# name: (x, window, stride, padding, dilation, spec): pixels of 4 shards
SPLITS = {
    "images": ((8, 9, 8, 4), 3, 2, 1, 1, P("data")),
    "channels": ((2, 9, 8, 32), 3, 2, 1, 1, P(None, None, None, "data")),
    "windows that tile": ((2, 5, 16, 4), 2, 2, 0, 1, P(None, None, "data")),
    "windows that overlap": ((2, 5, 16, 4), 3, 2, 1, 1, P(None, None, "data")),
    "asymmetric padding": ((2, 5, 16, 4), 3, 2, ((0, 1), (0, 1)), 1, P(None, None, "data")),
    "rows, stride 1": ((2, 12, 5, 4), 5, 1, 2, 1, P(None, "data")),
    "rows, dilated": ((2, 12, 5, 4), 3, 1, 2, 2, P(None, "data")),
    "wider than a shard": ((2, 8, 8, 4), 5, 1, 2, 1, P(None, "data")),
    "uneven": ((2, 8, 5, 4), 2, 1, 0, 1, P(None, "data")),
    "fewer rows than shards": ((2, 8, 5, 4), 3, 3, 0, 1, P(None, "data")),
}


@pytest.mark.skipif(jax.device_count() < 4, reason="a mesh takes four devices")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("case", SPLITS)
def test_images_pixels_and_channels_are_split_over_a_mesh(case, kind, implementation):
    """Nothing is gathered but where types have no words for shards of unequal sizes. Ties, and a column of -inf."""
    shape, window, stride, padding, dilation, spec = SPLITS[case]
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,), devices=jax.devices()[:4])
    x = ints(shape).at[:, :, 0].set(-np.inf)
    options = dict(stride=stride, padding=padding, dilation=dilation)
    ours = functools.partial(jaxconv.max_pool, window=window, implementation=implementation, **options)

    def value(f, x):
        y = f(x)
        return (jnp.where(y > -100, y, 0) ** 2).sum(), y.shape

    expected, dx = jax.value_and_grad(
        functools.partial(value, functools.partial(ours, implementation="xla")), has_aux=True
    )(x)
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, spec))
        f = jax.value_and_grad(functools.partial(value, ours), has_aux=True)
        compiled = jax.jit(lambda x: (f(x)[0][0], f(x)[1])).lower(placed).compile()
        for got, want in zip(compiled(placed), (expected[0], dx), strict=True):
            np.testing.assert_array_equal(got, want)
    text = compiled.as_text()
    found = {k for k in ("all-gather", "all-to-all", "collective-permute") if re.search(rf" {k}(-start)?\(", text)}
    uneven = case in ("uneven", "fewer rows than shards")
    if implementation == "native" and not (uneven and kind == AxisType.Explicit):
        assert found <= {"collective-permute"}
        assert ("collective-permute" in found) == (case not in ("images", "channels", "windows that tile"))
    if implementation == "native":
        assert text.count('custom_call_target="jaxconv_max_pool_backward_v2"') == 1


# ----------------------------------------------------------------------------------------------------------------------
# What it is asked, and what it refuses


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (dict(window=0), ValueError, r"window=0 must be at least 1"),
        (dict(window=(2, 2, 2)), ValueError, r"window=\(2, 2, 2\) has 3 entries"),
        (dict(window=2.5), TypeError, r"window must be an integer"),
        (dict(window=2, stride=0), ValueError, r"stride=0 must be at least 1"),
        (dict(window=2, padding=-1), ValueError, r"padding=-1 must not be negative"),
        (dict(window=2, padding="SOME"), ValueError, r"padding='SOME' is unknown"),
        (dict(window=2, layout="NWC"), ValueError, r"layout='NWC' is unknown, expected 'NHWC' or 'NCHW'"),
        (dict(window=2, algorithm="direct"), ValueError, r"algorithm='direct' is unknown, expected .* one of gather"),
        (dict(window=16, padding=8, implementation="native"), ValueError, r"at most 255 taps, got 256"),
        (dict(window=2, stride=2**31, algorithm="gather"), ValueError, r"at most 2147483647, got 2147483648"),
        (dict(window=2, implementation="xla", algorithm="gather"), ValueError, r"implementation='xla' was asked for"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_a_sentence(options, error, words):
    with pytest.raises(error, match=rf"max_pool: .*{words}"):
        jaxconv.max_pool(jnp.ones((1, 5, 5, 2)), **options)


def test_arrays_that_are_none_are_refused():
    with pytest.raises(TypeError, match=r"max_pool: x has dtype int32, expected one of float32"):
        jaxconv.max_pool(jnp.ones((1, 5, 5, 2), "int32"), 2)
    with pytest.raises(ValueError, match=r"max_pool: x has 2 dimensions, expected 3, 4 or 5"):
        jaxconv.max_pool(jnp.ones((5, 2)), 2)


def test_windows_of_more_than_255_taps_and_arrays_without_elements_are_laxs():
    x = ints((1, 20, 20, 2))
    f = functools.partial(jaxconv.max_pool, window=16, stride=3)
    np.testing.assert_array_equal(f(x), lax_pool(x, 16, 3, 0))
    gradients = [jax.grad(lambda x, f=f: (f(x) ** 2).sum())(x) for f in (f, lambda x: lax_pool(x, 16, 3, 0))]
    np.testing.assert_array_equal(*gradients)
    assert helpers.equations(f, x)["reduce_window_max"] == 1
    for shape, y in (((0, 5, 5, 2), (0, 3, 3, 2)), ((2, 2, 5, 2), (2, 0, 3, 2)), ((2, 5, 5, 0), (2, 3, 3, 0))):
        z, backward = jax.vjp(functools.partial(jaxconv.max_pool, window=3), jnp.ones(shape))
        assert z.shape == y
        assert backward(z)[0].shape == shape


def problem(x: Any = (2, 12, 12, 64), window: Any = 3, dtype: str = "bfloat16", **options: Any) -> Any:
    given = dict(stride=2, padding="SAME", dilation=1, layout=None, algorithm=None, implementation=None) | options
    return _problem.PoolProblem.infer("max_pool", jax.ShapeDtypeStruct(x, dtype), window, **given)


def test_what_cuda_refuses(code_for_gpus):
    plan = _plan.Plan("native", "", "gather")
    assert pool_refusal(plan, problem()) is None
    assert "float64" in pool_refusal(plan, problem(dtype="float64"))
    assert "at most 255 taps, got 256" in pool_refusal(plan, dataclasses.replace(problem(), window=(16, 16)))
    assert "below 2^29" in pool_refusal(plan, problem((1, 2**29, 1, 8)))
    assert pool_refusal(plan, problem((1, 2**29 - 8, 1, 8))) is None
    assert "fewer than 2^31 threads" in pool_refusal(plan, problem((2**20, 2**7, 2**7, 8), stride=1))
    assert "no such kernel" in pool_refusal(_plan.Plan("native", "", "direct"), problem())
    for channels, dtype, vector in ((8, "bfloat16", 8), (12, "float32", 4), (12, "float16", 1)):
        assert pool_vector(problem((1, 8, 8, channels), dtype=dtype)) == vector


def test_on_a_gpu_it_is_native_where_that_is_asked_for(code_for_gpus):
    saving = dataclasses.replace(problem(), save=True)
    for op in ("max_pool", "max_pool_backward"):
        found = _plan.plan(op, saving, H200)
        assert (
            found.implementation == "native" and "than XLA, forward and backward, at the 5 windows that" in found.reason
        )
        near = _plan.plan(op, dataclasses.replace(problem((256, 112, 112, 64)), save=True), H200)
        assert near.implementation == "native" and "times faster than XLA at r50.stem" in near.reason
        for other in (dataclasses.replace(saving, channels=62), saving):
            found = _plan.plan(op, other, A100 if other is saving else H200)
            assert found.implementation == "xla" and "was measured near this problem on NVIDIA" in found.reason
        forced = dataclasses.replace(saving, implementation="native")
        assert str(_plan.plan(op, forced, H200)) == "native[gather]"
        first = dataclasses.replace(forced, channels_last=False)
        assert str(_plan.plan(op, first, H200)) == "native[gather channels-last]"
        assert _plan.plan(op, dataclasses.replace(saving, dtype="float64"), H200).implementation == "xla"
        assert _plan.plan(op, dataclasses.replace(saving, implementation="xla"), H200).implementation == "xla"
        assert _plan.plan(op, dataclasses.replace(forced, channels=62), A100).implementation == "native"
    assert _plan.plan("max_pool", problem(), H200).implementation == "xla"


def test_the_default_on_a_cpu_is_native_where_a_gradient_is_taken_and_channels_are_many():
    saving, cpu = dataclasses.replace(problem(), save=True), Device("cpu", "cpu")
    for op in ("max_pool", "max_pool_backward"):
        assert str(_plan.plan(op, saving, cpu)) == "native[gather]"
        assert _plan.plan(op, dataclasses.replace(saving, channels=15), cpu).implementation == "xla"
    assert _plan.plan("max_pool", problem(), cpu).implementation == "xla"


def test_what_was_measured_speaks_before_the_rule(code_for_gpus, monkeypatch):
    saving = dataclasses.replace(problem(), save=True)
    _, kind, coordinates = measured.features("max_pool", saving)
    for native_ms, implementation in ((0.5, "native"), (2.0, "xla")):
        entry = measured.Measurement("max_pool_fused", kind, coordinates, "case", 1.0, {"gather": native_ms})
        monkeypatch.setattr(measured, "table", lambda kind, entry=entry: (entry,) if kind == H200.kind else ())
        for op in ("max_pool", "max_pool_backward"):
            found = _plan.plan(op, saving, H200)
            assert found.implementation == implementation, found
            assert "the nearest case measured" in found.reason
    alone = measured.Measurement("max_pool", kind, coordinates, "case", 1.0, {"gather": 0.5})
    monkeypatch.setattr(measured, "table", lambda kind: (alone,) if kind == H200.kind else ())
    assert _plan.plan("max_pool", problem(), H200).implementation == "xla"


def test_it_can_be_disabled(code_for_gpus, monkeypatch):
    saving = dataclasses.replace(problem(), save=True)
    for names in ("pool", "max_pool, max_pool_backward", "all"):
        monkeypatch.setenv("JAXCONV_DISABLE", names)
        assert _plan.plan("max_pool_backward", saving, H200).implementation == "xla"


@pytest.mark.parametrize("native", ["max_pool", "max_pool_backward"])
def test_either_kernel_may_be_xlas_beside_the_other(native, monkeypatch):
    """Positions mean the same to both, so that a plan for each needs nothing of the other."""
    ours, theirs, shape = pair("resnet_torch", None)
    x = ints(shape)
    chosen = _plan.plan

    def mixed(op: str, p: Any, device: Any) -> Any:
        return chosen(op, dataclasses.replace(p, implementation="native" if op == native else "xla"), device)

    monkeypatch.setattr(_plan, "plan", mixed)
    gradient, expected = (jax.grad(lambda x, f=f: (f(x) ** 2).sum()) for f in (ours, theirs))
    assert helpers.calls(gradient, x) == {native: 1}
    np.testing.assert_array_equal(gradient(x), expected(x))


def test_positions_of_the_reference_are_those_of_the_kernel():
    x = jnp.asarray(np.random.default_rng(0).choice(np.array(SPECIAL, np.float32), (2, 9, 8, 8)))
    p = problem(x.shape, (3, 2), "float32", implementation="native")
    y, position = pool.kernel(dataclasses.replace(p, save=True), x)
    expected_y, expected = reference.max_pool(dataclasses.replace(p, save=True), x)
    np.testing.assert_array_equal(y, expected_y)
    np.testing.assert_array_equal(position, expected)


def test_cost_counts_taps():
    x = jnp.ones((2, 8, 8, 4))
    found = jaxconv.cost(functools.partial(jaxconv.max_pool, window=2, stride=2))(x)
    # XLA's own count of what is around the call is one on some platforms.
    assert 0 <= found["flops"] - 2 * 4 * 4 * 4 * 4 <= 1
    assert 0 <= found["bytes accessed"] - 4.0 * (x.size + x.size // 4) <= 1


# ----------------------------------------------------------------------------------------------------------------------
# accelerate and Flax


def loss(x: jax.Array) -> jax.Array:
    y = nn.max_pool(x, (3, 3), (2, 2), "SAME")
    return (y * y).sum()


def test_accelerate_finds_laxs_max_pool():
    x = ints((2, 9, 8, 8))
    accelerated = jaxconv.accelerate(loss)
    (finding,) = accelerated.report(x)
    assert (finding.what, finding.fused) == ("max_pool", "max_pool")
    assert finding.shapes == "float32[2, 9, 8, 8]"
    assert_equal(accelerated, loss, x, jnp.ones(()))
    assert {call.op for call in jaxconv.explain(jax.grad(accelerated))(x)} == {"max_pool", "max_pool_backward"}


def test_accelerate_finds_the_gradient_of_a_function_that_takes_it_itself():
    x = ints((2, 9, 8, 8))
    step = jax.jit(jax.value_and_grad(loss))
    accelerated = jaxconv.accelerate(step)
    report = accelerated.report(x)
    assert [finding.fused for finding in report] == ["max_pool", "max_pool's gradient"]
    assert "accelerate the loss" in str(report)
    for actual, expected in zip(*jax.jit(lambda x: (accelerated(x), step(x)))(x), strict=True):
        np.testing.assert_array_equal(actual, expected)
    # Both are of one kernel, positions and all, which XLA then runs once.
    calls = {(call.op, call.problem.save): call.count for call in jaxconv.explain(accelerated)(x)}
    assert calls == {("max_pool", True): 2, ("max_pool_backward", True): 1}


@pytest.mark.parametrize(
    ("window", "stride", "padding", "shape"),
    [
        ((1, 3, 3, 1), (1, 2, 2, 1), "SAME", (2, 9, 8, 8)),
        ((1, 1, 3, 3), (1, 1, 2, 2), "SAME", (2, 8, 9, 8)),  # channels first
        ((1, 1, 3, 2, 1), (1, 1, 2, 1, 1), "VALID", (2, 3, 9, 8, 4)),
        ((1, 1, 1, 2, 3, 1), (1, 1, 1, 2, 1, 1), "SAME", (2, 1, 3, 5, 6, 4)),  # three axes of images
        ((1, 1, 1, 1, 3, 3), (1, 1, 1, 1, 1, 1), "SAME", (2, 2, 1, 3, 5, 4)),
        ((1, 3, 1), (1, 2, 1), ((0, 0), (1, 2), (0, 0)), (2, 9, 8)),
        ((1, 1, 1, 1), (1, 2, 1, 1), "VALID", (2, 9, 8, 8)),  # a stride alone
    ],
)
def test_accelerate_reads_the_axes_off_the_window(window, stride, padding, shape):
    def f(x: jax.Array) -> jax.Array:
        return lax.reduce_window(x, -jnp.inf, lax.max, window, stride, padding)

    x = ints(shape)
    accelerated = jaxconv.accelerate(f)
    assert [finding.fused for finding in accelerated.report(x)] == ["max_pool"]
    np.testing.assert_array_equal(accelerated(x), f(x))
    gradient = jax.grad(lambda x: (f(x) ** 2).sum())
    taken = jaxconv.accelerate(gradient)
    assert "max_pool's gradient" in [finding.fused for finding in taken.report(x)]
    ours = jax.grad(lambda x: (accelerated(x) ** 2).sum())
    one, other, expected = jax.jit(lambda x: (ours(x), taken(x), gradient(x)))(x)
    np.testing.assert_array_equal(one, expected)
    np.testing.assert_array_equal(other, expected)


@pytest.mark.parametrize(
    ("f", "why"),
    [
        (
            lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 2), (1,) * 4, "SAME"),
            "its window spans the channels too",
        ),
        (lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2, 1, 1), (1,) * 4, "SAME"), "1 to 3 dimensions"),
        (lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1,) * 4, (1,) * 4, "SAME"), "one element"),
        (lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 16, 16, 1), (1,) * 4, "SAME"), "at most 255 taps"),
        (lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1,) * 4, "SAME", (1, 2, 2, 1)), "spread"),
        (lambda x: nn.max_pool(x > 0, (2, 2)), "its type is bool"),
        (
            jax.grad(lambda x: lax.reduce_window(x, jnp.inf, lax.min, (1, 2, 2, 1), (1,) * 4, "VALID").sum()),
            "maximum's",
        ),
    ],
)
def test_accelerate_leaves_what_it_does_not_have_and_says_why(f, why):
    x = ints((2, 9, 8, 8))
    accelerated = jaxconv.accelerate(f)
    left = accelerated.report(x).left
    assert len(left) == 1 and why in left[0].why
    np.testing.assert_array_equal(accelerated(x), f(x))


def test_accelerate_in_a_loop_of_jitted_layers_of_mapped_images():
    def layer(x: jax.Array) -> jax.Array:
        return nn.max_pool(jax.nn.relu(x - 1), (2, 2), (1, 1), "SAME")

    def f(x: jax.Array) -> jax.Array:
        return lax.scan(lambda x, _: (jax.jit(jax.vmap(layer))(x), None), x, length=3)[0].sum()

    x = ints((3, 2, 6, 5, 4))
    accelerated = jaxconv.accelerate(f)
    assert [finding.fused for finding in accelerated.report(x)] == ["max_pool"]
    assert_equal(accelerated, f, x, jnp.ones(()))


def test_flaxs_max_pool_is_ours_by_its_import():
    library = jn
    assert jx.max_pool is jn.max_pool and nnx.max_pool is nn.max_pool
    for shape, args in (
        ((2, 9, 8, 4), ((3, 2), (2, 1), "SAME")),
        ((2, 9, 8, 4), ((3, 2),)),
        ((9, 8, 4), ((2, 2), (2, 2), ((0, 1), (1, 0)))),  # no axis of images
        ((2, 3, 9, 4), ((2,), (2,), "VALID")),  # two of them
        ((2, 5, 6, 7, 4), ((2, 2, 2), (2, 1, 2), "SAME")),
        ((0, 9, 8, 4), ((2, 2),)),
    ):
        x = ints(shape)
        ours, theirs = (
            functools.partial(lambda x, f, args: f(x, *args), f=m.max_pool, args=args) for m in (library, nn)
        )
        assert_equal(ours, theirs, x, ints(jax.eval_shape(theirs, x).shape, seed=1))
    assert helpers.equations(lambda x: library.max_pool(x, (2, 2)), ints((2, 9, 8, 4)))["jaxconv_max_pool"] == 1
    whole = jnp.arange(32).reshape(1, 4, 4, 2)
    np.testing.assert_array_equal(library.max_pool(whole, (2, 2)), nn.max_pool(whole, (2, 2)))


@pytest.mark.parametrize("f", [jaxconv.max_pool, jaxconv.avg_pool])
def test_mapped_over_batches_without_images(f):
    x = jnp.ones((2, 0, 4, 4, 1))
    assert jax.vmap(lambda x: f(x, 2))(x).shape == (2, 0, 3, 3, 1)
    assert jax.vmap(jax.grad(lambda x: f(x, 2).sum()))(x).shape == x.shape


DILATED = {
    "256 taps": ((34, 34), 16, 2, 2),
    "no window in a row": ((80,), 300, 3, 2),
    "no window": ((9, 9), 3, 1, 20),
    "no channel": ((9, 9), 2, 1, 2),
}


@pytest.mark.parametrize("name", DILATED)
def test_dilated_windows_of_lax_have_a_gradient(name):
    """Where no kernel can run: of more than 255 taps, of results without elements."""
    pixels, window, stride, dilation = DILATED[name]
    x = jnp.asarray(helpers.normal(0, (2, *pixels, 0 if name == "no channel" else 3)), "float32")

    def f(x):
        return jaxconv.max_pool(x, window, stride=stride, dilation=dilation)

    def by_patches(x):
        """The taps of each window side by side, as a gather of pixels."""
        if not extents:
            return jnp.zeros(shape)
        for axis, n in enumerate(extents):
            taps = np.arange(n)[:, None] * stride + np.arange(window) * dilation
            x = jnp.take(x, taps, axis=2 * axis + 1)
        return x.max(tuple(2 + 2 * axis for axis in range(len(extents))))

    shape = f(x).shape
    extents = shape[1:-1] if 0 not in shape else ()
    np.testing.assert_array_equal(f(x), by_patches(x))
    loss = lambda f: lambda x: (f(x) ** 2).sum()  # noqa: E731
    np.testing.assert_allclose(jax.grad(loss(f))(x), jax.grad(loss(by_patches))(x), rtol=1e-6, atol=1e-6)
    if extents:
        check_grads(f, (x,), order=2, modes=("fwd", "rev"), atol=1e-2, rtol=1e-2, eps=1e-3)


def test_dilated_windows_of_symbolic_pixels_have_a_gradient():
    """Where the constraints say that a window fits."""
    pixels = export.symbolic_shape("1,h,h,2", constraints=("h >= 6",))
    gradient = jax.jit(jax.grad(lambda x: (jaxconv.max_pool(x, 3, dilation=2) ** 2).sum()))
    exported = export.export(gradient, disabled_checks=jaxconv.export_checks())(jax.ShapeDtypeStruct(pixels, "float32"))
    x = jnp.asarray(helpers.normal(0, (1, 9, 9, 2)), "float32")
    np.testing.assert_allclose(exported.call(x), gradient(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("algorithm", ["gather 5", "gather/x", "scatter"])
@pytest.mark.parametrize("f", [jaxconv.max_pool, jaxconv.avg_pool])
def test_a_kernel_that_nobody_has_is_refused(f, algorithm):
    """When the program is lowered, not when it runs."""
    with pytest.raises(ValueError, match=r"algorithm='.*' (cannot run .*: there is no such kernel|is unknown)"):
        jax.jit(lambda x: f(x, 2, algorithm=algorithm)).lower(jnp.ones((1, 4, 4, 8)))


@pytest.mark.parametrize("layers", [jn, jx])
def test_flaxs_negative_padding_crops(layers):
    x, padding = jnp.asarray(helpers.normal(0, (2, 6, 6, 4)), "float32"), ((0, 1), (-1, 0))
    np.testing.assert_array_equal(layers.max_pool(x, (2, 2), padding=padding), nn.max_pool(x, (2, 2), padding=padding))
    np.testing.assert_array_equal(layers.avg_pool(x, (2, 2), padding=padding), nn.avg_pool(x, (2, 2), padding=padding))


@pytest.mark.parametrize(
    ("window", "native"),
    [((5, 1), False), ((1, 8), False), ((2, 2), True), ((3, 3), True), ((4, 1, 1), False), ((2, 1, 2), True)],
)
def test_a_cpu_takes_windows_of_two_axes(window, native):
    shape = (2, *[16] * len(window), 32)
    grad = jax.grad(lambda x: jnp.sum(jaxconv.max_pool(x, window)))
    (call, *_) = jaxconv.explain(grad, platform="cpu")(jnp.ones(shape))
    assert (call.plan.implementation == "native") == native

"""Average-pooling against Flax in float64: values, gradients, derivatives of any order, transforms, meshes, plans."""

from __future__ import annotations

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
from helpers import A100, DTYPES, H100, H200, PLATFORM, types_of
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxconv
import jaxconv.linen as jn
import jaxconv.nnx as jx
from jaxconv import _plan, _problem
from jaxconv._plan import Device, measured
from jaxconv._plan.domain import avg_pool_refusal

IMPLEMENTATIONS = ("native", "xla")

# x's spatial extents, channels, window, stride, padding
CASES = {
    "densenet": ((8, 6), 8, 2, 2, "VALID"),
    "halves_odd": ((9, 7), 8, 2, 2, "VALID"),  # pixels that no window has
    "inception": ((7, 9), 16, 3, 1, "SAME"),
    "resnet_torch": ((11, 13), 8, 3, 2, 1),  # blocks of dx start in front of the image
    "gaps": ((11, 10), 8, 2, 3, "VALID"),  # between windows too
    "same_lower": ((9, 8), 4, (3, 2), (2, 1), "SAME_LOWER"),
    "odd_channels": ((7, 6), 5, 3, 2, 1),  # one element an access
    "wide": ((9, 9), 12, 5, 4, 2),
    "global": ((20, 18), 8, (20, 18), 1, "VALID"),  # 360 taps, none of which has a position
    "row": ((17,), 8, 3, 2, "SAME"),
    "row_strided": ((16,), 6, 4, 3, ((1, 2),)),
    "volume": ((5, 6, 7), 8, 3, 2, 1),
    "volume_oblong": ((4, 5, 6), 3, (1, 2, 3), (1, 2, 1), "SAME"),
}


def each(value: Any, nd: int) -> tuple[int, ...]:
    return (value,) * nd if isinstance(value, int) else tuple(value)


def pads_of(shape: tuple[int, ...], window: Any, stride: Any, padding: Any) -> list[tuple[int, int]]:
    nd = len(shape) - 2
    if isinstance(padding, str):
        return jax.lax.padtype_to_pads(shape[1:-1], each(window, nd), each(stride, nd), padding)
    return [(p, p) if isinstance(p, int) else p for p in each(padding, nd)]


def flax_pool(x: jax.Array, window: Any, stride: Any, padding: Any, count_include_pad: bool) -> jax.Array:
    nd = x.ndim - 2
    pads = pads_of(x.shape, window, stride, padding)
    return nn.avg_pool(x, each(window, nd), each(stride, nd), pads, count_include_pad)


def expected(name: str, x: Any, dy: Any, count_include_pad: bool) -> tuple[np.ndarray, np.ndarray]:
    """(y, dx) by Flax, in float64."""
    _, _, *how = CASES[name]
    with jax.enable_x64(True):
        wide = (jnp.asarray(np.asarray(a, "float64")) for a in (x, dy))
        f = functools.partial(flax_pool, window=how[0], stride=how[1], padding=how[2])
        y, back = jax.jit(lambda x, dy: (lambda y, pull: (y, pull(dy)[0]))(
            *jax.vjp(functools.partial(f, count_include_pad=count_include_pad), x)
        ))(*wide)  # fmt: skip
        return np.asarray(y), np.asarray(back)


def ours(name: str, implementation: str | None = "native", count_include_pad: bool = True, **options: Any) -> Any:
    _, _, window, stride, padding = CASES[name]
    more = dict(count_include_pad=count_include_pad, implementation=implementation, **options)
    return functools.partial(jaxconv.avg_pool, window=window, stride=stride, padding=padding, **more)


def shape_of(name: str) -> tuple[int, ...]:
    return (2, *CASES[name][0], CASES[name][1])


def array(shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> jax.Array:
    return jnp.asarray(helpers.normal(seed, shape), dtype)


def assert_near(actual: Any, want: np.ndarray, dtype: str, largest: float) -> None:
    """One rounding to the type, and the float32 sum's: some, of numbers up to `largest`."""
    rounding = float(jnp.finfo(dtype).eps) / 2
    sums = 8 * float(jnp.finfo("float64" if dtype == "float64" else "float32").eps) * largest
    assert str(actual.dtype) == dtype
    np.testing.assert_array_less(np.abs(np.asarray(actual, "float64") - want), rounding * np.abs(want) + sums + 1e-30)


TYPED = [(name, "native", dtype, count) for name, dtype, count in itertools.product(CASES, DTYPES, (True, False))]
TYPED += [(name, "xla", "float32", count) for name, count in itertools.product(CASES, (True, False))]
TYPED += [("resnet_torch", "xla", dtype, False) for dtype in DTYPES[1:]]
# On a CPU a kernel is one code for all types, and XLA compiles a program for each.
FEW = {"densenet", "odd_channels", "volume"}


@pytest.mark.parametrize(
    ("name", "implementation", "dtype", "count_include_pad"),
    [
        pytest.param(*case, marks=pytest.mark.slow)
        if PLATFORM == "cpu" and case[2] != "float32" and case[0] not in FEW
        else case
        for case in TYPED
    ],
)
def test_values_and_gradients_are_flaxs(name, implementation, dtype, count_include_pad):
    with types_of(dtype):
        f = ours(name, implementation, count_include_pad)
        x = array(shape_of(name), dtype)
        dy = array(jax.eval_shape(f, x).shape, dtype, seed=1)
        helpers.poison()
        y, dx = jax.jit(lambda x, dy: (lambda y, pull: (y, pull(dy)[0]))(*jax.vjp(f, x)))(x, dy)
    want, want_dx = expected(name, x, dy, count_include_pad)
    assert_near(y, want, dtype, 5)
    assert_near(dx, want_dx, dtype, 5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_numbers_over_powers_of_two_are_exact(dtype):
    with types_of(dtype):
        f = functools.partial(jaxconv.avg_pool, window=(4, 2), stride=(2, 1), padding=1, implementation="native")
        x = jnp.asarray(helpers.integers(0, (2, 9, 8, 8)), dtype)
        y, pull = jax.vjp(f, x)
        dy = jnp.asarray(helpers.integers(1, y.shape), dtype)
        want, pull_want = jax.vjp(lambda x: nn.avg_pool(x, (4, 2), (2, 1), ((1, 1), (1, 1))), x.astype("float32"))
        np.testing.assert_array_equal(np.asarray(y, "float32"), want)
        np.testing.assert_array_equal(np.asarray(pull(dy)[0], "float32"), pull_want(dy.astype("float32"))[0])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["resnet_torch", "row_strided", "volume_oblong"])
def test_channels_first(name, implementation):
    layout = {3: "NCW", 4: "NCHW", 5: "NCDHW"}[len(shape_of(name))]
    f = ours(name, implementation, False, layout=layout)
    x = array(shape_of(name))
    y, pull = jax.vjp(f, jnp.moveaxis(x, -1, 1))
    dy = array(jnp.moveaxis(y, 1, -1).shape, seed=1)
    want, want_dx = expected(name, x, dy, False)
    assert_near(jnp.moveaxis(y, 1, -1), want, "float32", 5)
    assert_near(jnp.moveaxis(pull(jnp.moveaxis(dy, -1, 1))[0], 1, -1), want_dx, "float32", 5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_windows_of_nothing_but_padding_are_zeros_or_nans(implementation):
    x = array((1, 3, 3, 8))
    options = dict(stride=1, padding=((3, 4), (2, 2)), implementation=implementation)
    for count in (True, False):
        f = functools.partial(jaxconv.avg_pool, window=2, count_include_pad=count, **options)
        y, pull = jax.vjp(f, x)
        want, pull_want = jax.vjp(lambda x, n=count: flax_pool(x, 2, 1, options["padding"], n), x)
        np.testing.assert_allclose(y, want, rtol=1e-6, atol=1e-6)
        assert bool(jnp.isnan(y).any()) == (not count)
        np.testing.assert_allclose(pull(y * 0 + 1)[0], pull_want(y * 0 + 1)[0], rtol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nans_and_infinities_stay_in_their_windows(implementation):
    x = jnp.ones((1, 6, 8)).at[0, 1].set(jnp.nan).at[0, 4].set(jnp.inf)
    y = jaxconv.avg_pool(x, 2, implementation=implementation)
    np.testing.assert_array_equal(y[0, :, 0], [np.nan, np.nan, 1, np.inf, np.inf])


@pytest.mark.parametrize(("name", "implementation"), [("resnet_torch", "native"), ("row_strided", "xla")])
def test_derivatives_of_any_order_and_mode_are_flaxs(name, implementation):
    f = ours(name, implementation, False)
    theirs = functools.partial(
        flax_pool, window=CASES[name][2], stride=CASES[name][3], padding=CASES[name][4], count_include_pad=False
    )
    x, t = array(shape_of(name)), array(shape_of(name), seed=1)

    def gradient(f: Any) -> Any:
        return jax.grad(lambda x: (f(x) ** 3).sum())

    for derivative in (
        lambda f: jax.jvp(f, (x,), (t,))[1],
        lambda f: jax.jvp(gradient(f), (x,), (t,))[1],
        lambda f: jax.grad(lambda x: (gradient(f)(x) ** 2).sum())(x),
        lambda f: jax.grad(lambda x: (jax.jvp(f, (x,), (t,))[1] ** 2 * f(x)).sum())(x),
        lambda f: jax.linearize(gradient(f), x)[1](t),
        lambda f: jax.linear_transpose(f, x)(f(t))[0],
        lambda f: jax.jit(jax.grad(jax.checkpoint(lambda x: (f(x) ** 3).sum())))(x),
    ):
        np.testing.assert_allclose(*jax.jit(lambda d=derivative: (d(f), d(theirs)))(), rtol=2e-5, atol=2e-5)


def test_a_gradient_runs_each_kernel_once_and_keeps_no_x():
    f = ours("resnet_torch")
    x = array(shape_of("resnet_torch"))
    assert helpers.calls(f, x) == {"avg_pool": 1}
    assert helpers.calls(jax.grad(lambda x: (f(x) ** 2).sum()), x) == {"avg_pool": 1, "avg_pool_backward": 1}
    assert helpers.calls(jax.grad(lambda x: f(x).sum()), x) == {"avg_pool_backward": 1}
    assert jax.tree.leaves(jax.vjp(f, x)[1]) == []


def test_results_have_a_name_and_a_policy():
    f = ours("resnet_torch")
    x = array(shape_of("resnet_torch"))
    for policy, calls in (
        (jax.checkpoint_policies.save_only_these_names("jaxconv_avg_pool"), 1),
        (jaxconv.checkpoint_policies.save_all, 1),
        (None, 2),
    ):
        loss = jax.checkpoint(lambda x: jnp.sin(f(jnp.sin(x))).sum(), policy=policy)
        assert helpers.equations(jax.grad(loss), x)["jaxconv_avg_pool"] == calls, policy


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_vmap_folds_into_the_batch(implementation):
    f = ours("resnet_torch", implementation, False)
    x = array((3, *shape_of("resnet_torch")))
    want = jnp.stack([f(one) for one in x])
    np.testing.assert_array_equal(jax.vmap(f, in_axes=2, out_axes=1)(jnp.moveaxis(x, 0, 2)).swapaxes(0, 1), want)
    gradient = jax.grad(lambda x: (f(x) ** 2).sum())
    np.testing.assert_allclose(jax.vmap(gradient)(x), jnp.stack(list(map(gradient, x))), rtol=1e-6)
    if implementation == "native":
        assert helpers.calls(jax.vmap(gradient), x) == {"avg_pool": 1, "avg_pool_backward": 1}


@pytest.mark.parametrize("count_include_pad", [True, False])
@pytest.mark.parametrize(("spec", "padding"), [("b, 9, 8, 4", ((1, 2), (0, 1))), ("b, h, w, 4", "SAME")])
def test_symbolic_extents_are_exported(padding, spec, count_include_pad):
    f = functools.partial(jaxconv.avg_pool, window=3, stride=2, padding=padding, count_include_pad=count_include_pad)
    shape = jax.ShapeDtypeStruct(export.symbolic_shape(spec), "float32")
    made = export.export(jax.jit(f), disabled_checks=jaxconv.export_checks())(shape)
    loaded = export.deserialize(made.serialize(vjp_order=1))
    x = array((3, 9, 8, 4))
    for actual, want in zip(jax.value_and_grad(lambda x: (loaded.call(x) ** 2).sum())(x),
                            jax.value_and_grad(lambda x: (f(x) ** 2).sum())(x), strict=True):  # fmt: skip
        np.testing.assert_allclose(actual, want, rtol=1e-5, atol=1e-6)


# name: (x, window, stride, padding, count_include_pad, spec): pixels of 4 shards
SPLITS = {
    "images": ((8, 9, 8, 4), 3, 2, 1, False, P("data")),
    "channels": ((2, 9, 8, 32), 3, 2, 1, False, P(None, None, None, "data")),
    "windows that tile": ((2, 5, 16, 4), 2, 2, 0, True, P(None, None, "data")),
    "windows that overlap": ((2, 5, 16, 4), 3, 2, 1, True, P(None, None, "data")),
    "asymmetric padding": ((2, 5, 16, 4), 3, 2, ((0, 1), (0, 1)), True, P(None, None, "data")),
    "rows, stride 1": ((2, 12, 5, 4), 5, 1, 2, True, P(None, "data")),
    "wider than a shard": ((2, 8, 8, 4), 5, 1, 2, True, P(None, "data")),
    "uneven": ((2, 8, 5, 4), 2, 1, 0, True, P(None, "data")),
    "fewer rows than shards": ((2, 8, 5, 4), 3, 3, 0, True, P(None, "data")),
    "padding that is not counted": ((2, 12, 5, 4), 3, 1, 1, False, P(None, "data")),
}


@pytest.mark.skipif(jax.device_count() < 4, reason="a mesh takes four devices")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("case", SPLITS)
def test_images_pixels_and_channels_are_split_over_a_mesh(case, kind, implementation):
    """Nothing is gathered but where types have no words for shards of unequal sizes, or padding is not counted."""
    shape, window, stride, padding, count, spec = SPLITS[case]
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,), devices=jax.devices()[:4])
    x = array(shape)
    options = dict(stride=stride, padding=padding, count_include_pad=count)
    f = functools.partial(jaxconv.avg_pool, window=window, implementation=implementation, **options)

    def loss(f: Any, x: Any) -> Any:
        return (f(x) ** 2).sum()

    reference = functools.partial(f, implementation="xla")
    want = jax.value_and_grad(functools.partial(loss, reference))(x)
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, spec))
        compiled = jax.jit(jax.value_and_grad(functools.partial(loss, f))).lower(placed).compile()
        for got, expected in zip(compiled(placed), want, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    text = compiled.as_text()
    found = {k for k in ("all-gather", "all-to-all", "collective-permute") if re.search(rf" {k}(-start)?\(", text)}
    uneven = case in ("uneven", "fewer rows than shards")
    if implementation == "native" and count and not (uneven and kind == AxisType.Explicit):
        assert found <= {"collective-permute"}
        assert ("collective-permute" in found) == (case != "windows that tile")
    if implementation == "native":
        assert helpers.targets(text) == {"avg_pool": 1, "avg_pool_backward": 1}


# ----------------------------------------------------------------------------------------------------------------------
# What it is asked, and what it refuses


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (dict(window=0), ValueError, r"window=0 must be at least 1"),
        (dict(window=(2, 2, 2)), ValueError, r"window=\(2, 2, 2\) has 3 entries"),
        (dict(window=2, stride=0), ValueError, r"stride=0 must be at least 1"),
        (dict(window=2, padding=-1), ValueError, r"padding=-1 must not be negative"),
        (dict(window=2, layout="NWC"), ValueError, r"layout='NWC' is unknown, expected 'NHWC' or 'NCHW'"),
        (dict(window=2, count_include_pad=1), TypeError, r"count_include_pad must be True or False, got 1"),
        (dict(window=2, algorithm="direct"), ValueError, r"algorithm='direct' is unknown, expected .* one of gather"),
        (dict(window=4097, padding=4096, implementation="native"), ValueError, r"at most 16777216 taps, got 16785409"),
        (dict(window=2, stride=2**31, algorithm="gather"), ValueError, r"at most 2147483647, got 2147483648"),
        (dict(window=2, implementation="xla", algorithm="gather"), ValueError, r"implementation='xla' was asked for"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_a_sentence(options, error, words):
    with pytest.raises(error, match=rf"avg_pool: .*{words}"):
        jaxconv.avg_pool(jnp.ones((1, 5, 5, 2)), **options)


def test_arrays_that_are_none_are_refused():
    with pytest.raises(TypeError, match=r"avg_pool: x has dtype int32, expected one of float32"):
        jaxconv.avg_pool(jnp.ones((1, 5, 5, 2), "int32"), 2)
    with pytest.raises(ValueError, match=r"avg_pool: x has 2 dimensions, expected 3, 4 or 5"):
        jaxconv.avg_pool(jnp.ones((5, 2)), 2)


def test_without_a_stride_windows_step_by_one_and_arrays_may_be_empty():
    assert jaxconv.avg_pool(jnp.ones((1, 5, 5, 2)), 2).shape == (1, 4, 4, 2)
    for shape, y in (((0, 5, 5, 2), (0, 3, 3, 2)), ((2, 2, 5, 2), (2, 0, 3, 2)), ((2, 5, 5, 0), (2, 3, 3, 0))):
        z, backward = jax.vjp(functools.partial(jaxconv.avg_pool, window=3), jnp.ones(shape))
        assert z.shape == y
        assert backward(z)[0].shape == shape


def problem(x: Any = (2, 12, 12, 64), window: Any = 3, dtype: str = "bfloat16", **options: Any) -> Any:
    given = dict(stride=2, padding="SAME", layout=None, algorithm=None, implementation=None, count_include_pad=True)
    return _problem.AvgPoolProblem.of("avg_pool", jax.ShapeDtypeStruct(x, dtype), window, **(given | options))


def test_padding_that_is_not_there_is_counted():
    """Two ways to say one thing are one problem."""
    bare = dict(padding="VALID", stride=1)
    assert problem(count_include_pad=False, **bare) == problem(**bare)
    assert problem(count_include_pad=False) != problem()


def test_what_cuda_refuses(code_for_gpus):
    plan = _plan.Plan("native", "", "gather")
    assert avg_pool_refusal(plan, problem()) is None
    assert avg_pool_refusal(plan, problem((2, 40, 40, 8), 20)) is None
    assert "float64" in avg_pool_refusal(plan, problem(dtype="float64"))
    assert "below 2^29" in avg_pool_refusal(plan, problem((1, 2**29, 1, 8)))
    assert "fewer than 2^31 threads" in avg_pool_refusal(plan, problem((2**20, 2**7, 2**7, 8), stride=1))
    assert "no such kernel" in avg_pool_refusal(_plan.Plan("native", "", "direct"), problem())


@pytest.mark.parametrize("op", ["avg_pool", "avg_pool_backward"])
def test_it_is_native_where_that_is_asked_for_or_was_measured(op, code_for_gpus, monkeypatch):
    for device in (H200, A100):
        found = _plan.plan(op, problem(), device)
        assert found.implementation == "xla" and "no native kernel was measured near this problem" in found.reason
    assert _plan.plan(op, problem(), Device("cpu", "cpu")).implementation == "xla"
    assert str(_plan.plan(op, problem(implementation="native"), H200)) == "native[gather]"
    assert str(_plan.plan(op, problem(implementation="native"), Device("cpu", "cpu"))) == "native[gather]"
    assert str(_plan.plan(op, problem(algorithm="gather", layout="NCHW"), H200)) == "native[gather channels-last]"
    _, kind, coordinates = measured.features(op, problem())
    for native_ms, implementation in ((0.5, "native"), (2.0, "xla")):
        entry = measured.Measurement(op, kind, coordinates, "case", 1.0, {"gather": native_ms})
        monkeypatch.setattr(measured, "table", lambda kind, entry=entry: (entry,) if kind == H200.kind else ())
        assert _plan.plan(op, problem(), H200).implementation == implementation
    for names in ("pool", op, "all"):
        monkeypatch.setenv("JAXCONV_DISABLE", names)
        assert _plan.plan(op, problem(implementation="native"), H200).implementation == "xla"


@pytest.mark.parametrize("op", ["avg_pool", "avg_pool_backward"])
def test_on_hopper_it_is_native_where_the_kernel_was_faster(op, code_for_gpus):
    large, back = (64, 35, 35, 288), op == "avg_pool_backward"
    assert str(_plan.plan(op, problem(large, stride=1), H100)) == "native[gather]"
    assert ("native" in str(_plan.plan(op, problem(large, 2), H100))) == back  # windows that do not overlap
    others = (
        problem((1, 35, 35, 288), stride=1),
        problem((64, 35, 35, 289), stride=1),
        problem((8, 64, 64, 64, 32), 2, stride=1),  # volumes were not measured
        problem(large, 4, stride=1),
        problem(large, dtype="float32", stride=1),
        problem((64, 288, 35, 35), layout="NCHW", stride=1),
    )
    for p in others:
        assert _plan.plan(op, p, H100).implementation == "xla", p
    assert _plan.plan(op, problem(large, stride=1), A100).implementation == "xla"


def test_cost_counts_taps():
    x = jnp.ones((2, 8, 8, 4))
    found = jaxconv.cost(functools.partial(jaxconv.avg_pool, window=2, stride=2, implementation="native"))(x)
    # XLA's own count of what is around the call is one on some platforms.
    assert 0 <= found["flops"] - 2 * 4 * 4 * 4 * 4 <= 1
    assert 0 <= found["bytes accessed"] - 4.0 * (x.size + x.size // 4) <= 1


def test_flaxs_avg_pool_is_ours_by_its_import():
    assert jx.avg_pool is jn.avg_pool and nnx.avg_pool is nn.avg_pool
    for shape, args in (
        ((2, 9, 8, 4), ((3, 2), (2, 1), "SAME")),
        ((2, 9, 8, 4), ((3, 2), (2, 1), "SAME", False)),
        ((2, 9, 8, 4), ((3, 2),)),
        ((9, 8, 4), ((2, 2), (2, 2), ((0, 1), (1, 0)))),  # no axis of images
        ((2, 3, 9, 4), ((2,), (2,), "VALID")),  # two of them
        ((2, 5, 6, 7, 4), ((2, 2, 2), (2, 1, 2), "SAME")),
        ((0, 9, 8, 4), ((2, 2),)),
    ):
        x = jnp.asarray(helpers.normal(0, shape), jnp.float32)
        (y, back), (want, expected) = (
            jax.vjp(lambda x, pool=pool, args=args: pool(x, *args), x) for pool in (jn.avg_pool, nn.avg_pool)
        )
        np.testing.assert_allclose(y, want, rtol=1e-6, atol=1e-6)
        dy = jnp.asarray(helpers.normal(1, y.shape), jnp.float32)
        np.testing.assert_allclose(back(dy)[0], expected(dy)[0], rtol=1e-6, atol=1e-6)
    for dtype, count in itertools.product(("bfloat16", "float32"), (True, False)):
        x = jnp.ones((2, 5, 5, 4), dtype)
        y = jn.avg_pool(x, (2, 2), (1, 1), "SAME", count)
        assert y.dtype == nn.avg_pool(x, (2, 2), (1, 1), "SAME", count).dtype
        counted = helpers.equations(lambda x, count=count: jn.avg_pool(x, (2, 2), (1, 1), "SAME", count), x)
        assert counted["jaxconv_avg_pool"] == (count or dtype == "float32")
    whole = jnp.arange(32).reshape(1, 4, 4, 2)
    np.testing.assert_array_equal(jn.avg_pool(whole, (2, 2)), nn.avg_pool(whole, (2, 2)))

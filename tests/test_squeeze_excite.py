"""squeeze_excite against numpy in float64: forward, backward, what runs, what a call refuses, what accelerate takes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import (
    A100,
    DEVICE,
    DTYPES,
    H200,
    NAMED_ACTIVATIONS,
    NATIVE_IN_FLOAT64,
    PLATFORM,
    calls,
    equations,
    label,
    normal,
    poison,
    same_bits,
    types_of,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from numpy_reference import activate, slope
from tolerance import assert_close, error, floor

import jaxconv
from jaxconv import _plan
from jaxconv._core.activations import Activation
from jaxconv._plan import squeeze_excite as planned
from jaxconv._plan.plan import Plan
from jaxconv._problem import SqueezeExciteProblem

# (shape, hidden)
SHAPES = {
    ((5, 6), 3): "2-D: the mean is x",
    ((3, 7, 12), 4): "3-D; a channel short of two vectors of 16 bits",
    ((2, 5, 7, 30), 5): "odd extents, no multiple of a vector",
    ((2, 9, 11, 40), 7): "hidden numbers that nothing divides",
    ((3, 3, 4, 5, 16), 6): "5-D",
    ((1, 28, 27, 64), 16): "one image, which a cluster shares",
    ((2, 1, 1, 16), 1): "one pixel, one hidden number",
    ((2, 14, 14, 256), 68): "gates that are passed on",
    ((2, 7, 7, 1152), 48): "channels that a cluster shares",
    ((2, 4, 4, 2048), 4): "a tile of many vectors",
    ((1400, 3, 3, 8), 3): "several images of a cluster",
    ((40, 4, 4, 512), 64): "more weights than are brought beside x",
    ((7, 3, 8), 130): "more hidden numbers than channels",
}
NAMES = ("x", "w1", "b1", "w2", "b2")
ARGUMENTS = (*NAMES, "dy")


def problem(shape: tuple[int, ...], hidden: int, dtype: str = "float32", **more: Any) -> SqueezeExciteProblem:
    return SqueezeExciteProblem("squeeze_excite", dtype, shape, hidden, Activation("silu"), "sigmoid", **more)


def runs(shape: tuple[int, ...], hidden: int, dtype: str) -> bool:
    """Whether native code can, on this device."""
    p = problem(shape, hidden, dtype)
    return all(
        _plan.supports(op, "one_pass", p, DEVICE) is None for op in ("squeeze_excite", "squeeze_excite_backward")
    )


@functools.cache
def data(shape: tuple[int, ...], hidden: int, dtype: str) -> dict[str, np.ndarray]:
    c = shape[-1]
    wide = "float64" if dtype == "float64" else "float32"
    # Channels and images of different location and size: a mixed-up one cannot pass.
    x = normal(0, shape) * (1 + np.arange(c) % 3) + (np.arange(c) % 5 - 2)
    x = x * (1 + np.arange(shape[0]) % 2).reshape(-1, *[1] * (len(shape) - 1))
    weights = {
        "w1": normal(1, (c, hidden)) / np.sqrt(c),
        "b1": normal(2, (hidden,)),
        "w2": normal(3, (hidden, c)) / np.sqrt(hidden),
        "b2": normal(4, (c,)),
    }
    rounded = {name: w.astype(wide).astype(np.float64) for name, w in weights.items()}
    x = x.astype(jnp.dtype(dtype)).astype(np.float64)
    return {"x": x, **rounded, "dy": normal(5, shape, dtype)}


def arrays(given: dict[str, np.ndarray], dtype: str) -> list[jax.Array]:
    wide = "float64" if dtype == "float64" else "float32"
    return [jnp.asarray(v, dtype if k in ("x", "dy") else wide) for k, v in given.items()]


def gated(gate: str, z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The gate, and its derivative."""
    if gate == "sigmoid":
        g = 1 / (1 + np.exp(-z))
        return g, g * (1 - g)
    return np.clip(z + 3, 0, 6) / 6, np.where(np.abs(z) < 3, 1 / 6, 0.0)


def by_numpy(
    x: Any, w1: Any, b1: Any, w2: Any, b2: Any, dy: Any, *, activation: Any, gate: str = "sigmoid"
) -> tuple[np.ndarray, ...]:
    """(y, and the gradients of all but dy)."""
    n, c = x.shape[0], x.shape[-1]
    flat, back = x.reshape(n, -1, c), dy.reshape(n, -1, c)
    mean = flat.mean(1)
    z1 = mean @ w1 + b1
    h = activate(activation, z1)
    g, gradient = gated(gate, h @ w2 + b2)
    dz2 = (flat * back).sum(1) * gradient
    dz1 = dz2 @ w2.T * slope(activation, z1)
    dx = back * g[:, None] + (dz1 @ w1.T / flat.shape[1])[:, None]
    y = flat * g[:, None]
    return y.reshape(x.shape), dx.reshape(x.shape), mean.T @ dz1, dz1.sum(0), h.T @ dz2, dz2.sum(0)


def both(options: dict[str, Any], *args: Any) -> tuple[Any, ...]:
    """(y, and the gradients of all but dy)."""
    y, back = jax.vjp(functools.partial(jaxconv.squeeze_excite, **options), *args[:-1])
    return y, *back(args[-1])


def compare(shape: tuple[int, ...], hidden: int, dtype: str, **options: Any) -> None:
    given = data(shape, hidden, dtype)
    expected = by_numpy(*given.values(), **options)
    pixels, c = int(np.prod(shape[1:-1])), shape[-1]
    terms = max(pixels, c, hidden, shape[0])
    # What rounding acts on: x in y; of the gradients the largest of what is summed up on the way, dz2 first.
    x_size, dy_size = np.abs(given["x"]).max(), np.abs(given["dy"]).max()
    dz2 = np.abs(expected[5]).max() + x_size * dy_size * np.sqrt(pixels)
    wide = [dz2 * np.sqrt(shape[0]) * factor for factor in (x_size * 4, 4, 8, 1)]
    scales = (x_size, dy_size + 4 * dz2 / pixels, *wide)
    with types_of(dtype):
        args = arrays(given, dtype)
        xla = jax.jit(functools.partial(both, {**options, "implementation": "xla"}))(*args)
        names = ("y", *(f"d{n}" for n in NAMES))
        for what, theirs, e, scale in zip(names, xla, expected, scales, strict=True):
            assert error(theirs, e) <= floor(dtype, terms, scale), f"{what}, xla"
        if not runs(shape, hidden, dtype):
            return
        f = jax.jit(functools.partial(both, {**options, "algorithm": "one_pass"}))
        poison()  # what a kernel leaves out is NaN
        actual = f(*args)
        for what, a, theirs, e, scale in zip(names, actual, xla, expected, scales, strict=True):
            assert_close(a, theirs, e, terms, f"{what}, one_pass", scale=scale)


TYPED = [
    (shape, hidden, dtype)
    for dtype in DTYPES
    for shape, hidden in SHAPES
    if dtype == "float32" or PLATFORM == "cuda" or shape in ((2, 9, 11, 40), (2, 5, 7, 30))
]


@pytest.mark.parametrize(("shape", "hidden", "dtype"), TYPED, ids=str)
def test_every_shape_errs_no_more_than_twice_xla(shape, hidden, dtype):
    compare(shape, hidden, dtype, activation="silu")


@pytest.mark.parametrize("activation", NAMED_ACTIVATIONS, ids=label)
@pytest.mark.parametrize("gate", ["sigmoid", "hard_sigmoid"])
def test_every_activation_and_gate_errs_no_more_than_twice_xla(gate, activation):
    compare((2, 9, 11, 40), 7, "float32", activation=activation, gate=gate)


# Tiles of channels, CTAs of a cluster: channels shared, pixels shared, both; CTAs without a pixel; the last tile short.
@pytest.mark.skipif(PLATFORM != "cuda", reason="tiles are the CUDA kernels'")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tiles", "ctas"), [(1, 1), (1, 2), (2, 2), (1, 4), (2, 4), (1, 8), (2, 8), (4, 8), (8, 8)], ids=str
)
def test_tiles_and_clusters_of_any_size_err_no_more_than_twice_xla(tiles, ctas, dtype, monkeypatch):
    if ctas > 1 and DEVICE.compute_capability != (9, 0):
        pytest.skip("clusters are of compute capability 9.0")
    vector = 16 // jnp.dtype(dtype).itemsize
    cases = (
        ((2, 13, 11, 16 * vector), 9),
        ((3, 2, 2, 15 * vector), 20),  # of 8 tiles the last has one vector less
        ((2, 3, 8 * vector), 600),  # gates are passed on
        ((2, 150, 149, 16 * vector), 5),  # what one CTA does not hold
        ((1100, 5, 16 * vector), 3),  # pairs of images
    )
    for shape, hidden in cases:
        row = shape[-1] // vector
        monkeypatch.setattr(planned, "_tile", lambda *_, row=row: (-(-row // tiles) * 16, ctas))
        jax.clear_caches()
        assert runs(shape, hidden, dtype), (shape, tiles, ctas)
        compare(shape, hidden, dtype, activation="silu")
        compare(shape, hidden, dtype, activation="relu", gate="hard_sigmoid")


def test_sixteen_bits_are_rounded_once():
    """The gates are float32: bfloat16 ones would err by up to 2^-8 more."""
    given = data((2, 9, 11, 40), 7, "bfloat16")
    expected = by_numpy(*given.values(), activation="relu")[0]
    args = arrays(given, "bfloat16")[:-1]
    for implementation in ("native", "xla"):
        y = jax.jit(functools.partial(jaxconv.squeeze_excite, implementation=implementation))(*args)
        ratio = np.abs(np.asarray(y, np.float64) - expected) / np.abs(expected)
        assert ratio.max() < 2.0**-8 * 1.001  # half an ulp, and what float32 leaves


def test_narrower_parameters_and_none():
    x, w1, b1, w2, b2, _ = arrays(data((2, 9, 11, 40), 7, "bfloat16"), "bfloat16")
    narrow = [a.astype("bfloat16") for a in (w1, b1, w2, b2)]
    y = jaxconv.squeeze_excite(x, *narrow)
    assert same_bits(y, jaxconv.squeeze_excite(x, *(a.astype("float32") for a in narrow)))
    bare = jaxconv.squeeze_excite(x, w1, None, w2, None)
    assert same_bits(bare, jaxconv.squeeze_excite(x, w1, jnp.zeros(7), w2, jnp.zeros(40)))
    dw = jax.grad(lambda w: jaxconv.squeeze_excite(x, w, None, w2, None).astype("float32").sum())(narrow[0])
    assert dw.dtype == jnp.bfloat16


def test_a_gate_is_a_name_or_jax_nns_function():
    args = arrays(data((5, 6), 3, "float32"), "float32")[:-1]
    for name, function in (("sigmoid", jax.nn.sigmoid), ("hard_sigmoid", nn.hard_sigmoid)):
        assert same_bits(jaxconv.squeeze_excite(*args, gate=name), jaxconv.squeeze_excite(*args, gate=function))


@pytest.mark.parametrize("implementation", ["native", "xla"])
def test_nan_stays_in_its_image(implementation):
    x, *rest = arrays(data((3, 7, 12), 4, "float32"), "float32")[:-1]
    y = jaxconv.squeeze_excite(x.at[1, 2, 3].set(jnp.nan), *rest, activation="silu", implementation=implementation)
    np.testing.assert_array_equal(np.isnan(np.asarray(y)).all((1, 2)), [False, True, False])
    assert np.isfinite(np.asarray(y)[[0, 2]]).all()


# ----------------------------------------------------------------------------------------------------------------------
# Derivatives


@pytest.mark.parametrize("implementation", [*NATIVE_IN_FLOAT64, "xla"])
@pytest.mark.parametrize("gate", ["sigmoid", "hard_sigmoid"])
@pytest.mark.parametrize("activation", [None, "silu", "tanh"], ids=label)
def test_derivatives_in_both_modes_to_second_order(activation, gate, implementation, x64):
    f = functools.partial(jaxconv.squeeze_excite, activation=activation, gate=gate, implementation=implementation)
    shapes = ((2, 3, 4), (4, 3), (3,), (3, 4), (4,))
    args = [jnp.asarray(normal(i, shape)) for i, shape in enumerate(shapes, 5)]
    check_grads(jax.jit(f), args, order=2)


def test_a_gradient_is_the_same_whichever_others_are_asked_for():
    given = dict(zip(ARGUMENTS, arrays(data((2, 9, 11, 40), 7, "float32"), "float32"), strict=True))
    dy = given.pop("dy")

    def gradients(args: Any, some: tuple[str, ...]) -> Any:
        def f(of: Any) -> Any:
            values = {**args, **of}
            return jaxconv.squeeze_excite(*(values[n] for n in NAMES), activation="silu", implementation="native")

        return jax.vjp(f, {name: args[name] for name in some})[1](dy)[0]

    run = jax.jit(gradients, static_argnames="some")
    together = run(given, some=NAMES)
    for some in (("x",), ("w1",), ("w2", "b2"), ("b1",)):
        for name, value in run(given, some=some).items():
            assert same_bits(value, together[name]), f"d{name} of {some}"


def test_the_backward_pass_keeps_x_and_some_numbers_an_image():
    args = arrays(data((2, 9, 11, 40), 7, "float32"), "float32")[:-1]
    _, back = jax.vjp(functools.partial(jaxconv.squeeze_excite, implementation="native"), *args)
    assert sorted({a.shape for a in jax.tree.leaves(back)}) == [
        (2, 7),
        (2, 9, 11, 40),
        (2, 40),
        (7,),
        (7, 40),
        (40,),
        (40, 7),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_call_gives_the_same_bits_every_time(dtype):
    with types_of(dtype):
        args = arrays(data((2, 14, 14, 256), 68, dtype), dtype)
        f = jax.jit(functools.partial(both, dict(activation="silu", implementation="native")))
        first = f(*args)
        assert all(same_bits(first, f(*args)) for _ in range(3))


def test_remat_keeps_what_its_policy_says():
    args = arrays(data((2, 9, 11, 40), 7, "float32"), "float32")[:-1]
    f = functools.partial(jaxconv.squeeze_excite, implementation="native")

    def step(policy: Any) -> Any:
        block = jax.checkpoint(f, policy=policy)
        return jax.value_and_grad(lambda *a: block(*a).sum(), NAMES.index("w1"))

    kept = step(jaxconv.checkpoint_policies.save_all)
    again = step(jaxconv.checkpoint_policies.save_nothing_of_jaxconv)
    assert [equations(f, *args)["jaxconv_squeeze_excite"] for f in (kept, again)] == [1, 2]
    np.testing.assert_allclose(kept(*args)[1], again(*args)[1], rtol=1e-6)


# ----------------------------------------------------------------------------------------------------------------------
# What runs


@pytest.mark.parametrize("implementation", (None, "native", "xla"))
def test_nothing_has_its_rank_promoted(implementation):
    """As for people who set jax_numpy_rank_promotion, to find what they did not mean."""
    args = [jnp.asarray(v) for v in data((2, 5, 7, 32), 8, "float32").values()][:5]

    def f(*args: Any) -> Any:
        return jnp.sum(jaxconv.squeeze_excite(*args, implementation=implementation))

    with jax.numpy_rank_promotion("raise"):
        jax.block_until_ready(jax.grad(f, range(5))(*args))


def test_native_runs_one_call_there_and_one_back():
    args = arrays(data((2, 9, 11, 40), 7, "float32"), "float32")[:-1]
    f = functools.partial(jaxconv.squeeze_excite, activation="silu", implementation="native")
    assert calls(f, *args) == {"squeeze_excite": 1}
    text = jax.jit(f).lower(*args).compile().as_text()
    assert not any(f" {op}(" in text for op in ("reduce", "multiply", "dot", "fusion"))
    gradient = jax.grad(lambda *a: f(*a).sum(), tuple(range(5)))
    assert calls(gradient, *args) == {"squeeze_excite": 1, "squeeze_excite_backward": 1}


def test_xla_runs_no_custom_call_of_ours():
    args = arrays(data((5, 6), 3, "float32"), "float32")[:-1]
    assert calls(jax.grad(lambda *a: jaxconv.squeeze_excite(*a, implementation="xla").sum()), *args) == {}


def test_mapped_images_are_more_images_and_mapped_weights_are_xlas():
    x, *rest = arrays(data((2, 9, 11, 40), 7, "float32"), "float32")[:-1]
    f = functools.partial(jaxconv.squeeze_excite, implementation="native")
    images = jnp.stack([x, 2 * x, x - 1])
    mapped = jax.vmap(f, (0, *[None] * 4))
    assert calls(mapped, images, *rest) == {"squeeze_excite": 1}
    for one, image in zip(mapped(images, *rest), images, strict=True):
        np.testing.assert_array_equal(one, f(image, *rest))
    weights = jnp.stack([rest[0], 2 * rest[0]])
    assert calls(jax.vmap(f, (None, 0, None, None, None)), x, weights, *rest[1:]) == {}
    # Of one image's gradients as of several's cotangents
    y, back = jax.vjp(f, x, *rest)
    cotangents = jnp.stack([y, jnp.ones_like(y)])
    for i, grads in enumerate(zip(*jax.vmap(back)(cotangents), strict=True)):
        for a, b in zip(grads, back(cotangents[i]), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def gpu_plan(p: SqueezeExciteProblem, device: Any = H200, op: str = "squeeze_excite") -> Plan:
    return _plan.plan(op, p, device)


@pytest.mark.parametrize("images", [1, 8, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_plans_of_models_layers_fit_and_share_images(images, dtype, code_for_gpus):
    from jaxconv._plan import domain

    layers = ((112, 32, 8), (56, 96, 4), (56, 144, 6), (28, 240, 10), (14, 480, 20), (14, 672, 28), (7, 1152, 48))
    for size, channels, hidden in (*layers, (56, 256, 64), (7, 3712, 928)):
        p = problem((images, size, size, channels), hidden, dtype, implementation="native")
        plan = gpu_plan(p)
        _, steps, held, size_ = domain.squeeze_excite_cta(plan, p, H200)
        assert plan.kernel == "one_pass" and size_ <= 227 * 1024
        # At batch 1 all CTAs of the largest cluster; an image of a mebibyte and less stays whole but for a tenth.
        assert plan.splits == 8 or images > 1
        if hidden < 100 and p.pixels * p.channels * (2 if dtype == "bfloat16" else 4) < 2**20:
            assert held >= 0.85 * steps, (p, plan, steps, held)
        if channels * (2 if dtype == "bfloat16" else 4) <= 8192:
            assert gpu_plan(p, A100).splits == 1


def test_a_gpu_gets_xlas_until_times_are_known(code_for_gpus, monkeypatch):
    from jaxconv._plan import measured

    p = problem((256, 14, 14, 480), 20, "bfloat16")
    monkeypatch.setattr(measured, "_learned", {})
    entry = {"case": "b0.14.480", "problem": "", "xla_ms": 0.10, "native_ms": {"one_pass": 0.05}}
    trained = dataclasses.replace(p, save=True)
    op, kind, coordinates = measured.features("squeeze_excite", trained)
    device = _plan.Device("cuda", "a GPU", (9, 0), 132)
    assert gpu_plan(trained, device).implementation == "xla"
    measured.learn(device.kind, [{**entry, "op": op, "kind": kind, "coordinates": coordinates}])
    for found, known in (
        (trained, True),
        (p, False),
    ):  # what was measured forward and backward says nothing of forward alone
        assert (gpu_plan(found, device).implementation == "native") is known
    back = gpu_plan(trained, device, "squeeze_excite_backward")
    assert back.implementation == "native" and "2.00 times faster" in back.reason
    near = dataclasses.replace(trained, shape=(128, 14, 14, 672), hidden=28)
    assert gpu_plan(near, device).implementation == "native"
    far = dataclasses.replace(trained, shape=(256, 14, 14, 3712), hidden=928)
    assert gpu_plan(far, device).implementation == "xla"


def test_what_it_costs():
    args = arrays(data((2, 9, 11, 40), 7, "float32"), "float32")[:-1]
    p = problem((2, 9, 11, 40), 7)
    found = jaxconv.cost(jaxconv.squeeze_excite)(*args)["flops"]
    assert 0 <= found - (2 * p.size + 4 * 2 * 40 * 7) <= 1  # XLA's own count on a GPU, of nothing else


# ----------------------------------------------------------------------------------------------------------------------
# Meshes

MESH = pytest.mark.skipif(len(jax.devices()) < 4, reason="needs four devices")


@MESH
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize(
    "split", [P("a"), P(None, "a"), P(None, None, None, "a"), P("a", "b"), P(None, "a", None, "b")], ids=str
)
@pytest.mark.parametrize("implementation", ["native", "xla"])
def test_on_a_mesh_nothing_is_gathered(implementation, split, kind):
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind,) * 2, devices=jax.devices()[:4])
    given = arrays(data((4, 6, 5, 8), 3, "float32"), "float32")
    f = functools.partial(both, dict(activation="silu", implementation=implementation))
    expected = jax.jit(f)(*given)
    with jax.set_mesh(mesh):
        x, *weights, dy = given
        x, dy = (jax.device_put(a, NamedSharding(mesh, split)) for a in (x, dy))
        weights = [jax.device_put(w, NamedSharding(mesh, P())) for w in weights]
        run = jax.jit(f)
        found = run(x, *weights, dy)
        text = run.lower(x, *weights, dy).compile().as_text()
    for a, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=2e-5, atol=2e-5)
    whole = f"f32[{','.join(map(str, x.shape))}]"
    assert not any("all-gather" in line and whole in line for line in text.splitlines())
    images_alone = all(axis is None for axis in split[1:])
    assert ('custom_call_target="jaxconv_squeeze_excite' in text) == (implementation == "native" and images_alone)


# ----------------------------------------------------------------------------------------------------------------------
# Errors

X, W1, W2 = jnp.ones((2, 5, 8)), jnp.ones((8, 3)), jnp.ones((3, 8))
ERRORS: dict[str, tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = {
    "one_dimension": (ValueError, "x has 1 dimensions", (X[0, 0], W1, None, W2, None), {}),
    "w1": (ValueError, r"w1 has shape \(7, 3\), expected \(8, 3\)", (X, W1[:7], None, W2, None), {}),
    "w1_rank": (ValueError, "w1 has 1 dimensions", (X, W1[0], None, W2, None), {}),
    "w2": (ValueError, r"w2 has shape \(8, 3\), expected \(3, 8\)", (X, W1, None, W2.T, None), {}),
    "b1": (ValueError, r"b1 has shape \(8,\), expected \(3,\)", (X, W1, jnp.ones(8), W2, None), {}),
    "b2": (ValueError, r"b2 has shape \(3,\), expected \(8,\)", (X, W1, None, W2, jnp.ones(3)), {}),
    "missing": (TypeError, "w2 must be an array, got NoneType", (X, W1, None, None, None), {}),
    "dtype": (TypeError, "x has dtype int32", (X.astype(int), W1, None, W2, None), {}),
    "gate": (ValueError, "gate='tanh' is unknown", (X, W1, None, W2, None), dict(gate="tanh")),
    "gate_function": (TypeError, "is unknown, expected", (X, W1, None, W2, None), dict(gate=jnp.tanh)),
    "activation": (ValueError, "'hard' is unknown", (X, W1, None, W2, None), dict(activation="hard")),
    "no_pixels": (ValueError, "there must be pixels", (X[:, :0], W1, None, W2, None), {}),
    "no_hidden": (ValueError, "there must be pixels", (X, W1[:, :0], None, W2[:0], None), {}),
    "algorithm": (ValueError, "'resident' is unknown", (X, W1, None, W2, None), dict(algorithm="resident")),
}


@pytest.mark.parametrize("name", ERRORS)
def test_a_wrong_argument_is_named(name):
    kind, message, args, options = ERRORS[name]
    with pytest.raises(kind, match=message):
        jaxconv.squeeze_excite(*args, **options)


def test_no_images_give_no_images():
    y = jax.jit(functools.partial(jaxconv.squeeze_excite, implementation="native"))(X[:0], W1, None, W2, None)
    assert y.shape == (0, 5, 8)


def test_what_a_gpu_refuses_is_said(code_for_gpus):
    odd = problem((2, 5, 5, 12), 3, "bfloat16", implementation="native")
    with pytest.raises(ValueError, match="12 channels are no multiple of 8"):
        gpu_plan(odd)
    assert gpu_plan(dataclasses.replace(odd, implementation=None)).implementation == "xla"


# ----------------------------------------------------------------------------------------------------------------------
# accelerate


class Linen(nn.Module):
    """As EfficientNets in Flax have it: 1x1 convolutions of a mean with axes of extent 1."""

    reduced: int
    activation: Any = nn.silu
    gate: Any = nn.sigmoid
    dtype: Any = None
    bias: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = functools.partial(nn.Conv, kernel_size=(1, 1), dtype=self.dtype, use_bias=self.bias)
        s = self.activation(conv(self.reduced)(x.mean((1, 2), keepdims=True)))
        return x * self.gate(conv(x.shape[-1])(s))


class LinenDense(nn.Module):
    """Dense layers of (N, C), and the gates in front."""

    reduced: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        s = nn.relu(nn.Dense(self.reduced, bias_init=nn.initializers.normal(1.0))(jnp.mean(x, (1, 2))))
        return nn.sigmoid(nn.Dense(x.shape[-1])(s))[:, None, None, :] * x


class Nnx(nnx.Module):
    def __init__(self, channels: int, reduced: int, rngs: nnx.Rngs):
        self.first = nnx.Conv(channels, reduced, (1, 1), rngs=rngs)
        self.second = nnx.Linear(reduced, channels, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        s = nnx.relu(self.first(jnp.mean(x, axis=(1, 2), keepdims=True)))
        return x * nnx.hard_sigmoid(self.second(s))


def keras_like(w1: Any, b1: Any, w2: Any, b2: Any, x: Any) -> Any:
    """Pooling to (N, C), a reshape, convolutions, float32 statistics of 16 bits."""
    n, c = x.shape[0], x.shape[-1]
    pooled = jnp.mean(x.astype(jnp.float32), (1, 2)).astype(x.dtype).reshape(n, 1, 1, c)
    conv = functools.partial(
        jax.lax.conv_general_dilated, window_strides=(1, 1), padding="VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    s = jax.nn.silu(conv(pooled, w1[None, None]) + b1.reshape(1, 1, 1, -1))
    return jnp.multiply(x, jax.nn.sigmoid(conv(s, w2[None, None]) + b2.reshape(1, 1, 1, -1)))


def timm_like(w1: Any, b1: Any, w2: Any, b2: Any, x: Any) -> Any:
    """MobileNetV3's: sums times a reciprocal, relu6(z + 3) / 6 written out."""
    mean = x.sum((1, 2)) * (1 / (x.shape[1] * x.shape[2]))
    z = jnp.maximum(mean @ w1 + b1, 0) @ w2 + b2
    return (jnp.clip(z + 3, 0, 6) / 6)[:, None, None] * x


def transposed(w1: Any, b1: Any, w2: Any, b2: Any, x: Any) -> Any:
    """Filters (out, in, 1, 1)."""
    conv = functools.partial(
        jax.lax.conv_general_dilated, window_strides=(1, 1), padding="SAME", dimension_numbers=("NHWC", "OIHW", "NHWC")
    )
    s = jax.nn.gelu(conv(jnp.mean(x, (1, 2), keepdims=True), w1.T[:, :, None, None]) + b1)
    return x * jax.nn.hard_sigmoid(conv(s, w2.T[:, :, None, None]) + b2)


def inputs(dtype: str, images: int = 3) -> tuple[Any, ...]:
    x, w1, b1, w2, b2, _ = arrays(data((images, 5, 7, 24), 6, "float32"), "float32")
    return tuple(a.astype(dtype) for a in (w1, b1, w2, b2, x))


def of_module(module: nn.Module) -> Callable[[str, int], tuple[Any, tuple[Any, ...]]]:
    def made(dtype: str, images: int) -> tuple[Any, tuple[Any, ...]]:
        x = inputs(dtype, images)[-1]
        m = module.clone(dtype=jnp.dtype(dtype)) if hasattr(module, "dtype") else module
        return m.apply, (m.init(jax.random.key(0), x), x)

    return made


def of_nnx(dtype: str, images: int) -> tuple[Any, tuple[Any, ...]]:
    graph, state = nnx.split(Nnx(24, 6, nnx.Rngs(0)))
    x = inputs("float32", images)[-1]
    return lambda state, x: nnx.merge(graph, state)(x), (state, x)


def of_function(f: Any) -> Callable[[str, int], tuple[Any, tuple[Any, ...]]]:
    return lambda dtype, images: (f, inputs(dtype, images))


FORMS: dict[str, tuple[Any, str]] = {
    "linen": (of_module(Linen(6)), "silu + sigmoid"),
    "linen_without_bias": (of_module(Linen(6, bias=False)), "silu + sigmoid"),
    "linen_hard": (of_module(Linen(6, nn.relu, nn.hard_sigmoid)), "relu + hard_sigmoid"),
    "linen_gelu": (of_module(Linen(6, nn.gelu)), "gelu + sigmoid"),
    "linen_dense": (of_module(LinenDense(6)), "relu + sigmoid"),
    "nnx": (of_nnx, "relu + hard_sigmoid"),
    "keras_like": (of_function(keras_like), "silu + sigmoid"),
    "timm_like": (of_function(timm_like), "relu + hard_sigmoid"),
    "transposed": (of_function(transposed), "gelu + hard_sigmoid"),
}


@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
def test_it_is_recognised_as_people_write_it(form, dtype, images):
    made, fused = FORMS[form]
    f, args = made(dtype, images)
    accelerated = jaxconv.accelerate(f)
    report = accelerated.report(*args)
    assert [(found.what, found.fused) for found in report] == [("squeeze_excite", f"squeeze_excite + {fused}")]
    assert [call.op for call in jaxconv.explain(accelerated)(*args)] == ["squeeze_excite"]
    with jax.default_matmul_precision("highest"):  # as the kernel multiplies; a GPU's float32 is TF32 by default
        expected = jax.jit(f)(*args)
    found = jax.jit(accelerated)(*args)
    assert found.dtype == expected.dtype
    # Up to the rounding of what is in between, of the type that the images have.
    eps = float(jnp.finfo(args[-1].dtype).eps)
    largest = float(jnp.abs(expected).max())
    np.testing.assert_allclose(
        np.asarray(found, np.float64), np.asarray(expected, np.float64), rtol=8 * eps, atol=8 * eps * largest
    )


@pytest.mark.parametrize("form", FORMS)
def test_its_gradient_is_the_functions(form):
    made, _ = FORMS[form]
    f, args = made("float32", 2)

    def loss(f: Any, args: Any) -> Any:
        return (f(*args) ** 2).sum()

    value, grads = jax.jit(jax.value_and_grad(functools.partial(loss, jaxconv.accelerate(f))))(args)
    with jax.default_matmul_precision("highest"):
        expected, theirs = jax.jit(jax.value_and_grad(functools.partial(loss, f)))(args)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * float(jnp.abs(b).max()))


def test_weights_are_taken_before_they_are_narrowed():
    """float32 parameters of a layer that computes in bfloat16: no conversions are left, and gradients are float32's."""
    f, args = of_module(Linen(6))("bfloat16", 3)
    text = str(jax.make_jaxpr(jaxconv.accelerate(f))(*args))
    assert "convert_element_type" not in text and "jaxconv_squeeze_excite" in text


def excite(w1: Any, w2: Any, x: Any, **more: Any) -> tuple[Any, Any, Any, Any]:
    mean = more.get("mean", lambda x: jnp.mean(x, (1, 2)))(x)
    h = jax.nn.relu(mean @ w1)
    g = more.get("gate", jax.nn.sigmoid)(h @ w2)
    return x * more.get("spread", lambda g: g[:, None, None])(g), mean, h, g


LEFT: dict[str, Callable[..., Any]] = {
    "the gate is returned": lambda w1, w2, x: excite(w1, w2, x)[::3],
    "the hidden numbers are returned": lambda w1, w2, x: excite(w1, w2, x)[::2],
    "the mean is returned": lambda w1, w2, x: excite(w1, w2, x)[:2],
}
OTHERS: dict[str, Callable[..., Any]] = {
    "of another array's mean": lambda w1, w2, x: excite(w1, w2, x, mean=lambda x: jnp.mean(x * x, (1, 2)))[0],
    "of sums": lambda w1, w2, x: excite(w1, w2, x, mean=lambda x: jnp.sum(x, (1, 2)))[0],
    "over one axis": lambda w1, w2, x: excite(w1, w2, x, mean=lambda x: jnp.mean(x, 1)[:, 0])[0],
    "of maxima": lambda w1, w2, x: excite(w1, w2, x, mean=lambda x: jnp.max(x, (1, 2)))[0],
    "tanh": lambda w1, w2, x: excite(w1, w2, x, gate=jnp.tanh)[0],
    "gates of pixels": lambda w1, w2, x: excite(w1, w2, x, spread=lambda g: g[:, None, None, :] + x * 0)[0],
    "of all images": lambda w1, w2, x: excite(w1, w2, x, mean=lambda x: jnp.mean(x, (0, 1, 2))[None])[0],
}


@pytest.mark.parametrize("case", LEFT)
def test_what_is_used_elsewhere_is_left_and_the_report_says_so(case):
    w1, _, w2, _, x = inputs("float32")
    found = jaxconv.accelerate(LEFT[case]).report(w1, w2, x)
    (left,) = [f for f in found if f.what == "squeeze_excite"]
    assert left.fused == "" and "something else needs its means, hidden numbers or gates" in left.why
    for a, b in zip(jaxconv.accelerate(LEFT[case])(w1, w2, x), LEFT[case](w1, w2, x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", OTHERS)
def test_what_is_none_is_left(case):
    w1, _, w2, _, x = inputs("float32")
    f = OTHERS[case]
    assert not [found for found in jaxconv.accelerate(f).report(w1, w2, x) if found.what == "squeeze_excite"]
    np.testing.assert_allclose(jaxconv.accelerate(f)(w1, w2, x), f(w1, w2, x), rtol=1e-5, atol=1e-6)


@pytest.mark.as_planned
def test_on_a_gpu_it_is_taken_where_the_plan_is_native(monkeypatch, code_for_gpus):
    from jaxconv._plan import measured

    w1, b1, w2, b2, _ = inputs("float32")
    x = jax.ShapeDtypeStruct((256, 14, 14, 24), "float32")
    device = _plan.Device("cuda", "a GPU", (9, 0), 132)
    monkeypatch.setattr(measured, "_learned", {})
    accelerated = jaxconv.accelerate(timm_like)

    def what() -> Any:
        with _plan.Device.assumed(device):
            return next(f for f in accelerated.report(w1, b1, w2, b2, x) if f.what == "squeeze_excite")

    left = what()
    assert not left.fused and left.why.startswith("the GPU's plan is XLA: no native kernel was measured")
    p = problem(x.shape, 6, save=True)
    op, kind, coordinates = measured.features("squeeze_excite", p)
    entry = {"case": "here", "problem": "", "xla_ms": 0.10, "native_ms": {"one_pass": 0.05}}
    measured.learn(device.kind, [{**entry, "op": op, "kind": kind, "coordinates": coordinates}])
    assert what().fused == "squeeze_excite + relu + hard_sigmoid"

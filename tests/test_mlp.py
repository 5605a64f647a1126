"""mlp against the two dense layers that it stands for, and dense_gradient, the product that goes back through f."""

from __future__ import annotations

import dataclasses
import functools
import itertools
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
    NAMED_ACTIVATIONS,
    PLATFORM,
    calls,
    equations,
    integers,
    label,
    normal,
    opcodes,
    types_of,
)
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from tolerance import assert_close, assert_exact

import jaxconv
from jaxconv import _activation, _plan, _sharding
from jaxconv._plan import domain, measured, tuned
from jaxconv._problem import DenseProblem
from jaxconv.dense import dense_gradient

IMPLEMENTATIONS = ("native", "xla", None)
NAMES = ("x", "w1", "b1", "w2", "b2")
M, K, H, N = 33, 24, 40, 16
HOPPER = PLATFORM == "cuda" and DEVICE.compute_capability == (9, 0)


@pytest.fixture(autouse=True)
def exact_products():
    """Products in float32 on a GPU too: TF32 would hide what is compared."""
    with jax.default_matmul_precision("highest"):
        yield


def two_layers(x, w1, b1, w2, b2, *, activation="gelu", out_activation=None, **options):
    h = jaxconv.dense(x, w1, b1, activation=activation, **options)
    return jaxconv.dense(h, w2, b2, activation=out_activation, **options)


def arrays(make: Any = normal, lead: tuple[int, ...] = (M,), dtype: str = "float64", *how: Any) -> list[np.ndarray]:
    shapes = ((*lead, K), (K, H), (H,), (H, N), (N,))
    return [make(i, shape, *how) for i, shape in enumerate(shapes)]


def with_gradients(f: Any, *args: Any) -> tuple[Any, ...]:
    """y and the gradients of all arguments."""
    some = [i for i, a in enumerate(args) if a is not None]

    def of_some(*given: Any) -> Any:
        values = list(args)
        for i, a in zip(some, given, strict=True):
            values[i] = a
        return f(*values)

    y, back = jax.vjp(of_some, *(args[i] for i in some))
    return y, *back(jnp.asarray(normal(9, y.shape), y.dtype))


# ----------------------------------------------------------------------------------------------------------------------
# mlp


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=label)
def test_integers_give_exactly_what_numpy_gives(implementation, dtype):
    with types_of(dtype):
        x, w1, b1, w2, b2 = given = [integers(i, a.shape, 1) for i, a in enumerate(arrays())]
        dy = integers(7, (M, N), 1)
        f = functools.partial(jaxconv.mlp, activation="relu", implementation=implementation)

        def run(dy, *args):
            y, back = jax.vjp(f, *args)
            return y, *back(dy)

        outs = jax.jit(run)(*(jnp.asarray(a, dtype) for a in (dy, *given)))
    z1 = x @ w1 + b1
    h = np.maximum(z1, 0)
    dz1 = (dy @ w2.T) * (z1 > 0)
    expected = h @ w2 + b2, dz1 @ w1.T, x.T @ dz1, dz1.sum(0), h.T @ dy, dy.sum(0)
    if dtype in ("bfloat16", "float16"):  # what they hold exactly
        expected = tuple(np.asarray(jnp.asarray(e, dtype), np.float64) for e in expected)
    for what, out, e in zip(("y", *NAMES), outs, expected, strict=True):
        assert out.dtype.name == dtype
        if dtype == "bfloat16" and what in ("x", "w1", "w2", "y"):
            continue  # of h's sums past 256
        assert_exact(out, e, what)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", NAMED_ACTIVATIONS, ids=label)
def test_it_errs_no_more_than_twice_xla(activation, dtype):
    _, _, _, w2, b2 = arrays(normal, (M,), dtype, dtype)
    # z1 is exact, and between the kinks.
    x, w1, b1 = integers(0, (M, K), 1) / 4, integers(1, (K, H), 1), integers(2, (H,), 1) / 4 + 0.125
    given, dy = [x, w1, b1, w2, b2], normal(9, (M, N), dtype)
    out_activation = "tanh" if activation == "silu" else None

    def run(options, dy, *args):
        f = functools.partial(jaxconv.mlp, activation=activation, out_activation=out_activation, **options)
        y, back = jax.vjp(f, *args)
        return y, *back(dy)

    def two(dy, *args):
        f = functools.partial(two_layers, activation=activation, out_activation=out_activation, implementation="xla")
        y, back = jax.vjp(f, *args)
        return y, *back(dy)

    with types_of(dtype):
        values = [jnp.asarray(a, dtype) for a in (dy, *given)]
        actual = jax.jit(functools.partial(run, {"implementation": "native"}))(*values)
        xla = jax.jit(two)(*values)
    z1 = x @ w1 + b1
    h = ref.activate(activation, z1)
    z2 = h @ w2 + b2
    dz2 = dy * ref.slope(out_activation, z2)
    dz1 = (dz2 @ w2.T) * ref.slope(activation, z1)
    references = (ref.activate(out_activation, z2), dz1 @ w1.T, x.T @ dz1, dz1.sum(0), h.T @ dz2, dz2.sum(0))
    scales = [np.abs(z2).max()] + [np.abs(dz1).max() * np.sqrt(t) for t in (H, M, M)]
    scales += [np.abs(h).max() * np.abs(dz2).max() * np.sqrt(M), np.abs(dz2).max() * np.sqrt(M)]
    for what, a, t, r, s in zip(("y", *NAMES), actual, xla, references, scales, strict=True):
        assert_close(a, t, r, K + H + N, what, scale=s)


@pytest.mark.parametrize("biases", ["both", "first", "second", "none"])
@pytest.mark.parametrize("lead", [(), (3,), (2, 1, 3)], ids=str)
def test_leading_dimensions_are_rows_and_biases_may_be_missing(lead, biases, x64):
    x, w1, b1, w2, b2 = (jnp.asarray(a) for a in arrays(normal, lead))
    b1, b2 = b1 if biases in ("both", "first") else None, b2 if biases in ("both", "second") else None
    ours, theirs = (with_gradients(f, x, w1, b1, w2, b2) for f in (jaxconv.mlp, two_layers))
    assert ours[0].shape == (*lead, N)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("wanted", [c for n in (1, 2, 5) for c in itertools.combinations(range(5), n)], ids=str)
def test_only_what_is_wanted_is_computed(wanted, x64):
    args = [jnp.asarray(a) for a in arrays()]

    def loss(f, *args):
        return jnp.sum(jnp.sin(f(*args)))

    gradient = jax.grad(functools.partial(loss, jaxconv.mlp), wanted)
    for a, b in zip(gradient(*args), jax.grad(functools.partial(loss, two_layers), wanted)(*args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10)
    found = equations(gradient, *args)
    assert found["jaxconv_dense_gradient"] == bool({0, 1, 2}.intersection(wanted))
    assert found["jaxconv_matmul"] == len({0, 1, 3}.intersection(wanted))


DERIVATIVES = [
    *(("gelu", a, "both") for a in (None, "silu", "tanh")),
    *((a, None, "both") for a in (None, "tanh", "elu", "leaky_relu", ("leaky_relu", -0.5), "sigmoid", "gelu_exact")),
    ("silu", "gelu", "none"),
    ("relu", "relu6", "first"),
]


# On a CPU the rules are tried with native products, and with XLA's where each kind of them is met once.
BY_WHOM = [
    pytest.param(*case, whom, marks=pytest.mark.slow if PLATFORM == "cpu" and whom == "xla" and 0 < i < 10 else [])
    for i, case in enumerate(DERIVATIVES)
    for whom in (*(("native",) if PLATFORM == "cpu" else ()), "xla")
]


@pytest.mark.parametrize(("activation", "out_activation", "biases", "implementation"), BY_WHOM, ids=label)
def test_derivatives_of_any_order(activation, out_activation, biases, implementation, x64):
    x, w1, b1, w2, b2 = (jnp.asarray(normal(i, s)) for i, s in enumerate(((2, 3, 4), (4, 6), (6,), (6, 5), (5,))))
    given = [x, w1, w2, *([b1] if biases != "none" else []), *([b2] if biases == "both" else [])]

    def f(x, w1, w2, *b):
        first, second = b[0] if b else None, b[1] if len(b) > 1 else None
        options = dict(activation=activation, out_activation=out_activation, implementation=implementation)
        return jaxconv.mlp(x, w1, first, w2, second, **options)

    check_grads(f, given, order=2, modes=("fwd", "rev"), atol=2e-4, rtol=2e-4)
    # The second derivative of the derivative's own cotangent: linear, and transposed once more.
    ct = jnp.asarray(normal(7, (2, 3, 5)))
    back = jax.vjp(f, *given)[1]
    twice = jax.vjp(back, ct)[1](tuple(jnp.ones_like(a) for a in given))[0]
    np.testing.assert_allclose(twice, jax.jvp(f, given, [jnp.ones_like(a) for a in given])[1], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("mapped", ["10000", "01000", "00100", "00010", "00001", "10101", "11111"])
def test_it_maps(mapped, x64):
    axes = tuple(0 if m == "1" else None for m in mapped)
    shapes = [((3,) if axis == 0 else ()) + a.shape for a, axis in zip(arrays(), axes, strict=True)]
    args = [jnp.asarray(normal(i, s)) for i, s in enumerate(shapes)]

    def run(f):
        return jax.vmap(functools.partial(with_gradients, f), in_axes=axes)(*args)

    for a, b in zip(run(jaxconv.mlp), run(two_layers), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


def test_no_rows():
    args = [jnp.asarray(a, "float32") for a in arrays(normal, (0,))]
    outs = jax.jit(functools.partial(with_gradients, jaxconv.mlp))(*args)
    assert outs[0].shape == (0, N)
    for a, out in zip(args, outs[1:], strict=True):
        np.testing.assert_array_equal(out, np.zeros(a.shape))


def test_symbolic_rows():
    _, *weights = (jnp.asarray(a, "float32") for a in arrays())

    @jax.jit
    def f(x):
        y, back = jax.vjp(lambda *args: jaxconv.mlp(*args), x, *weights)
        return y, *back(y)

    rows = jax.export.symbolic_shape("n")[0]
    exported = jax.export.export(f, disabled_checks=jaxconv.export_checks())(jax.ShapeDtypeStruct((rows, K), "float32"))
    x = jnp.asarray(normal(0, (7, K)), "float32")
    for a, b in zip(exported.call(x), f(x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("activation", "saves"), [("relu", 0), ("relu6", 0), ("leaky_relu", 0), ("tanh", 0), ("elu", 0), ("gelu", 1)]
)
def test_z_is_saved_only_for_the_gradient_and_only_where_it_is_needed(activation, saves):
    args = [jnp.asarray(a, "float32") for a in arrays()]
    f = functools.partial(jaxconv.mlp, activation=activation)
    hidden = f"float32[{M},{H}]"
    text = str(jax.make_jaxpr(f)(*args))
    assert "jaxconv_mlp" in text and hidden.replace("float32", "f32") not in text
    jaxpr = jax.make_jaxpr(jax.grad(lambda *a: f(*a).sum()))(*args).jaxpr
    (pair,) = (e for e in jaxpr.eqns if e.primitive.name == "jaxconv_mlp")
    assert [v.aval.shape for v in pair.outvars] == [(M, N), (M, H), *[(M, H)] * saves]


def test_remat_runs_it_again_or_keeps_it():
    args = [jnp.asarray(a, "float32") for a in arrays()]

    def loss(policy, *args):
        return jax.checkpoint(lambda *a: jnp.sin(jaxconv.mlp(*a)), policy=policy)(*args).sum()

    expected = jax.grad(functools.partial(loss, None))(*args)
    for policy, count in ((None, 2), (jaxconv.checkpoint_policies.save_products, 1)):
        gradient = jax.grad(functools.partial(loss, policy))
        np.testing.assert_allclose(gradient(*args), expected, rtol=1e-5, atol=1e-5)
        assert equations(gradient, *args)["jaxconv_mlp"] == count
    names = jax.checkpoint_policies.save_only_these_names("jaxconv_mlp")
    assert equations(jax.grad(functools.partial(loss, names)), *args)["jaxconv_mlp"] == 1


def test_explain_shows_the_layers_and_the_gradient():
    args = [jnp.asarray(a, "float32") for a in arrays()]
    found = jaxconv.explain(jax.grad(lambda *a: jaxconv.mlp(*a).sum(), tuple(range(5))))(*args)
    kinds = [call.op for call in found]
    assert kinds[:3] == ["mlp", "dense", "dense"] and "dense_gradient" in kinds
    plans = {call.op: str(call.plan) for call in found}
    assert plans["mlp"] == "calls[two]" and plans["dense_gradient"] == "calls[three]"
    assert str(found[0].problem) == f"{M}x{K}x{H} NN float32 + bias + gelu, then {M}x{H}x{N} NN float32 + bias"


def test_operations_are_counted():
    args = [jnp.asarray(a, "float32") for a in arrays()]
    product = 2 * M * K * H + 2 * M * H * N
    forward = jaxconv.cost(jaxconv.mlp)(*args)["flops"]
    assert product < forward < 1.2 * product
    both = jaxconv.cost(jax.grad(lambda *a: jaxconv.mlp(*a).sum(), tuple(range(5))))(*args)["flops"]
    assert 3 * product < both < 3.5 * product


ERRORS = {
    "x": (dict(x=jnp.float32(1)), ValueError, r"mlp: x has 0 dimensions, expected \(..., K\)"),
    "w1": (dict(w1=jnp.ones(4)), ValueError, r"mlp: w1 has 1 dimensions, expected 2 \(K, H\)"),
    "w2": (dict(w2=jnp.ones((6, 5, 1))), ValueError, r"mlp: w2 has 3 dimensions, expected 2 \(H, N\)"),
    "features": (dict(w1=jnp.ones((3, 6))), ValueError, "mlp: w1 expects 3 input features, x has 4"),
    "hidden": (dict(w2=jnp.ones((7, 5))), ValueError, "mlp: w2 expects 7 input features, w1 makes 6"),
    "b1": (dict(b1=jnp.ones(5)), ValueError, r"mlp: b1 has shape \(5,\), expected \(6,\)"),
    "b2": (dict(b2=jnp.ones((1, 5))), ValueError, r"mlp: b2 has shape \(1, 5\), expected \(5,\)"),
    "dtype": (dict(w2=jnp.ones((6, 5), "bfloat16")), TypeError, "mlp: "),
    "none": (dict(w1=None), TypeError, "mlp: w1 must be an array, got None"),
    "activation": (dict(activation="mish"), ValueError, "mlp: activation='mish' is unknown"),
    "algorithm": (dict(algorithm="im2col"), ValueError, "mlp: algorithm='im2col' is unknown"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument(name):
    changed, kind, message = ERRORS[name]
    good = dict(x=jnp.ones((2, 4)), w1=jnp.ones((4, 6)), b1=jnp.ones(6), w2=jnp.ones((6, 5)), b2=jnp.ones(5))
    jaxconv.mlp(**good)
    with pytest.raises(kind, match=message):
        jaxconv.mlp(**{**good, **changed})


# ----------------------------------------------------------------------------------------------------------------------
# dense_gradient


def problem(m: int = M, k: int = K, n: int = H, activation: Any = "gelu", **fields: Any) -> DenseProblem:
    options: dict[str, Any] = dict(dtype="float32", precision=(lax.Precision.HIGHEST,) * 2, trans_w=True)
    f = _activation.parse("", activation)
    return DenseProblem("mlp", m=m, k=k, n=n, activation=f, **{**options, **fields})


def of_numpy(p: DenseProblem, dy: np.ndarray, w: np.ndarray, z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    name = p.activation.name if p.activation.name != "leaky_relu" else ("leaky_relu", p.activation.slope)
    dz = p.alpha * dy @ (w.T if p.trans_w else w) * ref.slope(name, z)
    return dz, dz.sum(0)


@pytest.mark.parametrize("trans_w", (False, True), ids=("w", "w_transposed"))
@pytest.mark.parametrize("activation", ("relu", "relu6", ("leaky_relu", 0.5)), ids=label)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_of_integers_is_exact(dtype, activation, trans_w):
    """Of z, and of the y of activations whose derivative it decides."""
    p = problem(dtype=dtype, activation=activation, trans_w=trans_w, alpha=0.5)
    dy, w, z = integers(0, p.x_shape, 1), integers(1, p.w_shape, 1), integers(2, p.y_shape, 7) + 0.5
    expected = of_numpy(p, dy, w, z)
    with types_of(dtype):
        f = jax.jit(functools.partial(dense_gradient, p))
        for kept in (z, ref.activate(activation, z)):
            outs = f(*(jnp.asarray(a, dtype) for a in (dy, w, kept)))
            assert [out.dtype.name for out in outs] == [dtype] * 2
            assert_exact(outs[0], expected[0], "dz")
            assert_exact(outs[1], np.asarray(jnp.asarray(expected[1], dtype), np.float64), "db")


TILES = ("128x256", "256x128", "128x128")
SHAPES = {
    (64, 64, 128): "less than a tile",
    (300, 96, 384): "rows of no tile, K past a stage",
    (1000, 200, 136): "odd multiples of 8",
    (256, 1536, 72): "a long reduction",
    (40000, 64, 256): "more tiles than multiprocessors",
}


@pytest.mark.skipif(not HOPPER, reason="sm90 needs compute capability 9.0")
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("activation", [a for a in NAMED_ACTIVATIONS if a is not None], ids=label)
def test_every_tile_is_as_exact_as_three_calls(activation, shape, dtype, tile):
    m, k, n = shape
    p = problem(m, k, n, activation, dtype=dtype, algorithm=f"{_plan.GRADIENT} {tile}")
    refusal = _plan.supports("dense_gradient", p.algorithm, p, DEVICE)
    if refusal:
        pytest.skip(refusal)
    dy, w, z = (normal(i, s, dtype) for i, s in enumerate((p.x_shape, p.w_shape, p.y_shape)))
    z = np.copysign(np.maximum(np.abs(z), 2.0**-6), z)  # not so near a kink that y is 0
    kept = ref.activate(activation, z) if p.activation.residual == "y" else z
    args = [jnp.asarray(a, dtype) for a in (dy, w, kept)]
    f = jax.jit(functools.partial(dense_gradient, p))
    assert calls(f, *args) == {"dense_gradient": 1}
    ours = f(*args)
    xla = jax.jit(functools.partial(dense_gradient, dataclasses.replace(p, algorithm=None, implementation="xla")))
    dz, db = of_numpy(p, dy, w, z)
    assert_close(ours[0], xla(*args)[0], dz, k, "dz", scale=np.abs(dz).max())
    assert_close(ours[1], xla(*args)[1], db, k + m, "db", scale=np.abs(dz).max() * np.sqrt(m))
    # db is the sum of what was written.
    exact = np.asarray(ours[0], np.float64).sum(0)
    np.testing.assert_allclose(ours[1].astype("float32"), exact, rtol=2.0**-8, atol=1e-3 * np.abs(exact).max())
    again = f(*args)
    assert all(np.array_equal(a, b) for a, b in zip(ours, again, strict=True))


@pytest.mark.parametrize("activation", ("gelu", "tanh", "relu"))
def test_the_gradient_has_derivatives_and_a_transpose(activation, x64):
    p = problem(5, 4, 6, activation, dtype="float64")
    dy, w, z = (jnp.asarray(normal(i, s)) for i, s in enumerate((p.x_shape, p.w_shape, p.y_shape)))
    f = functools.partial(dense_gradient, p)
    check_grads(f, (dy, w, z), order=2, modes=("fwd", "rev"), atol=1e-4, rtol=1e-4)
    cts = [jnp.asarray(normal(7, (5, 6))), jnp.asarray(normal(8, (6,)))]
    # It is linear in dy and in w.
    expected = jax.vjp(f, dy, w, z)[1](cts)
    by_dy, by_w = jax.linear_transpose(lambda v: f(v, w, z), dy), jax.linear_transpose(lambda v: f(dy, v, z), w)
    for back, e in ((by_dy, expected[0]), (by_w, expected[1])):
        np.testing.assert_allclose(back(cts)[0], e, rtol=1e-12)


@pytest.mark.parametrize("kind", ("Auto", "Explicit"))
@pytest.mark.parametrize("spec", ("a--", "-a-", "--a", "ab-", "a-b"))
def test_the_gradient_split_over_a_mesh(kind, spec):
    """Rows, the reduction, columns: db is summed over the rows' shards."""
    if len(jax.devices()) < 4:
        pytest.skip("needs four devices")
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4], axis_types=(getattr(AxisType, kind),) * 2)
    p = problem(32, 16, 24, "relu")
    m, k, n = (None if axis == "-" else axis for axis in spec)
    args = [integers(i, s, 2) for i, s in enumerate((p.x_shape, p.w_shape, p.y_shape))]
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(jnp.asarray(a, "float32"), NamedSharding(mesh, P(*s)))
            for a, s in zip(args, ((m, k), (n, k), (m, n)), strict=True)
        ]
        outs = jax.jit(functools.partial(dense_gradient, p))(*placed)
        if kind == "Auto":  # as where a kernel is planned: the rule, not XLA, says what a shard runs
            ruled = jax.jit(_sharding.auto(dense_gradient, p, mesh))
            found = opcodes(ruled.lower(*placed).compile().as_text())
            assert "all-gather" not in found and ("all-reduce" in found) == (spec != "--a")
            outs = [*outs, *ruled(*placed)]
    for out, expected in zip(outs, of_numpy(p, *args) * (len(outs) // 2), strict=True):
        assert_exact(out, expected)


@pytest.mark.parametrize("kind", ("Auto", "Explicit"))
def test_both_layers_split_over_a_mesh(kind):
    """Rows over one axis and hidden columns over the other, as large transformers are split."""
    if len(jax.devices()) < 4:
        pytest.skip("needs four devices")
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4], axis_types=(getattr(AxisType, kind),) * 2)
    given = [jnp.asarray(a, "float32") for a in arrays(integers, (8,), "float32", 1)]
    specs = (P("a", None), P(None, "b"), P("b"), P("b", None), P(None))

    def run(*args):
        y, back = jax.vjp(functools.partial(jaxconv.mlp, activation="relu"), *args)
        return y, *back(y)

    expected = jax.jit(run)(*given)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(given, specs, strict=True)]
        outs = jax.jit(run)(*placed)
    for a, b in zip(outs, expected, strict=True):
        np.testing.assert_array_equal(a, b)


# ----------------------------------------------------------------------------------------------------------------------
# The plan of dense_gradient


@pytest.fixture
def with_the_kernel(code_for_gpus, monkeypatch):
    """As where the CUDA module is: its kernel takes multiples of 8 in 16 bits."""

    def refusal(plan: Any, p: DenseProblem, device: Any) -> str | None:
        if plan.kernel == _plan.GRADIENT:
            return None if p.dtype != "float32" and p.n % 8 == 0 and p.k % 8 == 0 else "16 bits, and multiples of 8"
        return real(plan, p, device)

    real = domain.dense_refusal
    monkeypatch.setattr(domain, "dense_refusal", refusal)
    monkeypatch.setattr(domain, "dense_workspace", lambda plan, p: 4096)
    monkeypatch.setattr(measured, "_learned", {})


def planned(p: DenseProblem, device: Any = H200) -> Any:
    return _plan.plan("dense_gradient", p, device)


def test_forced_it_is_the_kernel_where_that_runs(with_the_kernel):
    p = problem(802816, 96, 384, dtype="bfloat16")
    for forced in (dict(algorithm="sm90"), dict(algorithm=_plan.GRADIENT), dict(implementation="native")):
        made = planned(dataclasses.replace(p, **forced))
        assert (made.implementation, made.kernel, made.workspace_bytes) == ("native", _plan.GRADIENT, 4096)
    for tile in TILES:
        assert planned(dataclasses.replace(p, algorithm=f"{_plan.GRADIENT} {tile}")).tile == tile
    # What asks for the products' algorithm has it for the product at least.
    for forced in ("gemm", "sm90/product", "sm90/product 128x128"):
        assert str(planned(dataclasses.replace(p, algorithm=forced))) == "calls[three]"
    assert str(planned(dataclasses.replace(p, algorithm="sm90", dtype="float32"))) == "calls[three]"
    assert str(planned(dataclasses.replace(p, implementation="native", k=97))) == "calls[three]"
    with pytest.raises(ValueError, match=r"mlp: algorithm='sm90/gradient' cannot run dense_gradient of .*16 bits"):
        planned(dataclasses.replace(p, algorithm=_plan.GRADIENT, dtype="float32"))
    with pytest.raises(ValueError, match="there is no such kernel"):
        planned(dataclasses.replace(p, algorithm=f"{_plan.GRADIENT} 64x64"))


def test_unforced_it_is_the_kernel_where_that_was_measured_to_be_faster(with_the_kernel, monkeypatch):
    device = dataclasses.replace(H200, kind="a device")
    p = problem(802816, 96, 384, dtype="bfloat16")
    assert "was measured near it on a device" in planned(p, device).reason
    op, kind, coordinates = measured.features("dense_gradient", p)
    assert op == "dense_gradient" and "gelu" in kind
    entry = dict(op=op, kind=kind, coordinates=coordinates, case="it", xla_ms=2.0)
    # A dense layer's own times say nothing of it.
    measured.learn("a device", [{**entry, "op": "dense", "native_ms": {_plan.GRADIENT: 1.0}}])
    assert str(planned(p, device)) == "calls[three]"
    measured.learn("a device", [{**entry, "native_ms": {_plan.GRADIENT: 1.0}}])
    made = planned(p, device)
    assert made.kernel == _plan.GRADIENT and "2.00 times faster than XLA at it" in made.reason
    assert planned(dataclasses.replace(p, m=2 * p.m), device).kernel == _plan.GRADIENT
    for other in (dict(activation=_activation.Activation("silu")), dict(k=8 * p.k), dict(trans_w=False)):
        assert str(planned(dataclasses.replace(p, **other), device)) == "calls[three]"
    assert str(planned(p, dataclasses.replace(device, partitioned=True))) == "calls[three]"
    monkeypatch.setenv("JAXCONV_DISABLE", "dense")
    assert str(planned(p, device)) == "calls[three]"
    monkeypatch.delenv("JAXCONV_DISABLE")
    measured.learn("a device", [{**entry, "native_ms": {_plan.GRADIENT: 1.95}}])
    made = planned(p, device)
    assert str(made) == "calls[three]" and [c.name for c in made.candidates] == [_plan.GRADIENT, "xla"]


@pytest.mark.parametrize("activation", ("gelu", "relu", ("leaky_relu", -0.5)), ids=label)
def test_the_gradient_of_a_layer_is_one_call_on_a_gpu(with_the_kernel, activation):
    """As lowered: of z, or of y where it decides the derivative."""
    x, w1, w2 = (jax.ShapeDtypeStruct(s, "bfloat16") for s in ((64, 72), (72, 128), (128, 72)))
    b1, b2 = (jax.ShapeDtypeStruct(s, "bfloat16") for s in ((128,), (72,)))

    def loss(*args):
        return jaxconv.mlp(*args, activation=activation, algorithm="sm90").sum()

    with _plan.Device.assumed(H200):
        traced = jax.jit(jax.grad(loss, tuple(range(5)))).trace(x, w1, b1, w2, b2)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    (call,) = (line for line in text.splitlines() if "@jaxconv_dense_gradient_v2" in line)
    types = call.rpartition(" : ")[2]
    rows, wide = "tensor<64x72xbf16>", "tensor<64x128xbf16>"
    assert types == f"({rows}, tensor<128x72xbf16>, {wide}) -> ({wide}, tensor<128xbf16>, tensor<4096xui8>)"
    name = label(activation) if isinstance(activation, str) else activation[0]
    for attribute in (f'activation = "{name}"', "trans_w = 1 : i64", 'bias = "none"', f'kernel = "{_plan.GRADIENT}"'):
        assert attribute in call, attribute
    assert text.count("@jaxconv_dense_v2") == 2 and text.count("@jaxconv_matmul_v2") == 3


def test_every_tile_may_be_tuned(with_the_kernel):
    p = problem(12544, 768, 3072, dtype="bfloat16")
    assert {plan.spec for plan in _plan.tiles("dense_gradient", p, H200)} == {f"{_plan.GRADIENT} {t}" for t in TILES}
    assert [plan.kernel for plan in _plan.every("dense_gradient", p, H200)] == [_plan.GRADIENT]


def test_what_was_tuned_is_taken(with_the_kernel):
    p = problem(12544, 768, 3072, dtype="bfloat16")
    jaxlib, version = tuned.versions()
    times = {f"{_plan.GRADIENT} 256x128": 0.5, f"{_plan.GRADIENT} 128x128": 0.6}
    fields = dict(op="dense_gradient", key=tuned.key_of(p), problem=str(p), device=tuned.device_name(H200))
    entry = tuned.Entry(**fields, jaxlib=jaxlib, jaxconv=version, xla_ms=1.0, native_ms=times, choice=None)
    for choice, expected in (("xla", "calls[three]"), (f"{_plan.GRADIENT} 256x128", "native[sm90/gradient 256x128]")):
        with jaxconv.tune.applied(tuned.Results([dataclasses.replace(entry, choice=choice)])):
            made = planned(p)
        assert str(made) == expected and "tuned on this device" in made.reason and len(made.candidates) == 3


@pytest.mark.parametrize("options", [dict(implementation="native"), dict(algorithm="gemm"), {}], ids=str)
def test_on_a_cpu_it_is_three_calls(options):
    if PLATFORM != "cpu":
        pytest.skip("of CPUs")
    p = problem(**options)
    made = planned(p, DEVICE)
    assert str(made) == "calls[three]"
    args = [jnp.ones(s) for s in (p.x_shape, p.w_shape, p.y_shape)]
    assert calls(functools.partial(dense_gradient, p), *args) == ({"matmul": 1} if options else {})
    with pytest.raises(ValueError, match="CUDA only"):
        planned(dataclasses.replace(p, algorithm=_plan.GRADIENT), DEVICE)

"""Derivatives: right in both modes and at second order, taken from the hand-written rules, and never more than asked.

Orders and modes are checked numerically in float64, which a GPU's native kernels lack; there the same checks run
through XLA's path, and `test_second_derivatives_of_the_kernels_are_those_of_xla` covers the kernels in float32.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import NAMED_ACTIVATIONS, NATIVE_IN_FLOAT64, calls, equations, label, normal, opcodes, same_bits, targets
from jax.experimental import jet
from jax.test_util import check_grads
from tolerance import assert_close

import jaxconv
from jaxconv._ops import batchnorm, conv, dense, layer
from jaxconv._problem import BatchNormProblem, ConvProblem, DenseProblem

# One implementation is enough where every activation is gone through: the rules are the same, the kernels differ.
FIRST = (*NATIVE_IN_FLOAT64, None)[0]
IMPLEMENTATIONS = (*NATIVE_IN_FLOAT64, None)
# One of each kind: nothing is kept for its derivative, y, z, and z because of a slope. Of the others both derivatives
# are in test_activation_tails, and what is kept in a test below.
KINDS = (None, "relu", "tanh", "gelu", ("leaky_relu", -0.5))
over_activations = pytest.mark.parametrize(
    "activation",
    [pytest.param(a, marks=[] if a in KINDS else pytest.mark.slow) for a in NAMED_ACTIVATIONS],
    ids=label,
)


def floats(*shapes: tuple[int, ...], dtype: str = "float64", seed: int = 0) -> list[jax.Array]:
    return [jnp.asarray(normal(seed + i, shape), dtype) for i, shape in enumerate(shapes)]


def check(f: Any, *args: Any) -> None:
    """Forward and reverse mode and their compositions, to second order, against numerical derivatives."""
    check_grads(jax.jit(f), args, order=2)


# ----------------------------------------------------------------------------------------------------------------------
# check_grads, default modes, order 2. Extents are as small as still have a middle and an edge: numerical derivatives
# of every order compile anew.


@over_activations
def test_conv_in_every_activation(activation, x64):
    f = functools.partial(jaxconv.conv2d, activation=activation, implementation=FIRST)
    check(f, *floats((1, 4, 3, 2), (3, 2, 2, 3), (3,)))


# XLA's own path needs no check in every layout, and compiles for seconds.
@pytest.mark.parametrize(
    ("layout", "implementation"),
    [(layout, FIRST) for layout in ("NWC", "NCW", "NHWC", "NCHW", "NDHWC", "NCDHW")] + [("NHWC", None)],
    ids=label,
)
def test_conv_in_every_layout_with_stride_dilation_and_pads(layout, implementation, x64):
    nd = len(layout) - 2
    f = functools.partial(
        {1: jaxconv.conv1d, 2: jaxconv.conv2d, 3: jaxconv.conv3d}[nd],
        layout=layout,
        stride=(2, 1, 1)[:nd],
        dilation=(1, 2, 1)[:nd],
        padding=((1, 0), (0, 2), (1, 1))[:nd],
        activation="gelu",
        implementation=implementation,
    )
    spatial, window = (4, 3, 3)[:nd], (2, 2, 2)[:nd]
    last = layout.endswith("C")
    x, w = ((1, *spatial, 2), (*window, 2, 3)) if last else ((1, 2, *spatial), (3, 2, *window))
    check(f, *floats(x, w, (3,)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=label)
@pytest.mark.parametrize(("groups", "layout"), [(2, "NHWC"), (4, "NHWC"), (4, "NCHW")], ids=str)
def test_grouped_and_depthwise_conv(groups, layout, implementation, x64):
    f = functools.partial(
        jaxconv.conv2d, groups=groups, activation="tanh", layout=layout, implementation=implementation
    )
    last = layout == "NHWC"
    x, w = ((1, 3, 3, 4), (2, 2, 4 // groups, 8)) if last else ((1, 4, 3, 3), (8, 4 // groups, 2, 2))
    check(f, *floats(x, w, (8,)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=label)
def test_bare_conv_is_bilinear(implementation, x64):
    check(
        functools.partial(jaxconv.conv2d, stride=2, implementation=implementation), *floats((1, 4, 4, 2), (3, 3, 2, 3))
    )


def test_conv_with_a_cotangent_for_the_preactivation(x64):
    f = functools.partial(jaxconv.conv2d, activation="silu", return_preactivation=True, implementation=FIRST)
    check(f, *floats((1, 3, 3, 2), (2, 2, 2, 3), (3,)))


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_conv_transpose(layout, x64):
    f = functools.partial(jaxconv.conv_transpose2d, stride=2, activation="tanh", layout=layout, implementation=FIRST)
    x, w = ((1, 3, 2, 2), (3, 3, 2, 3)) if layout == "NHWC" else ((1, 2, 3, 2), (3, 2, 3, 3))
    check(f, *floats(x, w, (3,)))


def test_conv_general_dilated_with_lhs_dilation(x64):
    def f(x, w):
        options = dict(lhs_dilation=(2, 1), dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jaxconv.conv_general_dilated(x, w, (1, 1), [(1, 1), (0, 1)], **options)

    check(f, *floats((1, 3, 2, 2), (2, 2, 2, 3)))


@over_activations
def test_dense_in_every_activation(activation, x64):
    f = functools.partial(jaxconv.dense, activation=activation, implementation=FIRST)
    check(f, *floats((3, 2), (2, 4), (4,)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=label)
@pytest.mark.parametrize("bias", [(), (4,), (3, 1), (1, 4)], ids=str)
def test_dense_with_everything(bias, implementation, x64):
    def f(x, w, b, c):
        options = dict(activation="sigmoid", return_preactivation=True, implementation=implementation)
        return jaxconv.dense(x, w, b, c=c, alpha=0.5, beta=-2.0, **options)

    check(f, *floats((3, 2), (2, 4), bias, (3, 4)))


@over_activations
def test_batchnorm_training_in_every_activation(activation, x64):
    """All of its results: y, and the running statistics, whose derivatives reach x too."""
    # With a momentum of 0.5 the old statistics' share would be the new ones'.
    f = functools.partial(jaxconv.batchnorm, training=True, momentum=0.75, activation=activation, implementation=FIRST)
    x, scale, bias, mean, var = floats((3, 2, 2), (2,), (2,), (2,), (2,), seed=3)
    check(f, x, scale, bias, mean, 1 + jnp.abs(var))


@pytest.mark.parametrize("activation", [None, "relu", "gelu"], ids=label)
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_batchnorm_with_a_residual(training, activation, x64):
    def f(x, scale, bias, mean, var, residual):
        options = dict(training=training, activation=activation, channel_axis=1, implementation=FIRST)
        return jaxconv.batchnorm(x, scale, bias, mean, var, residual=residual, **options)[0]

    x, scale, bias, mean, var, residual = floats((3, 2, 2), (2,), (2,), (2,), (2,), (3, 2, 2), seed=3)
    check(f, x, scale, bias, mean, 1 + jnp.abs(var), residual)


# ----------------------------------------------------------------------------------------------------------------------
# The kernels themselves at second order, in float32


def _norm(implementation: str, x: Any, scale: Any, bias: Any) -> Any:
    mean, var = jnp.zeros(scale.shape), jnp.ones(scale.shape)
    return jaxconv.batchnorm(
        x, scale, bias, mean, var, training=True, activation="tanh", implementation=implementation
    )[0]


def _group(implementation: str, x: Any, scale: Any, bias: Any) -> Any:
    return jaxconv.groupnorm(x, scale, bias, groups=2, activation="tanh", implementation=implementation)


def _excite(implementation: str, x: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> Any:
    return jaxconv.squeeze_excite(x, w1, b1, w2, b2, activation="tanh", implementation=implementation)


def _rows(implementation: str, x: Any, scale: Any, bias: Any) -> Any:
    return jnp.tanh(jaxconv.layernorm(x, scale, bias, implementation=implementation))


def _fused(function: Any, activation: str, implementation: str, *args: Any) -> Any:
    return function(*args, activation=activation, precision="highest", implementation=implementation)


# name: (f(implementation, *args), shapes of args)
FUNCTIONS = {
    "conv": (functools.partial(_fused, jaxconv.conv2d, "gelu"), ((2, 5, 5, 3), (3, 3, 3, 4), (4,))),
    "conv_tanh": (functools.partial(_fused, jaxconv.conv2d, "tanh"), ((2, 5, 5, 3), (3, 3, 3, 4), (4,))),
    "conv_transpose": (functools.partial(_fused, jaxconv.conv_transpose2d, "tanh"), ((2, 5, 5, 3), (3, 3, 3, 4), (4,))),
    "dense": (functools.partial(_fused, jaxconv.dense, "gelu"), ((5, 7), (7, 4), (4,))),
    "batchnorm": (_norm, ((6, 5, 4), (4,), (4,))),
    "groupnorm": (_group, ((3, 5, 4), (4,), (4,))),
    "layernorm": (_rows, ((3, 5, 4), (4,), (4,))),
    "squeeze_excite": (_excite, ((3, 5, 4), (4, 3), (3,), (3, 4), (4,))),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_second_derivatives_of_the_kernels_are_those_of_xla(name):
    """Hessian times vector, forward over reverse and reverse over forward."""
    f, shapes = FUNCTIONS[name]

    def products(implementation, args, vectors):
        def loss(*args):
            return (f(implementation, *args) ** 2).sum()

        argnums = tuple(range(len(args)))
        forward_over_reverse = jax.jvp(jax.grad(loss, argnums), args, vectors)[1]
        reverse_over_forward = jax.grad(lambda *a: jax.jvp(loss, a, vectors)[1], argnums)(*args)
        return forward_over_reverse, reverse_over_forward

    args, vectors = tuple(floats(*shapes, dtype="float32")), tuple(floats(*shapes, dtype="float32", seed=20))
    run = jax.jit(products, static_argnums=0)
    ours, theirs = run("native", args, vectors), run("xla", args, vectors)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: a.astype("float64"), (args, vectors))
        reference = run("xla", *wide)
    for o, t, r in zip(*map(jax.tree.leaves, (ours, theirs, reference)), strict=True):
        # Sums of sums: 50 outputs by 27 products at most, and a handful of roundings between them.
        assert_close(o, t, np.asarray(r), terms=50 * 27, scale=4 * float(np.abs(r).max()))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_linearize_hessian_and_jvp_run_through_the_kernels(name):
    f, shapes = FUNCTIONS[name]
    args = tuple(floats(*shapes, dtype="float32"))
    tangents = tuple(floats(*shapes, dtype="float32", seed=20))
    native, xla = functools.partial(f, "native"), functools.partial(f, "xla")
    y, tangent = jax.jit(functools.partial(jax.jvp, native))(args, tangents)
    y_linear, linear = jax.linearize(native, *args)
    # One rule computes both, in the same order: equal but for what XLA fuses differently, an ulp or two of the largest.
    ulp = float(jnp.finfo("float32").eps)
    np.testing.assert_allclose(y_linear, y, rtol=0, atol=4 * ulp * float(jnp.abs(y).max()))
    largest = float(jnp.abs(tangent).max())
    np.testing.assert_allclose(linear(*tangents), tangent, rtol=0, atol=16 * ulp * largest)
    expected = jax.jit(functools.partial(jax.jvp, xla))(args, tangents)[1]
    # Two float32 results of sums of at most 2 * 27 products, as `tolerance.floor` counts them, each way.
    np.testing.assert_allclose(tangent, expected, rtol=0, atol=2 * (2 + 2 * np.sqrt(54)) * ulp * largest)
    hessian, expected = (
        jax.jit(jax.hessian(lambda b, f=f: (f(*args[:-1], b) ** 2).sum()))(args[-1]) for f in (native, xla)
    )
    assert hessian.shape == expected.shape == (4, 4)
    # Sums over 50 pixels of products of two such results.
    np.testing.assert_allclose(
        hessian, expected, rtol=0, atol=2 * (2 + 2 * np.sqrt(100)) * ulp * float(jnp.abs(expected).max())
    )


def test_conv_derivatives_of_any_order_stay_in_the_kernels():
    x, w = floats((2, 5, 5, 3), (3, 3, 3, 4), dtype="float32")
    f = functools.partial(jaxconv.conv2d, implementation="native")

    def third(x, w):
        def loss(x, w):
            return (f(x, w) ** 3).sum()

        def squared_gradient(x, w):
            return sum((g**2).sum() for g in jax.grad(loss, (0, 1))(x, w))

        return jax.grad(squared_gradient, (0, 1))(x, w)

    text = jax.jit(third).lower(x, w).compile().as_text()
    assert "convolution" not in opcodes(text) and targets(text)["conv_wgrad"] > 0


# ----------------------------------------------------------------------------------------------------------------------
# The rule pairs, handed to jax.custom_vjp


def as_custom_vjp(kernel: Any, rules: Any, problem: Any) -> Any:
    """The op with its rule pair as jax.custom_vjp has it."""
    saving = rules.saving(problem)
    wanted, made = len(kernel.results(problem)), len(kernel.results(saving))

    @jax.custom_vjp
    def op(*args):
        return kernel(problem, *args)

    def forward(*args):
        outs, residuals = rules.forward(saving, *args)
        return list(outs[:wanted]), residuals

    def backward_of(count):
        def backward(residuals, cotangents):
            given = [*cotangents, *[None] * (made - wanted)]
            return tuple(rules.backward(saving, residuals, given, (True,) * count))

        return backward

    def call(*args):
        op.defvjp(forward, backward_of(len(args)))
        return op(*args)

    return call


CHOICE = dict(implementation="native", algorithm=None)
EPILOGUE = dict(precision="highest", return_preactivation=False)


def rule_cases(activation: str) -> dict[str, tuple[Any, Any, Any, list[jax.Array]]]:
    x, w, b = floats((2, 5, 5, 3), (3, 3, 3, 4), (4,), dtype="float32")
    convolution = ConvProblem.infer(
        "conv2d",
        2,
        x,
        w,
        b,
        stride=2,
        padding="SAME",
        dilation=1,
        groups=1,
        activation=activation,
        layout="NHWC",
        **EPILOGUE,
        **CHOICE,
    )
    dx, dw, db, dc = floats((5, 7), (7, 4), (4,), (5, 4), dtype="float32")
    product = DenseProblem.infer(
        "dense", dx, dw, db, dc, alpha=0.5, beta=2.0, activation=activation, **EPILOGUE, **CHOICE
    )
    nx, *params, residual = floats((6, 5, 4), (4,), (4,), (4,), (4,), (6, 5, 4), dtype="float32")
    norm = BatchNormProblem.infer(
        "batchnorm",
        nx,
        *params,
        residual,
        training=True,
        momentum=0.9,
        epsilon=1e-3,
        activation=activation,
        channel_axis=-1,
        **CHOICE,
    )
    return {
        "conv": (
            conv.conv_kernel,
            layer.rules(conv.conv_kernel, conv._tangents, conv._cotangents),
            convolution,
            [x, w, b],
        ),
        "dense": (dense.dense_kernel, dense.RULES, product, [dx, dw, db, dc]),
        "batchnorm": (batchnorm.train, batchnorm.RULES, norm, [nx, *params, residual]),
    }


@pytest.mark.parametrize("activation", ["none", "relu", "gelu"])
@pytest.mark.parametrize("op", ["conv", "dense", "batchnorm"])
def test_rule_pairs_work_under_custom_vjp_itself(op, activation):
    kernel, rules, problem, args = rule_cases(activation)[op]
    through_custom_vjp = as_custom_vjp(kernel, rules, problem)

    def run(f, *args):
        outs, back = jax.vjp(f, *args)
        return list(outs), back([jnp.cos(out) for out in outs])

    ours = jax.jit(functools.partial(run, functools.partial(kernel, problem)))(*args)
    theirs = jax.jit(functools.partial(run, through_custom_vjp))(*args)
    assert same_bits(ours, theirs)


# ----------------------------------------------------------------------------------------------------------------------
# Only what is asked for


def _conv_loss(*args: Any) -> Any:
    return jaxconv.conv2d(*args, activation="relu", implementation="native").sum()


def _dense_loss(*args: Any) -> Any:
    return jaxconv.dense(*args, activation="relu", implementation="native").sum()


@pytest.mark.parametrize(
    ("argnums", "expected"),
    [
        ((0,), {"conv": 1, "conv_dgrad": 1}),
        ((1,), {"conv": 1, "conv_wgrad": 1}),
        ((2,), {"conv": 1}),
        ((0, 1, 2), {"conv": 1, "conv_dgrad": 1, "conv_wgrad": 1}),
    ],
    ids=str,
)
def test_conv_computes_only_the_gradients_asked_for(argnums, expected):
    args = floats((2, 5, 5, 3), (3, 3, 3, 4), (4,), dtype="float32")
    gradient = jax.grad(_conv_loss, argnums)
    assert calls(gradient, *args) == expected
    # Nor is anything left for XLA to remove: without jit it would have run.
    traced = equations(gradient, *args)
    assert {
        op: traced[f"jaxconv_{op}"] for op in ("conv", "conv_dgrad", "conv_wgrad") if traced[f"jaxconv_{op}"]
    } == expected


def test_bare_conv_does_not_even_run_forward_for_its_gradient():
    """conv(x, w) is linear in w: its gradient is one wgrad."""
    x, w = floats((2, 5, 5, 3), (3, 3, 3, 4), dtype="float32")
    f = functools.partial(jaxconv.conv2d, implementation="native")
    assert calls(jax.grad(lambda w: f(x, w).sum()), w) == {"conv_wgrad": 1}
    assert calls(jax.grad(lambda x: f(x, w).sum()), x) == {"conv_dgrad": 1}


@pytest.mark.parametrize(("argnums", "products"), [((0,), 1), ((1,), 1), ((2,), 0), ((0, 1, 2), 2)], ids=str)
def test_dense_computes_only_the_gradients_asked_for(argnums, products):
    args = floats((5, 7), (7, 4), (4,), dtype="float32")
    counted = calls(jax.grad(_dense_loss, argnums), *args)
    assert counted == {"dense": 1, **({"matmul": products} if products else {})}
    assert equations(jax.grad(_dense_loss, argnums), *args)["jaxconv_matmul"] == products


def test_batchnorm_writes_dx_only_if_asked():
    x, v = jnp.ones((6, 5, 4)), jnp.ones(4)

    def loss(x, scale):
        return jaxconv.batchnorm(x, scale, v, v, v, training=True, activation="relu", implementation="native")[0].sum()

    for argnums, wanted in ((0, 1), (1, 0)):
        text = jax.jit(jax.grad(loss, argnums)).lower(x, v).compile().as_text()
        assert f"want_dx = {wanted}" in text and "want_dresidual = 0" in text


# ----------------------------------------------------------------------------------------------------------------------
# What is kept for the backward pass


def residuals(f: Any, *args: Any) -> tuple[Any, list[jax.Array]]:
    """f's result, and the arrays that its backward pass holds besides f's own arguments."""
    y, back = jax.vjp(f, *args)
    kept = [a for a in jax.tree.leaves(back) if isinstance(a, jax.Array)]
    return y, [a for a in kept if a.ndim and not any(same_bits(a, arg) for arg in args)]


KEEPS_Y = ("relu", "relu6", "leaky_relu", ("leaky_relu", 0.5), "elu", "tanh", "sigmoid")
KEEPS_Z = ("silu", "gelu", "gelu_exact", "hard_swish", ("leaky_relu", -0.5))


@pytest.mark.parametrize("activation", [None, *KEEPS_Y, *KEEPS_Z], ids=label)
@pytest.mark.parametrize("op", ["conv", "dense"])
def test_backward_keeps_y_or_z_as_the_activation_needs_and_nothing_else(op, activation):
    function, shapes = {
        "conv": (jaxconv.conv2d, ((2, 5, 5, 3), (3, 3, 3, 4), (4,))),
        "dense": (jaxconv.dense, ((5, 7), (7, 4), (4,))),
    }[op]
    args = floats(*shapes, dtype="float32")
    f = functools.partial(function, activation=activation, implementation="native")
    y, kept = residuals(f, *args)
    if activation is None:
        assert kept == []
        return
    (only,) = kept
    z = f(*args, return_preactivation=True)[1]
    assert same_bits(only, y if activation in KEEPS_Y else z)


@pytest.mark.parametrize("activation", [None, "relu", "gelu"], ids=label)
def test_batchnorm_keeps_its_input_and_two_numbers_per_channel(activation):
    """Neither y nor z nor a mask: the backward pass recomputes them from x and, where f needs it, the residual."""
    x, residual = floats((6, 5, 4), (6, 5, 4), dtype="float32")
    v = jnp.ones(4)

    def f(x, residual):
        options = dict(training=True, activation=activation, implementation="native")
        return jaxconv.batchnorm(x, 2 * v, v, v, v, residual=residual, **options)[0]

    _, kept = residuals(f, x, residual)
    assert all(a.shape == (4,) for a in kept)


def test_nothing_is_saved_outside_differentiation():
    args = floats((2, 5, 5, 3), (3, 3, 3, 4), (4,), dtype="float32")
    f = functools.partial(jaxconv.conv2d, activation="gelu", implementation="native")
    plain = jax.jit(f).lower(*args).compile().as_text()
    assert "save_preactivation = 0" in plain and "save_preactivation = 1" not in plain
    training = jax.jit(jax.grad(lambda *args: f(*args).sum())).lower(*args).compile().as_text()
    assert "save_preactivation = 1" in training


# ----------------------------------------------------------------------------------------------------------------------
# jax.experimental.jet


JETS = {
    "conv": lambda x, w, v, **o: jaxconv.conv2d(x, w, **o),
    # What follows it is a custom_jvp, of which JAX's jet loses a tracer: as of jax.nn.relu.
    "conv_transpose": lambda x, w, v, activation, **o: jaxconv.conv_transpose2d(x, w, stride=2, **o),
    "dense": lambda x, w, v, **o: jaxconv.dense(x, w[0, 0], v, **o),
    "batchnorm": lambda x, w, v, **o: jaxconv.batchnorm(x, v, v, v, v * v, training=True, **o)[0],
    "batchnorm_inference": lambda x, w, v, **o: jaxconv.batchnorm(x, v, v, v, v * v, training=False, **o)[0],
    "groupnorm": lambda x, w, v, **o: jaxconv.groupnorm(x, v, v * v, groups=1, **o),
    "layernorm": lambda x, w, v, **o: jaxconv.layernorm(x, v, v * v, **o),
    "avg_pool": lambda x, w, v, activation, **o: jaxconv.avg_pool(x * x, 2, **o),
    "squeeze_excite": lambda x, w, v, **o: jaxconv.squeeze_excite(x, w[0, 0], v, w[1, 1], v * v, **o),
    "conv_batchnorm": lambda x, w, v, **o: jaxconv.conv_batchnorm(x, w, v, v, v, v * v, training=True, **o)[0],
}


@pytest.mark.parametrize(
    ("name", "activation"),
    [("dense", a) for a in NAMED_ACTIVATIONS] + [(name, "tanh") for name in JETS if name != "dense"],
    ids=label,
)
def test_jet_gives_the_first_two_derivatives(name, activation, x64):
    """Under jit as well; a bare convolution by its own kernels."""
    x, w, v = floats((1, 3, 2, 2), (2, 2, 2, 2), (2,))
    options = dict(activation=activation, implementation=FIRST)

    def f(t):
        return JETS[name](jnp.sin(t * x) + x, t * w, v, **options)

    y, terms = jax.jit(lambda t: jet.jet(f, (t,), ((jnp.ones_like(t), jnp.zeros_like(t)),)))(jnp.asarray(1.3))
    first = jax.jacfwd(f)
    for ours, expected in zip((y, *terms), jax.jit(lambda t: (f(t), first(t), jax.jacfwd(first)(t)))(1.3), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("activation", (None, "relu", "hard_swish", "tanh"), ids=label)
def test_jet_of_a_group_norms_gradient(activation, x64):
    """Its backward pass has a barrier, for which jet has no rule of its own."""
    x, v = floats((2, 3, 2, 4), (4,))

    def f(t):
        def loss(x):
            return (jaxconv.groupnorm(x, v, v * v, groups=2, activation=activation, implementation=FIRST) ** 3).sum()

        return jax.grad(loss)(jnp.sin(t * x) + x)

    y, terms = jax.jit(lambda t: jet.jet(f, (t,), ((jnp.ones_like(t),),)))(jnp.asarray(1.3))
    for ours, expected in zip((y, *terms), (f(1.3), jax.jacfwd(f)(1.3)), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-9, atol=1e-9)


def test_jet_of_a_bare_convolution_stays_native():
    x, w = floats((1, 4, 4, 2), (3, 3, 2, 3), dtype="float32")
    conv2d = functools.partial(jaxconv.conv2d, implementation="native")
    found = equations(lambda x, w: jet.jet(conv2d, (x, w), ((x, x), (w, w))), x, w)
    assert found["jaxconv_conv_fprop"] == 1 + 2 + 3 and "conv_general_dilated" not in found

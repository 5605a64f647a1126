"""Shapes and errors. Nothing here runs: every shape is inferred and every mistake found while tracing."""

from __future__ import annotations

import functools
import itertools
import typing
from typing import Any

import flax.linen
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxconv
from jaxconv._core import activations
from jaxconv._problem import parse_padding

# Sums of the same numbers in another order.
ONE_ULP = functools.partial(np.testing.assert_allclose, rtol=np.finfo(np.float32).eps)
CONVS = {1: jaxconv.conv1d, 2: jaxconv.conv2d, 3: jaxconv.conv3d}
TRANSPOSED = {1: jaxconv.conv_transpose1d, 2: jaxconv.conv_transpose2d, 3: jaxconv.conv_transpose3d}
LAYOUTS = {1: ("NWC", "NCW"), 2: ("NHWC", "NCHW"), 3: ("NDHWC", "NCDHW")}
NUMBERS = {
    "NWC": ("NWC", "WIO", "NWC"),
    "NCW": ("NCW", "OIW", "NCW"),
    "NHWC": ("NHWC", "HWIO", "NHWC"),
    "NCHW": ("NCHW", "OIHW", "NCHW"),
    "NDHWC": ("NDHWC", "DHWIO", "NDHWC"),
    "NCDHW": ("NCDHW", "OIDHW", "NCDHW"),
}


def f32(*shape: int, dtype: Any = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


# ----------------------------------------------------------------------------------------------------------------------
# Shapes, against lax

# Extents on both sides of a multiple of every stride; windows as wide as the input and wider than the stride.
EXTENTS, WINDOWS, STRIDES, DILATIONS = (5, 6, 7, 12), (1, 2, 3, 5), (1, 2, 3), (1, 2)
PADDINGS = ("SAME", "SAME_LOWER", "VALID", "same", 0, 2, (1,), ((0, 3),), ((2, 1),), ((-1, 2),))


@pytest.mark.parametrize("padding", PADDINGS, ids=str)
def test_output_extents_are_those_of_lax(padding):
    compared = 0
    for extent, window, stride, dilation in itertools.product(EXTENTS, WINDOWS, STRIDES, DILATIONS):
        options = dict(stride=stride, padding=padding, dilation=dilation)
        lax_padding = padding.upper() if isinstance(padding, str) else [
            p if isinstance(p, tuple) else (p, p) for p in (padding if isinstance(padding, tuple) else (padding,))
        ]  # fmt: skip
        x, w = f32(2, extent, 3), f32(window, 3, 4)
        expected = jax.eval_shape(
            lambda x, w, s=stride, p=lax_padding, d=dilation: lax.conv_general_dilated(
                x, w, (s,), p, rhs_dilation=(d,), dimension_numbers=NUMBERS["NWC"]
            ),
            x,
            w,
        )
        assert jax.eval_shape(lambda x, w, o=options: jaxconv.conv1d(x, w, **o), x, w).shape == expected.shape, options
        compared += 1
    assert compared > 50  # the grid has not become empty


@pytest.mark.parametrize("mode", ["SAME", "SAME_LOWER", "VALID"])
def test_named_paddings_become_the_pairs_of_lax(mode):
    for extent, window, stride, dilation in itertools.product(EXTENTS, WINDOWS, STRIDES, DILATIONS):
        effective = (window - 1) * dilation + 1
        expected = lax.padtype_to_pads((extent,), (effective,), (stride,), mode)
        assert parse_padding("test", mode, (extent,), (window,), (stride,), (dilation,)) == tuple(map(tuple, expected))


@pytest.mark.parametrize("layout", [layout for pair in LAYOUTS.values() for layout in pair])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_conv_shapes_and_dtypes_are_those_of_lax_in_every_layout(layout, groups, dtype):
    nd = len(layout) - 2
    spatial, window = (9, 8, 7)[:nd], (3, 2, 1)[:nd]
    stride, dilation, padding = (2, 1, 3)[:nd], (1, 2, 1)[:nd], ((1, 0), (2, 2), (0, 1))[:nd]
    c, k = 4, 8
    last = layout.endswith("C")
    x = f32(3, *spatial, c, dtype=dtype) if last else f32(3, c, *spatial, dtype=dtype)
    w = f32(*window, c // groups, k, dtype=dtype) if last else f32(k, c // groups, *window, dtype=dtype)
    options = dict(stride=stride, padding=padding, dilation=dilation, groups=groups, layout=layout)
    expected = jax.eval_shape(
        lambda x, w: lax.conv_general_dilated(
            x, w, stride, padding, None, dilation, NUMBERS[layout], feature_group_count=groups
        ),
        x,
        w,
    )
    b = f32(k, dtype=dtype)
    y, z = jax.eval_shape(lambda x, w, b: CONVS[nd](x, w, b, return_preactivation=True, **options), x, w, b)
    assert (y.shape, y.dtype) == (z.shape, z.dtype) == (expected.shape, expected.dtype)


@pytest.mark.parametrize("padding", ["SAME", "VALID", 0, 1, ((1, 2),)], ids=str)
def test_transposed_output_extents_are_those_of_lax(padding):
    for extent, window, stride, dilation in itertools.product((1, 4, 5), WINDOWS, STRIDES, DILATIONS):
        options = dict(stride=stride, padding=padding, dilation=dilation)
        lax_padding = [(p, p) for p in (padding,)] if isinstance(padding, int) else padding
        x, w = f32(2, extent, 3), f32(window, 3, 4)
        expected = jax.eval_shape(
            lambda x, w, s=stride, p=lax_padding, d=dilation: lax.conv_transpose(
                x, w, (s,), p, rhs_dilation=(d,), dimension_numbers=NUMBERS["NWC"]
            ),
            x,
            w,
        )
        actual = jax.eval_shape(lambda x, w, o=options: jaxconv.conv_transpose1d(x, w, **o), x, w)
        assert actual.shape == expected.shape, (extent, options)


def test_numpy_integers_and_arrays_are_taken_as_numbers():
    x, w = jnp.ones((1, 8, 8, 2)), jnp.ones((3, 3, 2, 4))
    plain = jaxconv.conv2d(x, w, stride=2, padding=((1, 1), (1, 1)), dilation=1)
    numpy_ = jaxconv.conv2d(
        x, w, stride=np.array(2), padding=np.array([[1, 1], [1, 1]]), dilation=np.array([1, 1]), groups=np.int64(1)
    )
    np.testing.assert_array_equal(plain, numpy_)


def test_numpy_arrays_are_taken_as_operands():
    x, w = np.ones((1, 4, 4, 2), np.float32), np.ones((3, 3, 2, 4), np.float32)
    assert isinstance(jaxconv.conv2d(x, w), jax.Array)


def test_descriptions_are_no_operands():
    """A raw error of jnp.asarray said nothing of what to do."""
    for call in (
        lambda: jaxconv.conv2d(f32(1, 4, 4, 2), f32(3, 3, 2, 4)),
        lambda: jaxconv.conv_transpose2d(f32(1, 4, 4, 2), f32(3, 3, 2, 4)),
        lambda: jaxconv.dense(f32(4, 2), f32(2, 4)),
        lambda: jaxconv.batchnorm(f32(4, 2), None, None, f32(2), f32(2), training=True),
    ):
        with pytest.raises(TypeError, match=r"x must be an array, got a jax.ShapeDtypeStruct, .* jax.eval_shape"):
            call()


# ----------------------------------------------------------------------------------------------------------------------
# Empty arrays, against lax

# x, w, padding, dilation
EMPTY = {
    "output_by_valid": ((2, 2, 8, 4), (3, 3, 4, 6), "VALID", 1),
    "output_by_dilation": ((2, 8, 8, 4), (3, 3, 4, 6), 0, 4),
    "output_by_cropping": ((2, 8, 8, 4), (3, 3, 4, 6), ((-4, -4), (0, 0)), 1),
    "pixels": ((2, 0, 8, 4), (3, 3, 4, 6), "SAME", 1),
    "pixels_but_not_output": ((2, 0, 8, 4), (3, 3, 4, 6), ((5, 5), (1, 1)), 1),
    "channels": ((2, 8, 8, 0), (3, 3, 0, 6), "SAME", 1),
    "filters": ((2, 8, 8, 4), (3, 3, 4, 0), "SAME", 1),
    "batch": ((0, 8, 8, 4), (3, 3, 4, 6), "SAME", 1),
}


@pytest.mark.parametrize("implementation", [None, "native", "xla"])
@pytest.mark.parametrize("case", EMPTY)
def test_empty_arrays_are_those_of_lax(case, implementation):
    x_shape, w_shape, padding, dilation = EMPTY[case]
    x, w, b = jnp.ones(x_shape), jnp.ones(w_shape), jnp.ones(w_shape[-1])
    pads = [(padding, padding)] * 2 if isinstance(padding, int) else padding

    def ours(x: Any, w: Any, b: Any) -> Any:
        return jaxconv.conv2d(
            x, w, b, padding=padding, dilation=dilation, activation="silu", implementation=implementation
        )

    def theirs(x: Any, w: Any, b: Any) -> Any:
        numbers = NUMBERS["NHWC"]
        return jax.nn.silu(
            lax.conv_general_dilated(x, w, (1, 1), pads, rhs_dilation=(dilation,) * 2, dimension_numbers=numbers) + b
        )

    def values_and_gradients(f: Any) -> Any:
        y, pullback = jax.vjp(f, x, w, b)
        return y, pullback(jnp.ones_like(y)), jax.vmap(f, (0, None, None))(x[None], w, b), jax.jit(f)(x, w, b)

    jax.tree.map(ONE_ULP, values_and_gradients(ours), values_and_gradients(theirs))


@pytest.mark.parametrize("transpose_kernel", [False, True])
@pytest.mark.parametrize(
    ("x_shape", "w_shape", "padding"),
    [((2, 1, 1, 4), (3, 3, 4, 4), 0), ((2, 0, 8, 4), (3, 3, 4, 4), "SAME"), ((2, 8, 8, 4), (3, 3, 4, 0), "SAME")],
    ids=["output", "pixels", "filters"],
)
def test_empty_transposed_arrays_are_those_of_lax(x_shape, w_shape, padding, transpose_kernel):
    w_shape = (*w_shape[:2], w_shape[3], w_shape[2]) if transpose_kernel else w_shape
    x, w = jnp.ones(x_shape), jnp.ones(w_shape)
    pads = [(padding, padding)] * 2 if isinstance(padding, int) else padding
    expected = lax.conv_transpose(
        x, w, (2, 2), pads, dimension_numbers=NUMBERS["NHWC"], transpose_kernel=transpose_kernel
    )
    actual = jaxconv.conv_transpose2d(x, w, stride=2, padding=padding, transpose_kernel=transpose_kernel)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(("m", "k", "n"), [(0, 4, 6), (5, 0, 6), (5, 4, 0)])
@pytest.mark.parametrize("implementation", [None, "native"])
def test_empty_products_are_those_of_jnp(m, k, n, implementation):
    x, w, b = jnp.ones((m, k)), jnp.ones((k, n)), jnp.ones(n)

    def value(f: Any) -> Any:
        return f(x, w, b), jax.grad(lambda *args: jnp.sum(f(*args)), (0, 1, 2))(x, w, b)

    ours = value(lambda x, w, b: jaxconv.dense(x, w, b, activation="tanh", implementation=implementation))
    theirs = value(lambda x, w, b: jnp.tanh(x @ w + b))
    jax.tree.map(ONE_ULP, ours, theirs)


def test_nothing_to_take_statistics_of_is_refused():
    w, v = jnp.ones((3, 3, 4, 6)), jnp.ones(6)
    with pytest.raises(ValueError, match="conv_batchnorm: x or w is empty: there is nothing to take statistics of"):
        jaxconv.conv_batchnorm(jnp.ones((2, 2, 2, 4)), w, v, v, v, v, training=True, padding="VALID")
    y, *_ = jaxconv.conv_batchnorm(jnp.ones((2, 2, 2, 4)), w, v, v, v, v, training=False, padding="VALID")
    assert y.shape == (2, 0, 0, 6)


# ----------------------------------------------------------------------------------------------------------------------
# What is taken in several forms

FUNCTIONS = {
    "relu": (jax.nn.relu,),
    "relu6": (jax.nn.relu6,),
    "leaky_relu": (jax.nn.leaky_relu,),
    ("leaky_relu", 0.3): (functools.partial(jax.nn.leaky_relu, negative_slope=0.3),),
    "elu": (jax.nn.elu,),
    "tanh": (jnp.tanh, jax.nn.tanh, lax.tanh),
    "sigmoid": (jax.nn.sigmoid, lax.logistic),
    "silu": (jax.nn.silu, jax.nn.swish, "swish"),
    "gelu": (jax.nn.gelu, functools.partial(jax.nn.gelu, approximate=True)),
    "gelu_exact": (functools.partial(jax.nn.gelu, approximate=False),),
    "hard_swish": (jax.nn.hard_swish, jax.nn.hard_silu, "hard_silu"),
    None: (jax.nn.identity,),
}


@pytest.mark.parametrize("name", FUNCTIONS, ids=str)
def test_functions_of_jax_are_taken_as_activations(name):
    z = jnp.linspace(-7.0, 7.0, 15)
    for function in FUNCTIONS[name]:
        activation = activations.parse("test", function)
        assert activation == activations.parse("test", name)
        if callable(function):  # and it is what the function computes
            np.testing.assert_allclose(activations.activate(activation, z), function(z), rtol=2e-6, atol=1e-6)


def test_every_activation_has_a_function_and_a_type():
    names = {"none" if name is None else name for name in FUNCTIONS if not isinstance(name, tuple)}
    assert names == set(activations.NAMES)
    assert set(typing.get_args(activations.Name)) == {*activations.NAMES, "swish", "hard_silu"}


@pytest.mark.parametrize("dilation", [1, 3])
@pytest.mark.parametrize("layout", ["NWC", "NCW"])
@pytest.mark.parametrize("stride", [1, 2])
def test_causal_padding_is_that_of_flax(layout, dilation, stride):
    x, w = helpers.integers(0, (2, 9, 3)), helpers.integers(1, (4, 3, 5))
    expected = flax.linen.Conv(
        5, (4,), strides=stride, kernel_dilation=dilation, padding="CAUSAL", use_bias=False
    ).apply({"params": {"kernel": jnp.asarray(w, "float32")}}, jnp.asarray(x, "float32"))
    if layout == "NCW":
        x, w, expected = x.transpose(0, 2, 1), w.transpose(2, 1, 0), expected.transpose(0, 2, 1)
    x, w = jnp.asarray(x, "float32"), jnp.asarray(w, "float32")
    y = jaxconv.conv1d(x, w, padding="CAUSAL", dilation=dilation, layout=layout, stride=stride, precision="highest")
    np.testing.assert_array_equal(y, expected)
    with pytest.raises(ValueError, match="conv_transpose1d: padding='CAUSAL' is unknown"):
        jaxconv.conv_transpose1d(x, w, padding="CAUSAL")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("narrow", ["bfloat16", "float16"])
def test_narrow_scale_and_bias_of_a_norm(dtype, narrow):
    """As with the same numbers in float32; gradients come in the type that was given."""
    x = jnp.asarray(helpers.normal(0, (8, 4)), dtype)
    scale, bias = (jnp.asarray(helpers.normal(seed, (4,)), narrow) for seed in (1, 2))
    mean, var = jnp.zeros(4), jnp.ones(4)

    def run(x: Any, scale: Any, bias: Any) -> Any:
        y, *_ = jaxconv.batchnorm(x, scale, bias, mean, var, training=True, activation="relu")
        return jnp.sum(y.astype("float32") ** 2)

    y, (dx, dscale, dbias) = jax.value_and_grad(run, (0, 1, 2))(x, scale, bias)
    wide, wanted = jax.value_and_grad(run, (0, 1, 2))(x, scale.astype("float32"), bias.astype("float32"))
    assert (dx.dtype, dscale.dtype, dbias.dtype) == (x.dtype, scale.dtype, bias.dtype)
    np.testing.assert_array_equal(y, wide)
    for a, b in zip((dx, dscale, dbias), wanted, strict=True):
        np.testing.assert_array_equal(a, b.astype(a.dtype))


@pytest.mark.parametrize(
    "precision", ["BF16_BF16_F32", lax.DotAlgorithmPreset.F32_F32_F32, "fastest", ("high", "highest"), "tensorfloat32"]
)
def test_every_precision_of_lax_is_taken(precision):
    """Those that name an algorithm go to XLA."""
    x, w = (
        jnp.asarray(helpers.normal(0, (2, 6, 6, 4)), "float32"),
        jnp.asarray(helpers.normal(1, (3, 3, 4, 8)), "float32"),
    )
    numbers = NUMBERS["NHWC"]

    def ours(x: Any, w: Any) -> Any:
        y = jaxconv.conv2d(x, w[:, :, :2], groups=2, activation="relu", precision=precision)
        y = jaxconv.conv_general_dilated(y[..., :4], w, (1, 1), "SAME", dimension_numbers=numbers, precision=precision)
        return jnp.sum(jaxconv.dense(y, w[0, 0].T, activation="relu", precision=precision))

    def theirs(x: Any, w: Any) -> Any:
        y = lax.conv_general_dilated(
            x, w[:, :, :2], (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=2, precision=precision
        )
        y = jax.nn.relu(y)
        y = lax.conv_general_dilated(y[..., :4], w, (1, 1), "SAME", dimension_numbers=numbers, precision=precision)
        y = y.reshape(-1, 8)
        y = lax.dot_general(y, w[0, 0].T, (((1,), (0,)), ((), ())), precision=precision)
        return jnp.sum(jax.nn.relu(y))

    actual, expected = (jax.jit(jax.value_and_grad(f, (0, 1)))(x, w) for f in (ours, theirs))
    # Of operands that a GPU rounds to TF32's 11 bits, each side its own way: six in a row, an error of 2^-11 for each.
    single = helpers.PLATFORM == "cuda" and precision in ("fastest", "tensorfloat32")

    def close(a: Any, b: Any) -> None:
        most = 2 * 6 * 2.0**-11 * float(jnp.abs(b).max()) if single else 1e-3
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=most)

    jax.tree.map(close, actual, expected)
    # On a CPU convolutions with groups are native by default.
    plans = {call.plan.implementation for call in jaxconv.explain(jax.grad(ours, (0, 1)), platform="cpu")(x, w)}
    assert plans == ({"xla"} if "_F32" in str(precision) else {"xla", "native"})


def test_algorithms_of_default_matmul_precision_reach_xla():
    x, w = jnp.ones((4, 4)), jnp.ones((4, 8))
    with jax.default_matmul_precision("BF16_BF16_F32"):
        text = jax.jit(lambda x, w: jaxconv.dense(x, w, activation="relu")).lower(x, w).as_text()
    assert "algorithm = <lhs_precision_type = bf16" in text


# ----------------------------------------------------------------------------------------------------------------------
# Mistakes. Each: what is changed in a good call, the error, and what its message must say: the function and the
# argument, what it got, what was expected.


def check(
    function: Any, arguments: dict[str, Any], options: dict[str, Any], error: type, parts: tuple[str, ...]
) -> None:
    """`function` must refuse the call eagerly, under jit and under grad, in the same words."""

    def loss(**arguments: Any) -> Any:
        out = function(**arguments, **options)
        return jnp.sum(jax.tree.leaves(out)[0].astype(jnp.float32))

    is_array = {k: hasattr(v, "shape") for k, v in arguments.items()}
    arrays = {k: jnp.zeros(v.shape, v.dtype) if is_array[k] else v for k, v in arguments.items()}
    traced = {k: v for k, v in arrays.items() if is_array[k]}
    fixed = {k: v for k, v in arrays.items() if not is_array[k]}
    messages = set()
    for call in (
        lambda: function(**arrays, **options),
        lambda: jax.eval_shape(lambda traced: loss(**traced, **fixed), traced),
        lambda: jax.jit(lambda traced: loss(**traced, **fixed)).lower(traced),
    ):
        with pytest.raises(error) as caught:
            call()
        assert type(caught.value) is error
        messages.add(str(caught.value))
    for message in messages:
        for part in parts:
            assert part in message, f"{part!r} is not in {message!r}"


GOOD_CONV = dict(x=f32(2, 8, 8, 4), w=f32(3, 3, 4, 6), b=f32(6))
BAD_CONV = {
    "x_of_wrong_rank": (
        dict(x=f32(8, 8, 4)),
        {},
        ValueError,
        ("x has 3 dimensions", "expected 4 (NHWC)", "x=(8, 8, 4)"),
    ),
    "w_of_wrong_rank": (
        dict(w=f32(3, 4, 6)),
        {},
        ValueError,
        ("w has 3 dimensions", "expected 4 (HWIO)", "w=(3, 4, 6)"),
    ),
    "channel_mismatch": (
        dict(w=f32(3, 3, 3, 6)),
        {},
        ValueError,
        ("w expects 3 input channels, x has 4 (groups=1)", "x=(2, 8, 8, 4), w=(3, 3, 3, 6)"),
    ),
    "channel_mismatch_in_groups": (
        dict(w=f32(3, 3, 4, 6)),
        dict(groups=2),
        ValueError,
        ("w expects 8 input channels, x has 4 (groups=2)",),
    ),
    "groups_that_do_not_divide_filters": (
        dict(w=f32(3, 3, 1, 6)),
        dict(groups=4),
        ValueError,
        ("groups=4 does not divide the 6 output channels of w",),
    ),
    "groups_that_do_not_divide_channels": (
        dict(w=f32(3, 3, 1, 6)),
        dict(groups=3),
        ValueError,
        ("groups=3 does not divide the 4 channels of x",),
    ),
    "groups_zero": ({}, dict(groups=0), ValueError, ("groups=0 must be at least 1",)),
    "groups_negative": ({}, dict(groups=-2), ValueError, ("groups=-2 must be at least 1",)),
    "groups_not_an_integer": ({}, dict(groups=1.5), TypeError, ("groups must be an integer, got 1.5",)),
    "stride_zero": ({}, dict(stride=0), ValueError, ("stride=0 must be at least 1",)),
    "stride_negative": ({}, dict(stride=(1, -1)), ValueError, ("stride=(1, -1) must be at least 1",)),
    "stride_not_an_integer": ({}, dict(stride=1.0), TypeError, ("stride must be an integer, got 1.0",)),
    "stride_of_wrong_length": (
        {},
        dict(stride=(1, 2, 3)),
        ValueError,
        ("stride=(1, 2, 3) has 3 entries, expected an int or 2 of them",),
    ),
    "implementation_an_array": (
        {},
        dict(implementation=np.array("native")),
        ValueError,
        ("implementation=array('native'", "is unknown, expected None, 'native' or 'xla'"),
    ),
    "stride_a_string": ({}, dict(stride="12"), TypeError, ("stride must be an integer, got '12'",)),
    "dilation_zero": ({}, dict(dilation=(0, 1)), ValueError, ("dilation=(0, 1) must be at least 1",)),
    "dilation_negative": ({}, dict(dilation=-1), ValueError, ("dilation=-1 must be at least 1",)),
    "dilation_not_an_integer": ({}, dict(dilation=None), TypeError, ("dilation must be an integer, got None",)),
    "padding_unknown": (
        {},
        dict(padding="SOME"),
        ValueError,
        ("padding='SOME' is unknown, expected 'SAME'", "'VALID'"),
    ),
    "padding_of_wrong_length": (
        {},
        dict(padding=(1, 1, 1)),
        ValueError,
        ("padding=(1, 1, 1) has 3 entries", "2 pairs"),
    ),
    "padding_no_pair": ({}, dict(padding=((1, 1, 1), (0, 0))), ValueError, ("padding=", "an entry (1, 1, 1)")),
    "padding_not_integers": ({}, dict(padding=((0.5, 1), (0, 0))), TypeError, ("padding must be an integer, got 0.5",)),
    "padding_that_takes_more_than_there_is": (
        {},
        dict(padding=-20),
        ValueError,
        ("padding=-20 takes 40 elements from an axis of 8, expected at most 8",),
    ),
    "padding_that_takes_one_more_than_there_is": (
        {},
        dict(padding=((0, 0), (-9, 0))),
        ValueError,
        ("padding=((0, 0), (-9, 0)) takes 9 elements from an axis of 8",),
    ),
    "channels_first": (
        dict(x=f32(2, 4, 8, 8)),
        {},
        ValueError,
        (
            "w expects 4 input channels, x has 8",
            "x has 4 along axis 1: layout='NCHW' has its channels there, and w as OIHW",
        ),
    ),
    "channels_first_with_their_filter": (
        dict(x=f32(2, 4, 8, 8), w=f32(6, 4, 3, 3)),
        {},
        ValueError,
        ("w expects 3 input channels, x has 8", "x has 4 along axis 1: layout='NCHW'"),
    ),
    "channels_first_in_groups": (
        dict(x=f32(2, 6, 8, 8), w=f32(3, 3, 2, 6)),
        dict(groups=3),
        ValueError,
        ("groups=3 does not divide the 8 channels of x", "x has 6 along axis 1: layout='NCHW'"),
    ),
    "channels_last": (
        dict(w=f32(6, 4, 3, 3)),
        dict(layout="NCHW"),
        ValueError,
        (
            "w expects 4 input channels, x has 8",
            "x has 4 along axis 3: layout='NHWC' has its channels there, and w as HWIO",
        ),
    ),
    "padding_none": ({}, dict(padding=None), TypeError, ("padding=None, expected 'SAME'",)),
    "layout_unknown": ({}, dict(layout="HWNC"), ValueError, ("layout='HWNC' is unknown, expected 'NHWC' or 'NCHW'",)),
    "layout_of_other_rank": (
        {},
        dict(layout="NCW"),
        ValueError,
        ("layout='NCW' is unknown, expected 'NHWC' or 'NCHW'",),
    ),
    "activation_unknown": (
        {},
        dict(activation="Swish"),
        ValueError,
        ("activation='Swish' is unknown, expected", "silu"),
    ),
    "activation_a_function": (
        {},
        dict(activation=jax.nn.mish),
        TypeError,
        ("activation=", "mish", "a function that no kernel applies", "can be applied to the result"),
    ),
    "activation_a_partial_function": (
        {},
        dict(activation=functools.partial(jax.nn.elu, alpha=2.0)),
        TypeError,
        ("activation=functools.partial(", "a function that no kernel applies"),
    ),
    "activation_a_number": ({}, dict(activation=1), TypeError, ("activation=1 must be None, one of none",)),
    "activation_slope_not_finite": (
        {},
        dict(activation=("leaky_relu", float("nan"))),
        TypeError,
        ("activation=('leaky_relu', nan)", "finite"),
    ),
    "activation_takes_no_slope": ({}, dict(activation=("relu", 0.1)), TypeError, ("activation=('relu', 0.1)",)),
    "precision_unknown": ({}, dict(precision="best"), ValueError, ("precision='best' is unknown, expected None",)),
    "precision_a_number": ({}, dict(precision=1), ValueError, ("precision=1 is unknown, expected None",)),
    "precision_of_xla": (
        {},
        dict(precision="BF16_BF16_F32", implementation="native"),
        ValueError,
        ("implementation='native' cannot run: the precision", "BF16_BF16_F32", "is an algorithm of XLA's"),
    ),
    "precision_of_xla_and_algorithm": (
        {},
        dict(precision=lax.DotAlgorithmPreset.TF32_TF32_F32, algorithm="direct"),
        ValueError,
        ("algorithm='direct' cannot run: the precision", "is an algorithm of XLA's"),
    ),
    "precision_of_wrong_length": (
        {},
        dict(precision=(None,) * 3),
        ValueError,
        ("precision=", "3 entries, expected a pair"),
    ),
    "implementation_unknown": (
        {},
        dict(implementation="cudnn"),
        ValueError,
        ("implementation='cudnn' is unknown, expected None, 'native' or 'xla'",),
    ),
    "algorithm_unknown": (
        {},
        dict(algorithm="winograd"),
        ValueError,
        ("algorithm='winograd' is unknown, expected None or one of sm90, implicit_gemm, direct, depthwise",),
    ),
    "algorithm_of_xla": (
        {},
        dict(algorithm="direct", implementation="xla"),
        ValueError,
        ("algorithm='direct' is a native algorithm, but implementation='xla' was asked for",),
    ),
    "no_taps": (dict(w=f32(0, 3, 4, 6)), {}, ValueError, ("w has no taps", "w=(0, 3, 4, 6)")),
    "stride_too_large": ({}, dict(stride=2**63), ValueError, ("stride=9223372036854775808 is too large",)),
    "padding_too_large": ({}, dict(padding=-(2**64)), ValueError, ("padding=-18446744073709551616 is too large",)),
    "window_too_large": ({}, dict(dilation=2**62), ValueError, ("dilation=4611686018427387904 is too large: 3 taps",)),
    "causal": ({}, dict(padding="CAUSAL"), ValueError, ("padding='CAUSAL' is unknown, expected 'SAME'",)),
    "bias_of_wrong_length": (dict(b=f32(4)), {}, ValueError, ("b has shape (4,), expected (6,)", "b=(4,)")),
    "bias_of_wrong_rank": (dict(b=f32(1, 6)), {}, ValueError, ("b has shape (1, 6), expected (6,)",)),
    "x_of_integers": (
        dict(x=f32(2, 8, 8, 4, dtype="int32")),
        {},
        TypeError,
        ("x has dtype int32, expected one of float32",),
    ),
    "w_of_integers": (
        dict(w=f32(3, 3, 4, 6, dtype="int8")),
        {},
        TypeError,
        ("w has dtype int8, expected one of float32",),
    ),
    "b_of_bools": (dict(b=f32(6, dtype="bool")), {}, TypeError, ("b has dtype bool, expected one of",)),
    "x_complex": (dict(x=f32(2, 8, 8, 4, dtype="complex64")), {}, TypeError, ("x has dtype complex64",)),
    "mixed_dtypes": (
        dict(w=f32(3, 3, 4, 6, dtype="bfloat16")),
        {},
        TypeError,
        ("all arrays must have one dtype, got x: float32, w: bfloat16, b: float32",),
    ),
    "mixed_bias_dtype": (dict(b=f32(6, dtype="float16")), {}, TypeError, ("one dtype", "b: float16")),
    "x_a_list": (dict(x=[[1.0]]), {}, TypeError, ("x must be an array, got list",)),
    "w_none": (dict(w=None), {}, TypeError, ("w must be an array, got NoneType",)),
    "b_a_number": (dict(b=1.0), {}, TypeError, ("b must be an array, got float",)),
}


@pytest.mark.parametrize("mistake", BAD_CONV)
def test_conv2d_refuses(mistake):
    changed, options, error, parts = BAD_CONV[mistake]
    check(jaxconv.conv2d, {**GOOD_CONV, **changed}, options, error, ("conv2d: ", *parts))


# What depends on the number of dimensions: ranks, lengths and layouts.
@pytest.mark.parametrize("nd", [1, 2, 3])
def test_conv_of_every_rank_names_itself_and_its_layouts(nd):
    name, conv = f"conv{nd}d", CONVS[nd]
    x, w = f32(1, *(4,) * nd, 2), f32(*(3,) * nd, 2, 3)
    check(conv, dict(x=f32(4, 2), w=w), {}, ValueError, (f"{name}: x has 2 dimensions, expected {nd + 2}",))
    check(conv, dict(x=x, w=f32(3, 2)), {}, ValueError, (f"{name}: w has 2 dimensions, expected {nd + 2}",))
    bad = dict(stride=(1,) * (nd + 1))
    check(conv, dict(x=x, w=w), bad, ValueError, (f"{name}: stride", f"{nd + 1} entries, expected an int or {nd}"))
    last, first = LAYOUTS[nd]
    check(conv, dict(x=x, w=w), dict(layout="NC"), ValueError, (f"{name}: layout='NC'", f"'{last}' or '{first}'"))


BAD_TRANSPOSE = {
    "x_of_wrong_rank": (dict(x=f32(8, 8, 4)), {}, ValueError, ("x has 3 dimensions, expected 4",)),
    "w_of_wrong_rank": (dict(w=f32(3, 4, 6)), {}, ValueError, ("w has 3 dimensions, expected 4",)),
    "channel_mismatch": (dict(w=f32(3, 3, 3, 6)), {}, ValueError, ("w expects 3 input channels, x has 4",)),
    "channel_mismatch_of_transpose_kernel": (
        dict(w=f32(3, 3, 4, 6)),
        dict(transpose_kernel=True),
        ValueError,
        ("w expects 6 input channels, x has 4",),
    ),
    "groups_that_do_not_divide": (dict(w=f32(3, 3, 1, 6)), dict(groups=4), ValueError, ("groups=4 does not divide",)),
    "groups_zero": ({}, dict(groups=0), ValueError, ("groups=0 must be at least 1",)),
    "stride_zero": ({}, dict(stride=0), ValueError, ("stride=0 must be at least 1",)),
    "dilation_negative": ({}, dict(dilation=-1), ValueError, ("dilation=-1 must be at least 1",)),
    "padding_unknown": ({}, dict(padding="FULL"), ValueError, ("padding='FULL' is unknown, expected 'SAME', 'VALID'",)),
    "padding_of_wrong_length": ({}, dict(padding=(1,)), ValueError, ("padding=(1,) has 1 entries",)),
    "layout_unknown": ({}, dict(layout="NWC"), ValueError, ("layout='NWC' is unknown, expected 'NHWC' or 'NCHW'",)),
    "activation_unknown": ({}, dict(activation="Relu"), ValueError, ("activation='Relu' is unknown",)),
    "precision_unknown": ({}, dict(precision="best"), ValueError, ("precision='best' is unknown",)),
    "implementation_unknown": ({}, dict(implementation="x"), ValueError, ("implementation='x' is unknown",)),
    "algorithm_unknown": ({}, dict(algorithm="x"), ValueError, ("algorithm='x' is unknown",)),
    "no_taps": (dict(w=f32(3, 0, 4, 6)), {}, ValueError, ("w has no taps",)),
    "bias_of_wrong_shape": (dict(b=f32(4)), {}, ValueError, ("b has shape (4,), expected (6,)",)),
    "x_of_integers": (dict(x=f32(2, 8, 8, 4, dtype="int32")), {}, TypeError, ("x has dtype int32",)),
    "mixed_dtypes": (dict(w=f32(3, 3, 4, 6, dtype="bfloat16")), {}, TypeError, ("one dtype", "w: bfloat16")),
    "x_a_list": (dict(x=[1.0]), {}, TypeError, ("x must be an array, got list",)),
}


@pytest.mark.parametrize("mistake", BAD_TRANSPOSE)
def test_conv_transpose2d_refuses(mistake):
    changed, options, error, parts = BAD_TRANSPOSE[mistake]
    check(jaxconv.conv_transpose2d, {**GOOD_CONV, **changed}, options, error, ("conv_transpose2d: ", *parts))


@pytest.mark.parametrize("nd", [1, 3])
def test_conv_transpose_of_every_rank_names_itself(nd):
    x, w = f32(4, 2), f32(*(3,) * nd, 2, 3)
    check(TRANSPOSED[nd], dict(x=x, w=w), {}, ValueError, (f"conv_transpose{nd}d: x has 2 dimensions",))


GOOD_DENSE = dict(x=f32(5, 4), w=f32(4, 6))
BAD_DENSE = {
    "x_a_scalar": (dict(x=f32()), {}, ValueError, ("x has 0 dimensions, expected (..., K)",)),
    "w_of_wrong_rank": (dict(w=f32(4)), {}, ValueError, ("w has 1 dimensions, expected 2 (K, N)", "w=(4,)")),
    "features_mismatch": (
        dict(w=f32(3, 6)),
        {},
        ValueError,
        ("w expects 3 input features, x has 4", "x=(5, 4), w=(3, 6)"),
    ),
    "bias_of_wrong_shape": (dict(b=f32(7)), {}, ValueError, ("b has shape (7,), expected a scalar", "(6,)", "(5,)")),
    "bias_a_matrix": (dict(b=f32(5, 6)), {}, ValueError, ("b has shape (5, 6)",)),
    "c_of_wrong_shape": (dict(c=f32(6, 5)), {}, ValueError, ("c has shape (6, 5), expected (5, 6)",)),
    "c_that_would_broadcast": (dict(c=f32(6)), {}, ValueError, ("c has shape (6,), expected (5, 6)",)),
    "x_of_integers": (dict(x=f32(5, 4, dtype="int32")), {}, TypeError, ("x has dtype int32, expected one of",)),
    "mixed_dtypes": (dict(c=f32(5, 6, dtype="float16")), {}, TypeError, ("one dtype", "c: float16")),
    "x_a_list": (dict(x=[1.0]), {}, TypeError, ("x must be an array, got list",)),
    "c_a_number": (dict(c=1.0), {}, TypeError, ("c must be an array, got float",)),
    "alpha_a_string": ({}, dict(alpha="1"), TypeError, ("alpha must be a Python number", "got '1'")),
    "alpha_a_bool": ({}, dict(alpha=True), TypeError, ("alpha must be a Python number",)),
    "beta_none": ({}, dict(beta=None), TypeError, ("beta must be a Python number", "got None")),
    "activation_unknown": ({}, dict(activation="Gelu"), ValueError, ("activation='Gelu' is unknown",)),
    "precision_unknown": ({}, dict(precision=3), ValueError, ("precision=3 is unknown",)),
    "implementation_unknown": ({}, dict(implementation="cublas"), ValueError, ("implementation='cublas' is unknown",)),
    "algorithm_unknown": (
        {},
        dict(algorithm="im2col"),
        ValueError,
        ("algorithm='im2col' is unknown, expected None or one of gemm",),
    ),
    "algorithm_of_xla": (
        {},
        dict(algorithm="gemm", implementation="xla"),
        ValueError,
        ("algorithm='gemm' is a native",),
    ),
}


@pytest.mark.parametrize("mistake", BAD_DENSE)
def test_dense_refuses(mistake):
    changed, options, error, parts = BAD_DENSE[mistake]
    check(jaxconv.dense, {**GOOD_DENSE, **changed}, options, error, ("dense: ", *parts))


GOOD_NORM = dict(x=f32(4, 3, 5), scale=f32(5), bias=f32(5), running_mean=f32(5), running_var=f32(5))
BAD_NORM = {
    "x_of_wrong_rank": (dict(x=f32(5)), {}, ValueError, ("x has 1 dimensions, expected at least 2",)),
    "channel_axis_out_of_range": ({}, dict(channel_axis=3), ValueError, ("channel_axis=3 is out of range for 3",)),
    "channel_axis_not_an_integer": (
        {},
        dict(channel_axis="C"),
        TypeError,
        ("channel_axis must be an integer, got 'C'",),
    ),
    "scale_of_wrong_shape": (dict(scale=f32(7)), {}, ValueError, ("scale has shape (7,), expected (5,)",)),
    "channels_of_another_axis": (
        dict(scale=f32(3)),
        {},
        ValueError,
        ("scale has shape (3,), expected (5,)", "x has 3 along axis 1: channel_axis=1"),
    ),
    "bias_of_wrong_shape": (dict(bias=f32(1, 5)), {}, ValueError, ("bias has shape (1, 5), expected (5,)",)),
    "running_mean_of_wrong_shape": (dict(running_mean=f32(4)), {}, ValueError, ("running_mean has shape (4,)",)),
    "running_var_of_wrong_shape": (dict(running_var=f32()), {}, ValueError, ("running_var has shape ()",)),
    "running_mean_none": (dict(running_mean=None), {}, TypeError, ("running_mean must be an array, got None",)),
    "running_var_none": (dict(running_var=None), {}, TypeError, ("running_var must be an array, got None",)),
    "running_mean_16_bit": (
        dict(x=f32(4, 3, 5, dtype="bfloat16"), running_mean=f32(5, dtype="bfloat16")),
        {},
        TypeError,
        ("running_mean has dtype bfloat16, expected float32 for x of bfloat16",),
    ),
    "scale_of_integers": (dict(scale=f32(5, dtype="int32")), {}, TypeError, ("scale has dtype int32",)),
    "x_of_integers": (dict(x=f32(4, 3, 5, dtype="int32")), {}, TypeError, ("x has dtype int32",)),
    "x_a_list": (dict(x=[1.0]), {}, TypeError, ("x must be an array, got list",)),
    "residual_of_wrong_shape": (
        dict(residual=f32(4, 3, 4)),
        {},
        ValueError,
        ("residual has shape (4, 3, 4), expected (4, 3, 5)",),
    ),
    "residual_of_other_dtype": (dict(residual=f32(4, 3, 5, dtype="float16")), {}, TypeError, ("residual: float16",)),
    "no_channels": (
        {k: f32(0) for k in ("scale", "bias", "running_mean", "running_var")} | {"x": f32(4, 3, 0)},
        {},
        ValueError,
        ("x has no channels",),
    ),
    "nothing_to_average": (dict(x=f32(0, 3, 5)), {}, ValueError, ("x is empty: training statistics need",)),
    "training_a_number": ({}, dict(training=1), TypeError, ("training must be True or False", "got 1")),
    "training_none": ({}, dict(training=None), TypeError, ("training must be True or False", "got None")),
    "momentum_above_one": ({}, dict(momentum=1.5), ValueError, ("momentum=1.5 must be between 0 and 1",)),
    "momentum_negative": ({}, dict(momentum=-0.1), ValueError, ("momentum=-0.1 must be between 0 and 1",)),
    "momentum_a_string": ({}, dict(momentum="0.9"), TypeError, ("momentum must be a Python number", "got '0.9'")),
    "momentum_nan": ({}, dict(momentum=float("nan")), ValueError, ("momentum=nan must be between 0 and 1",)),
    "epsilon_negative": ({}, dict(epsilon=-1e-5), ValueError, ("epsilon=-1e-05 must not be negative",)),
    "epsilon_nan": ({}, dict(epsilon=float("nan")), ValueError, ("epsilon=nan must not be negative, infinite or NaN",)),
    "epsilon_infinite": ({}, dict(epsilon=float("inf")), ValueError, ("epsilon=inf must not be",)),
    "statistics_of_three": (
        {},
        dict(statistics=(jnp.ones(5),) * 3),
        ValueError,
        ("statistics has 3 entries, expected a pair (mean, variance)",),
    ),
    "statistics_an_array": (
        {},
        dict(statistics=jnp.ones(5)),
        TypeError,
        ("statistics must be a pair (mean, variance)",),
    ),
    "epsilon_none": ({}, dict(epsilon=None), TypeError, ("epsilon must be a Python number",)),
    "activation_unknown": ({}, dict(activation="mish"), ValueError, ("activation='mish' is unknown",)),
    "implementation_unknown": ({}, dict(implementation="cudnn"), ValueError, ("implementation='cudnn' is unknown",)),
    "algorithm_unknown": ({}, dict(algorithm="direct"), ValueError, ("algorithm='direct' is unknown", "two_read")),
}


@pytest.mark.parametrize("mistake", BAD_NORM)
def test_batchnorm_refuses(mistake):
    changed, options, error, parts = BAD_NORM[mistake]
    check(jaxconv.batchnorm, {**GOOD_NORM, **changed}, {"training": True, **options}, error, ("batchnorm: ", *parts))


def test_traced_numbers_are_refused_where_a_python_number_is_needed():
    x, w, v = jnp.ones((5, 4)), jnp.ones((4, 6)), jnp.ones(4)
    with pytest.raises(
        TypeError, match=r"dense: alpha must be a Python number .it is fixed when the function is traced"
    ):
        jax.jit(lambda a: jaxconv.dense(x, w, alpha=a))(2.0)
    with pytest.raises(TypeError, match="dense: beta must be a Python number"):
        jax.jit(lambda a: jaxconv.dense(x, w, beta=a))(2.0)
    with pytest.raises(TypeError, match=r"batchnorm: training must be True or False .it is fixed when"):
        jax.jit(lambda t: jaxconv.batchnorm(x, v, v, v, v, training=t))(True)
    with pytest.raises(TypeError, match="batchnorm: momentum must be a Python number"):
        jax.jit(lambda m: jaxconv.batchnorm(x, v, v, v, v, training=True, momentum=m))(0.9)
    with pytest.raises(TypeError, match="conv2d: stride must be an integer"):
        jax.jit(lambda s: jaxconv.conv2d(jnp.ones((1, 4, 4, 2)), jnp.ones((3, 3, 2, 2)), stride=s))(2)


def test_float64_parameters_of_a_float32_norm_are_refused(x64):
    v, wide = jnp.ones(4, "float32"), jnp.ones(4, "float64")
    with pytest.raises(TypeError, match="running_var has dtype float64, expected float32 for x of float32"):
        jaxconv.batchnorm(jnp.ones((5, 4), "float32"), v, v, v, wide, training=True)


def test_mixing_float32_with_float64_is_refused(x64):
    with pytest.raises(TypeError, match="dense: all arrays must have one dtype, got x: float32, w: float64"):
        jaxconv.dense(jnp.ones((5, 4), "float32"), jnp.ones((4, 6), "float64"))


@pytest.mark.parametrize("shape", ((2, 9, 8, 4), (2, 8, 4), (4, 5, 8, 8)))
def test_no_layout_is_hinted_at_where_none_fits(shape):
    with pytest.raises(ValueError, match="conv2d: ") as caught:
        jaxconv.conv2d(jnp.zeros(shape), jnp.zeros((3, 3, 3, 6)))
    assert "layout=" not in str(caught.value)


@pytest.mark.parametrize("nd", (1, 2, 3))
def test_every_convolution_hints_at_the_layout(nd):
    x, w, v = jnp.zeros((2, 4, *(8, 9, 7)[:nd])), jnp.zeros((3,) * nd + (4, 6)), jnp.ones(6)
    first = ("NCW", "NCHW", "NCDHW")[nd - 1]
    for f in (
        getattr(jaxconv, f"conv{nd}d"),
        getattr(jaxconv, f"conv_transpose{nd}d"),
        lambda x, w: jaxconv.conv_batchnorm(x, w, v, v, v, v, training=False),
    ):
        with pytest.raises(ValueError, match=f"w expects 4 input channels.*x has 4 along axis 1: layout='{first}'"):
            f(x, w)
    with pytest.raises(ValueError, match=f"w expects 4 input channels.*x has 4 along axis 1: layout='{first}'"):
        getattr(jaxconv, f"conv_transpose{nd}d")(x, jnp.zeros((3,) * nd + (6, 4)), transpose_kernel=True)


def test_padding_that_takes_all_there_is():
    """Is no mistake; what is spread out by a stride has more to take."""
    x, w = jnp.zeros((2, 8, 8, 4)), jnp.zeros((3, 3, 4, 6))
    assert jaxconv.conv2d(x, w, padding=-4).shape == (2, 0, 0, 6)
    assert jaxconv.conv_transpose2d(x, w, stride=2, padding=((-7, -8), (0, 0))).shape == (2, 0, 13, 6)
    with pytest.raises(ValueError, match=r"conv_transpose2d: padding=-8 takes 16 elements from an axis of 15"):
        jaxconv.conv_transpose2d(x, w, stride=2, padding=-8)


def test_a_tensor_that_requires_a_gradient():
    """PyTorch's raises when it is read."""

    class Tensor(np.ndarray):
        requires_grad = True

    tensor = np.zeros((2, 8, 8, 4), np.float32).view(Tensor)
    for f in (jaxconv.conv2d, jaxconv.conv_transpose2d):
        with pytest.raises(TypeError, match=rf"{f.__name__}: x is a .*Tensor that requires a gradient.*x.detach\(\)"):
            f(tensor, jnp.zeros((3, 3, 4, 6)))
    tensor.requires_grad = False
    assert jaxconv.conv2d(tensor, jnp.zeros((3, 3, 4, 6))).shape == (2, 8, 8, 6)


@pytest.mark.parametrize("name", ("accelerate", "cost", "explain", "freeze", "launches", "tune"))
def test_what_takes_a_function_refuses_everything_else(name):
    take = getattr(jaxconv, name)
    with pytest.raises(TypeError, match=rf"^{name}: f must be a function, got int$"):
        take(5)
    compiled = jax.jit(jnp.sin).lower(1.0).compile()
    with pytest.raises(TypeError, match=rf"^{name}: f is compiled already .* expected the function that was compiled$"):
        take(compiled)
    with pytest.raises(TypeError, match=rf"^{name}: f must be a function, got Lowered$"):
        take(jax.jit(jnp.sin).lower(1.0))


def test_an_empty_batch_is_no_mistake():
    assert jaxconv.conv2d(jnp.ones((0, 8, 8, 4)), jnp.ones((3, 3, 4, 6))).shape == (0, 8, 8, 6)
    assert jaxconv.dense(jnp.ones((0, 4)), jnp.ones((4, 6))).shape == (0, 6)
    assert jaxconv.conv_transpose2d(jnp.ones((0, 8, 8, 4)), jnp.ones((3, 3, 4, 6))).shape == (0, 8, 8, 6)
    v = jnp.ones(4)
    assert jaxconv.batchnorm(jnp.ones((0, 4)), v, v, v, v, training=False)[0].shape == (0, 4)


def test_forced_algorithms_that_cannot_run_are_refused_with_the_reason(device):
    x, w = jnp.ones((1, 8, 8, 4)), jnp.ones((3, 3, 4, 6))
    with pytest.raises(
        ValueError, match=r"conv2d: algorithm='depthwise' cannot run conv_fprop .* one input channel per group"
    ):
        jax.jit(lambda x, w: jaxconv.conv2d(x, w, algorithm="depthwise")).lower(x, w)
    if device == "cpu":
        with pytest.raises(ValueError, match=r"conv2d: algorithm='implicit_gemm' cannot run conv_fprop of .*: .*"):
            jax.jit(lambda x, w: jaxconv.conv2d(x, w, algorithm="implicit_gemm")).lower(x, w)


X, W = jnp.ones((1, 8, 8, 4)), jnp.ones((3, 3, 4, 4))
SWITCHES = {
    "conv2d: return_preactivation": lambda v: jaxconv.conv2d(X, W, return_preactivation=v),
    "dense: return_preactivation": lambda v: jaxconv.dense(X, W[0, 0], return_preactivation=v),
    "conv_transpose2d: return_preactivation": lambda v: jaxconv.conv_transpose2d(X, W, return_preactivation=v),
    "conv_transpose2d: transpose_kernel": lambda v: jaxconv.conv_transpose2d(X, W, transpose_kernel=v),
    "avg_pool: count_include_pad": lambda v: jaxconv.avg_pool(X, 2, count_include_pad=v),
    "enable: auto_meshes": lambda v: jaxconv.enable(auto_meshes=v),
    "tune: verify": lambda v: jaxconv.tune(jnp.sin, verify=v),
    "tune: save": lambda v: jaxconv.tune(jnp.sin, save=v),
}


@pytest.mark.parametrize("value", ["no", 1, None, jnp.ones(3)])
@pytest.mark.parametrize("name", SWITCHES)
def test_switches_are_true_or_false(name, value):
    with pytest.raises(TypeError, match=f"{name} must be True or False, got"):
        SWITCHES[name](value)


def test_numbers_of_numpy_are_slopes():
    expected = jaxconv.conv2d(X, W, activation=("leaky_relu", 0.25))
    for slope in (np.float32(0.25), np.float64(0.25), np.float16(0.25)):
        np.testing.assert_array_equal(jaxconv.conv2d(X, W, activation=("leaky_relu", slope)), expected)
        of_jax = functools.partial(jax.nn.leaky_relu, negative_slope=slope)
        np.testing.assert_array_equal(jaxconv.conv2d(X, W, activation=of_jax), expected)
    for slope in (True, np.nan, "0.25"):
        with pytest.raises(TypeError, match="with a finite number"):
            jaxconv.conv2d(X, W, activation=("leaky_relu", slope))


def test_misspelt_arguments_of_lax_are_refused():
    for value in (None, 1):
        with pytest.raises(TypeError, match="unexpected keyword argument 'feature_group_counts'"):
            jaxconv.conv_general_dilated(X, W, (1, 1), "SAME", feature_group_counts=value)

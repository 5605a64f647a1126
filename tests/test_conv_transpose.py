"""conv_transpose* and conv_general_dilated: a dgrad as a layer, and lax's own signature. lax says what is right."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import DTYPES, NAMED_ACTIVATIONS, PLATFORM, calls, integers, label, normal, types_of
from jax import lax
from tolerance import assert_close, assert_exact, integers_for

import jaxconv
from jaxconv._core import activations
from jaxconv._problem import CONV_ALGORITHMS

TRANSPOSED = {1: jaxconv.conv_transpose1d, 2: jaxconv.conv_transpose2d, 3: jaxconv.conv_transpose3d}
NUMBERS = {
    "NWC": ("NWC", "WIO", "NWC"),
    "NCW": ("NCW", "OIW", "NCW"),
    "NHWC": ("NHWC", "HWIO", "NHWC"),
    "NCHW": ("NCHW", "OIHW", "NCHW"),
    "NDHWC": ("NDHWC", "DHWIO", "NDHWC"),
    "NCDHW": ("NCDHW", "OIDHW", "NCDHW"),
}
# A transposed convolution is a dgrad: every dense algorithm runs it. The names that the device refuses are left out.
DENSE = ("direct", "im2col", "implicit_gemm") if PLATFORM == "cuda" else ("direct", "im2col")
DGRAD = [None, *(a for a in CONV_ALGORITHMS if a in DENSE)]

# (stride, window, dilation, padding): stride above, at and below the window; named, symmetric and asymmetric pads.
WINDOWS = [
    (1, 3, 1, "SAME"),
    (2, 3, 1, "SAME"),
    (2, 2, 1, "VALID"),
    (3, 2, 1, "VALID"),
    (3, 2, 1, "SAME"),
    (2, 4, 2, "SAME"),
    (2, 3, 1, 1),
    (2, 3, 1, ((2, 0), (1, 3))),
]


def shapes(layout: str, window: int, groups: int, c: int, k: int, kernel: bool = False) -> tuple[Any, Any]:
    spatial, taps = (6, 5, 4)[: len(layout) - 2], (window,) * (len(layout) - 2)
    i, o = (k, c) if kernel else (c, k)
    if layout.endswith("C"):
        return (2, *spatial, c), (*taps, i // groups, o)
    return (2, c, *spatial), (o, i // groups, *taps)


def pads_of(padding: Any, nd: int) -> Any:
    return padding if not isinstance(padding, int) else [(padding, padding)] * nd


@pytest.mark.parametrize("algorithm", DGRAD, ids=label)
@pytest.mark.parametrize(("stride", "window", "dilation", "padding"), WINDOWS, ids=str)
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_integers_give_exactly_what_lax_gives(layout, stride, window, dilation, padding, algorithm):
    xs, ws = shapes(layout, window, 1, 5, 7)
    x, w = jnp.asarray(integers(0, xs), "float32"), jnp.asarray(integers(1, ws), "float32")
    expected = lax.conv_transpose(
        x, w, (stride,) * 2, pads_of(padding, 2), rhs_dilation=(dilation,) * 2, dimension_numbers=NUMBERS[layout]
    )
    f = functools.partial(
        jaxconv.conv_transpose2d, stride=stride, padding=padding, dilation=dilation, layout=layout, algorithm=algorithm
    )
    assert_exact(jax.jit(f)(x, w), np.asarray(expected, np.float64))
    if algorithm:
        assert calls(f, x, w) == {"conv_dgrad": 1}


@pytest.mark.parametrize("layout", list(NUMBERS))
@pytest.mark.parametrize("implementation", ["native", None], ids=label)
@pytest.mark.parametrize("transpose_kernel", [False, True], ids=["own_kernel", "transposed_kernel"])
def test_every_rank_and_layout_agrees_with_lax(layout, implementation, transpose_kernel):
    nd = len(layout) - 2
    xs, ws = shapes(layout, 3, 1, 4, 6, kernel=transpose_kernel)
    x, w = jnp.asarray(integers(0, xs), "float32"), jnp.asarray(integers(1, ws), "float32")
    expected = lax.conv_transpose(
        x, w, (2,) * nd, "SAME", dimension_numbers=NUMBERS[layout], transpose_kernel=transpose_kernel
    )
    f = functools.partial(
        TRANSPOSED[nd], stride=2, layout=layout, transpose_kernel=transpose_kernel, implementation=implementation
    )
    assert_exact(jax.jit(f)(x, w), np.asarray(expected, np.float64))


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("groups", [2, 6], ids=["grouped", "depthwise"])
@pytest.mark.parametrize("implementation", ["native", None], ids=label)
def test_groups_are_convolutions_side_by_side(layout, groups, implementation):
    c, k = 6, 12
    xs, ws = shapes(layout, 3, groups, c, k)
    x, w = jnp.asarray(integers(0, xs), "float32"), jnp.asarray(integers(1, ws), "float32")
    channel = 3 if layout == "NHWC" else 1
    out = 3 if layout == "NHWC" else 0
    expected = jnp.concatenate(
        [
            lax.conv_transpose(a, b, (2, 2), "SAME", dimension_numbers=NUMBERS[layout])
            for a, b in zip(jnp.split(x, groups, channel), jnp.split(w, groups, out), strict=True)
        ],
        channel,
    )
    f = functools.partial(
        jaxconv.conv_transpose2d, stride=2, groups=groups, layout=layout, implementation=implementation
    )
    assert_exact(jax.jit(f)(x, w), np.asarray(expected, np.float64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_exact_and_stays(dtype):
    xs, ws = shapes("NHWC", 3, 1, 5, 7)
    with types_of(dtype):
        x, w = (jnp.asarray(integers(seed, s, integers_for(dtype)), dtype) for seed, s in ((0, xs), (1, ws)))
        y = jax.jit(functools.partial(jaxconv.conv_transpose2d, stride=2, implementation="native"))(x, w)
        wide = lax.conv_transpose(
            x.astype("float32"), w.astype("float32"), (2, 2), "SAME", dimension_numbers=NUMBERS["NHWC"]
        )
    assert y.dtype.name == dtype
    assert_exact(y, np.asarray(wide, np.float64))


@pytest.mark.parametrize("activation", NAMED_ACTIVATIONS, ids=label)
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_bias_activation_and_gradients_agree_with_lax(layout, activation):
    xs, ws = shapes(layout, 3, 1, 4, 6)
    x, w, b = (jnp.asarray(normal(i, s), "float32") for i, s in enumerate((xs, ws, (6,))))
    per_channel = (6,) if layout == "NHWC" else (6, 1, 1)

    def ours(x, w, b):
        return jaxconv.conv_transpose2d(
            x,
            w,
            b,
            stride=2,
            layout=layout,
            activation=activation,
            return_preactivation=True,
            precision="highest",
            implementation="native",
        )

    def theirs(x, w, b):
        z = lax.conv_transpose(
            x, w, (2, 2), "SAME", dimension_numbers=NUMBERS[layout], precision="highest"
        ) + b.reshape(per_channel)
        return activations.activate(activations.parse("test", activation), z), z

    def outputs(f, x, w, b, dy, dz):
        (y, z), back = jax.vjp(f, x, w, b)
        return (y, z, *back((dy, dz)))

    y_shape = jax.eval_shape(ours, x, w, b)[0].shape
    cotangents = [jnp.asarray(normal(i, y_shape), "float32") for i in (7, 8)]
    actual = jax.jit(functools.partial(outputs, ours))(x, w, b, *cotangents)
    xla = jax.jit(functools.partial(outputs, theirs))(x, w, b, *cotangents)
    with jax.enable_x64(True):
        wide = [a.astype("float64") for a in (x, w, b, *cotangents)]
        reference = jax.jit(functools.partial(outputs, theirs))(*wide)
    # The longest sums: 9 taps x 6 channels forward and in dx, all pixels of two images in dw and db.
    for what, a, t, r, n in zip("yzxwb", actual, xla, reference, (54, 54, 54, 240, 240), strict=True):
        assert_close(a, t, np.asarray(r), n, what, scale=np.sqrt(n) * 4)


# ----------------------------------------------------------------------------------------------------------------------
# conv_general_dilated


def both(x: Any, w: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    ours = jax.jit(lambda x, w: jaxconv.conv_general_dilated(x, w, *args, **kwargs))(x, w)
    theirs = jax.jit(lambda x, w: lax.conv_general_dilated(x, w, *args, **kwargs))(x, w)
    assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    return ours, theirs


LHS, RHS = ("NHWC", "NCHW", "HWNC", "CHWN"), ("HWIO", "OIHW", "IHWO", "OHWI")


@pytest.mark.parametrize(("lhs", "rhs", "out"), list(itertools.product(LHS, RHS, ("NHWC", "NCHW"))), ids=str)
def test_every_order_of_dimensions_agrees_with_lax(lhs, rhs, out):
    """Also orders that no kernel has: those are lax's own calls."""
    extents = dict(N=2, C=4, H=6, W=5, I=2, O=6)
    x = jnp.asarray(integers(0, tuple(extents[d] for d in lhs)), "float32")
    w = jnp.asarray(integers(1, tuple({**extents, "H": 3, "W": 2}[d] for d in rhs)), "float32")
    both(x, w, (2, 1), "SAME", rhs_dilation=(1, 2), dimension_numbers=(lhs, rhs, out), feature_group_count=2)


@pytest.mark.parametrize("nd", [1, 2, 3])
def test_default_dimension_numbers_are_channels_first(nd):
    x, w = integers(0, (2, 4, *(6,) * nd)), integers(1, (6, 4, *(3,) * nd))
    both(jnp.asarray(x, "float32"), jnp.asarray(w, "float32"), (1,) * nd, "VALID")


@pytest.mark.parametrize(
    "padding", ["SAME", "VALID", "SAME_LOWER", [(1, 2), (0, 3)], [(-1, 1), (2, -1)], ((0, 0), (1, 1))], ids=str
)
def test_every_padding_agrees_with_lax(padding):
    x, w = integers(0, (2, 7, 6, 3)), integers(1, (3, 2, 3, 5))
    both(
        jnp.asarray(x, "float32"),
        jnp.asarray(w, "float32"),
        (2, 1),
        padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


@pytest.mark.parametrize("order", [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")], ids=str)
@pytest.mark.parametrize("dilation", [(2, 3), (1, 2)], ids=str)
@pytest.mark.parametrize("groups", [1, 2])
def test_lhs_dilation_is_a_dgrad(order, dilation, groups):
    extents = dict(N=2, C=4, H=5, W=4, I=4 // groups, O=6)
    x = jnp.asarray(integers(0, tuple(extents[d] for d in order[0])), "float32")
    w = jnp.asarray(integers(1, tuple({**extents, "H": 3, "W": 3}[d] for d in order[1])), "float32")
    options = dict(lhs_dilation=dilation, dimension_numbers=order, feature_group_count=groups)
    both(x, w, (1, 1), [(2, 1), (0, 3)], **options)
    primitives = str(
        jax.make_jaxpr(lambda x, w: jaxconv.conv_general_dilated(x, w, (1, 1), [(1, 1)] * 2, **options))(x, w)
    )
    assert "jaxconv_conv_dgrad" in primitives and "conv_general_dilated[" not in primitives


FALLBACKS = {
    "batch_groups": ("float32", {"batch_group_count": 2}),
    "integers": ("int32", {}),
    "complex": ("complex64", {}),
    "preferred_element_type": ("bfloat16", {"preferred_element_type": jnp.float32}),
    "both_strides_and_lhs_dilation": (
        "float32",
        {"window_strides": (2, 2), "lhs_dilation": (2, 2), "padding": [(1, 1)] * 2},
    ),
    "empty_output": ("float32", {"padding": [(-3, -3), (0, 0)]}),
}


@pytest.mark.parametrize("name", FALLBACKS)
def test_what_no_kernel_takes_is_lax_own_call(name):
    dtype, options = FALLBACKS[name]
    if name == "integers" and jax.default_backend() == "gpu":
        pytest.skip("XLA has no integer convolutions on GPUs: lax fails too")
    x, w = jnp.asarray(integers(0, (4, 6, 6, 4)), dtype), jnp.asarray(integers(1, (3, 3, 4, 6)), dtype)
    options = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC"), **options}
    both(x, w, **options)


def test_no_spatial_dimension_and_four_of_them_are_lax_own_calls():
    both(jnp.asarray(integers(0, (3, 4)), "float32"), jnp.asarray(integers(1, (5, 4)), "float32"), (), [])
    x, w = integers(0, (1, 2, 3, 3, 3, 3)), integers(1, (2, 2, 2, 2, 2, 2))
    both(jnp.asarray(x, "float32"), jnp.asarray(w, "float32"), (1,) * 4, "VALID")


def test_what_lax_refuses_is_refused_as_lax_does():
    x, w = jnp.ones((1, 5, 5, 3)), jnp.ones((3, 3, 4, 6))
    with pytest.raises((TypeError, ValueError)) as ours:
        jaxconv.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    with pytest.raises((TypeError, ValueError)) as theirs:
        lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    assert str(ours.value) == str(theirs.value)


NUMBERS_2D = ("NHWC", "HWIO", "NHWC")
ODD_ARGUMENTS = {
    "stride_fraction": dict(window_strides=(1.5, 1.5)),
    "stride_float": dict(window_strides=(2.0, 2.0)),
    "stride_none": dict(window_strides=(None, None)),
    "stride_string": dict(window_strides=("2", "2")),
    "stride_number": dict(window_strides=2),
    "strides_none": dict(window_strides=None),
    "strides_too_few": dict(window_strides=(1,)),
    "stride_bool": dict(window_strides=(True, True)),
    "dilation_fraction": dict(rhs_dilation=(2.9, 1)),
    "dilation_none": dict(rhs_dilation=(None, 1)),
    "lhs_dilation_fraction": dict(lhs_dilation=(1.5, 1), padding=((0, 0), (0, 0))),
    "lhs_dilation_string": dict(lhs_dilation=("1", "1"), padding=((0, 0), (0, 0))),
    "groups_float": dict(feature_group_count=1.0),
    "groups_fraction": dict(feature_group_count=1.5),
    "groups_string": dict(feature_group_count="1"),
    "groups_none": dict(feature_group_count=None),
    "padding_number": dict(padding=1),
    "padding_numbers": dict(padding=(1, 1)),
    "padding_fraction": dict(padding=((0.5, 1), (1, 1))),
    "padding_unknown": dict(padding="SOME"),
    "padding_causal": dict(padding="CAUSAL"),
    "precision_number": dict(precision=1),
    "precision_pair_with_none": dict(precision=(None, "high")),
    "precision_mixed": dict(precision=("high", lax.Precision.HIGH)),
    "precision_unknown": dict(precision="best"),
    "precision_list": dict(precision=["high", "highest"]),
    "precision_algorithm": dict(precision="F32_F32_F32"),
}


@pytest.mark.parametrize("name", ODD_ARGUMENTS)
def test_odd_arguments_are_taken_or_refused_as_lax_does(name):
    x, w = jnp.asarray(integers(0, (2, 6, 6, 4)), "float32"), jnp.asarray(integers(1, (3, 3, 4, 6)), "float32")
    options = dict(window_strides=(1, 1), padding="SAME", dimension_numbers=NUMBERS_2D) | ODD_ARGUMENTS[name]
    try:
        expected, error = lax.conv_general_dilated(x, w, **options), None
    except Exception as refused:
        expected, error = None, refused
    if error is None:
        np.testing.assert_array_equal(jaxconv.conv_general_dilated(x, w, **options), expected)
        return
    with pytest.raises(type(error)) as ours:
        jaxconv.conv_general_dilated(x, w, **options)
    assert str(ours.value).split(" at 0x")[0] == str(error).split(" at 0x")[0]


def test_gradients_agree_with_lax():
    x, w = jnp.asarray(integers(0, (2, 6, 5, 4)), "float32"), jnp.asarray(integers(1, (3, 2, 4, 6)), "float32")

    def loss(conv, **options):
        return lambda x, w: (
            conv(x, w, padding=[(1, 1), (0, 1)], dimension_numbers=("NHWC", "HWIO", "NHWC"), **options) ** 2
        ).sum()

    for options in (dict(window_strides=(2, 1)), dict(window_strides=(1, 1), lhs_dilation=(2, 2))):
        ours = jax.jit(jax.grad(loss(jaxconv.conv_general_dilated, **options), (0, 1)))(x, w)
        theirs = jax.jit(jax.grad(loss(lax.conv_general_dilated, **options), (0, 1)))(x, w)
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a, b)

"""Numbers at the ends of what native code can represent: lax's results, or a sentence."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PLATFORM, calls, integers
from jax import lax

import jaxconv
from jaxconv._problem.conv import MAX_STEP

LAYOUT = ("NHWC", "HWIO", "NHWC")


def both(stride, impl, **options):
    """(y, dx, dw) of jaxconv and of lax."""
    x, w = (jnp.asarray(integers(i, shape), "float32") for i, shape in enumerate([(2, 5, 6, 3), (3, 3, 3, 4)]))
    pads = options.pop("padding", [(0, 0), (0, 0)])

    def ours(x, w):
        return jaxconv.conv2d(x, w, stride=stride, padding=pads, implementation=impl, **options)

    def theirs(x, w):
        # A stride of 100 is as good as any above 6, and lax's own gradient takes it.
        small = min(stride, 100)
        return lax.conv_general_dilated(x, w, (small, small), pads, dimension_numbers=LAYOUT)

    results = []
    for f in (ours, theirs):
        y, vjp = jax.vjp(f, x, w)
        results.append((y, *vjp(jnp.ones_like(y))))
    return (*results, calls(ours, x, w))


@pytest.mark.parametrize("impl", ["native", "xla", None])
@pytest.mark.parametrize("stride", [MAX_STEP, MAX_STEP + 1, 2**62, 2**63 - 1])
def test_a_stride_over_one_output_may_be_anything(stride, impl):
    ours, theirs, called = both(stride, impl)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a, b)
    assert impl != "native" or called


def test_a_dilation_of_one_tap_may_be_anything():
    x, w = jnp.ones((1, 4, 4, 2)), jnp.ones((1, 1, 2, 3))
    y = jaxconv.conv2d(x, w, dilation=2**63 - 1, implementation="native")
    np.testing.assert_array_equal(y, np.full((1, 4, 4, 3), 2.0))


@pytest.mark.parametrize("impl", ["native", None])
def test_a_stride_of_a_transposed_convolution_over_one_pixel_may_be_anything(impl):
    x, w = jnp.ones((1, 1, 1, 2)), jnp.asarray(integers(0, (3, 3, 2, 4)), "float32")
    options = dict(padding=[(2, 2), (2, 2)], implementation=impl)
    expected = jaxconv.conv_transpose2d(x, w, stride=5, **options)
    np.testing.assert_array_equal(jaxconv.conv_transpose2d(x, w, stride=2**62, **options), expected)


def test_pads_beyond_native_code_are_refused_where_it_is_asked_for_and_go_to_xla_otherwise():
    x, w = jnp.ones((1, 4, 2)), jnp.ones((1, 2, 3))
    options = dict(stride=2**40, padding=[(2**40, 1)])  # outputs read the padding and x[0]
    with pytest.raises(ValueError, match=r"stride=\(1099511627776,\) exceeds 2147483647.*implementation='xla'"):
        jaxconv.conv1d(x, w, implementation="native", **options)
    (call,) = jaxconv.explain(lambda x, w: jaxconv.conv1d(x, w, **options))(x, w)
    assert call.plan.implementation == "xla"


def test_the_largest_pad_runs_natively_and_the_next_is_refused():
    """Cropped on the other side: y is a pixel longer than x, and only its last tap reads one. Coordinates of the GPU's
    kernels end at 2^30."""
    x, w = jnp.asarray(integers(0, (2, 4, 3)), "float32"), jnp.ones((1, 3, 5))

    def f(pad):
        return lambda x, w: jaxconv.conv1d(x, w, padding=[(1 - pad, pad)], implementation="native")

    if PLATFORM == "cpu":
        assert calls(f(MAX_STEP), x, w) == {"conv_fprop": 1}
        np.testing.assert_array_equal(f(MAX_STEP)(x, w), np.zeros((2, 5, 5)))
    else:
        with pytest.raises(ValueError, match=r"every coordinate must stay below 2\^30"):
            f(MAX_STEP)(x, w)
    with pytest.raises(ValueError, match=r"padding=\(\(-2147483647, 2147483648\),\) exceeds 2147483647"):
        f(MAX_STEP + 1)(x, w)


@pytest.mark.parametrize("argument", ["stride", "dilation"])
def test_beyond_64_bits_is_refused_by_name(argument):
    x, w = jnp.ones((1, 4, 2)), jnp.ones((1, 2, 3))
    with pytest.raises(ValueError, match=rf"conv1d: {argument}=9223372036854775808 is too large"):
        jaxconv.conv1d(x, w, **{argument: 2**63})

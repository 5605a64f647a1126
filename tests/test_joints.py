"""Rules: one table of programs, which rules take which part of each, and what holds of all of them.

A row is a function of plain JAX (or of ours), and what becomes of it where the plan takes what is in `wants`. On a CPU
the kernels are then what they mean.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import H100, PLATFORM, equations, normal, same_bits
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxconv
from jaxconv import _plan
from jaxconv._core import primitives
from jaxconv.joints import joint, region, rules


@pytest.fixture(autouse=True)
def exact_products():
    """Products in float32 on a GPU too: TF32 would hide what is compared."""
    with jax.default_matmul_precision("highest"):
        yield


# ----------------------------------------------------------------------------------------------------------------------
# Plain JAX


def conv(x: Any, w: Any, stride: int = 1) -> Any:
    numbers, groups = ("NHWC", "HWIO", "NHWC"), x.shape[-1] // w.shape[2]
    return lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=numbers, feature_group_count=groups
    )


def norm(x: Any, scale: Any, bias: Any) -> Any:
    mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return (x - mean) * lax.rsqrt(var + 1e-2) * scale + bias


def bottleneck(x: Any, w1: Any, w2: Any, s1: Any, b1: Any, s2: Any, b2: Any) -> Any:
    y = jax.nn.relu(norm(conv(x, w1), s1, b1))
    return jax.nn.relu(norm(conv(y, w2), s2, b2) + x)


def two_blocks(x, w1, w2, w3, w4, scale, bias, wide, shift):
    x = bottleneck(x, w1, w2, wide, shift, scale, bias)
    return bottleneck(x, w3, w4, wide, shift, 2 * scale, -bias)


def of_one_convolution(x, r, w1, w2, w3, scale, bias):
    """Blocks that add what their only convolution reads: the second add of two is another reading."""
    x = jax.nn.relu(norm(conv(x, w1), scale, bias) + r)
    x = jax.nn.relu(norm(conv(x, w2), 2 * scale, bias) + x)
    return x, jax.nn.relu(norm(conv(x, w3), scale, -bias) + x)


def projection(x, w1, w2, w_r, s1, b1, s2, b2, s_r, b_r, *, act=jax.nn.relu, shown=False):
    y = act(norm(conv(x, w1, 2), s1, b1))
    r = norm(conv(x, w_r, 2), s_r, b_r)
    y = act(norm(conv(y, w2), s2, b2) + r)
    return (y, r) if shown else y


def dense_block(x, w1, w2, s1, b1, s2, b2):
    for w, scale, bias in ((w1, s1, b1), (w2, s2, b2)):
        x = jnp.concatenate([x, conv(jax.nn.relu(norm(x, scale, bias)), w)], -1)
    return norm(x, jnp.tile(s1, 2)[:14], 2.0)


def inverted(x, w1, w2, scale, bias, *, act=jax.nn.relu6, stride=1, shown=False, gate=False):
    a = act(norm(conv(x, w1), scale, bias))
    y = conv(a, w2, stride)
    return (y, a) if shown else y


def three_blocks(x, w1, w2, s1, b1, s2, b2):
    for _ in range(3):
        x = bottleneck(x, w1, w2, s1, b1, s2, b2)
    return x


def preactivation(x, w, scale, bias):
    return x + conv(jax.nn.relu(norm(x, scale, bias)), w)


def tower(x, w1, c1, w2, c2, w3, c3, w4, c4, scale, bias):
    """Two blocks that add before their activations, with biases in the convolutions."""
    for w, c, v, d in ((w1, c1, w2, c2), (w3, c3, w4, c4)):
        y = conv(jax.nn.relu(norm(x, scale, bias)), w) + c
        x = x + (conv(jax.nn.relu(norm(y, scale, bias)), v) + d)
    return norm(x, scale, bias)


def between(x, w, v, scale, bias, *, act=jax.nn.relu, shown=False):
    """A norm between two convolutions."""
    a = act(norm(conv(x, w), scale, bias))
    return conv(a, v) * (jnp.sin(a[..., :8]) if shown else 1)


def biased(x, w1, b1, w2, b2, *, act=jax.nn.relu):
    """Convolutions with biases and without norms."""
    return act(conv(act(conv(x, w1) + b1), w2) + b2)


def before_relu(x, w1, b1, w2, b2):
    """A residual block that begins with a relu."""
    return x + (conv(jax.nn.relu(conv(jax.nn.relu(x), w1) + b1), w2) + b2)


def two_before_relu(x, w, b, w1, b1, w2, b2):
    """Such blocks behind a convolution: what they send back sums up to biases' gradients."""
    x = conv(x, w) + b
    return before_relu(before_relu(x, w1, b1, w2, b2), w2, b1, w1, b2)


def pooled(x, w, b, *, low=0, size=3):
    """A pooling's padding: `low` in front, as much behind as "SAME" has."""
    pads = ((0, 0), (low, 1), (low, 1), (0, 0))
    return lax.reduce_window(conv(x, w) + b, -jnp.inf, lax.max, (1, size, size, 1), (1, 2, 2, 1), pads)


def layers(x, w1, b1, w2, b2, *, act=jax.nn.gelu, out=lambda y: y):
    return out(act(x @ w1 + b1) @ w2 + b2)


def geglu(x, w1, b1, w2, *, gate=jax.nn.gelu):
    """Two layers, the first one gated."""
    a, g = jnp.split(x @ w1 + b1, 2, -1)
    return a * gate(g) @ w2


def swiglu(x, w):
    """The activation is of the first half, there is no bias, and axes stand in front of rows."""
    z = x.reshape(2, -1, x.shape[-1]) @ w
    n = w.shape[-1] // 2
    return jax.nn.silu(z[..., :n]) * z[..., n:]


def of_pixels(x, w, b):
    return jax.nn.glu(conv(x, w) + b)


# ----------------------------------------------------------------------------------------------------------------------
# Our own functions


def public(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return functools.partial(f, **options)


def pair(x, w, scale, bias, mean, var, residual, *, ours):
    """With the running statistics among the results."""
    how = dict(training=True, momentum=0.75, activation="silu", residual=residual)
    if ours:
        return jaxconv.conv_batchnorm(x, w, scale, bias, mean, var, layout="NCHW", stride=2, **how)
    return jaxconv.batchnorm(
        jaxconv.conv2d(x, w, layout="NCHW", stride=2), scale, bias, mean, var, channel_axis=1, **how
    )


def chain(x, scale, bias, mean, var, w, *, ours):
    how = dict(training=True, momentum=0.75, activation="silu")
    if ours:
        return jaxconv.batchnorm_conv(x, scale, bias, mean, var, w, groups=8, padding=((2, 0), (0, 1)), **how)
    a, *new = jaxconv.batchnorm(x, scale, bias, mean, var, **how)
    return jaxconv.conv2d(a, w, groups=8, padding=((2, 0), (0, 1))), *new


def projected(x, scale, bias, mean, var, w, *, ours):
    how = dict(training=True, momentum=0.75, activation="silu")
    if ours:
        return jaxconv.batchnorm_conv(x, scale, bias, mean, var, w, **how)
    a, *new = jaxconv.batchnorm(x, scale, bias, mean, var, **how)
    return jaxconv.conv2d(a, w), *new


def mlp(x, w1, b1, w2, b2, *, ours):
    if ours:
        return jaxconv.mlp(x, w1, b1, w2, b2, activation="silu", out_activation="tanh")
    return layers(x, w1, b1, w2, b2, act=jax.nn.silu, out=jnp.tanh)


# ----------------------------------------------------------------------------------------------------------------------
# The table

ADD, STATISTICS, ALONE = (
    "a dgrad that adds another gradient",
    "a convolution that takes its batch-norm's statistics",
    "a convolution that takes its result's statistics",
)
SUMS, SHORTCUT = "a dgrad that takes a batch-norm's sums", "two batch-norms of a residual block"
CHAIN, PRODUCT = "a convolution that normalises its input", "a product that applies an activation's derivative"
POINT = "a 1x1 that normalises its input"
NORM_BACK = "a dgrad that goes back through a batch-norm"
NORM_ADD, BIAS = "a batch-norm that adds another gradient", "a bias' gradient from a norm's sums"
BETWEEN = "a batch-norm between calls"
PIECES, AGAIN = "a concatenation's statistics", "a concatenation that is made again"
BACK, CHOICE = "a dgrad that applies an activation's derivative", "a relu's derivative behind a dgrad"
BACK_ADD = "a dgrad through an activation that adds another gradient"
WITH_BIAS = "a dgrad that takes a bias' gradient"
POOLED = "a bias' gradient from a pooling's"
ADDED_SUMS = "a convolution that adds its shortcut's sums"
GATED, GATED_BACK = "a dense layer that multiplies its halves", "a product that applies a gate's derivative"


@dataclasses.dataclass(frozen=True)
class Row:
    plain: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]  # the arguments'; the first is of images or rows
    applied: dict[str, int]  # rules, and how often each is applied to the gradient of everything
    has: dict[str, int] = dataclasses.field(default_factory=dict)  # of that gradient's program, without "jaxconv_"
    gone: str = ""  # what that program has no more, words
    wants: str = ""  # what the plan takes, words
    ours: Callable[..., Any] | None = None  # None is what accelerate makes of the plain function
    ruled_out: bool = False  # a neighbour of another row, to which its rule must not be applied


X, V = (4, 8, 4, 8), (8,)
DEEP, FLAT = (1, 1, 8, 16), (1, 1, 16, 8)
BIASED = (X, (3, 3, 8, 8), V, (3, 3, 8, 8), V)
PROJECTED = (X, (3, 3, 8, 16), (1, 1, 16, 16), (1, 1, 8, 16), *[(16,)] * 6)
INVERTED = (X, DEEP, (3, 3, 1, 16), (16,), (16,))
LAYERS = ((12, 8), (8, 16), (16,), (16, 8), (8,))
GLU = ((12, 8), (8, 16), (16,), (8, 8))
BOTH = "conv_batchnorm conv_dgrad_sums"
CHAINED = "batchnorm_conv batchnorm_conv_backward"
POINTWISE = "conv_normalised conv_normalised_statistics conv_normalised_wgrad"
NARROWED = (X, (3, 3, 8, 16), (1, 1, 16, 8), (16,), (16,), V, V)

ROWS: dict[str, Row] = {
    "add": Row(lambda x, w: jnp.sin(x) * conv(x, w), (X, (3, 3, 8, 8)), {ADD: 1}, {"conv_dgrad_add": 1}, "conv_dgrad"),
    "add, the cheapest": Row(
        lambda x, w, v: (jnp.sin(conv(x, w)), conv(x, v, 2)),
        (X, (3, 3, 8, 8), DEEP),
        {ADD: 1},
        {"conv_dgrad_add": 1, "conv_dgrad": 1},
    ),
    "added sums": Row(
        lambda x, r, w, v, b: jax.nn.relu(conv(x, w) + b + conv(r, v)),
        (X, X, (3, 3, 8, 16), DEEP, (16,)),
        {ADDED_SUMS: 1},
        {"conv_shortcut": 1},
        "conv_add",
        "conv_shortcut",
    ),
    "added sums with two biases": Row(
        lambda x, r, w, v, b, c: jax.nn.relu((conv(r, v) + c) + (conv(x, w) + b)),
        (X, X, DEEP, DEEP, (16,), (16,)),
        {ADDED_SUMS: 1},
        {"conv_shortcut": 1},
        "conv_add",
        "conv_shortcut",
    ),
    "added sums of more taps": Row(
        lambda x, r, w, v: jax.nn.relu(conv(x, w) + conv(r, v)),
        (X, X, (3, 3, 8, 16), (3, 3, 8, 16)),
        {},
        {"conv_add": 1},
        wants="conv_shortcut",
        ruled_out=True,
    ),
    "added sums behind an activation": Row(
        lambda x, r, w, v: jax.nn.relu(conv(x, w) + jax.nn.relu(conv(r, v))),
        (X, X, (3, 3, 8, 16), DEEP),
        {},
        {"conv_add": 1},
        wants="conv_shortcut",
        ruled_out=True,
    ),
    "added sums that are read": Row(
        lambda x, r, w, v: (jax.nn.relu(conv(x, w) + (z := conv(r, v))), jnp.sin(z)),
        (X, X, (3, 3, 8, 16), DEEP),
        {},
        {"conv_add": 1},
        wants="conv_shortcut",
        ruled_out=True,
    ),
    "add, depthwise": Row(
        lambda x, w: jnp.cos(x + jax.nn.relu(conv(x, w))), (X, (5, 5, 1, 8)), {ADD: 1}, {"conv_dgrad_add": 1}
    ),
    "add, groups": Row(lambda x, w: jnp.sin(x) * conv(x, w), (X, (3, 3, 4, 8)), {}, {"conv_dgrad": 1}, ruled_out=True),
    "statistics": Row(
        lambda x, w, *v: jax.nn.relu(norm(conv(x, w), *v)),
        (X, (3, 3, 8, 8), V, V),
        {STATISTICS: 1},
        {"conv_statistics": 1, "batchnorm_backward": 1},
        "conv_fprop batchnorm_train",
        "conv_batchnorm",
    ),
    "statistics, read": Row(  # the convolution's result too
        lambda x, w, *v: (norm(z := conv(x, w), *v), jnp.sin(z)),
        (X, (3, 3, 8, 8), V, V),
        {STATISTICS: 1},
        {"conv_statistics": 1},
        "conv_fprop",
        "conv_batchnorm",
    ),
    "statistics, public": Row(
        functools.partial(pair, ours=False),
        ((4, 4, 6, 4), (8, 4, 3, 3), V, V, V, V, (4, 8, 3, 2)),
        {STATISTICS: 1},
        {"conv_statistics": 1},
        "conv_fprop batchnorm_train",
        "conv_batchnorm",
        functools.partial(pair, ours=True),
    ),
    "statistics, bias": Row(  # in front of which somebody else reads the result: else the norm has the bias
        lambda x, w, b, *v: (norm(z := conv(x, w) + b, *v), jnp.sin(z)),
        (X, (3, 3, 8, 8), V, V, V),
        {STATISTICS: 1, BIAS: 1},
        {"conv_add_statistics": 1, "batchnorm_backward": 1},
        "conv batchnorm_train",
        "conv_batchnorm",
    ),
    "statistics, residual": Row(
        lambda x, r, w, *v: (norm(z := r + conv(x, w), *v), jnp.sin(z)),
        (X, X, (3, 3, 8, 8), V, V),
        {STATISTICS: 1},
        {"conv_add_statistics": 1},
        "conv_add conv_fprop batchnorm_train",
        "conv_batchnorm",
    ),
    "statistics, blocks": Row(  # before activations: of a block's sum, and of what is between its convolutions
        tower,
        (X, *[(3, 3, 8, 8), V] * 4, V, V),
        {STATISTICS: 4, BIAS: 2},
        {"conv_add_statistics": 2, "conv_statistics": 2},
        "conv conv_add conv_fprop",
        "conv_batchnorm",
    ),
    "statistics, shortcut": Row(  # alone: a batch-norm's two walks are with another's
        lambda x, r, w, b, v, s1, b1, s2, b2: (
            jax.nn.silu(norm(z := r + (conv(x, w) + b), s1, b1) + norm(conv(x, v), s2, b2)) + z
        ),
        (X, X, (3, 3, 8, 8), V, (1, 1, 8, 8), V, V, V, V),
        {SHORTCUT: 1, ALONE: 2, ADD: 1},
        {"conv_add_statistics": 1, "conv_statistics": 1},
        wants="batchnorm_shortcut conv_batchnorm",
    ),
    "statistics, activation": Row(
        lambda x, w, b, *v: norm(jax.nn.relu(conv(x, w) + b), *v),
        (X, (3, 3, 8, 8), V, V, V),
        {},
        {"conv": 1, "batchnorm_train": 1},
        "conv_add_statistics",
        "conv_batchnorm",
        ruled_out=True,
    ),
    "sums": Row(
        two_blocks,
        (X, DEEP, FLAT, DEEP, FLAT, V, V, (16,), (16,)),
        {SUMS: 1, STATISTICS: 3, ALONE: 1, ADD: 1},
        {"conv_dgrad_sums": 1, "batchnorm_signs": 1, "batchnorm_dx": 1, "conv_statistics": 4, "conv_dgrad_add": 1},
        "conv_fprop batchnorm_train",
        BOTH,
    ),
    "sums, blocks of one convolution": Row(
        of_one_convolution,
        (X, X, *[(1, 1, 8, 8)] * 3, V, V),
        {SUMS: 2, STATISTICS: 1, ALONE: 2},
        {"conv_dgrad_sums": 2, "batchnorm_dx": 2, "conv_statistics": 3, "conv_dgrad": 1},
        "conv_fprop batchnorm_train conv_dgrad_add add_any",
        BOTH,
    ),
    "shortcut": Row(
        projection,
        PROJECTED,
        {SHORTCUT: 1, ADD: 1},
        {"batchnorm_shortcut_backward": 1, "batchnorm_backward": 1, "batchnorm_train": 1, "conv_dgrad_add": 1},
        wants="batchnorm_shortcut",
    ),
    "shortcut, statistics": Row(
        functools.partial(projection, act=jax.nn.silu),
        PROJECTED,
        {SHORTCUT: 1, STATISTICS: 1, ALONE: 2, ADD: 1},
        {"batchnorm_shortcut_backward": 1, "conv_statistics": 3},
        "conv_fprop batchnorm_train batchnorm_moments",
        "batchnorm_shortcut conv_batchnorm",
    ),
    "shortcut, read": Row(
        functools.partial(projection, shown=True),
        PROJECTED,
        {ADD: 1},
        {"batchnorm_train": 3},
        "batchnorm_shortcut_backward",
        "batchnorm_shortcut",
        ruled_out=True,
    ),
    "chain": Row(
        inverted,
        INVERTED,
        {CHAIN: 1},
        {"conv_normalised": 1, "conv_normalised_gradient": 1, "conv_normalised_dx": 1},
        "batchnorm_train batchnorm_backward",
        CHAINED,
    ),
    "chain, by parts": Row(
        functools.partial(inverted, act=jax.nn.silu, stride=2),
        INVERTED,
        {CHAIN: 1, ALONE: 1},
        {"conv_normalised": 1, "conv_normalised_wgrad": 1, "batchnorm_backward": 1, "conv_statistics": 1},
        "batchnorm_train batchnorm_moments",
        "batchnorm_conv conv_batchnorm",
    ),
    "chain, read": Row(
        functools.partial(inverted, shown=True),
        INVERTED,
        {ADD: 1},
        {"batchnorm_train": 1},
        "conv_normalised",
        CHAINED,
        ruled_out=True,
    ),
    "pointwise": Row(  # the statistics of what is normalised, and those of the result, leave the convolutions
        bottleneck,
        NARROWED,
        {STATISTICS: 2, POINT: 1, ADD: 1},
        {"conv_statistics": 1, "conv_normalised_statistics": 1, "conv_normalised_wgrad": 1, "batchnorm_infer": 1},
        "conv_fprop batchnorm_train conv_normalised",
        f"conv_batchnorm {POINTWISE}",
    ),
    "pointwise, sums": Row(  # around dgrads that take sums
        three_blocks,
        NARROWED,
        {STATISTICS: 4, ALONE: 2, SUMS: 2, POINT: 3, ADD: 1},
        {"conv_normalised_statistics": 3, "conv_normalised_wgrad": 3, "conv_dgrad_sums": 2, "conv_dgrad": 3},
        "conv_fprop batchnorm_train conv_normalised",
        f"{BOTH} {POINTWISE}",
    ),
    "pointwise, alone": Row(  # the batch-norm reads x for its statistics, and nobody wants those of the result
        inverted,
        (X, (3, 3, 8, 16), (1, 1, 16, 8), (16,), (16,)),
        {POINT: 1},
        {"batchnorm_moments": 1, "conv_normalised": 1, "conv_normalised_wgrad": 1, "batchnorm_backward": 1},
        "batchnorm_train batchnorm_infer",
        f"batchnorm_conv {POINTWISE}",
    ),
    "pointwise, public": Row(
        functools.partial(projected, ours=False),
        (X, V, V, V, V, (1, 1, 8, 16)),
        {POINT: 1},
        {"batchnorm_moments": 1, "conv_normalised": 1, "conv_normalised_wgrad": 1},
        "batchnorm_train batchnorm_infer",
        f"batchnorm_conv {POINTWISE}",
        functools.partial(projected, ours=True),
    ),
    "pointwise, read": Row(
        functools.partial(inverted, shown=True),
        (X, (3, 3, 8, 16), (1, 1, 16, 8), (16,), (16,)),
        {STATISTICS: 1, ADD: 1},
        {"conv_statistics": 1, "batchnorm_infer": 1},
        "conv_normalised",
        f"conv_batchnorm {POINTWISE}",
        ruled_out=True,
    ),
    "pointwise, strided": Row(
        functools.partial(inverted, stride=2),
        (X, (3, 3, 8, 16), (1, 1, 16, 8), (16,), (16,)),
        {STATISTICS: 1},
        {"conv_statistics": 1, "batchnorm_infer": 1},
        "conv_normalised",
        f"conv_batchnorm {POINTWISE}",
        ruled_out=True,
    ),
    "pointwise, without a weight gradient": Row(  # for which a must be written
        inverted,
        (X, (3, 3, 8, 16), (1, 1, 16, 8), (16,), (16,)),
        {STATISTICS: 1},
        {"conv_statistics": 1, "batchnorm_infer": 1, "conv_wgrad": 2},
        "conv_normalised",
        "conv_batchnorm conv_normalised",
        ruled_out=True,
    ),
    "chain, public": Row(
        functools.partial(chain, ours=False),
        (X, V, V, V, V, (3, 3, 1, 8)),
        {CHAIN: 1},
        {"conv_normalised": 1, "conv_normalised_gradient": 1, "conv_normalised_dx": 1},
        "batchnorm_train batchnorm_backward",
        CHAINED,
        functools.partial(chain, ours=True),
    ),
    "norm, add": Row(
        preactivation,
        (X, (3, 3, 8, 8), V, V),
        {NORM_ADD: 1},
        {"batchnorm_backward_add": 1},
        "batchnorm_backward",
        "batchnorm_backward_add",
    ),
    "norm, add, residual": Row(  # there is no kernel that reads a residual and adds
        lambda x, w, *v: jnp.sin(x) * jax.nn.relu(norm(x, *v) + conv(x, w)),
        (X, (3, 3, 8, 8), V, V),
        {ADD: 1},
        {"batchnorm_backward": 1},
        "batchnorm_backward_add",
        "batchnorm_backward_add",
        ruled_out=True,
    ),
    "between": Row(
        lambda x, w1, w2, *v: conv(norm(conv(x, w1), *v), w2, 2),
        (X, (3, 3, 8, 8), DEEP, V, V),
        {BETWEEN: 1},
        {"batchnorm_train": 1, "batchnorm_backward": 1},
        wants="batchnorm_train",
    ),
    "between, read": Row(  # by what XLA could fuse with the normalisation
        lambda x, w1, w2, *v: (conv(z := norm(conv(x, w1), *v), w2), jnp.sin(z)),
        (X, (3, 3, 8, 8), DEEP, V, V),
        {ADD: 1},
        {"batchnorm_train": 1},
        wants="batchnorm_train",
        ruled_out=True,
    ),
    "between, shown": Row(  # to who reads the result
        lambda x, w1, w2, *v: (conv(z := norm(conv(x, w1), *v), w2), z),
        (X, (3, 3, 8, 8), DEEP, V, V),
        {ADD: 1},
        {"batchnorm_train": 1},
        wants="batchnorm_train",
        ruled_out=True,
    ),
    "between, of a sum": Row(
        lambda x, w1, w2, *v: conv(norm(jnp.sin(conv(x, w1)), *v), w2),
        (X, (3, 3, 8, 8), DEEP, V, V),
        {},
        {"batchnorm_train": 1},
        wants="batchnorm_train",
        ruled_out=True,
    ),
    "pieces": Row(  # the last norm has three, of which the norm before it has two
        dense_block,
        (X, (3, 3, 8, 4), (1, 1, 12, 2), V, V, (12,), (12,)),
        {PIECES: 2, AGAIN: 2},
        {"batchnorm_moments": 3, "batchnorm_infer": 2, "batchnorm_train": 1, "batchnorm_backward": 3},
        wants="batchnorm_train batchnorm_backward",
    ),
    "pieces, read": Row(  # by a convolution, too: the concatenation is in memory
        lambda x, r, w, *v: (norm(z := jnp.concatenate([x, jnp.sin(r)], -1), *v), conv(z, w)),
        (X, X, (1, 1, 16, 4), (16,), (16,)),
        {ADD: 1},
        {"batchnorm_train": 1},
        "batchnorm_moments",
        "batchnorm_train batchnorm_backward",
        ruled_out=True,
    ),
    "bias": Row(  # of what a batch-norm reads and somebody else
        lambda x, w, b, *v: jnp.sin(z := conv(x, w) + b) * norm(z, *v),
        (X, (3, 3, 8, 8), V, V, V),
        {BIAS: 1},
        {"batchnorm_backward": 1},
    ),
    "bias, pooling": Row(pooled, (X, (3, 3, 8, 8), V), {POOLED: 1}, {"max_pool_backward": 1}),
    "bias, pooling, padded": Row(  # a window of minus infinities that begins in the padding sends nothing back
        functools.partial(pooled, low=1), (X, (3, 3, 8, 8), V), {}, {"max_pool_backward": 1}, ruled_out=True
    ),
    "product": Row(layers, LAYERS, {PRODUCT: 1}, {"dense_gradient": 1, "matmul": 3}, wants="dense_gradient"),
    "product, of y": Row(
        functools.partial(layers, act=jnp.tanh), LAYERS, {PRODUCT: 1}, {"dense_gradient": 1}, wants="dense_gradient"
    ),
    "product, read": Row(
        lambda x, w1, b1, w2, b2: ((h := jax.nn.relu(x @ w1 + b1)) @ w2 + b2, jnp.sin(h)),
        LAYERS,
        {},
        gone="dense_gradient",
        wants="dense_gradient",
        ruled_out=True,
    ),
    "product, public": Row(
        functools.partial(mlp, ours=False),
        LAYERS,
        {PRODUCT: 1},
        {"dense_gradient": 1, "matmul": 3},
        wants="dense_gradient",
        ours=functools.partial(mlp, ours=True),
    ),
    "gated": Row(
        geglu,
        GLU,
        {GATED: 1},
        {"dense_gated": 1, "gate_gradient": 1, "matmul": 5},
        "dense gate",
        "dense_gated",
    ),
    "gated, back": Row(
        geglu,
        GLU,
        {GATED_BACK: 1},
        {"dense_gated_gradient": 1, "dense": 1, "gate": 2, "matmul": 4},  # a gate is made again
        "gate_gradient",
        "dense_gated_gradient",
    ),
    "gated, both": Row(
        lambda x, w, v: swiglu(x, w).reshape(-1, 8) @ v,
        ((12, 8), (8, 16), (8, 8)),
        {GATED: 1, GATED_BACK: 1},
        {"dense_gated": 1, "dense_gated_gradient": 1, "matmul": 4},
        "gate gate_gradient",
        "dense_gated dense_gated_gradient",
    ),
    "gated, back, read": Row(  # what the gate gives, too: the gradient is a sum
        lambda x, w, b, v: ((y := jax.nn.glu(x @ w + b)) @ v, jnp.sin(y)),
        GLU,
        {},
        {"gate_gradient": 1},
        "dense_gated_gradient",
        "dense_gated_gradient",
        ruled_out=True,
    ),
    "gated, first half": Row(
        swiglu, ((12, 8), (8, 16)), {GATED: 1}, {"dense_gated": 1, "matmul": 2}, "dense gate", "dense_gated"
    ),
    "gated, read": Row(  # what the gate is of is a result
        lambda x, w, b: (jax.nn.glu(z := x @ w + b), jnp.sin(z)),
        ((12, 8), (8, 16), (16,)),
        {GATED: 1},
        {"dense_gated": 1},
        "dense gate",
        "dense_gated",
    ),
    "gated, pixels": Row(
        of_pixels,
        (X, (1, 1, 8, 16), (16,)),
        {GATED: 1},
        {"dense_gated": 1, "conv_dgrad": 1, "conv_wgrad": 1},
        "conv gate",
        "dense_gated",
    ),
    "gated, activation": Row(  # in front of the halves
        lambda x, w, b: jax.nn.glu(jax.nn.relu(x @ w + b)),
        ((12, 8), (8, 16), (16,)),
        {},
        {"dense": 1},
        "dense_gated gate",
        "dense_gated",
        ruled_out=True,
    ),
    "gated, other halves": Row(
        lambda x, w, b: (z := x @ w + b)[:, :6] * jax.nn.silu(z[:, 6:12]),
        ((12, 8), (8, 16), (16,)),
        {},
        {"dense": 1},
        "dense_gated gate",
        "dense_gated",
        ruled_out=True,
    ),
    "gated, window": Row(  # of more pixels than one
        of_pixels, (X, (3, 3, 8, 16), (16,)), {}, {"conv": 1}, "dense_gated", "dense_gated", ruled_out=True
    ),
    "norm, dgrad": Row(
        between,
        (X, (3, 3, 8, 16), (3, 3, 16, 8), (16,), (16,)),
        {NORM_BACK: 1},
        {"conv_norm_gradient": 1, "batchnorm_dx": 1},
        "batchnorm_backward",
        "conv_norm_gradient",
    ),
    "norm, dgrad, last": Row(  # the second norm's result is read by no convolution
        lambda x, w, v, *norms: jnp.cos(norm(between(x, w, v, *norms[:2], act=lambda z: z), *norms[2:])),
        (X, (3, 3, 8, 16), (1, 1, 16, 8), (16,), (16,), V, V),
        {NORM_BACK: 1},
        {"conv_norm_gradient": 1, "batchnorm_dx": 1, "batchnorm_backward": 1},
        wants="conv_norm_gradient",
    ),
    "norm, dgrad, read": Row(  # the norm's result, by others too
        functools.partial(between, shown=True),
        (X, (3, 3, 8, 16), (3, 3, 16, 8), (16,), (16,)),
        {ADD: 1},
        {"conv_dgrad_add": 1, "batchnorm_backward": 1},
        "conv_norm_gradient",
        "conv_norm_gradient",
        ruled_out=True,
    ),
    "norm, dgrad, residual": Row(  # without an activation: what it adds has a gradient, too
        lambda x, w, r, v, s, b: conv(norm(conv(x, w), s, b) + r, v),
        (X, (3, 3, 8, 16), (4, 8, 4, 16), (1, 1, 16, 8), (16,), (16,)),
        {},
        {"batchnorm_backward": 1, "conv_dgrad": 2},
        "conv_norm_gradient",
        "conv_norm_gradient",
        ruled_out=True,
    ),
    "norm, dgrad, pieces": Row(  # a norm of a concatenation, which XLA does not write
        lambda x, r, w, s, b: conv(jax.nn.relu(norm(jnp.concatenate([jnp.sin(x), r], -1), s, b)), w),
        (X, X, (3, 3, 16, 8), (16,), (16,)),
        {},
        {"batchnorm_backward": 1, "conv_dgrad": 1},
        "conv_norm_gradient",
        "conv_norm_gradient",
        ruled_out=True,
    ),
    "back": Row(biased, BIASED, {BACK: 1}, {"conv_gradient": 1, "conv_dgrad": 1}, wants="conv_gradient"),
    "back, of z": Row(
        functools.partial(biased, act=jax.nn.silu), BIASED, {BACK: 1}, {"conv_gradient": 1}, wants="conv_gradient"
    ),
    "back, no bias": Row(  # so there is no sum
        lambda x, w1, w2: conv(jax.nn.relu(conv(x, w1)), w2, 2),
        (X, (3, 3, 8, 8), (3, 3, 8, 16)),
        {BACK: 1},
        {"conv_gradient": 1, "conv_dgrad": 1},
        wants="conv_gradient",
    ),
    "back, read": Row(  # what the derivative is of is a sum of two gradients
        lambda x, w1, b1, w2: (conv(h := jax.nn.relu(conv(x, w1) + b1), w2), jnp.sin(h)),
        (X, (3, 3, 8, 8), V, (3, 3, 8, 8)),
        {ADD: 1},
        {"conv_dgrad_add": 1},
        "conv_gradient",
        "conv_gradient",
        ruled_out=True,
    ),
    "back, add": Row(
        before_relu,
        BIASED,
        {CHOICE: 1, BACK: 2, BACK_ADD: 1},
        {"conv_gradient": 1, "conv_gradient_add": 1},
        "conv_dgrad",
        "conv_gradient conv_gradient_add",
    ),
    "back, add, sums": Row(
        two_before_relu,
        (X, *[(3, 3, 8, 8), V] * 3),
        {BACK: 4, BACK_ADD: 2},
        {"conv_gradient": 2, "conv_gradient_add": 2, "conv_dgrad": 1},
        "activation_gradient",
        "conv_gradient conv_gradient_add",
    ),
    "back, added elsewhere": Row(  # its own gradient has a reader besides the sum
        lambda x, w1, b1, w2, v: (
            conv(h := jax.nn.relu(z := conv(x, w1) + b1), w2) + conv(z, v),
            jnp.sin(h),
        ),
        (X, (3, 3, 8, 8), V, (3, 3, 8, 8), (3, 3, 8, 8)),
        {ADD: 2},
        {"conv_dgrad_add": 2},
        "conv_gradient conv_gradient_add",
        "conv_gradient conv_gradient_add",
        ruled_out=True,
    ),
    "back, sum": Row(  # of what no activation is behind
        lambda x, w1, b1, w2: conv(conv(x, w1) + b1, w2),
        (X, (3, 3, 8, 8), V, (3, 3, 8, 8)),
        {WITH_BIAS: 1},
        {"conv_gradient": 1, "conv_dgrad": 1},
        wants="conv_gradient",
    ),
    "back, no sum": Row(
        lambda x, w1, w2: conv(conv(x, w1), w2),
        (X, (3, 3, 8, 8), (3, 3, 8, 8)),
        {},
        {"conv_dgrad": 2},
        "conv_gradient",
        "conv_gradient",
        ruled_out=True,
    ),
    "back, relu alone": Row(
        lambda x, w: conv(jax.nn.relu(x), w),
        (X, (3, 3, 8, 8)),
        {CHOICE: 1, BACK: 1},
        {"conv_gradient": 1},
        "conv_dgrad",
        "conv_gradient",
    ),
    "back, relu alone, in a pass": Row(  # of XLA's, which would stay
        lambda x, w: conv(jax.nn.relu(jnp.sin(x)), w),
        (X, (3, 3, 8, 8)),
        {},
        {"conv_dgrad": 1},
        "conv_gradient",
        "conv_gradient",
        ruled_out=True,
    ),
}


def arguments(row: Row, dtype: str) -> list[jax.Array]:
    """Filters so small that results are of size one; variances away from zero."""
    found = []
    for i, shape in enumerate(row.shapes):
        size = np.prod(shape[:-1]) if i and len(shape) > 1 else 1
        a = normal(i, shape, dtype) / np.sqrt(size)
        found.append(jnp.asarray(1.5 + np.abs(a) if len(shape) == 1 else a, dtype))
    return found


def ours(row: Row) -> Callable[..., Any]:
    """A new function each time: nothing that was traced with other plans is found again."""
    return jaxconv.accelerate(lambda *a: row.plain(*a)) if row.ours is None else lambda *a: row.ours(*a)


def total(f: Callable[..., Any]) -> Callable[..., Any]:
    """A sum of the results that weighs each element differently."""

    def weighed(y: Any) -> Any:
        return jnp.sum(jnp.sin(y) * jnp.cos(jnp.arange(y.size).reshape(y.shape)))

    return lambda *args: sum(map(weighed, jax.tree.leaves(f(*args))))


def gradients(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: jax.grad(total(f), tuple(range(len(args))))(*args)


@pytest.fixture
def took(monkeypatch):
    """Sets what the plan takes, and returns the names of the rules that are applied from then on."""

    def set_up(row: Row) -> list[str]:
        wanted, applied = row.wants.split(), []

        def rewrite(program: Any, device: Any, **how: Any) -> list[str]:
            names = rules.rewrite(program, device, **how)
            applied.extend(names)
            return names

        monkeypatch.setattr(rules, "wants", lambda op, problem, device: op in wanted)
        for module in (joint, region):
            monkeypatch.setattr(module, "rewrite", rewrite)
        return applied

    return set_up


every_row = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
changed_rows = pytest.mark.parametrize(
    "row", [row for row in ROWS.values() if not row.ruled_out], ids=[n for n, row in ROWS.items() if not row.ruled_out]
)


def close(got: Any, want: Any, tolerance: float) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1.0, float(jnp.abs(b).max())))


# ----------------------------------------------------------------------------------------------------------------------
# What becomes of a program


@every_row
def test_rules_are_applied(row, took):
    applied, f = took(row), ours(row)
    # Who trains asks for no gradient of running statistics.
    trained = f if row.ours is None else lambda *args: jax.tree.leaves(f(*args))[0]
    found = equations(gradients(trained), *arguments(row, "float32"))
    assert collections.Counter(applied) == row.applied
    assert {name: found[f"jaxconv_{name}"] for name in row.has} == row.has
    assert not [name for name in row.gone.split() if found[f"jaxconv_{name}"]]


def test_a_sum_of_a_pooling_s_gradient_in_integers_is_left():
    """Windows overlap: two of 0.3 and more become an integer that none of them is alone."""

    def f(y):
        pooled = lambda y: jnp.sum(0.3 * jaxconv.max_pool(y, 3, stride=2, padding=((0, 1), (0, 1))))  # noqa: E731
        return jnp.sum(jax.grad(pooled)(y).astype("int32"), (0, 1, 2))

    y = jnp.asarray(normal(0, (2, 7, 7, 4)), "float32")
    want = jax.jit(f)(y)
    assert want.any()
    np.testing.assert_array_equal(jax.jit(jaxconv.accelerate(f))(y), want)


@pytest.mark.parametrize("backward", ["conv", "add"])
def test_a_batch_norm_between_calls_is_planned_as_one_with_an_activation(backward, code_for_gpus):
    """If its result and the gradient of it are made and read by calls alone."""

    def f(x, w1, w2, scale, bias):
        y = norm(conv(x, w1), scale, bias)
        return conv(y, w2) if backward == "conv" else jnp.sin(conv(y, w2)) + jnp.cos(y)

    shapes = ((64, 64, 64, 64), (3, 3, 64, 64), (1, 1, 64, 64), (64,), (64,))
    args = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    with _plan.Device.assumed(H100):
        traced = jax.jit(jax.grad(lambda *a: jaxconv.accelerate(f)(*a).sum(), (0, 1, 2))).trace(*args)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    native = backward == "conv"
    assert text.count("@jaxconv_batchnorm_train_v2") == text.count("@jaxconv_batchnorm_backward_v2") == native


def test_each_rule_has_a_row():
    """But for those of whose calls no gradient is taken: tests/test_conv_pooled.py has them."""
    of_no_gradient = {
        "a convolution that takes its pooling's maxima",
        "a pooled convolution that reads float32",
        "a pooled convolution that makes 8 bits",
    }
    named = {name for row in ROWS.values() for name in row.applied}
    assert named | of_no_gradient == {rule.name for rule in rules.RULES} and not named & of_no_gradient


@every_row
def test_what_rules_make_has_a_cost(row, took):
    """That of the plain calls, but for what is counted differently in one kernel."""
    args = arguments(row, "float32")
    took(dataclasses.replace(row, wants=""))
    plain = jaxconv.cost(gradients(ours(row)))(*args)
    took(row)
    found = jaxconv.cost(gradients(ours(row)))(*args)
    assert found["flops"] == pytest.approx(plain["flops"], rel=0.2)


def test_programs_can_be_printed(took):
    """Also with a tangent that nobody has transposed, which holds a graph."""
    row = ROWS["sums"]
    took(row)
    args = arguments(row, "float32")
    text = str(jax.make_jaxpr(lambda *args: jax.jvp(ours(row), args, args))(*args))
    assert "jaxconv_region_tangent" in text and text.count("jaxconv_conv_fprop") >= 4 and len(text) < 100_000


@every_row
def test_values_and_gradients_are_the_plain_programs(row, took):
    took(row)
    args = arguments(row, "float32")
    for of in (lambda f: f, gradients):
        got, want = (jax.jit(of(f))(*args) for f in (ours(row), row.plain))
        close(got, want, 2e-5)


@every_row
def test_where_the_plan_takes_nothing_bits_are_those_without_rules(row, took, monkeypatch):
    took(dataclasses.replace(row, wants=""))
    args = arguments(row, "float32")
    got = jax.jit(gradients(ours(row)))(*args)
    # The rules for biases ask no plan; their sums are the same but for rounding.
    monkeypatch.setattr(rules, "RULES", tuple(rule for rule in rules.RULES if rule.name in (BIAS, POOLED)))
    assert same_bits(got, jax.jit(gradients(ours(row)))(*args))


# ----------------------------------------------------------------------------------------------------------------------
# Transforms


def tangents(args: Any) -> Any:
    return tuple(jnp.cos(a + i) for i, a in enumerate(args))


def stacked(args: Any) -> list[Any]:
    return [jnp.stack([a, 0.5 * a + 0.25]) for a in args]


def of_each(f: Any) -> Any:
    return lambda *args: [jax.grad(total(f), i)(*args) for i in range(len(args))]


def of_each_result(f: Any) -> Any:
    def run(*args: Any) -> Any:
        count = len(jax.tree.leaves(jax.eval_shape(f, *args)))
        return [gradients(lambda *a, i=i: jax.tree.leaves(f(*a))[i])(*args) for i in range(count)]

    return run


def scanned(f: Any) -> Any:
    def run(*args: Any) -> Any:
        body = jax.checkpoint(lambda c, x: (c + total(f)(x, *args[1:]), None))
        return lax.scan(body, jnp.zeros((), args[0].dtype), jnp.stack([args[0], 1 - args[0]]))[0]

    return lambda *args: jax.grad(run, tuple(range(len(args))))(*args)


def over(order: str) -> Any:
    """Derivatives of the gradient in a direction: of all of it, where its own arguments are shared."""

    def of(f: Any) -> Any:
        if order == "forward":
            return lambda *args: jax.jvp(gradients(f), tuple(args), tangents(args))[1]

        def along(*args: Any) -> Any:
            return sum(jnp.vdot(g, t) for g, t in zip(gradients(f)(*args), tangents(args), strict=True))

        return lambda *args: jax.grad(along, tuple(range(len(args))))(*args)

    return of


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "jvp": lambda f: lambda *args: jax.jvp(f, tuple(args), tangents(args)),
    "linearize": lambda f: lambda *args: jax.linearize(f, *args)[1](*tangents(args)),
    "of each": of_each,
    "of each result": of_each_result,
    "map of gradient": lambda f: lambda *args: jax.vmap(gradients(f))(*stacked(args)),
    "map over the first": lambda f: (
        lambda x, *rest: jax.vmap(gradients(f), (0, *[None] * len(rest)))(jnp.stack([x, 1 - x]), *rest)
    ),
    "gradient of map": lambda f: lambda *args: gradients(jax.vmap(f))(*stacked(args)),
    "checkpoint": lambda f: gradients(jax.checkpoint(f)),
    "inner jit": lambda f: gradients(jax.jit(f)),
    "scan": scanned,
    "forward over reverse": over("forward"),
    "reverse over reverse": over("reverse"),
}


@functools.cache
def plain_results(row: str, transform: str) -> Any:
    return jax.jit(TRANSFORMS[transform](ROWS[row].plain))(*arguments(ROWS[row], "float64"))


# A loop and a function within see no rule: the first rows show them.
AROUND = [(name, t) for name in list(ROWS)[4:] for t in ("inner jit", "scan")]


@pytest.mark.parametrize(
    "name, transform",
    [
        pytest.param(name, t, marks=[pytest.mark.slow] if (name, t) in AROUND else [])
        for name in ROWS
        for t in TRANSFORMS
    ],
)
def test_transforms(name, transform, took, x64):
    row = ROWS[name]
    took(row)
    got = jax.jit(TRANSFORMS[transform](ours(row)))(*arguments(row, "float64"))
    # On a GPU JAX packs a value and its tangent into 64 bits where it differentiates a max-pooling twice.
    packed = PLATFORM == "cuda" and "max_pool_backward" in row.has and " over " in transform
    close(got, plain_results(name, transform), 1e-6 if packed else 1e-9)


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoint's policies, scopes, other devices


@changed_rows
def test_policies_keep_what_they_name(row, took):
    """Of convolutions and products none runs again, where the policy says so; where nothing is kept, they do."""
    took(row)
    args = arguments(row, "float32")

    def products(policy: Any) -> dict[str, int]:
        f = total(ours(row)) if policy is None else jax.checkpoint(total(ours(row)), policy=policy)
        found = equations(gradients(f), *args)
        kinds = re.compile(
            r"jaxconv_(conv|conv_(fprop|add|shortcut|statistics|add_statistics|normalised)|dense|dense_gated|matmul)$"
        )
        return {name: n for name, n in found.items() if kinds.match(name)}

    once, policies = products(None), jaxconv.checkpoint_policies
    for policy in (policies.save_all, policies.save_products, policies.save_all_but_batchnorms):
        assert products(policy) == once
    again = products(jax.checkpoint_policies.nothing_saveable)
    assert sum(again.values()) > sum(once.values())


@changed_rows
def test_kernels_have_the_scopes_of_their_layers(row, took, full_locations):
    """Forward and backward."""
    took(row)

    def named(*args: Any) -> Any:
        with jax.named_scope("a_layer"):
            return row.plain(*args)

    jaxpr = jax.make_jaxpr(gradients(jaxconv.accelerate(named)))(*arguments(row, "float32")).jaxpr
    stacks = {
        str(e.source_info.name_stack) for e in primitives.equations(jaxpr) if e.primitive.name.startswith("jaxconv_")
    }
    assert stacks and all("a_layer" in stack for stack in stacks), stacks
    assert any("transpose" in stack for stack in stacks)


@changed_rows
@pytest.mark.parametrize("platform", ("cuda", "tpu"))
def test_lowered_for_a_device_that_is_not_there(row, platform, took):
    """What was chosen for this one is a kernel of the other's plan, or what it means."""
    took(row)
    args = arguments(row, "float32")
    traced = jax.jit(gradients(ours(row))).trace(*args)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert platform == "cuda" or "jaxconv" not in text
    exported = jax.export.export(
        jax.jit(gradients(ours(row))), platforms=("cpu", "tpu"), disabled_checks=jaxconv.export_checks()
    )(*args)
    if jax.default_backend() == "cpu":
        close(exported.call(*args), jax.jit(gradients(row.plain))(*args), 2e-5)


# ----------------------------------------------------------------------------------------------------------------------
# Meshes


def collectives(f: Any, *args: Any) -> set[str]:
    text = jax.jit(f).lower(*args).compile().as_text()
    return set(re.findall(r" (all-gather|all-reduce|collective-permute|all-to-all)(?:-start)?\(", text))


def like(a: Any, images: Any) -> bool:
    """Whether a is of as many images."""
    return a.ndim == images.ndim and a.shape[0] == images.shape[0]


two_devices = pytest.mark.skipif(jax.device_count() < 2, reason="a mesh takes two devices")


@two_devices
@changed_rows
@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit), ids=lambda kind: kind.name)
@pytest.mark.parametrize("over", ("images", "rows"))
def test_split_over_a_mesh(row, kind, over, took, monkeypatch):
    """Values, and no other exchange than without rules."""
    took(row)
    args = arguments(row, "float32")
    images = args[0]
    want = jax.jit(gradients(row.plain))(*args)
    mesh = jax.make_mesh((2,), ("a",), axis_types=(kind,), devices=jax.devices()[:2])
    spec = P("a") if over == "images" or images.ndim == 2 else P(None, "a")
    with jax.set_mesh(mesh):
        placed = [jax.device_put(a, NamedSharding(mesh, spec if like(a, images) else P())) for a in args]
        f = gradients(ours(row))
        got, found = jax.jit(f)(*placed), collectives(f, *placed)
        close(got, want, 5e-5)
        monkeypatch.setattr(rules, "RULES", ())
        assert found <= collectives(gradients(ours(row)), *placed)


@two_devices
@changed_rows
def test_inside_shard_map(row, took):
    """Types are checked; statistics are a shard's own, gradients of what does not vary over the mesh are summed."""
    took(row)
    images, *rest = arguments(row, "float32")
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    specs = (P("a"), *(P("a") if like(a, images) else P() for a in rest))
    split = jax.shard_map(gradients(ours(row)), mesh=mesh, in_specs=specs, out_specs=specs)
    got = jax.jit(split)(images, *rest)
    plain = jax.shard_map(gradients(row.plain), mesh=mesh, in_specs=specs, out_specs=specs)
    close(got, jax.jit(plain)(images, *rest), 5e-5)


def test_explain_says_what_rules_made(monkeypatch):
    monkeypatch.setattr(rules, "wants", lambda op, problem, device: True)
    x, w = jnp.ones((2, 6, 6, 8)), jnp.ones((1, 1, 8, 8))
    block = jaxconv.accelerate(lambda x, w: (jax.nn.relu(conv(x, w)) + x).sum())
    found = jaxconv.explain(jax.grad(block))(x, w)
    (one,) = [one for one in found.fused if one.rule == "a dgrad that adds another gradient"]
    assert one.count == 1 and (one.before[0].op, one.after[0].op) == ("conv_dgrad", "conv_dgrad_add")
    assert "1 x a dgrad that adds another gradient\n  - 1 conv_dgrad 2x6x6" in str(found)
    assert not jaxconv.explain(block)(x, w).fused  # nothing goes back

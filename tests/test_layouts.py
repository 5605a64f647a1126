"""Channels-first arrays before kernels that read channels last: that layout is asked for, not made by transposes."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import H200, PLATFORM, with_hoppers_code

import jaxconv
from jaxconv import _plan
from jaxconv._core import primitives
from jaxconv._core.activations import Activation
from jaxconv._ops import batchnorm
from jaxconv._problem import BatchNormProblem

# algorithm -> groups of 64 channels, dtype, whether its kernel reads channels last
KERNELS = {
    "sm90": (1, "bfloat16", True),
    "implicit_gemm": (1, "float32", True),
    "grouped": (8, "float16", True),
    "depthwise": (64, "float32", True),
    "direct": (1, "bfloat16", False),
    "im2col": (1, "float32", False),
}
over_kernels = pytest.mark.parametrize("algorithm", KERNELS)
LAST = "dense<[1, 3, 2, 0]>"  # minor to major: logical N C H W, channels fastest
FILTER_LAST = "dense<[0, 1, 3, 2]>"  # K C R S, output channels fastest
FIRST = "dense<[3, 2, 1, 0]>"


IMAGES, CHANNELS, PIXELS = 4, 64, (9, 9)


def chain(algorithm: str) -> tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]:
    """Three NCHW convolutions with an activation; the same forward and backward; shapes of its arguments."""
    groups, dtype, _ = KERNELS[algorithm]

    def layers(x: jax.Array, ws: list[jax.Array]) -> jax.Array:
        for w in ws:
            x = jaxconv.conv2d(x, w, layout="NCHW", groups=groups, algorithm=algorithm, activation="tanh")
        return x

    def there_and_back(x: jax.Array, ws: list[jax.Array], dy: jax.Array) -> Any:
        y, back = jax.vjp(layers, x, ws)
        return y, back(dy)

    x = jax.ShapeDtypeStruct((IMAGES, CHANNELS, *PIXELS), dtype)
    ws = [jax.ShapeDtypeStruct((CHANNELS, CHANNELS // groups, 3, 3), dtype)] * 3
    return layers, there_and_back, (x, ws, x)


@with_hoppers_code
@over_kernels
def test_kernels_that_read_channels_last_ask_for_that_layout(algorithm, code_for_gpus):
    _, f, args = chain(algorithm)
    with _plan.Device.assumed(H200):
        text = jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    layouts = r"operand_layouts = \[(.*?)\], result_layouts = \[(.*?)\]}"
    calls = re.findall(rf"stablehlo.custom_call @jaxconv_(\w+)_v2.*{layouts}", text)
    assert sorted(name for name, _, _ in calls) == ["conv"] * 3 + ["conv_dgrad"] * 3 + ["conv_wgrad"] * 3
    activation, filter = (LAST, FILTER_LAST) if KERNELS[algorithm][2] else (FIRST, FIRST)
    expected = {
        "conv": ([activation, filter], activation),
        "conv_dgrad": ([activation, filter], activation),
        "conv_wgrad": ([activation, activation], filter),
    }
    for name, operands, results in calls:
        assert re.findall(r"dense<\[.*?\]>", operands) == expected[name][0]
        assert re.findall(r"dense<\[.*?\]>", results)[0] == expected[name][1]
    assert "stablehlo.transpose" not in text


def transposed(text: str) -> collections.Counter[tuple[int, ...]]:
    """The sorted extents of the 4-D arrays that the optimised HLO copies or transposes on their own."""
    entry = text[text.index("\nENTRY") :]
    lines = re.findall(r"%?(\S+) = \w+\[(\d+,\d+,\d+,\d+)\]\S* (fusion|copy|transpose)\(", entry)
    moved = [shape for name, shape, op in lines if op != "fusion" or "transpose" in name or "copy" in name]
    return collections.Counter(tuple(sorted(map(int, shape.split(",")))) for shape in moved)


@pytest.mark.skipif(PLATFORM != "cuda", reason="the CPU's kernels take arrays in either order as they lie")
@over_kernels
def test_a_chain_is_transposed_at_its_ends_only(algorithm):
    groups, _, last = KERNELS[algorithm]
    if algorithm == "sm90" and _plan.Device.current("cuda").compute_capability != (9, 0):
        pytest.skip("sm90 needs a GPU of compute capability 9.0")
    layers, _, (x, ws, _) = chain(algorithm)
    activation = tuple(sorted((IMAGES, CHANNELS, *PIXELS)))
    filter = tuple(sorted((CHANNELS, CHANNELS // groups, 3, 3)))
    expected = {activation: 2, filter: 3} if last else {}
    assert transposed(jax.jit(layers).lower(x, ws).compile().as_text()) == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_channels_first_batch_norm_is_planned_as_its_channels_last_one(dtype, code_for_gpus):
    relu = Activation("relu")
    problem = BatchNormProblem("batchnorm", dtype, (256, 64, 56, 56), 1, True, 0.9, 1e-5, relu)
    last = dataclasses.replace(problem, shape=(256, 56, 56, 64), channel_axis=3)
    assert problem.channels_last == last
    for op in ("batchnorm_train", "batchnorm_backward", "batchnorm_moments"):
        made, expected = _plan.plan(op, problem, H200), _plan.plan(op, last, H200)
        assert made.implementation == "native" and made.asks_channels_last
        assert made == dataclasses.replace(expected, asks_channels_last=True)
        forced = _plan.plan(op, dataclasses.replace(problem, implementation="native"), H200)
        assert forced.implementation == "native" and not forced.asks_channels_last
    bare = dataclasses.replace(problem, activation=Activation())
    assert _plan.plan("batchnorm_train", bare, H200).implementation == "xla"
    between = dataclasses.replace(problem, shape=(256, 56, 64, 56), channel_axis=2)
    assert "other axes" in _plan.plan("batchnorm_train", between, H200).reason


@with_hoppers_code
@pytest.mark.parametrize("instances", [None, 2])
def test_a_channels_first_batch_norm_calls_a_kernel_for_channels_last(instances, code_for_gpus):
    def there_and_back(x, residual, dy, *v):
        def norm(x, scale, bias, mean, var, residual):
            options = dict(training=True, channel_axis=1, activation="relu", residual=residual)
            return jaxconv.batchnorm(x, scale, bias, mean, var, **options)[0]

        y, back = jax.vjp(norm, x, *v, residual)
        return y, back(dy)

    lead = () if instances is None else (instances,)
    x, v = jax.ShapeDtypeStruct((*lead, 256, 64, 28, 28), "bfloat16"), jax.ShapeDtypeStruct((*lead, 64), "float32")
    f = there_and_back if instances is None else jax.vmap(there_and_back)
    with _plan.Device.assumed(H200):
        text = jax.jit(f).trace(x, x, x, *[v] * 4).lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r"stablehlo.custom_call @jaxconv_batchnorm_(\w+)_v2.* : \((.*?)\) -> (.*)", text)
    assert sorted(name for name, _, _ in calls) == ["backward", "train"]
    moved = "x".join(map(str, (*lead, 256, 28, 28, 64)))
    for _, operands, results in calls:
        large = [of for of in re.findall(r"tensor<(\w+)xbf16>", operands + results)]
        assert len(large) >= 3 and set(large) == {moved}


@pytest.mark.parametrize("instances", [None, 2])
@pytest.mark.parametrize("residual", [False, True])
def test_a_batch_norm_of_moved_channels_is_the_same(residual, instances):
    problem = BatchNormProblem(
        *("batchnorm", "float32", (3, 5, 4, 2), 1, True, 0.9, 1e-5, Activation("silu"), residual),
        batch=instances,
        want_dresidual=residual,
    )
    ops = [batchnorm.train, batchnorm.infer, batchnorm.moments, batchnorm.backward, batchnorm.dx_of_sums]
    for op in [*ops, *([] if residual else [batchnorm.backward_add])]:
        p = dataclasses.replace(problem, count=60) if op is batchnorm.dx_of_sums else problem
        rng = np.random.default_rng(0)
        args = [jnp.asarray(rng.random(shape) + 0.5, dtype) for shape, dtype in op.operands(p).values()]
        moved = batchnorm.FAMILY.moved(op, p, *args)
        for out, expected in zip(moved, primitives.listed(op(p, *args)), strict=True):
            assert out.shape == expected.shape
            np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)

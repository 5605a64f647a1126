"""Channels-first arrays before kernels that read channels last: that layout is asked for, not made by transposes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import pytest

import jaxconv
from jaxconv import _native, _plan

H200 = _plan.Device("cuda", "NVIDIA H200", (9, 0), 132)
# algorithm -> groups of 64 channels, dtype, whether its kernel reads channels last
KERNELS = {
    "wgmma": (1, "bfloat16", True),
    "implicit_gemm": (1, "float32", True),
    "grouped": (8, "float16", True),
    "depthwise": (64, "bfloat16", True),
    "direct": (1, "bfloat16", False),
    "im2col": (1, "float32", False),
}
over_kernels = pytest.mark.parametrize("algorithm", KERNELS)
LAST = "dense<[1, 3, 2, 0]>"  # minor to major: logical N C H W, channels fastest
FILTER_LAST = "dense<[0, 1, 3, 2]>"  # K C R S, output channels fastest
FIRST = "dense<[3, 2, 1, 0]>"


def chain(algorithm: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Three NCHW convolutions with an activation, there and back; shapes of its arguments."""
    groups, dtype, _ = KERNELS[algorithm]

    def layers(x: jax.Array, ws: list[jax.Array]) -> jax.Array:
        for w in ws:
            x = jaxconv.conv2d(x, w, layout="NCHW", groups=groups, algorithm=algorithm, activation="tanh")
        return x

    def there_and_back(x: jax.Array, ws: list[jax.Array], dy: jax.Array) -> Any:
        y, back = jax.vjp(layers, x, ws)
        return y, back(dy)

    x = jax.ShapeDtypeStruct((4, 64, 9, 9), dtype)
    return there_and_back, (x, [jax.ShapeDtypeStruct((64, 64 // groups, 3, 3), dtype)] * 3, x)


@over_kernels
def test_kernels_that_read_channels_last_ask_for_that_layout(algorithm, monkeypatch):
    monkeypatch.setattr(_native, "cuda_missing", "")
    monkeypatch.setattr(_plan.Device, "current", lambda platform: H200)
    f, args = chain(algorithm)
    text = jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    layouts = r"operand_layouts = \[(.*?)\], result_layouts = \[(.*?)\]}"
    calls = re.findall(rf"stablehlo.custom_call @jaxconv_(\w+)_v1.*{layouts}", text)
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

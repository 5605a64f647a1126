"""Weight gradients over 100,352 pixels of positive numbers, against float64; on a CPU over an eighth of them.

Tensor cores cut sums off towards zero. Of numbers of both signs that goes under in the rounding; of positive ones all
cuts go one way, and the longer an accumulator is kept, the more they are. So what is looked at is the mean of the
relative errors, not their size.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ConvCase, edge
from helpers import DEVICE, DTYPES, PLATFORM

from jaxconv import _plan
from jaxconv._ops import conv
from jaxconv._plan import sm90
from jaxconv._problem import CONV_ALGORITHMS

IMAGES = 32 if PLATFORM == "cuda" else 4
CASES = {
    case.name: case
    for case in (
        edge("3x3", IMAGES, (56, 56), 64, 64, (3, 3), "a block of ResNet-50's", padding=1),
        edge("1x1", IMAGES, (56, 56), 64, 256, (1, 1), "another one: a product of 100,352 rows"),
        edge("depthwise", IMAGES, (56, 56), 64, 64, (5, 5), "ConvNeXt's kind", padding=2, groups=64),
        edge("grouped", IMAGES, (56, 56), 64, 64, (3, 3), "ResNeXt's kind", padding=1, groups=8),
        edge("narrow", IMAGES, (56, 56), 16, 32, (3, 3), "few channels on both sides", padding=1),
        edge("stem", IMAGES, (56, 56), 3, 64, (3, 3), "few channels on one side", padding=1),
    )
}


@functools.cache
def operands(name: str, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of `dtype` in [0, 1)."""
    case, draw = CASES[name], np.random.default_rng(0)
    shapes = case.x_shape(), (*case.x_shape()[:-1], case.out_channels)
    x, dy = (draw.random(shape, "float32").astype(jnp.dtype(dtype)) for shape in shapes)
    return x, dy


@functools.cache
def exact(name: str, dtype: str) -> np.ndarray:
    case = CASES[name]
    x, dy = (a.astype("float64") for a in operands(name, dtype))
    (low, high), *_ = case.padding
    x = np.pad(x, ((0, 0), (low, high), (low, high), (0, 0)))
    h, w = case.spatial
    c, k = case.in_channels // case.groups, case.out_channels // case.groups
    rows = dy.reshape(-1, case.groups, k).transpose(1, 2, 0)  # (G, K/G, pixels)
    dw = np.empty(case.w_shape())
    for r, s in np.ndindex(*case.filter):
        part = x[:, r : r + h, s : s + w].reshape(-1, case.groups, c).transpose(1, 0, 2)
        dw[r, s] = (rows @ part).transpose(2, 0, 1).reshape(c, case.out_channels)
    return dw


def algorithms(case: ConvCase, dtype: str, precision: str) -> list[str]:
    """Each kernel and tile that runs it here, with as many parts as the plan gives it."""
    wgrads = {f"sm90/{kernel} {tile}".strip() for kernel, tile in (*sm90.WGRADS, *sm90.HALOS)}
    p = case.problem(dtype, precision=precision)
    return [
        a for a in (*CONV_ALGORITHMS, *sorted(wgrads)) if _plan.supports("conv_wgrad", a, p, DEVICE) is None
    ]  # fmt: skip


def bias(case: ConvCase, dtype: str, precision: str, **choice: str) -> float:
    """The mean relative error; the signed one, so that rounding to nearest is about nothing."""
    x, dy = operands(case.name, dtype)
    p = case.problem(dtype, precision=precision, **choice)
    dw = np.asarray(jax.jit(functools.partial(conv.wgrad, p))(jnp.asarray(x), jnp.asarray(dy)), "float64")
    want = exact(case.name, dtype)
    return float(np.mean((dw - want) / want))


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [(dtype, "default") for dtype in DTYPES if dtype != "float64"] + [("float32", "highest")] * (PLATFORM == "cuda"),
)
@pytest.mark.parametrize("name", CASES)
def test_no_kernels_sums_are_cut_off_more_than_xlas(name, dtype, precision):
    case = CASES[name]
    # A sixteenth of what rounding an operand or a result may take: half a unit in the last of 8 or 11 bits.
    tf32 = PLATFORM == "cuda" and precision == "default"
    ulp = {"bfloat16": 2.0**-8, "float16": 2.0**-11}.get(dtype, 2.0**-11 if tf32 else 2.0**-17)
    allowed = 2 * abs(bias(case, dtype, precision, implementation="xla")) + ulp / 16
    found: dict[str, Any] = {a: bias(case, dtype, precision, algorithm=a) for a in algorithms(case, dtype, precision)}
    print(f"{name} {dtype} {precision}: allowed {allowed:.1e};", *(f"{a} {b:+.1e}" for a, b in found.items()))
    assert found
    assert not {a: b for a, b in found.items() if abs(b) > allowed}, allowed


def test_a_cut_is_seen():
    """Adding up in float32 with each sum cut off, as a tensor core does, sixteen products at a time, of 100,352."""
    draw = np.random.default_rng(0)
    products = (draw.random((100352, 4)) * draw.random((100352, 4))).astype("float32").astype("float64")
    total = np.zeros(4, "float32")
    for some in products.reshape(-1, 16, 4).sum(1):
        exactly = total.astype("float64") + some
        total = exactly.astype("float32")
        total = np.where(total > exactly, np.nextafter(total, np.float32(0)), total)
    cut = np.mean((total - products.sum(0)) / products.sum(0))
    assert -1e-3 < cut < -(2.0**-13)  # an accumulator that is never flushed errs by a quarter of TF32's half unit

"""An infinity in x: which outputs see it, by every kernel.

Of most kernels those whose window holds it, as in lax. Banded and block matrices on tensor cores multiply inputs by
zeros that stand for other columns or groups, and there it makes NaN: no further than the documentation says, and only
where the plan knows it, which keeps such kernels from float16's forward passes.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CONV_CASES, NARROW_CASES, SM90_CASES, STEM_CASES, ConvCase
from helpers import DEVICE, normal

from jaxconv import _plan
from jaxconv._ops import conv
from jaxconv._plan import depthwise
from jaxconv._plan.planner import PLANNERS
from jaxconv._problem import CONV_ALGORITHMS

ALL = (
    (*CONV_CASES, *STEM_CASES, *SM90_CASES, *NARROW_CASES) if DEVICE.platform == "cuda" else CONV_CASES[1::4]
)  # a CPU has few kernels
CASES = {case.name: case for case in ALL if case.batch and case.name != "one"}
KERNELS = (
    *CONV_ALGORITHMS,
    *(f"depthwise/{kernel}" for kernel in depthwise.KERNELS),
    *("grouped/rows", "grouped/rows_float32", "grouped/mma", "stem/mma", "stem/sm90_narrow_in", "stem/sm90_narrow_out"),
    *("stem/planes", "narrow/rows", "narrow/planes"),
    *("sm90/product", "sm90/halo", "sm90/halo_stream", "sm90/halo_3d", "sm90/resident", "sm90/product_swapped"),
)
FAR, FURTHER = 15, 47  # columns, of depthwise filters that reach 9 of them, and more
A_CHUNK = 3  # columns, of stem: a window's row is read in whole 16 bytes


def reads(case: ConvCase, x: np.ndarray) -> np.ndarray:
    """Which outputs' windows hold a pixel and channel that x has."""
    p = case.problem("float32", implementation="xla")
    with jax.default_device(jax.devices("cpu")[0]):  # which chooses no algorithms
        seen = jax.jit(functools.partial(conv.fprop, p))(jnp.asarray(x, "float32"), jnp.ones(case.w_shape()))
    return np.asarray(seen) > 0


@functools.cache
def allowed(case: ConvCase, at: tuple[int, ...], columns: int, octets: bool) -> np.ndarray:
    """Which outputs may see an infinity at `at`: so many columns further, or in all groups that share 8 channels."""
    x = np.zeros(case.x_shape())
    x[at] = 1
    if octets:
        each, first = case.in_channels // case.groups, at[-1] // 8 * 8
        x[(*at[:-1], slice(first // each * each, -(-(first + 8) // each) * each))] = 1
    found = reads(case, x)
    q = np.arange(found.shape[-2])
    return np.einsum("...qk,qp->...pk", found, np.abs(q[:, None] - q) <= columns) > 0


def spread(case: ConvCase, kernel: str, dtype: str) -> tuple[int, bool]:
    """What the documentation says of the kernel that runs: `allowed`'s columns and octets."""
    p = case.problem(dtype, algorithm=kernel)
    name = _plan.plan("conv_fprop", p, DEVICE).kernel
    if DEVICE.platform != "cuda":
        return 0, False
    if name.startswith("stem"):
        return A_CHUNK, False
    if not PLANNERS["conv_fprop"].spreads(name, p):
        return 0, False
    span = (case.filter[-1] - 1) * case.dilation[-1] + 1
    return (0, True) if name.startswith("grouped") else (FAR if span <= 9 else FURTHER, False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_outputs_that_see_it(name, dtype):
    case = CASES[name]
    x, w = normal(0, case.x_shape(), dtype), normal(1, case.w_shape(), dtype)
    at = (case.batch - 1, *(extent // 2 for extent in case.spatial), case.in_channels // 2)
    x[at] = np.inf
    w = np.where(w == 0, 1, w)  # not the kernel's own zeros
    x, w = jnp.asarray(x, dtype), jnp.asarray(w, dtype)
    tried = []
    for kernel in KERNELS:
        p = case.problem(dtype, algorithm=kernel)
        if _plan.supports("conv_fprop", kernel, p, DEVICE) is not None:
            continue
        tried.append(kernel)
        y = np.asarray(jax.jit(functools.partial(conv.fprop, p))(x, w), "float32")
        wrong = ~np.isfinite(y) & ~allowed(case, at, *spread(case, kernel, dtype))
        assert not wrong.any(), f"{kernel}: {np.argwhere(wrong)[:3]} see {at}"
        missed = np.isfinite(y) & allowed(case, at, 0, False)
        assert not missed.any(), f"{kernel}: {np.argwhere(missed)[:3]} do not see {at}"
    assert tried

"""depthwise/few: exactly numpy's numbers on a GPU, in every length of run; where plans take it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import A100, DEVICE, H200, PLATFORM, integers

from jaxconv import _plan
from jaxconv._ops.conv import conv_kernel, dgrad, fprop
from jaxconv._plan import Device, measured
from jaxconv._problem import ConvProblem

SAME = "SAME"

# batch, pixels, channels, filter, stride, padding: rows that a run of 2 or 4 does not divide, vectors of channels that
# a block does not, one-sided pads, pads beyond the filter, pixels that are cut off, few threads (runs of 1) and many.
SHAPES = (
    (1, (7, 7), 1152, 5, 1, SAME),
    (2, (9, 7), 960, 3, 1, SAME),
    (1, (14, 14), 68, 5, 2, SAME),
    (1, (1, 1), 4, 3, 1, SAME),
    (3, (5, 1), 12, 3, 2, ((0, 2), (2, 0))),
    (1, (6, 11), 40, 3, 1, ((4, 3), (5, 4))),
    (1, (13, 12), 24, 5, 1, ((-2, 1), (3, -1))),
    (1, (12, 9), 24, 7, 1, SAME),
    (2, (28, 27), 240, 5, 1, SAME),
    (1, (57, 55), 144, 5, 2, ((1, 2), (1, 2))),
    (1, (56, 54), 144, 3, 1, SAME),
    (2, (57, 59), 96, 3, 2, SAME),
    (1, (112, 113), 96, 3, 2, ((0, 1), (0, 1))),
    (1, (56, 57), 96, 7, 1, SAME),
)


def problem(shape: Any, dtype: str = "bfloat16", algorithm: str | None = "depthwise/few", **epilogue: Any) -> Any:
    batch, pixels, c, filter, stride, padding = shape
    x, w, b = ((batch, *pixels, c), (filter, filter, 1, c), (c,))
    operands = [jax.ShapeDtypeStruct(s, dtype) for s in (x, w, b)]
    options = dict(layout="NHWC", precision="highest", implementation=None, return_preactivation=False, activation=None)
    options |= dict(stride=stride, padding=padding, dilation=1, groups=c, algorithm=algorithm) | epilogue
    return ConvProblem.infer("conv2d", 2, *operands, **options)


def taps(p: ConvProblem) -> Any:
    """(r, s, of y, of x): the pixels of y that tap (r, s) reaches, and those of x that it reads."""
    for r, s in itertools.product(*map(range, p.filter)):
        of_y, of_x = [], []
        for t, axis in ((r, 0), (s, 1)):
            at = np.arange(p.out_spatial[axis]) * p.stride[axis] - p.padding[axis][0] + t
            inside = (at >= 0) & (at < p.in_spatial[axis])
            of_y.append(np.flatnonzero(inside))
            of_x.append(at[inside])
        yield r, s, np.ix_(*of_y), np.ix_(*of_x)


def expected_y(p: ConvProblem, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    y = np.zeros(p.y_shape)
    for r, s, (i, j), (h, v) in taps(p):
        y[:, i, j] += x[:, h, v] * w[r, s, 0]
    return y


def expected_dx(p: ConvProblem, dy: np.ndarray, w: np.ndarray) -> np.ndarray:
    dx = np.zeros(p.x_shape)
    for r, s, (i, j), (h, v) in taps(p):
        dx[:, h, v] += dy[:, i, j] * w[r, s, 0]
    return dx


def run(kernel: Any, p: ConvProblem, dtype: str, *operands: np.ndarray) -> list[np.ndarray]:
    assert _plan.plan(kernel.name, p, DEVICE).kernel == "depthwise/few"
    found = jax.jit(functools.partial(kernel, p))(*(jnp.asarray(v, dtype) for v in operands))
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(found)]


def rounded(v: np.ndarray, dtype: str) -> np.ndarray:
    return np.asarray(jnp.asarray(v, "float32").astype(dtype), np.float64)


on_a_gpu = pytest.mark.skipif(PLATFORM != "cuda", reason="a kernel of GPUs")
over_dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
over_shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


@on_a_gpu
@over_dtypes
@over_shapes
def test_integers_are_exact(shape, dtype):
    p = problem(shape, dtype).bare()
    x, w = integers(0, p.x_shape), integers(1, p.w_shape)
    (y,) = run(fprop, p, dtype, x, w)
    np.testing.assert_array_equal(y, rounded(expected_y(p, x, w), dtype))
    if p.stride[0] == 1:
        dy = integers(2, p.y_shape)
        (dx,) = run(dgrad, p, dtype, dy, w)
        np.testing.assert_array_equal(dx, rounded(expected_dx(p, dy, w), dtype))


@on_a_gpu
@over_dtypes
@pytest.mark.parametrize("activation", ["relu", "relu6", "silu", "gelu"])
def test_bias_and_activation(activation, dtype):
    for shape in SHAPES[2::4]:
        p = problem(shape, dtype, activation=activation, return_preactivation=True)
        x, w, b = integers(0, p.x_shape), integers(1, p.w_shape), integers(2, (p.out_channels,))
        y, z = run(conv_kernel, p, dtype, x, w, b)
        want = expected_y(p, x, w) + b
        np.testing.assert_array_equal(z, rounded(want, dtype))
        of_z = np.asarray(getattr(jax.nn, activation)(jnp.asarray(want, "float32")).astype(dtype), np.float64)
        if activation.startswith("relu"):
            np.testing.assert_array_equal(y, of_z)
        else:
            # One step of 16 bits, and what is left of float32 where gelu's 1 + tanh cancels.
            step = {"float32": 2.0**-20, "bfloat16": 2.0**-7, "float16": 2.0**-10}[dtype]
            np.testing.assert_allclose(y, of_z, rtol=step, atol=2e-6)


# ----------------------------------------------------------------------------------------------------------------------
# Plans


@pytest.fixture
def cuda(code_for_gpus, monkeypatch):
    monkeypatch.setattr(measured, "_learned", dict(measured._learned))


def kernels(op: str, p: ConvProblem, device: Device) -> set[str]:
    return {plan.kernel for plan in _plan.every(op, p, device)}


@pytest.mark.parametrize("device", [H200, A100], ids=["h200", "a100"])
def test_it_is_a_candidate_for_few_images_only(cuda, device):
    for op, shape, is_one in (
        ("conv_fprop", (1, (14, 14), 480, 5, 1, SAME), True),
        ("conv_fprop", (8, (112, 112), 96, 3, 2, SAME), True),
        ("conv_dgrad", (8, (56, 56), 144, 3, 1, SAME), True),
        ("conv_dgrad", (8, (112, 112), 96, 3, 2, SAME), False),
        ("conv_wgrad", (1, (14, 14), 480, 5, 1, SAME), False),
        ("conv_fprop", (64, (56, 56), 144, 3, 1, SAME), False),
    ):
        p = problem(shape, algorithm=None).bare()
        assert ("depthwise/few" in kernels(op, p, device)) is is_one, (op, shape)


def test_nobody_takes_it_who_has_not_measured_it(cuda):
    p = dataclasses.replace(problem(SHAPES[0]).bare(), algorithm="depthwise")
    for device in (H200, A100):
        assert _plan.plan("conv_fprop", p, device).kernel != "depthwise/few"


def test_what_was_measured_of_one_image_speaks_for_as_many_as_it_runs(cuda):
    """A ratio measured for one image would otherwise reach for 80 times the work."""
    kind = "a GPU of its own"
    one = problem((1, (56, 56), 144, 3, 1, SAME), algorithm=None).bare()
    op, of_kind, at = measured.features("conv_fprop", one)
    times = {"xla_ms": 0.06, "native_ms": {"depthwise/few": 0.02, "depthwise/rows": 0.04}}
    measured.learn(kind, [{"op": op, "kind": of_kind, "coordinates": at, "case": "one", **times}])
    device = Device("cuda", kind, (9, 0), 132)
    chosen = [
        _plan.plan("conv_fprop", dataclasses.replace(one, batch=batch), device).kernel for batch in (1, 4, 8, 16, 64)
    ]
    assert chosen == ["depthwise/few"] * 3 + ["depthwise/rows"] * 2

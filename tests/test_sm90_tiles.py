"""The sm_90a kernels, forced, on each of their tiles: they take channels-last problems only, which the tests of
every algorithm leave out, and the plan would choose one tile a problem.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference as ref
import pytest
from cases import SM90_CASES, ConvCase
from helpers import DEVICE, NAMED_ACTIVATIONS, calls, integers, label, normal, same_bits
from jax import lax
from tolerance import assert_close, assert_exact

import jaxconv
from jaxconv import _plan
from jaxconv._core import native
from jaxconv._ops import conv
from jaxconv._ops.dense import matmul
from jaxconv._plan import sm90
from jaxconv._problem import ConvProblem, DenseProblem

if DEVICE.compute_capability != (9, 0) or native.missing(DEVICE.platform) is not None:
    pytest.skip("needs a GPU of compute capability 9.0 and its kernels", allow_module_level=True)

FORCED = [
    f"sm90/{kernel} {tile}".strip() for kernel, tile in (*sm90.PRODUCTS, *sm90.FEW_ROWS, *sm90.HALOS, *sm90.WGRADS)
]
FORCED_DENSE = [*(f"sm90/{kernel} {tile}" for kernel, tile in (*sm90.PRODUCTS, *sm90.FEW_ROWS)), "sm90/rows 64x128"]
CLUSTERS = [f"sm90/{kernel} {tile}" for kernel, tile in sm90.FEW_ROWS]
OPERANDS = {"conv_fprop": ("x", "w"), "conv_dgrad": ("dy", "w"), "conv_wgrad": ("x", "dy")}
BY_NAME = {case.name: case for case in SM90_CASES}
over_cases = pytest.mark.parametrize("case", SM90_CASES, ids=lambda case: case.name)
over_dtypes = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])


@functools.cache
def data(case: ConvCase, values: int | str) -> dict[str, np.ndarray]:
    """x, w, dy, b: -1, 0 and 1, or normal numbers of the dtype `values`."""
    shapes = {
        "x": case.x_shape(),
        "w": case.w_shape(),
        "dy": (case.batch, *ref.out_extents(case), case.out_channels),
        "b": (case.out_channels,),
    }
    make = integers if isinstance(values, int) else normal
    return {name: make(seed, shape, values) for seed, (name, shape) in enumerate(shapes.items())}


@functools.cache
def expected(op: str, case: ConvCase) -> np.ndarray:
    return getattr(ref, op.removeprefix("conv_"))(case, *(data(case, 1)[name] for name in OPERANDS[op]))


def trio(case: ConvCase, **options: Any) -> Any:
    def run(x: Any, w: Any, dy: Any) -> dict[str, Any]:
        f = functools.partial(case.function, algorithm="sm90", **case.options, **options)
        y, back = jax.vjp(f, x, w)
        dx, dw = back(dy)
        return {"conv_fprop": y, "conv_dgrad": dx, "conv_wgrad": dw}

    return jax.jit(run)


def arrays(case: ConvCase, values: int | str, names: str, dtype: str) -> list[jax.Array]:
    return [jnp.asarray(data(case, values)[n], dtype) for n in names.split()]


@over_dtypes
@over_cases
def test_the_planned_tiles_are_exact(case, dtype):
    f, args = trio(case), arrays(case, 1, "x w dy", dtype)
    assert calls(f, *args) == {"conv_fprop": 1, "conv_dgrad": 1, "conv_wgrad": 1}
    for op, result in f(*args).items():
        assert_exact(result, expected(op, case), f"{op} of {case.name} ({case.why})")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kernel", FORCED)
@over_cases
def test_every_tile_is_exact(case, kernel, dtype):
    """Of fprop, dgrad and wgrad those that have it, in TF32 too: a tile runs what it claims to."""
    p = case.problem(dtype, algorithm=kernel, precision="default")
    has = [op for op in OPERANDS if _plan.supports(op, kernel, p, DEVICE) is None]
    if not has:
        pytest.skip("outside its domain")
    for op in has:
        f = jax.jit(functools.partial(getattr(conv, op.removeprefix("conv_")), p))
        args = arrays(case, 1, " ".join(OPERANDS[op]), dtype)
        assert calls(f, *args) == {op: 1}
        assert_exact(f(*args), expected(op, case), f"{op} of {case.name}, {kernel}")


@over_dtypes
@pytest.mark.parametrize("op", OPERANDS)
@pytest.mark.parametrize("width", [106, 107, 129, 198, 199, 200, 256, 300, 420])
def test_wide_planes_are_exact(width, op, dtype):
    """In one strip to five: fprop (40 channels) is cut from 107 columns on, wgrad from 199, dgrad (24) from 383."""
    case = dataclasses.replace(BY_NAME["planes"], name=f"planes_{width}", batch=1, spatial=(2, 3, width))
    p = case.problem(dtype, algorithm="sm90/halo_3d")
    assert _plan.plan(op, p, DEVICE).kernel == "sm90/halo_3d"
    f = jax.jit(functools.partial(getattr(conv, op.removeprefix("conv_")), p))
    args = arrays(case, 1, " ".join(OPERANDS[op]), dtype)
    assert calls(f, *args) == {op: 1}
    assert_exact(f(*args), expected(op, case), case.name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_groups_that_take_turns_keep_together_over_many_short_tiles(dtype):
    """Dozens of tiles for each CTA, three of four of which no tap reaches: a warp that lags must not miss its turn."""
    x, dy = np.zeros((256, 64, 64, 8)), integers(0, (256, 32, 32, 8), 1)
    w = integers(1, (1, 1, 8, 8), 1)
    wide = jax.ShapeDtypeStruct(x.shape, dtype), jax.ShapeDtypeStruct(w.shape, dtype)
    options = dict(stride=2, padding="SAME", dilation=1, groups=1, layout="NHWC", precision=None, activation=None)
    options |= dict(return_preactivation=False, implementation=None, algorithm="sm90/product 128x128")
    p = ConvProblem.infer("conv2d", 2, *wide, None, **options)
    y = jax.jit(functools.partial(conv.fprop, p))(
        jnp.asarray(dy.repeat(2, 1).repeat(2, 2), dtype), jnp.asarray(w, dtype)
    )
    dx = jax.jit(functools.partial(conv.dgrad, p))(jnp.asarray(dy, dtype), jnp.asarray(w, dtype))
    x[:, ::2, ::2] = dy @ w[0, 0].T
    assert_exact(dx, x, "dx")
    assert_exact(y, dy @ w[0, 0], "y")


@over_cases
def test_bias_activation_and_preactivation_are_exact(case):
    f = functools.partial(case.function, activation="relu", algorithm="sm90", **case.options)
    args = arrays(case, 1, "x w b", "bfloat16")
    alone, (y, z) = jax.jit(lambda *args: (f(*args), f(*args, return_preactivation=True)))(*args)
    z_expected = expected("conv_fprop", case) + data(case, 1)["b"]
    assert_exact(z, z_expected, "z")
    assert_exact(y, np.maximum(z_expected, 0), "y")
    assert same_bits(y, alone), "saving z changes y"


@over_dtypes
@pytest.mark.parametrize("name", ["c72", "images", "strided", "dilated", "groups_of_64"])
def test_random_filters_err_no_more_than_twice_xla(name, dtype):
    case = BY_NAME[name]
    args = arrays(case, dtype, "x w dy", dtype)
    actual = trio(case)(*args)
    options = {**case.options, "implementation": "xla"}
    y, back = jax.vjp(functools.partial(case.function, **options), *args[:2])
    xla = dict(zip(OPERANDS, (y, *back(args[2])), strict=True))
    for op, result in actual.items():
        short = op.removeprefix("conv_")
        reference = getattr(ref, short)(case, *(data(case, dtype)[n] for n in OPERANDS[op]))
        assert_close(result, xla[op], reference, case.terms(short), f"{op} of {name}")


@over_dtypes
@pytest.mark.parametrize("activation", [a for a in NAMED_ACTIVATIONS if a is not None], ids=label)
@pytest.mark.parametrize("name", ["c72", "images"])  # the general loop's epilogue, and the halo tile's
def test_every_activation_errs_no_more_than_twice_xla(name, activation, dtype):
    case = BY_NAME[name]
    x, w, b = arrays(case, dtype, "x w b", dtype)
    f = functools.partial(case.function, activation=activation, return_preactivation=True, **case.options)
    actual = jax.jit(functools.partial(f, algorithm="sm90"))(x, w, b)
    xla = jax.jit(functools.partial(f, implementation="xla"))(x, w, b)
    z = ref.fprop(case, *(data(case, dtype)[n] for n in "xw")) + data(case, dtype)["b"]
    for a, t, r in zip(actual, xla, (ref.activate(activation, z), z), strict=True):
        assert_close(a, t, r, case.terms("fprop"), f"{activation}", scale=np.abs(z).max())


@over_cases
def test_the_same_call_gives_the_same_bits_captured_or_not(case):
    args = arrays(case, "bfloat16", "x w dy", "bfloat16")
    lowered = trio(case).lower(*args)
    first = lowered.compile({"xla_gpu_enable_command_buffer": ""})(*args)
    captured = lowered.compile({"xla_gpu_enable_command_buffer": "CUSTOM_CALL", "xla_gpu_graph_min_graph_size": 1})
    for _ in range(3):
        assert same_bits(first, captured(*[jnp.copy(a) for a in args]))


# ----------------------------------------------------------------------------------------------------------------------
# dense

# (M, K, N)
SIZES = {
    (8, 8, 8): "one vector each",
    (136, 72, 264): "one vector past 128, 64 and 256",
    (257, 200, 328): "one row past 256, columns past 320",
    (64, 2048, 1000): "few rows, long sums: parts of K",
    (1, 512, 136): "one row",
}


@over_dtypes
@pytest.mark.parametrize("c", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_dense_is_exact(size, c, dtype):
    """Sparse operands, so that sums of 2048 terms stay integers that bfloat16 holds."""
    m, k, n = size
    x, w = integers(0, (m, k), 1), integers(1, (k, n), 1)
    x[:, np.arange(k) % max(1, k // 64) != 0] = 0
    b, addend, dy = integers(2, (n,), 2), integers(3, (m, n), 2), integers(4, (m, n), 1)
    dy[:, np.arange(n) % max(1, n // 64) != 0] = 0
    dy[np.arange(m) % max(1, m // 64) != 0] = 0

    def run(x: Any, w: Any, b: Any, addend: Any, dy: Any) -> Any:
        def f(x: Any, w: Any) -> Any:
            options: dict[str, Any] = {"c": addend, "beta": 2.0} if c else {}
            return jaxconv.dense(x, w, b, algorithm="sm90", activation="relu", return_preactivation=True, **options)

        (y, z), back = jax.vjp(f, x, w)
        return y, z, *back((jnp.zeros_like(y), dy))

    y, z, dx, dw = jax.jit(run)(*(jnp.asarray(a, dtype) for a in (x, w, b, addend, dy)))
    expected_z = x @ w + b + 2 * addend * c
    assert_exact(z, expected_z, "z")
    assert_exact(y, np.maximum(expected_z, 0), "y")
    assert_exact(dx, dy @ w.T, "dx")
    if m % 8 == 0:
        assert_exact(dw, x.T @ dy, "dw")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kernel", FORCED_DENSE)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_tile_of_dense_is_exact(size, kernel, dtype):
    m, k, n = size
    x, w = integers(0, (m, k), 1), integers(1, (k, n), 1)
    x[:, np.arange(k) % max(1, k // 64) != 0] = 0
    p = DenseProblem("dense", dtype, m, k, n, (lax.Precision.DEFAULT,) * 2)
    refusal = _plan.supports("dense", kernel, p, DEVICE)
    if refusal:
        pytest.skip(f"{kernel} does not have it: {refusal}")
    y = jax.jit(functools.partial(jaxconv.dense, algorithm=kernel, precision="default"))(
        *(jnp.asarray(a, dtype) for a in (x, w))
    )
    assert_exact(y, x @ w, kernel)


# (M, K, N) of few rows
FEW = {
    (1, 8, 8): "one vector: the parts of most CTAs are empty",
    (1, 2048, 1000): "one image's head",
    (8, 520, 72): "a stage that ends in zeros, columns past 64",
    (13, 328, 136): "rows that are no vector, columns past 128",
    (70, 1032, 264): "rows past 64",
    (130, 264, 128): "rows past 128",
}
over_precisions = pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])


def few(dtype: str, size: tuple[int, int, int], kernel: str, **options: Any) -> DenseProblem:
    m, k, n = size
    p = DenseProblem("dense", dtype, m, k, n, (lax.Precision.DEFAULT,) * 2, algorithm=kernel, **options)
    assert _plan.supports("dense", kernel, p, DEVICE) is None
    return p


@over_precisions
@pytest.mark.parametrize("kernel", CLUSTERS)
@pytest.mark.parametrize("trans_w", [False, True])
@pytest.mark.parametrize("size", FEW, ids=str)
def test_few_rows_are_exact(size, trans_w, kernel, dtype):
    """w as it lies or transposed. Large in float32, whose TF32 has 11 bits: an operand cut to bfloat16 would show."""
    m, k, n = size
    x, w = integers(0, (m, k), 1000 if dtype == "float32" else 1), integers(1, (k, n), 1)
    x[:, np.arange(k) % max(1, k // 64) != 0] = 0
    p = few(dtype, size, kernel, trans_w=trans_w)
    f = jax.jit(functools.partial(matmul, p))
    y = f(jnp.asarray(x, dtype), jnp.asarray(w.T if trans_w else w, dtype))
    assert_exact(y, x @ w, kernel)


@over_precisions
@pytest.mark.parametrize("bias", ["scalar", "row", "column"])
@pytest.mark.parametrize("batched", [("x", "w", "b", "c"), ("x", "b"), ("w", "c"), ("x",)], ids=str)
def test_few_rows_of_instances_with_all_that_an_epilogue_has_are_exact(batched, bias, dtype):
    """Each operand of every instance or one for all; c is added twice, the preactivation is saved."""
    m, k, n, batch = 5, 200, 136, 3

    def make(seed: int, name: str, shape: tuple[int, ...], largest: int) -> np.ndarray:
        return integers(seed, (batch, *shape) if name in batched else shape, largest)

    x, w = make(0, "x", (m, k), 1), make(1, "w", (k, n), 1)
    x[..., np.arange(k) % 4 != 0] = 0
    b = make(2, "b", {"scalar": (), "row": (m, 1), "column": (n,)}[bias], 2)
    c = make(3, "c", (m, n), 2)

    def f(x: Any, w: Any, b: Any, c: Any) -> Any:
        options: dict[str, Any] = {"c": c, "beta": 2.0, "activation": "relu", "return_preactivation": True}
        return jaxconv.dense(x, w, b, algorithm="sm90/cluster", **options)

    axes = tuple(0 if name in batched else None for name in "xwbc")
    run = jax.jit(jax.vmap(f, axes))
    args = [jnp.asarray(a, dtype) for a in (x, w, b, c)]
    y, z = run(*args)
    expected = x @ w + b.reshape(-1, *{"scalar": (1, 1), "row": (m, 1), "column": (1, n)}[bias]) + 2 * c
    assert_exact(z, expected, "z")
    assert_exact(y, np.maximum(expected, 0), "y")


@over_precisions
@pytest.mark.parametrize("activation", [a for a in NAMED_ACTIVATIONS if a is not None], ids=label)
def test_every_activation_of_few_rows_errs_no_more_than_twice_xla(activation, dtype):
    """float32 products are TF32's on both sides: these are integers, so that z is exact, over 8."""
    m, k, n = 8, 264, 136
    x, w, b = integers(0, (m, k), 1) / 8, integers(1, (k, n), 1), integers(2, (n,), 2) / 8
    args = [jnp.asarray(a, dtype) for a in (x, w, b)]
    f = functools.partial(jaxconv.dense, activation=activation, return_preactivation=True)
    actual = jax.jit(functools.partial(f, algorithm="sm90/cluster"))(*args)
    xla = jax.jit(functools.partial(f, implementation="xla"))(*args)
    z = x @ w + b
    for a, t, r in zip(actual, xla, (ref.activate(activation, z), z), strict=True):
        assert_close(a, t, r, k, f"{activation}", scale=np.abs(z).max())


@over_precisions
def test_random_products_of_few_rows_err_no_more_than_twice_xla(dtype):
    m, k, n = 8, 4096, 520
    x, w = normal(0, (m, k), dtype), normal(1, (k, n), dtype)
    args = [jnp.asarray(a, dtype) for a in (x, w)]
    actual, xla = (
        jax.jit(functools.partial(jaxconv.dense, **how))(*args)
        for how in ({"algorithm": "sm90/cluster"}, {"implementation": "xla"})
    )
    exact = np.asarray(args[0], np.float64) @ np.asarray(args[1], np.float64)
    if dtype != "float32":
        assert_close(actual, xla, exact, k, dtype)
        return
    # Operands rounded to the nearest of 11 bits err by 2.9e-4 of a sum, root mean square; cut off, by twice as much.
    error = np.asarray(actual, np.float64) - exact
    assert np.sqrt(np.mean(error**2)) <= 4e-4 * np.sqrt(np.mean(exact**2))


@over_precisions
def test_the_gradient_of_few_rows_is_exact(dtype):
    """Whatever kernel the family has for it: the forward pass is sm90/cluster's."""
    m, k, n = 8, 264, 136
    x, w, dy = integers(0, (m, k), 1), integers(1, (k, n), 1), integers(2, (m, n), 1)
    dy[:, np.arange(n) % 2 != 0] = 0
    f = functools.partial(jaxconv.dense, algorithm="sm90")
    y, back = jax.vjp(f, jnp.asarray(x, dtype), jnp.asarray(w, dtype))
    dx, dw = back(jnp.asarray(dy, dtype))
    for actual, expected in ((y, x @ w), (dx, dy @ w.T), (dw, x.T @ dy)):
        assert_exact(actual, expected)


# (images, size, C, K, filter): an image of a network that answers one; one pixel; a group's channels
SERVED = {
    (1, 7, 512, 512, 3): "49 pixels",
    (2, 5, 72, 136, 3): "channels that end within a stage",
    (1, 1, 480, 120, 1): "a squeeze-and-excitation",
    (8, 1, 120, 480, 1): "of eight images",
    (3, 9, 40, 72, 1): "243 pixels",
}


@over_precisions
@pytest.mark.parametrize("kernel", CLUSTERS)
@pytest.mark.parametrize("size", SERVED, ids=str)
def test_few_pixels_with_all_that_an_epilogue_has_are_exact(size, kernel, dtype):
    images, side, c, k, filter = size
    shape = (images, side, side, c)
    x, w = integers(0, shape, 1), integers(1, (filter, filter, c, k), 1)
    x[..., np.arange(c) % max(1, c // 16) != 0] = 0
    b, residual = integers(2, (k,), 2), integers(3, (images, side, side, k), 2)
    options: dict[str, Any] = {"activation": "relu", "padding": filter // 2, "residual": jnp.asarray(residual, dtype)}
    f = jax.jit(functools.partial(jaxconv.conv2d, algorithm=kernel, **options))
    args = [jnp.asarray(a, dtype) for a in (x, w, b)]
    y = f(*args)
    padded = np.pad(x, ((0, 0), *[(filter // 2,) * 2] * 2, (0, 0)))
    z = b + residual.astype(float)
    for r in range(filter):
        for s in range(filter):
            z = z + padded[:, r : r + side, s : s + side] @ w[r, s]
    assert_exact(y, np.maximum(z, 0))


@over_dtypes
@pytest.mark.parametrize("bias", ["scalar", "row", "column"])
def test_dense_bias_kinds_and_instances_are_exact(bias, dtype):
    x, w = integers(0, (3, 136, 72), 1), integers(1, (3, 72, 80), 1)
    b = integers(2, {"scalar": (), "row": (136, 1), "column": (80,)}[bias], 2)
    f = jax.vmap(functools.partial(jaxconv.dense, algorithm="sm90"), (0, 0, None))
    assert_exact(jax.jit(f)(*(jnp.asarray(a, dtype) for a in (x, w, b))), x @ w + b)

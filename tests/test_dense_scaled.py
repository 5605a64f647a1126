"""Dense layers of 8-bit numbers with scales: their meaning bit for bit by numpy, what a call can do, plans,
mistakes."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import A100, H200, calls, poison, targets, with_hoppers_code
from jax import export, lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_conv_scaled import PAIRS, Numbers, equal, expected, kernels, steps, values

import jaxconv
from jaxconv import _plan
from jaxconv._problem import FLOAT8, ScaledConvProblem


def forced(w_dtype: str = "int8") -> list[str | None]:
    """XLA's product, which few rows get, and on Hopper every tile of the kernel."""
    return list(dict.fromkeys([None, *kernels(w_dtype)]))


# (..., K) and N: rows and columns that no tile divides, several waves, one row, no leading axis
SIZES: dict[str, tuple[tuple[int, ...], int]] = {
    "rows": ((70, 48), 80),
    "leading_axes": ((3, 7, 11, 64), 144),
    "one_row": ((1, 128), 16),
    "a_vector": ((64,), 32),
    "deep": ((37, 1040), 272),
    "several_waves": ((2, 9000, 16), 304),
}


def operands(name: str, left: str = "int8", right: str = "int8") -> tuple[Numbers, Numbers, Numbers]:
    """x, w and x @ w exactly: float64 holds every partial sum."""
    shape, n = SIZES[name]
    x, w = values(1, shape, left), values(2, (shape[-1], n), right)
    return x, w, x.astype(np.float64) @ w.astype(np.float64)


def scales(acc: Numbers, k: int) -> tuple[Numbers, Numbers]:
    rng, n = np.random.default_rng(3), acc.shape[-1]
    return (0.012 / np.sqrt(k) * rng.uniform(0.3, 2, n)).astype(np.float32), rng.normal(0, 30, n).astype(np.float32)


def run(kernel: str | None, x: Any, w: Any, b: Any = None, **options: Any) -> Numbers:
    arrays = {n: options.pop(n) for n in ("residual", "scale", "residual_scale", "out_scale") if n in options}
    options["algorithm"] = kernel

    def f(x: Any, w: Any, b: Any, arrays: dict[str, Any]) -> Any:
        return jaxconv.dense(x, w, b, **arrays, **options)

    if kernel is not None:
        assert calls(f, x, w, b, arrays) == {"conv_scaled": 1}
    poison()
    return np.asarray(jax.jit(f)(x, w, b, arrays))


@pytest.mark.parametrize("kernel", forced())
@pytest.mark.parametrize("name", SIZES)
def test_every_size_is_exact(name, kernel):
    x, w, acc = operands(name)
    scale, b = scales(acc, x.shape[-1])
    residual = values(4, acc.shape, "int8")
    how: dict[str, Any] = dict(scale=scale, b=b, residual=residual, residual_scale=0.37, activation="relu")
    how["out_scale"] = 0.9
    got = run(kernel, x, w, out_dtype="int8", **how)
    equal(got, expected(acc, "int8", **how))
    assert np.mean(got == 127) < 0.5 and len(np.unique(got)) > min(60, acc.size // 4)


@pytest.mark.parametrize("k", (1, 5, 15, 18, 27))
def test_sums_of_any_number_of_products_are_exact(k):
    """Of 5 and of 15 products of int8 XLA's own sums are twice too large on a GPU (jaxlib 0.11.2)."""
    for left, right in PAIRS:
        x, w = values(1, (33, k), left), values(2, (k, 7), right)
        exact = (x.astype(np.int64) @ w.astype(np.int64)).astype(np.int32)
        equal(run(None, x, w), exact)
        equal(np.asarray(jax.vmap(jaxconv.dense, (0, None))(x[:, None], w))[:, 0], exact)
        equal(np.asarray(jax.vmap(jaxconv.dense, (None, 0))(x, w[None]))[0], exact)


@pytest.mark.parametrize(("left", "right"), PAIRS)
def test_every_pair_of_integers_and_every_result(left, right):
    """XLA's products are of int8 alone: a uint8 is an int8 and 128."""
    x, w, acc = operands("rows", left, right)
    scale, b = scales(acc, x.shape[-1])
    for kernel in forced(right):
        equal(run(kernel, x, w), acc.astype(np.int32))
        for out_dtype in ("int8", "uint8", "float32", "bfloat16", "float16", *FLOAT8):
            how: dict[str, Any] = dict(scale=scale, b=b, out_scale=1.25)
            equal(run(kernel, x, w, out_dtype=out_dtype, **how), expected(acc, out_dtype, **how))


@pytest.mark.parametrize("right", ["int8", "uint8"])
def test_sums_wrap_around(right):
    """200,000 products of the largest numbers are beyond int32."""
    x, w = np.full((2, 200_000), 255, np.uint8), np.full((200_000, 16), np.iinfo(right).max, right)
    exact = x.astype(np.int64) @ w.astype(np.int64)
    assert exact.min() > 2**31
    equal(run(None, x, w), exact.astype(np.int32))


@pytest.mark.parametrize("shape", [(), (1,), (80,), (1, 80)], ids=str)
def test_every_bias_and_a_scale_that_is_a_number(shape):
    x, w, acc = operands("rows")
    b = np.random.default_rng(0).normal(0, 30, shape).astype(np.float32)
    for kernel in forced():
        got = run(kernel, x, w, b, scale=np.float32(1e-3), out_dtype="float32", activation="relu6")
        equal(got, expected(acc, "float32", scale=np.float32(1e-3), b=b.reshape(-1), activation="relu6"))
        ints = np.random.default_rng(1).integers(-(2**31), 2**31, shape).astype(np.int32)
        got = run(kernel, x, w, ints, scale=np.float32(1e-3), out_dtype="float32", activation="relu6")
        equal(got, expected(acc, "float32", scale=np.float32(1e-3), b=ints.reshape(-1), activation="relu6"))
    equal(np.asarray(jaxconv.dense(x, w, scale=1e-3)), expected(acc, "float32", scale=np.float32(1e-3)))


@pytest.mark.parametrize("residual_dtype", ["int8", "uint8", "float8_e4m3fn", "bfloat16", "float32"])
def test_every_residual(residual_dtype):
    x, w, acc = operands("leading_axes")
    scale, _ = scales(acc, x.shape[-1])
    eight = residual_dtype in ("int8", "uint8")
    residual = values(4, acc.shape, residual_dtype if eight else "float32").astype(jnp.dtype(residual_dtype))
    for residual_scale in (None, 0.71):
        given = {} if residual_scale is None else dict(residual_scale=residual_scale)
        for kernel in forced():
            got = run(kernel, x, w, scale=scale, residual=residual, out_dtype="int8", **given)
            equal(got, expected(acc, "int8", scale=scale, residual=residual, residual_scale=residual_scale))


@pytest.mark.parametrize(("left", "right"), [(a, b) for a in FLOAT8 for b in FLOAT8])
def test_float8_sums_lose_no_more_than_a_convolutions(left, right):
    x, w = values(1, (70, 640), left), values(2, (640, 48), right)
    total, lost = steps(x, w)
    for kernel in forced(right):
        assert (np.abs(run(kernel, x, w, out_dtype="float32") - total) <= lost).all()
    q = jaxconv.dense(x, w, scale=np.ones(48, np.float32), out_scale=2.0)
    assert q.dtype == left


def test_it_is_the_convolution_of_one_tap():
    x, w, acc = operands("leading_axes")
    scale, b = scales(acc, x.shape[-1])
    options: dict[str, Any] = dict(scale=scale, activation="gelu", out_scale=20.0)
    conv = jax.jit(lambda x, w: jaxconv.conv2d(x, w[None, None], b, **options))(x, w)
    off = np.abs(np.asarray(conv, int) - np.asarray(jaxconv.dense(x, w, b, **options), int))
    assert off.max() <= 1 and off.mean() < 1e-3


def test_mapped():
    x, w = values(1, (3, 5, 70, 48), "int8"), values(2, (3, 48, 80), "int8")
    acc = x.astype(np.float64) @ w[:, None].astype(np.float64)
    scale, b = scales(acc, 48)

    def f(x: Any, w: Any, scale: Any) -> Any:
        return jaxconv.dense(x, w, b, scale=scale, out_dtype="int8", activation="relu")

    for axes in ((0, None, None), (None, 0, None), (0, 0, None), (0, None, 0), (None, 0, 0)):
        each = np.stack([scale, scale * 2, scale * 3]) if axes[2] == 0 else scale
        args = x if axes[0] == 0 else x[0], w if axes[1] == 0 else w[0], each
        got = jax.jit(jax.vmap(f, axes))(*args)
        for i in range(3):
            left, right, s = (a[i] if axis == 0 else a for a, axis in zip(args, axes, strict=True))
            acc = left.astype(np.float64) @ right.astype(np.float64)
            equal(np.asarray(got[i]), expected(acc, "int8", scale=s, b=b, activation="relu"))


@pytest.mark.skipif(jax.device_count() < 2, reason="one device")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("split", ["batch", "columns"])
def test_on_a_mesh(split, kind):
    """The first axis is split, or columns with their scales."""
    x, w = values(1, (4, 6, 48), "uint8"), values(2, (48, 32), "int8")
    acc = x.astype(np.float64) @ w.astype(np.float64)
    scale, b = scales(acc, 48)
    residual = values(4, acc.shape, "int8")
    mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,), devices=jax.devices()[:2])
    columns = split == "columns"
    rows = P() if columns else P("d")
    specs = rows, P(None, "d") if columns else P(), *[P("d") if columns else P()] * 2
    specs = *specs, P(None, None, "d") if columns else rows
    given = [
        jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip((x, w, scale, b, residual), specs, strict=True)
    ]
    how: dict[str, Any] = dict(residual_scale=0.5, activation="relu", out_scale=0.9)

    def f(x: Any, w: Any, scale: Any, b: Any, residual: Any) -> Any:
        return jaxconv.dense(x, w, b, scale=scale, residual=residual, out_dtype="int8", **how)

    with jax.set_mesh(mesh):
        compiled = jax.jit(f).lower(*given).compile()
        got = compiled(*given)
    assert "all-gather(" not in compiled.as_text()
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, specs[-1]), 3)
    equal(np.asarray(got), expected(acc, "int8", scale=scale, b=b, residual=residual, **how))


def test_exported_with_a_symbolic_batch():
    x, w, acc = operands("leading_axes")
    scale, b = scales(acc, 64)
    n = export.symbolic_shape("n")[0]

    def f(x: Any) -> Any:
        return jaxconv.dense(x, w, b, scale=scale, activation="relu", out_scale=0.5)

    exported = export.export(jax.jit(f), disabled_checks=jaxconv.export_checks())(
        jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype)
    )
    loaded = export.deserialize(exported.serialize())
    equal(np.asarray(loaded.call(x)), expected(acc, "int8", scale=scale, b=b, activation="relu", out_scale=0.5))


def test_no_rows_and_no_features():
    scale, b = np.ones(16, np.float32), np.arange(16, dtype=np.float32)
    y = jaxconv.dense(np.zeros((0, 5, 32), np.int8), np.zeros((32, 16), np.int8), scale=scale, out_scale=2.0)
    assert (y.shape, y.dtype) == ((0, 5, 16), np.int8)
    y = jaxconv.dense(np.zeros((3, 0), np.int8), np.zeros((0, 16), np.int8), b, scale=scale)
    equal(np.asarray(y), np.broadcast_to(b, (3, 16)))


def test_told_and_counted():
    x, w, _ = operands("rows")

    def f(x: Any, w: Any) -> Any:
        return jaxconv.dense(x, w, np.ones(80, np.float32), scale=0.5, activation="relu", out_scale=2.0)

    told = str(jaxconv.explain(f)(x, w))
    assert "conv_scaled" in told and "70x48x80 int8 + bias + relu + scale -> int8" in told
    flops = jaxconv.cost(f)(x, w)["flops"] - (2 * 70 * 48 * 80 + 4 * 70 * 80)
    assert 0 <= flops <= 1  # XLA counts one of its own for a GPU


# ----------------------------------------------------------------------------------------------------------------------
# Bad input: one sentence each


X, W = np.zeros((4, 6, 32), np.int8), np.zeros((32, 16), np.int8)
MISTAKES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "zero": (dict(scale=0.0), ValueError, "scale has an element 0.0, expected positive finite numbers"),
    "negative": (dict(scale=-np.ones(16, np.float32)), ValueError, "scale has an element -1.0, expected positive"),
    "infinite": (dict(scale=1.0, out_scale=np.inf), ValueError, "out_scale has an element inf, expected positive"),
    "integer_scale": (dict(scale=np.ones(16, np.int32)), TypeError, "scale has dtype int32, expected float32"),
    "rows_scale": (dict(scale=np.ones(6, np.float32)), ValueError, r"scale has shape \(6,\), expected \(16,\)"),
    "out_scale_a_column": (dict(scale=1.0, out_scale=np.ones(16, np.float32)), ValueError, r"\(16,\), expected \(\)"),
    "no_type": (
        dict(scale=1.0, out_dtype="int16"),
        ValueError,
        "out_dtype=int16 is unknown, with a scale or of float8",
    ),
    "scaled_int32": (dict(scale=1.0, out_dtype="int32"), ValueError, "out_dtype=int32 is unknown"),
    "int8_without_a_scale": (dict(out_dtype="int8"), ValueError, "out_dtype=int8 was given without scale="),
    "bias_without_a_scale": (dict(b=np.ones(16, np.float32)), ValueError, "b was given without scale="),
    "bias_of_int16": (dict(scale=1.0, b=np.ones(16, np.int16)), TypeError, "b has dtype int16, expected float32"),
    "bias_of_rows": (
        dict(scale=1.0, b=np.ones((4, 6), np.float32)),
        ValueError,
        r"b has shape \(4, 6\), expected \(16,\), one per column, or a number, for 8-bit x and w",
    ),
    "bias_of_another_shape": (dict(scale=1.0, b=np.ones(7, np.float32)), ValueError, r"b has shape \(7,\), expected"),
    "residual_scale_alone": (dict(scale=1.0, residual_scale=1.0), ValueError, "expected a residual with it"),
    "residual_of_another_shape": (
        dict(scale=1.0, residual=np.zeros((24, 16), np.int8)),
        ValueError,
        r"residual has shape \(24, 16\), expected \(4, 6, 16\), that of the result",
    ),
    "residual_of_another_type": (
        dict(scale=1.0, residual=np.zeros((4, 6, 16), np.int16)),
        TypeError,
        "residual has dtype int16, expected one of",
    ),
    "features": (dict(w=np.zeros((31, 16), np.int8)), ValueError, "w expects 31 input features, x has 32"),
    "three_axes": (dict(w=np.zeros((1, 32, 16), np.int8)), ValueError, "w has 3 dimensions, expected 2"),
    "no_axis": (dict(x=np.int8(1)), ValueError, r"x has 0 dimensions, expected \(..., K\)"),
    "float8_filters": (dict(w=np.zeros((32, 16), jnp.float8_e5m2)), TypeError, "expected two of"),
    "wide_filters": (dict(scale=1.0, w=np.zeros((32, 16), np.float32)), TypeError, "w has dtype float32, expected one"),
    "wide_rows": (dict(scale=1.0, x=np.zeros((4, 32), np.float32)), TypeError, "x has dtype float32, expected one of"),
    "preactivation": (dict(scale=1.0, return_preactivation=True), ValueError, "return_preactivation=True, expected"),
    "c": (
        dict(scale=1.0, c=np.zeros((4, 6, 16), np.int8)),
        ValueError,
        "c was given with 8-bit x or a scale, expected residual= and residual_scale= in its place",
    ),
    "alpha": (dict(scale=1.0, alpha=2.0), ValueError, "alpha was given with 8-bit x or a scale, expected scale="),
    "beta": (dict(scale=1.0, beta=2), ValueError, "beta was given with 8-bit x or a scale, expected residual_scale="),
    "residual_of_floats": (
        dict(x=np.zeros((4, 32), np.float32), w=np.zeros((32, 16), np.float32), residual=np.zeros((4, 16), np.float32)),
        ValueError,
        "residual was given, expected 8-bit x and w with it, or c= in its place",
    ),
    "activation": (dict(scale=1.0, activation="softmax"), ValueError, "activation"),
    "algorithm": (dict(scale=1.0, algorithm="im2col"), ValueError, "algorithm='im2col' is unknown, expected None or"),
    "precision": (dict(scale=1.0, precision="low"), ValueError, "precision='low' is unknown"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name):
    options, error, text = MISTAKES[name]
    with pytest.raises(error, match=f"^dense: .*{text}"):
        jaxconv.dense(**{"x": X, "w": W, **options})


def test_there_is_no_derivative():
    with pytest.raises(
        TypeError, match="a product of int8 and int8 has no derivative: differentiate one of 16 or 32 bits"
    ):
        jax.grad(lambda scale: jaxconv.dense(X, W, scale=scale).sum())(np.float32(1))
    one = np.ones((2, 32), np.int8), np.ones((32, 16), np.int8)
    stopped = jax.grad(lambda s: jaxconv.dense(*one, scale=lax.stop_gradient(s)).sum() * s)(np.float32(1))
    assert stopped == 2 * 32 * 16


# ----------------------------------------------------------------------------------------------------------------------
# Plans


def problem(m: Any, k: int, n: int, *, scaled: bool = True, dtype: str = "int8", **given: Any) -> ScaledConvProblem:
    options: dict[str, Any] = dict(activation=None, return_preactivation=False, precision=None)
    options |= dict(algorithm=None, implementation=None) | given
    like = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((m, k), (k, n))]
    scale = jax.ShapeDtypeStruct((n,), "float32") if scaled else None
    numbers: dict[str, Any] = dict(residual=None, residual_scale=None, out_scale=None, out_dtype=None)
    return ScaledConvProblem.of_dense(*like, None, scale=scale, **numbers, **options)


@pytest.mark.parametrize(
    ("m", "k", "n", "options", "implementation", "why"),
    [
        (50176, 768, 3072, {}, "native", "one pass on 8-bit tensor cores"),
        (50176, 768, 3072, dict(dtype="float8_e4m3fn"), "native", "one pass on 8-bit tensor cores"),
        (132 * 128, 256, 128, {}, "native", "one pass"),
        (131 * 128, 256, 128, {}, "xla", "131 tiles of 128x128 for 132 multiprocessors: at most sizes XLA was as fast"),
        (1, 768, 3072, {}, "xla", "24 tiles of 128x128"),
        (1, 768, 3072, dict(implementation="native"), "native", "implementation='native' was asked for"),
        (1, 768, 3072, dict(algorithm="sm90/eight 256x64"), "native", "was asked for"),
        (50176, 768, 3072, dict(scaled=False), "xla", "XLA has a product for sums of int8 without scales"),
        (1, 768, 3072, dict(dtype="float8_e5m2"), "xla", "24 tiles of 128x128"),
        (1, 768, 3072, dict(dtype="uint8"), "native", "one pass on 8-bit tensor cores, which XLA does not have"),
        (50176, 768, 3072, dict(dtype="uint8", scaled=False), "native", "one pass"),
        (50176, 768, 3072, dict(scaled=False, implementation="native"), "native", "was asked for"),
        (50176, 768, 3072, dict(implementation="xla"), "xla", "implementation='xla' was asked for"),
        (50176, 760, 3072, {}, "xla", "multiples of 16 channels a group, got 760 and 3072"),
    ],
)
def test_plans_for_hopper(code_for_gpus, m, k, n, options, implementation, why):
    """As they were measured on an H100. uint8 XLA has none of."""
    plan = _plan.plan("conv_scaled", problem(m, k, n, **options), H200)
    assert plan.implementation == implementation and why in plan.reason
    assert plan.kernel == ("sm90/eight" if implementation == "native" else "")


FEW = (values(0, (6, 64), "int8"), values(1, (64, 32), "int8"), np.linspace(0.5, 1.0, 32, dtype=np.float32))


def by_jnp(x: Any, w: Any, scale: Any) -> Any:
    return jnp.dot(x, w, preferred_element_type=jnp.int32).astype(jnp.float32) * scale


MEANINGS = {
    "alone": lambda x, w, s: jaxconv.dense(x, w, scale=s),
    "mapped scales": lambda x, w, s: jax.vmap(lambda s: jaxconv.dense(x, w, scale=s))(jnp.stack([s, s])),
    "mapped filters": lambda x, w, s: jax.vmap(lambda w: jaxconv.dense(x, w, scale=s))(jnp.stack([w, w])),
    "gradient": lambda x, w, s: jax.grad(lambda s: jaxconv.accelerate(by_jnp)(x, w, s).sum())(s),
    "jvp": lambda x, w, s: jax.jvp(lambda s: jaxconv.accelerate(by_jnp)(x, w, s), (s,), (s,)),
    "mapped jnp": lambda x, w, s: jax.vmap(jaxconv.accelerate(by_jnp), (None, None, 0))(x, w, jnp.stack([s, s])),
}


@pytest.mark.parametrize("name", MEANINGS)
def test_what_xlas_products_read_lies_row_after_row(name):
    """On a GPU a product of fewer than 16 rows that are transposed was wrong: also behind transforms."""
    with _plan.Device.assumed(A100):  # which has no kernel of ours
        text = jax.jit(MEANINGS[name]).trace(*FEW).lower(lowering_platforms=("cuda",)).as_text()
    read = []
    for function in text.split("func.func"):  # each has names of its own
        operation = dict(re.findall(r"(%\w+) = stablehlo\.(\w+)", function))
        found = re.findall(r"stablehlo\.dot_general (%\w+), .*?: \(tensor<[^>]*xi8>", function)
        read += [operation[one] for one in found]
        assert function.count("@LayoutConstraint") == len(found)
    assert read and set(read) == {"optimization_barrier"}


def test_plans_elsewhere(code_for_gpus, monkeypatch):
    p = problem(50176, 768, 3072)
    for device in (A100, _plan.Device("cpu")):
        assert _plan.plan("conv_scaled", p, device).implementation == "xla"
    native = dataclasses.replace(p, implementation="native")
    with pytest.raises(ValueError, match=r"dense: implementation='native' cannot run conv_scaled .* capability 9\.0"):
        _plan.plan("conv_scaled", native, A100)
    with pytest.raises(ValueError, match=r"dense: implementation='native' cannot run conv_scaled .* on CUDA only"):
        _plan.plan("conv_scaled", native, _plan.Device("cpu"))
    for name, implementation in (("conv", "native"), ("dense", "xla"), ("all", "xla")):
        monkeypatch.setenv("JAXCONV_DISABLE", name)
        assert _plan.plan("conv_scaled", p, H200).implementation == implementation


@with_hoppers_code
def test_lowered_for_hopper_it_is_one_call(code_for_gpus):
    """Filters k-major, as the kernel reads them."""

    def f(x: Any, w: Any) -> Any:
        return jaxconv.dense(x, w, scale=0.5, activation="relu", out_scale=2.0)

    like = jax.ShapeDtypeStruct((64, 512, 256), "int8"), jax.ShapeDtypeStruct((256, 1024), "int8")
    with _plan.Device.assumed(H200):
        text = jax.jit(f).trace(*like).lower(lowering_platforms=("cuda",)).as_text()
        few = jax.jit(f).trace(jax.ShapeDtypeStruct((8, 256), "int8"), like[1]).lower(lowering_platforms=("cuda",))
    assert targets(text) == {"conv_scaled": 1} and "dot_general" not in text
    (call,) = [line for line in text.splitlines() if "custom_call @jaxconv_conv_scaled_v3" in line]
    assert "operand_layouts = [dense<[2, 1, 0]> : tensor<3xindex>, dense<[1, 0, 2]> : tensor<3xindex>" in call
    assert targets(few.as_text()) == {} and "(tensor<8x256xi8>, tensor<256x1024xi8>) -> tensor<8x1024xi32>" in (
        few.as_text()
    )

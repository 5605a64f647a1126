"""A stem and the max-pooling behind it in one kernel: its bits, which calls become it, and what it refuses."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import A100, H100, H200, HOPPER, normal, poison, same_bits, with_hoppers_code
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxconv
from jaxconv import _plan
from jaxconv._core.activations import Activation
from jaxconv._ops import conv, conv_pooled, pool, reference
from jaxconv._plan import domain
from jaxconv._problem import ConvProblem, PooledConvProblem, PoolProblem
from jaxconv.joints import rules

# x's shape, w's, the convolution's options, the pooling's window, and its padding where that is not SAME
CASES: dict[str, tuple[Any, ...]] = {
    "resnet": ((2, 64, 64, 3), (7, 7, 3, 64), dict(stride=2, padding=3), 3, ((1, 1), (1, 1))),
    "resnet, SAME": ((3, 62, 60, 3), (7, 7, 3, 64), dict(stride=2, padding="SAME"), 3),
    "224 pixels": ((1, 224, 224, 3), (7, 7, 3, 64), dict(stride=2, padding=3), 3, ((1, 1), (1, 1))),
    "256 pixels: two tiles of a row": ((1, 36, 256, 3), (7, 7, 3, 64), dict(stride=2, padding=3), 3, ((1, 1), (1, 1))),
    "SAME, two tiles": ((1, 20, 260, 3), (3, 3, 3, 32), dict(stride=2, padding="SAME"), 3),
    "300 columns": ((2, 9, 300, 1), (3, 3, 1, 16), dict(padding=1), 3, ((1, 1), (1, 1))),
    "300 columns, no padding in front": ((1, 12, 301, 4), (3, 3, 4, 8), dict(padding=1), 3, ((0, 1), (0, 1))),
    "halves": ((2, 28, 28, 1), (5, 5, 1, 32), dict(padding="SAME"), 2, "VALID"),
    "halves, 250 columns": ((1, 11, 250, 3), (3, 3, 3, 72), dict(padding="SAME"), 2, "VALID"),
    "2x3": ((2, 30, 33, 3), (3, 3, 3, 24), dict(stride=2), (2, 3), ((0, 0), (1, 1))),
    "3x2": ((2, 31, 34, 3), (3, 3, 3, 24), dict(stride=2), (3, 2), ((1, 0), (0, 1))),
    "136 channels": ((1, 40, 44, 3), (7, 7, 3, 136), dict(stride=2, padding=3), 3, ((1, 1), (1, 1))),
    "5 channels, dilated": ((2, 21, 23, 5), (3, 3, 5, 40), dict(dilation=(1, 2)), 3, "VALID"),
    "a row and a column": ((4, 2, 3, 3), (1, 1, 3, 8), {}, 2, ((0, 0), (0, 1))),
    "many images": ((300, 14, 15, 3), (3, 3, 3, 16), dict(padding="SAME"), 3),
    "channels first": ((2, 3, 40, 48), (32, 3, 5, 5), dict(padding=2, layout="NCHW"), 3, ((1, 1), (1, 1))),
    "one plane": ((2, 1, 33, 40, 3), (1, 3, 3, 3, 32), dict(padding="VALID"), (1, 3, 3), "VALID"),
}
DEFAULTS: dict[str, Any] = dict(
    stride=1, padding="VALID", dilation=1, groups=1, precision=None, implementation=None, algorithm=None
)


def problem(case: tuple[Any, ...], dtype: str, b: bool = True, activation: Any = "relu", **how: Any) -> Any:
    x, w, options, window, *padding = case
    nd = len(x) - 2
    layout = options.get("layout", "NDHWC" if nd == 3 else "NHWC")
    like = [jax.ShapeDtypeStruct(shape, dtype) for shape in (x, w)]
    k = w[0] if layout == "NCHW" else w[-1]
    bias = jax.ShapeDtypeStruct((k,), dtype) if b else None
    options = {**DEFAULTS, **options, "layout": layout, "activation": activation, "return_preactivation": False}
    p = ConvProblem.infer("conv", nd, *like, bias, **options)
    steps = (1, 2, 2) if nd == 3 else 2
    q = PoolProblem.infer(
        "max_pool", jax.ShapeDtypeStruct(p.y_shape, dtype), window, stride=steps, padding=(padding or ["SAME"])[0],
        dilation=1, layout=layout, algorithm=None, implementation=None,
    )  # fmt: skip
    return dataclasses.replace(PooledConvProblem.of(p, q), **how)


def wide(case: tuple[Any, ...], dtype: str) -> bool:
    """Whether a pixel of x is more than the kernel reads at once."""
    return dtype == "float32" and case[0][-1] == 5


def arrays(p: PooledConvProblem, seed: int = 0) -> list[jax.Array]:
    shapes = [p.x_shape, p.w_shape, *[(p.out_channels,)] * p.bias]
    return [jnp.asarray(normal(seed + i, shape), p.dtype) for i, shape in enumerate(shapes)]


every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@pytest.mark.skipif(not HOPPER, reason="the kernel runs on compute capability 9.0")
@every_case
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_bits(case, dtype):
    """Those of the convolution by the kernel of the same products, and of a pooling behind it."""
    if wide(case, dtype):
        pytest.skip("the kernel takes at most four channels of float32")
    for seed, (b, activation) in enumerate(((True, "relu"), (False, None), (True, "relu6"))):
        p = problem(case, dtype, b, activation, implementation="native")
        assert _plan.plan("conv_pooled", p, _plan.Device.current("cuda")).kernel == "stem/sm90_pooled"
        args = arrays(p, 10 * seed)
        alone = dataclasses.replace(p.conv, algorithm="stem/sm90_narrow_in", implementation=None)

        @jax.jit
        def two(*args: Any, alone: Any = alone, p: Any = p) -> Any:
            y = conv.convolution(alone, *args)[0]
            return jax.lax.reduce_window(
                y, -jnp.inf, lax.max, p.pool.per_axis(p.pool.window, 1), p.pool.per_axis(p.pool.stride, 1),
                p.pool.per_axis(p.pool.padding, (0, 0)),
            )  # fmt: skip

        expected = two(*args)
        for _ in range(2):
            poison()
            assert same_bits(jax.jit(lambda *args, p=p: conv_pooled.kernel(p, *args))(*args), expected)


@pytest.mark.skipif(not HOPPER, reason="the kernel runs on compute capability 9.0")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_stays_in_its_windows(value):
    p = problem(CASES["resnet"], "bfloat16", implementation="native")
    x, *rest = arrays(p)
    x = x.at[0, 20, 33, 1].set(value)
    got = jax.jit(lambda *args: conv_pooled.kernel(p, *args))(x, *rest)
    alone = dataclasses.replace(p.conv, algorithm="stem/sm90_narrow_in", implementation=None)
    expected = pool.kernel(p.pool, conv.convolution(alone, x, *rest)[0])[0]
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    np.testing.assert_array_equal(np.isinf(got), np.isinf(expected))


CONVERTED = {name: CASES[name] for name in ("resnet", "resnet, SAME", "SAME, two tiles", "224 pixels", "many images")}
CONVERTED["three channel tiles"] = (1, 40, 44, 3), (7, 7, 3, 144), dict(stride=2, padding=3), 3, ((1, 1), (1, 1))
CONVERTED["no padding in front"] = (1, 12, 304, 3), (3, 3, 3, 16), dict(padding=1), 3, ((0, 1), (0, 1))
CONVERTED["halves"] = (3, 28, 28, 3), (5, 5, 3, 32), dict(padding="SAME"), 2, "VALID"


@pytest.mark.skipif(not HOPPER, reason="the kernel runs on compute capability 9.0")
@pytest.mark.parametrize("case", CONVERTED.values(), ids=CONVERTED)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_bits_of_conversions(case, dtype):
    """Of x in front, and of y to 8 bits behind: those of passes of their own."""
    p = problem(case, dtype, implementation="native")
    x, w, b = arrays(p)
    x = normal(7, p.x_shape).astype(np.float32)
    x_dtypes = ["", "float32"] if dtype != "float32" and case[0][2] % 4 == 0 else [""]
    for x_dtype in x_dtypes:
        for y_dtype in ("", "uint8", "int8"):
            plain = jax.jit(lambda *args: conv_pooled.kernel(p, *args))(jnp.asarray(x, dtype), w, b)
            # The largest tenth is saturated.
            scale = float(np.iinfo(y_dtype).max / np.quantile(np.float32(plain), 0.9)) if y_dtype else 0.0
            scale = float(np.float32(scale))
            q = dataclasses.replace(p, x_dtype=x_dtype, y_dtype=y_dtype, y_scale=scale)
            assert _plan.plan("conv_pooled", q, _plan.Device.current("cuda")).kernel == "stem/sm90_pooled"
            expected = reference.stored(plain, scale, y_dtype) if y_dtype else plain
            poison()
            got = jax.jit(lambda *args, q=q: conv_pooled.kernel(q, *args))(jnp.asarray(x, x_dtype or dtype), w, b)
            assert same_bits(got, expected)
            if y_dtype:
                assert len(np.unique(got)) > 60 and 0 < np.mean(np.asarray(got) == np.iinfo(y_dtype).max) < 0.5


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_meaning_of_conversions(dtype):
    p = problem(CASES["resnet"], dtype, implementation="xla")
    x, w, b = arrays(p)
    q = dataclasses.replace(p, x_dtype="float32" * (dtype != "float32"), y_dtype="uint8", y_scale=50.0)
    plain = conv_pooled.kernel(p, x, w, b)
    expected = np.clip(np.rint(np.float32(plain) * np.float32(50)), 0, 255).astype(np.uint8)
    np.testing.assert_array_equal(conv_pooled.kernel(q, x.astype(jnp.float32), w, b), expected)
    np.testing.assert_array_equal(
        jax.vmap(lambda x: conv_pooled.kernel(q, x, w, b))(x[None].astype(jnp.float32))[0], expected
    )
    gradient = jax.grad(lambda w: conv_pooled.kernel(q, x.astype(jnp.float32), w, b).astype(jnp.float32).sum())(w)
    assert not np.asarray(gradient).any()  # of whole numbers


@every_case
def test_meaning(case):
    """Of the call where no kernel runs: lax's own, its derivative, and over a mapped axis."""
    p = problem(case, "float32", implementation="xla")
    x, w, b = arrays(p)

    def plain(x: Any, w: Any, b: Any) -> Any:
        return pool.kernel(p.pool, conv.convolution(p.conv, x, w, b)[0])[0]

    def ours(*args: Any) -> Any:
        return conv_pooled.kernel(p, *args)

    np.testing.assert_allclose(ours(x, w, b), plain(x, w, b), 1e-6, 1e-6)
    gradients = [jax.grad(lambda *a, f=f: jnp.sin(f(*a)).sum(), (0, 1, 2))(x, w, b) for f in (ours, plain)]
    for got, expected in zip(*gradients, strict=True):
        np.testing.assert_allclose(got, expected, 1e-4, 1e-4)
    xs = jnp.stack([x, 2 * x])
    np.testing.assert_allclose(
        jax.vmap(ours, (0, None, None))(xs, w, b), jax.vmap(plain, (0, None, None))(xs, w, b), 1e-5, 1e-5
    )


def stem(x: Any, w: Any, b: Any, *, window: int = 3) -> Any:
    y = lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return lax.reduce_window(
        jax.nn.relu(y + b), -jnp.inf, lax.max, (1, window, window, 1), (1, 2, 2, 1), "SAME" if window == 3 else "VALID"
    )


ARGUMENTS = jnp.ones((2, 32, 32, 3)), jnp.ones((7, 7, 3, 64)), jnp.ones(64)


def test_a_stem_and_its_pooling_become_one_call(monkeypatch):
    """Where the plan takes it, and nobody else reads what is pooled; with a gradient its places are remembered."""
    monkeypatch.setattr(rules, "wants", lambda op, problem, device: op == "conv_pooled")

    seen: list[str] = []
    real = rules.rewrite

    def rewrite(program: Any, device: Any, **how: Any) -> list[str]:
        names = real(program, device, **how)
        seen.extend(names)
        return names

    for module in ("jaxconv.joints.region", "jaxconv.joints.joint"):
        monkeypatch.setattr(f"{module}.rewrite", rewrite)
    rule = "a convolution that takes its pooling's maxima"

    def applied(f: Any) -> int:
        seen.clear()
        jax.block_until_ready(jax.jit(f)(*ARGUMENTS))
        return seen.count(rule)

    assert applied(jaxconv.accelerate(stem)) == 1
    assert applied(jaxconv.accelerate(lambda *a: stem(*a, window=2))) == 1
    assert applied(jax.grad(lambda *a: jaxconv.accelerate(stem)(*a).sum())) == 0

    def read_twice(x: Any, w: Any, b: Any) -> Any:
        y = lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        y = jax.nn.relu(y + b)
        return lax.reduce_window(y, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME"), y.mean()

    assert applied(jaxconv.accelerate(read_twice)) == 0
    np.testing.assert_allclose(jax.jit(jaxconv.accelerate(stem))(*ARGUMENTS), stem(*ARGUMENTS), 1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_conversions_become_the_calls(dtype, monkeypatch):
    """Those of float32 images to 16 bits, and of a frozen network's pooling to 8; not those that others read, too."""
    monkeypatch.setattr(rules, "wants", lambda op, problem, device: op == "conv_pooled")
    x = normal(3, (2, 32, 32, 3)).astype(np.float32)
    rng = np.random.default_rng(0)
    shapes = (7, 7, 3, 16), (3, 3, 16, 16), (3, 3, 16, 16), (16, 4)
    weights = [(rng.standard_normal(s) / np.sqrt(np.prod(s[:-1]))).astype(np.float32) for s in shapes]

    def f(weights: Any, x: Any, twice: bool = False) -> Any:
        first, *middle, last = (w.astype(dtype) for w in weights)
        narrow = x.astype(dtype)
        y = pooled = stem(narrow, first, jnp.zeros(16, dtype))
        for w in middle:
            y = lax.conv_general_dilated(y, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            y = jax.nn.relu(y)
        total = y.mean((1, 2)) @ last
        return (total, narrow.sum(), pooled.sum()) if twice else total

    def calls(twice: bool) -> list[tuple[str, str, bool]]:
        q = jaxconv.freeze(functools.partial(f, twice=twice), weights, quantize="int8", calibrate=[x])
        rules.HEARD.set(heard := [])
        try:
            y = jax.block_until_ready(jax.jit(q)(x))
        finally:
            rules.HEARD.set(None)
        ops = [op for program in heard for op in program.after]
        seen = [(p.x_dtype, p.y_dtype, p.y_scale > 0) for op, p in ops if op == "conv_pooled"]
        monkeypatch.setattr(rules, "wants", lambda op, problem, device: False)
        plain = jaxconv.freeze(functools.partial(f, twice=twice), weights, quantize="int8", calibrate=[x])(x)
        monkeypatch.setattr(rules, "wants", lambda op, problem, device: op == "conv_pooled")
        if dtype != "float32" or jax.default_backend() == "cpu":  # TF32's sums depend on their order
            jax.tree.map(np.testing.assert_array_equal, y, plain)
        return seen

    wide = "float32" if dtype != "float32" else ""
    assert calls(False) == [(wide, "uint8", True)]
    assert calls(True) == [("", "", False)]


@pytest.mark.parametrize("more", [0.0, 1.0])
def test_only_the_other_conversion_stays(more, monkeypatch):
    """One that is not reference.stored."""
    monkeypatch.setattr(rules, "wants", lambda op, problem, device: op == "conv_pooled")

    @jax.custom_jvp
    def convert(y: Any) -> Any:
        v = y.astype(jnp.float32) * np.float32(3)
        return reference.narrowed(v + np.float32(more) if more else v, "uint8")

    convert.defjvp(lambda primals, tangents: (convert(*primals), np.zeros(convert(*primals).shape, jax.dtypes.float0)))
    f = jaxconv.accelerate(lambda *args: convert(stem(*args)))
    rules.HEARD.set(heard := [])
    try:
        got = jax.block_until_ready(jax.jit(f)(*ARGUMENTS))
    finally:
        rules.HEARD.set(None)
    (problem,) = (p for program in heard for op, p in program.after if op == "conv_pooled")
    assert problem.y_dtype == ("" if more else "uint8")
    np.testing.assert_array_equal(got, convert(stem(*ARGUMENTS)))


@pytest.mark.skipif(jax.device_count() < 2, reason="a mesh takes two devices")
@pytest.mark.parametrize(
    "of_x, of_w",
    [(P("a"), P()), (P(None, "a"), P()), (P(), P(None, None, None, "a"))],
    ids=["images", "rows", "filters"],
)
def test_on_a_mesh(of_x, of_w, monkeypatch):
    """Where the plan takes it: images stay where they are, and rows are exchanged."""
    monkeypatch.setattr(rules, "wants", lambda op, problem, device: op == "conv_pooled")
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    args = [jnp.asarray(normal(i, a.shape), "float32") for i, a in enumerate(ARGUMENTS)]
    placed = [
        jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(args, (of_x, of_w, P(*of_w[3:])), strict=True)
    ]
    program = jax.jit(jaxconv.accelerate(stem)).lower(*placed).compile()
    np.testing.assert_allclose(program(*placed), stem(*args), 1e-5, 1e-5)
    assert "all-gather" not in program.as_text() or of_w != P()


@with_hoppers_code
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_of_a_frozen_resnet_by_default(dtype, code_for_gpus):
    """As lowered for an H200: one call, whose result is a quarter of the convolution's."""
    x = jax.ShapeDtypeStruct((256, 224, 224, 3), dtype)
    w, b = jnp.ones((7, 7, 3, 64), dtype), jnp.ones(64, dtype)
    with _plan.Device.assumed(H200), jax.default_matmul_precision("default"):
        frozen = jaxconv.freeze(lambda v, x: stem(x, *v), (w, b))
        text = jax.jit(frozen).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = (line for line in text.splitlines() if "@jaxconv_conv_pooled_v2" in line)
    assert "tensor<256x56x56x64x" in call.rpartition("->")[2] and 'kernel = "stem/sm90_pooled"' in call
    assert "reduce_window" not in text and "@jaxconv_conv_v2" not in text


def test_plans(code_for_gpus, monkeypatch):
    shape = (256, 224, 224, 3), (7, 7, 3, 64), dict(stride=2, padding=3), 3, ((1, 1), (1, 1))
    for dtype in ("bfloat16", "float16", "float32"):
        for device in (H100, H200):
            plan = _plan.plan("conv_pooled", problem(shape, dtype), device)
            assert (plan.implementation, plan.kernel, plan.workspace_bytes) == ("native", "stem/sm90_pooled", 0)
            assert "in the same pass" in plan.reason or "max-pooling" in plan.reason
    p = problem(shape, "bfloat16")
    assert str(p).endswith("max-pool 3x3")
    both = dataclasses.replace(p, x_dtype="float32", y_dtype="uint8", y_scale=0.5)
    assert str(both).endswith("max-pool 3x3 of float32 -> uint8")
    assert _plan.plan("conv_pooled", both, H200).kernel == "stem/sm90_pooled"
    for other, device, why in (
        (p, A100, "capability 9.0"),
        (p, _plan.Device("cpu"), "CUDA only"),
        (dataclasses.replace(p, implementation="xla"), H200, "'xla' was asked for"),
        (dataclasses.replace(p, algorithm="implicit_gemm"), H200, "'implicit_gemm' was asked for"),
        (dataclasses.replace(p, activation=Activation("gelu")), H200, "relu or relu6"),
        (dataclasses.replace(p, batch=0), H200, "nothing to compute"),
    ):
        plan = _plan.plan("conv_pooled", other, device)
        assert str(plan) == "calls[two]" and why in plan.reason, plan.reason
    one_image = _plan.plan("conv_pooled", dataclasses.replace(p, batch=1), H200)
    assert str(one_image) == "calls[two]", one_image.reason  # whose convolution another kernel makes
    short = problem(((512, 28, 28, 1), (5, 5, 1, 32), dict(padding=2), 2, "VALID"), "bfloat16")
    assert "rows of at most 64 pixels" in _plan.plan("conv_pooled", short, H200).reason
    assert _plan.plan("conv_pooled", dataclasses.replace(short, implementation="native"), H200).kernel == (
        "stem/sm90_pooled"
    )
    native = dataclasses.replace(p, batch=1, implementation="native")
    assert _plan.plan("conv_pooled", native, H200).kernel == "stem/sm90_pooled"
    first = problem(CASES["channels first"], "bfloat16", implementation="native")
    assert _plan.plan("conv_pooled", first, H200).asks_channels_last
    for name in ("conv_pooled", "max_pool", "pool", "all"):
        monkeypatch.setenv("JAXCONV_DISABLE", name)
        plan = _plan.plan("conv_pooled", p, H200)
        assert str(plan) == "calls[two]" and "JAXCONV_DISABLE" in plan.reason


BASE = CASES["resnet"]


@pytest.mark.parametrize(
    "case, why",
    [
        (((2, 64, 64, 9), (7, 7, 9, 64), dict(stride=2), 3), "at most 8 input"),
        (((2, 64, 64, 64), (3, 3, 64, 3), {}, 3), "few channels in the array that it reads"),
        ((*BASE[:3], 4), "windows of 2 or 3"),
        ((*BASE[:3], 1), "windows of 2 or 3"),
        ((*BASE[:3], 2, ((1, 1), (1, 1))), "of at most 1"),
        ((*BASE[:3], 3, ((2, 0), (2, 0))), "of at most 1"),
        ((*BASE[:3], 3, ((0, 3), (0, 0))), "lies in the padding"),
        (((2, 3, 32, 32, 3), (1, 3, 3, 3, 16), {}, (2, 3, 3), "VALID"), "on the first of three axes"),
        (((2, 64, 64, 3), (7, 7, 3, 60), dict(stride=2), 3), "whole 16 bytes"),
        (((1, 64, 64, 3), (7, 7, 3, 1024), dict(stride=2), 3), "too large for shared memory"),
    ],
)
def test_refusals(case, why):
    p = problem(case, "bfloat16")
    plan = _plan.Plan("native", "", "stem/sm90_pooled")
    assert why in (domain.conv_pooled_refusal(plan, p, H200) or ""), domain.conv_pooled_refusal(plan, p, H200)
    base = problem(BASE, "bfloat16")
    assert domain.conv_pooled_refusal(plan, base, H200) is None
    assert "only stem/sm90_pooled" in domain.conv_pooled_refusal(_plan.Plan("native", "", "stem/mma"), base, H200)
    for change, text in (
        (dict(x_dtype="float32", y_dtype="int8", y_scale=0.5), None),
        (dict(batch=0), "there is nothing to compute"),
        (dict(x_dtype="float16"), "beside 16 bits it reads float32"),
        (dict(y_dtype="float8_e4m3fn", y_scale=0.5), "it makes int8 and uint8 of multiples of 16"),
    ):
        why = domain.conv_pooled_refusal(plan, dataclasses.replace(base, **change), H200)
        assert why == text if text is None else text in (why or "")
    for odd, change, text in (
        (
            ((2, 64, 64, 4), (7, 7, 4, 64), dict(stride=2), 3),
            dict(x_dtype="float32"),
            "beside 16 bits it reads float32",
        ),
        (
            ((2, 64, 62, 3), (7, 7, 3, 64), dict(stride=2), 3),
            dict(x_dtype="float32"),
            "beside 16 bits it reads float32",
        ),
        (((2, 64, 64, 3), (7, 7, 3, 24), dict(stride=2), 3), dict(y_dtype="int8", y_scale=1.0), "multiples of 16"),
    ):
        why = domain.conv_pooled_refusal(plan, dataclasses.replace(problem(odd, "bfloat16"), **change), H200)
        assert text in (why or "")
    other = dataclasses.replace(base, pool_stride=(1, 1), pool_spatial=(32, 32))
    assert "step by 2" in domain.conv_pooled_refusal(plan, other, H200)


def test_every_case_fits():
    for dtype in ("bfloat16", "float32"):
        for name, case in CASES.items():
            p = dataclasses.replace(problem(case, dtype), channels_last=True)
            why = domain.conv_pooled_refusal(_plan.Plan("native", "", "stem/sm90_pooled"), p, H200)
            assert why == ("it needs at most 16 bytes of the few channels" if wide(case, dtype) else None), name

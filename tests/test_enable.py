"""`jaxconv.enable`: lax's convolutions, whoever wrote or derived them, become jaxconv's calls when they are lowered.

Inputs are small integers, so that sums are exact and lax's numbers are demanded to the last bit. `calls` and `left_in`
count in the compiled HLO what became of each convolution.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import functools
import os
import pathlib
import re
import subprocess
import sys
import threading

import flax.linen as nn
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxconv
from jaxconv import _enable, _plan
from jaxconv._core import compat
from jaxconv._enable import forms
from jaxconv._plan import measured

P = PartitionSpec
CONV = lax.conv_general_dilated_p
native = functools.partial(jaxconv.enabled, implementation="native")
on_cpu = pytest.mark.skipif(helpers.PLATFORM != "cpu", reason="what the plan gives to native code on a CPU")


def conv(numbers, stride=1, padding="SAME", base=1, dilation=1, groups=1, **options):
    """A function of lax's two operands."""
    nd = len(numbers[0]) - 2
    return functools.partial(
        lax.conv_general_dilated,
        window_strides=(stride,) * nd,
        padding=[padding] * nd if isinstance(padding, tuple) else padding,
        lhs_dilation=(base,) * nd,
        rhs_dilation=(dilation,) * nd,
        dimension_numbers=numbers,
        feature_group_count=groups,
        **options,
    )


def arrays(numbers, groups=1, n=3, c=4, k=8, dtype="float32"):
    """Operands for `conv`: images of 6x7x9 and filters of 2x3x2, or the last of these."""
    image, taps = dict(zip("DHW", (6, 7, 9), strict=True)), dict(zip("DHW", (2, 3, 2), strict=True))
    x = helpers.integers(0, tuple({"N": n, "C": c, **image}[a] for a in numbers[0]))
    w = helpers.integers(1, tuple({"I": c // groups, "O": k, **taps}[a] for a in numbers[1]))
    return jnp.asarray(x, dtype), jnp.asarray(w, dtype)


def gradients(f):
    """A function of f's operands and a cotangent: f's result and both gradients."""

    def all_three(x, w, dy):
        y, vjp = jax.vjp(f, x, w)
        return y, *vjp(dy)

    return all_three


def like(f, *args, seed=2):
    result = jax.eval_shape(f, *args)
    return jax.tree.map(lambda a: jnp.asarray(helpers.integers(seed, a.shape, 1), a.dtype), result)


def fresh(f):
    """f as a function that no cache knows."""
    return lambda *args: f(*args)


def left_in(f, *args):
    """(XLA's convolutions, reversals) in f's compiled HLO."""
    text = jax.jit(f).lower(*args).compile().as_text()
    return len(re.findall(r" convolution\(|__cudnn\$conv\w+\"", text)), len(re.findall(r" reverse\(", text))


def lowered(f, *args):
    return jax.jit(fresh(f)).lower(*args).as_text()


def assert_native(f, args, expected, reversals=None):
    """With enable on f calls `expected` and no convolution of XLA's, and has lax's numbers."""
    with jaxconv.disabled():
        want = jax.jit(fresh(f))(*args)
    with native():
        g = jax.jit(fresh(f))
        got = g(*args)
        assert helpers.calls(g, *args) == expected
        convolutions, reversed_ = left_in(g, *args)
    assert convolutions == 0
    assert reversals is None or reversed_ == reversals
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        # Integers, which cuDNN's transforms (FFT, Winograd) round: a tap too many or too few is off by one or more.
        atol = 1e-3 if jax.default_backend() == "gpu" else 0
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=0, atol=atol)


ONE_EACH = {"conv_fprop": 1, "conv_dgrad": 1, "conv_wgrad": 1}

# Flax, Keras, Haiku; PyTorch's and Equinox's; Keras's and Haiku's channels first; cuDNN's; spatial axes the other way
LAYOUTS = [
    ("NHWC", "HWIO", "NHWC"),
    ("NCHW", "OIHW", "NCHW"),
    ("NCHW", "HWIO", "NCHW"),
    ("NHWC", "OHWI", "NHWC"),
    ("NWHC", "HWIO", "NWHC"),
    ("NWC", "WIO", "NWC"),
    ("NCW", "OIW", "NCW"),
    ("NDHWC", "DHWIO", "NDHWC"),
    ("NCDHW", "OIDHW", "NCDHW"),
]
KINDS = {
    "plain": {},
    "valid": dict(padding="VALID"),
    "strided": dict(stride=2),
    "strided_valid": dict(stride=2, padding="VALID"),
    "dilated": dict(dilation=2, padding=(2, 1)),
    "strided_dilated": dict(stride=2, dilation=2, padding=(3, 1)),
    "cropping": dict(padding=(-1, 2)),
    "grouped": dict(groups=2),
    "depthwise": dict(groups=4),
    "strided_grouped": dict(stride=2, groups=2, padding=(1, 1)),
    "transposed": dict(base=2, padding=(2, 1)),
    "transposed_grouped": dict(base=2, groups=2, padding=(1, 1)),
    "transposed_dilated": dict(base=3, dilation=2, padding=(1, 3)),
}
FORMS = [(layout, "strided") for layout in LAYOUTS]
FORMS += [(LAYOUTS[i], kind) for kind in KINDS for i in (0, 1) if kind != "strided"]
FORMS += [(LAYOUTS[7], kind) for kind in ("grouped", "transposed_grouped")]
LABELS = ["-".join(layout[:2]) + "-" + kind for layout, kind in FORMS]


# ----------------------------------------------------------------------------------------------------------------------
# Forms


@pytest.mark.parametrize("numbers, kind", FORMS, ids=LABELS)
def test_a_layer_and_its_gradients_are_fprop_dgrad_and_wgrad(numbers, kind):
    f = conv(numbers, **KINDS[kind])
    x, w = arrays(numbers, KINDS[kind].get("groups", 1))
    # What lax reverses for dgrad, XLA removes. A transposed convolution's filter has to be reversed.
    reversals = None if "transposed" in kind else 0
    assert_native(gradients(f), (x, w, like(f, x, w)), ONE_EACH, reversals)


@pytest.mark.parametrize("kind", ["strided", "strided_dilated", "strided_grouped", "depthwise", "transposed_grouped"])
@pytest.mark.parametrize("numbers", LAYOUTS[:2], ids="-".join)
def test_gradients_of_gradients(numbers, kind):
    f = conv(numbers, **KINDS[kind])
    x, w = arrays(numbers, KINDS[kind].get("groups", 1), n=2)
    dy = like(f, x, w)
    cotangents = like(gradients(f), x, w, dy, seed=3)

    def second(x, w, dy, cts):
        return jax.vjp(gradients(f), x, w, dy)[1](cts)

    assert_native(second, (x, w, dy, cotangents), dict.fromkeys(ONE_EACH, 2))


def test_third_derivatives():
    f = conv(LAYOUTS[0], stride=2, padding=(1, 0), precision="highest")  # integers beyond TF32's
    x, w = arrays(LAYOUTS[0], n=1, c=2, k=2)

    def first(x, w):
        return jnp.vdot(f(x, w), jnp.round(f(x, w) / 2))

    def second(x, w):
        dx, dw = jax.grad(first, (0, 1))(x, w)
        return jnp.sum(dx) + jnp.sum(dw)

    def third(x, w):
        dx, dw = jax.grad(second, (0, 1))(x, w)
        return jnp.sum(dx * x) + jnp.sum(dw)

    with jaxconv.disabled():
        want = jax.jit(fresh(jax.grad(third, (0, 1))))(x, w)
    with native():
        g = jax.jit(fresh(jax.grad(third, (0, 1))))
        got = g(x, w)
        assert left_in(g, x, w)[0] == 0
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_types(dtype):
    f = conv(LAYOUTS[0], stride=2)
    x, w = arrays(LAYOUTS[0], dtype=dtype, n=1, c=2, k=4)
    x, w = jnp.sign(x), jnp.sign(w)  # sums within the integers that 16 bits hold
    assert_native(gradients(f), (x, w, like(f, x, w)), ONE_EACH)


@pytest.mark.skipif(helpers.PLATFORM != "cpu", reason="float64 has native code on the CPU only")
def test_float64(x64):
    f = conv(LAYOUTS[1])
    x, w = arrays(LAYOUTS[1], dtype="float64")
    assert_native(gradients(f), (x, w, like(f, x, w)), ONE_EACH)


@pytest.mark.parametrize("kind", ["plain", "valid", "strided", "strided_valid", "dilated", "grouped", "depthwise"])
@pytest.mark.parametrize("numbers", LAYOUTS, ids=["-".join(layout[:2]) for layout in LAYOUTS])
@pytest.mark.parametrize("grow", [0, 1])
def test_the_three_forms_of_a_layer_are_one_problem(numbers, kind, grow):
    """Their padding is the layer's, and not one that comes to the same: what was measured for it speaks for them."""
    f = conv(numbers, **KINDS[kind])
    x, w = arrays(numbers, KINDS[kind].get("groups", 1))
    x = jnp.pad(x, [(0, grow)] * x.ndim) if not KINDS[kind].get("groups") else x
    w = jnp.pad(w, [(0, grow if a in "I" else 0) for a in numbers[1]]) if not KINDS[kind].get("groups") else w
    jaxpr = jax.make_jaxpr(gradients(f))(x, w, like(f, x, w))
    found = {}
    for equation in jaxpr.eqns:
        if equation.primitive is CONV:
            avals = [v.aval for v in (*equation.invars, *equation.outvars)]
            form = forms.read(*avals, equation.params)
            found[form.form] = form.problem
    assert set(found) == {"fprop", "dgrad", "wgrad"}
    assert len(set(found.values())) == 1, found


def test_batch_groups_that_somebody_wrote():
    f = conv(LAYOUTS[0], batch_group_count=2)
    x, w = arrays(LAYOUTS[0], n=4)
    assert_native(gradients(f), (x, w, like(f, x, w)), ONE_EACH)


def test_precision_is_that_of_the_trace():
    f, (x, w) = conv(LAYOUTS[0]), arrays(LAYOUTS[0])

    def read(jaxpr):
        (equation,) = jaxpr.eqns
        return forms.read(x, w, equation.outvars[0].aval, equation.params).problem.precision

    plain = jax.make_jaxpr(f)(x, w)
    with jax.default_matmul_precision("highest"):
        assert read(plain) == (lax.Precision.DEFAULT,) * 2
        assert read(jax.make_jaxpr(f)(x, w)) == (lax.Precision.HIGHEST,) * 2
    mixed = jax.make_jaxpr(functools.partial(f, precision=("high", "highest")))(x, w)
    assert read(mixed) == (lax.Precision.HIGH, lax.Precision.HIGHEST)


# ----------------------------------------------------------------------------------------------------------------------
# Transforms


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0), (2, 1)], ids=str)
@pytest.mark.parametrize("kind", ["strided", "grouped", "transposed"])
def test_vmap_of_a_layer_and_of_its_gradients(kind, axes):
    f = conv(LAYOUTS[0], **KINDS[kind])
    x, w = arrays(LAYOUTS[0], KINDS[kind].get("groups", 1), n=2)
    dy = like(f, x, w)
    args = tuple(a if axis is None else jnp.stack([a, -a, a + 1], axis) for a, axis in zip((x, w), axes, strict=True))
    assert_native(jax.vmap(gradients(f), (*axes, None)), (*args, dy), ONE_EACH)


def test_per_example_gradients():
    f = conv(LAYOUTS[1], stride=2, groups=2)
    x, w = arrays(LAYOUTS[1], 2, n=5)

    def one(w, x):
        return jnp.sum(f(x[None], w) ** 2)

    assert_native(jax.vmap(jax.grad(one), (None, 0)), (w, x), {"conv_fprop": 1, "conv_wgrad": 1})


def test_forward_mode():
    f, (x, w) = conv(LAYOUTS[0], stride=2), arrays(LAYOUTS[0])
    assert_native(lambda x, w: jax.jvp(f, (x, w), (-x, w + 1)), (x, w), {"conv_fprop": 3})

    def product(x, w):  # forward over reverse
        return jax.jvp(jax.grad(lambda x: jnp.sum(f(x, w) ** 2)), (x,), (x,))[1]

    assert_native(product, (x, w), {"conv_fprop": 1, "conv_dgrad": 1})


def test_remat_scan_cond_and_nested_jit():
    f = conv(LAYOUTS[0])
    x, w = arrays(LAYOUTS[0], k=4)
    ws = jnp.sign(jnp.stack([w, -w]))
    x = jnp.sign(x)

    @jax.checkpoint
    def layer(x, w):
        return jnp.clip(jax.jit(f)(x, w), -1, 1)

    def loss(ws, x):
        x, _ = lax.scan(lambda x, w: (layer(x, w), None), x, ws)
        return jnp.sum(lax.cond(x[0, 0, 0, 0] > 5, lambda: f(x, ws[0]), lambda: -f(x, ws[1])))

    with jaxconv.disabled():
        want = jax.jit(fresh(jax.grad(loss, (0, 1))))(ws, x)
    with native():
        g = jax.jit(fresh(jax.grad(loss, (0, 1))))
        got = g(ws, x)
        assert left_in(g, ws, x)[0] == 0
        assert helpers.calls(g, ws, x)["conv_fprop"] >= 2  # the scan's, and remat's again in the scan backwards
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_eager_calls():
    f, (x, w) = conv(LAYOUTS[0]), arrays(LAYOUTS[0])
    with jaxconv.disabled():
        want = f(x, w)
    jaxconv.report(clear=True)
    with native():
        got = f(x, w)
    (one,) = jaxconv.report(clear=True)
    assert one.taken and one.form == "fprop"
    np.testing.assert_array_equal(got, want)


# ----------------------------------------------------------------------------------------------------------------------
# A whole program


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(8, (3, 3), name="stem")(x))
        x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(8, (3, 3), strides=2, feature_group_count=8)(x)))
        x = nn.relu(nn.Conv(12, (3, 3), kernel_dilation=2, feature_group_count=4)(x))
        x = nn.relu(nn.ConvTranspose(8, (3, 3), strides=(2, 2))(x))
        lines = nn.Conv(4, (5,))(x.reshape(*x.shape[:1], -1, x.shape[-1]))
        planes = nn.Conv(4, (3, 3, 3))(x[..., None])
        return nn.Dense(5)(jnp.concatenate([lines.mean(1), planes.mean((1, 2, 3))], -1))


def net():
    x = jnp.asarray(helpers.normal(0, (4, 12, 12, 3)), jnp.float32)
    labels = jnp.arange(4)
    model = Net()
    variables = model.init(jax.random.key(0), x)

    def loss(params, state):
        logits, state = model.apply({"params": params, **state}, x, mutable=["batch_stats"])
        return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(4), labels]), state

    def step(params, state):
        (value, state), grads = jax.value_and_grad(loss, has_aux=True)(params, state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), state, value

    return loss, step, variables["params"], {"batch_stats": variables["batch_stats"]}


def train(step, params, state):
    run, losses = jax.jit(fresh(step)), []
    for _ in range(4):
        params, state, value = run(params, state)
        losses.append(float(value))
    return losses


@pytest.fixture
def full_float32():
    """float32's accuracy on a GPU too."""
    with jax.default_matmul_precision("highest"):
        yield


def test_a_flax_train_step(full_float32):
    """Six convolutions: forward, and the gradient of each filter and of each image but the first."""
    _, step, params, state = net()
    want = train(step, params, state)
    jaxconv.report(clear=True)
    with native():
        got = train(step, params, state)
        found = jaxconv.report(clear=True)
        # A transposed convolution's forward is a dgrad, its image's gradient an fprop.
        assert helpers.calls(fresh(step), params, state) == {"conv_fprop": 6, "conv_dgrad": 5, "conv_wgrad": 6}
    assert {form: sum(c.count for c in found if c.form == form) for form in ("fprop", "dgrad", "wgrad")} == {
        "fprop": 6,
        "dgrad": 5,
        "wgrad": 6,
    }
    assert not found.left and any("/stem" in where for c in found for where in c.where)
    # Sums of 10,000 terms and less in float32, four steps of training: some hundred roundings of 6e-8.
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert want[-1] < want[0]


def test_accelerate_fuses_what_it_sees_and_enable_takes_the_rest(full_float32):
    loss, _, params, state = net()
    fused = jaxconv.accelerate(loss)
    report = fused.report(params, state)
    assert any(f.what == "conv" and "relu" in f.fused for f in report.replaced)

    def both(params, state):  # nobody has accelerated the penalty
        w = params["stem"]["kernel"]
        return fused(params, state)[0] + jnp.sum(conv(LAYOUTS[0])(jnp.ones((1, 9, 9, 3)), w) ** 2)

    g = jax.grad(both)
    want = jax.jit(fresh(g))(params, state)
    without = helpers.calls(fresh(g), params, state)
    jaxconv.report(clear=True)
    with native():
        got = jax.jit(fresh(g))(params, state)
        found = jaxconv.report(clear=True)
        calls = helpers.calls(fresh(g), params, state)
    assert {c.form for c in found} == {"fprop", "wgrad"} and not found.left  # the penalty's
    assert calls == without + collections.Counter({"conv_fprop": 1, "conv_wgrad": 1})
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        # The penalty's are sums of 81 terms: some ten roundings of the largest.
        np.testing.assert_allclose(a, b, rtol=0, atol=10 * np.finfo(np.float32).eps * float(jnp.abs(b).max()))


# ----------------------------------------------------------------------------------------------------------------------
# What is left to lax


def pair(x, w, numbers=LAYOUTS[0], **options):
    return functools.partial(conv(numbers, **options)), jnp.ones(x), jnp.ones(w)


def typed(dtype, **options):
    return of_type(dtype, pair((2, 5, 5, 4), (3, 3, 4, 8), **options))


def of_type(dtype, one):
    f, x, w = one
    return f, x.astype(dtype), w.astype(dtype)


LEFT = {
    "no integers": (lambda: of_type("int8", pair((0, 5, 5, 4), (3, 3, 4, 8))), "an array is empty"),
    "integers in four dimensions": (lambda: of_type("int8", four()), "it has 4 spatial dimensions"),
    "complex numbers": (lambda: typed("complex64"), "its types are complex64"),
    "wider results": (lambda: typed("bfloat16", preferred_element_type=jnp.float32), "bfloat16 to float32"),
    "strides on both sides": (lambda: pair((2, 5, 5, 4), (3, 3, 4, 8), stride=2, base=2, padding=(1, 1)), "both"),
    "another order": (
        lambda: pair((4, 5, 5, 2), (3, 3, 4, 8), ("CHWN", "HWIO", "CHWN")),
        "neither channels last nor channels first (CHWN, HWIO, CHWN)",
    ),
    "two orders": (lambda: pair((2, 5, 5, 4), (3, 3, 4, 8), ("NHWC", "HWIO", "NCHW")), "neither channels last"),
    "no dilation": (
        lambda: without_dilation("float32"),
        "its rhs_dilation has 0 entries, expected one for each of 2 spatial dimensions",
    ),
    "no dilation of integers": (lambda: without_dilation("int8"), "its rhs_dilation has 0 entries"),
    "no images": (lambda: pair((0, 5, 5, 4), (3, 3, 4, 8)), "an array is empty"),
    "no space": (lambda: pair((2, 4), (4, 8), ("NC", "IO", "NC")), "it has 0 spatial dimensions"),
    "four dimensions": (lambda: four(), "it has 4 spatial dimensions"),
}


def without_dilation(dtype):
    f = functools.partial(lax.conv_general_dilated, window_strides=(1, 1), padding="VALID", rhs_dilation=())
    return f, jnp.ones((1, 3, 3, 3), dtype), jnp.ones((2, 3, 1, 1), dtype)


def four():
    numbers = lax.ConvDimensionNumbers((0, 5, 1, 2, 3, 4), (5, 4, 0, 1, 2, 3), (0, 5, 1, 2, 3, 4))
    f = functools.partial(
        lax.conv_general_dilated, window_strides=(1,) * 4, padding=[(1, 0)] * 4, dimension_numbers=numbers
    )
    return f, jnp.ones((2, 3, 3, 3, 3, 4)), jnp.ones((2, 2, 2, 2, 4, 4))


@pytest.mark.parametrize("case", LEFT)
def test_what_jaxconv_does_not_have_is_laxs_to_the_letter_and_named(case):
    (f, x, w), why = LEFT[case][0](), LEFT[case][1]
    want = lowered(f, x, w)
    jaxconv.report(clear=True)
    with native():
        text = lowered(f, x, w)
    if case == "integers in four dimensions" and helpers.PLATFORM == "cuda":  # which XLA has no kernel for, either
        assert "convolution" not in text
    else:
        assert text == want
    (one,) = jaxconv.report(clear=True)
    assert not one.taken and one.became == "lax" and why in one.why


def test_a_parameter_that_a_later_jax_may_add():
    f, (x, w) = conv(LAYOUTS[0]), arrays(LAYOUTS[0])
    (equation,) = jax.make_jaxpr(f)(x, w).eqns
    out = equation.outvars[0].aval
    assert isinstance(forms.read(x, w, out, {**equation.params, "new": None}), forms.Form)
    assert forms.read(x, w, out, {**equation.params, "new": 3}).endswith("does not know: new")


@on_cpu
def test_where_the_plan_says_xla_the_program_is_laxs_to_the_letter():
    f, (x, w) = conv(LAYOUTS[0], stride=2), arrays(LAYOUTS[0])
    dx = jax.grad(lambda x, w: jnp.sum(f(x, w) ** 2))
    want = lowered(dx, x, w)
    jaxconv.report(clear=True)
    with jaxconv.enabled():
        assert lowered(dx, x, w) == want
    found = jaxconv.report(clear=True)
    assert {c.form for c in found.left} == {"fprop", "dgrad"} and not found.taken
    f, (x, w) = conv(LAYOUTS[0], stride=2, groups=4), arrays(LAYOUTS[0], groups=4)
    with jaxconv.enabled():  # there it does not
        assert helpers.calls(jax.grad(lambda w: jnp.sum(f(x, w))), w) == {"conv_wgrad": 1}
    assert {c.form for c in jaxconv.report(clear=True).taken} == {"wgrad"}


def test_jaxconv_disable_holds_here_too(monkeypatch):
    monkeypatch.setenv("JAXCONV_DISABLE", "conv")
    f, (x, w) = conv(LAYOUTS[0], groups=4), arrays(LAYOUTS[0], 4)
    jaxconv.report(clear=True)
    with native():
        assert not helpers.calls(fresh(f), x, w)
    assert "JAXCONV_DISABLE=conv" in jaxconv.report(clear=True)[0].why


def test_what_a_jaxconv_call_gives_to_xla_stays_xlas():
    x, w = arrays(LAYOUTS[0])

    def f(x, w):
        forced = functools.partial(jaxconv.conv2d, padding="SAME", implementation="xla")
        return gradients(forced)(x, w, like(forced, x, w)), conv(LAYOUTS[0])(x, w)

    with native():
        assert helpers.calls(fresh(f), x, w) == {"conv_fprop": 1}
        assert left_in(fresh(f), x, w)[0] == 3


def test_cost_counts_as_without_it():
    f, (x, w) = conv(LAYOUTS[0]), arrays(LAYOUTS[0])
    want = jaxconv.cost(f)(x, w)
    with native():
        assert jaxconv.cost(f)(x, w) == want
    # XLA counts nothing of what cuDNN runs.
    assert want["flops"] > 0 or jax.default_backend() == "gpu"


def test_exported_programs():
    f, (x, w) = conv(LAYOUTS[0]), arrays(LAYOUTS[0])
    jaxconv.report(clear=True)
    with native():
        exported = jax.export.export(jax.jit(fresh(f)))(x, w)
        symbolic = jax.export.symbolic_args_specs((x, w), ("n, 7, 9, 4", "3, 2, 4, 8"))
        jax.export.export(jax.jit(fresh(f)))(*symbolic)
    assert not helpers.targets(exported.mlir_module())
    assert all("exported" in one.why for one in jaxconv.report(clear=True))
    np.testing.assert_array_equal(exported.call(x, w), f(x, w))


FOR_SEVERAL = {
    "layer": (lambda x, w: lax.conv(x, w, (1, 1), "SAME"), (2, 3, 5, 5), (4, 3, 3, 3), jnp.float32),
    "gradients": (
        jax.grad(lambda x, w: jnp.sum(lax.conv(x, w, (2, 2), "SAME") ** 2), (0, 1)),
        (2, 3, 5, 5),
        (4, 3, 3, 3),
        jnp.float32,
    ),
    "integers": (lambda x, w: lax.conv(x, w, (1, 1), "SAME"), (2, 3, 5, 5), (4, 3, 3, 3), jnp.int32),
    "complex": (lambda x, w: lax.conv(x, w, (1, 1), "SAME"), (2, 3, 5, 5), (4, 3, 3, 3), jnp.complex64),
    "convolve": (jnp.convolve, (9,), (3,), jnp.float32),
}


@pytest.mark.parametrize(
    "platforms", [("cpu", "tpu"), ("cpu", "cuda", "tpu"), ("tpu", "cuda", "rocm"), ("tpu",)], ids=str
)
@pytest.mark.parametrize("case", FOR_SEVERAL)
def test_a_program_exported_for_several_platforms_is_laxs(case, platforms):
    f, *shapes, dtype = FOR_SEVERAL[case]
    args = [jnp.asarray(helpers.integers(i, shape), dtype) for i, shape in enumerate(shapes)]

    def text(exported):  # without source locations
        return re.sub(r" loc\(.*$|^#loc.*\n", "", exported.mlir_module(), flags=re.MULTILINE)

    want = jax.export.export(jax.jit(fresh(f)), platforms=platforms)(*args)
    for how in ({}, {"implementation": "native"}, {"implementation": "xla"}):
        with jaxconv.enabled(**how):
            exported = jax.export.export(jax.jit(fresh(f)), platforms=platforms)(*args)
        if case == "integers" and "cuda" in platforms:  # XLA has no convolution of integers for it, but products
            assert "dot_general" in text(exported) and not helpers.targets(exported.mlir_module())
        else:
            assert text(exported) == text(want), how
    if jax.default_backend() in platforms:
        for a, b in zip(jax.tree.leaves(exported.call(*args)), jax.tree.leaves(f(*args)), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("platforms", [("cpu", "tpu"), ("cpu", "cuda"), ("tpu", "cpu", "rocm")], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_program_lowered_for_several_platforms_takes_each_ones_plan(platforms, dtype):
    (x, w), f = arrays(LAYOUTS[0], dtype=dtype), gradients(conv(LAYOUTS[0]))
    dy = like(conv(LAYOUTS[0]), x, w)

    def several():
        return jax.jit(fresh(f)).trace(x, w, dy).lower(lowering_platforms=platforms).as_text()

    with jaxconv.enabled(implementation="xla"):
        left = several()
    assert left == several()  # with enable off
    jaxconv.report(clear=True)
    with native():
        taken = several()
    counts = collections.Counter(re.findall(r"@jaxconv_(\w+)_v\d", taken))
    known = counts["conv_fprop"]  # on how many of the platforms jaxconv has native code here
    assert counts == {name: known for name in ONE_EACH} and known >= 1
    # elsewhere lax's
    lax_has = len(platforms) - known
    assert "stablehlo.case" in taken and taken.count("stablehlo.convolution") == 3 * lax_has
    assert sum(one.count for one in jaxconv.report(clear=True).taken) == 3 * known


def test_what_the_host_computes_for_a_device():
    from jax._src.compute_on import extend_compute_type  # what compute_on, which 0.11 changed, enters

    f, (x, w) = conv(LAYOUTS[0]), arrays(LAYOUTS[0])

    def g(x, w):
        with extend_compute_type("device_host"):
            return f(x, w)

    jaxconv.report(clear=True)
    with native():
        jax.jit(g).lower(x, w)
    (one,) = jaxconv.report(clear=True)
    assert not one.taken and "compute_on sends it to another device" in one.why


# ----------------------------------------------------------------------------------------------------------------------
# Several devices


def on_mesh(kind, spec):
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    mesh = jax.make_mesh((4,), ("b",), axis_types=(kind,))
    x, w = arrays(LAYOUTS[0], n=8)
    x = x[:, :, :8]
    return mesh, jax.device_put(x, NamedSharding(mesh, spec)), jax.device_put(w, NamedSharding(mesh, P()))


def of_layer(x, w):
    return jax.grad(lambda x, w: jnp.sum(conv(LAYOUTS[0])(x, w) ** 2), (0, 1))(x, w)


def collectives(f, *args):
    text = jax.jit(f).lower(*args).compile().as_text()
    return {name: len(re.findall(rf" {name}\(", text)) for name in ("all-gather", "all-reduce", "collective-permute")}


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=str)
@pytest.mark.parametrize("split", [P("b"), P(None, None, "b")], ids=["batch", "width"])
def test_programs_that_xla_partitions(kind, split):
    mesh, x, w = on_mesh(kind, split)
    with jax.set_mesh(mesh):
        want, moved = jax.jit(fresh(of_layer))(x, w), collectives(fresh(of_layer), x, w)
        text = lowered(of_layer, x, w)
        jaxconv.report(clear=True)
        with native():
            got = jax.jit(fresh(of_layer))(x, w)
            found = jaxconv.report(clear=True)
            if kind == AxisType.Explicit:  # rows that a filter reaches are exchanged, as lax does
                assert helpers.calls(fresh(of_layer), x, w) == ONE_EACH
            else:
                assert lowered(of_layer, x, w) == text
                assert {one.form for one in found.left} == set(ONE_EACH_FORM)
                assert all("a lowering cannot see how" in one.why for one in found)
            ours = collectives(fresh(of_layer), x, w)
            assert ours["all-gather"] == moved["all-gather"] == 0
            assert all(ours[name] <= moved[name] for name in ours)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-5)


ONE_EACH_FORM = ("fprop", "dgrad", "wgrad")


def test_auto_meshes_on_request():
    mesh, x, w = on_mesh(AxisType.Auto, P("b"))
    with jax.set_mesh(mesh):
        want, moved = jax.jit(fresh(of_layer))(x, w), collectives(fresh(of_layer), x, w)
        with jaxconv.enabled(implementation="native", auto_meshes=True):
            got = jax.jit(fresh(of_layer))(x, w)
            assert helpers.calls(fresh(of_layer), x, w) == ONE_EACH
            assert collectives(fresh(of_layer), x, w) == moved
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_inside_shard_map():
    mesh, x, w = on_mesh(AxisType.Auto, P("b"))
    loss = jax.shard_map(
        lambda x, w: lax.psum(jnp.sum(conv(LAYOUTS[0])(x, w) ** 2), "b"),
        mesh=mesh,
        in_specs=(P("b"), P()),
        out_specs=P(),
    )
    assert_native(jax.grad(loss, (0, 1)), (x, w), ONE_EACH)


def test_inside_pmap():
    _, x, w = on_mesh(AxisType.Auto, P("b"))
    x = jax.device_get(x).reshape(4, 2, *x.shape[1:])
    want = jax.pmap(fresh(of_layer), in_axes=(0, None))(x, w)
    jaxconv.report(clear=True)
    with native():
        got = jax.pmap(fresh(of_layer), in_axes=(0, None))(x, w)
    found = jaxconv.report(clear=True)
    assert not found.left and {one.form for one in found} == set(ONE_EACH_FORM)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


# ----------------------------------------------------------------------------------------------------------------------
# On and off


def rules():
    from jax._src.interpreters import mlir

    tables = {p: dict(table) for p, table in mlir._platform_specific_lowerings.items()}
    return tables, dict(mlir._lowerings), set(mlir._uncacheable_primitives)


def devices_needed():
    from jax._src import dispatch

    return CONV in dispatch.prim_requires_devices_during_lowering


@pytest.fixture
def process_wide():
    """Leaves enable off, whatever the test does."""
    yield
    jaxconv.disable()


def test_enable_and_disable(process_wide):
    before = rules()
    f, (x, w) = conv(LAYOUTS[0]), arrays(LAYOUTS[0])
    g = jax.jit(fresh(f))
    g(x, w)
    jaxconv.enable(implementation="native")
    jaxconv.enable(implementation="native", auto_meshes=True)  # twice is once
    assert rules()[0] != before[0] and devices_needed()
    assert helpers.calls(g, x, w) == {"conv_fprop": 1}
    jaxconv.disable()
    assert rules() == before and not devices_needed()
    assert not helpers.calls(g, x, w)
    jaxconv.disable()  # nothing to undo
    assert rules() == before


def test_the_innermost_block_holds(process_wide):
    f, (x, w) = conv(LAYOUTS[0]), arrays(LAYOUTS[0])
    before = rules()

    def taken():
        return sum(helpers.calls(fresh(f), x, w).values())

    with native():
        assert taken() == 1
        with jaxconv.disabled():
            assert taken() == 0
            with native():
                assert taken() == 1
        with jaxconv.enabled(implementation="xla"):
            assert taken() == 0
        assert taken() == 1
        jaxconv.disable()  # the process's, not this block's
        assert taken() == 1
    assert taken() == 0 and rules() == before
    jaxconv.enable(implementation="native")
    with jaxconv.disabled():
        assert taken() == 0
    with pytest.raises(RuntimeError), jaxconv.enabled(implementation="xla"):
        raise RuntimeError
    assert taken() == 1
    jaxconv.disable()
    assert rules() == before


def test_a_compiled_program_is_used_again_and_never_for_the_other(process_wide):
    f, (x, w) = conv(LAYOUTS[0]), arrays(LAYOUTS[0])
    traces = []

    @jax.jit
    def g(x, w):
        traces.append(1)
        return f(x, w)

    def lowerings():
        return sum(one.count for one in jaxconv.report(clear=True))

    lowerings()
    want = g(x, w)
    for count in (1, 0):  # compiled once, then found
        with native():
            np.testing.assert_array_equal(g(x, w), want)
            assert lowerings() == count
            assert helpers.calls(g, x, w) == {"conv_fprop": 1}
            lowerings()
        g(x, w)
        assert lowerings() == 0
        assert not helpers.calls(g, x, w)
    jaxconv.enable(implementation="native")  # the same arguments: the same programs
    g(x, w)
    assert lowerings() == 0
    assert len(traces) == 2 and g._cache_size() == 2
    compiled = jax.jit(fresh(f)).lower(x, w).compile()
    traced = jax.jit(fresh(f)).trace(x, w)
    jaxconv.disable()
    assert helpers.targets(compiled.as_text()) == {"conv_fprop": 1}
    assert not helpers.targets(traced.lower().as_text())  # lowered now


def test_threads():
    f, (x, w) = conv(LAYOUTS[0]), arrays(LAYOUTS[0])
    g, found, barrier = jax.jit(fresh(f)), {}, threading.Barrier(4)
    before = rules()

    def run(i):
        barrier.wait()
        for _ in range(3):
            with native() if i % 2 else jaxconv.disabled():
                g(x, w)
                found.setdefault(i, []).append(sum(helpers.calls(g, x, w).values()))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: [i % 2] * 3 for i in range(4)}
    assert rules() == before and g._cache_size() == 2


def test_enable_holds_for_threads_that_run_already(process_wide):
    f, (x, w) = conv(LAYOUTS[0]), arrays(LAYOUTS[0])
    go, found = threading.Event(), []

    def run():
        found.append(sum(helpers.calls(fresh(f), x, w).values()))
        go.wait()
        found.append(sum(helpers.calls(fresh(f), x, w).values()))

    thread = threading.Thread(target=run)
    thread.start()
    while not found:
        pass
    jaxconv.enable(implementation="native")
    go.set()
    thread.join()
    assert found == [0, 1]


PERSISTENT = """
import sys
import helpers, jax, jax.numpy as jnp, jaxconv
from jax import lax
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name) if name.endswith("cache_hits") else None)
x, w = jnp.ones((2, 5, 5, 4)), jnp.ones((3, 3, 4, 8))
f = lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
found = []
for _ in range(2):
    for block in (jaxconv.disabled, lambda: jaxconv.enabled(implementation="native")):
        with block():
            jax.clear_caches()
            before = len(hits)
            text = jax.jit(f).lower(x, w).compile().as_text()
            found.append((text.count('custom_call_target="jaxconv_conv_fprop'), len(hits) - before))
print(found)
"""


def run(script, **environment):
    path = os.pathsep.join([str(pathlib.Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_persistent_compilation_cache_keeps_the_two_apart(tmp_path):
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    assert run(PERSISTENT, **cache).splitlines()[-1] == str([(0, 0), (1, 0), (0, 1), (1, 1)])
    assert run(PERSISTENT, **cache).splitlines()[-1] == str([(0, 1), (1, 1), (0, 1), (1, 1)])


FOREIGN = """
import re, sys
import jax, numpy as np
from jax import lax
x, w = np.ones((2, 5, 5, 4), np.float32), np.ones((3, 3, 1, 4), np.float32)
numbers = ("NHWC", "HWIO", "NHWC")
def f(x, w):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=4)
g = jax.jit(f)
g(x, w)  # JAX starts in the middle of this
print("jaxconv" in sys.modules, len(re.findall("@jaxconv_conv_fprop", g.lower(x, w).as_text())))
if "jaxconv" in sys.modules:
    import jaxconv
    jaxconv.disable()
    g(x, w)
    print(g.lower(x, w).compile().as_text().count('custom_call_target="jaxconv_'))
"""


@on_cpu
@pytest.mark.parametrize("value, expected", [("1", "True 1\n0\n"), ("0", "False 0\n"), ("", "False 0\n")])
def test_the_environment_enables_programs_that_do_not_import_jaxconv(value, expected):
    assert run(FOREIGN, JAXCONV_ENABLE=value) == expected


def test_an_unknown_value_in_the_environment(monkeypatch):
    monkeypatch.setenv("JAXCONV_ENABLE", "yes")
    with pytest.warns(UserWarning, match="JAXCONV_ENABLE='yes' is unknown, expected 0 or 1"):
        _enable.from_environment()
    assert not _enable.is_on()


def test_an_unknown_implementation():
    for f in (jaxconv.enable, lambda **kw: jaxconv.enabled(**kw).__enter__()):
        with pytest.raises(ValueError, match="enable: implementation='cudnn' is unknown"):
            f(implementation="cudnn")
    assert not _enable.is_on()


@pytest.mark.parametrize(
    "name", ["_uncacheable_primitives", "_platform_specific_lowerings", "_lowerings", "lower_per_platform"]
)
def test_a_jax_that_has_changed_is_refused_with_a_sentence(monkeypatch, name):
    from jax._src.interpreters import mlir

    before = rules()
    with monkeypatch.context() as patched:
        patched.delattr(mlir, name)
        with pytest.raises(NotImplementedError, match=rf"jaxconv.enable: jax {jax.__version__} .*there is no {name}"):
            jaxconv.enable()
        with pytest.raises(NotImplementedError), jaxconv.enabled():
            pass
        monkeypatch.setenv("JAXCONV_ENABLE", "1")
        with pytest.warns(UserWarning, match="JAXCONV_ENABLE=1: jaxconv.enable: jax"):
            _enable.from_environment()
    assert rules() == before and not _enable.is_on()
    with native():
        f, (x, w) = conv(LAYOUTS[0]), arrays(LAYOUTS[0])
        assert helpers.calls(fresh(f), x, w) == {"conv_fprop": 1}
    assert rules() == before


@pytest.mark.parametrize("platform", ["cpu", None])
def test_a_rule_that_somebody_registered_meanwhile_stays(platform):
    from jax._src.interpreters import mlir

    primitive = jax.extend.core.Primitive("jaxconv_test_of_enable")
    table = mlir._lowerings if platform is None else mlir._platform_specific_lowerings[platform]
    mlir.register_lowering(primitive, lambda ctx, x: ["first"], platform=platform)
    undo = compat.replace_lowering(primitive, {"cpu": lambda own, ctx, x: own(ctx, x)})
    undo()
    assert table[primitive].rule(None, None) == ["first"]
    undo = compat.replace_lowering(primitive, {"cpu": lambda own, ctx, x: own(ctx, x)})
    mlir.register_lowering(primitive, lambda ctx, x: ["second"], platform=platform)
    undo()
    assert table.pop(primitive).rule(None, None) == ["second"]
    assert all(primitive not in rules for rules in (mlir._lowerings, *mlir._platform_specific_lowerings.values()))


# ----------------------------------------------------------------------------------------------------------------------
# Seeing it


@on_cpu
def test_explain_shows_what_enable_would_do_and_what_it_does():
    f, (x, w) = conv(LAYOUTS[0], stride=2, groups=4), arrays(LAYOUTS[0], groups=4)

    def loss(x, w):
        y = f(x, w) + f(x, w)
        return jnp.sum(jaxconv.conv2d(y, jnp.ones((1, 1, 8, 8))) ** 2) + jnp.sum(
            conv(LAYOUTS[0], base=2, stride=2, padding=(1, 1))(y, jnp.ones((1, 1, 8, 1)))
        )

    explained = jaxconv.explain(jax.grad(loss, 1))(x, w)
    assert {call.op for call in explained} == {"conv_fprop", "conv_dgrad"}  # jaxconv's own
    found = [(one.form, one.became, one.count) for one in explained.convolutions]
    native_twice = {("fprop", "native[depthwise]", 2), ("wgrad", "native[depthwise]", 2)}
    assert native_twice <= set(found)
    assert "both" in next(one.why for one in explained.convolutions if one.form == "conv")
    assert not explained.enabled and "enable, which is off, would do:" in str(explained)
    with native():
        explained = jaxconv.explain(jax.grad(loss, 1))(x, w)
    assert explained.enabled and "\nfprop" not in str(explained) and str(explained).startswith("enable:\n")
    assert ("fprop", "native[depthwise]", 2) in [(one.form, one.became, one.count) for one in explained.convolutions]
    assert str(jaxconv.explain(jnp.sin)(1.0)) == "no jaxconv calls"
    device = jaxconv.explain(f, platform="cuda")(x, w).convolutions
    assert [one.became for one in device] == ["lax"] and _plan.Device.current("cuda").platform == "cuda"


def test_info_says_whether_it_is_on():
    assert "enable: off" in jaxconv.info()
    with jaxconv.enabled():
        assert "enable: on" in jaxconv.info()


def test_report_counts_names_and_forgets():
    f, (x, w) = conv(LAYOUTS[0]), arrays(LAYOUTS[0])
    jaxconv.report(clear=True)
    assert str(jaxconv.report()).startswith("no convolutions: enable is off")
    with jaxconv.enabled():
        assert str(jaxconv.report()) == "no convolutions"

    def g(x, w):
        with jax.named_scope("here"):
            y = f(x, w)
        with jax.named_scope("there"):
            return (
                y
                + f(x, w)
                + conv(LAYOUTS[0], preferred_element_type=jnp.float32)(*(a.astype(jnp.bfloat16) for a in (x, w)))
            )

    with native():
        jax.jit(g).lower(x, w)
    found = jaxconv.report()
    assert [(one.form, one.taken, one.count) for one in found] == [("fprop", True, 2), ("conv", False, 1)]
    assert len(found.taken) == len(found.left) == 1
    here, there = found[0].where
    assert "here" in here and "there" in there
    lines = str(found).splitlines()
    assert lines[0].split() == ["count", "form", "problem", "became", "why", "where"]
    assert lines[-2] == "2 taken, 1 left to lax"
    assert lines[-1].startswith("enable is off")
    assert jaxconv.report(clear=True) == found and not jaxconv.report()


ROOT = pathlib.Path(__file__).parent.parent


@pytest.mark.parametrize("page", ["README.md", "docs/guide/enable.md"])
def test_the_examples_run(page, process_wide, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
    namespace = {"__name__": "example"}
    assert blocks
    for block in blocks[:1] if page == "README.md" else blocks:
        exec(compile(block, page, "exec"), namespace)


@pytest.mark.parametrize(("ms", "taken"), [(0.290, False), (0.200, True)], ids=("by_6_percent", "by_a_pass"))
def test_a_convolution_pays_for_what_xla_would_take_into_its_own(ms, taken, code_for_gpus, monkeypatch):
    """Nobody sees what stands behind it. A kernel that is 6 % faster, and no more, made a board's network slower: a
    pass over its result, 189 MB, takes 0.05 ms."""
    x = jax.ShapeDtypeStruct((2048, 19, 19, 128), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((3, 3, 128, 128), jnp.bfloat16)
    f = lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=LAYOUTS[0])  # noqa: E731
    device = _plan.Device("cuda", "a GPU of its own", (9, 0), 132)
    (known,) = jaxconv.explain(lambda x, w: jaxconv.conv2d(x, w))(x, w)
    op, kind, coordinates = measured.features("conv_fprop", known.problem)
    row = {"op": op, "kind": kind, "coordinates": coordinates, "case": "board"}
    monkeypatch.setattr(measured, "_learned", {})
    measured.learn(device.kind, [{**row, "xla_ms": 0.307, "native_ms": {"sm90/product": ms}}])
    with _plan.Device.assumed(device):
        (one,) = jaxconv.explain(f)(x, w).convolutions
        (call,) = jaxconv.explain(lambda x, w: jaxconv.conv2d(x, w))(x, w)
    assert call.plan.implementation == "native" and bool(one.taken) == taken
    assert taken or "too little to pay for a pass that XLA would fuse into its convolution" in one.why


def test_blocks_that_await_leave_it_off():
    """Two that overlap in one thread put back each other's state: info had said on, where nothing was."""

    async def block(seconds):
        with jaxconv.enabled():
            await asyncio.sleep(seconds)

    async def both():
        await asyncio.gather(block(0.01), block(0.02))

    def run():
        asyncio.run(both())
        return _enable.is_on()

    with concurrent.futures.ThreadPoolExecutor(1) as thread:  # whose state goes with it
        assert not thread.submit(run).result()

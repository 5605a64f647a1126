"""jax.export with extents that have names instead of numbers: batch and space, forward and gradient."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export, lax

import jaxconv
import jaxconv.linen as jn

W = jnp.asarray(helpers.normal(1, (3, 3, 4, 4)), "float32")
B = jnp.asarray(helpers.normal(2, (4,)), "float32")
NUMBERS = ("NHWC", "HWIO", "NHWC")
highest = dict(precision="highest")

FUNCTIONS = {
    "same": lambda x: jaxconv.conv2d(x, W, B, activation="relu", **highest),
    "same_lower_strided": lambda x: jaxconv.conv2d(x, W, stride=2, padding="SAME_LOWER", **highest),
    "same_strided": lambda x: jaxconv.conv2d(x, W, B, stride=(2, 3), activation="silu", **highest),
    "residual": lambda x: jaxconv.conv2d(x, W, B, residual=x, activation="gelu", **highest),
    "valid_dilated": lambda x: jaxconv.conv2d(x, W, padding="VALID", dilation=2, **highest),
    "pads": lambda x: jaxconv.conv2d(x, W, stride=2, padding=((1, 2), (0, -1)), **highest),
    "channels_first": lambda x: jaxconv.conv2d(
        jnp.moveaxis(x, 3, 1), jnp.transpose(W, (3, 2, 0, 1)), layout="NCHW", stride=2, **highest
    ),
    "grouped": lambda x: jaxconv.conv2d(x, W[:, :, :1], groups=4, stride=2, **highest),
    "transposed": lambda x: jaxconv.conv_transpose2d(x, W, B, stride=2, activation="tanh", **highest),
    "transposed_kernel": lambda x: jaxconv.conv_transpose2d(x, W, stride=2, transpose_kernel=True, **highest),
    "general": lambda x: jaxconv.conv_general_dilated(x, W, (2, 2), "SAME", dimension_numbers=NUMBERS, **highest),
    "general_transposed": lambda x: jaxconv.conv_general_dilated(
        x, W, (1, 1), [(2, 1), (1, 2)], lhs_dilation=(2, 2), dimension_numbers=NUMBERS, **highest
    ),
    "conv_batchnorm": lambda x: jaxconv.conv_batchnorm(
        x, W, B, B, 0 * B, 1 + 0 * B, training=True, stride=2, activation="relu", **highest
    )[0],
    "folded_norm": lambda x: jaxconv.conv_batchnorm(
        x, W, B, B, 0 * B, 1 + 0 * B, training=False, stride=2, activation="relu", **highest
    )[0],
    "dense": lambda x: jaxconv.dense(x, W[0, 0], B, activation="relu", **highest),
}


# lax itself exports no gradient where a filter steps or is dilated: its pads would be symbolic.
DIFFERENTIABLE = ("same", "residual", "transposed", "transposed_kernel", "general_transposed", "dense")


def exported(f: Any, *names: str, gradient: bool = False) -> Any:
    shape = jax.ShapeDtypeStruct((*export.symbolic_shape(",".join(names)), 4), "float32")
    made = export.export(jax.jit(f), disabled_checks=jaxconv.export_checks())(shape)
    return export.deserialize(made.serialize(vjp_order=int(gradient)))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_symbolic_space_is_exported(name):
    f = FUNCTIONS[name]
    loaded = exported(f, "b", "h", "t", gradient=name in DIFFERENTIABLE)
    for shape in ((2, 7, 10, 4), (1, 8, 9, 4)):
        x = jnp.asarray(helpers.normal(0, shape), "float32")
        expected, pullback = jax.vjp(f, x)
        np.testing.assert_allclose(loaded.call(x), expected, rtol=1e-5, atol=1e-5)
        if name in DIFFERENTIABLE:
            dy = jnp.asarray(helpers.normal(3, expected.shape), "float32")
            (actual,) = jax.vjp(loaded.call, x)[1](dy)
            np.testing.assert_allclose(actual, pullback(dy)[0], rtol=1e-5, atol=1e-4)


def test_one_dimension_with_a_stride():
    f = functools.partial(jaxconv.conv1d, w=W[0], stride=2, padding="CAUSAL", **highest)
    x = jnp.asarray(helpers.normal(0, (2, 11, 4)), "float32")
    np.testing.assert_allclose(exported(f, "b", "t").call(x), f(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("module", ["Conv", "ConvTranspose"])
def test_symbolic_space_in_flax_modules(module):
    x = jnp.asarray(helpers.normal(0, (2, 7, 10, 4)), "float32")
    ours, flax = (getattr(library, module)(4, (3, 3), strides=(2, 2)) for library in (jn, nn))
    variables = flax.init(jax.random.key(0), x)
    with jax.default_matmul_precision("highest"):  # lax would round to TF32 on a GPU
        expected = flax.apply(variables, x)
        loaded = exported(lambda x: ours.apply(variables, x), "b", "h", "t")
    np.testing.assert_allclose(loaded.call(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stride", [1, 2])
def test_symbolic_space_through_accelerate(stride):
    """lax takes symbolic pads (of "SAME" with a stride) by name only, so such a convolution is left."""
    x = jnp.asarray(helpers.normal(0, (2, 7, 10, 4)), "float32")
    model = nn.Sequential([nn.Conv(4, (3, 3), strides=stride), nn.BatchNorm(use_running_average=True), nn.relu])
    variables = model.init(jax.random.key(0), x)
    with jax.default_matmul_precision("highest"):  # XLA rounds the two to TF32 at different places
        loaded = exported(jaxconv.accelerate(functools.partial(model.apply, variables)), "b", "h", "t")
        expected = model.apply(variables, x)
    np.testing.assert_allclose(loaded.call(x), expected, rtol=1e-4, atol=1e-5)


def test_symbolic_extents_are_those_of_lax():
    """Spelled as lax spells them: a program may compare the two."""
    (h,) = export.symbolic_shape("h")
    x = jax.ShapeDtypeStruct((2, h, 9, 4), "float32")
    for padding in ("SAME", "VALID", "SAME_LOWER", ((1, 2), (3, 4))):
        for stride in (1, 2, 3):
            expected = jax.eval_shape(
                lambda x, p=padding, s=stride: lax.conv_general_dilated(x, W, (s, s), p, dimension_numbers=NUMBERS), x
            )
            actual = jax.eval_shape(lambda x, p=padding, s=stride: jaxconv.conv2d(x, W, stride=s, padding=p), x)
            assert actual.shape == expected.shape, (padding, stride)


@pytest.mark.parametrize("f", [jaxconv.conv2d, jaxconv.conv_transpose2d])
def test_native_code_needs_numbers(f):
    with pytest.raises(ValueError, match=r"implementation='native' cannot run: .* symbolic"):
        exported(lambda x: f(x, W, implementation="native"), "b", "h", "t")


# ----------------------------------------------------------------------------------------------------------------------
# What accelerate and freeze read off a program: counts, and extents used as numbers


class Cnn(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        for stride in (1, 2):
            x = nn.Conv(4, (3, 3), strides=stride)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=True)(x))
        return nn.Dense(3)(nn.max_pool(x, (2, 2), padding="SAME").mean((1, 2)))


class Norms(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.silu(nn.GroupNorm(2)(nn.Conv(4, (3, 3))(x)))
        x = nn.LayerNorm()(nn.Conv(4, (1, 1))(x))
        return x * nn.sigmoid(nn.Dense(4)(nn.relu(nn.Dense(2)(x.mean((1, 2), keepdims=True)))))


class NnxNorms(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(4, 4, (3, 3), rngs=rngs)
        self.group = nnx.GroupNorm(4, num_groups=2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return nnx.silu(self.group(self.conv(x))).mean((1, 2))


def of_linen(module: nn.Module) -> Any:
    @functools.cache
    def variables() -> Any:
        with jax.ensure_compile_time_eval():
            return jax.tree.map(lambda a: a + 0.1, module.init(jax.random.key(0), jnp.ones((2, 6, 6, 4))))

    return lambda x: module.apply(variables(), x)


def of_nnx() -> Any:
    @functools.cache
    def parts() -> Any:
        with jax.ensure_compile_time_eval():
            return nnx.split(NnxNorms(nnx.Rngs(0)))

    return lambda x: nnx.merge(*parts())(x)


def two_steps(x: Any) -> Any:
    """A group-norm as (N, H*W, G, C/G)."""
    n, h, w, c = x.shape
    groups = x.reshape(n, h * w, 2, c // 2)
    centred = groups - groups.mean((1, 3), keepdims=True)
    return (centred * lax.rsqrt((centred**2).mean((1, 3), keepdims=True) + 1e-5)).reshape(x.shape) * B + 1


def counted(axes: tuple[int, ...], groups: int = 1) -> Any:
    """Normalised over the axes, or groups of channels, by statistics whose count is a number, not of x."""

    def f(x: Any) -> Any:
        parts = x.reshape(*x.shape[:3], groups, -1) if groups > 1 else x
        keeps = dict(axis=axes, keepdims=True)
        mean = parts.sum(**keeps) / 72.0
        var = (parts * parts).sum(**keeps) / 72.0 - mean * mean
        mean, var = (jnp.broadcast_to(m, parts.shape).reshape(x.shape) for m in (mean, jnp.maximum(var, 0.0)))
        return (x - mean) * lax.rsqrt(var + 1e-5) * B

    return f


def summed(x: Any) -> Any:
    """By sums, which are means of one element."""
    return (x - x.sum((0, 1, 2))) * lax.rsqrt((x * x).sum((0, 1, 2)) + 1e-5) * B


def excited(x: Any) -> Any:
    h = jax.nn.relu(x.sum((1, 2)) / 36.0 @ W[0, 0])
    return x * jax.nn.sigmoid(h @ W[1, 1])[:, None, None]


def positions(x: Any) -> Any:
    return x + (jnp.arange(x.shape[0]) / x.shape[0])[:, None, None, None] * B


def loops(x: Any) -> Any:
    """A loop and a branch that know everything but an extent, and a loop with weights."""
    n = lax.scan(lambda n, _: (n + x.shape[0], None), jnp.zeros((), jnp.int32), None, length=3)[0]
    c = lax.cond(B[0] > 0, lambda: B * x.shape[0], lambda: B)

    def step(y: Any, w: Any) -> Any:
        z = lax.conv_general_dilated(y, 2 * w, (1, 1), "SAME", dimension_numbers=NUMBERS)
        return jax.nn.relu(z) / y.shape[0] + y.mean(), None

    return lax.scan(step, x, jnp.stack([W, W]).astype(x.dtype))[0] * n.astype(x.dtype) + c


def resized(x: Any) -> Any:
    return jax.image.resize(x, (x.shape[0], 2 * x.shape[1], 2 * x.shape[2], 4), "nearest")


READ = {
    "mean": lambda x: x.mean(),
    "var": lambda x: x.var((0, 1)),
    "size": lambda x: x / x.size,
    "arange": lambda x: x + jnp.arange(x.shape[0]).sum() / 100 + jnp.ones(x.shape).sum() / 1000,
    "cnn": of_linen(Cnn()),
    "norms": of_linen(Norms()),
    "nnx": of_nnx(),
    "no_parameters": lambda x: nn.GroupNorm(1, use_bias=False, use_scale=False).apply({}, x),
    "instance": lambda x: nn.InstanceNorm(use_bias=False, use_scale=False).apply({}, x),
    "mapped": jax.vmap(lambda x: nn.GroupNorm(2).init_with_output(jax.random.key(0), x)[0]),
    "two_steps": two_steps,
    "batch_by_a_number": counted((0, 1, 2)),
    "groups_by_a_number": counted((1, 2, 4), 2),
    "rows_by_a_number": counted((3,)),
    "summed": summed,
    "excited": excited,
    "positions": positions,
    "loops": loops,
    "resized": resized,
    "pool": lambda x: nn.max_pool(x, (3, 3), (2, 2), padding="SAME"),
    "global_pool": lambda x: nn.max_pool(x, x.shape[1:3]),
    "pool_with_symbolic_pads": lambda x: nn.max_pool(x, (2, 2), padding=((0, 0), (0, x.shape[2] - 3))),
}
# Of symbolic pixels: lax exports no gradient of a convolution that steps over them, nor of such windows and pads.
PLAIN_GRADIENT_FAILS = ("cnn", "global_pool", "pool_with_symbolic_pads")


def of_sum(f: Any) -> Any:
    return lambda x: jnp.sum(jnp.sin(f(x)))


# A symbolic batch alone asks little more, but for gradients that symbolic pixels have not.
QUICK = (*PLAIN_GRADIENT_FAILS, "batch_by_a_number", "norms")


@pytest.mark.parametrize(
    "name, extents",
    [pytest.param(name, "8*b,6,6,4", marks=[] if name in QUICK else [pytest.mark.slow]) for name in READ]
    + [(name, "b,h,w,4") for name in READ],
)
def test_what_is_read_off_a_program_may_be_symbolic(name, extents):
    f, x = READ[name], jnp.asarray(helpers.normal(0, (8, 6, 6, 4)), "float32")
    shape = jax.ShapeDtypeStruct(export.symbolic_shape(extents), "float32")
    gradients = "h" not in extents or name not in PLAIN_GRADIENT_FAILS
    with jax.enable_x64(True):
        exact = jax.value_and_grad(of_sum(f))(x.astype("float64"))
    with jax.default_matmul_precision("highest"):
        plain = jax.value_and_grad(of_sum(f))(x)
        # A norm of few numbers may be ill-conditioned: an error of plain JAX's is one draw of rounding, ours another.
        errors = [np.abs(np.asarray(a, np.float64) - b).max() for a, b in zip(plain, exact, strict=True)]
        for transform in (jaxconv.accelerate, jaxconv.freeze):
            own = transform(f)
            assert own.report(shape).notes or own.report(shape)  # outside of an export, as jax.eval_shape
            assert jaxconv.explain(own)(shape) is not None
            several = [lambda x, own=own: (of_sum(own)(x), x)]
            if gradients:
                several = [jax.value_and_grad(of_sum(own)), transform(jax.value_and_grad(of_sum(f)))]
            for one in several:
                actual = export.export(jax.jit(one), disabled_checks=jaxconv.export_checks())(shape).call(x)
                np.testing.assert_allclose(actual[0], exact[0], rtol=1e-4, atol=2 * errors[0])
                if gradients:
                    np.testing.assert_allclose(actual[1], exact[1], rtol=1e-3, atol=1e-5 + 2 * errors[1])


def test_a_symbolic_batch_keeps_its_layers():
    """A group-norm's count is no part of the batch; nor is a folded batch-norm."""
    shape = jax.ShapeDtypeStruct(export.symbolic_shape("b,6,6,4"), "float32")
    for name, expected in (("norms", "groupnorm + silu"), ("nnx", "groupnorm + silu"), ("no_parameters", "groupnorm")):
        for transform in (jaxconv.accelerate, jaxconv.freeze):
            assert expected in [finding.fused for finding in transform(READ[name]).report(shape)], name


def test_a_frozen_function_is_exported_for_several_symbolic_batches():
    """Each export has extents of its own, of the same name or not: a frozen function keeps the programs of all."""
    frozen, x = jaxconv.freeze(READ["cnn"]), jnp.asarray(helpers.normal(0, (4, 6, 6, 4)), "float32")
    with jax.default_matmul_precision("highest"):
        for extents in ("b,6,6,4", "b,6,6,4", "n,6,6,4"):
            shape = jax.ShapeDtypeStruct(export.symbolic_shape(extents), "float32")
            actual = export.export(jax.jit(frozen), disabled_checks=jaxconv.export_checks())(shape).call(x)
            np.testing.assert_allclose(actual, READ["cnn"](x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("extents", ["b,6,6,4", "b,h,w,4"])
def test_freeze_refuses_the_statistics_of_a_symbolic_batch(extents):
    model = nn.BatchNorm(use_running_average=False)
    variables = model.init(jax.random.key(0), jnp.ones((2, 6, 6, 4)))
    frozen = jaxconv.freeze(lambda v, x: model.apply(v, x, mutable=["batch_stats"])[0], variables)
    with pytest.raises(ValueError, match="is in training mode: it normalises by the statistics of its batch"):
        frozen.report(jax.ShapeDtypeStruct(export.symbolic_shape(extents), "float32"))

"""What accelerate leaves as it was written on a CPU: norms, whose formulas XLA computes there as fast as ours.

The program of a device is chosen when it is lowered; a gradient's where programs run unless somebody says otherwise.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxconv
from benchmarks.cpu import instructions
from jaxconv import _plan

pytestmark = [pytest.mark.as_planned, pytest.mark.skipif(helpers.PLATFORM != "cpu", reason="of a CPU's programs")]
C = 16
X = jax.random.normal(jax.random.key(0), (4, 6, 5, C)) + 3


def batchnorm(x: Any, scale: Any, bias: Any) -> Any:
    variables = {"params": {"scale": scale, "bias": bias}, "batch_stats": {"mean": jnp.zeros(C), "var": jnp.ones(C)}}
    y, updates = nn.BatchNorm(use_running_average=False).apply(variables, x, mutable=["batch_stats"])
    return nn.relu(y), updates


def given_statistics(x: Any, scale: Any, bias: Any) -> Any:
    variables = {"params": {"scale": scale, "bias": bias}, "batch_stats": {"mean": jnp.ones(C), "var": jnp.ones(C)}}
    return nn.relu(nn.BatchNorm(use_running_average=True).apply(variables, x)), None


def groupnorm(x: Any, scale: Any, bias: Any) -> Any:
    return nn.silu(nn.GroupNorm(4).apply({"params": {"scale": scale, "bias": bias}}, x)), None


def layernorm(x: Any, scale: Any, bias: Any) -> Any:
    return nn.LayerNorm().apply({"params": {"scale": scale, "bias": bias}}, x), None


def loss_of(norm: Any) -> Any:
    def loss(*args: Any) -> Any:
        y, updates = norm(*args)
        return jnp.sum(jnp.sin(y)), updates

    return loss


NORMS = (batchnorm, given_statistics, groupnorm, layernorm)
ARGS = (X, jnp.arange(1.0, C + 1), jnp.arange(0.0, C))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("gradient", [False, True])
def test_norms_run_the_program_that_was_written(norm, gradient):
    def made(f: Any) -> Any:
        return jax.value_and_grad(f, (0, 1, 2), has_aux=True) if gradient else f

    loss = loss_of(norm)
    assert jaxconv.accelerate(loss).report(*ARGS).replaced  # elsewhere it is
    plain, ours = (jax.jit(made(f)).lower(*ARGS).compile() for f in (loss, jaxconv.accelerate(loss)))
    assert instructions(ours) == instructions(plain)
    # Where an array has several gradients, they may be added in another order.
    equal = (
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-5)
        if gradient
        else np.testing.assert_array_equal
    )
    jax.tree.map(equal, ours(*ARGS), plain(*ARGS))


class Model(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        y = nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Conv(C, (3, 3), feature_group_count=C)(x)))
        return nn.silu(nn.GroupNorm(4)(nn.Conv(C, (3, 3))(y)))


def problems(f: Any, *args: Any) -> set[str]:
    return {call.op for call in jaxconv.explain(f)(*args)}


def test_the_device_that_a_program_is_lowered_for_decides():
    model = Model()
    variables = model.init(jax.random.key(1), X, True)
    f = jaxconv.accelerate(lambda v, x: model.apply(v, x, True, mutable=["batch_stats"]))
    here = problems(f, variables, X)
    assert "conv" in here and not here & {"batchnorm_train", "groupnorm"}
    with _plan.Device.assumed(_plan.Device("cuda", "NVIDIA H200", (9, 0))):
        assert {"batchnorm_train", "groupnorm"} <= problems(f, variables, X)
        gradient = jax.grad(lambda v, x: jnp.sum(f(v, x)[0]))
        assert {"batchnorm_backward", "groupnorm_backward"} <= problems(gradient, variables, X)


TWO = jnp.stack([X, X[::-1]])
TRANSFORMS: dict[str, tuple[Any, Any]] = {  # of f(v, x), and an x for it
    "none": (lambda f: f, X),
    "grad": (lambda f: jax.grad(f, 1), X),
    "checkpoint": (lambda f: jax.grad(jax.checkpoint(f), 1), X),
    "vmap of grad": (lambda f: jax.vmap(jax.grad(f, 1), (None, 0)), TWO),
    "grad of vmap": (lambda f: jax.grad(lambda v, x: jax.vmap(f, (None, 0))(v, x).sum(), 1), TWO),
    "jvp": (lambda f: lambda v, x: jax.jvp(lambda u: f(v, u), (x,), (x,)), X),
    "accelerate": (jaxconv.accelerate, X),
    "scan": (lambda f: lambda v, x: jax.lax.scan(lambda c, u: (c + f(v, u), f(v, u)), 0.0, x), TWO),
    "grad of scan": (lambda f: jax.grad(lambda v, x: jax.lax.scan(lambda c, u: (c + f(v, u), c), 0.0, x)[0], 1), TWO),
    "grad of grad": (lambda f: jax.grad(lambda v, x: jnp.sum(jax.grad(f, 1)(v, x) ** 2), 1), X),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_a_program_with_two_forms(name):
    model = Model()
    variables = model.init(jax.random.key(1), X, True)

    def plain(v: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(model.apply(v, x, True, mutable=["batch_stats"])[0]))

    made, x = TRANSFORMS[name]
    a, b = jax.jit(made(jaxconv.accelerate(plain)))(variables, x), jax.jit(made(plain))(variables, x)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=5e-4, atol=5e-4 * float(jnp.abs(b).max()) + 1e-5), a, b
    )


def test_an_accelerated_function_in_an_accelerated_one():
    loss = loss_of(batchnorm)
    inner = jaxconv.accelerate(loss)
    plain, ours = (jax.jit(f).lower(*ARGS).compile() for f in (loss, jaxconv.accelerate(lambda *a: inner(*a))))
    assert instructions(ours) == instructions(plain)


def test_arrays_that_are_traced_outside():
    def through(f: Any) -> Any:
        return jax.jit(lambda x, scale, bias: f(lambda x: batchnorm(x, scale, bias)[0])(x)).lower(*ARGS).compile()

    plain, ours = through(lambda f: f), through(jaxconv.accelerate)
    assert instructions(ours) == instructions(plain)


def test_what_goes_into_a_filter_still_does():
    model = Model()
    variables = model.init(jax.random.key(1), X, True)
    f = jaxconv.accelerate(lambda v, x: model.apply(v, x, False))
    assert "conv + bias + batchnorm (inference) + relu" in {finding.fused for finding in f.report(variables, X)}
    assert problems(f, variables, X) == {"conv", "conv_fprop"}  # a group-norm goes into none
    np.testing.assert_allclose(f(variables, X), model.apply(variables, X, False), rtol=1e-4, atol=1e-4)


def test_the_report_says_so():
    notes = jaxconv.accelerate(loss_of(batchnorm)).report(*ARGS).notes
    assert any("on a CPU" in note and "as they were written" in note for note in notes)
    conv = jaxconv.accelerate(lambda x, w: jax.lax.conv(x, w, (1, 1), "SAME"))
    report = conv.report(jnp.ones((1, 3, 8, 8)), jnp.ones((4, 3, 3, 3)))
    assert report.replaced and not report.notes


ACTIVATIONS = {"relu": nn.relu, "gelu": nn.gelu, "silu": nn.silu, "tanh": jnp.tanh}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_dense_layers_run_the_program_that_was_written(activation):
    def loss(x: Any, w: Any, b: Any) -> Any:
        return jnp.sum(jnp.sin(ACTIVATIONS[activation](x @ w + b)))

    args = jax.random.normal(jax.random.key(0), (24, 8)), jnp.ones((8, 16)), jnp.arange(16.0)
    assert jaxconv.accelerate(loss).report(*args).replaced  # elsewhere it is
    for made in (lambda f: f, lambda f: jax.grad(f, (0, 1, 2))):
        plain, ours = (jax.jit(made(f)).lower(*args).compile() for f in (loss, jaxconv.accelerate(loss)))
        assert instructions(ours) == instructions(plain)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("groups", [1, C])
def test_what_is_behind_a_convolution_stays_but_for_comparisons_behind_native_code(groups, activation):
    def loss(x: Any, w: Any, b: Any) -> Any:
        y = nn.Conv(C, (3, 3), feature_group_count=groups).apply({"params": {"kernel": w, "bias": b}}, x)
        return jnp.sum(jnp.sin(ACTIVATIONS[activation](y)))

    args = X, jnp.ones((3, 3, C // groups, C)) / 9, jnp.arange(0.0, C) / C
    f = jaxconv.accelerate(loss)
    (call,) = jaxconv.explain(f)(*args)
    behind = f" + {activation}" if activation == "relu" else ""
    assert call.op == ("conv" if groups > 1 else "conv_fprop")
    assert str(call.problem).endswith(f"NHWC + bias{behind}" if groups > 1 else "NHWC")
    ours, plain = (jax.jit(jax.value_and_grad(g, (0, 1, 2)))(*args) for g in (f, loss))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-4), ours, plain)


def printed(y: Any) -> Any:
    jax.debug.print("{}", jnp.isnan(y).any())
    return y


def repeated(y: Any) -> Any:
    return jax.lax.while_loop(lambda z: jnp.sum(jnp.abs(z)) > 1, lambda z: z * 0.5, y)


def called_back(y: Any) -> Any:
    return y + jax.pure_callback(lambda z: z, jax.ShapeDtypeStruct(y.shape, y.dtype), y)


@pytest.mark.parametrize("behind", [printed, repeated, called_back])
@pytest.mark.parametrize("norm", [False, True])
def test_a_program_of_several_parts_beside_native_code(norm, behind):
    """Nothing with an effect or a loop is part of a region, so that no region has two forms."""

    def f(x: Any, w: Any, b: Any) -> Any:
        y = nn.Conv(C, (3, 3), feature_group_count=C).apply({"params": {"kernel": w, "bias": b}}, x)
        return behind(batchnorm(y, b, b)[0] if norm else nn.relu(y))

    args = X, jnp.ones((3, 3, 1, C)) / 9, jnp.arange(0.0, C) / C
    for made in (lambda f: f, jax.jit):
        np.testing.assert_allclose(made(jaxconv.accelerate(f))(*args), made(f)(*args), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("behind", [printed, repeated, called_back, lambda y: y])
def test_a_step_that_closes_over_what_is_traced(behind):
    """As a jitted step does whose loss closes over its batch."""

    def loss(p: Any, x: Any) -> Any:
        y = nn.Conv(C, (3, 3), feature_group_count=C).apply({"params": {"kernel": p["w"], "bias": p["b"]}}, x)
        behind(jax.lax.stop_gradient(y))
        return jnp.sum(jnp.sin(nn.relu(y)))

    def step(of: Any) -> Any:
        return jax.jit(lambda p, x: jax.value_and_grad(of(lambda p: loss(p, x)))(p))

    p = {"w": jnp.ones((3, 3, 1, C)) / 9, "b": jnp.arange(0.0, C) / C}
    ours, plain = step(jaxconv.accelerate)(p, X), step(lambda f: f)(p, X)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), ours, plain)
    jaxconv.explain(step(jaxconv.accelerate))(p, X)

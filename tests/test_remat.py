"""What differentiation keeps in memory, and what jax.checkpoint recomputes under each policy."""

from __future__ import annotations

import collections
import functools
import re
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import calls, equations
from jax.ad_checkpoint import checkpoint_name, print_saved_residuals

import jaxconv
from jaxconv import checkpoint_policies as policies


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(helpers.normal(seed, shape), jnp.float32)


X, W, B = normal(0, 2, 6, 6, 4), 0.2 * normal(1, 3, 3, 4, 4), normal(2, 4)
conv = functools.partial(jaxconv.conv2d, implementation="native")
dense = functools.partial(jaxconv.dense, implementation="native")


def norm(x: Any, scale: Any, bias: Any) -> Any:
    zeros, ones = jnp.zeros(4), jnp.ones(4)
    return jaxconv.batchnorm(x, scale, bias, zeros, ones, training=True, activation="relu", implementation="native")[0]


def asked(f: Any, *args: Any) -> collections.Counter[str]:
    """How often XLA is asked for each target. (XLA for CPUs drops jax's barriers and merges a call recomputed.)"""
    return collections.Counter(re.findall(r"@jaxconv_(\w+)_v\d+", jax.jit(f).lower(*args).as_text()))


# ----------------------------------------------------------------------------------------------------------------------
# Without jax.checkpoint


def saved(capsys: Any, f: Any, *args: Any) -> list[str]:
    """What print_saved_residuals prints: a shape, and "argument" or the name of what has it."""
    print_saved_residuals(lambda *a: f(*a).sum(), *args)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    return [f"{shape} {'argument' if 'argument' in rest else rest[1]}" for shape, *rest in lines]


KEPT = "f32[2,6,6,4] 'jaxconv_conv'"


@pytest.mark.parametrize(
    ("activation", "kept"),
    [(None, []), ("relu", [KEPT]), ("tanh", [KEPT]), ("sigmoid", [KEPT]), ("gelu", [KEPT]), ("silu", [KEPT])],
)
def test_conv_keeps_its_operands_and_one_activation(capsys, activation, kept):
    found = saved(capsys, functools.partial(conv, activation=activation), X, W, B)
    assert found == ["f32[2,6,6,4] argument", "f32[3,3,4,4] argument", *kept]


def test_relu_keeps_y_and_gelu_z():
    """y is alive anyway, as the next layer's input: the saved value is the very result."""
    for activation, results in (("relu", 1), ("tanh", 1), ("gelu", 2), ("silu", 2)):
        f = functools.partial(conv, activation=activation)
        jaxpr = jax.make_jaxpr(lambda *a, f=f: jax.vjp(f, *a))(X, W, B)
        (equation,) = [e for e in jaxpr.eqns if e.primitive.name == "jaxconv_conv"]
        assert len(equation.outvars) == results
        # Outside differentiation nothing is computed to be saved.
        (equation,) = [e for e in jax.make_jaxpr(f)(X, W, B).eqns if e.primitive.name == "jaxconv_conv"]
        assert len(equation.outvars) == 1


def test_batchnorm_keeps_x_and_two_numbers_a_channel(capsys):
    found = saved(capsys, norm, X, B, B)
    statistics = ["f32[4] 'jaxconv_batchnorm_train'"] * 2
    assert [line for line in found if "jaxconv" in line] == statistics
    assert [line for line in found if line.startswith("f32[2,6,6,4]")] == ["f32[2,6,6,4] argument"]


def test_names_are_no_work():
    """A name is nothing at run time, and outside differentiation is not there at all."""
    f = functools.partial(conv, activation="gelu")
    assert "name" not in equations(f, X, W, B)
    assert calls(jax.value_and_grad(lambda *a: f(*a).sum(), (0, 1)), X, W, B) == {
        "conv": 1,
        "conv_dgrad": 1,
        "conv_wgrad": 1,
    }


# ----------------------------------------------------------------------------------------------------------------------
# With it


def block(x: Any, w: Any, scale: Any, bias: Any) -> Any:
    x = conv(x, w, bias, activation="gelu")
    x = checkpoint_name(norm(x, scale, bias), "mine")
    x = conv(x, w, bias, activation="silu")
    return dense(x, w[0, 0], bias, activation="tanh")


def loss(policy: Any = None, remat: bool = True) -> Any:
    f = jax.checkpoint(block, policy=policy) if remat else block
    return jax.value_and_grad(lambda *args: jnp.sum(f(*args) ** 2), (0, 1, 2, 3))


ARGS = (X, W, B, 0.1 * B)
# How often the forward kernels run in a step; the backward ones run as ever.
FORWARDS = {
    "no remat": (loss(remat=False), 2, 1, 1),
    "nothing": (loss(jax.checkpoint_policies.nothing_saveable), 4, 2, 2),
    "dots of jax": (loss(jax.checkpoint_policies.dots_saveable), 4, 2, 2),
    "save_convs": (loss(policies.save_convs), 2, 2, 2),
    "save_products": (loss(policies.save_products), 2, 2, 1),
    "save_all": (loss(policies.save_all), 2, 1, 1),
    "save_all_but_batchnorms": (loss(policies.save_all_but_batchnorms), 2, 2, 1),
    "save_nothing_of_jaxconv": (loss(policies.save_nothing_of_jaxconv), 4, 2, 2),
    "conv by name": (loss(jax.checkpoint_policies.save_only_these_names("jaxconv_conv")), 2, 2, 2),
    "the user's name": (loss(jax.checkpoint_policies.save_only_these_names("mine", "jaxconv_conv")), 2, 2, 2),
    "both": (
        loss(
            jax.checkpoint_policies.save_from_both_policies(
                policies.save_convs, jax.checkpoint_policies.save_only_these_names("jaxconv_dense")
            )
        ),
        2,
        2,
        1,
    ),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_policies(name):
    step, convs, norms, denses = FORWARDS[name]
    found = asked(step, *ARGS)
    assert (found["conv"], found["batchnorm_train"], found["dense"]) == (convs, norms, denses)
    assert (found["conv_dgrad"], found["conv_wgrad"], found["batchnorm_backward"]) == (2, 2, 1)
    # The same kernels on the same numbers; XLA may contract the elementwise steps between them otherwise.
    for a, b in zip(jax.tree.leaves(jax.jit(step)(*ARGS)), jax.tree.leaves(loss(remat=False)(*ARGS)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=50 * 2.0**-23 * float(jnp.abs(b).max()))


def test_scan_of_checkpointed_layers():
    """Layers as a scan: one set of calls in the program, and in backward one recomputed forward."""

    def deep(x: Any, ws: Any, remat: bool) -> Any:
        layer = functools.partial(conv, activation="gelu")
        layer = jax.checkpoint(layer) if remat else layer
        return jnp.sum(jax.lax.scan(lambda h, w: (layer(h, w), None), x, ws)[0] ** 2)

    ws = 0.2 * normal(5, 3, 3, 3, 4, 4)
    kept, remat = (jax.value_and_grad(functools.partial(deep, remat=r), (0, 1)) for r in (False, True))
    assert asked(kept, X, ws) == {"conv": 1, "conv_dgrad": 1, "conv_wgrad": 1}
    assert asked(remat, X, ws) == {"conv": 2, "conv_dgrad": 1, "conv_wgrad": 1}
    for a, b in zip(jax.tree.leaves(remat(X, ws)), jax.tree.leaves(kept(X, ws)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=50 * 2.0**-23 * float(jnp.abs(b).max()))

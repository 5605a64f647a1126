"""Which functions jaxconv.freeze takes for a model in training: evidence, not statistics over axis 0 alone."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_cases import KEY, array, assert_same, randomised
from jax import lax

import jaxconv
from jaxconv._ops.batchnorm_conv import batchnorm_conv
from jaxconv.freeze.training import says_batchnorm


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


VOLUME = array(0, (4, 6, 5, 8))  # one, without a batch axis
SERIES = array(1, (20, 8))  # times and channels
IMAGES = array(2, (4, 6, 6, 8))
OVER_AXIS_0 = "it normalises by statistics over axis 0 of its input, computed in each call"
TRAINING = "is in training mode: it normalises by the statistics of its batch"


def standardised(x: Any, axes: Any) -> Any:
    return (x - x.mean(axes)) * lax.rsqrt(x.var(axes) + 1e-5)


def conv(x: Any, w: Any) -> Any:
    spatial = "DHW"[-(x.ndim - 2) :]
    numbers = (f"N{spatial}C", f"{spatial}IO", f"N{spatial}C")
    return lax.conv_general_dilated(x, w, (1,) * len(spatial), "SAME", dimension_numbers=numbers)


def instance_norm(p: Any, x: Any) -> Any:
    y = conv(x[None], p["w"])[0]
    return jax.nn.leaky_relu(standardised(y, (0, 1, 2)) * p["scale"] + p["bias"], 0.01)


def revin(p: Any, x: Any) -> Any:
    mean, deviation = x.mean(0), jnp.sqrt(x.var(0) + 1e-5)
    y = (x - mean) / deviation * p["scale"] + p["bias"]
    return (y @ p["w"][0, 0, 0] - p["bias"]) / p["scale"] * deviation + mean


def z_score(p: Any, x: Any) -> Any:
    return (x - x.mean(0, keepdims=True)) / jnp.sqrt(x.var(0, keepdims=True) + 1e-6)


LAYER_NORM = nn.LayerNorm(reduction_axes=(0, 1, 2), feature_axes=-1)


def layer_norm(p: Any, x: Any) -> Any:
    return LAYER_NORM.apply({"params": {"scale": p["scale"], "bias": p["bias"]}}, x)


def smoothed(p: Any, x: Any) -> Any:
    """With an average of a bound array and the data, which are no statistics."""
    y = standardised(x, 0)
    return y, 0.9 * p["start"] + 0.1 * x


def shifted_means(p: Any, x: Any) -> Any:
    """Statistics, and bound numbers that are added to them: nothing runs."""
    return standardised(x, 0), x.mean(0) + p["bias"]


def by_own_call(p: Any, x: Any) -> Any:
    """Of weights, which are standardised."""
    w = p["w"].reshape(-1, 8)
    w, *_ = jaxconv.batchnorm(w, p["scale"], p["bias"], p["bias"], p["scale"], training=True)
    return conv(x[None], w.reshape(p["w"].shape))[0]


P = {
    "w": array(3, (3, 3, 3, 8, 8)) / 8,
    "scale": 1.5 + 0.1 * array(4, (8,)),
    "bias": array(5, (8,)),
    "start": array(6, SERIES.shape),
}

# id: (function, its input, whether data are normalised over axis 0)
INFERENCE = {
    "an instance norm of one volume": (instance_norm, VOLUME, True),
    "Flax's LayerNorm over all pixels": (layer_norm, VOLUME, True),
    "RevIN": (revin, SERIES, True),
    "z-scores": (z_score, SERIES, True),
    "an average with the data": (smoothed, SERIES, True),
    "shifted means": (shifted_means, SERIES, True),
    "jaxconv's call of weights": (by_own_call, VOLUME, False),
}
AROUND = {
    "alone": lambda f: f,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "cond": lambda f: lambda p, x: lax.cond(x.sum() < 1e6, f, lambda p, x: jax.tree.map(jnp.zeros_like, f(p, x)), p, x),
    "while": lambda f: (
        lambda p, x: lax.while_loop(
            lambda c: c[0] < 1, lambda c: (c[0] + 1, f(p, x)), (0, jax.tree.map(jnp.zeros_like, f(p, x)))
        )[1]
    ),
    "scan": lambda f: lambda p, x: lax.scan(lambda c, x: (c, f(p, x)), 0, x[None])[1],
    "vmap": lambda f: lambda p, x: jax.vmap(f, (None, 0))(p, x[None]),
    "accelerate": jaxconv.accelerate,
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", INFERENCE)
def test_statistics_over_axis_0_alone_are_no_training(name, around):
    f, x, over_axis_0 = INFERENCE[name]
    f = AROUND[around](f)
    frozen = jaxconv.freeze(f, P)
    assert_same(frozen(x), jax.jit(f)(P, x), terms=27 * 8 * 120)
    if around in ("alone", "jit", "remat"):
        told = [finding.why for finding in frozen.report(x) if OVER_AXIS_0 in finding.why]
        assert len(told) == over_axis_0
        assert not over_axis_0 or OVER_AXIS_0 in str(frozen.report(x))


def test_only_a_frozen_functions_report_says_so():
    assert OVER_AXIS_0 not in str(jaxconv.accelerate(instance_norm).report(P, VOLUME))


def test_disabled_it_is_no_training_either(monkeypatch):
    monkeypatch.setenv("JAXCONV_DISABLE", "all")
    assert_same(jaxconv.freeze(instance_norm, P)(VOLUME), instance_norm(P, VOLUME), terms=27 * 8 * 120)


@pytest.mark.parametrize("how", ("cond", "switch", "while", "fori"))
def test_a_filter_may_be_standardised_inside(how):
    """In a scope that names a batch-norm too: what it normalises are weights, of which branches and loops know."""

    def layer(p: Any, x: Any) -> Any:
        with jax.named_scope("batch_norm"):
            w = standardised(p["w"], (0, 1, 2, 3))
        return conv(x, w) / 32

    def f(p: Any, x: Any, n: Any) -> Any:
        if how == "cond":
            return lax.cond(n > 0, lambda x: layer(p, x), lambda x: x, x)
        if how == "switch":
            return lax.switch(n, [lambda p, x: x, lambda p, x: layer(p, x), lambda p, x: 2 * layer(p, x)], p, x)
        if how == "while":
            w = p["w"]  # a constant of the condition, which has another number of them than the body
            carry = lax.while_loop(
                lambda c: (c[0] < n) & (layer(p, c[1]).sum() < 1e6),
                lambda c: (c[0] + 1, layer({"w": 2 * w}, c[1])),
                (0, x),
            )
            return carry[1]
        return lax.fori_loop(0, n, lambda _, x: layer(p, x), x)

    x = VOLUME[None]
    for n in (1, 2):
        assert_same(jaxconv.freeze(f, P)(x, n), jax.jit(f)(P, x, n), terms=27 * 8 * 120)


# ----------------------------------------------------------------------------------------------------------------------
# Training


class Flax(nn.Module):
    """A batch-norm whose name says nothing, where it is not the class's own."""

    name_of_norm: str | None = None
    remat: bool = False

    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        norm = nn.remat(nn.BatchNorm, static_argnums=()) if self.remat else nn.BatchNorm
        x = nn.Conv(8, (3, 3))(x)
        return nn.relu(norm(use_running_average=not train, name=self.name_of_norm)(x))


@pytest.mark.parametrize("kept", [True, False], ids=["state kept", "state dropped"])
@pytest.mark.parametrize("name", [None, "norm1", "downsample"])
@pytest.mark.parametrize("remat", [False, True])
def test_flax_in_training_is_refused(name, kept, remat):
    model = Flax(name, remat)
    variables = randomised(jax.eval_shape(model.init, KEY, IMAGES))

    def f(variables: Any, x: Any) -> Any:
        y, state = model.apply(variables, x, train=True, mutable=["batch_stats"])
        return (y, state) if kept else y

    for g in (f, jax.jit(f)):
        with pytest.raises(ValueError, match=f"freeze: batch-norm .*{name or 'BatchNorm_0'} {TRAINING}"):
            jaxconv.freeze(g, variables)(IMAGES)
    assert_same(jaxconv.freeze(model.apply, variables)(IMAGES), model.apply(variables, IMAGES), terms=72 * 72)


def test_flax_in_training_below_accelerate_is_refused():
    model = Flax()
    variables = randomised(jax.eval_shape(model.init, KEY, IMAGES))
    f = jaxconv.accelerate(lambda v, x: model.apply(v, x, train=True, mutable=["batch_stats"])[0])
    with pytest.raises(ValueError, match=f"BatchNorm_0 {TRAINING}"):
        jaxconv.freeze(f, variables)(IMAGES)


def test_an_nnx_module_in_training_whose_state_is_dropped_is_refused():
    """nnx has no name scopes: the running averages say it."""
    graph, state = nnx.split(nnx.BatchNorm(8, rngs=nnx.Rngs(0)))

    def f(state: Any, x: Any) -> Any:
        return nnx.merge(graph, state)(x)

    with pytest.raises(ValueError, match="changes a bound object"):
        jaxconv.freeze(f, state)(IMAGES)
    with pytest.raises(ValueError, match=f"batch-norm without a name {TRAINING}"):
        jaxconv.freeze(jax.jit(f), state)(IMAGES)


UPDATES = {
    "m w + (1 - m) mean": lambda old, mean: 0.9 * old + 0.1 * mean,
    "mean first": lambda old, mean: mean * 0.1 + old * 0.9,
    "w + n (mean - w)": lambda old, mean: old + 0.1 * (mean - old),
    "w - n (w - mean)": lambda old, mean: old - 0.1 * (old - mean),
    "of keepdims": lambda old, mean: (0.9 * old[None, None] + 0.1 * mean[None, None]).reshape(8),
}


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("order", ("once", "in two steps"))
def test_running_averages_of_a_norm_without_a_name_are_training(update, order):
    def f(p: Any, x: Any) -> Any:
        mean = x.mean((0, 1, 2)) if order == "once" else x.mean((1, 2)).mean(0)
        y = (x - mean) * lax.rsqrt(x.var((0, 1, 2)) + 1e-5) * p["scale"] + p["bias"]
        return y, UPDATES[update](p["mean"], mean)

    p = {**P, "mean": jnp.ones(8)}
    with pytest.raises(ValueError, match=TRAINING):
        jaxconv.freeze(f, p)(IMAGES)
    with pytest.raises(ValueError, match=TRAINING):
        jaxconv.freeze(lambda p, x: f(p, x)[0], p)(IMAGES)


def test_a_long_program_is_read():
    def f(p: Any, x: Any) -> Any:
        before, total = x.mean(0), x.mean(0)
        for _ in range(400):
            before, total = total, 0.5 * (-(before + total)) + p["bias"]
        return z_score(p, x) + total

    assert_same(jaxconv.freeze(f, P)(SERIES), jax.jit(f)(P, SERIES), terms=400)


OWN = {
    "batchnorm": lambda p, x: jaxconv.batchnorm(x, p, p, p, p, training=True)[0],
    "without momentum": lambda p, x: jaxconv.batchnorm(x, p, p, p, p, training=True, momentum=0.0)[0],
    "conv_batchnorm": lambda p, x: jaxconv.conv_batchnorm(x, jnp.ones((1, 1, 8, 8)), p, p, p, p, training=True)[0],
    "batchnorm_conv": lambda p, x: batchnorm_conv(x, p, p, p, p, jnp.ones((1, 1, 8, 8)), training=True)[0],
    "cond": lambda p, x: lax.cond(x.sum() > 0, lambda x: OWN["batchnorm"](p, x), lambda x: x, x),
    "fori": lambda p, x: lax.fori_loop(0, 2, lambda _, x: OWN["batchnorm"](p, x), x),
    "while's condition": lambda p, x: lax.while_loop(
        lambda x: OWN["batchnorm"](p, x).sum() > 1e9, lambda x: x * x.mean(), x
    ),
    "accelerate": jaxconv.accelerate(lambda p, x: OWN["batchnorm"](p, x)),
}


@pytest.mark.parametrize("disabled", [False, True])
@pytest.mark.parametrize("name", OWN)
def test_jaxconvs_own_calls_in_training_are_refused(name, disabled, monkeypatch):
    if disabled:
        monkeypatch.setenv("JAXCONV_DISABLE", "all")
    with pytest.raises(ValueError, match=TRAINING):
        jaxconv.freeze(OWN[name], jnp.ones(8))(IMAGES)


@pytest.mark.parametrize("name", ("BatchNorm_0", "batch_norm", "bn1", "encoder/ConvBN_2"))
@pytest.mark.parametrize("around", ("alone", "remat", "scan", "cond", "while"))
def test_a_norm_over_axis_0_that_is_named_a_batchnorm_is_refused(name, around):
    def f(p: Any, x: Any) -> Any:
        with jax.named_scope(name):
            return standardised(x, (0, 1, 2)) * p["scale"] + p["bias"]

    with pytest.raises(ValueError, match=f"{name}.* {TRAINING}"):
        jaxconv.freeze(AROUND[around](f), P)(IMAGES)


def test_which_names_say_batchnorm():
    said = ["BatchNorm_0", "M/batch_norm", "batch_normalization_3", "SyncBatchNorm", "eqx.nn.BatchNorm", "bn1", "BN_0"]
    said += [
        "layer1/bn_2/x",
        "conv_bn",
        "ConvBN_1",
        "BNReLU",
        "vmap(M)/vmap(bn)",
        "LayerNorms/BatchNorm_0",
        "batch-norm",
    ]
    others = [
        "",
        "norm1",
        "LayerNorm_0",
        "InstanceNorm",
        "ConvBN_0/LayerNorm_0",
        "batch_normal",
        "subnet",
        "bnb",
        "URBNet",
    ]
    assert [name for name in said if not says_batchnorm(name)] == []
    assert [name for name in others if says_batchnorm(name)] == []


# ----------------------------------------------------------------------------------------------------------------------
# In eight bits


def _volumes(p: Any, x: Any) -> Any:
    """Volumes of one patient, normalised together: layers of 8 bits around norms over axis 0."""
    for w in p["filters"]:
        x = jax.nn.relu(standardised(conv(x, w), (0, 1, 2)) * p["scale"] + p["bias"])
    return x.mean((1, 2)) @ p["head"]


def test_it_is_quantised():
    filters = [array(i, (3, 3, c, 16)) / 12 for i, c in enumerate((16, 16, 16, 16))]
    p = {
        "filters": filters,
        "scale": 1 + 0.1 * array(7, (16,)),
        "bias": 0.1 * array(8, (16,)),
        "head": array(9, (16, 4)),
    }
    batches = [np.asarray(array(10 + i, (4, 8, 8, 16))) for i in range(3)]
    frozen = jaxconv.freeze(_volumes, p, quantize="int8", calibrate=batches)
    expected = _volumes(p, batches[0])
    assert sum(layer.narrow for layer in frozen.quantization) == 3
    assert float(jnp.abs(frozen(batches[0]) - expected).max()) < 0.1 * float(jnp.abs(expected).max())
    with jax.named_scope("bn"), pytest.raises(ValueError, match=TRAINING):
        jaxconv.freeze(jax.named_scope("bn")(_volumes), p, quantize="int8", calibrate=batches)

"""`accelerate` on the models of Flax's examples, which nobody here wrote: values, gradients, structure and types of
results, and what was replaced.

They are no part of Flax's package: JAXCONV_FLAX names a checkout (`make libraries` makes one).
"""

from __future__ import annotations

import collections
import importlib.util
import os
import pathlib
import re
import sys
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxconv

FLAX = pathlib.Path(os.environ.get("JAXCONV_FLAX", "")) / "examples"
pytest.importorskip("flax", reason="the models are Flax's")
KEY, TOKENS = jax.random.key(0), jnp.arange(24).reshape(2, 12) % 11 + 1


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A file of the examples. Data sets, logging and plots, which a model has no need of, are stand-ins."""
    path = FLAX / name
    if not path.exists():
        pytest.skip("JAXCONV_FLAX names no checkout of Flax" if not FLAX.exists() else f"there is no {path}")
    for package in ("tensorflow", "tensorflow_datasets", "ml_collections", "datasets", "flax.metrics.tensorboard"):
        monkeypatch.setitem(sys.modules, package, mock.MagicMock())
    if importlib.util.find_spec("absl") is None:
        monkeypatch.setitem(sys.modules, "absl", mock.MagicMock())
    spec = importlib.util.spec_from_file_location(re.sub(r"\W", "_", name), path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def mean_square(results: Any) -> jax.Array:
    return sum((leaf.astype("float32") ** 2).mean() for leaf in jax.tree.leaves(results))


def linen(model: Any, *args: Any, **options: Any) -> tuple[Callable[..., Any], Any]:
    """(a function of the variables, they)"""
    rngs = {"params": KEY, "dropout": KEY, "word_dropout": KEY}
    variables = jax.jit(lambda: model.init(rngs, *args, **options))()
    return lambda variables: model.apply(variables, *args, rngs=rngs, mutable=["batch_stats"], **options), variables


def resnet(module: Any, train: bool) -> Any:
    model = module.ResNet(
        stage_sizes=[2, 1, 1, 1], block_cls=module.ResNetBlock, num_classes=10, num_filters=8, dtype=jnp.float32
    )
    x = jax.random.normal(KEY, (4, 2, 32, 32, 3))
    variables = jax.jit(lambda: model.init(KEY, x[0], train=False))()

    if not train:
        return lambda variables: model.apply(variables, x[0], train=False), variables

    def f(variables: Any) -> Any:
        def one(x: jax.Array) -> Any:
            return model.apply(variables, x, train=train, mutable=["batch_stats"])

        # As the example's pmap: the norms' statistics are those of all devices.
        return jax.vmap(one, axis_name="batch")(x)

    return f, variables


def bottlenecks(module: Any) -> Any:
    model = module.ResNet(
        stage_sizes=[1, 1], block_cls=module.BottleneckResNetBlock, num_classes=10, num_filters=8, dtype=jnp.float32
    )
    return linen(model, jax.random.normal(KEY, (2, 32, 32, 3)), train=False)


def mnist(module: Any) -> Any:
    from flax import nnx

    model = module.CNN(nnx.Rngs(0))
    graph, state = nnx.split(model)
    batch = {"image": jax.random.normal(KEY, (4, 28, 28, 1)), "label": jnp.arange(4)}

    def f(state: Any) -> Any:
        model = nnx.merge(graph, state)
        loss, logits = module.loss_fn(model, batch, nnx.Rngs(1))
        return loss, logits, nnx.state(model, nnx.BatchStat)

    return f, state


def tagger(module: Any) -> Any:
    config = module.TransformerConfig(
        vocab_size=16, output_vocab_size=5, emb_dim=16, num_heads=2, num_layers=2, qkv_dim=16, mlp_dim=32, max_len=16
    )
    return linen(module.Transformer(config), inputs=TOKENS, train=True)


def language_model(module: Any) -> Any:
    config = module.TransformerConfig(
        vocab_size=16, output_vocab_size=16, emb_dim=16, num_heads=2, num_layers=2, qkv_dim=16, mlp_dim=32, max_len=16,
        dtype=jnp.bfloat16,
    )  # fmt: skip
    return linen(module.TransformerLM(config), TOKENS)


def classifier(module: Any) -> Any:
    model = module.TextClassifier(
        embedding_size=8, hidden_size=8, vocab_size=16, output_size=1, dropout_rate=0.1, word_dropout_rate=0.1
    )
    return linen(model, TOKENS, jnp.array([12, 7]), deterministic=False)


# A file, what makes a function and its variables of it, and what becomes of the layers.
MODELS: dict[str, tuple[str, Callable[[Any], Any], dict[str, int]]] = {
    "ResNet, training": (
        "imagenet/models.py",
        lambda m: resnet(m, True),
        {  # the mean of several devices' statistics is given to the norm
            "conv": 14,
            "batchnorm (given statistics) + relu": 6,
            "batchnorm (given statistics) + residual + relu": 5,
            "batchnorm (given statistics)": 3,
            "max_pool": 1,
            "dense + bias": 1,
        },
    ),
    "ResNet, inference": (
        "imagenet/models.py",
        lambda m: resnet(m, False),
        {
            "conv": 14,
            "conv + batchnorm (inference) + relu": 6,
            "conv + batchnorm (inference)": 3,
            "conv + batchnorm (inference) + residual + relu": 5,
            "max_pool": 1,
            "dense + bias": 1,
        },
    ),
    "ResNet of bottlenecks": (
        "imagenet/models.py",
        bottlenecks,
        {
            "conv": 9,
            "conv + batchnorm (inference) + relu": 5,
            "conv + batchnorm (inference)": 2,
            "conv + batchnorm (inference) + residual + relu": 2,
            "max_pool": 1,
            "dense + bias": 1,
        },
    ),
    "MNIST's CNN": (
        "mnist/train.py",
        mnist,
        {  # one of two batch-norms has a dropout in front
            "conv + bias": 2,
            "conv + bias + batchnorm (training) + relu": 1,
            "batchnorm (training) + relu": 1,
            "dense + bias": 2,
        },
    ),
    "actor and critic": (
        "ppo/models.py",
        lambda m: linen(m.ActorCritic(4), 255 * jax.random.uniform(KEY, (2, 84, 84, 4))),
        {"conv + bias + relu": 3, "dense + bias + relu": 1, "dense + bias": 1},
    ),
    "VAE": (
        "vae/models.py",
        lambda m: linen(m.VAE(), jax.random.uniform(KEY, (3, 784)), KEY),
        {"dense + bias + relu": 2, "dense + bias": 3},
    ),
    "tagging transformer": ("nlp_seq/models.py", tagger, {"dense + bias + elu": 2, "dense + bias": 3}),
    "language model": ("lm1b/models.py", language_model, {"dense + bias + relu": 2, "dense + bias": 3}),
    "LSTM with attention": (
        "sst2/models.py",
        classifier,
        {"dense + bias": 2, "dense + tanh": 1, "dense + bias + tanh": 1},
    ),
}


def close(ours: Any, plain: Any, tolerance: float) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(plain)
    # The gradient of a bias in front of a batch-norm is rounding, and nothing beside the others.
    floating = [leaf for leaf in jax.tree.leaves(plain) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    largest = max(float(jnp.abs(leaf).max()) for leaf in floating)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        assert (type(a), a.shape, a.dtype) == (type(b), b.shape, b.dtype)
        a, b = (np.asarray(array, "float64") for array in (a, b))
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1e-3 * largest, float(np.abs(b).max(initial=0))))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_the_same_and_its_layers_are_replaced(name, monkeypatch):
    path, make, expected = MODELS[name]
    f, variables = make(load(path, monkeypatch))
    fast = jaxconv.accelerate(f)
    types = {leaf.dtype.name for leaf in jax.tree.leaves(jax.eval_shape(f, variables))}
    tolerance = 4e-2 if "bfloat16" in types or name == "language model" else 2e-3
    close(jax.jit(fast)(variables), jax.jit(f)(variables), tolerance)
    differentiable, rest = {}, variables
    if isinstance(variables, dict):
        differentiable, rest = variables["params"], {k: v for k, v in variables.items() if k != "params"}

        def gradient(f: Any) -> Any:
            return jax.jit(jax.grad(lambda params: mean_square(f({**rest, "params": params}))))(differentiable)
    else:

        def gradient(f: Any) -> Any:
            return jax.jit(jax.grad(lambda v: mean_square(f(v)), allow_int=True))(variables)

    close(gradient(fast), gradient(f), tolerance)
    report = fast.report(variables)
    found = dict(collections.Counter(finding.fused for finding in report.replaced))
    print(name, found, [str(finding) for finding in report.left])
    assert found == expected

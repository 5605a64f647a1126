"""CUDA graphs: XLA's command buffers capture jaxconv's launches, and change no bit.

A captured launch is replayed with the addresses it was captured with unless XLA sees that they changed; a handler that
allocated, synchronised or kept an address of its own would fail here.
"""

from __future__ import annotations

import functools
import pathlib
import re
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import pytest
from helpers import same_bits
from jax.experimental.compilation_cache import compilation_cache

import jaxconv

pytestmark = pytest.mark.skipif(helpers.PLATFORM != "cuda", reason="command buffers are CUDA graphs")


@pytest.fixture(autouse=True)
def _compiled_here():
    """A program out of the persistent cache leaves no dump."""
    held = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # the flag is read once
    yield
    jax.config.update("jax_enable_compilation_cache", held)
    compilation_cache.reset_cache()


# What XLA may capture, from nothing to everything that it has a name for in jax 0.10 to 0.12.
LEVELS = {
    "none": "",
    "custom_calls": "CUSTOM_CALL",
    "kernels": "FUSION,CUSTOM_CALL",
    "libraries": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL",
    "control_flow": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,WHILE",
    "all": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,WHILE,COLLECTIVES,DYNAMIC_SLICE_FUSION",
}

X = helpers.normal(0, (8, 14, 14, 16), "float32")
PARAMETERS = {
    "w": 0.2 * helpers.normal(1, (3, 3, 16, 32), "float32"),
    "depthwise": 0.2 * helpers.normal(2, (3, 3, 1, 32), "float32"),
    "scale": 1 + 0.1 * helpers.normal(3, (32,), "float32"),
    "bias": 0.1 * helpers.normal(4, (32,), "float32"),
    "head": 0.2 * helpers.normal(5, (32, 24), "float32"),
}


def loss(parameters: Any, x: Any, looped: bool = False) -> Any:
    """Every kernel, with and without a workspace; the middle twice, or in a loop, which may be captured as well."""
    p = jax.tree.map(lambda a: a.astype(x.dtype), parameters)
    native = {"implementation": "native"}

    def body(_: Any, h: Any) -> Any:
        h = jaxconv.conv2d(h, p["depthwise"], groups=32, activation="silu", **native)
        zeros, ones = jnp.zeros(32), jnp.ones(32)
        scale, bias = p["scale"].astype(jnp.float32), p["bias"].astype(jnp.float32)
        return jaxconv.batchnorm(h, scale, bias, zeros, ones, training=True, activation="relu", residual=h, **native)[0]

    y = jaxconv.conv2d(x, p["w"], p["bias"], activation="gelu", **native)
    y = jax.lax.fori_loop(0, 2, body, y) if looped else body(1, body(0, y))
    return jnp.mean(jaxconv.dense(y.mean((1, 2)), p["head"], activation="tanh", **native).astype(jnp.float32) ** 2)


def compiled(f: Any, level: str, dump: pathlib.Path, *args: Any) -> Any:
    options = {
        "xla_gpu_enable_command_buffer": LEVELS[level],
        "xla_gpu_graph_min_graph_size": 1,
        "xla_dump_to": str(dump),
    }
    return jax.jit(f, compiler_options=options).lower(*args).compile()


def launches(dump: pathlib.Path) -> tuple[int, int]:
    """(custom calls inside command buffers, all of them) in XLA's dump of what it will run."""
    after, before = (sorted(dump.glob(f"*thunk_sequence{name}.txt")) for name in ("_after_thunk_passes", ""))
    (text,) = [path.read_text() for path in after or before]
    inside, found, depth = 0, 0, None
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        if depth is not None and indent <= depth:
            depth = None
        if depth is None and "kCommandBuffer" in line:
            depth = indent
        if ": kCustomCall" in line:
            found += 1
            inside += depth is not None
    return inside, found


CASES = [(level, "float32", False) for level in LEVELS if level != "none"]
CASES += [("all", "bfloat16", False), ("kernels", "float32", True), ("all", "float32", True)]


@pytest.mark.parametrize(
    ("level", "dtype", "looped"), CASES, ids=[f"{level}-{dtype}{'-looped' * loop}" for level, dtype, loop in CASES]
)
def test_launches_are_captured_and_results_are_the_same_bits(level, dtype, looped, tmp_path):
    step = jax.value_and_grad(functools.partial(loss, looped=looped), (0, 1))
    inputs = [jax.tree.map(jnp.asarray, (PARAMETERS, X * (1 + i))) for i in range(3)]
    inputs = [(parameters, x.astype(dtype)) for parameters, x in inputs]
    plain = compiled(step, "none", tmp_path / "none", *inputs[0])
    replayed = compiled(step, level, tmp_path / level, *inputs[0])
    ours = len(re.findall(r'custom_call_target="jaxconv_', replayed.as_text()))
    assert launches(tmp_path / "none") == (0, ours)
    inside, found = launches(tmp_path / level)
    # XLA gives a call in a loop slices of its stacked operands, as one thunk of the kind DYNAMIC_SLICE_FUSION.
    assert found == ours >= 8 and (0 < inside <= ours if looped and level != "all" else inside == ours)
    held = []
    for i in (0, 0, 1, 2, 0, 1):
        # Copies, and something that stays allocated: no call has the addresses of the one before it.
        args = jax.tree.map(jnp.copy, inputs[i])
        held.append((args, jnp.full(1000 + 1000 * len(held), jnp.nan)))
        results = replayed(*args)
        assert same_bits(results, plain(*inputs[i]))
        held.append(results)


def test_donated_memory_is_used_again(tmp_path):
    """A training loop: results become the next call's arguments, in memory that goes back and forth."""

    def step(parameters: Any, x: Any) -> Any:
        value, gradient = jax.value_and_grad(functools.partial(loss, looped=True))(parameters, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradient), value

    def trained(level: str) -> Any:
        options = {"xla_gpu_enable_command_buffer": LEVELS[level], "xla_gpu_graph_min_graph_size": 1}
        jitted = jax.jit(step, donate_argnums=0, compiler_options=options)
        parameters, values = jax.tree.map(jnp.asarray, PARAMETERS), []
        for _ in range(5):
            parameters, value = jitted(parameters, jnp.asarray(X, jnp.float32))
            values.append(value)
        return parameters, values

    assert same_bits(trained("all"), trained("none"))

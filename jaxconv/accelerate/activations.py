"""Activations: jax.nn's own functions, traced, are the patterns.

Recognition is by what is computed, not by who wrote it: an activation is one of jax.nn's where its expression, and for
a function with a derivative of its own that derivative too, is what tracing jax.nn's own gives.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxconv import _problem
from jaxconv._activation import NAMES, Activation
from jaxconv.accelerate.graph import Constant, Graph, Node, Value, meant, number_of


@dataclasses.dataclass(frozen=True, eq=False)
class Pattern:
    activation: str
    slope: float | None  # None: the slope is whatever stands at `slope_input`
    result: Value
    z: Value
    slope_input: Value | None


def _jax_nn() -> Iterator[tuple[str, float | None, Callable[..., Any]]]:
    named = {
        "relu": jax.nn.relu,
        "relu6": jax.nn.relu6,
        "elu": jax.nn.elu,
        "tanh": jnp.tanh,
        "sigmoid": jax.nn.sigmoid,
        "silu": jax.nn.silu,
        "gelu": functools.partial(jax.nn.gelu, approximate=True),
        "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    }
    assert {*named, "none", "leaky_relu"} == set(NAMES)
    for name, f in named.items():
        yield name, 0.0, f
    yield "leaky_relu", 0.01, jax.nn.leaky_relu
    yield "leaky_relu", None, jax.nn.leaky_relu


def _patterns(shape: tuple[int, ...], dtype: Any) -> list[Pattern]:
    patterns = []
    for name, slope, f in _jax_nn():
        args = [jax.ShapeDtypeStruct(shape, dtype)] + ([0.25] if slope is None else [])
        graph = Graph(jax.make_jaxpr(f)(*args))
        slope_input = graph.inputs[1] if slope is None else None
        patterns.append(Pattern(name, slope, graph.outputs[0], graph.inputs[0], slope_input))
    return patterns


def _same_operation(a: Node, b: Node) -> bool:
    if a.name != b.name or len(a.inputs) != len(b.inputs):
        return False
    if a.name == "custom_jvp_call":
        return a.body == b.body and a.derivative == b.derivative
    return meant(a.params) == meant(b.params)


def _unify(pattern: Pattern, p: Value, v: Value, z: Value, found: dict[str, Any]) -> bool:
    """Whether v is p's expression of z; gathers its nodes, and the slope, in `found`."""
    if p is pattern.z:
        return v is z
    if p is pattern.slope_input:
        found["slope"] = number_of(v)
        return found["slope"] is not None
    if isinstance(p, Constant):
        return isinstance(v, Constant) and _same_constant(p, v)
    if v.node is None or p.node is None or v.shape != p.shape or v.dtype != p.dtype:
        return False
    if not _same_operation(p.node, v.node):
        return False
    orders = [v.node.inputs]
    if p.made_by in ("add", "mul", "max", "min"):
        orders.append(v.node.inputs[::-1])
    for inputs in orders:
        before = dict(found, nodes=list(found["nodes"]))
        if all(_unify(pattern, a, b, z, found) for a, b in zip(p.node.inputs, inputs, strict=True)):
            found["nodes"].append(v.node)
            return True
        found.clear()
        found.update(before)
    return False


def _same_constant(a: Constant, b: Constant) -> bool:
    tracers = any(isinstance(c.value, jax.core.Tracer) for c in (a, b))
    same = a.dtype == b.dtype and a.shape == b.shape
    return not tracers and same and np.array_equal(np.asarray(a.value), np.asarray(b.value))


@dataclasses.dataclass(frozen=True)
class Activated:
    activation: Activation
    y: Value
    nodes: Sequence[Node]  # from z to y

    def hides(self, z: Value) -> bool:
        """Whether nobody else uses z, or what is between z and y."""
        between = [z, *(v for node in self.nodes for v in node.outputs if v is not self.y)]
        return all(user in self.nodes for v in between for user in v.users)


def _dependent(nodes: Sequence[Node], z: Value) -> list[Node]:
    """Those that need z. The others make constants, which other activations share."""
    needing, values = [], {z}
    for node in sorted(set(nodes), key=lambda node: node.order):
        if values.intersection(node.inputs):
            needing.append(node)
            values.update(node.outputs)
    return needing


class Activations:
    def __init__(self) -> None:
        self._known: dict[Any, list[Pattern]] = {}

    def after(self, z: Value) -> Activated | None:
        """The largest activation of z that somebody uses."""
        if z.dtype.name not in _problem.DTYPES:
            return None
        key = z.shape, z.dtype
        if key not in self._known:
            self._known[key] = _patterns(*key)
        for v in reversed(self._reach(z)):
            for pattern in self._known[key]:
                found: dict[str, Any] = {"nodes": []}
                if v.made_by == pattern.result.made_by and _unify(pattern, pattern.result, v, z, found):
                    slope = found.get("slope", pattern.slope)
                    return Activated(Activation(pattern.activation, slope), v, _dependent(found["nodes"], z))
        return None

    @staticmethod
    def _reach(z: Value) -> list[Value]:
        """Values of z's shape computed from it in few steps, in order."""
        reached, front = {}, [z]
        while front and len(reached) < 24:
            nodes = {user for v in front for user in v.users if user is not None}
            front = [v for n in nodes for v in n.outputs if v not in reached and v.shape == z.shape]
            reached.update((v, v.node.order) for v in front)
        return sorted(reached, key=reached.__getitem__)

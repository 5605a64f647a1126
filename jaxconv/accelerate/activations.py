"""Activations: jax.nn's own functions, traced, are the patterns, and what people write in their place.

Recognition is by what is computed, not by who wrote it: an activation is one of jax.nn's where its expression, and for
a function with a derivative of its own that derivative too, is what tracing jax.nn's own gives. maximum(x, 0) and its
like are taken for jax.nn's too, which differ from them in the derivative at their kinks alone.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxconv import _problem
from jaxconv._core import compat
from jaxconv._core.activations import CHEAP, NAMES, Activation
from jaxconv._core.graph import Constant, Graph, Node, Value, meant, number_of, scalar_of


@dataclasses.dataclass(frozen=True, eq=False)
class Pattern:
    activation: str
    slope: float | None  # None: the slope is whatever stands at `slope_input`
    result: Value
    z: Value
    slope_input: Value | None
    written_out: bool = False  # not jax.nn's function

    def takes(self, slope: float | None) -> bool:
        """Whether the expression is the activation with this slope: maximum(z, slope * z) is up to 1, and at an
        infinity NaN if the slope is 0."""
        return slope is None or self.result.made_by != "max" or 0 < slope <= 1


def _jax_nn() -> Iterator[tuple[str, float | None, Callable[..., Any]]]:
    """(name, slope, function); a function of two arguments has its slope from the second."""
    named = {
        "relu": jax.nn.relu,
        "relu6": jax.nn.relu6,
        "elu": jax.nn.elu,
        "tanh": jnp.tanh,
        "sigmoid": jax.nn.sigmoid,
        "silu": jax.nn.silu,
        "gelu": functools.partial(jax.nn.gelu, approximate=True),
        "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
        "hard_swish": jax.nn.hard_swish,
    }
    assert {*named, "none", "leaky_relu"} == set(NAMES)
    for name, f in named.items():
        yield name, 0.0, f
    yield "leaky_relu", 0.01, jax.nn.leaky_relu
    yield "leaky_relu", None, jax.nn.leaky_relu


# Without jax.nn.hard_sigmoid
_HARD_SIGMOIDS: tuple[Callable[[Any], Any], ...] = (
    lambda z: jnp.minimum(jnp.maximum(z + 3, 0), 6) / 6,
    lambda z: jnp.clip(z + 3, 0, 6) / 6,
    lambda z: jax.nn.relu6(z + 3) * (1 / 6),
    lambda z: jnp.clip(z / 6 + 0.5, 0, 1),
    lambda z: jnp.clip(z * (1 / 6) + 0.5, 0, 1),
)


def _written_out() -> Iterator[tuple[str, float | None, Callable[..., Any]]]:
    """The same without jax.nn. Where something else uses z too they are left: it may be part of a larger function.

    where(z > 0, z, 0) is none: it makes 0 of NaN, and a relu keeps it.
    """
    yield "relu", 0.0, lambda z: jnp.maximum(z, 0)
    yield "relu6", 0.0, lambda z: jnp.clip(z, 0, 6)
    yield "relu6", 0.0, lambda z: jnp.maximum(jnp.minimum(z, 6), 0)
    yield "relu6", 0.0, lambda z: lax.clamp(jnp.zeros((), z.dtype), z, jnp.full((), 6, z.dtype))
    yield "leaky_relu", None, lambda z, slope: jnp.where(z > 0, z, slope * z)
    yield "leaky_relu", None, lambda z, slope: jnp.where(z < 0, slope * z, z)
    yield "leaky_relu", None, lambda z, slope: jnp.maximum(z, slope * z)
    for gate in _HARD_SIGMOIDS:
        yield "hard_swish", 0.0, lambda z, gate=gate: z * gate(z)
    yield "hard_swish", 0.0, lambda z: z * jnp.clip(z + 3, 0, 6) / 6
    yield "hard_swish", 0.0, lambda z: z * jax.nn.relu6(z + 3) / 6


def _others() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Activations that jaxconv does not have, for reports. A second argument is any number."""
    yield "mish", jax.nn.mish
    yield "mish", lambda z: z * jnp.tanh(jnp.log(1 + jnp.exp(z)))
    yield "selu", jax.nn.selu
    yield "celu", jax.nn.celu
    yield "elu with an alpha other than 1", jax.nn.elu
    yield "log_sigmoid", jax.nn.log_sigmoid
    yield "softplus", jax.nn.softplus
    for gate in (jax.nn.hard_sigmoid, *_HARD_SIGMOIDS):
        yield "hard_sigmoid", gate
    yield "hard_tanh", jax.nn.hard_tanh
    yield "soft_sign", jax.nn.soft_sign
    yield "squareplus", jax.nn.squareplus
    yield "swish with a beta", lambda z, beta: z * jax.nn.sigmoid(beta * z)


# Extents that no program has: a pattern is traced once for all shapes of a rank, whose place these take.
EXTENTS = (1000003, 1000033, 1000037, 1000039, 1000081, 1000099, 1000117, 1000121)


class Context(NamedTuple):
    """What tracing depends on, besides a function and its arguments."""

    x64: bool
    mesh: jax.sharding.AbstractMesh


@functools.lru_cache(maxsize=64)
def _patterns(kind: str, rank: int, dtype: str, context: Context) -> list[Pattern]:
    """All patterns for arrays of a rank and a type."""

    def traced(name: str, slope: float | None, f: Callable[..., Any], written_out: bool = False) -> Pattern:
        args = [jax.ShapeDtypeStruct(EXTENTS[:rank], dtype)] + ([0.25] if slope is None else [])
        with jax.sharding.use_abstract_mesh(context.mesh), compat.staged():
            graph = Graph(jax.make_jaxpr(f)(*args))
        slope_input = graph.inputs[1] if slope is None else None
        return Pattern(name, slope, graph.outputs[0], graph.inputs[0], slope_input, written_out)

    if kind == "known":
        patterns = [traced(name, slope, f) for name, slope, f in _jax_nn()]
        return patterns + [traced(name, slope, f, True) for name, slope, f in _written_out()]
    several = [(name, len(inspect.signature(f).parameters) > 1, f) for name, f in _others()]
    return [traced(name, None if more else 0.0, f) for name, more, f in several]


def _context() -> Context:
    mesh = jax.sharding.get_abstract_mesh()
    if jax.sharding.AxisType.Manual in mesh.axis_types:
        # Inside shard_map: a pattern's own argument would be one that does not vary, and have other equations for it.
        mesh = jax.sharding.AbstractMesh((), ())
    return Context(jax.config.jax_enable_x64, mesh)


def _same_operation(p: Node, node: Node, pattern: Pattern, z: Value) -> bool:
    if p.name != node.name or len(p.inputs) != len(node.inputs):
        return False
    if p.name != "custom_jvp_call":
        return meant(p.params) == meant(node.params)

    bodies = (one.body.replace(str(v.shape), "like z") for one, v in ((p, pattern.z), (node, z)))
    return next(bodies) == next(bodies) and _derivative(p, pattern.z) == _derivative(node, z)


# Texts of derivatives, by what they follow from. Of a function of JAX's own that is the function: its derivative is
# traced once for all shapes of a rank.
_DERIVATIVES: dict[tuple[Any, ...], str] = {}


def _derivative(node: Node, z: Value) -> str:
    """The text of the derivative of a function of values like z, the same for all shapes of z's rank."""
    source = compat.written_in_jax(node.params["call_jaxpr"].jaxpr)
    alone = all(compat.on_no_mesh(v.aval) and v.shape == z.shape for v in node.inputs)
    if not source or not alone:
        return node.derivative.replace(str(z.shape), "like z")
    body = node.body.replace(str(z.shape), "like z")
    key = source, body, len(z.shape), tuple((v.dtype.name, v.aval.weak_type) for v in node.inputs), _context()
    if key not in _DERIVATIVES:
        _DERIVATIVES[key] = node.derivative.replace(str(z.shape), "like z")
    return _DERIVATIVES[key]


def _unify(pattern: Pattern, p: Value, v: Value, z: Value, found: dict[str, Any]) -> bool:
    """Whether v is p's expression of z; gathers its nodes, and the slope, in `found`."""
    if p is pattern.z:
        return v is z
    if pattern.slope_input is not None and _unchanged(p) is pattern.slope_input:
        found["slope"] = _number(v)
        return found["slope"] is not None
    number = _number(p)
    if number is not None:
        return v.dtype == p.dtype and _number(v) == number
    if isinstance(p, Constant):
        return isinstance(v, Constant) and _same_constant(p, v)
    same_shape = v.shape == (z.shape if p.shape == pattern.z.shape else p.shape)
    if v.node is None or p.node is None or not same_shape or v.dtype != p.dtype:
        return False
    if not _same_operation(p.node, v.node, pattern, z):
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


def _unchanged(v: Value) -> Value:
    """The scalar that v is, or is full of, before conversions."""
    v = scalar_of(v)
    while v.made_by == "convert_element_type":
        v = scalar_of(v.node.inputs[0])
    return v


def _number(v: Value) -> float | None:
    """The number that v is, or is full of, where it is known: rounded to v's type."""
    number = number_of(scalar_of(v))
    floats = number is not None and jnp.issubdtype(v.dtype, jnp.floating)
    return float(np.asarray(number, v.dtype)) if floats else number


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
    def after(self, z: Value) -> Activated | None:
        """The largest activation of z that somebody uses."""
        for pattern, y, found in self._matches(z, "known"):
            slope = found.get("slope", pattern.slope)
            activated = Activated(Activation(pattern.activation, slope), y, _dependent(found["nodes"], z))
            if activated.hides(z) or not pattern.written_out:
                return activated
        return None

    def other_after(self, z: Value) -> tuple[str, Node] | None:
        """The name of an activation of z that jaxconv does not have, and what makes its result."""
        for pattern, y, _ in self._matches(z, "others"):
            return pattern.activation, y.node
        return None

    def known_after(self, z: Value) -> Iterator[tuple[Activation, Value]]:
        """(activation, y) for each y that is an activation of z, whoever else uses z."""
        for pattern, y, found in self._matches(z, "known"):
            yield Activation(pattern.activation, found.get("slope", pattern.slope)), y

    def all_after(self, z: Value) -> Iterator[tuple[Activation, Value, Sequence[Node], bool]]:
        """(activation, y, the nodes from z to y, whether it is written out) for each y that is an activation of z,
        whoever else uses z."""
        for pattern, y, found in self._matches(z, "known"):
            activation = Activation(pattern.activation, found.get("slope", pattern.slope))
            yield activation, y, _dependent(found["nodes"], z), pattern.written_out

    def others_after(self, z: Value, name: str) -> Iterator[Value]:
        """Each y that is the activation of z that has the name, which jaxconv's epilogues do not have."""
        for pattern, y, _ in self._matches(z, "others"):
            if pattern.activation == name:
                yield y

    def _matches(self, z: Value, kind: str) -> Iterator[tuple[Pattern, Value, dict[str, Any]]]:
        """(pattern, y, what `_unify` found) for each y that is a pattern's expression of z, the largest first."""
        if z.dtype.name not in _problem.DTYPES or len(z.shape) > len(EXTENTS):
            return
        for v in reversed(self._reach(z)):
            for pattern in _patterns(kind, len(z.shape), z.dtype.name, _context()):
                found: dict[str, Any] = {"nodes": []}
                if v.made_by != pattern.result.made_by or not _unify(pattern, pattern.result, v, z, found):
                    continue
                if pattern.takes(found.get("slope")):
                    yield pattern, v, found

    @staticmethod
    def _reach(z: Value) -> list[Value]:
        """Values of z's shape computed from it in few steps, in order."""
        reached, front = {}, [z]
        while front and len(reached) < 24:
            nodes = {user for v in front for user in v.users if user is not None}
            front = [v for n in nodes for v in n.outputs if v not in reached and v.shape == z.shape]
            reached.update((v, v.node.order) for v in front)
        return sorted(reached, key=reached.__getitem__)


class Cheap(Activations):
    """Those alone that cost nothing behind another operation."""

    def after(self, z: Value) -> Activated | None:
        activated = super().after(z)
        return activated if activated is not None and activated.activation.name in CHEAP else None

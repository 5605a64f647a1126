"""`accelerate`: a function with the convolutions, dense layers and batch-norms in it replaced by jaxconv's fused calls.

The function is traced, its jaxpr becomes a graph of values, and what is recognised becomes one node:

* lax's convolutions, with a bias per output channel and an activation that follow;
* products (..., K) @ (K, N) that a bias per column or an activation follows;
* (x - mean) / sqrt(var + epsilon), with the scale, bias, residual add and activation that follow. Where mean and
  variance are those of x over every axis but one it is training, and they become results of the call as well;
  otherwise it is inference. With the convolution that makes x, where nobody else needs x, it is `conv_batchnorm`.

Recognition is by what is computed, not by who wrote it: an activation is one of jax.nn's where its expression, and for
a function with a derivative of its own that derivative too, is what tracing jax.nn's own gives. A value that somebody
else uses stays what it was; what nobody uses any more is dropped; everything else is evaluated as it stood.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

from jaxconv import _fused, _problem
from jaxconv._activation import NAMES, Activation
from jaxconv.batchnorm import batchnorm

Array = jax.Array

# ----------------------------------------------------------------------------------------------------------------------
# The report


@dataclasses.dataclass(frozen=True)
class Finding:
    """One convolution, product or batch-norm in a traced function, and what became of it."""

    what: str  # "conv", "dense", "batchnorm"
    shapes: str
    fused: str  # what the call took in: "conv + bias + relu"; empty where the operation was left
    why: str  # it was left; empty where it was replaced
    where: str  # the name scopes: for Flax the module's path


class Report(list[Finding]):
    """A list of findings that prints as a table."""

    @property
    def replaced(self) -> list[Finding]:
        return [finding for finding in self if finding.fused]

    @property
    def left(self) -> list[Finding]:
        return [finding for finding in self if not finding.fused]

    def __str__(self) -> str:
        rows = [("where", "operation", "became")]
        for finding in self:
            became = finding.fused or f"left as it was: {finding.why}"
            rows.append((finding.where or "-", f"{finding.what} {finding.shapes}", became))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


@dataclasses.dataclass(eq=False)
class _Listener:
    report: Report = dataclasses.field(default_factory=Report)


# Part of the key of jit's caches: inside it every function is traced anew, those under jit too.
_LISTENER = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def listening() -> Iterator[Report]:
    """A report that gathers what accelerated functions find while they are traced inside the context."""
    listener = _Listener()
    with _LISTENER(listener):
        yield listener.report


# ----------------------------------------------------------------------------------------------------------------------
# The graph: values and the nodes that make them


@dataclasses.dataclass(eq=False)
class Value:
    aval: Any
    node: Node | None = None  # None for an input
    index: int = 0  # among the node's outputs
    users: list[Node | None] = dataclasses.field(default_factory=list)  # None is the function's result

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.aval.shape)

    @property
    def dtype(self) -> Any:
        return self.aval.dtype

    @property
    def made_by(self) -> str:
        return "" if self.node is None else self.node.name


@dataclasses.dataclass(eq=False)
class Constant(Value):
    value: Any = None


@dataclasses.dataclass(frozen=True)
class Fork:
    """A convolution's call that also returns its input, in front of its results, for that input's other users.

    Their gradient then comes to the convolution's, which is added to it on its way.
    """

    call: Callable[..., Sequence[Array]]
    cost: int  # of adding to the gradient, in no unit


@dataclasses.dataclass(eq=False)
class Node:
    """An equation, or (with `call`) what takes the place of several."""

    order: int
    inputs: list[Value]
    outputs: list[Value]
    eqn: JaxprEqn
    name_stack: Any
    call: Callable[..., Sequence[Array]] | None = None
    fork: Fork | None = None

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    @property
    def params(self) -> dict[str, Any]:
        return self.eqn.params

    @functools.cached_property
    def body(self) -> str:
        """The text of what a custom_jvp_call computes."""
        return Graph(self.params["call_jaxpr"]).text()

    @functools.cached_property
    def derivative(self) -> str:
        """The text of the derivative rule of a custom_jvp_call."""

        def f(*args: Array) -> Any:
            return self.eqn.primitive.bind(*args, **self.eqn.primitive.get_bind_params(self.params))

        avals = [jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=_explicit(v.aval)) for v in self.inputs]
        return Graph(jax.make_jaxpr(lambda p, t: jax.jvp(f, p, t))(avals, avals)).text()


# Functions of jax.nn and jax.numpy arrive as jitted calls of these operations; such calls are read as their bodies.
LIGHT = frozenset(
    (
        *("abs", "add", "broadcast_in_dim", "clamp", "convert_element_type", "copy", "custom_jvp_call", "div", "eq"),
        *("erf", "erfc", "exp", "expm1", "ge", "gt", "integer_pow", "le", "log", "log1p", "logistic", "lt", "max"),
        *("min", "mul", "ne", "neg", "pow", "reduce_sum", "reshape", "rsqrt", "select_n", "sign", "sqrt", "square"),
        *("squeeze", "stop_gradient", "sub", "tanh"),
    )
)
JIT = ("jit", "pjit")


def _is_light(jaxpr: Jaxpr) -> bool:
    return len(jaxpr.eqns) <= 40 and all(
        not eqn.effects and (_inlined(eqn) if eqn.primitive.name in JIT else eqn.primitive.name in LIGHT)
        for eqn in jaxpr.eqns
    )


def _inlined(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name not in JIT:
        return False
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return all(type(s).__name__ == "UnspecifiedValue" for s in shardings) and _is_light(eqn.params["jaxpr"].jaxpr)


UNIT_AXES = ("reshape", "broadcast_in_dim", "squeeze")  # what adds and removes axes of extent 1, among other things


def _same_elements(v: Value) -> Value | None:
    """u where v has u's elements in u's order, with other axes of extent 1."""
    if v.made_by not in UNIT_AXES or (v.made_by == "reshape" and v.node.params["dimensions"] is not None):
        return None
    u = v.node.inputs[0]
    return u if math.prod(u.shape) == math.prod(v.shape) else None


def _meant(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters that say what an equation computes: where its result lies on a mesh is not one of them."""
    return {name: value for name, value in params.items() if name not in ("sharding", "out_sharding")}


def _explicit(aval: Any) -> Any:
    """The sharding in a value's type, on a mesh with explicit axes; None elsewhere."""
    sharding = getattr(aval, "sharding", None)
    return sharding if sharding is not None and any(axis is not None for axis in sharding.spec) else None


def _plain(params: Any) -> str:
    """An equation's parameters as text, without the functions (whose text is an address)."""
    if isinstance(params, dict):
        return str([(name, _plain(value)) for name, value in sorted(_meant(params).items()) if not callable(value)])
    if isinstance(params, ClosedJaxpr):
        return Graph(params).text()
    if isinstance(params, (tuple, list)):
        return str([_plain(value) for value in params])
    return str(int(params) if isinstance(params, np.integer) else params)


class Graph:
    """A jaxpr as values and nodes, in the order of its equations.

    What vmap writes in more steps than a person would is one value here: axes of extent 1 that come and go, scalars
    broadcast twice, and the same operation of the same operands.
    """

    def __init__(self, closed: ClosedJaxpr):
        self.nodes: list[Node] = []
        self._known: dict[Any, Value] = {}
        self.inputs = [Value(v.aval) for v in closed.jaxpr.invars]
        self.outputs = self._add(closed.jaxpr, closed.consts, self.inputs, source_info_util.new_name_stack())
        self._drop_unused()

    def _add(self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Value], outer: Any) -> list[Value]:
        values: dict[Any, Value] = dict(zip(jaxpr.invars, args, strict=True))
        for variable, const in zip(jaxpr.constvars, consts, strict=True):
            values[variable] = Constant(variable.aval, value=const)

        def read(atom: Any) -> Value:
            return Constant(atom.aval, value=atom.val) if isinstance(atom, Literal) else values[atom]

        for eqn in jaxpr.eqns:
            inputs, name_stack = [read(atom) for atom in eqn.invars], outer + eqn.source_info.name_stack
            if _inlined(eqn):
                inner = eqn.params["jaxpr"]
                values.update(zip(eqn.outvars, self._add(inner.jaxpr, inner.consts, inputs, name_stack), strict=True))
                continue
            if eqn.primitive.name == "broadcast_in_dim" and _scalar(inputs[0]) is not inputs[0]:
                inputs = [_scalar(inputs[0]), *inputs[1:]]
                eqn = eqn.replace(params={**eqn.params, "broadcast_dimensions": ()})
            node = Node(len(self.nodes), inputs, [], eqn, name_stack)
            node.outputs = [Value(v.aval, node, i) for i, v in enumerate(eqn.outvars)]
            known = self._before(node)
            if known is not None:
                values[eqn.outvars[0]] = known
                continue
            values.update(zip(eqn.outvars, node.outputs, strict=True))
            self.nodes.append(node)
        return [read(atom) for atom in jaxpr.outvars]

    def _before(self, node: Node) -> Value | None:
        """An earlier value that equals the node's only result, in its type too."""
        if node.name not in LIGHT or node.name == "custom_jvp_call" or len(node.outputs) != 1 or node.eqn.effects:
            return None
        result = node.outputs[0]
        v = _same_elements(result)
        while v is not None:
            if v.aval == result.aval:
                return v
            v = _same_elements(v)

        def key(v: Value) -> Any:
            scalar = isinstance(v, Constant) and v.shape == () and not isinstance(v.value, jax.core.Tracer)
            return (v.dtype, np.asarray(v.value).tobytes()) if scalar else id(v.value) if isinstance(v, Constant) else v

        known = self._known.setdefault((node.name, _plain(node.params), *map(key, node.inputs)), result)
        return known if known is not result and known.aval == result.aval else None

    def text(self) -> str:
        """The same for two graphs that compute the same in the same steps."""
        names: dict[Value, str] = {v: f"arg{i}" for i, v in enumerate(self.inputs)}

        def name(v: Value) -> str:
            return f"{v.dtype}:{np.asarray(v.value).tolist()}" if isinstance(v, Constant) else names[v]

        lines = []
        for node in self.nodes:
            names.update((v, f"{len(lines)}.{i}") for i, v in enumerate(node.outputs))
            shapes = [f"{v.dtype}{v.shape}" for v in node.outputs]
            lines.append(f"{shapes} = {node.name}{_plain(node.params)} {[name(v) for v in node.inputs]}")
        return "\n".join([*lines, str([name(v) for v in self.outputs])])

    def _drop_unused(self) -> None:
        needed = {v for v in self.outputs if v.node is not None}
        kept = []
        for node in reversed(self.nodes):
            if node.eqn.effects or needed.intersection(node.outputs):
                needed.update(node.inputs)
                kept.append(node)
        self.nodes = kept[::-1]
        for node in self.nodes:
            for v in node.inputs:
                v.users.append(node)
        for v in self.outputs:
            v.users.append(None)


# ----------------------------------------------------------------------------------------------------------------------
# Reading values


def _number(v: Value) -> float | None:
    """The value of a scalar that is known when the function is traced."""
    if isinstance(v, Constant):
        return float(v.value) if np.ndim(v.value) == 0 and not isinstance(v.value, jax.core.Tracer) else None
    if v.shape != () or v.node is None:
        return None
    operands = [_number(operand) for operand in v.node.inputs]
    if any(operand is None for operand in operands):
        return None
    fold: dict[str, Callable[..., Any]] = {
        "convert_element_type": lambda a: a,
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "gt": lambda a, b: a > b,
    }
    return float(fold[v.made_by](*operands)) if v.made_by in fold else None


def _widened(v: Value) -> bool:
    """Whether v is a float converted to a float that holds it exactly."""
    if v.made_by != "convert_element_type":
        return False
    source = v.node.inputs[0].dtype
    floats = jnp.issubdtype(source, jnp.floating) and jnp.issubdtype(v.dtype, jnp.floating)
    return floats and jnp.promote_types(source, v.dtype) == v.dtype


def _unconverted(v: Value) -> Value:
    while _widened(v):
        v = v.node.inputs[0]
    return v


def _scalar(v: Value) -> Value:
    """The scalar that v is a broadcast of; v itself where it is none."""
    source = v
    while source.made_by == "broadcast_in_dim":
        source = source.node.inputs[0]
    return source if source.shape == () else v


def _bare(v: Value) -> Value:
    """v without the reshapes, broadcasts to extents of 1 and widenings it went through: the same numbers in a row."""
    while True:
        if v.made_by in UNIT_AXES or _widened(v):
            source = v.node.inputs[0]
            if isinstance(source, Constant) or math.prod(source.shape) != math.prod(v.shape):
                return v
            v = source
        elif v.made_by == "select_n" and _number(v.node.inputs[0]) is not None:
            v = v.node.inputs[1 + int(_number(v.node.inputs[0]))]
        else:
            return v


def _channels(v: Value, shape: tuple[int, ...]) -> tuple[Value, int] | None:
    """(numbers, axis) where v, beside an array of `shape`, varies along one axis only and has all of its extents."""
    if v.shape == shape and v.made_by == "broadcast_in_dim":
        source = v.node.inputs[0]
        axes = [(i, a) for i, a in enumerate(v.node.params["broadcast_dimensions"]) if source.shape[i] != 1]
        if len(axes) != 1 or source.shape[axes[0][0]] != shape[axes[0][1]]:
            return None
        return _bare(source), axes[0][1]
    if len(v.shape) != len(shape) or v.shape == shape:
        return None
    axes = [a for a, extent in enumerate(v.shape) if extent != 1]
    if len(axes) != 1 or v.shape[axes[0]] != shape[axes[0]]:
        return None
    return _bare(v), axes[0]


def _operands(v: Value, name: str) -> Iterator[tuple[Value, Value]]:
    """The operands of the operation `name` that makes v, in both orders where it commutes."""
    if v.made_by == name:
        a, b = v.node.inputs
        yield a, b
        if name in ("add", "mul", "max"):
            yield b, a


# ----------------------------------------------------------------------------------------------------------------------
# Activations: jax.nn's own functions, traced, are the patterns


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
    return _meant(a.params) == _meant(b.params)


def _unify(pattern: Pattern, p: Value, v: Value, z: Value, found: dict[str, Any]) -> bool:
    """Whether v is p's expression of z; gathers its nodes, and the slope, in `found`."""
    if p is pattern.z:
        return v is z
    if p is pattern.slope_input:
        found["slope"] = _number(v)
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


# ----------------------------------------------------------------------------------------------------------------------
# Recognition


@dataclasses.dataclass(frozen=True)
class Fused:
    """What takes the place of some nodes: `call` of the inputs makes the outputs."""

    nodes: list[Node]  # the operation and what the call takes in after it; the last one makes the result
    inputs: list[Value]
    outputs: list[Value]
    call: Callable[..., Sequence[Array]]
    parts: list[str]
    fork: Fork | None = None


class _Refusal(Exception):
    """Why an operation is left as it is."""


def _bias_after(c: Value, axis: int) -> tuple[Value, Value] | None:
    """(z, b) where the only use of c is z = c + b, with b along `axis`."""
    if len(c.users) != 1 or c.users[0] is None:
        return None
    z = c.users[0].outputs[0]
    for left, right in _operands(z, "add"):
        found = _channels(right, c.shape) if left is c else None
        if found is not None and found[1] == axis and found[0].dtype == c.dtype:
            return z, found[0]
    return None


def _epilogue(c: Value, axis: int, activations: Activations) -> tuple[Value, Value | None, Activated | None]:
    """(z, b?, the activation of z?) for a convolution's or a product's result c."""
    found = _bias_after(c, axis)
    z, b = (c, None) if found is None else found
    return z, b, activations.after(z)


def _fuse_epilogue(
    node: Node,
    axis: int,
    activations: Activations,
    what: str,
    run: Callable[..., Any],
    size: int,
    transposed: Node | None = None,
    forks: bool = False,
) -> Fused:
    """`run(x, w, b, activation, return_preactivation=)` in place of the node, its bias and its activation.

    And of the node that transposes its result, where run does that too. `forks`: run takes it too.
    """
    z, b, activated = _epilogue((transposed or node).outputs[0], axis, activations)
    activation = Activation() if activated is None else activated.activation
    both = activated is not None and not activated.hides(z)
    y = z if activated is None else activated.y

    def call(x: Array, w: Array, *rest: Array) -> Sequence[Array]:
        outs = run(x, w, rest[0].reshape(size) if rest else None, activation, return_preactivation=both)
        return outs if both else [outs]

    def fork(x: Array, w: Array, *rest: Array) -> Sequence[Array]:
        b = rest[0].reshape(size) if rest else None
        x, outs = run(x, w, b, activation, return_preactivation=both, forks=True)
        return [x, *(outs if both else [outs])]

    parts = [what, *(["bias"] if b else []), *([str(activation)] if activated else [])]
    nodes = [
        node,
        *([transposed] if transposed else []),
        *([z.node] if b else []),
        *(activated.nodes if activated else []),
    ]
    outputs = [y, z] if both else [y]
    return Fused(nodes, [*node.inputs, *([b] if b else [])], outputs, call, parts, _fork(node, fork) if forks else None)


def _fork(conv: Node, call: Callable[..., Sequence[Array]]) -> Fork | None:
    """The fork of a convolution, where its gradient may have a way to add.

    The cheapest is a 1x1 convolution that steps over pixels: it adds to those that it reads, where they lie. One that
    does not step still has time for another operand, which the tiles of larger filters are not all made for.
    """
    p = conv.params
    if p["feature_group_count"] > 1 or any(d > 1 for d in p["lhs_dilation"]) or conv.inputs[0].aval.weak_type:
        return None
    pointwise = all(conv.inputs[1].shape[a] == 1 for a in p["dimension_numbers"].rhs_spec[2:])
    return Fork(call, 2 if not pointwise else 1 if set(p["window_strides"]) <= {1} else 0)


def _find_conv(node: Node, activations: Activations) -> Fused:
    x, w = node.inputs
    p = node.params
    numbers = p["dimension_numbers"]
    nd = len(x.shape) - 2
    if p["batch_group_count"] != 1:
        raise _Refusal("it has batch groups")
    if _fused.conv_layout(numbers, nd) is None:
        raise _Refusal("jaxconv has channels-last and channels-first convolutions of 1 to 3 dimensions")
    if x.dtype != w.dtype or p["preferred_element_type"] not in (None, x.dtype) or x.dtype.name not in _problem.DTYPES:
        raise _Refusal(f"its types are {x.dtype} and {w.dtype} -> {node.outputs[0].dtype}")
    if p.get("out_sharding") is not None:
        raise _Refusal("its result has a sharding of its own")
    _refuse_algorithms(p["precision"])
    if 0 in (*x.shape, *w.shape, *node.outputs[0].shape):
        raise _Refusal("there is nothing to compute")
    run = functools.partial(_fused.conv, **_window(node))
    size = w.shape[numbers.rhs_spec[0]]
    return _fuse_epilogue(node, numbers.out_spec[1], activations, "conv", run, size, forks=True)


def _refuse_algorithms(precision: Any) -> None:
    """lax has precisions that name an algorithm; the others are pairs."""
    if precision is not None and not isinstance(precision, tuple):
        raise _Refusal(f"jaxconv has no algorithm {precision}")


def _window(conv: Node) -> dict[str, Any]:
    names = ("window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers", "feature_group_count")
    return {name: conv.params[name] for name in (*names, "precision")}


def _find_dense(node: Node, activations: Activations) -> Fused:
    x, w = node.inputs
    p = node.params
    swapped = _swapped(node)
    if swapped is not None:  # w @ x for each row x, as vmap writes it: (w x^T)^T = x w^T
        x, w = w, x
    elif p["dimension_numbers"] != (((len(x.shape) - 1,), (0,)), ((), ())) or len(w.shape) != 2:
        raise _Refusal("jaxconv's products are (..., K) @ (K, N)")
    if x.dtype != w.dtype or p["preferred_element_type"] not in (None, x.dtype) or x.dtype.name not in _problem.DTYPES:
        raise _Refusal(f"its types are {x.dtype} and {w.dtype} -> {node.outputs[0].dtype}")
    if p.get("out_sharding") is not None:
        raise _Refusal("its result has a sharding of its own")
    if 0 in (*x.shape, *w.shape):
        raise _Refusal("there is nothing to compute")
    precision = p["precision"]
    _refuse_algorithms(precision)
    if swapped is not None and precision is not None:
        precision = precision[::-1]

    def run(a: Array, b: Array, *rest: Any, **options: Any) -> Any:
        x, w = (a, b) if swapped is None else (b, a.T)
        return _fused.dense(x, w, *rest, precision=precision, **options)

    size = w.shape[1] if swapped is None else w.shape[0]
    fused = _fuse_epilogue(node, len(x.shape) - 1, activations, "dense", run, size, swapped)
    if len(fused.parts) == 1:
        raise _Refusal("neither a bias nor an activation follows")
    return fused


def _swapped(node: Node) -> Node | None:
    """The transpose that follows, where the node is w @ x^T of two matrices and nobody else uses it."""
    users = node.outputs[0].users
    by_rows = node.params["dimension_numbers"] == (((1,), (1,)), ((), ())) and len(node.inputs[0].shape) == 2
    if not by_rows or len(node.inputs[1].shape) != 2 or len(users) != 1 or users[0] is None:
        return None
    return users[0] if users[0].name == "transpose" else None


# ---- batch-norm


@dataclasses.dataclass(frozen=True)
class Normalised:
    """result = (x - mean) / sqrt(var + epsilon) * scales [+ bias], per channel."""

    result: Value
    x: Value
    axis: int
    mean: Value
    var: Value
    epsilon: float
    scales: list[Value]
    bias: Value | None


def _normalised(v: Value) -> Normalised | None:
    if not jnp.issubdtype(v.dtype, jnp.floating):
        return None
    result, shape, bias, axes = v, v.shape, None, set()

    def step(name: str) -> Value | None:
        """Goes through one operation with a value per channel, which it returns."""
        nonlocal v
        for rest, other in _operands(v, name):
            found = _channels(other, shape)
            if found is not None and rest.shape == shape:
                axes.add(found[1])
                v = rest
                return found[0]
        return None

    bias = step("add")
    factors: list[tuple[Value, int]] = []
    while True:
        if (factor := step("mul")) is not None:
            factors += _factors(factor, 1)
        elif (factor := step("div")) is not None:
            factors += _factors(factor, -1)
        else:
            break
    mean = step("sub")
    deviations = [f for f in factors if (f[0].made_by, f[1]) in (("rsqrt", 1), ("sqrt", -1))]
    scales = [f for f in factors if f not in deviations]
    if mean is None or len(axes) != 1 or len(deviations) != 1 or any(power != 1 for _, power in scales):
        return None
    for var, epsilon in _operands(deviations[0][0].node.inputs[0], "add"):
        number = _number(epsilon)
        if number is not None and number >= 0 and math.prod(var.shape) == shape[next(iter(axes))]:
            return Normalised(result, v, axes.pop(), mean, _bare(var), number, [scale for scale, _ in scales], bias)
    return None


def _factors(v: Value, power: int) -> list[tuple[Value, int]]:
    v = _bare(v)
    if v.made_by in ("mul", "div"):
        a, b = v.node.inputs
        if a.shape == b.shape == v.shape:
            return _factors(a, power) + _factors(b, power if v.made_by == "mul" else -power)
    return [(v, power)]


def _means(v: Value) -> Iterator[tuple[Value, int | None]]:
    """(u, axis) where v is the mean of u over every axis but `axis`; several, where a mean is taken in stages.

    Under vmap with an axis name there are two: over the axes of an example, and over the examples (psum).
    """
    steps: list[Node] = []
    count = 1.0
    v = _bare(v)
    while v.node is not None:
        numbers = [_number(operand) for operand in v.node.inputs]
        if v.made_by == "div" and numbers[1]:
            count *= numbers[1]
            v = _bare(v.node.inputs[0])
        elif v.made_by == "mul" and (numbers[0] or numbers[1]):
            count /= numbers[1] or numbers[0]
            v = _bare(v.node.inputs[0 if numbers[1] else 1])
        elif v.made_by == "reduce_sum" or _sums_an_axis(v.node):
            steps.append(v.node)
            v = v.node.inputs[0]
            axes = _kept(v.shape, steps[::-1])
            size = math.prod(v.shape[a] for a in range(len(v.shape)) if axes is not None and a not in axes)
            # A reciprocal is rounded to float32: half an ulp of it, and there may be one for each stage.
            if axes is not None and len(axes) == 1 and abs(count - size) <= 2e-6 * size:
                yield v, axes[0]
            v = _bare(v)
        else:
            return


def _sums_an_axis(node: Node) -> bool:
    """Whether it is the psum that vmap with an axis name leaves: over an axis of the array, not of a mesh."""
    p = node.params
    return node.name == "psum" and len(node.inputs) == 1 and _is_axes(p["axes"]) and p["axis_index_groups"] is None


def _is_axes(axes: Any) -> bool:
    return all(isinstance(a, (int, np.integer)) for a in axes)


def _kept(shape: tuple[int, ...], sums: Sequence[Node]) -> list[int] | None:
    """The axes of `shape`, of those longer than 1, that are left after the sums; None where others are in between."""
    left = [a for a, extent in enumerate(shape) if extent != 1]
    for node in sums:
        entering = node.inputs[0].shape
        positions = [a for a, extent in enumerate(entering) if extent != 1]
        if [entering[a] for a in positions] != [shape[a] for a in left]:
            return None
        left = [a for a, at in zip(left, positions, strict=True) if at not in node.params["axes"]]
    return left


def _is_mean(v: Value, axis: int, accept: Callable[[Value], bool]) -> bool:
    """Whether v is the mean, over every axis but `axis`, of something that `accept` accepts."""
    return any(at == axis and accept(u) for u, at in _means(v))


def _squared(v: Value | None) -> Value | None:
    if v is None or v.node is None:
        return None
    if v.made_by == "square" or (v.made_by == "integer_pow" and v.node.params["y"] == 2):
        return v.node.inputs[0]
    if v.made_by == "mul" and v.node.inputs[0] is v.node.inputs[1]:
        return v.node.inputs[0]
    return None


def _is_variance_of(v: Value, x: Value, axis: int) -> bool:
    """Whether v is the biased variance of x over every axis but `axis`, computed in any of the usual ways."""

    def is_x(u: Value | None) -> bool:
        return u is not None and _unconverted(u) is x

    def is_mean(u: Value | None) -> bool:
        return u is not None and _is_mean(u, axis, is_x)

    def is_centred_square(u: Value) -> bool:
        centred = _squared(u)
        if centred is None or centred.made_by != "sub":
            return False
        found = _channels(centred.node.inputs[1], centred.shape)
        return is_x(centred.node.inputs[0]) and found is not None and found[1] == axis and is_mean(found[0])

    v = _bare(v)
    for low, rest in _operands(v, "max"):
        if _number(low) == 0:
            v = _bare(rest)
            break
    for second_moment, square in _operands(v, "sub"):
        return _is_mean(second_moment, axis, lambda u: is_x(_squared(u))) and is_mean(_squared(_bare(square)))
    return _is_mean(v, axis, is_centred_square)


def _is_compared(var: Value) -> bool:
    """Whether var is max(0, v), and v has other users: the derivative of max, which asks whether v equals var.

    It would not, where a call's variance, rounded otherwise, takes var's place, and the gradient would lose a term.
    """
    return any(
        _number(low) == 0 and any(user is not var.node for user in rest.users) for low, rest in _operands(var, "max")
    )


def _leads_only_to(v: Value, ends: Sequence[Value]) -> bool:
    """Whether whatever is computed from v is computed from `ends`."""
    seen, front = set(ends), [v]
    while front:
        for user in front.pop().users:
            if user is None or user.eqn.effects:
                return False
            new = [out for out in user.outputs if out not in seen]
            seen.update(new)
            front += new
    return True


def _find_batchnorm(n: Normalised, activations: Activations, conv: Node | None = None) -> Iterator[Fused]:
    """The replacements, those that take in most first: a residual may need what only comes later.

    `conv` is the convolution that makes n.x, where there is one: the two are a pair if nobody else needs its result.
    """
    x0 = _unconverted(n.x)
    channels = n.x.shape[n.axis]
    is_mean = _is_mean(n.mean, n.axis, lambda u: _unconverted(u) is x0)
    training = is_mean and _is_variance_of(n.var, x0, n.axis)
    if training and _is_compared(n.var):
        raise _Refusal("its gradient is taken inside the function: accelerate the loss, before its gradient is taken")
    y = n.result
    if len(y.users) == 1 and y.users[0] is not None and y.users[0].name == "convert_element_type":
        narrowed = y.users[0].outputs[0]
        y = narrowed if jnp.issubdtype(narrowed.dtype, jnp.floating) else y
    # Computed in x's dtype where the result has it; else in that in which the function does.
    dtype = x0.dtype if y.dtype == x0.dtype else n.result.dtype
    if {dtype.name, y.dtype.name} - set(_problem.DTYPES):
        raise _Refusal(f"its types are {x0.dtype} -> {y.dtype}")
    params = jnp.float64 if dtype == jnp.float64 else jnp.float32
    x = x0 if jnp.promote_types(x0.dtype, dtype) == dtype else n.x
    shared = [x, n.mean, n.var, *n.scales, *([n.bias] if n.bias else [])]

    def made(z: Value, out: Value, residual: Value | None, activated: Activated | None) -> Fused:
        activation = activated.activation if activated else Activation()
        outputs = [out, n.mean, n.var] if training else [out]
        pair = x is x0 and dtype == x0.dtype and _leads_only_to(x0, outputs)
        made_by = conv if pair else None

        def call(*values: Array, forks: bool = False) -> Sequence[Array]:
            given = iter(values)
            operands = [next(given), next(given)] if made_by else [next(given).astype(dtype)]
            mean, var = (None, None) if training else (_row(next(given)), _row(next(given)))
            scales = [_row(next(given)) for _ in n.scales]
            bias = _row(next(given)) if n.bias else None
            # With no momentum the running statistics become those of the batch.
            zeros = jnp.zeros(channels, params)
            run = functools.partial(_fused.conv_batchnorm, **_window(made_by)) if made_by else batchnorm
            results = run(
                *operands,
                functools.reduce(jnp.multiply, scales) if scales else None,
                bias,
                zeros if mean is None else mean,
                zeros if var is None else var,
                training=training,
                momentum=0.0,
                epsilon=n.epsilon,
                activation=activation,
                residual=next(given).astype(dtype) if residual else None,
                channel_axis=n.axis,
                **({"forks": True} if forks else {}),
            )
            passed, (result, mean, var) = results if forks else (None, results)
            outs = [passed] * forks + [result.astype(out.dtype)]
            if training:
                outs += [s.reshape(v.shape).astype(v.dtype) for s, v in ((mean, n.mean), (var, n.var))]
            return outs

        def _row(a: Array) -> Array:
            return a.reshape(channels).astype(params)

        kind = "batchnorm (training)" if training else "batchnorm (inference)"
        parts = [kind, *(["residual"] if residual else []), *([str(activation)] if activated else [])]
        parts = ["conv", *parts] if made_by else parts
        inputs = [v for v in shared if not (training and v in (n.mean, n.var))] + ([residual] if residual else [])
        inputs = [*made_by.inputs, *inputs[1:]] if made_by else inputs
        nodes = [n.result.node, *([z.node] if residual else []), *(activated.nodes if activated else [])]
        fork = _fork(made_by, functools.partial(call, forks=True)) if made_by and training else None
        return Fused(nodes, inputs, outputs, call, parts, fork)

    def with_activation(z: Value, residual: Value | None) -> Iterator[Fused]:
        activated = activations.after(z)
        if activated is not None and activated.hides(z):
            yield made(z, activated.y, residual, activated)
        yield made(z, z, residual, None)

    if len(y.users) == 1 and y.users[0] is not None and y.users[0].name == "add":
        total = y.users[0].outputs[0]
        for left, right in _operands(total, "add"):
            if left is y and right is not y and right.shape == y.shape and right.dtype == y.dtype:
                yield from with_activation(total, right)
    yield from with_activation(y, None)


# ----------------------------------------------------------------------------------------------------------------------
# Replacement and evaluation


class Rewriting:
    """A graph with its recognised parts replaced."""

    def __init__(self, closed: ClosedJaxpr, report: Report, activations: Activations):
        self.graph = Graph(closed)
        self._closed, self._report, self._activations = closed, report, activations
        self._maker: dict[Value, Node] = {}  # of the values that a fused call makes
        self._covered: set[Node] = set()  # what fused calls stand for
        self._inner: dict[Node, dict[str, Any]] = {}  # changed parameters of nodes with functions inside
        self._find()
        self.changed = bool(self._maker or self._inner)

    # ---- what is replaced
    def _find(self) -> None:
        taken: set[Value] = set()
        found: dict[Node, Normalised] = {}
        for node in reversed(self.graph.nodes):
            if node.name in ("add", "mul", "div") and node.outputs[0] not in taken:
                normalised = _normalised(node.outputs[0])
                if normalised is not None:
                    found[node] = normalised
                    # Its inner products are no batch-norms of their own.
                    v = node.outputs[0]
                    while v is not normalised.x:
                        taken.add(v)
                        v = next(u for u in v.node.inputs if u.shape == v.shape and not _channels(u, v.shape))
        for node in self.graph.nodes:
            if node in found:
                n = found[node]
                conv = self._bare_conv(_unconverted(n.x), n.axis)
                self._try("batchnorm", node, n.x.shape, lambda n=n, c=conv: _find_batchnorm(n, self._activations, c))
            elif node.name == "conv_general_dilated":
                self._try("conv", node, node.inputs[0].shape, lambda n=node: iter([_find_conv(n, self._activations)]))
            elif node.name == "dot_general":
                self._try("dense", node, node.inputs[0].shape, lambda n=node: iter([_find_dense(n, self._activations)]))
            else:
                self._look_inside(node)

    def _bare_conv(self, v: Value, channel_axis: int) -> Node | None:
        """The convolution that makes v, where jaxconv has it and nothing but it makes v."""
        node = v.node
        if node is None or node.name != "conv_general_dilated" or v not in self._maker:
            return None
        p, nd = node.params, len(v.shape) - 2
        found = _fused.conv_batchnorm_layout(p["dimension_numbers"], nd, p["lhs_dilation"], channel_axis)
        return None if found is None else node

    def _try(self, what: str, node: Node, x: tuple[int, ...], candidates: Callable[[], Iterator[Fused]]) -> None:
        weights = "" if what == "batchnorm" else f", {_text(node.inputs[1])}"
        shapes = (_text(node.inputs[0]) if what != "batchnorm" else f"{node.outputs[0].dtype}{list(x)}") + weights
        where = str(node.name_stack)
        why = "its parts need one another"
        try:
            for fused in candidates():
                if not self._fits(fused):
                    continue
                last = fused.nodes[-1]
                made = Node(last.order, fused.inputs, fused.outputs, last.eqn, last.name_stack, fused.call, fused.fork)
                self._covered.update(fused.nodes)
                self._maker.update(dict.fromkeys(fused.outputs, made))
                self._report.append(Finding(what, shapes, " + ".join(fused.parts), "", where))
                return
        except _Refusal as refusal:
            why = str(refusal)
        self._report.append(Finding(what, shapes, "", why, where))

    def _fits(self, fused: Fused) -> bool:
        """Whether no other call stands for the same, and nothing that the call takes depends on what it makes."""
        if self._covered.intersection(fused.nodes) or any(v in self._maker for v in fused.outputs):
            return False
        ends, seen, front = set(fused.outputs), set(), list(fused.inputs)
        while front:
            v = front.pop()
            if v in ends:
                return False
            maker = self._maker.get(v, v.node)
            if maker is not None and maker not in seen:
                seen.add(maker)
                front += maker.inputs
        return True

    def _look_inside(self, node: Node) -> None:
        """Rewrites the functions that an equation carries."""
        names = INSIDE.get(node.name, ())
        if not names:
            for _ in _hidden(node):
                reason = f"inside {node.name}, which is not looked into"
                self._report.append(Finding("conv, dense or batchnorm", "", "", reason, str(node.name_stack)))
            return
        changed = {}
        for name in names:
            inside = node.params[name]
            if isinstance(inside, tuple):
                new = tuple(self._rewritten(one) for one in inside)
                same = all(a is b for a, b in zip(new, inside, strict=True))
            else:
                new = self._rewritten(inside)
                same = new is inside
            if not same:
                changed[name] = new
        if changed:
            self._inner[node] = changed

    def _rewritten(self, inside: ClosedJaxpr | Jaxpr) -> ClosedJaxpr | Jaxpr:
        closed = inside if isinstance(inside, ClosedJaxpr) else ClosedJaxpr(inside, ())
        findings = Report()
        rewriting = Rewriting(closed, findings, self._activations)
        if not rewriting.changed:
            self._report += findings
            return inside
        new = jax.make_jaxpr(rewriting.run)(*closed.in_avals)
        same = [(a.shape, a.dtype, a.weak_type) for a in new.out_avals] == [
            (a.shape, a.dtype, a.weak_type) for a in closed.out_avals
        ]
        if not same or new.consts or new.effects != closed.effects:
            why = "the function around it would change its type"
            self._report += [dataclasses.replace(f, fused="", why=f.why or why) for f in findings]
            return inside
        self._report += findings
        return new if isinstance(inside, ClosedJaxpr) else new.jaxpr

    # ---- evaluation
    def _schedule(self) -> tuple[list[Node], set[Node]]:
        """The nodes that are needed, each after what it takes, otherwise in the equations' order; and which are forks.

        A value that a convolution and others use goes through the convolution to them, so that the gradients are added
        in the convolution's: of several the one whose gradient adds for the least.
        """
        graph = self.graph
        effectful = [node for node in graph.nodes if node.eqn.effects]
        # effects stay in order
        before = {node: [earlier] for earlier, node in itertools.pairwise(effectful)}

        def maker(v: Value) -> Node | None:
            return self._maker.get(v, v.node)

        def needs(node: Node) -> list[Node]:
            return [m for v in node.inputs if (m := maker(v)) is not None] + before.get(node, [])

        def all_needs(node: Node) -> set[Node]:
            found, front = set(), [node]
            while front:
                new = set(needs(front.pop())) - found
                found |= new
                front += new
            return found

        needed: set[Node] = set()
        front = [m for v in graph.outputs if (m := maker(v)) is not None] + effectful
        while front:
            node = front.pop()
            if node not in needed:
                needed.add(node)
                front += needs(node)
        users: dict[Value, set[Node]] = {}
        for node in needed:
            for v in node.inputs:
                users.setdefault(v, set()).add(node)
        forks: set[Node] = set()
        for node in sorted((n for n in needed if n.fork), key=lambda node: (node.fork.cost, node.order)):
            v = node.inputs[0]
            others = users[v] - {node}
            taken = any(user in forks and user.inputs[0] is v for user in others)
            if others and not taken and others.isdisjoint(all_needs(node)):
                forks.add(node)
                for user in others:
                    before[user] = [*before.get(user, []), node]
        ordered, done = [], set()
        for first in sorted(needed, key=lambda node: node.order):
            stack = [first]
            while stack:
                node = stack[-1]
                waiting = [] if node in done else [m for m in needs(node) if m not in done]
                if waiting:
                    stack += waiting
                    continue
                stack.pop()
                if node not in done:
                    done.add(node)
                    ordered.append(node)
        return ordered, forks

    def run(self, *args: Array) -> list[Array]:
        if not self.changed:
            return jaxpr_as_fun(self._closed)(*args)
        given: dict[Value, Any] = dict(zip(self.graph.inputs, args, strict=True))
        known = dict(given)

        def read(v: Value) -> Any:
            return v.value if isinstance(v, Constant) else known[v]

        ordered, forks = self._schedule()
        for node in ordered:
            info = node.eqn.source_info
            name_stack = source_info_util.current_name_stack() + node.name_stack
            with source_info_util.user_context(info.traceback, name_stack=name_stack), node.eqn.ctx.manager:
                values = [read(v) for v in node.inputs]
                if node in forks:
                    known[node.inputs[0]], *outs = node.fork.call(*(jnp.asarray(v) for v in values))
                elif node.call is not None:
                    outs = node.call(*(jnp.asarray(v) for v in values))
                else:
                    primitive = node.eqn.primitive
                    params = primitive.get_bind_params({**node.params, **self._inner.get(node, {})})
                    outs = primitive.bind(*values, **params)
                    outs = outs if primitive.multiple_results else [outs]
            for v, out in zip(node.outputs, outs, strict=True):
                if self._maker.get(v, node) is node:
                    known[v] = out
        return [given[v] if v in given else read(v) for v in self.graph.outputs]


# The equations that carry functions, and the parameters that hold them.
INSIDE = {
    "jit": ("jaxpr",),
    "pjit": ("jaxpr",),
    "closed_call": ("call_jaxpr",),
    "checkpoint": ("jaxpr",),
    "remat2": ("jaxpr",),
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
    "custom_jvp_call": ("call_jaxpr",),
    "custom_vjp_call": ("call_jaxpr",),
}


def _hidden(node: Node) -> Iterator[JaxprEqn]:
    """Convolutions in the functions that an equation carries."""
    for value in node.params.values():
        for inside in value if isinstance(value, (tuple, list)) else (value,):
            inside = getattr(inside, "jaxpr", inside)
            for eqn in getattr(inside, "eqns", ()):
                if eqn.primitive.name == "conv_general_dilated":
                    yield eqn
                else:
                    yield from _hidden(Node(0, [], [], eqn, None))


def _text(v: Value) -> str:
    return f"{v.dtype}{list(v.shape)}"


# ----------------------------------------------------------------------------------------------------------------------
# The public function


def accelerate(f: Callable[..., Any]) -> Callable[..., Any]:
    """f with its convolutions, dense layers and batch-norms replaced by jaxconv's fused calls.

    For models that nobody wants to touch::

        step = jax.jit(jax.grad(jaxconv.accelerate(loss)))
        predict = jax.jit(jaxconv.accelerate(model.apply))
        print(jaxconv.accelerate(loss).report(params, batch))

    Replaced are `lax.conv_general_dilated` with the bias and activation that follow; (..., K) @ (K, N) with a bias or
    an activation that follow; and batch normalisation, in training and inference, with the residual add and the
    activation that follow. A convolution and the batch-norm of its result become `jaxconv.conv_batchnorm`: in
    inference one convolution, with filters that are rounded to their type once more. Activations are those of
    `jaxconv.conv2d`, written as jax.nn's functions. Inside jit, remat, scan, while, cond, custom_jvp and custom_vjp
    too; derivative rules that somebody else wrote stay theirs.

    Args:
      f: a pure function, of which arrays anywhere in its arguments are traced, as by `jax.jit`; everything else in its
        arguments (Python numbers, strings, functions) is given to it as it is. What it changes in flax.nnx's objects
        among its arguments (running statistics, random counters, an optimizer's state) is written back to them, as by
        `nnx.jit`.

    Returns:
      A function of f's arguments with f's results: the same structure, shapes and dtypes, and the same numbers up to
      rounding. It is differentiable, and can be jitted, mapped and sharded, as f is. Take the gradient of the
      accelerated function, not the accelerated gradient: in a gradient the layers are no longer recognisable.
      Its attribute `report` takes f's arguments too (or `jax.ShapeDtypeStruct`s) and returns what was replaced by
      what, and for what was not, why. `jaxconv.explain` of any function around it says the same, and more.

    f is traced anew at each call: put `jax.jit` around it.

    Raises:
      TypeError: when called, where f puts arrays into other containers among its arguments: they would be lost.
    """

    def rewriting(args: Any, kwargs: Any) -> tuple[Rewriting, Report, list[Any], Callable[[list[Array]], Any]]:
        given = _Arguments(args, kwargs)
        out_tree, changed = None, None

        def of_arrays(*arrays: Array) -> list[Any]:
            nonlocal out_tree, changed
            with given.of(arrays) as (args, kwargs, after):
                outs, out_tree = jax.tree.flatten(f(*args, **kwargs))
                changed = after()
            return [*outs, *changed.leaves]

        report = Report()
        rewritten = Rewriting(jax.make_jaxpr(of_arrays)(*given.arrays), report, Activations())

        def finish(results: list[Array]) -> Any:
            count = len(results) - len(changed.leaves)
            given.write_back(changed, results[count:])
            return jax.tree.unflatten(out_tree, results[:count])

        return rewritten, report, given.arrays, finish

    @functools.wraps(f)
    def accelerated(*args: Any, **kwargs: Any) -> Any:
        with _nnx_updates():
            rewritten, report, arrays, finish = rewriting(args, kwargs)
            if _LISTENER.value is not None:
                _LISTENER.value.report += report
            return finish(rewritten.run(*arrays))

    def report(*args: Any, **kwargs: Any) -> Report:
        with _nnx_updates():
            return rewriting(args, kwargs)[1]

    accelerated.report = report  # type: ignore[attr-defined]
    return accelerated


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))


# ---- arguments with state


def _nnx() -> Any:
    """flax.nnx where the program has imported it: without it no argument is one of its objects."""
    return sys.modules.get("flax.nnx")


def _is_graph_node(leaf: Any) -> bool:
    nnx = _nnx()
    return nnx is not None and isinstance(leaf, (nnx.Pytree, nnx.Variable))


def _nnx_updates() -> contextlib.AbstractContextManager[Any]:
    nnx = _nnx()
    return contextlib.nullcontext() if nnx is None else nnx.update_context("jaxconv.accelerate")


@dataclasses.dataclass(frozen=True)
class _Changed:
    """The state of all nnx objects after f: arrays, and what they are the leaves of."""

    leaves: list[Any]
    tree: Any = None


class _Arguments:
    """f's arguments, as arrays that are traced and everything else.

    nnx's objects (modules, optimizers, variables) are split together, so that what two of them share stays shared, and
    what f changes in them is written back, as by `nnx.jit`. What f changes in other containers would be lost, as it
    would be in a pure function's arguments: it is refused.
    """

    def __init__(self, args: Any, kwargs: Any):
        nnx = _nnx()
        leaves, self._tree = jax.tree.flatten((args, kwargs), is_leaf=_is_graph_node)
        self._objects = [i for i, leaf in enumerate(leaves) if _is_graph_node(leaf)]
        self._arrays = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]
        self._leaves = leaves
        self.arrays = [leaves[i] for i in self._arrays]
        if self._objects:
            with nnx.split_context("jaxconv.accelerate") as context:
                self._graph, state = context.split(tuple(leaves[i] for i in self._objects))
            states, self._state_tree = jax.tree.flatten(state)
            self.arrays += states

    @contextlib.contextmanager
    def of(self, arrays: Sequence[Array]) -> Iterator[tuple[Any, Any, Callable[[], _Changed]]]:
        """(args, kwargs) with `arrays` in them, and a function that, after f, says what f changed."""
        leaves = list(self._leaves)
        for i, array in zip(self._arrays, arrays, strict=False):
            leaves[i] = array
        objects: Any = ()
        if self._objects:
            state = jax.tree.unflatten(self._state_tree, arrays[len(self._arrays) :])
            with _nnx().merge_context("jaxconv.accelerate", inner=True) as context:
                objects = context.merge(self._graph, state)
            for i, obj in zip(self._objects, objects, strict=True):
                leaves[i] = obj
        args, kwargs = jax.tree.unflatten(self._tree, leaves)

        def after() -> _Changed:
            now = jax.tree.leaves((args, kwargs), is_leaf=_is_graph_node)
            if not set(map(id, leaves)).issuperset(map(id, now)):
                raise TypeError(
                    "accelerate: the function changes one of its arguments (it puts another array into a dict, list or "
                    "object that it was given), and that change would be lost. Return the new value instead; for "
                    "flax.nnx pass the module itself, or split and merge it (nnx.split, nnx.merge), or use jaxconv.nnx"
                )
            if not self._objects:
                return _Changed([])
            with _nnx().split_context("jaxconv.accelerate") as context:
                changed = context.split(objects)
            return _Changed(*jax.tree.flatten(changed))

        yield args, kwargs, after

    def write_back(self, changed: _Changed, arrays: Sequence[Array]) -> None:
        if self._objects:
            graph, state = jax.tree.unflatten(changed.tree, arrays)
            with _nnx().merge_context("jaxconv.accelerate", inner=False) as context:
                context.merge(graph, state)

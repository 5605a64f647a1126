"""A jaxpr as a graph of values and nodes, how values are read, and how a part of it is replaced.

What is said about a value here (a number, a broadcast, numbers along one axis) is what the recognition of layers asks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jaxconv import _problem
from jaxconv._core import compat

Array = jax.Array


@dataclasses.dataclass(eq=False, repr=False)
class Value:
    aval: Any
    node: Node | None = None  # None for an input
    index: int = 0  # among the node's outputs
    users: list[Node | None] = dataclasses.field(default_factory=list)  # None is the function's result
    labels: list[str] = dataclasses.field(default_factory=list)  # by which jax.checkpoint's policies know it

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.aval.shape)

    @property
    def dtype(self) -> Any:
        return self.aval.dtype

    @property
    def made_by(self) -> str:
        return "" if self.node is None else self.node.name

    def __repr__(self) -> str:
        return f"{self.made_by or type(self).__name__.lower()}:{self.dtype}{list(self.shape)}"


@dataclasses.dataclass(eq=False, repr=False)
class Constant(Value):
    value: Any = None


@dataclasses.dataclass(eq=False, repr=False)
class Node:
    """An equation, or (with `call`) what takes the place of several."""

    order: int
    inputs: list[Value]
    outputs: list[Value]
    eqn: JaxprEqn
    name_stack: Any
    call: Callable[..., Sequence[Array]] | None = None
    dead: bool = False  # replaced by others

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    @property
    def params(self) -> dict[str, Any]:
        return self.eqn.params

    def __repr__(self) -> str:
        return f"{self.outputs} = {self.name} {self.inputs}"

    def evaluate(self, values: Sequence[Any], **changed: Any) -> Sequence[Any]:
        """The results, under the equation's name, place and context; `changed`: parameters."""
        info = self.eqn.source_info
        name_stack = source_info_util.current_name_stack() + self.name_stack
        with source_info_util.user_context(info.traceback, name_stack=name_stack), self.eqn.ctx.manager:
            if self.call is not None:
                return self.call(*(jnp.asarray(v) for v in values))
            primitive = self.eqn.primitive
            typed = [as_varying(v, atom.aval) for v, atom in zip(values, self.eqn.invars, strict=True)]
            outs = primitive.bind(*typed, **primitive.get_bind_params({**self.params, **changed}))
            return outs if primitive.multiple_results else [outs]

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
        if any(compat.is_varying(atom.aval) for atom in self.eqn.invars):
            avals = [atom.aval for atom in self.eqn.invars]
        with compat.staged():  # a pattern's extents are those of no array
            return Graph(jax.make_jaxpr(lambda p, t: jax.jvp(f, p, t))(avals, avals)).text()


# Functions of jax.nn and jax.numpy arrive as jitted calls of these operations; such calls are read as their bodies.
LIGHT = frozenset(
    (
        *("abs", "add", "broadcast_in_dim", "clamp", "convert_element_type", "copy", "custom_jvp_call", "div", "eq"),
        *("erf", "erfc", "exp", "expm1", "ge", "gt", "integer_pow", "le", "log", "log1p", "logistic", "lt", "max"),
        *("min", "mul", "ne", "neg", "pow", "reduce_sum", "reshape", "round", "rsqrt", "select_n", "sign", "sqrt"),
        *("pvary", "square", "squeeze", "stop_gradient", "sub", "tanh"),
    )
)


# What such a function may do besides: jax.nn.glu takes halves.
PARTS = frozenset(("slice", "split"))
JIT = ("jit", "pjit")
REGION = "jaxconv_region"


def _is_light(jaxpr: Jaxpr) -> bool:
    def light(eqn: JaxprEqn) -> bool:
        name = eqn.primitive.name
        return light_body(eqn) is not None if name in JIT else name in LIGHT or name in PARTS

    return len(jaxpr.eqns) <= 40 and all(not eqn.effects and light(eqn) for eqn in jaxpr.eqns)


def body_of_jit(eqn: JaxprEqn, device: Any = None) -> ClosedJaxpr | None:
    """What a jitted call that says nothing of devices calls; of a region, what it holds (for a `_plan.Device`)."""
    if eqn.primitive.name == REGION:
        return eqn.params["program"].of(device)
    if eqn.primitive.name not in JIT:
        return None
    return None if _says_shardings(eqn) else eqn.params["jaxpr"]


def _says_shardings(jit: JaxprEqn) -> bool:
    shardings = (*jit.params.get("in_shardings", ()), *jit.params.get("out_shardings", ()))
    return any(type(s).__name__ != "UnspecifiedValue" for s in shardings)


def light_body(eqn: JaxprEqn, device: Any = None) -> ClosedJaxpr | None:
    body = body_of_jit(eqn, device)
    light = body is not None and (eqn.primitive.name == REGION or _is_light(body.jaxpr))
    return body if light else None


def as_varying(value: Any, aval: Any) -> Any:
    """value, inside shard_map as varying over the mesh axes over which `aval` varies."""
    if not compat.is_varying(aval):
        return value
    axes = aval.manual_axis_type.varying - compat.varying(value)
    return jax.lax.pcast(jnp.asarray(value, aval.dtype), tuple(sorted(axes)), to="varying") if axes else value


def of_type(result: Any, v: Value) -> Array:
    """result as an array of v's type: a literal is a scalar of Python's or NumPy's."""
    if isinstance(result, jax.Array) and (result.dtype, jax.typeof(result).weak_type) == (v.dtype, v.aval.weak_type):
        return result
    array = jnp.asarray(result)
    return jax.lax.convert_element_type_p.bind(array, new_dtype=v.dtype, weak_type=v.aval.weak_type, sharding=None)


EXTENT = "dim_as_value"  # the primitive that makes a number of a symbolic extent: it has no operands, and no value yet


def equations_of(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """The equation, and those in the functions that it carries."""
    yield eqn
    for value in eqn.params.values():
        for inside in value if isinstance(value, (tuple, list)) else (value,):
            for inner in getattr(getattr(inside, "jaxpr", inside), "eqns", ()):
                yield from equations_of(inner)


def asks_extent(eqn: JaxprEqn) -> bool:
    """Whether an equation, or one that it carries, depends on a symbolic extent. No operand says so."""

    def symbolic(atom: Any) -> bool:
        return not all(map(_problem.is_number, getattr(atom.aval, "shape", ())))

    return any(one.primitive.name == EXTENT or any(map(symbolic, one.outvars)) for one in equations_of(eqn))


def names_devices(eqn: JaxprEqn) -> bool:
    """Whether an equation, or one that it carries, says which devices or which of their memories hold something.
    `jax.jit` looks for such equations in a program's jaxpr, and compiles for these devices."""

    def names(one: JaxprEqn) -> bool:
        name, p = one.primitive.name, one.params
        if name == "sharding_constraint":
            return not isinstance(getattr(p["sharding"], "mesh", None), jax.sharding.AbstractMesh)
        if name == "shard_map":
            return not isinstance(p["mesh"], jax.sharding.AbstractMesh)
        if name == "device_put":
            return any(device is not None for device in p["devices"])
        if name in JIT:
            return _says_shardings(one)
        return name == "compute_on" or (name == "call_exported" and p["exported"].nr_devices > 1)

    return any(map(names, equations_of(eqn)))


def body_of_call(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """What an equation that only calls something calls. What is kept for a gradient is of no interest there."""
    if eqn.primitive.name in ("checkpoint", "remat2"):
        return ClosedJaxpr(eqn.params["jaxpr"], ())
    if eqn.primitive.name in ("closed_call", "core_call"):
        return eqn.params["call_jaxpr"]
    return body_of_jit(eqn)


def _converted(eqn: JaxprEqn, inputs: Sequence[Value]) -> Constant | None:
    """The number of a program's text that an equation gives another type, as jnp does inside shard_map (JAX 0.12)."""
    if eqn.primitive.name != "convert_element_type" or not isinstance(inputs[0], Constant) or inputs[0].shape != ():
        return None
    value = inputs[0].value
    if not isinstance(value, (bool, int, float, np.generic)) or eqn.params.get("sharding") is not None:
        return None
    return Constant(eqn.outvars[0].aval, value=np.asarray(value).astype(eqn.params["new_dtype"])[()])


UNIT_AXES = ("reshape", "broadcast_in_dim", "squeeze")  # what adds and removes axes of extent 1, among other things


def _same_elements(v: Value) -> Value | None:
    """u where v has u's elements in u's order, with other axes of extent 1."""
    if v.made_by not in UNIT_AXES or (v.made_by == "reshape" and v.node.params["dimensions"] is not None):
        return None
    u = v.node.inputs[0]
    return u if math.prod(u.shape) == math.prod(v.shape) else None


def meant(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters that say what an equation computes: where its result lies on a mesh is not one of them."""
    return {name: value for name, value in params.items() if name not in ("sharding", "out_sharding")}


def _explicit(aval: Any) -> Any:
    """The sharding in a value's type, on a mesh with explicit axes; None elsewhere."""
    sharding = getattr(aval, "sharding", None)
    return sharding if sharding is not None and any(axis is not None for axis in sharding.spec) else None


def plain(params: Any) -> str:
    """An equation's parameters as text, without the functions (whose text is an address)."""
    if isinstance(params, dict):
        return str([(name, plain(value)) for name, value in sorted(meant(params).items()) if not callable(value)])
    if isinstance(params, ClosedJaxpr):
        return Graph(params).text()
    if isinstance(params, (tuple, list)):
        return str([plain(value) for value in params])
    return str(int(params) if isinstance(params, np.integer) else params)


class Graph:
    """A jaxpr as values and nodes, in the order of its equations.

    What vmap writes in more steps than a person would is one value here: axes of extent 1 that come and go, scalars
    broadcast twice, and the same operation of the same operands. So are a value and the same value marked as varying
    over a mesh, which shard_map's types ask for in front of operations: nodes mark their operands when evaluated.
    """

    def __init__(self, closed: ClosedJaxpr, body_of: Callable[[JaxprEqn], ClosedJaxpr | None] | None = None):
        """`body_of`: what an equation is read as, where it is read as its body; None is `light_body`."""
        self._body_of = body_of or light_body
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
            if self._is_alias(eqn):
                values.update(zip(eqn.outvars, inputs, strict=True))
                continue
            if (named := self._labelled(eqn, inputs)) is not None:
                values[eqn.outvars[0]] = named
                continue
            if (number := _converted(eqn, inputs)) is not None:
                values[eqn.outvars[0]] = number
                continue
            inner = self._body_of(eqn)
            if inner is not None:
                values.update(zip(eqn.outvars, self._add(inner.jaxpr, inner.consts, inputs, name_stack), strict=True))
                continue
            if eqn.primitive.name == "broadcast_in_dim" and scalar_of(inputs[0]) is not inputs[0]:
                inputs = [scalar_of(inputs[0]), *inputs[1:]]
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

    def _is_alias(self, eqn: JaxprEqn) -> bool:
        """Whether an equation's result is its operand, to whoever reads the graph."""
        return eqn.primitive.name == "pvary"

    def _labelled(self, eqn: JaxprEqn, inputs: Sequence[Value]) -> Value | None:
        """The operand that an equation only names, where it is read as that."""
        return None

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

        expression = (node.name, plain(node.params), *map(key, node.inputs))
        known = self._known.setdefault(expression, result)
        if known.node is not None and known.node.dead:
            known = self._known[expression] = result
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
            params = {k: p for k, p in node.params.items() if k not in ("shape", "new_sizes")}  # the results' shapes
            lines.append(f"{shapes} = {node.name}{plain(params)} {[name(v) for v in node.inputs]}")
        return "\n".join([*lines, str([name(v) for v in self.outputs])])

    def _drop_unused(self) -> None:
        needed = {v for v in self.outputs if v.node is not None}
        kept = []
        for node in reversed(self.nodes):
            if node.eqn.effects or needed.intersection(node.outputs):
                needed.update(node.inputs)
                kept.append(node)
            else:
                node.dead = True
        self.nodes = kept[::-1]
        for node in self.nodes:
            for v in node.inputs:
                v.users.append(node)
        for v in self.outputs:
            v.users.append(None)


def number_of(v: Value) -> float | None:
    """The value of a scalar that is known when the function is traced."""
    if isinstance(v, Constant):
        return float(v.value) if np.ndim(v.value) == 0 and not isinstance(v.value, jax.core.Tracer) else None
    if v.shape != () or v.node is None:
        return None
    operands = [number_of(operand) for operand in v.node.inputs]
    if any(operand is None for operand in operands):
        return None
    fold: dict[str, Callable[..., Any]] = {
        "convert_element_type": lambda a: a,
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "gt": lambda a, b: a > b,
    }
    return float(fold[v.made_by](*operands)) if v.made_by in fold else None


# How far a count read off a program may be from the true one, relative.
AS_FLOAT32 = 1e-7  # itself: it is exact in float32 up to 2^24, and rounded beyond
OF_RECIPROCALS = 2e-6  # 1 / a reciprocal, or a product of several, each of which is rounded to float32


def is_count(number: float, extents: Iterable[int], tolerance: float = AS_FLOAT32) -> bool:
    """Whether a number read off the program is that of an array's elements with these extents.

    Of more than 500,000 elements one less, as an unbiased variance has, is within OF_RECIPROCALS: a divisor's tolerance
    is AS_FLOAT32. A symbolic extent is no number: where one is among them, the number is not theirs.
    """
    size = math.prod(extents)
    return _problem.is_number(size) and abs(number - size) <= tolerance * size


def averages(v: Value, number: float, extents: Iterable[int]) -> bool:
    """Whether v, a sum of an array with these extents by a number other than 0 ("mul" or "div"), is its mean."""
    if v.made_by == "mul":
        return is_count(1 / number, extents, OF_RECIPROCALS)
    return is_count(number, extents)


def extent_of(v: Value) -> Any:
    """The extent that a scalar is, where it is a symbolic one used as a number; else None."""
    while v.made_by in ("convert_element_type", "broadcast_in_dim"):
        v = v.node.inputs[0]
    return v.node.params["dim"] if v.made_by == EXTENT else None


def _widened(v: Value) -> bool:
    """Whether v is a float converted to a float that holds it exactly."""
    if v.made_by != "convert_element_type":
        return False
    source = v.node.inputs[0].dtype
    known = {source.name, v.dtype.name} <= set(_problem.DTYPES)  # no op of ours reads narrower floats in their place
    return known and _problem.promoted(source, v.dtype) == v.dtype


def unconverted(v: Value) -> Value:
    while _widened(v):
        v = v.node.inputs[0]
    return v


def scalar_of(v: Value) -> Value:
    """The scalar that v is a broadcast of; v itself where it is none."""
    source = v
    while source.made_by == "broadcast_in_dim":
        source = source.node.inputs[0]
    return source if source.shape == () else v


def bare(v: Value) -> Value:
    """v without the reshapes, broadcasts to extents of 1 and widenings it went through: the same numbers in a row."""
    while True:
        if v.made_by in UNIT_AXES or _widened(v):
            source = v.node.inputs[0]
            if isinstance(source, Constant) or math.prod(source.shape) != math.prod(v.shape):
                return v
            v = source
        elif v.made_by == "select_n" and number_of(v.node.inputs[0]) is not None:
            v = v.node.inputs[1 + int(number_of(v.node.inputs[0]))]
        else:
            return v


def channels_of(v: Value, shape: tuple[int, ...]) -> tuple[Value, int] | None:
    """(numbers, axis) where v, beside an array of `shape`, varies along one axis only and has all of its extents."""
    if len(v.shape) != len(shape) or any(a not in (1, b) for a, b in zip(v.shape, shape, strict=True)):
        return None
    source, place = v, list(range(len(shape)))  # an axis of v for each of the source's
    while source.made_by == "broadcast_in_dim" or _widened(source):
        if source.made_by == "broadcast_in_dim":
            place = [place[a] for a in source.node.params["broadcast_dimensions"]]
        source = source.node.inputs[0]
        axes = [(i, a) for i, a in enumerate(place) if source.shape[i] != 1]
        if len(axes) == 1 and source.shape != v.shape and source.shape[axes[0][0]] == shape[axes[0][1]]:
            return bare(source), axes[0][1]
    axes = [a for a, extent in enumerate(v.shape) if extent != 1]
    if len(axes) != 1 or v.shape[axes[0]] != shape[axes[0]]:
        return None
    if v.shape == shape and not (v.made_by == "reshape" and len(bare(v).shape) == 1):
        return None  # an array like the other: of one image and one pixel only a vector in that shape is numbers
    return bare(v), axes[0]


def operands_of(v: Value, name: str) -> Iterator[tuple[Value, Value]]:
    """The operands of the operation `name` that makes v, in both orders where it commutes."""
    if v.made_by == name:
        a, b = v.node.inputs
        yield a, b
        if name in ("add", "mul", "max"):
            yield b, a

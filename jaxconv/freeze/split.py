"""A program as two: what follows from some of its arguments alone (the weights), and the rest.

A weight is a value of the program that is made of bound arguments and read by what also needs others. Where such a
value only repeats or spreads smaller ones (a bias over all pixels), these are the weights, and the rest repeats them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jaxconv._core import compat
from jaxconv._core.graph import (
    UNIT_AXES,
    Array,
    Constant,
    Graph,
    Node,
    Value,
    asks_extent,
    body_of_call,
    equations_of,
    of_type,
    plain,
)
from jaxconv.joints import region

# Operations that are as well done again where their result is read: they cost no pass of their own.
ELEMENTWISE = frozenset(
    (
        *("abs", "add", "and", "clamp", "convert_element_type", "copy", "div", "eq", "exp", "ge", "gt", "integer_pow"),
        *("iota", "le", "log", "logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "rsqrt", "select_n"),
        *("sign", "sqrt", "square", "stop_gradient", "sub", "tanh"),
    )
)
RANDOM = frozenset(("random_bits", "random_gamma", "rng_bit_generator", "rng_uniform", "threefry2x32"))


@dataclasses.dataclass(frozen=True)
class Weight:
    value: Value
    digest: str  # of the expression that makes it: equal where the same is computed of the same bound arguments


class Split:
    """A program's `weights`, `early` that makes them of its bound arguments, `run` that goes on with the others."""

    def __init__(self, closed: ClosedJaxpr, bound: Sequence[bool]):
        self.graph = Graph(closed, body_of_call)
        self.bound = [v for v, is_bound in zip(self.graph.inputs, bound, strict=True) if is_bound]
        self.free = [v for v, is_bound in zip(self.graph.inputs, bound, strict=True) if not is_bound]
        self._known = set(self.bound)
        self._cuts: dict[Value, frozenset[Value]] = {v: frozenset((v,)) for v in self.bound}
        self._bodies: dict[Node, Split] = {}  # of loops that are split
        nodes: list[Node] = []
        for node in self.graph.nodes:
            made = self._scan(node) if node.name == "scan" else [node]
            for i, node in enumerate(made):
                known = all(map(self._is_known, node.inputs)) and all(map(_can_be_kept, node.outputs))
                # Those in front of a split loop make weights of weights, whatever the loop itself asks for.
                known = known and (i < len(made) - 1 or not asks_extent(node.eqn))
                if known and not node.eqn.effects:
                    self._known.update(node.outputs)
                    self._cuts.update((v, self._cut_at(v)) for v in node.outputs)
            nodes += made
        self.graph.nodes = nodes
        weights: dict[Value, None] = {}  # in the order in which they are read
        self.late: list[Node] = []
        again: set[Node] = set()
        for node in self.graph.nodes:
            if not all(v in self._known for v in node.outputs) or node.eqn.effects:
                self._read(node.inputs, weights, again)
                self.late.append(node)
        self._read(self.graph.outputs, weights, again)
        self.late = sorted({*self.late, *again}, key=lambda node: node.order)
        digests = self._digests(weights)
        self.weights = [Weight(v, digests[v]) for v in weights]

    def _scan(self, node: Node) -> list[Node]:
        """A loop, and before it what makes its body's weights: of constants once, of slices in loops of their own."""
        p, known = node.params, [self._is_known(v) for v in node.inputs]
        num_consts, num_carry = compat.scan_counts(p)
        first = num_consts + num_carry  # of the slices
        if all(known) or not any(known) or node.eqn.effects:
            return [node]
        body = Split(p["jaxpr"], [k and not num_consts <= i < first for i, k in enumerate(known)])
        place = {v: i for i, v in enumerate(body.graph.inputs)}
        digests = {w.value: w.digest for w in body.weights}
        made = [v for v in digests if v not in place and not isinstance(v, Constant)]
        how = dict(length=p["length"], reverse=p["reverse"])
        nodes: list[Node] = []
        stacked: dict[Value, bool] = {}
        for v in made:
            sources = [body.bound[i] for i in body.made_of(v)]
            slices = [u for u in sources if place[u] >= first]
            consts = [u for u in sources if place[u] < first]
            stacked[v] = bool(slices)

            def call(*given: Array, v: Value = v, consts: Any = consts, slices: Any = slices) -> list[Array]:
                outer = dict(zip(consts, given, strict=False))
                if not slices:
                    return _evaluate(body._behind([v]), outer, [v])

                def step(_: None, xs: Any) -> tuple[None, list[Array]]:
                    return None, _evaluate(body._behind([v]), {**outer, **dict(zip(slices, xs, strict=True))}, [v])

                return jax.lax.scan(step, None, given[len(consts) :], **how)[1]

            inputs = [node.inputs[place[u]] for u in (*consts, *slices)]
            eqn = node.eqn.replace(params={**p, "weight": digests[v]})  # what tells it from another of the same inputs
            early = dataclasses.replace(node, inputs=inputs, outputs=[], call=call, eqn=eqn)
            (aval,) = jax.make_jaxpr(call)(*(u.aval for u in inputs)).out_avals
            early.outputs = [Value(aval, early)]
            nodes.append(early)
        if not made:
            return [node]
        # What the loop still reads, in the order of the body's arguments, and the made weights as arguments of it.
        read = {w.value for w in body.weights} | set(body.free)
        consts = [v for v in body.graph.inputs[:num_consts] if v in read] + [v for v in made if not stacked[v]]
        carries = body.graph.inputs[num_consts:first]
        slices = [v for v in body.graph.inputs[first:] if v in read] + [v for v in made if stacked[v]]

        def loop(*given: Array) -> list[Array]:
            outer = dict(zip(consts, given, strict=False))
            initial, xs = given[len(consts) :][: len(carries)], given[len(consts) + len(carries) :]

            def step(carry: Sequence[Array], xs: Sequence[Array]) -> tuple[list[Array], list[Array]]:
                known = {**outer, **dict(zip([*carries, *slices], [*carry, *xs], strict=True))}
                weights = [w.value.value if isinstance(w.value, Constant) else known[w.value] for w in body.weights]
                outs = body.run(weights, [known[v] for v in body.free])
                return outs[: len(carries)], outs[len(carries) :]

            carry, ys = jax.lax.scan(step, list(initial), xs, unroll=p["unroll"], **how)
            return [*carry, *ys]

        outer_of = {v: early.outputs[0] for v, early in zip(made, nodes, strict=True)}
        inputs = [outer_of[v] if v in outer_of else node.inputs[place[v]] for v in (*consts, *carries, *slices)]
        late = dataclasses.replace(node, inputs=inputs, call=loop)
        self._bodies[late] = body
        for v in late.outputs:
            v.node = late
        return [*nodes, late]

    # ---- what is known
    def _is_known(self, v: Value) -> bool:
        return isinstance(v, Constant) or v in self._known

    def _cut(self, v: Value) -> frozenset[Value]:
        """The values to keep so that v can be made again at no cost."""
        if isinstance(v, Constant):
            return frozenset((v,)) if _is_weight(v) else frozenset()
        return self._cuts[v]

    def _cut_at(self, v: Value) -> frozenset[Value]:
        node, own = v.node, frozenset((v,))
        below = frozenset().union(*map(self._cut, node.inputs))
        size, kept = math.prod(v.shape), sum(math.prod(u.shape) for u in below)
        if node.name in UNIT_AXES:
            return below if kept <= size else own
        return below if node.name in ELEMENTWISE and kept < size else own

    def _read(self, values: Iterable[Value], weights: dict[Value, None], again: set[Node]) -> None:
        """Gathers the weights, and the nodes that are evaluated again, behind values that are read."""
        front = list(values)[::-1]
        while front:
            v = front.pop()
            if not self._is_known(v):
                continue
            if v in self._cut(v):
                weights[v] = None
            elif v.node is not None and v.node not in again:
                again.add(v.node)
                front += v.node.inputs[::-1]

    def _behind(self, values: Iterable[Value]) -> list[Node]:
        needed: set[Node] = set()
        front = [v.node for v in values]
        while front:
            node = front.pop()
            if node is not None and node not in needed:
                needed.add(node)
                front += [v.node for v in node.inputs]
        return sorted(needed, key=lambda node: node.order)

    def _digests(self, values: Iterable[Value]) -> dict[Value, str]:
        found: dict[Value, str] = {v: f"argument {i} {v.aval}" for i, v in enumerate(self.bound)}

        def digest(v: Value) -> str:
            if not isinstance(v, Constant):
                return found[v]
            # An array is the same where it is the same object, which this program holds.
            return f"array {id(v.value)}" if v.shape else f"{v.dtype} {v.value}"

        for node in self._behind(values):
            text = "\n".join((node.name, plain(node.params), *map(digest, node.inputs)))
            made = hashlib.sha256(text.encode()).hexdigest()
            found.update((v, f"{made} {i} {v.aval}") for i, v in enumerate(node.outputs))
        return {v: digest(v) for v in values}

    def made_of(self, v: Value) -> list[int]:
        """Which of the bound arguments v is made of."""
        behind = {u for node in self._behind([v]) for u in node.inputs} | {v}
        return [i for i, u in enumerate(self.bound) if u in behind]

    def random(self) -> tuple[str, str] | None:
        """(primitive, where) of random numbers whose key is known: they are the same in every call."""
        for node in self.graph.nodes:
            name = next((name for name in _primitives(node.eqn) if name in RANDOM), None)
            if name is None or (node.call is not None and node not in self._bodies):
                continue
            body = self._bodies.get(node)
            if body is not None and (found := body.random()) is not None:
                return found
            # In another loop or a branch whoever draws has a key, which may be one of its operands.
            keys = [v for v in node.inputs if node.name not in RANDOM and self._is_known(v) and _is_key(v)]
            if keys or all(map(self._is_known, node.inputs)):
                return name, str(node.name_stack)
        return None

    # ---- evaluation
    def closed_over(self) -> list[Constant]:
        """The function's own arrays that the weights are made of."""
        behind = [v for node in self._behind(w.value for w in self.weights) for v in node.inputs]
        behind += [w.value for w in self.weights]
        return list(dict.fromkeys(v for v in behind if isinstance(v, Constant) and _is_weight(v)))

    def early(self, bound: Sequence[Array], closed_over: Sequence[Array]) -> list[Array]:
        """The weights, of the bound arguments and the arrays that the function closes over."""
        known = dict(zip([*self.bound, *self.closed_over()], [*bound, *closed_over], strict=True))
        wanted = [w.value for w in self.weights]
        return _evaluate(self._behind(wanted), known, wanted)

    def run(self, weights: Sequence[Array], free: Sequence[Array]) -> list[Array]:
        """The results, of the weights and the arguments that are not bound. What has no effects is a region. Its
        choices suit a captured program, as small calls of a frozen function are, and those with `graph_options`."""
        known = dict(zip([*(w.value for w in self.weights), *self.free], [*weights, *free], strict=True))
        parts, results = region.parts(self.late), self.graph.outputs
        region.run_parts(parts, known, results, lambda node: node.outputs, _evaluate, captured=True)
        return [of_type(out, v) for out, v in zip(_evaluate((), known, results), results, strict=True)]


def _evaluate(nodes: Iterable[Node], known: dict[Value, Any], wanted: Iterable[Value] = ()) -> list[Any]:
    def read(v: Value) -> Any:
        return v.value if isinstance(v, Constant) and v not in known else known[v]

    for node in nodes:
        known.update(zip(node.outputs, node.evaluate([read(v) for v in node.inputs]), strict=True))
    return [read(v) for v in wanted]


def _is_weight(v: Constant) -> bool:
    """Whether an array that the function closes over is a weight: integers (indices, sizes) stay in the program."""
    return v.shape != () and jnp.issubdtype(v.dtype, jnp.inexact)


def _is_key(v: Value) -> bool:
    raw = v.dtype == jnp.uint32 and v.shape[-1:] in ((2,), (4,))
    return raw or jnp.issubdtype(v.dtype, jax.dtypes.prng_key)


def _can_be_kept(v: Value) -> bool:
    """Whether v is an array outside of the program too: no extent is symbolic, no device of a shard_map has its own."""
    return all(isinstance(n, int) for n in getattr(v.aval, "shape", ())) and not compat.is_varying(v.aval)


def _primitives(eqn: JaxprEqn) -> Iterable[str]:
    """The names of an equation's primitive and of those in the functions that it carries."""
    for one in equations_of(eqn):
        yield one.primitive.name

"""A program as a graph that rules rewrite: values keep their meaning, what makes them changes."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jaxconv._core.graph import Array, Constant, Graph, Node, Value, as_varying, body_of_jit, of_type

Call = Callable[..., Sequence[Array]]


def _body(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """What an equation that only calls something calls. A jax.checkpoint is no such: it says what is kept."""
    if eqn.primitive.name in ("closed_call", "core_call"):
        return eqn.params["call_jaxpr"]
    return body_of_jit(eqn)


class Program(Graph):
    """A flat program. `splice` puts a function of arrays in the place of nodes; its own equations become nodes, which
    other rules may match in turn."""

    def __init__(self, closed: ClosedJaxpr, differentiated: bool = False):
        """`differentiated`: whether it is one of results and gradients, which is told to whoever listens."""
        self.differentiated = differentiated
        self._successors: dict[Value, Value] = {}
        self._traced: dict[Any, ClosedJaxpr] = {}
        self.changes: list[tuple[Sequence[Node], Sequence[Node]]] = []  # what was replaced, and by what
        super().__init__(closed, _body)

    def _is_alias(self, eqn: JaxprEqn) -> bool:
        return super()._is_alias(eqn) or (eqn.primitive.name == "reshard" and eqn.invars[0].aval == eqn.outvars[0].aval)

    def _labelled(self, eqn: JaxprEqn, inputs: Sequence[Value]) -> Value | None:
        """A value that the equation names for jax.checkpoint's policies, where it does nothing else."""
        if eqn.primitive.name != "name" or isinstance(inputs[0], Constant) or inputs[0].node is None:
            return None
        if eqn.params["name"] not in inputs[0].labels:
            inputs[0].labels.append(eqn.params["name"])
        return inputs[0]

    # ---- rewriting
    def splice(
        self, dead: Sequence[Node], inputs: Sequence[Value], outputs: Sequence[Value], call: Call, *key: Any
    ) -> list[Value]:
        """Puts `call` of the inputs in the place of the dead nodes. Its first results are the outputs, which keep their
        users; the others are returned. The caller has asked `fits`. Calls of equal keys (the function and the problems
        that it closes over) are the same function, which is traced once."""
        like, avals = dead[-1], [v.aval for v in inputs]
        jaxpr = self._traced.get((*key, *avals)) if key else None
        if jaxpr is None:
            jaxpr = jax.make_jaxpr(lambda *args: list(call(*args)))(*avals)
        if key:
            self._traced[(*key, *avals)] = jaxpr
        for node in dead:
            self._remove(node)
        first = len(self.nodes)
        results = self._add(jaxpr.jaxpr, jaxpr.consts, list(inputs), like.name_stack)
        for node in self.nodes[first:]:
            node.order = like.order
            for v in node.inputs:
                v.users.append(node)
        self.changes.append((dead, self.nodes[first:]))
        for old, new in zip(outputs, results[: len(outputs)], strict=True):
            self._merge(old, new)
        return results[len(outputs) :]

    def fits(self, dead: Sequence[Node], inputs: Sequence[Value], outputs: Sequence[Value]) -> bool:
        """Whether nobody else needs what the dead nodes make, and no input depends on an output."""
        gone, kept = set(dead), set(outputs)
        for node in dead:
            for v in node.outputs:
                if v not in kept and any(user not in gone for user in v.users):
                    return False
        makers = {v.node for v in inputs}
        seen: set[Node] = set(gone)
        front = list(outputs)
        while front:
            for user in front.pop().users:
                if user is not None and user not in seen:
                    if user in makers:
                        return False
                    seen.add(user)
                    front += user.outputs
        return makers.isdisjoint(gone)

    def successor(self, v: Value) -> Value:
        """What took the place of v, if it was replaced."""
        while v in self._successors:
            v = self._successors[v]
        return v

    def _remove(self, node: Node) -> None:
        node.dead = True
        for v in set(node.inputs):
            v.users = [user for user in v.users if user is not node]

    def _merge(self, old: Value, new: Value) -> None:
        """Whoever reads `old` reads `new`."""
        assert (old.shape, old.dtype) == (new.shape, new.dtype), f"{new.aval} in the place of {old.aval}"
        if old is new:
            return
        self._successors[old] = new
        for user in set(old.users):
            if user is not None:
                user.inputs = [new if v is old else v for v in user.inputs]
        new.users += old.users
        old.users = []
        self.outputs = [new if v is old else v for v in self.outputs]
        new.labels += [label for label in old.labels if label not in new.labels]

    def settle(self) -> None:
        """The nodes that are needed, each behind what it takes, else in their order."""
        needed: set[Node] = set()
        front = [v.node for v in self.outputs]
        while front:
            node = front.pop()
            if node is not None and node not in needed:
                needed.add(node)
                front += [v.node for v in node.inputs]
        for node in self.nodes:
            node.dead = node.dead or node not in needed  # what a later splice makes is not found in it
        rank = {node: i for i, node in enumerate(self.nodes)}
        waits = {node: len({v.node for v in node.inputs if v.node is not None}) for node in needed}
        readers: dict[Node, set[Node]] = {}
        for node in needed:
            for v in node.inputs:
                if v.node is not None:
                    readers.setdefault(v.node, set()).add(node)
                v.users = []
        ready = [(node.order, rank[node], node) for node in needed if not waits[node]]
        heapq.heapify(ready)
        ordered = []
        while ready:
            _, _, node = heapq.heappop(ready)
            ordered.append(node)
            for reader in readers.get(node, ()):
                waits[reader] -= 1
                if not waits[reader]:
                    heapq.heappush(ready, (reader.order, rank[reader], reader))
        assert len(ordered) == len(needed), "a rewritten program reads what it has not made"
        self.nodes = ordered
        for node in ordered:
            for v in node.outputs:
                v.users = []
        for node in ordered:
            for v in node.inputs:
                v.users.append(node)
        for v in self.outputs:
            v.users.append(None)

    # ---- evaluation
    def run(self, *args: Array) -> list[Array]:
        known = dict(zip(self.inputs, args, strict=True))
        return self.results(evaluate(self.nodes, known, self.outputs), self.outputs)

    def results(self, outs: Iterable[Any], values: Iterable[Value]) -> list[Array]:
        return [as_varying(of_type(out, v), v.aval) for out, v in zip(outs, values, strict=True)]


def evaluate(nodes: Iterable[Node], known: dict[Value, Any], wanted: Iterable[Value]) -> list[Any]:
    """The wanted values, of those that are known; these become more."""

    def read(v: Value) -> Any:
        return v.value if isinstance(v, Constant) and v not in known else known[v]

    for node in nodes:
        for v, out in zip(node.outputs, node.evaluate([read(u) for u in node.inputs]), strict=True):
            for label in v.labels:
                out = checkpoint_name(out, label)
            known[v] = out
    return [read(v) for v in wanted]

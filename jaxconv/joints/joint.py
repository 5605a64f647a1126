"""A differentiated program: results and gradients as one, rewritten by rules, and cut into forward and backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from jaxconv import _plan
from jaxconv._core import compat
from jaxconv._core.graph import Array, Constant, Node, Value
from jaxconv.joints.cut import fewest_bytes
from jaxconv.joints.program import Program, evaluate
from jaxconv.joints.rules import rewrite


class OneWay(Exception):
    """JAX cannot go back through a program: perhaps it can go forward, as through a loop until something holds."""


@compat.kept_weakly
@dataclasses.dataclass(eq=False, repr=False)
class Joint:
    """The program of (primals, cotangents) -> results, gradients of the varied arguments.

    Cotangents are of the main results. Those that are made of a norm's batch statistics alone (running averages) are
    no main ones: whoever trains returns them without a gradient. Where somebody asks for theirs it is added, in passes
    of its own: gradients are sums over the results.
    """

    closed: ClosedJaxpr
    varied: tuple[bool, ...]
    has_tangent: list[bool]  # of each result
    main: list[int]
    program: Program
    early: list[Node]
    kept: list[Value]  # what the backward pass reads
    late: list[Node]

    @classmethod
    def make(
        cls, closed: ClosedJaxpr, varied: tuple[bool, ...], types: Sequence[Any], device: _plan.Device
    ) -> Joint | None:
        roles = _roles_of(closed, varied)
        main = [i for i, role in enumerate(roles) if role == 2]
        has_tangent = [role > 0 for role in roles]
        if not any(has_tangent):
            return None
        n = len(varied)

        def joint(*args: Array) -> list[Array]:
            outs, pull = _vjp(closed, varied, main, args[:n])
            return [*outs, *pull(list(args[n:]))]

        cts = [compat.cotangent_type(closed.out_avals[i]) for i in main]
        try:
            traced = jax.make_jaxpr(joint)(*types, *cts)
        except ValueError as error:
            raise OneWay from error
        program = Program(traced, differentiated=True)
        for node in program.nodes:  # whoever evaluates them says that they are a derivative
            node.name_stack = compat.scopes_alone(node.name_stack)
        rewrite(program, device)
        early, kept, late = _cut(program, n, len(closed.out_avals))
        return cls(closed, varied, has_tangent, main, program, early, kept, late)

    def __repr__(self) -> str:
        return f"tangents of {self.closed}"

    def forward(self, primals: Sequence[Array]) -> tuple[list[Array], list[Array]]:
        """The results, and what the backward pass reads."""
        program, n = self.program, len(self.has_tangent)
        known = dict(zip(program.inputs, primals, strict=False))
        found = evaluate(self.early, known, [*program.outputs[:n], *self.kept])
        return program.results(found[:n], program.outputs[:n]), found[n:]

    def backward(
        self, kept: Sequence[Array], primals: Sequence[Array], cts: Sequence[Array | None]
    ) -> list[Array | None]:
        """Gradients of the varied arguments, of cotangents of the results that have a tangent; None is zero."""
        program, n = self.program, len(self.varied)
        of = dict(zip([i for i, moves in enumerate(self.has_tangent) if moves], cts, strict=True))
        wanted = program.outputs[len(self.has_tangent) :]
        grads: list[Array | None] = [None] * len(wanted)
        if any(of[i] is not None for i in self.main):
            known: dict[Value, Any] = dict(zip(self.kept, kept, strict=True))
            zero: set[Value] = set()
            for v, i in zip(program.inputs[n:], self.main, strict=True):
                known[v] = of[i]
                if of[i] is None:
                    zero.add(v)
            self._evaluate(known, zero)
            grads = [None if v in zero else known[v] if v in known else _constant(v) for v in wanted]
            grads = [g if g is None else program.results([g], [v])[0] for g, v in zip(grads, wanted, strict=True)]
        others = [i for i, ct in of.items() if i not in self.main and ct is not None]
        if others:
            _, pull = _vjp(self.closed, self.varied, others, primals)
            more = pull([of[i] for i in others])
            grads = [b if a is None else a + b for a, b in zip(grads, more, strict=True)]
        return grads

    def _evaluate(self, known: dict[Value, Any], zero: set[Value]) -> None:
        """The late nodes. They are linear in the cotangents together: of zeros they make zeros."""
        behind = set(self.program.inputs[len(self.varied) :])
        for node in self.late:
            reads = [v for v in node.inputs if v in behind]
            behind.update(node.outputs if reads else ())
            if not zero:
                evaluate([node], known, ())
            elif reads and zero.issuperset(reads):
                zero.update(node.outputs)
            elif node.name == "add_any" and zero.intersection(reads):
                (rest,) = (v for v in node.inputs if v not in zero)
                known[node.outputs[0]] = known[rest]
            else:
                for v in zero.intersection(reads):
                    known[v] = _zeros(v)
                evaluate([node], known, ())

    def pushed(self, primals: Sequence[Array], tangents: Sequence[Array]) -> list[Array]:
        """The tangents of the results that have one: JAX's own of the plain program."""
        f, varied = _of_varied(self.closed, self.varied, primals)
        chosen = [i for i, moves in enumerate(self.has_tangent) if moves]
        return jax.jvp(lambda *values: [f(*values)[i] for i in chosen], tuple(varied), tuple(tangents))[1]


def _of_varied(closed: ClosedJaxpr, varied: Sequence[bool], primals: Sequence[Array]) -> tuple[Any, list[Array]]:
    run = jaxpr_as_fun(closed)

    def f(*values: Array) -> list[Array]:
        given = iter(values)
        return run(*(next(given) if v else a for a, v in zip(primals, varied, strict=True)))

    return f, [a for a, v in zip(primals, varied, strict=True) if v]


def _vjp(closed: ClosedJaxpr, varied: Sequence[bool], main: Sequence[int], primals: Sequence[Array]) -> tuple[Any, Any]:
    """All results, and the pullback of the main ones."""
    f, values = _of_varied(closed, varied, primals)

    def of_main(*values: Array) -> tuple[list[Array], list[Array]]:
        outs = f(*values)
        return [outs[i] for i in main], outs

    _, pull, outs = jax.vjp(of_main, *values, has_aux=True)
    return outs, pull


def _zeros(v: Value) -> Array:
    return compat.zeros_of_type(v.aval)


def _constant(v: Value) -> Any:
    assert isinstance(v, Constant)
    return v.value


# ----------------------------------------------------------------------------------------------------------------------
# Which results are main ones

_STATISTICS = ("jaxconv_batchnorm_train", "jaxconv_batchnorm_given")  # ops whose results but the first are statistics
_FLAT = ("stop_gradient", "sign", "floor", "ceil", "round", "bitcast_convert_type")  # ops of floats without a tangent


def tangents_of(closed: ClosedJaxpr, varied: Sequence[bool]) -> list[bool]:
    """Whether each result has a tangent, as JAX knows it: one may go where nothing is differentiated."""
    return [role > 0 for role in _roles_of(closed, varied)]


def reaching(closed: ClosedJaxpr) -> list[bool]:
    """Of each argument, whether a tangent of it may reach a result. JAX drops the others, and what made them may have
    no derivative."""
    found = _reaching(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    return [reaches and is_inexact(v.aval) for reaches, v in zip(found, closed.jaxpr.invars, strict=True)]


def _reaching(jaxpr: Jaxpr, wanted: Sequence[bool]) -> list[bool]:
    """Integers carry no tangent. But a function that makes them by a rule of its own is asked: it may refuse one."""

    def variables(atoms: Iterable[Any], which: Iterable[bool]) -> Iterator[Any]:
        return (v for v, is_one in zip(atoms, which, strict=True) if is_one and not isinstance(v, Literal))

    needed = set(variables(jaxpr.outvars, wanted))
    for eqn in reversed(jaxpr.eqns):
        outs = [v in needed for v in eqn.outvars]
        if not any(outs):
            continue
        name = eqn.primitive.name
        has_rule = name.startswith(("custom_", "jaxconv_"))
        inner = None if name.startswith("custom_") else _inner(eqn)
        if inner is not None:
            needed.update(variables(eqn.invars, _reaching(inner, outs)))
            continue
        moves = has_rule or (name not in _FLAT and any(is_inexact(v.aval) for v in variables(eqn.outvars, outs)))
        needed.update(variables(eqn.invars, [moves or not is_inexact(v.aval) for v in eqn.invars]))
    return [v in needed for v in jaxpr.invars]


def _roles_of(closed: ClosedJaxpr, varied: Sequence[bool]) -> list[int]:
    return _roles(closed.jaxpr, [2 if v else 0 for v in varied])


def _roles(jaxpr: Jaxpr, roles: Sequence[int]) -> list[int]:
    """Of each result: 0, it has no tangent, whatever those of varied arguments are; 1, by a norm's batch statistics
    alone; 2, otherwise."""
    known: dict[Any, int] = dict(zip(jaxpr.invars, roles, strict=True))

    def role(atom: Any) -> int:
        return 0 if isinstance(atom, Literal) else known.get(atom, 0)

    for eqn in jaxpr.eqns:
        given = [role(atom) for atom in eqn.invars]
        most = max(given, default=0)
        found = [0 if eqn.primitive.name in _FLAT else most] * len(eqn.outvars)
        if eqn.primitive.name in _STATISTICS and most == 2:
            found = [2] + [1] * (len(found) - 1)
        elif most and (inner := _called(eqn)) is not None:
            found = inner(given)
        known.update((v, role if is_inexact(v.aval) else 0) for v, role in zip(eqn.outvars, found, strict=True))
    return [role(atom) if is_inexact(atom.aval) else 0 for atom in jaxpr.outvars]


def is_inexact(aval: Any) -> bool:
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, np.inexact)


def _called(eqn: Any) -> Any:
    """Roles of an equation's results from those of its operands, where it calls or repeats a program."""
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        consts, carry = compat.scan_counts(params)
        body = params["jaxpr"].jaxpr

        def repeated(given: list[int]) -> list[int]:
            while True:
                outs = _roles(body, given)
                grown = [max(a, b) for a, b in zip(given[consts : consts + carry], outs[:carry], strict=True)]
                if grown == given[consts : consts + carry]:
                    return outs
                given = [*given[:consts], *grown, *given[consts + carry :]]

        return repeated
    inner = _inner(eqn)
    if inner is None:
        return None
    if name.startswith("custom_"):  # with derivatives of its own, also of what has none otherwise
        return lambda given: [role or max(given) for role in _roles(inner, given)]
    return lambda given: _roles(inner, given)


def _inner(eqn: Any) -> Jaxpr | None:
    """The program that an equation only calls, of the same operands."""
    name, params = eqn.primitive.name, eqn.params
    if name == "jaxconv_region":
        inner = params["program"].closed
    elif name in ("jit", "pjit", "closed_call", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call"):
        inner = params.get("jaxpr", params.get("call_jaxpr"))
    else:
        return None
    inner = getattr(inner, "jaxpr", inner)
    return inner if inner is not None and len(inner.invars) == len(eqn.invars) else None


# ----------------------------------------------------------------------------------------------------------------------
# The cut


def _cut(program: Program, n: int, results: int) -> tuple[list[Node], list[Value], list[Node]]:
    """The nodes of the forward pass, what it hands over, those of the backward pass."""
    behind: set[Value] = set(program.inputs[n:])
    late: list[Node] = []
    for node in program.nodes:
        if not behind.isdisjoint(node.inputs):
            behind.update(node.outputs)
            late.append(node)
    read: dict[Value, None] = {}
    for v in [*(v for node in late for v in node.inputs), *program.outputs[results:]]:
        if v not in behind and not isinstance(v, Constant):
            read[v] = None
    after = set(late)
    early = [node for node in program.nodes if node not in after]
    kept, again = fewest_bytes(early, program.inputs[:n], list(read))
    wanted = [*program.outputs[:results], *kept]
    rank = {node: i for i, node in enumerate(program.nodes)}
    return _needed(early, wanted), kept, sorted([*again, *late], key=rank.__getitem__)


def _needed(nodes: Sequence[Node], wanted: Sequence[Value]) -> list[Node]:
    needed, kept = set(wanted), []
    for node in reversed(nodes):
        if needed.intersection(node.outputs):
            needed.update(node.inputs)
            kept.append(node)
    return kept[::-1]

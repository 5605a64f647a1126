"""A graph with its recognised parts replaced, and its evaluation.

A value that somebody else uses stays what it was; what nobody uses any more is dropped; everything else is evaluated as
it stood.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun

from jaxconv import _plan
from jaxconv._core import compat
from jaxconv._core.graph import (
    REGION,
    Array,
    Constant,
    Graph,
    Node,
    Value,
    as_varying,
    channels_of,
    equations_of,
    light_body,
    of_type,
)
from jaxconv.accelerate.activations import Activations, Cheap
from jaxconv.accelerate.eight_bits import find_integer, find_scaled, reads_eight_bits
from jaxconv.accelerate.groupnorm import First, GroupNormalised, Last, find_group_normalised, find_groupnorm
from jaxconv.accelerate.layernorm import find_layer_normalised
from jaxconv.accelerate.linear import (
    Dense,
    Folding,
    Fused,
    Refusal,
    bare_conv,
    find_conv,
    find_dense,
    find_gradient,
    linear_before,
    source_of,
)
from jaxconv.accelerate.norms import Normalised, added_later, find_batchnorm, find_normalised, find_own_pair, over_batch
from jaxconv.accelerate.pools import NAMES as POOLS
from jaxconv.accelerate.pools import find_pool
from jaxconv.accelerate.report import GRADIENT, GRADIENTS, Finding, Report
from jaxconv.accelerate.squeeze_excite import find_excited, find_squeeze_excite
from jaxconv.accelerate.upsampling import find_upsampling
from jaxconv.joints import region

CPU = _plan.Device("cpu")
NORMS = ("batchnorm", "groupnorm", "layernorm")
OVER_AXIS_0 = "it normalises by statistics over axis 0 of its input, computed in each call"


def as_written_on_cpu() -> bool:
    """Whether norms, dense layers and most of what is behind a convolution are computed on a CPU as they were written.

    No kernel is faster there, and XLA's code for a formula that somebody wrote is as fast as for any other. A gradient
    by our rules makes an activation's exponential twice, where the user's program keeps it.
    """
    return True


def _no_faster_on_cpu(what: str, fused: Fused) -> bool:
    """Whether the CPU has no code for it, nor a filter that takes it in. Of 8 bits the formula makes XLA fast."""
    return (what in NORMS and fused.layer is None) or (fused.parts[0] == "dense" and "scale" not in fused.parts)


class Rewriting:
    """A graph with its recognised parts replaced."""

    def __init__(
        self,
        closed: ClosedJaxpr,
        report: Report,
        activations: Activations,
        around: str = "",
        once: bool = False,
        of_cpu: bool = False,
        data: Sequence[bool] | None = None,
    ):
        """`around`: the name scopes of the equation that carries this function, which its own start from.

        `once`: whether values that depend on weights alone are computed once, and not in every call. `of_cpu`: the
        program for CPUs, in which norms that go into no filter, dense layers, and what is behind a convolution stay as
        they were written; but for bias, residual and a cheap activation behind one with groups, which native code
        computes. `data`: which operands are no weights; None: all.
        """
        self._of_cpu = of_cpu
        self.graph = Graph(closed, (lambda eqn: light_body(eqn, CPU)) if of_cpu else None)
        self._around, self._folding = around, Folding(once)
        self.differs = False  # whether the program for CPUs is another one
        self._closed, self._report, self._activations = closed, report, activations
        self._behind_convs = Cheap() if of_cpu and as_written_on_cpu() else activations
        self._maker: dict[Value, Node] = {}  # of the values that a fused call makes
        self._covered: set[Node] = set()  # what fused calls stand for
        self._inner: dict[Node, dict[str, Any]] = {}  # changed parameters of nodes with functions inside
        self._normalising: set[Value] = set()  # what is between what is normalised and the result of that
        self._layers: dict[Value, Dense] = {}  # of the values that dense layers give, each a call of its own
        self._left: dict[Node, Finding] = {}  # what a later call may still take in
        self._given_data = [True] * len(self.graph.inputs) if data is None else data
        self.over_batch: list[str] = []  # the name scopes where data are normalised by statistics over axis 0
        self._find()
        for eqn in (one for outer in closed.jaxpr.eqns for one in equations_of(outer)) if not of_cpu else ():
            self.differs |= eqn.primitive.name == REGION and eqn.params["program"].on_cpu is not None
        own = any(node.name.startswith("jaxconv_") for node in self.graph.nodes)  # what rules may put together
        self.changed = bool(self._maker or self._inner) or own

    @functools.cached_property
    def _data(self) -> set[Value]:
        """The values that are not made of weights alone."""
        found = {v for v, is_data in zip(self.graph.inputs, self._given_data, strict=True) if is_data}
        for node in self.graph.nodes:
            if not found.isdisjoint(node.inputs):
                found.update(node.outputs)
        return found

    # ---- what is replaced
    def _find(self) -> None:
        squeezed, done = self._find_squeezed()
        taken = self._normalising
        taken.update(v for node in done for v in node.outputs)
        found: dict[Node, Normalised] = {}
        groups: dict[Node, GroupNormalised] = {}
        for node in reversed(self.graph.nodes):
            if node.name in ("add", "mul", "div", "reshape") and node.outputs[0] not in taken:
                y = node.outputs[0]
                # Of images with one line and no scale a layer-norm is an instance-norm with channels first, too.
                grouped = find_group_normalised(y, Last()) or find_layer_normalised(y)
                grouped = grouped or find_group_normalised(y, First())
                if grouped is not None:
                    groups[node] = grouped
                    taken.update(grouped.path)
                    continue
            if node.name in ("add", "mul", "div") and node.outputs[0] not in taken:
                normalised = find_normalised(node.outputs[0])
                if normalised is not None:
                    found[node] = normalised
                    # Its inner products are no batch-norms of their own.
                    v = node.outputs[0]
                    while v is not normalised.x:
                        taken.add(v)
                        v = next(u for u in v.node.inputs if u.shape == v.shape and not channels_of(u, v.shape))
        for node in self.graph.nodes:
            self._report.extend(squeezed.get(node, []))
            if node in done:
                continue
            if node in found:
                n = found[node]
                also = ""
                if over_batch(n) and n.x in self._data:  # no weights: a filter may be standardised
                    self.over_batch.append(self._scopes(node).strip("/"))
                    also = OVER_AXIS_0 if self._folding.once else ""
                candidates = functools.partial(find_batchnorm, n, self._activations, linear_before, self._folding)
                self._try("batchnorm", node, n.x.shape, candidates, also)
            elif node in groups:
                g = groups[node]
                self._try(g.what, node, g.x.shape, lambda g=g: find_groupnorm(g, self._activations))
            elif node.name == "conv_general_dilated":
                self._try("conv", node, node.inputs[0].shape, lambda n=node: self._convs(n))
            elif node.name == "dot_general":
                self._try("dense", node, node.inputs[0].shape, lambda n=node: self._denses(n))
            elif node.name in POOLS:
                self._try("max_pool", node, node.inputs[-1].shape, lambda n=node: iter([find_pool(n)]))
            elif node.name == "gather":
                upsampling = find_upsampling(node)
                if upsampling is not None:
                    self._try("upsampling", node, upsampling.inputs[0].shape, lambda u=upsampling: iter([u]))
            elif node.name.startswith("jaxconv_"):
                self._report.already += 1
                own = find_own_pair(node) if node.name == "jaxconv_batchnorm_infer" else None
                if own is not None:
                    self._try("batchnorm", node, node.inputs[0].shape, lambda own=own: self._own_pair(own))
            else:
                self._look_inside(node)

    def _find_squeezed(self) -> tuple[dict[Node, list[Finding]], set[Node]]:
        """Replaces squeeze-and-excitations, before their small layers are taken for others: what is to be said where
        they end, and the nodes that they stand for."""
        told: dict[Node, list[Finding]] = {}
        done: set[Node] = set()
        for node in self.graph.nodes:
            e = find_excited(node.outputs[0], self._activations) if node.name == "mul" else None
            if e is None:
                continue
            before = len(self._report)
            self._try("squeeze_excite", node, e.x.shape, lambda e=e: find_squeeze_excite(e))
            told[node] = self._report[before:]
            del self._report[before:]
            done.update(e.nodes if e.result in self._maker else [])
        return told, done

    def _convs(self, node: Node) -> Iterator[Fused]:
        gradient = find_gradient(node) if "transpose(" in self._scopes(node) else None
        if gradient is not None:
            yield gradient
            return
        if reads_eight_bits(node):
            yield from find_scaled(node, self._activations, lambda r: not added_later(node, r), self._free)
        if (integer := find_integer(node)) is not None:
            yield integer
            return
        if self._of_cpu and as_written_on_cpu() and node.params["feature_group_count"] == 1:
            yield bare_conv(node)
            return
        yield from find_conv(node, self._behind_convs, lambda r: not added_later(node, r), self._free, self._folding)

    def _own_pair(self, pair: Fused) -> Iterator[Fused]:
        (node,) = pair.nodes
        z, filter = node.inputs[0], pair.inputs[1]
        if not self._folding.pays(z, filter):
            raise Refusal(self._folding.refused(z, filter))
        yield pair

    def _denses(self, node: Node) -> Iterator[Fused]:
        if reads_eight_bits(node):
            try:
                yield from find_scaled(node, self._activations, lambda r: not added_later(node, r), self._free)
            except Refusal:
                if not jnp.issubdtype(node.inputs[0].dtype, jnp.floating) or node.inputs[0].dtype.itemsize == 1:
                    raise
        layer = find_dense(node, self._activations, self._free, self._folding)
        before = self._layers.get(source_of(layer))
        # A product whose x comes from a layer's activation takes part in that one's gradient.
        if before is None or not before.activates:
            layer.refuse_bare()
        self._layers[layer.y] = layer
        yield layer.fused
        del self._layers[layer.y]

    def _free(self, v: Value) -> bool:
        return v not in self._normalising

    def _scopes(self, node: Node) -> str:
        return f"{self._around}/{node.name_stack}"

    def _try(
        self, what: str, node: Node, x: tuple[int, ...], candidates: Callable[[], Iterator[Fused]], also: str = ""
    ) -> None:
        """`also`: a sentence that the report adds to the reason."""
        if what in ("batchnorm", "groupnorm", "layernorm", "max_pool", "upsampling", "squeeze_excite"):
            shapes = f"{node.outputs[0].dtype}{list(x)}"
        else:
            shapes = f"{_text(node.inputs[0])}, {_text(node.inputs[1])}"
        where = str(node.name_stack)
        why = "its parts depend on one another"
        try:
            for fused in candidates():
                if not self._fits(fused):
                    continue
                if as_written_on_cpu() and _no_faster_on_cpu(what, fused):
                    if self._of_cpu:
                        raise Refusal("on a CPU it is computed as it was written")
                    self.differs = True
                # What is behind one without groups stays as it was written there.
                self.differs |= what == "conv" and len(fused.parts) > 1 and as_written_on_cpu() and not self._of_cpu
                # It is named after the layer, not after the activation behind it.
                layer, order = fused.layer or node, fused.nodes[-1].order
                made = Node(order, fused.inputs, fused.outputs, layer.eqn, layer.name_stack, fused.call)
                self._covered.update(fused.nodes)
                self._maker.update(dict.fromkeys(fused.outputs, made))
                if fused.layer in self._left:
                    self._report.remove(self._left.pop(fused.layer))
                why = "; ".join(filter(None, (GRADIENTS.get(fused.parts[0], fused.why), also)))
                self._report.append(Finding(what, shapes, " + ".join(fused.parts), why, where))
                self._name_what_stays_behind(fused.outputs[0], what)
                return
        except Refusal as refusal:
            why = str(refusal)
        why = "; ".join(filter(None, (_in_gradient(what, node, self._scopes(node), why), also)))
        self._left[node] = Finding(what, shapes, "", why, where)
        self._report.append(self._left[node])

    def _name_what_stays_behind(self, y: Value, what: str) -> None:
        """Says so where an activation follows that jaxconv does not have."""
        found = self._activations.other_after(y)
        if found is not None:
            name, node = found
            why = f"jaxconv has no {name}, so it is computed after the {what}"
            self._report.append(Finding("activation", _text(y), "", why, str(node.name_stack)))

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
                reason = f"it is inside {node.name}, and accelerate does not look inside that"
                self._report.append(Finding("conv, dense or batchnorm", "", "", reason, str(node.name_stack)))
            return
        changed = {}
        for name in names:
            inside = node.params[name]
            if isinstance(inside, tuple):
                new = tuple(self._rewritten(one, node, name) for one in inside)
                same = all(a is b for a, b in zip(new, inside, strict=True))
            else:
                new = self._rewritten(inside, node, name)
                same = new is inside
            if not same:
                changed[name] = new
        if changed:
            self._inner[node] = changed

    def _rewritten(self, inside: ClosedJaxpr | Jaxpr, around: Node, name: str) -> ClosedJaxpr | Jaxpr:
        """`name`: the parameter of `around` that holds it."""
        closed = inside if isinstance(inside, ClosedJaxpr) else ClosedJaxpr(inside, ())
        findings = Report()
        around_it, once = self._scopes(around), self._folding.once
        operands = [v in self._data for v in around.inputs]
        data = data_inside(around.eqn, operands, len(closed.in_avals), name == "cond_jaxpr")
        rewriting = Rewriting(closed, findings, self._activations, around_it, once, self._of_cpu, data)
        self.over_batch += rewriting.over_batch
        self.differs |= rewriting.differs
        if not rewriting.changed:
            self._report.extend(findings)
            return inside
        new = jax.make_jaxpr(rewriting.run)(*closed.in_avals)
        same = [(a.shape, a.dtype, a.weak_type) for a in new.out_avals] == [
            (a.shape, a.dtype, a.weak_type) for a in closed.out_avals
        ]
        if not same or new.consts or new.effects != closed.effects:
            why = "replacing it would change the types of the function that contains it"
            self._report.extend(dataclasses.replace(f, fused="", why=f.why or why) for f in findings)
            self._report.already += findings.already
            return inside
        self._report.extend(findings)
        return new if isinstance(inside, ClosedJaxpr) else new.jaxpr

    # ---- evaluation
    def _schedule(self) -> list[Node]:
        """The nodes that are needed, each after what it takes, otherwise in the equations' order."""
        graph = self.graph
        effectful = [node for node in graph.nodes if node.eqn.effects]
        # effects stay in order
        before = {node: [earlier] for earlier, node in itertools.pairwise(effectful)}

        def needs(node: Node) -> list[Node]:
            makers = [self._maker.get(v, v.node) for v in node.inputs]
            return [m for m in makers if m is not None] + before.get(node, [])

        ordered, done = [], set()
        ends = [self._maker.get(v, v.node) for v in graph.outputs] + effectful
        for first in sorted({m for m in ends if m is not None}, key=lambda node: node.order):
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
        return ordered

    def run(self, *args: Array) -> list[Array]:
        """The new program. What has no effects is a region, several where something with effects lies in between."""
        if not self.changed:
            outs = jaxpr_as_fun(self._closed)(*args)
            return [of_type(out, v) for out, v in zip(outs, self.graph.outputs, strict=True)]
        parts = region.parts(self._schedule())
        traced = any(isinstance(const, jax.core.Tracer) for const in self._closed.consts)
        on_cpu = None
        if self.differs and len(parts) == 1 and not parts[0].apart and not traced:
            on_cpu = self.graph.inputs, self.graph.outputs, self._on_cpu
        elif self.differs and _plan.Device.default().platform == "cpu":
            return self._other().run(*args)
        return self._run(parts, args, on_cpu)

    def _other(self) -> Rewriting:
        """The rewriting for CPUs."""
        return Rewriting(self._closed, Report(), self._activations, self._around, self._folding.once, of_cpu=True)

    def _on_cpu(self, *args: Array) -> list[Array]:
        return self._other()._flat(*args)

    def _flat(self, *args: Array) -> list[Array]:
        """The new program, to be part of a region."""
        known: dict[Value, Any] = dict(zip(self.graph.inputs, args, strict=True))
        self._evaluate(self._schedule(), known)
        return [of_type(_read(known, v), v) for v in self.graph.outputs]

    def _run(self, parts: Sequence[region.Part], args: Sequence[Array], on_cpu: region.Whole | None) -> list[Array]:
        known: dict[Value, Any] = dict(zip(self.graph.inputs, args, strict=True))
        region.run_parts(parts, known, self.graph.outputs, self._made, self._evaluate, on_cpu=on_cpu)
        outs = [of_type(_read(known, v), v) for v in self.graph.outputs]
        return [as_varying(out, aval) for out, aval in zip(outs, self._closed.out_avals, strict=True)]

    def _made(self, node: Node) -> list[Value]:
        return [v for v in node.outputs if self._maker.get(v, node) is node]

    def _evaluate(self, nodes: Sequence[Node], known: dict[Value, Any]) -> None:
        for node in nodes:
            outs = node.evaluate([_read(known, v) for v in node.inputs], **self._inner.get(node, {}))
            for v, out in zip(node.outputs, outs, strict=True):
                if self._maker.get(v, node) is node:
                    known[v] = out


def _read(known: dict[Value, Any], v: Value) -> Any:
    return v.value if isinstance(v, Constant) else known[v]


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


def data_inside(eqn: JaxprEqn, operands: Sequence[bool], count: int, is_condition: bool = False) -> list[bool] | None:
    """Which of the `count` arguments of a function that the equation calls or repeats are data; None: nobody knows.

    `operands`: which of the equation's are. `is_condition`: whether the function is a while's condition.
    """
    found, name = list(operands), eqn.primitive.name
    if name == "cond":  # the first one says which branch
        found = found[1:]
    elif name == "while":
        # Constants of the condition, those of the body, and what is carried, which becomes data.
        carry = len(eqn.outvars)
        consts, own = len(found) - carry, count - carry
        found = [*(found[:own] if is_condition else found[consts - own : consts]), *[True] * carry]
    elif name == "scan":  # what is carried becomes data
        consts, carry = compat.scan_counts(eqn.params)
        found[consts : consts + carry] = [True] * carry
    return found if len(found) == count else None


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


def _in_gradient(what: str, node: Node, where: str, why: str) -> str:
    """Why a node is left, where it may be part of a gradient: JAX writes dgrad and wgrad as convolutions too."""
    if what == "conv" and "transpose(" in where:
        numbers = node.params["dimension_numbers"]
        # A weight gradient sums over the images, which take the place of the channels.
        weights = node.params["batch_group_count"] > 1 or numbers.lhs_spec[:2] != numbers.out_spec[:2]
        return GRADIENTS["wgrad" if weights else "dgrad"]
    belongs = ("transpose(" in where or "jvp(" in where) and GRADIENT not in why
    return f"{why}; it belongs to a gradient, {GRADIENT}" if belongs else why


def _text(v: Value) -> str:
    return f"{v.dtype}{list(v.shape)}"

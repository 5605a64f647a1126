"""Gates: half of the columns of what a layer gives, times an activation of the other half.

The halves are what jnp.split or slices make of the last axis. The activation may be of either half, or none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from jaxconv import _problem
from jaxconv._core.activations import Activation
from jaxconv._core.graph import Node, Value
from jaxconv.accelerate.activations import Activations


@dataclasses.dataclass(frozen=True)
class Gated:
    """y = a * f(g)."""

    activation: Activation
    first: bool  # f is of the first half
    y: Value
    nodes: Sequence[Node]  # from z to y, in order

    def hides(self, z: Value) -> bool:
        """Whether nobody else uses z, or what is between z and y."""
        between = [z, *(v for node in self.nodes for v in node.outputs if v is not self.y)]
        return all(user in self.nodes for v in between for user in v.users)


def gate_after(z: Value, activations: Activations) -> Gated | None:
    """The gate behind z. Where there are several, the first one with an activation."""
    if z.dtype.name not in _problem.DTYPES or not z.shape or not _problem.is_number(z.shape[-1]):
        return None
    halves = list(_halves(z))
    bare = None
    for g, g_first in halves:
        for a, a_first in halves:
            if a_first == g_first:
                continue
            for activation, f, nodes, written_out in _activated(g, activations):
                y = _product(a, f)
                if y is None:
                    continue
                between = sorted({a.node, g.node, *nodes, y.node}, key=lambda node: node.order)
                gated = Gated(activation, g_first, y, between)
                # An activation that is written out, and a product of both halves, may be part of something larger.
                if written_out and not gated.hides(z):
                    continue
                if activation.name != "none":
                    return gated
                bare = bare or (gated if not g_first and gated.hides(z) else None)
    return bare


def _halves(z: Value) -> Iterator[tuple[Value, bool]]:
    """(half, whether it is the first) of z's last axis."""
    axis, size = len(z.shape) - 1, z.shape[-1]
    for node in dict.fromkeys(user for user in z.users if user is not None):
        p = node.params
        if node.name == "split" and p["axis"] == axis and len(p["sizes"]) == 2 and 2 * p["sizes"][0] == size:
            yield from zip(node.outputs, (True, False), strict=True)
        elif node.name == "slice" and p["strides"] in (None, (1,) * len(z.shape)):
            start, limit = tuple(p["start_indices"]), tuple(p["limit_indices"])
            whole = all(s == 0 for s in start[:-1]) and limit[:-1] == z.shape[:-1]
            if whole and (start[-1], limit[-1]) in ((0, size / 2), (size / 2, size)):
                yield node.outputs[0], start[-1] == 0


def _activated(g: Value, activations: Activations) -> Iterator[tuple[Activation, Value, Sequence[Node], bool]]:
    """(f, f(g), the nodes between, whether f is written out) for each activation of g, and g itself."""
    yield from activations.all_after(g)
    yield Activation(), g, [], False


def _product(a: Value, f: Value) -> Value | None:
    """a * f, where somebody multiplies them."""
    for node in a.users:
        if node is not None and node.name == "mul" and a is not f and set(node.inputs) == {a, f}:
            return node.outputs[0]
    return None

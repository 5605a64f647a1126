"""Squeeze-and-excitations: an array times gates for each image and channel, which two small layers make of its means.

The layers are products or 1x1 convolutions, with a bias or without; means, hidden numbers and gates may have axes of
extent 1, and types of their own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np

from jaxconv import _plan, _problem
from jaxconv._core.activations import Activation
from jaxconv._core.graph import (
    UNIT_AXES,
    Array,
    Constant,
    Node,
    Value,
    averages,
    channels_of,
    is_count,
    number_of,
    operands_of,
)
from jaxconv._core.graph import unconverted as unwidened
from jaxconv._ops.squeeze_excite import squeeze_excite
from jaxconv.accelerate.activations import Activations
from jaxconv.accelerate.groupnorm import numbers_along
from jaxconv.accelerate.linear import Fused, Refusal
from jaxconv.accelerate.report import GRADIENT


@dataclasses.dataclass(frozen=True)
class Layer:
    """x @ w [+ bias] for each image."""

    x: Value
    w: Value
    bias: Value | None
    transposed: bool  # w is (out, in), but for axes of extent 1
    outs: int


@dataclasses.dataclass(frozen=True)
class Excited:
    """result = x * gate(activation(mean of x over the pixels, through the first layer), through the second)."""

    result: Value
    x: Value
    first: Layer
    second: Layer
    activation: Activation
    gate: str
    nodes: list[Node]  # in order; the last one makes the result


def find_excited(v: Value, activations: Activations) -> Excited | None:
    """v as an excitation. Another user of what is in between is the caller's to refuse."""
    if v.made_by != "mul" or len(v.shape) < 3 or 0 in v.shape or not jnp.issubdtype(v.dtype, jnp.floating):
        return None
    last = len(v.shape) - 1
    for x, other in operands_of(v, "mul"):
        if x.shape != v.shape or x.dtype != v.dtype or isinstance(x, Constant):
            continue
        gates = numbers_along(other, v.shape, (0, last))
        if gates is None or isinstance(gates, Constant):
            continue
        for gate, second in _gates(_same_numbers(gates), v.shape[0], activations):
            if second.outs != v.shape[-1]:
                continue
            for activation, first in _activated(_same_numbers(second.x), v.shape[0], activations):
                if not _is_mean(_same_numbers(first.x), x):
                    continue
                nodes = _between(other, x, [first, second])
                return Excited(v, x, first, second, activation, gate, [*nodes, v.node])
    return None


def _floats(v: Value) -> bool:
    return v.made_by == "convert_element_type" and all(
        jnp.issubdtype(u.dtype, jnp.floating) for u in (v, v.node.inputs[0])
    )


def _same_numbers(v: Value) -> Value:
    """v without the axes of extent 1 and the types that it went through: the same numbers in a row, up to rounding."""
    while v.made_by in UNIT_AXES or _floats(v):
        source = v.node.inputs[0]
        moved = v.made_by == "reshape" and v.node.params["dimensions"] is not None
        if isinstance(source, Constant) or moved or math.prod(source.shape) != math.prod(v.shape):
            return v
        v = source
    return v


def _ancestors(v: Value, steps: int = 24) -> Iterator[Value]:
    """v and values of its shape that it is computed from, in few steps."""
    seen, front = {v}, [v]
    while front and len(seen) < steps:
        yield front[0]
        node = front.pop(0).node
        for u in [] if node is None else node.inputs:
            if u.shape == v.shape and u not in seen and not isinstance(u, Constant):
                seen.add(u)
                front.append(u)
    yield from front


def _gates(g: Value, images: int, activations: Activations) -> Iterator[tuple[str, Layer]]:
    """(gate, layer) for each way to read g as a gate of what a layer gives."""
    for z in _ancestors(g):
        layer = _layer(z, images)
        if layer is None:
            continue
        if any(a.name == "sigmoid" and y is g for a, y in activations.known_after(z)):
            yield "sigmoid", layer
        if any(y is g for y in activations.others_after(z, "hard_sigmoid")):
            yield "hard_sigmoid", layer


def _activated(h: Value, images: int, activations: Activations) -> Iterator[tuple[Activation, Layer]]:
    """(activation, layer) for each way to read h as an activation of what a layer gives."""
    for z in _ancestors(h):
        layer = _layer(z, images)
        if layer is None:
            continue
        if z is h:
            yield Activation(), layer
        for activation, y in activations.known_after(z):
            if y is h:
                yield activation, layer


def _layer(z: Value, images: int) -> Layer | None:
    """The layer that makes z."""
    z = _same_numbers(z)
    for rest, other in operands_of(z, "add"):
        found = channels_of(other, z.shape)
        if found is None or found[1] != len(z.shape) - 1:
            continue
        made = _product(_same_numbers(rest), images)
        if made is not None and made.outs == math.prod(found[0].shape):
            return dataclasses.replace(made, bias=found[0])
    return _product(z, images)


def _product(c: Value, images: int) -> Layer | None:
    """A product, or a 1x1 convolution of one pixel, of an array of numbers for each image."""
    node = c.node
    if node is None or len(c.shape) < 2 or math.prod(c.shape) != images * c.shape[-1]:
        return None
    if node.name == "dot_general":
        x, w = node.inputs
        plain = node.params["dimension_numbers"] == (((len(x.shape) - 1,), (0,)), ((), ()))
        if plain and len(w.shape) == 2 and math.prod(x.shape) == images * x.shape[-1]:
            return Layer(x, w, None, False, w.shape[1])
        return None
    if node.name != "conv_general_dilated":
        return None
    x, w = node.inputs
    p, rank = node.params, len(x.shape)
    numbers = p["dimension_numbers"]
    last = (0, rank - 1, *range(1, rank - 1))
    one = p["feature_group_count"] == p["batch_group_count"] == 1 and all(w.shape[a] == 1 for a in numbers.rhs_spec[2:])
    if numbers.lhs_spec != last or numbers.out_spec != last or not one:
        return None
    # Of one pixel, without padding around it, whatever the strides are.
    if math.prod(x.shape) != images * x.shape[-1] or any(pads != (0, 0) for pads in map(tuple, p["padding"])):
        return None
    into, out = numbers.rhs_spec[1], numbers.rhs_spec[0]
    return Layer(x, w, None, out < into, w.shape[out])


def _is_mean(m: Value, x: Value) -> bool:
    """Whether m is the mean of x over all axes but the first and the last."""
    if m.made_by not in ("div", "mul"):
        return False
    for total, count in operands_of(m, m.made_by):
        number, total = _known(count), _same_numbers(total)
        if not number or total.made_by != "reduce_sum":
            continue
        u = total.node.inputs[0]
        of_x = u.shape == x.shape and unwidened(u) is unwidened(x)
        axes = tuple(sorted(total.node.params["axes"])) == tuple(range(1, len(u.shape) - 1))
        if count.dtype.itemsize > 2:
            same = averages(m, number, u.shape[1:-1])
        else:  # rounded, to one part in 256 or 2048
            same = is_count(1 / number if m.made_by == "mul" else number, u.shape[1:-1], 2e-3)
        if of_x and axes and same:
            return True
    return False


def _known(v: Value) -> float | None:
    """The number that v is, or is full of."""
    while v.made_by == "broadcast_in_dim" and v.node.inputs[0].shape == ():
        v = v.node.inputs[0]
    return number_of(v)


def _between(gates: Value, x: Value, layers: Sequence[Layer]) -> list[Node]:
    """The nodes from x to `gates`, in order: without what does not depend on x, and without x in other types."""
    source = unwidened(x)
    ends = {v for layer in layers for v in (layer.w, layer.bias) if v is not None}
    depends: dict[Value, bool] = {}
    nodes: set[Node] = set()
    stack = [gates]
    while stack:
        v = stack[-1]
        if v in depends:
            stack.pop()
            continue
        if unwidened(v) is source:
            depends[v] = True
        elif v.node is None or v in ends or isinstance(v, Constant):
            depends[v] = False
        else:
            waiting = [u for u in v.node.inputs if u not in depends]
            if waiting:
                stack += waiting
                continue
            depends[v] = any(depends[u] for u in v.node.inputs)
            if depends[v]:
                nodes.add(v.node)
    return sorted(nodes, key=lambda node: node.order)


def _wide(v: Value, dtype: np.dtype) -> Value:
    """A parameter before it was narrowed: it is float32 here too."""
    source = v.node.inputs[0] if v.made_by == "convert_element_type" else v
    return source if dtype.itemsize == 2 and source.dtype == jnp.float32 else v


def _left_to_xla(e: Excited) -> str | None:
    """Why it stays as it was written: on a GPU where XLA's is its plan, with a gradient and without. That jaxconv's
    formula is as fast there as any that somebody else wrote was not measured."""
    device = _plan.Device.default()
    if device.platform != "cuda":
        return None
    problem = _problem.SqueezeExciteProblem(
        "squeeze_excite", e.x.dtype.name, e.x.shape, e.first.outs, e.activation, e.gate
    )
    plans = [_plan.plan("squeeze_excite", dataclasses.replace(problem, save=s), device) for s in (False, True)]
    if any(plan.implementation == "native" for plan in plans):
        return None
    return f"the GPU's plan is XLA: {plans[0].reason}"


def find_squeeze_excite(e: Excited) -> Iterator[Fused]:
    inside = {*e.nodes}
    between = (v for node in e.nodes[:-1] for v in node.outputs)
    if any(user not in inside for v in between for user in v.users):
        raise Refusal(f"something else needs its means, hidden numbers or gates, perhaps a gradient {GRADIENT}")
    dtype = e.x.dtype
    if dtype.name not in _problem.DTYPES:
        raise Refusal(f"its type is {dtype}")
    if why := _left_to_xla(e):
        raise Refusal(why)
    params = jnp.float64 if dtype == jnp.float64 else jnp.float32
    layers = e.first, e.second

    def call(x: Array, *rest: Array) -> Sequence[Array]:
        given: list[Array | None] = []
        values = iter(rest)
        for layer in layers:
            w = next(values)
            shape = (layer.outs, -1) if layer.transposed else (-1, layer.outs)
            w = w.reshape(shape).T if layer.transposed else w.reshape(shape)
            given += [w.astype(params), None if layer.bias is None else next(values).reshape(-1).astype(params)]
        return [squeeze_excite(x, *given, activation=e.activation, gate=e.gate)]  # type: ignore[arg-type]

    inputs = [_wide(v, dtype) for layer in layers for v in (layer.w, layer.bias) if v is not None]
    name = str(e.activation)
    parts = ["squeeze_excite", *([] if name == "none" else [name]), e.gate]
    yield Fused(e.nodes, [e.x, *inputs], [e.result], call, parts)

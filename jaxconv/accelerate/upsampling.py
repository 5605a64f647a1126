"""Upsampling by repetition: jax.image.resize's "nearest" of whole factors, x[:, indices], which lax writes as gathers.

A gather's gradient is a scatter that adds, one element after the other; a broadcast's is a sum over the copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxconv._core.graph import Array, Constant, Node, Value, asks_extent
from jaxconv.accelerate.linear import Fused

# Indices are computed when the function is traced: elements of a step, steps.
LONGEST = 1 << 16
MOST_STEPS = 64


def find_upsampling(node: Node) -> Fused | None:
    """The gathers that end at `node`, as one broadcast; None where they are none of these, or go on behind it."""
    after = node.outputs[0].users
    if len(after) == 1 and after[0] is not None and after[0].name == "gather" and after[0].inputs[0] is node.outputs[0]:
        last = find_upsampling(after[0])
        if last is not None and node in last.nodes:
            return None
    repeats: dict[int, int] = {}
    nodes: list[Node] = []
    x = node.outputs[0]
    while x.made_by == "gather" and (not nodes or x.users == [nodes[-1]]):
        found = _repetition(x.node)
        if found is None or found[0] in repeats:
            break
        repeats[found[0]] = found[1]
        nodes.append(x.node)
        x = x.node.inputs[0]
    if not nodes or not jnp.issubdtype(x.dtype, jnp.inexact):
        return None
    spread = [extent for axis, size in enumerate(x.shape) for extent in (size, repeats.get(axis, 1))]
    kept = range(0, 2 * len(x.shape), 2)
    shape = node.outputs[0].shape

    def call(x: Array) -> list[Array]:
        return [jax.lax.broadcast_in_dim(x, spread, kept).reshape(shape)]

    factors = " x ".join(str(repeats[axis]) for axis in sorted(repeats))
    return Fused(nodes[::-1], [x], node.outputs, call, [f"broadcast of {factors}"])


def _repetition(node: Node) -> tuple[int, int] | None:
    """(axis, times) where the gather takes every element of the axis so many times, in order."""
    x, indices = node.inputs
    numbers, sizes = node.params["dimension_numbers"], node.params["slice_sizes"]
    if len(numbers.collapsed_slice_dims) != 1 or numbers.operand_batching_dims or numbers.start_indices_batching_dims:
        return None
    (axis,) = numbers.collapsed_slice_dims
    whole = all(size == extent for a, (size, extent) in enumerate(zip(sizes, x.shape, strict=True)) if a != axis)
    others = tuple(a for a in range(len(x.shape)) if a != axis)
    if not whole or numbers.start_index_map != (axis,) or numbers.offset_dims != others:
        return None
    size, length = x.shape[axis], indices.shape[0] if len(indices.shape) == 2 and indices.shape[1] == 1 else 0
    if not (isinstance(size, int) and isinstance(length, int) and 0 < 2 * size <= length <= LONGEST):
        return None
    times = length // size
    if times * size != length:
        return None
    found = _known(indices, {})
    wanted = np.repeat(np.arange(size), times)
    return (axis, times) if found is not None and np.array_equal(found.reshape(-1), wanted) else None


def _known(v: Value, seen: dict[Value, np.ndarray | None]) -> np.ndarray | None:
    """The numbers of a value that no argument enters, by few and short steps; None of others. `seen`: by value."""
    if isinstance(v, Constant):
        return None if isinstance(v.value, jax.core.Tracer) else np.asarray(v.value)
    if v not in seen:
        seen[v] = None
        plain = v.node is not None and v.node.call is None and not v.node.eqn.effects and len(seen) <= MOST_STEPS
        if plain and not asks_extent(v.node.eqn) and _is_short(v):
            inputs = [_known(u, seen) for u in v.node.inputs]
            if all(u is not None for u in inputs):
                seen[v] = _folded(v, inputs)
    return seen[v]


# What NumPy computes to the same bits as XLA, without compiling a program for each operation
_BY_NUMPY: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "floor": np.floor,
    "lt": np.less,
    "select_n": lambda which, *cases: np.where(which, cases[1], cases[0]),
}


def _folded(v: Value, inputs: Sequence[Any]) -> np.ndarray:
    """What v's node makes of numbers."""
    name, params, arrays = v.made_by, v.node.params, [np.asarray(u) for u in inputs]
    wide = all(u.dtype.name in ("float32", "float64", "int32", "int64", "bool") for u in (v, *v.node.inputs))
    floats = jnp.issubdtype(v.dtype, jnp.floating)
    if wide and (name in _BY_NUMPY and (name != "select_n" or len(arrays) == 3)):
        return _BY_NUMPY[name](*arrays).astype(v.dtype)
    if wide and name == "div" and floats and np.all(arrays[1]):
        return np.divide(*arrays).astype(v.dtype)
    if wide and name == "convert_element_type" and np.all(np.abs(arrays[0]) < 2**31):  # beyond it XLA saturates
        return arrays[0].astype(v.dtype)
    if wide and name == "iota":
        along = [-1 if a == params["dimension"] else 1 for a in range(len(v.shape))]
        return np.broadcast_to(np.arange(v.shape[params["dimension"]], dtype=v.dtype).reshape(along), v.shape)
    if name == "broadcast_in_dim":
        extents = dict(zip(params["broadcast_dimensions"], arrays[0].shape, strict=True))
        return np.broadcast_to(arrays[0].reshape([extents.get(a, 1) for a in range(len(v.shape))]), v.shape)
    with jax.ensure_compile_time_eval():
        return np.asarray(v.node.evaluate(inputs)[v.index])


def _is_short(v: Value) -> bool:
    numbers = not jax.dtypes.issubdtype(v.dtype, jax.dtypes.extended)
    return numbers and all(isinstance(n, int) for n in v.shape) and math.prod(v.shape) <= LONGEST

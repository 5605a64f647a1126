"""Gated products: a dense layer whose result's halves are multiplied, one of them through an activation.

    z = x @ w + b,  a, g = the halves of z's columns,  y = a * f(g)

The gate is an op without a kernel, so that rules find it behind its layer; both together have a kernel.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxconv import _plan, _problem
from jaxconv._core import primitives, sharding
from jaxconv._core.activations import Activation, activate, activate_tangent
from jaxconv._core.types import Array
from jaxconv._ops import dense, reference
from jaxconv._problem import DenseProblem, GatedGradientProblem, GatedProblem, GateProblem

replace = dataclasses.replace

# ----------------------------------------------------------------------------------------------------------------------
# The gate


def _halves(p: GateProblem, z: Array) -> tuple[Array, Array]:
    """a and g."""
    left, right = jnp.split(z, 2, -1)
    return (right, left) if p.first else (left, right)


def _joined(p: GateProblem, a: Array, g: Array) -> Array:
    return jnp.concatenate([g, a] if p.first else [a, g], -1)


def _gate(p: GateProblem, z: Array) -> list[Array]:
    a, g = _halves(p, z)
    return [a * activate(p.activation, g)]


def _gate_gradient(p: GateProblem, z: Array, dy: Array) -> list[Array]:
    """dz: da = dy * f(g), dg = dy * a * f'(g)."""
    a, g = _halves(p, z)
    return [_joined(p, dy * activate(p.activation, g), activate_tangent(p.activation, g, dy * a))]


def _gate_tangent(p: GateProblem, z: Array, dz: Array) -> list[Array]:
    (a, g), (da, dg) = _halves(p, z), _halves(p, dz)
    return [da * activate(p.activation, g) + a * activate_tangent(p.activation, g, dg)]


def _mapped(op: Any, p: GateProblem, args: list[Array], dims: list[int | None]) -> primitives.Batched:
    """More rows."""
    size = primitives.batch_size(args, dims)
    args = [primitives.to_front(a, d, size) for a, d in zip(args, dims, strict=True)]
    return op(replace(p, shape=(size, *p.shape)), *args), [0]


gate = primitives.plain("gate", _gate, results=lambda p: [(p.y_shape, p.dtype)], batch=_mapped)
gate_gradient = primitives.plain("gate_gradient", _gate_gradient, results=lambda p: [(p.shape, p.dtype)], batch=_mapped)
primitives.by_reference(gate_gradient)


def _forward(p: GateProblem, z: Array) -> tuple[list[Array], Any]:
    return gate(p, z), z


def _backward(p: GateProblem, z: Array, given: Sequence[Array | None], want: Sequence[bool]) -> list[Array | None]:
    return [gate_gradient(p, z, dy)[0] if wanted else None for dy, wanted in zip(given, want, strict=True)]


def _tangent(p: GateProblem, z: Array, given: Sequence[Array | None]) -> list[Array]:
    return _gate_tangent(p, z, *given)


primitives.fuse(gate, primitives.Rules(lambda p: p, _forward, _backward, _tangent))


def gate_of(z: Array, activation: Activation, first: bool = False) -> Array:
    """a * f(g) of the halves of z's last axis, f of the second half, or of the first."""
    return gate(GateProblem(tuple(z.shape), z.dtype.name, activation, first), z)[0]


# ----------------------------------------------------------------------------------------------------------------------
# The kernel


def _layer_of(p: GatedProblem) -> DenseProblem:
    """The dense layer alone."""
    named = p.algorithm is not None and p.algorithm.partition(" ")[0] == _plan.GATED
    return replace(p.layer(), algorithm=None if named else p.algorithm)


def _gate_problem(p: GatedProblem | GatedGradientProblem, z: Array) -> GateProblem:
    return GateProblem(tuple(z.shape), p.dtype, p.activation, p.first)


def _sends(axes: tuple[str, ...]) -> tuple[int, Array, list[list[tuple[int, int]]]]:
    """How z's columns reach the shards that have the same columns of y: the number of shards, whether this one is in
    the first half, and who sends whom one of the two blocks that it has, first and then."""
    size = jax.lax.axis_size(axes)
    left = range(size // 2)
    first = [*((s, 2 * s) for s in left), *((s + size // 2, 2 * s + 1) for s in left)]
    then = [*((s, 2 * s + 1) for s in left), *((s + size // 2, 2 * s) for s in left)]
    return size, jax.lax.axis_index(axes) < size // 2, [first, then]


def _columns_of_halves(z: Array, axes: tuple[str, ...]) -> Array:
    """Of z's columns, split over axes of a mesh, those of both halves that belong to this shard's part of a half."""
    size, in_left, sends = _sends(axes)
    if size % 2:
        left, right = jnp.split(jax.lax.all_gather(z, axes, axis=z.ndim - 1, tiled=True), 2, -1)
        width, at = z.shape[-1] // 2, jax.lax.axis_index(axes)
        mine = [jax.lax.dynamic_slice_in_dim(half, at * width, width, z.ndim - 1) for half in (left, right)]
        return jnp.concatenate(mine, -1)
    one, other = jnp.split(z, 2, -1)
    got = [jnp.where(in_left, one, other), jnp.where(in_left, other, one)]
    one, other = (jax.lax.ppermute(block, axes, to) for block, to in zip(got, sends, strict=True))
    even = jax.lax.axis_index(axes) % 2 == 0
    return jnp.concatenate([jnp.where(even, one, other), jnp.where(even, other, one)], -1)


def _columns_of_all(halves: Array, axes: tuple[str, ...]) -> Array:
    """The inverse: the columns that this shard has of an array like z."""
    size, in_left, sends = _sends(axes)
    left, right = jnp.split(halves, 2, -1)
    if size % 2:
        both = [jax.lax.all_gather(half, axes, axis=half.ndim - 1, tiled=True) for half in (left, right)]
        width, at = halves.shape[-1], jax.lax.axis_index(axes)
        return jax.lax.dynamic_slice_in_dim(jnp.concatenate(both, -1), at * width, width, halves.ndim - 1)
    even = jax.lax.axis_index(axes) % 2 == 0
    got = [jnp.where(even, left, right), jnp.where(even, right, left)]
    one, other = (jax.lax.ppermute(block, axes, [(b, a) for a, b in to]) for block, to in zip(got, sends, strict=True))
    return jnp.concatenate([jnp.where(in_left, one, other), jnp.where(in_left, other, one)], -1)


def _behind(p: GatedProblem, z: Array) -> list[Array]:
    y = gate_of(z, p.activation, p.first)
    return [y, z] if p.save_preactivation else [y]


def _product(p: GatedProblem, x: Array, w: Array) -> Array:
    return jax.lax.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())), precision=p.precision)


def _by_calls(p: GatedProblem, x: Array, w: Array, *b: Array) -> list[Array]:
    layer = _layer_of(p)
    if p.pixels is not None:  # as they are: an axis that a mesh splits joins no other
        z = reference.dense_epilogue(layer, _product(p, x, w), *b)[0]
    else:
        z = dense.dense_kernel(layer, x, w, *b)[0] if b else dense.matmul(layer.bare(), x, w)
    return _behind(p, z)


def _shard(p: GatedProblem, split: sharding.Split, x: Array, w: Array, *b: Array) -> list[Array]:
    """The gate needs the whole sum: where it is split it comes after adding the parts. Columns come from others."""
    if "k" not in split and "h" not in split:
        return dense_gated(p, x, w, *b)
    layer = _layer_of(p)
    z = dense.matmul(layer.bare(), x, w) if p.pixels is None else _product(p, x, w)
    z = jax.lax.psum(z, split["k"]) if "k" in split else z
    z = reference.dense_epilogue(layer, z, *b)[0]
    if "h" not in split:
        return _behind(p, z)
    (y,) = _gate(_gate_problem(p, z), _columns_of_halves(z, split["h"]))
    return [y, z] if p.save_preactivation else [y]


def _partition(p: GatedProblem, operands: Sequence[str], results: Sequence[str], run: Any) -> sharding.Partition:
    """Rows, the sum, columns."""
    rows = "m" if p.pixels is None else "pqrs"[: len(p.pixels)]
    m = " ".join(rows)
    names = {"x": f"{m} k", "w": "k h", "b": "h", "y": f"{m} h", "z": f"{m} h"}

    def local(parts: Any) -> GatedProblem:
        pixels = None
        if p.pixels is not None:
            pixels = tuple(extent // parts[axis] for axis, extent in zip(rows, p.pixels, strict=True))
        m = p.m // math.prod(parts[axis] for axis in rows)
        return replace(p, m=m, k=p.k // parts["k"], n=p.n // parts["h"], pixels=pixels)

    arrays = [names[o] for o in operands], [names[r] for r in results]
    return sharding.Partition(*arrays, rows + "kh", local, sizes={"h": p.n // 2}, run=run)


def _flops(p: GatedProblem) -> int:
    """Those of the product, of a bias, of the activation and of the gate."""
    each = (p.activation.name != "none") + 1
    return p.flops + bool(p.bias) * p.m * p.n + each * p.m * (p.n // 2)


# dense_gated: y = a * f(g), (m, n / 2), and z = x @ w + b, (m, n), where it is saved. x is (m, k), w (k, n), b (n,) or
# none; the rows may be pixels of images. The problem is the layer's, with f for its activation.
dense_gated = primitives.kernel(
    "dense_gated",
    "x w b? -> y z?",
    replace(dense.FAMILY, kinds={}, partition=_partition, batch=None),
    reference=_by_calls,
    flops=_flops,
    also="first",
    run=_shard,
)
primitives.by_reference(dense_gated)


# ----------------------------------------------------------------------------------------------------------------------
# The way back, from the layer behind the gate


def _array(p: GatedGradientProblem, kind: str) -> primitives.Typed:
    """s is a number for each column of z."""
    return (p.z_shape[1:] if kind == "s" else getattr(p, f"{kind}_shape")), p.dtype


def _back(p: GatedGradientProblem, dy: Array, kept: Array) -> list[Array]:
    """dz, and its sum over the rows."""
    (dz,) = gate_gradient(_gate_problem(p, kept), kept, dy)
    return [dz, jnp.sum(dz, 0)]


def _product_of(p: GatedGradientProblem) -> DenseProblem:
    named = p.algorithm is not None and p.algorithm.partition(" ")[0] == _plan.GATED_GRADIENT
    return replace(p.product(), algorithm=None if named else p.algorithm)


def _back_by_calls(p: GatedGradientProblem, dy: Array, w: Array, kept: Array) -> list[Array]:
    return _back(p, dense.matmul(_product_of(p), dy, w), kept)


def _back_shard(p: GatedGradientProblem, split: sharding.Split, dy: Array, w: Array, kept: Array) -> list[Array]:
    """The derivative needs the whole product: where that is split it comes after adding the parts."""
    if "k" in split or "n" in split:
        product = dense.matmul(_product_of(p), dy, w)
        product = jax.lax.psum(product, split["k"]) if "k" in split else product
        if "n" in split:
            z = _columns_of_halves(kept, split["n"])
            dz = _columns_of_all(_gate_gradient(_gate_problem(p, z), z, product)[0], split["n"])
            db = jnp.sum(dz, 0)
        else:
            dz, db = _back(p, product, kept)
    else:
        dz, db = dense_gated_gradient(p, dy, w, kept)
    if "m" in split:
        db = jax.lax.psum(db.astype(_problem.promoted(db.dtype, "float32")), split["m"]).astype(db.dtype)
    return [dz, db]


def _back_partition(
    p: GatedGradientProblem, operands: Sequence[str], results: Sequence[str], run: Any
) -> sharding.Partition:
    """Rows, columns, the sum."""
    names = {"x": "m k", "w": "n k" if p.trans_w else "k n", "z": "m n", "s": "n"}

    def local(parts: Any) -> GatedGradientProblem:
        return replace(p, m=p.m // parts["m"], k=p.k // parts["k"], n=p.n // parts["n"])

    arrays = [names[o] for o in operands], [names[r] for r in results]
    return sharding.Partition(*arrays, "mnk", local, sizes={"n": p.n}, run=run)


def _back_flops(p: GatedGradientProblem) -> int:
    """Those of the product, of f and f', of three products with them, and of the sum."""
    return p.flops + (2 * (p.activation.name != "none") + 5) * p.m * p.n


# dense_gated_gradient: of dy = x @ op(w), (m, n), and z, `kept`, (m, 2 n): dz and its sum over the rows, (2 n,), where
# a kernel makes both. The problem is the product's, with f for its activation.
dense_gated_gradient = primitives.kernel(
    "dense_gated_gradient",
    "dy w kept -> dz db",
    replace(
        dense.FAMILY,
        kinds={"x": "dy", "z": "kept dz", "s": "db"},
        array=_array,
        partition=_back_partition,
        batch=None,
    ),
    reference=_back_by_calls,
    flops=_back_flops,
    also="first",
    run=_back_shard,
)
primitives.by_reference(dense_gated_gradient)

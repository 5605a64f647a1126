"""A convolution of which every device has some of the pixels: what a shard reads of its neighbours, and its exchange.

Along an axis of H rows of x and P rows of y, split over D devices, device i has `ceil(H/D)` rows of x from
`i*ceil(H/D)` on, and likewise of y; the last devices may have fewer, or none. With y[o] = sum over taps t of
x[o*stride - low + t*dilation] * w[t],

* fprop reads x from row `o*stride - low` on, o being the first row of y that the device has, and
* dgrad and wgrad read dy from the first row with a tap on the device's first row of dx or x, rounded down to whole
  strides. wgrad could as well read x, as fprop does. But where XLA sees that two exchanges are the same it makes one:
  of dy's the result is soon done with, while the forward's x with its neighbours' rows would be kept until backward,
  beside x.

Rows that are a neighbour's come by collective-permutes, one for each neighbour and side that some device needs; the
rows beyond the ends are zeros. What a device then computes is a convolution like any other, so it has a plan like any
other. All devices run one program: where their reaches differ (H is not P*stride), each takes its own part of what was
exchanged for all.

A pooling reads x as fprop does, with -inf beyond the ends. Backward each device makes the gradient of all rows that it
read, and what is its neighbours' goes back to them: the exchange of x, transposed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxconv import _sharding
from jaxconv._problem import ConvProblem, PoolProblem

Array = jax.Array
P = TypeVar("P", ConvProblem, PoolProblem)


def name(axis: int) -> str:
    """The name of a spatial axis, of x and y alike, in a `_sharding.Partition`."""
    return f"s{axis}"


def sizes(p: ConvProblem | PoolProblem) -> dict[str, int]:
    """What a number of shards has to divide, by name: the rows of x and of y."""
    return {name(i): math.gcd(*extents) for i, extents in enumerate(zip(p.in_spatial, p.out_spatial, strict=True))}


@dataclasses.dataclass(frozen=True)
class Rows:
    """Which rows of an axis each of its shards reads."""

    extent: int  # rows in all
    size: int  # rows of a shard: ceil(extent / shards)
    first: tuple[int, ...]  # of each shard: the first row that it reads, counted from its own first
    count: int  # how many it reads
    busy: int  # the shards from this one on have nothing to compute

    @property
    def before(self) -> int:
        """Rows in front of a shard's own that some shard reads."""
        return max(0, -min(self.first))

    @property
    def after(self) -> int:
        return max(0, max(self.first) + self.count - self.size)

    @property
    def uniform(self) -> bool:
        """Whether every shard reads the same rows, counted from its own first."""
        return len(set(self.first)) == 1

    def senders(self, hops: int) -> list[tuple[int, int]]:
        """The (sender, receiver) pairs over a distance: hops > 0 for rows in front of the receiver's own."""
        shards, near = len(self.first), (abs(hops) - 1) * self.size

        def needs(receiver: int) -> bool:
            first = self.first[receiver]
            reaches = -first > near if hops > 0 else first + self.count - self.size > near
            return reaches and receiver < self.busy

        pairs = [(i, i + hops) for i in range(shards) if 0 <= i + hops < shards and i * self.size < self.extent]
        return [(sender, receiver) for sender, receiver in pairs if needs(receiver)]


def of_x(p: ConvProblem | PoolProblem, axis: int, shards: int) -> Rows:
    """The rows of x that fprop, or a pooling, reads for a shard's rows of y."""
    size, out = _shard(p.in_spatial[axis], shards), _shard(p.out_spatial[axis], shards)
    f = (p.window if isinstance(p, PoolProblem) else p.filter)[axis]
    s, d, low = p.stride[axis], p.dilation[axis], p.padding[axis][0]
    busy = _ceil_div(p.out_spatial[axis], out)
    first = [i * (out * s - size) - low for i in range(shards)]
    return Rows(p.in_spatial[axis], size, _of_busy(first, busy), (out - 1) * s + (f - 1) * d + 1, busy)


def of_dy(p: ConvProblem, axis: int, shards: int) -> tuple[Rows, int, tuple[int, ...]]:
    """The rows of dy that dgrad reads for a shard's rows of dx; how many rows of dx that makes, and where in those each
    shard's own begin."""
    size, out = _shard(p.in_spatial[axis], shards), _shard(p.out_spatial[axis], shards)
    f, s, d, low = p.filter[axis], p.stride[axis], p.dilation[axis], p.padding[axis][0]
    busy = _ceil_div(p.in_spatial[axis], size)
    begin = _of_busy([i * size % s for i in range(shards)], busy)
    made = size + max(begin)
    ahead = _ceil_div(low - (f - 1) * d, s)  # from row i of whole strides of dx to the first row of dy on it
    count = max(1, (made - 1 + low) // s - ahead + 1)
    first = [i * size // s + ahead - i * out for i in range(shards)]
    return Rows(p.out_spatial[axis], out, _of_busy(first, busy), count, busy), made, begin


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _shard(extent: int, shards: int) -> int:
    return _ceil_div(extent, shards)


def _of_busy(values: Sequence[int], busy: int) -> tuple[int, ...]:
    """`values` of shards; those of idle shards, where any do, within the range of the others."""
    low, high = min(values[:busy]), max(values[:busy])
    return tuple(min(max(value, low), high) for value in values)


# ----------------------------------------------------------------------------------------------------------------------
# On the arrays of a shard


Split = dict[int, tuple[str, ...]]  # spatial axis -> the mesh axes it is split over, major first


def pixels(p: ConvProblem | PoolProblem, split: _sharding.Split) -> Split:
    """Of the named axes that are split, the spatial ones."""
    return {axis: split[name(axis)] for axis in range(p.nd) if name(axis) in split}


def _axis(p: ConvProblem | PoolProblem, axis: int) -> int:
    """A spatial axis as an axis of the arrays."""
    return axis + (1 if p.channels_last else 2)


def _of_shard(values: Sequence[int], mesh_axes: tuple[str, ...]) -> Array:
    return jnp.asarray(values, jnp.int32)[lax.axis_index(mesh_axes)]


def _zero_beyond(a: Array, axis: int, extent: int, mesh_axes: tuple[str, ...]) -> Array:
    """`a` with zeros for the rows that only fill the last shards up: on Auto meshes they hold anything."""
    own = _sharding.inside(a.shape, axis, extent, mesh_axes)
    return a if own is None else jnp.where(own, a, jnp.zeros((), a.dtype))


def _fetch(a: Array, axis: int, rows: Rows, mesh_axes: tuple[str, ...]) -> tuple[Array, int]:
    """A shard's own rows with those of its neighbours that it reads, and the place of the first that it reads."""
    a = _zero_beyond(a, axis, rows.extent, mesh_axes)

    def from_neighbour(hops: int, wanted: int) -> Array:
        count = min(rows.size, wanted - (abs(hops) - 1) * rows.size)
        piece = lax.slice_in_dim(a, *((rows.size - count, rows.size) if hops > 0 else (0, count)), axis=axis)
        pairs = rows.senders(hops)
        return lax.ppermute(piece, mesh_axes, pairs) if pairs else jnp.zeros_like(piece)

    before = [from_neighbour(k, rows.before) for k in range(_ceil_div(rows.before, rows.size), 0, -1)]
    after = [from_neighbour(-k, rows.after) for k in range(1, _ceil_div(rows.after, rows.size) + 1)]
    whole = lax.concatenate([*before, a, *after], axis) if before or after else a
    if rows.uniform:
        return whole, rows.before + rows.first[0]
    start = _of_shard([rows.before + first for first in rows.first], mesh_axes)
    return lax.dynamic_slice_in_dim(whole, start, rows.count, axis), 0


def _high(exact: int, stride: int) -> int:
    """The padding behind: not negative where rows that no tap reaches may stay, being fewer than a stride."""
    return max(exact, 0) if exact > -stride else exact


def _with(p: P, axis: int, in_rows: int, out_rows: int, padding: tuple[int, int]) -> P:
    def put(values: tuple, value: object) -> tuple:
        return (*values[:axis], value, *values[axis + 1 :])

    return dataclasses.replace(
        p,
        in_spatial=put(p.in_spatial, in_rows),
        out_spatial=put(p.out_spatial, out_rows),
        padding=put(p.padding, padding),
    )


def exchange_x(p: ConvProblem, split: Split, x: Array) -> tuple[ConvProblem, Array]:
    """The fprop that a shard computes, and its x. Of `p` the spatial extents are those of all shards."""
    for axis, mesh_axes in split.items():
        shards = lax.axis_size(mesh_axes)
        if shards == 1:
            continue
        rows, out = of_x(p, axis, shards), _shard(p.out_spatial[axis], shards)
        x, skip = _fetch(x, _axis(p, axis), rows, mesh_axes)
        fetched = x.shape[_axis(p, axis)]
        p = _with(p, axis, fetched, out, (-skip, _high(skip + rows.count - fetched, p.stride[axis])))
    return p, x


def exchange_dy(p: ConvProblem, split: Split, dy: Array) -> tuple[ConvProblem, Array]:
    """The dgrad and the wgrad that a shard computes, and its dy. Of `p` the spatial extents are those of all shards.

    What goes in and out as x and dx is at whole strides: see `place_x` and `own_dx`.
    """
    for axis, mesh_axes in split.items():
        shards = lax.axis_size(mesh_axes)
        if shards == 1:
            continue
        rows, made, _ = of_dy(p, axis, shards)
        dy, skip = _fetch(dy, _axis(p, axis), rows, mesh_axes)
        dy = lax.slice_in_dim(dy, skip, skip + rows.count, axis=_axis(p, axis))
        f, s, d, low = p.filter[axis], p.stride[axis], p.dilation[axis], p.padding[axis][0]
        low -= s * _ceil_div(low - (f - 1) * d, s)
        p = _with(p, axis, made, rows.count, (low, _high((rows.count - 1) * s + (f - 1) * d + 1 - made - low, s)))
    return p, dy


def makes_own_dx(p: ConvProblem, split: Split) -> bool:
    """Whether the dgrad of `exchange_dy` makes a shard's own rows of dx and no others."""
    return not any(any(of_dy(p, axis, lax.axis_size(mesh_axes))[2]) for axis, mesh_axes in split.items())


def place_x(p: ConvProblem, split: Split, x: Array) -> Array:
    """A shard's own rows of x for the wgrad of `exchange_dy`, among zeros where that has others. `p` is as there."""
    for axis, mesh_axes in split.items():
        _, made, begin = of_dy(p, axis, lax.axis_size(mesh_axes))
        dim = _axis(p, axis)
        x = _zero_beyond(x, dim, p.in_spatial[axis], mesh_axes)
        if any(begin):
            zeros = jnp.zeros_like(x, shape=(*x.shape[:dim], made, *x.shape[dim + 1 :]))
            x = lax.dynamic_update_slice_in_dim(zeros, x, _of_shard(begin, mesh_axes), dim)
    return x


def own_dx(p: ConvProblem, split: Split, dx: Array) -> Array:
    """The shard's own rows of what the dgrad of `exchange_dy` made. `p` is as there."""
    for axis, mesh_axes in split.items():
        _, _, begin = of_dy(p, axis, lax.axis_size(mesh_axes))
        if any(begin):
            size = _shard(p.in_spatial[axis], len(begin))
            dx = lax.dynamic_slice_in_dim(dx, _of_shard(begin, mesh_axes), size, _axis(p, axis))
    return dx


# ----------------------------------------------------------------------------------------------------------------------
# Pooling


def exchange_windows(p: PoolProblem, split: Split, x: Array) -> tuple[PoolProblem, Array]:
    """The pooling that a shard computes, without padding, and its x: -inf beyond the array's ends. Of `p` the spatial
    extents are those of all shards."""
    q, x = _windows(p, split, x)
    for axis, mesh_axes in split.items():
        x = jnp.where(_within(p, axis, mesh_axes, x), x, jnp.full((), -jnp.inf, x.dtype))
    return q, x


def own_dx_of_windows(p: PoolProblem, split: Split, x: Array, dx: Array) -> Array:
    """The shard's own rows of dx: what the shards computed, of the rows that each read, is sent back and added up."""
    for axis, mesh_axes in split.items():
        dx = jnp.where(_within(p, axis, mesh_axes, dx), dx, jnp.zeros((), dx.dtype))
    return jax.linear_transpose(lambda x: _windows(p, split, x)[1], x)(dx)[0]


def own_windows(p: PoolProblem, split: Split, dy: Array) -> Array:
    """dy with zeros for the rows that are no window's."""
    for axis, mesh_axes in split.items():
        dy = _zero_beyond(dy, _axis(p, axis), p.out_spatial[axis], mesh_axes)
    return dy


def _windows(p: PoolProblem, split: Split, x: Array) -> tuple[PoolProblem, Array]:
    """Linear in x."""
    q = p
    for axis, mesh_axes in split.items():
        shards = lax.axis_size(mesh_axes)
        rows = of_x(p, axis, shards)
        x, skip = _fetch(x, _axis(p, axis), rows, mesh_axes)
        x = _slice(x, skip, rows.count, _axis(p, axis))
        q = _with(q, axis, rows.count, _shard(p.out_spatial[axis], shards), (0, 0))
    return q, x


def _slice(x: Array, start: int, count: int, axis: int) -> Array:
    """x from `start` on, which may be below 0 or leave too few: zeros there."""
    pads = [(0, 0, 0)] * x.ndim
    pads[axis] = (-start, start + count - x.shape[axis], 0)
    return lax.pad(x, jnp.zeros((), x.dtype), pads)


def _within(p: PoolProblem, axis: int, mesh_axes: tuple[str, ...], x: Array) -> Array:
    """Which of the rows that a shard reads are the array's."""
    rows = of_x(p, axis, lax.axis_size(mesh_axes))
    first = _of_shard([i * rows.size + first for i, first in enumerate(rows.first)], mesh_axes)
    row = lax.broadcasted_iota(jnp.int32, x.shape, _axis(p, axis)) + first
    return (row >= 0) & (row < rows.extent)

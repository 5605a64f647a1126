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
rows beyond the ends are zeros. What a device then computes is one of two things:

* All its rows from its own alone, with zeros for its neighbours' (`Ends.own`), and the few rows at its ends that this
  makes wrong once more, from a slab of what they read (`Ends.slab`). No large array is copied, and the large kernel
  does not wait for the exchange. wgrad is linear: the slab adds the products with the neighbours' rows.
* Everything from its own rows with those of its neighbours in one array, by a copy of all of it: where several axes are
  split, shards differ (H is not P*stride, or D does not divide P), the ends are a large part of the shard, or the shard
  is so small that the copy takes less time than the slab's launches.

Each is a convolution like any other, so it has a plan like any other. All devices run one program: where their reaches
differ, each takes its own part of what was exchanged for all.

A pooling reads x as fprop does, with -inf beyond the ends. Backward each device makes the gradient of all rows that it
read, and what is its neighbours' goes back to them: the exchange of x, transposed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxconv._core import sharding
from jaxconv._problem import ConvProblem, PoolProblem, is_number

Array = jax.Array
P = TypeVar("P", bound=ConvProblem | PoolProblem)
Q = TypeVar("Q", bound=PoolProblem)


def name(axis: int) -> str:
    """The name of a spatial axis, of x and y alike, in a `sharding.Partition`."""
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


def pixels(p: ConvProblem | PoolProblem, split: sharding.Split) -> Split:
    """Of the named axes that are split, the spatial ones."""
    return {axis: split[name(axis)] for axis in range(p.nd) if name(axis) in split}


def _axis(p: ConvProblem | PoolProblem, axis: int) -> int:
    """A spatial axis as an axis of the arrays."""
    return axis + (1 if p.channels_last else 2)


def _of_shard(values: Sequence[int], mesh_axes: tuple[str, ...]) -> Array:
    return jnp.asarray(values, jnp.int32)[lax.axis_index(mesh_axes)]


def _fill_beyond(a: Array, axis: int, extent: int, mesh_axes: tuple[str, ...], fill: float = 0) -> Array:
    """`a` with `fill` for the rows that only fill the last shards up: on Auto meshes they hold anything."""
    own = sharding.inside(a.shape, axis, extent, mesh_axes)
    return a if own is None else jnp.where(own, a, jnp.full((), fill, a.dtype))


def _beside(before: Sequence[Array], a: Array, after: Sequence[Array], axis: int) -> Array:
    """`a` between its neighbours' rows: a pad, and updates in place. XLA's concatenate on GPUs runs at a fifth of the
    memory's rate."""
    place = sum(piece.shape[axis] for piece in before)
    whole = _slice(a, -place, place + a.shape[axis] + sum(piece.shape[axis] for piece in after), axis)
    place = 0
    for piece in before:
        whole = lax.dynamic_update_slice_in_dim(whole, piece, place, axis)
        place += piece.shape[axis]
    place += a.shape[axis]
    for piece in after:
        whole = lax.dynamic_update_slice_in_dim(whole, piece, place, axis)
        place += piece.shape[axis]
    return whole


def _in_a_row(before: Sequence[Array], a: Array, after: Sequence[Array], axis: int) -> Array:
    """`_beside`, for its transpose: that is slices and no more."""
    return lax.concatenate([*before, a, *after], axis)


def _fetch(
    a: Array,
    axis: int,
    rows: Rows,
    mesh_axes: tuple[str, ...],
    fill: float = 0,
    join: Callable[..., Array] = _beside,
) -> tuple[Array, int]:
    """A shard's own rows with those of its neighbours that it reads, and the place of the first that it reads. Rows
    beyond the array's ends are `fill`; where a shard reads further than what this returns, the caller pads."""
    a = _fill_beyond(a, axis, rows.extent, mesh_axes, fill)

    def from_neighbour(hops: int, wanted: int) -> Array:
        count = min(rows.size, wanted - (abs(hops) - 1) * rows.size)
        piece = lax.slice_in_dim(a, *((rows.size - count, rows.size) if hops > 0 else (0, count)), axis=axis)
        pairs = rows.senders(hops)
        if not pairs:
            return jnp.full_like(piece, fill)
        got = lax.ppermute(piece, mesh_axes, pairs)  # zeros where nobody sends
        receivers = [receiver for _, receiver in pairs]
        if fill == 0 or len(receivers) == len(rows.first):
            return got
        receives = _of_shard([i in receivers for i in range(len(rows.first))], mesh_axes)
        return jnp.where(receives > 0, got, jnp.full((), fill, got.dtype))

    before = [from_neighbour(k, rows.before) for k in range(_ceil_div(rows.before, rows.size), 0, -1)]
    after = [from_neighbour(-k, rows.after) for k in range(1, _ceil_div(rows.after, rows.size) + 1)]
    whole = join(before, a, after, axis) if before or after else a
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


def rows_of_y(p: ConvProblem, split: Split) -> tuple[int, ...]:
    """The spatial extents of a shard's y. Of `p` they are those of all shards."""
    return tuple(_shard(n, lax.axis_size(split[i]) if i in split else 1) for i, n in enumerate(p.out_spatial))


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
        x = _fill_beyond(x, dim, p.in_spatial[axis], mesh_axes)
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
# All rows from a shard's own, and those at its ends again

# Bytes of a shard below which it is copied. A read and a write at some 4 TB/s take less then than what the ends need:
# about six small launches (their slab and its places) and a kernel that does not fill the device, 30 us and more.
LEAST_COPY = 64 << 20
# The part of a shard's rows that may be computed twice. More costs a convolution of many channels more than the copy.
MOST_AGAIN = 1 / 4


@dataclasses.dataclass(frozen=True)
class Ends:
    """One axis, of which each shard has the same rows, and what is computed of it.

    A slab has the rows at one end, or those at both, beside each other in N, of as many rows each.
    """

    own: ConvProblem  # makes all rows of a shard, from its own
    slab: ConvProblem  # makes those at its ends
    axis: int  # of the arrays
    mesh_axes: tuple[str, ...]
    made: tuple[int, ...]  # of each end the first row that is made
    made_count: int
    read: tuple[int, ...]  # and the first that is read, counted from the shard's first; a neighbour's below 0
    read_count: int

    def fetch(self, a: Array, own: bool = True) -> Array:
        """The slab that is read, of `a` and its neighbours' rows; without `own` the latter alone, among zeros."""
        size, shards = a.shape[self.axis], lax.axis_size(self.mesh_axes)

        def rows(first: int, stop: int) -> Array:
            return lax.slice_in_dim(a, first, stop, axis=self.axis)

        mine, theirs = [], []
        for end, first in enumerate(self.read):
            stop = first + self.read_count
            if own and max(first, 0) < min(stop, size):
                mine.append((end, max(-first, 0), rows(max(first, 0), min(stop, size))))
            if first < 0:
                piece = rows(size + first, size + min(stop, 0))
                theirs.append((end, 0, lax.ppermute(piece, self.mesh_axes, [(i, i + 1) for i in range(shards - 1)])))
            if stop > size:
                piece = rows(max(first, size) - size, stop - size)
                piece = lax.ppermute(piece, self.mesh_axes, [(i + 1, i) for i in range(shards - 1)])
                theirs.append((end, max(size - first, 0), piece))
        return self._slab(self.read_count, mine + theirs)

    def of(self, made: Array) -> Array:
        """Of an array like the one that is made, the slab's rows."""
        ends = [lax.slice_in_dim(made, first, first + self.made_count, axis=self.axis) for first in self.made]
        return self._slab(self.made_count, [(end, 0, piece) for end, piece in enumerate(ends)])

    def _slab(self, count: int, pieces: Sequence[tuple[int, int, Array]]) -> Array:
        """Zeros of `count` rows at each end, with pieces (end, row, array) in them: as `_beside` makes its array."""
        (end, row, first), *rest = pieces
        pads = [(0, 0, 0)] * first.ndim
        pads[0] = (end * len(first), (len(self.made) - 1 - end) * len(first), 0)
        pads[self.axis] = (row, count - row - first.shape[self.axis], 0)
        slab = lax.pad(first, jnp.zeros((), first.dtype), pads)
        for end, row, piece in rest:
            place = [0] * slab.ndim
            place[0], place[self.axis] = end * len(piece), row
            slab = lax.dynamic_update_slice(slab, piece, place)
        return slab

    def put(self, made: Array, slab: Array) -> Array:
        """`made`, with the slab's rows in their places. XLA updates in place what nobody else uses."""
        for piece, first in zip(jnp.split(slab, len(self.made)), self.made, strict=True):
            made = lax.dynamic_update_slice_in_dim(made, piece, first, self.axis)
        # Else XLA computes the update where it reads it, an element at a time.
        return lax.optimization_barrier(made)


def ends_of_y(p: ConvProblem, split: Split, x: Array) -> Ends | None:
    """How a shard of x makes its rows of y, where it does not copy x. Of `p` the extents are those of all shards."""
    found = _own(p, split, x)
    if found is None:
        return None
    own, axis, low, high = found
    f, s, d, out = p.filter[axis], p.stride[axis], p.dilation[axis], own.out_spatial[axis]
    # The first rows read x in front of the shard's, the last ones x behind it.
    again = max(_ceil_div(low, s), _ceil_div(high, s))
    made = (0,) * (low > 0) + (out - again,) * (high > 0)
    count = (again - 1) * s + (f - 1) * d + 1
    if len(made) * again > MOST_AGAIN * out:
        return None
    slab = dataclasses.replace(_with(own, axis, count, again, (0, 0)), batch=len(made) * p.batch)
    read = tuple(first * s - low for first in made)
    return Ends(own, slab, _axis(p, axis), split[axis], made, again, read, count)


def ends_of_dx(p: ConvProblem, split: Split, dy: Array) -> Ends | None:
    """How a shard of dy makes its rows of dx, and its part of dw, where it does not copy dy. `p` is as there."""
    found = _own(p, split, dy)
    if found is None:
        return None
    own, axis, low, high = found
    f, s, d = p.filter[axis], p.stride[axis], p.dilation[axis]
    size = own.in_spatial[axis]
    # The first rows of dx are met by windows in front of the shard's, the last ones by those behind. In whole strides,
    # so that both ends are the same convolution.
    again = s * max(_ceil_div(low, s), _ceil_div(high, s))
    made = (0,) * (high > 0) + (size - again,) * (low > 0)
    if len(made) * again > MOST_AGAIN * size:
        return None
    ahead = _ceil_div(low - (f - 1) * d, s)  # from a whole stride of dx to the first row of dy on it
    count = (again - 1 + low) // s - ahead + 1
    low -= s * ahead
    slab = _with(own, axis, again, count, (low, _high((count - 1) * s + (f - 1) * d + 1 - again - low, s)))
    slab = dataclasses.replace(slab, batch=len(made) * p.batch)
    return Ends(own, slab, _axis(p, axis), split[axis], made, again, tuple(first // s + ahead for first in made), count)


def _own(p: ConvProblem, split: Split, a: Array) -> tuple[ConvProblem, int, int, int] | None:
    """The convolution of a shard's own rows; the one axis along which it needs its neighbours', and how many rows of x
    before and behind. None where `a`, of x's or y's rows, is to be copied, or nothing is needed."""
    own, needed = p, []
    for axis, mesh_axes in split.items():
        shards = lax.axis_size(mesh_axes)
        size, out, s = _shard(p.in_spatial[axis], shards), _shard(p.out_spatial[axis], shards), p.stride[axis]
        if p.in_spatial[axis] != shards * size or p.out_spatial[axis] != shards * out or size != s * out:
            return None
        low = p.padding[axis][0]
        high = (p.filter[axis] - 1) * p.dilation[axis] + 1 - s - low
        own = _with(own, axis, size, out, (low, _high(high, s)))
        if shards > 1 and (low > 0 or high > 0):
            needed.append((axis, low, high))
    if len(needed) != 1 or not is_number(p.batch) or a.size * a.dtype.itemsize < LEAST_COPY:
        return None
    return own, *needed[0]


# ----------------------------------------------------------------------------------------------------------------------
# Pooling


def of_shard(p: Q, split: Split) -> Q:
    """The pooling that a shard computes, without padding. Of `p` the spatial extents are those of all shards."""
    for axis, mesh_axes in split.items():
        shards = lax.axis_size(mesh_axes)
        out = _shard(p.out_spatial[axis], shards)
        p = _with(p, axis, of_x(p, axis, shards).count, out, (0, 0))
    return p


def exchange_windows(p: Q, split: Split, x: Array, fill: float) -> tuple[Q, Array]:
    """`of_shard`, and its x: `fill` beyond the array's ends."""
    return of_shard(p, split), _windows(p, split, x, fill)


def own_x(p: PoolProblem, split: Split) -> tuple[int, ...]:
    """The shape of a shard's x. Of `p` the spatial extents are those of all shards."""
    parts = (lax.axis_size(split[i]) if i in split else 1 for i in range(p.nd))
    return dataclasses.replace(p, in_spatial=tuple(map(_shard, p.in_spatial, parts))).x_shape


def own_dx_of_windows(p: PoolProblem, split: Split, x: Array, dx: Array) -> Array:
    """The shard's own rows of dx: what the shards computed, of the rows that each read, is sent back and added up."""
    return jax.linear_transpose(lambda x: _windows(p, split, x, join=_in_a_row), x)(dx)[0]


def own_windows(p: PoolProblem, split: Split, dy: Array) -> Array:
    """dy with zeros for the rows that are no window's."""
    for axis, mesh_axes in split.items():
        dy = _fill_beyond(dy, _axis(p, axis), p.out_spatial[axis], mesh_axes)
    return dy


def _windows(p: PoolProblem, split: Split, x: Array, fill: float = 0, join: Callable[..., Array] = _beside) -> Array:
    """The x that a shard's pooling reads, with `fill` beyond the array's ends; with 0 linear in x."""
    for axis, mesh_axes in split.items():
        shards = lax.axis_size(mesh_axes)
        rows = of_x(p, axis, shards)
        x, skip = _fetch(x, _axis(p, axis), rows, mesh_axes, fill, join)
        x = _slice(x, skip, rows.count, _axis(p, axis), fill)
    return x


def _slice(x: Array, start: int, count: int, axis: int, fill: float = 0) -> Array:
    """x from `start` on, which may be below 0 or leave too few: `fill` there."""
    pads = [(0, 0, 0)] * x.ndim
    pads[axis] = (-start, start + count - x.shape[axis], 0)
    return lax.pad(x, jnp.full((), fill, x.dtype), pads)

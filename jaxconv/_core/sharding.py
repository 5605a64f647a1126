"""How a kernel runs on several devices: as itself on every shard, with a sum where a sum was split.

A kernel states its `Partition`: a name for each axis of its arrays, which of them may be split, and the problem of one
part. The rest follows from the shardings that the arrays have:

* Auto meshes, where XLA decides shardings: the kernel is lowered to a custom_partitioning call, which tells XLA the
  same and is asked for the program of one shard.
* Explicit meshes, where shardings are part of the types: the kernel is lowered to a shard_map.
* Inside a user's own shard_map nothing is left to do.

Axes that may not be split are gathered. So are those whose mesh axis a more important one has taken, and those that do
not divide evenly, but for pixels on Auto meshes. What a shard of pixels needs of its neighbours it asks them for: see
`halo`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

Array = jax.Array
Split = Mapping[str, tuple[str, ...]]  # name of an array axis -> the mesh axes it is split over, major first


@dataclasses.dataclass(frozen=True)
class Partition:
    # One text per array, with one name per axis: "n h w c". "(g c)" is an axis of g groups of c; only g may be split.
    operands: Sequence[str]
    results: Sequence[str]
    split: Sequence[str]  # what may be split, the most important first
    local: Callable[[Mapping[str, int]], Any]  # into how many parts each name of `split` is split -> problem of a part
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)  # of names that occur in groups
    # (local problem, split, *args) -> results of one shard. None: the kernel itself, and where a split axis occurs in
    # no result, the sum over its shards.
    run: Callable[..., list[Array]] | None = None
    # Of `split`, the axes whose shards on Auto meshes may be of unequal sizes: ceil(extent / shards) each, of which the
    # last ones' ends are undefined. `run` must not let them into a sum: see `inside`.
    uneven: Sequence[str] = ()
    # Those of them along which a shard reads of its neighbours what `run` fetches
    neighbours: Sequence[str] = ()
    # On Auto meshes also what the plan of the whole gives to XLA, which would gather or reduce more often. What a shard
    # computes has a plan of its own.
    always: bool = False

    def names(self, array: str) -> list[str]:
        """The splittable name of each axis."""
        return [token.strip("()").split()[0] for token in _tokens(array)]

    def spec(self, array: str, split: Split) -> PartitionSpec:
        return PartitionSpec(*(split.get(name) for name in self.names(array)))


def _tokens(array: str) -> list[str]:
    return re.findall(r"\([^)]*\)|\S+", array)


def _choose(
    rule: Partition,
    mesh: Any,
    arrays: Sequence[tuple[str, tuple[int, ...], Any]],
    *,
    least: int = 2,
    uneven: Sequence[str] = (),
) -> Split:
    """The one split that fits the arrays' present shardings (layout, shape, spec) best; the first to ask is served.

    Mesh axes of fewer than `least` devices are left out, and those that do not divide an extent, but for `uneven`.
    """
    split: dict[str, tuple[str, ...]] = {}
    taken: set[str] = set()
    for name in rule.split:
        for array, shape, spec in arrays:
            if name not in rule.names(array):
                continue
            axis = rule.names(array).index(name)
            entry = spec[axis] if axis < len(spec) else None
            axes = [a for a in (entry if isinstance(entry, tuple) else (entry,)) if isinstance(a, str)]
            axes = [a for a in axes if a not in taken and mesh.shape[a] >= least]
            extent = 0 if name in uneven else rule.sizes.get(name, shape[axis])
            while axes and extent % math.prod(mesh.shape[a] for a in axes):
                axes.pop()
            if axes:
                split[name] = tuple(axes)
                taken |= set(axes)
                break
    return split


def _shard(kernel: Any, rule: Partition, mesh: Any, split: Split) -> Callable[..., list[Array]]:
    """The program of one shard."""
    local = rule.local({name: math.prod(mesh.shape[a] for a in split.get(name, ())) for name in rule.split})
    names = [rule.names(array) for array in rule.results]
    lost = [tuple(a for name, axes in split.items() if name not in kept for a in axes) for kept in names]
    if all(mesh.shape[a] == 1 for axes in lost for a in axes):
        # Nothing is summed. Over an axis of one device a sum only says that a result does not vary over it.
        divided = {name: tuple(a for a in axes if mesh.shape[a] > 1) for name, axes in split.items()}
        divided = {name: axes for name, axes in divided.items() if axes}
    else:
        divided, lost = split, lost if rule.run is None else [()] * len(lost)

    def run(*args: Array) -> list[Array]:
        outs = kernel(local, *args) if rule.run is None else rule.run(local, divided, *args)
        outs = outs if isinstance(outs, (list, tuple)) else [outs]
        return [jax.lax.psum(out, axes) if axes else out for out, axes in zip(outs, lost, strict=True)]

    return run


def inside(shape: Sequence[int], axis: int, extent: int, mesh_axes: tuple[str, ...]) -> Array | None:
    """Which elements of a shard of `shape` are the array's own, `extent` long along a split axis, and which only fill
    the last shards up. None where all are."""
    size = shape[axis]
    if size * jax.lax.axis_size(mesh_axes) == extent:
        return None
    return jax.lax.broadcasted_iota("int32", shape, axis) + jax.lax.axis_index(mesh_axes) * size < extent


# ----------------------------------------------------------------------------------------------------------------------
# Auto meshes


def _torn(size: int, mesh: Any) -> bool:
    """Whether XLA would split an axis of the mesh in two to give an array axis of `size` a part of it.

    It does so for groups of which there are 4 on 8 devices, and no sharding of JAX's says what comes of it. Where
    another axis of the mesh divides them, they are taken to be split by that.
    """
    parts = [n for n in mesh.shape.values() if n > 1]
    return all(size % n for n in parts) and any(math.gcd(size, n) > 1 for n in parts)


def auto(kernel: Any, problem: Any, mesh: Any) -> Callable[..., list[Array]]:
    """The kernel as a function that XLA partitions by asking it, over a mesh of these axes."""
    rule = kernel.partition(problem)

    def choose(mesh: Any, operands: Sequence[Any], results: Sequence[Any]) -> Split:
        arrays = zip([*rule.operands, *rule.results], [*operands, *results], strict=True)
        present = [(array, a.shape, a.sharding.spec) for array, a in arrays if a.sharding is not None]
        return _choose(rule, mesh, present, uneven=rule.uneven)

    def shardings(mesh: Any, arrays: Sequence[str], split: Split) -> list[NamedSharding]:
        return [NamedSharding(mesh, rule.spec(array, split)) for array in arrays]

    def partition(mesh: Any, operands: Sequence[Any], results: Sequence[Any]) -> Any:
        split = choose(mesh, operands, results)
        return (
            mesh,
            _shard(kernel, rule, mesh, split),
            shardings(mesh, rule.results, split),
            tuple(shardings(mesh, rule.operands, split)),
        )

    def whole(*args: Array) -> list[Array]:
        outs = kernel(problem, *args)
        return list(outs) if kernel.multiple_results else [outs]

    # An axis that would be torn has a name of its own in each array, so that no sharding goes from one to another.
    torn = {name for name, size in rule.sizes.items() if name in rule.split and _torn(size, mesh)}
    own = iter(range(99))

    def text_of(array: str) -> str:
        tokens = [f"own{next(own)}" if torn & set(re.findall(r"\w+", t)) and "(" in t else t for t in _tokens(array)]
        return " ".join(tokens)

    operands, results = [[text_of(array) for array in arrays] for arrays in (rule.operands, rule.results)]
    text = ", ".join(operands) + " -> " + ", ".join(results)
    names = list(dict.fromkeys(re.findall(r"\w+", text)))
    kept = set(re.findall(r"\w+", ", ".join(results)))
    alone = {token for array in (*operands, *results) for token in _tokens(array)}
    call = custom_partitioning(whole)
    call.def_partition(
        partition=partition,
        infer_sharding_from_operands=lambda mesh, operands, results: shardings(
            mesh, rule.results, choose(mesh, operands, [jax.ShapeDtypeStruct(r.shape, r.dtype) for r in results])
        ),
        sharding_rule=text,
        reduction_factors=tuple(n for n in names if n in rule.split and n not in kept),
        permutation_factors=tuple(n for n in names if n in rule.neighbours and n in kept),
        need_replication_factors=tuple(n for n in names if n not in rule.split),
        **{name: rule.sizes[name] for name in names if name not in alone},
    )
    return call


# ----------------------------------------------------------------------------------------------------------------------
# Explicit meshes


def explicit_mesh(avals: Sequence[Any]) -> Any:
    """The mesh whose Explicit axes the types of the operands speak of, or None."""
    for aval in avals:
        mesh = aval.sharding.mesh
        if AxisType.Explicit in mesh.axis_types:
            return mesh
    return None


def concrete_mesh(arrays: Iterable[Any]) -> jax.sharding.Mesh | None:
    """The devices' mesh with Explicit axes that an array lies on, or None. A tracer's is not known."""
    known = (a.sharding for a in arrays if isinstance(a, jax.Array) and not isinstance(a, jax.core.Tracer))
    meshes = (of.mesh for of in known if isinstance(of, NamedSharding))
    return next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)


def explicit_spec(a: Array) -> list[Any]:
    """The mesh axes of each axis that a's type states; None for each where it states none."""
    return list(jax.typeof(a).sharding.spec) if explicit_mesh([jax.typeof(a)]) else [None] * a.ndim


def reshape(a: Array, shape: tuple[int, ...], spec: Sequence[Any]) -> Array:
    """a.reshape(shape), sharded as `spec` on an Explicit mesh; where an extent does not divide, not sharded."""
    mesh = explicit_mesh([jax.typeof(a)])
    if mesh is None:
        return a.reshape(shape)
    parts = [math.prod(mesh.shape[m] for m in (e if isinstance(e, tuple) else (e,)) if m) for e in spec]
    even = [None if n % d else e for n, d, e in zip(shape, parts, spec, strict=True)]
    return jax.lax.reshape(a, shape, out_sharding=NamedSharding(mesh, PartitionSpec(*even)))


def match_explicit(partition: Callable[[Any], Partition], problem: Any, args: Sequence[Array]) -> Sequence[Array]:
    """The operands resharded to what the kernel can be split by.

    As a JAX op outside the kernel: its transpose, which gives a cotangent its primal's sharding, is JAX's.
    """
    mesh = explicit_mesh([jax.typeof(a) for a in args])
    if mesh is None:
        return args
    rule = partition(problem)
    split = _split_of_types(rule, mesh, [jax.typeof(a) for a in args])
    shardings = [NamedSharding(mesh, rule.spec(array, split)) for array in rule.operands]
    return [jax.sharding.reshard(a, sharding) for a, sharding in zip(args, shardings, strict=True)]


def _split_of_types(rule: Partition, mesh: Any, avals: Sequence[Any]) -> Split:
    arrays = zip(rule.operands, avals, strict=True)
    # Axes of one device too: as lax's own operations, whose types these meet.
    return _choose(rule, mesh, [(array, aval.shape, aval.sharding.spec) for array, aval in arrays], least=1)


def of_results(rule: Partition, mesh: Any, avals: Sequence[Any]) -> list[NamedSharding]:
    """What the types of the results say where those of the matched operands are `avals`."""
    split = _split_of_types(rule, mesh, avals)
    return [NamedSharding(mesh, rule.spec(array, split)) for array in rule.results]


def gathered(rule: Partition, operand: int, given: Any, matched: Any) -> str | None:
    """Why an operand whose type was `given` came to the kernel as `matched`, where that gathered it over devices."""
    mesh, reasons = given.sharding.mesh, []
    specs = zip(given.sharding.spec, matched.sharding.spec, rule.names(rule.operands[operand]), strict=True)
    for axis, (before, after, name) in enumerate(specs):
        axes, kept = ((e if isinstance(e, tuple) else (e,)) if e else () for e in (before, after))
        axes = [a for a in axes if a not in kept and mesh.shape[a] > 1]
        if not axes:
            continue
        parts = math.prod(mesh.shape[a] for a in axes)
        extent = rule.sizes.get(name, given.shape[axis])
        if name not in rule.split:
            why = "it cannot be split"
        elif name in rule.neighbours and extent % parts:
            why = f"{parts} do not divide the rows of both input and output"
        elif extent % parts:
            why = f"{parts} do not divide {extent}"
        else:
            why = "another axis is already split over them"
        reasons.append(f"axis {axis} from {parts} devices ({', '.join(axes)}): {why}")
    return f"operand {operand} {given.shape} is gathered along {'; along '.join(reasons)}" if reasons else None


def explicit(kernel: Any, problem: Any, avals: Sequence[Any]) -> Callable[..., list[Array]] | None:
    """The kernel as a function of matched operands whose results' types say how they are sharded.

    None where the types speak of no Explicit axes.
    """
    mesh = explicit_mesh(avals)
    if mesh is None:
        return None
    rule = kernel.partition(problem)
    split = _split_of_types(rule, mesh, avals)
    return jax.shard_map(
        _shard(kernel, rule, mesh, split),
        mesh=mesh,
        in_specs=tuple(rule.spec(array, split) for array in rule.operands),
        out_specs=[rule.spec(array, split) for array in rule.results],
        axis_names={
            name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit
        },
    )

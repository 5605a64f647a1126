"""How an op becomes a JAX op: primitives, differentiation, batching, lowering.

A `Kernel` is a primitive with a meaning (its reference) and possibly a custom call. Its only parameter is a problem.
A fused op adds a rule pair to a kernel, written as for `jax.custom_vjp`: what the forward keeps, and a backward from
that and the cotangents. `jax.custom_vjp` itself refuses forward mode, so `fuse` gives the kernel a JVP whose linear
part is a primitive of its own, the *linear twin*: in forward mode it computes tangents, and its transpose is the
hand-written backward. Reverse mode therefore runs the kernel and the backward and nothing else.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from jaxconv import _plan
from jaxconv._core import compat, sharding
from jaxconv._plan import in_place

Array = jax.Array
Layout = tuple[int, ...]  # axes from major to minor
Typed = tuple[tuple[int, ...], str]  # (shape, dtype)
Batched = tuple[list[Array], list[int]]  # results, their batch axes

PLATFORMS = ("cpu", "cuda")


@dataclasses.dataclass(frozen=True)
class Wire:
    """What a custom call is given besides its operands."""

    attrs: dict[str, Any]
    # Physical layouts to ask XLA for, one per operand and result; None is row-major
    operand_layouts: Sequence[Layout | None]
    result_layouts: Sequence[Layout | None]
    # operand -> the result that takes its place in memory; XLA copies an operand that somebody else needs
    in_place: Mapping[int, int] = dataclasses.field(default_factory=dict)
    # The kernel's operands that the call is given; None is all. The others are its reference's.
    operands: Sequence[int] | None = None


# Roles that a problem may lack ("b?"), each with the problem's field that says whether it has them
_OPTIONAL = {
    "b": "bias",
    "c": "addend",
    "residual": "residual",
    "scale": "scaled",
    "residual_scale": "residual_scaled",
    "out_scale": "out_scaled",
    "z": "save_preactivation",
    "position": "save",
    "dx": "want_dx",
    "dresidual": "want_dresidual",
    "x2": "has_shortcut",
    "w2": "has_shortcut",
}


@dataclasses.dataclass(frozen=True)
class Family:
    """What is told once of ops that read a problem alike. Their arrays have roles, which are of a few kinds."""

    kinds: Mapping[str, str]  # kind -> its roles: {"x": "x dx c"}; what is not named is a kind of its own
    array: Callable[[Any, str], Typed]  # (problem, kind)
    attrs: Callable[[Any, _plan.Plan], dict[str, Any]]  # what the wire has besides the plan
    # (problem, kinds of operands, kinds of results, and what else the op says) -> Partition
    partition: Callable[..., sharding.Partition]
    # (problem, plan, kind) -> the physical layout to ask XLA for; None is row-major
    layout: Callable[[Any, _plan.Plan, str], Layout | None] = lambda p, plan, kind: None
    # (op, problem, args, dims) -> results, their batch axes; None maps the reference
    batch: Callable[[Any, Any, list[Array], list[int | None]], Batched] | None = None
    seen: Callable[[Any], Any] = lambda p: p  # the problem as native code sees it
    # (op, problem, *arrays) -> results: the op of channels-last arrays, for a plan that asks for them where `layout`
    # cannot
    moved: Callable[..., list[Array]] | None = None

    def kind(self, role: str) -> str:
        return next((kind for kind, roles in self.kinds.items() if role in roles.split()), role)


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """A primitive: bound with arrays and a problem, lowered to a custom call or to its reference, as the plan says.

    A reference is jnp and lax, or calls other kernels: then the plan says "calls" where another's says "xla".
    """

    name: str  # "conv_fprop": also the key that _plan knows, and part of the target's name
    operand_roles: str  # in order, "x w b?"
    result_roles: str
    family: Family
    reference: Callable[..., list[Array]]  # (problem, *arrays) -> results
    flops: Callable[[Any], Any]  # problem -> floating-point operations
    unread: str  # operands that the call is not given: its reference's
    also: str  # fields of the problem that are attributes of this op alone
    split: Mapping[str, Any]  # what the op says to its family's `partition`
    primitive: Primitive
    version: int = 2  # of the target's operands and attributes: exported programs hold them

    def present(self, problem: Any, roles: str) -> list[str]:
        """Of roles those that the problem has."""
        seen = self.family.seen(problem)
        has = (role for role in roles.split() if role[-1] != "?" or getattr(seen, _OPTIONAL[role[:-1]]))
        return [role.rstrip("?") for role in has]

    def operand_kinds(self, problem: Any) -> list[str]:
        return [self.family.kind(role) for role in self.present(problem, self.operand_roles)]

    def result_kinds(self, problem: Any) -> list[str]:
        return [self.family.kind(role) for role in self.present(problem, self.result_roles)]

    def operands(self, problem: Any) -> dict[str, Typed]:
        """(shape, dtype) of each operand that the problem has, by role."""
        roles = self.present(problem, self.operand_roles)
        return {role: self.family.array(problem, self.family.kind(role)) for role in roles}

    def results(self, problem: Any) -> list[Typed]:
        return [self.family.array(problem, kind) for kind in self.result_kinds(problem)]

    def partition(self, problem: Any) -> sharding.Partition:
        """How it is split over a mesh."""
        kinds = self.operand_kinds(problem), self.result_kinds(problem)
        return self.family.partition(problem, *kinds, **self.split)

    def wire(self, problem: Any, plan: _plan.Plan) -> Wire:
        seen = self.family.seen(problem)
        roles = self.present(problem, self.operand_roles)
        read = [role for role in roles if role not in self.unread.split()]
        return Wire(
            self.family.attrs(seen, plan) | {name: np.int64(getattr(seen, name)) for name in self.also.split()},
            [self.family.layout(problem, plan, self.family.kind(role)) for role in read],
            [self.family.layout(problem, plan, kind) for kind in self.result_kinds(problem)],
            {read.index("c"): 0} if plan.in_place else {},
            [roles.index(role) for role in read] if self.unread else None,
        )

    @property
    def multiple_results(self) -> bool:
        return self.primitive.multiple_results

    @property
    def target(self) -> str:
        return f"jaxconv_{self.name}_v{self.version}"

    def __call__(self, problem: Any, *args: Array) -> Any:
        """Results of `problem` for `args`: a list, or an array where there is always one result."""
        args = sharding.match_explicit(self.partition, problem, match_varying(*args))
        return self.primitive.bind(*args, problem=problem)


def match_varying(*args: Array) -> list[Array]:
    """Inside shard_map: all operands as varying over the mesh as the most varying of them.

    The conversion is its own JAX op, outside ours, so that its transpose (the sum over the mesh) is JAX's.
    """
    union = frozenset().union(*map(compat.varying, args))
    missing = [tuple(sorted(union - compat.varying(a))) for a in args]
    return [jax.lax.pcast(a, axes, to="varying") if axes else a for a, axes in zip(args, missing, strict=True)]


def _result_avals(op: Kernel, problem: Any, avals: Sequence[ShapedArray]) -> list[ShapedArray]:
    """Shapes, dtypes, and on a mesh also over which axes values are sharded and varying."""
    results = [(shape, np.dtype(dtype)) for shape, dtype in op.results(problem)]
    mesh = next((a.sharding.mesh for a in avals if not a.sharding.mesh.empty), None)
    if mesh is None:
        return [ShapedArray(shape, dtype) for shape, dtype in results]
    shardings = sharding.of_results(op.partition(problem), mesh, avals)
    varying = avals[0].manual_axis_type  # every operand's: see `match_varying`
    return [
        ShapedArray(shape, dtype, sharding=split, manual_axis_type=varying)
        for (shape, dtype), split in zip(results, shardings, strict=True)
    ]


def kernel(
    name: str,
    roles: str,
    family: Family,
    *,
    reference: Callable[..., list[Array]],
    flops: Callable[[Any], Any],
    unread: str = "",
    also: str = "",
    version: int = 2,
    **split: Any,
) -> Kernel:
    """Makes the primitive `jaxconv_<name>` with everything but its differentiation rule.

    `roles`: of operands and results in order, "x w b? -> y z?"; those with "?" a problem may lack. The rest is as a
    Kernel's.
    """
    primitive = Primitive(f"jaxconv_{name}")
    operands, results = roles.split(" -> ")
    primitive.multiple_results = len(results.split()) > 1
    op = Kernel(name, operands, results, family, reference, flops, unread, also, split, primitive, version)
    batch = family.batch or by_reference_mapped
    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))

    def abstract_eval(*avals: ShapedArray, problem: Any) -> Any:
        outs = _result_avals(op, problem, avals)
        return outs if op.multiple_results else outs[0]

    primitive.def_abstract_eval(abstract_eval)

    def batching_rule(args: Sequence[Array], dims: Sequence[int | None], *, problem: Any) -> Any:
        if batch_size(args, dims) == 0:  # folding divides by it
            outs = [jnp.zeros((0, *shape), dtype) for shape, dtype in op.results(problem)]
            out_dims = [0] * len(outs)
        else:
            outs, out_dims = batch(op, problem, list(args), list(dims))
        return (outs, out_dims) if op.multiple_results else (outs[0], out_dims[0])

    batching.primitive_batchers[primitive] = batching_rule
    compat.needs_devices_to_lower(primitive)
    compat.seen_by_checkify(primitive)
    compat.seen_by_jet(primitive, lambda problem: functools.partial(reference, problem))
    mlir.register_lowering(primitive, functools.partial(_lower, op, None))
    for platform in PLATFORMS:
        mlir.register_lowering(primitive, functools.partial(_lower, op, platform), platform=platform)
    KERNELS[primitive] = op
    return op


KERNELS: dict[Primitive, Kernel] = {}


@dataclasses.dataclass(frozen=True, eq=False)
class Plain:
    """An op without a kernel: it is what it means, in jnp and other ops.

    It is a primitive so that rules find it, or so that it can have a derivative that is not that of its meaning.
    """

    name: str
    results: Callable[[Any], list[tuple[tuple[int, ...], str]]]  # as a Kernel's
    meaning: Callable[..., list[Array]]  # (problem, *arrays) -> results
    primitive: Primitive

    def __call__(self, problem: Any, *args: Array) -> list[Array]:
        return self.primitive.bind(*match_varying(*args), problem=problem)


PLAIN: dict[Primitive, Plain] = {}


def plain(
    name: str,
    meaning: Callable[..., list[Array]],
    *,
    results: Callable[[Any], list[tuple[tuple[int, ...], str]]],
    batch: Callable[[Any, Any, list[Array], list[int | None]], Batched] | None = None,
) -> Plain:
    """Makes the primitive `jaxconv_<name>` with everything but its differentiation rule.

    `batch` is as a Family's: for an op whose derivative is not that of its meaning, which must stay that op where it is
    mapped before it is differentiated. None maps the meaning.
    """
    primitive = Primitive(f"jaxconv_{name}")

    def of_problem(*args: Array, problem: Any) -> list[Array]:
        return meaning(problem, *args)

    _define(primitive, results, of_problem)
    if batch is not None:

        def batching_rule(args: Sequence[Array], dims: Sequence[int | None], *, problem: Any) -> Any:
            if batch_size(args, dims) > 0:
                return batch(op, problem, list(args), list(dims))
            outs = jax.vmap(functools.partial(meaning, problem), in_axes=tuple(dims))(*args)
            return outs, [0] * len(outs)

        batching.primitive_batchers[primitive] = batching_rule
    op = PLAIN[primitive] = Plain(name, results, meaning, primitive)
    return op


# The meaning of linear twins and plain ops: a function of their operands and parameters, made of kernels and jnp
MEANINGS: dict[Primitive, Callable[..., list[Array]]] = {}


def _define(primitive: Primitive, results: Callable[[Any], list[Any]], meaning: Callable[..., list[Array]]) -> None:
    """Everything about a primitive but its derivative: it is `meaning`.

    `results` is as a Kernel's, of the primitive's parameter `problem`.
    """
    primitive.multiple_results = True

    def abstract_eval(*avals: ShapedArray, **params: Any) -> Any:
        if all(a.sharding.mesh.empty for a in avals):
            return [ShapedArray(shape, np.dtype(dtype)) for shape, dtype in results(params["problem"])]
        return list(jax.make_jaxpr(functools.partial(meaning, **params))(*avals).out_avals)

    def batch(operands: Sequence[Array], dims: Sequence[int | None], **params: Any) -> Any:
        outs = jax.vmap(functools.partial(meaning, **params), in_axes=tuple(dims))(*operands)
        return outs, [0] * len(outs)

    MEANINGS[primitive] = meaning
    compat.needs_devices_to_lower(primitive)
    compat.seen_by_checkify(primitive)
    compat.seen_by_jet(primitive, lambda **params: functools.partial(meaning, **params))
    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
    primitive.def_abstract_eval(abstract_eval)
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, mlir.lower_fun(meaning, multiple_results=True))


# Primitives that hold a program: a function of an equation and a device, that returns the jaxpr which it runs there
REGIONS: dict[Primitive, Callable[..., Any]] = {}


def inner_jaxprs(equation: Any, device: _plan.Device | None = None) -> Iterator[Any]:
    """The jaxprs that an equation runs; of a linear twin or a plain op that of its meaning.

    With a device, a region is what rules make of it there, and a kernel whose operands' types say how they are split
    runs the program of a shard.
    """
    if equation.primitive in REGIONS:
        yield REGIONS[equation.primitive](equation, device)
        return
    if equation.primitive in MEANINGS:
        meaning = functools.partial(MEANINGS[equation.primitive], **equation.params)
        yield jax.make_jaxpr(meaning)(*(v.aval for v in equation.invars)).jaxpr
        return
    if equation.primitive in KERNELS and device is not None:
        op, problem = KERNELS[equation.primitive], equation.params["problem"]
        avals = [v.aval for v in equation.invars]
        sharded = sharding.explicit(op, problem, avals)
        if sharded is not None:
            yield jax.make_jaxpr(sharded)(*avals).jaxpr
        elif _plan.plan(op.name, problem, device).implementation == "calls":
            reference = functools.partial(op.reference, problem)
            yield jax.make_jaxpr(reference)(*(v.aval for v in equation.invars)).jaxpr
        return
    for value in equation.params.values():
        for inner in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(inner, "jaxpr"):
                inner = inner.jaxpr
            if hasattr(inner, "eqns"):
                yield inner


def split_by_type(equation: Any) -> bool:
    """Whether the operands' types say how they are split over a mesh."""
    return sharding.explicit_mesh([v.aval for v in equation.invars]) is not None


def equations(jaxpr: Any, device: _plan.Device | None = None) -> Iterator[Any]:
    """Every equation of a jaxpr and of the jaxprs inside it, as on `device`."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in inner_jaxprs(equation, device):
            yield from equations(inner, device)


# ----------------------------------------------------------------------------------------------------------------------
# Lowering


_OPAQUE = contextvars.ContextVar("jaxconv_opaque", default=False)


@contextlib.contextmanager
def opaque_calls() -> Iterator[None]:
    """Lowers every kernel to a custom call that nobody implements, for looking at the rest of a program."""
    token = _OPAQUE.set(True)
    try:
        yield
    finally:
        _OPAQUE.reset(token)


_LAX = contextvars.ContextVar("jaxconv_lax", default=False)


def means_lax() -> bool:
    """Whether lax's operations that are being lowered are to stay lax's, whatever `enable` says.

    They are what a kernel was planned to be (`as_lax`), or somebody looks at the rest of a program.
    """
    return _LAX.get() or _OPAQUE.get()


@contextlib.contextmanager
def as_lax() -> Iterator[None]:
    token = _LAX.set(True)
    try:
        yield
    finally:
        _LAX.reset(token)


_LOWERS_FOR: contextvars.ContextVar[str | None] = contextvars.ContextVar("jaxconv_lowers_for", default=None)


def lowers_for() -> str | None:
    """The platform that a kernel's meaning is being lowered for; None where none is, or where none of it is native."""
    return _LOWERS_FOR.get()


@contextlib.contextmanager
def lowering_for(platform: str | None) -> Iterator[None]:
    token = _LOWERS_FOR.set(platform)
    try:
        yield
    finally:
        _LOWERS_FOR.reset(token)


def _lower(op: Kernel, platform: str | None, ctx: mlir.LoweringRuleContext, *operands: Any, problem: Any) -> Any:
    """Lowers to what the mesh asks for, else to what the plan says. `platform` None is any without native code."""

    def through(program: Callable[..., list[Array]]) -> Any:
        with lowering_for(platform):
            return mlir.lower_fun(program, multiple_results=True)(ctx, *operands)

    if _OPAQUE.get():
        return jax.ffi.ffi_lowering(op.target)(ctx, *operands)
    mapped = sharding.explicit(op, problem, ctx.avals_in)
    if mapped is not None:
        return through(mapped)

    def by_xla() -> Any:
        """A reference may call other kernels: what is XLA's is XLA's as a whole."""
        whole = getattr(problem, "implementation", "") is None
        means = dataclasses.replace(problem, implementation="xla") if whole else problem
        return through(functools.partial(op.reference, means))

    if platform is None:
        return by_xla()
    partitioning = compat.partitioning(ctx)
    device = dataclasses.replace(lowered_for(ctx, platform), partitioned=partitioning == "opaque")
    with timing_in(ctx):
        plan = _plan.plan(op.name, problem, device)
    if partitioning == "auto" and (plan.implementation == "native" or op.partition(problem).always):
        program = sharding.auto(op, problem, compat.mesh_of(ctx))
        return compat.tell_apart(through(program), f"{op.target} {problem!r} {getattr(problem, 'together', None)}")
    if plan.implementation != "native":
        with as_lax():
            return by_xla() if plan.implementation == "xla" else through(functools.partial(op.reference, problem))
    if plan.asks_channels_last and op.family.moved is not None:
        return through(functools.partial(op.family.moved, op, problem))
    if platform == "cpu" and any(a.dtype.itemsize == 2 and not _whole_numbers(a.dtype) for a in ctx.avals_in):
        return through(functools.partial(_through_float32, op, problem, plan.kernel))
    wire = op.wire(problem, plan)
    if wire.operands is not None:
        operands = tuple(operands[i] for i in wire.operands)
        ctx = ctx.replace(avals_in=[ctx.avals_in[i] for i in wire.operands])
    # The workspace is a last result, so that XLA plans its memory and captured CUDA graphs see a stable address.
    workspace = ShapedArray((plan.workspace_bytes,), np.dtype(np.uint8))
    ctx = ctx.replace(avals_out=[*ctx.avals_out, workspace])
    rule = jax.ffi.ffi_lowering(
        op.target,
        operand_layouts=[_minor_to_major(a, lay) for a, lay in zip(ctx.avals_in, wire.operand_layouts, strict=True)],
        result_layouts=[
            _minor_to_major(a, lay) for a, lay in zip(ctx.avals_out, [*wire.result_layouts, None], strict=True)
        ],
        operand_output_aliases=dict(wire.in_place),
    )
    return list(rule(ctx, *operands, **wire.attrs, plan=plan.attrs()))[:-1]


def timing_in(
    ctx: mlir.LoweringRuleContext, asked: in_place.Asked | None = None
) -> contextlib.AbstractContextManager[Any]:
    """A context for plans of the program that is being lowered, in which problems may be timed if somebody asks, or
    `asked` does. Not of an exported program, which runs anywhere, nor of whole arrays that XLA splits over a mesh."""
    if asked is None and in_place.asked() is None:
        return contextlib.nullcontext()
    if compat.exported(ctx) or compat.partitioning(ctx) != "none":
        return in_place.nothing_timed()
    return in_place.asking(asked)


def plan_all(f: Callable[..., Any], avals: Sequence[Any], device: _plan.Device) -> None:
    """Makes the plan of each kernel that f of these types calls on the device, for what plans find out on the way."""
    for equation in equations(jax.make_jaxpr(f)(*avals).jaxpr, device):
        if equation.primitive in KERNELS and not split_by_type(equation):
            _plan.plan(KERNELS[equation.primitive].name, equation.params["problem"], device)


def lowered_for(ctx: mlir.LoweringRuleContext, platform: str) -> _plan.Device:
    """The device that the program is made for: a host may have several kinds of GPU."""
    return _plan.Device.of(platform, compat.device_of(ctx, platform))


def _minor_to_major(aval: ShapedArray, layout: Layout | None) -> Layout:
    return tuple(reversed(range(aval.ndim) if layout is None else layout))


def _through_float32(op: Kernel, problem: Any, algorithm: str, *args: Array) -> list[Array]:
    """The CPU code has float32 and float64; 16-bit problems run as float32 ones, forced to the same plan."""
    wide = dataclasses.replace(problem, dtype="float32", implementation="native", algorithm=algorithm)
    args = tuple(a.astype(jnp.float32) if a.dtype.itemsize == 2 else a for a in args)
    outs = op.primitive.bind(*args, problem=wide)
    outs = outs if op.multiple_results else [outs]
    return [out.astype(dtype) for out, (_, dtype) in zip(outs, op.results(problem), strict=True)]


# ----------------------------------------------------------------------------------------------------------------------
# Differentiation


def linear(op: Kernel, transpose: Callable[..., Array]) -> None:
    """The derivative rule of a kernel that is linear in its one operand.

    `transpose(problem, ct)` is the cotangent, by a kernel of which `op` is the transpose: so derivatives of any order
    and mode close. Under differentiation the result carries the primitive's name, as that of a fused op does.
    """

    def jvp(primals: Sequence[Array], tangents: Sequence[Any], *, problem: Any) -> Any:
        (x,), (t,) = primals, tangents
        return checkpoint_name(op(problem, x), op.primitive.name), op(problem, t)

    def back(ct: Any, x: Any, *, problem: Any) -> Any:
        return [ad.Zero(x.aval) if type(ct) is ad.Zero else transpose(problem, ct)]

    ad.primitive_jvps[op.primitive] = jvp
    ad.primitive_transposes[op.primitive] = back


def bilinear(op: Kernel, left: Callable[..., Array], right: Callable[..., Array]) -> None:
    """The derivative rule of a kernel that is linear in each of its two operands.

    `left(problem, ct, y)` is the cotangent of the first operand, `right(problem, ct, x)` that of the second; both are
    built from bilinear kernels, so derivatives of any order and mode close.
    """
    ad.defbilinear(
        op.primitive,
        lambda ct, x, y, *, problem: left(problem, ct, y),
        lambda ct, x, y, *, problem: right(problem, ct, x),
    )
    compat.seen_by_jet(op.primitive, lambda problem: functools.partial(op.reference, problem), bilinear=True)


def with_addend(op: Kernel, bare: Kernel, left: Callable[..., Array], right: Callable[..., Array]) -> None:
    """The derivative rule of a kernel that is `bare`, a bilinear kernel, of two operands plus its third.

    `left` and `right` are `bare`'s (see `bilinear`).
    """

    def jvp(primals: Sequence[Array], tangents: Sequence[Any], *, problem: Any) -> Any:
        (x, y, _), (tx, ty, tc) = primals, tangents
        parts = [] if type(tx) is ad.Zero else [bare(problem, tx, y)]
        parts += [] if type(ty) is ad.Zero else [bare(problem, x, ty)]
        parts += [] if type(tc) is ad.Zero else [tc]
        return op(problem, *primals), sum(parts[1:], parts[0])

    def transpose(ct: Any, x: Any, y: Any, c: Any, *, problem: Any) -> Any:
        if type(ct) is ad.Zero:
            return [None] * 3
        return [
            left(problem, ct, y) if ad.is_undefined_primal(x) else None,
            right(problem, ct, x) if ad.is_undefined_primal(y) else None,
            ct if ad.is_undefined_primal(c) else None,
        ]

    ad.primitive_jvps[op.primitive] = jvp
    ad.primitive_transposes[op.primitive] = transpose


def by_reference(op: Kernel | Plain) -> None:
    """The derivative rule of what nobody trains through at full speed: a kernel's is that of its reference, a plain
    op's that of its meaning."""
    reference = op.reference if isinstance(op, Kernel) else op.meaning
    multiple_results = op.primitive.multiple_results

    def jvp(primals: Sequence[Array], tangents: Sequence[Any], *, problem: Any) -> Any:
        of_problem = functools.partial(reference, problem)
        outs, tangents_out = jvp_of_varied(lambda *args: list(of_problem(*args)), primals, tangents)
        tangents_out = [
            ad.Zero(jax.typeof(out).to_tangent_aval()) if _whole_numbers(out.dtype) else t
            for out, t in zip(outs, tangents_out, strict=True)
        ]
        return (outs, tangents_out) if multiple_results else (outs[0], tangents_out[0])

    def transpose(cts: Any, *operands: Any, problem: Any) -> Any:
        linear = [i for i, v in enumerate(operands) if ad.is_undefined_primal(v)]
        cts = cts if multiple_results else [cts]

        def of_linear(*values: Array) -> list[Array]:
            args = list(operands)
            for i, value in zip(linear, values, strict=True):
                args[i] = value
            return list(reference(problem, *args))

        like = [jax.ShapeDtypeStruct(operands[i].aval.shape, operands[i].aval.dtype) for i in linear]
        back = jax.linear_transpose(of_linear, *like)([ad.instantiate_zeros(ct) for ct in cts])
        cotangents = dict(zip(linear, back, strict=True))
        return [cotangents.get(i) for i in range(len(operands))]

    ad.primitive_jvps[op.primitive] = jvp
    ad.primitive_transposes[op.primitive] = transpose


def jvp_of_varied(
    f: Callable[..., list[Array]], primals: Sequence[Array], tangents: Sequence[Any]
) -> tuple[list[Array], list[Array]]:
    """f's results and their tangents, differentiated in the arguments whose tangents are not zero."""
    varied = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]

    def of_varied(*values: Array) -> list[Array]:
        args = list(primals)
        for i, value in zip(varied, values, strict=True):
            args[i] = value
        return f(*args)

    return jax.jvp(of_varied, [primals[i] for i in varied], [tangents[i] for i in varied])


def _whole_numbers(dtype: Any) -> bool:
    return not jnp.issubdtype(dtype, jnp.floating)


@dataclasses.dataclass(frozen=True, eq=False)
class Rules:
    """A fused op's differentiation, as `jax.custom_vjp` would have it, plus its linear part for forward mode.

    forward(problem, *args)                        -> results, residuals
    backward(problem, residuals, cotangents, want) -> a cotangent (or None) for each argument
    tangent(problem, residuals, tangents)          -> a tangent for each result

    Results of whole numbers have neither cotangents nor tangents.

    `problem` is always `saving(problem)`, the variant of the op that also returns what backward needs. Cotangents and
    tangents are None where they are zero; `want[i]` says whether argument i's cotangent is asked for.
    """

    saving: Callable[[Any], Any]
    forward: Callable[..., tuple[list[Array], Any]]
    backward: Callable[..., Sequence[Array | None]]
    tangent: Callable[..., list[Array]]


def fuse(op: Kernel | Plain, rules: Rules) -> Primitive:
    """Gives `op` the derivative that `rules` state, in both modes and any order. Returns the linear twin."""
    twin = Primitive(f"{op.primitive.name}_tangent")

    def with_tangents(problem: Any) -> list[tuple[tuple[int, ...], str]]:
        """Results of whole numbers have none."""
        return [(shape, dtype) for shape, dtype in op.results(problem) if not _whole_numbers(dtype)]

    name = op.primitive.name

    def split(operands: Sequence[Any], tree: Any, nonzero: tuple[bool, ...]) -> tuple[Any, list[Any]]:
        residuals = jax.tree.unflatten(tree, operands[: tree.num_leaves])
        given = iter(operands[tree.num_leaves :])
        return residuals, [next(given) if nz else None for nz in nonzero]

    def evaluate(*operands: Array, problem: Any, tree: Any, nonzero: tuple[bool, ...]) -> list[Array]:
        residuals, tangents = split(operands, tree, nonzero)
        return rules.tangent(problem, residuals, tangents)

    def jvp(primals: Sequence[Array], tangents: Sequence[Any], *, problem: Any) -> Any:
        saving = rules.saving(problem)
        outs, residuals = rules.forward(saving, *primals)
        leaves, tree = jax.tree.flatten(residuals)
        # For jax.checkpoint's policies, and readable in print_saved_residuals.
        given = set(map(id, primals))
        named = {id(out): checkpoint_name(out, name) for out in outs if id(out) not in given}
        outs, leaves = ([named.get(id(value), value) for value in values] for values in (outs, leaves))
        nonzero = tuple(type(t) is not ad.Zero for t in tangents)
        operands = match_varying(*leaves, *(t for t, nz in zip(tangents, nonzero, strict=True) if nz))
        outs_t = twin.bind(*operands, problem=saving, tree=tree, nonzero=nonzero)
        wanted, given_t = len(op.results(problem)), iter(outs_t)
        outs_t = [
            ad.Zero(jax.typeof(out).to_tangent_aval()) if _whole_numbers(out.dtype) else next(given_t) for out in outs
        ]
        return outs[:wanted], outs_t[:wanted]

    def twin_jvp(primals: Sequence[Array], tangents: Sequence[Any], **params: Any) -> Any:
        return jax.jvp(
            functools.partial(evaluate, **params), tuple(primals), tuple(ad.instantiate_zeros(t) for t in tangents)
        )

    def twin_transpose(cts: Sequence[Any], *operands: Any, problem: Any, tree: Any, nonzero: tuple[bool, ...]) -> Any:
        residuals, _ = split(operands, tree, nonzero)
        given = [None if type(ct) is ad.Zero else ct for ct in cts]
        if all(ct is None for ct in given):
            return [None] * len(operands)
        outs = [out for out, nz in zip(rules.backward(problem, residuals, given, nonzero), nonzero, strict=True) if nz]
        asked = operands[tree.num_leaves :]
        outs = [ad.Zero(v.aval) if out is None else out for out, v in zip(outs, asked, strict=True)]
        return [None] * tree.num_leaves + outs

    _define(twin, with_tangents, evaluate)
    ad.primitive_jvps[op.primitive] = jvp
    ad.primitive_jvps[twin] = twin_jvp
    ad.primitive_transposes[twin] = twin_transpose
    return twin


# ----------------------------------------------------------------------------------------------------------------------
# Batching by folding: a batch axis joins an axis that the op already has


def batch_size(args: Sequence[Array], dims: Sequence[int | None]) -> int:
    return next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)


def to_front(a: Array, dim: int | None, size: int) -> Array:
    """`a` with its batch axis first; broadcast where it has none."""
    return jnp.broadcast_to(a, (size, *a.shape)) if dim is None else jnp.moveaxis(a, dim, 0)


def listed(outs: Any) -> list[Array]:
    """A kernel's results, which may be one array."""
    return list(outs) if isinstance(outs, (list, tuple)) else [outs]


def by_reference_mapped(op: Kernel, p: Any, args: list[Array], dims: list[int | None]) -> Batched:
    """The batching rule of a kernel that cannot tell instances apart, whose sums are their own: its reference's."""
    outs = jax.vmap(functools.partial(op.reference, p), in_axes=tuple(dims))(*args)
    return outs, [0] * len(outs)


def by_images(*folds: str) -> Callable[[Kernel, Any, list[Array], list[int | None]], Batched]:
    """The batching rule of problems with a batch of images: mapped arrays of the kinds `folds` are more of them. Where
    others are mapped it is the reference's."""

    def batch(op: Kernel, p: Any, args: list[Array], dims: list[int | None]) -> Batched:
        size, kinds = batch_size(args, dims), op.operand_kinds(p)
        if not all(dim is None or kind in folds for dim, kind in zip(dims, kinds, strict=True)):
            return by_reference_mapped(op, p, args, dims)
        folded = [
            fold(to_front(a, dim, size), 0, 0) if kind in folds else a
            for a, dim, kind in zip(args, dims, kinds, strict=True)
        ]
        outs = listed(op(dataclasses.replace(p, batch=size * p.batch), *folded))
        return [unfold(out, size, 0) for out in outs], [0] * len(outs)

    return batch


def by_instances(op: Kernel, p: Any, args: list[Array], dims: list[int | None]) -> Batched:
    """The batching rule of problems with an instance axis, `batch`.

    Every mapped array gets a leading instance axis; arrays that are not mapped are repeated.
    """
    size = batch_size(args, dims)
    args = [to_front(a, d, size) for a, d in zip(args, dims, strict=True)]
    if p.batch is None:
        outs = listed(op(dataclasses.replace(p, batch=size), *args))
    else:
        flat = (a.reshape(-1, *a.shape[2:]) for a in args)
        outs = listed(op(dataclasses.replace(p, batch=size * p.batch), *flat))
        outs = [out.reshape(size, p.batch, *out.shape[1:]) for out in outs]
    return outs, [0] * len(outs)


def fold(a: Array, dim: int, axis: int, groups: int = 1) -> Array:
    """Joins the batch axis `dim` to `axis` (counted without it): the joined axis is (groups, batch, rest)."""
    a = jnp.moveaxis(a, dim, 0)
    size, shape = a.shape[0], a.shape[1:]
    # What the joined axis is sharded over is what its major part was.
    batch, *spec = sharding.explicit_spec(a)
    batch, major = (batch, None) if groups == 1 else (None, spec[axis])
    parts = (*shape[:axis], groups, shape[axis] // groups, *shape[axis + 1 :])
    a = sharding.reshape(a, (size, *parts), (batch, *spec[:axis], major, None, *spec[axis + 1 :]))
    joined = (*shape[:axis], size * shape[axis], *shape[axis + 1 :])
    return sharding.reshape(jnp.moveaxis(a, 0, axis + 1), joined, (*spec[:axis], batch or major, *spec[axis + 1 :]))


def unfold(a: Array, size: int, axis: int, groups: int = 1) -> Array:
    """The inverse of `fold`, with the batch axis first."""
    shape, spec = a.shape, sharding.explicit_spec(a)
    batch, major = (spec[axis], None) if groups == 1 else (None, spec[axis])
    parts = (*shape[:axis], groups, size, shape[axis] // (groups * size), *shape[axis + 1 :])
    a = sharding.reshape(a, parts, (*spec[:axis], major, batch, None, *spec[axis + 1 :]))
    apart = (size, *shape[:axis], shape[axis] // size, *shape[axis + 1 :])
    return sharding.reshape(jnp.moveaxis(a, axis + 1, 0), apart, (batch, *spec[:axis], major, *spec[axis + 1 :]))

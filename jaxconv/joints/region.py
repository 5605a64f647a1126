"""A region: a program of plain ops as one primitive, so that what is fused may be chosen after it is differentiated.

Its meaning is the program. Its derivative is JAX's own of the program, as a whole: results and gradients are one joint
program, which is rewritten by rules and cut in two (`joint`). What is not differentiated is rewritten when it is
lowered, for the device that it is lowered for. A mapped region is the region of the mapped program.

A region may have another program for CPUs, of the same operands and results up to rounding. Lowered for a CPU it is
that one. Its derivative is then JAX's of that one, where programs run on a CPU unless somebody says otherwise.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from jaxconv import _plan
from jaxconv._core import compat, primitives, sharding
from jaxconv._core.graph import Constant, Node, Value, names_devices, of_type
from jaxconv._plan import in_place
from jaxconv.joints.joint import Joint, OneWay, is_inexact, reaching, tangents_of
from jaxconv.joints.program import Program
from jaxconv.joints.rules import rewrite

Array = jax.Array


@compat.kept_weakly
class Body:
    """What a region holds: a flat program, and what was made of it. Equal to itself alone."""

    def __init__(
        self,
        closed: ClosedJaxpr,
        on_cpu: Callable[..., list[Array]] | None = None,
        asked: in_place.Asked | None = None,
        captured: bool = False,
    ):
        """`on_cpu`: the program for CPUs, where that is another one. It is traced when somebody asks for it. `asked`:
        who asks for choices made in place. A region is differentiated and lowered after its maker has returned.
        `captured`: whether its choices suit a program all of which CUDA graphs hold, cuDNN's convolutions too."""
        self.closed, self.on_cpu, self.asked, self.captured = closed, on_cpu, asked, captured
        self._of_cpu: ClosedJaxpr | None = None
        self._joints: dict[Any, Joint | None] = {}

    def __repr__(self) -> str:
        return str(self.closed)

    def plain(self, *args: Array) -> list[Array]:
        return jaxpr_as_fun(self.closed)(*args)

    @functools.cached_property
    def reaching(self) -> list[bool]:
        """Of each argument, whether a tangent of it may reach a result."""
        return reaching(self.closed)

    def rewritten(self, device: _plan.Device | None) -> Callable[..., list[Array]]:
        """The program as it is best computed on `device`, where nobody differentiates it."""
        if device is None:
            return self.plain
        program = Program(self.of(device))
        rewrite(program, device, captured=self.captured)
        return program.run

    def of(self, device: _plan.Device | None) -> ClosedJaxpr:
        """The program for a device."""
        if self.on_cpu is None or device is None or device.platform != "cpu":
            return self.closed
        if self._of_cpu is None:
            self._of_cpu = jax.make_jaxpr(self.on_cpu)(*self.closed.in_avals)
        return self._of_cpu

    def joint(self, varied: tuple[bool, ...], types: Sequence[Any]) -> Joint | None:
        """Of the gradients of the varied arguments; None where nothing in it has one. For the device that programs run
        on where nobody says otherwise; lowered for another one its kernels are what they mean."""
        device = _plan.Device.default()
        with in_place.asking(self.asked):
            key = varied, device, tuple(types), in_place.current()
            if key not in self._joints:
                made = self._joints[key] = Joint.make(self.closed, varied, types, device)
                if made is not None and in_place.asked() is not None and self.asked is not None:
                    # Its kernels become the outer program's, which is lowered where nobody may ask.
                    primitives.plan_all(made.program.run, [v.aval for v in made.program.inputs], device)
            return self._joints[key]


region = Primitive("jaxconv_region")
tangent = Primitive("jaxconv_region_tangent")
region.multiple_results = tangent.multiple_results = True


def call(
    f: Callable[..., Sequence[Array]],
    *args: Array,
    on_cpu: Callable[..., list[Array]] | None = None,
    asked: in_place.Asked | None = None,
    captured: bool = False,
) -> list[Array]:
    """f of arrays as a region; `on_cpu`, which closes over no tracers, in its place on a CPU. `asked`: who asks for
    choices made in place, if not whoever does so here. `captured`: as of a Body."""
    closed = jax.make_jaxpr(lambda *args: list(f(*args)))(*args)
    return bind(closed, *args, on_cpu=on_cpu, asked=asked, captured=captured)


def bind(
    closed: ClosedJaxpr,
    *args: Array,
    on_cpu: Callable[..., list[Array]] | None = None,
    asked: in_place.Asked | None = None,
    captured: bool = False,
) -> list[Array]:
    """The region of a jaxpr. Tracers among its constants become arguments."""
    closed, traced = compat.without_traced_constants(closed)
    if on_cpu is not None and traced:
        given, count = on_cpu, len(traced)
        on_cpu = lambda *args: given(*args[count:])  # noqa: E731
    return region.bind(*traced, *args, program=Body(closed, on_cpu, asked or in_place.asked(), captured))


# ----------------------------------------------------------------------------------------------------------------------
# A program's nodes as regions


class Part(NamedTuple):
    apart: bool  # no region: it has an effect, nobody can go back through it, or it names devices
    nodes: list[Node]


# A program: inputs, results, and its function
Whole = tuple[Sequence[Value], Sequence[Value], Callable[..., list[Array]]]


def parts(nodes: Iterable[Node]) -> list[Part]:
    """A program's nodes in their order: what has no effects is a region, several where something else is in between."""
    return [Part(apart, list(these)) for apart, these in itertools.groupby(nodes, _stands_apart)]


def _stands_apart(node: Node) -> bool:
    effects = any(type(effect).__name__ != "NamedAxisEffect" for effect in node.eqn.effects)
    alone = effects or node.name in ("while", "pure_callback")
    return alone or names_devices(node.eqn)  # inside a region jit would not find it


def run_parts(
    parts: Sequence[Part],
    known: dict[Value, Any],
    results: Iterable[Value],
    made: Callable[[Node], Iterable[Value]],
    evaluate: Callable[[list[Node], dict[Value, Any]], object],
    *,
    on_cpu: Whole | None = None,
    captured: bool = False,
) -> None:
    """`known` becomes more: the results, and what parts read of each other. `evaluate(nodes, known)` is called for each
    part, in a region or not; `made(node)` are the values that it then knows. `on_cpu`: the whole program for CPUs,
    where one region holds it. `captured`: as of a Body."""
    results = set(results)
    for i, (apart, nodes) in enumerate(parts):
        if apart:
            evaluate(nodes, known)
            continue
        later = results.union(v for _, others in parts[i + 1 :] for node in others for v in node.inputs)
        own = {v for node in nodes for v in node.outputs}
        read = dict.fromkeys(v for node in nodes for v in node.inputs if v not in own)
        wanted = [v for v in dict.fromkeys(v for node in nodes for v in made(node)) if v in later]
        given = [v for v in read if v in known or not isinstance(v, Constant)] if on_cpu is None else on_cpu[0]

        def part(*values: Array, nodes: Any = nodes, given: Any = given, wanted: Any = wanted) -> list[Array]:
            inside = dict(zip(given, values, strict=True))
            evaluate(nodes, inside)
            return [inside[v] for v in wanted]

        def part_on_cpu(*values: Array, whole: Any = on_cpu, wanted: Any = wanted) -> list[Array]:
            found = dict(zip(whole[1], whole[2](*values), strict=True))
            return [found[v] for v in wanted]

        arrays = (of_type(known[v], v) for v in given)
        outs = call(part, *arrays, on_cpu=None if on_cpu is None else part_on_cpu, captured=captured)
        known.update(zip(wanted, outs, strict=True))


# ----------------------------------------------------------------------------------------------------------------------
# The region


def _run(*args: Array, program: Body) -> list[Array]:
    """Without jit. As of a jitted program JAX's checks for debugging are of the results: `jnp.var` holds a NaN."""
    with jax.debug_nans(False), jax.debug_infs(False):
        outs = program.rewritten(_plan.Device.default())(*args)
    for name, found in (("nan", jnp.isnan), ("inf", jnp.isinf)):
        if getattr(jax.config, f"jax_debug_{name}s") and any(is_inexact(a) and found(a).any() for a in outs):
            raise FloatingPointError(f"invalid value ({name}) encountered in an accelerated function")
    return outs


def _lower(platform: str | None, ctx: mlir.LoweringRuleContext, *operands: Any, program: Body) -> Any:
    device = None
    if platform is not None:
        device = primitives.lowered_for(ctx, platform)
        if compat.partitioning(ctx) == "opaque" and sharding.explicit_mesh(ctx.avals_in) is None:
            device = dataclasses.replace(device, partitioned=True)
    with primitives.timing_in(ctx, program.asked):
        return mlir.lower_fun(program.rewritten(device), multiple_results=True)(ctx, *operands)


def _batch(axis: Any, args: Sequence[Array], dims: Sequence[int | None], *, program: Body) -> Any:
    closed, found = compat.mapped(program.closed, axis, dims)
    on_cpu = program.on_cpu
    if on_cpu is not None:
        names = dict(axis_name=axis.name, axis_size=axis.size, spmd_axis_name=axis.spmd_name)
        of_each = jax.vmap(on_cpu, in_axes=tuple(dims), out_axes=[0 if d is None else d for d in found], **names)
        # What is not mapped in the one program is the same for all in the other.
        on_cpu = lambda *args: [a[0] if d is None else a for a, d in zip(of_each(*args), found, strict=True)]  # noqa: E731
    return bind(closed, *args, on_cpu=on_cpu, asked=program.asked, captured=program.captured), found


def _jvp(primals: Sequence[Array], tangents: Sequence[Any], *, program: Body) -> Any:
    varied = tuple(
        reaches and type(t) is not ad.Zero and t.dtype != jax.dtypes.float0
        for t, reaches in zip(tangents, program.reaching, strict=True)
    )
    zero = [ad.Zero(aval.to_tangent_aval()) for aval in program.closed.out_avals]

    def as_jax(f: Callable[..., list[Array]]) -> Any:
        given = [t if v else z for t, v, z in zip(tangents, varied, map(_zero_like, primals), strict=True)]
        outs, outs_t = primitives.jvp_of_varied(f, primals, given)
        moves = tangents_of(program.closed, varied)
        return outs, [t if m else z for t, m, z in zip(outs_t, moves, zero, strict=True)]

    if program.on_cpu is not None and any(varied) and _plan.Device.default().platform == "cpu":
        # As JAX differentiates what was written: rules that fuse gradients are of kernels that only GPUs have.
        return as_jax(program.on_cpu)
    try:
        joint = program.joint(varied, [jax.typeof(a) for a in primals]) if any(varied) else None
    except OneWay:
        return as_jax(program.plain)
    if joint is None and any(varied):  # what makes integers by a rule of its own may refuse a tangent
        return as_jax(program.plain)
    if joint is None:
        return region.bind(*primals, program=program), zero
    outs, kept = joint.forward(primals)
    given = [t for t, is_varied in zip(tangents, varied, strict=True) if is_varied]
    outs_t = iter(tangent.bind(*kept, *primals, *given, joint=joint, count=len(kept)))
    return outs, [next(outs_t) if moves else z for moves, z in zip(joint.has_tangent, zero, strict=True)]


def _zero_like(primal: Any) -> ad.Zero:
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


def _transpose(cts: Sequence[Any], *operands: Any, program: Body) -> list[Any]:
    """Of a program that is linear in what is asked for."""
    linear = [i for i, v in enumerate(operands) if ad.is_undefined_primal(v)]

    def of_linear(*values: Array) -> list[Array]:
        given = dict(zip(linear, values, strict=True))
        return program.plain(*(given.get(i, v) for i, v in enumerate(operands)))

    # Not `jax.linear_transpose`: a fused op goes back by a rule of its own. Anywhere a linear function's is the same.
    _, back = jax.vjp(of_linear, *(compat.zeros_of_type(operands[i].aval) for i in linear))
    found = dict(zip(linear, back([ad.instantiate_zeros(ct) for ct in cts]), strict=True))
    return [found.get(i) for i in range(len(operands))]


def _effects(*avals: Any, program: Body) -> Any:
    return list(program.closed.out_avals), program.closed.effects


region.def_effectful_abstract_eval(_effects)
region.def_impl(_run)
ad.primitive_jvps[region] = _jvp
ad.primitive_transposes[region] = _transpose
batching.fancy_primitive_batchers[region] = _batch
compat.needs_devices_to_lower(region)
compat.checkified_inside(region, lambda program: program.closed)
compat.seen_by_jet(region, lambda program: program.plain)
mlir.register_lowering(region, functools.partial(_lower, None))
for _platform in primitives.PLATFORMS:
    mlir.register_lowering(region, functools.partial(_lower, _platform), platform=_platform)


# ----------------------------------------------------------------------------------------------------------------------
# Its tangent: a linear function of the tangents, of which the transpose is the joint program's second part. Operands:
# what that reads, the region's own, the tangents of those that vary.


def _forward_mode(*operands: Array, joint: Joint, count: int) -> list[Array]:
    n = len(joint.varied)
    primals, given = operands[count : count + n], operands[count + n :]
    return joint.pushed(primals, given)


def _types_of_tangents(*avals: Any, joint: Joint, count: int) -> Any:
    types = [
        aval.to_tangent_aval() for aval, moves in zip(joint.closed.out_avals, joint.has_tangent, strict=True) if moves
    ]
    return types, joint.closed.effects


def _transpose_of_tangent(cts: Sequence[Any], *operands: Any, joint: Joint, count: int) -> list[Any]:
    n = len(joint.varied)
    if all(type(ct) is ad.Zero for ct in cts):
        return [None] * len(operands)
    primals = operands[count : count + n]
    given = [None if type(ct) is ad.Zero else ct for ct in cts]
    grads = joint.backward(operands[:count], primals, given)
    zeros = (ad.Zero(v.aval) for v in operands[count + n :])
    return [None] * (count + n) + [z if grad is None else grad for grad, z in zip(grads, zeros, strict=True)]


def _jvp_of_tangent(primals: Sequence[Array], tangents: Sequence[Any], **params: Any) -> Any:
    f = functools.partial(_forward_mode, **params)
    return jax.jvp(f, tuple(primals), tuple(ad.instantiate_zeros(t) for t in tangents))


def _batch_tangent(axis: Any, args: Sequence[Array], dims: Sequence[int | None], **params: Any) -> Any:
    joint: Joint = params["joint"]
    given = [aval.to_tangent_aval() for aval, varied in zip(joint.closed.in_avals, joint.varied, strict=True) if varied]
    types = [*(v.aval for v in joint.kept), *joint.closed.in_avals, *given]
    closed, found = compat.mapped(jax.make_jaxpr(functools.partial(_forward_mode, **params))(*types), axis, dims)
    return jaxpr_as_fun(closed)(*args), found


tangent.def_effectful_abstract_eval(_types_of_tangents)
tangent.def_impl(_forward_mode)
ad.primitive_jvps[tangent] = _jvp_of_tangent
ad.primitive_transposes[tangent] = _transpose_of_tangent
batching.fancy_primitive_batchers[tangent] = _batch_tangent
compat.needs_devices_to_lower(tangent)
compat.seen_by_checkify(tangent)
compat.seen_by_jet(tangent, lambda **params: functools.partial(_forward_mode, **params))
mlir.register_lowering(tangent, mlir.lower_fun(_forward_mode, multiple_results=True))


# ----------------------------------------------------------------------------------------------------------------------
# For whoever walks through programs


def inside(equation: Any, device: _plan.Device | None) -> Any:
    """The jaxpr that an equation of either primitive runs on `device`."""
    avals: list[ShapedArray] = [v.aval for v in equation.invars]
    if equation.primitive is region:
        f = equation.params["program"].rewritten(device)
    else:
        f = functools.partial(_forward_mode, **equation.params)
    return jax.make_jaxpr(f)(*avals).jaxpr


primitives.REGIONS.update({region: inside, tangent: inside})

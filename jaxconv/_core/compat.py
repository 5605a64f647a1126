"""Every use of JAX that is not public, in one place. Checked with jax 0.10.0 to 0.12.

`jax.interpreters` and `jax.extend.core`, which `primitives` is built on, are documented and not listed here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy
from jax._src import ad_checkpoint, checkify, config, core, dispatch, profiler, source_info_util, util
from jax._src.interpreters import batching as batch
from jax._src.interpreters import mlir as lowerings
from jax._src.lax.lax import optimization_barrier_p
from jax._src.lib import _jax, jaxlib_extension_version
from jax.experimental import jet
from jax.extend.core import ClosedJaxpr, Literal, Primitive
from jax.interpreters import ad, mlir
from jaxlib.mlir import ir

# Profiles, HLO metadata and print_saved_residuals name the caller's line instead of ours. (The function: 0.4 to 0.12.)
source_info_util.register_exclusion(str(pathlib.Path(__file__).parent.parent.absolute()) + os.sep)


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many constants and how many carried values the equation of a scan reads, in this order, before its slices.

    (`num_consts` and `num_carry`: to 0.10. The trees `ft_in` of constants, carry and slices: 0.11, 0.12.)
    """
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


_profiles: list[None] = []


def note_profiles() -> None:
    """From now on `profiled` knows whether jax.profiler has taken a trace.

    (`_profile_state`, whose `profile_session`, from 0.12 on `session`, is set while one is taken. Elsewhere nothing is
    known.)
    """
    state = getattr(profiler, "_profile_state", None)
    session = next((name for name in ("profile_session", "session") if hasattr(state, name)), None)
    if state is None or session is None or getattr(type(state), "notes", False):
        return

    class Noting(type(state)):  # type: ignore[misc]
        notes = True

        def __setattr__(self, name: str, value: Any) -> None:
            if name == session and value is not None:
                _profiles.append(None)
            super().__setattr__(name, value)

    if getattr(state, session) is not None:
        _profiles.append(None)
    state.__class__ = Noting


def profiled() -> bool:
    """Whether jax.profiler takes a trace, or took one since `note_profiles`."""
    return bool(_profiles)


_JAX = str(pathlib.Path(jax.__file__).parent) + os.sep


def written_in_jax(jaxpr: Any) -> str:
    """Which function of JAX's own a jaxpr was traced from, "relu at <file>:<line>"; empty of anybody else's.

    (`debug_info.func_src_info`: 0.10 to 0.12. Elsewhere nothing is known.)
    """
    source = getattr(getattr(jaxpr, "debug_info", None), "func_src_info", None) or ""
    return source if source.partition(" at ")[2].startswith(_JAX) else ""


def needs_devices_to_lower(primitive: Primitive) -> None:
    """Makes jit tell the primitive's lowering which devices the program is for. (The set's name: 0.4 to 0.12.)"""
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def seen_by_checkify(primitive: Primitive) -> None:
    """Makes checkify's float checks look at the primitive's results, as at those of JAX's own. (The rule: 0.10 on.)"""
    checkify.error_checks[primitive] = functools.partial(checkify.nan_error_check, primitive)


def kept_weakly(cls: type) -> type:
    """JAX's caches of what primitives' parameters say hold objects of this class as they hold jaxprs: no longer than
    others do. (`weakref_cache_key_types`: 0.10 to 0.12; without it they hold 2,048.)"""
    getattr(util, "weakref_cache_key_types", set()).add(cls)
    return cls


def checkified_inside(primitive: Primitive, program: Callable[..., ClosedJaxpr]) -> None:
    """Makes checkify look at each equation of the program that `primitive` holds. (`checkify_jaxpr`: 0.10 to 0.12;
    since 0.11 a rule is given a context in front, which it passes on.)"""

    def rule(*given: Any, **params: Any) -> Any:
        first = next(i for i, value in enumerate(given) if isinstance(value, checkify.Error))
        context, (error, enabled, *args) = given[:first], given[first:]
        return checkify.checkify_jaxpr(*context, program(**params), enabled, error, *args)

    checkify.error_checks[primitive] = rule


def without_traced_constants(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, list[Any]]:
    """The jaxpr with the tracers among its constants as first arguments, and these. (`Jaxpr.replace`: 0.4 to 0.12.)"""
    traced = [isinstance(const, jax.core.Tracer) for const in closed.consts]
    if not any(traced):
        return closed, []
    jaxpr, pairs = closed.jaxpr, list(zip(closed.jaxpr.constvars, closed.consts, traced, strict=True))
    names = jaxpr.debug_info._replace(arg_names=None)
    invars = [*(v for v, _, is_traced in pairs if is_traced), *jaxpr.invars]
    constvars = [v for v, _, is_traced in pairs if not is_traced]
    jaxpr = jaxpr.replace(constvars=constvars, invars=invars, debug_info=names)
    consts = [const for _, const, is_traced in pairs if not is_traced]
    return ClosedJaxpr(jaxpr, consts), [const for _, const, is_traced in pairs if is_traced]


def mapped(closed: ClosedJaxpr, axis: Any, dims: Sequence[int | None]) -> tuple[ClosedJaxpr, list[int | None]]:
    """A jaxpr mapped over `dims` of its operands, as a batching rule is given them with `axis`; of each result the axis
    that is mapped. None: the result is the same for all. (`batch_jaxpr2`: 0.5 to 0.12.)"""
    jaxpr, found = batch.batch_jaxpr2(closed, axis, tuple(dims))
    return jaxpr, list(found)


def cotangent_type(aval: Any) -> Any:
    """The type of a value's cotangent. (`to_ct_aval`: since 0.9; before it `to_tangent_aval`.)"""
    tangent = aval.to_tangent_aval()
    return tangent.to_ct_aval() if hasattr(tangent, "to_ct_aval") else tangent


def zeros_of_type(aval: Any) -> Any:
    """Zeros of a type: sharded and varying as it says. (`instantiate_zeros`: 0.4 to 0.12.)"""
    return ad.instantiate_zeros(ad.Zero(aval))


def seen_by_jet(primitive: Primitive, meaning: Callable[..., Any], bilinear: bool = False) -> None:
    """Gives the primitive a rule for jax.experimental.jet: `meaning(**params)` is its function of arrays.

    Of a bilinear one the coefficients are sums of its own results. (`jet_rules`, whose series are not scaled by
    factorials: 0.10 to 0.12.)
    """

    def rule(primals: Any, series: Any, **params: Any) -> Any:
        if not bilinear:
            f = _without_custom_jvp(jax.make_jaxpr(meaning(**params))(*primals))
            try:
                primal, terms = jet.jet(f, tuple(primals), tuple(map(list, series)), factorial_scaled=False)
            except KeyError as error:
                raise NotImplementedError(
                    f"jax.experimental.jet has no rule for {error.args[0]}, which {primitive} is made of"
                ) from None
            return (primal, terms) if primitive.multiple_results else (primal[0], terms[0])
        x, y = ([primal, *terms] for primal, terms in zip(primals, series, strict=True))
        out, *terms = (
            functools.reduce(jax.numpy.add, (primitive.bind(x[i], y[k - i], **params) for i in range(k + 1)))
            for k in range(len(x))
        )
        return out, terms

    jet.jet_rules[primitive] = rule
    # checkpoint_name, which our derivative rules give to what remat may keep, and for which jet has none
    jet.jet_rules.setdefault(
        ad_checkpoint.name_p, lambda primals, series, **params: (ad_checkpoint.name_p.bind(*primals, **params), *series)
    )
    # The barrier in a group-norm's backward pass, of several values
    jet.jet_rules.setdefault(
        optimization_barrier_p,
        lambda primals, series, **params: (optimization_barrier_p.bind(*primals, **params), [*series]),
    )


def _without_custom_jvp(closed: Any) -> Callable[..., list[Any]]:
    """A jaxpr as a function in which what has a custom_jvp is its formula: under jet JAX's own relu loses a tracer.

    (`custom_jvp_call` with its `call_jaxpr`: 0.4 to 0.12.)
    """

    def run(*args: Any) -> list[Any]:
        values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        values |= dict(zip(closed.jaxpr.invars, args, strict=True))
        for equation in closed.jaxpr.eqns:
            given = [v.val if isinstance(v, Literal) else values[v] for v in equation.invars]
            inner = equation.params.get("call_jaxpr" if equation.primitive.name == "custom_jvp_call" else "jaxpr")
            if isinstance(inner, ClosedJaxpr) and len(inner.jaxpr.invars) == len(given):
                outs = _without_custom_jvp(inner)(*given)
            else:
                outs = equation.primitive.bind(*given, **equation.params)
                outs = outs if equation.primitive.multiple_results else [outs]
            values |= dict(zip(equation.outvars, outs, strict=True))
        return [v.val if isinstance(v, Literal) else values[v] for v in closed.jaxpr.outvars]

    return run


def varying(a: Any) -> frozenset[str]:
    """The mesh axes over which a value inside shard_map varies. (`manual_axis_type`: since 0.10; before it `vma`.)"""
    return jax.typeof(a).manual_axis_type.varying


def is_varying(aval: Any) -> bool:
    """Whether a type says that a value inside shard_map differs between devices."""
    return bool(getattr(getattr(aval, "manual_axis_type", None), "varying", ()))


def on_no_mesh(aval: Any) -> bool:
    """Whether a value's type names no mesh. (`sharding`: since 0.5; what has none is taken for one on a mesh.)"""
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    return mesh is not None and mesh.empty


def scopes_alone(name_stack: Any) -> Any:
    """A name stack without the transformations in it. (`NameStack` of `Scope`s and `Transform`s: 0.4 to 0.12.)"""
    scopes = tuple(part for part in name_stack.stack if isinstance(part, source_info_util.Scope))
    return source_info_util.NameStack(scopes)


def trace_context() -> Any:
    """What tracing depends on besides arguments, hashable: precision, 64-bit types, meshes, user contexts (0.4 on)."""
    return config.trace_context()


# Whether xla_gpu_enable_command_buffer knows CONVOLUTION. (jaxlib 0.10.0 refuses to compile with it.)
CAPTURES_CONVOLUTIONS = jaxlib_extension_version >= 440


def set_global(context: Any, value: Any) -> None:
    """What a `jax.make_user_context` is from now on, in all threads. (Its own method: from 0.10.1 on.)"""
    (context if hasattr(context, "set_global") else context._obj).set_global(value)


def current_trace() -> Any:
    """Which trace makes the tracers of what is called now."""
    return core.trace_ctx.trace


def made_by(tracer: Any, trace: Any) -> bool:
    """Whether `trace` made the tracer."""
    return tracer._trace is trace


def staged() -> contextlib.AbstractContextManager[Any]:
    """A context in which functions are traced as a whole, also inside of jax.ensure_compile_time_eval.

    There JAX computes what depends on no argument, whatever its extents are.

    (`eager_constant_folding`, a state of a thread: 0.10 to 0.12. Inside of make_jaxpr, too, from 0.11 on.)
    """
    return config.eager_constant_folding(False)


def traces() -> bool:
    """Whether something is being traced here: what is called now becomes part of a program. (0.4.36 to 0.12.)"""
    return not core.trace_state_clean()


def partitioning(ctx: mlir.LoweringRuleContext) -> str:
    """What XLA will do with the program that is being lowered.

    "none": it runs as written, on one device, or on one shard inside shard_map.
    "auto": XLA partitions it over the devices of a mesh, and asks custom_partitioning how.
    "opaque": XLA partitions it, and a custom call cannot say how: inside a shard_map over some of the mesh's axes
      (there custom_partitioning raises or aborts the process), in an exported program (it would hold a pointer), or
      without a mesh.

    (The contexts are SPMDAxisContext(mesh, manual_axes), ShardingContext(num_devices, device_assignment,
    abstract_mesh) and, up to 0.10, ReplicaAxisContext.)
    """
    context = ctx.module_context.axis_context
    if hasattr(context, "manual_axes"):
        rest = [size for name, size in context.mesh.shape.items() if name not in context.manual_axes]
        return "opaque" if any(size > 1 for size in rest) else "none"
    if getattr(context, "num_devices", 1) in (None, 1):
        return "none"
    mesh = context.abstract_mesh
    known = mesh is not None and not mesh.empty and context.device_assignment is not None
    auto = known and all(kind == jax.sharding.AxisType.Auto for kind in mesh.axis_types)
    return "auto" if auto and not ctx.module_context.lowering_parameters.for_export else "opaque"


def device_of(ctx: mlir.LoweringRuleContext, platform: str) -> Any:
    """The first of the devices that the program is lowered for; None where they are not known, or of another platform.

    (For contexts see `partitioning`. An exported program's platforms need not be those of the devices here.)
    """
    context = ctx.module_context.axis_context
    mesh = getattr(context, "mesh", None)
    if mesh is not None:
        devices = () if isinstance(mesh, jax.sharding.AbstractMesh) else tuple(mesh.devices.flat)
    else:
        devices = getattr(context, "device_assignment", None) or ()
    return next((d for d in devices if {"gpu": "cuda"}.get(d.platform, d.platform) == platform), None)


def mesh_of(ctx: mlir.LoweringRuleContext) -> Any:
    """The mesh over which XLA partitions the program, where `partitioning` is "auto"."""
    return ctx.module_context.axis_context.abstract_mesh


def tell_apart(lowered: Any, text: str) -> Any:
    """Writes `text` into the custom_partitioning call that made `lowered`, as part of the program. Returns `lowered`.

    The call holds its callback as a pointer and nothing else. With jax_remove_custom_partitioning_ptr_from_cache_key
    the persistent compilation cache would take calls of equal shapes for one another: relu for tanh.
    """
    for value in jax.tree.leaves(lowered):
        label = ir.DictAttr.get({"jaxconv": ir.StringAttr.get(text)})
        value.owner.attributes["mhlo.frontend_attributes"] = label
    return lowered


# ----------------------------------------------------------------------------------------------------------------------
# What `enable` replaces

Rule = Callable[..., Any]

# What is raised where types say that arrays are split over a mesh in a way that an operation does not take
ShardingTypeError = core.ShardingTypeError


def replace_lowering(primitive: Primitive, rules: Mapping[str, Callable[..., Any]]) -> Callable[[], None]:
    """Gives `primitive` on each platform the lowering `rules[platform](JAX's own rule, ctx, ...)`.

    Returns what puts things back as they were, also if the primitive has come to need devices since.

    (The tables `_lowerings` and `_platform_specific_lowerings` of frozen `LoweringRuleEntry(rule, inline)`, the set of
    primitives that are lowered anew for each equation, and `lower_per_platform`: 0.10 to 0.12.)
    """
    names = (
        "_lowerings",
        "_platform_specific_lowerings",
        "_uncacheable_primitives",
        "LoweringRuleEntry",
        "lower_per_platform",
    )
    missing = [name for name in names if not hasattr(lowerings, name)]
    common = None if missing else lowerings._lowerings.get(primitive)
    tables = {} if missing else dict(lowerings._platform_specific_lowerings)
    before = {p: table[primitive] for p, table in tables.items() if primitive in table}
    own = {} if missing else {p: before.get(p, common) for p in {**rules, **before}}
    missing += [f"a rule of {primitive} for {p}" for p, entry in own.items() if not hasattr(entry, "rule")]
    if missing:
        raise NotImplementedError(
            f"jaxconv.enable: jax {jax.__version__} keeps its lowering rules in another way than 0.10 to 0.12: there "
            f"is no {', no '.join(missing)}. Convolutions stay lax's; jaxconv.accelerate does not depend on it"
        )
    each = {p: _bound(rules[p], entry.rule) if p in rules else entry.rule for p, entry in own.items()}

    def lower(ctx: mlir.LoweringRuleContext, *args: Any, **params: Any) -> Any:
        listed = ctx.replace(avals_out=list(ctx.avals_out))
        default = None if common is None else common.rule
        return lowerings.lower_per_platform(listed, str(primitive), each, default, frozenset(), *args, **params)

    # One rule for all platforms, which asks each platform's. Of several rules, for a program that is lowered for
    # several platforms, JAX makes a case; it fails at that where a primitive is lowered anew for each equation, since
    # it adds the types of results to a list, and they come as a tuple.
    made = lowerings._lowerings[primitive] = dataclasses.replace(next(iter(own.values())), rule=lower)
    for platform in before:
        tables[platform].pop(primitive)
    # JAX lowers equal equations of a program once. Here equal convolutions may be lax's and ours in one program (what a
    # plan gave to XLA stays lax's), and each is counted.
    sets = lowerings._uncacheable_primitives, dispatch.prim_requires_devices_during_lowering
    without = [primitives for primitives in sets if primitive not in primitives]
    lowerings._uncacheable_primitives.add(primitive)

    def undo() -> None:
        # What somebody has registered since stays.
        for platform, entry in before.items():
            tables[platform].setdefault(primitive, entry)
        if lowerings._lowerings.get(primitive) is made:
            if common is None:
                del lowerings._lowerings[primitive]
            else:
                lowerings._lowerings[primitive] = common
        for primitives in without:
            primitives.discard(primitive)

    return undo


def _bound(rule: Rule, own: Rule) -> Rule:
    def lower(ctx: mlir.LoweringRuleContext, *args: Any, **params: Any) -> Any:
        return rule(own, ctx, *args, **params)

    return lower


def exported(ctx: mlir.LoweringRuleContext) -> bool:
    """Whether the program that is being lowered is jax.export's."""
    return ctx.module_context.lowering_parameters.for_export


def in_stablehlo(serialized: bytes, version: str) -> bytes:
    """What `jax.export.Exported.mlir_module_serialized` holds, written as StableHLO of `version` or older.

    (jaxlib's own pair of functions, which jax.export calls: 0.10 to 0.12. The second takes bytes in jaxlib 0.10.0, a
    module from 0.10.1 on.)
    """
    with lowerings.make_ir_context():
        module = _jax.mlir.deserialize_portable_artifact(serialized)
        return _jax.mlir.serialize_portable_artifact(
            lowerings.module_to_bytecode(module) if jaxlib_extension_version < 440 else module,
            version,
            jax.extend.backend.get_backend().serialize_with_sdy,
        )


def computed_elsewhere(ctx: mlir.LoweringRuleContext) -> bool:
    """Whether a compute_on sends the operation elsewhere: to the host, to another kind of core, to a stream of its own.

    (`JaxprEqnContext.compute_type`: 0.4 to 0.12.)
    """
    return getattr(ctx.jaxpr_eqn_ctx, "compute_type", None) not in (None, "device")

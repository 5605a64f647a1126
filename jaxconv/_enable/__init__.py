"""`enable`: the convolutions of every program that is compiled take the plan's choice, whoever wrote them.

lax's convolution is one primitive, and it stays one: what JAX differentiates, maps and caches is unchanged. Only its
lowering is replaced. It reads which kernel's problem a convolution is (forms), asks the plan, and makes jaxconv's call
or calls lax's own lowering. What it did is counted (report).

Whether it is on is part of the key of all of JAX's caches, so that a function compiled with it and one compiled without
are two programs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax import lax
from jax.interpreters import mlir
from jax.sharding import AxisType

from jaxconv import _plan, _problem
from jaxconv._core import compat, primitives, sharding
from jaxconv._enable import forms
from jaxconv._enable.report import Convolution, Convolutions, Record
from jaxconv._ops import conv_integer
from jaxconv._plan import in_place

__all__ = ["Convolution", "Convolutions", "disable", "disabled", "enable", "enabled", "report"]


@dataclasses.dataclass(frozen=True)
class State:
    """`enable`'s arguments."""

    implementation: str | None = None
    auto_meshes: bool = False


# A State: on. Anything else: off.
_STATE = jax.make_user_context(default_value=None)
_off: Any = None  # what `disable` sets

_lock = threading.Lock()
_users = 0  # the process (`enable`), and each context that is on
_process = False
_undo: Callable[[], None] | None = None
_record = Record()


def enable(*, implementation: str | None = None, auto_meshes: bool = False, tune: bool = False) -> None:
    """Runs the convolutions of all programs compiled from now on by jaxconv's kernels, where these are faster.

    One line for programs written with any library, before anything is compiled::

        import jaxconv

        jaxconv.enable()

    or, for programs that nobody may edit, `JAXCONV_ENABLE=1` in the environment. Each `lax.conv_general_dilated` is
    then planned like a call of `jaxconv.conv2d` (`implementation=None`): forward convolutions, the gradients of images
    and filters, grouped, depthwise, dilated and transposed ones, in 1 to 3 dimensions, channels last or first, under
    every transform. Convolutions of integers, which XLA does not compile for GPUs, run there too, and are exact.
    Convolutions of float8 to 16 or 32 bits run on Hopper's 8-bit tensor cores. Where the plan says XLA, or jaxconv has
    no kernel, the program is exactly lax's, but for convolutions of integers: without a kernel they are matrix products
    on a GPU. Elsewhere numbers are lax's up to rounding, of float8 within 2^-9 of the sum of the products' absolute
    values. `jaxconv.report()` says what became of each convolution, `jaxconv.explain(f)` what would become of it.

    Three kinds of programs are left to lax: exported programs, parts that `compute_on` sends to the host, and programs
    that XLA partitions over a mesh. On a mesh with Explicit axes, whose types say how arrays are split, a convolution
    is taken if jaxconv's call needs no gather for it. Programs inside shard_map and pmap are not partitioned.

    A lowering sees one operation, so this fuses nothing. `jaxconv.accelerate` sees the whole function. It replaces
    convolutions together with their bias, activation and batch-norm, and dense layers. The two work together.

    It holds for all threads, until `disable`. Programs that were compiled before stay as they are, and are used again
    after `disable`. `with jaxconv.enabled():` is the same for a block of one thread.

    Args:
      implementation: as in `conv2d`: None is the fastest known for each problem and device; "native" is jaxconv's own
        code wherever it has any, for tests; "xla" is lax's everywhere.
      auto_meshes: also take convolutions of programs that XLA partitions over a mesh with Auto axes. A lowering cannot
        see how arrays are split there. Batches, channels and pixels may be split; split pixels exchange rows, as in
        `conv2d`. Nothing checks that jaxconv's calls exchange no more than lax's would. Weight gradients with groups
        run a shard at a time, even if XLA computes them, because XLA's own split of them is wrong.
      tune: on a GPU, also time problems that nobody has measured. The first time that such a problem is lowered,
        jaxconv's kernels and XLA's are timed on that device, and the fastest is kept in `jaxconv.tune.path()`. This
        holds for all of jaxconv's calls. With False, JAXCONV_TUNE decides.

    Raises:
      ValueError: if implementation is unknown.
      TypeError: if auto_meshes or tune is neither True nor False.
      NotImplementedError: if the installed JAX is one that jaxconv does not know.
    """
    global _process
    state = _state(implementation, auto_meshes)
    tune = in_place.checked("enable", tune)
    with _lock:
        _install(state, counts=not _process)
        _process = True
    compat.set_global(_STATE, state)
    in_place.ask(tune)


def disable() -> None:
    """Undoes `enable`: JAX is as it was. Programs that were compiled while it was on are not used any more.

    Example::

        jaxconv.enable()
        jaxconv.disable()
    """
    global _process
    compat.set_global(_STATE, _off)
    in_place.ask(False)
    with _lock:
        if _process:
            _process = False
            _uninstall()


@contextlib.contextmanager
def enabled(*, implementation: str | None = None, auto_meshes: bool = False, tune: bool = False) -> Iterator[None]:
    """`enable` for a with-block: for all that this thread traces and compiles in it. The innermost block decides.

    Example::

        with jaxconv.enabled():
            y = jax.jit(lambda x, w: jax.lax.conv(x, w, (1, 1), "SAME"))(jnp.ones((2, 4, 8, 8)), jnp.ones((4, 4, 3, 3)))

    Args and Raises are those of `enable`. With tune=False the block keeps the setting of the code around it. It is the
    thread's, as JAX's own contexts are: a block that awaits or yields also holds for what the thread runs meanwhile.
    """
    state = _state(implementation, auto_meshes)
    asked = in_place.new() if in_place.checked("enabled", tune) else None
    with _lock:
        _install(state)
    try:
        with _STATE(state), in_place.asking(asked):
            yield
    finally:
        with _lock:
            _uninstall()


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """A with-block whose convolutions are lax's own, for all that this thread traces and compiles in it.

    Example::

        with jaxconv.disabled():
            y = jax.jit(lambda x, w: jax.lax.conv(x, w, (1, 1), "SAME"))(jnp.ones((2, 4, 8, 8)), jnp.ones((4, 4, 3, 3)))
    """
    with _STATE(_off):
        yield


def report(*, clear: bool = False) -> Convolutions:
    """What became of the convolutions of the programs that were compiled with `enable` on, in this process.

    Example::

        jaxconv.enable()
        y = jax.jit(lambda x, w: jax.lax.conv(x, w, (1, 1), "SAME"))(jnp.ones((2, 4, 8, 8)), jnp.ones((4, 4, 3, 3)))
        print(jaxconv.report())
        print(len(jaxconv.report().taken), len(jaxconv.report().left))
        jaxconv.disable()

    Args:
      clear: forget all programs after this call.

    Returns:
      A list that prints as a table: form (fprop, dgrad, wgrad, integers, float8), problem, what it became (a native
      plan, or lax), why, where, and the count. `taken` and `left` are the convolutions that run on jaxconv's kernels
      and on lax. Counts are those in a program's text, so the body of a scan counts once. If `enable` is off, the table
      says so.
    """
    found = _record.read(clear)
    if not is_on():
        found.note = "enable is off, and programs that are compiled now are not counted: jaxconv.enable() turns it on"
    return found


def _state(implementation: Any, auto_meshes: Any) -> State:
    _problem.check_choice("enable", implementation, None, ())
    return State(implementation, _problem.flag("enable", "auto_meshes", auto_meshes))


def _install(state: State, counts: bool = True) -> None:
    """Under the lock."""
    global _users, _undo
    if _users == 0:
        rules = {platform: functools.partial(_lower, platform) for platform in primitives.PLATFORMS}
        _undo = compat.replace_lowering(lax.conv_general_dilated_p, rules)
    _users += counts
    if state.auto_meshes:  # splitting a call on a mesh takes its devices
        compat.needs_devices_to_lower(lax.conv_general_dilated_p)


def _uninstall() -> None:
    global _users, _undo
    _users -= 1
    if _users == 0:
        assert _undo is not None
        _undo()
        _undo = None


def from_environment(*, in_startup: bool = False) -> None:
    """`enable` if JAXCONV_ENABLE says so. Says what is wrong in a warning: the program is somebody else's.

    `in_startup`: JAX is starting a backend, perhaps in the middle of a program's compilation.
    """
    global _off
    value = os.environ.get("JAXCONV_ENABLE", "")
    if value not in ("", "0", "1") and not in_startup:  # importing jaxconv has warned
        warnings.warn(f"JAXCONV_ENABLE={value!r} is unknown, expected 0 or 1: ignored", stacklevel=2)
    if value != "1":
        return
    try:
        enable()
    except NotImplementedError as error:
        warnings.warn(f"JAXCONV_ENABLE=1: {error}", stacklevel=2)
    if in_startup and _off is None:
        # That program is kept under the key of None: after `disable` it must not be found.
        _off = "disabled"


# ----------------------------------------------------------------------------------------------------------------------
# The choice


@dataclasses.dataclass(frozen=True)
class Choice:
    form: forms.Form | None  # None: it has none
    plan: _plan.Plan | None  # None: lax's own lowering
    why: str


def choose(
    avals: tuple[Any, Any, Any],  # lhs, rhs, out
    params: Mapping[str, Any],
    state: State,
    device: _plan.Device,
) -> Choice:
    """What becomes of lax's convolution in a program that nobody partitions, or whose types say how it is split."""
    form = forms.read(*avals, params)
    if isinstance(form, str):
        return Choice(None, None, form)
    form = dataclasses.replace(form, problem=dataclasses.replace(form.problem, implementation=state.implementation))
    try:
        plan = _plan.plan(form.kernel.name, form.problem, device)
    except ValueError as error:  # "native" was asked for, and there is none
        return Choice(form, None, str(error))
    if plan.implementation != "native":
        return Choice(form, None, plan.reason)
    if form.form == "fprop" and (behind := _plan.fused_behind(form.problem, plan, device)) is not None:
        return Choice(form, None, behind)
    refusal = gathers(form, avals)
    return Choice(form, None, refusal) if refusal else Choice(form, plan, plan.reason)


def gathers(form: forms.Form, avals: tuple[Any, Any, Any]) -> str | None:
    """On a mesh with Explicit axes: why our call would move arrays between devices that lax's leaves where they are."""
    if sharding.explicit_mesh(avals) is None:
        return None
    lhs, rhs, out = avals
    try:
        jaxpr = jax.make_jaxpr(form.run)(lhs, rhs)
    except compat.ShardingTypeError as error:
        return f"jaxconv cannot say how its result is split over the mesh: {error}"
    # Of integers lax's call may have no other way to run.
    for equation in jaxpr.eqns if form.form != "integers" else ():
        if equation.primitive.name == "reshard" and equation.invars[0].aval != equation.outvars[0].aval:
            return f"jaxconv's call would gather {equation.invars[0].aval.str_short()} over the mesh"
    (made,) = jaxpr.out_avals
    return None if made == out else f"its result is {out.str_short()}, and that of jaxconv's call {made.str_short()}"


def describe(choice: Choice, avals: tuple[Any, Any, Any], where: str = "") -> Convolution:
    form, problem = "conv", " x ".join(f"{a.dtype.name}{list(a.shape)}" for a in avals[:2])
    if choice.form is not None:
        form, problem = choice.form.form, str(choice.form.problem)
    became = "lax" if choice.plan is None else str(choice.plan)
    return Convolution(form, problem, became, choice.why, (where,) if where else ())


def would(equations: Any, device: _plan.Device) -> Convolutions:
    """What enable does, or would do, with lax's convolutions among a jaxpr's equations."""
    state = _STATE.value if isinstance(_STATE.value, State) else State()
    found = Record()
    for equation in equations:
        if equation.primitive is lax.conv_general_dilated_p:
            avals = tuple(v.aval for v in (*equation.invars, *equation.outvars))
            if _converts(avals, device.platform, state):
                inner = jax.make_jaxpr(functools.partial(_converted, avals[2], equation.params))(*avals[:2])
                equation = next(e for e in inner.eqns if e.primitive is lax.conv_general_dilated_p)
                avals = tuple(v.aval for v in (*equation.invars, *equation.outvars))
            choice = choose(avals, equation.params, state, device)
            found.add(describe(choice, avals, str(equation.source_info.name_stack)))
    read = found.read()
    if device.platform == "cuda" and not is_on() and any(one.form == "integers" for one in read.taken):
        read.note = (
            "XLA cannot compile convolutions of integers for a GPU (\"Can't lower one or more integer convolutions to "
            'idioms supported by CuDNN"): jaxconv.enable(), before anything is compiled, makes them run'
        )
    return read


def _converts(avals: tuple[Any, Any, Any], platform: str, state: State) -> bool:
    """Whether a convolution of integers to floating-point numbers becomes one of the latter: XLA has none for GPUs."""
    return (platform == "cuda" or state.implementation == "native") and conv_integer.converts(*avals)


def _converted(out: Any, params: Mapping[str, Any], lhs: Any, rhs: Any) -> Any:
    return conv_integer.converted(lhs, rhs, dtype=out.dtype, **params)


def is_on() -> bool:
    return _undo is not None and isinstance(_STATE.value, State)


# ----------------------------------------------------------------------------------------------------------------------
# The lowering


def _lower(
    platform: str, of_lax: Callable[..., Any], ctx: mlir.LoweringRuleContext, lhs: Any, rhs: Any, **params: Any
) -> Any:
    """The lowering rule of lax's convolution on `platform`; `of_lax` is JAX's own."""
    state = _STATE.value
    if not isinstance(state, State) or primitives.means_lax():
        return of_lax(ctx, lhs, rhs, **params)
    avals = (*ctx.avals_in, *ctx.avals_out)
    if _converts(avals, platform, state):
        return mlir.lower_fun(functools.partial(_converted, avals[2], params), multiple_results=False)(ctx, lhs, rhs)
    refusal = _refusal(ctx, avals, state) or _unknown(ctx, platform)
    with primitives.timing_in(ctx):
        device = primitives.lowered_for(ctx, platform)
        choice = Choice(None, None, refusal) if refusal else choose(avals, params, state, device)
    if refusal:  # the report names its form nevertheless
        form = forms.read(*avals, params)
        choice = dataclasses.replace(choice, form=None if isinstance(form, str) else form)
    by_shard = choice.plan is None and not refusal and _split_wrongly(ctx, choice.form)
    if by_shard:
        choice = dataclasses.replace(choice, why=f"{choice.why}; each shard runs lax's: {SPLIT_WRONGLY}")
    products = platform == "cuda" and choice.plan is None and conv_integer.has_products(*avals, params)
    if products:
        choice = dataclasses.replace(choice, why=f"{choice.why}; {BY_PRODUCTS}")
    _record.add(describe(choice, avals, str(ctx.name_stack)))
    if products:
        program = functools.partial(conv_integer.by_products, avals[2], params)
        return mlir.lower_fun(program, multiple_results=False)(ctx, lhs, rhs)
    if choice.plan is None and not by_shard:
        with primitives.as_lax():  # complex numbers are real convolutions there
            return of_lax(ctx, lhs, rhs, **params)
    return mlir.lower_fun(choice.form.run, multiple_results=False)(ctx, lhs, rhs)


BY_PRODUCTS = "XLA computes its sums as matrix products, since it has no convolutions of integers for a GPU"
SPLIT_WRONGLY = "XLA's own split of a weight gradient with groups is as many times too large as an axis has devices"


def _split_wrongly(ctx: mlir.LoweringRuleContext, form: forms.Form | None) -> bool:
    """Whether XLA's partition of lax's own convolution would be wrong: our call says how it is split, whoever runs a
    shard. (JAX 0.10 to 0.12: a batch that one axis of an Auto mesh splits, where another axis splits nothing.)"""
    grouped = form is not None and form.form == "wgrad" and form.problem.groups > 1
    return grouped and compat.partitioning(ctx) == "auto"


def _refusal(ctx: mlir.LoweringRuleContext, avals: Any, state: State) -> str | None:
    """Why the program that is being lowered keeps lax's convolutions, whatever they are."""
    if compat.exported(ctx):
        return "the program is exported: whoever loads it would need jaxconv"
    if compat.computed_elsewhere(ctx):
        return "compute_on sends it to another device than the program"
    partitioning = compat.partitioning(ctx)
    mesh = sharding.explicit_mesh(avals)
    known = mesh is not None and all(kind != AxisType.Auto or mesh.shape[a] == 1 for a, kind in _kinds(mesh))
    if partitioning == "none" or known or (partitioning == "auto" and state.auto_meshes):
        return None
    return "XLA partitions the program over devices, and a lowering cannot see how"


def _unknown(ctx: mlir.LoweringRuleContext, platform: str) -> str | None:
    """Why there is no plan: JAX tells a lowering its device where splitting a call takes it."""
    if compat.device_of(ctx, platform) is not None or len(kinds := _plan.Device.kinds(platform)) < 2:
        return None
    return (
        f"there are devices of several kinds ({', '.join(kinds)}), and JAX tells a lowering for which one it is only "
        "with jaxconv.enable(auto_meshes=True)"
    )


def _kinds(mesh: Any) -> Iterator[tuple[str, AxisType]]:
    return zip(mesh.axis_names, mesh.axis_types, strict=True)


from_environment()

"""`jaxconv.tune`: times XLA and every native kernel for one function's problems on this device, and keeps the best.

    jaxconv.tune(train_step)(state, batch)

For exactly these problems, plans then use these times, and not jaxconv's own tables. `python -m jaxconv tune
module:function` does the same from a shell.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import math
import os
import pathlib
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxconv import _enable, _plan, _problem
from jaxconv._core import primitives
from jaxconv._core.types import OfArguments, P
from jaxconv._enable import forms
from jaxconv._ops import conv_shortcut
from jaxconv._ops.conv import conv_add, conv_kernel, fprop
from jaxconv._plan import in_place, measured, tuned
from jaxconv._plan.tuned import Results
from jaxconv._tools import candidates
from jaxconv._tools import timing as _timing
from jaxconv.accelerate import accelerate

__all__ = ["Results", "Tune", "Tuned", "Tuning"]  # `tune` is `jaxconv.tune`

# Ops whose choice is between calls of other kernels, or is made with another's: their parts are timed
_NOT_ALONE = (
    *("conv_add", "conv_dgrad_add", "conv_dgrad_sums", "conv_gradient", "conv_gradient_add", "conv_norm_gradient"),
    *("conv_pooled", "conv_shortcut"),
    *("conv_statistics", "conv_add_statistics"),
    *("conv_normalised", "conv_normalised_statistics", "conv_normalised_wgrad"),
    *("conv_integer", "conv_scaled"),
)
_LEAST_GAIN = 1.01  # of f's time: less is noise
_PROGRAMS = 7  # of f, at most, besides f as it is


@dataclasses.dataclass(frozen=True)
class Tuned:
    """One problem in a tuned function."""

    op: str  # "conv_dgrad"
    problem: Any
    count: int  # equal calls in the function
    before: str  # what the plan was: "xla", or a kernel with its tile
    best: str | None  # the fastest that was measured; None: nothing was
    xla_ms: float | None
    native_ms: Mapping[str, float]
    failed: Mapping[str, str]  # what could not be timed, and why
    kept: bool  # whether plans take `best` from now on
    note: str = ""


class Tuning(list[Tuned]):
    """The result of `tune`: a list of problems, each a `Tuned`, that prints as a table.

    Attributes:
      before_ms, after_ms: the function's own times; None where it was not timed.
      results: all results that hold from now on.
      path: the file that they were written to; None where they were not.
      interrupted: whether a KeyboardInterrupt ended it.
    """

    def __init__(
        self,
        rows: Sequence[Tuned],
        results: Results,
        file: pathlib.Path | None,
        before_ms: float | None = None,
        after_ms: float | None = None,
        interrupted: bool = False,
    ):
        super().__init__(rows)
        self.results, self.path, self.interrupted = results, file, interrupted
        self.before_ms, self.after_ms = before_ms, after_ms

    def __str__(self) -> str:
        if not self:
            return (
                "nothing to tune: the function has no jaxconv calls (jaxconv.explain(f) lists them). Tune "
                "jaxconv.accelerate(f), or f with jaxconv.enable on (in a shell: --way accelerate, --way enable)"
            )
        rows = [("calls", "op", "problem", "before", "ms", "best", "ms", "XLA's ms", "")]
        for r in self:
            times = {**r.native_ms, "xla": r.xla_ms}
            note = r.note or ("kept" if r.kept else "")
            note += "".join(f"; {name}: {why}" for name, why in r.failed.items())
            before, best = _ms(times.get(r.before)), _ms(times.get(r.best or ""))
            head = (str(r.count), r.op, str(r.problem), r.before, before)
            rows.append((*head, r.best or "-", best, _ms(r.xla_ms), note))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        if self.before_ms is not None and self.after_ms is not None:
            ratio = self.before_ms / self.after_ms if self.after_ms else 1.0
            lines.append(
                f"the function: {self.before_ms:.3f} ms before, {self.after_ms:.3f} ms after ({ratio:.2f} times)"
            )
        if self.interrupted:
            lines.append("interrupted: what was measured is kept, tune again to go on")
        return "\n".join(lines)


def _ms(ms: float | None) -> str:
    return "-" if ms is None else f"{ms:.4f}"


class Tune:
    """The function `tune`, with `applied`, `dumps`, `loads` and `path` as attributes.

    ::

        print(jaxconv.tune(train_step)(state, batch))
    """

    def __call__(
        self,
        f: Callable[P, Any],
        *,
        seconds: float = 120.0,
        verify: bool = True,
        again: bool = False,
        save: bool = True,
        progress: bool = True,
    ) -> OfArguments[P, Tuning]:
        """A function of f's arguments that times f's problems on this device, and remembers the fastest kernels.

            print(jaxconv.tune(train_step)(state, batch))

        First each call that jaxconv computes in f is timed: by XLA, and by each native kernel that can run it. Calls
        are found as by `jaxconv.explain`: in gradients, under vmap, through `accelerate`, and lax's own convolutions
        where `enable` is on. Inputs are random arrays of the call's shapes and dtypes, and are read from memory, not
        from a cache. Then f itself is compiled and timed, with and without the changes. Only changes that made f faster
        are kept: a kernel that is faster alone may be slower between neighbours, with which XLA would fuse.

        The choices that are kept hold for exactly these problems, on this kind of device, with these versions of jaxlib
        and jaxconv. They hold in this process from now on, in which functions under jit are compiled anew at their next
        call. They also hold in later processes, because they are written to `jaxconv.tune.path()`.
        JAXCONV_TUNING=FILE names another file. For each choice that changed `jaxconv.explain` then shows "tuned on
        this device". Nothing else in jaxconv times anything, unless it is asked to (`enable(tune=True)`,
        `accelerate(f, tune=True)`, JAXCONV_TUNE=1).

        Args:
          f: any JAX function, jitted or not. It is traced, and with `verify` compiled and run some hundred times. Its
            arguments are traced as by `jax.jit`, so bind static ones. Nothing is donated.
          seconds: roughly the most time for the problems, and then again for f. A compilation of f that is under way is
            finished. The problems that cost most come first; a later call goes on where this one stopped.
          verify: whether to time f itself. If not, the kernels that are fastest alone are kept.
          again: also time problems that were timed before with these versions.
          save: whether to write the results to the user's file; if not, they hold in this process.
          progress: whether to say on stderr what is timed, with a bar where tqdm is installed.

        Returns:
          A function of f's arguments (arrays, or `jax.ShapeDtypeStruct`s, which stand for arrays of ones) that returns
          a `Tuning`: a list of problems with their times that prints as a table. KeyboardInterrupt ends it early: times
          are kept for the next call, and choices that f has not confirmed do not hold.

        Raises:
          TypeError: if f is no function, or compiled already, or a switch is neither True nor False.
          ValueError: if seconds is not positive, or the default device has no native code; and any error of f itself.
        """
        _problem.check_function("tune", f)
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
            raise ValueError(f"tune: seconds={seconds!r}, expected a positive number")
        for name, value in (("verify", verify), ("again", again), ("save", save), ("progress", progress)):
            _problem.flag("tune", name, value)

        @functools.wraps(f, updated=())
        def tuning(*args: Any, **kwargs: Any) -> Tuning:
            with in_place.nothing_timed():  # but here
                return _tune(f, args, kwargs, float(seconds), verify, again, save, progress)

        return tuning

    def applied(self, results: Results | None) -> contextlib.AbstractContextManager[None]:
        """A context in which plans are made from `results` instead of the user's file; None stands for no results.

        It holds for all that this thread traces and compiles inside::

            with jaxconv.tune.applied(jaxconv.tune.loads(text)):
                step = jax.jit(train_step).lower(state, batch).compile()

        Programs compiled before stay as they are, and are used again outside.
        """
        if results is not None and not isinstance(results, Results):
            raise TypeError(f"tune.applied: expected what tune.loads returns, or None, got {type(results).__name__}")
        return tuned.applied(Results() if results is None else results)

    def dumps(self, results: Results | None = None) -> str:
        """`results` (None: those that hold now) as text (JSON), for another process or machine."""
        return tuned.dumps(tuned.active() if results is None else results)

    def loads(self, text: str) -> Results:
        """The results in a text that `dumps` or a file holds, for `applied`. ValueError if it is something else."""
        try:
            return tuned.loads(text)
        except ValueError as error:
            raise ValueError(f"tune.loads: {error}") from None

    def path(self) -> pathlib.Path:
        """The file of the user's results: JAXCONV_TUNING, or jaxconv/tuning.json in the user's data folder."""
        return tuned.path()


tune = Tune()


# ----------------------------------------------------------------------------------------------------------------------
# What is in a function


def _jobs(f: Callable[..., Any], args: Any, kwargs: Any, device: _plan.Device) -> list[candidates.Job]:
    """Every distinct (op, problem) that may be chosen for, as `explain` finds them."""
    jaxpr = jax.make_jaxpr(f)(*args, **kwargs)
    found: dict[tuple[str, str], candidates.Job] = {}

    def add(kernel: primitives.Kernel, problem: Any, avals: Sequence[Any]) -> None:
        if kernel.name in _NOT_ALONE or problem.algorithm is not None or problem.implementation is not None:
            return
        if any(not isinstance(extent, int) or extent == 0 for a in avals for extent in a.shape):
            return
        if (other := _plan.timed_as(kernel.name, problem, device)) is not problem:
            problem = other
            avals = [jax.ShapeDtypeStruct(*array) for array in kernel.operands(problem).values()]
        if _plan.disabled(kernel.name) or not candidates.worth_timing(kernel.name, problem, device):
            return
        key = kernel.name, tuned.key_of(problem)
        count = found[key].count + 1 if key in found else 1
        found[key] = candidates.Job(kernel, problem, tuple((a.shape, a.dtype.name) for a in avals), count)

    for equation in primitives.equations(jaxpr.jaxpr, device):
        avals = [v.aval for v in equation.invars]
        if equation.primitive in primitives.KERNELS:
            kernel, problem = primitives.KERNELS[equation.primitive], equation.params["problem"]
            if primitives.split_by_type(equation):
                continue
            if kernel is conv_add and _plan.plan("conv_add", problem, device).implementation == "native":
                # Planned with the convolution that else would be an equation of its own.
                kernel, problem, avals = conv_kernel if problem.bias else fprop, problem.affine(), avals[:-1]
            if kernel is conv_shortcut.kernel:  # two that else would be equations of their own
                x, w, *b, x2, w2 = avals
                add(conv_kernel if b else fprop, problem.conv.affine(), [x, w, *b])
                kernel, problem, avals = fprop, problem.shortcut, [x2, w2]
            add(kernel, problem, avals)
        elif equation.primitive is jax.lax.conv_general_dilated_p and _enable.is_on():
            lhs, rhs = avals
            form = forms.read(lhs, rhs, equation.outvars[0].aval, equation.params)
            if not isinstance(form, str) and not primitives.split_by_type(equation):
                given = {"lhs": lhs, "rhs": rhs}
                operands = [jax.eval_shape(into, given[name]) for name, into in form.operands.items()]
                add(form.kernel, form.problem, operands)
    return list(found.values())


def _saving(job: candidates.Job, plan: _plan.Plan) -> float | None:
    """Milliseconds that the best candidate is known or predicted to save f; None where nothing is known."""
    times = {c.name: c.ms for c in plan.candidates}
    now = times.get("xla" if plan.implementation == "xla" else plan.kernel)
    return None if now is None else job.count * max(0.0, now - min(times.values()))


# ----------------------------------------------------------------------------------------------------------------------
# The tuning


def _tune(
    f: Callable[..., Any],
    args: Any,
    kwargs: Any,
    seconds: float,
    verify: bool,
    again: bool,
    save: bool,
    progress: bool,
) -> Tuning:
    device = _plan.Device.default()
    if device.platform not in primitives.PLATFORMS:
        raise ValueError(f"tune: jaxconv has no native code for {device.platform}: there is nothing to choose from")
    missing = _plan.missing(device)
    if missing:
        raise ValueError(f"tune: {missing}: there is nothing to choose from")
    say = functools.partial(print, file=sys.stderr, flush=True) if progress else lambda *_: None
    base = tuned.active()
    jobs = _jobs(f, args, kwargs, device)
    plans = {job: _plan.plan(job.op, job.problem, device) for job in jobs}
    entries = {job: None if again else tuned.entry(job.op, job.problem, device) for job in jobs}
    todo = [job for job in jobs if entries[job] is None]
    savings = {job: _saving(job, plans[job]) for job in todo}
    todo.sort(key=lambda job: (-(savings[job] or 0.0), -job.count * job.bytes))
    say(f"tune: {len(jobs)} problems on {tuned.device_name(device)}, {len(todo)} to time, at most {seconds:g} s")
    known = [s for s in savings.values() if s is not None]
    if known:
        say(f"tune: predicted saving {sum(known):.3f} ms a call of the function ({len(known)} of {len(todo)} problems)")
    elif todo:
        say("tune: nothing is predicted for this device")
    failures: dict[candidates.Job, dict[str, str]] = {}
    interrupted = False
    deadline = time.monotonic() + seconds
    try:
        for i, job in enumerate(_shown(todo, progress)):
            left = deadline - time.monotonic()
            if left <= 0:
                say(f"tune: the time is up, {len(todo) - i} problems were not timed; tune again to go on")
                break
            ms, failures[job] = candidates.measure(job, device, left)
            if ms:
                entries[job] = _entry(job, device, ms)
    except KeyboardInterrupt:
        interrupted = True
        say("tune: interrupted")
    # Written before f is compiled, which may fail. What was chosen before stays chosen until f says otherwise.
    for job, entry in entries.items():
        old = tuned.entry(job.op, job.problem, device)
        if entry is not None and old is not None and old.choice in {"xla", *entry.native_ms}:
            entries[job] = dataclasses.replace(entry, choice=old.choice)
    timed = {job: entry for job, entry in entries.items() if entry is not None}
    file = _saved(timed.values())[1] if save and failures else None
    best = {job: _best(plans[job], entry) for job, entry in timed.items()}
    changes = {
        job: dataclasses.replace(timed[job], choice=choice)
        for job, choice in best.items()
        if choice != _named(plans[job])
    }
    before_ms = after_ms = None
    kept: Sequence[candidates.Job] = []
    if not verify and not interrupted:
        kept = list(changes)
    elif changes and not interrupted:
        say(f"tune: {len(changes)} choices would change; timing the function with and without them")
        try:
            kept, before_ms, after_ms = _confirmed(f, args, kwargs, base, changes, seconds, say)
        except KeyboardInterrupt:
            interrupted = True
            say("tune: interrupted")
    timed |= {job: changes[job] for job in kept}
    results = base.updated(timed.values())
    if save and timed:
        results, file = _saved(timed.values(), results)
        say(f"tune: {len(kept)} choices changed; {len(timed)} of the function's problems are in {file or 'no file'}")
    tuned.activate(results)
    rows = []
    for job in jobs:
        now, fails = _named(plans[job]), failures.get(job, {})
        row = functools.partial(Tuned, job.op, job.problem, job.count, now)
        if job not in timed:
            rows.append(row(None, None, {}, fails, False, "not timed"))
            continue
        note = "the function was not faster with it"
        if job in kept:
            note = "kept"
        elif best[job] == now:
            note = "as it was"
        elif interrupted:
            note = "not confirmed"
        rows.append(row(best[job], timed[job].xla_ms, timed[job].native_ms, fails, job in kept, note))
    return Tuning(rows, results, file, before_ms, after_ms, interrupted)


def _saved(entries: Iterable[tuned.Entry], otherwise: Results | None = None) -> tuple[Any, pathlib.Path | None]:
    """(what the user's file now holds, its path), or (otherwise, None) where it cannot be written."""
    file = tuned.path()
    try:
        return tuned.save(entries, file), file
    except OSError as error:
        warnings.warn(f"jaxconv: the tuning results cannot be written and hold in this process: {error}", stacklevel=4)
        return otherwise, None


def _shown(jobs: Sequence[candidates.Job], progress: bool) -> Iterator[candidates.Job]:
    """The jobs, with a bar where tqdm is installed, else a line each."""
    if not progress:
        yield from jobs
        return
    try:
        from tqdm import tqdm
    except ImportError:
        for i, job in enumerate(jobs):
            print(f"tune: {i + 1}/{len(jobs)} {job.op} {job.problem}", file=sys.stderr, flush=True)
            yield job
        return
    with tqdm(jobs, desc="tune", unit="problem", file=sys.stderr) as bar:
        for job in bar:
            bar.set_postfix_str(f"{job.op} {job.problem}"[:60])
            yield job


def _entry(job: candidates.Job, device: _plan.Device, ms: dict[str, float]) -> tuned.Entry:
    native = {name: round(value, 6) for name, value in ms.items() if name != "xla"}
    xla = round(ms["xla"], 6) if "xla" in ms else None
    jaxlib, version = tuned.versions()
    return tuned.Entry(
        op=job.op,
        key=tuned.key_of(job.problem),
        problem=str(job.problem),
        device=tuned.device_name(device),
        jaxlib=jaxlib,
        jaxconv=version,
        xla_ms=xla,
        native_ms=native,
        choice=None,
        driver=tuned.driver() if device.platform == "cuda" else "",
        timer=_timing.timer(),
        when=tuned.now(),
    )


def _named(plan: _plan.Plan) -> str:
    return plan.spec if plan.implementation == "native" else "xla"


def _best(plan: _plan.Plan, entry: tuned.Entry) -> str:
    """What is to run: what ran, unless something was faster than it by more than two runs differ."""
    times = {**entry.native_ms, **({} if entry.xla_ms is None else {"xla": entry.xla_ms})}
    now = _named(plan)
    if not times:
        return now
    fastest = min(times, key=times.__getitem__)
    if now in times and times[fastest] * measured.MARGIN >= times[now]:
        return now
    return fastest


def _confirmed(
    f: Callable[..., Any],
    args: Any,
    kwargs: Any,
    base: Results,
    changes: Mapping[candidates.Job, tuned.Entry],
    seconds: float,
    say: Callable[[str], None],
) -> tuple[list[candidates.Job], float | None, float | None]:
    """(the changes that make f faster, f's ms before, after): all of them, else halves of those that do not."""
    args, kwargs = jax.tree.map(filled, (args, kwargs))
    deadline = time.monotonic() + seconds

    def program(entries: Sequence[tuned.Entry]) -> _timing.Program:
        with tuned.applied(base.updated(entries)):
            # Not f's own jit: what it donates would be gone at the second call.
            compiled = jax.jit(lambda *a, **k: f(*a, **k)).lower(*args, **kwargs).compile()
        return _timing.Program(lambda: compiled(*args, **kwargs), [()])

    kept: list[candidates.Job] = []
    before = after = None
    now = program([])
    now.once()
    queue, compiled = [list(changes)], 0
    while queue and compiled < _PROGRAMS and (compiled == 0 or time.monotonic() < deadline):
        some = queue.pop(0)
        other = program([changes[job] for job in (*kept, *some)])
        other.once()
        compiled += 1
        ms = _compare(now, other, min(5.0, seconds / 4))
        before = ms[0] if before is None else before
        after = ms[0] if after is None else after
        if ms[0] > _LEAST_GAIN * ms[1]:
            kept, now, after = [*kept, *some], other, after * ms[1] / ms[0]
        elif len(some) > 1:
            queue += [some[: len(some) // 2], some[len(some) // 2 :]]
        say(f"tune: the function takes {ms[0]:.3f} ms, with {len(some)} changed choices {ms[1]:.3f} ms")
    if queue:
        say(f"tune: {sum(map(len, queue))} changes were not confirmed: the time is up, or f was compiled often enough")
    return kept, before, after


def _compare(now: _timing.Program, other: _timing.Program, seconds: float) -> tuple[float, float]:
    """Milliseconds of two programs of f."""
    timings = _timing.measure({"now": now, "other": other}, seconds=seconds)
    return timings["now"].median_ms, timings["other"].median_ms


def filled(leaf: Any) -> Any:
    return jnp.ones(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf


# ----------------------------------------------------------------------------------------------------------------------
# The command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        metavar="module:function",
        help="a function without arguments that returns a tuple: the function f to tune, and its arguments",
    )
    add_ways(parser)
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="at most, for the problems and again for f (%(default)g)"
    )
    parser.add_argument("--no-verify", action="store_true", help="keep the fastest kernels without timing f")
    parser.add_argument("--again", action="store_true", help="also time problems that were timed before")
    parser.add_argument("--output", metavar="FILE", help="write to FILE (JAXCONV_TUNING=FILE reads it)")


def main(args: argparse.Namespace) -> int:
    """`python -m jaxconv tune`: 0, or 2 where the target is not as expected, with what is wrong on stderr."""
    if args.output:
        os.environ["JAXCONV_TUNING"] = args.output
    try:
        if not 0 < args.seconds < math.inf:
            raise Refused(f"--seconds={args.seconds:g} must be positive and finite")
        f, *arguments = target_of(args.target)
        f, on = ways(f, arguments, args.grad)[args.way]
        with _enable.enabled() if on else contextlib.nullcontext():
            tuning = tune(f, seconds=args.seconds, verify=not args.no_verify, again=args.again)
            found = tuning(*arguments)
    except Refused as error:
        print(f"python -m jaxconv tune: {error}", file=sys.stderr)
        return 2
    print(found)
    return 130 if found.interrupted else 0


def add_ways(parser: argparse.ArgumentParser) -> None:
    """--way and --grad, of commands that look at a function in one way."""
    says = "f unchanged, f with jaxconv.enable on, or jaxconv.accelerate(f) (%(default)s)"
    parser.add_argument("--way", choices=WAYS, default="plain", help=says)
    says = "f is a loss: take its value and gradient in its first argument, accelerate inside"
    parser.add_argument(
        "--grad", action="store_true", help=f"{says}; of a tuple, all but the first element is auxiliary"
    )


WAYS = ("plain", "enable", "accelerate")


def ways(f: Callable[..., Any], args: Sequence[Any], gradient: bool) -> dict[str, tuple[Callable[..., Any], bool]]:
    """(function, whether enable is on) by the name of the way; with `gradient` f is a loss."""
    has_aux = gradient and isinstance(jax.eval_shape(f, *args), tuple)

    def whole(g: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(g)
        def loss(*args: Any) -> tuple[Any, Any]:
            first, *rest = g(*args)
            return first, tuple(rest)

        return jax.value_and_grad(loss if has_aux else g, has_aux=has_aux) if gradient else g

    functions = whole(f), whole(f), whole(accelerate(f))
    return dict(zip(WAYS, zip(functions, (False, True, False), strict=True), strict=True))


class Refused(Exception):
    """A command line that cannot be followed."""


def target_of(text: str) -> tuple[Any, ...]:
    module, colon, name = text.partition(":")
    if not (module and colon and name):
        raise Refused(f"{text!r}: expected module:function")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        target: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module's own trouble
        raise Refused(f"there is no module {module!r} here") from None
    for part in name.split("."):
        if not hasattr(target, part):
            raise Refused(f"module {module!r} has no {name!r}")
        target = getattr(target, part)
    made = target() if callable(target) else target
    if not isinstance(made, tuple) or not made or not callable(made[0]):
        got = (
            f"a tuple that starts with {type(made[0]).__name__}"
            if isinstance(made, tuple) and made
            else type(made).__name__
        )
        raise Refused(f"{text} returned {got}, expected a tuple (f, *arguments of f)")
    try:
        _problem.check_function(text, made[0])
    except TypeError as error:
        raise Refused(str(error)) from None
    return made

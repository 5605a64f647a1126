"""Choices made where they run, when asked: a problem that nobody knows is timed while its program compiles.

JAXCONV_TUNE=1, `jaxconv.enable(tune=True)` and `jaxconv.accelerate(f, tune=True)` ask for it. `choose` comes here for a
problem that is not forced and not tuned. Where the device's own table has nothing near it, its kernels and XLA are
timed there and then, as XLA's autotuner times its own; what wins is an entry like those of `jaxconv.tune`, in the
user's file. What is timed and how is `jaxconv._tools.in_place`'s: plans know no operations of JAX's.

Whether it is asked for is part of the key of JAX's caches. What was found is not: see `tuned`. Whatever goes wrong is a
line on stderr, and the choice is the one that would have been made without.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
import os
import pathlib
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax

from jaxconv._core import compat
from jaxconv._plan import measured, tuned
from jaxconv._plan.plan import Device, Plan
from jaxconv._problem import BatchNormProblem, ConvProblem, PoolProblem

T = TypeVar("T")

SECONDS_A_PROBLEM = 10.0
SECONDS_IN_ALL = 300.0  # of one asking: of a process with JAXCONV_TUNE=1, of an enable, of an accelerated function
# Half the distance between the quartiles of a program's times, relative to the median, from which on somebody else uses
# the device: nothing is kept. Alone a kernel of 3 us has up to 0.05.
MOST_NOISE = 0.2
SECONDS_TO_STOP = 10.0  # of an interrupted timing: a compilation that is under way cannot be ended

PLATFORMS = ("cuda",)  # on a CPU the choice is a few rules

# A problem of these ops may be timed. What is not here is made of others' choices, or was measured against two calls.
_OPS = (
    *("conv", "conv_fprop", "conv_dgrad", "conv_wgrad"),
    *("dense", "matmul", "dense_gradient", "dense_gated", "dense_gated_gradient"),
    *("batchnorm_train", "batchnorm_infer", "batchnorm_backward", "groupnorm", "groupnorm_backward"),
    *("max_pool", "max_pool_backward", "squeeze_excite", "squeeze_excite_backward"),
)
# What goes back through what: both are chosen together, by the sum of their times
_BACKWARD = {
    "batchnorm_train": "batchnorm_backward",
    "groupnorm": "groupnorm_backward",
    "max_pool": "max_pool_backward",
    "squeeze_excite": "squeeze_excite_backward",
}
_FORWARD = {back: forward for forward, back in _BACKWARD.items()}


@dataclasses.dataclass
class Budget:
    seconds: float = SECONDS_IN_ALL  # that are left


@dataclasses.dataclass(frozen=True)
class Asked:
    """Somebody asked. All are equal: programs differ by whether somebody did."""

    budget: Budget = dataclasses.field(default_factory=Budget, compare=False)


@dataclasses.dataclass(frozen=True)
class Times:
    """What `jaxconv._tools.in_place` measured of one problem."""

    ms: Mapping[str, float]  # by "xla" and `Plan.spec`
    noise: Mapping[str, float]  # of those: half the distance between the quartiles, relative to the median
    failed: Mapping[str, str]
    timer: str
    pass_ms: float = 0.0  # to write a convolution's result once


class NotTimed(Exception):
    """Why a problem has no times, as the end of a sentence."""


class Stopped(BaseException):
    """Raised in the thread that times, where it is to end."""


# (op, problem, device, kernels to time or None for all, seconds, what raises Stopped) -> times
Timer = Callable[[str, Any, Device, Sequence[str] | None, float, Callable[[], None]], Times]
_timer: Timer | None = None


def times_with(timer: Timer) -> None:
    global _timer
    _timer = timer


# ----------------------------------------------------------------------------------------------------------------------
# Who asks


def _of_environment() -> Asked | None:
    value = os.environ.get("JAXCONV_TUNE", "")
    if value not in ("", "0", "1"):
        warnings.warn(f"JAXCONV_TUNE={value!r} is unknown, expected 0 or 1: ignored", stacklevel=2)
    return Asked() if value == "1" else None


_KNOWN = "known"  # a context in which what was found holds, and nothing is timed
_default = _of_environment()
# An Asked, _KNOWN, or None: nobody asked
_STATE = jax.make_user_context(default_value=_default)
if _default is not None:
    compat.note_profiles()


def checked(name: str, tune: Any) -> bool:
    if not isinstance(tune, bool):
        raise TypeError(f"{name}: tune={tune!r}, expected True or False")
    return tune


def new() -> Asked:
    """An asking with a budget of its own."""
    compat.note_profiles()
    return Asked()


def current() -> Any:
    """The state, for keys."""
    return _STATE.value


def asked() -> Asked | None:
    value = _STATE.value
    return value if isinstance(value, Asked) else None


def ask(tune: bool) -> None:
    """From now on, in all threads; without `tune` as the environment says."""
    compat.set_global(_STATE, new() if tune else _default)


def asking(one: Asked | None) -> contextlib.AbstractContextManager[Any]:
    """A context in which `one` asks, but where nothing is to be timed; None leaves things as they are."""
    return contextlib.nullcontext() if one is None or _STATE.value == _KNOWN else _STATE(one)


def nothing_timed() -> contextlib.AbstractContextManager[Any]:
    """A context in which plans know what was timed, and nothing more is timed: for who only looks at a program."""
    return _STATE(_KNOWN)


# ----------------------------------------------------------------------------------------------------------------------
# Whether a problem is timed

_LOCK = threading.Lock()  # one problem at a time: two would disturb each other
_tried: set[tuple[str, str, str]] = set()  # (device, op, key)
_said: set[str] = set()
_read: tuple[pathlib.Path, int, tuned.Results] | None = None  # the file as it was last looked at, and when it changed


def forget() -> None:
    """As at the start of a process."""
    global _read
    _tried.clear()
    _said.clear()
    _read = None
    compat.set_global(_STATE, _default)


def say(text: str, once: bool = False) -> None:
    if once and text in _said:
        return
    _said.add(text)
    print(f"jaxconv: {text}", file=sys.stderr, flush=True)


def entry(op: str, problem: Any, device: Device, plans: Callable[[], Sequence[Plan]]) -> tuned.Entry | None:
    """The problem's entry, timed now if it has none and somebody asked; or None. `plans`: of the kernels to time."""
    one = asked()
    if one is None or tuned.alone() or not _may_be_timed(op, problem, device):
        return None
    of = tuned.device_name(device), op, tuned.key_of(problem)
    with _LOCK:
        if of in _tried:
            return tuned.entry(op, problem, device)
        kernels = plans()
        if not kernels or _measured_near(op, problem, device, kernels):
            _tried.add(of)
            return None
        why = _refusal(device)
        if why is not None:
            if why:
                say(f"nothing is timed: {why}", once=True)
            return None
        if _by_others(op, problem, device) is None:
            if one.budget.seconds <= 0:
                text = f"the {SECONDS_IN_ALL:g} s for timing are over: other problems stay as predicted"
                say(f"{text}; a later process goes on", once=True)
                return None
            _time(one.budget, op, problem, device, plans)
            _tried.update((of[0], name, tuned.key_of(p)) for name, p in _together(op, problem))
        _tried.add(of)
        return tuned.entry(op, problem, device)


def _may_be_timed(op: str, problem: Any, device: Device) -> bool:
    """Whether its kind of problem is worth timing alone: not where XLA's neighbours decide (`Planner.overruled`)."""
    if op not in _OPS or device.platform not in PLATFORMS or not device.kind or device.partitioned:
        return False
    if problem.implementation is not None or problem.algorithm is not None:
        return False
    if isinstance(problem, BatchNormProblem):
        bare = problem.activation.name == "none" and not problem.residual
        part = problem.masked or problem.count is not None or problem.dz
        return not bare and not part and problem.inner == 1 and (op != "batchnorm_backward" or problem.want_dx)
    return not isinstance(problem, PoolProblem) or problem.save


def _measured_near(op: str, problem: Any, device: Device, plans: Sequence[Plan]) -> bool:
    """Whether the device's own table decides: a kernel won near the problem, or, where no model would speak for other
    kernels, one was measured there."""
    if device.kind not in measured.tables():
        return False
    for plan in plans:
        one = measured.nearest(op, problem, device, plan.kernel)
        if one is None or one.sister or one.apart > measured.FAR:
            continue
        if one.wins(plan.kernel) or not isinstance(problem, ConvProblem):
            return True
    return False


def _refusal(device: Device) -> str | None:
    """Why nothing can be timed here; empty where that needs no word."""
    if _timer is None:
        return ""
    if jax.process_count() > 1:
        if os.environ.get("JAXCONV_TUNING"):
            return ""  # the file is what all of them choose by
        return (
            f"this program has {jax.process_count()} processes, which must choose alike. Tune in one process, and give "
            "its file to all (JAXCONV_TUNING)"
        )
    if here(device) is None:
        return f"programs are compiled for {device.kind}, which this machine does not have"
    if compat.profiled():
        return "jax.profiler takes or took a trace in this process, and kernels cannot be timed beside it"
    return None


def here(device: Device) -> Any:
    """JAX's device of that kind in this process, or None."""
    try:
        devices = jax.local_devices(backend=device.platform)
    except RuntimeError:
        return None
    return next((d for d in devices if device.platform == "cpu" or d.device_kind == device.kind), None)


def _by_others(op: str, problem: Any, device: Device) -> tuned.Entry | None:
    """What another process has written to the user's file since this one started."""
    global _read
    file = tuned.path()
    try:
        changed = file.stat().st_mtime_ns
    except OSError:
        return None
    if _read is None or _read[:2] != (file, changed):
        _read = file, changed, tuned.read(file, named=False)  # results of other devices alone are no mistake
    one = _read[2].on(tuned.device_name(device)).get((op, tuned.key_of(problem)))
    if one is not None:
        tuned.found(one)
    return one


# ----------------------------------------------------------------------------------------------------------------------
# Timing


def _together(op: str, problem: Any) -> list[tuple[str, Any]]:
    """The ops and problems that are chosen with this one, itself included, those that run first first."""
    if op in _FORWARD:
        forward = problem
        if isinstance(problem, BatchNormProblem):
            forward = dataclasses.replace(problem, want_dx=True, want_dresidual=False)
        elif hasattr(problem, "want_dx"):
            forward = dataclasses.replace(problem, want_dx=True)
        return [(_FORWARD[op], forward), (op, problem)]
    if op in _BACKWARD and getattr(problem, "save", True):
        back = problem
        if isinstance(problem, BatchNormProblem):
            back = dataclasses.replace(problem, want_dresidual=problem.residual)
        return [(op, problem), (_BACKWARD[op], back)]
    return [(op, problem)]


def _time(budget: Budget, op: str, problem: Any, device: Device, plans: Callable[[], Sequence[Plan]]) -> None:
    """Times a problem and those that are chosen with it; keeps what was found."""
    assert _timer is not None
    name = tuned.device_name(device)
    text = f"at most {SECONDS_A_PROBLEM:g} s a problem and {SECONDS_IN_ALL:g} s in all; kept in {tuned.path()}"
    say(f"problems are timed on {name} while programs compile, {text}", once=True)
    kernels = list(dict.fromkeys(plan.kernel for plan in plans()))
    known: list[tuned.Entry] = []
    times: list[tuple[str, Any, Times]] = []
    begin = time.monotonic()
    try:
        for one_op, one in _together(op, problem):
            found = tuned.entry(one_op, one, device) or (_by_others(one_op, one, device) if one_op != op else None)
            if found is not None:
                known.append(found)
                continue
            seconds = min(SECONDS_A_PROBLEM, budget.seconds)
            timer, arguments = _timer, (one_op, one, device, kernels if one_op == op else None, seconds)
            measured_now = _in_thread(lambda stop, timer=timer, arguments=arguments: timer(*arguments, stop))
            times.append((one_op, one, _confirmed(measured_now)))
    except NotTimed as why:
        say(f"{op} {problem} is not timed: {why}")
        return
    except Exception as error:  # whatever a kernel, XLA or the device says: the program compiles without
        first = (str(error).strip().splitlines() or [""])[0][:160]
        say(f"{op} {problem} is not timed: {type(error).__name__}: {first}")
        return
    except BaseException:
        say("interrupted: what was timed before is kept")
        raise
    finally:
        budget.seconds -= time.monotonic() - begin
    entries = _chosen(times, known, device) if times else []
    _keep(entries)
    for one_entry in entries:
        say(_line(one_entry))


def _confirmed(times: Times) -> Times:
    """The same times, where they are good enough to choose by."""
    xla = times.ms.get("xla")
    native = [name for name in times.ms if name != "xla"]
    for why in times.failed.values():
        if any(word in why.lower() for word in ("resource_exhausted", "out of memory")):
            raise NotTimed(f"the device's memory is full ({why[:80]})")
    if xla is None and (why := times.failed.get("xla", "")) in ("", "the time was up"):
        raise NotTimed("the time was up before XLA was timed")
    if not native:
        raise NotTimed("no kernel could be timed: " + "; ".join(f"{n}: {why}" for n, why in times.failed.items()))
    fastest = min(native, key=times.ms.__getitem__)
    noise = max(times.noise.get(n, 0.0) for n in ("xla", fastest))
    if noise > MOST_NOISE:
        raise NotTimed(f"times differ by {100 * noise:.0f} %, somebody else uses the device")
    return times


def _chosen(times: Sequence[tuple[str, Any, Times]], known: Sequence[tuned.Entry], device: Device) -> list[tuned.Entry]:
    """Entries of what was timed now. Several problems that are chosen together are all native, or all XLA's."""
    fastest = [min((n for n in t.ms if n != "xla"), key=t.ms.__getitem__) for _, _, t in times]
    if known:
        native = all(one.choice not in (None, "xla") for one in known)
    else:
        noise = max(t.noise.get("xla", 0.0) + t.noise.get(n, 0.0) for (_, _, t), n in zip(times, fastest, strict=True))
        xla = sum(t.ms.get("xla", math.inf) for _, _, t in times)
        ours = sum(t.ms[n] for (_, _, t), n in zip(times, fastest, strict=True))
        op, problem, _ = times[0]
        least = measured.LEAST_MS if op.startswith(("dense", "matmul")) else 0.0
        least = measured.LEAST_CONV_MS if isinstance(problem, ConvProblem) else least
        native = xla > max(measured.MARGIN, 1 + noise) * ours and xla - ours >= least
    jaxlib, version = tuned.versions()
    return [
        tuned.Entry(
            op=op,
            key=tuned.key_of(problem),
            problem=str(problem),
            device=tuned.device_name(device),
            jaxlib=jaxlib,
            jaxconv=version,
            xla_ms=round(t.ms["xla"], 6) if "xla" in t.ms else None,
            native_ms={n: round(ms, 6) for n, ms in t.ms.items() if n != "xla"},
            choice=name if native else "xla",
            driver=tuned.driver() if device.platform == "cuda" else "",
            timer=t.timer,
            when=tuned.now(),
            alone=True,
            pass_ms=round(t.pass_ms, 6),
        )
        for (op, problem, t), name in zip(times, fastest, strict=True)
    ]


def _keep(entries: Sequence[tuned.Entry]) -> None:
    for one in entries:
        tuned.found(one)
    if not entries:
        return
    try:
        tuned.save(entries, tuned.path())
    except OSError as error:
        say(f"times cannot be written to the file, and hold in this process only: {error}", once=True)


def _line(one: tuned.Entry) -> str:
    name = min(one.native_ms, key=one.native_ms.__getitem__)
    xla = "XLA could not run it" if one.xla_ms is None else f"XLA {one.xla_ms:.4f} ms"
    became = "XLA's" if one.choice == "xla" else "taken"
    return f"{one.op} {one.problem}: {name} {one.native_ms[name]:.4f} ms, {xla}: {became}"


def _in_thread(work: Callable[[Callable[[], None]], T]) -> T:
    """`work`'s result. It runs in a thread of its own: here something is traced or lowered, perhaps inside a mesh, with
    contexts and settings of a thread, none of which are its. It is given what raises Stopped once nobody waits."""
    stopped, done = threading.Event(), threading.Event()
    results: list[T] = []
    errors: list[BaseException] = []

    def stop() -> None:
        if stopped.is_set():
            raise Stopped

    def run() -> None:
        try:
            with _STATE(None):
                results.append(work(stop))
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=contextvars.Context().run, args=(run,), name="jaxconv tunes", daemon=True)
    thread.start()
    try:
        done.wait()
    except BaseException:
        stopped.set()
        done.wait(SECONDS_TO_STOP)
        raise
    if errors:
        raise errors[0]
    return results[0]


# ----------------------------------------------------------------------------------------------------------------------
# A convolution whose neighbours nobody sees


def fused_behind(one: tuned.Entry) -> str | None:
    """Why a convolution that was timed in place stays XLA's where XLA may take what stands behind it into its own: the
    kernel does not win by a pass over the result. None where it does. (`conv.fused_behind`: of measured ones.)"""
    if not one.alone or one.xla_ms is None or one.choice in (None, "xla"):
        return None
    ours = one.native_ms[one.choice] + one.pass_ms
    if one.xla_ms > ours:
        return None
    speed = f"{one.ratio:.2f} times as fast as XLA when it was timed on this device"
    return f"{one.choice} was {speed}, too little to pay for a pass that XLA would fuse into its convolution"

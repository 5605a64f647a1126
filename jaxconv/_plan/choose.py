"""The tiers of a choice: forced, tuned by the user, measured near here, predicted, else XLA. Each says why.

A plan is data. It is made when a call is lowered, printed by `explain`, and carried out by native code, which confirms
but does not choose. With `implementation=None` a problem goes to XLA unless native code was measured to be faster, or
is predicted to be by more than the prediction's own error, or the planner takes it nevertheless. Nothing is timed
unasked: the same versions and files give the same plan. Where somebody asks, what is in no tier above the prediction is
timed and is tuned then (in_place).

What an op adds to that is its planner's (`planner.py`). One whose choice follows from other ops' asks here for theirs.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterator
from typing import Any, TypeVar

from jaxconv._core import native
from jaxconv._plan import in_place, measured, model, tuned
from jaxconv._plan.plan import Candidate, Device, Nearest, Plan, Problem
from jaxconv._plan.planner import NOTHING, PARTITIONED, PLANNERS, XLA_ASKED, Planner, asked, disabled_text

P = TypeVar("P")


def plan(op: str, problem: Any, device: Device) -> Plan:
    """The plan for `op` on `device`; ValueError where a forced choice cannot run, with the reason."""
    planner = PLANNERS[op]
    known, key = _KNOWN.get(), (op, problem, device)
    if known is None:
        return planner.composed(problem, device) or _by_tiers(planner, problem, device)
    if key not in known:
        known[key] = planner.composed(problem, device) or _by_tiers(planner, problem, device)
    return known[key]


@contextlib.contextmanager
def remembered() -> Iterator[None]:
    """Inside, what was planned is not planned again: for whoever asks often while nothing changes."""
    token = _KNOWN.set({})
    try:
        yield
    finally:
        _KNOWN.reset(token)


_KNOWN: contextvars.ContextVar[dict[Any, Plan] | None] = contextvars.ContextVar("jaxconv_known_plans", default=None)


def timed_as(op: str, problem: P, device: Device) -> P:
    """The problem whose times decide for this one."""
    return PLANNERS[op].timed_as(problem, device)


def _by_tiers(planner: Planner, problem: Problem, device: Device) -> Plan:
    forced = problem.algorithm is not None or problem.implementation == "native"
    if problem.implementation == "xla":
        return planner.instead(XLA_ASKED)
    if planner.disabled(problem):
        return planner.instead(disabled_text())
    if planner.empty(problem):
        return planner.instead(NOTHING)
    why = refusal(planner.op, problem, device)
    if why:
        return planner.cannot(problem, why) if forced else planner.instead(why)
    if problem.algorithm is not None:
        return _forced(planner, problem.algorithm, problem, device)
    if device.partitioned and not forced:
        return planner.instead(PARTITIONED)
    return (
        _tuned(planner, problem, device)
        or planner.exception(problem, device, forced)
        or (_best_native(planner, problem, device) if forced else fastest(planner.op, problem, device))
    )


# ----------------------------------------------------------------------------------------------------------------------
# Forced


def _forced(planner: Planner, algorithm: str, problem: Problem, device: Device) -> Plan:
    own = planner.made(algorithm, problem, device)
    if isinstance(own, str):
        return planner.cannot(problem, own, algorithm)
    return dataclasses.replace(own, reason=f"{asked(problem)} was asked for")


def _best_native(planner: Planner, problem: Problem, device: Device) -> Plan:
    """The kernel that was measured, or is predicted, to be the fastest; where nothing is known the first wanted."""
    weighs = device.platform == "cuda" and planner.forced_by_times
    best, candidates, why = _weighed(planner, problem, device) if weighs else (None, (), "")
    if best is None:
        return _forced(planner, planner.first(problem, device), problem, device)
    return dataclasses.replace(best.plan, reason=f"{asked(problem)} was asked for; {why}", candidates=candidates)


# ----------------------------------------------------------------------------------------------------------------------
# Tuned


def _tuned(planner: Planner, problem: Problem, device: Device) -> Plan | None:
    """What was tuned for exactly this problem, if anything, or is timed now because somebody asks: the choice, or the
    fastest kernel if one is forced."""
    entry = tuned.entry(planner.op, problem, device) if planner.tunable else None
    if entry is None and planner.tunable:
        entry = in_place.entry(planner.op, problem, device, lambda: _safe(planner, problem, device))
    if entry is None:
        return None
    forced = problem.implementation == "native"
    choice = min(entry.native_ms, key=entry.native_ms.__getitem__, default=None) if forced else entry.choice
    if choice is None:
        return None
    times = entry.native_ms if entry.xla_ms is None else {**entry.native_ms, "xla": entry.xla_ms}
    candidates = tuple(Candidate(name, ms, "tuned on this device") for name, ms in times.items())
    where = "tuned on this device" + (f" on {entry.when} UTC" if entry.when else "")
    if choice == "xla":
        least = entry.xla_ms is not None and entry.xla_ms <= min(entry.native_ms.values(), default=math.inf)
        why = "XLA is the fastest" if least else "no kernel is faster than XLA by more than the noise"
        return dataclasses.replace(planner.instead(f"{where}: {why}", candidates), ms=entry.xla_ms)
    own = planner.made(choice, problem, device)
    if isinstance(own, str):  # a file that somebody edited
        return None
    ratio = None if entry.xla_ms is None else entry.xla_ms / max(entry.native_ms[choice], 1e-9)
    reason = "XLA could not run it" if ratio is None else f"{ratio:.2f} times faster than XLA"
    if ratio is not None and ratio < 1:
        reason = f"{ratio:.2f} of XLA's speed"
    if forced:
        reason += "; implementation='native' was asked for"
    return dataclasses.replace(own, reason=f"{where}: {reason}", candidates=candidates, ms=entry.native_ms[choice])


# ----------------------------------------------------------------------------------------------------------------------
# Measured, predicted, else XLA


def fastest(op: str, problem: Problem, device: Device) -> Plan:
    """The native plan that beats XLA, or what is planned instead."""
    planner = PLANNERS[op]
    if device.platform == "cpu":
        algorithm, reason = planner.on_cpu(problem)
        own = planner.made(algorithm, problem, device) if algorithm else None
        return dataclasses.replace(own, reason=reason) if isinstance(own, Plan) else planner.instead(reason)
    plans = every(op, problem, device)
    safe = [own for own in plans if is_safe(planner, own.kernel, problem)]
    best, candidates, why = _weighed(planner, problem, device, safe)
    other = planner.overruled(problem, device, best and best.plan)
    if other is not None:
        return dataclasses.replace(other, candidates=candidates)
    if best is None:
        return planner.instead(why + _unsafe([own.kernel for own in plans if own not in safe]), candidates)
    nearest = Nearest(best.plan, best.xla_ms, best.ratio, best.deviation)
    nevertheless = None if best.wins else planner.nevertheless(problem, nearest)
    if best.wins or nevertheless is not None:
        reason = why if nevertheless is None else f"{why}; {nevertheless}"
        return dataclasses.replace(best.plan, reason=reason, candidates=candidates, ms=nearest.ms)
    own = planner.instead(why + _unsafe([own.kernel for own in plans if own not in safe]), candidates)
    return dataclasses.replace(own, ms=nearest.xla_ms, nearest=nearest)


def _safe(planner: Planner, problem: Problem, device: Device) -> list[Plan]:
    return [own for own in every(planner.op, problem, device) if is_safe(planner, own.kernel, problem)]


def is_safe(planner: Planner, kernel: str, problem: Problem) -> bool:
    """Without kernels that would spread infinities, where these are part of life."""
    return problem.dtype != "float16" or not planner.spreads(kernel, problem)


def _unmeasured(device: Device) -> str:
    return f"no native kernel was measured near this problem on {device.kind or 'the device'}; jaxconv.tune can do it"


def _unsafe(kernels: list[str]) -> str:
    """What is said of kernels that would spread infinities."""
    if not kernels:
        return ""
    names = " and ".join(kernels)
    return (
        f"; {names} would turn an infinity in x, which float16 reaches early, into NaN in other outputs: only with "
        "implementation='native'"
    )


# How far a measured ratio is off, in the logarithm: of a case that is near, and of one that is too different to decide
OFF, FAR_OFF = 0.1, 0.5


@dataclasses.dataclass(frozen=True)
class _Weighed:
    """A kernel's plan and how it compares with XLA."""

    plan: Plan
    xla_ms: float  # XLA's time for the problem
    ratio: float  # XLA's time over the kernel's, measured or predicted
    deviation: float  # of its logarithm
    wins: bool
    why: str


def _weighed(
    planner: Planner, problem: Problem, device: Device, plans: list[Plan] | None = None
) -> tuple[_Weighed | None, tuple[Candidate, ...], str]:
    """(the kernel to take, or the one that comes nearest; all that is known of the others; why).

    What was measured for a kernel at this problem or near it speaks first; where no kernel wins by that, the model
    speaks for the others: together with a measurement of other channels, or alone. `plans`: of the kernels, where these
    are not all that can run it.
    """

    def xla_ms(m: measured.Measurement) -> float:
        return m.xla_ms * measured.work(m, planner.op, problem)

    known: list[tuple[Plan, measured.Measurement]] = []
    others: list[tuple[Plan, measured.Measurement | None]] = []
    for own in every(planner.op, problem, device) if plans is None else plans:
        if not planner.speaks(own.kernel, problem):
            continue
        near = measured.nearest(planner.op, problem, device, own.kernel)
        if near is None:
            others.append((own, None))
        else:
            known.append((own, near))
    # Where a kernel was measured at these very channels, and did not win, no other that was measured elsewhere does.
    most = min(measured.FAR, min([m.apart for _, m in known], default=0.0) + 0.01)
    close = [(own, m) for own, m in known if m.apart <= most]
    others = [*((own, m) for own, m in known if m.apart > most), *others]
    weighed = [_by_measurement(own, m, xla_ms(m)) for own, m in close]
    candidates = [c for own, m in close for c in _measured_candidates(own, m)]
    if not any(w.wins for w in weighed) and others:
        predicted = model.predict(planner.op, problem, device, [own for own, _ in others])
        xla = predicted.get("xla")
        for own, m in others:
            kernel = predicted.get(own.spec)
            if m is not None:
                candidates += _measured_candidates(own, m)
            if xla is not None and kernel is not None:
                weighed.append(_by_prediction(own, xla.ms, kernel, m))
                source = f"predicted, its speed relative to XLA within {_percent(kernel.deviation)}"
                candidates.append(Candidate(own.kernel, kernel.ms, source))
            elif m is not None and xla is None:
                weighed.append(_by_measurement(own, m, xla_ms(m)))
            elif m is not None:
                # The model knows XLA but hardly this kernel: what is far does not speak alone.
                ratio = m.ratio(own.kernel)
                why = f"{own.kernel} was {ratio:.2f} times as fast as XLA {m.where}, too different to decide"
                weighed.append(_Weighed(own, xla_ms(m), ratio, FAR_OFF, False, why))
        if xla is not None:
            candidates.append(Candidate("xla", xla.ms, "predicted"))
    if not weighed:
        return None, (), _unmeasured(device)
    best = max(weighed, key=lambda w: (w.wins, w.ratio))
    return best, tuple(dict.fromkeys(candidates)), best.why


def _measured_candidates(own: Plan, m: measured.Measurement) -> tuple[Candidate, Candidate]:
    kernel = Candidate(own.kernel, m.native_ms[own.kernel], f"measured {m.of_kernels}")
    return kernel, Candidate("xla", m.xla_ms, f"measured {m.where}")


def _by_measurement(own: Plan, m: measured.Measurement, xla_ms: float) -> _Weighed:
    ratio, wins = m.ratio(own.kernel), m.wins(own.kernel)
    other = "two calls" if m.against_two else "XLA"
    if wins:
        return _Weighed(own, xla_ms, ratio, OFF, wins, f"{ratio:.2f} times faster than {other} {m.where}")
    speed = "the speed of two calls" if m.against_two else "XLA's speed"
    return _Weighed(own, xla_ms, ratio, OFF, wins, f"{own.kernel} reached {ratio:.2f} of {speed} {m.where}")


def _by_prediction(own: Plan, xla_ms: float, kernel: model.Prediction, m: measured.Measurement | None) -> _Weighed:
    """By the model alone, or by it and a measurement that is rather far (of both, the geometric mean)."""
    ratio = xla_ms / kernel.ms
    why = f"predicted to be {ratio:.2f} times faster than XLA ({kernel.ms:.3f} and {xla_ms:.3f} ms)"
    short = f"{own.kernel} is predicted at {ratio:.2f} times XLA's speed"
    if m is not None:
        other = m.ratio(own.kernel)
        also = f", and was {other:.2f} times as fast {m.where}"
        ratio, why, short = math.sqrt(ratio * other), why + also, short + also
        kernel = dataclasses.replace(kernel, deviation=kernel.deviation / 2)
    sure = model.sure(ratio, kernel.deviation)
    if not sure:
        why = short + (", which is not sure enough" if ratio > 1 else "")
    return _Weighed(own, xla_ms, ratio, kernel.deviation, sure, why)


def _percent(deviation: float) -> str:
    return f"{100 * math.expm1(deviation):.0f} %"


# ----------------------------------------------------------------------------------------------------------------------
# Which kernels can run


def missing(device: Device) -> str | None:
    """Why no native code runs on the device, or None."""
    why = native.missing(device.platform)
    capability = device.compute_capability
    if why or device.platform != "cuda" or capability is None:
        return why
    if capability < (8, 0):
        return f"the CUDA kernels need compute capability 8.0, {device.kind} has {capability}"
    if not native.runs_on(capability):
        return f"the CUDA module holds no code for {device.kind}: it was built for other architectures (see info())"
    return None


def refusal(op: str, problem: Any, device: Device) -> str | None:
    """Why no native kernel runs `op` of the problem on the device, or None."""
    return missing(device) or PLANNERS[op].no_kernels(problem, device.platform)


def made(op: str, algorithm: str, problem: Problem, device: Device) -> Plan | str:
    """The plan for `op` by the family or kernel that `algorithm` names, or the sentence that says why there is none."""
    return PLANNERS[op].made(algorithm, problem, device)


def supports(op: str, algorithm: str, problem: Problem, device: Device) -> str | None:
    """None if the family or kernel can run `op` of `problem` on `device`, else a sentence."""
    plan = made(op, algorithm, problem, device)
    return None if isinstance(plan, Plan) else plan


def every(op: str, problem: Problem, device: Device) -> list[Plan]:
    """A plan for each native kernel that can run the problem."""
    planner = PLANNERS[op]
    return [] if planner.no_kernels(problem, device.platform) else list(planner.every(problem, device))


def tiles(op: str, problem: Problem, device: Device) -> list[Plan]:
    """A plan for each native kernel and tile that can run the problem, of a kernel those first that it wants most."""
    planner = PLANNERS[op]
    return [] if planner.no_kernels(problem, device.platform) else list(planner.tiles(problem, device))


def natively(op: str, problem: P) -> P:
    """A convolution of a few rows, by a native kernel where this process's GPU has one and nobody asked for another.

    Any of them takes microseconds for a few rows. Of cuDNN's, XLA chose one that took 41 ms for the wgrad of 2 planes
    of 256 x 256 pixels and 32 channels on an H200, and nobody measures such problems.
    """
    p: Any = problem
    device = Device.default()
    if p.implementation or p.algorithm or device.platform != "cuda":
        return problem
    known = missing(device) is None and every(op, p, device)
    return dataclasses.replace(p, implementation="native") if known else problem

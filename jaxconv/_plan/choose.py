"""The tiers of a choice: forced, tuned by the user, measured near here, predicted, else XLA. Each says why.

A plan is data. It is made when a call is lowered, printed by `explain`, and carried out by native code, which confirms
but does not choose. With `implementation=None` a problem goes to XLA unless native code was measured to be faster, or
is predicted to be by more than the prediction's own error. Nothing is timed unasked: the same versions and files give
the same plan. Where somebody asks, what is in no tier above the prediction is timed and is tuned then (in_place).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from typing import Any

from jaxconv import _native
from jaxconv._plan import (
    batchnorm,
    conv,
    conv_integer,
    dense,
    domain,
    groupnorm,
    in_place,
    measured,
    model,
    pool,
    squeeze_excite,
    stem,
    tuned,
)
from jaxconv._plan.plan import Candidate, Device, Plan, Problem, itemsize, known
from jaxconv._problem import (
    BATCHNORM_ALGORITHMS,
    GROUPNORM_ALGORITHMS,
    POOL_ALGORITHMS,
    SQUEEZE_EXCITE_ALGORITHMS,
    BatchNormConvProblem,
    BatchNormProblem,
    ConvBatchNormProblem,
    ConvProblem,
    DenseProblem,
    GroupNormProblem,
    IntegerConvProblem,
    NormalisedConvProblem,
    PoolProblem,
    SqueezeExciteProblem,
)

# Bytes of an array from which on a batch-norm's backward pass reads memory: below, what dgrad's epilogue would save are
# reads of caches. An H200's L2 cache has 50 MiB.
LEAST_OF_SUMS = 64 << 20

# op -> the group that JAXCONV_DISABLE names
OPS = {
    "conv": "conv",
    "conv_add": "conv",
    "conv_statistics": "conv",
    "conv_fprop": "conv",
    "conv_integer": "conv",
    "conv_dgrad": "conv",
    "conv_dgrad_add": "conv",
    "conv_dgrad_sums": "conv",
    "conv_wgrad": "conv",
    "conv_normalised": "conv",
    "conv_normalised_wgrad": "conv",
    "conv_normalised_gradient": "conv",
    "conv_normalised_dx": "conv",
    "dense": "dense",
    "dense_gradient": "dense",
    "matmul": "dense",
    "batchnorm_train": "batchnorm",
    "batchnorm_infer": "batchnorm",
    "batchnorm_signs": "batchnorm",
    "batchnorm_backward": "batchnorm",
    "batchnorm_backward_add": "batchnorm",
    "batchnorm_dx": "batchnorm",
    "batchnorm_moments": "batchnorm",
    "batchnorm_shortcut_backward": "batchnorm",
    "max_pool": "pool",
    "max_pool_backward": "pool",
    "groupnorm": "groupnorm",
    "groupnorm_backward": "groupnorm",
    "squeeze_excite": "squeeze_excite",
    "squeeze_excite_backward": "squeeze_excite",
}


def disabled(op: str, rows: bool = False) -> bool:
    """Whether JAXCONV_DISABLE (conv, dense, batchnorm, groupnorm, layernorm, pool, squeeze_excite, several with commas,
    or all) names the op. A layer-norm, the ops of a group-norm with `rows`, is both."""
    names = {name.strip() for name in os.environ.get("JAXCONV_DISABLE", "").split(",")}
    return bool(names & {OPS[op], op, "all", *["layernorm"] * rows})


def plan(op: str, problem: Any, device: Device) -> Plan:
    """The plan for `op` on `device`; ValueError where a forced choice cannot run, with the reason."""
    if op == "conv_batchnorm":
        return _plan_conv_batchnorm(problem, device)
    if op == "batchnorm_conv":
        return _plan_batchnorm_conv(problem, device)
    if op == "batchnorm_conv_backward":
        return _plan_batchnorm_conv_backward(problem, device)
    if op in conv.NORMALISED:
        return _plan_normalised(op, problem, device)
    if op == "batchnorm_shortcut":
        return _plan_shortcut(problem, device)
    if op == "batchnorm_signs":
        return _plan_signs(problem, device)
    if op == "batchnorm_backward_add":
        return _plan_backward_add(problem, device)
    if op == "conv_integer":
        return _plan_conv_integer(problem, device)
    if op == "conv_add":
        return _plan_conv_add(problem, device)
    if op == "conv_dgrad_add":
        return _plan_dgrad_add(problem, device)
    if op == "conv_dgrad_sums":
        return _plan_dgrad_sums(problem, device)
    if op == "dense_gradient":
        return _plan_dense_gradient(problem, device)
    forced = problem.algorithm is not None or problem.implementation == "native"
    if problem.implementation == "xla":
        return Plan("xla", "implementation='xla' was asked for")
    if disabled(op, isinstance(problem, GroupNormProblem) and problem.rows):
        return Plan("xla", f"JAXCONV_DISABLE={os.environ['JAXCONV_DISABLE']}")
    if _empty(problem):
        return Plan("xla", "there is nothing to compute")
    refusal = _refusal(problem, device)
    if refusal:
        if forced:
            raise ValueError(f"{problem.name}: {_asked(problem)} cannot run: {refusal}")
        return Plan("xla", refusal)
    if problem.algorithm is not None:
        return _forced(op, problem.algorithm, problem, device, f"algorithm='{problem.algorithm}' was asked for")
    if device.partitioned and not forced:
        return Plan("xla", "XLA splits this program over devices; for a call of ours it would gather the arrays")
    own = _tuned(op, problem, device)
    if own is not None:
        return own
    if isinstance(problem, BatchNormProblem) and batchnorm.one_walk_of(op, problem):
        return _plan_one_walk(op, problem, device)
    if op == "conv_statistics" and not forced:
        return _statistics_or_a_read(problem, device)
    return _best_native(op, problem, device) if forced else _fastest(op, problem, device)


def _tuned(op: str, problem: Problem, device: Device) -> Plan | None:
    """What was tuned for exactly this problem, if anything, or is timed now because somebody asks: the choice, or the
    fastest kernel if one is forced."""
    entry = tuned.entry(op, problem, device)
    if entry is None:
        entry = in_place.entry(op, problem, device, lambda: _safe(op, problem, every(op, problem, device)))
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
        fastest = entry.xla_ms is not None and entry.xla_ms <= min(entry.native_ms.values(), default=math.inf)
        why = "XLA is the fastest" if fastest else "nothing is faster than XLA by more than times differ"
        return Plan("xla", f"{where}: {why}", candidates=candidates)
    plan = made(op, choice, problem, device)
    if isinstance(plan, str):  # a file that somebody edited
        return None
    ratio = None if entry.xla_ms is None else entry.xla_ms / max(entry.native_ms[choice], 1e-9)
    reason = "XLA could not run it" if ratio is None else f"{ratio:.2f} times faster than XLA"
    if ratio is not None and ratio < 1:
        reason = f"{ratio:.2f} of XLA's speed"
    if forced:
        reason += "; implementation='native' was asked for"
    return dataclasses.replace(plan, reason=f"{where}: {reason}", candidates=candidates)


def _best_native(op: str, problem: Problem, device: Device) -> Plan:
    """The kernel that was measured, or is predicted, to be the fastest; where nothing is known the ladder's first."""
    asked = "implementation='native' was asked for"
    weighs = device.platform == "cuda" and not isinstance(problem, GroupNormProblem)
    best, candidates, why = _weighed(op, problem, device) if weighs else (None, (), "")
    if best is not None:
        return dataclasses.replace(best.plan, reason=f"{asked}; {why}", candidates=candidates)
    return _forced(op, _ladder(op, problem, device), problem, device, asked)


def _plan_one_walk(op: str, problem: BatchNormProblem, device: Device) -> Plan:
    """A batch-norm's statistics, its backward's sums or its dx alone: native where the whole is, which was measured."""
    whole = batchnorm.one_walk_of(op, problem)
    found = plan(whole, dataclasses.replace(problem, want_dx=True, count=None, dz=False), device)
    if found.implementation != "native":
        return found
    reason = f"one walk of a {whole}, which would be native here: {found.reason}"
    return _forced(op, "two_read", problem, device, reason)


def _plan_signs(problem: BatchNormProblem, device: Device) -> Plan:
    """An inference that keeps its result's signs: native where the inference is, which was measured."""
    infer = plan("batchnorm_infer", problem, device)
    found = infer if infer.implementation != "native" else made("batchnorm_signs", "two_read", problem, device)
    if isinstance(found, Plan) and found.implementation == "native":
        return dataclasses.replace(found, reason=f"the inference alone would be native here: {infer.reason}")
    why = found if isinstance(found, str) else infer.reason
    return Plan("calls", f"an inference, then a pass for its signs: {why}", "two")


def _plan_backward_add(problem: BatchNormProblem, device: Device) -> Plan:
    """A backward pass that adds to dx: two_read's, where it is the backward pass's kernel. A block or a team, which
    reads its tensors once, spares as much as the pass that the add is."""
    if problem.implementation == "native" and problem.algorithm is None and _refusal(problem, device) is None:
        forced = made("batchnorm_backward_add", "two_read", problem, device)
        if isinstance(forced, Plan):
            return dataclasses.replace(forced, reason=f"{_asked(problem)} was asked for")
    alone = plan("batchnorm_backward", problem, device)
    two_read = (
        alone.implementation == "native" and alone.kernel == "two_read" and not disabled("batchnorm_backward_add")
    )
    found = made("batchnorm_backward_add", "two_read", problem, device) if two_read else alone.reason
    if isinstance(found, Plan):
        return dataclasses.replace(found, reason=f"{alone.reason}; c is added on its way", candidates=alone.candidates)
    return Plan("calls", f"a backward pass, then an add: {found}", "two", candidates=alone.candidates)


def _forced(op: str, algorithm: str, problem: Problem, device: Device, reason: str) -> Plan:
    plan = made(op, algorithm, problem, device)
    if isinstance(plan, str):
        raise ValueError(f"{problem.name}: {_asked(problem)} cannot run {op} of {problem}: {plan}")
    return dataclasses.replace(plan, reason=reason)


def _plan_conv_batchnorm(problem: ConvBatchNormProblem, device: Device) -> Plan:
    """One read of the convolution's result, where its statistics leave the convolution with it, or two calls."""

    def two(why: str) -> Plan:
        return Plan("calls", f"a convolution, then a batch-norm: {why}", "two")

    p = problem.conv
    if p.implementation == "xla":
        return two("implementation='xla' was asked for")
    if disabled("conv_statistics") or disabled("batchnorm_train"):
        return two(f"JAXCONV_DISABLE={os.environ['JAXCONV_DISABLE']}")
    if _empty(p):
        return two("there is nothing to compute")
    refusal = _refusal(p, device)
    if refusal or device.partitioned:
        return two(refusal or "XLA partitions the program over devices, and cannot be told how the two are split")
    if p.algorithm is None and p.implementation != "native":
        # Without what follows a normalisation it is XLA's, and the statistics a read of their own.
        alone = problem.norm.activation.name == "none" and not problem.norm.residual
        found = (_statistics_or_a_read if alone else functools.partial(_fastest, "conv_statistics"))(p, device)
        return Plan("calls", found.reason, "statistics") if found.implementation == "native" else two(found.reason)
    algorithm = p.algorithm or _ladder("conv_statistics", p, device)
    unsupported = supports("conv_statistics", algorithm, p, device)
    if unsupported:
        return two(f"no statistics from {algorithm}: {unsupported}")
    forced = f"algorithm='{algorithm}'" if p.algorithm else "implementation='native'"
    return Plan("calls", f"{forced} was asked for", "statistics")


def _statistics_or_a_read(p: ConvProblem, device: Device) -> Plan:
    """fprop with the statistics of its result, or fprop and a read of that.

    What was measured beside it are two calls of which the batch-norm may read its input once, where it stays on the
    device's multiprocessors; statistics alone take a pass more than what such a batch-norm takes without them.
    """
    found = _fastest("conv_statistics", p, device)
    near = measured.nearest("conv_statistics", p, device, "sm90/statistics")
    if found.implementation == "native" or near is None or near.apart(p) > measured.FAR:
        return found
    own = made("conv_statistics", "sm90/statistics", p, device)
    ratio = (near.xla_ms + _pass_over_y(near, p, device)) / near.native_ms["sm90/statistics"]
    if isinstance(own, str) or ratio <= (measured.SISTER_MARGIN if near.sister else measured.MARGIN):
        return found
    reason = f"{ratio:.2f} times faster than a convolution and a read of its result {near.where}"
    return dataclasses.replace(own, reason=reason, candidates=found.candidates)


def _plan_normalised(op: str, p: NormalisedConvProblem, device: Device) -> Plan:
    """A convolution (its weight gradient) that normalises x where it reads it, or two calls: the batch-norm and the
    convolution, each with a plan of its own."""

    def two(why: str, candidates: tuple[Candidate, ...] = ()) -> Plan:
        return Plan("calls", f"a batch-norm, then a convolution: {why}", "two", candidates=candidates)

    if p.implementation == "xla":
        return two("implementation='xla' was asked for")
    if disabled(op) or disabled("batchnorm_infer"):
        return two(f"JAXCONV_DISABLE={os.environ['JAXCONV_DISABLE']}")
    if _empty(p):
        return two("there is nothing to compute")
    if refusal := _refusal(p, device):
        return two(refusal)
    if p.algorithm is None and p.implementation != "native":
        if device.partitioned:
            return two("XLA splits this program over devices; for a call of ours it would gather the arrays")
        found = _fastest(op, p, device)
        return found if found.implementation == "native" else two(found.reason, found.candidates)
    algorithm = p.algorithm or _ladder(op, p, device)
    made_of = made(op, algorithm, p, device)
    if isinstance(made_of, str):
        return two(f"{algorithm} cannot normalise what it reads: {made_of}")
    forced = f"algorithm='{algorithm}'" if p.algorithm else "implementation='native'"
    return dataclasses.replace(made_of, reason=f"{forced} was asked for")


def _plan_batchnorm_conv(p: BatchNormConvProblem, device: Device) -> Plan:
    """ "normalised", or "two" calls; "statistics" in front where these leave the convolution before with its result."""
    found = _plan_normalised("conv_normalised", p.normalised, device)
    if found.implementation != "native":
        return found
    if disabled("batchnorm_train"):
        return Plan("calls", f"JAXCONV_DISABLE={os.environ['JAXCONV_DISABLE']}", "two")
    before = p.pair is not None and _plan_conv_batchnorm(p.pair, device).kernel == "statistics"
    if not before and p.conv.implementation is None and p.conv.algorithm is None:
        # x is read once more for its statistics. A batch-norm that keeps x on the device reads it once in all.
        train = plan("batchnorm_train", p.norm, device)
        known = measured.nearest("conv_normalised", p.normalised, device, found.kernel)
        if known is not None and train.kernel.startswith("resident"):
            saved = known.xla_ms - known.native_ms[found.kernel]
            back = measured.nearest("conv_normalised_gradient", p.normalised, device, found.kernel)
            if back is not None and back.wins(found.kernel):
                saved += back.xla_ms - back.native_ms[found.kernel]
            if saved <= math.prod(p.conv.stride) * _pass_over_y(known, p.conv, device):
                why = f"{train.kernel} reads x once for its statistics and its normalisation, which saves as much"
                return Plan("calls", f"a batch-norm, then a convolution: {why}", "two", candidates=found.candidates)
    reason = f"the convolution normalises what it reads: {found.reason}"
    return Plan("calls", reason, "statistics, normalised" if before else "normalised", candidates=found.candidates)


def _plan_batchnorm_conv_backward(p: BatchNormConvProblem, device: Device) -> Plan:
    """ "normalised": two kernels that read x and dy and no gradient between them; or "two" calls' backward passes."""
    found = _plan_normalised("conv_normalised_gradient", p.normalised, device)
    if found.implementation != "native":
        return found
    if disabled("batchnorm_backward"):
        return Plan("calls", f"JAXCONV_DISABLE={os.environ['JAXCONV_DISABLE']}", "two")
    reason = f"the gradient between the two is made where it is read: {found.reason}"
    return Plan("calls", reason, "normalised", candidates=found.candidates)


def _plan_shortcut(p: BatchNormProblem, device: Device) -> Plan:
    """ "joined": XLA's one pass forward and a kernel's two walks back; or "two" batch-norms."""
    op = "batchnorm_shortcut_backward"
    found = plan(op, p, device)
    if found.implementation == "native":
        reason = f"one pass forward and two backward do both batch-norms: {found.reason}"
        return Plan("calls", reason, "joined", candidates=found.candidates)
    refused = None if _refusal(p, device) else supports(op, "two_read", p, device)
    return Plan("calls", f"two batch-norms: {refused or found.reason}", "two", candidates=found.candidates)


def _plan_conv_add(p: ConvProblem, device: Device) -> Plan:
    """A convolution that adds its residual on its way, or two calls: the convolution has a plan of its own then."""

    def two(why: str) -> Plan:
        return Plan("calls", f"a convolution, then an add: {why}", "two")

    op = "conv" if p.bias else "conv_fprop"
    alone = plan(op, p.affine(), device)
    if alone.implementation == "native" and disabled("conv_add"):
        return two(f"JAXCONV_DISABLE={os.environ['JAXCONV_DISABLE']}")
    if alone.implementation != "native":
        # Whoever chose XLA: only where times did, may they say that its convolution and its add take longer.
        free = p.algorithm is None and p.implementation is None and not (disabled("conv_add") or disabled(op))
        free = free and device.platform == "cuda" and not device.partitioned and not _empty(p)
        free = free and _refusal(p.affine(), device) is None and tuned.entry(op, p.affine(), device) is None
        found = _adds_instead_of_xla(p, device) if free else None
        return found or two(alone.reason)
    adds, reason = made("conv_add", alone.spec, p, device), alone.reason
    if isinstance(adds, str) and p.algorithm is not None:
        adds = made("conv_add", p.algorithm, p, device)
    elif isinstance(adds, str):
        adds, reason = _other_that_adds(alone, adds, p, device)
    if isinstance(adds, str):
        if (why := _xla_adds_faster(alone, p, device)) is not None:
            return Plan("xla", why, candidates=alone.candidates)
        return two(f"the convolution runs on {alone.kernel}, and {adds}: {reason}")
    return dataclasses.replace(adds, reason=f"{reason}; the residual is added on its way", candidates=alone.candidates)


def _pass_over_y(found: measured.Measurement, p: ConvProblem, device: Device) -> float:
    """Milliseconds to read or write y of the convolution that was measured, at the rate at which memory copies."""
    pixels, _, group_k, groups = found.coordinates
    rates = model.numbers(device) or model.NUMBERS["H200"]
    return 2.0 ** (pixels + group_k + groups) * itemsize(p) / rates.bandwidth


def _adds_instead_of_xla(p: ConvProblem, device: Device) -> Plan | None:
    """The kernel that adds on its way and is faster than XLA's convolution and its add, by times of both without it."""
    best, least, reason = None, 0.0, ""
    for adds in _safe("conv", p, every("conv_add", p, device)):
        found = measured.nearest("conv_fprop", p, device, adds.kernel)
        if found is None or found.apart(p) > measured.FAR:
            continue
        one = _pass_over_y(found, p, device)
        # A 1x1 filter's convolution is a product to XLA, and the add a pass of its own. Others read c on their way.
        # A pass of one image is not worth its 1.4 to 1.9 us: 11 launches fewer made a frozen ResNet-50 .354 ms of .339.
        behind = 3 * one if math.prod(p.filter) == 1 else one
        ours, xla = found.native_ms[adds.kernel] + one, found.xla_ms + behind
        margin = measured.SISTER_MARGIN if found.sister else measured.MARGIN
        if xla > margin * ours and xla - ours > measured.LEAST_CONV_MS and xla / ours > least:
            best, least = adds, xla / ours
            ratio = f"{least:.2f} times as fast as XLA's convolution and add"
            reason = f"{adds.kernel} with the add is {ratio} {found.where}"
    return best and dataclasses.replace(best, reason=f"{reason}; the residual is added on its way")


def _other_that_adds(alone: Plan, refusal: str, p: ConvProblem, device: Device) -> tuple[Plan | str, str]:
    """(plan, reason) of a kernel that adds on its way and is faster than `alone` with a pass behind it, by the times of
    both where they were measured; else (why there is none, the reason of `alone`)."""
    found = measured.nearest("conv_fprop", p, device, alone.kernel)
    if found is None:
        return refusal, alone.reason
    one = _pass_over_y(found, p, device)
    best, least = None, found.native_ms[alone.kernel] + 3 * one
    for other in every("conv_add", p, device):
        if found.native_ms.get(other.kernel, math.inf) + one < least:
            best, least = other, found.native_ms[other.kernel] + one
    if best is None:
        return refusal, alone.reason
    ratio = (found.native_ms[alone.kernel] + 3 * one) / least
    return best, f"{alone.reason}; with the add {best.kernel} would be {ratio:.2f} times as fast as it {found.where}"


def _xla_adds_faster(alone: Plan, p: ConvProblem, device: Device) -> str | None:
    """Why XLA's convolution, which adds on its way where its filter is more than 1x1, beats `alone` and a pass behind
    it; None where it does not, or where nothing near was measured."""
    found = measured.nearest("conv_fprop", p, device, alone.kernel)
    free = p.algorithm is None and p.implementation is None and math.prod(p.filter) > 1
    if found is None or not free or tuned.entry("conv" if p.bias else "conv_fprop", p.affine(), device) is not None:
        return None
    one = _pass_over_y(found, p, device)
    ratio = (found.native_ms[alone.kernel] + 3 * one) / (found.xla_ms + one)
    if ratio < 1:
        return None
    speed = f"{ratio:.2f} times as fast as {alone.kernel} and an add {found.where}"
    return f"XLA's convolution adds on its way, and is {speed}"


def _plan_conv_integer(p: IntegerConvProblem, device: Device) -> Plan:
    """On a GPU ours: XLA has none there. Elsewhere XLA's, which is exact."""
    forced = p.implementation == "native" or p.algorithm is not None
    if p.implementation == "xla":
        return Plan("xla", "implementation='xla' was asked for")
    if disabled("conv_integer"):
        return Plan("xla", f"JAXCONV_DISABLE={os.environ['JAXCONV_DISABLE']}")
    if p.empty:
        return Plan("xla", "there is nothing to compute")
    if device.platform != "cuda" and not forced:
        return Plan("xla", "XLA's own convolutions of integers are exact, and faster")
    found = missing(device) or conv_integer.made(p.algorithm or conv_integer.wanted(p, device), p, device)
    if isinstance(found, Plan):
        reason = f"{_asked(p)} was asked for" if forced else "XLA compiles none of integers for a GPU"
        return dataclasses.replace(found, reason=reason)
    if forced:
        raise ValueError(f"{p.name}: {_asked(p)} cannot run {p}: {found}")
    return Plan("xla", found)


def fused_behind(p: ConvProblem, plan: Plan, device: Device) -> str | None:
    """Why a convolution whose neighbours nobody sees stays XLA's; None where `plan`, a kernel's, is taken all the same.

    XLA takes what stands behind its own convolution into it (a bias, a residual, an activation, a conversion), unless
    it is a 1x1, which is a matrix product to XLA. Behind a kernel of ours that is a pass of its own, or joins another
    one. So the kernel must win by a pass over y at the rate at which memory copies: that is what it costs on average
    where every second convolution has a residual behind it. Where nothing near was measured the plan stands.
    """
    free = device.platform == "cuda" and p.implementation is None and math.prod(p.filter) > 1
    found = measured.nearest("conv_fprop", p, device, plan.kernel) if free else None
    own = tuned.entry("conv_fprop", p, device)
    if own is not None and p.implementation is None and math.prod(p.filter) > 1:
        return in_place.fused_behind(own)
    if found is None or own is not None:
        return None
    ours = found.native_ms[plan.kernel] + _pass_over_y(found, p, device)
    if found.xla_ms > ours:
        return None
    speed = f"{found.ratio(plan.kernel):.2f} times as fast {found.where}"
    return f"{plan.kernel} was {speed}, which does not pay for a pass that XLA would take into its own convolution"


def _plan_dgrad_add(p: ConvProblem, device: Device) -> Plan:
    """A dgrad that adds on its way, or two calls: the dgrad has a plan of its own then."""

    def two(why: str) -> Plan:
        return Plan("calls", f"a dgrad, then an add: {why}", "two")

    bare = plan("conv_dgrad", p, device)
    if p.implementation == "xla" or disabled("conv_dgrad_add") or _empty(p):
        return two(bare.reason)
    if device.platform == "cpu":
        forced = p.algorithm is not None or p.implementation == "native"
        return bare if forced else two("XLA's add is as fast as any")
    # By the kernel of the dgrad, which is the one whose time is known.
    alone = bare if bare.implementation == "native" else _refusal(p, device) or made("conv_dgrad", "sm90", p, device)
    named = "sm90" if isinstance(alone, str) else f"{alone.kernel} {alone.tile}".rstrip()
    adds = alone if isinstance(alone, str) else made("conv_dgrad_add", named, p, device)
    if isinstance(adds, str):
        return two(f"{named} cannot add here: {adds}")
    reason = bare.reason
    if bare.implementation != "native":
        if device.partitioned:
            return two(reason)
        faster, reason = _adds_faster(adds.kernel, p, device)
        if not faster:
            return two(reason)
    return dataclasses.replace(adds, reason=f"{reason}; c is added on its way")


def _plan_dgrad_sums(p: ConvProblem, device: Device) -> Plan:
    """A dgrad that sums up for the batch-norm in front, or more calls: a dgrad that adds has a plan of its own then."""

    def parts(why: str) -> Plan:
        return Plan("calls", f"a dgrad that adds, then the relu's derivative and sums: {why}", "parts")

    free = p if p.algorithm in (None, "sm90") else dataclasses.replace(p, algorithm=None)
    adds = plan("conv_dgrad_add", free, device)
    if disabled("conv_dgrad_sums"):
        return parts(f"JAXCONV_DISABLE={os.environ['JAXCONV_DISABLE']}")
    if p.implementation == "xla" or _empty(p):
        return parts(adds.reason)
    refusal = _refusal(p, device) or ("it exists on CUDA only" if device.platform == "cpu" else None)
    refusal = refusal or (None if p.channels_last else "it needs channels-last arrays")
    found = refusal or made("conv_dgrad_sums", p.algorithm or "sm90", p, device)
    if isinstance(found, str):
        return parts(found)
    if p.algorithm is not None or p.implementation == "native":
        return dataclasses.replace(found, reason=f"{_asked(p)} was asked for")
    if adds.implementation != "native":
        return parts(adds.reason)
    size = math.prod(p.x_shape) * itemsize(p)
    if size < LEAST_OF_SUMS:
        return parts(f"an array of {size >> 20} MiB is read again from caches, so one pass less saves nothing")
    return dataclasses.replace(
        found, reason=f"{adds.reason}; the sums need one more read of x, instead of reads of dz and x"
    )


def _adds_faster(kernel: str, p: ConvProblem, device: Device) -> tuple[bool, str]:
    """Whether the kernel with an addend beats XLA's dgrad and its add, from the bare dgrads' measured times."""
    found = measured.nearest("conv_dgrad", p, device, kernel)
    if found is None:
        return False, f"no dgrad by {kernel} was measured near this problem on {device.kind or 'the device'}"
    # A pass over dx of the problem that was measured, at the rate at which memory copies.
    pixels, group_c, _, groups = found.coordinates
    strides = math.prod(p.stride)
    rates = model.numbers(device) or model.NUMBERS["H200"]
    one = 2.0 ** (pixels + group_c + groups) * strides * itemsize(p) / rates.bandwidth
    # In place it writes only what a tap reaches, and that it also reads.
    own = 2 * p.reached - 1 if strides > 1 else 1
    # XLA's slice of dx is no pass of its own in front of an add.
    sliced = found.copy_ms if model.copied("conv_dgrad", p) == "dx" else 0.0
    ratio = (found.xla_ms - sliced + 3 * one) / (found.native_ms[kernel] + own * one)
    where = f"{found.of_kernels}, XLA slicing dx in the pass of its add" if sliced else found.where
    text = f"{ratio:.2f} times as fast as XLA's dgrad and add would be {where}"
    return ratio > (measured.SISTER_MARGIN if found.sister else measured.MARGIN), f"{kernel} with its addend {text}"


def _plan_dense_gradient(p: DenseProblem, device: Device) -> Plan:
    """A product that goes back through the activation and sums up on its way, or three calls: the product has a plan of
    its own then."""
    named = p.algorithm is not None and p.algorithm.partition(" ")[0] == dense.GRADIENT

    def three(why: str, candidates: tuple[Candidate, ...] = ()) -> Plan:
        reason = f"a product, then the activation's derivative and a sum: {why}"
        return Plan("calls", reason, "three", candidates=candidates)

    if p.implementation == "xla":
        return three("implementation='xla' was asked for")
    if disabled("dense_gradient"):
        return three(f"JAXCONV_DISABLE={os.environ['JAXCONV_DISABLE']}")
    if _empty(p):
        return three("there is nothing to compute")
    refusal = _refusal(p, device) or ("it exists on CUDA only" if device.platform == "cpu" else None)
    if p.algorithm is not None:
        found = refusal or made("dense_gradient", p.algorithm, p, device)
        if isinstance(found, Plan):
            return dataclasses.replace(found, reason=f"algorithm='{p.algorithm}' was asked for")
        if named:
            raise ValueError(f"{p.name}: {_asked(p)} cannot run dense_gradient of {p}: {found}")
        return three(f"algorithm='{p.algorithm}' was asked for, and it cannot do all in one kernel: {found}")
    if refusal:
        return three(refusal)
    forced = p.implementation == "native"
    if device.partitioned and not forced:
        return three("XLA splits this program over devices; for a call of ours it would gather the arrays")
    own = _tuned("dense_gradient", p, device)
    if own is not None:
        return own if own.implementation == "native" else three(own.reason, own.candidates)
    best, candidates, why = _weighed("dense_gradient", p, device)
    if forced:
        wanted = best.plan if best is not None else made("dense_gradient", "sm90", p, device)
        if isinstance(wanted, str):
            return three(wanted)
        asked = f"implementation='native' was asked for{f'; {why}' if best is not None else ''}"
        return dataclasses.replace(wanted, reason=asked, candidates=candidates)
    if best is None or not best.wins:
        return three(why, candidates)
    return dataclasses.replace(best.plan, reason=why, candidates=candidates)


def _asked(problem: Problem) -> str:
    return f"algorithm='{problem.algorithm}'" if problem.algorithm else "implementation='native'"


def _empty(problem: Problem) -> bool:
    if isinstance(problem, ConvProblem):
        extents: tuple[Any, ...] = (problem.batch,)
    elif isinstance(problem, DenseProblem):
        extents = (problem.m, problem.n, problem.k, problem.batch)
    else:
        extents = problem.x_shape
    return any(known(extent) and extent == 0 for extent in extents)


def missing(device: Device) -> str | None:
    """Why no native code runs on the device, or None."""
    why = _native.missing(device.platform)
    capability = device.compute_capability
    if why or device.platform != "cuda" or capability is None:
        return why
    if capability < (8, 0):
        return f"the CUDA kernels need compute capability 8.0, {device.kind} has {capability}"
    if not _native.runs_on(capability):
        return f"the CUDA module holds no code for {device.kind}: it was built for other architectures (see info())"
    return None


def _refusal(problem: Problem, device: Device) -> str | None:
    return missing(device) or _no_kernels(problem, device.platform)


def _no_kernels(problem: Problem, platform: str) -> str | None:
    """Why no kernel of the platform takes the problem, on whatever device."""
    if isinstance(problem, BatchNormProblem) and problem.masked:
        return "XLA computes statistics under a mask, and fuses what follows them"
    if platform == "cuda" and problem.dtype == "float64":
        return "float64 has no native CUDA kernels"
    if isinstance(problem, DenseProblem):
        extents: tuple[Any, ...] = (problem.m, problem.k, problem.n, problem.batch or 1)
    else:
        extents = problem.x_shape
    if not all(map(known, extents)):
        return "the batch extent is symbolic: native plans need a number"
    return None


def made(op: str, algorithm: str, problem: Problem, device: Device) -> Plan | str:
    """The plan for `op` by the family or kernel that `algorithm` names, or the sentence that says why there is none."""
    if isinstance(problem, ConvProblem):
        plan = conv.made(op, algorithm, problem, device)
        if op == "conv_dgrad_add" and isinstance(plan, Plan) and device.platform != "cpu":
            plan = dataclasses.replace(plan, in_place=math.prod(problem.stride) > 1)
        return plan
    if isinstance(problem, IntegerConvProblem):
        return conv_integer.made(algorithm, problem, device)
    if isinstance(problem, BatchNormProblem):
        return batchnorm.made(op, algorithm, problem, device)
    if isinstance(problem, PoolProblem):
        return pool.made(algorithm, problem, device)
    if isinstance(problem, GroupNormProblem):
        return groupnorm.made(op, algorithm, problem, device)
    if isinstance(problem, SqueezeExciteProblem):
        return squeeze_excite.made(algorithm, problem, device)
    return dense.made(op, algorithm, problem, device)


def supports(op: str, algorithm: str, problem: Problem, device: Device) -> str | None:
    """None if the family or kernel can run `op` of `problem` on `device`, else a sentence."""
    plan = made(op, algorithm, problem, device)
    return None if isinstance(plan, Plan) else plan


def _ladder(op: str, problem: Problem, device: Device) -> str:
    """The native algorithm for a problem nobody has measured."""
    if isinstance(problem, DenseProblem):
        return "gemm"
    if isinstance(problem, PoolProblem):
        return "gather"
    if isinstance(problem, SqueezeExciteProblem):
        return "one_pass"
    if isinstance(problem, BatchNormProblem):
        # Blocks read images that 16 bytes do not divide an element at a time.
        whole = problem.inner == 1 or domain.batchnorm_vector(problem) > 1
        resident = ("resident_block", "resident_team") if whole else ("resident_team", "resident_block")
        return next((a for a in resident if supports(op, a, problem, device) is None), "two_read")
    if isinstance(problem, GroupNormProblem):
        return "two_read" if device.platform == "cpu" else groupnorm.wanted(op, problem, device)
    if op == "conv_statistics" and device.platform == "cuda":
        return "sm90"
    if problem.depthwise and problem.groups > 1:
        return "depthwise"
    if device.platform == "cpu":
        return "im2col"
    if problem.groups > 1 and supports(op, "grouped", problem, device) is None:
        return "grouped"
    # Filters that large are patches, which are long matrix products.
    small = math.prod(problem.filter) <= 64 or stem.patches(op, problem, device)
    if small and supports(op, "stem", problem, device) is None:
        return "stem"
    # The direct kernels take what the tensor-core loop refuses.
    return "implicit_gemm" if supports(op, "implicit_gemm", problem, device) is None else "direct"


def _fastest(op: str, problem: Problem, device: Device) -> Plan:
    """The native plan that beats XLA, or XLA."""
    if device.platform == "cpu":
        algorithm, reason = _fastest_on_cpu(op, problem)
        plan = made(op, algorithm, problem, device) if algorithm else None
        return dataclasses.replace(plan, reason=reason) if isinstance(plan, Plan) else Plan("xla", reason)
    plans = every(op, problem, device)
    safe = _safe(op, problem, plans)
    best, candidates, why = _weighed(op, problem, device, safe)
    if isinstance(problem, BatchNormProblem) and problem.activation.name == "none" and not problem.residual:
        # Alone the native kernel may win; in a model XLA joins its normalisation with the add or activation behind it
        # and its sums with the mask before it, and a custom call would cost these a pass of their own.
        why = "XLA fuses a bare normalisation with its neighbours; native code needs activation= or residual="
        return Plan("xla", why, candidates=candidates)
    if isinstance(problem, BatchNormProblem) and problem.inner > 1:
        # Alone it may win; between convolutions it was 1.2 times slower than XLA's, bf16 and float32, by the copies.
        why = "convolutions leave channels last in memory, so native code for channels first would copy the array"
        return Plan("xla", why, candidates=candidates)
    if isinstance(problem, PoolProblem) and not problem.save:
        # Whatever was measured alone: in a model XLA may compute what is in front of it on the way.
        one = "no gradient is taken: XLA's own pooling is one pass as well, and may join its neighbours"
        return Plan("xla", one, candidates=candidates)
    if isinstance(problem, PoolProblem) and best is None:
        # XLA's scatter is slow at every window; a kernel that was nowhere below twice its speed need not be measured at
        # each.
        ratios, gather = measured.windows(problem, device), made(op, "gather", problem, device)
        if isinstance(gather, Plan) and ratios and min(ratios) > 2:
            where = f"at the {len(ratios)} windows that were measured"
            why = f"{min(ratios):.1f} to {max(ratios):.1f} times faster than XLA, forward and backward, {where}"
            return dataclasses.replace(gather, reason=why)
    if best is None or not best.wins:
        return Plan("xla", why + _unsafe([p.kernel for p in plans if p not in safe]), candidates=candidates)
    return dataclasses.replace(best.plan, reason=why, candidates=candidates)


def _unmeasured(device: Device) -> str:
    return f"no native kernel was measured near this problem on {device.kind or 'the device'}; jaxconv.tune can do it"


def _safe(op: str, problem: Problem, plans: list[Plan]) -> list[Plan]:
    """Without kernels that would spread infinities, where these are part of life."""
    if not isinstance(problem, ConvProblem) or problem.dtype != "float16":
        return plans
    return [plan for plan in plans if not conv.spreads(op, plan.kernel, problem)]


def _unsafe(kernels: list[str]) -> str:
    """What is said of the kernels that `_safe` left out."""
    if not kernels:
        return ""
    names = " and ".join(kernels)
    return (
        f"; {names} would turn an infinity in x, which float16 reaches early, into NaN in other outputs: only with "
        "implementation='native'"
    )


@dataclasses.dataclass(frozen=True)
class _Weighed:
    """A kernel's plan and how it compares with XLA."""

    plan: Plan
    ratio: float  # XLA's time over the kernel's, measured or predicted
    wins: bool
    why: str


def _weighed(
    op: str, problem: Problem, device: Device, plans: list[Plan] | None = None
) -> tuple[_Weighed | None, tuple[Candidate, ...], str]:
    """(the kernel to take, or the one that comes nearest; all that is known of the others; why).

    What was measured for a kernel at this problem or near it speaks first; where no kernel wins by that, the model
    speaks for the others: together with a measurement of other channels, or alone. `plans`: of the kernels, where these
    are not all that can run it.
    """
    known: list[tuple[Plan, measured.Measurement, float]] = []
    others: list[tuple[Plan, measured.Measurement | None]] = []
    for plan in every(op, problem, device) if plans is None else plans:
        if isinstance(problem, ConvProblem) and not conv.in_memory(plan.kernel, problem).channels_last:
            continue  # what was measured lay as convolutions' neighbours leave it
        found = measured.nearest(op, problem, device, plan.kernel)
        if found is None:
            others.append((plan, None))
        else:
            known.append((plan, found, found.apart(problem)))
    # Where a kernel was measured at these very channels, and did not win, no other that was measured elsewhere does.
    most = min(measured.FAR, min([apart for _, _, apart in known], default=0.0) + 0.01)
    near = [(plan, found) for plan, found, apart in known if apart <= most]
    others = [*((plan, found) for plan, found, apart in known if apart > most), *others]
    weighed = [_by_measurement(plan, found) for plan, found in near]
    candidates = [c for plan, found in near for c in _measured_candidates(plan, found)]
    if not any(w.wins for w in weighed) and others:
        predicted: dict[str, model.Prediction] = {}
        if isinstance(problem, ConvProblem):
            predicted = model.predict(op, problem, device, [plan for plan, _ in others])
        xla = predicted.get("xla")
        for plan, found in others:
            kernel = predicted.get(plan.spec)
            if found is not None:
                candidates += _measured_candidates(plan, found)
            if xla is not None and kernel is not None:
                weighed.append(_by_prediction(plan, xla.ms, kernel, found))
                how = f"predicted, its speed relative to XLA within {_percent(kernel.deviation)}"
                candidates.append(Candidate(plan.kernel, kernel.ms, how))
            elif found is not None and xla is None:
                weighed.append(_by_measurement(plan, found))
            elif found is not None:
                # The model knows XLA but hardly this kernel: what is far does not speak alone.
                ratio = found.ratio(plan.kernel)
                why = f"{plan.kernel} was {ratio:.2f} times as fast as XLA {found.where}, too far away"
                weighed.append(_Weighed(plan, ratio, False, why))
        if xla is not None:
            candidates.append(Candidate("xla", xla.ms, "predicted"))
    if not weighed:
        return None, (), _unmeasured(device)
    best = max(weighed, key=lambda w: (w.wins, w.ratio))
    return best, tuple(dict.fromkeys(candidates)), best.why


def _measured_candidates(plan: Plan, found: measured.Measurement) -> tuple[Candidate, Candidate]:
    kernel = Candidate(plan.kernel, found.native_ms[plan.kernel], f"measured {found.of_kernels}")
    return kernel, Candidate("xla", found.xla_ms, f"measured {found.where}")


def _by_measurement(plan: Plan, found: measured.Measurement) -> _Weighed:
    ratio, wins = found.ratio(plan.kernel), found.wins(plan.kernel)
    # Kernels that do the work of two calls were measured against the faster of XLA and of two calls, each by its plan.
    of_two = ("conv_statistics", "conv_normalised", "batchnorm_shortcut")
    other = "two calls" if found.op in of_two else "XLA"
    if wins:
        return _Weighed(plan, ratio, wins, f"{ratio:.2f} times faster than {other} {found.where}")
    speed = "the speed of two calls" if other != "XLA" else "XLA's speed"
    return _Weighed(plan, ratio, wins, f"{plan.kernel} reached {ratio:.2f} of {speed} {found.where}")


def _by_prediction(plan: Plan, xla_ms: float, kernel: model.Prediction, found: measured.Measurement | None) -> _Weighed:
    """By the model alone, or by it and a measurement that is rather far (of both, the geometric mean)."""
    ratio = xla_ms / kernel.ms
    why = f"predicted to be {ratio:.2f} times faster than XLA ({kernel.ms:.3f} and {xla_ms:.3f} ms)"
    short = f"{plan.kernel} is predicted at {ratio:.2f} times XLA's speed"
    if found is not None:
        other = found.ratio(plan.kernel)
        also = f", and was {other:.2f} times as fast {found.where}"
        ratio, why, short = math.sqrt(ratio * other), why + also, short + also
        kernel = dataclasses.replace(kernel, deviation=kernel.deviation / 2)
    sure = model.sure(ratio, kernel.deviation)
    if not sure:
        why = short + (", which is not sure enough" if ratio > 1 else "")
    return _Weighed(plan, ratio, sure, why)


def _percent(deviation: float) -> str:
    return f"{100 * math.expm1(deviation):.0f} %"


def every(op: str, problem: Problem, device: Device) -> list[Plan]:
    """A plan for each native kernel that can run the problem."""
    if _no_kernels(problem, device.platform):
        return []
    if isinstance(problem, ConvProblem):
        return list(conv.every(op, problem, device))
    if isinstance(problem, DenseProblem):
        return list(dense.kernels(op, problem, device))
    algorithms: tuple[str, ...]
    if isinstance(problem, PoolProblem):
        algorithms = POOL_ALGORITHMS
    elif isinstance(problem, SqueezeExciteProblem):
        algorithms = SQUEEZE_EXCITE_ALGORITHMS
    else:
        algorithms = BATCHNORM_ALGORITHMS if isinstance(problem, BatchNormProblem) else GROUPNORM_ALGORITHMS
    if isinstance(problem, GroupNormProblem) and problem.rows and device.platform == "cuda":
        algorithms = ("rows",)  # images of one pixel are nothing that the others were made for
    elif isinstance(problem, GroupNormProblem):
        algorithms = tuple(a for a in algorithms if a != "rows")
    plans = (made(op, algorithm, problem, device) for algorithm in algorithms)
    return [plan for plan in plans if isinstance(plan, Plan)]


def natively(op: str, p: ConvProblem) -> ConvProblem:
    """The problem of a few rows, by a native kernel where this process's GPU has one and nobody asked for another.

    Any of them takes microseconds for a few rows. Of cuDNN's, XLA chose one that took 41 ms for the wgrad of 2 planes
    of 256 x 256 pixels and 32 channels on an H200, and nobody measures such problems.
    """
    device = Device.default()
    if p.implementation or p.algorithm or device.platform != "cuda":
        return p
    known = missing(device) is None and every(op, p, device)
    return dataclasses.replace(p, implementation="native") if known else p


def tiles(op: str, problem: Problem, device: Device) -> list[Plan]:
    """A plan for each native kernel and tile that can run the problem, of a kernel those first that it wants most."""
    if _no_kernels(problem, device.platform):
        return []
    if isinstance(problem, DenseProblem):
        return list(dense.every(op, problem, device))
    if not isinstance(problem, ConvProblem) or device.platform != "cuda":
        return every(op, problem, device)
    specs: dict[str, None] = {}
    for family, module in conv.FAMILIES.items():
        specs |= dict.fromkeys(wanted.spec for wanted in module.wants(op, conv.in_memory(family, problem), device))
    plans = (made(op, spec, problem, device) for spec in specs)
    return [plan for plan in plans if isinstance(plan, Plan)]


def _fastest_on_cpu(op: str, problem: Problem) -> tuple[str | None, str]:
    if op in conv.NORMALISED:
        return None, "on a CPU the batch-norm takes a pass over memory either way, inside the call or before it"
    if op == "conv_statistics":
        return None, "on a CPU the statistics take a pass over the result either way, inside the call or behind it"
    if isinstance(problem, PoolProblem):
        return pool.on_cpu(problem)
    if isinstance(problem, (BatchNormProblem, GroupNormProblem)):
        why = "native code reads x more often: forward and backward, XLA was 1.5 to 9 times faster on an AMD EPYC"
        return None, why
    if isinstance(problem, DenseProblem):
        return None, "XLA's matrix products are as fast as the CPU allows"
    if not isinstance(problem, ConvProblem):
        return None, "XLA's code is as fast as the CPU allows"
    if problem.depthwise and problem.groups > 1:
        return "depthwise", "XLA's depthwise convolutions are 10 times slower on a CPU"
    if problem.groups > 1:
        times = "a hundred times slower" if op == "conv_wgrad" else "2 to 8 times slower"
        return "im2col", f"XLA's grouped convolutions are {times} on a CPU"
    if op != "conv_wgrad":
        return None, "XLA's convolutions without groups are as fast as the CPU allows"
    product = "native code computes a weight gradient as one matrix product"
    if problem.dtype in ("float32", "float64"):
        speeds = "2.6 to 4.5 times XLA's speed on an Intel Xeon, 0.7 to 3 times on an AMD EPYC"
        return "im2col", f"{product}, at {speeds}"
    # What two conversions leave of it, on an EPYC.
    if math.prod(problem.filter) == 1 or max(problem.in_channels, problem.out_channels) < 32:
        return "im2col", f"{product} in float32, at 1 to 2.4 times XLA's speed, conversions included"
    return None, f"{product} in float32, at 0.7 to 1 times XLA's speed, conversions included"

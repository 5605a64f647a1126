"""Batch-norm: cuda/batchnorm. Which kernel, parts and teams are wanted."""

from __future__ import annotations

import dataclasses

from jaxconv._plan import choose, domain
from jaxconv._plan.plan import Device, Plan, itemsize
from jaxconv._plan.planner import CUDA_ONLY, Features, Planner, asked, calls, log2, vector
from jaxconv._problem import BATCHNORM_ALGORITHMS, BatchNormProblem


def one_walk_of(op: str, p: BatchNormProblem) -> str | None:
    """The op of which `op` is one of two_read's walks: statistics alone, backward's sums alone, or its dx alone.

    Nothing is read again, so there is nothing that a block or a team could keep.
    """
    if op == "batchnorm_moments":
        return "batchnorm_train"
    alone = op == "batchnorm_dx" or (op == "batchnorm_backward" and not p.want_dx)
    return "batchnorm_backward" if alone else None


def _parts(op: str, p: BatchNormProblem, device: Device) -> int:
    """Of two_read's sums: eight blocks a multiprocessor, of at least 16 KB each.

    Backward's may pass through a ring, which takes a part a multiprocessor (cuda/batchnorm/stream.cuh).
    """
    item, batch = itemsize(p), p.batch or 1
    # bytes of channels that a tile spans, channels last
    width = 256 if domain.batchnorm_vector(p) > 1 else 32 * item
    tiles = p.channels if p.inner > 1 else -(-p.channels * item // width)
    tile_bytes = p.reduced * item * p.channels // tiles
    parts = max(1, min(-(-8 * device.sm_count // (batch * tiles)), max(1, tile_bytes // 16384)))
    streamed = op in ("batchnorm_backward", "batchnorm_backward_add") and domain.batchnorm_streamed(p)
    return max(parts, device.sm_count) if streamed else parts


def _team(op: str, p: BatchNormProblem, device: Device) -> tuple[int, int]:
    """(bytes of a group's channels, CTAs of a team): within 5% of the best of all in nearly every benchmark (H200)."""

    def all_at_once(width: int, ctas: int | None = None) -> int:
        """CTAs of a team where all groups run side by side on `ctas` of them."""
        together, groups = domain.batchnorm_teams(op, p, width, device)
        return max(1, (ctas or together) // groups)

    if p.inner == 1:
        # All groups side by side, so that DRAM reads whole rows. Where there is little to read, fewer CTAs meet sooner.
        small = p.size * itemsize(p) < 8 * 2**20
        return (64, all_at_once(64, device.sm_count)) if small else (128, all_at_once(128))
    # A channel stays in the shared memory of its team but for a third, which the L2 cache has.
    together, _ = domain.batchnorm_teams(op, p, 128, device)
    held = 2 if op == "batchnorm_backward" else 1
    room = domain.shared_memory(device) * device.sm_count // together - 8 * 1024
    enough = -(-p.reduced * itemsize(p) * held * 10 // (14 * room))
    ctas = next((c for c in sorted(together // t for t in range(2, together + 1)) if c >= enough), together // 2)
    return 128, max(all_at_once(128), ctas, 1)


class BatchNorm(Planner):
    group = "batchnorm"
    algorithms = BATCHNORM_ALGORITHMS
    independent = (True, True)

    def made(self, algorithm: str, p: BatchNormProblem, device: Device) -> Plan | str:
        plan = Plan("native", "", algorithm)
        if device.platform == "cpu":
            gpus = ("batchnorm_shortcut_backward", "batchnorm_signs", "batchnorm_backward_add")
            alone = algorithm == "two_read" and self.op not in gpus
            return plan if alone else CUDA_ONLY
        refusal = domain.batchnorm_refusal(self.op, plan, p, device)
        if refusal:
            return refusal
        if algorithm == "resident_team":
            width, ctas = _team(self.op, p, device)
            plan = dataclasses.replace(plan, tile=f"{width}B", splits=ctas)
        elif self.op == "batchnorm_shortcut_backward":
            plan = dataclasses.replace(plan, splits=device.sm_count)  # a part a multiprocessor
        elif algorithm == "two_read" and self.op not in ("batchnorm_infer", "batchnorm_signs", "batchnorm_dx"):
            plan = dataclasses.replace(plan, splits=_parts(self.op, p, device))
        return dataclasses.replace(plan, workspace_bytes=domain.batchnorm_workspace(self.op, plan, p, device))

    def first(self, p: BatchNormProblem, device: Device) -> str:
        # Blocks read images that 16 bytes do not divide an element at a time.
        whole = p.inner == 1 or domain.batchnorm_vector(p) > 1
        resident = ("resident_block", "resident_team") if whole else ("resident_team", "resident_block")
        return next((a for a in resident if isinstance(self.made(a, p, device), Plan)), "two_read")

    def no_kernels(self, p: BatchNormProblem, platform: str) -> str | None:
        if p.masked:
            return "XLA computes the statistics of a batch-norm with a mask, and fuses it with what follows"
        return super().no_kernels(p, platform)

    def on_cpu(self, p: BatchNormProblem) -> tuple[str | None, str]:
        return (
            None,
            "native code reads x more often: forward and backward, XLA was 1.5 to 9 times faster on an AMD EPYC",
        )

    def timed_as(self, p: BatchNormProblem, device: Device) -> BatchNormProblem:
        """Channels-first images as channels-last ones: convolutions leave them so in memory.

        A kernel for channels first would copy them: between convolutions it was 1.2 times slower than XLA's, in both
        types, though it may win alone.
        """
        free = p.implementation is None and p.algorithm is None
        return p.channels_last if device.platform == "cuda" and p.channel_axis == 1 and p.inner != 1 and free else p

    def composed(self, p: BatchNormProblem, device: Device) -> Plan | None:
        other = self.timed_as(p, device)
        if other is p:
            return None
        plan = choose.plan(self.op, other, device)
        return dataclasses.replace(plan, asks_channels_last=True) if plan.implementation == "native" else plan

    def exception(self, p: BatchNormProblem, device: Device, forced: bool) -> Plan | None:
        """Statistics, the backward pass's sums or its dx alone: native where the whole is, which was measured."""
        whole = one_walk_of(self.op, p)
        if whole is None:
            return None
        plan = choose.plan(whole, dataclasses.replace(p, want_dx=True, count=None, dz=False), device)
        if plan.implementation != "native":
            return plan
        reason = f"a part of {whole}, which as a whole would be native here: {plan.reason}"
        own = self.made("two_read", p, device)
        return self.cannot(p, own, "two_read") if isinstance(own, str) else dataclasses.replace(own, reason=reason)

    def overruled(self, p: BatchNormProblem, device: Device, best: Plan | None) -> Plan | None:
        if p.activation.name == "none" and not p.residual and not p.apart:
            # Alone the native kernel may win; in a model XLA joins its normalisation with the add or activation behind
            # it and its sums with the mask before it, and a custom call would cost these a pass of their own.
            return self.instead(
                "XLA fuses a bare normalisation with its neighbours; native code needs activation= or residual="
            )
        if p.inner > 1:
            return self.instead("native code for channels between other axes is slower than XLA's")
        return None

    def features(self, p: BatchNormProblem) -> Features:
        """Coordinates: elements of a channel, channels."""
        op = self.op
        if op == "batchnorm_shortcut_backward":
            op = "batchnorm_shortcut"  # measured forward and backward, against two batch-norms
        elif op != "batchnorm_infer" and (p.activation.name != "none" or p.residual):
            # Measured and chosen forward and backward together: a native forward that won by 4 % alone lost 15 % beside
            # an XLA backward, which then read what XLA would have fused.
            op = "batchnorm_residual" if p.residual else "batchnorm_fused"
        fast_axis = p.channels if p.inner == 1 else p.inner
        kind = p.dtype, p.inner == 1, fast_axis % vector(p.dtype) == 0
        return op, kind, log2(p.reduced, (p.batch or 1) * p.channels)


class Signs(BatchNorm):
    """An inference that keeps its result's signs: native where the inference is, which was measured."""

    def composed(self, p: BatchNormProblem, device: Device) -> Plan:
        infer = choose.plan("batchnorm_infer", p, device)
        own = infer.reason if infer.implementation != "native" else self.made("two_read", p, device)
        if isinstance(own, Plan):
            return dataclasses.replace(own, reason=f"the inference alone would be native here: {infer.reason}")
        return calls("two", "an inference, then a pass that keeps its signs")(own)


class BackwardAdd(BatchNorm):
    """A backward pass that adds to dx: two_read's, where it is the backward pass's kernel. A block or a team, which
    reads its tensors once, spares as much as the pass that the add is."""

    def composed(self, p: BatchNormProblem, device: Device) -> Plan:
        first = super().composed(p, device)
        if first is not None:
            return first
        forced = p.implementation == "native" and p.algorithm is None and not choose.refusal(self.op, p, device)
        if forced and isinstance(own := self.made("two_read", p, device), Plan):
            return dataclasses.replace(own, reason=f"{asked(p)} was asked for")
        alone = choose.plan("batchnorm_backward", p, device)
        two_read = alone.implementation == "native" and alone.kernel == "two_read" and not self.disabled(p)
        adds = self.made("two_read", p, device) if two_read else alone.reason
        if isinstance(adds, str):
            return calls("two", "a backward pass, then an add")(adds, alone.candidates)
        reason = f"{alone.reason}; c is added in the same pass"
        return dataclasses.replace(adds, reason=reason, candidates=alone.candidates)


class Shortcut(Planner):
    """ "joined": XLA's one pass forward and a kernel's two walks back; or "two" batch-norms."""

    def composed(self, p: BatchNormProblem, device: Device) -> Plan:
        op = "batchnorm_shortcut_backward"
        own = choose.plan(op, p, device)
        if own.implementation == "native":
            reason = f"one pass forward and two backward do both batch-norms: {own.reason}"
            return Plan("calls", reason, "joined", candidates=own.candidates)
        refused = None if choose.refusal(op, p, device) else choose.supports(op, "two_read", p, device)
        return calls("two", "two batch-norms")(refused or own.reason, own.candidates)

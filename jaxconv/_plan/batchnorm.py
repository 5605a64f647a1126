"""Batch-norm: cuda/batchnorm."""

from __future__ import annotations

import dataclasses

from jaxconv._plan import domain
from jaxconv._plan.plan import Device, Plan, itemsize
from jaxconv._problem import BatchNormProblem


def made(op: str, algorithm: str, p: BatchNormProblem, device: Device) -> Plan | str:
    """The plan by the kernel that `algorithm` names, or the sentence that says why there is none."""
    refusal = batchnorm_supports(op, algorithm, p, device)
    if refusal:
        return refusal
    plan = Plan("native", "", algorithm)
    return plan if device.platform == "cpu" else fill_batchnorm(op, plan, p, device)


def batchnorm_supports(op: str, algorithm: str, p: BatchNormProblem, device: Device) -> str | None:
    if device.platform != "cuda":
        return None if algorithm == "two_read" else "it exists on CUDA only"
    if p.reduced >= 2**31:
        return f"it needs fewer than 2^31 elements per channel, got {p.reduced}"
    if op == "batchnorm_infer" and algorithm != "two_read":
        return "inference is a single pass"
    if algorithm == "resident_team" and p.inner > 1 and p.inner < 16 // itemsize(p):
        return f"it reads 16 bytes at a time: images have {p.inner} elements, fewer than {16 // itemsize(p)}"
    if algorithm == "resident_team" and p.inner == 1 and batchnorm_vector(p) == 1:
        return f"it reads 16 bytes at a time: {p.channels} channels are no multiple of {16 // itemsize(p)}"
    if algorithm == "resident_block":
        item, vector = itemsize(p), batchnorm_vector(p)
        held = 2 if op == "batchnorm_backward" else 1
        positions = p.reduced // (vector if p.inner > 1 else 1)
        lanes = 1 if p.inner > 1 else min(2, p.channels // vector)
        needed = held * (positions * lanes + 512) * vector * item + 12288
        if needed > domain.shared_memory(device):
            return f"a block would need {needed} bytes of shared memory, the device has {domain.shared_memory(device)}"
    return None


def batchnorm_vector(p: BatchNormProblem) -> int:
    """Elements in an access: 16 bytes where the fastest axis divides into them."""
    vector = 16 // itemsize(p)
    return 1 if (p.inner if p.inner > 1 else p.channels) % vector else vector


def fill_batchnorm(op: str, plan: Plan, p: BatchNormProblem, device: Device) -> Plan:
    if plan.kernel == "resident_team":
        return _fill_team(op, plan, p, device)
    if plan.kernel != "two_read" or op == "batchnorm_infer":
        return plan
    item, vector, batch = itemsize(p), batchnorm_vector(p), p.batch or 1
    width = 256 if vector > 1 else 32 * item  # bytes of channels that a tile spans, channels last
    tiles = p.channels if p.inner > 1 else -(-p.channels * item // width)
    tile_bytes = p.reduced * item * p.channels // tiles
    splits = max(1, min(-(-8 * device.sm_count // (batch * tiles)), max(1, tile_bytes // 16384)))
    return dataclasses.replace(plan, splits=splits, workspace_bytes=(splits + 1) * 2 * batch * p.channels * 4)


@dataclasses.dataclass(frozen=True)
class _TeamLayout:
    """resident_team with `ctas` CTAs on a channel group of `width` bytes (cuda/batchnorm/team_launch.h)."""

    op: str
    problem: BatchNormProblem
    device: Device
    width: int
    ctas: int

    @staticmethod
    def together(op: str, p: BatchNormProblem, device: Device) -> int:
        """CTAs that run at once: two a multiprocessor, but for the kernels that take its registers alone."""
        alone = op == "batchnorm_backward" and p.inner == 1 and itemsize(p) == 2 and p.activation.name != "relu"
        return device.sm_count * (1 if alone else 2)

    @property
    def row(self) -> int:
        """16-byte vectors of channels, channels last."""
        return self.problem.channels * itemsize(self.problem) // 16

    @property
    def lanes(self) -> int:
        """Threads side by side across channels."""
        lanes = self.width // 16 if self.problem.inner == 1 else 1
        while lanes > 1 and lanes // 2 >= self.row:
            lanes //= 2
        return lanes

    @property
    def groups(self) -> int:
        p = self.problem
        return (p.batch or 1) * (-(-self.row // self.lanes) if p.inner == 1 else p.channels)

    @property
    def teams(self) -> int:
        return min(self.together(self.op, self.problem, self.device) // self.ctas, self.groups)

    @property
    def workspace_bytes(self) -> int:
        """Two rounds of a sum and a sum of squares, 8 bytes each, for each CTA and channel, and of their totals."""
        channels = self.lanes * batchnorm_vector(self.problem) if self.problem.inner == 1 else 1
        return self.teams * (self.ctas + 1) * channels * 2 * 2 * 8


def _team_layout(op: str, p: BatchNormProblem, device: Device) -> _TeamLayout:
    """What came within 5% of the best of all layouts in nearly every benchmark case (H200)."""
    together = _TeamLayout.together(op, p, device)
    held = 2 if op == "batchnorm_backward" else 1

    def all_at_once(width: int, ctas: int = together) -> _TeamLayout:
        return _TeamLayout(op, p, device, width, max(1, ctas // _TeamLayout(op, p, device, width, 1).groups))

    if p.inner == 1:
        # All groups side by side, so that DRAM reads whole rows. Where there is little to read, fewer CTAs meet sooner.
        small = p.size * itemsize(p) < 8 * 2**20
        return all_at_once(64, device.sm_count) if small else all_at_once(128)
    # A channel stays in the shared memory of its team but for a third, which the L2 cache has.
    room = domain.shared_memory(device) * device.sm_count // together - 8 * 1024
    enough = -(-p.reduced * itemsize(p) * held * 10 // (14 * room))
    ctas = next((c for c in sorted(together // t for t in range(2, together + 1)) if c >= enough), together // 2)
    return max(all_at_once(128), _TeamLayout(op, p, device, 128, max(1, ctas)), key=lambda layout: layout.ctas)


def _fill_team(op: str, plan: Plan, p: BatchNormProblem, device: Device) -> Plan:
    layout = _team_layout(op, p, device)
    return dataclasses.replace(
        plan, tile=f"{layout.width}B", splits=layout.ctas, workspace_bytes=layout.workspace_bytes
    )

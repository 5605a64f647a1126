"""Plan and Device, and the arithmetic that the families share."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxconv._core import native
from jaxconv._problem import (
    BatchNormProblem,
    ConvProblem,
    DenseProblem,
    GroupNormProblem,
    IntegerConvProblem,
    PoolProblem,
    ScaledConvProblem,
    SqueezeExciteProblem,
)

Problem = (
    ConvProblem
    | IntegerConvProblem
    | DenseProblem
    | BatchNormProblem
    | GroupNormProblem
    | PoolProblem
    | SqueezeExciteProblem
)


@dataclasses.dataclass(frozen=True)
class Device:
    platform: str  # "cpu", "cuda", ...
    kind: str = ""  # "NVIDIA H200"; empty when lowering for a device that is not here
    compute_capability: tuple[int, int] | None = None
    sm_count: int = 132  # multiprocessors
    partitioned: bool = False  # XLA partitions the program over devices and cannot be told how to split our calls

    @classmethod
    @contextlib.contextmanager
    def assumed(cls, device: Device) -> Iterator[None]:
        """What is traced and lowered inside is so as where `device` is the default, whether it is here or not.

        JAX keeps what it traced: a function is traced for one device in a process.
        """
        token = _ASSUMED.set(device)
        try:
            yield
        finally:
            _ASSUMED.reset(token)

    @classmethod
    def current(cls, platform: str) -> Device:
        """The first device of `platform` in this process, or an unknown one of that platform."""
        assumed = _ASSUMED.get()
        return assumed if assumed is not None and assumed.platform == platform else cls._current(platform)

    @classmethod
    @functools.cache
    def _current(cls, platform: str) -> Device:
        if platform == "cpu":
            return cls("cpu", "cpu")
        try:
            return cls._of(platform, jax.devices(platform)[0])
        except RuntimeError:
            return cls(platform)

    @classmethod
    def of(cls, platform: str, device: Any) -> Device:
        """JAX's `device`; where that is None, or another is assumed, `current`."""
        known = device is not None and platform != "cpu" and _ASSUMED.get() is None
        return cls._of(platform, device) if known else cls.current(platform)

    @classmethod
    @functools.cache
    def _of(cls, platform: str, device: Any) -> Device:
        text = getattr(device, "compute_capability", None)
        major, _, minor = (text or "").partition(".")
        return cls(
            platform,
            device.device_kind,
            native.code_for((int(major), int(minor))) if text else None,
            getattr(device, "core_count", None) or 132,
        )

    @staticmethod
    def kinds(platform: str) -> list[str]:
        """Of the devices of `platform` in this process."""
        try:
            return sorted({device.device_kind for device in jax.devices(platform)})
        except RuntimeError:
            return []

    @classmethod
    def default(cls) -> Device:
        """The device that programs run on where nobody says otherwise."""
        assumed = _ASSUMED.get()
        if assumed is not None:
            return assumed
        name = jax.default_backend()
        return cls.current("cuda" if name == "gpu" else name)


_ASSUMED: contextvars.ContextVar[Device | None] = contextvars.ContextVar("jaxconv_assumed_device", default=None)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """What a choice knew of a kernel's time, or XLA's."""

    name: str  # "sm90/halo", "xla"
    ms: float  # at the problem that was measured, or predicted for this one
    how: str

    def __str__(self) -> str:
        return f"{self.name} {self.ms:.4f} ms {self.how}"


@dataclasses.dataclass(frozen=True)
class Nearest:
    """Where XLA runs a problem because no kernel is surely faster: the kernel that comes nearest to that."""

    plan: Plan
    xla_ms: float
    ratio: float  # XLA's time over the kernel's, measured or predicted
    deviation: float  # of the ratio's logarithm: how far it is off, typically

    @property
    def ms(self) -> float:
        return self.xla_ms / self.ratio


@dataclasses.dataclass(frozen=True)
class Plan:
    implementation: str  # "native", "xla", or "calls": of kernels that have plans of their own
    reason: str
    kernel: str = ""  # "family/kernel", or a family of one kernel; of "calls" which of them
    tile: str = ""  # rows x columns of a CTA's outputs; "" where the kernel has one size
    splits: int = 1
    chunk: int = 0
    workspace_bytes: int = 0
    # The arrays are channels first and the kernel reads channels last: XLA is asked for that physical layout
    asks_channels_last: bool = False
    # The result takes the addend's place in memory
    in_place: bool = False
    candidates: tuple[Candidate, ...] = ()  # what the choice was made from
    # Where times decided: what the problem is expected to take, and if it is XLA's the kernel that comes nearest
    ms: float | None = dataclasses.field(default=None, compare=False, repr=False)
    nearest: Nearest | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def algorithm(self) -> str:
        """The kernel's family, as a user forces it."""
        return self.kernel.partition("/")[0]

    @property
    def spec(self) -> str:
        """What forces this kernel and tile: "sm90/product 128x256"."""
        return f"{self.kernel} {self.tile}".rstrip()

    def answers(self, algorithm: str) -> bool:
        """Whether `algorithm` names the plan's kernel: "sm90", "sm90/product", "sm90/product 128x256"."""
        name, _, tile = algorithm.partition(" ")
        return name in (self.kernel, self.algorithm) and tile in ("", self.tile)

    def attrs(self) -> dict[str, Any]:
        """As native code reads it (common/plan.h)."""
        return {
            "kernel": self.kernel,
            "tile": self.tile,
            "splits": np.int64(self.splits),
            "chunk": np.int64(self.chunk),
        }

    def __str__(self) -> str:
        if self.implementation != "native":
            return self.implementation + (f"[{self.kernel}]" if self.kernel else "")
        parts = [self.kernel, self.tile, f"splits={self.splits}" if self.splits > 1 else ""]
        parts += ["channels-last" if self.asks_channels_last else "", "in place" if self.in_place else ""]
        return "native[" + " ".join(p for p in parts if p) + "]"


def known(extent: Any) -> bool:
    """Whether an extent is a number (and not a symbolic dimension of jax.export)."""
    return isinstance(extent, (int, np.integer))


def itemsize(p: Problem) -> int:
    return 1 if isinstance(p, ScaledConvProblem) else {"float64": 8, "float32": 4}.get(p.dtype, 2)


PARTIALS_BYTES = 256 * 2**20  # of float32 partial sums


def product_tile(m: int, n: int, instances: int, vector: bool) -> str:
    """The largest tile that still gives most multiprocessors of a large GPU something to do, no wider than n.

    What cannot be read 16 bytes at a time (not `vector`) has one tile.
    """
    enough = 96
    if not vector:
        return "64x64"

    def ctas(rows: int, columns: int) -> int:
        return -(-m // rows) * -(-n // columns) * instances

    if n > 64 and m > 64 and ctas(128, 128) >= enough:
        return "128x128"
    return "128x64" if m > 64 and ctas(128, 64) >= enough else "64x64"


def extent_of(tile: str) -> tuple[int, int]:
    rows, columns = tile.split("x")
    return int(rows), int(columns)


def splits_of(work: int, blocks: int, device: Device, waves: int, least: int, bytes_each: int) -> int:
    """Parts of a reduction over `work` elements: `waves` blocks a multiprocessor, each part at least `least` long."""
    wanted = -(-waves * device.sm_count // max(blocks, 1))
    return max(1, min(wanted, work // least, PARTIALS_BYTES // max(bytes_each, 1), 65535))

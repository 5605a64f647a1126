"""What a choice asks of an op: `Planner`, the one interface, and the table of those that there are.

`choose.py` has the tiers and knows no op. An op, or several that ask alike, has a planner in a file of its own: which
kernels can run a problem, in which order they are wanted, what else decides than their times, and what a problem's
measured neighbours have in common with it. `ops.py` names each op's planner.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jaxconv._plan.plan import Candidate, Device, Nearest, Plan, known

Features = tuple[str, tuple[Any, ...], tuple[float, ...]]  # (op as measured, kind, coordinates)


class Planner:
    """What the tiers ask of one op. What is not overridden holds of most."""

    group = ""  # what JAXCONV_DISABLE calls it besides its own name; "": it has no name there
    algorithms: Sequence[str] = ()  # kernels, or families of them, by the names that a user forces
    # Of the coordinates of `features`: which of them count independent pieces of work, and which are channels that mix
    independent: tuple[bool, ...] = ()
    channels = slice(0, 0)
    tunable = True  # what a user tuned is asked
    forced_by_times = True  # implementation="native" is the kernel with the best times, else always the first wanted

    def __init__(self, op: str):
        self.op = op

    # ---- kernels
    def made(self, algorithm: str, p: Any, device: Device) -> Plan | str:
        """The plan by the family or kernel that `algorithm` names, or the sentence that says why there is none."""
        raise NotImplementedError

    def every(self, p: Any, device: Device) -> Iterable[Plan]:
        """A plan for each kernel that can run p."""
        return plans_of(self.made(algorithm, p, device) for algorithm in self.algorithms)

    def tiles(self, p: Any, device: Device) -> Iterable[Plan]:
        """A plan for each kernel and tile that can run p, of a kernel those first that it wants most."""
        return self.every(p, device)

    def first(self, p: Any, device: Device) -> str:
        """The algorithm for a problem that nobody has measured."""
        return self.algorithms[0]

    # ---- no kernel at all
    def disabled(self, p: Any) -> bool:
        """Whether JAXCONV_DISABLE names the op."""
        return disabled(self.op)

    def extents(self, p: Any) -> Sequence[Any]:
        """What must be numbers for a plan."""
        return p.x_shape

    def empty(self, p: Any) -> bool:
        """Whether there is nothing to compute."""
        return any(known(extent) and extent == 0 for extent in self.extents(p))

    def no_kernels(self, p: Any, platform: str) -> str | None:
        """Why no kernel of the platform takes p, on whatever device."""
        if platform == "cuda" and p.dtype == "float64":
            return "float64 has no native CUDA kernels"
        if not all(map(known, self.extents(p))):
            return "the batch extent is symbolic: native plans need a number"
        return None

    def on_cpu(self, p: Any) -> tuple[str | None, str]:
        """(algorithm, or None for XLA; why) on a CPU, where nothing is measured."""
        return None, "XLA's code is as fast as the CPU allows"

    # ---- exceptions
    def composed(self, p: Any, device: Device) -> Plan | None:
        """The plan of an op whose choice follows from other ops' plans; None where the tiers decide."""
        return None

    def instead(self, why: str, candidates: tuple[Candidate, ...] = ()) -> Plan:
        """The plan where no kernel is taken."""
        return Plan("xla", why, candidates=candidates)

    def cannot(self, p: Any, why: str, algorithm: str = "") -> Plan:
        """The plan where a forced choice cannot run: with `algorithm` by that kernel, else on the device at all."""
        of = f" {self.op} of {p}" if algorithm else ""
        raise ValueError(f"{p.name}: {asked(p)} cannot run{of}: {why}")

    def exception(self, p: Any, device: Device, forced: bool) -> Plan | None:
        """A plan by another rule than the measured times of the op's own kernels; None where these decide."""
        return None

    def overruled(self, p: Any, device: Device, best: Plan | None) -> Plan | None:
        """The plan whatever the times say, where `best` is the kernel that they know most of; else None."""
        return None

    # ---- what a program and its host say (together.py)
    with_the_add = False  # XLA's kernel adds in its own pass, so that a kernel of ours which cannot gains nothing

    def within(self, p: Any) -> tuple[str, Any] | None:
        """(op, problem) of the convolution in p that may be chosen together with others; None where there is none."""
        return None

    def nevertheless(self, p: Any, nearest: Nearest) -> str | None:
        """Why the kernel is taken though it is not surely faster; None where it is not."""
        return None

    def spreads(self, kernel: str, p: Any) -> bool:
        """Whether the kernel would spread infinities of x, which are part of life in float16."""
        return False

    def speaks(self, kernel: str, p: Any) -> bool:
        """Whether the kernel's measured times, of arrays as their neighbours leave them, are those of p."""
        return True

    # ---- neighbours
    def timed_as(self, p: Any, device: Device) -> Any:
        """The problem whose times decide for p."""
        return p

    def features(self, p: Any) -> Features:
        """What decides whether two problems run alike: one of the same kind speaks for another, near by coordinates."""
        raise NotImplementedError


PLANNERS: dict[str, Planner] = {}  # by op, as `ops.py` says


def disabled(op: str, rows: bool = False) -> bool:
    """Whether JAXCONV_DISABLE (conv, dense, batchnorm, groupnorm, layernorm, pool, squeeze_excite, several with commas,
    or all) names the op. A layer-norm, the ops of a group-norm with `rows`, is both."""
    names = {name.strip() for name in os.environ.get("JAXCONV_DISABLE", "").split(",")}
    return bool(names & {PLANNERS[op].group or op, op, "all", *["layernorm"] * rows})


def disabled_text() -> str:
    return f"JAXCONV_DISABLE={os.environ['JAXCONV_DISABLE']}"


XLA_ASKED = "implementation='xla' was asked for"
NOTHING = "there is nothing to compute"
PARTITIONED = "XLA splits this program over devices, and would gather the arrays for a call of jaxconv's"
CUDA_ONLY = "it exists on CUDA only"
NO_SUCH_KERNEL = "there is no such kernel"


def asked(p: Any) -> str:
    return f"algorithm='{p.algorithm}'" if p.algorithm else "implementation='native'"


def calls(name: str, sentence: str) -> Callable[..., Plan]:
    """Plans of calls that have plans of their own, by their name: "two", "a convolution, then an add"."""

    def plan(why: str, candidates: tuple[Candidate, ...] = ()) -> Plan:
        return Plan("calls", f"{sentence}: {why}", name, candidates=candidates)

    return plan


def plans_of(made: Iterable[Plan | str]) -> Iterator[Plan]:
    return (plan for plan in made if isinstance(plan, Plan))


def vector(dtype: str) -> int:
    """Elements in 16 bytes."""
    return 8 if dtype != "float32" else 4


def log2(*extents: int) -> tuple[float, ...]:
    return tuple(math.log2(max(extent, 1)) for extent in extents)

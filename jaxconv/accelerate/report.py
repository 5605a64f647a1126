"""What `accelerate` found in a function, and what became of it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import jax


@dataclasses.dataclass(frozen=True)
class Finding:
    """One convolution, product or batch-norm in a traced function, and what became of it."""

    what: str  # "conv", "dense", "batchnorm"
    shapes: str
    fused: str  # what the call took in: "conv + bias + relu"; empty where the operation was left
    why: str  # it was left; empty where it was replaced
    where: str  # the name scopes: for Flax the module's path


class Report(list[Finding]):
    """A list of findings that prints as a table."""

    @property
    def replaced(self) -> list[Finding]:
        return [finding for finding in self if finding.fused]

    @property
    def left(self) -> list[Finding]:
        return [finding for finding in self if not finding.fused]

    def __str__(self) -> str:
        rows = [("where", "operation", "became")]
        for finding in self:
            became = finding.fused or f"left as it was: {finding.why}"
            rows.append((finding.where or "-", f"{finding.what} {finding.shapes}", became))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


@dataclasses.dataclass(eq=False)
class _Listener:
    report: Report = dataclasses.field(default_factory=Report)


# Part of the key of jit's caches: inside it every function is traced anew, those under jit too.
LISTENER = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def listening() -> Iterator[Report]:
    """A report that gathers what accelerated functions find while they are traced inside the context."""
    listener = _Listener()
    with LISTENER(listener):
        yield listener.report

"""What `accelerate` found in a function, and what became of it."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterable, Iterator

import jax

from jaxconv.joints import told


@dataclasses.dataclass(frozen=True)
class Finding:
    """One operation that is looked for in a traced function, and what became of it."""

    # "conv", "dense", "batchnorm", "groupnorm", "layernorm", "max_pool", "upsampling", "squeeze_excite"; "activation"
    # where one stays behind a call
    what: str
    shapes: str
    fused: str  # what the call took in: "conv + bias + relu", "wgrad"; empty where the operation was left
    why: str  # it was left, or could be part of a call that takes in more; else empty
    where: str  # the name scopes: for Flax the module's path


# Said of what belongs to a gradient: "a weight gradient, ...".
GRADIENT = "taken inside the function: accelerate the loss, before its gradient is taken, and more is fused"
GRADIENTS = {
    "dgrad": f"an input gradient, {GRADIENT}",
    "wgrad": f"a weight gradient, {GRADIENT}",
    "max_pool's gradient": "taken inside the function: accelerate the loss, before its gradient is taken",
}


OF_A_CALL = "That is what a call runs. jaxconv.explain(jax.grad(f)) tells the program with its gradients."


class Report(list[Finding]):
    """A list of findings that prints as a table, and `notes`: sentences about the function as a whole.

    `regions` lists the programs of the new calls, before and after rules rewrite them for the default device, with the
    milliseconds that plans know of (as `jaxconv.explain` does for gradients).
    """

    def __init__(self, findings: Iterable[Finding] = (), notes: Iterable[str] = (), already: int = 0):
        super().__init__(findings)
        self.notes = list(notes)
        self.already = already  # calls of jaxconv's that f makes itself
        self.regions: list[told.Region] = []

    @property
    def replaced(self) -> list[Finding]:
        return [finding for finding in self if finding.fused]

    @property
    def left(self) -> list[Finding]:
        return [finding for finding in self if not finding.fused]

    def extend(self, findings: Iterable[Finding]) -> None:
        super().extend(findings)
        if isinstance(findings, Report):
            self.notes += findings.notes
            self.already += findings.already

    def finish(self) -> None:
        """Adds what is to be said of the whole."""
        if not self and self.already:
            self.notes.append(f"nothing is left to replace: the function calls jaxconv already (calls: {self.already})")
        elif not self:
            self.notes.append(
                "nothing was found: the function has no convolution, dense layer, batch-norm or max-pooling in it"
            )

    def __str__(self) -> str:
        rows = [("where", "operation", "became")]
        for finding in self:
            became = finding.fused or "left as it was"
            became += f": {finding.why}" if finding.why else ""
            rows.append((finding.where or "-", f"{finding.what} {finding.shapes}", became))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        text = "\n".join([*(lines if self else []), *self.notes])
        return "\n\n".join([text, *told.texts(self.regions), *[OF_A_CALL] * bool(self.regions)])


LISTENER: contextvars.ContextVar[Report | None] = contextvars.ContextVar("jaxconv_listener", default=None)

# Part of the key of jit's caches: inside `listening` every function is traced anew, those under jit too. JAX keeps the
# traces, so there is no key before somebody accelerates a function: until then no cache holds one.
_KEY = jax.make_user_context(default_value=None)
_heard = False


def heard_from_now_on() -> None:
    """For whoever makes a function that says to listeners what it found."""
    global _heard
    _heard = True


@contextlib.contextmanager
def listening() -> Iterator[Report]:
    """A report that gathers what accelerated functions find while they are traced inside the context."""
    report = Report()
    token = LISTENER.set(report)
    try:
        with _KEY(object()) if _heard else contextlib.nullcontext():
            yield report
    finally:
        LISTENER.reset(token)


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """As outside `listening`, for what is traced inside the context."""
    token = LISTENER.set(None)
    try:
        with _KEY(None):
            yield
    finally:
        LISTENER.reset(token)

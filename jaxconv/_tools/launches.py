"""How many kernels a compiled function launches a call, and how many CUDA graphs hold them.

Since XLA makes CUDA graphs of thunks, what it runs is in its dump of these: a line each, what is inside one (a graph's,
a loop's) indented below it. Where there is no such dump (a CPU, another XLA) the compiled HLO is read, in which an
older XLA calls a graph as a computation named command_buffer.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxconv import _problem
from jaxconv._core import compat
from jaxconv._core.types import OfArguments, P
from jaxconv._tools.traced import traced

# Instructions for which nothing runs.
SILENT = frozenset(
    (
        *("add-dependency", "after-all", "async-update", "bitcast", "call", "conditional", "constant", "domain"),
        *("get-dimension-size", "get-tuple-element", "opt-barrier", "parameter"),
        *("partition-id", "replica-id", "tuple", "while"),
    )
)
# Thunks that hold others, or at which the host waits or decides.
_HOLDERS = re.compile(
    r"k(AsyncStart|CommandBuffer|Conditional|Sequential|While|DynamicSlice\w*|\w*Done|WaitForStreams|Host\w*)$"
)


@dataclasses.dataclass(frozen=True)
class Launches:
    """The launches of a compiled function in one call. A launch in a loop or a branch counts once.

    `by_kind` is the number of launches of each kind, "fusion" or "custom-call jaxconv_conv_v2". Each is at least one
    kernel; a custom call may launch several. `graphs` is the number of CUDA graphs, `captured` the number of launches
    that they replay.
    """

    by_kind: Mapping[str, int]
    graphs: int = 0
    captured: int = 0

    @property
    def total(self) -> int:
        return sum(self.by_kind.values())

    @property
    def by_host(self) -> int:
        """The launches that the host makes in a call: the graphs, and the launches that are in no graph."""
        return self.total - self.captured + self.graphs

    def __str__(self) -> str:
        kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(self.by_kind.items(), key=lambda item: (-item[1], item)))
        graphs = (
            f", {self.captured} of them in {self.graphs} CUDA graph{'s' * (self.graphs > 1)}" if self.graphs else ""
        )
        return f"{self.total} launches{graphs}: {kinds or 'nothing runs'}"


def graph_options() -> dict[str, str | int]:
    """XLA's compiler options that make a call replay its launches as CUDA graphs: as one graph, if all can be captured.

    ::

        predict = jax.jit(predict, compiler_options=jaxconv.graph_options())

    By default XLA captures neither cuDNN's convolutions nor sequences of fewer than five launches, so a network is cut
    into as many pieces as it has convolutions. All of jaxconv's calls can be captured. The options help where a call
    waits for launches, that is at small batches. `jaxconv.freeze` sets them by itself there. On other platforms they do
    nothing. jaxlib 0.10.0 cannot capture cuDNN's convolutions.
    """
    kinds = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL" + ",CONVOLUTION" * compat.CAPTURES_CONVOLUTIONS
    return {"xla_gpu_enable_command_buffer": kinds, "xla_gpu_graph_min_graph_size": 1}


def launches(f: Callable[P, Any]) -> OfArguments[P, Launches]:
    """A function that takes f's arguments and returns what the compiled f launches in a call.

    ::

        print(jaxconv.launches(predict)(images))  # how many, of which kinds, and how many in CUDA graphs

    f is compiled for this, even if it is compiled already. On a GPU JAX's persistent cache is not used, because the
    launches are read from a dump that XLA writes while it compiles. XLA's flags (`XLA_FLAGS`, compiler options of a
    jitted f) are the same as when f runs.

    Args:
      f: any JAX function, jitted or not.

    Returns:
      A function of f's arguments, or of `jax.ShapeDtypeStruct`s, that returns a `Launches`: `by_kind`, `total`,
      `graphs`, `captured`, `by_host`.

    Raises:
      TypeError: where f is no function, or compiled already.
    """

    _problem.check_function("launches", f)

    def counted(*args: Any, **kwargs: Any) -> Launches:
        lowered = f.lower(*args, **kwargs) if hasattr(f, "lower") else traced(f, args, kwargs).lower()
        return compiled(lowered)[1]

    return counted


def compiled(lowered: Any, options: Mapping[str, Any] | None = None) -> tuple[Any, Launches]:
    """What `lowered.compile(options)` returns, and its launches."""
    if jax.default_backend() != "gpu":
        made = lowered.compile(dict(options or {}))
        return made, of_hlo(made.as_text())
    with tempfile.TemporaryDirectory(prefix="jaxconv_launches_") as folder, _without_cache():
        made = lowered.compile({**(options or {}), "xla_dump_to": folder})
        found = _thunks(pathlib.Path(folder))
    text = made.as_text()
    return made, of_hlo(text) if found is None else _with_targets(of_thunks(found), text)


def _with_targets(found: Launches, hlo: str) -> Launches:
    """Thunks of custom calls name no target since jaxlib 0.11: the program's text does."""
    kinds = collections.Counter(found.by_kind)
    for target in re.findall(r'custom_call_target="(jaxconv_\w+)"', hlo):
        if kinds["CustomCall"] > 0:
            kinds["CustomCall"] -= 1
            kinds[f"CustomCall {target}"] += 1
    return dataclasses.replace(found, by_kind={kind: n for kind, n in kinds.items() if n})


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """A program out of the persistent cache leaves no dump. (JAX reads once whether there is one.)"""
    held = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", held)
        compilation_cache.reset_cache()


def _thunks(dump: pathlib.Path) -> str | None:
    """The thunks of the largest module in a dump: those of the smallest are what XLA compiled to time kernels."""
    for name in ("_after_thunk_passes", ""):
        found = [path.read_text() for path in dump.glob(f"*thunk_sequence{name}*.txt")]
        if found:
            return max(found, key=len)
    return None


def of_thunks(text: str) -> Launches:
    """The launches in XLA's text of a thunk sequence: "<indent><number>: k<Kind> ..." a line."""
    kinds: collections.Counter[str] = collections.Counter()
    graphs = captured = 0
    inside: int | None = None  # the indent of the graph around
    for line in text.splitlines():
        found = re.match(r"(\s*)(?:\d+:\s*)?k([A-Z]\w*)(.*)", line)
        if found is None:
            continue
        indent, kind, rest = len(found[1]), found[2], found[3]
        if inside is not None and indent <= inside:
            inside = None
        if kind == "CommandBuffer" and inside is None:
            graphs, inside = graphs + 1, indent
        if _HOLDERS.match(f"k{kind}"):
            continue
        target = re.search(r"jaxconv_\w+", rest) if kind == "CustomCall" else None
        kinds[f"{kind} {target[0]}" if target else kind] += 1
        captured += inside is not None
    return Launches(dict(kinds), graphs, captured)


def of_hlo(text: str) -> Launches:
    """The launches in the text of a compiled HLO module."""
    computations = _computations(text)
    kinds: collections.Counter[str] = collections.Counter()
    graphs = captured = 0

    def walk(name: str, in_graph: bool) -> None:
        nonlocal graphs, captured
        for opcode, line in computations.get(name, ()):
            if opcode not in SILENT and not opcode.endswith("-done"):
                target = re.search(r'custom_call_target="([^"]*)"', line)
                kinds[f"{opcode} {target[1]}" if target else opcode.removesuffix("-start")] += 1
                captured += in_graph
                continue
            if opcode not in ("call", "conditional", "while"):
                continue
            listed = re.search(r"branch_computations=\{([^}]*)\}", line)
            called = [name.strip().lstrip("%") for name in listed[1].split(",")] if listed else []
            called += re.findall(r"\b(?:to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)", line)
            for inner in called:
                is_graph = inner.startswith("command_buffer") and not in_graph
                graphs += is_graph
                walk(inner, in_graph or is_graph)

    walk("", False)
    return Launches(dict(kinds), graphs, captured)


def _computations(text: str) -> dict[str, list[tuple[str, str]]]:
    """{name: [(opcode, line)]}; the entry's name is empty."""
    found: dict[str, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] | None = None
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+)?.*\{$", line) if line[:1].strip() else None
        if line.startswith("}"):
            current = None
        elif head is not None and not line.startswith("HloModule"):
            current = found.setdefault("" if head[1] else head[2], [])
        elif current is not None:
            # The type comes first, and may be a tuple: the opcode is the first word right before a parenthesis.
            opcode = re.search(r" = .*? ([a-z][a-z0-9\-]*)\(", line)
            if opcode is not None:
                current.append((opcode[1], line))
    return found

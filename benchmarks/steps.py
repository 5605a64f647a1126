"""What the time of a training step is made of: a profile by kinds of work, and the least time that the model takes.

A profile's events name the instructions of the compiled program; the program's text says what each one is, and from
where in the model it comes. A GPU's kernels without an instruction (those of a CUDA graph) are known by their names.
"""

from __future__ import annotations

import collections
import dataclasses
import glob
import math
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax

from benchmarks.cases import OPS
from benchmarks.limits import Ceilings
from jaxconv._core import primitives
from jaxconv._tools import launches

# In the order of the tables and figures. exchange: between devices. elementwise: sums over elements too, and
# squeeze-and-excitation, which XLA makes of such.
KINDS = ("convolution", "product", "norm", "pool", "elementwise", "copies", "exchange", "other")

# Targets of custom calls, and kernels' names: ours (mangled or not), cuDNN's, cuBLAS's, XLA's own, PyTorch's.
_NAMES = (
    ("norm", r"jaxconv_(batch|group)norm|jaxconv(::|\d)cuda\d*(::|\d+)(batch|group)norm"),
    ("norm", r"cudnn\$norm|bn_fw|bn_bw|(batch|group|layer)_?norm|GroupNorm|LayerNorm|RowwiseMoments"),
    ("product", r"jaxconv_(dense|matmul)|jaxconv(::|\d)cuda\d*((::|\d+)dense|.*Sm90(Gradient|Gated))"),
    ("product", r"__cublas|onednn\$matmul"),
    ("pool", r"jaxconv_(max|avg)_pool|jaxconv(::|\d)cuda\d*(::|\d+)pool"),
    ("elementwise", r"jaxconv_squeeze|jaxconv(::|\d)cuda\d*(::|\d+)squeeze"),
    ("convolution", r"jaxconv_conv|jaxconv(::|\d)cuda|cudnn\$conv|onednn\$convolution|[fdw]grad|fprop|conv2d|convolve"),
    ("convolution", r"implicit_(con|gemm)|cudnn.*conv|winograd|nchwToNhwc|nhwcToNchw"),
    ("convolution", r"conv_depthwise|^triton_tem\w*convolution"),
    ("product", r"gemm|cutlass|cublas|^nvjet|splitKreduce|^triton_tem"),
    ("exchange", r"nccl|AllReduce|AllGather|SendRecv"),
    ("copies", r"^(Memcpy|Memset|MemcpyD2D|wrapped_(copy|transpose|convert))|^copy|^transpose"),
    ("copies", r"^triton_poi_fused_(_to_copy|clone|copy|cat|constant_pad_nd|_)+\d*$"),
    ("pool", r"select_and_scatter|reduce_window|max_pool"),
    ("elementwise", r"fusion|^wrapped_|^input_|^loop_|^reduce|^triton_|at::native"),
)
_PATTERNS = [(kind, re.compile(pattern)) for kind, pattern in _NAMES]

_POOL = {"reduce-window", "select-and-scatter"}
_EXCHANGE = {"all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter", "collective-broadcast"}
# What moves values, changes their type, or makes none
_COPIES = {
    *("copy", "transpose", "reshape", "bitcast", "bitcast-convert", "convert", "broadcast", "slice", "concatenate"),
    *("pad", "reverse", "dynamic-slice", "dynamic-update-slice", "gather", "tuple", "get-tuple-element"),
    *("parameter", "constant", "iota"),
}
_SLICES = {"slice", "dynamic-slice", "gather"}
_BITS = {"pred": 8, "bf16": 16, **{f"{kind}{bits}": bits for kind in "fsu" for bits in (8, 16, 32, 64)}}
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"(?:^|\s)([a-z][a-z0-9\-]*)\(")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of a compiled program."""

    opcode: str
    target: str = ""  # of a custom call
    scope: str = ""  # where in the model it comes from: JAX's name scopes
    called: tuple[str, ...] = ()  # computations
    type: str = ""  # of its result
    operands: tuple[str, ...] = ()  # instructions; of a parameter its number
    root: bool = False  # of its computation


class Text:
    """A compiled program's text, by instruction."""

    def __init__(self, text: str):
        self.instructions: dict[str, Instruction] = {}
        self._inside: dict[str, list[str]] = {}  # a computation's instructions
        self._entry = ""
        inside: list[str] = []
        for line in text.splitlines():
            if match := _COMPUTATION.match(line):
                inside = self._inside.setdefault(match[1], [])
                self._entry = match[1] if line.startswith("ENTRY") else self._entry
            elif (match := _INSTRUCTION.match(line)) and (opcode := _OPCODE.search(match[2])):
                target = re.search(r'custom_call_target="([^"]*)"', line)
                scope = re.search(r'op_name="([^"]*)"', line)
                called = re.findall(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)", line)
                texts = (target[1] if target else "", scope[1] if scope else "")
                type_, rest = match[2][: opcode.start()], match[2][opcode.end() :]
                operands = re.findall(r"%([\w.\-]+)", rest[: _closing(rest)])
                if opcode[1] == "parameter":
                    operands = [rest[: _closing(rest)]]
                more = type_, tuple(operands), "ROOT " in line[: line.index("=")]
                self.instructions[match[1]] = Instruction(opcode[1], *texts, tuple(called), *more)
                inside.append(match[1])

    def inside(self, name: str) -> Iterator[str]:
        """The instructions of what an instruction calls, at any depth."""
        for computation in self.instructions[name].called:
            for inner in self._inside.get(computation, ()):
                yield inner
                yield from self.inside(inner)

    def launched(self) -> Iterator[str]:
        """The instructions of the program that run something; what is in a loop once."""
        front = [self._entry]
        while front:
            for name in self._inside[front.pop()]:
                one = self.instructions[name]
                if one.opcode in ("call", "while", "conditional"):
                    front += [inner for inner in one.called if inner in self._inside]
                elif one.opcode not in launches.SILENT:
                    yield name

    def traffic(self, name: str) -> int:
        """The bytes that an instruction reads and writes.

        Of an array out of which a fusion takes slices alone these count; of one that is updated in place what is new.
        """
        one = self.instructions[name]
        names = [i for called in one.called for i in self._inside.get(called, ())] if one.opcode == "fusion" else []
        fused = {i: self.instructions[i] for i in names}
        parameters = {int(part.operands[0]): i for i, part in fused.items() if part.opcode == "parameter"}
        update = next((p for p in fused.values() if p.root and p.opcode == "dynamic-update-slice"), None)
        total = size_of(one.type if update is None else fused[update.operands[1]].type)
        for place, operand in enumerate(one.operands):
            size = size_of(self.instructions[operand].type) if operand in self.instructions else 0
            parameter = parameters.get(place)
            users = [part for part in fused.values() if parameter in part.operands]
            if update is not None and users == [update] and update.operands[0] == parameter:
                size = 0
            elif users and all(user.opcode in _SLICES for user in users):
                size = min(size, sum(size_of(user.type) for user in users))
            elif one.opcode in _SLICES:
                size = min(size, size_of(one.type))
            total += size
        return total

    def kind(self, name: str) -> str:
        one = self.instructions[name]
        if one.opcode == "custom-call":
            return kind_of_kernel(one.target)
        parts = [one, *(self.instructions[inner] for inner in self.inside(name))]
        opcodes = {part.opcode.removesuffix("-start").removesuffix("-done") for part in parts}
        if opcodes & _EXCHANGE:
            return "exchange"
        if "convolution" in opcodes or any("conv_general_dilated" in part.scope for part in parts[:1]):
            return "convolution"
        if "dot" in opcodes:
            return "product"
        if opcodes & _POOL or any(
            "select_and_scatter" in part.scope or "reduce_window" in part.scope for part in parts
        ):
            return "pool"
        if any(re.search(r"[Nn]orm(_\d+)?(/|$)", part.scope) for part in parts):
            return "norm"
        if opcodes - {"fusion", "call"} <= _COPIES:
            return "copies"
        return "other" if one.opcode in ("while", "conditional", "infeed", "outfeed", "rng", "sort") else "elementwise"

    def find(self, event: str) -> str | None:
        """The instruction that an event is named after; XLA's kernels have its name with _ for each dot."""
        if event in self.instructions:
            return event
        return self._kernels.get(event)

    @property
    def _kernels(self) -> Mapping[str, str]:
        if not hasattr(self, "_by_kernel"):
            self._by_kernel = {re.sub(r"[.\-]", "_", name): name for name in self.instructions}
        return self._by_kernel


def _closing(text: str) -> int:
    """Where the bracket ends that is open at the begin."""
    depth = 1
    for i, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if not depth:
            return i
    return len(text)


def size_of(type_: str) -> int:
    """Bytes of a type as XLA writes it, "(bf16[8,4]{1,0}, u8[0]{0})"."""
    return sum(
        _BITS.get(name, 0) // 8 * math.prod(map(int, filter(None, extents.split(","))))
        for name, extents in re.findall(r"(\w+)\[([\d,]*)\]", type_)
    )


def kind_of_kernel(name: str) -> str:
    """Of a kernel, or of a custom call's target, by its name."""
    return next((kind for kind, pattern in _PATTERNS if pattern.search(name)), "other")


def by_kind(events: Iterable[tuple[str, str, float]], text: Text) -> dict[str, float]:
    """{kind: the sum} of events (instruction or "", kernel's name, duration)."""
    total: collections.Counter[str] = collections.Counter()
    events = list(events)
    named = {name for instruction, _, _ in events if (name := text.find(instruction))}
    for instruction, kernel, duration in events:
        name = text.find(instruction) or text.find(kernel)
        if name is None or text.instructions[name].opcode in ("call", "while", "conditional"):
            if name is not None and named.intersection(text.inside(name)):
                continue  # what it calls has events of its own
            if name is None:
                total[kind_of_kernel(kernel)] += duration
                continue
        total[text.kind(name)] += duration
    return {kind: total[kind] for kind in KINDS if total[kind]}


def events_of(folder: str) -> tuple[list[tuple[str, str, float]], int]:
    """(instruction or "", name, milliseconds) of what ran on devices while a profile was taken; how many devices."""
    events, devices = [], set()
    for path in glob.glob(f"{folder}/**/*.xplane.pb", recursive=True):
        for plane in jax.profiler.ProfileData.from_file(path).planes:
            on_gpu = plane.name.startswith("/device:")
            for line in plane.lines:
                if on_gpu and not line.name.startswith("Stream"):
                    continue  # sums of what the streams ran
                for event in line.events:
                    stats = {name: value for name, value in event.stats if name in ("hlo_op", "device_ordinal")}
                    instruction = str(stats.get("hlo_op", ""))
                    if on_gpu or instruction:
                        events.append((instruction, event.name, event.duration_ns * 1e-6))
                        devices.add(plane.name if on_gpu else stats.get("device_ordinal", 0))
    return events, max(1, len(devices))


def profiled(run: Callable[[], None], text: str) -> dict[str, float] | None:
    """Milliseconds of each kind on a device while `run` runs; on a CPU of all its threads together.

    None where the profiler saw nothing: another one is attached, or may not be.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        events, devices = events_of(folder)
    kinds = by_kind(events, Text(text))
    return {kind: ms / devices for kind, ms in kinds.items()} or None


# ----------------------------------------------------------------------------------------------------------------------
# The least time


def least_ms(calls: Iterable[Any], parameters: int, top: Ceilings) -> dict[str, float]:
    """The least time of a step by kind of work: `jaxconv.explain`'s calls of it, and the update of so many float32
    parameters, which is elementwise.

    Each call takes the longer of its operations at the rate of the unit that does them and of its arrays, each read or
    written once, at the rate at which memory copies. What else stands between the calls counts nothing, as if it were
    fused into them: average pooling, norms of other axes, activations of their own.
    """
    least: collections.Counter[str] = collections.Counter()
    for call in calls:
        if call.plan.implementation == "calls":  # of others in the list
            continue
        flops, size, rate = _work(call.op, call.problem, top)
        least[kind_of_kernel(f"jaxconv_{call.op}")] += call.count * max(flops / rate, size / top.bandwidth) * 1e3
    # SGD with momentum: parameter, momentum and gradient read, the first two written
    least["elementwise"] += 5 * 4 * parameters / top.bandwidth * 1e3
    return {kind: least[kind] for kind in KINDS if least[kind]}


def _work(op: str, p: Any, top: Ceilings) -> tuple[float, float, float]:
    """(operations, bytes, operations a second)."""
    case = next(case for case in OPS.values() if case.call_problem and isinstance(p, case.call_problem))
    size = case.call_bytes(op, p, {"float32": 4, "float64": 8}.get(p.dtype, 2))
    if not case.products:
        return 0.0, size, top.f32
    short = {"float32": "f32", "float64": "f32"}.get(p.dtype, "bf16")
    highest = jax.lax.Precision.HIGHEST in (p.precision if isinstance(p.precision, tuple) else (p.precision,))
    depthwise = getattr(p, "groups", 1) > 1 and p.in_channels == p.groups
    rate = top.lanes if depthwise else top.rate(short, "highest" if highest else None)
    flops = next(kernel.flops for kernel in primitives.KERNELS.values() if kernel.name == op)
    return flops(p), size, rate

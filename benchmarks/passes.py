"""`python -m benchmarks passes`: what XLA does between the calls of a program, in bytes.

    python -m benchmarks passes --model ddpm --ways flax,accelerate
    python -m benchmarks passes --model resnext50 --gpu "NVIDIA H100 80GB HBM3" --least 50
    python -m benchmarks passes --fleet --model vae --ways plain,accelerate

The step of `python -m benchmarks train`, or a program of `... fleet`, is compiled for a GPU, which need not be here:
JAX's CUDA plugin compiles without one (`jax[cuda13]` installed, JAX_PLATFORMS=cpu), and jaxconv's CUDA module
(JAXCONV_CUDA=ON) says what its kernels are. XLA then times nothing, and chooses its libraries' kernels blindly; what it
fuses, copies and pads is what it does on the GPU.

Each pass (an instruction of the program that is neither a convolution, a product nor a call) is listed with what it
reads and writes, equal ones together, and the least time of all: bytes over the rate at which the GPU copies. Of an
array that is sliced the slice counts.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from benchmarks import fleet, fleet_models, fleet_report, limits, steps, train, training
from benchmarks.fleet_models.model import Model
from jaxconv import _plan
from jaxconv._core import native

Tree = Any


@dataclasses.dataclass(frozen=True)
class Target:
    """What XLA and jaxconv ask of a GPU before it is there."""

    multiprocessors: int
    capability: tuple[int, int]
    memory: int  # bytes
    bandwidth: float  # bytes a second, by its data sheet
    l2: int
    copies: float  # bytes a second, read and written

    def config(self, kind: str) -> str:
        """As XLA's GpuTargetConfigProto."""
        major, minor = self.capability
        return f"""
            platform_name: "CUDA"
            device_description_str: "{kind}"
            dnn_version_info {{ major: 9 minor: 10 }}
            runtime_version {{ major: 13 }}
            gpu_device_info {{
              threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
              shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
              registers_per_core_limit: 65536 registers_per_block_limit: 65536
              core_count: {self.multiprocessors} fpus_per_core: 128 clock_rate_ghz: 1.98
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              memory_bandwidth: {self.bandwidth:.0f} l2_cache_size: {self.l2} device_memory_size: {self.memory}
              cuda_compute_capability {{ major: {major} minor: {minor} }}
            }}"""


TARGETS = {
    "NVIDIA H200": Target(132, (9, 0), 150 * 10**9, 4.8e12, 60 * 2**20, limits.KNOWN["NVIDIA H200"].bandwidth),
    # Nine tenths of what the data sheet says, as on an H200
    "NVIDIA H100 80GB HBM3": Target(132, (9, 0), 85 * 10**9, 3.35e12, 50 * 2**20, 3.0e12),
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks passes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="resnet50", metavar="NAME", help="of train's, with --fleet of the fleet's")
    parser.add_argument("--fleet", action="store_true", help="a program of the fleet")
    parser.add_argument(
        "--ways", type=lambda text: text.split(","), help="(flax,accelerate; --fleet: plain,accelerate)"
    )
    parser.add_argument("--gpu", default="NVIDIA H200", choices=TARGETS)
    parser.add_argument("--batch", type=int, metavar="N", help="images a step (as train's, or the fleet's)")
    parser.add_argument("--dtype", choices=training.DTYPES, help="of the computation (bf16; the fleet's own)")
    parser.add_argument("--least", type=float, default=50.0, metavar="MB", help="of the passes that are listed (50)")
    parser.add_argument("--small", action="store_true", help="a shrunk model")
    args = parser.parse_args(argv)
    names = list(fleet_models.models() if args.fleet else training.models())
    if args.model not in names:
        parser.error(f"--model {args.model}: expected one of {', '.join(names)}")
    if why := native.missing("cuda"):
        parser.error(f"it takes jaxconv's CUDA module, to know its kernels: {why}")
    if args.fleet:
        args.ways = args.ways or ["plain", "accelerate"]
        if unknown := set(args.ways) - set(fleet.WAYS):
            parser.error(f"--ways {','.join(sorted(unknown))}: the fleet has {', '.join(fleet.WAYS)}")
        return args
    args.ways = args.ways or ["flax", "accelerate"]
    found = training.of_fleet(args.model)
    args.dtype = args.dtype or (found.dtype if found else "bf16")
    given = ["--model", args.model, "--ways", ",".join(args.ways), "--dtype", args.dtype]
    given += ["--batch", str(args.batch)] if args.batch else []
    asked = train.parse([*given, "--small" if args.small else "--no-small"])
    if "torch" in asked.ways:
        parser.error("--ways torch: it is no program of XLA's")
    return argparse.Namespace(**{**vars(asked), **vars(args), "batch": asked.batch})


@contextlib.contextmanager
def compiling_for(kind: str) -> Iterator[Callable[[Asked], Any]]:
    """A function that compiles a program for a GPU of `kind`, as jaxconv plans for it."""
    from jax.experimental import topologies

    target = TARGETS[kind]
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=target.config(kind), topology="1x1x1"
    )
    there = jax.sharding.SingleDeviceSharding(topology.devices[0])

    def placed(a: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(a.shape, jax.dtypes.canonicalize_dtype(a.dtype), sharding=there)

    def compiled(asked: Asked) -> Any:
        step = jax.jit(asked.function, donate_argnums=0 if asked.has_state else None)
        return step.lower(*jax.tree.map(placed, asked.arguments)).compile()

    with _plan.Device.assumed(_plan.Device("cuda", kind, target.capability, target.multiprocessors)):
        yield compiled


# ----------------------------------------------------------------------------------------------------------------------
# What is said of a program


@dataclasses.dataclass(frozen=True)
class Pass:
    """Equal passes."""

    kind: str
    bytes: int  # of one
    text: str  # what it writes and reads
    scope: str  # of the first
    count: int


def _without_layout(type_: str) -> str:
    return re.sub(r"\{[^}]*\}", "", type_)


def passes(text: steps.Text) -> list[Pass]:
    """The largest first, of all equal ones together."""
    counts: collections.Counter[tuple[str, int, str]] = collections.Counter()
    scopes: dict[tuple[str, int, str], str] = {}
    for name in text.launched():
        one, kind = text.instructions[name], text.kind(name)
        if one.target or kind in ("convolution", "product"):
            continue
        read = (text.instructions[operand].type for operand in one.operands if operand in text.instructions)
        large = [_without_layout(of) for of in read if steps.size_of(of) >= 2**16]
        key = kind, text.traffic(name), f"{_without_layout(one.type)} <- {', '.join(large) or '...'}"
        counts[key] += 1
        scopes.setdefault(key, one.scope)
    every = [Pass(*key, scopes[key], count) for key, count in counts.items()]
    return sorted(every, key=lambda one: -one.bytes * one.count)


def lines(way: str, text: steps.Text, target: Target, least: float) -> Iterator[str]:
    every = passes(text)
    of_kind: collections.Counter[str] = collections.Counter()
    for one in every:
        of_kind[one.kind] += one.bytes * one.count
    total = sum(of_kind.values())
    calls = [name for name in text.launched() if text.instructions[name].target]
    count, of_calls = sum(one.count for one in every), sum(map(text.traffic, calls))
    rate = f"{total / target.copies * 1e3:.2f} ms at {target.copies / 1e12:.1f} TB/s"
    yield f"{way}: {count} passes, {total / 1e9:.2f} GB, {rate}; beside {len(calls)} calls of {of_calls / 1e9:.1f} GB"
    yield "  " + ", ".join(f"{kind} {of_kind[kind] / 1e9:.2f} GB" for kind in steps.KINDS if of_kind[kind])
    for one in every:
        if one.bytes * one.count >= least * 1e6:
            each = f"{one.count} x {one.bytes / 1e6:.1f} MB"
            yield f"  {each:>15}  {one.kind:<11} {one.text[:130]}  {one.scope[-60:]}"


# ----------------------------------------------------------------------------------------------------------------------
# The command


@dataclasses.dataclass(frozen=True)
class Asked:
    """A program that is to be compiled."""

    way: train.Way
    function: Callable[..., Any]
    arguments: Sequence[Any]  # arrays, or their shapes
    has_state: bool  # the first argument, which a step uses up


def of_train(args: argparse.Namespace) -> Iterator[Asked]:
    params, stats = jax.eval_shape(functools.partial(train.initial, args), training.batch(args, 1)[0])
    for name in args.ways:
        way = train.Way.make(name, args)
        yield Asked(way, train.train_step(way.loss), train.shapes(args, params, stats), True)


def model_of(args: argparse.Namespace) -> Model:
    """The fleet's, as --batch and --dtype ask for it."""
    model = fleet_models.models()[args.model]
    size = model.size(args.small)
    size = dataclasses.replace(size, batch=args.batch or size.batch)
    return dataclasses.replace(model, full=size, dtype=args.dtype or model.dtype)


def of_fleet(model: Model, ways: Sequence[str]) -> Iterator[Asked]:
    case = fleet.Case.make(model, small=False)
    params, stats, data = case.net.params, case.net.stats, case.placed
    for name in ways:
        if model.use == "train":
            way = fleet.learning(name, case)
            state = params, params, stats
            yield Asked(way, train.train_step(way.loss, way.rate), (state, data.images, data.labels), True)
        else:
            answer = fleet.answering(name, case)
            yield Asked(train.Way(name, answer), answer, (params, stats, data.images), False)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    say = functools.partial(print, flush=True)
    if args.fleet:
        model = model_of(args)
        title, every = f"{args.model}, {fleet_report.size_of(model, model.full)}", of_fleet(model, args.ways)
    else:
        title, every = f"{args.model}, {args.batch} images of {args.image}, {args.dtype}", of_train(args)
    say(f"{title}; compiled for one {args.gpu} by jax {jax.__version__}")
    for asked in every:
        with compiling_for(args.gpu) as compiled, asked.way.lowered():
            program = compiled(asked)
        for line in lines(asked.way.name, steps.Text(program.as_text()), TARGETS[args.gpu], args.least):
            say(line)
        say(f"  {train.memory_bytes(program) / 2**30:.2f} GiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())

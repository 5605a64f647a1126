"""`python -m benchmarks train`: whole training steps of one model, several ways, on one device and on several.

    python -m benchmarks train --model resnet50 --batch 256 --json
    python -m benchmarks train --model resnet50 --devices 1,2,4 --ways flax,accelerate --batch 512
    python -m benchmarks train --model resnet50 --devices 1,2,4 --ways flax,accelerate --split batch
    python -m benchmarks train --model resnet50 --devices 1,2,4 --split batch --statistics own
    python -m benchmarks train --model resnet50 --ways flax,accelerate,torch
    python -m benchmarks train --model resnet18_32,impala --ways flax,accelerate,torch --json
    python -m benchmarks train --model unet3d --devices 1,2,4 --ways flax,accelerate --split depth

Ways: `flax`, its own layers, which XLA compiles; `import`, the same model with jaxconv.linen's layers; `fused`, with
activations and residual adds as arguments of these; `enable`, the untouched Flax model under jaxconv.enable;
`accelerate`, through jaxconv.accelerate; and where it is named `torch`, the same model in PyTorch, on one device, with
torch.compile.
Several models run one after the other, and each is recorded in a file of its own.
The same initial parameters, the same images, SGD with momentum. `unet3d` segments volumes, `ddpm` finds the noise in
images, `impala` plays games, the others classify images. `resnet18_32` and `impala` are the fleet's, at its sizes.

Several devices share the images of a step (--batch is of all together), have --batch each (--split batch, weak
scaling), or share each volume along its depth (--split depth, strong scaling: one volume by default). Batch-norms in
training measure all devices' images, as jit says; with --statistics own each device measures its own, and gradients and
running statistics are averaged, as other frameworks' data parallelism does it (the loss inside jax.shard_map).

First the losses are compared. Layers that round at other places do not give the same losses, so the yardstick is the
first way's own sensitivity: how much its losses move when each parameter is off by a rounding. Then steps are queued,
each fed with the last one's results, and the host waits at the end. A profile of a few more says how long each kind of
work took; beside it stand the model's roofline (the least time that its convolutions, products and batch-norms allow),
the memory of a device that the compiler asks for, and the time to compile.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import jaxconv
from benchmarks import limits, record, steps, torch_contender, torch_train, training
from benchmarks.training import DTYPES, LEARNING_RATE, MOMENTUM, PROFILED, TASKS, Placed, Tree, batch, models, of_fleet
from jaxconv.accelerate import accelerate

WAYS = ("flax", "import", "fused", "enable", "accelerate")  # JAX's
OTHERS = ("torch",)  # who wants them names them
DRAWS = 3  # of perturbed parameters
# A way may differ from the first by this many times the largest of the draws. They round each parameter once; another
# order of fusion also rounds, or spares, every activation and every gradient: three times as many places.
ALLOWED = 4.0


# Batch and image of a model that is not the fleet's, where not 256 and 224
SIZES = {"unet3d": (8, 64), "ddpm": (64, 64)}


def defaults(model: str, small: bool) -> tuple[int, int, str]:
    """Batch, image and type of the computation."""
    if found := of_fleet(model):
        size = found.size(small)
        return size.batch, size.shape[0], found.dtype
    images, image = SIZES.get(model, (256, 224))
    if small:
        images, image = 8, 16 if model in TASKS else 32
    return images, image, "bf16" if jax.default_backend() == "gpu" else "f32"


def parse(argv: list[str] | None) -> argparse.Namespace:
    gpu = jax.default_backend() == "gpu"
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="resnet50", choices=models(), help="one, or several with commas")
    parser.add_argument("--ways", default=list(WAYS), type=lambda text: text.split(","), help=", ".join(WAYS + OTHERS))
    parser.add_argument("--batch", type=int, metavar="N", help="images a step (the model's; resnet50: 256, small 8)")
    parser.add_argument("--image", type=int, metavar="N", help="height and width, and a volume's depth (224)")
    parser.add_argument("--dtype", choices=DTYPES, help="of the computation (bf16 on a GPU, of the fleet's models f32)")
    parser.add_argument(
        "--devices", default=[1], type=lambda text: [int(n) for n in text.split(",")], help="one or several numbers"
    )
    parser.add_argument("--split", choices=("batch", "depth"), help="images a device, or volumes over all devices")
    parser.add_argument("--statistics", choices=("all", "own"), default="all", help="whose images batch-norms measure")
    parser.add_argument("--profile", action=argparse.BooleanOptionalAction, default=True, help="time by kind of work")
    parser.add_argument("--losses", type=int, default=5, metavar="N", help="steps whose losses are compared")
    parser.add_argument("--steps", type=int, metavar="N", help="steps in a sample (20; small: 2)")
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="samples")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="programs compiled at a time")
    parser.add_argument(
        "--cache", metavar="FOLDER", help="keep programs and what XLA tried out there; no times to compile then"
    )
    parser.add_argument("--graphs", action="store_true", help="compile with jaxconv.graph_options()")
    parser.add_argument("--small", action=argparse.BooleanOptionalAction, default=not gpu, help="a shrunk model")
    parser.add_argument("--json", nargs="?", const="auto", metavar="PATH", help="record; alone: in benchmarks/results/")
    args = parser.parse_args(argv)
    images, image, dtype = defaults(args.model, args.small)
    if args.split == "depth":
        images, image = 1, image if args.small else 256
    args.batch, args.image, args.dtype = args.batch or images, args.image or image, args.dtype or dtype
    args.steps = args.steps or (2 if args.small else 20)
    unknown = [way for way in args.ways if way not in WAYS + OTHERS]
    if unknown or not args.ways:
        parser.error(f"--ways {','.join(unknown)}: expected some of {','.join(WAYS + OTHERS)}")
    if "torch" in args.ways and (why := torch_contender.available()):
        parser.error(f"--ways torch: {why}")
    if "torch" in args.ways and 1 not in args.devices:
        parser.error("--ways torch: it takes one device, and --devices has none such")
    for n in args.devices:
        if not 1 <= n <= jax.device_count():
            parser.error(f"--devices {n}: there are {jax.device_count()}")
        if args.split is None and args.batch % n:
            parser.error(f"--batch {args.batch} does not divide over {n} devices")
        if args.split == "depth" and args.image % n:
            parser.error(f"--image {args.image}: its depth does not divide over {n} devices")
    if args.split == "depth" and TASKS.get(args.model) != "segment":
        parser.error(f"--split depth: {args.model} has images without a depth; unet3d has volumes")
    if args.split == "depth" and args.statistics == "own":
        parser.error("--statistics own: devices that share a volume have no images of their own")
    if args.jobs > 1 and max(args.devices) > 1:
        parser.error("--jobs: on GPUs, programs for several devices that compile at the same time have hung")
    if min(args.losses, args.repeat, args.steps, args.jobs) < 1:
        parser.error("--losses, --steps, --repeat and --jobs are at least 1")
    return args


def parse_each(argv: list[str] | None) -> list[argparse.Namespace]:
    """The options for each model that --model names."""
    names = argparse.ArgumentParser(prog="python -m benchmarks train", add_help=False, allow_abbrev=False)
    names.add_argument("--model", default="resnet50")
    given, others = names.parse_known_args(argv)
    each = [parse([*others, "--model", name]) for name in given.model.split(",")]
    if len(each) > 1 and (each[0].json or "").endswith(".json"):
        names.error(f"--json {each[0].json}: it is one file, and each of several models has one: name a folder")
    return each


# ----------------------------------------------------------------------------------------------------------------------
# A way: a loss function


@dataclasses.dataclass(frozen=True)
class Way:
    name: str
    loss: Callable[..., Any]  # (params, stats, images, labels) -> (loss, stats)
    rate: float = LEARNING_RATE

    @classmethod
    def make(cls, name: str, args: argparse.Namespace) -> Way:
        import flax.linen

        import jaxconv.linen

        layers = jaxconv.linen if name in ("import", "fused") else flax.linen
        model = models()[args.model](layers, DTYPES[args.dtype], fused=name == "fused", small=args.small)
        goal = training.goal(args.model)

        def loss(params: Tree, stats: Tree, images: Tree, wanted: Tree) -> tuple[jax.Array, Tree]:
            y, updates = model.apply({"params": params, "batch_stats": stats}, images, mutable=["batch_stats"])
            return goal.loss(y, wanted), updates.get("batch_stats", {})

        return cls(name, accelerate(loss) if name == "accelerate" else loss, training.rate(args.model))

    def lowered(self) -> contextlib.AbstractContextManager[None]:
        """For what is traced and lowered inside."""
        return jaxconv.enabled() if self.name == "enable" else contextlib.nullcontext()


def initial(args: argparse.Namespace, images: Tree) -> tuple[Tree, Tree]:
    """Flax's own initial parameters and statistics: every way starts from them."""
    import flax.linen

    model = models()[args.model](flax.linen, DTYPES[args.dtype], small=args.small)
    # Of this kind, because XLA compiles the default kind's bits for seconds on a CPU, for each shape anew.
    key = jax.random.key(0, impl="unsafe_rbg")
    variables = jax.jit(model.init)(key, jax.tree.map(lambda a: a[:1], images))
    return variables["params"], variables.get("batch_stats", {})


def of_shards(loss: Callable[..., Any], mesh: jax.sharding.Mesh) -> Callable[..., Any]:
    """The mean of the devices' losses and running statistics: each normalises its images with their own statistics."""

    def of_shard(*args: Any) -> tuple[jax.Array, Tree]:
        return jax.lax.pmean(loss(*args), "data")

    whole, shard = PartitionSpec(), PartitionSpec("data")
    return jax.shard_map(of_shard, mesh=mesh, in_specs=(whole, whole, shard, shard), out_specs=whole)


def train_step(loss: Callable[..., Any], rate: float = LEARNING_RATE) -> Callable[..., Any]:
    """(state, images, labels) -> (state, loss), with state = (params, momenta, stats)."""

    def step(state: Tree, images: Tree, labels: Tree) -> tuple[Tree, jax.Array]:
        params, momenta, stats = state
        (value, stats), gradients = jax.value_and_grad(loss, has_aux=True)(params, stats, images, labels)
        momenta = jax.tree.map(lambda m, g: MOMENTUM * m + g, momenta, gradients)
        params = jax.tree.map(lambda p, m: p - rate * m, params, momenta)
        return (params, momenta, stats), value

    return step


# ----------------------------------------------------------------------------------------------------------------------
# On devices


def memory_bytes(compiled: Any) -> int:
    """Of a device, as the compiler lays it out: state, images and what lives in between."""
    memory = compiled.memory_analysis()
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return int(kept + memory.temp_size_in_bytes)


class Program:
    """One way compiled for some devices; where there is a pool, by one of its threads while others are traced."""

    def __init__(
        self,
        way: Way,
        placed: Placed,
        params: Tree,
        stats: Tree,
        statistics: str = "all",
        pool: concurrent.futures.Executor | None = None,
        options: Mapping[str, Any] | None = None,
    ):
        self.way, self.name, self.placed = way, way.name, placed
        begin = time.perf_counter()
        own = statistics == "own" and placed.devices > 1
        loss = of_shards(way.loss, placed.everywhere.mesh) if own else way.loss
        step = jax.jit(train_step(loss, way.rate), donate_argnums=0)
        with way.lowered():
            lowered = step.lower(placed.state(params, stats), placed.images, placed.labels)
        self.trace_s = time.perf_counter() - begin
        self.compiling: concurrent.futures.Future[tuple[Any, float]] = concurrent.futures.Future()
        if pool is None:
            self.compiling.set_result(self.compile(lowered, options))
        else:
            self.compiling = pool.submit(self.compile, lowered, options)

    @staticmethod
    def compile(lowered: Any, options: Mapping[str, Any] | None = None) -> tuple[Any, float]:
        """The program, and the seconds that XLA took; `options`: the compiler's."""
        begin = time.perf_counter()
        return lowered.compile(compiler_options=options), time.perf_counter() - begin

    @property
    def compiled(self) -> Any:
        return self.compiling.result()[0]

    @property
    def compile_s(self) -> float:
        return self.compiling.result()[1]

    def run(self, state: Tree, steps: int) -> tuple[Tree, list[jax.Array]]:
        step, losses = self.compiled, []
        for _ in range(steps):
            state, loss = step(state, self.placed.images, self.placed.labels)
            losses.append(loss)
        return state, losses

    @property
    def memory_bytes(self) -> int:
        return memory_bytes(self.compiled)

    def kinds(self, params: Tree, stats: Tree) -> dict[str, float] | None:
        """Milliseconds a step of each kind of work, on one device."""
        state, _ = self.run(self.placed.state(params, stats), 1)
        jax.block_until_ready(state)

        def run() -> None:
            jax.block_until_ready(self.run(state, PROFILED))

        by_kind = steps.profiled(run, self.compiled.as_text())
        return by_kind and {kind: ms / PROFILED for kind, ms in by_kind.items()}

    def losses(self, params: Tree, stats: Tree, steps: int) -> list[float]:
        return [float(v) for v in jax.device_get(self.run(self.placed.state(params, stats), steps)[1])]

    def times(self, params: Tree, stats: Tree, steps: int, repeat: int) -> list[float]:
        """Milliseconds a step, `repeat` samples."""
        state, _ = self.run(self.placed.state(params, stats), 3)
        jax.block_until_ready(state)

        def sample() -> float:
            nonlocal state
            begin = time.perf_counter()
            state, _ = self.run(state, steps)
            jax.block_until_ready(state)
            return (time.perf_counter() - begin) / steps * 1e3

        return training.steady(sample, repeat)


def rounding(args: argparse.Namespace) -> float:
    """By how much, relative to its terms, a layer's result may differ between two honest implementations.

    The longest sums are a batch statistic's, or a filter's gradient's, of the first layer. Classifiers of large images
    have it at half their height and width.
    """
    large = args.model not in TASKS and of_fleet(args.model) is None
    pixels = (args.image // 2) ** 2 if large else args.image ** (3 if TASKS.get(args.model) == "segment" else 2)
    return rounding_of(args.dtype, args.batch * pixels)


def in_tf32(dtype: str) -> bool:
    """Whether products of the type are computed in TF32."""
    return dtype == "f32" and jax.default_backend() == "gpu" and jax.config.jax_default_matmul_precision is None


def rounding_of(dtype: str, terms: int) -> float:
    """Half a unit in the last place of what products are computed from (on a GPU that is TF32 for float32), and a
    float32 sum of `terms`: 0.29 eps sqrt(terms), see tests/tolerance.py."""
    unit = 2.0**-10 if in_tf32(dtype) else float(jnp.finfo(DTYPES[dtype]).eps)
    return unit / 2 + 0.29 * 2.0**-23 * math.sqrt(terms)


def perturbed(params: Tree, amount: float, seed: int) -> Tree:
    """Every parameter off by up to `amount`, relative."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: (p * (1 + rng.uniform(-amount, amount, p.shape))).astype(p.dtype), params)


def sensitivity(
    program: Program, params: Tree, stats: Tree, amount: float, losses: Sequence[float], dtype: str
) -> list[float]:
    """How far each loss, or one before it, moves when every parameter is off by up to `amount`.

    In TF32 also when every one is nearer to zero by 2^-11. A kernel may round an operand to TF32, or let the tensor
    cores cut its last bits off, by 2^-12 of it on average: then the products of two are smaller by 2^-11.
    """
    off = [perturbed(params, amount, seed) for seed in range(1, 1 + DRAWS)]
    off += [jax.tree.map(lambda p: (p * (1 - 2.0**-11)).astype(p.dtype), params)] * in_tf32(dtype)
    draws = [program.losses(one, stats, len(losses)) for one in off]
    moved = np.abs(np.asarray(draws) - np.asarray(losses)).max(0)
    return np.maximum.accumulate(moved).tolist()


def verdict(losses: Sequence[float], reference: Sequence[float], allowed: Sequence[float]) -> dict[str, Any]:
    """Of each loss how far it is from the reference's; whether none is farther than allowed, or not a number."""
    difference = [abs(a - b) for a, b in zip(losses, reference, strict=True)]
    agrees = all(d <= a for d, a in zip(difference, allowed, strict=True))
    return {"difference": difference, "allowed": list(allowed), "agrees": agrees}


def explained(program: Program, params: Tree, stats: Tree) -> dict[str, Any]:
    """jaxconv's calls in the step, by the plan of one device; and what `accelerate` replaced, and left and why."""
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (params, params, stats))
    with program.way.lowered():
        step = jaxconv.explain(train_step(program.way.loss))(shapes, program.placed.images, program.placed.labels)
    by_plan: collections.Counter[str] = collections.Counter()
    counts = {"native": 0, "xla": 0, "calls": 0}  # calls: of several of the others
    for call in step:
        counts[call.plan.implementation] += call.count
        if call.plan.implementation == "native":
            by_plan[f"{call.op} {call.plan.algorithm}"] += call.count
    for one in step.convolutions if program.way.name == "enable" else ():
        counts["native" if one.taken else "xla"] += one.count
        if one.taken:
            by_plan[f"{one.form} {re.split(r'[][ /]', one.became)[1]}"] += one.count
    row: dict[str, Any] = {"calls": {**counts, "native_by_algorithm": dict(by_plan.most_common())}}
    if program.way.name == "accelerate":
        replaced = collections.Counter(finding.fused for finding in step.accelerated.replaced)
        left = collections.Counter(f"{finding.what}: {finding.why}" for finding in step.accelerated.left)
        row |= {"replaced": dict(replaced.most_common()), "left": dict(left.most_common())}
    return row


def programs(args: argparse.Namespace, params: Tree, stats: Tree) -> Iterator[Any]:
    """Each way on each number of devices: one compiled after the other is measured, or --jobs at a time before any."""
    each = args.split == "batch"
    ways = {name: Way.make(name, args) for name in args.ways if name in WAYS}
    placed = (Placed.make(n, *batch(args, args.batch * (n if each else 1)), args.split) for n in args.devices)
    pairs = ((name, where) for where in placed for name in args.ways if name in WAYS or where.devices == 1)
    options = jaxconv.graph_options() if args.graphs else None

    def make(name: str, where: Placed, pool: concurrent.futures.Executor | None = None) -> Any:
        if name in WAYS:
            return Program(ways[name], where, params, stats, args.statistics, pool, options)
        return torch_train.Program(args, where)

    if args.jobs == 1:
        yield from (make(name, where) for name, where in pairs)
        return
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        compiled = [make(name, where, pool) for name, where in pairs]
    yield from compiled  # what compiles disturbs what is timed: the pool is done


# ----------------------------------------------------------------------------------------------------------------------
# The command


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 1 where losses of a model disagree."""
    return max([measured(args) for args in parse_each(argv)])


def measured(args: argparse.Namespace) -> int:
    """Measures one model. Returns 1 where losses disagree."""
    if args.cache:
        jax.config.update("jax_compilation_cache_dir", args.cache)
    environment = record.environment()
    say = functools.partial(print, flush=True)
    say(f"{environment['device']}, jax {jax.__version__}")
    power, many = "²³"[TASKS.get(args.model) == "segment"], " a device" if args.split == "batch" else ""
    say(f"{args.model}{' small' if args.small else ''}, {args.batch} images{many} of {args.image}{power}, {args.dtype}")
    params, stats = jax.device_get(initial(args, batch(args, 1)[0]))
    least = limit(args, params, stats)
    config = {
        "op": "train",
        "model": args.model,
        "task": TASKS.get(args.model, "classify"),
        "dtype": args.dtype,
        "precision": None,
        "layout": None,
        "small": args.small,
        "batch": args.batch,
        "image": args.image,
        "steps": args.steps,
        "most_devices": max(args.devices),
        "split": args.split,
        "statistics": args.statistics,
        "limit_ms": least and sum(least.values()),
        "limit_kinds": least,
    }
    config |= {"options": {"graphs": "all"}} if args.graphs else {}
    rows: list[dict[str, Any]] = []
    references: dict[int, tuple[list[float], list[float]]] = {}  # by images a step: losses, what is allowed
    for program in programs(args, params, stats):
        way, devices = program.name, program.placed.devices
        count = program.placed.count
        losses = program.losses(params, stats, args.losses)
        if count not in references:
            moved = sensitivity(program, params, stats, rounding(args), losses, args.dtype)
            references[count] = losses, [ALLOWED * m for m in moved]
        reference, allowed = references[count]
        compared = verdict(losses, reference, allowed)
        samples = program.times(params, stats, args.steps, args.repeat)
        ms = statistics.median(samples)
        row = {
            "way": way,
            "devices": devices,
            "ms": ms,
            "samples_ms": samples,
            "images_per_s": count / ms * 1e3,
            "losses": losses,
            **compared,
            "trace_s": program.trace_s,
            "compile_s": None if args.cache else program.compile_s,
            "memory_bytes": program.memory_bytes,
            "kinds": program.kinds(params, stats) if args.profile else None,
        }
        alone = next((r["images_per_s"] for r in rows if r["way"] == way and r["devices"] == 1), None)
        row["speedup"] = row["images_per_s"] / alone if alone and devices > 1 else None
        if devices == args.devices[0] and way in WAYS[1:]:
            row |= explained(program, params, stats)
        rows.append(row)
        for line in lines(row, rows, config["limit_ms"]):
            say(line)
        if args.json:  # after each row: a run that is cut short is worth having
            path = record.write(args.json, {**environment, **config, "rows": rows})
    if args.json:
        say(f"written: {path}")
    return 0 if all(row["agrees"] for row in rows) else 1


def shapes(args: argparse.Namespace, params: Tree, stats: Tree) -> tuple[Tree, Tree, Tree]:
    """((params, momenta, stats), images, labels) of a step of --batch images."""
    state = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (params, params, stats))
    images, labels = jax.tree.map(lambda a: jax.ShapeDtypeStruct((args.batch, *a.shape[1:]), a.dtype), batch(args, 1))
    return state, images, labels


def limit(args: argparse.Namespace, params: Tree, stats: Tree) -> dict[str, float] | None:
    """The least time of a step of --batch images on one device of this kind, in milliseconds, by kind of work."""
    top = limits.ceilings()
    if top is None:
        return None
    calls = jaxconv.explain(train_step(Way.make("accelerate", args).loss))(*shapes(args, params, stats))
    return steps.least_ms(calls, sum(p.size for p in jax.tree.leaves(params)), top)


def lines(row: dict[str, Any], rows: Sequence[dict[str, Any]], limit_ms: float | None) -> list[str]:
    """What is printed of a row."""
    first = next((r for r in rows if r["way"] == "flax" and r["devices"] == row["devices"]), None)
    spread = training.differ(row["samples_ms"])
    text = f"{row['way']:<10} {row['devices']} device{'s' if row['devices'] > 1 else ''}: {row['ms']:.2f} ms a step "
    text += f"(samples within {spread:.1%}), {row['images_per_s']:.0f} images/s"
    if first is not None and first is not row:
        text += f", {first['ms'] / row['ms']:.3f} of flax's speed"
    if row["speedup"]:
        text += f", {row['speedup']:.2f} times one device"
    text += f"; traced in {row['trace_s']:.0f} s, "
    if row["compile_s"] is not None:
        text += f"compiled in {row['compile_s']:.0f} s, "
    text += f"{row['memory_bytes'] / 2**30:.2f} GiB a device" if row["memory_bytes"] else "memory unknown"
    verdict = "agree" if row["agrees"] else "DISAGREE"
    text += f"\n{'':10} losses {' '.join(f'{v:.4f}' for v in row['losses'])}: {verdict}, "
    text += f"off by {max(row['difference']):.2g}, allowed {row['allowed'][-1]:.2g}"
    out = [text]
    if row["kinds"]:
        kinds = ", ".join(f"{kind} {ms:.2f}" for kind, ms in row["kinds"].items())
        out.append(f"{'':10} ms by kind: {kinds}; together {sum(row['kinds'].values()):.2f}")
    if limit_ms and row["devices"] == 1:
        out.append(f"{'':10} the model's roofline: {limit_ms:.2f} ms, {limit_ms / row['ms']:.2f} of it reached")
    if "calls" in row:
        calls = row["calls"]
        out.append(f"{'':10} calls: {calls['native']} native, {calls['xla']} to XLA")
        out += [f"{'':12} {count} x {name}" for name, count in calls["native_by_algorithm"].items()]
    for name, title in (("replaced", "replaced"), ("left", "left")):
        out += [f"{'':10} {title}: {count} x {what}" for what, count in row.get(name, {}).items()]
    return out


if __name__ == "__main__":
    sys.exit(main())

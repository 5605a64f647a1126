"""`python -m benchmarks fleet`: many models that no table was tuned for, plain, with enable and with accelerate.

    python -m benchmarks fleet --list
    python -m benchmarks fleet --part 1/6 --json
    python -m benchmarks fleet --models resnet18_32,board-19,impala,haiku --json
    python -m benchmarks fleet --models f32 --ways plain,accelerate --jobs 8

Training steps (SGD with momentum) and answers, as people write them in Flax, Haiku, Equinox and Keras
(benchmarks/fleet_models); a library that cannot be imported is left out. --models takes names, kinds, libraries, types
(f32, bf16) and uses (train, infer), of which a model needs one.

A model's ways are compiled in one process, in the order of --ways. XLA remembers the kernels that it has tried out, so
what is compiled later may find its own: --ways accelerate,enable,plain turns that around. With --jobs several programs
compile at a time, and their times to compile are those of a busy machine.

Then losses are compared with plain's, for as far as another order of plain's own sums may move them
(`python -m benchmarks train` says how), and answers with float32's at the highest precision (`... infer`). Then the
ways are timed in turns, in one order and then in the other, `--repeat` times: a drifting clock meets all alike. Memory
is what the compiler asks for. The summary is printed last.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import math
import re
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import fleet_models, fleet_report, infer, record, steps, train, training
from benchmarks.answers import Answers
from benchmarks.fleet_models.model import DTYPES, Model, Net, Size
from jaxconv import graph_options
from jaxconv.accelerate import accelerate

Tree = Any
Options = Mapping[str, Any]

WAYS = fleet_report.WAYS
MOST = 2000  # steps in a sample. With 200, samples of 0.1 s of a step that waits for the host were 30 % apart


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks fleet", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def several(text: str) -> list[str]:
        return text.split(",")

    parser.add_argument("--models", type=several, metavar="A,B", help="names, kinds, libraries, types, uses (all)")
    parser.add_argument("--ways", default=list(WAYS), type=several, help=f"of {', '.join(WAYS)}, plain among them")
    parser.add_argument("--part", default=(1, 1), type=_part, metavar="K/N", help="each Nth model, from the Kth")
    parser.add_argument("--list", action="store_true", help="name the models and stop")
    parser.add_argument("--losses", type=int, metavar="N", help="steps whose losses are compared (20; small: 3)")
    parser.add_argument("--seconds", type=float, metavar="S", help="of timing, about, a model and way (2; small: .02)")
    parser.add_argument("--repeat", type=int, metavar="N", help="samples, in turns (7; small: 2)")
    parser.add_argument(
        "--minutes", type=float, default=9.0, metavar="M", help="no model is begun that may end later (9)"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="programs compiled at a time (1)")
    parser.add_argument("--profile", action="store_true", help="time by kind of work, too")
    parser.add_argument("--graphs", action="store_true", help="compile with jaxconv.graph_options()")
    parser.add_argument("--small", action=argparse.BooleanOptionalAction, default=jax.default_backend() != "gpu")
    parser.add_argument("--json", nargs="?", const="auto", metavar="PATH", help="record; alone: in benchmarks/results/")
    args = parser.parse_args(argv)
    args.losses = args.losses or (3 if args.small else 20)
    args.seconds = args.seconds or (0.02 if args.small else 2.0)
    args.repeat = args.repeat or (2 if args.small else 7)
    unknown = [way for way in args.ways if way not in WAYS]
    if unknown or "plain" not in args.ways:
        parser.error(f"--ways {','.join(args.ways)}: expected some of {','.join(WAYS)}, and plain")
    every = fleet_models.models()
    known = {word for model in every.values() for word in words(model)}
    unknown = [word for word in args.models or () if word not in known]
    if unknown:
        why = "".join(f"; {package} cannot be imported" for package in fleet_models.missing())
        parser.error(f"--models {','.join(unknown)}: expected some of {', '.join(sorted(known))}{why}")
    if min(args.losses, args.repeat, args.jobs) < 1 or min(args.seconds, args.minutes) <= 0:
        parser.error("--losses, --repeat and --jobs are at least 1, --seconds and --minutes above 0")
    names = {word for word in args.models or () if word in every}  # a name that is a kind, too, is a name
    others = set(args.models or ()) - names
    wanted = [m for m in every.values() if args.models is None or m.name in names or words(m) & others]
    k, n = args.part
    args.chosen = wanted[k - 1 :: n]
    if not args.chosen:
        parser.error(f"--part {k}/{n}: there are {len(wanted)} models")
    return args


def _part(text: str) -> tuple[int, int]:
    fraction = re.fullmatch(r"(\d+)/(\d+)", text)
    if not fraction or not 1 <= int(fraction[1]) <= int(fraction[2]):
        raise argparse.ArgumentTypeError(f"{text}: expected K/N, with K from 1 to N")
    return int(fraction[1]), int(fraction[2])


def words(model: Model) -> set[str]:
    """What --models may call it."""
    return {model.name, model.kind, model.library, model.dtype, model.use}


# ----------------------------------------------------------------------------------------------------------------------
# A case: a model with its data. A program: a case compiled one way.


@dataclasses.dataclass
class Case:
    model: Model
    size: Size
    net: Net
    placed: training.Placed  # its arrays are NumPy's, but within `on_device`

    @classmethod
    def make(cls, model: Model, small: bool) -> Case:
        size, rng = model.size(small), np.random.default_rng(0)
        x = model.inputs(rng, (size.batch, *size.shape))
        net = model.make(DTYPES[model.dtype], size.options, x)
        wanted: Tree = ()
        if model.goal is not None:
            shapes, _ = jax.eval_shape(functools.partial(net.apply, train=True), net.params, net.stats, x)
            wanted = model.goal.wanted(rng, shapes)
        return cls(model, size, net, training.Placed(1, jax.devices()[0], x, wanted))

    @property
    def rounding(self) -> float:
        """The longest sums are a batch statistic's, or a filter's gradient's, of the first layer."""
        return train.rounding_of(self.model.dtype, self.size.batch * math.prod(self.size.shape[:-1]))

    def on_device(self) -> Case:
        where = self.placed.everywhere
        arrays = jax.device_put((self.placed.images, self.placed.labels), where)
        return dataclasses.replace(self, placed=training.Placed(1, where, *arrays))


def learning(way: str, case: Case) -> train.Way:
    """The loss of a case that trains."""
    model, net = case.model, case.net

    def loss(params: Tree, stats: Tree, x: Tree, wanted: Tree) -> tuple[jax.Array, Tree]:
        y, stats = net.apply(params, stats, x, True)
        return model.goal.loss(y, wanted), stats

    return train.Way(way, accelerate(loss) if way == "accelerate" else loss, model.rate)


def answering(way: str, case: Case) -> Callable[..., Tree]:
    """The answers of a case that answers."""

    def answer(params: Tree, stats: Tree, x: Tree) -> Tree:
        return case.net.apply(params, stats, x, False)[0]

    return accelerate(answer) if way == "accelerate" else answer


class Training:
    """A training step."""

    def __init__(
        self, way: str, case: Case, pool: concurrent.futures.Executor | None = None, options: Options | None = None
    ):
        self.way, self.start = way, (case.net.params, case.net.stats)
        self.program = train.Program(learning(way, case), case.placed, *self.start, pool=pool, options=options)

    @property
    def trace_s(self) -> float:
        return self.program.trace_s

    @property
    def compiled(self) -> Any:
        return self.program.compiled

    @property
    def compile_s(self) -> float:
        return self.program.compile_s

    def load(self, case: Case) -> None:
        self.program.placed = case.placed

    def sample(self, steps: int) -> float:
        """Milliseconds a step."""
        return self.program.times(*self.start, steps, 1)[0]

    def kinds(self) -> dict[str, float] | None:
        return self.program.kinds(*self.start)

    @classmethod
    def checked(cls, programs: Sequence[Training], case: Case, count: int) -> list[dict[str, Any]]:
        """Of each its losses, and how far they are from plain's in units of what is allowed."""
        plain = next(one for one in programs if one.way == "plain")
        reference = plain.program.losses(*plain.start, count)
        moved = train.sensitivity(plain.program, *plain.start, case.rounding, reference, case.model.dtype)
        checks = []
        for one in programs:
            losses = reference if one is plain else one.program.losses(*one.start, count)
            compared = train.verdict(losses, reference, [train.ALLOWED * m for m in moved])
            pairs = zip(compared["difference"], compared["allowed"], strict=True)
            off = max(0.0 if d == 0 else d / a if a else math.inf for d, a in pairs)
            finite = bool(np.isfinite(losses).all())
            agrees = compared["agrees"] and finite
            checks.append({"losses": losses, "off": off if finite else math.inf, "agrees": agrees})
        return checks


class Answering:
    """A model's answers, queued."""

    def __init__(
        self, way: str, case: Case, pool: concurrent.futures.Executor | None = None, options: Options | None = None
    ):
        net, answer = case.net, answering(way, case)
        self.way = way
        begin = time.perf_counter()
        with train.Way(way, answer).lowered():
            lowered = jax.jit(answer).lower(net.params, net.stats, case.placed.images)
        self.trace_s = time.perf_counter() - begin
        self.compiling: concurrent.futures.Future[tuple[Any, float]] = concurrent.futures.Future()
        if pool is None:
            self.compiling.set_result(train.Program.compile(lowered, options))
        else:
            self.compiling = pool.submit(train.Program.compile, lowered, options)

    @property
    def compiled(self) -> Any:
        return self.compiling.result()[0]

    @property
    def compile_s(self) -> float:
        return self.compiling.result()[1]

    def load(self, case: Case) -> None:
        given = jax.device_put((case.net.params, case.net.stats), case.placed.everywhere)
        compiled = self.compiled
        self.answers = Answers(
            self.way,
            lambda: compiled(*given, case.placed.images),
            jax.block_until_ready,
            _flat,
            self.trace_s,
            self.compile_s,
        )

    def sample(self, steps: int) -> float:
        """Milliseconds a call."""
        infer.queued(self.answers, 3)
        return infer.queued(self.answers, steps)

    def kinds(self) -> dict[str, float] | None:
        calls = training.PROFILED
        by_kind = steps.profiled(lambda: infer.queued(self.answers, calls) and None, self.compiled.as_text())
        return by_kind and {kind: ms / calls for kind, ms in by_kind.items()}

    @classmethod
    def checked(cls, programs: Sequence[Answering], case: Case, count: int) -> list[dict[str, Any]]:
        """Of each how far its answers are from float32's, in units of what is allowed."""
        exact = case.model.make(DTYPES["f32"], case.size.options, case.placed.images)
        with jax.default_matmul_precision("highest"):
            answer = jax.jit(functools.partial(exact.apply, train=False))
            reference = _flat(answer(case.net.params, case.net.stats, case.placed.images)[0])
        ordered = sorted(programs, key=lambda one: one.way != "plain")  # the first's error is the yardstick
        rows = infer.compared([one.answers for one in ordered], reference, case.model.dtype)
        by_way = {one.way: row for one, row in zip(ordered, rows, strict=True)}
        checks = [by_way[one.way] for one in programs]
        return [{"off": row["error"] / row["allowed"], "agrees": row["agrees"]} for row in checks]


def _flat(answers: Tree) -> np.ndarray:
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(answers)])


USES: dict[str, type[Training] | type[Answering]] = {"train": Training, "infer": Answering}


def calls_of(text: str) -> dict[str, int]:
    """How many custom calls of jaxconv's a compiled program has."""
    return dict(collections.Counter(re.findall(r'custom_call_target="jaxconv_(\w+)"', text)).most_common())


def measured(case: Case, programs: Sequence[Any], args: argparse.Namespace) -> dict[str, Any]:
    """A model's row."""
    model, size = case.model, case.size
    case = case.on_device()
    for one in programs:
        one.load(case)
    checks = USES[model.use].checked(programs, case, args.losses)
    count: dict[str, int] = {}
    for one in programs:
        about = one.sample(3)
        count[one.way] = max(2, min(MOST, int(args.seconds / args.repeat / about * 1e3)))
    samples: dict[str, list[float]] = {one.way: [] for one in programs}
    for turn in range(args.repeat):
        # In both orders: of two equal programs of 0.5 ms the one that always came last was 5 to 9 % slower (H100).
        for one in programs[:: -1 if turn % 2 else 1]:
            samples[one.way].append(one.sample(count[one.way]))
    row: dict[str, Any] = {"model": model.name, "kind": model.kind, "library": model.library, "use": model.use}
    row |= {"dtype": model.dtype, "batch": size.batch, "shape": list(size.shape), "ways": {}}
    for one, check in zip(programs, checks, strict=True):
        row["ways"][one.way] = {
            "ms": statistics.median(samples[one.way]),
            "samples_ms": samples[one.way],
            "steps": count[one.way],
            "trace_s": one.trace_s,
            "compile_s": one.compile_s,
            "memory_bytes": train.memory_bytes(one.compiled),
            "calls": calls_of(one.compiled.as_text()),
            **({"kinds": one.kinds()} if args.profile else {}),
            **check,
        }
    return row


# ----------------------------------------------------------------------------------------------------------------------
# The command


def cases(args: argparse.Namespace, failed: Callable[[Model, Exception], None]) -> Iterator[tuple[Case, list[Any]]]:
    """Each model and its programs: one model after the other, or with --jobs all compiled before the first is timed."""

    options = graph_options() if args.graphs else None

    def make(model: Model, pool: concurrent.futures.Executor | None = None) -> tuple[Case, list[Any]] | None:
        try:
            case = Case.make(model, args.small)
            return case, [USES[model.use](way, case, pool, options) for way in args.ways]
        except jax.errors.JaxRuntimeError as error:
            return failed(model, error)

    if args.jobs == 1:
        yield from filter(None, map(make, args.chosen))
        return
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        cases = [make(model, pool) for model in args.chosen]
    cases.reverse()
    while cases:  # what was measured goes
        if (one := cases.pop()) is not None:
            yield one


def part_of(args: argparse.Namespace) -> str | None:
    """What tells a record's file from those of other models: they are one table."""
    k, n = args.part
    names = record.slug(" ".join(args.models or ()))
    names = names if len(names) <= 40 else f"{len(args.models)}-{zlib.crc32(names.encode()):08x}"
    return "-".join(filter(None, [names, f"{k}of{n}" if n > 1 else ""])) or None


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 1 where losses or answers disagree, or a program fails."""
    args = parse(argv)
    say = functools.partial(print, flush=True)
    if args.list:
        for model in args.chosen:
            size = fleet_report.size_of(model, model.size(args.small))
            say(f"{model.name:<24} {model.use:<6} {model.kind:<28} {model.library:<8} {size}")
        for package in fleet_models.missing():
            say(f"{package} cannot be imported: its models are left out")
        return 0
    environment = record.environment()
    say(f"{environment['device']}, jax {jax.__version__}: {len(args.chosen)} models{', small' if args.small else ''}")
    for package in fleet_models.missing():
        say(f"{package} cannot be imported: its models are left out")
    config = {"op": "fleet", "dtype": None, "precision": None, "layout": None, "small": args.small, "batch": None}
    config |= {"part": part_of(args), "jobs": args.jobs, "order": args.ways, "compared": args.losses}
    config |= {"options": {"graphs": "all"}} if args.graphs else {}
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    path = None

    def failed(model: Model, error: Exception) -> None:
        failures.append(model.name)
        say(f"{model.name}: FAILED: {str(error).splitlines()[0]}")

    begin = last = time.monotonic()
    longest, left = 0.0, {model.name: None for model in args.chosen}
    for case, programs in cases(args, failed):
        if rows and time.monotonic() - begin + longest > 60 * args.minutes:
            break
        del left[case.model.name]
        try:
            row = measured(case, programs, args)
        except jax.errors.JaxRuntimeError as error:  # out of memory: the others may fit
            failed(case.model, error)
            continue
        rows.append(row)
        for line in fleet_report.lines(row):
            say(line)
        if args.json:  # after each model: a run that is cut short is worth having
            path = record.write(args.json, {**environment, **config, "rows": rows})
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    left = [name for name in left if name not in failures]
    if path:
        say(f"written: {path}")
    if left:
        say(f"{args.minutes:g} minutes are over; left: --models {','.join(left)}")
    for line in fleet_report.summary(rows):
        say(line)
    if failures:
        say(f"failed: {', '.join(failures)}")
    return int(bool(failures) or not fleet_report.agree(rows))


if __name__ == "__main__":
    sys.exit(main())

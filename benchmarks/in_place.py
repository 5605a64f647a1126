"""`python -m benchmarks in_place`: models of the fleet before and after their problems are timed while they compile.

    JAXCONV_TUNING=tuned.json python -m benchmarks in_place --models resnet18_32
    JAXCONV_TUNING=tuned.json python -m benchmarks in_place --models resnet18_32 --unknown --dtype bf16

Plain, then enable and accelerate as they are predicted, then both with JAXCONV_TUNE=1's timing, in one process. Then
the ways take turns in being timed. What JAXCONV_TUNING names already is not timed again: a second run shows what a
later process pays. --unknown forgets every table and the model, and takes the GPU for one of compute capability 8.0:
what a GPU starts from that nobody has measured. Its kernels are then those that need no Hopper; with a module of
compute_80 PTX alone (JAXCONV_CUDA_ARCHS=80-virtual) they are what the driver makes of PTX.

Afterwards each kernel's times are compared with XLA's, over the problems that were timed.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import math
import pathlib
import statistics
import time
from collections.abc import Sequence

import jax

from benchmarks import fleet, fleet_models
from benchmarks.fleet_models.model import DTYPES
from jaxconv._plan import Device, in_place, measured, tuned


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks in_place", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    training = {name: model for name, model in fleet_models.models().items() if model.use == "train"}
    parser.add_argument("--models", default="resnet18_32", type=lambda text: text.split(","), metavar="A,B")
    parser.add_argument("--ways", default=["enable", "accelerate"], type=lambda text: text.split(","), metavar="A,B")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="instead of the model's own")
    parser.add_argument("--batch", type=int, help="instead of the model's own")
    parser.add_argument("--unknown", action="store_true", help="as a GPU that no table and no model knows")
    parser.add_argument("--seconds", type=float, default=1.0, metavar="S", help="of timing a model and way (1)")
    parser.add_argument("--small", action=argparse.BooleanOptionalAction, default=jax.default_backend() != "gpu")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.models if name not in training]:
        parser.error(f"--models {','.join(unknown)}: expected some of {', '.join(training)}")
    if not args.ways or set(args.ways) - {"enable", "accelerate"}:
        parser.error("--ways: expected enable, accelerate or both")
    args.chosen = [training[name] for name in args.models]
    return args


def forget_tables() -> None:
    """As a GPU that no table and no model knows."""
    here = jax.devices()[0]
    unknown = Device("cuda", here.device_kind, (8, 0), getattr(here, "core_count", None) or 132)
    measured.FOLDER = pathlib.Path("no such folder")
    Device._of = classmethod(lambda cls, platform, device: unknown)  # type: ignore[method-assign, assignment]
    devices = {"cpu": Device("cpu", "cpu"), "cuda": unknown}
    Device._current = classmethod(lambda cls, platform: devices[platform])  # type: ignore[method-assign, assignment]


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.unknown:
        forget_tables()
    for model in args.chosen:
        model = dataclasses.replace(model, dtype=args.dtype or model.dtype)
        case = fleet.Case.make(model, args.small)
        if args.batch:
            model = dataclasses.replace(model, full=dataclasses.replace(model.full, batch=args.batch))
            case = fleet.Case.make(model, args.small)
        _print(model, case, args)
    return 0


def _print(model: fleet.Model, case: fleet.Case, args: argparse.Namespace) -> None:
    programs: dict[str, fleet.Training] = {}
    seconds: dict[str, float] = {}
    known = {e.identity for e in tuned.active().entries}
    for name in ("plain", *args.ways, *(f"{way}, tuned" for way in args.ways)):
        way, _, tune = name.partition(", ")
        in_place.ask(bool(tune))
        begin = time.perf_counter()
        try:
            programs[name] = fleet.Training(way, case)
        finally:
            in_place.ask(False)
        seconds[name] = time.perf_counter() - begin
    timed = [e for e in tuned.active().entries if e.identity not in known and e.alone]
    case = case.on_device()
    for one in programs.values():
        one.load(case)
    # The tuned programs are judged as the fleet judges the others.
    checks = dict(zip(programs, fleet.Training.checked(list(programs.values()), case, 5), strict=True))
    count = {name: max(2, int(args.seconds / 5 / one.sample(3) * 1e3)) for name, one in programs.items()}
    samples: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(5):
        for name, one in programs.items():
            samples[name].append(one.sample(count[name]))
    print(f"\n{model.name}, {model.dtype}, batch {case.size.batch}, {jax.devices()[0].device_kind}", flush=True)
    plain = statistics.median(samples["plain"])
    for name, one in programs.items():
        ms = statistics.median(samples[name])
        calls = sum(fleet.calls_of(one.compiled.as_text()).values())
        agrees = "" if checks[name]["agrees"] else "  LOSSES DIFFER"
        text = f"{ms:8.3f} ms a step, plain / it {plain / ms:5.2f}, {calls:3} calls, compiled in {seconds[name]:6.1f} s"
        print(f"  {name:18} {text}{agrees}", flush=True)
    native = sum(e.choice != "xla" for e in timed)
    print(f"  {len(timed)} problems timed, {native} of them native", flush=True)
    for line in by_kernel(timed):
        print(f"  {line}", flush=True)


def by_kernel(entries: Sequence[tuned.Entry]) -> list[str]:
    """Of each op and kernel XLA's time over its own: geometric mean, least and most, and the worst problem."""
    ratios: dict[tuple[str, str], list[tuple[float, str]]] = collections.defaultdict(list)
    for e in entries:
        best: dict[str, float] = {}
        for spec, ms in e.native_ms.items():
            kernel = spec.partition(" ")[0]
            best[kernel] = min(ms, best.get(kernel, math.inf))
        for kernel, ms in best.items():
            if e.xla_ms and ms:
                ratios[e.op, kernel].append((e.xla_ms / ms, e.problem))
    lines = []
    for (op, kernel), found in sorted(ratios.items()):
        mean = math.exp(statistics.fmean(math.log(ratio) for ratio, _ in found))
        least, most = min(found), max(found)
        spread = f"{least[0]:.2f} to {most[0]:.2f}"
        lines.append(f"{op:20} {kernel:22} {len(found):3} problems, XLA / it {mean:5.2f} ({spread}), worst {least[1]}")
    return lines

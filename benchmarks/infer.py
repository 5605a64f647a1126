"""`python -m benchmarks infer`: one model's answers, several ways, batch by batch.

    python -m benchmarks infer --model resnet50,mobilenet_v2,efficientnet_b0 --batch 1,8,64,256 --json
    python -m benchmarks infer --ways frozen,torch --quantize int8,float8_e4m3fn --batch 256
    python -m benchmarks infer --model mobilenet_v2 --ways frozen --batch 1 --single --json

Ways: `plain`, the Flax model, its variables arguments of the jitted function; `constants`, the same with the variables
closed over; `accelerate`, through jaxconv.accelerate; `frozen`, through jaxconv.freeze, its weights constants of the
program, and small calls captured in CUDA graphs (jaxconv.graph_options); `frozen_arguments`, with the weights as
arguments; `int8` and `float8_e4m3fn` (--quantize), frozen and quantised, calibrated on images of their own; `torch`,
the same model in PyTorch, torch.compile(mode="max-autotune") with CUDA graphs, on a GPU; `onnx`, that model in ONNX
Runtime. The last two take part where they can be imported.

First the answers are compared with float32's at the highest precision: no way may err by more than a few times what the
plain model does in its own dtype; a quantised one, than the noise that its last layer has on the calibration images.
Then, in rounds that take turns:

* latency: calls that the host waits for, each; the median and the 99th percentile of wall clock;
* throughput: calls that are queued, and waited for at the end.

Of each program also: what it launches (`jaxconv.launches`), and, where CUPTI is, the kernels of a call and their time;
what it took to trace and compile; its memory (arguments, results, temporaries, constants and code).

With --single also the single answer: what a call of a frozen model takes at batch 1, by the way in which it is called
(jitted or compiled ahead of time, with graph_options, a donated input or answer, from NumPy to NumPy, through pinned
memory, with Python's garbage collector off and the thread on one core), and where its median goes
(benchmarks/single.py).
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

import jaxconv
from benchmarks import record, single
from benchmarks.answers import Answers
from jaxconv._tools import timing
from jaxconv.freeze import options_of
from jaxconv.quantize import QuantizedDType

Tree = Any

WAYS = ("plain", "constants", "accelerate", "frozen", "frozen_arguments", "torch", "onnx")
DTYPES = {"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32}
QUANTIZED = get_args(QuantizedDType)
ROUNDS = 3
# A way may err by this many times plain's error: it rounds at other places, as often as plain does.
ALLOWED = 4.0


def parse(argv: list[str] | None) -> argparse.Namespace:
    from benchmarks.models import SERVED

    gpu = jax.default_backend() == "gpu"
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks infer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def several(text: str) -> list[str]:
        return text.split(",")

    parser.add_argument("--model", default=["resnet50"], type=several, help=", ".join(SERVED))
    parser.add_argument("--ways", default=list(WAYS), type=several, help=", ".join(WAYS))
    parser.add_argument("--quantize", default=[], type=several, help=f"frozen in these, too: {','.join(QUANTIZED)}")
    parser.add_argument("--batch", type=lambda text: [int(n) for n in text.split(",")], help="(1,8,64,256; small: 1,2)")
    parser.add_argument("--image", type=int, metavar="N", help="height and width (224; small: 32)")
    parser.add_argument("--dtype", choices=DTYPES, help="of the computation (bf16 on a GPU, else f32)")
    parser.add_argument("--calls", type=int, metavar="N", help="calls that are waited for, of each way (300; small: 9)")
    parser.add_argument(
        "--seconds", type=float, metavar="S", help="of queued calls, about, of each way (1; small: .02)"
    )
    parser.add_argument(
        "--single",
        nargs="?",
        type=int,
        const=True,
        metavar="N",
        help="at batch 1 also the ways to call a frozen model, N calls of each, fewer of a slow one (1000; small: 9)",
    )
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="an option of XLA's for all programs of JAX"
    )
    parser.add_argument("--small", action=argparse.BooleanOptionalAction, default=not gpu, help="shrunk models")
    parser.add_argument("--json", nargs="?", const="auto", metavar="PATH", help="record; alone: in benchmarks/results/")
    args = parser.parse_args(argv)
    args.batch = args.batch or ([1, 2] if args.small else [1, 8, 64, 256])
    args.image = args.image or (32 if args.small else 224)
    args.dtype = args.dtype or ("bf16" if gpu else "f32")
    args.calls = args.calls or (9 if args.small else 300)
    args.seconds = args.seconds or (0.02 if args.small else 1.0)
    if args.single is True:
        args.single = 9 if args.small else 1000
    for name, given, known in (
        ("model", args.model, SERVED),
        ("ways", args.ways, WAYS),
        ("quantize", args.quantize, QUANTIZED),
    ):
        unknown = [one for one in given if one not in known]
        if unknown:
            parser.error(f"--{name} {','.join(unknown)}: expected some of {','.join(known)}")
    if min(*args.batch, args.calls, args.image) < 1 or args.seconds <= 0:
        parser.error("--batch, --calls and --image are at least 1, --seconds above 0")
    if args.single is not None:
        if args.single < 1:
            parser.error(f"--single {args.single}: expected at least 1 call")
        if 1 not in args.batch or not ("frozen" in args.ways or args.quantize):
            parser.error("--single times a frozen model at batch 1: expected 1 in --batch, and frozen in --ways")
    if any("=" not in option for option in args.option):
        parser.error("--option: expected NAME=VALUE")
    args.option = {name: _value(text) for name, text in (option.split("=", 1) for option in args.option)}
    return args


def _value(text: str) -> bool | int | str:
    """An option's value, in the type that XLA asks for."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if text.lstrip("-").isdigit() else text


def variables_of(model: Any, image: int) -> Tree:
    """Parameters and statistics as of a trained model: nothing is 0 or 1, and answers stay of the size of 1."""
    shapes = jax.eval_shape(
        functools.partial(model.init, train=False), jax.random.key(0), jnp.zeros((1, image, image, 3))
    )
    return drawn(shapes)


def drawn(shapes: Tree) -> Tree:
    """Values as of a trained model for each shape: kernels by their inputs, deviations about 1, the rest about 0."""
    rng = np.random.default_rng(0)

    def values(path: Any, leaf: Any) -> np.ndarray:
        name = next(entry.key for entry in reversed(path) if hasattr(entry, "key"))
        if name in ("kernel", "w"):
            fan_in = np.prod(leaf.shape[:-1])
            array = rng.standard_normal(leaf.shape) * np.sqrt(1.5 / fan_in)
        elif name in ("scale", "var"):
            array = rng.uniform(0.6, 1.2, leaf.shape)
        else:
            array = 0.1 * rng.standard_normal(leaf.shape)
        return array.astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(values, shapes)


# ----------------------------------------------------------------------------------------------------------------------
# A way: a program for a batch


def answers(way: str, model: Any, variables: Tree, images: np.ndarray, args: argparse.Namespace) -> Answers:
    """Where torch or onnx cannot take part, an exception says why."""
    apply = functools.partial(model.apply, train=False)
    if way in ("torch", "onnx"):
        from benchmarks import torch_models

        return torch_models.answers(way, model, variables, images, args.dtype)
    if way == "plain":
        return Answers.of_jax(way, apply, (variables, images), args.option)
    if way == "accelerate":
        return Answers.of_jax(way, jaxconv.accelerate(apply), (variables, images), args.option)
    if way == "constants":
        held = jax.device_put(variables)
        return Answers.of_jax(way, lambda x: apply(held, x), (images,), args.option)
    frozen = frozen_model(way, model, variables, args)
    options = {**options_of(jaxconv.cost(frozen)(images)["flops"]), **args.option}  # as where it is called as it is
    if way == "frozen" or way in QUANTIZED:
        return Answers.of_jax(way, frozen, (images,), options)
    frozen.report(images)  # which makes the weights
    return Answers.of_jax(way, frozen.apply, (frozen.weights, images), options)


def frozen_model(way: str, model: Any, variables: Tree, args: argparse.Namespace) -> jaxconv.Frozen[jax.Array]:
    apply = functools.partial(model.apply, train=False)
    return args.quantized[way] if way in QUANTIZED else jaxconv.freeze(apply, variables)


def quantized(dtype: str, model: Any, variables: Tree, args: argparse.Namespace) -> Any:
    """The model, calibrated on images like those that it answers, which it does not see there."""
    rng = np.random.default_rng(10**6)
    batches = [
        rng.standard_normal((2 if args.small else 32, args.image, args.image, 3), np.float32)
        for _ in range(2 if args.small else 4)
    ]
    apply = functools.partial(model.apply, train=False)
    return jaxconv.freeze(apply, variables, quantize=dtype, calibrate=batches)


# ----------------------------------------------------------------------------------------------------------------------
# Measurements


def latency(one: Answers, calls: int) -> list[float]:
    """Milliseconds of each call."""
    samples = []
    for _ in range(calls):
        begin = time.perf_counter()
        one.wait(one.call())
        samples.append((time.perf_counter() - begin) * 1e3)
    return samples


def queued(one: Answers, calls: int) -> float:
    """Milliseconds a call, of several queued back to back."""
    begin = time.perf_counter()
    for _ in range(calls):
        last = one.call()
    one.wait(last)
    return (time.perf_counter() - begin) / calls * 1e3


def kernels(one: Answers, calls: int = 8) -> tuple[float, float] | None:
    """(kernels, their milliseconds) a call, as CUPTI sees them; None without it."""
    session = timing.cupti()
    if session is None:
        return None

    def run() -> None:
        for _ in range(calls):
            one.wait(one.call())

    records = session(run)
    return len(records) / calls, sum(ms for _, ms in records) / calls


def measured(programs: Sequence[Answers], batch: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each way, in rounds that take turns, so that a drifting clock meets all alike."""
    samples: dict[str, list[float]] = {one.way: [] for one in programs}
    rates: dict[str, list[float]] = {one.way: [] for one in programs}
    for _ in range(ROUNDS):
        for one in programs:
            latency(one, 3)
            samples[one.way] += latency(one, -(-args.calls // ROUNDS))
            many = max(2, int(args.seconds / ROUNDS / statistics.median(samples[one.way]) * 1e3))
            rates[one.way].append(queued(one, many))
    rows = []
    for one in programs:
        ms = statistics.median(samples[one.way])
        seen = kernels(one)
        rows.append(
            {
                "way": one.way,
                "batch": batch,
                "ms": ms,
                "p99_ms": float(np.quantile(samples[one.way], 0.99)),
                "calls": len(samples[one.way]),
                "queued_ms": statistics.median(rates[one.way]),
                "queued_samples_ms": rates[one.way],
                "images_per_s": batch / statistics.median(rates[one.way]) * 1e3,
                "launches": None if one.launches is None else one.launches.total,
                "graphs": None if one.launches is None else one.launches.graphs,
                "captured": None if one.launches is None else one.launches.captured,
                "launched": None if one.launches is None else dict(one.launches.by_kind),
                "kernels": seen and seen[0],
                "kernels_ms": seen and seen[1],
                "trace_s": one.trace_s,
                "compile_s": one.compile_s,
                "memory_bytes": one.memory_bytes,
            }
        )
    return rows


def called_alone(
    way: str,
    predict: Callable[[Any], jax.Array],
    images: np.ndarray,
    reference: np.ndarray,
    allowed: float,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """The row of a frozen model's single answer; each way to call it may err by as much as the way itself."""
    row, answered = single.measured(predict, images, args.option, args.single)
    error = max(float(np.abs(answer - reference).max()) for answer in answered.values()) / np.abs(reference).max()
    check = {"error": float(error), "allowed": allowed, "agrees": bool(error <= allowed)}
    return {"way": single.row_name(way), "batch": 1, **row, **check}


def compared(
    programs: Sequence[Answers], reference: np.ndarray, dtype: str, noise: Mapping[str, float] | None = None
) -> list[dict[str, Any]]:
    """The error of each, and whether it is one of rounding. `noise`: of quantised ways, relative to their answers."""
    scale = np.abs(reference).max()
    errors = [float(np.abs(one.take(one.call()) - reference).max() / scale) for one in programs]
    # Where plain happens to be exact: a rounding of the answers (of products, in TF32), and of some sums in float32.
    tf32 = dtype == "f32" and jax.default_backend() == "gpu"
    rounding = (2.0**-10 if tf32 else float(jnp.finfo(DTYPES[dtype]).eps)) / 2 + 16 * 2.0**-23
    rows = []
    for one, error in zip(programs, errors, strict=True):
        # Half of the largest answer is none of rounding, whatever the calibration images said.
        allowed = ALLOWED * max(errors[0], rounding)
        if noise and one.way in noise:
            allowed = min(ALLOWED * noise[one.way], 0.5)
        rows.append({"error": error, "allowed": allowed, "agrees": error <= allowed})
    return rows


# ----------------------------------------------------------------------------------------------------------------------
# The command


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 1 where answers disagree."""
    args = parse(argv)
    environment = record.environment()
    say = functools.partial(print, flush=True)
    say(f"{environment['device']}, jax {jax.__version__}")
    agree = True
    for name in args.model:
        agree &= one_model(name, args, environment, say)
    return 0 if agree else 1


def one_model(name: str, args: argparse.Namespace, environment: dict[str, Any], say: Callable[[str], None]) -> bool:
    import flax.linen

    from benchmarks.models import SERVED

    model = SERVED[name](flax.linen, DTYPES[args.dtype], small=args.small)
    exact = SERVED[name](flax.linen, jnp.float32, small=args.small)
    variables = variables_of(model, args.image)
    config = {
        "op": "infer",
        "model": name,
        "dtype": args.dtype,
        "precision": None,
        "layout": None,
        "small": args.small,
        "batch": None,
        "image": args.image,
        "options": args.option,
    }
    say(f"{name}{' small' if args.small else ''}, {args.image}², {args.dtype}")
    rows: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    ways = [*sorted(set(args.ways) - {"plain"}, key=WAYS.index), *args.quantize]
    args.quantized, noise = {}, {}
    for dtype in args.quantize:
        args.quantized[dtype] = quantized(dtype, model, variables, args)
        table = args.quantized[dtype].quantization
        noise[dtype] = 10 ** (-table[-1].signal_to_noise / 20)
        say(f"{table.summary}; the answers' signal to noise is {table[-1].signal_to_noise:.1f} dB")
    for batch in args.batch:
        images = np.random.default_rng(batch).standard_normal((batch, args.image, args.image, 3), np.float32)
        with jax.default_matmul_precision("highest"):
            reference = np.asarray(jax.jit(functools.partial(exact.apply, train=False))(variables, images), np.float64)
        programs = []
        for way in ("plain", *ways):
            try:
                programs.append(answers(way, model, variables, images, args))
            except Exception as error:  # the others' compilers raise whatever they like
                if way not in ("torch", "onnx"):
                    raise
                skipped[way] = f"{type(error).__name__}: {error}".splitlines()[0]
        checks = compared(programs, reference, args.dtype, noise)
        alone = []
        if args.single and batch == 1:  # before CUPTI, which stays, has been attached
            for one, check in zip(programs, checks, strict=True):
                if one.way == "frozen" or one.way in QUANTIZED:
                    predict = frozen_model(one.way, model, variables, args)
                    alone.append(called_alone(one.way, predict, images, reference, check["allowed"], args))
        new = [{**row, **check} for row, check in zip(measured(programs, batch, args), checks, strict=True)]
        plain = new[0]["ms"]
        rows += [{**row, "plain_ms": plain, "plain_queued_ms": new[0]["queued_ms"]} for row in new]
        for row in new:
            say(line(row, new[0]))
        kernels_ms = {row["way"]: row["kernels_ms"] for row in new}
        alone = [{**row, "kernels_ms": kernels_ms[single.way_of(row)]} for row in alone]
        rows += alone
        for row in alone:
            say(lines_alone(row))
        if args.json:  # after each batch: a run that is cut short is worth having
            path = record.write(args.json, {**environment, **config, "skipped": skipped, "rows": rows})
    for way, why in skipped.items():
        say(f"{way:<16} left out: {why}")
    if args.json:
        say(f"written: {path}")
    return all(row["agrees"] for row in rows)


def line(row: dict[str, Any], plain: dict[str, Any]) -> str:
    text = f"{row['way']:<16} batch {row['batch']:>4}: {row['ms']:8.3f} ms a call that is waited for (p99 "
    text += f"{row['p99_ms']:.3f}), {row['images_per_s']:.0f} images/s queued"
    if row is not plain:
        text += f", {plain['ms'] / row['ms']:.2f} and {plain['queued_ms'] / row['queued_ms']:.2f} of plain's speed"
    if row["launches"] is not None:
        text += f"; {row['launches']} launches, {row['captured']} in {row['graphs']} graphs"
    if row["kernels"] is not None:
        text += f"; {row['kernels']:.0f} kernels of {row['kernels_ms']:.3f} ms"
    text += f"; traced in {row['trace_s']:.1f} s, compiled in {row['compile_s']:.1f} s"
    if row["memory_bytes"] is not None:
        text += f", {row['memory_bytes'] / 2**20:.0f} MiB"
    return text + disagreement(row)


def lines_alone(row: dict[str, Any]) -> str:
    tables = (single.text(table) for table in (single.table(row), single.split(row)))
    title = f"{row['way']}, {row['called'][0]['calls']} calls of each way, in turns"
    return "\n".join([title, *tables, *single.sentences(row)]).replace("`", "") + disagreement(row)


def disagreement(row: dict[str, Any]) -> str:
    if row["agrees"]:
        return ""
    return f"\n{'':16} DISAGREES: off by {row['error']:.2g}, allowed {row['allowed']:.2g}"


if __name__ == "__main__":
    sys.exit(main())

"""`python -m benchmarks cpu --minutes M --seed S`: random layers on a CPU, plain against enable and accelerate.

A layer is drawn as somebody writes it in jnp, lax or Flax: a convolution of 1 to 3 dimensions (groups, depthwise,
transposed), a dense layer, a batch-, group- or layer-norm, max-pooling, squeeze-and-excitation, with or without an
activation behind it, in float32 or bfloat16, of one image to many; its results alone, or its gradients too. It is
compiled plain and each way. Where both programs are the same instructions nothing is timed. The others take turns, and
of each the shortest call counts, so that other work on the machine matters little: a ratio is above the limit if it is
by the wall clock and in processor time. It is then measured again, for longer, and printed if it stands. The problems
depend on the seed alone.

Ways: `enable`; `accelerate`; `module`, jaxconv.linen's layer in the place of Flax's.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import math
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import jaxconv
import jaxconv.linen
from benchmarks import record

LIMIT = 1.05
ELEMENTS = 3 << 20  # of the largest array
FLOPS = 1 << 30  # of a forward pass
KINDS = ("conv", "grouped", "depthwise", "transposed", "dense", "batchnorm", "groupnorm", "layernorm", "pool")
KINDS += ("squeeze_excite", "conv_batchnorm")
WAYS = ("enable", "accelerate", "module")
# A sample is calls for about so long; samples in a measurement; how many more where it is measured again.
SAMPLE_S, SAMPLES, AGAIN = 2e-3, 9, 8


@dataclasses.dataclass(frozen=True)
class Problem:
    """A layer: `layers(own)` is Flax's, or jaxconv.linen's where `own`; None where there is no such module."""

    name: str
    kind: str
    text: str
    gradient: bool
    plain: Callable[..., Any]  # of arrays
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    module: Callable[..., Any] | None = None

    def program(self, way: str) -> Any:
        """Jitted."""
        f = self.module if way == "module" else self.plain
        assert f is not None
        f = jaxconv.accelerate(f) if way == "accelerate" else f

        def run(dy: jax.Array, *arrays: jax.Array) -> Any:
            y, pull = jax.vjp(f, *arrays)
            return y, pull(dy)

        return jax.jit(run) if self.gradient else jax.jit(lambda _, *arrays: f(*arrays))

    def arrays(self) -> list[jax.Array]:
        keys = jax.random.split(jax.random.key(len(self.text)), len(self.shapes) + 1)
        y = jax.eval_shape(self.plain, *self.shapes)
        given = [(y.shape, y.dtype), *((s.shape, s.dtype) for s in self.shapes)]
        return [jax.random.normal(k, s).astype(d) for k, (s, d) in zip(keys, given, strict=True)]


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "": lambda y: y,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
}


def draw(seed: int, kinds: tuple[str, ...] = KINDS) -> Iterator[Problem]:
    """Problems without an end."""
    r = random.Random(seed)
    n = 0
    while True:
        kind = r.choice(kinds)
        problem = _drawn(r, kind, f"s{seed}.{n}")
        if problem is not None:
            n += 1
            yield problem


def _drawn(r: random.Random, kind: str, name: str) -> Problem | None:
    dtype = r.choice((jnp.float32, jnp.float32, jnp.bfloat16))
    gradient = r.random() < 0.6
    batch = r.choice((1, 1, 2, 4, 8, 16, 32, 64))
    channels = r.choice((3, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 512))
    nd = r.choice((1, 2, 2, 2, 3))
    extent = r.choice({1: (16, 64, 256, 1024, 4096), 2: (4, 7, 8, 14, 16, 28, 32, 56, 64), 3: (4, 8, 12, 16)}[nd])
    spatial = (extent,) * nd
    act = r.choice(tuple(ACTIVATIONS))
    x = (batch, *spatial, channels)
    if batch * extent**nd * channels > ELEMENTS:
        return None
    shapes: list[tuple[int, ...]]
    module = None
    if kind in ("conv", "grouped", "depthwise", "transposed", "conv_batchnorm"):
        layer = _conv(r, kind, nd, x, act, dtype)
        if layer is None:
            return None
        plain, module, shapes, text = layer
    elif kind == "dense":
        out = r.choice((10, 32, 64, 128, 256, 512, 1000, 1024))
        x = r.choice(((batch, channels), (batch, extent, channels), (batch * extent, channels)))
        if 2 * math.prod(x) * out > FLOPS or math.prod(x[:-1]) * out > ELEMENTS:
            return None
        shapes, text = [x, (channels, out), (out,)], f"{list(x)} -> {out}"

        def of(own: bool) -> Callable[..., Any]:
            layer = jaxconv.linen.Dense(out, dtype=dtype) if own else nn.Dense(out, dtype=dtype)
            return lambda x, w, b: ACTIVATIONS[act](layer.apply({"params": {"kernel": w, "bias": b}}, x))

        plain, module = of(False), of(True)
    elif kind in ("batchnorm", "groupnorm", "layernorm"):
        plain, module, text = _norm(r, kind, x, act, dtype)
        shapes = [x, (channels,), (channels,)]
    elif kind == "pool":
        window, stride = r.choice(((2, 2), (3, 2), (3, 1)))
        if window > extent:
            return None
        act, shapes, text = "", [x], f"{list(x)}, {window} by {stride}"
        plain = functools.partial(nn.max_pool, window_shape=(window,) * nd, strides=(stride,) * nd)

        def module(x: jax.Array) -> jax.Array:
            return jaxconv.max_pool(x, (window,) * nd, stride=(stride,) * nd)

    else:
        hidden = max(1, channels // r.choice((4, 16)))
        act, text = "", f"{list(x)} by {hidden}"
        shapes = [x, (channels, hidden), (hidden,), (hidden, channels), (channels,)]
        axes = tuple(range(1, nd + 1))

        def plain(x: jax.Array, w1: jax.Array, b1: jax.Array, w2: jax.Array, b2: jax.Array) -> jax.Array:
            g = jax.nn.relu(x.mean(axes, keepdims=True) @ w1 + b1)
            return x * jax.nn.sigmoid(g @ w2 + b2)

        def module(x: jax.Array, w1: jax.Array, b1: jax.Array, w2: jax.Array, b2: jax.Array) -> jax.Array:
            return jaxconv.squeeze_excite(x, w1, b1, w2, b2)

    params = jnp.float32 if kind in ("batchnorm", "groupnorm", "layernorm", "dense", "conv_batchnorm") else dtype
    typed = tuple(jax.ShapeDtypeStruct(s, dtype if i == 0 else params) for i, s in enumerate(shapes))
    text = " ".join(filter(None, (jnp.dtype(dtype).name, text, act, "and gradients" if gradient else "")))
    return Problem(name, kind, text, gradient, plain, typed, module)


def _conv(r: random.Random, kind: str, nd: int, x: tuple[int, ...], act: str, dtype: Any) -> Any:
    c, extent = x[-1], x[1]
    window = r.choice((1, 1, 3, 3, 3, 3, 5, 7, 2, 4))
    stride = r.choice((1, 1, 1, 2))
    dilation = r.choice((1, 1, 1, 2)) if stride == 1 and kind != "transposed" else 1
    groups = {"depthwise": c, "grouped": r.choice((2, 4, 8, 16, 32))}.get(kind, 1)
    out = c if kind == "depthwise" or (kind != "grouped" and r.random() < 0.5) else r.choice((16, 32, 64, 128, 256))
    if c % groups or out % groups or (kind == "grouped" and groups >= c):
        return None
    filters, strides = (window,) * nd, (stride,) * nd
    grown = stride**nd if kind == "transposed" else 1 / stride**nd
    pixels = math.prod(x[:-1]) * grown
    flops = 2 * pixels * (c // groups) * out * window**nd / (stride**nd if kind == "transposed" else 1)
    if flops > FLOPS / 4 or pixels * out > ELEMENTS or window * dilation > 2 * extent:
        return None
    normed = kind == "conv_batchnorm"
    w = (*filters, c // groups, out)
    text = (
        f"{list(x)} * {list(w)}" + (f" by {stride}" if stride > 1 else "") + (f" dilated {dilation}" * (dilation > 1))
    )
    options: dict[str, Any] = dict(strides=strides, dtype=dtype)
    if kind != "transposed":
        options |= dict(kernel_dilation=(dilation,) * nd, feature_group_count=groups)

    def of(own: bool) -> Callable[..., Any]:
        library = jaxconv.linen if own else nn
        layer = (library.ConvTranspose if kind == "transposed" else library.Conv)(out, filters, **options)
        norm = library.BatchNorm(use_running_average=False, dtype=dtype)

        def f(x: jax.Array, w: jax.Array, b: jax.Array, *affine: jax.Array) -> jax.Array:
            y = layer.apply({"params": {"kernel": w, "bias": b}}, x)
            return ACTIVATIONS[act](_applied(norm, y, *affine) if normed else y)

        return f

    shapes = [x, w, (out,), *[(out,), (out,)] * normed]
    return of(False), of(True), shapes, text


def _applied(norm: Any, x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """A batch-norm in training: running statistics are updated, and returned by nobody."""
    n = x.shape[-1]
    variables = {
        "params": {"scale": scale, "bias": bias},
        "batch_stats": {"mean": jnp.zeros(n), "var": jnp.ones(n)},
    }
    return norm.apply(variables, x, mutable=["batch_stats"])[0]


def _norm(r: random.Random, kind: str, x: tuple[int, ...], act: str, dtype: Any) -> Any:
    groups = r.choice([g for g in (1, 2, 4, 8, 16, 32) if x[-1] % g == 0])

    def of(own: bool) -> Callable[..., Any]:
        library = jaxconv.linen if own else nn
        if kind == "batchnorm":
            norm = library.BatchNorm(use_running_average=False, dtype=dtype)
            return lambda x, scale, bias: ACTIVATIONS[act](_applied(norm, x, scale, bias))
        norm = library.GroupNorm(groups, dtype=dtype) if kind == "groupnorm" else library.LayerNorm(dtype=dtype)
        return lambda x, s, b: ACTIVATIONS[act](norm.apply({"params": {"scale": s, "bias": b}}, x))

    return of(False), of(True), f"{list(x)}" + (f" in {groups} groups" if kind == "groupnorm" else "")


# ----------------------------------------------------------------------------------------------------------------------
# Times


def instructions(compiled: Any) -> list[str]:
    """A program's instructions without names, in an order that does not depend on the program's."""
    text = re.sub(r", metadata=\{[^}]*\}", "", compiled.as_text())
    text = re.sub(r"%[\w.\-]+", "%", re.sub(r"parameter\(\d+\)", "parameter", text))
    return sorted(line.strip().removeprefix("ROOT ") for line in text.splitlines() if " = " in line)


Times = dict[str, tuple[float, float]]  # of each way the seconds of a call: by the wall clock, of processor time


def least(programs: dict[str, Any], arrays: list[jax.Array], samples: int) -> Times:
    """Of each program the least of many samples, of either kind; they take turns."""
    best: Times = dict.fromkeys(programs, (math.inf, math.inf))
    for f in programs.values():
        jax.block_until_ready(f(*arrays))
    begin = time.perf_counter()
    jax.block_until_ready(next(iter(programs.values()))(*arrays))
    calls = max(1, min(50, int(SAMPLE_S / max(time.perf_counter() - begin, 1e-6))))
    for i in range(samples):
        order = list(programs) if i % 2 else list(programs)[::-1]
        for name in order:
            f = programs[name]
            begin, busy = time.perf_counter(), time.process_time()
            for _ in range(calls):
                jax.block_until_ready(f(*arrays))
            wall, busy = time.perf_counter() - begin, time.process_time() - busy
            best[name] = min(best[name][0], wall / calls), min(best[name][1], busy / calls)
    return best


def ratios(best: Times) -> dict[str, float]:
    """Each way's time relative to plain's: the lesser of the wall clock's ratio and that of processor time.

    On a machine that does other work a call of milliseconds on all cores seldom runs undisturbed, and its wall time is
    then the others'; where processor time is the same, nothing is slower.
    """
    wall, busy = best["plain"]
    return {way: min(w / wall, b / max(busy, 1e-9)) for way, (w, b) in best.items() if way != "plain"}


def measure(problem: Problem, ways: tuple[str, ...], limit: float) -> dict[str, Any]:
    """ms of plain and of each way; a way whose program is plain's has none of its own."""
    arrays = problem.arrays()
    lowered = {"plain": problem.program("plain").lower(*arrays)}
    for way in ways:
        if way == "module" and problem.module is None:
            continue
        with jaxconv.enabled() if way == "enable" else contextlib.nullcontext():
            lowered[way] = problem.program(way).lower(*arrays)
    text = lowered["plain"].as_text()
    same = [way for way in lowered if way != "plain" and lowered[way].as_text() == text]
    compiled = {way: one.compile() for way, one in lowered.items() if way not in same} if len(same) < len(ways) else {}
    if compiled:
        plain = instructions(compiled["plain"])
        same += [way for way in compiled if way != "plain" and instructions(compiled[way]) == plain]
    programs = {way: f for way, f in compiled.items() if way not in same}
    best: Times = {}
    if len(programs) > 1:
        best = least(programs, arrays, SAMPLES)
        again = [way for way, ratio in ratios(best).items() if ratio > limit]
        if again:
            slow = {way: programs[way] for way in ("plain", *again)}
            best |= least(slow, arrays, SAMPLES * AGAIN)  # the longer measurement stands
    return {
        "case": problem.name,
        "kind": problem.kind,
        "problem": problem.text,
        "ms": {way: round(1e3 * wall, 6) for way, (wall, _) in best.items()},
        "processor_ms": {way: round(1e3 * busy, 6) for way, (_, busy) in best.items()},
        "ratio": {way: round(ratio, 3) for way, ratio in ratios(best).items()} if best else {},
        "same": same,
    }


def summary(rows: list[dict[str, Any]], limit: float) -> Iterator[str]:
    """Of each kind and way: problems, those with plain's program, the time relative to plain's."""
    yield f"{'kind':16} {'way':11} problems  same program  geometric mean  above {limit}  most"
    by: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    same: collections.Counter[tuple[str, str]] = collections.Counter()
    for row in rows:
        for way, ratio in [*row["ratio"].items(), *((way, 1.0) for way in row["same"])]:
            by[row["kind"], way].append(ratio)
        same.update((row["kind"], way) for way in row["same"])
    for (kind, way), ratios in sorted(by.items()):
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        above = sum(ratio > limit for ratio in ratios)
        yield (
            f"{kind:16} {way:11} {len(ratios):8}  {same[kind, way]:12}  {mean:14.3f}  {above:{6 + len(str(limit))}}"
            f"  {max(ratios):.2f}"
        )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks cpu", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10, help="of processor time (%(default)s)")
    parser.add_argument("--n", type=int, default=10**9, help="problems, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--ways", nargs="+", default=("enable", "accelerate"), choices=WAYS)
    parser.add_argument("--limit", type=float, default=LIMIT, help="of a way's time over plain's (%(default)s)")
    parser.add_argument("--json", nargs="?", const="auto", metavar="PATH", help="record; alone: in benchmarks/results/")
    args = parser.parse_args(argv)
    if jax.default_backend() != "cpu":
        parser.error("JAX_PLATFORMS=cpu: this is for CPUs")
    environment = record.environment()
    table = dict(op="cpu", dtype="all", precision=None, layout="NHWC", small=False, batch=None, part=f"seed{args.seed}")
    rows: list[dict[str, Any]] = []
    print(f"{environment['device']}, seed {args.seed}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        for problem in draw(args.seed, tuple(args.kinds)):
            if time.process_time() > 60 * args.minutes or len(rows) >= args.n:
                break
            row = measure(problem, tuple(args.ways), args.limit)
            rows.append(row)
            for way, ratio in row["ratio"].items():
                if ratio > args.limit:
                    ms = row["ms"]
                    print(
                        f"{ratio:5.2f}  {way:10} {ms[way]:8.3f} ms, plain {ms['plain']:8.3f}  {row['case']:8}"
                        f"  {row['kind']} {row['problem']}",
                        flush=True,
                    )
    print()
    for line in summary(rows, args.limit):
        print(line)
    if args.json:
        where = record.RESULTS / record.slug(environment["device"]) / "cpu" / f"seed{args.seed}.json"
        record.write(str(where) if args.json == "auto" else args.json, {**environment, **table, "rows": rows})
    return int(any(ratio > args.limit for row in rows for ratio in row["ratio"].values()))


if __name__ == "__main__":
    sys.exit(main())

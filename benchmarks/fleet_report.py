"""What is said of the fleet: a line for each model, the summary, and the table and figure of a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from benchmarks.runs import NOTHING, markdown, provenance

WAYS = ("plain", "enable", "accelerate")
FIGURES = {"nvidia-h100-80gb-hbm3": "fleet_h100.svg", "nvidia-h200": "fleet_h200.svg"}  # a GPU's, in docs/
SLOWER = 0.99  # of plain's speed
MORE = 1.05  # of plain's memory, and of its time to compile

Row = dict[str, Any]


def size_of(model: Any, size: Any) -> str:
    """ "f32, 256 x 32x32x3" """
    return f"{model.dtype}, {size.batch} x {'x'.join(map(str, size.shape))}"


def speed(row: Row, way: str) -> float:
    """Plain's time over a way's."""
    return row["ways"]["plain"]["ms"] / row["ways"][way]["ms"]


def kernels_ms(row: Row, way: str) -> float | None:
    """Of a step or answer, where a profile was taken."""
    kinds = row["ways"].get(way, {}).get("kinds")
    return sum(kinds.values()) if kinds else None


def speed_of_kernels(row: Row, way: str) -> float | None:
    """The time of plain's kernels over that of a way's: what a host that is fast enough would see."""
    plain, ours = kernels_ms(row, "plain"), kernels_ms(row, way)
    return plain / ours if plain and ours else None


def share(row: Row, way: str, of: str) -> float:
    """A way's memory_bytes or compile_s over plain's."""
    return row["ways"][way][of] / row["ways"]["plain"][of]


def agree(rows: Sequence[Row]) -> bool:
    return all(result["agrees"] for row in rows for result in row["ways"].values())


def others(rows: Sequence[Row]) -> list[str]:
    return [way for way in WAYS[1:] if any(way in row["ways"] for row in rows)]


def mean(ratios: Sequence[float]) -> float:
    """The geometric one."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan


def lines(row: Row) -> list[str]:
    """What is printed of a model."""
    size = f"{row['dtype']}, {row['batch']} x {'x'.join(map(str, row['shape']))}"
    out = [f"{row['model']}: {row['use']}, {row['kind']}, {row['library']}, {size}"]
    for way, found in row["ways"].items():
        spread = (max(found["samples_ms"]) - min(found["samples_ms"])) / found["ms"]
        text = f"  {way:<10} {found['ms']:9.3f} ms (within {spread:.1%})"
        text += "" if way == "plain" else f", {speed(row, way):.3f} of plain's speed"
        text += f"; traced in {found['trace_s']:.1f} s, compiled in {found['compile_s']:.1f} s"
        text += "" if way == "plain" else f" ({share(row, way, 'compile_s'):.2f})"
        text += f", {found['memory_bytes'] / 2**30:.3f} GiB"
        text += "" if way == "plain" else f" ({share(row, way, 'memory_bytes'):.3f})"
        text += f"; {sum(found['calls'].values())} native calls" if way != "plain" else ""
        text += "" if found["agrees"] else f"; DISAGREES: off by {found['off']:.2g} of what is allowed"
        out.append(text)
        if found.get("kinds"):
            kinds = ", ".join(f"{kind} {ms:.2f}" for kind, ms in found["kinds"].items())
            out.append(f"{'':13} ms by kind: {kinds}")
    return out


def summary(rows: Sequence[Row]) -> list[str]:
    """Of each way but plain the worst programs and the geometric means: of steps, and where profiles were taken of
    kernels."""
    out = []
    for way in others(rows):
        timed = [row for row in rows if way in row["ways"]]
        slowest = min(timed, key=lambda row: speed(row, way))
        single = [speed(row, way) for row in timed if row["dtype"] == "f32"]
        below = sum(speed(row, way) < SLOWER for row in timed)
        text = f"{way}: worst {speed(slowest, way):.3f} ({slowest['model']}), {below} of {len(timed)} below {SLOWER}; "
        text += f"geometric mean {mean([speed(row, way) for row in timed]):.3f}"
        text += f", of float32 {mean(single):.3f} ({len(single)} programs)" if single else ""
        for of, name in (("memory_bytes", "memory"), ("compile_s", "time to compile")):
            most = max(timed, key=lambda row, of=of: share(row, way, of))
            above = sum(share(row, way, of) > MORE for row in timed)
            text += f"; {name} at most {share(most, way, of):.3f} of plain's ({most['model']}), {above} above {MORE}"
        wrong = [row["model"] for row in timed if not row["ways"][way]["agrees"]]
        out.append(text + (f"; DISAGREES: {', '.join(wrong)}" if wrong else ""))
        profiled = [(ratio, row["model"]) for row in timed if (ratio := speed_of_kernels(row, way))]
        if profiled:
            ratios = [ratio for ratio, _ in profiled]
            below = sum(ratio < SLOWER for ratio in ratios)
            text = f"{way}, by the time of kernels: worst {min(profiled)[0]:.3f} ({min(profiled)[1]}), "
            out.append(f"{text}{below} of {len(profiled)} below {SLOWER}; geometric mean {mean(ratios):.3f}")
    return out


# ----------------------------------------------------------------------------------------------------------------------
# Recorded runs


def table(run: Row) -> str:
    """A row for each model; speeds, memory and times to compile of the other ways relative to plain's."""
    rows, ways = [], others(run["rows"])

    def relative(row: Row, figure: Any) -> list[str]:
        return [f"{figure(row, way):.2f}" if way in row["ways"] else "" for way in ways]

    def both(row: Row, way: str) -> str:
        """Speed of a step, and of its kernels."""
        if way not in row["ways"]:
            return ""
        of_kernels = speed_of_kernels(row, way)
        return f"{speed(row, way):.2f}" + (f" / {of_kernels:.2f}" if of_kernels else "")

    for row in run["rows"]:
        plain = row["ways"]["plain"]
        what = f"{row['dtype']}, {row['batch']} x {'x'.join(map(str, row['shape']))}"
        cells = [row["model"], row["use"], row["kind"], row["library"], what]
        kernels = kernels_ms(row, "plain")
        cells += [f"{plain['ms']:.3f}" + ("" if kernels is None else f" / {kernels:.3f}")]
        cells += [both(row, way) for way in ways]
        cells += [f"{plain['memory_bytes'] / 2**30:.2f}", *relative(row, lambda r, w: share(r, w, "memory_bytes"))]
        cells += [f"{plain['compile_s']:.1f}", *relative(row, lambda r, w: share(r, w, "compile_s"))]
        cells += [" / ".join(f"{row['ways'][way]['trace_s']:.1f}" for way in ("plain", *ways) if way in row["ways"])]
        cells += ["yes" if agree([row]) else "**no**"]
        rows.append(cells)
    head = ["program", "use", "kind", "library", "size"]
    head += ["plain, ms", *(f"speed, {way}" for way in ways)]
    head += ["plain, GiB", *(f"memory, {way}" for way in ways)]
    head += ["plain, s to compile", *(f"compiling, {way}" for way in ways)]
    head += [f"s to trace, {' / '.join(('plain', *ways))}", "losses agree"]
    said = "".join(f"* {line}\n" for line in summary(run["rows"]))
    told = (
        "Speed, memory and compiling: plain = 1. After a slash: the same of the kernels alone. A program whose kernels "
        "take much less time than its step waits for the host, and its times scatter."
    )
    return f"{said}\n{markdown(head, rows, 5)}\n{told}\n\n{provenance(run)}"


def section(runs: dict[str, Row]) -> str:
    """Of each GPU the summary, the figure where it has one, and where the table is; for docs/benchmarks.md."""
    text = ""
    for name, run in runs.items():
        device = name.partition("/")[0]
        text += f"{run['device']} ([table](results/{name}.md)):\n\n"
        text += "".join(f"* {line}\n" for line in summary(run["rows"])) + "\n"
        if device in FIGURES:
            text += f"![Speed of the fleet's programs relative to plain JAX, {run['device']}]({FIGURES[device]})\n\n"
    return text.rstrip("\n") + "\n" if text else NOTHING


def recorded(runs: dict[str, Row]) -> dict[str, Row]:
    """The fleet's tables of GPUs, in full size."""
    return {k: r for k, r in runs.items() if r["op"] == "fleet" and r["platform"] != "cpu" and not r["small"]}


def bars(device: str, runs: dict[str, Row]) -> dict[str, dict[str, float]]:
    """{program: {way: speed}} of a GPU, which a figure is drawn from."""
    found = [run for name, run in recorded(runs).items() if name.startswith(f"{device}/")]
    return {
        f"{row['model']}, {row['dtype']}": {way: round(speed(row, way), 3) for way in WAYS[1:] if way in row["ways"]}
        for run in found
        for row in run["rows"]
    }


def draw(device: str, figure: Any, bars: dict[str, dict[str, float]]) -> None:
    """Bars of the speed relative to plain's, the fastest on top."""
    names = sorted(bars, key=lambda name: max(bars[name].values()))
    figure.set_size_inches(8, 0.26 * len(names) + 1.2)
    axes = figure.subplots()
    for i, (way, colour) in enumerate(zip(WAYS[1:], ("#a6bddb", "#4c72b0"), strict=True)):
        places = [j + 0.2 * (1 - 2 * i) for j in range(len(names))]
        widths = [bars[name].get(way, 1.0) - 1.0 for name in names]
        axes.barh(places, widths, 0.38, left=1.0, label=f"jaxconv.{way}", color=colour)
    axes.set_yticks(range(len(names)), names)
    axes.set_xscale("log")
    every = [ratio for ways in bars.values() for ratio in ways.values()]
    ends = min(0.9, 0.95 * min(every)), max(2.0, 1.1 * max(every))
    ticks = [t for t in (0.5, 0.7, 0.9, 1, 1.5, 2, 4, 8, 16, 32) if ends[0] <= t <= ends[1]]
    axes.set_xticks(ticks, [f"{t:g}x" for t in ticks])
    axes.set_xlim(*ends)
    axes.set_ylim(-0.7, len(names) - 0.3)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.legend(loc="lower right")
    figure.supxlabel(f"plain JAX's time / jaxconv's, {device}", fontsize=9)

"""Figures of the recorded runs, which `python -m benchmarks report` draws.

Each is drawn from a few numbers, of which it keeps a mark: it is stale when they are others, not when another version
of matplotlib would draw it differently.
"""

from __future__ import annotations

import functools
import hashlib
import json
import pathlib
from collections.abc import Callable
from typing import Any

from benchmarks import fleet_report, limits
from benchmarks.cases import BY_OP
from benchmarks.runs import DEVICE, STEPS, WAYS, Run, is_step_alone, problems, training_step
from benchmarks.steps import KINDS

XLA, OURS = "#b0b0b0", "#4c72b0"
SECOND = "nvidia-h100-80gb-hbm3"  # where PyTorch's steps were measured too
NAMES = {DEVICE: "one H200", SECOND: "one H100"}


def _bars(runs: dict[str, Run]) -> dict[str, dict[str, float]]:
    """{case: {pass: XLA's time over ours}} of the core convolutions in bfloat16."""
    bars: dict[str, dict[str, float]] = {}
    for row in runs.get(f"{DEVICE}/conv-bf16-nhwc", {"rows": ()})["rows"]:
        if row["contender"] == "ours" and row["suite"] == "core" and row.get("xla_over_this"):
            bars.setdefault(f"{row['case']}: {row['problem']}", {})[row["pass"]] = round(row["xla_over_this"], 3)
    return bars


def draw_bars(figure: Any, bars: dict[str, dict[str, float]]) -> None:
    """Bars of the speed relative to XLA; the order of the cases is that of their best pass."""
    names = sorted(bars, key=lambda case: max(bars[case].values()))
    passes = [p for p in ("fprop", "dgrad", "wgrad") if any(p in bars[name] for name in names)]
    figure.set_size_inches(8, 0.36 * len(names) + 1.2)
    axes = figure.subplots()
    for i, (pass_, colour) in enumerate(zip(passes, (OURS, "#dd8452", "#55a868"), strict=False)):
        places = [j + 0.27 * (1 - i) for j in range(len(names))]
        axes.barh(places, [bars[name].get(pass_, 0) for name in names], 0.25, label=pass_, color=colour)
    axes.set_yticks(range(len(names)), names)
    axes.set_xscale("log")
    axes.set_xticks(ticks := [1, 2, 4, 8, 16, 32, 64], [f"{t}x" for t in ticks])
    axes.set_xlim(0.8, 1.15 * max(max(case.values()) for case in bars.values()))
    axes.axvline(1, color="black", linewidth=0.8)
    axes.legend(loc="lower right")
    label = "XLA's time / jaxconv's, bfloat16, one H200; 1x: XLA is at least as fast, so it runs"
    figure.supxlabel(label, fontsize=9)


def _steps(runs: dict[str, Run]) -> dict[str, dict[str, float]]:
    """{training step: {way: milliseconds}} on one device."""
    steps: dict[str, dict[str, float]] = {}
    for name in STEPS:
        run = runs.get(f"{DEVICE}/train-{name}")
        if run:
            steps[training_step(run)] = {row["way"]: round(row["ms"], 2) for row in run["rows"] if row["devices"] == 1}
    return steps


def _draw_ways(figure: Any, steps: dict[str, dict[str, float]], decimals: int, label: str) -> Any:
    """A bar for each way of each step. Returns its axes."""
    ways = [way for way in WAYS if any(way in step for step in steps.values())]
    figure.set_size_inches(8, 0.2 * sum(map(len, steps.values())) + 0.25 * len(steps) + 1.2)
    axes = figure.subplots()
    colours = dict(zip(WAYS, (XLA, "#a6bddb", "#74a9cf", "#2b8cbe", OURS, "#dd8452"), strict=True))
    place, ticks = 0.0, []
    for step in reversed(steps.values()):
        first = place
        for way in (way for way in reversed(ways) if way in step):
            axes.barh(place, step[way], 0.9, color=colours[way])
            axes.text(step[way], place, f" {step[way]:.{decimals}f}", va="center", fontsize=8)
            place += 1
        ticks.append((first + place - 1) / 2)
        place += 0.7
    axes.set_yticks(ticks, list(reversed(steps)))
    bars = [axes.barh(0, 0, color=colours[way]) for way in ways]
    names = [WAYS[way].replace("`", "") for way in ways]
    figure.legend(bars, names, loc="outside upper center", ncols=min(len(ways), 3), fontsize=8, frameon=False)
    figure.supxlabel(label, fontsize=9)
    return axes


def _draw_steps(figure: Any, steps: dict[str, dict[str, float]]) -> None:
    _draw_ways(figure, steps, 1, "milliseconds a training step, one H200")


def _kinds(device: str, runs: dict[str, Run]) -> dict[str, dict[str, Any]]:
    """{training step: {way: {kind of work: milliseconds}}} on one device, of the runs that a profile was taken of."""
    kinds: dict[str, dict[str, Any]] = {}
    for name, run in runs.items():
        if not name.startswith(f"{device}/") or not is_step_alone(run):
            continue
        ways = {
            row["way"]: {kind: round(ms, 2) for kind, ms in row["kinds"].items()}
            for row in run["rows"]
            if row.get("kinds")
        }
        if ways:
            kinds[training_step(run)] = ways
    return kinds


def _draw_kinds(device: str, figure: Any, steps: dict[str, dict[str, Any]]) -> None:
    """A bar for each way, of a piece for each kind of work."""
    count = sum(map(len, steps.values()))
    figure.set_size_inches(8, 0.3 * count + 0.25 * len(steps) + 1.2)
    axes = figure.subplots()
    shades = ("#4c72b0", "#64b5cd", "#dd8452", "#8172b3", "#55a868", "#c44e52", "#937860", "#b0b0b0")
    colours = dict(zip(KINDS, shades, strict=True))
    place, ticks = 0.0, []
    for step, ways in reversed(steps.items()):
        for way in reversed(WAYS):
            if way not in ways:
                continue
            left = 0.0
            for kind in KINDS:
                axes.barh(place, ways[way].get(kind, 0.0), 0.9, left=left, color=colours[kind])
                left += ways[way].get(kind, 0.0)
            axes.text(left, place, f" {left:.1f}", va="center", fontsize=8)
            ticks.append((place, f"{step}, {WAYS[way].replace('`', '')}"))
            place += 1
        place += 0.7
    axes.set_yticks(*zip(*ticks, strict=True))
    used = [kind for kind in KINDS if any(kind in kinds for ways in steps.values() for kinds in ways.values())]
    bars = [axes.barh(0, 0, color=colours[kind]) for kind in used]
    figure.legend(bars, used, loc="outside upper center", ncols=len(used), fontsize=8, frameon=False)
    figure.supxlabel(f"milliseconds of kernels a training step, {NAMES[device]}", fontsize=9)


def _fractions(device: str, runs: dict[str, Run]) -> dict[str, dict[str, float]]:
    """{training step: {way: its roofline over its milliseconds}} on one device."""
    fractions: dict[str, dict[str, float]] = {}
    for name, run in runs.items():
        if name.startswith(f"{device}/") and is_step_alone(run):
            limited = [row for row in run["rows"] if row["devices"] == 1 and row.get("limit_ms")]
            if limited:
                fractions[training_step(run)] = {row["way"]: round(row["limit_ms"] / row["ms"], 3) for row in limited}
    return dict(sorted(fractions.items(), key=lambda item: -item[1].get("accelerate", 0.0)))


def _draw_fractions(device: str, figure: Any, steps: dict[str, dict[str, float]]) -> None:
    """The line at 1 is the roofline."""
    axes = _draw_ways(figure, steps, 2, f"part of the training step's own roofline, {NAMES[device]}")
    axes.set_xlim(0, 1.05)
    axes.axvline(1, color="black", linewidth=0.8)


def _roofline(runs: dict[str, Run]) -> dict[str, Any]:
    """Every convolution in bfloat16: (operations a byte, XLA's TFLOP/s, ours), and the device's two limits."""
    points = []
    tables = [runs[name] for name in (f"{DEVICE}/conv-bf16-nhwc", f"{DEVICE}/conv-bf16-nhwc-models") if name in runs]
    cases = {case.name: case for case in BY_OP["conv"]}
    for run in tables:
        for (name, pass_), contenders in problems(run).items():
            xla, ours, case = contenders.get("xla", {}), contenders.get("ours", {}), cases.get(name)
            if case and "ms" in xla and "ms" in ours:
                flops, size = case.work(pass_, limits.ITEM_BYTES[run["dtype"]])
                points.append([round(x, 3) for x in (flops / size, flops / xla["ms"] / 1e9, flops / ours["ms"] / 1e9)])
    if not points:
        return {}
    top = tables[0]["ceilings"]
    return {"points": sorted(points), "rate": top["half"] / 1e12, "bandwidth": top["bandwidth"] / 1e12}


def _draw_roofline(figure: Any, numbers: dict[str, Any]) -> None:
    figure.set_size_inches(8, 5)
    axes = figure.subplots()
    intensity, xla, ours = zip(*numbers["points"], strict=True)
    ends = min(intensity) / 1.5, numbers["rate"] / numbers["bandwidth"], max(intensity) * 1.5
    axes.plot(ends, [min(numbers["rate"], x * numbers["bandwidth"]) for x in ends], color="black", linewidth=0.8)
    axes.vlines(intensity, xla, ours, color=XLA, linewidth=0.6)
    axes.scatter(intensity, xla, 12, color=XLA, label="XLA", zorder=2)
    axes.scatter(intensity, ours, 12, color=OURS, label="jaxconv, default choice", zorder=3)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylabel("TFLOP/s")
    axes.legend(loc="lower right")
    figure.supxlabel("operations a byte of minimal traffic; the line is the device's limit, 16 bit", fontsize=9)


# path: (the numbers of recorded runs, what draws them)
FIGURES: dict[str, tuple[Callable[[dict[str, Run]], Any], Callable[[Any, Any], None]]] = {
    "docs/speed.svg": (_bars, draw_bars),
    "docs/steps.svg": (_steps, _draw_steps),
    "docs/steps_by_kind.svg": (functools.partial(_kinds, DEVICE), functools.partial(_draw_kinds, DEVICE)),
    "docs/steps_by_kind_h100.svg": (functools.partial(_kinds, SECOND), functools.partial(_draw_kinds, SECOND)),
    "docs/steps_roofline.svg": (functools.partial(_fractions, DEVICE), functools.partial(_draw_fractions, DEVICE)),
    "docs/steps_roofline_h100.svg": (functools.partial(_fractions, SECOND), functools.partial(_draw_fractions, SECOND)),
    "docs/roofline.svg": (_roofline, _draw_roofline),
    **{
        f"docs/{name}": (
            functools.partial(fleet_report.bars, device),
            functools.partial(fleet_report.draw, NAMES[device]),
        )
        for device, name in fleet_report.FIGURES.items()
    },
}


def mark(numbers: Any) -> str:
    """What a figure says of the numbers that it was drawn from."""
    return "numbers " + hashlib.sha256(json.dumps(numbers).encode()).hexdigest()[:16]


def draw(numbers: Any, onto: Callable[[Any, Any], None], path: pathlib.Path) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    settings = {"svg.hashsalt": "jaxconv", "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False}
    with matplotlib.rc_context(settings | {"axes.spines.right": False}):
        figure = Figure(layout="constrained")
        onto(figure, numbers)
        for axes in figure.axes:
            axes.minorticks_off()
        figure.savefig(path, format="svg", metadata={"Date": None, "Description": mark(numbers)})
        width = figure.bbox.width  # browsers have other fonts: their letters may be a tenth wider
        cut = [legend for legend in figure.legends if legend.get_window_extent().width > width / 1.1]
        assert not cut, f"{path}: its legend is cut off"

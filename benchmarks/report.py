"""Markdown tables and a figure of the recorded runs: whole pages, and blocks between the markers of other documents.

`python -m benchmarks report` leaves one file for each table in benchmarks/results (`record.fold`), then writes
docs/results/ (a page for each table of each device), the blocks of README.md and docs/, and the figures; `--check`
changes nothing and says what is stale.

A marked block is `<!-- benchmarks:NAME -->` ... `<!-- /benchmarks -->`. NAME is `highlights` (README's rows), `summary`
(every recorded table of problems, a line for each pass), `summary/<device>`, `train` (whole training steps, a line for
each way), `infer` (answers of whole models, likewise), `fleet` (many models: the summary and the figure of each GPU),
`cpu` (a line for each kernel on processors), `kernels` (which kernel is the default of how many problems),
`family/<name>` (the problems of which a family of kernels runs a pass by default), `forced/<algorithm>` (those that it
was forced to run), or `<device>/<table>`, as `python -m benchmarks report --list` prints them.
"""

from __future__ import annotations

import argparse
import collections
import math
import pathlib
import re
from collections.abc import Callable, Sequence

from benchmarks import figures, fleet_report, record, single
from benchmarks.cases import BY_OP
from benchmarks.runs import DEVICE, NOTHING, WAYS, Run, is_step_alone, markdown, problems, provenance, training_step
from benchmarks.steps import KINDS

BLOCK = re.compile(r"(<!-- benchmarks:(\S+) -->\n)(.*?)(<!-- /benchmarks -->)", re.DOTALL)
PAGES = "docs/results"  # everything in it is generated
NOTE = "<!-- Written by `python -m benchmarks report`: edit benchmarks/report.py or record anew. -->\n"


def load(folder: pathlib.Path) -> dict[str, Run]:
    """{"<device>/<table>": run}: the newest, and the rows that only older ones have; "runs": those with rows."""
    by_table: dict[str, list[Run]] = {}
    for path in sorted(folder.glob("*/*.json")):
        for run in record.read(path):
            by_table.setdefault(f"{record.slug(run['device'])}/{record.config_name(run)}", []).append(run)
    return {name: _table(record.joined(runs)) for name, runs in sorted(by_table.items())}


def _table(runs: list[Run]) -> Run:
    """One run of several of a table: the head of the newest, all rows in the order of their cases."""
    rows: list[Run] = []
    for run in runs:  # a contender that the newer run of a problem lacks was compared with another run of XLA
        newer = {record.key(row)[:2] for row in rows}
        rows += [{**row, "earlier": True} if record.key(row)[:2] in newer else row for row in run["rows"]]
    if runs[0]["op"] == "train":
        rows.sort(key=lambda row: (row["devices"], list(WAYS).index(row["way"])))
    elif runs[0]["op"] == "fleet":
        rows.sort(key=lambda row: (row["use"] == "infer", row["model"]))
    elif runs[0]["op"] == "infer":
        rows.sort(key=lambda row: (row["batch"], list(SERVING).index(single.way_of(row))))
    else:
        cases = enumerate(BY_OP[runs[0]["op"]])
        place = {(case.name, pass_): (i, j) for i, case in cases for j, pass_ in enumerate(case.passes)}
        rows.sort(key=lambda row: place.get((row["case"], row["pass"]), (len(place), 0)))
    return {**runs[0], "rows": rows, "runs": runs}


def _ms(row: Run | None) -> str:
    if row is None:
        return ""
    return f"{row['ms']:.4f} ±{row['spread'] * 100:.0f}%" if "ms" in row else row["status"]


def table(run: Run) -> str:
    """A row for each problem and pass, and one more for each forced algorithm."""
    if run["op"] == "train":
        return train_table(run)
    if run["op"] == "infer":
        return infer_table(run)
    if run["op"] == "fleet":
        return fleet_report.table(run)
    with_torch = any(row["contender"] == "torch" for row in run["rows"])
    with_limit = run["ceilings"] is not None
    rows = []
    for (case, pass_), contenders in problems(run).items():
        for name, row in contenders.items():
            same = contenders.get("ours", {}).get("same_as") == name
            if not name.startswith("ours") or same or row["status"] == "skipped":
                continue
            plan = row["plan"] or name.partition(":")[2]
            suffix = " (forced, an earlier run)" if "earlier" in row else " (forced)" if ":" in name else ""
            cells = [case, row["problem"], pass_, plan + suffix]
            cells += [f"{row['limit_ms']:.4f}"] if with_limit else []
            cells += [_ms(row), f"{row['rate']:.3g} {row['unit']}" if "ms" in row else ""]
            cells += [f"{row['of_limit']:.2f}" if "ms" in row else ""] if with_limit else []
            xla = None if "earlier" in row else contenders.get("xla")
            cells += [_ms(xla), f"{row['xla_over_this']:.2f}" if row.get("xla_over_this") else ""]
            other = contenders.get("torch")
            if with_torch:
                ratio = f"{other['ms'] / row['ms']:.2f}" if other and "ms" in other and "ms" in row else ""
                cells += [_ms(other), ratio]
            rows.append(cells)
    head = ["case", "problem", "pass", "plan"]
    head += ["limit, ms"] if with_limit else []
    head += ["jaxconv, ms", "rate"]
    head += ["of limit"] if with_limit else []
    head += ["XLA, ms", "XLA / jaxconv"]
    head += ["PyTorch, ms", "PyTorch / jaxconv"] if with_torch else []
    return markdown(head, rows, 4) + "\n" + provenance(run)


def _of_roofline(row: Run) -> str:
    """The part of the roofline of its own run that a step on one device reached."""
    return f"{row['limit_ms'] / row['ms']:.2f}" if row.get("limit_ms") and row["devices"] == 1 else ""


def by_kind(run: Run) -> str:
    """Milliseconds of each kind of work in a step, where a profile was recorded, and the model's roofline."""
    profiled = [row for row in run["rows"] if row.get("kinds")]
    if not profiled:
        return ""
    several = any(row["devices"] > 1 for row in profiled)
    least = run.get("limit_kinds") or {}
    kinds = [kind for kind in KINDS if any(kind in row["kinds"] for row in profiled)]
    rows = []
    if least:
        cells = ["the roofline"] + (["1"] if several else []) + [f"{least[k]:.2f}" if k in least else "" for k in kinds]
        rows.append([*cells, f"{sum(least.values()):.2f}", ""])
    for row in profiled:
        cells = [WAYS[row["way"]]] + ([str(row["devices"])] if several else [])
        cells += [f"{row['kinds'][kind]:.2f}" if kind in row["kinds"] else "" for kind in kinds]
        cells += [f"{sum(row['kinds'].values()):.2f}"]
        rows.append(cells + ([_of_roofline(row)] if run.get("limit_ms") else []))
    head = ["ms by kind"] + (["devices"] if several else []) + kinds + ["together"]
    head += [f"of the roofline, {run['limit_ms']:.2f} ms"] if run.get("limit_ms") else []
    return markdown(head, rows, 1) + "\n"


_BESIDE = {  # a column: kinds of work. In a CUDA graph a product's kernels have no names but those of convolutions.
    "convolutions and products": ("convolution", "product"),
    "norms": ("norm",),
    "pools": ("pool",),
    "elementwise": ("elementwise",),
    "copies, other": ("copies", "exchange", "other"),
}


def beside_least(runs: dict[str, Run]) -> str:
    """Of each step with `accelerate` on one device: milliseconds of each kind of work, and the least for it."""
    rows = []
    for run in runs.values():
        row = next((row for row in run["rows"] if row["way"] == "accelerate" and row.get("kinds")), None)
        if row is None or not row.get("limit_kinds"):
            continue
        cells = []
        for kinds in _BESIDE.values():
            took, least = (sum(of.get(kind, 0.0) for kind in kinds) for of in (row["kinds"], row["limit_kinds"]))
            cells.append(f"{took:.1f} / {least:.1f}" if least else f"{took:.1f}")
        outside = max(row["ms"] - sum(row["kinds"].values()), 0.0)
        together = f"{row['ms']:.1f} / {row['limit_ms']:.1f}"
        rows.append([run["device"], training_step(run), *cells, f"{outside:.1f}", together])
    return markdown(["GPU", "step", *_BESIDE, "outside of kernels", "together"], rows, 2) if rows else NOTHING


OTHER_RUN = "\\* Flax's layers were timed in another run, on a GPU of the same kind.\n"


def _star(rows: list[list[str]]) -> str:
    """What a star in a table says, where there is one."""
    return OTHER_RUN if any(cell.endswith(" *") for row in rows for cell in row) else ""


def _over_flax(run: Run, row: Run) -> tuple[float | None, str]:
    """Flax's step in ms and a row's speed over it: of the row's own run, or with a star of the newest that timed it."""
    if row["flax_ms"]:
        return row["flax_ms"], f"{row['flax_ms'] / row['ms']:.2f}"
    flax = next((r["ms"] for r in run["rows"] if (r["way"], r["devices"]) == ("flax", row["devices"])), None)
    return flax, f"{flax / row['ms']:.2f} *" if flax else ""


def train_table(run: Run) -> str:
    """A row for each way and number of devices."""
    several = any(row["devices"] > 1 for row in run["rows"])
    sized = any(row.get("memory_bytes") for row in run["rows"])
    compared = min(len(row["losses"]) for row in run["rows"])
    rows = []
    for row in run["rows"]:
        cells = [WAYS[row["way"]]] + ([str(row["devices"])] if several else [])
        half = (max(row["samples_ms"]) - min(row["samples_ms"])) / 2 / row["ms"]
        cells += [f"{row['ms']:.2f} ±{half:.1%}", f"{row['images_per_s']:.0f}"]
        cells += [_over_flax(run, row)[1]]
        cells += [f"{row['speedup']:.2f}" if row.get("speedup") else ""] if several else []
        cells += [str(row["calls"]["native"]) if "calls" in row else ""]
        if sized:
            size = row.get("memory_bytes")
            took = row["compile_s"]
            cells += ["" if took is None else f"{took:.0f}", f"{size / 2**30:.2f}" if size else ""]
        cells += [f"{row['losses'][0]:.4f}", f"{row['losses'][compared - 1]:.4f}", "yes" if row["agrees"] else "**no**"]
        rows.append(cells)
    head = ["way"] + (["devices"] if several else []) + ["ms a step", "images/s", "speed, flax = 1"]
    head += ["speed, one device = 1"] if several else []
    head += ["native calls"] + (["s to compile", "GiB a device"] if sized else [])
    head += ["first loss", f"loss {compared}", "losses agree"]
    text = markdown(head, rows, 1) + "\n" + by_kind(run)
    text += f"{_star(rows)}\n" if _star(rows) else ""
    for row in run["rows"]:
        if "replaced" in row:
            left = sum(row["left"].values())
            replaced = ", ".join(f"{count} {layer}" for layer, count in row["replaced"].items())
            text += f"`accelerate` replaced {replaced}; it left {left or 'nothing'}"
            text += "".join(f", {count} {reason}" for reason, count in row["left"].items()) + ".\n\n"
            break
    return text + provenance(run)


# What a way of `python -m benchmarks infer` is, in a table.
SERVING = {
    "plain": "Flax, XLA",
    "constants": "Flax, XLA, weights constants",
    "accelerate": "`jaxconv.accelerate`",
    "frozen": "`jaxconv.freeze`",
    "frozen_arguments": "`jaxconv.freeze`, weights arguments",
    "int8": "`jaxconv.freeze`, int8",
    "float8_e4m3fn": "`jaxconv.freeze`, float8_e4m3fn",
    "torch": "PyTorch, max-autotune",
    "onnx": "ONNX Runtime",
}


def infer_table(run: Run) -> str:
    """A row for each batch and way; of the single answer tables of their own."""
    of_ways = [row for row in run["rows"] if not single.is_single(row)]
    with_kernels = any(row["kernels"] is not None for row in of_ways)
    rows = []
    for row in of_ways:
        cells = [str(row["batch"]), SERVING[row["way"]], f"{row['ms']:.3f}", f"{row['p99_ms']:.3f}"]
        cells += [f"{row['plain_ms'] / row['ms']:.2f}", f"{row['images_per_s']:.0f}"]
        cells += [f"{row['plain_queued_ms'] / row['queued_ms']:.2f}"]
        known = row["launches"] is not None
        cells += [str(row["launches"]), f"{row['captured']} in {row['graphs']}"] if known else ["", ""]
        if with_kernels:
            cells += [f"{row['kernels']:.0f}", f"{row['kernels_ms']:.3f}"] if row["kernels"] is not None else ["", ""]
        cells += [f"{row['trace_s'] + row['compile_s']:.1f}"]
        cells += [f"{row['memory_bytes'] / 2**20:.0f}" if row["memory_bytes"] is not None else ""]
        rows.append([*cells, "yes" if row["agrees"] else "**no**"])
    head = ["batch", "way", "ms a call", "p99", "speed, plain = 1", "images/s, queued", "speed, plain = 1"]
    head += ["launches", "of them in graphs"] + (["kernels", "their ms"] if with_kernels else [])
    head += ["s to trace and compile", "MiB", "answers agree"]
    text = markdown(head, rows, 2) + "\n"
    if run["options"]:
        text += "XLA's options: " + ", ".join(f"`{name}={value}`" for name, value in run["options"].items()) + ".\n\n"
    for way, why in run["skipped"].items():
        text += f"{SERVING[way]} is left out: {why}.\n\n"
    text += "".join(single_answer(row) for row in run["rows"] if single.is_single(row))
    return text + provenance(run)


def single_answer(row: Run) -> str:
    """What a call takes by the way in which it is called, and where its median goes."""
    calls = row["called"][0]["calls"]
    text = f"{SERVING[single.way_of(row)]}, one answer at a time, {calls} calls of each way in turns:\n\n"
    text += "\n".join(markdown(*table, 1) for table in (single.table(row), single.split(row)))
    text += "" if row["agrees"] else "\n**The answers disagree.**\n"
    return text + "\n" + " ".join(single.sentences(row)) + "\n\n"


def infer_summary(runs: dict[str, Run]) -> str:
    """A line for each model, batch and way."""
    rows = []
    for run in runs.values():
        for row in run["rows"]:
            if single.is_single(row):
                continue
            model = f"{run['model']}, {run['dtype']}, {row['batch']} x {run['image']}²"
            ratio = f"{row['plain_ms'] / row['ms']:.2f}"
            rows.append([model, SERVING[row["way"]], f"{row['ms']:.3f}", f"{row['images_per_s']:.0f}", ratio])
    return markdown(["model", "way", "ms a call", "images/s, queued", "speed of a call, plain = 1"], rows, 2)


def train_summary(runs: dict[str, Run]) -> str:
    """A line for each model and way, on one device; of several kinds of device those with most models first."""
    of = collections.Counter(run["device"] for run in runs.values())
    rows = []
    for run in sorted(runs.values(), key=lambda run: (-of[run["device"]], run["device"])):
        for row in run["rows"]:
            figures = [f"{row['ms']:.1f}", f"{row['images_per_s']:.0f}", _over_flax(run, row)[1]]
            figures += [_of_roofline(row)]
            figures += [f"{row['memory_bytes'] / 2**30:.1f}" if row.get("memory_bytes") else ""]
            figures += [f"{row['compile_s']:.0f}" if row.get("compile_s") else ""]
            rows.append([run["device"], training_step(run), WAYS[row["way"]], *figures])
    head = ["GPU", "model", "way", "ms a step", "images/s", "speed, flax = 1"]
    head += ["part of the roofline", "GiB", "s to compile"]
    note = f"\n{_star(rows)}" if _star(rows) else ""
    if len(of) == 1:
        return markdown(head[1:], [row[1:] for row in rows], 2) + note
    return markdown(head, rows, 3) + note


def summary(runs: dict[str, Run], name: Callable[[str], str] = str) -> str:
    """Geometric means by pass and the number of losses, a line for each table."""
    from benchmarks.run import LOSS, geometric_means

    rows = [
        [name(table), suite, pass_, str(count), f"{mean:.2f}", str(losses)]
        for table, run in runs.items()
        if run["op"] not in record.WHOLE
        for suite, pass_, count, mean, losses in geometric_means(run["rows"])
    ]
    head = ["table", "cases", "pass", "problems", "XLA / jaxconv, geometric mean", f"below {LOSS}"]
    return markdown(head, rows, 3)


def _geometric_mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def forced(runs: dict[str, Run]) -> str:
    """How each native algorithm that was forced did against XLA, a line for each pass."""
    ratios: dict[tuple[str, str, str], list[tuple[float, str]]] = {}
    for run in runs.values():
        for row in run["rows"]:
            algorithm = row["contender"].partition(":")[2]
            if algorithm and row.get("xla_over_this"):
                kernel = f"{run['op']} `{algorithm}` {run['dtype']}"
                ratios.setdefault((kernel, row["pass"], run["device"]), []).append((row["xla_over_this"], row["case"]))
    rows = []
    for (kernel, pass_, _), pairs in ratios.items():
        (worst, at_worst), (best, at_best) = min(pairs), max(pairs)
        mean = _geometric_mean([ratio for ratio, _ in pairs])
        cells = [f"{worst:.2f} ({at_worst})", f"{best:.2f} ({at_best})"]
        rows.append([kernel, pass_, str(len(pairs)), f"{mean:.2f}", *cells])
    head = ["kernel", "pass", "problems", "XLA / kernel, geometric mean", "least", "most"]
    return markdown(head, rows, 2)


# ---------------------------------------------------------------------------------------------------------------------
# Kernels. A plan is recorded as "native[<kernel> <tile> splits=...]", several as "xla + native[...]".

# The families of convolution kernels; each has a page, as every other op has one.
FAMILIES = ("depthwise", "direct", "grouped", "im2col", "implicit_gemm", "narrow", "sm90", "stem")


SEVERAL = "several calls"


def kernels_of(row: Run, op: str, dtype: str) -> list[str]:
    """The kernels of a row's plan: "sm90/halo", "depthwise/rows", "two_read", ...; "xla" for XLA's."""
    names = []
    for part in row.get("plan", "").split(" + "):
        if part.startswith("calls["):  # each has a plan of its own
            names.append(SEVERAL)
            continue
        name, *rest = part.removeprefix("native[").rstrip("]").split(" ")
        tile = next((word for word in rest if "=" not in word and word != "channels-last"), "")
        names.append(_renamed(name, tile, row, op, dtype))
    return names


def _renamed(name: str, tile: str, row: Run, op: str, dtype: str) -> str:
    """The kernel's name; plans of runs before kernels had names say which it was by algorithm and tile."""
    half = not dtype.startswith("f32")
    if name == "depthwise":
        strided = bool(re.search(r" s\d", row["problem"]))
        if tile in ("bands", "lines", "rows"):
            rows = "rows_strided" if strided else "rows"
            return f"depthwise/{dict(bands='rows_mma', lines='conv1d', rows=rows)[tile]}"
        flat = not re.search(r" \d+x\d+x\d+( |$)", row["problem"])
        return "depthwise/mma" if half and flat and not strided else "depthwise/fma"
    if name == "grouped":
        return "grouped/mma" if not tile else "grouped/rows" if half else "grouped/rows_float32"
    if name == "stem":
        return "stem/patches" if tile else "stem"
    if name != "wgmma":
        return name
    if op == "conv_batchnorm":
        return "sm90/statistics"
    if tile in ("halo", "planes", "128x128h"):
        return f"sm90/{dict(halo='halo', planes='halo_3d').get(tile, 'halo_stream')}"
    if tile[-1] in "rp":
        return "sm90/resident" if tile[-1] == "r" else "sm90/wgrad_pair"
    if op == "dense" and tile == "64x128":
        return "sm90/rows"
    kernel = "wgrad" if op == "conv" and row["pass"] == "wgrad" else "product"
    if kernel == "wgrad" and not half and tile not in ("128x128", "128x64"):
        kernel = "wgrad_terms" if "highest" in dtype else "wgrad_tf32"
    return f"sm90/{kernel}_swapped" if tile[-1] == "s" else f"sm90/{kernel}"


def page_of(kernel: str, op: str) -> str:
    """Whose page in docs/kernels a kernel is on: a family's, or an op's that has one."""
    family = kernel.partition("/")[0]
    if kernel == "xla":
        return "XLA"
    if op == "conv_batchnorm" and family not in FAMILIES:
        return "batchnorm"
    rooms = dict.fromkeys(("dense_gated", "dense_gated_gradient", "dense_gradient"), "dense")
    rooms["layernorm"] = "groupnorm"
    return family if op == "conv" else rooms.get(op, op)


def defaults(runs: dict[str, Run]) -> list[tuple[Run, Run]]:
    """(run, row) of every default choice, of problems in full size on accelerators."""
    return _rows(runs, "ours")


def _rows(runs: dict[str, Run], contender: str) -> list[tuple[Run, Run]]:
    """The same of any contender."""
    return [
        (run, row)
        for run in runs.values()
        if run["op"] not in record.WHOLE and run["platform"] != "cpu" and not run["small"]
        for row in run["rows"]
        if row["contender"] == contender and "ms" in row
    ]


def of_one_device(rows: Sequence[tuple[Run, Run]]) -> list[tuple[Run, Run, str]]:
    """(run, row, what the case is called): of DEVICE, and of another what DEVICE has not, with its name."""

    def key(run: Run, row: Run) -> tuple[str, ...]:
        return run["op"], row["case"], row["problem"], dtype_of(run)

    def is_first(run: Run) -> bool:
        return record.slug(run["device"]) == DEVICE

    known = {key(run, row) for run, row in rows if is_first(run)}
    return [
        (
            run,
            row,
            row["case"] if is_first(run) else f"{row['case']}, {run['device'].removeprefix('NVIDIA ').split()[0]}",
        )
        for run, row in rows
        if is_first(run) or key(run, row) not in known
    ]


def kernels(runs: dict[str, Run]) -> str:
    """Of each kernel: how many recorded problems it is the default of, and how it does against XLA there."""
    ratios: dict[tuple[str, str, str, str], list[tuple[float, str]]] = {}
    for run, row in defaults(runs):
        for kernel in dict.fromkeys(kernels_of(row, run["op"], dtype_of(run))):
            if kernel not in ("xla", SEVERAL) and row.get("xla_over_this"):
                key = kernel, run["op"], dtype_of(run), run["device"]
                ratios.setdefault(key, []).append((row["xla_over_this"], f"{row['case']} {row['pass']}"))
    rows = []
    for (kernel, op, dtype, device), pairs in sorted(ratios.items()):
        best, where = max(pairs)
        mean = _geometric_mean([ratio for ratio, _ in pairs])
        cells = [f"[{kernel}]({page_of(kernel, op)}.md)", op, dtype, device]
        rows.append([*cells, str(len(pairs)), f"{mean:.2f}", f"{best:.2f} ({where})"])
    head = ["kernel", "op", "dtype", "device", "default of", "XLA / jaxconv, geometric mean", "most"]
    return markdown(head, rows, 4) if rows else NOTHING


def dtype_of(run: Run) -> str:
    precision = run["precision"] if run["precision"] not in (None, "default") else ""
    return f"{run['dtype']} {precision}".strip()


def _figures(row: Run) -> str:
    cells = [f"{row['ms']:.4f}", f"{row['of_limit']:.2f}" if "of_limit" in row else "", f"{row['xla_over_this']:.2f}"]
    return " / ".join(cells)


def by_case(runs: dict[str, Run], page: str) -> str:
    """A row for each problem of which a page's kernels run a pass by default; channels last, without float16."""
    op = page if page in BY_OP else "conv"
    by_problem: dict[tuple[str, str, str], dict[str, tuple[Run, list[str]]]] = {}
    for run, row, case in of_one_device(defaults(runs)):
        if run["op"] == op and run["layout"] != "NCHW" and run["dtype"] != "f16":
            passes = by_problem.setdefault((case, row["problem"], dtype_of(run)), {})
            passes[row["pass"]] = row, kernels_of(row, op, dtype_of(run))
    used_by = {
        key: {kernel: None for _, kernels in passes.values() for kernel in kernels if page_of(kernel, op) == page}
        for key, passes in by_problem.items()
    }
    known = {name for key, used in used_by.items() if used for name in by_problem[key]}
    names = [name for name in dict.fromkeys(p for case in BY_OP[op] for p in case.passes) if name in known]
    rows = []
    for key, used in used_by.items():
        if not used:
            continue
        passes, cells = by_problem[key], []
        for row, kernels in (passes.get(name, (None, [])) for name in names):
            others = dict.fromkeys(page_of(kernel, op) for kernel in kernels)
            cells.append("" if row is None else _figures(row) if page in others else ", ".join(others))
        rows.append([*key, ", ".join(kernel.removeprefix(f"{page}/") for kernel in used), *cells])
    if not rows:
        return NOTHING
    return markdown(["case", "problem", "dtype", "kernel", *names], rows, 4) + CELLS


CELLS = """
A cell is milliseconds / fraction of the limit / XLA's time divided by this time, on an H200 unless another GPU is
named. If another family or XLA is the default, the cell names it. [Recorded tables](../results/index.md) have float16,
channels-first arrays, versions and dates.
"""


def by_force(runs: dict[str, Run], algorithm: str) -> str:
    """A row for each problem that an algorithm was forced to run on an accelerator."""
    timed: dict[tuple[str, str, str], dict[str, Run]] = {}
    for run, row, case in of_one_device(_rows(runs, f"ours:{algorithm}")):
        timed.setdefault((case, row["problem"], dtype_of(run)), {})[row["pass"]] = row
    if not timed:
        return NOTHING
    names = list(dict.fromkeys(p for passes in timed.values() for p in passes))
    rows = [
        [*key, *(_figures(passes[p]) if p in passes else "" for p in names)] for key, passes in sorted(timed.items())
    ]
    return markdown(["case", "problem", "dtype", *names], rows, 3) + CELLS


# ---------------------------------------------------------------------------------------------------------------------
# README

TABLES = (  # (table, suite, what it is)
    ("conv-bf16-nhwc-models", "models", "convolutions of ResNet-50, ConvNeXt and MobileNetV2, bf16"),
    ("conv-bf16-nhwc", "core", "17 kinds of convolution, bf16"),
    ("conv-f32-highest-nhwc", "core", 'the same, float32, precision="highest"'),
    ("batchnorm-bf16-nhwc-models", "models", "batch-norms with ReLU, bf16, forward and backward"),
)


def _together(run: Run) -> list[float] | None:
    """[PyTorch's, Flax's, our] time of a training step on one device, where all three are of one run."""
    of = {row["way"]: row for row in run["rows"] if row["devices"] == 1}
    ways = [of.get(way) for way in ("torch", "flax", "accelerate")]
    same = all(row is not None for row in ways) and len({row["flax_ms"] for row in ways}) == 1
    return [row["ms"] for row in ways] if same else None


def highlights(runs: dict[str, Run]) -> str:
    """Whole training steps beside PyTorch's, each of one run, and the geometric means of kinds of problems."""
    steps: dict[str, list[list[str]]] = {}
    for run in runs.values():
        if is_step_alone(run) and (found := _together(run)):
            torch, flax, ours = found
            row = [training_step(run), *(f"{ms:.1f} ms" for ms in found), f"{flax / ours:.2f}", f"{torch / ours:.2f}"]
            steps.setdefault(run["device"], []).append(row)
    head = ["PyTorch, torch.compile", "Flax's layers, XLA", "jaxconv", "XLA / jaxconv", "PyTorch / jaxconv"]
    tables = [markdown([f"training step, {device}", *head], rows, 1) for device, rows in steps.items()]
    rows = []
    for name, suite, title in TABLES:
        run = runs.get(f"{DEVICE}/{name}")
        ratios = [
            row["xla_over_this"]
            for row in (run["rows"] if run else ())
            if row["contender"] == "ours" and row["suite"] == suite and row.get("xla_over_this")
        ]
        if ratios:
            rows.append([f"{title} ({len(ratios)} passes)", f"{_geometric_mean(ratios):.2f}"])
    device = runs[f"{DEVICE}/{TABLES[0][0]}"]["device"] if f"{DEVICE}/{TABLES[0][0]}" in runs else DEVICE
    tables += [markdown([device, "XLA / jaxconv (geometric mean)"], rows, 1)] if rows else []
    return "\n".join(tables) or NOTHING


def beside_torch(runs: dict[str, Run]) -> str:
    """A row for each training step of which one run measured Flax's layers, jaxconv and PyTorch, on one device."""
    rows = []
    for run in runs.values():
        if found := _together(run):
            torch, _, ours = found
            cells = [*(f"{ms:.1f} ms" for ms in found), f"{torch / ours:.2f}"]
            rows.append([run["device"], training_step(run), *cells])
    head = ["GPU", "training step", "PyTorch, torch.compile", "XLA", "jaxconv", "PyTorch / jaxconv"]
    return markdown(head, rows, 2) if rows else NOTHING


# ---------------------------------------------------------------------------------------------------------------------
# Pages and documents


def block(name: str, runs: dict[str, Run]) -> str:
    if name == "summary":
        return summary(runs)
    if name == "cpu":
        of_kind = {k: r for k, r in runs.items() if r["platform"] == "cpu" and r["op"] in BY_OP and not r["small"]}
        return forced(of_kind) if of_kind else NOTHING
    if name == "kernels":
        return kernels(runs)
    if name == "highlights":
        return highlights(runs)
    if name in ("train", "torch", "least"):
        alone = {k: r for k, r in runs.items() if is_step_alone(r)}
        of_steps = {"train": train_summary, "torch": beside_torch, "least": beside_least}[name]
        return of_steps(alone) if alone else NOTHING
    if name == "infer":
        of_kind = {k: r for k, r in runs.items() if r["op"] == "infer" and not r["small"] and r["platform"] != "cpu"}
        return infer_summary(of_kind) if of_kind else NOTHING
    if name == "fleet":
        return fleet_report.section(fleet_report.recorded(runs))
    kind, _, rest = name.partition("/")
    if kind == "family":
        return by_case(runs, rest)
    if kind == "forced":
        return by_force(runs, rest)
    if kind == "summary":
        on_device = {k.removeprefix(rest + "/"): r for k, r in runs.items() if k.startswith(rest + "/")}
        if on_device:
            return summary(on_device)
    if name in runs:
        return table(runs[name])
    raise SystemExit(f"nothing recorded is named {name}; see python -m benchmarks report --list")


def fill(text: str, runs: dict[str, Run]) -> str:
    """`text` with each marked block made anew."""
    return BLOCK.sub(lambda mark: f"{mark[1]}{block(mark[2], runs)}{mark[4]}", text)


def pages(runs: dict[str, Run]) -> dict[str, str]:
    """{path from the root: text} of every generated page."""
    texts: dict[str, str] = {}
    devices: dict[str, dict[str, Run]] = {}
    for name, run in runs.items():
        device, _, short = name.partition("/")
        devices.setdefault(device, {})[short] = run
    index = []
    for device, tables in devices.items():
        kind = next(iter(tables.values()))["device"]
        newest = max(run["date"] for run in tables.values())[:10]
        index.append(f"* [{kind}]({device}/index.md): {len(tables)} tables, the newest of {newest}\n")
        problems = {name: run for name, run in tables.items() if run["op"] not in record.WHOLE}
        text = f"# {kind}\n\n{NOTE}\n"
        if problems:
            text += summary(problems, lambda name: f"[{name}]({name}.md)") + "\n"
        titles = ("train", "Whole training steps"), ("infer", "Answers of whole models"), ("fleet", "A fleet of models")
        for op, title in titles:
            names = [name for name, run in tables.items() if run["op"] == op]
            if names:
                text += f"{title}:\n\n" + "".join(f"* [{name}]({name}.md)\n" for name in names) + "\n"
        texts[f"{PAGES}/{device}/index.md"] = text.rstrip("\n") + "\n"
        for name, run in tables.items():
            texts[f"{PAGES}/{device}/{name}.md"] = f"# {name}, {kind}\n\n{NOTE}\n{table(run)}"
    texts[f"{PAGES}/index.md"] = f"# Recorded tables\n\n{NOTE}\n{''.join(index)}\n{LEGEND}"
    return texts


LEGEND = """\
A table holds one kind of problem: op, dtype, precision, layout, cases. `python -m benchmarks --help` describes the
command behind each. XLA and jaxconv were measured in one run, after their results were compared. Times are medians of
device time. Losses are printed as well as wins.

* **limit**: the larger of two times: operations over the rate of the unit that does them, and minimal traffic over the
  rate at which memory copies ([how](../kernels/limits.md)).
* **forced**: rows for which `algorithm=` was given. All other rows are the default choice.

Plans are printed as they were recorded. Before kernels had names, `wgmma` was the family sm90, and a tile could name a
kernel:

| tile | kernel |
| --- | --- |
| 128x128h | `sm90/halo_stream` |
| planes | `sm90/halo_3d` |
| r | `sm90/resident` |
| p | `sm90/wgrad_pair` |
| s | a swapped kernel |
| raw | a kernel that was removed |
| bands | `depthwise/rows_mma` |
| lines | `depthwise/conv1d` |
"""


def documents(root: pathlib.Path) -> list[pathlib.Path]:
    """Those with marked blocks: README.md and docs/, but for what is generated whole."""
    paths = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    generated = root / PAGES
    return [p for p in paths if p.exists() and generated not in p.parents and BLOCK.search(p.read_text())]


def wanted(root: pathlib.Path, runs: dict[str, Run]) -> dict[pathlib.Path, str | None]:
    """{path: what it ought to hold, or None where it ought not to be there}"""
    texts = {root / path: text for path, text in pages(runs).items()}
    more = {path: None for path in sorted((root / PAGES).rglob("*")) if path.is_file() and path not in texts}
    return texts | more | {path: fill(path.read_text(), runs) for path in documents(root)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks report", description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=pathlib.Path, default=record.ROOT, help="the checkout whose pages are written")
    parser.add_argument("--list", action="store_true", help="name the tables and stop")
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 where something is stale")
    parser.add_argument("--print", action="store_true", help="print every table and change nothing")
    args = parser.parse_args(argv)
    results = args.root / "benchmarks" / "results"
    if args.list or args.print:
        runs = load(results)
        for name, run in runs.items():
            print(f"## {name}\n\n{table(run)}" if args.print else name)
        return 0
    stale = []
    if args.check:
        files = [path for path in sorted(results.glob("*/*.json"))]
        stale += [path for path in files if path.stem != record.config_name(record.read(path)[0])]
    else:
        for path in record.fold(results):
            print(
                f"{path.relative_to(args.root)}: {'folded' if path.exists() else 'removed, its table has newer rows'}"
            )
    runs = load(results)
    for path, text in wanted(args.root, runs).items():
        if text == (path.read_text() if path.exists() else None):
            continue
        stale.append(path)
        if args.check:
            continue
        if text is None:
            path.unlink()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    for name, (numbers_of, onto) in figures.FIGURES.items():
        path, numbers = args.root / name, numbers_of(runs)
        if numbers and not (path.exists() and figures.mark(numbers) in path.read_text()):
            stale.append(path)
            if not args.check:
                figures.draw(numbers, onto, path)
    for path in stale:
        print(f"{path.relative_to(args.root)}: {'stale, run python -m benchmarks report' if args.check else 'written'}")
    if not stale:
        print("everything is up to date")
    return int(args.check and bool(stale))

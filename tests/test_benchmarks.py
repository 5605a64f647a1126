"""`python -m benchmarks`: what it records, and that a choice tuned by it is the one it measured to be fastest."""

from __future__ import annotations

import ast
import dataclasses
import gc
import graphlib
import importlib
import itertools
import json
import math
import os
import pathlib
import re
from typing import Any

import jax
import numpy as np
import pytest
from helpers import PLATFORM, with_hoppers_code
from jax import lax

from benchmarks import cases, infer, record, report, run, single, tune
from benchmarks.ops.base import Job
from benchmarks.ops.conv import ConvCase
from jaxconv._core.activations import Activation
from jaxconv._plan import Device
from jaxconv._plan import measured as tables
from jaxconv._problem import BatchNormProblem, ConvProblem, DenseProblem


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "_learned", {})

    def record(*argv: str) -> dict:
        assert run.main([*argv, "--small", "--repeat", "3", "--json", str(tmp_path)]) == 0
        (path,) = tmp_path.glob("*.json")
        return json.loads(path.read_text())

    return record


ROOT = pathlib.Path(cases.__file__).parent


def imports(path: pathlib.Path, modules: set[str]) -> set[str]:
    """Those of `modules` that a file imports anywhere in it: where it is loaded, in a function, for types."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert not node.level, f"{path}: imports are absolute"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names & modules


def test_no_module_imports_itself_through_others():
    """Not inside functions either: that hides a circle."""
    paths = ((".".join(path.relative_to(ROOT.parent).with_suffix("").parts), path) for path in ROOT.rglob("*.py"))
    files = {name.removesuffix(".__init__"): path for name, path in paths}
    graph = {name: imports(path, set(files)) for name, path in files.items()}
    assert "benchmarks.check" in graph["benchmarks.run"] and "benchmarks.models" in graph["benchmarks.infer"]
    graphlib.TopologicalSorter(graph).prepare()
    graph["benchmarks.ops.base"] |= {"benchmarks.run"}
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(graph).prepare()


def test_every_module_of_an_op_is_a_row_of_the_table():
    names = {path.stem for path in (ROOT / "ops").glob("*.py")} - {"__init__"}
    modules = [importlib.import_module(f"benchmarks.ops.{name}") for name in sorted(names)]
    listed = {id(module.CASES): module.CASES for module in modules if hasattr(module, "CASES")}
    assert {id(row) for row in cases.BY_OP.values()} == set(listed)
    for op, row in cases.BY_OP.items():
        assert {case.op for case in row} == {op} and len({case.name for case in row}) == len(row)
        assert all(case.suite in cases.SUITES and set(case.passes) <= set(case.results) for case in row)


def test_every_row_of_a_table_is_checked_and_timed(recorded):
    found = recorded("--op", "conv", "--suite", "core", "--cases", "convnext.dw7", "--algorithm", "depthwise")
    rows = {(row["pass"], row["contender"]): row for row in found["rows"]}
    assert set(rows) == {(p, c) for p in ("fprop", "dgrad", "wgrad") for c in ("xla", "ours", "ours:depthwise")}
    for row in rows.values():
        assert row["status"] == "ok" and 0 <= row["error"] <= row["tolerance"]
        assert row["ms"] > 0 and row["samples_ms"]


def test_a_kernel_whose_runs_differ_is_wrong(recorded, monkeypatch, capsys):
    """By less than any tolerance, in one run of four."""
    real, calls = ConvCase.ours, itertools.count(1)

    def sometimes(*args: Any, **choice: Any) -> Job:
        job = real(*args, **choice)
        return dataclasses.replace(job, f=lambda *a: job.f(*a) * (1 + 1e-6 * (next(calls) % 4 == 0)))

    monkeypatch.setattr(ConvCase, "ours", sometimes)
    case = ("--op", "conv", "--suite", "core", "--cases", "convnext.dw7", "--pass", "wgrad")
    args = (*case, "--dtype", "f32", "--implementation", "native")  # of which 1e-6 is eight units in the last place
    with pytest.raises(AssertionError):  # such a run ends with an error
        recorded(*args)
    assert "2 of 8 runs do not have the bits of the first" in capsys.readouterr().out
    monkeypatch.setattr(ConvCase, "ours", real)
    (row,) = (row for row in recorded(*args)["rows"] if row["contender"] == "ours")
    assert row["status"] == "ok"


@with_hoppers_code
def test_every_gradient_of_a_batchnorm_and_its_convolution_is_measured(recorded):
    case = ("--op", "batchnorm_conv", "--suite", "models", "--cases", "mobilenet.14.dw3*", "--pass", "bwd")
    found = recorded(*case, "--algorithm", "depthwise,two")
    assert {row["status"] for row in found["rows"]} == {"ok"}
    both = [f"mobilenet.14.dw3{stride}" for stride in ("", "s2")]
    made = tune.measurements(found, [c.small() for c in cases.BY_OP["batchnorm_conv"] if c.name in both])
    assert [(m["case"], m["op"]) for m in made] == [(name, "conv_normalised_gradient") for name in both]
    assert [kernel.partition("/")[0] for m in made for kernel in m["native_ms"]] == ["depthwise"] * 2


@with_hoppers_code
def test_sums_in_a_dgrad_are_measured(recorded):
    case = ("--op", "conv_dgrad_sums", "--suite", "models", "--cases", "r50.s2*")
    rows = recorded(*case, "--algorithm", "sm90,two")["rows"]
    found = {name: [r["status"] for r in rows if r["contender"] == name] for name in ("ours", "xla", "ours:two")}
    assert found == dict.fromkeys(found, ["ok"] * 2)
    forced = [r for r in rows if r["contender"] == "ours:sm90"]
    reason = "on CUDA only" if PLATFORM == "cpu" else "it needs multiples of 128 channels of x, got 24"
    assert [r["status"] for r in forced] == ["skipped"] * 2 and reason in forced[0]["reason"]


def test_the_gradient_between_two_convolutions_is_measured(recorded):
    case = ("--op", "conv_gradient", "--suite", "models", "--cases", "vgg.1,impala.21", "--algorithm", "three")
    rows = recorded(*case)["rows"]
    found = {name: [r["status"] for r in rows if r["contender"] == name] for name in ("ours", "xla", "ours:three")}
    assert found == dict.fromkeys(found, ["ok"] * 2)


def test_the_gradient_through_a_norm_is_measured(recorded):
    case = ("--op", "conv_norm_gradient", "--suite", "models", "--cases", "board19*,x50.s2*", "--algorithm", "two")
    rows = recorded(*case)["rows"]
    found = {name: [r["status"] for r in rows if r["contender"] == name] for name in ("ours", "xla", "ours:two")}
    assert found == dict.fromkeys(found, ["ok"] * 2)


def test_a_dense_layer_and_its_gradients_products_are_measured_each(recorded):
    dense = ("--op", "dense", "--suite", "core", "--cases", "head.*", "--dtype", "f32")
    found = recorded(*dense, "--algorithm", "gemm", "--tune")
    passes = {"head.relu": ["fwd", "dgrad", "wgrad", "fwd+bwd"], "head.gelu": ["fwd", "fwd+bwd"]}
    for name, expected in (passes | {"head.tanh": passes["head.gelu"]}).items():
        assert [r["pass"] for r in found["rows"] if (r["case"], r["contender"]) == (name, "ours:gemm")] == expected
    (ran,) = (case.small() for case in cases.select("dense") if case.name == "head.relu")
    products = {tuple(m["kind"]): m["coordinates"] for m in tune.measurements(found, [ran])}
    aligned = ran.k % 8 == ran.n % 8 == 0
    for trans_x, trans_w, extents in (False, True, (ran.m, ran.n, ran.k)), (True, False, (ran.k, ran.m, ran.n)):
        key = ("float32", False, trans_x, trans_w, "bare", aligned)
        assert products[key] == pytest.approx([0, *map(math.log2, extents)], abs=1e-3)


def test_the_gradient_between_two_dense_layers_is_measured(recorded):
    found = recorded("--op", "dense_gradient", "--suite", "models", "--cases", "*s3.*", "--dtype", "f32")
    rows = [(row["case"], row["contender"], row["status"]) for row in found["rows"]]
    names = [f"convnext.s3.{activation}" for activation in ("gelu", "relu", "silu")]
    assert rows == [(name, contender, "ok") for name in names for contender in ("xla", "ours")]
    assert all(row["plan"].startswith("calls[three]") for row in found["rows"] if row["contender"] == "ours")
    # Of several tiles that which the kernel's plan wants speaks for it; where it did not run, the fastest.
    (row, *_) = (row for row in found["rows"] if row["contender"] == "xla")
    tile = {"plan": "native[sm90/gradient 128x256]", "status": "ok"}
    forced = [row | tile | {"contender": f"ours:sm90/gradient {t}", "ms": ms} for t, ms in (("a", 3.0), ("b", 1.0))]
    wanted = row | tile | {"contender": "ours:sm90", "ms": 2.0}
    for rows, ms in (([row, *forced], 1.0), ([row, *forced[::-1]], 1.0), ([row, wanted, *forced], 2.0)):
        (entry,) = tune.measurements({**found, "rows": rows})
        assert entry["op"] == "dense_gradient" and entry["native_ms"] == {"sm90/gradient": ms}
        assert entry["coordinates"] == pytest.approx([0, *map(math.log2, (50176, 384, 1536))], abs=1e-3)


def test_a_gated_layer_is_measured(recorded):
    """Alone and with z: each by itself."""
    found = recorded("--op", "dense_gated", "--suite", "models", "--cases", "unet.l2.*", "--dtype", "f32")
    rows = [(row["pass"], row["contender"], row["status"]) for row in found["rows"]]
    assert rows == [(pass_, contender, "ok") for pass_ in ("fwd", "saved") for contender in ("xla", "ours")]
    assert all(row["plan"].startswith("calls[two]") for row in found["rows"] if row["contender"] == "ours")
    xla = [row for row in found["rows"] if row["contender"] == "xla"]
    ran = {"contender": "ours:sm90", "plan": "native[sm90/gated 128x256]", "status": "ok", "ms": 1.0}
    entries = tune.measurements({**found, "rows": [*xla, *(row | ran for row in xla)]})
    assert [(entry["op"], entry["native_ms"]) for entry in entries] == [("dense_gated", {"sm90/gated": 1.0})] * 2
    assert [entry["kind"][-1] for entry in entries] == [False, True]
    assert entries[0]["coordinates"] == pytest.approx([0, *map(math.log2, (16384, 640, 5120))], abs=1e-3)


def test_the_gradient_behind_a_gate_is_measured(recorded):
    found = recorded("--op", "dense_gated_gradient", "--suite", "models", "--cases", "ffn.*", "--dtype", "f32")
    assert {row["status"] for row in found["rows"]} == {"ok"} and len(found["rows"]) == 8


def test_a_layer_that_saves_z_is_measured(recorded):
    found = recorded("--op", "dense", "--suite", "models", "--cases", "ffn.*", "--dtype", "f32", "--algorithm", "gemm")
    passes = {(row["case"], row["pass"]) for row in found["rows"]}
    expected = {("ffn.up", "saved"), ("ffn.down", "fwd")}
    assert passes == expected | {(f"ffn.{w}", p) for w in ("up", "down") for p in ("dgrad", "wgrad")}
    assert all(row["status"] == "ok" for row in found["rows"])
    kinds = [(entry["op"], entry["kind"][4]) for entry in tune.measurements(found)]
    assert sorted(kinds) == sorted([("dense", "gelu"), ("dense", "cheap"), *[("dense", "bare")] * 4])


def test_an_activation_costs_xla_no_pass_behind_a_float32_batch_norm(recorded):
    """As in a program, where it goes back through jaxconv's meaning."""
    of = "--op", "batchnorm", "--suite", "core", "--cases", "seed", "--dtype", "f32"
    found = recorded(*of, "--algorithm", "two_read")
    for row in found["rows"]:
        if row["contender"] == "xla":
            row["ms"] = {"fwd": 1.0, "bwd": 2.0}.get(row["pass"], 5.0)
    xla_ms = {entry["op"]: entry["xla_ms"] for entry in tune.measurements(found)}
    assert xla_ms["batchnorm_fused"] == 3.0 and xla_ms["batchnorm_residual"] == 5.0
    found["rows"] = [row for row in found["rows"] if row["pass"] != "fwd"]
    xla_ms = {entry["op"]: entry["xla_ms"] for entry in tune.measurements(found)}
    assert xla_ms["batchnorm_fused"] == 5.0


def test_a_tuned_choice_is_the_fastest_that_was_measured(recorded):
    algorithms = ["two_read"] if PLATFORM == "cpu" else ["two_read", "resident_block"]
    found = recorded(
        *("--op", "batchnorm", "--suite", "core", "--cases", "seed", "--pass", "fwd+bwd"),
        *("--algorithm", ",".join(algorithms), "--tune"),
    )
    rows = {row["contender"]: row for row in found["rows"]}
    ms = {name: row["ms"] for name, row in rows.items()}
    if PLATFORM == "cpu":  # the table is for GPUs
        assert rows["ours"]["same_as"] == "xla" and ms["ours"] == ms["xla"]
    else:
        native = min(algorithms, key=lambda a: ms[f"ours:{a}"])
        expected = f"ours:{native}" if ms["xla"] > tables.MARGIN * ms[f"ours:{native}"] else "xla"
        assert rows["ours"]["same_as"] == expected
    (entry,) = tune.measurements(found)
    assert entry["op"] == "batchnorm_fused" and entry["xla_ms"] == ms["xla"]
    assert entry["native_ms"] == {a: ms[f"ours:{a}"] for a in algorithms}
    *_, learned = tables.table(jax.devices()[0].device_kind)
    assert (learned.case, learned.op, learned.native_ms) == ("seed", entry["op"], entry["native_ms"])
    (ran,) = (case.small() for case in cases.select("batchnorm") if case.name == "seed")
    assert 2 ** learned.coordinates[0] == pytest.approx(ran.reduced, rel=1e-3)  # not the case as it is listed


@pytest.mark.parametrize(
    ("batch", "channels", "answered"),
    [
        (64, 96, True),
        (2048, 96, True),
        (64, 768, True),
        (24, 96, True),
        (16, 768, True),
        (16, 96, False),
        (64, 24, False),
    ],
)
def test_a_measured_problem_speaks_for_larger_ones_and_for_little_smaller_ones(monkeypatch, batch, channels, answered):
    def problem(batch: int, channels: int) -> ConvProblem:
        spatial, same, one = (56, 56), ((3, 3), (3, 3)), (1, 1)
        precision = (lax.Precision.DEFAULT,) * 2
        return ConvProblem(
            *("conv", "bfloat16", batch, channels, channels, channels),
            *(spatial, (7, 7), spatial, one, same, one, True, precision),
        )

    monkeypatch.setattr(tables, "_learned", {})
    op, kind, coordinates = tables.features("conv_wgrad", problem(64, 96))
    entry = {"op": op, "kind": kind, "coordinates": coordinates, "case": "it", "xla_ms": 2.0}
    tables.learn("a device", [{**entry, "native_ms": {"depthwise/rows": 1.0}}])
    found = tables.nearest("conv_wgrad", problem(batch, channels), Device("cuda", "a device"), "depthwise/rows")
    assert (found is not None) == answered
    assert found is None or found.ratio("depthwise/rows") == 2.0
    # A kernel that was not measured is not spoken for.
    assert tables.nearest("conv_wgrad", problem(64, 96), Device("cuda", "a device"), "depthwise/mma") is None


@pytest.mark.parametrize("residual", [False, True])
def test_a_residual_is_answered_by_a_residual_and_float16_by_bfloat16_where_nothing_else_was_run(monkeypatch, residual):
    def problem(dtype: str, residual: bool) -> BatchNormProblem:
        return BatchNormProblem("batchnorm", dtype, (8, 4, 4, 64), 3, True, 0.9, 1e-5, Activation("relu"), residual)

    def learned(dtype: str, residual: bool, ms: float) -> None:
        op, kind, coordinates = tables.features("batchnorm_train", problem(dtype, residual))
        entry = {"op": op, "kind": kind, "coordinates": coordinates, "case": "it", "xla_ms": 2.0}
        tables.learn("a device", [{**entry, "native_ms": {"two_read": ms}}])

    def found(dtype: str) -> float | None:
        measured = tables.nearest("batchnorm_train", problem(dtype, residual), Device("cuda", "a device"), "two_read")
        return None if measured is None else measured.native_ms["two_read"]

    monkeypatch.setattr(tables, "_learned", {})
    learned("bfloat16", False, 1.0)
    assert (found("bfloat16"), found("float16"), found("float32")) == (1.0, 1.0, None)
    learned("bfloat16", True, 1.1)
    assert found("bfloat16") == found("float16") == (1.1 if residual else 1.0)
    learned("float16", residual, 1.2)
    assert (found("bfloat16"), found("float16")) == (1.1 if residual else 1.0, 1.2)


@pytest.mark.parametrize(
    ("op", "xla", "native", "wins"),
    [
        ("conv_dgrad", 1.0, 0.97, False),
        ("conv_dgrad", 1.0, 0.95, True),
        ("conv_dgrad", 0.015, 0.0139, True),
        ("dense", 1.0, 0.95, True),
        ("dense", 0.015, 0.0139, False),
    ],
)
def test_a_win_is_of_more_than_the_spread_and_in_dense_than_what_fusion_is_worth(op, xla, native, wins):
    measured = tables.Measurement(op, (), (), "it", xla, {"sm90/product": native, "implicit_gemm": 2 * xla})
    assert measured.ratio("sm90/product") == xla / native and measured.wins("sm90/product") == wins
    assert not measured.wins("implicit_gemm")


def test_a_case_is_forgotten_in_one_dtype(monkeypatch, tmp_path):
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    entries = [{"case": case, "kind": [dtype]} for case in ("a", "b") for dtype in ("float16", "bfloat16")]
    versions = {"jaxlib": "0.11.2"}
    tune.write(tmp_path / "a_gpu.json", "A GPU", versions, entries)
    assert tune.main(["--forget", "A GPU", "a", "float16"]) == 0
    left = json.loads((tmp_path / "a_gpu.json").read_text())
    assert left == {"device": "A GPU", "versions": versions, "measurements": entries[1:]}


def test_a_measured_product_does_not_speak_for_other_columns(monkeypatch):
    monkeypatch.setattr(tables, "_learned", {})
    m, k, n = 4096.0, 1024.0, 1024.0
    problem = DenseProblem("dense", "bfloat16", int(m), int(k), int(n), (lax.Precision.DEFAULT,) * 2)

    def coordinates(*extents: float) -> list[float]:
        return [math.log2(extent) for extent in extents]

    entry = {"op": "dense", "case": "it", "xla_ms": 2.0, "native_ms": {"sm90/product": 1.0}, "kind": ["a kind"]}
    tables.learn("a device", [{**entry, "coordinates": coordinates(1, m, k, n)}])
    for wanted, answered in (((1, 16 * m, k, n), True), ((1, m, 8 * k, n), False), ((1, m, k, 8 * n), False)):
        monkeypatch.setattr(tables, "features", lambda op, p, at=wanted: (op, ("a kind",), tuple(coordinates(*at))))
        found = tables.nearest("dense", problem, Device("cuda", "a device"), "sm90/product")
        assert (found is not None) == answered


def test_a_report_takes_each_row_from_the_newest_run_that_has_it(tmp_path):
    def write(name: str, date: str, *rows: tuple[str, str, float]) -> None:
        keys = ("case", "pass", "ms")
        run = {"op": "batchnorm", "dtype": "bf16", "precision": None, "layout": "NHWC", "small": False, "batch": None}
        run |= {"format": record.FORMAT, "device": "A GPU", "date": date}
        run["rows"] = [dict(zip(keys, row, strict=True)) | {"contender": "ours"} for row in rows]
        path = tmp_path / "a-gpu" / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(run))

    write("old", "2026-01-01", ("small", "fwd", 1.0), ("seed", "fwd", 2.0), ("seed", "infer", 3.0))
    write("new", "2026-01-02", ("seed", "fwd", 4.0))
    ((name, run),) = report.load(tmp_path).items()
    assert name == "a-gpu/batchnorm-bf16-nhwc"
    assert [(r["case"], r["pass"], r["ms"]) for r in run["rows"]] == [
        *(("seed", "fwd", 4.0), ("seed", "infer", 3.0)),
        ("small", "fwd", 1.0),
    ]
    assert [(r["date"], len(r["rows"])) for r in run["runs"]] == [("2026-01-02", 1), ("2026-01-01", 2)]


def _recorded(path, date: str, commit: str, *rows: tuple[str, str, str, float], **other) -> None:
    """A run of batch-norms as a file: rows of (case, pass, contender, ms)."""
    run = {"op": "batchnorm", "dtype": "bf16", "precision": None, "layout": "NHWC", "small": False, "batch": None}
    run |= {
        "format": record.FORMAT,
        "device": "A GPU",
        "platform": "gpu",
        "date": date,
        "commit": commit,
        "dirty": False,
    }
    run |= {"versions": {"jax": "0.11"}, "command": "python -m benchmarks", "ceilings": None, **other, "rows": []}
    for case, pass_, contender, ms in rows:
        row = {"case": case, "problem": "a problem", "suite": "core", "pass": pass_, "contender": contender, "ms": ms}
        row |= {"status": "ok", "plan": "native[two_read]", "spread": 0.0, "rate": 1.0, "unit": "GB/s"}
        run["rows"].append(row | {"xla_over_this": 2.0})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(run))


def test_recorded_files_fold_into_one_a_table_and_every_row_keeps_its_run(tmp_path):
    folder = tmp_path / "a-gpu"
    old = ("seed", "fwd", "ours", 2.0), ("seed", "infer", "ours", 3.0), ("seed", "fwd", "ours:two_read", 5.0)
    _recorded(folder / "batchnorm-bf16-nhwc-1111.json", "2026-01-01", "1111", *old)
    _recorded(folder / "batchnorm-bf16-nhwc-2222.json", "2026-01-02", "2222", ("seed", "fwd", "ours", 4.0))
    _recorded(folder / "batchnorm-f16-nhwc-1111.json", "2026-01-01", "1111", *old, dtype="f16")
    before = report.load(tmp_path)
    assert record.fold(tmp_path)
    assert [path.name for path in sorted(folder.iterdir())] == ["batchnorm-bf16-nhwc.json", "batchnorm-f16-nhwc.json"]
    assert report.load(tmp_path) == before
    newest, earlier = record.read(folder / "batchnorm-bf16-nhwc.json")
    assert [(run["commit"], [row["ms"] for row in run["rows"]]) for run in (newest, earlier)] == [
        *(("2222", [4.0]), ("1111", [3.0, 5.0]))
    ]
    assert not record.fold(tmp_path)
    # A third run takes what it measured from both.
    _recorded(folder / "batchnorm-bf16-nhwc-3333.json", "2026-01-03", "3333", ("seed", "infer", "ours", 1.0))
    record.fold(tmp_path)
    runs = record.read(folder / "batchnorm-bf16-nhwc.json")
    assert [(run["commit"], [row["ms"] for row in run["rows"]]) for run in runs] == [
        *(("3333", [1.0]), ("2222", [4.0]), ("1111", [5.0]))
    ]


def test_a_report_writes_pages_and_blocks_and_says_what_is_stale(tmp_path, capsys):
    recorded = tmp_path / "benchmarks" / "results" / "a-gpu" / "batchnorm-bf16-nhwc-1111.json"
    _recorded(recorded, "2026-01-01", "1111", ("seed", "fwd", "ours", 2.0))
    page = tmp_path / "docs" / "kernels" / "batchnorm.md"
    page.parent.mkdir(parents=True)
    page.write_text("# Batch-norm\n\n<!-- benchmarks:family/batchnorm -->\n<!-- /benchmarks -->\nlast\n")
    left = tmp_path / "docs" / "results" / "another-gpu" / "index.md"
    left.parent.mkdir(parents=True)
    left.write_text("of a device that nothing is recorded of\n")
    command = ["--root", str(tmp_path)]

    assert report.main([*command, "--check"]) == 1
    stale = capsys.readouterr().out
    for path in (recorded, page, left, tmp_path / "docs" / "results" / "a-gpu" / "index.md"):
        assert f"{path.relative_to(tmp_path)}: stale" in stale
    assert recorded.exists() and left.exists()

    assert report.main(command) == 0
    assert not recorded.exists() and not left.exists()
    made = tmp_path / "docs" / "results" / "a-gpu" / "batchnorm-bf16-nhwc.md"
    assert "| seed | a problem | fwd | native[two_read] | 2.0000" in made.read_text()
    assert "commit 1111" in made.read_text()
    assert page.read_text().startswith("# Batch-norm\n") and page.read_text().endswith("-->\nlast\n")
    assert report.main([*command, "--check"]) == 0

    made.write_text(made.read_text().replace("2.0000", "1.0000"))
    assert report.main([*command, "--check"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{made.relative_to(tmp_path)}: stale")


def test_no_recorded_command_names_a_path_of_the_machine():
    commands = {run["command"] for path in record.RESULTS.rglob("*.json") for run in record.read(path)}
    assert len(commands) > 20
    assert not [one for one in commands if re.search(r"(^|[\s=])[/~]", one)]


def test_what_is_recorded_here_is_folded_and_every_page_is_fresh(capsys):
    assert report.main(["--check"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "problem", "plan", "expected"),
    [
        ("conv fprop bf16", "8x56x56 64->64 3x3", "native[wgmma halo]", "sm90/halo"),
        ("conv dgrad bf16", "8x56x56 64->64 3x3", "native[wgmma 128x128h channels-last]", "sm90/halo_stream"),
        ("conv fprop bf16", "8x56x56 64->64 1x1", "native[wgmma 64x256r]", "sm90/resident"),
        ("conv fprop bf16", "8x56x56 64->64 1x1", "native[wgmma 256x128s]", "sm90/product_swapped"),
        ("conv wgrad bf16", "8x56x56 64->64 1x1", "native[wgmma 64x256p splits=66]", "sm90/wgrad_pair"),
        ("conv wgrad bf16", "8x56x56 64->64 1x1", "native[wgmma 64x256 splits=132]", "sm90/wgrad"),
        ("conv wgrad f32", "8x56x56 64->64 3x3", "native[wgmma 256x128 splits=2]", "sm90/wgrad_tf32"),
        ("conv wgrad f32 highest", "8x56x56 64->64 1x1", "native[wgmma 256x64s]", "sm90/wgrad_terms_swapped"),
        ("conv wgrad f32 highest", "8x56x56 64->64 3x3", "native[wgmma 128x64 splits=2]", "sm90/wgrad"),
        ("conv fprop bf16", "8x56x56 96->96 3x3 s2 g96", "native[depthwise rows]", "depthwise/rows_strided"),
        ("conv fprop bf16", "8x56x56 96->96 7x7 g96", "native[depthwise bands]", "depthwise/rows_mma"),
        ("conv fprop bf16", "8x56x56 96->96 7x7 g96", "native[depthwise/rows_mma]", "depthwise/rows_mma"),
        ("conv fprop bf16", "8x56x56 96->96 31x31 g96", "native[depthwise]", "depthwise/mma"),
        ("conv fprop f32", "8x56x56 96->96 31x31 g96", "native[depthwise]", "depthwise/fma"),
        ("conv fprop bf16", "8x24x24x24 96->96 3x3x3 g96", "native[depthwise]", "depthwise/fma"),
        ("conv wgrad bf16", "8x56x56 96->96 3x3 g24", "native[grouped splits=2]", "grouped/mma"),
        ("conv fprop f32 highest", "8x56x56 96->96 3x3 g24", "native[grouped rows]", "grouped/rows_float32"),
        ("dense fwd bf16", "8x8x8 relu", "xla + native[wgmma 64x128 splits=2]", "xla sm90/rows"),
        ("dense fwd bf16", "8x8x8 relu", "native[sm90/product 128x256]", "sm90/product"),
        ("conv_batchnorm fwd bf16", "8x8 1x1", "native[wgmma 128x128] + native[two_read]", "sm90/statistics two_read"),
        ("batchnorm fwd bf16", "8x8 C=8", "native[two_read splits=2]", "two_read"),
        ("conv fprop bf16", "8x8 C=8", "xla", "xla"),
    ],
)
def test_a_report_names_the_kernels_of_recorded_plans(kind, problem, plan, expected):
    op, pass_, dtype = kind.split(" ", 2)
    assert report.kernels_of({"pass": pass_, "problem": problem, "plan": plan}, op, dtype) == expected.split()


def test_every_kernel_of_a_recorded_default_has_a_page():
    pages = {path.stem for path in (record.ROOT / "docs" / "kernels").glob("*.md")}
    runs = report.load(record.RESULTS)
    used = {
        report.page_of(kernel, run["op"])
        for run, row in report.defaults(runs)
        for kernel in report.kernels_of(row, run["op"], report.dtype_of(run))
    }
    assert used - {"XLA"} and used - {"XLA"} <= pages


def test_a_figure_is_drawn_anew_when_its_numbers_change(tmp_path):
    pytest.importorskip("matplotlib", reason="the figure is drawn by matplotlib")
    from benchmarks import figures

    bars = {"a case: 8x8 3x3": {"fprop": 2.0, "dgrad": 1.0, "wgrad": 4.0}, "another": {"fprop": 1.5}}
    path = tmp_path / "figure.svg"
    figures.draw(bars, figures.draw_bars, path)
    first = path.read_bytes()
    assert figures.mark(bars) in first.decode() and "another" in first.decode()
    figures.draw(bars, figures.draw_bars, path)
    assert path.read_bytes() == first
    assert figures.mark({**bars, "another": {"fprop": 1.6}}) not in first.decode()


def test_no_legend_of_a_figure_is_cut_off(tmp_path):
    """`draw` looks."""
    pytest.importorskip("matplotlib", reason="figures are drawn by matplotlib")
    from benchmarks import figures

    runs = report.load(record.RESULTS)
    measured = {path: (found, onto) for path, (of, onto) in figures.FIGURES.items() if (found := of(runs))}
    assert len(measured) >= 5  # a figure of a device that has no record is not drawn
    for path, (found, onto) in measured.items():
        figures.draw(found, onto, tmp_path / path.rpartition("/")[2])
    wide = [f"a way with a long name {i}" for i in range(9)]
    with pytest.raises(AssertionError, match="legend is cut off"):
        figures.draw(
            wide, lambda figure, names: figure.legend(figure.subplots().plot([[0] * 9]), names, ncols=9), tmp_path / "w"
        )


@pytest.mark.parametrize("op", record.WHOLE)
def test_records_of_whole_models_make_no_table(op, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tables, "FOLDER", tmp_path / "tables")
    files = sorted(record.RESULTS.glob(f"*/{op}*.json"))
    assert files and tune.main([str(files[0])]) == 0
    assert "skipped, tables are of layers, not of models" in capsys.readouterr().out
    assert not (tmp_path / "tables").exists()


def test_tune_without_algorithms_is_refused(capsys):
    with pytest.raises(SystemExit):
        run.main(["--tune"])
    assert "--algorithm" in capsys.readouterr().err


INFER = ["--small", "--dtype", "f32", "--batch", "1,2", "--calls", "3", "--seconds", "0.002"]


def test_ways_to_answer_agree_and_a_page_is_made_of_them(tmp_path):
    pytest.importorskip("flax", reason="the models are Flax's")
    results = tmp_path / "benchmarks" / "results"
    for way, batches in (("frozen", "1,2"), ("accelerate", "1")):  # a second run, which lacks rows of the first
        assert infer.main([*INFER, "--batch", batches, "--ways", way, "--json", str(results / "here")]) == 0
        (path,) = (results / "here").glob("*-small-*.json")
        path.rename(path.with_name(f"{way}.json"))
    (run,) = report.load(results).values()
    rows = {(row["batch"], row["way"]): row for row in run["rows"]}
    assert list(rows) == [*((1, way) for way in ("plain", "accelerate", "frozen")), (2, "plain"), (2, "frozen")]
    for row in rows.values():
        assert (
            row["agrees"]
            and row["error"] <= row["allowed"] < (1e-3 if PLATFORM == "cpu" else 1e-2)
            and row["ms"] > 0
            and row["images_per_s"] > 0
        )
        assert row["p99_ms"] >= row["ms"] and row["memory_bytes"] > 0
    for n in (1, 2):  # nothing folds in a frozen call
        assert rows[n, "frozen"]["launches"] < rows[n, "plain"]["launches"]
    assert report.main(["--root", str(tmp_path)]) == 0
    (page,) = (tmp_path / "docs" / "results").glob("*/infer-resnet50-f32-small.md")
    assert page.read_text().count("| yes |") == 5
    assert "infer-resnet50-f32-small" in (page.parent / "index.md").read_text()


def test_a_quantised_way_is_compared_and_recorded(tmp_path, capsys):
    pytest.importorskip("flax", reason="the models are Flax's")
    command = [*INFER, "--batch", "1", "--ways", "frozen", "--quantize", "int8", "--json", str(tmp_path / "here")]
    assert infer.main(command) == 0
    assert "int8: 7 of 13 layers have 8 bits; the answers' signal to noise is " in capsys.readouterr().out
    (run,) = report.load(tmp_path).values()
    rows = {row["way"]: row for row in run["rows"]}
    assert list(rows) == ["plain", "frozen", "int8"]
    # Of rounding to 8 bits, not to the model's own type, and bounded by what calibration said of it
    assert rows["frozen"]["error"] < rows["int8"]["error"] <= rows["int8"]["allowed"] <= 0.5


def test_the_single_answer_is_measured_recorded_and_kept(tmp_path, capsys):
    pytest.importorskip("flax", reason="the models are Flax's")
    results = tmp_path / "benchmarks" / "results"
    command = [*INFER, "--model", "mobilenet_v2", "--ways", "frozen", "--json", str(results / "here")]
    for name, more in (("with", ["--single", "11"]), ("without", [])):  # the newer run has not measured it
        assert infer.main([*command, "--batch", "1", *more]) == 0
        (path,) = (results / "here").glob("*-small-*.json")
        path.rename(path.with_name(f"{name}.json"))
    printed = capsys.readouterr().out
    assert "frozen: one at a time, 11 calls of each way" in printed
    assert "compiled, from NumPy to NumPy" in printed and "compiled, quiet" in printed
    (run,) = report.load(results).values()
    assert [row["way"] for row in run["rows"]] == ["plain", "frozen", "frozen: one at a time"]
    row = run["rows"][-1]
    assert row["agrees"] and row["error"] <= row["allowed"]
    assert {*single.CALLS} - {one["call"] for one in row["called"]} <= {"pinned", "pinned_ready"}
    for one in row["called"]:
        for times in (one, one["quiet"]):
            assert 0 < times["returns_ms"] <= times["ms"] <= times["p90_ms"] <= times["p99_ms"] <= times["max_ms"]
    assert report.main(["--root", str(tmp_path)]) == 0
    (page,) = (tmp_path / "docs" / "results").glob("*/infer-mobilenet_v2-f32-small.md")
    text = page.read_text()
    assert all(title in text for title in (single.CALLS["host"], "an empty program", single.QUIET))
    assert report.main(["--root", str(tmp_path), "--check"]) == 0


def test_a_single_answer_is_split_into_kernels_an_empty_program_and_the_rest():
    def times(ms: float) -> dict[str, Any]:
        return {"ms": ms, "p90_ms": ms, "p99_ms": ms, "max_ms": ms, "returns_ms": 0.125}

    called = [
        {"call": name, "calls": 1, **times(ms), "quiet": times(ms / 2)}
        for name, ms in (("jit", 9.0), (single.SPLIT, 1.0), ("empty", 0.25))
    ]
    row = {"way": single.row_name("int8"), "called": called, "kernels_ms": 0.5, "remarks": {"pinned": "none is here"}}
    _, rows = single.split(row)
    assert [cells[1:] for cells in rows] == [
        ["1.000", "0.125", "0.500", "0.250", "0.250"],
        ["0.500", "0.125", "0.500", "0.125", "-0.125"],
    ]
    _, rows = single.split({**row, "kernels_ms": None})
    assert rows[0][1:] == ["1.000", "0.125", "", "0.250", ""]
    assert single.sentences(row)[-1] == "Compiled, from NumPy to NumPy, pinned is left out: none is here."
    assert report.SERVING["int8"] in report.single_answer({**row, "agrees": True})


def test_calls_are_of_the_same_function_and_a_donation_that_is_taken_gets_new_arrays(monkeypatch):
    image = np.arange(12, dtype=np.float32).reshape(1, 2, 2, 3)
    row, answers = single.measured(lambda x: 2 * x + 1, image, {}, calls=2)
    assert "donated" not in row["remarks"] and {"call", "donated", "host"} <= set(answers)
    for answer in answers.values():
        np.testing.assert_array_equal(answer, 2 * image + 1)

    def none(*args: Any) -> Any:
        raise NotImplementedError("no memory space\nand more")

    monkeypatch.setattr(single, "_pinned", none)
    found, remarks = single.ways(lambda x: x.sum(), image, {"xla_embed_ir_in_executable": False})
    assert not {"call", "pinned", "pinned_ready"} & set(found)
    assert remarks["pinned"] == "NotImplementedError: no memory space"
    assert remarks["donated"].startswith("no result has x's shape") and "its own" in remarks["call"]


def test_quiet_leaves_the_process_as_it_was():
    pins = hasattr(os, "sched_setaffinity")
    before, frozen = os.sched_getaffinity(0) if pins else None, gc.get_freeze_count()
    with pytest.raises(KeyError), single.quiet() as core:
        assert not gc.isenabled()
        assert not pins or os.sched_getaffinity(0) == {core}
        raise KeyError
    assert gc.isenabled() and gc.get_freeze_count() == frozen
    assert not pins or os.sched_getaffinity(0) == before


def test_options_of_xlas_have_their_types():
    args = infer.parse(["--option", "a=true", "--option", "b=-1", "--option", "c=FUSION,CUBLAS", "--option", "d="])
    assert args.option == {"a": True, "b": -1, "c": "FUSION,CUBLAS", "d": ""}
    # They are another table.
    run = {"op": "infer", "dtype": "bf16", "precision": None, "layout": None, "small": False, "batch": None}
    assert record.config_name({**run, "options": args.option}) == "infer-bf16-a-true-b-1-c-fusion-cublas-d"
    assert record.config_name({**run, "options": {}}) == "infer-bf16"


def test_an_answer_that_is_wrong_is_found(monkeypatch, capsys):
    pytest.importorskip("flax", reason="the models are Flax's")
    right = infer.answers

    def wrong(way, *args):
        made = right(way, *args)
        take = made.take
        made.take = (lambda y: 1.01 * take(y)) if way == "frozen" else take
        return made

    monkeypatch.setattr(infer, "answers", wrong)
    assert infer.main([*INFER, "--batch", "1", "--ways", "frozen"]) == 1
    assert "DISAGREES" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ways", "plain,tensorrt"], "--ways tensorrt: expected some of plain"),
        (["--quantize", "int4"], "--quantize int4: expected some of int8,float8_e4m3fn"),
        (["--model", "resnet51"], "--model resnet51: expected some of resnet50"),
        (["--batch", "0"], "at least 1"),
        (["--option", "xla_gpu_graph_min_graph_size"], "expected NAME=VALUE"),
        (["--single", "0"], "--single 0: expected at least 1 call"),
        (["--single", "--batch", "8"], "expected 1 in --batch"),
        (["--single", "--ways", "plain,torch"], "frozen in --ways"),
    ],
)
def test_bad_options_of_infer_are_refused(options, message, capsys):
    with pytest.raises(SystemExit):
        infer.main(options)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ("resnet50", "mobilenet_v2", "efficientnet_b0"))
def test_the_models_in_pytorch_are_flaxs(name):
    torch = pytest.importorskip("torch", reason="it compares with PyTorch, which is not installed")
    linen = pytest.importorskip("flax.linen", reason="the models are Flax's")
    from benchmarks import torch_models
    from benchmarks.models import SERVED

    model = SERVED[name](linen, jax.numpy.float32, small=True)
    variables = infer.variables_of(model, 32)
    images = np.random.default_rng(0).standard_normal((2, 32, 32, 3), np.float32)
    module = torch_models.module_of(model, variables, torch.float32)
    module.exact = True
    with torch.inference_mode(), jax.default_matmul_precision("highest"):
        theirs = module(torch.from_numpy(images).permute(0, 3, 1, 2)).numpy()
        ours = jax.jit(lambda v, x: model.apply(v, x, train=False))(variables, images)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())


def test_a_page_of_a_family_has_one_gpus_figures_and_names_another_where_that_alone_was_measured():
    def run(device: str, *names: str) -> dict[str, Any]:
        shared = {"problem": "8x8", "pass": "fprop", "contender": "ours", "ms": 1.0}
        rows = [{**shared, "case": name} for name in names]
        return {
            "op": "conv",
            "device": device,
            "dtype": "bf16",
            "precision": None,
            "platform": "gpu",
            "small": False,
        } | {"rows": rows}

    runs = {"a": run("NVIDIA H100 80GB HBM3", "both", "one"), "b": run("NVIDIA H200", "both", "other")}
    found = report.of_one_device(report.defaults(runs))
    assert [(r["device"][7:11], name) for r, _, name in found] == [
        ("H100", "one, H100"),
        ("H200", "both"),
        ("H200", "other"),
    ]

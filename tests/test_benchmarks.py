"""`python -m benchmarks`: what it records, and that a choice tuned by it is the one it measured to be fastest."""

from __future__ import annotations

import json
import math

import jax
import pytest
from helpers import PLATFORM
from jax import lax

from benchmarks import cases, record, report, run, tune
from jaxconv._activation import Activation
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


def test_every_row_of_a_table_is_checked_and_timed(recorded):
    found = recorded("--op", "conv", "--suite", "core", "--cases", "convnext.dw7", "--algorithm", "depthwise")
    rows = {(row["pass"], row["contender"]): row for row in found["rows"]}
    assert set(rows) == {(p, c) for p in ("fprop", "dgrad", "wgrad") for c in ("xla", "ours", "ours:depthwise")}
    for row in rows.values():
        assert row["status"] == "ok" and 0 <= row["error"] <= row["tolerance"]
        assert row["ms"] > 0 and row["samples_ms"]


def test_a_dense_layer_and_its_gradients_products_are_measured_each(recorded):
    dense = ("--op", "dense", "--suite", "core", "--cases", "head.*", "--dtype", "f32")
    found = recorded(*dense, "--algorithm", "gemm", "--tune")
    passes = {"head.relu": ["fwd", "dgrad", "wgrad", "fwd+bwd"], "head.gelu": ["fwd", "fwd+bwd"]}
    for name, expected in (passes | {"head.tanh": passes["head.gelu"]}).items():
        assert [r["pass"] for r in found["rows"] if (r["case"], r["contender"]) == (name, "ours:gemm")] == expected
    (ran,) = (case.small() for case in cases.DENSE if case.name == "head.relu")
    products = {tuple(m["kind"]): m["coordinates"] for m in tune.measurements(found, [ran])}
    aligned = ran.k % 8 == ran.n % 8 == 0
    for trans_x, trans_w, extents in (False, True, (ran.m, ran.n, ran.k)), (True, False, (ran.k, ran.m, ran.n)):
        key = ("float32", False, trans_x, trans_w, "bare", aligned)
        assert products[key] == pytest.approx([0, *map(math.log2, extents)], abs=1e-3)


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
    (ran,) = (case.small() for case in cases.BATCHNORM if case.name == "seed")
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
    found = tables.nearest("conv_wgrad", problem(batch, channels), "a device", "depthwise/rows")
    assert (found is not None) == answered
    assert found is None or found.ratio("depthwise/rows") == 2.0
    # A kernel that was not measured is not spoken for.
    assert tables.nearest("conv_wgrad", problem(64, 96), "a device", "depthwise/mma") is None


@pytest.mark.parametrize("residual", [False, True])
def test_a_residual_is_answered_by_a_residual_and_float16_by_bfloat16_where_nothing_else_was_run(monkeypatch, residual):
    def problem(dtype: str, residual: bool) -> BatchNormProblem:
        return BatchNormProblem("batchnorm", dtype, (8, 4, 4, 64), 3, True, 0.9, 1e-5, Activation("relu"), residual)

    def learned(dtype: str, residual: bool, ms: float) -> None:
        op, kind, coordinates = tables.features("batchnorm_train", problem(dtype, residual))
        entry = {"op": op, "kind": kind, "coordinates": coordinates, "case": "it", "xla_ms": 2.0}
        tables.learn("a device", [{**entry, "native_ms": {"two_read": ms}}])

    def found(dtype: str) -> float | None:
        measured = tables.nearest("batchnorm_train", problem(dtype, residual), "a device", "two_read")
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
    tune._write(tmp_path / "a_gpu.json", "A GPU", entries)
    assert tune.main(["--forget", "A GPU", "a", "float16"]) == 0
    assert json.loads((tmp_path / "a_gpu.json").read_text()) == {"device": "A GPU", "measurements": entries[1:]}


def test_a_measured_product_does_not_speak_for_other_columns(monkeypatch):
    monkeypatch.setattr(tables, "_learned", {})
    m, k, n = 4096.0, 1024.0, 1024.0

    def coordinates(*extents: float) -> list[float]:
        return [math.log2(extent) for extent in extents]

    entry = {"op": "dense", "case": "it", "xla_ms": 2.0, "native_ms": {"sm90/product": 1.0}, "kind": ["a kind"]}
    tables.learn("a device", [{**entry, "coordinates": coordinates(1, m, k, n)}])
    for wanted, answered in (((1, 16 * m, k, n), True), ((1, m, 8 * k, n), False), ((1, m, k, 8 * n), False)):
        monkeypatch.setattr(tables, "features", lambda op, p, at=wanted: (op, ("a kind",), tuple(coordinates(*at))))
        found = tables.nearest("dense", DenseProblem.__new__(DenseProblem), "a device", "sm90/product")
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


def test_tune_without_algorithms_is_refused(capsys):
    with pytest.raises(SystemExit):
        run.main(["--tune"])
    assert "--algorithm" in capsys.readouterr().err

"""`python -m benchmarks fleet`: shrunk models end to end, what is recorded of them, and what the summary says."""

from __future__ import annotations

import copy
import functools
import json

import jax
import numpy as np
import pytest

pytest.importorskip("flax", reason="most of the models are Flax's")

import jaxconv
from benchmarks import figures, fleet, fleet_models, fleet_report, record, report, train
from benchmarks.fleet_models.model import DTYPES

MODELS = fleet_models.models()
SHORT = ["--small", "--losses", "3", "--repeat", "2", "--seconds", "0.002"]


def ran(tmp_path, *argv):
    assert fleet.main([*SHORT, *argv, "--json", str(tmp_path / "results" / "here")]) == 0
    (path,) = (tmp_path / "results" / "here").iterdir()
    return json.loads(path.read_text())


def test_the_fleet_has_many_kinds_in_both_types_of_both_uses():
    flax = [model for model in MODELS.values() if model.library in ("linen", "nnx")]
    trained = [model for model in flax if model.use == "train"]
    assert len(trained) >= 24 and len({model.kind for model in trained}) >= 24
    assert sum(model.use == "infer" for model in flax) >= 8
    single = sum(model.dtype == "f32" for model in flax)
    assert single >= len(flax) / 2 and len(flax) - single >= 8
    names = {fleet_models.MODULES[module] for module in fleet_models.MODULES} - set(fleet_models.missing())
    assert {model.library for model in MODELS.values()} == {"linen", "nnx", *names} - {"flax"}


def test_a_step_and_an_answer_are_compared_timed_recorded_and_summed_up(tmp_path, capsys):
    run = ran(tmp_path, "--models", "unet_group_norm,vocoder_serve")
    printed = capsys.readouterr().out.splitlines()
    step, answer = run["rows"]
    assert (step["model"], step["use"], step["dtype"]) == ("unet_group_norm", "train", "f32")
    assert (answer["model"], answer["use"]) == ("vocoder_serve", "infer")
    for row in run["rows"]:
        assert list(row["ways"]) == ["plain", "enable", "accelerate"]
        for found in row["ways"].values():
            assert found["agrees"] and found["off"] <= 1 and found["ms"] > 0 and len(found["samples_ms"]) == 2
            assert found["memory_bytes"] > 1000 and found["trace_s"] > 0 and found["compile_s"] > 0
    assert len(step["ways"]["enable"]["losses"]) == 3 and not step["ways"]["plain"]["calls"]
    assert printed[-2].startswith("enable: worst ") and printed[-1].startswith("accelerate: worst ")
    ((name, table),) = report.load(tmp_path / "results").items()
    assert name.endswith("/fleet-small")
    text = report.table(table)
    assert (
        "| unet_group_norm | train | segmentation | linen | f32, 2 x 16x16x3 |" in text and text.count("| yes |") == 2
    )


def test_programs_compiled_with_graphs_are_a_table_of_their_own(tmp_path, monkeypatch):
    given, compile_ = [], train.Program.compile
    monkeypatch.setattr(
        train.Program, "compile", staticmethod(lambda lowered, options=None: given.append(options) or compile_(lowered))
    )
    run = ran(tmp_path, "--models", "nature_dqn,impala_act", "--ways", "plain", "--graphs")
    assert given == [jaxconv.graph_options()] * 2 and run["options"] == {"graphs": "all"}
    assert [name.rpartition("/")[2] for name in report.load(tmp_path / "results")] == ["fleet-small-graphs-all"]


def test_a_step_whose_losses_differ_is_found(monkeypatch, tmp_path, capsys):
    right = fleet.accelerate

    def wrong(f):
        faster = right(f)
        return lambda *args: jax.tree.map(lambda y: y * 1.1, faster(*args))

    monkeypatch.setattr(fleet, "accelerate", wrong)
    options = ["--models", "keras_convnet" if "keras_convnet" in MODELS else "nature_dqn", "--ways", "plain,accelerate"]
    assert fleet.main([*SHORT, *options]) == 1
    assert "DISAGREES" in capsys.readouterr().out


def test_a_program_that_fails_leaves_the_others(monkeypatch, capsys):
    right = fleet.measured

    def fails(case, programs, args):
        if case.model.use == "train":
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\nmore")
        return right(case, programs, args)

    monkeypatch.setattr(fleet, "measured", fails)
    assert fleet.main([*SHORT, "--models", "edsr,edsr_serve", "--ways", "plain,enable"]) == 1
    printed = capsys.readouterr().out
    assert "edsr: FAILED: RESOURCE_EXHAUSTED: out of memory" in printed
    assert printed.splitlines()[-1] == "failed: edsr" and "enable: worst" in printed


def test_what_time_does_not_suffice_for_is_named(monkeypatch, capsys):
    monkeypatch.setattr(fleet, "measured", lambda case, programs, args: _row(case.model.name, 1.0, 1.0, 1.0))
    models = ["--models", "edsr_serve,unet_serve,vocoder_serve", "--ways", "plain"]
    assert fleet.main([*SHORT, *models, "--minutes", "1e-9"]) == 0
    assert "left: --models edsr_serve,vocoder_serve" in capsys.readouterr().out  # in the fleet's order
    assert fleet.main([*SHORT, *models, "--jobs", "2"]) == 0
    assert "left:" not in capsys.readouterr().out


def test_parts_are_the_whole_and_models_go_by_name_kind_library_type_and_use():
    parts = [fleet.parse(["--part", f"{k}/5"]).chosen for k in range(1, 6)]
    assert sorted(model.name for part in parts for model in part) == sorted(MODELS)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    chosen = [model.name for model in fleet.parse(["--models", "board-19,edsr,impala"]).chosen]
    assert chosen == ["board_19", "board_19_search", "impala", "edsr"]  # impala is a kind, too
    for words, holds in ((["f32"], lambda m: m.dtype == "f32"), (["nnx"], lambda m: m.library == "nnx")):
        assert fleet.parse(["--models", *words]).chosen == [m for m in MODELS.values() if holds(m)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--models", "resnet51"], "--models resnet51: expected some of"),
        (["--ways", "enable"], "--ways enable: expected some of plain,enable,accelerate, and plain"),
        (["--ways", "plain,torch"], "expected some of plain,enable,accelerate"),
        (["--part", "3/2"], "3/2: expected K/N, with K from 1 to N"),
        (["--models", "edsr", "--part", "2/2"], "--part 2/2: there are 1 models"),
        (["--seconds", "-1"], "above 0"),
    ],
)
def test_bad_options_are_refused(options, message, capsys):
    with pytest.raises(SystemExit):
        fleet.main(options)
    assert message in capsys.readouterr().err


def _row(name: str, plain: float, enable: float, accelerate: float, dtype: str = "f32") -> dict:
    ways = {}
    for way, ms in (("plain", plain), ("enable", enable), ("accelerate", accelerate)):
        memory = {"plain": 1000, "enable": 1000, "accelerate": int(1000 * ms / plain)}[way]
        ways[way] = {"ms": ms, "samples_ms": [ms], "trace_s": 0.5, "compile_s": 2 * plain + ms, "agrees": True}
        ways[way] |= {"memory_bytes": memory, "calls": {}, "off": 0.0}
    row = {"model": name, "kind": "a kind", "library": "linen", "use": "train", "dtype": dtype}
    return row | {"batch": 2, "shape": [8, 8, 3], "ways": ways}


def test_the_summary_names_the_worst_and_the_means():
    rows = [_row("a", 8.0, 4.0, 2.0), _row("b", 8.0, 8.0, 10.0), _row("c", 8.0, 16.0, 1.0, "bf16")]
    enable, accelerate = fleet_report.summary(rows)
    assert enable.startswith(
        "enable: worst 0.500 (c), 1 of 3 below 0.99; geometric mean 1.000, of float32 1.414 (2 pro"
    )
    assert "memory at most 1.000 of plain's" in enable
    assert "time to compile at most 1.333 of plain's (c), 1 above 1.05" in enable
    assert "worst 0.800 (b), 1 of 3 below 0.99; geometric mean 2.947, of float32 1.789" in accelerate
    assert "memory at most 1.250 of plain's (b), 1 above 1.05" in accelerate
    assert fleet_report.agree(rows)
    rows[1]["ways"]["enable"]["agrees"] = False
    assert fleet_report.summary(rows)[0].endswith("DISAGREES: b") and not fleet_report.agree(rows)


def _recorded(path, device: str, date: str, *rows: dict) -> None:
    run = {"op": "fleet", "dtype": None, "precision": None, "layout": None, "small": False, "batch": None}
    run |= {"format": record.FORMAT, "device": device, "platform": "gpu", "date": date, "commit": "1111"}
    run |= {"dirty": False, "versions": {"jax": "0.11"}, "command": "python -m benchmarks fleet", "part": "1of2"}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**run, "rows": list(rows)}))


def test_parts_fold_into_one_table_and_one_figure_a_gpu(tmp_path):
    pytest.importorskip("matplotlib", reason="figures are drawn with it")
    folder = tmp_path / "benchmarks" / "results" / "nvidia-h200"
    _recorded(
        folder / "fleet-1of2-1111.json", "NVIDIA H200", "2026-01-01", _row("a", 8.0, 8.0, 4.0), _row("b", 8, 8, 8)
    )
    newer = _row("b", 8.0, 4.0, 2.0)
    newer["ways"]["plain"]["kinds"] = {"convolution": 5.0, "norm": 2.5}
    newer["ways"]["accelerate"]["kinds"] = {"convolution": 2.5}
    _recorded(folder / "fleet-2of2-1111.json", "NVIDIA H200", "2026-01-02", newer)
    document = tmp_path / "docs" / "benchmarks.md"
    document.parent.mkdir()
    document.write_text("<!-- benchmarks:fleet -->\n<!-- /benchmarks -->\n")
    assert report.main(["--root", str(tmp_path)]) == 0
    assert [path.name for path in folder.iterdir()] == ["fleet.json"]
    page = (tmp_path / "docs" / "results" / "nvidia-h200" / "fleet.md").read_text()
    # plain, ms; speeds of enable and accelerate: b's newer run alone
    assert "| 8.000 | 1.00 | 2.00 |" in page and "| 8.000 / 7.500 | 2.00 | 4.00 / 3.00 |" in page
    assert page.count("| train |") == 2
    assert "fleet.md" in (tmp_path / "docs" / "results" / "nvidia-h200" / "index.md").read_text()
    text = document.read_text()
    assert (
        "accelerate: worst 2.000 (a)" in text
        and "accelerate, by the time of kernels: worst 3.000 (b), 0 of 1 below 0.99; geometric mean 3.000" in text
        and "(fleet_h200.svg)" in text
        and "(results/nvidia-h200/fleet.md)" in text
    )
    figure = (tmp_path / "docs" / "fleet_h200.svg").read_text()
    assert "a, f32" in figure and not (tmp_path / "docs" / "fleet_h100.svg").exists()
    assert report.main(["--root", str(tmp_path), "--check"]) == 0
    numbers, _ = figures.FIGURES["docs/fleet_h200.svg"]
    small = {name: copy.deepcopy(run) | {"small": True} for name, run in report.load(folder.parent).items()}
    assert not numbers(small) and fleet_report.recorded(small) == {}


# ----------------------------------------------------------------------------------------------------------------------
# Every model


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_model_shrunk_has_plains_losses_or_answers_with_every_way(name, tmp_path):
    run = ran(tmp_path, "--models", name)
    (row,) = (row for row in run["rows"] if row["model"] == name)
    assert all(found["agrees"] for found in row["ways"].values())


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_model_in_full_size_can_be_traced(name):
    model = MODELS[name]
    x = model.inputs(np.random.default_rng(0), (1, *model.full.shape))
    net = model.make(DTYPES[model.dtype], model.full.options, x)
    train = model.goal is not None
    found, stats = jax.eval_shape(functools.partial(net.apply, train=train), net.params, net.stats, x)
    assert jax.tree.structure(stats) == jax.tree.structure(net.stats)
    assert [a.shape for a in jax.tree.leaves(stats)] == [a.shape for a in jax.tree.leaves(net.stats)]
    if train:
        wanted = model.goal.wanted(np.random.default_rng(0), found)
        loss = jax.eval_shape(model.goal.loss, found, wanted)
        assert loss.shape == () and loss.dtype == np.float32

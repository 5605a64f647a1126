"""`python -m benchmarks train` on shrunk models: the ways' losses agree, a wrong one's do not, and what is recorded."""

from __future__ import annotations

import collections
import dataclasses

import jax
import pytest

pytest.importorskip("flax", reason="the models are Flax's")

from benchmarks import report, train
from benchmarks.models import MODELS

# convolutions, batch-norms, dense layers
LAYERS = {"resnet50": (12, 12, 1), "convnext_t": (4, 0, 5), "mobilenet_v2": (10, 10, 1)}
SHORT = ["--small", "--dtype", "f32", "--losses", "3", "--steps", "1", "--repeat", "1"]


@pytest.mark.parametrize(
    "model", [pytest.param(m, marks=[] if m == "mobilenet_v2" else pytest.mark.slow) for m in MODELS]
)
def test_every_way_has_the_same_losses_and_accelerate_replaces_every_layer(model, tmp_path):
    ways = "flax,import,fused,accelerate" if model == "resnet50" else "flax,accelerate"
    assert train.main([*SHORT, "--model", model, "--ways", ways, "--json", str(tmp_path / "here")]) == 0
    (run,) = report.load(tmp_path).values()
    rows = {(row["way"], row["devices"]): row for row in run["rows"]}
    assert {way for way, _ in rows} == set(ways.split(","))
    losses = rows["flax", 1]["losses"]
    assert losses[2] < losses[0]
    accelerated = rows["accelerate", 1]
    assert not accelerated["left"]
    kinds = collections.Counter()
    for what, n in accelerated["replaced"].items():  # a pair, "conv + batchnorm ...", is its batch-norm's entry
        kinds["batchnorm" if "batchnorm" in what else what.partition(" ")[0]] += n
    assert (kinds["conv"], kinds["batchnorm"], kinds["dense"]) == LAYERS[model]
    # Forward and backward of each layer; the images need no gradient.
    calls = accelerated["calls"]
    assert calls["native"] + calls["xla"] >= 3 * sum(LAYERS[model]) - LAYERS[model][1] - 1
    table = report.table(run)
    assert table.count("yes") == len(rows) and "it left nothing" in table


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 2, reason="it takes two devices")
def test_several_devices_have_the_losses_of_one(tmp_path):
    assert train.main([*SHORT, "--ways", "accelerate", "--devices", "1,2", "--json", str(tmp_path / "here")]) == 0
    (run,) = report.load(tmp_path).values()
    assert [row["devices"] for row in run["rows"]] == [1, 2] and run["rows"][1]["speedup"] > 0
    assert "speed, one device = 1" in report.table(run)


def test_losses_that_differ_are_found(monkeypatch, capsys):
    make = train.Way.make

    def wrong(name, args):
        way = make(name, args)
        if name == "flax":
            return way

        def loss(*args):
            value, stats = way.loss(*args)
            return value * (1 + 1e-3), stats

        return dataclasses.replace(way, loss=loss)

    monkeypatch.setattr(train.Way, "make", staticmethod(wrong))
    assert train.main([*SHORT, "--ways", "flax,import"]) == 1
    assert "DISAGREE" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ways", "flax,torch"], "--ways torch: expected some of flax"),
        (["--devices", "1000"], "--devices 1000: there are"),
        (["--steps", "-1"], "at least 1"),
    ],
)
def test_bad_options_are_refused(options, message, capsys):
    with pytest.raises(SystemExit):
        train.main(options)
    assert message in capsys.readouterr().err

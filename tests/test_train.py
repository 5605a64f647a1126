"""`python -m benchmarks train` on shrunk models: the ways' losses agree, a wrong one's do not, and what is recorded."""

from __future__ import annotations

import collections
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="the models are Flax's")

import jaxconv
from benchmarks import figures, fleet_models, limits, report, runs, steps, torch_contender, train, training

# convolutions, batch-norms, dense layers; a squeeze-and-excitation is none of them
LAYERS = {
    "resnet50": (12, 12, 1),
    "convnext_t": (4, 0, 5),
    "mobilenet_v2": (10, 10, 1),
    "resnext50": (12, 12, 1),
    "efficientnet_b0": (10, 10, 1),
    "unet3d": (8, 6, 0),
    "ddpm": (25, 0, 10),
    "resnet18_32": (6, 6, 1),
    "impala": (10, 0, 3),
}
RUN = ("resnet50", "convnext_t", "mobilenet_v2", "unet3d")  # the others are of the same layers, and traced only
SHORT = ["--small", "--dtype", "f32", "--losses", "3", "--steps", "1", "--repeat", "1"]


def layers(replaced):
    kinds = collections.Counter()
    for what, n in replaced.items():  # a pair, "conv + batchnorm ...", is its batch-norm's entry
        kinds["batchnorm" if "batchnorm" in what else what.partition(" ")[0]] += n
    return kinds["conv"], kinds["batchnorm"], kinds["dense"]


@pytest.mark.parametrize("model", [pytest.param(m, marks=[] if m == "mobilenet_v2" else pytest.mark.slow) for m in RUN])
def test_every_way_has_the_same_losses_and_accelerate_replaces_every_layer(model, tmp_path):
    ways = "flax,import,fused,enable,accelerate" if model == "resnet50" else "flax,accelerate"
    size = ["--batch", "2", "--image", "8"] if model == "unet3d" else []
    assert train.main([*SHORT, *size, "--model", model, "--ways", ways, "--json", str(tmp_path / "here")]) == 0
    (run,) = report.load(tmp_path).values()
    rows = {(row["way"], row["devices"]): row for row in run["rows"]}
    assert {way for way, _ in rows} == set(ways.split(","))
    losses = rows["flax", 1]["losses"]
    assert losses[2] < losses[0]
    accelerated = rows["accelerate", 1]
    assert not accelerated["left"]
    assert layers(accelerated["replaced"]) == LAYERS[model]
    # Forward and backward of each layer; the images need no gradient.
    calls = accelerated["calls"]
    assert calls["native"] + calls["xla"] >= 3 * sum(LAYERS[model]) - LAYERS[model][1] - 1
    for row in rows.values():
        assert row["memory_bytes"] > 4 * 3 * 100 and row["compile_s"] > 0
        assert row["kinds"]["convolution"] > 0 and sum(row["kinds"].values()) > 0
    table = report.table(run)
    assert table.count("yes") == len(rows) and "it left nothing" in table
    assert "| GiB a device |" in table and "| ms by kind | convolution |" in table


def test_a_step_that_was_timed_without_flax_is_read_beside_the_newest_flax_step_with_a_star():
    flax, ours = {"way": "flax", "devices": 1, "ms": 6.0}, {"way": "accelerate", "devices": 1, "ms": 4.0}
    shared = {"model": "resnet50", "dtype": "bf16", "batch": 8, "image": 32, "device": "a GPU", "most_devices": 1}
    for flax_ms, expected, starred in ((5.0, "1.25", False), (None, "1.50 *", True)):
        rows = [{**flax, "flax_ms": 6.0}, {**ours, "flax_ms": flax_ms}]
        rows = [{**row, "images_per_s": 1.0, "limit_ms": 3.0} for row in rows]
        text = report.train_summary({"x": {**shared, "rows": rows}})
        assert f"| {expected} | 0.75 |" in text and (report.OTHER_RUN in text) is starred
    alone = [{**ours, "images_per_s": 1.0, "flax_ms": None}]
    assert "*" not in report.train_summary({"x": {**shared, "rows": alone}})


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        ([[1.0, 1.0, 1.09], [0.5, 0.5, 0.5]], [1.0, 1.0, 1.09]),
        ([[1.0, 1.4, 1.0], [1.0, 1.05, 1.0], [1.0, 1.0, 1.0]], [1.0, 1.05, 1.0]),
        ([[1.0, 1.4, 1.0], [1.0, 1.3, 1.0], [1.0, 2.0, 1.0]], [1.0, 1.3, 1.0]),
    ],
    ids=["steady", "again", "never"],
)
def test_samples_that_differ_are_taken_again(rounds, expected):
    given = iter([sample for samples in rounds for sample in samples])
    assert training.steady(lambda: next(given), 3) == expected


def test_each_kind_of_work_stands_beside_the_least_that_it_may_take():
    kinds = {"convolution": 3.0, "norm": 1.5, "copies": 0.2, "other": 0.1}
    row = {"way": "accelerate", "devices": 1, "ms": 5.0, "kinds": kinds}
    run = {"model": "resnet50", "dtype": "bf16", "batch": 8, "image": 32, "device": "a GPU", "rows": [row]}
    assert report.beside_least({"x": run}) == report.NOTHING  # an older record
    least = {"limit_kinds": {"convolution": 2.0, "norm": 1.0, "elementwise": 0.1}, "limit_ms": 3.1}
    assert report.beside_least({"x": run | least}) == report.NOTHING  # of a newer run than the row
    row |= least
    run |= least
    text = report.beside_least({"x": run})
    assert "| 3.0 / 2.0 | 1.5 / 1.0 | 0.0 | 0.0 / 0.1 | 0.3 | 0.2 | 5.0 / 3.1 |" in text
    assert "| the roofline | 2.00 | 1.00 |  |  | 3.10 |  |" in report.by_kind(run)


def test_a_step_that_was_timed_in_pytorch_stands_beside_ours():
    shared = {"model": "resnet50", "dtype": "bf16", "batch": 8, "image": 32, "device": "a GPU"}
    rows = [
        {"way": way, "devices": n, "ms": ms, "flax_ms": 6.0}
        for way, n, ms in (("torch", 1, 5.0), ("flax", 1, 6.0), ("accelerate", 1, 4.0), ("accelerate", 2, 3.0))
    ]
    text = report.beside_torch({"x": {**shared, "rows": rows}})
    assert "| a GPU | resnet50, bf16, 8 x 32² | 5.0 ms | 6.0 ms | 4.0 ms | 1.25 |" in text
    assert report.beside_torch({"x": {**shared, "rows": rows[1:]}}) == report.NOTHING
    rows[2]["flax_ms"] = 6.1  # of another run
    assert report.beside_torch({"x": {**shared, "rows": rows}}) == report.NOTHING


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(m, marks=pytest.mark.slow if m in ("ddpm", "resnext50") else [])
        for m in sorted(set(training.models()) - set(RUN))
    ],
)
def test_every_way_of_the_other_models_has_flaxs_parameters_and_accelerate_replaces_every_layer(model):
    args = train.parse(["--small", "--model", model])
    images, wanted = training.batch(args, 2)
    params, stats = train.initial(args, images)
    for name in train.WAYS:
        step = train.train_step(train.Way.make(name, args).loss)
        (after, _, _), loss = jax.eval_shape(step, (params, params, stats), images, wanted)
        assert jax.tree.map(lambda a: a.shape, after) == jax.tree.map(lambda a: a.shape, params) and loss.shape == ()
    report = train.Way.make("accelerate", args).loss.report(params, stats, images, wanted)
    assert not report.left
    assert layers(collections.Counter(finding.fused for finding in report)) == LAYERS[model]


@pytest.mark.parametrize(
    ("model", "batch", "shape"), [("resnet18_32", 256, (32, 32, 3)), ("impala", 1024, (84, 84, 4))]
)
def test_a_model_of_the_fleet_has_its_sizes_its_type_and_a_roofline(model, batch, shape, monkeypatch):
    args = train.parse(["--no-small", "--model", model])
    assert (args.batch, args.dtype, training.batch(args, 2)[0].shape) == (batch, "f32", (2, *shape))
    args = train.parse(["--small", "--model", model])
    assert args.batch == 4 and training.batch(args, 1)[0].shape[1:] == fleet_models.models()[model].small.shape
    assert training.rate(model) == fleet_models.models()[model].rate
    params, stats = jax.eval_shape(lambda: train.initial(args, training.batch(args, 1)[0]))
    monkeypatch.setattr(limits, "ceilings", lambda: limits.Ceilings(1e12, 1e12, 1e12, 1e12, 1e9, "a device"))
    update = 5 * 4 * sum(p.size for p in jax.tree.leaves(params)) / 1e9 * 1e3
    assert sum(train.limit(args, params, stats).values()) > 1.5 * update


@pytest.mark.parametrize("model", ["convnext_t", "efficientnet_b0", "unet3d"])
def test_accelerate_replaces_as_much_inside_a_shard_map(model):
    args = train.parse(["--small", "--model", model, "--image", "16"])
    images, wanted = training.batch(args, 2)
    params, stats = train.initial(args, images)
    loss = train.Way.make("accelerate", args).loss
    reports = [loss.report(params, stats, images, wanted)]

    def of_shard(*given):
        reports.append(loss.report(*given))
        return given[2]

    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    whole, shard = jax.P(), jax.P("data")
    mapped = jax.shard_map(of_shard, mesh=mesh, in_specs=(whole, whole, shard, shard), out_specs=shard)
    jax.eval_shape(mapped, params, stats, images, wanted)
    outside, inside = (collections.Counter(finding.fused for finding in report) for report in reports)
    assert inside == outside and not reports[1].left


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 2, reason="it takes two devices")
def test_several_devices_have_the_losses_of_one(tmp_path):
    assert train.main([*SHORT, "--ways", "accelerate", "--devices", "1,2", "--json", str(tmp_path / "here")]) == 0
    (run,) = report.load(tmp_path).values()
    assert [row["devices"] for row in run["rows"]] == [1, 2] and run["rows"][1]["speedup"] > 0
    assert "speed, one device = 1" in report.table(run)


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 4, reason="it takes four devices")
def test_volumes_split_along_their_depth_have_the_losses_of_one_device(tmp_path):
    options = ["--model", "unet3d", "--ways", "accelerate", "--devices", "1,4", "--split", "depth"]
    assert train.main([*SHORT, *options, "--json", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("train-unet3d-f32-small-batch1-4devices-split_depth")
    one, four = json.loads(path.read_text())["rows"]
    assert four["memory_bytes"] < 0.6 * one["memory_bytes"]  # rows of the neighbours, and the parameters, beside
    assert four["kinds"]["exchange"] > 0 and "exchange" not in one["kinds"]


@pytest.mark.skipif(jax.device_count() < 2, reason="it takes two devices")
def test_devices_may_normalise_by_statistics_of_their_own():
    def loss(w, _, x, wanted):  # a batch-norm, and what it measured
        mean, var = x.mean(0), x.var(0)
        return jnp.mean((((x - mean) / jnp.sqrt(var + 1e-5)) @ w - wanted) ** 3), (mean, var)

    rng = np.random.default_rng(0)
    w, x, wanted = (rng.standard_normal(shape, np.float32) for shape in ((3, 2), (8, 3), (8, 2)))
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    found = jax.jit(jax.value_and_grad(train.of_shards(loss, mesh), has_aux=True))(w, (), x, wanted)
    halves = [jax.value_and_grad(loss, has_aux=True)(w, (), x[i : i + 4], wanted[i : i + 4]) for i in (0, 4)]
    expected = jax.tree.map(lambda *of: sum(of) / 2, *halves)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6), found, expected)
    whole = jax.value_and_grad(loss, has_aux=True)(w, (), x, wanted)
    assert abs(whole[0][0] - found[0][0]) > 1e-3


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 2, reason="it takes two devices")
def test_ways_agree_where_each_device_has_statistics_of_its_own(tmp_path):
    options = ["--ways", "flax,accelerate", "--devices", "2", "--split", "batch", "--statistics", "own"]
    assert train.main([*SHORT, *options, "--no-profile", "--json", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    assert "2devices-split_batch-own_statistics" in path.name


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 2, reason="it takes two devices")
def test_each_device_has_a_batch_of_its_own(tmp_path):
    options = ["--model", "unet3d", "--ways", "accelerate", "--devices", "1,2", "--split", "batch"]
    assert train.main([*SHORT, *options, "--batch", "4", "--image", "8", "--no-profile", "--json", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    one, two = json.loads(path.read_text())["rows"]
    assert one["images_per_s"] == pytest.approx(4e3 / one["ms"]) and two["images_per_s"] == pytest.approx(
        8e3 / two["ms"]
    )
    assert two["speedup"] == pytest.approx(2 * one["ms"] / two["ms"])
    assert two["losses"] != one["losses"] and two["kinds"] is None  # of other images


@pytest.mark.slow
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
        (["--ways", "flax,tensorflow"], "--ways tensorflow: expected some of flax"),
        (["--ways", "flax,torch"], "--ways torch: PyTorch has no wheel"),
        (["--devices", "1000"], "--devices 1000: there are"),
        (["--steps", "-1"], "at least 1"),
        (["--split", "depth"], "resnet50 has images without a depth"),
        (["--model", "unet3d", "--split", "depth", "--statistics", "own"], "have no images of their own"),
    ],
)
def test_bad_options_are_refused(options, message, capsys, monkeypatch):
    monkeypatch.setattr(torch_contender, "available", lambda: "PyTorch has no wheel")
    with pytest.raises(SystemExit):
        train.main(options)
    assert message in capsys.readouterr().err


def test_several_models_run_one_after_the_other(monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(train, "measured", lambda args: ran.append(args) or args.model == "unet3d")
    given = ["--model", "ddpm,unet3d,impala", "--no-small", "--ways", "flax"]
    assert train.main([*given, "--json"]) == 1 and train.main(["--small"]) == 0
    expected = [("ddpm", 64), ("unet3d", 8), ("impala", 1024), ("resnet50", 8)]
    assert [(args.model, args.batch) for args in ran] == expected
    for wrong, message in ((["--model", "ddpm,x"], "invalid choice: 'x'"), ([*given, "--json", "a.json"], "one file")):
        with pytest.raises(SystemExit):
            train.main(wrong)
        assert message in capsys.readouterr().err
    assert len(ran) == 4


@pytest.mark.skipif(jax.device_count() < 2, reason="it takes two devices")
def test_pytorch_is_asked_for_one_device(capsys, monkeypatch):
    monkeypatch.setattr(torch_contender, "available", lambda: None)
    with pytest.raises(SystemExit):
        train.main(["--ways", "flax,torch", "--devices", "2"])
    assert "--ways torch: it takes one device" in capsys.readouterr().err


@pytest.mark.parametrize("model", sorted(training.models()))
def test_pytorchs_losses_are_flaxs(model, monkeypatch, tmp_path):
    torch = pytest.importorskip("torch", reason="it compares with PyTorch, which is not installed")
    monkeypatch.setattr(torch, "compile", lambda f: f)  # a minute each on a CPU
    size = ["--batch", "2", "--image", "8"] if model == "unet3d" else []
    given = [*SHORT, *size, "--model", model, "--ways", "flax,torch", "--no-profile", "--json", str(tmp_path / "here")]
    assert train.main(given) == 0
    (run,) = report.load(tmp_path).values()
    assert [row["way"] for row in run["rows"]] == ["flax", "torch"] and all(row["agrees"] for row in run["rows"])
    assert "PyTorch, torch.compile" in report.table(run)


def test_steps_compiled_with_graphs_are_a_table_of_their_own(tmp_path, monkeypatch):
    given, compile_ = [], train.Program.compile
    monkeypatch.setattr(
        train.Program, "compile", staticmethod(lambda lowered, options=None: given.append(options) or compile_(lowered))
    )
    options = ["--model", "impala", "--ways", "flax", "--graphs", "--no-profile", "--json", str(tmp_path / "here")]
    assert train.main([*SHORT, *options]) == 0
    ((name, run),) = report.load(tmp_path).items()
    assert given == [jaxconv.graph_options()] and name.endswith("-graphs-all")
    assert runs.is_step_alone({**run, "small": False, "options": {}})
    assert not runs.is_step_alone({**run, "small": False})


# ----------------------------------------------------------------------------------------------------------------------
# What a step is made of

# As XLA writes a GPU's program; shapes are shortened.
PROGRAM = """
HloModule jit_step, is_scheduled=true

%fused_normalise (p0: bf16[8], p1: f32[8]) -> bf16[8] {
  %p0 = bf16[8]{0} parameter(0)
  %p1 = f32[8]{0} parameter(1)
  %m.1 = bf16[8]{0} multiply(%p0, %p0), metadata={op_name="jit(step)/jvp(ResNet)/BatchNorm_0/mul"}
  ROOT %c.1 = bf16[8]{0} maximum(%m.1, %m.1), metadata={op_name="jit(step)/jvp(ResNet)/jit(relu)/max"}
}

%fused_cast (p0.1: f32[8]) -> bf16[8] {
  %p0.1 = f32[8]{0} parameter(0)
  %t.1 = f32[8]{0} transpose(%p0.1), dimensions={0}
  ROOT %c.2 = bf16[8]{0} convert(%t.1), metadata={op_name="jit(step)/convert_element_type"}
}

%fused_scatter (p0.2: bf16[8], p1.2: s32[8]) -> bf16[8] {
  %p0.2 = bf16[8]{0} parameter(0)
  ROOT %s.1 = bf16[8]{0} scatter(%p0.2, %p0.2), metadata={op_name="jit(step)/transpose(jvp())/select_and_scatter_add"}
}

%fused_sgd (p0.3: f32[8]) -> (f32[8], f32[8]) {
  %p0.3 = f32[8]{0} parameter(0)
  %m.2 = f32[8]{0} multiply(%p0.3, %p0.3), metadata={op_name="jit(step)/mul"}
  ROOT %tuple.1 = (f32[8]{0}, f32[8]{0}) tuple(%m.2, %m.2)
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  ROOT %inner.1 = f32[8]{0} fusion(%p), kind=kLoop, calls=%fused_sgd
}

ENTRY %main.1 (x: bf16[8,8], w: bf16[8]) -> bf16[8] {
  %x = bf16[8,8]{1,0} parameter(0)
  %cudnn-conv.1 = (bf16[8]{0:T(8,128)}, u8[0]{0}) custom-call(%x, %w), custom_call_target="__cudnn$convForward"
  %ours.1 = (bf16[8]{0}, u8[16]{0}) custom-call(%x, %w), custom_call_target="jaxconv_conv_wgrad_v2"
  %norm.1 = bf16[8]{0} custom-call(%x), custom_call_target="jaxconv_batchnorm_train_v2"
  %cublas-gemm.2 = bf16[8]{0} custom-call(%x), custom_call_target="__cublas$lt$matmul"
  %loop_fusion.1 = bf16[8]{0} fusion(%x), kind=kLoop, calls=%fused_normalise
  %loop_convert_fusion.2 = bf16[8]{0} fusion(%x), kind=kLoop, calls=%fused_cast
  %input_scatter_fusion = bf16[8]{0} fusion(%x), kind=kInput, calls=%fused_scatter
  %loop_multiply_fusion.3 = (f32[8]{0}, f32[8]{0}) fusion(%x), kind=kLoop, calls=%fused_sgd
  %all-reduce-start.1 = f32[8]{0} all-reduce-start(%x), replica_groups={{0,1}}
  %while.1 = (s32[], f32[8]) while(%x), condition=%cond, body=%body
  %reduce-window.1 = f32[8]{0} reduce-window(%x), window={size=3}
  ROOT %copy.3 = bf16[8]{0} copy(%x)
}
"""


def test_events_of_a_gpu_are_known_by_instruction_or_by_kernel():
    kinds = {
        ("cudnn-conv.1", "sm90_xmma_fprop_implicit_gemm_bf16"): "convolution",
        ("ours.1", "whatever"): "convolution",
        ("norm.1", "whatever"): "norm",
        ("cublas-gemm.2", "nvjet_tst_128x256"): "product",
        ("loop_fusion.1", "loop_fusion_1"): "norm",
        ("", "loop_fusion_1"): "norm",  # in a CUDA graph
        ("", "loop_convert_fusion_2"): "copies",
        ("", "input_scatter_fusion"): "pool",
        ("", "loop_multiply_fusion_3"): "elementwise",
        ("all-reduce-start.1", "ncclDevKernel_AllReduce_Sum"): "exchange",
        ("", "ncclDevKernel_SendRecv"): "exchange",
        ("reduce-window.1", "reduce_window_1"): "pool",
        ("copy.3", "MemcpyD2D"): "copies",
        ("", "void jaxconv::cuda::batchnorm::Normalise<__nv_bfloat16>(jaxconv::cuda::Args)"): "norm",
        ("", "_ZN7jaxconv4cuda9batchnorm12TwoReadTrainE"): "norm",
        ("", "void jaxconv::cuda::conv::depthwise::Rows<float, 3>(int)"): "convolution",
        ("", "void jaxconv::cuda::squeeze_excite::(anonymous namespace)::OnePassKernel<__nv_bfloat16>"): "elementwise",
        ("", "void jaxconv::cuda::dense::Epilogue<float>(int)"): "product",
        ("", "_ZN7jaxconv4cuda18Sm90StreamedKernelINS0_8Sm90TileI6__halfEENS0_12Sm90GradientIS4_EEEEv"): "product",
        ("", "_ZN7jaxconv4cuda18Sm90StreamedKernelINS0_8Sm90TileI6__halfEENS0_9Sm90PlainIS4_EEEEv"): "convolution",
        ("", "void cudnn::ops::nchwToNhwcKernel<__nv_bfloat16>"): "convolution",
        ("", "sm80_xmma_wgrad_implicit_gemm_indexed_tf32"): "convolution",
        ("", "cutlass_80_tensorop_s1688gemm_128x128"): "product",
        ("", "triton_red_fused__native_batch_norm_legit_functional_relu_3"): "norm",
        ("", "triton_poi_fused_native_group_norm_silu_1"): "norm",
        ("", "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>"): "norm",
        ("", "triton_poi_fused_max_pool2d_with_indices_2"): "pool",
        ("", "triton_poi_fused_add_convolution_silu_7"): "elementwise",
        ("", "triton_poi_fused__to_copy_12"): "copies",
        ("", "triton_poi_fused_cat_4"): "copies",
        ("", "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedSgd>"): "elementwise",
        ("", "void at::native::(anonymous namespace)::conv_depthwise2d_forward_kernel<3>"): "convolution",
        ("", "somebody_elses_kernel"): "other",
    }
    text = steps.Text(PROGRAM)
    for (instruction, kernel), kind in kinds.items():
        assert steps.by_kind([(instruction, kernel, 2.0)], text) == {kind: 2.0}, (instruction, kernel)
    together = steps.by_kind([(*names, 1.0) for names in kinds], text)
    assert together == collections.Counter(kinds.values())
    # A loop counts by what runs in it, where that has events of its own.
    assert steps.by_kind([("while.1", "while.1", 5.0), ("inner.1", "inner_1", 2.0)], text) == {"elementwise": 2.0}
    assert steps.by_kind([("while.1", "while.1", 5.0)], text) == {"other": 5.0}


def test_the_roofline_is_the_sum_of_each_calls_limit():
    x, w = jnp.ones((2, 8, 8, 16), jnp.bfloat16), jnp.ones((3, 3, 16, 32), jnp.bfloat16)
    calls = jaxconv.explain(lambda x, w: jaxconv.conv2d(x, w), platform="cuda")(x, w)
    flops, size = 2 * 2 * 64 * 9 * 16 * 32, 2 * (2 * 64 * 16 + 9 * 16 * 32 + 2 * 64 * 32)
    top = limits.Ceilings(1e12, 1e11, 1e10, 1e10, 1e9, "a device")
    of_conv = pytest.approx(1e3 * max(flops / 1e12, size / 1e9))
    assert steps.least_ms(calls, 100, top) == {"convolution": of_conv, "elementwise": pytest.approx(2000 / 1e6)}
    slow = dataclasses.replace(top, half=1e9)
    assert steps.least_ms(calls, 0, slow) == {"convolution": pytest.approx(1e3 * flops / 1e9)}
    depthwise = jaxconv.explain(lambda x, w: jaxconv.conv2d(x, w, groups=16), platform="cuda")(x, w[:, :, :1, :16])
    assert steps.least_ms(depthwise, 0, slow)["convolution"] == pytest.approx(
        1e3 * max(flops / 32 / 1e10, 2 * 2 * 2 * 64 * 16.5625 / 1e9), rel=0.2
    )


def test_the_figure_stacks_each_way_by_kind(tmp_path):
    row = {"way": "flax", "devices": 1, "ms": 3.0, "kinds": {"convolution": 2.0, "norm": 0.5}}
    rows = [row, {**row, "way": "accelerate", "kinds": {"convolution": 1.0, "pool": 0.25}}]
    run = {"op": "train", "model": "unet3d", "task": "segment", "dtype": "bf16", "batch": 8, "image": 64}
    run |= {"small": False, "most_devices": 1, "rows": rows}
    numbers, onto = figures.FIGURES["docs/steps_by_kind.svg"]
    found = numbers({f"{report.DEVICE}/train-unet3d-bf16-batch8": run})
    assert found == {"unet3d, bf16, 8 x 64³": {r["way"]: r["kinds"] for r in rows}}
    pytest.importorskip("matplotlib", reason="figures are drawn with it")
    figures.draw(found, onto, tmp_path / "figure.svg")
    text = (tmp_path / "figure.svg").read_text()
    assert (
        all(word in text for word in ("convolution", "norm", "pool", "unet3d, bf16, 8 x 64³"))
        and "exchange" not in text
    )
    # Nothing is drawn of what has no profile.
    assert not numbers({f"{report.DEVICE}/x": {**run, "rows": [{**row, "kinds": None}]}})

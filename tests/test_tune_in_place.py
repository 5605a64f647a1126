"""Problems that are timed where they are lowered, when asked (JAXCONV_TUNE=1, `tune=True`), and what may go wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import pickle
import re
import subprocess
import sys
import threading
import time
import types
import warnings

import helpers
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import A100, H200
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxconv
from benchmarks import in_place as benchmark
from jaxconv import _plan
from jaxconv._core import compat, primitives
from jaxconv._plan import in_place, tuned
from jaxconv._plan.planner import PLANNERS
from jaxconv._tools import in_place as _in_place
from jaxconv._tools import timing

ON_CPU = pytest.mark.skipif(helpers.PLATFORM != "cpu", reason="the kernels that are named are the CPU's")


@pytest.fixture(autouse=True)
def file(tuning_file, monkeypatch):
    monkeypatch.delenv("JAXCONV_DISABLE", raising=False)
    monkeypatch.setattr(compat, "_profiles", [])  # another test of this process may have taken a profile
    return tuning_file


class Clock:
    """A stand-in for the timer: a kernel takes `ms` of its op, XLA twice that unless told otherwise."""

    def __init__(self):
        self.timed: list[tuple[str, str]] = []
        self.xla, self.native, self.noise, self.failed = 2.0, 1.0, 0.01, {}
        self.raises: BaseException | None = None

    def __call__(self, op, problem, device, kernels, seconds, stop):
        self.timed.append((op, str(problem)))
        if self.raises is not None:
            raise self.raises
        specs = [plan.spec for plan in _plan.tiles(op, problem, device) if not kernels or plan.kernel in kernels]
        native = {spec: self.native * (1 + i / 100) for i, spec in enumerate(specs)}
        ms = {name: t for name, t in {"xla": self.xla, **native}.items() if name not in self.failed}
        return in_place.Times(ms, dict.fromkeys(ms, self.noise), self.failed, "cupti", 0.25)


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(in_place, "_timer", made)
    return made


@pytest.fixture
def gpu(monkeypatch, clock, code_for_gpus):
    """A GPU that no table knows, as if it were here."""
    monkeypatch.setattr(in_place, "here", lambda device: object())
    return clock


@pytest.fixture
def cpu(monkeypatch, clock):
    """The CPU as if choices were made there as on a GPU."""
    monkeypatch.setattr(in_place, "PLATFORMS", ("cuda", "cpu"))
    return clock


def conv(x, w, **options):
    return jaxconv.conv2d(x, w, padding="SAME", **options)


def problem_of(f, *args):
    (equation,) = (e for e in primitives.equations(jax.make_jaxpr(f)(*args).jaxpr) if e.primitive in primitives.KERNELS)
    return primitives.KERNELS[equation.primitive].name, equation.params["problem"]


X, W = jnp.ones((2, 9, 9, 8)), jnp.ones((3, 3, 8, 16))
OF = problem_of(conv, X, W)  # conv_fprop, and its problem


def planned(device=A100, of=OF, asked=True):
    with jaxconv.enabled(tune=True) if asked else contextlib.nullcontext():
        return _plan.plan(*of, device)


# ----------------------------------------------------------------------------------------------------------------------
# What is timed, and what becomes of it


def test_nothing_is_timed_unasked(gpu, file):
    plan = planned(asked=False)
    with jaxconv.enabled():
        assert _plan.plan(*OF, A100) == plan
    assert plan.implementation == "xla" and not gpu.timed and not file.exists()


def test_a_problem_that_nobody_knows_is_timed_once_and_kept(gpu, file, capsys):
    plan = planned()
    assert plan.implementation == "native" and gpu.timed == [(OF[0], str(OF[1]))]
    assert plan.reason.startswith("tuned on this device on 2") and "2.00 times faster than XLA" in plan.reason
    assert {c.how for c in plan.candidates} == {"tuned on this device"}
    (entry,) = tuned.read(file).entries
    assert (entry.op, entry.device, entry.choice, entry.alone) == (OF[0], A100.kind, plan.spec, True)
    assert planned() == plan and len(gpu.timed) == 1
    said = capsys.readouterr().err
    assert said.count("problems are timed on NVIDIA A100") == 1 and str(file) in said
    assert f"{plan.spec} 1.0000 ms, XLA 2.0000 ms: taken" in said
    # The choice holds in this process, and in later ones, whether they ask or not.
    assert planned(asked=False) == plan
    tuned.forget()
    assert planned(asked=False) == plan


@pytest.mark.parametrize(("xla", "noise"), [(0.5, 0.0), (1.03, 0.0), (1.15, 0.1), (1.0005, 0.0)])
def test_what_does_not_win_by_more_than_its_noise_stays_xlas(gpu, xla, noise, file):
    gpu.xla, gpu.noise = xla, noise
    plan = planned()
    assert plan.implementation == "xla" and plan.reason.startswith("tuned on this device on")
    assert ("XLA is the fastest" in plan.reason) == (xla < 1)
    assert tuned.read(file).entries[0].choice == "xla"
    assert planned() == plan and len(gpu.timed) == 1


def test_what_xla_cannot_run_is_native(gpu):
    gpu.failed = {"xla": "UNIMPLEMENTED: no algorithm"}
    assert "XLA could not run it" in planned().reason


@pytest.mark.parametrize("why", ["forced", "native", "disabled", "partitioned", "applied", "explained", "a CPU"])
def test_other_tiers_come_first(gpu, why, monkeypatch):
    name, problem = OF
    device = A100
    context = contextlib.nullcontext()
    if why == "forced":
        problem = dataclasses.replace(problem, algorithm="implicit_gemm")
    elif why == "native":
        problem = dataclasses.replace(problem, implementation="native")
    elif why == "disabled":
        monkeypatch.setenv("JAXCONV_DISABLE", "conv")
    elif why == "partitioned":
        device = dataclasses.replace(device, partitioned=True)
    elif why == "applied":
        context = jaxconv.tune.applied(None)
    elif why == "explained":
        context = in_place.nothing_timed()
    else:
        device = _plan.Device("cpu", "cpu")
    with jaxconv.enabled(tune=True), context:
        _plan.plan(name, problem, device)
    assert not gpu.timed


def test_what_was_tuned_is_known(gpu, file):
    with jaxconv.enabled(tune=True):
        planned()
        tuned.forget()
        in_place.forget()
        assert planned().reason.startswith("tuned") and len(gpu.timed) == 1


def test_a_devices_own_table_knows_what_is_near(gpu):
    """On others, and where only the model knows, it is timed."""
    of = problem_of_shapes((256, 56, 56, 64), (3, 3, 64, 64))
    known = planned(H200, of)
    assert not gpu.timed and "measured" in known.reason
    planned(A100, of)
    planned(dataclasses.replace(H200, kind="NVIDIA GH200 480GB"), of)  # whose sisters have tables
    assert len(gpu.timed) == 2
    # A kernel was measured near, and did not win; of others the model would speak. Then nothing was measured at all.
    for shapes in (((256, 28, 28, 128), (3, 3, 128, 128)), ((3, 33, 35, 40), (4, 6, 40, 56))):
        planned(H200, problem_of_shapes(*shapes))
    assert len(gpu.timed) == 4


def problem_of_shapes(x, w):
    """Without the arrays."""
    jaxpr = jax.make_jaxpr(conv)(jax.ShapeDtypeStruct(x, "bfloat16"), jax.ShapeDtypeStruct(w, "bfloat16"))
    return "conv_fprop", jaxpr.eqns[0].params["problem"]


def test_float16_is_not_given_to_kernels_that_spread_infinities(gpu):
    of = problem_of(
        functools.partial(conv, groups=32), jnp.ones((8, 28, 28, 32), "float16"), jnp.ones((7, 7, 1, 32), "float16")
    )
    planned(H200, of)
    spreading = {p.kernel for p in _plan.every(*of, H200)} - {
        p.kernel for p in _plan.choose._safe(PLANNERS[of[0]], of[1], H200)
    }
    assert spreading
    known = tuned.entry(*of, H200)
    assert known is None or not {name.partition(" ")[0] for name in known.native_ms} & spreading


def norm(training=True, **options):
    c = jnp.ones(16)

    def f(x):
        y = jaxconv.batchnorm(x, c, c, c, c, training=training, **options)
        return y[0] if training else y

    return f


def test_norms_are_chosen_forward_and_backward_by_the_sum_of_both(gpu):
    x = jnp.ones((8, 9, 9, 16), "bfloat16")
    of = problem_of(norm(activation="relu"), x)
    back = problem_of_backward(norm(activation="relu"), x)
    forward = planned(A100, of)
    assert {op for op, _ in gpu.timed} == {"batchnorm_train", "batchnorm_backward"} and len(gpu.timed) == 2
    backward = planned(A100, back)
    assert forward.implementation == backward.implementation == "native" and len(gpu.timed) == 2
    # The other way round, where XLA is the faster of one of them by more than a kernel is of the other.
    tuned.forget()
    in_place.forget()
    os.remove(tuned.path())
    times = gpu.__call__

    def one_sided(op, *rest):
        gpu.xla = 1.5 if op == "batchnorm_train" else 0.4
        return times(op, *rest)

    in_place.times_with(one_sided)
    assert planned(A100, back).implementation == planned(A100, of).implementation == "xla"


def problem_of_backward(f, x):
    jaxpr = jax.make_jaxpr(jax.grad(lambda x: f(x).astype(jnp.float32).sum()))(x).jaxpr
    return next(
        (primitives.KERNELS[e.primitive].name, e.params["problem"])
        for e in primitives.equations(jaxpr)
        if e.primitive in primitives.KERNELS and primitives.KERNELS[e.primitive].name.endswith("_backward")
    )


def test_norms_and_poolings_that_xla_fuses_are_not_timed(gpu):
    x = jnp.ones((8, 9, 9, 16), "bfloat16")
    for f in (norm(), norm(False)):
        assert planned(A100, problem_of(f, x)).implementation == "xla"
    first = problem_of(lambda x: norm(activation="relu", channel_axis=1)(jnp.moveaxis(x, -1, 1)), x)
    planned(A100, problem_of(lambda x: jaxconv.max_pool(x, 2), x))
    assert not gpu.timed
    planned(A100, first)
    last = "8x9x9x16 channel_axis=3 bfloat16 + relu"  # as it lies between convolutions
    assert gpu.timed == [("batchnorm_train", last), ("batchnorm_backward", last)]
    gpu.timed.clear()
    planned(A100, problem_of_backward(lambda x: jaxconv.max_pool(x, 2), x))
    assert [op for op, _ in gpu.timed] == ["max_pool", "max_pool_backward"]


def test_enables_convolutions_must_win_by_a_pass_that_xla_would_take_in(gpu):
    """A forward convolution's neighbours are unknown to its lowering."""
    for xla, behind in ((2.0, None), (1.2, "too little to pay for a pass")):
        tuned.forget()
        in_place.forget()
        tuned.path().unlink(missing_ok=True)
        gpu.xla = xla
        plan = planned()
        assert plan.implementation == "native"
        why = _plan.fused_behind(OF[1], plan, A100)
        assert why is None if behind is None else behind in why


OPS = {
    "conv_fprop": lambda x: conv(x, W),
    "conv": lambda x: conv(x, W, b=jnp.ones(16), activation="relu"),
    "nchw": lambda x: conv(x, jnp.ones((4, 9, 3, 3)), layout="NCHW"),
    "groups": lambda x: conv(x, jnp.ones((3, 3, 4, 6)), groups=2),
    "dense": lambda x: jaxconv.dense(x[0, 0], W[0, 0], jnp.ones(16), activation="gelu"),
    "matmul": lambda x: jaxconv.dense(x[0, 0], W[0, 0]),
    "train": lambda x: norm8(x, activation="relu")[0],
    "residual": lambda x: norm8(x, residual=x, activation="relu")[0],
    "groupnorm": lambda x: jaxconv.groupnorm(x, jnp.ones(8), jnp.ones(8), groups=2),
    "layernorm": lambda x: jaxconv.layernorm(x, jnp.ones(8), jnp.ones(8)),
    "max_pool": lambda x: jaxconv.max_pool(x, 3, stride=2),
    "squeeze_excite": lambda x: jaxconv.squeeze_excite(x, jnp.ones((8, 4)), jnp.ones(4), jnp.ones((4, 8)), jnp.ones(8)),
    "mlp": lambda x: jaxconv.mlp(x[0], *(jnp.ones((8, 16)), jnp.ones(16), jnp.ones((16, 8)), jnp.ones(8))),
}


def norm8(x, **options):
    c = jnp.ones(8)
    return jaxconv.batchnorm(x, c, c, c, c, training=True, **options)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("mapped", [False, True])
def test_operands_are_those_that_an_op_is_bound_with(name, mapped):
    f = jax.grad(lambda x: OPS[name](x).astype(jnp.float32).sum())
    x = jnp.ones((2, 9, 9, 8), "bfloat16" if name not in ("dense",) else "float32")
    x = x if name in ("train", "residual", "groupnorm", "layernorm", "max_pool") else x.astype(jnp.float32)
    if mapped:
        f, x = jax.vmap(f), jnp.stack([x, x])
    seen = 0
    for equation in primitives.equations(jax.make_jaxpr(f)(x).jaxpr, A100):
        kernel = primitives.KERNELS.get(equation.primitive)
        if kernel is None or kernel.name not in in_place._OPS:
            continue
        seen += 1
        expected = [(v.aval.shape, v.aval.dtype.name) for v in equation.invars]
        assert list(kernel.operands(equation.params["problem"]).values()) == expected, kernel.name
    assert seen
    assert set(in_place._OPS) <= set(_in_place._KERNELS)


# ----------------------------------------------------------------------------------------------------------------------
# Inside JAX


def lowered(f, *args):
    """f lowered for the GPU that is the default by assumption."""
    if helpers.PLATFORM != "cpu":
        pytest.skip("what is lowered is for the GPU that is here")
    with _plan.Device.assumed(A100):
        return jax.jit(lambda *a: f(*a)).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def lax_conv(x, w):
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def loss(x, w):
    return jax.nn.relu(lax_conv(x, w) + jnp.ones(w.shape[-1])).sum()


def test_a_lowering_asks_for_enables_and_explicit_calls(gpu):
    assert not helpers.targets(lowered(lax_conv, X, W))
    jaxconv.report(clear=True)  # of other tests
    with jaxconv.enabled(tune=True):
        assert helpers.targets(lowered(lax_conv, X, W)) == {"conv_fprop": 1}
        (one,) = jaxconv.report(clear=True)
        assert one.why.startswith("tuned on this device on")
        assert helpers.targets(lowered(jax.grad(conv_loss), X, W)) == {"conv_dgrad": 1}
    assert len(gpu.timed) == 2


def conv_loss(x, w):
    return conv(x, w).sum()


@pytest.mark.parametrize("way", ["grad", "grad of jit", "jit", "inner jit", "scan", "checkpoint"])
def test_accelerate_asks_for_its_regions_alone(gpu, way):
    """They are differentiated and lowered after accelerate has returned."""
    f = jaxconv.accelerate(loss, tune=True)
    g = {
        "grad": lambda: jax.grad(f, (0, 1)),
        "grad of jit": lambda: jax.grad(jax.jit(f), (0, 1)),
        "jit": lambda: f,
        "inner jit": lambda: jax.jit(f),
        "scan": lambda: jax.grad(lambda x, w: jax.lax.scan(lambda c, _: (c + f(x, w), None), 0.0, None, 3)[0], (0, 1)),
        "checkpoint": lambda: jax.grad(jax.checkpoint(f), (0, 1)),
    }[way]()
    called = helpers.targets(lowered(g, X, W))
    assert called["conv"] >= 1 and {"conv"} <= {op for op, _ in gpu.timed}
    if "grad" in way or way in ("scan", "checkpoint"):
        assert called["conv_wgrad"] == called["conv_dgrad"] == 1
    assert len(gpu.timed) == len(set(gpu.timed))
    n = len(gpu.timed)
    lowered(lambda x: lax_conv(x, W), X[:, :5])
    lowered(lambda x: conv(x, W), X[:, :5])
    assert len(gpu.timed) == n


def test_accelerate_without_tune_asks_for_nothing(gpu):
    assert not helpers.targets(lowered(jax.grad(jaxconv.accelerate(loss)), X, W)) and not gpu.timed
    with jaxconv.enabled(tune=True):
        assert "conv" in helpers.targets(lowered(jax.grad(jaxconv.accelerate(loss)), X, W))


def test_who_looks_at_a_program_times_nothing(gpu):
    f = jaxconv.accelerate(loss, tune=True)
    with _plan.Device.assumed(A100), jaxconv.enabled(tune=True):
        jaxconv.explain(jax.grad(f))(X, W)
        jaxconv.explain(lax_conv)(X, W)
        f.report(X, W)
        assert not gpu.timed
        # What was only looked at is chosen when it is compiled.
        assert helpers.targets(lowered(jax.grad(f), X, W))
        assert any("tuned on this device on" in c.plan.reason for c in jaxconv.explain(jax.grad(f))(X, W))
    n = len(gpu.timed)
    with _plan.Device.assumed(A100):
        assert any("tuned on this device on" in c.plan.reason for c in jaxconv.explain(jax.grad(f))(X, W))
    assert len(gpu.timed) == n


def test_a_jitted_function_that_was_explained_is_still_timed(gpu):
    f = jax.jit(jaxconv.accelerate(loss, tune=True))
    with _plan.Device.assumed(A100):
        jaxconv.explain(jax.grad(f))(X, W)
    assert not gpu.timed and helpers.targets(lowered(jax.grad(f), X, W))


@ON_CPU
def test_whether_somebody_asks_is_part_of_the_key_of_jaxs_caches(cpu):
    traced = []

    @jax.jit
    def f(x, w):
        traced.append(None)
        return conv(x, w)

    x = jax.random.normal(jax.random.key(0), X.shape)
    before = f(x, W)
    with jaxconv.enabled(tune=True):
        after = f(x, W)
        assert helpers.targets(f.lower(x, W).compile().as_text()) == {"conv_fprop": 1}
        n = len(traced)
        f(x, W)
        assert len(traced) == n == 2
    np.testing.assert_allclose(before, after, rtol=1e-4, atol=1e-4)
    f(x, W)
    assert len(traced) == 2 and not helpers.targets(f.lower(x, W).compile().as_text())
    jaxconv.enable(tune=True)
    f(x, W)
    with jaxconv.enabled(tune=True):
        f(x, W)
    assert len(traced) == 2  # all who ask are alike
    jaxconv.disable()
    f(x, W)
    assert len(traced) == 2


@pytest.mark.parametrize("wrong", [lambda y: 0 * y, lambda y: y + jnp.nan, lambda y: 1.2 * y], ids=["0", "NaN", "1.2"])
def test_a_kernel_with_other_results_than_xlas_is_not_taken(monkeypatch, wrong):
    """As one of which the module holds no code for the device may be: it is the fastest."""
    times = {"xla": 2.0, "wrong": 0.1, "slow and wrong": 9.0, "right": 1.0, "tile": 0.2}

    def timings_of(functions, sets, seconds, step):
        return {name: timing.Timing((times[name],), "wall", 1.0) for name in functions}, {}

    def right(x):
        return [x + 1, jnp.sum(x)]

    def measure(job, device, seconds, kernels, clock, of_xla):
        sets = [(jax.random.normal(jax.random.key(0), (9, 9)),)]

        def broken(x):
            return [right(x)[0], wrong(right(x)[1])]

        ms, failed = clock({"xla": right, "wrong": broken, "right": right, "slow and wrong": broken}, sets, seconds)
        more, others = clock({"right": right, "tile": broken}, sets, seconds)
        return ms | more, failed | others

    monkeypatch.setattr(_in_place.candidates, "timings_of", timings_of)
    monkeypatch.setattr(_in_place.candidates, "measure", measure)
    cpu = _plan.Device("cpu", "cpu")
    found = _in_place.times("conv_wgrad", OF[1], cpu, None, 1.0, lambda: None)
    assert dict(found.ms) == {"xla": 2.0, "right": 1.0, "slow and wrong": 9.0}
    assert set(found.failed) == {"wrong", "tile"} and "its results differ from XLA's" in found.failed["wrong"]


@ON_CPU
@pytest.mark.parametrize("where", ["plain", "mesh", "settings", "scan and vmap"])
def test_timing_runs_programs_of_its_own_while_another_is_compiled(monkeypatch, where, file):
    """The real timer, on a CPU: inside a trace and a lowering, a mesh, and settings that forbid what it does."""
    monkeypatch.setattr(in_place, "PLATFORMS", ("cpu",))
    monkeypatch.setattr(in_place, "MOST_NOISE", math.inf)
    monkeypatch.setattr(in_place, "SECONDS_A_PROBLEM", 0.5)
    context = contextlib.nullcontext()
    if where == "mesh":
        context = jax.set_mesh(jax.make_mesh((1,), ("a",), axis_types=(AxisType.Explicit,)))
    f = jaxconv.accelerate(loss)
    x, w = X[:1, :4, :4], W
    if where == "scan and vmap":
        f = jax.vmap(lambda x, w: jax.lax.scan(lambda c, _: (c + loss(x, w), None), 0.0, None, 2)[0], (0, None))
        x = x[None]
    with jaxconv.enabled(tune=True), context:
        g = jax.jit(jax.value_and_grad(lambda x, w: f(x, w).sum(), (0, 1)))
        if where == "settings":
            with jax.transfer_guard("disallow"), jax.debug_nans(True), jax.numpy_dtype_promotion("strict"):
                got = g.lower(x, w).compile()(x, w)
        else:
            got = g(x, w)
    entries = tuned.read(file).entries
    assert len(entries) >= 3 and {e.timer for e in entries} == {"wall"}
    assert all(e.xla_ms > 0 and e.native_ms for e in entries)
    expected = jax.value_and_grad(lambda x, w: f(x, w).sum(), (0, 1))(x, w)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_exported_programs_time_nothing(gpu, monkeypatch):
    exporting = functools.partial(jax.export.export, disabled_checks=jaxconv.export_checks(), platforms=("cuda",))
    with _plan.Device.assumed(A100), jaxconv.enabled(tune=True):
        exporting(jax.jit(lambda x, w: conv(x, w)))(X, W)
        exporting(jax.jit(jaxconv.accelerate(loss, tune=True)))(X, W)
    assert not gpu.timed


@ON_CPU
def test_whole_arrays_that_xla_splits_are_not_timed_but_their_shards_are(cpu):
    mesh = jax.make_mesh((2,), ("n",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    x = jax.device_put(jnp.ones((4, 9, 9, 8)), NamedSharding(mesh, P("n")))
    jaxconv.enable(tune=True)
    jax.jit(lambda x, w: conv(x, w))(x, W)
    jaxconv.disable()
    assert cpu.timed and all(text.startswith("2x9x9") for _, text in cpu.timed)


def test_threads_time_a_problem_once(gpu):
    gate = threading.Barrier(4)
    plans = []

    def one():
        with jaxconv.enabled(tune=True):
            gate.wait()
            plans.append(_plan.plan(*OF, A100))

    threads = [threading.Thread(target=one) for _ in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert len(gpu.timed) == 1 and len(set(plans)) == 1 and plans[0].implementation == "native"


# ----------------------------------------------------------------------------------------------------------------------
# What may go wrong: nothing is lost, nothing half-written, and the program compiles


UNTIMED = _plan.Plan("xla", "")


def stays_as_it_was(gpu, capsys, says, file, times=1):
    plan = planned()
    said = capsys.readouterr().err
    assert plan == planned(asked=False) and plan.implementation == "xla" and not plan.reason.startswith("tuned")
    assert says in said, said
    assert planned() == plan and len(gpu.timed) == times
    assert not file.exists()


def test_a_busy_device_is_not_believed(gpu, capsys, file):
    gpu.noise = 0.5
    stays_as_it_was(gpu, capsys, "times differ by 50 %, somebody else uses the device", file)


def test_memory_that_is_full_skips_the_problem(gpu, capsys, file):
    gpu.failed = {"xla": "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 3 bytes"}
    stays_as_it_was(gpu, capsys, "the device's memory is full", file)


def test_arrays_that_cannot_be_made_skip_the_problem(gpu, capsys, file):
    gpu.raises = RuntimeError("RESOURCE_EXHAUSTED: Out of memory\nmore")
    stays_as_it_was(gpu, capsys, "is not timed: RuntimeError: RESOURCE_EXHAUSTED: Out of memory", file)
    gpu.raises = None
    other = problem_of(conv, X[:1], W)
    assert planned(of=other).implementation == "native"  # others are timed


def test_no_kernel_that_runs_and_no_time_for_xla(gpu, capsys, file):
    gpu.failed = {p.spec: "INTERNAL: it fails" for p in _plan.tiles(*OF, A100)}
    stays_as_it_was(gpu, capsys, "no kernel could be timed", file)
    in_place.forget()
    gpu.failed = {"xla": "the time was up"}
    stays_as_it_was(gpu, capsys, "the time was up before XLA was timed", file, times=2)


def test_a_device_that_is_not_here(clock, code_for_gpus, capsys, file):
    stays_as_it_was(
        clock,
        capsys,
        "programs are compiled for NVIDIA A100-SXM4-80GB, which this machine does not have",
        file,
        times=0,
    )


def test_processes_of_one_program_must_choose_alike(gpu, capsys, file, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    monkeypatch.setattr(tuned, "path", lambda: file)
    monkeypatch.delenv("JAXCONV_TUNING")
    stays_as_it_was(gpu, capsys, "this program has 4 processes, which must choose alike. Tune in one", file, times=0)
    # Where the file is given nothing is to be said.
    in_place.forget()
    monkeypatch.setenv("JAXCONV_TUNING", str(file))
    assert planned().implementation == "xla" and not gpu.timed and not capsys.readouterr().err


def test_a_profile_beside_which_kernels_cannot_be_timed(gpu, capsys, file, monkeypatch):
    monkeypatch.setattr(compat, "_profiles", [None])
    stays_as_it_was(gpu, capsys, "jax.profiler takes or took a trace in this process", file, times=0)


@pytest.mark.parametrize("name", ("profile_session", "session"))
def test_profiles_are_noted(name, monkeypatch):
    state = type("State", (), {name: None})()
    monkeypatch.setattr(compat.profiler, "_profile_state", state)
    monkeypatch.setattr(compat, "_profiles", [])
    compat.note_profiles()
    compat.note_profiles()
    assert not compat.profiled()
    setattr(state, name, None)
    assert not compat.profiled()
    setattr(state, name, object())
    setattr(state, name, None)
    assert compat.profiled() and getattr(state, name) is None


def test_a_trace_of_this_jax_is_noted(monkeypatch, tmp_path):
    monkeypatch.setattr(compat, "_profiles", [])
    compat.note_profiles()
    assert not compat.profiled()
    with jax.profiler.trace(tmp_path):
        assert compat.profiled()


def test_the_budget_ends(gpu, capsys, monkeypatch, file):
    other = problem_of(conv, X[:1], W)
    monkeypatch.setattr(in_place, "SECONDS_IN_ALL", 0.01)
    monkeypatch.setattr(in_place, "new", lambda: in_place.Asked(in_place.Budget(0.01)))
    with jaxconv.enabled(tune=True):
        gpu_call = gpu.__call__
        in_place.times_with(lambda *a: (time.sleep(0.02), gpu_call(*a))[1])
        assert _plan.plan(*OF, A100).implementation == "native"
        assert _plan.plan(*other, A100).implementation == "xla"
    assert "s for timing are over" in capsys.readouterr().err and len(gpu.timed) == 1
    assert len(tuned.read(file)) == 1
    # Who asks anew has a budget of his own.
    assert planned(of=other).implementation == "native"


def test_an_interrupt_passes_on_and_what_was_timed_is_kept(gpu, capsys, file, monkeypatch):
    other = problem_of(conv, X[:1], W)
    planned(of=other)
    kept = file.read_bytes()
    gpu.raises = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        planned()
    assert file.read_bytes() == kept and "interrupted: what was timed before is kept" in capsys.readouterr().err
    gpu.raises = None
    assert planned().implementation == "native"  # it is timed at the next call
    assert len(tuned.read(file)) == 2


def test_an_interrupt_ends_the_thread_that_times(monkeypatch):
    ended, started = threading.Event(), threading.Event()

    def work(stop):
        started.set()
        try:
            while True:
                stop()
                time.sleep(0.001)
        finally:
            ended.set()

    class Interrupted(threading.Event):
        """As Ctrl-C in a thread that waits."""

        first = True

        def wait(self, timeout=None):
            if self.first and timeout is None:
                self.first = False
                started.wait(10)
                raise KeyboardInterrupt
            return super().wait(timeout)

    events = iter([threading.Event(), Interrupted()])
    own = types.SimpleNamespace(Event=lambda: next(events), Thread=threading.Thread)
    monkeypatch.setattr(in_place, "threading", own)
    with pytest.raises(KeyboardInterrupt):
        in_place._in_thread(work)
    assert ended.is_set()


def test_an_interrupt_while_a_program_is_lowered(gpu, file):
    gpu.raises = KeyboardInterrupt()
    with jaxconv.enabled(tune=True), pytest.raises(KeyboardInterrupt):
        lowered(lax_conv, X, W)
    gpu.raises = None
    with jaxconv.enabled(tune=True):
        assert helpers.targets(lowered(lax_conv, X, W)) == {"conv_fprop": 1}


def test_a_file_that_cannot_be_written_is_said_and_the_choice_holds(gpu, capsys, tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(tuned, "path", lambda: tmp_path / "folder")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the folder cannot be read
        assert planned().implementation == "native"
    assert "cannot be written to the file, and hold in this process only" in capsys.readouterr().err


def test_a_write_that_fails_leaves_the_old_file(gpu, file, monkeypatch):
    planned(of=problem_of(conv, X[:1], W))
    kept = file.read_bytes()

    def failing(*args):
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", failing)
    assert planned().implementation == "native"
    assert file.read_bytes() == kept


def test_what_another_process_timed_meanwhile_is_taken(gpu, file):
    planned(of=problem_of(conv, X[:1], W))
    (entry,) = tuned.read(file).entries
    tuned.save([dataclasses.replace(entry, key=tuned.key_of(OF[1]))], file)
    n = len(gpu.timed)
    assert planned().reason.startswith("tuned") and len(gpu.timed) == n
    assert len(tuned.read(file)) == 2


def test_tune_knows_what_was_timed_in_place(gpu):
    planned()
    assert len(tuned.active()) == 1 and jaxconv.tune.loads(jaxconv.tune.dumps()) == tuned.active()
    with jaxconv.tune.applied(None):
        assert not len(tuned.active()) and planned(asked=False).implementation == "xla"


# ----------------------------------------------------------------------------------------------------------------------
# The benchmark


def test_kernels_are_compared_with_xla_over_what_was_timed(gpu, file):
    planned()
    gpu.xla = 0.5
    planned(of=problem_of(conv, X[:1], W))
    lines = benchmark.by_kernel(tuned.read(file).entries)
    line = next(one for one in lines if "implicit_gemm" in one)
    assert line.split()[:2] == ["conv_fprop", "implicit_gemm"] and "2 problems, XLA / it  1.00 (0.50 to 2.00)" in line
    assert line.endswith("worst 1x9x9 8->16 3x3 float32 NHWC")


@pytest.mark.slow
def test_models_before_and_after(cpu, file, capsys):
    arguments = ["--models", "resnet18_32", "--ways", "accelerate", "--small", "--seconds", "0.02"]
    assert benchmark.main(arguments) == 0
    said = capsys.readouterr().out
    assert "resnet18_32, f32, batch 4" in said and "LOSSES DIFFER" not in said
    (count,) = re.findall(r"(\d+) problems timed, \1 of them native", said)
    assert int(count) == len(cpu.timed) == len(tuned.read(file))
    assert in_place.asked() is None
    cpu.timed.clear()
    tuned.forget()
    in_place.forget()
    assert benchmark.main(arguments) == 0 and not cpu.timed
    assert " 0 problems timed" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        benchmark.main(["--models", "no_such_model"])


# ----------------------------------------------------------------------------------------------------------------------
# Who asks, and how


@pytest.mark.parametrize("tune", [1, "yes", None, 0.5])
def test_tune_is_true_or_false(tune):
    with pytest.raises(TypeError, match=r"enable: tune=.*, expected True or False"):
        jaxconv.enable(tune=tune)
    with pytest.raises(TypeError, match=r"enabled: tune=.*, expected True or False"), jaxconv.enabled(tune=tune):
        pass
    with pytest.raises(TypeError, match=r"accelerate: tune=.*, expected True or False"):
        jaxconv.accelerate(loss, tune=tune)
    assert in_place.asked() is None


def test_enable_asks_until_disable():
    jaxconv.enable(tune=True)
    assert in_place.asked() is not None and "timed while programs compile" in jaxconv.info()
    with jaxconv.enabled():
        assert in_place.asked() is not None
    jaxconv.disable()
    assert in_place.asked() is None and "timed while programs compile" not in jaxconv.info()
    jaxconv.enable(tune=True)
    jaxconv.enable()
    assert in_place.asked() is None
    jaxconv.disable()


accelerated = functools.partial(jaxconv.accelerate, tune=True)(loss)


def test_an_accelerated_function_is_pickled_with_what_it_asks():
    assert pickle.loads(pickle.dumps(accelerated)) is not None
    again, arguments = jaxconv.accelerate(loss, tune=True).__reduce__()
    assert again.keywords == {"tune": True} and arguments == (loss,)


@pytest.mark.parametrize(
    ("value", "says"), [("1", "asked True"), ("0", "asked False"), ("", "asked False"), ("yes", "")]
)
def test_the_environment_asks(value, says):
    code = "from jaxconv._plan import in_place; print('asked', in_place.asked() is not None)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "JAXCONV_TUNE": value}, capture_output=True, text=True
    )
    assert done.returncode == 0 and (says or "asked False") in done.stdout
    assert ("JAXCONV_TUNE='yes' is unknown, expected 0 or 1" in done.stderr) == (value == "yes")

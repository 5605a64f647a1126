"""`jaxconv.tune`: what it times, what it keeps, where it keeps it, and what plans make of it."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import os
import pathlib
import re
import subprocess
import sys
import time
import types
import warnings

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxconv
from jaxconv import __main__ as command
from jaxconv import _plan
from jaxconv._core import primitives
from jaxconv._plan import measured, model, tuned
from jaxconv._plan.plan import Candidate
from jaxconv._tools import candidates

module = importlib.import_module("jaxconv.tune")  # whose name the function has

ON_CPU = pytest.mark.skipif(helpers.PLATFORM != "cpu", reason="the kernels that are named are the CPU's")


@pytest.fixture(autouse=True)
def file(tuning_file):
    return tuning_file


def timer(monkeypatch, ms, compared=()):
    """Replaces the clock: `ms(op, problem, name)` is a kernel's time or XLA's, `compared` the times of f's programs.

    A GPU knows nothing else: by its tables and its model a small problem may have a kernel before it is timed.
    """
    timed = []
    if helpers.PLATFORM == "cuda":
        monkeypatch.setattr(measured, "nearest", lambda *args: None)
        monkeypatch.setattr(model, "predict", lambda *args: {})

    def measure(job, device, seconds):
        names = ["xla", *(plan.spec for plan in candidates.worth_timing(job.op, job.problem, device))]
        timed.append((job.op, str(job.problem)))
        return {name: ms(job.op, job.problem, name) for name in names}, {}

    programs = iter(compared)
    monkeypatch.setattr(candidates, "measure", measure)
    monkeypatch.setattr(module, "_compare", lambda now, other, seconds: next(programs))
    return timed


def native_wins(op, problem, name):
    return 2.0 if name == "xla" else 1.0


def xla_wins(op, problem, name):
    return 1.0 if name == "xla" else 2.0


tune = functools.partial(jaxconv.tune, progress=False)
X, W = jnp.ones((2, 9, 9, 4)), jnp.ones((3, 3, 4, 8))


def conv(x, w, **options):
    return jaxconv.conv2d(x, w, padding="SAME", **options)


def only_plan(f, *args):
    (call,) = jaxconv.explain(f)(*args)
    return call.plan


def calls_ours(f, *args):
    return bool(helpers.calls(lambda *a: f(*a), *args))


# ----------------------------------------------------------------------------------------------------------------------
# What plans make of it


@ON_CPU
def test_a_tuned_problem_changes_its_plan_and_no_other(monkeypatch):
    timer(monkeypatch, native_wins)
    assert only_plan(conv, X, W).implementation == "xla"
    found = tune(conv, verify=False)(X, W)
    assert [(r.op, r.before, r.best, r.kept) for r in found] == [("conv_fprop", "xla", "im2col", True)]
    plan = only_plan(conv, X, W)
    assert (plan.implementation, plan.kernel) == ("native", "im2col")
    assert re.fullmatch(r"tuned on this device on \S+ \S+ UTC: 2.00 times faster than XLA", plan.reason)
    assert {(c.name, c.ms) for c in plan.candidates} == {("im2col", 1.0), ("xla", 2.0)}
    assert only_plan(conv, X[:1], W).implementation == "xla"
    assert only_plan(functools.partial(conv, activation="relu"), X, W).implementation == "xla"
    x = jax.random.normal(jax.random.key(0), X.shape)
    np.testing.assert_allclose(conv(x, W), conv(x, W, implementation="xla"), rtol=1e-5, atol=1e-5)
    assert calls_ours(conv, X, W)


@ON_CPU
def test_xla_may_be_what_was_tuned(monkeypatch):
    f = functools.partial(conv, groups=4)
    w = jnp.ones((3, 3, 1, 4))
    assert only_plan(f, X, w).kernel == "depthwise"
    timer(monkeypatch, xla_wins)
    tune(f, verify=False)(X, w)
    assert str(only_plan(f, X, w)) == "xla"
    assert not calls_ours(f, X, w)
    # implementation="native" is the fastest kernel that was timed, and what is forced by name stays forced.
    assert only_plan(functools.partial(f, implementation="native"), X, w).implementation == "native"
    assert only_plan(functools.partial(f, algorithm="im2col"), X, w).kernel == "im2col"


@ON_CPU
def test_native_is_the_fastest_kernel_that_was_tuned(monkeypatch):
    f, w = functools.partial(conv, groups=4), jnp.ones((3, 3, 1, 4))
    timer(monkeypatch, lambda op, p, name: {"xla": 1.0, "im2col": 2.0}.get(name, 3.0))
    tune(f, verify=False)(X, w)
    plan = only_plan(functools.partial(f, implementation="native"), X, w)
    assert plan.kernel == "im2col"
    assert "0.50 of XLA's speed; implementation='native' was asked for" in plan.reason


@ON_CPU
def test_16_bits_run_the_tuned_kernel(monkeypatch):
    """On the CPU they are float32 problems inside, which have another choice of their own."""
    f = functools.partial(conv, groups=4)
    x, w = X.astype(jnp.bfloat16), jnp.ones((3, 3, 1, 4), jnp.bfloat16)
    timer(monkeypatch, lambda op, p, name: {"xla": 9.0, "im2col": 1.0}.get(name, 5.0))
    tune(f, verify=False)(x, w)
    text = jax.jit(lambda *a: f(*a)).lower(x, w).as_text()
    assert 'kernel = "im2col"' in text and 'kernel = "depthwise"' not in text


@ON_CPU
def test_results_are_part_of_the_key_of_jaxs_caches(monkeypatch):
    timer(monkeypatch, native_wins)
    traced = []

    @jax.jit
    def f(x, w):
        traced.append(None)
        return conv(x, w)

    before = f.lower(X, W).compile()
    f(X, W)
    n = len(traced)
    tune(lambda x, w: conv(x, w), verify=False)(X, W)
    assert not helpers.targets(before.as_text())
    f(X, W)
    assert len(traced) == n + 1
    assert helpers.targets(f.lower(X, W).compile().as_text())
    with jaxconv.tune.applied(None):
        assert not helpers.targets(f.lower(X, W).compile().as_text())
        m = len(traced)
        f(X, W)
        f(X, W)
    f(X, W)  # found again
    assert len(traced) <= m + 1


@ON_CPU
def test_disable_and_forced_calls_come_first(monkeypatch):
    timer(monkeypatch, native_wins)
    tune(conv, verify=False)(X, W)
    assert only_plan(functools.partial(conv, implementation="xla"), X, W).implementation == "xla"
    monkeypatch.setenv("JAXCONV_DISABLE", "conv")
    assert only_plan(conv, X, W).implementation == "xla"


# ----------------------------------------------------------------------------------------------------------------------
# What is timed


def loss(w, u, x):
    y = conv(x, w, activation="relu")
    y, *_ = jaxconv.batchnorm(y, jnp.ones(8), jnp.zeros(8), jnp.zeros(8), jnp.ones(8), training=True, activation="relu")
    return jaxconv.dense(y.mean((1, 2)), u, jnp.zeros(5), activation="tanh").sum()


def test_every_problem_that_explain_lists_is_timed_once(monkeypatch):
    timed = timer(monkeypatch, native_wins)
    f = jax.vmap(jax.grad(loss, (0, 1)), in_axes=(None, None, 0))
    args = W, jnp.ones((8, 5)), jnp.ones((3, *X.shape))
    expected = {(c.op, str(c.problem)) for c in jaxconv.explain(f)(*args)}
    rows = tune(f, verify=False)(*args)
    assert set(timed) == expected == {(r.op, str(r.problem)) for r in rows}
    assert len(timed) == len(set(timed)) > 4
    assert {"conv_wgrad", "dense", "batchnorm_train", "batchnorm_backward"} <= {op for op, _ in timed}


def test_what_accelerate_and_enable_replace_is_timed(monkeypatch):
    timed = timer(monkeypatch, native_wins)

    def lax_conv(x, w):
        y = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jax.nn.relu(y + 1.0)

    assert tune(lax_conv, verify=False)(X, W) == [] and not timed
    tune(jax.grad(lambda x, w: jaxconv.accelerate(lax_conv)(x, w).sum(), 1), verify=False)(X, W)
    assert "conv_wgrad" in {op for op, _ in timed}
    timed.clear()
    with jaxconv.enabled():
        tune(lax_conv, verify=False, again=True)(X, W)
        assert [op for op, _ in timed] == ["conv_fprop"]
        if helpers.PLATFORM == "cpu":
            assert calls_ours(lax_conv, X, W)
    # The same problem as jaxconv's own call's.
    assert only_plan(conv, X, W).reason.startswith("tuned on this device")


def test_forced_disabled_and_empty_calls_are_not_timed(monkeypatch):
    timed = timer(monkeypatch, native_wins)
    tune(functools.partial(conv, implementation="xla"))(X, W)
    tune(functools.partial(conv, implementation="native"))(X, W)
    tune(conv)(X[:0], W)
    monkeypatch.setenv("JAXCONV_DISABLE", "all")
    found = tune(conv)(X, W)
    assert not timed
    assert "nothing to tune" in str(found)


H200 = _plan.Device("cuda", "NVIDIA H200", (9, 0))


@pytest.mark.parametrize("op", ["conv_fprop", "conv_dgrad", "conv_wgrad", "conv"])
def test_channels_first_arrays_are_timed_channels_last_on_a_gpu(op):
    x, w, b = jnp.ones((2, 16, 9, 7)), jnp.ones((24, 16, 3, 3)), jnp.ones(24)

    def f(x, w):
        return conv(x, w, layout="NCHW", **({"b": b, "activation": "relu"} if op == "conv" else {}))

    g = f if op in ("conv", "conv_fprop") else jax.grad(lambda x, w: f(x, w).sum(), op == "conv_wgrad")
    job = next(j for j in module._jobs(g, (x, w), {}, _plan.Device.current("cpu")) if j.op == op)
    last = candidates.in_memory(job, H200)
    assert last.problem.channels_last
    reference = functools.partial(last.kernel.reference, dataclasses.replace(last.problem, implementation="xla"))
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in last.operands]
    results = [(r.shape, r.dtype.name) for r in jax.eval_shape(reference, *arrays)]
    assert results == last.kernel.results(last.problem)
    names = [plan.spec for plan in candidates.worth_timing(op, job.problem, H200)]
    assert any(name.startswith("sm90") or name.startswith("implicit_gemm") for name in names)
    assert len(names) == len(set(names)) and "direct" not in names


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("op", ["conv_fprop", "conv_dgrad", "conv_wgrad"])
def test_every_kernel_that_is_timed_on_a_gpu_can_be_chosen(op, dtype, code_for_gpus):
    x, w = jnp.ones((2, 16, 16, 32), dtype), jnp.ones((3, 3, 32, 64), dtype)
    problem = jax.make_jaxpr(conv)(x, w).eqns[0].params["problem"]
    plans = candidates.worth_timing(op, problem, H200)
    assert len(plans) >= 2
    for plan in plans:
        times = {p.spec: 2.0 for p in plans} | {plan.spec: 0.5}
        e = entry(tuned.key_of(problem), op=op, device=H200.kind, native_ms=times, choice=plan.spec)
        with jaxconv.tune.applied(tuned.Results([e])):
            chosen = _plan.plan(op, problem, H200)
            assert (chosen.spec, chosen.workspace_bytes) == (plan.spec, plan.workspace_bytes)
            assert chosen.reason == "tuned on this device: 4.00 times faster than XLA"
            forced = _plan.plan(op, dataclasses.replace(problem, implementation="native"), H200)
            assert forced.spec == plan.spec
            with pytest.warns(UserWarning, match="tuned on NVIDIA H200, and are ignored on NVIDIA X1"):
                elsewhere = _plan.plan(op, problem, dataclasses.replace(H200, kind="NVIDIA X1"))
            assert not elsewhere.reason.startswith("tuned")
            tuned._warned.clear()
            # XLA cannot be told how to split a custom call.
            split = _plan.plan(op, problem, dataclasses.replace(H200, partitioned=True))
            assert split.implementation == "xla"


def test_a_batch_norm_of_channels_first_is_timed_as_it_lies_between_convolutions(code_for_gpus):
    x, v = jax.ShapeDtypeStruct((8, 16, 9, 9), "bfloat16"), jax.ShapeDtypeStruct((16,), "float32")

    def f(x, scale, residual):
        options = dict(training=True, channel_axis=1, activation="relu", residual=residual)
        return jaxconv.batchnorm(x, scale, scale, scale, scale, **options)[0]

    (job,) = module._jobs(f, (x, v, x), {}, H200)
    assert job.problem.shape == (8, 9, 9, 16) and job.problem.channel_axis == 3
    shapes = [shape for shape, _ in job.operands]
    assert shapes == [(8, 9, 9, 16), *[(16,)] * 4, (8, 9, 9, 16)]
    times = {plan.spec: 0.5 for plan in candidates.worth_timing(job.op, job.problem, H200)}
    e = entry(tuned.key_of(job.problem), op=job.op, device=H200.kind, native_ms=times, choice="two_read")
    first = dataclasses.replace(job.problem, shape=(8, 16, 9, 9), channel_axis=1)
    with jaxconv.tune.applied(tuned.Results([e])):
        made = _plan.plan(job.op, first, H200)
    assert (made.kernel, made.asks_channels_last) == ("two_read", True) and "tuned" in made.reason


def test_every_tile_is_a_candidate_behind_the_one_that_its_kernel_wants(code_for_gpus, monkeypatch):
    x, w = jnp.ones((32, 28, 28, 128), "bfloat16"), jnp.ones((3, 3, 128, 256), "bfloat16")
    conv_problem = jax.make_jaxpr(conv)(x, w).eqns[0].params["problem"]
    dense_problem = jax.make_jaxpr(jaxconv.dense)(x[0, 0], w[0, 0]).eqns[0].params["problem"]
    for op, problem, kernel, least in (
        ("conv_fprop", conv_problem, "sm90/product", 4),
        ("matmul", dense_problem, "gemm", 3),
    ):
        plans = candidates.worth_timing(op, problem, H200)
        wanted = [plan.kernel for plan in plans[: len({plan.kernel for plan in plans})]]
        assert len(set(wanted)) == len(wanted), "the first of each kernel come first"
        tiles = [plan.tile for plan in plans if plan.kernel == kernel]
        assert len(tiles) == len(set(tiles)) >= least
        assert tiles[0] == _plan.made(op, kernel, problem, H200).tile
        assert all(_plan.made(op, plan.spec, problem, H200) == plan for plan in plans)
        assert {plan.spec for plan in _plan.every(op, problem, H200)} <= {
            plan.spec for plan in _plan.tiles(op, problem, H200)
        }
    known = {"sm90/product": 1.0, "implicit_gemm": 3.0, "sm90/product_swapped": 2.0, "sm90/halo_stream": 4.0}
    times = tuple(Candidate(name, ms, "") for name, ms in known.items())
    monkeypatch.setattr(_plan, "plan", lambda *_: _plan.Plan("xla", "", candidates=times))
    kernels = [plan.kernel for plan in candidates.worth_timing("conv_fprop", conv_problem, H200)]
    order = list(dict.fromkeys(k for k in kernels if k in known))
    assert order == sorted(known, key=known.__getitem__), "what is predicted to be the fastest is timed first"


def test_tiles_are_timed_of_kernels_that_are_nearly_the_fastest_while_there_is_time(monkeypatch):
    plans = [_plan.Plan("native", "", k, tile) for k, tile in (("a", "1x1"), ("b", "1x1"), ("a", "2x2"), ("b", "2x2"))]
    monkeypatch.setattr(candidates, "worth_timing", lambda *_: plans)
    times = {"xla": 3.0, "a 1x1": 1.0, "b 1x1": 2.0, "a 2x2": 0.9, "b 2x2": 0.5}
    rounds = []

    def timed(functions, sets, seconds):
        rounds.append(list(functions))
        time.sleep(min(pause, 0.02))
        slower = 2.0 if len(rounds) == 2 else 1.0  # the second round at half of the clock
        return {name: times[name] * slower for name in functions}, {}

    monkeypatch.setattr(candidates, "times_of", timed)
    (job,) = module._jobs(conv, (X, W), {}, _plan.Device("cpu", "cpu"))
    pause = 0.0
    ms, failed = candidates.measure(job, _plan.Device("cpu", "cpu"), 5.0)
    assert rounds == [["xla", "a 1x1", "b 1x1"], ["a 1x1", "a 2x2"]]
    assert ms == pytest.approx({"xla": 3.0, "a 1x1": 1.0, "b 1x1": 2.0, "a 2x2": 0.9}) and not failed
    rounds.clear()
    pause = 0.02
    ms, _ = candidates.measure(job, _plan.Device("cpu", "cpu"), 0.01)
    assert len(rounds) == 1 and "a 2x2" not in ms, "the time was up"


def test_the_predicted_saving_is_that_of_the_best_candidate():
    times = tuple(Candidate(*c, "") for c in (("xla", 3.0), ("sm90/product", 1.0), ("stem", 2.0)))
    job = types.SimpleNamespace(count=4)
    assert module._saving(job, _plan.Plan("xla", "", candidates=times)) == 8.0
    assert module._saving(job, _plan.Plan("native", "", "sm90/product", candidates=times)) == 0.0
    assert module._saving(job, _plan.Plan("xla", "")) is None


def test_inputs_are_of_the_operands_types_and_positive():
    arrays = candidates.random_arrays([((3, 4), "bfloat16"), ((5,), "float32"), ((2,), "int32")], jax.random.key(1))
    assert [(a.shape, a.dtype.name) for a in arrays] == [((3, 4), "bfloat16"), ((5,), "float32"), ((2,), "int32")]
    assert all((np.asarray(a, np.float32) > 0).all() for a in arrays)


def test_what_fails_is_named_and_the_others_count():
    def broken(x):
        raise RuntimeError("no algorithm worked\nand more")

    def slow(x):
        time.sleep(0.3)
        return x

    functions = {"broken": broken, "fine": jax.jit(lambda x: x + 1), "slow": slow}
    ms, failed = candidates.times_of(functions, [(jnp.ones((256, 256)),)], 5.0)
    assert list(ms) == ["fine"] and ms["fine"] > 0
    assert failed["broken"] == "no algorithm worked"
    assert failed["slow"].startswith("took ")


@pytest.mark.skipif(jax.device_count() < 2, reason="a mesh needs two devices")
def test_a_shards_problem_is_timed_on_one_device(monkeypatch):
    """On an Explicit mesh problems are those of a shard; timing them on every device would time the wrong thing."""
    seen = []

    def timed(functions, sets, seconds):
        for name, function in functions.items():
            seen.append((name, function.lower(*sets[0]).as_text(), [a.devices() for a in sets[0]], sets[0][0].shape))
        return dict.fromkeys(functions, 1.0), {}

    monkeypatch.setattr(candidates, "times_of", timed)
    mesh = jax.make_mesh((2,), ("b",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        x, w = jax.device_put(X, NamedSharding(mesh, P("b"))), jax.device_put(W, NamedSharding(mesh, P()))
        found = tune(conv)(x, w)
        assert jax.sharding.get_mesh() == mesh
    assert [r.problem.batch for r in found] == [1]
    assert len(seen) >= 2
    for name, text, devices, shape in seen:
        assert helpers.targets(text)["conv_fprop"] == (name != "xla")
        assert shape == (1, *X.shape[1:]) and devices == [{jax.devices()[0]}] * 2


def test_a_real_run(file):
    """Nothing replaced: two problems, their times, the function's own, the file, and plans that follow it."""
    f = jax.jit(jax.grad(lambda w, x: conv(x, w).sum()))
    found = tune(f, seconds=20)(W, X)
    assert len(found) >= 1 and found.path == file
    for row in found:
        assert row.xla_ms > 0 and all(ms > 0 for ms in row.native_ms.values()) and row.native_ms
        assert row.best in ("xla", *row.native_ms)
    changed = [row for row in found if row.best != row.before]
    assert (found.before_ms is not None) == bool(changed)
    plans = {(c.op, c.problem): c.plan for c in jaxconv.explain(f)(W, X)}
    for row in found:
        plan = plans[row.op, row.problem]
        chosen = plan.spec if plan.implementation == "native" else "xla"
        assert chosen == (row.best if row.kept else row.before)
    assert len(json.loads(file.read_text())["entries"]) == len(found)
    assert str(found).splitlines()[0].startswith("calls")


# ----------------------------------------------------------------------------------------------------------------------
# What is kept


def two(x, w, u):
    return conv(x, w).sum() + jaxconv.dense(x[:, 0, 0], u).sum()


TWO = X, W, jnp.ones((4, 3))


@ON_CPU
def test_what_makes_the_function_faster_is_kept(monkeypatch, file):
    timer(monkeypatch, native_wins, [(10.0, 5.0)])
    found = tune(two)(*TWO)
    assert all(r.kept for r in found) and len(found) == 2
    assert (found.before_ms, found.after_ms) == (10.0, 5.0)
    assert "10.000 ms before, 5.000 ms after (2.00 times)" in str(found)


@ON_CPU
def test_what_does_not_is_left_and_halves_are_tried(monkeypatch):
    timer(monkeypatch, native_wins, [(10.0, 11.0), (10.0, 8.0), (8.0, 7.99)])
    found = tune(two)(*TWO)
    assert sorted(r.kept for r in found) == [False, True]
    assert (found.before_ms, found.after_ms) == (10.0, 8.0)
    left = next(r for r in found if not r.kept)
    assert left.best != left.before and "not faster" in left.note
    plans = {c.op: c.plan for c in jaxconv.explain(two)(*TWO)}
    assert not plans[left.op].reason.startswith("tuned")


@ON_CPU
def test_programs_of_the_function_differ_in_what_would_change(monkeypatch):
    """What is compared are the function as it is and with the changes; f may donate its arguments."""
    timer(monkeypatch, native_wins)
    results = []

    def compare(now, other, seconds):
        results.append([np.asarray(p.f()) for p in (now, now, other, other)])
        return 2.0, 1.0

    lowered = []
    plan = _plan.plan
    monkeypatch.setattr(primitives._plan, "plan", lambda *a: lowered.append(str(plan(*a))) or plan(*a))
    monkeypatch.setattr(module, "_compare", compare)
    f = jax.jit(lambda x, w: conv(x, w).sum(), donate_argnums=0)
    tune(f)(jax.ShapeDtypeStruct(X.shape, X.dtype), jnp.copy(W))
    assert lowered[-2:] == ["xla", "native[im2col]"]
    np.testing.assert_allclose(results[0], results[0][0], rtol=1e-5)


def test_near_ties_change_nothing(monkeypatch):
    compared = timer(monkeypatch, lambda op, p, name: 1.03 if name == "xla" else 1.0)
    with jaxconv.tune.applied(None):
        before = only_plan(conv, X, W)
    (row,) = tune(conv)(X, W)
    if before.implementation == "xla":
        assert (row.best, row.kept, row.note) == ("xla", False, "as it was")
    assert str(only_plan(conv, X, W)) == str(before)
    assert len(compared) == 1


def test_timing_again_keeps_what_was_chosen(monkeypatch):
    timed = timer(monkeypatch, native_wins)
    tune(conv, verify=False)(X, W)
    chosen = only_plan(conv, X, W)
    assert chosen.reason.startswith("tuned")
    tune(conv)(X, W)
    assert len(timed) == 1  # known
    tune(conv, again=True)(X, W)
    assert len(timed) == 2
    again = only_plan(conv, X, W)
    assert set(again.candidates) == set(chosen.candidates)  # those that take the same time may change places
    assert dataclasses.replace(again, candidates=chosen.candidates) == chosen


def test_no_time_is_said_and_the_next_call_goes_on(monkeypatch, file, capsys):
    timed = timer(monkeypatch, native_wins)
    found = jaxconv.tune(two, seconds=1e-9, verify=False)(*TWO)
    assert not timed and {r.note for r in found} == {"not timed"} and not file.exists()
    said = capsys.readouterr().err
    assert "2 problems" in said and "the time is up, 2 problems were not timed" in said
    monkeypatch.setattr(candidates, "times_of", lambda *a: pytest.fail("nothing is timed by itself"))
    clock = iter(range(0, 1000, 6))
    monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    found = tune(two, seconds=10, verify=False)(*TWO)
    assert len(timed) == 1 and sorted(r.kept for r in found) == [False, True]
    monkeypatch.setattr(module, "time", time)
    assert all(r.best is not None for r in tune(two, verify=False)(*TWO))
    assert len(timed) == 2


def test_an_interrupt_keeps_what_was_measured(monkeypatch, file):
    timed = timer(monkeypatch, native_wins)
    measure = candidates.measure

    def interrupted(job, device, seconds):
        if timed:
            raise KeyboardInterrupt
        return measure(job, device, seconds)

    monkeypatch.setattr(candidates, "measure", interrupted)
    found = tune(two)(*TWO)
    assert found.interrupted and "interrupted" in str(found)
    (entry,) = tuned.read(file).entries
    assert entry.xla_ms == 2.0 and entry.choice is None
    assert not any(c.plan.reason.startswith("tuned") for c in jaxconv.explain(two)(*TWO))
    monkeypatch.setattr(candidates, "measure", measure)
    tune(two, verify=False)(*TWO)
    assert len(timed) == len(set(timed)) == 2


def test_an_interrupt_while_the_function_is_timed(monkeypatch, file):
    timer(monkeypatch, native_wins)

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_compare", interrupted)
    found = tune(conv)(X, W)
    assert found.interrupted and not found[0].kept
    assert tuned.read(file).entries[0].native_ms


def test_a_function_that_cannot_be_compiled_loses_no_measurement(monkeypatch, file):
    timer(monkeypatch, native_wins)

    def failing(*args):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(module, "_confirmed", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        tune(conv)(X, W)
    assert len(tuned.read(file)) == 1


@pytest.mark.parametrize("seconds", [0, -1, "10", None, True, float("nan")])
def test_seconds_are_checked(seconds):
    with pytest.raises(ValueError, match="tune: seconds="):
        jaxconv.tune(conv, seconds=seconds)


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match="tune: f must be a function, got int"):
        jaxconv.tune(3)


# ----------------------------------------------------------------------------------------------------------------------
# Files and texts


def entry(key="k", **changes):
    jaxlib, version = tuned.versions()
    made = tuned.Entry(
        op="conv_fprop",
        key=key,
        problem="a problem",
        device=tuned.device_name(helpers.DEVICE),
        jaxlib=jaxlib,
        jaxconv=version,
        xla_ms=2.0,
        native_ms={"im2col": 1.0},
        choice="im2col",
    )
    return dataclasses.replace(made, **changes)


def entry_of(x, w, **changes):
    (call,) = jaxconv.explain(conv)(x, w)
    return entry(tuned.key_of(call.problem), **changes)


def fresh_process():
    tuned.forget()


@ON_CPU
def test_a_later_process_reads_the_file(file):
    e = entry_of(X, W)
    tuned.save([e], file)
    fresh_process()
    assert only_plan(conv, X, W).reason.startswith("tuned on this device")
    assert f"tuned problems of this device: 1, {file}" in jaxconv.info()


def test_saving_merges_and_replaces(file):
    tuned.save([entry("a"), entry("b")], file)
    both = tuned.save([entry("b", xla_ms=3.0), entry("a", jaxlib="0.1")], file)
    assert tuned.read(file) == both
    assert [(e.key, e.jaxlib, e.xla_ms) for e in both.entries] == [
        ("a", entry().jaxlib, 2.0),
        ("b", entry().jaxlib, 3.0),
        ("a", "0.1", 2.0),
    ]


def test_a_write_that_fails_leaves_the_old_file(file, monkeypatch):
    old = tuned.save([entry("a")], file)

    def failing(*args):
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(OSError, match="no space"):
        tuned.save([entry("b")], file)
    assert tuned.read(file) == old
    assert sorted(p.name for p in file.parent.iterdir()) == ["tuning.json", "tuning.json.lock"]


def test_several_processes_write_one_file(file):
    code = (
        "import sys, pathlib, dataclasses\n"
        "from jaxconv._plan import tuned\n"
        "file, me = pathlib.Path(sys.argv[1]), sys.argv[2]\n"
        "for i in range(20):\n"
        "    tuned.save([tuned.Entry('conv', f'{me}.{i}', '', 'd', '0', '0', 1.0, {}, None)], file)\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, str(file), str(i)]) for i in range(3)]
    assert [p.wait(timeout=120) for p in running] == [0, 0, 0]
    assert {e.key for e in tuned.read(file).entries} == {f"{me}.{i}" for me in range(3) for i in range(20)}


def test_a_file_that_cannot_be_written_is_said(monkeypatch, tmp_path):
    timer(monkeypatch, native_wins)
    (tmp_path / "folder").mkdir()
    monkeypatch.setenv("JAXCONV_TUNING", str(tmp_path / "folder"))
    with pytest.warns(UserWarning) as warned:
        found = tune(conv, verify=False)(X, W)
    says = [str(w.message) for w in warned]
    assert sum("cannot be read and is ignored" in text for text in says) == 1
    assert any("cannot be written and hold in this process" in text for text in says)
    assert found.path is None
    assert only_plan(conv, X, W).reason.startswith("tuned")


def test_save_false_writes_nothing(monkeypatch, file):
    timer(monkeypatch, native_wins)
    found = tune(conv, verify=False, save=False)(X, W)
    assert found.path is None and not file.exists()
    assert only_plan(conv, X, W).reason.startswith("tuned")


BROKEN = {
    "no JSON": ("{", "not JSON"),
    "brackets in brackets": ("[" * 100_000, "not JSON"),
    "another format": ('{"format": 99, "entries": []}', "format 1: found 99"),
    "a list": ("[]", "found 'list'"),
    "half an entry": ('{"format": 1, "entries": [{"op": "conv"}]}', "entry 0 is no tuned problem"),
    "a time that is text": (tuned.dumps(tuned.Results([entry(xla_ms="x")])), "entry 0 is no tuned problem"),
    "a choice without a time": (tuned.dumps(tuned.Results([entry(choice="sm90")])), "entry 0 is no tuned problem"),
    "no text": (b"\xff\xfe\x00", "utf-8"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named_once_and_ignored(name, file):
    text, says = BROKEN[name]
    file.parent.mkdir()
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.warns(UserWarning, match="tuning.json cannot be read and is ignored") as warned:
        plan = only_plan(conv, X, W)
    assert len(warned) == 1 and says in str(warned[0].message)
    with jaxconv.tune.applied(None):
        assert plan == only_plan(conv, X, W)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        only_plan(conv, X, W)
        saved = tuned.save([entry()], file)  # the same warning is not given twice
    assert tuned.read(file) == saved and len(saved) == 1
    assert file.with_name("tuning.json.broken").exists()


@pytest.mark.parametrize(("changes", "says"), [({"jaxlib": "0.1"}, "jaxlib 0.1"), ({"jaxconv": "9.9"}, "jaxconv 9.9")])
def test_other_versions_are_ignored_with_one_warning(changes, says, file):
    tuned.save([entry_of(X, W, **changes)], file)
    fresh_process()
    with pytest.warns(UserWarning, match="tuned with other versions") as warned:
        plan = only_plan(conv, X, W)
        only_plan(conv, X[:1], W)
    assert len(warned) == 1 and says in str(warned[0].message)
    assert not plan.reason.startswith("tuned")


def test_other_devices_are_ignored(file, monkeypatch):
    """With a warning where somebody named the file; the user's own may hold results of every machine."""
    tuned.save([entry_of(X, W, device="NVIDIA X1")], file)
    fresh_process()
    with pytest.warns(UserWarning, match="tuned on NVIDIA X1, and are ignored on") as warned:
        assert not only_plan(conv, X, W).reason.startswith("tuned")
    assert len(warned) == 1
    tuned._warned.clear()
    monkeypatch.delenv("JAXCONV_TUNING")
    monkeypatch.setattr(tuned, "path", lambda: file)
    fresh_process()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not only_plan(conv, X, W).reason.startswith("tuned")


def test_where_the_file_is(monkeypatch):
    assert jaxconv.tune.path() == pathlib.Path(os.environ["JAXCONV_TUNING"])
    monkeypatch.setenv("JAXCONV_TUNING", "")
    monkeypatch.setitem(sys.modules, "platformdirs", None)  # not installed
    monkeypatch.setenv("HOME", "/home/user")
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    assert jaxconv.tune.path() == pathlib.Path("/home/user/.local/share/jaxconv/tuning.json")
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    assert jaxconv.tune.path() == pathlib.Path("/home/user/.local/share/jaxconv/tuning.json")
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert jaxconv.tune.path() == pathlib.Path("/data/jaxconv/tuning.json")
    dirs = types.SimpleNamespace(user_data_dir=lambda name, appauthor: f"/dirs/{name}")
    monkeypatch.setitem(sys.modules, "platformdirs", dirs)
    assert jaxconv.tune.path() == pathlib.Path("/dirs/jaxconv/tuning.json")


@ON_CPU
def test_results_travel_as_text(monkeypatch, file):
    timer(monkeypatch, native_wins)
    tune(conv, verify=False)(X, W)
    text = jaxconv.tune.dumps()
    results = jaxconv.tune.loads(text)
    assert jaxconv.tune.dumps(results) == text == file.read_text()
    assert results == jaxconv.tune.loads(text) and hash(results) == hash(jaxconv.tune.loads(text))
    with jaxconv.tune.applied(None):
        assert only_plan(conv, X, W).implementation == "xla"
        with jaxconv.tune.applied(results):
            assert only_plan(conv, X, W).kernel == "im2col"
        assert only_plan(conv, X, W).implementation == "xla"
    assert only_plan(conv, X, W).kernel == "im2col"


def test_texts_and_results_are_checked():
    with pytest.raises(ValueError, match=r"tune.loads: not JSON"):
        jaxconv.tune.loads("x")
    with pytest.raises(TypeError, match=r"expected what tune.loads returns, or None, got str"):
        jaxconv.tune.applied("{}")


def test_a_broken_table_of_jaxconvs_is_named_once_and_ignored(tmp_path, monkeypatch):
    monkeypatch.setattr(measured, "FOLDER", tmp_path)
    for i, text in enumerate(("{", '{"measurements": [{"op": "conv"}]}', "[]")):
        (tmp_path / f"x{i}.json").write_text(text)
        with pytest.warns(UserWarning, match=rf"x{i}.json is broken and is ignored") as warned:
            assert measured.table(f"X{i}") == () == measured.table(f"X{i}")
        assert len(warned) == 1


# ----------------------------------------------------------------------------------------------------------------------
# The command


@pytest.fixture
def program(tmp_path, monkeypatch):
    (tmp_path / "program_to_tune.py").write_text(
        "import jax, jax.numpy as jnp, jaxconv\n"
        "from jax import lax\n"
        "NUMBERS = ('NHWC', 'HWIO', 'NHWC')\n"
        "def step():\n"
        "    return lambda x, w: jaxconv.conv2d(x, w, padding='SAME'), jnp.ones((2, 9, 9, 4)), jnp.ones((3, 3, 4, 8))\n"
        "def plain():\n"
        "    f = lambda x, w: lax.conv_general_dilated(x, w, (1, 1), 'SAME', None, None, NUMBERS).sum()\n"
        "    return f, *step()[1:]\n"
        "def compiled():\n"
        "    return jax.jit(step()[0]).lower(*step()[1:]).compile(), *step()[1:]\n"
        "def wrong():\n"
        "    return 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_the_command_tunes_a_function(program, monkeypatch, capsys, tmp_path, file):
    timer(monkeypatch, native_wins)
    output = tmp_path / "cluster.json"
    assert command.main(["tune", "program_to_tune:step", "--no-verify", "--output", str(output)]) == 0
    done = capsys.readouterr()
    assert "conv_fprop" in done.out and "kept" in done.out
    assert "1 problems" in done.err and str(output) in done.err
    assert len(tuned.read(output)) == 1 and not file.exists()


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("step", "expected module:function"),
        ("no_such_module:step", "there is no module 'no_such_module'"),
        ("program_to_tune:walk", "has no 'walk'"),
        ("program_to_tune:wrong", "returned int, expected a tuple"),
        ("program_to_tune:compiled", "f is compiled already"),
    ],
)
def test_the_command_says_what_is_wrong(program, target, says, capsys):
    for name in ("tune", "explain", "bench"):
        assert command.main([name, target]) == 2
        assert says in capsys.readouterr().err


def test_the_command_tunes_what_accelerate_and_enable_make_of_a_function(program, monkeypatch, capsys, file):
    """The tuple that `bench` takes has lax's convolutions in it, and no call of jaxconv's."""
    timed = timer(monkeypatch, native_wins)
    assert command.main(["tune", "program_to_tune:plain", "--no-verify"]) == 0
    assert "--way accelerate, --way enable" in capsys.readouterr().out and not timed
    for way, gradient, kernels in (
        ("accelerate", False, {"conv_fprop"}),
        ("enable", False, {"conv_fprop"}),
        ("accelerate", True, {"conv_fprop", "conv_dgrad"}),
        ("enable", True, {"conv_fprop", "conv_dgrad"}),
    ):
        timed.clear()
        arguments = ["tune", "program_to_tune:plain", "--no-verify", "--again", "--way", way]
        assert command.main(arguments + ["--grad"] * gradient) == 0
        assert "nothing to tune" not in capsys.readouterr().out
        assert {op for op, _ in timed} == kernels, (way, gradient)


def test_the_command_explains_a_function(program, capsys):
    def said(*arguments: str) -> str:
        assert command.main(["explain", "program_to_tune:plain", *arguments]) == 0
        return capsys.readouterr().out

    assert said().startswith("enable, which is off, would do:")
    assert said("--way", "enable").startswith("enable:")
    assert "conv_fprop" in said("--way", "accelerate") and "dgrad" not in said("--way", "accelerate")
    assert "conv_dgrad" in said("--way", "accelerate", "--grad", "--platform", "cuda")
    assert "enable: off" in jaxconv.info()

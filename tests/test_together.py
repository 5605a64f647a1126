"""Convolutions that a program's sum is worth, though none is alone (jaxconv/_plan/together.py); planned for GPUs that
need not be here."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import H200

import jaxconv
from jaxconv import _plan
from jaxconv._plan import choose, model, together, tuned
from jaxconv._plan.plan import Nearest, Plan

KERNEL = Plan("native", "", "sm90/product")


def unsure(ratio, xla_ms=0.1, count=1, deviation=0.3):
    return together.Unsure(Nearest(KERNEL, xla_ms, ratio, deviation), count)


def test_many_pass_where_one_fails():
    one = unsure(1.4)
    assert not model.sure(1.4, 0.3) and together.taken([one], waiting=False) == []
    many = [unsure(1.4) for _ in range(30)]
    assert together.taken(many, waiting=False) == many


def test_equal_ones_are_one_prediction():
    """Thirty times the same convolution: the error is the same thirty times."""
    assert together.taken([unsure(1.4, count=30)], waiting=False) == []


def test_the_least_worth_are_left_first():
    good, bad = [unsure(1.4) for _ in range(30)], [unsure(1.01, 1.0) for _ in range(4)]
    assert not together._sure([*good, *bad])
    assert together.taken([*bad, *good], waiting=False) == good
    assert together.taken([unsure(0.99) for _ in range(50)], waiting=False) == []


def test_where_the_host_is_waited_for_a_launch_is_worth_its_time():
    short, long = 0.0015, 0.0025  # ms slower than XLA's 0.01
    taken = together.taken([few := unsure(0.01 / (0.01 + short), 0.01), unsure(0.01 / (0.01 + long), 0.01)], True)
    assert taken == [few]


def test_short_calls_wait():
    assert together.waits([0.01] * 9 + [0.2]) and not together.waits([0.01] * 9 + [0.22])


def test_few_calls_say_nothing_of_their_program():
    assert not together.waits([0.01] * (together.LEAST_CALLS - 1)) and not together.waits([])


# ----------------------------------------------------------------------------------------------------------------------
# Programs


def network(batch, size=32, dtype="float32", depth=10):
    """(loss, arguments): 3x3 convolutions with bias and relu, of 64 channels, behind each other."""

    def loss(ws, x):
        for w, b in ws:
            x = jax.nn.relu(
                jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")) + b
            )
        return (x.astype(jnp.float32) ** 2).mean()

    w = jax.ShapeDtypeStruct((3, 3, 64, 64), dtype), jax.ShapeDtypeStruct((64,), dtype)
    return loss, ([w] * depth, jax.ShapeDtypeStruct((batch, size, size, 64), dtype))


def convolutions(f, args, device=H200):
    with _plan.Device.assumed(device):
        explained = jaxconv.explain(f)(*args)
    return [call for call in explained if call.op.startswith("conv") and "dense" not in call.op]


@pytest.mark.parametrize("use", ["answers", "gradients"])
def test_a_program_that_waits_for_its_host_leaves_few_to_cudnn(use, code_for_gpus):
    loss, args = network(batch=1, size=16)
    f = jaxconv.accelerate(loss)
    calls = convolutions(jax.grad(f) if use == "gradients" else f, args)
    marked = [call for call in calls if call.problem.together]
    assert marked
    for call in marked:
        alone = _plan.plan(call.op, dataclasses.replace(call.problem, together=False), H200)
        assert alone.implementation != "native" and call.plan.implementation == "native"
        assert together.WHY in call.plan.reason and together.WHY not in alone.reason


def test_what_runs_alone_is_chosen_alone(code_for_gpus):
    """conv2d and enable see no program."""
    _, (ws, x) = network(batch=1, size=16)

    def one(w, b, x):
        return jaxconv.conv2d(x, w, b, padding="SAME", activation="relu")

    (call,) = convolutions(one, (*ws[0], x))
    assert not call.problem.together and together.WHY not in call.plan.reason


@pytest.fixture
def marked(code_for_gpus):
    """A convolution that native code runs because its program waits."""
    loss, args = network(batch=1, size=16)
    (problem,) = {call.problem for call in convolutions(jaxconv.accelerate(loss), args) if call.problem.together}
    assert _plan.plan("conv", problem, H200).implementation == "native"
    return problem


@pytest.mark.parametrize("how", ["disabled", "xla", "no code", "A100", "partitioned", "tuned"])
def test_whoever_chose_xla_gets_it(how, marked, monkeypatch):
    device, problem, within = H200, marked, contextlib.nullcontext()
    if how == "disabled":
        monkeypatch.setenv("JAXCONV_DISABLE", "conv")
    elif how == "xla":
        problem = dataclasses.replace(marked, implementation="xla")
    elif how == "no code":
        monkeypatch.setattr("jaxconv._core.native.runs_on", lambda capability: False)
    elif how == "A100":
        device = _plan.Device("cuda", "NVIDIA A100-SXM4-80GB", (8, 0), 108)
    elif how == "partitioned":
        device = dataclasses.replace(H200, partitioned=True)
    elif how == "tuned":
        made = _plan.plan("conv", marked, H200)
        jaxlib, version = tuned.versions()
        times = dict(xla_ms=1.0, native_ms={made.spec: 2.0}, choice="xla")
        key = tuned.key_of(marked)
        entry = tuned.Entry("conv_fprop", key, str(marked), H200.kind, jaxlib, version, **times)
        within = tuned.applied(tuned.Results([dataclasses.replace(entry, op="conv")]))
    with within:
        assert _plan.plan("conv", problem, device).implementation == "xla"


def test_of_float16_no_kernel_that_spreads_infinities(code_for_gpus):
    loss, args = network(batch=1, size=16, dtype="float16")
    for call in convolutions(jaxconv.accelerate(loss), args):
        if call.problem.together and call.plan.implementation == "native":
            planner = choose.PLANNERS[call.op]
            assert not planner.spreads(call.plan.kernel, call.problem)


def test_a_mark_makes_no_other_problem_of_what_was_tuned(marked):
    assert tuned.key_of(marked) == tuned.key_of(dataclasses.replace(marked, together=False))


def test_results_are_those_of_the_plain_program(code_for_gpus):
    """Its program is made for a GPU, and lowered for a CPU."""
    loss, (ws, x) = network(batch=1, size=8, depth=3)
    rng = np.random.default_rng(0)
    ws, x = jax.tree.map(lambda a: jnp.asarray(rng.standard_normal(a.shape) * 0.1, a.dtype), (ws, x))
    plain = jax.jit(jax.value_and_grad(loss))(ws, x)
    with _plan.Device.assumed(H200):
        lowered = jax.jit(jax.value_and_grad(jaxconv.accelerate(loss))).trace(ws, x).lower(lowering_platforms=("cpu",))
    ours = lowered.compile()(ws, x)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        assert jnp.allclose(a, b, rtol=1e-4, atol=1e-5)

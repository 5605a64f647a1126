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
from jaxconv._problem import Together
from jaxconv.joints import told

KERNEL = Plan("native", "", "sm90/product")


def unsure(ratio, xla_ms=0.1, count=1, deviation=0.3):
    return together.Unsure(Nearest(KERNEL, xla_ms, ratio, deviation), count)


def taken(these, waiting):
    return [one for one, _ in together.taken(these, waiting)]


def test_many_pass_where_one_fails():
    one = unsure(1.4)
    assert not model.sure(1.4, 0.3) and taken([one], waiting=False) == []
    many = [unsure(1.4) for _ in range(30)]
    assert taken(many, waiting=False) == many


def test_equal_ones_are_one_prediction():
    """Thirty times the same convolution: the error is the same thirty times."""
    assert taken([unsure(1.4, count=30)], waiting=False) == []


def test_the_least_worth_are_left_first():
    good, bad = [unsure(1.4) for _ in range(30)], [unsure(1.01, 1.0) for _ in range(4)]
    assert not together._sure([*good, *bad])
    assert taken([*bad, *good], waiting=False) == good
    assert taken([unsure(0.99) for _ in range(50)], waiting=False) == []


def test_where_the_host_is_waited_for_a_launch_is_worth_its_time():
    short, long = 0.0015, 0.0025  # ms slower than XLA's 0.01
    few, many = unsure(0.01 / (0.01 + short), 0.01), unsure(0.01 / (0.01 + long), 0.01)
    assert together.taken([few, many], True) == [(few, True)]


def test_what_may_be_off_by_much_passes_the_test_also_where_the_host_is_waited_for():
    little, much = unsure(1.01, 0.03, deviation=0.3), unsure(1.01, 0.03, deviation=0.4)
    assert taken([little, much], True) == [little]
    many = [unsure(1.4, 2.0) for _ in range(30)]
    assert together.taken(many, True) == [(one, False) for one in many]


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
    return [call for call in explained if call.op.startswith("conv")]


@pytest.mark.parametrize("use", ["answers", "gradients"])
def test_a_program_that_waits_for_its_host_leaves_few_to_cudnn(use, code_for_gpus):
    loss, args = network(batch=16, size=24)
    f = jaxconv.accelerate(loss)
    calls = convolutions(jax.grad(f) if use == "gradients" else f, args)
    marked = [call for call in calls if call.problem.together]
    assert marked
    for call in marked:
        alone = _plan.plan(call.op, dataclasses.replace(call.problem, together=None), H200)
        assert alone.implementation != "native" and call.plan.implementation == "native"
        assert together.WAITS in call.plan.reason and together.WAITS not in alone.reason


def test_a_frozen_program_does_not_wait(code_for_gpus):
    """Graphs hold cuDNN's convolutions too, as `freeze` asks for."""
    loss, (ws, x) = network(batch=16, size=24)
    frozen = jaxconv.freeze(loss, jax.tree.map(lambda a: np.ones(a.shape, a.dtype), ws))
    reasons = [call.plan.reason for call in convolutions(frozen, (x,))]
    assert reasons and not any(together.WAITS in reason for reason in reasons)


def test_a_short_convolution_of_a_frozen_program_is_cudnns(code_for_gpus):
    """Graphs hold it too: what is captured has nothing of a kernel that is perhaps as fast."""
    x, w = jax.ShapeDtypeStruct((1, 64, 16, 16), "float32"), np.ones((64, 64, 3, 3), "float32")

    def f(w, x):
        return jax.lax.conv(x, w, (1, 1), "SAME")

    (alone,) = convolutions(jaxconv.accelerate(f), (w, x))
    (frozen,) = convolutions(jaxconv.freeze(f, w), (x,))
    assert together.SHORT in alone.plan.reason and frozen.plan.implementation == "xla"


def test_many_of_a_frozen_program_are_worth_it(code_for_gpus, monkeypatch):
    """Their sum is, whatever holds their launches."""
    monkeypatch.setattr(together, "_sure", lambda these: True)
    w = np.ones((7, 7, 384, 384), jnp.bfloat16)
    frozen = jaxconv.freeze(lambda w, x: jax.lax.conv(x, w, (1, 1), "SAME"), w.transpose(3, 2, 0, 1))
    (call,) = convolutions(frozen, (jax.ShapeDtypeStruct((32, 384, 28, 28), w.dtype),))
    assert together.WORTH in call.plan.reason


@pytest.mark.parametrize("us, ratio, takes", [(19.9, 1, True), (20.1, 1, False), (19.9, 0.99, False), (5, 1.3, True)])
def test_what_is_shorter_than_its_launch_need_not_be_sure(us, ratio, takes, marked):
    near, problem = unsure(ratio, us / 1e3).nearest, dataclasses.replace(marked, together=None)
    assert (choose.PLANNERS["conv"].nevertheless(problem, near) == together.SHORT) == takes


def test_short_convolutions_are_taken_one_by_one(code_for_gpus):
    """Whoever calls them: they need no program."""
    op, problem = convolution((1, 16, 16, 64), (3, 3, 64, 64), "float32")
    assert together.SHORT in _plan.plan(op, problem, H200).reason
    op, problem = convolution((64, 32, 32, 64), (3, 3, 64, 64), "float32")
    assert together.SHORT not in _plan.plan(op, problem, H200).reason


def test_what_runs_alone_is_chosen_alone(code_for_gpus):
    """conv2d and enable see no program."""
    _, (ws, x) = network(batch=16, size=24)

    def one(w, b, x):
        return jaxconv.conv2d(x, w, b, padding="SAME", activation="relu")

    (call,) = convolutions(one, (*ws[0], x))
    assert not call.problem.together and together.WAITS not in call.plan.reason


@pytest.fixture
def marked(code_for_gpus):
    """A convolution that native code runs because its program waits."""
    loss, args = network(batch=16, size=24)
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
        entry = tuned.Entry("conv", tuned.key_of(marked), str(marked), H200.kind, jaxlib, version, **times)
        within = tuned.applied(tuned.Results([entry]))
    with within:
        assert _plan.plan("conv", problem, device).implementation == "xla"


def test_gradients_of_examples_are_chosen_anew(code_for_gpus):
    """The program of one example waits; what vmap makes of its two halves is another one."""
    loss, (ws, x) = network(batch=1, size=28, dtype="bfloat16")
    xs = jax.ShapeDtypeStruct((1024, *x.shape), x.dtype)
    f = jax.grad(jaxconv.accelerate(loss), argnums=(0, 1))
    one, many = convolutions(f, (ws, x)), convolutions(jax.vmap(f, (None, 0)), (ws, xs))
    assert any(together.WAITS in call.plan.reason for call in one)
    assert not any(together.WAITS in call.plan.reason for call in many)


def test_a_program_in_a_program_is_chosen_with_it(code_for_gpus):
    loss, args = network(batch=16, size=24)

    def step(f):
        def stepped(ws, x):
            value, (by_ws, by_x) = jax.value_and_grad(f, (0, 1))(ws, x)
            return value, jax.tree.map(jnp.subtract, ws, by_ws), by_x

        return jaxconv.accelerate(stepped)

    inner, outer = convolutions(step(jaxconv.accelerate(loss)), args), convolutions(step(loss), args)
    kernels = [sorted((call.op, call.count, call.plan.spec) for call in calls) for calls in (inner, outer)]
    assert kernels[0] == kernels[1]


def convolution(x, w, dtype, activation=None):
    """(op, problem) of a call of conv2d."""
    x, w = jax.ShapeDtypeStruct(x, dtype), jax.ShapeDtypeStruct(w, dtype)
    (call,) = convolutions(lambda x, w: jaxconv.conv2d(x, w, padding="SAME", activation=activation), (x, w))
    return call.op, call.problem


def test_what_stands_behind_a_convolution_makes_no_other_prediction(code_for_gpus, monkeypatch):
    """Thirty times the same 7x7, with three activations: it is XLA's, as with one."""
    monkeypatch.setattr(together, "_sure", lambda these: len(these) >= 3)
    ops = [convolution((32, 28, 28, 384), (7, 7, 384, 384), "bfloat16", f) for f in ("relu", "tanh", "sigmoid")]
    near = _plan.plan(*ops[0], H200).nearest
    assert len(set(ops)) == 3 and near.ratio > 1
    assert taken([together.Unsure(near, 10) for _ in range(3)], False)  # as if they were three
    assert _plan.plan_together(ops * 10, H200) == {}


@pytest.mark.parametrize("batch", [2, 32, 512])
@pytest.mark.parametrize("channels", [64, 128])
def test_times_are_of_the_problem_not_of_its_neighbour(batch, channels, code_for_gpus):
    """A neighbour speaks for a problem of up to 84 times its work."""
    op, problem = convolution((batch, 56, 56, channels), (3, 3, channels, channels), "bfloat16")
    ms = told.time_of(op, problem, H200).ms
    assert _plan.plan(op, problem, H200).ms == pytest.approx(ms, rel=0.1)  # two kernels' neighbours know XLA's time


def test_explain_prints_the_program_that_runs(code_for_gpus):
    loss, args = network(batch=16, size=24)
    with _plan.Device.assumed(H200):
        (region,) = jaxconv.explain(jaxconv.accelerate(loss))(*args).regions
    assert {one.kernel for one in region.before} == {"xla"} and "xla" not in {one.kernel for one in region.after}
    assert str(region).startswith("before: ") and "after:" in str(region)


def test_of_float16_no_kernel_that_spreads_infinities(code_for_gpus):
    """Groups of less than eight channels, whatever a mark says."""
    x, w = (jax.ShapeDtypeStruct(s, "float16") for s in ((1, 16, 16, 64), (3, 3, 4, 64)))
    (call,) = convolutions(lambda x, w: jaxconv.conv2d(x, w, padding="SAME", groups=16), (x, w))
    mark = Together(call.op, tuned.key_of(call.problem), says="waits")
    planner, problem = choose.PLANNERS[call.op], dataclasses.replace(call.problem, together=mark)
    assert any(planner.spreads(plan.kernel, problem) for plan in choose.every(call.op, problem, H200))
    plan = _plan.plan(call.op, problem, H200)
    assert plan.implementation != "native" or not planner.spreads(plan.kernel, problem)


def test_a_mark_makes_no_other_problem_of_what_was_tuned(marked):
    assert tuned.key_of(marked) == tuned.key_of(dataclasses.replace(marked, together=None))


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

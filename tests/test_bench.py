"""`python -m jaxconv bench`: what it times, what it says of it, and what an interrupt leaves."""

from __future__ import annotations

import functools
import importlib
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PLATFORM, calls, normal

import jaxconv
from jaxconv import __main__ as command
from jaxconv._tools import bench as _bench
from jaxconv._tools import timing

PROGRAM = """
import jax, jax.numpy as jnp
from jax import lax

X, W, B = jnp.ones((2, 9, 9, 4)), jnp.full((3, 3, 1, 8), 0.1), jnp.ones(8)

def loss(w, b, x):
    y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
                                 feature_group_count=4)
    return jnp.mean(jax.nn.relu(y + b) ** 2), x.sum()

def case():
    return loss, W, B, X

def shapes():
    return loss, jax.ShapeDtypeStruct(W.shape, W.dtype), B, X

def wrong():
    return 3
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    (tmp_path / "program_to_time.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield lambda: importlib.import_module("program_to_time")
    sys.modules.pop("program_to_time", None)


def bench(f, *args, **options):
    return _bench.bench(f, *args, progress=False, **{"repeat": 5, "seconds": 1.0, **options})


def test_the_command_times_three_ways_and_says_what_was_chosen(program, capsys):
    assert command.main(["bench", "program_to_time:case", "--grad", "--repeat", "5", "--seconds", "1"]) == 0
    done = capsys.readouterr()
    table = [line.split() for line in done.out.splitlines()]
    rows = {words[0]: words for words in table if words and words[0] in ("plain", "enable", "accelerate")}
    assert set(rows) == {"plain", "enable", "accelerate"}
    for words in rows.values():
        assert float(words[1]) > 0
    assert "wgrad" in done.out and "conv + bias + relu" in done.out  # enable's choice, accelerate's report
    assert "left as it was" not in done.out  # accelerate went inside the gradient
    assert "timing accelerate" in done.err  # the bar's text, or a line


def test_ways_are_the_functions_that_they_say(program, monkeypatch):
    """What is compiled has jaxconv's calls where it should, and the results are compared."""
    loss, *args = program().case()
    ways = _bench.ways_of(loss, args, True)
    assert not calls(ways["plain"][0], *args)
    if PLATFORM == "cpu":  # so small a problem is XLA's on a GPU
        assert calls(ways["accelerate"][0], *args)
    found = {row.way: row for row in bench(loss, *args, gradient=True)}
    assert found["plain"].difference == 0.0
    assert all(row.difference < 1e-5 and row.timing.median_ms > 0 and row.compile_s > 0 for row in found.values())
    in_tune = importlib.import_module("jaxconv.tune")
    monkeypatch.setattr(in_tune, "accelerate", lambda f: lambda *args: jax.tree.map(lambda a: 1.5 * a, f(*args)))
    assert bench(loss, *args, ways=["plain", "accelerate"])[-1].difference == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("result", "expected", "difference"),
    [
        ([1.0, np.nan], [1.0, np.nan], 0.0),
        ([np.nan], [1.0], np.inf),
        ([1.0], [np.nan], np.inf),
        ([np.inf, 100], [np.inf, 1], 99.0),
        ([-np.inf], [np.inf], np.inf),
        ([0.5j], [1j], 0.5),
        (jnp.ones(3, jnp.bfloat16), 2 * jnp.ones(3, jnp.bfloat16), 0.5),
        (jax.random.key(1), jax.random.key(1), 0.0),
        ([True], [False], 1.0),
    ],
)
def test_differences_of_what_is_not_finite_are_seen(result, expected, difference):
    assert _bench._difference(*(a if hasattr(a, "dtype") else np.array(a) for a in (result, expected))) == difference


def test_all_but_a_loss_first_result_is_auxiliary():
    f = lambda x: ((x * x).sum(), x, {"y": 2 * x})  # noqa: E731
    x = jnp.arange(3.0)
    (value, (same, other)), gradient = _bench.ways_of(f, [x], True)["plain"][0](x)
    assert float(value) == 5 and other["y"][2] == 4 and (same == x).all() and (gradient == 2 * x).all()


def test_enable_is_on_for_its_own_way_alone(monkeypatch):
    x, w = jnp.asarray(normal(0, (2, 8, 8, 4)), "float32"), jnp.asarray(normal(1, (3, 3, 1, 4)), "float32")
    seen = []

    def f(x, w):
        seen.append(jaxconv._enable.is_on())
        return jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=4
        )

    with jaxconv.enabled():
        rows = bench(f, x, w)
    assert [row.way for row in rows] == ["plain", "enable", "accelerate"]
    assert set(seen) == {True, False} and seen[0] is False  # on outside, and still plain is without
    (title, text) = rows.choices[0]
    taken = PLATFORM == "cpu" or "1 taken" in text  # on a GPU as it is predicted to be the faster
    assert title == "enable" and f"{int(taken)} taken, {int(not taken)} left" in text


def test_shapes_stand_for_arrays(program):
    loss, *args = program().shapes()
    assert all(row.timing.median_ms > 0 for row in bench(loss, *args, gradient=True))


def test_what_a_jitted_function_donates_is_there_for_the_next_call():
    @functools.partial(jax.jit, donate_argnums=0)
    def step(x):
        return x + 1

    x = jnp.zeros(4)
    assert all(row.timing for row in bench(step, x))
    np.testing.assert_array_equal(x, np.zeros(4))


@pytest.mark.parametrize(("after", "timed"), [(0, 0), (1, 1), (4, 3)])
def test_an_interrupt_keeps_what_was_timed(after, timed, program, monkeypatch, capsys):
    """Rounds take turns: after four turns of three ways each has been timed."""
    turns = itertools.count(1)

    def measure(programs, *, step, timings, **options):
        def counting(name):
            step(name)
            if next(turns) >= after:
                raise KeyboardInterrupt

        if after == 0:
            raise KeyboardInterrupt
        return original(programs, step=counting, timings=timings, **options)

    original = timing.measure
    monkeypatch.setattr(timing, "measure", measure)
    assert command.main(["bench", "program_to_time:case", "--repeat", "5", "--seconds", "1"]) == 130
    out = capsys.readouterr().out
    rows = [
        line for line in out.splitlines() if line.split()[:1] and line.split()[0] in ("plain", "enable", "accelerate")
    ]
    medians = [line for line in rows if "%" in line]
    assert len(medians) == timed
    assert ("interrupted: what was timed is above" in out) == bool(timed)
    assert ("nothing was timed yet" in out) == (not timed)


def test_an_interrupted_compilation_says_so(program, monkeypatch, capsys):
    def interrupted(f):
        raise KeyboardInterrupt

    monkeypatch.setattr(_bench, "explain", interrupted)
    assert command.main(["bench", "program_to_time:case"]) == 130
    assert "nothing was timed yet" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["case"], "expected module:function"),
        (["no_such_module:case"], "there is no module 'no_such_module'"),
        (["program_to_time:wrong"], "returned int, expected a tuple"),
        (["program_to_time:case", "--repeat", "0"], "must be positive"),
        (["program_to_time:case", "--seconds", "0"], "must be positive"),
        (["program_to_time:case", "--seconds", "inf"], "must be positive and finite"),
    ],
)
def test_the_command_says_what_is_wrong(program, arguments, says, capsys):
    assert command.main(["bench", *arguments]) == 2
    assert says in capsys.readouterr().err

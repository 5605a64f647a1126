"""tests/foreign.py: outcomes test by test, plain and with jaxconv.enable on."""

from __future__ import annotations

import subprocess
import sys

import foreign
import pytest

SUITE = """
import jax, jax.numpy as jnp

X, W = jnp.ones((1, 4, 4, 2)), jnp.ones((3, 3, 2, 2))
NUMBERS = ("NHWC", "HWIO", "NHWC")

def f(x, w):
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NUMBERS)

def test_numbers():
    assert jax.jit(f)(X, W)[0, 1, 1, 0] == 18

def test_text():
    assert "stablehlo.convolution" in jax.jit(f).lower(X[:, 1:], W).as_text()

def test_that_fails_anyway():
    assert False, "as ever"

def test_complex_numbers():
    assert jax.jit(f)(X.astype(complex), W.astype(complex))[0, 1, 1, 0] == 18
"""


@pytest.mark.slow
def test_what_passes_plain_only_is_found(tmp_path, capsys):
    suite = tmp_path / "test_of_somebody.py"
    suite.write_text(SUITE)
    (tmp_path / "typing.py").write_text("raise ImportError('a module of the suite in the place of one of Python')")
    assert foreign.main([str(suite), "--ways", "plain,native", "--logs", str(tmp_path / "logs")]) == 1
    text = capsys.readouterr().out
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| test_")
    ]
    # suite, way, passed, failed, skipped, convolutions taken, left, tests with some taken
    assert [row[:8] for row in rows] == [
        ["test_of_somebody.py", "plain", "3", "1", "0", "", "", ""],
        ["test_of_somebody.py", "native", "2", "2", "0", "2", "1", "2"],
    ]
    assert "native: failed: test_of_somebody.py::test_text: AssertionError" in text
    assert "native, left to lax: 1 x its types are complex64" in text


def test_a_test_that_ends_its_process_is_worse(tmp_path):
    out = tmp_path / "native.jsonl"
    lines = '{"test": "a", "outcome": "crashed"}\n{"test": "a", "outcome": "passed", "why": ""}\n'
    out.with_name("native.jsonl.1").write_text(lines + '{"test": "b", "outcome": "crashed"}\n')
    found = foreign.Run.read(out)
    assert found.outcomes == {"a": "passed", "b": "crashed"}
    plain = foreign.Run(dict.fromkeys("abc", "passed"), {}, found.taken, found.left)
    assert foreign.worse(plain, found) == {"b": "crashed", "c": "not run"}


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--ways", "native"], "expected plain, and then"), (["/nowhere"], "there is no /nowhere")],
)
def test_bad_options_are_refused(options, message, tmp_path):
    command = [sys.executable, foreign.__file__, str(tmp_path), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and message in done.stderr

"""A few random cases of each property, the same ones each time. `make fuzz` draws new ones for as long as one likes."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys
from typing import Any

import fuzz
import hypothesis
import properties
import pytest

# Seconds of compiling are what a case costs.
CASES = dict.fromkeys(properties.PROPERTIES, 5) | {"Composed": 4, "Layers": 4, "Residuals": 4}


@pytest.mark.parametrize("name", properties.PROPERTIES)
def test_holds(name):
    @hypothesis.settings(
        max_examples=CASES[name],
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=(hypothesis.Phase.generate,),
    )
    @hypothesis.given(properties.PROPERTIES[name].strategy())
    def holds(case: Any) -> None:
        case.check()

    holds()


@pytest.mark.parametrize("name", properties.PROPERTIES)
def test_a_case_says_how_it_is_made_again(name):
    @hypothesis.settings(
        max_examples=20, derandomize=True, deadline=None, database=None, phases=(hypothesis.Phase.generate,)
    )
    @hypothesis.given(properties.PROPERTIES[name].strategy())
    def same(case: Any) -> None:
        assert eval(repr(case), vars(properties)) == case

    same()


@pytest.mark.slow
def test_a_failure_is_shrunk_to_a_line_that_makes_it_again(tmp_path, monkeypatch, capsys):
    """A property that does not hold, of a process that also crashes: both are named, and the rest is run."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, os, dataclasses\n"
        f"sys.path.insert(0, {str(pathlib.Path(fuzz.__file__).parent)!r})\n"
        "import properties\n"
        "from hypothesis import strategies as st\n"
        "@dataclasses.dataclass(frozen=True)\n"
        "class Small:\n"
        "    n: int\n"
        "    strategy = lambda: st.builds(Small, st.integers(0, 10**6))\n"
        "    def check(self):\n"
        "        assert self.n < 1000, 'too large'\n"
        "@dataclasses.dataclass(frozen=True)\n"
        "class Dies:\n"
        "    n: int\n"
        "    strategy = lambda: st.builds(Dies, st.just(7))\n"
        "    def check(self):\n"
        "        os._exit(11)\n"
        "properties.PROPERTIES = {'Small': Small, 'Dies': Dies}\n"
        "properties.Small, properties.Dies = Small, Dies\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-P", fuzz.__file__, "--minutes", "0.1", "--seed", "3"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert '"Small(n=1000)"' in done.stdout and "too large" in done.stdout
    assert '"Dies(n=7)"' in done.stdout and "it ended with 11" in done.stdout
    (line,) = {line.strip() for line in done.stdout.splitlines() if '"Small(' in line}
    again = subprocess.run(
        [sys.executable, "-P", fuzz.__file__, ast.literal_eval(line.split(" ", 2)[2])],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert again.returncode != 0 and "too large" in again.stderr

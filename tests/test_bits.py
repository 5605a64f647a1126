"""tests/bits.py: every kernel's results have the same bits in each run, in each process, and as CUDA graphs."""

from __future__ import annotations

import itertools
import subprocess
import sys

import bits
import pytest

WORDS = ["batchnorm/two_read/bfloat16", "pool/gather/bfloat16", "conv/direct/bfloat16", "conv/im2col/bfloat16"]


def run(*words: str) -> str:
    command = [sys.executable, bits.__file__, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return done.stdout


def test_bits_are_the_same_across_runs_and_processes():
    assert " 0 calls differ" in run(*WORDS)


@pytest.mark.slow
def test_bits_of_every_kernel_are_the_same_across_runs_and_processes():
    assert " 0 calls differ" in run()


def test_a_difference_is_seen(monkeypatch):
    part = "pool/gather/float32"
    same = bits.of_part(part)
    assert same and not bits.differences(same, dict(same))
    call = next(iter(same))
    assert bits.differences(same, {**same, call: "0"}) == [f"{call}: processes differ"]
    assert bits.differences(same, {**same, "more": "0"}) == ["more: in one process only"]
    count = itertools.count()
    monkeypatch.setattr(bits, "digest", lambda results: str(next(count)))
    assert len(bits.differences(bits.of_part(part), same)) >= len(same)

"""tests/bits.py: every kernel's results have the same bits in each run, in each process, and as CUDA graphs."""

from __future__ import annotations

import itertools
import subprocess
import sys

import bits
import jax
import jax.numpy as jnp
import pytest
from helpers import DEVICE, PLATFORM

import jaxconv

WORDS = ["batchnorm/two_read/bfloat16", "pool/gather/bfloat16", "conv/im2col/bfloat16"]


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


@pytest.mark.skipif(PLATFORM != "cuda" or DEVICE.compute_capability != (9, 0), reason="a kernel of Hopper's")
def test_rows_are_read_before_their_place_is_filled_again():
    """Reads of shared memory wait behind a kernel's stores, here of 616 MB, while TMA brings what comes next."""

    def y(x: jax.Array, w: jax.Array) -> jax.Array:
        padding = ((0, 1), (0, 1))
        return jaxconv.conv2d(x, w, stride=2, padding=padding, groups=96, algorithm="depthwise/rows_strided")

    kw, ky = jax.random.split(jax.random.key(0))
    x = jax.ShapeDtypeStruct((256, 112, 112, 96), "bfloat16")
    w = jax.random.normal(kw, (3, 3, 1, 96), "bfloat16")
    dy = jax.random.normal(ky, (256, 56, 56, 96), "bfloat16")
    dgrad = jax.jit(lambda dy: jax.linear_transpose(lambda x: y(x, w), x)(dy)[0])
    same = jax.jit(lambda a, b: jnp.all(a == b))
    first = dgrad(dy)
    assert all(same(first, dgrad(dy)) for _ in range(12))

"""Threads that launch one kernel with different sizes of shared memory on one GPU: neither takes it from the other."""

from __future__ import annotations

import concurrent.futures
import functools
import pathlib
import re
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sanitize
from helpers import DEVICE, H200, PLATFORM, normal, same_bits

from jaxconv import _plan

CUDA = pathlib.Path(__file__).parent.parent / "cuda"
ROUNDS = 200

# Two sizes of the same kernel: channels, and images that are wide or narrow, so that stages and tiles differ.
SIZES: dict[str, list[tuple[Any, ...]]] = {
    "depthwise/rows": [((9, 8), 8, 8, 8, (3, 3), {}), ((30, 300), 256, 256, 256, (3, 3), {})],
    "depthwise/rows_strided": [
        ((9, 8), 8, 8, 8, (3, 3), {"stride": 2}),
        ((30, 300), 256, 256, 256, (3, 3), {"stride": 2}),
    ],
    "depthwise/rows_mma": [((9, 8), 8, 8, 8, (7, 7), {}), ((30, 120), 256, 256, 256, (7, 7), {})],
    "depthwise/mma": [((9, 8), 8, 8, 8, (5, 5), {}), ((60, 120), 64, 64, 64, (5, 5), {})],
    "grouped/rows": [((9, 8), 64, 64, 8, (3, 3), {}), ((30, 200), 512, 512, 64, (3, 3), {})],
    "grouped/mma": [((9, 8), 64, 64, 8, (5, 5), {}), ((30, 200), 128, 128, 4, (5, 5), {})],
    "narrow/rows": [((9, 8), 8, 8, 1, (3, 3), {}), ((30, 150), 32, 32, 1, (3, 3), {})],
    "stem/mma": [((9, 8), 3, 16, 1, (3, 3), {}), ((60, 200), 8, 128, 1, (7, 7), {})],
    "sm90/halo": [((9, 8), 8, 8, 1, (3, 3), {}), ((30, 150), 64, 64, 1, (3, 3), {})],
    "sm90/halo_stream": [((9, 8), 64, 8, 1, (3, 3), {}), ((30, 250), 128, 64, 1, (3, 3), {})],
}


def launches(kernel: str) -> list[list[tuple[Any, Any]]]:
    """Of each operator: the two sizes, as (compiled, operands)."""
    found: dict[str, list[tuple[Any, Any]]] = {}
    for seed, shape in enumerate(SIZES[kernel]):
        for made, p in sanitize.conv_calls("bfloat16", True, kernel, "default", shape):
            if made.name in ("conv_fprop", "conv_dgrad", "conv_wgrad") and sanitize.supported((made, p), DEVICE):
                given = [jnp.asarray(normal(seed + i, s), t) for i, (s, t) in enumerate(made.operands(p).values())]
                run = jax.jit(functools.partial(made, p)).lower(*given).compile()
                found.setdefault(made.name, []).append((run, given))
    return [pair for pair in found.values() if len(pair) == 2]


@pytest.mark.skipif(PLATFORM != "cuda", reason="shared memory is a GPU's")
@pytest.mark.parametrize("kernel", SIZES)
def test_two_sizes_from_two_threads(kernel):
    pairs = launches(kernel)
    if not pairs and DEVICE.compute_capability != (9, 0):
        pytest.skip("Hopper's alone")
    assert pairs
    for pair in pairs:
        alone = [[np.asarray(leaf) for leaf in jax.tree.leaves(run(*given))] for run, given in pair]
        start = threading.Barrier(len(pair))

        def work(i: int, pair: Any = pair, start: Any = start) -> Any:
            run, given = pair[i]
            start.wait()
            for _ in range(ROUNDS - 1):
                run(*given)
            return [np.asarray(leaf) for leaf in jax.tree.leaves(run(*given))]

        with concurrent.futures.ThreadPoolExecutor(len(pair)) as pool:
            for found, want in zip(pool.map(work, range(len(pair))), alone, strict=True):
                assert same_bits(found, want)


@pytest.mark.skipif(not CUDA.exists(), reason="it reads the sources")
def test_nobody_asks_for_a_problems_own_size():
    """The permission is a kernel's, not a launch's: it is always for the same."""
    for path in [*CUDA.rglob("*.cu"), *CUDA.rglob("*.cuh"), *CUDA.rglob("*.cc"), *CUDA.rglob("*.h")]:
        for size in re.findall(r"cudaFuncAttributeMaxDynamicSharedMemorySize,\s*([^;]*?)\)[,;]", path.read_text()):
            assert path.name == "device.cc" or re.fullmatch(r"k[A-Z]\w+", size), f"{path}: {size}"


def test_every_kernel_has_its_two_sizes(code_for_gpus):
    """On a Hopper GPU: plans are data."""

    for kernel, shapes in SIZES.items():
        for shape in shapes:
            calls = sanitize.conv_calls("bfloat16", True, kernel, "default", shape)
            names = {made.name for made, p in calls if _plan.supports(made.name, p.algorithm, p, H200) is None}
            assert names & {"conv_fprop", "conv_dgrad", "conv_wgrad"}, (kernel, shape)

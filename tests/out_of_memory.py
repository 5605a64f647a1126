"""Memory that runs out at each kernel's call: the call raises, and later the same program gives the same results.

    python tests/out_of_memory.py            # a call of each kernel of jaxconv's, about half a minute on a GPU
    python tests/out_of_memory.py --all      # by every algorithm that has it

XLA's allocator gets a twentieth of the device's memory. What is left of it is then filled to the last megabyte, and all
calls are made at once, from a thread each, because the allocator waits ten seconds for somebody to free memory.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import math
import os
import sys
from collections.abc import Iterator
from typing import Any

if __name__ == "__main__":  # before JAX starts
    os.environ |= {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".05", "XLA_PYTHON_CLIENT_PREALLOCATE": "true"}
    os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "default"

import helpers
import jax
import jax.numpy as jnp
import sanitize

from jaxconv import _plan, _problem
from jaxconv._core import primitives

MIB = 2**20
LEFT = 8 * MIB  # at most, once memory is filled
DTYPE = "bfloat16"

# Of 96 MiB: x and y of most calls, and w where the gradient of w is what does not fit.
PIXELS, CHANNELS = (512, 512), (8, 8)
CONVS = {
    "sm90": [
        (PIXELS, 64, 64, 1, (1, 1), {}),
        (CHANNELS, 2048, 2048, 1, (3, 3), {}),
        ((256, 256), 128, 64, 1, (1, 1), {}),  # whose dgrad sums up
    ],
    "sm90/normalised": [(PIXELS, 64, 64, 1, (1, 1), {})],
    "implicit_gemm": [(PIXELS, 64, 64, 1, (1, 1), {}), (CHANNELS, 2048, 2048, 1, (3, 3), {})],
    "im2col": [(PIXELS, 64, 64, 1, (1, 1), {}), (CHANNELS, 2048, 2048, 1, (3, 3), {})],
    "direct": [(PIXELS, 64, 64, 1, (1, 1), {}), (CHANNELS, 2048, 2048, 1, (3, 3), {})],
    "depthwise": [(PIXELS, 64, 64, 64, (3, 3), {}), ((4, 4), 2**21, 2**21, 2**21, (3, 3), {})],
    "grouped": [(PIXELS, 64, 64, 8, (3, 3), {})],
    "stem": [(PIXELS, 8, 64, 1, (3, 3), {})],
    "narrow": [(PIXELS, 32, 32, 1, (3, 3), {})],
}


def calls(device: _plan.Device) -> Iterator[sanitize.Call]:
    """Every kernel by every algorithm that the device can run, large."""
    for algorithm, shapes in CONVS.items():
        for shape in shapes:
            yield from sanitize.conv_calls(DTYPE, True, algorithm, "default", shape)
    yield from sanitize.pooled_calls(DTYPE, (1024, 1024), 3, 64, 3, 1, 3)
    yield from sanitize.shortcut_calls(DTYPE, (3, *PIXELS, 64), (1, 1, 64, 64), (3, *PIXELS, 64), 1)
    for algorithm in _problem.DENSE_ALGORITHMS:
        yield from sanitize.dense_calls(DTYPE, algorithm, "default", 3 * 512 * 512, 64, 64)
        yield from sanitize.gradient_calls("bfloat16", algorithm, 3 * 512 * 512, 64, 64)
        yield from sanitize.gated_calls("bfloat16", algorithm, 3 * 512 * 512, 64, 64)
        yield from sanitize.gated_gradient_calls("bfloat16", algorithm, 3 * 512 * 512, 64, 64)
    for algorithm in _problem.BATCHNORM_ALGORITHMS:
        yield from sanitize.batchnorm_calls(DTYPE, algorithm, (3, *PIXELS, 64), -1, True)
        # of statistics, which are few numbers elsewhere
        yield from sanitize.batchnorm_calls(DTYPE, algorithm, (16, 2**21), -1, True)
    for algorithm in _problem.GROUPNORM_ALGORITHMS:
        yield from sanitize.groupnorm_calls(DTYPE, algorithm, (12, 256, 256, 64), 8, "silu")
    yield from sanitize.squeeze_calls(DTYPE, "one_pass", (12, 256, 256, 64), 16, "silu")
    yield from sanitize.pool_calls(DTYPE, "gather", (3, *PIXELS, 64), 3, {})
    yield from sanitize.average_calls(DTYPE, "gather", (3, *PIXELS, 64), 3, {})
    for algorithm in ("integer/output", "integer/tile"):
        yield from sanitize.integer_calls("int8", algorithm, (1, 2048, 2048, 4), (3, 3, 4, 64), {})
    yield from sanitize.scaled_calls("int8", "sm90", (1, 2048, 2048, 16), (3, 3, 16, 64), {}, None, "float32")


def needed(call: sanitize.Call, device: _plan.Device) -> int:
    """Bytes of the results and the workspace."""
    made, p = call
    sizes = [jnp.dtype(dtype).itemsize * math.prod(shape) for shape, dtype in made.results(p)]
    return sum(sizes) + _plan.plan(made.name, p, device).workspace_bytes


def tried(device: _plan.Device, every: bool) -> dict[str, sanitize.Call]:
    """By name: those whose results do not fit into what is left; of each kernel one, or by each algorithm."""
    found: dict[str, sanitize.Call] = {}
    for call in calls(device):
        made, p = call
        if sanitize.supported(call, device) and needed(call, device) > 4 * LEFT:
            found.setdefault(f"{made.name} {p.algorithm}" if every else made.name, call)
    return found


def filled() -> list[Any]:
    """Arrays that take what is left of the device's memory."""
    held = []
    while (free := jax.devices()[0].memory_stats()["largest_free_block_bytes"]) > LEFT:
        held.append(jax.block_until_ready(jnp.zeros(free - free % MIB or MIB, "uint8")))
    return held


def run(every: bool) -> int:
    device = _plan.Device.current("cuda")
    arrays: dict[Any, Any] = {}  # one of each type

    def operand(shape: tuple[int, ...], dtype: str) -> Any:
        if (shape, dtype) not in arrays:
            # Positive: variances are among them, positions too, and a NaN equals nothing afterwards.
            arrays[shape, dtype] = jnp.abs(jax.random.normal(jax.random.key(len(arrays)), shape)).astype(dtype)
        return arrays[shape, dtype]

    def summary(results: Any) -> list[float]:
        return [float(jnp.abs(r.astype("float32")).sum()) for r in jax.tree.leaves(results)]

    programs, before = {}, {}
    for name, (made, p) in tried(device, every).items():
        given = [operand(*one) for one in made.operands(p).values()]
        compiled = jax.jit(lambda *args, made=made, p=p: made(p, *args)).lower(*given).compile()
        assert helpers.targets(compiled.as_text()), name
        programs[name] = compiled, given
        before[name] = summary(compiled(*given))
        assert all(map(math.isfinite, before[name])), name
    missing = {kernel.name for kernel in primitives.KERNELS.values()} - {name.split()[0] for name in programs}
    print(f"{len(programs)} programs; never so large: {sorted(missing) or 'none'}", flush=True)

    held = filled()
    print(
        f"memory is filled: {jax.devices()[0].memory_stats()['largest_free_block_bytes'] / MIB:.1f} MiB left",
        flush=True,
    )

    def outcome(name: str) -> str:
        compiled, given = programs[name]
        try:
            jax.block_until_ready(compiled(*given))
        except jax.errors.JaxRuntimeError as error:
            return "raises" if "RESOURCE_EXHAUSTED" in str(error) else f"raises something else: {error}"
        return "it fits"

    with concurrent.futures.ThreadPoolExecutor(len(programs)) as pool:
        outcomes = dict(zip(programs, pool.map(outcome, programs), strict=True))
    del held
    wrong = 0
    for name, (compiled, given) in programs.items():
        again = summary(compiled(*given)) == before[name]
        if outcomes[name] != "raises" or not again:
            print(f"{name}: {outcomes[name]}; afterwards {'the same' if again else 'OTHER'} results")
            wrong += 1
    print(f"{len(programs)} programs on {device.kind}: {wrong} did not raise, or gave other results afterwards")
    return 1 if wrong or not programs else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="each kernel by every algorithm")
    sys.exit(run(parser.parse_args().all))

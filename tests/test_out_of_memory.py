"""Where memory runs out a call is an error, and the process goes on. tests/out_of_memory.py has the GPU's part."""

from __future__ import annotations

import subprocess
import sys

import helpers
import out_of_memory
import pytest
from helpers import H200

from jaxconv._core import primitives


@pytest.mark.skipif(helpers.PLATFORM != "cuda", reason="a GPU's memory")
def test_every_call_raises_and_the_process_goes_on():
    command = [sys.executable, out_of_memory.__file__]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert " programs on " in done.stdout


def test_every_kernel_is_tried(code_for_gpus):
    """On a Hopper GPU: plans are data."""
    found = out_of_memory.tried(H200, every=False)
    assert set(found) == {kernel.name for kernel in primitives.KERNELS.values()}
    by_algorithm = {name.split()[1] for name in out_of_memory.tried(H200, every=True)}
    assert by_algorithm >= {"sm90", "implicit_gemm", "im2col", "direct", "depthwise", "grouped", "stem", "gemm"}
    assert by_algorithm >= {"two_read", "resident_team", "interleaved", "gather"}


# A weight gradient in parts: each of them is as large as the filter.
SCRATCH = """
import resource, sys
import jax, jax.numpy as jnp, numpy as np, jaxconv

def wgrad(x, dy, w):
    f = lambda w: jaxconv.conv2d(x, w, padding="SAME", implementation="native", algorithm="im2col")
    return jax.linear_transpose(f, w)(dy)[0]

x, dy = jnp.ones((32, 8, 8, 16)), jnp.ones((32, 8, 8, 4096))
w = jax.ShapeDtypeStruct((3, 3, 16, 4096), x.dtype)
large = jax.jit(lambda x, dy: wgrad(x, dy, w)).lower(x, dy).compile()
v = jax.ShapeDtypeStruct((3, 3, 4, 4), x.dtype)
small = jax.jit(lambda x, dy: wgrad(x, dy, v)).lower(x[..., :4], dy[..., :4]).compile()
given = x[..., :4], dy[..., :4]
want = np.asarray(small(*given))
mine = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mine + 32 * 2**20, resource.RLIM_INFINITY))
for _ in range(2):
    try:
        jax.block_until_ready(large(x, dy))
    except jax.errors.JaxRuntimeError as error:
        print(str(error).splitlines()[0])
    else:
        print("it fits")
    np.testing.assert_array_equal(np.asarray(small(*given)), want)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert float(large(x, dy)[1, 1].min()) == 32 * 8 * 8
print("and goes on")
"""


@pytest.mark.skipif(helpers.PLATFORM != "cpu" or sys.platform != "linux", reason="a process's memory, on Linux")
def test_scratch_memory_that_there_is_not_is_an_error_on_a_cpu():
    done = subprocess.run([sys.executable, "-c", SCRATCH], capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    *errors, last = done.stdout.splitlines()
    assert last == "and goes on" and len(errors) == 2
    assert all("cannot allocate" in error and "bytes of scratch memory" in error for error in errors)

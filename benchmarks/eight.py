"""`python -m benchmarks eight`: ResNet-50's convolutions in 8 bits, beside bfloat16 and PyTorch's products.

int8 to int8 with a bias of int32 and float8 to float8 with one of float32, a scale, relu and in layers that widen a
residual; in bfloat16 by jaxconv the same without scales. `torch._int_mm` and `torch._scaled_mm` (cuBLASLt) multiply
matrices of the same M, N and K, with nothing behind it; they are left out where there is no PyTorch with a GPU.

`--dense` times dense layers instead, of many rows and of few: the kernel and XLA's product, in int8, uint8 and float8,
and what the plan takes in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxconv
from jaxconv._tools import timing as _timing

# Pixels of a side of x, C, K, filter, stride, whether there is a residual
CASES = (
    (56, 64, 64, 3, 1, False),
    (28, 128, 128, 3, 1, False),
    (14, 256, 256, 3, 1, False),
    (7, 512, 512, 3, 1, False),
    (28, 256, 256, 3, 2, False),
    *((56, 256, 64, 1, 1, False), (28, 512, 128, 1, 1, False)),
    *((14, 1024, 256, 1, 1, False), (7, 2048, 512, 1, 1, False)),
    *((side, c, 4 * c, 1, 1, add) for add in (True, False) for side, c in ((56, 64), (28, 128), (14, 256), (7, 512))),
)
# Rows, K, N: ConvNeXt-T's and a ViT-B's layers at batch 256; of one image; of one row
DENSE = (
    *((256 * 3136, 96, 384), (256 * 3136, 384, 96), (256 * 196, 384, 1536), (256 * 49, 768, 3072)),
    *((256 * 197, 768, 3072), (256 * 197, 3072, 768), (256, 2048, 1024), (1024, 1024, 1024)),
    *((3136, 96, 384), (197, 768, 3072), (197, 3072, 768), (49, 768, 3072), (1, 768, 3072), (1, 4096, 4096)),
)


def drawn(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    key = jax.random.key(seed)
    if dtype in ("int8", "uint8"):
        info = jnp.iinfo(dtype)
        return jax.random.randint(key, shape, info.min, int(info.max) + 1, jnp.int32).astype(dtype)
    return jax.random.normal(key, shape, jnp.bfloat16).astype(dtype)


def programs(
    batch: int, case: tuple[int, int, int, int, int, bool], torch: Any
) -> tuple[dict[str, _timing.Program], float]:
    """By name; and multiplications and additions of one call."""
    side, c, k, f, stride, add = case
    out = -(-side // stride)
    m, depth = batch * out * out, f * f * c
    by_name: dict[str, _timing.Program] = {}
    count = 1
    for dtype in ("int8", "float8_e4m3fn", "bfloat16"):
        size = np.dtype(dtype).itemsize * (batch * side * side * c + m * k * (1 + add))
        count = _timing.set_count(size, jax.devices()[0])
        shapes = [(batch, side, side, c), *([(batch, out, out, k)] if add else [])]
        sets = [tuple(drawn(2 * i + j, shape, dtype) for j, shape in enumerate(shapes)) for i in range(count)]
        wide = dtype == "bfloat16"
        w, b = drawn(99, (f, f, c, k), dtype), jnp.full(k, 0.5, dtype if wide else "float32")
        if dtype == "int8":
            b = jnp.full(k, 25, jnp.int32)  # of sums, as jaxconv.freeze's
        narrow = dict(scale=jnp.full(k, 0.02 / math.sqrt(depth), jnp.float32), out_dtype=dtype)
        options: dict[str, Any] = {} if wide else narrow
        if add and not wide:
            options["residual_scale"] = 0.5
        if wide and jax.default_backend() == "gpu":
            options["implementation"] = "native"

        def run(x: jax.Array, r: Any = None, w: Any = w, b: Any = b, options: Any = options) -> jax.Array:
            return jaxconv.conv2d(x, w, b, residual=r, stride=stride, activation="relu", **options)

        by_name[dtype] = _timing.Program(jax.jit(run), sets)
    if torch is not None:

        def wait(_: Any) -> None:
            torch.cuda.synchronize()

        def products(name: str, multiply: Callable[..., Any], dtype: Any) -> None:
            def matrix(rows: int) -> Any:
                values = torch.randint(-128, 128, (rows, depth), dtype=torch.int8, device="cuda")
                return values if dtype is torch.int8 else values.float().div(64).to(dtype)

            w = matrix(k).t()
            sets = [(matrix(m),) for _ in range(max(1, count // (f * f)))]
            by_name[name] = _timing.Program(lambda x: multiply(x, w), sets, block=wait)

        one = torch.ones((), device="cuda")
        products("cuBLASLt int8", torch._int_mm, torch.int8)
        scaled = dict(scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=False)
        products("cuBLASLt float8", lambda x, w: torch._scaled_mm(x, w, **scaled), torch.float8_e4m3fn)
    for program in by_name.values():
        program.once()
    return by_name, 2.0 * m * k * depth


def dense_programs(m: int, k: int, n: int) -> dict[str, _timing.Program]:
    """By type and way, with a scale, a bias and relu, to x's type."""
    by_name: dict[str, _timing.Program] = {}
    native = ("native",) if jax.default_backend() == "gpu" else ()
    for dtype in ("int8", "uint8", "float8_e4m3fn", "bfloat16"):
        wide = dtype == "bfloat16"
        sets = _timing.set_count(np.dtype(dtype).itemsize * m * (k + n), jax.devices()[0])
        xs = [(drawn(i, (m, k), dtype),) for i in range(sets)]
        w = drawn(99, (k, n), "int8" if dtype == "uint8" else dtype)
        integers = dtype in ("int8", "uint8")
        b = jnp.full(n, 25, jnp.int32) if integers else jnp.full(n, 0.5, dtype if wide else "float32")
        options: dict[str, Any] = {} if wide else dict(scale=jnp.full(n, 0.02 / math.sqrt(k)), out_dtype=dtype)
        for way in (None,) if wide else (*native, "xla"):

            def run(x: jax.Array, w: Any = w, b: Any = b, options: Any = options, way: Any = way) -> jax.Array:
                return jaxconv.dense(x, w, b, activation="relu", implementation=way, **options)

            program = _timing.Program(jax.jit(run), xs)
            program.once()
            by_name[f"{dtype} {way}" if way else dtype] = program
    return by_name


def pytorch() -> Any:
    """The module, where it is installed and sees a GPU, or None."""
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks eight", description=__doc__.partition("\n")[0])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--cases", type=int, default=len(CASES), help="only so many of them")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--dense", action="store_true", help="dense layers, with batches of their own")
    options = parser.parse_args(arguments)
    torch, rows = pytorch(), []
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, PyTorch {getattr(torch, '__version__', 'none')}")
    for m, k, n in DENSE[: options.cases] if options.dense else ():
        times = _timing.measure(dense_programs(m, k, n), repeat=options.repeat, seconds=1.0)
        row = {name: timing.median_ms for name, timing in times.items()}
        rows.append({"case": f"{m}x{k}x{n}", "operations": 2.0 * m * k * n, **row})
        each = [f"{name} {ms * 1e3:.1f} us ({2.0 * m * k * n / ms / 1e9:.0f} T)" for name, ms in row.items()]
        print(f"{m}x{k}x{n}: " + ", ".join(each), flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
    for case in () if options.dense else CASES[: options.cases]:
        by_name, operations = programs(options.batch, case, torch)
        times = _timing.measure(by_name, repeat=options.repeat, seconds=1.0)
        side, c, k, f, stride, add = case
        text = f"{f}x{f} s{stride} {c}->{k} {side}x{side}" + " + residual" * add
        row = {name: timing.median_ms for name, timing in times.items()}
        rows.append({"case": text, "batch": options.batch, "operations": operations, **row})
        each = [f"{name} {ms * 1e3:.1f} us ({operations / ms / 1e9:.0f} T)" for name, ms in row.items()]
        print(f"{text}: " + ", ".join(each) + f"; bf16 / int8 {row['bfloat16'] / row['int8']:.2f}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0

"""Convolutions as implicit matrix products on tensor cores of any generation: cuda/conv/implicit_gemm."""

from __future__ import annotations

import math
from collections.abc import Iterator

from jaxconv._plan import domain
from jaxconv._plan.plan import Device, Plan, extent_of, itemsize, product_tile, splits_of
from jaxconv._problem import ConvProblem

TILES = ("128x128", "128x64", "64x64")
# Pixels of a weight gradient that one accumulator adds up. Tensor cores cut sums off, where all terms are positive by
# 7e-9 of them a pixel: this many are a sixteenth of the rounding of an operand or a result of so many bits.
LONGEST = {"bfloat16": 32768, "float16": 3072, "float32": 3072}
FOR_THAT_BYTES = 32 * 2**20  # of partial sums, at most: a large filter's are dearer than the pixels that they add up


def wants(op: str, p: ConvProblem, device: Device) -> Iterator[Plan]:
    p = domain.folded(p, op == "conv_dgrad")
    taps, pixels = math.prod(p.filter), math.prod(p.out_spatial)
    group_c, group_k = p.in_channels // p.groups, p.out_channels // p.groups
    vector = group_k * itemsize(p) % 16 == 0
    if op != "conv_wgrad":
        dgrad = op == "conv_dgrad"
        phases = math.prod(p.stride) if dgrad else 1
        rows = p.batch * math.prod(p.in_spatial if dgrad else p.out_spatial) // phases
        wanted = product_tile(rows, group_c if dgrad else group_k, p.groups * phases, vector)
        for tile in dict.fromkeys((wanted, *TILES)):
            yield Plan("native", "", "implicit_gemm", tile)
        return
    m, n = taps * group_c, group_k
    wanted = "64x64" if m <= 64 or not vector else "128x128" if n > 64 else "128x64"
    for tile in dict.fromkeys((wanted, *TILES)):
        rows, columns = extent_of(tile)
        blocks = -(-m // rows) * -(-n // columns) * p.groups
        bytes_each = p.out_channels * m * 4
        splits = splits_of(p.batch * pixels, blocks, device, 2, 256, bytes_each)
        short = -(-p.batch * pixels // LONGEST.get(p.dtype, 2**62))
        splits = max(splits, min(short, FOR_THAT_BYTES // max(bytes_each, 1), 65535))
        yield Plan("native", "", "implicit_gemm", tile, splits)

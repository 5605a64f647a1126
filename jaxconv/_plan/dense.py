"""Dense layers and products: cuda/dense. Which kernel and tile are wanted, and the parts of K."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxconv._core.activations import CHEAP
from jaxconv._plan import domain
from jaxconv._plan.plan import Candidate, Device, Plan, extent_of, itemsize, product_tile, splits_of
from jaxconv._plan.planner import CUDA_ONLY, NO_SUCH_KERNEL, Features, Planner, calls, log2, plans_of
from jaxconv._plan.sm90 import (
    CLUSTERS,
    PRODUCTS,
    by_l2,
    cluster_time,
    product_time,
    resident_tile,
    terms_of,
    tf32_tiles,
)
from jaxconv._problem import DENSE_ALGORITHMS, DenseProblem, family_of

GEMM_TILES = ("128x128", "128x64", "64x64")
GRADIENT = "sm90/gradient"  # the one kernel of dense_gradient
GRADIENT_TILES = ("128x256", "256x128", "128x128")
GATED = "sm90/gated"  # the one kernel of dense_gated
GATED_GRADIENT = "sm90/gated_gradient"  # the one kernel of dense_gated_gradient
GATED_GRADIENT_TILES = ("128x256", "256x128")
GATED_TILES = ("128x256", "128x128", "256x128")
# Rows up to which "sm90" is sm90/cluster: of more, sm90/rows was measured.
FEW = 16


def _clusters(p: DenseProblem, device: Device) -> list[tuple[str, str, int]]:
    """sm90/cluster's tiles and CTAs of a cluster, the fastest first."""
    steps, instances = -(-p.k * itemsize(p) // 128), p.batch or 1
    times = {tile: cluster_time(tile, p.m, p.n, steps, instances, device, True) for tile in CLUSTERS}
    return [("cluster", tile, times[tile][1]) for tile in sorted(CLUSTERS, key=lambda tile: times[tile][0])]


def _sm90(p: DenseProblem, device: Device) -> Iterator[tuple[str, str, int]]:
    """(kernel, tile, parts of K), as measured on an H200 (docs/kernels/dense.md)."""
    if terms_of(p) > 1:
        yield "product", "128x64" if p.n <= 64 else "128x128", 1
        return
    steps, instances = -(-p.k * itemsize(p) // 128), p.batch or 1
    if p.m * instances <= FEW and not p.trans_x:
        yield _clusters(p, device)[0]
    if p.dtype != "float32" and not p.trans_x:
        # Few rows: parts of K, so that every multiprocessor fetches a share of w.
        parts = min(device.sm_count // max(-(-p.m // 64) * -(-p.n // 128) * instances, 1), steps // 4)
        if parts > 1:
            yield "rows", "64x128", parts
        resident = resident_tile(p.m, p.n, p.k, instances, device)
        if resident:
            yield "resident", resident, 1
    if p.n <= 64:
        yield "product", "256x64", 1
    single = p.dtype == "float32"
    if single and by_l2(device):
        yield from (("product", tile, 1) for tile in tf32_tiles(p.n, p.m, steps, instances, False, device))
        return
    shows = 0.5 if single else 1.7 if p.activation.name in ("none", "relu") else 4

    def time(tile: str) -> float:
        z = p.save_preactivation
        return product_time(tile, p.m, p.n, steps, instances, z, device, shows + (1.5 if z else 0))

    for tile in sorted(("128x128", "128x256"), key=time):
        yield "product", tile, 1


def _gradient_tiles(p: DenseProblem) -> list[str]:
    """Those of sm90/gradient, the fastest first as measured on an H200: which it is depends on f' and K."""
    if p.activation.name in ("none", "relu", "relu6", "leaky_relu"):
        first = "128x128"
    else:
        first = "256x128" if p.k <= 256 else "128x256"
    return sorted(GRADIENT_TILES, key=lambda tile: tile != first)


def _gated_tiles(p: DenseProblem) -> list[str]:
    """Those of sm90/gated, the fastest first as measured on an H100 (docs/kernels/dense.md).

    128x128 hides its epilogue behind the other group's products. A long reduction is bound by what a tile fetches.
    """
    first = "128x256" if p.k > 1536 else "128x128"
    return sorted(GATED_TILES, key=lambda tile: tile != first)


def wants(op: str, algorithm: str, p: DenseProblem, device: Device) -> Iterator[Plan]:
    if op == "dense_gated":
        if algorithm == "sm90":
            yield from (Plan("native", "", GATED, tile) for tile in _gated_tiles(p))
        return
    if op == "dense_gated_gradient":
        if algorithm == "sm90":
            tiles = GATED_GRADIENT_TILES[:: -1 if p.k <= 256 else 1]  # as dense_gradient's
            yield from (Plan("native", "", GATED_GRADIENT, tile) for tile in tiles)
        return
    if op == "dense_gradient":
        if algorithm == "sm90":
            yield from (Plan("native", "", GRADIENT, tile) for tile in _gradient_tiles(p))
        return
    if algorithm == "sm90":
        for kernel, tile, splits in _sm90(p, device):
            yield Plan("native", "", f"sm90/{kernel}", tile, splits)
        for kernel, tile in PRODUCTS:
            yield Plan("native", "", f"sm90/{kernel}", tile)
        yield Plan("native", "", "sm90/rows", "64x128", min(3, -(-p.k // 64)))
        for kernel, tile, splits in _clusters(p, device):
            yield Plan("native", "", f"sm90/{kernel}", tile, splits)
        return
    batch = p.batch or 1
    if device.platform == "cpu":
        yield Plan("native", "", "gemm")
        return
    runs = p.m if p.trans_x else p.k, p.k if p.trans_w else p.n  # elements, contiguous
    wanted = product_tile(p.m, p.n, batch, all(run * itemsize(p) % 16 == 0 for run in runs))
    for tile in dict.fromkeys((wanted, *GEMM_TILES)):
        rows, columns = extent_of(tile)
        blocks = -(-p.m // rows) * -(-p.n // columns) * batch
        # Splitting pays where the tiles leave most multiprocessors idle and the reduction is long.
        idle = 2 * blocks <= device.sm_count
        splits = splits_of(p.k, blocks, device, 1, 256, batch * p.m * p.n * 4) if idle else 1
        yield Plan("native", "", "gemm", tile, splits)


class Dense(Planner):
    group = "dense"
    algorithms = DENSE_ALGORITHMS
    independent = (True, True, False, False)

    def made(self, algorithm: str, p: DenseProblem, device: Device) -> Plan | str:
        if algorithm.startswith("sm90") and device.platform == "cpu":
            return CUDA_ONLY
        why = NO_SUCH_KERNEL
        for wanted in wants(self.op, family_of(algorithm), p, device):
            if wanted.answers(algorithm):
                cpu = device.platform == "cpu"  # which owns its scratch
                refused = None if cpu else domain.dense_refusal(wanted, p, device)
                if refused is None:
                    size = 0 if cpu else domain.dense_workspace(wanted, p)
                    return dataclasses.replace(wanted, workspace_bytes=size)
                why = refused
        return why

    def every(self, p: DenseProblem, device: Device) -> Iterator[Plan]:
        """Of each family, and of sm90/cluster where it is not sm90's first."""
        by_kernel: dict[str, Plan] = {}
        for plan in plans_of(self.made(algorithm, p, device) for algorithm in (*DENSE_ALGORITHMS, "sm90/cluster")):
            by_kernel.setdefault(plan.kernel, plan)
        yield from by_kernel.values()

    def tiles(self, p: DenseProblem, device: Device) -> Iterator[Plan]:
        for family in DENSE_ALGORITHMS:
            specs = dict.fromkeys(wanted.spec for wanted in wants(self.op, family, p, device))
            yield from plans_of(self.made(spec, p, device) for spec in specs)

    def first(self, p: DenseProblem, device: Device) -> str:
        return "gemm"

    def extents(self, p: DenseProblem) -> Sequence[Any]:
        return p.m, p.n, p.k, 1 if p.batch is None else p.batch

    def on_cpu(self, p: DenseProblem) -> tuple[str | None, str]:
        return None, "XLA's matrix products are as fast as the CPU allows"

    def features(self, p: DenseProblem) -> Features:
        """Coordinates: instances, M, K, N."""
        fused = p.bias is not None or p.addend or p.activation.name != "none"
        name = p.activation.name  # gelu may win where relu, or a tanh that costs more, does not
        epilogue = "bare" if not fused else "cheap" if name in CHEAP else name
        full, aligned = p.dtype == "float32" and p.full_float32, p.k % 8 == 0 and p.n % 8 == 0
        kind = p.dtype, full, p.trans_x, p.trans_w, epilogue, aligned
        return "dense", kind, log2(p.batch or 1, p.m, p.k, p.n)


class OneKernel(Dense):
    """An op of one kernel, on GPUs alone, that does what else are several calls: the dense layer has a plan of its own
    then."""

    kernel: str
    several: Callable[..., Plan]  # the plan of several calls

    def made(self, algorithm: str, p: DenseProblem, device: Device) -> Plan | str:
        return super().made(algorithm, p, device) if p.alpha == 1.0 else f"it takes alpha 1, got {p.alpha}"

    def first(self, p: DenseProblem, device: Device) -> str:
        return "sm90"

    def no_kernels(self, p: DenseProblem, platform: str) -> str | None:
        return super().no_kernels(p, platform) or (CUDA_ONLY if platform == "cpu" else None)

    def instead(self, why: str, candidates: tuple[Candidate, ...] = ()) -> Plan:
        return self.several(why, candidates)

    def cannot(self, p: DenseProblem, why: str, algorithm: str = "") -> Plan:
        if p.algorithm is None:
            return self.instead(why)
        if p.algorithm.partition(" ")[0] == self.kernel:
            return super().cannot(p, why, p.algorithm)
        return self.instead(f"algorithm='{p.algorithm}' was asked for, and it cannot do all in one kernel: {why}")


class DenseGradient(OneKernel):
    """A product that goes back through the activation and sums up on its way."""

    kernel = GRADIENT
    several = staticmethod(calls("three", "a product, then the activation's derivative and a sum"))

    def features(self, p: DenseProblem) -> Features:
        _, kind, coordinates = super().features(p)
        return "dense_gradient", kind, coordinates


class DenseGated(OneKernel):
    """A dense layer whose gate is behind its sums. A bias costs nothing there."""

    kernel = GATED
    several = staticmethod(calls("two", "a dense layer, then its gate"))

    def features(self, p: DenseProblem) -> Features:
        """Whether z is written counts: XLA writes it in any case."""
        _, (dtype, full, *stored, _, aligned), coordinates = super().features(p)
        f = "cheap" if p.activation.name in CHEAP else p.activation.name
        return "dense_gated", (dtype, full, *stored, f, aligned, p.save_preactivation), coordinates


class DenseGatedGradient(OneKernel):
    """A product that goes back through a gate and sums up on its way."""

    kernel = GATED_GRADIENT
    several = staticmethod(calls("three", "a product, then the gate's derivative and a sum"))

    def features(self, p: DenseProblem) -> Features:
        _, kind, coordinates = super().features(p)
        return "dense_gated_gradient", kind, coordinates

"""Dense layers and products: cuda/dense. Which kernel and tile are wanted, and the parts of K."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jaxconv._plan import domain
from jaxconv._plan.plan import Device, Plan, extent_of, itemsize, product_tile, splits_of
from jaxconv._plan.sm90 import CLUSTERS, PRODUCTS, cluster_time, product_time, resident_tile, terms_of
from jaxconv._problem import DENSE_ALGORITHMS, DenseProblem, family_of

GEMM_TILES = ("128x128", "128x64", "64x64")
GRADIENT = "sm90/gradient"  # the one kernel of dense_gradient
GRADIENT_TILES = ("128x256", "256x128", "128x128")
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
    shows = 0.5 if p.dtype == "float32" else 1.7 if p.activation.name in ("none", "relu") else 4

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


def wants(op: str, algorithm: str, p: DenseProblem, device: Device) -> Iterator[Plan]:
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


def made(op: str, algorithm: str, p: DenseProblem, device: Device) -> Plan | str:
    """The plan by the family or kernel that `algorithm` names, or the sentence that says why there is none."""
    if algorithm.startswith("sm90") and device.platform == "cpu":
        return "it exists on CUDA only"
    if op == "dense_gradient" and p.alpha != 1.0:
        return f"it takes alpha 1, got {p.alpha}"
    why = "there is no such kernel"
    for wanted in wants(op, family_of(algorithm), p, device):
        if wanted.answers(algorithm):
            cpu = device.platform == "cpu"  # which owns its scratch
            refused = None if cpu else domain.dense_refusal(wanted, p, device)
            if refused is None:
                size = 0 if cpu else domain.dense_workspace(wanted, p)
                return dataclasses.replace(wanted, workspace_bytes=size)
            why = refused
    return why


def kernels(op: str, p: DenseProblem, device: Device) -> Iterator[Plan]:
    """A plan for each family that can run p, and for sm90/cluster where it is not sm90's first."""
    seen: set[str] = set()
    for algorithm in (*DENSE_ALGORITHMS, "sm90/cluster"):
        plan = made(op, algorithm, p, device)
        if isinstance(plan, Plan) and plan.kernel not in seen:
            seen.add(plan.kernel)
            yield plan


def every(op: str, p: DenseProblem, device: Device) -> Iterator[Plan]:
    """A plan for each kernel and tile that can run op of p, of a family those that it wants most first."""
    for family in DENSE_ALGORITHMS:
        specs = dict.fromkeys(wanted.spec for wanted in wants(op, family, p, device))
        plans = (made(op, spec, p, device) for spec in specs)
        yield from (plan for plan in plans if isinstance(plan, Plan))

"""Dense layers and products: cuda/dense."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jaxconv._plan import sm90
from jaxconv._plan.plan import Device, Plan, extent_of, itemsize, product_tile, splits_of
from jaxconv._plan.sm90 import resident_tile, terms_of, wgmma_refusal, wgmma_time, wgmma_workspace
from jaxconv._problem import DenseProblem


def wgmma_dense_refusal(p: DenseProblem, device: Device) -> str | None:
    """cuda/dense/sm90.h."""
    refusal = wgmma_refusal(p, device)
    if refusal:
        return refusal
    if p.addend and p.dtype == "float32":
        return "in float32 it takes no addend"
    if p.trans_x and p.trans_w:
        return "it does not take both operands transposed"
    if p.n % 8 or (p.m if p.trans_x else p.k) % 8 or (p.k if p.trans_w else p.n) % 8:
        return "it needs rows of x, w and y of a multiple of 8 elements"
    if p.dtype == "float32" and not p.full_float32 and p.k % 8:
        return f"in TF32 it needs K to be a multiple of 8, got {p.k}"
    return None


def wgmma_dense_tile(p: DenseProblem, device: Device) -> tuple[str, int]:
    """(tile, parts of K), as measured on an H200 (docs/performance.md)."""
    if terms_of(p) > 1:
        return "128x64" if p.n <= 64 else "128x128", 1
    steps, instances = -(-p.k * itemsize(p) // 128), p.batch or 1
    if p.dtype != "float32" and not p.trans_x:
        # Few rows: parts of K, so that every multiprocessor fetches a share of w.
        parts = min(device.sm_count // max(-(-p.m // 64) * -(-p.n // 128) * instances, 1), steps // 4)
        if parts > 1:
            return "64x128", parts
        resident = resident_tile(p.m, p.n, p.k, instances, device)
        if resident:
            return resident, 1
    if p.n <= 64:
        return "256x64", 1
    shows = 0.5 if p.dtype == "float32" else 1.7 if p.activation.name in ("none", "relu") else 4

    def time(tile: str) -> float:
        z = p.save_preactivation
        return wgmma_time(tile, p.m, p.n, steps, instances, z, device, shows + (1.5 if z else 0))

    return min(("128x128", "128x256"), key=time), 1


def size_of(tile: str) -> str:
    return tile.rstrip("srp")


def wants(algorithm: str, p: DenseProblem, device: Device) -> Iterator[Plan]:
    if algorithm == "sm90":
        if wgmma_dense_refusal(p, device):
            yield Plan("native", "", "sm90/product", "128x128")
            return
        tile, splits = wgmma_dense_tile(p, device)
        yield Plan("native", "", *sm90.named("dense", p, tile), splits=splits)
        return
    batch = p.batch or 1
    if device.platform == "cpu":
        yield Plan("native", "", "gemm")
        return
    runs = p.m if p.trans_x else p.k, p.k if p.trans_w else p.n  # elements, contiguous
    tile = product_tile(p.m, p.n, batch, all(run * itemsize(p) % 16 == 0 for run in runs))
    rows, columns = extent_of(tile)
    blocks = -(-p.m // rows) * -(-p.n // columns) * batch
    # Splitting pays where the tiles leave most multiprocessors idle and the reduction is long.
    splits = 1 if 2 * blocks > device.sm_count else splits_of(p.k, blocks, device, 1, 256, batch * p.m * p.n * 4)
    yield Plan("native", "", "gemm", tile, splits)


def made(algorithm: str, p: DenseProblem, device: Device) -> Plan | str:
    """The plan by the family or kernel that `algorithm` names, or the sentence that says why there is none."""
    if algorithm.startswith("sm90") and device.platform == "cpu":
        return "it exists on CUDA only"
    why = "there is no such kernel"
    for wanted in wants(algorithm.partition(" ")[0].partition("/")[0], p, device):
        if wanted.answers(algorithm):
            refused = refusal(wanted, p, device)
            if refused is None:
                size = workspace(wanted, p) if device.platform != "cpu" else 0
                return dataclasses.replace(wanted, workspace_bytes=size)
            why = refused
    return why


def refusal(plan: Plan, p: DenseProblem, device: Device) -> str | None:
    return wgmma_dense_refusal(p, device) if plan.algorithm == "sm90" else None


def workspace(plan: Plan, p: DenseProblem) -> int:
    """Bytes."""
    if plan.algorithm != "gemm":
        return wgmma_workspace("dense", p, sm90.legacy(plan.kernel, plan.tile), plan.splits)
    return plan.splits * (p.batch or 1) * p.m * p.n * 4 if plan.splits > 1 else 0

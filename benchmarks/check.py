"""Is a result right? Each is compared with a float64 evaluation that shares no code with what is measured.

The ops' modules have these references and what correct code may be off by. It runs on the default device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from benchmarks.ops.base import Array, Arrays, Case, Rounding

UNIT_ROUNDOFF = {"bf16": 2.0**-8, "f16": 2.0**-11, "f32": 2.0**-24}


@dataclasses.dataclass(frozen=True)
class Verdict:
    error: float  # the largest of all results' errors, relative to its tolerance's scale
    tolerance: float
    result: str  # the result that is worst

    @property
    def right(self) -> bool:
        return self.error <= self.tolerance  # false for NaN

    def __str__(self) -> str:
        return f"{self.error:.1e} of {self.tolerance:.1e}"


def check(
    case: Case,
    pass_: str,
    dtype: str,
    precision: str | None,
    channels_last: bool,
    arrays: Arrays,
    outs: Sequence[Array | None],
) -> Verdict:
    """Compares `outs`, in the order of `Case.results` (None: not compared), with the reference."""
    with jax.enable_x64(True):
        reference = case.reference(pass_, channels_last, arrays, outs[0])
        verdicts = []
        for name, out in zip(case.results[pass_], outs, strict=True):
            if out is None:
                continue
            ref, skip = reference[name]
            if out.shape != ref.shape:
                raise AssertionError(f"{case.name} {pass_}: {name} has shape {out.shape}, expected {ref.shape}")
            norm, largest = map(float, _errors(out, ref, skip))
            tol = tolerance(case, pass_, name, dtype, precision)
            # Rounding errors are near normal: of 1e9 elements none is beyond 6.2 deviations, so 8 tolerances (each at
            # least twice the deviation) hold for every element, and a wrong element is far outside.
            error = math.nan if math.isnan(norm) or math.isnan(largest) else max(norm, largest / 8)
            verdicts.append(Verdict(error, tol, name))
    wrong = [v for v in verdicts if not v.right]
    return wrong[0] if wrong else max(verdicts, key=lambda v: v.error / v.tolerance)


@jax.jit
def _errors(out: Array, ref: Array, skip: Array | None) -> tuple[Array, Array]:
    """(|out - ref| / |ref|, the largest |out - ref| / (|ref| + rms(ref)) of an element)."""
    difference = jnp.abs(out.astype(ref.dtype) - ref)
    if skip is not None:
        difference = jnp.where(skip & ~jnp.isnan(difference), 0, difference)
    square = jnp.mean(ref * ref)
    return jnp.sqrt(jnp.mean(difference * difference) / square), jnp.max(difference / (jnp.abs(ref) + jnp.sqrt(square)))


def tolerance(case: Case, pass_: str, result: str, dtype: str, precision: str | None) -> float:
    """Twice the relative error (in the norm) that correct code may have.

    A sum of n products of random sign: rounding to nearest adds u32 sqrt(n) at most; matrix units truncate, once per 16
    terms at least, which is a bias of 2^-23 of the partial sum, a third of the last one on average over the sum. TF32
    keeps 10 bits of each operand, cut off. On a CPU nothing is cut. Results are rounded to their dtype.
    """
    u, u32 = UNIT_ROUNDOFF[dtype], UNIT_ROUNDOFF["f32"]
    matrix_units = jax.default_backend() != "cpu" and not (dtype == "f32" and precision == "highest")

    def product(n: int) -> float:
        error = u32 * math.sqrt(n)
        if matrix_units:
            error += n / 16 * 2.0**-23 / 3 + (2.0**-10 if dtype == "f32" else 0)
        elif dtype == "f32":
            # Winograd and FFT algorithms, which a library may pick, lose up to 9 bits; TF32 would lose 13.
            error = max(error, u32 * 2**9)
        return error

    return case.tolerance(pass_, result, Rounding(u, u32, product))

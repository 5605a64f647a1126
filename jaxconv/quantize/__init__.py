"""Post-training quantisation of a frozen program: `freeze(..., quantize=, calibrate=)`.

The program is read as a graph (layers), of which some values are stored in 8 bits (program), with scales that the
calibration batches give (calibrate, scales). The new program is plain: filters become 8-bit ones in it, by arithmetic
on the bound arrays, which freeze then does once as it does any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr

from jaxconv._core.graph import Array
from jaxconv.quantize.calibrate import (
    Program,
    QuantizedDType,
    as_inputs,
    calibrated,
    check_options,
    check_weights,
    checked,
)
from jaxconv.quantize.layers import Reading, identity_of
from jaxconv.quantize.program import FILTER_BIAS, FILTER_OF, FILTER_SCALE, Narrowing
from jaxconv.quantize.report import Quantization, QuantizedLayer

__all__ = [
    "FILTER_BIAS",
    "FILTER_OF",
    "FILTER_SCALE",
    "Program",
    "Quantization",
    "QuantizedDType",
    "QuantizedLayer",
    "as_inputs",
    "check_options",
    "check_weights",
    "checked",
    "quantization",
    "rewritten",
]


def quantization(
    dtype: str,
    wide: Sequence[str],
    batches: Sequence[Any],
    program_of: Callable[[Any], tuple[Program, list[Array]]],
    bound: Sequence[Array],
) -> Quantization:
    """Which layers have 8 bits, and the scales. `program_of`: a batch's program and its arrays."""
    return Quantization(dtype, *calibrated(dtype, wide, batches, program_of, bound))


def rewritten(program: Program, chosen: Quantization) -> ClosedJaxpr:
    """The program in 8 bits, as it was chosen for one whose inputs may have other shapes.

    Raises:
      ValueError: where it has other layers than that one.
    """
    reading = Reading(program.closed, program.bound, program.names)
    if reading.empty:  # no layer has anything to compute
        return program.closed
    layers, expected = list(map(identity_of, reading.layers)), list(map(identity_of, chosen))
    if layers != expected:
        raise ValueError(
            f"freeze: for such inputs the function has other layers ({len(layers)}) than for the calibration batches "
            f"({len(expected)}), expected the same: calibrate with inputs like these"
        )
    for layer, record in zip(reading.layers, chosen, strict=True):
        layer.why = "" if record.narrow else record.why
    narrowing = Narrowing(reading)
    if len(narrowing.points) != len(chosen.scales):
        raise ValueError(
            f"freeze: for such inputs {len(narrowing.points)} arrays would have 8 bits, expected {len(chosen.scales)} "
            "as on the calibration batches: calibrate with inputs like these"
        )
    return narrowing.program(chosen.scales, program.closed)

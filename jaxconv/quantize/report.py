"""What became of each layer of a quantised program."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from jaxconv.quantize.scales import Scale


@dataclasses.dataclass(frozen=True)
class QuantizedLayer:
    """A layer of a quantised program, in 8 bits or wide."""

    name: str  # its name scopes, else that of its weight: what `wide` takes
    what: str  # "conv", "dense", "squeeze_excite"
    weight: str  # the bound array that its filter is of
    filter: tuple[int, ...]
    narrow: bool  # whether it has 8 bits
    dtype: str  # of what it reads
    out_dtype: str  # of its result
    # Of its result on the first calibration batch, against the wide program's: all 8-bit layers before it count. In dB,
    # 10 log10(sum of squares / sum of squared errors); infinite where nothing is off. Of a layer in a loop or a branch
    # it is of the first result of that.
    signal_to_noise: float
    why: str


class Quantization(list[QuantizedLayer]):
    """The layers of a quantised program in order: a list that prints as a table, with `dtype` and `scales`."""

    def __init__(self, dtype: str, layers: Iterable[QuantizedLayer], scales: Sequence[Scale]):
        super().__init__(layers)
        self.dtype = dtype
        self.scales = tuple(scales)  # of what is stored in 8 bits, in the program's order

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return Quantization, (self.dtype, list(self), self.scales)

    @property
    def narrow(self) -> list[QuantizedLayer]:
        return [layer for layer in self if layer.narrow]

    @property
    def summary(self) -> str:
        return f"{self.dtype}: {len(self.narrow)} of {len(self)} layers have 8 bits"

    def __str__(self) -> str:
        rows = [("layer", "operation", "type", "signal/noise", "why")]
        for layer in self:
            ratio = "-" if math.isinf(layer.signal_to_noise) else f"{layer.signal_to_noise:.1f} dB"
            operation = f"{layer.what} {list(layer.filter)}"
            rows.append((layer.name, operation, f"{layer.dtype} -> {layer.out_dtype}", ratio, layer.why))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, self.summary])

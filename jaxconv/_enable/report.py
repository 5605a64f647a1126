"""What became of the convolutions of the programs that were compiled while `enable` was on."""

from __future__ import annotations

import dataclasses
import threading


@dataclasses.dataclass(frozen=True)
class Convolution:
    """One of lax's convolutions, and equal ones beside it."""

    form: str  # "fprop", "dgrad", "wgrad", "integers", "float8"; "conv" where it is none of these
    problem: str  # as it prints in `explain`, or the types of lax's operands
    became: str  # the plan of jaxconv's call: "native[im2col]"; "lax": left as it was
    why: str
    where: tuple[str, ...] = ()  # the name scopes: for Flax the modules' paths
    count: int = 1

    @property
    def taken(self) -> bool:
        return self.became != "lax"


class Convolutions(list[Convolution]):
    """A list of convolutions that prints as a table. `note`: a remark about all of them."""

    note: str = ""

    @property
    def taken(self) -> list[Convolution]:
        return [one for one in self if one.taken]

    @property
    def left(self) -> list[Convolution]:
        return [one for one in self if not one.taken]

    def __str__(self) -> str:
        if not self:
            return f"no convolutions{self.note and f': {self.note}'}"
        rows = [("count", "form", "problem", "became", "why", "where")]
        for one in self:
            where = (
                one.where[0] + (f" and {len(one.where) - 1} more" if len(one.where) > 1 else "") if one.where else "-"
            )
            rows.append((str(one.count), one.form, one.problem, one.became, one.why, where))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        taken, left = (sum(one.count for one in some) for some in (self.taken, self.left))
        return "\n".join([*lines, f"{taken} taken, {left} left to lax", *([self.note] if self.note else [])])


class Record:
    """Counts convolutions, equal ones together, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[Convolution, tuple[int, dict[str, None]]] = {}  # count, scopes in order

    def add(self, one: Convolution) -> None:
        key = dataclasses.replace(one, where=(), count=1)
        with self._lock:
            count, where = self._found.get(key, (0, {}))
            where.update(dict.fromkeys(one.where))
            self._found[key] = count + one.count, where

    def read(self, clear: bool = False) -> Convolutions:
        with self._lock:
            found = self._found
            counted = Convolutions(
                dataclasses.replace(key, count=count, where=tuple(where)) for key, (count, where) in found.items()
            )
            if clear:
                self._found = {}
        return counted

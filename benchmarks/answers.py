"""A program that answers one batch, whoever compiled it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxconv._tools import launches as _launches


@dataclasses.dataclass
class Answers:
    """A program that answers one batch."""

    way: str
    call: Callable[[], Any]  # starts a call
    wait: Callable[[Any], Any]
    take: Callable[[Any], np.ndarray]  # its answers
    trace_s: float
    compile_s: float
    launches: _launches.Launches | None = None
    memory_bytes: int | None = None

    @classmethod
    def of_jax(cls, way: str, f: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Answers:
        begin = time.perf_counter()
        lowered = jax.jit(f).lower(*args)
        traced = time.perf_counter()
        compiled, launches = _launches.compiled(lowered, options)
        compile_s = time.perf_counter() - traced
        args = jax.device_put(args)
        jax.block_until_ready(compiled(*args))
        memory = compiled.memory_analysis()
        names = ("argument", "output", "temp", "generated_code")
        size = sum(getattr(memory, f"{name}_size_in_bytes") for name in names) if memory is not None else None
        return cls(
            way,
            lambda: compiled(*args),
            jax.block_until_ready,
            lambda y: np.asarray(y, np.float64),
            traced - begin,
            compile_s,
            launches,
            size,
        )

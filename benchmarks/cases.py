"""The problems that are measured and tested: the table of ops, and how cases are named."""

from __future__ import annotations

import fnmatch

from benchmarks.ops import (
    avg_pool,
    batchnorm,
    batchnorm_conv,
    batchnorm_shortcut,
    conv_batchnorm,
    conv_cases,
    conv_dgrad_sums,
    conv_gradient,
    conv_norm_gradient,
    conv_pooled,
    conv_shortcut,
    dense,
    dense_gated,
    dense_gated_gradient,
    dense_gradient,
    groupnorm,
    layernorm,
    pool,
    squeeze_excite,
)
from benchmarks.ops.base import Case

_OPS: tuple[tuple[Case, ...], ...] = (
    conv_cases.CASES,
    dense.CASES,
    dense_gated.CASES,
    dense_gated_gradient.CASES,
    dense_gradient.CASES,
    batchnorm.CASES,
    batchnorm_shortcut.CASES,
    conv_batchnorm.CASES,
    batchnorm_conv.CASES,
    conv_dgrad_sums.CASES,
    conv_gradient.CASES,
    conv_norm_gradient.CASES,
    conv_pooled.CASES,
    conv_shortcut.CASES,
    pool.CASES,
    avg_pool.CASES,
    groupnorm.CASES,
    layernorm.CASES,
    squeeze_excite.CASES,
)
BY_OP = {cases[0].op: cases for cases in _OPS}
OPS: dict[str, type[Case]] = {op: type(cases[0]) for op, cases in BY_OP.items()}
SUITES = ("core", "special", "models", "cpu", "threads", "serve")


def select(op: str, pattern: str = "*", suites: tuple[str, ...] = SUITES[:2]) -> list[Case]:
    """The cases of `op` whose name matches one of `pattern`'s comma-separated globs."""
    globs = pattern.split(",")
    return [c for c in BY_OP[op] if c.suite in suites and any(fnmatch.fnmatchcase(c.name, g) for g in globs)]

"""What says that a function is a model in training.

Statistics over axis 0 alone do not: a volume without a batch axis is normalised by its own, and so is a series of
times and channels. What does is a call of jaxconv's with training=True, running averages that the statistics go into,
or a name.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jaxconv._core import primitives
from jaxconv.accelerate.rewrite import data_inside

_CALL = "jaxconv_batchnorm_train"
# "BatchNorm_0", "SyncBatchNorm", "batch_normalization_3"; "bn1", "conv_bn", "BN_0"; "ConvBN", "BNReLU".
_BATCHNORM = re.compile(r"(?i:batch[_-]?norm(?!al(?!i[sz])))|(?i:(?<![a-z])bn(?![a-z]))|(?<![A-Z])BN(?![a-z])")
# What changes a statistic's shape, type or place alone.
_RENAMED = ("broadcast_in_dim", "convert_element_type", "copy", "psum", "reshape", "squeeze", "stop_gradient")
_OTHER_NORM = re.compile(r"(?i:(layer|group|instance|rms|weight)[_-]?norm)")


def says_batchnorm(scopes: str) -> bool:
    """Whether name scopes, as "Model/BatchNorm_0", are those of a batch-norm: the innermost that names a norm says so.

    A norm of another kind inside a "ConvBN" is none.
    """
    for scope in reversed(scopes.split("/")):
        if _BATCHNORM.search(scope):
            return True
        if _OTHER_NORM.search(scope):
            return False
    return False


@dataclasses.dataclass(frozen=True)
class Evidence:
    calls: list[str]  # scopes of jaxconv's batch-norms with training=True, of data
    by_accelerate: list[str]  # of those that an accelerated function inside makes of what somebody wrote
    averages: list[str]  # where a bound array and a mean of data over axis 0 become a running average


def evidence(jaxpr: Jaxpr, bound: Sequence[bool]) -> Evidence:
    """`bound`: which of the arguments are weights; the others are data."""
    found = Evidence([], [], [])
    _Reading(jaxpr, bound, [not is_bound for is_bound in bound], "", found)
    return found


class _Reading:
    """One jaxpr, those inside it included."""

    def __init__(self, jaxpr: Jaxpr, weights: Sequence[bool], data: Sequence[bool], around: str, found: Evidence):
        self._made_by: dict[Any, JaxprEqn] = {}
        self._weights = {v for v, is_weight in zip(jaxpr.invars, weights, strict=True) if is_weight}
        self._weights.update(jaxpr.constvars)
        self._data = {v for v, is_data in zip(jaxpr.invars, data, strict=True) if is_data}
        for eqn in jaxpr.eqns:
            scopes = f"{around}/{eqn.source_info.name_stack}".strip("/")
            operands = [v for v in eqn.invars if not isinstance(v, Literal)]
            for kind in (self._weights, self._data):
                if not kind.isdisjoint(operands):
                    kind.update(eqn.outvars)
            self._made_by.update(dict.fromkeys(eqn.outvars, eqn))
            if eqn.primitive.name == _CALL:
                if eqn.invars[0] in self._data:
                    (found.by_accelerate if self._is_accelerates(eqn) else found.calls).append(scopes)
                continue
            if eqn.primitive.name in ("add", "sub") and self._is_running_average(eqn.outvars[0]):
                found.averages.append(scopes)
            for inner in primitives.inner_jaxprs(eqn):
                inside = [self._inside(eqn, inner, kind) for kind in (self._weights, self._data)]
                _Reading(inner, *inside, scopes, found)

    def _inside(self, eqn: JaxprEqn, inner: Jaxpr, kind: set[Any]) -> list[bool]:
        are = [not isinstance(v, Literal) and v in kind for v in eqn.invars]
        is_condition = eqn.primitive.name == "while" and inner is eqn.params["cond_jaxpr"].jaxpr
        known = data_inside(eqn, are, len(inner.invars), is_condition)
        return [True] * len(inner.invars) if known is None else known

    def _is_accelerates(self, eqn: JaxprEqn) -> bool:
        """Whether nobody wrote the call: `accelerate` makes it without running statistics, of zeros."""
        return eqn.params["problem"].momentum == 0 and self._weights.isdisjoint(eqn.invars[3:4])

    def _is_running_average(self, v: Any) -> bool:
        """Whether v is m * w + n * mean, 0 < m < 1, 0 < n: w is made of weights, mean is that of data over axis 0."""
        if v not in self._data or v not in self._weights or not v.aval.shape:
            return False
        terms = self._terms(v)
        if terms is None or len(terms) != 2:
            return False
        for (w, m), (mean, n) in (list(terms.items()), list(terms.items())[::-1]):
            if w in self._weights and w not in self._data and 0 < m < 1 and n > 0 and self._is_over_axis_0(mean):
                return True
        return False

    def _terms(self, v: Any, depth: int = 12) -> dict[Any, float] | None:
        """v as numbers times at most two values; None where it is none or of more. So many operations are read."""
        if isinstance(v, Literal):
            return None
        eqn = self._made_by.get(v)
        if eqn is None or depth == 0:
            return {v: 1.0}
        if eqn.primitive.name in ("add", "sub"):
            sign = 1 if eqn.primitive.name == "add" else -1
            a, b = (self._terms(u, depth - 1) for u in eqn.invars)
            if a is None or b is None:
                return None
            total = {u: a.get(u, 0) + sign * b.get(u, 0) for u in (*a, *b)}
            return total if len(total) <= 2 else None
        step = self._step(v)
        if step is None:
            return {v: 1.0}
        source, factor = step
        terms = self._terms(source, depth - 1)
        return None if terms is None else {u: factor * c for u, c in terms.items()}

    def _step(self, v: Any) -> tuple[Any, float] | None:
        """(u, factor) where v has the numbers of factor * u."""
        eqn = self._made_by.get(v)
        if eqn is None:
            return None
        name, operands = eqn.primitive.name, eqn.invars
        numbers = [_number(u) for u in operands]
        if name == "mul" and (numbers[0] is None) != (numbers[1] is None):
            return (operands[0], numbers[1]) if numbers[0] is None else (operands[1], numbers[0])
        if name == "div" and numbers[1]:
            return operands[0], 1 / numbers[1]
        if name == "neg":
            return operands[0], -1.0
        if name in _RENAMED and len(operands) == 1:
            return operands[0], 1.0
        return None

    def _is_over_axis_0(self, v: Any) -> bool:
        """Whether v is a sum of data over axis 0 times a number, or a statistic of jaxconv's call."""
        while not isinstance(v, Literal) and v in self._data:
            eqn = self._made_by.get(v)
            if eqn is None:
                return False
            name = eqn.primitive.name
            if name == _CALL or (name == "reduce_sum" and 0 in eqn.params["axes"]):
                return True
            # The number of elements may be symbolic.
            counted = name == "div" and (isinstance(eqn.invars[1], Literal) or eqn.invars[1] not in self._data)
            step = (eqn.invars[0], 1.0) if name == "reduce_sum" or counted else self._step(v)
            if step is None:
                return False
            v = step[0]
        return False


def _number(v: Any) -> float | None:
    return float(np.real(v.val)) if isinstance(v, Literal) and np.ndim(v.val) == 0 else None

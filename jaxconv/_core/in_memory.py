"""An array as XLA shall have it in memory where an operation of its own on a GPU reads it: row after row.

A primitive, so that it holds wherever it is lowered: also where a program that has it was mapped or differentiated.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from jaxconv._core import compat

_primitive = Primitive("jaxconv_in_memory")


def in_memory(x: jax.Array) -> jax.Array:
    """x, which XLA does not compute inside of the operation that reads it, and does not keep transposed."""
    return _primitive.bind(x)


def _on_a_gpu(x: jax.Array) -> jax.Array:
    return lax.optimization_barrier(with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim)))))


def _mapped(args: Sequence[jax.Array], dims: Sequence[int]) -> Any:
    return in_memory(*args), dims[0]


_primitive.def_impl(functools.partial(xla.apply_primitive, _primitive))
_primitive.def_abstract_eval(lambda x: x)
ad.deflinear2(_primitive, lambda ct, _: [ct])
batching.primitive_batchers[_primitive] = _mapped
mlir.register_lowering(_primitive, mlir.lower_fun(lambda x: x, multiple_results=False))
mlir.register_lowering(_primitive, mlir.lower_fun(_on_a_gpu, multiple_results=False), platform="cuda")
compat.seen_by_checkify(_primitive)
compat.seen_by_jet(_primitive, lambda: lambda x: [x])

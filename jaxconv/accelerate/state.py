"""A function's arguments: arrays that are traced, and flax.nnx objects, whose state is written back."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxconv.accelerate.graph import Array


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))


def _nnx() -> Any:
    """flax.nnx where the program has imported it: without it no argument is one of its objects."""
    return sys.modules.get("flax.nnx")


def _is_graph_node(leaf: Any) -> bool:
    nnx = _nnx()
    return nnx is not None and isinstance(leaf, (nnx.Pytree, nnx.Variable))


def nnx_updates() -> contextlib.AbstractContextManager[Any]:
    nnx = _nnx()
    return contextlib.nullcontext() if nnx is None else nnx.update_context("jaxconv.accelerate")


@dataclasses.dataclass(frozen=True)
class _Changed:
    """The state of all nnx objects after f: arrays, and what they are the leaves of."""

    leaves: list[Any]
    tree: Any = None


class Arguments:
    """f's arguments, as arrays that are traced and everything else.

    nnx's objects (modules, optimizers, variables) are split together, so that what two of them share stays shared, and
    what f changes in them is written back, as by `nnx.jit`. What f changes in other containers would be lost, as it
    would be in a pure function's arguments: it is refused.
    """

    def __init__(self, args: Any, kwargs: Any):
        nnx = _nnx()
        leaves, self._tree = jax.tree.flatten((args, kwargs), is_leaf=_is_graph_node)
        self._objects = [i for i, leaf in enumerate(leaves) if _is_graph_node(leaf)]
        self._arrays = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]
        self._leaves = leaves
        self.arrays = [leaves[i] for i in self._arrays]
        if self._objects:
            with nnx.split_context("jaxconv.accelerate") as context:
                self._graph, state = context.split(tuple(leaves[i] for i in self._objects))
            states, self._state_tree = jax.tree.flatten(state)
            self.arrays += states

    @contextlib.contextmanager
    def of(self, arrays: Sequence[Array]) -> Iterator[tuple[Any, Any, Callable[[], _Changed]]]:
        """(args, kwargs) with `arrays` in them, and a function that, after f, says what f changed."""
        leaves = list(self._leaves)
        for i, array in zip(self._arrays, arrays, strict=False):
            leaves[i] = array
        objects: Any = ()
        if self._objects:
            state = jax.tree.unflatten(self._state_tree, arrays[len(self._arrays) :])
            with _nnx().merge_context("jaxconv.accelerate", inner=True) as context:
                objects = context.merge(self._graph, state)
            for i, obj in zip(self._objects, objects, strict=True):
                leaves[i] = obj
        args, kwargs = jax.tree.unflatten(self._tree, leaves)

        def after() -> _Changed:
            now = jax.tree.leaves((args, kwargs), is_leaf=_is_graph_node)
            if not set(map(id, leaves)).issuperset(map(id, now)):
                raise TypeError(
                    "accelerate: the function changes one of its arguments (it puts another array into a dict, list or "
                    "object that it was given), and that change would be lost. Return the new value instead; for "
                    "flax.nnx pass the module itself, or split and merge it (nnx.split, nnx.merge), or use jaxconv.nnx"
                )
            if not self._objects:
                return _Changed([])
            with _nnx().split_context("jaxconv.accelerate") as context:
                changed = context.split(objects)
            return _Changed(*jax.tree.flatten(changed))

        yield args, kwargs, after

    def write_back(self, changed: _Changed, arrays: Sequence[Array]) -> None:
        if self._objects:
            graph, state = jax.tree.unflatten(changed.tree, arrays)
            with _nnx().merge_context("jaxconv.accelerate", inner=False) as context:
                context.merge(graph, state)

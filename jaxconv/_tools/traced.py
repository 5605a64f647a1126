"""A user's function as a program, for tools that run nothing."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax


def traced(f: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """f as jax.jit traces it, anew: JAX keeps what it traced as long as the function lives, and this one ends here."""
    fresh = functools.wraps(f)(lambda *args, **kwargs: f(*args, **kwargs))
    try:
        return jax.jit(fresh).trace(*args, **kwargs)
    except (TypeError, ValueError):  # as of static arguments, which a jitted function alone knows
        if isinstance(f, jax.stages.Wrapped):
            return f.trace(*args, **kwargs)
        if not isinstance(inspect.unwrap(f, stop=_is_jitted), jax.stages.Wrapped):
            raise
    # Around a jitted function, as accelerate's is: what is no array may be static.
    leaves, tree = jax.tree.flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")]

    @functools.wraps(f)
    def of_arrays(*arrays: Any) -> Any:
        given = dict(zip(places, arrays, strict=True))
        args, kwargs = jax.tree.unflatten(tree, [given.get(i, leaf) for i, leaf in enumerate(leaves)])
        return f(*args, **kwargs)

    return jax.jit(of_arrays).trace(*(leaves[i] for i in places))


def _is_jitted(f: Any) -> bool:
    return isinstance(f, jax.stages.Wrapped)

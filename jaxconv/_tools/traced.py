"""A user's function as a program, for tools that run nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax


def traced(f: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """f as jax.jit traces it, anew: JAX keeps what it traced as long as the function lives, and this one ends here."""
    fresh = functools.wraps(f)(lambda *args, **kwargs: f(*args, **kwargs))
    try:
        return jax.jit(fresh).trace(*args, **kwargs)
    except ValueError:  # as of static arguments, which f alone knows
        if not isinstance(f, jax.stages.Wrapped):
            raise
        return f.trace(*args, **kwargs)

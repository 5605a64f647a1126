"""`accelerate`: a function with the convolutions, dense layers and batch-norms in it replaced by jaxconv's fused calls.

The function is traced (state), its jaxpr becomes a graph of values (graph), what is recognised becomes one node
(linear, norms, activations), and the graph is evaluated (rewrite). What became of each layer is told (report).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import jax

from jaxconv.accelerate.activations import Activations
from jaxconv.accelerate.graph import Array
from jaxconv.accelerate.report import LISTENER, Report, listening
from jaxconv.accelerate.rewrite import Rewriting
from jaxconv.accelerate.state import Arguments, KerasVariables, LinenVariables, nnx_updates

__all__ = ["Report", "accelerate", "listening"]


def accelerate(f: Callable[..., Any]) -> Callable[..., Any]:
    """f with its convolutions, dense layers and batch-norms replaced by jaxconv's fused calls.

    For models that nobody wants to touch::

        step = jax.jit(jax.grad(jaxconv.accelerate(loss)))
        predict = jax.jit(jaxconv.accelerate(model.apply))
        print(jaxconv.accelerate(loss).report(params, batch))

    Replaced are `lax.conv_general_dilated` with the bias and activation that follow; (..., K) @ (K, N) with a bias or
    an activation that follow; and batch normalisation, in training and inference, with the residual add and the
    activation that follow. A convolution, its bias and the batch-norm of the result become `jaxconv.conv_batchnorm`: in
    inference one convolution, with filters that are rounded to their type once more. Activations are those of
    `jaxconv.conv2d`, written as jax.nn's functions, or with maximum, clip and where; their derivatives are jax.nn's
    (maximum(x, 0) at exactly 0: 0 instead of 1/2). Inside jit, remat, scan, while, cond, custom_jvp and custom_vjp
    too; derivative rules that somebody else wrote stay theirs.

    Args:
      f: a pure function, of which arrays anywhere in its arguments are traced, as by `jax.jit`; everything else in its
        arguments (Python numbers, strings, functions) is given to it as it is. What it changes in flax.nnx's objects
        among its arguments (running statistics, random counters, an optimizer's state) is written back to them, as by
        `nnx.jit`; what it assigns to Keras's variables is too, or goes on to the `keras.StatelessScope` around.

    Returns:
      A function of f's arguments with f's results: the same structure, shapes and dtypes, and the same numbers up to
      rounding. It is differentiable, and can be jitted, mapped and sharded, as f is. Take the gradient of the
      accelerated function, not the accelerated gradient: in a gradient the layers are no longer recognisable.
      Its attribute `report` takes f's arguments too (or `jax.ShapeDtypeStruct`s) and returns what was replaced by
      what, and for what was not, why. `jaxconv.explain` of any function around it says the same, and more.

    f is traced anew at each call: put `jax.jit` around it. With JAXCONV_DISABLE=all in the environment it is f itself.

    Raises:
      TypeError: where f is no function. When called, where f puts arrays into other containers among its arguments, or
        into Keras's variables under `jax.jit`: they would be lost.
    """
    _check(f)

    def rewriting(args: Any, kwargs: Any) -> tuple[Rewriting, Report, list[Any], Callable[[list[Array]], Any]]:
        given, keras, linen = Arguments(args, kwargs), KerasVariables(), LinenVariables(f, args, kwargs)
        tree, leaves, traced = None, [], []

        def of_arrays(*args: Any, **kwargs: Any) -> list[Any]:
            nonlocal tree, leaves, traced
            with given.of(jax.tree.leaves((args, kwargs))) as (args, kwargs, after):
                out = f(*args, **kwargs)
                leaves, tree = jax.tree.flatten((out, after(), keras.take()))
            # Everything else is returned as it is: a Python number, an array that f closes over.
            results = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, jax.core.Tracer)}
            traced, leaves = list(results), [None if i in results else leaf for i, leaf in enumerate(leaves)]
            return list(results.values())

        report = Report()
        with keras.gathered():
            jaxpr = jax.make_jaxpr(_named_as(f, of_arrays))(*given.args, **given.kwargs)
        linen.check()
        rewritten = Rewriting(jaxpr, report, Activations())
        report.finish()

        def finish(results: list[Array]) -> Any:
            for i, result in zip(traced, results, strict=True):
                leaves[i] = result
            out, changed, variables = jax.tree.unflatten(tree, leaves)
            given.write_back(changed)
            keras.write_back(variables)
            return out

        return rewritten, report, given.arrays, finish

    @functools.wraps(f)
    def accelerated(*args: Any, **kwargs: Any) -> Any:
        reason = _untouched(args, kwargs)
        if reason:
            if LISTENER.value is not None:
                LISTENER.value.report.extend(Report(notes=[reason]))
            return f(*args, **kwargs)
        with nnx_updates():
            rewritten, report, arrays, finish = rewriting(args, kwargs)
            if LISTENER.value is not None:
                LISTENER.value.report.extend(report)
            return finish(rewritten.run(*arrays))

    def report(*args: Any, **kwargs: Any) -> Report:
        reason = _untouched(args, kwargs)
        if reason:
            return Report(notes=[reason])
        with nnx_updates():
            return rewriting(args, kwargs)[1]

    accelerated.report = report  # type: ignore[attr-defined]
    return accelerated


def _check(f: Any) -> None:
    """TypeError where f is none, and a sentence for what is often given in a function's place."""
    linen = sys.modules.get("flax.linen")
    if linen is not None and isinstance(f, linen.Module) and f.scope is None:
        raise TypeError(
            f"accelerate: {type(f).__name__} is a flax.linen module without parameters, not a function of them: "
            "accelerate(model.apply)"
        )
    if callable(f):
        return
    names = [name for name in getattr(f, "_fields", ()) if callable(getattr(f, name))]
    if "apply" in names or "update" in names:  # Haiku's Transformed, Optax's GradientTransformation
        name = "apply" if "apply" in names else "update"
        what = f"{type(f).__name__}({', '.join(names)})"
        raise TypeError(f"accelerate: got {what}, several functions: give it one of them, accelerate(f.{name})")
    if isinstance(f, (tuple, list)) and any(callable(one) for one in f):
        raise TypeError(f"accelerate: got a {type(f).__name__} of {len(f)} functions: give it one of them")
    raise TypeError(f"accelerate: f must be a function, got {type(f).__name__}")


def _untouched(args: Any, kwargs: Any) -> str:
    """Why a call is f's own; empty where it is not."""
    names = os.environ.get("JAXCONV_DISABLE", "")
    if "all" in (name.strip() for name in names.split(",")):
        return f"nothing is replaced: JAXCONV_DISABLE={names}"
    jet = sys.modules.get("jax.experimental.jet")
    if jet is not None and any(isinstance(leaf, jet.JetTracer) for leaf in jax.tree.leaves((args, kwargs))):
        return "nothing is replaced: jax.experimental.jet has no rule for jaxconv's calls"
    return ""


def _named_as(f: Callable[..., Any], of_arrays: Callable[..., Any]) -> Callable[..., Any]:
    """of_arrays with f's name, place and parameters, which JAX's errors speak of."""
    inner: Any = f
    while isinstance(inner, functools.partial):
        inner = inner.func
    if not hasattr(inner, "__code__") and not hasattr(inner, "__wrapped__"):  # an object that is called
        inner = type(inner).__call__
    named = functools.wraps(inner)(of_arrays)
    with contextlib.suppress(TypeError, ValueError):  # a built-in function has none
        named.__signature__ = inspect.signature(f)  # type: ignore[attr-defined]
    return named

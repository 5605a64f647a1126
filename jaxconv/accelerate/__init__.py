"""`accelerate`: a function with the convolutions, dense layers and batch-norms in it replaced by jaxconv's fused calls.

The function is traced (state), its jaxpr becomes a graph of values (graph), what is recognised becomes one node
(linear, norms, activations), and the graph is evaluated (rewrite). What became of each layer is told (report).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxconv.accelerate.activations import Activations
from jaxconv.accelerate.graph import Array
from jaxconv.accelerate.report import LISTENER, Report, listening
from jaxconv.accelerate.rewrite import Rewriting
from jaxconv.accelerate.state import Arguments, nnx_updates

__all__ = ["Report", "accelerate", "listening"]


def accelerate(f: Callable[..., Any]) -> Callable[..., Any]:
    """f with its convolutions, dense layers and batch-norms replaced by jaxconv's fused calls.

    For models that nobody wants to touch::

        step = jax.jit(jax.grad(jaxconv.accelerate(loss)))
        predict = jax.jit(jaxconv.accelerate(model.apply))
        print(jaxconv.accelerate(loss).report(params, batch))

    Replaced are `lax.conv_general_dilated` with the bias and activation that follow; (..., K) @ (K, N) with a bias or
    an activation that follow; and batch normalisation, in training and inference, with the residual add and the
    activation that follow. A convolution and the batch-norm of its result become `jaxconv.conv_batchnorm`: in
    inference one convolution, with filters that are rounded to their type once more. Activations are those of
    `jaxconv.conv2d`, written as jax.nn's functions. Inside jit, remat, scan, while, cond, custom_jvp and custom_vjp
    too; derivative rules that somebody else wrote stay theirs.

    Args:
      f: a pure function, of which arrays anywhere in its arguments are traced, as by `jax.jit`; everything else in its
        arguments (Python numbers, strings, functions) is given to it as it is. What it changes in flax.nnx's objects
        among its arguments (running statistics, random counters, an optimizer's state) is written back to them, as by
        `nnx.jit`.

    Returns:
      A function of f's arguments with f's results: the same structure, shapes and dtypes, and the same numbers up to
      rounding. It is differentiable, and can be jitted, mapped and sharded, as f is. Take the gradient of the
      accelerated function, not the accelerated gradient: in a gradient the layers are no longer recognisable.
      Its attribute `report` takes f's arguments too (or `jax.ShapeDtypeStruct`s) and returns what was replaced by
      what, and for what was not, why. `jaxconv.explain` of any function around it says the same, and more.

    f is traced anew at each call: put `jax.jit` around it.

    Raises:
      TypeError: when called, where f puts arrays into other containers among its arguments: they would be lost.
    """

    def rewriting(args: Any, kwargs: Any) -> tuple[Rewriting, Report, list[Any], Callable[[list[Array]], Any]]:
        given = Arguments(args, kwargs)
        out_tree, changed = None, None

        def of_arrays(*arrays: Array) -> list[Any]:
            nonlocal out_tree, changed
            with given.of(arrays) as (args, kwargs, after):
                outs, out_tree = jax.tree.flatten(f(*args, **kwargs))
                changed = after()
            return [*outs, *changed.leaves]

        report = Report()
        rewritten = Rewriting(jax.make_jaxpr(of_arrays)(*given.arrays), report, Activations())

        def finish(results: list[Array]) -> Any:
            count = len(results) - len(changed.leaves)
            given.write_back(changed, results[count:])
            return jax.tree.unflatten(out_tree, results[:count])

        return rewritten, report, given.arrays, finish

    @functools.wraps(f)
    def accelerated(*args: Any, **kwargs: Any) -> Any:
        with nnx_updates():
            rewritten, report, arrays, finish = rewriting(args, kwargs)
            if LISTENER.value is not None:
                LISTENER.value.report += report
            return finish(rewritten.run(*arrays))

    def report(*args: Any, **kwargs: Any) -> Report:
        with nnx_updates():
            return rewriting(args, kwargs)[1]

    accelerated.report = report  # type: ignore[attr-defined]
    return accelerated

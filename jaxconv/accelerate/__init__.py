"""`accelerate`: a function with the convolutions, dense layers and batch-norms in it replaced by jaxconv's fused calls.

The function is traced (state), its jaxpr becomes a graph of values (graph), what is recognised becomes one node
(linear, norms, pools, upsampling, activations), and the graph is evaluated (rewrite). What became of each layer is told
(report).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from jaxconv import _plan, _problem
from jaxconv._core import compat
from jaxconv._core.graph import Array
from jaxconv._core.types import P, R
from jaxconv._plan import in_place
from jaxconv.accelerate.activations import Activations
from jaxconv.accelerate.function import Accelerated
from jaxconv.accelerate.report import LISTENER, Report, heard_from_now_on, listening
from jaxconv.accelerate.rewrite import Rewriting
from jaxconv.accelerate.state import (
    Arguments,
    KerasVariables,
    LinenVariables,
    PlainObjects,
    check_results,
    nnx_updates,
    unbound,
)
from jaxconv.joints import told

__all__ = ["Accelerated", "Report", "accelerate", "listening"]

AS_WRITTEN = (
    "on a CPU dense layers, norms that do not go into a filter, and most operations behind convolutions are computed "
    "as they were written, because no kernel is faster there"
)


def accelerate(f: Callable[P, R], *, tune: bool = False) -> Accelerated[P, R]:
    """f with its convolutions, dense layers, batch-norms and max-poolings replaced by jaxconv's calls.

    For models whose code stays as it is::

        step = jax.jit(jax.grad(jaxconv.accelerate(loss)))
        predict = jax.jit(jaxconv.accelerate(model.apply))
        print(jaxconv.accelerate(loss).report(params, batch))

    What is replaced:

    * `lax.conv_general_dilated`, with the bias, the residual add and the activation behind it;
    * the same for int8, uint8 or float8 arrays, or floats converted from them, with the factors, bias, residual,
      activation, rounding, clipping and conversion to 8 bits behind it;
    * convolutions of other integers, alone;
    * (..., K) @ (K, N), if a bias or an activation follows, together with these;
    * a gate behind a product or a 1x1 convolution: half of its columns times an activation of the other half;
    * the same for 8-bit arrays, if factors, a bias or an activation follow the sums, with all that 8-bit convolutions
      take in;
    * a batch-norm, in training and inference, with the residual add and the activation behind it;
    * group-norms and layer-norms;
    * `lax.reduce_window` with lax.max: `jaxconv.max_pool`;
    * upsampling by repetition (`jax.image.resize` with "nearest" and whole factors): a broadcast, whose gradient
      needs no scatter;
    * an array times gates that two small layers compute from its means: `jaxconv.squeeze_excite`.

    On a CPU three things are computed as f writes them, because no kernel is faster there: dense layers, norms that do
    not go into a filter, and operations behind a convolution. Only the native code of a convolution with groups takes a
    bias, a residual, and a relu, relu6 or leaky_relu into its call.

    Layers that follow each other are plain calls in a region. Where the function is differentiated, the region's
    program of results and gradients is rewritten: a kernel that does the work of several calls takes their place if
    that is predicted to be faster; `explain` shows where. Examples are a convolution that also computes the statistics
    for its batch-norm, and a kernel that adds another gradient to the one that it computes.

    In inference a batch-norm behind a convolution or product is multiplied into its filter. Layer scales (numbers per
    output channel that multiply a layer's result) are too, in training as well, but not in float16. The filter is then
    rounded to its type once more. Every call does this anew, so it is done only if the result has at least twice as
    many numbers as the filter; `report` names the layers that were left. `jaxconv.freeze` does it once, whatever the
    sizes.

    Activations are those of `jaxconv.conv2d`, written as jax.nn's functions, or with maximum, clip and where. Their
    derivatives are jax.nn's: that of maximum(x, 0) at exactly 0 is 0 instead of 1/2. Layers are replaced inside jit,
    remat, scan, while, cond, custom_jvp and custom_vjp too. Derivative rules that somebody else wrote stay theirs.

    Args:
      f: a pure function. Arrays anywhere in its arguments are traced, as by `jax.jit`; everything else in them (Python
        numbers, strings, functions) is passed on unchanged. Changes of flax.nnx objects (running statistics, random
        counters, an optimizer's state) are written back, as by `nnx.jit`: of objects among the arguments, and of the
        object that f is or belongs to. Assignments to Keras's variables are written back too, or go to the
        `keras.StatelessScope` around the call. Plain objects that f can reach, dicts and lists in them, and variables
        that it closes over get the values that f would have left there.
      tune: on a GPU, also time problems that nobody has measured. The first time that such a layer is lowered or
        differentiated, jaxconv's kernels and XLA's are timed on that device, and the fastest is kept in
        `jaxconv.tune.path()`. With False, JAXCONV_TUNE and `enable` decide.

    Returns:
      A function of f's arguments with f's results: the same structure, shapes and dtypes, and the same numbers up to
      rounding. It is differentiable, and can be jitted, mapped and sharded, as f is. Take the gradient of the
      accelerated function, not the accelerated gradient: in a gradient the layers are no longer recognisable.
      Its attribute `report` takes f's arguments too (or `jax.ShapeDtypeStruct`s). It returns a list of all layers:
      what replaced each one, or why it was left; and the calls that run before and after rules join neighbours, with
      the known times. `jaxconv.explain` of any function around it says the same, and more.

    f is traced anew at each call: put `jax.jit` around it. With JAXCONV_DISABLE=all in the
    environment it only calls f.

    Raises:
      TypeError: if f is no function, a generator or a coroutine, or tune is neither True nor False. When called, if f
        puts arrays into dicts or lists among its arguments, into Keras's variables under `jax.jit`, or into a result
        that is no pytree: they would be lost.
    """
    check(f)
    asked = in_place.new() if in_place.checked("accelerate", tune) else None
    heard_from_now_on()

    def run(*args: Any, **kwargs: Any) -> Any:
        reason = untouched()
        if reason:
            if (listener := LISTENER.get()) is not None:
                listener.extend(Report(notes=[reason]))
            return f(*args, **kwargs)
        with nnx_updates(), in_place.asking(asked):
            function, owner = unbound(f)
            traced = trace(function, (*owner, *args), kwargs)
            rewritten, report = traced.rewritten()
            if (listener := LISTENER.get()) is not None:
                listener.extend(report)
            return traced.finish(rewritten.run(*traced.arguments.arrays))

    def report(*args: Any, **kwargs: Any) -> Report:
        reason = untouched()
        if reason:
            return Report(notes=[reason])
        with nnx_updates(), in_place.nothing_timed():
            function, owner = unbound(f)
            traced = trace(function, (*owner, *args), kwargs)
            rewriting, found = traced.rewritten()
            if not found.replaced:  # the function is left as it is
                return found
            try:
                found.regions = told.told_of(rewriting.run, traced.jaxpr.in_avals, _plan.Device.default())
            except ValueError as error:  # where a choice that somebody forced cannot run
                found.notes.append(f"the new program cannot be planned: {error}")
            return found

    return Accelerated(f, functools.partial(accelerate, tune=tune), run, report)


@dataclasses.dataclass(frozen=True)
class Results:
    """What f returns, the state of nnx's objects after it, Keras's variables and plain objects' attributes, without the
    traced arrays."""

    tree: Any
    leaves: list[Any]  # None where a traced array is
    places: list[int]  # of the traced arrays among the leaves
    own: int  # so many leaves are f's

    def unflatten(self, arrays: Sequence[Array | None]) -> tuple[Any, Any, Any, Any]:
        leaves = list(self.leaves)
        for i, array in zip(self.places, arrays, strict=True):
            leaves[i] = array
        return jax.tree.unflatten(self.tree, leaves)


@dataclasses.dataclass(frozen=True)
class Traced:
    """f of some arguments as a jaxpr, of the arguments' arrays to those among the results."""

    jaxpr: ClosedJaxpr
    arguments: Arguments
    keras: KerasVariables
    plain: PlainObjects
    results: Results

    def rewritten(self, once: bool = False, data: Sequence[bool] | None = None) -> tuple[Rewriting, Report]:
        """`once`: whether values that depend on weights alone are computed once, as `freeze` does it. `data`: which
        arrays are no weights."""
        report = Report()
        rewriting = Rewriting(self.jaxpr, report, Activations(), once=once, data=data)
        if rewriting.differs and _plan.Device.default().platform == "cpu":
            report.notes.append(AS_WRITTEN)
        report.finish()
        return rewriting, report

    def finish(self, arrays: Sequence[Array]) -> Any:
        """f's results; what f changes is written back."""
        out, changed, variables, (attributes,) = self.results.unflatten(arrays)
        self.arguments.write_back(changed)
        self.keras.write_back(variables)
        self.plain.write_back(attributes)
        return out


def trace(f: Callable[..., Any], args: Any, kwargs: Any, name: str = "accelerate") -> Traced:
    """f of these arguments. Inside `nnx_updates()`; `name` is who traces, for errors."""
    given, keras, linen = Arguments(args, kwargs, name), KerasVariables(), LinenVariables(f, args, kwargs, name)
    plain = PlainObjects(f, args, kwargs)
    tree, leaves, places, own = None, [], [], 0

    def of_arrays(*args: Any, **kwargs: Any) -> list[Any]:
        nonlocal tree, leaves, places, own
        try:
            with given.of(jax.tree.leaves((args, kwargs))) as (args, kwargs, after):
                out = f(*args, **kwargs)
                attributes = plain.take(compat.current_trace())
                check_results(jax.tree.leaves(out), compat.current_trace(), name)
                leaves, tree = jax.tree.flatten((out, after(), keras.take(), (attributes,)))
        except BaseException:  # f's, which leaves its objects as they were
            plain.take(compat.current_trace())
            raise
        own = len(jax.tree.leaves(out))
        # Everything else is returned as it is: a Python number, an array that f closes over.
        results = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, jax.core.Tracer)}
        places, leaves = list(results), [None if i in results else leaf for i, leaf in enumerate(leaves)]
        return list(results.values())

    with keras.gathered():
        jaxpr = jax.make_jaxpr(_named_as(f, of_arrays))(*given.args, **given.kwargs)
    linen.check()
    return Traced(jaxpr, given, keras, plain, Results(tree, leaves, places, own))


def check(f: Any, name: str = "accelerate") -> None:
    """TypeError where f is none, and a sentence for what is often given in a function's place."""
    linen = sys.modules.get("flax.linen")
    if linen is not None and isinstance(f, linen.Module) and f.scope is None:
        raise TypeError(
            f"{name}: {type(f).__name__} is a flax.linen module without parameters, not a function of them: "
            f"{name}(model.apply{', variables' if name == 'freeze' else ''})"
        )
    if callable(f):
        return _problem.check_function(name, f)
    names = [name for name in getattr(f, "_fields", ()) if callable(getattr(f, name))]
    if "apply" in names or "update" in names:  # Haiku's Transformed, Optax's GradientTransformation
        one = "apply" if "apply" in names else "update"
        what = f"{type(f).__name__}({', '.join(names)})"
        raise TypeError(f"{name}: got {what}, several functions: give it one of them, {name}(f.{one})")
    if isinstance(f, (tuple, list)) and any(callable(one) for one in f):
        raise TypeError(f"{name}: got a {type(f).__name__} of {len(f)} functions: give it one of them")
    _problem.check_function(name, f)


def untouched() -> str:
    """Why a call is f's own; empty where it is not."""
    names = os.environ.get("JAXCONV_DISABLE", "")
    if "all" in (name.strip() for name in names.split(",")):
        return f"nothing is replaced: JAXCONV_DISABLE={names}"
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

"""`cost`: floating-point operations and bytes of a program whose custom calls XLA cannot see into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxconv import _problem
from jaxconv._core import primitives
from jaxconv._core.types import OfArguments, P
from jaxconv._tools.traced import traced


def cost(f: Callable[P, Any]) -> OfArguments[P, dict[str, float]]:
    """A function that takes f's arguments and returns {"flops": ..., "bytes accessed": ...} of one call of f.

    The keys and the meaning are those of `jax.jit(f).lower(*args).cost_analysis()`, which says -1 for a custom call.
    Here every jaxconv call counts, whatever implements it:

    * flops of a convolution's fprop, dgrad or wgrad: 2 * N * P * Q * K * R * S * C / groups. Multiplications with
      padding count, as is usual;
    * flops of a product: 2 * M * N * K;
    * flops of a batch-norm or group-norm: 4 to 11 an element; of a pooling: one a tap, in either direction;
    * flops of a squeeze-and-excitation: 2 an element, 4 backward, and its two products of each image;
    * flops of an epilogue: one an element for each of bias, activation and addend;
    * bytes: every operand read once and every result written once.

    Nothing is compiled or run. The body of a scan counts once for each step, a cond counts as its costliest branch, and
    a shard_map as one shard. The rest of the program is XLA's own count before optimisation: it knows no fusion, and
    counts one iteration of every loop::

        utilisation = jaxconv.cost(train_step)(state, batch)["flops"] / seconds / peak

    Raises:
      TypeError: where f is no function, or compiled already.
    """

    _problem.check_function("cost", f)

    def costed(*args: Any, **kwargs: Any) -> dict[str, float]:
        program = traced(f, args, kwargs)
        flops, size = _of(program.jaxpr.jaxpr)
        with primitives.opaque_calls():
            lowered = program.lower()
        rest = lowered.cost_analysis() or {}
        unknown = lowered.as_text().count("custom_call @jaxconv_")  # XLA has added -1 for each to either figure
        return {
            "flops": flops + max(rest.get("flops", 0.0) + unknown, 0.0),
            "bytes accessed": size + max(rest.get("bytes accessed", 0.0) + unknown, 0.0),
        }

    return costed


def flops(closed: Any) -> float:
    """Floating-point operations of the jaxconv calls in a closed jaxpr."""
    return _of(closed.jaxpr)[0]


def _of(jaxpr: Any) -> tuple[float, float]:
    """(flops, bytes) of the jaxconv calls in a jaxpr."""
    total = (0.0, 0.0)
    for equation in jaxpr.eqns:
        op = primitives.KERNELS.get(equation.primitive)
        parts = [_of(inner) for inner in primitives.inner_jaxprs(equation)]
        if op is not None:
            avals = [v.aval for v in (*equation.invars, *equation.outvars)]
            parts = [(op.flops(equation.params["problem"]), sum(a.size * a.dtype.itemsize for a in avals))]
        elif equation.primitive.name == "cond":
            parts = [max(parts)]
        elif equation.primitive.name == "scan":
            parts *= equation.params["length"]
        total = tuple(map(sum, zip(total, *parts, strict=True)))
    return total

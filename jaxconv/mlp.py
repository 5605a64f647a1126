"""Two dense layers in a row: the public function, and the differentiation rules of the two together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jaxconv import _op, _problem
from jaxconv._activation import activate_grad
from jaxconv._problem import DenseProblem, MlpProblem
from jaxconv._types import Array, DenseAlgorithm, Implementation, Operand, Precision, ToActivation
from jaxconv.dense import cotangents, dense_gradient, dense_kernel, grad_x, gradient_problem, matmul, tangents

replace = dataclasses.replace


# ----------------------------------------------------------------------------------------------------------------------
# A function of (x, w1, b1?, w2, b2?) -> y2, z2 where it is saved, and with `save` y1, z1 where that is saved


def _layer(p: DenseProblem, x: Array, w: Array, *b: Array) -> list[Array]:
    if p.bias is None and p.activation.name == "none":
        return [matmul(p.bare(), x, w)] * (1 + p.save_preactivation)
    return dense_kernel(p, x, w, *b)


def _operands(p: MlpProblem, values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Those of the two layers, the second's without its x."""
    first = 2 + (p.first.bias is not None)
    return list(values[:first]), list(values[first:])


def _two_layers(p: MlpProblem, *args: Array) -> list[Array]:
    first, second = _operands(p, args)
    hidden = _layer(p.first, *first)
    outs = _layer(p.second, hidden[0], *second)
    return [*outs, *hidden] if p.save else outs


def _results(p: MlpProblem) -> list[tuple[tuple[int, ...], str]]:
    layers = [p.second, p.first] if p.save else [p.second]
    return [(layer.y_shape, layer.dtype) for layer in layers for _ in range(1 + layer.save_preactivation)]


pair = _op.composite(
    "mlp",
    results=_results,
    parts=lambda p, plan: lambda *args: _two_layers(p, *args),
)


def _saving(p: MlpProblem) -> MlpProblem:
    """The first layer's z is saved where its derivative is computed from z; y is the second's x."""
    keeps_z = p.first.activation.residual == "z"
    saves = p.second.save_preactivation or p.second.activation.residual == "z"
    return MlpProblem(
        replace(p.first, save_preactivation=p.first.save_preactivation or keeps_z),
        replace(p.second, save_preactivation=saves),
        save=True,
    )


def _forward(p: MlpProblem, *args: Array) -> tuple[list[Array], Any]:
    """Residuals: x, y1, the filters, and what the derivatives of the activations are computed from."""
    (x, w1, *_), (w2, *_) = _operands(p, args)
    outs = pair(p, *args)
    second = outs[: 1 + p.second.save_preactivation]
    first = outs[len(second) :]
    f1, f2 = p.first.activation, p.second.activation
    kept1 = {None: None, "y": first[0], "z": first[-1]}[f1.residual]
    kept2 = {None: None, "y": second[0], "z": second[-1]}[f2.residual]
    return outs, (x, w1, w2, first[0], kept1, kept2)


def _sum(parts: Sequence[Array | None]) -> Array | None:
    some = [part for part in parts if part is not None]
    return sum(some[1:], some[0]) if some else None


def _backward(p: MlpProblem, residuals: Any, given: Sequence[Array | None], want: Sequence[bool]) -> list[Array | None]:
    x, w1, w2, y1, kept1, kept2 = residuals
    outer, inner = given[: 1 + p.second.save_preactivation], given[1 + p.second.save_preactivation :]
    want1, want2 = _operands(p, want)
    f1 = p.first.activation
    dy2, *dz2_direct = outer
    dz2 = _sum([None if dy2 is None else activate_grad(p.second.activation, kept2, dy2), *dz2_direct])
    grads2: list[Array | None] = [None] * len(want2)
    if dz2 is not None:
        grads2 = cotangents(p.second, y1, w2, dz2, [False, *want2])[1:]
    grads1: list[Array | None] = [None] * len(want1)
    if any(want1):
        # Cotangents of y1 and z1 themselves come from derivatives of the gradient.
        dy1_direct, *dz1_direct = inner
        db1 = None
        if dz2 is not None and dy1_direct is None and kept1 is not None:
            dz1, db1 = dense_gradient(gradient_problem(p.second, f1), dz2, w2, kept1)
        else:
            dz1 = _sum([None if dz2 is None else grad_x(p.second, dz2, w2), dy1_direct])
            if dz1 is not None and kept1 is not None:
                dz1 = activate_grad(f1, kept1, dz1)
        if any(ct is not None for ct in dz1_direct):
            dz1, db1 = _sum([dz1, *dz1_direct]), None
        if dz1 is not None:
            own = [*want1[:2], *(w and db1 is None for w in want1[2:])]
            grads1 = cotangents(p.first, x, w1, dz1, own)
            if db1 is not None and want1[2:] == [True]:
                grads1[2] = db1
    return [*grads1, *grads2]


def _tangent(p: MlpProblem, residuals: Any, given: Sequence[Array | None]) -> list[Array]:
    x, w1, w2, y1, kept1, kept2 = residuals
    given1, given2 = _operands(p, given)
    tz1 = _sum(tangents(p.first, x, w1, given1))
    ty1 = tz1 if tz1 is None or kept1 is None else activate_grad(p.first.activation, kept1, tz1)
    tz2 = _sum(tangents(p.second, y1, w2, [ty1, *given2]))
    assert tz2 is not None
    ty2 = activate_grad(p.second.activation, kept2, tz2)
    outs = [ty2, tz2] if p.second.save_preactivation else [ty2]
    hidden = [ty1, tz1] if p.first.save_preactivation else [ty1]
    return outs + [jnp.zeros_like(y1) if t is None else t for t in hidden]


RULES = _op.Rules(_saving, _forward, _backward, _tangent)
_op.fuse(pair, RULES)


# ----------------------------------------------------------------------------------------------------------------------
# The public function


def mlp(
    x: Operand,  # (..., K)
    w1: Operand,  # (K, H)
    b1: Operand | None,  # (H,)
    w2: Operand,  # (H, N)
    b2: Operand | None,  # (N,)
    *,
    activation: ToActivation = "gelu",
    out_activation: ToActivation = None,
    precision: Precision = None,
    algorithm: DenseAlgorithm | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """Two dense layers, of which the second reads what the first gives: the block of a transformer or of ConvNeXt.

    Equivalent JAX code::

        h = activation(x @ w1 + b1)
        y = out_activation(h @ w2 + b2)

    Forward they are two calls of `dense`. Backward, with dz2 = dy * out_activation'(z2), the gradient of the first
    layer's pre-activation and that of its bias::

        dz1 = (dz2 @ w2.T) * activation'(z1)
        db1 = sum of dz1 over the rows

    leave one kernel where one was measured to be faster (16 bits, Hopper): the gradient of h is never written, and dz1
    is not read again for its sum. Elsewhere these are a product, and what XLA makes of the rest. `explain` says which,
    and why. Kept for the gradient are x, h, and z1 where the activation's derivative is no function of h.

    Args:
      x: (..., K); the leading axes together are the M rows. float32, bfloat16, float16 or float64; sums are accumulated
        in at least float32.
      w1, w2: (K, H) and (H, N), of x's dtype.
      b1, b2: (H,) and (N,), of x's dtype, or None.
      activation: of the first layer; out_activation: of the second, as a rule none. See `conv2d`.
      precision, implementation: see `conv2d`.
      algorithm: forces one native algorithm of the products, forward and backward: "gemm", "sm90" (Hopper).

    Returns:
      y of x's dtype, (..., N).

    Raises:
      TypeError, ValueError: when the arguments do not fit together (at trace time), naming the argument, what it got
        and what was expected; ValueError when a forced implementation or algorithm cannot run, with the reason.

    Differentiable in every array, to any order, in forward and reverse mode. Source: the block of Vaswani et al. 2017,
    "Attention Is All You Need", 3.3.
    """
    return run(
        x,
        w1,
        b1,
        w2,
        b2,
        activation=activation,
        out_activation=out_activation,
        precision=(precision, precision),
        return_preactivation=False,
        algorithm=algorithm,
        implementation=implementation,
    )[0]


def run(x: Any, w1: Any, b1: Any, w2: Any, b2: Any, **options: Any) -> list[Array]:
    """y, and with `return_preactivation` also what out_activation was given. `precision` is a pair, one for each."""
    given = {"x": x, "w1": w1, "b1": b1, "w2": w2, "b2": b2}
    arrays = {n: None if a is None and n in ("b1", "b2") else _problem.as_array("mlp", n, a) for n, a in given.items()}
    p = MlpProblem.infer("mlp", **arrays, **options)
    x = arrays.pop("x")
    y_shape = (*x.shape[:-1], p.second.n)
    outs = pair(p, x.reshape(p.first.m, p.first.k), *(a for a in arrays.values() if a is not None))
    return [out.reshape(y_shape) for out in outs]

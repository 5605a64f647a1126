"""Fused dense layers: the public function, its kernels and its differentiation rules."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxconv import _plan, _problem
from jaxconv._core import primitives, sharding
from jaxconv._core.activations import activate_grad
from jaxconv._core.types import Array, DenseAlgorithm, DenseOptions, Implementation, Operand, Precision, ToActivation
from jaxconv._ops import conv_scaled, layer, reference
from jaxconv._problem import DenseProblem

replace = dataclasses.replace


def _array(p: DenseProblem, kind: str) -> primitives.Typed:
    """s is a number for each column."""
    if kind == "s":
        return (p.n,), p.dtype
    return getattr(p, f"{kind}_shape"), p.dtype


def _attrs(p: DenseProblem, plan: _plan.Plan) -> dict[str, Any]:
    product = {
        "trans_x": np.int64(p.trans_x),
        "trans_w": np.int64(p.trans_w),
        "batched": np.int64(p.batch is not None),
        "x_batched": np.int64("x" in p.batched),
        "w_batched": np.int64("w" in p.batched),
        "bias_batched": np.int64("b" in p.batched),
        "c_batched": np.int64("c" in p.batched),
        "bias": p.bias or "none",
        "addend": np.int64(p.addend),
        "alpha": np.float64(p.alpha),
        "beta": np.float64(p.beta),
        "full_float32": np.int64(p.full_float32),
    }
    return {"product": product, "epilogue": layer.epilogue(p)}


def _flops(more: int = 0) -> Any:
    """Those of the product, of the epilogue, and more of each result."""

    def flops(p: DenseProblem) -> int:
        epilogue = bool(p.bias) + p.addend + (p.activation.name != "none")
        return p.flops + (epilogue + more) * math.prod(p.y_shape)

    return flops


def _batch(op: primitives.Kernel, p: DenseProblem, args: list[Array], dims: list[int | None]) -> primitives.Batched:
    size, names = primitives.batch_size(args, dims), op.operand_kinds(p)
    dim = dict(zip(names, dims, strict=True))

    def outs_of(q: DenseProblem, operands: Sequence[Array], unfold: Callable[[Array], Array]) -> primitives.Batched:
        outs = [unfold(y) for y in primitives.listed(op(q, *operands))]
        return outs, [0] * len(outs)

    if p.batch is None and not p.trans_x and dim["w"] is None and dim.get("b") is None and p.bias != "row":
        # x (and c) mapped: more rows
        args = [
            primitives.fold(primitives.to_front(a, d, size), 0, 0) if n in "xc" else a
            for n, a, d in zip(names, args, dims, strict=True)
        ]
        return outs_of(replace(p, m=size * p.m), args, lambda y: primitives.unfold(y, size, 0))
    if p.batch is None:
        mapped = tuple(n for n in names if dim[n] is not None)
        args = [a if d is None else jnp.moveaxis(a, d, 0) for a, d in zip(args, dims, strict=True)]
        return outs_of(replace(p, batch=size, batched=mapped), args, lambda y: y)
    # Instances already: an operand that has both, one or neither axis gets both or neither.
    mapped = tuple(n for n in names if dim[n] is not None or n in p.batched)
    joined = []
    for name, a, d in zip(names, args, dims, strict=True):
        if name in mapped:
            a = primitives.to_front(a, d, size)
            if name not in p.batched:
                a = jnp.broadcast_to(a[:, None], (size, p.batch, *a.shape[1:]))
            a = a.reshape(size * p.batch, *a.shape[2:])
        joined.append(a)
    more = replace(p, batch=size * p.batch, batched=mapped)
    return outs_of(more, joined, lambda y: y.reshape(size, p.batch, *y.shape[1:]))


def _partition(p: DenseProblem, operands: Sequence[str], results: Sequence[str], run: Any = None) -> sharding.Partition:
    """Instances, rows, columns, and the sum."""
    bias = {"row": "m", "column": "n"}.get(p.bias or "", "one")
    names = {"x": "k m" if p.trans_x else "m k", "w": "n k" if p.trans_w else "k n", "b": bias, "c": "m n", "s": "n"}
    names = {kind: ("v " if kind in p.batched else "") + axes for kind, axes in names.items()}
    names["y"] = "m n" if p.batch is None else "v m n"

    def local(parts: Any) -> DenseProblem:
        batch = None if p.batch is None else p.batch // parts["v"]
        return replace(p, batch=batch, m=p.m // parts["m"], n=p.n // parts["n"], k=p.k // parts["k"])

    return sharding.Partition(
        [names[o] for o in operands], [names[r] for r in results], split="vmnk", local=local, run=run
    )


def _dense_shard(p: DenseProblem, split: sharding.Split, x: Array, w: Array, *rest: Array) -> list[Array]:
    """The epilogue needs the whole sum: where it is split it comes after adding the parts."""
    if "k" in split:
        return reference.dense_epilogue(p, jax.lax.psum(matmul(p.bare(), x, w), split["k"]), *rest)
    return dense_kernel(p, x, w, *rest)


# ----------------------------------------------------------------------------------------------------------------------
# The kernels

FAMILY = primitives.Family({"x": "x dy", "y": "y z kept dz", "s": "db"}, _array, _attrs, _partition, batch=_batch)

matmul = primitives.kernel(
    "matmul",
    "x w -> y",
    FAMILY,
    reference=reference.matmul,
    flops=_flops(),
)


def _sum_shared(p: DenseProblem, operand: str, grad: Array) -> Array:
    """The cotangent of an operand that all instances share is the sum over them."""
    return grad if p.batch is None or operand in p.batched else jnp.sum(grad, 0)


def _product(p: DenseProblem, x: Array, w: Array, **fields: Any) -> Array:
    """alpha * op(x) @ op(w) between arrays of p's instances; the last two axes are the matrices."""
    batched = tuple(n for n, a in (("x", x), ("w", w)) if a.ndim == 3)
    return matmul(replace(p.bare(), batched=batched, **fields), x, w)


def grad_x(p: DenseProblem, dz: Array, w: Array) -> Array:
    """alpha * dz @ op(w)^T, stored as x is."""
    if p.trans_x:
        grad = _product(p, w, dz, trans_x=p.trans_w, trans_w=True, m=p.k, k=p.n, n=p.m)
    else:
        grad = _product(p, dz, w, trans_x=False, trans_w=not p.trans_w, m=p.m, k=p.n, n=p.k)
    return _sum_shared(p, "x", grad)


def _grad_w(p: DenseProblem, dz: Array, x: Array) -> Array:
    """alpha * op(x)^T @ dz, stored as w is."""
    if p.trans_w:
        grad = _product(p, dz, x, trans_x=True, trans_w=p.trans_x, m=p.n, k=p.m, n=p.k)
    else:
        grad = _product(p, x, dz, trans_x=not p.trans_x, trans_w=False, m=p.k, k=p.m, n=p.n)
    return _sum_shared(p, "w", grad)


primitives.bilinear(matmul, lambda p, ct, w: grad_x(p, ct, w), lambda p, ct, x: _grad_w(p, ct, x))

# dense: the product with addend, bias and activation. Results y, and z where it is saved.
dense_kernel = primitives.kernel(
    "dense",
    "x w b? c? -> y z?",
    FAMILY,
    reference=reference.dense,
    flops=_flops(),
    run=_dense_shard,
)


def cotangents(p: DenseProblem, x: Array, w: Array, dz: Array, want: Sequence[bool]) -> list[Array | None]:
    """dx = alpha dz w^T; dw = alpha x^T dz; dc = beta dz; db sums dz."""
    grads: list[Array | None] = []
    for operand, wanted in zip(dense_kernel.operand_kinds(p), want, strict=True):
        if not wanted:
            grads.append(None)
        elif operand == "x":
            grads.append(grad_x(p, dz, w))
        elif operand == "w":
            grads.append(_grad_w(p, dz, x))
        elif operand == "c":
            grads.append(_sum_shared(p, "c", reference.scaled(p.beta, dz)))
        else:
            axes = {"scalar": (-2, -1), "row": (-1,), "column": (-2,)}[p.bias or "scalar"]
            db = jnp.sum(dz, axes)
            db = db[..., None] if p.bias == "scalar" else db
            grads.append(_sum_shared(p, "b", db))
    return grads


def tangents(p: DenseProblem, x: Array, w: Array, given: Sequence[Array | None]) -> list[Array]:
    of = dict(zip(dense_kernel.operand_kinds(p), given, strict=True))
    bare = p.bare()
    parts = [] if of["x"] is None else [matmul(bare, of["x"], w)]
    parts += [] if of["w"] is None else [matmul(bare, x, of["w"])]
    if of.get("b") is not None:
        parts.append(jnp.broadcast_to(reference.spread_bias(p, of["b"]), p.y_shape))
    if of.get("c") is not None:
        parts.append(jnp.broadcast_to(reference.scaled(p.beta, of["c"]), p.y_shape))
    return parts


RULES = layer.rules(dense_kernel, tangents, cotangents)
primitives.fuse(dense_kernel, RULES)


# ----------------------------------------------------------------------------------------------------------------------
# The gradient of a layer's pre-activation, from the layer behind it


def through_activation(p: DenseProblem, dy: Array, kept: Array) -> list[Array]:
    """dz = dy * f'(kept), and its sum over the rows, in at least float32."""
    dz = activate_grad(p.activation, kept, dy)
    return [dz, jnp.sum(dz, 0)]


def _product_of(p: DenseProblem) -> DenseProblem:
    """dense_gradient's product alone."""
    named = p.algorithm is not None and p.algorithm.partition(" ")[0] == _plan.GRADIENT
    return replace(p.bare(), algorithm=None if named else p.algorithm)


def _gradient_by_calls(p: DenseProblem, dy: Array, w: Array, kept: Array) -> list[Array]:
    return through_activation(p, matmul(_product_of(p), dy, w), kept)


def _gradient_shard(p: DenseProblem, split: sharding.Split, dy: Array, w: Array, kept: Array) -> list[Array]:
    """The derivative needs the whole product: where that is split it comes after adding the parts."""
    if "k" in split:
        dz, db = through_activation(p, jax.lax.psum(matmul(_product_of(p), dy, w), split["k"]), kept)
    else:
        dz, db = dense_gradient(p, dy, w, kept)
    if "m" in split:
        db = jax.lax.psum(db.astype(_problem.promoted(db.dtype, "float32")), split["m"]).astype(db.dtype)
    return [dz, db]


# dense_gradient: dz = (alpha * dy @ op(w)) * f'(kept), (m, n), and its sum over the rows, db (n,), where a kernel makes
# both; elsewhere the product, by a plan of its own, and what XLA makes of the rest. `kept` is the z that f was given,
# or the y that it gave: f's `residual`. The problem is the product's, with f for its activation.
dense_gradient = primitives.kernel(
    "dense_gradient",
    "dy w kept -> dz db",
    replace(FAMILY, batch=None),
    reference=_gradient_by_calls,
    flops=_flops(more=1),
    run=_gradient_shard,
)
primitives.by_reference(dense_gradient)


# ----------------------------------------------------------------------------------------------------------------------
# The public function


@overload
def dense(
    x: Operand,
    w: Operand,
    b: Operand | None = None,
    *,
    return_preactivation: Literal[False] = False,
    **options: Unpack[DenseOptions],
) -> Array: ...
@overload
def dense(
    x: Operand,
    w: Operand,
    b: Operand | None = None,
    *,
    return_preactivation: Literal[True],
    **options: Unpack[DenseOptions],
) -> tuple[Array, Array]: ...
@overload
def dense(
    x: Operand,
    w: Operand,
    b: Operand | None = None,
    *,
    return_preactivation: bool,
    **options: Unpack[DenseOptions],
) -> Array | tuple[Array, Array]: ...
def dense(
    x: Operand,  # (..., K)
    w: Operand,  # (K, N)
    b: Operand | None = None,  # scalar, (M,) or (M, 1), (N,) or (1, N)
    *,
    c: Operand | None = None,  # (..., N)
    alpha: float = 1.0,
    beta: float = 1.0,
    activation: ToActivation = None,
    return_preactivation: bool = False,
    precision: Precision = None,
    scale: Operand | float | None = None,  # (N,), or a number
    residual: Operand | None = None,  # (..., N)
    residual_scale: Operand | float | None = None,  # a number
    out_scale: Operand | float | None = None,  # a number
    out_dtype: DTypeLike | None = None,
    algorithm: DenseAlgorithm | None = None,
    implementation: Implementation | None = None,
) -> Array | tuple[Array, Array]:
    """Matrix product with addend, bias and activation, in one pass.

    Equivalent JAX code::

        z = alpha * x @ w + beta * c + b
        y = activation(z)

    Example::

        x, w, b = jnp.ones((8, 64)), jnp.ones((64, 10)), jnp.zeros(10)
        y = jaxconv.dense(x, w, b, activation="gelu")  # (8, 10)

    Args:
      x: (..., K); the leading axes together are the M rows. float32, bfloat16, float16 or float64; sums are
        accumulated in at least float32.
      w: (K, N), of x's dtype.
      b: bias of x's dtype: a scalar (or (1, 1), or (1,) where N > 1), one per column ((N,) or (1, N)), or one per row
        (x.shape[:-1], or that with a trailing 1). Where M == N a 1-D bias is per column.
      c: an addend of the result's shape (..., N), or None.
      alpha, beta: Python numbers, fixed when the function is traced.
      activation, precision, return_preactivation, implementation: see `conv2d`.
      scale, residual, residual_scale, out_scale, out_dtype: of 8-bit x and w, see below.
      algorithm: forces one native algorithm, in forward and backward: "gemm", "sm90" (Hopper).

    Where x and w have 8 bits, the arithmetic and the types are those of `conv2d`'s 8-bit numbers::

        v = float32(x @ w) * scale[n] + b[n] + float32(residual) * residual_scale
        y = (activation(v) * out_scale).astype(out_dtype)  # 8 bits: rounded to nearest even, saturated

    `scale` is (N,) or a number, the residual has the result's shape. b is one per column or a scalar: float32, or
    int32, which is added to the sums of integers. There are no c, alpha and beta, and integers without `scale` give
    their sums, int32. Such a call has no derivative. On Hopper a kernel (`sm90/eight`) runs it in one pass if x or w is
    uint8, or if the kernel has at least as many tiles of 128 x 128 results as the GPU has multiprocessors. XLA runs
    sums of int8 alone and calls of fewer tiles, where it is as fast or faster at most sizes. implementation="native"
    takes the kernel wherever it can run::

        q = jaxconv.dense(x, w, b, scale=x_scale * w_scale, activation="relu", out_scale=1 / y_scale)  # int8 of int8

    Returns:
      y of x's dtype, (..., N); or (y, z) with return_preactivation.

    Raises:
      TypeError, ValueError: when the arguments do not fit together (at trace time), naming the argument, what it got
        and what was expected; ValueError when a forced implementation or algorithm cannot run, with the reason.

    Differentiable in x, w, b and c to any order, in forward and reverse mode.
    """
    scales = dict(scale=scale, residual_scale=residual_scale, out_scale=out_scale, out_dtype=out_dtype)
    how = dict(activation=activation, return_preactivation=return_preactivation, precision=precision)
    how |= dict(algorithm=algorithm, implementation=implementation)
    if conv_scaled.asked(x, tuple(scales.values())):
        for name, given, expected in (
            ("c", c is not None, "residual= and residual_scale="),
            ("alpha", alpha != 1.0, "scale="),
            ("beta", beta != 1.0, "residual_scale="),
        ):
            if given:
                raise ValueError(f"dense: {name} was given with 8-bit x or a scale, expected {expected} in its place")
        return conv_scaled.run_dense(x, w, b, residual, **scales, **how)
    if residual is not None:
        raise ValueError("dense: residual was given, expected 8-bit x and w with it, or c= in its place")
    x, w = _problem.as_array("dense", "x", x), _problem.as_array("dense", "w", w)
    b = None if b is None else _problem.as_array("dense", "b", b)
    c = None if c is None else _problem.as_array("dense", "c", c)
    p = DenseProblem.infer(
        "dense",
        x,
        w,
        b,
        c,
        alpha=alpha,
        beta=beta,
        **how,
    )
    y_shape = (*x.shape[:-1], p.n)
    rows = x.reshape(p.m, p.k)
    rest = [] if b is None else [b.reshape(p.b_shape)]
    rest += [] if c is None else [c.reshape(p.c_shape)]
    if not rest and p.activation.name == "none":
        y = matmul(p.bare(), rows, w).reshape(y_shape)
        return (y, y) if return_preactivation else y
    outs = [out.reshape(y_shape) for out in dense_kernel(p, rows, w, *rest)]
    return (outs[0], outs[-1]) if return_preactivation else outs[0]

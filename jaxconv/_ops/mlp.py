"""Two dense layers in a row: the public function."""

from __future__ import annotations

from typing import Any

from jaxconv import _problem
from jaxconv._core.types import Array, DenseAlgorithm, Implementation, Operand, Precision, ToActivation
from jaxconv._ops.dense import dense_kernel, matmul
from jaxconv._problem import DenseProblem, MlpProblem
from jaxconv.joints import region


def _layer(p: DenseProblem, x: Array, w: Array, *b: Array) -> list[Array]:
    if p.bias is None and p.activation.name == "none":
        return [matmul(p.bare(), x, w)] * (1 + p.save_preactivation)
    return dense_kernel(p, x, w, *b)


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
    """Two dense layers in a row, as in the block of a transformer or of ConvNeXt.

    Equivalent JAX code::

        h = activation(x @ w1 + b1)
        y = out_activation(h @ w2 + b2)

    Example::

        x = jnp.ones((8, 64))
        y = jaxconv.mlp(x, jnp.ones((64, 256)), jnp.zeros(256), jnp.ones((256, 64)), jnp.zeros(64))  # (8, 64)

    Forward, this is two calls of `dense`. Backward, with dz2 = dy * out_activation'(z2), one kernel computes the
    gradients of the first layer's pre-activation and of its bias, where it was measured to be faster (16 bits,
    Hopper)::

        dz1 = (dz2 @ w2.T) * activation'(z1)
        db1 = sum of dz1 over the rows

    Then the gradient of h is never written, and dz1 is not read again for its sum. Elsewhere a product is one call, and
    XLA computes the rest. `explain` says which, and why. x and h are kept for the gradient, and z1 too if the
    activation's derivative is no function of h.

    Args:
      x: (..., K); the leading axes together are the M rows. float32, bfloat16, float16 or float64; sums are accumulated
        in at least float32.
      w1, w2: (K, H) and (H, N), of x's dtype.
      b1, b2: (H,) and (N,), of x's dtype, or None.
      activation: of the first layer; out_activation: of the second, usually none. See `conv2d`.
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
    first = [a for n, a in arrays.items() if a is not None and n in ("w1", "b1")]
    second = [a for n, a in arrays.items() if a is not None and n in ("w2", "b2")]

    def layers(x: Array, *rest: Array) -> list[Array]:
        hidden = _layer(p.first, x, *rest[: len(first)])
        return _layer(p.second, hidden[0], *rest[len(first) :])

    outs = region.call(layers, x.reshape(p.first.m, p.first.k), *first, *second)
    return [out.reshape(y_shape) for out in outs]

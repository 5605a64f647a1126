"""Squeeze-and-excitation: its kernels, its rule pair, the public function."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxconv import _plan, _problem
from jaxconv._core import primitives, sharding
from jaxconv._core.activations import activate, activate_tangent
from jaxconv._core.types import Array, Implementation, Operand, SqueezeExciteAlgorithm, ToActivation, ToGate
from jaxconv._ops import reference
from jaxconv._problem import SqueezeExciteProblem

replace = dataclasses.replace


# w1, b1, w2 and b2 are parameters, of kinds of their own.
KINDS = {"x": "x y dx dy", "m": "mean gate dz2", "z": "z1 dz1"}


def _array(p: SqueezeExciteProblem, kind: str) -> primitives.Typed:
    """x is an array like x; m of numbers per image and channel, z per image and hidden."""
    shapes = {"x": p.x_shape, "m": p.mean_shape, "z": p.hidden_shape, "w1": p.w1_shape, "w2": p.w2_shape}
    shapes |= {"b1": (p.hidden,), "b2": (p.channels,)}
    return shapes[kind], p.dtype if kind == "x" else p.param_dtype


def _attrs(p: SqueezeExciteProblem, plan: _plan.Plan) -> dict[str, Any]:
    return {"squeeze": {"activation": p.activation.name, "slope": np.float64(p.activation.slope), "gate": p.gate}}


# ----------------------------------------------------------------------------------------------------------------------
# On a mesh images may be split, which is nothing to the kernels; pixels and channels too: then a shard computes the
# formula, with a sum over the shards of a few numbers an image. x is never gathered.


def _partition(
    p: SqueezeExciteProblem, operands: Sequence[str], results: Sequence[str], run: Any
) -> sharding.Partition:
    axes = ["n", *(f"d{axis}" for axis in range(1, len(p.shape) - 1)), "c"]
    names = {"x": " ".join(axes), "m": "n c", "z": "n r", "w1": "c r", "b1": "r", "w2": "r c", "b2": "c"}

    def local(parts: Any) -> SqueezeExciteProblem:
        return replace(p, shape=tuple(e // parts[axis] for axis, e in zip(axes, p.shape, strict=True)))

    run = functools.partial(run, p)
    return sharding.Partition([names[o] for o in operands], [names[r] for r in results], axes, local, run=run)


class _Shard:
    """Sums over the shards of an image."""

    def __init__(self, split: sharding.Split):
        self._pixels = tuple(a for name, axes in split.items() if name.startswith("d") for a in axes)
        self._channels = tuple(split.get("c", ()))

    @property
    def whole(self) -> bool:
        return not (self._pixels or self._channels)

    def over_pixels(self, a: Array) -> Array:
        return lax.psum(a, self._pixels) if self._pixels else a

    def over_channels(self, a: Array) -> Array:
        return lax.psum(a, self._channels) if self._channels else a


def _forward_shard(
    whole: SqueezeExciteProblem, p: SqueezeExciteProblem, split: sharding.Split, *args: Array
) -> list[Array]:
    shard = _Shard(split)
    if shard.whole:
        return excite(p, *args)
    x, w1, b1, w2, b2 = args
    wide = x.astype(p.param_dtype)
    mean = shard.over_pixels(reference.over_pixels(p, wide)) / whole.pixels
    z1 = shard.over_channels(reference.small_product(mean, w1)) + b1[None]
    gate = reference.gated(p.gate, reference.small_product(activate(p.activation, z1), w2) + b2[None])
    return [(wide * reference.of_pixels(p, gate)).astype(x.dtype), mean, z1, gate]


def _backward_shard(
    whole: SqueezeExciteProblem, p: SqueezeExciteProblem, split: sharding.Split, *args: Array
) -> list[Array]:
    shard = _Shard(split)
    if shard.whole:
        return backward(p, *args)
    x, dy, w1, w2, z1, gate = args
    wide = dy.astype(p.param_dtype)
    dgate = shard.over_pixels(reference.over_pixels(p, wide * x.astype(p.param_dtype)))
    dz2 = reference.gated_grad(p.gate, gate, dgate)
    dz1 = activate_tangent(p.activation, z1, shard.over_channels(reference.small_product(dz2, w2.T)))
    if not p.want_dx:
        return [dz2, dz1]
    constant = reference.small_product(dz1, w1.T) / whole.pixels
    return [dz2, dz1, (wide * reference.of_pixels(p, gate) + reference.of_pixels(p, constant)).astype(x.dtype)]


# ----------------------------------------------------------------------------------------------------------------------
# The kernels


def _batch(
    op: primitives.Kernel, p: SqueezeExciteProblem, args: list[Array], dims: list[int | None]
) -> primitives.Batched:
    """Mapped images are more images. Where parameters are mapped the reference is, by JAX."""
    shared = [kind not in KINDS for kind in op.operand_kinds(p)]
    if any(dim is not None for dim, parameter in zip(dims, shared, strict=True) if parameter):
        return primitives.by_reference_mapped(op, p, args, dims)
    size = primitives.batch_size(args, dims)
    folded = [
        a if parameter else primitives.fold(primitives.to_front(a, dim, size), 0, 0)
        for a, dim, parameter in zip(args, dims, shared, strict=True)
    ]
    outs = op(replace(p, shape=(size * p.images, *p.shape[1:])), *folded)
    return [primitives.unfold(out, size, 0) for out in outs], [0] * len(outs)


FAMILY = primitives.Family(KINDS, _array, _attrs, _partition, batch=_batch)

# A sum and a product of each element, and two products of each image
excite = primitives.kernel(
    "squeeze_excite",
    "x w1 b1 w2 b2 -> y mean z1 gate",
    FAMILY,
    reference=reference.squeeze_excite,
    flops=lambda p: 2 * p.size + 4 * p.images * p.channels * p.hidden,
    run=_forward_shard,
)
# A product, its sum; for dx a product and a sum more, and the other product of each image
backward = primitives.kernel(
    "squeeze_excite_backward",
    "x dy w1 w2 z1 gate -> dz2 dz1 dx?",
    FAMILY,
    reference=reference.squeeze_excite_backward,
    flops=lambda p: (2 * p.size + 2 * p.images * p.channels * p.hidden) * (1 + p.want_dx),
    also="want_dx",
    run=_backward_shard,
)
primitives.by_reference(backward)


def _forward(p: SqueezeExciteProblem, *args: Array) -> tuple[list[Array], Any]:
    outs = excite(p, *args)
    return outs, (*args, *outs[1:])


def _backward(
    p: SqueezeExciteProblem, residuals: Any, cotangents: Sequence[Array | None], want: Sequence[bool]
) -> list[Array | None]:
    """The kernel for the cotangent of y. Those of the others are a derivative of the gradient's: the reference's."""
    *args, mean, z1, gate = residuals
    dy = cotangents[0]
    if any(ct is not None for ct in cotangents[1:]):
        outs, pull = jax.vjp(functools.partial(reference.squeeze_excite, p), *args)
        given = [jnp.zeros_like(o) if ct is None else ct for o, ct in zip(outs, cotangents, strict=True)]
        return [grad if wanted else None for grad, wanted in zip(pull(given), want, strict=True)]
    x, w1, _, w2, _ = args
    dz2, dz1, *big = backward(replace(p, want_dx=want[0]), x, dy, w1, w2, z1, gate)
    grads = [
        lambda: big[0],
        lambda: reference.small_product(mean.T, dz1),
        lambda: jnp.sum(dz1, 0),
        lambda: reference.small_product(activate(p.activation, z1).T, dz2),
        lambda: jnp.sum(dz2, 0),
    ]
    return [grad() if wanted else None for grad, wanted in zip(grads, want, strict=True)]


def _tangent(p: SqueezeExciteProblem, residuals: Any, tangents: Sequence[Array | None]) -> list[Array]:
    x, w1, _, w2, _, mean, z1, gate = residuals
    tx, tw1, tb1, tw2, tb2 = tangents

    def total(shape: tuple[int, ...], *parts: Array | None) -> Array:
        terms = [part for part in parts if part is not None]
        return sum(terms[1:], terms[0]) if terms else jnp.zeros(shape, p.param_dtype)

    product = reference.small_product
    tmean = total(p.mean_shape, None if tx is None else reference.over_pixels(p, tx.astype(p.param_dtype)) / p.pixels)
    tz1 = product(tmean, w1)
    tz1 = total(p.hidden_shape, tz1, None if tw1 is None else product(mean, tw1), None if tb1 is None else tb1[None])
    th = activate_tangent(p.activation, z1, tz1)
    tz2 = product(th, w2)
    th2 = None if tw2 is None else product(activate(p.activation, z1), tw2)
    tz2 = total(p.mean_shape, tz2, th2, None if tb2 is None else tb2[None])
    tgate = reference.gated_grad(p.gate, gate, tz2)
    ty = x.astype(p.param_dtype) * reference.of_pixels(p, tgate)
    if tx is not None:
        ty = ty + tx.astype(p.param_dtype) * reference.of_pixels(p, gate)
    return [ty.astype(x.dtype), tmean, tz1, tgate]


primitives.fuse(excite, primitives.Rules(lambda p: replace(p, save=True), _forward, _backward, _tangent))


# ----------------------------------------------------------------------------------------------------------------------
# The public function


def squeeze_excite(
    x: Operand,  # (N, ..., C)
    w1: Operand,  # (C, R)
    b1: Operand | None,  # (R,)
    w2: Operand,  # (R, C)
    b2: Operand | None,  # (C,)
    *,
    activation: ToActivation = "relu",
    gate: ToGate = "sigmoid",
    algorithm: SqueezeExciteAlgorithm | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Squeeze-and-excitation, channels last: scales each image's channels by gates computed from their means.

    Equivalent JAX code, in float32 (float64 for float64 x)::

        mean = jnp.mean(x, range(1, x.ndim - 1))
        g = gate(activation(mean @ w1 + b1) @ w2 + b2)
        y = x * g[:, None, None]

    Example::

        x = jnp.ones((8, 16, 16, 64))
        y = jaxconv.squeeze_excite(x, jnp.ones((64, 4)), jnp.zeros(4), jnp.ones((4, 64)), jnp.zeros(64))

    On a GPU one launch reads x once; the gradient of x is another launch, which reads x and dy once. A cluster of CTAs
    keeps an image in shared memory while its gates are computed. x, the mean, the gates and the input of the activation
    are kept for the gradient.

    Args:
      x: (N, ..., C), at least two dimensions; float32, bfloat16, float16 or float64.
      w1, w2: (C, R) and (R, C), float32 for 16-bit x, else of x's dtype. A narrower dtype is cast. The kernel of a 1x1
        convolution fits if you drop its first two axes.
      b1, b2: (R,) and (C,), of the same dtypes, or None.
      activation: of the hidden numbers; see `conv2d`.
      gate: "sigmoid" or "hard_sigmoid", relu6(z + 3) / 6, or jax.nn's function of that name.
      algorithm: forces a native algorithm: "one_pass" (channels in whole vectors of 16 bytes; R up to 2048; on a GPU
        of compute capability 9.0 an image is shared by up to 8 CTAs, elsewhere one CTA has all of it).
      implementation: see `conv2d`. XLA runs it, whatever is asked for, where parameters are mapped (vmap) and where an
        image is split over devices.

    Returns:
      y of x's shape and dtype, rounded once. The mean, the hidden numbers and the gates are not rounded.

    Raises:
      TypeError, ValueError: when the arguments do not fit together (at trace time), naming the argument, what it got
        and what was expected; ValueError when a forced implementation or algorithm cannot run, with the reason.

    Differentiable in every array, to any order, in forward and reverse mode. Sums are in a fixed order. Source: Hu et
    al. 2018, "Squeeze-and-Excitation Networks" (arXiv:1709.01507).
    """
    name = "squeeze_excite"
    x = _problem.as_array(name, "x", x)
    w1, b1, w2, b2 = (
        None if value is None and argument in ("b1", "b2") else _problem.as_parameter(name, argument, value, x)
        for argument, value in (("w1", w1), ("b1", b1), ("w2", w2), ("b2", b2))
    )
    p = SqueezeExciteProblem.infer(
        name, x, w1, b1, w2, b2, activation=activation, gate=gate, algorithm=algorithm, implementation=implementation
    )
    # As constants of the program, which no kernel has to fill; of symbolic extents there are none.
    b1, b2 = (
        (jnp.asarray(np.zeros(size, p.param_dtype)) if _problem.is_number(size) else jnp.zeros(size, p.param_dtype))
        if bias is None
        else bias
        for bias, size in ((b1, p.hidden), (b2, p.channels))
    )
    return excite(p, x, w1, b1, w2, b2)[0]

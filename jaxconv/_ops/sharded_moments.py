"""Mean and variance of an array that is split over a mesh, from those of its shards."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxconv._ops import reference
from jaxconv._problem import BatchNormProblem

Array = jax.Array


def of_shard(p: BatchNormProblem, x: Array, inside: Array | None) -> list[Array]:
    """[k, mean - k, biased variance] of each channel, k a sample; and where not all elements of the shard are x's own,
    how many are: none in some shards."""
    if inside is None:
        return list(reference.batchnorm_moments(p, x))
    count = jnp.sum(inside, reference.reduced_axes(p), dtype=p.param_dtype)
    mean, var = reference.batchnorm_masked_moments(p, jnp.where(inside, x, 0), inside)
    return [jnp.where(count > 0, mean, 0), jnp.zeros_like(mean), jnp.where(count > 0, var, 0), count]


def merged(moments: Sequence[Array], mesh_axes: tuple[str, ...], reduced: int) -> tuple[Array, Array]:
    """(mean, biased variance) of `reduced` elements, from each shard's `of_shard`. By one sum over the mesh.

    Source: Chan, Golub and LeVeque, "Algorithms for Computing the Sample Variance" (1983).
    """
    # The variance of the shards' means needs all of them, so every shard gets all moments. They are gathered by a sum
    # in which each shard fills its own place, because a sum's result is known to be replicated.
    shards, mine = jax.lax.axis_size(mesh_axes), jax.lax.axis_index(mesh_axes)
    own = jnp.stack(moments)
    place = jnp.arange(shards).reshape(shards, *(1,) * own.ndim) == mine
    k, shift, variances, *counts = jnp.moveaxis(jax.lax.psum(jnp.where(place, own, 0), mesh_axes), 1, 0)
    # About one shard's sample: a mean rounded to float32 may be further off than the deviations are large.
    shift = (k - k[0]) + shift
    weights = counts[0] / reduced if counts else None
    middle = _mean(shift, weights)
    t = reference.square_scale(len(k))
    squares = variances * t**2 + ((shift - middle) * t) ** 2
    return k[0] + middle, _mean(squares, weights) * (1 / t**2)


def _mean(values: Array, weights: Array | None) -> Array:
    return jnp.mean(values, 0) if weights is None else jnp.sum(weights * values, 0)

"""What `jax.checkpoint` keeps of jaxconv's ops: policies for its `policy` argument.

    block = jax.checkpoint(block, policy=jaxconv.checkpoint_policies.save_convs)

jax's own policies for dots do not know jaxconv's kernels. These do, and they combine with any of jax's through
`jax.checkpoint_policies.save_from_both_policies`. Under differentiation the results of fused ops also carry names, for
`jax.checkpoint_policies.save_only_these_names`: "jaxconv_conv", "jaxconv_dense", "jaxconv_batchnorm_train",
"jaxconv_batchnorm_given", "jaxconv_groupnorm", "jaxconv_max_pool", "jaxconv_avg_pool", "jaxconv_squeeze_excite".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxconv._core.primitives import Kernel, Plain
from jaxconv._ops.avg_pool import kernel as avg_pool
from jaxconv._ops.batchnorm import given, infer, signs, train
from jaxconv._ops.conv import (
    add_statistics,
    conv_add,
    conv_kernel,
    dgrad,
    dgrad_add,
    dgrad_sums,
    fprop,
    gradient,
    gradient_add,
    statistics,
    wgrad,
)
from jaxconv._ops.conv_float8 import kernel as conv_float8
from jaxconv._ops.conv_normalised import normalised, normalised_statistics, normalised_wgrad
from jaxconv._ops.conv_shortcut import kernel as conv_shortcut
from jaxconv._ops.dense import dense_gradient, dense_kernel, matmul
from jaxconv._ops.gated import dense_gated, dense_gated_gradient
from jaxconv._ops.groupnorm import norm
from jaxconv._ops.pool import kernel as max_pool
from jaxconv._ops.squeeze_excite import excite

_CONVS = (
    *(fprop, dgrad, dgrad_add, dgrad_sums, gradient, gradient_add, wgrad, conv_kernel, conv_add, conv_shortcut),
    *(statistics, add_statistics, normalised, normalised_statistics, normalised_wgrad, conv_float8),
)
_DENSES = (matmul, dense_kernel, dense_gated, dense_gradient, dense_gated_gradient)
_NORMS = (train, infer, given, signs, norm)
_POOLS = (max_pool, avg_pool)
_EXCITES = (excite,)


def _of(kernels: Sequence[Kernel | Plain], primitive: Any, params: dict[str, Any]) -> bool:
    """Whether a value is the result of one of `kernels`, directly or by its name."""
    return any(primitive is k.primitive or params.get("name") == k.primitive.name for k in kernels)


def save_convs(primitive: Any, *_: Any, **params: Any) -> bool:
    """Keeps the results of convolutions (y, and z where the activation's derivative needs it); recomputes the rest.

    Example::

        block = jax.checkpoint(block, policy=jaxconv.checkpoint_policies.save_convs)
    """
    return _of(_CONVS, primitive, params)


def save_products(primitive: Any, *_: Any, **params: Any) -> bool:
    """Keeps the results of convolutions and dense layers, as jax's `dots_saveable` keeps those of dots.

    Example::

        block = jax.checkpoint(block, policy=jaxconv.checkpoint_policies.save_products)
    """
    return _of(_CONVS + _DENSES, primitive, params)


def save_all(primitive: Any, *_: Any, **params: Any) -> bool:
    """Keeps the results of every jaxconv op; recomputes the rest.

    Example::

        block = jax.checkpoint(block, policy=jaxconv.checkpoint_policies.save_all)
    """
    return _of(_CONVS + _DENSES + _NORMS + _POOLS + _EXCITES, primitive, params)


def save_all_but_batchnorms(primitive: Any, *_: Any, **params: Any) -> bool:
    """Keeps all results but those of norms, which are cheap to recompute from a convolution's result.

    Example::

        block = jax.checkpoint(block, policy=jaxconv.checkpoint_policies.save_all_but_batchnorms)
    """
    return not _of(_NORMS, primitive, params)


def save_nothing_of_jaxconv(primitive: Any, *_: Any, **params: Any) -> bool:
    """Keeps all results but jaxconv's: every jaxconv op is run again.

    Example::

        block = jax.checkpoint(block, policy=jaxconv.checkpoint_policies.save_nothing_of_jaxconv)
    """
    return not _of(_CONVS + _DENSES + _NORMS + _POOLS + _EXCITES, primitive, params)

"""Mistakes that type checkers must find: `make typecheck`. An ignore that nothing needs is an error there."""

from __future__ import annotations

import flax.nnx
import jax
import jax.numpy as jnp

import jaxconv

x = jnp.ones((2, 8, 8, 4))
w = jnp.ones((3, 3, 4, 6))
rngs = flax.nnx.Rngs(0)

jaxconv.conv2d(x, w, activation="relu7")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
jaxconv.conv2d(x, w, padding="CAUSAL")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
jaxconv.conv2d(x, w, layout="NWC")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
jaxconv.conv2d(x, w, implementation="cudnn")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
jaxconv.conv2d(x, w, algorithm="winograd")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
jaxconv.conv2d(x, w, strides=2)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
jaxconv.conv_transpose1d(x, w, padding="SAME_LOWER")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
jaxconv.dense(x, w, algorithm="im2col")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
jaxconv.dense(x, w, scale="1")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
jaxconv.batchnorm(x, None, None, x, x)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
pair: jax.Array = jaxconv.conv2d(x, w, return_preactivation=True)  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
jaxconv.nnx.Conv(4, 8, 3, kernel=3, rngs=rngs)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
jaxconv.nnx.Linear(4, 8)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
jaxconv.nnx.Linear(4, "8", rngs=rngs)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
jaxconv.linen.Conv(8, (3, 3), activation=3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def f(x: jax.Array) -> jax.Array:
    return x


jaxconv.accelerate(f)(x, x)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
jaxconv.accelerate(f)("x")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
text: str = jaxconv.accelerate(f)(x)  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
text = jaxconv.accelerate(f).report(x)  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
text = jaxconv.explain(f)(x)  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
text = jaxconv.tune(f)(x)  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
text = jaxconv.freeze(f)(x)  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
jaxconv.freeze(f, quantize="int4")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
jaxconv.winograd  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]

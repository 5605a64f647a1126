"""A user's program, for type checkers: `make typecheck`. It is checked, and also run (tests/test_package.py)."""

from __future__ import annotations

import functools
from typing import Any, assert_type

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np

import jaxconv

x = jnp.ones((2, 8, 8, 4))
w = jnp.ones((3, 3, 4, 6))
b = jnp.ones(6)
v = jnp.ones(6)

# Arrays, not Any
y = jaxconv.conv2d(x, w, b, stride=2, padding="SAME", activation="relu")
assert_type(y, jax.Array)
assert_type(jaxconv.conv2d(x, w, return_preactivation=True), tuple[jax.Array, jax.Array])
assert_type(jaxconv.conv2d(np.ones((1, 8, 8, 4), np.float32), w), jax.Array)
assert_type(jaxconv.conv2d(x, w, b, residual=jnp.ones((2, 8, 8, 6)), activation="relu"), jax.Array)
keep: bool = bool(y.shape[0])
either = jaxconv.conv2d(x, w, return_preactivation=keep)
assert_type(either, jax.Array | tuple[jax.Array, jax.Array])
assert_type(jaxconv.dense(x, jnp.ones((4, 5)), activation=jax.nn.silu), jax.Array)
assert_type(jaxconv.dense(x, jnp.ones((4, 5)), return_preactivation=True), tuple[jax.Array, jax.Array])
x8, w8 = x.astype(jnp.int8), jnp.ones((4, 5), jnp.int8)
assert_type(jaxconv.dense(x8, w8, scale=0.5, residual=jnp.ones((2, 8, 8, 5)), out_dtype="uint8"), jax.Array)
assert_type(jaxconv.mlp(x, jnp.ones((4, 8)), None, jnp.ones((8, 4)), v[:4], activation=jax.nn.relu), jax.Array)
assert_type(jaxconv.conv1d(x[0], w[0], padding="CAUSAL", dilation=2), jax.Array)
assert_type(jaxconv.conv3d(x[None], w[None], layout="NDHWC", padding=((0, 0), (1, 1), (1, 1))), jax.Array)
assert_type(jaxconv.conv_transpose2d(x, w, stride=(2, 2), transpose_kernel=False), jax.Array)
assert_type(jaxconv.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")), jax.Array)
assert_type(jaxconv.batchnorm(y, v, v, v, v, training=True), tuple[jax.Array, jax.Array, jax.Array])
assert_type(jaxconv.layernorm(y, v, v, epsilon=1e-5, algorithm="two_read"), jax.Array)
assert_type(
    jaxconv.squeeze_excite(y, jnp.ones((6, 2)), None, jnp.ones((2, 6)), v, activation="silu", gate=jax.nn.hard_sigmoid),
    jax.Array,
)
assert_type(jaxconv.groupnorm(y, v, v, groups=2, activation="silu", algorithm="two_read"), jax.Array)
assert_type(
    jaxconv.conv_batchnorm(x, w, v, v, v, v, training=False, activation="relu6"),
    tuple[jax.Array, jax.Array, jax.Array],
)
assert_type(
    jaxconv.batchnorm_conv(y, v, v, v, v, jnp.ones((3, 3, 1, 6)), training=True, groups=6, activation="silu"),
    tuple[jax.Array, jax.Array, jax.Array],
)
assert_type(jaxconv.max_pool(y, 3, stride=2, padding="SAME"), jax.Array)
assert_type(jaxconv.avg_pool(y, 3, stride=2, padding="SAME", count_include_pad=False), jax.Array)
assert_type(jaxconv.linen.max_pool(y, (2, 2), strides=(2, 2)), jax.Array)
assert_type(jaxconv.linen.avg_pool(y, (2, 2), strides=(2, 2)), jax.Array)

# Every form of an activation
for activation in (jax.nn.relu, jnp.tanh, functools.partial(jax.nn.gelu, approximate=False)):
    jaxconv.conv2d(x, w, activation=activation)
jaxconv.conv2d(x, w, activation=("leaky_relu", 0.2), algorithm="im2col", precision="highest")
jaxconv.conv2d(x, w, activation="swish", implementation="xla", precision=jax.lax.Precision.HIGH)


# Flax's modules by import alone
class Net(flax.linen.Module):
    features: int = 8

    @flax.linen.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = jaxconv.linen.Conv(self.features, (3, 3), strides=2, activation="relu")(x)
        x = jaxconv.linen.BatchNorm(use_running_average=not train, activation=jax.nn.relu)(x, residual=x)
        x = jaxconv.linen.GroupNorm(num_groups=2, activation="silu")(x)
        x = jaxconv.linen.LayerNorm(epsilon=1e-5)(x)
        return jaxconv.linen.Dense(10)(x)


net = Net()
variables = net.init(jax.random.key(0), x, True)


class NnxNet(flax.nnx.Module):
    def __init__(self, rngs: flax.nnx.Rngs):
        self.conv = jaxconv.nnx.Conv(4, 8, (3, 3), strides=2, padding="SAME", activation="silu", rngs=rngs)
        self.norm = jaxconv.nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
        self.rows = jaxconv.nnx.LayerNorm(8, epsilon=1e-5, use_bias=False, rngs=rngs)
        self.group = jaxconv.nnx.GroupNorm(8, num_groups=2, epsilon=1e-5, activation="silu", rngs=rngs)
        self.head = jaxconv.nnx.Linear(8, 10, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.group(self.norm(self.conv(x))))


nnx_net = NnxNet(flax.nnx.Rngs(0))
assert_type(nnx_net(x), jax.Array)


# Functions of the user's, which stay what they are
def loss(params: dict[str, jax.Array], batch: jax.Array, *, scale: float = 1.0) -> jax.Array:
    return scale * jnp.mean(jaxconv.conv2d(batch, params["w"]))


params = {"w": w}
accelerated = jaxconv.accelerate(loss)
assert_type(accelerated(params, x, scale=2.0), jax.Array)
print(jaxconv.accelerate(loss).report(params, x))
told = accelerated.report(params, jax.ShapeDtypeStruct(x.shape, x.dtype), scale=2.0)
for finding in told.left:
    assert_type(finding.why, str)
held: jaxconv.Accelerated[..., jax.Array] = accelerated
step = jax.jit(jax.grad(jaxconv.accelerate(loss)))
predict = jax.jit(jaxconv.accelerate(net.apply), static_argnames="train")
assert_type(jaxconv.accelerate(nnx_net)(x), jax.Array)
assert_type(jaxconv.explain(loss)(params, x), jaxconv.Explanation)
assert_type(jaxconv.explain(accelerated)(params, jax.ShapeDtypeStruct(x.shape, x.dtype)), jaxconv.Explanation)


@jaxconv.accelerate
def decorated(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.conv(x, w, (1, 1), "SAME")


class Model:
    @jaxconv.accelerate
    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.nn.relu(x @ jnp.ones((4, 4)))

    @jaxconv.accelerate
    def features(self, x: jax.Array) -> jax.Array:
        return jax.nn.relu(x @ jnp.ones((4, 4)))


print(decorated.report(jnp.ones((2, 4, 8, 8)), jnp.ones((6, 4, 3, 3))))
own_model = Model()
assert_type(own_model.features(x), jax.Array)

# What ran, and why
explanation = jaxconv.explain(lambda x: jaxconv.conv2d(x, w))(x)
assert_type(explanation, jaxconv.Explanation)
for call in explanation:
    assert_type(call.op, str)
    assert_type(call.plan.reason, str)
assert_type(jaxconv.info(), str)
tuning = jaxconv.tune(lambda x: jaxconv.conv2d(x, w), seconds=1.0, verify=False, save=False)(x)
assert_type(tuning.after_ms, float | None)
for row in tuning:
    assert_type(row.best, str | None)
with jaxconv.tune.applied(jaxconv.tune.loads(jaxconv.tune.dumps())):
    jaxconv.conv2d(x, w)
assert_type(jaxconv.__version__, str)
checked: jax.export.Exported = jaxconv.check_exported(
    jax.export.export(jax.jit(jnp.sin), disabled_checks=jaxconv.export_checks())(x)
)
costs: dict[str, Any] = jaxconv.cost(jnp.sin)(x)
block = jax.checkpoint(lambda x: jaxconv.conv2d(x, w), policy=jaxconv.checkpoint_policies.save_convs)

# Serving
frozen = jaxconv.freeze(lambda w, x: jaxconv.conv2d(x, w), w)
assert_type(frozen, jaxconv.Frozen[jax.Array])
assert_type(frozen(x), jax.Array)
assert_type(frozen.apply(frozen.weights, x), jax.Array)
assert_type(frozen.replace(2 * w), jaxconv.Frozen[jax.Array])
print(frozen.report(x))
nnx_net.eval()
assert_type(jaxconv.freeze(nnx_net)(x), jax.Array)
assert_type(frozen.weights, dict[str, jax.Array])
quantised = jaxconv.freeze(lambda w, x: jaxconv.conv2d(x, w), w, quantize="int8", calibrate=[x], wide=("weight",))
assert_type(quantised, jaxconv.Frozen[jax.Array])
assert_type(quantised.quantization, jaxconv.Quantization | None)
launched: int = jaxconv.launches(frozen)(x).total

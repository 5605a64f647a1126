"""jaxconv.nnx against flax.nnx, module by module: the same variables, results, gradients, statistics and state."""

from __future__ import annotations

from typing import Any

import flax_cases
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_cases import KEY, array, assert_same, assert_same_description, randomised

import jaxconv
import jaxconv.nnx as jn
from jaxconv._core.activations import activate, parse

FEATURES = 8


@pytest.fixture(autouse=True)
def full_precision():
    """Products in float32 on a GPU too: TF32 would hide what is compared."""
    with jax.default_matmul_precision("highest"):
        yield


def both(name: str, *args: Any, **kwargs: Any) -> tuple[nnx.Module, nnx.Module]:
    """The same module of jaxconv and of Flax, with equal variables that are not all zeros or ones."""
    ours, flax = (getattr(layers, name)(*args, **kwargs, rngs=nnx.Rngs(KEY)) for layers in (jn, nnx))
    assert helpers.same_bits(nnx.state(ours), nnx.state(flax))
    assert_same_description(nnx.state(ours), nnx.state(flax))
    for module in (ours, flax):
        nnx.update(module, randomised(nnx.state(module)))
    return ours, flax


def results(module: nnx.Module, x: jax.Array, after: Any = lambda y: y, **kwargs: Any) -> Any:
    """(y, the state after the call, the gradients of the parameters and x)."""

    def product(m, x):
        y = after(m(x, **kwargs))
        return jnp.sum(y.astype(jnp.float32) * array(3, y.shape)), y

    (_, y), gradients = nnx.jit(nnx.value_and_grad(product, argnums=(0, 1), has_aux=True))(module, x)
    return y, nnx.state(module), gradients


def compare(ours: nnx.Module, flax: nnx.Module, x: jax.Array, activation: Any = None, **kwargs: Any) -> None:
    f = parse("test", activation)
    actual, wanted = results(ours, x, **kwargs), results(flax, x, lambda y: activate(f, y), **kwargs)
    narrow = max((ours.dtype or x.dtype, ours.param_dtype, x.dtype), key=lambda d: float(jnp.finfo(d).eps))
    assert_same(actual, wanted, terms=max(x.size, wanted[0].size), rounded_to=narrow)


# ----------------------------------------------------------------------------------------------------------------------
# Module by module: where linen and nnx share the computation (tests/test_linen.py has all of it), what they do not


@pytest.mark.parametrize(
    "case",
    (
        *("plain", "1d", "3d", "no_bias", "strides", "padding_mixed", "circular", "reflect", "causal", "groups"),
        *("kernel_dilation", "input_dilation", "mask", "no_batch_dimension", "several_batch_dimensions", "precision"),
        *("bfloat16", "bfloat16_parameters", "initialisers"),
    ),
)
def test_conv_is_flax_conv(case):
    shape, arguments = flax_cases.CONV[case]
    compare(*both("Conv", 4, FEATURES, **arguments), array(0, shape))


@pytest.mark.parametrize("case", ("plain", "strides", "circular", "transpose_kernel", "mask", "preferred_element_type"))
def test_conv_transpose_is_flax_conv_transpose(case):
    shape, arguments = flax_cases.CONV_TRANSPOSE[case]
    compare(*both("ConvTranspose", 4, FEATURES, **arguments), array(0, shape))


@pytest.mark.parametrize("case", ("plain", "no_bias", "vector", "batch_dimensions", "bfloat16", "dot_general"))
def test_linear_is_flax_linear(case):
    shape, arguments = flax_cases.DENSE[case]
    compare(*both("Linear", 4, FEATURES, **arguments), array(0, shape))


@pytest.mark.parametrize(
    "case",
    (
        *("plain", "matrix", "axis", "no_scale", "no_bias", "neither", "momentum_epsilon", "two_pass_variance"),
        *("initialisers", "bfloat16", "bfloat16_x", "float16_parameters"),
    ),
)
@pytest.mark.parametrize("average", (False, True), ids=("training", "inference"))
def test_batchnorm_is_flax_batchnorm(case, average):
    shape, dtype, arguments = flax_cases.BATCHNORM[case]
    compare(*both("BatchNorm", 4, use_running_average=average, **arguments), array(0, shape, dtype))


@pytest.mark.parametrize("case", [case for case in flax_cases.GROUPNORM if case not in ("matrix", "3d")])
def test_groupnorm_is_flax_groupnorm(case):
    shape, dtype, arguments = flax_cases.GROUPNORM[case]
    compare(*both("GroupNorm", 12, **arguments), array(0, shape, dtype))


@pytest.mark.parametrize("case", [case for case in flax_cases.LAYERNORM if case != "integers"])
def test_layernorm_is_flax_layernorm(case):
    shape, dtype, arguments = flax_cases.LAYERNORM[case]
    compare(*both("LayerNorm", 12, **arguments), array(0, shape, dtype))


def test_batchnorm_masks_statistics_as_flax():
    keep = np.broadcast_to(np.arange(4)[:, None, None, None] < 3, (4, 5, 5, 4))
    compare(*both("BatchNorm", 4), array(0, (4, 5, 5, 4)), mask=keep)


def test_batchnorm_shares_statistics_over_a_named_axis_as_flax():
    ours, flax = both("BatchNorm", 4, axis_name="shards")
    x = array(0, (4, 6, 5, 4))

    def sharded(module):
        graph, state = nnx.split(module)

        def apply(state, x):
            m = nnx.merge(graph, state)
            return m(x), nnx.state(m)

        return jax.vmap(apply, (None, 0), axis_name="shards")(state, x)

    assert_same(sharded(ours), sharded(flax), terms=x.size)


def test_batchnorm_takes_use_running_average_in_the_constructor_the_call_and_the_mode():
    x = array(0, (4, 5, 4))
    ours, flax = both("BatchNorm", 4)
    for change in (lambda m: m, lambda m: m.eval(), lambda m: m.train()):
        for average in (None, True, False):
            change(ours), change(flax)
            assert_same(ours(x, average), flax(x, average), terms=x.size)
            assert_same(nnx.state(ours), nnx.state(flax), terms=x.size)
    with pytest.raises(ValueError, match="No `use_running_average` argument"):
        jn.BatchNorm(4, use_running_average=None, rngs=nnx.Rngs(KEY))(x)
    assert nnx.view(ours, use_running_average=True).use_running_average is True


# ----------------------------------------------------------------------------------------------------------------------
# What the modules add


@pytest.mark.parametrize(
    ("name", "args", "arguments", "shape"),
    (
        ("Conv", (4, 8, (3, 3)), {}, (2, 8, 8, 4)),
        ("Conv", (4, 8, (3, 3)), dict(preferred_element_type=jnp.float32), (2, 8, 8, 4)),
        ("ConvTranspose", (4, 8, (3, 3)), dict(padding="CIRCULAR"), (2, 5, 5, 4)),
        ("ConvTranspose", (4, 8, (3, 3)), {}, (2, 5, 5, 4)),
        ("Linear", (4, 8), {}, (6, 4)),
        ("Linear", (4, 8), dict(preferred_element_type=jnp.float32), (6, 4)),
        ("BatchNorm", (4,), {}, (4, 5, 5, 4)),
        ("BatchNorm", (4,), dict(use_running_average=True), (4, 5, 5, 4)),
        ("GroupNorm", (4, 2), {}, (4, 5, 5, 4)),
        ("GroupNorm", (4, None, 4), dict(reduction_axes=(2, 3)), (4, 5, 5, 4)),
        ("LayerNorm", (4,), {}, (4, 5, 5, 4)),
        ("LayerNorm", (4,), dict(reduction_axes=(2, 3)), (4, 5, 5, 4)),
    ),
)
def test_activation_is_flax_followed_by_it(name, args, arguments, shape):
    ours, flax = both(name, *args, **arguments)
    fused = getattr(jn, name)(*args, **arguments, activation="gelu", rngs=nnx.Rngs(KEY))
    nnx.update(fused, nnx.state(ours))
    compare(fused, flax, array(0, shape), activation="gelu")


@pytest.mark.parametrize("average", (False, True), ids=("training", "inference"))
def test_batchnorm_residual_is_added_before_the_activation(average):
    ours, flax = both("BatchNorm", 4, use_running_average=average)
    ours.activation = parse("test", "relu")
    x, residual = array(0, (4, 5, 5, 4)), array(1, (4, 5, 5, 4))
    actual, wanted = results(ours, x, residual=residual), results(flax, x, lambda y: jax.nn.relu(y + residual))
    assert_same(actual, wanted, terms=x.size)


@pytest.mark.parametrize(
    ("name", "args", "shape", "expected"),
    (
        ("Conv", (4, 8, (3, 3)), (2, 8, 8, 4), "jaxconv_conv"),
        ("ConvTranspose", (4, 8, (3, 3)), (2, 8, 8, 4), "jaxconv_conv_dgrad"),
        ("Linear", (4, 8), (6, 4), "jaxconv_dense"),
        ("BatchNorm", (4,), (2, 8, 8, 4), "jaxconv_batchnorm_train"),
        ("GroupNorm", (4, 2), (2, 8, 8, 4), "jaxconv_groupnorm"),
        ("LayerNorm", (4,), (2, 8, 8, 4), "jaxconv_groupnorm"),
    ),
)
def test_one_kernel_computes_the_layer(name, args, shape, expected):
    module = getattr(jn, name)(*args, rngs=nnx.Rngs(KEY))
    graph, state = nnx.split(module)
    counted = helpers.equations(lambda state, x: nnx.merge(graph, state)(x), state, array(0, shape))
    assert {name: count for name, count in counted.items() if name.startswith("jaxconv")} == {expected: 1}


# ----------------------------------------------------------------------------------------------------------------------
# A model changes by its import alone


def build(layers: Any) -> nnx.Module:
    class Block(nnx.Module):
        def __init__(self, *, rngs):
            self.conv = layers.Conv(4, 4, (3, 3), use_bias=False, rngs=rngs)
            self.norm = layers.BatchNorm(4, momentum=0.9, rngs=rngs)

        def __call__(self, x):
            return x + nnx.relu(self.norm(self.conv(x)))

    class Net(nnx.Module):
        def __init__(self, *, rngs):
            self.stem = layers.Conv(3, 4, (3, 3), strides=2, rngs=rngs)

            @nnx.split_rngs(splits=2)
            @nnx.vmap(in_axes=(0,), out_axes=0)
            def blocks(rngs):
                return Block(rngs=rngs)

            self.blocks = blocks(rngs)
            self.up = layers.ConvTranspose(4, 4, (2, 2), strides=(2, 2), rngs=rngs)
            self.head = layers.Linear(4, 3, rngs=rngs)

        def __call__(self, x):
            @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            def forward(block, x):
                return nnx.remat(Block.__call__)(block, x)

            x = forward(self.blocks, self.stem(x))
            return self.head(self.up(x).mean((1, 2)))

    return Net(rngs=nnx.Rngs(KEY))


def train(net: nnx.Module, x: jax.Array, steps: int) -> tuple[Any, list[jax.Array]]:
    @nnx.jit
    def step(net, x):
        value, grads = nnx.value_and_grad(lambda net: jnp.mean((net(x) - 1) ** 2))(net)
        params = nnx.state(net, nnx.Param)
        nnx.update(net, jax.tree.map(lambda p, g: p - 0.05 * g, params, grads))
        return value

    losses = [step(net, x) for _ in range(steps)]
    return nnx.state(net), losses


def test_a_model_trains_to_the_same_losses_and_its_checkpoints_move_both_ways(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint", reason="checkpoints are written with orbax")
    ours, flax = build(jn), build(nnx)
    assert helpers.same_bits(nnx.state(ours), nnx.state(flax))
    x = array(0, (4, 8, 8, 3))
    after = {"ours": train(ours, x, 2), "flax": train(flax, x, 2)}
    assert_same(after["ours"], after["flax"], terms=x.size)

    checkpointer = ocp.StandardCheckpointer()
    for writer, reader in (("ours", flax), ("flax", ours)):
        written = nnx.to_pure_dict(after[writer][0])
        checkpointer.save(tmp_path / writer, written)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / writer, nnx.to_pure_dict(nnx.state(reader)))
        assert helpers.same_bits(restored, written)
        nnx.update(reader, restored)
        assert helpers.same_bits(nnx.to_pure_dict(nnx.state(reader)), written)
    checkpointer.close()


def test_variables_carry_their_metadata():
    arguments = dict(kernel_metadata={"note": "kernel"}, bias_metadata={"note": "bias"})
    ours = jn.Linear(4, 8, rngs=nnx.Rngs(KEY), **arguments)
    assert (ours.kernel.note, ours.bias.note) == ("kernel", "bias")


# ----------------------------------------------------------------------------------------------------------------------
# The user's functions, and errors


def test_flax_modules_take_jaxconv_as_their_convolution():
    x = array(0, (2, 8, 8, 4))
    plain = nnx.Conv(4, FEATURES, (3, 3), strides=2, rngs=nnx.Rngs(KEY))
    arguments = dict(strides=2, conv_general_dilated=jaxconv.conv_general_dilated, rngs=nnx.Rngs(KEY))
    injected = nnx.Conv(4, FEATURES, (3, 3), **arguments)
    assert_same(injected(x), plain(x), terms=3 * 3 * 4)
    assert helpers.equations(lambda x: injected(x), x)["jaxconv_conv_fprop"] == 1


def test_functions_of_the_user_are_called():
    def twice(*args, **kwargs):
        return 2 * jax.lax.conv_general_dilated(*args, **kwargs)

    compare(*both("Conv", 4, FEATURES, (3, 3), conv_general_dilated=twice), array(0, (2, 8, 8, 4)))


@pytest.mark.parametrize(
    ("name", "args", "arguments", "shape"),
    (
        ("Conv", (3, 8, (3, 3)), {}, (2, 8, 8, 4)),
        ("Conv", (4, 8, (3, 3)), dict(padding="NONE"), (2, 8, 8, 4)),
        ("Conv", (4, 8, (3, 3)), dict(padding="CAUSAL"), (2, 8, 8, 4)),
        ("Conv", (4, 8, (3, 3)), dict(mask=flax_cases.mask(3, 3, 4, 4)), (2, 8, 8, 4)),
        ("Conv", (4, 8, (3, 3)), dict(feature_group_count=3), (2, 8, 8, 4)),
        ("ConvTranspose", (3, 8, (3, 3)), {}, (2, 8, 8, 4)),
        ("ConvTranspose", (4, 8, (3, 3)), dict(mask=flax_cases.mask(3, 3, 4, 4)), (2, 8, 8, 4)),
        ("Linear", (3, 8), {}, (2, 4)),
        ("BatchNorm", (3,), {}, (2, 5, 4)),
        ("BatchNorm", (3,), dict(use_running_average=True), (2, 5, 4)),
        ("GroupNorm", (4,), {}, (2, 5, 4)),
        ("GroupNorm", (4, None, 3), {}, (2, 5, 4)),
        ("GroupNorm", (6, 2), {}, (2, 5, 4)),
        ("LayerNorm", (6,), {}, (2, 5, 4)),
        ("LayerNorm", (4,), dict(feature_axes=3), (2, 5, 4)),
    ),
)
def test_what_flax_refuses_is_refused_with_the_same_kind_of_error(name, args, arguments, shape):
    x = array(0, shape)
    with pytest.raises(Exception) as flax_error:
        getattr(nnx, name)(*args, **arguments, rngs=nnx.Rngs(KEY))(x)
    with pytest.raises(flax_error.type):
        getattr(jn, name)(*args, **arguments, rngs=nnx.Rngs(KEY))(x)


def test_wrong_activations_and_residuals_are_errors():
    with pytest.raises(ValueError, match="Conv: activation='swoosh' is unknown"):
        jn.Conv(4, 4, (3, 3), activation="swoosh", rngs=nnx.Rngs(KEY))
    x = array(0, (2, 5, 5, 4))
    with pytest.raises(ValueError, match=r"BatchNorm: residual has shape \(2, 5, 5, 1\), expected \(2, 5, 5, 4\)"):
        jn.BatchNorm(4, rngs=nnx.Rngs(KEY))(x, residual=x[..., :1])

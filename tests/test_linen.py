"""jaxconv.linen against flax.linen, module by module: the same parameters, results, gradients and statistics."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import flax.linen as nn
import flax_cases
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax_cases import KEY, array, assert_same, assert_same_description, randomised

import jaxconv
import jaxconv.linen as jn
from jaxconv._core.activations import activate, parse

FEATURES = 8


@pytest.fixture(autouse=True)
def full_precision():
    """Products in float32 on a GPU too: TF32 would hide what is compared."""
    with jax.default_matmul_precision("highest"):
        yield


def both(name: str, **kwargs: Any) -> tuple[nn.Module, nn.Module]:
    return getattr(jn, name)(**kwargs), getattr(nn, name)(**kwargs)


def compare(ours: nn.Module, flax: nn.Module, x: jax.Array, *args: Any, activation: Any = None, **kwargs: Any) -> Any:
    """Initialises, applies and differentiates both modules, with the batch statistics' update where there are any."""
    # Descriptions only: XLA compiles each initialiser for each shape. Values: test_initial_values_are_those_of_flax.
    variables, expected = (jax.eval_shape(m.init, KEY, x, *args, **kwargs) for m in (ours, flax))
    assert_same_description(variables, expected)
    variables = randomised(variables)
    f = parse("test", activation)

    def run(module: nn.Module, after: Any, variables: Any, x: jax.Array) -> Any:
        def apply(params: Any, x: jax.Array) -> Any:
            y, updates = module.apply({**variables, "params": params}, x, *args, **kwargs, mutable=["batch_stats"])
            return after(y), updates

        y, pullback, updates = jax.vjp(apply, variables.get("params", {}), x, has_aux=True)
        return y, updates, pullback(array(3, y.shape, y.dtype.name))

    # Everything is an argument: XLA would spend its time on folding constants.
    actual, wanted = jax.jit(lambda *a: (run(ours, lambda y: y, *a), run(flax, lambda y: activate(f, y), *a)))(
        variables, x
    )
    narrow = min((ours.dtype or x.dtype, ours.param_dtype, x.dtype), key=lambda d: -_eps(d))
    assert_same(actual, wanted, terms=max(x.size, wanted[0].size), rounded_to=narrow if _eps(narrow) else None)
    return actual


def _eps(dtype: Any) -> float:
    return float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.floating) else 0.0


# ----------------------------------------------------------------------------------------------------------------------
# Module by module


@pytest.mark.parametrize("case", flax_cases.CONV)
def test_conv_is_flax_conv(case):
    if case == "4d_has_no_native_path" and jax.default_backend() == "gpu":
        pytest.skip("XLA has no convolutions over four axes on GPUs: Flax fails too")
    shape, arguments = flax_cases.CONV[case]
    compare(*both("Conv", features=FEATURES, **arguments), array(0, shape))


@pytest.mark.parametrize("case", flax_cases.CONV_TRANSPOSE)
def test_conv_transpose_is_flax_conv_transpose(case):
    shape, arguments = flax_cases.CONV_TRANSPOSE[case]
    compare(*both("ConvTranspose", features=FEATURES, **arguments), array(0, shape))


@pytest.mark.parametrize("case", flax_cases.DENSE)
def test_dense_is_flax_dense(case):
    shape, arguments = flax_cases.DENSE[case]
    compare(*both("Dense", features=FEATURES, **arguments), array(0, shape))


@pytest.mark.parametrize("case", flax_cases.BATCHNORM)
@pytest.mark.parametrize("average", (False, True), ids=("training", "inference"))
def test_batchnorm_is_flax_batchnorm(case, average):
    shape, dtype, arguments = flax_cases.BATCHNORM[case]
    if dtype == "int32":
        arguments = dict(arguments, dtype=jnp.float32)
        x = array(0, shape, dtype)
        ours, flax = both("BatchNorm", use_running_average=average, **arguments)
        variables = randomised(flax.init(KEY, x))
        assert_same(
            *(m.apply(variables, x, mutable=["batch_stats"]) for m in (ours, flax)),
            terms=x.size,
        )
        return
    compare(*both("BatchNorm", use_running_average=average, **arguments), array(0, shape, dtype))


@pytest.mark.parametrize(
    "arguments",
    (dict(axis=(1, 3)), dict(force_float32_reductions=False), dict(axis=-1, axis_index_groups=None)),
    ids=("feature_axes", "own_precision", "groups_none"),
)
def test_batchnorm_without_native_path_is_flax_batchnorm(arguments):
    compare(*both("BatchNorm", use_running_average=False, **arguments), array(0, (4, 3, 5, 4)))


def test_batchnorm_masks_statistics_as_flax():
    keep = np.arange(4)[:, None, None, None] < 3
    compare(*both("BatchNorm", use_running_average=False), array(0, (4, 5, 5, 4)), mask=keep)


@pytest.mark.parametrize("case", flax_cases.GROUPNORM)
def test_groupnorm_is_flax_groupnorm(case):
    shape, dtype, arguments = flax_cases.GROUPNORM[case]
    compare(*both("GroupNorm", **arguments), array(0, shape, dtype))


@pytest.mark.parametrize("case", flax_cases.LAYERNORM)
def test_layernorm_is_flax_layernorm(case):
    shape, dtype, arguments = flax_cases.LAYERNORM[case]
    compare(*both("LayerNorm", **arguments), array(0, shape, dtype))


def test_layernorm_masks_statistics_as_flax():
    keep = np.broadcast_to(np.arange(12) < 7, (2, 5, 12))
    compare(*both("LayerNorm", force_float32_reductions=False), array(0, (2, 5, 12)))
    compare(*both("LayerNorm"), array(0, (2, 5, 12)), mask=jnp.asarray(keep))


def test_groupnorm_masks_statistics_as_flax():
    keep = np.arange(5)[None, :, None, None] < 3
    keep = np.broadcast_to(keep, (2, 5, 4, 12))
    compare(*both("GroupNorm", num_groups=4, force_float32_reductions=False), array(0, (2, 5, 4, 12)))
    compare(*both("GroupNorm", num_groups=4), array(0, (2, 5, 4, 12)), mask=jnp.asarray(keep))


@pytest.mark.skipif(jax.device_count() < 4, reason="shares statistics among four devices")
@pytest.mark.parametrize("groups", (None, [[0, 1], [2, 3]]), ids=("all", "groups"))
def test_batchnorm_shares_statistics_over_a_named_axis_as_flax(groups):
    ours, flax = both("BatchNorm", use_running_average=False, axis_name="shards", axis_index_groups=groups)
    x = array(0, (8, 3, 5, 4))
    variables = randomised(flax.init(KEY, x))
    mesh, each = jax.make_mesh((4,), ("shards",), axis_types=(jax.sharding.AxisType.Auto,)), jax.P("shards")

    def sharded(module):
        def apply(x):
            y, updates = module.apply(variables, x, mutable=["batch_stats"])
            return y, jax.tree.map(lambda a: a[None], updates)

        # Collectives in groups have no rule for what varies over the mesh.
        return jax.jit(jax.shard_map(apply, mesh=mesh, in_specs=each, out_specs=each, check_vma=False))(x)

    assert_same(sharded(ours), sharded(flax), terms=x.size)


def test_batchnorm_takes_use_running_average_in_the_constructor_or_the_call_but_not_both():
    x = array(0, (4, 5, 4))
    variables = jn.BatchNorm().init(KEY, x, use_running_average=True)
    in_call = jn.BatchNorm().apply(variables, x, use_running_average=True)
    assert helpers.same_bits(in_call, jn.BatchNorm(use_running_average=True).apply(variables, x))
    for module, argument in ((jn.BatchNorm(), None), (jn.BatchNorm(use_running_average=True), True)):
        with pytest.raises(ValueError, match="use_running_average"):
            module.apply(variables, x, use_running_average=argument)


def test_batchnorm_variance_does_not_cancel():
    """E[x^2] - E[x]^2 in float32 has no correct digit here: 1e8 * eps is 12."""
    x = 1e4 + array(0, (64, 16, 4))
    module = jn.BatchNorm(use_running_average=False, momentum=0.0)
    _, updates = module.apply(module.init(KEY, x), x, mutable=["batch_stats"])
    exact = np.asarray(x, np.float64).var((0, 1))
    # x - sample is exact; 1,024 squares of unit scale are summed in float32.
    np.testing.assert_allclose(updates["batch_stats"]["var"], exact, rtol=1024**0.5 * 2**-23)


@pytest.mark.parametrize(
    ("name", "arguments", "shape"),
    (
        ("Conv", flax_cases.CONV["initialisers"][1], (2, 8, 8, 4)),
        ("ConvTranspose", flax_cases.CONV_TRANSPOSE["transpose_kernel"][1], (2, 5, 5, 4)),
        ("Dense", flax_cases.DENSE["initialisers"][1], (6, 4)),
        ("BatchNorm", dict(flax_cases.BATCHNORM["initialisers"][2], use_running_average=False), (6, 4)),
    ),
)
def test_initial_values_are_those_of_flax(name, arguments, shape):
    arguments = arguments if name == "BatchNorm" else dict(arguments, features=FEATURES)
    ours, flax = (module.init(KEY, array(0, shape)) for module in both(name, **arguments))
    assert helpers.same_bits(ours, flax)


# ----------------------------------------------------------------------------------------------------------------------
# What the modules add


@pytest.mark.parametrize("activation", (("leaky_relu", 0.2), "gelu"), ids=helpers.label)
@pytest.mark.parametrize(
    ("name", "shape", "arguments"),
    (
        ("Conv", (2, 8, 8, 4), dict(features=8, kernel_size=(3, 3))),
        ("Conv", (2, 5, 5, 4), dict(features=8, kernel_size=(3, 3), input_dilation=2, padding=1)),
        ("ConvTranspose", (2, 5, 5, 4), dict(features=8, kernel_size=(3, 3), strides=(2, 2))),
        ("ConvTranspose", (2, 5, 5, 4), dict(features=8, kernel_size=(3, 3), padding="CIRCULAR")),
        ("Dense", (6, 4), dict(features=8)),
        ("BatchNorm", (4, 5, 5, 4), dict(use_running_average=False)),
        ("BatchNorm", (4, 5, 5, 4), dict(use_running_average=True)),
        ("GroupNorm", (2, 5, 5, 8), dict(num_groups=2)),
        ("GroupNorm", (2, 5, 5, 8), dict(num_groups=2, reduction_axes=(2, 3))),
        ("LayerNorm", (2, 5, 5, 8), {}),
        ("LayerNorm", (2, 5, 5, 8), dict(reduction_axes=(2, 3))),
    ),
    ids=(
        *("conv", "conv_dilated", "transpose", "transpose_circular", "dense", "train", "inference"),
        *("groupnorm", "groupnorm_axes", "layernorm", "layernorm_axes"),
    ),
)
def test_activation_is_flax_followed_by_it(name, shape, arguments, activation):
    ours, flax = getattr(jn, name)(activation=activation, **arguments), getattr(nn, name)(**arguments)
    compare(ours, flax, array(0, shape), activation=activation)


@pytest.mark.parametrize("axis", (-1, (1, 3)), ids=("native", "flax"))
@pytest.mark.parametrize("average", (False, True), ids=("training", "inference"))
def test_batchnorm_residual_is_added_before_the_activation(axis, average):
    ours, flax = jn.BatchNorm(average, axis, activation="relu"), nn.BatchNorm(average, axis)
    x, residual = array(0, (4, 3, 5, 4)), array(1, (4, 3, 5, 4))
    variables = randomised(flax.init(KEY, x))

    def of(module, finish):
        def f(x, residual):
            y, updates = module(x, residual)
            return jnp.sum(y * jnp.arange(4.0)), (y, updates)

        return jax.value_and_grad(f, (0, 1), has_aux=True)(x, residual)

    def with_ours(x, residual):
        return ours.apply(variables, x, residual=residual, mutable=["batch_stats"])

    def with_flax(x, residual):
        y, updates = flax.apply(variables, x, mutable=["batch_stats"])
        return jax.nn.relu(y + residual), updates

    assert_same(of(with_ours, None), of(with_flax, None), terms=x.size)


@pytest.mark.parametrize(
    ("module", "shape", "expected"),
    (
        (jn.Conv(8, (3, 3), activation="relu"), (2, 8, 8, 4), "jaxconv_conv"),
        (jn.Conv(8, (3, 3), use_bias=False), (2, 8, 8, 4), "jaxconv_conv_fprop"),
        (jn.Conv(8, (3, 3), padding="CIRCULAR"), (2, 3, 8, 8, 4), "jaxconv_conv"),
        (jn.Conv(8, (3, 3), input_dilation=2, padding=1), (2, 8, 8, 4), "jaxconv_conv_dgrad"),
        (jn.ConvTranspose(8, (3, 3), strides=(2, 2)), (2, 8, 8, 4), "jaxconv_conv_dgrad"),
        (jn.Dense(8, activation="gelu"), (6, 4), "jaxconv_dense"),
        (jn.BatchNorm(False, activation="relu"), (2, 8, 8, 4), "jaxconv_batchnorm_train"),
        (jn.BatchNorm(False, dtype=jnp.bfloat16), (2, 8, 8, 4), "jaxconv_batchnorm_train"),
        (jn.BatchNorm(True), (2, 8, 8, 4), "jaxconv_batchnorm_infer"),
        (jn.GroupNorm(2, activation="silu"), (2, 8, 8, 4), "jaxconv_groupnorm"),
        (jn.GroupNorm(None, 2, dtype=jnp.bfloat16), (2, 8, 8, 4), "jaxconv_groupnorm"),
        (jn.LayerNorm(), (2, 8, 8, 4), "jaxconv_groupnorm"),
        (jn.LayerNorm(reduction_axes=(-1,), dtype=jnp.bfloat16), (8, 4), "jaxconv_groupnorm"),
    ),
)
def test_one_kernel_computes_the_layer(module, shape, expected):
    x = array(0, shape)
    variables = jax.eval_shape(module.init, KEY, x)
    counted = helpers.equations(lambda v, x: module.apply(v, x, mutable=["batch_stats"]), variables, x)
    assert {name: count for name, count in counted.items() if name.startswith("jaxconv")} == {expected: 1}


# ----------------------------------------------------------------------------------------------------------------------
# A model changes by its import alone


def build(layers: Any) -> nn.Module:
    class Block(nn.Module):
        features: int

        @nn.compact
        def __call__(self, x, _=None):
            y = layers.Conv(self.features, (3, 3), use_bias=False)(x)
            y = nn.relu(layers.BatchNorm(use_running_average=False, momentum=0.9)(y))
            return x + layers.Conv(self.features, (1, 1))(y), None

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = layers.Conv(4, (3, 3), strides=2, name="stem")(x)
            x, _ = nn.remat(Block)(4)(x)
            x, _ = nn.scan(Block, variable_axes={"params": 0, "batch_stats": 0}, split_rngs={"params": True}, length=2)(
                4
            )(x, None)
            x = layers.ConvTranspose(4, (2, 2), strides=(2, 2))(x)
            return layers.Dense(3)(x.mean((1, 2)))

    return Net()


def stepper(net: nn.Module) -> Any:
    @jax.jit
    def step(variables, x):
        def loss(params):
            y, updates = net.apply({**variables, "params": params}, x, mutable=["batch_stats"])
            return jnp.mean((y - 1) ** 2), updates

        (value, updates), grads = jax.value_and_grad(loss, has_aux=True)(variables["params"])
        params = jax.tree.map(lambda p, g: p - 0.05 * g, variables["params"], grads)
        return {"params": params, **updates}, value

    return step


@pytest.mark.promise
def test_a_model_trains_to_the_same_losses_and_its_checkpoints_move_both_ways(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint", reason="checkpoints are written with orbax")
    nets = {"ours": build(jn), "flax": build(nn)}
    x = array(0, (4, 8, 8, 3))
    variables = {name: jax.jit(net.init)(KEY, x) for name, net in nets.items()}
    assert helpers.same_bits(variables["ours"], variables["flax"])
    steps = {name: stepper(net) for name, net in nets.items()}

    def trained(name, variables):
        losses = []
        for _ in range(2):
            variables, loss = steps[name](variables, x)
            losses.append(loss)
        return variables, losses

    after = {name: trained(name, variables[name]) for name in nets}
    assert_same(after["ours"], after["flax"], terms=x.size)

    checkpointer = ocp.StandardCheckpointer()
    for writer, reader in (("ours", "flax"), ("flax", "ours")):
        written, _ = after[writer]
        checkpointer.save(tmp_path / writer, written)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / writer, jax.eval_shape(nets[reader].init, KEY, x))
        assert helpers.same_bits(restored, written)
        assert_same(trained(reader, restored), trained(writer, written), terms=x.size)
    checkpointer.close()


def test_vmapped_modules_keep_one_parameter_set_each():
    def out(layers):
        net = nn.vmap(layers.Conv, variable_axes={"params": 0}, split_rngs={"params": True})(FEATURES, (3, 3))
        x = array(0, (3, 2, 5, 5, 4))
        return net.init_with_output(KEY, x)

    assert_same(out(jn), out(nn), terms=3 * 3 * 4)


def test_parameters_carry_their_metadata():
    arguments = dict(
        kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), (None, None, None, "model")),
        bias_init=nn.with_logical_partitioning(nn.initializers.zeros, ("features",)),
    )
    x = array(0, (2, 5, 5, 4))
    ours, flax = (layers.Conv(FEATURES, (3, 3), **arguments).init(KEY, x) for layers in (jn, nn))
    assert jax.tree.structure(ours) == jax.tree.structure(flax)
    assert nn.get_partition_spec(ours) == nn.get_partition_spec(flax)


@pytest.mark.parametrize(
    ("name", "arguments"),
    (
        ("Conv", dict(features=FEATURES, kernel_size=(3, 3))),
        ("Conv", dict(features=FEATURES, kernel_size=(3, 3), conv_general_dilated=jax.lax.conv_general_dilated)),
        ("BatchNorm", dict(use_running_average=True)),
        ("BatchNorm", dict(use_running_average=True, axis=(1, 3))),
        ("GroupNorm", dict(num_groups=2)),
        ("GroupNorm", dict(num_groups=2, reduction_axes=(2, 3))),
        ("LayerNorm", {}),
        ("LayerNorm", dict(reduction_axes=(2, 3))),
    ),
)
def test_intermediates_are_captured_once(name, arguments):
    x = array(0, (2, 5, 5, 4))
    ours, flax = both(name, **arguments)
    variables = flax.init(KEY, x)
    captured = [m.apply(variables, x, capture_intermediates=True)[1] for m in (ours, flax)]
    assert_same(*captured, terms=x.size)


# ----------------------------------------------------------------------------------------------------------------------
# The user's functions


def test_flax_modules_take_jaxconv_as_their_convolution():
    x = array(0, (2, 8, 8, 4))
    plain = nn.Conv(FEATURES, (3, 3), strides=2, feature_group_count=2)
    injected = plain.clone(conv_general_dilated=jaxconv.conv_general_dilated)
    by_class = plain.clone(conv_general_dilated_cls=lambda: jaxconv.conv_general_dilated)
    variables = plain.init(KEY, x)
    for module in (injected, by_class):
        assert_same(module.apply(variables, x), plain.apply(variables, x), terms=3 * 3 * 4)
        assert helpers.equations(module.apply, variables, x)["jaxconv_conv_fprop"] == 1


def test_functions_of_the_user_are_called():
    def twice(*args, **kwargs):
        return 2 * jax.lax.conv_general_dilated(*args, **kwargs)

    x = array(0, (2, 8, 8, 4))
    for argument in (dict(conv_general_dilated=twice), dict(conv_general_dilated_cls=lambda: twice)):
        compare(*both("Conv", features=FEATURES, kernel_size=(3, 3), **argument), x)

    def promote(*args, dtype, inexact=True):
        return nn.dtypes.promote_dtype(*args, dtype=jnp.bfloat16)

    for name in ("Conv", "ConvTranspose"):
        ours, flax = both(name, features=FEATURES, kernel_size=(3, 3), promote_dtype=promote)
        variables = flax.init(KEY, x)
        assert_same(ours.apply(variables, x), flax.apply(variables, x), terms=3 * 3 * 4)
        assert ours.apply(variables, x).dtype == jnp.bfloat16


# ----------------------------------------------------------------------------------------------------------------------
# Errors


@pytest.mark.parametrize(
    ("name", "arguments", "shape"),
    (
        ("Conv", dict(kernel_size=(3, 3), padding="NONE"), (2, 8, 8, 4)),
        ("Conv", dict(kernel_size=(3, 3), padding=(1, 2, 3)), (2, 8, 8, 4)),
        ("Conv", dict(kernel_size=(3, 3), padding="CAUSAL"), (2, 8, 8, 4)),
        ("Conv", dict(kernel_size=(3, 3), mask=flax_cases.mask(3, 3, 4, 4)), (2, 8, 8, 4)),
        ("Conv", dict(kernel_size=(3, 3), strides=(1, 2, 3)), (2, 8, 8, 4)),
        ("Conv", dict(kernel_size=(3, 3), strides=0), (2, 8, 8, 4)),
        ("Conv", dict(kernel_size=(3, 3), feature_group_count=3), (2, 8, 8, 4)),
        ("Conv", dict(kernel_size=(3, 3), feature_group_count=8), (2, 8, 8, 4)),
        ("Conv", dict(kernel_size=(3, 3), dtype=jnp.int32), (2, 8, 8, 4)),
        ("Conv", dict(kernel_size=(3, 3), precision="exact"), (2, 8, 8, 4)),
        ("Conv", dict(kernel_size=(3, 3)), (8, 4)),
        ("Conv", dict(kernel_size=(3, 3), input_dilation=2), (2, 8, 8, 4)),
        ("ConvTranspose", dict(kernel_size=(3, 3), padding="NONE"), (2, 8, 8, 4)),
        ("ConvTranspose", dict(kernel_size=(3, 3), mask=flax_cases.mask(3, 3, 4, 4)), (2, 8, 8, 4)),
        ("ConvTranspose", dict(kernel_size=(3, 3), strides=(1, 2, 3)), (2, 8, 8, 4)),
        ("Dense", dict(dtype=jnp.int32), (2, 4)),
        ("Dense", dict(precision="exact"), (2, 4)),
        ("Dense", {}, ()),
        ("BatchNorm", {}, (4, 5, 4)),
        ("BatchNorm", dict(use_running_average=False, dtype=jnp.int32), (4, 5, 4)),
        ("BatchNorm", dict(use_running_average=False, axis=3), (4, 5, 4)),
        ("GroupNorm", {}, (4, 5, 4)),
        ("GroupNorm", dict(num_groups=2, group_size=2), (4, 5, 4)),
        ("GroupNorm", dict(num_groups=None), (4, 5, 4)),
        ("GroupNorm", dict(num_groups=None, group_size=3), (4, 5, 4)),
        ("GroupNorm", dict(num_groups=2.0), (4, 5, 4)),
        ("GroupNorm", dict(num_groups=2, reduction_axes=(1,)), (4, 5, 4)),
        ("GroupNorm", dict(num_groups=2, dtype=jnp.int32), (4, 5, 4)),
        ("LayerNorm", dict(reduction_axes=3), (4, 5, 4)),
        ("LayerNorm", dict(dtype=jnp.int32), (4, 5, 4)),
        ("LayerNorm", {}, ()),
    ),
)
def test_what_flax_refuses_is_refused_with_the_same_kind_of_error(name, arguments, shape):
    if name not in ("BatchNorm", "GroupNorm", "LayerNorm"):
        arguments = dict(arguments, features=FEATURES)
    x = array(0, shape)
    with pytest.raises(Exception) as flax_error:
        getattr(nn, name)(**arguments).init(KEY, x)
    with pytest.raises(flax_error.type):
        getattr(jn, name)(**arguments).init(KEY, x)


def test_wrong_activations_and_residuals_are_errors():
    x = array(0, (2, 5, 5, 4))
    with pytest.raises(ValueError, match="Conv: activation='swoosh' is unknown"):
        jn.Conv(4, (3, 3), activation="swoosh").init(KEY, x)
    with pytest.raises(ValueError, match=r"BatchNorm: residual has shape \(2, 5, 5, 1\), expected \(2, 5, 5, 4\)"):
        jn.BatchNorm(False).init(KEY, x, residual=x[..., :1])


def test_jaxconv_needs_flax_for_its_modules_only():
    code = (
        "import sys, jaxconv; assert 'flax' not in sys.modules; sys.modules['flax'] = None\n"
        "for name in 'linen', 'nnx':\n"
        "    try: __import__('jaxconv.' + name)\n"
        "    except ImportError as e: assert 'jaxconv[flax]' in str(e), e\n"
        "    else: raise AssertionError(name)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/", timeout=120)

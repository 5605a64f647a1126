"""What travels between Python and native code: attribute names and types, targets, errors, the FFI version."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from direct_calls import (
    KERNELS,
    ON_GPUS,
    YOUNGER,
    both_norms,
    dx_and_addend,
    dz_and_db,
    dz_and_dbias,
    dz_and_sums,
    dz_through_norm,
    dz_with_addend,
    gradient_operands,
    halves_and_db,
    narrow,
    narrow_operands,
    norm_dx,
    norm_moments,
    normalised_operands,
    normalised_with_statistics,
    of_integers,
    pooled,
    pooled_operands,
    shortcut_operands,
    statistics_of_sum,
    sums_operands,
    used_twice,
    with_shortcut,
    with_signs,
    y_and_z,
)
from helpers import DEVICE, PLATFORM
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

import jaxconv
from jaxconv import _plan
from jaxconv._core import activations, primitives
from jaxconv._core import native as _native

MODULE = _native.cpu if PLATFORM == "cpu" else _native.cuda


def example(name: str) -> tuple[Any, tuple[Any, ...]]:
    """(f, arguments) of which f contains the kernel `name` once, natively."""
    x, w, b, v = jnp.ones((2, 5, 5, 4)), jnp.ones((3, 3, 4, 6)), jnp.ones(6), jnp.ones(4)
    native = dict(implementation="native")
    conv, dense = functools.partial(jaxconv.conv2d, **native), functools.partial(jaxconv.dense, **native)
    norm = functools.partial(jaxconv.batchnorm, activation="relu", **native)
    # A GPU's kernels with statistics and with an addend are Hopper's, for 16 bits and eights of channels.
    if name in ON_GPUS and PLATFORM == "cpu":
        pytest.skip(f"{name} has no native kernel on a CPU")
    if (
        (
            name in ("conv_statistics", "conv_add_statistics", "conv_dgrad_add", *ON_GPUS)
            or name.startswith("conv_normalised")
        )
        and PLATFORM == "cuda"
        and DEVICE.compute_capability != (9, 0)
    ):
        pytest.skip(f"{name} has a native kernel on compute capability 9.0 only")
    small = jnp.ones((4, 3)), jnp.ones(3), jnp.ones((3, 4)), v
    pair, u = jaxconv.conv_batchnorm, jnp.ones(16)
    aligned = (jnp.ones((2, 5, 5, 8), "bfloat16"), jnp.ones((3, 3, 8, 16), "bfloat16"))
    # A kernel that adds, which the preferred one may not do
    added_once: dict[str, Any] = dict(algorithm="direct", activation="relu")
    added = dict(algorithm="sm90") if PLATFORM == "cuda" else native
    aligned = aligned if PLATFORM == "cuda" else tuple(a.astype("float32") for a in aligned)
    depthwise = jnp.ones((2, 5, 5, 8), aligned[0].dtype), jnp.ones((3, 3, 1, 8), aligned[0].dtype)

    def batchnorm_conv(x: jax.Array, w: jax.Array, scale: Any = None, bias: Any = None) -> Any:
        v = jnp.ones(8)
        how: dict[str, Any] = dict(training=True, groups=8, activation="relu", **native)
        return jaxconv.batchnorm_conv(x, scale, bias, v, v, w, **how)

    every_gradient = jax.grad(lambda *a: batchnorm_conv(*a)[0].sum(), (0, 1, 2, 3))
    parameters = jnp.ones(8), jnp.ones(8)

    return {
        "conv": (functools.partial(conv, activation=("leaky_relu", 0.5)), (x, w, b)),
        "conv_add": (lambda x, w, b: jaxconv.conv2d(x, w, b, residual=jnp.ones((2, 5, 5, 6)), **added_once), (x, w, b)),
        "conv_fprop": (conv, (x, w)),
        "conv_integer": (of_integers, (x.astype("int8"), jnp.ones((3, 3, 2, 6), "int8"))),
        "conv_pooled": (pooled, pooled_operands()),
        "conv_shortcut": (with_shortcut, shortcut_operands()),
        "conv_scaled": (narrow, narrow_operands()),
        "conv_statistics": (lambda x, w: pair(x, w, u, u, u, u, training=True, **native), aligned),
        "conv_add_statistics": (
            functools.partial(statistics_of_sum, **added),
            (*aligned, u.astype(aligned[0].dtype), jnp.ones((2, 5, 5, 16), aligned[0].dtype)),
        ),
        "conv_dgrad": (jax.grad(lambda x, w: conv(x, w).sum()), (x, w)),
        "conv_dgrad_add": (jax.grad(functools.partial(used_twice, **added)), aligned),
        "conv_dgrad_sums": (dz_and_sums, sums_operands()),
        "conv_gradient": (dz_and_dbias, gradient_operands()),
        "conv_gradient_add": (dz_with_addend, (*gradient_operands(), gradient_operands()[2])),
        "conv_norm_gradient": (dz_through_norm, (*gradient_operands(), jnp.ones(16))),
        "conv_wgrad": (jax.grad(lambda x, w: conv(x, w).sum(), 1), (x, w)),
        "conv_normalised": (batchnorm_conv, depthwise),
        "conv_normalised_statistics": (normalised_with_statistics, normalised_operands()),
        "conv_normalised_wgrad": (jax.grad(lambda x, w: batchnorm_conv(x, w)[0].sum(), 1), depthwise),
        "conv_normalised_gradient": (every_gradient, (*depthwise, *parameters)),
        "conv_normalised_dx": (every_gradient, (*depthwise, *parameters)),
        "dense": (functools.partial(dense, activation="gelu", alpha=2, beta=3.0), (jnp.ones((5, 4)), w[0, 0], b)),
        "matmul": (dense, (jnp.ones((5, 4)), w[0, 0])),
        "dense_gradient": (dz_and_db, tuple(jnp.ones(s, "bfloat16") for s in ((64, 64), (128, 64), (64, 128)))),
        "dense_gated": (y_and_z, tuple(jnp.ones(s, "bfloat16") for s in ((2, 32, 64), (64, 128), (128,)))),
        "dense_gated_gradient": (
            halves_and_db,
            tuple(jnp.ones(s, "bfloat16") for s in ((64, 64), (128, 64), (64, 256))),
        ),
        "batchnorm_train": (functools.partial(norm, training=True), (x, v, v, v, v)),
        "batchnorm_infer": (functools.partial(norm, training=False), (x, v, v, v, v)),
        "batchnorm_backward": (jax.grad(lambda x: norm(x, v, v, v, v, training=True)[0].sum()), (x,)),
        "batchnorm_dx": (norm_dx, (x, x, v, x)),
        "batchnorm_moments": (norm_moments, (x,)),
        "batchnorm_backward_add": (dx_and_addend, (jnp.ones((16, 64, 64, 64), "bfloat16"), jnp.ones(64))),
        "batchnorm_signs": (with_signs, (jnp.ones((16, 64, 64, 64), "bfloat16"), jnp.ones(64))),
        "batchnorm_shortcut_backward": (both_norms, (jnp.ones((16, 64, 64, 64), "bfloat16"), jnp.ones(64))),
        "max_pool": (functools.partial(jaxconv.max_pool, window=2, **native), (x,)),
        "max_pool_backward": (jax.grad(lambda x: jaxconv.max_pool(x, 2, **native).sum()), (x,)),
        "avg_pool": (functools.partial(jaxconv.avg_pool, window=2, **native), (x,)),
        "avg_pool_backward": (jax.grad(lambda x: jaxconv.avg_pool(x, 2, **native).sum()), (x,)),
        "groupnorm": (functools.partial(jaxconv.groupnorm, groups=2, activation="silu", **native), (x, v, v)),
        "groupnorm_backward": (jax.grad(lambda x: jaxconv.groupnorm(x, v, v, groups=2, **native).sum()), (x,)),
        "squeeze_excite": (functools.partial(jaxconv.squeeze_excite, activation="silu", **native), (x, *small)),
        "squeeze_excite_backward": (jax.grad(lambda x: jaxconv.squeeze_excite(x, *small, **native).sum()), (x,)),
    }[name]


def wire(name: str) -> primitives.Wire:
    """The attributes with which `example(name)` calls its kernel, before XLA sees them."""
    f, args = example(name)
    (call,) = [call for call in jaxconv.explain(f)(*args) if call.op == name]
    made = KERNELS[name].wire(call.problem, call.plan)
    return primitives.Wire({**made.attrs, "plan": call.plan.attrs()}, made.operand_layouts, made.result_layouts)


WINDOW = {
    "stride": "i64 span",
    "pad_low": "i64 span",
    "pad_high": "i64 span",
    "dilation": "i64 span",
    "groups": "i64",
    "dims_channels_last": "i64",
    "memory_channels_last": "i64",
    "full_float32": "i64",
}
INTEGERS = {
    **dict.fromkeys(("stride", "pad_low", "pad_high", "lhs_dilation", "rhs_dilation"), "i64 span"),
    **dict.fromkeys(("lhs_spec", "rhs_spec", "out_spec"), "i64 span"),
    **dict.fromkeys(("groups", "batch_groups"), "i64"),
}
EPILOGUE = {"bias": "i64", "activation": "string", "slope": "f64", "save_preactivation": "i64"}
SCALED = dict.fromkeys(("scale", "residual", "residual_scale", "out_scale"), "i64") | {"shortcut_stride": "i64 span"}
# Of the target: 2 where nothing is said.
VERSIONS = {"conv_scaled": 3}
PRODUCT = {
    **dict.fromkeys(("trans_x", "trans_w", "batched", "x_batched", "w_batched", "bias_batched", "c_batched"), "i64"),
    "bias": "string",
    "addend": "i64",
    "alpha": "f64",
    "beta": "f64",
    "full_float32": "i64",
}
NORM = {
    "channel_axis": "i64",
    "batched": "i64",
    "momentum": "f64",
    "epsilon": "f64",
    "activation": "string",
    "slope": "f64",
    "residual": "i64",
}
POOL = {
    **dict.fromkeys(("window", "stride", "pad_low", "pad_high", "dilation"), "i64 span"),
    "dims_channels_last": "i64",
    "save": "i64",
}
GROUP = {"groups": "i64", "batched": "i64", "epsilon": "f64", "activation": "string", "slope": "f64"}
SQUEEZE = {"activation": "string", "slope": "f64", "gate": "string"}
PLAN = {"kernel": "string", "tile": "string", "splits": "i64", "chunk": "i64"}
# The wire format. A change here is a change of ffi/wire.h and needs a new version in the target's name: exported
# programs hold these.
FORMAT = {
    "conv": {"window": WINDOW, "epilogue": EPILOGUE, "plan": PLAN},
    "conv_add": {"window": WINDOW, "epilogue": EPILOGUE, "plan": PLAN},
    "conv_fprop": {"window": WINDOW, "epilogue": EPILOGUE, "plan": PLAN},
    "conv_integer": {"window": INTEGERS, "plan": PLAN},
    "conv_pooled": {"window": WINDOW, "epilogue": EPILOGUE, "pool": POOL, "narrow": {"scale": "f64"}, "plan": PLAN},
    "conv_shortcut": {"window": WINDOW, "epilogue": EPILOGUE, "shortcut": {"stride": "i64 span"}, "plan": PLAN},
    "conv_scaled": {"window": WINDOW, "epilogue": EPILOGUE, "scaled": SCALED, "plan": PLAN},
    "conv_statistics": {"window": WINDOW, "plan": PLAN},
    "conv_add_statistics": {"window": WINDOW, "epilogue": EPILOGUE, "residual": "i64", "plan": PLAN},
    "conv_dgrad": {"window": WINDOW, "plan": PLAN},
    "conv_dgrad_add": {"window": WINDOW, "plan": PLAN},
    "conv_dgrad_sums": {"window": WINDOW, "plan": PLAN},
    "conv_gradient": {"window": WINDOW, "epilogue": EPILOGUE, "plan": PLAN},
    "conv_gradient_add": {"window": WINDOW, "epilogue": EPILOGUE, "plan": PLAN},
    "conv_norm_gradient": {"window": WINDOW, "epilogue": EPILOGUE, "plan": PLAN},
    "conv_wgrad": {"window": WINDOW, "plan": PLAN},
    "conv_normalised": {"window": WINDOW, "norm": NORM, "plan": PLAN},
    "conv_normalised_statistics": {"window": WINDOW, "norm": NORM, "plan": PLAN},
    "conv_normalised_wgrad": {"window": WINDOW, "norm": NORM, "plan": PLAN},
    "conv_normalised_gradient": {"window": WINDOW, "norm": NORM, "plan": PLAN},
    "conv_normalised_dx": {"window": WINDOW, "norm": NORM, "count": "i64", "plan": PLAN},
    "dense": {"product": PRODUCT, "epilogue": EPILOGUE, "plan": PLAN},
    "dense_gated": {"product": PRODUCT, "epilogue": EPILOGUE, "first": "i64", "plan": PLAN},
    "dense_gated_gradient": {"product": PRODUCT, "epilogue": EPILOGUE, "first": "i64", "plan": PLAN},
    "dense_gradient": {"product": PRODUCT, "epilogue": EPILOGUE, "plan": PLAN},
    "matmul": {"product": PRODUCT, "epilogue": EPILOGUE, "plan": PLAN},
    "batchnorm_train": {"norm": NORM, "plan": PLAN},
    "batchnorm_infer": {"norm": NORM, "plan": PLAN},
    "batchnorm_backward_add": {"norm": NORM, "plan": PLAN},
    "batchnorm_signs": {"norm": NORM, "plan": PLAN},
    "batchnorm_backward": {"norm": NORM, "want_dx": "i64", "want_dresidual": "i64", "plan": PLAN},
    "batchnorm_dx": {"norm": NORM, "count": "i64", "plan": PLAN},
    "batchnorm_moments": {"norm": NORM, "plan": PLAN},
    "batchnorm_shortcut_backward": {"norm": NORM, "plan": PLAN},
    "max_pool": {"pool": POOL, "plan": PLAN},
    "max_pool_backward": {"pool": POOL, "plan": PLAN},
    "avg_pool": {"pool": POOL, "count_include_pad": "i64", "plan": PLAN},
    "avg_pool_backward": {"pool": POOL, "count_include_pad": "i64", "plan": PLAN},
    "groupnorm": {"norm": GROUP, "plan": PLAN},
    "groupnorm_backward": {"norm": GROUP, "want_dx": "i64", "plan": PLAN},
    "squeeze_excite": {"squeeze": SQUEEZE, "plan": PLAN},
    "squeeze_excite_backward": {"squeeze": SQUEEZE, "want_dx": "i64", "plan": PLAN},
}


def kind(value: Any) -> Any:
    """The type as C++ decodes it, for those that are fixed where the attribute is made.

    Python's own numbers are refused: XLA takes 2 and 2.0 for one attribute and hands out whichever came first.
    """
    if isinstance(value, dict):
        return {k: kind(v) for k, v in value.items()}
    if isinstance(value, str):
        return "string"
    if isinstance(value, np.ndarray):
        return {"int64": "i64 span"}.get(value.dtype.name, f"{value.dtype} span")
    return {np.int64: "i64", np.float64: "f64"}.get(type(value), f"Python {type(value).__name__}")


@pytest.mark.parametrize("name", FORMAT)
def test_attributes_have_the_names_and_types_of_the_wire_format(name):
    assert kind(wire(name).attrs) == FORMAT[name]


def test_the_wire_format_covers_every_kernel():
    assert set(FORMAT) == set(KERNELS) == set(_plan.OPS)


@pytest.mark.parametrize("name", FORMAT)
def test_every_kernel_has_its_target_in_native_code(name):
    assert KERNELS[name].target == f"jaxconv_{name}_v{VERSIONS.get(name, 2)}"
    if PLATFORM == "cuda" or name not in ON_GPUS:
        assert KERNELS[name].target in MODULE.registrations()


def test_kernels_of_one_name_have_one_target():
    assert all(kernel.target == KERNELS[kernel.name].target for kernel in primitives.KERNELS.values())


@pytest.mark.parametrize("name", FORMAT)
def test_every_kernel_compiles_to_its_target_and_runs(name):
    f, args = example(name)
    compiled = jax.jit(f).lower(*args).compile()
    assert len(re.findall(rf'custom_call_target="{KERNELS[name].target}"', compiled.as_text())) == 1
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(compiled(*args)))


def test_native_code_has_no_target_that_python_does_not_know():
    targets = {kernel.target for kernel in KERNELS.values()}
    # Those of older versions answer with what to do.
    older = {f"jaxconv_{name}_v1" for name in KERNELS if name not in YOUNGER} | {"jaxconv_conv_scaled_v2"}
    gpus = {KERNELS[name].target for name in ON_GPUS} | {"jaxconv_conv_scaled_v2"} if PLATFORM == "cpu" else set()
    assert targets | older >= set(MODULE.registrations()) >= (targets | older) - gpus


def test_both_languages_name_the_same_activations_in_the_same_order():
    assert tuple(MODULE.activations()) == activations.NAMES


@pytest.mark.parametrize("first", [2, 2.0], ids=["int_first", "float_first"])
def test_an_int_and_a_float_of_one_value_are_one_attribute(first):
    """XLA's cache takes 2 and 2.0 for the same; a call whose type came out wrong would poison the other one."""
    jax.clear_caches()
    x, w = jnp.ones((5, 4)), jnp.ones((4, 6))
    for alpha in (first, 2, 2.0, np.float32(2), np.int32(2)):
        y = jaxconv.dense(x, w, alpha=alpha, beta=alpha, c=jnp.ones((5, 6)), implementation="native")
        np.testing.assert_array_equal(y, np.full((5, 6), 10.0))
    v = jnp.ones(4)
    for momentum, epsilon in ((1, 0), (1.0, 0.0), (True * 1, 0)):
        options = dict(training=True, momentum=momentum, epsilon=epsilon, implementation="native")
        _, mean, _ = jaxconv.batchnorm(jnp.asarray(np.eye(4), "float32"), v, v, 3 * v, v, **options)
        np.testing.assert_array_equal(mean, 3 * v)


# ----------------------------------------------------------------------------------------------------------------------
# Handlers confirm what they are given: exported programs reach them without Python


def call_directly(name: str, changed: dict[str, Any], results: Any = None, args: Any = None) -> None:
    """Calls the target of `example(name)` with some attributes, operands or results changed."""
    f, given = example(name)
    (call,) = [call for call in jaxconv.explain(f)(*given) if call.op == name]
    attrs = wire(name).attrs
    for path, value in changed.items():
        outer, inner = path.split(".")
        attrs[outer] = {**attrs[outer], inner: value}
        if value is None:
            del attrs[outer][inner]
    results = results or [ShapedArray(shape, np.dtype(dtype)) for shape, dtype in KERNELS[name].results(call.problem)]
    workspace = ShapedArray((call.plan.workspace_bytes,), np.dtype("uint8"))
    direct = Primitive("direct")  # a new one each time: nothing that was compiled before is found again
    direct.multiple_results = True
    direct.def_abstract_eval(lambda *_: [*results, workspace])
    rule = jax.ffi.ffi_lowering(KERNELS[name].target)
    mlir.register_lowering(direct, lambda ctx, *operands: rule(ctx, *operands, **attrs))
    jax.block_until_ready(jax.jit(direct.bind)(*(args or given)))


def test_the_direct_call_itself_is_right():
    call_directly("conv_fprop", {})
    call_directly("matmul", {})
    call_directly("batchnorm_infer", {})


BAD_CALLS = {
    "unknown_activation": ("conv", {"epilogue.activation": "swish"}, "unknown activation 'swish'"),
    "statistics_of_an_activation": (
        "conv_add_statistics",
        {"epilogue.activation": "relu"},
        "which no activation follows",
    ),
    "statistics_and_z": (
        "conv_add_statistics",
        {"epilogue.save_preactivation": np.int64(1)},
        "which no activation follows",
    ),
    "statistics_without_their_bias": ("conv_add_statistics", {"epilogue.bias": np.int64(0)}, "operands"),
    "unknown_kernel": ("conv_fprop", {"plan.kernel": "winograd"}, "winograd"),
    "unknown_bias": ("dense", {"product.bias": "diagonal"}, "unknown bias kind 'diagonal'"),
    "stride_that_does_not_fit": ("conv_fprop", {"window.stride": np.array([2, 2])}, "extents disagree"),
    "stride_zero": ("conv_fprop", {"window.stride": np.array([0, 0])}, "extents disagree"),
    "groups_that_do_not_fit": ("conv_fprop", {"window.groups": np.int64(2)}, "extents disagree"),
    "integers_with_groups_that_do_not_fit": (
        "conv_integer",
        {"window.groups": np.int64(3)},
        "the channels and the groups",
    ),
    "integers_with_both_groups": (
        "conv_integer",
        {"window.batch_groups": np.int64(2)},
        "the output channels and the groups",
    ),
    "integers_with_an_axis_twice": ("conv_integer", {"window.lhs_spec": np.array([0, 3, 1, 1])}, "an axis for each"),
    "integers_with_an_axis_beyond": ("conv_integer", {"window.out_spec": np.array([0, 4, 2, 3])}, "an axis for each"),
    "integers_dilated_by_nothing": (
        "conv_integer",
        {"window.lhs_dilation": np.array([2, 0])},
        "spatial axis 1 with stride 1, padding (0, -1) and dilations 0 and 1",
    ),
    "integers_by_an_unknown_kernel": ("conv_integer", {"plan.kernel": "winograd"}, "there is no such kernel"),
    "too_few_dimensions": ("conv_fprop", {"window.stride": np.array([1])}, "ranks disagree"),
    "missing_preactivation": ("conv", {"epilogue.save_preactivation": np.int64(1)}, "results, expected"),
    "groups_below_none": ("groupnorm", {"norm.groups": np.int64(-1)}, "groups=-1"),
    # Groups of 0 are a layer-norm's.
    "statistics_of_groups_for_rows": ("groupnorm", {"norm.groups": np.int64(0)}, "mean has shape"),
    "groups_that_do_not_divide": ("groupnorm", {"norm.groups": np.int64(3)}, "groups=3"),
    "unknown_gate": ("squeeze_excite", {"squeeze.gate": "tanh"}, "gate 'tanh' cannot be read"),
    "channel_axis_out_of_range": ("batchnorm_infer", {"norm.channel_axis": np.int64(7)}, "channel axis 7"),
    "float_for_an_int": ("conv_fprop", {"window.groups": np.float64(1)}, "expected S64 but got F64"),
    "float32_for_a_float64": ("matmul", {"product.alpha": np.float32(1)}, "expected F64 but got F32"),
    "missing_attribute": ("matmul", {"product.alpha": None}, "expected 12 attributes but got 11"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_wrong_attribute_is_an_error_and_not_a_crash(name):
    kernel, changed, message = BAD_CALLS[name]
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(message)):
        call_directly(kernel, changed)


def test_wrong_operands_and_results_are_errors_and_not_crashes():
    x, w = jnp.ones((2, 5, 5, 4)), jnp.ones((3, 3, 4, 6))
    with pytest.raises(jax.errors.JaxRuntimeError, match="extents disagree"):
        call_directly("conv_fprop", {}, results=[ShapedArray((2, 5, 4, 6), np.dtype("float32"))])
    with pytest.raises(jax.errors.JaxRuntimeError, match="one floating-point type"):
        call_directly("conv_fprop", {}, args=(x, w.astype("bfloat16")))
    with pytest.raises(jax.errors.JaxRuntimeError, match="got 1 operands"):
        call_directly("conv_fprop", {}, args=(x,))
    with pytest.raises(jax.errors.JaxRuntimeError, match="w has shape"):
        call_directly("matmul", {}, args=(jnp.ones((5, 4)), jnp.ones((3, 6))))


# ----------------------------------------------------------------------------------------------------------------------
# The version of the FFI


def test_a_module_newer_than_jaxlib_is_refused_before_it_can_stop_jax():
    with pytest.raises(
        ImportError, match=r"compiled against XLA FFI 0\.5, but jaxlib .* runs 0\.3\. Reinstall jaxconv"
    ):
        _native.check_ffi_api((0, 5), (0, 3))
    with pytest.raises(ImportError, match=r"XLA FFI 1\.0"):
        _native.check_ffi_api((1, 0), (0, 9))


@pytest.mark.parametrize("running", [(0, 3), (0, 4), (1, 0), None], ids=str)
def test_a_module_as_old_as_jaxlib_or_older_is_accepted(running):
    _native.check_ffi_api((0, 3), running)


def test_the_running_version_is_found_and_not_older_than_the_built_one():
    running = _native.running_ffi_api()
    assert running is not None and running >= tuple(_native.cpu.ffi_api())


def test_platforms_without_native_code_say_so():
    assert _native.missing("cpu") is None
    assert _native.missing("tpu") == "jaxconv has no native code for tpu"
    assert (_native.missing("cuda") is None) == (_native.cuda is not None)
    assert DEVICE.platform == PLATFORM

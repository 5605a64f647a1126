"""Custom calls made by hand, as exported programs reach native code: without Python's checks."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from helpers import HOPPER, PLATFORM
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

import jaxconv
from jaxconv._core import primitives
from jaxconv._core.activations import Activation
from jaxconv._ops import conv as conv_module
from jaxconv._ops import conv_integer, conv_pooled, conv_scaled, conv_shortcut
from jaxconv._ops.batchnorm import backward_add, dx_of_sums, moments, shortcut_backward, shortcut_problem, signs
from jaxconv._ops.conv_normalised import normalised_statistics
from jaxconv._ops.dense import dense_gradient
from jaxconv._ops.gated import dense_gated, dense_gated_gradient
from jaxconv._problem import (
    AddedConvProblem,
    BatchNormProblem,
    ConvProblem,
    DenseProblem,
    GatedGradientProblem,
    GatedProblem,
    IntegerConvProblem,
    NormalisedConvProblem,
    PooledConvProblem,
    PoolProblem,
    ShortcutConvProblem,
)
from jaxconv.joints import region

# By name; of two with one target the first, which has all of its operands.
KERNELS = {kernel.name: kernel for kernel in reversed(primitives.KERNELS.values())}
# A GPU's alone: a CPU's targets and examples are without them.
ON_GPUS = (
    *("dense_gated", "dense_gated_gradient", "dense_gradient", "conv_dgrad_sums", "conv_gradient", "conv_gradient_add"),
    *("conv_norm_gradient", "conv_pooled", "conv_shortcut"),
    *("conv_scaled", "conv_normalised_statistics"),
    *("batchnorm_backward_add", "batchnorm_shortcut_backward", "batchnorm_signs"),
)
Shape = tuple[int, ...]


@dataclasses.dataclass
class Call:
    """A custom call: its target, its attributes, and (shape, dtype) of each named operand and result."""

    target: str
    attrs: dict[str, Any]
    operands: dict[str, tuple[Shape, str]]
    results: dict[str, tuple[Shape, str]]
    workspace: int = 0  # bytes

    def copy(self) -> Call:
        return copy.deepcopy(self)

    def run(self, *arrays: Any) -> list[jax.Array]:
        """The results, without the workspace; operands are ones where no arrays are given."""
        direct = Primitive("direct")  # a new one each time: nothing that was compiled before is found again
        direct.multiple_results = True
        results = [ShapedArray(shape, np.dtype(dtype)) for shape, dtype in self.results.values()]
        results.append(ShapedArray((self.workspace,), np.dtype("uint8")))
        direct.def_abstract_eval(lambda *_: results)
        rule = jax.ffi.ffi_lowering(self.target)
        mlir.register_lowering(direct, lambda ctx, *operands: rule(ctx, *operands, **self.attrs))
        arrays = arrays or tuple(np.ones(shape, jnp.dtype(dtype)) for shape, dtype in self.operands.values())
        return jax.block_until_ready(jax.jit(direct.bind)(*arrays))[:-1]


def used_twice(x: jax.Array, w: jax.Array, **options: Any) -> jax.Array:
    """A region with a convolution of x and another use of x: its gradient is a conv_dgrad_add."""
    (out,) = region.call(lambda x, w: [jaxconv.conv2d(x, w, **options).sum() + (x * x).sum()], x, w)
    return out


def dz_and_db(dy: jax.Array, w: jax.Array, z: jax.Array) -> list[jax.Array]:
    """dense_gradient of a layer with gelu, by the kernel."""
    (m, k), n, dtype = dy.shape, z.shape[1], dy.dtype.name
    precision = (jax.lax.Precision.DEFAULT,) * 2
    p = DenseProblem("mlp", dtype, m, k, n, precision, trans_w=True, activation=Activation("gelu"), algorithm="sm90")
    return dense_gradient(p, dy, w, z)


def y_and_z(x: jax.Array, w: jax.Array, b: jax.Array) -> list[jax.Array]:
    """dense_gated of rows with two axes, by the kernel."""
    (*pixels, k), n, f = x.shape, w.shape[1], Activation("gelu")
    p = DenseProblem("dense", x.dtype.name, x.size // k, k, n, (jax.lax.Precision.DEFAULT,) * 2, bias="column")
    p = dataclasses.replace(p, algorithm="sm90")
    return dense_gated(GatedProblem.of(p, f, first=True, save=True, pixels=tuple(pixels)), x, w, b)


def halves_and_db(dy: jax.Array, w: jax.Array, z: jax.Array) -> list[jax.Array]:
    """dense_gated_gradient of a layer with silu, by the kernel."""
    (m, k), n, precision = dy.shape, w.shape[0], (jax.lax.Precision.DEFAULT,) * 2
    p = DenseProblem("dense", dy.dtype.name, m, k, n, precision, trans_w=True, algorithm="sm90")
    return dense_gated_gradient(GatedGradientProblem.of(p, Activation("silu"), first=True), dy, w, z)


def _norm(x: jax.Array, **more: Any) -> BatchNormProblem:
    p = BatchNormProblem("batchnorm", x.dtype.name, x.shape, x.ndim - 1, True, 0.9, 1e-5, Activation("relu"))
    return dataclasses.replace(p, implementation="native", **more)


def norm_dx(x: jax.Array, dy: jax.Array, v: jax.Array, residual: jax.Array) -> jax.Array:
    """dx of a batch-norm whose other half is elsewhere."""
    p = _norm(x, residual=True, count=2 * x.size // x.shape[-1])
    return dx_of_sums(p, x, dy, v, v, v, v, v, v, residual)


def norm_moments(x: jax.Array) -> list[jax.Array]:
    return moments(_norm(x), x)


def both_norms(x: jax.Array, v: jax.Array) -> list[jax.Array]:
    """The gradients of two joined batch-norms, by the kernel."""
    p = shortcut_problem(x.dtype.name, x.shape, x.ndim - 1, Activation("relu"))
    return shortcut_backward(dataclasses.replace(p, implementation="native"), x, x, v, v, v, v, x, v, v, v, v)


def with_signs(x: jax.Array, v: jax.Array) -> list[jax.Array]:
    """A batch-norm by known statistics whose result's signs are kept, by the kernel."""
    return signs(_norm(x, residual=True), x, v, v, v, v, x)


def dx_and_addend(x: jax.Array, v: jax.Array) -> list[jax.Array]:
    """A batch-norm's backward pass that adds to dx, by the kernel."""
    return backward_add(_norm(x, residual=False), x, x, v, v, v, v, x)


def dz_and_sums(dy: jax.Array, w: jax.Array, x: jax.Array, bits: jax.Array, v: jax.Array) -> list[jax.Array]:
    """conv_dgrad_sums of a 1x1, by the kernel."""
    options: dict[str, Any] = dict.fromkeys(("activation", "precision", "implementation"))
    options |= dict(stride=1, padding="SAME", dilation=1, groups=1, layout="NHWC", return_preactivation=False)
    p = ConvProblem.infer("conv2d", 2, x, w, None, algorithm="sm90/sums", **options)
    return conv_module.dgrad_sums(p, dy, w, x, bits, x, v, v)


def sums_operands() -> tuple[jax.Array, ...]:
    """dz_and_sums's."""
    shapes = (2, 5, 6, 16), (1, 1, 128, 16), (2, 5, 6, 128)
    return *(jnp.ones(s, "bfloat16") for s in shapes), jnp.ones((2, 5, 6, 16), "uint8"), jnp.ones(128)


def dz_and_dbias(dy: jax.Array, w: jax.Array, y: jax.Array) -> list[jax.Array]:
    """conv_gradient of a 3x3 behind a tanh, by the kernel."""
    options: dict[str, Any] = dict.fromkeys(("precision", "implementation"))
    options |= dict(stride=1, padding="SAME", dilation=1, groups=1, layout="NHWC", return_preactivation=False)
    p = ConvProblem.infer("conv2d", 2, y, w, None, algorithm="sm90/halo", activation="tanh", **options)
    return conv_module.gradient(p, dy, w, y)


def dz_with_addend(dy: jax.Array, w: jax.Array, y: jax.Array, c: jax.Array) -> list[jax.Array]:
    """conv_gradient_add of a 3x3 behind a tanh, by the kernel."""
    options: dict[str, Any] = dict.fromkeys(("precision", "implementation"))
    options |= dict(stride=1, padding="SAME", dilation=1, groups=1, layout="NHWC", return_preactivation=False)
    p = ConvProblem.infer("conv2d", 2, y, w, None, algorithm="narrow/rows", activation="tanh", **options)
    return conv_module.gradient_add(p, dy, w, y, c)


def dz_through_norm(dy: jax.Array, w: jax.Array, x: jax.Array, v: jax.Array) -> list[jax.Array]:
    """conv_norm_gradient of a 3x3 behind a batch-norm and a relu6, by the kernel."""
    options: dict[str, Any] = dict.fromkeys(("precision", "implementation"))
    options |= dict(stride=1, padding="SAME", dilation=1, groups=1, layout="NHWC", return_preactivation=False)
    p = ConvProblem.infer("conv2d", 2, x, w, None, algorithm="sm90/product", activation="relu6", **options)
    return conv_module.norm_gradient(p, dy, w, x, v, v, v, v)


def gradient_operands() -> tuple[jax.Array, ...]:
    """dz_and_dbias's."""
    return tuple(jnp.ones(s, "bfloat16") for s in ((2, 5, 6, 24), (3, 3, 16, 24), (2, 5, 6, 16)))


def pooled(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
    """conv_pooled of a 3x3 with a relu6 and windows of 3x3, by the kernel."""
    options: dict[str, Any] = dict.fromkeys(("precision", "algorithm"))
    options |= dict(stride=2, padding="SAME", dilation=1, groups=1, layout="NHWC", return_preactivation=False)
    p = ConvProblem.infer("conv2d", 2, x, w, b, implementation="native", activation="relu6", **options)
    y = jax.ShapeDtypeStruct(p.y_shape, p.dtype)
    window: dict[str, Any] = dict(stride=2, padding=1, dilation=1, layout=None, algorithm=None, implementation=None)
    return conv_pooled.kernel(PooledConvProblem.of(p, PoolProblem.infer("max_pool", y, 3, **window)), x, w, b)


def with_shortcut(x: jax.Array, w: jax.Array, b: jax.Array, x2: jax.Array, w2: jax.Array) -> jax.Array:
    """conv_shortcut of a 3x3 with a relu and a shortcut of stride 2, by the kernel."""
    options: dict[str, Any] = dict(stride=1, padding="SAME", dilation=1, groups=1, layout="NHWC", precision=None)
    options |= dict(return_preactivation=False, implementation="native", algorithm=None)
    p = ConvProblem.infer("conv2d", 2, x, w, b, activation="relu", **options)
    options |= dict(stride=2, padding="VALID")
    q = ConvProblem.infer("conv2d", 2, x2, w2, None, activation=None, **options)
    return conv_shortcut.kernel(ShortcutConvProblem.of(p, q), x, w, b, x2, w2)


def shortcut_operands() -> tuple[jax.Array, ...]:
    """with_shortcut's."""
    shapes = (2, 5, 6, 32), (3, 3, 32, 16), (16,), (2, 9, 12, 48), (1, 1, 48, 16)
    return tuple(jnp.ones(s, "bfloat16") for s in shapes)


def pooled_operands() -> tuple[jax.Array, ...]:
    """pooled's."""
    return tuple(jnp.ones(s, "bfloat16") for s in ((2, 20, 24, 3), (3, 3, 3, 16), (16,)))


def narrow(x: jax.Array, w: jax.Array, b: jax.Array, residual: jax.Array, x2: jax.Array, w2: jax.Array) -> jax.Array:
    """conv_scaled with everything that it has."""
    how: dict[str, Any] = dict(scale=b, residual_scale=0.5, out_scale=0.25, out_dtype="int8", activation="relu")
    how |= dict(stride=1, padding="SAME", dilation=1, groups=1, layout="NHWC", precision=None, implementation=None)
    how |= dict(algorithm="sm90/eight 128x128", return_preactivation=False, shortcut=(x2, w2, (2, 2)))
    return conv_scaled.run("conv2d", 2, x, w, b, residual, **how)


def narrow_operands() -> tuple[jax.Array, ...]:
    """narrow's."""
    shapes = (2, 5, 6, 32), (3, 3, 32, 16), (16,), (2, 5, 6, 16), (2, 9, 12, 48), (1, 1, 48, 16)
    return tuple(jnp.ones(s, "float32" if len(s) == 1 else "int8") for s in shapes)


def statistics_of_sum(x: jax.Array, w: jax.Array, b: jax.Array, residual: jax.Array, **how: Any) -> list[jax.Array]:
    """A convolution, its bias and a residual with the statistics of their sum, by the kernel."""
    options: dict[str, Any] = dict.fromkeys(("activation", "precision", "implementation", "algorithm")) | how
    options |= dict(stride=1, padding="SAME", dilation=1, groups=1, layout="NHWC", return_preactivation=False)
    p = ConvProblem.infer("conv2d", 2, x, w, b, **options)
    return conv_module.with_statistics(AddedConvProblem.of(p, True), x, w, b, residual)


def normalised_with_statistics(x: jax.Array, w: jax.Array, v: jax.Array) -> list[jax.Array]:
    """conv_normalised_statistics of a 1x1, by the kernel."""
    options: dict[str, Any] = dict.fromkeys(("activation", "precision", "implementation"))
    options |= dict(stride=1, padding="SAME", dilation=1, groups=1, layout="NHWC", return_preactivation=False)
    p = ConvProblem.infer("conv2d", 2, x, w, None, algorithm="sm90/normalised", **options)
    return normalised_statistics(NormalisedConvProblem.of(_norm(x, residual=False), p), x, w, v, v, v, v)


def normalised_operands() -> tuple[jax.Array, ...]:
    """normalised_with_statistics's."""
    return jnp.ones((2, 5, 6, 16), "bfloat16"), jnp.ones((1, 1, 16, 24), "bfloat16"), jnp.ones(16)


def integer_problem(lhs: Any, rhs: Any, *args: Any, **given: Any) -> IntegerConvProblem:
    """Of lax.conv_general_dilated(lhs, rhs, *args, **given)."""
    like = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (lhs, rhs)]
    (equation,) = jax.make_jaxpr(lambda x, w: jax.lax.conv_general_dilated(x, w, *args, **given))(*like).eqns
    found = conv_integer.read(*like, equation.outvars[0].aval, equation.params)
    assert not isinstance(found, str), found
    return found


def of_integers(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """An integer convolution with every parameter, by the kernel."""
    window = (2, 1), ((1, 2), (0, -1)), (2, 1), (2, 1), ("NHWC", "HWIO", "NCHW")
    p = integer_problem(lhs, rhs, *window, feature_group_count=2, preferred_element_type="int32")
    return conv_integer.kernel(dataclasses.replace(p, implementation="native"), lhs, rhs)


@functools.cache
def _programs() -> dict[str, tuple[str, Any, Any]]:
    """Those that have their kernel here: a GPU, or a module, without Hopper's code lacks several."""
    every = _all_programs()
    if HOPPER or PLATFORM != "cuda":
        return every
    here = {name: one for name, one in every.items() if _is_native(*one)}
    assert len(here) > 25, f"native calls are missing: {sorted(every.keys() - here.keys())}"
    return here


def _is_native(name: str, f: Any, args: tuple[Any, ...]) -> bool:
    try:
        calls = [call for call in jaxconv.explain(f)(*args) if call.op == name]
    except ValueError:  # a forced algorithm that cannot run
        return False
    return len(calls) == 1 and calls[0].plan.implementation == "native"


def _all_programs() -> dict[str, tuple[str, Any, Any]]:
    """name -> (kernel, f, arguments): f calls the kernel once, natively, with all operands and results that it has."""
    x, w, b, v = jnp.ones((2, 5, 6, 4)), jnp.ones((3, 3, 4, 6)), jnp.ones(6), jnp.ones(4)
    native: dict[str, Any] = dict(implementation="native")
    conv, dense = functools.partial(jaxconv.conv2d, **native), functools.partial(jaxconv.dense, **native)
    norm = functools.partial(jaxconv.batchnorm, activation="relu", **native)
    pool = functools.partial(jaxconv.max_pool, window=(3, 2), padding="SAME", **native)
    average = functools.partial(jaxconv.avg_pool, window=(3, 2), padding="SAME", count_include_pad=False, **native)
    group = functools.partial(jaxconv.groupnorm, groups=2, activation="silu", **native)
    rows = functools.partial(jaxconv.layernorm, **native)
    excite = functools.partial(jaxconv.squeeze_excite, activation="silu", **native)
    small = jnp.ones((4, 3)), jnp.ones(3), jnp.ones((3, 4)), v
    # A GPU's kernels with statistics and with an addend take 16 bits and eights of channels.
    wide = "bfloat16" if PLATFORM == "cuda" else "float32"
    aligned = jnp.ones((2, 5, 6, 8), wide), jnp.ones((3, 3, 8, 16), wide)
    u, m = jnp.ones(16), jnp.ones((5, 4))
    forced: dict[str, Any] = dict(algorithm="sm90") if HOPPER else native
    fused = dict(activation="gelu", return_preactivation=True)

    product = [jnp.ones(s, wide) for s in ((64, 64), (128, 64), (64, 128))]
    large = jnp.ones((16, 64, 64, 64), wide), jnp.ones(64)
    on_gpus = {
        "dense_gradient": ("dense_gradient", dz_and_db, product),
        "dense_gated_gradient": (
            "dense_gated_gradient",
            halves_and_db,
            [jnp.ones(s, wide) for s in ((64, 64), (128, 64), (64, 256))],
        ),
        "dense_gated": ("dense_gated", y_and_z, [jnp.ones(s, wide) for s in ((2, 32, 64), (64, 128), (128,))]),
        "batchnorm_shortcut_backward": ("batchnorm_shortcut_backward", both_norms, large),
        "conv_normalised_statistics": (
            "conv_normalised_statistics",
            normalised_with_statistics,
            normalised_operands(),
        ),
        "conv_dgrad_sums": ("conv_dgrad_sums", dz_and_sums, sums_operands()),
        "conv_gradient": ("conv_gradient", dz_and_dbias, gradient_operands()),
        "conv_gradient_add": (
            "conv_gradient_add",
            dz_with_addend,
            (*gradient_operands(), jnp.ones((2, 5, 6, 16), "bfloat16")),
        ),
        "conv_norm_gradient": ("conv_norm_gradient", dz_through_norm, (*gradient_operands(), jnp.ones(16))),
        "conv_pooled": ("conv_pooled", pooled, pooled_operands()),
        "conv_shortcut": ("conv_shortcut", with_shortcut, shortcut_operands()),
        "conv_scaled": ("conv_scaled", narrow, narrow_operands()),
        "batchnorm_backward_add": ("batchnorm_backward_add", dx_and_addend, large),
        "batchnorm_signs": ("batchnorm_signs", with_signs, large),
    }
    on_gpus = on_gpus if PLATFORM == "cuda" else {}

    depthwise = aligned[0], jnp.ones((3, 3, 1, 8), wide)

    def normalised(x: jax.Array, w: jax.Array, scale: Any = None, bias: Any = None) -> jax.Array:
        u = jnp.ones(8)
        how: dict[str, Any] = dict(training=True, groups=8, activation="relu6", **native)
        return jaxconv.batchnorm_conv(x, scale, bias, u, u, w, **how)[0]

    every_gradient = jax.grad(lambda *a: normalised(*a).sum(), (0, 1, 2, 3))
    parameters = jnp.ones(8), jnp.ones(8)

    def trained(x: jax.Array, residual: jax.Array) -> jax.Array:
        return norm(x, v, v, v, v, residual=residual, training=True)[0].sum()

    return {
        "conv": ("conv", functools.partial(conv, **fused), (x, w, b)),
        "conv_add": (
            "conv_add",
            lambda x, w, b, r: conv(x, w, b, residual=r, **fused),
            (x, w, b, jnp.ones((2, 5, 6, 6))),
        ),
        "conv_fprop": ("conv_fprop", conv, (x, w)),
        "conv_integer": ("conv_integer", of_integers, (x.astype("int16"), jnp.ones((3, 3, 2, 6), "int16"))),
        "conv_channels_first": (
            "conv_fprop",
            functools.partial(conv, layout="NCHW"),
            (x.transpose(0, 3, 1, 2), w.transpose(3, 2, 0, 1)),
        ),
        "conv_statistics": (
            "conv_statistics",
            lambda x, w: jaxconv.conv_batchnorm(x, w, u, u, u, u, training=True, **native),
            aligned,
        ),
        "conv_statistics_groups": (
            "conv_statistics",
            lambda x, w: jaxconv.conv_batchnorm(x, w, *[jnp.ones(8)] * 4, groups=2, training=True, **native),
            (aligned[0], jnp.ones((3, 3, 4, 8), wide)),
        ),
        "conv_add_statistics": (
            "conv_add_statistics",
            functools.partial(statistics_of_sum, **forced),
            (*aligned, jnp.ones(16, wide), jnp.ones((2, 5, 6, 16), wide)),
        ),
        "conv_dgrad": ("conv_dgrad", jax.grad(lambda x, w: conv(x, w).sum()), (x, w)),
        "conv_dgrad_add": ("conv_dgrad_add", jax.grad(functools.partial(used_twice, **forced)), aligned),
        "conv_wgrad": ("conv_wgrad", jax.grad(lambda x, w: conv(x, w).sum(), 1), (x, w)),
        "conv_normalised": ("conv_normalised", normalised, depthwise),
        "conv_normalised_wgrad": (
            "conv_normalised_wgrad",
            jax.grad(lambda x, w: normalised(x, w).sum(), 1),
            depthwise,
        ),
        "conv_normalised_gradient": ("conv_normalised_gradient", every_gradient, (*depthwise, *parameters)),
        "conv_normalised_dx": ("conv_normalised_dx", every_gradient, (*depthwise, *parameters)),
        "dense": ("dense", functools.partial(dense, c=jnp.ones((5, 6)), beta=3.0, **fused), (m, w[0, 0], b)),
        "dense_row_bias": ("dense", functools.partial(dense, activation="relu"), (m, w[0, 0], jnp.ones((5, 1)))),
        "dense_instances": (
            "dense",
            jax.vmap(lambda x, w, b, c: dense(x, w, b, c=c, **fused)),
            (jnp.ones((3, 5, 4)), jnp.ones((3, 4, 6)), jnp.ones((3, 6)), jnp.ones((3, 5, 6))),
        ),
        **on_gpus,
        "matmul": ("matmul", dense, (m, w[0, 0])),
        "batchnorm_train": ("batchnorm_train", functools.partial(norm, training=True, residual=x), (x, v, v, v, v)),
        "batchnorm_instances": (
            "batchnorm_train",
            jax.vmap(functools.partial(norm, training=True)),
            (jnp.stack([x] * 3), *[jnp.ones((3, 4))] * 4),
        ),
        "batchnorm_infer": ("batchnorm_infer", functools.partial(norm, training=False, residual=x), (x, v, v, v, v)),
        "batchnorm_backward": ("batchnorm_backward", jax.grad(trained, (0, 1)), (x, x)),
        "batchnorm_dx": ("batchnorm_dx", norm_dx, (x, x, v, x)),
        "batchnorm_moments": ("batchnorm_moments", norm_moments, (x,)),
        "max_pool": ("max_pool", pool, (x,)),
        "max_pool_positions": ("max_pool", jax.grad(lambda x: pool(x).sum()), (x,)),
        "max_pool_backward": ("max_pool_backward", jax.grad(lambda x: pool(x).sum()), (x,)),
        "avg_pool": ("avg_pool", average, (x,)),
        "avg_pool_backward": ("avg_pool_backward", jax.grad(lambda x: average(x).sum()), (x,)),
        "groupnorm": ("groupnorm", group, (x, v, v)),
        "groupnorm_instances": ("groupnorm", jax.vmap(group), (jnp.stack([x] * 3), *[jnp.ones((3, 4))] * 2)),
        "groupnorm_backward": ("groupnorm_backward", jax.grad(lambda x: group(x, v, v).sum()), (x,)),
        "squeeze_excite": ("squeeze_excite", excite, (x, *small)),
        "squeeze_excite_backward": ("squeeze_excite_backward", jax.grad(lambda x: excite(x, *small).sum()), (x,)),
        "layernorm": ("groupnorm", rows, (x, v, v)),
        "layernorm_instances": ("groupnorm", jax.vmap(rows), (jnp.stack([x] * 3), *[jnp.ones((3, 4))] * 2)),
        "layernorm_backward": ("groupnorm_backward", jax.grad(lambda x: rows(x, v, v).sum()), (x,)),
    }


# Ops younger than the first version of the wire
YOUNGER = (
    *(
        "conv_add",
        "conv_add_statistics",
        "conv_dgrad_sums",
        "conv_gradient",
        "conv_gradient_add",
        "conv_integer",
        "conv_norm_gradient",
        "conv_pooled",
        "conv_shortcut",
        "conv_scaled",
        "conv_normalised",
        "conv_normalised_statistics",
        "conv_normalised_wgrad",
        "conv_normalised_gradient",
        "conv_normalised_dx",
        "dense_gated",
        "dense_gated_gradient",
        "dense_gradient",
        "batchnorm_backward_add",
        "batchnorm_dx",
        "batchnorm_moments",
        "batchnorm_shortcut_backward",
        "batchnorm_signs",
        "max_pool",
        "max_pool_backward",
        "avg_pool",
        "avg_pool_backward",
    ),
    *("groupnorm", "groupnorm_backward", "squeeze_excite", "squeeze_excite_backward"),
)


def _call(name: str, f: Any, args: tuple[Any, ...]) -> Call:
    (call,) = [call for call in jaxconv.explain(f)(*args) if call.op == name]
    kernel, p = KERNELS[name], call.problem
    operands = {role: array for role, array in kernel.operands(p).items() if role not in kernel.unread.split()}
    return Call(
        kernel.target,
        {**kernel.wire(p, call.plan).attrs, "plan": call.plan.attrs()},
        operands,
        dict(zip(kernel.present(p, kernel.result_roles), kernel.results(p), strict=True)),
        call.plan.workspace_bytes,
    )


@functools.cache
def _calls() -> dict[str, Call]:
    with jax.enable_x64(False):  # whichever test comes first
        return {name: _call(*program) for name, program in _programs().items()}


def example(name: str) -> Call:
    """A right call, one of NAMES, to be changed at will."""
    return _calls()[name].copy()


NAMES = tuple(_programs())

"""Every public function and module under JAX's settings against accidents: jax_numpy_rank_promotion="raise", which
refuses operands of unequal ranks, and jax_numpy_dtype_promotion="strict", which refuses those of unequal dtypes.

Such errors are raised when a program is traced or lowered, so nothing is compiled. Programs must be those that are made
without the settings, to the letter.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import flax_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxconv
import jaxconv.linen
import jaxconv.nnx

Array = jax.Array


SETTINGS = {"rank": lambda: jax.numpy_rank_promotion("raise"), "dtype": lambda: jax.numpy_dtype_promotion("strict")}


@contextlib.contextmanager
def settings(*names: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(SETTINGS[name]())
        yield


# ----------------------------------------------------------------------------------------------------------------------
# Functions. A case is (function, shapes of x's dtype, shapes of the parameters' dtype); it takes `implementation` too.

IMAGES, C, K = (2, 6, 5, 8), (8,), (16,)
LAYER, DEPTHWISE = (3, 3, 8, 16), (3, 3, 1, 8)


def with_residual(
    x: Array, r: Array, *parameters: Array, f: Callable[..., Any] = jaxconv.batchnorm, **options: Any
) -> Any:
    return f(x, *parameters, residual=r, **options)


def pair(x: Array, w: Array, *parameters: Array, **options: Any) -> Any:
    return jaxconv.conv_batchnorm(x, w, *parameters, **options)


def pair_with_residual(x: Array, w: Array, r: Array, *parameters: Array, **options: Any) -> Any:
    return jaxconv.conv_batchnorm(x, w, *parameters, residual=r, **options)


def read(x: Array, w: Array, *parameters: Array, **options: Any) -> Any:
    return jaxconv.batchnorm_conv(x, *parameters, w, **options)


def masked(x: Array, *parameters: Array, implementation: str, training: bool) -> Any:
    """By XLA, whatever is asked for."""
    return jaxconv.batchnorm(x, *parameters, mask=np.arange(5)[None, None, :, None] > 1, training=training)


def given(x: Array, scale: Array, bias: Array, mean: Array, var: Array, **options: Any) -> Any:
    return jaxconv.batchnorm(x, scale, bias, mean, var, statistics=(mean, var), **options)


part = functools.partial
norm = part(part, jaxconv.batchnorm, training=True)
FUNCTIONS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], list[tuple[int, ...]]]] = {
    "conv1d": (part(jaxconv.conv1d, activation="gelu", stride=2), [(2, 9, 8), (3, 8, 16), K], []),
    "conv2d": (part(jaxconv.conv2d, activation="silu"), [IMAGES, LAYER, K], []),
    "conv2d_bare": (jaxconv.conv2d, [IMAGES, LAYER], []),
    "conv2d_preactivation": (
        part(jaxconv.conv2d, activation="tanh", return_preactivation=True),
        [IMAGES, LAYER, K],
        [],
    ),
    "conv2d_residual": (
        lambda x, w, b, r, **options: jaxconv.conv2d(x, w, b, residual=r, activation="relu", **options),
        [IMAGES, LAYER, K, (2, 6, 5, 16)],
        [],
    ),
    "conv2d_depthwise": (part(jaxconv.conv2d, groups=8, activation="relu6"), [IMAGES, DEPTHWISE, C], []),
    "conv2d_cropped": (part(jaxconv.conv2d, padding=((-1, 3), (1, 0))), [IMAGES, LAYER, K], []),
    "conv2d_channels_first": (part(jaxconv.conv2d, layout="NCHW"), [(2, 8, 6, 5), (16, 8, 3, 3), K], []),
    "conv3d": (part(jaxconv.conv3d, activation="elu"), [(2, 3, 4, 5, 8), (2, 2, 2, 8, 16), K], []),
    "conv_transpose1d": (part(jaxconv.conv_transpose1d, stride=2), [(2, 9, 8), (3, 8, 16), K], []),
    "conv_transpose2d": (part(jaxconv.conv_transpose2d, stride=2, activation="gelu"), [IMAGES, LAYER, K], []),
    "conv_transpose2d_channels_first": (
        part(jaxconv.conv_transpose2d, layout="NCHW"),
        [(2, 8, 6, 5), (16, 8, 3, 3), K],
        [],
    ),
    "conv_transpose3d": (jaxconv.conv_transpose3d, [(2, 3, 4, 5, 8), (2, 2, 2, 8, 16), K], []),
    "dense": (part(jaxconv.dense, activation="gelu"), [(5, 8), (8, 16), K], []),
    "dense_of_images": (part(jaxconv.dense, activation="tanh"), [IMAGES, (8, 16), K], []),
    "dense_rows": (jaxconv.dense, [(5, 8), (8, 16), (5, 1)], []),
    "dense_scalar": (jaxconv.dense, [(5, 8), (8, 16), ()], []),
    "dense_addend": (
        lambda x, w, b, c, **options: jaxconv.dense(x, w, b, c=c, alpha=0.5, beta=2.0, activation="relu", **options),
        [(5, 8), (8, 16), K, (5, 16)],
        [],
    ),
    "mlp": (jaxconv.mlp, [(5, 8), (8, 16), K, (16, 8), C], []),
    "batchnorm": (norm(activation="silu"), [IMAGES], [C] * 4),
    "batchnorm_inference": (part(jaxconv.batchnorm, training=False, activation="relu"), [IMAGES], [C] * 4),
    "batchnorm_channels_first": (norm(channel_axis=1), [(2, 8, 6, 5)], [C] * 4),
    "batchnorm_residual": (part(with_residual, training=True, activation="relu"), [IMAGES, IMAGES], [C] * 4),
    "batchnorm_masked": (part(masked, training=True), [IMAGES], [C] * 4),
    "batchnorm_given": (part(given, training=True), [IMAGES], [C] * 4),
    "conv_batchnorm": (part(pair, training=True, activation="relu"), [IMAGES, LAYER], [K] * 4),
    "conv_batchnorm_inference": (part(pair, training=False), [IMAGES, LAYER], [K] * 4),
    "conv_batchnorm_residual": (
        part(pair_with_residual, training=True, activation="relu"),
        [IMAGES, LAYER, (2, 6, 5, 16)],
        [K] * 4,
    ),
    "batchnorm_conv": (part(read, training=True, activation="relu"), [IMAGES, LAYER], [C] * 4),
    "groupnorm": (part(jaxconv.groupnorm, groups=4, activation="silu"), [IMAGES], [C] * 2),
    "groupnorm_bare": (part(jaxconv.groupnorm, groups=2), [IMAGES], []),
    "layernorm": (part(jaxconv.layernorm, activation="gelu"), [IMAGES], [C] * 2),
    "layernorm_bare": (jaxconv.layernorm, [(5, 8)], []),
    "max_pool": (part(jaxconv.max_pool, window=(3, 2), stride=2, padding="SAME"), [IMAGES], []),
    "max_pool_dilated": (part(jaxconv.max_pool, window=2, dilation=2), [IMAGES], []),
    "avg_pool": (part(jaxconv.avg_pool, window=(3, 2), stride=2, padding="SAME"), [IMAGES], []),
    "squeeze_excite": (jaxconv.squeeze_excite, [IMAGES], [(8, 4), (4,), (4, 8), C]),
    "squeeze_excite_bare": (
        lambda x, w1, w2, **options: jaxconv.squeeze_excite(
            x, w1, None, w2, None, activation="silu", gate="hard_sigmoid", **options
        ),
        [IMAGES],
        [(8, 4), (4, 8)],
    ),
}
# no arrays, or no op: what is asked of functions and programs
OTHERS = {
    *(
        "Accelerated",
        "Explanation",
        "Frozen",
        "Launches",
        "Quantization",
        "__version__",
        "accelerate",
        "check_exported",
        "checkpoint_policies",
    ),
    *("conv_general_dilated", "cost", "disable", "disabled", "enable", "enabled", "explain", "export_checks", "freeze"),
    *("graph_options", "info", "launches", "portable_exported", "report", "tune"),
}


def total(tree: Any) -> Array:
    """A number that every element of the results has a part in."""
    return sum((jnp.sum(jnp.sin(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)), jnp.zeros(()))


def tangents(f: Callable[..., Any], args: tuple[Array, ...]) -> Any:
    return jax.jvp(f, args, args)


def each_tangent(f: Callable[..., Any], args: tuple[Array, ...]) -> Any:
    """Derivatives along one argument each, for rules that leave out what is zero."""
    return [
        jax.jvp(lambda a, i=i: f(*args[:i], a, *args[i + 1 :]), (args[i],), (args[i],))[1] for i in range(len(args))
    ]


def gradient(f: Callable[..., Any], args: tuple[Array, ...]) -> Any:
    return jax.grad(lambda *args: total(f(*args)), range(len(args)))(*args)


def each_gradient(f: Callable[..., Any], args: tuple[Array, ...]) -> Any:
    return [jax.grad(lambda *args: total(f(*args)), i)(*args) for i in range(len(args))]


def mapped(f: Callable[..., Any], args: tuple[Array, ...]) -> Any:
    """Under vmap: all arguments, the first, and all but the first; with gradients."""
    more = tuple(jnp.stack([a, a]) for a in args)
    outs = []
    for axes in {(0,) * len(args), (0, *(None,) * (len(args) - 1)), (None, *(0,) * (len(args) - 1))}:
        if any(axis == 0 for axis in axes):
            some = [m if axis == 0 else a for m, a, axis in zip(more, args, axes, strict=True)]
            outs.append(jax.vmap(lambda *args: (f(*args), gradient(f, args)), axes)(*some))
    return outs


MODES: dict[str, Callable[..., Any]] = {
    "value": lambda f, args: f(*args),
    "forward": tangents,
    "forward_each": each_tangent,
    "reverse": gradient,
    "reverse_each": each_gradient,
    "forward_over_reverse": lambda f, args: tangents(lambda *args: gradient(f, args), args),
    "reverse_over_reverse": lambda f, args: gradient(lambda *args: gradient(f, args), args),
    "vmap": mapped,
}


def test_every_public_function_is_here():
    assert {name.split("_bare")[0] for name in FUNCTIONS} >= set(jaxconv.__all__) - OTHERS
    assert not OTHERS & set(FUNCTIONS) and set(jaxconv.__all__) >= OTHERS


@pytest.mark.parametrize(
    "mode",
    [pytest.param(m, marks=[pytest.mark.slow] if m in ("forward_each", "forward_over_reverse") else []) for m in MODES],
)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name, mode):
    f, own, parameters = FUNCTIONS[name]
    for dtype, implementation in (("bfloat16", "native"), ("bfloat16", "xla"), ("float32", "xla")):
        args = [flax_cases.array(i, shape, dtype) for i, shape in enumerate(own)]
        args += [jnp.abs(flax_cases.array(9 + i, shape)) for i, shape in enumerate(parameters)]
        call = part(f, implementation=implementation)

        def program(*names: str, call=call, args=args) -> str:
            with settings(*names):
                return jax.jit(lambda *args: MODES[mode](call, args)).lower(*args).as_text()

        strict = program(*SETTINGS)
        assert mode != "reverse" or strict == program()


# ----------------------------------------------------------------------------------------------------------------------
# Modules: whatever Flax's take, ours do

LINEN = {"Conv": "CONV", "ConvTranspose": "CONV_TRANSPOSE", "Dense": "DENSE", "BatchNorm": "BATCHNORM"}
LINEN |= {"GroupNorm": "GROUPNORM", "LayerNorm": "LAYERNORM"}
CASES = [(name, case) for name, table in LINEN.items() for case in getattr(flax_cases, table)]
SHARED = ("plain", "bfloat16", "bfloat16_x", "neither")  # the rest of the computation is linen's too


def linen_module(library: Any, name: str, x: Array, **options: Any) -> tuple[Callable[..., Any], Any]:
    module = getattr(library, name)(
        **({"features": 8} if name in ("Conv", "ConvTranspose", "Dense") else {}), **options
    )
    call = {"use_running_average": False} if name == "BatchNorm" else {}
    variables = flax_cases.randomised(jax.eval_shape(part(module.init, **call), flax_cases.KEY, x))
    return lambda variables, x: module.apply(variables, x, **call, mutable=["batch_stats"]), variables


def nnx_module(library: Any, name: str, x: Array, **options: Any) -> tuple[Callable[..., Any], Any]:
    name, channels = {"Dense": "Linear"}.get(name, name), x.shape[options.get("axis", -1)]
    features = (channels, 8) if name in ("Conv", "ConvTranspose", "Linear") else (channels,)
    module = getattr(library, name)(*features, **options, rngs=nnx.Rngs(flax_cases.KEY))
    graph, state = nnx.split(module)

    def f(state: Any, x: Array) -> Any:
        merged = nnx.merge(graph, state)
        return merged(x), nnx.state(merged)

    return f, flax_cases.randomised(state)


def derivatives(f: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """f's results, its tangents and its gradients; of integers there are none."""
    leaves, tree = jax.tree.flatten(args)
    floats = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]

    def of_floats(*some: Array) -> Any:
        all_of_them = list(leaves)
        for i, value in zip(floats, some, strict=True):
            all_of_them[i] = value
        return jax.tree.leaves(f(*jax.tree.unflatten(tree, all_of_them)))

    some = tuple(leaves[i] for i in floats)
    return tangents(of_floats, some), gradient(of_floats, some)


def accelerated_module(library: Any, *args: Any, **options: Any) -> tuple[Callable[..., Any], Any]:
    """Flax's own; in place of ours, accelerated."""
    f, variables = linen_module(nn, *args, **options)
    return f if library is nn else jaxconv.accelerate(f), variables


MODULES = [("linen", *one) for one in CASES]
MODULES += [(way, *one) for way in ("nnx", "accelerate") for one in CASES if one[1] in SHARED]
WAYS = {
    "linen": (linen_module, jaxconv.linen, nn),
    "nnx": (nnx_module, jaxconv.nnx, nnx),
    "accelerate": (accelerated_module, None, nn),
}


@pytest.mark.parametrize(
    "way, name, case",
    [pytest.param(*one, marks=[pytest.mark.slow] if one[0] == "nnx" else []) for one in MODULES],
    ids=str,
)
def test_modules(way, name, case):
    build, ours, flax = WAYS[way]
    shape, *dtype, options = getattr(flax_cases, LINEN[name])[case]
    x = flax_cases.array(0, shape, *dtype)

    def program(library: Any, *names: str) -> str:
        with settings(*names):
            f, variables = build(library, name, x, **options)
            return jax.jit(lambda *args: derivatives(f, args)).lower(variables, x).as_text()

    def taken_by_flax(setting: str) -> bool:
        try:
            return bool(program(flax, setting))
        except ValueError as error:
            assert "promotion" in str(error)
            return False

    names = [setting for setting in SETTINGS if taken_by_flax(setting)]
    if "bfloat16" not in case and "float16" not in case and dtype in ([], ["float32"]):
        assert names == list(SETTINGS)
    assert program(ours, *names) == program(ours)

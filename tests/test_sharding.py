"""Several devices: every op on Auto and Explicit meshes and in shard_map, with the collectives counted in the HLO.

The mesh is made of all devices of the default backend: on the CPU four (see conftest.py) or as many as
JAX_NUM_CPU_DEVICES says, or two or four GPUs.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import os
import re
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tolerance import floor

import jaxconv
from jaxconv._ops.batchnorm import moments
from jaxconv._problem import BatchNormProblem

DEVICES = jax.device_count()
pytestmark = pytest.mark.skipif(DEVICES < 2 or DEVICES % 2 == 1, reason="a mesh takes an even number of devices")

MESHES = {"data": ((DEVICES,), ("data",)), "grid": ((DEVICES // 2, 2), ("data", "model"))}
N = 2 * DEVICES  # images


def make_mesh(name: str, kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    shape, axes = MESHES[name]
    return jax.make_mesh(shape, axes, axis_types=(kind,) * len(axes))


def place(mesh: Any, arrays: Sequence[Any], specs: Sequence[P]) -> list[jax.Array]:
    return [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays, specs, strict=True)]


def entered(mesh: Any) -> contextlib.AbstractContextManager[Any]:
    """Gradients on an Explicit mesh need it as the context."""
    return jax.set_mesh(mesh) if AxisType.Explicit in mesh.axis_types else contextlib.nullcontext()


def collectives(text: str) -> collections.Counter[str]:
    """How many of each kind, without those in which every device is alone (over a mesh axis of one)."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    lines = [line for line in text.splitlines() if not _alone(line)]
    return collections.Counter(re.findall(rf" ({kinds})(?:-start)?\(", "\n".join(lines)))


def _alone(line: str) -> bool:
    """Whether the replica groups of a line of HLO, in any of their three notations, hold one device each."""
    if found := re.search(r"replica_groups=mesh\[(.*?)\] ?\{(.*?)\}", line):  # the mesh's axes, and those of a group
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", found[1])}
        return all(sizes[name] == 1 for name in re.findall(r"'(\w+)'", found[2]))
    return bool(re.search(r"replica_groups=(\{(\{\d+\},?)+\}|\[\d+,1\]<)", line))


def native_calls(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """(target, shape of the first result) of each of jaxconv's calls."""
    found = re.findall(r'= \(?\w+\[([\d,]*)\].*custom-call\(.*custom_call_target="jaxconv_(\w+)_v\d+"', text)
    return [(name, tuple(map(int, shape.split(",")))) for shape, name in found]


def ints(*shape: int, seed: int = 0, largest: int = 2) -> np.ndarray:
    return helpers.integers(seed, shape, largest).astype(np.float32)


conv = functools.partial(jaxconv.conv2d, implementation="native")
relu_conv = functools.partial(conv, activation="relu")
dense = functools.partial(jaxconv.dense, implementation="native")

X, W, B = ints(N, 5, 6, 8), ints(3, 3, 8, 8, seed=1), ints(8, seed=2)
GROUPED = ints(3, 3, 2, 8, seed=3)
ROWS, MATRIX = ints(N, 12, seed=4), ints(12, 8, seed=5)
BY_N, BY_K = P("data"), P(None, None, None, "model")

# name: (function, arguments, their specs, mesh, kinds of collectives in forward, in forward and backward)
# With whole numbers every sum is exact, in whatever order: sharded and unsharded results must be equal.
ROWS_OF_TABLE: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[P, ...], str, set[str], set[str]]] = {
    "conv": (conv, (X, W), (BY_N, P()), "data", set(), {"all-reduce"}),
    "conv_strided": (
        functools.partial(conv, stride=2, padding="VALID"),
        (X, W),
        (BY_N, P()),
        "data",
        set(),
        {"all-reduce"},
    ),
    "conv_bias_relu": (relu_conv, (X, W, B), (BY_N, P(), P()), "data", set(), {"all-reduce"}),
    "conv_channels_first": (
        functools.partial(relu_conv, layout="NCHW"),
        (X.transpose(0, 3, 1, 2), W.transpose(3, 2, 0, 1), B),
        (P("data", None), P("model"), P("model")),
        "grid",
        set(),
        {"all-reduce"},
    ),
    "conv_out_channels": (relu_conv, (X, W, B), (BY_N, BY_K, P("model")), "grid", set(), {"all-reduce"}),
    "conv_in_channels": (
        conv,
        (X, W),
        (P("data", None, None, "model"), P(None, None, "model")),
        "grid",
        {"all-reduce"},
        {"all-reduce"},
    ),
    "conv_in_channels_relu": (
        relu_conv,
        (X, W, B),
        (P("data", None, None, "model"), P(None, None, "model"), P()),
        "grid",
        {"all-reduce"},
        {"all-reduce"},
    ),
    "conv_groups_replicated": (
        functools.partial(relu_conv, groups=4),
        (X, GROUPED, B),
        (BY_N, P(), P()),
        "data",
        set(),
        {"all-reduce"},
    ),
    "conv_groups": (
        functools.partial(relu_conv, groups=4),
        (X, GROUPED, B),
        (P("data", None, None, "model"), BY_K, P("model")),
        "grid",
        set(),
        {"all-reduce"},
    ),
    "depthwise": (
        functools.partial(conv, groups=8),
        (X, ints(3, 3, 1, 8, seed=6)),
        (P("data", None, None, "model"), BY_K),
        "grid",
        set(),
        {"all-reduce"},
    ),
    "conv_transpose": (
        functools.partial(jaxconv.conv_transpose2d, stride=2, implementation="native"),
        (X, W),
        (BY_N, P()),
        "data",
        set(),
        {"all-reduce"},
    ),
    "dense": (
        functools.partial(dense, activation="relu"),
        (ROWS, MATRIX, B),
        (BY_N, P(), P()),
        "data",
        set(),
        {"all-reduce"},
    ),
    "dense_columns": (
        functools.partial(dense, activation="relu"),
        (ROWS, MATRIX, B),
        (BY_N, P(None, "model"), P("model")),
        "grid",
        set(),
        {"all-reduce"},
    ),
    "dense_sum_relu": (
        functools.partial(dense, activation="relu"),
        (ROWS, MATRIX, B),
        (P("data", "model"), P("model"), P()),
        "grid",
        {"all-reduce"},
        {"all-reduce"},
    ),
    "dense_sum": (dense, (ROWS, MATRIX), (P("data", "model"), P("model")), "grid", {"all-reduce"}, {"all-reduce"}),
}
over_table = pytest.mark.parametrize("row", ROWS_OF_TABLE)
over_kinds = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])


def with_gradients(f: Callable[..., Any]) -> Callable[..., Any]:
    """A loss whose cotangent, 2y, is made of whole numbers and sharded as y is, and all gradients."""

    def loss(*args: Any) -> Any:
        return jnp.sum(f(*args) ** 2)

    return lambda *args: jax.value_and_grad(loss, tuple(range(len(args))))(*args)


@over_kinds
@over_table
def test_forward(row, kind):
    f, args, specs, name, expected, _ = ROWS_OF_TABLE[row]
    mesh = make_mesh(name, kind)
    whole = f(*map(jnp.asarray, args))
    placed = place(mesh, args, specs)
    compiled = jax.jit(f).lower(*placed).compile()
    y = compiled(*placed)
    np.testing.assert_array_equal(y, whole)
    counts = collectives(compiled.as_text())
    assert set(counts) == expected and sum(counts.values()) == len(expected)
    ((_, shape),) = native_calls(compiled.as_text())
    parts = mesh.shape["data"] * (2 if "out_channels" in row or "columns" in row or "first" in row else 1)
    parts *= 2 if row in ("conv_groups", "depthwise") else 1
    assert np.prod(shape) == whole.size // parts  # the call computes one shard
    assert mesh.shape["data"] == 1 or y.sharding.spec[0] == "data"


@over_kinds
def test_fewer_groups_than_devices_are_not_taken_apart(kind):
    """Channels that are split finer than their groups: a group's sum needs all of its channels."""
    groups = DEVICES // 2
    x, w = ints(N, 5, 5, 2 * DEVICES), ints(3, 3, 2 * DEVICES // groups, 2 * DEVICES, seed=1)
    f = with_gradients(functools.partial(conv, groups=groups))
    mesh = make_mesh("data", kind)
    with entered(mesh):
        placed = place(mesh, (x, w), (P(None, None, None, "data"), P(None, None, None, "data")))
        for a, b in zip(jax.tree.leaves(jax.jit(f)(*placed)), jax.tree.leaves(f(x, w)), strict=True):
            np.testing.assert_array_equal(a, b)


@over_kinds
@over_table
def test_gradients(row, kind):
    f, args, specs, name, _, expected = ROWS_OF_TABLE[row]
    mesh = make_mesh(name, kind)
    step = with_gradients(f)
    whole = step(*map(jnp.asarray, args))
    with entered(mesh):
        placed = place(mesh, args, specs)
        compiled = jax.jit(step).lower(*placed).compile()
        result = compiled(*placed)
    jax.tree.map(np.testing.assert_array_equal, result, whole)
    counts = collectives(compiled.as_text())
    assert set(counts) == expected
    # One for the loss and each gradient of something replicated over a mesh axis; XLA may join them.
    assert sum(counts.values()) <= 1 + len(args)
    assert len(native_calls(compiled.as_text())) == 3
    for gradient, arg in zip(result[1], placed, strict=True):
        assert gradient.sharding.is_equivalent_to(arg.sharding, gradient.ndim)


@over_kinds
def test_unforced_calls_have_no_gathers(kind):
    """implementation=None on a mesh: no worse than XLA would do alone."""
    mesh = make_mesh("data", kind)
    f = functools.partial(jaxconv.conv2d, groups=4, activation="relu")
    with entered(mesh):
        placed = place(mesh, (X, GROUPED, B), (BY_N, P(), P()))
        compiled = jax.jit(with_gradients(f)).lower(*placed).compile()
    assert set(collectives(compiled.as_text())) == {"all-reduce"}


# name: (groups, shape of x, shape of w, options of the convolution)
GROUPED_GRADIENTS = {
    "pointwise": (8, (N, 2, 2, 8), (1, 1, 1, 8), {}),
    "depthwise": (8, (N, 6, 5, 8), (3, 3, 1, 8), {}),
    "strided": (8, (N, 6, 5, 8), (3, 3, 1, 16), dict(stride=2)),
    "grouped": (2, (N, 6, 5, 8), (3, 3, 4, 6), {}),
    "1d": (8, (N, 9, 8), (3, 1, 8), {}),
    "3d": (4, (N, 3, 4, 5, 4), (2, 2, 2, 1, 4), {}),
}


@pytest.mark.parametrize("way", ["conv", "xla", "native", "accelerate", "enable", "enable_native"])
@pytest.mark.parametrize("axis", ["data", "model"])
@pytest.mark.parametrize("name", GROUPED_GRADIENTS)
def test_weight_gradients_of_groups_where_one_axis_of_an_auto_mesh_splits_the_batch(name, axis, way):
    """lax's own, which XLA partitions, are the other axis's size times too large (JAX 0.10 to 0.12)."""
    groups, *shapes, options = GROUPED_GRADIENTS[name]
    x, w = (jnp.asarray(helpers.integers(i, shape), jnp.float32) for i, shape in enumerate(shapes))
    spatial = "DHW"[-(x.ndim - 2) :]

    def of_lax(x: Any, w: Any) -> Any:
        return jax.lax.conv_general_dilated(
            x,
            w,
            (options.get("stride", 1),) * (x.ndim - 2),
            "SAME",
            dimension_numbers=(f"N{spatial}C", f"{spatial}IO", f"N{spatial}C"),
            feature_group_count=groups,
        )

    f = functools.partial(
        getattr(jaxconv, f"conv{x.ndim - 2}d"),
        groups=groups,
        implementation=way if way in ("xla", "native") else None,
        **options,
    )
    f = {"accelerate": jaxconv.accelerate(of_lax), "enable": of_lax, "enable_native": of_lax}.get(way, f)

    def gradient(f: Any) -> Any:
        return jax.jit(jax.grad(lambda w, x: jnp.sum(f(x, w) ** 2)))

    want = gradient(of_lax)(w, x)
    enabled = {"enable": dict(auto_meshes=True), "enable_native": dict(auto_meshes=True, implementation="native")}
    with jaxconv.enabled(**enabled[way]) if way in enabled else contextlib.nullcontext():
        got = gradient(f)(*place(make_mesh("grid"), (w, x), (P(), P(axis))))
    # Sums of integers are exact, but for what TF32 rounds on a GPU.
    atol = 0 if helpers.PLATFORM == "cpu" else 1e-2 * float(jnp.abs(want).max())
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)


@over_kinds
@pytest.mark.parametrize("implementation", ["native", "xla"])
def test_images_split_in_space(kind, implementation):
    """One axis of the mesh, more devices than half the rows: see test_halo.py for the rest."""
    mesh = make_mesh("data", kind)
    args = ints(4, 2 * DEVICES, 6, 8), W, B
    step = with_gradients(functools.partial(jaxconv.conv2d, activation="relu", implementation=implementation))
    whole = step(*map(jnp.asarray, args))
    with entered(mesh):
        placed = place(mesh, args, (P(None, "data"), P(), P()))
        compiled = jax.jit(step).lower(*placed).compile()
        result = compiled(*placed)
    jax.tree.map(np.testing.assert_array_equal, result, whole)
    assert set(collectives(compiled.as_text())) <= {"all-reduce", "collective-permute"}


@over_kinds
def test_batch_that_does_not_divide(kind):
    """Three images on more devices: they are computed whole."""
    mesh = make_mesh("grid", kind)
    args = ints(3, 5, 6, 8), W
    with entered(mesh):
        y = jax.jit(conv)(*place(mesh, args, (P(), BY_K)))
    np.testing.assert_array_equal(y, conv(*map(jnp.asarray, args)))


@over_kinds
def test_sixteen_bits(kind):
    mesh = make_mesh("data", kind)
    # Terms of -1, 0 and 1: sums of the gradients stay within 256, which bfloat16 holds.
    args = [jnp.asarray(ints(*s, seed=i, largest=1), jnp.bfloat16) for i, s in enumerate([(N, 2, 2, 4), (1, 1, 4, 4)])]
    step = jax.grad(lambda x, w: conv(x, w).astype(jnp.float32).sum(), (0, 1))
    with entered(mesh):
        result = jax.jit(step)(*place(mesh, args, (BY_N, P())))
    jax.tree.map(np.testing.assert_array_equal, result, step(*args))


@over_kinds
def test_eager(kind):
    mesh = make_mesh("data", kind)
    placed = place(mesh, (X, W, B), (BY_N, P(), P()))
    y = relu_conv(*placed)
    np.testing.assert_array_equal(y, relu_conv(X, W, B))
    assert y.sharding.is_equivalent_to(placed[0].sharding, 4)
    with entered(mesh):
        gradients = with_gradients(relu_conv)(*placed)[1]
    jax.tree.map(np.testing.assert_array_equal, gradients, with_gradients(relu_conv)(X, W, B)[1])


@over_kinds
def test_per_example_gradients(kind):
    """vmap over the axis that is split: one call, nothing crosses the mesh."""
    mesh = make_mesh("data", kind)
    per_example = jax.vmap(jax.grad(lambda w, x: conv(x[None], w).sum()), in_axes=(None, 0))
    with entered(mesh):
        placed = place(mesh, (W, X), (P(), BY_N))
        compiled = jax.jit(per_example).lower(*placed).compile()
        result = compiled(*placed)
    np.testing.assert_array_equal(result, per_example(W, X))
    assert not collectives(compiled.as_text())
    assert [name for name, _ in native_calls(compiled.as_text())] == ["conv_wgrad"]


@over_kinds
def test_forward_mode(kind):
    mesh = make_mesh("grid", kind)
    primals, specs = (X, W, B), (BY_N, BY_K, P("model"))
    f = functools.partial(jax.jvp, functools.partial(conv, activation="tanh"))
    whole = f(primals, primals)
    with entered(mesh):
        placed = tuple(place(mesh, primals, specs))
        result = jax.jit(f)(placed, placed)
    # tanh and its derivative are 1-Lipschitz in z; z and dz are exact sums.
    for a, b in zip(result, whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=floor("float32", 1, float(jnp.abs(b).max())))


# ----------------------------------------------------------------------------------------------------------------------
# Inside shard_map


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_gradient_of_shard_map(kind):
    mesh = make_mesh("data", kind)
    mapped = jax.shard_map(relu_conv, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data"))
    with entered(mesh):
        placed = place(mesh, (X, W, B), (BY_N, P(), P()))
        compiled = jax.jit(with_gradients(mapped)).lower(*placed).compile()
        result = compiled(*placed)
    jax.tree.map(np.testing.assert_array_equal, result, with_gradients(relu_conv)(X, W, B))
    assert set(collectives(compiled.as_text())) == {"all-reduce"}


@over_kinds
def test_forward_of_shard_map(kind):
    """Each device runs the call on its images, and nothing crosses the mesh."""
    mesh = make_mesh("data", kind)
    mapped = jax.shard_map(relu_conv, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data"))
    placed = place(mesh, (X, W, B), (BY_N, P(), P()))
    compiled = jax.jit(mapped).lower(*placed).compile()
    np.testing.assert_array_equal(compiled(*placed), relu_conv(X, W, B))
    assert not collectives(compiled.as_text())
    assert native_calls(compiled.as_text()) == [("conv", (2, 5, 6, 8))]


def test_gradient_inside_shard_map():
    """The gradient of what is replicated is summed over the mesh by JAX."""
    mesh = make_mesh("data")
    step = jax.grad(lambda x, w, b: relu_conv(x, w, b).sum(), (1, 2))
    mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P()))
    jax.tree.map(np.testing.assert_array_equal, mapped(*place(mesh, (X, W, B), (BY_N, P(), P()))), step(X, W, B))


@pytest.mark.parametrize("filters", [BY_K, P()], ids=["filters_split", "filters_replicated"])
@pytest.mark.parametrize("context", ["auto", "auto_set_mesh", "auto_with_mesh", "explicit"])
@pytest.mark.parametrize("implementation", ["native", None])
def test_shard_map_over_some_axes(context, filters, implementation):
    """XLA partitions the rest of the mesh. custom_partitioning would end the process here."""
    mesh = make_mesh("grid", AxisType.Explicit if context == "explicit" else AxisType.Auto)
    if mesh.shape["data"] == 1:
        pytest.skip("XLA's partitioner fails over a manual axis of one device, with lax alone too")
    f = functools.partial(jaxconv.conv2d, activation="relu", implementation=implementation)
    mapped = jax.shard_map(f, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data"), axis_names={"data"})
    contexts = {"auto": contextlib.nullcontext(), "auto_with_mesh": mesh}
    with contexts.get(context) or jax.set_mesh(mesh):
        result = jax.jit(with_gradients(mapped))(*place(mesh, (X, W, B), (BY_N, filters, P())))
    jax.tree.map(np.testing.assert_array_equal, result, with_gradients(f)(X, W, B))


def test_mesh_with_axes_of_both_kinds():
    mesh = jax.make_mesh(*MESHES["grid"], axis_types=(AxisType.Explicit, AxisType.Auto))
    with jax.set_mesh(mesh):
        result = jax.jit(with_gradients(relu_conv))(*place(mesh, (X, W, B), (BY_N, BY_K, P())))
    jax.tree.map(np.testing.assert_array_equal, result, with_gradients(relu_conv)(X, W, B))


# ----------------------------------------------------------------------------------------------------------------------
# Batch-norm: its statistics cross the mesh once, its two sums once

NORM_SPECS = {
    "images": ("data", P("data"), P()),
    "images_and_channels": ("grid", P("data", None, None, "model"), P("model")),
    "images_and_pixels": ("grid", P("data", None, "model"), P()),
    "channels": ("data", P(None, None, None, "data"), P("data")),
}


def norm_args(offset: float) -> list[Any]:
    x, residual = (helpers.normal(seed, (N, 4, 6, 8), "float32") for seed in (0, 1))
    parameters = [helpers.normal(seed, (8,), "float32") for seed in (2, 3, 4)] + [np.full(8, 2.0)]
    return [jnp.asarray(a, jnp.float32) for a in (x + offset, *parameters, residual)]


def norm(implementation: str | None, **options: Any) -> Callable[..., Any]:
    options = {"training": True, "activation": "relu", "implementation": implementation, **options}

    def f(x: Any, scale: Any, bias: Any, mean: Any, var: Any, residual: Any) -> Any:
        return jaxconv.batchnorm(x, scale, bias, mean, var, residual=residual, **options)

    return f


@over_kinds
@pytest.mark.parametrize("implementation", ["native", None])
@pytest.mark.parametrize("split", NORM_SPECS)
def test_batchnorm(split, implementation, kind):
    name, big, small = NORM_SPECS[split]
    mesh = make_mesh(name, kind)
    f, args = norm(implementation), norm_args(0.0)
    specs = (big, small, small, small, small, big)

    def step(x: Any, scale: Any, bias: Any, mean: Any, var: Any, residual: Any) -> Any:
        outs, pull = jax.vjp(lambda *some: f(*some, mean, var, residual)[0], x, scale, bias)
        return pull(jnp.cos(residual) * outs)

    whole = f(*args), step(*args)
    with entered(mesh):
        placed = place(mesh, args, specs)
        forward = jax.jit(f).lower(*placed).compile()
        both = jax.jit(step).lower(*placed).compile()
        result = forward(*placed), both(*placed)
    reduced = set(jax.tree.leaves(tuple(big))) - set(jax.tree.leaves(tuple(small)))
    crossing = int(any(mesh.shape[axis] > 1 for axis in reduced))
    assert collectives(forward.as_text()) == collections.Counter({"all-reduce": crossing} if crossing else {})
    assert collectives(both.as_text()) == collections.Counter({"all-reduce": 2 * crossing} if crossing else {})
    # Statistics of values near 1 are sums of N*4*6 terms, each side off by `floor`; z and the gradients are products of
    # at most four such values, each linear in every one.
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(whole), strict=True):
        bound = 4 * 2 * floor("float32", N * 24, float(jnp.abs(b).max()))
        np.testing.assert_allclose(a, b, rtol=0, atol=bound)


NORM_CASES = [
    ("float32", -1, activation, residual)
    for activation, residual in itertools.product(helpers.NAMED_ACTIVATIONS, (False, True))
    if residual or activation in (None, "relu")
]
NORM_CASES += [
    (dtype, axis, activation, True)
    for dtype, axis in (("float32", 1), ("bfloat16", -1), ("bfloat16", 1), ("float16", -1), ("float16", 1))
    for activation in ("relu", "silu")
]


@over_kinds
@pytest.mark.parametrize(("dtype", "axis", "activation", "residual"), NORM_CASES, ids=helpers.label)
def test_each_shard_walks_twice_through_a_batchnorms_backward(dtype, axis, activation, residual, kind):
    """Once for its sums, which meet, and once for its dx; and once for its statistics: nothing of XLA's reads x."""
    mesh = make_mesh("data", kind)
    shape = (N, 6, 5, 8) if axis == -1 else (N, 8, 6, 5)
    x, r, dy = (jnp.asarray(helpers.normal(seed, shape, dtype), dtype) for seed in (0, 1, 2))
    scale, bias = (jnp.asarray(helpers.normal(seed, (8,), "float32"), "float32") for seed in (3, 4))
    options = dict(training=True, activation=activation, channel_axis=axis, implementation="native")

    def step(x: Any, scale: Any, bias: Any, dy: Any, r: Any) -> Any:
        def f(x: Any, scale: Any, bias: Any, r: Any) -> Any:
            return jaxconv.batchnorm(x, scale, bias, 0 * bias, 0 * bias, residual=r if residual else None, **options)[0]

        return jax.vjp(f, x, scale, bias, r)[1](dy)

    args, big = (x, scale, bias, dy, r), P("data")
    whole = jax.jit(step)(*args)
    with entered(mesh):
        placed = place(mesh, args, (big, P(), P(), big, big))
        compiled = jax.jit(step).lower(*placed).compile()
        result = compiled(*placed)
    text = compiled.as_text()
    assert collectives(text) == {"all-reduce": 2}  # of the statistics, and of the two sums
    local = (2, *shape[1:])
    walks = [call for call in native_calls(text) if call[0] != "batchnorm_infer"]  # whose y nobody asked for
    assert walks == [("batchnorm_moments", (8,)), ("batchnorm_backward", (8,)), ("batchnorm_dx", local)]
    # Of a residual the second walk reads dz, where that is what the first one wrote.
    (operands,) = re.findall(r"custom-call\((.*?)\), custom_call_target=\"jaxconv_batchnorm_dx", text)
    passed = activation == "relu" or dtype == "float32"
    assert operands.count("%") == 8 + (residual and activation is not None and not passed)
    # As in test_batchnorm; dx is rounded to its type once, as it is unsplit, and so is dresidual.
    for a, b in zip(result, whole, strict=True):
        bound = 4 * 2 * floor(a.dtype.name, N * 30, float(jnp.abs(b).max()))
        np.testing.assert_allclose(a.astype("float32"), b.astype("float32"), rtol=0, atol=bound)


def test_a_batchnorm_in_shard_map_walks_through_its_own_images_in_one_call():
    """Statistics of a device's own images: nothing meets, and there is no second call."""
    mesh = make_mesh("data")
    x, scale, bias, mean, var, r = norm_args(0.0)

    def step(x: Any, scale: Any, bias: Any, r: Any) -> Any:
        return jax.grad(lambda *a: jnp.sum(norm("native")(*a[:3], mean, var, a[3])[0] ** 2), (0, 3))(x, scale, bias, r)

    big = P("data")
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(big, P(), P(), big), out_specs=big)
    placed = place(mesh, (x, scale, bias, r), (big, P(), P(), big))
    compiled = jax.jit(mapped).lower(*placed).compile()
    assert sorted(name for name, _ in native_calls(compiled.as_text())) == ["batchnorm_backward", "batchnorm_train"]
    assert not collectives(compiled.as_text())
    each = [step(x[i : i + 2], scale, bias, r[i : i + 2]) for i in range(0, N, 2)]
    for a, b in zip(compiled(*placed), zip(*each, strict=True), strict=True):
        np.testing.assert_allclose(a, jnp.concatenate(b), rtol=0, atol=floor("float32", 48, float(jnp.abs(a).max())))


@over_kinds
@pytest.mark.parametrize("split", NORM_SPECS)
def test_moments_of_what_is_split(split, kind):
    """The kernel called by itself: those of the whole."""
    name, big, _ = NORM_SPECS[split]
    mesh, x = make_mesh(name, kind), norm_args(100.0)[0]
    p = BatchNormProblem("batchnorm", "float32", x.shape, 3, True, 0.9, 1e-5, implementation="native")

    def step(x: Any) -> Any:
        k, shift, var = moments(p, x)
        return k + shift, var

    whole = jax.jit(step)(x)
    with entered(mesh):
        result = jax.jit(step)(*place(mesh, (x,), (big,)))
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=8 * floor("float32", N * 24, float(jnp.abs(b).max())))


@over_kinds
@pytest.mark.parametrize("split", ["images", "images_and_pixels"])
def test_second_derivatives_of_a_batchnorm(split, kind):
    """The gradient's own gradient, and its directional derivative: of the formula, whatever the calls."""
    name, big, small = NORM_SPECS[split]
    mesh = make_mesh(name, kind)
    f, args = norm("native", activation="silu"), norm_args(0.0)

    def gradients(*some: Any) -> Any:
        return jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a)[0])), (0, 1, 2, 5))(*some)

    def step(*a: Any) -> Any:
        one = jax.jvp(gradients, a, tuple(jnp.cos(v) for v in a))[1]
        two = jax.grad(lambda *a: sum(jnp.sum(jnp.sin(g)) for g in gradients(*a)), (0, 1, 5))(*a)
        return one, two

    whole = jax.jit(step)(*args)
    with entered(mesh):
        result = jax.jit(step)(*place(mesh, args, (big, small, small, small, small, big)))
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(whole), strict=True):
        # As in test_transformed_batchnorm.
        bound = 8 * 2 * floor("float32", N * 24, float(jnp.abs(b).max()))
        np.testing.assert_allclose(a, b, rtol=0, atol=bound)


@over_kinds
@pytest.mark.parametrize("transform", ["forward_mode", "gradient_of_statistics", "vmap"])
def test_transformed_batchnorm(transform, kind):
    mesh = make_mesh("grid", kind)
    f, args = norm("native", activation="gelu"), norm_args(0.0)
    step = {
        "forward_mode": lambda *a: jax.jvp(f, a, a),
        "gradient_of_statistics": lambda *a: jax.grad(lambda *a: sum(jnp.sum(o**2) for o in f(*a)), (0, 1, 5))(*a),
        "vmap": lambda *a: jax.vmap(lambda x, r: f(x, *a[1:5], r))(a[0], a[5]),  # statistics of each image
    }[transform]
    whole = step(*args)
    with entered(mesh):
        big, small = NORM_SPECS["images_and_channels"][1:]
        result = jax.jit(step)(*place(mesh, args, (big, small, small, small, small, big)))
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(whole), strict=True):
        # As in test_batchnorm; a second derivative of the statistics multiplies twice as many of them.
        bound = 8 * 2 * floor("float32", N * 24, float(jnp.abs(b).max()))
        np.testing.assert_allclose(a, b, rtol=0, atol=bound)


@over_kinds
def test_batchnorm_statistics_far_from_zero(kind):
    """Mean 10,000 times the deviation: merging must not cancel."""
    mesh = make_mesh("data", kind)
    args = norm_args(1e4)
    # Each shard's mean differs by more than the values do.
    args[0] = args[0] + jnp.arange(N, dtype=jnp.float32).reshape(N, 1, 1, 1)
    specs = (P("data"), P(), P(), P(), P(), P("data"))
    _, mean, var = jax.jit(norm("native", momentum=0.0))(*place(mesh, args, specs))
    x = np.asarray(args[0], np.float64)
    # The mean of the shards' means, each rounded to a float32 near 1e4: an error of a few of its roundings. The
    # variance about it is wrong by its square, and by the rounding of its own sum.
    eps = 2.0**-23
    np.testing.assert_allclose(mean, x.mean((0, 1, 2)), rtol=4 * eps)
    bound = (4 * eps * 1e4) ** 2 + floor("float32", N * 24, float(((x - x.mean((0, 1, 2))) ** 2).max()))
    np.testing.assert_allclose(var, x.var((0, 1, 2)), rtol=0, atol=bound)


# ----------------------------------------------------------------------------------------------------------------------
# A model


def small_model(parameters: Any, images: Any, labels: Any) -> Any:
    w1, w2, w3, b3, scale, bias = parameters
    x = jaxconv.conv2d(images, w1, implementation="native")
    x, _, _ = jaxconv.batchnorm(
        x, scale, bias, jnp.zeros(8), jnp.ones(8), training=True, activation="relu", implementation="native"
    )
    x = jaxconv.conv2d(x, w2, stride=2, activation="silu", groups=2, implementation="native")
    logits = jaxconv.dense(x.mean((1, 2)), w3, b3, implementation="native")
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1))


def train(parameters: Any, images: Any, labels: Any, steps: int = 4) -> Any:
    def step(parameters: Any, _: Any) -> Any:
        loss, gradients = jax.value_and_grad(small_model)(parameters, images, labels)
        return jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients), loss

    return jax.lax.scan(step, parameters, None, length=steps)[1]


def model_args(n: int) -> Any:
    shapes = [(3, 3, 3, 8), (3, 3, 4, 16), (16, 10), (10,), (8,), (8,)]
    parameters = [jnp.asarray(0.3 * helpers.normal(i, s), jnp.float32) for i, s in enumerate(shapes)]
    images = jnp.asarray(helpers.normal(9, (n, 8, 8, 3)), jnp.float32)
    return parameters, images, jnp.arange(n) % 10


def test_data_parallel_training_has_the_same_losses():
    parameters, images, labels = model_args(N)
    mesh = make_mesh("data")
    alone = jax.jit(train)(parameters, images, labels)
    together = jax.jit(train)(
        jax.device_put(parameters, NamedSharding(mesh, P())), *place(mesh, (images, labels), (BY_N, P("data")))
    )
    # Sums in another order, through four steps of a smooth model whose loss is near 2: 100 roundings each.
    np.testing.assert_allclose(together, alone, rtol=4 * 100 * 2.0**-23)
    assert alone[-1] < alone[0]


PROCESS = """
    import sys
    import jax
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", num_processes=2, process_id=int(sys.argv[2]))
    import jaxconv
    sys.path[:0] = sys.argv[3:]
    import numpy as np
    import test_sharding as t
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

    assert jax.process_count() == 2 and jax.device_count() == 8
    # Images over all devices; then rows over the processes and images over the devices of each.
    for shape, axes, split in (((8,), ("n",), ("n",)), ((2, 4), ("h", "n"), ("n", "h"))):
        mesh = jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * len(axes))
        processes = np.vectorize(lambda d: d.process_index)(mesh.devices)
        assert "h" not in axes or (processes == [[0] * 4, [1] * 4]).all()

        def spread(a, *spec):
            return jax.make_array_from_callback(a.shape, NamedSharding(mesh, P(*spec)), lambda i: np.asarray(a)[i])

        parameters, images, labels = t.model_args(16)
        args = [spread(p) for p in parameters], spread(images, *split), spread(labels, "n")
        step = jax.jit(t.train).lower(*args).compile()
        assert t.collectives(step.as_text())["all-gather"] == 0
        print("losses", *np.asarray(step(*args).addressable_data(0)).tolist())
"""


@pytest.mark.slow
def test_two_processes(tmp_path):
    """jax.distributed on the loopback, CPU devices, four in each of two processes: the losses of one process.

    Data parallel, and with the rows of each image on two processes.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    here = os.path.dirname(os.path.abspath(__file__))
    script = tmp_path / "process.py"
    script.write_text(textwrap.dedent(PROCESS))
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(port), str(i), here, os.path.dirname(here)],
            env=environment,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    outputs = [p.communicate(timeout=240) for p in processes]
    assert all(p.returncode == 0 for p in processes), outputs[0][1][-3000:] + outputs[1][1][-3000:]
    with jax.default_device(jax.devices("cpu")[0]):
        expected = jax.jit(train)(*model_args(16))
    for out, _ in outputs:
        both = [[float(v) for v in line.split()[1:]] for line in out.splitlines() if line.startswith("losses")]
        assert len(both) == 2
        for losses in both:
            # As above; a GPU machine's CPU result is the same program's.
            np.testing.assert_allclose(losses, expected, rtol=4 * 100 * 2.0**-23)

"""jit, vmap, remat, scan and shard_map: the numbers stay right, and vmap makes a bigger call, never more calls."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import calls, equations, integers, label, opcodes, same_bits
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import jaxconv


def ints(*shape: int, seed: int = 0) -> jax.Array:
    """Integers up to 1: sums stay exact through a square and a second convolution."""
    return jnp.asarray(integers(seed, shape, 1), "float32")


conv = functools.partial(jaxconv.conv2d, implementation="native")
conv_relu = functools.partial(conv, activation="relu")
dense = functools.partial(jaxconv.dense, implementation="native")
dense_relu = functools.partial(dense, activation="relu")


def norm(x: Any, scale: Any, bias: Any, *, channel_axis: int = -1) -> Any:
    mean, var = jnp.zeros_like(scale), jnp.ones_like(scale)
    options = dict(training=True, momentum=0.5, activation="relu", channel_axis=channel_axis, implementation="native")
    return jaxconv.batchnorm(x, scale, bias, mean, var, **options)


def infer(x: Any, scale: Any, bias: Any) -> Any:
    return jaxconv.batchnorm(x, scale, bias, bias, jnp.ones_like(scale), training=False, implementation="native")[0]


def group(x: Any, scale: Any, bias: Any) -> Any:
    return jaxconv.groupnorm(x, scale, bias, groups=2, activation="relu", implementation="native")


def excite(x: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> Any:
    return jaxconv.squeeze_excite(x, w1, b1, w2, b2, implementation="native")


def rows(x: Any, scale: Any, bias: Any) -> Any:
    return jaxconv.layernorm(x, scale, bias, implementation="native")


# name: (f, shapes of its arguments without the mapped axis)
OPS: dict[str, tuple[Any, tuple[tuple[int, ...], ...]]] = {
    "conv": (functools.partial(conv, stride=2), ((2, 5, 5, 4), (3, 3, 4, 6))),
    "conv_relu": (conv_relu, ((2, 5, 5, 4), (3, 3, 4, 6), (6,))),
    "conv_nchw": (functools.partial(conv_relu, layout="NCHW"), ((2, 4, 5, 5), (6, 4, 3, 3), (6,))),
    "conv_grouped": (functools.partial(conv_relu, groups=2), ((2, 5, 5, 4), (3, 3, 2, 6), (6,))),
    "conv_depthwise": (functools.partial(conv_relu, groups=4), ((2, 5, 5, 4), (3, 3, 1, 8), (8,))),
    "conv_transpose": (
        functools.partial(jaxconv.conv_transpose2d, stride=2, implementation="native"),
        ((2, 4, 4, 4), (3, 3, 4, 6)),
    ),
    "dense": (dense, ((5, 4), (4, 6))),
    "dense_column": (dense_relu, ((5, 4), (4, 6), (6,))),
    "dense_row": (dense_relu, ((5, 4), (4, 6), (5, 1))),
    "dense_scalar": (dense_relu, ((5, 4), (4, 6), ())),
    "batchnorm": (norm, ((6, 3, 4), (4,), (4,))),
    "batchnorm_first": (functools.partial(norm, channel_axis=1), ((6, 4, 3), (4,), (4,))),
    "batchnorm_inference": (infer, ((6, 3, 4), (4,), (4,))),
    "groupnorm": (group, ((3, 5, 4), (4,), (4,))),
    "layernorm": (rows, ((3, 5, 4), (4,), (4,))),
    "squeeze_excite": (excite, ((3, 5, 4), (4, 3), (3,), (3, 4), (4,))),
}
BATCH = 3


def arguments(name: str, in_axes: tuple[int | None, ...]) -> list[jax.Array]:
    args = []
    for seed, (shape, axis) in enumerate(zip(OPS[name][1], in_axes, strict=True)):
        shape = list(shape)
        if axis is not None:
            shape.insert(axis, BATCH)
        args.append(ints(*shape, seed=seed))
    return args


def looped(f: Any, in_axes: tuple[int | None, ...], args: list[jax.Array]) -> Any:
    """What vmap must give: one call after the other."""
    results = [
        f(*(a if axis is None else jnp.take(a, i, axis) for a, axis in zip(args, in_axes, strict=True)))
        for i in range(BATCH)
    ]
    return jax.tree.map(lambda *r: jnp.stack(r), *results)


def mappings(count: int) -> dict[str, tuple[int | None, ...]]:
    """Which arguments are mapped: the first (images), the second (filters), both, all."""
    rest = (None,) * (count - 2)
    return {"first": (0, None, *rest), "second": (None, 0, *rest), "both": (0, 0, *rest), "all": (0,) * count}


# Mapped parameters of a squeeze-and-excitation are XLA's (tests/test_squeeze_excite.py).
MAPPED = [
    (name, which)
    for name, (_, shapes) in OPS.items()
    for which in mappings(len(shapes))
    if name != "squeeze_excite" or which == "first"
]


def assert_same(actual: Any, expected: Any, exact: bool) -> None:
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.shape == e.shape
        if exact:
            np.testing.assert_array_equal(a, e)
        else:
            # The same operations on the same numbers; only the order of sums over 18 elements may differ.
            largest = max(1.0, float(jnp.abs(e).max()))
            np.testing.assert_allclose(a, e, rtol=0, atol=32 * float(jnp.finfo("float32").eps) * largest)


# ----------------------------------------------------------------------------------------------------------------------
# vmap


def exact(name: str) -> bool:
    """Not of norms, nor where XLA's products of a few rows are a part: these differ by the number of rows."""
    return "norm" not in name and name != "squeeze_excite"


@pytest.mark.parametrize(("name", "which"), MAPPED, ids=str)
def test_vmap_is_one_call_and_equals_a_loop(name, which):
    f, shapes = OPS[name]
    in_axes = mappings(len(shapes))[which]
    args = arguments(name, in_axes)
    mapped = jax.vmap(f, in_axes)
    assert sum(calls(mapped, *args).values()) == 1
    assert_same(jax.jit(mapped)(*args), looped(f, in_axes, args), exact=exact(name))


@pytest.mark.parametrize(("name", "which"), MAPPED, ids=str)
def test_vmap_of_the_gradient_has_no_more_calls_than_the_gradient(name, which):
    f, shapes = OPS[name]
    in_axes = mappings(len(shapes))[which]
    args = arguments(name, in_axes)

    def loss(*args):
        return sum((leaf**2).sum() for leaf in jax.tree.leaves(f(*args)))

    gradient = jax.grad(loss, tuple(range(len(shapes))))
    mapped = jax.vmap(gradient, in_axes)
    alone = [a if axis is None else jnp.take(a, 0, axis) for a, axis in zip(args, in_axes, strict=True)]
    if name != "batchnorm_inference":  # its gradient is a formula that XLA fuses, without a call
        assert sum(calls(mapped, *args).values()) == sum(calls(gradient, *alone).values())
    assert_same(jax.jit(mapped)(*args), looped(gradient, in_axes, args), exact=exact(name))


@pytest.mark.parametrize("in_axes", [(1, 2), (4, 0), (None, 4), (2, None)], ids=str)
def test_vmap_over_any_axis(in_axes):
    args = arguments("conv", in_axes)
    assert_same(jax.vmap(conv, in_axes)(*args), looped(conv, in_axes, args), exact=True)


@pytest.mark.parametrize("out_axes", [0, 2, -1])
def test_vmap_to_any_axis(out_axes):
    x, w = arguments("conv", (0, None))
    expected = jnp.moveaxis(looped(conv, (0, None), [x, w]), 0, out_axes)
    assert_same(jax.vmap(conv, (0, None), out_axes)(x, w), expected, exact=True)


@pytest.mark.parametrize("name", ["conv", "conv_relu", "conv_grouped", "dense", "dense_column", "batchnorm"])
@pytest.mark.parametrize("inner", ["first", "second", "both"])
@pytest.mark.parametrize("outer", ["first", "second", "both"])
def test_nested_vmap_is_still_one_call(name, outer, inner):
    f, shapes = OPS[name]
    axes = mappings(len(shapes))
    args = []
    for seed, (shape, o, i) in enumerate(zip(shapes, axes[outer], axes[inner], strict=True)):
        lead = ((2,) if o is not None else ()) + ((BATCH,) if i is not None else ())
        args.append(ints(*lead, *shape, seed=seed))
    nested = jax.vmap(jax.vmap(f, axes[inner]), axes[outer])
    assert sum(calls(nested, *args).values()) == 1
    expected = [
        jax.vmap(f, axes[inner])(*(a if o is None else a[n] for a, o in zip(args, axes[outer], strict=True)))
        for n in range(2)
    ]
    stacked = jax.tree.map(lambda *r: jnp.stack(r), *expected)
    assert_same(jax.jit(nested)(*args), stacked, exact=name != "batchnorm")


@pytest.mark.parametrize("name", ["conv_relu", "dense_column", "batchnorm"])
def test_calls_do_not_grow_with_the_batch(name):
    f, shapes = OPS[name]

    def counted(batch):
        args = [ints(batch, *shape, seed=i) for i, shape in enumerate(shapes)]
        return calls(jax.grad(lambda *a: sum(leaf.sum() for leaf in jax.tree.leaves(jax.vmap(f)(*a)))), *args)

    assert counted(2) == counted(9)


@pytest.mark.parametrize("name", OPS)
def test_gradient_of_vmap_equals_vmap_of_gradient(name):
    f, shapes = OPS[name]
    axes = (0,) * len(shapes)
    args = arguments(name, axes)
    wrt = tuple(range(len(shapes)))

    def loss(f):
        return lambda *args: sum((leaf**2).sum() for leaf in jax.tree.leaves(f(*args)))

    of_vmap = jax.jit(jax.grad(loss(jax.vmap(f)), wrt))(*args)
    assert_same(of_vmap, jax.jit(jax.vmap(jax.grad(loss(f), wrt)))(*args), exact=exact(name))


def test_vmap_of_a_shared_filters_gradient_gives_one_gradient_per_image():
    """Per-example gradients: each image has its own dw, in a single grouped call."""
    x, w = ints(4, 1, 5, 5, 3), ints(3, 3, 3, 2, seed=1)
    per_example = jax.vmap(jax.grad(lambda w, x: (conv(x, w) ** 2).sum()), (None, 0))
    assert calls(per_example, w, x)["conv_wgrad"] == 1
    expected = jnp.stack([jax.grad(lambda w, x=x: (conv(x, w) ** 2).sum())(w) for x in x])
    assert_same(jax.jit(per_example)(w, x), expected, exact=True)


# ----------------------------------------------------------------------------------------------------------------------
# jit, remat, scan


@pytest.mark.parametrize("implementation", ["native", None], ids=label)
@pytest.mark.parametrize("name", OPS)
def test_eager_equals_jit(name, implementation):
    f, shapes = OPS[name]
    if isinstance(f, functools.partial) and "implementation" in f.keywords:
        f = functools.partial(f, implementation=implementation)
    args = [ints(*shape, seed=i) for i, shape in enumerate(shapes)]
    assert_same(f(*args), jax.jit(f)(*args), exact=exact(name))
    if name == "conv_relu" and implementation == "native":
        assert same_bits(f(*args), jax.jit(f)(*args))


def network(x: Any, w1: Any, s: Any, b: Any, w2: Any) -> Any:
    x = conv_relu(x, w1)
    x, _, _ = norm(x, s, b)
    return dense_relu(x.mean((1, 2)), w2).sum()


def network_arguments() -> list[jax.Array]:
    return [ints(2, 5, 5, 4), ints(3, 3, 4, 6, seed=1), jnp.ones(6), jnp.ones(6), ints(6, 3, seed=2)]


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.dots_saveable], ids=["nothing", "dots"])
def test_remat_recomputes_the_forward_and_changes_no_number(policy):
    args = network_arguments()
    plain = jax.grad(network, (1, 2, 4))
    again = jax.grad(jax.checkpoint(network, policy=policy), (1, 2, 4))
    assert equations(again, *args)["jaxconv_conv"] == 2 * equations(plain, *args)["jaxconv_conv"] == 2
    assert_same(jax.jit(again)(*args), jax.jit(plain)(*args), exact=False)


def test_a_remat_policy_can_name_our_results():
    """Saved by name, the convolution is not run twice."""

    def block(x, w):
        y = checkpoint_name(conv(x, w), "y")
        return jnp.sin(y).sum()

    x, w = ints(2, 5, 5, 4), ints(3, 3, 4, 6, seed=1)
    saved = jax.checkpoint(block, policy=jax.checkpoint_policies.save_only_these_names("y"))
    assert equations(jax.grad(saved, 1), x, w)["jaxconv_conv_fprop"] == 1
    assert equations(jax.grad(jax.checkpoint(block), 1), x, w)["jaxconv_conv_fprop"] == 2


def test_scan_over_layers_equals_a_loop():
    x, ws = ints(1, 4, 4, 3), ints(4, 3, 3, 3, 3, seed=1)

    def scanned(ws):
        return jax.lax.scan(lambda x, w: (jnp.tanh(conv(x, w)), None), x, ws)[0].sum()

    def loop(ws):
        y = x
        for w in ws:
            y = jnp.tanh(conv(y, w))
        return y.sum()

    actual, expected = jax.jit(jax.grad(scanned))(ws), jax.jit(jax.grad(loop))(ws)
    assert_same(actual, expected, exact=False)
    assert calls(jax.grad(scanned), ws) == {"conv_fprop": 1, "conv_dgrad": 1, "conv_wgrad": 1}


def test_a_network_gives_the_same_bits_every_time():
    args = network_arguments()
    f = jax.jit(jax.value_and_grad(network, tuple(range(5))))
    first = f(*args)
    assert all(same_bits(first, f(*args)) for _ in range(5))


def test_an_empty_batch_passes_through_every_transform():
    w, b = ints(3, 3, 4, 6), jnp.ones(6)
    x = jnp.zeros((0, 5, 5, 4))
    assert conv_relu(x, w, b).shape == (0, 5, 5, 6)
    dw, db = jax.jit(jax.grad(lambda w, b: conv_relu(x, w, b).sum(), (0, 1)))(w, b)
    np.testing.assert_array_equal(dw, jnp.zeros_like(w))
    np.testing.assert_array_equal(db, jnp.zeros_like(b))
    assert jax.grad(lambda x: conv_relu(x, w, b).sum())(x).shape == x.shape
    assert jax.vmap(conv_relu, (0, None, None))(jnp.zeros((3, 0, 5, 5, 4)), w, b).shape == (3, 0, 5, 5, 6)
    assert jax.vmap(conv_relu, (0, None, None))(jnp.zeros((0, 2, 5, 5, 4)), w, b).shape == (0, 2, 5, 5, 6)
    matrix = ints(4, 6)
    assert jax.vmap(dense, (0, None))(jnp.zeros((0, 3, 4)), matrix).shape == (0, 3, 6)
    assert jax.grad(lambda w: dense(jnp.zeros((0, 4)), w).sum())(matrix).shape == (4, 6)


# ----------------------------------------------------------------------------------------------------------------------
# shard_map, on four CPU devices (conftest.py makes them), whatever the device under test


@pytest.fixture
def mesh():
    devices = jax.devices("cpu")
    assert len(devices) >= 4
    return jax.sharding.Mesh(np.array(devices[:4]), ("batch",))


def on(mesh: Any, *args: jax.Array) -> list[jax.Array]:
    return [jax.device_put(a, jax.sharding.NamedSharding(mesh, P())) for a in args]


SHARDED = {
    "conv": (conv, ((8, 5, 5, 4), (3, 3, 4, 6))),
    "conv_relu": (conv_relu, ((8, 5, 5, 4), (3, 3, 4, 6), (6,))),
    "conv_gelu": (functools.partial(conv, activation="gelu"), ((8, 5, 5, 4), (3, 3, 4, 6), (6,))),
    "conv_default": (jaxconv.conv2d, ((8, 5, 5, 4), (3, 3, 4, 6))),
    "dense": (dense, ((8, 4), (4, 6))),
    "dense_gelu": (functools.partial(dense, activation="gelu"), ((8, 4), (4, 6), (6,))),
    "batchnorm_inference": (infer, ((8, 3, 4), (4,), (4,))),
}


@pytest.mark.parametrize("name", SHARDED)
def test_gradients_inside_shard_map_sum_over_the_mesh(name, mesh):
    """x is sharded over the batch, w and b are not: their gradients need a sum over the mesh, which a primitive that
    does not say over which axes its results vary would silently leave out."""
    f, shapes = SHARDED[name]
    args = on(mesh, *(ints(*shape, seed=i) for i, shape in enumerate(shapes)))
    specs = (P("batch"), *(P() for _ in shapes[1:]))
    wrt = tuple(range(len(shapes)))

    def loss(*args):
        return (f(*args) ** 2).sum()

    def global_loss(*args):
        return jax.lax.psum(loss(*args), "batch")

    inside = jax.shard_map(jax.grad(global_loss, wrt), mesh=mesh, in_specs=specs, out_specs=specs)
    outside = jax.grad(jax.shard_map(global_loss, mesh=mesh, in_specs=specs, out_specs=P()), wrt)
    expected = jax.grad(loss, wrt)(*args)
    exact = name in ("conv", "conv_relu", "conv_default", "dense")
    assert_same(jax.jit(outside)(*args), expected, exact)
    assert_same(jax.jit(inside)(*args), expected, exact)


@pytest.mark.parametrize("name", ["conv_relu", "dense"])
def test_forward_mode_inside_shard_map(name, mesh):
    f, shapes = SHARDED[name]
    args = on(mesh, *(ints(*shape, seed=i) for i, shape in enumerate(shapes)))
    tangents = on(mesh, *(ints(*shape, seed=i + 9) for i, shape in enumerate(shapes)))
    specs = (P("batch"), *(P() for _ in shapes[1:]))
    tangent = jax.shard_map(
        lambda *a: jax.jvp(f, a[: len(shapes)], a[len(shapes) :])[1],
        mesh=mesh,
        in_specs=specs * 2,
        out_specs=P("batch"),
    )
    assert_same(jax.jit(tangent)(*args, *tangents), jax.jvp(f, tuple(args), tuple(tangents))[1], exact=True)


def test_each_shard_runs_the_custom_call_on_its_part(mesh):
    x, w = on(mesh, ints(8, 5, 5, 4), ints(3, 3, 4, 6, seed=1))
    f = jax.shard_map(conv, mesh=mesh, in_specs=(P("batch"), P()), out_specs=P("batch"))
    text = jax.jit(f).lower(x, w).compile().as_text()
    (line,) = [line for line in text.splitlines() if 'custom_call_target="jaxconv_conv_fprop' in line]
    assert "f32[2,5,5,6]" in line
    assert "all-gather" not in opcodes(text)

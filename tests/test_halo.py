"""Pixels split over a mesh: the rows that neighbours need are exchanged, and no array is gathered.

The mesh is made as in test_sharding.py. What lax's own convolution costs is counted in its HLO, beside ours.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import random
import re
from collections.abc import Callable
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import H200
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from test_sharding import DEVICES, collectives, entered, ints, native_calls, over_kinds, place
from tolerance import floor

import jaxconv
from jaxconv import _plan
from jaxconv._core import halo
from jaxconv._ops import conv, reference
from jaxconv._problem import ConvProblem

on_a_mesh = pytest.mark.skipif(DEVICES < 2 or DEVICES % 2 == 1, reason="a mesh takes an even number of devices")


def make_mesh(kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    """ "b" for images (or whatever else), "s" for space."""
    shape = (2, DEVICES // 2) if DEVICES >= 4 else (1, DEVICES)
    return jax.make_mesh(shape, ("b", "s"), axis_types=(kind, kind))


SHARDS = max(2, DEVICES // 2)  # along "s"
H = 8 * SHARDS


@pytest.fixture(autouse=True)
def small_shards_too(monkeypatch):
    """Those here are far below what is not copied for its size."""
    monkeypatch.setattr(halo, "LEAST_COPY", 0)


# ----------------------------------------------------------------------------------------------------------------------
# The geometry, without devices: every shard computes its part from what it fetches


def one_axis(h: int, f: int, **options: Any) -> ConvProblem:
    x, w = jax.ShapeDtypeStruct((1, h, 1), np.float32), jax.ShapeDtypeStruct((f, 1, 1), np.float32)
    rest = dict.fromkeys(("activation", "precision", "algorithm", "implementation"))
    fixed = {"groups": 1, "layout": "NWC", "return_preactivation": False, **rest}
    return ConvProblem.infer("conv1d", 1, x, w, None, **options, **fixed)


def random_axes(seed: int, count: int) -> list[tuple[ConvProblem, int]]:
    """Problems of one axis, and over how many devices to split it: also more devices than rows."""
    rng = random.Random(seed)
    found = []
    while len(found) < count:
        h, f, s, d = rng.randint(1, 24), rng.randint(1, 5), rng.randint(1, 4), rng.randint(1, 3)
        pads = rng.randint(-2, 4), rng.randint(-2, 4)
        if h + sum(pads) > (f - 1) * d:
            found.append((one_axis(h, f, stride=s, padding=[pads], dilation=d), rng.randint(2, 5)))
    return found


def permute(piece: Any, axes: Any, pairs: list[tuple[int, int]]) -> Any:
    """lax.ppermute, which vmap has for complete permutations only."""
    everyone = lax.all_gather(piece, axes)
    senders = [-1] * len(everyone)
    for sender, receiver in pairs:
        assert senders[receiver] == -1
        senders[receiver] = sender
    sender = jnp.asarray(senders)[lax.axis_index(axes)]
    return jnp.where(sender >= 0, everyone[jnp.maximum(sender, 0)], 0)


def dealt(a: np.ndarray, shards: int) -> jax.Array:
    """Shards of an axis; what only fills the last ones up is NaN."""
    size = -(-a.shape[1] // shards)
    full = np.full((1, size * shards, 1), np.nan, np.float32)
    full[:, : a.shape[1]] = a
    return jnp.asarray(full.reshape(shards, 1, size, 1))


@pytest.mark.parametrize("seed", range(4))
def test_every_shard_makes_its_part_of_any_convolution(seed, monkeypatch):
    monkeypatch.setattr(halo.lax, "ppermute", permute)
    for p, shards in random_axes(seed, 5):
        x, w, dy = (ints(*shape, seed=i) for i, shape in enumerate((p.x_shape, p.w_shape, p.y_shape)))
        together = jax.jit(functools.partial(in_shards, p, shards))(dealt(x, shards), w, dealt(dy, shards))
        alone = jax.jit(functools.partial(whole, p))(x, w, dy)
        for name, a, b in zip(("y", "dx", "dw"), together, alone, strict=True):
            np.testing.assert_array_equal(a[:, : b.shape[1]], b, f"{name} of {p}, padding {p.padding}, over {shards}")


def whole(p: ConvProblem, x: Any, w: Any, dy: Any) -> list[jax.Array]:
    return [*reference.conv_fprop(p, x, w), *reference.conv_dgrad(p, dy, w), *reference.conv_wgrad(p, x, dy)]


def in_shards(p: ConvProblem, shards: int, x: Any, w: Any, dy: Any) -> list[jax.Array]:
    """`whole`, of x and dy as `dealt`."""

    def shard(x: Any, dy: Any) -> list[jax.Array]:
        split = {0: ("s",)}
        q, wide = halo.exchange_x(p, split, x)
        (y,) = reference.conv_fprop(q, wide, w)
        q, wide = halo.exchange_dy(p, split, dy)
        (dx,), (dw,) = reference.conv_dgrad(q, wide, w), reference.conv_wgrad(q, halo.place_x(p, split, x), wide)
        return [y, halo.own_dx(p, split, dx), lax.psum(dw, "s")]

    y, dx, dw = jax.vmap(shard, axis_name="s")(x, dy)
    return [y.reshape(1, -1, 1), dx.reshape(1, -1, 1), dw[0]]


def even_axis(shards: int, out: int, f: int, s: int, d: int, low: int, spare: int = 0) -> ConvProblem:
    """One axis whose shards are alike: `out` rows of y each, s times those of x."""
    behind = (f - 1) * d + 1 - s - low + spare
    p = one_axis(shards * out * s, f, stride=s, padding=[(low, behind)], dilation=d)
    assert p.out_spatial == (shards * out,)
    return p


def even_axes(seed: int, count: int) -> list[tuple[ConvProblem, int]]:
    """Up to filters and padding as wide as a shard."""
    rng = random.Random(seed)
    found = []
    while len(found) < count:
        shards, out = rng.randint(2, 5), rng.choice([rng.randint(1, 6), rng.randint(12, 40)])
        f, s, d, low = rng.randint(1, 5), rng.randint(1, 3), rng.randint(1, 3), rng.randint(-2, 5)
        found.append((even_axis(shards, out, f, s, d, low, rng.randrange(s)), shards))
    return found


def kinds_of_ends(p: ConvProblem, shards: int, x: Any, dy: Any) -> list[bool]:
    """Whether a shard makes y, and dx, from its own rows, and how often only one end of them again."""
    found: list[bool] = []

    def shard(x: Any, dy: Any) -> Any:
        ends = halo.ends_of_y(p, {0: ("s",)}, x), halo.ends_of_dx(p, {0: ("s",)}, dy)
        found.extend(end is not None for end in ends)
        found.append(any(end is not None and len(end.made) == 1 for end in ends))
        return x

    jax.eval_shape(jax.vmap(shard, axis_name="s"), x, dy)
    return found


def check_rows(p: ConvProblem, shards: int) -> list[bool]:
    """`kinds_of_ends` of the problem, whose results are right."""
    x, w, dy = (ints(*shape, seed=i, largest=50) for i, shape in enumerate((p.x_shape, p.w_shape, p.y_shape)))
    parts = dealt(x, shards), w, dealt(dy, shards)
    *together, added = jax.jit(functools.partial(shards_of_rows, p))(*parts)
    alone = jax.jit(functools.partial(whole, p))(x, w, dy)
    for name, a, b in zip(("y", "dx", "dw"), together, alone, strict=True):
        np.testing.assert_array_equal(a, b, f"{name} of {p}, padding {p.padding}, over {shards}")
    np.testing.assert_array_equal(added, alone[1] + x, f"dx + x of {p}, padding {p.padding}, over {shards}")
    return kinds_of_ends(p, shards, parts[0], parts[2])


@pytest.mark.parametrize("seed", range(6))
def test_every_shard_makes_its_ends_again(seed, monkeypatch):
    monkeypatch.setattr(halo.lax, "ppermute", permute)
    seen = np.sum([check_rows(p, shards) for p, shards in even_axes(seed, 8)], 0)
    assert np.all(seen > 0), seen


@pytest.mark.parametrize(
    "axis",
    [
        {"f": 1, "s": 1, "d": 1, "low": 3},  # the slab has rows of the neighbour alone
        {"f": 1, "s": 3, "d": 1, "low": 5},  # and not the last ones
        {"f": 1, "s": 1, "d": 1, "low": -3},
        {"f": 1, "s": 3, "d": 1, "low": -4},  # it begins behind the shard's end
        {"f": 2, "s": 1, "d": 3, "low": 4},  # padding beyond the filter
        {"f": 2, "s": 3, "d": 2, "low": 1},  # rows that no tap reaches
        {"f": 4, "s": 2, "d": 1, "low": 1},
        {"f": 3, "s": 1, "d": 2, "low": 1},  # more behind than in front
    ],
    ids=str,
)
def test_ends_of_rare_windows(axis, monkeypatch):
    monkeypatch.setattr(halo.lax, "ppermute", permute)
    for shards in (2, 3):
        y, dx, _ = check_rows(even_axis(shards, 24, **axis), shards)
        assert y and dx


def shards_of_rows(p: ConvProblem, x: Any, w: Any, dy: Any) -> list[jax.Array]:
    """The programs of shards of x and dy as `dealt`: `whole`, and dx + x."""

    def shard(x: Any, dy: Any) -> list[jax.Array]:
        split = {halo.name(0): ("s",)}
        (y,), (dx,) = conv.fprop_shard(p, split, x, w), conv.dgrad_shard(p, split, dy, w)
        (dw,), (added,) = conv.wgrad_shard(p, split, x, dy), conv._dgrad_add_shard(p, split, dy, w, x)
        return [y, dx, dw, added]

    y, dx, dw, added = jax.vmap(shard, axis_name="s")(x, dy)
    return [y.reshape(1, -1, 1), dx.reshape(1, -1, 1), dw[0], added.reshape(1, -1, 1)]


# ----------------------------------------------------------------------------------------------------------------------
# On a mesh, beside lax


def lax_conv(x: Any, w: Any, *b: Any, stride: int = 1, padding: Any = "SAME", dilation: int = 1, groups: int = 1,
             layout: str = "NHWC", activation: Callable[[Any], Any] = lambda z: z) -> jax.Array:  # fmt: skip
    nd = x.ndim - 2
    spatial = "DHW"[3 - nd :]
    first = layout.startswith("NC")
    numbers = (
        (f"NC{spatial}", f"OI{spatial}", f"NC{spatial}") if first else (f"N{spatial}C", f"{spatial}IO", f"N{spatial}C")
    )
    padding = padding if isinstance(padding, str) else tuple(padding)
    z = lax.conv_general_dilated(x, w, (stride,) * nd, padding, rhs_dilation=(dilation,) * nd,
                                 dimension_numbers=numbers, feature_group_count=groups)  # fmt: skip
    return activation(z + b[0].reshape(-1, *(1,) * nd) if b and first else z + b[0] if b else z)


def lax_transpose(x: Any, w: Any, *, stride: int) -> jax.Array:
    return lax.conv_transpose(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


X, W, B = ints(4, H, 6, 4), ints(3, 3, 4, 4, seed=1), ints(4, seed=2)
LONG = ints(2, 4 * H, 3, 4)
SPACE = P("b", "s")

# name: (jaxconv's function, lax's, options of both, arguments, their specs)
CASES: dict[str, tuple[str, Callable[..., Any], dict[str, Any], tuple[Any, ...], tuple[P, ...]]] = {
    "same": ("conv2d", lax_conv, {}, (X, W), (SPACE, P())),
    "strided": ("conv2d", lax_conv, {"stride": 2}, (X, W), (SPACE, P())),
    "strided_5x5_padded": (
        "conv2d", lax_conv, {"stride": 2, "padding": [(2, 2), (2, 2)]}, (X, ints(5, 5, 4, 4, seed=3)), (SPACE, P())),
    "stride_3": ("conv2d", lax_conv, {"stride": 3, "padding": [(0, 0), (1, 1)]},
                 (ints(2, 12 * SHARDS, 6, 4), ints(3, 3, 4, 4, seed=1)), (SPACE, P())),
    # H is not P * stride: every device begins at another row of x
    "fewer_rows": ("conv2d", lax_conv, {"padding": "VALID"},
                   (ints(2, 5 * SHARDS, 3, 4), ints(SHARDS + 1, 1, 4, 4)), (SPACE, P())),
    "dilated": ("conv2d", lax_conv, {"dilation": 2}, (X, W), (SPACE, P())),
    "pointwise": ("conv2d", lax_conv, {}, (X, ints(1, 1, 4, 8)), (SPACE, P())),
    "patches": ("conv2d", lax_conv, {"stride": 2, "padding": "VALID"}, (X, ints(2, 2, 4, 8)), (SPACE, P())),
    "groups": ("conv2d", lax_conv, {"groups": 2}, (X, ints(3, 3, 2, 4, seed=1)), (SPACE, P())),
    "depthwise": ("conv2d", lax_conv, {"groups": 4, "stride": 2}, (X, ints(3, 3, 1, 8, seed=1)), (SPACE, P())),
    "causal_1d": ("conv1d", lax_conv, {"padding": [(3, 0)]}, (ints(4, H, 4), ints(4, 4, 4)), (SPACE, P())),
    "volume": ("conv3d", lax_conv, {}, (ints(2, H, 4, 3, 2), ints(3, 3, 3, 2, 4, seed=1)), (SPACE, P())),
    "rows_and_columns": ("conv2d", lax_conv, {}, (ints(2, H, 4, 4), W), (P(None, "s", "b"), P())),
    "one_axis_over_both": ("conv2d", lax_conv, {}, (ints(2, 2 * H, 4, 4), W), (P(None, ("b", "s")), P())),
    "wider_than_a_shard": ("conv2d", lax_conv, {}, (ints(2, 2 * SHARDS, 4, 4), ints(7, 3, 4, 4)), (SPACE, P())),
    "channels_first": ("conv2d", lax_conv, {"layout": "NCHW"},
                       (X.transpose(0, 3, 1, 2), W.transpose(3, 2, 0, 1), B), (P("b", None, "s"), P(), P())),
    "bias_relu": ("conv2d", lax_conv, {"activation": "relu"}, (X, W, B), (SPACE, P(), P())),
    "out_channels": ("conv2d", lax_conv, {"activation": "relu"}, (X, W, B),
                     (P(None, "s"), P(None, None, None, "b"), P("b"))),
    "in_channels": ("conv2d", lax_conv, {"activation": "relu"}, (X, W, B),
                    (P(None, "s", None, "b"), P(None, None, "b"), P())),
    "transposed": ("conv_transpose2d", lax_transpose, {"stride": 2}, (ints(2, 4 * SHARDS, 3, 4), W), (SPACE, P())),
    "long_dilated": ("conv2d", lax_conv, {"dilation": 3}, (LONG, W), (SPACE, P())),
    "long_strided_5x5": (
        "conv2d", lax_conv, {"stride": 2, "padding": [(2, 2), (2, 2)]}, (LONG, ints(5, 5, 4, 4, seed=3)), (SPACE, P())),
    "long_causal_1d": ("conv1d", lax_conv, {"padding": [(3, 0)]}, (ints(4, 2 * H, 4), ints(4, 4, 4)), (SPACE, P())),
    "long_anticausal_1d": ("conv1d", lax_conv, {"padding": [(-1, 4)]},
                           (ints(2, 4 * H, 4), ints(4, 4, 4)), (P(None, "s"), P())),
}  # fmt: skip
# Those of which a shard makes all rows from its own, and the ones at its ends again
AGAIN = {
    "same", "strided", "groups", "depthwise", "volume", "one_axis_over_both", "channels_first", "bias_relu",
    "out_channels", "in_channels", "transposed", "long_dilated", "long_strided_5x5", "long_causal_1d",
    "long_anticausal_1d",
} | ({"rows_and_columns"} if DEVICES == 2 else set())  # fmt: skip


def and_back(f: Callable[..., Any]) -> Callable[..., Any]:
    """f's result, and the cotangents of its arguments for that result as a cotangent."""

    def step(*args: Any) -> Any:
        y, pull = jax.vjp(f, *args)
        return y, pull(y)

    return step


@functools.cache
def counts(case: str, kind: AxisType, which: str, gradients: bool) -> Any:
    """(collectives, shardings of the results, the results, the program) of "lax", None (the default) or "native"."""
    name, lax_function, options, args, specs = CASES[case]
    if which == "lax":
        f = functools.partial(
            lax_function, **{k: getattr(jax.nn, v) if k == "activation" else v for k, v in options.items()}
        )
    else:
        layout = {"layout": {3: "NWC", 4: "NHWC", 5: "NDHWC"}[args[0].ndim], **options}
        f = functools.partial(getattr(jaxconv, name), implementation=None if which == "default" else which, **layout)
    mesh = make_mesh(kind)
    with entered(mesh):
        placed = place(mesh, args, specs)
        compiled = jax.jit(and_back(f) if gradients else f).lower(*placed).compile()
        results = compiled(*placed)
    return collectives(compiled.as_text()), jax.tree.map(lambda a: a.sharding, results), results, compiled.as_text()


def unsplit(case: str, gradients: bool) -> Any:
    name, _, options, args, _ = CASES[case]
    f = functools.partial(getattr(jaxconv, name), implementation="xla", **options)
    return (and_back(f) if gradients else f)(*map(jnp.asarray, args))


def check(case: str, kind: AxisType, which: str, gradients: bool) -> None:
    found, shardings, results, text = counts(case, kind, which, gradients)
    jax.tree.map(np.testing.assert_array_equal, results, unsplit(case, gradients))
    assert set(found) <= {"collective-permute", "all-reduce"}, text
    try:
        theirs, their_shardings, _, _ = counts(case, kind, "lax", gradients)
    except Exception as error:  # lax's Explicit types refuse filters that are split
        assert "out_sharding" in str(error), error
        return
    # Instead of gathering: an exchange, and for dw a sum.
    exchanges = {"collective-permute", "all-reduce"} if theirs["all-gather"] else set()
    assert found["all-reduce"] <= max(theirs["all-reduce"], 1)
    assert all(found[name] <= theirs[name] for name in set(found) - exchanges), (found, theirs)
    if exchanges and kind == AxisType.Auto:
        return  # what lax has gathered it may leave so
    for own, other, result in zip(*map(jax.tree.leaves, (shardings, their_shardings, results)), strict=True):
        assert own.is_equivalent_to(other, result.ndim), (own, other)


# The default is the same program with other plans for the shards: a case of each kind will do.
CHOICES = [(case, "native") for case in CASES]
CHOICES += [
    (case, "default") for case in ("strided", "groups", "volume", "wider_than_a_shard", "out_channels", "transposed")
]
over_choices = pytest.mark.parametrize(("case", "which"), CHOICES, ids=map("-".join, CHOICES))


@on_a_mesh
@over_kinds
@pytest.mark.parametrize("case", ["same", "stride_3", "rows_and_columns", "wider_than_a_shard", "bias_relu"])
def test_forward(case, kind):
    check(case, kind, "native", gradients=False)
    _, sharding, y, text = counts(case, kind, "native", False)
    sizes = [np.prod(shape) for _, shape in native_calls(text)]
    assert len(sizes) == 1 + (case in AGAIN)
    assert max(sizes) == np.prod(sharding.shard_shape(y.shape))


@on_a_mesh
@over_kinds
@over_choices
def test_there_and_back(case, which, kind):
    check(case, kind, which, gradients=True)
    if which == "native":
        assert len(native_calls(counts(case, kind, which, True)[-1])) == 3 * (1 + (case in AGAIN))


relu_conv = functools.partial(jaxconv.conv2d, activation="relu", implementation="native")


def large(text: str, size: int) -> collections.Counter[str]:
    """How many copies, concatenations, pads and selects, inside fusions too, an HLO has of `size` elements or more."""
    found = re.findall(r"= \w+\[([\d,]+)\]\S* (concatenate|copy|pad|select)\(", text)
    return collections.Counter(op for shape, op in found if math.prod(map(int, shape.split(","))) >= size)


UNCOPIED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[P, ...]]] = {
    "relu": (lambda *args: relu_conv(*args), (LONG, W, B), (SPACE, P(), P())),
    "strided": (lambda *args: relu_conv(*args, stride=2), (LONG, W, B), (SPACE, P(), P())),
    "residual": (
        lambda x, w, r: relu_conv(x, w, residual=r, return_preactivation=True)[0],
        (LONG, W, ints(*LONG.shape, seed=5)),
        (SPACE, P(), SPACE),
    ),
    "volume": (
        functools.partial(jaxconv.conv3d, implementation="native"),
        (ints(2, 4 * H, 4, 3, 2), ints(3, 3, 3, 2, 4, seed=1)),
        (SPACE, P()),
    ),
    "transposed": (
        functools.partial(jaxconv.conv_transpose2d, stride=2, implementation="native"),
        (LONG, W),
        (SPACE, P()),
    ),
}


@on_a_mesh
@over_kinds
@pytest.mark.parametrize("least_copy", [0, halo.LEAST_COPY], ids=["ends", "copy"])
@pytest.mark.parametrize("case", UNCOPIED)
def test_what_a_shard_holds_is_not_copied(case, least_copy, kind, monkeypatch):
    """Or, below the size from which on it is not, by pads alone, into which the neighbours' rows are put in place."""
    monkeypatch.setattr(halo, "LEAST_COPY", least_copy)
    f, args, specs = UNCOPIED[case]
    args = *args, np.asarray(f(*map(jnp.asarray, args)))  # a cotangent

    def step(dy: Any, *args: Any) -> Any:
        y, pull = jax.vjp(f, *args)
        return y, pull(dy)

    mesh = make_mesh(kind)
    with entered(mesh):
        *placed, dy = place(mesh, args, (*specs, SPACE))
        compiled = jax.jit(step).lower(dy, *placed).compile()
        results = compiled(dy, *placed)
    jax.tree.map(np.testing.assert_array_equal, results, step(args[-1], *map(jnp.asarray, args[:-1])))
    text = compiled.as_text()
    found = large(text, min(a.addressable_shards[0].data.size for a in (placed[0], dy)))
    assert len(native_calls(text)) == (6 if least_copy == 0 else 3)
    if least_copy == 0:
        assert not found - collections.Counter(select=1), text  # relu's derivative
        return
    assert found["concatenate"] == 0 and 1 <= found["pad"] <= 3, text
    # On Auto meshes XLA finds dgrad's pad and wgrad's to be the same, not what is put into it.
    assert found["copy"] <= (2 if kind == AxisType.Auto else 0), text


@on_a_mesh
@over_kinds
@pytest.mark.parametrize(("size", "padding"), [(2, "VALID"), (3, "SAME")])
def test_what_a_shard_pools_is_copied_where_windows_overlap(size, padding, kind):
    f = functools.partial(jaxconv.max_pool, window=size, stride=2, padding=padding, implementation="native")
    args = ints(*LONG.shape), np.asarray(f(jnp.asarray(ints(*LONG.shape))))

    def step(x: Any, dy: Any) -> Any:
        y, pull = jax.vjp(f, x)
        return y, pull(dy)

    mesh = make_mesh(kind)
    with entered(mesh):
        placed = place(mesh, args, (SPACE, SPACE))
        compiled = jax.jit(step).lower(*placed).compile()
        results = compiled(*placed)
    jax.tree.map(np.testing.assert_array_equal, results, step(*map(jnp.asarray, args)))
    text = compiled.as_text()
    found = large(text, placed[0].addressable_shards[0].data.size)
    # x gets the neighbours' rows by an update, which newer XLA writes as a concatenation. What the neighbours are sent
    # back is added to a part of dx, at most padded to the whole of it.
    once = found["select"] == 0 and found["concatenate"] <= (jax.__version_info__ >= (0, 11)) and found["pad"] > 0
    assert not found if size == 2 else once, text


# ----------------------------------------------------------------------------------------------------------------------
# Under other transformations: the same numbers, nothing gathered, results split as lax's are

SMALL = ints(2, H, 4, 4, largest=1)
THIN = ints(3, 1, 4, 4, seed=1, largest=1)


def two_layers(x: Any, w: Any) -> jax.Array:
    return relu_conv(relu_conv(x, w), w)


TRANSFORMED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[P, ...]]] = {
    "jit_of_jit": (lambda x, w: jax.jit(relu_conv)(jax.jit(relu_conv)(x, w), w), (SMALL, THIN), (SPACE, P())),
    "remat": (jax.checkpoint(two_layers), (SMALL, THIN), (SPACE, P())),
    "remat_saving": (
        jax.checkpoint(two_layers, policy=jaxconv.checkpoint_policies.save_all),
        (SMALL, THIN),
        (SPACE, P()),
    ),
    "scan": (
        lambda x, ws: jax.lax.scan(lambda x, w: (relu_conv(x, w), None), x, ws)[0],
        (SMALL, np.stack([THIN, THIN])),
        (SPACE, P()),
    ),
    # Images join mapped ones behind them: of the two axes the mapped one may be split, as in lax.
    "vmap_images": (jax.vmap(relu_conv, (0, None)), (np.stack([SMALL, -SMALL]), THIN), (P("b", None, "s"), P())),
    "vmap_filters": (jax.vmap(relu_conv, (None, 0)), (SMALL, np.stack([THIN, -THIN])), (SPACE, P())),
    "vmap_both": (jax.vmap(relu_conv), (np.stack([SMALL, -SMALL]), np.stack([THIN, -THIN])), (P(None, "b", "s"), P())),
    "vmap_over_the_split": (
        jax.vmap(relu_conv),
        (np.stack([SMALL, -SMALL]), np.stack([THIN, -THIN])),
        (P("b", None, "s"), P("b")),
    ),
}


@on_a_mesh
@over_kinds
@pytest.mark.parametrize("transform", TRANSFORMED)
def test_transformed(transform, kind):
    f, args, specs = TRANSFORMED[transform]
    step = and_back(f)
    mesh = make_mesh(kind)
    with entered(mesh):
        placed = place(mesh, args, specs)
        compiled = jax.jit(step).lower(*placed).compile()
        y, gradients = results = compiled(*placed)
    jax.tree.map(np.testing.assert_array_equal, results, step(*map(jnp.asarray, args)))
    assert set(collectives(compiled.as_text())) <= {"collective-permute", "all-reduce"}
    assert "s" in y.sharding.spec
    for gradient, arg in zip(gradients, placed, strict=True):
        assert gradient.sharding.is_equivalent_to(arg.sharding, gradient.ndim)


@on_a_mesh
@over_kinds
def test_forward_mode(kind):
    mesh, args = make_mesh(kind), (X, W)
    bare = functools.partial(jaxconv.conv2d, implementation="native")

    def f(x: Any, w: Any) -> Any:
        return jax.jvp(bare, (x, w), (x, w))

    with entered(mesh):
        placed = place(mesh, args, (SPACE, P()))
        compiled = jax.jit(f).lower(*placed).compile()
        result = compiled(*placed)
    jax.tree.map(np.testing.assert_array_equal, result, f(*map(jnp.asarray, args)))
    assert set(collectives(compiled.as_text())) == {"collective-permute"}


@on_a_mesh
@over_kinds
@pytest.mark.parametrize("activation", ["gelu", "tanh"])
def test_epilogues_that_keep_what_backward_needs(activation, kind):
    """gelu keeps z, tanh y: both split as y."""
    args = X, W, B
    f = functools.partial(jaxconv.conv2d, activation=activation, return_preactivation=True, implementation="native")
    step = and_back(f)
    mesh = make_mesh(kind)
    with entered(mesh):
        placed = place(mesh, args, (SPACE, P(), P()))
        compiled = jax.jit(step).lower(*placed).compile()
        result = compiled(*placed)
    assert set(collectives(compiled.as_text())) == {"collective-permute", "all-reduce"}
    alone = step(*map(jnp.asarray, args))
    jax.tree.map(np.testing.assert_array_equal, result[0][1], alone[0][1])  # z
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(alone), strict=True):
        # The activation and its derivative, whatever XLA makes of them in another program, are 8 roundings of values
        # of the size of z; a gradient sums up to 4 * H * 6 products of them.
        np.testing.assert_allclose(a, b, rtol=0, atol=8 * floor("float32", 4 * H * 6, float(jnp.abs(b).max())))


@on_a_mesh
@over_kinds
def test_sixteen_bits(kind):
    args = [jnp.asarray(a, jnp.bfloat16) for a in (SMALL, THIN)]
    f = functools.partial(jaxconv.conv2d, implementation="native")
    mesh = make_mesh(kind)
    with entered(mesh):
        result = jax.jit(and_back(f))(*place(mesh, args, (SPACE, P())))
    # Whole numbers: y up to 12; dx and dw are sums beyond bfloat16's 8 bits, dw added up over devices after rounding.
    y, (dx, dw) = and_back(f)(*args)
    np.testing.assert_array_equal(result[0], y)
    np.testing.assert_array_equal(result[1][0], dx)
    np.testing.assert_allclose(result[1][1].astype(np.float32), dw.astype(np.float32), rtol=0,
                               atol=DEVICES * 2.0**-8 * float(jnp.abs(dw).max()))  # fmt: skip


@on_a_mesh
@over_kinds
def test_residual_block(kind):
    """Through `accelerate`: on an Auto mesh the dgrad adds what comes back from the other users of x."""

    def block(x: Any, w1: Any, w2: Any) -> jax.Array:
        return x + lax_conv(jax.nn.relu(lax_conv(x, w1)), w2)

    args = SMALL, THIN, THIN
    step = and_back(jaxconv.accelerate(block))
    mesh = make_mesh(kind)
    with entered(mesh):
        placed = place(mesh, args, (SPACE, P(), P()))
        compiled = jax.jit(step).lower(*placed).compile()
        result = compiled(*placed)
    jax.tree.map(np.testing.assert_array_equal, result, and_back(block)(*map(jnp.asarray, args)))
    assert set(collectives(compiled.as_text())) == {"collective-permute", "all-reduce"}


def pool(x: jax.Array, which: str, size: int, padding: str) -> jax.Array:
    """Over windows of size x size that step by 2, as flax.linen writes it."""
    window = (1, size, size, 1), (1, 2, 2, 1), padding
    if which == "max":
        return lax.reduce_window(x, -jnp.inf, lax.max, *window)
    return lax.reduce_window(x, 0.0, lax.add, *window) / size**2


@on_a_mesh
@over_kinds
@pytest.mark.parametrize(("way", "which"), [("accelerate", "max"), ("enable", "average")])
def test_pooling_between_convolutions_keeps_the_split(way, which, kind):
    """Rows are exchanged for a pooling as for a convolution, in both passes: by `max_pool` where accelerate takes it,
    else by XLA."""

    def pooled(x: jax.Array) -> jax.Array:
        # An average of 16 is exact: of 9 it would be rounded, and ties of the maxima behind it would be broken by that.
        overlapping = functools.partial(pool, which=which, size=4 if which == "average" else 3, padding="SAME")
        if (
            kind == AxisType.Explicit and not jax.typeof(x).sharding.mesh.empty
        ):  # JAX has no type for what pads the gradient's rows
            overlapping = jax.sharding.auto_axes(overlapping, out_sharding=jax.typeof(x).sharding)
        return overlapping(x)

    def net(x: Any, w1: Any, w2: Any) -> jax.Array:
        return lax_conv(pool(lax_conv(pooled(lax_conv(x, w1)), w2), "max", 2, "VALID"), w1)

    args = ints(4, 16 * SHARDS, 8, 2), ints(3, 3, 2, 2, seed=1, largest=1), ints(3, 3, 2, 2, seed=2, largest=1)
    with jaxconv.disabled():
        want = jax.jit(and_back(lambda *args: net(*args)))(*args)
    mesh = make_mesh(kind)
    step = and_back(jaxconv.accelerate(net) if way == "accelerate" else lambda *args: net(*args))
    on = jaxconv.enabled(implementation="native", auto_meshes=True) if way == "enable" else jaxconv.disabled()
    with entered(mesh), on:
        placed = place(mesh, args, (SPACE, P(), P()))
        compiled = jax.jit(step).lower(*placed).compile()
        y, (dx, *_) = result = compiled(*placed)
    assert set(collectives(compiled.as_text())) == {"collective-permute", "all-reduce"}
    for a in (y, dx):
        assert tuple(a.sharding.spec)[:2] == ("b", "s")
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(want), strict=True):
        # Four layers and their gradients, of sums of up to 2,000 terms: some hundred roundings of the largest.
        np.testing.assert_allclose(a, b, rtol=0, atol=100 * np.finfo(np.float32).eps * np.abs(b).max())


@on_a_mesh
@over_kinds
@pytest.mark.parametrize(("stride", "height", "rows"), [(1, 4, 4), (1, 8, 8), (2, 16, 8), (3, 10, 4)])
def test_dgrad_with_an_addend(stride, height, rows, kind):
    """dgrad(dy, w) + c, of so many rows a device. With stride 3 its first row of dx is not at a whole stride: it cuts
    its rows out."""
    height, rows = height * SHARDS, rows * SHARDS
    below = stride * (rows - 1) + 3 - height - 1
    x, w = jax.ShapeDtypeStruct((2, height, 3, 4), np.float32), jax.ShapeDtypeStruct((3, 3, 4, 4), np.float32)
    options = {"dilation": 1, "groups": 1, "layout": "NHWC", "return_preactivation": False, "implementation": "native"}
    options |= dict.fromkeys(("activation", "precision", "algorithm"))
    p = ConvProblem.infer("conv2d", 2, x, w, None, stride=(stride, 1), padding=[(1, below), (1, 1)], **options)
    args = [ints(*shape, seed=i) for i, shape in enumerate((p.y_shape, p.w_shape, p.x_shape))]
    mesh = make_mesh(kind)
    with entered(mesh):
        placed = place(mesh, args, (SPACE, P(), SPACE))
        compiled = jax.jit(functools.partial(conv.dgrad_add, p)).lower(*placed).compile()
        result = compiled(*placed)
    np.testing.assert_array_equal(result, conv.dgrad_add(p, *map(jnp.asarray, args)))
    assert set(collectives(compiled.as_text())) == {"collective-permute"}
    assert result.sharding.is_equivalent_to(placed[2].sharding, 4)


@on_a_mesh
@over_kinds
@pytest.mark.parametrize("stride", [1, 2])
def test_pairs_with_batchnorm(stride, kind):
    """Far from zero, where rows with zeros for their neighbours' would be seen in the statistics."""

    def f(x: Any, w: Any, scale: Any, bias: Any) -> Any:
        y, mean, var = jaxconv.conv_batchnorm(
            x, w, scale, bias, jnp.zeros(4), jnp.ones(4), training=True, momentum=0.0, stride=stride,
            padding=[(1, 1), (0, 0)], activation="relu", precision="highest", implementation="native")  # fmt: skip
        return jnp.sum(y * y), (y, mean, var)

    args = (
        10 + helpers.normal(0, (4, 4 * H, 6, 4), "float32"),
        jnp.abs(helpers.normal(1, (3, 3, 4, 4), "float32")),
        1 + jnp.arange(4.0),
        jnp.ones(4),
    )
    step = jax.value_and_grad(f, (0, 1, 2, 3), has_aux=True)
    mesh = make_mesh(kind)
    with entered(mesh):
        placed = place(mesh, args, (SPACE, *[P()] * 3))
        compiled = jax.jit(step).lower(*placed).compile()
        result = compiled(*placed)
    assert set(collectives(compiled.as_text())) == {"collective-permute", "all-reduce"}
    calls = collections.Counter(name for name, _ in native_calls(compiled.as_text()))
    assert calls["conv_fprop"] == 2 and "conv_statistics" not in calls
    assert calls["batchnorm_backward"] == calls["batchnorm_dx"] == 1
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(step(*args)), strict=True):
        # z is a sum of 36 products; the largest terms of what follows are sums over all pixels of y's deviations.
        np.testing.assert_allclose(a, b, rtol=0, atol=64 * floor("float32", 36, float(jnp.abs(b).max())))


# ----------------------------------------------------------------------------------------------------------------------
# Shards of unequal sizes: between the ends of a program on an Auto mesh only


@on_a_mesh
def test_rows_that_do_not_divide():
    """VALID convolutions, one after the other: 8, 8 and 6 rows; 8, 8 and 4; ..."""

    def f(x: Any, *ws: Any) -> jax.Array:
        for w in ws:
            x = jaxconv.conv2d(x, w, padding="VALID", activation="relu", implementation="native")
        return jnp.sum(x * x)

    args = SMALL, ints(3, 1, 4, 4, largest=1), ints(2, 3, 4, 4, seed=1, largest=1), ints(3, 1, 4, 4, seed=2, largest=1)
    step = jax.value_and_grad(f, (0, 1, 2, 3))
    mesh = make_mesh()
    placed = place(mesh, args, (SPACE, P(), P(), P()))
    compiled = jax.jit(step).lower(*placed).compile()
    jax.tree.map(np.testing.assert_array_equal, compiled(*placed), step(*map(jnp.asarray, args)))
    assert set(collectives(compiled.as_text())) == {"collective-permute", "all-reduce"}
    assert len(native_calls(compiled.as_text())) == 9


@on_a_mesh
@pytest.mark.parametrize(("height", "taps"), [(H, 4), (max(6, 2 * SHARDS), max(6, 2 * SHARDS) - 4)])
@pytest.mark.parametrize(
    ("implementation", "activation"), [("native", "relu"), ("native", "silu"), ("native", None), (None, "relu")]
)
def test_batchnorm_of_rows_that_do_not_divide(height, taps, implementation, activation):
    """After a VALID convolution: its statistics and sums are those of the rows that there are, an odd number, and 5, of
    which the last of four devices has none."""
    mesh = make_mesh()

    def f(x: Any, w: Any, scale: Any, bias: Any, residual: Any) -> Any:
        z = jaxconv.conv2d(x, w, padding="VALID", implementation=implementation)
        z, mean, var = jaxconv.batchnorm(
            z, scale, bias, jnp.zeros(4), jnp.ones(4), residual=z * residual, training=True, momentum=0.0,
            activation=activation, implementation=implementation)  # fmt: skip
        return jnp.sum(z * z), (mean, var)

    shapes = (4, height, 6, 4), (taps, 3, 4, 4), (4,), (4,), (4,)
    args = [helpers.normal(i, shape, "float32") for i, shape in enumerate(shapes)]
    step = jax.value_and_grad(f, (0, 1, 2, 3, 4), has_aux=True)
    placed = place(mesh, args, (SPACE, *[P()] * 4))
    compiled = jax.jit(step).lower(*placed).compile()
    assert set(collectives(compiled.as_text())) == {"collective-permute", "all-reduce"}
    norms = [name for name, _ in native_calls(compiled.as_text()) if name.startswith("batchnorm")]
    assert norms == ["batchnorm_infer", "batchnorm_backward", "batchnorm_dx"] * (implementation is not None)
    whole = step(*map(jnp.asarray, args))
    for a, b in zip(jax.tree.leaves(compiled(*placed)), jax.tree.leaves(whole), strict=True):
        # Sums of up to 4 * H * 4 products, of values that are such sums themselves, through four more such steps.
        np.testing.assert_allclose(a, b, rtol=0, atol=8 * floor("float32", 16 * H, float(jnp.abs(b).max())))


@on_a_mesh
def test_fewer_rows_than_devices():
    """One image down to a pixel: the last devices have nothing to do."""
    mesh = make_mesh()

    def f(x: Any, *ws: Any) -> jax.Array:
        for w in ws:
            x = jaxconv.conv2d(x, w, stride=2, implementation="native")
        return x.sum((1, 2))

    args = ints(2, 2 * SHARDS, 4, 2), *[ints(3, 3, 2, 2, seed=i, largest=1) for i in range(1, 5)]
    step = and_back(f)
    placed = place(mesh, args, (SPACE, *[P()] * 4))
    compiled = jax.jit(step).lower(*placed).compile()
    jax.tree.map(np.testing.assert_array_equal, compiled(*placed), step(*map(jnp.asarray, args)))


# ----------------------------------------------------------------------------------------------------------------------
# In a shard_map over some of the mesh's axes


@on_a_mesh
def test_shard_map_over_images():
    """Images by the user's shard_map, space by types. XLA gathers at the borders of such a shard_map, lax alone too."""
    mesh = make_mesh(AxisType.Explicit)
    if mesh.shape["b"] == 1:
        pytest.skip("XLA's partitioner fails over a manual axis of one device, with lax alone too")
    mapped = jax.shard_map(relu_conv, mesh=mesh, in_specs=(P("b"), P()), out_specs=P("b"), axis_names={"b"})
    by_lax = functools.partial(lax_conv, activation=jax.nn.relu)
    by_lax = jax.shard_map(by_lax, mesh=mesh, in_specs=(P("b"), P()), out_specs=P("b"), axis_names={"b"})
    with entered(mesh):
        placed = place(mesh, (X, W), (SPACE, P()))
        compiled = jax.jit(and_back(mapped)).lower(*placed).compile()
        result = compiled(*placed)
        theirs = collectives(jax.jit(and_back(by_lax)).lower(*placed).compile().as_text())
    jax.tree.map(np.testing.assert_array_equal, result, and_back(relu_conv)(jnp.asarray(X), jnp.asarray(W)))
    found = collectives(compiled.as_text())
    assert found["collective-permute"] > 0 and found["all-gather"] <= theirs["all-gather"]
    assert result[0].sharding.is_equivalent_to(placed[0].sharding, 4)


@on_a_mesh
@over_kinds
def test_eager(kind):
    mesh = make_mesh(kind)
    placed = place(mesh, (X, W), (SPACE, P()))
    with entered(mesh):
        y = relu_conv(*placed)
    np.testing.assert_array_equal(y, relu_conv(X, W))
    assert y.sharding.is_equivalent_to(placed[0].sharding, 4)


# ----------------------------------------------------------------------------------------------------------------------
# What `explain` says where types speak of a mesh


@on_a_mesh
def test_explain_shows_a_shard():
    mesh = make_mesh(AxisType.Explicit)
    with entered(mesh):
        explanation = jaxconv.explain(and_back(relu_conv))(*place(mesh, (X, W), (SPACE, P())))
    # All rows of a shard, and the three that are read for the first and the last of them again
    found = sorted((call.op, call.problem.batch, call.problem.in_spatial) for call in explanation)
    images = 4 // mesh.shape["b"]
    assert found == [
        ("conv", images, (8, 6)),
        ("conv", 2 * images, (3, 6)),
        ("conv_dgrad", images, (8, 6)),
        ("conv_dgrad", 2 * images, (1, 6)),
        ("conv_wgrad", images, (8, 6)),
        ("conv_wgrad", 2 * images, (1, 6)),
    ]
    assert not explanation.gathered


@on_a_mesh
@pytest.mark.parametrize("least_copy", [0, halo.LEAST_COPY], ids=["ends", "copy"])
def test_explain_shows_a_pairs_statistics_on_a_mesh(least_copy, monkeypatch):
    """They leave the convolution that writes all of a shard's rows."""
    monkeypatch.setattr(halo, "LEAST_COPY", least_copy)
    mesh, parameters = make_mesh(AxisType.Explicit), [np.ones(4, np.float32)] * 4
    f = functools.partial(jaxconv.conv_batchnorm, training=True, implementation="native")
    with entered(mesh):
        explanation = jaxconv.explain(f)(*place(mesh, (X, W, *parameters), (SPACE, *[P()] * 5)))
    plans = {call.op: call.plan for call in explanation}
    assert plans.keys() == {"conv_statistics" if least_copy else "conv_fprop", "batchnorm_infer"}


@on_a_mesh
def test_explain_says_what_is_gathered_and_why():
    """A type has no words for shards of unequal sizes; lax refuses such a convolution."""
    mesh = make_mesh(AxisType.Explicit)
    valid = functools.partial(jaxconv.conv2d, padding="VALID", implementation="native")
    w = ints(4, 3, 4, 4)  # an odd number of rows is left
    with entered(mesh):
        placed = place(mesh, (X, w), (SPACE, P()))
        explanation = jaxconv.explain(valid)(*placed)
        y = jax.jit(valid)(*placed)
    np.testing.assert_array_equal(y, valid(X, w))
    (sentence,) = explanation.gathered
    assert f"axis 1 from {SHARDS} devices (s): {SHARDS} do not divide the rows of both input and output" in sentence
    assert sentence in str(explanation)


# ----------------------------------------------------------------------------------------------------------------------
# What types promise: the splits that lax's results have, gradients included. Nothing is compiled.

SPECS = [
    P(),
    P("b"),
    P("b", "s"),
    P(None, "s"),
    P(None, "s", "b"),
    P(None, ("b", "s")),
    P(("b", "s")),
    P(None, None, "s"),
]


def types(f: Callable[..., Any], mesh: Any, args: Any, specs: Any) -> list[Any]:
    with entered(mesh):
        avals = jax.make_jaxpr(and_back(f))(*place(mesh, args, specs)).out_avals
    return [(aval.shape, aval.dtype, aval.sharding.spec) for aval in avals]


@on_a_mesh
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize(
    ("name", "by_lax", "options", "w"),
    [
        ("conv2d", lax_conv, {}, (3, 3, 4, 8)),
        ("conv2d", lax_conv, {"stride": 2}, (3, 3, 4, 8)),
        ("conv2d", lax_conv, {"stride": 2, "padding": "VALID"}, (2, 2, 4, 8)),
        ("conv2d", lax_conv, {"groups": 4, "dilation": 2}, (3, 3, 1, 4)),
        ("conv2d", lax_conv, {"activation": "silu"}, (1, 1, 4, 4)),
        ("conv_transpose2d", lax_transpose, {"stride": 2}, (3, 3, 4, 4)),
    ],
)
def test_types_of_convolutions_are_those_of_lax(spec, name, by_lax, options, w):
    mesh = make_mesh(AxisType.Explicit)
    args = np.zeros((2 * DEVICES, 2 * DEVICES, 2 * DEVICES, 4), np.float32), np.zeros(w, np.float32)
    theirs = functools.partial(
        by_lax, **{k: getattr(jax.nn, v) if k == "activation" else v for k, v in options.items()}
    )
    for implementation in ("native", None):
        ours = functools.partial(getattr(jaxconv, name), implementation=implementation, **options)
        assert types(ours, mesh, args, (spec, P())) == types(theirs, mesh, args, (spec, P()))


@on_a_mesh
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_types_of_batchnorm_are_those_of_its_formula(spec):
    mesh = make_mesh(AxisType.Explicit)
    parameter = np.zeros(4, np.float32)
    args = np.zeros((2 * DEVICES, 2 * DEVICES, 2 * DEVICES, 4), np.float32), parameter, parameter

    def ours(x: Any, scale: Any, bias: Any) -> Any:
        return jaxconv.batchnorm(x, scale, bias, parameter, parameter, training=True, implementation="native")

    def formula(x: Any, scale: Any, bias: Any) -> Any:
        mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
        return (x - mean) * lax.rsqrt(var + 1e-5) * scale + bias, 0.9 * parameter + mean, 0.9 * parameter + var

    specs = spec, P(), P()
    assert types(ours, mesh, args, specs) == types(formula, mesh, args, specs)


@on_a_mesh
@pytest.mark.parametrize(("x", "w"), [(P("b"), P()), (P(("b", "s")), P()), (P("b"), P(None, "s")), (P(), P(None, "s"))])
def test_types_of_dense_are_those_of_a_product(x, w):
    mesh = make_mesh(AxisType.Explicit)
    args = np.zeros((2 * DEVICES, 8), np.float32), np.zeros((8, 4 * DEVICES), np.float32)
    ours = functools.partial(jaxconv.dense, implementation="native")
    assert types(ours, mesh, args, (x, w)) == types(jnp.matmul, mesh, args, (x, w))


def test_slabs_are_a_gpus_native_kernels(code_for_gpus):
    """Where it has one, and nobody asked for another; on a CPU by their own plan."""
    slab = ConvProblem.infer(
        "conv3d",
        3,
        jax.ShapeDtypeStruct((2, 3, 256, 256, 32), "bfloat16"),
        jax.ShapeDtypeStruct((3, 3, 3, 32, 32), "bfloat16"),
        None,
        layout="NDHWC",
        stride=1,
        padding=((0, 0), (1, 1), (1, 1)),
        dilation=1,
        groups=1,
        activation=None,
        return_preactivation=False,
        precision=None,
        algorithm=None,
        implementation=None,
    )
    if helpers.PLATFORM == "cpu":
        assert _plan.natively("conv_wgrad", slab) is slab
    with _plan.Device.assumed(H200):
        for op in ("conv_fprop", "conv_dgrad", "conv_wgrad"):
            made = _plan.natively(op, slab)
            assert made.implementation == "native" and _plan.plan(op, made, H200).implementation == "native"
        for asked in (dataclasses.replace(slab, implementation="xla"), dataclasses.replace(slab, dtype="float64")):
            assert _plan.natively("conv_wgrad", asked) is asked

"""What a region is to the program around it: as if its program stood there. Tangents that are none, results that vmap
does not map, effects of the program around, transposition, checks for debugging."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal
from jax import lax
from jax.experimental import io_callback
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxconv
from jaxconv.accelerate import rewrite
from jaxconv.joints import joint


@pytest.fixture(autouse=True, params=["as on GPUs", "as written"])
def norms(request, monkeypatch, norms_and_excitations_are_replaced):
    """Both ways to differentiate a region: as a joint program of results and gradients, and as written for CPUs."""
    if request.param == "as written":
        monkeypatch.setattr(rewrite, "as_written_on_cpu", lambda: True)
    with jax.default_matmul_precision("highest"):
        yield


X = normal(0, (2, 5, 5, 4), "float32")
XS = normal(1, (2, 3, 5, 5, 4), "float32")
W = normal(2, (3, 3, 4, 4), "float32") / 6


def conv(x, w):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def norm(y, mean, var):
    return (y - mean) * lax.rsqrt(var + 1e-3)


def close(found, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), found, wanted)


# ----------------------------------------------------------------------------------------------------------------------
# What has no tangent has none: it may go where nothing can be differentiated


def spectral(w):
    """Power iteration of stopped weights by a while loop, which has no reverse mode."""
    m = lax.stop_gradient(w).reshape(-1, 4)

    def body(carry):
        u = m.T @ (m @ carry[1])
        return carry[0] + 1, u / jnp.linalg.norm(u)

    _, u = lax.while_loop(lambda carry: carry[0] < 3, body, (0, jnp.ones(4)))
    return (jax.nn.relu(conv(X, w / (m @ u @ w.reshape(-1, 4) @ u))) ** 2).sum()


def _watched(y):
    return jax.pure_callback(lambda v: np.float32(np.abs(v).mean()), jax.ShapeDtypeStruct((), jnp.float32), y)


def watched(w):
    y = conv(X, w)
    return (jax.nn.relu(y) * _watched(lax.stop_gradient(y))).sum()


def counted(w):
    """By whole numbers, and by steps that are flat."""
    y = conv(X, w)
    return (jax.nn.relu(y) * _watched(jnp.round(y)) * _watched((y > 0).astype(jnp.float32))).sum()


def normalised(w):
    y = conv(X, w)
    mean, var = y.mean((0, 1, 2)), y.var((0, 1, 2))
    return (jax.nn.relu(norm(y, mean, var)) * _watched(lax.stop_gradient(0.9 + 0.1 * mean))).sum()


def of_data(w):
    """Of what is not differentiated at all."""
    return (conv(jax.nn.relu(conv(X, W)), w) * _watched(conv(X, W))).sum()


@pytest.mark.parametrize("f", [spectral, watched, counted, normalised, of_data])
@pytest.mark.parametrize("mode", [jax.grad, jax.jacfwd])
def test_what_has_no_tangent_goes_where_nothing_is_differentiated(f, mode):
    if f is spectral and mode is jax.jacfwd:
        mode = lambda f: lambda w: jax.jvp(f, (w,), (w,))[1]  # noqa: E731
    close(mode(jaxconv.accelerate(f))(W), mode(f)(W))


def test_a_reference_takes_what_has_no_tangent():
    def written(wrap):
        r = jax.new_ref(jnp.zeros(4))

        def f(w):
            y = conv(X, w)
            r[...] = lax.stop_gradient(y.mean((0, 1, 2)))
            return jax.nn.relu(y).sum()

        return jax.grad(wrap(f))(W), r[...]

    close(written(jaxconv.accelerate), written(lambda f: f))


@jax.custom_jvp
def quantised(w):
    return jnp.round(8 * w) / 8


quantised.defjvp(lambda primals, tangents: (quantised(*primals), tangents[0]))


@jax.custom_vjp
def reversed_sign(w):
    return jnp.sign(w)


reversed_sign.defvjp(lambda w: (jnp.sign(w), None), lambda _, g: (-g,))


@pytest.mark.parametrize(
    "through",
    [quantised, reversed_sign, lambda w: w + lax.stop_gradient(jnp.round(8 * w) / 8 - w)],
    ids=["custom_jvp", "custom_vjp", "stop_gradient"],
)
def test_derivatives_of_ones_own_stay_through_steps(through):
    """Straight-through estimators: steps, which are flat, with derivatives that are not."""

    def f(w):
        return jax.nn.relu(conv(conv(X, through(w)), w)).sum()

    wanted = jax.grad(f)(W)
    assert jnp.abs(wanted).max() > 0.1
    close(jax.grad(jaxconv.accelerate(f))(W), wanted)


@pytest.mark.parametrize("in_loop", [False, True])
def test_roles_through_calls(in_loop):
    """Of each result: no tangent; by statistics alone; otherwise."""

    def once(x, w):
        return conv(x, w), lax.stop_gradient(x), x > 0, jnp.floor(x)

    def f(x, w):
        if not in_loop:
            return jax.jit(once)(x, w)
        last = lambda x, _: (once(x, w)[0], once(x, w)[1:])  # noqa: E731
        x, (stopped, positive, floors) = lax.scan(last, x, None, length=2)
        return x, stopped, positive, floors

    closed = jax.make_jaxpr(f)(X, W)
    assert joint.tangents_of(closed, (True, False)) == [True, False, False, False]
    assert joint.tangents_of(closed, (False, True)) == [True, False, False, False]
    assert joint.tangents_of(closed, (False, False)) == [False] * 4


# ----------------------------------------------------------------------------------------------------------------------
# What vmap does not map is not mapped


def penalty(x, w):
    return conv(x, w), jnp.tanh(w).sum()


def whole_numbers(x, w):
    return jax.nn.relu(conv(x, w)), (w > 0).sum()


def synced(x, w):
    """A batch-norm over the axis that is mapped, whose statistics are the same for all."""
    y = conv(x, w)
    mean = lax.pmean(y.mean((0, 1, 2)), "b")
    var = lax.pmean((y * y).mean((0, 1, 2)), "b") - mean * mean
    return jax.nn.relu(norm(y, mean, var)), mean


@pytest.mark.parametrize("f", [penalty, whole_numbers, synced])
def test_results_that_are_not_mapped(f):
    def mapped(f):
        return jax.vmap(f, (0, None), (0, None), axis_name="b")(XS, W)

    close(mapped(jaxconv.accelerate(f)), mapped(f))
    close(jax.jit(lambda: mapped(jaxconv.accelerate(f)))(), mapped(f))


@pytest.mark.parametrize("f", [penalty, synced])
def test_tangents_that_are_not_mapped(f):
    def mapped(f):
        def of_each(x, w, t):
            return jax.jvp(lambda w: f(x, w), (w,), (t,))

        return jax.vmap(of_each, (0, None, None), ((0, None), (0, None)), axis_name="b")(XS, W, W)

    close(mapped(jaxconv.accelerate(f)), mapped(f))


@pytest.mark.parametrize("axis", [0, 3])
def test_any_axis_is_mapped(axis):
    xs = jnp.moveaxis(XS, 0, axis)

    def mapped(f):
        return jax.vmap(f, (axis, None), (axis, None), axis_name="b")(xs, W)

    def grad(f):
        loss = lambda x, w: jax.nn.relu(f(x, w)[0]).sum()  # noqa: E731
        return jax.vmap(jax.grad(loss, 1), (axis, None), axis_name="b")(xs, W)

    close(mapped(jaxconv.accelerate(synced)), mapped(synced))
    close(grad(jaxconv.accelerate(penalty)), grad(penalty))


def test_effects_of_what_is_not_mapped_happen_once():
    def ran(wrap):
        seen = []

        def f(x, w):
            y = conv(x, w)
            jax.debug.callback(lambda v: seen.append("told"), jnp.tanh(w).sum())
            taken = lambda y: (jax.debug.callback(lambda v: seen.append("taken"), w.sum()), y)[1]  # noqa: E731
            y = lax.cond(jnp.tanh(w).sum() > 1e9, taken, lambda y: 2 * y, y)
            doubled = io_callback(
                lambda v: 2 * v, jax.ShapeDtypeStruct((), jnp.float32), jnp.tanh(w).sum(), ordered=True
            )
            return y * doubled

        y = jax.jit(jax.vmap(wrap(f), (0, None)))(XS, W)
        jax.effects_barrier()
        return seen, y

    seen, wanted = ran(lambda f: f)
    assert seen == ["told"]
    found, y = ran(jaxconv.accelerate)
    assert found == seen
    close(y, wanted)


# ----------------------------------------------------------------------------------------------------------------------
# Linear programs, and checks for debugging


@pytest.mark.parametrize(
    "f",
    [
        lambda x: conv(x, W) + conv(conv(x, W), W),
        lambda x: jnp.sin(1.0) * x + conv(2 * x, W),
        lambda x: jax.checkpoint(lambda x: x + conv(x, W))(x),
        lambda x: lax.scan(lambda x, _: (x + conv(x, W), None), x, None, length=2)[0],
    ],
    ids=["convolutions", "a scaled shortcut", "checkpoint", "scan"],
)
def test_a_linear_function_is_transposed(f):
    close(jax.linear_transpose(jaxconv.accelerate(f), X)(X), jax.linear_transpose(f, X)(X))


@pytest.mark.parametrize("flag", [jax.debug_nans, jax.debug_infs])
def test_debugging_looks_at_results(flag):
    """`jnp.var` holds a NaN for an array without elements, and a max-pool begins at minus infinity."""

    def f(x, w):
        y = conv(x, w)
        y = jax.nn.relu(norm(y, y.mean((0, 1, 2)), y.var((0, 1, 2))))
        return lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")

    with flag(True):
        close(jaxconv.accelerate(f)(X, W), f(X, W))
        with pytest.raises(FloatingPointError):
            jaxconv.accelerate(lambda x: jnp.log(conv(x, W) * 0.0 - (1.0 if flag is jax.debug_nans else 0.0)))(X)


# ----------------------------------------------------------------------------------------------------------------------
# What has no derivative, or only one way


def halved(x):
    """x until nothing in it is above 1: nobody can go back through that."""
    return lax.while_loop(lambda c: (c > 1).any(), lambda c: c * 0.5, x)


def looped_mask(w, x):
    return jnp.where(halved(conv(x, w)) > 0.2, conv(x, w), 0).sum()


def looped_weight(w, x):
    return (conv(x, w) * lax.stop_gradient(halved(conv(x, w)))).sum()


def looped_within_jit(w, x):
    return (conv(x, w) * jax.jit(lambda k: lax.stop_gradient(k))(halved(conv(x, w)))).sum()


@pytest.mark.parametrize("f", [looped_mask, looped_weight, looped_within_jit])
@pytest.mark.parametrize("jit", [True, False])
def test_a_value_without_a_gradient_may_be_made_by_what_has_none(f, jit):
    w, x = jnp.full((1, 1, 4, 4), 0.5), jnp.linspace(-1, 1, 16).reshape(1, 2, 2, 4)
    for i in (0, 1):
        ours, plain = jax.grad(jaxconv.accelerate(f), i), jax.grad(f, i)
        assert jnp.allclose((jax.jit(ours) if jit else ours)(w, x), plain(w, x), rtol=1e-5)


def largest(w, x):
    """Of windows and 0: lax has no gradient of it."""
    return lax.reduce_window(conv(x, w), 0.0, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def looped(w, x):
    return jax.jit(halved)(conv(x, w))


@pytest.mark.parametrize("f", [largest, looped])
def test_what_only_goes_forward_goes_forward(f):
    w, x = jnp.full((1, 1, 4, 4), 0.5), jnp.linspace(-1, 1, 16).reshape(1, 2, 2, 4)
    ours, plain = (jax.jvp(g, (w, x), (w, x)) for g in (jaxconv.accelerate(f), f))
    assert all(jnp.allclose(a, b, rtol=1e-5) for a, b in zip(ours, plain, strict=True))
    for g in (jaxconv.accelerate(f), f):
        with pytest.raises(ValueError, match=r"Linearization|Reverse-mode"):
            jax.grad(lambda *args, g=g: g(*args).sum())(w, x)


@pytest.mark.parametrize("shape", [(0, 2, 4), (3, 2, 0), (2, 0, 4)])
def test_a_norm_of_nothing_is_left(shape):
    def f(x):
        return (x - x.mean(1, keepdims=True)) * lax.rsqrt(x.var(1, keepdims=True) + 1e-5)

    found = jaxconv.accelerate(f)(jnp.zeros(shape))
    assert found.shape == shape


def test_the_larger_of_z_and_nothing_keeps_its_nan():
    """At an infinity 0 * z is NaN, where leaky_relu of slope 0 is not."""
    x = jnp.array([jnp.inf, -jnp.inf, 1.0, -1.0]).reshape(1, 1, 1, 4)
    w = jnp.eye(4).reshape(1, 1, 4, 4)

    def f(w, x):
        z = x * 1.0 + lax.conv_general_dilated(
            jnp.nan_to_num(x, posinf=2.0, neginf=-2.0), w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.maximum(z, 0 * z)

    for g in (jaxconv.accelerate(f), lambda w, x: jaxconv.freeze(f, w)(x)):
        assert jnp.array_equal(g(w, x), f(w, x), equal_nan=True)


# ----------------------------------------------------------------------------------------------------------------------
# Who says where something lies

PLACES = {
    "constraint": lambda f, s: lambda w, x: jax.lax.with_sharding_constraint(f(w, x), s) + 1,
    "put": lambda f, s: lambda w, x: jax.device_put(f(w, x), s) + 1,
    "jit": lambda f, s: lambda w, x: jax.jit(f, out_shardings=s)(w, x) + 1,
    "shard_map": lambda f, s: (
        lambda w, x: 2 * jax.shard_map(f, mesh=s.mesh, in_specs=(P(), s.spec), out_specs=s.spec)(w, x)
    ),
    "beside": lambda f, s: (
        lambda w, x: f(w, jax.shard_map(jnp.tanh, mesh=s.mesh, in_specs=s.spec, out_specs=s.spec)(x))
    ),
}


@pytest.mark.parametrize("in_loop", [False, True])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", ["accelerate", "freeze", "gradient"])
def test_what_names_devices_is_in_no_region(way, place, in_loop):
    """jit looks for it in a program, and compiles the program for these devices. x is on one."""
    mesh = jax.make_mesh((len(jax.devices()),), ("d",), axis_types=(AxisType.Auto,))
    f = PLACES[place](lambda w, x: jax.nn.relu(conv(x, w)), NamedSharding(mesh, P("d")))
    if in_loop:
        once = f
        f = lambda w, x: jax.lax.scan(lambda c, _: (once(w, c), None), x, None, length=2)[0]  # noqa: E731
    w, x = jnp.asarray(W), jnp.asarray(normal(3, (8, 6, 6, 4), "float32"))
    if way == "gradient":
        plain, ours = (jax.grad(lambda w, x, g=g: (g(w, x) ** 2).sum()) for g in (f, jaxconv.accelerate(f)))
    else:
        plain, ours = f, jaxconv.accelerate(f) if way == "accelerate" else lambda w, x: jaxconv.freeze(f, w)(x)
    expected, found = jax.jit(plain)(w, x), jax.jit(ours)(w, x) if way != "freeze" else ours(w, x)
    assert found.sharding.device_set == expected.sharding.device_set
    close(found, expected)


@jax.custom_jvp
def whole(x):
    return jnp.round(x).astype(jnp.int8)


@whole.defjvp
def _no_derivative(primals, tangents):
    raise TypeError("whole has no derivative")


def test_a_tangent_reaches_who_makes_integers_by_a_rule_of_its_own():
    """However deep their reader is; not who converts to integers, whose derivative is 0."""
    shift = jax.jit(lambda q: (q + 1).astype(jnp.float32))

    def f(x, y, z):
        return shift(whole(x)) + shift(y.astype(jnp.int8)) + jax.jit(whole)(z).astype(jnp.float32)

    assert joint.reaching(jax.make_jaxpr(f)(1.0, 2.0, 3.0)) == [True, False, True]
    with pytest.raises(TypeError, match="whole has no derivative"):
        jax.grad(jaxconv.accelerate(lambda x: shift(whole(x * 2)) + x))(1.5)

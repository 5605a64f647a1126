"""accelerate: upsampling by repetition becomes a broadcast, whose gradient is a sum and no scatter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxconv


def resized(shape, method="nearest"):
    return lambda x: jax.image.resize(x, shape, method)


X = np.random.default_rng(0).standard_normal((2, 4, 5, 3), np.float32)
# (function, what the report says became of it)
REPEATED = {
    "2x2": (resized((2, 8, 10, 3)), "broadcast of 2 x 2"),
    "2x3": (resized((2, 8, 15, 3)), "broadcast of 2 x 3"),
    "one_axis": (resized((2, 4, 20, 3)), "broadcast of 4"),
    "images": (resized((4, 4, 5, 3)), "broadcast of 2"),
    "indices": (lambda x: x[:, jnp.arange(8) // 2], "broadcast of 2"),
    "under_jit": (jax.jit(resized((2, 8, 10, 3))), "broadcast of 2 x 2"),
    "two_in_a_row": (lambda x: resized((2, 16, 5, 3))(resized((2, 8, 5, 3))(x)), "broadcast of 2"),
}
OTHER = {
    "no_whole_factor": resized((2, 6, 5, 3)),
    "smaller": resized((2, 2, 5, 3)),
    "linear": resized((2, 8, 10, 3), "linear"),
    "reversed": lambda x: x[:, jnp.arange(8)[::-1] // 2],
    "tiled": lambda x: x[:, jnp.arange(8) % 4],
    "integers": lambda x: resized((2, 8, 10, 3))(x.astype(jnp.int32)).astype(jnp.float32),
}


def gradient_of(f):
    return jax.grad(lambda x: jnp.sum(jnp.sin(f(x)) * jnp.cos(jnp.arange(f(x).size).reshape(f(x).shape))))


def scatters(f, *args):
    return str(jax.make_jaxpr(f)(*args)).count("scatter")


@pytest.mark.parametrize("case", REPEATED)
def test_repetition_becomes_a_broadcast(case):
    f, became = REPEATED[case]
    fast = jaxconv.accelerate(f)
    np.testing.assert_array_equal(fast(X), f(X))
    assert scatters(gradient_of(f), X) and not scatters(gradient_of(fast), X)
    np.testing.assert_allclose(gradient_of(fast)(X), gradient_of(f)(X), rtol=2e-6, atol=2e-6)
    found = jaxconv.accelerate(f).report(X)
    assert {(finding.what, finding.fused) for finding in found} == {("upsampling", became)}


@pytest.mark.parametrize("case", OTHER)
def test_other_gathers_stay(case):
    f = OTHER[case]
    fast = jaxconv.accelerate(f)
    np.testing.assert_array_equal(fast(X), f(X))
    assert str(jax.make_jaxpr(fast)(X)) == str(jax.make_jaxpr(f)(X))


def test_indices_that_are_arguments_stay():
    def f(x, indices):
        return x[:, indices]

    indices = np.repeat(np.arange(4), 2)
    np.testing.assert_array_equal(jaxconv.accelerate(f)(X, indices), f(X, indices))
    assert "gather" in str(jax.make_jaxpr(jaxconv.accelerate(f))(X, indices))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_of_half_precision(dtype):
    """What a sum of four rounds, float32 sums do not."""
    f = resized((2, 8, 10, 3))
    dy = np.random.default_rng(1).standard_normal((2, 8, 10, 3)).astype(dtype)
    (dx,) = jax.vjp(jaxconv.accelerate(f), jnp.asarray(X, dtype))[1](dy)
    exact = dy.astype(np.float64).reshape(2, 4, 2, 5, 2, 3).sum((2, 4))
    assert dx.dtype == dtype
    np.testing.assert_allclose(np.asarray(dx).astype(np.float64), exact, rtol=0, atol=4 * float(jnp.finfo(dtype).eps))


def test_maps_and_derives():
    f = jaxconv.accelerate(resized((2, 8, 10, 3)))
    xs = np.stack([X, 2 * X])
    np.testing.assert_array_equal(jax.vmap(f)(xs), np.stack([f(x) for x in xs]))
    _, tangent = jax.jvp(f, (X,), (X,))
    np.testing.assert_array_equal(tangent, f(X))


def test_between_convolutions():
    """Convolutions around it are replaced as well."""
    w = np.random.default_rng(2).standard_normal((3, 3, 3, 3)).astype(np.float32)

    def f(x, w):
        numbers = ("NHWC", "HWIO", "NHWC")
        conv = functools.partial(
            jax.lax.conv_general_dilated, window_strides=(1, 1), padding="SAME", dimension_numbers=numbers
        )
        return conv(resized((2, 8, 10, 3))(conv(x, w)), w)

    report = jaxconv.accelerate(f).report(X, w)
    assert sorted(finding.what for finding in report.replaced) == ["conv", "conv", "upsampling"]
    with jax.default_matmul_precision("highest"):  # whose convolutions run in TF32 is a question of speed
        np.testing.assert_allclose(jaxconv.accelerate(f)(X, w), f(X, w), rtol=1e-4, atol=1e-4)

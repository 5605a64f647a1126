"""Training statistics are finite wherever the mean and the variance are: sums of squares on the way would not be.

Numbers are scaled by powers of two, which round nothing, so that each result is that of moderate numbers, scaled: to
the last bit where XLA computes it.
"""

from __future__ import annotations

import functools
from typing import Any

import flax_cases
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxconv
import jaxconv.linen

C = 8
TINY = 1e-35  # an epsilon that does not count beside variances of 1e-27 and more
IMPLEMENTATIONS = ("xla", "native")


def numbers(outlier: bool, shape: tuple[int, ...] = (6, 7, 9, C)) -> np.ndarray:
    """Of which the first, which sums are taken about, may lie as far off as one of so many can."""
    x = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    if outlier:
        x *= 2.0**-12
        x[0, 0] = 4
    return x


def norm_of(shape: tuple[int, ...], mask: Any = None, **options: Any) -> Any:
    zero, one = jnp.zeros(shape[-1]), jnp.ones(shape[-1])
    return functools.partial(
        jaxconv.batchnorm,
        **{"scale": one, "bias": zero, "running_mean": zero, "running_var": one},
        **{"training": True, "momentum": 0.0, "epsilon": TINY, "mask": mask},
        **options,
    )


def test_the_first_found():
    for implementation in IMPLEMENTATIONS:
        # CUDA kernels sum up squares about an element, which must be finite themselves.
        size = 5e18 if (implementation, helpers.PLATFORM) == ("native", "cuda") else 1e19
        x = jnp.asarray([[size], [-size]])
        y, mean, var = norm_of(x.shape, implementation=implementation)(x)
        np.testing.assert_allclose(y, [[1], [-1]], rtol=1e-6)
        np.testing.assert_allclose([*mean, *var], [0, size**2], rtol=1e-6)


@pytest.mark.parametrize("exponent", [-25, 40, 60, 63])  # variances of 1e-15 to 8e37
@pytest.mark.parametrize("outlier", [False, True])
@pytest.mark.parametrize("kind", ["batchnorm", "masked", "conv_batchnorm", "mesh"])
def test_batchnorms_statistics(kind, outlier, exponent):
    x, factor = numbers(outlier), np.float32(2.0) ** exponent
    f = norm_of(x.shape, implementation="xla")
    if kind == "masked":
        f = norm_of(x.shape, mask=np.arange(9)[:, None] != 4)
    if kind == "conv_batchnorm":
        given = f.keywords

        def f(x: Any) -> Any:
            w = jnp.eye(C)[None, None]
            return jaxconv.conv_batchnorm(x, w, **{k: v for k, v in given.items() if k != "mask"}, precision="highest")

    if kind == "mesh":
        if len(jax.devices()) < 2:
            pytest.skip("a mesh takes two devices")
        mesh = jax.make_mesh((2,), ("n",), axis_types=(AxisType.Explicit,))
        one = f

        def f(x: Any) -> Any:
            with jax.set_mesh(mesh):
                return one(jax.device_put(x, NamedSharding(mesh, PartitionSpec("n"))))

    f = f if kind == "mesh" else jax.jit(f)
    (y, mean, var), (y0, mean0, var0) = f(jnp.asarray(x * factor)), f(jnp.asarray(x))
    np.testing.assert_array_equal(mean, mean0 * factor)
    np.testing.assert_array_equal(var, np.asarray(var0, np.float64) * np.float64(factor) ** 2)
    np.testing.assert_array_equal(y, y0)
    if kind != "masked":
        np.testing.assert_allclose(var0, np.var(x.astype(np.float64), (0, 1, 2)), rtol=1e-3 if outlier else 1e-5)


@pytest.mark.parametrize("exponent", [-25, 40, 60, 63])
@pytest.mark.parametrize("outlier", [False, True])
@pytest.mark.parametrize("norm", [functools.partial(jaxconv.groupnorm, groups=2), jaxconv.layernorm])
def test_groupnorms_and_layernorms_statistics(norm, outlier, exponent):
    x, factor = numbers(outlier), np.float32(2.0) ** exponent
    if outlier:
        x[0, 0, 0, 1:] = 0  # a row of equal numbers has no variance
    f = jax.jit(functools.partial(norm, epsilon=TINY, implementation="xla"))
    y, y0 = f(jnp.asarray(x * factor)), f(jnp.asarray(x))
    np.testing.assert_array_equal(y, y0)
    assert np.isfinite(y).all() and np.abs(y).max() > 1


@pytest.mark.parametrize("exponent", [-25, 60])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients(implementation, exponent):
    x, factor = numbers(False, (40, C)), np.float32(2.0) ** exponent
    ways = {
        "batchnorm": lambda x: norm_of(x.shape, implementation=implementation)(x)[0],
        "groupnorm": functools.partial(jaxconv.groupnorm, groups=2, epsilon=TINY, implementation=implementation),
        "layernorm": functools.partial(jaxconv.layernorm, epsilon=TINY, implementation=implementation),
    }
    for name, f in ways.items():
        gradient = jax.jit(jax.grad(lambda x, f=f: jnp.sum(jnp.sin(f(x) * jnp.arange(1.0, C + 1)))))
        scaled, plain = gradient(jnp.asarray(x * factor)) * factor, gradient(jnp.asarray(x))
        # Native code's factor of x - mean, about rstd squared, is below float32's normal numbers at the largest scale.
        rtol = 1e-5 if (name, implementation) != ("batchnorm", "native") else 1e-2
        np.testing.assert_allclose(scaled, plain, rtol=0, atol=rtol * float(jnp.abs(plain).max()), err_msg=name)


def test_a_batch_of_unknown_size():
    x = numbers(False)
    f = lambda x: norm_of(x.shape, implementation="xla")(x)  # noqa: E731
    (spec,) = jax.export.symbolic_args_specs((jnp.asarray(x),), ("n, 7, 9, 8",))
    exported = jax.export.export(jax.jit(f))(spec)
    for a, b in zip(exported.call(jnp.asarray(x * 2.0**60)), f(jnp.asarray(x * 2.0**60)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(jnp.abs(b).max()))


@pytest.mark.parametrize("name", ["BatchNorm", "GroupNorm", "LayerNorm"])
def test_modules(name):
    x = jnp.asarray(numbers(False) * np.float32(2.0) ** 60)
    module = getattr(jaxconv.linen, name)(epsilon=TINY, **({"num_groups": 2} if name == "GroupNorm" else {}))
    call = {"use_running_average": False} if name == "BatchNorm" else {}
    y, _ = module.init_with_output(flax_cases.KEY, x, **call)
    assert bool(jnp.all(jnp.isfinite(y)))
    np.testing.assert_allclose(jnp.mean(y * y), 1, rtol=1e-5)

"""Whether an installed jaxconv works: nothing but its own requirements is needed.

    python .ci/smoke.py [--cuda]

Prints what was found; fails where the package is not an installed one, where native code does not run or gives other
numbers than XLA, where a gradient or an export fails, or the types are missing; with --cuda also where the CUDA code is
not loaded (for that no driver is needed).
"""

from __future__ import annotations

import functools
import importlib.metadata
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jaxconv


def main() -> None:
    folder = pathlib.Path(jaxconv.__file__).parent
    assert not (folder.parent / "CMakeLists.txt").exists(), f"{folder} is a source folder, not an installed package"
    assert jaxconv.__version__ == importlib.metadata.version("jaxconv")
    assert (folder / "py.typed").exists() and list((folder / "tuning").glob("*.json"))
    print(jaxconv.info())
    assert "--cuda" not in sys.argv or "CUDA code: loaded" in jaxconv.info()

    keys = jax.random.split(jax.random.key(0), 3)
    x, w = jax.random.normal(keys[0], (2, 9, 9, 8)), jax.random.normal(keys[1], (3, 3, 1, 8))
    b, v = jax.random.normal(keys[2], (8,)), jnp.ones(8)

    def model(x: jax.Array, w: jax.Array, b: jax.Array, implementation: str | None) -> jax.Array:
        x = jaxconv.conv2d(x, w, b, groups=8, activation="silu", implementation=implementation)
        x, *_ = jaxconv.batchnorm(x, v, b, 0 * v, v, training=True, residual=x, implementation=implementation)
        return jaxconv.dense(x, jnp.eye(8), b, activation="relu", implementation=implementation)

    def loss(*args: jax.Array, implementation: str | None) -> jax.Array:
        return jnp.sum(model(*args, implementation) ** 2)

    results = {
        name: jax.jit(jax.value_and_grad(functools.partial(loss, implementation=name), (0, 1, 2)))(x, w, b)
        for name in ("native", "xla", None)
    }
    for name in ("native", None):
        for ours, xla in zip(jax.tree.leaves(results[name]), jax.tree.leaves(results["xla"]), strict=True):
            largest = max(float(jnp.abs(xla).max()), 1.0)
            np.testing.assert_allclose(ours, xla, rtol=0, atol=1e-3 * largest)
    native = jax.jit(functools.partial(model, implementation="native"))
    assert "jaxconv_conv_v" in native.lower(x, w, b).as_text()
    exported = jax.export.export(native, disabled_checks=jaxconv.export_checks())(x, w, b)
    np.testing.assert_array_equal(jaxconv.check_exported(exported).call(x, w, b), native(x, w, b))
    print(jaxconv.explain(functools.partial(model, implementation=None))(x, w, b))
    print(f"smoke: jaxconv {jaxconv.__version__} works on Python {sys.version.split()[0]}, jax {jax.__version__}")


if __name__ == "__main__":
    main()

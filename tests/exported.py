"""Programs that one version of JAX exports and another loads; tests/matrix.py runs both.

python tests/exported.py export FOLDER      # writes FOLDER/<jax version>.<name>.<form>.bin, with what it gives
python tests/exported.py load FOLDER        # loads and runs all of FOLDER; a line of JSON for each
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

import jaxconv

X = np.linspace(-1, 1, 2 * 6 * 6 * 4, dtype=np.float32).reshape(2, 6, 6, 4)
W = np.cos(np.arange(3 * 3 * 4 * 4, dtype=np.float32)).reshape(3, 3, 4, 4)
B = np.arange(4, dtype=np.float32)


def model(implementation: str, x: Any, w: Any, b: Any) -> Any:
    """Every kind of kernel."""
    x = jaxconv.conv2d(x, w, b, activation="gelu", implementation=implementation)
    zeros, ones = jnp.zeros_like(b), jnp.ones_like(b)
    options: dict[str, Any] = dict(implementation=implementation)
    x, mean, var = jaxconv.batchnorm(x, ones, b, zeros, ones, training=True, activation="relu", **options)
    x, _, _ = jaxconv.batchnorm(x, ones, b, mean, var, training=False, **options)
    return jaxconv.dense(x, w[0, 0], b, activation="tanh", **options)


def programs() -> dict[str, Any]:
    def native(*args: Any) -> Any:
        return model("native", *args)

    return {
        "native": native,
        "native_gradient": jax.grad(lambda *args: jnp.sum(native(*args) ** 2), (0, 1, 2)),
        "xla": lambda *args: model("xla", *args),
    }


def main() -> None:
    command, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    if command == "export":
        for name, f in programs().items():
            exported = export.export(jax.jit(f), disabled_checks=jaxconv.export_checks())(X, W, B)
            for form, program in (("plain", exported), ("portable", jaxconv.portable_exported(exported))):
                file = folder / f"{jax.__version__}.{name}.{form}.bin"
                file.write_bytes(program.serialize(vjp_order=1))
                np.savez(file.with_suffix(".npz"), *jax.tree.leaves(jax.jit(f)(X, W, B)))
        return
    for file in sorted(folder.glob("*.bin")):
        what = {"file": file.name, "jax": jax.__version__, "error": None}
        try:
            loaded = jaxconv.check_exported(export.deserialize(bytearray(file.read_bytes())))
            results = jax.tree.leaves(loaded.call(X, W, B))
            with np.load(file.with_suffix(".npz")) as expected:
                for result, key in zip(results, expected.files, strict=True):
                    # The same kernels; XLA's own operations between them are another version's.
                    np.testing.assert_allclose(result, expected[key], rtol=0, atol=2e-4 * np.abs(expected[key]).max())
        except Exception as error:
            what["error"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
        print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()

"""The fleet: programs as people write them, a module for each kind of task, and one for each library that is not Flax.

Each module has `MODELS`. A module whose library cannot be imported is left out, and `missing` says so.
"""

from __future__ import annotations

import importlib
import importlib.util
import os

from benchmarks.fleet_models.model import Model

MODULES = {  # module: the package that its models need
    "classification": "flax",
    "boards": "flax",
    "reinforcement": "flax",
    "detection": "flax",
    "segmentation": "flax",
    "generation": "flax",
    "restoration": "flax",
    "volumes": "flax",
    "sound": "flax",
    "simulation": "flax",
    "of_haiku": "haiku",
    "of_equinox": "equinox",
    "of_keras": "keras",
}


def _importable(package: str) -> bool:
    """Keras counts where it runs on JAX, which it is asked for unless the environment says otherwise."""
    if importlib.util.find_spec(package) is None:
        return False
    if package == "keras":
        os.environ.setdefault("KERAS_BACKEND", "jax")
        return importlib.import_module("keras").backend.backend() == "jax"
    return True


def missing() -> list[str]:
    """Packages whose models are left out."""
    return [package for package in dict.fromkeys(MODULES.values()) if not _importable(package)]


def models() -> dict[str, Model]:
    """{name: model} of all libraries that can be imported."""
    found: dict[str, Model] = {}
    left = missing()
    for module, package in MODULES.items():
        if package not in left:
            for model in importlib.import_module(f"{__name__}.{module}").MODELS:
                assert model.name not in found, model.name
                found[model.name] = model
    return found

"""scikit-build-core's build backend, which also asks for NVIDIA's nvcc wheels where a build needs them.

pip builds in an environment of its own. The nvcc that jax[cuda13] brings is not in it, and lacks the headers of CCCL.
"""

from __future__ import annotations

import glob
import os
import shutil
import sys
from collections.abc import Callable
from typing import Any

from scikit_build_core import build as scikit
from scikit_build_core.build import *  # noqa: F403


def nvcc_wheels() -> list[str]:
    """What the CUDA code is built with, where it is built and this machine has no nvcc. CMakeLists.txt looks in the
    same places for a GPU and for an nvcc."""
    asked = os.environ.get("JAXCONV_CUDA", "AUTO")
    build = asked == "ON" or (asked == "AUTO" and has_gpu())
    if not build or has_nvcc() or sys.version_info < (3, 11):  # pip refuses an older Python, but asks this first
        return []
    import environment  # reads pyproject.toml, which needs Python 3.11

    return environment.needs("nvcc")


def has_gpu() -> bool:
    return any(map(glob.glob, ("/proc/driver/nvidia/gpus/*", "/dev/nvidia[0-9]*", "/dev/dxg")))


def has_nvcc() -> bool:
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [os.path.join(home, "bin") for home in homes if home]
    path = os.pathsep.join([*folders, os.environ.get("PATH", os.defpath)])
    return bool(os.environ.get("CUDACXX")) or shutil.which("nvcc", path=path) is not None


def _with_nvcc(requires: Callable[..., list[str]]) -> Callable[..., list[str]]:
    def and_nvcc(config_settings: dict[str, Any] | None = None) -> list[str]:
        return [*requires(config_settings), *nvcc_wheels()]

    return and_nvcc


get_requires_for_build_wheel = _with_nvcc(scikit.get_requires_for_build_wheel)
get_requires_for_build_editable = _with_nvcc(scikit.get_requires_for_build_editable)

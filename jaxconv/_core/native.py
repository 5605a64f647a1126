"""Loads the compiled modules, registers their custom-call targets, and says clearly why one is missing."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import pathlib
import re
from types import ModuleType

import jax
import jaxlib


def running_ffi_api() -> tuple[int, int] | None:
    """The XLA FFI version of the running jaxlib, read from the headers it ships; None where it ships none."""
    spec = importlib.util.find_spec("jaxlib")
    for folder in spec.submodule_search_locations or () if spec else ():
        header = pathlib.Path(folder) / "include" / "xla" / "ffi" / "api" / "c_api.h"
        if header.exists():
            text = header.read_text()
            found = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
            if all(found):
                return int(found[0][1]), int(found[1][1])  # type: ignore[index]
    return None


def check_ffi_api(built: tuple[int, int], running: tuple[int, int] | None) -> None:
    """Raises ImportError if the compiled modules are newer than the running jaxlib.

    Registering such a module would keep JAX's CPU backend from starting at all; an older one always runs.
    """
    if running is not None and built > running:
        raise ImportError(
            f"jaxconv was compiled against XLA FFI {built[0]}.{built[1]}, but jaxlib {jaxlib.__version__} "
            f"runs {running[0]}.{running[1]}. Reinstall jaxconv in this environment, or upgrade jaxlib."
        )


def _blas() -> tuple[int, int]:
    """Addresses of SciPy's sgemm and dgemm (Fortran interface), the BLAS that jaxlib itself uses for LAPACK."""
    from scipy.linalg import cython_blas

    get_name = ctypes.pythonapi.PyCapsule_GetName
    get_name.restype, get_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    capsules = [cython_blas.__pyx_capi__[name] for name in ("sgemm", "dgemm")]
    sgemm, dgemm = (get_pointer(capsule, get_name(capsule)) for capsule in capsules)
    return sgemm, dgemm


def _why_no_cpu(folder: pathlib.Path, error: ImportError) -> str:
    """What to do where the compiled CPU module of the package in `folder` cannot be imported."""
    if importlib.util.find_spec("jaxconv._cpu") is not None:
        return f"jaxconv's compiled CPU module cannot be loaded: {error}"
    if (folder.parent / "CMakeLists.txt").exists():
        return (
            f"Python imports jaxconv from its source folder {folder}, which holds no compiled modules. An installed "
            f"jaxconv is found where Python is started outside {folder.parent}; `make install` (or `pip install -e .`) "
            f"makes the source folder itself work."
        )
    return f"{folder} holds no compiled modules: jaxconv was copied there, not installed. Reinstall it with pip."


def _load_cpu() -> ModuleType:
    try:
        from jaxconv import _cpu
    except ImportError as error:
        raise ImportError(_why_no_cpu(pathlib.Path(__file__).parent.parent, error)) from None
    check_ffi_api(_cpu.ffi_api(), running_ffi_api())
    _cpu.set_blas(*_blas())
    for name, handler in _cpu.registrations().items():
        jax.ffi.register_ffi_target(name, handler, platform="cpu")
    return _cpu


def _load_cuda() -> tuple[ModuleType | None, str]:
    try:
        from jaxconv import _cuda
    except ImportError as error:
        if importlib.util.find_spec("jaxconv._cuda") is None:
            why = importlib.import_module("jaxconv._build").WITHOUT_CUDA  # written by CMakeLists.txt
            return None, f"jaxconv was built without CUDA: {why}"
        return None, f"jaxconv's CUDA module cannot be loaded: {error}"
    check_ffi_api(_cuda.ffi_api(), running_ffi_api())
    for name, handler in _cuda.registrations().items():
        jax.ffi.register_ffi_target(name, handler, platform="CUDA")
    return _cuda, ""


cpu = _load_cpu()
cuda, cuda_missing = _load_cuda()  # `cuda_missing`: why `cuda` is None


def missing(platform: str) -> str | None:
    """Why there is no native code for `platform` ("cpu", "cuda"), or None where there is."""
    if platform == "cpu":
        return None
    if platform == "cuda":
        return cuda_missing or None
    return f"jaxconv has no native code for {platform}"


def runs_on(capability: tuple[int, int]) -> bool:
    """Whether the CUDA module holds code for a compute capability: machine code of its major version, or PTX for an
    older one, which the driver compiles."""
    return any(_covers(name, capability) for name in cuda.architectures()) if cuda is not None else True


def code_for(capability: tuple[int, int]) -> tuple[int, int]:
    """The compute capability whose kernels run on a GPU of this one: of a Hopper GPU, where the module holds no code
    for Hopper but PTX for an older one, that of Ampere, as `CurrentDevice` in cuda/core/device.cc has it."""
    if cuda is None or capability[0] != 9 or any(name.startswith("90") for name in cuda.architectures()):
        return capability
    return (8, 0)


def _covers(architecture: str, capability: tuple[int, int]) -> bool:
    """`architecture` as CMake writes it: "80-real", "90a-real", "120-virtual", "80" (both)."""
    name, _, kind = architecture.partition("-")
    specific = not name.isdigit()
    digits = name.rstrip("af")
    major, minor = int(digits[:-1]), int(digits[-1])
    if specific:
        return capability == (major, minor)
    machine_code = kind != "virtual" and capability[0] == major and capability[1] >= minor
    return machine_code or (kind != "real" and capability >= (major, minor))

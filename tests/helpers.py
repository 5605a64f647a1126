"""Small things that several test files need."""

from __future__ import annotations

import collections
import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxconv
from jaxconv import _plan
from jaxconv._core import primitives
from jaxconv._core.activations import Activation
from jaxconv._plan import Device

PLATFORM = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
DEVICE = _plan.Device.current(PLATFORM)
HOPPER = PLATFORM == "cuda" and DEVICE.compute_capability == (9, 0)  # the GPU, and the module's code
# Of programs for an H200: on a GPU they are lowered for that one.
with_hoppers_code = pytest.mark.skipif(
    PLATFORM == "cuda" and not HOPPER, reason="the GPU, or the module, has no code for compute capability 9.0"
)

# Plans are data: those for these are made where there is no GPU, with the fixture code_for_gpus.
H200 = _plan.Device("cuda", "NVIDIA H200", (9, 0), 132)
H100 = _plan.Device("cuda", "NVIDIA H100 80GB HBM3", (9, 0), 132)
A100 = _plan.Device("cuda", "NVIDIA A100-SXM4-80GB", (8, 0), 108)

# float64 has native code on the CPU only.
DTYPES = ("float32", "bfloat16", "float16") + (("float64",) if PLATFORM == "cpu" else ())
# Where checking derivatives at all needs float64 but the platform's native code has none, XLA's path is checked.
NATIVE_IN_FLOAT64 = ("native",) if PLATFORM == "cpu" else ()

# Every activation, and every form in which one is given.
ACTIVATIONS = (
    None,
    "relu",
    "relu6",
    "leaky_relu",
    ("leaky_relu", 0.5),
    ("leaky_relu", -0.5),
    "elu",
    "tanh",
    "sigmoid",
    "silu",
    "gelu",
    "gelu_exact",
    "hard_swish",
    Activation("tanh"),
)
NAMED_ACTIVATIONS = tuple(a for a in ACTIVATIONS if a is None or isinstance(a, (str, tuple)))


def label(value: Any) -> str:
    """A parameter's name in a test's id."""
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return "_".join(map(str, value))
    return str(getattr(value, "name", value))


@contextlib.contextmanager
def types_of(dtype: str) -> Iterator[None]:
    """64-bit types on for float64, and otherwise off, as users run."""
    with jax.enable_x64(dtype == "float64"):
        yield


def integers(seed: int, shape: tuple[int, ...], largest: int = 2) -> np.ndarray:
    """Integers in [-largest, largest], as float64."""
    return np.random.default_rng(seed).integers(-largest, largest + 1, shape).astype(np.float64)


def normal(seed: int, shape: tuple[int, ...], dtype: str = "float64") -> np.ndarray:
    """Normal numbers that `dtype` holds exactly, as float64."""
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(dtype)).astype(np.float64)


def of_cpu(f: Callable[..., Any], *args: Any) -> Any:
    """f's results by XLA on the CPU, as NumPy arrays: for programs that XLA compiles for no GPU."""
    with jaxconv.disabled(), jax.default_device(jax.devices("cpu")[0]):
        return jax.tree.map(np.asarray, jax.jit(f)(*args))


def calls(f: Callable[..., Any], *args: Any) -> collections.Counter[str]:
    """How often the compiled f calls each of jaxconv's targets: {"conv_fprop": 1, ...}, counted in the HLO."""
    return targets(jax.jit(f).lower(*args).compile().as_text())


# Texts of programs hold more than programs: paths of files, names of functions, primitives and variables. So tests look
# at what is called and which operations there are, never for a word anywhere.


def targets(text: str) -> collections.Counter[str]:
    """How often a program calls each of jaxconv's targets: {"conv_fprop": 1, ...}, in HLO's text or StableHLO's."""
    return collections.Counter(re.findall(r'(?:custom_call_target="|custom_call @)jaxconv_(\w+)_v\d+\b', text))


def opcodes(text: str) -> collections.Counter[str]:
    """How often each operation occurs in HLO's text, {"convolution": 2, ...}; "all-reduce-start" is an "all-reduce".

    The type comes before it, and may be a tuple: it is the first word right before a parenthesis.
    """
    found = re.findall(r"^\s*(?:ROOT )?%?[\w.\-]+ = .*? ([a-z][a-z0-9\-]*?)(?:-start)?\(", text, re.MULTILINE)
    return collections.Counter(found)


def equations(f: Callable[..., Any], *args: Any) -> collections.Counter[str]:
    """How often each primitive occurs in f's jaxpr, at any depth; a region is what rules make of it here."""

    def walk(jaxpr: Any) -> Iterator[str]:
        for equation in jaxpr.eqns:
            if equation.primitive in primitives.REGIONS or equation.primitive.name == "jaxconv_activation_gradient":
                for inner in primitives.inner_jaxprs(equation, Device.default()):
                    yield from walk(inner)
                continue
            yield equation.primitive.name
            for value in equation.params.values():
                for inner in value if isinstance(value, (tuple, list)) else (value,):
                    inner = getattr(inner, "jaxpr", inner)
                    if hasattr(inner, "eqns"):
                        yield from walk(inner)

    return collections.Counter(walk(jax.make_jaxpr(f)(*args).jaxpr))


def same_bits(a: Any, b: Any) -> bool:
    """Whether two pytrees are equal to the last bit."""
    leaves_a, leaves_b = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(leaves_a) == len(leaves_b) and all(
        x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()
        for x, y in zip(leaves_a, leaves_b, strict=True)
    )


# 64 MiB is more than any test's arrays together: on a GPU the allocator hands out parts of it next. On a CPU the
# sizes are those of small arrays, which malloc keeps for the next request of that size.
_POISON = (16 << 20,) if PLATFORM == "cuda" else (1 << 8, 1 << 10, 1 << 12)


def poison() -> None:
    for array in [jnp.full(size, jnp.nan, jnp.float32) for size in _POISON for _ in range(2)]:
        array.block_until_ready().delete()

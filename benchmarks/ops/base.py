"""What the benchmarks ask of an op, `Case`, and what the ops' modules share.

A contender turns a case and a pass into a `Job`: a function, and its arguments made from the arrays of the case. All
of them return the same results in the same order (`Case.results`).
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import lax

from jaxconv._core import primitives

Array = jax.Array
Arrays = dict[str, Array]
# {result: (its value in float64, elements that are not determined, or None)}
Reference = dict[str, tuple[Array, Array | None]]

DTYPES = {"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32}
EPSILON = 1e-5
MOMENTUM = 0.99

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "none": lambda z: z,
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "gelu": jax.nn.gelu,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a row has besides its case and pass."""

    dtype: str  # "bf16", "f16", "f32"
    channels_last: bool = True
    precision: str | None = None


@dataclasses.dataclass(frozen=True)
class Job:
    f: Callable[..., Any]
    arguments: Callable[[Arrays], tuple[Any, ...]]
    # What `jaxconv.explain` is to look at, and the kernels in it that count; None where nothing is ours
    explained: Callable[..., Any] | None = None
    kernels: tuple[str, ...] = ()
    outputs: Callable[[Any], tuple[Array, ...]] = tuple
    block: Callable[[Any], Any] = jax.block_until_ready

    @classmethod
    def of(cls, f: Callable[..., Any], names: Sequence[str], kernels: tuple[str, ...] = ()) -> Self:
        """`f` jitted, of the arrays with these names."""
        return cls(jax.jit(f), lambda a: tuple(a[n] for n in names), f, kernels)

    @property
    def plain(self) -> Job:
        """Of XLA's functions, in which `jaxconv.explain` sees nothing."""
        return dataclasses.replace(self, explained=None, kernels=())


@dataclasses.dataclass(frozen=True)
class Rounding:
    """What correct code may be off by, of one dtype and precision."""

    u: float  # unit roundoff of the results' dtype
    u32: float
    product: Callable[[int], float]  # relative error of a sum of so many products

    def sums(self, terms: float) -> float:
        """Relative error of a float32 sum, and of a dozen operations on it."""
        return self.u32 * (16 + math.sqrt(terms))


class Case(abc.ABC):
    """A problem of an op, by its name: a frozen dataclass whose extents are written channels last.

    A row's layout is chosen when it is run.
    """

    name: str
    suite: str

    op: ClassVar[str]
    results: ClassVar[Mapping[str, tuple[str, ...]]]  # {pass: what each contender returns, in this order}
    algorithms: ClassVar[tuple[str, ...]]  # what `--algorithm all` forces
    layouts: ClassVar[tuple[str, ...]] = ("NHWC", "NCHW")  # that its arrays may have; none: of matrices, without images
    products: ClassVar[bool] = False  # of many rows: float32 then has two precisions
    # {pass: the kernels of which it measures one}; those of a pass that measures several at a time are not in its time,
    # but for a norm with its activation or residual and a max-pooling they are one choice
    measured: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    without_torch: ClassVar[str] = ""  # why PyTorch takes no part, where it does not
    call_problem: ClassVar[type | None] = None  # of the calls whose least traffic `call_bytes` knows
    depthwise: bool | property = False

    @property
    def passes(self) -> tuple[str, ...]:
        return tuple(self.results)

    @property
    @abc.abstractmethod
    def elements(self) -> int:
        """Of the arrays that a pass reads and writes once."""

    @property
    def set_elements(self) -> int:
        """Of one set of inputs, for the number of sets that no cache holds."""
        return self.elements

    @abc.abstractmethod
    def work(self, pass_: str, item: int) -> tuple[float, float]:
        """(operations, bytes, of `item` an element): each input is read once, each result written once."""

    @abc.abstractmethod
    def small(self) -> Self:
        """The same problem shrunk for CPUs and tests."""

    @abc.abstractmethod
    def arrays(self, setting: Setting, key: Array) -> Arrays:
        """One set of random arrays, made on the device. Filters are scaled so that results are of order one."""

    @abc.abstractmethod
    def ours(self, pass_: str, setting: Setting, **choice: Any) -> Job:
        """`choice` is `implementation` or `algorithm`, as the public functions take them."""

    @abc.abstractmethod
    def xla(self, pass_: str, setting: Setting) -> Job:
        """lax and jnp as Flax's layers write them."""

    def torch(self, pass_: str, setting: Setting) -> Job:
        """PyTorch, imported when this is called; raises ValueError where it has no such pass."""
        raise ValueError(self.without_torch)

    @abc.abstractmethod
    def reference(self, pass_: str, channels_last: bool, a: Arrays, y: Array) -> Reference:
        """In float64, by no code that is measured. Signs that rounding decides are taken from `y`, the first result."""

    @abc.abstractmethod
    def tolerance(self, pass_: str, result: str, rounding: Rounding) -> float:
        """The relative error (in the norm) that correct code may have in this result."""

    def kernel(self, pass_: str, setting: Setting) -> tuple[str, Any] | None:
        """(op, problem) that a row measured, or None where it measured several."""
        if pass_ not in self.measured:
            return None
        arrays = jax.eval_shape(lambda key: self.arrays(setting, key), jax.random.key(0))
        f, arguments = self.traced(pass_, setting, arrays)
        kernels = {
            (primitives.KERNELS[e.primitive].name, e.params["problem"])
            for e in primitives.equations(jax.make_jaxpr(f)(*arguments).jaxpr)
            if e.primitive in primitives.KERNELS and primitives.KERNELS[e.primitive].name in self.measured[pass_]
        }
        return next(iter(kernels)) if len(kernels) == 1 else None

    def traced(self, pass_: str, setting: Setting, arrays: Arrays) -> tuple[Any, ...]:
        """The function in which `kernel` looks, and its arguments; the arrays are shapes."""
        job = self.ours(pass_, setting)
        assert job.explained is not None
        return job.explained, job.arguments(arrays)

    @classmethod
    def call_bytes(cls, op: str, problem: Any, item: int) -> float:
        """What a call that `jaxconv.explain` lists reads and writes at least, of `item` bytes an element."""
        return item * (3 if op.endswith("_backward") else 2) * problem.size  # x to y; x and dy to dx


@dataclasses.dataclass(frozen=True)
class ImagesCase(Case):
    """Of images whose shape the results have."""

    name: str
    batch: int
    channels: int
    spatial: tuple[int, ...]

    def x_shape(self, channels_last: bool = True) -> tuple[int, ...]:
        return images(self.batch, self.spatial, self.channels, channels_last)

    @property
    def elements(self) -> int:
        """Of x: one pass over the tensor."""
        return math.prod(self.x_shape())

    @property
    def set_elements(self) -> int:
        return 2 * self.elements  # x and dy

    def shrunk(self, channels: int, batch: int = 2, **more: int) -> Self:
        spatial = tuple(min(size, 7) for size in self.spatial)
        return dataclasses.replace(self, batch=batch, channels=channels, spatial=spatial, **more)

    def images(self, setting: Setting, normal: Normal) -> Arrays:
        shape = self.x_shape(setting.channels_last)
        return {"x": normal(shape, 1.5, 0.5), "dy": normal(shape)}

    def __str__(self) -> str:
        return f"{self.batch}x{times(self.spatial)} C={self.channels}"


def images(batch: int, spatial: Sequence[int], channels: int, channels_last: bool) -> tuple[int, ...]:
    """The shape of x or y."""
    return (batch, *spatial, channels) if channels_last else (batch, channels, *spatial)


def layout_name(nd: int, channels_last: bool) -> str:
    """ "NHWC", "NCW", ..."""
    axes = "DHW"[3 - nd :]
    return f"N{axes}C" if channels_last else f"NC{axes}"


def times(extents: Sequence[int]) -> str:
    return "x".join(map(str, extents))


class Normal:
    """Random arrays one after the other, in a setting's dtype where no other is named."""

    def __init__(self, setting: Setting, key: Array):
        self._dtype, self._keys = DTYPES[setting.dtype], iter(jax.random.split(key, 8))

    def __call__(self, shape: tuple[int, ...], scale: float = 1.0, shift: float = 0.0, dtype: Any = None) -> Array:
        drawn = shift + scale * jax.random.normal(next(self._keys), shape, jnp.float32)
        return drawn.astype(dtype or self._dtype)

    def parameters(self, channels: int) -> Arrays:
        """Of a norm, float32."""
        c = (channels,)
        return {
            "scale": self(c, 0.1, 1.0, jnp.float32),
            "bias": self(c, 0.3, 0.0, jnp.float32),
            "mean": self(c, 0.2, 0.5, jnp.float32),
            "var": jnp.abs(self(c, 0.2, 2.0, jnp.float32)),
        }


def there_and_back(forward: Callable[..., tuple[Array, ...]], count: int) -> Callable[..., tuple[Array, ...]]:
    """(y, further results, gradients of the first `count` arguments) of `forward`, whose first result is y."""

    def f(*args: Array) -> tuple[Array, ...]:
        *args, dy = args  # type: ignore[assignment]

        def of_first(*first: Array) -> tuple[Array, tuple[Array, ...]]:
            y, *rest = forward(*first, *args[count:])
            return y, tuple(rest)

        y, backward, rest = jax.vjp(of_first, *args[:count], has_aux=True)
        # In training dy is computed from y: no part of the backward pass can join the forward pass.
        y, dy = lax.optimization_barrier((y, dy))
        return (y, *rest, *backward(dy))

    return f


def layer_job(
    pass_: str, forward: Callable[..., tuple[Array, ...]], names: Sequence[str], kernels: tuple[str, ...] = ()
) -> Job:
    """Of passes "fwd" and "fwd+bwd": `forward`, and with it the gradients of all its arguments."""
    if pass_ == "fwd":
        return Job.of(forward, names, kernels)
    return Job.of(there_and_back(forward, len(names)), (*names, "dy"), kernels)


# ----------------------------------------------------------------------------------------------------------------------
# References in float64

# The fastest float64 product is not worth the seconds that finding it takes.
UNTUNED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


# Jits a function of (case, pass, layout, arrays): all contenders share one compilation.
exact = functools.partial(jax.jit, static_argnums=(0, 1, 2), compiler_options=UNTUNED)


def wide(a: Array) -> Array:
    return a.astype(jnp.float64)


def product(a: Array, b: Array) -> Array:
    return jnp.dot(a, b, precision="highest")


# Roundings of random sign in a layer: product, bias, and each operation of the activation, forward and backward.
CHAIN = {"none": 2, "relu": 3, "tanh": 5, "sigmoid": 6, "silu": 10, "gelu": 14}


def activated(activation: str, z: Array) -> tuple[Array, Array]:
    """(f(z), f'(z))"""
    c = math.sqrt(2 / math.pi)
    tanh = jnp.tanh(z if activation == "tanh" else c * (z + 0.044715 * z**3))
    sigmoid = 1 / (1 + jnp.exp(-z))
    return {
        "none": (z, jnp.ones_like(z)),
        "relu": (jnp.maximum(z, 0), (z > 0).astype(z.dtype)),
        "tanh": (tanh, 1 - tanh**2),
        "sigmoid": (sigmoid, sigmoid * (1 - sigmoid)),
        "silu": (z * sigmoid, sigmoid * (1 + z * (1 - sigmoid))),
        "gelu": (0.5 * z * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * z * (1 - tanh**2) * c * (1 + 3 * 0.044715 * z**2)),
    }[activation]


def pixel_axes(nd: int, channels_last: bool) -> tuple[int, ...]:
    """The axes of an image array that are not its channels'."""
    return tuple(range(nd + 1)) if channels_last else (0, *range(2, nd + 2))

"""Dense layers, and their gradients' products."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array

import jaxconv
from benchmarks import torch_contender
from benchmarks.ops import base
from jaxconv import _problem
from jaxconv._problem import DenseProblem


@dataclasses.dataclass(frozen=True)
class MatricesCase(base.Case):
    """A product of matrices, (M, K) @ (K, N), and an activation."""

    name: str
    m: int
    k: int
    n: int
    activation: str  # "none", "relu", "gelu", "tanh"

    layouts = ()
    products = True

    @property
    def flops(self) -> int:
        """Of a product."""
        return 2 * self.m * self.k * self.n

    def small(self) -> Self:
        def shrink(extent: int) -> int:  # 64, or 40 where the extent is no multiple of 64
            return min(extent, 64 if extent % 64 == 0 else 40)

        m, k, n = shrink(self.m), shrink(self.k), shrink(self.n)
        return dataclasses.replace(self, m=max(m // (2 if self.m < self.k else 1), 1), k=k, n=n)

    def __str__(self) -> str:
        return f"{base.times((self.m, self.k, self.n))} {self.activation}"


@dataclasses.dataclass(frozen=True)
class DenseCase(MatricesCase):
    """y = activation(x @ w + b), (M, K) @ (K, N), b per column.

    dgrad: dx = dy @ w.T. wgrad: dw = x.T @ dy. These are products alone: one activation's case stands for all.
    saved: y, and what the activation was given, as where the gradient is taken.
    """

    suite: str = "core"

    op = "dense"
    results: ClassVar = {
        "fwd": ("y",),
        "saved": ("y", "z"),
        "dgrad": ("dx",),
        "wgrad": ("dw",),
        "fwd+bwd": ("y", "dx", "dw", "db"),
    }
    algorithms = _problem.DENSE_ALGORITHMS
    # fwd+bwd measures several kernels, of which each is its own choice.
    measured: ClassVar = {"fwd": ("dense",), "saved": ("dense",), "dgrad": ("matmul",), "wgrad": ("matmul",)}
    call_problem = DenseProblem

    @property
    def passes(self) -> tuple[str, ...]:
        if self.suite == "models":  # its layers are trained, and their parts are all there is
            return ("fwd" if self.activation == "none" else "saved", "dgrad", "wgrad")
        return ("fwd", "dgrad", "wgrad", "fwd+bwd") if self.activation == "relu" else ("fwd", "fwd+bwd")

    @property
    def elements(self) -> int:
        """Of x, w, b and y together."""
        return self.m * self.k + self.k * self.n + self.n + self.m * self.n

    def work(self, pass_: str, item: int) -> tuple[float, float]:
        if pass_ in ("fwd", "saved"):
            return self.flops, item * (self.elements + self.m * self.n * (pass_ == "saved"))
        if pass_ in ("dgrad", "wgrad"):
            return self.flops, item * (self.elements - self.n)
        return 3 * self.flops, item * 2 * self.elements  # x, w, b, dy read; y, dx, dw, db written

    def arrays(self, setting: base.Setting, key: Array) -> base.Arrays:
        normal = base.Normal(setting, key)
        return {
            "x": normal((self.m, self.k)),
            "w": normal((self.k, self.n), self.k**-0.5),
            "b": normal((self.n,), 0.1),
            "dy": normal((self.m, self.n)),
        }

    def ours(self, pass_: str, setting: base.Setting, **choice: Any) -> base.Job:
        options = dict(precision=setting.precision, **choice)

        def layer(x: Array, w: Array, b: Array) -> tuple[Array, ...]:
            if pass_ == "saved":
                return jaxconv.dense(x, w, b, return_preactivation=True, activation=self.activation, **options)
            return (jaxconv.dense(x, w, b, activation=self.activation, **options),)

        return _job(pass_, layer, lambda x, w: jaxconv.dense(x, w, **options))

    def xla(self, pass_: str, setting: base.Setting) -> base.Job:
        dot = functools.partial(jnp.dot, precision=setting.precision)

        def layer(x: Array, w: Array, b: Array) -> tuple[Array, Array]:
            z = dot(x, w) + b
            return base.ACTIVATIONS[self.activation](z), z

        return _job(pass_, layer, dot).plain

    def torch(self, pass_: str, setting: base.Setting) -> base.Job:
        import torch

        if pass_ == "saved":
            raise ValueError("part of a gradient, which PyTorch takes as a whole")
        functional = torch.nn.functional
        gelu = functools.partial(functional.gelu, approximate="tanh")
        activations = {"relu": functional.relu, "gelu": gelu, "tanh": torch.tanh, "none": lambda z: z}
        activation = activations[self.activation]
        if pass_ in ("dgrad", "wgrad"):
            names = ("w", "dy") if pass_ == "dgrad" else ("x", "dy")
            f = (lambda w, dy: (dy @ w.T,)) if pass_ == "dgrad" else (lambda x, dy: (x.T @ dy,))
            return torch_contender.job(f, lambda a: tuple(torch_contender.give(a[n]).detach() for n in names))
        return torch_contender.layer_job(pass_, lambda x, w, b: activation(torch.addmm(b, x, w)), ("x", "w", "b"))

    @base.exact
    def reference(self, pass_: str, channels_last: bool, a: base.Arrays, y: Array) -> base.Reference:
        x, w, b, dy = (base.wide(a[n]) for n in ("x", "w", "b", "dy"))
        if pass_ == "dgrad":
            return {"dx": (base.product(dy, w.T), None)}
        if pass_ == "wgrad":
            return {"dw": (base.product(x.T, dy), None)}
        z = base.product(x, w) + b
        value, slope = base.activated(self.activation, z)
        if pass_ in ("fwd", "saved"):
            return {"y": (value, None), "z": (z, None)}
        if self.activation == "relu":
            # y's own mask: at a z near 0 rounding decides it, and a flipped one is an error of its whole term.
            slope = (y > 0).astype(jnp.float64)
        dz = dy * slope
        dx, dw = base.product(dz, w.T), base.product(x.T, dz)
        return {"y": (value, None), "dx": (dx, None), "dw": (dw, None), "db": (jnp.sum(dz, 0), None)}

    def tolerance(self, pass_: str, result: str, rounding: base.Rounding) -> float:
        n = {"y": self.k, "z": self.k, "dx": self.n, "dw": self.m, "db": self.m}[result]
        if pass_ in ("dgrad", "wgrad"):
            return 2 * (rounding.u + rounding.product(n))
        chain = rounding.u * math.sqrt(base.CHAIN[self.activation])
        # Backward sums sum what forward sums produced.
        return 2 * (chain + rounding.product(n) + (rounding.product(self.k) if result not in ("y", "z") else 0))

    @classmethod
    def call_bytes(cls, op: str, problem: Any, item: int) -> float:
        arrays = [problem.x_shape, problem.w_shape, problem.y_shape, *[problem.y_shape] * (op == "dense_gradient")]
        return item * sum(map(math.prod, arrays))


def _job(
    pass_: str, saved: Callable[[Array, Array, Array], tuple[Array, ...]], dot: Callable[[Array, Array], Array]
) -> base.Job:
    """`saved` is the layer: y, and z where that is asked for; `dot` is it without bias and activation."""
    kernels = ("dense", "matmul")
    if pass_ in ("dgrad", "wgrad"):
        names = ("x", "w", "dy") if pass_ == "dgrad" else ("w", "x", "dy")

        def gradient(of: Array, other: Array, dy: Array) -> Array:
            f = (lambda x: dot(x, other)) if pass_ == "dgrad" else (lambda w: dot(other, w))
            return jax.linear_transpose(f, of)(dy)[0]

        return dataclasses.replace(base.Job.of(gradient, names, kernels), outputs=lambda out: (out,))

    def forward(x: Array, w: Array, b: Array) -> tuple[Array]:
        return saved(x, w, b)[:1]

    f = {"fwd": forward, "saved": saved}.get(pass_) or base.there_and_back(forward, 3)
    return base.Job.of(f, ("x", "w", "b", "dy") if pass_ == "fwd+bwd" else ("x", "w", "b"), kernels)


_CORE = tuple(
    DenseCase(f"{name}.{activation}", m, k, n, activation)
    for name, m, k, n in (
        ("mlp4k", 4096, 4096, 4096),
        ("ffn.up", 8192, 1024, 4096),
        ("ffn.down", 8192, 4096, 1024),
        ("head", 256, 2048, 1000),
        ("skinny", 64, 4096, 4096),
    )
    for activation in ("relu", "gelu", "tanh")
)

# Of few rows: classifiers' heads, a layer of a multi-layer perceptron, a transformer's.
_SERVE = tuple(
    DenseCase(f"serve.b{m}.{name}.{activation}", m, k, n, activation, suite="serve")
    for m, name, k, n, activation in (
        *((m, "head", 2048, 1000, "relu") for m in (1, 8)),
        *((m, "mlp4k", 4096, 4096, "relu") for m in (1, 8, 32)),
        (64, "ffn.up", 768, 3072, "gelu"),
        (64, "ffn.down", 3072, 768, "relu"),
    )
)

# ConvNeXt-T's blocks at batch 256, and a transformer's: rows, channels of the narrow side, of the wide one.
BLOCKS = (
    ("convnext.s1", 802816, 96, 384),
    ("convnext.s2", 200704, 192, 768),
    ("convnext.s3", 50176, 384, 1536),
    ("convnext.s4", 12544, 768, 3072),
    ("ffn", 8192, 1024, 4096),
)
CASES = (
    *_CORE,
    *(DenseCase(f"{name}.up", m, c, h, "gelu", suite="models") for name, m, c, h in BLOCKS),
    *(DenseCase(f"{name}.down", m, h, c, "none", suite="models") for name, m, c, h in BLOCKS),
    DenseCase("cpu.mlp", 512, 1024, 1024, "relu", suite="cpu"),
    *_SERVE,
)

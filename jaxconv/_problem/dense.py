"""DenseProblem: what a fused dense layer asks for, in canonical numbers."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

import jax
from jax import lax

from jaxconv._core import activations
from jaxconv._core.activations import Activation
from jaxconv._problem.parse import (
    NO_ACTIVATION,
    Precision,
    check_choice,
    epilogue,
    flag,
    implementation_for,
    number,
    parse_precision,
    same_dtype,
    shapes,
)

DenseAlgorithm = Literal["gemm", "sm90"]
DENSE_ALGORITHMS = get_args(DenseAlgorithm)


@dataclasses.dataclass(frozen=True)
class DenseProblem:
    """z = alpha * op(x) @ op(w) + beta * c + bias, y = f(z): (M, K) @ (K, N), for each of `batch` instances."""

    name: str
    dtype: str
    m: int  # may be symbolic under jax.export
    k: int
    n: int
    precision: Precision
    trans_x: bool = False  # x is stored (K, M)
    trans_w: bool = False  # w is stored (N, K)
    batch: int | None = None  # instances made by vmap; None: no instance axis anywhere
    batched: tuple[str, ...] = ()  # which of x, w, b, c have the instance axis
    alpha: float = 1.0
    beta: float = 1.0
    bias: str | None = None  # "scalar", "row" or "column"
    addend: bool = False
    activation: Activation = NO_ACTIVATION
    save_preactivation: bool = False
    implementation: str | None = None
    algorithm: str | None = None

    def _shape(self, operand: str, *shape: int) -> tuple[int, ...]:
        return (self.batch, *shape) if self.batch is not None and operand in self.batched else shape

    @property
    def x_shape(self) -> tuple[int, ...]:
        return self._shape("x", *((self.k, self.m) if self.trans_x else (self.m, self.k)))

    @property
    def w_shape(self) -> tuple[int, ...]:
        return self._shape("w", *((self.n, self.k) if self.trans_w else (self.k, self.n)))

    @property
    def b_shape(self) -> tuple[int, ...]:
        return self._shape("b", {"scalar": 1, "row": self.m, "column": self.n}[self.bias or "scalar"])

    @property
    def c_shape(self) -> tuple[int, ...]:
        return self._shape("c", self.m, self.n)

    @property
    def y_shape(self) -> tuple[int, ...]:
        return (self.m, self.n) if self.batch is None else (self.batch, self.m, self.n)

    @property
    def full_float32(self) -> bool:
        return isinstance(self.precision, tuple) and lax.Precision.HIGHEST in self.precision

    @property
    def flops(self) -> int:
        return 2 * (self.batch or 1) * self.m * self.n * self.k

    def bare(self) -> DenseProblem:
        """The same product without addend and epilogue (alpha stays)."""
        return dataclasses.replace(
            self,
            beta=1.0,
            bias=None,
            addend=False,
            activation=NO_ACTIVATION,
            save_preactivation=False,
            batched=tuple(o for o in self.batched if o in "xw"),
        )

    def fields(self) -> dict[str, Any]:
        """A dense layer's own, of problems that are more."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(DenseProblem)}

    def __str__(self) -> str:
        x, w = "T" * self.trans_x or "N", "T" * self.trans_w or "N"
        batch = "" if self.batch is None else f"{self.batch}x "
        addend = ["c"] if self.addend else []
        return " + ".join([f"{batch}{self.m}x{self.k}x{self.n} {x}{w} {self.dtype}", *addend, *epilogue(self)])

    @classmethod
    def infer(
        cls,
        name: str,
        x: jax.Array,
        w: jax.Array,
        b: jax.Array | None,
        c: jax.Array | None,
        *,
        alpha: Any,
        beta: Any,
        activation: Any,
        return_preactivation: bool,
        precision: Any,
        algorithm: Any,
        implementation: Any,
    ) -> DenseProblem:
        dtype = same_dtype(name, x=x, w=w, b=b, c=c)
        seen = shapes(x=x, w=w, b=b, c=c)
        if x.ndim < 1:
            raise ValueError(f"{name}: x has 0 dimensions, expected (..., K). {seen}")
        if w.ndim != 2:
            raise ValueError(f"{name}: w has {w.ndim} dimensions, expected 2 (K, N). {seen}")
        lead, (k, n) = x.shape[:-1], w.shape
        if x.shape[-1] != k:
            raise ValueError(f"{name}: w expects {k} input features, x has {x.shape[-1]}. {seen}")
        m = 1
        for extent in lead:
            m = m * extent
        bias = None
        if b is not None:
            if b.shape in ((), (1, 1)) or (b.shape == (1,) and n != 1):
                bias = "scalar"
            elif b.shape in ((n,), (1, n)):
                bias = "column"
            elif b.shape in (lead, (*lead, 1)):
                bias = "row"
            else:
                raise ValueError(
                    f"{name}: b has shape {b.shape}, expected a scalar, one per column ({n},) or (1, {n}), "
                    f"or one per row {tuple(lead)} or {(*lead, 1)}. {seen}"
                )
        if c is not None and c.shape != (*lead, n):
            raise ValueError(f"{name}: c has shape {c.shape}, expected {(*lead, n)}, the shape of the result. {seen}")
        precision = parse_precision(name, precision)
        check_choice(name, implementation, algorithm, DENSE_ALGORITHMS)
        implementation = implementation_for(name, precision, implementation, algorithm)
        return cls(
            name=name,
            dtype=dtype,
            m=m,
            k=k,
            n=n,
            precision=precision,
            alpha=number(name, "alpha", alpha),
            beta=number(name, "beta", beta),
            bias=bias,
            addend=c is not None,
            activation=activations.parse(name, activation),
            save_preactivation=flag(name, "return_preactivation", return_preactivation),
            implementation=implementation,
            algorithm=algorithm,
        )


@dataclasses.dataclass(frozen=True)
class GatedProblem(DenseProblem):
    """A dense layer and a gate: y = a * f(g), (M, N / 2), where a and g are the halves of z's columns."""

    first: bool = False  # f is of the first half: g is that, and a the other one
    pixels: tuple[int, ...] | None = None  # axes of the rows, as images have them, whose product is M; None: (M,)

    def _rows(self, columns: int) -> tuple[int, ...]:
        return (*((self.m,) if self.pixels is None else self.pixels), columns)

    @property
    def x_shape(self) -> tuple[int, ...]:
        return self._rows(self.k)

    @property
    def y_shape(self) -> tuple[int, ...]:
        return self._rows(self.n // 2)

    @property
    def z_shape(self) -> tuple[int, ...]:
        return self._rows(self.n)

    def layer(self) -> DenseProblem:
        """The dense layer in front of the gate."""
        return dataclasses.replace(DenseProblem(**self.fields()), activation=NO_ACTIVATION, save_preactivation=False)

    @classmethod
    def of(
        cls, p: DenseProblem, activation: Activation, first: bool, save: bool, pixels: tuple[int, ...] | None = None
    ) -> GatedProblem:
        """Of a dense layer without activation. `save`: z is a result too."""
        return cls(**{**p.fields(), "activation": activation, "save_preactivation": save}, first=first, pixels=pixels)

    def __str__(self) -> str:
        return f"{super().__str__()} + gate" + (" of the first half" if self.first else "")


@dataclasses.dataclass(frozen=True)
class GatedGradientProblem(DenseProblem):
    """The way back through a gate: dy = x @ w, da = dy * f(g), dg = dy * a * f'(g), the halves of dz, (M, 2 N)."""

    first: bool = False  # as GatedProblem's

    @property
    def z_shape(self) -> tuple[int, ...]:
        return self.m, 2 * self.n

    def product(self) -> DenseProblem:
        """That of dy."""
        return DenseProblem(**self.fields()).bare()

    @classmethod
    def of(cls, p: DenseProblem, activation: Activation, first: bool) -> GatedGradientProblem:
        """Of dy's product."""
        return cls(**{**p.fields(), "activation": activation}, first=first)

    def __str__(self) -> str:
        return f"{super().__str__()} + gate" + (" of the first half" if self.first else "")


@dataclasses.dataclass(frozen=True)
class GateProblem:
    """y = a * f(g), where a and g are the halves of z's last axis."""

    shape: tuple[int, ...]  # of z
    dtype: str
    activation: Activation
    first: bool = False  # as GatedProblem's

    @property
    def y_shape(self) -> tuple[int, ...]:
        return (*self.shape[:-1], self.shape[-1] // 2)

    def __str__(self) -> str:
        name = str(self.activation) if self.activation.name != "none" else ""
        half = "first half" if self.first else ""
        return " ".join(filter(None, ["x".join(map(str, self.shape)), self.dtype, name, half]))


@dataclasses.dataclass(frozen=True)
class MlpProblem:
    """Two dense layers, of which the second reads what the first gives."""

    first: DenseProblem
    second: DenseProblem
    save: bool = False  # whether the first one's results are results too, for the gradient

    def __str__(self) -> str:
        return f"{self.first}, then {self.second}"

    @classmethod
    def infer(
        cls,
        name: str,
        x: jax.Array,
        w1: jax.Array,
        b1: jax.Array | None,
        w2: jax.Array,
        b2: jax.Array | None,
        *,
        activation: Any,
        out_activation: Any,
        precision: tuple[Any, Any],
        return_preactivation: bool,
        algorithm: Any,
        implementation: Any,
    ) -> MlpProblem:
        same_dtype(name, x=x, w1=w1, b1=b1, w2=w2, b2=b2)
        seen = shapes(x=x, w1=w1, b1=b1, w2=w2, b2=b2)
        if x.ndim < 1:
            raise ValueError(f"{name}: x has 0 dimensions, expected (..., K). {seen}")
        for role, w, b in (("1", w1, b1), ("2", w2, b2)):
            if w.ndim != 2:
                expected = "(K, H)" if role == "1" else "(H, N)"
                raise ValueError(f"{name}: w{role} has {w.ndim} dimensions, expected 2 {expected}. {seen}")
            if b is not None and b.shape != w.shape[1:]:
                raise ValueError(f"{name}: b{role} has shape {b.shape}, expected {w.shape[1:]}. {seen}")
        if x.shape[-1] != w1.shape[0]:
            raise ValueError(f"{name}: w1 expects {w1.shape[0]} input features, x has {x.shape[-1]}. {seen}")
        if w1.shape[1] != w2.shape[0]:
            raise ValueError(f"{name}: w2 expects {w2.shape[0]} input features, w1 makes {w1.shape[1]}. {seen}")
        how = dict(alpha=1.0, beta=1.0, algorithm=algorithm, implementation=implementation)
        hidden = jax.ShapeDtypeStruct((*x.shape[:-1], w1.shape[1]), x.dtype)
        first = DenseProblem.infer(
            name, x, w1, b1, None, activation=activation, precision=precision[0], return_preactivation=False, **how
        )
        second = DenseProblem.infer(
            name,
            hidden,
            w2,
            b2,
            None,
            activation=out_activation,
            precision=precision[1],
            return_preactivation=return_preactivation,
            **how,
        )
        return cls(first, second)

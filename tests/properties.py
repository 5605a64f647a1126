"""What must hold of any problem, as cases that are drawn at random (test_properties.py, fuzz.py).

A case is a frozen dataclass whose repr makes it again; `check` raises where it does not hold. Numbers come from the
case's seed. A case that nothing can be said of (a kink of an activation lies too near) returns without a word.

    python tests/fuzz.py "Conv(...)"       # one case once more
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import random
import re
from collections.abc import Callable
from typing import Any, ClassVar
from unittest import mock

import helpers
import integer_cases
import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference as ref
from helpers import DEVICE, DTYPES, PLATFORM, types_of
from hypothesis import strategies as st
from jax import lax
from tolerance import assert_close, assert_exact, eps, integers_for, largest_integer

import jaxconv
from jaxconv import _plan
from jaxconv._core.activations import Activation, activate
from jaxconv._ops import conv as KERNELS
from jaxconv._problem import ConvProblem, SqueezeExciteProblem
from jaxconv.accelerate import rewrite
from jaxconv.joints import rules

Shape = tuple[int, ...]
Pair = tuple[int, int]

LAYOUTS = {1: ("NWC", "NCW"), 2: ("NHWC", "NCHW"), 3: ("NDHWC", "NCDHW")}
FILTERS = {1: ("WIO", "OIW"), 2: ("HWIO", "OIHW"), 3: ("DHWIO", "OIDHW")}
CONV = {1: jaxconv.conv1d, 2: jaxconv.conv2d, 3: jaxconv.conv3d}
CONV_TRANSPOSE = {1: jaxconv.conv_transpose1d, 2: jaxconv.conv_transpose2d, 3: jaxconv.conv_transpose3d}
SMOOTH = ("none", "tanh", "sigmoid", "silu", "gelu", "gelu_exact")
KINKS = {"relu": (0.0,), "leaky_relu": (0.0,), "relu6": (0.0, 6.0), "elu": (0.0,), "hard_swish": (-3.0, 3.0)}
ACTIVATIONS = (*SMOOTH, *KINKS)

# The dtype in which differences are mistakes and not rounding
WIDE = "float64" if PLATFORM == "cpu" else "float32"
AS_WRITTEN = rewrite.as_written_on_cpu  # as it is; the suite replaces it


def integers(seed: int, shape: Shape, dtype: str) -> np.ndarray:
    return helpers.integers(seed, shape, integers_for(dtype))


def normal(seed: int, shape: Shape, dtype: str) -> np.ndarray:
    return helpers.normal(seed, shape, dtype)


def near_a_kink(activation: str, z: np.ndarray, dtype: str) -> bool:
    """Whether rounding may carry a z across a kink, where the slope jumps. (Exactly 0 stays 0.)"""
    away = 64 * eps(dtype) * max(1.0, float(np.abs(z).max(initial=0)))
    return any((np.abs(z - kink) < away)[z != 0].any() for kink in KINKS.get(activation, ()))


def assert_same_numbers(ours: Any, theirs: Any, what: str, relative: float | None = None) -> None:
    """Equal trees of numbers up to `relative` of each array's largest; same structure, shapes and dtypes."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs), what
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        where = f"{what}{jax.tree_util.keystr(path)}"
        assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{where}: {a.shape} {a.dtype}, expected {b.shape} {b.dtype}"
        if not jnp.issubdtype(a.dtype, jnp.inexact):
            np.testing.assert_array_equal(a, b, err_msg=where)
            continue
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b), err_msg=f"{where}: NaNs")
        a, b = np.nan_to_num(a), np.nan_to_num(b)
        allowed = (relative or 1e-6) * max(float(np.abs(b).max(initial=0)), 1.0)
        worst = float(np.abs(a - b).max(initial=0))
        assert worst <= allowed, f"{where}: differs by {worst:.3g}, allowed {allowed:.3g}"


# ----------------------------------------------------------------------------------------------------------------------
# Convolutions


@dataclasses.dataclass(frozen=True)
class Window:
    """A convolution's geometry; the names are those that numpy_reference reads."""

    spatial: Shape
    filter: Shape
    stride: Shape
    padding: tuple[Pair, ...]
    dilation: Shape
    batch: int
    groups: int
    group_c: int
    group_k: int

    @property
    def nd(self) -> int:
        return len(self.spatial)

    @property
    def in_channels(self) -> int:
        return self.groups * self.group_c

    @property
    def out_channels(self) -> int:
        return self.groups * self.group_k

    @property
    def x_shape(self) -> Shape:
        return (self.batch, *self.spatial, self.in_channels)

    @property
    def w_shape(self) -> Shape:
        return (*self.filter, self.group_c, self.out_channels)

    @property
    def y_shape(self) -> Shape:
        return (self.batch, *ref.out_extents(self), self.out_channels)

    @property
    def options(self) -> dict[str, Any]:
        return dict(stride=self.stride, padding=self.padding, dilation=self.dilation, groups=self.groups)

    def problem(self, dtype: str, last: bool, **options: Any) -> ConvProblem:
        x, w = self.x_shape, self.w_shape
        if not last:
            x, w = (x[0], x[-1], *x[1:-1]), (w[-1], w[-2], *w[:-2])
        given: dict[str, Any] = dict.fromkeys(("activation", "algorithm", "implementation"))
        given |= dict(layout=LAYOUTS[self.nd][not last], precision="highest", return_preactivation=False)
        arrays = (jax.ShapeDtypeStruct(shape, dtype) for shape in (x, w))
        return ConvProblem.infer("conv", self.nd, *arrays, None, **{**self.options, **given, **options})


def images(a: Any, last: bool) -> Any:
    return a if last else np.moveaxis(a, -1, 1)


def filters(a: Any, last: bool) -> Any:
    return a if last else np.moveaxis(a, (-1, -2), (0, 1))


@st.composite
def windows(draw: Any, largest: int = 2000) -> Window:
    """Geometries with an output, whose arrays have a few thousand elements at most."""
    nd = draw(st.sampled_from((2, 1, 3)))
    most = {1: 40, 2: 12, 3: 6}[nd]
    axes = []
    for _ in range(nd):
        taps, dilation = draw(st.integers(1, 5 if nd < 3 else 3)), draw(st.sampled_from((1, 1, 2, 3)))
        reach = (taps - 1) * dilation + 1
        low, high = draw(st.integers(-2, reach)), draw(st.integers(-2, reach))
        least = max(1, reach - low - high, 1 - min(low, 0) - min(high, 0))
        axes.append((draw(st.integers(least, max(least, most))), taps, draw(st.integers(1, 4)), (low, high), dilation))
    spatial, window, stride, padding, dilation = zip(*axes, strict=True)
    pixels = math.prod(spatial)
    batch = draw(st.integers(0, 3))
    groups = draw(st.sampled_from((1, 1, 2, 3, 8)))
    room = max(1, largest // (max(batch, 1) * pixels * groups))
    # 4 and 8 elements are a vector, tiles begin at 16 and 32: on both sides of these.
    sizes = [s for s in (1, 1, 1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33) if s <= room] or [1]
    group_c, group_k = draw(st.sampled_from(sizes)), draw(st.sampled_from(sizes))
    return Window(spatial, window, stride, padding, dilation, batch, groups, group_c, group_k)


@dataclasses.dataclass(frozen=True)
class Conv:
    """Every kernel that can run fprop, dgrad or wgrad gives the exact result, for integers."""

    window: Window
    dtype: str
    last: bool
    seed: int

    strategy: ClassVar[Any] = lambda: st.builds(
        Conv, windows(), st.sampled_from(DTYPES), st.booleans(), st.integers(0, 99)
    )

    def check(self) -> None:
        case, dtype, last = self.window, self.dtype, self.last
        x, w, dy = (
            integers(self.seed + i, shape, dtype) for i, shape in enumerate((case.x_shape, case.w_shape, case.y_shape))
        )
        expected = {
            "fprop": images(ref.fprop(case, x, w), last),
            "dgrad": images(ref.dgrad(case, dy, w), last),
            "wgrad": filters(ref.wgrad(case, x, dy), last),
        }
        x, w, dy = images(x, last), filters(w, last), images(dy, last)
        with types_of(dtype):
            x, w, dy = (jnp.asarray(a, dtype) for a in (x, w, dy))
            problem = case.problem(dtype, last)
            for op, operands in {"fprop": (x, w), "dgrad": (dy, w), "wgrad": (x, dy)}.items():
                if np.abs(expected[op]).max(initial=0) > largest_integer(dtype):
                    continue
                plans = _plan.every(f"conv_{op}", problem, DEVICE) if case.batch else []
                for algorithm in [None, *(plan.spec for plan in plans)]:
                    p = dataclasses.replace(problem, algorithm=algorithm, implementation=algorithm and "native")
                    y = getattr(KERNELS, op)(p, *operands)
                    assert_exact(y, expected[op], f"{op} by {algorithm or 'the default'}")


@dataclasses.dataclass(frozen=True)
class ConvLayer:
    """The public convolution with bias, residual and activation, and its gradients, err no more than twice XLA's."""

    window: Window
    dtype: str
    last: bool
    activation: str
    bias: bool
    implementation: str | None
    seed: int
    residual: bool = False

    strategy: ClassVar[Any] = lambda: st.builds(
        ConvLayer,
        windows(),
        st.sampled_from(DTYPES),
        st.booleans(),
        st.sampled_from(ACTIVATIONS),
        st.booleans(),
        st.sampled_from(("native", None)),
        st.integers(0, 99),
        st.booleans(),
    )

    def check(self) -> None:
        case, dtype, last = self.window, self.dtype, self.last
        if case.batch == 0:
            return
        shapes = [case.x_shape, case.w_shape] + [(case.out_channels,)] * self.bias
        x, w, *b = (normal(self.seed + i, shape, dtype) for i, shape in enumerate(shapes))
        dy = normal(self.seed + 7, case.y_shape, dtype)
        r = normal(self.seed + 8, case.y_shape, dtype) if self.residual else None
        z = ref.fprop(case, x, w) + (b[0] if b else 0) + (0 if r is None else r)
        if near_a_kink(self.activation, z, dtype):
            return
        dz = dy * ref.slope(self.activation, z)
        references = {"y": images(ref.activate(self.activation, z), last)}
        references |= {"dx": images(ref.dgrad(case, dz, w), last), "dw": filters(ref.wgrad(case, x, dz), last)}
        references |= {"dresidual": images(dz, last)} if self.residual else {}
        references |= {"db": dz.sum(tuple(range(dz.ndim - 1)))} if b else {}
        taps, pixels = math.prod(case.filter), math.prod(case.y_shape[:-1])
        terms = {"y": taps * case.group_c, "dx": taps * case.group_k, "dw": pixels, "db": pixels}
        terms["dresidual"] = terms["y"]  # z decides the slope

        def run(implementation: str | None, x: Any, w: Any, r: Any, b: Any, dy: Any) -> dict[str, Any]:
            def f(x: Any, w: Any, r: Any, *b: Any) -> Any:
                options = dict(case.options, layout=LAYOUTS[case.nd][not last], precision="highest", residual=r)
                return CONV[case.nd](x, w, *b, activation=self.activation, implementation=implementation, **options)

            y, pull = jax.vjp(f, x, w, r, *b)
            grads = [grad for grad in pull(dy) if grad is not None]
            return dict(zip(references, (y, *grads), strict=True))

        with types_of(dtype):
            x, w, dy = (jnp.asarray(a, dtype) for a in (images(x, last), filters(w, last), images(dy, last)))
            r = None if r is None else jnp.asarray(images(r, last), dtype)
            args = (x, w, r, [jnp.asarray(v, dtype) for v in b], dy)
            ours, theirs = (jax.jit(functools.partial(run, i))(*args) for i in (self.implementation, "xla"))
        # z and dz are rounded to the dtype on the way; sums of products of them.
        largest = 1.2 * np.abs(dy).max(initial=0)  # of dz, or what it was before a saturated slope took it away
        sizes = {"y": 1 + np.abs(z).max(initial=0), "dx": largest * np.abs(w).max(initial=0), "dw": largest * 4}
        for name, reference in references.items():
            scale = sizes.get(name, largest) * (1 if name == "y" else np.sqrt(terms[name]))
            # XLA keeps some 16-bit sums in 16 bits: its error bounds ours only where it is one of rounding.
            slack = 4 if dtype in ("bfloat16", "float16") else 1
            assert_close(ours[name], theirs[name], reference, terms[name], name, scale=slack * float(scale))


@dataclasses.dataclass(frozen=True)
class ConvTranspose:
    """Transposed convolutions and their gradients: the convolution of an image with zeros between its pixels."""

    spatial: Shape
    window: Shape
    stride: Shape
    padding: tuple[Pair, ...]
    dilation: Shape
    batch: int
    groups: int
    group_c: int
    group_k: int
    last: bool
    dtype: str
    implementation: str | None
    seed: int

    @staticmethod
    @st.composite
    def strategy(draw: Any) -> ConvTranspose:
        nd = draw(st.sampled_from((2, 1, 3)))
        axes = []
        for _ in range(nd):
            taps, dilation, stride = draw(st.integers(1, 4)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
            size = draw(st.integers(1, {1: 12, 2: 6, 3: 3}[nd]))
            reach = (taps - 1) * dilation + 1
            low = draw(st.integers(-1, reach))
            high = draw(st.integers(-1, reach))
            if (size - 1) * stride + 1 + low + high < reach or (size - 1) * stride + 1 + min(low, 0) + min(high, 0) < 1:
                low, high = reach - 1, reach - 1
            axes.append((size, taps, stride, (low, high), dilation))
        rest = [draw(st.sampled_from(of)) for of in ((1, 2), (1, 1, 2, 3), (1, 2, 3, 8), (1, 2, 3, 8))]
        last, dtype = draw(st.booleans()), draw(st.sampled_from(DTYPES))
        return ConvTranspose(
            *zip(*axes, strict=True),
            *rest,
            last,
            dtype,
            draw(st.sampled_from(("native", None))),
            draw(st.integers(0, 99)),
        )

    def check(self) -> None:
        nd, last, dtype = len(self.spatial), self.last, self.dtype
        spread = tuple((size - 1) * s + 1 for size, s in zip(self.spatial, self.stride, strict=True))
        case = Window(
            spread,
            self.window,
            (1,) * nd,
            self.padding,
            self.dilation,
            self.batch,
            self.groups,
            self.group_c,
            self.group_k,
        )
        at = (slice(None), *(slice(None, None, s) for s in self.stride))
        x = integers(self.seed, (self.batch, *self.spatial, case.in_channels), dtype)
        w, dy = integers(self.seed + 1, case.w_shape, dtype), integers(self.seed + 2, case.y_shape, dtype)
        wide = np.zeros(case.x_shape)
        wide[at] = x
        references = {
            "y": images(ref.fprop(case, wide, w), last),
            "dx": images(ref.dgrad(case, dy, w)[at], last),
            "dw": filters(ref.wgrad(case, wide, dy), last),
        }

        def run(x: Any, w: Any, dy: Any) -> Any:
            options = dict(stride=self.stride, padding=self.padding, dilation=self.dilation, groups=self.groups)
            options |= dict(layout=LAYOUTS[nd][not last], precision="highest", implementation=self.implementation)
            y, pull = jax.vjp(functools.partial(CONV_TRANSPOSE[nd], **options), x, w)
            return y, *pull(dy)

        with types_of(dtype):
            args = (jnp.asarray(a, dtype) for a in (images(x, last), filters(w, last), images(dy, last)))
            for (name, reference), actual in zip(references.items(), jax.jit(run)(*args), strict=True):
                if np.abs(reference).max(initial=0) <= largest_integer(dtype):
                    assert_exact(actual, reference, name)


# ----------------------------------------------------------------------------------------------------------------------
# Dense layers and batch-norms


@dataclasses.dataclass(frozen=True)
class Dense:
    """alpha x @ w + beta c + b, its activation and gradients."""

    lead: Shape
    k: int
    n: int
    bias: str
    addend: bool
    alpha: float
    beta: float
    activation: str
    dtype: str
    implementation: str | None
    seed: int

    strategy: ClassVar[Any] = lambda: st.builds(
        Dense,
        st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple),
        st.sampled_from((1, 2, 3, 8, 17, 64, 65, 300, 600)),
        st.sampled_from((1, 2, 3, 8, 17, 64, 65)),
        st.sampled_from(("none", "column", "row", "scalar")),
        st.booleans(),
        st.sampled_from((1.0, 0.5, -2.0, 0.0)),
        st.sampled_from((1.0, 0.5, -2.0, 0.0)),
        st.sampled_from(ACTIVATIONS),
        st.sampled_from(DTYPES),
        st.sampled_from(("native", None)),
        st.integers(0, 99),
    )

    def check(self) -> None:
        dtype, m = self.dtype, math.prod(self.lead)
        shapes = {"x": (*self.lead, self.k), "w": (self.k, self.n)}
        if self.bias != "none":
            shapes["b"] = {"column": (1, self.n), "row": (*self.lead, 1), "scalar": ()}[self.bias]
        if self.bias == "row" and not self.lead:
            return
        if self.addend:
            shapes["c"] = (*self.lead, self.n)
        given = {name: normal(self.seed + i, shape, dtype) for i, (name, shape) in enumerate(shapes.items())}
        dy = normal(self.seed + 7, (*self.lead, self.n), dtype)
        z = self.alpha * given["x"] @ given["w"]
        z = z + (self.beta * given["c"] if self.addend else 0) + given.get("b", 0)
        z = z.reshape(dy.shape)
        if near_a_kink(self.activation, z, dtype):
            return
        dz = dy * ref.slope(self.activation, z)
        rows, columns = dz.reshape(m, self.n), given["x"].reshape(m, self.k)
        references = {"y": ref.activate(self.activation, z), "x": self.alpha * dz @ given["w"].T}
        references["w"] = self.alpha * columns.T @ rows
        if "b" in given:
            references["b"] = {"column": rows.sum(0, keepdims=True), "row": dz.sum(-1, keepdims=True)}.get(
                self.bias, rows.sum()
            )
        if "c" in given:
            references["c"] = self.beta * dz

        def run(implementation: str | None, given: Any, dy: Any) -> Any:
            def f(given: Any) -> Any:
                options = dict(alpha=self.alpha, beta=self.beta, activation=self.activation, precision="highest")
                return jaxconv.dense(**given, **options, implementation=implementation)

            y, pull = jax.vjp(f, given)
            return {"y": y, **pull(dy)[0]}

        with types_of(dtype):
            args = {name: jnp.asarray(v, dtype) for name, v in given.items()}, jnp.asarray(dy, dtype)
            ours, theirs = (jax.jit(functools.partial(run, i))(*args) for i in (self.implementation, "xla"))
        terms = {"y": self.k, "x": self.n, "w": m, "b": max(m, self.n), "c": 1}
        terms["b"] = m * self.n if self.bias == "scalar" else terms["b"]
        passed = 1.2 * (1 + abs(self.alpha) + abs(self.beta)) * np.abs(dy).max(initial=0)
        largest = 2 * (1 + np.abs(z).max(initial=0) + np.abs(given.get("c", np.zeros(1))).max() * abs(self.beta))
        largest += 2 * abs(self.alpha) * np.sqrt(self.k) * 4
        for name, reference in references.items():
            scale = largest if name == "y" else 4 * passed * np.sqrt(terms[name])
            slack = 4 if dtype in ("bfloat16", "float16") else 1
            assert_close(ours[name], theirs[name], np.asarray(reference), terms[name], name, scale=slack * float(scale))


@dataclasses.dataclass(frozen=True)
class BatchNorm:
    """Batch-norms by every algorithm: y, the running statistics, and the gradients of everything."""

    shape: Shape
    axis: int
    training: bool
    activation: str
    residual: bool
    dtype: str
    offset: float
    seed: int

    @staticmethod
    @st.composite
    def strategy(draw: Any) -> BatchNorm:
        shape = draw(st.lists(st.sampled_from((1, 2, 3, 4, 5, 7, 8, 9, 16, 17)), min_size=2, max_size=4).map(tuple))
        axis = draw(st.integers(-1, len(shape) - 1))
        return BatchNorm(
            shape,
            axis,
            draw(st.booleans()),
            draw(st.sampled_from(ACTIVATIONS)),
            draw(st.booleans()),
            draw(st.sampled_from(DTYPES)),
            draw(st.sampled_from((0.0, 1.0, 100.0))),
            draw(st.integers(0, 99)),
        )

    def check(self) -> None:
        shape, dtype = self.shape, self.dtype
        axis = self.axis % len(shape)
        axes = tuple(a for a in range(len(shape)) if a != axis)
        n, c = math.prod(shape) // shape[axis], shape[axis]
        if self.training and n < 4:  # the variance of a few numbers may be next to nothing
            return
        wide = "float64" if dtype == "float64" else "float32"
        offset = self.offset if dtype in ("float32", "float64") else 0.0
        x = (normal(self.seed, shape, dtype) + offset).astype(jnp.dtype(dtype)).astype(np.float64)
        given = {"x": x}
        given |= {name: normal(self.seed + i, (c,), wide) for i, name in enumerate(("scale", "bias"), 1)}
        given["running_mean"] = normal(self.seed + 3, (c,), wide)
        given["running_var"] = np.abs(normal(self.seed + 4, (c,), wide)) + 0.5
        given["running_var"] = given["running_var"].astype(wide).astype(np.float64)
        if self.residual:
            given["residual"] = normal(self.seed + 5, shape, dtype)
        dy = normal(self.seed + 6, shape, dtype)
        options = dict(training=self.training, momentum=0.75, epsilon=1e-2, channel_axis=self.axis)
        options["activation"] = self.activation
        y, mean, var = ref.batchnorm(**given, **options)
        s = [-1 if a == axis else 1 for a in range(len(shape))]
        m, v = (x.mean(axes), x.var(axes)) if self.training else (given["running_mean"], given["running_var"])
        rstd = 1 / np.sqrt(v + 1e-2)
        xhat = (x - m.reshape(s)) * rstd.reshape(s)
        z = xhat * given["scale"].reshape(s) + given["bias"].reshape(s) + given.get("residual", 0)
        if near_a_kink(self.activation, z * (1 + offset), wide):
            return
        dz = dy * ref.slope(self.activation, z)
        dscale, dbias = (dz * xhat).sum(axes), dz.sum(axes)
        centred = dz - dbias.reshape(s) / n - xhat * dscale.reshape(s) / n if self.training else dz
        references = {"y": y, "mean": mean, "var": var, "dx": (given["scale"] * rstd).reshape(s) * centred}
        references |= {"dscale": dscale, "dbias": dbias}
        references |= {"dresidual": dz} if self.residual else {}
        varied = ["x", "scale", "bias"] + ["residual"] * self.residual

        def run(more: Any, args: Any, dy: Any) -> Any:
            def f(some: Any) -> Any:
                return jaxconv.batchnorm(**{**args, **some}, **options, **more)

            (y, mean, var), pull = jax.vjp(f, {name: args[name] for name in varied})
            (grads,) = pull((dy, jnp.zeros_like(mean), jnp.zeros_like(var)))
            return {"y": y, "mean": mean, "var": var, **{f"d{name}": g for name, g in grads.items()}}

        with types_of(dtype):
            big = ("x", "residual")
            args = {k: jnp.asarray(v, dtype if k in big else wide) for k, v in given.items()}
            theirs = jax.jit(functools.partial(run, dict(implementation="xla")))(args, jnp.asarray(dy, dtype))
            for algorithm in self.algorithms(wide):
                more = dict(algorithm=algorithm, implementation="native")
                ours = jax.jit(functools.partial(run, more))(args, jnp.asarray(dy, dtype))
                largest = {name: float(np.abs(a).max()) for name, a in given.items()} | {"dy": float(np.abs(dy).max())}
                # As in test_batchnorm.compare: what rounding acts on.
                size = 1 + largest["x"] * float(rstd.max())
                scales = {"y": size * (1 + largest["scale"]) + largest.get("residual", 0), "mean": largest["x"]}
                scales["var"] = largest["x"] ** 2
                sums = largest["dy"] * size * np.sqrt(n) * (1 + largest["scale"])
                for name, reference in references.items():
                    scale = scales.get(name, sums * (float(rstd.max()) if name == "dx" else 1))
                    scale = 4 * largest["dy"] * size if name == "dresidual" else scale
                    assert_close(ours[name], theirs[name], reference, n, f"{name}, {algorithm}", scale=2 * scale)

    def algorithms(self, wide: str) -> list[str | None]:
        ops = ("batchnorm_train", "batchnorm_backward") if self.training else ("batchnorm_infer",)
        shapes = (
            jax.ShapeDtypeStruct(self.shape, self.dtype),
            *[jax.ShapeDtypeStruct((self.shape[self.axis],), wide)] * 4,
        )
        options = dict(training=self.training, momentum=0.75, epsilon=1e-2, activation=None, channel_axis=self.axis)
        problem = jaxconv._problem.BatchNormProblem.infer(
            "batchnorm", *shapes, None, **options, algorithm=None, implementation=None
        )
        # A team's tile is the plan's to say, and not the same in both directions.
        known = [{plan.kernel for plan in _plan.every(op, problem, DEVICE)} for op in ops]
        return sorted(set.intersection(*known))


@dataclasses.dataclass(frozen=True)
class GroupNorm:
    """Group-norms by every algorithm: y and the gradients of everything; of instances (vmap) as of each alone."""

    shape: Shape  # (N, ..., groups * width)
    groups: int
    activation: str
    dtype: str
    offset: float
    instances: int
    seed: int

    @staticmethod
    @st.composite
    def strategy(draw: Any) -> GroupNorm:
        lead = draw(st.lists(st.sampled_from((1, 2, 3, 4, 5, 9, 17)), min_size=1, max_size=3))
        groups, width = draw(st.sampled_from((1, 2, 3, 4, 8))), draw(st.sampled_from((1, 2, 3, 4, 8, 10)))
        return GroupNorm(
            (*lead, groups * width),
            groups,
            draw(st.sampled_from(ACTIVATIONS)),
            draw(st.sampled_from(DTYPES)),
            draw(st.sampled_from((0.0, 1.0, 100.0))),
            draw(st.sampled_from((1, 1, 2))),
            draw(st.integers(0, 99)),
        )

    def check(self) -> None:
        shape, dtype, c = (self.instances, *self.shape), self.dtype, self.shape[-1]
        n, images = math.prod(self.shape[1:]) // self.groups, math.prod(self.shape[:-1])
        if n < 4:  # the variance of a few numbers may be next to nothing
            return
        wide = "float64" if dtype == "float64" else "float32"
        offset = self.offset if dtype in ("float32", "float64") else 0.0
        x = (normal(self.seed, shape, dtype) + offset).astype(jnp.dtype(dtype)).astype(np.float64)
        scale, bias = (normal(self.seed + i, (self.instances, c), wide) for i in (1, 2))
        given = [x, scale, bias, normal(self.seed + 3, shape, dtype)]
        options = dict(groups=self.groups, epsilon=1e-2, activation=self.activation)
        bare = {**options, "activation": None}
        z = np.stack([ref.groupnorm(*one[:3], **bare) for one in zip(*given, strict=True)])
        if near_a_kink(self.activation, z * (1 + offset), wide):
            return
        references = [np.stack([ref.groupnorm(*one[:3], **options) for one in zip(*given, strict=True)])]
        grads = [ref.groupnorm_gradients(*one, **options) for one in zip(*given, strict=True)]
        references += [np.stack([g[name] for g in grads]) for name in ("x", "scale", "bias")]

        def run(more: Any, *given: Any) -> Any:
            def one(x: Any, scale: Any, bias: Any, dy: Any) -> Any:
                y, pull = jax.vjp(functools.partial(jaxconv.groupnorm, **options, **more), x, scale, bias)
                return y, *pull(dy)

            return jax.vmap(one)(*given)

        with types_of(dtype):
            args = [jnp.asarray(a, t) for a, t in zip(given, (dtype, wide, wide, dtype), strict=True)]
            theirs = jax.jit(functools.partial(run, dict(implementation="xla")))(*args)
            for algorithm in self.algorithms():
                ours = jax.jit(functools.partial(run, dict(algorithm=algorithm)))(*args)
                # As of batch-norms: rstd is at most 1 / sqrt(epsilon), and what rounding acts on is x * rstd.
                size, factor = 1 + 10 * np.abs(x).max(), 1 + np.abs(scale).max()
                sums = np.abs(given[3]).max() * size * factor
                scales = (size * factor, 10 * sums, sums * np.sqrt(images), sums * np.sqrt(images))
                for what, a, b, r, s in zip(
                    ("y", "dx", "dscale", "dbias"), ours, theirs, references, scales, strict=True
                ):
                    assert_close(a, b, r, max(n, images), f"{what}, {algorithm}", scale=2 * float(s))

    def algorithms(self) -> list[str]:
        problem = jaxconv._problem.GroupNormProblem("groupnorm", self.dtype, self.shape, self.groups, 1e-2)
        ops = ("groupnorm", "groupnorm_backward")
        known = [{plan.kernel for plan in _plan.every(op, problem, DEVICE)} for op in ops]
        return sorted(set.intersection(*known))


@dataclasses.dataclass(frozen=True)
class LayerNorm:
    """Layer-norms by every algorithm: y and the gradients of everything; mapped over rows and instances, as of each."""

    shape: Shape  # (..., C)
    dtype: str
    offset: float
    instances: int
    shared: bool  # scale and bias, by the instances
    seed: int

    @staticmethod
    @st.composite
    def strategy(draw: Any) -> LayerNorm:
        lead = draw(st.lists(st.sampled_from((1, 2, 3, 5, 9, 33)), max_size=3))
        return LayerNorm(
            (*lead, draw(st.sampled_from((4, 7, 8, 12, 16, 40, 64, 96, 136, 264)))),
            draw(st.sampled_from(DTYPES)),
            draw(st.sampled_from((0.0, 1.0, 100.0))),
            draw(st.sampled_from((1, 2, 3))),
            draw(st.booleans()),
            draw(st.integers(0, 99)),
        )

    def check(self) -> None:
        shape, dtype, c = (self.instances, *self.shape), self.dtype, self.shape[-1]
        rows = math.prod(shape[:-1])
        wide = "float64" if dtype == "float64" else "float32"
        offset = self.offset if dtype in ("float32", "float64") else 0.0
        x = (normal(self.seed, shape, dtype) + offset).astype(jnp.dtype(dtype)).astype(np.float64)
        params = (c,) if self.shared else (self.instances, c)
        scale, bias = (normal(self.seed + i, params, wide) for i in (1, 2))
        dy = normal(self.seed + 3, shape, dtype)
        options = dict(groups=1, epsilon=1e-2, activation=None)
        each = [np.broadcast_to(a, (self.instances, c)) for a in (scale, bias)]
        flat = [(xi.reshape(-1, c), s, b, dyi.reshape(-1, c)) for xi, s, b, dyi in zip(x, *each, dy, strict=True)]
        grads = [ref.groupnorm_gradients(*one, **options) for one in flat]
        references = [np.stack([ref.groupnorm(*one[:3], **options) for one in flat]).reshape(shape)]
        references.append(np.stack([g["x"] for g in grads]).reshape(shape))
        of_params = [np.stack([g[name] for g in grads]) for name in ("scale", "bias")]
        references += [a.sum(0) for a in of_params] if self.shared else of_params

        def run(more: Any, x: Any, scale: Any, bias: Any, dy: Any) -> Any:
            f = functools.partial(jaxconv.layernorm, epsilon=1e-2, **more)
            mapped = jax.vmap(f, (0, None, None) if self.shared else 0)
            y, pull = jax.vjp(mapped, x, scale, bias)
            return y, *pull(dy)

        with types_of(dtype):
            args = [jnp.asarray(a, t) for a, t in zip((x, scale, bias, dy), (dtype, wide, wide, dtype), strict=True)]
            theirs = jax.jit(functools.partial(run, dict(implementation="xla")))(*args)
            for algorithm in self.algorithms():
                ours = jax.jit(functools.partial(run, dict(algorithm=algorithm)))(*args)
                # As of group-norms
                size, factor = 1 + 10 * np.abs(x).max(), 1 + np.abs(scale).max()
                sums = np.abs(dy).max() * size * factor
                scales = (size * factor, 10 * sums, sums * np.sqrt(rows), sums * np.sqrt(rows))
                for what, a, b, r, s in zip(
                    ("y", "dx", "dscale", "dbias"), ours, theirs, references, scales, strict=True
                ):
                    assert_close(a, b, r, max(c, rows), f"{what}, {algorithm}", scale=2 * float(s))

    def algorithms(self) -> list[str]:
        shape = (1, *self.shape) if len(self.shape) == 1 else self.shape
        problem = jaxconv._problem.GroupNormProblem("layernorm", self.dtype, shape, 1, 1e-2, rows=True)
        ops = ("groupnorm", "groupnorm_backward")
        known = [{plan.kernel for plan in _plan.every(op, problem, DEVICE)} for op in ops]
        return sorted(set.intersection(*known))


def with_gradients(f: Any, given: dict[str, np.ndarray], dy: np.ndarray, dtype: str) -> Any:
    """y and both statistics of f, a batch-norm beside a convolution, and the gradients of all that is given."""

    def run(args: Any, dy: Any) -> Any:
        (y, mean, var), pull = jax.vjp(f, args)
        return y, mean, var, pull((dy, jnp.ones_like(mean), jnp.ones_like(var)))

    with types_of(dtype):
        return jax.jit(run)({name: jnp.asarray(a, dtype) for name, a in given.items()}, jnp.asarray(dy, dtype))


@dataclasses.dataclass(frozen=True)
class ConvBatchNorm:
    """A convolution with its batch-norm in one call equals the two calls, forward and gradients, whatever runs them."""

    window: Window
    last: bool
    training: bool
    activation: str
    residual: bool
    implementation: str | None
    seed: int

    strategy: ClassVar[Any] = lambda: st.builds(
        ConvBatchNorm,
        windows(800),
        st.booleans(),
        st.booleans(),
        st.sampled_from(ACTIVATIONS),
        st.booleans(),
        st.sampled_from(("native", None)),
        st.integers(0, 99),
    )

    def check(self) -> None:
        case, last, dtype = self.window, self.last, WIDE
        n = math.prod(case.y_shape[:-1])
        if case.batch == 0 or n < 4:
            return
        k, layout = case.out_channels, LAYOUTS[case.nd][not last]
        given = {"x": images(normal(self.seed, case.x_shape, dtype), last)}
        given["w"] = filters(normal(self.seed + 1, case.w_shape, dtype), last)
        given |= {
            name: normal(self.seed + i, (k,), dtype) for i, name in enumerate(("scale", "bias", "running_mean"), 2)
        }
        given["running_var"] = np.abs(normal(self.seed + 5, (k,), dtype)) + 0.5
        if self.residual:
            given["residual"] = images(normal(self.seed + 6, case.y_shape, dtype), last)
        dy = images(normal(self.seed + 7, case.y_shape, dtype), last)
        # A channel of equal values (padding alone, or one tap that always meets it) has a variance of rounding errors.
        z = ref.fprop(case, np.asarray(given["x"] if last else np.moveaxis(given["x"], 1, -1)), self._w(given["w"]))
        if self.training and z.reshape(-1, k).var(0).min() < 1e-3:
            return
        norm = dict(training=self.training, momentum=0.5, epsilon=1e-2, activation=self.activation)

        def whole(args: Any) -> Any:
            options = dict(case.options, layout=layout, precision="highest", implementation=self.implementation)
            return jaxconv.conv_batchnorm(**args, **options, **norm)

        def two(args: Any) -> Any:
            args = dict(args)
            options = dict(case.options, layout=layout, precision="highest", implementation="xla")
            z = CONV[case.nd](args.pop("x"), args.pop("w"), **options)
            axis = -1 if last else 1
            return jaxconv.batchnorm(z, **args, **norm, channel_axis=axis, implementation="xla")

        ours, theirs = (with_gradients(f, given, dy, dtype) for f in (whole, two))
        if WIDE == "float32" and self.activation in KINKS:
            ours, theirs = ours[:3], theirs[:3]
        assert_same_numbers(ours, theirs, "conv_batchnorm", 1e-6 if WIDE == "float64" else 1e-3)

    def _w(self, w: np.ndarray) -> np.ndarray:
        return w if self.last else np.moveaxis(w, (0, 1), (-1, -2))


@dataclasses.dataclass(frozen=True)
class BatchNormConv:
    """A batch-norm and the convolution of its result in one call equal the two calls, forward and gradients."""

    window: Window
    last: bool
    training: bool
    activation: str
    implementation: str | None
    seed: int

    strategy: ClassVar[Any] = lambda: st.builds(
        BatchNormConv,
        windows(800),
        st.booleans(),
        st.booleans(),
        st.sampled_from(ACTIVATIONS),
        st.sampled_from(("native", None)),
        st.integers(0, 99),
    )

    def check(self) -> None:
        case, last, dtype = self.window, self.last, WIDE
        if math.prod(case.x_shape[:-1]) < 4:  # the variance of a few numbers may be next to nothing
            return
        c, layout = case.in_channels, LAYOUTS[case.nd][not last]
        x = normal(self.seed, case.x_shape, dtype)
        given = {"x": images(x, last), "w": filters(normal(self.seed + 1, case.w_shape, dtype), last)}
        given |= {
            name: normal(self.seed + i, (c,), dtype) for i, name in enumerate(("scale", "bias", "running_mean"), 2)
        }
        given["running_var"] = np.abs(normal(self.seed + 5, (c,), dtype)) + 0.5
        dy = images(normal(self.seed + 7, case.y_shape, dtype), last)
        norm = dict(training=self.training, momentum=0.5, epsilon=1e-2)
        mean, var = given["running_mean"], given["running_var"]
        if self.training:
            mean, var = (f(x.reshape(-1, c), 0) for f in (np.mean, np.var))
        z = (x - mean) / np.sqrt(var + norm["epsilon"]) * given["scale"] + given["bias"]
        if near_a_kink(self.activation, z, dtype):
            return
        norm |= {"activation": self.activation}

        def whole(args: Any) -> Any:
            options = dict(case.options, layout=layout, precision="highest", implementation=self.implementation)
            return jaxconv.batchnorm_conv(**args, **options, **norm)

        def two(args: Any) -> Any:
            args = dict(args)
            w, axis = args.pop("w"), -1 if last else 1
            a, *rest = jaxconv.batchnorm(args.pop("x"), **args, **norm, channel_axis=axis, implementation="xla")
            options = dict(case.options, layout=layout, precision="highest", implementation="xla")
            return CONV[case.nd](a, w, **options), *rest

        ours, theirs = (with_gradients(f, given, dy, dtype) for f in (whole, two))
        assert_same_numbers(ours, theirs, "batchnorm_conv", 1e-6 if WIDE == "float64" else 1e-3)


@dataclasses.dataclass(frozen=True)
class SqueezeExcite:
    """Squeeze-and-excitation by every algorithm, and as the plan has it, is the formula: y and all gradients."""

    shape: Shape  # (N, ..., C)
    hidden: int
    activation: str
    gate: str
    biases: tuple[bool, bool]
    seed: int

    @staticmethod
    @st.composite
    def strategy(draw: Any) -> SqueezeExcite:
        lead = draw(st.lists(st.sampled_from((1, 2, 3, 5, 9)), min_size=1, max_size=4))
        return SqueezeExcite(
            (*lead, draw(st.sampled_from((1, 2, 3, 4, 8, 12, 20, 40, 72)))),
            draw(st.integers(1, 9)),
            draw(st.sampled_from(ACTIVATIONS)),
            draw(st.sampled_from(("sigmoid", "hard_sigmoid"))),
            draw(st.tuples(st.booleans(), st.booleans())),
            draw(st.integers(0, 99)),
        )

    def check(self) -> None:
        dtype, c, r = WIDE, self.shape[-1], self.hidden
        x, w1, b1, w2, b2, dy = (
            normal(self.seed + i, shape, dtype)
            for i, shape in enumerate((self.shape, (c, r), (r,), (r, c), (c,), self.shape))
        )
        b1, b2 = (b if has else None for b, has in zip((b1, b2), self.biases, strict=True))
        z1 = x.reshape(self.shape[0], -1, c).mean(1) @ w1 + (0 if b1 is None else b1)
        if near_a_kink(self.activation, z1, dtype):
            return

        def run(more: dict[str, Any], dy: Any, *args: Any) -> Any:
            options = dict(activation=self.activation, gate=self.gate, **more)
            y, pull = jax.vjp(lambda *args: jaxconv.squeeze_excite(*args, **options), *args)
            return y, pull(dy)

        with types_of(dtype):
            given = [None if a is None else jnp.asarray(a, dtype) for a in (dy, x, w1, b1, w2, b2)]
            if self.gate == "hard_sigmoid":  # its kinks
                h = activate(Activation(self.activation), jnp.asarray(z1))
                z2 = np.asarray(h @ given[4]) + (0 if b2 is None else b2)
                if near_a_kink("relu6", z2 + 3, dtype):
                    return
            theirs = jax.jit(functools.partial(run, dict(implementation="xla")))(*given)
            problem = SqueezeExciteProblem(
                "squeeze_excite", dtype, self.shape, r, Activation(self.activation), self.gate
            )
            known = sorted({plan.kernel for plan in _plan.every("squeeze_excite", problem, DEVICE)})
            for more in ({}, *(dict(algorithm=algorithm) for algorithm in known)):
                ours = jax.jit(functools.partial(run, more))(*given)
                assert_same_numbers(ours, theirs, f"squeeze_excite {more}", 1e-6 if WIDE == "float64" else 1e-3)


# ----------------------------------------------------------------------------------------------------------------------
# As lax and Flax do: results, and what is refused


@contextlib.contextmanager
def full_precision() -> Any:
    with jax.default_matmul_precision("highest"):
        yield


def outcome(f: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return jax.block_until_ready(f()), None
    except Exception as error:
        return None, error


REFUSALS = (TypeError, ValueError, AssertionError)  # the last is Flax's, of channels that groups do not divide


def assert_same_outcome(ours: Callable[[], Any], theirs: Callable[[], Any], what: str, words: bool) -> Any:
    """Two results, or two refusals; with `words` with the same sentence, else ours may be of our own words and either
    kind. Returns both results, or None."""
    (a, a_error), (b, b_error) = outcome(ours), outcome(theirs)
    alike = type(a_error) is type(b_error)
    alike |= not words and isinstance(a_error, REFUSALS) and b_error is not None
    assert alike, f"{what}: ours {a_error!r}, theirs {b_error!r}"
    if b_error is not None:
        if words:
            said = [re.split(r" at 0x|\bat loc\(", str(error))[0] for error in (a_error, b_error)]
            assert said[0] == said[1], what
        return None
    return a, b


NUMBERS = {
    1: (("NWC", "WIO", "NWC"), ("NCW", "OIW", "NCW"), ("NWC", "OIW", "NWC"), ("NCW", "WIO", "NWC"), None),
    2: (("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"), ("NHWC", "OIHW", "NHWC"), ("NCHW", "HWIO", "NHWC"), None),
    3: (("NDHWC", "DHWIO", "NDHWC"), ("NCDHW", "OIDHW", "NCDHW"), ("NDHWC", "OIDHW", "NDHWC"), None),
}


@dataclasses.dataclass(frozen=True)
class Integers:
    """Convolutions of integers by every kernel, exactly: any order of axes, any window, any types."""

    types: tuple[str, str | None]
    seed: int  # of the form

    strategy: ClassVar[Any] = lambda: st.builds(
        Integers, st.sampled_from(integer_cases.TYPES), st.integers(0, 2**31 - 1)
    )

    def check(self) -> None:
        form, (left, result) = integer_cases.random_form(random.Random(self.seed)), self.types
        with jax.enable_x64(True):
            lhs, rhs = integer_cases.operands(form, left)
            want = integer_cases.by_numpy(form, lhs, rhs, result or left)
            for kernel in integer_cases.KERNELS:
                integer_cases.equal(integer_cases.natively(form, lhs, rhs, result, kernel), want)


@dataclasses.dataclass(frozen=True)
class Lax:
    """`jaxconv.conv_general_dilated`, and lax's own under `enable`, are lax's: values, shapes, types and refusals."""

    x: Shape
    w: Shape
    options: tuple[tuple[str, Any], ...]
    dtypes: tuple[str, str]
    seed: int

    @staticmethod
    @st.composite
    def strategy(draw: Any) -> Lax:
        nd = draw(st.sampled_from((2, 1, 3)))
        odd = draw(st.integers(0, 3)) == 0  # one of four has something that may not fit

        def each(values: Any) -> tuple[Any, ...]:
            return tuple(draw(st.sampled_from(values)) for _ in range(nd))

        groups = draw(st.sampled_from((1, 1, 2, 4)))
        batch_groups = draw(st.sampled_from((1, 1, 1, 2)))
        c, k = draw(st.sampled_from((1, 2, 3))), draw(st.sampled_from((1, 2, 4)))
        batch = draw(st.sampled_from((1, 2, 2, 0))) * batch_groups
        spatial, window = each((3, 4, 5, 7)), each((1, 2, 3))
        options: dict[str, Any] = dict(window_strides=each((1, 1, 2, 3)))
        padding = draw(st.sampled_from(("SAME", "VALID", "SAME_LOWER", None, None)))
        options["padding"] = padding or tuple((draw(st.integers(-2, 3)), draw(st.integers(-1, 3))) for _ in range(nd))
        if draw(st.booleans()):
            options["rhs_dilation"] = each((1, 1, 2, 3))
        if draw(st.integers(0, 2)) == 0:
            options["lhs_dilation"] = each((1, 2, 3))
            if draw(st.booleans()):
                options["window_strides"] = (1,) * nd
        options |= dict(feature_group_count=groups, batch_group_count=batch_groups)
        numbers = draw(st.sampled_from(NUMBERS[nd]))
        options["dimension_numbers"] = numbers
        if draw(st.integers(0, 3)) == 0:
            options["precision"] = draw(st.sampled_from(("highest", "default", "float32", ("high", "highest"), None)))
        if draw(st.integers(0, 5)) == 0:
            options["preferred_element_type"] = draw(st.sampled_from(("float32", "bfloat16", "float64", "int32")))
        dtype = draw(st.sampled_from(("float32", "float32", "bfloat16", "float16", "int32")))
        dtypes = (dtype, dtype)
        lhs, rhs, _ = numbers or ("NC" + "DHW"[3 - nd :], "OI" + "DHW"[3 - nd :], None)
        xs = dict(zip("DHW"[3 - nd :], spatial, strict=True)) | {"N": batch, "C": groups * c}
        ws = dict(zip("DHW"[3 - nd :], window, strict=True)) | {"I": c, "O": groups * batch_groups * k}
        x, w = tuple(xs[a] for a in lhs), tuple(ws[a] for a in rhs)
        if odd:
            what = draw(st.sampled_from(("value", "value", "value", "x", "w", "dtype", "rank")))
            if what == "value":
                name = draw(st.sampled_from(sorted(options)))
                bad = (
                    None,
                    0,
                    -1,
                    1,
                    1.5,
                    2.0,
                    "2",
                    True,
                    (),
                    (1,),
                    (1,) * (nd + 1),
                    (0,) * nd,
                    (-1,) * nd,
                    (2**31,) * nd,
                )
                bad += ((1.5,) * nd, (None,) * nd, "SAMe", "CAUSAL", "HIGH", ((1, 1),), ((1,),) * nd, ((-9, -9),) * nd)
                options[name] = draw(st.sampled_from(bad))
            elif what == "dtype":
                dtypes = (dtype, draw(st.sampled_from(("float32", "bfloat16", "int32", "bool", "complex64"))))
            elif what == "rank":
                x = (*x, 2)
            else:
                shape = list(x if what == "x" else w)
                shape[draw(st.integers(0, nd + 1))] = draw(st.sampled_from((0, 1, 5)))
                x, w = (tuple(shape), w) if what == "x" else (x, tuple(shape))
        return Lax(x, w, tuple(sorted(options.items(), key=lambda kv: kv[0])), dtypes, draw(st.integers(0, 99)))

    def check(self) -> None:
        x, w = (
            jnp.asarray(helpers.integers(self.seed + i, shape, 1), dtype)
            for i, (shape, dtype) in enumerate(zip((self.x, self.w), self.dtypes, strict=True))
        )
        if PLATFORM == "cuda" and "int32" in self.dtypes:
            return  # XLA has no integer convolutions there
        if "-" in str(dict(self.options).get("padding")) and jax.__version_info__ < (0, 12):
            return  # XLA's CPU convolutions read next to what they crop

        def run(f: Any) -> Any:
            options = dict(self.options)
            return f(x, w, options.pop("window_strides"), options.pop("padding"), **options)

        def compiled() -> Any:
            with jaxconv.enabled():
                return jax.jit(lambda x, w: run(lambda _, __, *a, **k: lax.conv_general_dilated(x, w, *a, **k)))(x, w)

        with full_precision():
            both = assert_same_outcome(
                lambda: run(jaxconv.conv_general_dilated), lambda: run(lax.conv_general_dilated), "conv", words=True
            )
            again = assert_same_outcome(compiled, lambda: run(lax.conv_general_dilated), "enabled", words=False)
        for what, found in (("conv", both), ("enabled", again)):
            if found is not None:
                # Sums of at most 27 * 8 ones: every type here holds them but bfloat16's accumulators, which XLA's are.
                assert_same_numbers(*found, what, 1e-6)


@dataclasses.dataclass(frozen=True)
class Flax:
    """A module of jaxconv.linen is Flax's: variables, results, statistics, gradients, refusals."""

    name: str
    x: Shape
    arguments: tuple[tuple[str, Any], ...]
    dtype: str
    seed: int

    @staticmethod
    @st.composite
    def strategy(draw: Any) -> Flax:
        name = draw(st.sampled_from(("Conv", "Conv", "ConvTranspose", "Dense", "BatchNorm")))
        a: dict[str, Any] = {}

        def maybe(key: str, *values: Any) -> None:
            if draw(st.integers(0, 2)) == 0:
                a[key] = draw(st.sampled_from(values))

        lead = draw(st.sampled_from(((2,), (), (2, 3), (0,))))
        if name in ("Conv", "ConvTranspose"):
            nd = draw(st.sampled_from((2, 1, 3)))
            x = (*lead, *(draw(st.sampled_from((1, 4, 5))) for _ in range(nd)), 4)
            a |= dict(features=4, kernel_size=draw(st.sampled_from(((1,) * nd, (3,) * nd, (2,) * nd, 3, (3,)))))
            maybe("strides", 1, 2, (2,) * nd, None, (2,), 0)
            maybe("kernel_dilation", 1, 2, (2,) * nd, None)
            maybe("padding", "SAME", "VALID", "CIRCULAR", 1, ((1, 0),) * nd, (1,) * nd, "CAUSAL", "REFLECT", "odd")
            maybe("use_bias", False)
            if name == "Conv":
                maybe("feature_group_count", 2, 4, 3)
                maybe("input_dilation", 2, (2,) * nd, None)
            else:
                maybe("transpose_kernel", True)
        elif name == "Dense":
            x = (*lead, 4)
            a["features"] = draw(st.sampled_from((3, 8)))
            maybe("use_bias", False)
        else:
            x = (*draw(st.sampled_from(((2,), (5,), (2, 3), (4, 2, 2)))), 4)
            a["use_running_average"] = draw(st.booleans())
            maybe("momentum", 0.5, 0.0)
            maybe("epsilon", 1e-3, 0.1)
            maybe("use_bias", False)
            maybe("use_scale", False)
            maybe("axis", -1, 1, 0, (-1,), 7)
            maybe("use_fast_variance", False)
            maybe("force_float32_reductions", False)
        maybe("dtype", "float32", "bfloat16", "float16")
        maybe("param_dtype", "float32", "bfloat16")
        dtype = draw(st.sampled_from(("float32", "float32", "bfloat16", "int32")))
        return Flax(name, x, tuple(sorted(a.items())), dtype, draw(st.integers(0, 99)))

    def check(self) -> None:
        import flax.linen as nn

        import jaxconv.linen as jn

        arguments = {k: jnp.dtype(v) if k.endswith("dtype") else v for k, v in self.arguments}
        x = jnp.asarray(helpers.normal(self.seed, self.x), self.dtype)
        if self.name == "BatchNorm" and min(x.shape) and x.size // x.shape[-1] < 4:
            return

        def run(library: Any) -> Any:
            module = getattr(library, self.name)(**arguments)
            key = jax.random.key(0, impl="unsafe_rbg")
            shapes = jax.eval_shape(module.init, key, x)
            leaves, tree = jax.tree.flatten(shapes)
            made = [jnp.asarray(1 + 0.3 * helpers.normal(i, s.shape), s.dtype) for i, s in enumerate(leaves)]
            variables = jax.tree.unflatten(tree, made)

            def apply(params: Any, x: Any) -> Any:
                return module.apply({**variables, "params": params}, x, mutable=["batch_stats"])

            @jax.jit
            def both(params: Any, x: Any) -> Any:
                if not jnp.issubdtype(x.dtype, jnp.floating):
                    return apply(params, x)
                (y, updates), pull = jax.vjp(apply, params, x)
                ones = jax.tree.map(jnp.ones_like, (y, updates))
                return y, updates, pull(ones)

            return variables, both(variables.get("params", {}), x)

        with full_precision():
            both = assert_same_outcome(lambda: run(jn), lambda: run(nn), self.name, words=False)
        if both is not None:
            narrow = max(
                [eps(str(a.dtype)) for a in jax.tree.leaves(both[1]) if jnp.issubdtype(a.dtype, jnp.floating)]
                + [eps(str(jnp.dtype(v))) for k, v in arguments.items() if k.endswith("dtype")]
                + [eps(self.dtype) if self.dtype != "int32" else 0, eps("float32")]
            )
            # Sums of at most a few hundred numbers near 1, rounded a few times on the way.
            assert_same_numbers(*both, self.name, 64 * narrow)


# ----------------------------------------------------------------------------------------------------------------------
# Transforms, composed at random


def _norm(implementation: str | None, x: Any, scale: Any, bias: Any) -> Any:
    options = dict(training=True, momentum=0.5, epsilon=0.1, activation="tanh", implementation=implementation)
    return jaxconv.batchnorm(x, scale, bias, jnp.zeros_like(scale), jnp.ones_like(scale), **options)


def _infer(implementation: str | None, x: Any, scale: Any, bias: Any) -> Any:
    options = dict(training=False, activation="silu", implementation=implementation)
    return jaxconv.batchnorm(x, scale, bias, bias, jnp.ones_like(scale), **options)[0]


def _pair(implementation: str | None, x: Any, w: Any, scale: Any) -> Any:
    options = dict(training=True, epsilon=0.1, activation="tanh", implementation=implementation, precision="highest")
    return jaxconv.conv_batchnorm(x, w, scale, scale, jnp.zeros_like(scale), jnp.ones_like(scale), **options)


def _op(function: Any, **options: Any) -> Any:
    return lambda implementation, *args: function(*args, implementation=implementation, precision="highest", **options)


# name: (f(implementation, *args), shapes of args)
FUNCTIONS: dict[str, tuple[Any, tuple[Shape, ...]]] = {
    "conv": (_op(jaxconv.conv2d, stride=2), ((2, 4, 3, 2), (3, 2, 2, 3))),
    "conv_tanh": (_op(jaxconv.conv2d, activation="tanh"), ((1, 3, 3, 2), (2, 2, 2, 3), (3,))),
    "conv_gelu_z": (
        _op(jaxconv.conv2d, activation="gelu", return_preactivation=True, layout="NCHW"),
        ((1, 2, 3, 3), (3, 2, 2, 2), (3,)),
    ),
    "conv1d_causal": (_op(jaxconv.conv1d, padding="CAUSAL", groups=3, activation="silu"), ((2, 5, 3), (3, 1, 3))),
    "conv3d_grouped": (_op(jaxconv.conv3d, groups=2), ((1, 2, 3, 2, 4), (2, 1, 2, 2, 2))),
    "conv_transpose": (_op(jaxconv.conv_transpose2d, stride=2), ((1, 2, 3, 2), (3, 3, 2, 2))),
    "dense": (_op(jaxconv.dense, activation="sigmoid"), ((3, 2), (2, 4), (4,))),
    "dense_row": (_op(jaxconv.dense, activation="elu", alpha=0.5), ((3, 2), (2, 4), (3, 1))),
    "matmul": (_op(jaxconv.dense), ((3, 2), (2, 4))),
    "mlp": (_op(jaxconv.mlp, activation="tanh"), ((3, 2), (2, 4), (4,), (4, 3), (3,))),
    "batchnorm": (_norm, ((6, 3), (3,), (3,))),
    "batchnorm_inference": (_infer, ((4, 3), (3,), (3,))),
    "conv_batchnorm": (_pair, ((2, 3, 3, 2), (2, 2, 2, 3), (3,))),
}


def total(tree: Any) -> Any:
    """A number that depends on every element, not linearly."""
    return sum(jnp.sum(jnp.sin(leaf) * (1 + i)) for i, leaf in enumerate(jax.tree.leaves(tree)))


def transformed(f: Any, shapes: tuple[Shape, ...], step: tuple[Any, ...]) -> tuple[Any, tuple[Shape, ...]]:
    """f under one transform, and the shapes of what it takes then."""
    kind, *how = step
    count = len(shapes)
    if kind == "jit":
        return jax.jit(f), shapes
    if kind == "remat":
        return jax.checkpoint(f), shapes
    if kind == "remat_dots":
        return jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable), shapes
    if kind == "grad":
        wrt = tuple(sorted({i % count for i in how[0]}))
        return jax.grad(lambda *a: total(f(*a)), wrt), shapes
    if kind == "value_and_grad":
        return jax.value_and_grad(lambda *a: total(f(*a)), how[0] % count), shapes
    if kind in ("jvp", "linearize"):
        i = how[0] % count

        def forward(*args: Any) -> Any:
            *primals, tangent = args

            def of_one(v: Any) -> Any:
                return f(*primals[:i], v, *primals[i + 1 :])

            if kind == "linearize":
                y, linear = jax.linearize(of_one, primals[i])
                return y, linear(tangent)
            return jax.jvp(of_one, (primals[i],), (tangent,))

        return forward, (*shapes, shapes[i])
    if kind == "vjp":

        def back(*args: Any) -> Any:
            y, pull = jax.vjp(f, *args)
            return y, pull(jax.tree.map(jnp.cos, y))

        return back, shapes
    if kind == "vmap":
        mask, axis, size = how
        mapped = [(mask >> i) & 1 for i in range(count)]
        mapped = mapped if any(mapped) else [1, *mapped[1:]]
        axes = [axis % (len(s) + 1) if m else None for s, m in zip(shapes, mapped, strict=True)]
        new = tuple(s if a is None else (*s[:a], size, *s[a:]) for s, a in zip(shapes, axes, strict=True))
        return jax.vmap(f, tuple(axes)), new
    if kind == "scan":

        def scanned(*args: Any) -> Any:
            def body(carry: Any, xs: Any) -> Any:
                y = f(xs[0] + carry, *xs[1:])
                return 0.1 * jnp.tanh(total(y)), y

            return lax.scan(body, jnp.zeros((), args[0].dtype), args)

        return scanned, tuple((2, *s) for s in shapes)
    if kind == "cond":
        return lambda *a: lax.cond(jnp.sum(a[0]) > 0, f, lambda *b: jax.tree.map(jnp.negative, f(*b)), *a), shapes
    if kind == "map":
        return lambda *a: lax.map(lambda xs: f(*xs), a), tuple((2, *s) for s in shapes)
    raise AssertionError(kind)


STEPS = st.one_of(
    st.sampled_from(("jit", "remat", "remat_dots", "scan", "cond", "map", "vjp")).map(lambda k: (k,)),
    st.tuples(st.just("grad"), st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple)),
    st.tuples(st.sampled_from(("value_and_grad", "jvp", "linearize")), st.integers(0, 2)),
    st.tuples(st.just("vmap"), st.integers(1, 7), st.integers(0, 4), st.sampled_from((2, 3, 1))),
)


@dataclasses.dataclass(frozen=True)
class Composed:
    """An op under transforms one inside the other: native code, the default choice and XLA give the same numbers."""

    name: str
    steps: tuple[tuple[Any, ...], ...]
    seed: int

    strategy: ClassVar[Any] = lambda: st.builds(
        Composed,
        st.sampled_from(tuple(FUNCTIONS)),
        st.lists(STEPS, min_size=1, max_size=3).map(tuple),
        st.integers(0, 99),
    )

    def check(self) -> None:
        f, first = FUNCTIONS[self.name]
        results = []
        with types_of(WIDE), full_precision():
            for implementation in ("xla", "native", None):
                g, shapes = functools.partial(f, implementation), first
                for step in self.steps:
                    g, shapes = transformed(g, shapes, step)
                args = [jnp.asarray(0.7 * normal(self.seed + i, s, WIDE), WIDE) for i, s in enumerate(shapes)]
                results.append(jax.jit(g)(*args))
        for name, result in zip(("native", "default"), results[1:], strict=True):
            assert_same_numbers(result, results[0], name, 1e-7 if WIDE == "float64" else 2e-3)


# ----------------------------------------------------------------------------------------------------------------------
# accelerate on random graphs of layers


RECOGNISED: dict[str, Any] = {
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "tanh": jnp.tanh,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "leaky_relu": jax.nn.leaky_relu,
    "elu": jax.nn.elu,
    "sigmoid": jax.nn.sigmoid,
    "hard_swish": jax.nn.hard_swish,
    "maximum": lambda z: jnp.maximum(z, 0),
    "sin": jnp.sin,  # no activation of ours
}


@dataclasses.dataclass(frozen=True)
class Layers:
    """`accelerate` of a random graph of layers is that function with its gradient, and computes no convolution twice.

    A layer takes the value before it; "keep" makes a value one of the results, "add" and "concat" take one from before;
    "loop" and "told" cut the program in two. `written`: on a CPU, as it is accelerated there, not as on a GPU.
    """

    layers: tuple[tuple[Any, ...], ...]
    wrap: str
    first: bool
    seed: int
    written: bool = False

    strategy: ClassVar[Any] = lambda: st.builds(
        Layers,
        st.lists(
            st.one_of(
                st.tuples(
                    st.just("conv"),
                    st.sampled_from((3, 1, 2)),
                    st.sampled_from((1, 2)),
                    st.sampled_from((1, 2, 4)),
                    st.sampled_from(("SAME", "VALID", "transposed")),
                ),
                st.tuples(st.just("norm"), st.sampled_from(("train", "infer", "fast", "group", "stopped", "rms"))),
                st.tuples(st.just("act"), st.sampled_from(tuple(RECOGNISED))),
                st.tuples(st.sampled_from(("add", "concat", "mul")), st.integers(1, 4)),
                st.sampled_from(("bias", "dense", "pool", "keep", "scale", "cut", "turn", "twice")).map(lambda k: (k,)),
                st.sampled_from(("loop", "told")).map(lambda k: (k,)),
            ),
            min_size=1,
            max_size=7,
        ).map(tuple),
        st.sampled_from(("none", "jit", "remat", "grad_inside", "closure")),
        st.booleans(),
        st.integers(0, 99),
        st.booleans(),
    )

    def function(self) -> tuple[Any, list[np.ndarray]]:
        """(f(params, x), params): the parameters' shapes follow from the graph, which is walked once for them."""
        made: list[np.ndarray] = []

        def parameter(params: list[Any] | None, index: list[int], *shape: int) -> Any:
            index[0] += 1
            if params is not None:
                return params[index[0] - 1]
            made.append(0.5 * normal(self.seed + index[0], shape, WIDE))
            return jnp.asarray(made[-1])

        numbers = ("NCHW", "OIHW", "NCHW") if self.first else ("NHWC", "HWIO", "NHWC")
        axis = 1 if self.first else 3

        def spread(v: Any) -> Any:
            return v[:, None, None] if self.first else v

        def walk(params: list[Any] | None, x: Any) -> Any:
            at, values, kept = [0], [x], []
            take = functools.partial(parameter, params, at)
            rest = tuple(a for a in range(4) if a != axis)
            for layer in self.layers:
                kind, *how = layer
                h, c = values[-1], values[-1].shape[axis]
                if kind == "conv":
                    taps, stride, groups, padding = how
                    g = groups if c % groups == 0 else 1
                    spatial = [s for a, s in enumerate(h.shape) if a not in (0, axis)]
                    if padding == "VALID" and min(spatial) < taps:
                        padding = "SAME"
                    w = take(4 * g, c // g, taps, taps) if self.first else take(taps, taps, c // g, 4 * g)
                    options: dict[str, Any] = dict(dimension_numbers=numbers, feature_group_count=g)
                    if padding == "transposed":
                        options["lhs_dilation"] = (stride, stride)
                        h = lax.conv_general_dilated(h, w, (1, 1), ((taps - 1, taps - 1),) * 2, **options)
                    else:
                        h = lax.conv_general_dilated(h, w, (stride, stride), padding, **options)
                    h = 0.5 * h if max(h.shape) > 64 else h
                elif kind == "bias":
                    h = h + spread(take(c))
                elif kind == "dense":
                    if self.first:
                        continue
                    h = h @ take(c, 4) + take(4)
                elif kind == "norm":
                    (how_norm,) = how
                    if how_norm == "infer":
                        mean, var = take(c), take(c) ** 2 + 0.5
                    else:
                        over = {"group": (1, 2, 3), "rms": (axis,)}.get(how_norm, rest)
                        keep = dict(keepdims=how_norm in ("group", "rms"))
                        mean = h.mean(over, **keep)
                        var = (h**2).mean(over, **keep) - mean**2 if how_norm == "fast" else h.var(over, **keep)
                        if how_norm == "rms":
                            mean, var = jnp.zeros(()), (h**2).mean(over, **keep)
                        if how_norm == "stopped":
                            mean, var = lax.stop_gradient(mean), lax.stop_gradient(var)
                    if mean.ndim == 1:
                        mean, var = spread(mean), spread(var)
                    h = (h - mean) * lax.rsqrt(var + 0.1) * spread(take(c)) + spread(take(c))
                elif kind == "act":
                    h = RECOGNISED[how[0]](h)
                elif kind in ("add", "mul", "concat"):
                    other = values[-1 - how[0] % len(values)]
                    if kind == "concat":
                        same = all(other.shape[a] == h.shape[a] for a in range(4) if a != axis)
                        h = jnp.concatenate([h, other], axis) if same and c < 32 else h
                    elif other.shape == h.shape:
                        h = h + other if kind == "add" else h * jnp.tanh(other)
                elif kind == "pool":
                    spatial = [a for a in range(4) if a not in (0, axis)]
                    h = h.mean(spatial, keepdims=True)
                elif kind == "keep":
                    kept.append(h)
                elif kind == "scale":
                    h = h * spread(take(c))
                elif kind == "cut":
                    h = h[:, :, : max(1, h.shape[2] // 2)]
                elif kind == "turn":
                    h = -h[::-1]
                elif kind == "twice":
                    h = jnp.sin(h) + h
                elif kind == "loop":
                    mean = lax.stop_gradient(jnp.abs(h).mean())
                    h = h * (1 + lax.while_loop(lambda v: v > 1, lambda v: v / 2, mean))
                elif kind == "told":
                    jax.debug.callback(lambda v: None, h.mean())
                values.append(h)
            return values[-1], kept

        x = self.image()
        jax.eval_shape(lambda x: walk(None, x), x)
        f: Any = walk
        if self.wrap in ("jit", "remat"):
            inner = {"jit": jax.jit, "remat": jax.checkpoint}[self.wrap](walk)
            f = lambda params, x: inner(params, x)  # noqa: E731
        elif self.wrap == "grad_inside":
            f = lambda params, x: jax.value_and_grad(lambda p: total(walk(p, x)))(params)  # noqa: E731
        return f, [jnp.asarray(p, WIDE) for p in made]

    def image(self) -> Any:
        shape = (2, 4, 5, 6) if self.first else (2, 5, 6, 4)
        return jnp.asarray(normal(self.seed, shape, WIDE), WIDE)

    def check(self) -> None:
        as_there = AS_WRITTEN if self.written else lambda: False
        with types_of(WIDE), full_precision(), mock.patch.object(rewrite, "as_written_on_cpu", as_there):
            f, params = self.function()
            x = self.image()
            fast = jaxconv.accelerate(f)
            if self.wrap == "closure":  # of what the function around traces
                fast = lambda params, x: jaxconv.accelerate(lambda params: f(params, x))(params)  # noqa: E731
            assert jax.eval_shape(fast, params, x) == jax.eval_shape(f, params, x)

            def both_ways(f: Any) -> Any:
                def run(params: Any, x: Any) -> Any:
                    y, pull = jax.vjp(f, params, x)
                    return y, pull(jax.tree.map(jnp.cos, y))

                return jax.jit(run)(params, x)

            ours, theirs = both_ways(fast), both_ways(f)
            convs, plain = (self.convolutions(g, params, x) for g in (fast, f))
            assert convs <= plain, f"{convs} convolutions, expected {plain}"
            self.compare(ours, theirs)

    def compare(self, ours: Any, theirs: Any) -> None:
        largest = max((float(jnp.abs(a).max()) for a in jax.tree.leaves(theirs) if a.size), default=0.0)
        if not math.isfinite(largest) or largest > 1e12:
            return
        assert_same_numbers(ours, theirs, "accelerated", 1e-6 if WIDE == "float64" else 2e-2)

    def convolutions(self, f: Any, *args: Any) -> int:
        names = helpers.equations(f, *args)
        ours = [n for name, n in names.items() if name.startswith("jaxconv_conv") and not name.endswith("_tangent")]
        return sum(ours) + names["conv_general_dilated"]


# ----------------------------------------------------------------------------------------------------------------------
# accelerate on random residual networks, with the calls that a GPU's plans choose


def wants(op: str, problem: Any, device: Any) -> bool:
    """As where kernels take everything together; but only depthwise convolutions and 1x1s normalise what they read."""
    if op.startswith("batchnorm_conv"):
        return problem.conv.groups > 1 or problem.conv.pointwise
    return True


STATISTICS = ("train", "fast", "stopped", "stopped variance", "no scale", "no bias")
BLOCKS = ("bottleneck", "bottleneck", "projection", "single", "twice", "depthwise", "head", "joined", "held")
BLOCKS += ("scaled", "gated", "pooled", "biased")
MODES: dict[str, Callable[[Any], Any]] = {
    "gradient": lambda f: jax.value_and_grad(lambda *a: total(f(*a)), (0, 1)),
    "of images": lambda f: jax.grad(lambda *a: total(f(*a)), 1),
    "forward": lambda f: lambda p, x: jax.jvp(f, (p, x), (jax.tree.map(jnp.sin, p), jnp.cos(x))),
    "hessian": lambda f: (
        lambda p, x: jax.jvp(jax.grad(lambda *a: total(f(*a)), (0, 1)), (p, x), (jax.tree.map(jnp.sin, p), jnp.cos(x)))
    ),
    "map of gradient": lambda f: (
        lambda p, x: jax.vmap(jax.grad(lambda *a: total(f(*a)), (0, 1)), (None, 0))(p, jnp.stack([x, 1 - x]))
    ),
    "gradient of map": lambda f: jax.grad(
        lambda p, x: total(jax.vmap(f, (None, 3))(p, jnp.stack([x, 1 - x], 3))), (0, 1)
    ),
    "of parameters' map": lambda f: jax.grad(
        lambda p, x: total(jax.vmap(f, (0, None))([jnp.stack([a, a + 0.3]) for a in p], x)), (0, 1)
    ),
    "remat": lambda f: jax.grad(lambda *a: total(jax.checkpoint(f)(*a)), (0, 1)),
    "scan": lambda f: jax.grad(
        lambda p, x: total(lax.scan(lambda c, q: f(q, c), x, [jnp.stack([a, a + 0.2]) for a in p])), (0, 1)
    ),
}


@dataclasses.dataclass(frozen=True)
class Residuals:
    """`accelerate` of a random residual network is that function, with every derivative, whichever calls it is made of.

    A block is (kind, statistics of its norms, whether the shortcut comes first in its sum, activation, whether somebody
    else reads its result).
    """

    blocks: tuple[tuple[str, str, bool, str, bool], ...]
    mode: str
    seed: int

    strategy: ClassVar[Any] = lambda: st.builds(
        Residuals,
        st.lists(
            st.tuples(
                st.sampled_from(BLOCKS),
                st.sampled_from(("train",) * 4 + STATISTICS),
                st.booleans(),
                st.sampled_from(("relu",) * 4 + ("silu",)),
                st.booleans(),
            ),
            min_size=2,
            max_size=4,
        ).map(tuple),
        st.sampled_from(tuple(MODES)),
        st.integers(0, 99),
    )

    def walk(self, parameter: Callable[..., Any], x: Any) -> Any:
        """(the last value, what is kept): `parameter` is given each one's shape."""
        kept = []

        def conv(v: Any, k: int = 8, taps: int = 1, w: Any = None) -> Any:
            w = parameter(taps, taps, v.shape[-1], k) if w is None else w
            groups = v.shape[-1] // w.shape[2]
            numbers = ("NHWC", "HWIO", "NHWC")
            return lax.conv_general_dilated(v, w, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups)

        def norm(v: Any, how: str, scale: Any = None, bias: Any = None) -> Any:
            mean, var = v.mean((0, 1, 2)), v.var((0, 1, 2))
            if how == "fast":
                var = (v * v).mean((0, 1, 2)) - mean * mean
            if how == "stopped":
                mean = lax.stop_gradient(mean)
            if how.startswith("stopped"):
                var = lax.stop_gradient(var)
            y = (v - mean) * lax.rsqrt(var + 0.01)
            y = y if how == "no scale" else y * (1 + parameter(v.shape[-1]) if scale is None else scale)
            return y if how == "no bias" else y + (parameter(v.shape[-1]) if bias is None else bias)

        for kind, how, first, activation, read in self.blocks:
            act = RECOGNISED[activation]

            def joined(y: Any, r: Any, act: Any = act, first: bool = first) -> Any:
                return act(r + y if first else y + r)

            if kind == "bottleneck":
                x = joined(norm(conv(act(norm(conv(x, 16, 3 if first else 1), how))), how), x)
            elif kind == "projection":
                y = norm(conv(act(norm(conv(x), how))), how)
                x = joined(y, norm(conv(x), "train"))
            elif kind == "single":
                x = joined(norm(conv(x), how), x)
            elif kind == "twice":  # the same layer
                w, scale, bias = parameter(1, 1, 8, 8), parameter(8), parameter(8)
                for _ in range(2):
                    x = joined(norm(conv(x, w=w), "train", scale, bias), x)
            elif kind == "depthwise":
                y = act(norm(conv(x) if first else x, how))
                x = joined(norm(conv(y, w=parameter(3, 3, 1, 8)), how), x)
            elif kind == "head":
                kept.append(jnp.sum(jnp.sin(conv(x, 4))))
            elif kind == "joined":
                x = joined(norm(conv(x), how), norm(x, "train"))
            elif kind == "scaled":  # a layer scale; the bias is before it or behind
                y, b, g = conv(x, w=parameter(5, 5, 1, 8)), parameter(8), 1 + parameter(8)
                y = act(y) @ parameter(8, 8) if how == "fast" else conv(act(y))
                x = x + ((y + b) * g if first else y * g + b)
            elif kind == "gated":  # half of the channels times an activation of the other half
                z = x @ parameter(8, 16) if how == "fast" else conv(x, 16)
                a, g = jnp.split(z if how == "no bias" else z + parameter(16), 2, -1)
                y = a * act(g) if first else act(a) * g
                x = x + (y @ parameter(8, 8) if how == "fast" else conv(y))
            elif kind == "pooled":
                y = conv(x, taps=3) if how == "no bias" else conv(x, taps=3) + parameter(8)
                step, padding = (1, "SAME") if first else (2, "VALID")
                y = lax.reduce_window(y, -jnp.inf, lax.max, (1, 3, 3, 1), (1, step, step, 1), padding)
                x = y if first else x + act(y)
            elif kind == "biased":  # no norm, and an activation in front of each convolution
                y = conv(act(x), taps=3) + parameter(8)
                x = joined(conv(act(y), taps=3) + parameter(8), x, act=lambda v: v)
            elif kind == "held":  # the shortcut has no gradient
                x = joined(norm(conv(x), how), lax.stop_gradient(x))
            if read:
                kept.append(jnp.sin(x))
        return x, kept

    def check(self) -> None:
        with types_of(WIDE), full_precision():
            shapes: list[Shape] = []

            def found(*shape: int) -> Any:
                shapes.append(shape)
                return jnp.ones(shape, WIDE)

            x = jnp.asarray(normal(self.seed, (2, 4, 3, 8), WIDE), WIDE)
            jax.eval_shape(functools.partial(self.walk, found), x)
            if not shapes:  # nothing is learnt
                return
            params = [
                jnp.asarray(0.5 * normal(self.seed + i, s, WIDE) / math.sqrt(math.prod(s[:-1])), WIDE)
                for i, s in enumerate(shapes, 1)
            ]

            def f(params: Any, x: Any) -> Any:
                given = iter(params)
                return self.walk(lambda *shape: next(given), x)

            theirs = jax.jit(MODES[self.mode](f))(params, x)
            # Rules are of what GPUs compute, on a CPU too.
            as_gpus = mock.patch.object(rewrite, "as_written_on_cpu", lambda: False)
            with as_gpus, mock.patch.object(rules, "wants", wants):
                ours = jax.jit(MODES[self.mode](jaxconv.accelerate(f)))(params, x)
        assert_same_numbers(ours, theirs, self.mode, 1e-6 if WIDE == "float64" else 2e-2)


PROPERTIES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        Conv,
        ConvLayer,
        ConvTranspose,
        Dense,
        BatchNorm,
        GroupNorm,
        LayerNorm,
        ConvBatchNorm,
        BatchNormConv,
        SqueezeExcite,
        Integers,
        Lax,
        Flax,
        Composed,
        Layers,
        Residuals,
    )
}

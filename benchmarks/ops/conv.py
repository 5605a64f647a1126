"""Convolutions. Their list is benchmarks/ops/conv_cases.py."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array, lax

import jaxconv
from benchmarks import torch_contender
from benchmarks.ops import base
from jaxconv import _problem
from jaxconv._problem import ConvProblem

Pair = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class ConvCase(base.Case):
    """A convolution, or with `transposed` a transposed one with lax.conv_transpose's SAME padding."""

    name: str
    batch: int  # N
    spatial: tuple[int, ...]  # of x
    in_channels: int  # C, all groups
    out_channels: int  # K, all groups
    filter: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[Pair, ...]  # (low, high); unused where transposed
    dilation: tuple[int, ...]
    groups: int = 1
    transposed: bool = False
    suite: str = "core"
    thread: str = ""  # where somebody asked for it: "owner/name#number"

    op = "conv"
    results: ClassVar = {"fprop": ("y",), "dgrad": ("dx",), "wgrad": ("dw",)}
    algorithms = _problem.CONV_ALGORITHMS
    products = True
    measured: ClassVar = {
        "fprop": ("conv_fprop", "conv_dgrad"),  # a transposed convolution's forward is a dgrad
        "dgrad": ("conv_dgrad", "conv_fprop"),
        "wgrad": ("conv_wgrad",),
    }
    call_problem = ConvProblem

    @classmethod
    def of(cls, case: ConvCase, **more: Any) -> Self:
        """The same convolution as a case of this class."""
        return cls(**{field.name: getattr(case, field.name) for field in dataclasses.fields(ConvCase)}, **more)

    @property
    def conv(self) -> ConvCase:
        """The convolution alone, of a case that holds more."""
        return ConvCase.of(self)

    @property
    def nd(self) -> int:
        return len(self.spatial)

    @property
    def out_spatial(self) -> tuple[int, ...]:
        if self.transposed:
            return tuple(size * s for size, s in zip(self.spatial, self.stride, strict=True))
        return tuple(
            (size + low + high - (f - 1) * d - 1) // s + 1
            for size, (low, high), f, d, s in zip(
                self.spatial, self.padding, self.filter, self.dilation, self.stride, strict=True
            )
        )

    @property
    def depthwise(self) -> bool:
        return self.groups == self.in_channels > 1

    def x_shape(self, channels_last: bool = True) -> tuple[int, ...]:
        return base.images(self.batch, self.spatial, self.in_channels, channels_last)

    def y_shape(self, channels_last: bool = True) -> tuple[int, ...]:
        return base.images(self.batch, self.out_spatial, self.out_channels, channels_last)

    def w_shape(self, channels_last: bool = True) -> tuple[int, ...]:
        c, k = self.in_channels // self.groups, self.out_channels
        return (*self.filter, c, k) if channels_last else (k, c, *self.filter)

    def layout(self, channels_last: bool = True) -> str:
        return base.layout_name(self.nd, channels_last)

    def filter_layout(self, channels_last: bool = True) -> str:
        s = "DHW"[3 - self.nd :]
        return f"{s}IO" if channels_last else f"OI{s}"

    @property
    def function(self) -> Callable[..., Array]:
        return getattr(jaxconv, f"conv{'_transpose' if self.transposed else ''}{self.nd}d")

    @property
    def options(self) -> dict[str, Any]:
        """As the public functions take them, in either layout."""
        return dict(stride=self.stride, padding=self.padding, dilation=self.dilation, groups=self.groups)

    @property
    def flops(self) -> int:
        """Floating-point operations of each pass, those on padding included."""
        positions = self.spatial if self.transposed else self.out_spatial
        products = self.batch * self.out_channels * (self.in_channels // self.groups)
        return 2 * products * math.prod(self.filter) * math.prod(positions)

    @property
    def elements(self) -> int:
        """Of x, w and y together: each pass reads two of them and writes the third."""
        return math.prod(self.x_shape()) + math.prod(self.w_shape()) + math.prod(self.y_shape())

    @property
    def read_elements(self) -> int:
        """Of x, by fprop and wgrad."""
        if self.transposed:
            return math.prod(self.x_shape())
        read = 1
        for size, out, f, s, d, (low, _) in zip(
            self.spatial, self.out_spatial, self.filter, self.stride, self.dilation, self.padding, strict=True
        ):
            read *= len({p * s - low + t * d for p in range(out) for t in range(f)} & set(range(size)))
        return self.batch * self.in_channels * read

    def terms(self, pass_: str) -> int:
        """Products summed into one element of the result."""
        taps, g = math.prod(self.filter), self.groups
        if pass_ == "wgrad":
            return self.batch * math.prod(self.spatial if self.transposed else self.out_spatial)
        return taps * (self.in_channels if pass_ == "fprop" else self.out_channels) // g

    def work(self, pass_: str, item: int) -> tuple[float, float]:
        # Strides longer than the filter pass over pixels of x, which dgrad still has to write.
        unread = 0 if pass_ == "dgrad" else math.prod(self.x_shape()) - self.read_elements
        return self.flops, item * (self.elements - unread)

    def small(self) -> Self:
        """It keeps stride, padding, dilation, the filter, the channels of a group and whether extents are odd."""
        spatial = tuple(
            _small_extent(size, f, s, d, self.nd, last=axis == self.nd - 1)
            for axis, (size, f, s, d) in enumerate(
                zip(self.spatial, self.filter, self.stride, self.dilation, strict=True)
            )
        )
        g, c, k = self.groups, self.in_channels // self.groups, self.out_channels // self.groups
        if g == 1:  # C < K, C == K and C > K stay so
            c, k = min(c, 24), min(k, 16 if k < c else 24 if k == c else 40)
        g = min(g, 8 if self.depthwise else 4)
        return dataclasses.replace(
            self, batch=min(self.batch, 2), spatial=spatial, in_channels=g * c, out_channels=g * k, groups=g
        )

    def __str__(self) -> str:
        text = (
            f"{self.batch}x{base.times(self.spatial)} {self.in_channels}->{self.out_channels} {base.times(self.filter)}"
        )
        text += f" s{self.stride[0]}" if max(self.stride) > 1 else ""
        text += f" d{self.dilation[0]}" if max(self.dilation) > 1 else ""
        text += f" g{self.groups}" if self.groups > 1 else ""
        return text + (" transposed" if self.transposed else "")

    def arrays(self, setting: base.Setting, key: Array) -> base.Arrays:
        normal = base.Normal(setting, key)
        return self.operands(setting, normal) | {"dy": normal(self.y_shape(setting.channels_last))}

    def operands(self, setting: base.Setting, normal: base.Normal) -> base.Arrays:
        last = setting.channels_last
        return {"x": normal(self.x_shape(last)), "w": normal(self.w_shape(last), self.terms("fprop") ** -0.5)}

    def ours(self, pass_: str, setting: base.Setting, **choice: Any) -> base.Job:
        options = self.options | dict(layout=self.layout(setting.channels_last), precision=setting.precision, **choice)
        if self.transposed:
            options["padding"] = "SAME"
        return _job(pass_, lambda x, w: self.function(x, w, **options))

    def lax_conv(self, setting: base.Setting) -> Callable[[Array, Array], Array]:
        """y of x and w by XLA."""
        layout, filter_layout = self.layout(setting.channels_last), self.filter_layout(setting.channels_last)
        # lax names spatial axes as it likes, as long as they agree
        given: dict[str, Any] = dict(dimension_numbers=(layout, filter_layout, layout), precision=setting.precision)
        if self.transposed:
            return lambda x, w: lax.conv_transpose(x, w, self.stride, "SAME", **given)
        given |= dict(rhs_dilation=self.dilation, feature_group_count=self.groups)
        return lambda x, w: lax.conv_general_dilated(x, w, self.stride, self.padding, **given)

    def xla(self, pass_: str, setting: base.Setting) -> base.Job:
        return _job(pass_, self.lax_conv(setting)).plain

    def torch(self, pass_: str, setting: base.Setting) -> base.Job:
        import torch

        nd, last = self.nd, setting.channels_last
        to_first, to_last = torch_contender.image_orders(nd, last)
        spatial = tuple(range(2, nd + 2))
        memory = {2: torch.channels_last, 3: torch.channels_last_3d}.get(nd, torch.contiguous_format)

        def filters(t: Any) -> Any:
            t = t.permute(nd + 1, nd, *range(nd)) if last else t
            if self.transposed:  # (C, K, taps), and PyTorch's taps run the other way
                t = t.transpose(0, 1).flip(spatial)
            return t.contiguous(memory_format=memory if last else torch.contiguous_format)

        def filters_back(t: Any) -> Any:
            t = t.flip(spatial).transpose(0, 1) if self.transposed else t
            return t.permute(*spatial, 1, 0) if last else t

        # Asymmetric padding is a pad before the convolution; its gradient would be a crop.
        padding = [low for low, _ in self.padding]
        uneven = [0, 0] * nd
        if self.transposed:
            # SAME: what the filter is longer than the stride is cut from the output
            padding = [(f - s) // 2 for f, s in zip(self.filter, self.stride, strict=True)]
            if any((f - s) % 2 or f < s for f, s in zip(self.filter, self.stride, strict=True)):
                raise ValueError("PyTorch has no padding equal to SAME here")
        elif any(low != high for low, high in self.padding):
            if pass_ == "dgrad":
                raise ValueError("PyTorch has no asymmetric padding, and its gradient would be timed without the crop")
            uneven = [p for pair in reversed(self.padding) for p in pair]
            padding = [0] * nd
        window = (None, self.stride, padding, self.dilation, self.transposed, [0] * nd, self.groups)

        def pad(x: Any) -> Any:
            return torch.nn.functional.pad(x, uneven) if any(uneven) else x

        def fprop(x: Any, w: Any) -> Any:
            return (torch.convolution(pad(x), w, *window),)

        def backward(x: Any, w: Any, dy: Any) -> Any:
            _, *rest = window
            mask = [pass_ == "dgrad", pass_ == "wgrad", False]
            x = pad(x) if pass_ == "wgrad" else x
            grads = torch.ops.aten.convolution_backward(dy, x, w, None, *rest, mask)
            return (grads[0] if pass_ == "dgrad" else grads[1],)

        names = ("x", "w") if pass_ == "fprop" else ("x", "w", "dy")
        give = torch_contender.give
        return torch_contender.job(
            fprop if pass_ == "fprop" else backward,
            # NHWC arrays are NCHW tensors in channels-last memory: a view
            lambda a: tuple(filters(give(a[n])) if n == "w" else give(a[n]).permute(to_first) for n in names),
            filters_back if pass_ == "wgrad" else lambda t: t.permute(to_last),
        )

    def reference(self, pass_: str, channels_last: bool, a: base.Arrays, y: Array) -> base.Reference:
        return {self.results[pass_][0]: (self.exact(pass_, channels_last, a), None)}

    def exact(self, pass_: str, channels_last: bool, a: base.Arrays) -> Array:
        """y of x and w, dx of dy and w, or dw of x and dy."""
        return _exact(self.conv, pass_, channels_last, {name: a[name] for name in _OPERANDS[pass_]})

    @property
    def reduced(self) -> int:
        """Elements per channel of x."""
        return self.batch * math.prod(self.spatial)

    def tolerance(self, pass_: str, result: str, rounding: base.Rounding) -> float:
        return 2 * (rounding.u + rounding.product(self.terms(pass_)))

    @classmethod
    def call_bytes(cls, op: str, problem: Any, item: int) -> float:
        y = problem.pool.y_shape if op == "conv_pooled" else problem.y_shape
        arrays = [problem.x_shape, problem.w_shape, y]
        if op == "conv_shortcut":
            arrays += [problem.shortcut.x_shape, problem.shortcut.w_shape]
        arrays += {
            "conv_dgrad_add": [problem.x_shape],
            "conv_add": [problem.y_shape],
            "conv_gradient": [problem.x_shape],
            "conv_gradient_add": [problem.x_shape] * 2,
            "conv_norm_gradient": [problem.x_shape],
        }.get(op, [])
        return item * sum(map(math.prod, arrays))


def problem_of(case: ConvCase, setting: base.Setting, **choice: Any) -> ConvProblem:
    last = setting.channels_last
    dtype = base.DTYPES[setting.dtype]
    x, w = (jax.ShapeDtypeStruct(shape, dtype) for shape in (case.x_shape(last), case.w_shape(last)))
    given: dict[str, Any] = case.options | dict(layout=case.layout(last), precision=setting.precision)
    given |= dict(activation=None, return_preactivation=False, algorithm=None, implementation=None)
    return ConvProblem.infer(case.op, case.nd, x, w, None, **given | choice)


def _job(pass_: str, conv: Callable[[Array, Array], Array]) -> base.Job:
    """The gradients alone: conv is linear in each operand, so the forward pass of a vjp is dead code."""
    # (as timed, as explained: without the dead code)
    f, transpose = {
        "fprop": (conv, conv),
        "dgrad": (
            lambda x, w, dy: jax.vjp(lambda x: conv(x, w), x)[1](dy)[0],
            lambda x, w, dy: jax.linear_transpose(lambda x: conv(x, w), x)(dy)[0],
        ),
        "wgrad": (
            lambda x, w, dy: jax.vjp(lambda w: conv(x, w), w)[1](dy)[0],
            lambda x, w, dy: jax.linear_transpose(lambda w: conv(x, w), w)(dy)[0],
        ),
    }[pass_]
    names = ("x", "w") if pass_ == "fprop" else ("x", "w", "dy")
    kernels = ("conv", "conv_fprop", "conv_dgrad", "conv_wgrad")
    job = base.Job.of(f, names, kernels)
    return dataclasses.replace(job, explained=transpose, outputs=lambda out: (out,))


def _small_extent(size: int, filter: int, stride: int, dilation: int, nd: int, last: bool) -> int:
    """A few windows' worth, odd where `size` is, a multiple of the stride where `size` is; the last axis is longer."""
    least = {1: 24, 2: 8, 3: 5}[nd]
    extent = max(least, (filter - 1) * dilation // 2 + 1)
    if filter == stride > 1:  # patches: two of them
        extent = 2 * stride
    if size % stride == 0:
        extent = -(-extent // stride) * stride
    if (extent - size) % 2:
        extent += stride if stride % 2 else 1
    if last and nd > 1:
        extent += 2 * stride
    return min(size, extent)


# ----------------------------------------------------------------------------------------------------------------------
# Sums over filter taps of shifted matrix products, in float64

_OPERANDS = {"fprop": ("x", "w"), "dgrad": ("w", "dy"), "wgrad": ("x", "dy")}


@base.exact
def _exact(case: ConvCase, pass_: str, channels_last: bool, arrays: base.Arrays) -> Array:
    nd = case.nd
    if not channels_last:
        to_last, filter_to_last = (0, *range(2, nd + 2), 1), (*range(2, nd + 2), 1, 0)
        arrays = {k: jnp.transpose(v, filter_to_last if k == "w" else to_last) for k, v in arrays.items()}
    value = {"fprop": _fprop, "dgrad": _dgrad, "wgrad": _wgrad}[pass_](case, **arrays)
    if channels_last:
        return value
    return jnp.transpose(value, (nd + 1, nd, *range(nd)) if pass_ == "wgrad" else (0, nd + 1, *range(1, nd + 1)))


class _Taps:
    """A convolution as a loop over filter taps: tap t multiplies a window of the padded x."""

    def __init__(self, case: ConvCase):
        self.case = case
        if case.transposed:  # lax.conv_transpose, padding="SAME": x with stride - 1 zeros between its elements
            self.base, self.stride = case.stride, (1,) * case.nd
            self.pads = []
            for f, s in zip(case.filter, case.stride, strict=True):
                total = f + s - 2
                low = f - 1 if s > f - 1 else -(-total // 2)
                self.pads.append((low, total - low))
        else:
            self.base, self.stride, self.pads = (1,) * case.nd, case.stride, list(case.padding)
        self.config = [
            (0, 0, 0),
            *((lo, hi, b - 1) for (lo, hi), b in zip(self.pads, self.base, strict=True)),
            (0, 0, 0),
        ]
        self.extents = [(o - 1) * s + 1 for o, s in zip(case.out_spatial, self.stride, strict=True)]
        self.every = (slice(None), *(slice(None, None, s) for s in self.stride), slice(None))

    def pad(self, x: Array) -> Array:
        return lax.pad(base.wide(x), jnp.float64(0), self.config)

    def unpad(self, xp: Array) -> Array:
        spatial = zip(xp.shape[1:-1], self.pads, self.base, strict=True)
        cut = [slice(low, size - high, b) for size, (low, high), b in spatial]
        return xp[(slice(None), *cut, slice(None))]

    def start(self, tap: Array) -> list[Array]:
        position, starts = tap, []
        for f, d in zip(reversed(self.case.filter), reversed(self.case.dilation), strict=True):
            starts.insert(0, position % f * d)
            position = position // f
        zero = jnp.zeros_like(tap)
        return [zero, *starts, zero]

    def window(self, xp: Array, tap: Array) -> Array:
        """(N * out, G, C/G)"""
        size = (xp.shape[0], *self.extents, xp.shape[-1])
        return self.split(lax.dynamic_slice(xp, self.start(tap), size)[self.every])

    def split(self, a: Array) -> Array:
        return a.reshape(-1, self.case.groups, a.shape[-1] // self.case.groups)

    def taps(self, w: Array) -> Array:
        """(taps, C/G, G, K/G)"""
        g = self.case.groups
        return base.wide(w).reshape(math.prod(self.case.filter), -1, g, self.case.out_channels // g)

    @property
    def count(self) -> int:
        return math.prod(self.case.filter)


def _product(a: Array, w: Array) -> Array:
    """(m, g, c), (c, g, k) -> (m, g, k)"""
    return a * w[0] if w.shape[0] == 1 else jnp.einsum("mgc,cgk->mgk", a, w, precision="highest")


def _fprop(case: ConvCase, x: Array, w: Array) -> Array:
    taps = _Taps(case)
    xp, w = taps.pad(x), taps.taps(w)
    y = jnp.zeros((case.batch * math.prod(case.out_spatial), case.groups, w.shape[-1]), jnp.float64)
    y = lax.fori_loop(0, taps.count, lambda t, y: y + _product(taps.window(xp, t), w[t]), y)
    return y.reshape(case.y_shape())


def _dgrad(case: ConvCase, w: Array, dy: Array) -> Array:
    taps = _Taps(case)
    dy, w = taps.split(base.wide(dy)), taps.taps(w)
    padded = jax.eval_shape(taps.pad, jax.ShapeDtypeStruct(case.x_shape(), jnp.float64)).shape
    window = (case.batch, *taps.extents, case.in_channels)

    def add(t: Array, xp: Array) -> Array:
        part = _product(dy, jnp.swapaxes(w[t], 0, 2)).reshape(case.batch, *case.out_spatial, case.in_channels)
        old = lax.dynamic_slice(xp, taps.start(t), window)
        return lax.dynamic_update_slice(xp, old.at[taps.every].add(part), taps.start(t))

    return taps.unpad(lax.fori_loop(0, taps.count, add, jnp.zeros(padded, jnp.float64)))


def _wgrad(case: ConvCase, x: Array, dy: Array) -> Array:
    taps = _Taps(case)
    xp, dy = taps.pad(x), taps.split(base.wide(dy))

    def one(t: Array) -> Array:  # (C/G, G, K/G)
        window = taps.window(xp, t)
        if window.shape[-1] == 1:
            return jnp.sum(window * dy, 0)[None]
        return jnp.einsum("mgc,mgk->cgk", window, dy, precision="highest")

    return lax.map(one, jnp.arange(taps.count)).reshape(case.w_shape())

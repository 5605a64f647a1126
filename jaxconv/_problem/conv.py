"""ConvProblem, and the pair ConvBatchNormProblem: what a convolution asks for, in canonical numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, get_args

import jax
import numpy as np
from jax import lax

from jaxconv._core import activations
from jaxconv._core.activations import Activation
from jaxconv._problem.batchnorm import BatchNormProblem
from jaxconv._problem.dense import DenseProblem
from jaxconv._problem.parse import (
    CHANNELS_FIRST,
    CHANNELS_LAST,
    NO_ACTIVATION,
    Pair,
    Precision,
    check_choice,
    check_pads,
    check_span,
    epilogue,
    flag,
    implementation_for,
    integer,
    integers,
    is_number,
    out_extent,
    parse_layout,
    parse_padding,
    parse_precision,
    parse_transposed_padding,
    same_dtype,
    shapes,
    transposed_extent,
)
from jaxconv._problem.pool import PoolProblem

AnyConv = TypeVar("AnyConv", bound="ConvProblem")

# The largest stride, dilation or pad that native code takes: kMaxStep in common/problem.h.
MAX_STEP = 2**31 - 1
# From here on steps that mean nothing are cut: CUDA kernels take less than MAX_STEP (kCoordLimit in common/domain.h).
_LARGE_STEP = 2**28

ConvAlgorithm = Literal["sm90", "implicit_gemm", "direct", "depthwise", "grouped", "stem", "narrow", "im2col"]
CONV_ALGORITHMS = get_args(ConvAlgorithm)


@dataclasses.dataclass(frozen=True)
class Together:
    """What its program says of an op of a convolution (jaxconv/_plan/together.py)."""

    op: str
    problem: str  # which convolution: it may become another one, of which this says nothing
    # Native code runs it because the sum of all is worth it, or because the program waits for its host. Or CUDA graphs
    # hold cuDNN's too, so that nothing says that native code runs it.
    says: Literal["worth", "waits", "captured"]


@dataclasses.dataclass(frozen=True)
class ConvProblem:
    """y[n, o, k] = sum over taps t and channels c of x[n, o*stride - low + t*dilation, c] * w[t, c, k].

    One problem is read three ways: fprop (x, w -> y), dgrad (dy, w -> dx), wgrad (x, dy -> dw).
    """

    name: str  # the public function, for messages
    dtype: str
    batch: int  # N; may be symbolic under jax.export
    in_channels: int  # C, all groups
    out_channels: int  # K, all groups
    groups: int
    in_spatial: tuple[int, ...]
    filter: tuple[int, ...]
    out_spatial: tuple[int, ...]
    stride: tuple[int, ...]
    # (low, high); negative values crop. Of symbolic extents a name stays one: its numbers are lax's to settle.
    padding: tuple[Pair, ...] | str
    dilation: tuple[int, ...]
    channels_last: bool
    precision: Precision
    # The epilogue of the fused forward; off in the bare trio
    bias: bool = False
    activation: Activation = NO_ACTIVATION
    save_preactivation: bool = False
    # What the user forces
    implementation: str | None = None
    algorithm: str | None = None
    together: Together | None = dataclasses.field(default=None, repr=False)

    # ---- shapes
    @property
    def nd(self) -> int:
        return len(self.in_spatial)

    def _activation_shape(self, channels: int, spatial: tuple[int, ...]) -> tuple[int, ...]:
        return (self.batch, *spatial, channels) if self.channels_last else (self.batch, channels, *spatial)

    @property
    def x_shape(self) -> tuple[int, ...]:
        return self._activation_shape(self.in_channels, self.in_spatial)

    @property
    def y_shape(self) -> tuple[int, ...]:
        return self._activation_shape(self.out_channels, self.out_spatial)

    @property
    def w_shape(self) -> tuple[int, ...]:
        c = self.in_channels // self.groups
        return (*self.filter, c, self.out_channels) if self.channels_last else (self.out_channels, c, *self.filter)

    @property
    def channel_axis(self) -> int:
        return self.nd + 1 if self.channels_last else 1

    @property
    def dimension_numbers(self) -> tuple[str, str, str]:
        s = "DHW"[3 - self.nd :]
        return (f"N{s}C", f"{s}IO", f"N{s}C") if self.channels_last else (f"NC{s}", f"OI{s}", f"NC{s}")

    # ---- facts a plan asks for
    @property
    def full_float32(self) -> bool:
        """Whether float32 products may not be rounded to TF32."""
        return isinstance(self.precision, tuple) and lax.Precision.HIGHEST in self.precision

    @property
    def empty(self) -> bool:
        """Whether x, w or y has no elements for another reason than an empty batch: lax's own case, without a plan."""
        extents = (self.in_channels, self.out_channels, *self.in_spatial, *self.out_spatial)
        return any(is_number(extent) and extent == 0 for extent in extents)

    @property
    def depthwise(self) -> bool:
        return self.groups == self.in_channels

    @property
    def pointwise(self) -> bool:
        """1x1, stride 1, unpadded: a plain matrix product."""
        return (
            all(f == 1 for f in self.filter) and self.out_spatial == self.in_spatial and set(self.padding) == {(0, 0)}
        )

    @property
    def reached(self) -> float:
        """The part of x that a tap reaches, but for its edges: of each axis the residues modulo the stride that have
        one."""
        return math.prod(
            len({(t * d - low) % s for t in range(f)}) / s
            for f, s, d, (low, _) in zip(self.filter, self.stride, self.dilation, self.padding, strict=True)
        )

    @property
    def flops(self) -> int:
        """Floating-point operations of each of fprop, dgrad, wgrad."""
        taps = int(np.prod(self.filter)) * int(np.prod(self.out_spatial))
        return 2 * self.batch * self.out_channels * (self.in_channels // self.groups) * taps

    @property
    def projects(self) -> bool:
        """One tap and one group, without padding: it may be a shortcut (ShortcutConvProblem)."""
        one_tap = math.prod(self.filter) == 1 and set(self.padding) == {(0, 0)}
        return one_tap and self.groups == 1 and all(map(is_number, self.in_spatial))

    # ---- readings
    def within_limits(self) -> ConvProblem:
        """The same convolution with numbers that native code can represent.

        A stride over a single output and a dilation of a single tap mean nothing and are cut. What else exceeds
        MAX_STEP goes to XLA, or is a ValueError where native code was asked for.
        """
        if isinstance(self.padding, str):  # of symbolic extents, which are XLA's
            return self
        pads = sum(self.padding, ())
        steps = [v for v in (*self.stride, *pads, *self.dilation) if isinstance(v, (int, np.integer))]
        if all(abs(value) < _LARGE_STEP for value in steps):
            return self
        strides, dilations = list(self.stride), list(self.dilation)
        for axis, (size, f, (low, high)) in enumerate(zip(self.in_spatial, self.filter, self.padding, strict=True)):
            if f == 1:
                dilations[axis] = 1
            if self.out_spatial[axis] == 1 and strides[axis] >= _LARGE_STEP:
                strides[axis] = size + low + high - (f - 1) * dilations[axis]  # one more than the window can move
        p = dataclasses.replace(self, stride=tuple(strides), dilation=tuple(dilations))
        for argument, values in (("stride", p.stride), ("padding", pads), ("dilation", p.dilation)):
            if max(map(abs, values)) > MAX_STEP:
                if p.implementation == "native" or p.algorithm is not None:
                    raise ValueError(
                        f"{p.name}: {argument}={getattr(self, argument)} exceeds {MAX_STEP}, the most that native code "
                        f"takes. implementation='xla' has no such limit"
                    )
                return dataclasses.replace(p, implementation="xla")
        return p

    @property
    def fused(self) -> bool:
        """Whether something follows the sum that is conv's and not fprop's."""
        return self.bias or self.save_preactivation or self.activation.name != "none"

    def bare(self) -> ConvProblem:
        """The same convolution without its epilogue."""
        return dataclasses.replace(self, bias=False, activation=NO_ACTIVATION, save_preactivation=False)

    def affine(self) -> ConvProblem:
        """The same convolution with its bias and nothing behind it."""
        return dataclasses.replace(self.bare(), bias=self.bias)

    def fields(self) -> dict[str, Any]:
        """A convolution's own, of problems that are more."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(ConvProblem)}

    def pixel_product(self) -> DenseProblem:
        """A pointwise convolution, channels last: x's pixels (M, C) times w (C, K), with the bias."""
        pixels, bias = self.batch * math.prod(self.in_spatial), "column" if self.bias else None
        how: dict[str, Any] = dict(bias=bias, implementation=self.implementation)
        return DenseProblem(self.name, self.dtype, pixels, self.in_channels, self.out_channels, self.precision, **how)

    def patch_product(self) -> DenseProblem:
        """dgrad where windows do not overlap: dy's pixels (M, K) times w (R*S*C, K), transposed; rows are windows."""
        pixels, columns = self.batch * math.prod(self.out_spatial), math.prod(self.filter) * self.in_channels
        return DenseProblem(self.name, self.dtype, pixels, self.out_channels, columns, self.precision, trans_w=True)

    @classmethod
    def of_product(cls, p: DenseProblem) -> ConvProblem:
        """x @ w + bias per column as a convolution of one tap: each row is an image of one pixel."""
        ones = (1,)
        return cls(
            name=p.name,
            dtype=p.dtype,
            batch=p.m,
            in_channels=p.k,
            out_channels=p.n,
            groups=1,
            in_spatial=ones,
            filter=ones,
            out_spatial=ones,
            stride=ones,
            padding=((0, 0),),
            dilation=ones,
            channels_last=True,
            precision=p.precision,
            bias=p.bias is not None,
            activation=p.activation,
            save_preactivation=p.save_preactivation,
            implementation=p.implementation,
            algorithm=p.algorithm,
        )

    def __str__(self) -> str:
        x, k = "x".join(map(str, self.in_spatial)), "x".join(map(str, self.filter))
        text = f"{self.batch}x{x} {self.in_channels}->{self.out_channels} {k}"
        if set(self.stride) != {1}:
            text += " s" + ",".join(map(str, dict.fromkeys(self.stride)))
        if set(self.dilation) != {1}:
            text += " d" + ",".join(map(str, dict.fromkeys(self.dilation)))
        if self.groups > 1:
            text += f" g{self.groups}"
        layout = (CHANNELS_LAST if self.channels_last else CHANNELS_FIRST)[self.nd]
        return " + ".join([f"{text} {self.dtype} {layout}", *epilogue(self)])

    @classmethod
    def infer(
        cls,
        name: str,
        nd: int,
        x: jax.Array,
        w: jax.Array,
        b: jax.Array | None,
        *,
        stride: Any,
        padding: Any,
        dilation: Any,
        groups: Any,
        activation: Any,
        layout: Any,
        precision: Any,
        return_preactivation: bool,
        algorithm: Any,
        implementation: Any,
        residual: jax.Array | None = None,
    ) -> ConvProblem:
        channels_last = parse_layout(name, layout, nd)
        filter_layout = ("DHWIO" if channels_last else "OIDHW").replace("DHW", "DHW"[3 - nd :])
        dtype = same_dtype(name, x=x, w=w, b=b, residual=residual)
        seen = shapes(x=x, w=w, b=b, residual=residual)
        if x.ndim != nd + 2:
            raise ValueError(f"{name}: x has {x.ndim} dimensions, expected {nd + 2} ({layout}). {seen}")
        if w.ndim != nd + 2:
            raise ValueError(f"{name}: w has {w.ndim} dimensions, expected {nd + 2} ({filter_layout}). {seen}")
        groups = integer(name, "groups", groups)
        stride = integers(name, "stride", stride, nd, 1)
        dilation = integers(name, "dilation", dilation, nd, 1)
        if channels_last:
            batch, in_spatial, c = x.shape[0], x.shape[1:-1], x.shape[-1]
            filter, group_c, k = w.shape[:-2], w.shape[-2], w.shape[-1]
        else:
            batch, c, in_spatial = x.shape[0], x.shape[1], x.shape[2:]
            k, group_c, filter = w.shape[0], w.shape[1], w.shape[2:]
        if 0 in filter:
            raise ValueError(f"{name}: w has no taps. {seen}")
        if groups < 1:
            raise ValueError(f"{name}: groups={groups} must be at least 1")
        if k % groups:
            raise ValueError(f"{name}: groups={groups} does not divide the {k} output channels of w. {seen}")
        if c % groups:
            hint = _layout_hint(channels_last, nd, x.shape, w.shape, groups)
            raise ValueError(f"{name}: groups={groups} does not divide the {c} channels of x. {seen}{hint}")
        if group_c * groups != c:
            hint = _layout_hint(channels_last, nd, x.shape, w.shape, groups)
            raise ValueError(
                f"{name}: w expects {group_c * groups} input channels, x has {c} (groups={groups}). {seen}{hint}"
            )
        if b is not None and b.shape != (k,):
            raise ValueError(f"{name}: b has shape {b.shape}, expected ({k},), one per output channel. {seen}")
        check_span(name, filter, dilation)
        pads = parse_padding(name, padding, in_spatial, filter, stride, dilation)
        check_pads(name, padding, in_spatial, pads)
        out = tuple(map(out_extent, in_spatial, filter, stride, pads, dilation))
        precision = parse_precision(name, precision)
        check_choice(name, implementation, algorithm, CONV_ALGORITHMS)
        implementation = implementation_for(name, precision, implementation, algorithm)
        p = cls(
            name=name,
            dtype=dtype,
            batch=batch,
            in_channels=c,
            out_channels=k,
            groups=groups,
            in_spatial=tuple(in_spatial),
            filter=tuple(filter),
            out_spatial=out,
            stride=stride,
            padding=pads if all(is_number(pad) for pair in pads for pad in pair) else padding.upper(),
            dilation=dilation,
            channels_last=channels_last,
            precision=precision,
            bias=b is not None,
            activation=activations.parse(name, activation),
            save_preactivation=flag(name, "return_preactivation", return_preactivation),
            implementation=implementation,
            algorithm=algorithm,
        ).within_limits()
        if residual is not None and residual.shape != p.y_shape:
            raise ValueError(
                f"{name}: residual has shape {residual.shape}, expected {p.y_shape}, that of the result. {seen}"
            )
        return p

    @classmethod
    def infer_transposed(
        cls,
        name: str,
        nd: int,
        x: jax.Array,
        w: jax.Array,
        b: jax.Array | None,
        *,
        stride: Any,
        padding: Any,  # of the stride-dilated x, as lax
        dilation: Any,
        groups: Any,
        activation: Any,
        layout: Any,
        precision: Any,
        return_preactivation: bool,
        transpose_kernel: bool,
        algorithm: Any,
        implementation: Any,
    ) -> ConvProblem:
        """The convolution whose dgrad is activation(lax.conv_general_dilated(x, w, 1, pads, lhs_dilation=stride) + b).

        It maps the transposed one's output to its input: `in_*` are y's, `out_*` are x's. Its `bias`, `activation` and
        `save_preactivation` are what the dgrad is followed by.
        """
        channels_last = parse_layout(name, layout, nd)
        for argument, array in (("x", x), ("w", w)):
            if array.ndim != nd + 2:
                raise ValueError(
                    f"{name}: {argument} has {array.ndim} dimensions, expected {nd + 2}, got {array.shape}"
                )
        stride = integers(name, "stride", stride, nd, 1)
        dilation = integers(name, "dilation", dilation, nd, 1)
        filter = tuple(w.shape[:nd] if channels_last else w.shape[2:])
        check_span(name, filter, dilation)
        pads = parse_transposed_padding(name, padding, filter, stride, dilation)
        groups = integers(name, "groups", groups, 1, 1)[0]
        seen = shapes(x=x, w=w, b=b)
        c = x.shape[-1 if channels_last else 1]
        in_axis, out_axis = (nd, nd + 1) if channels_last else (1, 0)
        transpose_kernel = flag(name, "transpose_kernel", transpose_kernel)
        # With transpose_kernel the filter is the forward convolution's: its input channels are this one's output.
        if transpose_kernel:
            k, expected = w.shape[in_axis] * groups, w.shape[out_axis]
        else:
            k, expected = w.shape[out_axis], w.shape[in_axis] * groups
        if 0 in filter:
            raise ValueError(f"{name}: w has no taps. {seen}")
        if expected != c:
            hint = _layout_hint(channels_last, nd, x.shape, w.shape, groups, transpose_kernel)
            raise ValueError(f"{name}: w expects {expected} input channels, x has {c} (groups={groups}). {seen}{hint}")
        if c % groups or k % groups:
            raise ValueError(f"{name}: groups={groups} does not divide the channels {c} -> {k}. {seen}")
        if b is not None and b.shape != (k,):
            raise ValueError(f"{name}: b has shape {b.shape}, expected ({k},), one per output channel. {seen}")
        in_spatial = tuple(x.shape[1:-1] if channels_last else x.shape[2:])
        check_pads(name, padding, [(extent - 1) * s + 1 for extent, s in zip(in_spatial, stride, strict=True)], pads)
        windows = [(f - 1) * d for f, d in zip(filter, dilation, strict=True)]
        out = tuple(map(transposed_extent, in_spatial, filter, stride, pads, dilation))
        precision = parse_precision(name, precision)
        check_choice(name, implementation, algorithm, CONV_ALGORITHMS)
        implementation = implementation_for(name, precision, implementation, algorithm)
        return cls(
            name=name,
            dtype=same_dtype(name, x=x, w=w, b=b),
            batch=x.shape[0],
            in_channels=k,
            out_channels=c,
            groups=groups,
            in_spatial=out,
            filter=filter,
            out_spatial=in_spatial,
            stride=stride,
            padding=tuple((window - low, window - high) for window, (low, high) in zip(windows, pads, strict=True)),
            dilation=dilation,
            channels_last=channels_last,
            precision=precision,
            bias=b is not None,
            activation=activations.parse(name, activation),
            save_preactivation=flag(name, "return_preactivation", return_preactivation),
            implementation=implementation,
            algorithm=algorithm,
        ).within_limits()


def _layout_hint(
    channels_last: bool, nd: int, x: Sequence[int], w: Sequence[int], groups: int, out_channels: bool = False
) -> str:
    """What to say where x's channels are where the other layout has them. `out_channels`: they are w's out channels."""
    axis, layout, order = (1, CHANNELS_FIRST[nd], "OIDHW") if channels_last else (nd + 1, CHANNELS_LAST[nd], "DHWIO")
    last, first = (nd + 1, 0) if out_channels else (nd, 1)  # w's axis of x's channels, in either order
    expected = [w[a] * (1 if out_channels else groups) for a in ((last, first) if channels_last else (first, last))]
    if x[axis] not in expected:
        return ""
    filter_layout = order.replace("DHW", "DHW"[3 - nd :])
    return f". x has {x[axis]} along axis {axis}: layout={layout!r} has its channels there, and w as {filter_layout}"


@dataclasses.dataclass(frozen=True)
class AddedConvProblem(ConvProblem):
    """A convolution with its bias, and with an array like the result that is added: one whose sum's statistics are
    taken. Where nothing is added, a ConvProblem says it all."""

    residual: bool = False

    @classmethod
    def of(cls, conv: ConvProblem, residual: bool) -> AddedConvProblem:
        return cls(**conv.fields(), residual=residual)

    @property
    def conv(self) -> ConvProblem:
        """The convolution with its bias."""
        return ConvProblem(**self.fields())

    def __str__(self) -> str:
        return super().__str__() + " + residual" * self.residual


@dataclasses.dataclass(frozen=True)
class ShortcutConvProblem(ConvProblem):
    """A convolution and a shortcut, a second one of one tap and one group, without padding, whose sums are added."""

    # Of the shortcut; () is none.
    shortcut_channels: int = 0
    shortcut_spatial: tuple[int, ...] = ()
    shortcut_stride: tuple[int, ...] = ()

    @classmethod
    def of(cls, conv: ConvProblem, shortcut: ConvProblem) -> ShortcutConvProblem:
        """`shortcut` has y's pixels and channels."""
        return cls(
            **conv.fields(),
            shortcut_channels=shortcut.in_channels,
            shortcut_spatial=shortcut.in_spatial,
            shortcut_stride=shortcut.stride,
        )

    @property
    def has_shortcut(self) -> bool:
        return bool(self.shortcut_stride)

    @property
    def conv(self) -> ConvProblem:
        """The convolution of x and w, with what is behind all sums."""
        return ConvProblem(**self.fields())

    @property
    def shortcut(self) -> ConvProblem:
        """The one of x2 and w2, with nothing behind its sums."""
        return self.as_shortcut(self.conv.bare())

    def as_shortcut(self, p: AnyConv) -> AnyConv:
        """p as a convolution of x2 and w2."""
        ones = (1,) * self.nd
        return dataclasses.replace(
            p,
            in_channels=self.shortcut_channels,
            in_spatial=self.shortcut_spatial,
            filter=ones,
            stride=self.shortcut_stride,
            padding=((0, 0),) * self.nd,
            dilation=ones,
        )

    def __str__(self) -> str:
        if not self.has_shortcut:
            return super().__str__()
        extents = "x".join(map(str, self.shortcut_spatial))
        return f"{super().__str__()} + shortcut {extents} {self.shortcut_channels}->{self.out_channels}"


@dataclasses.dataclass(frozen=True)
class PooledConvProblem(ConvProblem):
    """A convolution and the max-pooling of its result, which is in no memory: see `pool`."""

    pool_window: tuple[int, ...] = ()
    pool_stride: tuple[int, ...] = ()
    pool_padding: tuple[Pair, ...] = ()
    pool_dilation: tuple[int, ...] = ()
    pool_spatial: tuple[int, ...] = ()  # of the pooling's result
    x_dtype: str = ""  # float32, beside a dtype of 16 bits to which it is rounded; else the dtype
    y_dtype: str = ""  # int8 or uint8: what is pooled is multiplied by y_scale, rounded and saturated; else the dtype
    y_scale: float = 0.0

    @classmethod
    def of(cls, conv: ConvProblem, pool: PoolProblem) -> PooledConvProblem:
        """`pool` of what `conv` makes."""
        return cls(
            **conv.fields(),
            pool_window=pool.window,
            pool_stride=pool.stride,
            pool_padding=pool.padding,
            pool_dilation=pool.dilation,
            pool_spatial=pool.out_spatial,
        )

    @property
    def conv(self) -> ConvProblem:
        """The convolution, with what is behind its sums."""
        return ConvProblem(**self.fields())

    @property
    def pool(self) -> PoolProblem:
        return PoolProblem(
            self.name,
            self.dtype,
            self.batch,
            self.out_channels,
            self.out_spatial,
            self.pool_window,
            self.pool_spatial,
            self.pool_stride,
            self.pool_padding,
            self.pool_dilation,
            self.channels_last,
            implementation="xla" if self.implementation == "xla" else None,
        )

    def __str__(self) -> str:
        text = f"{super().__str__()}, max-pool {'x'.join(map(str, self.pool_window))}"
        text += f" of {self.x_dtype}" if self.x_dtype else ""
        return text + (f" -> {self.y_dtype}" if self.y_dtype else "")


@dataclasses.dataclass(frozen=True)
class NormalisedConvProblem(ConvProblem):
    """A bare convolution of a batch-norm of x by known statistics, which is in no memory: see `norm`."""

    epsilon: float = 0.0
    x_activation: Activation = NO_ACTIVATION  # behind the batch-norm
    count: int | None = None  # elements a channel that dscale and dbias are of, where these are operands

    @property
    def norm(self) -> BatchNormProblem:
        """The batch-norm, as inference."""
        how = self.implementation if self.implementation == "xla" else None
        shape, axis = self.x_shape, self.channel_axis
        return BatchNormProblem(
            self.name, self.dtype, shape, axis, False, 0.0, self.epsilon, self.x_activation, implementation=how
        )

    @property
    def conv(self) -> ConvProblem:
        """The convolution."""
        return ConvProblem(**self.fields())

    def __str__(self) -> str:
        name = self.x_activation.name
        behind = "" if name == "none" else f" + {self.x_activation}"
        return f"batch-norm{behind}, {super().__str__()}"

    @classmethod
    def of(cls, norm: BatchNormProblem, conv: ConvProblem) -> NormalisedConvProblem:
        """`conv` of what `norm` makes of x."""
        return cls(**vars(conv), epsilon=norm.epsilon, x_activation=norm.activation)


@dataclasses.dataclass(frozen=True)
class BatchNormConvProblem:
    """A batch-norm in training, its activation, and a bare convolution of the result; of x, or of x's convolution."""

    norm: BatchNormProblem
    conv: ConvProblem
    before: ConvProblem | None = None  # bare: makes what is normalised
    save: bool = False  # also return what the backward pass keeps

    @property
    def name(self) -> str:
        return self.conv.name

    @property
    def normalised(self) -> NormalisedConvProblem:
        return NormalisedConvProblem.of(self.norm, self.conv)

    @property
    def pair(self) -> ConvBatchNormProblem | None:
        """The convolution before and the batch-norm."""
        return None if self.before is None else ConvBatchNormProblem(self.before, self.norm)

    def __str__(self) -> str:
        return f"{'' if self.before is None else f'{self.before}, '}{self.normalised}"


@dataclasses.dataclass(frozen=True)
class ConvBatchNormProblem:
    """A convolution and the batch-norm, in training, of its result."""

    conv: ConvProblem  # a bare one, or an AddedConvProblem
    norm: BatchNormProblem
    save: bool = False  # also return what the backward pass keeps

    @property
    def name(self) -> str:
        return self.conv.name

    def __str__(self) -> str:
        return str(self.conv)

    @classmethod
    def infer(
        cls,
        name: str,
        x: jax.Array,
        w: jax.Array,
        scale: jax.Array | None,
        bias: jax.Array | None,
        running_mean: jax.Array,
        running_var: jax.Array,
        residual: jax.Array | None,
        *,
        training: Any,
        momentum: Any,
        epsilon: Any,
        activation: Any,
        layout: Any,
        algorithm: Any,
        implementation: Any,
        **window: Any,
    ) -> ConvBatchNormProblem:
        nd = w.ndim - 2
        if nd not in CHANNELS_LAST:
            raise ValueError(f"{name}: w has {w.ndim} dimensions, expected 3, 4 or 5. {shapes(x=x, w=w)}")
        conv = ConvProblem.infer(
            name,
            nd,
            x,
            w,
            None,
            **window,
            activation=None,
            layout=CHANNELS_LAST[nd] if layout is None else layout,
            return_preactivation=False,
            algorithm=algorithm,
            implementation=implementation,
        )
        if conv.empty and training:
            raise ValueError(f"{name}: x or w is empty: there is nothing to take statistics of. {shapes(x=x, w=w)}")
        norm = BatchNormProblem.infer(
            name,
            jax.ShapeDtypeStruct(conv.y_shape, conv.dtype),
            scale,
            bias,
            running_mean,
            running_var,
            residual,
            training=training,
            momentum=momentum,
            epsilon=epsilon,
            activation=activation,
            channel_axis=conv.channel_axis,
            algorithm=None,
            implementation=implementation,
            of="the convolution's result",
        )
        return cls(conv, norm)

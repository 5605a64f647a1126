"""The problems: what a call asks for, in canonical numbers, and every user-facing error about it.

A problem is inferred once from the user's arguments. "SAME" becomes pairs, defaults become values, extents are
settled; nothing below re-derives them. Problems are frozen and hashable: they are the only parameter of the primitives.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxconv import _activation
from jaxconv._activation import Activation

DTYPES = ("float32", "bfloat16", "float16", "float64")
IMPLEMENTATIONS = ("native", "xla")
CONV_ALGORITHMS = ("wgmma", "implicit_gemm", "direct", "depthwise", "grouped", "stem", "im2col")
DENSE_ALGORITHMS = ("gemm", "wgmma")
BATCHNORM_ALGORITHMS = ("two_read", "resident_block", "resident_team")

NO_ACTIVATION = Activation()
Pair = tuple[int, int]
Precision = tuple[lax.Precision, lax.Precision]


# ----------------------------------------------------------------------------------------------------------------------
# Arguments that the three ops share


def as_array(where: str, argument: str, value: Any) -> jax.Array:
    """`value` as a jax array of a dtype that jaxconv knows, or a TypeError."""
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise TypeError(f"{where}: {argument} must be an array, got {type(value).__name__}")
    array = jnp.asarray(value)
    if array.dtype.name not in DTYPES:
        raise TypeError(f"{where}: {argument} has dtype {array.dtype.name}, expected one of {', '.join(DTYPES)}")
    return array


def as_mask(where: str, argument: str, value: Any) -> jax.Array:
    """`value` as a jax array, of whatever dtype."""
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise TypeError(f"{where}: {argument} must be an array, got {type(value).__name__}")
    return jnp.asarray(value)


def broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Whether an array of `shape` broadcasts to exactly the shape `to`."""
    return len(shape) <= len(to) and all(s in (1, t) for s, t in zip(shape[::-1], to[::-1], strict=False))


def same_dtype(where: str, **arrays: jax.Array | None) -> str:
    given = {k: v.dtype.name for k, v in arrays.items() if v is not None}
    if len(set(given.values())) > 1:
        raise TypeError(
            f"{where}: all arrays must have one dtype, got " + ", ".join(f"{k}: {v}" for k, v in given.items())
        )
    return next(iter(given.values()))


def _shapes(**arrays: Any) -> str:
    return ", ".join(f"{k}={tuple(v.shape)}" for k, v in arrays.items() if v is not None)


def parse_precision(where: str, precision: Any) -> Precision:
    """What lax takes (None, a name, a Precision, a pair of these) -> a pair. None is jax.default_matmul_precision."""

    def one(value: Any) -> lax.Precision:
        if value is None:
            value = jax.config.jax_default_matmul_precision
            try:
                return lax.Precision.DEFAULT if value is None else lax.Precision(value)
            except ValueError:
                return lax.Precision.DEFAULT  # a dot algorithm: it does not apply to convolutions in lax either
        try:
            return lax.Precision(value)
        except ValueError:
            raise ValueError(
                f"{where}: precision={precision!r} is unknown, expected None, 'default', 'high', 'highest', "
                f"a jax.lax.Precision, or a pair of these"
            ) from None

    if isinstance(precision, (tuple, list)):
        if len(precision) != 2:
            raise ValueError(f"{where}: precision={precision!r} has {len(precision)} entries, expected a pair (x, w)")
        return one(precision[0]), one(precision[1])
    return one(precision), one(precision)


def check_choice(where: str, implementation: Any, algorithm: Any, algorithms: tuple[str, ...]) -> None:
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{where}: implementation={implementation!r} is unknown, expected None, 'native' or 'xla'")
    if algorithm is not None and algorithm not in algorithms:
        raise ValueError(
            f"{where}: algorithm={algorithm!r} is unknown, expected None or one of {', '.join(algorithms)}"
        )
    if algorithm is not None and implementation == "xla":
        raise ValueError(
            f"{where}: algorithm={algorithm!r} is a native algorithm, but implementation='xla' was asked for"
        )


def _integer(where: str, argument: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{where}: {argument} must be an integer, got {value!r}") from None


def integers(where: str, argument: str, value: Any, nd: int, minimum: int) -> tuple[int, ...]:
    """An int, or `nd` of them -> a tuple of `nd` ints of at least `minimum`."""
    if (isinstance(value, Sequence) and not isinstance(value, str)) or isinstance(value, np.ndarray):
        values = tuple(_integer(where, argument, v) for v in value)
    else:
        values = (_integer(where, argument, value),) * nd
    if len(values) != nd:
        raise ValueError(f"{where}: {argument}={value!r} has {len(values)} entries, expected an int or {nd} of them")
    if min(values) < minimum:
        raise ValueError(f"{where}: {argument}={value!r} must be at least {minimum}")
    return values


def _number(where: str, argument: str, value: Any) -> float:
    if isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool):
        return float(value)
    raise TypeError(
        f"{where}: {argument} must be a Python number (it is fixed when the function is traced), got {value!r}"
    )


# ----------------------------------------------------------------------------------------------------------------------
# Convolution


def out_extent(extent: int, filter: int, stride: int, pads: Pair, dilation: int) -> int:
    """The one statement of a convolution's output extent (below one where no window fits)."""
    window = (filter - 1) * dilation + 1
    return (extent + pads[0] + pads[1] - window) // stride + 1


def parse_padding(
    where: str,
    padding: Any,
    in_spatial: tuple[int, ...],
    filter: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
) -> tuple[Pair, ...]:
    nd = len(in_spatial)
    expected = f"expected 'SAME', 'SAME_LOWER', 'VALID', an int, {nd} ints, or {nd} pairs (low, high)"
    if isinstance(padding, str):
        mode = padding.upper()
        if mode == "VALID":
            return ((0, 0),) * nd
        if mode not in ("SAME", "SAME_LOWER"):
            raise ValueError(f"{where}: padding={padding!r} is unknown, {expected}")
        pairs = []
        for size, k, s, d in zip(in_spatial, filter, stride, dilation, strict=True):
            total = max((-(-size // s) - 1) * s + (k - 1) * d + 1 - size, 0)
            half = total // 2
            pairs.append((half, total - half) if mode == "SAME" else (total - half, half))
        return tuple(pairs)
    if isinstance(padding, (Sequence, np.ndarray)):
        if len(padding) != nd:
            raise ValueError(f"{where}: padding={padding!r} has {len(padding)} entries, {expected}")
        pairs = []
        for entry in padding:
            if isinstance(entry, (Sequence, np.ndarray)) and not isinstance(entry, str):
                if len(entry) != 2:
                    raise ValueError(f"{where}: padding={padding!r} has an entry {entry!r}, {expected}")
                pairs.append((_integer(where, "padding", entry[0]), _integer(where, "padding", entry[1])))
            else:
                value = _integer(where, "padding", entry)
                pairs.append((value, value))
        return tuple(pairs)
    value = _integer(where, "padding", padding)
    return ((value, value),) * nd


def parse_transposed_padding(
    where: str, padding: Any, filter: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> tuple[Pair, ...]:
    """lax.conv_transpose's padding of the stride-dilated input."""
    if not isinstance(padding, str):
        ones = (1,) * len(filter)
        return parse_padding(where, padding, ones, ones, ones, ones)
    mode = padding.upper()
    pairs = []
    for k, s, d in zip(filter, stride, dilation, strict=True):
        k = (k - 1) * d + 1
        if mode == "SAME":
            total = k + s - 2
            low = k - 1 if s > k - 1 else -(-total // 2)
        elif mode == "VALID":
            total = k + s - 2 + max(k - s, 0)
            low = k - 1
        else:
            raise ValueError(f"{where}: padding={padding!r} is unknown, expected 'SAME', 'VALID', or low and high pads")
        pairs.append((low, total - low))
    return tuple(pairs)


CHANNELS_LAST = {1: "NWC", 2: "NHWC", 3: "NDHWC"}
CHANNELS_FIRST = {1: "NCW", 2: "NCHW", 3: "NCDHW"}


def parse_layout(where: str, layout: Any, nd: int) -> bool:
    """The layout's name -> whether channels are last."""
    if layout == CHANNELS_LAST[nd]:
        return True
    if layout == CHANNELS_FIRST[nd]:
        return False
    raise ValueError(f"{where}: layout={layout!r} is unknown, expected '{CHANNELS_LAST[nd]}' or '{CHANNELS_FIRST[nd]}'")


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
    padding: tuple[Pair, ...]  # (low, high); negative values crop
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
        return lax.Precision.HIGHEST in self.precision

    @property
    def depthwise(self) -> bool:
        return self.groups == self.in_channels

    @property
    def pointwise(self) -> bool:
        """1x1, stride 1, unpadded: a plain matrix product."""
        return (
            all(f == 1 for f in self.filter) and self.out_spatial == self.in_spatial and set(self.padding) == {(0, 0)}
        )

    def steps_by_filter(self, axis: int) -> bool:
        """Whether the axis is cut into windows that touch and do not overlap (a single tap: whether it is left
        alone)."""
        f = self.filter[axis]
        steps = (self.stride[axis], self.padding[axis]) == (f, (0, 0)) and (f == 1 or self.dilation[axis] == 1)
        return steps and self.in_spatial[axis] == self.out_spatial[axis] * f

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

    # ---- readings
    def bare(self) -> ConvProblem:
        """The same convolution without its epilogue."""
        return dataclasses.replace(self, bias=False, activation=NO_ACTIVATION, save_preactivation=False)

    def folded(self, dgrad: bool) -> ConvProblem:
        """The convolution as the matrix loops run it (FoldPatches in cuda/conv/conv.cu): where the filter steps by its
        own width, S neighbouring pixels are one of S*C channels; likewise for its height, each output row is an image
        of its own (not for dgrad)."""

        def patches(axis: int) -> bool:
            return self.filter[axis] > 1 and self.steps_by_filter(axis)

        if self.groups != 1 or not patches(-1):
            return self
        batch, channels = self.batch, self.in_channels * self.filter[-1]
        filter, stride = [*self.filter[:-1], 1], [*self.stride[:-1], 1]
        in_spatial, out_spatial = [*self.in_spatial[:-1], self.out_spatial[-1]], list(self.out_spatial)
        flat = self.nd < 3 or (self.filter[0] == 1 and self.steps_by_filter(0))
        if not dgrad and self.nd > 1 and flat and patches(-2):
            batch *= math.prod(out_spatial[:-1])
            in_spatial[:-1] = [*[1] * (self.nd - 2), self.filter[-2]]
            out_spatial[:-1] = [1] * (self.nd - 1)
            stride[-2] = 1
        return dataclasses.replace(
            self,
            batch=batch,
            in_channels=channels,
            in_spatial=tuple(in_spatial),
            out_spatial=tuple(out_spatial),
            filter=tuple(filter),
            stride=tuple(stride),
        )

    def patch_product(self) -> DenseProblem:
        """dgrad where windows do not overlap: dy's pixels (M, K) times w (R*S*C, K), transposed; rows are windows."""
        pixels, columns = self.batch * math.prod(self.out_spatial), math.prod(self.filter) * self.in_channels
        return DenseProblem(self.name, self.dtype, pixels, self.out_channels, columns, self.precision, trans_w=True)

    def __str__(self) -> str:
        x, k = "x".join(map(str, self.in_spatial)), "x".join(map(str, self.filter))
        text = f"{self.batch}x{x} {self.in_channels}->{self.out_channels} {k}"
        if set(self.stride) != {1}:
            text += " s" + ",".join(map(str, dict.fromkeys(self.stride)))
        if set(self.dilation) != {1}:
            text += " d" + ",".join(map(str, dict.fromkeys(self.dilation)))
        if self.groups > 1:
            text += f" g{self.groups}"
        return f"{text} {self.dtype} {(CHANNELS_LAST if self.channels_last else CHANNELS_FIRST)[self.nd]}"

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
    ) -> ConvProblem:
        channels_last = parse_layout(name, layout, nd)
        filter_layout = ("DHWIO" if channels_last else "OIDHW").replace("DHW", "DHW"[3 - nd :])
        dtype = same_dtype(name, x=x, w=w, b=b)
        seen = _shapes(x=x, w=w, b=b)
        if x.ndim != nd + 2:
            raise ValueError(f"{name}: x has {x.ndim} dimensions, expected {nd + 2} ({layout}). {seen}")
        if w.ndim != nd + 2:
            raise ValueError(f"{name}: w has {w.ndim} dimensions, expected {nd + 2} ({filter_layout}). {seen}")
        groups = _integer(name, "groups", groups)
        stride = integers(name, "stride", stride, nd, 1)
        dilation = integers(name, "dilation", dilation, nd, 1)
        if channels_last:
            batch, in_spatial, c = x.shape[0], x.shape[1:-1], x.shape[-1]
            filter, group_c, k = w.shape[:-2], w.shape[-2], w.shape[-1]
        else:
            batch, c, in_spatial = x.shape[0], x.shape[1], x.shape[2:]
            k, group_c, filter = w.shape[0], w.shape[1], w.shape[2:]
        for argument, extents in (("x", (c, *in_spatial)), ("w", (*filter, group_c, k))):
            if 0 in extents:
                raise ValueError(f"{name}: {argument} is empty: only the batch extent may be 0. {seen}")
        if groups < 1:
            raise ValueError(f"{name}: groups={groups} must be at least 1")
        if k % groups:
            raise ValueError(f"{name}: groups={groups} does not divide the {k} output channels of w. {seen}")
        if c % groups:
            raise ValueError(f"{name}: groups={groups} does not divide the {c} channels of x. {seen}")
        if group_c * groups != c:
            raise ValueError(
                f"{name}: w expects {group_c * groups} input channels, x has {c} (groups={groups}). {seen}"
            )
        if b is not None and b.shape != (k,):
            raise ValueError(f"{name}: b has shape {b.shape}, expected ({k},), one per output channel. {seen}")
        pads = parse_padding(name, padding, in_spatial, filter, stride, dilation)
        out = tuple(map(out_extent, in_spatial, filter, stride, pads, dilation))
        if min(out) < 1:
            raise ValueError(
                f"{name}: the output would have spatial extents {out}, expected at least 1: the padded input "
                f"is smaller than the dilated filter. padding={pads}, dilation={dilation}, {seen}"
            )
        check_choice(name, implementation, algorithm, CONV_ALGORITHMS)
        return cls(
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
            padding=pads,
            dilation=dilation,
            channels_last=channels_last,
            precision=parse_precision(name, precision),
            bias=b is not None,
            activation=_activation.parse(name, activation),
            save_preactivation=bool(return_preactivation),
            implementation=implementation,
            algorithm=algorithm,
        )

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
        pads = parse_transposed_padding(name, padding, filter, stride, dilation)
        groups = integers(name, "groups", groups, 1, 1)[0]
        seen = _shapes(x=x, w=w, b=b)
        c = x.shape[-1 if channels_last else 1]
        in_axis, out_axis = (nd, nd + 1) if channels_last else (1, 0)
        # With transpose_kernel the filter is the forward convolution's: its input channels are this one's output.
        if transpose_kernel:
            k, expected = w.shape[in_axis] * groups, w.shape[out_axis]
        else:
            k, expected = w.shape[out_axis], w.shape[in_axis] * groups
        for argument, extents in (("x", x.shape[1:]), ("w", w.shape)):
            if 0 in extents:
                raise ValueError(f"{name}: {argument} is empty: only the batch extent may be 0. {seen}")
        if expected != c:
            raise ValueError(f"{name}: w expects {expected} input channels, x has {c} (groups={groups}). {seen}")
        if c % groups or k % groups:
            raise ValueError(f"{name}: groups={groups} does not divide the channels {c} -> {k}. {seen}")
        if b is not None and b.shape != (k,):
            raise ValueError(f"{name}: b has shape {b.shape}, expected ({k},), one per output channel. {seen}")
        in_spatial = tuple(x.shape[1:-1] if channels_last else x.shape[2:])
        windows = [(f - 1) * d for f, d in zip(filter, dilation, strict=True)]
        out = tuple(
            (size - 1) * s + 1 + low + high - window
            for size, s, (low, high), window in zip(in_spatial, stride, pads, windows, strict=True)
        )
        if min(out) < 1:
            raise ValueError(f"{name}: the output would have spatial extents {out}, expected at least 1. {seen}")
        check_choice(name, implementation, algorithm, CONV_ALGORITHMS)
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
            precision=parse_precision(name, precision),
            bias=b is not None,
            activation=_activation.parse(name, activation),
            save_preactivation=bool(return_preactivation),
            implementation=implementation,
            algorithm=algorithm,
        )


# ----------------------------------------------------------------------------------------------------------------------
# Dense


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
        return lax.Precision.HIGHEST in self.precision

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

    def __str__(self) -> str:
        x, w = "T" * self.trans_x or "N", "T" * self.trans_w or "N"
        batch = "" if self.batch is None else f"{self.batch}x "
        return f"{batch}{self.m}x{self.k}x{self.n} {x}{w} {self.dtype}"

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
        seen = _shapes(x=x, w=w, b=b, c=c)
        if x.ndim < 1:
            raise ValueError(f"{name}: x has 0 dimensions, expected (..., K). {seen}")
        if w.ndim != 2:
            raise ValueError(f"{name}: w has {w.ndim} dimensions, expected 2 (K, N). {seen}")
        lead, (k, n) = x.shape[:-1], w.shape
        if x.shape[-1] != k:
            raise ValueError(f"{name}: w expects {k} input features, x has {x.shape[-1]}. {seen}")
        if k == 0 or n == 0:
            raise ValueError(f"{name}: w is empty: only the leading extents of x may be 0. {seen}")
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
        check_choice(name, implementation, algorithm, DENSE_ALGORITHMS)
        return cls(
            name=name,
            dtype=dtype,
            m=m,
            k=k,
            n=n,
            precision=parse_precision(name, precision),
            alpha=_number(name, "alpha", alpha),
            beta=_number(name, "beta", beta),
            bias=bias,
            addend=c is not None,
            activation=_activation.parse(name, activation),
            save_preactivation=bool(return_preactivation),
            implementation=implementation,
            algorithm=algorithm,
        )


# ----------------------------------------------------------------------------------------------------------------------
# Batch-norm


@dataclasses.dataclass(frozen=True)
class BatchNormProblem:
    """Normalisation over every axis of x but `channel_axis`; y = f((x - mean) * rstd * scale + bias + residual)."""

    name: str
    dtype: str
    shape: tuple[int, ...]  # of x, without the instance axis
    channel_axis: int  # in [0, len(shape))
    training: bool
    momentum: float
    epsilon: float
    activation: Activation = NO_ACTIVATION
    residual: bool = False
    masked: bool = False  # the statistics are those of a part of x
    batch: int | None = None  # instances made by vmap, the leading axis of every array
    # The backward pass: what is wanted besides the sums
    want_dx: bool = True
    want_dresidual: bool = False
    implementation: str | None = None
    algorithm: str | None = None

    @property
    def lead(self) -> tuple[int, ...]:
        return () if self.batch is None else (self.batch,)

    @property
    def x_shape(self) -> tuple[int, ...]:
        return (*self.lead, *self.shape)

    @property
    def channels(self) -> int:
        return self.shape[self.channel_axis]

    @property
    def param_shape(self) -> tuple[int, ...]:
        return (*self.lead, self.channels)

    @property
    def param_dtype(self) -> str:
        """Parameters and statistics are float32 for 16-bit x."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def outer(self) -> int:
        result = 1
        for extent in self.shape[: self.channel_axis]:
            result = result * extent
        return result

    @property
    def inner(self) -> int:
        result = 1
        for extent in self.shape[self.channel_axis + 1 :]:
            result = result * extent
        return result

    @property
    def reduced(self) -> int:
        """Elements per channel."""
        return self.outer * self.inner

    @property
    def size(self) -> int:
        return (self.batch or 1) * self.reduced * self.channels

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.x_shape))} channel_axis={self.channel_axis} {self.dtype}"

    @classmethod
    def infer(
        cls,
        name: str,
        x: jax.Array,
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
        channel_axis: Any,
        algorithm: Any,
        implementation: Any,
        mask: jax.Array | None = None,
        mean: jax.Array | None = None,
        var: jax.Array | None = None,
        of: str = "x",  # what x is called in messages
    ) -> BatchNormProblem:
        seen = _shapes(
            **{of: x}, scale=scale, bias=bias, running_mean=running_mean, running_var=running_var, residual=residual
        )
        dtype = same_dtype(name, **{of: x}, residual=residual)
        if x.ndim < 2:
            raise ValueError(f"{name}: x has {x.ndim} dimensions, expected at least 2 (N, ..., C). {seen}")
        if not isinstance(training, (bool, np.bool_)):
            raise TypeError(
                f"{name}: training must be True or False (it is fixed when the function is traced), got {training!r}"
            )
        axis = _integer(name, "channel_axis", channel_axis)
        if not -x.ndim <= axis < x.ndim:
            raise ValueError(f"{name}: channel_axis={axis} is out of range for {x.ndim} dimensions. {seen}")
        axis %= x.ndim
        c = x.shape[axis]
        problem = cls(
            name=name,
            dtype=dtype,
            shape=tuple(x.shape),
            channel_axis=axis,
            training=bool(training),
            momentum=_number(name, "momentum", momentum),
            epsilon=_number(name, "epsilon", epsilon),
            activation=_activation.parse(name, activation),
            residual=residual is not None,
            masked=mask is not None and bool(training),
            implementation=implementation,
            algorithm=algorithm,
        )
        parameters = {"scale": scale, "bias": bias, "running_mean": running_mean, "running_var": running_var}
        parameters |= {"the mean of statistics": mean, "the variance of statistics": var}
        for argument, value in parameters.items():
            if value is None:
                continue
            if value.shape != (c,):
                raise ValueError(
                    f"{name}: {argument} has shape {value.shape}, expected ({c},), one per channel. {seen}"
                )
            if value.dtype.name != problem.param_dtype:
                raise TypeError(
                    f"{name}: {argument} has dtype {value.dtype.name}, expected {problem.param_dtype} "
                    f"for {of} of {dtype}"
                )
        if residual is not None and residual.shape != x.shape:
            raise ValueError(f"{name}: residual has shape {residual.shape}, expected {x.shape}, that of {of}. {seen}")
        if mask is not None:
            if mean is not None:
                raise ValueError(f"{name}: mask and statistics exclude each other: statistics are those of all of x")
            if mask.dtype != np.bool_:
                raise TypeError(f"{name}: mask has dtype {mask.dtype.name}, expected bool")
            if not broadcasts(mask.shape, x.shape):
                raise ValueError(f"{name}: mask has shape {mask.shape}, which does not broadcast to x's. {seen}")
        if c == 0:
            raise ValueError(f"{name}: x has no channels. {seen}")
        if training and problem.reduced == 0:
            raise ValueError(f"{name}: x is empty: training statistics need at least one element a channel. {seen}")
        if problem.epsilon < 0:
            raise ValueError(f"{name}: epsilon={epsilon!r} must not be negative")
        if not 0 <= problem.momentum <= 1:
            raise ValueError(f"{name}: momentum={momentum!r} must be between 0 and 1")
        check_choice(name, implementation, algorithm, BATCHNORM_ALGORITHMS)
        return problem


# ----------------------------------------------------------------------------------------------------------------------
# Convolution and batch-norm


@dataclasses.dataclass(frozen=True)
class ConvBatchNormProblem:
    """A bare convolution and the batch-norm, in training, of its result."""

    conv: ConvProblem
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
            raise ValueError(f"{name}: w has {w.ndim} dimensions, expected 3, 4 or 5. {_shapes(x=x, w=w)}")
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

"""Is a result right? Each is compared with a float64 evaluation that shares no code with what is measured.

Convolutions are sums over filter taps of shifted matrix products; batch-norm and dense layers are their formulas, and
their gradients are written out by hand. It runs on the default device.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.cases import (
    BatchNormCase,
    BatchNormConvCase,
    Case,
    ConvBatchNormCase,
    ConvCase,
    DenseCase,
    DenseGradientCase,
    DgradSumsCase,
    GroupNormCase,
    LayerNormCase,
    PoolCase,
    ShortcutCase,
    SqueezeExciteCase,
)

Array = jax.Array

EPSILON = 1e-5
MOMENTUM = 0.99
UNIT_ROUNDOFF = {"bf16": 2.0**-8, "f16": 2.0**-11, "f32": 2.0**-24}


# For the references: the fastest float64 product is not worth the seconds that finding it takes.
UNTUNED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}

# What a contender returns, in this order
RESULTS = {
    ("conv", "fprop"): ("y",),
    ("conv", "dgrad"): ("dx",),
    ("conv", "wgrad"): ("dw",),
    ("dense", "fwd"): ("y",),
    ("dense", "saved"): ("y", "z"),
    ("dense", "dgrad"): ("dx",),
    ("dense", "wgrad"): ("dw",),
    ("dense", "fwd+bwd"): ("y", "dx", "dw", "db"),
    ("dense_gradient", "dgrad"): ("dz", "db"),
    ("batchnorm", "fwd"): ("y", "new_mean", "new_var"),
    ("batchnorm", "infer"): ("y",),
    ("batchnorm", "bwd"): ("dx", "dscale", "dbias"),
    ("conv_batchnorm", "fwd"): ("y", "new_mean", "new_var"),
    ("conv_batchnorm", "infer"): ("y",),
    ("batchnorm_conv", "fprop"): ("y",),
    ("batchnorm_conv", "wgrad"): ("dw",),
    ("batchnorm_conv", "pair"): ("y", "dw"),
    ("batchnorm_conv", "bwd"): ("dw", "dscale", "dbias", "dx"),
    ("conv_dgrad_sums", "dgrad"): ("dz", "dscale", "dbias"),
    ("batchnorm", "fwd+bwd"): ("y", "new_mean", "new_var", "dx", "dscale", "dbias"),
    ("batchnorm_shortcut", "fwd+bwd"): ("y", "dscale", "dbias", "dscale_r", "dx", "dr"),
    ("pool", "fwd"): ("y",),
    ("pool", "fwd+bwd"): ("y", "dx"),
    ("groupnorm", "fwd"): ("y",),
    ("groupnorm", "fwd+bwd"): ("y", "dx", "dscale", "dbias"),
    ("squeeze_excite", "fwd"): ("y",),
    ("squeeze_excite", "fwd+bwd"): ("y", "dx", "dw1", "db1", "dw2", "db2"),
    ("layernorm", "fwd"): ("y",),
    ("layernorm", "fwd+bwd"): ("y", "dx", "dscale", "dbias"),
    ("batchnorm", "residual"): ("y", "new_mean", "new_var", "dx", "dscale", "dbias", "dresidual"),
}


@dataclasses.dataclass(frozen=True)
class Verdict:
    error: float  # the largest of all results' errors, relative to its tolerance's scale
    tolerance: float
    result: str  # the result that is worst

    @property
    def right(self) -> bool:
        return self.error <= self.tolerance  # false for NaN

    def __str__(self) -> str:
        return f"{self.error:.1e} of {self.tolerance:.1e}"


def check(
    case: Case,
    pass_: str,
    dtype: str,
    precision: str | None,
    channels_last: bool,
    arrays: dict[str, Array],
    outs: Sequence,
) -> Verdict:
    """Compares `outs`, in the order of `RESULTS` (None: not compared), with the reference."""
    with jax.enable_x64(True):
        want = reference(case, pass_, channels_last, arrays, outs)
        verdicts = []
        for name, out in zip(RESULTS[case.op, pass_], outs, strict=True):
            if out is None:
                continue
            ref, skip = want[name]
            if out.shape != ref.shape:
                raise AssertionError(f"{case.name} {pass_}: {name} has shape {out.shape}, expected {ref.shape}")
            norm, largest = map(float, _errors(out, ref, skip))
            tol = tolerance(case, pass_, name, dtype, precision)
            # Rounding errors are near normal: of 1e9 elements none is beyond 6.2 deviations, so 8 tolerances (each at
            # least twice the deviation) hold for every element, and a wrong element is far outside.
            error = math.nan if math.isnan(norm) or math.isnan(largest) else max(norm, largest / 8)
            verdicts.append(Verdict(error, tol, name))
    wrong = [v for v in verdicts if not v.right]
    return wrong[0] if wrong else max(verdicts, key=lambda v: v.error / v.tolerance)


@jax.jit
def _errors(out: Array, ref: Array, skip: Array | None) -> tuple[Array, Array]:
    """(|out - ref| / |ref|, the largest |out - ref| / (|ref| + rms(ref)) of an element)."""
    difference = jnp.abs(out.astype(ref.dtype) - ref)
    if skip is not None:
        difference = jnp.where(skip & ~jnp.isnan(difference), 0, difference)
    square = jnp.mean(ref * ref)
    return jnp.sqrt(jnp.mean(difference * difference) / square), jnp.max(difference / (jnp.abs(ref) + jnp.sqrt(square)))


# Roundings of random sign in a layer: product, bias, and each operation of the activation, there and back.
_CHAIN = {"none": 2, "relu": 3, "tanh": 5, "silu": 10, "gelu": 14}


def tolerance(case: Case, pass_: str, result: str, dtype: str, precision: str | None) -> float:
    """Twice the relative error (in the norm) that correct code may have.

    A sum of n products of random sign: rounding to nearest adds u32 sqrt(n) at most; matrix units truncate, once per 16
    terms at least, which is a bias of 2^-23 of the partial sum, a third of the last one on average over the sum. TF32
    keeps 10 bits of each operand, cut off. On a CPU nothing is cut. Results are rounded to their dtype.
    """
    u, u32 = UNIT_ROUNDOFF[dtype], UNIT_ROUNDOFF["f32"]
    matrix_units = jax.default_backend() != "cpu" and not (dtype == "f32" and precision == "highest")

    def product(n: int) -> float:
        error = u32 * math.sqrt(n)
        if matrix_units:
            error += n / 16 * 2.0**-23 / 3 + (2.0**-10 if dtype == "f32" else 0)
        elif dtype == "f32":
            # Winograd and FFT algorithms, which a library may pick, lose up to 9 bits; TF32 would lose 13.
            error = max(error, u32 * 2**9)
        return error

    if isinstance(case, ConvBatchNormCase):
        # z is rounded once, or filters and offset are; y is rounded; then as a batch-norm. Statistics are of rounded z.
        return 2 * (3 * u + product(case.terms("fprop")) + u32 * (16 + math.sqrt(case.reduced)))
    if isinstance(case, BatchNormConvCase):  # what is convolved is rounded too
        return 2 * (2 * u + product(case.terms("fprop" if result == "y" else "wgrad")))
    if isinstance(case, DgradSumsCase):  # what is summed is a dgrad, rounded before c is added or only behind it
        sums = 0.0 if result == "dz" else u32 * (16 + math.sqrt(case.reduced))
        return 2 * (2 * u + product(case.terms(pass_)) + sums)
    if isinstance(case, ConvCase):
        return 2 * (u + product(case.terms(pass_)))
    if isinstance(case, DenseCase):
        if pass_ in ("dgrad", "wgrad"):
            return 2 * (u + product({"dx": case.n, "dw": case.m}[result]))
        chain = _CHAIN[case.activation]
        n = {"y": case.k, "z": case.k, "dx": case.n, "dw": case.m, "db": case.m}[result]
        # Backward sums sum what forward sums produced.
        return 2 * (u * math.sqrt(chain) + product(n) + (product(case.k) if result not in ("y", "z") else 0))
    if isinstance(case, DenseGradientCase):
        sums = product(case.m) if result == "db" else 0.0
        return 2 * (u * math.sqrt(_CHAIN[case.activation]) + product(case.k) + sums)
    if isinstance(case, PoolCase):
        # y is exact (any tolerance above 0 says so); of dx XLA may add up a pixel's windows in its type, one by one.
        windows = math.prod((-(-case.window // case.stride),) * len(case.spatial))
        return u32 if result == "y" else 2 * u * windows
    if isinstance(case, SqueezeExciteCase):
        # Of 16 bits XLA's mean, hidden numbers, gates and their gradients are rounded: some four roundings to a gate,
        # twice as many to a parameter's gradient.
        sums = product(max(case.channels, case.hidden, case.batch)) + u32 * (16 + math.sqrt(math.prod(case.spatial)))
        return 2 * ((4 if result in ("y", "dx") else 8) * u + sums)
    if isinstance(case, GroupNormCase):
        # Float32 sums over a group or row, of its gradient over all images; y is rounded before silu and behind it.
        n = case.reduced if result in ("y", "dx") else case.elements // case.channels
        sums = u32 * (16 + math.sqrt(n))
        return 2 * (3 * u + sums if result in ("y", "dx") else sums + (u if pass_ == "fwd+bwd" else 0))
    assert isinstance(case, BatchNormCase)
    # Statistics: float32 sums of `reduced` terms; y and dx a dozen operations on them.
    sums = u32 * (16 + math.sqrt(case.reduced))
    if result in ("y", "dx", "dr", "dresidual"):
        return 2 * (2 * u + sums)
    if pass_ in ("fwd+bwd", "residual") and result in ("dscale", "dbias", "dscale_r"):
        # The sign of a z within float32 rounding of 0 is open: of n terms, n 2^-20 may be in the sum or not.
        return 2 * (2.0**-10 + sums)
    return 2 * sums


# ----------------------------------------------------------------------------------------------------------------------
# References in float64: {result: (value, elements that are not determined, or None)}


def reference(
    case: Case, pass_: str, channels_last: bool, arrays: dict[str, Array], outs: Sequence[Array | None]
) -> dict[str, tuple[Array, Array | None]]:
    # Jitted by case, so that all contenders share one compilation
    if isinstance(case, ConvBatchNormCase):
        z = _conv(ConvCase(**dataclasses.asdict(case)), "fprop", channels_last, {**arrays, "dy": arrays["x"]})
        found = _batchnorm(pass_, channels_last, {**arrays, "x": z})
        return {**found, "y": (jnp.maximum(found["y"][0], 0), None)}
    if isinstance(case, BatchNormConvCase):
        a = {**arrays, "x": _normalised(case, channels_last, arrays)}
        if pass_ == "bwd":
            da = _conv(case.conv, "dgrad", channels_last, arrays)
            found = _normalised_backward(case, channels_last, arrays, da)
            return {**found, "dw": (_conv(case.conv, "wgrad", channels_last, a), None)}
        parts = {"fprop": ("y",), "wgrad": ("dw",)}.get(pass_, ("y", "dw"))
        passes = {"y": "fprop", "dw": "wgrad"}
        return {name: (_conv(case.conv, passes[name], channels_last, a), None) for name in parts}
    if isinstance(case, DgradSumsCase):
        return _dgrad_sums(arrays, _conv(case.conv, "dgrad", channels_last, arrays))
    if isinstance(case, ConvCase):
        return {{"fprop": "y", "dgrad": "dx", "wgrad": "dw"}[pass_]: (_conv(case, pass_, channels_last, arrays), None)}
    if isinstance(case, DenseCase):
        return _dense(case, pass_, arrays, outs[0])
    if isinstance(case, DenseGradientCase):
        return _dense_gradient(case, arrays)
    if isinstance(case, PoolCase):
        return _pool(case, channels_last, arrays)
    if isinstance(case, SqueezeExciteCase):
        return _squeeze_excite(pass_, arrays)
    if isinstance(case, GroupNormCase):
        return _groupnorm(case, pass_, arrays)
    if isinstance(case, ShortcutCase):
        return _shortcut(arrays, outs[0])
    return _batchnorm(pass_, channels_last, arrays, outs[0] if pass_ == "residual" else None)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), compiler_options=UNTUNED)
def _conv(case: ConvCase, pass_: str, channels_last: bool, arrays: dict[str, Array]) -> Array:
    nd = case.nd
    if not channels_last:
        to_last, filter_to_last = (0, *range(2, nd + 2), 1), (*range(2, nd + 2), 1, 0)
        arrays = {k: jnp.transpose(v, filter_to_last if k == "w" else to_last) for k, v in arrays.items()}
    x, w, dy = arrays["x"], arrays["w"], arrays["dy"]
    if pass_ == "wgrad":
        dw = _conv_wgrad(case, x, dy)
        return dw if channels_last else jnp.transpose(dw, (nd + 1, nd, *range(nd)))
    value = _conv_fprop(case, x, w) if pass_ == "fprop" else _conv_dgrad(case, dy, w)
    return value if channels_last else jnp.transpose(value, (0, nd + 1, *range(1, nd + 1)))


def _wide(a: Array) -> Array:
    return a.astype(jnp.float64)


_ACTIVATIONS = {"relu": jax.nn.relu, "relu6": jax.nn.relu6, "silu": jax.nn.silu}


def _normalised(case: BatchNormConvCase, channels_last: bool, arrays: dict[str, Array]) -> Array:
    axes = tuple(range(case.nd + 1)) if channels_last else (0, *range(2, case.nd + 2))
    scale, bias, mean, var = (lax.expand_dims(_wide(arrays[n]), axes) for n in ("scale", "bias", "mean", "var"))
    z = (_wide(arrays["x"]) - mean) / jnp.sqrt(var + EPSILON) * scale + bias
    return _ACTIVATIONS[case.activation](z)


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=UNTUNED)
def _normalised_backward(
    case: BatchNormConvCase, channels_last: bool, arrays: dict[str, Array], da: Array
) -> dict[str, tuple[Array, Array | None]]:
    """dscale, dbias and dx of a batch-norm in training that has these statistics, da being its result's gradient."""
    axes = tuple(range(case.nd + 1)) if channels_last else (0, *range(2, case.nd + 2))
    scale, mean, var = (lax.expand_dims(_wide(arrays[n]), axes) for n in ("scale", "mean", "var"))
    rstd = 1 / jnp.sqrt(var + EPSILON)
    xhat = (_wide(arrays["x"]) - mean) * rstd
    z = xhat * scale + lax.expand_dims(_wide(arrays["bias"]), axes)
    dz = jax.vjp(_ACTIVATIONS[case.activation], z)[1](da)[0]
    dscale, dbias = jnp.sum(dz * xhat, axes, keepdims=True), jnp.sum(dz, axes, keepdims=True)
    n = dz.size // dbias.size
    dx = scale * rstd * (dz - dbias / n - xhat * dscale / n)
    # A thread that rounds z otherwise takes another side of a kink.
    kinks = {"relu": (0.0,), "relu6": (0.0, 6.0)}.get(case.activation, ())
    near = functools.reduce(jnp.logical_or, [jnp.abs(z - kink) < 1e-4 for kink in kinks], jnp.zeros(z.shape, bool))
    return {"dscale": (dscale.ravel(), None), "dbias": (dbias.ravel(), None), "dx": (dx, near)}


@functools.partial(jax.jit, compiler_options=UNTUNED)
def _dgrad_sums(arrays: dict[str, Array], dx: Array) -> dict[str, tuple[Array, Array | None]]:
    """Of channels-last arrays; the signs' bit of channel c is bit c % 8 of byte c / 8."""
    signs = arrays["signs"]
    above = jnp.stack([(signs & (1 << bit)) != 0 for bit in range(8)], -1).reshape(dx.shape)
    dz = jnp.where(above, dx + _wide(arrays["c"]), 0)
    xhat = (_wide(arrays["x"]) - _wide(arrays["mean"])) * _wide(arrays["rstd"])
    pixels = tuple(range(dx.ndim - 1))
    return {"dz": (dz, None), "dscale": (jnp.sum(dz * xhat, pixels), None), "dbias": (jnp.sum(dz, pixels), None)}


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
        return lax.pad(_wide(x), jnp.float64(0), self.config)

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
        return _wide(w).reshape(math.prod(self.case.filter), -1, g, self.case.out_channels // g)

    @property
    def count(self) -> int:
        return math.prod(self.case.filter)


def _product(a: Array, w: Array) -> Array:
    """(m, g, c), (c, g, k) -> (m, g, k)"""
    return a * w[0] if w.shape[0] == 1 else jnp.einsum("mgc,cgk->mgk", a, w, precision="highest")


def _conv_fprop(case: ConvCase, x: Array, w: Array) -> Array:
    taps = _Taps(case)
    xp, w = taps.pad(x), taps.taps(w)
    y = jnp.zeros((case.batch * math.prod(case.out_spatial), case.groups, w.shape[-1]), jnp.float64)
    y = lax.fori_loop(0, taps.count, lambda t, y: y + _product(taps.window(xp, t), w[t]), y)
    return y.reshape(case.y_shape())


def _conv_dgrad(case: ConvCase, dy: Array, w: Array) -> Array:
    taps = _Taps(case)
    dy, w = taps.split(_wide(dy)), taps.taps(w)
    padded = jax.eval_shape(taps.pad, jax.ShapeDtypeStruct(case.x_shape(), jnp.float64)).shape
    window = (case.batch, *taps.extents, case.in_channels)

    def add(t: Array, xp: Array) -> Array:
        part = _product(dy, jnp.swapaxes(w[t], 0, 2)).reshape(case.batch, *case.out_spatial, case.in_channels)
        old = lax.dynamic_slice(xp, taps.start(t), window)
        return lax.dynamic_update_slice(xp, old.at[taps.every].add(part), taps.start(t))

    return taps.unpad(lax.fori_loop(0, taps.count, add, jnp.zeros(padded, jnp.float64)))


def _conv_wgrad(case: ConvCase, x: Array, dy: Array) -> Array:
    taps = _Taps(case)
    xp, dy = taps.pad(x), taps.split(_wide(dy))

    def one(t: Array) -> Array:  # (C/G, G, K/G)
        window = taps.window(xp, t)
        if window.shape[-1] == 1:
            return jnp.sum(window * dy, 0)[None]
        return jnp.einsum("mgc,mgk->cgk", window, dy, precision="highest")

    return lax.map(one, jnp.arange(taps.count)).reshape(case.w_shape())


def _activated(activation: str, z: Array) -> tuple[Array, Array]:
    """(f(z), f'(z))"""
    c = math.sqrt(2 / math.pi)
    tanh = jnp.tanh(z if activation == "tanh" else c * (z + 0.044715 * z**3))
    sigmoid = 1 / (1 + jnp.exp(-z))
    return {
        "none": (z, jnp.ones_like(z)),
        "relu": (jnp.maximum(z, 0), (z > 0).astype(z.dtype)),
        "tanh": (tanh, 1 - tanh**2),
        "silu": (z * sigmoid, sigmoid * (1 + z * (1 - sigmoid))),
        "gelu": (0.5 * z * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * z * (1 - tanh**2) * c * (1 + 3 * 0.044715 * z**2)),
    }[activation]


@functools.partial(jax.jit, static_argnums=0, compiler_options=UNTUNED)
def _dense_gradient(case: DenseGradientCase, a: dict[str, Array]) -> dict[str, tuple[Array, Array | None]]:
    product = jnp.dot(_wide(a["dy"]), _wide(a["w"]).T, precision="highest")
    dz = product * _activated(case.activation, _wide(a["z"]))[1]
    return {"dz": (dz, None), "db": (jnp.sum(dz, 0), None)}


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=UNTUNED)
def _dense(case: DenseCase, pass_: str, a: dict[str, Array], y: Array) -> dict[str, tuple[Array, Array | None]]:
    x, w, b = _wide(a["x"]), _wide(a["w"]), _wide(a["b"])
    if pass_ == "dgrad":
        return {"dx": (jnp.dot(_wide(a["dy"]), w.T, precision="highest"), None)}
    if pass_ == "wgrad":
        return {"dw": (jnp.dot(x.T, _wide(a["dy"]), precision="highest"), None)}
    z = jnp.dot(x, w, precision="highest") + b
    value, slope = _activated(case.activation, z)
    if pass_ in ("fwd", "saved"):
        return {"y": (value, None), "z": (z, None)}
    if case.activation == "relu":
        # y's own mask: at a z near 0 rounding decides it, and a flipped one is an error of its whole term.
        slope = (y > 0).astype(jnp.float64)
    dz = _wide(a["dy"]) * slope
    dx, dw = jnp.dot(dz, w.T, precision="highest"), jnp.dot(x.T, dz, precision="highest")
    return {"y": (value, None), "dx": (dx, None), "dw": (dw, None), "db": (jnp.sum(dz, 0), None)}


@functools.partial(jax.jit, static_argnums=0, compiler_options=UNTUNED)
def _squeeze_excite(pass_: str, a: dict[str, Array]) -> dict[str, tuple[Array, Array | None]]:
    x, w1, b1, w2, b2 = (_wide(a[n]) for n in ("x", "w1", "b1", "w2", "b2"))
    pixels = tuple(range(1, x.ndim - 1))

    def product(a: Array, b: Array) -> Array:
        return jnp.dot(a, b, precision="highest")

    mean = jnp.mean(x, pixels)
    hidden, slope = _activated("silu", product(mean, w1) + b1)
    gate = 1 / (1 + jnp.exp(-(product(hidden, w2) + b2)))
    found: dict[str, tuple[Array, Array | None]] = {"y": (x * jnp.expand_dims(gate, pixels), None)}
    if pass_ == "fwd+bwd":
        dy = _wide(a["dy"])
        dz2 = jnp.sum(dy * x, pixels) * gate * (1 - gate)
        dz1 = product(dz2, w2.T) * slope
        constant = product(dz1, w1.T) / (x.size / mean.size)
        found["dx"] = dy * jnp.expand_dims(gate, pixels) + jnp.expand_dims(constant, pixels), None
        found |= {"dw1": (product(mean.T, dz1), None), "db1": (jnp.sum(dz1, 0), None)}
        found |= {"dw2": (product(hidden.T, dz2), None), "db2": (jnp.sum(dz2, 0), None)}
    return found


@functools.partial(jax.jit, static_argnums=(0, 1))
def _groupnorm(case: GroupNormCase, pass_: str, a: dict[str, Array]) -> dict[str, tuple[Array, Array | None]]:
    shape = a["x"].shape
    rows = isinstance(case, LayerNormCase)

    def mean(v: Array) -> Array:  # of each image's groups, of each row
        if rows:
            return jnp.mean(v, -1, keepdims=True)
        grouped = v.reshape(shape[0], -1, case.groups, case.channels // case.groups)
        return jnp.broadcast_to(jnp.mean(grouped, (1, 3), keepdims=True), grouped.shape).reshape(shape)

    x, scale = _wide(a["x"]), _wide(a["scale"])
    centred = x - mean(x)
    rstd = 1 / jnp.sqrt(mean(centred**2) + EPSILON)
    xhat = centred * rstd
    z = xhat * scale + _wide(a["bias"])
    s = jax.nn.sigmoid(z)
    found: dict[str, tuple[Array, Array | None]] = {"y": (z if rows else z * s, None)}
    if pass_ == "fwd+bwd":
        dz = _wide(a["dy"]) * (1 if rows else s * (1 + z * (1 - s)))
        g, images = scale * dz, tuple(range(len(shape) - 1))
        found["dx"] = rstd * (g - mean(g) - xhat * mean(g * xhat)), None
        found |= {"dscale": (jnp.sum(dz * xhat, images), None), "dbias": (jnp.sum(dz, images), None)}
    return found


@functools.partial(jax.jit, static_argnums=(0, 1))
def _batchnorm(
    pass_: str, channels_last: bool, a: dict[str, Array], y: Array | None = None
) -> dict[str, tuple[Array, Array | None]]:
    x = _wide(a["x"])
    axis = x.ndim - 1 if channels_last else 1
    axes = tuple(i for i in range(x.ndim) if i != axis)

    def spread(v: Array) -> Array:
        return jnp.expand_dims(_wide(v), axes)

    if pass_ == "infer":
        mean, var = _wide(a["mean"]), _wide(a["var"])
    else:
        mean = jnp.mean(x, axes)
        var = jnp.mean((x - spread(mean)) ** 2, axes)
    rstd = 1 / jnp.sqrt(var + EPSILON)
    xhat = (x - spread(mean)) * spread(rstd)
    z = xhat * spread(a["scale"]) + spread(a["bias"])
    if pass_ == "residual":
        z = z + _wide(a["residual"])
    stats = {
        f"new_{name}": (MOMENTUM * _wide(a[name]) + (1 - MOMENTUM) * batch, None)
        for name, batch in (("mean", mean), ("var", var))
    }
    if pass_ == "infer":
        return {"y": (z, None)}
    if pass_ == "fwd":
        return {"y": (z, None), **stats}
    dz, undetermined = _wide(a["dy"]), None
    if pass_ == "residual":
        # y's own mask: a sum of two rounded terms near 0 has the sign that rounding gives it. Where float32 rounding of
        # such a sum decides, a mask that is recomputed may differ from y's.
        assert y is not None
        dz, undetermined = jnp.where(y > 0, dz, 0), jnp.abs(z) < 2.0**-18
    elif pass_ == "fwd+bwd":
        # Where float32 rounding decides the sign of z, it decides whether dz is 0.
        undetermined = jnp.abs(z) < 2.0**-12
        dz = jnp.where(z > 0, dz, 0)
    dbias, dscale = jnp.sum(dz, axes), jnp.sum(dz * xhat, axes)
    n = x.size // dbias.size
    dx = spread(a["scale"]) * spread(rstd) * (dz - spread(dbias / n) - xhat * spread(dscale / n))
    grads = {
        "dx": (dx, undetermined),
        "dscale": (dscale, None),
        "dbias": (dbias, None),
        "dresidual": (dz, undetermined),
    }
    return grads if pass_ == "bwd" else {"y": (jnp.maximum(z, 0), None), **stats, **grads}


@jax.jit
def _shortcut(a: dict[str, Array], y: Array) -> dict[str, tuple[Array, Array | None]]:
    axes, scale, bias, rstd, xhat = tuple(range(a["x"].ndim - 1)), _wide(a["scale"]), _wide(a["bias"]), {}, {}
    for name in ("x", "residual"):
        x = _wide(a[name])
        rstd[name] = 1 / jnp.sqrt(jnp.var(x, axes) + EPSILON)
        xhat[name] = (x - jnp.mean(x, axes)) * rstd[name]
    z = (xhat["x"] + xhat["residual"]) * scale + 2 * bias
    # y's own mask, as of a residual; r's norm may be rounded to y's type before it is added.
    near = 2.0**-18 if y.dtype == jnp.float32 else 2.0**-5
    dz, undetermined = jnp.where(y > 0, _wide(a["dy"]), 0), jnp.abs(z) < near
    dbias, n = jnp.sum(dz, axes), z.size // scale.size
    found = {"y": (jnp.maximum(z, 0), None), "dbias": (dbias, None)}
    for name, of in (("x", ""), ("residual", "_r")):
        dscale = jnp.sum(dz * xhat[name], axes)
        dx = scale * rstd[name] * (dz - dbias / n - xhat[name] * (dscale / n))
        found |= {f"dscale{of}": (dscale, None), "dr" if of else "dx": (dx, undetermined)}
    return found


@functools.partial(jax.jit, static_argnums=(0, 1))
def _pool(case: PoolCase, channels_last: bool, a: dict[str, Array]) -> dict[str, tuple[Array, Array | None]]:
    """Taps are strided slices of the padded x, taken in order; dx gathers them back, each dy once."""
    nd = len(case.spatial)

    def last(v: Array) -> Array:
        return v if channels_last else jnp.moveaxis(v, 1, -1)

    def back(v: Array) -> Array:
        return v if channels_last else jnp.moveaxis(v, -1, 1)

    pads = [(0, 0), *[case.padding] * nd, (0, 0)]
    padded = jnp.pad(_wide(last(a["x"])), pads, constant_values=-jnp.inf)
    dy = _wide(last(a["dy"]))

    def at(tap: tuple[int, ...]) -> tuple[slice, ...]:
        steps = [
            slice(t, t + (o - 1) * case.stride + 1, case.stride) for t, o in zip(tap, case.out_spatial, strict=True)
        ]
        return (slice(None), *steps)

    taps = list(itertools.product(range(case.window), repeat=nd))
    y = functools.reduce(jnp.maximum, (padded[at(tap)] for tap in taps))
    left, dx = jnp.ones(y.shape, bool), jnp.zeros(padded.shape)
    for tap in taps:
        here = left & (padded[at(tap)] == y)
        left &= ~here
        dx = dx.at[at(tap)].add(jnp.where(here, dy, 0))
    inside = tuple(slice(low, low + size) for (low, _), size in zip(pads[1:-1], case.spatial, strict=True))
    return {"y": (back(y), None), "dx": (back(dx[:, *inside]), None)}

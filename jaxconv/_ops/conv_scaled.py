"""Convolutions of 8-bit numbers with scales: the kernel, and what the public functions of conv.py and dense.py call.

Inference only: there is no derivative.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

from jaxconv import _plan
from jaxconv._core import primitives, sharding
from jaxconv._ops import reference
from jaxconv._problem import EIGHT_BITS, IntegerConvProblem, ScaledConvProblem, as_mask, is_number, scale_of

Array = jax.Array
replace = dataclasses.replace


def _array(p: ScaledConvProblem, kind: str) -> primitives.Typed:
    arrays = {"x": (p.x_shape, p.dtype), "w": (p.w_shape, p.w_dtype), "y": (p.y_shape, p.out_dtype)}
    arrays |= {"channel": ((p.out_channels,), "float32"), "number": ((), "float32")}
    arrays["bias"] = (p.out_channels,), p.bias_dtype
    arrays["residual"] = p.y_shape, p.residual_dtype or ""
    if kind in ("x2", "w2"):
        return (p.shortcut.x_shape, p.dtype) if kind == "x2" else (p.shortcut.w_shape, p.w_dtype)
    return arrays[kind]


def _layout(p: ScaledConvProblem, plan: _plan.Plan, kind: str) -> primitives.Layout | None:
    """In memory images are channels last, and filters' input channels and taps lie together."""
    if kind in ("w", "w2"):
        return (p.nd + 1, *range(p.nd), p.nd) if p.channels_last else (0, *range(2, p.nd + 2), 1)
    if kind in ("x", "x2", "y", "residual") and not p.channels_last:
        return (0, *range(2, p.nd + 2), 1)
    return None


def _attrs(p: ScaledConvProblem, plan: _plan.Plan) -> dict[str, Any]:
    window = {
        "stride": np.array(p.stride, np.int64),
        "pad_low": np.array([low for low, _ in p.padding], np.int64),
        "pad_high": np.array([high for _, high in p.padding], np.int64),
        "dilation": np.array(p.dilation, np.int64),
        "groups": np.int64(p.groups),
        "dims_channels_last": np.int64(p.channels_last),
        "memory_channels_last": np.int64(True),
        "full_float32": np.int64(False),
    }
    epilogue = {
        "bias": np.int64(p.bias),
        "activation": p.activation.name,
        "slope": np.float64(p.activation.slope),
        "save_preactivation": np.int64(False),
    }
    given = {
        "scale": np.int64(p.scaled),
        "residual": np.int64(p.residual),
        "residual_scale": np.int64(p.residual_scaled),
        "out_scale": np.int64(p.out_scaled),
        "shortcut_stride": np.array(p.shortcut_stride, np.int64),
    }
    return {"window": window, "epilogue": epilogue, "scaled": given}


def _of_integers(p: IntegerConvProblem, x: Array, w: Array) -> Array:
    from jaxconv._ops import conv_integer  # whose sums may be ours

    return conv_integer.kernel(p, x, w)


def _by_parts(p: ScaledConvProblem, x: Array, w: Array, *rest: Array) -> list[Array]:
    """The sums by a plan of their own, and what follows them in a pass of XLA's."""
    numbers = all(map(is_number, (*p.x_shape, *p.w_shape)))

    # conv_integer's own plan may be a kernel of ours that leaves sums; XLA has a dense layer's.
    if p.of_integers and p.scaled and not p.product and numbers and p.implementation != "xla" and not p.empty:
        sums = _of_integers(p.integer, x, w)
        if p.has_shortcut:
            *rest, x2, w2 = rest
            sums = sums + _of_integers(p.shortcut.integer, x2, w2)
        return reference.conv_scaled_epilogue(p, sums, *rest)
    return reference.conv_scaled(p, x, w, *rest)


def _partition(p: ScaledConvProblem, operands: Sequence[str], results: Sequence[str]) -> sharding.Partition:
    """Images, groups, and without groups output channels may be split: what follows a sum needs all of it."""
    g = p.groups > 1
    c = "c" if not g else "g" if p.in_channels == p.groups else "(g c)"
    k = "k" if not g else "g" if p.out_channels == p.groups else "(g k)"
    pixels, out, taps, far, tap = ([f"{letter}{i}" for i in range(p.nd)] for letter in "pqtsu")

    def activations(channels: str, spatial: Sequence[str]) -> str:
        return " ".join(["n", *spatial, channels] if p.channels_last else ["n", channels, *spatial])

    y = activations(k, out)
    names = {
        "x": activations(c, pixels),
        "w": " ".join([*taps, "c", k] if p.channels_last else [k, "c", *taps]),
        "y": y,
        "residual": y,
        "x2": activations("d", far),
        "w2": " ".join([*tap, "d", k] if p.channels_last else [k, "d", *tap]),
        "channel": k,
        "bias": k,
        "number": "",
    }

    def local(parts: Any) -> ScaledConvProblem:
        groups = parts.get("g", 1)
        return replace(
            p,
            batch=p.batch // parts["n"],
            groups=p.groups // groups,
            in_channels=p.in_channels // groups,
            out_channels=p.out_channels // (groups * parts.get("k", 1)),
        )

    return sharding.Partition(
        operands=[names[kind] for kind in operands],
        results=[names[kind] for kind in results],
        split=["n", "g" if g else "k"],
        local=local,
        sizes={"g": p.groups, "k": p.out_channels // p.groups},
    )


def _flops(p: ScaledConvProblem) -> int:
    """The sums, and an operation of each of y's elements for everything that follows."""
    follows = p.scaled + p.bias + p.residual + p.residual_scaled + (p.activation.name != "none") + p.out_scaled
    products = p.flops + (p.shortcut.flops if p.has_shortcut else 0)
    return products + follows * math.prod(p.y_shape)


kernel = primitives.kernel(
    "conv_scaled",
    "x w scale? b? residual? residual_scale? out_scale? x2? w2? -> y",
    primitives.Family(
        {"channel": "scale", "bias": "b", "number": "residual_scale out_scale"},
        _array,
        _attrs,
        _partition,
        layout=_layout,
        batch=primitives.by_images("x", "x2", "residual"),  # mapped filters and scales fold into the sums' K
    ),
    reference=_by_parts,
    flops=_flops,
    version=3,
)


def _no_derivative(primals: Sequence[Array], tangents: Sequence[Any], *, problem: ScaledConvProblem) -> Any:
    if any(type(t) is not ad.Zero for t in tangents):
        what = "product" if problem.product else "convolution"
        raise TypeError(
            f"{problem.name}: a {what} of {problem.dtype} and {problem.w_dtype} has no derivative: differentiate one "
            f"of 16 or 32 bits, or put jax.lax.stop_gradient around its operands"
        )
    out = kernel(problem, *primals)
    return out, ad.Zero(jax.typeof(out).to_tangent_aval())


ad.primitive_jvps[kernel.primitive] = _no_derivative


# ----------------------------------------------------------------------------------------------------------------------
# For the public functions


def asked(x: Any, scales: Sequence[Any]) -> bool:
    """Whether a call is one of 8-bit numbers: x is of 8 bits, or one of its own arguments was given."""
    name = getattr(getattr(x, "dtype", None), "name", "")  # of what may be no array
    return name in EIGHT_BITS or any(s is not None for s in scales)


def _arrays(
    name: str, x: Any, w: Any, b: Any, residual: Any, *, scale: Any, residual_scale: Any, out_scale: Any
) -> tuple[list[Any], dict[str, Any]]:
    """([x, w, b], the rest by name) as arrays, or None."""
    given = {"x": x, "w": w, "b": b, "residual": residual}
    arrays = {k: v if v is None and k not in "xw" else as_mask(name, k, v) for k, v in given.items()}
    scales = {"scale": scale, "residual_scale": residual_scale, "out_scale": out_scale}
    numbers = {k: v if v is None else scale_of(name, k, v, scalar=k != "scale") for k, v in scales.items()}
    return [arrays[k] for k in "xwb"], {"residual": arrays["residual"], **numbers}


def apply(p: ScaledConvProblem, *operands: Array) -> Array:
    """The kernel, or its meaning where there is nothing to sum up or to write."""
    return reference.conv_scaled(p, *operands)[0] if p.empty else jax.tree.leaves(kernel(p, *operands))[0]


def _call(
    p: ScaledConvProblem,
    x: Array,
    w: Array,
    b: Array | None,
    *,
    scale: Array | None,
    residual: Array | None,
    residual_scale: Array | None,
    out_scale: Array | None,
    shortcut: Sequence[Array] = (),
) -> Array:
    if scale is not None and scale.shape == ():
        scale = jnp.broadcast_to(scale, (p.out_channels,))
    args = [x, w, *(a for a in (scale, b, residual, residual_scale, out_scale) if a is not None)]
    return apply(p, *args, *shortcut)


def run(
    name: str,
    nd: int,
    x: Any,
    w: Any,
    b: Any,
    residual: Any,
    *,
    scale: Any,
    residual_scale: Any,
    out_scale: Any,
    out_dtype: Any,
    shortcut: tuple[Array, Array, tuple[int, ...]] | None = None,
    **options: Any,
) -> Array:
    """What `conv1d`, `conv2d` and `conv3d` return.

    `shortcut`: x2 of x's type, w2 of one tap and of w's type, and the stride of a convolution without padding whose
    sums are added to those of x and w.
    """
    scales = dict(scale=scale, residual_scale=residual_scale, out_scale=out_scale)
    (x, w, b), rest = _arrays(name, x, w, b, residual, **scales)
    p = ScaledConvProblem.of(name, nd, x, w, b, out_dtype=out_dtype, **rest, **options)
    alone = shortcut is None and p.of_integers and not p.scaled
    if alone and not p.empty and all(map(is_number, (*p.x_shape, *p.w_shape))):
        return _of_integers(replace(p.integer, implementation=p.implementation, algorithm=p.algorithm), x, w)
    if shortcut is None:
        return _call(p, x, w, b, **rest)
    x2, w2, stride = shortcut
    channel = p.channel_axis
    spatial = tuple(n for i, n in enumerate(x2.shape) if i not in (0, channel))
    p = replace(p, shortcut_channels=x2.shape[channel], shortcut_spatial=spatial, shortcut_stride=stride)
    return _call(p, x, w, b, **rest, shortcut=(x2, w2))


def pixels(p: ScaledConvProblem, a: Array) -> Array:
    """Rows (..., C) as the images of one pixel that a dense layer's kernel takes."""
    return jnp.expand_dims(a.reshape(p.batch, a.shape[-1]), 1)


def rows(y: Array, lead: Sequence[int]) -> Array:
    """Such images as rows (*lead, C)."""
    return jnp.squeeze(y, 1).reshape(*lead, y.shape[-1])


def run_dense(
    x: Any,
    w: Any,
    b: Any,
    residual: Any,
    *,
    scale: Any,
    residual_scale: Any,
    out_scale: Any,
    out_dtype: Any,
    **options: Any,
) -> Array:
    """What `dense` returns: a convolution of one tap, in which each row is an image of one pixel."""
    scales = dict(scale=scale, residual_scale=residual_scale, out_scale=out_scale)
    (x, w, b), rest = _arrays("dense", x, w, b, residual, **scales)
    p = ScaledConvProblem.of_dense(x, w, b, out_dtype=out_dtype, **rest, **options)
    b = None if b is None else jnp.broadcast_to(b.reshape(-1), (p.out_channels,))
    if rest["residual"] is not None:
        rest["residual"] = pixels(p, rest["residual"])
    return rows(_call(p, pixels(p, x), jnp.expand_dims(w, 0), b, **rest), x.shape[:-1])

"""Convolutions of integers, as lax writes them: the kernel, and lax's own types that it has no code for.

XLA compiles these for CPUs and TPUs. On an NVIDIA GPU it refuses them ("Can't lower one or more integer convolutions to
idioms supported by CuDNN"). `enable` and `conv_general_dilated` bind this kernel. It has no derivative: integers have
none.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxconv import _plan
from jaxconv._core import primitives, sharding
from jaxconv._ops import conv_scaled, reference
from jaxconv._problem import INTEGERS, IntegerConvProblem, is_number, sums_of_integers

Array = jax.Array
replace = dataclasses.replace


def _array(p: IntegerConvProblem, kind: str) -> primitives.Typed:
    arrays = {"x": (p.lhs_shape, p.lhs_dtype), "w": (p.rhs_shape, p.rhs_dtype), "y": (p.out_shape, p.dtype)}
    return arrays[kind]


def _attrs(p: IntegerConvProblem, plan: _plan.Plan) -> dict[str, Any]:
    return {
        "window": {
            "stride": np.array(p.stride, np.int64),
            "pad_low": np.array([low for low, _ in p.padding], np.int64),
            "pad_high": np.array([high for _, high in p.padding], np.int64),
            "lhs_dilation": np.array(p.lhs_dilation, np.int64),
            "rhs_dilation": np.array(p.rhs_dilation, np.int64),
            "lhs_spec": np.array(p.lhs_spec, np.int64),
            "rhs_spec": np.array(p.rhs_spec, np.int64),
            "out_spec": np.array(p.out_spec, np.int64),
            "groups": np.int64(p.groups),
            "batch_groups": np.int64(p.batch_groups),
        }
    }


def _longer(shape: tuple[int, ...], axis: int, times: int) -> tuple[int, ...]:
    return tuple(extent * (times if i == axis else 1) for i, extent in enumerate(shape))


def _batch(
    op: primitives.Kernel, p: IntegerConvProblem, args: list[Array], dims: list[int | None]
) -> primitives.Batched:
    """Mapped images fold into N, mapped filters into K; both are groups more."""
    size, (lhs, rhs), (left, right) = primitives.batch_size(args, dims), args, dims
    images, channels, filters = p.lhs_spec[0], p.lhs_spec[1], p.rhs_spec[0]
    if right is None:
        assert left is not None
        lhs = primitives.fold(lhs, left, images, p.batch_groups)
        q = replace(p, lhs_shape=_longer(p.lhs_shape, images, size))
        return [primitives.unfold(op(q, lhs, rhs), size, p.out_spec[0])], [0]
    q = replace(p, rhs_shape=_longer(p.rhs_shape, filters, size))
    if left is None:
        groups = p.groups * p.batch_groups
        rhs = primitives.fold(rhs, right, filters, groups)
        return [primitives.unfold(op(q, lhs, rhs), size, p.out_spec[1], groups)], [0]
    rhs = primitives.fold(rhs, right, filters)
    axis = images if p.batch_groups > 1 else channels
    q = replace(q, lhs_shape=_longer(p.lhs_shape, axis, size))
    more = dict(batch_groups=p.batch_groups * size) if p.batch_groups > 1 else dict(groups=p.groups * size)
    out = op(replace(q, **more), primitives.fold(lhs, left, axis), rhs)
    return [primitives.unfold(out, size, p.out_spec[1])], [0]


def _partition(p: IntegerConvProblem, operands: Sequence[str], results: Sequence[str]) -> sharding.Partition:
    """Images, groups, and of one group the channels may be split. A sum over shards wraps around as any does."""
    g, b = p.groups > 1, p.batch_groups > 1
    grouped = "g" if g else "b"
    k = "k" if not (g or b) else grouped if p.group_k == 1 else f"({grouped} k)"
    c = "c" if not g else "g" if p.group_c == 1 else "(g c)"
    n = "n" if not b else "b" if p.batch == 1 else "(b n)"

    def array(spec: tuple[int, ...], first: str, second: str, pixel: str) -> str:
        names = dict(zip(spec, (first, second, *(f"{pixel}{i}" for i in range(p.nd))), strict=True))
        return " ".join(names[axis] for axis in range(p.nd + 2))

    def local(parts: Any) -> IntegerConvProblem:
        lhs, rhs = list(p.lhs_shape), list(p.rhs_shape)
        groups, batch_groups = parts.get("g", 1), parts.get("b", 1)
        lhs[p.lhs_spec[0]] //= parts.get("n", 1) * batch_groups
        lhs[p.lhs_spec[1]] //= parts.get("c", 1) * groups
        rhs[p.rhs_spec[0]] //= parts.get("k", 1) * groups * batch_groups
        rhs[p.rhs_spec[1]] //= parts.get("c", 1)
        return replace(
            p,
            lhs_shape=tuple(lhs),
            rhs_shape=tuple(rhs),
            groups=p.groups // groups,
            batch_groups=p.batch_groups // batch_groups,
        )

    return sharding.Partition(
        operands=[array(p.lhs_spec, n, c, "x"), array(p.rhs_spec, k, "c", "t")],
        results=[array(p.out_spec, "n", k, "y")],
        split=["n", "g"] if g else ["b"] if b else ["n", "k", "c"],
        local=local,
        sizes={"g": p.groups, "b": p.batch_groups, "k": p.group_k, "c": p.group_c, "n": p.batch},
    )


def _by_sums(p: IntegerConvProblem, lhs: Array, rhs: Array) -> list[Array]:
    """The sums of a convolution of 8-bit numbers, where there is one; by lax what is XLA's as a whole."""
    sums = sums_of_integers(p)
    if isinstance(sums, str) or p.implementation == "xla":
        return reference.conv_integer(p, lhs, rhs)
    spatial = range(1, p.nd + 1)
    x = lhs.transpose((p.lhs_spec[0], *p.lhs_spec[2:], p.lhs_spec[1]))
    w = rhs.transpose((*p.rhs_spec[2:], p.rhs_spec[1], p.rhs_spec[0]))
    y = conv_scaled.kernel(sums, x, w)
    order = dict(zip(p.out_spec, (0, p.nd + 1, *spatial), strict=True))
    return [y.transpose([order[axis] for axis in range(p.nd + 2)])]


kernel = primitives.kernel(
    "conv_integer",
    "x w -> y",
    primitives.Family({}, _array, _attrs, _partition, batch=_batch),
    reference=_by_sums,
    flops=lambda p: p.flops,
)


# ----------------------------------------------------------------------------------------------------------------------
# lax's types


def is_integer(dtype: Any) -> bool:
    """Whether lax convolves it as integers; a bool is one."""
    return jnp.issubdtype(dtype, jnp.integer) or np.dtype(dtype) == np.bool_


def converts(lhs: Any, rhs: Any, out: Any) -> bool:
    """Whether the convolution is of integers to floating-point numbers, which is that of the converted operands."""
    return is_integer(lhs.dtype) and is_integer(rhs.dtype) and not is_integer(out.dtype)


def precision_of(dtypes: Sequence[Any], given: Any) -> Any:
    """Of the converted operands: 8 bits are exact in every type that a GPU rounds to; others are not rounded."""
    exact = all(np.dtype(dtype).itemsize == 1 for dtype in dtypes)
    return given if exact else (lax.Precision.HIGHEST, lax.Precision.HIGHEST)


def converted(lhs: Array, rhs: Array, *, dtype: Any, **params: Any) -> Array:
    """lax's primitive of integers to `dtype`, floating-point, as one of floating-point numbers."""
    params |= dict(precision=precision_of((lhs.dtype, rhs.dtype), params["precision"]), preferred_element_type=dtype)
    return lax.conv_general_dilated_p.bind(lhs.astype(dtype), rhs.astype(dtype), **params)


def _stored(dtype: Any) -> str:
    """The type that native code reads: bools and less than 8 bits are taken as a byte each."""
    name = np.dtype(dtype).name
    return name if name in INTEGERS else "int8" if jnp.issubdtype(dtype, jnp.signedinteger) else "uint8"


def into(a: Array, dtype: str) -> Array:
    """lax's operand as the kernel's."""
    return a.astype(dtype)


def back(y: Array, dtype: Any) -> Array:
    """The kernel's result as lax's: of fewer bits it is the low ones, and of a bool whether any product was true."""
    return y != 0 if np.dtype(dtype) == np.bool_ else y.astype(dtype)


def missing_numbers(nd: int, params: Mapping[str, Any]) -> str | None:
    """A sentence where strides, pads and dilations are not one a spatial dimension; lax lets some be none, for ones."""
    for name in ("window_strides", "padding", "lhs_dilation", "rhs_dilation"):
        if len(params[name]) != nd:
            return f"its {name} has {len(params[name])} entries, expected one for each of {nd} spatial dimensions"
    return None


def by_products(out: Any, params: Mapping[str, Any], lhs: Array, rhs: Array) -> Array:
    """lax's convolution of integers to integers as matrix products, which XLA compiles for a GPU."""
    bits = jnp.int32 if np.dtype(out.dtype) == np.bool_ else _stored(out.dtype)
    operands = (into(a, _stored(a.dtype)) for a in (lhs, rhs))
    return back(reference.conv_by_products(*operands, **{**params, "preferred_element_type": bits}), out.dtype)


def has_products(lhs: Any, rhs: Any, out: Any, params: Mapping[str, Any]) -> bool:
    """Whether `by_products` computes lax's convolution of arrays of these types."""
    whole = all(is_integer(a.dtype) for a in (lhs, rhs, out))
    return whole and not any(0 in a.shape for a in (lhs, rhs, out)) and not missing_numbers(lhs.ndim - 2, params)


def read(lhs: Any, rhs: Any, out: Any, params: Mapping[str, Any]) -> IntegerConvProblem | str:
    """The kernel's problem of lax's convolution of integers to integers, or a sentence that says why there is none."""
    if not is_integer(out.dtype):
        return f"its operands are integers and its result is {np.dtype(out.dtype).name}, expected integers too"
    if not all(is_number(extent) for a in (lhs, rhs, out) for extent in a.shape):
        return "an extent is symbolic"
    nd = lhs.ndim - 2
    if nd > 3:
        return f"it has {nd} spatial dimensions: jaxconv has at most 3"
    if any(0 in a.shape for a in (lhs, rhs, out)):
        return "an array is empty"
    if why := missing_numbers(nd, params):
        return why
    left, right = _stored(lhs.dtype), _stored(rhs.dtype)
    result = "int32" if np.dtype(out.dtype) == np.bool_ else _stored(out.dtype)
    if left != right and not {left, right} <= {"int8", "uint8"}:
        left = right = result  # sums are exact modulo 2^bits of the result
    return IntegerConvProblem.of_lax((left, right, result), lhs.shape, rhs.shape, params)


def of_call(call: Callable[[Array, Array], Array], lhs: Array, rhs: Array, preferred: Any) -> Array:
    """lax's convolution `call` of integers, by the kernel. Two types, which lax refuses, are taken as `preferred`, an
    integer type: sums wrap around there."""
    mixed = lhs.dtype != rhs.dtype
    numbers = all(
        dtype is not None and jnp.issubdtype(dtype, jnp.integer) for dtype in (lhs.dtype, rhs.dtype, preferred)
    )
    if mixed and not numbers:
        return call(lhs, rhs)  # to say what is wrong
    if mixed:
        preferred = jax.dtypes.canonicalize_dtype(preferred)  # without 64 bits
    like = [jax.ShapeDtypeStruct(a.shape, preferred if mixed else a.dtype) for a in (lhs, rhs)]
    found = [e for e in jax.make_jaxpr(call)(*like).eqns if e.primitive is lax.conv_general_dilated_p]
    problem: Any = "lax makes several convolutions of it"
    if len(found) == 1:
        (out,) = (v.aval for v in found[0].outvars)
        problem = read(lhs, rhs, out, found[0].params)
    if isinstance(problem, str):
        lhs, rhs = (a.astype(preferred) for a in (lhs, rhs)) if mixed else (lhs, rhs)
        if len(found) == 1 and has_products(lhs, rhs, out, found[0].params):
            products = functools.partial(by_products, out, found[0].params)
            return lax.platform_dependent(lhs, rhs, cuda=products, default=call)
        return call(lhs, rhs)
    return back(kernel(problem, into(lhs, problem.lhs_dtype), into(rhs, problem.rhs_dtype)), out.dtype)

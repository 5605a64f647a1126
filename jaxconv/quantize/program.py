"""A frozen program in 8 bits: which values have them, and the program of it.

A *point* is a value that is stored in 8 bits, with one scale. Each 8-bit layer reads points and, where an 8-bit layer
is ahead, makes one. What moves or compares elements (a max-pooling, a reshape) has the scale of what it reads. Any
other operation reads a point as the numbers that it stands for, and what it makes is a point of its own where a layer
reads it: XLA fuses these conversions into the operation, so that memory holds 8 bits.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr

from jaxconv._core.graph import Array, Constant, Node, Value, of_type
from jaxconv._ops import conv_scaled, reference
from jaxconv._ops.dense import dense
from jaxconv._problem import CHANNELS_FIRST, CHANNELS_LAST, EIGHT_BIT_INTEGERS, ConvProblem, is_number
from jaxconv._problem.pool import PoolProblem
from jaxconv.quantize.layers import Layer, Reading
from jaxconv.quantize.scales import LEAST, Scale, filter_of, filter_scales, summed

_AUTOMATIC: dict[str, Any] = dict(precision=None, return_preactivation=False, algorithm=None, implementation=None)
# The name scopes of a layer's scales and biases, one a channel; and of a filter whose scales follow from another one's
# too, in front of its array's name.
FILTER_SCALE, FILTER_BIAS, FILTER_OF = "filter_scale", "filter_bias", "filter_of="
# A bias of integers is at most twice this, which leaves half of int32's numbers to the sums.
LARGEST_BIAS = 2.0**29
# Activations with f(a v) = a f(v) for a > 0: the factor to 8 bits is part of those in front.
_HOMOGENEOUS = ("none", "relu", "leaky_relu")
# Operations whose results are elements of their first operand, chosen by their order or place.
MOVING = frozenset(
    (
        *("reshape", "transpose", "squeeze", "broadcast_in_dim", "slice", "rev", "copy", "stop_gradient", "name"),
        *("reshard", "reduce_max", "reduce_window_max", "jaxconv_max_pool"),
    )
)
_NORM = "jaxconv_batchnorm_infer"
# Operations that XLA fuses: in front of an 8-bit layer what they read may have 8 bits.
_LIGHT = frozenset(
    (
        *("abs", "add", "and", "clamp", "concatenate", "convert_element_type", "custom_jvp_call", "div", "eq", "erf"),
        *("exp", "expm1", "ge", "gt", "integer_pow", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne"),
        *("neg", "or", "pad", "pow", "reduce_sum", "reduce_window_sum", "rsqrt", "select_n", "sign", "sqrt", "square"),
        *("sub", "tanh", _NORM),
    )
)


def is_moving(node: Node) -> bool:
    if node.name == "convert_element_type":
        return all(jnp.issubdtype(v.dtype, jnp.floating) for v in (node.inputs[0], node.outputs[0]))
    if node.name == "jaxconv_max_pool":
        p: PoolProblem = node.params["problem"]
        # A window of padding alone has no element to be the maximum.
        return not p.save and p.plain and all(max(pads) < f for pads, f in zip(p.padding, p.window, strict=True))
    return node.name in MOVING and jnp.issubdtype(node.inputs[0].dtype, jnp.floating)


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two convolutions whose results are added, as one call of `conv_scaled` with a shortcut."""

    last: Layer  # its result is the sum, its residual the other one's result
    other: Layer
    main: Layer  # the one of both that may have several taps
    shortcut: Layer  # the one of a tap

    @classmethod
    def of(cls, last: Layer, layers: Mapping[Node, Layer]) -> Pair | None:
        v, reader = last.residual, last.node
        while v is not None and v.made_by == "reshard" and v.users == [reader]:
            v, reader = v.node.inputs[0], v.node
        other = layers.get(v.node) if v is not None and v.users == [reader] else None
        if other is None or other.what != "conv" or other.residual is not None:
            return None
        if other.problem.activation.name != "none" or last.problem.channels_last != other.problem.channels_last:
            return None
        for main, shortcut in ((last, other), (other, last)):
            if _takes_shortcut(main.problem) and shortcut.problem.projects:
                return cls(last, other, main, shortcut)
        return None


def _takes_shortcut(p: ConvProblem) -> bool:
    """Most filters of several taps and at most 64 channels run on sm90/eight_halo, which takes no shortcut."""
    return p.groups == 1 and (math.prod(p.filter) == 1 or p.in_channels > 64)


def is_averaged(v: Value) -> bool:
    """Whether v is read for sums over pixels alone, of which a mean is made: XLA fuses a sum with the conversion of its
    terms. The rule asks for axes, not for extents, so that inputs of other shapes have the same points."""
    front, seen, sums = [v], {v}, 0
    while front:
        for node in front.pop().users:
            if node is None:
                return False
            if node.name == "reduce_sum":
                sums += 1
                if not _is_over_pixels(node):
                    return False
            elif is_moving(node):
                front += [out for out in node.outputs if out not in seen]
                seen.update(node.outputs)
            else:
                return False
    return sums > 0


def _is_over_pixels(node: Node) -> bool:
    """Whether a sum leaves two axes at most, as images and channels are."""
    ndim = len(node.inputs[0].shape)
    return ndim >= 3 and len(node.params["axes"]) >= ndim - 2


class Narrowing:
    """Which values of a program are points, where some of its layers have 8 bits."""

    def __init__(self, reading: Reading):
        self.reading = reading
        self.layers: dict[Node, Layer] = {layer.node: layer for layer in reading.layers if not layer.why}
        self.points: list[Value] = []  # in the order in which they are read or made
        self.layer_at: list[Layer] = []  # that reads or makes each of them first
        self.index: dict[Value, int] = {}
        pairs = (Pair.of(layer, self.layers) for layer in self.layers.values())
        self._pairs = [pair for pair in pairs if pair is not None]
        for node in reading.graph.nodes:
            layer = self.layers.get(node)
            if layer is None:
                continue
            for v in (layer.x, layer.residual):
                if v is not None:
                    self._add(self.source(v), layer)
            if self.is_wanted(layer.y) or is_averaged(layer.y):
                self._add(layer.y, layer)

    def _add(self, v: Value, layer: Layer) -> None:
        if v not in self.index:
            self.index[v] = len(self.points)
            self.points.append(v)
            self.layer_at.append(layer)

    def pairs(self, scales: Sequence[Scale]) -> list[Pair]:
        """The pairs that read one type, as the operands of a kernel do."""

        def dtype(layer: Layer) -> str:
            return scales[self.index[self.source(layer.x)]].dtype

        return [pair for pair in self._pairs if dtype(pair.main) == dtype(pair.shortcut)]

    def source(self, v: Value) -> Value:
        """The point that v has the elements of: an 8-bit layer's result, or v itself."""
        u = v
        while u.node is not None and u.node not in self.layers and is_moving(u.node):
            u = u.node.inputs[0]
        if u.node in self.layers:
            return u
        while v.made_by == "reshard":  # as many points as without a mesh
            v = v.node.inputs[0]
        return v

    def is_wanted(self, v: Value) -> bool:
        """Whether an 8-bit layer reads v, or what XLA's fusions make of it."""
        front, seen = [v], {v}
        while front:
            for node in front.pop().users:
                if node is None:
                    continue
                if node in self.layers:
                    return True
                if node.name in _LIGHT or is_moving(node):
                    front += [out for out in node.outputs if out not in seen]
                    seen.update(node.outputs)
        return False

    # ---- evaluation
    def program(self, scales: Sequence[Scale], closed: ClosedJaxpr) -> ClosedJaxpr:
        """`closed`, the program that was read, in 8 bits."""
        graph = self.reading.graph

        def run(*args: Array) -> list[Array]:
            evaluation = Evaluation(self, scales, dict(zip(graph.inputs, args, strict=True)))
            evaluation.run()
            return [of_type(evaluation.wide(v), v) for v in graph.outputs]

        return jax.make_jaxpr(run)(*closed.in_avals)


class Evaluation:
    """The values of a program while it is evaluated: wide, in 8 bits, or both."""

    def __init__(self, narrowing: Narrowing, scales: Sequence[Scale], known: dict[Value, Any]):
        self._narrowing, self._scales, self._wide = narrowing, scales, known
        self._narrow: dict[Value, tuple[Array, Scale]] = {}
        pairs = narrowing.pairs(scales)
        self._pairs = {pair.last.node: pair for pair in pairs}
        self._added = {pair.other.node: pair for pair in pairs}
        self._widened: dict[Value, Array] = {}

    def run(self) -> None:
        for node in self._narrowing.reading.graph.nodes:
            layer = self._narrowing.layers.get(node)
            if node in self._added:
                pass  # a part of its pair's call
            elif layer is not None:  # under the layer's name, which profiles show
                dataclasses.replace(node, call=lambda layer=layer: self._run_layer(layer)).evaluate([])
            elif node.inputs and node.inputs[0] in self._narrow and self._moves(node):
                q, scale = self._narrow[node.inputs[0]]
                self._narrow[node.outputs[0]] = _moved(node, q), scale
            elif self._sums_integers(node):
                q, scale = self._narrow[node.inputs[0]]
                sums = summed(q, node.params["axes"]).astype(jnp.float32)
                self._wide[node.outputs[0]] = (sums * np.float32(scale.step)).astype(node.outputs[0].dtype)
            else:
                values = [self.wide(v) for v in node.inputs]
                if node.name == _NORM and self._is_among_narrow(node):
                    outs = reference.batchnorm_infer(node.params["problem"], *map(jnp.asarray, values))
                else:
                    outs = node.evaluate(values)
                self._wide.update(zip(node.outputs, outs, strict=True))

    def _moves(self, node: Node) -> bool:
        """Whether the node's operand is known in 8 bits alone."""
        return node.inputs[0] not in self._wide and is_moving(node)

    def _sums_integers(self, node: Node) -> bool:
        """Whether the node sums up integers of 8 bits, which int32 does exactly."""
        v = node.inputs[0] if node.inputs else None
        if node.name != "reduce_sum" or v in self._wide or v not in self._narrow:
            return False
        terms = [v.shape[i] for i in node.params["axes"]]
        few = all(map(is_number, terms)) and math.prod(terms) < 2**23  # of at most 255 each
        return few and self._narrow[v][1].dtype in EIGHT_BIT_INTEGERS

    def _is_among_narrow(self, node: Node) -> bool:
        """Whether the node reads or makes what has 8 bits in memory, if XLA fuses it with the conversions around."""
        return node.inputs[0] in self._narrow or self._narrowing.is_wanted(node.outputs[0])

    def wide(self, v: Value) -> Any:
        if isinstance(v, Constant) and v not in self._wide:
            return v.value
        if v in self._wide:
            return self._wide[v]
        if v.node in self._added:
            self._wide[v] = self._run_added(self._added[v.node])
            return self._wide[v]
        if v not in self._widened:
            q, scale = self._narrow[v]
            self._widened[v] = scale.widen(q, v.dtype)
        return self._widened[v]

    def narrow(self, v: Value) -> tuple[Array, Scale]:
        if v not in self._narrow:
            if v.made_by == "reshard":
                q, scale = self.narrow(v.node.inputs[0])
                self._narrow[v] = _moved(v.node, q), scale
            else:
                scale = self._scales[self._narrowing.index[v]]
                self._narrow[v] = scale.narrow(self.wide(v)), scale
        return self._narrow[v]

    def _run_layer(self, layer: Layer) -> list[Array]:
        p, pair = layer.problem, self._pairs.get(layer.node)
        xs, filters, of_sums, bias = self._operands([layer] if pair is None else [pair.main, pair.shortcut])
        residual, residual_scale = None, None
        if layer.residual is not None and pair is None:
            residual, residual_scale = self.narrow(layer.residual)
        index = self._narrowing.index.get(layer.y)
        out = None if index is None else self._scales[index]
        inside = out is not None and p.activation.name in _HOMOGENEOUS
        factor = out.inverse if out is not None and inside else np.float32(1)
        with jax.named_scope(FILTER_SCALE):
            scale = of_sums * factor if inside else of_sums
        if bias is not None and bias.dtype != jnp.int32:
            with jax.named_scope(FILTER_BIAS):
                bias = bias * factor
        numbers: dict[str, Any] = dict(
            scale=scale,
            residual=residual,
            residual_scale=None if residual_scale is None else np.float32(residual_scale.step) * factor,
            out_scale=None if out is None or inside else out.inverse,
            out_dtype=layer.y.dtype.name if out is None else out.dtype,
            activation=p.activation,
        )
        if layer.what == "dense":
            y = dense(xs[0].reshape(p.batch, p.in_channels), filters[0], bias, **numbers)
        elif pair is None:
            y = _convolution(p, xs[0], filters[0], bias, **numbers)
        else:
            shortcut = xs[1], filters[1], pair.shortcut.problem.stride
            y = _convolution(pair.main.problem, xs[0], filters[0], bias, shortcut=shortcut, **numbers)
        y = y.reshape(layer.y.shape)
        if out is None:
            self._wide[layer.y] = y
        else:
            self._narrow[layer.y] = y, out
        return [y]

    def _operands(self, parts: Sequence[Layer]) -> tuple[list[Array], list[Array], Array, Array | None]:
        """The operands of layers whose sums are added: each layer's input and filter, the factors of the sums (one a
        channel), and the sum of the biases. Beside integers the bias is int32, in units of the sums.

        Sums that are added have one unit, the largest of the layers' own. Rounding moves a filter's element by
        half of its unit at most.
        """
        xs, x_scales = zip(*(self.narrow(layer.x) for layer in parts), strict=True)
        steps = [np.float32(scale.step) for scale in x_scales]
        dtype = filter_dtype(x_scales[0].dtype)
        biases = [
            jnp.asarray(self.wide(_before_rounding(layer.bias)), jnp.float32).reshape(-1)
            for layer in parts
            if layer.bias is not None
        ]
        bias = functools.reduce(jnp.add, biases) if biases else None
        of_integers = bias is not None and dtype == "int8"
        least: Array | np.float32 = np.float32(LEAST)  # of a unit
        if of_integers:
            least = jnp.maximum(jnp.abs(bias) / np.float32(LARGEST_BIAS), least)
        filters, units = [], []
        wide = [self.filter_of(layer) for layer in parts]
        for (w, axis), step in zip(wide, steps, strict=True):
            narrow, own = filter_scales(w, axis, dtype, least / step)
            filters.append(narrow)
            with jax.named_scope(FILTER_SCALE):
                units.append(own * step)
        with jax.named_scope(FILTER_SCALE):
            unit = functools.reduce(jnp.maximum, units)
        if len(parts) > 1:
            filters = []
            for layer, (w, axis), step in zip(parts, wide, steps, strict=True):
                with jax.named_scope(f"{FILTER_OF}{layer.weight}"):
                    filters.append(filter_of(w, axis, dtype, unit / step))
        if of_integers:
            with jax.named_scope(FILTER_BIAS):
                bias = jnp.rint(bias / unit).astype(jnp.int32)
        return list(xs), filters, unit, bias

    def _run_added(self, pair: Pair) -> Array:
        """The result of the pair's other layer, which the program does not have by itself."""
        parts, other = [pair.main, pair.shortcut], pair.other
        xs, filters, unit, _ = self._operands(parts)
        i = parts.index(other)
        bias = None if other.bias is None else jnp.asarray(self.wide(other.bias), jnp.float32).reshape(-1)
        y = _convolution(other.problem, xs[i], filters[i], bias, scale=unit, out_dtype="float32")
        return y.astype(other.y.dtype)

    def filter_of(self, layer: Layer) -> tuple[Array, int]:
        """The filter before it was rounded to 16 bits, in the order of `layer.problem`, and its channels' axis."""
        w = jnp.asarray(self.wide(_before_rounding(layer.w)))
        if layer.what == "dense":
            assert layer.product is not None
            return w.T if layer.product.trans_w else w.reshape(layer.product.k, layer.product.n), 1
        return w, w.ndim - 1 if layer.problem.channels_last else 0


def _convolution(p: ConvProblem, x: Array, w: Array, b: Array | None, **numbers: Any) -> Array:
    given: dict[str, Any] = dict(
        residual=None, residual_scale=None, out_scale=None, activation=None, shortcut=None, **_AUTOMATIC
    )
    given |= numbers
    return conv_scaled.run(
        f"conv{p.nd}d",
        p.nd,
        x,
        w,
        b,
        stride=p.stride,
        padding=p.padding,
        dilation=p.dilation,
        groups=p.groups,
        layout=(CHANNELS_LAST if p.channels_last else CHANNELS_FIRST)[p.nd],
        **given,
    )


def filter_dtype(x: str) -> str:
    return "int8" if x in ("int8", "uint8") else x


def _before_rounding(v: Value) -> Value:
    """What v, a float, was rounded from, if it was: wherever on a mesh that is."""
    while True:
        rounded = v
        while rounded.made_by == "reshard":
            rounded = rounded.node.inputs[0]
        if rounded.made_by != "convert_element_type":
            return v
        source = rounded.node.inputs[0]
        wider = jnp.issubdtype(source.dtype, jnp.floating) and source.dtype.itemsize > rounded.dtype.itemsize
        if not wider or isinstance(source, Constant):
            return v
        v = source


def _moved(node: Node, q: Array) -> Array:
    """The node of 8-bit elements."""
    if node.name == "convert_element_type":
        return q
    if node.name == "jaxconv_max_pool":
        p: PoolProblem = node.params["problem"]
        least = jnp.iinfo(q.dtype).min if jnp.issubdtype(q.dtype, jnp.integer) else -float(jnp.finfo(q.dtype).max)
        return lax.reduce_window(
            q,
            np.asarray(least, q.dtype),
            lax.max,
            p.per_axis(p.window, 1),
            p.per_axis(p.stride, 1),
            p.per_axis(p.padding, (0, 0)),
            window_dilation=p.per_axis(p.dilation, 1),
        )
    (out,) = node.evaluate([q])
    return out

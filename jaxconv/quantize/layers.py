"""What of a frozen program could have 8 bits: its layers, by name, and why some stay wide."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jax.extend.core import ClosedJaxpr

from jaxconv import _problem
from jaxconv._core import primitives
from jaxconv._core.graph import Constant, Graph, Node, Value, body_of_call, number_of
from jaxconv._problem import ConvProblem, DenseProblem
from jaxconv.quantize.report import QuantizedLayer

CONVOLUTIONS = ("jaxconv_conv", "jaxconv_conv_add", "jaxconv_conv_fprop")
PRODUCTS = ("jaxconv_dense", "jaxconv_matmul", "dot_general")
# Layers that stay wide: (what, why)
WIDE = {
    "jaxconv_conv_dgrad": ("conv", "it is transposed"),
    "conv_general_dilated": ("conv", "jaxconv has no such convolution of floating-point numbers"),
    "jaxconv_conv_integer": ("conv", "its operands are integers"),
    "jaxconv_conv_scaled": ("conv", "it has 8 bits already"),
    "jaxconv_squeeze_excite": ("squeeze_excite", "its two dense layers are small"),
}
# 8-bit products on tensor cores take channels in multiples of so many, and with groups a group's.
CHANNELS, GROUP_CHANNELS = 16, 128


@dataclasses.dataclass(eq=False)
class Layer:
    """A convolution or dense layer of a program."""

    node: Node
    what: str
    where: str  # the name scopes
    weight: str  # the bound array that its filter is of; empty where it is of none
    filter: tuple[int, ...]  # its shape
    why: str = ""  # it stays wide; empty where it has 8 bits
    inside: tuple[str, str] | None = None  # in a function that the node carries: the types of what it reads and makes

    @property
    def x(self) -> Value:
        return self.node.inputs[0]

    @property
    def w(self) -> Value:
        return self.node.inputs[1]

    @property
    def y(self) -> Value:
        return self.node.outputs[0]

    @property
    def product(self) -> DenseProblem | None:
        """That of a dense layer; None where it is none of two matrices."""
        return _plain_product(self.node) if self.node.name == "dot_general" else self.node.params["problem"]

    @property
    def problem(self) -> ConvProblem:
        """The layer as a convolution: a dense one is of one pixel."""
        if self.what == "conv":
            return self.node.params["problem"]
        assert self.product is not None
        return ConvProblem.of_product(self.product)

    @property
    def is_depthwise(self) -> bool:
        return self.node.name in CONVOLUTIONS and self.problem.groups > 1 and self.problem.depthwise

    @property
    def bias(self) -> Value | None:
        return self.node.inputs[2] if self.problem.bias else None

    @property
    def residual(self) -> Value | None:
        return self.node.inputs[-1] if self.node.name == "jaxconv_conv_add" else None

    @property
    def name(self) -> str:
        return self.where or self.weight or self.what

    def is_named(self, name: str) -> bool:
        """Whether the name is that of its scopes or its weight, or of a part of them: "stage1", "block2/conv1". A layer
        that has neither is named as in the table."""
        if name == self.name:
            return True
        parts = name.strip("/").split("/")
        n = len(parts) if name.strip("/") else 0
        if not n:
            return False
        for path in (self.where.split("/"), self.weight.split("/")):
            if any(path[i : i + n] == parts for i in range(len(path) - n + 1)):
                return True
        return False


def identity_of(layer: Layer | QuantizedLayer) -> tuple[Any, ...]:
    """What is the same of a layer for inputs of other shapes. In attention a product's second operand is no weight."""
    return layer.what, layer.filter if layer.weight else len(layer.filter)


def _plain_product(node: Node) -> DenseProblem | None:
    """lax's product of x's last axes and w's first ones, of one type, as one of matrices; None where it is another."""
    x, w = (v.aval for v in node.inputs)
    (of_x, of_w), batch = node.params["dimension_numbers"]
    n = len(of_w)
    last = tuple(range(x.ndim - n, x.ndim)), tuple(range(n))
    types = {v.dtype for v in (x, w, node.outputs[0])}
    if any(batch) or (tuple(of_x), tuple(of_w)) != last or not 0 < n < w.ndim or len(types) > 1:
        return None
    default = lax.Precision.DEFAULT
    return DenseProblem(
        name="dense",
        dtype=x.dtype.name,
        m=math.prod(x.shape[: x.ndim - n]),
        k=math.prod(w.shape[:n]),
        n=math.prod(w.shape[n:]),
        precision=(default, default),
    )


class Reading:
    """A program as a graph, and its layers in order."""

    def __init__(self, closed: ClosedJaxpr, bound: Sequence[bool], names: Sequence[str]):
        """`bound`: which arguments are; `names`: of these."""
        self.graph = Graph(closed, body_of_call)
        self.bound = [v for v, is_bound in zip(self.graph.inputs, bound, strict=True) if is_bound]
        self.free = [v for v, is_bound in zip(self.graph.inputs, bound, strict=True) if not is_bound]
        self._known = set(self.bound)
        for node in self.graph.nodes:
            if not node.eqn.effects and all(map(self.is_known, node.inputs)):
                self._known.update(node.outputs)
        named = dict(zip(self.bound, names, strict=True))
        self.layers: list[Layer] = []
        for node in self.graph.nodes:
            if all(v in self._known for v in node.outputs):
                continue
            if node.name in (*CONVOLUTIONS, *PRODUCTS, *WIDE):
                what = "conv" if node.name in CONVOLUTIONS else "dense"
                what, why = WIDE.get(node.name, (what, ""))
                known = len(node.inputs) > 1 and self.is_known(node.inputs[1])
                weight = self._largest(node.inputs[1], named) if known else ""
                shape = node.inputs[1].shape if len(node.inputs) > 1 else ()
                self.layers.append(Layer(node, what, str(node.name_stack), weight, shape, why))
            else:
                self.layers += self._inside(node)

    @property
    def empty(self) -> bool:
        """Whether an input has no elements."""
        return any(all(map(_problem.is_number, v.shape)) and 0 in v.shape for v in self.free)

    def is_known(self, v: Value) -> bool:
        """Whether v follows from bound arguments and constants alone."""
        return isinstance(v, Constant) or v in self._known

    def _largest(self, v: Value, names: dict[Value, str]) -> str:
        """The name of the largest bound argument that v is made of."""
        behind, front = {v}, [v]
        while front:
            node = front.pop().node
            for u in [] if node is None else node.inputs:
                if u not in behind:
                    behind.add(u)
                    front.append(u)
        sources = [u for u in self.bound if u in behind]
        return names[max(sources, key=lambda u: math.prod(u.shape))] if sources else ""

    def _inside(self, node: Node) -> list[Layer]:
        """The layers in the functions that an equation carries: they stay what they are."""
        layers = []
        for eqn in (eqn for inner in primitives.inner_jaxprs(node.eqn, None) for eqn in primitives.equations(inner)):
            if (name := eqn.primitive.name) in (*CONVOLUTIONS, *PRODUCTS, "jaxconv_conv_dgrad"):
                what, shape = "dense" if name in PRODUCTS else "conv", tuple(eqn.invars[1].aval.shape)
                types = str(eqn.invars[0].aval.dtype), str(eqn.outvars[0].aval.dtype)
                layers.append(Layer(node, what, str(node.name_stack), "", shape, f"it is inside {node.name}", types))
        return layers

    # ---- which layers stay wide
    def choose(self, wide: Sequence[str]) -> None:
        """Says of each layer why it stays wide, if it does.

        Raises:
          ValueError: where `wide` has a name that no layer has.
        """
        for name in wide:
            if not any(layer.is_named(name) for layer in self.layers):
                names = ", ".join(dict.fromkeys(layer.name for layer in self.layers))
                raise ValueError(f"freeze: wide got {name!r}, but no layer has that name, expected some of {names}")
        behind = self._behind_layers()
        before = self._before_layers()
        for layer in self.layers:
            if any(layer.is_named(name) for name in wide):
                layer.why = "wide= names it"
            elif not layer.why:
                first, last = layer.x not in behind, layer.y not in before
                layer.why = _at_the_ends(first, last) or self._why(layer)

    def _behind_layers(self) -> set[Value]:
        """The values that some layer's result is read for."""
        nodes, behind = {layer.node for layer in self.layers}, set()
        for node in self.graph.nodes:
            if node in nodes or behind.intersection(node.inputs):
                behind.update(node.outputs)
        return behind

    def _before_layers(self) -> set[Value]:
        """The values that some layer's operands are made of."""
        nodes, before = {layer.node for layer in self.layers}, set()
        for node in reversed(self.graph.nodes):
            if node in nodes or before.intersection(node.outputs):
                before.update(node.inputs)
        return before

    def _why(self, layer: Layer) -> str:
        if not self.is_known(layer.w):
            return "its filter follows from the inputs"
        if layer.what == "dense" and (why := _no_plain_product(layer.product)):
            return why
        if not (layer.bias is None or self.is_known(layer.bias)):
            return "its bias follows from the inputs"
        q = layer.problem
        if q.dtype not in ("float32", "bfloat16", "float16"):
            return f"its type is {q.dtype}"
        if q.save_preactivation:
            return "another operation also reads its result in front of the activation"
        if layer.is_depthwise:
            return "it is depthwise: it has no matrix products, which tensor cores need"
        c, k = q.in_channels // q.groups, q.out_channels // q.groups
        if c % CHANNELS or k % CHANNELS:
            return f"8-bit products need multiples of {CHANNELS} channels a group, and it has {c} and {k}"
        if q.groups > 1 and c % GROUP_CHANNELS:
            return f"8-bit products need groups of a multiple of {GROUP_CHANNELS} channels, and its groups have {c}"
        if layer.what == "conv" and all(map(_problem.is_number, q.in_spatial)) and math.prod(q.in_spatial) == 1:
            return "its images have one pixel"
        if q.empty:
            return "there is nothing to compute"
        return ""


def _at_the_ends(first: bool, last: bool) -> str:
    if first:
        return "the first layer: it reads the inputs"
    return "the last layer: it makes the results" if last else ""


def _no_plain_product(p: DenseProblem | None) -> str:
    plain = (
        p is not None
        and not p.trans_x
        and p.batch is None
        and p.alpha == 1.0
        and not p.addend
        and p.bias in (None, "column")
    )
    return "" if plain else "its product is not x @ w + bias"


# ----------------------------------------------------------------------------------------------------------------------
# Values that are never negative

_NOT_NEGATIVE = ("relu", "relu6", "sigmoid")
_KEPT = (  # never negative where none of the operands is
    *("add", "mul", "div", "max", "min", "sqrt", "reduce_sum", "reduce_max", "reduce_window_sum", "reduce_window_max"),
    *("concatenate", "reshape", "transpose", "squeeze", "broadcast_in_dim", "slice", "rev", "copy", "stop_gradient"),
    *("convert_element_type", "jaxconv_max_pool", "name", "reduce_precision", "reshard"),
)
_ALWAYS = ("abs", "exp", "logistic", "square")


def never_negative(v: Value, given: dict[Value, bool] | None = None) -> bool:
    """Whether the program says so of v: it is a relu's result, or made of such."""
    known: dict[Value, bool] = dict(given or {})

    def of(v: Value) -> bool:
        if v not in known:
            known[v] = _never_negative(v, of)
        return known[v]

    return of(v)


def _never_negative(v: Value, of: Callable[[Value], bool]) -> bool:
    if isinstance(v, Constant):
        number = number_of(v)
        return number is not None and number >= 0
    node = v.node
    if node is None:
        return False
    name = node.name
    if name in (*CONVOLUTIONS, "jaxconv_dense"):
        return node.params["problem"].activation.name in _NOT_NEGATIVE and v.index == 0
    if name in _ALWAYS:
        return True
    if name == "max":
        return any(map(of, node.inputs))
    if name == "clamp":
        return of(node.inputs[0])
    if name == "select_n":
        return all(map(of, node.inputs[1:]))
    if name == "custom_jvp_call":
        inner = Graph(node.params["call_jaxpr"], body_of_call)
        return never_negative(inner.outputs[v.index], dict(zip(inner.inputs, map(of, node.inputs), strict=True)))
    return name in _KEPT and all(map(of, node.inputs))

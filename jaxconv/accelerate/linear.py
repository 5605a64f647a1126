"""Convolutions and products, with the bias and activation that follow.

* lax's convolutions, with a bias per output channel, an array that is added and an activation that follow;
* the gradients of images and filters in a derivative that the function takes itself, which lax writes as convolutions;
* products (..., K) @ (K, N) that a bias per column or an activation follows;
* a gate behind a product or a 1x1 convolution: half of the columns times an activation of the other half;
* numbers per output channel that multiply the result of either, as a layer scale does: they go into filter and bias.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from jaxconv import _enable, _problem
from jaxconv._core.activations import Activation
from jaxconv._core.graph import Array, Constant, Node, Value, channels_of, operands_of
from jaxconv._enable import forms
from jaxconv._flax import fused as _fused
from jaxconv._ops.conv_batchnorm import folding_pays
from jaxconv._ops.gated import gate_of
from jaxconv.accelerate.activations import Activations
from jaxconv.accelerate.gates import gate_after

NO_ACTIVATION = Activation()


def _scaled(a: Array, scale: Array, axis: int) -> Array:
    """a * scale along `axis`, rounded once; the sums of its gradient are at least float32."""
    wide = _problem.promoted(a.dtype, jnp.float32)
    scale = jnp.expand_dims(scale, [i for i in range(a.ndim) if i != axis])
    return (a.astype(wide) * scale.astype(wide)).astype(a.dtype)


@dataclasses.dataclass(frozen=True)
class Operands:
    """What an operation and what is behind it are given: its inputs, then bias, scale and what is added, if any."""

    filter: int  # which of the inputs
    axis: int  # of its output channels
    biased: bool
    scaled: bool
    shifted: bool = False  # the bias is added behind the scale
    adds: bool = False

    @property
    def count(self) -> int:
        return 2 + self.biased + self.scaled + self.adds

    def __call__(self, values: Sequence[Array]) -> tuple[Array, Array, Array | None, dict[str, Array]]:
        """The inputs and the bias, with the scale in filter and bias, and the residual=, if any.

        An input that is no array stays what it is.
        """
        inputs, rest = list(values[:2]), list(values[2:])
        size = inputs[self.filter].shape[self.axis]
        bias = rest.pop(0).reshape(size) if self.biased else None
        if self.scaled:
            scale = rest.pop(0).reshape(size)
            inputs[self.filter] = _scaled(inputs[self.filter], scale, self.axis)
            bias = bias if bias is None or self.shifted else _scaled(bias, scale, 0)
        return inputs[0], inputs[1], bias, {"residual": rest.pop(0)} if self.adds else {}


@dataclasses.dataclass(frozen=True)
class Fused:
    """What takes the place of some nodes: `call` of the inputs makes the outputs."""

    nodes: list[Node]  # the operation and what the call takes in after it; the last one makes the result
    inputs: list[Value]
    outputs: list[Value]
    call: Callable[..., Sequence[Array]]
    parts: list[str]
    layer: Node | None = None  # whose name it gets in profiles, where it is not the operation's own
    given: Operands | None = None  # of one operation: how its call reads what it takes
    activation: Activation = NO_ACTIVATION
    gated: bool = False  # whether a gate makes its first result
    why: str = ""  # what is not part of the call could be


class Refusal(Exception):
    """Why an operation is left as it is."""


@dataclasses.dataclass(frozen=True)
class Folding:
    """Where a batch-norm's numbers in inference and a layer scale's are multiplied into the filter in front of them.

    `once`: wherever they can, because whatever follows from weights alone is computed once. Elsewhere every call does
    it, and it must pay: see `folding_pays`.
    """

    once: bool = False

    def pays(self, z: Value, filter: Value) -> bool:
        return self.once or folding_pays(z.shape, filter.shape)

    @staticmethod
    def refused(z: Value, filter: Value) -> str:
        return (
            f"not folded into the filter {list(filter.shape)}: each call would fold it again, which is much work for "
            f"a result of {list(z.shape)}; jaxconv.freeze folds once"
        )


def _along_after(c: Value, axis: int, name: str) -> tuple[Value, Value] | None:
    """(z, b) where the only use of c is z = c + b, or c * b as `name` says, with b along `axis`."""
    if len(c.users) != 1 or c.users[0] is None:
        return None
    z = c.users[0].outputs[0]
    for left, right in operands_of(z, name):
        found = channels_of(right, c.shape) if left is c else None
        if found is not None and found[1] == axis and found[0].dtype == c.dtype:
            return z, found[0]
    return None


def _bias_after(c: Value, axis: int) -> tuple[Value, Value] | None:
    return _along_after(c, axis, "add")


def _scale_after(z: Value, axis: int, free: Callable[[Value], bool]) -> tuple[Value, Value] | None:
    """(s, g) where the only use of z is s = z * g, with g along `axis`, and g may be multiplied into the filter.

    The gradient of g is then made of the filter's, and z is neither written nor kept for it. float16 is left alone: a
    layer scale of 1e-6 times a weight is below its least number. `free`: whether s is no part of a normalisation.
    """
    found = _along_after(z, axis, "mul") if z.dtype != jnp.float16 else None
    return found if found is not None and free(found[0]) else None


def residual_after(z: Value) -> tuple[Value, Value] | None:
    """(total, r) where the only use of z is total = z + r, of an array r like z."""
    if len(z.users) != 1 or z.users[0] is None:
        return None
    total = z.users[0].outputs[0]
    for left, right in operands_of(total, "add"):
        like = left is z and right is not z and right.shape == z.shape and right.dtype == z.dtype
        if like and not isinstance(right, Constant) and right.made_by != "broadcast_in_dim":
            return total, right
    return None


@dataclasses.dataclass(frozen=True)
class Before:
    """conv(x, w) [+ bias], or x @ w [+ bias], per channel."""

    node: Node
    bias: Value | None

    @property
    def what(self) -> str:
        return "conv" if self.node.name == "conv_general_dilated" else "dense"

    def bare(self) -> Value:
        """The convolution's result without what follows, made by a call of its own."""
        node = self.node

        def call(x: Array, w: Array) -> Sequence[Array]:
            return [_fused.conv(x, w, None, NO_ACTIVATION, **window_of(node))]

        alone = dataclasses.replace(node, outputs=[], call=call)
        alone.outputs = [Value(node.outputs[0].aval, alone)]
        return alone.outputs[0]

    def run(self) -> Callable[..., Array]:
        """The layer and its batch-norm in inference: `fused.linear_batchnorm_inference` of x, w, ..."""
        p = self.node.params
        if self.what == "conv":
            call, axis = functools.partial(_fused.conv, **window_of(self.node)), p["dimension_numbers"].rhs_spec[0]
        else:
            call, axis = functools.partial(_fused.dense, precision=p["precision"]), 1
        return functools.partial(_fused.linear_batchnorm_inference, call, axis)


def linear_before(z: Value, axis: int) -> Before | None:
    """The convolution or product that makes z, and the bias along `axis` in between, where nobody else needs it.

    None too where jaxconv does not have it, or not with that axis.
    """

    def found(node: Node, bias: Value | None) -> Before | None:
        try:
            if node.name == "conv_general_dilated":
                check_conv(node)
                return Before(node, bias) if node.params["dimension_numbers"].out_spec[1] == axis else None
            check_dense(node)
            return Before(node, bias) if axis == len(z.shape) - 1 else None
        except Refusal:
            return None

    if z.made_by in LINEAR:
        return found(z.node, None)
    for c, _ in operands_of(z, "add"):
        after = _bias_after(c, axis) if c.made_by in LINEAR else None
        if after is not None and after[0] is z:
            return found(c.node, after[1])
    return None


LINEAR = ("conv_general_dilated", "dot_general")


def _fuse_epilogue(
    node: Node,
    axis: int,
    activations: Activations,
    what: str,
    run: Callable[..., Any],
    filter: tuple[int, int],
    transposed: Node | None = None,
    *,
    adds: Callable[[Value], bool],
    free: Callable[[Value], bool],
    folding: Folding,
    gates: bool = False,
) -> Iterator[Fused]:
    """`run(x, w, b, activation, return_preactivation=)` in place of the node, its bias and its activation.

    And of the node that transposes its result, where run does that too. `filter`: which input that is, and the axis of
    its output channels. `adds`: whether run takes a value that is added behind the bias, as `residual=`; with it comes
    first, then without. `free`: whether a value is no part of a normalisation. `gates`: whether a gate is looked for.
    """
    nodes = [node, *([transposed] if transposed else [])]
    c = nodes[-1].outputs[0]
    z, b = _bias_after(c, axis) or (c, None)
    nodes += [z.node] if b else []
    scaled, why = _scale_after(z, axis, free), ""
    if scaled and not folding.pays(z, node.inputs[filter[0]]):
        scaled, why = None, f"the scale behind it is {folding.refused(z, node.inputs[filter[0]])}"
    z, g = scaled or (z, None)
    nodes += [z.node] if g else []
    after = _bias_after(z, axis) if g and not b else None
    z, b = after or (z, b)
    nodes += [z.node] if after else []
    operands = functools.partial(Operands, *filter, b is not None, g is not None, after is not None)

    def fused(z: Value, r: Value | None) -> Fused:
        activated = activations.after(z)
        activation = Activation() if activated is None else activated.activation
        both = activated is not None and not activated.hides(z)
        y = z if activated is None else activated.y
        given = operands(adds=r is not None)

        def call(*values: Array) -> Sequence[Array]:
            x, w, bias, residual = given(values)
            outs = run(x, w, bias, activation, return_preactivation=both, **residual)
            return outs if both else [outs]

        told = [("bias", b), ("scale", g), ("residual", r), (str(activation), activated)]
        return Fused(
            [*nodes, *([z.node] if r else []), *(activated.nodes if activated else [])],
            [*node.inputs, *(v for v in (b, g, r) if v)],
            [y, z] if both else [y],
            call,
            [what, *(text for text, there in told if there)],
            given=given,
            activation=activation,
            why=why,
        )

    gated = gate_after(z, activations) if gates else None
    if gated is not None:
        given, gate, shown = operands(), gated, not gated.hides(z)

        def layer(*values: Array) -> Sequence[Array]:
            x, w, bias, _ = given(values)
            h = run(x, w, bias, NO_ACTIVATION)
            rows = h if what == "conv" else h.reshape(math.prod(h.shape[:-1]), h.shape[-1])
            y = gate_of(rows, gate.activation, gate.first).reshape(gate.y.shape)
            return [y, h] if shown else [y]

        told = [("bias", b), ("scale", g), (f"gate({gate.activation})", True)]
        yield Fused(
            [*nodes, *gate.nodes],
            [*node.inputs, *(v for v in (b, g) if v)],
            [gate.y, z] if shown else [gate.y],
            layer,
            [what, *(text for text, there in told if there)],
            given=given,
            gated=True,
            why=why,
        )
        return

    total, r = residual_after(z) or (z, None)
    # An array that the convolution reads is left: its gradient is added up in the convolution's.
    if r is not None and r is not node.inputs[0] and adds(r):
        yield fused(total, r)
    yield fused(z, None)


def check_conv(node: Node) -> None:
    """Refuses what jaxconv does not have."""
    x, w = node.inputs
    p = node.params
    nd = len(x.shape) - 2
    numbers = p["dimension_numbers"]
    if p["batch_group_count"] != 1:
        raise Refusal("it has batch groups")
    if _fused.conv_layout(numbers, nd) is None:
        raise Refusal("jaxconv has channels-last and channels-first convolutions of 1 to 3 dimensions")
    if not x.dtype == w.dtype == node.outputs[0].dtype or x.dtype.name not in _problem.DTYPES:
        raise Refusal(f"its types are {x.dtype} and {w.dtype} -> {node.outputs[0].dtype}")
    if p.get("out_sharding") is not None:
        raise Refusal("its result has a sharding of its own")
    _refuse_algorithms(p["precision"])
    if 0 in (*x.shape, *w.shape, *node.outputs[0].shape):
        raise Refusal("there is nothing to compute")
    if not _fused.pads_are_numbers(p["padding"]):
        raise Refusal("its pads are symbolic")


def find_conv(
    node: Node,
    activations: Activations,
    adds: Callable[[Value], bool],
    free: Callable[[Value], bool],
    folding: Folding,
) -> Iterator[Fused]:
    """`adds`: whether it is this convolution that takes an array that is added to its result.

    `free`: whether a value is no part of a normalisation.
    """
    check_conv(node)
    numbers = node.params["dimension_numbers"]
    run = functools.partial(_fused.conv, **window_of(node))
    filter = 1, numbers.rhs_spec[0]
    how: dict[str, Any] = dict(adds=adds, free=free, folding=folding, gates=_of_pixels(node))
    return _fuse_epilogue(node, numbers.out_spec[1], activations, "conv", run, filter, **how)


def _of_pixels(node: Node) -> bool:
    """Whether a convolution is a product of each pixel by itself, its channels last."""
    numbers, p = node.params["dimension_numbers"], node.params
    last = len(node.outputs[0].shape) - 1
    one = all(node.inputs[1].shape[axis] == 1 for axis in numbers.rhs_spec[2:]) and p["feature_group_count"] == 1
    steps = all(step == 1 for step in (*p["window_strides"], *p["lhs_dilation"]))
    return one and steps and numbers.out_spec[1] == last and all(tuple(pads) == (0, 0) for pads in p["padding"])


def bare_conv(node: Node) -> Fused:
    """The convolution alone: its weight gradient may have a kernel where it has none itself."""
    check_conv(node)
    run = functools.partial(_fused.conv, **window_of(node))
    return Fused([node], list(node.inputs), list(node.outputs), lambda x, w: [run(x, w, None, NO_ACTIVATION)], ["conv"])


def find_gradient(node: Node) -> Fused | None:
    """The kernel of a convolution in a gradient, as `enable` takes it; None where it is a layer's like any other."""
    avals = (*(v.aval for v in node.inputs), node.outputs[0].aval)
    form = forms.read(*avals, node.params)
    if isinstance(form, str) or form.form == "fprop" or _enable.gathers(form, avals):
        return None
    return Fused([node], node.inputs, node.outputs, lambda *operands: [form.run(*operands)], [form.form])


def _refuse_algorithms(precision: Any) -> None:
    """lax has precisions that name an algorithm; the others are pairs."""
    if precision is not None and not isinstance(precision, tuple):
        raise Refusal(f"jaxconv has no algorithm {precision}")


def window_of(conv: Node) -> dict[str, Any]:
    names = ("window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers", "feature_group_count")
    return {name: conv.params[name] for name in (*names, "precision")}


def check_dense(node: Node, swapped: Node | None = None) -> None:
    """Refuses what jaxconv does not have."""
    x, w = node.inputs if swapped is None else node.inputs[::-1]
    p = node.params
    plain = p["dimension_numbers"] == (((len(x.shape) - 1,), (0,)), ((), ())) and len(w.shape) == 2
    if swapped is None and not plain:
        raise Refusal("jaxconv's products are (..., K) @ (K, N)")
    if not x.dtype == w.dtype == node.outputs[0].dtype or x.dtype.name not in _problem.DTYPES:
        raise Refusal(f"its types are {x.dtype} and {w.dtype} -> {node.outputs[0].dtype}")
    if p.get("out_sharding") is not None:
        raise Refusal("its result has a sharding of its own")
    if 0 in (*x.shape, *w.shape):
        raise Refusal("there is nothing to compute")
    _refuse_algorithms(p["precision"])


@dataclasses.dataclass(frozen=True)
class Dense:
    """A product with the bias and the activation that follow, if any."""

    node: Node
    swapped: bool  # w @ x for each row x, as vmap writes it: (w x^T)^T = x w^T
    fused: Fused
    precision: Any

    @property
    def x(self) -> Value:
        return self.node.inputs[1 if self.swapped else 0]

    @property
    def y(self) -> Value:
        return self.fused.outputs[0]

    @property
    def activates(self) -> bool:
        """Whether its only result is an activation's, or a gate's."""
        return (self.fused.activation != NO_ACTIVATION or self.fused.gated) and len(self.fused.outputs) == 1

    def refuse_bare(self) -> None:
        if len(self.fused.parts) == 1:
            raise Refusal("neither a bias, a scale nor an activation follows")


def _dense_filter(swapped: bool) -> tuple[int, int]:
    """Which operand w is, and the axis of its columns."""
    return (0, 0) if swapped else (1, 1)


def find_dense(node: Node, activations: Activations, free: Callable[[Value], bool], folding: Folding) -> Dense:
    """`free`: whether a value is no part of a normalisation. What is added behind it XLA adds in its own product."""
    swapped = _swapped(node)
    check_dense(node, swapped)
    x = node.inputs[0 if swapped is None else 1]
    precision = node.params["precision"]
    if swapped is not None and precision is not None:
        precision = precision[::-1]

    def run(a: Array, b: Array, *rest: Any, **options: Any) -> Any:
        x, w = (a, b) if swapped is None else (b, a.T)
        return _fused.dense(x, w, *rest, precision=precision, **options)

    filter = _dense_filter(swapped is not None)
    how: dict[str, Any] = dict(adds=lambda r: False, free=free, folding=folding, gates=True)
    (fused,) = _fuse_epilogue(node, len(x.shape) - 1, activations, "dense", run, filter, swapped, **how)
    return Dense(node, swapped is not None, fused, precision)


def only_user(v: Value) -> Node | None:
    return v.users[0] if len(v.users) == 1 else None


def source_of(second: Dense) -> Value:
    """What makes the rows of the layer's x, before reshapes that nobody else uses and that leave the rows whole."""
    v = second.x
    while v.made_by == "reshape" and v.node.params["dimensions"] is None and only_user(v) is not None:
        u = v.node.inputs[0]
        if isinstance(u, Constant) or not u.shape or u.shape[-1] != v.shape[-1]:
            break
        v = u
    return v


def _swapped(node: Node) -> Node | None:
    """The transpose that follows, where the node is w @ x^T of two matrices and nobody else uses it."""
    users = node.outputs[0].users
    by_rows = node.params["dimension_numbers"] == (((1,), (1,)), ((), ())) and len(node.inputs[0].shape) == 2
    if not by_rows or len(node.inputs[1].shape) != 2 or len(users) != 1 or users[0] is None:
        return None
    return users[0] if users[0].name == "transpose" else None

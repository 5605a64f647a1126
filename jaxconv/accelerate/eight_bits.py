"""Convolutions and dense layers of 8-bit numbers, as people and quantisation libraries write them: sums, and what makes
numbers of them.

The operands are int8 or uint8, or such converted to floating-point numbers in front of the operation; or float8. In
the order in which they stand: factors a channel or of all, a bias, an array that is added (of 8 bits with a factor of
its own), an activation, a factor, rounding and clipping, and the conversion to 8 bits, also by way of longer integers.
What is missing is left out. The integers may be clipped too. A bias of int32 may stand in front of the factors,
float32(sum + b) * scale, instead of one behind them.

A zero point is not taken, of which the kernel has none: round(v) + 1 of a tie is not round(v + 1).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxconv import _plan
from jaxconv._core.activations import Activation
from jaxconv._core.graph import Array, Constant, Graph, Node, Value, channels_of, number_of, operands_of, scalar_of
from jaxconv._flax import fused
from jaxconv._ops import conv_float8, conv_integer, conv_scaled
from jaxconv._problem import EIGHT_BITS, FLOAT8, ScaledConvProblem, is_number
from jaxconv.accelerate.activations import Activations
from jaxconv.accelerate.linear import Fused, Refusal, window_of

INTEGERS = ("int8", "uint8")
_LONGER = ("int16", "int32", "int64")  # through which rounded numbers may go to 8 bits
_RESULTS = ("float32", "bfloat16", "float16")
Free = Callable[[Value], bool]


def source_of(v: Value) -> Value | None:
    """The 8-bit array that v is, or is converted from without a loss; None where there is none."""
    source, types = v, []
    while source.made_by == "convert_element_type" and source.dtype.name not in EIGHT_BITS:
        types.append(source.dtype)
        source = source.node.inputs[0]
    if source.dtype.name not in EIGHT_BITS or not all(_holds(dtype, source.dtype) for dtype in types):
        return None
    return source


def _holds(dtype: Any, eight: Any) -> bool:
    """Whether a type has all numbers of one of 8 bits: no booleans, no unsigned ones of negative numbers."""
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.dtype(dtype).itemsize > 1
    if eight.name not in INTEGERS or not jnp.issubdtype(dtype, jnp.integer):
        return False
    wide, narrow = jnp.iinfo(dtype), jnp.iinfo(eight)
    return wide.min <= narrow.min and narrow.max <= wide.max


def reads_eight_bits(node: Node) -> bool:
    """Whether a convolution or a product is one of 8-bit numbers whose sums are taken as they are, or become floats."""
    sources = [source_of(v) for v in node.inputs]
    if None in sources:
        return False
    of_integers = {source.dtype.name in INTEGERS for source in sources}
    result = node.outputs[0].dtype.name
    return len(of_integers) == 1 and (result in _RESULTS or (of_integers == {True} and result == "int32"))


def _is_single(v: Value) -> bool:
    return all(map(is_number, v.shape)) and math.prod(v.shape) == 1


@dataclasses.dataclass(frozen=True)
class _Factor:
    """Numbers that multiply, or divide, what they stand behind."""

    value: Value
    divides: bool = False

    def __call__(self, numbers: Array, size: int | None) -> Array:
        """As float32: a number, or with `size` one a channel."""
        numbers = numbers.astype(jnp.float32).reshape(-1 if math.prod(self.value.shape) > 1 else ())
        numbers = 1 / numbers if self.divides else numbers
        return numbers if size is None else jnp.broadcast_to(numbers, (size,))


@dataclasses.dataclass
class _Chain:
    """What follows a convolution, as far as it was read: `z` is what it makes."""

    nodes: list[Node]
    z: Value
    axis: int
    free: Free

    def follow(self, name: str) -> Node | None:
        """The only reader of z, where it is of this primitive."""
        (user, *others) = self.z.users or [None]
        return user if user is not None and not others and user.name == name and self.free(user.outputs[0]) else None

    def take(self, node: Node) -> None:
        self.nodes.append(node)
        self.z = node.outputs[0]

    def _numbers(self, v: Value, channels: bool) -> Value | None:
        """v as a number, or as numbers along the channels."""
        scalar = scalar_of(v)
        if _is_single(scalar):
            return scalar
        along = channels_of(v, self.z.shape) if channels else None
        return along[0] if along is not None and along[1] == self.axis else None

    def _other(self, name: str) -> Value | None:
        node = self.follow(name)
        if node is None:
            return None
        for left, right in operands_of(node.outputs[0], name):
            if left is self.z and right is not self.z:
                return right
        return None

    def convert(self) -> None:
        """Not to 16 bits and back: the numbers would be those before they were rounded."""
        node = self.follow("convert_element_type")
        while node is not None and node.outputs[0].dtype.name in _RESULTS:
            rounded = any(
                one.name == "convert_element_type" and one.outputs[0].dtype.itemsize == 2 for one in self.nodes
            )
            if rounded and node.outputs[0].dtype.itemsize > self.z.dtype.itemsize:
                return
            self.take(node)
            node = self.follow("convert_element_type")

    def factor(self, channels: bool) -> _Factor | None:
        for name in ("mul", "div"):
            other = self._other(name)
            numbers = None if other is None else self._numbers(other, channels)
            if numbers is not None and jnp.issubdtype(numbers.dtype, jnp.floating):
                self.take(self.z.users[0])
                return _Factor(numbers, name == "div")
        return None

    def bias(self) -> Value | None:
        other = self._other("add")
        numbers = None if other is None else self._numbers(other, True)
        if numbers is not None:
            self.take(self.z.users[0])
        return numbers

    def residual(self) -> Value | None:
        other = self._other("add")
        if other is None or other.shape != self.z.shape or isinstance(other, Constant):
            return None
        if other.dtype.name not in _RESULTS:
            return None
        self.take(self.z.users[0])
        return other

    def _bounds(self) -> tuple[float, float] | None:
        """(least, largest) where the only reader of z is a clip to known numbers; a relu of integers is one."""
        low: Value | None = None
        high: Value | None = None
        if (node := self.follow("clamp")) is not None and node.inputs[1] is self.z:
            low, _, high = node.inputs
        elif (other := self._other("max")) is not None:
            low = other
        elif (node := self.follow("min")) is not None:
            high = next((v for v in node.inputs if v is not self.z), None)
        elif (node := self.follow("custom_jvp_call")) is not None and jnp.issubdtype(self.z.dtype, jnp.integer):
            return (0.0, math.inf) if _is_relu(node) else None
        if low is None and high is None:
            return None
        least, largest = -math.inf if low is None else self._bound(low), math.inf if high is None else self._bound(high)
        return None if least is None or largest is None else (least, largest)

    def _bound(self, v: Value) -> float | None:
        """The number that v is, where it is known. `number_of` looks through conversions, which may have changed it."""
        number = number_of(scalar_of(v))
        if number is None or math.isnan(number):
            return None
        if not jnp.issubdtype(self.z.dtype, jnp.integer):
            return number
        info = jnp.iinfo(self.z.dtype)
        return number if info.min <= number <= info.max and number == math.floor(number) else None

    def narrowed(self) -> tuple[str, float, float] | None:
        """(type, least, largest) where z is rounded, clipped to whole numbers, and becomes one of 8 bits.

        It may be a longer integer on the way. It may be clipped as a float, as that integer and as a number of 8 bits:
        clips whose intervals have a common number are one, and keep what is rounded whole. The nodes are taken only if
        all of it is there.
        """
        ahead = dataclasses.replace(self, nodes=list(self.nodes))
        low, high, rounded, found = -math.inf, math.inf, False, None
        while True:
            if (node := ahead.follow("round")) is not None:
                if node.params["rounding_method"] != lax.RoundingMethod.TO_NEAREST_EVEN:
                    break
                rounded = True
            elif (bounds := ahead._bounds()) is not None:
                low, high = max(low, bounds[0]), min(high, bounds[1])
                if low > high:  # the order of the bounds would count
                    break
            elif (zero := ahead._other("add")) is not None:  # a zero point of 0, which changes no rounded number
                if not rounded or number_of(scalar_of(zero)) != 0:
                    break
            elif (node := ahead.follow("convert_element_type")) is not None:
                if not _saturates(ahead.z.dtype, node.outputs[0].dtype, low, high, rounded):
                    break
            else:
                break
            ahead.take(ahead.z.users[0])
            if ahead.z.dtype.name in EIGHT_BITS:
                found = ahead.z.dtype.name, low, high
                self.nodes, self.z = list(ahead.nodes), ahead.z
                if found[0] not in INTEGERS:  # bounds of float8 would be no float32 numbers
                    break
        return found


def _is_relu(node: Node) -> bool:
    """Whether a function with a derivative of its own, of integers, is a relu: of integers no derivative is asked."""
    body = Graph(node.params["call_jaxpr"])
    (y, *others), (x, *more) = body.outputs, body.inputs
    known = any(left is x and number_of(scalar_of(right)) == 0 for left, right in operands_of(y, "max"))
    return known and not others and not more


def _saturates(source: Any, target: Any, low: float, high: float, rounded: bool) -> bool:
    """Whether the conversion of numbers between these bounds is part of the kernel's, or changes none of them.

    XLA makes 0 of NaN, and a type's least or largest number of what is beyond it. Of float32 in a longer integer all of
    it is asked for, and clips follow. To 8 bits nothing beyond the type is converted.
    """
    if target.name in EIGHT_BITS and target.name not in INTEGERS:
        largest = float(jnp.finfo(target).max)
        return jnp.issubdtype(source, jnp.floating) and not rounded and -largest <= low and high <= largest
    if target.name not in (*INTEGERS, *_LONGER):
        return False
    if jnp.issubdtype(source, jnp.floating):
        whole = all(math.isinf(bound) or bound == round(bound) for bound in (low, high))
        # NaN is 0 in the kernel, and bounds inside of the type's come behind it
        if not rounded or not whole or not low <= 0 <= high:
            return False
        if target.name in _LONGER:
            return True
    info = jnp.iinfo(target)
    return info.min <= low and high <= info.max


def _residual_source(r: Value) -> tuple[Value, Value | None]:
    """(array, factor): r, or the 8-bit array that is converted and multiplied to it."""
    for left, right in operands_of(r, "mul"):
        q, scalar = source_of(left), scalar_of(right)
        if q is not None and _is_single(scalar):
            return q, scalar
    q = source_of(r)
    return (r, None) if q is None else (q, None)


class _Conv:
    """A convolution as one of 8-bit numbers with scales.

    Raises:
      Refusal: where jaxconv has none like it.
    """

    what = "conv"

    def __init__(self, node: Node):
        self.node, self._numbers = node, node.params["dimension_numbers"]
        layout = fused.conv_layout(self._numbers, len(node.inputs[0].shape) - 2)
        if layout is None:
            raise Refusal("jaxconv has channels-last and channels-first convolutions of 1 to 3 dimensions")
        if node.params["batch_group_count"] != 1 or any(d != 1 for d in node.params["lhs_dilation"]):
            raise Refusal("jaxconv's 8-bit convolutions with scales have no batch groups and no lhs dilation")
        if not fused.pads_are_numbers(node.params["padding"]):
            raise Refusal("its pads are symbolic")
        self.axis, self._layout = self._numbers.out_spec[1], layout

    def filter(self, w: Array) -> Array:
        return fused._in_layout(w, self._numbers, self._layout)

    def problem(self, x: Array, w: Array, b: Array | None, **given: Any) -> ScaledConvProblem:
        params, nd = window_of(self.node), x.ndim - 2
        window = dict(stride=params["window_strides"], padding=params["padding"], dilation=params["rhs_dilation"])
        window |= dict(groups=params["feature_group_count"], layout=self._layout)
        return ScaledConvProblem.of(f"conv{nd}d", nd, x, w, b, **window, **given)


class _Dense:
    """The same of a product (..., K) @ (K, N)."""

    what = "dense"

    def __init__(self, node: Node):
        self.node = node
        x, w = node.inputs
        last = len(x.shape) - 1
        if node.params["dimension_numbers"] != (((last,), (0,)), ((), ())) or len(w.shape) != 2:
            raise Refusal("jaxconv's products are (..., K) @ (K, N)")
        if 0 in (*x.shape, *w.shape):
            raise Refusal("there is nothing to compute")
        self.axis = last

    def filter(self, w: Array) -> Array:
        return w

    def problem(self, x: Array, w: Array, b: Array | None, **given: Any) -> ScaledConvProblem:
        return ScaledConvProblem.of_dense(x, w, b, **given)


def find_scaled(node: Node, activations: Activations, adds: Callable[[Value], bool], free: Free) -> Iterator[Fused]:
    """`adds`: whether this convolution takes an array that is added to its result. `free`: whether a value is no part
    of a normalisation. What takes in most comes first."""
    form = (_Conv if node.name == "conv_general_dilated" else _Dense)(node)
    if node.params.get("out_sharding") is not None:
        raise Refusal("its result has a sharding of its own")
    x, w = (source_of(v) for v in node.inputs)
    assert x is not None and w is not None
    if x.dtype.name in FLOAT8 and not conv_float8.is_default(node.params["precision"]):
        raise Refusal(f"precision={node.params['precision']!r}: sums of float8 have fewer bits than float32")
    chain = _Chain([node], node.outputs[0], form.axis, free)
    bias = chain.bias() if chain.z.dtype == jnp.int32 else None
    chain.convert()
    if chain.z.dtype.name not in _RESULTS:
        if isinstance(form, _Dense):
            yield _sums_of_product(form, x, w)
        return
    factors = []
    while (factor := chain.factor(True)) is not None:
        factors.append(factor)
    bias = chain.bias() if bias is None else bias
    ends = []  # where it may stop, the farthest first
    total = dataclasses.replace(chain, nodes=list(chain.nodes))
    if (r := total.residual()) is not None and adds(r):
        ends.append((total, r))
    ends.append((chain, None))
    for end, r in ends:
        yield _fused_of(form, x, w, factors, bias, r, end, activations)


def _sums_of_product(form: _Dense, x: Value, w: Value) -> Fused:
    """The int32 sums of x @ w alone. Of int8 by int8 XLA has them; of others it multiplies numbers of 32 bits."""
    if [v.dtype.name for v in form.node.inputs] == ["int8", "int8"]:
        raise Refusal("XLA has a product for sums of int8 without scales")
    options = dict.fromkeys(("activation", "precision", "algorithm", "implementation", "out_dtype"))
    options |= dict.fromkeys(("residual", "scale", "residual_scale", "out_scale"))

    def call(x: Array, w: Array) -> Sequence[Array]:
        problem = form.problem(x, w, None, return_preactivation=False, **options)
        y = _with_derivative(problem, conv_scaled.pixels(problem, x), jnp.expand_dims(w, 0))
        return [conv_scaled.rows(y, x.shape[:-1])]

    return Fused([form.node], [x, w], form.node.outputs, call, ["dense of integers"])


def _fused_of(
    form: _Conv | _Dense,
    x: Value,
    w: Value,
    factors: Sequence[_Factor],
    bias: Value | None,
    r: Value | None,
    chain: _Chain,
    activations: Activations,
) -> Fused:
    node = form.node
    activation = Activation()
    activated = activations.after(chain.z)
    if activated is not None and activated.hides(chain.z):
        activation = activated.activation
        chain.nodes += activated.nodes
        chain.z = activated.y
    wide = dataclasses.replace(chain, nodes=list(chain.nodes))
    rescale = chain.factor(False)
    narrowed = chain.narrowed()
    if narrowed is None:
        chain, rescale = wide, None
    keeps_signs = rescale is None or (number_of(rescale.value) or 0.0) > 0
    # A lower bound of 0 is a relu in front: of u < 0 both make 0, of u > 0 neither changes anything, and NaN, -0.0 and
    # 0 * infinity are 0 in integers. (float8 has NaN and -0.0, and a gradient.)
    if narrowed is not None and narrowed[:2] == ("int8", 0.0) and activation.name == "none" and keeps_signs:
        activation = Activation("relu")
    positive = keeps_signs and activation.name in ("relu", "relu6", "sigmoid")
    residual, residual_factor = (None, None) if r is None else _residual_source(r)
    told = [("scale", factors), ("bias", bias), ("residual", r), (str(activation), activation.name != "none")]
    follows = [text for text, there in told if there]
    follows += [f"rounding to {narrowed[0]}"] if narrowed else []
    if form.what == "dense" and not follows:
        raise Refusal("no factor or bias along its columns follows, and XLA has such products")
    optional = (bias, residual, residual_factor, rescale and rescale.value)
    inputs = [x, w, *(f.value for f in factors), *(v for v in optional if v is not None)]
    size, out_dtype = node.outputs[0].shape[form.axis], chain.z.dtype.name

    def operands_of_call(*values: Array) -> tuple[ScaledConvProblem, list[Array]]:
        given = iter(values)
        x, w = next(given), form.filter(next(given))
        scale = jnp.ones(size, jnp.float32)
        for i, factor in enumerate(factors):
            one = factor(next(given), size)
            scale = one if i == 0 else scale * one
        b = None if bias is None else jnp.broadcast_to(next(given).reshape(-1), (size,))
        b = b if b is None or b.dtype == jnp.int32 else b.astype(jnp.float32)
        added = None if residual is None else next(given)
        added_scale = None if residual_factor is None else next(given).astype(jnp.float32).reshape(())
        out_scale = None if rescale is None else rescale(next(given), None)
        problem = form.problem(
            x,
            w,
            b,
            residual=added,
            scale=scale,
            residual_scale=added_scale,
            out_scale=out_scale,
            out_dtype=out_dtype,
            activation=activation,
            precision=None,
            return_preactivation=False,
            algorithm=None,
            implementation=None,
        )
        if form.what == "dense":
            x, w = conv_scaled.pixels(problem, x), jnp.expand_dims(w, 0)
            added = None if added is None else conv_scaled.pixels(problem, added)
        rest = [a for a in (scale, b, added, added_scale, out_scale) if a is not None]
        return problem, [x, w, *rest]

    def call(*values: Array) -> Sequence[Array]:
        problem, operands = operands_of_call(*values)
        y = _within(_with_derivative(problem, *operands), narrowed, positive)
        return [conv_scaled.rows(y, values[0].shape[:-1]) if form.what == "dense" else y]

    if jnp.issubdtype(node.inputs[0].dtype, jnp.floating) and x is not node.inputs[0]:
        _refuse_slower(operands_of_call, inputs)
    return Fused(chain.nodes, inputs, [chain.z], call, [f"{form.what} of 8 bits", *follows], activation=activation)


def _refuse_slower(operands_of_call: Callable[..., Any], inputs: Sequence[Value]) -> None:
    """Refuses what is of floats that hold 8-bit numbers where a GPU has no kernel for these: XLA has its own."""
    device = _plan.Device.default()
    problems: list[ScaledConvProblem] = []
    jax.eval_shape(lambda *values: problems.append(operands_of_call(*values)[0]), *(v.aval for v in inputs))
    plan = _plan.plan("conv_scaled", problems[0], device)
    if device.platform != "cpu" and plan.implementation != "native":
        raise Refusal(f"its operands are converted from 8 bits: {plan.reason}")


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _with_derivative(problem: ScaledConvProblem, *operands: Array) -> Array:
    """The kernel, which has no derivative, with that of its meaning: in scale, bias and residual."""
    return conv_scaled.apply(problem, *operands)


@_with_derivative.defjvp
def _derivative(problem: ScaledConvProblem, primals: Any, tangents: Any) -> Any:
    def meaning(*operands: Array) -> Array:
        (y,) = jax.tree.leaves(conv_scaled.kernel.reference(problem, *operands))
        return y

    return jax.jvp(meaning, primals, tangents)


def _within(y: Array, narrowed: tuple[str, float, float] | None, positive: bool) -> Array:
    """y clipped, where the bounds are narrower than its type's: -127 to 127, or 240 of 448. `positive`: y is, or 0."""
    if narrowed is None:
        return y
    dtype, low, high = narrowed
    if dtype not in INTEGERS:  # rounding keeps the order, so that bounds may be rounded and come behind it
        largest = float(jnp.finfo(dtype).max)
        if -largest >= low and high >= largest:
            return y
        low, high = (jnp.asarray(bound, dtype).astype(jnp.float32) for bound in (low, high))
        return jnp.clip(y.astype(jnp.float32), low, high).astype(dtype)
    info = jnp.iinfo(dtype)
    if positive and low <= 0:
        low = info.min
    if low > info.min:
        y = jnp.maximum(y, jnp.asarray(low, dtype))
    return jnp.minimum(y, jnp.asarray(high, dtype)) if high < info.max else y


def find_integer(node: Node) -> Fused | None:
    """A convolution of integers to integers alone: the kernel; None where there is none."""
    avals = [v.aval for v in (*node.inputs, node.outputs[0])]
    if not all(conv_integer.is_integer(aval.dtype) for aval in avals) or avals[0].dtype != avals[1].dtype:
        return None
    problem = conv_integer.read(*avals, node.params)
    if isinstance(problem, str):
        raise Refusal(problem)

    def call(lhs: Array, rhs: Array) -> Sequence[Array]:
        operands = (conv_integer.into(lhs, problem.lhs_dtype), conv_integer.into(rhs, problem.rhs_dtype))
        return [conv_integer.back(conv_integer.kernel(problem, *operands), avals[2].dtype)]

    return Fused([node], node.inputs, node.outputs, call, ["conv of integers"])

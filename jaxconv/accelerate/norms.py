"""Batch-norms: (x - mean) / sqrt(var + epsilon), with the scale, bias, residual add and activation that follow.

Where mean and variance are those of x over every axis but one it is training, and they become results of the call as
well; otherwise it is inference, folded into the convolution or product that makes x where nobody else needs x.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxconv import _problem
from jaxconv._core.activations import Activation
from jaxconv._core.graph import (
    AS_FLOAT32,
    OF_RECIPROCALS,
    Array,
    Node,
    Value,
    bare,
    channels_of,
    extent_of,
    is_count,
    number_of,
    operands_of,
    unconverted,
)
from jaxconv._ops.batchnorm import batchnorm
from jaxconv._ops.conv_batchnorm import inference
from jaxconv.accelerate.activations import Activated, Activations
from jaxconv.accelerate.linear import Before, Folding, Fused, Refusal, linear_before
from jaxconv.accelerate.report import GRADIENT


@dataclasses.dataclass(frozen=True)
class Normalised:
    """result = (x - mean) / sqrt(var + epsilon) * scales [+ bias], per channel."""

    result: Value
    x: Value
    axis: int
    mean: Value
    var: Value
    epsilon: float
    scales: list[Value]
    bias: Value | None


def find_normalised(v: Value) -> Normalised | None:
    if not jnp.issubdtype(v.dtype, jnp.floating) or 0 in v.shape:
        return None
    result, shape, bias, axes = v, v.shape, None, set()

    def step(name: str) -> Value | None:
        """Goes through one operation with a value per channel, which it returns."""
        nonlocal v
        for rest, other in operands_of(v, name):
            found = channels_of(other, shape)
            if found is not None and rest.shape == shape:
                axes.add(found[1])
                v = rest
                return found[0]
        return None

    bias = step("add")
    factors: list[tuple[Value, int]] = []
    while True:
        if (factor := step("mul")) is not None:
            factors += _factors(factor, 1)
        elif (factor := step("div")) is not None:
            factors += _factors(factor, -1)
        else:
            break
    mean = step("sub")
    if mean is None and bias is not None and factors:
        mean, bias = _mean_in(bias, factors)
    deviations = [f for f in factors if (f[0].made_by, f[1]) in (("rsqrt", 1), ("sqrt", -1))]
    scales = [f for f in factors if f not in deviations]
    if mean is None or len(axes) != 1 or len(deviations) != 1 or any(power != 1 for _, power in scales):
        return None
    for var, epsilon in operands_of(deviations[0][0].node.inputs[0], "add"):
        number = number_of(epsilon)
        if number is not None and number >= 0 and math.prod(var.shape) == shape[next(iter(axes))]:
            return Normalised(result, v, axes.pop(), mean, bare(var), number, [scale for scale, _ in scales], bias)
    return None


def _factors(v: Value, power: int) -> list[tuple[Value, int]]:
    v = bare(v)
    if v.made_by in ("mul", "div"):
        a, b = v.node.inputs
        if a.shape == b.shape == v.shape:
            return _factors(a, power) + _factors(b, power if v.made_by == "mul" else -power)
    return [(v, power)]


def _mean_in(offset: Value, factors: Sequence[tuple[Value, int]]) -> tuple[Value | None, Value | None]:
    """(mean, bias) where offset = bias - mean * factors: x * factors + offset is (x - mean) * factors + bias."""

    def mean_in(v: Value, sign: int) -> Value | None:
        """The mean where sign * v = -mean * factors."""
        signs, left = _signed_factors(v)
        if sign * signs != -1:
            return None
        for factor in factors:
            if factor not in left:
                return None
            left.remove(factor)
        return left[0][0] if len(left) == 1 and left[0][1] == 1 else None

    if (mean := mean_in(offset, 1)) is not None:
        return mean, None
    for name, sign in (("add", 1), ("sub", -1)):
        # of a subtraction the second operand
        for bias, product in operands_of(offset, name):
            if bias.shape == product.shape and (mean := mean_in(product, sign)) is not None:
                return mean, bare(bias)
    return None, None


def _signed_factors(v: Value, power: int = 1) -> tuple[int, list[tuple[Value, int]]]:
    """v as a product, the signs taken out."""
    sign, factors = 1, []
    for factor, p in _factors(v, power):
        if factor.made_by == "neg":
            inner_sign, inner = _signed_factors(factor.node.inputs[0], p)
            sign, factors = -sign * inner_sign, factors + inner
        else:
            factors.append((factor, p))
    return sign, factors


def _means(v: Value, symbolic: bool = False) -> Iterator[tuple[Value, int | None]]:
    """(u, axis) where v is the mean of u over every axis but `axis`; several, where a mean is taken in stages.

    Under vmap with an axis name there are two: over the axes of an example, and over the examples (psum).
    `symbolic`: those too that are divided by an extent that is no number yet.
    """
    steps: list[Node] = []
    count: Any = 1.0
    tolerance = AS_FLOAT32
    extents: Any = 1  # what symbolic extents it is divided by as well
    v = bare(v)
    while v.node is not None:
        numbers = [number_of(operand) for operand in v.node.inputs]
        if v.made_by == "div" and numbers[1]:
            count *= numbers[1]
            v = bare(v.node.inputs[0])
        elif symbolic and v.made_by == "div" and (extent := extent_of(v.node.inputs[1])) is not None:
            extents = extents * extent
            v = bare(v.node.inputs[0])
        elif v.made_by == "mul" and (numbers[0] or numbers[1]):
            count /= numbers[1] or numbers[0]
            tolerance = OF_RECIPROCALS
            v = bare(v.node.inputs[0 if numbers[1] else 1])
        elif v.made_by == "reduce_sum" or _sums_an_axis(v.node):
            steps.append(v.node)
            v = v.node.inputs[0]
            axes = _kept(v.shape, steps[::-1])
            summed = [v.shape[a] for a in range(len(v.shape)) if axes is not None and a not in axes]
            if _problem.is_number(extents):
                same = is_count(count, summed, tolerance)
            else:
                same = math.prod(summed) == round(count) * extents
            if axes is not None and len(axes) == 1 and same:
                yield v, axes[0]
            v = bare(v)
        else:
            return


def over_batch(n: Normalised) -> bool:
    """Whether it is by x's own mean over axis 0 and all others but one: where that is the batch, training's statistics.

    The sum says so, not the shapes: of one image, statistics of an image and of the batch are the same numbers.
    """
    x = unconverted(n.x)
    means = _means(n.mean, symbolic=True)
    if n.axis == 0 or not any(at == n.axis and unconverted(u) is x for u, at in means):
        return False
    v = bare(n.mean)
    while v.made_by in ("div", "mul", "reduce_sum"):
        if v.made_by == "reduce_sum" and 0 in v.node.params["axes"]:
            return True
        v = bare(next(u for u in v.node.inputs if number_of(u) is None and extent_of(u) is None))
    return False


def _sums_an_axis(node: Node) -> bool:
    """Whether it is the psum that vmap with an axis name leaves: over an axis of the array, not of a mesh."""
    p = node.params
    return node.name == "psum" and len(node.inputs) == 1 and _is_axes(p["axes"]) and p["axis_index_groups"] is None


def _is_axes(axes: Any) -> bool:
    return all(isinstance(a, (int, np.integer)) for a in axes)


def _kept(shape: tuple[int, ...], sums: Sequence[Node]) -> list[int] | None:
    """The axes of `shape`, of those longer than 1, that are left after the sums; None where others are in between."""
    left = [a for a, extent in enumerate(shape) if extent != 1]
    for node in sums:
        entering = node.inputs[0].shape
        positions = [a for a, extent in enumerate(entering) if extent != 1]
        if [entering[a] for a in positions] != [shape[a] for a in left]:
            return None
        left = [a for a, at in zip(left, positions, strict=True) if at not in node.params["axes"]]
    return left


def _is_mean(v: Value, axis: int, accept: Callable[[Value], bool]) -> bool:
    """Whether v is the mean, over every axis but `axis`, of something that `accept` accepts."""
    return any(at == axis and accept(u) for u, at in _means(v))


def squared(v: Value | None) -> Value | None:
    if v is None or v.node is None:
        return None
    if v.made_by == "square" or (v.made_by == "integer_pow" and v.node.params["y"] == 2):
        return v.node.inputs[0]
    if v.made_by == "mul" and v.node.inputs[0] is v.node.inputs[1]:
        return v.node.inputs[0]
    return None


def _is_variance_of(v: Value, x: Value, axis: int) -> bool:
    """Whether v is the biased variance of x over every axis but `axis`, computed in any of the usual ways."""

    def is_x(u: Value | None) -> bool:
        return u is not None and unconverted(u) is x

    def is_mean(u: Value | None) -> bool:
        return u is not None and _is_mean(u, axis, is_x)

    def is_centred_square(u: Value) -> bool:
        centred = squared(u)
        if centred is None or centred.made_by != "sub":
            return False
        found = channels_of(centred.node.inputs[1], centred.shape)
        return is_x(centred.node.inputs[0]) and found is not None and found[1] == axis and is_mean(found[0])

    v = bare(v)
    for low, rest in operands_of(v, "max"):
        if number_of(low) == 0:
            v = bare(rest)
            break
    for second_moment, square in operands_of(v, "sub"):
        return _is_mean(second_moment, axis, lambda u: is_x(squared(u))) and is_mean(squared(bare(square)))
    return _is_mean(v, axis, is_centred_square)


def _is_compared(var: Value) -> bool:
    """Whether var is max(0, v), and v has other users: the derivative of max, which asks whether v equals var.

    It would not, where a call's variance, rounded otherwise, takes var's place, and the gradient would lose a term.
    """
    return any(
        number_of(low) == 0 and any(user is not var.node for user in rest.users)
        for low, rest in operands_of(var, "max")
    )


def leads_only_to(v: Value, ends: Sequence[Value]) -> bool:
    """Whether whatever is computed from v is computed from `ends`."""
    seen, front = set(ends), [v]
    while front:
        for user in front.pop().users:
            if user is None or user.eqn.effects:
                return False
            new = [out for out in user.outputs if out not in seen]
            seen.update(new)
            front += new
    return True


def _needs(values: Sequence[Value], x: Value) -> bool:
    """Whether one of the values is computed from x, or is x."""
    seen, front = set(), list(values)
    while front:
        v = front.pop()
        if v is x:
            return True
        if v.node is not None and v.node not in seen:
            seen.add(v.node)
            front += v.node.inputs
    return False


def find_batchnorm(
    n: Normalised, activations: Activations, linear_of: Callable[[Value, int], Before | None], folding: Folding
) -> Iterator[Fused]:
    """The replacements, those that take in most first: a residual may need what only comes later.

    `linear_of`: the convolution or product that makes a value, where there is one that no other call has taken. In
    inference the norm is folded into it, if nobody else needs its result, neither for the norm's own operands
    (statistics that are not those of training, a residual). In training the bias in between is left out: it shifts the
    mean, and the result is centred again.
    """
    norm = _Norm.of(n, linear_of(unconverted(n.x), n.axis), folding)
    y = norm.y
    if len(y.users) == 1 and y.users[0] is not None and y.users[0].name == "add":
        total = y.users[0].outputs[0]
        for left, right in operands_of(total, "add"):
            like = left is y and right is not y and right.shape == y.shape and right.dtype == y.dtype
            folds = norm.before is not None and not norm.training
            if like and not (folds and added_later(norm.before.node, right)):
                yield from _with_activation(norm, total, right, activations)
    yield from _with_activation(norm, y, None, activations)


def _with_activation(norm: _Norm, z: Value, residual: Value | None, activations: Activations) -> Iterator[Fused]:
    activated = activations.after(z)
    if activated is not None and activated.hides(z):
        yield norm.replaced(z, activated.y, residual, activated)
    yield norm.replaced(z, z, residual, None)


@dataclasses.dataclass(frozen=True)
class _Norm:
    """A batch-norm that jaxconv has."""

    of_x: Normalised
    before: Before | None  # what makes x
    folding: Folding
    training: bool
    kind: str
    x: Value
    y: Value  # narrowed, where that is all that becomes of the result
    dtype: Any  # that it is computed for

    @classmethod
    def of(cls, n: Normalised, before: Before | None, folding: Folding) -> _Norm:
        x0 = unconverted(n.x)
        is_mean = _is_mean(n.mean, n.axis, lambda u: unconverted(u) is x0)
        training = is_mean and _is_variance_of(n.var, x0, n.axis)
        if training and _is_compared(n.var):
            raise Refusal(f"its gradient is {GRADIENT}")
        given = "given statistics" if _needs([n.mean, n.var], x0) else "inference"
        y = n.result
        if len(y.users) == 1 and y.users[0] is not None and y.users[0].name == "convert_element_type":
            narrowed = y.users[0].outputs[0]
            y = narrowed if jnp.issubdtype(narrowed.dtype, jnp.floating) else y
        # Computed in x's dtype where the result has it; else in that in which the function does.
        dtype = x0.dtype if y.dtype == x0.dtype else n.result.dtype
        if {dtype.name, y.dtype.name} - set(_problem.DTYPES):
            raise Refusal(f"its types are {x0.dtype} -> {y.dtype}")
        x = x0 if _problem.promoted(x0.dtype, dtype) == dtype else n.x
        same = x is x0 and dtype == x0.dtype
        kind = f"batchnorm ({'training' if training else given})"
        return cls(n, before if same else None, folding, training, kind, x, y, dtype)

    @property
    def channels(self) -> int:
        return self.of_x.x.shape[self.of_x.axis]

    @property
    def parameters(self) -> Any:
        return jnp.float64 if self.dtype == jnp.float64 else jnp.float32

    def row(self, a: Array) -> Array:
        return a.reshape(self.channels).astype(self.parameters)

    def replaced(self, z: Value, out: Value, residual: Value | None, activated: Activated | None) -> Fused:
        """The call that makes `out`, of all that is behind x; z is what the activation is of."""
        n, training = self.of_x, self.training
        activation = activated.activation if activated else Activation()
        outputs = [out, n.mean, n.var] if training else [out]
        # By place: a scale or bias may be the mean or the variance itself.
        operands = [*([] if training else [n.mean, n.var]), *n.scales, *([n.bias] if n.bias else [])]
        operands += [residual] if residual else []
        alone = self.before is not None and leads_only_to(self.x, outputs) and not _needs(operands, self.x)
        before, why = self.before if alone and (not training or self.before.what == "conv") else None, ""
        if before and not training and not self.folding.pays(self.x, before.node.inputs[1]):
            before, why = None, self.folding.refused(self.x, before.node.inputs[1])
        shift = before.bias if before else None
        folded = before.node if before and not training else None
        parts = [self.kind, *(["residual"] if residual else []), *([str(activation)] if activated else [])]
        parts = [before.what, *(["bias"] if shift else []), *parts] if before else parts
        # Filters are rounded once, after the folding.
        linear = [folded.inputs[0], _unrounded(folded.inputs[1])] if folded else [before.bare() if shift else self.x]
        how = dict(shift=shift is not None, biased=n.bias is not None, adds=residual is not None, activation=activation)
        call = functools.partial(self._inference if folded else self._alone, before, out, **how)
        return Fused(
            [n.result.node, *([z.node] if residual else []), *(activated.nodes if activated else [])],
            [*linear, *([shift] if shift else []), *operands],
            outputs,
            call,
            parts,
            layer=folded,
            why=why,
        )

    def _given(
        self, values: Iterator[Array], *, shift: bool, biased: bool, adds: bool
    ) -> tuple[Array | None, list[Array], Array | None, Array | None, Array | None]:
        """The bias in between, the statistics where they are given, scale, bias, and what is added."""
        row = self.row
        shifted = row(next(values)) if shift else None
        statistics = [] if self.training else [row(next(values)), row(next(values))]
        scales = [row(next(values)) for _ in self.of_x.scales]
        bias = row(next(values)) if biased else None
        scale = functools.reduce(jnp.multiply, scales) if scales else None
        return shifted, statistics, scale, bias, next(values).astype(self.dtype) if adds else None

    def _inference(
        self, before: Before, out: Value, *values: Array, activation: Activation, **how: bool
    ) -> list[Array]:
        given = iter(values)
        linear = [next(given), next(given)]
        shifted, (mean, var), scale, bias, added = self._given(given, **how)
        if shifted is not None:  # (z + shift) - mean = z - (mean - shift)
            mean = mean - shifted
        options = dict(epsilon=self.of_x.epsilon, activation=activation, residual=added)
        return [before.run()(*linear, scale, bias, mean, var, **options).astype(out.dtype)]

    def _alone(self, _: Before | None, out: Value, *values: Array, activation: Activation, **how: bool) -> list[Array]:
        given = iter(values)
        x = next(given).astype(self.dtype)
        shifted, statistics, scale, bias, added = self._given(given, **how)
        if shifted is not None and statistics:
            statistics = [statistics[0] - shifted, statistics[1]]
        # With no momentum the running statistics become those of the batch.
        mean, var = statistics or [jnp.zeros(self.channels, self.parameters)] * 2
        result, mean, var = batchnorm(
            x,
            scale,
            bias,
            mean,
            var,
            training=self.training,
            momentum=0.0,
            epsilon=self.of_x.epsilon,
            activation=activation,
            residual=added,
            channel_axis=self.of_x.axis,
        )
        if not self.training:
            return [result.astype(out.dtype)]
        mean = mean if shifted is None else mean + shifted
        made = ((mean, self.of_x.mean), (var, self.of_x.var))
        return [result.astype(out.dtype), *(s.reshape(v.shape).astype(v.dtype) for s, v in made)]


def added_later(node: Node, r: Value) -> bool:
    """Whether r, to which a convolution's result is added, is made by a later one for this add alone.

    Either may take the other's result as its residual: the later one does.
    """
    if len(r.users) != 1:
        return False
    r = r.node.inputs[0] if r.made_by == "convert_element_type" else r
    normalised = find_normalised(r)
    z, axes = (r, range(len(r.shape))) if normalised is None else (unconverted(normalised.x), [normalised.axis])
    return any(found is not None and found.node.order > node.order for found in (linear_before(z, a) for a in axes))


def _unrounded(w: Value) -> Value:
    """What w is a rounding of, where it is one."""
    if w.made_by != "convert_element_type":
        return w
    source = w.node.inputs[0]
    known = {source.dtype.name, w.dtype.name} <= set(_problem.DTYPES)
    wider = known and _problem.promoted(source.dtype, w.dtype) == source.dtype
    return source if wider and source.dtype != jnp.float64 else w


def find_own_pair(node: Node) -> Fused | None:
    """jaxconv's own batch-norm in inference, with its own convolution before it, where nobody else needs its result."""
    norm, z = node.params["problem"], node.inputs[0]
    conv = z.node
    if conv is None or conv.name not in ("jaxconv_conv", "jaxconv_conv_fprop") or z.users != [node]:
        return None
    p = conv.params["problem"]
    axis = len(p.y_shape) - 1 if p.channels_last else 1
    if p.activation != Activation() or norm.batch is not None or norm.channel_axis != axis:
        return None
    if norm.implementation is not None or norm.algorithm is not None:  # asked for
        return None
    shift = len(conv.inputs) > 2
    pair = _problem.ConvBatchNormProblem(dataclasses.replace(p, bias=False), norm)

    def call(x: Array, w: Array, *rest: Array) -> Sequence[Array]:
        shifts, (scale, bias, mean, var, *residual) = rest[:shift], rest[shift:]
        for b in shifts:  # (z + b) - mean = z - (mean - b)
            mean = mean - b.astype(mean.dtype)
        return [inference(pair, x, w, scale, bias, mean, var, *residual)]

    parts = ["conv", *["bias"] * shift, "batchnorm (inference)", *["residual"] * norm.residual]
    parts += [] if norm.activation == Activation() else [str(norm.activation)]
    return Fused([node], [*conv.inputs, *node.inputs[1:]], node.outputs, call, parts, layer=conv)

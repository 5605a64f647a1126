"""Batch-norms: (x - mean) / sqrt(var + epsilon), with the scale, bias, residual add and activation that follow.

Where mean and variance are those of x over every axis but one it is training, and they become results of the call as
well; otherwise it is inference. With the convolution that makes x, where nobody else needs x, it is `conv_batchnorm`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxconv import _fused, _problem
from jaxconv._activation import Activation
from jaxconv._problem import ConvProblem
from jaxconv.accelerate.activations import Activated, Activations
from jaxconv.accelerate.graph import (
    Array,
    Node,
    Opened,
    Value,
    bare,
    channels_of,
    extent_of,
    is_count,
    number_of,
    operands_of,
    unconverted,
)
from jaxconv.accelerate.linear import Before, Folding, Fused, Refusal, check_conv, fork_of, linear_before, window_of
from jaxconv.accelerate.report import GRADIENT
from jaxconv.batchnorm import batchnorm
from jaxconv.batchnorm_conv import chosen
from jaxconv.batchnorm_fork import open_up, takes_sums
from jaxconv.batchnorm_fork import problem as opened_problem
from jaxconv.batchnorm_shortcut import join, takes_both
from jaxconv.batchnorm_shortcut import problem as shortcut_problem
from jaxconv.conv_batchnorm import inference


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
    if not jnp.issubdtype(v.dtype, jnp.floating):
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
            v = bare(v.node.inputs[0 if numbers[1] else 1])
        elif v.made_by == "reduce_sum" or _sums_an_axis(v.node):
            steps.append(v.node)
            v = v.node.inputs[0]
            axes = _kept(v.shape, steps[::-1])
            summed = [v.shape[a] for a in range(len(v.shape)) if axes is not None and a not in axes]
            # There may be a reciprocal, rounded to float32, for each stage: half an ulp of it.
            same = (
                is_count(count, summed) if _problem.is_number(extents) else math.prod(summed) == round(count) * extents
            )
            if axes is not None and len(axes) == 1 and same:
                yield v, axes[0]
            v = bare(v)
        else:
            return


def over_batch(n: Normalised) -> bool:
    """Whether it is by x's own mean over images and pixels: training's statistics.

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


def _statistics_alone(n: Normalised) -> dict[str, Any]:
    """A batch-norm's arguments where its mean and variance are asked for, and not its result.

    With no momentum the running statistics become those of the batch.
    """
    return dict(training=True, momentum=0.0, epsilon=n.epsilon, activation=None, residual=None)


def _with_statistics(conv: Node, z: Value, n: Normalised, channels: int, params: Any) -> list[Value]:
    """z, the convolution's result, and its mean and variance, (channels,) of `params`: values that one call makes."""

    def call(*operands: Array, forks: bool = False) -> Sequence[Array]:
        zeros = jnp.zeros(channels, params)
        results = _fused.conv_batchnorm(
            *(*operands, None, None, zeros, zeros),
            **(window_of(conv) | _statistics_alone(n)),
            channel_axis=n.axis,
            forks=forks,
            statistics=True,
        )
        return [results[0], *results[1]] if forks else results

    fork = fork_of(conv, functools.partial(call, forks=True))
    pair = Node(conv.order, conv.inputs, [], conv.eqn, conv.name_stack, call, fork)
    row = jax.ShapeDtypeStruct((channels,), params)
    pair.outputs = [Value(aval, pair, i) for i, aval in enumerate((z.aval, row, row))]
    return pair.outputs


def find_batchnorm(
    n: Normalised, activations: Activations, linear_of: Callable[[Value, int], Before | None], folding: Folding
) -> Iterator[Fused]:
    """The replacements, those that take in most first: a residual may need what only comes later.

    `linear_of`: the convolution or product that makes a value, where there is one that no other call has taken. The
    norm and that which makes n.x are a pair if nobody else needs its result, neither for the norm's own operands
    (statistics that are not those of training, a residual).
    """
    x0 = unconverted(n.x)
    before = linear_of(x0, n.axis)
    channels = n.x.shape[n.axis]
    is_mean = _is_mean(n.mean, n.axis, lambda u: unconverted(u) is x0)
    training = is_mean and _is_variance_of(n.var, x0, n.axis)
    if training and _is_compared(n.var):
        raise Refusal(f"its gradient is {GRADIENT}")
    if training:
        kind = "batchnorm (training)"
    else:
        kind = "batchnorm (given statistics)" if _needs([n.mean, n.var], x0) else "batchnorm (inference)"
    y = n.result
    if len(y.users) == 1 and y.users[0] is not None and y.users[0].name == "convert_element_type":
        narrowed = y.users[0].outputs[0]
        y = narrowed if jnp.issubdtype(narrowed.dtype, jnp.floating) else y
    # Computed in x's dtype where the result has it; else in that in which the function does.
    dtype = x0.dtype if y.dtype == x0.dtype else n.result.dtype
    if {dtype.name, y.dtype.name} - set(_problem.DTYPES):
        raise Refusal(f"its types are {x0.dtype} -> {y.dtype}")
    params = jnp.float64 if dtype == jnp.float64 else jnp.float32
    x = x0 if _problem.promoted(x0.dtype, dtype) == dtype else n.x

    def row(a: Array) -> Array:
        return a.reshape(channels).astype(params)

    def alone(outputs: Sequence[Value], operands: Sequence[Value]) -> bool:
        """Whether `before` is there, and nobody needs its result but the call that has these."""
        same = before is not None and x is x0 and dtype == x0.dtype
        return same and leads_only_to(x0, outputs) and not _needs(operands, x0)

    def made(z: Value, out: Value, residual: Value | None, activated: Activated | None) -> Fused:
        activation = activated.activation if activated else Activation()
        outputs = [out, n.mean, n.var] if training else [out]
        # By place: a scale or bias may be the mean or the variance itself.
        operands = [*([] if training else [n.mean, n.var]), *n.scales, *([n.bias] if n.bias else [])]
        operands += [residual] if residual else []
        pair = alone(outputs, operands) and (before.trains or not training)
        why = ""
        if pair and not training and not folding.pays(x0, before.node.inputs[1]):
            pair, why = False, folding.refused(x0, before.node.inputs[1])
        made_by = before.node if pair else None
        shift = before.bias if pair else None

        def call(*values: Array, forks: bool = False, opened: Sequence[Array] = ()) -> Sequence[Array]:
            given = iter(values)
            operands = [next(given), next(given)] if made_by else [next(given).astype(dtype)]
            shifted = row(next(given)) if shift else None
            mean, var = (None, None) if training else (row(next(given)), row(next(given)))
            scales = [row(next(given)) for _ in n.scales]
            bias = row(next(given)) if n.bias else None
            if shift and not training:  # (z + shift) - mean = z - (mean - shift)
                mean = mean - shifted
            scale = functools.reduce(jnp.multiply, scales) if scales else None
            added = next(given).astype(dtype) if residual else None
            if made_by and not training:
                how = dict(epsilon=n.epsilon, activation=activation, residual=added)
                return [before.run()(*operands, scale, bias, mean, var, **how).astype(out.dtype)]
            # With no momentum the running statistics become those of the batch.
            zeros = jnp.zeros(channels, params)
            run = functools.partial(_fused.conv_batchnorm, **window_of(made_by)) if made_by else batchnorm
            results = run(
                *operands,
                scale,
                bias,
                zeros if mean is None else mean,
                zeros if var is None else var,
                training=training,
                momentum=0.0,
                epsilon=n.epsilon,
                activation=activation,
                residual=added,
                channel_axis=n.axis,
                **({"forks": True} if forks else {}),
                **({"opened": opened} if opened else {}),
            )
            passed, (result, mean, var) = results if forks else (None, results)
            outs = [passed] * forks + [result.astype(out.dtype)]
            if training:
                # The bias shifts the mean of its convolution's result, and the result is centred again.
                mean = mean + shifted if shift else mean
                outs += [s.reshape(v.shape).astype(v.dtype) for s, v in ((mean, n.mean), (var, n.var))]
            return outs

        parts = [kind, *(["residual"] if residual else []), *([str(activation)] if activated else [])]
        parts = [before.what, *(["bias"] if shift else []), *parts] if made_by else parts
        linear = list(made_by.inputs) if made_by else [x]
        if made_by and not training:  # rounded once, after the folding
            linear[1] = _unrounded(linear[1])
        inputs = [*linear, *([shift] if shift else []), *operands]
        nodes = [n.result.node, *([z.node] if residual else []), *(activated.nodes if activated else [])]
        avals = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in linear]
        own: ConvProblem | None = None  # of the convolution in the pair
        if made_by and training and x0.dtype == dtype == out.dtype:
            own = _fused.conv_problem(window_of(made_by), n.axis, *avals)

        def sums(of: Opened) -> bool:
            return own is not None and takes_sums(of.before, of.norm, own)

        def opened(*values: Array) -> Sequence[Array]:
            given = iter(values)
            operands = [next(given), next(given)]
            scales = [row(next(given)) for _ in n.scales]
            ones, zeros = jnp.ones(channels, params), jnp.zeros(channels, params)
            bias = row(next(given)) if n.bias else zeros
            z, mean, var = _fused.conv_batchnorm(
                *(*operands, None, None, zeros, zeros),
                **(window_of(made_by) | _statistics_alone(n)),
                channel_axis=n.axis,
                statistics=True,
            )
            scale = functools.reduce(jnp.multiply, scales, ones)
            y, rest = open_up(opens.norm, z, scale, bias, mean, var, next(given))
            statistics = [s.reshape(v.shape).astype(v.dtype) for s, v in ((mean, n.mean), (var, n.var))]
            return [y, *statistics, *rest]

        opens = None
        if own is not None and residual is not None and activated and not shift and residual.dtype == dtype:
            opens = Opened(opened, own, opened_problem(dtype.name, x0.shape, n.axis, n.epsilon, activation))
        fork = fork_of(made_by, functools.partial(call, forks=True), sums) if made_by and training else None

        def then(second: Node) -> Fused | None:
            """With the convolution that alone reads the result, where the plan is one that normalises what it reads."""
            same = training and residual is None and x is x0 and x0.dtype == dtype == out.dtype
            if not same or shift or out.users != [second] or second.inputs[0] is not out:
                return None
            try:
                check_conv(second)
            except Refusal:
                return None
            windows = window_of(made_by) if made_by else None, window_of(second)
            arrays = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in (*linear, second.inputs[1])]
            p = _fused.batchnorm_conv_problem(*windows, n.axis, n.epsilon, activation, *arrays)
            if p is None or chosen(p).kernel == "two":
                return None

            def both(*values: Array, forks: bool = False) -> Sequence[Array]:
                given = iter(values)
                operands = [next(given) for _ in linear]
                scales = [row(next(given)) for _ in n.scales]
                bias = row(next(given)) if n.bias else None
                scale = functools.reduce(jnp.multiply, scales) if scales else None
                results = _fused.batchnorm_conv(p, *windows, operands, scale, bias, next(given), forks)
                passed, (result, mean, var) = results if forks else (None, results)
                statistics = [s.reshape(v.shape).astype(v.dtype) for s, v in ((mean, n.mean), (var, n.var))]
                return [*[passed] * forks, result, *statistics]

            return Fused(
                [second],
                [*inputs, second.inputs[1]],
                [second.outputs[0], n.mean, n.var],
                both,
                [*parts, "conv"],
                fork_of(made_by, functools.partial(both, forks=True)) if made_by else None,
                again=(n.mean, n.var),
            )

        return Fused(nodes, inputs, outputs, call, parts, fork, made_by, then=then, opened=opens, why=why)

    def joined(total: Value, right: Value) -> Fused | None:
        """With the batch-norm that alone makes the other operand of the sum, a shortcut's, where the plan is to take
        both in one."""
        activated = activations.after(total)
        r = right.node.inputs[0] if right.made_by == "convert_element_type" else right
        other = find_normalised(r)
        if other is None or activated is None or not activated.hides(total) or len(right.users) != 1:
            return None
        r0, out = unconverted(other.x), activated.y
        same = r is right or len(r.users) == 1
        same = same and other.axis == n.axis and {v.dtype for v in (x0, r0, right, y, out)} == {dtype}
        if not training or not same or x is not x0 or not over_batch(other) or _needs([r0], x0) or _needs([x0], r0):
            return None
        if not _is_variance_of(other.var, r0, other.axis) or _is_compared(other.var):
            return None
        p = shortcut_problem(dtype.name, x0.shape, n.axis, activated.activation)
        if not takes_both(p):
            return None
        of_both = [v for m in (n, other) for v in (*m.scales, *([m.bias] if m.bias else []))]

        def paired(m: Normalised, z: Value) -> Node | None:
            """The convolution that makes z, where its statistics may leave it with z."""
            found = linear_of(z, m.axis)
            fits = found is not None and found.trains and found.bias is None
            return found.node if fits and leads_only_to(z, [out, m.mean, m.var]) and not _needs(of_both, z) else None

        convs = [paired(n, x0), paired(other, r0)]
        # Calls of their own: a convolution whose input leads to the other one's may be a fork then.
        made_of = [
            v
            for conv, z, m in zip(convs, (x0, r0), (n, other), strict=True)
            for v in ([z] if conv is None else _with_statistics(conv, z, m, channels, params))
        ]

        def call(*values: Array) -> Sequence[Array]:
            given = iter(values)

            def moments(m: Normalised, conv: Node | None) -> list[Array]:
                """What m normalises, its mean and its variance."""
                if conv is not None:
                    return [next(given), next(given), next(given)]
                z, zeros = next(given), jnp.zeros(channels, params)
                _, *statistics = batchnorm(z, None, None, zeros, zeros, channel_axis=m.axis, **_statistics_alone(m))
                return [z, *statistics]

            def affine(m: Normalised) -> list[Array]:
                scales = [row(next(given)) for _ in m.scales]
                bias = row(next(given)) if m.bias else jnp.zeros(channels, params)
                return [functools.reduce(jnp.multiply, scales, jnp.ones(channels, params)), bias]

            (z, mean, var), (z_r, mean_r, var_r) = moments(n, convs[0]), moments(other, convs[1])
            rstd, rstd_r = jax.lax.rsqrt(var + n.epsilon), jax.lax.rsqrt(var_r + other.epsilon)
            result = join(p, z, *affine(n), mean, rstd, z_r, *affine(other), mean_r, rstd_r)
            statistics = ((mean, n.mean), (var, n.var), (mean_r, other.mean), (var_r, other.var))
            return [result, *(s.reshape(v.shape).astype(v.dtype) for s, v in statistics)]

        shortcut = "the shortcut's" if convs[1] is None else "the shortcut's conv and batchnorm"
        return Fused(
            [n.result.node, r.node, total.node, *activated.nodes],
            [*made_of, *of_both],
            [out, n.mean, n.var, other.mean, other.var],
            call,
            [*(["conv"] if convs[0] else []), kind, shortcut, str(activated.activation)],
            again=(other.mean, other.var),
            pairs=[conv for conv in convs if conv],
        )

    def with_activation(z: Value, residual: Value | None) -> Iterator[Fused]:
        activated = activations.after(z)
        if activated is not None and activated.hides(z):
            yield made(z, activated.y, residual, activated)
        yield made(z, z, residual, None)

    if len(y.users) == 1 and y.users[0] is not None and y.users[0].name == "add":
        total = y.users[0].outputs[0]
        for left, right in operands_of(total, "add"):
            like = left is y and right is not y and right.shape == y.shape and right.dtype == y.dtype
            folds = before is not None and not training
            both = joined(total, right) if like else None
            if both is not None:
                yield both
            if like and not (folds and added_later(before.node, right)):
                yield from with_activation(total, right)
    yield from with_activation(y, None)


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
    wider = jnp.issubdtype(source.dtype, jnp.floating) and _problem.promoted(source.dtype, w.dtype) == source.dtype
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

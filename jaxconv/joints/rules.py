"""The table of rules: what stands in a differentiated program, and the kernels that take its place.

A rule looks at one node of a program of plain ops (convolutions, norms, products, activations' gradients, adds) and
says which nodes around it are another function of the same values. It knows no derivative, batching, mesh or remat:
those are the region's. Whether it is worth it the plan says, for the device that the program is for.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from jaxconv import _plan
from jaxconv._core import sharding
from jaxconv._core.activations import Activation
from jaxconv._core.graph import Array, Node, Value, number_of, scalar_of
from jaxconv._ops import batchnorm, conv, conv_normalised, conv_pooled, conv_shortcut, dense, gated, layer, reference
from jaxconv._problem import (
    AddedConvProblem,
    BatchNormConvProblem,
    BatchNormProblem,
    ConvBatchNormProblem,
    ConvProblem,
    DenseProblem,
    GatedGradientProblem,
    GatedProblem,
    NormalisedConvProblem,
    PooledConvProblem,
    PoolProblem,
    ShortcutConvProblem,
)
from jaxconv.joints.program import Program

replace = dataclasses.replace


@dataclasses.dataclass(frozen=True)
class Rule:
    name: str
    at: tuple[str, ...]  # the primitives of the nodes that it looks at
    apply: Callable[[Program, Node, _plan.Device], bool]  # whether something was replaced


Op = tuple[str, Any]  # an op's name and problem


@dataclasses.dataclass(frozen=True)
class Fusion:
    """What a rule replaced by what, at one place."""

    rule: str
    before: tuple[Op, ...]
    after: tuple[Op, ...]


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """A program's ops before and after the rules, and what these replaced."""

    differentiated: bool  # whether it is a program of results and gradients
    before: tuple[Op, ...]
    after: tuple[Op, ...]
    fusions: tuple[Fusion, ...]


HEARD: contextvars.ContextVar[list[Rewritten] | None] = contextvars.ContextVar("jaxconv_heard_rules", default=None)


def _calls(nodes: Iterable[Node]) -> list[Node]:
    return [node for node in nodes if "problem" in node.params and node.call is None]


def _ops(nodes: Iterable[Node]) -> tuple[Op, ...]:
    return tuple(map(_op, _calls(nodes)))


def _op(node: Node) -> Op:
    return node.name.removeprefix("jaxconv_"), node.params["problem"]


def _fusion(rule: Rule, program: Program) -> Fusion:
    before, after = zip(*program.changes, strict=True)
    return Fusion(rule.name, _ops(itertools.chain(*before)), _ops(itertools.chain(*after)))


def rewrite(program: Program, device: _plan.Device, captured: bool = False) -> list[str]:
    """Applies the rules in their order, each at every node. Returns the names of those that were applied. `captured`:
    whether CUDA graphs hold all that the program launches."""
    applied: list[str] = []
    heard = HEARD.get()
    before = () if heard is None else _ops(program.nodes)
    fusions: list[Fusion] = []
    _unmark(program)
    with _plan.remembered():  # the blocks of a program ask the same
        for rule in RULES:
            found = True
            while found:  # what a rule makes, the same rule may match again
                found = False
                for node in [node for node in program.nodes if node.name in rule.at]:
                    program.changes.clear()
                    if not node.dead and rule.apply(program, node, device):
                        applied.append(rule.name)
                        found = True
                        if heard is not None:
                            fusions.append(_fusion(rule, program))
                if found:
                    program.settle()
        _choose_together(program, device, captured)
    if heard is not None:
        heard.append(Rewritten(program.differentiated, before, _ops(program.nodes), tuple(fusions)))
    return applied


def _choose_together(program: Program, device: _plan.Device, captured: bool) -> None:
    """Convolutions of which the program says more than each alone get a problem that says so."""
    of = {node: _op(node) for node in _calls(program.nodes) if not split_by_type(*node.inputs)}
    marked = _plan.plan_together(of.values(), device, captured)
    for node, op in of.items():
        if op in marked:
            _set_problem(node, marked[op])


def _unmark(program: Program) -> None:
    """What another program chose together, which is a part of this one, is chosen anew."""
    for node in _calls(program.nodes):
        if getattr(problem := node.params["problem"], "together", None) is not None:
            _set_problem(node, replace(problem, together=None))


def _set_problem(node: Node, problem: Any) -> None:
    node.eqn = node.eqn.replace(params={**node.params, "problem": problem})


def wants(op: str, problem: Any, device: _plan.Device) -> bool:
    """Whether the plan for the device takes `op` as one, where it could be several calls."""
    plan = _plan.plan(op, problem, device)
    return plan.implementation == "native" or (plan.implementation == "calls" and plan.kernel not in _SEVERAL)


_SEVERAL = ("two", "three", "parts")

# ----------------------------------------------------------------------------------------------------------------------
# How a program is read


def maker(v: Value, name: str) -> Node | None:
    """The node that makes v, where it is of the primitive `jaxconv_<name>`."""
    return v.node if v.made_by == f"jaxconv_{name}" else None


def readers(v: Value) -> list[Node]:
    """The nodes that read v, each once. A result of the program has another reader, which is no node."""
    return [*dict.fromkeys(user for user in v.users if user is not None)]


def read_by(v: Value, *nodes: Node | None) -> bool:
    """Whether these nodes read v, and nobody else does."""
    return set(v.users) == {node for node in nodes if node is not None}


def _sums_of(v: Value, *axes: int) -> Iterator[list[Node]]:
    """The nodes that make the sum of v over axes, in v's dtype: of 16 bits the sum is taken of float32."""
    for first in readers(v):
        steps, total = [first], first.outputs[0]
        if first.name == "convert_element_type" and total.dtype == jnp.float32 and len(total.users) == 1:
            steps += readers(total)
            total = steps[-1].outputs[0]
        if steps[-1].name != "reduce_sum" or tuple(steps[-1].params["axes"]) != axes:
            continue
        if len(steps) > 1:
            narrowed = [user for user in readers(total) if user.name == "convert_element_type"]
            if len(total.users) != 1 or not narrowed:
                continue
            steps += narrowed
        if steps[-1].outputs[0].dtype == v.dtype:
            yield steps


def split_by_type(*values: Value) -> bool:
    """Whether types say how arrays are split over a mesh."""
    return sharding.explicit_mesh([v.aval for v in values]) is not None


# ----------------------------------------------------------------------------------------------------------------------
# dgrad(dy, w) + c is one kernel, or as good as two


def _adding_costs(d: Node | None) -> int | None:
    """What adding to this dgrad costs, in no unit; None where no kernel adds to it.

    The cheapest is a 1x1 convolution that steps over pixels: it adds to those that it reads, where they lie. One that
    does not step still has time for another operand, which the tiles of larger filters are not all made for. Of those
    with groups depthwise ones have kernels that add.
    """
    if d is None:
        return None
    p: ConvProblem = d.params["problem"]
    if p.groups not in (1, p.in_channels):
        return None
    if math.prod(p.filter) > 1:
        return 2
    return 0 if math.prod(p.stride) > 1 else 1


def _added_dgrad(node: Node) -> Iterator[tuple[Node, Value]]:
    """(dgrad, c) where the node adds c to a dgrad that nobody else reads; first the one that adds for the least."""
    if len(node.inputs) != 2 or split_by_type(*node.inputs):
        return
    a, b = node.inputs
    found = []
    for v, c in ((a, b), (b, a)):
        d = maker(v, "conv_dgrad")
        cost = _adding_costs(d)
        if cost is not None and v is not c and read_by(v, node) and (c.shape, c.dtype) == (v.shape, v.dtype):
            found.append((cost, d, c))
    for _, d, c in sorted(found, key=lambda one: one[0]):
        yield d, c


def dgrad_and_add(program: Program, node: Node, device: _plan.Device) -> bool:
    for d, c in _added_dgrad(node):
        inputs, outputs = [*d.inputs, c], node.outputs
        if program.fits([d, node], inputs, outputs):
            p = d.params["problem"]
            program.splice([d, node], inputs, outputs, lambda *args, p=p: [conv.dgrad_add(p, *args)], dgrad_and_add, p)
            return True
    return False


# ----------------------------------------------------------------------------------------------------------------------
# A convolution's statistics leave it with its result, and the batch-norm behind it reads that once


def _statistics_leave(p: ConvProblem, norm: BatchNormProblem, device: _plan.Device) -> bool:
    """Those of p's result, which the norm reads."""
    if norm.batch is not None or p.y_shape != norm.shape or p.channel_axis != norm.channel_axis:
        return False
    return wants("conv_batchnorm", ConvBatchNormProblem(p, norm), device)


def _convolution(v: Value) -> ConvProblem | None:
    """The convolution that makes v, with what it adds to its sums and nothing behind them, as one that takes
    statistics; None where v is made otherwise."""
    node = maker(v, "conv_fprop")
    if node is not None:
        return node.params["problem"]
    node = maker(v, "conv") or maker(v, "conv_add")
    p: ConvProblem | None = node.params["problem"] if node is not None else None
    if p is None or p.activation.name != "none" or p.save_preactivation:
        return None
    return AddedConvProblem.of(p, node.name == "jaxconv_conv_add")


def _bare(p: BatchNormProblem) -> BatchNormProblem:
    return replace(p, activation=Activation(), residual=False)


def convolution_and_norm(program: Program, node: Node, device: _plan.Device) -> bool:
    p, (x, *rest) = node.params["problem"], node.inputs
    before, of_conv = x.node, _convolution(x)
    if of_conv is None or p.masked or not _statistics_leave(of_conv, p, device):
        return False
    count = len(before.inputs)

    def call(*args: Array) -> list[Array]:
        rest = args[count:]
        z, mean, var = conv.with_statistics(of_conv, *args[:count])
        return [z, *batchnorm.train_with(p, z, *rest[:4], mean, var, *rest[4:])]

    inputs, outputs = [*before.inputs, *rest], [x, *node.outputs]
    if not program.fits([before, node], inputs, outputs):
        return False
    program.splice([before, node], inputs, outputs, call, convolution_and_norm, of_conv, p)
    return True


def convolution_and_moments(program: Program, node: Node, device: _plan.Device) -> bool:
    p, x = node.params["problem"], node.inputs[0]
    before, of_conv = x.node, _convolution(x)
    if of_conv is None or not _statistics_leave(of_conv, _bare(p), device):
        return False

    def call(*args: Array) -> list[Array]:
        z, mean, var = conv.with_statistics(of_conv, *args)
        return [z, mean, jnp.zeros_like(mean), var]

    outputs = [x, *node.outputs]
    if not program.fits([before, node], before.inputs, outputs):
        return False
    program.splice([before, node], before.inputs, outputs, call, convolution_and_moments, of_conv)
    return True


# ----------------------------------------------------------------------------------------------------------------------
# Batch-norms of concatenated channels, as in densely connected networks: each piece is part of many norms' inputs

_NORMS = ("jaxconv_batchnorm_train", "jaxconv_batchnorm_infer", "jaxconv_batchnorm_backward")


def _pieces(v: Value, axis: int) -> list[Value]:
    """The arrays that v concatenates along the axis; v alone where it is no concatenation."""
    if v.made_by != "concatenate" or v.node.call is not None or v.node.params["dimension"] != axis:
        return [v]
    return [piece for u in v.node.inputs for piece in _pieces(u, axis)]


def _pieces_of_norms(x: Value, p: BatchNormProblem) -> list[Value]:
    """The pieces of x, where norms and larger concatenations alone read it; else none.

    Between XLA's own operations such a concatenation is in no memory: what reads it reads the pieces.
    """
    names = {user.name if user is not None and user.call is None else "" for user in x.users}
    if p.batch is not None or p.masked or split_by_type(x) or not names <= {"concatenate", *_NORMS}:
        return []
    pieces = _pieces(x, p.channel_axis)
    again = any(piece.made_by == "optimization_barrier" for piece in pieces)
    return [] if len(pieces) == 1 or again else pieces


def norm_of_pieces(program: Program, node: Node, device: _plan.Device) -> bool:
    """The statistics of a concatenation are those of its pieces, which are taken once for all norms that read them. The
    normalisation is XLA's, which reads the pieces."""
    p, (x, *rest) = node.params["problem"], node.inputs
    pieces = _pieces_of_norms(x, p)
    if not pieces or not wants("batchnorm_train", p, device):
        return False
    parts = [replace(_bare(batchnorm.inner(p)), shape=piece.shape) for piece in pieces]
    taken = [
        next((user for user in readers(v) if user.name == "jaxconv_batchnorm_moments" and user.call is None), None)
        for v in pieces
    ]
    known = [v for node in taken if node is not None for v in node.outputs]
    flags = tuple(node is not None for node in taken)
    by_xla = replace(p, algorithm=None, implementation=p.implementation or "xla")

    def call(x: Array, *args: Array) -> list[Array]:
        given, n = iter(args[len(parts) : len(parts) + len(known)]), len(parts)
        moments = [
            [next(given) for _ in range(3)] if flag else batchnorm.moments(part, piece)
            for flag, part, piece in zip(flags, parts, args[:n], strict=True)
        ]
        mean = jnp.concatenate([k + shift for k, shift, _ in moments])
        var = jnp.concatenate([var for _, _, var in moments])
        scale, bias, *more = args[n + len(known) :]
        return batchnorm.train_with(by_xla, x, scale, bias, *more[:2], mean, var, *more[2:])

    inputs = [x, *pieces, *known, *rest]
    program.splice([node], inputs, node.outputs, call, norm_of_pieces, p, tuple(parts), flags)
    return True


def pieces_again(program: Program, node: Node, device: _plan.Device) -> bool:
    """The backward pass concatenates again what the forward pass would have to keep. The barrier keeps XLA from taking
    both for one."""
    p, (x, dy, *rest) = node.params["problem"], node.inputs
    pieces = _pieces_of_norms(x, p)
    if not pieces or not wants("batchnorm_backward", p, device):
        return False

    def call(*args: Array) -> list[Array]:
        *late, dy = jax.lax.optimization_barrier((*args[: len(pieces)], args[len(pieces)]))
        x = jnp.concatenate(late, p.channel_axis)
        return batchnorm.backward(p, x, dy, *args[len(pieces) + 1 :])

    inputs = [*pieces, dy, *rest]
    if not program.fits([node], inputs, node.outputs):
        return False
    program.splice([node], inputs, node.outputs, call, pieces_again, p, len(pieces))
    return True


# ----------------------------------------------------------------------------------------------------------------------
# Batch-norms: what is around them


def _backward_of(norm: Node) -> Node | None:
    """The kernel that goes back through a batch-norm in training, where there is one, of all that may be wanted."""
    x, scale, bias, _, _, *residual = norm.inputs
    mean, rstd = norm.outputs[3:]
    for node in readers(rstd):
        if node.name != "jaxconv_batchnorm_backward":
            continue
        given = node.inputs[0], *node.inputs[2:6]
        same = all(a is b for a, b in zip(given, (x, scale, bias, mean, rstd), strict=True))
        if same and all(a is b for a, b in zip(node.inputs[6:], residual, strict=False)):
            return node
    return None


def _moments(p: BatchNormProblem, x: Array) -> tuple[Array, Array]:
    k, shift, var = batchnorm.moments(batchnorm.inner(p), x)
    return k + shift, var


def _running(p: BatchNormProblem, running_mean: Array, running_var: Array, mean: Array, var: Array) -> list[Array]:
    """The results of a batch-norm in training but for y."""
    m = p.momentum
    new = [m * running_mean + (1 - m) * mean, m * running_var + (1 - m) * var]
    return [*new, mean, jax.lax.rsqrt(var + p.epsilon)]


def norm_and_shortcut(program: Program, node: Node, device: _plan.Device) -> bool:
    """y = f(batch-norm of x + batch-norm of r): backward both are two walks, as one is."""
    p: BatchNormProblem = node.params["problem"]
    other = maker(node.inputs[5], "batchnorm_train") if p.residual else None
    if other is None or other is node or p.activation.residual is None or p.masked or p.batch is not None:
        return False
    q: BatchNormProblem = other.params["problem"]
    joined = node.inputs[5]
    plain = not q.residual and q.activation == Activation() and not q.masked
    if not plain or joined is not other.outputs[0] or (q.shape, q.channel_axis) != (p.shape, p.channel_axis):
        return False
    back, back_other = _backward_of(node), _backward_of(other)
    if back is None or back_other is None or not (back.params["problem"].want_dx and back.params["problem"].residual):
        return False
    dresidual = back.outputs[-1] if back.params["problem"].want_dresidual else None
    whole = dresidual is not None and back_other.params["problem"].want_dx and back_other.inputs[1] is dresidual
    if not whole or not read_by(dresidual, back_other) or not read_by(joined, node, back):
        return False
    both = batchnorm.shortcut_problem(p.dtype, p.shape, p.channel_axis, p.activation)
    if p.implementation or p.algorithm or not wants("batchnorm_shortcut", both, device):
        return False

    def forward(x, scale, bias, running_mean, running_var, r, scale_r, bias_r, running_mean_r, running_var_r):
        of_x = _running(p, running_mean, running_var, *_moments(_bare(p), x))
        of_r = _running(q, running_mean_r, running_var_r, *_moments(q, r))
        norm, norm_r = (x, scale, bias, *of_x[2:]), (r, scale_r, bias_r, *of_r[2:])
        return [reference.batchnorm_shortcut(both, *norm, *norm_r)[0], *of_x, *of_r]

    inputs = [*node.inputs[:5], *other.inputs]
    outputs = [*node.outputs, *other.outputs[1:]]
    (x, dy, *of_x), (r, _, *of_r) = back.inputs[:6], back_other.inputs
    late_inputs = [x, dy, *of_x, r, *of_r]
    late_outputs = [*back.outputs[:3], *back_other.outputs[:1], back_other.outputs[1], back_other.outputs[2]]
    fits = program.fits([back, back_other], late_inputs, late_outputs)
    if not fits or not _fits_without([other, node], joined, back, inputs, outputs, program):
        return False

    def backward(*args: Array) -> list[Array]:
        dscale, dbias, dscale_r, dx, dr = batchnorm.shortcut_backward(both, *args)
        return [dscale, dbias, dx, dscale_r, dbias, dr]

    program.splice([back, back_other], late_inputs, late_outputs, backward, norm_and_shortcut, "backward", both)
    program.splice([other, node], inputs, outputs, forward, norm_and_shortcut, p, q)
    return True


def _fits_without(
    dead: Sequence[Node], gone: Value, reader: Node, inputs: Sequence[Value], outputs: Sequence[Value], program: Program
) -> bool:
    """`Program.fits` of the dead nodes, as if `reader` did not read the value `gone`."""
    users = gone.users
    gone.users = [user for user in users if user is not reader]
    try:
        return program.fits(dead, inputs, outputs)
    finally:
        gone.users = users


def sums_in_dgrad(program: Program, node: Node, device: _plan.Device) -> bool:
    """A batch-norm, relu and a residual add, whose whole gradient is made in a dgrad: that goes back through the relu
    and sums up for the batch-norm, by bits that the forward pass writes."""
    p: BatchNormProblem = node.params["problem"]
    back = _backward_of(node) if p.residual and p.activation.name == "relu" and p.batch is None else None
    before = maker(node.inputs[0], "conv_fprop")
    if back is None or before is None or p.implementation or p.algorithm or p.masked or split_by_type(*node.inputs):
        return False
    q, of_conv = back.params["problem"], before.params["problem"]
    if not (q.want_dx and q.want_dresidual and q.residual) or not _statistics_leave(of_conv, _bare(p), device):
        return False
    dy = back.inputs[1]
    added = dy.node if dy.made_by in ("add_any", "add") and read_by(dy, back) else None
    for d, c in _added_dgrad(added) if added is not None else ():
        of_dgrad: ConvProblem = d.params["problem"]
        if not wants("conv_dgrad_sums", of_dgrad, device):
            continue
        x, scale = node.inputs[:2]
        late_inputs = [*d.inputs, c, x, scale, *node.outputs[3:]]
        late_outputs = back.outputs
        if not program.fits([d, added, back], late_inputs, late_outputs):
            continue
        if not program.fits([node], node.inputs, node.outputs):
            continue

        def forward(x, scale, bias, running_mean, running_var, residual):
            mean, var = _moments(_bare(p), x)
            y, signs = batchnorm.signs(replace(p, residual=True), x, scale, bias, mean, var, residual)
            return [y, *_running(p, running_mean, running_var, mean, var), signs]

        (signs,) = program.splice([node], node.inputs, node.outputs, forward, sums_in_dgrad, p)
        mean, rstd = (program.successor(v) for v in node.outputs[3:])

        def backward(dv, w, c, x, scale, mean, rstd, signs, of_dgrad=of_dgrad):
            dz, dscale, dbias = conv.dgrad_sums(of_dgrad, dv, w, c, signs, x, mean, rstd)
            sums = replace(p, count=p.reduced, want_dresidual=False, dz=True)
            dx = batchnorm.dx_of_sums(sums, x, dz, scale, jnp.zeros_like(scale), mean, rstd, dscale, dbias)
            return [dscale, dbias, dx, dz]

        late_inputs = [*d.inputs, c, x, scale, mean, rstd, signs]
        program.splice([d, added, back], late_inputs, late_outputs, backward, sums_in_dgrad, p, of_dgrad)
        return True
    return False


def norm_and_dgrad(program: Program, node: Node, device: _plan.Device) -> bool:
    """A batch-norm that only a convolution reads: its dgrad goes back through the norm's activation and sums up for
    it."""
    p: BatchNormProblem = node.params["problem"]
    x, dy, scale, bias, mean, rstd = node.inputs[:6]
    d = maker(dy, "conv_dgrad")
    plain = not (p.residual or p.want_dresidual or p.masked) and p.batch is None and p.want_dx and p.count is None
    chosen = p.implementation or p.algorithm
    if d is None or not plain or chosen or not read_by(dy, node) or split_by_type(*node.inputs):
        return False
    of_dgrad: ConvProblem = replace(d.params["problem"], activation=p.activation)
    if (of_dgrad.x_shape, of_dgrad.channel_axis) != (p.shape, p.channel_axis):
        return False
    if not wants("conv_norm_gradient", of_dgrad, device):
        return False
    inputs = [*d.inputs, x, scale, bias, mean, rstd]
    # XLA reads the pieces of a concatenation, a kernel would need it in memory.
    if _pieces_of_norms(x, p) or not program.fits([d, node], inputs, node.outputs):
        return False

    def call(dv: Array, w: Array, x: Array, scale: Array, bias: Array, mean: Array, rstd: Array) -> list[Array]:
        dz, dscale, dbias = conv.norm_gradient(of_dgrad, dv, w, x, scale, bias, mean, rstd)
        sums = replace(p, count=p.reduced, dz=True)
        return [dscale, dbias, batchnorm.dx_of_sums(sums, x, dz, scale, bias, mean, rstd, dscale, dbias)]

    program.splice([d, node], inputs, node.outputs, call, norm_and_dgrad, p, of_dgrad)
    return True


def _is_product(p: ConvProblem) -> bool:
    """A 1x1 of stride 1 without groups."""
    return p.pointwise and p.groups == 1 and set(p.stride) == {1}


def norm_and_convolution(program: Program, node: Node, device: _plan.Device) -> bool:
    """A batch-norm that only a convolution reads, which normalises what it loads."""
    p: BatchNormProblem = node.params["problem"]
    a = node.outputs[0]
    if p.residual or p.masked or p.batch is not None:
        return False
    after = [user for user in readers(a) if user.name == "jaxconv_conv_fprop" and user.inputs[0] is a]
    wgrads = [user for user in readers(a) if user.name == "jaxconv_conv_wgrad" and user.inputs[0] is a]
    if len(after) != 1 or len(wgrads) > 1 or not read_by(a, *after, *wgrads):
        return False
    (after,), wgrad = after, next(iter(wgrads), None)
    of_conv: ConvProblem = after.params["problem"]
    before = maker(node.inputs[0], "conv_fprop")
    of_before = before.params["problem"] if before is not None else None
    if of_conv.x_shape != p.shape or of_conv.channel_axis != p.channel_axis or _is_product(of_conv):
        return False
    if of_before is not None and (of_before.y_shape, of_before.channel_axis) != (p.shape, p.channel_axis):
        return False
    both = BatchNormConvProblem(p, of_conv, of_before)
    if wgrad is not None and wgrad.params["problem"] != of_conv:
        return False
    if not wants("batchnorm_conv", both, device):
        return False
    normalised = both.normalised
    back = _backward_of(node)
    d = maker(back.inputs[1], "conv_dgrad") if back is not None else None
    whole = d is not None and wgrad is not None and back.params["problem"].want_dx and read_by(d.outputs[0], back)
    whole = whole and d.inputs[0] is wgrad.inputs[1] and d.inputs[1] is after.inputs[1]

    def forward(x, scale, bias, running_mean, running_var, w):
        mean, var = _moments(p, x)
        y = conv_normalised.normalised(normalised, x, w, scale, bias, mean, var)
        return [y, *_running(p, running_mean, running_var, mean, var), var]

    dead = [node, after]
    inputs, outputs = [*node.inputs, after.inputs[1]], [*after.outputs, *node.outputs[1:]]
    fits = _fits_without(dead, a, wgrad, inputs, outputs, program) if wgrad else program.fits(dead, inputs, outputs)
    if not fits:
        return False
    if wgrad is not None:
        x, scale, bias, mean = *node.inputs[:3], node.outputs[3]
        late = [d, back, wgrad] if whole else [wgrad]
        dy, w = wgrad.inputs[1], after.inputs[1]
        late_inputs = [x, dy, w, scale, bias, mean]
        late_outputs = [*wgrad.outputs, *back.outputs] if whole else wgrad.outputs
        if not program.fits(late, late_inputs, late_outputs):
            return False
    (var,) = program.splice(dead, inputs, outputs, forward, norm_and_convolution, both)
    if wgrad is None:
        return True
    alone = replace(both, before=None)
    by_kernels = whole and wants("batchnorm_conv_backward", alone, device)

    def backward(x, dy, w, *v):
        if not whole:
            return [conv_normalised.normalised_wgrad(normalised, x, dy, *v)]
        run = conv_normalised.gradients_by_kernels if by_kernels else conv_normalised.gradients_by_parts
        return run(alone, x, dy, w, *v)

    late_inputs = [x, dy, w, scale, bias, program.successor(node.outputs[3]), var]
    program.splice(late, late_inputs, late_outputs, backward, norm_and_convolution, both, whole, by_kernels)
    return True


def norm_and_product(program: Program, node: Node, device: _plan.Device) -> bool:
    """A batch-norm that only a 1x1 convolution reads, which normalises what it loads; it comes behind the rules that
    take statistics, which those of x and of the result may be. What comes back to x stays as it is."""
    p: BatchNormProblem = node.params["problem"]
    a, train = node.outputs[0], node.name == "jaxconv_batchnorm_train"
    if p.residual or p.masked or p.batch is not None or p.implementation == "xla":
        return False
    names = "jaxconv_conv_fprop", "jaxconv_conv_statistics"
    made = [user for user in readers(a) if user.name in names and user.inputs[0] is a]
    wgrads = [user for user in readers(a) if user.name == "jaxconv_conv_wgrad" and user.inputs[0] is a]
    if len(made) != 1 or len(wgrads) > 1 or not read_by(a, *made, *wgrads):
        return False
    (after,), wgrad = made, next(iter(wgrads), None)
    of_conv: ConvProblem = after.params["problem"]
    if of_conv.x_shape != p.shape or of_conv.channel_axis != p.channel_axis or not _is_product(of_conv):
        return False
    if wgrad is not None and wgrad.params["problem"] != of_conv:
        return False
    normalised, both = NormalisedConvProblem.of(p, of_conv), BatchNormConvProblem(p, of_conv)
    statistics = after.name == "jaxconv_conv_statistics"
    kernel = conv_normalised.normalised_statistics if statistics else conv_normalised.normalised
    ops = kernel.name, *((conv_normalised.normalised_wgrad.name,) if wgrad is not None else ())
    if not all(wants(op, normalised, device) for op in ops) or (train and not wants("batchnorm_conv", both, device)):
        return False

    def convolved(x: Array, w: Array, *v: Array) -> list[Array]:
        outs = kernel(normalised, x, w, *v)
        return list(outs) if statistics else [outs]

    def forward(x: Array, scale: Array, bias: Array, *rest: Array) -> list[Array]:
        *given, w = rest
        if not train:
            return convolved(x, w, scale, bias, *given)
        mean, var = _moments(p, x)
        return [*convolved(x, w, scale, bias, mean, var), *_running(p, *given, mean, var), var]

    dead = [node, after]
    inputs, outputs = [*node.inputs, after.inputs[1]], [*after.outputs, *node.outputs[1:]]
    fits = _fits_without(dead, a, wgrad, inputs, outputs, program) if wgrad else program.fits(dead, inputs, outputs)
    x, scale, bias = node.inputs[:3]
    if wgrad is not None:
        known = node.outputs[3:4] if train else node.inputs[3:]
        fits = fits and program.fits([wgrad], [x, wgrad.inputs[1], scale, bias, *known], wgrad.outputs)
    if not fits:
        return False
    var = program.splice(dead, inputs, outputs, forward, norm_and_product, p, of_conv, train, statistics)
    if wgrad is None:
        return True

    def backward(x: Array, dy: Array, *v: Array) -> list[Array]:
        return [conv_normalised.normalised_wgrad(normalised, x, dy, *v)]

    late_inputs = [x, wgrad.inputs[1], scale, bias, *(program.successor(v) for v in known), *var]
    program.splice([wgrad], late_inputs, wgrad.outputs, backward, norm_and_product, "backward", normalised)
    return True


def _is_call(node: Node | None, device: _plan.Device) -> bool:
    """Whether the node is a kernel, or a convolution of XLA's, which takes no operation in front of it or behind it."""
    if node is None or node.call is not None or "problem" not in node.params:
        return False
    op, p = node.name.removeprefix("jaxconv_"), node.params["problem"]
    convolves = op in ("conv_fprop", "conv_dgrad", "conv_wgrad") or (
        op == "conv" and p.activation.name in conv.BY_CUDNN
    )
    return op in _plan.OPS and (convolves or wants(op, p, device))


def norm_between_calls(program: Program, node: Node, device: _plan.Device) -> bool:
    """A batch-norm without activation or residual, whose neighbours are calls: XLA can fuse it with nothing. So each of
    its passes is what was measured alone."""
    p: BatchNormProblem = node.params["problem"]
    bare = p.activation == Activation() and not p.residual and not p.masked and not p.apart
    if not bare or p.implementation or p.algorithm:
        return False
    x, y = node.inputs[0], node.outputs[0]
    after = readers(y)
    if not after or not read_by(y, *after) or not all(_is_call(one, device) for one in (x.node, *after)):
        return False
    back = _backward_of(node)
    if back is not None and not (_is_call(back.inputs[1].node, device) and read_by(back.inputs[1], back)):
        return False
    passes = [(node, batchnorm.train), *([(back, batchnorm.backward)] if back is not None else [])]
    made = [(one, op, replace(one.params["problem"], apart=True)) for one, op in passes]
    made = [(one, op, q) for one, op, q in made if not one.params["problem"].apart and wants(op.name, q, device)]
    for one, op, q in reversed(made):
        program.splice([one], one.inputs, one.outputs, functools.partial(op, q), norm_between_calls, op.name, q)
    return bool(made)


def norm_and_add(program: Program, node: Node, device: _plan.Device) -> bool:
    """A batch-norm's dx and another gradient, as when its input is a block's sum: the second walk over x adds it."""
    if len(node.inputs) != 2 or split_by_type(*node.inputs):
        return False
    for v, c in (tuple(node.inputs), tuple(node.inputs[::-1])):
        back = maker(v, "batchnorm_backward")
        if back is None or v is c or not read_by(v, node) or (c.shape, c.dtype) != (v.shape, v.dtype):
            continue
        p: BatchNormProblem = back.params["problem"]
        if p.residual or p.want_dresidual or not p.want_dx or not wants("batchnorm_backward_add", p, device):
            continue
        inputs, outputs = [*back.inputs, c], [*back.outputs[:2], *node.outputs]
        if program.fits([back, node], inputs, outputs):
            call = functools.partial(batchnorm.backward_add, p)
            program.splice([back, node], inputs, outputs, call, norm_and_add, p)
            return True
    return False


# ----------------------------------------------------------------------------------------------------------------------
# A bias' gradient: what a norm of each channel alone sends back sums up to zero in the channel, but for rounding; what
# a max-pooling sends back sums up to what it was given


def _terms(v: Value) -> list[Value]:
    """What v is the sum of."""
    if v.made_by == "add_any" and v.node.call is None:
        return [term for u in v.node.inputs for term in _terms(u)]
    return [v]


def _sums_up_to_zero(v: Value, axes: Sequence[int]) -> bool:
    """Whether v is the dx of a norm by statistics of each channel alone: of the batch, or of each image."""
    batch, image = maker(v, "batchnorm_backward"), maker(v, "groupnorm_backward")
    back = batch or image
    if back is None or v not in back.outputs[2:3]:
        return False
    p = back.params["problem"]
    if not p.want_dx or p.batch is not None or (image is not None and (p.rows or p.groups != p.channels)):
        return False
    axis = len(v.shape) - 1 if image is not None else p.channel_axis
    return tuple(axes) == tuple(a for a in range(len(v.shape)) if a != axis)


def _summed(node: Node) -> Value:
    """What a sum is taken of, before it is of more digits."""
    (source,) = node.inputs
    if source.made_by != "convert_element_type":
        return source
    before = source.node.inputs[0]
    if not all(jnp.issubdtype(v.dtype, jnp.floating) for v in (before, source)):
        return source
    return before if jnp.finfo(before.dtype).bits < jnp.finfo(source.dtype).bits else source


def sum_behind_norm(program: Program, node: Node, device: _plan.Device) -> bool:
    """The sum over all but the channels of what such a norm sends back, or of that and one array more."""
    axes, v = node.params["axes"], _summed(node)
    if not jnp.issubdtype(v.dtype, jnp.floating) or split_by_type(v):
        return False
    terms = _terms(v)
    rest = [term for term in terms if not _sums_up_to_zero(term, axes)]
    if len(rest) == len(terms) or len(rest) > 1:
        return False
    dtype, shape = node.outputs[0].dtype, node.outputs[0].shape

    def call(*rest: Array) -> list[Array]:
        return [jnp.sum(rest[0], axes, dtype) if rest else jnp.zeros(shape, dtype)]

    program.splice([node], rest, node.outputs, call, sum_behind_norm, tuple(axes), dtype, shape)
    return True


def _sends_all_back(p: PoolProblem) -> bool:
    """Whether each element of dy goes to one of dx, of any x without NaN: the first tap of each window is in the image.

    A window of minus infinities that begins in the padding sends its element there.
    """
    axes = zip(p.padding, p.out_spatial, p.stride, p.in_spatial, strict=True)
    return all(low == 0 and (out - 1) * stride < extent for (low, _), out, stride, extent in axes)


def sum_behind_pooling(program: Program, node: Node, device: _plan.Device) -> bool:
    """The sum over all but the channels of a max-pooling's dx is that of dy, which has fewer elements."""
    axes, v = node.params["axes"], _summed(node)
    back = maker(v, "max_pool_backward")
    if back is None or split_by_type(v):
        return False
    p: PoolProblem = back.params["problem"]
    channel = p.nd + 1 if p.channels_last else 1
    if tuple(axes) != tuple(a for a in range(p.nd + 2) if a != channel) or not _sends_all_back(p):
        return False
    dtype = node.outputs[0].dtype

    def call(dy: Array) -> list[Array]:
        return [jnp.sum(dy, axes, dtype)]

    program.splice([node], [back.inputs[2]], node.outputs, call, sum_behind_pooling, tuple(axes), dtype)
    return True


# ----------------------------------------------------------------------------------------------------------------------
# dz = (dy @ w) * f'(kept) and its sum over the rows, a dense layer's bias' gradient, are one kernel; of convolutions
# dz = dgrad(dy, w) * f'(kept) [+ c] and its sum over images and pixels


def product_and_activation(program: Program, node: Node, device: _plan.Device) -> bool:
    product = maker(node.inputs[1], "matmul")
    p = product.params["problem"] if product is not None else None
    f: Activation = node.params["problem"].activation
    if p is None or p.batch is not None or p.trans_x or f.residual is None:
        return False
    both = replace(p, activation=f)
    return _with_derivative(program, product, node, (0,), "dense_gradient", dense.dense_gradient, both, device)


def product_and_gate(program: Program, node: Node, device: _plan.Device) -> bool:
    """The same of a gate: dz has both halves."""
    product, gate = maker(node.inputs[1], "matmul"), node.params["problem"]
    p = product.params["problem"] if product is not None else None
    if p is None or p.batch is not None or p.trans_x or len(gate.shape) != 2:
        return False
    both = GatedGradientProblem.of(p, gate.activation, gate.first)
    kernel = gated.dense_gated_gradient
    return _with_derivative(program, product, node, (0,), "dense_gated_gradient", kernel, both, device)


def _pixels(p: ConvProblem) -> tuple[int, ...]:
    """All axes but the channels."""
    return tuple(axis for axis in range(p.nd + 2) if axis != p.channel_axis)


def dgrad_and_activation(program: Program, node: Node, device: _plan.Device) -> bool:
    d = maker(node.inputs[1], "conv_dgrad")
    if d is None or split_by_type(*node.inputs):
        return False
    p: ConvProblem = d.params["problem"]
    f: Activation = node.params["problem"].activation
    if f.residual is None:
        return False
    both = replace(p, activation=f)
    return _with_derivative(program, d, node, _pixels(p), "conv_gradient", conv.gradient, both, device)


def dgrad_and_relu(program: Program, node: Node, device: _plan.Device) -> bool:
    """The gradient of a relu that is behind no layer: [x > 0] * dgrad, a choice. Where XLA would make it in a pass with
    other operations, that pass would stay."""
    which, zero, dh = node.inputs if len(node.inputs) == 3 else (None, None, None)
    d = maker(dh, "conv_dgrad") if dh is not None else None
    if d is None or which.made_by != "gt" or number_of(scalar_of(zero)) != 0 or split_by_type(*node.inputs):
        return False
    x, bound = which.node.inputs
    if number_of(scalar_of(bound)) != 0 or (x.shape, x.dtype) != (dh.shape, dh.dtype):
        return False
    (dz,) = node.outputs
    p: ConvProblem = replace(d.params["problem"], activation=Activation("relu"))
    after = readers(dz)
    adds = len(after) == 1 and after[0].name in ("add_any", "add") and wants("conv_gradient_add", p, device)
    sums = [steps[0] for steps in _sums_of(dz, *_pixels(p))]
    if not adds and not all(user in sums or user.name.removeprefix("jaxconv_") in _plan.OPS for user in after):
        return False

    def call(x: Array, dh: Array) -> list[Array]:
        return [layer.activation_gradient(p.activation, x, dh)]

    if not read_by(dh, node) or not wants("conv_gradient", p, device):
        return False
    program.splice([node], [x, dh], [dz], call, dgrad_and_relu, p)
    return True


def gradient_and_add(program: Program, node: Node, device: _plan.Device) -> bool:
    """A dgrad through an activation and another gradient, as when a block adds its input to what it makes of its
    activation."""
    if len(node.inputs) != 2 or split_by_type(*node.inputs):
        return False
    for v, c in (tuple(node.inputs), tuple(node.inputs[::-1])):
        back = maker(v, "conv_gradient")
        if back is None or v is not back.outputs[0] or back.outputs[1].users or not read_by(v, node):
            continue
        p: ConvProblem = back.params["problem"]
        if (c.shape, c.dtype) != (v.shape, v.dtype) or v is c or not wants("conv_gradient_add", p, device):
            continue
        (total,) = node.outputs
        sums = next(_sums_of(total, *_pixels(p)), [])
        dead, inputs = [back, node, *sums], [*back.inputs, c]
        outputs = [total, *(sums[-1].outputs if sums else ())]
        count = len(outputs)

        def call(*args: Array, p: ConvProblem = p, count: int = count) -> list[Array]:
            return list(conv.gradient_add(p, *args))[:count]

        if program.fits(dead, inputs, outputs):
            program.splice(dead, inputs, outputs, call, gradient_and_add, p, count)
            return True
    return False


def _with_derivative(
    program: Program,
    linear: Node,  # makes what the activation's gradient is given
    node: Node,  # the activation's gradient, or the gate's
    axes: tuple[int, ...],  # that a bias' gradient is summed over
    op: str,
    kernel: Callable[..., Sequence[Array]],
    both: Any,  # linear's problem, with the activation
    device: _plan.Device,
) -> bool:
    """`op` in the place of both nodes, and of the sum where there is one."""
    kept, dh = node.inputs
    if not read_by(dh, node) or not wants(op, both, device):
        return False
    (dz,) = node.outputs
    sums = next(_sums_of(dz, *axes), [])
    inputs, outputs = [*linear.inputs, kept], [dz, *(sums[-1].outputs if sums else ())]
    dead = [linear, node, *sums]
    if not program.fits(dead, inputs, outputs):
        return False
    count = len(outputs)

    def call(*args: Array) -> list[Array]:
        return list(kernel(both, *args))[:count]

    program.splice(dead, inputs, outputs, call, op, both, count)
    return True


# ----------------------------------------------------------------------------------------------------------------------
# y = a * f(g), of the halves of a dense layer's result: one kernel, which writes that result too if somebody reads it


def _layer(v: Value) -> tuple[Node, DenseProblem] | None:
    """What makes v as a dense layer without activation, rows of x by w: that or a convolution of each pixel."""
    node = maker(v, "matmul") or maker(v, "dense")
    if node is not None:
        p: DenseProblem = node.params["problem"]
        plain = p.activation.name == "none" and not (p.save_preactivation or p.addend or p.trans_x)
        return (node, p) if plain and p.batch is None and p.bias in (None, "column") else None
    node = maker(v, "conv_fprop") or maker(v, "conv")
    if node is None:
        return None
    q: ConvProblem = node.params["problem"]
    plain = q.activation.name == "none" and not q.save_preactivation and q.algorithm is None and q.groups == 1
    return (node, q.pixel_product()) if plain and q.pointwise and q.channels_last else None


def layer_and_gate(program: Program, node: Node, device: _plan.Device) -> bool:
    gate, v = node.params["problem"], node.inputs[0]
    seen = [v]  # the layer's result as rows, images, ..., from the gate back to the layer
    while v.made_by == "reshape" and v.node.call is None and v.node.params["dimensions"] is None:
        v = v.node.inputs[0]
        if not v.shape or v.shape[-1] != gate.shape[-1]:
            return False
        seen.append(v)
    found = _layer(v)
    if found is None or (split_by_type(v) and len(seen[0].shape) != 2):
        return False
    layer, p = found
    pixels = v.shape[:-1] if len(v.shape) != 2 else None
    dead = [layer, *(u.node for u in seen[-2::-1]), node]
    read = any(user not in dead for u in seen for user in u.users)
    both = GatedProblem.of(p, gate.activation, gate.first, read, pixels)
    if not wants("dense_gated", both, device):
        return False
    shapes = tuple(u.shape for u in seen) if read else ()
    inputs, outputs = list(layer.inputs), [*node.outputs, *(seen if read else ())]
    if not program.fits(dead, inputs, outputs):
        return False

    def call(x: Array, w: Array, *b: Array) -> list[Array]:
        y, *z = gated.dense_gated(both, x, w.reshape(p.w_shape), *b)
        return [y.reshape(gate.y_shape), *(z[0].reshape(shape) for shape in shapes)]

    program.splice(dead, inputs, outputs, call, layer_and_gate, both, gate, shapes)
    return True


def dgrad_and_sum(program: Program, node: Node, device: _plan.Device) -> bool:
    """A dgrad whose result is also summed up, as where the convolution in front has a bias and no activation. What the
    weight gradient reads stands for what an activation's derivative would be of."""
    dy, w = node.inputs
    (dx,) = node.outputs
    p: ConvProblem = node.params["problem"]
    sums = next(_sums_of(dx, *_pixels(p)), None)
    if sums is None or split_by_type(dx, *node.inputs) or not wants("conv_gradient", p, device):
        return False
    wgrads = (user for user in readers(dy) if user.name == "jaxconv_conv_wgrad" and user.inputs[1] is dy)
    x = next((user.inputs[0] for user in wgrads if user.inputs[0].aval == dx.aval), None)
    dead = [node, *sums]
    if x is None or not program.fits(dead, [dy, w, x], [dx, *sums[-1].outputs]):
        return False
    call = functools.partial(conv.gradient, p)
    program.splice(dead, [dy, w, x], [dx, *sums[-1].outputs], call, dgrad_and_sum, p)
    return True


# ----------------------------------------------------------------------------------------------------------------------
# A max-pooling behind a convolution that nobody else reads


def convolution_and_pooling(program: Program, node: Node, device: _plan.Device) -> bool:
    (x,), q = node.inputs, node.params["problem"]
    before = maker(x, "conv") or maker(x, "conv_fprop")
    forced = q.implementation is not None or q.algorithm is not None
    if before is None or q.save or forced or split_by_type(*before.inputs):
        return False
    p: ConvProblem = before.params["problem"]
    if p.save_preactivation or p.channels_last != q.channels_last:
        return False
    both = PooledConvProblem.of(p, q)
    if not wants("conv_pooled", both, device) or not program.fits([before, node], before.inputs, node.outputs):
        return False

    def call(*args: Array) -> list[Array]:
        return [conv_pooled.kernel(both, *args)]

    program.splice([before, node], before.inputs, node.outputs, call, convolution_and_pooling, both)
    return True


def _with_conversion(
    program: Program,
    nodes: Sequence[Node],
    inputs: Sequence[Value],
    both: PooledConvProblem,
    device: _plan.Device,
) -> bool:
    """Puts a pooled convolution in the place of `nodes`, which are one and a conversion in front or behind."""
    outputs = nodes[-1].outputs
    if split_by_type(*inputs) or not wants("conv_pooled", both, device) or not program.fits(nodes, inputs, outputs):
        return False
    program.splice(nodes, inputs, outputs, lambda *args: [conv_pooled.kernel(both, *args)], _with_conversion, both)
    return True


def pooled_from_float32(program: Program, node: Node, device: _plan.Device) -> bool:
    x, *rest = node.inputs
    if x.made_by != "convert_element_type" or x.node.inputs[0].dtype != jnp.float32:
        return False
    both = replace(node.params["problem"], x_dtype="float32")
    return _with_conversion(program, [x.node, node], [x.node.inputs[0], *rest], both, device)


def _factor_to_8_bits(node: Node) -> float | None:
    """The factor of a node that makes 8-bit integers as `reference.stored` does; None where it is another function."""
    if node.name != "custom_jvp_call" or len(node.inputs) != 1 or node.outputs[0].dtype.name not in ("int8", "uint8"):
        return None
    closed, aval, dtype = node.params["call_jaxpr"], node.inputs[0].aval, node.outputs[0].dtype.name
    factors = [
        v.val for eqn in closed.jaxpr.eqns if eqn.primitive.name == "mul" for v in eqn.invars if isinstance(v, Literal)
    ]
    if len(factors) != 1:
        return None
    like = jax.make_jaxpr(lambda x: reference.stored(x, factors[0], dtype))(aval)
    return float(factors[0]) if str(like) == str(closed) else None


def pooled_to_8_bits(program: Program, node: Node, device: _plan.Device) -> bool:
    (y,) = node.outputs
    behind = readers(y)
    factor = _factor_to_8_bits(behind[0]) if len(behind) == 1 else None
    if factor is None or not 0 < factor < math.inf:
        return False
    both = replace(node.params["problem"], y_dtype=behind[0].outputs[0].dtype.name, y_scale=factor)
    return _with_conversion(program, [node, behind[0]], node.inputs, both, device)


# ----------------------------------------------------------------------------------------------------------------------
# Two convolutions whose results are added


def convolution_and_shortcut(program: Program, node: Node, device: _plan.Device) -> bool:
    """A convolution that adds the result of another one, of which either has one tap: a block's last one and its
    shortcut. An activation stands behind the sum alone."""
    p: ConvProblem = node.params["problem"]
    before = maker(node.inputs[-1], "conv") or maker(node.inputs[-1], "conv_fprop")
    if p.save_preactivation or before is None or split_by_type(*node.inputs, *before.inputs):
        return False
    q: ConvProblem = before.params["problem"]
    forced = any(one.implementation is not None or one.algorithm is not None for one in (p, q))
    if forced or q.save_preactivation or q.activation.name != "none" or p.channels_last != q.channels_last:
        return False
    inputs, outputs, count = [*node.inputs[:-1], *before.inputs], node.outputs, len(node.inputs) - 1
    for main, shortcut, swapped in ((p, q, False), (q, p, True)):
        if not shortcut.projects or main.groups > 1:
            continue
        both = ShortcutConvProblem.of(replace(main, bias=p.bias or q.bias, activation=p.activation), shortcut)
        if not wants("conv_shortcut", both, device) or not program.fits([before, node], inputs, outputs):
            continue

        def call(*args: Array, both: ShortcutConvProblem = both, swapped: bool = swapped) -> list[Array]:
            (x, w, *b), (x2, w2, *b2) = args[:count], args[count:]
            biases = [functools.reduce(jnp.add, [*b, *b2])] if b or b2 else []
            operands = (x2, w2, *biases, x, w) if swapped else (x, w, *biases, x2, w2)
            return [conv_shortcut.kernel(both, *operands)]

        program.splice([before, node], inputs, outputs, call, convolution_and_shortcut, p, q, both, swapped)
        return True
    return False


# A rule that takes in more stands before one that takes in less.
RULES = (
    Rule("two batch-norms of a residual block", ("jaxconv_batchnorm_train",), norm_and_shortcut),
    Rule("a convolution that normalises its input", ("jaxconv_batchnorm_train",), norm_and_convolution),
    Rule("a batch-norm between calls", ("jaxconv_batchnorm_train",), norm_between_calls),
    Rule("a concatenation's statistics", ("jaxconv_batchnorm_train",), norm_of_pieces),
    Rule("a concatenation that is made again", ("jaxconv_batchnorm_backward",), pieces_again),
    Rule("a dgrad that takes a batch-norm's sums", ("jaxconv_batchnorm_train",), sums_in_dgrad),
    Rule("a convolution that takes its batch-norm's statistics", ("jaxconv_batchnorm_train",), convolution_and_norm),
    Rule("a convolution that takes its result's statistics", ("jaxconv_batchnorm_moments",), convolution_and_moments),
    Rule("a 1x1 that normalises its input", ("jaxconv_batchnorm_train", "jaxconv_batchnorm_infer"), norm_and_product),
    Rule("a bias' gradient from a norm's sums", ("reduce_sum",), sum_behind_norm),
    Rule("a bias' gradient from a pooling's", ("reduce_sum",), sum_behind_pooling),
    Rule("a dgrad that adds another gradient", ("add_any", "add"), dgrad_and_add),
    Rule("a batch-norm that adds another gradient", ("add_any", "add"), norm_and_add),
    Rule("a dgrad that goes back through a batch-norm", ("jaxconv_batchnorm_backward",), norm_and_dgrad),
    Rule("a product that applies an activation's derivative", ("jaxconv_activation_gradient",), product_and_activation),
    Rule("a relu's derivative behind a dgrad", ("select_n",), dgrad_and_relu),
    Rule("a dgrad that applies an activation's derivative", ("jaxconv_activation_gradient",), dgrad_and_activation),
    Rule("a product that applies a gate's derivative", ("jaxconv_gate_gradient",), product_and_gate),
    Rule("a dense layer that multiplies its halves", ("jaxconv_gate",), layer_and_gate),
    Rule("a dgrad through an activation that adds another gradient", ("add_any", "add"), gradient_and_add),
    Rule("a dgrad that takes a bias' gradient", ("jaxconv_conv_dgrad",), dgrad_and_sum),
    Rule("a convolution that takes its pooling's maxima", ("jaxconv_max_pool",), convolution_and_pooling),
    Rule("a convolution that adds its shortcut's sums", ("jaxconv_conv_add",), convolution_and_shortcut),
    Rule("a pooled convolution that reads float32", ("jaxconv_conv_pooled",), pooled_from_float32),
    Rule("a pooled convolution that makes 8 bits", ("jaxconv_conv_pooled",), pooled_to_8_bits),
)

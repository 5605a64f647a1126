"""What a forward pass hands over, against every other choice, and how a program is rewritten."""

from __future__ import annotations

import itertools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import H200, normal
from jax.core import ShapedArray
from jax.extend.core import jaxpr_as_fun

import jaxconv
from jaxconv import _plan
from jaxconv._core.activations import Activation
from jaxconv._core.graph import Node, Value
from jaxconv._ops.gated import gate_of
from jaxconv.joints.cut import fewest_bytes, size_of
from jaxconv.joints.joint import Joint
from jaxconv.joints.program import Program

# ----------------------------------------------------------------------------------------------------------------------
# The minimum cut


def random_graph(seed: int) -> tuple[list[Node], list[Value], list[Value]]:
    """(nodes, inputs, what is read): products cannot be made again, nor can what has a name."""
    rng = np.random.default_rng(seed)

    def value(node: Node | None = None, index: int = 0) -> Value:
        labels = ["kept"] if node is not None and rng.random() < 0.1 else []
        return Value(ShapedArray((int(rng.integers(1, 9)),), np.dtype("float32")), node, index, labels=labels)

    inputs = [value() for _ in range(rng.integers(1, 4))]
    values, nodes = list(inputs), []
    for i in range(rng.integers(3, 10)):
        name = str(rng.choice(["mul", "tanh", "add", "dot_general"], p=[0.3, 0.3, 0.2, 0.2]))
        given = [values[j] for j in rng.integers(0, len(values), 1 if name == "tanh" else 2)]
        node = Node(i, given, [], types.SimpleNamespace(primitive=types.SimpleNamespace(name=name)), None)
        node.outputs = [value(node, j) for j in range(2 if name == "dot_general" and rng.random() < 0.3 else 1)]
        values += node.outputs
        nodes.append(node)
    read = rng.choice(len(values), min(len(values), int(rng.integers(1, 5))), replace=False)
    return nodes, inputs, [values[i] for i in read]


def made_again(nodes: list[Node], there: set[Value]) -> set[Value]:
    """What elementwise operations make of what is there."""
    there = set(there)
    for node in nodes:
        if node.name != "dot_general" and there.issuperset(node.inputs):
            there.update(v for v in node.outputs if not v.labels)
    return there


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_nothing_smaller_is_enough(first):
    for seed in range(first, first + 100):
        nodes, inputs, read = random_graph(seed)
        kept, again = fewest_bytes(nodes, inputs, read)
        assert made_again(nodes, {*inputs, *kept}).issuperset(read)
        # What is made again is elementwise, and made of what is kept and of nothing else, not even of other inputs.
        assert made_again([node for node in nodes if node in again], set(kept)).issuperset(read)
        made = [v for node in nodes for v in node.outputs]
        costs = [
            sum(1 + size_of(v) for v in chosen)
            for n in range(len(made) + 1)
            for chosen in itertools.combinations(made, n)
            if n <= 4 and made_again(nodes, {*inputs, *chosen}).issuperset(read)
        ]
        assert sum(1 + size_of(v) for v in kept if v not in inputs) == min(costs), seed


def test_bytes():
    assert size_of(Value(ShapedArray((3, 5), np.dtype("float64")))) == 120
    (n,) = jax.export.symbolic_shape("n")
    assert size_of(Value(ShapedArray((n, 5), jnp.dtype("bfloat16")))) == 10


def joint(f: Any, *args: jax.Array) -> Joint:
    made = Joint.make(jax.make_jaxpr(f)(*args), (True,) * len(args), [jax.typeof(a) for a in args], H200)
    assert made is not None
    return made


def test_elementwise_chains_are_made_again_of_the_smallest():
    x, w = jnp.ones((64, 4)), jnp.ones((4, 32))

    def chain(x, w):
        h = jnp.tanh(jnp.exp(x)) * 3
        return [jnp.exp(h) @ w + jnp.exp(h).astype("bfloat16").sum()]

    def kept(f: Any) -> list[Value]:
        made = joint(f, x, w)
        return [v for v in made.kept if v not in made.program.inputs]

    assert kept(chain) == []  # all of x again
    assert sum(map(size_of, kept(lambda x, w: [jnp.tanh(y := x @ w) * jnp.exp(y) + y * y]))) == 64 * 32 * 4  # y alone
    # Of 16 bits, which hold less than the product that they are rounded from
    rounded = kept(lambda x, w: [jnp.tanh((x @ w).astype("bfloat16"))])
    assert sum(map(size_of, rounded)) == 64 * 32 * 2
    # A gate is elementwise too: its halves alone, also in an accelerated program, whose gate has a name.
    gated = kept(lambda x, w: [gate_of(x @ w, Activation("silu")) @ jnp.ones((16, 8))])
    assert sum(map(size_of, gated)) == 64 * 32 * 4
    f = jaxconv.accelerate(lambda x, w: jax.nn.glu(x @ w) @ jnp.ones((16, 8)))
    backward = jax.tree.leaves(jax.vjp(f, x, w)[1])
    assert sorted(a.shape for a in backward if a.shape[0] == 64) == [(64, 4), (64, 32)]


def test_the_forward_pass_makes_nothing_that_is_not_read():
    made = joint(lambda x: [jnp.tanh(x).sum()], jnp.ones(8))
    assert [node.name for node in made.early] == ["tanh", "reduce_sum"]
    assert made.kept == made.program.inputs[:1] and "tanh" in [node.name for node in made.late]


def test_programs_have_no_joint_where_nothing_has_a_gradient():
    closed = jax.make_jaxpr(lambda x, i: [i + 1, jnp.argmax(x)])(jnp.ones(3), 1)
    assert Joint.make(closed, (True, False), closed.in_avals, _plan.Device("cpu", "cpu")) is None


# ----------------------------------------------------------------------------------------------------------------------
# Rewriting


def program(f: Any, *args: Any) -> Program:
    return Program(jax.make_jaxpr(f)(*args))


def node_of(p: Program, name: str) -> Node:
    return next(node for node in p.nodes if node.name == name)


X = jnp.asarray(normal(0, (5,)), "float32")


def test_what_is_spliced_takes_the_others_place():
    p = program(lambda x: (jnp.sin(x) * 2 + 1, jnp.exp(x)), X)
    sin, mul = node_of(p, "sin"), node_of(p, "mul")
    (x,), (y,) = sin.inputs, mul.outputs
    y.labels.append("a name")
    assert p.fits([sin, mul], [x], [y])
    (other,) = p.splice([sin, mul], [x], [y], lambda x: [jnp.cos(x), jnp.tanh(x)])
    p.settle()
    assert sin.dead and mul.dead and p.successor(y).made_by == "cos" and p.successor(y).labels == ["a name"]
    assert other.made_by == "tanh" and "tanh" not in [node.name for node in p.nodes]  # nobody needs it
    np.testing.assert_array_equal(p.run(X), [jnp.cos(X) + 1, jnp.exp(X)])


def test_what_does_not_fit():
    p = program(lambda x: (jnp.tanh(x) * 2, jnp.tanh(x) + 1), X)
    tanh, mul = node_of(p, "tanh"), node_of(p, "mul")
    assert not p.fits([tanh, mul], tanh.inputs, mul.outputs)  # somebody else reads the tangent
    assert p.fits([tanh, mul], tanh.inputs, [*tanh.outputs, *mul.outputs])
    q = program(lambda x: jnp.exp(jnp.tanh(x)) * jnp.sqrt(x), X)
    tanh, exp, mul = (node_of(q, name) for name in ("tanh", "exp", "mul"))
    # One of the inputs is made of one of the outputs
    assert not q.fits([tanh, mul], [*tanh.inputs, *exp.outputs], [*tanh.outputs, *mul.outputs])
    assert not q.fits([tanh], tanh.outputs, tanh.outputs)
    r = program(lambda x: (jnp.tanh(x), jnp.tanh(x) * 2), X)
    assert not r.fits([node_of(r, "tanh"), node_of(r, "mul")], r.inputs, node_of(r, "mul").outputs)  # it is a result


def test_what_was_dropped_is_made_anew():
    """An operation that a rewritten program needed no more, and that something spliced in needs again."""
    p = program(lambda x: jnp.tanh(jnp.exp(x)), X)
    tanh = node_of(p, "tanh")
    p.splice([tanh], p.inputs, tanh.outputs, lambda x: [jnp.cos(x)])
    p.settle()
    assert [node.name for node in p.nodes] == ["cos"]
    cos = node_of(p, "cos")
    p.splice([cos], p.inputs, cos.outputs, lambda x: [jnp.log1p(jnp.exp(x))])
    p.settle()
    np.testing.assert_array_equal(p.run(X)[0], jnp.log1p(jnp.exp(X)))


def test_values_that_are_equal_are_one():
    p = program(lambda x, y: [jnp.tanh(x) + y, jnp.tanh(x) * y], X, X)
    assert [node.name for node in p.nodes].count("tanh") == 1


def test_names_are_given_where_values_are_made():
    named = jax.ad_checkpoint.checkpoint_name
    p = program(lambda x: named(jnp.tanh(x), "mine") + named(x, "an input"), X)
    found = jax.make_jaxpr(p.run)(X)
    assert [e.params["name"] for e in found.jaxpr.eqns if e.primitive.name == "name"] == ["mine", "an input"]
    np.testing.assert_array_equal(jaxpr_as_fun(found)(X)[0], jnp.tanh(X) + X)

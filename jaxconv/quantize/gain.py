"""Which layers lose time by 8 bits, behind a depthwise convolution.

A depthwise convolution writes the model's type. An 8-bit layer behind it needs a pass over its input that makes 8 bits.
The layer reads fewer bytes and multiplies faster, which may be less. The rates are an H200's.
"""

from __future__ import annotations

import math

from jaxconv._core.graph import Node, Value
from jaxconv._plan import model
from jaxconv.quantize.layers import Layer, Reading
from jaxconv.quantize.program import Narrowing, is_averaged, is_moving

H200 = model.NUMBERS["H200"]  # layers are chosen before anybody knows the device
EIGHT_BITS = 1.7  # convolutions of 8 bits reach so many times the rate of those of 16


def leave_wide_what_loses(reading: Reading) -> None:
    """Says of layers behind a depthwise convolution why they stay wide, if they do, and of layers behind these."""
    wide = {layer.node for layer in reading.layers if layer.is_depthwise}
    while wide:
        narrowing = Narrowing(reading)
        behind = [layer for layer in narrowing.layers.values() if _maker(layer.x) in wide]
        losing = [layer for layer in behind if _loses(layer, narrowing)]
        if not losing:
            return
        for layer in losing:
            layer.why = "8 bits would cost a pass over its input, behind a depthwise convolution, and gain less"
            wide.add(layer.node)


def _maker(v: Value) -> Node | None:
    """The node whose result v has the elements of."""
    while v.node is not None and is_moving(v.node):
        v = v.node.inputs[0]
    return v.node


def _loses(layer: Layer, narrowing: Narrowing) -> bool:
    """By times an element of x, so that no batch has another answer. The unit is the time of a byte."""
    p, size = layer.problem, layer.x.dtype.itemsize
    x = math.prod(layer.x.shape)
    y, flops = math.prod(layer.y.shape) / x, p.flops / x
    rate = H200.half if size == 2 else H200.highest if p.full_float32 else H200.tf32
    source = narrowing.source(layer.x)
    readers = sum(narrowing.source(other.x) is source for other in narrowing.layers.values())
    size_of_y = 1 if narrowing.is_wanted(layer.y) or is_averaged(layer.y) else size
    wide = max(flops * H200.bandwidth / rate, size * (1 + y))
    eight = max(flops * H200.bandwidth / (EIGHT_BITS * H200.half), 1 + size_of_y * y)
    made = (size + 1) / readers  # the pass: each of the layers that read its result has a part of it
    return eight + made >= wide

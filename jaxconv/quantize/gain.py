"""Which layers lose time by 8 bits, behind a depthwise convolution.

A depthwise convolution writes the model's type. An 8-bit layer behind it needs a pass over its input that makes 8 bits.
The layer reads fewer bytes and multiplies faster, which may be less. The arithmetic is that of a Hopper GPU.
"""

from __future__ import annotations

import math

from jaxconv._core.graph import Node, Value
from jaxconv._problem import is_number
from jaxconv.quantize.layers import CONVOLUTIONS, Layer, Reading
from jaxconv.quantize.program import Narrowing, is_averaged, is_moving

# Products of the tensor cores in the time of a byte that memory moves, by the bytes of a wide element. An H200 moves
# 4.3e12 bytes a second, and does 394e12 products of 16 bits, or 210e12 of TF32. Convolutions of 8 bits reach 1.7 times
# the former.
PRODUCTS = {2: 92, 4: 49}
EIGHT_BIT_PRODUCTS = 156


def leave_wide_what_loses(reading: Reading) -> None:
    """Says of layers behind a depthwise convolution why they stay wide, if they do, and of layers behind these."""
    wide = {layer.node for layer in reading.layers if _is_depthwise(layer)}
    while wide:
        narrowing = Narrowing(reading)
        behind = [layer for layer in narrowing.layers.values() if _maker(layer.x) in wide]
        losing = [layer for layer in behind if _loses(layer, narrowing)]
        if not losing:
            return
        for layer in losing:
            layer.why = "8 bits would cost a pass over its input, behind a depthwise convolution, and gain less"
            wide.add(layer.node)


def _is_depthwise(layer: Layer) -> bool:
    if layer.node.name not in CONVOLUTIONS:
        return False
    p = layer.node.params["problem"]
    return p.groups > 1 and p.depthwise


def _maker(v: Value) -> Node | None:
    """The node whose result v has the elements of."""
    while v.node is not None and is_moving(v.node):
        v = v.node.inputs[0]
    return v.node


def _loses(layer: Layer, narrowing: Narrowing) -> bool:
    """By the bytes that memory moves in the same time. Where an extent is symbolic nothing is known."""
    shapes = (layer.x.shape, layer.y.shape)
    if not all(is_number(n) for shape in shapes for n in shape):
        return False
    x, y = map(math.prod, shapes)
    size, products = layer.x.dtype.itemsize, layer.problem.flops / 2
    source = narrowing.source(layer.x)
    readers = sum(narrowing.source(other.x) is source for other in narrowing.layers.values())
    size_of_y = 1 if narrowing.is_wanted(layer.y) or is_averaged(layer.y) else size
    wide = max(products / PRODUCTS[size], size * (x + y))
    eight = max(products / EIGHT_BIT_PRODUCTS, x + size_of_y * y)
    made = (size + 1) * x / readers  # the pass: each of the layers that read its result has a part of it
    return eight + made >= wide

"""Convolutions at the boundaries of the algorithms, small enough for a reference in Python loops. Each says why it is
here. NETWORK_CASES are those that people train, from benchmarks/ops/.

The tiles that matter: threads and CTAs own 16 to 128 rows and columns, vectors hold 4 or 8 elements, matrix
instructions take 8, 16 or 32 steps of the reduction.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from helpers import DEVICE

from benchmarks.ops import conv, conv_cases
from jaxconv import _plan
from jaxconv._problem import CONV_ALGORITHMS, ConvProblem


@dataclasses.dataclass(frozen=True)
class ConvCase(conv.ConvCase):
    why: str = ""

    def terms(self, pass_: str) -> int:
        """As the benchmarks' cases, but wgrad's sums are of all pixels of x."""
        return self.batch * math.prod(self.spatial) if pass_ == "wgrad" else super().terms(pass_)

    def problem(self, dtype: str = "float32", **options: Any) -> ConvProblem:
        given: dict[str, Any] = dict(layout=self.layout(), precision=None, activation=None, return_preactivation=False)
        given |= dict(algorithm=None, implementation=None)
        x, w = (jax.ShapeDtypeStruct(s, dtype) for s in (self.x_shape(), self.w_shape()))
        return ConvProblem.infer("conv", self.nd, x, w, None, **{**self.options, **given, **options})

    def able(self, dtype: str = "float32", **options: Any) -> list[str]:
        """The algorithms that can run this case, forward and backward, on the device under test."""
        problem, ops = self.problem(dtype, **options), ("conv_fprop", "conv_dgrad", "conv_wgrad")
        return [a for a in CONV_ALGORITHMS if not any(_plan.supports(op, a, problem, DEVICE) for op in ops)]


def edge(
    name: str, batch: int, spatial: Any, in_channels: int, out_channels: int, filter: Any, why: str, **options: Any
) -> ConvCase:
    """A case at a boundary; numbers of `options` are of every axis."""
    nd = len(spatial)

    def each(value: Any) -> tuple[Any, ...]:
        return value if isinstance(value, tuple) else (value,) * nd

    window = {"stride": each(options.get("stride", 1)), "dilation": each(options.get("dilation", 1))}
    window["padding"] = tuple(p if isinstance(p, tuple) else (p, p) for p in each(options.get("padding", 0)))
    shape = (name, batch, spatial, in_channels, out_channels, filter)
    return ConvCase(*shape, **window, groups=options.get("groups", 1), why=why)


CONV_CASES = (
    edge("one", 1, (1, 1), 1, 1, (1, 1), "every extent is 1: no loop may assume two steps"),
    edge("three_channels", 2, (7, 5), 3, 5, (3, 3), "C=3 is below one 16-byte vector; odd extents", padding=1),
    edge(
        "prime",
        1,
        (13, 11),
        7,
        13,
        (5, 3),
        "prime extents divide no tile; unequal strides and asymmetric pads",
        stride=(2, 3),
        padding=((1, 2), (0, 3)),
    ),
    edge("pixels_257", 1, (1, 257), 4, 8, (1, 1), "P*Q=257: one past two tiles of 128 pixels; a plain matrix product"),
    edge("filters_129", 1, (5, 5), 16, 129, (1, 1), "K=129: one past a tile of 128 filters; unaligned rows of w and y"),
    edge(
        "reduction_297",
        1,
        (6, 6),
        33,
        65,
        (3, 3),
        "C=33: the reduction crosses a filter tap inside a vector; K=65 is one past a tile of 64",
        padding=1,
    ),
    edge(
        "aligned",
        2,
        (10, 8),
        64,
        64,
        (3, 3),
        "64 channels on both sides: the vectorised path, N*P*Q=160 between tiles",
        padding=1,
    ),
    edge(
        "dilated",
        2,
        (9, 9),
        4,
        6,
        (3, 3),
        "dilation 2 with all padding on one side",
        dilation=2,
        padding=((0, 3), (4, 0)),
    ),
    edge(
        "cropped",
        2,
        (9, 8),
        3,
        4,
        (3, 2),
        "negative pads crop the input; dx is zero where they do",
        stride=2,
        padding=((-1, 2), (1, -2)),
    ),
    edge("holes", 2, (10, 11), 4, 3, (2, 2), "stride 3 over a 2x2 window: some pixels are read by no output", stride=3),
    edge(
        "over_padded",
        1,
        (3, 4),
        2,
        3,
        (2, 2),
        "pads wider than the window: some outputs read nothing but padding",
        padding=((3, 3), (2, 4)),
        stride=(1, 2),
    ),
    edge("grouped", 2, (6, 7), 12, 18, (3, 3), "3 groups of 4 -> 6 channels, K/G no power of two", groups=3, padding=1),
    edge(
        "depthwise",
        2,
        (9, 10),
        19,
        19,
        (3, 3),
        "one channel a group; C=19 is no multiple of a vector",
        groups=19,
        padding=1,
    ),
    edge(
        "depthwise_x2",
        2,
        (9, 7),
        4,
        8,
        (5, 5),
        "channel multiplier 2, strided and dilated",
        groups=4,
        padding=((2, 3), (4, 1)),
        stride=(2, 1),
        dilation=(1, 2),
    ),
    edge(
        "depthwise_strips",
        2,
        (5, 65),
        72,
        72,
        (3, 3),
        "65 columns are two strips of 56; 72 channels end in a part of a slab of 32 or 64; one-sided pads",
        groups=72,
        padding=((0, 2), (2, 0)),
    ),
    edge(
        "depthwise_x2_strips",
        2,
        (5, 65),
        48,
        96,
        (3, 3),
        "channel multiplier 2 in strips of 56 columns; 48 channels end in a part of a slab; one-sided pads",
        groups=48,
        padding=((0, 2), (2, 0)),
    ),
    edge(
        "depthwise_x4",
        5,
        (7, 6),
        8,
        32,
        (3, 3),
        "channel multiplier 4: two pairs of output channels an input channel; several images share a strip",
        groups=8,
        padding=1,
    ),
    edge(
        "depthwise_causal",
        2,
        (301,),
        24,
        24,
        (4,),
        "four causal taps, 301 places: chunks and their last, shorter one",
        groups=24,
        padding=((3, 0),),
    ),
    edge(
        "depthwise_causal_d3",
        1,
        (50,),
        8,
        8,
        (3,),
        "dilation 3 does not divide the length: residues of two lengths; cropped on one side",
        groups=8,
        padding=((7, -2),),
        dilation=3,
    ),
    edge(
        "depthwise_column",
        2,
        (9, 5, 3),
        16,
        16,
        (2, 1, 1),
        "a filter along the first axis: lines that are 15 pixels apart from place to place",
        groups=16,
        padding=((1, 0), (0, 0), (0, 0)),
    ),
    edge(
        "depthwise_d2",
        2,
        (7, 13),
        12,
        12,
        (3, 3),
        "dilation 2 along both axes: residues of 7 and 6 columns; 12 channels are no 16-byte vectors in 16 bit",
        groups=12,
        padding=((2, 1), (1, 2)),
        dilation=2,
    ),
    edge(
        "depthwise_d2_rows",
        3,
        (9, 29),
        24,
        24,
        (3, 3),
        "dilation 2: residues of 5 and 4 rows; 29 columns are chunks of 14, 14 and 1; pads as long as the reach",
        groups=24,
        padding=((4, 0), (1, 3)),
        dilation=2,
    ),
    edge(
        "depthwise_d3",
        1,
        (2, 260),
        8,
        8,
        (3, 3),
        "dilation 3 is more than the rows, one residue is empty; 260 columns are two strips of chunks of 21",
        groups=8,
        padding=((4, 2), (2, 4)),
        dilation=3,
    ),
    edge(
        "depthwise_d2x5",
        2,
        (5, 12),
        264,
        264,
        (3, 3),
        "264 channels are five slabs of up to 64; rows and columns of different dilations",
        groups=264,
        padding=((0, 1), (7, 5)),
        dilation=(2, 5),
    ),
    edge(
        "depthwise_7x7_d3",
        2,
        (7, 10),
        16,
        16,
        (7, 7),
        "7x7 of dilation 3, as in large-kernel attention: fewer rows and columns than its reach",
        groups=16,
        padding=((9, 9), (10, 7)),
        dilation=3,
    ),
    edge(
        "depthwise_5x5_d2",
        2,
        (9, 17),
        24,
        24,
        (5, 5),
        "5x5 of dilation 2 along columns and 1 along rows",
        groups=24,
        padding=((2, 4), (8, 1)),
        dilation=(1, 2),
    ),
    edge(
        "depthwise_s2",
        3,
        (9, 18),
        24,
        24,
        (3, 3),
        "stride 2: odd and even extents, and the last row and column of dx that one tap reaches",
        groups=24,
        stride=2,
        padding=((1, 1), (0, 1)),
    ),
    edge(
        "depthwise_5x5_s2",
        3,
        (11, 18),
        24,
        24,
        (5, 5),
        "5x5 of stride 2: odd and even extents, SAME's padding and the symmetric one",
        groups=24,
        stride=2,
        padding=((2, 2), (1, 2)),
    ),
    edge(
        "depthwise_5x5_s2_images",
        9,
        (7, 6),
        72,
        72,
        (5, 5),
        "several images share a strip and the last ones are missing; padding on one side",
        groups=72,
        stride=2,
        padding=((4, 0), (0, 3)),
    ),
    edge(
        "depthwise_7x7_s2",
        2,
        (16, 13),
        40,
        40,
        (7, 7),
        "7x7 of stride 2, rows and columns padded by an even and an odd number",
        groups=40,
        stride=2,
        padding=((2, 3), (3, 3)),
    ),
    edge(
        "depthwise_7x7_s2_wide",
        1,
        (9, 300),
        8,
        8,
        (7, 7),
        "more columns than TMA's box has pixels: two strips a row and more",
        groups=8,
        stride=2,
        padding=((5, 1), (6, 0)),
    ),
    edge(
        "depthwise_wide",
        1,
        (3, 260),
        8,
        8,
        (3, 3),
        "8 channels would let a block take more columns than TMA's box has pixels",
        groups=8,
        padding=1,
    ),
    edge(
        "depthwise_images",
        9,
        (7, 6),
        16,
        16,
        (5, 5),
        "rows so short that several images share a strip or a warp, and the last ones are missing",
        groups=16,
        padding=2,
    ),
    edge(
        "depthwise_bands",
        5,
        (9, 21),
        40,
        40,
        (7, 7),
        "five images of 3 runs of 8 columns are one strip of 16; 40 channels are a slab of 32 and a part",
        groups=40,
        padding=((0, 5), (6, 1)),
    ),
    edge(
        "depthwise_bands_wide",
        2,
        (4, 141),
        16,
        16,
        (5, 5),
        "141 columns are two strips of 9 runs of 8",
        groups=16,
        padding=((4, 0), (1, 3)),
    ),
    edge("depthwise_32", 1, (12, 9), 32, 32, (7, 7), "7x7 over aligned channels, as in ConvNeXt", groups=32, padding=3),
    edge(
        "grouped_4",
        3,
        (6, 66),
        72,
        72,
        (3, 3),
        "4 channels a group; 66 columns are two strips of 64; 72 channels are one slab of 64 and a part",
        groups=18,
        padding=1,
    ),
    edge(
        "grouped_4_wide",
        2,
        (3, 190),
        36,
        36,
        (3, 3),
        "an odd number of groups; in float32 190 columns are two strips and 36 channels a slab of 32 and a part",
        groups=9,
        padding=((0, 1), (1, 2)),
    ),
    edge("grouped_8", 5, (9, 7), 16, 16, (3, 3), "8 channels a group, 7 columns: four images share a strip", groups=2),
    edge(
        "grouped_16",
        3,
        (5, 18),
        32,
        32,
        (3, 3),
        "16 channels a group; one-sided pads",
        groups=2,
        padding=((2, 0), (0, 2)),
    ),
    edge(
        "grouped_16_s2",
        3,
        (9, 32),
        48,
        48,
        (3, 3),
        "stride 2: a last row and a last column that no tap reaches",
        stride=2,
        groups=3,
        padding=((1, 0), (0, 0)),
    ),
    edge(
        "grouped_4_s2",
        3,
        (8, 132),
        72,
        72,
        (3, 3),
        "stride 2: 66 columns of y are several strips, 72 channels a slab of 64 and a part; odd rows of dx come first",
        stride=2,
        groups=18,
        padding=((1, 2), (0, 1)),
    ),
    edge(
        "grouped_8_s2",
        5,
        (11, 9),
        24,
        24,
        (3, 3),
        "stride 2: several images share a strip, the last ones are missing; padding of 2 skips a column of dx",
        stride=2,
        groups=3,
        padding=((0, 1), (2, 0)),
    ),
    edge(
        "grouped_8_s2_column",
        2,
        (5, 1),
        16,
        16,
        (3, 3),
        "stride 2: a single column, so that no tap of the other parity has any",
        stride=2,
        groups=2,
        padding=1,
    ),
    edge("grouped_32", 2, (6, 17), 64, 64, (3, 3), "32 channels a group: four octets", groups=2, padding=1),
    edge("one_d", 3, (19,), 3, 4, (5,), "1-D; strided and dilated", stride=2, dilation=2, padding=((3, 4),)),
    edge(
        "three_d",
        2,
        (4, 5, 6),
        3,
        5,
        (3, 2, 3),
        "3-D with different numbers in each dimension",
        stride=(1, 2, 1),
        dilation=(1, 1, 2),
        padding=((1, 1), (0, 1), (2, 2)),
    ),
    edge("no_images", 0, (5, 5), 3, 4, (3, 3), "an empty batch is a batch", padding=1),
)
BY_NAME = {case.name: case for case in CONV_CASES}

# Few channels on both sides: lines of 16 pixels, of several images and with two more pixels a row.
NARROW_CASES = (
    edge(
        "narrow_16",
        9,
        (7, 42),
        16,
        16,
        (3, 3),
        "42 columns: eight images share a line, the ninth has its own",
        padding=1,
    ),
    edge("narrow_4", 3, (6, 84), 4, 16, (3, 3), "4 channels of float32: two taps a product", padding=1),
    edge("narrow_8", 2, (5, 13), 8, 8, (3, 3), "8 channels: an octet a warp, half a product of dw", padding=1),
    edge(
        "narrow_32", 5, (11, 21), 32, 32, (3, 3), "32 channels: several warps share pixels, four those of dw", padding=1
    ),
    edge(
        "narrow_24",
        2,
        (9, 10),
        24,
        40,
        (3, 3),
        "zeros beside 24 channels; 40 are several slabs",
        padding=((2, 0), (0, 2)),
    ),
    edge("narrow_72", 2, (9, 10), 8, 72, (3, 3), "72 channels are several slabs", padding=1),
    edge("narrow_20", 2, (9, 10), 20, 12, (3, 3), "no multiple of 8 channels", padding=((0, 1), (1, 2))),
    edge("narrow_wide", 1, (4, 600), 8, 16, (3, 3), "600 columns: several strips", padding=1),
    edge("narrow_one", 2, (1, 1), 16, 16, (3, 3), "a pixel, whose rows and columns are mostly outside", padding=1),
    edge("narrow_tall", 1, (301, 3), 32, 16, (3, 3), "a strip's rows go to many blocks", padding=((0, 1), (2, 2))),
    edge(
        "narrow_long",
        1,
        (2601, 3),
        24,
        32,
        (3, 3),
        "a block has more rows than its ring has stages; 24 channels in 64 bytes or 128",
        padding=((2, 0), (0, 2)),
    ),
    edge("narrow_strips", 1, (801, 510), 8, 8, (3, 3), "a block goes from strip to strip", padding=1),
    edge("narrow_images", 301, (5, 5), 16, 32, (3, 3), "more images than a line; no padding"),
    edge("narrow_3d", 2, (3, 6, 7), 16, 16, (1, 3, 3), "planes are images", padding=((0, 0), (1, 1), (1, 1))),
)

# Few channels on one side, and patches. Tiles are up to 128 columns and whole rows; a step of the tensor cores takes 4
# taps, a block of them 64 pixels and 64 channels of the other side.
STEM_CASES = (
    edge("stem7", 2, (37, 45), 3, 64, (7, 7), "49 taps: one past 12 steps; odd extents", stride=2, padding=3),
    edge("stem3", 3, (32, 32), 3, 32, (3, 3), "K=32: half a block", stride=2, padding=((0, 1), (0, 1))),
    edge("stem_wide", 1, (9, 300), 1, 16, (3, 3), "300 columns: three tiles; one channel", padding=1),
    edge("stem_k264", 1, (21, 22), 3, 264, (7, 7), "the filter does not fit a block: K is cut", stride=2, padding=3),
    edge("stem_k7", 2, (20, 23), 2, 7, (3, 3), "K=7: no vector; few on both sides", padding=1),
    edge("stem_c5", 1, (20, 23), 5, 72, (3, 3), "5 channels: two units of 4 a pixel", dilation=(1, 2)),
    edge("stem_c8", 2, (20, 23), 8, 136, (3, 3), "8 channels; unequal strides", stride=(3, 2), padding=1),
    edge("stem_cropped", 2, (20, 23), 3, 24, (3, 3), "negative padding", padding=((-1, -1), (2, 2))),
    edge("stem_113", 1, (12, 226), 3, 72, (7, 7), "113 columns: two strips of a row", stride=2, padding=3),
    edge("stem_7x7s1", 1, (20, 70), 4, 64, (7, 7), "7 chunks a row; odd rows", padding=3),
    edge("stem_1d", 2, (67,), 2, 16, (9,), "1-D", stride=4, padding=4),
    edge("rgb", 2, (18, 20), 64, 3, (3, 3), "K=3: few output channels", padding=1),
    edge("rgb_wide", 1, (17, 230), 24, 3, (3, 3), "three strips of a row", padding=1),
    edge("head_k1", 2, (18, 20), 24, 1, (1, 1), "one output channel of 24 inputs, less than a block of 64"),
    edge(
        "head_k8",
        2,
        (18, 21),
        136,
        8,
        (5, 3),
        "136 inputs: a third block of 64 has 8",
        padding=((0, 0), (2, 2)),
        dilation=(1, 2),
    ),
    edge("patch4", 2, (32, 32), 3, 96, (4, 4), "patches: 12 elements a filter row, 24 bytes", stride=4),
    edge("patch16", 2, (48, 32), 3, 72, (16, 16), "patches: 48 elements a filter row, on sm90", stride=16),
    edge("patch14", 1, (28, 42), 3, 64, (14, 14), "patches: 42 elements a filter row, 84 bytes", stride=14),
    edge("patch_w", 2, (17, 32), 4, 64, (3, 4), "patches along W alone", stride=(2, 4), padding=((1, 1), (0, 0))),
    edge("patch_3d", 2, (3, 8, 12), 4, 16, (1, 4, 2), "patches in 3-D, the first axis stays", stride=(1, 4, 2)),
    edge("patch_row", 2, (5, 48), 8, 40, (1, 16), "a single tap is not dilated", stride=(1, 16), dilation=(2, 1)),
    edge("volume_c1", 2, (5, 9, 70), 1, 32, (3, 3, 3), "3-D, one channel: three planes are channels", padding=1),
    edge(
        "volume_c2",
        1,
        (4, 10, 33),
        2,
        24,
        (4, 3, 2),
        "3-D: four planes of two channels, more of them made",
        padding=((3, 2), (1, 1), (0, 1)),
    ),
    edge("volume_c4", 2, (5, 9, 70), 4, 32, (3, 3, 3), "3-D, four channels: 12 of 16 are planes'", padding=1),
    edge("volume_c3", 1, (3, 10, 33), 3, 64, (3, 3, 3), "3-D, three channels to many: wgrad has no planes", padding=1),
    edge("volume_c8", 2, (3, 6, 19), 8, 16, (2, 3, 3), "3-D: two planes of eight channels", padding=1),
    edge(
        "volume_c9",
        1,
        (6, 11, 35),
        9,
        24,
        (3, 3, 3),
        "3-D: 27 of 32 channels are planes', strided and dilated, more of them made",
        stride=(2, 1, 1),
        padding=((3, 2), (0, 2), (2, 1)),
        dilation=(2, 1, 1),
    ),
    edge(
        "volume_strided",
        2,
        (9, 9, 21),
        1,
        16,
        (2, 3, 3),
        "3-D: strides and dilated planes",
        stride=(2, 2, 1),
        padding=((2, 1), (1, 1), (1, 1)),
        dilation=(3, 1, 1),
    ),
    edge("patch_ragged", 1, (33, 33), 3, 16, (4, 4), "the last row and column belong to no patch", stride=4),
)

# For the sm_90a loop: blocks of 64 channels, tiles of 128 and 256 pixels, 64 to 320 columns, vectors of 8.
SM90_CASES = (
    edge("c8", 2, (9, 7), 8, 8, (3, 3), "C=K=8: one vector, an eighth of the 128 bytes that TMA fetches", padding=1),
    edge("c72", 1, (13, 11), 72, 136, (3, 3), "C=72, K=136: one vector past a block and past a tile", padding=1),
    edge("c136", 2, (8, 9), 136, 72, (3, 3), "three blocks of channels, the last of one vector", padding=1),
    edge("pixels_257", 1, (1, 257), 64, 264, (1, 1), "one past a tile of 256 pixels, K one vector past 256"),
    edge("pairs", 2, (15, 17), 264, 328, (1, 1), "past pairs of tiles of 128 and 256 in both directions"),
    edge("shares", 2, (24, 25), 64, 256, (1, 1), "one tile of a pair in 19 parts, which several threads add up"),
    edge("filters_328", 1, (12, 11), 16, 328, (1, 1), "K one vector past the widest tile"),
    edge("images", 5, (7, 7), 64, 64, (3, 3), "images of 49 pixels: a tile spans several", padding=1),
    edge("no_padding", 2, (17, 13), 64, 64, (3, 3), "nothing padded: gaps only where places have no output"),
    edge("over_padded", 2, (6, 9), 64, 72, (3, 3), "more outputs than inputs", padding=2),
    edge("uneven_pads", 2, (9, 8), 32, 64, (2, 4), "an even filter: pads differ", padding=((0, 1), (2, 1))),
    edge("cropped", 2, (9, 8), 24, 40, (3, 3), "negative pads crop the input", padding=((-1, 1), (1, -2))),
    edge("strided", 2, (13, 10), 64, 72, (3, 3), "four phases in dgrad, with 1 to 4 taps", stride=2, padding=1),
    edge("strided_holes", 2, (11, 13), 72, 64, (2, 2), "stride 3, 2x2 window: phases without taps", stride=(2, 3)),
    edge("pointwise_s2", 2, (13, 10), 72, 136, (1, 1), "three of four pixels of dx are zero", stride=2),
    edge("dilated", 2, (11, 12), 64, 64, (3, 3), "dilation 2", dilation=2, padding=2),
    edge("dilated_strided", 1, (14, 13), 16, 24, (3, 3), "stride and dilation share a factor", dilation=2, stride=2),
    edge("one_d", 2, (300,), 64, 72, (3,), "1-D, past a tile", padding=1),
    edge("one_d_causal", 2, (150,), 24, 16, (4,), "1-D, dilated, padded on one side", dilation=3, padding=((9, 0),)),
    edge("three_d", 2, (4, 5, 6), 16, 24, (3, 2, 3), "3-D", padding=((1, 1), (0, 1), (2, 2)), dilation=(1, 1, 2)),
    edge("three_d_s2", 1, (6, 5, 7), 64, 16, (3, 3, 3), "3-D, eight phases", stride=2, padding=1),
    edge("planes", 2, (4, 6, 50), 40, 24, (3, 3, 3), "3-D: past 32 channels, tiles past rows and planes", padding=1),
    edge("planes_of_one", 3, (1, 9, 61), 16, 72, (3, 3, 3), "3-D: two of three planes are padding", padding=1),
    edge(
        "planes_cut",
        1,
        (7, 5, 40),
        64,
        8,
        (3, 2, 3),
        "3-D: 6 taps a plane, fewer planes made",
        padding=((0, 0), (1, 0), (2, 2)),
    ),
    edge(
        "planes_over",
        1,
        (3, 12, 45),
        24,
        32,
        (3, 3, 3),
        "3-D: more planes made, dilated rows and columns",
        padding=((2, 2), (3, 2), (2, 3)),
        dilation=(1, 2, 2),
    ),
    edge("planes_wide", 1, (3, 4, 257), 40, 24, (3, 3, 3), "3-D: strips of 85 and 86 columns", padding=1),
    edge(
        "planes_wide_uneven",
        2,
        (2, 6, 200),
        64,
        16,
        (3, 3, 3),
        "3-D: strips, fewer rows and more columns made",
        padding=((1, 1), (0, 1), (2, 1)),
    ),
    edge(
        "planes_wide_dilated",
        1,
        (2, 9, 250),
        24,
        40,
        (3, 3, 3),
        "3-D: six strips, as dilated rows reach further",
        padding=((1, 1), (1, 2), (4, 5)),
        dilation=(1, 2, 3),
    ),
    edge("groups_of_64", 2, (9, 8), 128, 128, (3, 3), "two groups of 64", groups=2, padding=1),
    edge("wide", 1, (3, 260), 64, 64, (3, 3), "rows too long for the halo tile's shared memory", padding=1),
)

# The convolutions that the benchmarks measure, shrunk. Without the 31x31 filter: its taps take the reference seconds.
NETWORK_CASES = tuple(
    ConvCase.of(case.small(), why="a network has it")
    for case in conv_cases.CORE + conv_cases.SPECIAL
    if not case.transposed and max(case.filter) < 31
)


# ----------------------------------------------------------------------------------------------------------------------
# Between channels last, in which the references are written, and a case's two layouts


def images(a: Any, layout: str) -> Any:
    """x, y and their gradients from channels last to `layout`."""
    return a if layout.endswith("C") else np.moveaxis(a, -1, 1)


def filters(a: Any, layout: str) -> Any:
    """w and its gradient, (*window, C/G, K), to `layout`'s filter order."""
    return a if layout.endswith("C") else np.moveaxis(a, (-1, -2), (0, 1))

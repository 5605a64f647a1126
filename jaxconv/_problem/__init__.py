"""The problems: what a call asks for, in canonical numbers, and every user-facing error about it.

A problem is inferred once from the user's arguments. "SAME" becomes pairs, defaults become values, extents are
settled; nothing below re-derives them. Problems are frozen and hashable: they are the only parameter of the primitives.
"""

from jaxconv._problem.batchnorm import BATCHNORM_ALGORITHMS, BatchNormProblem
from jaxconv._problem.conv import CONV_ALGORITHMS, ConvBatchNormProblem, ConvProblem
from jaxconv._problem.dense import DENSE_ALGORITHMS, DenseProblem
from jaxconv._problem.parse import (
    CHANNELS_FIRST,
    CHANNELS_LAST,
    DTYPES,
    IMPLEMENTATIONS,
    Pair,
    Precision,
    as_array,
    as_mask,
    broadcasts,
    check_choice,
    integers,
    out_extent,
    parse_layout,
    parse_padding,
    parse_precision,
    parse_transposed_padding,
    same_dtype,
)

__all__ = [
    "BATCHNORM_ALGORITHMS",
    "CHANNELS_FIRST",
    "CHANNELS_LAST",
    "CONV_ALGORITHMS",
    "DENSE_ALGORITHMS",
    "DTYPES",
    "IMPLEMENTATIONS",
    "BatchNormProblem",
    "ConvBatchNormProblem",
    "ConvProblem",
    "DenseProblem",
    "Pair",
    "Precision",
    "as_array",
    "as_mask",
    "broadcasts",
    "check_choice",
    "integers",
    "out_extent",
    "parse_layout",
    "parse_padding",
    "parse_precision",
    "parse_transposed_padding",
    "same_dtype",
]

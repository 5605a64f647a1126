"""The problems: what a call asks for, in canonical numbers, and every user-facing error about it.

A problem is inferred once from the user's arguments. "SAME" becomes pairs, defaults become values, extents are
settled; nothing below re-derives them. Problems are frozen and hashable: they are the only parameter of the primitives.
"""

from jaxconv._problem.batchnorm import BATCHNORM_ALGORITHMS, BatchNormAlgorithm, BatchNormProblem
from jaxconv._problem.conv import (
    CONV_ALGORITHMS,
    BatchNormConvProblem,
    ConvAlgorithm,
    ConvBatchNormProblem,
    ConvProblem,
    NormalisedConvProblem,
)
from jaxconv._problem.dense import DENSE_ALGORITHMS, DenseAlgorithm, DenseProblem, MlpProblem
from jaxconv._problem.groupnorm import GROUPNORM_ALGORITHMS, GroupNormAlgorithm, GroupNormProblem
from jaxconv._problem.parse import (
    CHANNELS_FIRST,
    CHANNELS_LAST,
    DTYPES,
    IMPLEMENTATIONS,
    Implementation,
    Pair,
    Precision,
    as_array,
    as_mask,
    as_parameter,
    broadcasts,
    check_choice,
    family_of,
    integer,
    integers,
    is_number,
    out_extent,
    parse_layout,
    parse_padding,
    parse_precision,
    parse_transposed_padding,
    same_dtype,
)
from jaxconv._problem.pool import POOL_ALGORITHMS, PoolAlgorithm, PoolProblem
from jaxconv._problem.squeeze_excite import (
    GATES,
    SQUEEZE_EXCITE_ALGORITHMS,
    Gate,
    SqueezeExciteAlgorithm,
    SqueezeExciteProblem,
)

__all__ = [
    "BATCHNORM_ALGORITHMS",
    "CHANNELS_FIRST",
    "CHANNELS_LAST",
    "CONV_ALGORITHMS",
    "DENSE_ALGORITHMS",
    "DTYPES",
    "GATES",
    "GROUPNORM_ALGORITHMS",
    "IMPLEMENTATIONS",
    "POOL_ALGORITHMS",
    "SQUEEZE_EXCITE_ALGORITHMS",
    "BatchNormAlgorithm",
    "BatchNormConvProblem",
    "BatchNormProblem",
    "ConvAlgorithm",
    "ConvBatchNormProblem",
    "ConvProblem",
    "DenseAlgorithm",
    "DenseProblem",
    "Gate",
    "GroupNormAlgorithm",
    "GroupNormProblem",
    "Implementation",
    "MlpProblem",
    "NormalisedConvProblem",
    "Pair",
    "PoolAlgorithm",
    "PoolProblem",
    "Precision",
    "SqueezeExciteAlgorithm",
    "SqueezeExciteProblem",
    "as_array",
    "as_mask",
    "as_parameter",
    "broadcasts",
    "check_choice",
    "family_of",
    "integer",
    "integers",
    "is_number",
    "out_extent",
    "parse_layout",
    "parse_padding",
    "parse_precision",
    "parse_transposed_padding",
    "same_dtype",
]

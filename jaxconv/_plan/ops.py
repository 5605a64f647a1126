"""The table of ops that are planned, each with its planner."""

from __future__ import annotations

from jaxconv._plan import (
    avg_pool,
    batchnorm,
    conv,
    conv_add,
    conv_dgrad_add,
    conv_integer,
    conv_normalised,
    conv_pooled,
    conv_scaled,
    conv_shortcut,
    conv_statistics,
    dense,
    groupnorm,
    pool,
    squeeze_excite,
)
from jaxconv._plan.planner import PLANNERS, Planner

_TABLE: dict[type[Planner], str] = {
    conv.Conv: "conv conv_fprop conv_dgrad conv_wgrad",
    conv_add.ConvAdd: "conv_add",
    conv_statistics.ConvStatistics: "conv_statistics conv_add_statistics",
    conv_dgrad_add.DgradAdd: "conv_dgrad_add",
    conv_dgrad_add.DgradSums: "conv_dgrad_sums",
    conv_dgrad_add.ConvGradient: "conv_gradient",
    conv_dgrad_add.GradientAdd: "conv_gradient_add",
    conv_dgrad_add.NormGradient: "conv_norm_gradient",
    conv_pooled.ConvPooled: "conv_pooled",
    conv_shortcut.ConvShortcut: "conv_shortcut",
    conv_integer.ConvInteger: "conv_integer",
    conv_scaled.ConvScaled: "conv_scaled",
    conv_normalised.ConvNormalised: (
        "conv_normalised conv_normalised_wgrad conv_normalised_gradient conv_normalised_dx"
    ),
    conv_normalised.NormalisedStatistics: "conv_normalised_statistics",
    dense.Dense: "dense matmul",
    dense.DenseGradient: "dense_gradient",
    dense.DenseGated: "dense_gated",
    dense.DenseGatedGradient: "dense_gated_gradient",
    batchnorm.BatchNorm: (
        "batchnorm_train batchnorm_infer batchnorm_backward batchnorm_dx batchnorm_moments batchnorm_shortcut_backward"
    ),
    batchnorm.Signs: "batchnorm_signs",
    batchnorm.BackwardAdd: "batchnorm_backward_add",
    pool.MaxPool: "max_pool max_pool_backward",
    avg_pool.AvgPool: "avg_pool avg_pool_backward",
    groupnorm.GroupNorm: "groupnorm groupnorm_backward",
    squeeze_excite.SqueezeExcite: "squeeze_excite squeeze_excite_backward",
    # Several calls, each with a plan of its own: whether a kernel joins them
    conv_statistics.ConvBatchNorm: "conv_batchnorm",
    conv_normalised.BatchNormConv: "batchnorm_conv",
    conv_normalised.BatchNormConvBackward: "batchnorm_conv_backward",
    batchnorm.Shortcut: "batchnorm_shortcut",
}
PLANNERS.update({op: planner(op) for planner, ops in _TABLE.items() for op in ops.split()})

# op -> the group that JAXCONV_DISABLE names
OPS = {op: planner.group for op, planner in PLANNERS.items() if planner.group}

"""jaxconv: convolution, fused dense and batch-norm layers for JAX, as CUDA kernels behind XLA custom calls."""

from jaxconv import checkpoint_policies
from jaxconv._cost import cost
from jaxconv._enable import disable, disabled, enable, enabled, report
from jaxconv._explain import Explanation, explain, info
from jaxconv._export import check_exported, export_checks
from jaxconv.accelerate import accelerate
from jaxconv.batchnorm import batchnorm
from jaxconv.conv import conv1d, conv2d, conv3d
from jaxconv.conv_batchnorm import conv_batchnorm
from jaxconv.conv_transpose import conv_general_dilated, conv_transpose1d, conv_transpose2d, conv_transpose3d
from jaxconv.dense import dense

__all__ = [
    "Explanation",
    "accelerate",
    "batchnorm",
    "check_exported",
    "checkpoint_policies",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_batchnorm",
    "conv_general_dilated",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "cost",
    "dense",
    "disable",
    "disabled",
    "enable",
    "enabled",
    "explain",
    "export_checks",
    "info",
    "report",
]

"""jaxconv: convolution, dense and batch-, group- and layer-norm for JAX, as CUDA kernels behind XLA custom calls."""

from __future__ import annotations

import importlib
from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

from jaxconv import checkpoint_policies
from jaxconv._enable import disable, disabled, enable, enabled, report
from jaxconv._ops.avg_pool import avg_pool
from jaxconv._ops.batchnorm import batchnorm
from jaxconv._ops.batchnorm_conv import batchnorm_conv
from jaxconv._ops.conv import conv1d, conv2d, conv3d
from jaxconv._ops.conv_batchnorm import conv_batchnorm
from jaxconv._ops.conv_transpose import conv_general_dilated, conv_transpose1d, conv_transpose2d, conv_transpose3d
from jaxconv._ops.dense import dense
from jaxconv._ops.groupnorm import groupnorm
from jaxconv._ops.layernorm import layernorm
from jaxconv._ops.mlp import mlp
from jaxconv._ops.pool import max_pool
from jaxconv._ops.squeeze_excite import squeeze_excite
from jaxconv._tools import in_place as _in_place  # noqa: F401, it says how a problem is timed in place
from jaxconv._tools.cost import cost
from jaxconv._tools.explain import Explanation, explain, info
from jaxconv._tools.explain import warn_of_environment as _warn_of_environment
from jaxconv._tools.export import check_exported, export_checks, portable_exported
from jaxconv._tools.launches import Launches, graph_options, launches
from jaxconv.accelerate import Accelerated, accelerate
from jaxconv.freeze import Frozen, freeze
from jaxconv.quantize import Quantization
from jaxconv.tune import tune

if TYPE_CHECKING:
    from jaxconv import linen as linen
    from jaxconv import nnx as nnx

__version__ = _version("jaxconv")

__all__ = [
    "Accelerated",
    "Explanation",
    "Frozen",
    "Launches",
    "Quantization",
    "__version__",
    "accelerate",
    "avg_pool",
    "batchnorm",
    "batchnorm_conv",
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
    "freeze",
    "graph_options",
    "groupnorm",
    "info",
    "launches",
    "layernorm",
    "max_pool",
    "mlp",
    "portable_exported",
    "report",
    "squeeze_excite",
    "tune",
]

# Imported when somebody asks for them: they need Flax. Not in __all__, or `from jaxconv import *` would.
_LAZY = ("linen", "nnx")

# Names that are near, and what is there: op families that have a function for each number of dimensions.
_NEAR = {
    "conv": "conv1d, conv2d and conv3d, by the number of spatial dimensions",
    "conv_transpose": "conv_transpose1d, conv_transpose2d and conv_transpose3d",
    "Conv": "the layers jaxconv.linen.Conv and jaxconv.nnx.Conv, and the functions conv1d, conv2d and conv3d",
    "ConvTranspose": "the layers jaxconv.linen.ConvTranspose and jaxconv.nnx.ConvTranspose",
    "Dense": "the layers jaxconv.linen.Dense and jaxconv.nnx.Linear, and the function dense",
    "Linear": "the layers jaxconv.nnx.Linear and jaxconv.linen.Dense, and the function dense",
    "BatchNorm": "the layers jaxconv.linen.BatchNorm and jaxconv.nnx.BatchNorm, and the function batchnorm",
    "batch_norm": "batchnorm",
    "pool": "max_pool and avg_pool",
    "MLP": "mlp",
    "GroupNorm": "the layers jaxconv.linen.GroupNorm and jaxconv.nnx.GroupNorm, and the function groupnorm",
    "group_norm": "groupnorm",
    "LayerNorm": "the layers jaxconv.linen.LayerNorm and jaxconv.nnx.LayerNorm, and the function layernorm",
    "layer_norm": "layernorm",
    "SqueezeExcite": "the function squeeze_excite",
    "SqueezeExcitation": "the function squeeze_excite",
    "squeeze_excitation": "squeeze_excite",
    "matmul": "dense",
}

if not TYPE_CHECKING:  # whose errors are better without it

    def __getattr__(name: str) -> Any:
        if name in _LAZY:
            return importlib.import_module(f"jaxconv.{name}")
        near = f"; it has {_NEAR[name]}" if name in _NEAR else ""
        raise AttributeError(f"module 'jaxconv' has no attribute {name!r}{near}")


_warn_of_environment()


def __dir__() -> list[str]:
    return sorted({*__all__, *_LAZY, *(name for name in globals() if name.startswith("__"))})

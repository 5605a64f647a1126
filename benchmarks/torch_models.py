"""The models of `python -m benchmarks infer` in PyTorch and in ONNX Runtime, with Flax's variables.

A module is a function of tensors in NCHW (channels-last memory) that walks the variables by the names that Flax gave
them. Where Flax pads by one side more than by the other, PyTorch's own models pad both alike: these are timed, and what
is compared with the other ways pads as Flax does (`exact`).
"""

from __future__ import annotations

import functools
import io
import time
from typing import Any

import jax
import numpy as np

from benchmarks.infer import Answers

Tree = Any


def _torch() -> Any:
    import torch

    return torch


def _padded(torch: Any, x: Any, size: int, stride: int, exact: bool, value: float = 0.0) -> tuple[Any, int]:
    """(x, padding): x padded as Flax's SAME does where that is uneven, and what is left to pad on both sides."""
    total = max((-(-x.shape[-1] // stride) - 1) * stride + size - x.shape[-1], 0)
    if not exact or total % 2 == 0:
        return x, total // 2 if exact else size // 2
    sides = (total // 2, total - total // 2)
    return torch.nn.functional.pad(x, sides * 2, value=value), 0


class Layers:
    """Flax's variables of one module, as the layers that Flax numbers."""

    def __init__(self, module: Any, variables: Tree, dtype: Any, exact: bool):
        self.torch, self.module, self.variables = _torch(), module, variables
        self.dtype, self.exact = dtype, exact
        self.counts: dict[str, int] = {}

    def next(self, kind: str) -> str:
        self.counts[kind] = self.counts.get(kind, -1) + 1
        return f"{kind}_{self.counts[kind]}"

    def inner(self, name: str) -> Layers:
        variables = {kind: tree.get(name, {}) for kind, tree in self.variables.items()}
        return Layers(getattr(self.module, name), variables, self.dtype, self.exact)

    def conv(self, x: Any, stride: int = 1, name: str | None = None, padding: int | None = None) -> Any:
        layer = getattr(self.module, name or self.next("Conv"))
        size = layer.weight.shape[-1]
        groups = x.shape[1] // layer.weight.shape[1]
        if padding is None:
            x, padding = _padded(self.torch, x, size, stride, self.exact)
        return self.torch.nn.functional.conv2d(x, layer.weight, layer.bias, stride, padding, groups=groups)

    def norm(self, x: Any, epsilon: float, name: str | None = None) -> Any:
        layer = getattr(self.module, name or self.next("BatchNorm"))
        given = (layer.mean, layer.var, layer.scale, layer.bias)
        return self.torch.nn.functional.batch_norm(x, *given, False, 0.0, epsilon)

    def dense(self, x: Any) -> Any:
        layer = getattr(self.module, self.next("Dense"))
        return self.torch.nn.functional.linear(x, layer.weight, layer.bias)


def _modules(variables: Tree, dtype: Any) -> Any:
    """A tree of modules with Flax's arrays as buffers, in the order of axes that PyTorch has."""
    torch = _torch()

    class Module(torch.nn.Module):
        pass

    params, stats = variables.get("params", {}), variables.get("batch_stats", {})
    module = Module()
    module.bias = None
    for name in params.keys() | stats.keys():
        value = params.get(name, stats.get(name))
        if isinstance(value, dict):
            inner = {"params": params.get(name, {}), "batch_stats": stats.get(name, {})}
            setattr(module, name, _modules(inner, dtype))
            continue
        array = torch.from_numpy(np.array(value))
        if name == "kernel":
            name = "weight"
            array = array.permute(3, 2, 0, 1) if array.ndim == 4 else array.T
            array = array.to(dtype).contiguous(
                memory_format=torch.channels_last if array.ndim == 4 else torch.contiguous_format
            )
        elif "kernel" in params:
            array = array.to(dtype)  # a bias; norms stay in float32
        if name == "bias":
            del module.bias
        module.register_buffer(name, array)
    return module


# ----------------------------------------------------------------------------------------------------------------------
# The models, as benchmarks/models.py has them


def resnet(layers: Layers, x: Any) -> Any:
    functional = layers.torch.nn.functional
    relu, epsilon = functional.relu, 1e-5
    x = relu(layers.norm(layers.conv(x, 2, padding=3), epsilon))
    if layers.exact:
        x, padding = _padded(layers.torch, x, 3, 2, True, float("-inf"))
        x = functional.max_pool2d(x, 3, 2, padding)
    else:
        x = functional.max_pool2d(x, 3, 2, 1)
    for name, stride in _blocks(layers, "Bottleneck"):
        block = layers.inner(name)
        y = relu(block.norm(block.conv(x), epsilon))
        y = relu(block.norm(block.conv(y, stride), epsilon))
        y = block.norm(block.conv(y), epsilon)
        if hasattr(block.module, "shortcut"):
            x = block.norm(block.conv(x, stride, "shortcut"), epsilon, "shortcut_norm")
        x = relu(x + y)
    return layers.dense(x.mean((2, 3)))


def mobilenet(layers: Layers, x: Any) -> Any:
    relu6, epsilon = layers.torch.nn.functional.relu6, 1e-5
    x = relu6(layers.norm(layers.conv(x, 2), epsilon))
    for name, stride in _blocks(layers, "InvertedResidual"):
        block, y = layers.inner(name), x
        if hasattr(block.module, "Conv_2"):
            y = relu6(block.norm(block.conv(y), epsilon))
        y = relu6(block.norm(block.conv(y, stride), epsilon))
        y = block.norm(block.conv(y), epsilon)
        x = x + y if x.shape == y.shape else y
    x = relu6(layers.norm(layers.conv(x), epsilon))
    return layers.dense(x.mean((2, 3)))


def efficientnet(layers: Layers, x: Any) -> Any:
    torch, epsilon = layers.torch, 1e-5
    silu = torch.nn.functional.silu
    x = silu(layers.norm(layers.conv(x, 2), epsilon))
    for name, stride in _blocks(layers, "SqueezedResidual"):
        block, y = layers.inner(name), x
        if hasattr(block.module, "Conv_4"):
            y = silu(block.norm(block.conv(y), epsilon))
        y = silu(block.norm(block.conv(y, stride), epsilon))
        scale = silu(block.conv(y.mean((2, 3), keepdim=True)))
        y = y * torch.sigmoid(block.conv(scale))
        y = block.norm(block.conv(y), epsilon)
        x = x + y if x.shape == y.shape else y
    x = silu(layers.norm(layers.conv(x), epsilon))
    return layers.dense(x.mean((2, 3)))


def _blocks(layers: Layers, kind: str) -> list[tuple[str, int]]:
    """(name, stride) of each block, in order."""
    return list(layers.variables["strides"][kind])


def _strides(model: Any) -> dict[str, list[tuple[str, int]]]:
    """Of each block of a Flax model of benchmarks/models.py, by the name that Flax gives it."""
    name = type(model).__name__
    if name == "ResNet":
        strides = [2 if stage and not block else 1 for stage, n in enumerate(model.blocks) for block in range(n)]
        kind = "Bottleneck"
    else:
        strides = [1 if block else stage[3] for stage in model.stages for block in range(stage[2])]
        kind = {"MobileNetV2": "InvertedResidual", "EfficientNet": "SqueezedResidual"}[name]
    return {kind: [(f"{kind}_{i}", stride) for i, stride in enumerate(strides)]}


MODELS = {"ResNet": resnet, "MobileNetV2": mobilenet, "EfficientNet": efficientnet}


def module_of(model: Any, variables: Tree, dtype: Any) -> Any:
    """The Flax model as a torch.nn.Module of images in NCHW; `exact` says how it pads."""
    torch = _torch()
    if type(model).__name__ not in MODELS:
        raise RuntimeError(f"{type(model).__name__} is not written in PyTorch here")
    f, strides = MODELS[type(model).__name__], _strides(model)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = _modules(variables, dtype)
            self.exact = False

        def forward(self, x: Any) -> Any:
            layers = Layers(self.layers, {"strides": strides}, dtype, self.exact)
            return f(layers, x.to(dtype))

    return Model().eval()


# ----------------------------------------------------------------------------------------------------------------------
# Programs


def answers(way: str, model: Any, variables: Tree, images: np.ndarray, dtype: str) -> Answers:
    """Where a way cannot take part, an exception says why."""
    torch = _torch()
    if jax.default_backend() == "gpu" and not torch.cuda.is_available():
        raise RuntimeError("PyTorch sees no GPU")
    torch.backends.cudnn.benchmark = True
    kind = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[dtype]
    module = module_of(model, jax.tree.map(np.asarray, variables), kind)
    x = torch.from_numpy(images).permute(0, 3, 1, 2)
    return (_torch_answers if way == "torch" else _onnx_answers)(module, x, kind)


def _torch_answers(module: Any, x: Any, dtype: Any) -> Answers:
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("PyTorch is timed on a GPU only: torch.compile has no CUDA graphs elsewhere")
    import torch._dynamo
    import torch._inductor.config

    module, x = module.cuda(), x.cuda().contiguous(memory_format=torch.channels_last)
    torch.cuda.reset_peak_memory_stats()
    with torch.inference_mode():
        module.exact = True
        exact = module(x).double().cpu().numpy()
        module.exact = False
        begin = time.perf_counter()
        # Weights are constants to the compiler, which folds batch-norms into them.
        torch._inductor.config.freezing = True
        torch._dynamo.reset()
        f = torch.compile(module, mode="max-autotune")
        for _ in range(4):  # the first calls compile, warm up and capture
            f(x)
        torch.cuda.synchronize()
    compile_s = time.perf_counter() - begin

    def call() -> Any:
        with torch.inference_mode():
            return f(x)

    return Answers(
        "torch",
        call,
        lambda _: torch.cuda.synchronize(),
        lambda _: exact,
        0.0,
        compile_s,
        memory_bytes=torch.cuda.max_memory_allocated(),
    )


def _onnx_answers(module: Any, x: Any, dtype: Any) -> Answers:
    import onnxruntime

    torch = _torch()
    if dtype == torch.bfloat16:
        raise RuntimeError("ONNX Runtime has no bfloat16 convolutions: --dtype f16")
    provider = "CUDAExecutionProvider" if jax.default_backend() == "gpu" else "CPUExecutionProvider"
    if provider not in onnxruntime.get_available_providers():
        raise RuntimeError(f"this ONNX Runtime has no {provider}")

    def session(exact: bool) -> Any:
        module.exact = exact
        file = io.BytesIO()
        with torch.inference_mode():
            torch.onnx.export(module, (x,), file, input_names=["x"], output_names=["y"], dynamo=False)
        return onnxruntime.InferenceSession(file.getvalue(), providers=[provider])

    exact = session(True).run(["y"], {"x": x.numpy()})[0]
    begin = time.perf_counter()
    made = session(False)
    binding = made.io_binding()
    place = "cuda" if provider.startswith("CUDA") else "cpu"
    binding.bind_ortvalue_input("x", onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(x.numpy()), place))
    binding.bind_output("y", place)
    run = functools.partial(made.run_with_iobinding, binding)
    run()
    compile_s = time.perf_counter() - begin
    return Answers(
        "onnx",
        run,
        lambda _: binding.synchronize_outputs(),
        lambda _: np.asarray(exact, np.float64),
        0.0,
        compile_s,
    )

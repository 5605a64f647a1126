"""The models of `python -m benchmarks train` and `infer` in PyTorch, the served ones in ONNX Runtime too, with Flax's
variables.

A module is a function of tensors, channels first (in channels-last memory), that walks the variables by the names that
Flax gave them. Where Flax pads by one side more than by the other, PyTorch's own models pad both alike: these are
timed, and what is compared with the other ways pads as Flax does (`exact`).
"""

from __future__ import annotations

import functools
import io
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.answers import Answers

Tree = Any


def _torch() -> Any:
    import torch

    return torch


def _padded(torch: Any, x: Any, size: int, stride: int, exact: bool, value: float = 0.0) -> tuple[Any, int]:
    """(x, padding): x padded as Flax's SAME does where that is uneven, and what is left to pad on both sides."""
    total = max((-(-x.shape[-1] // stride) - 1) * stride + size - x.shape[-1], 0)
    if not exact or total % 2 == 0:
        return x, total // 2 if exact else (size - 1) // 2
    sides = (total // 2, total - total // 2)
    return torch.nn.functional.pad(x, sides * (x.ndim - 2), value=value), 0


class Layers:
    """Flax's variables of one module, as the layers that Flax numbers."""

    def __init__(self, module: Any, dtype: Any, train: bool, exact: bool):
        self.torch, self.module, self.dtype = _torch(), module, dtype
        self.train, self.exact = train, exact
        self.counts: dict[str, int] = {}

    def next(self, kind: str) -> str:
        self.counts[kind] = self.counts.get(kind, -1) + 1
        return f"{kind}_{self.counts[kind]}"

    def inner(self, kind: str) -> Layers:
        return Layers(getattr(self.module, self.next(kind)), self.dtype, self.train, self.exact)

    def _weights(self, name: str) -> tuple[Any, Any]:
        """(weight, bias) in the dtype of the computation: in training what is kept is float32."""
        layer = getattr(self.module, name)
        return layer.weight.to(self.dtype), None if layer.bias is None else layer.bias.to(self.dtype)

    def conv(self, x: Any, stride: int = 1, name: str | None = None, padding: int | None = None) -> Any:
        weight, bias = self._weights(name or self.next("Conv"))
        if padding is None:
            x, padding = _padded(self.torch, x, weight.shape[-1], stride, self.exact)
        convolve = getattr(self.torch.nn.functional, f"conv{x.ndim - 2}d")
        return convolve(x, weight, bias, stride, padding, groups=x.shape[1] // weight.shape[1])

    def conv_transpose(self, x: Any, stride: int) -> Any:
        """Of a filter as long as the stride."""
        weight, bias = self._weights(self.next("ConvTranspose"))
        return getattr(self.torch.nn.functional, f"conv_transpose{x.ndim - 2}d")(x, weight, bias, stride)

    def max_pool(self, x: Any, size: int, stride: int) -> Any:
        x, padding = _padded(self.torch, x, size, stride, self.exact, -math.inf)
        return getattr(self.torch.nn.functional, f"max_pool{x.ndim - 2}d")(x, size, stride, padding)

    def norm(self, x: Any, name: str | None = None, momentum: float = 0.9) -> Any:
        layer = getattr(self.module, name or self.next("BatchNorm"))
        given = (layer.mean, layer.var, layer.scale, layer.bias)
        return self.torch.nn.functional.batch_norm(x, *given, self.train, 1 - momentum, 1e-5)

    def group_norm(self, x: Any, groups: int) -> Any:
        layer = getattr(self.module, self.next("GroupNorm"))
        given = (layer.scale.to(x.dtype), layer.bias.to(x.dtype))
        return self.torch.nn.functional.group_norm(x, groups, *given, 1e-6)

    def layer_norm(self, x: Any) -> Any:
        """Over the last axis."""
        layer = getattr(self.module, self.next("LayerNorm"))
        given = (layer.scale.to(x.dtype), layer.bias.to(x.dtype))
        return self.torch.nn.functional.layer_norm(x, x.shape[-1:], *given, 1e-6)

    def dense(self, x: Any) -> Any:
        return self.torch.nn.functional.linear(x, *self._weights(self.next("Dense")))


def _modules(variables: Tree, dtype: Any, train: bool) -> Any:
    """A tree of modules with Flax's arrays, in the order of axes that PyTorch has.

    For training they are parameters in float32, statistics buffers; else all are buffers, weights in `dtype`.
    """
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
            if name.startswith("ConvTranspose"):  # whose filters run the other way in PyTorch
                kernel = inner["params"]["kernel"]
                turned = np.flip(kernel, range(np.ndim(kernel) - 2)).swapaxes(-1, -2)
                inner["params"] = {**inner["params"], "kernel": turned}
            setattr(module, name, _modules(inner, dtype, train))
            continue
        array = torch.from_numpy(np.array(value))
        if name == "kernel":
            name, nd = "weight", array.ndim - 2
            array = array.permute(nd + 1, nd, *range(nd)) if nd else array.T
            formats = {2: torch.channels_last, 3: torch.channels_last_3d}
            array = array.contiguous(memory_format=formats.get(nd, torch.contiguous_format))
        if "kernel" in params and not train:
            array = array.to(dtype)  # norms stay in float32
        if name == "bias":
            del module.bias
        if train and name in ("weight", "bias", "scale", "gamma"):
            module.register_parameter(name, torch.nn.Parameter(array))
        else:
            module.register_buffer(name, array)
    return module


# ----------------------------------------------------------------------------------------------------------------------
# The models, as benchmarks/models.py has them; `model` is Flax's


def resnet(model: Any, layers: Layers, x: Any) -> Any:
    relu = layers.torch.nn.functional.relu
    x = relu(layers.norm(layers.conv(x, 2, padding=3)))
    x = layers.max_pool(x, 3, 2)
    for stage, blocks in enumerate(model.blocks):
        for i in range(blocks):
            stride = 2 if stage and not i else 1
            block = layers.inner("Bottleneck")
            y = relu(block.norm(block.conv(x)))
            y = relu(block.norm(block.conv(y, stride)))
            y = block.norm(block.conv(y))
            if hasattr(block.module, "shortcut"):
                x = block.norm(block.conv(x, stride, "shortcut"), "shortcut_norm")
            x = relu(x + y)
    return layers.dense(x.mean((2, 3)))


def resnet18(model: Any, layers: Layers, x: Any) -> Any:
    relu, large = layers.torch.nn.functional.relu, model.stem == 7
    x = relu(layers.norm(layers.conv(x, 2 if large else 1)))
    x = layers.max_pool(x, 3, 2) if large else x
    for stage, blocks in enumerate(model.blocks):
        for i in range(blocks):
            stride = 2 if stage and not i else 1
            block = layers.inner("BasicBlock")
            y = relu(block.norm(block.conv(x, stride)))
            y = block.norm(block.conv(y))
            if x.shape != y.shape:
                x = block.norm(block.conv(x, stride))
            x = relu(x + y)
    return layers.dense(x.mean((2, 3)))


def mobilenet(model: Any, layers: Layers, x: Any) -> Any:
    relu6 = layers.torch.nn.functional.relu6
    x = relu6(layers.norm(layers.conv(x, 2)))
    for expansion, _, blocks, stride in model.stages:
        for i in range(blocks):
            block, y = layers.inner("InvertedResidual"), x
            if expansion > 1:
                y = relu6(block.norm(block.conv(y)))
            y = relu6(block.norm(block.conv(y, 1 if i else stride)))
            y = block.norm(block.conv(y))
            x = x + y if x.shape == y.shape else y
    x = relu6(layers.norm(layers.conv(x)))
    return layers.dense(x.mean((2, 3)))


def efficientnet(model: Any, layers: Layers, x: Any) -> Any:
    torch, momentum = layers.torch, 0.99
    silu = torch.nn.functional.silu
    x = silu(layers.norm(layers.conv(x, 2), momentum=momentum))
    for expansion, _, blocks, stride, _ in model.stages:
        for i in range(blocks):
            block, y = layers.inner("SqueezedResidual"), x
            if expansion > 1:
                y = silu(block.norm(block.conv(y), momentum=momentum))
            y = silu(block.norm(block.conv(y, 1 if i else stride), momentum=momentum))
            scale = silu(block.conv(y.mean((2, 3), keepdim=True)))
            y = y * torch.sigmoid(block.conv(scale))
            y = block.norm(block.conv(y), momentum=momentum)
            x = x + y if x.shape == y.shape else y
    x = silu(layers.norm(layers.conv(x), momentum=momentum))
    return layers.dense(x.mean((2, 3)))


def convnext(model: Any, layers: Layers, x: Any) -> Any:
    gelu = layers.torch.nn.functional.gelu

    def normalised(layers: Layers, x: Any) -> Any:  # over channels
        return layers.layer_norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    for stage, blocks in enumerate(model.blocks):
        if stage:
            x = normalised(layers, x)
        x = layers.conv(x, 2 if stage else 4, padding=0)
        if not stage:
            x = normalised(layers, x)
        for _ in range(blocks):
            block = layers.inner("ConvNeXtBlock")
            y = block.layer_norm(block.conv(x).permute(0, 2, 3, 1))
            y = block.dense(gelu(block.dense(y), approximate="tanh"))
            x = x + (block.module.gamma.to(y.dtype) * y).permute(0, 3, 1, 2)
    return layers.dense(layers.layer_norm(x.mean((2, 3))))


def impala(model: Any, layers: Layers, x: Any) -> tuple[Any, Any]:
    relu = layers.torch.nn.functional.relu
    for _ in model.features:
        x = layers.max_pool(layers.conv(x), 3, 2)
        for _ in range(2):
            x = x + layers.conv(relu(layers.conv(relu(x))))
    x = relu(x).permute(0, 2, 3, 1).flatten(1)  # in the order of Flax, and of channels-last memory
    x = relu(layers.dense(x))
    return layers.dense(x), layers.dense(x)


def unet3d(model: Any, layers: Layers, x: Any) -> Any:
    torch = layers.torch

    def twice(x: Any) -> Any:
        for _ in range(2):
            x = torch.nn.functional.relu(layers.norm(layers.conv(x)))
        return x

    skipped = []
    for _ in model.features[:-1]:
        x = twice(x)
        skipped.append(x)
        x = layers.max_pool(x, 2, 2)
    x = twice(x)
    for skip in reversed(skipped):
        x = twice(torch.cat([skip, layers.conv_transpose(x, 2)], 1))
    return layers.conv(x)


def ddpm(model: Any, layers: Layers, x: tuple[Any, Any]) -> Any:
    torch, (images, times) = layers.torch, x
    silu = torch.nn.functional.silu

    def normalised(layers: Layers, x: Any) -> Any:
        return silu(layers.group_norm(x, min(32, x.shape[1] // 4)))

    def timed(x: Any, time: Any) -> Any:
        block = layers.inner("TimedBlock")
        y = block.conv(normalised(block, x))
        y = y + block.dense(silu(time))[:, :, None, None]
        y = block.conv(normalised(block, y))
        return y + (block.conv(x, name="shortcut") if hasattr(block.module, "shortcut") else x)

    half = model.features[0] // 2
    angles = times[:, None] * torch.exp(-torch.arange(half, device=times.device) * (math.log(10000.0) / half))
    embedded = torch.cat([torch.sin(angles), torch.cos(angles)], -1).to(layers.dtype)
    time = layers.dense(silu(layers.dense(embedded)))
    y = layers.conv(images)
    skipped = [y]
    for level in range(len(model.features)):
        if level:
            y = layers.conv(y, 2)
            skipped.append(y)
        for _ in range(model.blocks):
            y = timed(y, time)
            skipped.append(y)
    for _ in range(2):
        y = timed(y, time)
    for level in range(len(model.features)):
        if level:
            y = layers.conv(torch.nn.functional.interpolate(y, scale_factor=2, mode="nearest"))
        for _ in range(model.blocks + 1):
            y = timed(torch.cat([y, skipped.pop()], 1), time)
    return layers.conv(normalised(layers, y))


MODELS: dict[str, Callable[..., Any]] = {
    "ResNet": resnet,
    "ResNet18": resnet18,
    "MobileNetV2": mobilenet,
    "EfficientNet": efficientnet,
    "ConvNeXt": convnext,
    "UNet3D": unet3d,
    "DDPM": ddpm,
    "Impala": impala,
}


def module_of(model: Any, variables: Tree, dtype: Any, *, train: bool = False) -> Any:
    """The Flax model as a torch.nn.Module of images, channels first; `exact` says how it pads."""
    torch = _torch()
    f = MODELS[type(model).__name__]

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = _modules(variables, dtype, train)
            self.exact = False

        def forward(self, x: Any) -> Any:
            images, *rest = x if isinstance(x, tuple) else (x,)
            images = images.to(dtype)
            return f(model, Layers(self.layers, dtype, train, self.exact), (images, *rest) if rest else images)

    return Model().train(train)


def channels_first(images: np.ndarray) -> Any:
    """A tensor of the same memory."""
    t = _torch().from_numpy(images)
    return t.permute(0, t.ndim - 1, *range(1, t.ndim - 1))


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
    x = channels_first(images)
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
    inference = session(False)
    binding = inference.io_binding()
    place = "cuda" if provider.startswith("CUDA") else "cpu"
    binding.bind_ortvalue_input("x", onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(x.numpy()), place))
    binding.bind_output("y", place)
    run = functools.partial(inference.run_with_iobinding, binding)
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

"""The training step of `python -m benchmarks train` in PyTorch: torch.compile, channels-last memory, fused SGD.

Parameters are float32, layers compute in the dtype of the other ways. Losses are those of the model that pads as Flax
does, run eagerly; what is timed is compiled, and pads both sides alike, as PyTorch's own models do.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks import steps, torch_models, training
from benchmarks.training import Tree


class Program:
    """As train.Program, on one device. XLA takes three quarters of a GPU's memory when it starts, unless told otherwise
    (XLA_PYTHON_CLIENT_MEM_FRACTION): what is left is PyTorch's."""

    name = "torch"
    trace_s = 0.0  # torch.compile traces

    def __init__(self, args: argparse.Namespace, placed: training.Placed):
        import torch

        self.args, self.placed = args, placed
        self.device = "cuda" if jax.default_backend() == "gpu" else "cpu"
        full = jax.config.jax_default_matmul_precision == "highest"
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = not full
        images, wanted = training.batch(args, placed.count)
        self.images = jax.tree.map(self._tensor, images)
        self.wanted = jax.tree.map(self._tensor, wanted)
        self.compile_s: float | None = None
        self.memory_bytes: int | None = None
        self.trained: Trained | None = None

    def _tensor(self, array: np.ndarray) -> Any:
        """On the device; images channels first, in channels-last memory."""
        import torch

        if array.dtype.kind == "f" and array.ndim > 2:
            return torch_models.channels_first(array).to(self.device)
        return torch.from_numpy(np.array(array)).to(self.device)

    def _trained(self, params: Tree, stats: Tree, *, exact: bool) -> Trained:
        import flax.linen
        import torch

        dtype = {"bf16": torch.bfloat16, "f32": torch.float32}[self.args.dtype]
        model = training.models()[self.args.model](flax.linen, training.DTYPES[self.args.dtype], small=self.args.small)
        variables = jax.tree.map(np.asarray, {"params": params, "batch_stats": stats})
        module = torch_models.module_of(model, variables, dtype, train=True).to(self.device)
        module.exact = exact
        torch.backends.cudnn.benchmark = not exact  # what is timed is worth trying each convolution's kernels for
        rate, fused = training.rate(self.args.model), self.device == "cuda" or None
        optimizer = torch.optim.SGD(module.parameters(), rate, training.MOMENTUM, fused=fused)
        loss = functools.partial(_loss, module, training.TASKS.get(self.args.model))
        return Trained(loss if exact else torch.compile(loss), optimizer, self.images, self.wanted)

    def losses(self, params: Tree, stats: Tree, steps: int) -> list[float]:
        trained = self._trained(params, stats, exact=True)
        return [float(trained.step()) for _ in range(steps)]

    def times(self, params: Tree, stats: Tree, steps: int, repeat: int) -> list[float]:
        """Milliseconds a step, `repeat` samples."""
        import torch
        import torch._dynamo

        on_gpu = self.device == "cuda"
        torch._dynamo.reset()  # it compiles a function for eight modules at most, and runs it eagerly for further ones
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        self.trained = self._trained(params, stats, exact=False)
        begin = time.perf_counter()
        self.trained.run(1)
        self.compile_s = time.perf_counter() - begin
        self.trained.run(3)

        def sample() -> float:
            begin = time.perf_counter()
            self.trained.run(steps)
            return (time.perf_counter() - begin) / steps * 1e3

        samples = training.steady(sample, repeat)
        if on_gpu:
            self.memory_bytes = torch.cuda.max_memory_allocated()
        return samples

    def kinds(self, params: Tree, stats: Tree) -> dict[str, float] | None:
        """Milliseconds a step of each kind of work, of what was timed: JAX's profiler sees the process's kernels."""
        if self.device != "cuda" or self.trained is None:
            return None
        by_kind = steps.profiled(functools.partial(self.trained.run, training.PROFILED), text="")
        return by_kind and {kind: ms / training.PROFILED for kind, ms in by_kind.items()}


def _loss(module: Any, task: str | None, images: Any, wanted: Any) -> Any:
    import torch

    found, cross_entropy = module(images), torch.nn.functional.cross_entropy
    if task == "play":
        (scores, value), (actions, earned) = found, wanted
        return cross_entropy(scores.float(), actions) + torch.mean((value.float() - earned) ** 2)
    found = found.float()
    return torch.mean((found - wanted) ** 2) if task == "denoise" else cross_entropy(found, wanted)


@dataclasses.dataclass(frozen=True)
class Trained:
    """A model that is being trained."""

    loss: Callable[..., Any]
    optimizer: Any
    images: Any
    wanted: Any

    def step(self) -> Any:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(self.images, self.wanted)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def run(self, steps: int) -> None:
        """So many steps, waited for."""
        for _ in range(steps):
            loss = self.step()
        loss.item()

"""PyTorch, where it is installed: eager kernels on the same arrays, shared through DLPack.

Its kernels are timed like all others: CUPTI sees every kernel of the process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from benchmarks.ops.base import Array, Arrays, Case, Job, Setting


def available() -> str | None:
    """None, or why PyTorch cannot take part."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return f"PyTorch cannot be imported: {error}"
    if jax.default_backend() == "gpu" and not torch.cuda.is_available():
        return "PyTorch sees no GPU"
    return None


def torch(case: Case, pass_: str, setting: Setting) -> Job:
    """Raises ValueError where PyTorch has no such thing."""
    import torch

    full = setting.precision == "highest"
    torch.backends.cuda.matmul.allow_tf32 = not full
    torch.backends.cudnn.allow_tf32 = not full
    torch.backends.cudnn.benchmark = True
    if case.without_torch:
        raise ValueError(case.without_torch)
    return case.torch(pass_, setting)


def give(a: Array) -> Any:
    """A tensor in an array's memory."""
    import torch

    return torch.from_dlpack(a)


def image_orders(nd: int, channels_last: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """How an array's axes are permuted for PyTorch, whose channels come first, and back."""
    if not channels_last:
        return tuple(range(nd + 2)), tuple(range(nd + 2))
    return (0, nd + 1, *range(1, nd + 1)), (0, *range(2, nd + 2), 1)


def _block(_: Any) -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def take(tensors: Sequence[Any], view: Callable[[Any], Any] = lambda t: t) -> tuple[Array, ...]:
    """Arrays of tensors as `view` sees them."""
    _block(None)
    return tuple(jax.numpy.from_dlpack(view(t.detach()).contiguous()) for t in tensors)


def job(
    f: Callable[..., Any],
    arguments: Callable[[Arrays], tuple[Any, ...]],
    view: Callable[[Any], Any] = lambda t: t,
    outputs: Callable[[Any], tuple[Any, ...]] | None = None,
) -> Job:
    """`view` shows a result as JAX has it; `outputs` does more than that."""
    return Job(f, arguments, outputs=outputs or (lambda out: take(out, view)), block=_block)


def layer_job(
    pass_: str,
    layer: Callable[..., Any],
    names: Sequence[str],
    views: tuple[Callable[[Any], Any], Callable[[Any], Any]] = (lambda t: t, lambda t: t),
) -> Job:
    """Of passes "fwd" and "fwd+bwd": `layer`, and with it the gradients of all its arguments.

    `views` show an array as `layer` takes it, and a result as JAX has it.
    """
    import torch

    to, back = views
    both = pass_ == "fwd+bwd"

    def forward(*args: Any) -> Any:
        with torch.no_grad():
            return (layer(*args),)

    def there_and_back(*args: Any) -> Any:
        *args, dy = args  # type: ignore[assignment]
        y = layer(*args)
        return y, *torch.autograd.grad(y, args, dy)

    def arguments(a: Arrays) -> tuple[Any, ...]:
        given = (*names, "dy") if both else names
        return tuple(to(give(a[n]).detach()).requires_grad_(both and n != "dy") for n in given)

    return job(there_and_back if both else forward, arguments, back)

"""The same problems in PyTorch, where it is installed: eager kernels on the same arrays, shared through DLPack.

Its kernels are timed like all others: CUPTI sees every kernel of the process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from benchmarks.cases import (
    BatchNormConvCase,
    Case,
    ConvCase,
    DenseCase,
    DenseGradientCase,
    DgradSumsCase,
    GroupNormCase,
    LayerNormCase,
    PoolCase,
    ShortcutCase,
    SqueezeExciteCase,
)
from benchmarks.check import EPSILON, MOMENTUM
from benchmarks.contenders import RESIDUAL, Job, Setting

Array = jax.Array


def available() -> str | None:
    """None, or why PyTorch cannot take part."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return f"PyTorch cannot be imported: {error}"
    if jax.default_backend() == "gpu" and not torch.cuda.is_available():
        return "PyTorch sees no GPU"
    return None


def _give(a: Array) -> Any:
    import torch

    return torch.from_dlpack(a)


def _block(_: Any) -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _take(tensors: Sequence[Any], views: Sequence[Callable[[Any], Any]]) -> tuple[Array, ...]:
    _block(None)
    return tuple(jax.numpy.from_dlpack(v(t.detach()).contiguous()) for t, v in zip(tensors, views, strict=True))


def _same(t: Any) -> Any:
    return t


def torch(case: Case, pass_: str, setting: Setting) -> Job:
    import torch

    full = setting.precision == "highest"
    torch.backends.cuda.matmul.allow_tf32 = not full
    torch.backends.cudnn.allow_tf32 = not full
    torch.backends.cudnn.benchmark = True
    if isinstance(case, BatchNormConvCase):
        raise ValueError("PyTorch writes what is normalised")
    if isinstance(case, DgradSumsCase):
        raise ValueError("PyTorch makes the sums in the batch-norm")
    if isinstance(case, ShortcutCase):
        raise ValueError("PyTorch takes no statistics of training")
    if isinstance(case, ConvCase):
        return _conv(case, pass_, setting)
    if isinstance(case, DenseGradientCase) or pass_ == "saved":
        raise ValueError("part of a gradient, which PyTorch takes as a whole")
    if isinstance(case, DenseCase):
        return _dense(case, pass_)
    if isinstance(case, PoolCase):
        return _pool(case, pass_, setting)
    if isinstance(case, SqueezeExciteCase):
        return _squeeze_excite(pass_)
    if isinstance(case, GroupNormCase):
        return _groupnorm(case, pass_)
    return _batchnorm(case, pass_, setting)


def _conv(case: ConvCase, pass_: str, setting: Setting) -> Job:
    import torch

    nd, last = case.nd, setting.channels_last
    first = (0, nd + 1, *range(1, nd + 1))
    back = (0, *range(2, nd + 2), 1)
    spatial = tuple(range(2, nd + 2))
    memory = {2: torch.channels_last, 3: torch.channels_last_3d}.get(nd, torch.contiguous_format)

    def images(t: Any) -> Any:  # NHWC arrays are NCHW tensors in channels-last memory: a view
        return t.permute(first) if last else t

    def filters(t: Any) -> Any:
        t = t.permute(nd + 1, nd, *range(nd)) if last else t
        if case.transposed:  # (C, K, taps), and PyTorch's taps run the other way
            t = t.transpose(0, 1).flip(spatial)
        return t.contiguous(memory_format=memory if last else torch.contiguous_format)

    def filters_back(t: Any) -> Any:
        t = t.flip(spatial).transpose(0, 1) if case.transposed else t
        return t.permute(*range(2, nd + 2), 1, 0) if last else t

    def images_back(t: Any) -> Any:
        return t.permute(back) if last else t

    # Asymmetric padding is a pad before the convolution; its gradient would be a crop.
    padding = [low for low, _ in case.padding]
    uneven = [0, 0] * nd
    if case.transposed:
        # SAME: what the filter is longer than the stride is cut from the output
        padding = [(f - s) // 2 for f, s in zip(case.filter, case.stride, strict=True)]
        if any((f - s) % 2 or f < s for f, s in zip(case.filter, case.stride, strict=True)):
            raise ValueError("PyTorch has no padding equal to SAME here")
    elif any(low != high for low, high in case.padding):
        if pass_ == "dgrad":
            raise ValueError("PyTorch has no asymmetric padding, and its gradient would be timed without the crop")
        uneven = [p for pair in reversed(case.padding) for p in pair]
        padding = [0] * nd
    window = (None, case.stride, padding, case.dilation, case.transposed, [0] * nd, case.groups)

    def pad(x: Any) -> Any:
        return torch.nn.functional.pad(x, uneven) if any(uneven) else x

    def fprop(x: Any, w: Any) -> Any:
        return (torch.convolution(pad(x), w, *window),)

    def backward(x: Any, w: Any, dy: Any) -> Any:
        _, *rest = window
        mask = [pass_ == "dgrad", pass_ == "wgrad", False]
        x = pad(x) if pass_ == "wgrad" else x
        grads = torch.ops.aten.convolution_backward(dy, x, w, None, *rest, mask)
        return (grads[0] if pass_ == "dgrad" else grads[1],)

    view = filters_back if pass_ == "wgrad" else images_back
    names = ("x", "w") if pass_ == "fprop" else ("x", "w", "dy")
    return Job(
        fprop if pass_ == "fprop" else backward,
        lambda a: tuple(filters(_give(a[n])) if n == "w" else images(_give(a[n])) for n in names),
        outputs=lambda out: _take(out, [view]),
        block=_block,
    )


def _dense(case: DenseCase, pass_: str) -> Job:
    import torch

    functional = torch.nn.functional
    activation = {
        "relu": functional.relu,
        "gelu": lambda z: functional.gelu(z, approximate="tanh"),
        "tanh": torch.tanh,
        "none": lambda z: z,
    }[case.activation]

    def forward(x: Any, w: Any, b: Any) -> Any:
        with torch.no_grad():
            return (activation(torch.addmm(b, x, w)),)

    def both(x: Any, w: Any, b: Any, dy: Any) -> Any:
        y = activation(torch.addmm(b, x, w))
        return y, *torch.autograd.grad(y, (x, w, b), dy)

    if pass_ == "fwd":
        names, f, wanted = ("x", "w", "b"), forward, ()
    elif pass_ == "dgrad":
        names, f, wanted = ("w", "dy"), lambda w, dy: (dy @ w.T,), ()
    elif pass_ == "wgrad":
        names, f, wanted = ("x", "dy"), lambda x, dy: (x.T @ dy,), ()
    else:
        names, f, wanted = ("x", "w", "b", "dy"), both, ("x", "w", "b")
    return Job(
        f,
        lambda a: tuple(_give(a[n]).detach().requires_grad_(n in wanted) for n in names),
        outputs=lambda out: _take(out, [_same] * len(out)),
        block=_block,
    )


def _squeeze_excite(pass_: str) -> Job:
    import torch

    functional, names = torch.nn.functional, ("x", "w1", "b1", "w2", "b2")

    def excite(x: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> Any:
        w1, b1, w2, b2 = (v.to(x.dtype) for v in (w1, b1, w2, b2))
        s = functional.silu(functional.linear(x.mean((1, 2)), w1.T, b1))
        return x * torch.sigmoid(functional.linear(s, w2.T, b2))[:, None, None]

    def forward(*args: Any) -> Any:
        with torch.no_grad():
            return (excite(*args),)

    def both(*args: Any) -> Any:
        *args, dy = args  # type: ignore[assignment]
        y = excite(*args)
        return y, *torch.autograd.grad(y, args, dy)

    back = pass_ == "fwd+bwd"
    return Job(
        both if back else forward,
        lambda a: tuple(
            _give(a[n]).detach().requires_grad_(back and n != "dy") for n in (*names, *(["dy"] if back else []))
        ),
        outputs=lambda out: _take(out, [_same] * len(out)),
        block=_block,
    )


def _groupnorm(case: GroupNormCase, pass_: str) -> Job:
    import torch

    functional, names = torch.nn.functional, ("x", "scale", "bias")
    first, back = (0, len(case.spatial) + 1, *range(1, len(case.spatial) + 1)), (0, *range(2, len(case.spatial) + 2), 1)
    rows = isinstance(case, LayerNormCase)
    if rows:  # of torch too over the last axis
        first = back = tuple(range(len(case.spatial) + 2))

    def norm(x: Any, scale: Any, bias: Any) -> Any:
        if rows:
            return functional.layer_norm(x, (case.channels,), scale.to(x.dtype), bias.to(x.dtype), EPSILON)
        return functional.silu(functional.group_norm(x, case.groups, scale.to(x.dtype), bias.to(x.dtype), EPSILON))

    def forward(*args: Any) -> Any:
        with torch.no_grad():
            return (norm(*args),)

    def both(x: Any, scale: Any, bias: Any, dy: Any) -> Any:
        y = norm(x, scale, bias)
        return y, *torch.autograd.grad(y, (x, scale, bias), dy)

    def arguments(a: dict[str, Array]) -> tuple[Any, ...]:
        t = {n: _give(a[n]).detach() for n in (*names, "dy")}
        t = {n: v.permute(first) if v.ndim > 1 else v for n, v in t.items()}
        for n in names if pass_ == "fwd+bwd" else ():
            t[n].requires_grad_(True)
        return tuple(t[n] for n in ((*names, "dy") if pass_ == "fwd+bwd" else names))

    def outputs(out: Any) -> tuple[Array, ...]:
        return tuple(_take(out, [lambda t: t.permute(back) if t.ndim > 1 else t] * len(out)))

    f = both if pass_ == "fwd+bwd" else forward
    return Job(f, arguments, outputs=outputs, block=_block)


def _batchnorm(case: Case, pass_: str, setting: Setting) -> Job:
    import torch

    functional = torch.nn.functional
    last = setting.channels_last

    def view(t: Any) -> Any:
        return t.permute(0, 3, 1, 2) if last else t

    def back(t: Any) -> Any:
        return t.permute(0, 2, 3, 1) if last and t.ndim == 4 else t

    def norm(x: Any, scale: Any, bias: Any, mean: Any, var: Any, training: bool) -> Any:
        return functional.batch_norm(x, mean, var, scale, bias, training, 1 - MOMENTUM, EPSILON)

    def forward(x: Any, scale: Any, bias: Any, mean: Any, var: Any) -> Any:
        with torch.no_grad():
            return (norm(x, scale, bias, mean, var, pass_ == "fwd"),)

    def both(x: Any, scale: Any, bias: Any, mean: Any, var: Any, dy: Any) -> Any:
        y = functional.relu(norm(x, scale, bias, mean, var, True))
        return y, *torch.autograd.grad(y, (x, scale, bias), dy)

    def residual(x: Any, scale: Any, bias: Any, r: Any, mean: Any, var: Any, dy: Any) -> Any:
        y = functional.relu(norm(x, scale, bias, mean, var, True) + r)
        return y, *torch.autograd.grad(y, (x, scale, bias, r), dy)

    def backward(y: Any, x: Any, scale: Any, bias: Any, dy: Any) -> Any:
        return torch.autograd.grad(y, (x, scale, bias), dy, retain_graph=True)

    names = ("x", "scale", "bias", "mean", "var")

    def arguments(a: dict[str, Array]) -> tuple[Any, ...]:
        graph = pass_ in ("bwd", "fwd+bwd", "residual")
        t = {n: _give(a[n]).detach() for n in RESIDUAL}
        t = {n: view(v) if v.ndim == 4 else v.clone() for n, v in t.items()}  # statistics are updated in place
        for n in ("x", "scale", "bias", "residual") if graph else ():
            t[n].requires_grad_(True)
        if pass_ == "bwd":
            return norm(*(t[n] for n in names), True), t["x"], t["scale"], t["bias"], t["dy"]
        if pass_ == "residual":
            return tuple(t[n] for n in RESIDUAL)
        return tuple(t[n] for n in ((*names, "dy") if pass_ == "fwd+bwd" else names))

    def outputs(out: Any) -> tuple[Array, ...]:
        taken = list(_take(out, [back] * len(out)))
        if pass_ in ("fwd", "fwd+bwd", "residual"):
            # PyTorch's running variance is the unbiased one, and it is updated in place: not the same results.
            taken[1:1] = [None, None]
        return tuple(taken)

    f = {"fwd": forward, "infer": forward, "bwd": backward, "fwd+bwd": both, "residual": residual}[pass_]
    return Job(f, arguments, outputs=outputs, block=_block)


def _pool(case: PoolCase, pass_: str, setting: Setting) -> Job:
    import torch

    nd, last = len(case.spatial), setting.channels_last
    if case.padding[0] != case.padding[1]:
        raise ValueError("PyTorch pads both sides alike")
    pool = getattr(torch.nn.functional, f"max_pool{nd}d")
    to_first, to_last = (0, nd + 1, *range(1, nd + 1)), (0, *range(2, nd + 2), 1)

    def run(x: Any) -> Any:
        return pool(x, case.window, case.stride, case.padding[0])

    def forward(x: Any) -> Any:
        with torch.no_grad():
            return (run(x),)

    def both(x: Any, dy: Any) -> Any:
        y = run(x)
        return y, *torch.autograd.grad(y, (x,), dy)

    def arguments(a: dict[str, Array]) -> tuple[Any, ...]:
        names = ("x",) if pass_ == "fwd" else ("x", "dy")
        t = [_give(a[n]).detach() for n in names]
        t = [v.permute(*to_first) if last else v for v in t]
        return t[0].requires_grad_(pass_ != "fwd"), *t[1:]

    def outputs(out: Any) -> tuple[Array, ...]:
        return _take(out, [lambda t: t.permute(*to_last) if last else t] * len(out))

    return Job(forward if pass_ == "fwd" else both, arguments, outputs=outputs, block=_block)

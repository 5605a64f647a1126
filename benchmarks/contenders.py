"""What is measured: jaxconv, XLA and PyTorch, each written as its users write it.

A contender turns a case and a pass into a `Job`: a function, and its arguments made from the arrays of the case. All
return the same results in the same order (`check.RESULTS`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import jaxconv
from benchmarks.cases import (
    BatchNormCase,
    BatchNormConvCase,
    Case,
    ConvBatchNormCase,
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
from jaxconv import _plan
from jaxconv._core.activations import Activation
from jaxconv._ops import reference as formulas
from jaxconv._ops.batchnorm import shortcut_backward
from jaxconv._ops.batchnorm import shortcut_problem as problem_of_shortcut
from jaxconv._ops.conv import dgrad_add, dgrad_sums, fprop, wgrad
from jaxconv._ops.conv_normalised import gradients_by_kernels, gradients_by_parts, normalised, normalised_wgrad
from jaxconv._ops.dense import dense_gradient
from jaxconv._problem import (
    BatchNormConvProblem,
    BatchNormProblem,
    ConvProblem,
    DenseProblem,
    NormalisedConvProblem,
    parse_precision,
)

Array = jax.Array
Arrays = dict[str, Array]

DTYPES = {"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32}


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a row has besides its case and pass."""

    dtype: str  # "bf16", "f16", "f32"
    channels_last: bool = True
    precision: str | None = None


@dataclasses.dataclass(frozen=True)
class Job:
    f: Callable[..., Any]
    arguments: Callable[[Arrays], tuple[Any, ...]]
    # What `jaxconv.explain` is to look at, and the kernels in it that count; None where nothing is ours
    explained: Callable[..., Any] | None = None
    kernels: tuple[str, ...] = ()
    outputs: Callable[[Any], tuple[Array, ...]] = tuple
    block: Callable[[Any], Any] = jax.block_until_ready


# The arguments of a batch-norm with a residual, those that are differentiated first
RESIDUAL = ("x", "scale", "bias", "residual", "mean", "var", "dy")


def make_arrays(case: Case, setting: Setting, key: Array) -> Arrays:
    """One set of random arrays, made on the device. Filters are scaled so that results are of order one."""
    dtype, last = DTYPES[setting.dtype], setting.channels_last
    keys = iter(jax.random.split(key, 8))

    def normal(shape: tuple[int, ...], scale: float = 1.0, shift: float = 0.0, dtype: Any = dtype) -> Array:
        return (shift + scale * jax.random.normal(next(keys), shape, jnp.float32)).astype(dtype)

    def parameters(channels: int) -> Arrays:
        c = (channels,)
        return {
            "scale": normal(c, 0.1, 1.0, jnp.float32),
            "bias": normal(c, 0.3, 0.0, jnp.float32),
            "mean": normal(c, 0.2, 0.5, jnp.float32),
            "var": jnp.abs(normal(c, 0.2, 2.0, jnp.float32)),
        }

    if isinstance(case, ConvCase):
        scale = case.terms("fprop") ** -0.5
        arrays = {"x": normal(case.x_shape(last)), "w": normal(case.w_shape(last), scale)}
        if isinstance(case, ConvBatchNormCase):
            return arrays | parameters(case.out_channels)
        if isinstance(case, DgradSumsCase):
            channels = (case.in_channels,)
            arrays |= {"c": normal(case.x_shape(last)), "signs": formulas.signs(normal(case.x_shape(last)))}
            arrays |= {"mean": normal(channels, 0.2, 0.0, jnp.float32), "rstd": jnp.full(channels, 0.7)}
        if isinstance(case, BatchNormConvCase):
            arrays |= parameters(case.in_channels)
        return arrays | {"dy": normal(case.y_shape(last))}
    if isinstance(case, DenseCase):
        return {
            "x": normal((case.m, case.k)),
            "w": normal((case.k, case.n), case.k**-0.5),
            "b": normal((case.n,), 0.1),
            "dy": normal((case.m, case.n)),
        }
    if isinstance(case, DenseGradientCase):
        return {
            "dy": normal((case.m, case.k)),
            "w": normal((case.n, case.k), case.k**-0.5),  # the later layer's, (K, N) as that has them
            "z": normal((case.m, case.n)),
        }
    if isinstance(case, PoolCase):
        return {"x": normal(case.x_shape(last)), "dy": normal(case.y_shape(last))}
    arrays = {"x": normal(case.x_shape(last), 1.5, 0.5), "dy": normal(case.x_shape(last))}
    if isinstance(case, SqueezeExciteCase):
        c, r = case.channels, case.hidden
        small = {"w1": (c, r), "b1": (r,), "w2": (r, c), "b2": (c,)}
        return arrays | {name: normal(shape, shape[0] ** -0.5, 0.0, jnp.float32) for name, shape in small.items()}
    if isinstance(case, GroupNormCase):
        return arrays | parameters(case.channels)
    arrays["residual"] = normal(case.x_shape(last))
    return arrays | parameters(case.channels)


# ----------------------------------------------------------------------------------------------------------------------
# Differentiation, the same for both


def _conv_job(case: ConvCase, pass_: str, conv: Callable[[Array, Array], Array]) -> Job:
    """The gradients alone: conv is linear in each operand, so the forward pass of a vjp is dead code."""
    # (as timed, as explained: without the dead code)
    f, transpose = {
        "fprop": (conv, conv),
        "dgrad": (
            lambda x, w, dy: jax.vjp(lambda x: conv(x, w), x)[1](dy)[0],
            lambda x, w, dy: jax.linear_transpose(lambda x: conv(x, w), x)(dy)[0],
        ),
        "wgrad": (
            lambda x, w, dy: jax.vjp(lambda w: conv(x, w), w)[1](dy)[0],
            lambda x, w, dy: jax.linear_transpose(lambda w: conv(x, w), w)(dy)[0],
        ),
    }[pass_]
    names = ("x", "w") if pass_ == "fprop" else ("x", "w", "dy")
    kernels = ("conv", "conv_fprop", "conv_dgrad", "conv_wgrad")
    return Job(jax.jit(f), lambda a: tuple(a[n] for n in names), transpose, kernels, lambda out: (out,))


def _normalised_job(
    pass_: str,
    kernels: tuple[str, ...],
    normalise: Callable[..., Array],  # of x and parameters; what is given in x's place where that is not written
    conv: Callable[..., Array],  # of that, w and parameters
    wgrad: Callable[..., Array],  # of that, dy and parameters
) -> Job:
    def f(x: Array, w: Array, dy: Array, *v: Array) -> tuple[Array, ...]:
        a = normalise(x, *v)
        if pass_ == "wgrad":
            return (wgrad(a, dy, *v),)
        y = conv(a, w, *v)
        if pass_ == "fprop":
            return (y,)
        # In training dy is computed from y.
        y, dy = lax.optimization_barrier((y, dy))
        return y, wgrad(a, dy, *v)

    names = ("x", "w", "dy", "scale", "bias", "mean", "var")
    return Job(jax.jit(f), lambda a: tuple(a[n] for n in names), f, kernels)


def _there_and_back(forward: Callable[..., tuple[Array, ...]], count: int) -> Callable[..., tuple[Array, ...]]:
    """(y, further results, gradients of the first `count` arguments) of `forward`, whose first result is y."""

    def f(*args: Array) -> tuple[Array, ...]:
        *args, dy = args  # type: ignore[assignment]

        def of_some(*some: Array) -> tuple[Array, tuple[Array, ...]]:
            y, *rest = forward(*some, *args[count:])
            return y, tuple(rest)

        y, backward, rest = jax.vjp(of_some, *args[:count], has_aux=True)
        # In training dy is computed from y: no part of the backward pass can join the forward pass.
        y, dy = lax.optimization_barrier((y, dy))
        return (y, *rest, *backward(dy))

    return f


def _dense_job(
    pass_: str, saved: Callable[[Array, Array, Array], tuple[Array, ...]], product: Callable[[Array, Array], Array]
) -> Job:
    """`saved` is the layer: y, and z where that is asked for; `product` is it without bias and activation."""
    if pass_ in ("dgrad", "wgrad"):
        with_respect_to, other = ("x", "w") if pass_ == "dgrad" else ("w", "x")

        def gradient(of: Array, other: Array, dy: Array) -> Array:
            f = (lambda x: product(x, other)) if pass_ == "dgrad" else (lambda w: product(other, w))
            return jax.linear_transpose(f, of)(dy)[0]

        names = (with_respect_to, other, "dy")
        f = jax.jit(gradient)
        return Job(f, lambda a: tuple(a[n] for n in names), gradient, ("dense", "matmul"), lambda out: (out,))

    def forward(x: Array, w: Array, b: Array) -> tuple[Array]:
        return saved(x, w, b)[:1]

    f = {"fwd": forward, "saved": saved}.get(pass_) or _there_and_back(forward, 3)
    names = ("x", "w", "b", "dy") if pass_ == "fwd+bwd" else ("x", "w", "b")
    return Job(jax.jit(f), lambda a: tuple(a[n] for n in names), f, ("dense", "matmul"))


def _dense_gradient_job(f: Callable[[Array, Array, Array], tuple[Array, ...]]) -> Job:
    return Job(jax.jit(f), lambda a: (a["dy"], a["w"], a["z"]), f, ("dense_gradient", "matmul"))


def _pool_job(pass_: str, pool: Callable[[Array], Array]) -> Job:
    def forward(x: Array) -> tuple[Array]:
        return (pool(x),)

    f = forward if pass_ == "fwd" else _there_and_back(forward, 1)
    names = ("x",) if pass_ == "fwd" else ("x", "dy")
    return Job(jax.jit(f), lambda a: tuple(a[n] for n in names), f, ("max_pool", "max_pool_backward"))


# ----------------------------------------------------------------------------------------------------------------------
# jaxconv


def _conv_problem(case: ConvCase, setting: Setting, **choice: Any) -> ConvProblem:
    last = setting.channels_last
    dtype = DTYPES[setting.dtype]
    x, w = (jax.ShapeDtypeStruct(shape, dtype) for shape in (case.x_shape(last), case.w_shape(last)))
    return ConvProblem.infer(
        case.op,
        case.nd,
        x,
        w,
        None,
        stride=case.stride,
        padding=case.padding,
        dilation=case.dilation,
        groups=case.groups,
        layout=case.layout(last),
        precision=setting.precision,
        activation=None,
        return_preactivation=False,
        **{"algorithm": None, "implementation": None, **choice},
    )


def normalised_problem(case: BatchNormConvCase, setting: Setting, **choice: Any) -> NormalisedConvProblem:
    conv = _conv_problem(case, setting, **choice)
    activation = Activation(case.activation)
    norm = BatchNormProblem(conv.name, conv.dtype, conv.x_shape, conv.channel_axis, False, 0.0, EPSILON, activation)
    return NormalisedConvProblem.of(norm, conv)


def _our_normalised(case: BatchNormConvCase, pass_: str, setting: Setting, **choice: Any) -> Job:
    """The algorithm "two" is what a user writes without `batchnorm_conv`, and what that is by a plan of two calls."""
    forced = any(choice.values())
    p = normalised_problem(case, setting, **({} if choice.get("algorithm") == "two" else choice))
    if pass_ == "bwd":
        return _our_normalised_backward(p, forced, choice.get("algorithm") == "two")
    kernels: tuple[str, ...] = ("conv_normalised", "conv_normalised_wgrad")
    plans = [_plan.plan(op, p, _plan.Device.default()) for op in kernels]
    refused = next((plan.reason for plan in plans if plan.implementation != "native"), None)
    if choice.get("algorithm") == "two" or (refused is not None and not forced):
        norm = dict(training=False, epsilon=EPSILON, activation=case.activation)
        axis = -1 if setting.channels_last else 1
        return _normalised_job(
            pass_,
            ("batchnorm_infer", "conv_fprop", "conv_wgrad"),
            lambda x, *v: jaxconv.batchnorm(x, *v, **norm, channel_axis=axis)[0],
            lambda a, w, *v: fprop(p.conv, a, w),
            lambda a, dy, *v: wgrad(p.conv, a, dy),
        )

    def taken(x: Array, *v: Array) -> Array:
        if refused is not None:  # what is forced is measured or refused, and not replaced by two calls
            raise ValueError(refused)
        return x

    return _normalised_job(
        pass_, kernels, taken, functools.partial(normalised, p), functools.partial(normalised_wgrad, p)
    )


def _our_normalised_backward(p: NormalisedConvProblem, forced: bool, two: bool) -> Job:
    whole = BatchNormConvProblem(dataclasses.replace(p.norm, training=True), p.conv)
    plan = _plan.plan("conv_normalised_gradient", p, _plan.Device.default())
    by_kernels = _plan.plan("batchnorm_conv_backward", whole, _plan.Device.default()).kernel == "normalised"

    def f(*args: Array) -> tuple[Array, ...]:
        if two:
            return tuple(gradients_by_parts(whole, *args))
        if forced and plan.implementation != "native":
            raise ValueError(plan.reason)
        return tuple((gradients_by_kernels if by_kernels else gradients_by_parts)(whole, *args))

    names = ("x", "dy", "w", "scale", "bias", "mean", "var")
    kernels = ("conv_normalised_gradient", "conv_normalised_dx")
    parts = ("conv_dgrad", "batchnorm_backward", "conv_normalised_wgrad")
    fused = not two and plan.implementation == "native"
    return Job(jax.jit(f), lambda a: tuple(a[n] for n in names), f, kernels if fused else parts)


def _our_dgrad_sums(case: DgradSumsCase, setting: Setting, **choice: Any) -> Job:
    """The algorithm "two" is a dgrad with its addition, by a plan of its own, and what follows as XLA fuses it."""
    two = choice.get("algorithm") == "two"
    p = _conv_problem(case, setting, **({} if two else choice))

    def f(dy: Array, w: Array, c: Array, *norm: Array) -> tuple[Array, ...]:
        if two:
            return tuple(formulas.through_relu(p.channel_axis, dgrad_add(p, dy, w, c), *norm))
        plan = _plan.plan("conv_dgrad_sums", p, _plan.Device.default())
        if any(choice.values()) and plan.implementation != "native":
            raise ValueError(plan.reason)
        return tuple(dgrad_sums(p, dy, w, c, *norm))

    return _dgrad_sums_job(f, ("conv_dgrad_add",) if two else ("conv_dgrad_sums",))


def _dgrad_sums_job(f: Callable[..., tuple[Array, ...]], kernels: tuple[str, ...]) -> Job:
    names = ("dy", "w", "c", "signs", "x", "mean", "rstd")
    return Job(jax.jit(f), lambda a: tuple(a[n] for n in names), f if kernels else None, kernels)


def shortcut_problem(case: ShortcutCase, setting: Setting, **choice: Any) -> BatchNormProblem:
    dtype, shape = jnp.dtype(DTYPES[setting.dtype]).name, case.x_shape()
    p = problem_of_shortcut(dtype, shape, len(shape) - 1, Activation("relu"))
    return dataclasses.replace(p, **choice)


def _our_shortcut(case: ShortcutCase, setting: Setting, **choice: Any) -> Job:
    """The algorithm "two" is two calls, each by a plan of its own."""
    p = shortcut_problem(case, setting, **({} if choice.get("algorithm") == "two" else choice))
    takes_both = _plan.plan("batchnorm_shortcut", p, _plan.Device.default()).kernel == "joined"
    if choice.get("algorithm") == "two" or not (any(choice.values()) or takes_both):
        return _shortcut_job(_two_norms, ("batchnorm_infer", "batchnorm_backward"))

    def joined(x: Array, r: Array, scale: Array, bias: Array, dy: Array, *statistics: Array) -> tuple[Array, ...]:
        mean, var, mean_r, var_r = statistics
        norm, norm_r = ((scale, bias, m, lax.rsqrt(v + EPSILON)) for m, v in ((mean, var), (mean_r, var_r)))
        norm, norm_r = tuple(norm), tuple(norm_r)
        y, *_ = formulas.batchnorm_shortcut(p, x, *norm, r, *norm_r)
        return y, *shortcut_backward(p, x, dy, *norm, r, *norm_r)

    return _shortcut_job(joined, ("batchnorm_shortcut_backward",))


def _two_norms(x: Array, r: Array, scale: Array, bias: Array, dy: Array, *statistics: Array) -> tuple[Array, ...]:
    norm = dict(training=True, momentum=0.0, epsilon=EPSILON)
    mean, var, mean_r, var_r = statistics

    def both(x: Array, r: Array, scale: Array, bias_x: Array, scale_r: Array) -> Array:
        r, *_ = jaxconv.batchnorm(r, scale_r, bias, mean_r, var_r, statistics=(mean_r, var_r), **norm)
        how = dict(statistics=(mean, var), activation="relu", residual=r)
        return jaxconv.batchnorm(x, scale, bias_x, mean, var, **how, **norm)[0]

    y, back = jax.vjp(both, x, r, scale, bias, scale)
    dx, dr, dscale, dbias, dscale_r = back(dy)
    return y, dscale, dbias, dscale_r, dx, dr


def _shortcut_job(f: Callable[..., tuple[Array, ...]], kernels: tuple[str, ...]) -> Job:
    def arguments(a: Arrays) -> tuple[Array, ...]:
        def statistics(x: Array) -> tuple[Array, Array]:
            axes = tuple(range(x.ndim - 1))
            return jnp.mean(x, axes, jnp.float32), jnp.var(x.astype(jnp.float32), axes)

        found = (v for name in ("x", "residual") for v in jax.jit(statistics)(a[name]))
        return *(a[name] for name in ("x", "residual", "scale", "bias", "dy")), *found

    return Job(jax.jit(f), arguments, f, kernels)


def ours(case: Case, pass_: str, setting: Setting, **choice: Any) -> Job:
    """`choice` is `implementation` or `algorithm`, as the public functions take them."""
    last = setting.channels_last
    if isinstance(case, BatchNormConvCase):
        return _our_normalised(case, pass_, setting, **choice)
    if isinstance(case, DgradSumsCase):
        return _our_dgrad_sums(case, setting, **choice)
    if isinstance(case, ShortcutCase):
        return _our_shortcut(case, setting, **choice)
    if isinstance(case, ConvBatchNormCase):
        return _our_pair(case, pass_, setting, **choice)
    if isinstance(case, ConvCase):
        name = f"conv{'_transpose' if case.transposed else ''}{case.nd}d"
        function = getattr(jaxconv, name)
        options = dict(
            stride=case.stride,
            padding="SAME" if case.transposed else case.padding,
            dilation=case.dilation,
            groups=case.groups,
            layout=case.layout(last),
            precision=setting.precision,
            **choice,
        )
        return _conv_job(case, pass_, lambda x, w: function(x, w, **options))
    if isinstance(case, DenseCase):
        options = dict(precision=setting.precision, **choice)

        def layer(x: Array, w: Array, b: Array) -> tuple[Array, ...]:
            how = dict(activation=case.activation, **options)
            if pass_ == "saved":
                return jaxconv.dense(x, w, b, return_preactivation=True, **how)
            return (jaxconv.dense(x, w, b, **how),)

        return _dense_job(pass_, layer, lambda x, w: jaxconv.dense(x, w, **options))
    if isinstance(case, DenseGradientCase):
        p = DenseProblem(
            "dense_gradient",
            jnp.dtype(DTYPES[setting.dtype]).name,
            *(case.m, case.k, case.n),
            parse_precision("dense_gradient", setting.precision),
            trans_w=True,
            activation=Activation(case.activation),
            **choice,
        )
        return _dense_gradient_job(lambda dy, w, z: tuple(dense_gradient(p, dy, w, z)))
    if isinstance(case, PoolCase):
        options = dict(
            stride=case.stride, padding=(case.padding,) * len(case.spatial), layout=case.layout(last), **choice
        )
        return _pool_job(pass_, lambda x: jaxconv.max_pool(x, case.window, **options))

    if isinstance(case, SqueezeExciteCase):
        return _squeeze_job(pass_, lambda *a: (jaxconv.squeeze_excite(*a, activation="silu", **choice),))
    if isinstance(case, LayerNormCase):
        return _group_job(pass_, lambda *a: (jaxconv.layernorm(*a, epsilon=EPSILON, **choice),))
    if isinstance(case, GroupNormCase):
        norm = dict(groups=case.groups, epsilon=EPSILON, activation="silu")
        return _group_job(pass_, lambda x, scale, bias: (jaxconv.groupnorm(x, scale, bias, **norm, **choice),))

    def batchnorm(x, scale, bias, mean, var, activation=None, training=True, residual=None):
        return jaxconv.batchnorm(
            x,
            scale,
            bias,
            mean,
            var,
            training=training,
            momentum=MOMENTUM,
            epsilon=EPSILON,
            activation=activation,
            residual=residual,
            channel_axis=-1 if last else 1,
            **choice,
        )

    names = ("x", "scale", "bias", "mean", "var")
    kernels = ("batchnorm_train", "batchnorm_infer", "batchnorm_backward")
    if pass_ == "bwd":
        # The residuals of a forward pass are its arguments: a vjp function is a pytree.
        before = jax.jit(lambda x, s, b, m, v: jax.vjp(lambda x, s, b: batchnorm(x, s, b, m, v)[0], x, s, b)[1])

        def after(vjp: Callable[[Array], tuple[Array, ...]], dy: Array) -> tuple[Array, ...]:
            return vjp(dy)

        return Job(jax.jit(after), lambda a: (before(*(a[n] for n in names)), a["dy"]), after, kernels)
    if pass_ == "fwd+bwd":

        def relu(x, scale, bias, mean, var):
            return batchnorm(x, scale, bias, mean, var, activation="relu")

        f = _there_and_back(relu, 3)
        return Job(jax.jit(f), lambda a: tuple(a[n] for n in (*names, "dy")), f, kernels)
    if pass_ == "residual":

        def add_relu(x, scale, bias, residual, mean, var):
            return batchnorm(x, scale, bias, mean, var, activation="relu", residual=residual)

        f = _there_and_back(add_relu, 4)
        return Job(jax.jit(f), lambda a: tuple(a[n] for n in RESIDUAL), f, kernels)

    def infer(*args: Array) -> tuple[Array, ...]:
        return batchnorm(*args, training=False)[:1]

    f = infer if pass_ == "infer" else batchnorm
    return Job(jax.jit(f), lambda a: tuple(a[n] for n in names), f, kernels)


def _group_job(pass_: str, norm: Callable[..., tuple[Array]]) -> Job:
    f = norm if pass_ == "fwd" else _there_and_back(norm, 3)
    names = ("x", "scale", "bias") if pass_ == "fwd" else ("x", "scale", "bias", "dy")
    return Job(jax.jit(f), lambda a: tuple(a[n] for n in names), f, ("groupnorm", "groupnorm_backward"))


def _squeeze_job(pass_: str, excite: Callable[..., tuple[Array]]) -> Job:
    f = excite if pass_ == "fwd" else _there_and_back(excite, 5)
    names = ("x", "w1", "b1", "w2", "b2", *(["dy"] if pass_ == "fwd+bwd" else []))
    kernels = ("squeeze_excite", "squeeze_excite_backward")
    return Job(jax.jit(f), lambda a: tuple(a[n] for n in names), f, kernels)


def _our_pair(case: ConvBatchNormCase, pass_: str, setting: Setting, **choice: Any) -> Job:
    """The algorithm "two" is what a user writes without `conv_batchnorm`."""
    last = setting.channels_last
    window = dict(stride=case.stride, padding=case.padding, dilation=case.dilation, groups=case.groups)
    window |= dict(layout=case.layout(last), precision=setting.precision)
    norm = dict(training=pass_ == "fwd", momentum=MOMENTUM, epsilon=EPSILON, activation="relu")

    def pair(x: Array, w: Array, *v: Array) -> tuple[Array, ...]:
        outs = jaxconv.conv_batchnorm(x, w, *v, **window, **norm, **choice)
        return outs if pass_ == "fwd" else outs[:1]

    def two(x: Array, w: Array, *v: Array) -> tuple[Array, ...]:
        z = getattr(jaxconv, f"conv{case.nd}d")(x, w, **window)
        outs = jaxconv.batchnorm(z, *v, channel_axis=-1 if last else 1, **norm)
        return outs if pass_ == "fwd" else outs[:1]

    f = two if choice.get("algorithm") == "two" else pair
    names = ("x", "w", "scale", "bias", "mean", "var")
    kernels = ("conv", "conv_fprop", "conv_statistics", "batchnorm_train", "batchnorm_infer")
    return Job(jax.jit(f), lambda a: tuple(a[n] for n in names), f, kernels)


# ----------------------------------------------------------------------------------------------------------------------
# XLA: lax and jnp as Flax's layers write them


_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "none": lambda z: z,
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "gelu": jax.nn.gelu,
    "tanh": jnp.tanh,
    "silu": jax.nn.silu,
}


def _xla_normalised_backward(
    case: BatchNormConvCase, conv: Callable[..., Array], axes: tuple[int, ...], wgrad: Callable[..., Array]
) -> Job:
    def f(x: Array, dy: Array, w: Array, *v: Array) -> tuple[Array, ...]:
        scale, bias, mean, var = (lax.expand_dims(a, axes) for a in v)
        rstd = lax.rsqrt(var + EPSILON)
        xhat = (x.astype(jnp.float32) - mean) * rstd
        a, back = jax.vjp(_ACTIVATIONS[case.activation], xhat * scale + bias)
        a = a.astype(x.dtype)
        (da,) = jax.linear_transpose(lambda a: conv(a, w), a)(dy)
        (dz,) = back(da.astype(jnp.float32))
        dscale, dbias = jnp.sum(dz * xhat, axes, keepdims=True), jnp.sum(dz, axes, keepdims=True)
        n = x.size // dbias.size
        dx = scale * rstd * (dz - dbias / n - xhat * dscale / n)
        return wgrad(a, dy), dscale.ravel(), dbias.ravel(), dx.astype(x.dtype)

    names = ("x", "dy", "w", "scale", "bias", "mean", "var")
    return Job(jax.jit(f), lambda a: tuple(a[n] for n in names), f, ())


def xla(case: Case, pass_: str, setting: Setting) -> Job:
    last = setting.channels_last
    if isinstance(case, ShortcutCase):
        return dataclasses.replace(_our_shortcut(case, setting, implementation="xla"), explained=None, kernels=())
    if isinstance(case, DgradSumsCase):
        plain = xla(case.conv, "fprop", setting).f

        def back(dy: Array, w: Array, c: Array, signs: Array, x: Array, mean: Array, rstd: Array) -> tuple[Array, ...]:
            (dx,) = jax.linear_transpose(lambda x: plain(x, w), x)(dy)
            dz = jnp.where(formulas.above(signs), dx + c, 0)
            wide, pixels = dz.astype(jnp.float32), tuple(range(case.nd + 1))
            xhat = (x.astype(jnp.float32) - mean) * rstd
            return dz, jnp.sum(wide * xhat, pixels), jnp.sum(wide, pixels)

        return _dgrad_sums_job(back, ())
    if isinstance(case, BatchNormConvCase):
        conv = xla(case.conv, "fprop", setting).f
        axes = tuple(range(case.nd + 1)) if last else (0, *range(2, case.nd + 2))

        def normalise(x: Array, *v: Array) -> Array:
            scale, bias, mean, var = (lax.expand_dims(a, axes) for a in v)
            z = (x.astype(jnp.float32) - mean) * (lax.rsqrt(var + EPSILON) * scale) + bias
            return _ACTIVATIONS[case.activation](z).astype(x.dtype)

        def weights(a: Array, dy: Array, *v: Array) -> Array:
            w = jax.ShapeDtypeStruct(case.w_shape(last), a.dtype)
            return jax.linear_transpose(lambda w: conv(a, w), w)(dy)[0]

        if pass_ == "bwd":
            return _xla_normalised_backward(case, conv, axes, weights)
        return _normalised_job(pass_, (), normalise, lambda a, w, *v: conv(a, w), weights)
    if isinstance(case, ConvBatchNormCase):
        conv = xla(ConvCase(**dataclasses.asdict(case)), "fprop", setting).f
        norm = _xla_batchnorm(BatchNormCase("", case.batch, case.out_channels, case.out_spatial), pass_, last).f

        def pair(x: Array, w: Array, *v: Array) -> tuple[Array, ...]:
            y, *statistics = norm(conv(x, w), *v)
            return jax.nn.relu(y), *statistics

        names = ("x", "w", "scale", "bias", "mean", "var")
        return Job(jax.jit(pair), lambda a: tuple(a[n] for n in names))
    if isinstance(case, ConvCase):
        layout, filter_layout = case.layout(last), case.filter_layout(last)
        # lax names spatial axes as it likes, as long as they agree
        numbers = (layout, filter_layout, layout)
        if case.transposed:
            return _conv_job(
                case,
                pass_,
                lambda x, w: lax.conv_transpose(
                    x, w, case.stride, "SAME", dimension_numbers=numbers, precision=setting.precision
                ),
            )
        return _conv_job(
            case,
            pass_,
            lambda x, w: lax.conv_general_dilated(
                x,
                w,
                case.stride,
                case.padding,
                rhs_dilation=case.dilation,
                dimension_numbers=numbers,
                feature_group_count=case.groups,
                precision=setting.precision,
            ),
        )
    if isinstance(case, DenseCase):
        activation = _ACTIVATIONS[case.activation]

        def product(x: Array, w: Array) -> Array:
            return jnp.dot(x, w, precision=setting.precision)

        def layer(x: Array, w: Array, b: Array) -> tuple[Array, Array]:
            z = product(x, w) + b
            return activation(z), z

        return _dense_job(pass_, layer, product)
    if isinstance(case, DenseGradientCase):

        def gradient(dy: Array, w: Array, z: Array) -> tuple[Array, Array]:
            (dz,) = jax.vjp(_ACTIVATIONS[case.activation], z)[1](jnp.dot(dy, w.T, precision=setting.precision))
            return dz, jnp.sum(dz, 0)

        return _dense_gradient_job(gradient)
    if isinstance(case, PoolCase):
        nd = len(case.spatial)

        def each(value: Any, other: Any) -> tuple[Any, ...]:
            return (other, *(value,) * nd, other) if last else (other, other, *(value,) * nd)

        sizes = each(case.window, 1), each(case.stride, 1), each(case.padding, (0, 0))
        return _pool_job(pass_, lambda x: lax.reduce_window(x, -jnp.inf, lax.max, *sizes))
    if isinstance(case, SqueezeExciteCase):
        return _xla_squeeze_excite(pass_)
    if isinstance(case, LayerNormCase):
        return _xla_layernorm(pass_)
    if isinstance(case, GroupNormCase):
        return _xla_groupnorm(case, pass_)
    return _xla_batchnorm(case, pass_, last)


def _xla_groupnorm(case: GroupNormCase, pass_: str) -> Job:
    def norm(x: Array, scale: Array, bias: Array) -> tuple[Array]:
        # Flax's GroupNorm with its default use_fast_variance, and silu of its result
        width, inner = case.channels // case.groups, tuple(range(1, x.ndim - 1))
        wide = x.reshape(*x.shape[:-1], case.groups, width).astype(jnp.float32)
        mean, square = (jnp.mean(a, (*inner, x.ndim)) for a in (wide, lax.square(wide)))
        var = jnp.maximum(0.0, square - lax.square(mean))
        mean, var = (jnp.expand_dims(jnp.repeat(a, width, -1), inner) for a in (mean, var))
        y = (x - mean) * (lax.rsqrt(var + EPSILON) * scale) + bias
        return (jax.nn.silu(y.astype(x.dtype)),)

    return dataclasses.replace(_group_job(pass_, norm), explained=None, kernels=())


def _xla_squeeze_excite(pass_: str) -> Job:
    def excite(x: Array, w1: Array, b1: Array, w2: Array, b2: Array) -> tuple[Array]:
        # As EfficientNets in Flax: 1x1 convolutions, whose parameters become x's type
        def conv(x: Array, w: Array, b: Array) -> Array:
            w, b = w[None, None].astype(x.dtype), b.astype(x.dtype)
            numbers = ("NHWC", "HWIO", "NHWC")
            return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers) + b.reshape(1, 1, 1, -1)

        s = jax.nn.silu(conv(x.mean((1, 2), keepdims=True), w1, b1))
        return (x * jax.nn.sigmoid(conv(s, w2, b2)),)

    return dataclasses.replace(_squeeze_job(pass_, excite), explained=None, kernels=())


def _xla_layernorm(pass_: str) -> Job:
    def norm(x: Array, scale: Array, bias: Array) -> tuple[Array]:
        # Flax's LayerNorm with its default use_fast_variance
        wide = x.astype(jnp.float32)
        mean, square = (jnp.mean(a, -1, keepdims=True) for a in (wide, lax.square(wide)))
        var = jnp.maximum(0.0, square - lax.square(mean))
        return (((x - mean) * (lax.rsqrt(var + EPSILON) * scale) + bias).astype(x.dtype),)

    return dataclasses.replace(_group_job(pass_, norm), explained=None, kernels=())


def _xla_batchnorm(case: BatchNormCase, pass_: str, last: bool) -> Job:
    rank = len(case.spatial) + 2
    axis = rank - 1 if last else 1
    axes = tuple(i for i in range(rank) if i != axis)

    def spread(v: Array) -> Array:
        return jnp.expand_dims(v, axes)

    def normalize(x: Array, scale: Array, bias: Array, mean: Array, var: Array) -> Array:
        # Flax's _normalize
        y = (x - spread(mean)) * (lax.rsqrt(spread(var) + EPSILON) * spread(scale)) + spread(bias)
        return y.astype(x.dtype)

    def statistics(x: Array) -> tuple[Array, Array]:
        # Flax's _compute_stats with use_fast_variance, its default
        wide = x.astype(jnp.float32)
        mean = jnp.mean(wide, axes)
        return mean, jnp.maximum(0.0, jnp.mean(lax.square(wide), axes) - lax.square(mean))

    def train(x: Array, scale: Array, bias: Array, running_mean: Array, running_var: Array) -> tuple[Array, ...]:
        mean, var = statistics(x)
        new_mean = MOMENTUM * running_mean + (1 - MOMENTUM) * mean
        new_var = MOMENTUM * running_var + (1 - MOMENTUM) * var
        return normalize(x, scale, bias, mean, var), new_mean, new_var

    def train_relu(*args: Array) -> tuple[Array, ...]:
        y, *stats = train(*args)
        return jax.nn.relu(y), *stats

    def train_add_relu(x: Array, scale: Array, bias: Array, residual: Array, *running: Array) -> tuple[Array, ...]:
        y, *stats = train(x, scale, bias, *running)
        return jax.nn.relu(y + residual), *stats

    names = ("x", "scale", "bias", "mean", "var")
    if pass_ == "bwd":
        # Autodiff alone would save float32 copies of x for a backward pass that is a program of its own; in a training
        # step XLA recomputes them. So here it is the formula.
        def backward(x: Array, dy: Array, scale: Array, mean: Array, rstd: Array) -> tuple[Array, ...]:
            xhat = (x.astype(jnp.float32) - spread(mean)) * spread(rstd)
            dz = dy.astype(jnp.float32)
            dbias, dscale = jnp.sum(dz, axes), jnp.sum(dz * xhat, axes)
            n = case.reduced
            dx = spread(scale * rstd) * (dz - spread(dbias / n) - xhat * spread(dscale / n))
            return dx.astype(x.dtype), dscale, dbias

        def arguments(a: Arrays) -> tuple[Array, ...]:
            mean, var = jax.jit(statistics)(a["x"])
            return a["x"], a["dy"], a["scale"], mean, lax.rsqrt(var + EPSILON)

        return Job(jax.jit(backward), arguments)
    if pass_ == "fwd+bwd":
        return Job(jax.jit(_there_and_back(train_relu, 3)), lambda a: tuple(a[n] for n in (*names, "dy")))
    if pass_ == "residual":
        return Job(jax.jit(_there_and_back(train_add_relu, 4)), lambda a: tuple(a[n] for n in RESIDUAL))
    f = train if pass_ == "fwd" else lambda *args: (normalize(*args),)
    return Job(jax.jit(f), lambda a: tuple(a[n] for n in names))

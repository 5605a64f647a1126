"""ScaledConvProblem: a convolution of 8-bit numbers, and what makes of its sums 8-bit numbers again."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxconv._problem.conv import ConvProblem, ShortcutConvProblem
from jaxconv._problem.conv_integer import IntegerConvProblem
from jaxconv._problem.dense import DenseProblem
from jaxconv._problem.parse import as_mask, epilogue, shapes

EIGHT_BIT_INTEGERS = ("int8", "uint8")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
EIGHT_BITS = (*EIGHT_BIT_INTEGERS, *FLOAT8)
SCALED_RESULTS = (*EIGHT_BITS, "bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True)
class ScaledConvProblem(ShortcutConvProblem):
    """A convolution of 8-bit x and w, perhaps with a shortcut: see reference.conv_scaled. `dtype` is x's."""

    w_dtype: str = ""
    out_dtype: str = ""
    scaled: bool = True  # whether a scale a channel is given
    bias_dtype: str = "float32"  # int32: it is added to the sums of integers
    residual_dtype: str | None = None
    residual_scaled: bool = False
    out_scaled: bool = False
    product: bool = False  # a dense layer, of images of one pixel: XLA has a product for it

    @property
    def residual(self) -> bool:
        return self.residual_dtype is not None

    @property
    def shortcut(self) -> ScaledConvProblem:
        return self.as_shortcut(self.sums())

    def sums(self) -> ScaledConvProblem:
        """The convolution of x and w alone, with nothing behind it."""
        nothing: dict[str, Any] = dict(scaled=False, residual_dtype=None, residual_scaled=False, out_scaled=False)
        nothing |= dict(shortcut_channels=0, shortcut_spatial=(), shortcut_stride=())
        return dataclasses.replace(self.bare(), out_dtype=self.sums_dtype, **nothing)

    @property
    def of_integers(self) -> bool:
        return self.dtype in EIGHT_BIT_INTEGERS

    @property
    def sums_dtype(self) -> str:
        return "int32" if self.of_integers else "float32"

    @property
    def beyond(self) -> str | None:
        """Which number native code cannot represent, or None."""
        return self.integer.beyond or (self.shortcut.integer.beyond if self.has_shortcut else None)

    @property
    def integer(self) -> IntegerConvProblem:
        """The sums of integers, of extents that are numbers."""
        nd, last = self.nd, self.channels_last
        images = (0, nd + 1, *range(1, nd + 1)) if last else tuple(range(nd + 2))
        filters = (nd + 1, nd, *range(nd)) if last else tuple(range(nd + 2))
        assert not isinstance(self.padding, str)
        ones = (1,) * nd
        return IntegerConvProblem(
            self.name,
            self.dtype,
            self.w_dtype,
            self.sums_dtype,
            self.x_shape,
            self.w_shape,
            self.stride,
            self.padding,
            ones,
            self.dilation,
            images,
            filters,
            images,
            self.groups,
            1,
            implementation="xla" if self.implementation == "xla" else None,
        )

    def __str__(self) -> str:
        if self.product:
            text = " + ".join([f"{self.batch}x{self.in_channels}x{self.out_channels} {self.dtype}", *epilogue(self)])
        else:
            text = super().__str__()
        if self.bias and self.bias_dtype == "int32":
            text = text.replace(" + bias", " + bias int32", 1)
        if self.w_dtype != self.dtype:
            text = text.replace(self.dtype, f"{self.dtype}*{self.w_dtype}", 1)
        parts = [text, *(["scale"] if self.scaled else [])]
        parts += [f"residual {self.residual_dtype}"] if self.residual_dtype else []
        return " + ".join(parts) + f" -> {self.out_dtype}"

    @classmethod
    def of(
        cls,
        name: str,
        nd: int,
        x: jax.Array,
        w: jax.Array,
        b: jax.Array | None,
        *,
        residual: jax.Array | None,
        scale: jax.Array | None,
        residual_scale: jax.Array | None,
        out_scale: jax.Array | None,
        out_dtype: Any,
        **options: Any,
    ) -> ScaledConvProblem:
        """Of the arguments of `jaxconv.conv2d`, its arrays as `as_mask` and `scale_of` give them."""
        arrays = _Arrays(name, x, w, b, residual, scale, residual_scale, out_scale, out_dtype)
        arrays.check_types(options["return_preactivation"])
        x, w, b, residual = arrays.floats()
        p = ConvProblem.infer(name, nd, x, w, b, residual=residual, **options)
        return cls._with(p, arrays)

    @classmethod
    def of_dense(
        cls,
        x: jax.Array,
        w: jax.Array,
        b: jax.Array | None,
        *,
        residual: jax.Array | None,
        scale: jax.Array | None,
        residual_scale: jax.Array | None,
        out_scale: jax.Array | None,
        out_dtype: Any,
        activation: Any,
        return_preactivation: bool,
        precision: Any,
        algorithm: Any,
        implementation: Any,
    ) -> ScaledConvProblem:
        """The same of those of `jaxconv.dense`: rows are images of one pixel."""
        arrays = _Arrays("dense", x, w, b, residual, scale, residual_scale, out_scale, out_dtype)
        arrays.check_types(return_preactivation)
        seen = shapes(x=x, w=w, b=b, residual=residual)
        like_x, like_w, like_b, _ = arrays.floats()
        p = DenseProblem.infer(
            "dense",
            like_x,
            like_w,
            like_b,
            None,
            alpha=1.0,
            beta=1.0,
            activation=activation,
            return_preactivation=False,
            precision=precision,
            algorithm=algorithm,
            implementation=implementation,
        )
        if p.bias == "row":
            raise ValueError(
                f"dense: b has shape {like_b.shape}, expected ({p.n},), one per column, or a number, for 8-bit x and "
                f"w. {seen}"
            )
        y_shape = (*x.shape[:-1], p.n)
        if residual is not None and residual.shape != y_shape:
            raise ValueError(
                f"dense: residual has shape {residual.shape}, expected {y_shape}, that of the result. {seen}"
            )
        return dataclasses.replace(cls._with(ConvProblem.of_product(p), arrays), product=True)

    @classmethod
    def _with(cls, p: ConvProblem, given: _Arrays) -> ScaledConvProblem:
        """The sums of p, and what follows them."""
        given.check_rest(p.out_channels)
        return cls(
            **{**vars(p), "dtype": given.x.dtype.name},
            w_dtype=given.w.dtype.name,
            out_dtype=given.result,
            scaled=given.scale is not None,
            bias_dtype="float32" if given.b is None else given.b.dtype.name,
            residual_dtype=None if given.residual is None else given.residual.dtype.name,
            residual_scaled=given.residual_scale is not None,
            out_scaled=given.out_scale is not None,
        )


@dataclasses.dataclass(frozen=True)
class _Arrays:
    """The arguments that convolutions and dense layers of 8-bit numbers share, and the errors about them."""

    name: str
    x: jax.Array
    w: jax.Array
    b: jax.Array | None
    residual: jax.Array | None
    scale: jax.Array | None
    residual_scale: jax.Array | None
    out_scale: jax.Array | None
    out_dtype: Any

    @property
    def _raw(self) -> bool:
        """Whether the sums of integers are asked for, and no more."""
        return self.x.dtype.name in EIGHT_BIT_INTEGERS and self.scale is None

    @property
    def result(self) -> str:
        return _out_dtype(self.name, self.out_dtype, self._raw, self.out_scale is not None, self.x.dtype.name)

    def check_types(self, return_preactivation: bool) -> None:
        name, x, w = self.name, self.x, self.w
        for argument, array in (("x", x), ("w", w)):
            if array.dtype.name not in EIGHT_BITS:
                raise TypeError(f"{name}: {argument} has dtype {array.dtype.name}, expected one of {_list(EIGHT_BITS)}")
        if (x.dtype.name in EIGHT_BIT_INTEGERS) != (w.dtype.name in EIGHT_BIT_INTEGERS):
            raise TypeError(
                f"{name}: x and w have dtypes {x.dtype.name} and {w.dtype.name}, expected two of "
                f"{_list(EIGHT_BIT_INTEGERS)} or two of {_list(FLOAT8)}"
            )
        if return_preactivation:
            raise ValueError(f"{name}: return_preactivation=True, expected False: x has 8 bits, and no derivative")
        others = {"b": self.b, "residual": self.residual, "out_scale": self.out_scale}
        given = [argument for argument, value in others.items() if value is not None]
        if self.residual_scale is not None and self.residual is None:
            raise ValueError(f"{name}: residual_scale was given, expected a residual with it")
        if self._raw and (given or self.result != "int32"):
            asked = f"out_dtype={self.result}" if not given else " and ".join(given)
            raise ValueError(f"{name}: {asked} was given without scale=, expected scale= with it: sums are int32")

    def floats(self) -> list[Any]:
        """x, w, b and residual as what a problem of float32 arrays would be given."""
        arrays = self.x, self.w, self.b, self.residual
        return [None if v is None else jax.ShapeDtypeStruct(v.shape, np.float32) for v in arrays]

    def check_rest(self, out_channels: int) -> None:
        name, b, residual, scale = self.name, self.b, self.residual, self.scale
        if b is not None and b.dtype not in (np.float32, np.int32):
            raise TypeError(
                f"{name}: b has dtype {b.dtype.name}, expected float32, which is added to scaled sums, or int32, which "
                "is added to sums of integers"
            )
        if b is not None and b.dtype == np.int32 and self.x.dtype.name not in EIGHT_BIT_INTEGERS:
            raise TypeError(f"{name}: b has dtype int32, expected float32: sums of float8 are float32")
        if residual is not None and residual.dtype.name not in SCALED_RESULTS:
            raise TypeError(
                f"{name}: residual has dtype {residual.dtype.name}, expected one of {_list(SCALED_RESULTS)}"
            )
        if scale is not None and scale.shape not in ((), (out_channels,)):
            raise ValueError(
                f"{name}: scale has shape {scale.shape}, expected ({out_channels},), one per output channel, or a "
                f"number. {shapes(x=self.x, w=self.w)}"
            )


def sums_of_integers(p: IntegerConvProblem) -> ScaledConvProblem | str:
    """A convolution of integers as the sums of one of 8-bit numbers, or a sentence that says why it is none.

    It is channels last: of lhs with its axes in the order of N, the spatial ones and C, and of rhs in that of the
    spatial ones, C and K.
    """
    if p.lhs_dtype not in EIGHT_BIT_INTEGERS or p.dtype != "int32":
        return f"8-bit tensor cores sum up int8 and uint8 in int32, got {p.lhs_dtype} in {p.dtype}"
    if p.batch_groups > 1 or set(p.lhs_dilation) - {1}:
        return "8-bit tensor cores have neither batch groups nor a dilation of x"
    if p.nd == 0:
        return "it has no spatial dimension"
    return ScaledConvProblem(
        name=p.name,
        dtype=p.lhs_dtype,
        w_dtype=p.rhs_dtype,
        out_dtype=p.dtype,
        scaled=False,
        batch=p.batch,
        in_channels=p.group_c * p.groups,
        out_channels=p.out_channels,
        groups=p.groups,
        in_spatial=p.in_spatial,
        filter=p.filter,
        out_spatial=p.out_spatial,
        stride=p.stride,
        padding=p.padding,
        dilation=p.rhs_dilation,
        channels_last=True,
        precision=(lax.Precision.DEFAULT, lax.Precision.DEFAULT),
        implementation=p.implementation,
        algorithm=p.algorithm,
    )


def _list(names: tuple[str, ...]) -> str:
    return ", ".join(names)


def _out_dtype(name: str, given: Any, raw: bool, rescaled: bool, x: str) -> str:
    """The result's type: sums of integers as they are, x's type where a scale leads to it, else float32."""
    if given is None:
        return "int32" if raw else x if rescaled else "float32"
    try:
        result = jnp.dtype(given).name
    except TypeError:
        result = repr(given)
    expected = (*SCALED_RESULTS, "int32")
    if result not in expected or (result == "int32" and not raw):
        where = "" if raw else ", with a scale or of float8"
        raise ValueError(
            f"{name}: out_dtype={result} is unknown{where}, expected one of "
            f"{_list(expected if raw else SCALED_RESULTS)}"
        )
    return result


def scale_of(where: str, argument: str, value: Any, scalar: bool) -> jax.Array:
    """A scale as a float32 array: a positive finite number, or with not `scalar` one a channel.

    What has a value while the function is traced is confirmed.
    """
    # Confirmed before it becomes an array, which is a tracer under jit.
    if isinstance(value, int) and abs(value) >= 2**128:  # larger than float32's numbers, perhaps than float64's
        value = math.inf if value > 0 else -math.inf
    known = None if isinstance(value, jax.core.Tracer) else value
    if isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool):
        with np.errstate(over="ignore", under="ignore"):
            value = np.float32(value)
    array = as_mask(where, argument, value)
    if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.itemsize > 4:
        raise TypeError(f"{where}: {argument} has dtype {array.dtype.name}, expected float32")
    if scalar and array.shape != ():
        raise ValueError(f"{where}: {argument} has shape {array.shape}, expected (): a number")
    if known is not None:
        seen = np.asarray(value, np.float32)
        wrong = np.flatnonzero(~(np.isfinite(seen) & (seen > 0)))
        if wrong.size:
            first, rounded = np.asarray(known).flat[wrong[0]], seen.flat[wrong[0]]
            element = first if first == rounded or first != first else f"{first}, {rounded} in float32"
            raise ValueError(f"{where}: {argument} has an element {element}, expected positive finite numbers")
    return array.astype(jnp.float32)

"""Scales from batches: which batches are taken, what is counted in them, what the quantised layers lose on them."""

from __future__ import annotations

import dataclasses
import enum
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from jaxconv._core.graph import Array, Constant, Node, Value
from jaxconv.quantize.gain import leave_wide_what_loses
from jaxconv.quantize.layers import Layer, Reading, identity_of, never_negative
from jaxconv.quantize.program import Evaluation, Narrowing
from jaxconv.quantize.report import QuantizedLayer
from jaxconv.quantize.scales import LEAST, Histogram, Scale, statistics

QuantizedDType = Literal["int8", "float8_e4m3fn"]
DTYPES = get_args(QuantizedDType)


@dataclasses.dataclass(frozen=True)
class Program:
    """A frozen program of some inputs' types: which arguments are bound, and their names."""

    closed: ClosedJaxpr
    bound: Sequence[bool]
    names: Sequence[str]


# ----------------------------------------------------------------------------------------------------------------------
# What is asked for


def is_number(leaf: Any) -> bool:
    """Whether a leaf of a frozen function's inputs is a Python number, which is traced as jax.jit does it.

    A bool or a member of an enum is none: it says which program is meant.
    """
    numbers = isinstance(leaf, (int, float, complex)) and not isinstance(leaf, np.generic)
    return numbers and not isinstance(leaf, (bool, enum.Enum))


def check_options(quantize: Any, calibrate: Any, wide: Any) -> None:
    """Confirms freeze's arguments, before anything is read."""
    if quantize is None:
        for name, value in (("calibrate", calibrate), ("wide", wide)):
            if value is not None and not (isinstance(value, tuple) and not value):
                raise ValueError(f"freeze: {name} was given without quantize, expected quantize= with it")
        return
    if not isinstance(quantize, str) or quantize not in DTYPES:
        raise ValueError(f"freeze: quantize={quantize!r} is unknown, expected one of {', '.join(DTYPES)}")
    if calibrate is None:
        raise ValueError(f"freeze: quantize={quantize!r} was given without calibrate, expected batches of inputs")
    if isinstance(wide, str) or not np.iterable(wide) or not all(isinstance(name, str) for name in wide):
        raise TypeError(f"freeze: wide={wide!r}, expected a sequence of layers' names")


def as_inputs(batch: Any) -> tuple[Any, ...]:
    return batch if isinstance(batch, tuple) else (batch,)


def checked(calibrate: Any) -> list[Any]:
    """The batches, each of them confirmed: alike but for their first extent, and finite."""
    if hasattr(calibrate, "shape"):
        raise TypeError(
            f"freeze: calibrate is an array {list(calibrate.shape)}, expected an iterable of batches: [array] is one"
        )
    if isinstance(calibrate, (str, dict)) or not isinstance(calibrate, Iterable):
        raise TypeError(f"freeze: calibrate is a {type(calibrate).__name__}, expected an iterable of batches")
    batches = list(calibrate)
    if not batches:
        raise ValueError("freeze: calibrate has no batches, expected at least one")
    first = _types(batches[0])
    for i, batch in enumerate(batches):
        types = _types(batch)
        if types != first:
            got = next((t for t in types.items() if t not in first.items()), None)
            got = got or next(t for t in first.items() if t not in types.items())
            name = got[0]
            raise ValueError(
                f"freeze: calibration batch {i} differs from the first one: {name or 'it'} is "
                f"{types.get(name, 'missing')}, expected {first.get(name, 'nothing there')}"
            )
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
            _check_numbers(i, jax.tree_util.keystr(path), leaf)
    return batches


def _types(batch: Any, values: bool = False) -> dict[str, str]:
    """The type of each leaf, without its first extent; with `values` a Python number itself."""

    def text(leaf: Any) -> str:
        if is_number(leaf) and not values:
            return f"a Python {type(leaf).__name__}"
        if not hasattr(leaf, "shape"):
            return repr(leaf)
        rest = "".join(f", {extent}" for extent in leaf.shape[1:])
        return f"{leaf.dtype}[{'N' if leaf.shape else ''}{rest}]"

    return {jax.tree_util.keystr(path): text(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(batch)}


def _check_numbers(i: int, name: str, leaf: Any) -> None:
    where = f"freeze: calibration batch {i}{' ' + name if name else ''}"
    if isinstance(leaf, (jax.core.Tracer, jax.ShapeDtypeStruct)):
        raise TypeError(f"{where} is a {type(leaf).__name__}, expected an array with numbers")
    if is_number(leaf):
        leaf = np.asarray(leaf)
    if not hasattr(leaf, "shape"):
        return
    if 0 in leaf.shape:
        raise ValueError(f"{where} has the shape {tuple(leaf.shape)}, expected no extent of 0")
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        if not isinstance(leaf, jax.Array):  # finite as what the function gets
            with np.errstate(over="ignore"):
                leaf = np.asarray(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype))
        if not bool((jnp if isinstance(leaf, jax.Array) else np).isfinite(leaf).all()):
            raise ValueError(f"{where} has NaN or infinity, expected finite numbers")


def check_weights(weights: Mapping[str, Array]) -> None:
    """Refuses weights that are no numbers: an 8-bit filter of such is none."""
    inexact = {name: a for name, a in weights.items() if a.dtype.itemsize > 1 and jnp.issubdtype(a.dtype, jnp.inexact)}
    finite = jax.device_get({name: jnp.isfinite(a).all() for name, a in inexact.items()})
    for name, is_finite in finite.items():
        if not is_finite:
            raise ValueError(f"freeze: weight {name} has NaN or infinity, expected finite numbers")


def shown(batches: Sequence[Any], what: str) -> Iterator[Any]:
    """The batches, with a bar on a terminal where tqdm is installed."""
    if sys.stderr.isatty():
        try:
            from tqdm import tqdm
        except ImportError:
            pass
        else:
            yield from tqdm(batches, desc=what, unit="batch", file=sys.stderr)
            return
    yield from batches


# ----------------------------------------------------------------------------------------------------------------------
# What is counted


def _merged(narrowing: Narrowing, bound: Sequence[Array], free: Sequence[Array]) -> dict[Value, Any]:
    return dict(zip([*narrowing.reading.bound, *narrowing.reading.free], [*bound, *free], strict=True))


def _evaluated(narrowing: Narrowing, bound: Sequence[Array], free: Sequence[Array]) -> dict[Value, Any]:
    """The values of the program that was read."""
    values = _merged(narrowing, bound, free)
    for node in narrowing.reading.graph.nodes:
        values.update(zip(node.outputs, node.evaluate([_read(values, v) for v in node.inputs]), strict=True))
    return values


def observed(narrowing: Narrowing, bound: Sequence[Array], free: Sequence[Array]) -> tuple[list[Any], list[Array]]:
    """Of each point the statistics, and of each 8-bit layer whether its filter and bias are finite."""
    values = _evaluated(narrowing, bound, free)
    points = [statistics(jnp.asarray(_read(values, v))) for v in narrowing.points]
    finite = []
    for layer in narrowing.layers.values():
        parts = [v for v in (layer.w, layer.bias) if v is not None]
        finite.append(jnp.stack([jnp.isfinite(_read(values, v)).all() for v in parts]).all())
    return points, finite


def _read(values: dict[Value, Any], v: Value) -> Any:
    return v.value if isinstance(v, Constant) and v not in values else values[v]


def noise(narrowing: Narrowing, scales: Sequence[Scale], bound: Sequence[Array], free: Sequence[Array]) -> list[Array]:
    """Of each layer the sums of squares of its results, and of what they are off by where 8-bit layers are before; both
    divided by the square of the largest one."""
    wide = _evaluated(narrowing, bound, free)
    evaluation = Evaluation(narrowing, scales, _merged(narrowing, bound, free))
    evaluation.run()

    def of(v: Value) -> Array:
        if not jnp.issubdtype(v.dtype, jnp.floating):
            return jnp.zeros(2)
        y = jnp.asarray(wide[v], jnp.float32)
        off = jnp.asarray(evaluation.wide(v), jnp.float32) - y
        largest = jnp.maximum(jnp.max(jnp.abs(y)), np.float32(LEAST))  # squares of all sizes are float32's
        return jnp.stack([jnp.sum((y / largest) ** 2), jnp.sum((off / largest) ** 2)])

    def result(node: Node) -> Value:  # of a loop, the first one of numbers
        return next((v for v in node.outputs if jnp.issubdtype(v.dtype, jnp.floating)), node.outputs[0])

    layers = {layer.node for layer in narrowing.reading.layers}
    return [of(result(node)) for node in narrowing.reading.graph.nodes if node in layers]


# ----------------------------------------------------------------------------------------------------------------------
# All of it


def calibrated(
    dtype: str,
    wide: Sequence[str],
    batches: Sequence[Any],
    program_of: Callable[[Any], tuple[Program, list[Array]]],
    bound: Sequence[Array],
) -> tuple[list[QuantizedLayer], list[Scale]]:
    """The layers and scales. `program_of`: a batch's program and its arrays."""
    narrowings: dict[int, tuple[Program, Narrowing, Callable[..., Any]]] = {}

    def narrowing_of(batch: Any) -> tuple[Narrowing, Callable[..., Any], list[Array]]:
        program, arrays = _taken(program_of, batch)
        if id(program.closed) not in narrowings:
            reading = Reading(program.closed, program.bound, program.names)
            reading.choose(wide)
            leave_wide_what_loses(reading)
            narrowing = Narrowing(reading)
            narrowings[id(program.closed)] = program, narrowing, jax.jit(lambda *given: observed(narrowing, *given))
        _, narrowing, observe = narrowings[id(program.closed)]
        return narrowing, observe, arrays

    first, _, arrays = narrowing_of(batches[0])
    if any(isinstance(a, jax.core.Tracer) for a in bound):
        raise TypeError("freeze: quantize got bound arrays that are being traced, expected arrays with numbers")
    histograms = [Histogram() for _ in first.points]
    for batch in shown(batches, "calibrate"):
        narrowing, observe, arrays = narrowing_of(batch)
        if [_alike(layer) for layer in narrowing.reading.layers] != [_alike(layer) for layer in first.reading.layers]:
            raise ValueError("freeze: calibration batches have different layers, expected batches of the same pixels")
        points, finite = jax.device_get(observe(bound, arrays))
        for layer, is_finite in zip(narrowing.layers.values(), finite, strict=True):
            if not is_finite:
                raise ValueError(f"freeze: the weights of layer {layer.name} are not finite, expected finite numbers")
        for histogram, point in zip(histograms, points, strict=True):
            histogram.add(*point)
    scales = [
        _scale(histogram, v, layer.name, dtype)
        for histogram, v, layer in zip(histograms, first.points, first.layer_at, strict=True)
    ]
    narrowing, _, arrays = narrowing_of(batches[0])
    sums = jax.device_get(jax.jit(lambda *given: noise(narrowing, scales, *given))(bound, arrays))
    return _records(dtype, narrowing, scales, sums), scales


def _taken(program_of: Callable[[Any], tuple[Program, list[Array]]], batch: Any) -> tuple[Program, list[Array]]:
    try:
        return program_of(batch)
    except Exception as error:  # whatever the function's libraries raise
        text = str(error).strip().split("\n")[0]
        if text.startswith("freeze: "):
            raise
        types = list(_types(batch, values=True).values())
        most = 8  # a batch of lists has as many as it has numbers
        named = ", ".join(types[:most]) + f" and {len(types) - most} others" * (len(types) > most)
        raise ValueError(f"freeze: the function does not take the calibration batches ({named}): {text}") from error


def _alike(layer: Layer) -> tuple[Any, ...]:
    return *identity_of(layer), layer.why


def _scale(histogram: Histogram, v: Value, layer: str, dtype: str) -> Scale:
    if not histogram.finite:
        raise ValueError(
            f"freeze: layer {layer} reads or makes NaN or infinity on the calibration batches, expected finite numbers"
        )
    unsigned = dtype == "int8" and histogram.least >= 0 and never_negative(v)
    return histogram.scale("uint8" if unsigned else dtype)


def _why(index: int | None) -> str:
    if index is None:
        return "its result is wide: no 8-bit layer reads it"
    return "its input and its result have 8 bits"


def _records(
    dtype: str, narrowing: Narrowing, scales: Sequence[Scale], sums: Sequence[np.ndarray]
) -> list[QuantizedLayer]:
    by_node = iter(sums)
    records, seen = [], {}
    added = {pair.other.node: pair.last.name for pair in narrowing.pairs(scales)}
    for layer in narrowing.reading.layers:
        if layer.node not in seen:
            seen[layer.node] = next(by_node)
        signal, error = map(float, seen[layer.node])
        ratio = math.nan if math.isnan(signal) or math.isnan(error) else math.inf
        if signal > 0 and error > 0:
            ratio = 10 * math.log10(signal / error)
        narrow = not layer.why
        x, y = layer.inside or (layer.x.dtype.name, layer.y.dtype.name)
        index = narrowing.index.get(layer.y) if narrow else None
        if narrow:
            x = scales[narrowing.index[narrowing.source(layer.x)]].dtype
        if index is not None:
            y = scales[index].dtype
        why = layer.why or _why(index)
        if layer.node in added:
            y, why = "int32" if dtype == "int8" else "float32", f"its sums are added in {added[layer.node]}"
        records.append(QuantizedLayer(layer.name, layer.what, layer.weight, layer.filter, narrow, x, y, ratio, why))
    return records

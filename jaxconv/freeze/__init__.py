"""`freeze`: a model and its variables as a function of the inputs alone, with what only they ask for done once.

The function is traced and its layers are recognised as by `accelerate`; the program is then split (split) into what
follows from the variables alone, which is evaluated when it is first needed, and the rest, which is one jitted function
of these arrays and the inputs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic

import jax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from jaxconv import quantize
from jaxconv._core import compat, sharding
from jaxconv._core.graph import Array, Value
from jaxconv._core.types import R
from jaxconv._tools import cost
from jaxconv._tools.launches import graph_options
from jaxconv.accelerate import Report, Results, Traced, check, trace, untouched
from jaxconv.accelerate.report import LISTENER, heard_from_now_on, unheard
from jaxconv.accelerate.state import Arguments, is_array, is_graph_node, nnx_updates, with_own_objects
from jaxconv.freeze.split import Split
from jaxconv.freeze.training import evidence, says_batchnorm
from jaxconv.quantize import Quantization, QuantizedDType, check_options, checked
from jaxconv.quantize.calibrate import is_number

__all__ = ["Frozen", "Quantization", "freeze"]

# Floating-point operations of a call below which it waits for its launches: those of ResNet-50 for 24 images, where a
# launch is some 15 us of an H200. Above, XLA's update of a graph before each call may cost more than it saves.
SMALL_FLOPS = 2e11


def options_of(flops: float) -> dict[str, str | int]:
    """The compiler options of a call of so many operations; 0 says nothing of its size."""
    return graph_options() if 0 < flops <= SMALL_FLOPS else {}


def freeze(
    f: Callable[..., R],
    /,
    *args: Any,
    quantize: QuantizedDType | None = None,
    calibrate: Iterable[Any] | None = None,
    wide: Sequence[str] = (),
    **kwargs: Any,
) -> Frozen[R]:
    """f with its first arguments bound, as by `functools.partial`. All that depends on these alone is computed once.

    For inference::

        predict = jaxconv.freeze(model.apply, variables, train=False)    # flax.linen
        predict = jaxconv.freeze(model)                                   # a flax.nnx module, any callable pytree
        logits = predict(images)

    Equivalent JAX code: `jax.jit(functools.partial(jaxconv.accelerate(f), *args, **kwargs))`, with the same numbers up
    to rounding. At the first call, and only then, batch-norms are folded into filters and biases, and weights are cast
    and put into the order in which kernels read them. For this the program is split in two. One part depends on the
    bound arrays alone, and is evaluated at the first call. The rest is jitted, with the first part's results as
    arguments. Operations that only repeat smaller arrays (a bias over all pixels) stay in the rest.

    Of a call's arguments, arrays and Python numbers are traced, as by `jax.jit`; everything else (a bool, a str, an
    enum's member) is static: a new value compiles another program. Bind a number that decides a shape.

    Args:
      f: a pure function, or a callable object that holds its arrays: a flax.nnx module, a pytree.
      args, kwargs: the weights: f's first arguments, and arguments by name, with arrays anywhere in them. Everything
        else in them is passed to f unchanged.
      quantize: "int8" or "float8_e4m3fn": convolutions and dense layers compute with such numbers, see below. None
        keeps f's types. If f has an argument named quantize, calibrate or wide, bind it with functools.partial.
      calibrate: with `quantize`, some batches of inputs: a finite iterable of arrays, or of tuples of f's other
        arguments. A few hundred images like those that the model will see. They are held until freeze returns.
      wide: names of layers that keep their type: names in `report` or in `quantization`, or parts of such a name
        ("stage1", "block2/conv1").

    Returns:
      A `Frozen`: a function of f's other arguments, of any shapes. It is jitted, and can be called inside jit, vmap,
      grad, a mesh and jax.export. Its weights are constants of such a program, or arguments with `Frozen.apply`.
      Called by itself on a GPU with a small batch, its launches are captured in CUDA graphs. Each weight costs the host
      time in every call; `jax.jit(frozen, compiler_options=jaxconv.graph_options())` has the shortest calls. The bound
      arrays are kept, for inputs of other shapes. If you bind NumPy arrays (`jax.device_get(variables)`), the device
      holds only the folded ones.

    Raises:
      TypeError: if f is no function, a generator or a coroutine, or a bound argument is a jax.ShapeDtypeStruct. When
        called, if an argument is an nnx object, or neither an array nor hashable, or if a result holds arrays and is no
        pytree.
      OverflowError: when called, if an int does not fit into JAX's integers.
      ValueError: when called, if f is not an inference: it changes a bound object (running statistics, a counter), has
        a batch-norm in training mode, draws random numbers from a bound key or from a key that it makes (dropout; a key
        among the inputs is fine), or has effects other than jax.debug's. With `quantize` this is raised at once. It is
        also raised for an unknown type, for no batches, for a batch that differs from the first one in more than first
        extents and Python numbers, for arrays without elements, for NaN and infinity in batches or weights, and for a
        name in `wide` that no layer has.

    A quantised layer is `jaxconv.conv2d` or `jaxconv.dense` of 8-bit x and w. A filter has a scale per output channel.
    An array between layers has one scale, with the least mean squared error on the calibration batches. With "int8" an
    array that is never negative (behind a relu) is uint8. Residual adds of convolutions, max-poolings and means work on
    8 bits too, so no wider array is stored between two 8-bit layers. The first and the last layer, depthwise
    convolutions, layers behind these that would not gain, small layers and layers in loops keep their types.
    `quantization` lists each layer's type, the reason, and its signal to noise. `replace` quantises other weights, and
    keeps the scales between layers.

    Layers are recognised as by `accelerate`. A batch-norm is folded into the (transposed) convolution or dense layer
    whose result it normalises, if nothing else reads that result. 16-bit filters are rounded once, after folding.

    A batch-norm in training mode is `jaxconv.batchnorm` with training=True, a norm over axis 0 in a name scope such as
    "BatchNorm_0" or "bn1", or one whose mean goes into a running average. Other norms over axis 0 (an instance-norm of
    one volume) are inference, and the report names them.
    """
    check(f, "freeze")
    check_options(quantize, calibrate, wide)
    heard_from_now_on()
    if is_graph_node(f) or any(map(is_array, jax.tree.leaves(f))):
        f, args = _call, (f, *args)
    for path, leaf in jax.tree_util.tree_leaves_with_path((args, kwargs)):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise TypeError(f"freeze: {jax.tree_util.keystr(path)} is a jax.ShapeDtypeStruct, expected an array")
    if quantize is None:
        return Frozen(_Function(f), args, kwargs)
    # Inside somebody's jit, too, weights and batches have numbers.
    with jax.ensure_compile_time_eval() if compat.traces() else contextlib.nullcontext():
        return _quantized(f, args, kwargs, quantize, checked(calibrate), wide)


def _quantized(
    f: Callable[..., R], args: Any, kwargs: Any, dtype: str, batches: Sequence[Any], wide: Sequence[str]
) -> Frozen[R]:
    given = args, kwargs
    if sharding.explicit_mesh([jax.typeof(a) for a in jax.tree.leaves((given, batches)) if isinstance(a, jax.Array)]):
        # Types that say how arrays are split would be those of each value that is counted: one device counts them.
        given, batches = jax.device_get((given, batches))
    wide_one: Frozen[R] = Frozen(_Function(f, quantized=True), *given)
    names = [wide_one._name(i) for i in range(len(wide_one._bound))]

    def program_of(batch: Any) -> tuple[quantize.Program, list[Array]]:
        program, arrays = wide_one._program(quantize.as_inputs(batch), {})
        return quantize.Program(program.jaxpr, program.bound, names), arrays

    bound = [array for _, array in wide_one._bound]
    return Frozen(_Function(f, quantize.quantization(dtype, wide, batches, program_of, bound)), args, kwargs)


def _call(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)


@dataclasses.dataclass(frozen=True, eq=False)
class _Program:
    """f of inputs of some types."""

    names: list[str]  # of its weights
    early: Callable[..., list[Array]]  # jitted: the weights, of the bound arrays and those that f closes over
    closed_over: list[Any]
    late: Callable[..., list[Array]]  # jitted: the results, of the weights and the inputs
    jaxpr: ClosedJaxpr  # of both
    bound: list[bool]  # which of its arguments are
    results: Results
    report: Report
    mesh: jax.sharding.Mesh | None  # with Explicit axes, of the inputs

    @functools.cached_property
    def alone(self) -> Callable[..., list[Array]]:
        """`late` where it is a program of its own: a small one for a GPU is captured in CUDA graphs."""
        options = options_of(cost.flops(self.jaxpr)) if jax.default_backend() == "gpu" else {}
        return jax.jit(self.late, compiler_options=options) if options else self.late


class _Function:
    """What all `Frozen`s of a function share: its programs, and how the weights are called."""

    def __init__(self, f: Callable[..., Any], quantization: Quantization | None = None, quantized: bool = False):
        """`quantized`: whether its layers are recognised whatever JAXCONV_DISABLE says: plans are then XLA's."""
        self.f, self.quantization = f, quantization
        self.quantized = quantized or quantization is not None
        self.programs: dict[Any, _Program] = {}
        self.names: dict[str, str] = {}  # of the expression of a weight
        self.lock = threading.RLock()

    def __reduce__(self) -> Any:
        return _Function, (self.f, self.quantization)

    def name(self, digest: str, wanted: str) -> str:
        if digest not in self.names:
            taken, n = set(self.names.values()), 1
            name = wanted
            while name in taken:
                n += 1
                name = f"{wanted}~{n}"
            self.names[digest] = name
        return self.names[digest]


class Frozen(Generic[R]):
    """What `freeze` returns: a function of the inputs alone, with its weights prepared.

    Calling it gives f's results: the same structure, shapes and dtypes, and the same numbers up to rounding.
    """

    def __init__(self, function: _Function, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self._function = function
        self._args, self._kwargs = with_own_objects((args, kwargs))
        with nnx_updates():
            given = Arguments(self._args, self._kwargs, "freeze")
        self._static = given.static
        self._bound = jax.tree_util.tree_flatten_with_path((given.args, given.kwargs))[0]  # [(path, array)]
        self._weights: dict[str, Array] = {}
        self._arguments: dict[_Program, list[Array]] = {}  # the weights of a program in its order
        self.__name__ = getattr(function.f, "__name__", type(function.f).__name__)

    def __repr__(self) -> str:
        known = f"{len(self._weights)} weights, {_mib(self._weights.values())}" if self._weights else "not called yet"
        return f"<jaxconv.freeze of {self.__name__}: {known}>"

    def __call__(self, *inputs: Any, **kwargs: Any) -> R:
        program, arrays = self._program(inputs, kwargs)
        run = program.late if compat.traces() else program.alone
        return _finish(program, run(self._weights_of(program), arrays))

    def __reduce__(self) -> Any:
        """Copied and pickled as what it is made of: it folds again where that is called."""
        return Frozen, (self._function, self._args, self._kwargs)

    @property
    def weights(self) -> dict[str, Array]:
        """The folded arrays by name, for all shapes of inputs so far; empty before the first call.

        A weight has the name of the largest array that it is computed from: "params/conv1/kernel". The scales of an
        8-bit filter are "params/conv1/kernel_scale".
        """
        return dict(self._weights)

    @property
    def quantization(self) -> Quantization | None:
        """The type of each layer after `quantize`, and why: a list that prints as a table. None without `quantize`."""
        return self._function.quantization

    def apply(self, weights: Mapping[str, Array], /, *inputs: Any, **kwargs: Any) -> R:
        """The same function with the weights as an argument, for programs that should not hold them as constants.

        ::

            exported = jax.export.export(jax.jit(frozen.apply), ...)(frozen.weights, images)

        Raises:
          ValueError: if a weight is missing. `weights` has them for inputs that were given to a call or to `report`.
        """
        program, arrays = self._program(inputs, kwargs)
        missing = [name for name in program.names if name not in weights]
        if missing:
            raise ValueError(
                f"freeze: apply got no weight {missing[0]!r} ({len(missing)} of {len(program.names)} are missing). "
                "Call the frozen function or its report with inputs like these once: frozen.weights has them then"
            )
        return _finish(program, program.late([weights[name] for name in program.names], arrays))

    def replace(self, *args: Any, **kwargs: Any) -> Frozen[R]:
        """The same function with other arrays bound. Nothing is traced or compiled again, and this one stays as it is.

        All weights that this function has folded are folded for the new one at once.

        Args:
          args, kwargs: the arrays to bind, in the form in which `freeze(f, *args, **kwargs)` got them. For a function
            that `freeze(model)` returned, the new model. A keyword argument that is left out keeps its value.

        Raises:
          ValueError: if more than the arrays' numbers differs: a shape, a dtype, a name, or an argument without arrays.
        """
        new: Frozen[R] = Frozen(self._function, args, {**self._kwargs, **kwargs})
        before, after = self._types(), new._types()
        for name in [*before, *after]:
            if before.get(name) != after.get(name):
                raise ValueError(
                    f"freeze: replace got other arguments than freeze: {name} is {after.get(name, 'missing')}, "
                    f"expected {before.get(name, 'nothing there')}"
                )
        if self._static != new._static:
            raise ValueError("freeze: replace got other arguments than freeze: one that is not an array differs")
        with self._function.lock:
            programs = list(self._function.programs.values())
        for program in programs:
            if all(name in self._weights for name in program.names):
                new._weights_of(program)
        return new

    def report(self, *inputs: Any, **kwargs: Any) -> Report:
        """What became of each layer, as in `accelerate`'s report, and which weights are computed once.

        Args:
          inputs, kwargs: those of a call, or `jax.ShapeDtypeStruct`s of them.
        """
        program, _ = self._program(inputs, kwargs)
        self._weights_of(program)
        return program.report

    # ---- its parts
    def _types(self) -> dict[str, str]:
        return {jax.tree_util.keystr(path[1:]): str(jax.typeof(array)) for path, array in self._bound}

    def _name(self, i: int) -> str:
        """A bound array's: the path to it, behind the argument where there are several."""
        path, _ = self._bound[i]
        single = path[0].idx == 0 and len(self._args) == 1
        return jax.tree_util.keystr(path[2 if single else 1 :], simple=True, separator="/") or "weight"

    def _program(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_Program, list[Array]]:
        """The program for such inputs, and their arrays."""
        leaves, tree = jax.tree.flatten((inputs, kwargs), is_leaf=is_graph_node)
        traced = [is_array(leaf) or is_number(leaf) for leaf in leaves]
        arrays = [leaf for leaf, is_traced in zip(leaves, traced, strict=True) if is_traced]
        kinds = tuple(
            jax.typeof(leaf) if is_traced else (type(leaf), leaf)
            for leaf, is_traced in zip(leaves, traced, strict=True)
        )
        function = self._function
        with unheard():  # whether somebody listens is no other program
            key = tree, kinds, compat.trace_context()
            try:
                program = function.programs.get(key)
            except TypeError as error:
                raise TypeError(f"freeze: an input is neither an array nor hashable: {error}") from None
            if program is None:
                if any(map(is_graph_node, leaves)):
                    raise TypeError("freeze: an input is an object of flax.nnx: bind it, freeze(f, model)")
                with function.lock:
                    program = function.programs.get(key)
                    if program is None:
                        program = function.programs[key] = self._traced(inputs, kwargs)
        if (listener := LISTENER.get()) is not None:
            listener.extend(program.report)
        return program, arrays

    def _traced(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> _Program:
        both = self._kwargs.keys() & kwargs.keys()
        if both:
            raise TypeError(f"freeze: {min(both)} is bound already: replace({min(both)}=...) gives it another value")
        inputs, kwargs = jax.tree.map(_as_traced, (inputs, kwargs), is_leaf=is_graph_node)
        with nnx_updates():
            traced = trace(self._function.f, (*self._args, *inputs), {**self._kwargs, **kwargs}, "freeze")
            given = traced.arguments
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path((given.args, given.kwargs))[0]]
        bound = [p[1].idx < len(self._args) if p[0].idx == 0 else p[1].key in self._kwargs for p in paths]
        _refuse_changes(traced)
        chosen = self._function.quantization
        jaxpr, report, over_batch = _rewritten(traced, bound, self._function.quantized)
        _refuse_effects(jaxpr)
        _refuse_training(traced, bound, over_batch)
        if chosen is not None:
            names = [self._name(i) for i in range(len(self._bound))]
            jaxpr = quantize.rewritten(quantize.Program(jaxpr, bound, names), chosen)
            report.notes.append(f"quantised to {chosen.summary}")
        split = Split(jaxpr, bound)
        _refuse_random(split)
        closed_over = [v.value for v in split.closed_over()]
        if any(isinstance(array, jax.core.Tracer) for array in jaxpr.consts):
            raise TypeError(
                "freeze: the function closes over an array that is being traced: give it to freeze as an argument, "
                "freeze(f, array)"
            )
        names = [self._function.name(weight.digest, self._name_of(split, weight.value)) for weight in split.weights]
        report.notes.append(
            f"computed once: {len(names)} weights ({_mib(w.value.aval for w in split.weights)}) from {sum(bound)} "
            f"bound arrays ({_mib(jax.typeof(array) for _, array in self._bound)})"
        )
        late = jax.jit(split.run)
        mesh = sharding.concrete_mesh(jax.tree.leaves((inputs, kwargs)))
        return _Program(names, jax.jit(split.early), closed_over, late, jaxpr, bound, traced.results, report, mesh)

    def _name_of(self, split: Split, v: Value) -> str:
        sources = split.made_of(v)
        if not sources:
            return "constant"
        scope = "" if v.node is None else str(v.node.name_stack)
        if (of := scope.partition(quantize.FILTER_OF)[2]) in map(self._name, sources):
            return of
        sizes = {i: (self._bound[i][1].size, "bias" in self._name(i)) for i in sources}
        if scope.endswith(quantize.FILTER_BIAS):  # by a filter's scales, too
            return self._name(min(sources, key=lambda i: (not sizes[i][1], sizes[i][0])))
        name = self._name(max(sources, key=sizes.__getitem__))
        return f"{name}_scale" if scope.endswith(quantize.FILTER_SCALE) else name

    def _weights_of(self, program: _Program) -> list[Array]:
        known = self._arguments.get(program)
        if known is not None:
            return known
        bound = [array for _, array in self._bound]
        mesh = program.mesh or sharding.concrete_mesh(bound)
        # Which devices a tracer's mesh has only the program around knows: it folds, in each call.
        unknown = mesh is None and sharding.explicit_mesh(program.jaxpr.in_avals) is not None
        unknown = unknown and jax.sharding.get_abstract_mesh().empty
        if unknown or any(isinstance(array, jax.core.Tracer) for array in bound):
            return program.early(bound, program.closed_over)
        # Weights that are on no mesh get onto that of the inputs.
        on_mesh = contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)
        with jax.ensure_compile_time_eval(), self._function.lock, on_mesh:
            if any(name not in self._weights for name in program.names):
                folded = program.early(bound, program.closed_over)
                if self._function.quantization is not None:
                    quantize.check_weights(dict(zip(program.names, folded, strict=True)))
                # A new dict: another thread may be reading this one.
                self._weights = {**dict(zip(program.names, folded, strict=True)), **self._weights}
            self._arguments[program] = [self._weights[name] for name in program.names]
        return self._arguments[program]


def _as_traced(leaf: Any) -> Any:
    """A number as what it is traced as."""
    if not is_number(leaf):
        return leaf
    return jax.ShapeDtypeStruct((), jax.typeof(leaf).dtype, weak_type=True)


def _finish(program: _Program, arrays: Sequence[Array]) -> Any:
    results = program.results
    return results.unflatten([*arrays, *[None] * (len(results.places) - len(arrays))])[0]


def _rewritten(traced: Traced, bound: Sequence[bool], always: bool) -> tuple[ClosedJaxpr, Report, list[str]]:
    """What accelerate makes of the function, with f's own results alone; its report; `Rewriting.over_batch`.

    `always`: whatever JAXCONV_DISABLE says.
    """
    own = sum(place < traced.results.own for place in traced.results.places)
    reason = "" if always else untouched()
    if reason:
        run, report, over_batch = jaxpr_as_fun(traced.jaxpr), Report(notes=[reason]), []
    else:
        rewriting, report = traced.rewritten(once=True, data=[not is_bound for is_bound in bound])
        run, over_batch = rewriting.run, rewriting.over_batch
    return jax.make_jaxpr(lambda *arrays: run(*arrays)[:own])(*traced.jaxpr.in_avals), report, over_batch


# ----------------------------------------------------------------------------------------------------------------------
# What is no inference


def _refuse_changes(traced: Traced) -> None:
    results, jaxpr = traced.results, traced.jaxpr.jaxpr
    given = set(jaxpr.invars)
    for place, variable in zip(results.places, jaxpr.outvars, strict=True):
        if place >= results.own and (isinstance(variable, Literal) or variable not in given):
            numbered = jax.tree.unflatten(results.tree, range(results.tree.num_leaves))
            paths = jax.tree_util.tree_leaves_with_path(numbered)
            name = jax.tree_util.keystr(next(path for path, i in paths if i == place)[2:], simple=True, separator="/")
            raise ValueError(
                f"freeze: the function changes a bound object ({name}), but a call of a frozen function must not "
                "depend on earlier calls. If a module is in training mode, pass train=False (use_running_average=True, "
                "or model.eval() of flax.nnx)"
            )


def _refuse_effects(jaxpr: ClosedJaxpr) -> None:
    for effect in jaxpr.effects:
        if type(effect).__name__ not in ("DebugEffect", "OrderedDebugEffect"):
            raise ValueError(f"freeze: the function has an effect ({effect}), expected none but jax.debug's")


def _refuse_training(traced: Traced, bound: Sequence[bool], over_batch: Sequence[str]) -> None:
    """`over_batch`: the name scopes where data are normalised by statistics over axis 0, which may be no batch."""
    found = evidence(traced.jaxpr.jaxpr, bound)
    norms = [*over_batch, *found.by_accelerate]
    places = [*found.calls, *filter(says_batchnorm, norms)]
    if found.averages:
        places += [place for place in norms if place in found.averages] or norms
    for place in places:
        raise ValueError(
            f"freeze: batch-norm {place or 'without a name'} is in training mode: it normalises by the statistics of "
            "its batch. Pass train=False (use_running_average=True, or model.eval() of flax.nnx)"
        )


def _refuse_random(split: Split) -> None:
    found = split.random()
    if found is not None:
        name, where = found
        raise ValueError(
            f"freeze: the function draws random numbers ({where or name}) from a key that is bound, or that it makes "
            "itself: they would be the same in every call. If it is dropout, pass deterministic=True or train=False "
            "(model.eval() of flax.nnx); otherwise make the key an input"
        )


def _mib(arrays: Iterable[Any]) -> str:
    return f"{sum(a.size * a.dtype.itemsize for a in arrays) / 2**20:.1f} MiB"

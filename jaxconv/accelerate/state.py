"""A function's arguments: arrays that are traced, and objects whose state is written back: flax.nnx's, Keras's, plain
ones."""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxconv._core import compat
from jaxconv._core.graph import Array
from jaxconv.accelerate.function import Accelerated


def is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))


def _nnx() -> Any:
    """flax.nnx where the program has imported it: without it no argument is one of its objects."""
    return sys.modules.get("flax.nnx")


def is_graph_node(leaf: Any) -> bool:
    nnx = _nnx()
    return nnx is not None and isinstance(leaf, (nnx.Pytree, nnx.Variable))


def with_own_objects(tree: Any) -> Any:
    """The same with copies of nnx's objects in it, which hold the same arrays and see no changes of the given ones."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_graph_node)
    places = [i for i, leaf in enumerate(leaves) if is_graph_node(leaf)]
    if places:
        nnx = _nnx()
        copies = nnx.merge(*nnx.split(tuple(leaves[i] for i in places)))
        for i, copy in zip(places, copies, strict=True):
            leaves[i] = copy
    return jax.tree.unflatten(structure, leaves)


def unbound(f: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """f as a function of the nnx object that it is, or is a method of, and that object: what f changes in it counts."""
    owner = f if is_graph_node(f) else getattr(f, "__self__", None)
    if not is_graph_node(owner):
        return f, ()
    return (type(owner).__call__ if owner is f else f.__func__), (owner,)


def nnx_updates() -> contextlib.AbstractContextManager[Any]:
    nnx = _nnx()
    return contextlib.nullcontext() if nnx is None else nnx.update_context("jaxconv.accelerate")


@jax.tree_util.register_static
class _Hidden:
    """Holds the place of what is not traced in the arguments that are: it has no arrays in it, and equals itself."""


class Arguments:
    """f's arguments, as arrays that are traced and everything else.

    `args` and `kwargs` are f's with the arrays alone in them, so that errors name f's arguments as `jax.jit` does.
    nnx's objects (modules, optimizers, variables) are split together, so that what two of them share stays shared, and
    what f changes in them is written back, as by `nnx.jit`. What f changes in other containers would be lost, as it
    would be in a pure function's arguments: it is refused.
    """

    def __init__(self, args: Any, kwargs: Any, name: str = "accelerate"):
        nnx = _nnx()
        self._name = name  # who asks, for errors
        leaves, self._tree = jax.tree.flatten((args, kwargs), is_leaf=is_graph_node)
        self._objects = [i for i, leaf in enumerate(leaves) if is_graph_node(leaf)]
        self._leaves = leaves
        # What takes each leaf's place where arrays are traced: of nnx's objects the first holds the state of all.
        traced = [leaf if is_array(leaf) else _Hidden() for leaf in leaves]
        if self._objects:
            with nnx.split_context("jaxconv.accelerate") as context:
                self._graph, state = context.split(tuple(leaves[i] for i in self._objects))
            traced[self._objects[0]] = state
            self._same_graph = self._graph.with_no_outer_index()
        self._places = [jax.tree.structure(subtree) for subtree in traced]
        self.args, self.kwargs = jax.tree.unflatten(self._tree, traced)
        self.arrays = jax.tree.leaves(traced)

    @contextlib.contextmanager
    def of(self, arrays: Sequence[Array]) -> Iterator[tuple[Any, Any, Callable[[], Any]]]:
        """(args, kwargs) with `arrays` in them, and a function that, after f, returns the state of all nnx objects."""
        given = iter(arrays)
        traced = [jax.tree.unflatten(place, [next(given) for _ in range(place.num_leaves)]) for place in self._places]
        leaves = [new if is_array(leaf) else leaf for new, leaf in zip(traced, self._leaves, strict=True)]
        objects: Any = ()
        if self._objects:
            with _nnx().merge_context("jaxconv.accelerate", inner=True) as context:
                objects = context.merge(self._graph, traced[self._objects[0]])
            for i, obj in zip(self._objects, objects, strict=True):
                leaves[i] = obj
        args, kwargs = jax.tree.unflatten(self._tree, leaves)

        def after() -> Any:
            now = jax.tree.leaves((args, kwargs), is_leaf=is_graph_node)
            if not set(map(id, leaves)).issuperset(map(id, now)):
                raise TypeError(
                    f"{self._name}: the function changes one of its arguments (it puts another array into a dict, list "
                    "or object that it was given), and that change would be lost. Return the new value instead; for "
                    "flax.nnx pass the module itself, or split and merge it (nnx.split, nnx.merge), or use jaxconv.nnx"
                )
            if not self._objects:
                return None
            with _nnx().split_context("jaxconv.accelerate") as context:
                graph, state = context.split(objects)
            same = jax.tree.leaves(state), jax.tree.leaves(traced[self._objects[0]])
            if list(map(id, same[0])) == list(map(id, same[1])) and graph.with_no_outer_index() == self._same_graph:
                return None  # nothing to write into objects that may be another trace's
            return graph, state

        yield args, kwargs, after

    @property
    def static(self) -> Any:
        """Everything but the arrays: equal where the arguments differ in these alone."""
        others = [leaf for leaf in self._leaves if not is_array(leaf) and not is_graph_node(leaf)]
        return self._tree, self._graph if self._objects else None, others

    def write_back(self, changed: Any) -> None:
        if changed is not None:
            graph, state = changed
            with _nnx().merge_context("jaxconv.accelerate", inner=False) as context:
                context.merge(graph, state)


class LinenVariables:
    """The variables of flax.linen modules that are bound, which f is, closes over or is given: f must not change them.

    They belong to whoever bound the modules: `init`, `apply`, a module around. What is traced would be left in them.
    """

    def __init__(self, f: Callable[..., Any], args: Any, kwargs: Any, name: str = "accelerate"):
        self._name = name  # who asks, for errors
        linen = sys.modules.get("flax.linen")
        modules = [] if linen is None else [m for m in _reached(f, args, kwargs) if isinstance(m, linen.Module)]
        self._roots = [m.scope.root for m in modules if m.scope is not None]
        self._before = self._named()

    def _named(self) -> dict[str, Any]:
        named = {}
        for i, root in enumerate(self._roots):
            for path, leaf in jax.tree_util.tree_leaves_with_path(root.variables()):
                named[f"{i}{jax.tree_util.keystr(path)}"] = leaf
        return named

    def check(self) -> None:
        changed = [name for name, leaf in self._named().items() if self._before.get(name) is not leaf]
        if changed:
            name = changed[0].lstrip("0123456789")
            raise TypeError(
                f"{self._name}: a flax.linen module inside the function makes or changes variables ({name}) that "
                f"belong to what is around it, where they would be lost. Take the whole: {self._name}(model.apply)"
            )


def _reached(f: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    """f, the object that it is a method of, what it closes over, and its arguments."""
    while isinstance(f, functools.partial):
        yield from f.args
        yield from f.keywords.values()
        f = f.func
    yield f
    yield f.__wrapped__ if isinstance(f, Accelerated) else None
    yield getattr(f, "__self__", None)
    for cell in getattr(f, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty cell
            yield cell.cell_contents
    yield from jax.tree.leaves((args, kwargs))


class PlainObjects:
    """What f assigns in the objects that it can reach, and that are nobody's in particular: no tracer stays in them.

    Attributes (of classes too), dicts, lists, deques, variables that it closes over and globals, of f, of the object
    that it is a method of, of what it closes over and of its arguments that are no pytrees. They get the values of the
    call, as if f had been called as it is; where f raises, they have those from before it. Tracers that others made (an
    inner jit, a scan) are those that f itself leaves there: they stay.
    """

    def __init__(self, f: Callable[..., Any], args: Any, kwargs: Any):
        leaves = jax.tree.leaves((args, kwargs), is_leaf=is_graph_node)
        self._roots = [f, *(leaf for leaf in leaves if not is_array(leaf))]
        self._before: dict[
            int, tuple[Any, dict[Any, Any]]
        ] = {}  # a place's id: it, so that no other has it, and content
        for place in _places(self._roots):  # functions of one module share a place
            self._before.setdefault(id(place.of), (place.of, {}))[1].update(place.content)
        self._changed: dict[str, tuple[_Place, Any]] = {}  # a place, and its key

    def take(self, trace: Any) -> dict[str, Any]:
        """The new values that `trace` made, by name; what was there before is there again."""
        self._changed, values = {}, {}
        for place in _places(self._roots):
            keys = [key for key, value in place.content.items() if _made_by(value, trace)]
            for key in keys:
                name, n = place.name(key), 1
                while (unique := name if n == 1 else f"{name} ({n})") in values:
                    n += 1
                self._changed[unique], values[unique] = (place, key), place.content[key]
            if keys:
                _, before = self._before.get(id(place.of), (None, dict.fromkeys(place.content)))
                place.restore(keys, before)
        self._before.clear()
        return values

    def write_back(self, values: Mapping[str, Any]) -> None:
        lists: dict[int, tuple[_Place, dict[Any, Any]]] = {}
        for name, value in values.items():
            place, key = self._changed[name]
            if isinstance(place.of, _LISTS):  # f may have made it longer
                lists.setdefault(id(place.of), (place, dict(place.content)))[1][key] = value
            else:
                place.put(key, value)
        for place, content in lists.values():
            _refill(place.of, content.values())


def _made_by(value: Any, trace: Any) -> bool:
    """Whether the value, or what is in it if it is a tuple, is a tracer of `trace`. Other containers are places."""
    leaves = jax.tree.leaves(value, is_leaf=lambda v: not isinstance(v, tuple))
    return any(isinstance(leaf, jax.core.Tracer) and compat.made_by(leaf, trace) for leaf in leaves)


def check_results(results: Sequence[Any], trace: Any, name: str) -> None:
    """Refuses objects that are no pytrees and hold what `trace` made: nobody would see the numbers.

    Raises:
      TypeError: naming the object's type.
    """
    for one in results:
        if isinstance(one, jax.core.Tracer) or is_array(one) or is_graph_node(one):
            continue
        if any(_made_by(value, trace) for place in _places([one]) for value in place.content.values()):
            raise TypeError(
                f"{name}: the function returned a {type(one).__name__} that holds arrays and is no pytree, expected "
                "arrays in pytrees: register its class (jax.tree_util.register_dataclass), or return what it holds"
            )


# More of them are not looked through: a function that reaches so many does so by a library's.
MOST_PLACES = 10_000
_LIBRARIES = {"jax", "jaxlib", "jaxconv", "numpy", "scipy", "flax", "haiku", "equinox", "keras", "optax", "tensorflow"}
_LIBRARIES |= {"torch", "pytest", "_pytest", *sys.stdlib_module_names}


_LISTS = (list, collections.deque)


def _refill(of: Any, values: Iterable[Any]) -> None:
    """A list's, or a deque's."""
    values = list(values)
    of.clear()
    of.extend(values)


class _Place:
    """Something that values can be put into: a dict, a list, an object, a variable of a closure, a module's globals."""

    def __init__(self, of: Any, content: Mapping[Any, Any], described: str = ""):
        self.of, self.content, self._described = of, content, described

    def name(self, key: Any) -> str:
        if isinstance(self.of, types.CellType):
            return self._described
        if self._described:  # globals
            return f"{self._described}.{key}"
        kind = type(self.of).__name__
        return f"{kind}[{key!r}]" if isinstance(self.of, (dict, *_LISTS)) else f"{kind}.{key}"

    def put(self, key: Any, value: Any) -> None:
        if isinstance(self.of, types.CellType):
            self.of.cell_contents = value
        elif isinstance(self.of, (dict, *_LISTS)):
            self.of[key] = value
        elif isinstance(self.of, type):
            setattr(self.of, key, value)
        elif self._in_slot(key):
            object.__setattr__(self.of, key, value)  # frozen dataclasses too
        else:
            self.of.__dict__[key] = value

    def restore(self, keys: Sequence[Any], before: Mapping[Any, Any]) -> None:
        if isinstance(self.of, _LISTS):
            _refill(self.of, before.values())
            return
        for key in keys:
            if key in before or isinstance(self.of, types.CellType):
                self.put(key, before.get(key))
            elif isinstance(self.of, dict):
                del self.of[key]
            elif isinstance(self.of, type):
                delattr(self.of, key)
            elif self._in_slot(key):
                object.__delattr__(self.of, key)
            else:
                del self.of.__dict__[key]

    def _in_slot(self, key: str) -> bool:
        return isinstance(getattr(type(self.of), key, None), types.MemberDescriptorType)


def _places(roots: Sequence[Any]) -> Iterator[_Place]:
    """Each place that is reached, the nearest first; of libraries' own objects none."""
    queue, seen, count = collections.deque(roots), set(), 0
    held = []  # so that no id is used twice
    while queue and count < MOST_PLACES:
        one = queue.popleft()
        if id(one) in seen or isinstance(one, (types.ModuleType, str, bytes, int, float)) or is_array(one):
            continue
        seen.add(id(one))
        held.append(one)
        place: _Place | None = None
        if isinstance(one, types.FunctionType):
            if _of_a_library(one):
                continue
            code, cells = one.__code__, one.__closure__ or ()
            for variable, cell in zip(code.co_freevars, cells, strict=True):
                with contextlib.suppress(ValueError):  # an empty one
                    if id(cell) not in seen:
                        seen.add(id(cell))
                        count += 1
                        queue.append(cell.cell_contents)
                        yield _Place(cell, {variable: cell.cell_contents}, variable)
            queue.extend((*(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values(), *vars(one).values()))
            yield _Place(vars(one), dict(vars(one)), one.__name__)
            used = {name: one.__globals__[name] for name in _names(code) if name in one.__globals__}
            if used:
                place = _Place(one.__globals__, used, str(one.__globals__.get("__name__", "globals")))
        elif isinstance(one, types.MethodType):
            queue.extend((one.__self__, one.__func__))
        elif isinstance(one, Accelerated):
            queue.append(one.__wrapped__)
        elif isinstance(one, functools.partial):
            queue.extend((one.func, *one.args, *one.keywords.values()))
        elif isinstance(one, tuple):
            queue.extend(one)
        elif isinstance(one, dict):
            place = _Place(one, dict(one))
        elif isinstance(one, _LISTS):
            place = _Place(one, dict(enumerate(one)))
        elif isinstance(one, type):
            if not _of_a_library(one):
                own = {k: v for k, v in vars(one).items() if not k.startswith("__") and not hasattr(v, "__get__")}
                place = _Place(one, own)
        elif (isinstance(one, types.SimpleNamespace) or not _of_a_library(type(one))) and not is_graph_node(one):
            queue.extend(type(one).__mro__)
            content: dict[Any, Any] = {}
            with contextlib.suppress(AttributeError):
                content.update(object.__getattribute__(one, "__dict__"))
            for kind in type(one).__mro__:
                for slot, descriptor in vars(kind).items() if "__slots__" in vars(kind) else ():
                    if isinstance(descriptor, types.MemberDescriptorType):
                        with contextlib.suppress(AttributeError):
                            content[slot] = object.__getattribute__(one, slot)
            place = _Place(one, content)
        if place is not None:
            count += 1
            queue.extend(place.content.values())
            yield place


def _of_a_library(one: Any) -> bool:
    return str(getattr(one, "__module__", "builtins")).partition(".")[0] in _LIBRARIES


def _names(code: types.CodeType) -> Iterator[str]:
    """Of globals and attributes in a function's text, functions inside it included."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


class KerasVariables:
    """What f assigns to Keras's variables (moving averages, seeds): nothing keeps a tracer.

    Inside Keras's own StatelessScope the new values go on to it, otherwise to the variables.
    """

    def __init__(self) -> None:
        self._updates: dict[int, tuple[Any, Any]] = {}  # id of a variable: it, and its new value
        self._variables: list[Any] = []
        self._scope: Any = None
        self._outer: Any = None

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        keras = sys.modules.get("keras")
        if not hasattr(keras, "StatelessScope"):
            yield
            return
        updates = self._updates

        class Scope(keras.StatelessScope):
            def add_update(self, update: tuple[Any, Any]) -> None:
                super().add_update(update)
                updates[id(update[0])] = update

        with Scope(collect_losses=True) as self._scope:
            self._outer = self._scope.original_scope
            if self._outer is not None:
                self._scope.state_mapping.update(self._outer.state_mapping)
            yield

    def take(self) -> list[Any]:
        """The new values, of which nothing is kept; after f, where it was traced."""
        self._variables = [variable for variable, _ in self._updates.values()]
        values = [value for _, value in self._updates.values()]
        self._updates.clear()
        if self._scope is None:
            return values
        if self._scope.losses and self._outer is not None and self._outer.collect_losses:
            raise TypeError(
                "accelerate: Keras's layers add losses inside the function (activity_regularizer, add_loss), which are "
                "collected outside of it and would be lost. Accelerate the function that adds model.losses to the loss"
            )
        self._scope.losses.clear()
        self._scope.state_mapping.clear()
        return values

    def write_back(self, values: Sequence[Any]) -> None:
        for variable, value in zip(self._variables, values, strict=True):
            if self._outer is not None:
                self._outer.add_update((variable, value))
            elif isinstance(value, jax.core.Tracer):
                raise TypeError(
                    f"accelerate: Keras's variable {variable.path} gets a value inside jax.jit or another "
                    "transformation, where it would be lost. Accelerate a function of model.stateless_call, which "
                    "returns the new values"
                )
            else:
                variable.assign(value)

"""What `accelerate` returns: a function of f's arguments that also has `report`, and that can be copied and pickled."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any, Generic, overload

from jaxconv._core.types import OfArguments, P, R
from jaxconv.accelerate.report import Report


class Accelerated(Generic[P, R]):
    """What `accelerate` returns: a function with f's name and signature, and with the method `report`.

    As an attribute of a class it is bound as a method, as f would be."""

    report: OfArguments[P, Report]

    def __init__(
        self,
        f: Callable[P, R],
        again: Callable[[Callable[P, R]], Accelerated[P, R]],  # makes this one of f
        run: Callable[P, R],
        report: OfArguments[P, Report],
    ):
        functools.update_wrapper(self, f)
        self.__wrapped__ = f  # for type checkers; functools has set it
        self._again, self._run, self.report = again, run, report

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._run(*args, **kwargs)

    @overload
    def __get__(self, instance: None, owner: Any = None) -> Accelerated[P, R]: ...
    @overload
    def __get__(self, instance: object, owner: Any = None) -> Callable[..., R]: ...
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return f"<jaxconv.accelerate of {self.__wrapped__!r}>"

    def __reduce__(self) -> Any:
        """By name where a module has it under f's, as functions are pickled; else what it is made of."""
        name = getattr(self, "__qualname__", "")
        found: Any = sys.modules.get(getattr(self, "__module__", ""))
        for part in name.split("."):
            found = getattr(found, part, None)
        return name if found is self else (self._again, (self.__wrapped__,))

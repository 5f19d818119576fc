"""What a step function can see besides its part: the variables of the script that it, and what it calls, can reach.

It goes through functions, methods, callable objects and partial functions of the script, not into those of libraries.
What values contain is the caller's affair.
"""

import functools
import inspect
import io
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["Advanced", "attributes", "is_of_script", "variables"]

_LIBRARIES = (
    *set(sysconfig.get_paths().values()),
    str(Path(torch.__file__).parents[1]),
    str(Path(__file__).parents[1]),
)
_DEPTH = 4  # how far it follows calls


def variables(function: Callable[..., Any], modules: Sequence[nn.Module] = ()) -> dict[str, Any]:
    """All that a function can see, by the words for it.

    Args:
        function: The step function.
        modules: Modules whose forward it may call.
    """
    seeing = _Seeing()
    seeing.call(function, _DEPTH)
    for kind in {type(module) for module in modules}:
        if is_of_script(kind):
            seeing.call(kind.forward, _DEPTH - 1)
    return seeing.found


def is_of_script(kind: type) -> bool:
    """Whether a class is the user's own: the objects of libraries keep what they like."""
    return kind.__module__ in ("__main__", "types") or _is_file_of_script(sys.modules.get(kind.__module__))


def _is_file_of_script(module: Any) -> bool:
    file = getattr(module, "__file__", None) if isinstance(module, types.ModuleType) else None
    return file is not None and not file.startswith(_LIBRARIES)


def attributes(value: Any) -> dict[str, Any]:
    """The attributes of a plain object."""
    found = dict(getattr(value, "__dict__", {}))
    for name in getattr(type(value), "__slots__", ()):
        with suppress(AttributeError):  # it has no value yet
            found[name] = getattr(value, name)
    return found


class Advanced:
    """In place of an iterator that a function calls `next` on: never equal to another."""


class _Seeing:
    """Goes through what can be seen, each function once."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self._known: set[types.CodeType] = set()

    def call(self, function: Any, depth: int) -> None:
        """Note what something that can be called sees."""
        while isinstance(function, functools.partial):
            for place, value in [*enumerate(function.args), *function.keywords.items()]:
                self._note(f"argument {place!r}", value, depth)
            function = function.func
        if not isinstance(function, types.FunctionType):
            function = getattr(function, "__wrapped__", function)
        owner = None
        if isinstance(function, types.MethodType):
            owner, function = function.__self__, function.__func__
        elif is_of_script(type(function)):
            owner, function = function, type(function).__call__
        if isinstance(function, types.FunctionType) and function.__code__ not in self._known:
            self._known.add(function.__code__)
            names = frozenset(_names(function.__code__))
            if owner is not None and not isinstance(owner, nn.Module):
                self._members(owner, depth, names)
            self._variables(function, depth, names)

    def _members(self, owner: Any, depth: int, names: frozenset[str]) -> None:
        """Note what a method sees of its object: the attributes that it names, and what methods that it names see."""
        for name, value in attributes(owner).items():
            if name in names:
                self._note(f"attribute '{name}' of its {type(owner).__name__}", value, depth, names)
        for name in sorted(names) if depth else ():
            if isinstance(method := getattr(type(owner), name, None), types.FunctionType):
                self.call(types.MethodType(method, owner), depth - 1)

    def _variables(self, function: types.FunctionType, depth: int, names: frozenset[str]) -> None:
        for name in sorted(names & function.__globals__.keys()):
            self._variable(name, function.__globals__[name], depth, names)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # it has no value yet
                self._variable(name, cell.cell_contents, depth, names)
        for name, value in vars(function).items():
            self._note(f"attribute '{name}' of function '{function.__name__}'", value, depth)

    def _variable(self, path: str, value: Any, depth: int, names: frozenset[str]) -> None:
        if _is_namespace(value):
            for name in sorted(names & vars(value).keys()) if depth else ():
                self._variable(f"{path}.{name}", vars(value)[name], depth - 1, names)
        else:
            self._note(f"variable '{path}'", value, depth, names)

    def _note(self, words: str, value: Any, depth: int, names: frozenset[str] = frozenset()) -> None:
        """Note a value, and what is seen by those of its methods, among `names`, that are of the script."""
        is_taken_from = "next" in names and isinstance(value, Iterator) and not isinstance(value, io.IOBase)
        self.found[words] = Advanced() if is_taken_from else value
        if depth and _is_function_of_script(value):
            self.call(value, depth - 1)
        elif depth and is_of_script(type(value)):
            for name in sorted(names):
                if isinstance(method := getattr(type(value), name, None), types.FunctionType):
                    self.call(method, depth - 1)


def _is_namespace(value: Any) -> bool:
    """Whether it is a module or a class of the script, whose attributes are as good as variables."""
    return is_of_script(value) if isinstance(value, type) else _is_file_of_script(value)


def _is_function_of_script(value: Any) -> bool:
    while isinstance(value, functools.partial | types.MethodType):
        value = value.func if isinstance(value, functools.partial) else value.__func__
    if not isinstance(value, types.FunctionType):
        value = inspect.getattr_static(value, "__wrapped__", None)
    return isinstance(value, types.FunctionType) and not value.__code__.co_filename.startswith(_LIBRARIES)


def _names(code: types.CodeType) -> Iterator[str]:
    """The globals and attributes that a function, and functions inside it, name."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)

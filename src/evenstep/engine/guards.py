"""What a step function depends on besides its part and the tensors of the models: the plain values it can see.

A captured graph repeats what was done when it was captured. So it may be used only while everything that could lead to
something else is unchanged: the function's code, what it closes over, the globals and attributes it names, and the
plain attributes of all modules. Two steps with equal `look`s take the same path through the script, as far as can be
seen from outside; to catch the rest, a step is now and then computed both ways (`graphs.py`).
"""

import functools
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Look", "Modules", "difference", "look"]

Look = dict[str, Any]
"""Every value, by the expression that a reader of the script would write for it."""

_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)
_MOST_ITEMS = 64  # a container with more items is data, not a setting
_DEPTH = 3
_SETTLED = (nn.Module, torch.optim.Optimizer, types.ModuleType, types.BuiltinFunctionType, type)
"""Not looked into: modules are handled by `Modules`, and the others hold no settings of a step."""


class Modules:
    """The plain attributes of all prepared modules, whether or not the step function names them.

    Most steps change none, so it first checks whether every attribute is still the same object, which is quick.

    Args:
        modules: The modules.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = list(modules)
        self._values: list[tuple[Any, ...]] = []  # held, so that their ids are not reused
        self._grads: list[bool] = []
        self._seen: Look = {}

    def look(self) -> Look:
        """Their present values; the same object as before if nothing has changed."""
        values = [module.__dict__.values() for module in self._modules]
        grads = [p.requires_grad for m in self._modules for p in dict.values(m._parameters) if p is not None]
        same = len(values) == len(self._values) and all(
            len(now) == len(before) and all(map(operator.is_, now, before))
            for now, before in zip(values, self._values, strict=True)
        )
        if not same or grads != self._grads:
            self._values, self._grads = [tuple(each) for each in values], grads
            self._seen = {f"module {number}": _of_module(module) for number, module in enumerate(self._modules)}
        return self._seen


def look(function: Callable[..., Any], modules: Modules) -> Look:
    """What a function can see now.

    Args:
        function: The step function.
        modules: All prepared modules.
    """
    modes = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    seen: Look = {"modules": modules.look(), "autocast": modes, "grad mode": torch.is_grad_enabled()}
    _Looker(seen).function(function, "the step function", _DEPTH)
    return seen


def difference(before: Look, after: Look) -> str | None:
    """The first difference between two looks, in a few words; None: there is none."""
    for name in [*before, *after]:
        here, there = before.get(name, "nothing"), after.get(name, "nothing")
        if here is there or here == there:
            continue
        if isinstance(here, dict) and isinstance(there, dict):
            return difference(here, there)
        if name.startswith("module ") and isinstance(here, tuple) and isinstance(there, tuple):
            pairs = zip(here, there, strict=False)
            changed = next((f"{a} becomes {b}" for a, b in pairs if a != b), "an attribute comes or goes")
            return f"in a {here[0]}, {changed}"
        return f"{name} is {here!r} at one time and {there!r} at another"
    return None


def _of_module(module: nn.Module) -> tuple[Any, ...]:
    plain = [
        (key, value)
        for key, value in module.__dict__.items()
        if isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(v, _PLAIN) for v in value))
    ]
    grads = tuple(p is not None and p.requires_grad for p in dict.values(module._parameters))
    return (type(module).__name__, *plain, grads)


class _Looker:
    """Goes through what can be seen from a function."""

    def __init__(self, seen: Look) -> None:
        self._seen = seen
        self._known: set[int] = set()

    def function(self, function: Any, path: str, depth: int) -> None:
        """Look at something that can be called."""
        while isinstance(function, functools.partial):
            named: list[tuple[Any, Any]] = [*enumerate(function.args), *function.keywords.items()]
            for name, value in named:
                self.value(value, f"{path} argument {name}", depth)
            function = function.func
        if isinstance(function, types.MethodType):
            self.value(function.__self__, f"{path}.self", depth)
            function = function.__func__
        if isinstance(function, types.FunctionType):
            self._plain_function(function, path, depth)
        else:
            self._seen[path] = type(function).__qualname__
            self.value(function, path, depth)

    def _plain_function(self, function: types.FunctionType, path: str, depth: int) -> None:
        code = function.__code__
        if id(code) in self._known:
            return
        self._known.add(id(code))
        self._seen[path] = (function.__module__, function.__qualname__, code.co_firstlineno, code)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                self.value(cell.cell_contents, name, depth)
            except ValueError:  # it has no value yet
                self._seen[name] = "nothing"
        for name in _names(code):
            if name in function.__globals__:
                self.value(function.__globals__[name], name, depth)
        for name, value in _defaults(function).items():
            self.value(value, name, depth)

    def value(self, value: Any, path: str, depth: int) -> None:
        """Look at a value, and into it."""
        if isinstance(value, _PLAIN):
            self._seen[path] = value
        elif isinstance(value, Tensor):
            self._tensor(value, path)
        elif isinstance(value, _SETTLED) or _is_ours(value) or id(value) in self._known or depth == 0:
            pass
        elif isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            self.function(value, path, depth - 1)
        else:
            self._known.add(id(value))
            items = _items(value)
            if not hasattr(value, "__dict__"):
                self._seen[f"len({path})"] = len(items)
            for name, item in items[:_MOST_ITEMS]:
                self.value(item, path + name, depth - 1)

    def _tensor(self, value: Tensor, path: str) -> None:
        place = value.data_ptr() if value.layout == torch.strided else id(value)
        self._seen[path] = (tuple(value.shape), value.dtype, place)
        if value.device.type == "cpu" and value.numel() <= _MOST_ITEMS:
            self._seen[f"{path} (values)"] = value.detach().flatten().tolist()


def _items(value: Any) -> list[tuple[str, Any]]:
    """What a value contains, keyed by what is written after the value's name."""
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", item) for key, item in value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return [(f"[{number}]", item) for number, item in enumerate(value)]
    return [(f".{key}", item) for key, item in vars(value).items()] if hasattr(value, "__dict__") else []


def _names(code: types.CodeType) -> Sequence[str]:
    """The globals and attributes that a function, and functions inside it, name."""
    found = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found += _names(constant)
    return found


def _defaults(function: types.FunctionType) -> dict[str, Any]:
    code = function.__code__
    positional = code.co_varnames[: code.co_argcount]
    found = dict(zip(reversed(positional), reversed(function.__defaults__ or ()), strict=False))
    return {**found, **(function.__kwdefaults__ or {})}


def _is_ours(value: Any) -> bool:
    """Whether it belongs to the run itself, which changes in every step and decides nothing within one."""
    return type(value).__module__.partition(".")[0] == "evenstep"

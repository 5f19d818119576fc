"""What a step function depends on besides its part and the tensors of the models: the plain values it can see.

A captured graph repeats what was done when it was captured. So it may be used only while everything that could have
decided otherwise is as it was: the function's code, what it closes over, the globals and attributes it names, and the
plain attributes of all modules. Two steps with equal `look`s take the same way through the script, as far as can be
seen from outside; what lies deeper is checked now and then by computing a step both ways (`graphs.py`).
"""

import functools
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Look", "difference", "look"]

Look = dict[str, Any]
"""Every value by how a reader of the script would write it."""

_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)
_MOST_ITEMS = 64  # of a container: more are not a setting but data
_DEPTH = 3


def look(function: Callable[..., Any], modules: Iterable[nn.Module]) -> Look:
    """What a function can see now.

    Args:
        function: The step function.
        modules: All prepared modules: their plain attributes count, whoever reads them.
    """
    seen: Look = {
        "autocast": tuple(
            (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")
        ),
        "grad mode": torch.is_grad_enabled(),
    }
    for number, module in enumerate(modules):
        seen[f"module {number}"] = _of_module(module)
    _callable(function, "the step function", seen, _DEPTH, set())
    return seen


def difference(before: Look, after: Look) -> str | None:
    """What differs between two looks, in a few words; None: nothing."""
    for name in [*before, *after]:
        here, there = before.get(name, "nothing"), after.get(name, "nothing")
        if here != there:
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


def _callable(function: Any, path: str, seen: Look, depth: int, known: set[int]) -> None:
    while isinstance(function, functools.partial):
        for number, value in enumerate(function.args):
            _value(value, f"{path} argument {number}", seen, depth, known)
        for name, value in function.keywords.items():
            _value(value, f"{path} argument {name}", seen, depth, known)
        function = function.func
    if isinstance(function, types.MethodType):
        _value(function.__self__, f"{path}.self", seen, depth, known)
        function = function.__func__
    if not isinstance(function, types.FunctionType):
        seen[path] = type(function).__qualname__
        if not isinstance(function, nn.Module | types.BuiltinFunctionType | type):
            _value(function, path, seen, depth, known)
        return
    if id(function.__code__) in known:
        return
    known.add(id(function.__code__))
    seen[path] = (function.__module__, function.__qualname__, function.__code__.co_firstlineno, function.__code__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            _value(cell.cell_contents, name, seen, depth, known)
        except ValueError:  # it has no value yet
            seen[name] = "nothing"
    for name in _names(function.__code__):
        if name in function.__globals__:
            _value(function.__globals__[name], name, seen, depth, known)
    for name, value in _defaults(function).items():
        _value(value, name, seen, depth, known)


def _names(code: types.CodeType) -> Sequence[str]:
    """The globals and attributes that a function and those inside of it name."""
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


def _value(value: Any, path: str, seen: Look, depth: int, known: set[int]) -> None:
    if isinstance(value, _PLAIN):
        seen[path] = value
    elif isinstance(value, Tensor):
        seen[path] = (tuple(value.shape), value.dtype, value.data_ptr() if value.layout == torch.strided else id(value))
        if value.device.type == "cpu" and value.numel() <= _MOST_ITEMS:
            seen[f"{path} (values)"] = value.detach().flatten().tolist()
    elif isinstance(value, nn.Module | types.ModuleType | type | torch.optim.Optimizer):
        pass  # modules are looked at by themselves, and the others hold no settings of one step
    elif id(value) in known or depth == 0:
        pass
    elif isinstance(value, list | tuple | set | frozenset):
        known.add(id(value))
        seen[f"len({path})"] = len(value)
        for number, item in enumerate(list(value)[:_MOST_ITEMS]):
            _value(item, f"{path}[{number}]", seen, depth - 1, known)
    elif isinstance(value, Mapping):
        known.add(id(value))
        seen[f"len({path})"] = len(value)
        for key in list(value)[:_MOST_ITEMS]:
            _value(value[key], f"{path}[{key!r}]", seen, depth - 1, known)
    elif isinstance(value, types.FunctionType | types.MethodType | functools.partial):
        _callable(value, path, seen, depth - 1, known)
    elif _is_ours(value):
        pass
    else:
        known.add(id(value))
        for key, item in vars(value).items() if hasattr(value, "__dict__") else ():
            _value(item, f"{path}.{key}", seen, depth - 1, known)


def _is_ours(value: Any) -> bool:
    """Whether it is something of the run itself, which changes in every step and decides nothing inside of one."""
    return type(value).__module__.partition(".")[0] == "evenstep"

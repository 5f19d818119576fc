"""What a step function leaves behind in Python: variables and attributes that it changes from call to call.

They see the shards of their own worker only, so a result that depends on them depends on the number of workers. Whether
it does cannot be seen from outside. So a script that keeps something (a counter, a hidden state, alone or in a
container or an object) is warned once, by name, and training goes on. What is set only once is a cache, and a list that
grows is a record: both are left alone.
"""

import functools
import sys
import sysconfig
import types
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Leftovers"]

_NUMBERS = (int, float, complex)
_STEPS = 3  # how many steps it looks at, for each step function
_CHANGES = 2  # what changes in this many of them is kept from call to call
_ITEMS = 64  # how far it looks into a container or an object
_LIBRARIES = (
    *set(sysconfig.get_paths().values()),
    str(Path(torch.__file__).parents[1]),
    str(Path(__file__).parents[1]),
)
_OF_EVERY_MODULE = vars(nn.Module()).keys()

Kept = dict[str, Any]
"""By the words for it: a number, or a tensor and its version."""


class Leftovers:
    """Looks at the first steps of each step function.

    Args:
        modules: All prepared modules; may grow.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._steps: dict[Any, set[int]] = {}
        self._changes: dict[str, int] = {}
        self._said = False

    def before(self, function: Callable[..., Any], step: int) -> Kept | None:
        """What the function could change, before it is called; None: it is known well enough."""
        steps = self._steps.setdefault(getattr(function, "__code__", type(function)), set())
        if self._said or len(steps) >= _STEPS or step in steps:
            return None
        steps.add(step)
        return self._look(function)

    def after(self, function: Callable[..., Any], before: Kept | None) -> None:
        """Warn of what it has changed, if it is the second time."""
        if before is None:
            return
        after = self._look(function)
        for name in before.keys() & after.keys():
            if not _same(before[name], after[name]):
                self._changes[name] = self._changes.get(name, 0) + 1
        found = min((name for name, count in self._changes.items() if count >= _CHANGES), default=None)
        if found is not None:
            self._said = True
            warnings.warn(
                f"the step function changes {found} from call to call, and each worker sees the calls for its own "
                "parts only: if the loss depends on it, the result depends on the number of workers. Hand on what "
                "belongs to a part by run.carry, keep what belongs to the model in a buffer, and count between steps",
                stacklevel=2,
            )

    def _look(self, function: Callable[..., Any]) -> Kept:
        found: Kept = {}
        for module in self._modules:
            for name in vars(module).keys() - _OF_EVERY_MODULE:
                _note(found, f"attribute '{name}' of a {type(module).__name__}", vars(module)[name])
        while isinstance(function, functools.partial):
            function = function.func
        if isinstance(function, types.MethodType):
            for name, value in getattr(function.__self__, "__dict__", {}).items():
                _note(found, f"attribute '{name}' of its {type(function.__self__).__name__}", value)
            function = function.__func__
        if isinstance(function, types.FunctionType):
            for name, value in _variables(function).items():
                _note(found, f"variable '{name}'", value)
        return found


def _variables(function: types.FunctionType) -> dict[str, Any]:
    """What a function closes over, and the globals that it names."""
    found = {name: function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # it has no value yet
            found[name] = cell.cell_contents
    return found


def _note(found: Kept, name: str, value: Any, *, inside: bool = False) -> None:
    if isinstance(value, _NUMBERS) or value is None:
        found[name] = value
        return
    if isinstance(value, tuple) and value:  # such as the state of an LSTM
        value = value[0]
    if isinstance(value, Tensor):
        if value.grad_fn is None and not isinstance(value, nn.Parameter):
            found[name] = (value, value._version)  # with a graph it is an output of this very call
    elif not inside:
        for held, item in _held(value):
            _note(found, f"{held} of {name}", item, inside=True)


def _held(value: Any) -> list[tuple[str, Any]]:
    """What a container or a plain object of the script holds, with words for each."""
    if isinstance(value, dict):
        return [(f"entry {key!r}", item) for key, item in islice(value.items(), _ITEMS)]
    if isinstance(value, list | deque):
        return [(f"entry {n}", item) for n, item in enumerate(islice(value, _ITEMS))]
    if isinstance(value, nn.Module | type | types.ModuleType) or not _is_of_script(type(value)):
        return []
    return [(f"attribute '{key}'", item) for key, item in islice(getattr(value, "__dict__", {}).items(), _ITEMS)]


def _is_of_script(kind: type) -> bool:
    """Whether a class is the user's own: the objects of libraries keep what they like."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind.__module__ in ("__main__", "types") or (file is not None and not file.startswith(_LIBRARIES))


def _same(before: Any, after: Any) -> bool:
    if isinstance(before, tuple) and isinstance(after, tuple):
        return before[0] is after[0] and before[1] == after[1]
    return type(before) is type(after) and (before == after or before != before)  # a NaN is the same as another

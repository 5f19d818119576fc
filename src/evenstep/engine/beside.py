"""Tensors that a function of the script can see and that no prepared model holds, such as a target network.

Each worker has its own, so they must be the same everywhere. They are not if the script makes them from parameters
between steps: a worker that joins later, or a run that is resumed, does so when the parameters are others. So checksums
of them are compared: in the first steps, in every 16th, and whenever torch says that one was changed. Those that the
function itself changes are left to `leftovers.py`; so is what may be its cache: what appeared after its first call, and
the attributes of the models.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from evenstep.core.checksum import checksum
from evenstep.engine.sight import attributes, is_of_script, variables
from evenstep.engine.slots import ModelSlots

__all__ = ["Beside"]

_FIRST, _EVERY = 4, 16
_DEPTH, _ITEMS = 2, 64
_BYTES = 1 << 25  # a larger tensor is data, unless it is a parameter

_Marks = list[tuple[int, int, int]]
"""Which tensors, of which versions, where in memory."""


class Beside:
    """Looks at such tensors.

    Args:
        slots: The prepared models.
    """

    def __init__(self, slots: ModelSlots) -> None:
        self._slots = slots
        self._found: dict[Any, dict[str, list[ref[Tensor]]]] = {}  # by function
        self._calls: dict[Any, int] = {}
        self._marks: dict[str, _Marks] = {}
        self._own: set[str] = set()  # what functions change themselves

    def look(self, function: Callable[..., Any], step: int) -> dict[str, str]:
        """A checksum of what each variable holds, where it is time for one; the same steps on every worker.

        Args:
            function: The function that is about to be called.
            step: The number of steps so far.
        """
        code, is_due = _code(function), _is_due(step)
        known = self._found.get(code)
        if known is None or is_due or any(each() is None for held in known.values() for each in held):
            known = self._found[code] = self._find(function)
        sums: dict[str, str] = {}
        for words, held in known.items():
            marks, before = _marks(held), self._marks.get(words, [])
            if code in self._calls and len(marks) != len(before):
                self._own.add(words)
            if words not in self._own and (is_due or marks != before):
                numbers = [checksum(tensor) for each in held if (tensor := each()) is not None]
                sums[words] = hashlib.blake2b(repr(numbers).encode(), digest_size=8).hexdigest()
            self._marks[words] = marks
        return sums

    def called(self, function: Callable[..., Any], step: int) -> None:
        """Note what the function has changed since `look`."""
        code = _code(function)
        self._calls[code] = calls = 1 + self._calls.get(code, 0)
        found = self._find(function) if calls <= _FIRST or _is_due(step) else self._found[code]
        for words, held in found.items():
            if _marks(held) != self._marks.get(words):
                self._own.add(words)

    def _find(self, function: Callable[..., Any]) -> dict[str, list[ref[Tensor]]]:
        shared = {p.untyped_storage().data_ptr() for p in self._slots.parameters.values()}
        prepared = set(map(id, self._slots.modules))
        found = {}
        for words, value in variables(function, self._slots.modules).items():
            tensors = [ref(t) for t in _tensors(value, prepared) if t.untyped_storage().data_ptr() not in shared]
            if tensors:
                found[words] = tensors
        return found


def _code(function: Callable[..., Any]) -> Any:
    """What identifies a function: a lambda in a loop is a new object every time."""
    return getattr(function, "__code__", type(function))


def _is_due(step: int) -> bool:
    return step < _FIRST or step % _EVERY == 0


def _marks(held: list[ref[Tensor]]) -> _Marks:
    return [(id(t), t._version, t.data_ptr()) if (t := each()) is not None else (0, 0, 0) for each in held]


def _tensors(value: Any, prepared: set[int], depth: int = _DEPTH) -> Iterator[Tensor]:
    """The tensors in a value, as far as they can be compared."""
    if isinstance(value, Tensor):
        plain = value.layout == torch.strided and value.is_cpu and not value.is_inference()
        if plain and value.grad_fn is None and (0 < value.nbytes <= _BYTES or isinstance(value, nn.Parameter)):
            yield value
    elif isinstance(value, nn.Module):
        if id(value) not in prepared:
            for parameter in value.parameters():
                yield from _tensors(parameter, prepared)
    elif depth and (isinstance(value, Mapping | list | tuple | deque) or is_of_script(type(value))):
        held = value if isinstance(value, list | tuple | deque) else _values(value)
        for item in islice(held, _ITEMS):
            yield from _tensors(item, prepared, depth - 1)


def _values(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, Mapping) else list(attributes(value).values())

"""What a step function leaves behind in Python: variables and attributes that it changes from call to call.

They see the shards of their own worker only, so a result that depends on them depends on the number of workers. Whether
it does cannot be seen from outside. So a script that keeps something (a counter, a hidden state, a random generator, an
iterator; alone or in a container or an object) is warned once, by name, and training goes on. What is set only once is
a cache, and a list that grows is a record: both are left alone.
"""

import random
import types
import warnings
from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from evenstep.engine.sight import Advanced, attributes, is_of_script, variables

__all__ = ["Leftovers"]

_NUMBERS = (int, float, complex)
_STEPS = 3  # how many steps it looks at, for each step function; later at every power of two
_CHANGES = 2  # what changes in this many of them is kept from call to call
_ITEMS = 64  # how far it looks into a container or an object
_DEPTH = 2  # how many containers and objects it opens
_BYTES = 1 << 20  # a larger array is data
_PYTHONS_OWN = random.random.__self__  # type: ignore[attr-defined]  # what the functions of `random` draw from
_OF_EVERY_MODULE = vars(nn.Module()).keys()

Kept = dict[str, Any]
"""By the words for it: a number, or a tensor and its version."""


class Leftovers:
    """Looks at the first steps of each step function.

    Args:
        modules: All prepared modules; may grow.
        places: Where the buffers of the state hang: by the id of a module's `_buffers`, and name; may grow.
    """

    def __init__(self, modules: Sequence[nn.Module], places: Collection[tuple[int, str]] = ()) -> None:
        self._modules, self._places = modules, places
        self._steps: dict[Any, set[int]] = {}
        self._changes: dict[str, int] = {}
        self._said = False

    def before(self, function: Callable[..., Any], step: int) -> Kept | None:
        """What the function could change, before it is called; None: it is known well enough."""
        steps = self._steps.setdefault(getattr(function, "__code__", type(function)), set())
        if self._said or step in steps or (len(steps) >= _STEPS and step & (step - 1)):
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
            for name, buffer in module._buffers.items():
                if (id(module._buffers), name) not in self._places:
                    _note(
                        found, f"buffer '{name}' of a {type(module).__name__}, which run.prepare did not find,", buffer
                    )
        for name, value in variables(function, self._modules).items():
            _note(found, name, value)
        return found


def _note(found: Kept, name: str, value: Any, depth: int = _DEPTH) -> None:
    if isinstance(value, (*_NUMBERS, Advanced)) or value is None:
        found[name] = value
        return
    if isinstance(value, tuple) and value:  # such as the state of an LSTM
        value = value[0]
    if isinstance(value, Tensor):
        if value.grad_fn is None and not isinstance(value, nn.Parameter):
            found[name] = (value, value._version)  # with a graph it is an output of this very call
    elif isinstance(value, np.ndarray):
        found[name] = (value, value.tobytes() if value.nbytes <= _BYTES else None)
    elif (state := _drawn(value)) is not None:
        found[name] = (value, state)
    elif depth:
        for held, item in _held(value):
            _note(found, f"{held} of {name}", item, depth - 1)


def _drawn(value: Any) -> Any:
    """Where a random generator of the script stands; None: it is none, or one that every part finds seeded."""
    if value is torch.default_generator or value is np.random.mtrand._rand or value is _PYTHONS_OWN:
        return None
    if isinstance(value, torch.Generator):
        return value.get_state().cpu().numpy().tobytes()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state())
    return value.getstate() if isinstance(value, random.Random) else None


def _held(value: Any) -> list[tuple[str, Any]]:
    """What a container or a plain object of the script holds, with words for each."""
    if isinstance(value, dict):
        return [(f"entry {key!r}", item) for key, item in islice(value.items(), _ITEMS)]
    if isinstance(value, list | deque):
        return [(f"entry {n}", item) for n, item in enumerate(islice(value, _ITEMS))]
    if isinstance(value, nn.Module | type | types.ModuleType) or not is_of_script(type(value)):
        return []
    return [(f"attribute '{key}'", item) for key, item in islice(attributes(value).items(), _ITEMS)]


def _same(before: Any, after: Any) -> bool:
    if isinstance(before, tuple) and isinstance(after, tuple):
        return before[0] is after[0] and before[1] == after[1]
    return type(before) is type(after) and (before == after or before != before)  # a NaN is the same as another

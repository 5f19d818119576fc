"""What an optimizer may do in its step so that owners can step for each other; anything else is refused."""

import inspect
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.core.errors import UnsupportedError

__all__ = ["Conduct", "StepGuard", "check_kind", "options_of"]

Options = list[dict[str, Any]]

_SHARED = frozenset({"state", "param_groups", "defaults", "_opt_called"})
"""Attributes of every optimizer that the workers share otherwise, or that schedulers alone read."""

_DEPTH, _MOST_ITEMS = 4, 64


def check_kind(optimizer: Optimizer, *, whole: bool) -> None:
    """Check that an optimizer can be shared, as far as can be told before it steps.

    Args:
        optimizer: The optimizer.
        whole: Whether one worker steps all parameters.

    Raises:
        UnsupportedError: It cannot.
    """
    name = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UnsupportedError(
            f"{name} calls the model by itself (its step needs a closure), but a step is computed by all workers; use "
            "an optimizer that steps on gradients"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UnsupportedError("SparseAdam needs sparse gradients, which evenstep does not add up; use Adam")
    if not whole and not type(optimizer).__module__.startswith("torch.optim"):
        warnings.warn(
            f"{name} is not from torch.optim: the result is the same for every number of workers only if it treats "
            "each parameter on its own. If it looks at all of them at once (as Lamb's global norm does), pass "
            "prepare(model, optimizer, whole=True): one worker then steps them all",
            stacklevel=6,  # where the script calls run.prepare
        )


def options_of(optimizer: Optimizer) -> Options:
    """The options of the parameter groups, such as learning rates, as plain values."""
    return [
        {key: _option(optimizer, key, value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def _option(optimizer: Optimizer, key: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        return float(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list | tuple):
        items = [_option(optimizer, key, item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if not isinstance(value, int | float | str | bool | dict | None):
        raise UnsupportedError(
            f"a parameter group of {type(optimizer).__name__} has a {type(value).__name__} as '{key}', which workers "
            "cannot compare and checkpoints not keep; expected numbers and texts, alone or in lists"
        )
    return value


class Conduct:
    """Observes one step of an optimizer; make it before the step.

    Args:
        optimizer: The optimizer.
        whole: Whether one worker steps all parameters.

    Attributes:
        options: The options of the groups before the step.
    """

    def __init__(self, optimizer: Optimizer, *, whole: bool) -> None:
        self._optimizer, self._whole = optimizer, whole
        if not whole:
            _refuse_hooks(optimizer)
        self.options, self._attributes = options_of(optimizer), _attributes(optimizer)

    def changed_options(self) -> Options | None:
        """After the step: the options of the groups, if the step has changed them.

        Raises:
            UnsupportedError: It has changed something that the other workers would not get.
        """
        name = type(self._optimizer).__name__
        for key, value in _attributes(self._optimizer).items():
            if value != self._attributes.get(key):
                raise UnsupportedError(
                    f"{name} changes its attribute '{key}' in its step, which a worker that replaces another would not "
                    "have, and no checkpoint either; keep it in the state of a parameter, or in its group with "
                    "whole=True"
                )
        strange = [key for key in self._optimizer.state if not isinstance(key, Tensor)]
        if strange:
            raise UnsupportedError(
                f"{name} keeps state under {strange[0]!r}, so it looks at all parameters at once; state belongs to a "
                "parameter"
            )
        now = options_of(self._optimizer)
        if now == self.options:
            return None
        if not self._whole:
            raise UnsupportedError(
                f"{name} changes the options of its groups in its step, so it looks at all parameters at once; pass "
                "prepare(..., whole=True)"
            )
        return now


class StepGuard:
    """Ensures that only the engine updates parameters with an optimizer.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._lifted = False
        handle = optimizer.register_step_pre_hook(self)
        self.remove = handle.remove

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        """Before a step of the optimizer; without gradients it does nothing, and may stay in a script."""
        if not self._lifted and any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            raise UnsupportedError(
                f"{type(optimizer).__name__}.step() was called on gradients of this worker alone; expected "
                "run.step(batch, function), which computes them, adds them up over all workers and updates: return the "
                "loss from the function, and leave out loss.backward() and optimizer.step()"
            )

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """While this is open, the optimizer may step."""
        self._lifted = True
        try:
            yield
        finally:
            self._lifted = False


def _refuse_hooks(optimizer: Optimizer) -> None:
    """Raise UnsupportedError if others do something before or after every step of an optimizer."""
    before = [hook for hook in optimizer._optimizer_step_pre_hooks.values() if not isinstance(hook, StepGuard)]
    for when, hooks in (("pre", before), ("post", optimizer._optimizer_step_post_hooks)):
        if hooks:
            raise UnsupportedError(
                f"{type(optimizer).__name__} has a hook (register_step_{when}_hook), which on each worker sees only "
                "the parameters and gradients that it steps; pass prepare(..., whole=True), so that one worker steps "
                "all of them, or use clip_norm=, clip_value= or run.edit(...)"
            )


def _attributes(optimizer: Optimizer) -> dict[str, Any]:
    """What an optimizer holds besides its state and options: plain values, and which tensors of which versions."""
    if type(optimizer).__module__.startswith("torch.optim"):
        return {name: v for name, v in vars(optimizer).items() if name[0] != "_" and isinstance(v, int | float | str)}
    found: dict[str, Any] = {}
    for name, value in vars(optimizer).items():
        if name not in _SHARED:
            found[name] = _contents(value, _DEPTH)
    return found


def _contents(value: Any, depth: int) -> Any:
    """What stands for a value in comparisons: it stays equal until the value, or what it contains, changes."""
    if isinstance(value, int | float | str | bool | None):
        return value
    if isinstance(value, Tensor):
        return None if isinstance(value, nn.Parameter) else (value.data_ptr(), value._version)
    if depth and isinstance(value, Optimizer):
        return [_contents(each, depth - 1) for name, each in vars(value).items() if name not in _SHARED - {"state"}]
    if depth and isinstance(value, Mapping):
        return len(value), [_contents(each, depth - 1) for each in islice(value.values(), _MOST_ITEMS)]
    if depth and isinstance(value, list | tuple | deque):
        return len(value), [_contents(each, depth - 1) for each in islice(value, _MOST_ITEMS)]
    return None

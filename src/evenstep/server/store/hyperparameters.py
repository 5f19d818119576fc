"""Options of an optimizer, such as learning rates, that come with an update: whether they may replace the present ones.

Each must have the type of what it replaces. Torch judges the values: an optimizer of the same class is made with them,
over one element of every kind of parameter, and makes a few steps. For an optimizer that is not torch's only the sign
is checked here; the first step in the store proves the rest (`state.py`).
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from evenstep.core.errors import RefusedError
from evenstep.server.store.optimizers import is_torchs
from evenstep.server.wire.recipes import make, samples

__all__ = ["Hyperparameters", "check_hyperparameters", "set_hyperparameters", "try_out"]

Hyperparameters = Sequence[Mapping[str, Any]]
"""For each group of parameters, some of its options by name."""

_TRIAL_STEPS = 3  # some options matter only from the second step on
_SHOWN = 40


def check_hyperparameters(optimizer: Optimizer | None, options: Hyperparameters) -> None:
    """Check that an optimizer can step with new options.

    Raises:
        RefusedError: It cannot.
    """
    groups = optimizer.param_groups if optimizer is not None else []
    if optimizer is None or len(options) != len(groups):
        raise RefusedError(f"options of {len(options)} groups came, expected those of {len(groups)}")
    for given, group in zip(options, groups, strict=True):
        for name, value in given.items():
            if name not in group or name == "params":
                raise RefusedError(f"the server's {type(optimizer).__name__} has no option {name[:_SHOWN]!r}")
            _check_like(name, value, group[name], optimizer.defaults.get(name))
    if is_torchs(optimizer):
        try_out(optimizer, options)


def _check_like(name: str, value: Any, *present: Any) -> None:
    """Check that a value is like a present one."""
    if not any(_is_like(value, there) for there in present):
        raise RefusedError(f"option {name}={str(value)[:_SHOWN]!r}, expected one like {str(present[0])[:_SHOWN]!r}")


def _is_like(value: Any, there: Any) -> bool:
    if there is None:
        return value is None or isinstance(value, bool) or _is_number(value)
    if isinstance(there, bool | str):
        return type(value) is type(there)
    if isinstance(there, list | tuple):
        return isinstance(value, list | tuple) and len(value) == len(there) and all(map(_is_like, value, there))
    least = float(there) if isinstance(there, Tensor | int | float) else math.nan
    return _is_number(value) and (value >= 0 or least < 0)


def _is_number(value: Any) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:  # an integer too large for any float
        return False


def set_hyperparameters(optimizer: Optimizer, options: Hyperparameters) -> None:
    """Give an optimizer other options, which were checked."""
    for group, given in zip(optimizer.param_groups, options, strict=True):
        for key, value in given.items():
            if isinstance(group[key], Tensor):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value


def try_out(optimizer: Optimizer, options: Hyperparameters | None = None) -> None:
    """Check that one of torch's optimizers can step on parameters like its own, with its options or with others.

    Raises:
        RefusedError: It cannot; torch's own words say why.
    """
    trial = _small_copy(optimizer, options)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(_TRIAL_STEPS):
                for group in trial.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = torch.ones_like(parameter)
                trial.step()
            finite = all(bool(torch.isfinite(p).all()) for group in trial.param_groups for p in group["params"])
    except Exception as error:  # only torch's code has run, and it may raise anything
        raise RefusedError(f"torch.optim.{type(optimizer).__name__} cannot step with these options: {error}") from error
    if not finite:
        raise RefusedError(f"torch.optim.{type(optimizer).__name__} steps to infinity with these options")


def _small_copy(optimizer: Optimizer, options: Hyperparameters | None) -> Optimizer:
    """An optimizer like this one, with other options if given, over one element of every kind of its parameters."""
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        present = {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}
        groups.append({**present, "params": samples(group["params"])})
        for key, value in (options[number] if options is not None else {}).items():
            if isinstance(present[key], Tensor):
                present[key].fill_(value)
            else:
                groups[-1][key] = value
    return make(type(optimizer), groups)

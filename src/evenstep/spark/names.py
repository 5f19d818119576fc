"""Functions by name, so that the parameters of a pipeline stage can be saved as text and nothing is pickled."""

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from evenstep.core.errors import ConfigError

__all__ = ["METRICS", "check_functions", "is_classification", "name_of", "resolve"]

_CLASSIFICATION = {"cross_entropy", "nll_loss"}


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """1 where the largest output is that of the target class, otherwise 0."""
    return output.argmax(-1) == target


def mean_absolute_error(output: Tensor, target: Tensor) -> Tensor:
    """The absolute error of every output."""
    return (output - target).abs().flatten(1).mean(1) if output.ndim > 1 else (output - target).abs()


def mean_squared_error(output: Tensor, target: Tensor) -> Tensor:
    """The squared error of every output."""
    return (output - target).square().flatten(1).mean(1) if output.ndim > 1 else (output - target).square()


METRICS = {
    "accuracy": accuracy,
    "mean_absolute_error": mean_absolute_error,
    "mean_squared_error": mean_squared_error,
}
"""Metrics that can be asked for by name; they give a value for every sample."""

_PLACES: dict[str, Any] = {"loss": torch.nn.functional, "optimizer": torch.optim}


def resolve(what: str, value: Any) -> Callable[..., Any]:
    """The function or class that a parameter names.

    Args:
        what: The parameter, for error messages: "model", "loss", "optimizer" or "metric".
        value: A function or class, "module:name" of one, or a name in torch.

    Raises:
        ConfigError: There is no such function, or a model instead of what builds it.
    """
    if what == "model" and isinstance(value, torch.nn.Module):
        raise ConfigError(
            f"model is a {type(value).__name__}; expected a function that builds it: every worker calls it for itself"
        )
    if callable(value):
        return value
    if isinstance(value, str):
        module, _, name = value.rpartition(":")
        try:
            place = import_module(module) if module else METRICS if what == "metric" else _PLACES.get(what)
        except ImportError as error:
            raise ConfigError(f"{what}={value!r}: {error}; name a module that every executor has") from error
        found = place.get(name) if isinstance(place, dict) else getattr(place, name, None)
        if callable(found):
            return found
    known = {"loss": " a function of torch.nn.functional,", "optimizer": " a class of torch.optim,"}.get(what, "")
    known = f" one of {', '.join(METRICS)}," if what == "metric" else known
    raise ConfigError(f"{what}={value!r}; expected{known} a function, or 'module:name' of one")


def check_functions(model: Any, loss: Any, optimizer: Any, options: Any, metrics: Any) -> None:
    """Check what is to be trained, as far as that is possible without training it.

    Raises:
        ConfigError: A function is not there, or the optimizer does not take these options.
    """
    if isinstance(metrics, str):
        raise ConfigError(f"metrics={metrics!r}, expected a list: metrics=[{metrics!r}]")
    for what, value in (("model", model), ("loss", loss), *(("metric", metric) for metric in metrics)):
        resolve(what, value)
    make = resolve("optimizer", optimizer)
    if not isinstance(options, dict):
        raise ConfigError(f"the options of the optimizer are {options!r}; expected a dict such as {{'lr': 0.1}}")
    try:
        inspect.signature(make).bind([], **options)
    except TypeError as error:
        name = optimizer if isinstance(optimizer, str) else make.__name__
        raise ConfigError(f"the optimizer {name} cannot be made with {options}: {error}") from None
    except ValueError:
        pass  # some built-in functions have no signature


def name_of(what: str, value: Any) -> str:
    """The name by which `resolve` finds the same function.

    Raises:
        ConfigError: The function cannot be imported by name.
    """
    if isinstance(value, str):
        return value
    module, name = getattr(value, "__module__", "__main__"), getattr(value, "__qualname__", "")
    text = f"{module}:{name}"
    if module == "__main__" or not name.isidentifier() or resolve(what, text) is not value:
        raise ConfigError(
            f"{what}={getattr(value, '__qualname__', repr(value))} cannot be saved: expected a function that can be "
            f'imported by name; put it into a module and pass it from there, or pass {what}="module:name"'
        )
    return text


def is_classification(loss: Any) -> bool:
    """Whether a loss compares scores of classes with the number of the right class."""
    return (loss if isinstance(loss, str) else getattr(loss, "__name__", "")) in _CLASSIFICATION

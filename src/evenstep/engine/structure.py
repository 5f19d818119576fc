"""Tensors in tuples, lists and dicts, taken apart into a description that JSON can carry and the tensors themselves."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from evenstep.core.errors import ConfigError

__all__ = ["describe", "fill", "specs"]


def describe(value: Any, leaves: list[Tensor], whose: str) -> Any:
    """Describe what a value is made of.

    Args:
        value: Tensors in tuples, lists and dicts.
        leaves: The tensors are appended to it, in order.
        whose: Where it comes from, for the error.

    Raises:
        ConfigError: It contains something else.
    """
    if isinstance(value, Tensor):
        leaves.append(value)
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape[1:])]}
    if isinstance(value, dict):
        return {"dict": {key: describe(item, leaves, whose) for key, item in value.items()}}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [describe(item, leaves, whose) for item in value]}
    raise ConfigError(f"{whose} is a {type(value).__name__}; expected tensors in tuples, lists or dicts")


def specs(description: Any) -> list[Any]:
    """The type of every tensor in a description, and its shape without the first dimension."""
    ((kind, inner),) = description.items()
    if kind == "tensor":
        return [inner]
    return [spec for item in (inner.values() if kind == "dict" else inner) for spec in specs(item)]


def fill(description: Any, tensors: Iterator[Tensor]) -> Any:
    """The inverse of `describe`."""
    ((kind, inner),) = description.items()
    if kind == "tensor":
        return next(tensors)
    if kind == "dict":
        return {key: fill(item, tensors) for key, item in inner.items()}
    return (list if kind == "list" else tuple)(fill(item, tensors) for item in inner)

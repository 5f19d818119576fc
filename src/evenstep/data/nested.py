"""Nested values: what a batch may be made of, taken apart and put together again with its types kept.

A *structure* is a mapping (even one that is not a `dict`, such as the `BatchEncoding` of a tokenizer), a named tuple, a
data class, a list or a tuple.
"""

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from evenstep.core.errors import ConfigError

__all__ = ["children", "is_sequence", "rebuild", "tensors_in", "to_device"]


def is_sequence(value: Any) -> bool:
    """Whether it is a list or a tuple whose items have no names."""
    return isinstance(value, list | tuple) and not hasattr(value, "_fields")


def children(value: Any) -> dict[str, Any] | None:
    """What a structure holds, keyed by what is written after the structure's name; None: not a structure."""
    if isinstance(value, Mapping):
        return {f"[{key!r}]": item for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {f".{name}": item for name, item in zip(value._fields, value, strict=True)}
    if isinstance(value, list | tuple):
        return {f"[{n}]": item for n, item in enumerate(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f".{field.name}": getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def rebuild(value: Any, change: Callable[[Any], Any]) -> Any:
    """A structure of the same kind with everything in it changed; anything else is returned as it is.

    Raises:
        ConfigError: It is a mapping that cannot be built from a dict.
    """
    if isinstance(value, Mapping):
        return _rebuild_mapping(value, {key: change(item) for key, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(change(item) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(change(item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        twin = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(twin, field.name, change(getattr(value, field.name)))  # works for a frozen one too
        return twin
    return value


def _rebuild_mapping(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if isinstance(value, dict | UserDict):  # a copy keeps what a subclass holds besides the items
        twin = copy.copy(value)
        for key, item in items.items():
            twin[key] = item
        return twin
    try:
        return type(value)(items)  # type: ignore[call-arg]  # most can
    except TypeError as error:
        raise ConfigError(
            f"the batch holds a {type(value).__name__}, a mapping that cannot be built from a dict ({error}); pass "
            "dict(...) of it"
        ) from error


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in a structure."""
    if isinstance(value, Tensor):
        return [value]
    if type(value) is dict or type(value) is list:  # as nearly all are: naming what they hold would take its time
        items = value.values() if type(value) is dict else value
    else:
        items = (children(value) or {}).values()
    return [tensor for item in items for tensor in tensors_in(item)]


def to_device(value: Any, device: str) -> Any:
    """Move every tensor in a structure."""
    if isinstance(value, Tensor):
        return value if device == "cpu" and value.is_cpu else value.to(device, non_blocking=True)
    if type(value) is dict:
        return {key: to_device(item, device) for key, item in value.items()}
    return rebuild(value, lambda item: to_device(item, device))

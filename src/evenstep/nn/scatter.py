"""Cutting a batch into parts and putting the outputs of the parts together, through any nested containers."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from evenstep.core.errors import ConfigError, UnsupportedError

__all__ = ["gather", "num_parts", "scatter"]


def num_parts(value: Any, dim: int, limit: int) -> int:
    """Into how many parts to cut: `limit`, or fewer for a small batch; 1 where there is no tensor to cut.

    Raises:
        ConfigError: A tensor has no dimension `dim`.
    """
    sizes = []
    for tensor in _tensors(value):
        if not -tensor.dim() <= dim < tensor.dim():
            raise ConfigError(
                f"an input has shape {tuple(tensor.shape)} and cannot be cut along dim {dim}; "
                "give it one more dimension, or wrap it in an object of your own to hand it to every replica as it is"
            )
        sizes.append(tensor.shape[dim])
    return max(1, min(limit, *sizes)) if sizes else 1


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.dim():
            yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def scatter(value: Any, devices: Sequence[torch.device], dim: int) -> list[Any]:
    """Cut all tensors in a value into one part for each device; anything else is in every part.

    Differentiable. Parts differ by at most one row, the first ones being the larger ones.
    """
    num = len(devices)
    if isinstance(value, Tensor):
        parts = value.tensor_split(num, dim) if value.dim() else [value] * num
        return [part.to(device) for part, device in zip(parts, devices, strict=True)]
    if isinstance(value, tuple | list):
        columns = [scatter(item, devices, dim) for item in value]
        return [_like(value, [column[n] for column in columns]) for n in range(num)]
    if isinstance(value, dict):
        columns = [scatter(item, devices, dim) for item in value.values()]
        return [_like_dict(value, [column[n] for column in columns]) for n in range(num)]
    return [value] * num


def gather(parts: Sequence[Any], device: torch.device, dim: int, where: str = "the output") -> Any:
    """Put the outputs of replicas together on a device: the inverse of `scatter`. Differentiable.

    Raises:
        UnsupportedError: Replicas gave outputs of different structure, or different values that are not tensors.
    """
    first = parts[0]
    if any(type(part) is not type(first) for part in parts) and not all(isinstance(p, Tensor) for p in parts):
        raise _differ(parts, where)
    if isinstance(first, Tensor):
        moved = [part.to(device) for part in parts]
        return torch.cat(moved, dim) if first.dim() else torch.stack(moved)
    if isinstance(first, tuple | list):
        if any(len(part) != len(first) for part in parts):
            raise _differ(parts, where)
        return _like(first, [gather([p[i] for p in parts], device, dim, f"{where}[{i}]") for i in range(len(first))])
    if isinstance(first, dict):
        if any(part.keys() != first.keys() for part in parts):
            raise _differ(parts, where)
        return _like_dict(first, [gather([p[k] for p in parts], device, dim, f"{where}[{k!r}]") for k in first])
    if not all(part is first or _equal(part, first) for part in parts):
        raise _differ(parts, where)
    return first


def _like(value: Any, items: list[Any]) -> Any:
    make: Callable[..., Any] = type(value)
    return make(*items) if hasattr(value, "_fields") else make(items)


def _like_dict(value: dict[Any, Any], items: list[Any]) -> Any:
    copy = value.copy()  # keeps a default factory, the order, and what a subclass copies
    copy.update(zip(value, items, strict=True))
    return copy


def _equal(a: Any, b: Any) -> bool:
    same = a == b
    return same is True


def _differ(parts: Sequence[Any], where: str) -> UnsupportedError:
    found = ", ".join(f"{part!r:.60} in replica {n}" for n, part in enumerate(parts))
    return UnsupportedError(
        f"{where} of the replicas cannot be put together: {found}; return tensors, or what is equal in all replicas"
    )

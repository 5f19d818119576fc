"""What a batch holds, in few words: enough to see that two workers have come with different ones, and where."""

import hashlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from evenstep.core.checksum import checksum

__all__ = ["contents_of"]

_PLAIN = str | int | float | bool | bytes | None


def contents_of(value: Any, path: str = "batch") -> dict[str, str]:
    """Shape, dtype and checksum of every tensor in nested tuples, lists and mappings, and plain values, by path.

    Of anything else the type is told: what it holds cannot be compared.
    """
    if isinstance(value, Tensor):
        return {path: f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)} {checksum(value):016x}"}
    if isinstance(value, Mapping):
        items = [(f"{path}[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, list | tuple) and value and all(isinstance(item, _PLAIN) for item in value):
        return {path: f"{len(value)} values {hashlib.blake2b(repr(list(value)).encode(), digest_size=8).hexdigest()}"}
    elif isinstance(value, list | tuple):
        items = [(f"{path}[{n}]", item) for n, item in enumerate(value)]
    elif isinstance(value, _PLAIN):
        return {path: repr(value)}
    else:
        return {path: type(value).__name__}
    return {where: what for name, item in items for where, what in contents_of(item, name).items()}

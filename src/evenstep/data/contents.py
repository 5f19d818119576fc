"""A summary of what a batch holds: enough to see that two workers have different ones, and where."""

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evenstep.core.checksum import checksum
from evenstep.data.nested import children, is_sequence

__all__ = ["contents_of", "shortened"]

_PLAIN = str | int | float | bool | bytes | None
_MOST = 64  # of more than so many tensors and values, a checksum is enough


def contents_of(value: Any, path: str = "batch") -> dict[str, str]:
    """Shape, dtype and checksum of every tensor and array in a structure, and plain values, by path.

    Anything else is represented by its type: its contents cannot be compared.
    """
    if isinstance(value, Tensor):
        return {path: f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)} {checksum(value):016x}"}
    if isinstance(value, np.ndarray):
        return contents_of(torch.from_numpy(value), path) if value.dtype.kind in "biufc" else {path: repr(value.dtype)}
    if isinstance(value, _PLAIN):
        return {path: repr(value)}
    if is_sequence(value) and value and all(isinstance(item, _PLAIN) for item in value):
        return {path: f"{len(value)} values {hashlib.blake2b(repr(list(value)).encode(), digest_size=8).hexdigest()}"}
    if hasattr(value, "__array_interface__"):  # an image of PIL
        return contents_of(np.asarray(value), path)
    held = children(value)
    if held is None:
        return {path: type(value).__name__}
    return {where: what for name, item in held.items() for where, what in contents_of(item, path + name).items()}


def shortened(contents: dict[str, str], path: str) -> dict[str, str]:
    """The same, or a checksum of it all if there is much."""
    if len(contents) <= _MOST:
        return contents
    digest = hashlib.blake2b(repr(sorted(contents.items())).encode(), digest_size=8).hexdigest()
    return {path: f"{len(contents)} tensors and values {digest}"}

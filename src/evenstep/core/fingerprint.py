"""SHA-256 over names, shapes, dtypes and bytes of tensors, in name order."""

import hashlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from evenstep.core.octets import octets

__all__ = ["digest", "fingerprint"]


def digest(name: str, tensor: Tensor) -> bytes:
    """The SHA-256 of one named tensor."""
    head = f"{name}|{tuple(tensor.shape)}|{str(tensor.dtype).removeprefix('torch.')}|"
    sha = hashlib.sha256(head.encode())
    if tensor.numel():
        sha.update(octets(tensor.detach().cpu()).numpy().data)
    return sha.digest()


def fingerprint(tensors: Mapping[str, Tensor], values: Mapping[str, Any] | None = None) -> str:
    """64 hex digits for named tensors and, after them, named plain values."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        sha.update(digest(name, tensors[name]))
    for value in sorted(f"{name}={value!r}" for name, value in (values or {}).items()):
        sha.update(value.encode() + b"|")
    return sha.hexdigest()

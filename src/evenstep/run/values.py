"""Plain values, tensors and arrays as bytes, without pickle: what workers hand to each other and to the journal."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evenstep.core.errors import ConfigError
from evenstep.core.octets import octets

__all__ = ["pack", "unpack"]

_PLAIN = (bool, int, float, str, type(None))
_LENGTH_BYTES = 8


def pack(value: Any, whose: str) -> bytes:
    """A value as bytes that begin with the length of its description.

    Args:
        value: Numbers, texts, None, tensors and arrays, in lists, tuples and mappings.
        whose: Where it comes from, for the error.

    Raises:
        ConfigError: It contains something else.
    """
    blobs: list[bytes] = []
    text = json.dumps(_describe(value, blobs, whose)).encode()
    return b"".join([len(text).to_bytes(_LENGTH_BYTES, "little"), text, *blobs])


def unpack(data: bytes) -> Any:
    """The inverse of `pack`; tensors are on the CPU, and a mapping is a dict."""
    end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    return _TensorReader(data, end).read(json.loads(data[_LENGTH_BYTES:end]))


def _describe(value: Any, blobs: list[bytes], whose: str) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Mapping):
        return {"dict": [[_describe(k, blobs, whose), _describe(v, blobs, whose)] for k, v in value.items()]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_describe(item, blobs, whose) for item in value]}
    if isinstance(value, Tensor) and value.layout == torch.strided:
        return {"tensor": _take_out(value.detach().cpu(), blobs)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {"array": _take_out(torch.from_numpy(np.array(value)), blobs)}
    raise ConfigError(
        f"{whose} holds a {type(value).__name__}; expected numbers, texts, tensors and arrays, in lists, tuples and "
        "dicts: all workers get it, without pickle"
    )


def _take_out(tensor: Tensor, blobs: list[bytes]) -> list[Any]:
    if tensor.numel():
        blobs.append(octets(tensor).numpy().tobytes())
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


class _TensorReader:
    """Reads tensors in their order."""

    def __init__(self, data: bytes, place: int) -> None:
        self._data, self._place = data, place

    def read(self, described: Any) -> Any:
        if not isinstance(described, dict):
            return described
        ((kind, inner),) = described.items()
        if kind == "dict":
            return {self.read(key): self.read(item) for key, item in inner}
        if kind == "tensor":
            return self._tensor(*inner)
        if kind == "array":
            return self._tensor(*inner).numpy()
        return (list if kind == "list" else tuple)(self.read(item) for item in inner)

    def _tensor(self, dtype: str, shape: list[int]) -> Tensor:
        empty = torch.empty(shape, dtype=getattr(torch, dtype))
        num_bytes = empty.numel() * empty.element_size()
        if num_bytes:
            here = bytearray(self._data[self._place : self._place + num_bytes])
            self._place += num_bytes
            return torch.frombuffer(here, dtype=empty.dtype).reshape(shape)
        return empty

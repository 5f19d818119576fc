"""The form of a tensor of the state: enough to make room for another like it, and to describe it to others."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Form"]


@dataclass(frozen=True)
class Form:
    """The shape, type, strides and place of a tensor.

    Attributes:
        shape: The shape.
        dtype: The type.
        stride: The strides to keep: the tensor's own if it has no gaps, otherwise contiguous ones.
        on_host: Whether it stays on the host even if the parameters do not: optimizers count steps there.
    """

    shape: torch.Size
    dtype: torch.dtype
    stride: tuple[int, ...]
    on_host: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "Form":
        """The form of a tensor."""
        stride = tensor.stride() if _is_dense(tensor) else torch.empty(tensor.shape, device="meta").stride()
        return cls(tensor.shape, tensor.dtype, tuple(stride), tensor.device.type == "cpu")

    @property
    def num_bytes(self) -> int:
        """How many bytes its elements take."""
        return self.shape.numel() * self.dtype.itemsize

    def without_values(self) -> Tensor:
        """A tensor like this that has no memory."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")

    def pack(self) -> list[Any]:
        """As JSON."""
        return [list(self.shape), str(self.dtype).removeprefix("torch."), list(self.stride), self.on_host]

    @classmethod
    def unpack(cls, packed: list[Any]) -> "Form":
        """The inverse of `pack`."""
        shape, dtype, stride, on_host = packed
        return cls(torch.Size(shape), getattr(torch, dtype), tuple(stride), on_host)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the strides are a permutation of contiguous ones (channels-last, transposed) and can be kept."""
    dims = sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1)
    expected = 1
    for stride, size in dims:
        if stride != expected:
            return False
        expected *= size
    return True

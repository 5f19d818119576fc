"""Fakes of what the engine stands on: memory without a segment."""

import torch
from torch import Tensor

from evenstep.transport.memory import Region


class FakeMemory:
    """Plain tensors, kept by where they were reserved, so that several workers of one test can be around it."""

    device = torch.device("cpu")
    shared = True

    def __init__(self, reserved: list[Tensor] | None = None) -> None:
        self._reserved: list[Tensor] = [] if reserved is None else reserved
        self._at = 0
        self.num_fences = 0

    def another(self) -> "FakeMemory":
        """The same memory as another worker sees it."""
        return FakeMemory(self._reserved)

    def reserve(self, num_bytes: int) -> Region:
        del num_bytes
        return self

    scratch = reserve

    def clear_scratch(self) -> None:
        pass

    def words(self, count: int) -> Tensor:
        return self.tensor(torch.Size([count]), torch.int64)

    def fence(self) -> None:
        self.num_fences += 1

    def tensor(self, shape, dtype, stride=None, on_host=True) -> Tensor:
        if self._at == len(self._reserved):
            made = torch.zeros(shape, dtype=dtype)
            self._reserved.append(
                made if stride is None else made.new_empty(0).set_(made.untyped_storage(), 0, shape, stride)
            )
        self._at += 1
        return self._reserved[self._at - 1]

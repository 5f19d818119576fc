"""Memory of tensors: an *area* for those of a message, and the image of all parameters that processes map."""

import mmap
import sys
from collections.abc import Mapping

import torch
from torch import Tensor

from evenstep.native import core
from evenstep.server.wire.tensors import Spec, TensorHead
from evenstep.transport.memory import aligned

__all__ = ["Area", "hand_over", "map_image", "places"]

_UNUSED = 2  # references to memory that no tensor uses: one from its area, one from the count itself
_PAST_CACHES_BYTES = 1 << 20


class Area:
    """Memory for the tensors of an update; keeps the tensors for reuse.

    Attributes:
        data: The memory.
    """

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self._head: TensorHead | None = None
        self._tensors: dict[str, Tensor] = {}

    def tensors(self, head: TensorHead) -> dict[str, Tensor]:
        """The tensors of a message whose data is here."""
        if head is not self._head:
            self._head, self._tensors = head, head.tensors(self.data)
        return dict(self._tensors)

    def is_free(self, *, lasting: bool) -> bool:
        """Whether nobody holds its tensors.

        Args:
            lasting: Whether it is known that nobody does, so that its tensors are kept for the next update.
        """
        if not lasting:
            self._head, self._tensors = None, {}
            return sys.getrefcount(self.data) <= _UNUSED
        return True


def places(specs: Mapping[str, Spec]) -> tuple[dict[str, int], int]:
    """Where each parameter begins in an image, aligned as in a run, and how long the image is."""
    found, end = {}, 0
    for name, spec in specs.items():
        found[name] = end
        end += aligned(spec.num_bytes)
    return found, max(end, 1)


def map_image(fd: int, specs: Mapping[str, Spec], *, writable: bool = True) -> dict[str, Tensor]:
    """The tensors of an image, over the memory of its descriptor. They keep it mapped.

    Args:
        fd: The descriptor.
        specs: What is in it.
        writable: False: for a descriptor that can only be read. What is written is then seen by this process alone.
    """
    offsets, num_bytes = places(specs)
    memory = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED if writable else mmap.MAP_PRIVATE)
    found = {}
    for name, spec in specs.items():
        if spec.num_elements:
            flat = torch.frombuffer(memory, dtype=spec.dtype, count=spec.num_elements, offset=offsets[name])
            found[name] = flat.view(spec.shape)
        else:
            found[name] = torch.empty(spec.shape, dtype=spec.dtype)
    return found


def hand_over(target: Tensor, source: Tensor) -> Tensor:
    """Copy a tensor to or from memory that another process has just used; returns the target."""
    num_bytes = source.nbytes
    alike = target.dtype == source.dtype and target.shape == source.shape
    if num_bytes >= _PAST_CACHES_BYTES and alike and target.is_contiguous() and source.is_contiguous():
        core.copy(target.data_ptr(), source.data_ptr(), num_bytes)
    else:
        target.detach().copy_(source)
    return target

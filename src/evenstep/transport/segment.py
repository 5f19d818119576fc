"""One shared segment per run: a memfd that all workers map.

It has no name, so nothing is left behind however the run ends: the memory goes when the last process that maps it does.
It is sparse: reserving costs nothing until a page is written. Every worker reserves the same regions in the same order
(the layout is a pure function of what was prepared), so offsets need no agreement.
"""

import mmap
import os

import torch
from torch import Tensor

from evenstep.core.errors import ConfigError
from evenstep.native import core

__all__ = ["ALIGNMENT", "Region", "Segment"]

ALIGNMENT = 64  # MKL and oneDNN may choose other kernels, with other bits, for other alignments
_PAGE = mmap.PAGESIZE
_FILE_BYTES = 1 << 42
_SLOT_BYTES = 1 << 18


class Region:
    """A range of the segment, mapped into this process, handed out from front to back as tensors."""

    def __init__(self, fd: int, offset: int, num_bytes: int) -> None:
        self._memory = mmap.mmap(fd, num_bytes, offset=offset)
        self._used = 0

    def tensor(self, shape: torch.Size, dtype: torch.dtype, stride: tuple[int, ...] | None = None) -> Tensor:
        """The next tensor of this region, aligned to 64 bytes, with a storage of its own. It keeps the region mapped."""
        count = shape.numel()
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=self._used)
        self._used += aligned(count * flat.element_size())
        return flat.view(shape) if stride is None else flat.as_strided(shape, stride)


class Segment:
    """The control part of the C core, followed by regions."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        header = mmap.mmap(fd, _PAGE)
        described = core.describe(_address(header))
        if described is None:
            raise ConfigError(
                f"file descriptor {fd} is no evenstep segment of this build; start all workers with one version"
            )
        self.num_workers, slot_bytes = described
        self.slot_bytes = slot_bytes
        self._end = aligned(core.control_bytes(*described), _PAGE)
        self._control = mmap.mmap(fd, self._end)
        self.base = _address(self._control)

    @classmethod
    def create(cls, num_workers: int) -> "Segment":
        """Make a segment for so many workers. Its descriptor is inherited by forked children only."""
        fd = os.memfd_create("evenstep", os.MFD_CLOEXEC)
        os.ftruncate(fd, _FILE_BYTES)
        control = mmap.mmap(fd, aligned(core.control_bytes(num_workers, _SLOT_BYTES), _PAGE))
        core.init(_address(control), num_workers, _SLOT_BYTES)
        return cls(fd)

    def reserve(self, num_bytes: int) -> Region:
        """Map the next range of the segment. All workers must call this alike."""
        offset, self._end = self._end, self._end + aligned(max(num_bytes, 1), _PAGE)
        return Region(self.fd, offset, self._end - offset)

    def close(self) -> None:
        """Close the descriptor. Tensors made from regions stay valid until they are gone."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def aligned(num_bytes: int, to: int = ALIGNMENT) -> int:
    """The next multiple of `to`."""
    return -(-num_bytes // to) * to


def _address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()

"""One shared segment per run: a memfd that all workers map.

It has no name, so nothing is left behind however the run ends: the memory goes when the last process that maps it does.
It is sparse: reserving costs nothing until a page is written. It has four parts:

- the control part of the C core, and behind it the *board*: a few words for every worker and for the supervisor;
- regions for the *state*, reserved by every worker in the same order (a pure function of what was prepared and
  trained), so offsets need no agreement, and a worker that joins later finds them too;
- *scratch* regions, laid out anew whenever the workers change;
- the *journal*, written and read as a file.
"""

import mmap
import os

import torch
from torch import Tensor

from evenstep.core.errors import ConfigError
from evenstep.native import core

__all__ = ["ALIGNMENT", "JOURNAL_BEGIN", "Region", "Segment"]

ALIGNMENT = 64  # MKL and oneDNN may choose other kernels, with other bits, for other alignments
_PAGE = mmap.PAGESIZE
_FILE_BYTES = 1 << 42
_SCRATCH_BEGIN = 1 << 40
JOURNAL_BEGIN = 1 << 41
_BOARD_WORDS = 8  # of every worker, and of the supervisor
_SLOT_BYTES = 1 << 18
_WINDOW_BYTES = 1 << 30  # mapped at once: every mapping holds a descriptor, and there may be thousands of regions


class Region:
    """A range of the segment, mapped into this process, handed out from front to back as tensors."""

    def __init__(self, window: mmap.mmap, offset: int, num_bytes: int) -> None:
        self._memory = window
        self._used = offset
        self._end = offset + num_bytes

    def tensor(self, shape: torch.Size, dtype: torch.dtype, stride: tuple[int, ...] | None = None) -> Tensor:
        """The next tensor of this region, aligned to 64 bytes, with its own storage. It keeps the region mapped."""
        count = shape.numel()
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=self._used)
        assert self._used + count * flat.element_size() <= self._end, "the region is full"
        self._used += aligned(count * flat.element_size())
        return flat.view(shape) if stride is None else flat.as_strided(shape, stride)


class _Area:
    """A part of the segment from which regions are reserved, from front to back."""

    def __init__(self, fd: int, begin: int) -> None:
        self._fd, self._end = fd, begin
        self._window: mmap.mmap | None = None
        self._window_begin = 0

    def reserve(self, num_bytes: int) -> Region:
        begin, self._end = self._end, self._end + aligned(max(num_bytes, 1), _PAGE)
        if self._window is None or self._end > self._window_begin + len(self._window):
            self._window = mmap.mmap(self._fd, max(self._end - begin, _WINDOW_BYTES), offset=begin)
            self._window_begin = begin
        return Region(self._window, begin - self._window_begin, self._end - begin)


class Segment:
    """The control part of the C core and the board, followed by regions.

    Attributes:
        num_workers: How many workers there is room for.
        slot_bytes: What one post may carry.
        base: Where the control part is mapped.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        try:
            header = mmap.mmap(fd, _PAGE)  # a name of its own: the mapping must outlive the look at it
            described = core.describe(_address(header))
        except (OSError, ValueError):
            described = None  # it is no file that could be mapped
        if described is None:
            raise ConfigError(
                f"file descriptor {fd} is no evenstep segment of this build; start all workers with one version, and "
                "programs that a worker starts without its EVENSTEP_* variables"
            )
        self.num_workers, self.slot_bytes = described
        self._control = mmap.mmap(fd, _control_bytes(*described))
        self.base = _address(self._control)
        self._board = self.base + core.control_bytes(*described)
        self._state = _Area(fd, len(self._control))
        self._scratch = _Area(fd, _SCRATCH_BEGIN)

    @classmethod
    def create(cls, num_workers: int, slot_bytes: int = _SLOT_BYTES) -> "Segment":
        """Make a segment for so many workers. Its descriptor is inherited by forked children only.

        Raises:
            ConfigError: The system does not let us; the message says why.
        """
        try:
            fd = os.memfd_create("evenstep", os.MFD_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"no shared segment could be made: {error.strerror}; look at `ulimit -a`") from error
        try:
            os.ftruncate(fd, _FILE_BYTES)
            control = mmap.mmap(fd, _control_bytes(num_workers, slot_bytes))
        except OSError as error:
            os.close(fd)
            raise ConfigError(
                f"no shared segment could be made: {error.strerror}; it is {_FILE_BYTES >> 40} TiB long (and takes "
                "only what is written to it): run without limits on file size and virtual memory, "
                "`ulimit -f unlimited -v unlimited`"
            ) from error
        core.init(_address(control), num_workers, slot_bytes)
        return cls(fd)

    def reserve(self, num_bytes: int) -> Region:
        """Take the next range of the state. All workers must call this alike."""
        return self._state.reserve(num_bytes)

    def scratch(self, num_bytes: int) -> Region:
        """Take the next range of what lasts as long as the workers stay the same. They must call this alike."""
        return self._scratch.reserve(num_bytes)

    def clear_scratch(self) -> None:
        """Lay out scratch regions from the beginning again. All workers must call this alike."""
        self._scratch = _Area(self.fd, _SCRATCH_BEGIN)

    def word(self, worker: int, number: int) -> int:
        """The address of a word on the board; the supervisor's number is `num_workers`. Use `core.load` and `store`."""
        return self._board + 8 * (worker * _BOARD_WORDS + number)

    def close(self) -> None:
        """Close the descriptor. Tensors made from regions stay valid until they are gone."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def aligned(num_bytes: int, to: int = ALIGNMENT) -> int:
    """The next multiple of `to`."""
    return -(-num_bytes // to) * to


def _control_bytes(num_workers: int, slot_bytes: int) -> int:
    return aligned(core.control_bytes(num_workers, slot_bytes) + 8 * _BOARD_WORDS * (num_workers + 1), _PAGE)


def _address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()

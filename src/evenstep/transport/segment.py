"""One shared segment per run: a memfd that all workers map.

It has no name, so nothing is left behind however the run ends: the memory is freed with the last process that maps it.
It is sparse: reserving costs nothing until a page is written. It has these parts:

- the control part of the C core, followed by the *board*: a few words for every worker and for the supervisor;
- the areas of the *state* and of *scratch*, which are a `Memory`;
- the *journal*, written and read as a file;
- the *outbox*: what the workers of this machine have for others (`outbox.py`);
- the *trails*: what each of them did when, if the run is traced (`trail.py`).
"""

import mmap
import os

import torch

from evenstep.core.errors import ConfigError
from evenstep.native import core
from evenstep.transport.memory import HostMemory, aligned

__all__ = ["JOURNAL_BEGIN", "OUTBOX_BEGIN", "SEGMENT_BYTES", "TRAIL_BEGIN", "Segment"]

_PAGE = mmap.PAGESIZE
SEGMENT_BYTES = 1 << 42
_SCRATCH_BEGIN = 1 << 40
_ACROSS_BEGIN = 3 << 39
JOURNAL_BEGIN = 1 << 41
OUTBOX_BEGIN = 3 << 40
TRAIL_BEGIN = 7 << 39
_BOARD_WORDS = 16  # of every worker, and of the supervisor
_SLOT_BYTES = 1 << 18


class Segment:
    """The control part of the C core, the board, and memory.

    Attributes:
        num_workers: How many workers there is room for.
        slot_bytes: The most that one post may carry.
        base: Where the control part is mapped.
        memory: The areas of state and scratch.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        try:
            header = mmap.mmap(fd, _PAGE)  # named, so that the mapping outlives the look at it
            described = core.describe(_address(header))
        except (OSError, ValueError):
            described = None  # not a file that can be mapped
        if described is None:
            raise ConfigError(
                f"file descriptor {fd} is not an evenstep segment of this build; start all workers with one version, "
                "and programs that a worker starts without its EVENSTEP_* variables"
            )
        self.num_workers, self.slot_bytes = described
        self._control = mmap.mmap(fd, _control_bytes(*described))
        self.base = _address(self._control)
        self._board = self.base + core.control_bytes(*described)
        self.memory = HostMemory(fd, len(self._control), _SCRATCH_BEGIN, _ACROSS_BEGIN)

    @classmethod
    def create(cls, num_workers: int, slot_bytes: int = _SLOT_BYTES) -> "Segment":
        """Make a segment with room for this many workers. Only forked children inherit its descriptor.

        Raises:
            ConfigError: The system refuses; the message says why.
        """
        try:
            fd = os.memfd_create("evenstep", os.MFD_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"no shared segment could be created: {error.strerror}; look at `ulimit -a`") from error
        try:
            os.ftruncate(fd, SEGMENT_BYTES)
            control = mmap.mmap(fd, _control_bytes(num_workers, slot_bytes))
        except OSError as error:
            os.close(fd)
            raise ConfigError(
                f"no shared segment could be created: {error.strerror}; it is {SEGMENT_BYTES >> 40} TiB long (and "
                "takes only what is written to it): run without limits on file size and virtual memory, "
                "`ulimit -f unlimited -v unlimited`"
            ) from error
        core.init(_address(control), num_workers, slot_bytes)
        return cls(fd)

    def word(self, worker: int, number: int) -> int:
        """The address of a word on the board; the supervisor's number is `num_workers`. Use `core.load` and `store`."""
        return self._board + 8 * (worker * _BOARD_WORDS + number)

    def close(self) -> None:
        """Close the descriptor. Tensors made from regions stay valid until they are gone."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _control_bytes(num_workers: int, slot_bytes: int) -> int:
    return aligned(core.control_bytes(num_workers, slot_bytes) + 8 * _BOARD_WORDS * (num_workers + 1), _PAGE)


def _address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()

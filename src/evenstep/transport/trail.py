"""A worker's record of what it does: bytes in the shared segment, which outlive it.

Each worker has its own ring, which only it writes and one process of the machine reads. The worker never waits:
what finds no room is dropped and counted.
"""

import mmap

import torch

from evenstep.native import core
from evenstep.transport.segment import TRAIL_BEGIN, Segment

__all__ = ["ROOM_BYTES", "Trail"]

_PAGE = mmap.PAGESIZE
ROOM_BYTES = 1 << 20
"""How many unread bytes fit into a worker's ring."""


class Trail:
    """The ring of one worker: three words (bytes written, bytes read, how often there was no room), then the bytes.

    Args:
        segment: The segment of the machine.
        worker: The worker.
    """

    def __init__(self, segment: Segment, worker: int) -> None:
        place = TRAIL_BEGIN + worker * (_PAGE + ROOM_BYTES)
        self._window = mmap.mmap(segment.fd, _PAGE + ROOM_BYTES, offset=place)
        self._written = torch.frombuffer(self._window, dtype=torch.uint8).data_ptr()
        self._read, self._dropped = self._written + 64, self._written + 128

    def write(self, data: bytes) -> None:
        """Write bytes: all of them, or none if there is no room. For the worker alone."""
        written = core.load(self._written)
        if written + len(data) - core.load(self._read) > ROOM_BYTES:
            core.store(self._dropped, core.load(self._dropped) + 1)
            return
        begin = written % ROOM_BYTES
        head = data[: ROOM_BYTES - begin]
        self._window[_PAGE + begin : _PAGE + begin + len(head)] = head
        if len(head) < len(data):
            self._window[_PAGE : _PAGE + len(data) - len(head)] = data[len(head) :]
        core.store(self._written, written + len(data))  # last: a worker killed before this has written nothing

    def read(self) -> bytes:
        """What was written since the last call. For the reader alone."""
        read, written = core.load(self._read), core.load(self._written)
        begin, count = read % ROOM_BYTES, written - read
        found = self._window[_PAGE + begin : _PAGE + min(begin + count, ROOM_BYTES)]
        found += self._window[_PAGE : _PAGE + count - len(found)]
        core.store(self._read, written)
        return found

    @property
    def dropped(self) -> int:
        """How often there was no room."""
        return core.load(self._dropped)

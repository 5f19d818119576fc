"""Requests of the workers of a machine to its bridge, in shared memory: what is to go to other machines.

A worker can ask for two things: to post what is in its slot on the other machines too, and to *put* a range of the
segment at the same place of another machine's, where a word is set once it is complete. Each worker has its own ring,
which only it writes; it waits only when the ring is full.
"""

import mmap
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from evenstep.native import core
from evenstep.transport.segment import OUTBOX_BEGIN, Segment

__all__ = ["ARRIVED", "EVERYONE", "POST", "PUT", "Mark", "Outbox", "Request", "Requests"]

POST, PUT = 1, 2
ASKED, ARRIVED = 0, 1  # marks
EVERYONE = -1
"""As a target: all other machines."""

_PAGE = mmap.PAGESIZE
_ENTRIES = 1024
_STRIDE = _PAGE + 64 * _ENTRIES
_PAUSE_S = 5e-5


class Request(NamedTuple):
    """Something for other machines.

    Attributes:
        kind: POST or PUT.
        generation: The generation that made it; later ones ignore it.
        target: Which machine, or EVERYONE.
        offset: For a put: where the range begins in the segment.
        num_bytes: The size of the range, or of the post.
        word: For a put: the offset of the word to set; 0: none.
        value: What to set it to.
        seq: For a post: its sequence number.
        local: For a post: how many workers of this machine take part in the exchange; their posts go together.
        seal: For a put on its way: the checksum of the range.
    """

    kind: int
    generation: int
    target: int = EVERYONE
    offset: int = 0
    num_bytes: int = 0
    word: int = 0
    value: int = 0
    seq: int = 0
    local: int = 1
    seal: int = 0

    def pack(self) -> tuple[int, ...]:
        """The request as the 8 words of an entry."""
        head = self.kind | self.local << 8 | self.generation << 24
        return (head, self.target, self.offset, self.num_bytes, self.word, self.value, self.seq, self.seal)

    @classmethod
    def unpack(cls, words: Iterable[int]) -> "Request":
        """The inverse of `pack`."""
        head, target, offset, num_bytes, word, value, seq, seal = words
        return cls(head & 0xFF, head >> 24, target, offset, num_bytes, word, value, seq, head >> 8 & 0xFFFF, seal)


class Mark:
    """A number in the segment that grows, and that can be waited for.

    Args:
        segment: The segment it is in.
        number: 0: a request was made; 1: something has arrived from another machine.
    """

    def __init__(self, segment: Segment, number: int) -> None:
        self._window = mmap.mmap(segment.fd, _PAGE, offset=OUTBOX_BEGIN)
        self._address = torch.frombuffer(self._window, dtype=torch.uint8).data_ptr() + 64 * number

    def bump(self) -> None:
        """Increase it, and wake those that wait."""
        core.mark_bump(self._address)

    def seen(self) -> int:
        """Its present value."""
        return core.mark_seen(self._address)

    def wait(self, seen: int, timeout_s: float, base: int = 0) -> None:
        """Wait until it exceeds `seen`, the time is up, or the group around `base` has failed."""
        core.mark_wait(self._address, seen, base, 0, int(timeout_s * 1e9))


class _Ring:
    """The ring of one worker: three words (how many were put in, taken out, and have left), then the entries."""

    def __init__(self, segment: Segment, worker: int) -> None:
        self._window = mmap.mmap(segment.fd, _STRIDE, offset=OUTBOX_BEGIN + _PAGE + worker * _STRIDE)
        self.pushed = torch.frombuffer(self._window, dtype=torch.uint8).data_ptr()
        self.taken, self.sent = self.pushed + 64, self.pushed + 128
        self.entries = np.frombuffer(self._window, dtype=np.int64, offset=_PAGE).reshape(_ENTRIES, 8)


class Outbox:
    """The worker's side.

    Args:
        segment: The segment of this machine.
        worker: The worker.
    """

    def __init__(self, segment: Segment, worker: int) -> None:
        self._base, self._ring = segment.base, _Ring(segment, worker)
        self._mark = Mark(segment, ASKED)
        self._count = core.load(self._ring.pushed)  # another worker may have been in this place
        self._last_put = 0  # how many requests there were when the last range was put

    def push(self, request: Request) -> None:
        """Make a request. Blocks while the ring is full, unless the group has failed: then it is dropped."""
        while self._count - core.load(self._ring.taken) >= _ENTRIES:
            if core.aborted(self._base) is not None:
                return
            time.sleep(_PAUSE_S)
        self._ring.entries[self._count % _ENTRIES] = request.pack()
        self._count += 1
        if request.kind == PUT:
            self._last_put = self._count
        core.store(self._ring.pushed, self._count)
        self._mark.bump()

    def is_empty(self) -> bool:
        """Whether all ranges have left this machine, so that their memory may be changed; a post is copied first."""
        return core.load(self._ring.sent) >= self._last_put

    def start_over(self) -> None:
        """Note that the bridge is gone, and with it what was asked of it."""
        self._last_put = 0


class Requests:
    """The bridge's side. Its `mark` grows with every request.

    Args:
        segment: The segment of this machine.
        workers: The workers of this machine.
        generation: Requests of other generations are dropped.
    """

    def __init__(self, segment: Segment, workers: Iterable[int], generation: int) -> None:
        self._rings = {worker: _Ring(segment, worker) for worker in workers}
        self.mark = Mark(segment, ASKED)
        self._generation = generation
        self._taken = {worker: core.load(ring.taken) for worker, ring in self._rings.items()}

    def take(self) -> Iterator[tuple[int, int, Request]]:
        """Take all requests, each with its worker and number, in each worker's order."""
        for worker, ring in self._rings.items():
            end = core.load(ring.pushed)
            for number in range(self._taken[worker], end):
                request = Request.unpack(ring.entries[number % _ENTRIES].tolist())
                if request.generation == self._generation:
                    yield worker, number, request
                else:
                    self.is_sent(worker, number)
            self._taken[worker] = end
            core.store(ring.taken, end)

    def is_sent(self, worker: int, number: int) -> None:
        """Note that a range has left, and all before it."""
        core.store(self._rings[worker].sent, number + 1)

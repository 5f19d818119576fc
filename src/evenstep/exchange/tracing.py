"""What a worker does when: spans of time that it leaves in the segment if tracing is on.

Times are those of the machine's monotonic clock, which all of its processes share. When tracing is off, it costs a
worker the check of a flag.
"""

import struct
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum
from typing import NamedTuple

from evenstep.exchange.board import Board
from evenstep.transport.segment import Segment
from evenstep.transport.trail import Trail

__all__ = ["Kind", "Span", "Tracer", "pack", "unpack"]

_HEAD = struct.Struct("<qqiBB")  # begin, duration, number, kind, bytes of the name
_NOTHING = nullcontext()
_BRIEF_NS = 10_000  # shorter waits are not recorded


class Kind(IntEnum):
    """What a span is; its name and number say more."""

    OPERATION = 0  # one attempt at it; its name, such as "step 3"
    LOAD = 1
    COMPUTE = 2
    FORWARD = 3  # of a shard
    BACKWARD = 4  # of a shard; -1: of all that this worker has
    EXCHANGE = 5  # its tag
    WAIT = 6  # for a worker; -1: for what the name says
    UPDATE = 7
    COMMIT = 8
    RECOVERY = 9
    UNFINISHED = 10  # what a worker was doing when it ended: its step, and more in the name
    LOST = 11  # its number: how many spans found no room


class Span(NamedTuple):
    """Something that a worker did: when it began and how long it took, by its machine's clock."""

    begin_ns: int
    duration_ns: int
    number: int
    kind: Kind
    name: str


def pack(span: Span) -> bytes:
    """A span as bytes that begin with their length."""
    name = span.name.encode(errors="backslashreplace")[:255]
    return _HEAD.pack(span.begin_ns, span.duration_ns, span.number, span.kind, len(name)) + name


def unpack(data: bytes) -> Iterator[Span]:
    """The spans in bytes that `pack` made."""
    place = 0
    while place < len(data):
        begin_ns, duration_ns, number, kind, name_bytes = _HEAD.unpack_from(data, place)
        place += _HEAD.size + name_bytes
        yield Span(begin_ns, duration_ns, number, Kind(kind), data[place - name_bytes : place].decode(errors="replace"))


class Tracer:
    """Records what one worker does. One thread at a time may use it.

    Args:
        segment: The segment of the machine.
        worker: The worker.

    Attributes:
        on: Whether to record anything.
    """

    def __init__(self, segment: Segment, worker: int) -> None:
        self.on = Board(segment).traced
        self._trail: Trail | None = Trail(segment, worker) if self.on else None

    def note(self, kind: Kind, begin_ns: int, name: str = "", number: int = -1) -> None:
        """Record something that was done from `begin_ns` until now."""
        if self.on and self._trail is not None:
            self._trail.write(pack(Span(begin_ns, time.monotonic_ns() - begin_ns, number, kind, name)))

    def waited(self, begin_ns: int, number: int, name: str = "") -> None:
        """Record that this worker waited from `begin_ns` until now; see `Kind.WAIT` for whom."""
        if time.monotonic_ns() - begin_ns > _BRIEF_NS:
            self.note(Kind.WAIT, begin_ns, name, number)

    def span(self, kind: Kind, name: str = "", number: int = -1) -> AbstractContextManager[None]:
        """Record what is done while this is open, however it ends."""
        return _Noted(self, kind, name, number) if self.on else _NOTHING


class _Noted:
    def __init__(self, tracer: Tracer, kind: Kind, name: str, number: int) -> None:
        self._tracer, self._what = tracer, (kind, name, number)

    def __enter__(self) -> None:
        self._begin_ns = time.monotonic_ns()

    def __exit__(self, *_: object) -> None:
        kind, name, number = self._what
        self._tracer.note(kind, self._begin_ns, name, number)

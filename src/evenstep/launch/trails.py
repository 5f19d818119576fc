"""What the workers of one machine did when, collected from their trails for the trace."""

import time
from typing import NamedTuple

from evenstep.exchange.board import Board
from evenstep.exchange.tracing import Kind, Span, pack
from evenstep.transport.segment import Segment
from evenstep.transport.trail import Trail

__all__ = ["TrailPiece", "Trails"]

_EVERY_S = 0.2


class TrailPiece(NamedTuple):
    """Spans of one worker, packed."""

    place: int
    pid: int
    spans: bytes


class Trails:
    """The trails of a machine's workers; those that start from now on leave one.

    Args:
        segment: The segment of the machine.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment, self._board = segment, Board(segment)
        self._board.traced = True
        self._trails: dict[int, Trail] = {}
        self._pids: dict[int, int] = {}
        self._dropped: dict[int, int] = {}
        self._ready: list[TrailPiece] = []
        self._next_s = 0.0

    def started(self, place: int, pid: int) -> None:
        """A worker has been started in a place; the one before it has ended."""
        self._pids[place] = pid
        if place not in self._trails:
            self._trails[place], self._dropped[place] = Trail(self._segment, place), 0

    def ended(self, place: int) -> None:
        """A worker has ended. The span that it was in is noted, since it can no longer do so itself."""
        self._collect(place)
        doing, begin_ns = self._board.doing(place), self._board.busy_since(place)
        if begin_ns:
            inside = "waiting" if doing.waiting else "" if doing.shard is None else f"shard {doing.shard}"
            span = Span(begin_ns, time.monotonic_ns() - begin_ns, doing.step, Kind.UNFINISHED, inside)
            self._ready.append(TrailPiece(place, self._pids[place], pack(span)))

    def take(self, *, at_once: bool = False) -> list[TrailPiece]:
        """What was collected since the last call, if it is time to.

        Args:
            at_once: Whether or not it is time to.
        """
        now = time.monotonic()
        if not at_once and now < self._next_s:
            return []
        self._next_s = now + _EVERY_S
        for place in self._trails:
            self._collect(place)
        ready, self._ready = self._ready, []
        return ready

    def _collect(self, place: int) -> None:
        trail = self._trails[place]
        spans, dropped = trail.read(), trail.dropped
        if dropped > self._dropped[place]:
            lost = Span(time.monotonic_ns(), 0, dropped - self._dropped[place], Kind.LOST, "")
            spans, self._dropped[place] = spans + pack(lost), dropped
        if spans:
            self._ready.append(TrailPiece(place, self._pids[place], spans))

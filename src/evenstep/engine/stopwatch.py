"""Where the time of a worker goes in a step: computing, waiting for others, updating; for the board."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from evenstep.exchange.board import Spent
from evenstep.exchange.group import Group

__all__ = ["Lap", "Stopwatch"]


@dataclass
class Lap:
    """How long something took, without waits for other workers; known when it is over."""

    seconds: float = 0.0


class Stopwatch:
    """Times the steps of one worker.

    Args:
        group: The workers.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._compute_s = self._update_s = 0.0  # of the current step

    @contextmanager
    def step(self, took_part: Callable[[], bool]) -> Iterator[None]:
        """While this is open, a step is done; if it ends well and this worker took part in it, it is recorded."""
        self._compute_s = self._update_s = 0.0
        begin, waited_s = time.monotonic(), self._group.waited_s
        yield
        if took_part():
            waited_s, whole_s = self._group.waited_s - waited_s, time.monotonic() - begin
            self._group.board.spend(self._group.worker, Spent(self._compute_s, waited_s, self._update_s, whole_s))

    @contextmanager
    def computing(self) -> Iterator[Lap]:
        """While this is open, shards are computed; a step may do so several times."""
        lap, begin, waited_s = Lap(), time.monotonic(), self._group.waited_s
        yield lap
        lap.seconds = time.monotonic() - begin - (self._group.waited_s - waited_s)
        self._compute_s += lap.seconds

    @contextmanager
    def updating(self) -> Iterator[None]:
        """While this is open, the optimizer steps."""
        begin = time.monotonic()
        yield
        self._update_s += time.monotonic() - begin

"""A lock, those who wait for something under it, and the workers whose leases end meanwhile."""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

from evenstep.core.errors import ServerError
from evenstep.server.store.workers import Workers

__all__ = ["HISTORY", "Attended"]

HISTORY = 512
"""How many versions and events are remembered for people to see."""

_DEPARTED = 16

log = logging.getLogger("evenstep.server")


class Attended(ABC):
    """What a store is besides its parameters. Everything but `hurry` and `fail` is for whoever holds the lock.

    Args:
        lease_s: After how long without a sign of life a worker is dropped.
        clock: Seconds, for leases and events.

    Attributes:
        workers: Who is registered.
        events: What happened, and when.
        departed: When each of those who went last was seen last, and how it went.
        num_dropped: How many were dropped.
    """

    def __init__(self, lease_s: float, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._changed = threading.Condition(threading.Lock())
        self.workers = Workers(lease_s)
        self._broken: str | None = None
        self._hurried = False
        self.events: deque[tuple[float, str]] = deque(maxlen=HISTORY)
        self.departed: dict[str, tuple[float, str]] = {}
        self.num_dropped = 0

    @property
    @abstractmethod
    def version(self) -> int:
        """How many updates there were."""

    @abstractmethod
    def _gone(self) -> None:
        """Some worker is not there any more."""

    def _expire(self) -> None:
        gone = self.workers.expire(self._clock())
        for name, seen_s in gone.items():
            self.num_dropped += 1
            self._depart(name, seen_s, "dropped")
            self._tell(f"worker '{name}' was dropped: no sign of life for {self.workers.lease_s:g} s", name)
        if gone:
            self._gone()

    def _depart(self, worker: str, seen_s: float, how: str) -> None:
        self.departed[worker] = (seen_s, how)
        while len(self.departed) > _DEPARTED:
            del self.departed[next(iter(self.departed))]

    def _wait(self, condition: Callable[[], bool], wait_s: float, worker: str | None = None) -> bool:
        """Wait for a condition; leases end meanwhile. The lock is not held while waiting.

        Args:
            condition: For what.
            wait_s: How long.
            worker: Who waits, and therefore lives.
        """
        deadline = time.monotonic() + wait_s
        waiting = self.workers.registered.get(worker or "")
        if waiting is not None:
            waiting.waiting += 1
        try:
            while not condition():
                self._check_sound()
                left = deadline - time.monotonic()
                if left <= 0 or self._hurried:
                    return False
                self._changed.wait(min(left, self.workers.next_end_s(self._clock()) + 0.01))
                self._expire()
            return True
        finally:
            if waiting is not None:
                waiting.waiting -= 1
                waiting.seen_s = self._clock()

    def hurry(self, hurried: bool) -> None:
        """Whether every wait is over at once: the server stops, and its clients will ask again."""
        with self._changed:
            self._hurried = hurried
            self._changed.notify_all()

    def fail(self, why: str) -> None:
        """Something around the store failed, so that it must not go on."""
        with self._changed:
            self._broken = why
            self._changed.notify_all()

    def _check_sound(self) -> None:
        if self._broken is not None:
            raise ServerError(f"the server cannot go on: {self._broken}")

    def _tell(self, text: str, worker: str | None = None) -> None:
        self.events.append((self._clock(), text))
        log.info("%s", text, extra={"version": self.version, "worker": worker})

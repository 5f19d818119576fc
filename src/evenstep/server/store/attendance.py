"""The lock of a store, the threads that wait for changes, and the leases of workers."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from evenstep.core.errors import ServerError
from evenstep.server.store.workers import Registry

__all__ = ["HISTORY", "Attendance"]

HISTORY = 512
"""How many versions and events are remembered for people to see."""

_DEPARTED = 16

log = logging.getLogger("evenstep.server")


class Attendance:
    """Who is registered, and who waits. Everything but `hurry` and `fail` is for callers that hold the lock.

    Args:
        lease_s: After how long without a sign of life a worker is dropped.
        clock: Seconds, for leases and events.
        version: Returns the version of the parameters, for the log.

    Attributes:
        changed: The lock, and the condition notified when anything has changed.
        workers: Who is registered.
        events: What happened, and when.
        departed: For the last workers that left: when each was last seen, and how it left.
        num_dropped: How many were dropped.
        broken: Why the store cannot go on, if it cannot.
        on_gone: Called when a worker is gone.
    """

    def __init__(self, lease_s: float, clock: Callable[[], float], version: Callable[[], int]) -> None:
        self.clock, self._version = clock, version
        self.changed = threading.Condition(threading.Lock())
        self.workers = Registry(lease_s)
        self.broken: str | None = None
        self.on_gone: Callable[[], None] = lambda: None
        self._hurried = False
        self.events: deque[tuple[float, str]] = deque(maxlen=HISTORY)
        self.departed: dict[str, tuple[float, str]] = {}
        self.num_dropped = 0

    def register(self, worker: str) -> None:
        """Register a worker, or note that it is alive."""
        if self.workers.register(worker, self.clock()):
            self.departed.pop(worker, None)
            self.tell(f"worker '{worker}' registered", worker)
            self.changed.notify_all()

    def see(self, worker: str) -> None:
        """Note a worker's sign of life.

        Raises:
            RefusedError: It is not registered, or not any more.
        """
        self.workers.see(worker, self.clock())

    def leave(self, worker: str) -> None:
        """Unregister a worker: nobody waits for it any more."""
        if self.workers.leave(worker):
            self._depart(worker, self.clock(), "left")
            self.tell(f"worker '{worker}' left", worker)
            self._gone()

    def expire(self) -> None:
        """Drop those whose leases have ended."""
        gone = self.workers.expire(self.clock())
        for name, seen_s in gone.items():
            self.num_dropped += 1
            self._depart(name, seen_s, "dropped")
            self.tell(f"worker '{name}' was dropped: no sign of life for {self.workers.lease_s:g} s", name)
        if gone:
            self._gone()

    def _depart(self, worker: str, seen_s: float, how: str) -> None:
        self.departed[worker] = (seen_s, how)
        while len(self.departed) > _DEPARTED:
            del self.departed[next(iter(self.departed))]

    def _gone(self) -> None:
        self.on_gone()
        self.changed.notify_all()

    def wait(self, condition: Callable[[], bool], wait_s: float, worker: str | None = None) -> bool:
        """Wait for a condition; leases end meanwhile. The lock is not held while waiting.

        Args:
            condition: What to wait for.
            wait_s: How long.
            worker: The worker that waits, and is therefore alive.
        """
        deadline = time.monotonic() + wait_s
        waiting = self.workers.registered.get(worker or "")
        if waiting is not None:
            waiting.waiting += 1
        try:
            while not condition():
                self.check_sound()
                left = deadline - time.monotonic()
                if left <= 0 or self._hurried:
                    return False
                self.changed.wait(min(left, self.workers.next_end_s(self.clock()) + 0.01))
                self.expire()
            return True
        finally:
            if waiting is not None:
                waiting.waiting -= 1
                waiting.seen_s = self.clock()

    def hurry(self, hurried: bool) -> None:
        """Set whether every wait ends at once: the server stops, and its clients will ask again."""
        with self.changed:
            self._hurried = hurried
            self.changed.notify_all()

    def fail(self, why: str) -> None:
        """Break the store because something around it failed."""
        with self.changed:
            self.break_off(why)

    def break_off(self, why: str) -> ServerError:
        """Mark the store as unable to go on; returns the error to raise."""
        self.broken = why
        self.changed.notify_all()
        return ServerError(why)

    def check_sound(self) -> None:
        """Check that the store can go on.

        Raises:
            ServerError: It cannot.
        """
        if self.broken is not None:
            raise ServerError(f"the server cannot continue: {self.broken}")

    def tell(self, text: str, worker: str | None = None) -> None:
        """Record an event for people to see."""
        self.events.append((self.clock(), text))
        log.info("%s", text, extra={"version": self._version(), "worker": worker})

"""Who the workers of a group are: always the same, or those whom a supervisor names for each generation."""

import os
import time
from collections.abc import Sequence
from typing import Protocol

from evenstep.core.errors import Dismissed, SilenceError
from evenstep.core.events import Event, send
from evenstep.exchange import generations
from evenstep.exchange.generations import Generation
from evenstep.exchange.slots import SLICE_NS
from evenstep.transport.segment import Segment

__all__ = ["Fixed", "Membership", "Supervised"]

_PATIENCE_S = 60.0  # how much longer than any worker the supervisor may take


class Membership(Protocol):
    """Who the workers are, as one of them learns it.

    Attributes:
        elastic: Whether there is somebody who replaces workers.
        first: The generation that needs no waiting for, if there is one.
    """

    elastic: bool
    first: Generation | None

    def next(self, known: int, timeout_s: float) -> Generation:
        """Wait for a generation that this worker is in.

        Args:
            known: The number of the last one that it was in.
            timeout_s: How long any worker may take.

        Raises:
            Dismissed: This worker is not needed any more.
            SilenceError: Nobody said anything.
        """

    def tell(self, event: Event) -> None:
        """Tell who decides something, if there is anybody."""


class Fixed:
    """So many workers, and never others.

    Args:
        num_workers: How many.
        machines: On which machine each of them is; None: all on one.
    """

    elastic = False

    def __init__(self, num_workers: int, machines: Sequence[int] | None = None) -> None:
        members = list(range(num_workers))
        self.first: Generation | None = Generation(1, 0, members, None, machines=list(machines or ()))

    def next(self, known: int, timeout_s: float) -> Generation:
        """See `Membership`: there is none."""
        raise AssertionError(f"the group has one generation, and {known} is over within {timeout_s} s")

    def tell(self, event: Event) -> None:
        """See `Membership`: nobody listens."""


class Supervised:
    """Whom the supervisor of this worker names.

    Args:
        segment: Where it announces generations.
        worker: Which worker this is.
        events_fd: Where it listens.
    """

    elastic = True
    first: Generation | None = None

    def __init__(self, segment: Segment, worker: int, events_fd: int) -> None:
        self._segment, self._worker, self._events_fd = segment, worker, events_fd
        self._pid = os.getpid()

    def next(self, known: int, timeout_s: float) -> Generation:
        """See `Membership`."""
        seen = generations.latest(self._segment)
        self.tell({"waits": known})
        deadline = time.monotonic() + 2 * timeout_s + _PATIENCE_S
        while True:
            found = generations.wait(self._segment, seen, SLICE_NS)
            if found is not None:
                if self._worker in found.members:
                    return found
                if self._worker in found.dismissed:
                    raise Dismissed
                seen = found.number
            elif time.monotonic() > deadline:
                raise SilenceError(f"worker {self._worker} was let in by nobody: the supervisor says nothing")

    def tell(self, event: Event) -> None:
        """See `Membership`. A copy of this process has nothing to say."""
        if os.getpid() == self._pid:
            send(self._events_fd, event)

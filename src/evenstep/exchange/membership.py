"""Who the workers of a group are: always the same, or those that a supervisor names for each generation."""

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
        elastic: Whether a supervisor replaces workers.
        first: The generation that is known without waiting, if there is one.
    """

    elastic: bool
    first: Generation | None

    def next(self, known: int, timeout_s: float) -> Generation:
        """Wait for a generation that this worker is in.

        Args:
            known: The number of the last one it was in.
            timeout_s: How long any worker may take.

        Raises:
            Dismissed: This worker is no longer needed.
            SilenceError: The supervisor said nothing.
        """

    def tell(self, event: Event) -> None:
        """Tell the supervisor something, if there is one."""


class Fixed:
    """A fixed number of workers, always the same.

    Args:
        num_workers: How many there are.
        machines: The machine that each of them is on; None: all on one.
    """

    elastic = False

    def __init__(self, num_workers: int, machines: Sequence[int] | None = None) -> None:
        members = list(range(num_workers))
        self.first: Generation | None = Generation(1, 0, members, None, machines=list(machines or ()))

    def next(self, known: int, timeout_s: float) -> Generation:
        """See `Membership`. There is only the first generation, so this must never be called."""
        raise AssertionError(f"a fixed group has one generation, so nobody waits {timeout_s} s for one after {known}")

    def tell(self, event: Event) -> None:
        """See `Membership`. Nobody listens."""


class Supervised:
    """The workers that a supervisor names.

    Args:
        segment: Where the supervisor announces generations.
        worker: Which worker this is.
        events_fd: Where the supervisor listens.
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
                raise SilenceError(f"worker {self._worker} waited for a generation, but the supervisor announced none")

    def tell(self, event: Event) -> None:
        """See `Membership`. A forked copy of this process stays silent."""
        if os.getpid() == self._pid:
            send(self._events_fd, event)

"""How far the monotonic clock of another machine is ahead of this one's, estimated from heartbeats.

A beat carries the time at which it was sent, and the times at which the last beat received was sent and arrived. So one
end knows all four times of a round trip, and half of their difference is the offset of the clocks, give or take half
the time that the round trip took. Of the latest beats, the quickest counts.
"""

import time
from collections import deque
from typing import Any

__all__ = ["Clock"]

_LAST = 64  # beats; clocks drift, so older ones do not count


class Clock:
    """The other end's clock, as this end sees it."""

    def __init__(self) -> None:
        self._came: tuple[int, int] | None = None  # when the last beat was sent and when it arrived
        self._ways: deque[tuple[int, int]] = deque(maxlen=_LAST)  # how long each round trip took, and the offset

    @property
    def ahead_ns(self) -> int:
        """How far the other clock is ahead; 0 until a beat has come back."""
        return min(self._ways)[1] if self._ways else 0

    def beat(self) -> list[int]:
        """What the next beat carries."""
        return [time.monotonic_ns(), *(self._came or ())]

    def heard(self, beat: Any) -> None:
        """A beat has arrived; one without times is ignored."""
        now = time.monotonic_ns()
        match beat:
            case [int(sent)]:
                self._came = (sent, now)
            case [int(sent), int(mine), int(theirs)]:
                self._came = (sent, now)
                self._ways.append(((now - mine) - (sent - theirs), ((theirs - mine) + (sent - now)) // 2))

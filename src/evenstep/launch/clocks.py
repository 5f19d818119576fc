"""By how much the monotonic clock of another machine is ahead of this one's, found from beats that go to and fro.

A beat carries when it was sent, and of the last beat that came: when that was sent, and when it came. So one end knows
all four times of a way there and back, and half of their difference is by how much the clocks differ, give or take half
of the time that the way took. Of the last beats the quickest one counts.
"""

import time
from collections import deque
from typing import Any

__all__ = ["Clock"]

_LAST = 64  # beats; clocks drift, so those of long ago do not count


class Clock:
    """The other end's clock, as this end sees it."""

    def __init__(self) -> None:
        self._came: tuple[int, int] | None = None  # when the last beat was sent and when it came
        self._ways: deque[tuple[int, int]] = deque(maxlen=_LAST)  # how long each took, and the difference

    @property
    def ahead_ns(self) -> int:
        """By how much the other clock is ahead; 0 as long as nothing has come back."""
        return min(self._ways)[1] if self._ways else 0

    def beat(self) -> list[int]:
        """What the next beat carries."""
        return [time.monotonic_ns(), *(self._came or ())]

    def heard(self, beat: Any) -> None:
        """A beat has come; what is none of this kind says nothing of clocks."""
        now = time.monotonic_ns()
        match beat:
            case [int(sent)]:
                self._came = (sent, now)
            case [int(sent), int(mine), int(theirs)]:
                self._came = (sent, now)
                self._ways.append(((now - mine) - (sent - theirs), ((theirs - mine) + (sent - now)) // 2))

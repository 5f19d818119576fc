"""What was seen of a run by whoever looks after it, for whoever looks at its page."""

from collections import deque
from collections.abc import Iterable
from time import monotonic
from typing import Any

__all__ = ["Seen"]

_MOST = 50


class Seen:
    """Faults and how long recovering from them took, checkpoints, and the fingerprint that was asked for last."""

    def __init__(self) -> None:
        self._begin = monotonic()
        self._faults: deque[list[Any]] = deque(maxlen=_MOST)  # when, what, and seconds until a step was committed
        self._saved: deque[tuple[float, str]] = deque(maxlen=_MOST)
        self._fingerprint: tuple[int, str] | None = None

    def lost(self, what: str) -> None:
        """A worker or a machine is lost."""
        self._faults.append([monotonic(), what, None])

    def recovered(self, seconds: float) -> None:
        """A step is committed, so long after the first fault that was not recovered from yet."""
        for fault in self._faults:
            fault[2] = seconds if fault[2] is None else fault[2]

    def saved(self, path: str) -> None:
        """A checkpoint is there."""
        self._saved.append((monotonic(), path))

    def fingerprint(self, step: int, fingerprint: str) -> None:
        """What it was after a step."""
        self._fingerprint = (step, fingerprint)

    def described(self, said: Iterable[tuple[float, str]]) -> dict[str, Any]:
        """All of it as JSON; times are so many seconds ago.

        Args:
            said: What was said of the run, and when.
        """
        now = monotonic()
        return {
            "uptime_s": now - self._begin,
            "events": [[now - when, text] for when, text in said],
            "faults": [[now - when, what, seconds] for when, what, seconds in self._faults],
            "checkpoints": [[now - when, path] for when, path in self._saved],
            "fingerprint": self._fingerprint,
        }

"""What a supervisor has seen of a run, for whoever looks at its page."""

from collections import deque
from collections.abc import Iterable
from time import monotonic
from typing import Any

__all__ = ["Seen"]

_MOST = 50


class Seen:
    """Recoveries, checkpoints, and the fingerprint that was asked for last."""

    def __init__(self) -> None:
        self._begin = monotonic()
        self._recoveries: deque[tuple[float, float]] = deque(maxlen=_MOST)
        self._saved: deque[tuple[float, str]] = deque(maxlen=_MOST)
        self._fingerprint: tuple[int, str] | None = None

    def recovered(self, seconds: float) -> None:
        """A step was committed so long after a worker was lost."""
        self._recoveries.append((monotonic(), seconds))

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
            "recoveries": [[now - when, seconds] for when, seconds in self._recoveries],
            "checkpoints": [[now - when, path] for when, path in self._saved],
            "fingerprint": self._fingerprint,
        }

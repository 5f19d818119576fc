"""What happened to a run, as its page shows it: faults, checkpoints, fingerprints."""

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
        """A step is committed, this many seconds after the first fault that had not been recovered from."""
        for fault in self._faults:
            fault[2] = seconds if fault[2] is None else fault[2]

    def saved(self, path: str) -> None:
        """A checkpoint was written."""
        self._saved.append((monotonic(), path))

    def fingerprint(self, step: int, fingerprint: str) -> None:
        """The fingerprint after a step."""
        self._fingerprint = (step, fingerprint)

    def described(self, said: Iterable[tuple[float, str]]) -> dict[str, Any]:
        """All of it as JSON; times are seconds ago.

        Args:
            said: The sentences that the user was told, each with its time.
        """
        now = monotonic()
        return {
            "uptime_s": now - self._begin,
            "events": [[now - when, text] for when, text in said],
            "faults": [[now - when, what, seconds] for when, what, seconds in self._faults],
            "checkpoints": [[now - when, path] for when, path in self._saved],
            "fingerprint": self._fingerprint,
        }

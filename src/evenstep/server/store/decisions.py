"""The decisions of server 0: which updates made which version. Its followers are told."""

from collections import deque
from collections.abc import Iterable, Mapping

__all__ = ["Decided", "Decisions"]

Decided = tuple[int, dict[str, tuple[int, str]]]
"""A version, and the updates that made it: {worker: (sequence number, session)}."""

_REMEMBERED = 1024  # more than the updates that can be in flight


class Decisions:
    """The last decisions, in order. The caller holds the store's lock."""

    def __init__(self) -> None:
        self._last: deque[Decided] = deque(maxlen=_REMEMBERED)

    def add(self, version: int, sequences: Mapping[str, int], sessions: Mapping[str, str]) -> None:
        """Record what made a version."""
        if sequences:
            self._last.append((version, {w: (s, sessions.get(w, "")) for w, s in sequences.items()}))

    def forget(self) -> None:
        """Forget everything."""
        self._last.clear()

    def extend(self, decisions: Iterable[Decided]) -> None:
        """Add what was decided before this process began."""
        self._last.extend(decisions)

    def since(self, version: int) -> list[Decided]:
        """What made the versions after this one; -1: from the first put on."""
        return [entry for entry in self._last if entry[0] > version]

    def made_by(self, worker: str, sequence: int) -> int | None:
        """The version that an update was part of; None if unknown."""
        return next((v for v, who in self._last if worker in who and who[worker][0] == sequence), None)

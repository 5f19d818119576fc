"""Connections between machines that break although both still reach the head: which machine is given up, and when."""

from collections import Counter

__all__ = ["Breaks"]

_MOST = 3  # times that the connection of two machines may break with no step committed in between


class Breaks:
    """The connections that broke since the last committed step.

    Args:
        head: The machine that is never given up.
    """

    def __init__(self, head: int) -> None:
        self._head = head
        self._counts: Counter[frozenset[int]] = Counter()
        self._last: dict[frozenset[int], int] = {}  # the generation in which each last broke

    def note(self, generation: int, machine: int, other: int) -> int | None:
        """The connection of two machines broke; returns which of them is to be given up now, if either is.

        Both may report it: it counts once in a generation. The one with more broken connections is given up, or else
        the one that joined later. A bridge that cannot tell which other machine is at fault names its own twice.
        """
        way = frozenset({machine, other})
        if self._last.get(way) == generation:
            return None
        self._last[way] = generation
        self._counts[way] += 1
        if self._counts[way] < _MOST:
            return None
        return max(way - {self._head}, key=lambda each: (self._of(each), each), default=None)

    def committed(self) -> None:
        """A step is committed: whatever broke before, the run makes progress."""
        self._counts.clear()
        self._last.clear()

    def _of(self, machine: int) -> int:
        return sum(count for way, count in self._counts.items() if machine in way)

"""Ways between machines that break though both machines reach the head: which of the two is given up, and when."""

from collections import Counter

__all__ = ["Breaks"]

_MOST = 3  # so often may the way between two machines break without a committed step in between


class Breaks:
    """What was said of broken ways since a step was committed.

    Args:
        head: The machine that is never given up.
    """

    def __init__(self, head: int) -> None:
        self._head = head
        self._counts: Counter[frozenset[int]] = Counter()
        self._last: dict[frozenset[int], int] = {}  # in which generation each broke last

    def is_new(self, generation: int, machine: int, other: int) -> bool:
        """Whether nobody has said yet that the way between two machines broke in this generation."""
        return self._last.get(frozenset({machine, other})) != generation

    def note(self, generation: int, machine: int, other: int) -> int | None:
        """The way between two machines broke; returns which of them is to be given up now, if any.

        Both may say so: of one generation it counts once. It is the one to which more ways broke, or that came later.
        A bridge that cannot say which other machine it is about names its own twice.
        """
        way = frozenset({machine, other})
        if not self.is_new(generation, machine, other):
            return None
        self._last[way] = generation
        self._counts[way] += 1
        if self._counts[way] < _MOST:
            return None
        return max(way - {self._head}, key=lambda each: (self._of(each), each), default=None)

    def committed(self) -> None:
        """A step is committed: whatever broke before, the run gets on."""
        self._counts.clear()
        self._last.clear()

    def _of(self, machine: int) -> int:
        return sum(count for way, count in self._counts.items() if machine in way)

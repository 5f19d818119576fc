"""What a page shows of the steps of a run: all of them, thinned out where there are too many to draw."""

from collections import deque
from time import monotonic

from evenstep.exchange.figures import Figures, StepFigures
from evenstep.transport.segment import Segment

__all__ = ["History"]

_MOST_POINTS = 600
_MOST_AT_ONCE = 20_000  # entries of the journal: a late viewer sees the rest a second later
_RATE_S = 10.0  # the time over which samples per second are counted
_FORGET_S = 60.0  # after which the last look says nothing about the present speed


class History:
    """The figures of the latest run of a script; read only when someone looks.

    Attributes:
        last: The last step, if there was any.
        samples: The samples of all steps.
    """

    def __init__(self, segment: Segment) -> None:
        self._figures = Figures(segment)
        self._begin(0)

    def _begin(self, run: int) -> None:
        self._run, self.last, self.samples = run, None, 0
        self._curves: dict[str, list[tuple[int, float]]] = {}
        self._every: dict[str, int] = {}  # by name: how many steps share a point
        self._looks: deque[tuple[float, int]] = deque()

    last: StepFigures | None

    def look(self) -> None:
        """Read what is new."""
        for found in self._figures.news(_MOST_AT_ONCE):
            if found.run != self._run:
                self._begin(found.run)
            self.last, self.samples = found if found.loss is not None else self.last, self.samples + found.samples
            values = {"loss": found.loss, **found.metrics, **found.logged}
            for name, value in values.items():
                if isinstance(value, float | int):
                    self._add(name, found.step, float(value))
        now = monotonic()
        if self._looks and self._looks[-1][0] < now - _FORGET_S:
            self._looks.clear()
        self._looks.append((now, self.samples))
        while len(self._looks) > 2 and self._looks[1][0] < now - _RATE_S:
            self._looks.popleft()

    @property
    def samples_per_s(self) -> float | None:
        """How many samples per second there were lately; None if nobody has looked within the last minute."""
        (then, before), (now, after) = self._looks[0], self._looks[-1]
        return (after - before) / (now - then) if now > then else None

    def curves(self) -> dict[str, list[tuple[int, float]]]:
        """Every value over steps, by name: at most a few hundred points each, including the latest."""
        return self._curves

    def _add(self, name: str, step: int, value: float) -> None:
        points, every = self._curves.setdefault(name, []), self._every.setdefault(name, 1)
        if len(points) > 1 and points[-1][0] - points[-2][0] < every:
            points[-1] = (step, value)  # the last point is always the latest value
        else:
            points.append((step, value))
        if len(points) > _MOST_POINTS:
            points[:] = points[::2] if len(points) % 2 else [*points[::2], points[-1]]
            self._every[name] = 2 * every

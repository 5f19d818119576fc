"""Slow workers: shards move away from a worker that is clearly slower than the others. No bit depends on it.

Every worker sees the same times (they travel with the results of a step), so all decide alike and at the same step.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from evenstep.plan.placement import share

__all__ = ["Pace"]

Span = tuple[int, int]

_WINDOW = 8  # steps to observe before anything is moved, and after each move
_SLOW = 1.5  # a worker is slow if even its best time for a shard is this many times the fastest worker's
_WORTH_S = 0.005  # how much time a step must lose before anything is moved


@dataclass
class Pace:
    """The times of the workers of one generation.

    Attributes:
        share_out: Gives each worker its shards, given how much each should do.
        weights: How much each worker should do, by what was measured so far.
    """

    num_workers: int
    share_out: Callable[[int, Sequence[float]], list[Span]] = share
    weights: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.weights = [1.0] * self.num_workers
        self._times: list[list[float]] = []

    def observe(self, seconds: Sequence[float], spans: Sequence[Span]) -> list[Span] | None:
        """Take in a step.

        Args:
            seconds: How long each worker computed, without its waits.
            spans: The shards of each.

        Returns:
            The spans to use from now on, if they change.
        """
        self._times.append([time / (end - first) for time, (first, end) in zip(seconds, spans, strict=True)])
        if len(self._times) < _WINDOW or self.num_workers == 1:
            return None
        by_worker = list(zip(*self._times, strict=True))
        per_shard = [statistics.median(times) for times in by_worker]
        self._times.clear()
        # a worker that waits for a core now and then is slow in some steps only; a slow one even in its best
        uneven = max(min(times) for times in by_worker) > _SLOW * max(min(per_shard), 1e-9)
        self.weights = [1 / max(time, 1e-9) for time in per_shard] if uneven else [1.0] * self.num_workers
        wanted = self.share_out(spans[-1][1], self.weights)
        if wanted == list(spans) or _longest(per_shard, spans) - _longest(per_shard, wanted) < _WORTH_S:
            return None
        return wanted


def _longest(per_shard: Sequence[float], spans: Sequence[Span]) -> float:
    return max(time * (end - first) for time, (first, end) in zip(per_shard, spans, strict=True))

"""The figures of committed steps, read from the journal: each step once, whatever died, at no cost to the workers.

Any process that maps the segment may read them: the supervisor for its files, the page of a run for its viewers.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from evenstep.exchange.journal import Entry, Journal
from evenstep.transport.segment import Segment

__all__ = ["LOGGED", "Figures", "StepFigures"]

LOGGED = "logged after the last step"

_STEP = re.compile(r"step (\d+)")


class StepFigures(NamedTuple):
    """The figures of one step.

    Attributes:
        run: The run of the script that it belongs to, counted from 1.
        step: Its number, counted from 1: how many steps were committed with it.
        loss: The mean over its samples; None: this is only what was logged after the last step.
        metrics: Likewise, by name; also values that are not means.
        samples: How many samples it had.
        grad_norm: The norm of the gradients, if the script has them clipped.
        logged: What the script logged before it, by name.
    """

    run: int
    step: int
    loss: float | None
    metrics: dict[str, Any]
    samples: int
    grad_norm: float | None
    logged: dict[str, float]


class Figures:
    """The steps of a run as they are committed, without those before the checkpoint that it resumed from."""

    def __init__(self, segment: Segment) -> None:
        self._journal = Journal(segment)
        self._next = self._run = 0

    def news(self, most: int | None = None) -> Iterator[StepFigures]:
        """The steps that were committed since the last call.

        Args:
            most: Read at most this many entries of the journal.
        """
        end = self._journal.committed if most is None else min(self._journal.committed, self._next + most)
        while self._next < end:
            entry, self._next = self._journal.read(self._next), self._next + 1
            if entry.kind == "checkpoint" and entry.value["from"] is not None:
                self._next += entry.value["from"]["entries"]  # they were shown when they were done
            self._run += entry.kind == "join"
            if (found := self._of(entry)) is not None:
                yield found

    def _of(self, entry: Entry) -> StepFigures | None:
        if entry.kind == LOGGED:
            step, logged = entry.value
            return StepFigures(self._run, step, None, {}, 0, None, logged)
        match = _STEP.fullmatch(entry.kind)
        if match is None:
            return None
        loss, metrics, norm, *_ = entry.value
        aside = entry.aside
        return StepFigures(self._run, 1 + int(match[1]), loss, metrics, aside["samples"], norm, aside["logged"])

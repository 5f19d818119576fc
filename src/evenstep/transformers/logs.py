"""What `compute_loss` logs: kept for each part, and logged once for all of them, alike on every worker."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from evenstep.core.errors import UnsupportedError
from evenstep.engine.results import Mean, add

__all__ = ["Logs", "PartLogs", "merged"]

Logs = list[dict[str, float]]
"""What was logged, call by call."""


class PartLogs:
    """Keeps what is logged while a part is computed."""

    def __init__(self) -> None:
        self._here = threading.local()  # shards that meet in a layer are computed in threads, in turns

    @contextmanager
    def part(self) -> Iterator[Logs]:
        """While this is open, what is logged in this thread is kept."""
        logs: Logs = []
        self._here.logs = logs
        try:
            yield logs
        finally:
            del self._here.logs

    def keep(self, values: Mapping[str, Any]) -> bool:
        """Keep what is logged; return False if no part is being computed, so that it is logged as always.

        Raises:
            UnsupportedError: It is not a number.
        """
        logs: Logs | None = getattr(self._here, "logs", None)
        if logs is None:
            return False
        logs.append({name: _number(name, value) for name, value in values.items()})
        return True


def _number(name: str, value: Any) -> float:
    if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
        return float(value)
    raise UnsupportedError(
        f"compute_loss logs {name!r}, which is a {type(value).__name__}; expected a number: it is called for each part "
        "of a batch, and the mean over all parts is logged"
    )


def merged(parts: Sequence[Logs], weights: Sequence[float]) -> Logs:
    """The means of what the parts of a batch have logged, weighted as their losses.

    Raises:
        UnsupportedError: They have logged different things.
    """
    for logs in parts:
        here, there = ([list(call) for call in each] for each in (logs, parts[0]))
        if here != there:
            raise UnsupportedError(
                f"compute_loss logs {here} for one part of a batch and {there} for another; expected the same for "
                "every part: look for a branch that depends on the samples or on the number of calls"
            )
    return [
        {name: _mean([call[name] for call in calls], weights) for name in calls[0]}
        for calls in zip(*parts, strict=True)
    ]


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    if len(values) == 1:
        return values[0]
    means = {n: Mean(v * w if w else 0.0, w) for n, (v, w) in enumerate(zip(values, weights, strict=True))}
    return add(means, len(means)).value

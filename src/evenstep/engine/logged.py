"""Values that scripts log besides losses and metrics: they travel with the next step, as one value over all workers."""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from evenstep.core.errors import ConfigError
from evenstep.exchange.surroundings import current

__all__ = ["Logged", "checked", "mean_of_all"]

Values = Mapping[str, Sequence[float]]


class Logged:
    """What this worker has logged since the last step.

    Attributes:
        values: By name, in the order of the calls.
    """

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}

    def add(self, name: str, value: float) -> None:
        """Keep a value until the next step is committed."""
        self.values.setdefault(name, []).append(value)

    def settle(self) -> None:
        """Drop what was logged before a step that is now committed: it has travelled with that step."""
        self.values = {}


def checked(name: Any, value: Any) -> tuple[str, float]:
    """A checked name and number.

    Raises:
        ConfigError: The name or the number is something else, or this is inside a step function.
    """
    if current() is not None:
        raise ConfigError(
            f"run.log({name!r}, ...) inside a step function, which runs once for every part; return the value as a "
            "metric, (loss, {name: value}), or log it between steps"
        )
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError) as error:  # the last is for a tensor with several elements
        raise ConfigError(f"run.log({name!r}, ...) got {str(value)[:40]}, expected one number") from error
    if not isinstance(name, str) or not name:
        raise ConfigError(f"run.log({name!r}, ...), expected a name")
    return name, number


def mean_of_all(of_workers: Sequence[Values]) -> dict[str, float]:
    """The mean of each value over all calls on all workers.

    It is rounded once, so values that are equal on all workers come out unchanged, however many workers there are.
    """
    names = {name: None for theirs in of_workers for name in theirs}  # in order, each once
    return {name: _mean([value for theirs in of_workers for value in theirs.get(name, ())]) for name in names}


def _mean(values: Sequence[float]) -> float:
    if all(map(math.isfinite, values)):
        return float(sum(map(Fraction, values), Fraction()) / len(values))
    return sum(values) / len(values)

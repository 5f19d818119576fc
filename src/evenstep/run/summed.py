"""Step functions that return the sum over their samples instead of the mean."""

from collections.abc import Callable
from typing import Any

from evenstep.core.errors import ConfigError
from evenstep.engine.loss import Loss
from evenstep.exchange.surroundings import current

__all__ = ["Summed"]


class Summed:
    """Turns a step function whose loss is a sum into one whose loss is weighted, with weights that add up to 1.

    Args:
        function: Returns the sum over its part, or (sum, metrics).
        num_samples: Samples in the batch.
    """

    def __init__(self, function: Callable[[Any], Any], num_samples: int) -> None:
        self._function, self._num_samples = function, num_samples
        self.__wrapped__ = function
        self.__code__ = getattr(function, "__code__", None)  # identifies it by the function that it wraps

    def __call__(self, part: Any) -> Any:
        """The loss of a part, with its weight, and metrics."""
        found = self._function(part)
        loss, metrics = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
        if isinstance(loss, Loss):
            raise ConfigError(
                "the step function returned an evenstep.Loss, which says itself what it is a mean of, and "
                "run.step(reduction='sum') says something else: leave one of them out"
            )
        rows = getattr(current(), "rows", range(0))
        return Loss(total=loss, weight=len(rows) / self._num_samples), metrics

"""The means of the steps of an epoch so far, and showing them."""

from collections.abc import Callable
from typing import Any

from evenstep.run.progress import Display, Pipe, Progress

__all__ = ["Meter"]


class Meter:
    """Adds up losses and metrics, and shows the progress of an epoch.

    Args:
        shows: Says whether this worker is the one to show something now.

    Attributes:
        display: Where progress is shown, if anywhere.
        num_samples: Samples in the steps of this epoch so far.
    """

    def __init__(self, shows: Callable[[], bool]) -> None:
        self._shows = shows
        self.display: Display | Pipe | None = None
        self.begin_epoch()
        self.begin_batch()

    def begin_epoch(self) -> None:
        """Start the means again."""
        self.num_samples = 0
        self._sums: dict[str, float] = {}

    def begin_batch(self) -> None:
        """Forget the last step: the result of this batch's step is not known yet, if there will be one."""
        self._loss: float | None = None
        self._metrics: dict[str, float] = {}

    def add(self, num_samples: int, loss: float, metrics: dict[str, Any]) -> None:
        """Add means over the samples of a step; values that are not means are left out."""
        self._loss, self._metrics = loss, {name: mean for name, mean in metrics.items() if isinstance(mean, float)}
        self.num_samples += num_samples
        for name, mean in {"loss": loss, **self._metrics}.items():
            self._sums[name] = self._sums.get(name, 0.0) + num_samples * mean

    def means(self) -> dict[str, float]:
        """Means over the samples of this epoch so far."""
        return {name: value / self.num_samples for name, value in self._sums.items()}

    def show(self, epoch: int, num_epochs: int, batch: int, num_batches: int, num_samples: int = 0) -> None:
        """Show where the batches are, with the results of the last step if it had samples."""
        if self.display is not None and self._shows():
            found = (self._loss, self._metrics, num_samples) if num_samples else (None, {}, 0)
            self.display.show(Progress(epoch, num_epochs, batch, num_batches, num_samples, *found))

    def close(self) -> None:
        """Show nothing more."""
        if self.display is not None:
            self.display.close()

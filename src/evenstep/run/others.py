"""Others that train the model of a run, as its facade sees them: other groups, or workers that meet at a server."""

from typing import Protocol

from torch import Tensor

from evenstep.engine.holdings import Holdings

__all__ = ["Nobody", "Others"]


class Others(Protocol):
    """Everyone outside this worker's group who trains the model."""

    def collect(self) -> None:
        """Wait until all parameters here are those of the last committed step. Does not communicate."""

    def level(self, tag: str) -> None:
        """Inside an operation: give all groups one model. They must call this alike."""

    def merge(self, tag: str, means: dict[str, float], num_samples: int) -> dict[str, float]:
        """Inside an operation: the means over all groups, given this group's means over `num_samples` samples."""

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds, by name."""


class Nobody:
    """There are no others: the workers of the group have everything.

    Args:
        holdings: What the workers hold.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._state = holdings.state

    def collect(self) -> None:
        """Nothing to do: parameters are in place when a step is committed."""

    def level(self, tag: str) -> None:
        """Nothing to do: there is one model."""

    def merge(self, tag: str, means: dict[str, float], num_samples: int) -> dict[str, float]:
        """See `Others`."""
        return means

    def tensors(self) -> dict[str, Tensor]:
        """See `Others`."""
        return self._state.tensors()

"""Who else trains the model of a run, as its facade sees them: other groups, or workers that meet only at a server."""

from typing import Protocol

from torch import Tensor

from evenstep.engine.holdings import Holdings

__all__ = ["Nobody", "Others"]


class Others(Protocol):
    """All who train the model outside of this worker's group."""

    def collect(self) -> None:
        """Wait until every parameter here is that of the last committed step. Talks to nobody."""

    def level(self, tag: str) -> None:
        """Inside of an operation: let all groups have one model. They must call this alike."""

    def merge(self, tag: str, means: dict[str, float], num_samples: int) -> dict[str, float]:
        """Inside of an operation: the means over all groups, of means over so many samples of this one."""

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds, by name."""


class Nobody:
    """The workers of the group have all there is.

    Args:
        holdings: Theirs.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._state = holdings.state

    def collect(self) -> None:
        """Parameters are where they belong when a step is committed."""

    def level(self, tag: str) -> None:
        """There is one model."""

    def merge(self, tag: str, means: dict[str, float], num_samples: int) -> dict[str, float]:
        """See `Others`."""
        return means

    def tensors(self) -> dict[str, Tensor]:
        """See `Others`."""
        return self._state.tensors()

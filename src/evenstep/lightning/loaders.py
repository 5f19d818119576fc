"""Loaders for Lightning's loops that give batches of a run."""

from collections.abc import Iterator
from typing import Any, NoReturn

from torch.utils.data import DataLoader

from evenstep.core.errors import UnsupportedError
from evenstep.data.batch import Batch
from evenstep.run.feed import Batches
from evenstep.run.loaders import batches_of
from evenstep.run.run import Run

__all__ = ["EndlessLoader", "SealedBatch", "loader_of"]


class SealedBatch:
    """A batch on its way through Lightning's loops and hooks, which must not look into it: its parts are elsewhere.

    Attributes:
        batch: The batch.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def __len__(self) -> int:
        """How many samples it has."""
        return len(self.batch)

    def __getitem__(self, _: Any) -> NoReturn:
        """Refuse: only some of its parts are on this worker.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            "a hook looks into the batch, whose parts lie on different workers; expected that only training_step and "
            "its like do, which get the parts, and hooks of single parts such as on_after_batch_transfer; len(batch) "
            "is the number of samples"
        )


class EndlessLoader:
    """Iterates over the batches of a loader, epoch by epoch, and can resume in the middle of one.

    Args:
        batches: Its batches.
        source: The user's loader.
    """

    def __init__(self, batches: Batches, source: DataLoader[Any]) -> None:
        self._batches = batches
        self.dataset, self.batch_sampler = source.dataset, source.batch_sampler
        self._epoch = self._first = self._given = 0

    @property
    def sampler(self) -> "EndlessLoader":
        """The object that Lightning tells the epoch."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch to iterate over next."""
        self._epoch = epoch

    def __len__(self) -> int:
        """How many batches an epoch has."""
        return len(self._batches)

    def __iter__(self) -> Iterator[SealedBatch]:
        first, self._first = self._first, 0
        self._given = first
        for batch in self._batches.at(self._epoch, first):
            self._given += 1
            yield SealedBatch(batch)

    def state_dict(self) -> dict[str, int]:
        """How many batches of its epoch it has given, for Lightning's checkpoints."""
        return {"batch": self._given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Skip as many batches in the next iteration."""
        self._first = self._given = state["batch"]


def loader_of(run: Run, source: Any, *, train: bool) -> Any:
    """What Lightning iterates over instead of a user's loader; the loader itself if it gives whole batches.

    Raises:
        UnsupportedError: It asks of loader processes what they cannot do.
    """
    batches = batches_of(run, source, train=train)
    if batches is None:
        return source
    if source.worker_init_fn is not None:
        raise UnsupportedError(
            "the DataLoader has a worker_init_fn; expected none: every sample is seeded by itself, whichever process "
            "loads it. What a process needs, let the data set make when it is first asked for a sample"
        )
    return EndlessLoader(batches, source)

"""Loaders for Lightning's loops that give batches of a run."""

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torch.utils.data import DataLoader

from evenstep.core.errors import UnsupportedError
from evenstep.data.batch import Batch
from evenstep.run.feed import Batches
from evenstep.run.loaders import AccumulatingSampler, batches_of
from evenstep.run.run import Run

__all__ = ["EndlessLoader", "SealedBatch", "WaitingBatch", "loader_of"]


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


class WaitingBatch(SealedBatch):
    """Takes the place of a batch whose gradients are to be accumulated: its samples come with the last one's."""

    def __init__(self) -> None:
        """It has nothing yet."""

    def __len__(self) -> int:
        """None: the last one has them all."""
        return 0


class EndlessLoader:
    """Iterates over the batches of a loader, epoch by epoch, and can resume in the middle of one.

    Args:
        batches: Its batches; each consists of several of the loader's, if gradients accumulate.
        source: The user's loader.
        times: Of how many batches each consists.
        limit: Asked how many of the loader's batches an epoch uses.
    """

    def __init__(self, batches: Batches, source: DataLoader[Any], times: int, limit: Callable[[], int]) -> None:
        self._batches, self._times, self._limit = batches, times, limit
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
        return len(self._batches if self._times == 1 else self.batch_sampler)  # type: ignore[arg-type]  # it has one

    def __iter__(self) -> Iterator[SealedBatch]:
        first, self._first = self._first, 0
        self._given = first
        for batch in self._batches.at(self._epoch, first // self._times):
            end = self._given // self._times * self._times + self._times
            end = end if self._times == 1 else min(end, self._limit())
            while self._given < end - 1:
                self._given += 1
                yield WaitingBatch()
            self._given += 1
            yield SealedBatch(batch)

    def state_dict(self) -> dict[str, int]:
        """How many batches of its epoch it has given, for Lightning's checkpoints."""
        return {"batch": self._given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Skip as many batches in the next iteration."""
        self._first = self._given = state["batch"]


def loader_of(run: Run, source: Any, *, train: bool, times: int, limit: Callable[[], int]) -> Any:
    """What Lightning iterates over instead of a user's loader; the loader itself if it gives whole batches.

    Args:
        run: The run.
        source: The user's loader.
        train: Whether steps train on its batches.
        times: How many of its batches make a step.
        limit: Asked at the beginning of an epoch how many of its batches are used.

    Raises:
        UnsupportedError: It asks of loader processes what they cannot do, or its batches cannot be put together.
    """

    def grouped(sampler: Any) -> Any:
        return sampler if times == 1 else AccumulatingSampler(sampler, times, limit)

    batches = batches_of(run, source, train=train, grouped=grouped)
    if batches is None:
        if times > 1:
            raise UnsupportedError(
                f"Trainer(accumulate_grad_batches={times}) with data that have no index; expected 1: make their "
                "batches as many times as large"
            )
        return source
    if source.worker_init_fn is not None:
        raise UnsupportedError(
            "the DataLoader has a worker_init_fn; expected none: every sample is seeded by itself, whichever process "
            "loads it. What a process needs, let the data set make when it is first asked for a sample"
        )
    return EndlessLoader(batches, source, times, limit)

"""Loaders for the loops of transformers that give batches of a run."""

from collections.abc import Iterator
from typing import Any, NoReturn

from accelerate.data_loader import DataLoaderShard, DataLoaderStateMixin
from torch.utils.data import IterableDataset, default_collate

from evenstep.core.errors import UnsupportedError
from evenstep.data.batch import Batch
from evenstep.run.feed import Batches
from evenstep.run.loaders import AccumulatingSampler
from evenstep.run.run import Run

__all__ = ["Deferred", "EpochLoader", "HeldBatch", "loader_of"]


class HeldBatch:
    """A batch on its way through the loops, which must not look into it: its parts are on different workers.

    Attributes:
        batch: The batch.
        known: What has been gathered from all its parts, by name.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.known: dict[str, Any] = {}

    def __len__(self) -> int:
        """How many samples it has."""
        return len(self.batch)

    def __contains__(self, name: str) -> bool:
        """Whether something has been gathered."""
        return name in self.known

    def __getitem__(self, name: str) -> Any:
        """What has been gathered.

        Raises:
            UnsupportedError: It has not been gathered.
        """
        if name not in self.known:
            self._refuse(name)
        return self.known[name]

    def _refuse(self, name: str) -> NoReturn:
        raise UnsupportedError(
            f"the inputs are asked for {name!r}, but they are a whole batch, whose parts lie on different workers; "
            "look at them in compute_loss, which gets one part after the other. len(inputs) is the number of samples"
        )


class Deferred:
    """Takes the place of a batch whose gradients are to be accumulated: its samples come with the last one's."""


class EpochLoader(DataLoaderStateMixin):
    """Iterates over the batches of a loader, epoch by epoch, and can begin in the middle of one.

    Args:
        batches: Its batches; each consists of several of the loader's, if gradients accumulate.
        source: The loader.
        times: Of how many batches each consists.
        first: How many of the loader's batches to skip.
    """

    def __init__(self, batches: Batches, source: Any, times: int, first: int = 0) -> None:
        self._batches, self._source, self._times, self._first = batches, source, times, first
        self.dataset, self.batch_sampler = source.dataset, source.batch_sampler
        self.total_batch_size, self._drop_last = source.total_batch_size, source._drop_last
        self.gradient_state = source.gradient_state
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch to iterate over next."""
        self._epoch = epoch

    def after(self, first: int) -> "EpochLoader":
        """The same without its first batches."""
        return EpochLoader(self._batches, self._source, self._times, first)

    def __len__(self) -> int:
        """How many batches of the loader there are."""
        return len(self.batch_sampler) - self._first

    def __iter__(self) -> Iterator[HeldBatch | Deferred]:
        self.begin()
        left = len(self)
        try:
            for batch in self._batches.at(self._epoch, self._first // self._times):
                together = min(self._times, left)
                left -= together
                yield from (Deferred() for _ in range(together - 1))
                self.end_of_dataloader = not left
                yield HeldBatch(batch)
        finally:
            self.end()


def loader_of(run: Run, source: Any, *, train: bool, times: int = 1) -> Any:
    """What the loops iterate over instead of a loader.

    It is the loader itself if that has no index: then every worker iterates over it, and its batches are whole ones.

    Args:
        run: The run.
        source: A loader that Accelerate has made.
        train: Whether steps train on its batches.
        times: How many of its batches make a step.

    Raises:
        UnsupportedError: Batches without an index cannot be put together.
    """
    if not isinstance(source, DataLoaderShard) or isinstance(source.dataset, IterableDataset):
        if times > 1:
            raise UnsupportedError(
                f"gradient_accumulation_steps={times} with data that have no index; expected 1: make "
                "per_device_train_batch_size as many times as large"
            )
        return source
    batches = run.batches(
        source.dataset,
        sampler=AccumulatingSampler(source.batch_sampler, times) if times > 1 else source.batch_sampler,
        collate_fn=None if source.collate_fn is default_collate else source.collate_fn,
        loaders=source.num_workers,
        prefetch=source.prefetch_factor or 2,
        train=train,
    )
    return EpochLoader(batches, source, times)

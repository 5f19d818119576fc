"""A torch `DataLoader` as batches of a run, for frameworks whose users bring loaders and not data sets."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, default_collate

from evenstep.run.feed import Batches
from evenstep.run.run import Run

__all__ = ["AccumulatingSampler", "batches_of"]


class AccumulatingSampler:
    """Puts several batches of a batch sampler together, so that gradients that accumulate are those of one batch.

    Args:
        sampler: The batch sampler.
        times: How many batches.
        limit: Asked at the beginning of an epoch how many of its batches are used; None: all.
    """

    def __init__(
        self, sampler: Iterable[list[int]], times: int, limit: Callable[[], int | None] = lambda: None
    ) -> None:
        self.sampler, self._times, self._limit = sampler, times, limit

    def __iter__(self) -> Iterator[list[int]]:
        batches = islice(self.sampler, self._limit())
        while group := list(islice(batches, self._times)):
            yield [index for batch in group for index in batch]


def batches_of(
    run: Run, loader: Any, *, train: bool, grouped: Callable[[Any], Any] = lambda sampler: sampler
) -> Batches | None:
    """The global batches of a loader, of which each worker loads only its own parts.

    The loader's samplers decide which samples a batch has, with random numbers fixed by (seed, epoch). Loader processes
    become those of the run; options that concern only them (`worker_init_fn`, pinned memory) have no effect.

    Args:
        run: The run.
        loader: Any iterable.
        train: As for `Run.batches`.
        grouped: Makes the batch sampler to use of the loader's.

    Returns:
        None if only iterating over the loader itself gives its batches: it has no index, or its own way to iterate.
        Then every worker must iterate over it, and use its batches as whole global batches.
    """
    if (
        not isinstance(loader, DataLoader)
        or type(loader).__iter__ is not DataLoader.__iter__
        or isinstance(loader.dataset, IterableDataset)
        or loader.batch_sampler is None
    ):
        return None
    return run.batches(
        loader.dataset,
        sampler=grouped(loader.batch_sampler),
        collate_fn=None if loader.collate_fn is default_collate else loader.collate_fn,
        loaders=loader.num_workers,
        prefetch=loader.prefetch_factor or 2,
        train=train,
    )

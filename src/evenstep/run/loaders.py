"""A torch `DataLoader` as batches of a run, for frameworks whose users bring loaders and not data sets."""

from typing import Any

from torch.utils.data import DataLoader, IterableDataset, default_collate

from evenstep.run.feed import Batches
from evenstep.run.run import Run

__all__ = ["batches_of"]


def batches_of(run: Run, loader: Any, *, train: bool) -> Batches | None:
    """The global batches of a loader, of which each worker loads only its own parts.

    The loader's samplers decide which samples a batch has, with random numbers fixed by (seed, epoch). Loader processes
    become those of the run; options that concern only them (`worker_init_fn`, pinned memory) have no effect.

    Args:
        run: The run.
        loader: Any iterable.
        train: As for `Run.batches`.

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
        sampler=loader.batch_sampler,
        collate_fn=None if loader.collate_fn is default_collate else loader.collate_fn,
        loaders=loader.num_workers,
        prefetch=loader.prefetch_factor or 2,
        train=train,
    )

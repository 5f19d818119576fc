"""A torch `DataLoader` as batches of a run, for frameworks whose users bring loaders and not data sets."""

from typing import Any

from torch.utils.data import DataLoader, IterableDataset, default_collate

from evenstep.run.feed import Batches
from evenstep.run.run import Run

__all__ = ["batches_of"]


def batches_of(run: Run, loader: Any, *, train: bool) -> Batches | None:
    """The global batches of a loader, of which each worker loads its own parts only.

    Which samples a batch has is left to the loader's samplers, whose random numbers (seed, epoch) fixes. Loader
    processes become those of the run; what concerns them alone (`worker_init_fn`, pinned memory) has no meaning then.

    Args:
        run: Whose batches.
        loader: Any iterable.
        train: As for `Run.batches`.

    Returns:
        None where only going through the loader itself gives its batches: it has no index, or a way of its own to
        iterate. Then every worker goes through it, and the batches are whole ones.
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

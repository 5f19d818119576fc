"""What a Trainer does differently while a run is open, so that all workers, even those that come later, do the same."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning.pytorch import Trainer

from evenstep.lightning.loaders import SealedBatch
from evenstep.run.run import Run

__all__ = ["adapted"]


@contextmanager
def adapted(trainer: Trainer, run: Run) -> Iterator[None]:
    """While this is open, what depends on existing files is asked once for all workers, and batches have a size."""
    for logger in trainer.loggers:
        if getattr(logger, "_version", "") is None:  # the next free one
            logger._version = run.once(_version_of(logger))
    checkpoints, logging = trainer._checkpoint_connector, trainer._logger_connector
    select, begin = checkpoints._select_ckpt_path, logging.on_batch_start

    def select_once(*args: Any, **kwargs: Any) -> str | None:
        def ask() -> str | None:
            path = select(*args, **kwargs)
            return None if path is None else str(path)

        path: str | None = run.once(ask)
        return path

    def begin_sized(batch: Any, dataloader_idx: int | None = None) -> None:
        begin(batch, dataloader_idx)
        if isinstance(batch, SealedBatch):
            trainer._results.batch_size = len(batch)

    changes: list[tuple[Any, str, Callable[..., Any]]] = [
        (callback, "file_exists", _exists_once(run, callback))  # otherwise the first worker is asked, which may be gone
        for callback in trainer.checkpoint_callbacks
        if hasattr(callback, "file_exists")
    ]
    changes += [(checkpoints, "_select_ckpt_path", select_once), (logging, "on_batch_start", begin_sized)]
    with ExitStack() as stack:
        for owner, name, function in changes:
            setattr(owner, name, function)
            stack.callback(delattr, owner, name)
        yield


def _exists_once(run: Run, callback: Any) -> Callable[[Any, Trainer], bool]:
    return lambda path, _: bool(run.once(lambda: bool(callback._fs.exists(path))))


def _version_of(logger: Any) -> Callable[[], Any]:
    return lambda: logger.version

"""Data without an index: every shard has its own stream, which only the worker that computes the shard reads.

The position in a stream is a number, so a worker that takes over a shard reopens its stream and skips to that
position. The number of samples of each shard in a batch is shared, because the streams need not end together.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import default_collate

from evenstep.core.errors import CheckpointError, ConfigError
from evenstep.data.batch import Batch, Position
from evenstep.data.drawing import drawing
from evenstep.data.loader import Collate
from evenstep.data.whole import WholeBatch
from evenstep.engine.randomness import derive, seed_all
from evenstep.plan.placement import cut

__all__ = ["StreamLoader", "StreamReader", "Streamed", "stream"]


@dataclass(frozen=True)
class Streamed:
    """See `stream`."""

    make: Callable[..., Iterable[Any]]
    skips: bool


def stream(make: Callable[..., Iterable[Any]], *, skips: bool = False) -> Streamed:
    """Data that can only be read in order, for `run.batches`: an `IterableDataset`, tar files, a loader of your own.

    Every shard has a stream of its own in every epoch; an epoch ends when all streams have. They may differ in length.

    Args:
        make: Called as make(epoch, shard) by the worker that computes the shard, perhaps again by another; returns an
            iterable over samples, or with `batch_size=None` over ready parts (what the step function gets). The same
            arguments must always give the same items. torch's, NumPy's and Python's generators are seeded by (seed,
            epoch, shard, number of the item) while an item is made.
        skips: Whether make takes a third argument, how many items of the stream to skip: then a worker that takes over
            a shard need not read what others have already read.

    Raises:
        ConfigError: `make` cannot be called.
    """
    if not callable(make):
        raise ConfigError(
            f"stream got a {type(make).__name__}; expected a function of (epoch, shard) that returns an iterable, such "
            "as lambda epoch, shard: MyDataset(files[shard::8])"
        )
    return Streamed(make, skips)


class StreamReader:
    """Reads the streams of some shards."""

    def __init__(self, source: Streamed, seed: int) -> None:
        self._source, self._seed = source, seed
        self._open: dict[int, tuple[tuple[int, int], Iterator[Any]]] = {}  # by shard: (epoch, items read), and the rest

    def read(self, epoch: int, shard: int, start: int, count: int) -> list[Any]:
        """Items [start, start + count) of a stream; fewer where it ends."""
        place, rest = self._open.pop(shard, ((-1, 0), iter(())))
        with drawing():
            if place != (epoch, start):
                _close(rest)
                rest = self._begin(epoch, shard, start)
            items = [item for n in range(start, start + count) for item in self._next(rest, epoch, shard, n)]
        self._open[shard] = ((epoch, start + len(items)), rest)
        return items

    def _begin(self, epoch: int, shard: int, start: int) -> Iterator[Any]:
        seed_all(derive("stream", self._seed, epoch, shard))
        if self._source.skips:
            return iter(self._source.make(epoch, shard, start))
        rest = iter(self._source.make(epoch, shard))
        for n in range(start):
            if not self._next(rest, epoch, shard, n):
                raise ConfigError(
                    f"the stream of shard {shard} in epoch {epoch} ended after {n} items, but gave {start} before; "
                    "it must give the same items every time it is made"
                )
        return rest

    def _next(self, rest: Iterator[Any], epoch: int, shard: int, number: int) -> list[Any]:
        """The next item, if any."""
        seed_all(derive("stream", self._seed, epoch, shard, number))
        return list(islice(rest, 1))

    def keep(self, shards: range) -> None:
        """Close the streams of all other shards."""
        for shard in set(self._open) - set(shards):
            _close(self._open.pop(shard)[1])

    def close(self) -> None:
        """Close all streams."""
        self.keep(range(0))


def _close(rest: Iterator[Any]) -> None:
    if callable(close := getattr(rest, "close", None)):  # so that a generator runs its `finally` now, not eventually
        close()


class StreamLoader:
    """Loads the parts of one worker from streams, as `Loader` does from a data set.

    Args:
        source: The streams.
        batch_size: Samples of a global batch while no stream has ended; None: each item is a ready part.
        num_shards: Parts of every batch.
        seed: The run's seed.
        collate: Makes a part from a list of samples; torch's `default_collate` if None.
        device: Where the samples go.
        span: Says which shards are this worker's now.
        share: Given a function that reads the parts of this worker's shards and returns the number of samples in each,
            returns those of all shards, the same on all workers. The function may be called again, or not at all if
            the numbers are already known.
    """

    def __init__(
        self,
        source: Streamed,
        batch_size: int | None,
        num_shards: int,
        seed: int,
        *,
        collate: Collate | None = None,
        device: str = "cpu",
        span: Callable[[], range],
        share: Callable[[str, Callable[[], dict[int, int]]], list[int]],
    ) -> None:
        if batch_size is None and collate is not None:
            raise ConfigError("collate_fn for a stream of ready parts (batch_size=None), which need no collating")
        if batch_size is not None and (not isinstance(batch_size, int) or batch_size < num_shards):
            raise ConfigError(
                f"batch_size={batch_size!r} for a stream, expected at least {num_shards}: each of {num_shards} shards "
                "reads a stream of its own"
            )
        self._counts = [1] * num_shards if batch_size is None else [b - a for a, b in cut(batch_size, num_shards)]
        self._ready = batch_size is None
        self._collate = _as_it_is if self._ready else collate or default_collate
        self._source, self._seed, self._device = source, seed, device
        self._span, self._share = span, share

    def load(self, epochs: Iterable[tuple[int, dict[str, Any]]]) -> Iterator[Batch]:
        """The batches of some epochs, each from a position on (as in `Position.after`), in order.

        Raises:
            ConfigError: An epoch has no sample at all, or the streams do not give the same as before.
            CheckpointError: The position belongs to other data.
        """
        reader = StreamReader(self._source, self._seed)
        try:
            for epoch, start in epochs:
                yield from self._epoch(reader, epoch, start)
        finally:
            reader.close()

    def _epoch(self, reader: StreamReader, epoch: int, start: dict[str, Any]) -> Iterator[Batch]:
        number, read = start["batch"], start.get("read", [0] * len(self._counts))
        if len(read) != len(self._counts) or (number and "read" not in start):
            raise CheckpointError(
                f"the checkpoint holds {start}, which is not a position in streams of {len(self._counts)} shards; give "
                "the data that it was written with"
            )
        while True:
            batch = self._batch(reader, epoch, number, read)
            if not len(batch):
                break
            yield batch
            assert batch.position is not None, "every batch of a stream has a position"
            number, read = number + 1, batch.position.after["read"]
        if number == 0:
            raise ConfigError(f"no stream gave a sample in epoch {epoch}; expected at least one")

    def _batch(self, reader: StreamReader, epoch: int, number: int, read: list[int]) -> Batch:
        found: dict[int, list[Any]] = {}  # items, by shard
        name = f"epoch {epoch} batch {number} of a stream"

        def items(shard: int) -> list[Any]:
            if shard not in found:
                found[shard] = reader.read(epoch, shard, read[shard], self._counts[shard])
            return found[shard]

        def sizes_here() -> dict[int, int]:
            mine = self._span()
            reader.keep(mine)
            return {shard: self._size(items(shard)) for shard in mine}

        sizes = self._share(name, sizes_here)

        def load(shard: int) -> Any:
            size = self._size(items(shard))
            if size != sizes[shard]:
                raise ConfigError(
                    f"the stream of shard {shard} gave {size} samples for {name} but {sizes[shard]} before; it must "
                    "give the same whenever it is made"
                )
            with drawing():
                seed_all(derive("collate", self._seed, epoch, shard, number))
                return self._collate(items(shard))

        counts = [bool(size) if self._ready else size for size in sizes]
        after = {"epoch": epoch, "batch": number + 1, "read": [a + b for a, b in zip(read, counts, strict=True)]}
        return Batch(name, sizes, load, {}, self._device, Position(epoch, number, number, None, after))

    def _size(self, items: list[Any]) -> int:
        """The number of samples of a part."""
        return sum(WholeBatch(item).num_rows for item in items) if self._ready else len(items)


def _as_it_is(items: list[Any]) -> Any:
    return items[0]

"""The batches of a run: which epochs of the data, from which position, and loading them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from evenstep.core.env import Environment
from evenstep.core.errors import ConfigError
from evenstep.data.batch import Batch, Position
from evenstep.data.loader import Collate, Loader, num_samples
from evenstep.data.order import BatchRequest, Deal, Order
from evenstep.data.sampling import Sampling
from evenstep.data.streams import Streamed, StreamLoader
from evenstep.engine.step import Engine
from evenstep.exchange.journal import Entry
from evenstep.run.meter import Meter
from evenstep.run.saving import Perform, Saving

__all__ = ["Arrangement", "Batches", "Feed", "Loading"]

Place = dict[str, Any]  # as in `Position.after`


@dataclass(frozen=True)
class Loading:
    """How samples are loaded: the arguments of `Run.batches` of these names."""

    collate_fn: Collate | None = None
    loaders: int = 0
    prefetch: int = 2


@dataclass(frozen=True)
class Arrangement:
    """How a data set becomes batches: the arguments of `Run.batches` of these names."""

    batch_size: int | None
    shuffle: bool | None = None
    sampler: Any = None
    drop_last: bool = False
    batch_per_worker: bool = False
    deal: Deal = "position"
    train: bool = True

    def check_stream(self) -> None:
        """Check that nothing is asked for that a stream does not have.

        Raises:
            ConfigError: Something is.
        """
        if self != Arrangement(self.batch_size):
            raise ConfigError(
                "a stream has an order of its own, and a last batch of any size: shuffle, sampler, drop_last, "
                "batch_per_worker, deal and train=False are for data with an index"
            )


class Batches:
    """Global batches of a data set. Iterating again goes on with the next epochs, as with a `DataLoader`."""

    def __init__(
        self,
        go_through: Callable[[], Iterator[Batch]],
        count: Callable[[], int],
        at: Callable[[int, int], Iterator[Batch]],
    ) -> None:
        self._go_through, self._count, self._at = go_through, count, at

    def __iter__(self) -> Iterator[Batch]:
        return self._go_through()

    def __len__(self) -> int:
        """How many batches iterating would give now; fewer than usual after `Run.load`.

        Raises:
            TypeError: It cannot be known beforehand.
        """
        return self._count()

    def at(self, epoch: int, batch: int = 0) -> Iterator[Batch]:
        """Iterate over one epoch, for a script that counts epochs itself.

        Args:
            epoch: Which one, counted from 0, regardless of earlier iterations.
            batch: How many of its batches to skip.
        """
        return self._at(epoch, batch)


class Feed:
    """Gives a run its batches.

    Args:
        engine: Knows which shards are this worker's.
        env: The environment of the run.
        saving: Told where in the data we are.
        meter: Shows where we are.
        perform: Does an operation on all workers.
        group: The number of this worker's group, and how many there are.
    """

    def __init__(
        self, engine: Engine, env: Environment, saving: Saving, meter: Meter, perform: Perform, group: tuple[int, int]
    ) -> None:
        self._engine, self._env, self._place_of_group = engine, env, group
        self._config, self._ledger = engine.config, engine.ledger
        self._saving, self._meter, self._perform = saving, meter, perform
        self._begun = 0  # how many epochs were begun, or skipped, so far
        self._has_fed = False
        self._loops, self._last_loop = count(), -1  # which loop over batches gave the last one

    def batches(self, dataset: Any, arrangement: Arrangement, epochs: int, loading: Loading) -> Batches:
        """The batches of a data set or stream; see `Run.batches`."""
        if isinstance(dataset, Streamed):
            arrangement.check_stream()
            return self._streams(dataset, arrangement.batch_size, epochs, loading)
        order = self._arrange(dataset, arrangement)
        if not arrangement.train:
            if arrangement.batch_per_worker:
                raise ConfigError("batch_per_worker=True with train=False; expected one of them: give the global batch")
            return self._untrained(dataset, order, loading)
        num_workers = self._num_workers_at_start() if arrangement.batch_per_worker else None
        order = order if num_workers is None else order.times(num_workers)
        return self._trained(dataset, order, epochs, loading, num_workers)

    def _arrange(self, dataset: Any, said: Arrangement) -> Order:
        size, seed = num_samples(dataset), self._config.seed
        sampling = None if said.sampler is None else Sampling(said.sampler, size, seed)
        shuffle = sampling is None if said.shuffle is None else said.shuffle
        return Order(
            size, said.batch_size, self._config.shards, seed, shuffle, said.drop_last, said.deal,
            *self._place_of_group, sampling,
        )  # fmt: skip

    def in_order(self, dataset: Any, batch_size: int, group: int = 0, groups: int = 1) -> Order:
        """A data set from its beginning to its end, every sample once; the share of one of several groups."""
        size, seed, shards = num_samples(dataset), self._config.seed, self._config.shards
        return Order(size, batch_size, shards, seed, shuffle=False, drop_last=False, group=group, groups=groups)

    def _trained(self, dataset: Any, order: Order, epochs: int, loading: Loading, num_workers: int | None) -> Batches:
        """The batches of a data set; `num_workers`: the number that global batches were scaled by, if any."""

        def load(coming: Sequence[tuple[int, Place]]) -> Iterator[Batch]:
            self._saving.begin_data(order.num_samples, order.batch_size, num_workers)
            skip, span = lambda: self._ledger.catching_up, lambda: self._engine.sharing.mine
            loader = self._loader(dataset, "sample", span, loading, skip=skip)
            requests = (request for epoch, at in coming for request in order.requests(epoch, at["batch"]))
            is_first, self._has_fed = not self._has_fed, True
            return loader.load(_compared(requests, is_first))

        return Batches(
            lambda: self._go_through(load, epochs),
            lambda: sum(order.count(at["batch"]) for _, at in self._coming(epochs)),
            lambda epoch, batch: self._go_through_at(load, epoch, batch),
        )

    def _untrained(self, dataset: Any, order: Order, loading: Loading) -> Batches:
        """Batches that no step trains on: they are not epochs of the run, and draw their own random numbers."""
        passes = count()

        def load(epoch: int, first: int) -> Iterator[Batch]:
            skip, span = lambda: self._ledger.catching_up, lambda: range(*self._engine.sharing.evaluated[self._rank])
            return self._loader(dataset, "evaluate", span, loading, skip=skip).load(order.requests(epoch, first))

        return Batches(lambda: load(next(passes), 0), order.count, load)

    @property
    def _rank(self) -> int:
        return self._ledger.group.rank

    def _streams(self, source: Streamed, batch_size: int | None, epochs: int, loading: Loading) -> Batches:
        """The batches of a stream; the arguments are those of `batches`.

        Raises:
            ConfigError: The arguments make no sense for a stream.
            UnsupportedError: The run goes through servers, or there are several groups.
        """
        if loading.loaders:
            raise ConfigError(
                f"loaders={loading.loaders} for a stream, which brings its own: let it return a DataLoader with "
                f"num_workers={loading.loaders}"
            )
        self._engine.updates.refuse("stream")
        loader = StreamLoader(
            source, batch_size, self._config.shards, self._config.seed, collate=loading.collate_fn,
            device=self._config.device, span=lambda: self._engine.sharing.mine, share=self._share_sizes,
        )  # fmt: skip

        def load(coming: Sequence[tuple[int, Place]]) -> Iterator[Batch]:
            self._saving.begin_data(None, batch_size, None)
            return loader.load(coming)

        return Batches(
            lambda: self._go_through(load, epochs),
            _nobody_knows,
            lambda epoch, batch: self._go_through_at(load, epoch, batch),
        )

    def _share_sizes(self, kind: str, sizes_here: Callable[[], dict[int, int]]) -> list[int]:
        """See `StreamLoader`."""

        def attempt() -> Entry:
            of_all = self._ledger.group.gather_json(kind, sizes_here())
            by_shard = {int(shard): size for theirs in of_all for shard, size in theirs.items()}
            return Entry(kind, [by_shard[shard] for shard in range(self._config.shards)])

        found: list[int] = self._perform(kind, attempt, lambda entry, _: entry.value)
        return found

    def _go_through(
        self, load: Callable[[Sequence[tuple[int, Place]]], Iterator[Batch]], epochs: int
    ) -> Iterator[Batch]:
        base, coming = self._begun, list(self._coming(epochs))
        batches = load(coming)
        self._begun += epochs
        return self._show(batches, base, epochs)

    def _go_through_at(
        self, load: Callable[[Sequence[tuple[int, Place]]], Iterator[Batch]], epoch: int, first: int
    ) -> Iterator[Batch]:
        self._begun = epoch + 1
        return self._show(load([(epoch, {"epoch": epoch, "batch": first})]), epoch, 1)

    def _coming(self, epochs: int) -> Iterator[tuple[int, Place]]:
        """The epochs that iterating would give now, and where in each it would begin.

        Raises:
            ConfigError: What was loaded does not say where.
        """
        if self._saving.ambiguous:
            raise ConfigError(
                "what was loaded was saved between two loops over batches that took turns (as zip lets them), and has "
                "the position of only one; let run.checkpoint keep them all (evenstep run --resume), or say where each "
                "goes on: run.batches(...).at(epoch, batch)"
            )
        beginning: Place = {"epoch": 0, "batch": 0}
        start = self._saving.position or beginning
        for epoch in range(max(self._begun, start["epoch"]), self._begun + epochs):
            yield epoch, start if epoch == start["epoch"] else beginning

    def _show(self, batches: Iterator[Batch], base: int, epochs: int) -> Iterator[Batch]:
        """Hand on the batches, and show where they are."""
        before: Position | None = None
        loop = next(self._loops)
        for batch in batches:
            self._saving.interleaved |= before is not None and self._last_loop != loop
            self._last_loop = loop
            if self._env.max_steps is not None and self._engine.version >= self._env.max_steps:
                return
            at = batch.position
            assert at is not None, "a batch that was loaded from data has a position"
            self._saving.next = at.after
            self._meter.begin_batch()
            if before is None or at.epoch != before.epoch:
                self._end_of_stream(before, base, epochs)
                self._meter.begin_epoch()
                self._meter.show(at.epoch - base, epochs, at.before, at.count or 0)  # starts the clock of the epoch
            before = at
            yield batch
            self._meter.show(at.epoch - base, epochs, at.before + 1, at.count or 0, len(batch))
        self._end_of_stream(before, base, epochs)

    def _end_of_stream(self, last: Position | None, base: int, epochs: int) -> None:
        """Show the end of an epoch of a stream, whose number of batches is known only now."""
        if last is not None and last.count is None:
            self._meter.show(last.epoch - base, epochs, last.before + 1, last.before + 1)

    def _num_workers_at_start(self) -> int:
        """How many workers the run was originally started with, even if it has been resumed.

        This is the number asked for, not how many are there now or came: a worker that dies early must not change the
        result.
        """

        def attempt() -> Entry:
            found = self._ledger.group.gather_json("batch per worker", self._env.num_workers)
            return Entry("batch per worker", found[0])

        found: int = self._perform("batch per worker", attempt, lambda entry, _: entry.value)
        return found

    def once(self, dataset: Any, order: Order, loading: Loading) -> Iterator[Batch]:
        """The batches of a data set to be evaluated, each once."""
        span = range(*self._engine.sharing.evaluated[self._rank])
        return self._loader(dataset, "evaluate", lambda: span, loading).load(
            _compared(order.requests(0), is_first=True)
        )

    def _loader(
        self, dataset: Any, purpose: str, span: Callable[[], range], loading: Loading, **options: Any
    ) -> Loader:
        return Loader(
            dataset,
            span,
            self._config.seed,
            purpose,
            device=self._config.device,
            collate=loading.collate_fn,
            loaders=loading.loaders,
            prefetch=loading.prefetch,
            timeout_s=self._config.timeout_s,
            **options,
        )


def _compared(requests: Iterable[BatchRequest], is_first: bool) -> Iterator[BatchRequest]:
    """Requests, of which all workers compare a few: the first of epochs 0, 1, 2, 4, 8 ..., and the very first.

    Whoever joins later compares them too, so there should not be many.
    """
    for request in requests:
        epoch, begins = request.position.epoch, request.position.before == 0
        yield replace(request, is_compared=is_first or (begins and epoch & (epoch - 1) == 0))
        is_first = False


def _nobody_knows() -> int:
    raise TypeError("how many batches a stream has is known when it has ended")

"""The batches of a run: how often the data was gone through, from where on, and loading them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from evenstep.core.config import RunConfig
from evenstep.core.env import Environment
from evenstep.data.batch import Batch
from evenstep.data.loader import Collate, Loader
from evenstep.data.order import Order, Request
from evenstep.engine.step import Engine
from evenstep.exchange.journal import Entry
from evenstep.exchange.ledger import Ledger
from evenstep.run.meter import Meter
from evenstep.run.saving import Perform, Saving

__all__ = ["Batches", "Feed", "Loading"]


@dataclass(frozen=True)
class Loading:
    """How samples are loaded: the arguments of `Run.batches` of these names."""

    collate_fn: Collate | None = None
    loaders: int = 0
    prefetch: int = 2


class Batches:
    """Global batches of a data set. Going through them again goes on with the next epochs, as with a `DataLoader`."""

    def __init__(self, go_through: Callable[[], Iterator[Batch]], count: Callable[[], int]) -> None:
        self._go_through, self._count = go_through, count

    def __iter__(self) -> Iterator[Batch]:
        return self._go_through()

    def __len__(self) -> int:
        """How many batches there are if one goes through them now; fewer than usual after `Run.load`.

        Raises:
            TypeError: It cannot be known before.
        """
        return self._count()


class Feed:
    """Gives a run its batches.

    Args:
        config: Of the run.
        env: What surrounds it.
        ledger: Of the workers.
        engine: Knows which shards are this worker's.
        saving: Is told where in the data we are.
        meter: Shows it.
        perform: Does an operation on all workers.
    """

    def __init__(
        self,
        config: RunConfig,
        env: Environment,
        ledger: Ledger,
        engine: Engine,
        saving: Saving,
        meter: Meter,
        perform: Perform,
    ) -> None:
        self._config, self._env, self._ledger, self._engine = config, env, ledger, engine
        self._saving, self._meter, self._perform = saving, meter, perform
        self._begun = 0  # how many epochs were begun, or left out, so far

    def batches(
        self, dataset: Any, order: Order, epochs: int, loading: Loading, num_workers: int | None = None
    ) -> Batches:
        """The batches of a data set.

        Args:
            dataset: Any map-style data set.
            order: How it becomes batches.
            epochs: How often to go through it.
            loading: How samples are loaded.
            num_workers: Of which number of workers the global batches are a multiple, if that was asked for.
        """

        def go_through() -> Iterator[Batch]:
            self._saving.begin_data(order, num_workers)
            loader = self.loader(dataset, "sample", loading, skip=lambda: self._ledger.catching_up)
            base = self._begun
            coming = list(self._coming(epochs))
            self._begun += epochs

            def requests() -> Iterator[Request]:
                for epoch, first in coming:
                    yield from order.requests(epoch, first)

            return self._show(loader.load(requests()), base, epochs)

        return Batches(go_through, lambda: sum(order.count(first) for _, first in self._coming(epochs)))

    def _coming(self, epochs: int) -> Iterator[tuple[int, int]]:
        """The epochs that would be gone through now, each with the number of its first batch."""
        start = self._saving.position or {"epoch": 0, "batch": 0}
        for epoch in range(max(self._begun, start["epoch"]), self._begun + epochs):
            yield epoch, start["batch"] if epoch == start["epoch"] else 0

    def _show(self, batches: Iterator[Batch], base: int, epochs: int) -> Iterator[Batch]:
        """Hand on the batches, and show where they are."""
        shown = -1
        for batch in batches:
            if self._env.max_steps is not None and self._engine.version >= self._env.max_steps:
                return
            at = batch.position
            assert at is not None, "it was loaded from the data"
            self._saving.next = at.after
            self._meter.begin_batch()
            count = at.count or 0
            if at.epoch != shown:
                shown = at.epoch  # starts the clock of the epoch
                self._meter.begin_epoch()
                self._meter.show(at.epoch - base, epochs, at.before, count)
            yield batch
            self._meter.show(at.epoch - base, epochs, at.before + 1, count, len(batch))

    def num_workers_at_start(self) -> int:
        """How many workers the run was started with: what was asked for, and first of all, if it has been resumed.

        Neither how many there are now nor how many came: else a worker that dies early would change the result.
        """

        def attempt() -> Entry:
            found = self._ledger.group.gather_json("batch per worker", self._env.num_workers)
            return Entry("batch per worker", found[0])

        found: int = self._perform("batch per worker", attempt, lambda entry, _: entry.value)
        return found

    def loader(self, dataset: Any, purpose: str, loading: Loading, **options: Any) -> Loader:
        """A loader of this worker's shards."""
        return Loader(
            dataset,
            lambda: self._engine.mine,
            self._config.seed,
            purpose,
            device=self._config.device,
            collate=loading.collate_fn,
            loaders=loading.loaders,
            prefetch=loading.prefetch,
            timeout_s=self._config.timeout_s,
            **options,
        )

"""Training through a parameter server now and then: in between a worker trains on its own, with its own optimizer.

Every N batches, or at the end of every epoch, it sends what has changed, and goes on with the server's parameters.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.engine.clipping import Clipping
from evenstep.engine.compute import Samples, Work
from evenstep.engine.delivery import Delivery
from evenstep.engine.holdings import Holdings
from evenstep.engine.kept import News
from evenstep.engine.optimizer_set import Trained
from evenstep.engine.prepared import PreparedOptimizer
from evenstep.engine.reports import Report
from evenstep.engine.results import Results
from evenstep.engine.updates import Feature
from evenstep.exchange.tracing import Kind
from evenstep.plan.summing import Span, Summing
from evenstep.run.apart import Apart
from evenstep.run.names import bare

__all__ = ["PeriodicUpdates"]


class PeriodicUpdates:
    """The updates of a worker that sends what it has changed from time to time; see `Updates`.

    Args:
        holdings: What a group of one holds.
        apart: The worker.
        every: Batches between two updates, or "epoch".
    """

    def __init__(self, holdings: Holdings, apart: Apart, every: int | str) -> None:
        self._holdings, self._apart, self._every = holdings, apart, every
        self.shards: Span | None = apart.shards
        self._since: dict[str, Tensor] = {}  # the server's values when this worker began to train on its own
        self._num_batches = 0

    def number_of(self, version: int) -> int:
        """See `Updates`."""
        return version

    def refuse(self, what: Feature) -> None:
        """See `Updates`."""
        if what != "weighted loss":
            self._apart.refuse(what)

    def admit(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """See `Updates`."""
        self._apart.admit(model)

    def lay_out(self, prepared: PreparedOptimizer, spans: Sequence[Span]) -> tuple[Summing, Delivery]:
        """See `Updates`."""
        return prepared.alone(self._apart.shards, self._holdings.config.shards, add=True)

    def join(self, model: nn.Module, prepared: PreparedOptimizer | None) -> None:
        """See `Updates`."""
        self._apart.join()
        self._remember()

    def _remember(self) -> None:
        entries = self._holdings.state.entries
        self._since = {name: entries[name].live.clone() for name in self._holdings.models.slots.parameters}

    def begin(self, samples: Samples, clipping: Clipping) -> Samples | Results:
        """See `Updates`."""
        own = self._apart.own(samples)
        return self._apart.results() if self._apart.leaves_out or not any(own.sizes) else own

    def share(self, work: Work, report: Report) -> list[Report]:
        """Return this worker's report: nobody else does this step."""
        self._apart.last = report.results
        return [report]

    def update(self, work: Work, sums: dict[int, Tensor | None]) -> News:
        """See `Updates`."""
        return work.prepared.update(sums)

    def settle(self, prepared: Trained, samples: Samples) -> None:
        """Send what this worker has changed, if it is time and no earlier life has sent it."""
        self._num_batches += 1
        due = samples.is_last if isinstance(self._every, str) else self._num_batches % self._every == 0
        if due and self._apart.leaves_out:
            self._apart.leave_out()
        elif due:
            self._send_changes()

    def _send_changes(self) -> None:
        slots, entries, client = self._holdings.models.slots, self._holdings.state.entries, self._apart.client
        trained = [name for name, parameter in slots.parameters.items() if parameter.requires_grad]
        changes = {name: self._since[name] - entries[name].live for name in trained}
        buffers = {name: entries[name].live for name in slots.buffers} if self._apart.shards[0] == 0 else {}
        note = Report(self._apart.worker, {}, {}, self._apart.last, 0.0).pack()
        with self._holdings.group.tracer.span(Kind.WAIT, "the server"):
            version = client.update_parameters(
                bare({**changes, **buffers}), kind="delta", buffers=list(bare(buffers)), note=note
            )
            values = client.get_parameters(min_version=version)
        self._apart.take_over(values)
        self._remember()
        self._holdings.models.remember()

    def edited(self) -> None:
        """Nothing to do: edits are refused."""

    def abandon(self) -> None:
        """Nothing to do: nothing was sent."""

    def recovery(self) -> AbstractContextManager[None]:
        """See `Updates`."""
        return nullcontext()

    def finish(self) -> None:
        """Nothing to do: what was not sent yet stays here."""

    def close(self) -> None:
        """Leave the server."""
        self._apart.client.close()

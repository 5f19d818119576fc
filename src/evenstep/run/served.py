"""Training through a parameter server, each worker on its own: every batch is an update.

A worker computes its share of the shards of every batch, as in any run. What happens then depends:

- synchronous (`staleness=0`): it sends the tree nodes that cover its shards. The server adds up all workers' nodes in
  the fixed tree, as an owner does in a run without a server, and steps: the parameters are equal to the bit.
- otherwise it sends the mean gradient over its own samples, and goes on with the server's parameters.

Either way losses and metrics travel with the update, as its note.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.core.errors import UnsupportedError
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
from evenstep.run.names import bare, bare_names
from evenstep.run.server import options_for_server

__all__ = ["ServedUpdates"]


class ServedUpdates:
    """The updates of a worker that sends each one to a server on its own; see `Updates`.

    Args:
        holdings: What a group of one holds.
        apart: The worker.
    """

    def __init__(self, holdings: Holdings, apart: Apart) -> None:
        self._holdings, self._apart = holdings, apart
        self.shards: Span | None = apart.shards
        self._synchronous = apart.client.staleness == 0
        self._options: list[dict[str, Any]] = []  # as the server knows them
        self._made = 0  # the server's version that the last update has made

    def number_of(self, version: int) -> int:
        """See `Updates`."""
        return version

    def refuse(self, what: Feature) -> None:
        """See `Updates`."""
        self._apart.refuse(what)

    def admit(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """See `Updates`."""
        self._apart.admit(model)

    def lay_out(self, prepared: PreparedOptimizer, spans: Sequence[Span]) -> tuple[Summing, Delivery]:
        """See `Updates`. The server adds up nodes if it gets those of all workers, otherwise this worker does."""
        return prepared.alone(self._apart.shards, self._holdings.config.shards, add=not self._synchronous)

    def join(self, model: nn.Module, prepared: PreparedOptimizer | None) -> None:
        """See `Updates`."""
        if prepared is not None:
            self._options = options_for_server(prepared)
        self._apart.join()

    def begin(self, samples: Samples, clipping: Clipping) -> Samples | Results:
        """See `Updates`."""
        if self._apart.leaves_out:
            return self._apart.results()
        if clipping:
            raise UnsupportedError(
                "gradients are added up on the server, so they cannot be clipped here; use Server(..., aggregate=True)"
            )
        return samples if self._synchronous else self._apart.own(samples)

    def share(self, work: Work, report: Report) -> list[Report]:
        """Send the gradients with the report; the server waits for all that take part."""
        if any(result.weighted for result in report.results.values()):
            self.refuse("weighted loss")
        self._apart.last = report.results or self._apart.last  # of a short batch it may have no sample
        if not self._synchronous:
            report = replace(report, results=self._apart.last)
        note = replace(report, worker=self._apart.worker).pack()
        kept = self._holdings.models.take_buffers()  # the server returns those of the run's first shard
        buffers = bare(kept) if self._apart.shards[0] == 0 else {}
        update, more = self._synchronously(work) if self._synchronous else self._asynchronously(work)
        if (options := options_for_server(work.prepared.optimizers[0])) != self._options:
            more["options"] = options
        more |= {"timeout_s": self._holdings.config.timeout_s, "note": note, "buffers": list(buffers)}
        with self._holdings.group.tracer.span(Kind.WAIT, "the server"):
            reply = self._apart.client.update({**buffers, **update}, **more)
        self._options, self._made = options, reply["version"]
        return [Report.unpack(theirs) for theirs in reply["notes"]]

    def _synchronously(self, work: Work) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The sums over this worker's tree nodes, and what the server must know about them."""
        names, nodes = bare_names(work.prepared.names), work.prepared.optimizers[0].gradients.nodes()
        update = {f"{first}-{end}/{names[i]}": tensor for (first, end), held in nodes for i, tensor in held.items()}
        spans = [list(span) for span, _ in nodes]
        return update, {"shards": self._holdings.config.shards, "spans": spans, "base": self._apart.client.version}

    def _asynchronously(self, work: Work) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The mean over this worker's samples, and their number."""
        names, sums = bare_names(work.prepared.names), work.prepared.gradients.finish()
        update = {names[i]: total for i, total in sums.items() if total is not None}
        return update, {"samples": sum(work.sizes)}

    def update(self, work: Work, sums: dict[int, Tensor | None]) -> News:
        """Take over the server's result."""
        with self._holdings.group.tracer.span(Kind.WAIT, "the server"):
            values = self._apart.client.get_parameters(min_version=self._made)
        self._apart.take_over(values)
        return []

    def settle(self, prepared: Trained, samples: Samples) -> None:
        """See `Updates`."""
        prepared.stepped_elsewhere()
        if self._apart.leaves_out:
            self._apart.leave_out()

    def edited(self) -> None:
        """Nothing to do: edits are refused."""

    def abandon(self) -> None:
        """Nothing to do: the server knows what it has."""

    def recovery(self) -> AbstractContextManager[None]:
        """See `Updates`."""
        return nullcontext()

    def finish(self) -> None:
        """Nothing to do: the parameters are here, and the optimizer's state stays with the server."""

    def close(self) -> None:
        """Leave the server."""
        self._apart.client.close()

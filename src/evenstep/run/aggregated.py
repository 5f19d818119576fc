"""Training through a parameter server by workers that share a machine: one message for all of them.

The workers step together as in any run: the same tree, owners, transaction and recovery. Only the update is made
elsewhere. The owners put their sums into the segment, the first worker sends them to the server as one contribution,
and puts the values that come back where everybody reads them. To the server they are one worker.

An update has the number of its operation, whichever worker sends it. If the first worker dies after the server got it,
its successor sends it again; the server recognises it, and answers with its result. So the step is made once.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.core import points
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
from evenstep.engine.updates import Feature, share_among
from evenstep.exchange.journal import Entry
from evenstep.exchange.ledger import Operation
from evenstep.exchange.tracing import Kind
from evenstep.plan.summing import Span, Summing
from evenstep.run.names import bare, bare_names, compare, full
from evenstep.run.refusals import WITH_SERVERS, refuse
from evenstep.run.server import Server, options_for_server
from evenstep.server.client import Client
from evenstep.transport.memory import ALIGNMENT, aligned

__all__ = ["AggregatedUpdates"]

_PATIENCE = 0.8  # of the timeout: a worker gives up on the server before the others give up on the worker


class AggregatedUpdates:
    """The updates of workers that reach the server through the first worker of their machine; see `Updates`.

    Args:
        holdings: What the workers of this machine hold.
        server: Which server, and how.

    Raises:
        ConfigError: The server has another staleness.
        UnreachableError: No server is there.
    """

    shards = None

    def __init__(self, holdings: Holdings, server: Server) -> None:
        self._holdings, self._group, self._server = holdings, holdings.group, server
        self._client: Client | None = None
        self._joined_after = 0  # the number of the last update that the server had from us when we joined
        self._options: list[dict[str, Any]] = []  # as the server knows them
        self._sums: list[Tensor] = []  # where all owners put theirs
        if self._group.worker == 0 and not holdings.ledger.catching_up:  # the first worker reports what is wrong
            self._connected()

    def number_of(self, version: int) -> int:
        """See `Updates`."""
        return version

    def refuse(self, what: Feature) -> None:
        """See `Updates`."""
        if what in ("load", "checkpoint"):
            raise UnsupportedError(
                f"run.{what} in a run with a server would need the optimizer's state, which is the server's: it "
                "keeps and restores it by --directory, --snapshot-every and --durable"
            )
        if what not in ("weighted loss", "recheck"):
            refuse(what, WITH_SERVERS)

    # ---- the server ----

    def _connected(self) -> Client:
        """The connection, which only the first worker has."""
        if self._client is None:
            self._client = self._server.connect("worker-0", self._patience_s)
        return self._client

    @property
    def _patience_s(self) -> float:
        return _PATIENCE * self._holdings.config.timeout_s

    @property
    def _number(self) -> int:
        """The number of what is sent in the current operation."""
        return self._joined_after + self._holdings.state.operation

    def _here(self) -> dict[str, Tensor]:
        """Parameters and buffers by the server's names."""
        slots, entries = self._holdings.models.slots, self._holdings.state.entries
        return bare({name: entries[name].live for name in (*slots.parameters, *slots.buffers)})

    # ---- joining ----

    def admit(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """See `Updates`."""
        if self._holdings.models.slots.parameters or optimizer is None:
            raise UnsupportedError("a run through a server trains one model with one optimizer; prepare both, once")

    def lay_out(self, prepared: PreparedOptimizer, spans: Sequence[Span]) -> tuple[Summing, Delivery]:
        """See `Updates`."""
        return prepared.in_tree(spans)

    def join(self, model: nn.Module, prepared: PreparedOptimizer | None) -> None:
        """Take over the server's values, or give it ours if it has none yet."""
        assert prepared is not None, "a model without an optimizer is not admitted"
        self._options = options_for_server(prepared)
        num_bytes = sum(aligned(p.numel() * p.element_size()) for p in prepared.parameters) + ALIGNMENT
        region = self._group.segment.memory.reserve(num_bytes)
        self._sums = [region.tensor(p.shape, p.dtype) for p in prepared.parameters]

        def attempt() -> Entry:
            last = self._meet_server() if self._group.rank == 0 else None
            return Entry("join the server", self._group.gather_json("join the server", last)[0])

        def adopt(entry: Entry, took_part: bool) -> None:
            self._joined_after = entry.value
            self._holdings.pull()
            self._holdings.settle()

        self._holdings.ledger.perform(Operation("join the server", self._holdings.version), attempt, adopt)

    def _meet_server(self) -> int:
        """Take over the server's values; return the number of the last update under our name."""
        client, here = self._connected(), self._here()
        if client.status()["owner"] is None:
            client.put_parameters(here, buffers=bare_names(self._holdings.models.slots.buffers))
        theirs = client.get_parameters()
        compare(here, theirs)
        self._holdings.replace(full(theirs))
        return client.sequence

    # ---- a step ----

    def begin(self, samples: Samples, clipping: Clipping) -> Samples | Results:
        """See `Updates`."""
        return samples

    def share(self, work: Work, report: Report) -> list[Report]:
        """See `Updates`."""
        return share_among(self._group, work, report)

    def update(self, work: Work, sums: dict[int, Tensor | None]) -> News:
        """Put the sums into the segment; the first worker sends them, and puts the answer in place."""
        mine = {i: total for i, total in sums.items() if total is not None}
        with torch.no_grad():
            for i, total in mine.items():
                self._sums[i].copy_(total)
        of_all = self._group.gather_json(work.where + "sums", list(mine))
        if self._group.rank == 0:
            self._send(work, sorted(i for theirs in of_all for i in theirs))
        work.prepared.stepped_elsewhere()
        return []

    def _send(self, work: Work, present: list[int]) -> None:
        client, shards = self._connected(), self._holdings.config.shards
        names = bare_names(work.prepared.names)
        buffers = bare(self._holdings.models.kept_buffers)
        more: dict[str, Any] = {"buffers": list(buffers), "sequence": self._number}
        head = ""
        if client.staleness == 0:
            head = f"0-{shards}/"
            more |= {"shards": shards, "spans": [[0, shards]], "base": client.version}
        else:
            more["samples"] = sum(work.sizes)
        if (options := options_for_server(work.prepared.optimizers[0])) != self._options:
            more["options"] = options
        update = {head + names[i]: self._sums[i] for i in present}
        with self._group.tracer.span(Kind.WAIT, "the server"):
            reply = client.update({**update, **buffers}, timeout_s=self._patience_s, **more)
            points.reach("inside update")
            values = client.get_parameters(names, min_version=reply["version"])
        self._holdings.replace(full(values))

    def settle(self, prepared: Trained, samples: Samples) -> None:
        """See `Updates`."""
        self._options = options_for_server(prepared.optimizers[0])

    def edited(self) -> None:
        """Give the server the result too."""
        client = self._connected()
        client.put_parameters(self._here(), force=True, sequence=self._number)
        client.get_parameters([])  # and so know its version

    # ---- trouble, and the end ----

    def abandon(self) -> None:
        """Nothing to do: the server recognises what was sent by its number."""

    @contextmanager
    def recovery(self) -> Iterator[None]:
        """A worker that is no longer first disconnects before its successor connects under the same name."""
        if self._group.rank:
            self.close()
        yield

    def finish(self) -> None:
        """Nothing to do: parameters are here, and the optimizer's state stays with the server."""

    def close(self) -> None:
        """Leave the server."""
        if self._client is not None:
            self._client.close()
            self._client = None

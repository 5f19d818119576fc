"""Training through a parameter server by workers that share a machine: one message for all of them.

The workers step together as in any run: the same tree, owners, transaction and recovery. Only the update is made
elsewhere. The owners lay their sums into the segment, the first worker sends them to the server as one contribution,
and puts the values that come back where everybody reads them. To the server they are one worker.

An update has the number of its step, whoever sends it. If the first worker dies when the server has the update, its
successor sends it again; the server knows it, and answers with what came of it. So the step is made once.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.core import points
from evenstep.core.config import RunConfig
from evenstep.core.errors import MismatchError, UnsupportedError
from evenstep.engine.clipping import Clipping
from evenstep.engine.compute import Samples, StepFunction
from evenstep.engine.prepared import News, PreparedOptimizer
from evenstep.engine.step import Engine, Outcome
from evenstep.exchange.journal import Entry
from evenstep.exchange.ledger import Ledger, Operation
from evenstep.run.through import PREFIX, Through, options_of
from evenstep.server.client import Client
from evenstep.transport.memory import aligned

__all__ = ["AggregatedEngine"]

_PATIENCE = 0.8  # of the timeout: who waits for the server gives up before the others give up waiting for him


class AggregatedEngine(Engine):
    """The engine of a worker that reaches the server through the first worker of its machine.

    Args:
        config: Of the run.
        ledger: Of the workers of this machine.
        through: Which server, and how.

    Raises:
        ConfigError: The server has another staleness.
        UnreachableError: Nobody is there.
    """

    has_optimizer = False

    def __init__(self, config: RunConfig, ledger: Ledger, through: Through) -> None:
        self._through = through
        self._client: Client | None = None
        self._first = self._sent = 0  # the number of the last update before ours, and how many of ours there were
        self._options: list[dict[str, Any]] = []
        self._sums: list[Tensor] = []
        self._samples = 0
        self.config = config
        if ledger.group.worker == 0 and not ledger.catching_up:  # who will be the first says at once what is wrong
            self._server()
        super().__init__(config, ledger)

    # ---- the server ----

    def _server(self) -> Client:
        """The connection; the first worker's."""
        if self._client is None:
            self._client = self._through.connect("worker-0", _PATIENCE * self.config.timeout_s)
        return self._client

    def _drop_client(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def recover(self) -> None:
        """See `Engine.recover`; who is not the first any more lets go of the server."""
        if self.group.rank:
            self._drop_client()
        super().recover()

    def prepare(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Take a model into the run; its values are the server's, or if it has none yet, are put there."""
        if self.models.slots.parameters or optimizer is None:
            raise UnsupportedError("a run through a server trains one model with one optimizer; prepare both, once")
        super().prepare(model, optimizer)
        (prepared,) = self.optimizers
        self._options = options_of(prepared)
        region = self.group.segment.memory.reserve(
            sum(aligned(p.numel() * p.element_size()) for p in prepared.parameters) + 64
        )
        self._sums = [region.tensor(p.shape, p.dtype) for p in prepared.parameters]

        def attempt() -> Entry:
            first = self._join() if self.group.rank == 0 else None
            return Entry("join the server", self.group.gather_json("join the server", first)[0])

        def adopt(entry: Entry, took_part: bool) -> None:
            self._first, self._sent = entry.value, 0
            self._pull()
            self._settled()

        self.ledger.perform(Operation("join the server", self.version), attempt, adopt)

    def _join(self) -> int:
        """Take over what the server has; return the number of the last update under our name."""
        client = self._server()
        state = {name.removeprefix(PREFIX): tensor for name, tensor in self._here().items()}
        if client.status()["owner"] is None:
            buffers = [name.removeprefix(PREFIX) for name in self.models.slots.buffers]
            client.put_parameters(state, buffers=buffers)
        theirs = client.get_parameters()
        here = {name: (tuple(t.shape), t.dtype) for name, t in state.items()}
        there = {name: (tuple(t.shape), t.dtype) for name, t in theirs.items()}
        for name in sorted(here.keys() | there.keys()):
            if here.get(name) != there.get(name):
                raise MismatchError(f"'{name}' is {there.get(name)} on the server but {here.get(name)} here")
        self._take_over(theirs)
        return client.sequence

    def _here(self) -> dict[str, Tensor]:
        return {
            name: self.state.entries[name].live for name in (*self.models.slots.parameters, *self.models.slots.buffers)
        }

    def _take_over(self, values: Mapping[str, Tensor]) -> None:
        """Put the server's values in place of ours, such that they can be taken back."""
        entries = [self.state.entries[PREFIX + name] for name in values]
        with torch.no_grad():
            self.state.save(entries)
            for entry in entries:
                entry.live.copy_(values[entry.name.removeprefix(PREFIX)])

    # ---- a step ----

    def step(
        self,
        samples: Samples,
        function: StepFunction,
        prepared: PreparedOptimizer,
        clipping: Clipping,
    ) -> Outcome:
        """See `Engine.step`."""
        self._samples = sum(samples.sizes)
        outcome = super().step(samples, function, prepared, clipping)
        self._sent, self._options = self._sent + 1, options_of(prepared)
        return outcome

    def _update(self, prepared: PreparedOptimizer, sums: dict[int, Tensor | None]) -> News:
        """Lay the sums into the segment; the first worker sends them, and puts in what comes back."""
        mine = [i for i, total in sums.items() if total is not None]
        with torch.no_grad():
            for i in mine:
                self._sums[i].copy_(sums[i])  # type: ignore[arg-type]  # looked above
        of_all = self.group.gather_json(f"step {self.version}: sums", mine)
        if self.group.rank == 0:
            self._send(prepared, sorted(i for theirs in of_all for i in theirs))
        prepared.stepped_elsewhere()
        return []

    def _send(self, prepared: PreparedOptimizer, present: list[int]) -> None:
        client = self._server()
        names = [name.removeprefix(PREFIX) for name in prepared.names]
        buffers = {name.removeprefix(PREFIX): t for name, t in self.models.kept_buffers.items()}
        more: dict[str, Any] = {"buffers": list(buffers), "sequence": self._first + self._sent + 1}
        head = ""
        if client.staleness == 0:
            head = f"0-{self.config.shards}/"
            more |= {"shards": self.config.shards, "spans": [[0, self.config.shards]], "base": client.version}
        else:
            more["samples"] = self._samples
        if (options := options_of(prepared)) != self._options:
            more["options"] = options
        update = {head + names[i]: self._sums[i] for i in present}
        reply = client.update({**update, **buffers}, timeout_s=_PATIENCE * self.config.timeout_s, **more)
        points.reach("inside update")
        self._take_over(client.get_parameters(names, min_version=reply["version"]))

    def edit(self, function: Callable[[], None], seed: int) -> None:
        """See `Engine.edit`; the server gets the result too."""

        def tell() -> None:
            function()
            for entry in (self.state.entries[name] for name in self._here()):
                entry.publish()
            client = self._server()
            values = {name.removeprefix(PREFIX): tensor for name, tensor in self._here().items()}
            client.put_parameters(values, force=True, sequence=self._first + self._sent + 1)
            client.get_parameters([])  # and so know its version

        super().edit(tell, seed)
        self._sent += 1

    def refusal(self, what: str) -> str | None:
        """See `Engine`."""
        if what not in ("load", "checkpoint"):
            return None
        return (
            f"run.{what} in a run with sync='server' would need the optimizer's state, which is the server's: it "
            "keeps and restores it by --directory, --snapshot-every and --durable"
        )

    def close(self) -> None:
        """Leave the server too."""
        super().close()
        self._drop_client()

"""Training through a parameter server: each worker is a group of its own, and meets the others only there.

A worker computes its share of the shards of every batch, as in any run. What happens then depends:

- synchronous (`staleness=0`): it sends the tree nodes that cover its shards. The server adds up all workers' nodes in
  the fixed tree, as an owner does in a run without a server, and steps: the parameters are equal to the bit.
- else: it sends the mean gradient over its own samples, and goes on with what the server has then.
- every so many batches or every epoch: it trains by itself with its own optimizer, and sends what that changed.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.core.config import RunConfig
from evenstep.core.errors import ConfigError, MismatchError, UnsupportedError
from evenstep.engine.compute import Samples, ShardResult, StepFunction, Work
from evenstep.engine.gradients import Gradients
from evenstep.engine.pair import Pair
from evenstep.engine.slots import spanning_layers
from evenstep.engine.step import Engine
from evenstep.exchange.group import Group
from evenstep.exchange.journal import Entry
from evenstep.exchange.ledger import Ledger
from evenstep.nn.features.layer import Partitioned
from evenstep.plan import tree
from evenstep.plan.placement import cut
from evenstep.server.client import Client, connect

__all__ = ["ServedEngine", "Through"]

_PREFIX = "model."  # what the run calls its first model; the server knows the bare names


@dataclass(frozen=True)
class Through:
    """Whether a run goes through a server, and how.

    Attributes:
        sync: "exchange" or "server".
        server: Its address.
        staleness: What the server was started with.
        update_every: Batches between two updates, or "epoch".
        token: For the server.
    """

    sync: str = "exchange"
    server: str | None = None
    staleness: int | None = 0
    update_every: int | str = 1
    token: str | None = None

    def check(self) -> None:
        """See that it makes sense.

        Raises:
            ConfigError: It does not.
        """
        if self.sync not in ("exchange", "server"):
            raise ConfigError(f"sync={self.sync!r}, expected 'exchange' or 'server'")
        if (self.sync == "server") != (self.server is not None):
            raise ConfigError('sync="server" and server="http://..." go together: say both, or neither')
        every = self.update_every
        if every != "epoch" and (not isinstance(every, int) or every < 1):
            raise ConfigError(f"update_every={every!r}, expected a number of batches above 0, or 'epoch'")
        if every != 1 and self.server is None:
            raise ConfigError(f'update_every={every!r} is for sync="server": without a server every batch is an update')


class NodeGradients(Gradients):
    """As `Gradients`, but what is left at the end are the tree nodes of this worker, to be added up elsewhere."""

    def __init__(self, group: Group, names: Sequence[str], like: Sequence[Tensor], num_shards: int) -> None:
        self._num_shards = num_shards
        super().__init__(group, names, like)

    def replan(self, spans: Sequence[tuple[int, int]]) -> None:
        """Take on the shards of this worker; there is only one here."""
        (span,) = spans
        super().replan([(0, self._num_shards)])
        self.cover = tree.cover(span, self._num_shards)
        self._nodes = [(0, n) for n in range(len(self.cover))]
        self._leaves = range(*span)
        self._merges = tree.merge_program(tuple((k, k + 1) for k in self._leaves), self._num_shards)
        self._completes = {end - 1: n for n, (_, end) in enumerate(self.cover)}
        self._num_nodes = len(self.cover)
        self._present = torch.zeros(max(len(self._nodes), 1), len(self._like), dtype=torch.uint8).numpy()

    def _reduce_what_is_ready(self) -> None:
        """Nothing is reduced here."""

    def nodes(self) -> list[tuple[tuple[int, int], dict[int, Tensor]]]:
        """The sums over each tree node, by parameter, where there is a gradient."""
        found = []
        for n, span in enumerate(self.cover):
            held = {i: tensor for i, stack in enumerate(self._stacks) if (tensor := stack[n]) is not None}
            found.append((span, held))
        return found


class ServedEngine(Engine):
    """The engine of a worker that trains through a server.

    Args:
        config: Of the run.
        ledger: Of a group of one.
        through: Which server, and how.
        worker: The number of this worker.
        num_workers: How many there are.

    Raises:
        ConfigError: The server has another staleness.
        UnreachableError: Nobody is there.
    """

    def __init__(self, config: RunConfig, ledger: Ledger, through: Through, worker: int, num_workers: int) -> None:
        self._hyperparameters: dict[int, list[dict[str, Any]]] = {}  # as they were at the first step
        assert through.server is not None, "the caller has looked"
        self._through, self._worker, self._num_workers = through, worker, num_workers
        self._local = through.update_every != 1
        self._own = cut(config.shards, num_workers)[worker]
        self._since: dict[str, Tensor] = {}  # what the server had when this worker began to train by itself
        self._steps = 0
        self._timeout_s = config.timeout_s
        try:
            self.client = self._connect(through.server)
        except BaseException:
            ledger.group.close()
            raise
        super().__init__(config, ledger)

    def _connect(self, url: str) -> Client:
        through = self._through
        client = connect(url, worker=f"worker-{self._worker}", token=through.token, timeout_s=self._timeout_s)
        if client.staleness != through.staleness:
            client.close()
            raise ConfigError(
                f"the server at {through.server} has staleness {client.staleness} but the script says "
                f"Run(staleness={through.staleness}); it decides what the arithmetic is, so both must say the same"
            )
        return client

    def _replan(self, spans: list[tuple[int, int]] | None = None) -> None:
        super()._replan([self._own])

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Everything is evaluated here: the others are not there to help."""
        before = self.spans, self.mine
        self.spans = self.compute.spans = [(0, self.config.shards)]
        self.mine = range(self.config.shards)
        try:
            yield
        finally:
            self.spans, self.mine = before
            self.compute.spans = self.spans

    def prepare(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Take a model into the run; its values are the server's, which worker 0 puts there if it has none yet."""
        if self.models.slots.parameters:
            raise UnsupportedError(
                "a run through a server trains one model with one optimizer; prepare was called twice"
            )
        spanning = [type(layer) for layer in spanning_layers(list(model.modules()))]
        if spanning and self._num_workers > 1:
            what, remedy = "batch norm", "run.prepare(..., sync_batchnorm=False)"
            if Partitioned in spanning:
                what, remedy = "a layer that is partitioned by features", "leave layers whole"
            raise UnsupportedError(
                f"{what} spans the shards of all workers, but through a server they share gradients only: {remedy}, "
                "or train without a server"
            )
        super().prepare(model, optimizer)
        for pair in self.pairs:
            if not self._local:
                pair.gradients = NodeGradients(self.group, pair.names, pair.parameters, self.config.shards)
                pair.gradients.replan([self._own])
        self._join()

    def _join(self) -> None:
        state = {name.removeprefix(_PREFIX): tensor for name, tensor in self.state.tensors().items()}
        state = {name: tensor for name, tensor in state.items() if not name.startswith("optimizer")}
        if self._worker == 0 and self.client.status()["owner"] is None:
            buffers = [name.removeprefix(_PREFIX) for name in self.models.slots.buffers]
            self.client.put_parameters(state, buffers=buffers)
        theirs = self.client.get_parameters()
        here = {name: (tuple(t.shape), t.dtype) for name, t in state.items()}
        there = {name: (tuple(t.shape), t.dtype) for name, t in theirs.items()}
        for name in sorted(here.keys() | there.keys()):
            if here.get(name) != there.get(name):
                raise MismatchError(f"'{name}' is {there.get(name)} on the server but {here.get(name)} here")
        self._take_over(theirs)
        self._settled()

    def _take_over(self, values: dict[str, Tensor]) -> None:
        """Put the server's values in place of ours."""
        entries = [self.state.entries[_PREFIX + name] for name in values]
        with torch.no_grad():
            self.state.save(entries)
            for entry in entries:
                entry.live.copy_(values[entry.name.removeprefix(_PREFIX)])
            self._pull()
        if self._local:
            self._since = {name: tensor.clone() for name, tensor in values.items()}

    def _try(
        self,
        kind: str,
        samples: Samples,
        function: StepFunction,
        pair: Pair,
        clip_norm: float | None,
        clip_value: float | None,
    ) -> Entry:
        sizes = list(samples.sizes)
        if self._local or self.client.staleness != 0:  # a mean over this worker's samples
            sizes = [size if k in self.mine else 0 for k, size in enumerate(sizes)]
        if self._local:
            mine = _Some(samples, sizes)
            return super()._try(kind, mine, function, pair, clip_norm, clip_value)
        if clip_norm is not None or clip_value is not None:
            raise UnsupportedError("gradients are added up on the server, so they cannot be clipped here")
        if pair.hyperparameters() != self._hyperparameters.setdefault(id(pair), pair.hyperparameters()):
            raise UnsupportedError(
                "the options of the optimizer were changed (by a scheduler?), but the server steps with its own; leave "
                "them as they were, or train with update_every=n, where each worker steps by itself"
            )
        parts = {k: samples.part(k) for k in self.mine if sizes[k]}
        work = Work(self.version, parts, sizes, samples.name, function, pair)
        pair.gradients.begin(1 + self.group.exchanges, [0], list(parts))
        results = self.compute.run(work) if parts else {}
        pair.gradients.end_backward()
        notes = self._send(work, results)
        loss, metrics = _means(notes, sizes)
        return Entry(kind, [loss, metrics, None, []])

    def _send(self, work: Work, results: dict[int, ShardResult]) -> list[Any]:
        """Send the gradients, and take over what the server makes of them."""
        gradients = work.pair.gradients
        assert isinstance(gradients, NodeGradients), "prepare has put it there"
        names = [name.removeprefix(_PREFIX) for name in work.pair.names]
        note = {"batch": [work.samples, list(work.sizes)], "results": {k: _pack(r) for k, r in results.items()}}
        buffers = {name.removeprefix(_PREFIX): t for name, t in self.models.take_buffers().items()}
        more: dict[str, Any] = {"note": note, "buffers": list(buffers)}
        update: dict[str, Tensor] = dict(buffers)
        nodes = gradients.nodes()
        if self.client.staleness == 0:
            more |= {
                "shards": self.config.shards,
                "spans": [list(span) for span, _ in nodes],
                "base": self.client.version,
            }
            for (first, end), held in nodes:
                update |= {f"{first}-{end}/{names[i]}": tensor for i, tensor in held.items()}
        else:
            update |= {names[i]: total for i, total in _added(nodes).items()}
            more["samples"] = sum(work.sizes)
        reply = self.client.update(update, timeout_s=self.config.timeout_s, **more)
        notes: list[Any] = reply["notes"]
        if any(other["batch"] != note["batch"] for other in notes):
            raise MismatchError(f"workers sent updates of different batches at version {work.version}: {notes}"[:1000])
        self._take_over(self.client.get_parameters(min_version=reply["version"]))
        return notes

    def adopted(self) -> None:
        """A step is committed: send what this worker has changed by itself, if it is time."""
        self._steps += 1
        if isinstance(self._through.update_every, int) and self._steps % self._through.update_every == 0:
            self._send_changes()

    def end_of_epoch(self) -> None:
        """As above, at the end of an epoch."""
        if self._through.update_every == "epoch":
            self._send_changes()

    def _send_changes(self) -> None:
        names = [name.removeprefix(_PREFIX) for name in self.models.slots.parameters]
        now = {name: self.state.entries[_PREFIX + name].live for name in names}
        changes = {name: self._since[name] - now[name] for name in names if self._is_trained(name)}
        buffers = {}
        if 0 in self.mine:
            buffers = {n.removeprefix(_PREFIX): self.state.entries[n].live for n in self.models.slots.buffers}
        version = self.client.update_parameters({**changes, **buffers}, kind="delta", buffers=list(buffers))
        self._take_over(self.client.get_parameters(min_version=version))
        self.models.remember_versions()

    def _is_trained(self, name: str) -> bool:
        return self.models.slots.parameters[_PREFIX + name].requires_grad

    def step(
        self,
        samples: Samples,
        function: StepFunction,
        pair: Pair,
        clip_norm: float | None = None,
        clip_value: float | None = None,
    ) -> Any:
        """See `Engine.step`; the other workers meet this one at the server only."""
        outcome = super().step(samples, function, pair, clip_norm, clip_value)
        if self._local:
            self.adopted()
        return outcome

    def _keep_pace(self) -> None:
        """A worker keeps its shards."""

    def close(self) -> None:
        """Leave the server too."""
        super().close()
        self.client.close()


@dataclass(frozen=True)
class _Some:
    """A batch of which only some shards count."""

    whole: Samples
    sizes: Sequence[int]

    @property
    def name(self) -> str:
        return self.whole.name

    def part(self, shard: int) -> Any:
        return self.whole.part(shard)


def _added(nodes: Sequence[tuple[tuple[int, int], dict[int, Tensor]]]) -> dict[int, Tensor]:
    """The sum over the nodes of one worker, from left to right."""
    total: dict[int, Tensor] = {}
    for _, held in nodes:
        for i, tensor in held.items():
            total[i] = total[i].add_(tensor) if i in total else tensor
    return total


def _pack(result: ShardResult) -> list[Any]:
    """As JSON, to the bit, whatever the numbers are."""
    return [result.loss.hex(), {name: value.hex() for name, value in result.metrics.items()}]


def _means(notes: Sequence[Any], sizes: Sequence[int]) -> tuple[float, dict[str, float]]:
    """Loss and metrics over all samples that took part, in tree order."""
    found = {int(k): value for note in notes for k, value in note["results"].items()}

    def mean(values: dict[int, str]) -> float:
        leaves = [float.fromhex(values[k]) if k in values else 0.0 for k in range(len(sizes))]
        return tree.reduce(leaves, lambda a, b: a + b) / sum(sizes)

    names = sorted({name for _, metrics in found.values() for name in metrics})
    for k, (_, metrics) in found.items():
        if sorted(metrics) != names:
            raise ConfigError(f"the step function gave metrics {sorted(metrics)} in shard {k} but {names} in others")
    loss = mean({k: value[0] for k, value in found.items()})
    return loss, {name: mean({k: value[1][name] for k, value in found.items()}) for name in names}

"""Training through a parameter server: each worker is a group of its own, and meets the others only there.

A worker computes its share of the shards of every batch, as in any run. What happens then depends:

- synchronous (`staleness=0`): it sends the tree nodes that cover its shards. The server adds up all workers' nodes in
  the fixed tree, as an owner does in a run without a server, and steps: the parameters are equal to the bit.
- else: it sends the mean gradient over its own samples, and goes on with what the server has then.
- every so many batches or every epoch: it trains by itself with its own optimizer, and sends what that changed.

A worker that died and is started again by the launcher runs its script from the beginning. Asynchronously, the updates
that its earlier life has sent are left out: it goes on with the batch after them, from the server's parameters. A
synchronous update needs what died with the worker, so the run ends with a sentence (`aggregated.py` has none of this).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.core.config import RunConfig
from evenstep.core.env import Environment
from evenstep.core.errors import MismatchError, UnsupportedError
from evenstep.core.events import send
from evenstep.engine.clipping import Clipping
from evenstep.engine.compute import Samples, StepFunction, Work
from evenstep.engine.delivery import Delivery
from evenstep.engine.prepared import PreparedOptimizer
from evenstep.engine.results import ShardResult, merge
from evenstep.engine.slots import spanning_layers
from evenstep.engine.step import Engine
from evenstep.exchange.journal import Entry
from evenstep.exchange.ledger import Ledger
from evenstep.nn.features.layer import Partitioned
from evenstep.plan.placement import cut
from evenstep.plan.summing import Span, Summing
from evenstep.run.through import PREFIX, Through, options_of

__all__ = ["ServedEngine"]

_sent_before: dict[str, int] = {}  # what earlier lives of this process's workers have sent, by name


class ServedEngine(Engine):
    """The engine of a worker that trains through a server.

    Args:
        config: Of the run.
        ledger: Of a group of one.
        through: Which server, and how.
        env: Which worker this is, of how many.

    Raises:
        ConfigError: The server has another staleness.
        UnreachableError: Nobody is there.
        UnsupportedError: This worker was started again, and synchronous updates need what it had.
    """

    has_optimizer = False

    def __init__(self, config: RunConfig, ledger: Ledger, through: Through, env: Environment) -> None:
        self._options: list[dict[str, Any]] = []  # as the server knows them
        worker, num_workers = env.worker, env.num_workers
        self._through, self._worker, self._num_workers = through, worker, num_workers
        self._local = through.update_every != 1
        self._own = cut(config.shards, num_workers)[worker]
        self._since: dict[str, Tensor] = {}  # what the server had when this worker began to train by itself
        self._steps = 0
        self._last: list[Any] = [0.0, {}]  # the results of the last step, or of the last that an earlier life has sent
        try:
            self.client = through.connect(_name(env), config.timeout_s)
            self._left_out = self._look_back(env)
        except BaseException:
            ledger.group.close()
            raise
        super().__init__(config, ledger)

    def _look_back(self, env: Environment) -> int:
        """How many updates an earlier life of this worker has sent, which the script will come to again."""
        if env.job is None or env.events_fd is None:  # nobody starts it again
            return 0
        before = _sent_before.setdefault(self.client.worker, self.client.sequence)
        if before and self._through.staleness == 0:
            self.client.close()
            send(env.events_fd, {"final": True})
            raise UnsupportedError(
                f"worker {env.worker} died after {before} updates and was started again, but synchronous updates need "
                "what it had; start the run again, or use aggregate=True, where it would have been replaced"
            )
        if before:
            reply = self.client.last_update()
            self._last = reply["notes"][0]["last"]
            said = f"worker {env.worker} is back: the {before} updates that it has sent are left out"
            send(env.events_fd, {"says": said})
        return before

    def _replan(self, spans: list[tuple[int, int]] | None = None) -> None:
        super()._replan([self._own])

    def _lay_out(self, prepared: PreparedOptimizer, _: Sequence[Span]) -> tuple[Summing, Delivery]:
        return prepared.alone(self._own, self.config.shards, add=self._local or self.client.staleness != 0)

    @property
    def weighs(self) -> bool:  # type: ignore[override]  # decided for each run here
        """Whether losses can be weighted by something else than rows."""
        return self._local

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Everything is evaluated here: the others are not there to help."""
        before = self.spans, self.mine
        self.spans = self.context.spans = [(0, self.config.shards)]
        self.mine = range(self.config.shards)
        try:
            yield
        finally:
            self.spans, self.mine = before
            self.context.spans = self.spans

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
        for prepared in self.optimizers:
            self._options = options_of(prepared)
            prepared.lay_out = partial(self._lay_out, prepared)
            prepared.replan([self._own])
        self._join()

    def _join(self) -> None:
        state = {name.removeprefix(PREFIX): tensor for name, tensor in self.state.tensors().items()}
        state = {name: tensor for name, tensor in state.items() if not name.startswith("optimizer")}
        if self._worker == 0 and self.client.status()["owner"] is None:
            buffers = [name.removeprefix(PREFIX) for name in self.models.slots.buffers]
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
        entries = [self.state.entries[PREFIX + name] for name in values]
        with torch.no_grad():
            self.state.save(entries)
            for entry in entries:
                entry.live.copy_(values[entry.name.removeprefix(PREFIX)])
            self._pull()
        if self._local:
            self._since = {name: tensor.clone() for name, tensor in values.items()}

    def _try(
        self,
        kind: str,
        samples: Samples,
        function: StepFunction,
        prepared: PreparedOptimizer,
        clipping: Clipping,
    ) -> Entry:
        sizes = list(samples.sizes)
        if self._local or self.client.staleness != 0:  # a mean over this worker's samples
            sizes = [size if k in self.mine else 0 for k, size in enumerate(sizes)]
        if self._left_out or (self._local and not any(sizes)):
            return Entry(kind, [*self._last, None, [], {}])
        if self._local:
            mine = _Some(samples, sizes)
            return super()._try(kind, mine, function, prepared, clipping)
        if clipping:
            raise UnsupportedError(
                "gradients are added up on the server, so they cannot be clipped here; with aggregate=True they can"
            )
        parts = {k: samples.part(k) for k in self.mine if sizes[k]}
        work = Work(self.version, parts, sizes, samples.name, function, prepared, clipping)
        prepared.gradients.begin(1 + self.group.exchanges, [0], list(parts))
        results = self.compute.run(work)() if parts else {}
        self._check_weights(any(result.weighted for result in results.values()))
        prepared.gradients.end_backward()
        notes = self._send(work, results)
        prepared.stepped_elsewhere()
        outcome = list(_means(notes, sizes)) if any(sizes) else self._last  # it may have no sample of a short batch
        return Entry(kind, [*outcome, None, [], {}])

    def _send(self, work: Work, results: dict[int, ShardResult]) -> list[Any]:
        """Send the gradients, and take over what the server makes of them."""
        names = [name.removeprefix(PREFIX) for name in work.prepared.names]
        packed = {k: r.pack() for k, r in results.items()}
        note: dict[str, Any] = {"batch": [work.samples, list(work.sizes)], "results": packed}
        if self.client.staleness != 0:
            note["last"] = list(_means([note], work.sizes)) if packed else self._last
        buffers = {name.removeprefix(PREFIX): t for name, t in self.models.take_buffers().items()}
        more: dict[str, Any] = {"note": note, "buffers": list(buffers)}
        update: dict[str, Tensor] = dict(buffers)
        if self.client.staleness == 0:
            nodes = work.prepared.gradients.nodes()
            more |= {
                "shards": self.config.shards,
                "spans": [list(span) for span, _ in nodes],
                "base": self.client.version,
            }
            for (first, end), held in nodes:
                update |= {f"{first}-{end}/{names[i]}": tensor for i, tensor in held.items()}
        else:
            sums = work.prepared.gradients.finish()
            update |= {names[i]: total for i, total in sums.items() if total is not None}
            more["samples"] = sum(work.sizes)
        if (options := options_of(work.prepared)) != self._options:
            more["options"] = options
        reply = self.client.update(update, timeout_s=self.config.timeout_s, **more)
        self._options = options
        notes: list[Any] = reply["notes"]
        if any(other["batch"] != note["batch"] for other in notes):
            raise MismatchError(f"workers sent updates of different batches at version {work.version}: {notes}"[:1000])
        self._take_over(self.client.get_parameters(min_version=reply["version"]))
        return notes

    def adopted(self) -> None:
        """A step is committed: send what this worker has changed by itself, if it is time."""
        self._steps += 1
        if isinstance(self._through.update_every, int) and self._steps % self._through.update_every == 0:
            self._updated()

    def end_of_epoch(self) -> None:
        """As above, at the end of an epoch."""
        if self._through.update_every == "epoch":
            self._updated()

    def _updated(self) -> None:
        """The time of an update has come: it is sent, or was by an earlier life."""
        if self._left_out:
            self._left_out -= 1
            _sent_before[self.client.worker] -= 1
        elif self._local:
            self._send_changes()

    def _send_changes(self) -> None:
        names = [name.removeprefix(PREFIX) for name in self.models.slots.parameters]
        now = {name: self.state.entries[PREFIX + name].live for name in names}
        changes = {name: self._since[name] - now[name] for name in names if self._is_trained(name)}
        buffers = {}
        if 0 in self.mine:
            buffers = {n.removeprefix(PREFIX): self.state.entries[n].live for n in self.models.slots.buffers}
        note = {"last": self._last}
        version = self.client.update_parameters({**changes, **buffers}, kind="delta", buffers=list(buffers), note=note)
        self._take_over(self.client.get_parameters(min_version=version))
        self.models.remember_versions()

    def _is_trained(self, name: str) -> bool:
        return self.models.slots.parameters[PREFIX + name].requires_grad

    def step(
        self,
        samples: Samples,
        function: StepFunction,
        prepared: PreparedOptimizer,
        clipping: Clipping,
    ) -> Any:
        """See `Engine.step`; the other workers meet this one at the server only."""
        outcome = super().step(samples, function, prepared, clipping)
        self._last = [float(outcome.loss), outcome.metrics]
        self.adopted()
        return outcome

    def tensors(self) -> dict[str, Tensor]:
        """See `Engine.tensors`: what the server has now."""
        return {PREFIX + name: value for name, value in self.client.get_parameters().items()}

    def _keep_pace(self) -> None:
        """A worker keeps its shards."""

    def refusal(self, what: str) -> str | None:
        """See `Engine`."""
        return (
            f"run.{what} in a run with sync='server' would see this worker only: the parameters are the server's, "
            "which keeps them by --snapshot-every or --durable; use sync='exchange' for it"
        )

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

    def contents(self) -> dict[str, str]:
        return self.whole.contents()


def _name(env: Environment) -> str:
    """What this worker calls itself: alike for all its lives in one job, and in no other job."""
    return f"worker-{env.worker}" if env.job is None else f"worker-{env.worker}.{env.job}"


def _means(notes: Sequence[Any], sizes: Sequence[int]) -> tuple[float, dict[str, float]]:
    """Loss and metrics over all samples that took part, in tree order."""
    found = merge({int(k): ShardResult.unpack(v) for note in notes for k, v in note["results"].items()}, sizes)
    return found.loss, found.metrics

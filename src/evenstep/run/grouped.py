"""The engine of a worker in a group that shares its parameters with other groups through servers.

Inside of the group everything is as in any run: shards, the fixed tree, owners, the step as a transaction. Only the
update is made elsewhere. A *part* of the parameters (a layer) has one owner in the group and one server:

1. While backward still runs, an owner sends the sum of a part as soon as it is complete (`courier.py`).
2. The step is committed when the servers have all its updates. An update carries (group, part, step), so one that is
   sent again after somebody died counts once.
3. New values come in while the next step has begun; a layer waits for its own part only (`arrivals.py`).

Without a lock (hogwild) the group makes the update itself, and when it is committed subtracts what changed from the
parameters in the server's memory.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.core.config import RunConfig
from evenstep.core.errors import ConfigError, Stopped, UnsupportedError
from evenstep.engine.clipping import Clipping
from evenstep.engine.compute import Samples, StepFunction
from evenstep.engine.prepared import News, PreparedOptimizer
from evenstep.engine.step import Engine, Outcome
from evenstep.exchange.journal import Entry
from evenstep.exchange.ledger import Ledger, Operation
from evenstep.plan.groups import Standing, parts_of
from evenstep.run.arrivals import Arrivals, Awaited
from evenstep.run.courier import Courier, Line
from evenstep.run.servers import Servers
from evenstep.run.through import options_of
from evenstep.server.recipes import Recipe, describe

__all__ = ["GroupedEngine"]

_with_servers: WeakSet[Ledger] = WeakSet()  # where a run of this process has put its parameters on the job's servers


class GroupedEngine(Engine):
    """The engine of a worker in one of several groups, or in one group with servers.

    Args:
        config: Of the run.
        ledger: Of the group.
        standing: Where the group stands.
    """

    has_optimizer = False

    def __init__(self, config: RunConfig, ledger: Ledger, standing: Standing) -> None:
        self.standing = standing
        self._servers: Servers | None = None
        self._courier: Courier | None = None
        self._model: nn.Module | None = None
        self._hooks: list[Any] = []
        self._sent: set[int] = set()
        self._options: list[dict[str, Any]] = []
        super().__init__(config, ledger)
        self.context.number_of = lambda version: version * standing.groups + standing.group

    @property
    def weighs(self) -> bool:  # type: ignore[override]  # decided for each step here
        """Whether losses can be weighted by something else than rows: not if sums leave during backward."""
        return self._gradients.reduced is None

    # ---- prepare ----

    def prepare(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Take a model into the run; its values are those of the first group."""
        if self._model is not None or optimizer is None:
            raise UnsupportedError(
                "a run with servers trains one model with one optimizer; pass both to one run.prepare"
            )
        if self.ledger in _with_servers:
            raise UnsupportedError(
                "the servers of a job hold one model, and an earlier run of this script has put its own"
            )
        _with_servers.add(self.ledger)
        self._model = model
        Awaited.hang(model)
        super().prepare(model, optimizer)
        (prepared,) = self.optimizers
        names = {id(p): name for name, p in self.models.slots.parameters.items()}
        recipe = describe(optimizer, names) if self.standing.lock else None
        self._lay_out(model, prepared)
        self._join(recipe)

    def _lay_out(self, model: nn.Module, prepared: PreparedOptimizer) -> None:
        """Cut the model into parts."""
        slots, entries = self.models.slots, self.state.entries
        layers: dict[str, list[str]] = {}
        for name in slots.parameters:
            layers.setdefault(name.rpartition(".")[0], []).append(name)
        sizes = [sum(entries[name].live.nbytes for name in held) for held in layers.values()]
        mine = self.standing.servers[self.standing.server_group]
        ranges, servers = parts_of(sizes, len(mine))
        if len(set(servers)) < len(mine):
            raise ConfigError(
                f"{len(mine)} servers in a group but the model has only {len(ranges)} layers with parameters: every "
                f"server needs one; use at most --servers-per-group {len(ranges)}"
            )
        held = list(layers.values())
        parts = [[name for k in part for name in held[k]] for part in ranges]
        part_of = {name: part for part, of_part in enumerate(parts) for name in of_part}
        self._servers = Servers(
            self.standing, parts, servers, list(slots.buffers), self.config.timeout_s, self._stop_if_asked
        )
        index = {name: i for i, name in enumerate(prepared.names)}  # what the optimizer does not train never changes
        changing = [[entries[name] for name in part if name in index] for part in parts]
        self._arrivals = Arrivals(self.group, changing, self._check)
        trained = [[index[name] for name in reversed(part) if name in index] for part in parts]
        self._trained = trained
        self._filled = [part for part in reversed(range(len(trained))) if trained[part]]  # as backward reaches them
        self._trained_by = {i: part for part, held in enumerate(trained) for i in held}
        prepared.lay_out = lambda spans: prepared.in_tree(spans, [trained[part] for part in self._filled])
        prepared.replan(self.spans)
        self._gradients = prepared.gradients
        self._gradients.expects = self._expect
        line = Line(self._send_part, self._servers.fetch, self._arrivals.write, self._servers.close)
        self._courier = Courier(line, self.config.timeout_s)
        self._hang(model, part_of)

    def _expect(self, i: int) -> None:
        """A gradient has come: its part must have been waited for."""
        if not self._arrivals.has(self._trained_by[i]):
            raise UnsupportedError(
                f"the step function used parameter '{self.optimizers[0].names[i]}' through a reference kept outside of "
                "the model: nobody has waited for its values; take it from the module, as in model.layer.weight"
            )

    @property
    def _owned_parts(self) -> list[int]:
        """The parts that this worker owns, in the order in which backward reaches them."""
        return [self._filled[bucket] for bucket in self._gradients.plan.owned_buckets]

    def _hang(self, model: nn.Module, part_of: dict[str, int]) -> None:
        names = {id(p): name for name, p in self.models.slots.parameters.items()}
        for module in model.modules():
            place = module._parameters
            if isinstance(place, Awaited):
                place.part_of = {key: part_of[names[id(p)]] for key, p in place.items() if p is not None}
                place.need = self._arrivals.need
            if isinstance(module, nn.RNNBase):  # it keeps its weights in a list too
                self._hooks.append(module.register_forward_pre_hook(_take_all))

    def _check(self) -> None:
        if self._courier is not None:
            self._courier.check()

    def _stop_if_asked(self) -> None:
        """A group that waits for others is between steps: others that stop would be waited for in vain."""
        self.group.check()
        _, _, stop = self.group.board.asked()
        if stop:
            self.group.tell({"stopped": {"step": self.version, "checkpoint": None}})
            raise Stopped

    def _join(self, recipe: Recipe | None) -> None:
        """Everyone begins with the values that the first group puts on all servers."""
        servers = self._at_servers()

        def attempt() -> Entry:
            if self.group.rank == 0:
                if self.standing.group == 0:
                    servers.put(self.state.tensors(), recipe)
                servers.compare_models(self.state.tensors())
                self._take_over(servers.everything(self.standing.server_group))
            self.group.barrier("joined the servers")
            return Entry("join the servers")

        def adopt(_: Entry, took_part: bool) -> None:
            self._pull()
            self._settled()

        self.ledger.perform(Operation("join the servers", self.version), attempt, adopt)

    def _at_servers(self) -> Servers:
        assert self._servers is not None, "prepare has made them"
        return self._servers

    def _take_over(self, values: Mapping[str, Tensor]) -> None:
        entries = [self.state.entries[name] for name in values]
        with torch.no_grad():
            self.state.save(entries)
            for entry in entries:
                entry.live.copy_(values[entry.name])

    # ---- a step ----

    def step(
        self,
        samples: Samples,
        function: StepFunction,
        prepared: PreparedOptimizer,
        clipping: Clipping,
    ) -> Outcome:
        """See `Engine.step`; other groups do theirs meanwhile."""
        courier = self._courier
        assert courier is not None, "a step has an optimizer, so something was prepared"
        early = self.standing.lock and not clipping  # a norm needs all gradients first
        self._gradients.reduced = self._on_reduced if early else None
        self._options = options_of(prepared)
        outcome = super().step(samples, function, prepared, clipping)
        self._arrivals.version = self.version
        if self.ledger.took_part:
            if not self.standing.lock:
                self._hand_over_changes()
            courier.commit(self.version)
        return outcome

    def refusal(self, what: str) -> str | None:
        """See `Engine`."""
        return f"run.{what} would see this group only, for the parameters are the servers'; run without --servers"

    def begin(self, operation: int) -> None:
        """See `Engine.begin`."""
        super().begin(operation)
        self._sent = set()

    def _on_reduced(self, bucket: int, sums: Mapping[int, Tensor | None]) -> None:
        self._hand_over(self._filled[bucket], sums)

    def _hand_over(self, part: int, sums: Mapping[int, Tensor | None]) -> None:
        """Give the update of a part to the courier."""
        assert self._courier is not None, "as above"
        self._sent.add(part)
        prepared = self.optimizers[0]
        found = {prepared.names[i]: total for i in self._trained[part] if (total := sums[i]) is not None}
        self._arrivals.watch("sends", part)
        if found or self.standing.staleness is not None:
            self._courier.send(part, self.version, found)
        else:
            self._courier.fetch(part, self.version + 1)

    def _send_part(self, part: int, version: int, update: Mapping[str, Tensor]) -> None:
        """In the courier's thread."""
        options = self._options if self.standing.lock else None
        self._at_servers().send(part, version, update, options)

    def _update(self, prepared: PreparedOptimizer, sums: dict[int, Tensor | None]) -> News:
        assert self._courier is not None, "as above"
        self._arrivals.all()  # what this step did not use: from now on there is one version under way, not two
        if not self.standing.lock:
            return super()._update(prepared, sums)
        for part in self._owned_parts:
            if part not in self._sent:
                self._hand_over(part, sums)
        self._courier.wait_sent()
        prepared.stepped_elsewhere()
        return []

    def _hand_over_changes(self) -> None:
        """What the step, which is committed, has changed of this worker's own parts."""
        assert self._courier is not None, "as above"
        for part in self._owned_parts:
            entries = [self.state.entries[self.optimizers[0].names[i]] for i in self._trained[part]]
            changes = {e.name: change for e in entries if (change := self.state.change_of(e)) is not None}
            self._courier.send(part, self.version - 1, changes)

    def abandon(self) -> None:
        """See `Engine.abandon`."""
        if self._courier is not None:
            self._courier.drop()
        super().abandon()

    def recover(self) -> None:
        """See `Engine.recover`; what a worker that is gone did not put in place, its successor fetches again."""
        if self._courier is not None:
            self._courier.finish()
        super().recover()
        if self._courier is not None:
            self._arrivals.forget()
            for part in self._owned_parts:
                if self._arrivals.version_of(part) < self.version:
                    self._courier.fetch(part, self.version)

    def collect(self) -> None:
        """See `Engine.collect`."""
        if self._courier is not None:
            self._arrivals.all()

    # ---- all groups ----

    def level(self, tag: str) -> None:
        """See `Engine.level`: wait for all groups, and take over what is on the first server group then."""
        if self._courier is None:
            return
        self.collect()
        if self.standing.groups == 1:
            return
        servers = self._at_servers()
        self._step_aside()
        if self.group.rank == 0:
            servers.meet(f"{tag}: all are here")
            servers.flush()
            if self.standing.group == 0:
                servers.put_buffers({name: self.state.entries[name].live for name in self.models.slots.buffers})
            servers.meet(f"{tag}: all is told")
            self._take_over(servers.everything(0))
        self.group.barrier(f"{tag}: one model")
        self._arrivals.forget()
        self._pull()
        self._settled()

    def _step_aside(self) -> None:
        """Be counted no more until the next update: who waits for all groups must hold back none of them."""
        if self.standing.staleness is not None:
            self._at_servers().close()

    def merge(self, tag: str, means: dict[str, float], num_samples: int) -> dict[str, float]:
        """See `Engine.merge`."""
        if self._courier is None or self.standing.groups == 1:
            return means
        self.collect()
        self._step_aside()
        found: dict[str, float] = {}
        if self.group.rank == 0:
            mine = [num_samples, {name: value.hex() for name, value in means.items()}]
            found = _merge(list(self._at_servers().meet(f"{tag}: merged", mine).values()))
        shared: dict[str, float] = self.group.gather_json(f"{tag}: merged", found)[0]
        return shared

    def conclude(self) -> None:
        """See `Engine.conclude`: the last values, and what the servers' optimizers keep."""
        if self._courier is None:
            return
        (prepared,) = self.optimizers

        def attempt() -> Entry:
            self.level("the end")
            news: News = []
            if self.standing.lock:
                tensors, values = self._at_servers().optimizer_state() if self.group.rank == 0 else ({}, {})
                news = self.group.gather_json("optimizer state", prepared.news_of(tensors, values))[0]
                prepared.settle(news, set())
                self._take_over(tensors)
                self.group.barrier("optimizer state is here")
            return Entry("the groups end", news)

        def adopt(entry: Entry, took_part: bool) -> None:
            prepared.adopt(entry.value, took_part)
            self._pull()
            self._settled()

        self.ledger.perform(Operation("the groups end", self.version), attempt, adopt)

    def close(self) -> None:
        """Leave the servers too."""
        if self._courier is not None:
            self._courier.close()
        if self._servers is not None:
            self._servers.leave()
        for hook in self._hooks:
            hook.remove()
        if self._model is not None:
            Awaited.take_down(self._model)
        super().close()


def _take_all(module: nn.Module, _: Any) -> None:
    """Wait for all parameters of a module."""
    module._parameters.values()


def _merge(reports: Sequence[Any]) -> dict[str, float]:
    """Means over all samples, of [number of samples, {name: mean}] of every group that has any.

    Raises:
        ConfigError: Groups report different metrics.
    """
    there = [(count, means) for count, means in reports if count]
    names = sorted(set(chain.from_iterable(means for _, means in there)))
    if any(sorted(means) != names for _, means in there):
        raise ConfigError(f"groups give different metrics: {[sorted(means) for _, means in there]}; expected the same")
    total = sum(count for count, _ in there)
    return {name: sum(count * float.fromhex(means[name]) for count, means in there) / total for name in names}

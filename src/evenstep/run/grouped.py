"""The updates of a group that shares its parameters with other groups through servers.

Inside the group everything is as in any run: shards, the fixed tree, owners, the step as a transaction. Only the
update is made elsewhere. A *bundle* of the parameters (a layer) has one owner in the group and one server:

1. While backward still runs, an owner sends the sum of a bundle as soon as it is complete (`courier.py`).
2. The step is committed when the servers have all its updates. An update carries (group, bundle, step), so one that is
   sent again after a worker died counts once.
3. New values arrive while the next step has begun; a layer waits only for its own bundle (`arrivals.py`).

Without a lock (hogwild) the group makes the update itself, and when it is committed subtracts what changed from the
parameters in the server's memory.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

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
from evenstep.engine.updates import Feature, share_among
from evenstep.exchange.journal import Entry
from evenstep.exchange.ledger import Ledger, Operation
from evenstep.plan.groups import Standing
from evenstep.plan.summing import Span, Summing
from evenstep.run.arrivals import Arrivals, Awaited
from evenstep.run.bundles import Bundles
from evenstep.run.courier import Courier, Line
from evenstep.run.groups import Groups
from evenstep.run.refusals import WITH_SERVERS, refuse
from evenstep.run.server import options_for_server
from evenstep.run.servers import Servers
from evenstep.server.wire.recipes import describe

__all__ = ["GroupedUpdates"]

_with_servers: WeakSet[Ledger] = WeakSet()  # where a run of this process has put its parameters on the job's servers


@dataclass(frozen=True)
class Traffic:
    """What travels between the group and its servers, once a model has joined them."""

    prepared: PreparedOptimizer
    servers: Servers
    arrivals: Arrivals
    courier: Courier


class GroupedUpdates:
    """The updates of a worker in one of several groups, or in one group with servers; see `Updates`.

    Args:
        holdings: What the group holds.
        standing: The position of the group among others.

    Attributes:
        others: The other groups.
    """

    shards = None

    def __init__(self, holdings: Holdings, standing: Standing) -> None:
        self._holdings, self._group, self._standing = holdings, holdings.group, standing
        self.others = Groups(holdings, standing)
        self._model: nn.Module | None = None
        self._bundles: Bundles | None = None
        self._traffic: Traffic | None = None
        self._hooks: list[Any] = []
        self._sent: set[int] = set()  # the bundles handed to the courier in the step being tried
        self._options: list[dict[str, Any]] = []

    def number_of(self, version: int) -> int:
        """See `Updates`."""
        return version * self._standing.groups + self._standing.group

    def refuse(self, what: Feature) -> None:
        """See `Updates`."""
        if what in ("load", "checkpoint", "edit", "exchange"):
            raise UnsupportedError(
                f"run.{what} would see only this group, since the parameters are the servers'; run without --servers"
            )
        if what != "weighted loss" or self.traffic.prepared.gradients.reduced is not None:
            refuse(what, WITH_SERVERS)

    @property
    def bundles(self) -> Bundles:
        """How the model is cut."""
        assert self._bundles is not None, "a model is cut when it is prepared"
        return self._bundles

    @property
    def traffic(self) -> Traffic:
        """The traffic of a run that has prepared its model."""
        assert self._traffic is not None, "a run that steps has an optimizer, so its model has joined the servers"
        return self._traffic

    # ---- joining ----

    def admit(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """See `Updates`."""
        if self._model is not None or optimizer is None:
            raise UnsupportedError(
                "a run with servers trains one model with one optimizer; pass both to one run.prepare"
            )
        if self._holdings.ledger in _with_servers:
            raise UnsupportedError(
                "the servers of a job hold one model, and an earlier run of this script has put its own"
            )
        _with_servers.add(self._holdings.ledger)
        self._model = model
        Awaited.hang(model)

    def lay_out(self, prepared: PreparedOptimizer, spans: Sequence[Span]) -> tuple[Summing, Delivery]:
        """See `Updates`. Parameters of a bundle are added up together."""
        bundles = self._cut(prepared)
        return prepared.in_tree(spans, [bundles.trained[bundle] for bundle in bundles.filled])

    def _cut(self, prepared: PreparedOptimizer) -> Bundles:
        """Cut the model into bundles, whatever their owners."""
        sizes = {name: p.numel() * p.element_size() for name, p in self._holdings.models.slots.parameters.items()}
        num_servers = len(self._standing.servers[self._standing.server_group])
        self._bundles = Bundles.of(sizes, prepared.names, num_servers)
        return self._bundles

    def join(self, model: nn.Module, prepared: PreparedOptimizer | None) -> None:
        """See `Updates`. Everyone begins with the values that the first group puts on all servers."""
        assert prepared is not None, "a model without an optimizer is not admitted"
        self._open(model, prepared)
        servers, state, standing = self.traffic.servers, self._holdings.state, self._standing
        recipe = describe(prepared.optimizer, self._holdings.names) if standing.lock else None

        def attempt() -> Entry:
            if self._group.rank == 0:
                if standing.group == 0:
                    servers.put(state.tensors(), recipe)
                servers.compare_models(state.tensors())
                self._holdings.replace(servers.everything(standing.server_group))
            self._group.barrier("joined the servers")
            return Entry("join the servers")

        def adopt(_: Entry, took_part: bool) -> None:
            self._holdings.pull()
            self._holdings.settle()

        self._holdings.ledger.perform(Operation("join the servers", self._holdings.version), attempt, adopt)

    def _open(self, model: nn.Module, prepared: PreparedOptimizer) -> None:
        """Make what carries bundles to the servers and back."""
        timeout_s, bundles, entries = self._holdings.config.timeout_s, self._cut(prepared), self._holdings.state.entries
        buffers = list(self._holdings.models.slots.buffers)
        servers = Servers(
            self._standing, bundles.names, bundles.server_of, buffers, timeout_s, self.others.stop_if_asked
        )  # fmt: skip
        trained = set(prepared.names)
        changing = [[entries[name] for name in names if name in trained] for names in bundles.names]
        arrivals = Arrivals(self._group, changing, [self._name_of_server(b) for b in bundles.server_of], self._check)
        courier = Courier(Line(self._send_bundle, servers.fetch, arrivals.write, servers.close), timeout_s)
        self._traffic = Traffic(prepared, servers, arrivals, courier)
        self.others.meet_at(servers, arrivals)
        prepared.gradients.expects = self._expect
        bundle_of = {i: bundles.bundle_of[name] for i, name in self._holdings.names.items()}
        self._hooks = Awaited.wait_for(model, bundle_of, arrivals.need)

    def _name_of_server(self, server: int) -> str:
        """The name of one of the servers of this group, as in messages."""
        standing = self._standing
        return f"server {sum(map(len, standing.servers[: standing.server_group])) + server}"

    def _check(self) -> None:
        """Raise the error that has stopped the courier, if any: nothing more would arrive."""
        self.traffic.courier.check()

    def _expect(self, i: int) -> None:
        """Check that the bundle of a parameter that got a gradient was waited for."""
        traffic = self.traffic
        if not traffic.arrivals.has(self.bundles.trained_by[i]):
            raise UnsupportedError(
                f"the step function used parameter '{traffic.prepared.names[i]}' through a reference kept outside "
                "the model: nobody waited for its values; take it from the module, as in model.layer.weight"
            )

    # ---- a step ----

    def begin(self, samples: Samples, clipping: Clipping) -> Samples | Results:
        """See `Updates`; other groups do theirs meanwhile."""
        early = self._standing.lock and not clipping  # a norm needs all gradients first
        self.traffic.prepared.gradients.reduced = self._on_reduced if early else None
        self._options, self._sent = options_for_server(self.traffic.prepared), set()
        return samples

    def share(self, work: Work, report: Report) -> list[Report]:
        """See `Updates`."""
        return share_among(self._group, work, report)

    def _on_reduced(self, bucket: int, sums: Mapping[int, Tensor | None]) -> None:
        self._hand_over(self.bundles.filled[bucket], sums)

    def _hand_over(self, bundle: int, sums: Mapping[int, Tensor | None]) -> None:
        """Give the update of a bundle to the courier."""
        traffic, version = self.traffic, self._holdings.version
        self._sent.add(bundle)
        names = traffic.prepared.names
        found = {names[i]: total for i in self.bundles.trained[bundle] if (total := sums[i]) is not None}
        traffic.arrivals.watch("sends", bundle)
        if found or self._standing.staleness is not None:
            traffic.courier.send(bundle, version, found)
        else:
            traffic.courier.fetch(bundle, version + 1)

    def _send_bundle(self, bundle: int, version: int, update: Mapping[str, Tensor]) -> None:
        """Send the update of a bundle; called in the courier's thread."""
        self.traffic.servers.send(bundle, version, update, self._options if self._standing.lock else None)

    @property
    def _owned_bundles(self) -> list[int]:
        """The bundles that this worker owns, in the order in which backward reaches them."""
        filled = self.bundles.filled
        return [filled[bucket] for bucket in self.traffic.prepared.gradients.plan.owned_buckets]

    def update(self, work: Work, sums: dict[int, Tensor | None]) -> News:
        """See `Updates`."""
        self.traffic.arrivals.all()  # also bundles that this step did not use, so that only one version is under way
        if not self._standing.lock:
            return work.prepared.update(sums)
        for bundle in self._owned_bundles:
            if bundle not in self._sent:
                self._hand_over(bundle, sums)
        begin_ns = time.monotonic_ns()
        self.traffic.courier.wait_sent()
        self._group.tracer.waited(begin_ns, -1, "the servers")
        work.prepared.stepped_elsewhere()
        return []

    def settle(self, prepared: Trained, samples: Samples) -> None:
        """See `Updates`."""
        version = self._holdings.version
        self.traffic.arrivals.version = version
        if self._holdings.ledger.took_part:
            if not self._standing.lock:
                self._hand_over_changes()
            self.traffic.courier.commit(version)

    def _hand_over_changes(self) -> None:
        """Send what the committed step has changed in this worker's own bundles."""
        state, names = self._holdings.state, self.traffic.prepared.names
        for bundle in self._owned_bundles:
            entries = [state.entries[names[i]] for i in self.bundles.trained[bundle]]
            changes = {e.name: change for e in entries if (change := state.change_of(e)) is not None}
            self.traffic.courier.send(bundle, self._holdings.version - 1, changes)

    def edited(self) -> None:
        """Edits are refused."""

    # ---- trouble, and the end ----

    def abandon(self) -> None:
        """See `Updates`."""
        if self._traffic is not None:
            self._traffic.courier.drop()

    @contextmanager
    def recovery(self) -> Iterator[None]:
        """See `Updates`. What a lost worker did not put in place, its successor fetches again."""
        if self._traffic is not None:
            self._traffic.courier.finish()
        yield
        if self._traffic is not None:
            arrivals, version = self._traffic.arrivals, self._holdings.version
            arrivals.forget()
            for bundle in self._owned_bundles:
                if arrivals.version_of(bundle) < version:
                    self._traffic.courier.fetch(bundle, version)

    def finish(self) -> None:
        """Fetch the last values, and what the servers' optimizers keep."""
        if self._traffic is None:
            return
        prepared, servers = self._traffic.prepared, self._traffic.servers

        def attempt() -> Entry:
            self.others.level("the end")
            news: News = []
            if self._standing.lock:
                tensors, values = servers.optimizer_state() if self._group.rank == 0 else ({}, {})
                news = self._group.gather_json("optimizer state", prepared.kept.news_of(tensors, values))[0]
                prepared.settle(news, set())
                self._holdings.replace(tensors)
                self._group.barrier("optimizer state is here")
            return Entry("the groups end", news)

        def adopt(entry: Entry, took_part: bool) -> None:
            prepared.adopt(entry.value, took_part)
            self._holdings.pull()
            self._holdings.settle()

        self._holdings.ledger.perform(Operation("the groups end", self._holdings.version), attempt, adopt)

    def close(self) -> None:
        """Leave the servers."""
        if self._traffic is not None:
            self._traffic.courier.close()
            self._traffic.servers.leave()
        for hook in self._hooks:
            hook.remove()
        if self._model is not None:
            Awaited.take_down(self._model)

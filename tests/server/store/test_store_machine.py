"""Any order of calls on the store gives what a very simple model of it gives."""

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from evenstep.core.errors import RefusedError
from evenstep.server.store import readers
from evenstep.server.store.commits import First
from evenstep.server.store.options import StoreOptions
from evenstep.server.store.rounds import Contribution
from evenstep.server.store.store import Store
from evenstep.server.store.workers import Acknowledged

WORKERS = st.sampled_from("abc")
LEASE_S = 10.0


class Machine(RuleBasedStateMachine):
    """The model: a number, who is there since when, who has done how much, and what is waiting to be added."""

    def __init__(self):
        super().__init__()
        readers._READERS_S = 0.0

    @initialize(staleness=st.sampled_from([0, 1, 3, None]))
    def begin(self, staleness):
        self.now = 0.0
        self.staleness = staleness
        self.store = Store(StoreOptions(staleness=staleness, lease_s=LEASE_S), clock=lambda: self.now)
        self.store.put(First({"w": torch.zeros(2)}, "owner"))
        self.value, self.version = 0.0, 0
        self.seen: dict[str, float] = {}
        self.done: dict[str, int] = {}
        self.last: dict[str, tuple[int, int]] = {}
        self.round: dict[str, tuple[int, float]] = {}
        self.views: list[tuple[object, float]] = []

    def expire(self):
        gone = [worker for worker, at in self.seen.items() if self.now - at > LEASE_S]
        for worker in gone:
            del self.seen[worker], self.done[worker]
        if gone:
            self.complete()

    def complete(self):
        if self.round and set(self.seen) <= set(self.round):
            self.value -= sum(amount for _, amount in self.round.values()) / len(self.round)
            self.version += 1
            for worker, (sequence, _) in self.round.items():
                self.apply(worker, sequence)
            self.round = {}

    def apply(self, worker, sequence):
        self.last[worker] = (sequence, self.version)
        if worker in self.done:
            self.done[worker] += 1

    @rule(seconds=st.sampled_from([1.0, 4.0, 6.0]))
    def time_goes_by(self, seconds):
        self.now += seconds

    @rule(worker=WORKERS)
    def register(self, worker):
        self.store.register(worker)
        self.expire()
        if worker not in self.seen:
            self.done[worker] = min(self.done.values(), default=0)
        self.seen[worker] = self.now

    @rule(worker=WORKERS)
    def leave(self, worker):
        self.store.leave(worker)
        if worker in self.seen:
            del self.seen[worker], self.done[worker]
            self.complete()

    @rule(worker=WORKERS, ahead=st.integers(-1, 2), amount=st.sampled_from([-1.0, 2.0, 4.0]))
    def update(self, worker, ahead, amount):
        sequence = self.last.get(worker, (0, 0))[0] + ahead
        try:
            found = self.store.decider.update(worker, sequence, "delta", Contribution({"w": torch.full((2,), amount)}))
        except RefusedError:
            found = None
        assert self.outcome(found) == self.expected(worker, sequence, amount)

    def outcome(self, found):
        if found is None:
            return "refused"
        return found.version if isinstance(found, Acknowledged) else "pending"

    def expected(self, worker, sequence, amount):
        self.expire()
        last = self.last.get(worker)
        if self.round.get(worker, (None,))[0] == sequence:
            return self.touch(worker, "pending")
        if last is not None and sequence <= last[0]:
            return self.touch(worker, last[1]) if sequence == last[0] else "refused"
        if worker not in self.seen:
            return "refused"
        self.seen[worker] = self.now
        if self.staleness == 0:
            if worker in self.round:
                return "refused"
            self.round[worker] = (sequence, amount)
            self.complete()
            return "pending" if self.round else self.version
        if self.staleness is not None:
            others = [done for name, done in self.done.items() if name != worker]
            if others and self.done[worker] + 1 - min(others) > self.staleness:
                return "refused"
        self.value -= amount
        self.version += 1
        self.apply(worker, sequence)
        return self.version

    def touch(self, worker, outcome):
        if worker in self.seen:
            self.seen[worker] = self.now
        return outcome

    @rule()
    def look(self):
        if len(self.views) < 4:
            self.views.append((self.store.readers.get(), self.value))

    @rule()
    def close_a_view(self):
        if self.views:
            self.views.pop(0)[0].close()

    @rule(value=st.sampled_from([0.0, 8.0]), force=st.booleans())
    def put(self, value, force):
        try:
            self.store.put(First({"w": torch.full((2,), value)}, "x"), force=force)
        except RefusedError:
            assert not force
        else:
            assert force
            self.value, self.version = value, self.version + 1

    @invariant()
    def it_is_what_the_model_says(self):
        if not hasattr(self, "store"):
            return
        with self.store.readers.get() as view:
            assert view.version == self.version
            assert torch.allclose(view.tensors["w"], torch.full((2,), self.value), rtol=1e-5, atol=1e-5)
        for view, value in self.views:
            assert torch.allclose(view.tensors["w"], torch.full((2,), value), rtol=1e-5, atol=1e-5)
        if self.staleness and self.done:
            assert max(self.done.values()) - min(self.done.values()) <= self.staleness

    def teardown(self):
        if hasattr(self, "store"):
            for view, _ in self.views:
                view.close()
            self.store.close()
        readers._READERS_S = READERS_S


READERS_S = readers._READERS_S
TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, suppress_health_check=list(HealthCheck))

"""Servers that tell each other what changed: whatever is under way, and in whatever order it arrives, counts once."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from evenstep.server import ParameterServer, connect
from evenstep.server.client.groups import flush
from evenstep.server.hosting.replicas import Changes, Replica

COUNT = 3
REPLICAS = st.integers(0, COUNT - 1)


class Told(RuleBasedStateMachine):
    """Replicas with a network that delays, repeats and reorders between pairs, against plain sums."""

    def __init__(self):
        super().__init__()
        self.values = [{"w": torch.zeros(2)} for _ in range(COUNT)]
        self.changes = [Changes(values) for values in self.values]
        self.under_way = {(a, b): [] for a in range(COUNT) for b in range(COUNT) if a != b}
        self.sent = [0] * COUNT
        self.heard = dict.fromkeys(self.under_way, 0)
        self.total = torch.zeros(2)

    @rule(replica=REPLICAS, place=st.integers(0, 1), amount=st.integers(-8, 8))
    def update(self, replica, place, amount):
        self.values[replica]["w"][place] += amount
        self.total[place] += amount

    @rule(replica=REPLICAS)
    def tell(self, replica):
        found = self.changes[replica].take(self.values[replica])
        if found:
            self.sent[replica] += 1
            for other in range(COUNT):
                if other != replica:
                    self.under_way[replica, other].append((self.sent[replica], found))

    @rule(pair=st.sampled_from([(a, b) for a in range(COUNT) for b in range(COUNT) if a != b]), again=st.booleans())
    def deliver(self, pair, again):
        """The first that is under way; perhaps its answer is lost, and it is sent once more."""
        if not self.under_way[pair]:
            return
        number, found = self.under_way[pair][0]
        if not again:
            self.under_way[pair].pop(0)
        if number > self.heard[pair]:  # as a server knows an update that it has had
            self.heard[pair] = number
            values = self.values[pair[1]]
            values["w"] += found["w"]
            self.changes[pair[1]].absorb(found)

    @rule()
    def quiet(self):
        """All is told, and everyone holds the sum of everything."""
        for replica in range(COUNT):
            self.tell(replica)
        for pair, waiting in self.under_way.items():
            while waiting:
                self.deliver(pair, again=False)
        for replica in range(COUNT):
            assert torch.equal(self.values[replica]["w"], self.total)
            assert not self.changes[replica].take(self.values[replica]), "nothing goes round in circles"

    def teardown(self):
        self.quiet()


TestTold = Told.TestCase
TestTold.settings = settings(max_examples=60, stateful_step_count=30)


def test_the_older_rule_loses_what_is_under_way():
    """The case that the machine above would find: master and local both update while a sync is on its way."""
    master = local = last_sync = 0.0
    local += 1.0
    delta, last_sync = local - last_sync, local
    local += 1.0  # while the sync is under way
    master += delta
    reply = master
    local += reply - last_sync
    last_sync = local  # should be the master's value
    master += local - last_sync
    assert (master, local) == (1.0, 2.0)

    here, there = {"w": torch.zeros(1)}, {"w": torch.zeros(1)}
    mine, theirs = Changes(here), Changes(there)
    here["w"] += 1.0
    first = mine.take(here)
    here["w"] += 1.0
    for found in (first, mine.take(here)):
        there["w"] += found["w"]
        theirs.absorb(found)
    assert (float(there["w"]), float(here["w"])) == (2.0, 2.0)
    assert not theirs.take(there)


@pytest.fixture
def servers(lock):
    servers = [ParameterServer(staleness=None, lock=lock, transports=("memory",)) for _ in range(3)]
    for server in servers:
        server.start()
    peers = [[other.url for other in servers if other is not server] for server in servers]
    replicas = [Replica(server.store, f"server {n}", peers[n]) for n, server in enumerate(servers)]
    yield servers
    for closing in (*replicas, *servers):
        closing.close()


@pytest.mark.parametrize("lock", [True, False])
def test_servers_that_hold_the_same_end_on_the_sum_of_all_updates(servers):
    counts = [0.0] * 3

    def work(n):
        amounts = random.Random(n).choices(range(1, 6), k=20)
        with connect(servers[n].url, worker=f"w{n}") as client:
            for amount in amounts:
                delta = torch.zeros(3)
                delta[n] = -float(amount)
                client.update_parameters({"w": delta}, kind="delta")
        counts[n] = float(sum(amounts))

    for server in servers:
        with connect(server.url, register=False) as client:
            client.put_parameters({"w": torch.zeros(3), "seen": torch.zeros(1)}, buffers=["seen"])
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    for server in servers:
        with connect(server.url, register=False) as client:
            flush(client, 30.0)
    for server in servers:
        assert server.store.tensors()["w"].tolist() == counts

"""Server 0 and its followers, without transports: whatever order things happen in, all make the same of it."""

import random

import pytest
import torch

from evenstep.core.errors import RefusedError
from evenstep.server.store.commits import First
from evenstep.server.store.following import Staged
from evenstep.server.store.options import StoreOptions
from evenstep.server.store.rounds import Contribution
from evenstep.server.store.store import Store
from evenstep.server.wire.slices import ServerPlace

NUM_SERVERS, NUM_WORKERS, NUM_UPDATES = 3, 3, 6


class Fleet:
    """Some servers in this process; every value that any of them has had is remembered by version."""

    def __init__(self, staleness):
        options = StoreOptions(staleness=staleness, workers=NUM_WORKERS if staleness == 0 else 1)
        self.servers = [Store(options, place=ServerPlace(n, NUM_SERVERS, "s")) for n in range(NUM_SERVERS)]
        self.seen = [{} for _ in self.servers]
        for server in self.servers:
            server.put(First({"w": torch.zeros(2)}, "owner"))
        self.look()

    def register(self, worker):
        for server in self.servers:
            server.register(worker)

    def look(self):
        for server, seen in zip(self.servers, self.seen, strict=True):
            with server.readers.get() as view:
                value = int(view.tensors["w"][0])
                assert seen.setdefault(view.version, value) == value

    def tell(self, follower):
        at = self.servers[follower].version
        _, decisions, alive = self.servers[0].decided_since(at)
        self.servers[follower].follower.follow(decisions, alive)

    def close(self):
        for server in self.servers:
            server.close()


def life(fleet, worker, session, first, amounts, done):
    """The steps of a worker, one at a time."""
    for sequence, amount in enumerate(amounts, start=first):
        for follower in fleet.servers[1:]:
            part = Contribution({"w": torch.full((2,), -float(amount))})
            follower.follower.stage(worker, session, Staged(sequence, "delta", part))
            yield
        part = Contribution({"w": torch.full((2,), -float(amount))})
        fleet.servers[0].decider.update(worker, sequence, "delta", part, session=session)
        done.append(amount)
        yield
        while fleet.servers[0].attendance.workers.acknowledged.get(worker) is None or (
            fleet.servers[0].attendance.workers.acknowledged[worker].sequence < sequence
        ):
            yield  # a synchronous update waits for the others
        for n in range(1, NUM_SERVERS):
            fleet.tell(n)
            yield


@pytest.mark.parametrize("staleness", [None, 0])
@pytest.mark.parametrize("seed", range(40))
def test_all_servers_make_the_same_versions_whoever_dies_when(staleness, seed):
    dice = random.Random(seed)
    fleet, done = Fleet(staleness), []
    lives = {}
    for n in range(NUM_WORKERS):
        fleet.register(f"w{n}")
        amounts = [dice.randrange(1, 1 << 10) for _ in range(NUM_UPDATES)]
        lives[f"w{n}"] = life(fleet, f"w{n}", "first", 1, amounts, done)
    while lives:
        worker = dice.choice(list(lives))
        if next(lives[worker], "over") == "over":
            del lives[worker]
            if staleness == 0:
                fleet.servers[0].leave(worker)
        elif staleness is None and dice.random() < 0.03:  # it dies, and perhaps comes back under its name
            del lives[worker]
            last = fleet.servers[0].attendance.workers.acknowledged.get(worker)
            if dice.random() < 0.5:
                amounts = [dice.randrange(1, 1 << 10) for _ in range(3)]
                lives[worker] = life(
                    fleet, worker, f"life {dice.random()}", last.sequence + 1 if last else 1, amounts, done
                )
        fleet.look()
    for n in range(1, NUM_SERVERS):
        fleet.tell(n)
    fleet.look()
    values = [seen[server.version] for server, seen in zip(fleet.servers, fleet.seen, strict=True)]
    assert len({server.version for server in fleet.servers}) == len(set(values)) == 1
    for seen in fleet.seen[1:]:
        assert all(fleet.seen[0][version] == value for version, value in seen.items()), "one order for all"
    if staleness is None:
        assert values[0] == sum(done), "what server 0 has taken, and nothing else"
    fleet.close()


def test_a_follower_forgets_what_nobody_will_ask_for():
    fleet = Fleet(None)
    follower, part = fleet.servers[1].follower, Contribution({"w": torch.ones(2)})
    for worker in ("here", "gone"):
        fleet.register(worker)
        follower.stage(worker, "s", Staged(1, "delta", part))
        fleet.servers[2].follower.stage(worker, "s", Staged(1, "delta", part))
    for server in fleet.servers:
        server.leave("gone")
    fleet.servers[0].decider.update("here", 1, "delta", part, session="s")
    fleet.tell(1)
    assert not follower.staged
    assert fleet.servers[1].version == 1
    with pytest.raises(RefusedError, match="worker 'gone' is not registered"):
        follower.stage("gone", "s", Staged(1, "delta", part))
    assert follower.follow([(3, {"x": (1, "s")})]) == (1, False), "a gap is not jumped over"
    fleet.close()

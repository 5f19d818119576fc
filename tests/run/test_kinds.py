"""What a script and its launcher say decides who makes the updates, and what cannot be had together is refused."""

from dataclasses import dataclass, replace

import pytest
from clients import FakeServer
from test_apart import environment_of

from evenstep.core.errors import UnsupportedError
from evenstep.engine.updates import OwnUpdates
from evenstep.exchange.ledger import Ledger
from evenstep.plan.groups import Standing
from evenstep.run import kinds
from evenstep.run.aggregated import AggregatedUpdates
from evenstep.run.apart import Apart
from evenstep.run.grouped import GroupedUpdates
from evenstep.run.groups import Groups
from evenstep.run.kinds import choose, open_engine
from evenstep.run.others import Nobody
from evenstep.run.periodic import PeriodicUpdates
from evenstep.run.served import ServedUpdates

STANDING = Standing(1, 2, 0, [[{"tcp": "tcp://nowhere:1", "memory": "memory://nothing"}]], None, True, "secret")


@dataclass
class Said(FakeServer):
    """A server as a script says it."""

    together: bool = True
    update_every: int | str = 1


@pytest.mark.parametrize(
    ("server", "standing", "updates", "others", "connections"),
    [
        (None, None, OwnUpdates, Nobody, 0),
        (Said(), None, AggregatedUpdates, Nobody, 1),
        (Said(together=False), None, ServedUpdates, Apart, 1),
        (Said(together=False, update_every=3), None, PeriodicUpdates, Apart, 1),
        (Said(together=False, update_every="epoch"), None, PeriodicUpdates, Apart, 1),
        (None, STANDING, GroupedUpdates, Groups, 0),
    ],
)
def test_a_kind_of_run_has_its_updates_and_its_others(holdings_of, server, standing, updates, others, connections):
    (holdings,) = holdings_of()
    said = server and replace(server)
    kind = choose(holdings, said, standing, environment_of(0, 1))
    assert type(kind.updates) is updates
    assert type(kind.others) is others
    assert (said.open if said else 0) == connections
    kind.updates.close()
    assert said is None or said.open == 0


def test_servers_of_the_launcher_are_those_that_count(holdings_of):
    (holdings,) = holdings_of()
    said = Said()
    assert type(choose(holdings, said, STANDING, environment_of(0, 1)).updates) is GroupedUpdates
    assert said.open == 0, "nobody has asked the script's"


@pytest.mark.parametrize(("server", "standing"), [(Said(), None), (None, STANDING)])
def test_workers_of_bridged_machines_meet_at_no_server(holdings_of, server, standing):
    (holdings,) = holdings_of()
    holdings.group.puts = object()
    with pytest.raises(UnsupportedError, match="start each machine's workers by themselves"):
        choose(holdings, server, standing, environment_of(0, 1))
    assert server is None or server.open == 0
    assert type(choose(holdings, None, None, environment_of(0, 1)).updates) is OwnUpdates


def test_gpus_of_bridged_machines_are_refused(holdings_of, monkeypatch):
    (holdings,) = holdings_of()
    holdings.group.puts = object()
    monkeypatch.setattr(type(holdings.memory), "shared", False)
    with pytest.raises(UnsupportedError, match="device='cpu' on several machines: so far only their processors"):
        choose(holdings, None, None, environment_of(0, 1))


def test_an_engine_that_cannot_be_made_leaves_no_connection(config, groups_of, monkeypatch):
    server = Said()

    def fails(*_):
        assert server.open == 1
        raise LookupError("no engine")

    monkeypatch.setattr(kinds, "Engine", fails)
    with pytest.raises(LookupError):
        open_engine(config(), Ledger(groups_of(1)[0]), server, None, environment_of(0, 1))
    assert server.open == 0

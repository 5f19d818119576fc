"""Which server has which bundle, what a worker tells it, and that every connection is closed again."""

import pytest
import torch

from evenstep.core.errors import MismatchError, UnreachableError
from evenstep.plan.groups import Standing
from evenstep.run import servers as module
from evenstep.run.servers import Servers

BUNDLES = [["model.a.weight", "model.a.bias"], ["model.b.weight"]]
BUFFERS = ["model.b.mean"]
STATE = {name: torch.full((2,), float(n)) for n, name in enumerate([*BUNDLES[0], *BUNDLES[1], *BUFFERS])}


class Client:
    """A connection that keeps what was said over it; also its own `Connection`."""

    def __init__(self, network, url, worker, token, register):
        self.url, self.worker, self.token, self.register = url, worker, token, register
        self.said, self.closed, self._network = [], False, network

    connection = property(lambda self: self)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        assert not self.closed
        self.closed = True

    def status(self):
        return {"owner": "somebody" if self.url in self._network.owned else None}

    def push(self, what, fields, tensors):
        self.said.append((what, fields["buffers"], fields["optimizer"], sorted(tensors)))

    def pull(self, fields, names):
        assert fields == {"optimizer": True}
        return {"values": {f"optimizer.{self.url}.step": 3}}, {f"optimizer.{self.url}.exp": torch.ones(1)}

    def ask(self, what, fields, deadline):
        self.said.append((what, fields.get("tag")))
        return self._network.answers.pop(0) if self._network.answers else {"pending": False, "found": {}}

    def get_parameters(self, names=None, *, timeout_s=None):
        self.said.append(("get", names))
        return {name: torch.ones(1) for name in names or [self.url]}

    def update(self, tensors, **more):
        self.said.append(("update", sorted(tensors), more))

    def update_parameters(self, tensors, **more):
        self.said.append(("update_parameters", sorted(tensors), more))


class Network:
    """All connections that were made."""

    def __init__(self):
        self.clients, self.owned, self.answers = [], set(), []

    def connect(self, url, *, worker, token, timeout_s, register=True):
        assert timeout_s == 5.0
        self.clients.append(Client(self, url, worker, token, register))
        return self.clients[-1]

    def said(self):
        return [(client.url, *each) for client in self.clients for each in client.said]


@pytest.fixture
def network(monkeypatch):
    network = Network()
    monkeypatch.setattr(module, "connect_whole", network.connect)
    return network


def servers(server_groups=1, group=0, groups=2, look=lambda: None):
    """Two servers in every server group: the second has the first bundle."""
    addresses = [[{"tcp": f"tcp {g}.{s}", "memory": f"memory {g}.{s}"} for s in (0, 1)] for g in range(server_groups)]
    standing = Standing(group, groups, group if server_groups > 1 else 0, addresses, None, True, "secret")
    return Servers(standing, BUNDLES, [1, 0], BUFFERS, 5.0, look)


def test_a_bundle_goes_to_its_server_over_one_connection_of_its_own(network):
    here = servers(group=1)
    for version in (3, 4):
        here.send(0, version, {"model.a.bias": torch.ones(1)}, [{"lr": 0.1}])
    here.send(1, 3, {"model.b.weight": torch.ones(1)}, [{"lr": 0.1}])
    assert [(c.url, c.worker, c.token, c.register) for c in network.clients] == [
        ("memory 0.1", "group 1, bundle 0", "secret", True),
        ("memory 0.0", "group 1, bundle 1", "secret", True),
    ]
    assert [said[-1]["sequence"] for said in network.clients[0].said] == [4, 5]
    assert network.clients[0].said[0][1] == ["a.bias"]
    here.close()
    assert all(client.closed for client in network.clients)
    here.fetch(0)
    assert len(network.clients) == 3, "who closed it may come again"


def test_without_a_lock_a_change_is_subtracted(network):
    servers().send(0, 3, {"model.a.bias": torch.ones(1)}, None)
    assert network.said() == [("memory 0.1", "update_parameters", ["a.bias"], {"kind": "delta", "timeout_s": 5.0})]


def test_a_bundle_comes_with_the_names_of_the_run(network):
    assert sorted(servers().fetch(0)) == ["model.a.bias", "model.a.weight"]
    assert network.clients[0].said == [("get", ["a.weight", "a.bias"])]


def test_every_server_without_an_owner_is_given_what_it_holds(network):
    network.owned = {"tcp 1.1"}
    recipe = {"kind": "SGD", "groups": [{"lr": 0.1, "names": ["model.a.bias"]}]}
    servers(server_groups=2).put(STATE, recipe)
    told = {**recipe, "groups": [{"lr": 0.1, "names": ["a.bias"]}]}
    assert network.said() == [
        ("tcp 0.0", "put", ["b.mean"], told, ["b.mean", "b.weight"]),
        ("tcp 0.1", "put", [], told, ["a.bias", "a.weight"]),
        ("tcp 1.0", "put", ["b.mean"], told, ["b.mean", "b.weight"]),
    ]
    assert recipe["groups"][0]["names"] == ["model.a.bias"], "the caller's is as it was"
    assert all(client.closed and not client.register for client in network.clients)


def test_everything_of_a_server_group_and_what_its_optimizers_keep(network):
    here = servers(server_groups=2)
    assert sorted(here.everything(1)) == ["model.tcp 1.0", "model.tcp 1.1"]
    tensors, values = here.optimizer_state()
    assert sorted(tensors) == ["optimizer.model.tcp 0.0.exp", "optimizer.model.tcp 0.1.exp"]
    assert values == {"optimizer.model.tcp 0.0.step": 3, "optimizer.model.tcp 0.1.step": 3}
    assert all(client.closed for client in network.clients)


def test_buffers_go_to_the_first_server_and_none_at_all_to_nobody(network):
    servers().put_buffers({})
    assert not network.clients
    servers().put_buffers({"model.b.mean": torch.ones(1)})
    assert network.said() == [("tcp 0.0", "update_parameters", ["b.mean"], {"kind": "peer", "buffers": ["b.mean"]})]
    assert network.clients[0].closed


def test_only_several_server_groups_have_to_tell_each_other(network):
    servers(server_groups=1).flush()
    assert not network.clients
    network.answers = [{"pending": True}]
    servers(server_groups=2, group=1).flush()
    assert network.said() == [("tcp 1.0", "flush", None)] * 2 + [("tcp 1.1", "flush", None)]


def test_groups_wait_at_the_hub_and_look_up_meanwhile(network):
    looks = []
    network.answers = [{"pending": True, "here": ["group 0"]}, {"found": {"group 0": 7}}, {"found": {}}]
    here = servers(group=1, look=lambda: looks.append(1))
    assert here.meet("all are here", 7) == {"group 0": 7}
    assert len(looks) == 2
    here.meet("again")
    assert [client.url for client in network.clients] == ["tcp 0.0"], "one connection for all meetings"
    here.leave()
    here.leave()
    assert network.clients[0].closed


def test_who_is_asked_to_stop_does_not_go_on_waiting(network):
    def look():
        raise UnreachableError("the run was asked to stop")

    with pytest.raises(UnreachableError, match="asked to stop"):
        servers(look=look).meet("all are here")


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (
            [["model.a.weight", "(2,) torch.float32"]],
            r"group 1 prepares nothing more where group 0 prepares",
        ),
        ([["model.a.weight", "(3,) torch.float32"]], r"group 1 prepares .*\(3,\).* where group 0 prepares .*\(2,\)"),
    ],
)
def test_another_model_in_another_group_is_an_error_that_names_both(network, theirs, message):
    network.answers = [{"found": {"group 1": theirs}}]
    with pytest.raises(MismatchError, match=message):
        servers().compare_models(STATE)


def test_optimizer_state_is_no_part_of_the_model_that_groups_compare(network):
    mine = [[name, "(2,) torch.float32"] for name in STATE]
    network.answers = [{"found": {"group 1": mine}}]
    servers().compare_models({**STATE, "optimizer.model.a.weight.exp": torch.ones(3)})

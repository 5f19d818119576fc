"""The courier: updates go first, bundles come in the order of need, and are put in place once they are committed."""

import threading

import pytest
import torch

from evenstep.core.errors import UnreachableError
from evenstep.run.courier import Courier, Line


class Servers:
    """Keeps what happened; sends and fetches wait while the gate is shut."""

    def __init__(self):
        self.happened, self.written, self.closed = [], {}, threading.Event()
        self.gate, self.fails = threading.Event(), None
        self.gate.set()

    def line(self):
        return Line(self.send, self.fetch, self.write, self.closed.set)

    def send(self, bundle, version, update):
        self.happened.append(("send", bundle))
        self.pass_gate()

    def fetch(self, bundle):
        self.happened.append(("fetch", bundle))
        self.pass_gate()
        return {"value": torch.tensor(float(bundle))}

    def pass_gate(self):
        assert self.gate.wait(30.0)
        if self.fails is not None:
            raise self.fails

    def write(self, bundle, values, version):
        self.written[bundle] = (version, float(values["value"]))


@pytest.fixture
def servers():
    return Servers()


@pytest.fixture
def courier(servers):
    courier = Courier(servers.line(), 30.0)
    yield courier
    servers.gate.set()
    courier.close()
    assert servers.closed.is_set()


def test_a_part_is_put_in_place_only_when_its_version_is_committed(courier, servers):
    courier.send(0, 3, {})
    courier.finish()
    assert servers.happened == [("send", 0), ("fetch", 0)]
    assert servers.written == {}
    courier.commit(4)
    assert servers.written == {0: (4, 0.0)}


def test_what_is_committed_already_is_put_in_place_at_once(courier, servers):
    courier.commit(4)
    courier.fetch(2, 4)
    courier.finish()
    assert servers.written == {2: (4, 2.0)}


def test_updates_go_before_fetches_and_the_first_part_is_fetched_first(courier, servers):
    servers.gate.clear()
    courier.send(2, 0, {})
    for bundle in (1, 0):
        courier.send(bundle, 0, {})
    servers.gate.set()
    courier.finish()
    assert servers.happened == [("send", 2), ("send", 1), ("send", 0), ("fetch", 0), ("fetch", 1), ("fetch", 2)]


def test_all_are_sent_before_all_are_fetched(courier, servers):
    courier.send(0, 0, {})
    courier.wait_sent()
    assert ("send", 0) in servers.happened


def test_what_is_dropped_is_put_in_place_by_nobody(courier, servers):
    courier.send(0, 0, {})
    courier.finish()
    courier.drop()
    courier.commit(1)
    assert servers.written == {}


def test_whoever_waits_gets_what_went_wrong(courier, servers):
    servers.fails = UnreachableError("gone")
    courier.send(0, 0, {})
    with pytest.raises(UnreachableError, match="gone"):
        courier.finish()
    with pytest.raises(UnreachableError, match="gone"):
        courier.check()
    courier.drop()  # it has to be able to go on after that


def test_nobody_waits_for_ever():
    servers = Servers()
    servers.gate.clear()
    courier = Courier(servers.line(), 0.05)
    courier.send(0, 0, {})
    with pytest.raises(UnreachableError, match=r"took longer than 0\.05 s"):
        courier.wait_sent()
    servers.gate.set()
    courier.close()
    assert servers.closed.wait(30.0)

"""What a graph would read from the host at every replay is not captured. (Capturing itself needs a GPU.)"""

import pytest

from evenstep.engine import capture


class Graph:
    def __init__(self):
        self.instantiated = False

    def raw_cuda_graph(self):
        return 7

    def instantiate(self):
        self.instantiated = True


class Driver:
    touched: tuple = ()

    def touches_host(self, graph):
        assert graph == 7
        return self.touched


@pytest.fixture
def touches(monkeypatch):
    """Sets which addresses of the host a graph copies from; 1000 is pinned memory of ours."""
    monkeypatch.setattr(capture, "Driver", Driver)
    monkeypatch.setattr(capture.pinned, "holds", lambda address: address == 1000)
    return lambda *addresses: monkeypatch.setattr(Driver, "touched", addresses)


def test_a_graph_that_stays_with_its_device_or_uses_our_memory_is_made_ready(touches):
    for addresses in ((), (1000, 1000)):
        graph = Graph()
        touches(*addresses)
        capture._check(graph)
        assert graph.instantiated


@pytest.mark.parametrize("address", [None, 2000])
def test_any_other_memory_of_the_host_is_refused(touches, address):
    graph = Graph()
    touches(1000, address)
    with pytest.raises(RuntimeError, match="it copies between host and device inside"):
        capture._check(graph)
    assert not graph.instantiated


def test_where_torch_lets_nobody_look_there_is_nothing_to_see():
    capture._check(object())

"""What a graph would read from the host is not captured; how replays are queued. (Capturing itself needs a GPU.)"""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

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


class Stream:
    """A stream that writes down what it is told."""

    def __init__(self, name, log):
        self.name, self._log = name, log

    def wait_stream(self, other):
        self._log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self._log.append(f"{self.name} waits for {event.name}")


@pytest.fixture
def recorder(monkeypatch):
    """A recorder of two shards at a time whose device only writes down what it is told, and that log."""
    log, names = [], iter(range(100))
    current = Stream("main", log)

    class Event:
        def __init__(self, *, blocking):
            assert blocking, "a host that waits leaves the processor to others"
            self.name = f"replay {next(names)}"

        def record(self, stream):
            log.append(f"{stream.name} ends {self.name}")

        def synchronize(self):
            log.append(f"the host waits for {self.name}")

    streams = iter("ab")
    fake = {
        "Stream": lambda device: Stream(next(streams), log),
        "Event": Event,
        "stream": lambda stream: nullcontext(),
        "current_stream": lambda device: current,
        "graph_pool_handle": object,
    }
    for name, value in fake.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return capture.CudaRecorder(torch.device("cuda"), overlap=True), log


def recording_of(recorder, tracks):
    graph = SimpleNamespace(replay=lambda: None)
    copies = [capture._TrackGraphs(track, graph, graph, [], [], capture.Products(None, [], []), 0) for track in tracks]
    return capture._Recording(copies, recorder._turns)


def test_two_shards_run_on_streams_of_their_own_and_are_joined(recorder):
    recorder, log = recorder
    recording = recording_of(recorder, recorder._pair)
    first, second = (recording.replay([], [], lambda numbers: None) for _ in range(2))
    assert log == ["a waits for main", "a ends replay 0", "b waits for main", "b ends replay 1"]
    first.join()
    second.join()
    assert log[4:] == ["main waits for replay 0", "main waits for replay 1"]


def test_a_step_that_is_one_piece_stays_on_the_current_stream(recorder):
    recorder, log = recorder
    products = recording_of(recorder, recorder._alone).replay([], [], lambda numbers: None)
    assert products.join is None
    assert log == ["main waits for main", "main ends replay 0"]


def test_the_host_waits_for_the_oldest_replay_when_four_are_queued(recorder):
    recorder, log = recorder
    recording = recording_of(recorder, recorder._pair)
    for _ in range(6):
        recording.replay([], [], lambda numbers: None)
    assert [line for line in log if line.startswith("the host")] == [
        "the host waits for replay 0",
        "the host waits for replay 1",
    ]
    assert log.index("the host waits for replay 0") == log.index("b ends replay 3") + 1

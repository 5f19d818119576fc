"""Links between machines that are threads of one process: queues, which can be cut."""

import queue
import threading

import torch

from evenstep.transport.links import CHANNELS


class Network:
    """So many machines; `links[m]` are the ends of machine m."""

    def __init__(self, count):
        self.queues = {
            (a, b, channel): queue.SimpleQueue()
            for a in range(count)
            for b in range(count)
            for channel in range(CHANNELS)
        }
        self.cut = threading.Event()
        self.deaf = set()  # (from, to): what is sent there is gone, and nobody is told
        self.sent = dict.fromkeys(self.queues, 0)  # messages
        self.expected = dict.fromkeys(self.queues, 0)  # messages that somebody waits for, or has waited for
        self.held = {}  # ways on which nothing arrives until it may
        self.links = [FakeLinks(self, machine, count) for machine in range(count)]

    def hold(self, source, target, channel):
        """Let nothing arrive there until the event that is returned is set."""
        return self.held.setdefault((source, target, channel), threading.Event())


class FakeLinks:
    def __init__(self, network, machine, count):
        self._network, self.machine, self.count = network, machine, count

    def send(self, machine, channel, data):
        if self._network.cut.is_set():
            raise RuntimeError("the network is cut")
        self._network.sent[self.machine, machine, channel] += 1
        if (self.machine, machine) not in self._network.deaf:
            self._network.queues[self.machine, machine, channel].put(data.clone())
        return self

    def wait(self):
        pass

    def receive(self, machine, channel, data):
        self._network.expected[machine, self.machine, channel] += 1
        return Arrival(self._network, (machine, self.machine, channel), data)


class Arrival:
    def __init__(self, network, way, data):
        self._network, self._way, self._data = network, way, data

    def wait(self):
        if self._way in self._network.held:
            assert self._network.held[self._way].wait(30.0)
        while not self._network.cut.is_set():
            try:
                found = self._network.queues[self._way].get(timeout=0.02)
            except queue.Empty:
                continue
            assert len(found) == len(self._data), "as many bytes are received as were sent"
            self._data.copy_(found)
            return
        raise RuntimeError("the network is cut")


def data(*values):
    """Bytes."""
    return torch.tensor(values, dtype=torch.uint8)

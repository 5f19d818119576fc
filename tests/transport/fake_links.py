"""Links between machines that are threads of one process: queues, which can be cut."""

import queue
import threading

import torch

from evenstep.transport.links import LANES


class Network:
    """So many machines; `links[m]` are the ends of machine m."""

    def __init__(self, count):
        self.queues = {
            (a, b, lane): queue.SimpleQueue() for a in range(count) for b in range(count) for lane in range(LANES)
        }
        self.cut = threading.Event()
        self.deaf = set()  # (from, to): what is sent there is gone, and nobody is told
        self.sent = dict.fromkeys(self.queues, 0)  # messages
        self.links = [FakeLinks(self, machine, count) for machine in range(count)]


class FakeLinks:
    def __init__(self, network, machine, count):
        self._network, self.machine, self.count = network, machine, count

    def send(self, machine, lane, data):
        if self._network.cut.is_set():
            raise RuntimeError("the network is cut")
        self._network.sent[self.machine, machine, lane] += 1
        if (self.machine, machine) not in self._network.deaf:
            self._network.queues[self.machine, machine, lane].put(data.clone())
        return self

    def wait(self):
        pass

    def receive(self, machine, lane, data):
        while not self._network.cut.is_set():
            try:
                found = self._network.queues[machine, self.machine, lane].get(timeout=0.02)
            except queue.Empty:
                continue
            assert len(found) == len(data), "as many bytes are received as were sent"
            data.copy_(found)
            return
        raise RuntimeError("the network is cut")


def data(*values):
    """Bytes."""
    return torch.tensor(values, dtype=torch.uint8)

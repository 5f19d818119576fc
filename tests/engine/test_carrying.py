"""State on its way to other machines: neighbouring ranges together, large ones in pieces; and who waits for it."""

import torch

from evenstep.engine.carrying import BetweenMachines
from evenstep.exchange.bridged import EVERYONE
from evenstep.plan.sites import Sites
from evenstep.transport.segment import Segment


class FakePuts:
    def __init__(self):
        self.puts, self.waits = [], []

    def put_range(self, machine, offset, num_bytes, word, value):
        self.puts.append((machine, offset, num_bytes, value))

    def wait(self, ready, what):
        self.waits.append(ready())


class FakeGroup:
    def __init__(self, rank, machines):
        self.rank, self.machines, self.exchanges, self.told = rank, machines, 5, []

    def barrier(self, tag):
        self.exchanges += 1

    def tell(self, event):
        self.told.append(event)


def spread(segment, machines, tensors, source, only=None):
    """What every worker puts, and whether it waits."""
    found = []
    for rank in range(len(machines)):
        puts = FakePuts()
        ways = BetweenMachines(FakeGroup(rank, machines), puts, segment.memory)
        ways.spread("values", tensors, source, Sites.of(rank, machines), only)
        found.append((puts.puts, puts.waits))
    return found


def test_the_tensors_of_one_worker_go_to_everyone_in_few_ranges():
    segment = Segment.create(1)
    region = segment.memory.reserve(4096)
    tensors = [region.tensor(torch.Size([size]), torch.float32) for size in (3, 100, 5)]
    far = segment.memory.reserve(9 << 20).tensor(torch.Size([9 << 18]), torch.float32)
    found = spread(segment, [0, 0, 1, 1], [*tensors, far, torch.empty(0)], 1)
    puts = found[1][0]
    assert [(machine, size) for machine, _, size, _ in puts] == [
        (EVERYONE, 64 + 448 + 20),
        (EVERYONE, 4 << 20),
        (EVERYONE, 4 << 20),
        (EVERYONE, 1 << 20),
    ]
    assert [value for *_, value in puts] == [7 << 32 | n for n in (1, 2, 3, 4)]
    assert [waits for _, waits in found] == [[], [], [False], []], "the first worker of each other machine waits"
    segment.close()


def test_only_machines_that_lack_the_state_are_given_it():
    segment = Segment.create(1)
    tensor = segment.memory.reserve(64).tensor(torch.Size([4]), torch.float32)
    found = spread(segment, [0, 0, 1, 1, 2], [tensor], 0, only=[1])
    assert [machine for machine, *_ in found[0][0]] == [1]
    assert [waits for _, waits in found] == [[], [], [False], [], []]
    segment.close()

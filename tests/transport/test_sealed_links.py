"""What is altered on its way is noticed by whoever receives it, and named; what is not goes through as it is."""

import pytest
import torch
from fake_links import Network

from evenstep.transport.links import HEADS, RANGES, WORDS, SealedLinks

SIZES = (0, 1, 7, 4096, 1 << 16, (1 << 16) + 1, 300_000)


def ends():
    network = Network(2)
    return network, [SealedLinks(links) for links in network.links]


@pytest.mark.parametrize("channel", [WORDS, HEADS])
def test_messages_of_any_size_arrive_as_they_were_in_their_order(channel):
    network, (here, there) = ends()
    assert (here.machine, there.machine, here.count) == (0, 1, 2)
    sent = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in SIZES]
    for each in sent:
        here.send(1, channel, each).wait()
    for each in sent:
        found = torch.zeros_like(each)
        there.receive(0, channel, found).wait()
        assert torch.equal(found, each)
    assert sum(network.sent.values()) == len(SIZES) + 2, "only long ones take two messages"


@pytest.mark.parametrize("size", SIZES)
def test_one_bit_is_enough_also_of_the_checksum(size):
    for place in {0, size // 2, max(size - 1, 0), size + 3}:
        network, (here, there) = ends()
        here.send(1, WORDS, torch.zeros(size, dtype=torch.uint8)).wait()
        messages = network.queues[0, 1, WORDS]
        parts = [messages.get() for _ in range(messages.qsize())]
        part, at = (parts[-1], place - len(parts[0])) if place >= len(parts[0]) else (parts[0], place)
        part[at] ^= 4
        for each in parts:
            messages.put(each)
        with pytest.raises(
            RuntimeError, match=rf"not what was sent.*alters data \({size} bytes from machine 0 to machine 1\)"
        ):
            there.receive(0, WORDS, torch.empty(size, dtype=torch.uint8)).wait()


def test_ranges_travel_as_they_are():
    network, (here, there) = ends()
    here.send(1, RANGES, torch.arange(9, dtype=torch.uint8)).wait()
    found = torch.empty(9, dtype=torch.uint8)
    there.receive(0, RANGES, found).wait()
    assert found.tolist() == list(range(9))
    assert sum(network.sent.values()) == 1


def test_a_machine_that_is_lost_is_lost():
    network, (_, there) = ends()
    network.cut.set()
    with pytest.raises(RuntimeError, match="the network is cut"):
        there.receive(0, WORDS, torch.empty(8, dtype=torch.uint8)).wait()

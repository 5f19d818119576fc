"""What is altered on its way is noticed by whoever receives it, and named; what is not goes through as it is."""

import pytest
import torch
from fake_links import Network

from evenstep.transport.links import HEADS, RANGES, REST, SEAL_BYTES, WORDS, SealedLinks

SIZES = (0, 8, 4096, 300_000)


def ends():
    network = Network(2)
    return network, [SealedLinks(links) for links in network.links]


def message(size):
    """Bytes, and room for their checksum."""
    return torch.randint(0, 256, (size + SEAL_BYTES,), dtype=torch.uint8)


@pytest.mark.parametrize("channel", [WORDS, REST, HEADS])
def test_messages_of_any_size_arrive_as_they_were_in_their_order(channel):
    network, (here, there) = ends()
    assert (here.machine, there.machine, here.count) == (0, 1, 2)
    sent = [message(size) for size in SIZES]
    for each in sent:
        here.send(1, channel, each).wait()
    for each in sent:
        found = torch.zeros_like(each)
        there.receive(0, channel, found).wait()
        assert torch.equal(found[:-SEAL_BYTES], each[:-SEAL_BYTES])
    assert sum(network.sent.values()) == len(SIZES)


@pytest.mark.parametrize("size", SIZES)
def test_one_bit_is_enough_also_of_the_checksum(size):
    for place in {0, size // 2, max(size - 1, 0), size + 3}:
        network, (here, there) = ends()
        here.send(1, WORDS, message(size)).wait()
        messages = network.queues[0, 1, WORDS]
        part = messages.get()
        part[place] ^= 4
        messages.put(part)
        with pytest.raises(
            RuntimeError, match=rf"not what was sent.*alters data \({size} bytes from machine 0 to machine 1\)"
        ):
            there.receive(0, WORDS, message(size)).wait()


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

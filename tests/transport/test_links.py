"""Links by gloo between threads of this process: order, size, channels."""

import threading

import pytest
import torch
from torch import distributed as dist

from evenstep.core.errors import ConfigError
from evenstep.transport.links import RANGES, WORDS, GlooLinks, check_backend


def connected(count, address="127.0.0.1"):
    store, made = dist.HashStore(), [None] * count

    def connect(machine):
        made[machine] = GlooLinks(store, machine, count, address, 20.0)

    threads = [threading.Thread(target=connect, args=(machine,)) for machine in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    return made


def test_bytes_come_in_order_on_each_lane_and_lanes_do_not_wait_for_each_other():
    links = connected(3)
    large = torch.arange(300_000, dtype=torch.int32).view(torch.uint8)
    under_way = [links[0].send(1, RANGES, large)]
    under_way += [links[0].send(1, WORDS, torch.full((10,), number, dtype=torch.uint8)) for number in range(5)]
    under_way += [links[2].send(1, WORDS, torch.full((10,), 9, dtype=torch.uint8))]
    found = torch.empty(10, dtype=torch.uint8)
    links[1].receive(2, WORDS, found).wait()
    assert found.tolist() == [9] * 10
    for number in range(5):
        links[1].receive(0, WORDS, found).wait()
        assert found.tolist() == [number] * 10
    there = torch.empty_like(large)
    links[1].receive(0, RANGES, there).wait()
    assert torch.equal(there, large)
    for each in under_way:
        each.wait()


def test_machines_that_do_not_come_are_not_waited_for_for_ever():
    with pytest.raises(RuntimeError):
        GlooLinks(dist.HashStore(), 0, 2, "127.0.0.1", 0.2)


@pytest.mark.parametrize(("backend", "says"), [("carrier", "expected one of gloo, nccl"), ("mpi", "has no mpi")])
def test_a_backend_that_there_is_not_is_refused(backend, says):
    with pytest.raises(ConfigError, match=says):
        check_backend(backend)
    check_backend("gloo")

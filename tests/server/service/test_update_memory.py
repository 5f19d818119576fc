"""What clients may be sending at once is bounded, and memory is reused once nothing holds it."""

import threading

import pytest
import torch

from evenstep.core.errors import RefusedError
from evenstep.server.service.update_memory import UpdateMemory


def test_one_update_always_fits_however_large():
    memory = UpdateMemory()
    memory.take(1000, most_bytes=10, wait_s=0.0)
    with pytest.raises(RefusedError, match="busy with the updates of others; try again") as caught:
        memory.take(1, most_bytes=10, wait_s=0.01)
    assert caught.value.status == 503
    memory.give(1000)
    memory.take(1, most_bytes=10, wait_s=0.0)


def test_several_fit_up_to_the_bound():
    memory = UpdateMemory()
    memory.take(4, most_bytes=10, wait_s=0.0)
    memory.take(6, most_bytes=10, wait_s=0.0)
    with pytest.raises(RefusedError):
        memory.take(1, most_bytes=10, wait_s=0.0)


def test_an_update_waits_until_there_is_room():
    memory = UpdateMemory()
    memory.take(8, most_bytes=10, wait_s=0.0)
    taken = threading.Event()

    def wait():
        memory.take(8, most_bytes=10, wait_s=30.0)
        taken.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not taken.wait(0.02)
    memory.give(8)
    thread.join(30.0)
    assert taken.is_set()


def test_memory_is_reused_for_an_update_of_the_same_size_only():
    memory = UpdateMemory()
    first = memory.area(4096)
    memory.recycle(first, lasting=False)
    assert memory.area(8192) is not first
    assert memory.area(4096) is first
    assert memory.area(4096) is not first, "it is in use again"


def test_memory_that_a_tensor_is_made_of_is_left_to_it():
    memory = UpdateMemory()
    area = memory.area(64)
    tensor = torch.frombuffer(area.data, dtype=torch.uint8)
    memory.recycle(area, lasting=False)
    assert memory.area(64) is not area
    assert tensor.numel() == 64

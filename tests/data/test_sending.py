"""Batches on their way: the same parts in the same order, loaded as far ahead as was asked for."""

import threading

import pytest
import torch

from evenstep.data.batch import Batch
from evenstep.data.sending import sent

CPU = torch.device("cpu")


def batches(log, count=4):
    for number in range(count):
        log.append(number)
        part = {"x": torch.full((2,), float(number)), "name": "a"}
        yield Batch(f"batch {number}", [2, 2], lambda shard, number=number: (number, shard), {0: part})


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_batches_come_in_order_and_so_many_are_loaded_ahead(ahead):
    log = []
    for number, batch in enumerate(sent(batches(log), CPU, ahead)):
        assert log == list(range(min(number + ahead + 1, 4)))
        assert batch.part(0)["x"].tolist() == [number, number]
        assert batch.part(0)["name"] == "a"


def test_what_was_not_loaded_ahead_is_loaded_when_it_is_asked_for():
    batch = next(sent(batches([]), CPU, 0))
    assert batch.part(1) == (0, 1)


def test_the_thread_ends_with_the_iterator():
    coming = sent(batches([]), CPU, 1)
    next(coming)
    assert any(thread.name.startswith("evenstep-sends") for thread in threading.enumerate())
    coming.close()
    assert not any(thread.name.startswith("evenstep-sends") for thread in threading.enumerate())

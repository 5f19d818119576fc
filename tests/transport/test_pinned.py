"""Pinned words stay where they are once they were taken; memory for more is made only where it may be."""

from types import SimpleNamespace

import pytest
import torch

from evenstep.transport import pinned


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Chunks of 16 words, of ordinary memory; none so far."""
    ordinary = SimpleNamespace(int64=torch.int64, empty=lambda n, dtype, pin_memory: torch.empty(n, dtype=dtype))
    monkeypatch.setattr(pinned, "torch", ordinary)
    monkeypatch.setattr(pinned, "_WORDS", 16)
    monkeypatch.setattr(pinned, "_chunks", [])
    monkeypatch.setattr(pinned, "_used", 0)


def test_what_is_taken_is_a_copy_of_its_own():
    pinned.make_room()
    table = torch.arange(6).view(2, 3)
    first = pinned.take(table)
    table += 100
    second = pinned.take(table)
    assert first.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert second.tolist() == [[100, 101, 102], [103, 104, 105]]
    assert second.data_ptr() == first.data_ptr() + first.nbytes


def test_there_is_no_room_before_it_is_made_or_once_it_is_used_up():
    with pytest.raises(RuntimeError, match="more pinned memory than there is"):
        pinned.take(torch.zeros(1, dtype=torch.int64))
    pinned.make_room()
    pinned.take(torch.zeros(16, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="more pinned memory than there is"):
        pinned.take(torch.zeros(1, dtype=torch.int64))


def test_room_is_made_when_half_is_used_and_what_was_taken_stays():
    pinned.make_room()
    kept = pinned.take(torch.arange(8))
    pinned.make_room()
    assert len(pinned._chunks) == 1
    pinned.take(torch.zeros(1, dtype=torch.int64))
    pinned.make_room()
    assert len(pinned._chunks) == 2
    pinned.take(torch.full((16,), 7))
    assert kept.tolist() == list(range(8))


def test_an_address_is_known_by_any_chunk_that_holds_it():
    pinned.make_room()
    first = pinned.take(torch.zeros(9, dtype=torch.int64))
    pinned.make_room()
    second = pinned.take(torch.zeros(16, dtype=torch.int64))
    elsewhere = torch.zeros(16, dtype=torch.int64)
    assert pinned.holds(first.data_ptr())
    assert pinned.holds(second.data_ptr() + second.nbytes - 1)
    assert not pinned.holds(elsewhere.data_ptr())

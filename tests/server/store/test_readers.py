"""Readers and writers of large parameters: nobody waits for long, and nobody sees a mixture."""

import threading
import time

import torch

from evenstep.server.store import readers
from evenstep.server.store.commits import First
from evenstep.server.store.options import StoreOptions
from evenstep.server.store.rounds import Contribution
from evenstep.server.store.store import Store


def large():
    store = Store(StoreOptions(staleness=None))
    store.put(First({"w": torch.zeros(1 << 20)}, "owner"))
    store.register("w")
    return store


def test_an_update_of_large_parameters_waits_for_readers_and_makes_no_copy(monkeypatch):
    monkeypatch.setattr(readers, "_DRAIN_S", 60.0)
    store = large()
    view = store.readers.get()
    threading.Timer(0.05, view.close).start()
    store.decider.update("w", 1, "delta", Contribution({"w": torch.full((1 << 20,), -1.0)}))
    assert store.status()["copies"] == 1
    with store.readers.get() as after:
        assert (after.version, float(after.tensors["w"][-1])) == (1, 1.0)
    store.close()


def test_a_reader_that_stays_holds_nobody_back_for_long():
    store = large()
    begin = time.monotonic()
    with store.readers.get() as view:
        store.decider.update("w", 1, "delta", Contribution({"w": torch.full((1 << 20,), -1.0)}))
        with store.readers.get() as after:
            assert (after.version, float(after.tensors["w"][-1])) == (1, 1.0)
        assert (view.version, float(view.tensors["w"][-1])) == (0, 0.0), "what it reads does not change"
    assert time.monotonic() - begin < 10
    assert store.status()["copies"] == 2
    store.close()

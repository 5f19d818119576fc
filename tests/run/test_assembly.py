"""Opening the parts of a run: whichever fails, nothing stays open, and the next run is as if there had been none."""

import gc
import os
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import evenstep
import processes
from evenstep.core import points
from evenstep.engine import determinism, step
from evenstep.run import agreement, assembly, join, kinds, unclosed
from evenstep.server import ParameterServer


class BrokenError(Exception):
    """What a part of a run fails with."""


def fail(*_, **__):
    raise BrokenError("this part is broken")


PARTS = [
    (join.Segment, "create"),
    (join.Group, "around"),
    (join, "Ledger"),
    (assembly, "RunOperations"),
    (kinds, "Holdings"),
    (kinds, "OwnUpdates"),
    (kinds, "Nobody"),
    (kinds, "Engine"),
    (step, "Context"),
    (step, "Compute"),
    (step, "Sharing"),
    (step, "Intake"),
    (step, "Determinism"),
    (determinism.torch, "use_deterministic_algorithms"),
    (assembly, "Voice"),
    (assembly, "DigestWriter"),
    (assembly, "Saving"),
    (assembly, "Meter"),
    (assembly, "Feed"),
    (assembly, "Evaluation"),
    (points, "reach"),
    (agreement, "profile"),
    (assembly, "Display"),
    (unclosed, "opened"),
    (assembly, "seed_all"),
]


def open_things():
    """Descriptors, threads, and what of torch a run changes."""
    gc.collect()  # a mapping is there as long as the frames that an error shows
    descriptors = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)}
    pinned = (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark)
    return descriptors, [thread.name for thread in threading.enumerate()], pinned


def _is_open(fd):
    return os.path.exists(f"/proc/self/fd/{fd}") or os.path.islink(f"/proc/self/fd/{fd}")


def train(**options):
    with evenstep.Run(shards=4, quiet=True, **options) as opened:
        model = nn.Linear(3, 2)
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
        data = TensorDataset(torch.randn(12, 3), torch.arange(12) % 2)
        for batch in opened.batches(data, batch_size=6, epochs=2):
            opened.step(batch, lambda part: F.cross_entropy(model(part[0]), part[1]))
        return opened.fingerprint()


@pytest.fixture(scope="module")
def expected():
    """What a training ends on before anything has failed."""
    return train()


@pytest.mark.parametrize(("where", "part"), PARTS, ids=[part for _, part in PARTS])
def test_a_run_that_cannot_be_made_leaves_nothing_open_whichever_part_fails(where, part, monkeypatch, expected):
    before = open_things()
    with monkeypatch.context() as patch:
        patch.setattr(where, part, fail if part != "use_deterministic_algorithms" else _fail_once(getattr(where, part)))
        with pytest.raises(BrokenError):
            evenstep.Run(shards=4, threads=2)
    assert open_things() == before
    assert not unclosed._open
    assert train() == expected


def _fail_once(function):
    """Settings are put back by what has failed to put them."""
    calls = []

    def call(*arguments, **options):
        calls.append(1)
        return fail() if len(calls) == 1 else function(*arguments, **options)

    return call


@pytest.mark.parametrize("aggregate", [True, False])
@pytest.mark.parametrize(
    "part", [(kinds, "Engine"), (assembly, "Saving"), (agreement, "profile")], ids=lambda part: part[1]
)
def test_the_connection_to_a_server_is_closed_too(part, aggregate, monkeypatch):
    model = nn.Linear(3, 2)
    with ParameterServer(model, torch.optim.SGD(model.parameters(), 0.1), transports=("tcp",)) as server:
        before = open_things()[0]
        with monkeypatch.context() as patch:
            patch.setattr(*part, fail)
            with pytest.raises(BrokenError):
                evenstep.Run(server=evenstep.Server(server.url, aggregate=aggregate), timeout_s=5)

        def ours(kind):
            return [link for fd, link in open_things()[0].items() if fd not in before and kind in link]

        assert not ours("memfd")
        assert processes.until(lambda: not ours("socket")), "the server's end may take a moment"

"""Meetings on the queue of a GPU, without one: the kernel is a few lines of Python around the same addresses.

What is tested is all but the kernel: who can meet, what it is told of the others, and what becomes of what it finds.
"""

import ctypes
import os
import time
from types import SimpleNamespace

import pytest
import torch
from fakes import FakeFixed, FakeRounds, Table, together

from evenstep.core.errors import MismatchError, PeerError, SilenceError
from evenstep.exchange import meetings as module
from evenstep.exchange.group import Group
from evenstep.exchange.meetings import Meetings, can_meet
from evenstep.transport.segment import Segment
from evenstep.transport.windows import HostWindows

CPU = torch.device("cpu")


class Kernel:
    """The contract of `meeting_kernel.meet`, for one program: give words to all, and take theirs."""

    def __init__(self, pace_s=1e-4):
        self.tags, self._pace_s = [], pace_s

    def __getitem__(self, grid):
        return self._meet

    def _meet(self, rows, out, state, own, stop, peers, num_mine, place, num_peers, tag, limit, HEAD, SLOT, **_):
        self.tags.append(tag)
        number = int(state[0, 0]) + 1
        odd, mine = number % 2, _words(own)
        for n, word in enumerate(rows.flatten().tolist()):
            mine[HEAD + odd * SLOT + n] = word
        out.flatten()[place : place + num_mine] = rows.flatten()
        mine[1 + odd], mine[0] = tag, number
        for address, count, there in peers.tolist():
            theirs, looked = _words(address), 0
            while theirs[0] < number and looked < limit and not _words(stop)[0]:
                looked += 1
                time.sleep(self._pace_s)
            wrong = 1 if theirs[0] < number else 0 if theirs[1 + odd] == tag else 2
            state[0, 1] = max(int(state[0, 1]), wrong)
            found = [theirs[HEAD + odd * SLOT + n] for n in range(count)]
            out.flatten()[there : there + count] = torch.tensor(found, dtype=torch.int64)
        state[0, 0] = number


def _words(address):
    return ctypes.cast(address, ctypes.POINTER(ctypes.c_int64))


class Cudart:
    """Memory that can be pinned, or not; keeps what is pinned."""

    def __init__(self, code=0):
        self.code, self.pinned = code, []

    def cudaHostRegister(self, address, *_):
        self.pinned += [] if self.code else [address]
        return self.code

    def cudaHostUnregister(self, address):
        self.pinned.remove(address)


class Event:
    """Something that the device comes to after so many looks."""

    def __init__(self, looks=0):
        self._looks = looks

    def record(self):
        pass

    def query(self):
        self._looks -= 1
        return self._looks < 0


@pytest.fixture
def cuda(monkeypatch):
    """A GPU that is not there."""
    found = SimpleNamespace(kernel=Kernel(), cudart=Cudart())
    monkeypatch.setattr(module, "_kernel", lambda: SimpleNamespace(meet=found.kernel))
    monkeypatch.setattr(module, "_cudart", lambda: found.cudart)
    monkeypatch.setattr(module, "PeerWindows", HostWindows)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return found


@pytest.fixture
def meet(cuda):
    """Runs a body for each of so many workers, with the meetings of each."""
    fds = []

    def run(num_workers, body, timeout_s=5.0):
        fds.append(Segment.create(num_workers).fd)
        table = Table()
        groups = [
            Group(Segment(fds[-1]), FakeRounds(table, w, timeout_s), FakeFixed(num_workers)) for w in range(num_workers)
        ]

        def one(group):
            meetings = Meetings(group, CPU)
            try:
                group.barrier("all have one")
                return body(group, meetings)
            finally:
                if table.failure is None:
                    group.barrier("nobody meets any more")
                meetings.close()

        return together(groups, one)

    yield run
    for fd in fds:
        os.close(fd)


def rows_of(rank, count, width=3):
    return torch.arange(count * width, dtype=torch.float64).view(count, width) + 100 * rank


@pytest.mark.parametrize("shares", [(1, 1, 1), (2, 0, 3), (0, 4, 1)])
def test_everyone_has_the_rows_of_all_in_order_again_and_again(meet, shares):
    expected = torch.cat([rows_of(rank, share) for rank, share in enumerate(shares)])

    def body(group, meetings):
        found = []
        for n in range(4):
            mine = rows_of(group.rank, shares[group.rank]) + n
            if shares[group.rank]:
                found.append(meetings.gather(f"step {n}: layer 1", mine, shares))
        meetings.check()
        return found

    for rank, found in enumerate(meet(3, body)):
        assert len(found) == (4 if shares[rank] else 0)
        assert all(torch.equal(each, expected + n) for n, each in enumerate(found))


def test_the_number_of_a_step_is_no_part_of_where_workers_meet(meet, cuda):
    meet(2, lambda group, m: [m.gather(f"step {n}: layer 1", rows_of(0, 1), (1, 1)) for n in (7, 8)])
    assert len(set(cuda.kernel.tags)) == 1, "or a captured graph could not be replayed"


def test_two_workers_in_two_layers_are_told_so(meet):
    def body(group, meetings):
        meetings.gather(f"layer {group.rank}", rows_of(0, 1), (1, 1))
        with pytest.raises(MismatchError, match=f"worker {group.rank} met another worker in another layer"):
            meetings.check()

    meet(2, body)


def test_whoever_does_not_come_within_the_timeout_is_missed(meet, monkeypatch):
    monkeypatch.setattr(module, "_LOOKS_A_SECOND", 10)

    def body(group, meetings):
        if group.rank == 0:
            meetings.gather("layer 1", rows_of(0, 1), (1, 1))
            with pytest.raises(
                SilenceError, match="did not come to a layer that spans shards within 5 s, where worker 0"
            ):
                meetings.check()

    meet(2, body)


def test_a_lost_peer_ends_the_wait_of_the_kernel_and_comes_before_its_silence(meet):
    def body(group, meetings):
        if group.rank == 1:
            group.fail("killed")
            return None
        with pytest.raises(PeerError):
            meetings.wait(Event(looks=10**5))
        began = time.monotonic()
        meetings.gather("layer 1", rows_of(0, 1), (1, 1))
        with pytest.raises(PeerError):
            meetings.check()
        return time.monotonic() - began

    assert meet(2, body, timeout_s=60.0)[0] < 10.0


def test_rows_that_do_not_fit_go_another_way(meet):
    def body(group, meetings):
        assert meetings.takes(rows_of(0, 1), (1, 1))
        assert not meetings.takes(rows_of(0, 1).float(), (1, 1)), "of 8 bytes only"
        width = module._SLOT_WORDS // 2
        assert meetings.takes(torch.empty(1, width, dtype=torch.float64), (1, 2))
        assert not meetings.takes(torch.empty(1, width, dtype=torch.float64), (1, 3)), "the largest share counts"

    meet(2, body)


def test_memory_that_cannot_be_pinned_or_shared_shuts_the_meetings_of_all(meet, cuda, monkeypatch):
    cuda.cudart.code = 2
    assert meet(2, lambda group, meetings: meetings.open) == [False, False]
    cuda.cudart.code = 0
    monkeypatch.setattr(module, "PeerWindows", type("Others", (), {}))
    assert meet(2, lambda group, meetings: meetings.open) == [False, False]


def test_closing_lets_go_of_pinned_memory(meet, cuda):
    def body(group, meetings):
        assert meetings.open
        group.barrier("both have pinned theirs")
        assert len(cuda.cudart.pinned) == 2

    meet(2, body)
    assert cuda.cudart.pinned == []


@pytest.mark.parametrize(
    ("changes", "device", "expected"),
    [
        ({}, "cuda", True),
        ({}, "cpu", False),
        ({"num_workers": 1}, "cuda", False),
        ({"num_machines": 2}, "cuda", False),
        ({"elastic": False}, "cuda", False),
    ],
)
def test_workers_meet_on_gpus_of_one_machine_where_somebody_watches(cuda, changes, device, expected):
    group = SimpleNamespace(**{"num_workers": 2, "num_machines": 1, "elastic": True} | changes)
    assert can_meet(group, torch.device(device)) == expected


def test_without_triton_nobody_meets(cuda, monkeypatch):
    monkeypatch.setattr(module, "_kernel", lambda: None)
    assert not can_meet(SimpleNamespace(num_workers=2, num_machines=1, elastic=True), torch.device("cuda"))

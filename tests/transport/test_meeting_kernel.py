"""The kernel in which GPUs meet, by Triton's interpreter: it takes what peers gave, and says what went wrong."""

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("a kernel that is compiled meets others on real GPUs", allow_module_level=True)

import triton
import triton.language as tl

from evenstep.transport import meeting_kernel
from evenstep.transport.meeting_kernel import meet

HEAD, SLOT, BLOCK, PROGRAMS = 16, 32, 4, 2
TAG = 77


@triton.jit
def _no_fence():
    tl.debug_barrier()


@pytest.fixture(autouse=True)
def _without_assembly(monkeypatch):
    monkeypatch.setattr(meeting_kernel, "_fence", _no_fence)  # the interpreter knows none; one thread needs no order


class Worker:
    """A window, as a peer left it or as this worker will."""

    def __init__(self):
        self.window = torch.zeros(HEAD + 2 * SLOT, dtype=torch.int64)

    def came(self, number, words, tag=TAG):
        """Leave what a worker leaves that came to its meeting `number`."""
        for program in range(PROGRAMS):
            self.window[8 * program] = number
            self.window[8 * program + 1 + number % 2] = tag
        begin = HEAD + number % 2 * SLOT
        self.window[begin : begin + len(words)] = torch.tensor(words)
        return self


class Meeting:
    """Calls the kernel for one worker, step after step."""

    def __init__(self, limit=1):
        self.me, self.limit = Worker(), limit
        self.state = torch.zeros(PROGRAMS, 2, dtype=torch.int64)
        self.stop = torch.zeros(1, dtype=torch.int64)

    def meet(self, words, place, peers, total):
        """Give words at a place among `total`; peers are (worker, count, place)."""
        out = torch.full((total,), -1)
        table = torch.tensor([[w.window.data_ptr(), count, there] for w, count, there in peers]).view(-1, 3)
        meet[(PROGRAMS,)](
            torch.tensor(words), out, self.state, self.me.window.data_ptr(), self.stop.data_ptr(), table,
            len(words), place, len(peers), TAG, self.limit, HEAD=HEAD, SLOT=SLOT, BLOCK=BLOCK,
        )  # fmt: skip
        return out.tolist()


def test_everyone_has_the_words_of_all_in_their_places():
    meeting, early, late = Meeting(), Worker(), Worker()
    for number in (1, 2, 3):  # even and odd meetings have slots of their own
        mine = [number * 100 + n for n in range(5)]
        peers = [(early.came(number, [number * 10, number * 10 + 1]), 2, 0), (late.came(number, [number] * 11), 11, 7)]
        assert meeting.meet(mine, 2, peers, 18) == [number * 10, number * 10 + 1, *mine, *[number] * 11]
        assert meeting.state.tolist() == [[number, 0]] * PROGRAMS
        found = meeting.me.window
        assert [int(found[8 * p]) for p in range(PROGRAMS)] == [number] * PROGRAMS
        assert [int(found[8 * p + 1 + number % 2]) for p in range(PROGRAMS)] == [TAG] * PROGRAMS
        assert found[HEAD + number % 2 * SLOT :][:5].tolist() == mine


def test_a_peer_that_is_ahead_has_kept_what_it_gave():
    meeting, ahead = Meeting(), Worker()
    ahead.came(1, [4, 5]).came(2, [8, 9])
    ahead.window[1 + 1] = ahead.window[8 + 1 + 1] = TAG
    assert meeting.meet([], 0, [(ahead, 2, 0)], 2) == [4, 5]
    assert meeting.state.tolist() == [[1, 0]] * PROGRAMS


def test_a_peer_that_does_not_come_is_given_up_after_some_looks():
    meeting = Meeting(limit=3)
    meeting.meet([1], 0, [(Worker(), 1, 1)], 2)
    assert meeting.state.tolist() == [[1, 1]] * PROGRAMS


def test_a_peer_that_meets_for_something_else_is_noticed():
    meeting = Meeting()
    meeting.meet([1], 0, [(Worker().came(1, [2], tag=TAG + 1), 1, 1)], 2)
    assert meeting.state.tolist() == [[1, 2]] * PROGRAMS


def test_what_went_wrong_stays_wrong():
    meeting, peer = Meeting(), Worker()
    meeting.meet([1], 0, [(peer.came(1, [2], tag=0), 1, 1)], 2)
    meeting.meet([1], 0, [(peer.came(2, [2]), 1, 1)], 2)
    assert meeting.state.tolist() == [[2, 2]] * PROGRAMS


def test_the_word_to_stop_ends_a_wait_early():
    meeting = Meeting(limit=10**9)
    meeting.stop[0] = 1
    meeting.meet([1], 0, [(Worker(), 1, 1)], 2)
    assert meeting.state.tolist() == [[1, 1]] * PROGRAMS

"""What a group may rely on, for everything that carries its exchanges."""

import time

import pytest
import torch
from fakes import FakeRounds, Table

from evenstep.core.errors import MismatchError, PeerError, SilenceError
from evenstep.exchange.generations import Generation
from evenstep.exchange.slots import Slots


def fake(new_segment):
    table = Table()
    return [FakeRounds(table, worker, timeout_s=0.2) for worker in range(3)]


def slots(new_segment):
    segment = new_segment(3)
    made = [Slots(segment, worker, 0.2) for worker in range(3)]
    for each in made:
        each.begin(Generation(1, 0, [0, 1, 2], None))
    return made


pytestmark = pytest.mark.parametrize("kind", [fake, slots])


def post(end, seq, tag, values):
    data = torch.tensor(values, dtype=torch.float64)
    end.post(seq, tag, data.data_ptr(), data.nbytes, [0, 1, 2])


def collect(end, worker, seq, tag, count, timeout_s=0.2):
    out = torch.empty(count, dtype=torch.float64)
    end.collect(worker, seq, tag, out.data_ptr(), out.nbytes, time.monotonic() + timeout_s)
    return out.tolist()


def test_what_is_posted_is_collected_by_everyone_its_poster_too(kind, new_segment):
    ends = kind(new_segment)
    for number, end in enumerate(ends):
        post(end, 1 << 32, "a", [float(number)] * number)
    for end in ends:
        assert [collect(end, worker, 1 << 32, "a", worker) for worker in range(3)] == [[], [1.0], [2.0, 2.0]]


def test_the_memory_of_a_post_may_be_used_again_at_once(kind, new_segment):
    ends = kind(new_segment)
    data = torch.ones(2, dtype=torch.float64)
    ends[0].post(1 << 32, "a", data.data_ptr(), data.nbytes, [0, 1, 2])
    data.zero_()
    assert collect(ends[1], 0, 1 << 32, "a", 2) == [1.0, 1.0]


def test_whoever_does_not_come_ends_the_wait_at_the_deadline(kind, new_segment):
    ends = kind(new_segment)
    with pytest.raises(SilenceError, match="worker 1"):
        collect(ends[0], 1, 1 << 32, "a", 1)


def test_a_worker_is_followed_when_it_has_come_there_or_further(kind, new_segment):
    ends = kind(new_segment)
    post(ends[1], 1 << 32 | 2, "a", [1.0])
    for seq in (1 << 32, 1 << 32 | 1, 1 << 32 | 2):
        ends[0].follow(1, seq, "b", time.monotonic() + 0.2)
    with pytest.raises(SilenceError, match="worker 1"):
        ends[0].follow(1, 1 << 32 | 3, "b", time.monotonic() + 0.2)
    ends[1].fail("a bad day")
    with pytest.raises(PeerError, match="a bad day"):
        ends[0].follow(1, 1 << 32 | 3, "b", time.monotonic() + 0.2)


def test_another_tag_or_size_is_a_mismatch(kind, new_segment):
    ends = kind(new_segment)
    post(ends[1], 1 << 32, "a", [1.0])
    for tag, count in (("b", 1), ("a", 2)):
        with pytest.raises(MismatchError):
            collect(ends[0], 1, 1 << 32, tag, count)


def test_a_failure_reaches_whoever_waits_and_names_the_first_that_failed(kind, new_segment):
    ends = kind(new_segment)
    ends[2].fail("a bad day")
    ends[1].fail("because of that")
    for end in ends[:2]:
        with pytest.raises(PeerError, match="a bad day") as caught:
            collect(end, 2, 1 << 32, "a", 1)
        assert caught.value.worker == 2
        with pytest.raises(PeerError, match="a bad day"):
            end.check()


def test_what_was_posted_before_a_failure_is_still_there(kind, new_segment):
    ends = kind(new_segment)
    post(ends[1], 1 << 32, "a", [1.0])
    ends[2].fail("a bad day")
    assert collect(ends[0], 1, 1 << 32, "a", 1) == [1.0]


def test_while_nobody_has_failed_there_is_nothing_to_check(kind, new_segment):
    ends = kind(new_segment)
    for end in ends:
        end.check()
        end.check_process()
        end.leave()

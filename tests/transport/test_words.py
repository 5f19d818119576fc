"""Messages of words: what is packed on one machine is posted on another, and nothing else is taken for it."""

import pytest
import torch

from evenstep.native import core
from evenstep.transport import words

SEQ = 3 << 32


def post(segment, worker, values):
    data = torch.tensor(values, dtype=torch.float64)
    core.post(segment.base, worker, SEQ, "a tag", data.data_ptr(), data.nbytes)


def posted(segment, worker, count):
    out = torch.empty(count, dtype=torch.float64)
    assert core.collect(segment.base, worker, SEQ, "a tag", out.data_ptr(), out.nbytes, 0, 10**9) == core.ES_OK
    return out.tolist()


@pytest.mark.parametrize("count", [0, 1, 500, 2000])
def test_posts_arrive_as_they_are_in_one_message_or_two(new_segment, count):
    here, there = new_segment(4), new_segment(4)
    for worker in (1, 3):
        post(here, worker, [worker + 0.5] * count)
    first, *rest = words.posts(here.base, SEQ, [1, 3])
    assert len(first) == len(words.empty())
    assert words.failure_in(first) is None
    assert words.rest_of(first) <= sum(map(len, rest)), "without the room for checksums"
    assert len(rest) == (words.rest_of(first) > 0) == (count >= 500)
    words.take_posts(there.base, first, rest[0] if rest else None)
    for worker in (1, 3):
        assert posted(there, worker, count) == [worker + 0.5] * count


def test_a_slot_that_has_something_else_by_now_is_not_sent(new_segment):
    segment = new_segment(4)
    post(segment, 1, [1.0])
    with pytest.raises(AssertionError, match="kept until it has been sent"):
        words.posts(segment.base, SEQ + (2 << 32), [1])


def test_a_failure_and_a_beat_are_told_apart_from_posts(new_segment):
    segment = new_segment(4)
    assert words.failure_in(words.failure(7, "é" * 9000 + " a bad day")) == (7, "é" * 1745 + " a bad day")
    beat = words.beat()
    assert words.failure_in(beat) is None
    words.take_posts(segment.base, beat, None)
    assert core.last_post(segment.base, 0)[0] == 0


@pytest.mark.parametrize(
    ("place", "value"),
    [(0, 5000), (0, 100), (1, 3), (2, 4), (4, 1 << 40), (4, 5000)],
    ids=["longer than it is", "shorter", "more posts", "no such worker", "a huge post", "a post beyond the end"],
)
def test_what_no_bridge_sends_is_refused(new_segment, place, value):
    here, there = new_segment(4), new_segment(4)
    for worker in (1, 3):
        post(here, worker, [1.0])
    (first,) = words.posts(here.base, SEQ, [1, 3])
    first.view(torch.int64)[place] = value
    with pytest.raises(RuntimeError, match="no bridge sends"):
        words.take_posts(there.base, first, None)

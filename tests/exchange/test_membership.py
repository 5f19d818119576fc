"""Who the workers are: the same for ever, or as the supervisor says."""

import json
import os
import threading

import pytest

from evenstep.core.errors import Dismissed, SilenceError
from evenstep.exchange import generations, membership
from evenstep.exchange.generations import Generation
from evenstep.exchange.membership import Fixed, Supervised


@pytest.fixture
def pipe():
    ends = os.pipe()
    os.set_blocking(ends[0], False)
    yield ends
    for fd in ends:
        os.close(fd)


def told(pipe):
    return [json.loads(line) for line in os.read(pipe[0], 65536).splitlines()]


def test_without_a_supervisor_the_workers_are_all_who_have_a_place():
    assert Fixed(3).first == Generation(1, 0, [0, 1, 2], None)
    assert not Fixed(3).elastic


def test_a_worker_says_that_it_waits_and_takes_the_generation_that_names_it(new_segment, pipe):
    segment = new_segment(3)
    worker = Supervised(segment, 1, pipe[1])
    later = [Generation(1, 5, [0], None), Generation(2, 9, [0, 1], [1.0, 2.0])]

    def announce():
        for each in later:
            generations.announce(segment, each)

    threading.Timer(0.05, announce).start()
    assert worker.next(0, 30.0) == later[1]
    assert told(pipe) == [{"waits": 0}]


def test_what_was_announced_before_it_waits_is_not_for_it(new_segment, pipe):
    segment = new_segment(3)
    generations.announce(segment, Generation(1, 0, [1], None))
    threading.Timer(0.05, lambda: generations.announce(segment, Generation(2, 1, [1], None))).start()
    assert Supervised(segment, 1, pipe[1]).next(1, 30.0).number == 2


def test_a_worker_that_is_not_needed_any_more_learns_so(new_segment, pipe):
    segment = new_segment(3)
    threading.Timer(0.05, lambda: generations.announce(segment, Generation(1, 0, [0], None, [1]))).start()
    with pytest.raises(Dismissed):
        Supervised(segment, 1, pipe[1]).next(0, 30.0)


def test_a_supervisor_that_says_nothing_is_given_up(new_segment, pipe, monkeypatch):
    segment = new_segment(3)
    monkeypatch.setattr(membership, "_PATIENCE_S", 0.1)
    with pytest.raises(SilenceError, match="worker 1 waited for a generation, but the supervisor announced none"):
        Supervised(segment, 1, pipe[1]).next(0, 0.0)


def test_a_copy_of_a_worker_tells_nobody_anything(new_segment, pipe):
    segment = new_segment(3)
    worker = Supervised(segment, 1, pipe[1])
    pid = os.fork()
    if pid == 0:
        worker.tell({"error": "of a copy"})
        os._exit(0)
    os.waitpid(pid, 0)
    worker.tell({"made": True})
    assert told(pipe) == [{"made": True}]

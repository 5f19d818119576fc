"""Exchanges over machines as one worker sees them: what leaves its machine, and how it waits for what others put."""

import threading
import time

import pytest
import torch

from evenstep.core.errors import PeerError, SilenceError
from evenstep.exchange.bridged import EVERYONE, Bridged, Puts
from evenstep.exchange.generations import Generation
from evenstep.native import core
from evenstep.transport.outbox import ARRIVED, POST, PUT, Mark, Requests

ROUND = 1 << 32


def bridged(segment, worker=0, timeout_s=30.0):
    """A worker of a generation with workers 0 and 1 here, and 2 on another machine."""
    rounds = Bridged(segment, worker, timeout_s)
    rounds.begin(Generation(3, 0, [0, 1, 2], None, machines=[0, 0, 4]))
    return rounds


def asked(segment):
    return [request for _, _, request in Requests(segment, [0, 1], 3).take()]


def post(rounds, seq, among):
    data = torch.ones(4)
    rounds.post(seq, "a tag", data.data_ptr(), data.nbytes, among)


def test_what_concerns_this_machine_only_stays_here(new_segment):
    segment = new_segment(8)
    rounds = bridged(segment)
    post(rounds, ROUND, [0, 1])
    assert asked(segment) == []
    post(rounds, 2 * ROUND, [0, 1, 2])
    (request,) = asked(segment)
    assert (request.kind, request.seq, request.num_bytes, request.generation) == (POST, 2 * ROUND, 16, 3)
    assert request.local == 2, "it goes when both workers of this machine have posted"


def test_of_an_exchange_of_some_only_those_of_this_machine_who_take_part_are_waited_for(new_segment):
    segment = new_segment(8)
    post(bridged(segment, worker=1), ROUND, [1, 2])
    assert asked(segment)[0].local == 1


def test_a_range_and_its_word_are_named_by_where_they_lie(new_segment):
    segment = new_segment(8)
    rounds, memory = bridged(segment), segment.memory
    words = memory.words(2)
    data = memory.reserve(256).tensor(torch.Size([64]), torch.float32)
    puts = Puts(segment, rounds)
    puts.put(1, data[16:32], words[1:], 7)
    puts.put(EVERYONE, None, words[:1], 8)
    first, second = asked(segment)
    assert (first.kind, first.target, first.num_bytes, first.value) == (PUT, 1, 64, 7)
    assert (first.offset, first.word) == (memory.locate(data[16:32]), memory.locate(words[1:]))
    assert (second.target, second.num_bytes, second.value) == (EVERYONE, 0, 8)


def test_a_wait_ends_when_something_has_arrived(new_segment):
    segment = new_segment(8)
    puts, there = Puts(segment, bridged(segment)), threading.Event()

    def arrive():
        time.sleep(0.05)
        there.set()
        Mark(segment, ARRIVED).bump()

    thread = threading.Thread(target=arrive)
    thread.start()
    puts.wait(there.is_set, "something")
    thread.join()


def test_a_wait_ends_with_the_group_or_with_its_time(new_segment):
    segment = new_segment(8)
    puts = Puts(segment, bridged(segment, timeout_s=0.1))
    with pytest.raises(SilenceError, match=r"worker 0 has waited 0.1 s for the sums of bucket 3"):
        puts.wait(lambda: False, "the sums of bucket 3")
    core.abort_all(segment.base, 8, 2, "machine 4 is lost")
    with pytest.raises(PeerError, match="machine 4 is lost"):
        puts.wait(lambda: False, "anything")


def test_what_was_put_is_flushed_when_the_bridge_says_so(new_segment):
    segment = new_segment(8)
    rounds = bridged(segment, timeout_s=0.1)
    puts = Puts(segment, rounds)
    puts.flush()
    puts.put(EVERYONE, None, segment.memory.words(1), 1)
    with pytest.raises(SilenceError, match="its bridge to take what it has for other machines"):
        puts.flush()
    requests = Requests(segment, [0], 3)
    for worker, number, _ in requests.take():
        requests.is_sent(worker, number)
    puts.flush()


def test_a_wait_leaves_the_core_to_the_bridge_where_there_are_several_machines(new_segment, monkeypatch):
    segment = new_segment(8)
    rounds, data, spins, collect = bridged(segment), torch.ones(4), [], core.collect
    monkeypatch.setattr(core, "collect", lambda *arguments: spins.append(arguments[6]) or collect(*arguments))
    core.post(segment.base, 2, ROUND, "a tag", data.data_ptr(), data.nbytes)
    rounds.collect(2, ROUND, "a tag", data.data_ptr(), data.nbytes, time.monotonic() + 30.0)
    rounds.begin(Generation(4, 0, [0, 2], None, machines=[0, 0]))
    rounds.collect(2, ROUND, "a tag", data.data_ptr(), data.nbytes, time.monotonic() + 30.0)
    assert spins[0] == 0 < spins[1]

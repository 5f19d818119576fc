"""Requests to the bridge: in order, of this generation only, and never more than there is room for."""

import threading
import time

import pytest

from evenstep.native import core
from evenstep.transport.outbox import ARRIVED, EVERYONE, POST, PUT, Mark, Outbox, Request, Requests
from evenstep.transport.segment import Segment


@pytest.mark.parametrize(
    "request_",
    [
        Request(POST, 3, seq=7 << 32 | 2, num_bytes=100, local=256),
        Request(PUT, 1 << 30, 5, offset=1 << 41, num_bytes=1 << 40, word=8, value=1 << 40),
        Request(PUT, 1, EVERYONE),
    ],
)
def test_a_request_is_read_as_it_was_written(request_):
    assert Request.unpack(request_.pack()) == request_
    assert len(request_.pack()) == 8


def test_requests_come_in_the_order_of_each_worker_and_once():
    segment = Segment.create(3)
    boxes = [Outbox(segment, worker) for worker in (0, 2)]
    requests = Requests(segment, [0, 2], generation=1)
    for number in range(5):
        for box in boxes:
            box.push(Request(POST, 1, seq=number))
    found = list(requests.take())
    assert [request.seq for worker, _, request in found if worker == 0] == list(range(5))
    assert [request.seq for worker, _, request in found if worker == 2] == list(range(5))
    assert list(requests.take()) == []
    segment.close()


def test_what_was_asked_for_in_another_generation_is_dropped():
    segment = Segment.create(1)
    box = Outbox(segment, 0)
    box.push(Request(POST, 1, seq=1))
    later = Requests(segment, [0], generation=2)
    Outbox(segment, 0).push(Request(POST, 2, seq=2))  # of the worker that took the place of the first
    assert [request.seq for *_, request in later.take()] == [2]
    segment.close()


def test_the_bridge_is_woken_and_else_waits_only_so_long():
    segment = Segment.create(1)
    box, requests = Outbox(segment, 0), Requests(segment, [0], 1)
    begin = time.monotonic()
    requests.mark.wait(requests.mark.seen(), 0.05)
    assert time.monotonic() - begin >= 0.04
    seen = requests.mark.seen()
    threading.Timer(0.05, lambda: box.push(Request(POST, 1))).start()
    requests.mark.wait(seen, 20.0)
    assert len(list(requests.take())) == 1
    segment.close()


def test_a_full_ring_is_waited_for_unless_the_group_has_failed():
    segment = Segment.create(1)
    box, requests = Outbox(segment, 0), Requests(segment, [0], 1)
    for number in range(1024):
        box.push(Request(POST, 1, seq=number))
    thread = threading.Thread(target=lambda: box.push(Request(POST, 1, seq=1024)))
    thread.start()
    time.sleep(0.02)
    assert thread.is_alive()
    assert len(list(requests.take())) == 1024
    thread.join(30.0)
    assert [request.seq for *_, request in requests.take()] == [1024]
    for number in range(1024):
        box.push(Request(POST, 1, seq=number))
    core.abort_all(segment.base, 0, 0, "a bad day")
    box.push(Request(POST, 1))
    segment.close()


def test_a_worker_can_see_whether_everything_has_left():
    segment = Segment.create(1)
    box, requests = Outbox(segment, 0), Requests(segment, [0], 1)
    assert box.is_empty()
    for _ in range(2):
        box.push(Request(PUT, 1))
    numbers = [number for _, number, _ in requests.take()]
    for number in numbers:
        assert not box.is_empty()
        requests.is_sent(0, number)
    assert box.is_empty()
    box.push(Request(PUT, 0))  # of another generation: it goes nowhere
    assert list(requests.take()) == []
    assert box.is_empty()
    box.push(Request(POST, 1))
    assert box.is_empty(), "the bridge copies what was posted"
    segment.close()


def test_what_a_bridge_that_is_gone_has_not_sent_is_not_waited_for():
    segment = Segment.create(1)
    box = Outbox(segment, 0)
    box.push(Request(PUT, 1))
    assert len(list(Requests(segment, [0], 1).take())) == 1
    assert not box.is_empty()
    box.start_over()
    assert box.is_empty()
    box.push(Request(PUT, 2))
    assert not box.is_empty()
    segment.close()


def test_there_is_a_mark_for_whoever_waits_for_something_to_arrive():
    segment = Segment.create(1)
    first, second = Mark(segment, ARRIVED), Mark(segment, ARRIVED)
    first.bump()
    assert second.seen() == 1
    second.wait(0, 20.0)
    segment.close()

"""What is collected of a machine's workers: whole, of the right process, and with what one was doing when it ended."""

import time

from evenstep.exchange.board import Board
from evenstep.exchange.tracing import Kind, Tracer, unpack
from evenstep.launch.trails import Trails
from evenstep.transport.trail import ROOM_BYTES, Trail


def spans_of(pieces):
    return [(piece.place, piece.pid, span.kind, span.number) for piece in pieces for span in unpack(piece.spans)]


def test_what_a_worker_did_is_its_own_and_not_that_of_who_replaces_it(new_segment):
    segment = new_segment(2)
    trails, board = Trails(segment), Board(segment)
    trails.started(1, 100)
    Tracer(segment, 1).note(Kind.UPDATE, 0, number=1)
    board.begin(1, 7)
    begin_ns = board.busy_since(1)
    board.computes(1, 3)
    trails.ended(1)
    board.clear(1)
    trails.started(1, 200)
    Tracer(segment, 1).note(Kind.UPDATE, 0, number=2)
    found = trails.take(at_once=True)
    assert spans_of(found) == [
        (1, 100, Kind.UPDATE, 1),
        (1, 100, Kind.UNFINISHED, 7),
        (1, 200, Kind.UPDATE, 2),
    ]
    (unfinished,) = unpack(found[1].spans)
    assert unfinished.name == "shard 3"
    assert unfinished.begin_ns == begin_ns, "exactly: else it would cut what the worker did in it, or before"
    assert unfinished.begin_ns + unfinished.duration_ns <= time.monotonic_ns()
    assert trails.take() == [], "it is looked for only now and then"
    assert trails.take(at_once=True) == []


def test_spans_that_found_no_room_are_counted_once(new_segment):
    segment = new_segment(1)
    trails = Trails(segment)
    trails.started(0, 1)
    Trail(segment, 0).write(b"")
    tracer = Tracer(segment, 0)
    for _ in range(ROOM_BYTES // 40):
        tracer.note(Kind.EXCHANGE, 0, "a tag of some bytes")
    found = spans_of(trails.take(at_once=True))
    assert found[-1][2] is Kind.LOST
    assert len(found) - 1 + found[-1][3] == ROOM_BYTES // 40
    tracer.note(Kind.UPDATE, 0)
    assert [kind for _, _, kind, _ in spans_of(trails.take(at_once=True))] == [Kind.UPDATE]

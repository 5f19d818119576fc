"""What a worker notes of what it does: nothing unless somebody wants to know, and then from when to when."""

import time

import pytest

from evenstep.exchange.board import Board
from evenstep.exchange.tracing import Kind, Span, Tracer, pack, unpack
from evenstep.transport.trail import Trail


def test_spans_are_read_as_they_were_written():
    spans = [
        Span(1, 2, -1, Kind.EXCHANGE, "step 3: weight, é"),
        Span(1 << 62, 1 << 61, 2**31 - 1, Kind.WAIT, ""),
        Span(0, 0, 0, Kind.LOST, ""),
    ]
    assert list(unpack(b"".join(map(pack, spans)))) == spans


def test_a_long_name_is_cut_and_what_follows_it_is_whole():
    long, short = Span(1, 1, 1, Kind.EXCHANGE, "x" * 254 + "é"), Span(2, 2, 2, Kind.UPDATE, "u")
    first, second = unpack(pack(long) + pack(short))
    assert first.name.startswith("x" * 254)
    assert second == short


def test_nobody_is_traced_who_was_not_asked_to_be(new_segment):
    segment = new_segment(1)
    tracer = Tracer(segment, 0)
    with tracer.span(Kind.UPDATE):
        tracer.waited(0, 1)
    assert not tracer.on
    assert Trail(segment, 0).read() == b""


def test_what_is_noted_lies_in_what_it_is_inside_of(new_segment):
    segment = new_segment(2)
    Board(segment).traced = True
    tracer, before_ns = Tracer(segment, 1), time.monotonic_ns()

    def compute():
        with tracer.span(Kind.COMPUTE):
            begin_ns = time.monotonic_ns()
            time.sleep(0.002)
            tracer.waited(begin_ns, 0)
            tracer.waited(time.monotonic_ns() + 10**10, 0)  # too brief to be one, however long this takes
            raise ValueError("a step that fails has taken its time too")

    with pytest.raises(ValueError, match="fails"):
        compute()
    wait, outer = unpack(Trail(segment, 1).read())
    assert (wait.kind, wait.number, outer.kind) == (Kind.WAIT, 0, Kind.COMPUTE)
    assert before_ns <= outer.begin_ns <= wait.begin_ns
    assert wait.begin_ns + wait.duration_ns <= outer.begin_ns + outer.duration_ns <= time.monotonic_ns()
    assert wait.duration_ns >= 2_000_000

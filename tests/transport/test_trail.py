"""What a worker leaves of what it does: whole, in order, and never more than there is room for."""

import random

from evenstep.transport.segment import Segment
from evenstep.transport.trail import ROOM_BYTES, Trail


def test_what_is_written_is_read_once_and_in_order_however_often_the_ring_goes_round():
    segment, draws = Segment.create(2), random.Random(0)
    writer, reader = Trail(segment, 1), Trail(segment, 1)
    expected, found = b"", b""
    for _ in range(200):
        data = draws.randbytes(draws.randrange(1, 50_000))
        writer.write(data)
        expected += data
        if draws.random() < 0.5:
            found += reader.read()
    assert found + reader.read() == expected
    assert len(expected) > 3 * ROOM_BYTES
    assert reader.read() == b""
    assert writer.dropped == 0
    assert Trail(segment, 0).read() == b"", "everyone has a ring of its own"
    segment.close()


def test_what_finds_no_room_is_left_out_whole_and_counted():
    segment = Segment.create(1)
    writer, reader = Trail(segment, 0), Trail(segment, 0)
    writer.write(b"a" * (ROOM_BYTES - 10))
    writer.write(b"b" * 11)
    writer.write(b"c" * 10)
    assert reader.read() == b"a" * (ROOM_BYTES - 10) + b"c" * 10
    assert reader.dropped == 1
    writer.write(b"d" * 11)
    assert reader.read() == b"d" * 11
    segment.close()


def test_whoever_takes_the_place_of_a_writer_goes_on_where_it_was():
    segment = Segment.create(1)
    reader = Trail(segment, 0)
    for word in (b"one", b"two"):
        Trail(segment, 0).write(word)
    assert reader.read() == b"onetwo"
    segment.close()

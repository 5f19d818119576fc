"""The journal: what was appended is read back, by everyone who maps the segment."""

import os

import pytest

from evenstep.core.errors import WrongError
from evenstep.exchange.board import Board
from evenstep.exchange.journal import Entry, Journal
from evenstep.transport.segment import JOURNAL_BEGIN

ENTRIES = [
    Entry("join", {"a": [1.5, None, "é"]}),
    Entry("step 0", [0.1, {}, None, []]),
    Entry("predict", {"shape": [2]}, b"\0\1" * 100_000),
]


def test_entries_are_read_as_they_were_appended_in_any_order_and_by_others(new_segment):
    segment = new_segment(1)
    journal = Journal(segment)
    for number, entry in enumerate(ENTRIES):
        assert journal.committed == number
        journal.append(entry)
    assert [journal.read(number) for number in range(3)] == ENTRIES
    other = Journal(segment)
    assert other.read(2) == ENTRIES[2]
    assert other.read(0) == ENTRIES[0]


def test_entries_that_follow_are_committed_with_the_first(new_segment):
    segment = new_segment(1)
    journal = Journal(segment)
    journal.append(Entry("restore", 1, followers=ENTRIES))
    assert journal.committed == 4
    assert journal.read(3) == ENTRIES[2]


def test_an_entry_that_does_not_count_is_written_over(new_segment):
    """As when a worker dies after it has written an entry and before it counts."""
    segment = new_segment(1)
    journal, board = Journal(segment), Board(segment)
    journal.append(ENTRIES[0])
    journal.append(ENTRIES[2])
    board.committed = 1
    other = Journal(segment)
    other.append(ENTRIES[1])
    assert other.read(1) == ENTRIES[1]


def test_all_of_it_can_be_packed_and_unpacked(new_segment):
    segment = new_segment(1)
    journal = Journal(segment)
    for entry in ENTRIES:
        journal.append(entry)
    assert Journal.unpack(journal.packed(3)) == ENTRIES
    assert Journal.unpack(journal.packed(1)) == ENTRIES[:1]
    assert Journal.unpack(b"") == []


def test_what_cannot_be_json_is_not_committed(new_segment):
    segment = new_segment(1)
    journal = Journal(segment)
    with pytest.raises(TypeError):
        journal.append(Entry("step 0", os))
    assert journal.committed == 0


def test_any_bit_that_changes_in_memory_is_found_where_it_is_read(new_segment):
    segment = new_segment(1)
    journal = Journal(segment)
    small = [ENTRIES[0], Entry("predict", [1], b"\1\2\3")]
    for entry in small:
        journal.append(entry)
    length = len(journal.packed(2))
    for place in range(length):
        (byte,) = os.pread(segment.fd, 1, JOURNAL_BEGIN + place)
        os.pwrite(segment.fd, bytes([byte ^ 1 << place % 8]), JOURNAL_BEGIN + place)
        with pytest.raises(WrongError, match="in the journal of this machine are not what was written"):
            Journal(segment).packed(2)
        with pytest.raises(WrongError):
            [Journal(segment).read(number) for number in range(2)]
        os.pwrite(segment.fd, bytes([byte]), JOURNAL_BEGIN + place)
    assert [journal.read(number) for number in range(2)] == small


def test_and_in_what_was_packed(new_segment):
    journal = Journal(new_segment(1))
    journal.append(ENTRIES[0])
    data = bytearray(journal.packed(1))
    for place in range(len(data)):
        data[place] ^= 1
        with pytest.raises(ValueError, match=r"an entry|of an entry"):
            Journal.unpack(bytes(data))
        data[place] ^= 1

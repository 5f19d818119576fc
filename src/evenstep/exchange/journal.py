"""The record of what the workers of a run have done together, in the segment: one entry per committed operation.

An entry holds what the operation gave the script (losses, metrics, outputs), so that a worker that starts later can run
the same script, take the results from here instead of computing them, and catch up with the others. Every entry has a
checksum, which is verified whenever it is read.
"""

import json
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from evenstep.core.errors import WrongError
from evenstep.exchange.board import Board
from evenstep.transport.segment import JOURNAL_BEGIN, Segment

__all__ = ["Entry", "Journal"]

_SIZES = struct.Struct("<QQ")  # bytes of the text, bytes of the blob
_HEAD = struct.Struct("<QQII")  # these sizes, their checksum, and the checksum of text and blob


@dataclass(frozen=True)
class Entry:
    """One operation.

    Attributes:
        kind: Which operation, in words.
        value: Its result, as JSON.
        blob: The rest of its result, as bytes.
        aside: How it came about, as JSON; may differ if the operation is done again.
        followers: Entries that are committed together with it and come after it.
    """

    kind: str
    value: Any = None
    blob: bytes = b""
    aside: Any = None
    followers: Sequence["Entry"] = ()

    def pack(self) -> bytes:
        """The entry as bytes that begin with their length."""
        text = json.dumps([self.kind, self.value, self.aside]).encode()
        sizes = len(text), len(self.blob)
        checksums = zlib.crc32(_SIZES.pack(*sizes)), _checksum(text, self.blob)
        return _HEAD.pack(*sizes, *checksums) + text + self.blob


class Journal:
    """The entries, from the first; appended by the first worker only. `board.committed` says how many count."""

    def __init__(self, segment: Segment) -> None:
        self._fd, self._board = segment.fd, Board(segment)
        self._ends = [JOURNAL_BEGIN]  # where each known entry ends

    @property
    def committed(self) -> int:
        """How many entries there are."""
        return self._board.committed

    def append(self, entry: Entry) -> None:
        """Write the next entry, then count it: at that moment the operation is committed."""
        self.append_packed(b"".join(each.pack() for each in (entry, *entry.followers)), 1 + len(entry.followers))

    def append_packed(self, packed: bytes, count: int) -> None:
        """As `append`, for `count` entries at once, packed one after another."""
        number, data = self.committed, memoryview(packed)
        place = self._end_of(number)
        while data:
            written = os.pwrite(self._fd, data, place)
            data, place = data[written:], place + written
        self._board.committed = number + count

    def read(self, number: int) -> Entry:
        """The entry of an operation that has been committed.

        Raises:
            WrongError: It is not what was written.
        """
        assert number < self.committed, "only committed entries are read"
        (entry,) = self.unpack(self._range(number, number + 1))
        return entry

    def packed(self, end: int, begin: int = 0) -> bytes:
        """The entries from `begin` to `end`, as `unpack` takes them.

        Raises:
            WrongError: They are not what was written.
        """
        return self._range(begin, end)

    def _range(self, first: int, end: int) -> bytes:
        """Some entries, as they were written."""
        try:
            begin = self._end_of(first)
            data = self._pread(self._end_of(end) - begin, begin)
            for _ in _contents(data):
                pass
        except ValueError as error:
            raise WrongError(
                f"operations {first} to {end - 1} in the journal of this machine are not what was written there "
                f"({error}): its memory has changed by itself; go on from the last checkpoint, on another (--resume)"
            ) from None
        return data

    def _end_of(self, number: int) -> int:
        """Where entry `number` begins, which is where the one before it ends."""
        while len(self._ends) <= number:
            begin = self._ends[-1]
            text_bytes, blob_bytes, _ = _head(self._pread(_HEAD.size, begin), 0)
            self._ends.append(begin + _HEAD.size + text_bytes + blob_bytes)
        return self._ends[number]

    def _pread(self, num_bytes: int, place: int) -> bytes:
        parts = []
        while num_bytes:
            data = os.pread(self._fd, min(num_bytes, 1 << 30), place)
            assert data, "the segment is longer than any journal"
            parts.append(data)
            num_bytes, place = num_bytes - len(data), place + len(data)
        return b"".join(parts)

    @staticmethod
    def unpack(data: bytes) -> list[Entry]:
        """The inverse of `packed`.

        Raises:
            ValueError: The data are not a journal.
        """
        return [_entry(text, blob) for text, blob in _contents(data)]


def _entry(text: bytes, blob: bytes) -> Entry:
    kind, value, aside = json.loads(text)
    return Entry(kind, value, blob, aside)


def _contents(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The text and blob of each entry, verified."""
    begin = 0
    while begin < len(data):
        if begin + _HEAD.size > len(data):
            raise ValueError("it ends in the middle of an entry")
        text_bytes, blob_bytes, checksum = _head(data, begin)
        begin += _HEAD.size
        text, blob = data[begin : begin + text_bytes], data[begin + text_bytes : begin + text_bytes + blob_bytes]
        if _checksum(text, blob) != checksum:
            raise ValueError("an entry has another checksum")
        begin += text_bytes + blob_bytes
        yield text, blob


def _head(data: bytes, begin: int) -> tuple[int, int, int]:
    """The sizes of an entry, verified, and the checksum of what follows."""
    text_bytes, blob_bytes, of_sizes, checksum = _HEAD.unpack_from(data, begin)
    if zlib.crc32(_SIZES.pack(text_bytes, blob_bytes)) != of_sizes:
        raise ValueError("an entry has another length")
    return text_bytes, blob_bytes, checksum


def _checksum(text: bytes, blob: bytes) -> int:
    return zlib.crc32(blob, zlib.crc32(text))

"""A file of consecutive records, written so that it always ends after a complete record.

A record is a head with a checksum, facts as JSON, and tensors in safetensors. One that is torn at the end was never
acknowledged. One that is damaged although complete ones follow it is different: the user must decide what to do with
those.
"""

import json
import mmap
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from evenstep.core.errors import CheckpointError, RefusedError
from evenstep.core.files import open_regular
from evenstep.server.wire.tensors import LENGTH_BYTES, TensorHead, encode, head_length
from evenstep.server.wire.text import write_json

__all__ = ["Log", "LogEntry", "Record", "read"]

Record = tuple[dict[str, Any], dict[str, Tensor]]
"""Facts and tensors."""

_HEAD = struct.Struct("<4sIQI")  # magic, bytes of facts, bytes of tensors, checksum
_MAGIC = b"EVLG"
_PIECES = 512


class Log:
    """A log that is being written.

    Args:
        fd: The file, opened for appending; taken over.
        sync: Wait for the disk after every record.

    Attributes:
        in_doubt: Whether the disk failed to keep earlier records, so that another file must be used.
    """

    def __init__(self, fd: int, *, sync: bool) -> None:
        self._fd, self._sync = fd, sync
        self._end = self._last = os.fstat(fd).st_size
        self._torn = False
        self.in_doubt = False

    def append(self, record: Record) -> None:
        """Write a record.

        Raises:
            OSError: It could not be written completely; the log is unchanged.
        """
        self._cut()
        self._torn = True
        try:
            size = _write(self._fd, record)
            if self._sync:
                self._await_disk()
        except OSError:
            self._cut()
            raise
        self._last, self._end, self._torn = self._end, self._end + size, False

    def _await_disk(self) -> None:
        try:
            os.fdatasync(self._fd)
        except OSError:
            self.in_doubt = True  # earlier records may be lost too, and no later sync would report it
            raise

    def retract(self) -> None:
        """Take the last record back."""
        self._end, self._torn = self._last, True
        self._cut()
        if self._sync:
            self._await_disk()

    def _cut(self) -> None:
        """End after the last complete record."""
        if self._torn:
            os.ftruncate(self._fd, self._end)
            self._torn = False

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def _write(fd: int, record: Record) -> int:
    """Append a record to a file; returns its size."""
    facts, tensors = record
    text = write_json(facts)
    parts = [memoryview(text), *encode(tensors)]
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    left = [memoryview(_HEAD.pack(_MAGIC, len(text), sum(len(part) for part in parts[1:]), checksum)), *parts]
    size = sum(map(len, left))
    while left:
        written = os.writev(fd, left[:_PIECES])
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if written:
            left[0] = left[0][written:]
    return size


@dataclass(frozen=True)
class LogEntry:
    """What is in a log at one place.

    Attributes:
        number: Its position in the log, counted from 1.
        offset: Where it begins.
        record: Its record; None if unreadable.
        is_last: Whether nothing complete follows. An unreadable last one was torn.
    """

    number: int
    offset: int
    record: Record | None
    is_last: bool = False


def read(path: Path) -> Iterator[LogEntry]:
    """The records of a log, up to the first that cannot be read; nothing if there is no such file.

    Raises:
        CheckpointError: It is not a regular file, or cannot be read.
    """
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    with file:
        if os.fstat(file.fileno()).st_size:
            with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
                yield from _records(data)


def _records(data: mmap.mmap) -> Iterator[LogEntry]:
    at, number = 0, 1
    while at < len(data):
        end = _whole_until(data, at)
        if end is None:
            yield LogEntry(number, at, None, is_last=not _any_whole_after(data, at + 1))
            return
        record = _record(data, at, end)
        yield LogEntry(number, at, record)
        if record is None:
            return
        at, number = end, number + 1


def _whole_until(data: mmap.mmap, at: int) -> int | None:
    """Where a record that begins here ends; None if there is no complete one."""
    if at + _HEAD.size > len(data):
        return None
    magic, text_bytes, body_bytes, checksum = _HEAD.unpack_from(data, at)
    begin, end = at + _HEAD.size, at + _HEAD.size + text_bytes + body_bytes
    if magic != _MAGIC or end > len(data):
        return None
    with memoryview(data) as view, view[begin:end] as content:
        return end if zlib.crc32(content) == checksum else None


def _any_whole_after(data: mmap.mmap, at: int) -> bool:
    while (at := data.find(_MAGIC, at)) >= 0:
        if _whole_until(data, at) is not None:
            return True
        at += 1
    return False


def _record(data: mmap.mmap, at: int, end: int) -> Record | None:
    _, text_bytes, _, _ = _HEAD.unpack_from(data, at)
    begin = at + _HEAD.size + text_bytes
    body = data[begin:end]
    try:
        facts: dict[str, Any] = json.loads(data[at + _HEAD.size : begin])
        head_bytes = LENGTH_BYTES + head_length(body[:LENGTH_BYTES], len(body))
        head = TensorHead.parse(body[LENGTH_BYTES:head_bytes], len(body) - head_bytes)
    except (RefusedError, ValueError):
        return None
    return facts, head.tensors(bytearray(body[head_bytes:] or b"\0"))

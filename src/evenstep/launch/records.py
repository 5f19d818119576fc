"""Where the figures of a run go: a file with a line of JSON for every step, and event files for TensorBoard."""

import json
import math
import os
import socket
import struct
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

from evenstep.core.errors import ConfigError
from evenstep.exchange.figures import StepFigures

__all__ = ["EventFile", "JsonLines", "Record", "make_directory"]


class Record(Protocol):
    """Takes the figures of every step."""

    def add(self, found: StepFigures) -> None:
        """Write the figures of a step.

        Raises:
            OSError: They cannot be written.
        """

    def close(self) -> None:
        """Nothing more will come."""


class JsonLines:
    """A file that grows by one line for every step.

    Args:
        path: The file; lines are appended, so a resumed run continues it.
        group: The number of the group whose steps they are, if there are several; each appends its own.

    Raises:
        ConfigError: It cannot be written.
    """

    def __init__(self, path: Path, group: int | None = None) -> None:
        self._file, self._group = _open(path, "--log-json"), {} if group is None else {"group": group}

    def add(self, found: StepFigures) -> None:
        """See `Record`."""
        fields = {name: value for name, value in found._asdict().items() if value is not None and value != {}}
        line = memoryview(
            json.dumps(_plain({"time": round(time.time(), 3), **self._group, **fields}), allow_nan=False).encode()
            + b"\n"
        )
        while line:
            line = line[self._file.write(line) :]

    def close(self) -> None:
        """See `Record`."""
        self._file.close()


def _plain(value: Any) -> Any:
    """A value that JSON can hold: numbers that are not finite become their names."""
    match value:
        case float() if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        case dict():
            return {name: _plain(each) for name, each in value.items()}
        case list():
            return [_plain(each) for each in value]
    return value


# ---- TensorBoard: records with checksums, each of them a protocol buffers message ----


def _table_entry(number: int) -> int:
    for _ in range(8):
        number = number >> 1 ^ (0x82F63B78 if number & 1 else 0)
    return number


_TABLE = [_table_entry(number) for number in range(256)]


class EventFile:
    """A file of events as TensorBoard reads them, added to a directory.

    Args:
        directory: The directory; created if it does not exist.
        group: The number of the group whose steps they are, if there are several; it has a folder of its own.

    Raises:
        ConfigError: It cannot be written.
    """

    def __init__(self, directory: Path, group: int | None = None) -> None:
        directory = directory if group is None else directory / f"group-{group}"
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}.evenstep"
        make_directory(directory)
        self._file = _open(directory / name, "--tensorboard")
        self._write(_bytes(3, b"brain.Event:2"))

    def add(self, found: StepFigures) -> None:
        """See `Record`. Values that are not numbers are left out: TensorBoard has no place for them."""
        values = {} if found.loss is None else {"loss": found.loss}
        if found.grad_norm is not None:
            values["grad_norm"] = found.grad_norm
        values |= {name: value for name, value in found.metrics.items() if isinstance(value, float)}
        prefix = f"run {found.run}/" if found.run > 1 else ""
        summary = b"".join(
            _bytes(1, _bytes(1, name.encode()) + _key(2, 5) + struct.pack("<f", _as_float32(value)))
            for name, value in ((f"{prefix}{name}", value) for name, value in {**values, **found.logged}.items())
        )
        self._write(_key(2, 0) + _varint(found.step) + _bytes(5, summary))

    def _write(self, fields: bytes) -> None:
        event = _key(1, 1) + struct.pack("<d", time.time()) + fields
        length = struct.pack("<Q", len(event))
        data = memoryview(length + _masked(length) + event + _masked(event))
        while data:
            data = data[self._file.write(data) :]

    def close(self) -> None:
        """See `Record`."""
        self._file.close()


def make_directory(directory: Path) -> None:
    """Make the directory for event files if it does not exist.

    Raises:
        ConfigError: It cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--tensorboard: cannot create {directory}: {error.strerror}; name another directory"
        ) from error


def _open(path: Path, option: str) -> FileIO:
    try:
        return path.open("ab", buffering=0)
    except OSError as error:
        raise ConfigError(f"{option}: cannot write {path}: {error.strerror}; name another file") from error


def _as_float32(value: float) -> float:
    """The value as a float32: TensorBoard keeps no more, and packing would refuse larger ones."""
    return value if abs(value) < 3.4e38 or not math.isfinite(value) else math.copysign(math.inf, value)


def _key(number: int, kind: int) -> bytes:
    return bytes([number << 3 | kind])


def _varint(value: int) -> bytes:
    return bytes(_sevens(value))


def _sevens(value: int) -> Iterator[int]:
    while value > 127:
        yield value & 127 | 128
        value >>= 7
    yield value


def _bytes(number: int, data: bytes) -> bytes:
    return _key(number, 2) + _varint(len(data)) + data


def _masked(data: bytes) -> bytes:
    """The checksum of a record: CRC-32C, rotated and offset so that checksums of checksums do not cancel out."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 255] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

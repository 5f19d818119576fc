"""Frames: how requests and replies travel over a stream socket.

A frame is `EVST`, the length of the fields (4 bytes, little endian), the length of the tensors (8 bytes), the fields as
JSON, the tensors as safetensors. A request's fields have its verb and, where one is needed, the token; a reply's have a
status like HTTP's. A connection carries one request after another.
"""

import contextlib
import socket
import ssl
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

from evenstep.core.errors import RefusedError
from evenstep.server.wire.tensors import LENGTH_BYTES, TensorHead, head_length
from evenstep.server.wire.text import read_json, write_json

__all__ = ["Frames", "receive_head"]

_MAGIC = b"EVST"
_FRAME = struct.Struct("<4sIQ")
_MAX_PARTS = 512  # buffers of one system call
_DRAIN_BYTES = 1 << 16
_AHEAD_BYTES = 1 << 12
_FIELDS_S = 30.0  # how long the fields of a frame may take, once it has begun


class Frames:
    """Frames over one connected stream socket.

    Small pieces are read ahead into a buffer, large ones straight to their destination. Timeouts are the socket's own
    (SO_RCVTIMEO): a Python timeout would cost an additional system call for every read.

    Args:
        stream: The socket; closed by `close`.
        silence_s: How long the other side may be silent in the middle of something.
        max_fields_bytes: The longest fields that are read.
    """

    def __init__(self, stream: socket.socket, silence_s: float, max_fields_bytes: int = 16 << 20) -> None:
        self.stream = stream
        self._max_fields_bytes = max_fields_bytes
        self._deadline = float("inf")
        self._scatter = not isinstance(stream, ssl.SSLSocket)
        self._ahead = memoryview(bytearray(_AHEAD_BYTES))
        self._first = self._end = 0  # its bytes that are not used yet
        self._text, self._fields = b"", dict[str, Any]()
        stream.settimeout(None)
        value = struct.pack("ll", int(silence_s), int(1e6 * (silence_s % 1)))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            stream.setsockopt(socket.SOL_SOCKET, option, value)
        if stream.family in (socket.AF_INET, socket.AF_INET6):
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def within(self, seconds: float) -> None:
        """Limit the time for everything that follows."""
        self._deadline = time.monotonic() + seconds

    def send(self, fields: Mapping[str, Any], parts: Sequence[memoryview] = ()) -> None:
        """Send one frame.

        Raises:
            OSError: The other side is gone, or too slow.
        """
        text = write_json(fields)
        num_bytes = sum(map(len, parts))
        head = _FRAME.pack(_MAGIC, len(text), num_bytes) + text
        left: list[memoryview] = [memoryview(head), *parts]
        if not self._scatter:
            for part in left:
                self.stream.sendall(part)
            return
        num_bytes += len(head)
        while True:
            sent = self.stream.sendmsg(left[:_MAX_PARTS])
            num_bytes -= sent
            if not num_bytes:
                return
            left = _after(left, sent)
            if time.monotonic() > self._deadline:
                raise TimeoutError("the other side reads too slowly")

    def begin(self, *, patient: bool = False) -> tuple[dict[str, Any], int] | None:
        """Read the fields of a frame, and how many bytes of tensors follow; None if the other side has closed.

        Args:
            patient: Wait as long as it takes for the frame to begin.

        Raises:
            RefusedError: This is not a frame.
            OSError: The other side is gone, or too slow.
        """
        if not self._await(patient):
            return None
        magic, fields_bytes, body_bytes = _FRAME.unpack(self.take(_FRAME.size))
        if magic != _MAGIC:
            raise RefusedError(f"a frame begins with {bytes(magic)!r}, expected {_MAGIC!r}; is this the right port?")
        if fields_bytes > self._max_fields_bytes:
            raise RefusedError(f"{fields_bytes} bytes of fields, expected at most {self._max_fields_bytes}", 413)
        text = self.take(fields_bytes)
        if text == self._text:
            return dict(self._fields), body_bytes
        fields = read_json(text, "the head of the frame")
        if not body_bytes and fields_bytes <= _AHEAD_BYTES:  # a repeated request need not be parsed again
            self._text, self._fields = text, dict(fields)
        return fields, body_bytes

    def _await(self, patient: bool) -> bool:
        """Wait until there is something to read; False if the other side has closed."""
        while self._first == self._end:
            try:
                count = self.stream.recv_into(self._ahead)
            except (BlockingIOError, ssl.SSLWantReadError):
                if not patient:
                    raise TimeoutError("the other side is silent") from None
                continue
            if not count:
                return False
            self._first, self._end = 0, count
            if patient:
                self.within(_FIELDS_S)
        return True

    def take(self, num_bytes: int) -> bytes:
        """Read exactly this many bytes; meant for small numbers.

        Raises:
            OSError: The other side is gone, or too slow.
        """
        first, self._first = self._first, self._first + num_bytes
        if self._first <= self._end:
            return bytes(self._ahead[first : self._first])
        self._first = first
        data = bytearray(num_bytes)
        self.fill([memoryview(data)])
        return bytes(data)

    def fill(self, buffers: Sequence[memoryview]) -> None:
        """Read exactly as much as fits.

        Raises:
            OSError: The other side is gone, or too slow.
        """
        left = self._from_ahead(buffers)
        while left:
            if len(left) == 1 and len(left[0]) < _AHEAD_BYTES:
                if not self._await(patient=False):
                    raise ConnectionResetError("the other side closed the connection in the middle of a frame")
                left = self._from_ahead(left)
            else:
                count = self._read(left)
                if not count:
                    raise ConnectionResetError("the other side closed the connection in the middle of a frame")
                left = _after(left, count)
            if left and time.monotonic() > self._deadline:
                raise TimeoutError("the other side sends too slowly")

    def _read(self, left: list[memoryview]) -> int:
        if self._scatter and len(left) > 1:
            return self.stream.recvmsg_into(left[:_MAX_PARTS])[0]
        return self.stream.recv_into(left[0])

    def _from_ahead(self, buffers: Sequence[memoryview]) -> list[memoryview]:
        """Fill buffers with what was read ahead; return what is left to fill."""
        left = [buffer for buffer in buffers if len(buffer)]
        while left and self._first < self._end:
            count = min(len(left[0]), self._end - self._first)
            left[0][:count] = self._ahead[self._first : self._first + count]
            self._first += count
            left = _after(left, count)
        return left

    def drain(self, num_bytes: int) -> None:
        """Read and discard this many bytes."""
        scratch = memoryview(bytearray(_DRAIN_BYTES))
        while num_bytes > 0:
            self.fill([scratch[: min(num_bytes, _DRAIN_BYTES)]])
            num_bytes -= min(num_bytes, _DRAIN_BYTES)

    def close(self) -> None:
        """Close the connection, even while a thread waits for it."""
        with contextlib.suppress(OSError):
            self.stream.shutdown(socket.SHUT_RDWR)
        self.stream.close()


def receive_head(frames: Frames, body_bytes: int) -> TensorHead:
    """Read the head of the tensors.

    Raises:
        RefusedError: It is not one.
    """
    if body_bytes < LENGTH_BYTES:
        raise RefusedError(f"{body_bytes} bytes of tensors, expected safetensors")
    text = frames.take(head_length(frames.take(LENGTH_BYTES), body_bytes))
    return TensorHead.parse(text, body_bytes - LENGTH_BYTES - len(text))


def _after(parts: list[memoryview], count: int) -> list[memoryview]:
    """What is left of some buffers after the first `count` bytes."""
    done = 0
    while done < len(parts) and count >= len(parts[done]):
        count -= len(parts[done])
        done += 1
    parts = parts[done:]
    if count:
        parts[0] = parts[0][count:]
    return parts

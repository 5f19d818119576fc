"""Frames over a socket, read in whatever pieces they come."""

import socket
import struct
import threading

import pytest
import torch

from evenstep.core.errors import RefusedError
from evenstep.server.wire.frames import Frames, receive_head
from evenstep.server.wire.tensors import encode


@pytest.fixture
def ends(request):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, Frames(theirs, getattr(request, "param", 60.0), max_fields_bytes=1000)


def frame(fields, body=b""):
    return struct.pack("<4sIQ", b"EVST", len(fields), len(body)) + fields + body


@pytest.mark.parametrize("step", [1, 7, 100, 1 << 20])
def test_a_frame_is_whole_whatever_its_pieces(ends, step):
    stream, frames = ends
    tensors = {"w": torch.randn(3000), "b": torch.randn(5)}
    body = b"".join(bytes(part) for part in encode(tensors))
    data = 2 * frame(b'{"verb":"put"}', body) + frame(b'{"verb":"status"}')

    def send():
        for at in range(0, len(data), step):
            stream.sendall(data[at : at + step])
        stream.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=send)
    thread.start()
    for _ in range(2):
        fields, size = frames.begin(patient=True)
        assert (fields, size) == ({"verb": "put"}, len(body))
        head = receive_head(frames, size)
        data_ = bytearray(head.data_bytes)
        frames.fill([memoryview(data_)])
        assert all(torch.equal(head.tensors(data_)[name], tensors[name]) for name in tensors)
    assert frames.begin(patient=True) == ({"verb": "status"}, 0)
    assert frames.begin(patient=True) is None
    thread.join()


def test_fields_that_come_again_are_not_mixed_up(ends):
    stream, frames = ends
    for text, value in ((b'{"a":1}', 1), (b'{"a":1}', 1), (b'{"a":2}', 2), (b'{"a":1}', 1)):
        stream.sendall(frame(text))
        fields, _ = frames.begin()
        assert fields == {"a": value}
        fields["a"] = "changed by whoever got it"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GET / HTTP/1.1\r\n", "expected b'EVST'; is this the right port?"),
        (struct.pack("<4sIQ", b"EVST", 1001, 0), "1001 bytes of fields, expected at most 1000"),
        (frame(b"nonsense"), "is not JSON"),
    ],
)
def test_what_is_no_frame_is_one_sentence(ends, data, words):
    stream, frames = ends
    stream.sendall(data)
    with pytest.raises(RefusedError) as refused:
        frames.begin()
    assert words in str(refused.value)


@pytest.mark.parametrize("ends", [0.3], indirect=True)
def test_silence_in_the_middle_is_not_waited_for(ends):
    stream, frames = ends
    stream.sendall(frame(b'{"a":1}')[:-2])
    with pytest.raises(OSError, match="silent"):
        frames.begin()

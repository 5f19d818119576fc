"""Messages between a head and its machines: whole or not at all, never waited for, and strangers get nowhere."""

import json
import socket
import struct
import time

import pytest

import processes
from evenstep.launch.connection import FEW_BYTES, Lost, MachineConnection


@pytest.fixture
def ends():
    listening = socket.create_server(("127.0.0.1", 0))
    one = MachineConnection(socket.create_connection(listening.getsockname()))
    other = MachineConnection(listening.accept()[0], server=True)
    listening.close()
    yield one, other
    one.close()
    other.close()


def heard(connection, timeout_s=30.0):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := connection.receive():
            return found
    raise AssertionError("nothing came")


def test_a_message_comes_with_its_bytes_and_beats_are_not_messages(ends):
    one, other = ends
    one.beat(1.0)
    one.send({"do": "start", "place": 3}, b"\0\1\n")
    assert heard(other) == [({"do": "start", "place": 3}, b"\0\1\n")]
    assert other.receive() == []


def test_what_the_other_end_does_not_take_yet_is_kept_and_nobody_waits(ends):
    one, other = ends
    other.trust()
    data = bytes(range(256)) * (1 << 16)
    one.send({"do": "journal"}, data)  # nobody reads yet: whoever waited would wait for ever
    assert one.has_more
    found = []
    while not found:
        found = other.receive()
        one.flush()
    assert found == [({"do": "journal"}, data)]
    assert not one.has_more


def test_who_waits_for_one_message_finds_the_others_later(ends):
    one, other = ends
    one.send({"welcome": 1})
    one.send({"do": "start"})
    time.sleep(0.05)
    assert other.wait(30.0) == ({"welcome": 1}, b"")
    assert other.wait(30.0) == ({"do": "start"}, b"")
    with pytest.raises(Lost, match="did not answer within"):
        other.wait(0.05)


def test_an_end_that_closes_is_lost_at_once_but_what_it_said_is_heard(ends):
    one, other = ends
    one.send({"say": "ended"})
    one.close()
    time.sleep(0.05)
    assert heard(other) == [({"say": "ended"}, b"")]
    with pytest.raises(Lost, match="its connection closed"):
        heard(other)


def test_an_end_that_says_nothing_is_silent_only_to_one_that_looked_for_it(ends):
    one, _ = ends
    begin = one.heard_at
    assert not any(one.is_silent(begin + tenth / 10, 2.0) for tenth in range(20))
    assert one.is_silent(begin + 2.1, 2.0)
    assert not one.is_silent(begin + 60.0, 2.0), "it was stopped itself, and perhaps the other end too"
    assert not any(one.is_silent(begin + 60 + tenth / 10, 2.0) for tenth in range(20))
    assert one.is_silent(begin + 62.1, 2.0)


@pytest.mark.parametrize("unread", [False, True])
def test_what_a_lost_end_said_last_is_heard_also_by_one_that_cannot_send_any_more(ends, unread):
    one, other = ends
    if unread:
        other.send({"say": "rows"})  # so that the other end is told by a reset
    one.send({"do": "end", "code": 3})
    time.sleep(0.05)
    one.close()
    for _ in range(5):
        other.send({"say": "rows"})
        other.beat(time.monotonic())
        time.sleep(0.01)
    assert not other.has_more
    assert heard(other) == [({"do": "end", "code": 3}, b"")]
    with pytest.raises(Lost, match=r"can no longer be reached: |is lost: "):
        heard(other)


def test_an_end_is_over_when_the_other_has_closed(ends):
    one, other = ends
    one.send({"do": "end", "code": 0})
    assert not one.is_over()
    assert heard(other) == [({"do": "end", "code": 0}, b"")]
    other.send({"say": "rows"})
    other.close()
    assert processes.until(one.is_over)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 2,
        struct.pack("<IQ", 5, 0) + b"what?",
        struct.pack("<IQ", 2, 0) + b"[]",
        struct.pack("<IQ", FEW_BYTES, 1),
        struct.pack("<IQ", 60000, 0) + b"[" * 60000,
    ],
    ids=["a browser", "no JSON", "no object", "too long", "nested too deeply"],
)
def test_a_stranger_is_sent_away(ends, data):
    one, other = ends
    one._socket.send(data)
    with pytest.raises(Lost, match="sent something that is not a message"):
        heard(other)


def test_messages_are_json_and_nothing_else(ends):
    one, _ = ends
    with pytest.raises(TypeError, match="not JSON serializable"):
        one.send({"do": object()})
    assert json.dumps({"do": 1})

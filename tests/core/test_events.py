"""An event is one line of JSON, whole however long it is, and dropped if nobody listens any more."""

import json
import os
import threading

from evenstep.core import events


def test_an_event_larger_than_the_pipe_arrives_whole():
    read, write = os.pipe()
    event = {"text": "x" * 300_000, "step": 3}
    sender = threading.Thread(target=events.send, args=(write, event))
    sender.start()
    found = b""
    while not found.endswith(b"\n"):
        found += os.read(read, 1 << 16)
    sender.join()
    os.close(read)
    os.close(write)
    assert found.count(b"\n") == 1
    assert json.loads(found) == event


def test_an_event_that_nobody_reads_is_dropped():
    read, write = os.pipe()
    os.close(read)
    events.send(write, {"step": 3})
    os.close(write)


def test_a_line_break_in_a_text_does_not_end_the_event():
    read, write = os.pipe()
    events.send(write, {"error": "one\ntwo"})
    assert os.read(read, 1000).count(b"\n") == 1
    os.close(read)
    os.close(write)

"""What a server did, as events: connections do not mix, and what finds no room is counted."""

import json
import threading

from evenstep.launch import server_trace
from evenstep.launch.server_trace import ServerTrace


def made():
    lines = []
    trace = ServerTrace(1, 5, 2_000_000_000, lambda found: lines.extend(map(json.loads, found)))
    return trace, lines


def test_a_connection_is_a_thread_that_has_the_name_of_its_client():
    trace, lines = made()
    together = threading.Barrier(2)  # two threads that live at the same time have two ids

    def speak(client):
        together.wait(20.0)
        trace.note("update", client, 2.5, 2.75)
        trace.note("get", "", 2.75, 3.0)  # which does not say whose it is
        together.wait(20.0)

    threads = [threading.Thread(target=speak, args=(f"group {n}",)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trace.flush()
    names = {line["tid"]: line["args"] for line in lines if line["name"] == "thread_name"}
    assert sorted(names.values(), key=str) == [{"name": f"group {n}", "server": 1} for n in range(2)]
    assert lines[0]["args"] == {"name": "server 1"}
    for thread in names:
        found = [(e["name"], e["ts"], e["dur"]) for e in lines if e["ph"] == "X" and e["tid"] == thread]
        assert found == [("update", 500_000.0, 250_000.0), ("get", 750_000.0, 250_000.0)]
    assert {line["pid"] for line in lines} == {5}
    before = len(lines)
    trace.flush()
    assert len(lines) == before, "each once"


def test_what_finds_no_room_is_counted(monkeypatch):
    monkeypatch.setattr(server_trace, "_MOST", 2)
    trace, lines = made()
    for _ in range(5):
        trace.note("get", "one", 3.0, 3.5)
    trace.flush()
    assert [line["name"] for line in lines[2:]] == ["get", "get", "3 requests are missing here: there was no room"]

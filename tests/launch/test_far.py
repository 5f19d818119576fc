"""Another machine as the head sees it: a connection whose other end is played here."""

import select
import socket
import time
from contextlib import closing

import pytest

from evenstep.exchange.generations import Generation
from evenstep.launch.connection import Lost, MachineConnection
from evenstep.launch.far import There
from evenstep.transport.bridge import Bridging


class Heard:
    """Who is told: notes everything."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *arguments: self.calls.append((name, *arguments))


@pytest.fixture
def ends():
    """A machine, who hears of it, and the other end of its connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = MachineConnection(socket.create_connection(server.getsockname()))
        ours = MachineConnection(server.accept()[0])
    for connection in (ours, theirs):
        connection.trust()
    heard = Heard()
    with closing(ours), closing(theirs):
        yield There(2, "far", 3, ours, heard), heard, theirs


def said(agent, count):
    """The next messages that have come to the other end."""
    return [agent.wait(30.0)[0] for _ in range(count)]


def hear(there, agent, message, data=b""):
    """Let the other end say something, and the machine hear it."""
    agent.send(message, data)
    until_heard(there)
    there.turn(time.monotonic(), 2.0)


def until_heard(there):
    """Wait until something has come, or the other end has closed."""
    assert select.select([there.connection], [], [], 30.0)[0]


def test_what_it_is_to_do_goes_there(ends):
    there, _, agent = ends
    there.start(4, 5)
    there.signal(4, 15)
    there.give_up(4, "sleeps", leaves=True)
    there.abort(1, "gone")
    there.limit(2.5)
    there.end(0)
    assert said(agent, 6) == [
        {"do": "start", "place": 4, "num_workers": 5},
        {"do": "signal", "place": 4, "number": 15},
        {"do": "give up", "place": 4, "why": "sleeps", "leaves": True},
        {"do": "abort", "culprit": 1, "why": "gone"},
        {"do": "limit", "timeout_s": 2.5},
        {"do": "end", "code": 0},
    ]


def test_a_generation_and_its_bridge_arrive_as_they_are(ends):
    there, _, agent = ends
    generation = Generation(7, 9, [0, 4], None, machines=[0, 2])
    plan = Bridging(1, [[0], [4]], ("10.0.0.1", 99), ["10.0.0.1", "10.0.0.2"], "gloo", 2.0)
    there.announce(generation, plan, lacks_state=True)
    (message,) = said(agent, 1)
    plan_said = message["bridging"]
    assert Generation(**message["generation"]) == generation
    assert Bridging(**{**plan_said, "store": tuple(plan_said["store"])}) == plan
    assert message["lacks_state"]


def test_what_happens_there_is_heard_here(ends):
    there, heard, agent = ends
    hear(there, agent, {"say": "started", "place": 4, "pid": 77})
    hear(there, agent, {"say": "heard", "place": 4, "kind": "out", "round": 12}, b"one\ntwo")
    hear(there, agent, {"say": "broke", "generation": 3, "culprit": 0, "text": "cut"})
    end = {"code": -9, "text": "killed", "given_up": None, "starved": False, "step": 6}
    hear(there, agent, {"say": "ended", "place": 4, "end": end})
    assert [call[0] for call in heard.calls] == ["heard", "broke", "ended"]
    assert heard.calls[0] == ("heard", 2, 4, "out", [b"one", b"two"])
    assert heard.calls[1] == ("broke", 2, 3, 0, "cut")
    assert heard.calls[2][3].code == -9
    assert (there.pid_of(4), there.round) == (77, 12)


def test_its_journal_is_known_only_while_it_is_in_no_generation(ends):
    there, _, agent = ends
    there.bring(3, b"entries")
    assert there.journal == 3
    there.announce(Generation(1, 0, [4], None), None, lacks_state=False)
    assert there.journal is None
    hear(there, agent, {"say": "journal", "count": 8})
    assert there.journal is None, "that is said of before"
    there.leave_out()
    there.leave_out()
    assert [message["do"] for message in said(agent, 3)] == ["journal", "announce", "leave out"]
    hear(there, agent, {"say": "journal", "count": 8})
    assert there.journal == 8


def test_silence_nonsense_and_an_end_are_losses(ends):
    there, _, agent = ends
    begin = there.connection.heard_at
    for tenth in range(20):
        there.turn(begin + tenth / 10, 2.0)
    with pytest.raises(Lost, match="has said nothing for 2 s"):
        there.turn(begin + 2.1, 2.0)
    agent.send({"say": "started"})
    until_heard(there)
    with pytest.raises(Lost, match="sent a message that makes no sense"):
        there.turn(time.monotonic(), 2.0)
    agent.close()
    until_heard(there)
    with pytest.raises(Lost, match="is lost"):
        there.turn(time.monotonic(), 2.0)
    there.start(1, 1)  # says nothing: the loss has been told

"""Patience: a connection that is lost is made again, and what was asked is asked again, up to a deadline."""

import time

import pytest

from evenstep.core.errors import RefusedError, UnreachableError
from evenstep.server.client.connection import Connection

SAID = {"sequence": 4, "version": 9, "staleness": None, "lock": True, "place": [0, 1, "", True], "lease_s": 60.0}


class FakeChannel:
    """Answers as it was told; every channel takes the next of the things that happen."""

    def __init__(self, happenings, log):
        self._happenings, self._log = happenings, log

    def ask(self, verb, fields):
        self._log.append(verb)
        if verb == "register":
            return SAID
        happening = self._happenings.pop(0) if self._happenings else "fine"
        if isinstance(happening, Exception):
            raise happening
        return {"said": happening}

    def close(self):
        self._log.append("closed")


def connection(*happenings, opens=(), timeout_s=20.0):
    left, opening, log = list(happenings), list(opens), []

    def open_channel():
        if opening and (error := opening.pop(0)) is not None:
            raise error
        log.append("opened")
        return FakeChannel(left, log)

    return Connection("fake://", open_channel, "w", "s", timeout_s), log


def test_a_lost_connection_is_made_again_and_the_question_asked_again(caplog):
    server, log = connection(ConnectionResetError("the cable"), "fine", opens=[OSError("nobody"), None])
    assert server.ask("status", {}) == {"said": "fine"}
    assert log == ["opened", "status", "closed", "opened", "status"]
    assert "lost the server fake:// (nobody)" in caplog.text
    assert "is back" in caplog.text
    server.close()


def test_who_is_too_busy_is_asked_again_and_who_refuses_is_not():
    server, log = connection(RefusedError("busy", 503), "fine", RefusedError("never", 409))
    assert server.ask("status", {}) == {"said": "fine"}
    with pytest.raises(RefusedError, match="never"):
        server.ask("status", {})
    assert log == ["opened", "status", "status", "status"], "a refusal does not end the connection"
    server.close()


def test_the_deadline_ends_all_trying():
    server, _ = connection(opens=[OSError("nobody")] * 1000, timeout_s=60.0)
    begin = time.monotonic()
    with pytest.raises(UnreachableError, match="the server fake:// cannot be reached: nobody"):
        server.ask("status", {}, time.monotonic() + 0.2)
    assert time.monotonic() - begin < 30
    server.close()


def test_a_worker_that_was_dropped_registers_again():
    server, log = connection("fine", RefusedError("gone", 410), "fine")
    said = []
    server.on_registered = said.append
    for _ in range(2):
        assert server.ask("wait", {}, register=True) == {"said": "fine"}
    assert log == ["opened", "register", "wait", "wait", "register", "wait"]
    assert [(each.sequence, each.version, each.place) for each in said] == 2 * [(4, 9, (0, 1, "", True))]
    server.close()
    assert log[-2:] == ["leave", "closed"]


def test_what_breaks_in_the_middle_leaves_no_half_read_answer():
    server, log = connection(KeyError("in the middle"), "fine")
    with pytest.raises(KeyError):
        server.ask("status", {})
    assert server.ask("status", {}) == {"said": "fine"}
    assert log == ["opened", "status", "closed", "opened", "status"]
    server.close()

"""Asking a running job: which one, if there are several."""

import os
import socket
import threading
from pathlib import Path

import pytest

from evenstep.core import control
from evenstep.core.errors import ConfigError


def test_several_jobs_are_told_apart_by_what_they_run(monkeypatch):
    monkeypatch.setattr(control, "_running", lambda: [os.getpid(), 1 << 30])
    with pytest.raises(ConfigError) as found:
        control.ask({"status": True})
    last = Path("/proc/self/cmdline").read_text().rstrip("\0").split("\0")[-1]
    assert last in str(found.value)
    assert f"running jobs of this user: {os.getpid()} (" in str(found.value)
    assert f"{1 << 30} (it has just ended); expected one, or choose one with --job PID" in str(found.value)


def test_a_long_answer_comes_whole():
    asked = control.Control()
    long = {"workers": ["x" * 100] * 20_000}
    thread = threading.Thread(target=asked.answer, args=(lambda request: long,))
    thread.start()
    try:
        assert control.ask({"status": True}, os.getpid()) == long
    finally:
        thread.join()
        asked.close()


@pytest.mark.parametrize("request_", [b"", b"{", b"\0" * 9, b"[]", b"null", b'{"a":' * 4000, b'"\\ud800"', b"\xff\xfe"])
def test_what_is_no_request_is_an_error_and_ends_nothing(request_):
    asked = control.Control()

    def answer_both():
        for _ in range(2):
            asked.answer(lambda request: {"said": "yes"})

    thread = threading.Thread(target=answer_both)
    thread.start()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
            caller.settimeout(20)
            caller.connect(control._name(os.getpid()))
            caller.sendall(request_)
            caller.shutdown(socket.SHUT_WR)
            assert caller.recv(1000) == b'{"error": "expected a JSON object"}'
        assert control.ask({"status": True}, os.getpid()) == {"said": "yes"}
    finally:
        thread.join()
        asked.close()

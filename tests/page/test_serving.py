"""What serves a page does nothing while nobody looks, and is there for whoever comes again."""

import json
import os
import socket
import threading
import urllib.request

import processes
from evenstep.core.control import Control
from evenstep.page import serving


def test_it_sleeps_when_nobody_looks_and_wakes_when_somebody_comes(new_segment, monkeypatch):
    monkeypatch.setattr(serving, "_LOOK_S", 0.02)
    segment, control = new_segment(1), Control()
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/status"
    (over, end), codes = os.pipe(), []

    def serve():
        codes.append(serving.serve(segment, os.getpid(), listener, "token", over))

    def answer():
        for _ in range(2):
            control.answer(lambda request: {"workers": [], "machines": [], "restarts": 0})

    def is_awake():
        return any(thread.name == "evenstep-http" for thread in threading.enumerate())

    threads = [threading.Thread(target=serve), threading.Thread(target=answer)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(2):
            assert not is_awake()
            monkeypatch.setattr(serving, "_IDLE_S", 60.0)
            with urllib.request.urlopen(url, timeout=30) as reply:
                assert json.loads(reply.read())["step"] == 0
            monkeypatch.setattr(serving, "_IDLE_S", 0.0)  # somebody looked that long ago
            assert processes.until(lambda: not is_awake()), "it has fallen asleep"
    finally:
        os.write(end, b".")
        for thread in threads:
            thread.join(30.0)
        control.close()
        listener.close()
        os.close(over)
        os.close(end)
    assert codes == [0]

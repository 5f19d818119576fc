"""How a web server stops: at once, and not before an answer that has begun is given."""

import asyncio
import socket
import threading
import urllib.request

import pytest
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from evenstep.server import Limits
from evenstep.server.transports.web import WebServer


@pytest.fixture
def started():
    """Set when a request has come."""
    return threading.Event()


@pytest.fixture
def server(started):
    async def slow(_):
        started.set()
        await asyncio.sleep(0.2)
        return PlainTextResponse("whole")

    return WebServer([Route("/", slow)], socket.create_server(("127.0.0.1", 0)), Limits())


def test_one_that_nobody_asks_stops_without_a_pause(server, monkeypatch):
    sleep, pauses = asyncio.sleep, []
    monkeypatch.setattr(asyncio, "sleep", lambda delay, *rest: pauses.append(delay) or sleep(delay, *rest))
    server.close()
    assert set(pauses) <= {0}


def test_an_answer_that_has_begun_is_given_to_the_end(server, started):
    url, said = f"http://127.0.0.1:{server._listener.getsockname()[1]}/", []

    def ask():
        with urllib.request.urlopen(url, timeout=20) as reply:
            said.append(reply.read())

    client = threading.Thread(target=ask)
    client.start()
    assert started.wait(20)
    server.close()
    client.join()
    assert said == [b"whole"]

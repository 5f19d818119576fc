"""Those who connect and do not say who they are: they get no more than their share, and not for long."""

import contextlib
import socket
import ssl
import threading
import time
import warnings
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from torch import nn

import processes
from evenstep.core.errors import UnreachableError
from evenstep.server import Limits, ParameterServer, connect

NUM_PLACES = 16
HALF_A_HEAD = b"GET /status HTTP/1.1\r\nHost: localhost\r\nX-Half: "
HALF_A_FRAME = b"EVST\x10\x00"
WRONG_TOKEN = b"GET /status HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer wrong\r\n\r\n"


def serve(transport, *, greeting_s=60.0, **options):
    limits = Limits(connections=NUM_PLACES, greeting_s=greeting_s)
    return ParameterServer(
        nn.Linear(4, 3), staleness=None, transports=(transport,), limits=limits, host="localhost", **options
    )


def reach(server):
    """A connection of a stranger."""
    parts = urlsplit(server.url)
    if parts.scheme == "memory":
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stream.settimeout(20)
        stream.connect(f"\0{parts.netloc}")
        return stream
    return socket.create_connection((parts.hostname, parts.port), timeout=20)


@contextlib.contextmanager
def crowd(server, says=b"", size=4 * NUM_PLACES):
    """Many strangers, who all say the same and then nothing."""
    with contextlib.ExitStack() as stack:
        held = []
        for _ in range(size):
            held.append(stack.enter_context(reach(server)))
            with contextlib.suppress(ConnectionError):
                held[-1].sendall(says)
        yield held


def is_over(stream):
    try:
        return stream.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize(
    ("transport", "says"),
    [
        ("http", b""),
        ("http", HALF_A_HEAD),
        ("http", WRONG_TOKEN),
        ("tcp", b""),
        ("tcp", HALF_A_FRAME),
        ("memory", b""),
    ],
)
def test_strangers_never_take_the_last_place(transport, says):
    with serve(transport, token="open-sesame") as server:
        with connect(server.url, token="open-sesame") as early, crowd(server, says):
            assert early.update_parameters({"bias": torch.ones(3)}, kind="delta") == 1
            with connect(server.url, token="open-sesame", timeout_s=20) as late:
                assert late.update_parameters({"bias": torch.ones(3)}, kind="delta") == 2
        assert server.store.version == 2


@pytest.mark.parametrize("transport", ["http", "tcp"])
def test_strangers_who_never_shake_hands_never_take_the_last_place(certificate, transport):
    certfile, keyfile = certificate
    options = {"certfile": certfile, "keyfile": keyfile}
    with serve(transport, **options) as server, crowd(server), connect(server.url, cafile=certfile) as client:
        assert client.update_parameters({"bias": torch.ones(3)}, kind="delta") == 1


@pytest.mark.parametrize(
    ("transport", "says"), [("http", b""), ("http", HALF_A_HEAD), ("tcp", b""), ("tcp", HALF_A_FRAME), ("memory", b"")]
)
def test_who_does_not_say_who_he_is_has_to_go(transport, says):
    with serve(transport, greeting_s=0.2) as server, crowd(server, says, 3) as held:
        begin = time.monotonic()
        assert all(is_over(stream) for stream in held)
        assert time.monotonic() - begin < 15


@pytest.mark.parametrize("transport", ["http", "tcp", "memory"])
def test_who_is_known_may_be_silent(transport):
    with serve(transport, greeting_s=0.1) as server, connect(server.url) as client:
        channel = client.connection._channel
        client.get_parameters()
        time.sleep(0.4)
        client.get_parameters()
        assert client.connection._channel is channel, "the connection was not lost in between"


def resident_bytes():
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("VmRSS"))


@pytest.mark.parametrize(
    "begin",
    [
        b"GET /status HTTP/1.1\r\nHost: localhost\r\nX-Long: ",
        b"GET /status HTTP/1.1\r\nHost: localhost\r\nX-Long",
        b"GET /status?names=",
        b"POST /update HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n0123456789GET /",
        b"GET /status HTTP/1.1\r\nHost: localhost\r\n\r\nGET /",
    ],
    ids=["value", "name", "address", "after a body", "after another"],
)
@pytest.mark.parametrize("step", [1 << 10, 1 << 20])
def test_what_comes_before_a_body_is_bounded_while_it_comes(begin, step):
    with serve("http", token="open-sesame") as server, reach(server) as stream:
        stream.settimeout(20)
        before, sent, piece = resident_bytes(), 0, b"a" * step
        with contextlib.suppress(ConnectionError):
            stream.sendall(begin)
            while sent < 64 << 20:
                stream.sendall(piece)
                sent += step
        assert sent < 16 << 20, "only what the system itself holds"
        assert resident_bytes() - before < 8 << 20
        with connect(server.url, token="open-sesame") as client:
            assert client.status()["version"] == 0


def test_a_head_that_is_too_long_is_one_sentence():
    with serve("http") as server, reach(server) as stream:
        stream.sendall(b"GET /status HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * (32 << 10))
        answer = stream.recv(1000)
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert b"more than 32768 bytes came before the body of a request" in answer


def test_a_head_just_short_enough_is_taken():
    with serve("http") as server, reach(server) as stream:
        stream.sendall(b"GET /status HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * (31 << 10) + b"\r\n\r\n")
        assert stream.recv(1000).startswith(b"HTTP/1.1 200 ")


def test_a_body_without_a_length_is_not_read():
    """Its end may be a trailer that never ends."""
    with serve("http") as server, reach(server) as stream:
        stream.sendall(
            b"POST /update HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/octet-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n0\r\nX-Long: "
        )
        answer = b""
        with contextlib.suppress(ConnectionError):
            while piece := stream.recv(65536):
                answer += piece
        assert answer.startswith(b"HTTP/1.1 411 ")


@pytest.mark.parametrize("transport", ["http", "tcp"])
def test_tls_below_1_2_is_refused(certificate, transport):
    certfile, keyfile = certificate
    with serve(transport, certfile=certfile, keyfile=keyfile) as server:
        for version in (ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_2):
            context = ssl.create_default_context(cafile=certfile)
            context.set_ciphers("ALL:@SECLEVEL=0")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                context.minimum_version = context.maximum_version = version
            with reach(server) as stream:
                if version is ssl.TLSVersion.TLSv1_2:
                    with context.wrap_socket(stream, server_hostname="localhost") as secure:
                        assert secure.version() == "TLSv1.2"
                else:
                    with pytest.raises(OSError, match=r"ALERT_PROTOCOL_VERSION|reset|EOF"):
                        context.wrap_socket(stream, server_hostname="localhost")


@pytest.mark.parametrize("transport", ["http", "tcp"])
def test_a_server_stops_although_a_client_holds_a_secure_connection(certificate, transport):
    certfile, keyfile = certificate
    server = serve(transport, certfile=certfile, keyfile=keyfile)
    server.start()
    with connect(server.url, cafile=certfile, timeout_s=0.5) as client:
        client.get_parameters()
        stopping = threading.Thread(target=server.close)
        stopping.start()
        stopping.join(30)
        assert not stopping.is_alive()
        with pytest.raises(UnreachableError):
            client.get_parameters()


def test_no_place_is_lost_by_those_who_come_and_go():
    with serve("tcp") as server:
        for _ in range(3 * NUM_PLACES):
            with connect(server.url) as client:
                client.get_parameters([])
        assert processes.until(lambda: threading.active_count() < NUM_PLACES)
        clients = [connect(server.url, timeout_s=20) for _ in range(NUM_PLACES)]
        for client in clients:
            client.close()

"""Strangers: no token, no TLS, garbage, and bodies that never end."""

import itertools
import random
import socket
import struct
import time
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
import torch
from torch import nn

from evenstep.core.errors import UnreachableError
from evenstep.server import Limits, ParameterServer, connect
from evenstep.server.hosting.config import ServerConfig
from evenstep.server.hosting.host import Host
from evenstep.server.wire.slices import ServerPlace
from evenstep.server.wire.tensors import encode

NUM_HARMED = 1500


@pytest.mark.parametrize("transport", ["http", "tcp"])
def test_tls_is_used_and_checked(certificate, transport):
    certfile, keyfile = certificate
    options = {"certfile": certfile, "keyfile": keyfile, "transports": (transport,), "host": "localhost"}
    with ParameterServer(nn.Linear(300, 200), staleness=None, **options) as server:
        assert urlsplit(server.url).scheme == transport + "s"
        with connect(server.url, cafile=certfile) as client:
            parameters = client.get_parameters()
            assert client.update_parameters(parameters, kind="delta") == 1
            assert not any(bool(value.any()) for value in client.get_parameters(min_version=1).values())
        with pytest.raises(UnreachableError, match="CERTIFICATE_VERIFY_FAILED"):
            connect(server.url, timeout_s=0.2)
        with pytest.raises(UnreachableError):
            connect(server.url.replace("s://", "://"), timeout_s=0.2)


def serve(**options):
    limits = Limits(body_bytes=1 << 20, fields_bytes=1 << 12, idle_s=0.3, connections=4, pace_bytes=1 << 30)
    return ParameterServer(nn.Linear(4, 3), staleness=None, transports=("tcp",), limits=limits, **options)


def send(server, data, wait_s=20.0):
    """Send bytes; return what comes back until the connection ends or is silent."""
    parts = urlsplit(server.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=wait_s) as stream:
        try:
            stream.sendall(data)
            stream.shutdown(socket.SHUT_WR)
            found = b""
            while piece := stream.recv(65536):
                found += piece
        except ConnectionError:
            return b""
        return found


def frame(fields, body=b"", body_bytes=None):
    return struct.pack("<4sIQ", b"EVST", len(fields), len(body) if body_bytes is None else body_bytes) + fields + body


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"a frame begins with"),
        (struct.pack("<4sIQ", b"EVST", 1 << 30, 0), b"bytes of fields, expected at most 4096"),
        (frame(b"[" * 4000), b"is not JSON"),
        (frame(b'{"verb": "dance"}'), b"there is no verb 'dance'"),
        (frame(b'{"verb": "status", "verb": "put"}'), b"a name occurs twice"),
        (frame(b'{"verb": "status"}', b"x"), b"'status' takes no tensors"),
        (frame(b'{"verb": "update"}', body_bytes=1 << 60), b"expected at most 1048576"),
        (frame(b'{"verb": "get", "wait_s": NaN}'), b"NaN is not a number"),
        (frame(b'{"verb": "get", "names": [1]}'), b"names=[1], expected a list of names"),
        (frame(b'{"verb": "register", "worker": ""}'), b"expected a name of at most"),
        (frame(b'{"verb": "put", "worker": "x"}', b"\xff" * 8), b"the head of the tensors is"),
    ],
)
def test_garbage_is_answered_with_one_sentence(data, words):
    with serve() as server:
        assert words in send(server, data)
        assert server.store.version == 0
        with connect(server.url) as client:
            assert client.status()["version"] == 0


def test_slow_clients_hold_nobody_back():
    with serve() as server:
        parts = urlsplit(server.url)
        slow = socket.create_connection((parts.hostname, parts.port))
        slow.sendall(frame(b'{"verb": "register", "worker": "slow"}'))
        slow.recv(1000)
        slow.sendall(frame(b'{"verb": "update", "worker": "slow", "sequence": 1}', b"\x10", body_bytes=1000))
        with connect(server.url) as client:
            begin = time.monotonic()
            for _ in range(3):
                client.update_parameters({"bias": torch.ones(3)}, kind="delta")
            assert time.monotonic() - begin < 15
        slow.settimeout(20)
        assert slow.recv(1000) == b"", "it was dropped"
        slow.close()


def test_there_are_no_more_connections_than_allowed():
    with serve() as server:
        parts = urlsplit(server.url)
        held = []
        for _ in range(4):
            held.append(socket.create_connection((parts.hostname, parts.port)))
            held[-1].sendall(frame(b'{"verb": "status"}'))
            assert held[-1].recv(4)
        late = socket.create_connection((parts.hostname, parts.port), timeout=10)
        assert late.recv(1) == b""
        for stream in (*held, late):
            stream.close()


def mutations(seed, more=()):
    """Valid requests, harmed in random places."""
    dice = random.Random(seed)
    body = b"".join(encode({"weight": torch.zeros(3, 4), "bias": torch.zeros(3)}))
    whole = [
        *more,
        frame(b'{"verb":"register","worker":"w"}'),
        frame(b'{"verb":"update","worker":"w","sequence":1,"kind":"delta"}', body),
        frame(b'{"verb":"get","min_version":0,"names":["bias"],"wait_s":0}'),
        frame(b'{"verb":"put","worker":"w","force":false}', body),
        frame(b'{"verb":"wait","worker":"w"}'),
    ]
    while True:
        data = bytearray(dice.choice(whole))
        for _ in range(dice.randint(1, 6)):
            at = dice.randrange(len(data))
            what = dice.randrange(4)
            if what == 0:
                data[at] = dice.randrange(256)
            elif what == 1:
                del data[at : at + dice.randint(1, 9)]
            elif what == 2:
                data[at:at] = bytes(dice.randrange(256) for _ in range(dice.randint(1, 9)))
            else:
                data[at : at + 1] = dice.choice([b'"', b"{", b"]", b"9999999999", b"-1", b"null", b"\xff\xff"])
            data = data or bytearray(b"x")
        yield bytes(data)


@pytest.mark.long
def test_no_harmed_frame_brings_the_server_down():
    with serve() as server:
        for data in itertools.islice(mutations(1), NUM_HARMED):
            send(server, data)
        with connect(server.url) as client:
            assert set(client.get_parameters()) == {"weight", "bias"}
            assert client.status()["broken"] is None
            assert all(bool(torch.isfinite(value).all()) for value in client.get_parameters().values())


@pytest.mark.long
def test_no_harmed_frame_brings_a_server_of_several_down():
    """A follower: it is told what to do by clients."""
    config = ServerConfig(transports=("tcp",), limits=Limits(body_bytes=1 << 20, fields_bytes=4096, idle_s=0.3))
    server = Host(config, None, (nn.Linear(4, 3), None), ServerPlace(1, 2, "set"))
    body = b"".join(encode({name: torch.zeros_like(tensor) for name, tensor in server.store.tensors().items()}))
    who = b'"worker":"w","session":"s","sequence":1'
    more = [
        frame(b'{"verb":"stage",%s,"kind":"delta","samples":2}' % who, body),
        frame(b'{"verb":"order","order":[[1,{"w":[1,"s"]}]],"alive":["w"],"wait_s":0}'),
        frame(b'{"verb":"slice","layout":true}'),
        frame(b'{"verb":"pause","on":true}'),
    ]
    server.start()
    there = SimpleNamespace(url=server.urls["tcp"])
    try:
        for request, answer in zip(more[:2], (b"is not registered", b'"pending":true'), strict=True):
            assert answer in send(there, request)
        for harmed in (b"[[1,{}]]", b'[[1,{"w":[1]}]]', b"7", b'[["x",{"w":[1,"s"]}]]'):
            assert b"expected" in send(there, frame(b'{"verb":"order","order":%s}' % harmed))
        for data in itertools.islice(mutations(3, more), NUM_HARMED):
            send(there, data)
        assert server.store.status()["broken"] is None
        assert b'"place":[1,2,"set",true]' in send(there, more[2])
    finally:
        server.close()


@pytest.mark.long
def test_no_harmed_http_request_brings_the_server_down():
    limits = Limits(body_bytes=1 << 20, idle_s=0.3)
    with ParameterServer(nn.Linear(4, 3), staleness=None, transports=("http",), limits=limits) as server:
        dice = random.Random(2)
        body = b"".join(encode({"weight": torch.zeros(3, 4), "bias": torch.zeros(3)}))
        head = (
            b"POST /update?worker=w&sequence=1&kind=delta HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            b"Content-Type: application/octet-stream\r\nContent-Length: %d\r\n\r\n" % len(body)
        )
        for _ in range(NUM_HARMED):
            data = bytearray(head + body)
            for _ in range(dice.randint(1, 5)):
                data[dice.randrange(len(data))] = dice.randrange(256)
            send(server, bytes(data))
        with connect(server.url) as client:
            assert client.status()["version"] == 0
            assert set(client.get_parameters()) == {"weight", "bias"}

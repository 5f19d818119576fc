"""Shared memory with a client that does not keep to the rules: it harms nobody but itself."""

import array
import contextlib
import json
import mmap
import os
import socket
import struct
import threading
from urllib.parse import urlsplit

import pytest
import torch
from torch import nn

import processes
from evenstep.server import Limits, ParameterServer, connect
from evenstep.server.wire.areas import places
from evenstep.server.wire.tensors import encode

HEAD = bytes(encode({"weight": torch.zeros(3, 4), "bias": torch.zeros(3)})[0][8:]).decode()
DATA_BYTES = 60


def serve(idle_s=0.3, **options):
    limits = Limits(idle_s=idle_s, wait_s=0.01)
    return ParameterServer(nn.Linear(4, 3), staleness=None, transports=("memory",), limits=limits, **options)


class Hostile:
    """A client that writes frames by itself."""

    def __init__(self, server):
        self.stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.stream.settimeout(20)
        self.stream.connect(f"\0{urlsplit(server.url).netloc}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stream.close()

    def send(self, **fields):
        text = json.dumps(fields).encode()
        self.stream.sendall(struct.pack("<4sIQ", b"EVST", len(text), 0) + text)

    def hear(self):
        """The next reply; None if the connection is over."""
        head = self.stream.recv(16, socket.MSG_WAITALL)
        if not head:
            return None
        return json.loads(self.stream.recv(struct.unpack("<4sIQ", head)[1], socket.MSG_WAITALL))

    def ask(self, **fields):
        self.send(**fields)
        return self.hear()

    def update(self, sequence, **more):
        fields = {"worker": "w", "sequence": sequence, "kind": "delta", "head": HEAD, "data_bytes": DATA_BYTES}
        return self.ask(verb="update", **{**fields, **more})

    def receive_fd(self):
        self.stream.sendall(b"m")
        _, ancillary, _, _ = self.stream.recvmsg(1, socket.CMSG_SPACE(4))
        return array.array("i", ancillary[0][2])[0]


def is_served(server):
    with connect(server.url, timeout_s=10) as client:
        before = client.get_parameters()["bias"]
        client.update_parameters({"bias": torch.ones(3)}, kind="delta")
        return torch.equal(client.get_parameters()["bias"], before - 1)


@pytest.mark.parametrize(
    "fields",
    [
        {"head": 7}, {"head": None}, {"head": []}, {"head": "nonsense"}, {"head": ""}, {"head": "{}"},
        {"head": "\ud800"}, {"head": '{"bias": {}}'}, {"data_bytes": -1}, {"data_bytes": True}, {"data_bytes": "60"},
        {"data_bytes": None}, {"data_bytes": 59}, {"data_bytes": 1 << 61}, {"data_bytes": 10**30},
        {"head": HEAD.replace("60", "61")},
        {"head": HEAD.replace("F32", "F99")}, {"head": HEAD.replace("bias", "bass")},
    ],
)  # fmt: skip
def test_a_head_that_lies_is_a_sentence(fields):
    with serve() as server, Hostile(server) as client:
        client.ask(verb="register", worker="w")
        reply = client.update(1, **fields)
        assert 400 <= reply["status"] < 500, reply
        assert server.store.version == 0
        assert is_served(server)


@pytest.mark.parametrize("verb", ["get", "status", "register"])
def test_a_head_where_none_belongs_is_a_sentence(verb):
    with serve() as server, Hostile(server) as client:
        fields = {"worker": "w"} if verb == "register" else {}
        reply = client.ask(verb=verb, head=HEAD, data_bytes=DATA_BYTES, **fields)
        assert (reply["status"], reply["error"]) == (400, f"'{verb}' takes no tensors")
        assert client.ask(verb="status")["status"] == 200


@pytest.mark.parametrize("says", [b"", b"m"])
def test_who_is_offered_an_area_and_says_no_more_is_dropped(says):
    with serve() as server, Hostile(server) as client:
        client.ask(verb="register", worker="w")
        assert client.update(1)["area_bytes"] == DATA_BYTES
        with contextlib.suppress(ConnectionError):  # it may be over, if this took long
            client.stream.sendall(says)
        assert is_served(server), "meanwhile"
        with contextlib.suppress(ConnectionError):
            while client.stream.recv(1000):
                pass


def test_who_reads_for_ever_is_dropped_and_holds_nobody_back():
    with serve() as server, contextlib.ExitStack() as stack:
        held = [stack.enter_context(Hostile(server)) for _ in range(5)]
        for client in held:
            assert client.ask(verb="get", place_only=True, layout=True)["image"] >= 1
            assert is_served(server)
        assert processes.until(lambda: server.store.status()["copies"] <= 2), "what they held was let go"
        assert all(client.hear() is None for client in held)


def test_memory_can_be_neither_shortened_nor_written_where_it_is_only_read():
    with serve(idle_s=30.0) as server, Hostile(server) as client:
        client.ask(verb="register", worker="w")
        client.update(1)
        area = client.receive_fd()
        with pytest.raises(PermissionError):
            os.ftruncate(area, 1)
        client.stream.sendall(b"d")
        assert client.hear()["version"] == 1
        assert "image" in client.ask(verb="get", place_only=True)
        image = client.receive_fd()
        _, size = places(server.store.layout.specs)
        with pytest.raises(PermissionError):
            mmap.mmap(image, size)
        for fd in (area, image):
            os.close(fd)
        client.stream.sendall(b"d")
        assert is_served(server)


def test_memory_that_changes_while_it_is_looked_at_poisons_no_log(tmp_path):
    """What is written down is what was applied, and is whole, whatever the client writes meanwhile."""
    torch.manual_seed(0)
    options = {"transports": ("memory",), "directory": tmp_path / "first", "durable": True, "staleness": None}
    net = nn.Linear(200, 100)
    with ParameterServer(net, reject_nonfinite=True, **options) as server, connect(server.url) as client:
        deltas = {name: torch.zeros_like(value) for name, value in client.get_parameters().items()}
        client.update_parameters(deltas, kind="delta")
        area = torch.frombuffer(client.connection._channel._area.data, dtype=torch.float32)
        over = threading.Event()

        def scribble():
            while not over.is_set():
                area.fill_(torch.nan)
                area.normal_()

        thread = threading.Thread(target=scribble)
        thread.start()
        try:
            for sequence in range(2, 2000):
                with contextlib.suppress(Exception):  # it was not finite at the moment
                    client.update_parameters(deltas, kind="delta", sequence=sequence)
                if sequence > 60 and server.store.version > 1:
                    break
        finally:
            over.set()
            thread.join()
        version = server.store.version
        values = {name: value.clone() for name, value in server.store.tensors().items()}
        copies = {path.name: path.read_bytes() for path in (tmp_path / "first").iterdir()}
    (tmp_path / "killed").mkdir()
    for name, content in copies.items():
        (tmp_path / "killed" / name).write_bytes(content)
    assert version > 1
    assert all(bool(torch.isfinite(value).all()) for value in values.values())
    options["directory"] = tmp_path / "killed"
    with ParameterServer(nn.Linear(200, 100), **options) as server:
        assert server.store.version == version
        assert all(torch.equal(value, values[name]) for name, value in server.store.tensors().items())


def test_indices_that_change_while_they_are_looked_at_are_refused_or_used_as_they_were():
    with ParameterServer(nn.Linear(200, 100), staleness=None, transports=("memory",)) as server:
        with connect(server.url, top_k=0.5) as client:
            deltas = {"weight": torch.randn(100, 200)}
            client.update_parameters(deltas, kind="delta")
            area = torch.frombuffer(client.connection._channel._area.data, dtype=torch.int64, count=100)
            over = threading.Event()

            def scribble():
                while not over.is_set():
                    area.fill_(1 << 40)
                    area.copy_(torch.arange(100))

            thread = threading.Thread(target=scribble)
            thread.start()
            try:
                for sequence in range(2, 100):
                    with contextlib.suppress(Exception):
                        client.update_parameters(deltas, kind="delta", sequence=sequence)
            finally:
                over.set()
                thread.join()
        assert server.store.status()["broken"] is None
        with connect(server.url) as client:
            assert client.update_parameters({"bias": torch.ones(100)}, kind="delta") == server.store.version


def test_a_client_that_dies_leaves_nothing_behind():
    with serve() as server:
        before = len(processes.memfds())
        for _ in range(4):
            pid = os.fork()
            if pid == 0:
                client = Hostile(server)
                client.ask(verb="register", worker="w")
                client.update(1)
                os.kill(os.getpid(), 9)
            os.waitpid(pid, 0)
        assert is_served(server)
        assert processes.until(lambda: len(processes.memfds()) <= before + 1)
        assert processes.until(lambda: threading.active_count() <= 3)

"""One version from all servers, and a decision to all of them: without any server."""

import threading
import time

import pytest
import torch

from evenstep.core.errors import UnreachableError
from evenstep.server.client.server_set import ServerSet


class FakeServer:
    """A server with one piece; a follower is at a version only when it was told."""

    url = "fake"

    def __init__(self, index, versions):
        self.index, self.versions, self.asked = index, list(versions), []

    @property
    def version(self):
        return self.versions[0]

    def pull(self, fields, out, deadline):
        self.asked.append(("get", fields["min_version"]))
        if self.version < fields["min_version"]:
            return {"pending": True, "version": self.version}, {}
        for tensor in out.values():
            tensor.fill_(self.version)
        return {"version": self.version}, dict(out)

    def ask(self, verb, fields, deadline):
        self.asked.append((verb, fields.get("on")))
        if verb == "order" and self.index == 0:
            return {"newest": self.version, "order": [[self.version, {"w": [1, "s"]}]], "alive": []}
        if verb == "order" and len(self.versions) > 1:
            self.versions.pop(0)
        return {"version": self.version}

    def close(self):
        self.asked.append("closed")


def servers_at(*versions):
    return ServerSet([FakeServer(n, each if isinstance(each, list) else [each]) for n, each in enumerate(versions)])


def read(servers, *, locked=True):
    pieces = [{"p": torch.zeros(1)} for _ in servers.connections]
    servers.read(pieces, range(len(pieces)), {"min_version": 0}, time.monotonic() + 20, locked=locked)
    return [float(piece["p"]) for piece in pieces]


def test_a_server_that_lags_is_told_and_read_again():
    servers = servers_at(3, [2, 3], 3)
    assert read(servers) == [3, 3, 3]
    assert servers.at == [3, 3, 3]
    assert ("order", None) in servers.connections[1].asked
    servers.close()
    assert all(each.asked[-1] == "closed" for each in servers.connections)


def test_without_a_lock_whatever_is_there_will_do():
    servers = servers_at(3, 2)
    assert read(servers, locked=False) == [3, 2]
    servers.close()


def test_a_follower_that_never_gets_there_is_named():
    servers = servers_at(4, 1, 1)
    with pytest.raises(UnreachableError, match="server 1 of fake,fake,fake misses an update that server 0 has applied"):
        servers.spread(time.monotonic() + 0.1)
    assert not servers.spread(time.monotonic() + 5, [1], patient=False), "told once, and not waited for"
    servers.close()


def test_all_are_asked_at_once_and_the_first_error_is_raised_when_all_are_done():
    servers, together = servers_at(0, 0, 0), threading.Barrier(3, timeout=60)

    def meet(n, _):
        together.wait()
        if n:
            raise ValueError(n)

    with pytest.raises(ValueError, match="1"):
        servers.each(meet)
    assert servers.each(lambda n, _: n, [2, 0]) == [2, 0]
    assert servers.each(lambda n, _: n, []) == []
    servers.close()

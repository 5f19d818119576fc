"""The servers of a run with groups: started, introduced to each other, stopped, and noticed when they die."""

import signal

import pytest

from evenstep.core.errors import ServerError
from evenstep.launch import servers
from evenstep.launch.servers import start_servers
from evenstep.plan.groups import Setup


def test_servers_say_where_they_are_and_end_when_they_are_told():
    started = start_servers(Setup(None, 2, 1, 2, 1), "secret")
    try:
        assert [server.number for server in started] == [0, 1]
        assert all(set(server.urls) == {"tcp", "memory"} for server in started)
    finally:
        for server in started:
            server.stop()
    assert [server.child.code for server in started] == [0, 0]


def test_a_server_that_dies_is_described():
    (server,) = start_servers(Setup(None, 1, 1, 1, 1), "secret")
    server.child.signal(signal.SIGKILL)
    server.child.reap()
    assert server.describe_end() == "server 0 was killed by SIGKILL, and its parameters are gone"
    server.stop()


def test_a_server_that_does_not_start_leaves_none(monkeypatch):
    real = servers._serve

    def serve(number, *rest):
        return 1 if number == 1 else real(number, *rest)

    monkeypatch.setattr(servers, "_serve", serve)
    with pytest.raises(ServerError, match="server 1 did not start"):
        start_servers(Setup(None, 2, 1, 2, 1), "secret")

"""The servers of a run with groups: one process each, started and ended by the launcher."""

import json
import os
import select
import signal
import time
from contextlib import suppress
from dataclasses import dataclass

import torch

from evenstep.core.children import Child, default_signals, fork
from evenstep.core.errors import ServerError
from evenstep.plan.groups import Setup
from evenstep.server.hosting.replicas import Replica
from evenstep.server.hosting.server import ParameterServer
from evenstep.server.service.limits import Limits

__all__ = ["ServerProcess", "start_servers"]

_START_S = 30.0
_STOP_S = 10.0
_LIMITS = Limits(connections=4096)  # every part of every group has its own connection


@dataclass
class ServerProcess:
    """A server from its start to its end.

    Attributes:
        number: Its number.
        child: Its process.
        control: A pipe to it, for lines; when it closes, the server ends.
        urls: Where it listens.
    """

    number: int
    child: Child
    control: int
    urls: dict[str, str]

    def describe_end(self) -> str:
        """How it ended, as a sentence."""
        return f"server {self.number} {self.child.describe_end()}, and its parameters are gone"

    def stop(self, *, at_once: bool = False) -> None:
        """End it: it may finish, and is killed if that takes too long; `at_once`: it is killed now."""
        os.close(self.control)
        if at_once or not self.child.wait(_STOP_S):
            self.child.signal(signal.SIGKILL)
        self.child.reap()


def start_servers(setup: Setup, token: str) -> list[ServerProcess]:
    """Start all servers, and introduce those that hold the same parameters to each other.

    Raises:
        ServerError: One cannot be started; none is left running.
    """
    servers: list[ServerProcess] = []
    try:
        for number in range(setup.servers):
            server = _start(number, setup, token)
            servers.append(server)
        for server in servers:
            peers = [
                other.urls["memory"]
                for other in servers
                if other is not server and (other.number - server.number) % setup.servers_per_group == 0
            ]
            os.write(server.control, json.dumps(peers).encode() + b"\n")
    except BaseException:
        for server in servers:
            server.stop()
        raise
    return servers


def _start(number: int, setup: Setup, token: str) -> ServerProcess:
    told, control = os.pipe()
    reading, report = os.pipe()
    child = fork(lambda: _serve(number, setup, token, told, report), keep={told, report})
    os.close(told)
    os.close(report)
    try:
        urls = json.loads(_line(reading, _START_S) or "{}")
    finally:
        os.close(reading)
    server = ServerProcess(number, child, control, urls)
    if not urls:
        server.stop()
        raise ServerError(f"server {number} did not start; its own message is above")
    return server


def _line(fd: int, timeout_s: float) -> str:
    """One line from a pipe; or what had arrived when the pipe closed or the time was up."""
    data, deadline = b"", time.monotonic() + timeout_s
    while not data.endswith(b"\n") and select.select([fd], [], [], max(deadline - time.monotonic(), 0))[0]:
        piece = os.read(fd, 65536)
        if not piece:
            break
        data += piece
    return data.decode()


def _serve(number: int, setup: Setup, token: str, told: int, report: int) -> int:
    """The body of a server's process; returns its exit code."""
    default_signals()
    torch.set_num_threads(1)  # as in a run
    parameter_server = ParameterServer(
        staleness=setup.staleness, lock=setup.lock, token=token, limits=_LIMITS, transports=("tcp", "memory")
    )
    with parameter_server as server:
        os.write(report, json.dumps(server.urls).encode() + b"\n")
        os.close(report)
        peers = json.loads(_line(told, _START_S) or "[]")
        group = number // setup.servers_per_group
        replica = Replica(server.store, f"server group {group}", peers, token) if peers else None
        with suppress(OSError):
            while os.read(told, 1):  # nothing more is sent; when the pipe closes, we end
                pass
        if replica is not None:
            replica.close()
    return 0

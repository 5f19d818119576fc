"""The servers of a run with groups: one process each, started and ended by the launcher."""

import json
import os
import select
import signal
import time
from dataclasses import dataclass

import torch

from evenstep.core.children import Child, default_signals, fork
from evenstep.core.errors import ServerError
from evenstep.core.events import send
from evenstep.launch.server_trace import ServerTrace
from evenstep.launch.trace_lines import in_reports
from evenstep.plan.groups import Setup
from evenstep.server.hosting.replicas import Replica
from evenstep.server.hosting.server import ParameterServer
from evenstep.server.service.limits import Limits

__all__ = ["ServerProcess", "start_servers"]

_START_S = 30.0
_STOP_S = 10.0
_FLUSH_S = 0.2
_LIMITS = Limits(connections=4096)  # every part of every group has its own connection


@dataclass
class ServerProcess:
    """A server from its start to its end.

    Attributes:
        number: Its number.
        child: Its process.
        control: A pipe to it, for lines; when it closes, the server ends.
        urls: Where it listens.
        events: A pipe from it, if it is traced, for events as JSON lines; its reader closes it.
    """

    number: int
    child: Child
    control: int
    urls: dict[str, str]
    events: int | None = None

    def describe_end(self) -> str:
        """How it ended, as a sentence."""
        return f"server {self.number} {self.child.describe_end()}, and its parameters are gone"

    def say_goodbye(self) -> None:
        """Let it end by itself."""
        if self.control >= 0:
            os.close(self.control)
            self.control = -1

    def stop(self, *, at_once: bool = False) -> None:
        """End it: it may finish, and is killed if that takes too long; `at_once`: it is killed now."""
        self.say_goodbye()
        if at_once or not self.child.wait(_STOP_S):
            self.child.signal(signal.SIGKILL)
        self.child.reap()


def start_servers(setup: Setup, token: str, traced_from_ns: int | None = None) -> list[ServerProcess]:
    """Start all servers, and introduce those that hold the same parameters to each other.

    Args:
        setup: How many there are, and what they do.
        token: What every request must carry.
        traced_from_ns: The zero of the trace that they take part in, if there is one.

    Raises:
        ServerError: One cannot be started; none is left running.
    """
    servers: list[ServerProcess] = []
    try:
        for number in range(setup.servers):
            server = _start(number, setup, token, traced_from_ns)
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
            if server.events is not None:
                os.close(server.events)
            server.stop()
        raise
    return servers


def _start(number: int, setup: Setup, token: str, traced_from_ns: int | None) -> ServerProcess:
    told, control = os.pipe()
    reading, report = os.pipe()
    child = fork(lambda: _serve(number, setup, token, told, report, traced_from_ns), keep={told, report})
    os.close(told)
    os.close(report)
    urls = json.loads(_line(reading, _START_S) or "{}")
    server = ServerProcess(number, child, control, urls, reading if urls and traced_from_ns is not None else None)
    if server.events is None:
        os.close(reading)
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


def _serve(number: int, setup: Setup, token: str, told: int, report: int, traced_from_ns: int | None) -> int:
    """The body of a server's process; returns its exit code."""
    default_signals()
    torch.set_num_threads(1)  # as in a run
    parameter_server = ParameterServer(
        staleness=setup.staleness, lock=setup.lock, token=token, limits=_LIMITS, transports=("tcp", "memory")
    )
    with parameter_server as server:
        os.write(report, json.dumps(server.urls).encode() + b"\n")
        peers = json.loads(_line(told, _START_S) or "[]")
        trace = None
        if traced_from_ns is None:
            os.close(report)
        else:
            process = setup.groups + 2 + number  # after the launcher and the groups
            trace = ServerTrace(number, process, traced_from_ns, in_reports(lambda event: send(report, event)))
            server.service.watch = trace.note
        group = number // setup.servers_per_group
        replica = Replica(server.store, f"server group {group}", peers, token) if peers else None
        while not select.select([told], [], [], None if trace is None else _FLUSH_S)[0]:
            assert trace is not None, "without a timeout, select returns when something is there"
            trace.flush()  # nothing more is sent to us; when the pipe closes, we end
        if replica is not None:
            replica.close()
    if trace is not None:
        trace.flush()
    return 0

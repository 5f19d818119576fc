"""The process that starts several servers, watches them, and restarts one that has died.

It is forked once from the user's process, has one thread, and forks the servers: so one can safely be restarted at any
time, from the model as it was initially, and resumes from its directory. It exchanges messages with the user's
process on one side and with each server on the other. When the user's process is gone, it ends, and so do the servers.
"""

import contextlib
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from evenstep.core.children import Child, Children
from evenstep.core.errors import EvenstepError
from evenstep.server.hosting.config import ServerConfig
from evenstep.server.hosting.host import Host, Origin
from evenstep.server.wire.slices import ServerPlace

__all__ = ["FleetPlan", "Messages", "watch_servers"]

_SHORT_S = 0.2  # a server that lived no longer than this is restarted after a pause
_LOOK_S = 0.5  # how often to check whether the user's process is still there
log = logging.getLogger("evenstep.server")


class Messages:
    """JSON messages over a socket, a line for each."""

    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream
        self._begun = b""

    def say(self, message: Mapping[str, Any]) -> None:
        """Send one; if the other side is gone, it is lost."""
        with contextlib.suppress(OSError):
            self.stream.sendall(json.dumps(message).encode() + b"\n")

    def hear(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """Wait for the next one; None if the other side is gone.

        Raises:
            TimeoutError: It did not come in time.
        """
        self.stream.settimeout(timeout_s)
        while b"\n" not in self._begun:
            try:
                data = self.stream.recv(65536)
            except ConnectionError:
                return None
            if not data:
                return None
            self._begun += data
        line, _, self._begun = self._begun.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found


@dataclass(frozen=True)
class FleetPlan:
    """What servers to start.

    Attributes:
        config: The options of each.
        token: The token of all.
        origin: The model and its optimizer.
        place: Which set they are, and how many.
    """

    config: ServerConfig
    token: str | None
    origin: Origin
    place: ServerPlace

    def config_of(self, index: int) -> ServerConfig:
        """The options of one of them, with its own directory."""
        if self.config.directory is None:
            return self.config
        return replace(self.config, directory=Path(self.config.directory) / f"server-{index}")


def watch_servers(plan: FleetPlan, stream: socket.socket, parent: int) -> int:
    """Start the servers, and watch them until the user's process says that it is over, or ends.

    Args:
        plan: What servers to start.
        stream: The connection to the user's process.
        parent: The id of that process.

    Returns:
        The exit code of this process.
    """
    _ignore_signals()
    watcher = _Watcher(plan, Messages(stream))
    with watcher.children:
        watcher.run(parent)
    return 0


def _ignore_signals() -> None:
    """Ignore signals to all processes: they are meant for the user's process, which ends the others."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


@dataclass
class _Server:
    """The watcher's record of a server.

    Attributes:
        index: Its number.
        control: Where it is told what to do.
        known: Its ports and the name of its memory, once it has some.
        since_s: When it was started.
        ready: Whether it has begun to serve.
    """

    index: int
    control: int
    known: dict[str, Any]
    since_s: float
    ready: bool = False


class _Watcher:
    def __init__(self, plan: FleetPlan, user: Messages) -> None:
        self._plan, self._user = plan, user
        self.children = Children(self._heard, self._ended)
        self._servers: dict[Child, _Server] = {}
        self._wanted, self._over = "start", False

    def run(self, parent: int) -> None:
        self.children.watch(self._user.stream, self._on_user)
        for index in range(self._plan.place.count):
            self._start(index, {})
        while not self._over and os.getppid() == parent:
            self.children.turn(_LOOK_S)
        while self._wanted == "close" and self._servers:
            self.children.turn(_LOOK_S)

    def _start(self, index: int, known: dict[str, Any]) -> None:
        told, control = os.pipe()
        wanted = self._wanted

        def serve(writing: Mapping[str, int]) -> int:
            _ignore_signals()
            return _serve(self._plan, index, known, wanted, told, writing["events"])

        child = self.children.start(serve, ["events"], keep={told})
        os.close(told)
        self._servers[child] = _Server(index, control, known, time.monotonic())

    def _on_user(self) -> None:
        asked = self._user.hear()
        self._wanted = asked["do"] if asked is not None else "end"
        self._over = self._wanted in ("close", "end")
        for server in self._servers.values():
            with contextlib.suppress(BrokenPipeError):  # the server has just ended
                os.write(server.control, self._wanted.encode() + b"\n")

    def _heard(self, child: Child, _: str, lines: Sequence[bytes]) -> None:
        server = self._servers[child]
        for line in lines:
            said = json.loads(line)
            if "name" in said:
                server.ready = True
                server.known = {"ports": said["ports"], "name": said["name"]}
            self._user.say({"server": server.index, **said})

    def _ended(self, child: Child) -> None:
        server = self._servers.pop(child)
        os.close(server.control)
        if self._over:
            return
        what = f"server {server.index} of {self._plan.place.count} (pid {child.pid}) {child.describe_end()}"
        if server.ready and self._plan.config.directory is not None:
            log.warning("%s; it is started again from its directory", what)
            if time.monotonic() - server.since_s < _SHORT_S:
                time.sleep(_SHORT_S)  # in case it dies again at once, over and over
            self._start(server.index, server.known)
            return
        remedy = (
            "its slice of the parameters is lost, so all servers end; with a directory it would have been started again"
            if server.ready
            else "it could not be started"
        )
        log.error("%s: %s", what, remedy)
        self._user.say({"server": server.index, "error": f"{what}: {remedy}", "kind": "ServerError"})
        self._over = True


def _serve(plan: FleetPlan, index: int, known: Mapping[str, Any], wanted: str, told: int, report: int) -> int:
    """Run one server as the watcher says, until it says to close or is gone."""
    torch.set_num_threads(1)  # threads do not survive a fork; and more of them would change a slice's last bits
    place = replace(plan.place, index=index)
    server: Host | None = None

    def say(message: Mapping[str, Any]) -> None:
        os.write(report, json.dumps(message).encode() + b"\n")

    with os.fdopen(told) as commands:
        while wanted not in ("", "close", "end"):
            try:
                if server is None:
                    config = plan.config_of(index)
                    server = Host(config, plan.token, plan.origin, place, known.get("ports"), known.get("name"))
                (server.start if wanted == "start" else server.stop)()
                say({"done": wanted, "urls": server.urls, "ports": server.ports, "name": server.name})
            except EvenstepError as error:
                say({"error": str(error), "kind": type(error).__name__})
            wanted = commands.readline().strip()
    if server is not None and wanted == "close":
        server.close()
    return 0

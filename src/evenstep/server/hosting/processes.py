"""The process that starts several servers, watches them, and starts one again that has died.

It is forked once from the user's process, has one thread, and forks the servers: so one can be started again at any
time, safely, from the model as it was at first, and goes on from its directory. It talks JSON lines with the user's
process on one side and with each server on the other. When the user's process is gone, it ends, and so do the servers.
"""

import contextlib
import json
import logging
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from evenstep.core.errors import EvenstepError
from evenstep.native import core
from evenstep.server.hosting.config import ServerConfig
from evenstep.server.hosting.host import Origin, SingleServer
from evenstep.server.wire.slices import ServerPlace

__all__ = ["Line", "become", "live"]

_SHORT_S = 0.2  # a server that lived for no longer is started again after a pause
_LOOK_S = 0.5  # how often to look whether the user's process is still there
log = logging.getLogger("evenstep.server")


class Line:
    """JSON lines over a socket."""

    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream
        self._begun = b""

    def say(self, message: dict[str, Any]) -> None:
        """Send one; if nobody is there any more, it is lost."""
        with contextlib.suppress(OSError):
            self.stream.sendall(json.dumps(message).encode() + b"\n")

    @property
    def has_more(self) -> bool:
        """Whether another message has come with the last."""
        return b"\n" in self._begun

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


def become(main: Callable[[Line], None], keep: socket.socket) -> NoReturn:
    """Turn a process that was just forked into something else: nothing of what it inherited is its own but a socket."""
    code = 1
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # who signals all of us means the user's process, which ends us
        signal.set_wakeup_fd(-1)
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) != keep.fileno():
                with contextlib.suppress(OSError):  # the directory's own descriptor is gone by now
                    os.close(int(name))
        main(Line(keep))
        code = 0
    except BaseException:
        log.exception("a process of the parameter server failed")
        raise
    finally:
        os._exit(code)


@dataclass
class _Server:
    """A server as the nursery sees it.

    Attributes:
        pid: Its process.
        pidfd: Readable when it has ended.
        line: To talk to it.
        known: Its ports and the name of its memory, once it had some.
        ready: Whether it has served.
        since_s: When it was started.
    """

    pid: int
    pidfd: int
    line: Line
    known: dict[str, Any]
    ready: bool = False
    since_s: float = field(default_factory=time.monotonic)


class _Nursery:
    def __init__(
        self, line: Line, parent: int, config: ServerConfig, token: str | None, origin: Origin, set_: ServerPlace
    ) -> None:
        self._line, self._parent, self._config, self._token = line, parent, config, token
        self._origin, self._set = origin, set_
        self._servers: list[_Server] = []
        self._wanted = "start"
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        self._selector.register(self._line.stream, selectors.EVENT_READ, None)
        for index in range(self._set.count):
            self._servers.append(self._start(index, {}))
        while os.getppid() == self._parent:
            for key, _ in self._selector.select(_LOOK_S):
                if key.data is None:
                    asked = self._line.hear()
                    if asked is None:
                        return
                    self._ask(asked["do"])
                    if asked["do"] == "close":
                        return
                else:
                    self._look_at(*key.data)
                    break  # what else was ready may be gone by now

    def _start(self, index: int, known: dict[str, Any]) -> _Server:
        ours, theirs = socket.socketpair()
        place = replace(self._set, index=index)
        config = self._config
        if config.directory is not None:
            config = replace(config, directory=Path(config.directory) / f"server-{index}")
        parent, wanted = os.getpid(), self._wanted
        pid = os.fork()
        if pid == 0:
            core.die_with_parent()
            if os.getppid() != parent:
                os._exit(1)
            become(lambda line: _serve(line, config, self._token, self._origin, place, known, wanted), theirs)
        theirs.close()
        server = _Server(pid, os.pidfd_open(pid), Line(ours), known)
        self._selector.register(ours, selectors.EVENT_READ, (index, "said"))
        self._selector.register(server.pidfd, selectors.EVENT_READ, (index, "ended"))
        return server

    def _ask(self, what: str) -> None:
        self._wanted = what
        for server in self._servers:
            server.line.say({"do": what})
        if what == "close":
            for server in self._servers:
                os.waitpid(server.pid, 0)

    def _look_at(self, index: int, what: str) -> None:
        server = self._servers[index]
        while what == "said" and (said := server.line.hear()) is not None:
            if "name" in said:
                server.ready = True
                server.known = {"ports": said["ports"], "name": said["name"]}
            self._line.say({"server": index, **said})
            if not server.line.has_more:
                return
        self._selector.unregister(server.line.stream)
        self._selector.unregister(server.pidfd)
        _, status = os.waitpid(server.pid, 0)
        os.close(server.pidfd)
        server.line.stream.close()
        code = os.waitstatus_to_exitcode(status)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        what_now = f"server {index} of {self._set.count} (pid {server.pid}) {how}"
        if server.ready and self._config.directory is not None:
            log.warning("%s; it is started again from its directory", what_now)
            if time.monotonic() - server.since_s < _SHORT_S:
                time.sleep(_SHORT_S)  # it may die again
            self._servers[index] = self._start(index, server.known)
            return
        remedy = (
            "its slice of the parameters is lost, so all servers end; with a directory it would have been started again"
            if server.ready
            else "it could not be started"
        )
        log.error("%s: %s", what_now, remedy)
        self._line.say({"server": index, "error": f"{what_now}: {remedy}", "kind": "ServerError"})
        raise SystemExit(0)

    def end(self) -> None:
        for server in self._servers:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(server.pid, signal.SIGKILL)
                os.waitpid(server.pid, 0)


def live(line: Line, parent: int, config: ServerConfig, token: str | None, origin: Origin, set_: ServerPlace) -> None:
    """Be the nursery, until the user's process says that it is over, or ends.

    Args:
        line: To the user's process.
        parent: Its id.
        config: What the servers were asked to be.
        token: For all of them.
        origin: The model and its optimizer.
        set_: Which set they are, and how many.
    """
    nursery = _Nursery(line, parent, config, token, origin, set_)
    try:
        nursery.run()
    except SystemExit:
        pass
    finally:
        nursery.end()


def _serve(
    line: Line,
    config: ServerConfig,
    token: str | None,
    origin: Origin,
    place: ServerPlace,
    known: dict[str, Any],
    wanted: str,
) -> None:
    """Be one server, and do what the nursery says, until it says that it is over or is gone."""
    torch.set_num_threads(1)  # threads of before the fork are not here; and more would change the last bits of a slice
    server: SingleServer | None = None
    what: str | None = wanted
    while what is not None:
        try:
            if server is None:
                server = SingleServer(config, token, origin, place, known.get("ports"), known.get("name"))
            if what == "close":
                server.close()
                return
            (server.start if what == "start" else server.stop)()
            line.say({"done": what, "urls": server.urls, "ports": server.ports, "name": server.name})
        except EvenstepError as error:
            line.say({"error": str(error), "kind": type(error).__name__})
            if server is None:
                time.sleep(1.0)  # until we are ended
                return
        heard = line.hear()
        what = heard["do"] if heard is not None else None

"""The launcher of several groups: a supervisor process for each, servers beside them, one display, one exit code.

A group's supervisor looks after its workers as in any run. What it prints comes through pipes, as do its progress and
fingerprint. Whoever fails first, group or server, ends the run: the others are stopped, and only its words are shown.
"""

import json
import os
import secrets
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from evenstep.core.errors import EvenstepError, ServerError, Stopped
from evenstep.core.events import send
from evenstep.core.output import say
from evenstep.launch.console import Console
from evenstep.launch.servers import ServerProcess, start_servers
from evenstep.launch.supervisor import Job, supervise
from evenstep.launch.worker import live_apart
from evenstep.launch.worker_process import signal_name
from evenstep.plan.groups import Setup, Standing
from evenstep.run.progress import Merger, Progress

__all__ = ["conduct"]

_END_S = 15.0  # how long the groups may take to end once the run has failed, before they are killed
_DRAIN_S = 1.0


@dataclass
class _Group:
    """A group's supervisor, as its parent sees it."""

    number: int
    pid: int
    pidfd: int
    code: int | None = None
    pending: dict[str, bytes] = field(default_factory=dict)
    fingerprint: str | None = None

    def signal(self, number: int) -> None:
        if self.code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


class _Conductor:
    def __init__(self, job: Job, setup: Setup, console: Console) -> None:
        self._job, self._setup, self._console = job, setup, console
        self._selector = selectors.DefaultSelector()
        self._servers: list[ServerProcess] = []
        self._groups: list[_Group] = []
        self._merger = Merger(setup.groups)
        self._failed: _Group | ServerProcess | None = None
        self._code = 0
        self._stop_signal: int | None = None
        self._deadline: float | None = None

    def run(self) -> int:
        wake, told = socket.socketpair()
        told.setblocking(False)
        wake.setblocking(False)
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
        before = {number: signal.signal(number, lambda *_: None) for number in numbers}
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if ignored, nobody could be waited for
        signal.set_wakeup_fd(told.fileno())
        self._selector.register(wake, selectors.EVENT_READ, ("signal", None))
        try:
            token = secrets.token_urlsafe(24)
            self._servers = start_servers(self._setup, token)
            for server in self._servers:
                self._selector.register(server.pidfd, selectors.EVENT_READ, ("server", server))
            for number in range(self._setup.groups):
                self._start(number, token)
            while any(group.code is None for group in self._groups):
                left = 1.0 if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)
                self._turn(min(left, 1.0))
                if self._deadline is not None and time.monotonic() >= self._deadline:
                    self._signal_all(signal.SIGKILL)
            drained = time.monotonic() + _DRAIN_S
            while self._turn(0.0) and time.monotonic() < drained:
                pass
            return self._finish()
        finally:
            self._clean_up()
            signal.set_wakeup_fd(-1)
            for number, handler in before.items():
                signal.signal(number, handler)
            for closing in (wake, told, self._selector):
                closing.close()

    def _clean_up(self) -> None:
        for group in self._groups:
            if group.code is None:
                group.signal(signal.SIGKILL)  # its workers die with it
                os.waitpid(group.pid, 0)
        for key in list(self._selector.get_map().values()):
            if key.data[0] in ("out", "err", "events", "exit"):
                self._close(key.fd)
        for server in self._servers:
            with suppress(KeyError):
                self._selector.unregister(server.pidfd)
            server.stop(at_once=self._failed is not None)  # then others may be gone whom it would still tell things

    # ---- starting ----

    def _start(self, number: int, token: str) -> None:
        setup, size = self._setup, self._setup.servers_per_group
        urls = [server.urls for server in self._servers]
        standing = Standing(
            number,
            setup.groups,
            setup.server_group_of(number),
            [urls[first : first + size] for first in range(0, len(urls), size)],
            setup.staleness,
            setup.lock,
            token,
        )
        pipes = {kind: os.pipe() for kind in ("out", "err", "events")}
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            report = pipes["events"][1]
            job = replace(
                self._job, num_workers=setup.workers, standing=standing, report=lambda event: send(report, event)
            )
            _become_supervisor(parent, job, (pipes["out"][1], pipes["err"][1]), report)
        group = _Group(number, pid, os.pidfd_open(pid))
        self._groups.append(group)
        for kind, (reading, writing) in pipes.items():
            os.close(writing)
            os.set_blocking(reading, False)
            self._selector.register(reading, selectors.EVENT_READ, (kind, group))
        self._selector.register(group.pidfd, selectors.EVENT_READ, ("exit", group))

    # ---- the one loop ----

    def _turn(self, wait_s: float) -> bool:
        ready = self._selector.select(timeout=wait_s)
        order = {"out": 0, "err": 0, "events": 1, "server": 2, "exit": 3}
        for key, _ in sorted(ready, key=lambda item: order.get(item[0].data[0], 4)):
            if key.fd in self._selector.get_map():
                kind, whose = key.data
                self._handle(kind, whose, key.fileobj)
        return bool(ready)

    def _handle(self, kind: str, whose: Any, source: Any) -> None:
        if kind == "signal":
            for number in source.recv(64):
                self._on_signal(number)
        elif kind == "server":
            self._selector.unregister(source)
            self._on_server_exit(whose)
        elif kind == "exit":
            self._close(source)
            for key in list(self._selector.get_map().values()):
                while key.data[1] is whose and key.fd in self._selector.get_map():
                    try:
                        self._read(key.data[0], whose, key.fd)
                    except BlockingIOError:
                        break
            self._on_exit(whose)
        else:
            self._read(kind, whose, source)

    def _read(self, kind: str, group: _Group, fd: int) -> None:
        data = os.read(fd, 65536)
        *lines, rest = (group.pending.get(kind, b"") + data).split(b"\n")
        if not data:
            self._close(fd)
            lines, rest = [*lines, rest] if rest else lines, b""
        group.pending[kind] = rest
        if kind == "events":
            for line in lines:
                self._on_event(group, json.loads(line))
        elif self._failed is None or self._failed is group:
            self._console.pass_on(lines, is_error=kind == "err")

    def _close(self, fd: int) -> None:
        self._selector.unregister(fd)
        os.close(fd)

    # ---- what happens ----

    def _on_event(self, group: _Group, event: dict[str, Any]) -> None:
        if "progress" in event:
            for progress in self._merger.add(group.number, Progress(**event["progress"])):
                self._console.progress(progress)
        group.fingerprint = event.get("fingerprint", group.fingerprint)

    def _on_exit(self, group: _Group) -> None:
        group.code = os.waitstatus_to_exitcode(os.waitpid(group.pid, 0)[1])
        stopped = self._stop_signal is not None and group.code == Stopped.exit_code
        if group.code != 0 and not stopped and self._failed is None:
            if group.code < 0:
                self._console.say(f"the supervisor of group {group.number} was killed by {signal_name(-group.code)}")
            self._fail(group, group.code if group.code > 0 else 128 - group.code)

    def _on_server_exit(self, server: ServerProcess) -> None:
        how = server.describe_end()
        if self._failed is None:
            self._console.say(f"{how}; the run cannot go on")
            self._fail(server, ServerError.exit_code)

    def _fail(self, who: _Group | ServerProcess, code: int) -> None:
        self._failed, self._code = who, code
        self._deadline = time.monotonic() + _END_S
        self._signal_all(signal.SIGTERM)
        self._signal_all(signal.SIGINT)  # the second signal stops at once; the same twice might be one

    def _signal_all(self, number: int) -> None:
        for group in self._groups:
            group.signal(number)

    def _on_signal(self, number: int) -> None:
        if number in (signal.SIGINT, signal.SIGTERM):
            self._stop_signal = self._stop_signal or number
            self._signal_all(number)
        elif number == signal.SIGHUP:
            self._signal_all(number)
        elif number in (signal.SIGUSR1, signal.SIGUSR2):
            self._console.say(
                "which group? `evenstep scale N --job PID` changes the workers of one; `status` shows them"
            )

    def _finish(self) -> int:
        self._console.end_progress()
        if self._failed is not None:
            return self._code
        codes = {group.code for group in self._groups}
        if codes != {0}:
            return Stopped.exit_code
        if self._groups[0].fingerprint is not None:
            self._console.note_fingerprint(0, self._groups[0].fingerprint)
            self._console.show_fingerprint()
        return 0


def _become_supervisor(parent: int, job: Job, streams: tuple[int, int], report: int) -> NoReturn:
    """Turn this process, just forked by the launcher, into the supervisor of one group. Never returns."""
    code = 1
    try:
        live_apart(parent, streams, {report})
        code = supervise(job)
    except EvenstepError as error:
        say(str(error))
        code = error.exit_code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 0xFF)


def conduct(job: Job, setup: Setup) -> int:
    """Run a job in groups to its end; return the exit code, as `supervise` does.

    Raises:
        ServerError: A server cannot be started.
    """
    with Console(None, 0) as console:
        import torch._inductor.config  # noqa: F401  # a second that every worker would spend in its first step

        console.say(setup.describe())
        return _Conductor(job, setup, console).run()

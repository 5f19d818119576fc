"""The launcher of several groups: a supervisor process for each, servers beside them, one display, one exit code.

A group's supervisor looks after its workers as in any run. Its output, progress, fingerprint and the events of a trace
arrive through pipes. The first group or server that fails ends the run: the others are stopped, and only its error is
shown.
"""

import json
import os
import secrets
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

from evenstep.core.children import Child, Children, signal_name
from evenstep.core.errors import ServerError, SilenceError, Stopped
from evenstep.core.events import Event, send
from evenstep.core.signals import Signals
from evenstep.launch.console import Console
from evenstep.launch.job import Job
from evenstep.launch.records import JsonLines, make_directory
from evenstep.launch.servers import ServerProcess, start_servers
from evenstep.launch.supervisor import supervise
from evenstep.launch.trace_file import TraceFile
from evenstep.launch.trace_lines import TraceLines, name_of
from evenstep.plan.groups import Setup, Standing
from evenstep.run.progress import Merger, Progress

__all__ = ["conduct"]

_END_S = 15.0  # how long the groups may take to end after the run has failed, before they are killed
_DRAIN_S = 1.0
_LOOK_S = 0.5  # how often to look for processes that are stopped
_STOPPED_S = 1.0  # how long a supervisor or a server may be stopped, since everyone else waits for it


@dataclass
class _Group:
    """A group's supervisor, as its parent sees it."""

    number: int
    child: Child
    fingerprint: str | None = None


class _Conductor:
    def __init__(self, job: Job, setup: Setup, console: Console, trace: TraceFile | None) -> None:
        self._job, self._setup, self._console, self._trace = job, setup, console, trace
        self._children = Children(self._on_lines, self._on_end)
        self._servers: list[ServerProcess] = []
        self._groups: list[_Group] = []
        self._merger = Merger(setup.groups)
        self._failed: _Group | ServerProcess | None = None
        self._code, self._is_over = 0, False
        self._stop_signal: int | None = None
        self._deadline: float | None = None
        self._stopped_since: dict[Child, float] = {}

    def run(self) -> int:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
        with Signals(self._on_signal, *numbers) as signals, self._children as children:
            children.watch(signals, signals.deliver)
            try:
                token = secrets.token_urlsafe(24)
                traced_from_ns = None if self._trace is None else self._job.began_ns
                self._servers = start_servers(self._setup, token, traced_from_ns)
                for server in self._servers:
                    children.adopt(server.child, {} if server.events is None else {"events": server.events})
                for number in range(self._setup.groups):
                    self._start(number, token)
                while any(group.child.alive for group in self._groups):
                    left = _LOOK_S if self._deadline is None else self._deadline - time.monotonic()
                    children.turn(min(left, _LOOK_S))
                    self._look_after()
                    if self._deadline is not None and time.monotonic() >= self._deadline:
                        self._signal_all(signal.SIGKILL)
                children.finish(_DRAIN_S)
                self._finish_trace()
                return self._finish()
            finally:
                for group in self._groups:
                    group.child.kill()  # its workers die with it
                for server in self._servers:
                    server.stop(at_once=self._failed is not None)  # the clients that it would wait for may be gone

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

        def main(pipes: Mapping[str, int]) -> int:
            def report(event: Event) -> None:
                send(pipes["events"], event)

            page = self._job.page and self._job.page + number  # each has its own; 0: any port
            return supervise(replace(self._job, num_workers=setup.workers, standing=standing, report=report, page=page))

        self._groups.append(_Group(number, self._children.start(main, ("out", "err", "events"))))

    # ---- what happens ----

    def _on_lines(self, child: Child, kind: str, lines: Sequence[bytes]) -> None:
        if kind == "events":
            for event in map(json.loads, lines):
                self._on_event(child, event)
            return
        group = self._group_of(child)
        if self._failed is None or self._failed is group:
            self._console.pass_on(lines, is_error=kind == "err")

    def _group_of(self, child: Child) -> _Group:
        return next(group for group in self._groups if group.child is child)

    def _on_event(self, child: Child, event: Event) -> None:
        if "trace" in event:
            if self._trace is not None:
                self._trace.append(event["trace"])
            return  # these may come from a server; all other events come from a group
        group = self._group_of(child)
        if "progress" in event:
            for progress in self._merger.add(group.number, Progress(**event["progress"])):
                self._console.progress(progress)
        if "error" in event and (self._failed is None or self._failed is group):
            self._console.show_error(event["error"])
        group.fingerprint = event.get("fingerprint", group.fingerprint)

    def _on_end(self, child: Child) -> None:
        for server in self._servers:
            if server.child is child:
                return self._on_server_end(server)
        group, code = self._group_of(child), child.reap()
        if code == Stopped.exit_code and self._stop_signal is None and self._failed is None:
            self._on_signal(signal.SIGTERM)  # this group was asked to stop, perhaps on its page: the others stop too
        stopped = self._stop_signal is not None and code == Stopped.exit_code
        if code != 0 and not stopped and self._failed is None:
            if code < 0:
                self._console.say(f"the supervisor of group {group.number} was killed by {signal_name(-code)}")
            self._fail(group, code if code > 0 else 128 - code)
        return None

    def _look_after(self) -> None:
        """End the run if a process that cannot be replaced is stopped."""
        now = time.monotonic()
        everyone: list[_Group | ServerProcess] = [*self._groups, *self._servers]
        for who in everyone:
            child = who.child
            if self._failed is not None or not child.alive or not child.is_stopped():
                self._stopped_since.pop(child, None)
            elif now - self._stopped_since.setdefault(child, now) >= _STOPPED_S:
                name = "the supervisor of group" if isinstance(who, _Group) else "server"
                self._console.say(f"{name} {who.number} (pid {child.pid}) has been stopped; the run cannot go on")
                self._fail(who, SilenceError.exit_code)
                child.signal(signal.SIGKILL)

    def _on_server_end(self, server: ServerProcess) -> None:
        if self._failed is None and not self._is_over:
            self._console.say(f"{server.describe_end()}; the run cannot go on")
            self._fail(server, ServerError.exit_code)

    def _fail(self, who: _Group | ServerProcess, code: int) -> None:
        self._failed, self._code = who, code
        self._deadline = time.monotonic() + _END_S
        self._signal_all(signal.SIGTERM)
        self._signal_all(signal.SIGINT)  # a second, different signal stops at once; two equal ones may arrive as one

    def _signal_all(self, number: int) -> None:
        for group in self._groups:
            if group.child.alive:
                os.kill(group.child.pid, number)

    def _on_signal(self, number: int) -> None:
        if number in (signal.SIGINT, signal.SIGTERM):
            self._stop_signal = self._stop_signal or number
            self._signal_all(number)
        elif number == signal.SIGHUP:
            self._signal_all(number)
        elif number in (signal.SIGUSR1, signal.SIGUSR2):
            self._console.say(
                "the signal does not say which group: use `evenstep scale N --job PID`; `evenstep status` lists them"
            )

    def _finish_trace(self) -> None:
        """Note in the trace what the servers did until their end, and what was said about all groups."""
        if self._trace is not None:
            self._is_over, deadline = True, time.monotonic() + _END_S
            for server in self._servers if self._failed is None else ():
                server.say_goodbye()
                while server.child.alive and time.monotonic() < deadline:
                    self._children.turn(_LOOK_S)
            self._trace.append([name_of("process_name", 1, 0, "all groups")])
            TraceLines(self._trace.append, self._job, self._console).finish()

    def _finish(self) -> int:
        self._console.end_progress()
        if self._failed is not None:
            return self._code
        codes = {group.child.code for group in self._groups}
        if codes != {0}:
            return Stopped.exit_code
        if self._groups[0].fingerprint is not None:
            self._console.note_fingerprint(0, self._groups[0].fingerprint)
            self._console.show_fingerprint()
        return 0


def conduct(job: Job, setup: Setup) -> int:
    """Run a job in groups to its end; returns the exit code, as `supervise` does.

    Raises:
        ConfigError: A file of figures or the trace cannot be written; nothing was started.
        ServerError: A server cannot be started.
    """
    with Console(None, 0) as console, ExitStack() as stack:
        if job.log_json is not None:
            JsonLines(job.log_json).close()  # a file that no group could write is refused once, here
        if job.tensorboard is not None:
            make_directory(job.tensorboard)
        trace = None
        if job.trace is not None:
            trace = stack.enter_context(closing(TraceFile(job.trace, job.script, console.say)))
        import torch._inductor.config  # noqa: F401  # takes a second, which every worker would spend in its first step

        console.say(setup.describe())
        return _Conductor(job, setup, console, trace).run()

"""`--lanes N`: the tests run in N forks of the process that has collected them, a file at a time, the longest first.

Everything has been imported once, before the forks, and is in memory once. Whoever is free takes the next file; the
tests of a folder that shares a cluster stay together. What a lane finds is reported here, as if it had been found here.
"""

import contextlib
import itertools
import os
import random
import signal
import sys
import traceback
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from types import SimpleNamespace
from typing import Any

import pytest

import processes
from evenstep.native import core

_TOGETHER = ("tests/spark/", "tests/ray/")
_LONG = (*_TOGETHER, "tests/launch/test_machines.py", "tests/launch/", "tests/transformers/", "tests/lightning/")


def order(item: pytest.Item) -> int:
    """Where a test belongs: what takes long begins early, so that nobody waits for it at the end."""
    return next((place for place, long in enumerate(_LONG) if item.nodeid.startswith(long)), len(_LONG))


def run(session: pytest.Session, count: int) -> None:
    """Run the tests of a session in so many lanes.

    Raises:
        pytest.Session.Failed: As many have failed as are wanted at most.
        pytest.Session.Interrupted: A test asks to stop.
    """
    session.config._tmp_path_factory.getbasetemp()  # one for all, made before anybody could make another
    lanes = _Lanes(session)
    try:
        for _ in range(min(count, len(lanes.waiting))):
            lanes.start()
        while lanes.running:
            lanes.hear()
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
    finally:
        lanes.close()


@dataclass
class _Lane:
    """A process that runs tests.

    Attributes:
        pid: Its number.
        number: Which lane it is; one that takes the place of another has a number of its own.
        left: The tests of its file that it has not begun, as places in the session's list.
        now: The test that it runs, likewise; None: none.
    """

    pid: int
    number: int
    left: deque[int] = field(default_factory=deque)
    now: int | None = None


class _Lanes:
    """The lanes of a session, and the files that wait for one: their tests, as places in the session's list."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        together = itertools.groupby(range(len(session.items)), lambda place: _together(session.items[place]))
        self.waiting = deque(deque(places) for _, places in together)
        self.running: dict[Connection, _Lane] = {}
        self._numbers = itertools.count()

    def start(self) -> None:
        """Fork another lane."""
        ours, theirs = Pipe()
        number = next(self._numbers)
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            for connection in (ours, *self.running):
                connection.close()
            _be_lane(self._session, number, theirs)
        theirs.close()
        self.running[ours] = _Lane(pid, number)

    def hear(self) -> None:
        """Wait until lanes say something, and do what follows from it."""
        for connection in wait(list(self.running)):
            assert isinstance(connection, Connection)
            try:
                what, said = connection.recv()
            except (EOFError, ConnectionResetError):
                self._lost(connection)
            else:
                self._said(connection, what, said)

    def _said(self, connection: Connection, what: str, said: Any) -> None:
        lane, hook = self.running[connection], self._session.config.hook
        if what == "free":
            lane.left = self.waiting.popleft() if self.waiting else deque()
            connection.send(list(lane.left))
        elif what == "begins":
            lane.now = lane.left.popleft()
        elif what == "report":
            report = hook.pytest_report_from_serializable(config=self._session.config, data=said)
            hook.pytest_runtest_logreport(report=report)
        else:
            lane.now = None
            item = self._session.items[said]
            hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _lost(self, connection: Connection) -> None:
        """A lane has ended: because there is no more to do, or in the middle of a test, which has then failed."""
        lane = self.running.pop(connection)
        connection.close()
        code = os.waitstatus_to_exitcode(os.waitpid(lane.pid, 0)[1])
        if lane.now is not None:
            item = self._session.items[lane.now]
            text = f"{item.nodeid}: lane {lane.number} ended in this test, with exit code {code}"
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
            self._session.config.hook.pytest_runtest_logreport(report=report)
        elif code:
            raise RuntimeError(f"lane {lane.number} ended between two tests, with exit code {code}")
        if lane.left:
            self.waiting.appendleft(lane.left)
        if self.waiting:
            self.start()

    def close(self) -> None:
        """End the lanes that are left, with all that they have started."""
        for connection, lane in self.running.items():
            connection.close()
            processes.kill_tree(lane.pid)
            os.waitpid(lane.pid, 0)


def _together(item: pytest.Item) -> str:
    file = item.nodeid.partition("::")[0]
    return next((folder for folder in _TOGETHER if file.startswith(folder)), file)


def _be_lane(session: pytest.Session, number: int, connection: Connection) -> None:
    """What a fork does instead of returning."""
    code = 1
    try:
        core.die_with_parent()
        processes.adopt_orphans()
        processes.take_other_ports()
        random.seed()
        _settle_in(session.config, number)
        session.config.pluginmanager.register(_Reports(session.config, connection))
        for place, following in _assigned(connection):
            connection.send(("begins", None))
            item, after = session.items[place], None if following is None else session.items[following]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            connection.send(("ends", place))
        code = 0
    except (KeyboardInterrupt, BrokenPipeError):
        code = 128 + signal.SIGINT  # the session ends for the same reason
    except BaseException:  # noqa: BLE001  # the border of the process
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _assigned(connection: Connection) -> Iterator[tuple[int, int | None]]:
    """The tests that a lane runs, each with the one of the same file that follows."""
    while True:
        connection.send(("free", None))
        places = connection.recv()
        if not places:
            return
        yield from zip(places, [*places[1:], None], strict=True)


class _Reports:
    """A plugin that sends what is found in a lane."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config, self._connection = config, connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send a report."""
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("report", data))


def _settle_in(config: pytest.Config, number: int) -> None:
    """Have a folder, captured output and nothing to show of one's own."""
    base = config._tmp_path_factory.getbasetemp() / f"lane-{number}"
    base.mkdir()
    config._tmp_path_factory._basetemp = base
    capturing = config.pluginmanager.getplugin("capturemanager")
    capturing.stop_global_capturing()
    capturing.start_global_capturing()
    capturing.suspend_global_capture()
    writer = config.get_terminal_writer()  # others write to it when a test takes too long
    config.pluginmanager.unregister(name="terminalreporter")
    config.pluginmanager.register(SimpleNamespace(_tw=writer), "terminalreporter")

"""`--lanes N`: the tests run in N forks of the process that has collected them, a file at a time, the longest first.

What most of them need has been imported once, before the forks, and is in memory once. Whoever is free takes the next
file. The folders of frameworks and engines are put aside: a lane collects one when it comes to it, runs it and ends,
so that nobody else's forks drag along what only these tests import. A lane that has come to weigh much for another
reason is replaced too. What a lane finds is reported here, as if it had been found here.
"""

import contextlib
import itertools
import os
import random
import signal
import sys
import traceback
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pages
import processes
from evenstep.native import core

_LONG = (
    "tests/spark",
    "tests/ray",
    "tests/launch/test_machines.py",
    "tests/lightning",
    "tests/transformers",
    "tests/agents",
    "tests/launch/",
)
_MUCH = 32 << 20  # bytes that a lane may come to have more than when it began
_ASIDE = pytest.StashKey[list["Aside"]]()


class Aside(pytest.Dir):
    """A folder that was put aside: it is as if it were empty, until a lane comes to it."""

    _is_due = False

    @classmethod
    def put(cls, path: Path, parent: pytest.Collector) -> "Aside | None":
        """Put a folder aside; None: pytest was not asked for one that it is in, but for others, or what is in it."""
        if parent.session._initialpaths.isdisjoint(path.parents):
            return None
        folder = cls.from_parent(parent, path=path)
        parent.config.stash.setdefault(_ASIDE, []).append(folder)
        return folder

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        """What is in it, once it is due."""
        return super().collect() if self._is_due else ()

    def tests(self) -> list[pytest.Item]:
        """All that is in it, as pytest would have found it at the beginning."""
        self._is_due, session = True, self.session
        session.items = list(session.genitems(self))
        self.config.hook.pytest_collection_modifyitems(session=session, config=self.config, items=session.items)
        self.config.hook.pytest_collection_finish(session=session)
        return session.items


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
class _Work:
    """The tests that a lane runs without asking again: those of a file, or of a folder that was put aside.

    Attributes:
        name: The file or folder.
        tests: Those that have not begun: what pytest calls each, and where it is; None: the lane is to collect them.
        folder: Which of the folders that were put aside it is; None: it is a file.
    """

    name: str
    tests: deque[tuple[str, Any]] | None = None
    folder: int | None = None

    def order(self) -> int:
        """What takes long begins early, so that nobody waits for it at the end."""
        return next((place for place, long in enumerate(_LONG) if self.name.startswith(long)), len(_LONG))


@dataclass
class _Lane:
    """A process that runs tests.

    Attributes:
        pid: Its number.
        number: Which lane it is; one that takes the place of another has a number of its own.
        work: What it is at; None: nothing.
        now: The test that it runs; None: none.
    """

    pid: int
    number: int
    work: _Work | None = None
    now: tuple[str, Any] | None = None


class _Lanes:
    """The lanes of a session, and the work that waits for one."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        files = itertools.groupby(session.items, lambda item: item.nodeid.partition("::")[0])
        work = [_Work(file, _named(items)) for file, items in files]
        aside = session.config.stash.get(_ASIDE, [])
        work += [_Work(folder.nodeid, folder=place) for place, folder in enumerate(aside)]
        self.waiting = deque(sorted(work, key=_Work.order))
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
            lane.work = self.waiting.popleft() if self.waiting else None
            connection.send(lane.work)
        elif what == "collected":
            lane.work.tests = said
            self._session.testscollected += len(said)
        elif what == "begins":
            lane.now = lane.work.tests.popleft()
        elif what == "report":
            report = hook.pytest_report_from_serializable(config=self._session.config, data=said)
            by_kind = hook.pytest_runtest_logreport if report.when != "collect" else hook.pytest_collectreport
            by_kind(report=report)
        else:
            (nodeid, location), lane.now = lane.now, None
            hook.pytest_runtest_logfinish(nodeid=nodeid, location=location)

    def _lost(self, connection: Connection) -> None:
        """A lane has ended: because there is no more to do, or in the middle of a test, which has then failed."""
        lane = self.running.pop(connection)
        connection.close()
        code = os.waitstatus_to_exitcode(os.waitpid(lane.pid, 0)[1])
        if lane.now is not None:
            nodeid, location = lane.now
            text = f"{nodeid}: lane {lane.number} ended in this test, with exit code {code}"
            report = pytest.TestReport(nodeid, location, {}, "failed", text, "call")
            self._session.config.hook.pytest_runtest_logreport(report=report)
        elif code:
            raise RuntimeError(f"lane {lane.number} ended between two tests, with exit code {code}")
        if lane.work is not None and lane.work.tests:
            self.waiting.appendleft(lane.work)
        if self.waiting:
            self.start()

    def close(self) -> None:
        """End the lanes that are left, with all that they have started."""
        for connection, lane in self.running.items():
            connection.close()
            processes.kill_tree(lane.pid)
            os.waitpid(lane.pid, 0)


def _named(items: Iterable[pytest.Item]) -> deque[tuple[str, Any]]:
    return deque((item.nodeid, item.location) for item in items)


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
        for item, following in _assigned(session, connection):
            connection.send(("begins", None))
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            connection.send(("ends", None))
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


def _assigned(session: pytest.Session, connection: Connection) -> Iterator[tuple[pytest.Item, pytest.Item | None]]:
    """The tests that a lane runs, each with the one of the same file or folder that follows."""
    known = {item.nodeid: item for item in session.items}
    light = pages.private_bytes() + _MUCH
    is_last = False
    while not is_last and pages.private_bytes() < light:  # or else another lane takes its place, and forks are cheap
        connection.send(("free", None))
        work = connection.recv()
        if work is None:
            return
        is_last = work.folder is not None
        if is_last:
            found = session.config.stash[_ASIDE][work.folder].tests()
            known = {item.nodeid: item for item in found}
            if work.tests is None:
                work.tests = _named(found)
                connection.send(("collected", work.tests))
        items = [known[nodeid] for nodeid, _ in work.tests]
        yield from itertools.zip_longest(items, items[1:])


class _Reports:
    """A plugin that sends what is found in a lane."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config, self._connection = config, connection

    def pytest_runtest_logreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        """Send a report."""
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("report", data))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Send what could not be collected; what could is told as a whole."""
        if not report.passed:
            self.pytest_runtest_logreport(report)


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

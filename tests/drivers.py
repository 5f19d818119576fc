"""The driver of a cluster in a process of its own: started once, it runs the bodies of many tests.

A cluster's client brings threads and processes that must not be in pytest's process, which others fork. So the driver
is itself a fork, made when all test files have been imported, and bodies are functions that both sides know.
"""

import contextlib
import faulthandler
import os
import pickle
import select
import signal
import struct
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

import processes


class Driver:
    """A process that has a cluster and runs bodies with it.

    Args:
        begin: Makes the cluster, in the process, as a context manager; what it gives is the first argument of bodies.
    """

    def __init__(self, begin: Callable[[], AbstractContextManager[Any]]) -> None:
        ours, theirs = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(ours[0])
            os.close(theirs[1])
            _serve(begin, theirs[0], ours[1])
        os.close(ours[1])
        os.close(theirs[0])
        self._reading, self._writing = ours[0], theirs[1]

    def call(self, body: Callable[..., Any], *args: Any, timeout_s: float = 600.0) -> Any:
        """Run `body(cluster, *args)` there; return what it returns."""
        _send(self._writing, (body.__module__, body.__name__, args))
        found, text = _receive(self._reading, time.monotonic() + timeout_s, self.pid)
        if text is not None:
            raise AssertionError(text)
        return found

    def close(self) -> None:
        """End the cluster, and whatever of it would not."""
        os.close(self._writing)
        processes.until(lambda: not processes.is_alive(self.pid), 30.0)
        processes.kill_tree(self.pid)
        os.close(self._reading)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        for pid in processes.descendants():
            processes.kill_tree(pid)
        processes.reap_orphans()


class Shared:
    """A driver that the tests of one folder share: started for the first of them, ended after the last.

    (A fixture of the session would live on while the tests of other folders run, who count processes.)

    Args:
        folder: Where the tests are.
        begin: See `Driver`.
        warm: Called with the cluster before any test.
    """

    def __init__(
        self, folder: Path, begin: Callable[[], AbstractContextManager[Any]], warm: Callable[[Any], None]
    ) -> None:
        self._folder, self._begin, self._warm = folder, begin, warm
        self._driver: Driver | None = None

    def driver(self) -> Driver:
        """The driver, with a warm cluster."""
        if self._driver is None:
            self._driver = Driver(self._begin)
            self._driver.call(self._warm)
        return self._driver

    def end_before(self, following: pytest.Item | None) -> None:
        """Call it after each test with the one that follows."""
        if self._driver is not None and (following is None or self._folder not in following.path.parents):
            self._driver, ended = None, self._driver
            ended.close()


def _serve(begin: Callable[[], AbstractContextManager[Any]], reading: int, writing: int) -> None:
    code = 1
    try:
        os.setsid()
        processes.adopt_orphans()
        faulthandler.enable()
        warnings.simplefilter("default")  # those of the engines are no errors
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with begin() as cluster:
            while (request := _receive(reading, None, None)) is not None:
                module, name, args = request
                _send(writing, _answer(getattr(sys.modules[module], name), cluster, args))
        code = 0
    except BaseException:  # noqa: BLE001  # the border of the process: whoever asks next is told
        with contextlib.suppress(OSError):
            _send(writing, (None, traceback.format_exc()))
    finally:
        os._exit(code)


def _answer(body: Callable[..., Any], cluster: Any, args: tuple[Any, ...]) -> tuple[Any, str | None]:
    try:
        return body(cluster, *args), None
    except BaseException:  # noqa: BLE001  # as above
        return None, traceback.format_exc()


def _send(fd: int, value: Any) -> None:
    data = pickle.dumps(value)
    view = memoryview(struct.pack("q", len(data)) + data)
    while view:
        view = view[os.write(fd, view) :]


def _receive(fd: int, deadline: float | None, pid: int | None) -> Any:
    head = _read(fd, 8, deadline, pid)
    return None if head is None else pickle.loads(_read(fd, struct.unpack("q", head)[0], deadline, pid))


def _read(fd: int, count: int, deadline: float | None, pid: int | None) -> bytes | None:
    data = b""
    while len(data) < count:
        if deadline is not None and not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError(f"the driver (pid {pid}) did not answer in time")
        more = os.read(fd, count - len(data))
        if not more:
            if pid is not None:
                raise AssertionError("the driver has ended without a word")
            return None
        data += more
    return data

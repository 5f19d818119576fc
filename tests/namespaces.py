"""Machines on this machine, where there can be any; see `evenstep.testing.network`."""

import contextlib
import ctypes
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

import processes
from evenstep.testing import relay
from evenstep.testing.network import Namespaces, missing
from workers import fork_cli

__all__ = ["Machine", "Namespaces", "finish", "needs_relay", "needs_root"]

_NEW_NETWORK, _NEW_MOUNTS, _BIND, _PRIVATE = 0x40000000, 0x00020000, 0x1000, 0x40000 | 0x4000


def needs_root(test):
    """Skip a test where network namespaces cannot be made."""
    why = missing()
    return test if why is None else pytest.mark.skip(reason=why)(test)


def needs_relay(test):
    """Skip a test where links cannot be made slow or lossy."""
    why = missing() or relay.missing()
    return test if why is None else pytest.mark.skip(reason=why)(test)


def _enter(space: str) -> None:
    """Become a process of a namespace, with the names of its hosts: what `ip netns exec` does."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(function, *arguments):
        assert function(*arguments) == 0, os.strerror(ctypes.get_errno())

    fd = os.open(f"/var/run/netns/{space}", os.O_RDONLY)
    call(libc.setns, fd, _NEW_NETWORK)
    os.close(fd)
    call(libc.unshare, _NEW_MOUNTS)
    call(libc.mount, b"none", b"/", None, _PRIVATE, None)
    for name in os.listdir(f"/etc/netns/{space}"):
        call(libc.mount, f"/etc/netns/{space}/{name}".encode(), f"/etc/{name}".encode(), None, _BIND, None)


class Machine:
    """A head or another one, and what it says. It is a fork of this process, so that nobody waits for imports.

    Args:
        network: In which it is.
        number: Which machine.
        log: Where it writes; it runs in the same folder.
        argv: What the command line is given.
    """

    def __init__(self, network: Namespaces, number: int, log: Path, *argv: str | Path) -> None:
        self.log, self._code = log, None

        def attach() -> None:
            os.setsid()
            fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
            os.dup2(fd, 1)
            os.dup2(fd, 2)
            _enter(network.space(number))
            os.chdir(log.parent)

        log.touch()
        self.pid = fork_cli([str(arg) for arg in argv], attach)
        self._pidfd = os.pidfd_open(self.pid)
        network.closing(self.close)

    @property
    def said(self) -> str:
        """What it has said so far."""
        return self.log.read_text()

    def awaits(self, pattern: str, timeout_s: float = 180.0) -> re.Match:
        """Wait until it has said something."""
        deadline = time.monotonic() + timeout_s
        while not (found := re.search(pattern, self.said, re.MULTILINE)):
            assert time.monotonic() < deadline, f"no {pattern!r} in\n{self.said}"
            assert not select.select([self._pidfd], [], [], 0.02)[0], f"ended before {pattern!r}:\n{self.said}"
        return found

    def ends(self, timeout_s: float = 180.0) -> int:
        """Its exit code."""
        if self._code is None:
            assert select.select([self._pidfd], [], [], timeout_s)[0], f"it does not end:\n{self.said}"
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._pidfd)
        return self._code

    def signal(self, number: int) -> None:
        """Send a signal to it and to everything that it has started, as when all of the machine is meant."""
        for pid in [self.pid, *processes.descendants(self.pid)]:
            with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(pid, number)

    def kill(self) -> None:
        """All of its processes at once, as when the power goes."""
        self.signal(signal.SIGKILL)

    def close(self) -> None:
        """See that nothing of it is left."""
        if self._code is None:
            processes.kill_tree(self.pid)
            self.ends()


def finish(started: Sequence[subprocess.Popen], timeout_s: float = 60.0) -> list[tuple[int, str, str]]:
    """Wait for programs; (exit code, standard output, standard error) of each."""
    found = []
    for process in started:
        out, err = process.communicate(timeout=timeout_s)
        found.append((process.returncode, out, err))
    return found

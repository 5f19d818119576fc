"""The processes of runs on clusters as forks of whoever starts them: the same, without importing torch for each."""

import ctypes
import os
import signal
import subprocess
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from evenstep.agents import process
from evenstep.core import children

_APART = "EVENSTEPS_TESTS_START_PROCESSES"


def install() -> None:
    """From now on the heads and agents that this process starts, and those that its forks start, are forks."""
    process.Popen = Forked  # type: ignore[attr-defined,misc]  # as much of it as is used


@contextmanager
def as_elsewhere(environment: MutableMapping[str, str]) -> Iterator[None]:
    """Meanwhile they are started as they are for users: by this process, and by those that have this environment."""
    environment[_APART] = "1"
    process.Popen = subprocess.Popen  # type: ignore[attr-defined]
    try:
        yield
    finally:
        install()
        del environment[_APART]


def is_wanted() -> bool:
    """Whether processes that this process starts may be forks."""
    return _APART not in os.environ


class Forked:
    """What `subprocess.Popen` is for a process of `evenstep.agents`, for one that is forked from this process.

    Attributes:
        pid: Its process id.
        stdin: Its standard input.
        stdout: Its standard output.
        stderr: Its standard error, if that is a pipe.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        stderr: int | None,
        pass_fds: Sequence[int],
        env: dict[str, str],
        **_: Any,
    ) -> None:
        module, words = command[3], command[5:]
        pipes = [os.pipe(), os.pipe(), *([] if stderr is None else [os.pipe()])]
        (given, written), (read, said), *rest = pipes
        err = rest[0][1] if rest else 2
        parent = os.getpid()

        def main() -> int:
            os.dup2(given, 0)
            os.environ.clear()
            os.environ.update(env)
            _be_called(f"evenstep.agents {module}")
            children.default_signals()
            return process.serve(module, parent, words)

        self._child = children.fork(main, streams=(said, err), keep=(given, *pass_fds))
        for fd in (given, said, *(pipe[1] for pipe in rest)):
            os.close(fd)
        self.pid = self._child.pid
        self.stdin: IO[bytes] = os.fdopen(written, "wb")
        self.stdout: IO[bytes] = os.fdopen(read, "rb")
        self.stderr: IO[bytes] | None = os.fdopen(rest[0][0], "rb") if rest else None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended."""
        if timeout is not None and not self._child.wait(timeout):
            raise subprocess.TimeoutExpired("a fork", timeout)
        return self._child.reap()

    def send_signal(self, number: int) -> None:
        """Send a signal to it alone."""
        if self._child.alive:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it alone."""
        self.send_signal(signal.SIGKILL)


def _be_called(name: str) -> None:
    """Change the command line of this process, by which others find it."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first, last = map(int, fields[45:47])  # where the kernel reads it
    assert len(name) < last - first, f"the command line of this process is too short to hold {name}"
    ctypes.memmove(first, name.encode().ljust(last - first, b"\0"), last - first)

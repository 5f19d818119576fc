"""The processes of runs on clusters as forks of a process that has torch: the same, without importing it for each."""

import ctypes
import os
import signal
import subprocess
import weakref
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from evenstep.agents import process
from evenstep.core import children

_APART = "EVENSTEPS_TESTS_START_PROCESSES"
_FINALIZERS: list[Any] = []


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


class Streams:
    """The standard streams of a process: our ends, and its own.

    Attributes:
        stdin: Where we write.
        stdout: What it writes.
        stderr: Likewise; None: that goes where ours goes.
        theirs: Its three descriptors.
    """

    def __init__(self, stderr: int | None) -> None:
        (given, written), (read, said) = os.pipe(), os.pipe()
        read_too, err = (None, os.dup(2)) if stderr is None else os.pipe()
        self.theirs = (given, said, err)
        self.stdin: IO[bytes] = os.fdopen(written, "wb")
        self.stdout: IO[bytes] = os.fdopen(read, "rb")
        self.stderr: IO[bytes] | None = None if read_too is None else os.fdopen(read_too, "rb")

    def hand_over(self) -> None:
        """Its ends are its own from now on."""
        for fd in self.theirs:
            os.close(fd)


class Forked(Streams):
    """What `subprocess.Popen` is for a process of `evenstep.agents`, for one that is forked from this process.

    Attributes:
        pid: Its process id.
    """

    def __init__(
        self, command: Sequence[str], *, stderr: int | None, pass_fds: Sequence[int], env: dict[str, str], **_: Any
    ) -> None:
        super().__init__(stderr)
        self._child = fork(command, self.theirs, dict(zip(pass_fds, pass_fds, strict=True)), env)
        self.hand_over()
        self.pid = self._child.pid

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended."""
        if timeout is not None and not self._child.wait(timeout):
            raise subprocess.TimeoutExpired("a fork", timeout)
        return reap(self._child)

    def send_signal(self, number: int) -> None:
        """Send a signal to it alone."""
        if self._child.alive:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it alone."""
        self.send_signal(signal.SIGKILL)


def fork(
    command: Sequence[str], streams: tuple[int, int, int], kept: dict[int, int], env: dict[str, str]
) -> children.Child:
    """Fork a process that does what a command of `evenstep.agents.process.begin` does.

    Args:
        command: The command.
        streams: Its standard streams.
        kept: By the number that a descriptor has there: the number that it has here.
        env: Its environment.
    """
    module, words, parent = command[3], command[5:], os.getpid()

    def main() -> int:
        os.dup2(streams[0], 0)
        os.close(streams[0])
        for there, here in kept.items():
            if there != here:
                os.dup2(here, there)
                os.close(here)
        os.environ.clear()
        os.environ.update(env)
        _FINALIZERS.append(
            weakref.finalize._registry
        )  # workers run exit handlers: our folders are not theirs to remove
        weakref.finalize._registry = {}
        _be_called(f"evenstep.agents {module}")
        children.default_signals()
        return process.serve(module, parent, words)

    return children.fork(main, streams=streams[1:], keep=(streams[0], *kept.values()))


def reap(child: children.Child) -> int:
    """Wait for the end of a process, and let what it has started be."""
    if child.code is None:
        child.code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
        os.close(child.pidfd)
    return child.code


def _be_called(name: str) -> None:
    """Change the command line of this process, by which others find it.

    The kernel reads on into the first environment, behind it, where the end of the command line was overwritten; all
    variables lie elsewhere by now.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first, last, behind, end = map(int, fields[45:49])  # where the kernel reads it, and the first environment
    room = (end if behind == last else last) - first
    assert len(name) < room, f"the command line of this process is too short to hold {name}"
    text = name.encode().ljust(last - first, b"\0")
    ctypes.memmove(first, text if len(name) < last - first else text + b"\0", max(len(name) + 1, last - first))

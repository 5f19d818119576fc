"""A process that has torch and forks others for those who cannot be forked, since they have threads: Ray's.

What it forks is killed when whoever has asked for it ends.
"""

import fcntl
import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import forks
from evenstep.agents import process
from evenstep.core import children

_VARIABLE = "EVENSTEPS_TESTS_NURSERY"
_ABOVE = 500  # where descriptors are out of the way of those that a process shall have


@contextmanager
def opened(folder: Path) -> Iterator[None]:
    """Have a forker, forked from this process, at which processes ask that are started meanwhile and `install`."""
    path = str(folder / "forker")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(path)
        door.listen()
        forker = children.fork(lambda: _serve(door), keep=(door.fileno(),))
    os.environ[_VARIABLE] = path
    try:
        yield
    finally:
        del os.environ[_VARIABLE]
        forker.kill()


@contextmanager
def closed() -> Iterator[None]:
    """Meanwhile everybody starts processes as they are started for users."""
    path = Path(os.environ[_VARIABLE])
    elsewhere = path.rename(path.with_suffix(".closed"))
    try:
        yield
    finally:
        elsewhere.rename(path)


def install() -> None:
    """From now on this process asks for the heads and agents that it starts."""
    path = os.environ.get(_VARIABLE)
    if path is not None:
        process.Popen = lambda command, **options: (  # type: ignore[attr-defined,misc]  # as much of it as is used
            Asked(path, command, **options) if os.path.exists(path) else subprocess.Popen(command, **options)
        )


class Asked(forks.Streams):
    """What `subprocess.Popen` is for a process of `evenstep.agents`, for one that the forker forks.

    Attributes:
        pid: Its process id.
    """

    def __init__(
        self,
        path: str,
        command: Sequence[str],
        *,
        stderr: int | None,
        pass_fds: Sequence[int],
        env: dict[str, str],
        **_: Any,
    ) -> None:
        super().__init__(stderr)
        self._code: int | None = None
        self._forker = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._forker.connect(path)
        text = json.dumps({"command": command, "kept": list(pass_fds), "env": env})
        socket.send_fds(self._forker, [text.encode()], [*self.theirs, *pass_fds])
        self.hand_over()
        self.pid: int = json.loads(self._forker.recv(1 << 10))

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended."""
        if self._code is None:
            if not select.select([self._forker], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
            self._code = json.loads(self._forker.recv(1 << 10))
            self._forker.close()
        return self._code

    def send_signal(self, number: int) -> None:
        """Send a signal to it alone."""
        if self._code is None:
            with suppress(ProcessLookupError):  # it has ended
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it alone."""
        self.send_signal(signal.SIGKILL)


def _serve(door: socket.socket) -> int:
    attending: list[children.Child] = []
    while True:
        asking = door.accept()[0]
        attending = [child for child in attending if not (child.wait(0.0) and child.reap() is not None)]
        attending.append(children.fork(lambda asking=asking: _attend(asking), keep=(asking.fileno(),)))
        asking.close()


def _attend(asking: socket.socket) -> int:
    """Fork one process, and say when it has ended; if nobody wants to know any more, kill it."""
    text, fds, _, _ = socket.recv_fds(asking, 1 << 20, 16)
    told = json.loads(text)
    given, said, err, *kept = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _ABOVE) for fd in fds)
    numbers = dict(zip(told["kept"], kept, strict=True))
    child = forks.fork(told["command"], (given, said, err), numbers, told["env"])
    for fd in (*fds, given, said, err, *kept):
        os.close(fd)
    asking.send(json.dumps(child.pid).encode())
    ended = child.pidfd in select.select([asking, child.pidfd], [], [])[0]
    if not ended:
        os.kill(child.pid, signal.SIGKILL)
    code = forks.reap(child)
    if ended:
        with suppress(BrokenPipeError):
            asking.send(json.dumps(code).encode())
    return 0

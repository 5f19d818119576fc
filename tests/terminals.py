"""A terminal with the command line in its foreground: keys can be pressed, and it can be closed."""

import fcntl
import os
import pty
import select
import signal
import termios
import time
from pathlib import Path

import processes
from workers import fork_cli


class Terminal:
    """A command line that leads the session of a terminal. A context manager: both are gone afterwards.

    Attributes:
        pid: Its process id.
        said: What it has shown so far; only `until_it_says` and `wait` read on.
    """

    def __init__(self, *argv: str | Path) -> None:
        self._master, slave = pty.openpty()
        self.said = ""
        self._code: int | None = None

        def attach() -> None:
            os.setsid()
            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
            for fd in range(3):
                os.dup2(slave, fd)
            os.close(slave)
            os.close(self._master)
            signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it

        self.pid = fork_cli([str(arg) for arg in argv], attach)
        self._pidfd = os.pidfd_open(self.pid)
        os.close(slave)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        self.hang_up()
        if self._code is None:  # otherwise its number may be another's
            processes.kill_tree(self.pid)
            os.waitpid(self.pid, 0)
        os.close(self._pidfd)

    def press(self, keys: bytes) -> None:
        """Type something."""
        os.write(self._master, keys)

    def hang_up(self) -> None:
        """Close the terminal, as when its window is closed or the connection to its machine is lost."""
        if self._master >= 0:
            os.close(self._master)
            self._master = -1

    def until_it_says(self, text: str, timeout_s: float = 60.0) -> None:
        """Wait until a text has been shown."""
        deadline = time.monotonic() + timeout_s
        while text not in self.said:
            assert self._read(deadline - time.monotonic()), f"it did not say {text!r}:\n{self.said}"

    def _read(self, wait_s: float) -> bool:
        if not select.select([self._master], [], [], max(wait_s, 0.0))[0]:
            return False
        try:
            self.said += os.read(self._master, 65536).decode(errors="replace").replace("\r\n", "\n")
        except OSError:  # the last process that had it open has ended
            return False
        return True

    def wait(self, timeout_s: float = 60.0) -> int:
        """Wait for its end; returns the exit code."""
        deadline = time.monotonic() + timeout_s
        while not select.select([self._pidfd], [], [], 0)[0]:
            assert time.monotonic() < deadline, f"it did not end within {timeout_s:g} s:\n{self.said}"
            if self._master < 0:
                select.select([self._pidfd], [], [], 0.05)
            else:
                self._read(0.05)
        while self._master >= 0 and self._read(0.0):
            pass
        self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code

"""The process that serves the page of a run, as the process beside it sees it."""

import os
import secrets
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec

from evenstep.core.children import Child, default_signals, fork
from evenstep.core.errors import ConfigError
from evenstep.transport.segment import Segment

__all__ = ["PageProcess", "check_port"]

_END_S = 3.0


def check_port(value: object) -> int | None:
    """The port that `Run(page=...)` asks for: 0 is any, None is no page.

    Raises:
        ConfigError: It asks for something else.
    """
    if value is None or value is False:
        return None
    if value is True:
        return 0
    if not isinstance(value, int) or not 0 <= value <= 65535:
        raise ConfigError(f"page={value!r}, expected True, or a port from 0 (any) to 65535")
    return value


class PageProcess:
    """A page that can be looked at from when it is started until it is closed.

    Args:
        port: The port; 0: any that is free.
        asked: The option that asked for it, as the user typed it.

    Attributes:
        url: Its address.
        token: The secret that its buttons need.

    Raises:
        ConfigError: The port cannot be used, or what serves the page is not installed.
    """

    def __init__(self, port: int, asked: str) -> None:
        missing = [name for name in ("starlette", "uvicorn", "httptools") if find_spec(name) is None]
        if missing:
            raise ConfigError(f"{asked} needs {missing[0]}: pip install 'evenstep[server]'")
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._listener.bind(("127.0.0.1", port))
            self._listener.listen(128)
        except (OSError, OverflowError) as error:
            self._listener.close()
            raise ConfigError(f"{asked}: the port cannot be used: {error}; name another port, or none") from error
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.token = secrets.token_urlsafe(12)
        self._child: Child | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def invitation(self) -> str:
        """Where it is, as a sentence for the user who started the run."""
        return f"page {self.url}, its buttons need the token {self.token}"

    def start(self, segment: Segment, supervisor: int) -> Child:
        """Fork it from a process that has one thread, and with which it dies.

        Args:
            segment: The segment of the run.
            supervisor: The process id of what answers for the run.
        """

        def main() -> int:
            default_signals()
            over, end = os.pipe()
            signal.signal(signal.SIGTERM, lambda *_: os.write(end, b"."))
            from evenstep.page.serving import serve  # imported here since only this process needs a web server

            return serve(segment, supervisor, self._listener, self.token, over)

        self._child = fork(main, keep={segment.fd, self._listener.fileno()})
        return self._child

    def spawn(self, segment: Segment) -> None:
        """Start it as a new program, beside a process that may have threads and devices and answers for itself.

        It only waits until someone looks, and ends when this process does.
        """
        fds = (segment.fd, self._listener.fileno())
        command = [sys.executable, "-m", "evenstep.page", *map(str, (*fds, os.getpid()))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=fds, start_new_session=True)
        assert self._process.stdin is not None, "the process was started with a pipe as its standard input"
        self._process.stdin.write(self.token.encode() + b"\n")  # not in its command line, which others can see
        self._process.stdin.flush()

    def close(self) -> None:
        """End the process."""
        self._listener.close()
        if self._child is not None and self._child.alive:
            self._child.signal(signal.SIGTERM)
            self._child.wait(_END_S)
            self._child.kill()
        if self._process is not None and self._process.stdin is not None:
            self._process.kill()  # it has nothing to lose, and copies of this process may hold its standard input open
            self._process.wait()
            with suppress(OSError):
                self._process.stdin.close()

"""The process that serves the page of a run, as the supervisor sees it."""

import secrets
import signal
import socket
from importlib.util import find_spec

from evenstep.core.children import Child, default_signals, fork
from evenstep.core.errors import ConfigError
from evenstep.transport.segment import Segment

__all__ = ["PageProcess"]

_END_S = 3.0


class PageProcess:
    """A page that can be looked at from when it is started until it is closed.

    Args:
        port: Where; 0: any that is free.

    Attributes:
        url: Its address.
        token: What its buttons need.

    Raises:
        ConfigError: Nothing can be served there, or what serves it is not installed.
    """

    def __init__(self, port: int) -> None:
        missing = [name for name in ("starlette", "uvicorn", "httptools") if find_spec(name) is None]
        if missing:
            raise ConfigError(f"--page needs {missing[0]}: pip install 'evenstep[server]'")
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._listener.bind(("127.0.0.1", port))
            self._listener.listen(128)
        except (OSError, OverflowError) as error:
            self._listener.close()
            raise ConfigError(f"--page {port}: no page can be there: {error}; name another port, or none") from error
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.token = secrets.token_urlsafe(12)
        self._child: Child | None = None

    def start(self, segment: Segment, supervisor: int) -> Child:
        """Start it; it dies with this process.

        Args:
            segment: Of the run.
            supervisor: The process id by which the run can be asked.
        """

        def main() -> int:
            default_signals()
            from evenstep.launch.page import serve  # here: only this process needs a web server

            return serve(segment, supervisor, self._listener, self.token)

        self._child = fork(main, keep={segment.fd, self._listener.fileno()})
        return self._child

    def close(self) -> None:
        """End it."""
        self._listener.close()
        if self._child is not None and self._child.alive:
            self._child.signal(signal.SIGTERM)
            self._child.wait(_END_S)
            self._child.kill()

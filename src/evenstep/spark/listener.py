"""What the driver hears of a run: how often it was tried, and what its workers say, as it comes."""

import json
import secrets
import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

__all__ = ["Listener", "Teller"]

_LONGEST_S = 30.0
_GRACE_S = 10.0  # how long the workers of other nodes have to end by themselves once one has failed


class Listener:
    """Listens on the driver, in a thread, for the tasks of one run. Use it as a context manager.

    Args:
        host: The driver's address, as executors know it.
        heard: Called with every report of a node; from the thread.

    Attributes:
        address: Host and port.
        token: What a task has to say first.
    """

    def __init__(self, host: str, heard: Callable[[dict[str, Any]], None]) -> None:
        self._heard = heard
        self._attempts = 0
        self._stopping: threading.Timer | None = None
        self.token = secrets.token_urlsafe(24)
        self._socket = socket.create_server((host, 0))
        self.address: tuple[str, int] = (host, self._socket.getsockname()[1])
        self._connections: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept, name="evenstep listener", daemon=True)]

    def __enter__(self) -> "Listener":
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        if (timer := self._stopping) is not None:
            timer.cancel()
            timer.join(_LONGEST_S)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for connection in list(self._connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(_LONGEST_S)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            self._connections.add(connection)
            thread = threading.Thread(target=self._serve, args=(connection,), name="evenstep listener", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, ValueError), connection.makefile("rb") as lines:
            said = json.loads(lines.readline(4096))
            if not secrets.compare_digest(str(said.get("token")).encode(), self.token.encode()):
                return
            if said.get("first"):
                self._attempts += 1
            connection.sendall(json.dumps({"attempt": self._attempts}).encode() + b"\n")
            for line in lines:
                report = json.loads(line)
                if report.get("end", {}).get("code") and self._stopping is None:
                    self._stopping = threading.Timer(_GRACE_S, self._stop_all)
                    self._stopping.start()
                self._heard(report)
        self._connections.discard(connection)

    def _stop_all(self) -> None:
        """Let all tasks end their workers: one that has not met the others yet would wait for them for long."""
        self._stopping = None
        for connection in list(self._connections):
            with suppress(OSError):
                connection.sendall(b"stop\n")


class Teller:
    """A task's end of it. Use it as a context manager.

    Args:
        address: Of the listener.
        token: What it wants to hear.
        first: Whether this is the first task of an attempt.

    Attributes:
        attempt: The how many-th attempt this is, from 1.
    """

    def __init__(self, address: tuple[str, int], token: str, *, first: bool) -> None:
        self._socket = socket.create_connection(address, _LONGEST_S)
        self._socket.sendall(json.dumps({"token": token, "first": first}).encode() + b"\n")
        with self._socket.makefile("rb") as lines:
            self.attempt = int(json.loads(lines.readline())["attempt"])

    def __enter__(self) -> "Teller":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def is_told_to_stop(self) -> bool:
        """Whether the driver wants this task's workers to end."""
        if not select.select([self._socket], [], [], 0)[0]:
            return False
        with suppress(OSError):
            return bool(self._socket.recv(4096))
        return False

    def tell(self, report: dict[str, Any]) -> None:
        """Tell the driver; if it does not hear any more, Spark will end this task."""
        with suppress(OSError):
            self._socket.sendall(json.dumps(report).encode() + b"\n")

"""The control socket of a running job: how `evenstep scale` and `evenstep status` reach the supervisor.

It is an abstract Unix socket, so nothing is left of it however the supervisor ends. Its name holds the user and the
process id; only the same user is answered.
"""

import json
import os
import re
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evenstep.core.errors import ConfigError

__all__ = ["Control", "ask"]

_TIMEOUT_S = 1.0
_MOST_BYTES = 65536
_UCRED = struct.Struct("3i")


def _name(pid: int) -> str:
    return f"\0evenstep/{os.getuid()}/{pid}"


class Control:
    """The answering end of a job's socket: its supervisor's, or the job's own.

    Raises:
        OSError: This process already has one open.
    """

    def __init__(self) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.socket.bind(_name(os.getpid()))
            self.socket.listen()
        except OSError:
            self.socket.close()
            raise

    def answer(self, command: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Answer one caller, which has a second to make its request."""
        connection, _ = self.socket.accept()
        with connection:
            connection.settimeout(_TIMEOUT_S)
            try:
                _, user, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
                if user != os.getuid():
                    return
                request = _parsed(connection.recv(_MOST_BYTES))
                answer = command(request) if isinstance(request, dict) else {"error": "expected a JSON object"}
                connection.sendall(json.dumps(answer).encode())
            except OSError:
                return  # a bad caller must not harm the run

    def close(self) -> None:
        """Close the socket and free its name."""
        self.socket.close()


def _parsed(data: bytes) -> Any:
    """A request; None if it is not JSON, or nested too deeply."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def ask(request: dict[str, Any], pid: int | None = None) -> dict[str, Any]:
    """Ask the supervisor of a job of this user.

    Args:
        request: What to ask.
        pid: Which supervisor; None: the only one there is.

    Raises:
        ConfigError: There is none, or more than one, or it does not answer.
    """
    if pid is None:
        pids = _running()
        if len(pids) != 1:
            found = ", ".join(f"{pid} ({_command(pid)})" for pid in pids) or "none"
            raise ConfigError(f"running jobs of this user: {found}; expected one, or choose one with --job PID")
        (pid,) = pids
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(5 * _TIMEOUT_S)
        try:
            connection.connect(_name(pid))
            connection.sendall(json.dumps(request).encode())
            answer: dict[str, Any] = json.loads(b"".join(iter(lambda: connection.recv(_MOST_BYTES), b"")))
        except (OSError, ValueError) as error:
            raise ConfigError(f"no job answers as process {pid} ({error}); `evenstep status` lists them") from error
    if "error" in answer:
        raise ConfigError(answer["error"])
    return answer


def _running() -> list[int]:
    names = re.findall(rf"@evenstep/{os.getuid()}/(\d+)$", Path("/proc/net/unix").read_text(), re.MULTILINE)
    return sorted({int(name) for name in names})


def _command(pid: int) -> str:
    """What a job runs, as typed after `evenstep`, so that a user can tell several apart."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return "it has just ended"
    return " ".join(words[words.index("run") + 1 :] if "run" in words else words)
